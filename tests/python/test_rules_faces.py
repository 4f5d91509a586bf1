"""What a rules file asks of a Python face beyond judging: bodies, answers, plans, marks. Flask and ASGI answer alike."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Form, Request
from fastapi.testclient import TestClient
from flask import Flask
from flask import request as flask_request
from tidegate import Gate, ManualClock
from tidegate.asgi import TidegateMiddleware
from tidegate.fastapi import install, rate_limit
from tidegate.flask import Tidegate
from tidegate.flask import rate_limit as flask_rate_limit

Ask = Callable[..., tuple[int, dict[str, str], str]]
numbers = itertools.count()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Site:
    """One application in each framework behind one rules file; each has a store of its own."""

    def __init__(self, face: str, rules: str, clock: ManualClock, folder: Path, **options: Any) -> None:
        path = folder / "rules.yaml"
        path.write_text(rules)
        self.gate = Gate(path, store=f"memory://rules-faces-{next(numbers)}", clock=clock)
        self.seen: list[bytes] = []
        self.face = face
        getattr(self, "_" + face)(**options)

    def _fastapi(self, **options: Any) -> None:
        app = FastAPI()
        install(app, gate=self.gate, **options)

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def anything(path: str, request: Request) -> Any:
            from starlette.responses import Response

            self.seen.append(await request.body())
            answer = dict(request.query_params)
            if answer.get("status") == "raise":
                raise RuntimeError("as asked")
            headers = {"X-Cost": answer["cost"]} if "cost" in answer else {}
            return Response("done", int(answer.get("status", 200)), headers)

        self.client = TestClient(app, raise_server_exceptions=False)

    def _asgi(self, **options: Any) -> None:
        async def anything(scope: Any, receive: Any, send: Any) -> None:
            body, more = b"", True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            self.seen.append(body)
            answer = dict(pair.split("=") for pair in scope["query_string"].decode().split("&") if pair)
            if answer.get("status") == "raise":
                raise RuntimeError("as asked")
            headers = [(b"x-cost", answer["cost"].encode())] if "cost" in answer else []
            await send({"type": "http.response.start", "status": int(answer.get("status", 200)), "headers": headers})
            await send({"type": "http.response.body", "body": b"done"})

        self.client = TestClient(TidegateMiddleware(anything, gate=self.gate, **options), raise_server_exceptions=False)

    def _flask(self, **options: Any) -> None:
        app = Flask(__name__)
        if "plan" in options:
            plan = options.pop("plan")
            options["plan"] = lambda: plan({"headers": [(b"x-plan", flask_request.headers.get("X-Plan", "").encode())]})
        Tidegate(app, gate=self.gate, **options)

        @app.route("/<path:path>", methods=["GET", "POST"])
        @app.route("/", methods=["GET", "POST"])
        def anything(path: str = "") -> Any:
            self.seen.append(flask_request.get_data(parse_form_data=False))
            answer = flask_request.args
            if answer.get("status") == "raise":
                raise RuntimeError("as asked")
            headers = {"X-Cost": answer["cost"]} if "cost" in answer else {}
            return "done", int(answer.get("status", 200)), headers

        self.flask = app.test_client()

    def ask(self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes | None = None) -> Any:
        """Status, fields by lower-case name, body."""
        if self.face == "flask":
            got = self.flask.open(target, method=method, headers=headers, data=body, environ_base={"REMOTE_ADDR": "127.0.0.1"})
            return got.status_code, {name.lower(): value for name, value in got.headers}, got.get_data(as_text=True)
        answered = self.client.request(method, target, headers=headers, content=body)
        return answered.status_code, dict(answered.headers), answered.text


@pytest.fixture(params=["asgi", "fastapi", "flask"])
def site(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> Callable[..., Site]:
    return lambda rules, **options: Site(request.param, rules, clock, tmp_path, **options)


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.fault("R17")
def test_only_failed_logins_count_and_the_sixth_is_refused_before_the_handler(site: Callable[..., Site]) -> None:
    shop = site("policies: [{name: login, rules: 5/minute, count: {status: 401}}]\n")
    for _ in range(10):
        assert shop.ask("GET", "/login?status=200")[0] == 200
    for _ in range(5):
        assert shop.ask("GET", "/login?status=401")[0] == 401
    handled = len(shop.seen)
    assert shop.ask("GET", "/login?status=200")[0] == 429
    assert len(shop.seen) == handled


def test_an_application_that_fails_has_answered_500(site: Callable[..., Site]) -> None:
    shop = site("policies: [{name: a, rules: 2/minute, count: {status: 5xx}}]\n")
    for status in ("200", "raise", "200", "raise", "200"):
        got = shop.ask("GET", f"/?status={status}")[0]
    assert got == 429


def test_a_response_says_what_it_cost(site: Callable[..., Site]) -> None:
    shop = site("policies: [{name: a, rules: 10/minute, cost: {response_header: X-Cost, reserve: 1, max: 9}}]\n")
    assert shop.ask("GET", "/?cost=7")[0] == 200
    assert shop.ask("GET", "/?cost=0")[1]["x-ratelimit-remaining"] == "2"
    assert shop.ask("GET", "/?cost=3")[1]["x-ratelimit-remaining"] == "2"
    assert shop.ask("GET", "/")[0] == 429


def test_a_form_counts_its_account_from_any_address_and_the_application_reads_it_all_the_same(
    site: Callable[..., Site],
) -> None:
    shop = site(
        "trusted_proxies: 127.0.0.1\n"
        'policies: [{name: login, rules: 2/minute, by: [ip, "form:account"], missing_identity: reject 400}]\n'
    )
    for host in (1, 2):
        forwarded = {**FORM, "X-Forwarded-For": f"192.0.2.{host}"}
        assert shop.ask("POST", "/login", forwarded, b"account=ann&pw=%20x")[0] == 200
        assert shop.seen[-1] == b"account=ann&pw=%20x"
    assert shop.ask("POST", "/login", {**FORM, "X-Forwarded-For": "192.0.2.3"}, b"account=ann")[0] == 429
    # What the address had paid for the refused request was given back.
    for _ in range(2):
        assert shop.ask("POST", "/login", {**FORM, "X-Forwarded-For": "192.0.2.3"}, b"account=bob")[0] == 200
    assert shop.ask("POST", "/login", {**FORM, "X-Forwarded-For": "192.0.2.4"}, b"other=1")[0] == 400
    assert shop.ask("POST", "/login", {**FORM, "X-Forwarded-For": "192.0.2.4"}, b"account=a&x=" + b"x" * 65536)[0] == 400


def test_json_counts_alike(site: Callable[..., Site]) -> None:
    shop = site('policies: [{name: login, rules: 1/minute, by: "json:user.id", missing_identity: reject 400}]\n')
    sent = {"Content-Type": "application/json"}
    assert shop.ask("POST", "/", sent, b'{"user": {"id": 7}}')[0] == 200
    assert shop.seen[-1] == b'{"user": {"id": 7}}'
    assert shop.ask("POST", "/", sent, b'{ "x": 1, "user" : {"id":7} }')[0] == 429
    assert shop.ask("POST", "/", sent, b'{"user": {"id": 8}}')[0] == 200
    assert shop.ask("POST", "/", sent, b'{"user": {"id": 8}, "user": {"id": 9}}')[0] == 400
    assert shop.ask("GET", "/")[0] == 400


def test_the_application_knows_the_plan(site: Callable[..., Site]) -> None:
    def plan(scope: Any) -> str | None:
        return dict(scope["headers"]).get(b"x-plan", b"").decode() or None

    shop = site("policies: [{name: api, plans: {default: free, free: 1/minute, pro: 3/minute}}]\n", plan=plan)
    assert shop.ask("GET", "/")[1]["x-ratelimit-limit"] == "1"
    assert shop.ask("GET", "/")[0] == 429
    assert shop.ask("GET", "/", {"X-Plan": "pro"})[1]["x-ratelimit-remaining"] == "1"


def test_fields_bodies_and_statuses_are_those_of_the_file(site: Callable[..., Site]) -> None:
    shop = site(
        "defaults: {headers: ietf, body: problem, statuses: {denied: 503}, texts: {denied: 'Später, in {wait} s'}}\n"
        "policies:\n"
        "  - {name: quiet, match: {path: /quiet}, rules: 1/minute, headers: none}\n"
        "  - {name: robots, match: {path: /robots}, rules: 1/minute, mode: challenge}\n"
        "  - {name: tried, match: {path: /tried}, rules: 1/minute, mode: shadow, headers: shadow}\n"
        "  - {name: api, rules: 1/minute}\n"
    )
    status, fields, _ = shop.ask("GET", "/x")
    assert (status, fields["ratelimit-policy"], fields["ratelimit"]) == (200, '"api";q=1;w=60', '"api";r=0;t=60')
    assert "x-ratelimit-limit" not in fields
    status, fields, body = shop.ask("GET", "/x")
    assert (status, fields["content-type"], fields["retry-after"]) == (503, "application/problem+json", "60")
    assert '"detail": "Sp\\u00e4ter, in 60 s"' in body and '"violated-policies": ["api"]' in body
    assert not [name for name in shop.ask("GET", "/quiet")[1] if "ratelimit" in name]
    assert "x-ratelimit-challenge" not in shop.ask("GET", "/robots")[1]
    assert shop.ask("GET", "/robots")[1]["x-ratelimit-challenge"] == "required"
    assert "x-ratelimit-shadow" not in shop.ask("GET", "/tried")[1]
    assert shop.ask("GET", "/tried")[1]["x-ratelimit-shadow"] == "denied"


def test_a_body_in_many_pieces_is_replayed_piece_by_piece(clock: ManualClock, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text('policies: [{name: a, rules: 9/minute, by: "form:a"}]\n')
    got: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(4):
            got.append(await receive())

    async def ask() -> None:
        pieces = [b"a=", b"1", b""]
        messages = [{"type": "http.request", "body": piece, "more_body": piece != b""} for piece in pieces]
        messages.append({"type": "http.disconnect"})
        sent = iter(messages)

        async def receive() -> Any:
            return next(sent)

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": "/", "client": ("192.0.2.1", 1),
                 "headers": [(b"content-type", b"application/x-www-form-urlencoded")]}  # fmt: skip
        gate = Gate(path, store=f"memory://rules-faces-{next(numbers)}", clock=clock)
        await TidegateMiddleware(application, gate=gate)(scope, receive, send)
        assert got == messages

    asyncio.run(ask())


def test_a_dependency_counts_by_a_form_that_fastapi_has_read(clock: ManualClock) -> None:
    app = FastAPI()
    install(app)
    limit = rate_limit("2/minute", by=["ip", "form:account"], name="login", clock=clock,
                       store=f"memory://rules-faces-{next(numbers)}")  # fmt: skip

    @app.post("/login", dependencies=[Depends(limit)])
    async def login(account: str = Form()) -> str:
        return account

    @app.post("/raw", dependencies=[Depends(limit)])
    async def raw(request: Request) -> str:
        return (await request.body()).decode()

    client = TestClient(app)
    assert client.post("/login", data={"account": "ann"}).json() == "ann"
    assert client.post("/raw", data={"account": "ann"}).json() == "account=ann"
    assert client.post("/login", data={"account": "ann"}).status_code == 429


def test_a_flask_view_counts_by_its_form(clock: ManualClock) -> None:
    app = Flask(__name__)
    limit = flask_rate_limit("1/minute", by=["form:account"], clock=clock, store=f"memory://rules-faces-{next(numbers)}")

    @app.post("/login")
    @limit
    def login() -> str:
        return flask_request.form["account"]

    client = app.test_client()
    assert client.post("/login", data={"account": "ann"}).get_data(as_text=True) == "ann"
    assert client.post("/login", data={"account": "ann"}).status_code == 429
    assert client.post("/login", data={"account": "bob"}).status_code == 200


# ---- reload


def test_reloads_between_threads_lose_no_count(tmp_path: Path) -> None:
    """As workers of a WSGI server do: threads that judge, and the rules changing under them."""
    path = tmp_path / "rules.yaml"
    path.write_text("policies: [{name: a, rules: 100000/day sliding_log resolution 60s}]\n")
    gate = Gate(path, store=f"memory://rules-faces-{next(numbers)}")
    over = threading.Event()
    passed = [0, 0, 0]
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}

    def judge(number: int) -> None:
        while not over.is_set():
            passed[number] += gate.judge_wsgi(environ).outcome == "allowed"

    threads = [threading.Thread(target=judge, args=(number,)) for number in range(len(passed))]
    for thread in threads:
        thread.start()
    for number in range(50):
        limit = (100_000, 90_000, 3)[number % 3]
        path.write_text(f"policies: [{{name: a, rules: {limit}/day sliding_log resolution 60s}}]\n")
        gate.reload()
        time.sleep(0.002)
    over.set()
    for thread in threads:
        thread.join()
    path.write_text("policies: [{name: a, rules: 10000000/day sliding_log resolution 60s}]\n")
    gate.reload()
    decision = gate.judge_wsgi(environ).decision
    assert decision.remaining == 10_000_000 - sum(passed) - 1
    assert gate.generation == 52


# ---- pause_when


def test_a_route_that_fails_refuses_nobody_until_it_works_again(site: Callable[..., Site], clock: ManualClock) -> None:
    shop = site("policies: [{name: a, rules: 4/hour, pause_when: error_rate > 50% over 1m min 4}]\n")
    for _ in range(4):
        assert shop.ask("GET", "/?status=503")[0] == 503
    handled = len(shop.seen)
    status, fields, _ = shop.ask("GET", "/?status=raise")  # the limit is used up
    assert (status, len(shop.seen), "x-ratelimit-limit" in fields) == (500, handled + 1, False)
    for _ in range(5):
        assert shop.ask("GET", "/?status=200")[0] == 200
    assert shop.ask("GET", "/?status=200")[0] == 429  # five of ten
    for _ in range(3):
        assert shop.ask("GET", "/?status=200")[0] == 429  # a refusal of ours is no answer of the application
    clock.advance(61)
    assert shop.ask("GET", "/?status=200")[0] == 429
