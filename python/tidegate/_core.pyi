"""The compiled part of tidegate: glue to csrc/include/tidegate.h, where each number is defined."""

import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, Self, TypeAlias, final

from typing_extensions import disjoint_base

from tidegate._reservation import Reservation as _Reservation

# Any content, also none; a str counts as its UTF-8.
_Part: TypeAlias = str | bytes
# {"ip": address, "ip+user": (address, user)}
_Dims: TypeAlias = Mapping[str, _Part | tuple[_Part, ...]]

__version__: Final[str]

class Error(Exception):
    """Whatever tidegate raises but TypeError, ValueError and MemoryError. `code` is the C status, such as "TG_E_RULE"."""

    code: str

class RuleError(Error, ValueError):
    """A rule's text or numbers are wrong; `offset` and `length` mark the word in `text`; str() shows a caret under it."""

    text: str
    offset: int
    length: int

class ConfigError(Error, ValueError):
    """The rules file or a setting is wrong; `line` and `column` are 1-based, 0 where no file is concerned."""

    line: int
    column: int

class StoreError(Error):
    """A store could not be opened, or an administrative call got no answer. `hit` never raises it."""

    errno: int

class IdentityError(Error, ValueError):
    """A value that a policy's `by` needs was not given, or an address is none."""

@final
class ManualClock:
    """A clock that only its owner moves. Stores opened with it are marked manual."""

    def __new__(cls, now_us: int = 1_700_000_000_000_000) -> Self: ...
    @property
    def now_us(self) -> int: ...
    @now_us.setter
    def now_us(self, value: int) -> None: ...
    def advance(self, seconds: float, /) -> None: ...
    def advance_us(self, microseconds: int, /) -> None: ...
    def __reduce__(self) -> NoReturn: ...

@final
class RuleResult:
    """What one rule said about one identity."""

    @property
    def rule(self) -> str: ...
    @property
    def allowed(self) -> bool: ...
    @property
    def limit(self) -> int: ...
    @property
    def burst(self) -> int: ...
    @property
    def period_us(self) -> int: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def remaining(self) -> int: ...
    @property
    def retry_after_us(self) -> int | None: ...
    @property
    def reset_after_us(self) -> int: ...
    @property
    def delay_us(self) -> int: ...
    @property
    def retry_after(self) -> float: ...
    @property
    def reset_after(self) -> float: ...
    @property
    def delay(self) -> float: ...
    def __reduce__(self) -> NoReturn: ...

@final
class Decision:
    def __bool__(self) -> bool: ...
    @property
    def allowed(self) -> bool: ...
    @property
    def degraded(self) -> bool: ...
    @property
    def limit(self) -> int: ...
    @property
    def burst(self) -> int: ...
    @property
    def remaining(self) -> int: ...
    @property
    def rule(self) -> str: ...
    @property
    def rules(self) -> tuple[RuleResult, ...]: ...
    @property
    def retry_after(self) -> float: ...
    @property
    def reset_after(self) -> float: ...
    @property
    def delay(self) -> float: ...
    @property
    def retry_after_us(self) -> int | None: ...
    @property
    def reset_after_us(self) -> int: ...
    @property
    def delay_us(self) -> int: ...
    def refund(self) -> None: ...
    def refund_async(self) -> Awaitable[None]: ...
    def __reduce__(self) -> NoReturn: ...

@final
class Limiter:
    def __new__(
        cls,
        rules: str | None = None,
        *,
        name: str | None = None,
        policy: str | None = None,
        algorithm: str | None = None,
        store: str | None = None,
        clock: ManualClock | None = None,
        namespace: str | None = None,
        by: str | Sequence[str] | None = None,
        trusted_proxies: Sequence[str] | None = None,
        client_header: str | None = None,
        user_header: str | None = None,
        on_store_failure: str | None = None,  # "open" (default), "closed", "local"
        on_full: str | None = None,  # "overflow" (default), "open", "closed"
        missing_identity: str | None = None,  # "reject 401" (default), "reject 400", "shared"
        timeout: float = 0.05,
        config: str | None = None,
        enabled: bool | None = None,
    ) -> Self: ...
    @property
    def name(self) -> str: ...
    @property
    def rules(self) -> tuple[str, ...]: ...
    @property
    def enabled(self) -> bool: ...
    def hit(self, *parts: _Part, cost: int = 1, dims: _Dims | None = None) -> Decision: ...
    def peek(self, *parts: _Part, cost: int = 1, dims: _Dims | None = None) -> Decision: ...
    def reset(self, *parts: _Part, dims: _Dims | None = None) -> None: ...
    def refund(self, *parts: _Part, cost: int = 1, dims: _Dims | None = None) -> None: ...
    def override(
        self, rules: str | None, /, *parts: _Part, seconds: float | None = None, dims: _Dims | None = None
    ) -> None: ...
    def pause(self, seconds: float | None, /) -> None: ...
    def wait(
        self, *parts: _Part, cost: int = 1, timeout: float | None = None, dims: _Dims | None = None
    ) -> Decision: ...
    def wait_async(
        self, *parts: _Part, cost: int = 1, timeout: float | None = None, dims: _Dims | None = None
    ) -> Coroutine[Any, Any, Decision]: ...
    def reserve(
        self, *parts: _Part, cost: int = 1, lease: float = 60.0, dims: _Dims | None = None
    ) -> _Reservation: ...
    def hit_async(self, *parts: _Part, cost: int = 1, dims: _Dims | None = None) -> Awaitable[Decision]: ...
    def peek_async(self, *parts: _Part, cost: int = 1, dims: _Dims | None = None) -> Awaitable[Decision]: ...
    def reset_async(self, *parts: _Part, dims: _Dims | None = None) -> Awaitable[None]: ...
    def refund_async(self, *parts: _Part, cost: int = 1, dims: _Dims | None = None) -> Awaitable[None]: ...
    def __reduce__(self) -> NoReturn: ...

@final
class Judgement:
    """The answer to one request: what tg_judgement and tg_answer hold. True when it may go on."""

    def __bool__(self) -> bool: ...
    @property
    def outcome(self) -> str: ...  # "unmatched" "exempt" "allowed" "denied" "forbidden" "unidentified" "unavailable"
    @property
    def status(self) -> int: ...  # 0: let through
    @property
    def policy(self) -> str: ...
    @property
    def missing(self) -> str: ...
    @property
    def decision(self) -> Decision: ...
    @property
    def fields(self) -> list[tuple[bytes, bytes]]: ...  # lower-case names, for ASGI; Content-Type among them on a refusal
    @property
    def fields_text(self) -> list[tuple[str, str]]: ...  # usual case, for WSGI
    @property
    def body(self) -> bytes: ...
    @property
    def challenged(self) -> bool: ...  # over a limit of `mode: challenge`: let through, for you to ask for a proof
    @property
    def shadow_policy(self) -> str: ...  # of `mode: shadow`, which would have refused; else empty
    @property
    def needs_body(self) -> bool: ...
    @property
    def settles(self) -> bool: ...
    def settle(self, status: int, headers: Iterable[tuple[bytes, bytes] | tuple[str, str]], /) -> None: ...
    def settle_async(
        self, status: int, headers: Iterable[tuple[bytes, bytes] | tuple[str, str]], /
    ) -> Awaitable[None]: ...
    def __reduce__(self) -> NoReturn: ...

@final
class Gate:
    """A rules file in force."""

    def __new__(
        cls,
        config: str | os.PathLike[str] | None = None,
        *,
        store: str | None = None,
        clock: ManualClock | None = None,
        timeout: float = 0.05,
        look: bool = False,  # a table that is not there is not made: an empty one stands in
    ) -> Self: ...
    @property
    def generation(self) -> int: ...
    @property
    def enabled(self) -> bool: ...
    def reload(self) -> None: ...
    def names(self, kind: str, /) -> bool: ...
    def explain_as(
        self,
        method: str,
        path: str,
        headers: tuple[tuple[_Part, ...], ...] = (),
        peer: str | None = None,
        host: str | None = None,
        user: str | None = None,
        route: str | None = None,
        cost: int = 1,
        json: bool = False,
    ) -> str: ...
    def judge_asgi(
        self,
        scope: Mapping[str, Any],
        /,
        *,
        route: str | None = None,
        user: str | None = None,
        cost: int = 1,
        prior: Sequence[Judgement] = (),
        plan: str | None = None,
        body: bytes | None = None,  # as read when `needs_body` said so
        reads_body: bool = False,  # True: you do what `needs_body` says
        keys: dict[str, str] | None = None,  # what `key:NAME` stands for
    ) -> Judgement: ...
    def judge_asgi_async(
        self,
        scope: Mapping[str, Any],
        /,
        *,
        route: str | None = None,
        user: str | None = None,
        cost: int = 1,
        prior: Sequence[Judgement] = (),
        plan: str | None = None,
        body: bytes | None = None,
        reads_body: bool = False,
        keys: dict[str, str] | None = None,
    ) -> Awaitable[Judgement]: ...
    def judge_wsgi(
        self,
        environ: Mapping[str, Any],
        /,
        *,
        route: str | None = None,
        user: str | None = None,
        cost: int = 1,
        prior: Sequence[Judgement] = (),
        plan: str | None = None,
        body: bytes | None = None,  # as read when `needs_body` said so
        reads_body: bool = False,  # True: you do what `needs_body` says
        keys: dict[str, str] | None = None,  # what `key:NAME` stands for
    ) -> Judgement: ...
    def __reduce__(self) -> NoReturn: ...

def judge_asgi(
    limiters: Sequence[Limiter],
    scope: Mapping[str, Any],
    /,
    *,
    route: str | None = None,
    user: str | None = None,
    cost: int = 1,
    prior: Sequence[Judgement] = (),
    plan: str | None = None,
    body: bytes | None = None,
    reads_body: bool = False,
    keys: dict[str, str] | None = None,
) -> Judgement: ...
def judge_asgi_async(
    limiters: Sequence[Limiter],
    scope: Mapping[str, Any],
    /,
    *,
    route: str | None = None,
    user: str | None = None,
    cost: int = 1,
    prior: Sequence[Judgement] = (),
    plan: str | None = None,
    body: bytes | None = None,
    reads_body: bool = False,
    keys: dict[str, str] | None = None,
) -> Awaitable[Judgement]: ...
def judge_wsgi(
    limiters: Sequence[Limiter],
    environ: Mapping[str, Any],
    /,
    *,
    route: str | None = None,
    user: str | None = None,
    cost: int = 1,
    prior: Sequence[Judgement] = (),
    plan: str | None = None,
    body: bytes | None = None,
    reads_body: bool = False,
    keys: dict[str, str] | None = None,
) -> Judgement: ...
def refusal(decision: Decision, /) -> Judgement: ...
def client_address(scope_or_environ: Mapping[str, Any], limiter_or_gate: Limiter | Gate, /) -> str: ...
@final
class Answers:
    def __new__(cls, app: Callable[[Any, Any, Any], Awaitable[None]]) -> Self: ...
    @property
    def app(self) -> Callable[[Any, Any, Any], Awaitable[None]]: ...
    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]: ...

@disjoint_base
class Dependency:
    _hit: Callable[[Any], Any]
    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    def __call__(self, conn: Any, response: Any, **told: Any) -> Awaitable[Decision]: ...

def asgi_hit(
    limiter: Limiter, cost: int, by_route: bool, by_user: bool = True, /
) -> Callable[[Any], Decision | Judgement | None]: ...
def asgi_enter(gate: Gate, tells_user: bool, /) -> Callable[[Any, Any], Callable[[Any], Awaitable[None]] | Judgement | None]: ...
def asgi_send(
    judgements: list[Judgement], send: Callable[[Any], Awaitable[None]], scope: dict[str, Any] = ..., /
) -> Callable[[Any], Awaitable[None]]: ...
def routes_changed() -> None: ...
def tell_outcomes() -> None: ...
def shown(judgements: list[Judgement], /) -> Judgement: ...
def store_metrics(limiter_or_gate: Limiter | Gate, format: str, /) -> str: ...
def use_clock(clock: ManualClock | None, /) -> ManualClock | None: ...
def switch_off(off: bool, /) -> bool: ...
def hit_within(
    limiter: Limiter, patience_us: int, /, *parts: _Part, cost: int = 1, dims: _Dims | None = None
) -> Decision: ...
def hit_within_async(
    limiter: Limiter, patience_us: int, /, *parts: _Part, cost: int = 1, dims: _Dims | None = None
) -> Awaitable[Decision]: ...
@final
class Hold:
    @property
    def decision(self) -> Decision: ...
    @property
    def held(self) -> bool: ...
    def settle(self, actual: int, /) -> bool: ...
    def renew(self, lease: float, /) -> bool: ...
    def __reduce__(self) -> NoReturn: ...

def reserve(limiter: Limiter, lease: float, /, *parts: _Part, cost: int = 1, dims: _Dims | None = None) -> Hold: ...
def limiter_kind(limiter: Limiter, /) -> tuple[bool, int | None]: ...  # (asked over a network, a manual clock's time)
def take_notices() -> list[tuple[str, str]]: ...  # (code, message); empty almost always
