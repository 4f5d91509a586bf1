"""What an application answers when it has asked a limiter itself and been refused: as every face would."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from fastapi import Depends, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from tidegate import Decision, Limiter, ManualClock, Reservation, fastapi, flask, refusal
from tidegate._core import judge_wsgi
from tidegate.wsgi import TidegateMiddleware
from werkzeug.exceptions import TooManyRequests
from werkzeug.test import Client

Told = tuple[int, dict[str, str], bytes]


class Tokens:
    """A limiter that is asked for 8 of 10 units by each request: the second is refused."""

    def __init__(self, rules: str = "10/minute token_bucket", **settings: Any) -> None:
        self.clock = settings.pop("clock", None) or ManualClock()
        settings.setdefault("store", f"memory://refusals-{uuid.uuid4().hex}")
        if settings["store"].startswith("memory:"):
            settings["clock"] = self.clock
        self.limiter = Limiter(rules, by="ip", **settings)

    def reserve(self) -> Reservation:
        return self.limiter.reserve(dims={"ip": "203.0.113.9"}, cost=8)

    def hit(self) -> Decision:
        return self.limiter.hit(dims={"ip": "203.0.113.9"}, cost=8)


def environ() -> dict[str, Any]:
    made: dict[str, Any] = {"REMOTE_ADDR": "203.0.113.9"}
    setup_testing_defaults(made)
    return made


@pytest.fixture
def expected() -> Told:
    """What any face tells a client of a limit in that state."""
    limiter = Tokens().limiter
    assert judge_wsgi([limiter], environ(), cost=8).status == 0
    judgement = judge_wsgi([limiter], environ(), cost=8)
    return judgement.status, dict(judgement.fields_text), judgement.body


class Browser(Client):
    def open(self, *args: Any, **kwargs: Any) -> Any:
        return super().open(*args, environ_overrides={"REMOTE_ADDR": "203.0.113.9"}, **kwargs)


# ---- one application of each kind; the first request is let through ----


def on_fastapi(tokens: Tokens, *, installed: bool, mounted: bool = False) -> TestClient:
    app = outer = FastAPI()
    if mounted:
        outer = FastAPI()
        outer.mount("", app)
    if installed:
        fastapi.install(outer)

    @app.get("/")
    async def root(request: Request) -> str:
        async with tokens.reserve() as reservation:
            if not reservation:
                raise fastapi.RateLimited(reservation.decision, None if installed and not mounted else request)
            return "answer"

    return TestClient(outer, raise_server_exceptions=False)


def on_starlette(tokens: Tokens) -> TestClient:
    async def root(request: Request) -> PlainTextResponse:
        async with tokens.reserve() as reservation:
            if not reservation:
                raise fastapi.RateLimited(reservation.decision, request)
            return PlainTextResponse("answer")

    return TestClient(Starlette(routes=[Route("/", root)]), raise_server_exceptions=False)


def on_flask(tokens: Tokens, around: Callable[[Any], Any] = lambda app: app) -> Browser:
    app = Flask("shop")

    @app.get("/")
    def root() -> str:
        with tokens.reserve() as reservation:
            if not reservation:
                raise flask.RateLimited(reservation.decision)
            return "answer"

    return Browser(around(app.wsgi_app))


def on_wsgi(tokens: Tokens) -> Browser:
    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        with tokens.reserve() as reservation:
            if not reservation:
                answer = refusal(reservation.decision)
                start_response(f"{answer.status} Too Many Requests", answer.fields_text)
                return [answer.body]
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [b"answer"]

    return Browser(application)


def limited(app: Any) -> TidegateMiddleware:
    return TidegateMiddleware(app, limiter=Limiter("9/minute", by="ip", store=f"memory://refusals-{uuid.uuid4().hex}"))


APPLICATIONS: dict[str, Callable[[Tokens], Any]] = {
    "FastAPI": lambda tokens: on_fastapi(tokens, installed=True),
    "FastAPI without install": lambda tokens: on_fastapi(tokens, installed=False),
    "FastAPI, mounted": lambda tokens: on_fastapi(tokens, installed=True, mounted=True),
    "FastAPI, mounted, without install": lambda tokens: on_fastapi(tokens, installed=False, mounted=True),
    "Starlette": on_starlette,
    "Flask": on_flask,
    "Flask under the WSGI middleware": lambda tokens: on_flask(tokens, limited),
    "WSGI": on_wsgi,
}


def told_by(answer: Any) -> Told:
    """Status, the fields that tidegate sets, body; of httpx and of werkzeug."""
    names = ["Cache-Control", "Content-Type", "Retry-After"]
    names += [f"X-RateLimit-{name}" for name in ("Limit", "Remaining", "Reset")]
    every = [name.lower() for name, _ in getattr(answer.headers, "multi_items", answer.headers.items)()]
    assert all(every.count(name.lower()) <= 1 for name in names), "no field stands twice"
    body = answer.content if hasattr(answer, "content") else answer.data
    return answer.status_code, {name: answer.headers[name] for name in names if name in answer.headers}, body


@pytest.mark.parametrize("kind", APPLICATIONS)
def test_a_refused_reservation_is_answered_as_a_limit_of_that_state_answers(kind: str, expected: Told) -> None:
    client = APPLICATIONS[kind](Tokens())
    assert expected[0] == 429 and "Retry-After" in expected[1]
    assert client.get("/").status_code == 200
    assert told_by(client.get("/")) == expected


@pytest.mark.parametrize("kind", APPLICATIONS)
def test_a_reservation_that_can_never_fit_has_no_retry_after_and_one_that_is_denied_is_a_403(kind: str) -> None:
    status, fields, body = told_by(APPLICATIONS[kind](Tokens("5/minute")).get("/"))
    assert status == 429 and "Retry-After" not in fields and json.loads(body)["retry_after"] is None
    status, _, body = told_by(APPLICATIONS[kind](Tokens("deny")).get("/"))
    assert status == 403 and json.loads(body)["code"] == "FORBIDDEN"


@pytest.fixture
def nobody() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("kind", APPLICATIONS)
def test_a_silent_store_under_a_closed_policy_is_a_503_that_says_when_to_come_back(kind: str, nobody: str) -> None:
    tokens = Tokens(store=nobody, on_store_failure="closed", timeout=0.01)
    status, fields, body = told_by(APPLICATIONS[kind](tokens).get("/"))
    assert status == 503 and json.loads(body)["code"] == "UNAVAILABLE" and fields["Retry-After"] == "1"
    assert "X-RateLimit-Remaining" not in fields


# ---- what the pages show ----


def shown_on(page: str, word: str) -> str:
    """The one example of a page that holds this word."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text()
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in block]
    return found


def test_the_tokens_of_a_model_are_limited_as_the_page_for_fastapi_shows() -> None:
    app = FastAPI()
    fastapi.install(app)
    tokens = Limiter("10000/minute token_bucket", store=f"memory://refusals-{uuid.uuid4().hex}", clock=ManualClock())

    class Answer:
        text, tokens = "forty-two", 3000

    async def ask_model(prompt: str) -> Answer:
        return Answer()

    names = {"app": app, "tokens": tokens, "ask_model": ask_model, "RateLimited": fastapi.RateLimited}
    exec(shown_on("fastapi.md", "tokens.reserve"), names)
    client = TestClient(app)
    answers = [client.post("/ask?prompt=why") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[0].json() == {"answer": "forty-two"}
    assert answers[3].headers["Retry-After"] == "18", "9000 are used, 4000 wanted, 10000 flow in a minute"


def test_django_answers_as_the_page_for_python_shows(expected: Told) -> None:
    program = f"""
from django.conf import settings
settings.configure()
{shown_on("python.md", "django")}
from tidegate import Limiter, ManualClock
limiter = Limiter("10/minute token_bucket", store="memory://", clock=ManualClock())
limiter.hit("somebody", cost=8)
answer = refused(limiter.hit("somebody", cost=8))
print((answer.status_code, dict(answer.items()), answer.content))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ast.literal_eval(done.stdout) == expected


# ---- beside the limits of the request ----


def test_the_fields_are_the_refusals_and_what_limits_took_for_the_request_stays_taken(expected: Told) -> None:
    tokens, store, clock = Tokens(), f"memory://refusals-{uuid.uuid4().hex}", ManualClock()
    requests = fastapi.rate_limit("2/minute", name="requests", store=store, clock=clock)
    app = FastAPI()
    fastapi.install(app)

    @app.get("/", dependencies=[Depends(requests)])
    async def root() -> str:
        async with tokens.reserve() as reservation:
            if not reservation:
                raise fastapi.RateLimited(reservation.decision)
            return "answer"

    client = TestClient(app)
    assert client.get("/").headers["X-RateLimit-Limit"] == "2"
    assert told_by(client.get("/")) == expected, "though the other limit has less left"
    third = client.get("/")
    assert third.status_code == 429 and third.headers["X-RateLimit-Limit"] == "2", "the second request counts"


def test_in_flask_too_and_answers_that_count_by_their_status_are_told_of_the_refusal(expected: Told) -> None:
    tokens, store = Tokens(), f"memory://refusals-{uuid.uuid4().hex}"
    asked: list[int] = []

    def is_refused(response: Any) -> bool:
        asked.append(response.status_code)
        return bool(response.status_code == 429)

    requests = flask.rate_limit("2/minute", name="requests", store=store, clock=ManualClock(), charge_when=is_refused)
    app = Flask("shop")

    @app.get("/")
    @requests
    def root() -> str:
        with tokens.reserve() as reservation:
            if not reservation:
                raise flask.RateLimited(reservation.decision)
            return "answer"

    client = Browser(app.wsgi_app)
    assert client.get("/").status_code == 200
    assert told_by(client.get("/")) == expected
    assert asked == [200, 429]
    assert requests.limiter.peek(dims={"ip": "203.0.113.9"}).remaining == 1


@pytest.mark.parametrize("handled", [fastapi.RateLimited, 429])
@pytest.mark.parametrize("installed", [True, False])
def test_a_fastapi_handler_of_ones_own_gets_the_decision_and_the_fields_reach_the_client(
    handled: Any, installed: bool, expected: Told
) -> None:
    tokens = Tokens()
    app = FastAPI()
    if installed:
        fastapi.install(app)

    @app.exception_handler(handled)
    async def handler(request: Request, error: fastapi.RateLimited) -> JSONResponse:
        fields = None if installed else error.headers
        return JSONResponse({"wait": error.decision.retry_after}, error.status_code, fields)

    @app.get("/")
    async def root(request: Request) -> str:
        decision = tokens.hit()
        if not decision:
            raise fastapi.RateLimited(decision, request)
        return "answer"

    client = TestClient(app)
    assert client.get("/").status_code == 200
    status, fields, body = told_by(client.get("/"))
    assert (status, fields) == expected[:2]
    assert json.loads(body) == {"wait": 36.0}


@pytest.mark.parametrize("handled", [429, TooManyRequests, flask.RateLimited])
def test_a_flask_handler_of_ones_own_gets_the_decision_and_the_fields_reach_the_client(
    handled: Any, expected: Told
) -> None:
    tokens = Tokens()
    app = Flask("shop")

    @app.errorhandler(handled)
    def handler(error: flask.RateLimited) -> tuple[dict[str, float], int]:
        return {"wait": error.decision.retry_after}, 429

    @app.get("/")
    def root() -> str:
        decision = tokens.hit()
        if not decision:
            raise flask.RateLimited(decision)
        return "answer"

    client = Browser(app.wsgi_app)
    assert client.get("/").status_code == 200
    status, fields, body = told_by(client.get("/"))
    assert (status, fields) == expected[:2]
    assert json.loads(body) == {"wait": 36.0}


@pytest.mark.parametrize("given", [True, False])
def test_a_websocket_is_refused_before_it_is_accepted_and_closed_after(given: bool) -> None:
    tokens = Tokens()
    app = FastAPI()
    fastapi.install(app)

    @app.websocket("/{accepts}")
    async def endpoint(socket: WebSocket, accepts: bool) -> None:
        if accepts:
            await socket.accept()
        async with tokens.reserve() as reservation:
            if not reservation:
                raise fastapi.RateLimited(reservation.decision, socket if given else None)
        await socket.close()

    assert tokens.hit()
    client = TestClient(app)
    with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/true") as session:
        session.receive_text()
    assert (closed.value.code, closed.value.reason) == (1008, "refused, retry after 36 s")
    with pytest.raises(Exception) as denied, client.websocket_connect("/false"):
        pass
    assert getattr(denied.value, "status_code", None) == 429, denied.value


# ---- the answer by itself ----


@pytest.mark.parametrize("raising", [refusal, fastapi.RateLimited, flask.RateLimited])
def test_what_lets_through_is_no_refusal(raising: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="refuses, and this one allows"):
        raising(Tokens().hit())
    if raising is not refusal:
        with pytest.raises(ValueError, match="lets it through"):
            raising(judge_wsgi([Tokens().limiter], environ()))


def test_a_refusal_is_made_of_a_decision_alone() -> None:
    for other in (None, True, 429, Tokens().limiter, judge_wsgi([Tokens().limiter], environ())):
        with pytest.raises(TypeError, match="takes a Decision"):
            refusal(other)  # type: ignore[arg-type]


def test_a_refusal_names_its_limiter_and_has_the_numbers_of_the_decision(expected: Told) -> None:
    tokens = Tokens(name="tokens")
    tokens.hit()
    decision = tokens.hit()
    answer = refusal(decision)
    assert (answer.status, dict(answer.fields_text), answer.body) == expected
    assert (answer.outcome, answer.policy, bool(answer)) == ("denied", "tokens", False)
    assert answer.decision.retry_after_us == decision.retry_after_us == 36_000_000
    assert {name.decode().lower(): value.decode() for name, value in answer.fields} == {
        name.lower(): value for name, value in expected[1].items()
    }


def test_the_exception_of_flask_outside_of_a_request_is_that_of_its_status() -> None:
    tokens = Tokens()
    tokens.hit()
    error = flask.RateLimited(tokens.hit())
    assert isinstance(error, TooManyRequests) and error.code == 429

    class Own(flask.RateLimited):
        pass

    assert type(Own(tokens.hit())) is Own
