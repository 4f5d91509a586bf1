"""tests/vectors/ through Python, on both embedded stores, under a manual clock: no line sleeps."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tidegate import Decision, Limiter, ManualClock
from tidegate._core import hit_within

VECTORS = pathlib.Path(__file__).resolve().parents[1] / "vectors"


@dataclass
class Case:
    title: str
    lines: list[tuple[int, str]] = field(default_factory=list)


def cases() -> Iterator[object]:
    for path in sorted(VECTORS.glob("*.txt")):
        if path.name == "forced.txt":
            continue  # what no caller of a limiter can do just so; the C programs do
        case: Case | None = None
        for number, line in enumerate(path.read_text().splitlines(), 1):
            word, _, rest = line.strip().partition(" ")
            if not word or word.startswith("#"):
                continue
            if word == "case":
                case = Case(rest)
                yield pytest.param(path.name, case, id=f"{path.stem}: {rest}")
            else:
                assert case is not None, f"{path}:{number}: no case yet"
                case.lines.append((number, line.strip()))



def numbers(decision: Decision) -> str:
    retry = "never" if decision.retry_after_us is None else decision.retry_after_us
    return (
        f"{'yes' if decision else 'no'} {decision.remaining} {retry} {decision.reset_after_us} {decision.delay_us}"
    )


@pytest.mark.parametrize("store", ["memory://vectors", "shared://{folder}/table?size=1MiB"], ids=["memory", "shared"])
@pytest.mark.parametrize(("file", "case"), list(cases()))
@pytest.mark.fault("R169")
def test_every_vector_gives_its_numbers_through_python(file: str, case: Case, store: str, tmp_path: pathlib.Path) -> None:
    clock = ManualClock(0)
    hits: list[Decision] = []
    one: Limiter | None = None
    origin_us = 0
    uri = store.format(folder=tmp_path)
    for number, line in case.lines:
        word, _, rest = line.partition(" ")
        left, _, expected = rest.partition(" = ")
        if word == "rule":
            one = Limiter(rest, store=uri, clock=clock)
            continue
        if word == "offset":
            # A manual clock's distance to UTC is 0: the clock itself is set that far on, which no other number shows.
            origin_us = int(rest)
            continue
        assert one is not None
        at, _, value = left.partition(" ")
        clock.now_us = origin_us + int(at)
        if word == "hit":
            hits.append(one.hit("key", cost=int(value)))
            assert numbers(hits[-1]) == expected, f"{file}:{number}: {line}"
        elif word == "wait":
            cost, patience = value.split()
            hits.append(hit_within(one, int(patience), "key", cost=int(cost)))
            assert numbers(hits[-1]) == expected, f"{file}:{number}: {line}"
        elif word == "peek":
            assert numbers(one.peek("key", cost=int(value))) == expected, f"{file}:{number}: {line}"
        elif word == "refund":
            one.refund("key", cost=int(value))
        elif word == "undo":
            hits[int(value) - 1].refund()
        elif word == "reset":
            one.reset("key")
        else:
            pytest.fail(f"{file}:{number}: unknown line {line!r}")


def test_there_are_vectors_of_every_algorithm() -> None:
    assert {path.stem for path in VECTORS.glob("*.txt")} >= {
        "fixed_window",
        "leaky_bucket",
        "several_rules",
        "sliding_counter",
        "sliding_log",
        "token_bucket",
        "waiting",
    }
