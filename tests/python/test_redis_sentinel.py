"""redis+sentinel://: the master is asked for with each new connection and its role is looked at; a failover is survived."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate import ConfigError, Decision, Limiter

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
import sentinel
from cluster import wait_for
from sentinel import Site
from server import Lateness, Server, free_port


@pytest.fixture
def site() -> Iterator[Site]:
    with sentinel.site() as one:
        yield one


def test_a_failover_is_survived_with_the_counts_that_had_travelled(site: Site) -> None:
    with Lateness() as late:
        fail_over(site, late)


def fail_over(site: Site, late: Lateness) -> None:
    one = Limiter("20/hour", name="x", store=site.prompt)
    while one.hit("warm").degraded:
        pass  # a busy machine may need more than one deadline to find its way
    assert [one.hit("a").remaining for _ in range(10)] == list(range(19, 9, -1))
    wait_for("replication", lambda: len(site.replica.keys()) == 2)
    time.sleep(0.1)
    site.master.kill()
    slowest = 0.0
    end = time.monotonic() + 20
    promoted = 0.0
    while True:
        began = time.monotonic()
        decision = one.hit("a")
        slowest = max(slowest, time.monotonic() - began)
        # Its role is another some time before the sentinel, which looks once a second, tells anybody.
        if not promoted and site.sentinels[0].names(site.replica):
            promoted = time.monotonic()
        if not decision.degraded:
            break
        assert time.monotonic() < end
        time.sleep(0.01)
    assert late.allows(slowest, 0.31), "no call takes longer than its deadline and 10 ms"
    assert not promoted or late.allows(time.monotonic() - promoted, 2.2)
    assert decision.remaining in (8, 9), "what was used stays used; a call that was late may have been counted"

    # The old master comes back, empty and sure that it is one: nobody goes there.
    site.master.start()
    left = decision.remaining
    for _ in range(4):
        decision = one.hit("a")
        if not decision.degraded:  # only a busy machine makes it so
            assert decision.remaining < left
            left = decision.remaining
    assert left < 9
    assert not site.master.keys() or site.master("ROLE")[0] == b"slave"  # type: ignore[index]


def test_a_demoted_master_is_left_at_its_first_refused_write(site: Site) -> None:
    one = Limiter("50/hour", name="x", store=site.patient)
    one.hit("a")
    site.replica("REPLICAOF", "NO", "ONE")
    site.master("REPLICAOF", "127.0.0.1", site.replica.port)
    assert one.hit("a").degraded, "READONLY"
    decided = [one.hit("a") for _ in range(3)]
    assert all(decision.degraded for decision in decided), "the sentinel still names it, and its role says no"


def test_a_master_that_no_sentinel_knows_is_told(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    one = Limiter("50/hour", name="x", store=f"redis+sentinel://127.0.0.1:{site.port}/other?timeout_ms=2000")
    assert one.hit("a").degraded
    assert "does not know this master" in caplog.text
    with pytest.raises(ConfigError, match="names the master"):
        Limiter("50/hour", name="x", store=f"redis+sentinel://127.0.0.1:{site.port}")


def test_a_server_where_a_sentinel_is_named_is_an_error_when_no_sentinel_knows_better(site: Site) -> None:
    server, nobody = f"127.0.0.1:{site.master.port}", f"127.0.0.1:{free_port()}"
    for hosts in (server, f"{server},{nobody}", f"{nobody},{server}", f"{server},127.0.0.1:{site.port}/other"):
        uri = f"redis+sentinel://{hosts}" + ("" if "/" in hosts else "/site") + "?timeout_ms=2000"
        with pytest.raises(ConfigError, match=f"sentinel {server} is no sentinel .redis:// is for a server.: ERR unknown"):
            Limiter("50/hour", name="x", store=uri)
    one = Limiter("50/hour", name="x", store=f"redis+sentinel://{server},127.0.0.1:{site.port}/site?timeout_ms=2000")
    assert not one.hit("a").degraded, "another one tells"


def test_a_sentinel_that_wants_a_password_is_an_error_and_one_that_is_not_there_is_none(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.ask("ACL", "SETUSER", "default", "resetpass", ">s3cret")
    with pytest.raises(ConfigError, match="refuses to say: NOAUTH"):
        Limiter("50/hour", name="x", store=site.patient)
    one = Limiter("50/hour", name="x", store=f"redis+sentinel://127.0.0.1:{free_port()}/site")
    assert one.hit("a").degraded
    assert "store-failing" in caplog.text and "is not reached" in caplog.text


def test_a_sentinel_that_becomes_none_while_running_is_trouble_of_the_store_and_raises_nothing(site: Site) -> None:
    sentinel, server = site.sentinels[0], None
    one = Limiter("50/hour", name="x", store=f"redis+sentinel://127.0.0.1:{sentinel.port}/site?timeout_ms=2000")
    assert not one.hit("a").degraded
    sentinel.close()
    try:
        server = Server(port=sentinel.port)
        site.master("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert one.hit("a").degraded
        assert asyncio.run(asked_on_a_loop(one)).degraded
    finally:
        if server:
            server.close()


async def asked_on_a_loop(one: Limiter) -> Decision:
    return await one.hit_async("a")
