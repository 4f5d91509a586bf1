"""Rows of docs/faults.md about counting under concurrency and in several processes, on Redis; on a table they are held by
test_faults_sharing.py, test_table_processes.py and tests/fault."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate import Limiter, ManualClock

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Server, server

ALGORITHMS = pytest.mark.parametrize(
    "algorithm", ["fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket"]
)


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture(autouse=True)
def empty(redis: Server) -> None:
    redis("FLUSHALL")


def server_seconds(redis: Server) -> float:
    seconds, microseconds = redis("TIME")  # type: ignore[misc]
    return int(seconds) + int(microseconds) / 1e6


@pytest.mark.fault("R02")
@ALGORITHMS
def test_of_a_hundred_requests_released_together_redis_lets_five_pass(redis: Server, algorithm: str) -> None:
    one = Limiter(f"5/1s {algorithm}", name="burst", store=f"{redis.patient}&connections=10", clock=ManualClock(10**15))
    gate = threading.Barrier(100)

    def ask() -> bool:
        gate.wait()
        decision = one.hit("a")
        assert not decision.degraded
        return bool(decision)

    with ThreadPoolExecutor(100) as pool:
        futures = [pool.submit(ask) for _ in range(100)]
        assert sum(future.result() for future in futures) == 5


def hit_for(store: str, rules: str, seconds: float) -> int:
    limiter = Limiter(rules, name="pool", store=store)
    admitted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        decision = limiter.hit("one")
        assert not decision.degraded
        admitted += decision.allowed
    return admitted


@pytest.mark.fault("R04")
def test_sixteen_processes_on_one_key_get_its_rate_and_its_burst_from_redis(redis: Server) -> None:
    begun = server_seconds(redis)
    with multiprocessing.get_context("fork").Pool(16) as pool:
        work = [(redis.patient, "100/s burst 1 token_bucket", 2.0)] * 16
        admitted = sum(pool.starmap(hit_for, work, chunksize=1))
    assert 100 < admitted <= 100 * (server_seconds(redis) - begun) + 1


@pytest.mark.fault("R05")
def test_hits_of_one_microsecond_all_count_in_redis(redis: Server) -> None:
    clock = ManualClock(1_700_000_000_000_000)
    limiter = Limiter("3/10s sliding_log", name="ticks", store=redis.patient, clock=clock)
    decisions = [limiter.hit("one") for _ in range(10)]
    assert [bool(decision) for decision in decisions] == [True] * 3 + [False] * 7
    assert [decision.remaining for decision in decisions] == [2, 1] + [0] * 8
    clock.advance_us(10_000_000 - 1)
    assert not limiter.hit("one")
    clock.advance_us(1)
    assert limiter.hit("one").remaining == 2


@pytest.mark.fault("R08")
@ALGORITHMS
def test_keys_that_vanish_from_redis_between_two_hits_are_fresh_ones(redis: Server, algorithm: str) -> None:
    limiter = Limiter(f"1000/hour {algorithm}", name="vanish", store=redis.patient)
    assert limiter.hit("one").remaining == 999
    (key,) = redis.keys()
    over = threading.Event()
    deleted = 0

    def delete() -> None:
        nonlocal deleted
        link = redis.connect()
        while not over.is_set():
            gone = link("DEL", key)
            assert isinstance(gone, int)
            deleted += gone
        link.close()

    deleting = threading.Thread(target=delete)
    deleting.start()
    decisions = [limiter.hit("one") for _ in range(2000)]
    over.set()
    deleting.join()
    assert not any(decision.degraded for decision in decisions)
    assert all(decision.allowed for decision in decisions)
    assert deleted > 20
    assert sum(decision.remaining == 999 for decision in decisions) >= deleted - 1, "after each of them it began anew"
    redis("DEL", key)
    assert limiter.hit("one").remaining == 999


@pytest.mark.fault("R155")
@pytest.mark.parametrize(("method", "workers"), [("fork", 40), ("spawn", 6)])
def test_a_pool_admits_from_redis_what_one_process_would(redis: Server, method: str, workers: int) -> None:
    keeper = Limiter("7/second", name="pool", store=redis.patient)  # forked with a connection that is open
    begun = server_seconds(redis)
    admitted = keeper.hit("one").allowed
    with multiprocessing.get_context(method).Pool(workers) as pool:
        admitted += sum(pool.starmap(hit_for, [(redis.patient, "7/second", 2.0)] * workers, chunksize=1))
    assert 7 <= admitted <= 7 * (server_seconds(redis) - begun + 1)


@pytest.mark.fault("R157")
def test_a_hundred_threads_on_redis_start_one_thread_of_ours_and_meet_no_error(redis: Server) -> None:
    limiter = Limiter("1000/hour", name="threads", store=redis.patient)
    limiter.hit("warm")
    before = len(os.listdir("/proc/self/task"))
    most = before

    def work() -> int:
        nonlocal most
        admitted = sum(limiter.hit("one").allowed for _ in range(30))
        most = max(most, len(os.listdir("/proc/self/task")))
        return admitted

    with ThreadPoolExecutor(100) as pool:
        admitted = list(pool.map(lambda _: work(), range(100)))
        assert sum(admitted) == 1000
    assert most <= before + 100 + 1, "the one that carries counts may just have begun"
