"""TidegateMiddleware: the rules file in front of any ASGI application."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from tidegate import ConfigError, Gate
from tidegate.asgi import TidegateMiddleware
from tidegate.fastapi import install, rate_limit

from setting import Setting

RULES = """
store: {store}
policies:
  - name: login
    match: {{path: /login, methods: [POST]}}
    rules: 2/minute
  - name: api
    match: {{path: "/api/*"}}
    rules: 5/minute
  - name: routes
    match: {{path: "/routes/*"}}
    rules: 1/minute
    by: ip+route
  - name: members
    match: {{path: "/members/*"}}
    rules: 1/minute
    by: user
  - name: closed
    match: {{path: "/closed"}}
    rules: deny
"""


class RulesSetting(Setting):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "rules.yaml"
        self.path.write_text(RULES.format(store=self.store))

    @property
    def arguments(self) -> dict[str, Any]:
        return {"config": str(self.path), **self.own}


@pytest.fixture
def setting(tmp_path: Path) -> RulesSetting:
    return RulesSetting(tmp_path)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """A plain ASGI application that sends the same message objects each time."""
    await send(START)
    await send({"type": "http.response.body", "body": b"hello"})


START = {"type": "http.response.start", "status": 200, "headers": ((b"content-type", b"text/plain"),)}


def statuses(client: TestClient, path: str, count: int, **request: Any) -> list[int]:
    return [client.get(path, **request).status_code for _ in range(count)]


def run(app: Callable[..., Awaitable[None]], scope: dict[str, Any], *received: dict[str, Any]) -> list[Any]:
    """What an application sends for one scope."""
    sent: list[Any] = []
    waiting = list(received)

    async def receive() -> dict[str, Any]:
        assert waiting, "more was received than the server had"
        return waiting.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent


def http(path: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "client": ("192.0.2.1", 5000), "server": ("192.0.2.80", 80), "scheme": "http", **more,
    }  # fmt: skip


def test_a_plain_application_is_limited_and_its_constant_messages_stay_as_they_were(setting: RulesSetting) -> None:
    client = TestClient(TidegateMiddleware(hello, **setting.arguments))
    answers = [client.get("/api/x") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["4", "3", "2", "1", "0", "0"]
    assert START["headers"] == ((b"content-type", b"text/plain"),)
    refused = answers[-1]
    assert refused.headers["Retry-After"] == "60"
    assert refused.json()["code"] == "RATE_LIMITED"
    assert refused.headers["Content-Length"] == str(len(refused.content))


def test_what_no_policy_speaks_of_is_let_through_without_fields(setting: RulesSetting) -> None:
    client = TestClient(TidegateMiddleware(hello, **setting.arguments))
    assert statuses(client, "/elsewhere", 20) == [200] * 20
    assert "X-RateLimit-Limit" not in client.get("/elsewhere").headers


def test_deny_is_403_and_a_head_refusal_has_no_body(setting: RulesSetting) -> None:
    app = TidegateMiddleware(hello, **setting.arguments)
    assert TestClient(app).get("/closed").status_code == 403
    start, body = run(app, http("/closed", method="HEAD"))
    assert (start["status"], body["body"]) == (403, b"")
    assert int(dict(start["headers"])[b"content-length"]) > 0


@pytest.mark.fault("R107")
def test_lifespan_and_invented_scopes_pass_through_untouched(setting: RulesSetting) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    middleware = TidegateMiddleware(app, **setting.arguments)
    for scope in ({"type": "lifespan", "asgi": {}}, {"type": "invented"}):
        before = dict(scope)

        async def receive() -> dict[str, Any]:
            return {}

        async def send(message: Any) -> None: ...

        asyncio.run(middleware(scope, receive, send))
        assert seen.pop() == (before, receive, send)


@pytest.mark.fault("R107")
def test_startup_shutdown_and_a_websocket_echo_run_as_without_it(setting: RulesSetting) -> None:
    events = []

    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(app: FastAPI):  # type: ignore[no-untyped-def]
        events.append("up")
        yield
        events.append("down")

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(TidegateMiddleware, **setting.arguments)

    @app.websocket("/echo")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    with TestClient(app) as client, client.websocket_connect("/echo") as socket:
        socket.send_text("word")
        assert socket.receive_text() == "word"
    assert events == ["up", "down"]


def test_a_request_is_refused_before_its_body_is_read(setting: RulesSetting) -> None:
    app = TidegateMiddleware(hello, **setting.arguments)
    for _ in range(5):
        run(app, http("/api/upload"))
    start, _ = run(app, http("/api/upload", method="POST"))  # nothing to receive: receive() would fail the test
    assert start["status"] == 429


@pytest.mark.fault("R103")
def test_mounted_applications_nested_too_are_limited(tmp_path: Path) -> None:
    setting = RulesSetting(tmp_path)
    setting.path.write_text(
        f"store: {setting.store}\npolicies:\n"
        "  - {name: v1, match: {path: /v1/own}, rules: 5/minute}\n"
        "  - {name: x, match: {path: /v1/x/own}, rules: 5/minute}\n"
    )
    app, sub, deep = FastAPI(), FastAPI(), FastAPI()
    for application in (sub, deep):

        @application.get("/own")
        async def own() -> str:
            return "ok"

    sub.mount("/x", deep)
    app.mount("/v1", sub)
    app.add_middleware(TidegateMiddleware, **setting.arguments)
    client = TestClient(app)
    assert statuses(client, "/v1/own", 25).count(200) == 5
    assert statuses(client, "/v1/x/own", 25).count(200) == 5


@pytest.mark.fault("R106")
def test_a_websocket_handshake_is_refused_with_a_denial_response_where_offered(setting: RulesSetting) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 1000})

    middleware = TidegateMiddleware(app, **setting.arguments)
    client = TestClient(middleware)
    for _ in range(5):
        with client.websocket_connect("/api/ws"):
            pass
    with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect("/api/ws"):
        pass
    answer: Any = denied.value
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "60")
    scope = {**http("/api/ws"), "type": "websocket", "client": ("testclient", 5000)}
    scope["client"] = ("192.0.2.1", 5000)
    for _ in range(5):
        run(middleware, dict(scope), {"type": "websocket.connect"})
    (close,) = run(middleware, dict(scope), {"type": "websocket.connect"})
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


@pytest.mark.fault("R106")
def test_upgrades_to_paths_without_a_websocket_are_counted_and_refused_with_1008(setting: RulesSetting) -> None:
    app = FastAPI()
    app.add_middleware(TidegateMiddleware, **setting.arguments)

    class Plain:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "extensions": None}, receive, send)

    client = TestClient(Plain())
    for _ in range(6):
        with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/api/none"):
            pass
    assert closed.value.code == 1008
    assert closed.value.reason == "refused, retry after 60 s"


def test_a_policy_by_route_is_met_before_routing_with_the_template_the_request_will_have(setting: RulesSetting) -> None:
    async def ok() -> str:
        return "ok"

    app, sub, router = FastAPI(), FastAPI(), APIRouter()
    app.get("/routes/a/{id}")(ok)
    router.get("/b/{id}")(ok)
    app.include_router(router, prefix="/routes")
    sub.get("/c/{id}")(ok)
    app.mount("/routes/sub", sub)
    app.add_middleware(TidegateMiddleware, **setting.arguments)
    client = TestClient(app)
    for prefix in ("/routes/a", "/routes/b", "/routes/sub/c"):
        assert [client.get(f"{prefix}/{n}").status_code for n in range(2)] == [200, 429], prefix
    # Unknown paths share a bucket.
    assert [client.get(f"/routes/{uuid.uuid4().hex}").status_code for _ in range(2)] == [404, 429]


def test_a_policy_by_user_asks_the_callable_sync_or_async(setting: RulesSetting) -> None:
    async def later(scope: Any) -> str | None:
        return now(scope)

    def now(scope: Any) -> str | None:
        return dict(scope["headers"]).get(b"x-name", b"").decode() or None

    gate = Gate(**setting.arguments)
    for user, names in ((now, ("ann", "bob")), (later, ("cid", "dan"))):
        client = TestClient(TidegateMiddleware(hello, gate=gate, user=user))
        for name in names:
            assert statuses(client, "/members/x", 2, headers={"X-Name": name}) == [200, 429]
        assert statuses(client, "/members/x", 1) == [401]


def test_a_bad_rules_file_raises_where_the_middleware_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_CONFIG", raising=False)
    bad = tmp_path / "bad.yaml"
    bad.write_text("policies:\n  - name: x\n    rules: 5/fortnight\n")
    with pytest.raises(ConfigError, match="bad.yaml:3"):
        TidegateMiddleware(hello, config=str(bad))
    for nothing in (None, []):
        with pytest.raises(ConfigError, match=r"config= .* TIDEGATE_CONFIG; or limiter=Limiter\(.* or a gate="):
            TidegateMiddleware(hello, limiter=nothing)


def test_the_middleware_and_a_dependency_on_one_policy_charge_a_request_once(setting: RulesSetting) -> None:
    app = FastAPI()
    install(app, **setting.arguments)
    own = rate_limit(policy="login", **setting.arguments)

    @app.post("/login", dependencies=[Depends(own)])
    async def login() -> str:
        return "ok"

    client = TestClient(app)
    answers = [client.post("/login") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers.get_list("X-RateLimit-Remaining") for answer in answers] == [["1"], ["0"], ["0"]]


def test_what_the_middleware_took_is_given_back_when_a_dependency_refuses(setting: RulesSetting) -> None:
    app = FastAPI()
    gate = install(app, **setting.arguments)
    assert gate is not None

    @app.get("/api/narrow", dependencies=[Depends(rate_limit("1/minute", store=setting.store, clock=setting.clock))])
    async def narrow() -> str:
        return "ok"

    client = TestClient(app)
    assert statuses(client, "/api/narrow", 10) == [200] + [429] * 9
    assert client.get("/api/unknown").headers["X-RateLimit-Remaining"] == "3"


def test_two_middlewares_with_one_file_charge_a_request_once(setting: RulesSetting) -> None:
    app = Starlette()
    for _ in range(2):
        app.add_middleware(TidegateMiddleware, **setting.arguments)
    client = TestClient(app)
    assert [client.get("/api/x").headers.get_list("X-RateLimit-Remaining") for _ in range(3)] == [["4"], ["3"], ["2"]]


@pytest.mark.fault("R115")
def test_inside_the_stock_cors_middleware_a_refusal_carries_its_fields(setting: RulesSetting) -> None:
    for installed in (True, False):
        app = FastAPI()
        if installed:
            install(app, **setting.arguments)
        else:
            app.add_middleware(TidegateMiddleware, **setting.arguments)
        app.add_middleware(CORSMiddleware, allow_origins=["*"])
        client = TestClient(app)
        answers = [client.get("/api/x", headers={"Origin": "https://shop.test"}) for _ in range(6)]
        assert answers[-1].status_code == 429
        assert answers[-1].headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.fault("R116")
def test_preflights_are_free_and_never_refused(setting: RulesSetting) -> None:
    app = FastAPI()
    app.add_middleware(TidegateMiddleware, **setting.arguments)

    @app.post("/login")
    async def login(request: Request) -> str:
        return "ok"

    client = TestClient(app)
    preflight = {"Origin": "https://shop.test", "Access-Control-Request-Method": "POST"}
    assert [client.options("/login", headers=preflight).status_code for _ in range(10)] == [405] * 10
    assert [client.post("/login").status_code for _ in range(3)] == [200, 200, 429]


def test_a_reload_takes_the_new_rules_and_keeps_what_was_used(setting: RulesSetting) -> None:
    gate = Gate(**setting.arguments)
    client = TestClient(TidegateMiddleware(hello, gate=gate))
    assert statuses(client, "/api/x", 3) == [200] * 3
    setting.path.write_text(RULES.format(store=setting.store).replace("5/minute", "4/minute"))
    gate.reload()
    assert statuses(client, "/api/x", 2) == [200, 429]
    setting.path.write_text("policies: [")
    with pytest.raises(ConfigError):
        gate.reload()
    assert statuses(client, "/api/x", 1) == [429]


def test_a_peer_that_uvicorn_has_replaced_is_not_walked_again(
    setting: RulesSetting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.path.write_text(
        f'store: {setting.store}\ntrusted_proxies: ["127.0.0.1", "203.0.113.0/24"]\n'
        "policies:\n  - {name: api, match: {path: '/api/*'}, rules: 1/minute}\n"
    )
    app = TidegateMiddleware(hello, **setting.arguments)
    forged = [(b"x-forwarded-for", b"198.51.100.7, 203.0.113.9")]
    # uvicorn puts the forwarded address in place of a loopback peer, with port 0.
    first = run(app, http("/api/x", client=("203.0.113.9", 0), headers=forged))
    again = run(app, http("/api/x", client=("203.0.113.9", 0), headers=[(b"x-forwarded-for", b"198.51.100.8")]))
    assert [first[0]["status"], again[0]["status"]] == [200, 429]
    # A peer that is itself is walked: its port says so.
    assert run(app, http("/api/x", client=("127.0.0.1", 4000), headers=forged))[0]["status"] == 200
    said = [record for record in caplog.records if record.name == "tidegate"]
    assert len(said) <= 1


def test_scopes_without_a_client_have_the_answer_of_missing_identity(setting: RulesSetting) -> None:
    app = TidegateMiddleware(hello, **setting.arguments)
    assert run(app, http("/api/x", client=None))[0]["status"] == 401


def test_a_shared_stand_in_for_missing_parts_does_not_stand_in_for_a_route_that_can_be_found(tmp_path: Path) -> None:
    setting = RulesSetting(tmp_path)
    setting.path.write_text(
        f"store: {setting.store}\npolicies:\n"
        "  - {name: routes, rules: 1/minute, by: route, missing_identity: shared}\n"
    )

    async def ok() -> str:
        return "ok"

    app = FastAPI()
    app.get("/a/{id}")(ok)
    app.get("/b/{id}")(ok)
    app.add_middleware(TidegateMiddleware, **setting.arguments)
    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/a/1", "/b/1", "/a/2", "/b/2")] == [200, 200, 429, 429]


def test_nobody_is_asked_for_a_user_whom_no_policy_counts_until_a_reload_does(setting: RulesSetting) -> None:
    asked = []

    def user(scope: Any) -> str:
        asked.append(1)
        return "ann"

    setting.path.write_text(f"store: {setting.store}\npolicies:\n  - {{name: a, rules: 5/minute}}\n")
    gate = Gate(**setting.arguments)
    client = TestClient(TidegateMiddleware(hello, gate=gate, user=user))
    assert statuses(client, "/", 1) == [200] and asked == []
    assert [gate.names(kind) for kind in ("ip", "user", "route", "header:")] == [True, False, False, False]
    setting.path.write_text(
        f"store: {setting.store}\npolicies:\n  - {{name: a, rules: 1/minute, by: 'user|header:X'}}\n"
    )
    gate.reload()
    assert [gate.names(kind) for kind in ("ip", "user", "route", "header:")] == [False, True, False, True]
    assert statuses(client, "/", 2) == [200, 429] and len(asked) == 2
    with pytest.raises(TypeError, match="kind as str"):
        gate.names(5)  # type: ignore[arg-type]
