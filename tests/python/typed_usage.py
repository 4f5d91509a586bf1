"""Code as readers would write it, for strict type checkers; it is never run. Each public part is used once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, assert_type

import httpx
import requests
from fastapi import Depends, FastAPI, Header, WebSocket
from flask import Blueprint, Flask
from starlette.requests import HTTPConnection

import tidegate.asgi
import tidegate.limits_storage
import tidegate.wsgi
from tidegate import Decision, Explanation, Gate, Limiter, ManualClock, explain, refusal
from tidegate.client import WaitTimeout, limited
from tidegate.fastapi import MessageLimit, RateLimit, RateLimited, install, message_limit, rate_limit, user_rate_limit
from tidegate.flask import Tidegate
from tidegate.flask import rate_limit as flask_limit
from tidegate.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.requests import RateLimitAdapter

# ---- FastAPI ----

app = FastAPI()
assert_type(install(app, config="rules.yaml"), Gate | None)
searches = rate_limit("10/second; 1000/hour", by=["ip", "header:X-Api-Key"])
assert_type(searches, RateLimit)


def tenant(conn: HTTPConnection) -> str | None:
    return conn.headers.get("X-Tenant")


def cost_of(conn: HTTPConnection) -> int:
    return int(conn.headers.get("X-Cost", 1))


async def plan(x_plan: Annotated[str, Header()] = "free") -> str:
    return "5/minute" if x_plan == "free" else "50/minute"


def failed(response: Any) -> bool:
    return bool(response.status_code == 401)


@app.get("/search", dependencies=[Depends(searches)])
async def search(decision: Annotated[Decision, Depends(rate_limit(plan, by=tenant, cost=cost_of))]) -> int:
    return decision.remaining


@app.get("/health")
@searches.exempt
def health() -> str:
    return "ok"


@app.post("/login", dependencies=[Depends(user_rate_limit(limit=5, window_seconds=60, charge_when=failed))])
async def login() -> str:
    return "welcome"


messages = message_limit("5 per 10 seconds", close_code=1013)
assert_type(messages, MessageLimit)


@app.websocket("/ws", dependencies=[Depends(messages)])
async def ws(socket: WebSocket) -> None:
    await socket.accept()


@app.exception_handler(RateLimited)
async def refused(request: Any, error: RateLimited) -> Any:
    assert_type(error.decision, Decision)
    return None


async def refuses_itself(limiter: Limiter, socket: WebSocket) -> None:
    async with limiter.reserve("u", cost=4000) as reservation:
        if not reservation:
            raise RateLimited(reservation.decision)
    if not (decision := limiter.hit("u")):
        assert_type(refusal(decision).body, bytes)
        raise RateLimited(refusal(decision), socket)


# ---- Flask, WSGI, ASGI ----

site = Flask(__name__)
gate = Tidegate(site, default="100/minute", limits={"security.login": "6/hour"}, charge_when=lambda answer: answer.status_code == 401)


@site.post("/login")
@flask_limit("5/minute", by=["ip", lambda: "tenant"], cost=lambda: 2)
def flask_login() -> str:
    return "welcome"


assert_type(flask_login(), str)


@gate.exempt
def flask_health() -> str:
    return "ok"


admins = flask_limit("5/minute", name="admin")
assert_type(admins(Blueprint("admin", __name__)), Blueprint)


@admins.exempt
def ping() -> str:
    return "ok"


def bare(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    return []


wsgi = tidegate.wsgi.TidegateMiddleware(bare, limiter=Limiter("100/minute", by="ip"), charge_when=failed)
asgi = tidegate.asgi.TidegateMiddleware(app, limiter=[Limiter("100/minute", by="ip")])

# ---- those who call ----

limiter = Limiter("10/second leaky_bucket", name="api", clock=ManualClock())


@limited(limiter, timeout=5, refund_on=(ConnectionError,))
def ask(word: str) -> int:
    return len(word)


def host_of(host: str) -> str:
    return host


@limited(limiter, key=host_of)
async def ask_async(host: str) -> int:
    return len(host)


assert_type(ask("a"), int)


async def main() -> None:
    assert_type(await ask_async("a"), int)
    try:
        async with limited(limiter, "a") as decision:
            assert_type(decision, Decision)
    except WaitTimeout as error:
        assert_type(error.decision, Decision | None)
    async with httpx.AsyncClient(transport=AsyncRateLimitTransport(limiter, obey_server=True, retries=2)) as client:
        await client.get("https://api.example.com")


httpx.Client(transport=RateLimitTransport(limiter, timeout=1.5))
requests.Session().mount("https://", RateLimitAdapter(limiter, pool_connections=4))
assert_type(explain("GET /", config="rules.yaml"), Explanation)
tidegate.limits_storage.TidegateStorage("tidegate+memory://")
