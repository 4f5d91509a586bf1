"""Units taken on an estimate and settled later: Limiter.reserve."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, final

from tidegate import _core

if TYPE_CHECKING:
    from tidegate._core import Decision, Hold, Limiter

_Part: TypeAlias = str | bytes


@final
class Reservation:
    """What `limiter.reserve(...)` gives: a context manager for `with` and `async with`, once.

        with limiter.reserve(user, cost=4000) as reservation:
            if not reservation:
                return refuse(reservation.decision.retry_after)
            answer = ask_model(...)
            reservation.settle(answer.tokens)

    Entering takes `cost` units, all or none, and holds them for `lease` seconds. `settle` makes it what it really was. Left
    by an exception, all is given back; left without a word, the estimate stands. What is neither, because the process died
    or forgot, comes back when the lease ends; a settlement after that takes all it says.
    """

    __slots__ = ("_actual", "_cost", "_dims", "_hold", "_lease", "_limiter", "_off_loop", "_parts")

    def __init__(
        self,
        limiter: Limiter,
        *parts: _Part,
        cost: int = 1,
        lease: float = 60.0,
        dims: Mapping[str, _Part | tuple[_Part, ...]] | None = None,
    ) -> None:
        self._limiter = limiter
        self._parts = parts
        self._cost = cost
        self._lease = lease
        self._dims = dims
        self._hold: Hold | None = None
        self._off_loop = False  # on an event loop, and the store is asked over a network
        self._actual: int | None = None  # to be settled when it is left

    @property
    def decision(self) -> Decision:
        """Of the hit that took the units. Its refund() does nothing: settle(0) gives them back."""
        return self._held().decision

    def __bool__(self) -> bool:
        """Whether the units were taken, or on_store_failure lets through."""
        return self._held().decision.allowed

    def settle(self, actual: int) -> bool:
        """Makes it `actual` units: gives back what was too much or takes what was too little, beyond the limit if it must.
        A second call does nothing.

        False: the store did not answer, and the units come back when the lease ends; or this is a child forked since: only
        the process that has reserved settles, by this or by leaving its block. On a store that is asked over a
        network, inside of `async with`, it is done when the block is left; settle_async() does it now.
        """
        hold = self._held()
        if not self._off_loop or not hold.held:
            return hold.settle(actual)
        if not isinstance(actual, int) or isinstance(actual, bool):
            raise TypeError(f"actual must be an int, not {type(actual).__name__}")
        if not 0 <= actual <= 10**10:
            raise ValueError("actual must be 0 to 10**10")
        if self._actual is None:
            self._actual = actual
        return True

    async def settle_async(self, actual: int) -> bool:
        """settle() for async code."""
        hold = self._held()
        return await _elsewhere(functools.partial(hold.settle, actual)) if self._off_loop else hold.settle(actual)

    def renew(self, lease: float) -> bool:
        """Moves the lease's end to `lease` seconds from now. False: it has ended or is settled, or the store did not answer, or
        another process has reserved."""
        return self._held().renew(lease)

    async def renew_async(self, lease: float) -> bool:
        """renew() for async code."""
        hold = self._held()
        return await _elsewhere(functools.partial(hold.renew, lease)) if self._off_loop else hold.renew(lease)

    def _held(self) -> Hold:
        if self._hold is None:
            raise RuntimeError("a reservation is made by entering it: `with limiter.reserve(...) as reservation`")
        return self._hold

    def _take(self) -> Hold:
        return _core.reserve(self._limiter, self._lease, *self._parts, cost=self._cost, dims=self._dims)

    def _enter_once(self) -> None:
        if self._hold is not None:
            raise RuntimeError("a reservation is entered once: call limiter.reserve() again")

    def _last_word(self, failed: bool) -> int:
        if self._actual is not None:
            return self._actual
        return 0 if failed else self._cost

    def __enter__(self) -> Self:
        self._enter_once()
        self._hold = self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hold = self._held()
        if hold.held:
            hold.settle(self._last_word(kind is not None))

    async def __aenter__(self) -> Self:
        self._enter_once()
        self._off_loop = _core.limiter_kind(self._limiter)[0]
        if not self._off_loop:
            return self.__enter__()
        taking = asyncio.get_running_loop().run_in_executor(None, self._take)
        try:
            self._hold = await asyncio.shield(taking)
        except asyncio.CancelledError:
            while not taking.done():  # until its deadline, however often that is cancelled too, as anyio does each turn
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([taking])
            if taking.exception() is None:
                await _elsewhere(functools.partial(taking.result().settle, 0))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._off_loop:
            return self.__exit__(kind, value, traceback)
        hold = self._held()
        if hold.held:
            await _elsewhere(functools.partial(hold.settle, self._last_word(kind is not None)))


async def _elsewhere(call: functools.partial[bool]) -> bool:
    """In a thread of the loop's pool; done also if who waits for it is cancelled."""
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, call))
