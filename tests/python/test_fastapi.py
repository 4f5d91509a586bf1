"""rate_limit(...) and user_rate_limit(...) as dependencies, install(app): what a client of a FastAPI application
sees."""

import copy
import json
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, StreamingResponse
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import Response as StarletteResponse
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from tidegate import ConfigError, Decision, Limiter, RuleError, StoreError
from tidegate.fastapi import RateLimit, RateLimited, install, message_limit, rate_limit, user_rate_limit

from setting import FaceSetting as Setting

FIELDS = ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")


@pytest.fixture
def limit() -> Setting:
    return Setting(rate_limit)


def statuses(client: TestClient, path: str, count: int, **request: Any) -> list[int]:
    return [client.get(path, **request).status_code for _ in range(count)]


# ---- where a limit may stand ----


@pytest.mark.fault("R112")
@pytest.mark.fault("R109")
def test_def_and_async_def_endpoints_are_limited_without_any_startup(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/sync", dependencies=[Depends(limit("5/minute"))])
    def sync() -> str:
        return "ok"

    @app.get("/async", dependencies=[Depends(limit("5/minute"))])
    async def asynchronous() -> str:
        return "ok"

    client = TestClient(app)  # not entered: no lifespan runs
    assert statuses(client, "/sync", 7) == [200] * 5 + [429] * 2
    assert statuses(client, "/async", 7) == [200] * 5 + [429] * 2


@pytest.mark.fault("R98")
def test_no_parameter_of_the_endpoint_is_needed_and_the_schema_does_not_change(limit: Setting) -> None:
    def build(dependencies: list[Any]) -> FastAPI:
        app = FastAPI()

        @app.get("/none", dependencies=dependencies)
        def none() -> str:
            return "ok"

        @app.get("/other-name", dependencies=dependencies)
        def other_name(req: Request) -> str:
            return "ok"

        @app.get("/request", dependencies=dependencies)
        async def with_request(request: Request) -> str:
            return "ok"

        return app

    client = TestClient(build([Depends(limit())]))
    for path in ("/none", "/other-name", "/request"):
        assert statuses(client, path, 3) == [200, 200, 429]
    assert build([Depends(limit())]).openapi() == build([]).openapi()


def test_annotated_gives_the_endpoint_its_decision(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/")
    async def root(decision: Annotated[Decision, Depends(limit("3/minute"))]) -> list[Any]:
        return [decision.allowed, decision.limit, decision.remaining]

    client = TestClient(app)
    assert [client.get("/").json() for _ in range(2)] == [[True, 3, 2], [True, 3, 1]]


def test_a_limit_on_a_router_an_inclusion_and_an_application_holds_for_each_of_their_routes(limit: Setting) -> None:
    for place in ("router", "inclusion", "app"):
        dependencies = [Depends(limit("2/minute", prefix=place))]
        app = FastAPI(dependencies=dependencies if place == "app" else None)
        router = APIRouter(dependencies=dependencies if place == "router" else None)

        @router.get("/x/{id}")
        async def x(id: int) -> str:
            return "ok"

        @router.get("/y")
        async def y() -> str:
            return "ok"

        app.include_router(router, prefix="/in", dependencies=dependencies if place == "inclusion" else None)
        client = TestClient(app)
        assert [client.get(f"/in/x/{n}").status_code for n in range(3)] == [200, 200, 429], place
        assert statuses(client, "/in/y", 3) == [200, 200, 429], place


def test_one_dependency_on_router_and_route_charges_a_request_once(limit: Setting) -> None:
    dependency = limit("3/minute")
    app = FastAPI(dependencies=[Depends(dependency)])

    @app.get("/", dependencies=[Depends(dependency)])
    async def root(decision: Annotated[Decision, Depends(dependency)]) -> int:
        return decision.remaining

    assert TestClient(app).get("/").json() == 2


def test_two_limits_with_an_equal_key_charge_a_request_once_each_judging_by_its_own_numbers(limit: Setting) -> None:
    loose, tight = limit("5/minute"), limit("2/minute")
    app = FastAPI(dependencies=[Depends(loose)])
    install(app)

    @app.get("/", dependencies=[Depends(tight)])
    async def root() -> str:
        return "ok"

    client = TestClient(app)
    answers = [client.get("/") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers[:2]] == ["1", "0"]


@pytest.mark.fault("R14")
def test_an_application_wide_limit_is_charged_once_beside_the_limit_of_a_route(limit: Setting) -> None:
    wide, narrow = limit("600/minute", name="app"), limit("300/minute")
    app = FastAPI(dependencies=[Depends(wide)])

    @app.get("/")
    async def root(
        of_route: Annotated[Decision, Depends(narrow)], of_app: Annotated[Decision, Depends(wide)]
    ) -> list[int]:
        return [of_app.remaining, of_route.remaining]

    client = TestClient(app)
    for _ in range(99):
        client.get("/")
    assert client.get("/").json() == [500, 200]


def test_when_a_later_limit_refuses_what_an_earlier_one_took_is_given_back(limit: Setting) -> None:
    wide = limit("10/minute", name="app")
    app = FastAPI(dependencies=[Depends(wide)])

    @app.get("/narrow", dependencies=[Depends(limit("1/minute"))])
    async def narrow() -> str:
        return "ok"

    @app.get("/left")
    async def left(decision: Annotated[Decision, Depends(wide)]) -> int:
        return decision.remaining

    client = TestClient(app)
    assert statuses(client, "/narrow", 6) == [200] + [429] * 5
    assert client.get("/left").json() == 8


def test_limits_with_one_name_share_a_count_and_a_prefix_keeps_routes_apart(limit: Setting) -> None:
    app = FastAPI()
    for path in ("/a", "/b"):

        @app.get(f"/named{path}", dependencies=[Depends(limit(name="together"))])
        @app.get(f"/prefixed{path}", dependencies=[Depends(limit(prefix="apart"))])
        async def endpoint() -> str:
            return "ok"

    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/named/a", "/named/b", "/named/a")] == [200, 200, 429]
    assert [client.get(f"/prefixed/{which}").status_code for which in "aabba"] == [200, 200, 200, 200, 429]


def test_several_dimensions_are_judged_all_or_nothing(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limit("2/minute", by=["ip", "header:X-Account"]))])
    async def root() -> str:
        return "ok"

    first, second = TestClient(app, client=("192.0.2.1", 5)), TestClient(app, client=("192.0.2.2", 5))
    assert statuses(first, "/", 2, headers={"X-Account": "a"}) == [200, 200]
    # The account is exhausted: another address gets nothing for it, and loses nothing of its own.
    assert statuses(second, "/", 3, headers={"X-Account": "a"}) == [429] * 3
    assert statuses(second, "/", 3, headers={"X-Account": "b"}) == [200, 200, 429]


def test_a_cost_takes_that_many_units_and_the_window_ends_by_the_clock(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limit(None, limit=5, window_seconds=60, cost=2))])
    async def root() -> str:
        return "ok"

    client = TestClient(app)
    assert statuses(client, "/", 3) == [200, 200, 429]
    limit.clock.advance(60)
    assert statuses(client, "/", 3) == [200, 200, 429]


# ---- tests and switches ----


@pytest.mark.fault("R110")
def test_a_dependency_can_be_overridden_hashed_and_switched_off(limit: Setting) -> None:
    dependency = limit("1/minute")
    app = FastAPI()

    @app.get("/")
    async def root(decision: Annotated[Decision, Depends(dependency)]) -> bool:
        return decision.allowed

    client = TestClient(app)
    assert statuses(client, "/", 2) == [200, 429]
    assert {dependency: 1}[dependency] == 1
    stand_in = Limiter("1/s", **limit.own).hit("x")
    app.dependency_overrides[dependency] = lambda: stand_in
    assert statuses(client, "/", 1) == [200]
    app.dependency_overrides.clear()
    assert statuses(client, "/", 1) == [429]
    dependency.enabled = False
    assert statuses(client, "/", 100) == [200] * 100
    assert client.get("/").json() is True
    dependency.enabled = True
    assert statuses(client, "/", 1) == [429]


def test_enabled_false_and_the_environment_switch_a_limit_off(limit: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    argument = limit("1/minute", enabled=False)
    monkeypatch.setenv("TIDEGATE_ENABLED", "0")
    environment = limit("1/minute")

    @app.get("/argument", dependencies=[Depends(argument)])
    @app.get("/environment", dependencies=[Depends(environment)])
    async def root() -> str:
        return "ok"

    client = TestClient(app)
    assert statuses(client, "/argument", 3) + statuses(client, "/environment", 3) == [200] * 6
    assert FIELDS[0] not in client.get("/argument").headers


# ---- errors where they are written ----


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"rules": "5/fortnight"}, RuleError, "fortnight"),
        ({}, ConfigError, "no limit is given"),
        ({"rules": "5/minute", "limit": 5, "window_seconds": 60}, ConfigError, "twice"),
        ({"limit": 5}, ConfigError, "window_seconds= is missing"),
        ({"limit": True, "window_seconds": 60}, TypeError, "limit must be an int"),
        ({"limit": -1, "window_seconds": 60}, ConfigError, "0 or more"),
        ({"limit": 1, "window_seconds": 0}, ConfigError, "more than 0"),
        ({"limit": 1, "window_seconds": 0.0001}, ConfigError, "whole milliseconds"),
        ({"rules": "5/minute", "by": "colour"}, ConfigError, "colour"),
        ({"rules": "5/minute", "by": []}, ConfigError, "by must name"),
        ({"rules": "5/minute", "by": [1]}, TypeError, "by must be a str"),
        ({"rules": "5/minute", "by": 1}, TypeError, "by must be a str, a callable or a sequence of them, not int"),
        ({"rules": "5/minute", "name": "a", "prefix": "b"}, ConfigError, "exclude each other"),
        ({"rules": "5/minute", "cost": -1}, ValueError, "cost"),
        ({"rules": "5/minute", "cost": 1.5}, TypeError, "cost must be an int"),
        ({"rules": "5/minute", "policy": "login"}, ConfigError, "rules is the rules file's to say"),
        ({"rules": "5/minute", "config": "rules.yaml"}, ConfigError, "policy="),
        ({"rules": "5/minute", "missing_identity": "reject 418"}, ConfigError, "418"),
        ({"rules": "5/minute", "on_store_failure": "pray"}, ConfigError, "pray"),
    ],
)
def test_what_is_wrong_raises_where_the_limit_is_written(
    settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        rate_limit(store=f"memory://{uuid.uuid4().hex}", **settings)


def test_a_window_of_half_a_second_is_500_milliseconds(limit: Setting) -> None:
    (rule,) = limit(None, limit=5, window_seconds=0.5).limiter.rules
    assert rule.startswith("5/500ms")


def test_a_computed_limit_of_zero_refuses_everything_with_403(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limit(None, limit=0, window_seconds=60))])
    async def root() -> str:
        return "ok"

    answer = TestClient(app).get("/")
    assert answer.status_code == 403
    assert "Retry-After" not in answer.headers


# ---- the answer ----


class Item(BaseModel):
    name: str = "thing"


def build_of_every_kind(dependency: RateLimit, folder: Path) -> FastAPI:
    app = FastAPI(dependencies=[Depends(dependency)])
    file = folder / "file.txt"
    file.write_text("content")

    @app.get("/dict")
    def a_dict() -> dict[str, int]:
        return {"a": 1}

    @app.get("/model")
    async def a_model() -> Item:
        return Item()

    @app.get("/none")
    async def nothing() -> None:
        return None

    @app.get("/str")
    async def a_str() -> str:
        return "text"

    @app.get("/own")
    async def own() -> Response:
        return PlainTextResponse("own")

    @app.get("/empty", status_code=204)
    async def empty() -> None: ...

    @app.get("/redirect")
    async def redirect() -> RedirectResponse:
        return RedirectResponse("/own", 307)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            yield b"two"

        return StreamingResponse(parts())

    @app.get("/file")
    async def a_file() -> FileResponse:
        return FileResponse(file)

    @app.get("/http-error")
    async def http_error() -> None:
        raise HTTPException(409, "conflict")

    @app.get("/error")
    async def error() -> None:
        raise RuntimeError("unhandled")

    @app.get("/invalid/{number}")
    async def invalid(number: int) -> int:
        return number

    return app


@pytest.mark.fault("R100")
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/dict", 200), ("/model", 200), ("/none", 200), ("/str", 200), ("/own", 200), ("/empty", 204),
        ("/redirect", 307), ("/stream", 200), ("/file", 200), ("/http-error", 409), ("/error", 500),
        ("/invalid/x", 422),
    ],
)  # fmt: skip
def test_with_install_every_answer_carries_the_fields_once(
    limit: Setting, tmp_path: Path, path: str, status: int
) -> None:
    app = build_of_every_kind(limit("10/minute"), tmp_path)
    install(app)
    client = TestClient(app, raise_server_exceptions=False, follow_redirects=False)
    answer = client.get(path)
    assert answer.status_code == status
    values = [answer.headers.get_list(field) for field in FIELDS]
    assert values[:2] == [["10"], ["9"]]
    assert len(values[2]) == 1 and 0 < int(values[2][0]) <= 60


def test_without_install_answers_that_fastapi_builds_and_refusals_carry_the_fields(
    limit: Setting, tmp_path: Path
) -> None:
    app = build_of_every_kind(limit("1/minute"), tmp_path)
    client = TestClient(app)
    for path in ("/dict", "/model", "/none", "/str", "/empty"):
        answer = client.get(path)
        assert [answer.headers.get_list(field) for field in FIELDS[:2]] == [["1"], ["0"]], path
    refused = client.get("/dict")
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "60"
    assert [refused.headers.get_list(field) for field in FIELDS[:2]] == [["1"], ["0"]]


@pytest.mark.fault("R172")
@pytest.mark.parametrize("installed", [True, False])
def test_a_refusal_is_429_with_retry_after_and_the_same_body_from_every_application(
    limit: Setting, installed: bool
) -> None:
    app, sub, other = FastAPI(), FastAPI(), Starlette()
    dependency = Depends(limit("1/minute"))
    deep = FastAPI()

    for application in (app, sub, deep):

        @application.get("/x", dependencies=[dependency])
        async def x() -> str:
            return "ok"

    if installed:
        install(app)
    other.mount("/deep", deep)
    sub.mount("/other", other)
    app.mount("/sub", sub)
    client = TestClient(app)
    bodies = set()
    for path in ("/x", "/sub/x", "/sub/other/deep/x"):
        assert client.get(path).status_code == 200
        refused = client.get(path)
        assert refused.status_code == 429, path
        assert refused.headers["Content-Type"] == "application/json"
        assert refused.headers["Content-Length"] == str(len(refused.content))
        assert refused.headers.get_list("Retry-After") == ["60"]
        bodies.add(refused.content)
    (body,) = bodies
    told = json.loads(body)
    assert told["code"] == "RATE_LIMITED"
    assert told["retry_after"] == 60


def test_a_handler_that_somebody_wrote_is_asked_and_the_fields_still_reach_the_client(limit: Setting) -> None:
    for kind in (RateLimited, 429):
        app = FastAPI()
        install(app)

        @app.exception_handler(kind)
        async def handler(request: Request, error: RateLimited) -> JSONResponse:
            return JSONResponse({"wait": error.decision.retry_after}, 429)

        @app.get("/", dependencies=[Depends(limit("1/minute", prefix=str(kind)))])
        async def root() -> str:
            return "ok"

        client = TestClient(app)
        client.get("/")
        refused = client.get("/")
        assert refused.json() == {"wait": 60.0}
        assert refused.headers.get_list("Retry-After") == ["60"]
        assert refused.headers.get_list("Content-Type") == ["application/json"]


def test_a_handler_written_for_every_http_exception_stays_in_charge_without_install(limit: Setting) -> None:
    from starlette.exceptions import HTTPException as StarletteHTTPException

    app = FastAPI()

    @app.exception_handler(StarletteHTTPException)
    async def handler(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"own": error.detail}, error.status_code, error.headers)

    @app.get("/", dependencies=[Depends(limit("1/minute"))])
    async def root() -> str:
        return "ok"

    client = TestClient(app)
    client.get("/")
    refused = client.get("/")
    assert refused.status_code == 429
    assert set(refused.json()) == {"own"}
    assert refused.headers["Retry-After"] == "60"


def test_the_tightest_of_several_limits_is_shown_and_on_a_refusal_the_refusing_one(limit: Setting) -> None:
    app = FastAPI()
    install(app)

    @app.get("/", dependencies=[Depends(limit("2/minute", name="a")), Depends(limit("9/hour", name="b"))])
    async def tight_first() -> str:
        return "ok"

    @app.get("/reversed", dependencies=[Depends(limit("9/hour", name="c")), Depends(limit("2/minute", name="d"))])
    async def tight_last() -> str:
        return "ok"

    client = TestClient(app)
    for path in ("/", "/reversed"):
        shown = [client.get(path).headers["X-RateLimit-Limit"] for _ in range(3)]
        assert shown == ["2", "2", "2"]


def test_one_response_object_sent_twice_does_not_collect_fields(limit: Setting) -> None:
    app, constant = FastAPI(), PlainTextResponse("constant")
    install(app)

    @app.get("/", dependencies=[Depends(limit("5/minute"))])
    async def root() -> Response:
        return constant

    client = TestClient(app)
    assert [client.get("/").headers.get_list("X-RateLimit-Remaining") for _ in range(3)] == [["4"], ["3"], ["2"]]


def test_fields_survive_a_base_http_middleware_and_a_second_install(limit: Setting) -> None:
    app, sub = FastAPI(), FastAPI()

    class Passing(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> StarletteResponse:
            answer: StarletteResponse = await call_next(request)
            return answer

    app.add_middleware(Passing)
    install(app)
    install(app)
    install(sub)
    app.mount("/sub", sub)

    @sub.get("/", dependencies=[Depends(limit("5/minute"))])
    async def root() -> str:
        return "ok"

    assert TestClient(app).get("/sub/").headers.get_list("X-RateLimit-Remaining") == ["4"]


def test_install_after_the_first_request_is_an_error() -> None:
    app = FastAPI()
    TestClient(app).get("/")
    with pytest.raises(RuntimeError, match="before the application's first request"):
        install(app)


def test_an_answer_without_a_limit_has_no_fields(limit: Setting) -> None:
    app = FastAPI()
    install(app)
    assert FIELDS[0] not in TestClient(app).get("/nowhere").headers


@pytest.mark.fault("R116")
def test_preflights_are_free_and_never_refused(limit: Setting) -> None:
    app = FastAPI(dependencies=[Depends(limit("5/minute", name="all"))])

    @app.api_route("/", methods=["POST", "OPTIONS"])
    async def root() -> str:
        return "ok"

    client = TestClient(app)
    preflight = {"Origin": "https://shop.test", "Access-Control-Request-Method": "POST"}
    assert [client.options("/", headers=preflight).status_code for _ in range(10)] == [200] * 10
    assert [client.post("/").status_code for _ in range(6)] == [200] * 5 + [429]


@pytest.mark.fault("R115")
def test_a_refusal_passes_through_the_stock_cors_middleware(limit: Setting) -> None:
    app = FastAPI()
    install(app)
    app.add_middleware(CORSMiddleware, allow_origins=["https://shop.test"], expose_headers=["Retry-After"])

    @app.get("/", dependencies=[Depends(limit("1/minute"))])
    async def root() -> str:
        return "ok"

    client = TestClient(app)
    client.get("/")
    refused = client.get("/", headers={"Origin": "https://shop.test"})
    assert refused.status_code == 429
    assert refused.headers["Access-Control-Allow-Origin"] == "https://shop.test"
    assert "Retry-After" in refused.headers["Access-Control-Expose-Headers"]


# ---- by user ----


class ByHeader(AuthenticationBackend):
    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        name = conn.headers.get("X-Name")
        return (AuthCredentials(), SimpleUser(name)) if name else None


def test_user_rate_limit_counts_each_user_and_answers_401_without_one(limit: Setting) -> None:
    app = FastAPI()
    app.add_middleware(AuthenticationMiddleware, backend=ByHeader())

    @app.get(
        "/me", dependencies=[Depends(user_rate_limit(limit=2, window_seconds=60, store=limit.store, clock=limit.clock))]
    )
    async def me() -> str:
        return "ok"

    client = TestClient(app)
    assert statuses(client, "/me", 3, headers={"X-Name": "ann"}) == [200, 200, 429]
    assert statuses(client, "/me", 3, headers={"X-Name": "bob"}) == [200, 200, 429]
    assert statuses(client, "/me", 3) == [401] * 3


def test_user_may_be_any_callable_that_fastapi_could_inject(limit: Setting) -> None:
    asked = []

    def plain(conn):  # type: ignore[no-untyped-def]
        return conn.headers.get("X-Name")

    async def from_request(request: Request) -> str | None:
        return request.headers.get("X-Name")

    def token(request: Request) -> str | None:
        asked.append(1)
        return request.headers.get("X-Name")

    async def injected(name: Annotated[str | None, Depends(token)]) -> str | None:
        return name

    for user in (plain, from_request, injected, lambda conn: conn.headers.get("X-Name")):
        app = FastAPI()
        dependency = user_rate_limit(
            "2/minute", user=user, store=limit.store, clock=limit.clock, prefix=getattr(user, "__name__", "")
        )

        @app.get("/")
        async def me(
            decision: Annotated[Decision, Depends(dependency)], name: Annotated[str | None, Depends(token)]
        ) -> str | None:
            return name

        client = TestClient(app)
        asked.clear()
        assert statuses(client, "/", 3, headers={"X-Name": "ann"}) == [200, 200, 429]
        assert len(asked) == (3 if user is injected else 2)
        assert statuses(client, "/", 1, headers={"X-Name": "bob"}) == [200]
        assert statuses(client, "/", 1) == [401]
        assert app.openapi()["paths"]["/"]["get"].get("parameters") is None


def test_user_and_address_can_be_alternatives(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limit("1/minute", by="user|ip", user=lambda conn: conn.headers.get("X-Name")))])
    async def root() -> str:
        return "ok"

    client = TestClient(app, client=("192.0.2.1", 5))
    assert statuses(client, "/", 2, headers={"X-Name": "ann"}) == [200, 429]
    assert statuses(client, "/", 2) == [200, 429]
    # A user called like an address is not that address.
    assert statuses(client, "/", 2, headers={"X-Name": "192.0.2.2"}) == [200, 429]
    assert statuses(TestClient(app, client=("192.0.2.2", 5)), "/", 1) == [200]


def test_a_user_callable_that_answers_with_an_object_is_an_error_that_says_so(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limit("1/minute", by="user", user=lambda conn: object()))])
    async def root() -> str:
        return "ok"

    with pytest.raises(TypeError, match="user= must answer with the user's id"):
        TestClient(app).get("/")


# ---- WebSocket ----


@pytest.mark.fault("R106")
def test_a_websocket_handshake_over_the_limit_is_refused_before_it_is_accepted(limit: Setting) -> None:
    app, accepted = FastAPI(), []
    install(app)

    @app.websocket("/ws", dependencies=[Depends(limit("2/minute"))])
    async def ws(socket: WebSocket) -> None:
        accepted.append(1)
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    client = TestClient(app)
    for _ in range(2):
        with client.websocket_connect("/ws") as socket:
            assert socket.receive_text() == "hello"
    with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/ws"):
        pass
    answer: Any = refused.value
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "60"
    assert answer.json()["code"] == "RATE_LIMITED"
    assert len(accepted) == 2


class WithoutDenialResponse:
    """A server that does not offer the extension."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            scope["extensions"] = {}
        await self.app(scope, receive, send)


@pytest.mark.parametrize("installed", [True, False])
def test_where_no_denial_response_is_offered_the_handshake_is_closed_with_1008(limit: Setting, installed: bool) -> None:
    app = FastAPI()
    if installed:
        install(app)

    @app.websocket("/ws")
    async def ws(socket: WebSocket, decision: Annotated[Decision, Depends(limit("1/minute"))]) -> None:
        await socket.accept()
        await socket.close()

    client = TestClient(WithoutDenialResponse(app))
    with client.websocket_connect("/ws"):
        pass
    with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/ws"):
        pass
    assert closed.value.code == 1008
    assert closed.value.reason == "refused, retry after 60 s"


@pytest.mark.fault("R106")
def test_an_upgrade_request_to_an_http_path_is_counted_like_any_other(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limit("1/minute"))])
    async def root() -> str:
        return "ok"

    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert statuses(TestClient(app), "/", 2, headers=upgrade) == [200, 429]


# ---- the store ----


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that refuses to be connected to, of this test alone."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{bound.getsockname()[1]}"


def test_a_store_that_cannot_be_opened_speaks_where_the_limit_is_written_by_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        rate_limit("1/minute", store=f"shared://{tmp_path}/nowhere/table")
    assert not issubclass(StoreError, RateLimited) and not issubclass(RateLimited, StoreError)


@pytest.mark.fault("R101")
@pytest.mark.parametrize("policy", ["open", "closed"])
@pytest.mark.parametrize("handled", [None, 429, RateLimited])
def test_a_handler_for_429_never_meets_a_store_error(
    nobody: str, handled: Any, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    install(app)
    met: list[RateLimited] = []

    async def handler(request: Request, error: RateLimited) -> JSONResponse:
        met.append(error)
        return JSONResponse({"wait": error.decision.retry_after, "of": error.decision.limit}, error.status_code)

    if handled is not None:
        app.add_exception_handler(handled, handler)  # type: ignore[arg-type]
    with caplog.at_level("WARNING", "tidegate"):
        own = rate_limit("1/minute", store=nobody, on_store_failure=policy)
        app.get("/", dependencies=[Depends(own)])(lambda: "ok")
        answers = [TestClient(app).get("/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200 if policy == "open" else 503] * 3
    assert not any(FIELDS[0] in answer.headers for answer in answers)
    if policy == "closed":
        assert [answer.headers["Retry-After"] for answer in answers] == ["1"] * 3
        assert ("code" in answers[0].json()) is (handled is not RateLimited), "as every face says it, but for its own handler"
    # Whoever handles all refusals is told what it is, with numbers that can be read as any other's.
    assert len(met) == (3 if policy == "closed" and handled is RateLimited else 0)
    assert {(error.status_code, error.decision.degraded, error.decision.retry_after) for error in met} <= {(503, True, 1.0)}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "tidegate"]
    assert "store-failing" in said and "Connection refused" in said


@pytest.mark.fault("R110")
def test_what_is_switched_off_asks_no_store(nobody: str) -> None:
    off = rate_limit("1/minute", store=nobody, on_store_failure="closed")
    app = FastAPI()
    install(app)
    app.get("/", dependencies=[Depends(off)])(lambda: "ok")
    client = TestClient(app)
    assert statuses(client, "/", 1) == [503], "nobody is there"
    off.enabled = False
    assert statuses(client, "/", 100) == [200] * 100


@pytest.mark.parametrize("client", [["testclient", 50000], ["192.0.2.1", 5000]])
def test_a_client_may_be_a_list_as_in_older_test_clients(limit: Setting, client: list[Any]) -> None:
    app = FastAPI()
    install(app)
    app.get("/", dependencies=[Depends(limit("2/minute"))])(lambda: "ok")

    async def with_list(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": client}, receive, send)

    assert statuses(TestClient(with_list), "/", 3) == [200, 200, 429]


def test_missing_identity_has_the_answer_that_was_chosen(limit: Setting) -> None:
    app = FastAPI()
    for answer in ("reject 401", "reject 400", "shared"):
        settings = {"by": "header:X-Api-Key", "missing_identity": answer}

        @app.get(f"/{answer[-3:]}", dependencies=[Depends(limit("1/minute", **settings))])
        async def root() -> str:
            return "ok"

    client = TestClient(app)
    assert statuses(client, "/401", 2) == [401, 401]
    assert statuses(client, "/400", 2) == [400, 400]
    assert statuses(client, "/red", 2) == [200, 429]
    assert statuses(client, "/401", 2, headers={"X-Api-Key": "k"}) == [200, 429]


def test_trusted_proxies_decide_whose_forwarded_address_counts(limit: Setting) -> None:
    app = FastAPI()

    @app.get("/trusting", dependencies=[Depends(limit("1/minute", trusted_proxies=["10.0.0.0/8"]))])
    @app.get("/plain", dependencies=[Depends(limit("1/minute"))])
    async def root() -> str:
        return "ok"

    client = TestClient(app, client=("10.0.0.1", 5000))
    forwarded: Callable[[int], dict[str, str]] = lambda n: {"X-Forwarded-For": f"203.0.113.{n}"}  # noqa: E731
    assert [client.get("/trusting", headers=forwarded(n)).status_code for n in (1, 2, 1)] == [200, 200, 429]
    assert [client.get("/plain", headers=forwarded(n)).status_code for n in (1, 2, 3)] == [200, 429, 429]


@pytest.fixture(autouse=True)
def environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TIDEGATE_ENABLED", "TIDEGATE_STORE", "TIDEGATE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield


def test_a_limit_without_depends_is_told_what_to_write() -> None:
    limit = rate_limit("5/minute", store="memory://without-depends")
    with pytest.raises(AttributeError, match=r"write Depends\(rate_limit"):

        @FastAPI().get("/", dependencies=[limit])  # type: ignore[list-item]
        def index() -> None: ...


@pytest.mark.fault("R104")
@pytest.mark.parametrize("made", [rate_limit, message_limit])
def test_a_limit_written_as_a_decorator_above_or_below_the_route_stops_the_import_and_says_what_to_write(
    made: Any,
) -> None:
    limit = made("5/minute", store="memory://decorator")
    words = rf"{made.__name__}\(\.\.\.\) is no decorator: give the route dependencies=\[Depends\({made.__name__}"
    app = FastAPI()
    route = app.get if made is rate_limit else app.websocket
    with pytest.raises(TypeError, match=words):

        @route("/below")
        @limit
        async def below() -> None: ...

    with pytest.raises(TypeError, match=words):

        @limit
        @route("/above")
        async def above() -> None: ...


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_dependency_is_the_same_limit_with_the_same_override(copied: Callable[..., Any]) -> None:
    limit = rate_limit("2/minute", store="memory://copied")
    app = FastAPI()
    both = [Depends(limit)]

    @app.get("/one", dependencies=both)
    def one() -> None: ...

    @app.get("/two", dependencies=copied(both))
    def two() -> None: ...

    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/one", "/two")] == [200, 200]
    assert copied(limit) is limit
    app.dependency_overrides[limit] = lambda: None
    assert [client.get("/two").status_code for _ in range(5)] == [200] * 5
