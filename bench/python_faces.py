"""What a limit costs a FastAPI request: with a dependency, and with the middleware, each beside the same application
without it.

    python bench/python_faces.py [--quick] [--json]

The application is driven in process by an ASGI driver that does nothing, so that no server's and no client's time hides
the difference. Every round times each application once, back and forth; a ratio is the median over the rounds. Each
answer is checked to have admitted and, where there is a limit, to carry its fields.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from tidegate.fastapi import TidegateMiddleware, install, rate_limit

RULES = "1000000000/second token_bucket"
STORE = "memory://bench-faces"
HEADERS = [
    (b"host", b"shop.example"),
    (b"user-agent", b"Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"),
    (b"accept", b"application/json"), (b"accept-language", b"en-GB,en;q=0.5"), (b"accept-encoding", b"gzip, br"),
    (b"referer", b"https://shop.example/"), (b"cookie", b"session=0123456789abcdef"), (b"connection", b"keep-alive"),
]  # fmt: skip

App = Callable[[Any, Any, Any], Awaitable[None]]


class PassThrough:
    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


async def nothing() -> None: ...


def application(dependency: Callable[..., Any] | None = None) -> FastAPI:
    app = FastAPI()

    @app.get("/items/{item_id}", dependencies=[] if dependency is None else [Depends(dependency)])
    async def item(item_id: int) -> dict[str, int]:
        return {"item": item_id}

    return app


def applications(folder: Path) -> dict[str, App]:
    limited = application(rate_limit(RULES, store=STORE))
    install(limited)
    passing, judged = application(), application()
    passing.add_middleware(PassThrough)
    rules = folder / "rules.yaml"
    rules.write_text(f'policies:\n  - name: items\n    match: {{path: "/items/*"}}\n    rules: {RULES}\n')
    judged.add_middleware(TidegateMiddleware, config=str(rules), store=STORE)
    return {
        "empty dependency": application(nothing),
        "dependency": limited,
        "pass-through middleware": passing,
        "middleware": judged,
    }


def scope() -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": "/items/7", "raw_path": b"/items/7", "query_string": b"", "root_path": "",
        "headers": list(HEADERS), "client": ("203.0.113.7", 40000), "server": ("192.0.2.1", 80), "state": {},
    }  # fmt: skip


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def drop(message: dict[str, Any]) -> None: ...


async def check(row: str, app: App) -> None:
    sent: list[dict[str, Any]] = []

    async def keep(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope(), receive, keep)
    assert sent[0]["status"] == 200, row
    assert (b"x-ratelimit-limit" in dict(sent[0]["headers"])) == (row in ("dependency", "middleware")), row


async def timed(app: App, requests: int) -> float:
    """Nanoseconds a request."""
    began = time.perf_counter_ns()
    for _ in range(requests):
        await app(scope(), receive, drop)
    return (time.perf_counter_ns() - began) / requests


async def measure(apps: dict[str, App], rounds: int, requests: int) -> dict[str, list[float]]:
    for row, app in apps.items():
        await check(row, app)
        await timed(app, requests)
    times: dict[str, list[float]] = {row: [] for row in apps}
    for number in range(rounds):
        # Back and forth, so that no row is always the one after another.
        for row in list(apps) if number % 2 == 0 else reversed(list(apps)):
            times[row].append(await timed(apps[row], requests))
    return times


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        apps = applications(Path(folder))
        gc.collect()
        gc.freeze()
        times = asyncio.run(measure(apps, 15 if asked.quick else 151, 200))
    bases = {"dependency": "empty dependency", "middleware": "pass-through middleware"}
    table = {}
    for row, base in bases.items():
        ratio = statistics.median(a / b for a, b in zip(times[row], times[base], strict=True))
        table[row] = {
            "ratio": ratio,
            "us": statistics.median(times[row]) / 1000,
            "base_us": statistics.median(times[base]) / 1000,
        }
    if asked.json:
        print(json.dumps(table))
    else:
        for row, numbers in table.items():
            times_as_long = f"{numbers['ratio']:.3f} x {bases[row]}"
            print(f"{row:12} {numbers['us']:7.2f} us beside {numbers['base_us']:7.2f} us: {times_as_long}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
