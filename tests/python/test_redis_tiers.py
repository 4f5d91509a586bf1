"""Tiers before a cluster, before servers reached over TLS, and before a master that a sentinel names: the C tests of the tiers run
over each, and what a URI asks for is asked for once from Python. Before one plain server: tests/c/stores/tiered/test_tiered.c."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidegate import ConfigError, Limiter

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "redis")]
from cluster import cluster
from sentinel import site
from server import Server
from test_redis_cluster import names_on
from tls import Certificates, tls_server


@dataclass
class Store:
    uri: str
    servers: list[Server]


@pytest.fixture(scope="module", params=["cluster", "tls", "sentinel"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if request.param == "sentinel":
        with site(down_after_ms=60_000) as one:  # it is stopped for a while, and nobody is to take its place
            yield Store(one.patient, [one.master])
        return
    if request.param == "cluster":
        with cluster(timeout_ms=15_000) as some:
            yield Store(some.patient, some.primaries)
        return
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    server, port = tls_server(certificates)
    try:
        yield Store(f"rediss://127.0.0.1:{port}?timeout_ms=2000&ca={certificates.path('ca.crt')}", [server])
    finally:
        server.close()


def test_the_tests_of_the_tiers_hold_over_every_address(store: Store, build: Path, make: Callable[..., None]) -> None:
    program = build / "tests" / "stores" / "tiered" / "test_tiered"
    make(str(program))
    named = " ".join([store.uri, *(f"{one.process.pid}={one.path}" for one in store.servers if one.process)])
    environment = {**os.environ, "TIDEGATE_TEST_TIERS": named}
    if len(store.servers) == 1 and os.environ.get("TIDEGATE_LONG") != "1":
        environment["TIDEGATE_TEST_BRIEFLY"] = "1"  # one server's bounds are held by the test of one server
    done = subprocess.run([program], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert done.stdout.count("[       OK ]") + done.stderr.count("[       OK ]") >= 19


def asked(store: Store) -> int:
    lines = [line for one in store.servers for line in str(one("INFO", "commandstats")).split("\\r\\n")]
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines if "cmdstat_evalsha:" in line)


@pytest.mark.parametrize(("options", "most"), [("flush=50ms", 12), ("lease=10", 34), ("lease=5&workers=2", 64)])
def test_what_the_uri_asks_for_saves_questions_from_python_too(store: Store, options: str, most: int) -> None:
    tiered = Limiter("5000/hour token_bucket", name=f"python-{options}", store=f"tiered+{store.uri}&{options}")
    plain = Limiter("5000/hour token_bucket", name=f"python-{options}", store=store.uri)
    before, began = asked(store), time.monotonic()
    assert all(tiered.hit(who) for who in "abc" for _ in range(100))
    slowly = int((time.monotonic() - began) / 0.05)  # so often something of each client was due on a busy machine
    assert asked(store) - before <= most + 3 * slowly

    async def main() -> None:
        assert all([await tiered.hit_async("d") for _ in range(100)])

    asyncio.run(main())
    end = time.monotonic() + 5
    held = 10 if "lease" in options else 0  # what lies in hand is counted already
    for who in "abcd":
        while not 4900 - held <= plain.peek(who).remaining <= 4901:
            assert time.monotonic() < end, who
            time.sleep(0.01)


def test_a_local_share_is_all_that_one_process_lets_through(store: Store) -> None:
    tiered = Limiter("40/hour token_bucket", name="local", store=f"tiered+{store.uri}&local=25")
    before = asked(store)
    assert sum(bool(tiered.hit("a")) for _ in range(200)) == 10
    assert asked(store) - before <= 12


def test_a_mistyped_option_is_told_all_that_there_are(store: Store) -> None:
    with pytest.raises(ConfigError, match="'flsh': expected local, lease, workers, flush, db, connections,? "):
        Limiter("5/hour", store=f"tiered+{store.uri}&flsh=10ms")


def test_a_lost_connection_and_a_moved_slot_end_what_was_remembered(store: Store) -> None:
    tiered = Limiter("2/hour", name="lost", store=f"tiered+{store.uri}")
    plain = Limiter("2/hour", name="lost", store=store.uri)
    assert [bool(tiered.hit("a")) for _ in range(3)] == [True, True, False]
    before = asked(store)
    assert not tiered.hit("a")
    assert asked(store) == before, "remembered"
    for one in store.servers:
        one("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for i in range(20):
        tiered.hit(f"other{i}")  # meets the closed connections
    plain.reset("a")
    assert tiered.hit("a")


def test_a_flush_reaches_the_nodes_that_answer_when_one_does_not() -> None:
    with cluster(timeout_ms=15_000) as some:
        rule = "1000/hour fixed_window"
        tiered = Limiter(rule, name="away", store=f"tiered+{some.uri}?timeout_ms=200&flush=300ms", on_store_failure="closed")
        plain = Limiter(rule, name="away", store=some.patient)
        lost, *well = names_on(1, 1) + names_on(0, 15) + names_on(2, 15)
        for who in [lost, *well]:
            while not tiered.hit(who):  # from here on it is known
                time.sleep(0.01)
        some.primaries[1].signal(signal.SIGSTOP)
        try:
            passed = {who: sum(bool(tiered.hit(who)) for _ in range(20)) for who in [lost, *well]}
            end = time.monotonic() + 5
            for who in well:
                while plain.peek(who).remaining != 999 - passed[who]:
                    assert time.monotonic() < end, "counted by those that answer"
                    time.sleep(0.01)
        finally:
            some.primaries[1].signal(signal.SIGCONT)
        assert all(count > 10 for count in passed.values())
