"""The Redis store through Python: threads, processes, faces, and Redis away. The numbers are held by
test_redis_conformance.py, each way of failing by tests/c/stores/redis/test_failures.c."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flask
import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from tidegate import ConfigError, Decision, Gate, Limiter, StoreError
from tidegate.fastapi import install, rate_limit
from tidegate.flask import Tidegate

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from detour import detour
from server import Connection, Lateness, MachineLateness, Server, free_port, server


@pytest.fixture
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


def test_a_limiter_on_redis_answers_as_any_other(redis: Server) -> None:
    one = Limiter("3/minute token_bucket; 100/hour", name="x", store=redis.patient)
    decisions = [one.hit("a") for _ in range(4)]
    assert [bool(decision) for decision in decisions] == [True, True, True, False]
    assert [decision.remaining for decision in decisions] == [2, 1, 0, 0]
    assert 19 < decisions[3].retry_after <= 20
    assert len(decisions[0].rules) == 2
    decisions[0].refund()
    decisions[0].refund()
    assert one.hit("a") and not one.hit("a")
    one.reset("a")
    assert one.peek("a").remaining == 3
    one.refund("a", cost=5)
    assert set(redis.keys()) == set(), "neither a look nor a refund makes a key"


@pytest.mark.parametrize("bytes_at_once", [0, 1, 3, 20])
def test_an_answer_that_comes_in_pieces_is_the_same_answer(bytes_at_once: int) -> None:
    with server(port=free_port()) as redis, detour(redis) as way:
        way.bytes_at_once = bytes_at_once
        one = Limiter("3/minute token_bucket; 100/hour", name="x", store=f"{way.uri}?timeout_ms=2000")
        assert [one.hit("a").remaining for _ in range(4)] == [2, 1, 0, 0]
        assert not one.hit("a").degraded

        async def ask() -> Decision:
            return await one.hit_async("b")

        later = asyncio.run(ask())
        assert (later.remaining, later.degraded) == (2, False)


def test_environment_names_the_store(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STORE", redis.patient)
    assert Limiter("3/minute", name="x").hit("a").remaining == 2
    assert len(redis.keys()) == 1


def test_other_threads_run_while_redis_is_waited_for(redis: Server) -> None:
    one = Limiter("100/minute", name="x", store=f"{redis.uri}?timeout_ms=400")
    assert not one.hit("a").degraded
    redis.signal(signal.SIGSTOP)
    gaps, done = [], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    with Lateness() as late:
        began = time.monotonic()
        assert one.hit("a").degraded
        waited = time.monotonic() - began
        assert waited > 0.38
        assert late.allows(waited, 0.41)
    done.set()
    ticker.join()
    assert len(gaps) > 20, f"another thread ran {len(gaps)} times while one waited"


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_a_limiter_that_is_dropped_while_redis_is_silent_holds_up_no_other_thread(redis: Server, way: str) -> None:
    """The store's last reference brings what was counted since, and waits for that."""
    limiters = [Limiter("100/minute", name="x", store=redis.uri)]
    limiters[0].hit("a")
    if way == "stopped":
        redis.signal(signal.SIGSTOP)
    else:
        redis.kill()
        limiters[0].hit("a")  # finds no server, and leaves no connection
    longest, done = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        while not done.is_set():
            began = time.monotonic()
            time.sleep(0.001)
            longest = max(longest, time.monotonic() - began)

    ticker = threading.Thread(target=tick)
    ticker.start()
    with MachineLateness() as late:
        began = time.monotonic()
        limiters.clear()
        took = time.monotonic() - began
        done.set()
        ticker.join()
        assert late.allows(longest, 0.02)
        assert late.allows(took, 0.6 if way == "stopped" else 0.03)


def test_two_hundred_threads_share_the_pool_and_count_exactly(redis: Server) -> None:
    one = Limiter("1000/hour", name="x", store=f"{redis.patient}&connections=8")
    with ThreadPoolExecutor(200) as pool:
        decisions = list(pool.map(lambda _: one.hit("a"), range(3000)))
    assert not any(decision.degraded for decision in decisions)
    assert sum(map(bool, decisions)) == 1000
    clients = redis("CLIENT", "LIST", "TYPE", "normal")
    assert isinstance(clients, bytes) and clients.count(b"\n") <= 8 + 1  # and ours


@pytest.mark.fault("R142")
def test_processes_and_threads_never_open_more_than_their_cap(redis: Server) -> None:
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from tidegate import Limiter\n"
        "one = Limiter('100000/hour token_bucket', name='x', store=sys.argv[1])\n"
        "with ThreadPoolExecutor(100) as pool: print(sum(not d.degraded for d in pool.map(lambda _: one.hit('a'), range(1000))))\n"
        "sys.stdout.flush(); sys.stdin.read()"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", program, f"{redis.patient}&connections=5"], text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]  # fmt: skip
    try:
        assert [worker.stdout.readline().strip() for worker in workers if worker.stdout] == ["1000"] * 4
        clients = redis("CLIENT", "LIST", "TYPE", "normal")
        assert isinstance(clients, bytes) and clients.count(b"\n") <= 4 * 5 + 1
    finally:
        for worker in workers:
            worker.communicate("")


def test_a_forked_worker_goes_on_with_connections_of_its_own(redis: Server) -> None:
    one = Limiter("1000/hour", name="x", store=redis.patient)
    one.hit("a")
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os._exit(sum(one.hit("a").degraded for _ in range(50)))
        children.append(child)
    for _ in range(50):
        assert not one.hit("a").degraded
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert one.hit("a").remaining == 1000 - 1 - 4 * 50 - 50 - 1


# ---- faces, with Redis away


def fastapi_app(store: str, on_store_failure: str) -> object:
    app = FastAPI()
    install(app)
    limit = rate_limit("2/minute", name="x", store=store, on_store_failure=on_store_failure, by="header:X-Who")

    @app.get("/", dependencies=[Depends(limit)])
    def index() -> str:
        return "ok"

    return TestClient(app, raise_server_exceptions=False)


def flask_app(store: str, on_store_failure: str) -> object:
    app = flask.Flask(__name__)
    Tidegate(app, default="2/minute", name="x", store=store, on_store_failure=on_store_failure, by="header:X-Who")

    @app.get("/")
    def index() -> str:
        return "ok"

    return app.test_client()


@pytest.mark.fault("R134")
@pytest.mark.parametrize("face", [fastapi_app, flask_app])
def test_a_face_answers_by_policy_while_redis_is_away_and_never_500(redis: Server, face: Callable[..., Any]) -> None:
    who = {"X-Who": "a"}
    opened, closed = face(redis.uri, "open"), face(redis.uri, "closed")  # one store, one breaker
    assert opened.get("/", headers=who).status_code == 200
    redis.kill()
    assert {opened.get("/", headers=who).status_code for _ in range(10)} == {200}
    for _ in range(10):
        answer = closed.get("/", headers=who)
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "1"
    redis.start()
    with Lateness() as late:
        began = time.monotonic()
        while closed.get("/", headers=who).status_code == 503:
            assert late.allows(time.monotonic() - began, 2), "not back within 2 s"
            time.sleep(0.02)
    assert [face(redis.patient, "open").get("/", headers={"X-Who": "b"}).status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize(("share", "admitted"), [("local", 8), ("local 100%", 8), ("local 50%", 4), ("local 7%", 1)])
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket"])
def test_while_redis_is_away_a_share_of_each_limit_is_let_through(
    redis: Server, algorithm: str, share: str, admitted: int
) -> None:
    redis.kill()
    one = Limiter(f"8/day {algorithm}", name=f"{algorithm} {share}", store=redis.uri, on_store_failure=share)
    decisions = [one.hit("a") for _ in range(10)]
    assert all(decision.degraded for decision in decisions)
    assert [bool(decision) for decision in decisions] == [True] * admitted + [False] * (10 - admitted)
    assert [decision.remaining for decision in decisions[:admitted]] == list(range(admitted - 1, -1, -1))
    assert {decision.limit for decision in decisions} == {admitted}, "by which it was judged"
    assert one.hit("b"), "each client has its share"


def test_of_several_policies_the_smallest_share_holds_and_closed_is_stricter_still(redis: Server, tmp_path: Path) -> None:
    redis.kill()
    rules = tmp_path / "rules.yaml"

    def admitted(*policies: str) -> int:
        space = "".join(filter(str.isalnum, "-".join(policies)))
        lines = [f"  - {{name: p{i}, also: true, rules: 100/day, on_store_failure: {each}}}\n" for i, each in enumerate(policies)]
        rules.write_text("".join([f"namespace: {space}\npolicies:\n", *lines]))
        gate = Gate(str(rules), store=redis.uri)
        asked = [gate.judge_wsgi({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}) for _ in range(120)]
        return sum(judgement.status == 0 for judgement in asked)

    assert admitted("open") == 120
    assert admitted("local 60%", "local 20%", "local") == 20
    assert admitted("open", "local 3%") == 3
    assert admitted("local 60%", "closed") == 0


@pytest.mark.parametrize("share", ["local 0%", "local 101%", "local 25", "local25%", "local  25%", "local -1%", "local 2.5%", "open 25%"])
def test_a_share_that_is_none_is_told_with_what_was_expected(share: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_store_failure.*local 25%"):
        Limiter("8/day", name="x", store="memory://shares", on_store_failure=share)
    rules = tmp_path / "rules.yaml"
    rules.write_text(f'policies:\n  - {{name: a, rules: 8/day, on_store_failure: "{share}"}}\n')
    with pytest.raises(ConfigError, match=r"rules.yaml:2:\d+: found \"" + share):
        Gate(str(rules), store="memory://shares")


def test_what_a_person_has_to_change_is_an_error_when_the_limiter_is_made(redis: Server) -> None:
    redis("CONFIG", "SET", "requirepass", "hunter2")
    with pytest.raises((ConfigError, StoreError), match="NOAUTH"):
        Limiter("1/s", name="x", store=redis.patient)
    with pytest.raises((ConfigError, StoreError), match="WRONGPASS") as caught:
        Limiter("1/s", name="x", store=f"redis+unix://:hunter3@{redis.path}?timeout_ms=2000")
    assert "hunter" not in str(caught.value)


@pytest.mark.fault("R136")
def test_a_start_without_redis_is_not_held_up_and_trouble_costs_little(redis: Server, caplog: pytest.LogCaptureFixture) -> None:
    redis.kill()
    with Lateness() as late:
        began = time.monotonic()
        one = Limiter("5/minute", name="x", store=redis.uri)
        assert late.allows(time.monotonic() - began, 0.3)
        took = []
        for _ in range(300):
            began = time.monotonic()
            assert one.hit("a").degraded
            took.append(time.monotonic() - began)
        assert late.allows(max(took), 0.06)
        assert late.allows(sorted(took)[290], 0.001)
    lines = [record for record in caplog.records if "does not answer" in record.getMessage()]
    assert len(lines) <= 1, "one line when trouble begins, not one a request"


@pytest.mark.fault("R151")
def test_a_socket_with_password_and_database_works_as_a_port_does(redis: Server) -> None:
    redis("CONFIG", "SET", "requirepass", "hunter2")
    assert Limiter("3/minute", name="x", store=f"redis+unix://:hunter2@{redis.path}?db=5&timeout_ms=2000").hit("a").remaining == 2
    link = Connection(redis.path)
    link("AUTH", "hunter2")
    link("SELECT", 5)
    assert len([name for name in link("KEYS", "*") if b"{tidegate}" not in name]) == 2  # the count and the secret
    link.close()


# ---- beyond one process


@pytest.mark.fault("R149")
def test_a_hundred_processes_do_not_come_back_at_one_instant(redis: Server) -> None:
    """Forked children stand for processes: each has its own connections and its own breaker."""
    one = Limiter("1000000/hour token_bucket", name="x", store=redis.uri)
    one.hit("a")
    redis.kill()
    go = time.monotonic() + 0.5
    children = []
    reading, writing = os.pipe()
    for _ in range(100):
        child = os.fork()
        if child == 0:
            while time.monotonic() < go + 20:  # or it is stuck
                if not one.hit("a").degraded:
                    os.write(writing, b"%.6f\n" % time.monotonic())
                    os._exit(0)
                time.sleep(0.02)
            os._exit(1)
        children.append(child)
    time.sleep(max(0.0, go + 2.5 - time.monotonic()))
    redis.start()
    assert {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children} == {0}
    os.close(writing)
    with os.fdopen(reading) as file:
        back = sorted(float(line) for line in file)
    assert len(back) == 100
    assert back[-1] - back[0] > 1
    assert max(sum(at <= other < at + 0.1 for other in back) for at in back) <= 50


@pytest.mark.fault("R46")
def test_clients_whose_clocks_differ_by_an_hour_share_one_limit(redis: Server) -> None:
    """Wall clocks set forward and back, and a monotonic one that began at another time: the server's alone counts."""
    program = (
        "import sys, time; from tidegate import Limiter\n"
        "one = Limiter('10/minute; 12/minute token_bucket; 14/minute sliding_counter; 16/minute aligned', name='x', store=sys.argv[1])\n"
        "print(sum(bool(one.hit('a')) for _ in range(4)), int(time.time()))"
    )
    plain = [sys.executable, "-c", program, redis.patient]
    commands = [plain, ["faketime", "-f", "+3600s", *plain], ["faketime", "-f", "-3600s", *plain]]
    if subprocess.run(["unshare", "--time", "true"], check=False, capture_output=True).returncode == 0:
        commands.append(["unshare", "--time", "--boottime", "3600", "--monotonic", "3600", *plain])
    said = [
        list(map(int, subprocess.check_output(command, env={**os.environ, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}).split()))
        for command in commands
    ]
    assert [admitted for admitted, _ in said] == [4, 4, 2, 0][: len(said)]
    clocks = [clock - said[0][1] for _, clock in said]
    assert 3500 < clocks[1] < 3700 and -3700 < clocks[2] < -3500, "the clients' clocks did lie apart"
