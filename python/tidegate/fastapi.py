"""tidegate for FastAPI: limits as dependencies, fields on every answer, the rules file as middleware.

    install(app)

    @app.get("/search", dependencies=[Depends(rate_limit("100/minute"))])
    async def search() -> dict[str, str]: ...

See docs/fastapi.md. Must not enter: addresses, keys, numbers; those are the compiled part's.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlencode

from fastapi import Depends, Request, Response, WebSocket
from fastapi.exception_handlers import http_exception_handler
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketState

from tidegate._core import (
    Answers,
    Decision,
    Dependency,
    Gate,
    Judgement,
    Limiter,
    ManualClock,
    asgi_hit,
    judge_asgi_async,
    shown,
)
from tidegate._limits import UNROUTED, Asked, Kind, Limit, check_cost, key_text, user_text
from tidegate._openapi import describe, responses_of
from tidegate._outcome import ChargeWhen, Pending
from tidegate._request_state import (
    BODY_BYTES_MAX,
    SCOPE_KEY,
    BareState,
    Message,
    RequestState,
    Scope,
    message_of,
    refusal_of,
    refused_async,
)
from tidegate._routes import route_template
from tidegate.asgi import (
    PlanOf,
    TidegateMiddleware,
    UserOf,
    ask,
    charge_by_outcome,
    close_reason,
    is_test_client,
    wants_an_address,
    with_loopback_client,
)

__all__ = [
    "MessageLimit", "RateLimit", "RateLimited", "TidegateMiddleware", "install", "message_limit", "rate_limit",
    "user_rate_limit",
]  # fmt: skip

User = str | int | None
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
log = logging.getLogger("tidegate")


class RateLimited(HTTPException):
    """A limit has refused the request. Its own handler answers with what every face of tidegate answers; register one
    for this class, or for its status, to answer otherwise. `decision` holds the numbers.

    An endpoint that asks a limiter itself raises it with the Decision that refuses, of hit(), wait() or reserve():

        async with limiter.reserve(user, cost=4000) as reservation:
            if not reservation:
                raise RateLimited(reservation.decision)

    `conn`, the request, is needed where install(app) was not called, in mounted applications, and where a handler of your own
    answers: their answers get the same fields and body then.
    """

    def __init__(self, refused: Judgement | Decision, conn: HTTPConnection | None = None) -> None:
        judgement = refusal_of(refused)
        if conn is not None:
            _tell(conn.scope, judgement)
            _make_answerable(conn.scope)
        self.judgement = judgement
        self.decision: Decision = judgement.decision
        self.body: bytes = judgement.body
        fields = {name: value for name, value in judgement.fields_text if name != "Content-Type"}
        super().__init__(judgement.status, message_of(self.body), fields)


def _tell(scope: Scope, judgement: Judgement) -> None:
    """Has a refusal by the application itself show on the answer. What limits have taken for the request stays taken: it has
    come as far as its endpoint."""
    state: RequestState | None = scope.get(SCOPE_KEY)
    if state is not None and judgement not in state:
        state.append(judgement)


async def _answer(conn: HTTPConnection, error: Exception) -> Response | None:
    """The handler of RateLimited: the same bytes as every other face, also before a WebSocket is accepted."""
    assert isinstance(error, RateLimited)
    _tell(conn.scope, error.judgement)
    if isinstance(conn, WebSocket):
        if conn.application_state is not WebSocketState.CONNECTING:
            await conn.close(1008, close_reason(error.judgement))  # accepted already: by an endpoint that asks itself
            return None
        if "websocket.http.response" not in (conn.scope.get("extensions") or {}):
            await conn.close(1008, close_reason(error.judgement))
            return None
    content_type = dict(error.judgement.fields_text).get("Content-Type")
    return Response(error.body, error.status_code, error.headers, content_type)


_STOCK_HANDLERS = (http_exception_handler, ExceptionMiddleware.http_exception)


def _make_answerable(scope: Scope) -> None:
    """Sees to it that the application about to handle RateLimited has a handler for it.

    A mounted application has handlers of its own, and FastAPI's stock one would put the answer into {"detail": ...} and
    fail on a WebSocket. A handler that somebody wrote, for this class, its status or HTTPException, stays in charge.
    """
    handlers = scope.get("starlette.exception_handlers")
    if not handlers:
        return
    by_class = handlers[0]
    if RateLimited not in by_class:
        general = by_class.get(HTTPException)
        if getattr(general, "__func__", general) in _STOCK_HANDLERS:
            by_class[RateLimited] = _answer


def _never(scope: Scope) -> None:
    """Stands for asgi_hit where Python has something to find out first."""


_said_bare: list[bool] = []  # once a process


class RateLimit(Dependency):
    """What rate_limit(...) makes: a dependency that keeps its identity, so that `app.dependency_overrides[it]` works.

    enabled   set it to False and it lets everything through without asking the store
    """

    __slots__ = (
        "limit", "_enabled", "_simple", "_user", "_free", "_asked", "_exempt", "__signature__", "__weakref__", "__dict__",
    )  # fmt: skip

    def __init__(self, limit: Limit, user: Callable[..., Any] | None = None) -> None:
        self.limit = limit
        self._free: Decision | None = None
        self._exempt: set[Any] = set()
        simple = user is None and not limit.asks
        hit: Any = asgi_hit(limit.limiter, limit.cost, limit.needs_route, limit.needs_user) if simple else _never
        self._simple = hit if limit.charge_when is None or not simple else self._hit_by_outcome(hit)
        self.enabled = True
        parameters = [
            inspect.Parameter("conn", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection),
            inspect.Parameter("response", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Response),
        ]
        # What is asked with the connection; the others have parameters of their own: FastAPI finds them, and asks once
        # for all who depend on them.
        self._asked: dict[str, Asked] = {}
        wanted: dict[str, Asked | None] = {"user": user, "cost": limit.cost_of, "rules": limit.rules_of}
        wanted.update({f"key_{number}": function for number, function in enumerate(limit.keys.values())})
        for name, function in wanted.items():
            if function is None:
                continue
            if _takes_connection(function):
                self._asked[name] = function
                continue
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Any, default=Depends(function))
            )
        self.__signature__ = inspect.Signature(parameters)
        # FastAPI awaits what a coroutine function gives and looks here for whether it is one. What it then calls is the
        # type's, which is written in C and faster: see Dependency.
        self.__dict__["__call__"] = self._called

    @property
    def dependency(self) -> NoReturn:
        """What FastAPI asks of a dependency: it meets this name where Depends(...) was left out."""
        raise AttributeError("a limit is no dependency by itself: write Depends(rate_limit(...))")

    @property
    def enabled(self) -> bool:
        """False lets everything through without asking the store; may be set at any time."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._hit = _never if not enabled else self._hit_unless_exempt if self._exempt else self._simple

    def __copy__(self) -> RateLimit:
        """The limit itself: a copied route or list of dependencies has the same limit and the same override."""
        return self

    def __deepcopy__(self, memo: object) -> RateLimit:
        return self

    def exempt(self, endpoint: Endpoint) -> Endpoint:
        """Leaves an endpoint out of this limit, for one that a router or an application has for all of its routes. Below
        the route's decorator or above, any endpoint that FastAPI takes."""
        self._exempt.add(endpoint)
        self.enabled = self._enabled
        return endpoint

    def _hit_by_outcome(self, hit: Callable[[Scope], Any]) -> Callable[[Scope], Any]:
        def hit_by_outcome(scope: Scope) -> Any:
            got = hit(scope)
            if got.__class__ is Decision:
                self._charge_by_outcome(scope, got)
            return got

        return hit_by_outcome

    def _hit_unless_exempt(self, scope: Scope) -> Any:
        return self._unasked() if scope.get("endpoint") in self._exempt else self._simple(scope)

    def _charge_by_outcome(self, scope: Scope, decision: Decision) -> None:
        assert self.limit.charge_when is not None
        if scope[SCOPE_KEY].__class__ is BareState:
            if not _said_bare:
                _said_bare.append(True)
                log.warning(
                    "charge_when= cannot see the answers of an application without install(app): every request counts"
                )
            return
        charge_by_outcome(scope, Pending(decision, self.limit.charge_when))

    @property
    def limiter(self) -> Limiter:
        """For a look at the count, or to reset it. Where the rules are a callable's, limiter_for() has theirs."""
        return self.limit.limiter

    def limiter_for(self, rules: str) -> Limiter:
        """The limiter of one of the rules that a callable answers with."""
        return self.limit.limiters_for(rules)[0]

    def __repr__(self) -> str:
        return f"<rate_limit {'; '.join(self.limiter.rules)!r} name={self.limiter.name!r} by={self.limit.by!r}>"

    async def _called(self, conn: HTTPConnection, response: Response, **told: Any) -> Decision:
        got = self._hit(conn.scope)
        if got.__class__ is Decision:
            return got
        return await self._otherwise(conn, response, told, got)

    # Written as a decorator it is called with the endpoint alone, which Python refuses in these words.
    _called.__qualname__ = (
        "rate_limit(...) is no decorator: give the route dependencies=[Depends(rate_limit(...))]. RateLimit.__call__"
    )

    async def _otherwise(
        self, conn: HTTPConnection, response: Response, told: dict[str, Any], judgement: Judgement | None
    ) -> Decision:
        """Whatever is not simply let through."""
        if not self._enabled:
            return self._unasked()
        scope = conn.scope
        state: RequestState | None = scope.get(SCOPE_KEY)
        if state is None:
            state = scope[SCOPE_KEY] = BareState()
        for name, function in self._asked.items():
            told[name] = await ask(function, conn)
        user = user_text(told.get("user"))
        keys = {name: key_text(name, told[f"key_{number}"]) for number, name in enumerate(self.limit.keys)} or None
        route = (route_template(scope) or UNROUTED) if self.limit.needs_route else None
        # HEAD is answered by what answers GET: the same work, so the same count.
        judged: Mapping[str, Any] = scope if scope.get("method") != "HEAD" else {**scope, "method": "GET"}
        judges = functools.partial(
            judge_asgi_async,
            self.limit.limiters if self.limit.rules_of is None else self.limit.limiters_for(told["rules"]),
            route=route,
            user=user,
            cost=self.limit.cost if self.limit.cost_of is None else check_cost(told["cost"]),
            keys=keys,
            prior=state,
        )
        if judgement is None:
            judgement = await judges(judged, reads_body=True)
        if wants_an_address(judgement, scope):
            judged = with_loopback_client(judged)
            judgement = await judges(judged, reads_body=True)
        if judgement.needs_body:
            state.append(judgement)
            judged, body = await _with_body(conn, judged)
            judgement = await judges(judged, body=body)
        if judgement.status:
            await refused_async(state, judgement)
            _make_answerable(scope)
            raise RateLimited(judgement)
        state.append(judgement)
        if self.limit.charge_when is not None:
            self._charge_by_outcome(scope, judgement.decision)
        if isinstance(state, BareState):
            # Without install(): FastAPI merges these into what it builds itself, not into an own Response.
            for name, value in shown(state).fields_text:
                response.headers[name] = value
        return judgement.decision

    def _unasked(self) -> Decision:
        if self._free is None:
            self._free = Limiter("; ".join(self.limiter.rules), enabled=False).hit("")
        return self._free


async def _with_body(conn: HTTPConnection, scope: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
    """The body for `form:` and `json:`, and the scope that describes it. FastAPI may have read the form by now: its
    fields are written anew, in the type that they are then in."""
    if not isinstance(conn, Request):
        return scope, b""
    form = getattr(conn, "_form", None)
    if form is not None:
        fields = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-type"]
        headers.append((b"content-type", b"application/x-www-form-urlencoded"))
        return {**scope, "headers": headers}, urlencode(fields).encode()
    length = conn.headers.get("content-length", "")
    if not hasattr(conn, "_body") and not (length.isascii() and length.isdigit() and int(length) < BODY_BYTES_MAX):
        return scope, b""  # longer than is looked at, or nobody knows: what would stand there is missing
    return scope, await conn.body()


def _takes_connection(user: Callable[..., Any]) -> bool:
    """Whether a `user=` callable wants the connection itself rather than parameters that FastAPI would find."""
    try:
        parameters = list(inspect.signature(user, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError):
        return False  # FastAPI's own reading of it knows more, or says better what is wrong
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) != 1 or len(parameters) != 1 or needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    annotation = needed[0].annotation
    return annotation is needed[0].empty or annotation in (HTTPConnection, Request, WebSocket)


def rate_limit(
    rules: str | Callable[..., str | Awaitable[str]] | None = None,
    *,
    limit: int | Callable[..., int | Awaitable[int]] | None = None,
    window_seconds: float | None = None,
    by: Kind | Sequence[Kind] | None = None,
    name: str | None = None,
    prefix: str | None = None,
    policy: str | None = None,
    algorithm: str | None = None,
    cost: int | Callable[..., int | Awaitable[int]] = 1,
    charge_when: ChargeWhen | None = None,
    user: Callable[..., User | Awaitable[User]] | None = None,
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
) -> RateLimit:
    """A dependency that limits whatever depends on it: a route, a router, an application; HTTP and WebSocket.

    rules    "10/second; 1000/hour"; or limit= units per window_seconds=
    by       who is counted: "ip" (default), "user", "header:X-Api-Key", "ip+user", "user|ip", a callable, or a list of
             dimensions
    name     all uses of that name share one count. Without it each route (method and template) has its own;
    prefix   the same, under this name
    policy   a policy of the rules file (config=, else TIDEGATE_CONFIG), which then says everything else
    cost     units that one request takes
    charge_when   callable(response) -> whether a request that was answered so counts; needs install(app). It is judged
             and charged before it goes on, and gets back what it took, so the limit is exact whatever asks meanwhile
    user     callable -> the user's id or None

    rules, limit, by, cost and user may be callables, sync or async, that take the connection, or whatever FastAPI can
    inject; they are asked for each request. The other arguments are those of tidegate.Limiter. What is wrong raises
    here: RuleError, ConfigError, StoreError, TypeError, ValueError. A request over the limit raises RateLimited, which
    is answered with 429 and Retry-After in whole seconds, rounded up (RFC 9110 10.2.3).
    """
    made = Limit(
        rules, limit=limit, window_seconds=window_seconds, by=by, name=name, prefix=prefix, policy=policy,
        algorithm=algorithm, cost=cost, charge_when=charge_when, store=store, clock=clock, namespace=namespace,
        trusted_proxies=trusted_proxies, client_header=client_header, user_header=user_header,
        on_store_failure=on_store_failure, on_full=on_full, missing_identity=missing_identity, timeout=timeout,
        config=config, enabled=enabled,
    )  # fmt: skip
    return RateLimit(made, user if made.needs_user else None)


def user_rate_limit(
    rules: str | Callable[..., str | Awaitable[str]] | None = None,
    *,
    limit: int | Callable[..., int | Awaitable[int]] | None = None,
    window_seconds: float | None = None,
    name: str | None = None,
    prefix: str | None = None,
    algorithm: str | None = None,
    cost: int | Callable[..., int | Awaitable[int]] = 1,
    charge_when: ChargeWhen | None = None,
    user: Callable[..., User | Awaitable[User]] | None = None,
    store: str | None = None,
    clock: ManualClock | None = None,
    namespace: str | None = None,
    trusted_proxies: Sequence[str] | None = None,
    user_header: str | None = None,
    on_store_failure: str | None = None,
    on_full: str | None = None,
    timeout: float = 0.05,
    enabled: bool | None = None,
) -> RateLimit:
    """As rate_limit, by the signed-in user; a request without one is answered with 401."""
    return rate_limit(
        rules, limit=limit, window_seconds=window_seconds, by="user", name=name, prefix=prefix, algorithm=algorithm,
        cost=cost, charge_when=charge_when, user=user, store=store, clock=clock, namespace=namespace,
        trusted_proxies=trusted_proxies, user_header=user_header, on_store_failure=on_store_failure, on_full=on_full,
        missing_identity="reject 401", timeout=timeout, enabled=enabled,
    )  # fmt: skip


class MessageLimit:
    """What message_limit(...) makes: a dependency of a WebSocket route that counts the messages it receives.

    enabled   set it to False and it lets everything through without asking the store
    """

    __slots__ = ("limit", "enabled", "close_code", "_asked", "__signature__", "__weakref__")

    def __init__(self, limit: Limit, user: Callable[..., Any] | None, close_code: int) -> None:
        self.limit = limit
        self.enabled = True
        self.close_code = close_code
        self._asked = user
        parameters = [
            inspect.Parameter("socket", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=WebSocket),
            # Only so that a call with an endpoint alone, as of a decorator, is an error.
            inspect.Parameter("conn", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection),
        ]
        if user is not None and not _takes_connection(user):
            parameters.append(
                inspect.Parameter("user", inspect.Parameter.KEYWORD_ONLY, annotation=Any, default=Depends(user))
            )
            self._asked = None
        self.__signature__ = inspect.Signature(parameters)

    @property
    def limiter(self) -> Limiter:
        """For a look at the count, or to reset it."""
        return self.limit.limiter

    def __repr__(self) -> str:
        return f"<message_limit {'; '.join(self.limiter.rules)!r} name={self.limiter.name!r} by={self.limit.by!r}>"

    async def __call__(self, socket: WebSocket, conn: HTTPConnection, user: Any = None) -> None:
        if self._asked is not None:
            user = await ask(self._asked, socket)
        scope: Mapping[str, Any] = socket.scope
        if is_test_client(scope):
            scope = with_loopback_client(scope)
        asks: dict[str, Any] = {
            "route": (route_template(socket.scope) or UNROUTED) if self.limit.needs_route else None,
            "user": user_text(user),
            "cost": self.limit.cost,
        }
        receive = socket._receive

        async def counted() -> Message:
            message = await receive()
            if message["type"] != "websocket.receive" or not self.enabled:
                return message
            judgement = await judge_asgi_async(self.limit.limiters, scope, **asks)
            if judgement.status == 0:
                return message
            if socket.application_state is WebSocketState.CONNECTED:
                await socket.close(self.close_code, close_reason(judgement))
            # To the endpoint the client has gone: it ends as it would then.
            return {"type": "websocket.disconnect", "code": self.close_code, "reason": close_reason(judgement)}

        socket._receive = counted

    __call__.__qualname__ = (
        "message_limit(...) is no decorator: give the route dependencies=[Depends(message_limit(...))]. MessageLimit.__call__"
    )


def message_limit(
    rules: str | None = None,
    *,
    limit: int | None = None,
    window_seconds: float | None = None,
    by: str | Sequence[str] | None = None,
    name: str | None = None,
    prefix: str | None = None,
    algorithm: str | None = None,
    cost: int = 1,
    user: Callable[..., User | Awaitable[User]] | None = None,
    close_code: int = 1008,
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
    enabled: bool | None = None,
) -> MessageLimit:
    """A dependency of a WebSocket route that limits the messages it receives; rate_limit() limits the handshakes.

    The message over the limit closes the socket with `close_code` (1008: policy violation, RFC 6455 7.4.1; 1013: try
    again later) and a reason that tells how long to wait; to the endpoint the client has gone, as WebSocketDisconnect.
    The arguments are those of rate_limit, and so is what raises here.
    """
    if not (close_code == 1008 or 1011 <= close_code <= 1014 or 3000 <= close_code <= 4999):
        raise ValueError(f"close_code must be 1008, 1011 to 1014 or 3000 to 4999 (RFC 6455 7.4), but is {close_code}")
    made = Limit(
        rules, limit=limit, window_seconds=window_seconds, by=by, name=name, prefix=prefix if name or prefix else "messages",
        algorithm=algorithm, cost=cost, store=store, clock=clock, namespace=namespace, trusted_proxies=trusted_proxies,
        client_header=client_header, user_header=user_header, on_store_failure=on_store_failure, on_full=on_full,
        missing_identity=missing_identity, timeout=timeout, enabled=enabled,
    )  # fmt: skip
    if made.asks:
        raise TypeError("message_limit() takes texts and numbers, no callables but user=: it is asked for each message")
    return MessageLimit(made, user if made.needs_user else None, close_code)


def install(
    app: Starlette,
    *,
    config: str | None = None,
    gate: Gate | None = None,
    store: str | None = None,
    clock: ManualClock | None = None,
    timeout: float = 0.05,
    user: UserOf | None = None,
    plan: PlanOf | None = None,
    openapi: bool = True,
) -> Gate | None:
    """Puts the limits' fields on every answer of the application: own responses, streams, errors, 422, mounted
    applications; and gives refusals one body everywhere. Call it before the first request.

    config, gate   also judge every request by this rules file, inside the application's other middleware, so that CORS
                   fields are on refusals and scope["user"] is known. The gate in force is returned.
    user           for that gate: callable(scope) -> the user's id or None
    plan           likewise: callable(scope) -> the name of the client's plan or None
    openapi        the schema of a FastAPI application tells of 429, its body and its fields where a route has a limit, and of
                   401 or 400 where that refuses requests that do not say who is asking
    """
    if app.middleware_stack is not None:
        raise RuntimeError("install(app) comes before the application's first request")
    if gate is None and config is not None:
        gate = Gate(config, store=store, clock=clock, timeout=timeout)
    if gate is not None:
        app.user_middleware.append(Middleware(TidegateMiddleware, gate=gate, user=user, plan=plan))
    app.exception_handlers.setdefault(RateLimited, _answer)
    if openapi:
        describe(app, _answers_of)
    build = app.build_middleware_stack
    if not isinstance(build, _Build):
        setattr(app, "build_middleware_stack", _Build(build))
    return gate


def _answers_of(call: Any, endpoint: Any) -> Mapping[str, Any]:
    return responses_of(call.limit.unidentified) if isinstance(call, RateLimit) and endpoint not in call._exempt else {}


class _Build:
    """Stands for build_middleware_stack: what add_middleware puts in place is still inside ServerErrorMiddleware, and
    so would miss the answers to unhandled errors."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    def __call__(self) -> Answers:
        return Answers(self.build())
