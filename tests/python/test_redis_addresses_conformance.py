"""The answers of the reference, from a cluster, whose slots share out a trace's identities, and from a master that a sentinel
names: the same vectors and random traces as on one server (test_redis_conformance.py), with the deny cache before it too."""

from __future__ import annotations

import functools
import multiprocessing
import shutil
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
from cluster import Cluster, cluster
from sentinel import Site, site
from server import Server
from test_redis_conformance import within_clock
from test_traces import SEED, Made, compare, once, run_program

CASE_COUNT = 250
ASKED_PER_CASE = 100
TIERS = pytest.mark.parametrize("tiers", ["", "tiered+"])


@pytest.fixture(scope="module", params=["cluster", "sentinel"])
def redis(request: pytest.FixtureRequest) -> Iterator[Cluster | Site]:
    with cluster() if request.param == "cluster" else site() as one:
        yield one


@pytest.fixture(scope="module")
def made() -> Made:
    seeds = [f"addresses {SEED}:{i}" for i in range(CASE_COUNT)]
    make = functools.partial(traces.random_case, asked_count=ASKED_PER_CASE)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        cases = [(case, answers) for case, answers in pool.map(make, seeds, chunksize=20) if within_clock(case)]
    assert len(cases) > CASE_COUNT // 2
    return cases


def test_vectors_hold_behind_every_address(redis: Cluster | Site, build: Path, make: Callable[..., None]) -> None:
    make(str(build / "tests" / "replay"))
    cases = [(case, traces.answers(case)) for case in traces.vector_cases()]
    assert len(cases) > 30
    compare(cases, run_program(build / "tests" / "replay", redis.patient))


@TIERS
def test_random_traces_equal_the_reference_behind_every_address(
    tiers: str, redis: Cluster | Site, made: Made, build: Path, make: Callable[..., None]
) -> None:
    make(str(build / "tests" / "replay"))
    compare(made, run_program(build / "tests" / "replay", tiers + redis.patient))
    assert not redis.keys(), "a case's reset leaves nothing"


def test_through_python_they_equal_the_reference_too(redis: Cluster | Site, made: Made) -> None:
    clock = ManualClock(0)
    keeper = Limiter("1/s", name="keeper", store=redis.patient, clock=clock)  # the store stays open from case to case

    def run(cases: list[traces.Case]) -> list[str]:
        return [line for case in cases for line in limiters.play(case, Limiter, clock, redis.patient, name=case.title[-64:])]

    some = [(case, expected) for case, expected in made[:100] if not traces.forces(case)]
    assert len(some) > 50
    compare([(case, once(case, expected)) for case, expected in some], run, lambda case: once(case, traces.answers(case)))
    assert keeper.name == "keeper"
    assert all(left > 0 for left in redis.keys().values())


@pytest.mark.fault("R152")
def test_every_server_that_is_installed_answers_one_trace_alike(build: Path, make: Callable[..., None]) -> None:
    """Debian 12 has Redis 7; in the root of make test-debian13 there are Redis 8 and Valkey 8."""
    make(str(build / "tests" / "replay"))
    case, answers = traces.random_case("every server", 500)
    programs = [found for name in ("redis-server", "valkey-server") if (found := shutil.which(name))]
    assert programs
    for program in programs:
        one = Server(program=program)
        try:
            compare([(case, answers)], run_program(build / "tests" / "replay", one.patient))
        finally:
            one.close()
