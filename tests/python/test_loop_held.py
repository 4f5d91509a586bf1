"""How long one turn of the event loop is held while 4096 calls wait for a remote store and all are answered, given up or lost
at one instant. In CPU time of the loop's thread, so that it is strict whatever else the machine does."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tidegate import Decision, Limiter

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from cluster import Cluster, cluster
from server import Lateness, Server, free_port, server
from tls import Certificates, tls_server

MOST = 0.005  # seconds that a turn of the loop may be held
PENDING = 4096  # as many as may wait
RULES = "1000000/day fixed_window"
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture(autouse=True)
def collector_rests() -> Iterator[None]:
    """A full collection over all that the tests have imported takes longer than what is measured, and is not ours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Turns:
    """The CPU time of the longest turn of the running loop."""

    async def __aenter__(self) -> Turns:
        self.longest = 0.0
        self.count = 0
        self.ticking = asyncio.ensure_future(self.tick())
        await asyncio.sleep(0)
        return self

    async def tick(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest = max(self.longest, now - last)
            self.count += 1
            last = now

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)
        self.ticking.cancel()


async def ask(limiter: Limiter, count: int = PENDING) -> list[Awaitable[Decision]]:
    """So many calls under way, begun a few in a turn."""
    begun = []
    for number in range(count):
        begun.append(limiter.hit_async(f"client {number % 100}"))
        if number % 64 == 63:
            await asyncio.sleep(0)
    return begun


async def all_of(calls: list[Awaitable[Decision]]) -> list[Decision]:
    """Without a turn in which all of them are looked at."""
    return [await call for call in calls]


async def connected(limiter: Limiter) -> None:
    await asyncio.sleep(0.02)
    assert not (await limiter.hit_async("a")).degraded


@contextmanager
def stopped(*servers: Server) -> Iterator[None]:
    for one in servers:
        one.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in servers:
            one.signal(signal.SIGCONT)


@pytest.mark.fault("R113")
def test_4096_calls_whose_deadline_comes_at_once_hold_no_turn_for_more_than_5_ms(run: Run) -> None:
    with server() as redis:
        limiter = Limiter(RULES, store=f"{redis.uri}?timeout_ms=300")

        async def main() -> None:
            await connected(limiter)
            with stopped(redis), Lateness() as late:
                async with Turns() as turns:
                    calls = await ask(limiter)
                    begun = time.monotonic()
                    decisions = await all_of(calls)
                    took = time.monotonic() - begun
                assert all(one.allowed and one.degraded for one in decisions)
                assert turns.longest <= MOST and turns.count > PENDING / 256
                # The last one: 4096 coroutines have gone on by then.
                assert await asyncio.to_thread(late.allows, took, 0.3 + 0.01 + 0.1), took

        run(main())


def test_4096_answers_in_one_burst_hold_no_turn_for_more_than_5_ms(run: Run) -> None:
    with server() as redis:
        limiter = Limiter(RULES, store=redis.patient)

        async def main() -> None:
            await connected(limiter)
            with stopped(redis):
                calls = await ask(limiter)
                await asyncio.sleep(0.01)
            async with Turns() as turns:
                decisions = await all_of(calls)
            assert not any(one.degraded for one in decisions)
            assert turns.longest <= MOST

        run(main())


def test_answers_that_lie_there_when_their_deadline_has_passed_are_heard_and_hold_no_turn_for_more_than_5_ms(
    run: Run,
) -> None:
    with server() as redis:
        limiter = Limiter(RULES, store=f"{redis.uri}?timeout_ms=200")

        async def main() -> None:
            await connected(limiter)
            with stopped(redis):
                calls = await ask(limiter, 512)  # as many as a socket holds, whoever reads it
            time.sleep(0.3)  # the loop is held up by somebody else
            async with Turns() as turns:
                decisions = await all_of(calls)
            assert not any(one.degraded for one in decisions)
            assert turns.longest <= MOST

        run(main())


def test_a_connection_lost_under_4096_calls_holds_no_turn_for_more_than_5_ms(run: Run) -> None:
    with server() as redis:
        limiter = Limiter(RULES, store=redis.patient)

        async def main() -> None:
            await connected(limiter)
            redis.signal(signal.SIGSTOP)
            calls = await ask(limiter)
            await asyncio.sleep(0.01)
            async with Turns() as turns:
                redis.kill()
                decisions = await all_of(calls)
            assert all(one.allowed and one.degraded for one in decisions)
            assert turns.longest <= MOST
            redis.start()

        run(main())


def test_connecting_and_greeting_for_4096_calls_that_wait_for_it_hold_no_turn_for_more_than_5_ms(run: Run) -> None:
    with server() as redis:
        limiter = Limiter(RULES, store=redis.patient)

        async def main() -> None:
            with stopped(redis):
                async with Turns() as turns:
                    calls = await ask(limiter)
                redis.signal(signal.SIGCONT)
            async with Turns() as after:
                decisions = await all_of(calls)
            assert not any(one.degraded for one in decisions)
            assert max(turns.longest, after.longest) <= MOST

        run(main())


def test_tls_with_4096_calls_holds_no_turn_for_more_than_5_ms(run: Run, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    redis, port = tls_server(certificates)
    try:
        limiter = Limiter(RULES, store=f"rediss://127.0.0.1:{port}?ca={certificates.path('ca.crt')}&timeout_ms=2000")

        async def main() -> None:
            async with Turns() as greeting:
                await connected(limiter)
            with stopped(redis):
                calls = await ask(limiter)
                await asyncio.sleep(0.01)
            async with Turns() as turns:
                decisions = await all_of(calls)
            assert not any(one.degraded for one in decisions)
            assert max(turns.longest, greeting.longest) <= MOST

        run(main())
    finally:
        redis.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with cluster() as one:
        yield one


@pytest.mark.parametrize("ends", ["answered", "late"])
def test_a_cluster_with_4096_calls_holds_no_turn_for_more_than_5_ms(run: Run, nodes: Cluster, ends: str) -> None:
    limiter = Limiter(RULES, store=f"{nodes.uri.partition('?')[0]}?timeout_ms={400 if ends == 'late' else 2000}")

    async def main() -> None:
        async with Turns() as first:
            calls = await ask(limiter)  # nobody knows yet who has which slot
            decisions = await all_of(calls)
        assert not any(one.degraded for one in decisions)
        with stopped(*nodes.running):
            async with Turns() as turns:
                calls = await ask(limiter)
                if ends == "late":
                    decisions = await all_of(calls)
        async with Turns() as after:
            if ends == "answered":
                decisions = await all_of(calls)
        assert all(one.degraded == (ends == "late") for one in decisions)
        assert max(first.longest, turns.longest, after.longest) <= MOST

    run(main())
