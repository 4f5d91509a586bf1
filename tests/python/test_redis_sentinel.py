"""redis+sentinel://: the master is asked for with each new connection and its role is looked at; a failover is survived."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidegate import ConfigError, Limiter

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import PROGRAM, Connection, Lateness, ReplyError, Server, free_port


@dataclass
class Site:
    master: Server
    replica: Server
    port: int
    sentinel: subprocess.Popen[bytes]

    @property
    def uri(self) -> str:
        # The first one is not there: another is asked.
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.port}/site"

    @property
    def patient(self) -> str:
        return f"{self.uri}?timeout_ms=2000"


def wait_for(what: str, holds: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, ReplyError):
            if holds():  # type: ignore[operator]
                return
        assert time.monotonic() < end, f"{what}: not in {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    master = Server("--repl-diskless-sync-delay", "0", port=free_port())
    replica = Server("--repl-diskless-sync-delay", "0", port=free_port())
    replica("REPLICAOF", "127.0.0.1", master.port)
    wait_for("a synchronised replica", lambda: b"master_link_status:up" in replica("INFO", "replication"))
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nunixsocket {tmp_path}/sentinel\ndir {tmp_path}\nlogfile {tmp_path}/sentinel.log\n"
        f"sentinel monitor site 127.0.0.1 {master.port} 1\nsentinel down-after-milliseconds site 500\n"
        "sentinel failover-timeout site 3000\n"
    )
    assert PROGRAM
    sentinel = subprocess.Popen([PROGRAM, str(config), "--sentinel"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def knows_replica() -> bool:
        link = Connection(tmp_path / "sentinel")
        with contextlib.closing(link):
            return len(link("SENTINEL", "REPLICAS", "site")) == 1  # type: ignore[arg-type]

    try:
        wait_for("a sentinel that knows the replica", knows_replica)
        yield Site(master, replica, port, sentinel)
    finally:
        sentinel.kill()
        sentinel.wait()
        replica.close()
        master.close()


def test_a_failover_is_survived_with_the_counts_that_had_travelled(site: Site) -> None:
    with Lateness() as late:
        fail_over(site, late)


def fail_over(site: Site, late: Lateness) -> None:
    one = Limiter("20/hour", name="x", store=site.uri)
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
        if not promoted and site.replica("ROLE")[0] == b"master":  # type: ignore[index]
            promoted = time.monotonic()
        if not decision.degraded:
            break
        assert time.monotonic() < end
        time.sleep(0.01)
    assert late.allows(slowest, 0.06), "no call takes longer than its deadline and 10 ms"
    assert promoted and late.allows(time.monotonic() - promoted, 2.2)
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
    one = Limiter("50/hour", name="x", store=f"redis+sentinel://127.0.0.1:{site.port}/other")
    assert one.hit("a").degraded
    assert "does not know this master" in caplog.text
    with pytest.raises(ConfigError, match="names the master"):
        Limiter("50/hour", name="x", store=f"redis+sentinel://127.0.0.1:{site.port}")
