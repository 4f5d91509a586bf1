"""What `rate_limit(...)` means in every Python face: its arguments, checked where they are written, become one Limiter.

Must not enter: frameworks, requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate._core import ConfigError, Gate, Limiter, ManualClock

# The route of what has none: unknown URLs, mostly. They share one bucket, so a scanner is no freer than a client.
UNROUTED = "(unrouted)"
COST_MAX = 10_000_000_000


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


def dimensions(by: str | Sequence[str]) -> list[str]:
    """`by` as the list of its dimensions."""
    entries = [by] if isinstance(by, str) else list(by)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"by must be a str or a sequence of str, but holds {type(entry).__name__}")
    if not entries:
        raise ConfigError('by must name who is counted, such as "ip" or ["ip", "user"], but is empty')
    return entries


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


class Needs:
    """What the policies of a gate ask a face to find out. Looked up once for each generation of the file."""

    __slots__ = ("generation", "route", "user")

    def __init__(self, gate: Gate) -> None:
        self.generation = gate.generation
        self.route = gate.names("route")
        self.user = gate.names("user")


class Limit:
    """One use of `rate_limit(...)`: its limiter, and what a face has to find out before it can ask it."""

    __slots__ = ("limiters", "cost", "by", "needs_route", "needs_user")

    def __init__(
        self,
        rules: str | None,
        *,
        limit: int | None = None,
        window_seconds: float | None = None,
        by: str | Sequence[str] | None = None,
        name: str | None = None,
        prefix: str | None = None,
        policy: str | None = None,
        algorithm: str | None = None,
        cost: int = 1,
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
        self.cost = check_cost(cost)
        if limit is not None or window_seconds is not None:
            if rules is not None:
                raise ConfigError("the limit is given twice: as rules and as limit=, window_seconds=")
            rules = rules_of_numbers(limit, window_seconds)
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
        self.by = dimensions("ip" if by is None else by)
        if scoped and name is None:
            self.by = [joined_with_route(entry) for entry in self.by]
        self.needs_route = names_kind(self.by, "route")
        self.needs_user = names_kind(self.by, "user")
        self.limiters = (
            Limiter(
                rules,
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
            ),
        )

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
