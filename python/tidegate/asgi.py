"""The rules file in front of any ASGI application.

    app.add_middleware(TidegateMiddleware, config="rules.yaml")      # Starlette, FastAPI
    app = TidegateMiddleware(app, config="rules.yaml")               # any other

Requests are judged before the application sees them, and before a byte of their body is read. Only the standard library
and the compiled part are used: no framework is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tidegate._core import Gate, Judgement, ManualClock, asgi_enter, asgi_send
from tidegate._limits import UNROUTED, user_text
from tidegate._request_state import SCOPE_KEY, App, Receive, RequestState, Scope, Send, refused
from tidegate._routes import table_of

UserOf = Callable[[Mapping[str, Any]], "str | int | None | Awaitable[str | int | None]"]

__all__ = ["TidegateMiddleware"]


class TidegateMiddleware:
    """Judges every HTTP request and WebSocket handshake by the rules file; any other scope passes through untouched.

    config   the rules file; without it TIDEGATE_CONFIG names it. ConfigError here, not on the first request.
    gate     a Gate to share instead of opening one
    store, clock, timeout  as for Gate
    user     callable(scope) -> the user's id or None, sync or async; without it scope["user"] counts when authenticated

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
        store: str | None = None,
        clock: ManualClock | None = None,
        timeout: float = 0.05,
        user: UserOf | None = None,
    ) -> None:
        self.app = app
        self.gate = Gate(config, store=store, clock=clock, timeout=timeout) if gate is None else gate
        self.user = user
        self._enter: Any = asgi_enter(self.gate, user is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entered = self._enter(scope, send)
        if entered is None or entered.__class__ is Judgement:
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
            send = asgi_send(state, send)
        route = route_ahead(self.app, scope) if self.gate.names("route") else None
        user = None if self.user is None or not self.gate.names("user") else await ask_user(self.user, scope)
        if judgement is None:
            judgement = self.gate.judge_asgi(scope, user=user, route=route, prior=state)
        if judgement.missing == "ip" and is_test_client(scope):
            judgement = self.gate.judge_asgi(with_loopback_client(scope), user=user, route=route, prior=state)
        if judgement.status:
            refused(state, judgement)
            await refuse(scope, receive, send, judgement)
            return
        state.append(judgement)
        await self.app(scope, receive, send)


def is_test_client(scope: Mapping[str, Any]) -> bool:
    """Whether the client is Starlette's TestClient, which gives a word where an address belongs. No server does."""
    return scope.get("client") == ("testclient", 50000)


def with_loopback_client(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The scope as if the test client had an address, so that tests need no setting of their own."""
    return {**scope, "client": ("127.0.0.1", 50000)}


async def ask_user(user: Callable[[Any], Any], asked: Any) -> str | None:
    """The answer of a `user=` callable, sync or async."""
    answer = user(asked)
    if inspect.isawaitable(answer):
        answer = await answer
    return user_text(answer)


def route_ahead(app: Any, scope: Mapping[str, Any]) -> str:
    """The template that a request will meet in this application, found along `.app` and the router's routes."""
    while app is not None:
        router = getattr(app, "router", None) or (app if hasattr(app, "routes") else None)
        if router is not None:
            path = str(scope["path"])
            root = str(scope.get("root_path", "")).rstrip("/")
            if root and (path == root or path.startswith(root + "/")):
                path = path[len(root) :]
            return table_of(router).match(path, str(scope.get("method", "GET"))) or UNROUTED
        app = getattr(app, "app", None)
    return UNROUTED


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
