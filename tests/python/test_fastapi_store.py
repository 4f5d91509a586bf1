"""A store that gives no answer: what clients of the Python faces see meanwhile, and that nothing else is raised."""

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi import Request as FastAPIRequest
from fastapi.responses import JSONResponse
from flask import Flask
from starlette.testclient import TestClient
from tidegate.asgi import TidegateMiddleware
from tidegate.fastapi import RateLimited, install, rate_limit
from tidegate.flask import Tidegate
from tidegate.flask import rate_limit as flask_rate_limit

CLIENT = "192.0.2.1"


@contextmanager
def standing_still(holder: Path, rules: Path, store: str) -> Iterator[None]:
    """While another process stands still under the lock of this client's count."""
    holding = subprocess.Popen([holder, rules, store, CLIENT])
    try:
        stat, deadline = Path(f"/proc/{holding.pid}/stat"), time.monotonic() + 20
        while not stat.read_text().rpartition(") ")[2].startswith("T"):
            assert time.monotonic() < deadline and holding.poll() is None
            time.sleep(0.01)
        yield
    finally:
        holding.send_signal(signal.SIGCONT)
        assert holding.wait(20) == 0


def dependency(arguments: dict[str, Any]) -> Callable[[], Any]:
    app = FastAPI()
    install(app)

    @app.get("/", dependencies=[Depends(rate_limit(policy="stalling", **arguments))])
    async def root() -> str:
        return "ok"

    client = TestClient(app, client=(CLIENT, 5000))
    return lambda: client.get("/")


def handled(arguments: dict[str, Any]) -> Callable[[], Any]:
    """With a handler of one's own, which must get what it expects."""
    app = FastAPI()

    @app.exception_handler(RateLimited)
    async def handler(request: FastAPIRequest, error: RateLimited) -> JSONResponse:
        assert error.decision.degraded and error.decision.retry_after == 1.0
        return JSONResponse({}, error.status_code, error.headers)

    @app.get("/", dependencies=[Depends(rate_limit(policy="stalling", **arguments))])
    async def root() -> str:
        return "ok"

    client = TestClient(app, client=(CLIENT, 5000))
    return lambda: client.get("/")


def middleware(arguments: dict[str, Any]) -> Callable[[], Any]:
    app = FastAPI()
    app.add_middleware(TidegateMiddleware, **arguments)
    app.get("/")(lambda: "ok")
    client = TestClient(app, client=(CLIENT, 5000))
    return lambda: client.get("/")


def flask_application(arguments: dict[str, Any]) -> Callable[[], Any]:
    app = Flask("shop")
    Tidegate(app, **arguments)
    app.add_url_rule("/", "root", lambda: "ok")
    client = app.test_client()
    return lambda: client.get("/", environ_base={"REMOTE_ADDR": CLIENT})


def flask_view(arguments: dict[str, Any]) -> Callable[[], Any]:
    app = Flask("shop")
    app.add_url_rule("/", "root", flask_rate_limit(policy="stalling", **arguments)(lambda: "ok"))
    client = app.test_client()
    return lambda: client.get("/", environ_base={"REMOTE_ADDR": CLIENT})


@pytest.mark.fault("R101")
@pytest.mark.parametrize("face", [dependency, handled, middleware, flask_application, flask_view])
@pytest.mark.parametrize(("policy", "status"), [("open", 200), ("closed", 503)])
def test_while_the_store_stands_still_the_policy_answers_and_only_the_log_speaks_of_it(
    make: Callable[..., None], build: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    face: Callable[[dict[str, Any]], Callable[[], Any]], policy: str, status: int,
) -> None:  # fmt: skip
    holder = build / "tests" / "fcgi" / "hold_store"
    make(str(holder))
    rules, store = tmp_path / "rules.yaml", f"shared://{tmp_path}/table?size=128KiB"
    rules.write_text(f"policies:\n  - {{name: stalling, rules: 1000/hour, on_store_failure: {policy}}}\n")
    ask = face({"config": str(rules), "store": store})
    assert ask().headers["X-RateLimit-Remaining"] == "999"
    with caplog.at_level(logging.WARNING, "tidegate"), standing_still(holder, rules, store):
        for _ in range(5):
            answer = ask()
            assert answer.status_code == status
            assert answer.headers.get("X-RateLimit-Limit") is None
            assert answer.headers.get("Retry-After") == (None if status == 200 else "1")
    said = [record.getMessage() for record in caplog.records if record.name == "tidegate"]
    assert len([line for line in said if "store-failing" in line]) == 1, said
    deadline = time.monotonic() + 20
    while ask().headers.get("X-RateLimit-Limit") != "1000":
        assert time.monotonic() < deadline
