"""Rows of docs/faults.md about what a client is told, over the rules file and every face that needs no web server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from flask import Flask
from starlette.testclient import TestClient
from tidegate import Gate, Limiter, ManualClock
from tidegate import fastapi as tide_fastapi
from tidegate import flask as tide_flask
from tidegate.asgi import TidegateMiddleware

SECOND_US = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000_000)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    yield f"memory://{re.sub(r'[^A-Za-z0-9]', '-', request.node.name)[:60]}"


def gate_of(folder: Path, store: str, clock: ManualClock, rules: str, namespace: str = "faults") -> Gate:
    config = folder / f"{namespace}.yaml"
    config.write_text(f"namespace: {namespace}\npolicies:\n  - name: all\n    rules: {rules}\n    by: ip\n")
    return Gate(str(config), store=store, clock=clock)


def scope_of(client: str, path: str = "/") -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "client": (client, 40000),
    }


def ask(gate: Gate, client: str = "203.0.113.7") -> tuple[int, dict[str, str]]:
    judgement = gate.judge_asgi(scope_of(client))
    return judgement.status, dict(judgement.fields_text)


@pytest.mark.fault("R53")
@pytest.mark.parametrize(
    "rules",
    ["7/10s sliding_log", "7/10s fixed_window", "7/10s sliding_counter", "7/10s token_bucket", "7/10s leaky_bucket"],
)
def test_waiting_exactly_retry_after_is_always_enough(
    tmp_path: Path, store: str, clock: ManualClock, rules: str
) -> None:
    import random

    draw = random.Random(rules)
    gate = gate_of(tmp_path, store, clock, rules)
    refused = 0
    while refused < 200:
        clock.advance_us(draw.randrange(1, 2 * SECOND_US))
        status, fields = ask(gate)
        if status == 0:
            continue
        refused += 1
        assert re.fullmatch(r"[1-9][0-9]*", fields["Retry-After"])
        assert 1 <= int(fields["Retry-After"]) <= (20 if "counter" in rules else 10)
        clock.advance_us(int(fields["Retry-After"]) * SECOND_US)
        assert ask(gate)[0] == 0


@pytest.mark.fault("R55")
def test_with_a_namespace_the_fields_are_those_of_the_key_that_was_counted(
    tmp_path: Path, store: str, clock: ManualClock
) -> None:
    gate = gate_of(tmp_path, store, clock, "1/60s", namespace="p.q")
    assert ask(gate)[0] == 0
    status, fields = ask(gate)
    assert (status, fields["Retry-After"], fields["X-RateLimit-Remaining"]) == (429, "60", "0")
    clock.advance_us(SECOND_US // 2)
    assert ask(gate)[1]["Retry-After"] == "60"
    clock.advance_us(SECOND_US)
    assert ask(gate)[1]["Retry-After"] == "59"
    other = gate_of(tmp_path, store, clock, "1/60s", namespace="p")
    assert ask(other)[0] == 0, "another namespace is another count"


@pytest.mark.fault("R59")
def test_reset_is_seconds_from_now_and_agrees_with_the_decision(
    tmp_path: Path, store: str, clock: ManualClock
) -> None:
    gate = gate_of(tmp_path, store, clock, "5/60s fixed_window")
    for gone_us, said in ((0, "60"), (SECOND_US, "59"), (30 * SECOND_US, "29"), (29 * SECOND_US - 1, "1")):
        clock.advance_us(gone_us)
        judgement = gate.judge_asgi(scope_of("203.0.113.7"))
        assert dict(judgement.fields_text)["X-RateLimit-Reset"] == said
        assert -(-judgement.decision.reset_after_us // SECOND_US) == int(said)


@pytest.mark.fault("R67")
@pytest.mark.parametrize(
    "rules", ["5/1s", "5/1s fixed_window", "5/1s sliding_counter", "5/1s token_bucket", "5/1s leaky_bucket"]
)
def test_every_answer_carries_the_fields_and_remaining_falls(
    tmp_path: Path, store: str, clock: ManualClock, rules: str
) -> None:
    gate = gate_of(tmp_path, store, clock, rules)
    answers = [ask(gate) for _ in range(6)]
    assert [fields["X-RateLimit-Remaining"] for _, fields in answers] == ["4", "3", "2", "1", "0", "0"]
    assert [status for status, _ in answers] == [0] * 5 + [429]
    assert all({"X-RateLimit-Limit", "X-RateLimit-Reset"} <= set(fields) for _, fields in answers)


@pytest.mark.fault("R68")
@pytest.mark.parametrize(
    "rules",
    ["1/100ms", "10/s fixed_window", "3/7s sliding_counter", "1/1500ms token_bucket", "1/year", "2/3s leaky_bucket"],
)
def test_retry_after_is_a_whole_positive_number_at_any_instant(
    tmp_path: Path, store: str, clock: ManualClock, rules: str
) -> None:
    gate = gate_of(tmp_path, store, clock, rules)
    refused = 0
    for step in range(400):
        clock.advance_us(7919 * (step % 13))
        status, fields = ask(gate)
        if status:
            refused += 1
            assert re.fullmatch(r"[1-9][0-9]*", fields["Retry-After"])
    assert refused > 20


@pytest.mark.fault("R70")
def test_a_fastapi_error_handler_sees_the_numbers_that_the_fields_tell(store: str, clock: ManualClock) -> None:
    app = FastAPI()
    tide_fastapi.install(app)

    @app.exception_handler(tide_fastapi.RateLimited)
    async def refused(request: Request, error: tide_fastapi.RateLimited) -> JSONResponse:
        decision = error.decision
        return JSONResponse(
            {"wait": decision.retry_after, "remaining": decision.remaining, "limit": decision.limit},
            status_code=429,
            headers=error.headers,
        )

    @app.get("/", dependencies=[Depends(tide_fastapi.rate_limit("2/minute", store=store, clock=clock))])
    async def view() -> dict[str, str]:
        return {}

    with TestClient(app, client=("203.0.113.7", 1)) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 200]
        answer = client.get("/")
    assert answer.status_code == 429
    assert answer.json() == {"wait": 60.0, "remaining": 0, "limit": 2}
    assert answer.headers["Retry-After"] == "60"
    assert (answer.headers["X-RateLimit-Remaining"], answer.headers["X-RateLimit-Limit"]) == ("0", "2")


@pytest.mark.fault("R70")
def test_a_flask_error_handler_sees_the_numbers_that_the_fields_tell(store: str, clock: ManualClock) -> None:
    app = Flask(__name__)
    tide_flask.Tidegate(app, default="2/minute", store=store, clock=clock)

    @app.errorhandler(429)
    def refused(error: Any) -> tuple[dict[str, object], int]:
        return {"wait": error.decision.retry_after, "remaining": error.decision.remaining}, 429

    @app.get("/")
    def view() -> dict[str, str]:
        return {}

    client = app.test_client()
    assert [client.get("/").status_code for _ in range(2)] == [200, 200]
    answer = client.get("/")
    assert answer.status_code == 429
    assert answer.json == {"wait": 60.0, "remaining": 0}
    assert (answer.headers["Retry-After"], answer.headers["X-RateLimit-Remaining"]) == ("60", "0")


@pytest.mark.fault("R172")
def test_the_python_faces_refuse_with_429(tmp_path: Path, store: str, clock: ManualClock) -> None:
    config = tmp_path / "rules.yaml"
    config.write_text("policies:\n  - name: all\n    rules: 1/minute\n    by: ip\n")
    fastapi = FastAPI()
    fastapi.add_middleware(TidegateMiddleware, config=str(config), store=store, clock=clock)
    fastapi.get("/")(lambda: {})
    with TestClient(fastapi, client=("203.0.113.8", 1)) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    flask = Flask(__name__)
    tide_flask.Tidegate(flask, config=str(config), store=store, clock=clock)
    flask.get("/")(lambda: {})
    answers = [
        flask.test_client().get("/", environ_base={"REMOTE_ADDR": "203.0.113.9"}).status_code for _ in range(2)
    ]
    assert answers == [200, 429]
    # ... and count in one place: whom the one has refused, the other refuses.
    assert flask.test_client().get("/", environ_base={"REMOTE_ADDR": "203.0.113.8"}).status_code == 429


@pytest.mark.fault("R08")
def test_a_count_that_vanished_between_two_hits_is_a_fresh_one(store: str, clock: ManualClock) -> None:
    for rules in ("3/10s", "3/10s fixed_window", "3/10s sliding_counter", "3/10s token_bucket", "3/10s leaky_bucket"):
        limiter = Limiter(rules, name=rules.replace("/", "-").replace(" ", "-"), store=store, clock=clock)
        for _ in range(50):
            assert [bool(limiter.hit("who")) for _ in range(4)] == [True, True, True, False]
            limiter.reset("who")  # as if it had expired at the worst moment
            decision = limiter.hit("who")
            assert (decision.allowed, decision.remaining) == (True, 2)
            clock.advance(40)


@pytest.mark.fault("R46")
def test_no_caller_of_the_shared_table_can_bring_a_time_of_its_own(tmp_path: Path) -> None:
    """Three processes whose Python clocks are ten seconds apart count as one: the store reads the time."""
    import subprocess
    import sys

    program = (
        "import sys, time\n"
        "skew = float(sys.argv[2])\n"
        "real = time.time, time.monotonic\n"
        "time.time = lambda: real[0]() + skew\n"
        "time.monotonic = lambda: real[1]() + skew\n"
        "from tidegate import Limiter\n"
        "limiter = Limiter('4/hour token_bucket', name='skew', store=sys.argv[1])\n"
        "print(sum(bool(limiter.hit('who')) for _ in range(33)))\n"
    )
    store = f"shared://{tmp_path}/table?size=64KiB"
    admitted = [
        int(
            subprocess.run(
                [sys.executable, "-c", program, store, skew], capture_output=True, text=True, check=True
            ).stdout
        )
        for skew in ("-10", "0", "10")
    ]
    assert admitted == [4, 0, 0]
