"""Waiting in line on an event loop: Limiter.wait_async.

As python/ext/wait.c does it for threads: a bucket's place is taken at once and slept for once; on windows and logs the hit is
tried again. What was taken for somebody who is cancelled is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from typing import TypeAlias

from tidegate._core import Decision, Limiter, StoreError, hit_within, hit_within_async, limiter_kind

_Part: TypeAlias = str | bytes
_Dims: TypeAlias = Mapping[str, _Part | tuple[_Part, ...]] | None

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


async def _give_back(decision: Decision) -> None:
    with contextlib.suppress(StoreError):  # a silent store: who was cancelled is not told of that
        await decision.refund_async()


async def _hit(limiter: Limiter, remote: bool, patience: int, parts: tuple[_Part, ...], cost: int, dims: _Dims) -> Decision:
    if not remote:
        return hit_within(limiter, patience, *parts, cost=cost, dims=dims)
    under_way = asyncio.ensure_future(hit_within_async(limiter, patience, *parts, cost=cost, dims=dims))
    try:
        return await asyncio.shield(under_way)
    except asyncio.CancelledError:
        while not under_way.done():  # until its deadline, however often that is cancelled too, as anyio does each turn
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([under_way])
        if decision := under_way.result():
            await _give_back(decision)
        raise
    except GeneratorExit:  # nothing can be awaited any more, but the loop may go on
        with contextlib.suppress(RuntimeError):  # it is closed
            under_way.add_done_callback(_give_back_of)
        raise


def _give_back_of(hit: asyncio.Future[Decision]) -> None:
    if not hit.cancelled() and hit.exception() is None and (decision := hit.result()):
        asyncio.ensure_future(_give_back(decision))


async def wait_async(
    limiter: Limiter,
    *parts: _Part,
    cost: int = 1,
    timeout: float | None = None,
    dims: _Dims = None,
) -> Decision:
    """Limiter.wait for asyncio."""
    if timeout is not None and not timeout >= 0:
        raise ValueError("timeout is in seconds, 0 or more; None: as long as it takes")
    most = _FOREVER_US if timeout is None else int(min(timeout * 1e6, _FOREVER_US))
    remote = limiter_kind(limiter)[0]
    begun = _Since(limiter)
    left = most
    while True:
        decision = await _hit(limiter, remote, max(1, left), parts, cost, dims)
        if decision:
            try:
                await _Since(limiter).reaches(decision.delay_us)
            except asyncio.CancelledError:
                await _give_back(decision)
                raise
            except GeneratorExit:  # nothing can be awaited any more
                with contextlib.suppress(StoreError):
                    decision.refund()
                raise
            return decision
        retry = decision.retry_after_us
        if decision.degraded or retry is None or retry > left:
            return decision
        jitter = random.uniform(0, max(1000, min(retry / 8, 100_000)))
        await _Since(limiter).reaches(min(retry + int(jitter), left))
        left = max(0, most - begun.us())
