"""`count_denied: true`: what is refused counts too. The definition stands in docs/rules-file.md, the numbers in
tests/reference/model.py."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tidegate import Gate, ManualClock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "reference"), str(TESTS / "redis")]
from model import Rule, Table  # noqa: E402
from server import Server, server  # noqa: E402

ALGORITHMS = ["fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket"]


class Site:
    """One policy behind a clock that only the test moves."""

    def __init__(self, folder: Path, rules: str, store: str) -> None:
        self.clock = ManualClock(now_us=1_700_000_000_000_000)
        path = folder / "rules.yaml"
        path.write_text(f"policies: [{{name: a, rules: '{rules}', count_denied: true}}]\n")
        self.gate = Gate(path, store=store, clock=self.clock)

    def ask(self, cost: int = 1, peer: str = "192.0.2.1") -> Any:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": peer}
        return self.gate.judge_wsgi(environ, cost=cost).decision


def rule_of(chance: random.Random) -> tuple[Rule, str]:
    algorithm = chance.choice(ALGORITHMS)
    limit, seconds = chance.randint(1, 6), chance.randint(1, 20)
    burst = chance.randint(1, 8) if "bucket" in algorithm else None
    resolution = chance.choice([0, 0, 500_000]) if algorithm == "sliding_log" else 0
    aligned = algorithm == "fixed_window" and chance.random() < 0.3
    rule = Rule(limit, seconds * 1_000_000, algorithm, burst, aligned, resolution)
    text = f"{limit}/{seconds}s {algorithm}"
    return rule, (text + (f" burst {burst}" if burst else "") + (" resolution 500ms" if resolution else "")
                  + (" aligned" if aligned else ""))  # fmt: skip


def same_as_the_reference(site: Callable[[str], Site], seed: int, steps: int) -> None:
    chance = random.Random(seed)
    chosen: dict[tuple[str, int], tuple[Rule, str]] = {}
    for _ in range(chance.randint(1, 3)):
        made = rule_of(chance)
        chosen.setdefault((made[0].algorithm, made[0].period_us), made)
    rules = [rule for rule, _ in chosen.values()]
    one = site("; ".join(text for _, text in chosen.values()))
    table = Table()
    wait = 0
    for step in range(steps):
        cost = chance.choice([1, 1, 1, 2, 3])
        decision = one.ask(cost)
        told = table.hit_counting_denied([(rule, "x") for rule in rules], one.clock.now_us, cost)
        assert (decision.allowed, decision.remaining, decision.retry_after_us, decision.degraded) == (
            told.allowed, told.remaining, told.retry_after_us, False,
        ), f"seed {seed}, step {step}"  # fmt: skip
        wait = decision.retry_after_us or wait
        one.clock.advance_us(chance.choice([0, 1, 999_999, 1_000_000, wait, max(wait - 1, 0), 7_000_000]))


@pytest.mark.fault("R13")
@pytest.mark.parametrize("seed", range(40))
def test_denied_hits_that_count_equal_the_reference(tmp_path: Path, seed: int) -> None:
    same_as_the_reference(lambda rules: Site(tmp_path, rules, f"memory://count-denied-{seed}"), seed, 250)


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.mark.fault("R13")
@pytest.mark.parametrize("tiers", ["", "tiered+"])
@pytest.mark.parametrize("seed", range(40, 60))
def test_denied_hits_that_count_in_redis_equal_the_reference(tmp_path: Path, redis: Server, seed: int, tiers: str) -> None:
    redis("FLUSHALL")
    same_as_the_reference(lambda rules: Site(tmp_path, rules, tiers + redis.patient), seed, 150)


def test_who_knocks_at_redis_for_long_takes_no_more_room_there_and_leaves_no_key_without_an_expiry(
    tmp_path: Path, redis: Server
) -> None:
    redis("FLUSHALL")
    site = Site(tmp_path, "20/hour sliding_log", redis.patient)
    for _ in range(500):
        site.ask()
        site.clock.advance_us(1000)
    ((key, expires),) = [(key, expires) for key, expires in redis.keys().items() if ":{" in key]
    assert int(redis("LLEN", key)) <= 22  # type: ignore[call-overload]
    assert expires != -1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_clients_are_not_held_by_somebody_who_knocks(tmp_path: Path, algorithm: str) -> None:
    site = Site(tmp_path, f"2/hour {algorithm}", f"memory://count-denied-{algorithm}")
    for _ in range(50):
        site.ask()
    assert [site.ask(peer="192.0.2.2").allowed for _ in range(3)] == [True, True, False]


def test_a_full_table_still_holds_who_knocks(tmp_path: Path) -> None:
    site = Site(tmp_path, "1/hour sliding_log", f"shared://{tmp_path}/table?size=64KiB")
    for number in range(3000):
        site.ask(peer=f"10.0.{number // 250}.{number % 250}")
    for _ in range(20):
        assert not site.ask(peer="10.0.0.1").allowed  # in an entry of its own, or in a bucket that it shares
    site.clock.advance(3599)
    assert not site.ask(peer="10.0.0.1").allowed
    site.clock.advance(3600)
    assert site.ask(peer="10.0.0.1").allowed

