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

import pytest
from fastapi import Depends, FastAPI
from flask import Flask
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

    def run(first: int, last: int) -> None:
        statuses = {"200": 0, "429": 0}

        def start(status: str, headers: list[tuple[str, str]], failed: object = None) -> None:
            statuses[status[:3]] += 1

        for number in range(first, last):
            environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "SERVER_NAME": "a", "SERVER_PORT": "80",
                       "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.url_scheme": "http", "REMOTE_ADDR": address(number // 3)}
            answer = app.wsgi_app(environ, start)
            b"".join(answer)
        assert statuses["429"] * 2 == pytest.approx(statuses["200"], abs=4)

    return run


@pytest.mark.parametrize("face", ["fastapi", "asgi", "flask"])
def test_requests_of_ever_new_clients_leave_no_memory_behind(face: str, tmp_path: Path) -> None:
    made = {"fastapi": fastapi_application, "asgi": lambda: asgi_application(tmp_path), "flask": flask_application}
    run = made[face]()
    warm = 15_000
    run(0, warm)
    before = resident_kib()
    run(warm, warm + REQUESTS)
    assert resident_kib() - before < GROWN_KIB_MAX
