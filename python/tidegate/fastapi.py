"""tidegate for FastAPI: limits as dependencies, fields on every answer, the rules file as middleware.

    install(app)

    @app.get("/search", dependencies=[Depends(rate_limit("100/minute"))])
    async def search() -> dict[str, str]: ...

See docs/fastapi.md. Must not enter: addresses, keys, numbers; those are the compiled part's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import urlencode

from fastapi import Depends, Request, Response, WebSocket
from fastapi.exception_handlers import http_exception_handler
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection

from tidegate._core import Answers, Decision, Gate, Judgement, Limiter, ManualClock, asgi_hit, judge_asgi_async, shown
from tidegate._limits import UNROUTED, Limit, user_text
from tidegate._request_state import BODY_BYTES_MAX, SCOPE_KEY, BareState, RequestState, Scope, message_of, refused_async
from tidegate._routes import route_template
from tidegate.asgi import (
    PlanOf,
    TidegateMiddleware,
    UserOf,
    ask_user,
    close_reason,
    is_test_client,
    with_loopback_client,
)

__all__ = ["RateLimit", "RateLimited", "TidegateMiddleware", "install", "rate_limit", "user_rate_limit"]

User = str | int | None


class RateLimited(HTTPException):
    """A limit has refused the request. Its own handler answers with what every face of tidegate answers; register one
    for this class, or for its status, to answer otherwise. `decision` holds the numbers."""

    def __init__(self, judgement: Judgement) -> None:
        self.judgement = judgement
        self.decision: Decision = judgement.decision
        self.body: bytes = judgement.body
        fields = {name: value for name, value in judgement.fields_text if name != "Content-Type"}
        super().__init__(judgement.status, message_of(self.body), fields)


async def _answer(conn: HTTPConnection, error: Exception) -> Response | None:
    """The handler of RateLimited: the same bytes as every other face, also before a WebSocket is accepted."""
    assert isinstance(error, RateLimited)
    if isinstance(conn, WebSocket):
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


class RateLimit:
    """What rate_limit(...) makes: a dependency that keeps its identity, so that `app.dependency_overrides[it]` works.

    enabled   set it to False and it lets everything through without asking the store
    """

    __slots__ = ("limit", "_enabled", "_hit", "_simple", "_user", "_free", "__signature__", "__weakref__")

    def __init__(self, limit: Limit, user: Callable[..., Any] | None = None) -> None:
        self.limit = limit
        self._user = user
        self._free: Decision | None = None
        self._simple: Any = _never if user is not None else asgi_hit(limit.limiter, limit.cost, limit.needs_route)
        self.enabled = True
        parameters = [
            inspect.Parameter("conn", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection),
            inspect.Parameter("response", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Response),
        ]
        if user is not None and not _takes_connection(user):
            # It has parameters of its own: FastAPI finds them, and asks once for all who depend on it.
            parameters.append(
                inspect.Parameter("user", inspect.Parameter.KEYWORD_ONLY, annotation=Any, default=Depends(user))
            )
            self._user = None
        self.__signature__ = inspect.Signature(parameters)

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
        self._hit: Any = self._simple if enabled else _never

    @property
    def limiter(self) -> Limiter:
        """For a look at the count, or to reset it."""
        return self.limit.limiter

    def __repr__(self) -> str:
        return f"<rate_limit {'; '.join(self.limiter.rules)!r} name={self.limiter.name!r} by={self.limit.by!r}>"

    async def __call__(self, conn: HTTPConnection, response: Response, *, user: Any = None) -> Decision:
        got = self._hit(conn.scope)
        if got.__class__ is Decision:
            return got
        return await self._otherwise(conn, response, user, got)

    async def _otherwise(
        self, conn: HTTPConnection, response: Response, user: Any, judgement: Judgement | None
    ) -> Decision:
        """Whatever is not simply let through."""
        if not self._enabled:
            return self._unasked()
        scope = conn.scope
        state: RequestState | None = scope.get(SCOPE_KEY)
        if state is None:
            state = scope[SCOPE_KEY] = BareState()
        if self._user is not None:
            user = await ask_user(self._user, conn)
        elif user is not None:
            user = user_text(user)
        route = (route_template(scope) or UNROUTED) if self.limit.needs_route else None
        # HEAD is answered by what answers GET: the same work, so the same count.
        judged: Mapping[str, Any] = scope if scope.get("method") != "HEAD" else {**scope, "method": "GET"}
        ask = functools.partial(
            judge_asgi_async, self.limit.limiters, route=route, user=user, cost=self.limit.cost, prior=state
        )
        if judgement is None:
            judgement = await ask(judged, reads_body=True)
        if judgement.missing == "ip" and is_test_client(scope):
            judged = with_loopback_client(judged)
            judgement = await ask(judged, reads_body=True)
        if judgement.needs_body:
            state.append(judgement)
            judged, body = await _with_body(conn, judged)
            judgement = await ask(judged, body=body)
        if judgement.status:
            await refused_async(state, judgement)
            _make_answerable(scope)
            raise RateLimited(judgement)
        state.append(judgement)
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
    rules: str | None = None,
    *,
    limit: int | None = None,
    window_seconds: float | None = None,
    by: str | Sequence[str] | None = None,
    name: str | None = None,
    prefix: str | None = None,
    policy: str | None = None,
    algorithm: str | None = None,
    cost: int = 1,
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
    by       who is counted: "ip" (default), "user", "header:X-Api-Key", "ip+user", "user|ip", or a list of dimensions
    name     all uses of that name share one count. Without it each route (method and template) has its own;
    prefix   the same, under this name
    policy   a policy of the rules file (config=, else TIDEGATE_CONFIG), which then says everything else
    cost     units that one request takes
    user     callable -> the user's id or None: takes the connection, or whatever FastAPI can inject

    The other arguments are those of tidegate.Limiter. What is wrong raises here: RuleError, ConfigError, StoreError,
    TypeError, ValueError. A request over the limit raises RateLimited, which is answered with 429 and Retry-After in
    whole seconds, rounded up (RFC 9110 10.2.3).
    """
    made = Limit(
        rules, limit=limit, window_seconds=window_seconds, by=by, name=name, prefix=prefix, policy=policy,
        algorithm=algorithm, cost=cost, store=store, clock=clock, namespace=namespace, trusted_proxies=trusted_proxies,
        client_header=client_header, user_header=user_header, on_store_failure=on_store_failure, on_full=on_full,
        missing_identity=missing_identity, timeout=timeout, config=config, enabled=enabled,
    )  # fmt: skip
    return RateLimit(made, user if made.needs_user else None)


def user_rate_limit(
    rules: str | None = None,
    *,
    limit: int | None = None,
    window_seconds: float | None = None,
    name: str | None = None,
    prefix: str | None = None,
    algorithm: str | None = None,
    cost: int = 1,
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
        cost=cost, user=user, store=store, clock=clock, namespace=namespace, trusted_proxies=trusted_proxies,
        user_header=user_header, on_store_failure=on_store_failure, on_full=on_full, missing_identity="reject 401",
        timeout=timeout, enabled=enabled,
    )  # fmt: skip


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
) -> Gate | None:
    """Puts the limits' fields on every answer of the application: own responses, streams, errors, 422, mounted
    applications; and gives refusals one body everywhere. Call it before the first request.

    config, gate   also judge every request by this rules file, inside the application's other middleware, so that CORS
                   fields are on refusals and scope["user"] is known. The gate in force is returned.
    user           for that gate: callable(scope) -> the user's id or None
    plan           likewise: callable(scope) -> the name of the client's plan or None
    """
    if app.middleware_stack is not None:
        raise RuntimeError("install(app) comes before the application's first request")
    if gate is None and config is not None:
        gate = Gate(config, store=store, clock=clock, timeout=timeout)
    if gate is not None:
        app.user_middleware.append(Middleware(TidegateMiddleware, gate=gate, user=user, plan=plan))
    app.exception_handlers.setdefault(RateLimited, _answer)
    build = app.build_middleware_stack
    if not isinstance(build, _Build):
        setattr(app, "build_middleware_stack", _Build(build))
    return gate


class _Build:
    """Stands for build_middleware_stack: what add_middleware puts in place is still inside ServerErrorMiddleware, and
    so would miss the answers to unhandled errors."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    def __call__(self) -> Answers:
        return Answers(self.build())
