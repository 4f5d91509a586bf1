"""Rows of docs/faults.md about one state in several processes, as a user of the Python package meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tidegate import Limiter, ManualClock

HITTER = """
import sys, time
from tidegate import Limiter
limiter = Limiter(sys.argv[1], name="programs", store=sys.argv[2])
end = time.clock_gettime(time.CLOCK_BOOTTIME) + float(sys.argv[3])
while (before := time.clock_gettime(time.CLOCK_BOOTTIME)) < end:
    if limiter.hit("one"):
        print(before, time.clock_gettime(time.CLOCK_BOOTTIME))
"""
TAKER = """
import sys
from tidegate import Limiter
limiter = Limiter("5/hour", name="workers")  # neither a store nor a service is named
print([(bool(decision), decision.remaining) for decision in (limiter.hit("one") for _ in range(int(sys.argv[1])))])
"""


@pytest.mark.fault("R05")
@pytest.mark.parametrize("store", ["memory://ticks", "shared"])
def test_hits_of_one_microsecond_all_count(store: str, tmp_path: Path) -> None:
    uri = store if "://" in store else f"shared://{tmp_path}/ticks?size=64KiB"
    clock = ManualClock(1_700_000_000_000_000)
    limiter = Limiter("3/10s sliding_log", name="ticks", store=uri, clock=clock)
    decisions = [limiter.hit("one") for _ in range(10)]
    assert [bool(decision) for decision in decisions] == [True] * 3 + [False] * 7
    assert [decision.remaining for decision in decisions] == [2, 1] + [0] * 8
    clock.advance_us(10_000_000 - 1)
    assert not limiter.hit("one")
    clock.advance_us(1)
    assert limiter.hit("one").remaining == 2


@pytest.mark.fault("R07")
def test_two_unrelated_programs_never_get_one_hit_too_many(tmp_path: Path) -> None:
    """The report's case, thirty times as fast: a short and a long limit together, over two long periods."""
    rules, period, limit = "2/33ms; 60/2s", 2.0, 60
    store = f"shared://{tmp_path}/programs?size=1MiB"
    programs = [
        subprocess.Popen([sys.executable, "-c", HITTER, rules, store, "5"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    hits = []
    for program in programs:
        said, _ = program.communicate(timeout=60)
        assert program.returncode == 0
        hits += [tuple(map(float, line.split())) for line in said.splitlines()]
    assert len(hits) >= 2 * limit
    for start, _ in hits:
        # The store's own time of a hit lies between its two: these were surely all within one period.
        assert sum(start <= before and after < start + period for before, after in hits) <= limit


@pytest.mark.fault("R163")
def test_the_default_store_needs_no_service_and_outlives_a_worker(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    (tmp_path / "tidegate").mkdir(mode=0o700)
    if Path("/run/tidegate").exists():
        pytest.skip("/run/tidegate is there: the default store is the machine's own")

    def worker(hits: int) -> list[tuple[bool, int]]:
        done = subprocess.run(
            [sys.executable, "-c", TAKER, str(hits)], env=environment, capture_output=True, text=True, check=True
        )
        return eval(done.stdout)  # type: ignore[no-any-return]  # our own list of pairs

    assert worker(3) == [(True, 4), (True, 3), (True, 2)]
    assert worker(3) == [(True, 1), (True, 0), (False, 0)]
    assert any(path.is_file() for path in (tmp_path / "tidegate").iterdir()), "it lies where the documentation says"
