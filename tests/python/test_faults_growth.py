"""Faults of docs/faults.md about state that grows: without bound, or until it forgets those whom it should hold back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tidegate import Limiter, ManualClock, RuleError

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Server, server  # noqa: E402

LONG = os.environ.get("TIDEGATE_LONG") == "1"


def resident_bytes() -> int:
    """Of its own: the table's pages are bounded by its file, and those of programs come and go as the machine has room."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1]) * 1024


@pytest.mark.fault("R92")
def test_ever_new_keys_take_no_more_memory_than_the_table_and_free_nobody_who_is_held(tmp_path: Path) -> None:
    size, keys = ("64MiB", 5_000_000) if LONG else ("8MiB", 600_000)
    path = tmp_path / "table"
    limiter = Limiter("1/minute", store=f"shared://{path}?size={size}", clock=ManualClock())
    held = [f"held-{number}" for number in range(1000)]
    for key in held:
        assert limiter.hit(key).allowed
    before, bytes_ = resident_bytes(), path.stat().st_size
    for number in range(keys):
        limiter.hit(f"new-{number}")
    assert [key for key in held if limiter.hit(key).allowed] == []
    assert path.stat().st_size == bytes_
    assert resident_bytes() - before < 4 << 20


# ---- keys for ever


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.mark.fault("R97")
@pytest.mark.parametrize("rules", ["5/0s", "5/0", "5", "5 per 0 minutes", "5/0ms"])
def test_a_limit_without_a_duration_is_refused_when_it_is_made(rules: str) -> None:
    with pytest.raises(RuleError):
        Limiter(rules, store="memory://growth")


@pytest.mark.fault("R97")
@pytest.mark.parametrize(
    "algorithm", ["fixed_window", "fixed_window aligned", "sliding_log", "sliding_log resolution 1s", "sliding_counter",
                  "token_bucket", "leaky_bucket"],
)  # fmt: skip
def test_no_operation_leaves_a_key_in_redis_without_an_expiry(redis: Server, algorithm: str) -> None:
    redis("FLUSHALL")
    limiter = Limiter(f"3/minute {algorithm}", name="all", store=redis.patient)
    decision = limiter.hit("a")
    decision.refund()
    for _ in range(5):
        limiter.hit("a", cost=1)
    limiter.hit("b", cost=2)
    limiter.hit("c", cost=0)
    limiter.peek("a")
    limiter.peek("never")
    limiter.refund("a", cost=2)
    limiter.refund("never", cost=1)
    limiter.hit("d", cost=9)
    limiter.reset("b")
    limiter.wait("e", timeout=0.0)
    expiries = {key: expiry for key, expiry in redis.keys().items() if key != "tg1:secret"}
    assert expiries
    assert {key: expiry for key, expiry in expiries.items() if expiry < 0} == {}
