"""A storage for the `limits` package, and so for flask-limiter, slowapi and whatever else counts through it.

    import tidegate.limits_storage                         # registers the schemes

    Limiter(app=app, storage_uri="tidegate+shared://shop")  # flask-limiter: all workers of the host share one count

`tidegate+shared://`, `tidegate+memory://` and, for limits.aio, the same behind `async+`. What stands behind the scheme is a
store's URI (docs/tables.md). See docs/limits-storage.md. Must not enter: strategies; those are the caller's.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import limits.aio.storage
import limits.storage
from limits.aio.storage import MovingWindowSupport as AsyncMovingWindowSupport
from limits.aio.storage import SlidingWindowCounterSupport as AsyncSlidingWindowCounterSupport
from limits.errors import ConfigurationError
from limits.limits import TIME_TYPES
from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport

from tidegate._core import ConfigError, Decision, Error, Limiter, ManualClock, RuleError, StoreError

__all__ = ["AsyncTidegateStorage", "TidegateStorage"]

_UNBOUNDED = 10_000_000_000  # the largest limit there is; a count under it is never refused
_LIMITERS_MAX = 1024
_LOG_ENTRIES = (1000, 250, 60, 15)  # of a log that would not fit with one entry for each hit
_NAME = "limits"


class _Asked(NamedTuple):
    """What a key of `limits` tells of its limit: it ends in .../amount/multiples/granularity."""

    amount: int
    expiry: int


def _asked_of(key: str) -> _Asked | None:
    words = key.rsplit("/", 3)
    if len(words) != 4 or words[3] not in TIME_TYPES:
        return None
    if not all(word.isascii() and word.isdigit() for word in words[1:3]):
        return None
    amount, multiples = int(words[1]), int(words[2])
    if not 0 < amount <= _UNBOUNDED:
        return None
    return _Asked(amount, multiples * TIME_TYPES[words[3]].seconds)


class _Counts:
    """The states behind a storage: one Limiter for each limit that is asked about, all on one store."""

    def __init__(self, uri: str, clock: ManualClock | None, namespace: str, on_store_failure: str, timeout: float) -> None:
        if on_store_failure not in ("open", "closed", "raise"):
            raise ConfigurationError(
                f"on_store_failure is {on_store_failure!r}, expected 'open', 'closed' or 'raise'"
            )
        self._raises = on_store_failure == "raise"
        self._clock = clock
        self._settings: dict[str, Any] = {
            "store": uri.removeprefix("async+").removeprefix("tidegate+"),
            "clock": clock,
            "namespace": namespace,
            "timeout": timeout,
            "on_store_failure": "open" if self._raises else on_store_failure,
        }
        self._limiters: dict[tuple[str, int, int], Limiter] = {}
        self._plain: dict[int, None] = {}  # lifetimes of keys that do not tell their limit, the newest last
        self._resets = 0
        try:
            # One unit of one for each reset there was: it blocks, and what blocks is never forgotten.
            self._reset_marks = Limiter("1/10year fixed_window", name="limits-reset", **self._settings)
        except (ConfigError, StoreError) as error:
            raise ConfigurationError(f"{uri}: {error}") from error

    def now(self) -> float:
        """Seconds since 1970, as callers of `limits` reckon."""
        return time.time() if self._clock is None else self._clock.now_us / 1e6

    def limiter(self, algorithm: str, amount: int, expiry: int) -> Limiter:
        found = self._limiters.get((algorithm, amount, expiry))
        if found is None:
            if len(self._limiters) >= _LIMITERS_MAX:
                self._limiters.clear()
            found = self._limiters[algorithm, amount, expiry] = self._made(algorithm, amount, expiry)
        return found

    def _made(self, algorithm: str, amount: int, expiry: int) -> Limiter:
        rules = [f"{amount}/{expiry}s {algorithm}"]
        if algorithm == "sliding_log":
            # More hits than the table has room for: neighbours are merged, towards the later of them, so it never lets
            # through more than the log that keeps each.
            rules += [f"{rules[0]} resolution {max(1, expiry * 1000 // entries)}ms" for entries in _LOG_ENTRIES]
        refused: RuleError | None = None
        for rule in rules:
            try:
                return Limiter(rule, name=_NAME, **self._settings)
            except RuleError as error:
                refused = refused or error
        raise ConfigurationError(f"{amount} per {expiry} s cannot be counted: {refused}") from refused

    def of(self, key: str) -> tuple[str, str]:
        """The identity behind a key. A reset begins another row of identities."""
        while True:
            mark = self._reset_marks.peek(str(self._resets + 1))
            if mark.allowed or mark.degraded:
                break
            self._resets += 1
        return str(self._resets), key

    def sound(self, decision: Decision) -> Decision:
        if decision.degraded and self._raises:
            raise StoreError("the store did not answer")
        return decision

    # ---- fixed windows ----

    def incr(self, key: str, expiry: int, amount: int) -> int:
        """The count after this hit. One that does not fit is not taken: the count it would have led to is told."""
        asked = _asked_of(key)
        if asked is None or asked.expiry != expiry:
            self._plain.pop(expiry, None)
            self._plain[expiry] = None
            if len(self._plain) > 64:
                del self._plain[next(iter(self._plain))]
            asked = _Asked(_UNBOUNDED, expiry)
        decision = self.sound(self.limiter("fixed_window", asked.amount, expiry).hit(*self.of(key), cost=amount))
        used = asked.amount - decision.remaining
        if decision.degraded:
            return amount if decision.allowed else asked.amount + 1
        return used if decision.allowed else max(used + amount, asked.amount + 1)

    def _fixed(self, key: str) -> tuple[int, Decision] | None:
        asked = _asked_of(key)
        candidates = [asked] if asked else [_Asked(_UNBOUNDED, expiry) for expiry in reversed(self._plain)]
        who = self.of(key)
        for one in candidates:
            decision = self.sound(self.limiter("fixed_window", one.amount, one.expiry).peek(*who, cost=0))
            if decision.remaining < one.amount:
                return one.amount - decision.remaining, decision
        return None

    def get(self, key: str) -> int:
        found = self._fixed(key)
        return 0 if found is None else found[0]

    def get_expiry(self, key: str) -> float:
        found = self._fixed(key)
        return self.now() + (0.0 if found is None else found[1].reset_after)

    def clear(self, key: str) -> None:
        asked = _asked_of(key)
        who = self.of(key)
        for expiry in [asked.expiry] if asked else list(self._plain):
            for algorithm in ("fixed_window", "sliding_log", "sliding_counter"):
                self.limiter(algorithm, asked.amount if asked else 1, expiry).reset(*who)

    # ---- moving windows: an exact log ----

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int) -> bool:
        if amount > limit:
            return False
        return self.sound(self.limiter("sliding_log", limit, expiry).hit(*self.of(key), cost=amount)).allowed

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        limiter, who = self.limiter("sliding_log", limit, expiry), self.of(key)
        for _ in range(4):
            now = self.now()
            left = self.sound(limiter.peek(*who, cost=0)).remaining
            if left >= limit:
                return now, 0
            # One unit more than there is room for waits for the oldest to leave.
            oldest = self.sound(limiter.peek(*who, cost=left + 1))
            if oldest.remaining == left and not oldest.allowed:
                break  # nobody has hit in between
        return now + oldest.retry_after - expiry, limit - left

    # ---- sliding counters ----

    def acquire_sliding(self, key: str, limit: int, expiry: int, amount: int) -> bool:
        if amount > limit:
            return False
        return self.sound(self.limiter("sliding_counter", limit, expiry).hit(*self.of(key), cost=amount)).allowed

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """The two counts, told apart by the waits that costs near the largest limit would meet: within this window only
        the previous count goes down."""
        limiter, who = self.limiter("sliding_counter", _UNBOUNDED, expiry), self.of(key)
        period_us = expiry * 1_000_000
        look = self.sound(limiter.peek(*who, cost=1))
        used = _UNBOUNDED - look.remaining  # current + previous weighted, rounded up
        if used == 0:
            return 0, 0.0, 0, 0.0
        has_current = look.reset_after_us > period_us
        rest_us = look.reset_after_us - (period_us if has_current else 0)

        def freed_within(room: int) -> tuple[bool, int]:
            """Whether all but `room` units pass before this window ends, and how long before."""
            at = limiter.peek(*who, cost=max(1, _UNBOUNDED - room))
            rest = at.reset_after_us - (period_us if at.reset_after_us > period_us else 0)
            wait = 0 if at.retry_after_us is None else at.retry_after_us
            return wait <= rest, rest - wait

        low, high = (1, used) if has_current else (0, 0)
        while low < high:
            middle = (low + high) // 2
            if freed_within(middle)[0]:
                high = middle
            else:
                low = middle + 1
        current, weight = low, used - low
        previous = 0 if weight == 0 else 1
        if weight > 1:
            before_us = freed_within(current + weight - 1)[1]
            previous = max(1, (weight - 1) * period_us // max(1, before_us))
        rest = rest_us / 1e6
        return previous, rest if previous else 0.0, current, rest + expiry if current else 0.0

    def clear_sliding(self, key: str, expiry: int) -> None:
        self.limiter("sliding_counter", 1, expiry).reset(*self.of(key))

    # ---- the whole ----

    def check(self) -> bool:
        return not self._reset_marks.peek("0").degraded

    def reset(self) -> None:
        self.of("")
        self._resets += 1
        self._reset_marks.hit(str(self._resets))


def _open(uri: str | None, options: dict[str, Any]) -> _Counts:
    known = {
        "clock": options.pop("clock", None),
        "namespace": options.pop("namespace", "limits"),
        "on_store_failure": options.pop("on_store_failure", "open"),
        "timeout": options.pop("timeout", 0.05),
    }
    if options:
        raise ConfigurationError(
            f"unknown storage option {sorted(options)[0]!r}, expected one of {', '.join(sorted(known))}"
        )
    return _Counts(uri or "", **known)


class TidegateStorage(limits.storage.Storage, MovingWindowSupport, SlidingWindowCounterSupport):
    """Counts in a table in memory that all workers of the host share, or of this process and its forks.

    uri        tidegate+shared://NAME?size=16MiB, tidegate+memory://NAME
    namespace  storage option: apart from others that count in the same table; default "limits"
    on_store_failure  storage option: "open" (default) lets through, "closed" refuses, "raise" raises StoreError, for a
               caller with a fallback of its own
    timeout, clock    storage options, as for tidegate.Limiter

    Raises limits.errors.ConfigurationError when made with a wrong URI or option, and for a limit no table could hold.
    """

    STORAGE_SCHEME = ["tidegate+shared", "tidegate+memory"]

    def __init__(self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions)
        self._counts = _open(uri, options)

    @property
    def base_exceptions(self) -> type[Exception] | tuple[type[Exception], ...]:
        """What `limits` may take for the store's failure."""
        return Error

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        return self._counts.incr(key, expiry, amount)

    def get(self, key: str) -> int:
        return self._counts.get(key)

    def get_expiry(self, key: str) -> float:
        return self._counts.get_expiry(key)

    def check(self) -> bool:
        return self._counts.check()

    def reset(self) -> int | None:
        """Begins anew for every process that shares the store. How many keys that were is not known."""
        self._counts.reset()
        return None

    def clear(self, key: str) -> None:
        self._counts.clear(key)

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._counts.acquire_entry(key, limit, expiry, amount)

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        return self._counts.get_moving_window(key, limit, expiry)

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._counts.acquire_sliding(key, limit, expiry, amount)

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        return self._counts.get_sliding_window(key, expiry)

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        self._counts.clear_sliding(key, expiry)


class AsyncTidegateStorage(
    limits.aio.storage.Storage, AsyncMovingWindowSupport, AsyncSlidingWindowCounterSupport
):
    """The same for limits.aio. A table is memory: there is nothing to wait for, and no turn of the loop is given."""

    STORAGE_SCHEME = ["async+tidegate+shared", "async+tidegate+memory"]

    def __init__(self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions)
        self._counts = _open(uri, options)

    @property
    def base_exceptions(self) -> type[Exception] | tuple[type[Exception], ...]:
        """What `limits` may take for the store's failure."""
        return Error

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        return self._counts.incr(key, expiry, amount)

    async def get(self, key: str) -> int:
        return self._counts.get(key)

    async def get_expiry(self, key: str) -> float:
        return self._counts.get_expiry(key)

    async def check(self) -> bool:
        return self._counts.check()

    async def reset(self) -> int | None:
        self._counts.reset()
        return None

    async def clear(self, key: str) -> None:
        self._counts.clear(key)

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._counts.acquire_entry(key, limit, expiry, amount)

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        return self._counts.get_moving_window(key, limit, expiry)

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._counts.acquire_sliding(key, limit, expiry, amount)

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        return self._counts.get_sliding_window(key, expiry)

    async def clear_sliding_window(self, key: str, expiry: int) -> None:
        self._counts.clear_sliding(key, expiry)
