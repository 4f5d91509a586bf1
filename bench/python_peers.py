"""What a limit costs an application, beside what slowapi, fastapi-limiter and flask-limiter take for the same: in process,
and under uvicorn and gunicorn with wrk.

    python bench/python_peers.py [--rounds N] [--seconds S] [--json]

Every row is an application of its own with one route and one limit that admits all; the first row of each kind has none.
Rounds are interleaved, a ratio is the median of the ratios to that first row within a round. Must not enter: what is
expected of the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import io
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One module each, as somebody would write it.
PROGRAMS = {
    "fastapi_without": """
        from fastapi import FastAPI
        app = FastAPI()
        @app.get("/item")
        async def item(): return {"item": 7}
    """,
    "fastapi_tidegate": """
        from fastapi import Depends, FastAPI
        from tidegate.fastapi import install, rate_limit
        app = FastAPI()
        install(app)
        @app.get("/item", dependencies=[Depends(rate_limit(limit=1000000000, window_seconds=3600, store="memory://"))])
        async def item(): return {"item": 7}
    """,
    "fastapi_slowapi": """
        from fastapi import FastAPI, Request, Response
        from slowapi import Limiter
        from slowapi.util import get_remote_address
        limiter = Limiter(key_func=get_remote_address, headers_enabled=True)
        app = FastAPI()
        app.state.limiter = limiter
        @app.get("/item")
        @limiter.limit("1000000000/hour")
        async def item(request: Request, response: Response): return {"item": 7}
    """,
    "fastapi_fastapi_limiter": """
        from fastapi import Depends, FastAPI
        from fastapi_limiter.depends import RateLimiter
        from pyrate_limiter import Limiter, Rate
        app = FastAPI()
        @app.get("/item", dependencies=[Depends(RateLimiter(limiter=Limiter(Rate(1000000000, 3600000))))])
        async def item(): return {"item": 7}
    """,
    "flask_without": """
        from flask import Flask
        app = Flask(__name__)
        @app.get("/item")
        def item(): return {"item": 7}
    """,
    "flask_tidegate": """
        from flask import Flask
        from tidegate.flask import Tidegate, rate_limit
        app = Flask(__name__)
        Tidegate(app)
        @app.get("/item")
        @rate_limit(limit=1000000000, window_seconds=3600, store="memory://")
        def item(): return {"item": 7}
    """,
    "flask_flask_limiter": """
        from flask import Flask
        from flask_limiter import Limiter
        from flask_limiter.util import get_remote_address
        app = Flask(__name__)
        limiter = Limiter(get_remote_address, app=app, storage_uri="memory://", headers_enabled=True)
        @app.get("/item")
        @limiter.limit("1000000000/hour")
        def item(): return {"item": 7}
    """,
}


def write_programs(folder: Path) -> None:
    for name, text in PROGRAMS.items():
        lines = [line[8:] for line in text.strip("\n").splitlines()]
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n")


# ---- in process


def ask_asgi(app: Any) -> Callable[[int], None]:
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": "/item", "raw_path": b"/item", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"shop.example"), (b"accept", b"*/*")], "client": ("203.0.113.7", 40000),
        "server": ("192.0.2.1", 80),
    }  # fmt: skip
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    loop = asyncio.new_event_loop()

    def ask(times: int) -> None:
        async def all_of_them() -> None:
            for _ in range(times):
                await app({**scope, "state": {}}, receive, send)

        loop.run_until_complete(all_of_them())
        assert set(statuses) == {200}
        statuses.clear()

    return ask


def ask_wsgi(app: Any) -> Callable[[int], None]:
    environ = {
        "REQUEST_METHOD": "GET", "PATH_INFO": "/item", "QUERY_STRING": "", "SERVER_NAME": "shop.example",
        "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1", "REMOTE_ADDR": "203.0.113.7", "HTTP_HOST": "shop.example",
        "SCRIPT_NAME": "", "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr, "wsgi.multithread": False, "wsgi.multiprocess": False, "wsgi.run_once": False,
    }  # fmt: skip

    def start_response(status: str, headers: list[tuple[str, str]], failed: object = None) -> None:
        assert status.startswith("200"), status

    def ask(times: int) -> None:
        for _ in range(times):
            answer = app(dict(environ), start_response)
            b"".join(answer)
            answer.close()

    return ask


def in_process(rounds: int, requests: int = 300) -> dict[str, list[float]]:
    """Microseconds a request."""
    asks = {}
    for name in PROGRAMS:
        app = importlib.import_module(name).app
        asks[name] = ask_asgi(app) if name.startswith("fastapi") else ask_wsgi(app)
        asks[name](requests)
    times: dict[str, list[float]] = {name: [] for name in asks}
    for number in range(rounds):
        for name in list(asks) if number % 2 == 0 else reversed(list(asks)):
            began = time.perf_counter_ns()
            asks[name](requests)
            times[name].append((time.perf_counter_ns() - began) / requests / 1000)
    return times


# ---- under a server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve(name: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    command = (
        [sys.executable, "-m", "uvicorn", f"{name}:app", "--port", str(port), "--log-level", "error", "--no-access-log"]
        if name.startswith("fastapi")
        else [sys.executable, "-m", "gunicorn", f"{name}:app", "--bind", f"127.0.0.1:{port}", "--worker-class", "gthread",
              "--threads", "4", "--log-level", "error", "--no-control-socket"]
    )
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 20
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, port
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"{name} did not start")
        time.sleep(0.05)


def under_servers(rounds: int, seconds: int, folder: Path) -> dict[str, list[float]]:
    """Microseconds a request, from answers a second."""
    running: list[subprocess.Popen[bytes]] = []
    ports = {}
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    try:
        for name in PROGRAMS:
            process, ports[name] = serve(name, folder)
            running.append(process)
        for _ in range(rounds):
            for name, port in ports.items():
                done = subprocess.run(
                    ["wrk", "-t1", "-c16", f"-d{seconds}s", f"http://127.0.0.1:{port}/item"],
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
                )
                rate = re.search(r"Requests/sec:\s*([\d.]+)", done.stdout)
                if not rate or "Non-2xx" in done.stdout:
                    raise SystemExit(f"{name}: {done.stdout}")
                times[name].append(1e6 / float(rate[1]))
        return times
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    rows = {}
    for name, mine in times.items():
        base = times[f"{name.partition('_')[0]}_without"]
        rows[name] = {
            "us": statistics.median(mine),
            "ratio": statistics.median(a / b for a, b in zip(mine, base, strict=True)),
            "added_us": statistics.median(a - b for a, b in zip(mine, base, strict=True)),
        }
    return rows


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--seconds", type=int, default=1)
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_programs(Path(folder))
        sys.path.insert(0, folder)
        table = {
            "in process": summary(in_process(4 * asked.rounds)),
            "under uvicorn and gunicorn": summary(under_servers(max(3, asked.rounds // 3), asked.seconds, Path(folder))),
        }
    if asked.json:
        print(json.dumps(table))
        return 0
    for where, rows in table.items():
        print(f"{where}\n")
        for name, row in rows.items():
            print(f"  {name:26} {row['us']:8.1f} us   {row['ratio']:6.3f} x   + {row['added_us']:7.1f} us")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
