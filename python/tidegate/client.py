"""Keeping to a limit as the one who calls: wait for a place instead of being refused.

    limiter = Limiter("10/second leaky_bucket", name="api.example.com", store="shared://")

    @limited(limiter)
    def ask(): ...

    async with limited(limiter, "searches", timeout=5):
        ...

tidegate.httpx and tidegate.requests do it for every request of a client. See docs/client.md. Must not enter: HTTP libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import inspect
import re
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from tidegate._core import Decision, Limiter, StoreError
from tidegate._limits import check_cost

__all__ = ["Pace", "WaitTimeout", "limited"]

Part: TypeAlias = str | bytes
Function = TypeVar("Function", bound=Callable[..., Any])

_CLIENT = "client"  # whoever names nobody is one
_HOLDS_MAX = 1024
_RATE_LIMIT = re.compile(r';\s*(r|t)=(\d{1,15})(?=\s*(?:;|,|$))')


class WaitTimeout(TimeoutError):
    """No place came up within the time that was given; nothing is taken. `decision` tells how long it would have been."""

    def __init__(self, message: str, decision: Decision | None = None) -> None:
        super().__init__(message)
        self.decision = decision


def _check(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0):
        raise ValueError(f"timeout is in seconds, 0 or more, or None: as long as it takes; but is {timeout!r}")
    return timeout


def _waited(limiter: Limiter, decision: Decision, timeout: float | None) -> Decision:
    if not decision:
        never = decision.retry_after == float("inf")
        after = "which no wait brings about" if never else f"which would have come after {decision.retry_after:.3f} s"
        given = "" if timeout is None else f" within {timeout:g} s"
        raise WaitTimeout(f"{limiter!r}: no place{given}, {after}", decision)
    return decision


class limited:  # noqa: N801 - used as a decorator and after `with`
    """Waits for a place before a function runs or a block is entered; sync and async.

    parts     who is counted; without any everybody is one
    key       for a decorated function: callable of its arguments -> who is counted
    cost      units to take
    timeout   seconds to wait at most; None: as long as it takes. WaitTimeout then, and nothing is taken
    refund_on exceptions after which what was taken is given back: (ConnectionError,), say, where nothing was sent
    """

    def __init__(
        self,
        limiter: Limiter,
        *parts: Part,
        cost: int = 1,
        timeout: float | None = None,
        key: Callable[..., Part] | None = None,
        refund_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> None:
        if not isinstance(limiter, Limiter):
            raise TypeError(f"limited() waits for a Limiter, not for {type(limiter).__name__}")
        if key is not None and parts:
            raise TypeError("who is counted is given twice: as parts and by key=")
        self.limiter = limiter
        self.parts = parts or (_CLIENT,)
        self.cost = check_cost(cost)
        self.timeout = _check(timeout)
        self.key = key
        self.refund_on = refund_on
        self._taken: list[Decision] = []

    def _parts_of(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Part, ...]:
        return self.parts if self.key is None else (self.key(*arguments, **named),)

    def _wait(self, parts: tuple[Part, ...]) -> Decision:
        return _waited(
            self.limiter, self.limiter.wait(*parts, cost=self.cost, timeout=self.timeout), self.timeout
        )

    async def _wait_async(self, parts: tuple[Part, ...]) -> Decision:
        decision = await self.limiter.wait_async(*parts, cost=self.cost, timeout=self.timeout)
        return _waited(self.limiter, decision, self.timeout)

    def __call__(self, function: Function) -> Function:
        if not callable(function):
            raise TypeError(f"limited() decorates a function, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waits_async(*arguments: Any, **named: Any) -> Any:
                decision = await self._wait_async(self._parts_of(arguments, named))
                try:
                    return await function(*arguments, **named)
                except self.refund_on:
                    with contextlib.suppress(StoreError):
                        await decision.refund_async()
                    raise

            return waits_async  # type: ignore[return-value]

        @functools.wraps(function)
        def waits(*arguments: Any, **named: Any) -> Any:
            decision = self._wait(self._parts_of(arguments, named))
            try:
                return function(*arguments, **named)
            except self.refund_on:
                with contextlib.suppress(StoreError):
                    decision.refund()
                raise

        return waits  # type: ignore[return-value]

    def __enter__(self) -> Decision:
        decision = self._wait(self.parts)
        self._taken.append(decision)
        return decision

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        decision = self._taken.pop()
        if kind is not None and issubclass(kind, self.refund_on):
            with contextlib.suppress(StoreError):
                decision.refund()

    async def __aenter__(self) -> Decision:
        decision = await self._wait_async(self.parts)
        self._taken.append(decision)
        return decision

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        decision = self._taken.pop()
        if kind is not None and issubclass(kind, self.refund_on):
            with contextlib.suppress(StoreError):
                await decision.refund_async()


# ---- what servers say ----


def told_wait(status: int, fields: Mapping[str, str]) -> float:
    """Seconds after which a server wants to be asked again; 0: now.

    Retry-After, seconds or a date (RFC 9110 10.2.3), of 429 and 503; `RateLimit: "a";r=0;t=12` (the IETF draft), and
    X-RateLimit-Remaining: 0 with -Reset, seconds or an epoch, of any answer. What cannot be read says nothing.
    """
    wait = 0.0
    if status in (429, 503):
        wait = max(wait, _retry_after(fields.get("retry-after", "")))
    for item in fields.get("ratelimit", "").split(","):
        said = {name: int(value) for name, value in _RATE_LIMIT.findall(item)}
        if said.get("r") == 0:
            wait = max(wait, float(said.get("t", 0)))
    if fields.get("x-ratelimit-remaining", "").strip() == "0":
        reset = _number(fields.get("x-ratelimit-reset", ""))
        # No window lasts thirty years: a number that large is a time since 1970.
        wait = max(wait, reset - time.time() if reset > 1e9 else reset)
    return wait


def _number(text: str) -> float:
    text = text.strip()
    return float(text) if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text) else 0.0


def _retry_after(text: str) -> float:
    if not text.strip() or text.strip().isdigit():
        return _number(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0


class Pace:
    """What the transports of tidegate.httpx and tidegate.requests share: a place for each request, and, if asked, what
    the server says. The limiter's count is shared as its store is; what a server has said is known to this object."""

    def __init__(
        self, limiter: Limiter | None, cost: int, timeout: float | None, obey_server: bool, longest: float, retries: int
    ) -> None:
        if limiter is not None and not isinstance(limiter, Limiter):
            raise TypeError(f"limiter must be a Limiter or None, not {type(limiter).__name__}")
        if limiter is None and not obey_server:
            raise ValueError("without a limiter and without obey_server=True there is nothing to keep to")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be 0 or more, but is {retries!r}")
        if retries and not obey_server:
            raise ValueError("retries= goes with obey_server=True, which says when")
        if not longest > 0:
            raise ValueError(f"longest must be seconds, more than 0, but is {longest!r}")
        self.limiter = limiter
        self.cost = check_cost(cost)
        self.timeout = _check(timeout)
        self.obey_server = obey_server
        self.longest = longest
        self.retries = retries
        self._holds: dict[str, float] = {}  # host to monotonic time

    def _left(self, begun: float) -> float | None:
        return None if self.timeout is None else max(0.0, self.timeout - (time.monotonic() - begun))

    def _held(self, host: str, begun: float) -> float:
        """Seconds that the server still wants to be left alone, or WaitTimeout."""
        wait = self._holds.get(host, 0.0) - time.monotonic()
        if wait <= 0:
            self._holds.pop(host, None)
            return 0.0
        left = self._left(begun)
        if left is not None and wait > left:
            raise WaitTimeout(f"{host} wants to be asked again in {wait:.3f} s, more than is left of {self.timeout:g} s")
        return wait

    def wait(self, host: str, who: Part) -> None:
        """Sleeps until `who` may ask `host`; WaitTimeout where that is too late, and nothing is taken."""
        begun = time.monotonic()
        while wait := self._held(host, begun):
            time.sleep(wait)
        if self.limiter is not None:
            left = self._left(begun)
            _waited(self.limiter, self.limiter.wait(who, cost=self.cost, timeout=left), self.timeout)

    async def wait_async(self, host: str, who: Part) -> None:
        """`wait` for asyncio. Who is cancelled gives the place back."""
        begun = time.monotonic()
        while wait := self._held(host, begun):
            await asyncio.sleep(wait)
        if self.limiter is not None:
            left = self._left(begun)
            decision = await self.limiter.wait_async(who, cost=self.cost, timeout=left)
            _waited(self.limiter, decision, self.timeout)

    def learn(self, host: str, status: int, fields: Mapping[str, str], attempt: int) -> bool:
        """Keeps what the server has said, and tells whether the request should be sent again."""
        if not self.obey_server:
            return False
        wait = min(told_wait(status, fields), self.longest)
        if wait > 0:
            now = time.monotonic()
            if len(self._holds) >= _HOLDS_MAX:
                self._holds = {name: until for name, until in self._holds.items() if until > now}
            if len(self._holds) < _HOLDS_MAX:
                self._holds[host] = max(self._holds.get(host, 0.0), now + wait)
        return status in (429, 503) and wait > 0 and attempt < self.retries
