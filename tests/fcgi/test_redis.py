"""The daemon on Redis: every mode, and a loop that waits for nobody. Plain and under sanitizers."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from application import Application
from client import ABORT, AUTHORIZER, Connection, Request, ask, record
from fcgi_daemon import Daemon, wait_for

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from cluster import Cluster, cluster  # noqa: E402
from detour import detour  # noqa: E402
from server import Lateness, Server, free_port, server  # noqa: E402

RULES = """\
policies:
  - {name: two, match: {path: "/two*"}, rules: 2/hour, by: ip+path}
  - {name: closed, match: {path: /closed}, rules: 1000/hour, on_store_failure: closed}
  - {name: denied, match: {path: /denied}, rules: deny}
  - {name: big, match: {path: "/big*"}, rules: 1000000/hour}
"""
RELAY = """\
policies:
  - {name: login, match: {path: "/status/*"}, rules: 2/hour, count: {status: [401]}}
  - {name: form, match: {path: /echo}, rules: 2/hour, by: "form:user", missing_identity: shared}
  - {name: both, match: {path: /two}, rules: 3/hour, by: [ip, "form:user"], missing_identity: shared}
"""


@pytest.fixture(scope="module", params=["plain", "asan"])
def program(request: pytest.FixtureRequest, make: Callable[..., None], build: Path) -> Path:
    make("programs", request.param)
    return (build if request.param == "plain" else build / request.param) / "bin" / "tidegate-fcgi"


@pytest.fixture
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture
def daemon(start: Callable[..., Daemon], redis: Server) -> Daemon:
    return start(RULES, "--store", redis.patient)


@pytest.fixture
def hurried(start: Callable[..., Daemon], redis: Server) -> Daemon:
    """With the deadline of 50 ms; Redis decides."""
    daemon = start(RULES, "--store", redis.uri)
    wait_for(lambda: ask(daemon.address, uri="/big")["X-RateLimit-Limit"], what="limits")  # a busy machine may be late at first
    if daemon.lines("store-failing"):
        wait_for(lambda: ask(daemon.address, uri="/big") and daemon.lines("store-answers"), 20, what="a word of it")
    return daemon


def test_every_mode_decides_on_redis_as_on_a_table(daemon: Daemon) -> None:
    wanted = {"answer": (200, 200, 429), "auth": (204, 204, 403), "xaccel": (200, 200, 429)}
    for mode, statuses in wanted.items():
        more = {"TIDEGATE_NEXT": "@app"} if mode == "xaccel" else {}
        got = [ask(daemon.address, uri=f"/two/{mode}", set={"TIDEGATE_MODE": mode, **more}) for _ in range(3)]
        assert tuple(answer.status for answer in got) == statuses
        assert [answer["X-RateLimit-Remaining"] for answer in got] == ["1", "0", "0"]
        assert got[2]["Retry-After"]
    got = [ask(daemon.address, uri="/two/authorizer", role=AUTHORIZER) for _ in range(3)]
    assert [answer.status for answer in got] == [200, 200, 429]
    assert got[0]["Variable-TIDEGATE_REMAINING"] == "1"
    assert ask(daemon.address, uri="/nothing").body == b'{"allowed": true, "policy": null}'
    assert ask(daemon.address, uri="/denied").status == 403


def test_policies_keys_costs_and_peeks_reach_redis(daemon: Daemon) -> None:
    named = {"TIDEGATE_POLICY": "big", "TIDEGATE_KEY": "ip=203.0.113.1"}
    assert json.loads(ask(daemon.address, set={**named, "TIDEGATE_COST": "7"}).body)["remaining"] == 999_993
    assert json.loads(ask(daemon.address, set={**named, "TIDEGATE_PEEK": "1"}).body)["remaining"] == 999_993
    assert json.loads(ask(daemon.address, set=named).body)["remaining"] == 999_992
    assert ask(daemon.address, set={**named, "TIDEGATE_POLICY": "none"}).status == 500


def test_a_batch_is_decided_in_its_order(daemon: Daemon) -> None:
    lines = ["policy=two&key=ip%3D203.0.113.1&key=path%3D/two"] * 3 + ["policy=none&key=ip%3Dx", "nonsense=1"]
    lines += [f"policy=big&key=ip%3D198.51.100.{number}" for number in range(27)]
    told = json.loads(ask(daemon.address, set={"TIDEGATE_BATCH": "\n".join(lines)}).body)["decisions"]
    assert [one["allowed"] for one in told] == [True, True, False, False, False] + [True] * 27
    assert [one.get("remaining") for one in told[:3]] == [1, 0, 0]
    assert "no policy" in told[3]["message"]


def test_pipelined_and_multiplexed_requests_each_get_their_answer_and_none_counts_twice(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        connection.send(b"".join(Request(uri="/big").encode(number) for number in range(1, 61)))
        left = {connection.answer(number)["X-RateLimit-Remaining"] for number in range(1, 61)}
        assert left == {str(999_999 - number) for number in range(60)}


def test_requests_behind_each_other_under_one_number_are_answered_in_order(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        for split in (0, 1, 7, 1000):
            connection.send(Request(uri="/big", padding=3).encode() * 50, split)
            left = [int(connection.answer()["X-RateLimit-Remaining"] or "") for _ in range(50)]
            assert left == list(range(left[0], left[0] - 50, -1))


def test_several_loops_admit_the_limit_exactly(start: Callable[..., Daemon], redis: Server) -> None:
    rules = "policies:\n  - {name: shared, rules: 700/hour}\n"
    daemon = start(rules, "--store", redis.patient, "--threads", "3")
    statuses = Counter[int]()

    def load() -> None:
        with Connection(daemon.address) as connection:
            got = Counter(connection.ask(Request()).status for _ in range(250))
        statuses.update(got)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {200: 700, 429: 300}


def test_a_judgement_of_three_questions_waits_one_deadline_for_a_redis_that_stops_after_the_first(
    start: Callable[..., Daemon],
) -> None:
    modes = ("enforce", "challenge", "shadow")
    kinds = "".join(f"  - {{name: {mode}, mode: {mode}, also: true, rules: 1000/hour}}\n" for mode in modes)
    with server(port=free_port()) as redis, detour(redis) as way:
        daemon = start("policies:\n" + kinds, "--store", f"{way.uri}?timeout_ms=300")  # the first is answered in time
        assert ask(daemon.address).status == 200
        assert way.decisions == 3
        way.delay = 0.18
        way.answered = lambda count: redis.signal(signal.SIGSTOP)
        with Connection(daemon.address) as connection, Lateness() as late:
            began = time.monotonic()
            answer = connection.ask(Request())
            took = time.monotonic() - began
            assert late.allows(took, 0.3 + 0.01), took
        assert answer.status == 200
        assert answer["X-RateLimit-Remaining"] or late.worst > 0.02, "the first question was answered"
        assert took > 0.27, "the second had what was left"


def test_while_redis_hangs_the_loop_waits_for_nobody_and_each_is_answered_by_its_policy_in_time(
    hurried: Daemon, redis: Server
) -> None:
    before = len(hurried.lines("store-failing"))
    waits: dict[str, list[float]] = {"big": [], "closed": [], "denied": [], "none": []}
    stop = threading.Event()
    trouble: list[str] = []

    def load(name: str, status: int) -> None:
        with Connection(hurried.address) as connection:
            while not stop.is_set():
                began = time.monotonic()
                answer = connection.ask(Request(uri=f"/{name}", peer=f"192.0.2.{len(waits[name]) % 250}"))
                waits[name].append(time.monotonic() - began)
                if answer.status != status or answer["X-RateLimit-Limit"]:
                    trouble.append(f"{name}: {answer.status} {answer['X-RateLimit-Limit']}")
                time.sleep(0.001)

    assert redis.process
    redis.process.send_signal(signal.SIGSTOP)
    try:
        with Lateness() as late:
            threads = [threading.Thread(target=load, args=case)
                       for case in (("big", 200), ("closed", 503), ("denied", 403), ("none", 200))]
            for thread in threads:
                thread.start()
            time.sleep(1.2)
            stop.set()
            for thread in threads:
                thread.join()
            assert trouble == []
            assert late.allows(max(waits["big"] + waits["closed"]), 0.06)
            # What asks the store for nothing never notices.
            for name in ("denied", "none"):
                assert len(waits[name]) > 50
                assert late.allows(sorted(waits[name])[len(waits[name]) * 99 // 100], 0.01)
        assert len(hurried.lines("store-failing")) == before + 1
    finally:
        redis.process.send_signal(signal.SIGCONT)
    wait_for(lambda: ask(hurried.address, uri="/big")["X-RateLimit-Limit"] == "1000000", what="limits again")


def test_a_restarted_redis_is_used_again(hurried: Daemon, redis: Server) -> None:
    before = len(hurried.lines("store-answers"))
    redis.kill()
    assert ask(hurried.address, uri="/closed").status == 503
    assert ask(hurried.address, uri="/big").status == 200
    redis.start()
    wait_for(lambda: ask(hurried.address, uri="/big")["X-RateLimit-Limit"] == "1000000", what="limits again")
    wait_for(lambda: ask(hurried.address, uri="/big") and len(hurried.lines("store-answers")) > before, 20, what="a word of it")


def test_peers_that_leave_while_redis_is_waited_for_harm_nobody(daemon: Daemon, redis: Server) -> None:
    assert redis.process
    redis.process.send_signal(signal.SIGSTOP)
    try:
        for number in range(20):
            with Connection(daemon.address) as gone:
                gone.send(Request(uri="/big").encode() * 5)
                time.sleep(0.002 * (number % 3))
        aborted = Connection(daemon.address)
        aborted.send(Request(uri="/big").encode(1) + Request(uri="/big").encode(2))
        time.sleep(0.02)
        aborted.send(record(ABORT, 1))
        assert aborted.answer(1).stdout == b""
    finally:
        redis.process.send_signal(signal.SIGCONT)
    assert aborted.answer(2).status == 200
    aborted.close()
    assert ask(daemon.address, uri="/big").status == 200


def test_a_reload_while_redis_is_waited_for_keeps_the_rules_of_whoever_asked_before(
    daemon: Daemon, redis: Server
) -> None:
    assert redis.process and ask(daemon.address, uri="/big").status == 200
    with Connection(daemon.address) as connection:
        redis.process.send_signal(signal.SIGSTOP)
        try:
            connection.send(Request(uri="/big", extra=[("TIDEGATE_POLICY", "big")]).encode())
            time.sleep(0.05)
            daemon.rules.write_text(RULES.replace("1000000", "5"))
            assert "reading 2" in daemon.reload()
        finally:
            redis.process.send_signal(signal.SIGCONT)
        assert connection.answer()["X-RateLimit-Limit"] == "1000000"
    assert ask(daemon.address, uri="/big")["X-RateLimit-Limit"] == "5"


def test_what_waits_for_redis_at_sigterm_is_still_answered(daemon: Daemon, redis: Server) -> None:
    assert redis.process and ask(daemon.address, uri="/big").status == 200
    connections = [Connection(daemon.address) for _ in range(5)]
    redis.process.send_signal(signal.SIGSTOP)
    try:
        for connection in connections:
            connection.send(Request(uri="/big").encode())
        time.sleep(0.05)
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: daemon.lines("stopping"))
    finally:
        redis.process.send_signal(signal.SIGCONT)
    for connection in connections:
        assert connection.answer()["X-RateLimit-Limit"] == "1000000"
        assert connection.at_end()
    assert daemon.wait() == 0


# ---- the relay


@pytest.fixture
def application(folder: Path) -> Iterator[Application]:
    made = Application(f"unix:{folder}/app")
    yield made
    made.stop()


@pytest.fixture
def relay(start: Callable[..., Daemon], redis: Server, folder: Path, application: Application) -> Daemon:
    return start(RELAY, "--store", redis.patient, listen=f"unix:{folder}/r,modes=relay,relay-to={application.address}")


def login(user: str, **more: object) -> Request:
    return Request(method="POST", stdin=f"user={user}&pad={'p' * 20_000}".encode(), keep=False,
                   set={"CONTENT_TYPE": "application/x-www-form-urlencoded"}, **more)  # type: ignore[arg-type]


def test_a_relayed_request_is_decided_by_its_body_and_passed_on_whole(relay: Daemon, application: Application) -> None:
    told = [ask(relay.address, login(user, uri="/echo")) for user in ("a", "a", "a", "b")]
    assert [answer.status for answer in told] == [200, 200, 429, 200]
    assert [json.loads(answer.body)["body"] for answer in told if answer.status == 200] == [20_011] * 3
    assert len(application.seen) == 3


def test_what_was_taken_before_the_body_is_given_back_when_the_body_is_refused(relay: Daemon) -> None:
    peers = iter(range(1, 250))
    for _ in range(3):
        assert ask(relay.address, login("a", uri="/two", peer=f"192.0.2.{next(peers)}")).status == 200
    for _ in range(5):
        assert ask(relay.address, login("a", uri="/two", peer="198.51.100.1")).status == 429
    left = [ask(relay.address, login(f"c{number}", uri="/two", peer="198.51.100.1")).status for number in range(4)]
    assert left == [200, 200, 200, 429]


def test_only_answers_of_the_status_named_stay_counted(relay: Daemon) -> None:
    assert {ask(relay.address, uri="/status/200/0").status for _ in range(5)} == {200}
    time.sleep(0.05)
    assert [ask(relay.address, uri="/status/401/0").status for _ in range(2)] == [401, 401]
    assert ask(relay.address, uri="/status/401/0").status == 429


def test_a_body_that_comes_while_redis_is_waited_for_is_passed_on_whole(
    relay: Daemon, redis: Server, application: Application
) -> None:
    assert redis.process
    upload = bytes(range(256)) * 3000
    with Connection(relay.address) as connection:
        assert ask(relay.address, uri="/unmatched").status == 200
        redis.process.send_signal(signal.SIGSTOP)
        try:
            sender = threading.Thread(target=connection.send, args=(
                Request(method="POST", uri="/status/200/0", stdin=upload).encode(),))
            sender.start()
            time.sleep(0.1)
        finally:
            redis.process.send_signal(signal.SIGCONT)
        sender.join()
        assert connection.answer().status == 200
    assert application.seen[-1].body == len(upload)


# ---- a cluster


def address_on(nodes: Cluster, part: int) -> str:
    """An address whose counts the `part`-th primary has."""
    for number in range(1, 250):
        slot = nodes.primaries[0]("CLUSTER", "KEYSLOT", f"{{ip=192.0.2.{number}}}")
        assert isinstance(slot, int)
        if nodes.owner(slot) is nodes.primaries[part]:
            return f"192.0.2.{number}"
    raise AssertionError(f"no address on node {part}")


def test_a_cluster_decides_and_a_node_that_stands_still_holds_nobody_elses_request(start: Callable[..., Daemon]) -> None:
    rules = """\
policies:
  - {name: both, match: {path: "/both/*"}, rules: 3/hour, by: [ip, path]}
  - {name: one, rules: 1000000/hour}
"""
    with cluster() as nodes:
        patient = start(rules, "--store", nodes.patient)
        got = [ask(patient.address, uri=f"/both/{number}").status for number in range(5)]
        assert got == [200, 200, 200, 429, 429], "each path in a slot of its own, the address in one"

        addresses = [address_on(nodes, part) for part in range(3)]
        daemon = start(rules, "--store", nodes.uri)
        for peer in addresses:
            wait_for(lambda peer=peer: ask(daemon.address, peer=peer)["X-RateLimit-Limit"])  # type: ignore[misc]
        waits: dict[int, list[float]] = {0: [], 2: []}
        trouble: list[str] = []
        stop = threading.Event()

        def load(part: int) -> None:
            with Connection(daemon.address) as connection:
                while not stop.is_set():
                    began = time.monotonic()
                    answer = connection.ask(Request(peer=addresses[part]))
                    waits[part].append(time.monotonic() - began)
                    if answer.status != 200 or bool(answer["X-RateLimit-Limit"]) != (part == 0):
                        trouble.append(f"{part}: {answer.status} {answer['X-RateLimit-Limit']}")
                    time.sleep(0.001)

        with Lateness() as late:
            nodes.primaries[2].signal(signal.SIGSTOP)
            try:
                threads = [threading.Thread(target=load, args=(part,)) for part in waits]
                for thread in threads:
                    thread.start()
                time.sleep(0.7)
                stop.set()
                for thread in threads:
                    thread.join()
            finally:
                nodes.primaries[2].signal(signal.SIGCONT)
            assert trouble == []
            assert late.allows(max(waits[2]), 0.06)
            assert late.allows(sorted(waits[0])[len(waits[0]) * 99 // 100], 0.01), "another node's requests notice nothing"
        wait_for(lambda: ask(daemon.address, peer=addresses[2])["X-RateLimit-Limit"] == "1000000", what="limits again")
