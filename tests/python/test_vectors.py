"""The shared vectors (tests/vectors/), answered alike by the reference, by each store through C, and through Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate import Limiter, ManualClock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
import limiters
import traces

CASES = traces.vector_cases()
ASKED_OF_PYTHON = [case for case in CASES if not traces.forces(case)]


def check(case: traces.Case, got: list[str]) -> None:
    asked = traces.asked(case)
    assert len(got) == len(asked)
    for step, numbers in zip(asked, got, strict=True):
        assert numbers.split(" @")[0] == step.expected, step.where


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_reference_gives_the_vector(case: traces.Case) -> None:
    check(case, traces.answers(case))


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_replay_on_a_store_gives_every_vector(kind: str, tmp_path: Path, build: Path, make: Callable[..., None]) -> None:
    program = build / "tests" / "replay"
    make(str(program))
    store = "memory://" if kind == "memory" else f"shared://{tmp_path}/table"
    text = "".join(case.text() for case in CASES)
    done = subprocess.run([program, store], input=text, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = iter(done.stdout.splitlines())
    for case in CASES:
        check(case, [next(lines) for _ in traces.asked(case)])
    assert next(lines, None) is None


@pytest.mark.parametrize("kind", ["memory", "shared"])
@pytest.mark.parametrize("case", ASKED_OF_PYTHON, ids=lambda case: case.title)
def test_python_limiter_gives_the_vector(case: traces.Case, kind: str, tmp_path: Path) -> None:
    store = "memory://vectors" if kind == "memory" else f"shared://{tmp_path}/table"
    check(case, limiters.play(case, Limiter, ManualClock(0), store, name="vector"))
