"""Sentinels that are stopped, that are dead, and that have not heard: decisions go on, and a failover is found all the same. What one
sentinel that is well says is in test_redis_sentinel.py."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate import Decision, Limiter

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
import sentinel
from cluster import wait_for
from sentinel import Sentinel, Site
from server import Lateness, Server, free_port


CALL = 0.31  # the deadline of a prompt one, and 10 ms


@pytest.fixture
def site() -> Iterator[Site]:
    with sentinel.site() as one:
        yield one


@pytest.fixture
def three() -> Iterator[Site]:
    with sentinel.site(sentinels=3) as one:
        yield one


def end_connections(server: Server) -> None:
    """The clients' alone: what servers and sentinels have among themselves stays."""
    for line in server("CLIENT", "LIST", "TYPE", "normal").decode().splitlines():  # type: ignore[attr-defined]
        fields = dict(field.partition("=")[::2] for field in line.split())
        if "sentinel" not in fields["name"] and fields["cmd"] != "client|list":
            server("CLIENT", "KILL", "ID", fields["id"])


def decided(one: Limiter, late: Lateness, seconds: float, since: float | None = None) -> Decision:
    """Until one is; each within its deadline, and all within so many seconds."""
    began = since or time.monotonic()
    while True:
        asked = time.monotonic()
        decision = one.hit("a")
        assert late.allows(time.monotonic() - asked, CALL), "no call takes longer than its deadline and 10 ms"
        if not decision.degraded:
            return decision
        assert late.allows(time.monotonic() - began, seconds)
        time.sleep(0.005)


def test_a_sentinel_that_is_stopped_is_missed_by_nobody_who_has_a_connection(site: Site) -> None:
    one = Limiter("1000/hour", name="x", store=site.prompt)
    with Lateness() as late:
        left = decided(one, late, 5).remaining
        site.sentinels[0].process.send_signal(signal.SIGSTOP)
        decisions = [one.hit("a") for _ in range(200)]
        assert sum(decision.degraded for decision in decisions) <= (0 if late.worst < 0.02 else 5)
        assert decisions[-1].remaining == left - 200 or late.worst >= 0.02

        end_connections(site.master)
        for _ in range(20):
            asked = time.monotonic()
            assert one.hit("a").degraded, "nobody says where to"
            assert late.allows(time.monotonic() - asked, CALL)
        site.sentinels[0].process.send_signal(signal.SIGCONT)
        decided(one, late, 2)


def test_of_three_sentinels_one_may_be_silent_and_one_dead(three: Site) -> None:
    """Each new connection asks: the first answers nothing, the second is not there, the third tells."""
    three.sentinels[0].process.send_signal(signal.SIGSTOP)
    three.sentinels[1].close()
    one = Limiter("1000/hour", name="x", store=three.prompt)
    with Lateness() as late:
        for _ in range(5):
            end_connections(three.master)
            decided(one, late, 1)

        async def main() -> None:
            end_connections(three.master)
            began = time.monotonic()
            while (await one.hit_async("a")).degraded:
                assert late.allows(time.monotonic() - began, 1)

        asyncio.run(main())


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_sentinel_cut_off_for_good_that_names_a_dead_master_does_not_keep_anybody_from_the_others(
    site: Site, tmp_path: Path, tasks: bool
) -> None:
    gone = Server(port=free_port())
    gone.kill()
    stale = Sentinel(tmp_path, gone, 99, 60_000)
    try:
        wait_for("a sentinel that is wrong", lambda: stale.names(gone))
        one = Limiter("1000/hour", name="x", store=f"redis+sentinel://127.0.0.1:{stale.port},127.0.0.1:{site.port}/site?timeout_ms=300")
        with Lateness() as late:
            for _ in range(3):
                if not tasks:
                    decided(one, late, 2)
                else:
                    asyncio.run(decided_by_a_task(one, late))
                end_connections(site.master)
    finally:
        stale.close()
        gone.close()


async def decided_by_a_task(one: Limiter, late: Lateness) -> None:
    began = time.monotonic()
    while (await one.hit_async("a")).degraded:
        assert late.allows(time.monotonic() - began, 2)
        await asyncio.sleep(0.005)


def survives(three: Site, late: Lateness, before: Callable[[], None]) -> None:
    """A failover, once `before` has been done to the first sentinel: found within 2 s of the others saying where to."""
    one = Limiter("2000/hour", name="x", store=three.prompt)
    decided(one, late, 5)
    left = [one.hit("a").remaining for _ in range(50)][-1]
    wait_for("replication", lambda: three.replica.keys())
    time.sleep(0.1)
    before()
    three.master.kill()
    promoted = 0.0
    end = time.monotonic() + 25
    while True:
        asked = time.monotonic()
        decision = one.hit("a")
        assert late.allows(time.monotonic() - asked, CALL), "no call takes longer than its deadline and 10 ms"
        if not promoted and all(one.names(three.replica) for one in three.sentinels[1:]):
            promoted = time.monotonic()
        if not decision.degraded:
            break
        assert time.monotonic() < end
        time.sleep(0.01)
    assert three.replica("ROLE")[0] == b"master"  # type: ignore[index]
    assert not promoted or late.allows(time.monotonic() - promoted, 2.1), "recovery within 2 s"
    assert 1900 < decision.remaining < left, "what was used stays used"


def test_a_failover_is_found_by_a_set_of_which_one_is_dead(three: Site) -> None:
    with Lateness() as late:
        survives(three, late, three.sentinels[0].close)


def test_a_failover_is_found_while_one_is_stopped_and_that_one_leads_nobody_astray_when_it_goes_on(three: Site) -> None:
    first = three.sentinels[0].process
    with Lateness() as late:
        survives(three, late, lambda: first.send_signal(signal.SIGSTOP))
        one = Limiter("2000/hour", name="x", store=three.prompt)
        decided(one, late, 5)
        end_connections(three.replica)
        first.send_signal(signal.SIGCONT)  # it still names the one that is dead
        decided(one, late, 2)
        for _ in range(10):
            end_connections(three.replica)
            decided(one, late, 2)
    wait_for("a sentinel that has heard", lambda: three.sentinels[0].names(three.replica))
