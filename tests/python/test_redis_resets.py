"""A Redis that is killed while much is under way resets the connection. uvloop then drops whoever watches it, and tells nobody:
every call is answered all the same, and the loop goes on with the next server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tidegate import Limiter

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Server, server


@pytest.fixture
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_every_call_is_answered_when_redis_is_killed_and_the_loop_finds_it_again(
    run: Callable[[Coroutine[Any, Any, None]], None], redis: Server
) -> None:
    limiter = Limiter("1000000/hour", name="reset", store=f"{redis.uri}?timeout_ms=200")

    async def hit(number: int) -> bool:
        return (await limiter.hit_async(f"k{number % 50}")).degraded

    async def main() -> None:
        for _ in range(6):
            end = asyncio.get_running_loop().time() + 10
            while await hit(0):
                assert asyncio.get_running_loop().time() < end, "the server is back and is not asked"
                await asyncio.sleep(0.02)
            calls = [asyncio.create_task(hit(i)) for i in range(600)]
            await asyncio.sleep(0)
            redis.kill()
            _, left = await asyncio.wait(calls, timeout=10)
            redis.start()
            assert not left, f"{len(left)} calls were never answered"

    run(main())
