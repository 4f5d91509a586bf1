"""What operators see and set where several machines share a Redis: `tidegate stats, set, pause, list` on it, and the same from
Python. The bounds and the bytes are held by tests/c/stores/redis/test_keep.c."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from tidegate import Gate, Limiter
from tidegate.fastapi import rate_limit

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from cluster import SLOTS, cluster
from server import Lateness, Server, free_port, server
from test_redis_cluster import slot_of

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
SITE = """
namespace: shop
policies:
  - name: login
    match: {path: /login}
    rules: 3/hour
    by: [user|ip]
"""


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


class Site:
    def __init__(self, program: Path, folder: Path, store: str) -> None:
        self.program = program
        self.path = folder / "rules.yaml"
        self.path.write_text(SITE)
        self.store = store
        self.gate = Gate(self.path, store=store)

    def run(self, command: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, command, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={**CLEAN, "TIDEGATE_CONFIG": str(self.path), "TIDEGATE_STORE": self.store, **more}, timeout=30,
            check=False,
        )  # fmt: skip

    def ok(self, command: str, *arguments: object) -> str:
        done = self.run(command, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def ask(self, user: str) -> str:
        return str(self.gate.judge_wsgi({"REQUEST_METHOD": "GET", "PATH_INFO": "/login"}, user=user).outcome)

    def within(self, seconds: float, what: Callable[[], bool]) -> None:
        with Lateness() as late:
            began = time.monotonic()
            while not what():
                assert late.allows(time.monotonic() - began, seconds), "not in time"
                time.sleep(0.02)


@pytest.fixture(params=["", "tiered+"])
def site(request: pytest.FixtureRequest, redis: Server, make: Callable[[str], None], build: Path, tmp_path: Path) -> Site:
    make("programs")
    redis("FLUSHALL")
    return Site(build / "bin" / "tidegate", tmp_path, f"{request.param}{redis.patient}")


def test_stats_of_all_processes_are_shown_for_people_machines_and_prometheus(site: Site) -> None:
    assert [site.ask("42") for _ in range(5)] == ["allowed"] * 3 + ["denied"] * 2
    program = "import sys; from tidegate import Gate\ngate = Gate(sys.argv[1], store=sys.argv[2])\n"
    program += "for _ in range(4): gate.judge_wsgi({'REQUEST_METHOD': 'GET', 'PATH_INFO': '/login'}, user='43')\n"
    subprocess.run([sys.executable, "-c", program, site.path, site.store], check=True, timeout=30)

    def counts() -> dict[str, int]:
        policies = json.loads(site.ok("stats", "--json"))["policies"]
        return {**policies[0]} if policies else {}

    site.within(2, lambda: counts().get("allowed") == 6 and counts().get("denied") == 3)
    assert (counts()["namespace"], counts()["policy"]) == ("shop", "login")
    assert 'tidegate_decisions_total{namespace="shop",policy="login",outcome="allowed"} 6\n' in site.ok("stats", "--prometheus")
    assert "shop/login" in site.ok("stats")
    assert "login" in site.ok("top", "--every", "0.1", "--times", "1")


def test_one_client_is_tightened_and_a_policy_paused_from_the_shell(site: Site, redis: Server) -> None:
    assert site.ask("42") == "allowed"
    assert site.ok("set", "login", "1/hour", "--user", "42", "--for", "10m") == "login: set\n"
    (told,) = json.loads(site.ok("list", "--json"))
    assert (told["policy"], told["kind"], told["rules"], told["identity"]) == ("login", "rules", "1/hour", "user 42")
    assert 590e6 < told["left_us"] <= 600e6
    site.within(1, lambda: site.ask("42") == "denied")
    assert site.ask("43") == "allowed"
    assert site.ok("pause", "login", "--for", "10m") == "login: paused\n"
    site.within(1, lambda: site.ask("42") == "allowed")
    assert len(site.ok("list").splitlines()) == 2
    site.ok("set", "login", "--end", "user=42")
    site.ok("pause", "login", "--end")
    assert site.ok("list") == "none\n"
    assert redis("EXISTS", "tg1:{tidegate}:overrides") == 0
    assert all(isinstance(left := redis("PTTL", name), int) and left > 0 for name in ["tg1:{tidegate}:counts"])


def test_a_limiters_override_holds_in_another_process_and_ends_by_itself(redis: Server) -> None:
    limiter = Limiter("5/hour", name="risk", store=redis.patient)
    program = "import sys, time; from tidegate import Limiter\none = Limiter('5/hour', name='risk', store=sys.argv[1])\n"
    program += "print(one.hit('b').limit, flush=True)\nend = time.monotonic() + 30\n"
    program += "for limit in (1, 5):\n"
    program += "    while one.peek('a').limit != limit and time.monotonic() < end: one.hit('b'); time.sleep(0.02)\n"
    program += "    print(one.peek('a').limit, flush=True)"
    with subprocess.Popen([sys.executable, "-c", program, redis.patient], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "5\n", "it runs already"
        limiter.override("1/hour", "a", seconds=2)
        assert limiter.peek("a").limit == 1
        assert other.stdout.read() == "1\n5\n"
    assert other.returncode == 0
    assert limiter.peek("a").limit == 5


def test_a_cluster_keeps_them_on_the_node_of_their_slot_wherever_that_moves(
    make: Callable[[str], None], build: Path, tmp_path: Path
) -> None:
    make("programs")
    with cluster(3) as nodes:
        site = Site(build / "bin" / "tidegate", tmp_path, nodes.patient)
        assert [site.ask("42") for _ in range(4)] == ["allowed"] * 3 + ["denied"]

        def counts() -> dict[str, int]:
            policies = json.loads(site.ok("stats", "--json"))["policies"]
            return {**policies[0]} if policies else {}

        site.within(3, lambda: (counts().get("allowed"), counts().get("denied")) == (3, 1))
        for user in range(30):
            site.ask(f"another{user}")
        assert "\ntidegate_keys 31\n" in site.ok("stats", "--prometheus"), "of all nodes together"
        slot = nodes.primaries[0]("CLUSTER", "KEYSLOT", "tidegate")
        assert isinstance(slot, int)
        owner = nodes.owner(slot)
        nodes.move_slot(slot, next(one for one in nodes.primaries if one is not owner))
        assert site.ok("set", "login", "1/hour", "--user", "43", "--for", "10m") == "login: set\n"
        assert site.ask("43") == "allowed"
        site.within(3, lambda: site.ask("43") == "denied")
        site.within(3, lambda: (counts().get("allowed") or 0) >= 4)


def test_what_a_limit_in_code_has_counted_of_a_client_is_seen_and_forgotten_by_its_prefix_and_kinds(redis: Server) -> None:
    redis("FLUSHALL")
    app = FastAPI()

    @app.post("/login", dependencies=[Depends(rate_limit("3/hour", prefix="login", store=redis.patient))])
    def login() -> None: ...

    with TestClient(app, client=("203.0.113.9", 50000)) as client:
        assert [client.post("/login").status_code for _ in range(4)] == [200] * 3 + [429]
        limiter = Limiter("3/hour", name="login", store=redis.patient)
        who = {"ip+method+route": ("203.0.113.9", "POST", "/login")}
        assert not limiter.peek(dims=who)
        limiter.reset(dims=who)
        assert limiter.peek(dims=who).remaining == 3
        assert client.post("/login").status_code == 200


@pytest.mark.parametrize("tier", ["", "tiered+"])
def test_every_command_says_which_server_does_not_answer_and_how(
    make: Callable[[str], None], build: Path, tmp_path: Path, tier: str
) -> None:
    make("programs")
    with server(port=free_port()) as one:
        site = Site(build / "bin" / "tidegate", tmp_path, f"{tier}{one.tcp}")
        asked = [["stats"], ["list"], ["pause", "login", "--for", "1m"], ["reset", "login", "user=42"]]
        for end, how in ((lambda: one.signal(signal.SIGSTOP), "no answer in time (reply)"), (one.close, "connect: Connection refused")):
            end()
            for words in asked:
                done = site.run(*words)
                assert (done.returncode, done.stdout) == (1, "")
                assert done.stderr == f"tidegate: redis at 127.0.0.1:{one.port}: {how}\n"
            done = site.run("explain", "--request", "/login", "--user", "42")
            assert (done.returncode, "the store did not answer, so on_store_failure decides" in done.stdout) == (0, True)
            assert f"store-failing: store redis at 127.0.0.1:{one.port} does not answer: " in done.stderr
            assert f"redis at 127.0.0.1:{one.port}: {how}; " in done.stderr
            assert done.stderr.count("\n") == 1


def test_of_a_cluster_the_node_that_stands_still_is_named_and_the_others_answer_whoever_has_the_secret(
    make: Callable[[str], None], build: Path, tmp_path: Path
) -> None:
    make("programs")
    with cluster(3, timeout_ms=15000) as nodes:
        site = Site(build / "bin" / "tidegate", tmp_path, f"{nodes.uri}?timeout_ms=500")
        stopped = nodes.primaries[1]
        assert slot_of("tg1:secret") * 3 // SLOTS == 1, "the secret is kept by the one that is stopped"
        stopped.signal(signal.SIGSTOP)
        silent = f"redis at 127.0.0.1:{stopped.port}: no answer in time (reply)"
        of_part = [next(user for user in range(999) if slot_of(f"user={user}") * 3 // SLOTS == part) for part in range(3)]

        def told(**more: str) -> list[tuple[bool, bool]]:
            done = [site.run("explain", "--request", "/login", "--user", user, **more) for user in of_part]
            return [(silent in one.stderr, "3 of 3 left" in one.stdout) for one in done]

        assert told(TIDEGATE_SECRET="sixteen bytes or more") == [(False, True), (True, False), (False, True)]
        assert told() == [(True, False)] * 3, "who begins now cannot know the secret"
