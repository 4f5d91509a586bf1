"""Which bucket a route counts in: its template, with every prefix and mount in front, never a concrete path."""

import uuid
from collections.abc import Callable

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Host, Mount, Route
from starlette.testclient import TestClient
from tidegate import ManualClock
from tidegate._routes import route_template, table_of
from tidegate.fastapi import RateLimit, install, rate_limit


@pytest.fixture
def limit() -> Callable[..., RateLimit]:
    store, clock = f"memory://{uuid.uuid4().hex}", ManualClock()

    def make(rules: str = "1/minute", **settings: object) -> RateLimit:
        return rate_limit(rules, store=store, clock=clock, **settings)  # type: ignore[arg-type]

    return make


async def template(request: Request) -> str | None:
    return route_template(request.scope)


def templates_of(app: FastAPI | Starlette, *paths: str) -> list[str | None]:
    client = TestClient(app)
    return [client.get(path).json() for path in paths]


@pytest.mark.fault("R88")
def test_each_value_of_a_path_parameter_counts_in_the_bucket_of_its_template(limit: Callable[..., RateLimit]) -> None:
    app = FastAPI()

    @app.get("/users/{user_id}", dependencies=[Depends(limit())])
    async def user(user_id: int) -> int:
        return user_id

    client = TestClient(app)
    statuses = [client.get(f"/users/{number}").status_code for number in range(1, 11)]
    assert statuses == [200] + [429] * 9


@pytest.mark.fault("R88")
def test_by_path_counts_each_concrete_path(limit: Callable[..., RateLimit]) -> None:
    app = FastAPI()

    @app.get("/users/{user_id}", dependencies=[Depends(limit(by="ip+path"))])
    async def user(user_id: int) -> int:
        return user_id

    client = TestClient(app)
    assert [client.get(f"/users/{number}").status_code for number in range(1, 11)] == [200] * 10
    assert client.get("/users/1").status_code == 429


def test_two_included_routers_with_the_same_inner_path_have_their_own_buckets(limit: Callable[..., RateLimit]) -> None:
    app, dependency = FastAPI(), limit()
    for prefix in ("/a", "/b"):
        router = APIRouter()

        @router.get("/items", dependencies=[Depends(dependency)])
        async def items() -> str:
            return "ok"

        app.include_router(router, prefix=prefix)
    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/a/items", "/b/items", "/a/items", "/b/items")] == [
        200, 200, 429, 429,
    ]  # fmt: skip


def test_one_router_included_twice_has_a_bucket_for_each_inclusion(limit: Callable[..., RateLimit]) -> None:
    app, router = FastAPI(), APIRouter()

    @router.get("/items", dependencies=[Depends(limit())])
    async def items() -> str:
        return "ok"

    app.include_router(router, prefix="/a")
    app.include_router(router, prefix="/b")
    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/a/items", "/b/items", "/a/items", "/b/items")] == [
        200, 200, 429, 429,
    ]  # fmt: skip


def test_two_methods_of_one_path_have_their_own_buckets(limit: Callable[..., RateLimit]) -> None:
    app, dependency = FastAPI(), limit()

    @app.get("/thing", dependencies=[Depends(dependency)])
    @app.post("/thing", dependencies=[Depends(dependency)])
    async def thing() -> str:
        return "ok"

    client = TestClient(app)
    assert [client.get("/thing").status_code, client.post("/thing").status_code] == [200, 200]
    assert [client.get("/thing").status_code, client.post("/thing").status_code] == [429, 429]


def test_head_counts_with_get_where_one_handler_answers_both(limit: Callable[..., RateLimit]) -> None:
    app = FastAPI()

    @app.api_route("/thing", methods=["GET", "HEAD"], dependencies=[Depends(limit())])
    async def thing() -> str:
        return "ok"

    client = TestClient(app)
    assert [client.get("/thing").status_code, client.head("/thing").status_code] == [200, 429]


def test_templates_carry_the_prefixes_of_nested_routers() -> None:
    app, outer, inner = FastAPI(), APIRouter(prefix="/outer/{one}"), APIRouter(prefix="/inner")
    inner.get("/x/{two}")(template)
    outer.include_router(inner, prefix="/between")
    app.include_router(outer, prefix="/api")
    assert templates_of(app, "/api/outer/1/between/inner/x/2") == ["/api/outer/{one}/between/inner/x/{two}"]


def test_templates_carry_the_mounts_in_front_also_nested_and_with_parameters() -> None:
    app, sub, deep = FastAPI(), FastAPI(), FastAPI()
    router = APIRouter()
    router.get("/routed/{id}")(template)
    for application in (app, sub, deep):
        application.get("/own/{id}")(template)
        application.include_router(router, prefix="/in")
    sub.mount("/deep", deep)
    app.mount("/t/{tenant}", sub)
    assert templates_of(app, "/own/1", "/in/routed/1", "/t/acme/own/1", "/t/acme/in/routed/1") == [
        "/own/{id}", "/in/routed/{id}", "/t/{tenant}/own/{id}", "/t/{tenant}/in/routed/{id}",
    ]  # fmt: skip
    assert templates_of(app, "/t/acme/deep/own/1", "/t/acme/deep/in/routed/1") == [
        "/t/{tenant}/deep/own/{id}", "/t/{tenant}/deep/in/routed/{id}",
    ]  # fmt: skip


def test_one_application_mounted_twice_has_a_template_for_each_mount() -> None:
    app, sub = FastAPI(), FastAPI()
    sub.get("/x")(template)
    app.mount("/v1", sub)
    app.mount("/{version:int}", sub)
    assert templates_of(app, "/v1/x", "/2/x", "/3/x") == ["/v1/x", "/{version}/x", "/{version}/x"]


def test_a_mount_inside_an_included_router_is_part_of_the_template() -> None:
    app, router, sub = FastAPI(), APIRouter(), FastAPI()
    sub.get("/own/{id}")(template)
    router.mount("/sub", sub)
    app.include_router(router, prefix="/api")
    assert templates_of(app, "/api/sub/own/1") == ["/api/sub/own/{id}"]


def test_a_mounted_application_wrapped_in_middleware_keeps_its_templates() -> None:
    app, sub = FastAPI(), FastAPI()
    sub.get("/x/{id}")(template)
    app.mount("/wrapped", CORSMiddleware(sub, allow_origins=["*"]))
    assert templates_of(app, "/wrapped/x/1") == ["/wrapped/x/{id}"]


def test_fastapi_under_starlette_and_under_hosts_is_told_apart() -> None:
    one, two, three = FastAPI(), FastAPI(), FastAPI()
    for application in (one, two, three):
        application.get("/x/{id}")(template)
    root = Starlette(routes=[Host("one.test", one), Host("{name}.two.test", two), Mount("/api", three)])
    for host, path, expected in (
        ("one.test", "/x/1", "//one.test/x/{id}"),
        ("a.two.test", "/x/1", "//{name}.two.test/x/{id}"),
        ("other.test", "/api/x/1", "/api/x/{id}"),
    ):
        assert TestClient(root, base_url=f"http://{host}").get(path).json() == expected


def test_a_route_added_after_the_first_request_is_found() -> None:
    app = FastAPI()
    app.get("/first")(template)
    assert templates_of(app, "/first") == ["/first"]
    router = APIRouter()
    router.get("/later/{id}")(template)
    app.include_router(router, prefix="/in")
    assert templates_of(app, "/in/later/1", "/first") == ["/in/later/{id}", "/first"]


def test_root_path_of_a_proxy_does_not_enter_the_template() -> None:
    app, sub = FastAPI(), FastAPI()
    app.get("/own/{id}")(template)
    sub.get("/own/{id}")(template)
    app.mount("/sub", sub)
    app.mount("/sub-again", sub)
    client = TestClient(app, root_path="/behind/proxy")
    told = [client.get("/behind/proxy" + path).json() for path in ("/own/1", "/sub/own/1", "/sub-again/own/1")]
    assert told == ["/own/{id}", "/sub/own/{id}", "/sub-again/own/{id}"]


def test_websocket_routes_have_templates_too() -> None:
    app, router, sub = FastAPI(), APIRouter(), FastAPI()

    async def tell(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_json(route_template(socket.scope))
        await socket.close()

    for application in (app, router, sub):
        application.websocket("/ws/{id}")(tell)
    app.include_router(router, prefix="/in")
    app.mount("/sub", sub)
    client = TestClient(app)
    told = []
    for path in ("/ws/1", "/in/ws/1", "/sub/ws/1"):
        with client.websocket_connect(path) as socket:
            told.append(socket.receive_json())
    assert told == ["/ws/{id}", "/in/ws/{id}", "/sub/ws/{id}"]


@pytest.mark.fault("R173")
def test_finding_the_template_of_a_routed_request_looks_at_no_other_route() -> None:
    async def nothing() -> None: ...

    app = FastAPI()
    scopes = []

    @app.get("/target/{id}")
    async def target(request: Request) -> None:
        scopes.append(request.scope)

    for number in range(300):
        app.get(f"/other/{number}")(nothing)
    TestClient(app).get("/target/1")
    (scope,) = scopes
    assert route_template(scope) == "/target/{id}"
    # With the walk done, a table whose list of routes is gone still answers.
    table_of(app.router).ordered.clear()
    app.router.routes.clear()
    assert route_template(scope) == "/target/{id}"


def test_a_path_not_yet_routed_is_matched_in_the_order_of_the_routes() -> None:
    async def nothing() -> None: ...

    app, sub = FastAPI(), FastAPI()
    app.get("/users/{id:int}")(nothing)
    app.get("/users/{name}")(nothing)
    app.post("/users/{name}/posts")(nothing)
    sub.get("/{id}/x")(nothing)
    app.mount("/sub/{id}", sub)
    app.mount("/static", Starlette(routes=[]))
    match = table_of(app.router).match
    assert match("/users/1", "GET") == "/users/{id}"
    assert match("/users/ann", "GET") == "/users/{name}"
    assert match("/users/ann/posts", "GET") == "/users/{name}/posts"
    assert match("/sub/7/8/x", "GET") == "/sub/{id}/{id}/x"
    assert match("/static/logo.png", "GET") == "/static/{path}"
    assert match("/nowhere", "GET") is None


def test_install_changes_no_template(limit: Callable[..., RateLimit]) -> None:
    app, sub = FastAPI(), Starlette()
    dependency = limit()

    @app.get("/x/{id}", dependencies=[Depends(dependency)])
    async def x() -> str:
        return "ok"

    install(app)
    app.mount("/sub", sub)
    client = TestClient(app)
    assert [client.get("/x/1").status_code, client.get("/x/2").status_code] == [200, 429]


def test_a_plain_starlette_application_gets_templates() -> None:
    from starlette.responses import JSONResponse

    async def tell(request: Request) -> JSONResponse:
        return JSONResponse(route_template(request.scope))

    app = Starlette(routes=[Route("/a/{id}", tell), Mount("/m/{x}", routes=[Route("/b/{id}", tell)])])
    assert templates_of(app, "/a/1", "/m/2/b/1") == ["/a/{id}", "/m/{x}/b/{id}"]
