"""Waiting in line on an event loop: Limiter.wait_async.

As python/ext/wait.c does it for threads: a bucket's place is taken at once and slept for once; on windows and logs the hit is
tried again. What was taken for somebody who is cancelled is given back.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from tidegate._core import Decision, Limiter, StoreError, hit_within, limiter_kind

_Part: TypeAlias = str | bytes

_FOREVER_US = 2**53 - 1
_MANUAL_SLICE = 0.002


class _Since:
    """Time passed: under a manual clock that of the clock, if its owner moves it faster."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.real = time.monotonic()
        self.manual = limiter_kind(limiter)[1]

    def us(self) -> int:
        real = int((time.monotonic() - self.real) * 1e6)
        if self.manual is None:
            return real
        now = limiter_kind(self.limiter)[1]
        return max(real, (now or 0) - self.manual)

    async def reaches(self, us: int) -> None:
        while (left := us - self.us()) > 0:
            await asyncio.sleep(left / 1e6 if self.manual is None else min(left / 1e6, _MANUAL_SLICE))


def _give_back(decision: Decision) -> None:
    try:
        decision.refund()
    except StoreError:
        pass  # a silent store: nobody is left to be told


async def _off_loop(call: Callable[[], Decision]) -> Decision:
    """In a thread of the loop's pool. Who is cancelled meanwhile has taken nothing in the end."""
    loop = asyncio.get_running_loop()
    under_way = loop.run_in_executor(None, call)
    try:
        return await asyncio.shield(under_way)
    except asyncio.CancelledError:

        def end(done: asyncio.Future[Decision]) -> None:
            if not done.cancelled() and done.exception() is None and done.result():
                loop.run_in_executor(None, _give_back, done.result())

        under_way.add_done_callback(end)
        raise


async def wait_async(
    limiter: Limiter,
    *parts: _Part,
    cost: int = 1,
    timeout: float | None = None,
    dims: Mapping[str, _Part | tuple[_Part, ...]] | None = None,
) -> Decision:
    """Limiter.wait for asyncio."""
    if timeout is not None and not timeout >= 0:
        raise ValueError("timeout is in seconds, 0 or more; None: as long as it takes")
    most = _FOREVER_US if timeout is None else int(min(timeout * 1e6, _FOREVER_US))
    remote = limiter_kind(limiter)[0]
    begun = _Since(limiter)
    left = most
    while True:
        hit = functools.partial(hit_within, limiter, max(1, left), *parts, cost=cost, dims=dims)
        decision = await _off_loop(hit) if remote else hit()
        if decision:
            try:
                await _Since(limiter).reaches(decision.delay_us)
            except BaseException:
                if remote:
                    asyncio.get_running_loop().run_in_executor(None, _give_back, decision)
                else:
                    _give_back(decision)
                raise
            return decision
        retry = decision.retry_after_us
        if decision.degraded or retry is None or retry > left:
            return decision
        jitter = random.uniform(0, max(1000, min(retry / 8, 100_000)))
        await _Since(limiter).reaches(min(retry + int(jitter), left))
        left = max(0, most - begun.us())
