"""What `rate_limit(...)` means in every Python face: its arguments, checked where they are written, become one Limiter.

Must not enter: frameworks, requests.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeAlias

from tidegate._core import ConfigError, Gate, Limiter, ManualClock
from tidegate._outcome import ChargeWhen, check_charge_when

# The route of what has none: unknown URLs, mostly. They share one bucket, so a scanner is no freer than a client.
UNROUTED = "(unrouted)"
COST_MAX = 10_000_000_000
TEXTS_MAX = 1024  # limiters kept for the texts that a callable has answered with

# What a face may be told by asking: a callable, whose arguments are the face's to say, sync or async.
Asked: TypeAlias = Callable[..., Any]
Kind: TypeAlias = str | Asked


def check_cost(cost: int) -> int:
    """The cost, or TypeError or ValueError now rather than on the first request."""
    if isinstance(cost, bool) or not isinstance(cost, int):
        raise TypeError(f"cost must be an int, not {type(cost).__name__}")
    if not 0 <= cost <= COST_MAX:
        raise ValueError(f"cost must be from 0 to {COST_MAX}, but is {cost}")
    return cost


def check_judges(limiter: Limiter) -> None:
    """TypeError or ConfigError for what cannot judge requests: a Limiter says by `by` who is counted."""
    if not isinstance(limiter, Limiter):
        raise TypeError(f"a request is judged by a Limiter, not by {type(limiter).__name__}")
    if limiter.enabled:
        try:
            limiter.peek("")
        except ValueError:
            return  # it puts identities together itself
        raise ConfigError(f'{limiter!r} does not say who is counted: give it by=, such as by="ip"')


def open_gate(config: str | None, *, store: str | None, clock: ManualClock | None, timeout: float) -> Gate:
    """The rules file of a middleware that was given no limiter."""
    try:
        return Gate(config, store=store, clock=clock, timeout=timeout)
    except ConfigError:
        if config or os.environ.get("TIDEGATE_CONFIG"):
            raise
    raise ConfigError(
        "TidegateMiddleware has nothing to judge by: give it config= with a rules file, or set TIDEGATE_CONFIG; or "
        'limiter=Limiter("100/minute", by="ip"), or a gate='
    )


def rules_of_numbers(limit: int | None, window_seconds: float | None) -> str:
    """The text "5/60s" from limit=5, window_seconds=60. A computed limit of 0 refuses everything, as `deny` does."""
    if limit is None or window_seconds is None:
        missing = "limit" if limit is None else "window_seconds"
        raise ConfigError(f"limit= and window_seconds= go together, but {missing}= is missing")
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit must be an int, not {type(limit).__name__}")
    if isinstance(window_seconds, bool) or not isinstance(window_seconds, (int, float)):
        raise TypeError(f"window_seconds must be an int or a float, not {type(window_seconds).__name__}")
    if limit < 0:
        raise ConfigError(f"limit must be 0 or more, but is {limit}")
    if not 0 < window_seconds < float("inf"):
        raise ConfigError(f"window_seconds must be more than 0, but is {window_seconds}")
    if limit == 0:
        return "deny"
    if window_seconds == int(window_seconds):
        return f"{limit}/{int(window_seconds)}s"
    milliseconds = round(window_seconds * 1000)
    if abs(window_seconds * 1000 - milliseconds) > 1e-6:
        raise ConfigError(f"window_seconds must be whole milliseconds, but is {window_seconds}")
    return f"{limit}/{milliseconds}ms"


def dimensions(by: Kind | Sequence[Kind]) -> tuple[list[str], dict[str, Asked]]:
    """`by` as the list of its dimensions, and the callables among them under the name that they are counted by: a callable
    `tenant` is the kind "key:tenant", in every process."""
    if not isinstance(by, (str, Iterable)) and not callable(by):
        raise TypeError(f"by must be a str, a callable or a sequence of them, not {type(by).__name__}")
    entries = [by] if isinstance(by, str) or callable(by) else list(by)
    texts: list[str] = []
    asked: dict[str, Asked] = {}
    for entry in entries:
        if isinstance(entry, str):
            texts.append(entry)
        elif callable(entry):
            name = key_name(entry, asked)
            asked[name] = entry
            texts.append("key:" + name)
        else:
            raise TypeError(f"by must be a str, a callable or a sequence of them, but holds {type(entry).__name__}")
    if not texts:
        raise ConfigError('by must name who is counted, such as "ip" or ["ip", "user"], but is empty')
    return texts, asked


def key_name(function: Asked, taken: dict[str, Asked]) -> str:
    name = str(getattr(function, "__name__", type(function).__name__))
    name = "".join(letter if letter.isalnum() or letter in "_-." else "" for letter in name)[:40] or "key"
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}-{number}"
    return unique


def key_text(name: str, answer: object) -> str:
    """What a callable in `by` answered, as a part of the identity; None and "": there is none."""
    if answer is None:
        return ""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    raise TypeError(f"{name}() in by= must answer with str, int or None, but gave {type(answer).__name__}")


def joined_with_route(entry: str) -> str:
    """One dimension, counted for each route by itself: "user|ip" is "user+method+route|ip+method+route"."""
    alternatives = []
    for alternative in entry.split("|"):
        kinds = [kind.strip().lower() for kind in alternative.split("+")]
        joined = alternative.strip()
        for kind in ("method", "route"):
            if kind not in kinds:
                joined += "+" + kind
        alternatives.append(joined)
    return "|".join(alternatives)


def names_kind(by: Sequence[str], wanted: str) -> bool:
    """Whether any dimension needs this kind."""
    return any(
        kind.strip().lower() == wanted
        for entry in by
        for alternative in entry.split("|")
        for kind in alternative.split("+")
    )


# What every request over HTTP has; an address is missing of local sockets alone, which are a matter of how the site is served.
_ALWAYS_THERE = frozenset({"ip", "method", "path", "route", "host"})


def may_be_missing(by: Sequence[str]) -> bool:
    """Whether a request may not say who is asking: a dimension of which each alternative needs what some requests have not."""
    return any(
        all(
            any(kind.strip().lower() not in _ALWAYS_THERE for kind in alternative.split("+"))
            for alternative in entry.split("|")
        )
        for entry in by
    )


def with_window(limit: Asked, window_seconds: float | None) -> Asked:
    """limit= as a callable, with window_seconds=: the rules as a callable of the same arguments."""

    @functools.wraps(limit)
    def rules(*arguments: Any, **named: Any) -> Any:
        answer = limit(*arguments, **named)
        if inspect.isawaitable(answer):
            return _later(answer, window_seconds)
        return rules_of_numbers(answer, window_seconds)

    return rules


async def _later(answer: Awaitable[Any], window_seconds: float | None) -> str:
    return rules_of_numbers(await answer, window_seconds)


def _callers() -> Iterator[FrameType]:
    """The frames further up. Not by f_back: where memory runs out that is None, with an exception left pending."""
    with contextlib.suppress(ValueError):
        for depth in itertools.count(1):
            yield sys._getframe(depth)


def _inside_a_request() -> bool:
    """Whether a request is being served further up: an ASGI or a WSGI one, or Flask's, or this is a thread that a server
    lends to endpoints. Looked for where a limit is made, which is once."""
    asyncio = sys.modules.get("asyncio")
    looped = asyncio is not None and asyncio._get_running_loop() is not None
    for frame in _callers():
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            return False  # a module's own, made once, though a request has asked for it: as Django does for its views
        names = code.co_varnames + code.co_cellvars
        if looped and "scope" in names:
            scope = frame.f_locals.get("scope")
            if isinstance(scope, dict) and scope.get("type") in ("http", "websocket") and "headers" in scope:
                return True
        if "environ" in names:
            environ = frame.f_locals.get("environ")
            if isinstance(environ, dict) and "REQUEST_METHOD" in environ and "wsgi.version" in environ:
                return True
    if threading.current_thread().name == "AnyIO worker thread":
        return True
    flask = sys.modules.get("flask")
    return flask is not None and bool(flask.has_request_context())


def warn_in_a_request() -> None:
    """A limit made while a request is served opens its store for that request, and whatever is wrong with it is only
    found then. The warning stands at the line that makes it."""
    if not _inside_a_request():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "tidegate":
        frame = frame.f_back
        level += 1
    warnings.warn(
        "a limit is made while a request is served: make it once, where the module or the application is made",
        RuntimeWarning,
        stacklevel=level,
    )


class Needs:
    """What the policies of a gate ask a face to find out. Looked up once for each generation of the file."""

    __slots__ = ("generation", "route", "user")

    def __init__(self, gate: Gate) -> None:
        self.generation = gate.generation
        self.route = gate.names("route")
        self.user = gate.names("user")


class Limit:
    """One use of `rate_limit(...)`: its limiter, and what a face has to find out before it can ask it."""

    __slots__ = (
        "limiters", "cost", "by", "needs_route", "needs_user", "keys", "cost_of", "rules_of", "charge_when", "unidentified",
        "_made", "_by_text", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        rules: str | Asked | None,
        *,
        limit: int | Asked | None = None,
        window_seconds: float | None = None,
        by: Kind | Sequence[Kind] | None = None,
        name: str | None = None,
        prefix: str | None = None,
        policy: str | None = None,
        algorithm: str | None = None,
        cost: int | Asked = 1,
        charge_when: ChargeWhen | None = None,
        store: str | None = None,
        clock: ManualClock | None = None,
        namespace: str | None = None,
        trusted_proxies: Sequence[str] | None = None,
        client_header: str | None = None,
        user_header: str | None = None,
        on_store_failure: str | None = None,
        on_full: str | None = None,
        missing_identity: str | None = None,
        timeout: float = 0.05,
        config: str | None = None,
        enabled: bool | None = None,
        scoped: bool = True,
    ) -> None:
        self.cost_of: Asked | None = cost if callable(cost) else None
        self.cost = 1 if callable(cost) else check_cost(cost)
        check_charge_when(charge_when)
        self.charge_when = charge_when
        self.keys: dict[str, Asked] = {}
        self.rules_of: Asked | None = None
        self._by_text: dict[str, tuple[Limiter, ...]] = {}
        warn_in_a_request()
        if limit is not None or window_seconds is not None:
            if rules is not None:
                raise ConfigError("the limit is given twice: as rules and as limit=, window_seconds=")
            if callable(limit):
                rules_of_numbers(1, window_seconds)  # what is wrong with the window is wrong now
                rules = with_window(limit, window_seconds)
            else:
                rules = rules_of_numbers(limit, window_seconds)
        if callable(rules):
            self.rules_of = rules
        elif isinstance(rules, (list, tuple)):
            raise TypeError(f"rules are one text, not a {type(rules).__name__}: write {'; '.join(map(str, rules))!r}")
        if policy is not None:
            self._refuse_with_policy(
                rules=rules,
                by=by,
                name=name,
                prefix=prefix,
                algorithm=algorithm,
                namespace=namespace,
                trusted_proxies=trusted_proxies,
                client_header=client_header,
                user_header=user_header,
                on_store_failure=on_store_failure,
                on_full=on_full,
                missing_identity=missing_identity,
            )
            # What the file's `by` needs is the file's to say: all that a face knows is given.
            self.by: list[str] = []
            self.needs_route = self.needs_user = True
            self.unidentified: int | None = None
            self.limiters = (
                Limiter(policy=policy, config=config, store=store, clock=clock, timeout=timeout, enabled=enabled),
            )
            return
        if config is not None:
            raise ConfigError("config= names a rules file and needs policy= to say which of its policies is meant")
        if rules is None:
            raise ConfigError('no limit is given: write rate_limit("5/minute") or limit=5, window_seconds=60')
        if name is not None and prefix is not None:
            raise ConfigError(
                "name= and prefix= exclude each other: name= is one count for all its uses, "
                "prefix= one for each route under it"
            )
        self.by, self.keys = dimensions("ip" if by is None else by)
        if scoped and name is None:
            self.by = [joined_with_route(entry) for entry in self.by]
        self.needs_route = names_kind(self.by, "route")
        self.needs_user = names_kind(self.by, "user")
        rejects = missing_identity or "reject 401"
        # The status of a request that does not say who is asking. None: there is none such, or it is let through.
        self.unidentified = int(rejects[-3:]) if rejects.startswith("reject") and may_be_missing(self.by) else None

        def made(text: str) -> Limiter:
            return Limiter(
                text,
                name=prefix if name is None else name,
                by=self.by,
                algorithm=algorithm,
                store=store,
                clock=clock,
                namespace=namespace,
                trusted_proxies=trusted_proxies,
                client_header=client_header,
                user_header=user_header,
                on_store_failure=on_store_failure or "open",
                on_full=on_full or "overflow",
                missing_identity=missing_identity or "reject 401",
                timeout=timeout,
                enabled=enabled,
            )

        self._made = made
        # Where the rules are asked for, this one only says now what is wrong with all the rest.
        self.limiters = (made("1/day" if callable(rules) else rules),)

    @property
    def asks(self) -> bool:
        """Whether a request cannot be judged before somebody has been asked."""
        return bool(self.keys) or self.cost_of is not None or self.rules_of is not None

    def limiters_for(self, text: object) -> tuple[Limiter, ...]:
        """Those of the rules that a callable has answered with; what was used stays used where only a number differs."""
        if not isinstance(text, str):
            raise TypeError(f"a callable for the rules must answer with str, but gave {type(text).__name__}")
        found = self._by_text.get(text)
        if found is None:
            if len(self._by_text) >= TEXTS_MAX:
                self._by_text.clear()
            found = self._by_text[text] = (self._made(text),)
        return found

    @property
    def limiter(self) -> Limiter:
        return self.limiters[0]

    @staticmethod
    def _refuse_with_policy(**given: object) -> None:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name} is the rules file's to say where policy= is given")


def user_text(user: object) -> str | None:
    """What a `user=` callable answered, as the identity: None where nobody is signed in."""
    if user is None or isinstance(user, str):
        return user or None
    if isinstance(user, int) and not isinstance(user, bool):
        return str(user)
    raise TypeError(f"user= must answer with the user's id as str or int, or None, but gave {type(user).__name__}")
