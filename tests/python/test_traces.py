"""200 000 random decisions, equal to the reference in every number: on the pure functions, on each store through C, and
on each store through Python. Random in everything: algorithm, limit, period, burst, cost, several rules and identities,
times in bunches and back, limits changed on the way, peeks, refunds, resets (tests/reference/traces.py).

The seed is fixed; TIDEGATE_TRACE_SEED gives another. A difference is told as the shortest trace that shows it, in the
format of tests/vectors.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tidegate import Limiter, ManualClock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
import limiters
import traces

SEED = os.environ.get("TIDEGATE_TRACE_SEED", "tidegate")
CASE_COUNT = 2000
ASKED = [500 if i % 40 == 0 else 90 for i in range(CASE_COUNT)]  # long ones now and then: logs of several blocks

Made = list[tuple[traces.Case, list[str]]]
Run = Callable[[list[traces.Case]], list[str]]


@pytest.fixture(scope="module")
def made() -> Made:
    seeds = [f"{SEED}:{i}" for i in range(CASE_COUNT)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(traces.random_case, seeds, ASKED, chunksize=20))


def run_program(*command: object) -> Run:
    def run(cases: list[traces.Case]) -> list[str]:
        text = "".join(case.text() for case in cases)
        done = subprocess.run([*map(str, command)], input=text, capture_output=True, text=True, check=False, timeout=600)
        return [*done.stdout.splitlines(), *done.stderr.splitlines()]

    return run


def compare(made: Made, run: Run, expected_of: Callable[[traces.Case], list[str]] = traces.answers) -> None:
    """`run` answers cases; every answer has to be the expected one."""
    got = iter(run([case for case, _ in made]))
    for case, expected in made:
        if [next(got, "(no answer)") for _ in expected] == expected:
            continue

        def fails(other: traces.Case) -> bool:
            return run([other]) != expected_of(other)

        shown = traces.shortest(case, fails) if fails(case) else case
        pytest.fail(
            f"{case.title} differs. As the reference has it:\n{traces.as_vector(shown)}"
            f"expected {expected_of(shown)}\ngot      {run([shown])}",
            pytrace=False,
        )
    assert next(got, None) is None


def test_random_decisions_are_many_and_of_every_kind(made: Made) -> None:
    answers = [answer for _, expected in made for answer in expected]
    assert len(answers) == sum(ASKED) >= 200_000
    denied = sum(answer.startswith("no") for answer in answers)
    assert len(answers) // 5 < denied < len(answers) // 2
    assert sum("never" in answer for answer in answers) > len(answers) // 100
    text = "".join(case.text() for case, _ in made).lower()
    assert text.count("\nwait ") > len(answers) // 20 and text.count("\nforce ") > 1000
    for word in ("fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket", "aligned", "resolution"):
        assert text.count(word) > CASE_COUNT // 10, word


def test_pure_functions_equal_the_reference(made: Made, build: Path, make: Callable[..., None]) -> None:
    make(str(build / "tests" / "pure"))
    compare(made, run_program(build / "tests" / "pure"))


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_store_through_c_equals_the_reference(
    kind: str, made: Made, tmp_path: Path, build: Path, make: Callable[..., None]
) -> None:
    make(str(build / "tests" / "replay"))
    store = "memory://" if kind == "memory" else f"shared://{tmp_path}/table"
    compare(made, run_program(build / "tests" / "replay", store))


def test_replay_runs_clean_under_sanitizers(made: Made, build: Path, make: Callable[..., None]) -> None:
    program = build / "asan" / "tests" / "replay"
    make(str(program), "asan")
    compare(made[:300], run_program(program, "memory://"))


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_store_through_python_equals_the_reference(kind: str, made: Made, tmp_path: Path) -> None:
    store = "memory://traces" if kind == "memory" else f"shared://{tmp_path}/table"
    clock = ManualClock(0)
    keeper = Limiter("1/s", name="keeper", store=store, clock=clock)  # the store stays open from case to case

    def run(cases: list[traces.Case]) -> list[str]:
        return [line for case in cases for line in limiters.play(case, Limiter, clock, store, name=case.title[-64:])]

    some = [(case, once(case, expected)) for case, expected in made if not traces.forces(case)]
    assert len(some) > CASE_COUNT // 2
    compare(some, run, lambda case: once(case, traces.answers(case)))
    assert keeper.name == "keeper"


def once(case: traces.Case, expected: list[str]) -> list[str]:
    answers, keys, said = iter(expected), ["k"], []
    for step in case.steps:
        if step.verb == "key":
            keys = step.text.split()
        elif step.verb in (*traces.TAKES, "peek"):
            said.append(limiters.answer_once(next(answers), keys))
    return said
