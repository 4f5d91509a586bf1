"""What happens to Redis while it is asked by threads that wait, or by tasks that do not: it is stopped, killed and restarted
empty, failed over by a sentinel, or a cluster's slots move. No exception, no call beyond its deadline, back within 2 s, and
counts that are exact but for the calls of which nobody knows."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
import sentinel
from cluster import Cluster, cluster, wait_for
from sentinel import Site
from server import MachineLateness, Server, server
from test_redis_cluster import Load, names_on, slot_of

NAMES = [f"name{i}" for i in range(12)]
CALL = 0.06  # the deadline of 50 ms, and 10
WAYS = pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """What a test before has left behind is closed by whoever finds it, in the midst of a call."""
    gc.collect()


@pytest.fixture
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture
def site() -> Iterator[Site]:
    with sentinel.site() as one:
        yield one


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster() as some:
        yield some


def calm(load: Load, late: MachineLateness, since: float) -> None:
    """Redis is back since then: 2 s later all calls are decided by it."""
    time.sleep(2.2)
    assert load.recovered(late, since), "recovery within 2 s"
    assert load.errors == []


def check(load: Load, store: str, decided_before: dict[str, int], unknown_before: int = 0, least: int = 200) -> None:
    """What Redis has counted is what it said, and at most once each what was not heard of."""
    used = load.used(store)
    unknown = load.unknown - unknown_before
    for name, count in used.items():
        decided = load.decided[name] - decided_before.get(name, 0)
        assert decided <= count <= decided + unknown, name
    decided = sum(load.decided.values()) - sum(decided_before.values())
    assert least < decided <= sum(used.values()) <= decided + unknown


@WAYS
def test_a_redis_that_stands_still_under_load_counts_each_hit_once_or_is_known_not_to_have_answered(
    redis: Server, tasks: bool
) -> None:
    with MachineLateness() as late, Load(redis.uri, NAMES, tasks=tasks) as load:
        time.sleep(0.3)
        redis.signal(signal.SIGSTOP)
        time.sleep(1)
        unknown = load.unknown
        redis.signal(signal.SIGCONT)
        calm(load, late, time.monotonic())
        assert unknown > 0, "by policy meanwhile"
    assert late.allows(load.slowest, CALL)
    check(load, redis.patient, {})


@WAYS
def test_a_redis_that_is_killed_under_load_and_comes_back_empty_counts_exactly_from_then_on(redis: Server, tasks: bool) -> None:
    with MachineLateness() as late, Load(redis.uri, NAMES, tasks=tasks) as load:
        time.sleep(0.3)
        redis.kill()
        time.sleep(1)
        decided, unknown = dict(load.decided), load.unknown
        assert unknown > 0, "by policy meanwhile"
        redis.start()
        calm(load, late, time.monotonic())
    assert late.allows(load.slowest, CALL)
    check(load, redis.patient, decided, unknown)


@WAYS
def test_slots_that_move_under_load_hold_up_no_call_beyond_its_deadline(three: Cluster, tasks: bool) -> None:
    """That none is lost where there is time to follow them is held by test_redis_cluster.py."""
    names = [name for part in range(3) for name in names_on(part, 4, "tasks" if tasks else "threads")]
    with MachineLateness() as late, Load(three.uri, names, tasks=tasks) as load:
        for there_and_back in (1, 0):
            for i, name in enumerate(names):
                three.move_slot(slot_of(name), three.primaries[(i // 4 + there_and_back) % 3])
    assert late.allows(load.slowest, CALL)
    check(load, three.patient, {}, least=60)


@pytest.mark.parametrize(("planned", "tasks"), [(False, False), (False, True), (True, True)],
                         ids=["killed-threads", "killed-tasks", "planned-tasks"])  # fmt: skip
def test_a_failover_by_a_sentinel_passes_under_load(site: Site, planned: bool, tasks: bool) -> None:
    with MachineLateness() as late, Load(site.uri, NAMES, tasks=tasks) as load:
        wait_for("replication", lambda: len(site.replica.keys()) == len(NAMES))
        time.sleep(0.3)
        if not planned:
            site.master.kill()

        def promoted() -> bool:
            """A sentinel cuts all connections of whoever it makes the master, ours too; on a busy machine it pauses and forgets."""
            if site.replica("ROLE")[0] == b"master":  # type: ignore[index]
                return True
            if planned:
                site.ask("SENTINEL", "FAILOVER", "site")  # "INPROG" is an error, and so not yet
            return False

        wait_for("a new master", promoted, 60)
        told = [b"127.0.0.1", b"%d" % site.replica.port]
        wait_for("its name", lambda: site.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "site") == told)
        calm(load, late, time.monotonic())
        assert planned or load.unknown > 0, "by policy meanwhile"
    assert late.allows(load.slowest, CALL)
    for name, used in load.used(site.patient).items():  # hits that had not travelled are lost
        assert 0 < used <= load.decided[name] + load.unknown, name
    with Load(site.patient, [f"after{i}" for i in range(12)], tasks=tasks) as load:
        time.sleep(0.5)
    assert load.unknown == 0
    check(load, site.patient, {})
