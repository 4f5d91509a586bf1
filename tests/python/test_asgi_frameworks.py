"""tidegate.asgi in front of Starlette, Litestar and Quart, in process and under hypercorn by HTTP/2."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from tidegate import ConfigError, Limiter
from tidegate.asgi import TidegateMiddleware

from servers import Server
from setting import MiddlewareSetting as Setting

steps: list[str] = []


@pytest.fixture(autouse=True)
def environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_ENABLED", "TIDEGATE_STORE", "TIDEGATE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


# ---- one application, three times: a form, a stream, a failure, and what happens at its start and end ----


async def pieces() -> AsyncIterator[bytes]:
    for piece in (b"one", b"two"):
        await asyncio.sleep(0)
        yield piece


def starlette_app() -> Any:
    from contextlib import asynccontextmanager

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    async def login(request: Request) -> Any:
        form = await request.form()
        return PlainTextResponse(f"account {form.get('account')}", int(request.query_params.get("status", 200)))

    async def stream(request: Request) -> Any:
        return StreamingResponse(pieces())

    async def fail(request: Request) -> Any:
        raise RuntimeError("as asked")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        steps.append("up")
        yield
        steps.append("down")

    return Starlette(
        routes=[Route("/login", login, methods=["GET", "POST"]), Route("/stream", stream), Route("/fail", fail)],
        lifespan=lifespan,
    )


def litestar_app() -> Any:
    from litestar import Litestar, Request, Response, get, route
    from litestar.response import Stream

    @route("/login", http_method=["GET", "POST"])
    async def login(request: Request[Any, Any, Any]) -> Response[str]:
        form = await request.form()
        return Response(f"account {form.get('account')}", status_code=int(request.query_params.get("status", 200)))

    @get("/stream")
    async def stream() -> Stream:
        return Stream(pieces())

    @get("/fail")
    async def fail() -> str:
        raise RuntimeError("as asked")

    login.fn.__annotations__.update({"request": Request, "return": Response[str]})
    stream.fn.__annotations__["return"] = Stream

    async def up() -> None:
        steps.append("up")

    async def down() -> None:
        steps.append("down")

    return Litestar([login, stream, fail], on_startup=[up], on_shutdown=[down])


def quart_app() -> Any:
    import quart

    app = quart.Quart("shop")

    @app.route("/login", methods=["GET", "POST"])
    async def login() -> Any:
        form = await quart.request.form
        return f"account {form.get('account')}", int(quart.request.args.get("status", 200))

    @app.get("/stream")
    async def stream() -> Any:
        return pieces(), 200

    @app.get("/fail")
    async def fail() -> str:
        raise RuntimeError("as asked")

    @app.before_serving
    async def up() -> None:
        steps.append("up")

    @app.after_serving
    async def down() -> None:
        steps.append("down")

    return app


APPS: dict[str, Callable[[], Any]] = {"starlette": starlette_app, "litestar": litestar_app, "quart": quart_app}


@pytest.fixture(params=list(APPS))
def app(request: pytest.FixtureRequest) -> Any:
    return APPS[request.param]()


def asked(limited: Any, *requests: tuple[str, str, Any], address: str = "192.0.2.1") -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(limited, client=(address, 5), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
            return [await client.request(method, path, data=data) for method, path, data in requests]

    return asyncio.run(main())


def test_a_framework_behind_a_limiter_refuses_the_third_and_carries_fields_on_every_answer(
    app: Any, setting: Setting
) -> None:
    limited = TidegateMiddleware(app, limiter=setting.limiter())
    answers = asked(limited, *[("GET", "/login", None)] * 3)
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers.get_list("x-ratelimit-remaining") for answer in answers] == [["1"], ["0"], ["0"]]
    assert answers[2].json()["code"] == "RATE_LIMITED" and answers[2].headers["retry-after"] == "60"
    assert asked(limited, ("GET", "/login", None), address="192.0.2.2")[0].status_code == 200


@pytest.mark.parametrize(("path", "status"), [("/stream", 200), ("/fail", 500), ("/nowhere", 404)])
def test_streams_errors_and_unknown_urls_carry_the_fields_once(
    app: Any, setting: Setting, path: str, status: int
) -> None:
    (answer,) = asked(TidegateMiddleware(app, limiter=setting.limiter("9/minute")), ("GET", path, None))
    assert answer.status_code == status
    assert answer.headers.get_list("x-ratelimit-remaining") == ["8"]
    assert status != 200 or answer.content == b"onetwo"


def test_a_form_counts_its_account_and_the_application_reads_the_form_all_the_same(app: Any, setting: Setting) -> None:
    gate = setting.gate("policies: [{name: login, match: {path: /login}, rules: 2/minute, by: 'form:account'}]\n")
    limited = TidegateMiddleware(app, gate=gate)
    told = asked(limited, *[("POST", "/login", {"account": "ann", "x": "1"})] * 3)
    assert [answer.status_code for answer in told] == [200, 200, 429]
    assert "account ann" in told[1].text
    assert "account bob" in asked(limited, ("POST", "/login", {"account": "bob"}))[0].text


@pytest.mark.fault("R17")
def test_only_failed_logins_count_by_the_rules_file_and_by_charge_when(app: Any, setting: Setting) -> None:
    gate = setting.gate("policies: [{name: login, rules: 3/minute, count: {status: 401}}]\n")
    own = setting.limiter("3/minute", name="own")
    ok, failed = ("GET", "/login?status=200", None), ("GET", "/login?status=401", None)
    for limited in (
        TidegateMiddleware(app, gate=gate),
        TidegateMiddleware(app, limiter=own, charge_when=lambda response: response.status_code == 401),
    ):
        told = [answer.status_code for answer in asked(limited, *[ok] * 6, ("GET", "/fail", None), *[failed] * 3, ok)]
        assert told == [200] * 6 + [500] + [401] * 3 + [429]


def test_by_route_counts_the_templates_of_starlette_and_other_frameworks_as_one_route(app: Any, setting: Setting) -> None:
    limited = TidegateMiddleware(app, limiter=setting.limiter("1/minute", by="ip+route"))
    told = [answer.status_code for answer in asked(limited, *[("GET", "/login", None), ("GET", "/stream", None)] * 2)]
    assert told == ([200, 200, 429, 429] if type(app).__name__ == "Starlette" else [200, 429, 429, 429])


def test_a_lifespan_passes_through(app: Any, setting: Setting) -> None:
    limited = TidegateMiddleware(app, limiter=setting.limiter())
    steps.clear()

    async def main() -> None:
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        outgoing: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        task = asyncio.create_task(limited(scope, incoming.get, outgoing.put))
        for word in ("startup", "shutdown"):
            await incoming.put({"type": f"lifespan.{word}"})
            message = await asyncio.wait_for(outgoing.get(), 10)
            assert message["type"] == f"lifespan.{word}.complete"
        await asyncio.wait_for(task, 10)

    asyncio.run(main())
    assert steps == ["up", "down"]


def test_a_bare_application_that_fails_has_answered_500_and_gets_back_what_it_took(setting: Setting) -> None:
    seen: list[int] = []

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("as asked")

    limiter = setting.limiter("1/minute")
    limited = TidegateMiddleware(
        failing, limiter=limiter, charge_when=lambda response: bool(seen.append(response.status_code))
    )
    asked(limited, *[("GET", "/", None)] * 3)
    assert seen == [500] * 3
    assert limiter.peek(dims={"ip": "192.0.2.1"}).remaining == 1


def test_a_stream_goes_out_piece_by_piece_as_it_is_made(setting: Setting) -> None:
    made: list[str] = []

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    limited = TidegateMiddleware(streaming, limiter=setting.limiter(), charge_when=lambda response: True)

    async def main() -> None:
        async def send(message: Any) -> None:
            made.append(message["type"].rpartition(".")[2] + message.get("body", b"").decode())

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("192.0.2.1", 5), "query_string": b""}

        async def receive() -> Any:
            raise AssertionError("nobody reads the body")

        await limited(scope, receive, send)

    asyncio.run(main())
    assert made == ["start", "body0", "body1", "body2", "body"]


def test_a_route_and_a_mount_of_starlette_take_a_limit_as_middleware_of_their_own(setting: Setting) -> None:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    async def ok(request: Any) -> Any:
        return PlainTextResponse("ok")

    def limit(rules: str, name: str, by: str = "ip") -> Middleware:
        return Middleware(TidegateMiddleware, limiter=setting.limiter(rules, name=name, by=by))

    by_route = limit("1/minute", "by route", "ip+route")
    below = [Route("/x", ok), Route("/y/{number}", ok)]
    app = Starlette(
        routes=[
            Route("/one", ok, middleware=[limit("2/minute", "one")]),
            Route("/free", ok),
            Mount("/many", routes=below, middleware=[limit("3/minute", "many")]),
            Route("/p/{number}", ok, middleware=[by_route]),
            Route("/q", ok, middleware=[by_route]),
            Mount("/m/{shop}", routes=below, middleware=[by_route]),
            Mount("/n", routes=[Mount("/deep", routes=below, middleware=[by_route])]),
        ]
    )
    for root in ("", "/behind"):
        told = {
            path: asked_with(app, root, path)
            for path in ("/one", "/one", "/free", "/many/x", "/many/y/1", "/p/1", "/q", "/m/a/x", "/n/deep/x", "/m/a/y/1")
        }
        assert set(told.values()) == {200}, told
        if root == "":
            again = ["/one", "/p/2", "/q", "/m/b/x", "/n/deep/x", "/m/c/y/9"]
            assert {path: asked_with(app, root, path) for path in again} == dict.fromkeys(again, 429)
            assert [asked_with(app, root, path) for path in ("/many/x", "/many/x", "/many/nowhere")] == [200, 429, 429]
            setting.clock.advance(60)


def asked_with(app: Any, root: str, path: str) -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app, root_path=root, client=("192.0.2.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
            return (await client.get(root + path)).status_code

    return asyncio.run(ask())


def test_the_rules_file_and_limiters_stand_together_and_what_is_wrong_raises(setting: Setting) -> None:
    gate = setting.gate("policies: [{name: a, match: {path: /login}, rules: 1/minute}]\n")
    limited = TidegateMiddleware(starlette_app(), gate=gate, limiter=setting.limiter("3/minute", name="site"))
    told = asked(limited, *[("GET", "/login", None)] * 2, *[("GET", "/stream", None)] * 3)
    assert [answer.status_code for answer in told] == [200, 429, 200, 200, 429]
    with pytest.raises(ConfigError, match="by="):
        TidegateMiddleware(starlette_app(), limiter=Limiter("5/minute", store=setting.store, clock=setting.clock))
    with pytest.raises(ValueError, match="count"):
        TidegateMiddleware(starlette_app(), gate=gate, charge_when=bool)


# ---- HTTP/2 ----

SERVED = """
import sys
sys.path.insert(0, {tests!r})
from test_asgi_frameworks import {name}_app
from tidegate import Limiter
from tidegate.asgi import TidegateMiddleware
app = TidegateMiddleware({name}_app(), limiter=Limiter("5/hour", by="ip", name="h2"))
"""


def over_http2(port: int, paths: list[str]) -> list[tuple[int, dict[str, str], bytes]]:
    """All requests at once, each a stream of one connection (RFC 9113, by prior knowledge)."""
    link = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    answers: dict[int, tuple[dict[str, str], bytes]] = {}
    with socket.create_connection(("127.0.0.1", port), 30) as plug:
        link.initiate_connection()
        for number, path in enumerate(paths):
            headers = [(":method", "GET"), (":scheme", "http"), (":authority", "shop.test"), (":path", path)]
            link.send_headers(2 * number + 1, headers, end_stream=True)
        plug.sendall(link.data_to_send())
        ended = 0
        while ended < len(paths):
            data = plug.recv(65536)
            assert data, "the server closed the connection"
            for event in link.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    answers[event.stream_id] = (dict(event.headers), b"")
                elif isinstance(event, h2.events.DataReceived):
                    fields, body = answers[event.stream_id]
                    answers[event.stream_id] = (fields, body + event.data)
                    link.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    ended += 1
            plug.sendall(link.data_to_send())
    return [(int(fields[":status"]), fields, body) for _, (fields, body) in sorted(answers.items())]


@pytest.mark.parametrize("name", ["starlette", "quart"])
def test_http2_streams_of_one_connection_are_counted_one_by_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED.format(tests=str(Path(__file__).parent), name=name))
    with Server(tmp_path, "hypercorn", "served:app") as server:
        answers = over_http2(server.port, ["/stream"] * 8)
        assert server.ask("GET", "/stream")[0] == 429  # and HTTP/1.1 counts in the same place
    assert sorted(status for status, _, _ in answers) == [200] * 5 + [429] * 3
    assert sorted(int(fields["x-ratelimit-remaining"]) for status, fields, _ in answers if status == 200) == [0, 1, 2, 3, 4]
    assert {body for status, _, body in answers if status == 200} == {b"onetwo"}
    assert all(json.loads(body)["code"] == "RATE_LIMITED" for status, _, body in answers if status == 429)
