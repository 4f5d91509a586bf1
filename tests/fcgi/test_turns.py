"""Leaky buckets let through one by one: an allowed request waits for its turn on the loop, and policies by name."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from application import Application
from client import ABORT, AUTHORIZER, Connection, Request, ask, record
from fcgi_daemon import Daemon, wait_for

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Lateness, server  # noqa: E402

RULES = """\
policies:
  - {name: turns, match: {path: "/echo*"}, rules: 10/second burst 8 leaky_bucket, by: "header:x-case"}
  - {name: leaves, match: {path: "/status/*"}, rules: 1/second burst 8 leaky_bucket}
  - {name: slow, match: {path: /slow}, rules: 2/minute burst 5 leaky_bucket}
  - {name: rest, rules: 1000000/hour}
"""


@pytest.fixture(scope="module", params=["plain", "asan"])
def program(request: pytest.FixtureRequest, make: Callable[..., None], build: Path) -> Path:
    make("programs", request.param)
    return (build if request.param == "plain" else build / request.param) / "bin" / "tidegate-fcgi"


@pytest.fixture
def application(folder: Path) -> Iterator[Application]:
    made = Application(f"unix:{folder}/app")
    yield made
    made.stop()


@pytest.fixture(params=["table", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "table":
        yield "memory://"
    else:
        with server() as one:
            yield one.patient


@pytest.fixture
def holder(start: Callable[..., Daemon], folder: Path, store: str) -> Daemon:
    return start(RULES, "--store", store, listen=f"unix:{folder}/h,hold=3")


def turn(case: str = "a", **more: object) -> Request:
    return Request(uri="/echo", headers=[("X-Case", case)], **more)  # type: ignore[arg-type]


def test_allowed_requests_go_one_by_one_and_others_do_not_wait_for_them(holder: Daemon) -> None:
    mode = [("TIDEGATE_MODE", "auth")]
    with Connection(holder.address) as connection, Lateness() as late:
        began = time.monotonic()
        connection.send(b"".join(turn(extra=mode).encode(number) for number in range(1, 6)))
        times = []
        for number in range(1, 6):
            assert connection.answer(number).status == 204
            times.append(time.monotonic() - began)
        assert all(0.1 * at - 0.02 < took and late.allows(took, 0.1 * at + 0.15) for at, took in enumerate(times)), times
        began = time.monotonic()
        connection.send(turn(extra=mode).encode(1) + turn("b", extra=mode).encode(2) + Request(uri="/x").encode(3))
        assert (connection.answer(2).status, connection.answer(3).status) == (204, 200)
        assert late.allows(time.monotonic() - began, 0.09)
        assert connection.answer(1).status == 204


def test_over_the_burst_is_refused_at_once(holder: Daemon) -> None:
    with Connection(holder.address) as connection, Lateness() as late:
        connection.send(b"".join(turn("full", extra=[("TIDEGATE_MODE", "auth")]).encode(n) for n in range(1, 10)))
        began = time.monotonic()
        assert connection.answer(9).status == 403
        assert late.allows(time.monotonic() - began, 0.3)


def test_an_authorizer_waits_and_who_asks_for_json_is_told(holder: Daemon) -> None:
    began = time.monotonic()
    ask(holder.address, turn("json", keep=False))
    told = json.loads(ask(holder.address, turn("json", keep=False)).body)
    assert 0.09 - (time.monotonic() - began) < told["delay"] <= 0.1
    assert ask(holder.address, turn("json", keep=False, role=AUTHORIZER)).status == 200
    assert time.monotonic() - began > 0.19


def test_a_request_that_leaves_before_its_turn_gives_its_place_back(holder: Daemon) -> None:
    mode = [("TIDEGATE_MODE", "auth")]
    for way in ("hangs up", "aborts"):
        with Connection(holder.address) as connection:
            connection.send(b"".join(turn(way, extra=mode).encode(number) for number in range(1, 8)))
            assert connection.answer(1).status == 204
            if way == "aborts":
                connection.send(b"".join(record(ABORT, number) for number in range(2, 8)))
                for number in range(2, 8):
                    connection.answer(number)
        peek = {"TIDEGATE_POLICY": "turns", "TIDEGATE_KEY": f"header:x-case={way}", "TIDEGATE_PEEK": "1"}
        wait_for(lambda peek=peek: json.loads(ask(holder.address, set=peek).body)["delay"] < 0.1)  # type: ignore[misc]


def test_a_turn_later_than_hold_goes_on_then(start: Callable[..., Daemon], folder: Path) -> None:
    daemon = start("store: memory://\n" + RULES, listen=f"unix:{folder}/h,hold=0.2")
    request = {"uri": "/slow", "set": {"TIDEGATE_MODE": "auth"}}
    assert ask(daemon.address, **request).status == 204
    with Lateness() as late:
        began = time.monotonic()
        assert ask(daemon.address, **request).status == 204
        took = time.monotonic() - began
        assert 0.15 < took and late.allows(took, 0.6)
    assert daemon.lines("held-too-short")


def test_without_hold_a_turn_is_told_and_not_waited_for(start: Callable[..., Daemon]) -> None:
    daemon = start("store: memory://\n" + RULES)
    with Lateness() as late:
        began = time.monotonic()
        for _ in range(3):
            assert ask(daemon.address, turn(keep=False, extra=[("TIDEGATE_MODE", "auth")])).status == 204
        assert late.allows(time.monotonic() - began, 0.1)


def test_a_relayed_request_waits_for_its_turn_with_its_body(
    start: Callable[..., Daemon], folder: Path, application: Application, store: str
) -> None:
    relay = start(RULES, "--store", store, listen=f"unix:{folder}/r,modes=relay,relay-to={application.address}")
    began = time.monotonic()
    with Connection(relay.address) as connection:
        for number in range(4):
            answer = connection.ask(turn(method="POST", stdin=b"b" * 500_000))
            assert (answer.status, json.loads(answer.body)["body"]) == (200, 500_000)
    assert time.monotonic() - began > 0.25
    with Connection(relay.address) as connection:
        connection.send(Request(uri="/status/200/0").encode(1) + Request(uri="/status/200/0").encode(2))
        connection.answer(1)
    time.sleep(1.2)
    assert len(application.seen) == 5  # who left before its turn never reached it


def test_a_turn_waited_for_at_sigterm_is_still_answered(holder: Daemon) -> None:
    mode = [("TIDEGATE_MODE", "auth")]
    with Connection(holder.address) as connection:
        connection.send(b"".join(turn("end", extra=mode).encode(number) for number in range(1, 5)))
        assert connection.answer(1).status == 204
        holder.signal(15)
        assert [connection.answer(number).status for number in (2, 3, 4)] == [204, 204, 204]
    assert holder.wait() == 0


# ---- policies by name

STYLED = """\
policies:
  - name: styled
    match: {path: /never}
    rules: 1/hour
    statuses: {denied: 420}
    texts: {denied: "Slowly, please."}
  - {name: guesses, match: {path: /never}, rules: 2/hour, count: {status: [401]}}
  - {name: fields, match: {path: /never}, rules: 1/hour, by: "form:user", missing_identity: reject 400}
"""


def test_a_policy_by_name_answers_in_its_own_style_and_sees_body_and_answer(
    start: Callable[..., Daemon], folder: Path, application: Application, store: str
) -> None:
    relay = start(STYLED, "--store", store, listen=f"unix:{folder}/r,modes=relay,relay-to={application.address}")

    def named(policy: str, uri: str, **more: object) -> Request:
        more.setdefault("set", {})
        more["set"] = {**more["set"], "TIDEGATE_POLICY": policy}  # type: ignore[dict-item]
        return Request(uri=uri, keep=False, **more)  # type: ignore[arg-type]

    assert ask(relay.address, named("styled", "/echo")).status == 200
    refused = ask(relay.address, named("styled", "/echo"))
    assert (refused.status, b"Slowly, please." in refused.body) == (420, True)
    for status, wanted in ((200, 200), (200, 200), (401, 401), (401, 401), (401, 429)):
        assert ask(relay.address, named("guesses", f"/status/{status}/0")).status == wanted
        time.sleep(0.03)
    form = {"method": "POST", "set": {"CONTENT_TYPE": "application/x-www-form-urlencoded"}}
    told = [ask(relay.address, named("fields", "/echo", stdin=body, **form)).status
            for body in (b"user=a", b"user=b", b"user=a", b"nobody=1")]
    assert told == [200, 200, 429, 400]
