"""The Redis store answers as the reference does: the shared vectors, random traces with the bounds' largest numbers, through
C and through Python, under a manual clock (the scripts then take the time from the call, under keys of their own). With tiers
before it as well: what the deny cache answers is what Redis would."""

from __future__ import annotations

import functools
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tidegate import Limiter, ManualClock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "reference"), str(TESTS / "redis")]
import limiters
import traces
from server import Server, server
from test_traces import SEED, Made, compare, once, run_program

CASE_COUNT = 1000
ASKED_PER_CASE = 100
# Lua's numbers are doubles: a clock is told up to 2^53 less two of the longest periods (the year 2235).
CLOCK_MAX = 2**53 - 1 - 2 * traces.PERIOD_MAX


def within_clock(case: traces.Case) -> bool:
    return all(step.at <= CLOCK_MAX for step in case.steps)


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


TIERS = pytest.mark.parametrize("tiers", ["", "tiered+"])

calls: dict[str, int] = {}


def scripts_called(redis: Server) -> int:
    text = redis("INFO", "commandstats")
    assert isinstance(text, bytes)
    return sum(int(line.split(b"calls=")[1].split(b",")[0]) for line in text.splitlines() if line.startswith(b"cmdstat_eval"))


@pytest.fixture(scope="module")
def made() -> Made:
    seeds = [f"redis {SEED}:{i}" for i in range(CASE_COUNT)]
    make = functools.partial(traces.random_case, asked_count=ASKED_PER_CASE)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        cases = [(case, answers) for case, answers in pool.map(make, seeds, chunksize=20) if within_clock(case)]
    assert len(cases) > CASE_COUNT // 2
    return cases


@TIERS
def test_vectors_hold_on_redis(tiers: str, redis: Server, build: Path, make: Callable[..., None]) -> None:
    make(str(build / "tests" / "replay"))
    cases = [(case, traces.answers(case)) for case in traces.vector_cases()]
    assert len(cases) > 30
    compare(cases, run_program(build / "tests" / "replay", tiers + redis.patient))


@TIERS
def test_redis_through_c_equals_the_reference(
    tiers: str, redis: Server, made: Made, build: Path, make: Callable[..., None]
) -> None:
    make(str(build / "tests" / "replay"))
    before = scripts_called(redis)
    compare(made, run_program(build / "tests" / "replay", tiers + redis.patient))
    calls[tiers] = scripts_called(redis) - before
    if tiers and "" in calls:
        assert calls[tiers] < calls[""] * 0.98, "the deny cache answers some of them"
    assert not redis.keys(), "a case's reset leaves nothing"


@TIERS
def test_redis_under_sanitizers_equals_the_reference(
    tiers: str, redis: Server, made: Made, build: Path, make: Callable[..., None]
) -> None:
    program = build / "asan" / "tests" / "replay"
    make(str(program), "asan")
    compare(made[:100], run_program(program, tiers + redis.patient))


@TIERS
def test_redis_through_python_equals_the_reference(tiers: str, redis: Server, made: Made) -> None:
    store = tiers + redis.patient
    clock = ManualClock(0)
    keeper = Limiter("1/s", name="keeper", store=store, clock=clock)  # the store stays open from case to case

    def run(cases: list[traces.Case]) -> list[str]:
        return [line for case in cases for line in limiters.play(case, Limiter, clock, store, name=case.title[-64:])]

    some = [(case, expected) for case, expected in made[:250] if not traces.forces(case)]
    assert len(some) > 150
    compare([(case, once(case, expected)) for case, expected in some], run, lambda case: once(case, traces.answers(case)))
    assert keeper.name == "keeper"
    assert all(left > 0 for left in redis.keys().values())


@TIERS
def test_a_log_with_a_resolution_never_admits_more_than_the_exact_one_and_is_shorter(tiers: str, redis: Server) -> None:
    clock, random_ = ManualClock(1_700_000_000_000_000), random.Random(7)
    store = tiers + redis.patient
    exact = Limiter("40/second sliding_log", name=f"exact{tiers}", store=store, clock=clock)
    coarse = Limiter("40/second sliding_log resolution 100ms", name=f"coarse{tiers}", store=store, clock=clock)
    admitted: list[int] = []
    of_exact = 0
    for _ in range(2000):
        clock.advance_us(random_.choice([0, 1, 999, 5_000, 20_000, 60_000]))
        of_exact += bool(exact.hit("a"))
        if coarse.hit("a"):
            admitted.append(clock.now_us)
        assert len(admitted) <= of_exact
        assert sum(at > clock.now_us - 1_000_000 for at in admitted[-41:]) <= 40
    assert len(admitted) > of_exact * 0.8  # and not many fewer
    link = redis.connect()
    (longest,) = link("KEYS", f"tg1m:*:coarse{'tiered%2b' if tiers else ''}:*")  # type: ignore[misc]
    assert link("LLEN", longest) <= 10 + 1 + 9  # entries of a period, the mark before them, those that left and are not trimmed
    link.close()
    exact.reset("a")
    coarse.reset("a")
