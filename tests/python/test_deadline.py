"""One request waits for its stores no longer than one deadline, however often it has to ask: real servers that are slow, or
stop between two questions."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from fastapi import Depends, FastAPI

from tidegate import Gate, Limiter, StoreError
from tidegate.fastapi import install, rate_limit

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from detour import Detour, detour
from server import Lateness, Server, free_port, server

DEADLINE = 0.3  # where nothing is said it is 0.05, of which a busy machine leaves too little to answer the first question in
# Enforced ones are one question to the store, those that are not another for each kind: three in all.
RULES = """\
policies:
  - {name: enforced, rules: 1000000/hour, by: ip}
  - {name: challenged, mode: challenge, also: true, rules: 1000000/hour, by: ip}
  - {name: shadowed, mode: shadow, also: true, rules: 1000000/hour, by: ip}
"""
SETTLED = """\
policies:
  - {name: paid, rules: 1000000/hour; 2000000/day; 3000000/week, by: ip, cost: {response_header: X-Cost, reserve: 1, max: 100}}
"""
ENVIRON = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}
SCOPE = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "client": ("192.0.2.1", 1)}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def redis() -> Iterator[Server]:
    with server(port=free_port()) as one:
        yield one


@pytest.fixture
def way(redis: Server) -> Iterator[Detour]:
    with detour(redis) as one:
        yield one


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


def gate_on(folder: Path, store: str, rules: str = RULES) -> Gate:
    (folder / "rules.yaml").write_text(rules)
    return Gate(str(folder / "rules.yaml"), store=store)


def prompt(way: Detour) -> str:
    return f"{way.uri}?timeout_ms={DEADLINE * 1000:.0f}"


def busy(late: Lateness) -> bool:
    """The machine was too late itself for a first answer within the deadline."""
    return late.worst > 0.02 or late.kept(DEADLINE) > 0.02


def stops_after_the_first(way: Detour) -> None:
    """From the next decision on: each answer comes late, and the server stands still once it has given one."""
    way.delay = 0.6 * DEADLINE
    way.decisions = 0
    way.answered = lambda count: way.to.signal(signal.SIGSTOP)


def test_a_judgement_of_three_questions_waits_one_deadline_for_a_redis_that_stops_after_the_first(
    tmp_path: Path, way: Detour
) -> None:
    gate = gate_on(tmp_path, prompt(way))
    assert gate.judge_wsgi(ENVIRON).outcome == "allowed"
    assert way.decisions == 3
    stops_after_the_first(way)
    with Lateness() as late:
        began = time.monotonic()
        judgement = gate.judge_wsgi(ENVIRON)
        took = time.monotonic() - began
        assert late.allows(took, DEADLINE + 0.01), took
    assert judgement.outcome == "allowed" and (not judgement.decision.degraded or busy(late))
    assert way.decisions == 1
    assert took > 0.9 * DEADLINE, "the second question had what was left"


def test_an_awaited_judgement_of_three_questions_waits_one_deadline_for_a_redis_that_stops_after_the_first(
    tmp_path: Path, way: Detour, run: Run
) -> None:
    gate = gate_on(tmp_path, prompt(way))

    async def main() -> None:
        assert (await gate.judge_asgi_async(SCOPE)).outcome == "allowed"
        assert way.decisions == 3
        stops_after_the_first(way)
        with Lateness() as late:
            began = time.monotonic()
            judgement = await gate.judge_asgi_async(SCOPE)
            took = time.monotonic() - began
            assert await asyncio.to_thread(late.allows, took, DEADLINE + 0.01), took
        assert judgement.outcome == "allowed" and (not judgement.decision.degraded or busy(late))
        assert took > 0.9 * DEADLINE, "the second question had what was left"

    run(main())


def test_what_is_left_of_a_deadline_is_enough_for_a_redis_that_is_only_slow(tmp_path: Path, way: Detour) -> None:
    gate = gate_on(tmp_path, prompt(way))
    gate.judge_wsgi(ENVIRON)
    way.decisions = 0
    way.delay = 0.24 * DEADLINE
    with Lateness() as late:
        gate.judge_wsgi(ENVIRON)
        assert way.decisions == 3 or busy(late)
    way.delay = 0.0
    time.sleep(DEADLINE)
    assert gate.judge_wsgi(ENVIRON).decision.remaining < 1_000_000


def test_a_loop_that_is_held_up_by_others_takes_nothing_from_the_questions_that_follow(
    tmp_path: Path, way: Detour, run: Run
) -> None:
    gate = gate_on(tmp_path, prompt(way))

    async def main() -> None:
        await gate.judge_asgi_async(SCOPE)
        way.decisions = 0
        judging = asyncio.ensure_future(gate.judge_asgi_async(SCOPE))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(2.4 * DEADLINE)  # somebody's handler; the answer lies there meanwhile
        await judging
        assert way.decisions == 3

    run(main())


def app_on(stores: list[str]) -> FastAPI:
    app = FastAPI()
    install(app)
    asked = [
        Depends(rate_limit("1000000/hour", name=f"limit-{number}", by="header:x-who", store=store))
        for number, store in enumerate(stores)
    ]

    @app.get("/", dependencies=asked)
    async def root() -> str:
        return "ok"

    return app


@pytest.mark.fault("R136")
def test_a_request_that_asks_several_servers_waits_one_deadline_for_all_of_them(run: Run) -> None:
    with server(port=free_port()) as one, server(port=free_port()) as two, server(port=free_port()) as three:
        with detour(one) as first, detour(two) as second, detour(three) as third:
            app = app_on([prompt(first), prompt(second), prompt(third)])

            async def main() -> None:
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://a", timeout=20) as client:
                    for _ in range(3):
                        assert (await client.get("/", headers={"x-who": "a"})).status_code == 200
                    for way in (first, second, third):
                        way.delay = 0.8 * DEADLINE
                    before = third.decisions
                    with Lateness() as late:
                        began = time.monotonic()
                        answer = await client.get("/", headers={"x-who": "a"})
                        took = time.monotonic() - began
                        # With the request's own work.
                        assert await asyncio.to_thread(late.allows, took, DEADLINE + 0.02), took
                    assert answer.status_code == 200
                    assert third.decisions == before, "nothing was left for the third"

            run(main())


def test_a_settlement_of_several_questions_waits_one_deadline(tmp_path: Path, way: Detour) -> None:
    gate = gate_on(tmp_path, prompt(way), SETTLED)
    judgement = gate.judge_wsgi(ENVIRON)
    assert way.decisions == 1
    stops_after_the_first(way)
    with Lateness() as late:
        began = time.monotonic()
        with pytest.raises(StoreError):
            judgement.settle(200, [("X-Cost", "5")])
        took = time.monotonic() - began
        assert late.allows(took, DEADLINE + 0.01), took
    assert way.decisions == 1 and took > 0.9 * DEADLINE


def test_a_question_that_has_little_of_a_deadline_left_does_not_open_the_breaker_for_the_others(
    tmp_path: Path, way: Detour
) -> None:
    gate = gate_on(tmp_path, prompt(way))
    limiter = Limiter("1000000/hour", name="other", store=prompt(way))

    async def main() -> None:
        await gate.judge_asgi_async(SCOPE)
        with Lateness() as late:
            way.delay = 0.7 * DEADLINE  # the first question is answered, the second is not in the rest
            judgements = await asyncio.gather(*[gate.judge_asgi_async(SCOPE) for _ in range(8)])
            way.delay = 0.0
            assert not any(judgement.decision.degraded for judgement in judgements) or busy(late)
            await asyncio.sleep(DEADLINE)
            assert not (await limiter.hit_async("a")).degraded or busy(late)

    asyncio.run(main())


def test_a_timer_that_comes_a_little_early_is_not_the_last_one(redis: Server, run: Run) -> None:
    """uvloop counts whole milliseconds, so a timer may come before what it was set for: the second call of each pair has one
    that was set in the middle of a millisecond."""
    limiters = [Limiter("1000000/hour", store=f"{redis.uri}?timeout_ms={50 + number}") for number in range(16)]

    async def main() -> None:
        for limiter in limiters:
            while (await limiter.hit_async("a")).degraded:
                await asyncio.sleep(0.02)
        redis.signal(signal.SIGSTOP)
        calls = [limiter.hit_async("a") for limiter in limiters]
        for number, limiter in enumerate(limiters):
            time.sleep(0.00037 if number % 2 else 0.00071)
            calls.append(limiter.hit_async("a"))
        decisions = await asyncio.wait_for(asyncio.gather(*calls), 5)
        assert all(decision.degraded for decision in decisions)

    run(main())
