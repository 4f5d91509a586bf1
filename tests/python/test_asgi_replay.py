"""A log replayed through the middleware with the log's times: each decision is the reference's.

The log, its rules and the reference's answers are those of tests/fcgi/test_replay.py, which asks the same of nginx
and the daemon. `TIDEGATE_ACCESS_LOG` names a real log in the combined format to replay that too. """

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tidegate import ManualClock
from tidegate.asgi import TidegateMiddleware

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "fcgi"), str(TESTS / "reference")]

from model import Table  # type: ignore[import-not-found]  # noqa: E402
from test_replay import (  # type: ignore[import-not-found]  # noqa: E402
    EXPECTED,
    LOGS,
    RULES,
    made_up_log,
    policies_of,
    real_log,
    whole_seconds,
)

del sys.path[:2]


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def ask(app: TidegateMiddleware, client: str, method: str, target: str) -> tuple[int, dict[bytes, bytes]]:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("no body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = target.partition("?")
    scope = {
        "type": "http", "method": method, "path": unquote(path, errors="replace"), "raw_path": path.encode(),
        "query_string": query.encode(), "headers": [(b"x-forwarded-for", client.encode())],
        "client": ("127.0.0.1", 40000),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize("log", LOGS)
def test_a_log_replayed_through_the_middleware_gives_the_decisions_of_the_reference(tmp_path: Path, log: str) -> None:
    entries = real_log(log) if log else made_up_log()
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    clock = ManualClock()
    app = TidegateMiddleware(ok, config=str(rules), store=f"memory://{uuid.uuid4().hex}", clock=clock)
    table = Table()

    async def replay() -> int:
        refused = 0
        for number, (now_us, client, method, target) in enumerate(entries):
            clock.now_us = now_us
            status, fields = await ask(app, client, method, target)
            policies = policies_of(target)
            targets = [(rule, (policy, client)) for policy in policies for rule in EXPECTED[policy]]
            decision, _ = table.hit(targets, now_us)
            expected = {
                b"x-ratelimit-limit": targets[decision.reported][0].limit,
                b"x-ratelimit-remaining": decision.remaining,
                b"x-ratelimit-reset": whole_seconds(decision.reset_after_us),
            }
            if not decision.allowed:
                expected[b"retry-after"] = max(1, whole_seconds(decision.retry_after_us or 0))
            got = {name: int(value) for name, value in fields.items() if name in {*expected, b"retry-after"}}
            where = f"entry {number}: {now_us} {client} {method} {target} ({policies})"
            assert (status, got) == (200 if decision.allowed else 429, expected), where
            refused += not decision.allowed
        return refused

    refused = asyncio.run(replay())
    assert 0.02 * len(entries) < refused < 0.9 * len(entries)
