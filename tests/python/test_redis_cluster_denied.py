"""`count_denied: true` on redis+cluster://: what one slot refuses counts in the others too. The numbers are those of a table, which
test_count_denied.py holds to the reference."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tidegate import Gate, ManualClock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "reference"), str(TESTS / "redis")]
from cluster import Cluster, cluster
from test_count_denied import ALGORITHMS, rule_of
from test_redis_cluster import slot_of


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster() as some:
        yield some


POLICIES = """
policies:
  - {{name: first, rules: "{}", by: [ip, user], count_denied: true}}
  - {{name: second, rules: "{}", by: ["header:x-key"], match: {{path: /both}}, also: true, count_denied: {}}}
"""


class Site:
    def __init__(self, folder: Path, rules: tuple[str, str], both: bool, store: str, clock: ManualClock | None) -> None:
        path = folder / "rules.yaml"
        path.write_text(POLICIES.format(*rules, str(both).lower()))
        self.gate = Gate(path, store=store, **({"clock": clock} if clock else {}))

    def environ(self, path: str, peer: int, key: int) -> dict[str, Any]:
        return {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": f"192.0.2.{peer}", "HTTP_X_KEY": f"k{key}"}

    def ask(self, path: str, peer: int, user: int, key: int, cost: int) -> Any:
        return self.gate.judge_wsgi(self.environ(path, peer, key), user=f"u{user}", cost=cost).decision

    async def ask_async(self, path: str, peer: int, user: int, key: int, cost: int) -> Any:
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"x-key", f"k{key}".encode())], "client": (f"192.0.2.{peer}", 1),
        }  # fmt: skip
        judged = await self.gate.judge_asgi_async(scope, user=f"u{user}", cost=cost)
        return judged.decision


def told(decision: Any) -> list[object]:
    assert not decision.degraded
    one = [bool(decision), decision.remaining, decision.retry_after_us, decision.reset_after_us]
    return one + [(rule.allowed, rule.remaining, rule.retry_after, rule.reset_after) for rule in decision.rules]


def steps(seed: int, count: int) -> Iterator[tuple[float, tuple[str, int, int, int, int]]]:
    draw = random.Random(f"denied {seed}")
    for _ in range(count):
        asked = (draw.choice(["/", "/both"]), draw.randrange(3), draw.randrange(3), draw.randrange(3), draw.choice([1, 1, 2, 3]))
        yield draw.choice([0, 0, 0.000001, 0.2, 0.5, 3]), asked


def rules(seed: int) -> tuple[str, str]:
    draw = random.Random(seed)
    return rule_of(draw)[1], rule_of(draw)[1]


@pytest.mark.fault("R13")
@pytest.mark.parametrize("seed", range(12))
def test_denied_hits_over_several_slots_count_as_on_a_table(tmp_path: Path, three: Cluster, seed: int) -> None:
    for one in three.primaries:
        one("FLUSHALL")
    clock = ManualClock(now_us=1_700_000_000_000_000)
    chosen, both = rules(seed), seed % 3 > 0
    here = Site(tmp_path, chosen, both, f"memory://denied-{seed}", clock)
    there = Site(tmp_path, chosen, both, three.patient, clock)
    denied = 0
    for i, (wait, asked) in enumerate(steps(seed, 150)):
        clock.advance(wait)
        expected = told(here.ask(*asked))
        denied += not expected[0]
        assert told(there.ask(*asked)) == expected, f"step {i}: {chosen} {asked}"
    assert denied > 5
    assert -1 not in three.keys().values(), "no key without an expiry"


@pytest.mark.fault("R13")
@pytest.mark.parametrize("seed", range(12, 24))
def test_on_a_loop_they_count_too(tmp_path: Path, three: Cluster, seed: int) -> None:
    for one in three.primaries:
        one("FLUSHALL")
    clock = ManualClock(now_us=1_700_000_000_000_000)
    chosen, both = rules(seed), seed % 3 > 0
    here = Site(tmp_path, chosen, both, f"memory://denied-{seed}", clock)
    there = Site(tmp_path, chosen, both, three.patient, clock)

    async def main() -> None:
        for i, (wait, asked) in enumerate(steps(seed, 150)):
            clock.advance(wait)
            assert told(await there.ask_async(*asked)) == told(here.ask(*asked)), f"step {i}: {chosen} {asked}"

    uvloop.run(main())


def address_on(part: int) -> int:
    return next(peer for peer in range(1, 200) if slot_of(f"ip=192.0.2.{peer}") * 3 // 16384 == part)


def user_on(part: int, but: int = -1) -> int:
    return next(user for user in range(1000) if user != but and slot_of(f"user=u{user}") * 3 // 16384 == part)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_node_that_is_away_does_not_count_and_the_denial_stands(tmp_path: Path, three: Cluster, algorithm: str) -> None:
    """What docs/redis.md calls inexact. Its slots may still be looked at: only the writing is refused."""
    for one in three.primaries:
        one("FLUSHALL")
    site = Site(tmp_path, (f"3/hour {algorithm}", "9/hour"), False, three.patient, None)
    peer, user, other = address_on(0), user_on(2), user_on(1)
    assert [bool(site.ask("/", peer, other, 0, 1)) for _ in range(3)] == [True] * 3  # of the address nothing is left
    three.primaries[2]("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        decision = site.ask("/", peer, user, 0, 1)
        assert not decision and not decision.degraded
    finally:
        three.primaries[2]("CONFIG", "SET", "min-replicas-to-write", 0)
    decision = site.ask("/", peer, user, 0, 1)
    assert not decision and [rule.remaining for rule in decision.rules] == [0, 2], "counted where it could be"


def test_knocks_from_many_threads_are_each_counted(tmp_path: Path, three: Cluster) -> None:
    for one in three.primaries:
        one("FLUSHALL")
    site = Site(tmp_path, ("200/hour fixed_window", "9/hour"), False, three.patient, None)
    peer, first, user = address_on(1), user_on(0), user_on(2)
    assert site.ask("/", peer, first, 0, 200)  # all of the address

    def knock() -> None:
        for _ in range(30):
            decision = site.ask("/", peer, user, 0, 1)
            assert not decision and not decision.degraded

    threads = [threading.Thread(target=knock) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rule.remaining for rule in site.ask("/", peer, user, 0, 0).rules] == [0, 200 - 4 * 30]


def test_a_request_that_was_given_back_in_one_slot_counts_there_once(tmp_path: Path, three: Cluster) -> None:
    """Two who share a slot race for its last unit: the one that loses has charged its own slot, and gets that back, and counts."""
    for one in three.primaries:
        one("FLUSHALL")
    site = Site(tmp_path, ("60/hour fixed_window", "9/hour"), False, three.patient, None)
    peer, users = address_on(2), [user_on(0), user_on(0, but=user_on(0))]
    passed = [0, 0]

    def hit(i: int) -> None:
        for _ in range(50):
            passed[i] += bool(site.ask("/", peer, users[i], 0, 1))

    threads = [threading.Thread(target=hit, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(passed) == 60
    for user in users:
        assert site.ask("/", peer, user, 0, 0).rules[1].remaining == 10, "each of fifty requests counts once"
