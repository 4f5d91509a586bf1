"""The rules file, or limits written here, in front of any ASGI application.

    app.add_middleware(TidegateMiddleware, config="rules.yaml")                  # Starlette, FastAPI
    app = TidegateMiddleware(app, config="rules.yaml")                           # any other
    app = TidegateMiddleware(app, limiter=Limiter("100/minute", by="ip"))

Requests are judged before the application sees them, and before a byte of their body is read. Only the standard library
and the compiled part are used: no framework is needed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tidegate._core import Gate, Judgement, Limiter, ManualClock, asgi_enter, asgi_send, judge_asgi_async, tell_outcomes
from tidegate._limits import UNROUTED, check_cost, check_judges, open_gate, user_text
from tidegate._outcome import ChargeWhen, Outcome, Pending, check_charge_when, give_back_async
from tidegate._request_state import (
    BODY_BYTES_MAX,
    SCOPE_KEY,
    SETTLE_KEY,
    App,
    Message,
    Receive,
    RequestState,
    Scope,
    Send,
    refused_async,
    settle_async,
)
from tidegate._routes import table_of

UserOf = Callable[[Mapping[str, Any]], "str | int | None | Awaitable[str | int | None]"]
PlanOf = Callable[[Mapping[str, Any]], "str | None | Awaitable[str | None]"]

__all__ = ["TidegateMiddleware"]


class TidegateMiddleware:
    """Judges every HTTP request and WebSocket handshake by the rules file, by limiters, or by both; any other scope passes
    through untouched.

    config   the rules file; without it, and without gate= and limiter=, TIDEGATE_CONFIG names it. ConfigError here, not on
             the first request
    gate     a Gate to share instead of opening one
    limiter  a Limiter with `by`, or several: judged together, all or nothing, after the rules file
    cost     units that a request takes of `limiter`
    charge_when   callable(response) -> whether a request that was answered so counts: `response.status_code`,
             `response.headers`. It is charged before it goes on and gets back what it took. Of `limiter` only
    store, clock, timeout  as for Gate
    user     callable(scope) -> the user's id or None, sync or async; without it scope["user"] counts when authenticated
    plan     callable(scope) -> the name of the client's plan or None, for policies with `plans`; sync or async

    A refusal is what the rules say, such as 429 with Retry-After (RFC 9110 10.2.3). A refused WebSocket gets the same
    answer where the server offers the denial response, else it is closed with code 1008 before it is accepted.

    Put it inside CORSMiddleware (add it first): a browser shows a refusal without CORS fields as a network failure.
    """

    def __init__(
        self,
        app: App,
        config: str | None = None,
        *,
        gate: Gate | None = None,
        limiter: Limiter | Sequence[Limiter] | None = None,
        cost: int = 1,
        charge_when: ChargeWhen | None = None,
        store: str | None = None,
        clock: ManualClock | None = None,
        timeout: float = 0.05,
        user: UserOf | None = None,
        plan: PlanOf | None = None,
    ) -> None:
        self.app = app
        check_charge_when(charge_when)
        self.limiters = () if limiter is None else (limiter,) if isinstance(limiter, Limiter) else tuple(limiter)
        self.cost = check_cost(cost)
        for one in self.limiters:
            check_judges(one)
        if charge_when is not None and not self.limiters:
            raise ValueError("charge_when= speaks of limiter=; a policy of a rules file has `count`")
        self.charge_when = charge_when
        if gate is None and (config is not None or not self.limiters):
            gate = open_gate(config, store=store, clock=clock, timeout=timeout)
        self.gate = gate
        self.user = user
        self.plan = plan
        simple = gate is not None and plan is None and not self.limiters
        self._enter: Any = asgi_enter(gate, user is not None) if simple and gate is not None else _never

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entered = self._enter(scope, send)
        if entered is None or type(entered) is Judgement:
            await self._otherwise(scope, receive, send, entered)
        else:
            await self.app(scope, receive, entered)

    async def _otherwise(self, scope: Scope, receive: Receive, send: Send, judgement: Judgement | None) -> None:
        """Whatever is not simply let through."""
        kind = scope["type"]
        if kind != "http" and kind != "websocket":
            await self.app(scope, receive, send)
            return
        state: RequestState | None = scope.get(SCOPE_KEY)
        if state is None:
            state = scope[SCOPE_KEY] = []
            send = asgi_send(state, send, scope if isinstance(scope, dict) else {})
        gate = self.gate
        asks: dict[str, Any] = {"reads_body": True}
        if self.limiters or (gate is not None and gate.names("route")):
            asks["route"] = route_ahead(self.app, scope)
        if self.user is not None and (self.limiters or (gate is not None and gate.names("user"))):
            asks["user"] = await ask_user(self.user, scope)
        if self.plan is not None and gate is not None:
            asks["plan"] = await ask_user(self.plan, scope)
        judges: list[Callable[..., Awaitable[Judgement]]] = [] if gate is None else [gate.judge_asgi_async]
        if self.limiters:
            judges.append(functools.partial(judge_asgi_async, self.limiters, cost=self.cost))
        judged: Mapping[str, Any] = scope
        for judge in judges:
            if judgement is None:
                judgement = await judge(judged, prior=state, **asks)
            if wants_an_address(judgement, scope):
                judged = with_loopback_client(scope)
                judgement = await judge(judged, prior=state, **asks)
            if judgement.needs_body:
                body, receive = await read_ahead(receive) if kind == "http" else (b"", receive)
                state.append(judgement)
                judgement = await judge(judged, prior=state, body=body, **asks)
            if judgement.status:
                await refused_async(state, judgement)
                await refuse(scope, receive, send, judgement)
                return
            state.append(judgement)
            last, judgement = judgement, None
        pending = [] if self.charge_when is None else [Pending(last.decision, self.charge_when)]
        if not pending and not any(judged.settles for judged in state):
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, settling(state, send, pending))
        except BaseException:
            await settle_async(state, 500, ())  # what the server makes of it is outside of us
            given_back, pending[:] = list(pending), []
            await give_back_async(given_back, Outcome(500))
            raise


def _never(scope: Scope, send: Send) -> None:
    """Stands for asgi_enter where Python has something to find out first."""


async def read_ahead(receive: Receive) -> tuple[bytes, Receive]:
    """The body as far as it is looked at, and a `receive` that gives all of it once more."""
    messages: list[Message] = []
    length = 0
    while length < BODY_BYTES_MAX:
        message = await receive()
        messages.append(message)
        length += len(message.get("body") or b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    messages.reverse()

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    body = b"".join(message.get("body") or b"" for message in reversed(messages))
    return body[:BODY_BYTES_MAX], replayed


def status_of(message: Message) -> int:
    """What a message answers, if it opens an answer; else 0. A WebSocket that is accepted is 101, one closed 403."""
    kind = message["type"]
    if kind == "http.response.start" or kind == "websocket.http.response.start":
        return int(message["status"])
    return 101 if kind == "websocket.accept" else 403 if kind == "websocket.close" else 0


def settling(state: RequestState, send: Send, pending: list[Pending]) -> Send:
    """A `send` that tells the judgements what is answered before it is sent. `pending` is empty after that."""

    async def settled(message: Message) -> None:
        status = status_of(message)
        if status:
            headers = list(message.get("headers", ()))
            await settle_async(state, status, headers)
            given_back, pending[:] = list(pending), []
            if given_back:
                await give_back_async(given_back, Outcome(status, headers))
        await send(message)

    return settled


def is_test_client(scope: Mapping[str, Any]) -> bool:
    """Whether the client is Starlette's TestClient, which gives a word where an address belongs. No server does."""
    return tuple(scope.get("client") or ()) == ("testclient", 50000)  # a list before Starlette 0.39


def wants_an_address(judgement: Judgement, scope: Mapping[str, Any]) -> bool:
    """Whether the test client is refused, or counted otherwise, for the address alone that it has not."""
    return bool(judgement.missing and (judgement.missing == "ip" or judgement.status)) and is_test_client(scope)


def with_loopback_client(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The scope as if the test client had an address, so that tests need no setting of their own."""
    return {**scope, "client": ("127.0.0.1", 50000)}


async def ask(function: Callable[[Any], Any], asked: Any) -> Any:
    """The answer of a callable, sync or async."""
    answer = function(asked)
    return await answer if inspect.isawaitable(answer) else answer


async def ask_user(user: Callable[[Any], Any], asked: Any) -> str | None:
    """The answer of a `user=` callable, sync or async."""
    return user_text(await ask(user, asked))


class _Settle:
    """What the compiled send calls in place of `send` while a limit waits to be told what is answered."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.pending: list[Pending] = []

    async def __call__(self, message: Message, send: Send) -> None:
        status = status_of(message)
        if status:
            self.scope.pop(SETTLE_KEY, None)  # what follows goes straight to the server
            await give_back_async(self.pending, Outcome(status, message.get("headers", ())))
        await send(message)


def charge_by_outcome(scope: Scope, pending: Pending) -> None:
    """Sees to it that this one is told what is answered. There has to be a send of asgi_send() around the application."""
    settle: _Settle | None = scope.get(SETTLE_KEY)
    if settle is None:
        tell_outcomes()
        settle = scope[SETTLE_KEY] = _Settle(scope)
    settle.pending.append(pending)


def route_ahead(app: Any, scope: Mapping[str, Any]) -> str:
    """The template that a request will meet in this application, found along `.app` and the router's routes. Where it stands
    in a route's or a mount's own middleware, the outermost router has begun already, and knows what is in front."""
    router = scope.get("router")
    root = str(scope.get("root_path", ""))
    if router is not None:
        root = str(scope.get("app_root_path", root))  # mounts lengthen the other
    root = root.rstrip("/")
    while router is None and app is not None:
        router = getattr(app, "router", None) or (app if hasattr(app, "routes") else None)
        app = getattr(app, "app", None)
    if router is None:
        return UNROUTED
    path = str(scope["path"])
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return table_of(router).match(path, str(scope.get("method", "GET"))) or UNROUTED


async def refuse(scope: Scope, receive: Receive, send: Send, judgement: Judgement) -> None:
    """Answers a request that has been refused, or a WebSocket handshake before it is accepted."""
    prefix = ""
    if scope["type"] == "websocket":
        await receive()  # websocket.connect comes first (ASGI, WebSocket message specification)
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008, "reason": close_reason(judgement)})
            return
        prefix = "websocket."
    body = judgement.body
    headers = [*judgement.fields, (b"content-length", b"%d" % len(body))]
    await send({"type": prefix + "http.response.start", "status": judgement.status, "headers": headers})
    await send({"type": prefix + "http.response.body", "body": b"" if scope.get("method") == "HEAD" else body})


def close_reason(judgement: Judgement) -> str:
    """Why a WebSocket was closed; a close frame has room for 123 bytes of it (RFC 6455 5.5)."""
    texts = dict(judgement.fields_text)
    retry = texts.get("Retry-After")
    return f"refused, retry after {retry} s" if retry else "refused"
