"""Many requests through each face, from ever new clients: nothing that a request leaves behind adds up.

TIDEGATE_LONG=1 makes it a million requests a face."""

from __future__ import annotations

import asyncio
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask_restx
import pytest
import tidegate.wsgi
from fastapi import Depends, FastAPI
from flask import Flask, request
from starlette.requests import HTTPConnection
from tidegate import Limiter
from tidegate.fastapi import TidegateMiddleware, install, rate_limit
from tidegate.flask import Tidegate
from tidegate.flask import rate_limit as flask_rate_limit

REQUESTS = 1_000_000 if os.environ.get("TIDEGATE_LONG") == "1" else 15_000
GROWN_KIB_MAX = 1024  # arenas of the allocator, not a byte per request


def resident_kib() -> int:
    gc.collect()
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def address(number: int) -> str:
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def asgi(app: Any) -> Callable[[int, int], None]:
    statuses = {200: 0, 429: 0}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses[message["status"]] += 1

    async def ask(first: int, last: int) -> None:
        for number in range(first, last):
            scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/", "headers": [],
                     "raw_path": b"/", "query_string": b"", "root_path": "", "client": (address(number // 3), 4000)}
            await app(scope, receive, send)

    def run(first: int, last: int) -> None:
        asyncio.run(ask(first, last))
        assert statuses[429] * 2 == pytest.approx(statuses[200], abs=4)  # two of each client's three

    return run


def fastapi_application() -> Callable[[int, int], None]:
    app = FastAPI()
    install(app)

    @app.get("/", dependencies=[Depends(rate_limit("2/hour fixed_window", store="memory://flat-fastapi?size=64MiB"))])
    async def index() -> dict[str, bool]:
        return {"ok": True}

    return asgi(app)


def counts(response: Any) -> bool:
    return bool(response.status_code == 200)


async def rules_of(conn: HTTPConnection) -> str:
    return "2/hour fixed_window"


def asking_application() -> Callable[[int, int], None]:
    """All that may be asked for each request: who, how much, which rules, and how it was answered."""
    app = FastAPI()
    install(app)
    limit = rate_limit(
        rules_of, by=["ip", lambda conn: conn.client.host], cost=lambda conn: 1, charge_when=counts,
        store="memory://flat-asking?size=64MiB",
    )  # fmt: skip

    @app.get("/", dependencies=[Depends(limit)])
    async def index() -> dict[str, bool]:
        return {"ok": True}

    return asgi(app)


def asgi_application(tmp_path: Path) -> Callable[[int, int], None]:
    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    rules = tmp_path / "rules.yaml"
    rules.write_text("policies:\n  - {name: all, rules: 2/hour fixed_window}\n")
    return asgi(TidegateMiddleware(plain, config=str(rules), store="memory://flat-asgi?size=64MiB"))


def flask_application() -> Callable[[int, int], None]:
    app = Flask(__name__)
    Tidegate(app)

    @app.get("/")
    @flask_rate_limit("2/hour fixed_window", store="memory://flat-flask?size=64MiB")
    def index() -> str:
        return "ok"

    return wsgi(app.wsgi_app)


def restx_application() -> Callable[[int, int], None]:
    """Decorated anew for each request, and asked for each."""
    app = Flask(__name__)
    limit = flask_rate_limit(
        lambda: "2/hour fixed_window", by=lambda: request.remote_addr, cost=lambda: 1, charge_when=counts,
        store="memory://flat-restx?size=64MiB",
    )  # fmt: skip

    class Index(flask_restx.Resource):  # type: ignore[misc]
        method_decorators = [limit]

        def get(self) -> str:
            return "ok"

    api = flask_restx.Api(app)
    api.add_resource(Index, "/things")
    return wsgi(app.wsgi_app, "/things")


def wsgi_application() -> Callable[[int, int], None]:
    def plain(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"ok"]

    limiter = Limiter("2/hour fixed_window", by="ip", store="memory://flat-wsgi?size=64MiB")
    return wsgi(tidegate.wsgi.TidegateMiddleware(plain, limiter=limiter, charge_when=counts))


def wsgi(app: Any, path: str = "/") -> Callable[[int, int], None]:
    def run(first: int, last: int) -> None:
        statuses = {"200": 0, "429": 0}

        def start(status: str, headers: list[tuple[str, str]], failed: object = None) -> None:
            statuses[status[:3]] += 1

        for number in range(first, last):
            environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "SERVER_NAME": "a", "SERVER_PORT": "80",
                       "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.url_scheme": "http", "REMOTE_ADDR": address(number // 3)}
            answer = app(environ, start)
            b"".join(answer)
        assert statuses["429"] * 2 == pytest.approx(statuses["200"], abs=4)

    return run


MADE: dict[str, Callable[[Path], Callable[[int, int], None]]] = {
    "fastapi": lambda _: fastapi_application(),
    "fastapi asking": lambda _: asking_application(),
    "asgi": asgi_application,
    "flask": lambda _: flask_application(),
    "flask-restx asking": lambda _: restx_application(),
    "wsgi": lambda _: wsgi_application(),
}


@pytest.mark.parametrize("face", list(MADE))
def test_requests_of_ever_new_clients_leave_no_memory_behind(face: str, tmp_path: Path) -> None:
    run = MADE[face](tmp_path)
    warm = 15_000
    run(0, warm)
    before = resident_kib()
    run(warm, warm + REQUESTS)
    assert resident_kib() - before < GROWN_KIB_MAX
