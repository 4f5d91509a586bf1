"""Waiting in line: Limiter.wait for threads, wait_async for event loops, on tables and on Redis.

Numbers are held to the reference by the vectors (waiting.txt) and the random traces; here is what needs time and people.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tidegate import Decision, Limiter, ManualClock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "redis"))
from server import Server, server

WAITS = [pytest.param(False, id="wait"), pytest.param(True, id="wait_async")]


def wait(limiter: Limiter, asynchronous: bool, *parts: str, **keywords: object) -> Decision:
    if asynchronous:
        return asyncio.run(limiter.wait_async(*parts, **keywords))  # type: ignore[arg-type]
    return limiter.wait(*parts, **keywords)  # type: ignore[arg-type]


def took(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


@pytest.mark.parametrize("asynchronous", WAITS)
def test_a_wait_sleeps_until_its_place_comes_and_no_shorter(asynchronous: bool) -> None:
    limiter = Limiter("20/second burst 1 token_bucket", name=f"places {asynchronous}", store="memory://wait")
    begun = time.monotonic()
    for place in range(4):
        decision = wait(limiter, asynchronous, "a", timeout=5)
        assert decision and decision.delay <= 0.05
        assert time.monotonic() - begun >= place * 0.05 - 0.0001
    assert decision.delay > 0


@pytest.mark.parametrize("asynchronous", WAITS)
@pytest.mark.parametrize("rules", ["1/hour token_bucket", "1/hour leaky_bucket", "1/hour fixed_window", "1/hour", "1/hour sliding_counter"])
def test_who_cannot_pass_in_time_is_told_so_at_once(rules: str, asynchronous: bool) -> None:
    limiter = Limiter(rules, name=f"late {asynchronous}", store="memory://wait")
    assert limiter.hit("a")
    decisions: list[Decision] = []
    assert took(lambda: decisions.append(wait(limiter, asynchronous, "a", timeout=60))) < 1
    assert not decisions[0] and decisions[0].retry_after > 3000
    assert wait(limiter, asynchronous, "a", cost=2, timeout=None).retry_after == math.inf, "no wait is long enough"
    assert not wait(limiter, asynchronous, "a", timeout=0)
    assert wait(limiter, asynchronous, "b", timeout=0), "timeout 0 is for what passes now"


@pytest.mark.parametrize("asynchronous", WAITS)
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "sliding_counter"])
def test_on_windows_a_wait_sleeps_and_asks_again(algorithm: str, asynchronous: bool) -> None:
    limiter = Limiter(f"2/100 ms {algorithm}", name=f"window {algorithm} {asynchronous}", store="memory://wait")
    begun = time.monotonic()
    for _ in range(5):
        assert wait(limiter, asynchronous, "a", timeout=10)
    assert time.monotonic() - begun >= 0.05, "the counter lets the fifth in after half a window, the others after two"


def test_in_a_leaky_bucket_a_turn_that_comes_too_late_takes_no_place() -> None:
    clock = ManualClock()
    limiter = Limiter("10/second burst 5 leaky_bucket", store="memory://", clock=clock)
    assert limiter.hit("a", cost=2)
    late = limiter.wait("a", timeout=0.1)
    assert not late and late.retry_after == 0.2, "there is room, but its turn is in 0.2 s"
    assert limiter.peek("a").remaining == 3
    assert limiter.wait("a", timeout=0.2).delay == 0.2


@pytest.mark.parametrize("asynchronous", WAITS)
def test_under_a_manual_clock_a_wait_ends_when_its_owner_has_moved_it(asynchronous: bool) -> None:
    clock = ManualClock()
    limiter = Limiter("1/hour token_bucket", store="memory://", clock=clock)
    assert limiter.hit("a")
    mover = threading.Timer(0.05, clock.advance, (3600,))
    mover.start()
    decision = wait(limiter, asynchronous, "a", timeout=4000)
    mover.join()
    assert decision and decision.delay == 3600


def run_together(waits: Callable[[], Awaitable[None]], count: int) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(waits() for _ in range(count)))

    asyncio.run(all_of_them())


def test_who_came_first_goes_first() -> None:
    limiter = Limiter("50/second burst 1 token_bucket", store="memory://line")
    came: list[int] = []

    async def one(number: int) -> None:
        assert await limiter.wait_async("a", timeout=30)
        came.append(number)

    async def line() -> None:
        tasks = []
        for number in range(10):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(line())
    assert came == list(range(10))


def wake(uri: str, count: int, wakes: "multiprocessing.SimpleQueue[float]") -> None:
    limiter = Limiter("50/second burst 1 token_bucket", store=uri)
    for _ in range(count):
        assert limiter.wait("a", timeout=60)
        wakes.put(time.clock_gettime(time.CLOCK_BOOTTIME))


def test_waiters_of_several_processes_keep_one_line(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    wakes = context.SimpleQueue()
    uri = f"shared://{tmp_path}/line"
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    processes = [context.Process(target=wake, args=(uri, 6, wakes)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    woken = sorted(wakes.get() for _ in range(18))
    for place, at in enumerate(woken):
        assert at >= begun + place * 0.02 - 1e-6, f"the {place}th went before {place} places had come free"


def test_a_cancelled_wait_gives_its_place_back() -> None:
    clock = ManualClock()
    limiter = Limiter("1/hour burst 2 token_bucket", store="memory://", clock=clock)
    assert limiter.hit("a", cost=2)

    async def cancelled() -> None:
        task = asyncio.create_task(limiter.wait_async("a", timeout=4000))
        await asyncio.sleep(0.01)
        assert limiter.peek("a").retry_after == 7200, "its place is taken"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert limiter.peek("a").retry_after == 3600
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(limiter.wait_async("a", timeout=4000), 0.01))
    assert limiter.peek("a").retry_after == 3600


class Rung(Exception):
    pass


@pytest.mark.parametrize("rules", ["1/hour token_bucket", "1/hour fixed_window"])
def test_an_exception_of_a_signal_handler_ends_a_wait_and_gives_its_place_back(rules: str) -> None:
    limiter = Limiter(rules, name="signals", store="memory://wait")
    assert limiter.hit("a")
    before = limiter.peek("a").retry_after

    def ring(*_: object) -> None:
        raise Rung

    former = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        begun = time.monotonic()
        with pytest.raises(Rung):
            limiter.wait("a")
        assert time.monotonic() - begun < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert limiter.peek("a").retry_after <= before


def test_other_threads_run_while_one_waits() -> None:
    limiter = Limiter("10/second burst 1 token_bucket", store="memory://threads")
    assert limiter.hit("a")
    over = threading.Event()
    waiter = threading.Thread(target=lambda: (limiter.wait("a", timeout=5), over.set()))
    waiter.start()
    turns = 0
    while not over.is_set():
        turns += 1
    waiter.join()
    assert turns > 100


@pytest.mark.parametrize("asynchronous", WAITS)
def test_wrong_arguments_are_errors(asynchronous: bool) -> None:
    limiter = Limiter("1/second", store="memory://")
    for timeout in (-1, math.nan):
        with pytest.raises(ValueError, match="timeout is in seconds"):
            wait(limiter, asynchronous, "a", timeout=timeout)
    with pytest.raises(TypeError):
        wait(limiter, asynchronous, "a", timeout="1")
    with pytest.raises(TypeError):
        wait(limiter, asynchronous)
    with pytest.raises(TypeError):
        wait(limiter, asynchronous, "a", patience=1)
    with pytest.raises(TypeError):
        wait(limiter, asynchronous, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        wait(limiter, asynchronous, *"abcdefghi")


@pytest.mark.parametrize("asynchronous", WAITS)
def test_a_limiter_that_is_switched_off_lets_nobody_wait(asynchronous: bool) -> None:
    limiter = Limiter("1/hour", store="memory://", enabled=False)
    for _ in range(3):
        assert wait(limiter, asynchronous, "a")


@pytest.mark.parametrize("asynchronous", WAITS)
def test_several_identities_wait_for_the_longest_of_theirs(asynchronous: bool) -> None:
    limiter = Limiter("20/second burst 1 token_bucket", name=f"dims {asynchronous}", store="memory://wait")
    assert limiter.hit(dims={"user": "u"})
    decision = wait(limiter, asynchronous, dims={"user": "u", "ip": "192.0.2.1"}, timeout=5)
    assert decision and 0 < decision.delay <= 0.05
    assert [rule.delay > 0 for rule in decision.rules] == [True, False]


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.mark.parametrize("asynchronous", WAITS)
def test_waits_on_redis_stand_in_one_line(redis: Server, asynchronous: bool) -> None:
    limiter = Limiter("50/second burst 1 token_bucket", name=f"line {asynchronous}", store=redis.patient)
    begun = time.monotonic()
    if asynchronous:
        count = 0

        async def one() -> None:
            nonlocal count
            assert await limiter.wait_async("a", timeout=30)
            count += 1

        run_together(one, 6)
        assert count == 6
    else:
        for _ in range(6):
            assert limiter.wait("a", timeout=30)
    assert time.monotonic() - begun >= 0.1


def test_a_cancelled_wait_on_redis_gives_its_place_back(redis: Server) -> None:
    limiter = Limiter("1/hour burst 2 token_bucket", name="cancelled", store=redis.patient)
    assert limiter.hit("a", cost=2)

    async def cancelled() -> None:
        task = asyncio.create_task(limiter.wait_async("a", timeout=4000))
        while (await limiter.peek_async("a")).retry_after < 7000:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await limiter.peek_async("a")).retry_after > 3601:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(cancelled(), 20))


@pytest.mark.parametrize("times", [1, 2, 10])
def test_a_wait_that_is_cancelled_again_and_again_gives_back_once(redis: Server, times: int) -> None:
    """As anyio does it: a task that does not end at once is cancelled in each turn of the loop."""
    limiter = Limiter("10/hour fixed_window", name=f"again {times}", store=f"{redis.uri}?timeout_ms=2000")

    async def main() -> int:
        await limiter.hit_async("a")
        waits = asyncio.ensure_future(limiter.wait_async("a"))
        await asyncio.sleep(0)
        redis.signal(signal.SIGSTOP)
        for _ in range(times):
            waits.cancel()
            await asyncio.sleep(0.005)
        redis.signal(signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await waits
        return (await limiter.peek_async("a")).remaining

    assert asyncio.run(main()) == 9


def test_a_wait_that_nobody_runs_any_more_gives_back(redis: Server) -> None:
    limiter = Limiter("10/hour fixed_window", name="closed", store=f"{redis.uri}?timeout_ms=2000")

    async def main() -> None:
        await limiter.hit_async("a")
        waits = limiter.wait_async("a").__await__()
        next(waits)
        waits.close()
        for _ in range(200):
            if (await limiter.peek_async("a")).remaining == 9:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("what was taken for a wait that ended was not given back")

    asyncio.run(main())


def test_a_silent_store_keeps_nobody_waiting(redis: Server) -> None:
    with server() as other:
        limiter = Limiter("1/hour", store=other.patient, on_store_failure="closed")
        assert limiter.hit("a")
    begun = time.monotonic()
    decision = limiter.wait("a", timeout=30)
    assert not decision and decision.degraded
    assert time.monotonic() - begun < 5
