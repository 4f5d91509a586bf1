"""FastAPI: what a limit is told by asking (who, how much, which rules), charging by outcome, messages of WebSockets,
exemptions, and what the schema says."""

from __future__ import annotations

import asyncio
import importlib
import linecache
import logging
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Header, HTTPException, Request, WebSocket
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from tidegate import ConfigError, Decision, Limiter, RuleError
from tidegate.fastapi import RateLimit, install, message_limit, rate_limit, user_rate_limit

from setting import FaceSetting as Setting


@pytest.fixture
def limit() -> Setting:
    return Setting(rate_limit)


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    install(app)
    return app


def get(client: TestClient, path: str, count: int = 1, **request: Any) -> list[int]:
    return [client.get(path, **request).status_code for _ in range(count)]


# ---- asked for each request ----


def tenant(conn: HTTPConnection) -> str | None:
    return conn.headers.get("X-Tenant")


async def tenant_async(request: Request) -> str | None:
    return tenant(request)


def tenant_injected(x_tenant: Annotated[str | None, Header()] = None) -> str | None:
    return x_tenant


@pytest.mark.parametrize("by", [tenant, tenant_async, tenant_injected, lambda conn: tenant(conn)])
def test_by_may_be_a_callable_of_any_kind_and_nobody_is_401(app: FastAPI, limit: Setting, by: Any) -> None:
    @app.get("/", dependencies=[Depends(limit("1/minute", by=by))])
    async def root() -> str:
        return "ok"

    client = TestClient(app)
    assert get(client, "/", 2, headers={"X-Tenant": "a"}) == [200, 429]
    assert get(client, "/", 1, headers={"X-Tenant": "b"}) == [200]
    assert get(client, "/") == [401]


@pytest.mark.parametrize("by", ["by", "user"])
def test_whatever_str_a_callable_answers_with_is_counted_and_no_two_are_alike(
    app: FastAPI, limit: Setting, by: str
) -> None:
    """Clients choose what json.loads gives, lone surrogates and NULs among it."""
    said: list[str] = []

    def who(conn: HTTPConnection) -> str:
        return said[-1]

    own = limit("1/minute", by=who) if by == "by" else limit("1/minute", by="user", user=who)
    app.get("/", dependencies=[Depends(own)])(lambda: "ok")
    client = TestClient(app)
    texts = ["\udc80", "\udc81", "\ufffd", "a\0b", "a", "\0", "é", "x" * 70_000, "x" * 69_999 + "y", '{"a": 1}', "a+b|c"]
    for text in texts:
        said.append(text)
        assert get(client, "/") == [200], text[:9]
    for text in texts:
        said.append(text)
        assert get(client, "/") == [429], text[:9]


def test_a_callable_stands_beside_other_dimensions_and_is_counted_by_its_name(app: FastAPI, limit: Setting) -> None:
    both = limit("2/minute", by=[tenant, "ip"], name="both")
    app.get("/", dependencies=[Depends(both)])(lambda: "ok")
    client = TestClient(app)
    told = [get(client, "/", headers={"X-Tenant": name})[0] for name in "aabc"]
    assert told == [200, 200, 429, 429]  # the address is used up, whatever the tenant
    assert both.limit.by == ["key:tenant", "ip"]
    assert both.limiter.peek(dims={"key:tenant": "b", "ip": "198.51.100.1"}).remaining == 2
    assert both.limiter.peek(dims={"key:tenant": "a", "ip": "198.51.100.1"}).remaining == 0


def test_costs_and_rules_may_be_callables_and_what_was_used_stays_used(app: FastAPI, limit: Setting) -> None:
    def cost(conn: HTTPConnection) -> int:
        return int(conn.headers.get("X-Cost", 1))

    async def rules(x_plan: Annotated[str, Header()] = "free") -> str:
        return {"free": "3/minute", "paid": "9/minute"}[x_plan]

    own = limit(rules, cost=cost, name="planned")
    app.get("/", dependencies=[Depends(own)])(lambda: "ok")
    client = TestClient(app)
    assert client.get("/", headers={"X-Cost": "2"}).headers["X-RateLimit-Remaining"] == "1"
    assert get(client, "/", headers={"X-Cost": "2"}) == [429]
    paid = client.get("/", headers={"X-Plan": "paid", "X-Cost": "2"})
    assert [paid.headers[field] for field in ("X-RateLimit-Limit", "X-RateLimit-Remaining")] == ["9", "5"]
    assert own.limiter_for("9/minute").peek(dims={"ip": "127.0.0.1"}).remaining == 5


def test_a_request_whose_cost_is_0_is_left_out_also_where_nothing_is_left(app: FastAPI, limit: Setting) -> None:
    def cost(conn: HTTPConnection) -> int:
        return 0 if conn.headers.get("X-Internal") == "yes" else 1

    app.get("/", dependencies=[Depends(limit("2/minute", cost=cost))])(lambda: "ok")
    client = TestClient(app)
    for left in (200, 200, 429):
        assert get(client, "/", 5, headers={"X-Internal": "yes"}) == [200] * 5
        assert get(client, "/") == [left]
    assert get(client, "/", 5, headers={"X-Internal": "yes"}) == [200] * 5


def test_a_limit_as_a_callable_goes_with_its_window_and_zero_refuses(app: FastAPI, limit: Setting) -> None:
    load: list[int] = [2]
    own = limit(None, limit=lambda conn: load[0], window_seconds=60)
    app.get("/", dependencies=[Depends(own)])(lambda: "ok")
    client = TestClient(app)
    assert get(client, "/", 3) == [200, 200, 429]
    load[0] = 4
    assert get(client, "/", 3) == [200, 200, 429]
    load[0] = 0
    assert get(client, "/") == [403]


def test_a_dependency_that_is_asked_twice_in_a_request_runs_once(app: FastAPI, limit: Setting) -> None:
    calls = []

    def who(request: Request, x_tenant: Annotated[str, Header()]) -> str:
        calls.append(1)
        return x_tenant

    limits = [Depends(limit("9/minute", by=who)), Depends(limit("5/hour", by=who, prefix="other"))]
    app.get("/", dependencies=limits)(lambda: "ok")
    assert get(TestClient(app), "/", headers={"X-Tenant": "a"}) == [200]
    assert calls == [1]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"by": "usr"}, ConfigError, 'did you mean "user"'),
        ({"by": ["ip", "heder:X-Api-Key"]}, ConfigError, 'did you mean "header:NAME"'),
        ({"by": [5]}, TypeError, "holds int"),
        ({"rules": "5/minuet"}, RuleError, "minute"),
        ({"rules": ["5/minute", "9/hour"]}, TypeError, "one text, not a list: write '5/minute; 9/hour'"),
        ({"charge_when": 401}, TypeError, "callable that takes the response"),
        ({"limit": lambda conn: 5, "rules": None}, ConfigError, "window_seconds"),
    ],
)
def test_what_is_wrong_raises_where_the_limit_is_written_with_what_was_probably_meant(
    limit: Setting, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        limit(**{"rules": "5/minute", **settings})


def test_a_limit_made_while_a_request_is_served_is_warned_of_at_its_line(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/async")
    async def in_the_loop() -> str:
        rate_limit("5/minute", **limit.own)
        return "ok"

    @app.get("/thread")
    def in_a_thread() -> str:
        rate_limit("5/minute", **limit.own)
        return "ok"

    client = TestClient(app)
    for path in ("/async", "/thread"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            client.get(path)
        (told,) = [one for one in caught if "while a request is served" in str(one.message)]
        assert linecache.getline(told.filename, told.lineno).strip() == 'rate_limit("5/minute", **limit.own)', path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit("5/minute")
        Limiter("5/minute", store=limit.store, clock=limit.clock)


def test_a_limiter_made_for_each_request_is_warned_of_at_its_line_and_one_that_is_kept_for_later_is_not(
    app: FastAPI, limit: Setting
) -> None:
    @app.get("/each")
    async def each() -> bool:
        return bool(Limiter("5/minute", store=limit.store, clock=limit.clock).hit("ann"))

    @app.get("/asked", dependencies=[Depends(limit(lambda conn: "7/minute"))])
    async def asked() -> str:
        return "ok"

    client = TestClient(app)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert get(client, "/asked") == [200]
        assert [one for one in caught if issubclass(one.category, RuntimeWarning)] == []
        assert get(client, "/each") == [200]
    (told,) = [one for one in caught if "while a request is served" in str(one.message)]
    assert "return bool(Limiter(" in linecache.getline(told.filename, told.lineno)


# ---- by outcome ----


def failed(response: Any) -> bool:
    return bool(response.status_code == 401)


@pytest.mark.fault("R17")
def test_only_answers_that_count_are_charged_whatever_made_them(app: FastAPI, limit: Setting) -> None:
    own = limit("3/minute", charge_when=failed, name="login")

    @app.post("/login", dependencies=[Depends(own)])
    async def login(request: Request, how: str) -> Any:
        if how == "raise":
            raise HTTPException(401)
        if how == "crash":
            raise RuntimeError("as asked")
        return Response("no", int(how))

    @app.post("/typed", dependencies=[Depends(own)])
    async def typed(number: int) -> str:
        return "ok"

    client = TestClient(app, raise_server_exceptions=False)
    for how in ("200", "500", "crash", "302"):
        assert client.post(f"/login?how={how}", follow_redirects=False).status_code in (200, 500, 302)
    assert client.post("/typed?number=word").status_code == 422
    assert own.limiter.peek(dims={"ip": "127.0.0.1"}).remaining == 3
    assert [client.post(f"/login?how={how}").status_code for how in ("raise", "401", "raise")] == [401] * 3
    assert client.post("/login?how=200").status_code == 429


@pytest.mark.fault("R23")
def test_where_only_some_answers_count_the_whole_cost_has_to_fit_beforehand(app: FastAPI, limit: Setting) -> None:
    own = limit("10/minute", cost=6, charge_when=failed, name="dear")

    @app.get("/", dependencies=[Depends(own)])
    async def root(status: int) -> Response:
        return Response("", status)

    client = TestClient(app)
    assert [client.get(f"/?status={status}").status_code for status in (200, 200, 401, 401, 200)] == [200, 200, 401, 429, 429]
    assert own.limiter.peek(dims={"ip": "127.0.0.1"}).remaining == 4


def test_charging_by_outcome_reaches_included_routers_mounts_streams_and_base_http_middleware(limit: Setting) -> None:
    own = limit("9/minute", charge_when=failed, name="everywhere")
    outer, router, inner = FastAPI(), APIRouter(), FastAPI()
    install(outer)

    async def passing(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    outer.add_middleware(BaseHTTPMiddleware, dispatch=passing)

    @router.get("/routed", dependencies=[Depends(own)])
    @inner.get("/mounted", dependencies=[Depends(own)])
    async def answer(status: int) -> Response:
        return StreamingResponse(iter([b"a", b"b"]), status)

    outer.include_router(router, prefix="/v1")
    outer.mount("/app", inner)
    client = TestClient(outer)
    for path in ("/v1/routed", "/app/mounted"):
        assert get(client, f"{path}?status=200", 3) == [200] * 3
        before = own.limiter.peek(dims={"ip": "127.0.0.1"}).remaining
        assert get(client, f"{path}?status=401") == [401]
        assert own.limiter.peek(dims={"ip": "127.0.0.1"}).remaining == before - 1


def test_a_hundred_at_once_hold_their_places_until_their_answers_are_known(limit: Setting) -> None:
    app = FastAPI()
    install(app)
    own = limit("5/minute", charge_when=failed, name="hundred")
    gone_in, go_on = [], asyncio.Event()

    @app.get("/", dependencies=[Depends(own)])
    async def root(status: int) -> Response:
        gone_in.append(status)
        await go_on.wait()
        return Response(status_code=status)

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app, client=("192.0.2.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
            asked = [asyncio.create_task(client.get(f"/?status={401 if n % 2 else 200}")) for n in range(100)]
            while sum(task.done() for task in asked) < 95:
                await asyncio.sleep(0)
            go_on.set()
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    told = asyncio.run(main())
    assert len(gone_in) == 5 and told.count(429) == 95
    assert own.limiter.peek(dims={"ip": "192.0.2.1"}).remaining == 5 - gone_in.count(401)


def test_a_refused_handshake_gives_back_and_an_accepted_one_is_101(app: FastAPI, limit: Setting) -> None:
    seen = []

    def counts(response: Any) -> bool:
        seen.append(response.status_code)
        return bool(response.status_code == 403)

    own = limit("2/minute", charge_when=counts, name="ws")

    @app.websocket("/ws", dependencies=[Depends(own)])
    async def ws(socket: WebSocket, accept: bool) -> None:
        if accept:
            await socket.accept()
            await socket.send_text("hello")
        await socket.close()

    client = TestClient(app)
    for _ in range(4):
        with client.websocket_connect("/ws?accept=1") as socket:
            assert socket.receive_text() == "hello"
    for _ in range(2):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws?accept=0"):
            pass
    assert seen == [101] * 4 + [403] * 2
    assert own.limiter.peek(dims={"ip": "127.0.0.1"}).remaining == 0


def test_without_install_every_answer_counts_and_the_log_says_so_once(
    limit: Setting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.fastapi._said_bare", [])
    app = FastAPI()
    app.get("/", dependencies=[Depends(limit("2/minute", charge_when=failed))])(lambda: "ok")
    with caplog.at_level(logging.WARNING, "tidegate"):
        assert get(TestClient(app), "/", 3) == [200, 200, 429]
    assert len([record for record in caplog.records if "without install(app)" in record.message]) == 1


# ---- messages ----


@pytest.mark.fault("R106")
def test_the_sixth_message_in_ten_seconds_closes_the_socket_with_a_reason(app: FastAPI, limit: Setting) -> None:
    ended: list[int] = []
    messages = message_limit("5/10s", store=limit.store, clock=limit.clock)

    @app.websocket("/ws", dependencies=[Depends(limit("3/minute")), Depends(messages)])
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                await socket.send_text(await socket.receive_text())
        except WebSocketDisconnect as left:
            ended.append(left.code)

    client = TestClient(app)
    with client.websocket_connect("/ws") as socket:
        for number in range(5):
            socket.send_text(str(number))
            assert socket.receive_text() == str(number)
        limit.clock.advance(3)
        socket.send_text("one more")
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_text()
    assert (closed.value.code, closed.value.reason) == (1008, "refused, retry after 7 s")
    assert ended == [1008]
    # One count for the client, not for the connection; it opens again with the window.
    with client.websocket_connect("/ws") as socket:
        socket.send_text("too early")
        with pytest.raises(WebSocketDisconnect):
            socket.receive_text()
    limit.clock.advance(7)
    with client.websocket_connect("/ws") as socket:
        socket.send_text("in time")
        assert socket.receive_text() == "in time"


def test_messages_may_be_counted_by_user_with_another_close_code_and_switched_off(app: FastAPI, limit: Setting) -> None:
    def user(socket: WebSocket) -> str | None:
        return socket.query_params.get("user")

    messages = message_limit(
        limit=1, window_seconds=60, by="user", user=user, close_code=1013, store=limit.store, clock=limit.clock
    )

    @app.websocket("/ws", dependencies=[Depends(messages)])
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)

    client = TestClient(app)
    for name, expected in (("ann", 1), ("bob", 1), ("ann", 0)):
        with client.websocket_connect(f"/ws?user={name}") as socket:
            for _ in range(expected):
                socket.send_text("a")
                assert socket.receive_text() == "a"
            socket.send_text("b")
            with pytest.raises(WebSocketDisconnect) as closed:
                socket.receive_text()
            assert closed.value.code == 1013
    messages.enabled = False
    with client.websocket_connect("/ws?user=ann") as socket:
        socket.send_text("free")
        assert socket.receive_text() == "free"


def test_what_is_wrong_with_a_message_limit_raises_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="close_code must be 1008"):
        message_limit("5/minute", close_code=200, store="memory://m")
    with pytest.raises(TypeError, match="no callables"):
        message_limit("5/minute", by=tenant, store="memory://m")  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="fortnight"):
        message_limit("5/fortnight", store="memory://m")


# ---- exemptions, applications, schemas ----


def test_an_exempt_endpoint_is_left_out_of_the_applications_limit_and_its_own_still_holds(limit: Setting) -> None:
    site = limit("2/minute", name="site")
    app = FastAPI(dependencies=[Depends(site)])
    install(app)
    router = APIRouter()

    @app.get("/health")
    @site.exempt
    def health() -> str:
        return "ok"

    @site.exempt
    @router.get("/own", dependencies=[Depends(limit("3/minute"))])
    async def own() -> str:
        return "ok"

    @router.get("/other")
    async def other() -> str:
        return "ok"

    app.include_router(router)
    client = TestClient(app)
    assert get(client, "/health", 5) == [200] * 5
    assert get(client, "/own", 4) == [200] * 3 + [429]
    assert get(client, "/other", 3) == [200, 200, 429]
    assert "X-RateLimit-Limit" not in client.get("/health").headers
    paths = app.openapi()["paths"]
    assert [path for path in paths if "429" in paths[path]["get"]["responses"]] == ["/own", "/other"]
    site.enabled = False
    assert get(client, "/other") == [200]
    site.enabled = True
    assert get(client, "/other") + get(client, "/health") == [429, 200]


def test_the_schema_tells_of_429_with_its_body_and_fields_where_a_route_has_a_limit(limit: Setting) -> None:
    app, router = FastAPI(dependencies=[]), APIRouter(dependencies=[Depends(limit("9/minute"))])
    install(app)

    def nested(decision: Decision = Depends(limit("5/minute"))) -> int:  # noqa: B008
        return decision.remaining

    @app.get("/nested")
    async def deep(left: int = Depends(nested)) -> int:  # noqa: B008
        return left

    @app.get("/free")
    async def free() -> str:
        return "ok"

    @app.get("/own", dependencies=[Depends(limit())], responses={429: {"description": "mine"}})
    async def own() -> str:
        return "ok"

    @router.get("/routed/{number}")
    async def routed(number: int) -> str:
        return "ok"

    app.include_router(router, prefix="/v1")
    client = TestClient(app)
    for _ in range(2):
        paths = client.get("/openapi.json").json()["paths"]
        assert "429" not in paths["/free"]["get"]["responses"]
        assert paths["/own"]["get"]["responses"]["429"]["description"] == "mine"
        for path in ("/nested", "/v1/routed/{number}"):
            told = paths[path]["get"]["responses"]["429"]
            assert set(told["headers"]) == {
                "Retry-After", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset",
            }  # fmt: skip
            schema = told["content"]["application/json"]["schema"]
            assert schema["required"] == ["code", "message", "retry_after"]
    # It is true: the refusal has that body and those fields.
    for _ in range(10):
        refused = client.get("/v1/routed/1")
    assert refused.status_code == 429
    assert set(refused.json()) == set(schema["required"])
    assert {name.lower() for name in told["headers"]} <= set(refused.headers)


@pytest.mark.parametrize(
    ("by", "missing_identity", "status"),
    [
        ("user", None, 401),
        ("user", "reject 401", 401),
        ("user", "reject 400", 400),
        ("user", "shared", None),
        ("ip", None, None),
        ("user|ip", None, None),
        ("ip|user", None, None),
        ("user|header:X-Api-Key", None, 401),
        ("header:X-Api-Key", None, 401),
        ("ip+Header:X-Api-Key", "reject 400", 400),
        (["ip", "query:key"], None, 401),
        (["host", "path"], None, None),
    ],
)
def test_the_schema_tells_how_a_limit_answers_who_does_not_say_who_is_asking(
    limit: Setting, by: Any, missing_identity: str | None, status: int | None
) -> None:
    app = FastAPI()
    install(app)
    app.get("/", dependencies=[Depends(limit(by=by, missing_identity=missing_identity))])(lambda: "ok")
    responses = app.openapi()["paths"]["/"]["get"]["responses"]
    assert set(responses) == {"200", "429"} | ({str(status)} if status else set())
    # It is true: a request that says nothing is answered so.
    answer = TestClient(app).get("/")
    assert answer.status_code == (status or 200)
    if status:
        told = responses[str(status)]
        schema = told["content"]["application/json"]["schema"]
        assert set(answer.json()) == set(schema["required"])
        assert answer.json()["code"] == schema["properties"]["code"]["const"]
        assert answer.json()["retry_after"] is None and schema["properties"]["retry_after"] == {"type": "null"}
        assert {name.lower() for name in told.get("headers", {})} == set(answer.headers) & {"www-authenticate"}


def test_the_schema_of_a_user_limit_tells_of_401_unless_the_route_does_itself(limit: Setting) -> None:
    app = FastAPI()
    install(app)
    users = user_rate_limit("5/minute", **limit.own)

    def tenant(conn: HTTPConnection) -> None:
        return None

    app.get("/", dependencies=[Depends(users)])(lambda: "ok")
    app.get("/own", dependencies=[Depends(users)], responses={401: {"description": "mine"}})(lambda: "ok")
    app.get("/key", dependencies=[Depends(limit(by=tenant))])(lambda: "ok")
    app.get("/free", dependencies=[Depends(users)])(users.exempt(lambda: "free"))
    paths = app.openapi()["paths"]
    said = {path: paths[path]["get"]["responses"].get("401", {}).get("description") for path in paths}
    ours = "The request does not say who is asking, and a limit counts by that"
    assert said == {"/": ours, "/own": "mine", "/key": ours, "/free": None}
    assert [TestClient(app).get(path).status_code for path in paths] == [401, 401, 401, 200]


def test_the_schema_stays_as_it_was_where_nobody_wants_it(limit: Setting) -> None:
    app = FastAPI()
    install(app, openapi=False)
    app.get("/", dependencies=[Depends(limit())])(lambda: "ok")
    assert "429" not in app.openapi()["paths"]["/"]["get"]["responses"]


STRINGS = """
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, WebSocket
from starlette.requests import HTTPConnection
from tidegate import Decision, ManualClock
from tidegate.fastapi import install, rate_limit

own = {"store": "memory://strings", "clock": ManualClock()}


def tenant(conn: HTTPConnection) -> str | None:
    return conn.query_params.get("tenant")


async def rules(plan: str = "free") -> str:
    return "2/minute" if plan == "free" else "3/minute"


Limited = Annotated[Decision, Depends(rate_limit(rules, by=tenant, **own))]
app = FastAPI()
install(app)


@app.get("/")
async def root(decision: Limited) -> int:
    return decision.remaining


@app.get("/written-out")
def written_out(decision: Annotated[Decision, Depends(rate_limit("1/minute", **own))]) -> int:
    return decision.remaining


@app.websocket("/ws")
async def ws(socket: WebSocket, decision: Limited) -> None:
    await socket.accept()
    await socket.send_json(decision.remaining)
    await socket.close()
"""


def test_annotations_that_are_strings_are_understood_in_endpoints_and_in_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site_with_strings.py").write_text(STRINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    client = TestClient(importlib.import_module("site_with_strings").app)
    assert [client.get("/?tenant=a").json() for _ in range(2)] == [1, 0]
    assert get(client, "/?tenant=a") + get(client, "/?tenant=b") + get(client, "/") == [429, 200, 401]
    assert client.get("/?tenant=a&plan=paid").json() == 0
    assert get(client, "/written-out", 2) == [200, 429]
    with client.websocket_connect("/ws?tenant=c") as socket:
        assert socket.receive_json() == 1


def test_background_tasks_run_and_a_refused_request_starts_none(app: FastAPI, limit: Setting) -> None:
    ran = []

    @app.get("/", dependencies=[Depends(limit("2/minute", charge_when=lambda response: True))])
    async def root(tasks: BackgroundTasks) -> str:
        tasks.add_task(ran.append, 1)
        return "ok"

    assert get(TestClient(app), "/", 4) == [200, 200, 429, 429]
    assert ran == [1, 1]


def test_several_applications_in_one_process_count_apart_by_namespace_and_together_without(limit: Setting) -> None:
    apps = [FastAPI(), FastAPI(), FastAPI()]
    for number, app in enumerate(apps):
        install(app)
        namespace = "one" if number == 0 else "two"
        app.get("/", dependencies=[Depends(limit("2/minute", namespace=namespace))])(lambda: "ok")
    clients = [TestClient(app) for app in apps]
    assert [get(client, "/")[0] for client in (clients[0], clients[1], clients[2])] == [200, 200, 200]
    assert [get(client, "/")[0] for client in clients] == [200, 429, 429]


@pytest.mark.fault("R115")
@pytest.mark.parametrize("order", ["cors last", "cors first"])
def test_dependencies_are_inside_of_cors_whatever_the_order_of_install(limit: Setting, order: str) -> None:
    app = FastAPI()
    if order == "cors last":
        install(app)
    app.add_middleware(
        CORSMiddleware, allow_origins=["https://shop.test"], expose_headers=["Retry-After", "X-RateLimit-Remaining"]
    )
    if order == "cors first":
        install(app)
    app.get("/", dependencies=[Depends(limit("1/minute"))])(lambda: "ok")
    client = TestClient(app)
    answers = [client.get("/", headers={"Origin": "https://shop.test"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].headers["Access-Control-Allow-Origin"] == "https://shop.test"
    assert "Retry-After" in answers[1].headers["Access-Control-Expose-Headers"]
    preflight = {"Origin": "https://shop.test", "Access-Control-Request-Method": "GET"}
    assert [client.options("/", headers=preflight).status_code for _ in range(5)] == [200] * 5


def test_a_user_limit_takes_what_rate_limit_takes(app: FastAPI, limit: Setting) -> None:
    def user(x_user: Annotated[str | None, Header()] = None) -> str | None:
        return x_user

    own = user_rate_limit(
        lambda conn: "2/minute", cost=lambda conn: 2, charge_when=failed, user=user, store=limit.store, clock=limit.clock
    )

    @app.get("/", dependencies=[Depends(own)])
    async def root(status: int) -> Response:
        return Response(status_code=status)

    client = TestClient(app)
    told = [get(client, f"/?status={status}", headers={"X-User": "ann"})[0] for status in (200, 200, 401, 200)]
    assert told == [200, 200, 401, 429]
    assert get(client, "/?status=200") == [401]


def test_a_lifespan_runs_with_limits_inside_and_outside_of_it(limit: Setting, tmp_path: Path) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        steps.append("up")
        yield {"shop": "open"}
        steps.append("down")

    app = FastAPI(lifespan=lifespan)
    install(app)

    @app.get("/", dependencies=[Depends(limit("1/minute"))])
    async def root(request: Request) -> str:
        return str(request.state.shop)

    with TestClient(app) as client:
        assert client.get("/").json() == "open"
        assert get(client, "/") == [429]
    assert steps == ["up", "down"]
