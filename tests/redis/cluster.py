"""A real cluster of redis-servers of our own, on loopback ports, with a replica for each primary where asked.

Must not enter: what is tested with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from server import ReplyError, Server, free_port

SLOTS = 16384


def wait_for(what: str, holds: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, ReplyError):
            if holds():
                return
        assert time.monotonic() < end, f"{what}: not in {seconds} s"
        time.sleep(0.02)


class Cluster:
    """`primaries[i]` begins with the i-th part of the slots, and `replicas[i]`, where there are any, follows it."""

    def __init__(self, primaries: int = 3, *, replicas: bool = False, timeout_ms: int = 1500,
                 tls: list[str] | None = None) -> None:  # fmt: skip
        self.tls = tls
        self.primaries: list[Server] = []
        self.replicas: list[Server] = []
        try:
            self.begin(primaries, replicas, timeout_ms)
        except BaseException:
            self.close()
            raise

    def begin(self, primaries: int, replicas: bool, timeout_ms: int) -> None:
        for i in range(primaries * (2 if replicas else 1)):
            secured = ["--tls-port", str(free_port()), "--tls-cluster", "yes", "--tls-replication", "yes", *self.tls] if self.tls else []
            one = Server(
                *secured,
                "--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", str(timeout_ms),
                "--cluster-config-file", "nodes", "--repl-diskless-sync-delay", "0", "--cluster-migration-barrier", "100",
                port=free_port(),
            )  # fmt: skip
            (self.primaries if i < primaries else self.replicas).append(one)
        first = self.nodes[0]
        bus = first.options[first.options.index("--cluster-port") + 1]
        for i, one in enumerate(self.nodes):
            one("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            if i < primaries:
                one("CLUSTER", "ADDSLOTSRANGE", i * SLOTS // primaries, (i + 1) * SLOTS // primaries - 1)
            if i > 0:
                one("CLUSTER", "MEET", "127.0.0.1", self.bus_port(first), bus)
        for primary, replica in zip(self.primaries, self.replicas):
            identity = primary("CLUSTER", "MYID")
            wait_for("a replica that knows its primary", lambda: replica("CLUSTER", "REPLICATE", identity))
        for replica in self.replicas:
            wait_for("a synchronised replica", lambda: b"master_link_status:up" in replica("INFO", "replication"))  # type: ignore[operator]
        self.wait()

    def bus_port(self, one: Server) -> object:
        """The port that nodes know each other by."""
        return one.options[one.options.index("--tls-port") + 1] if self.tls else one.port

    @property
    def tls_uri(self) -> str:
        return "rediss+cluster://" + ",".join(f"127.0.0.1:{self.bus_port(one)}" for one in self.nodes[:8])

    @property
    def nodes(self) -> list[Server]:
        return [*self.primaries, *self.replicas]

    @property
    def running(self) -> list[Server]:
        return [one for one in self.nodes if one.process]

    @property
    def uri(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.nodes[:8])

    @property
    def patient(self) -> str:
        """For tests that ask about numbers and not about time: a busy machine is no fault."""
        return f"{self.uri}?timeout_ms=2000"

    def wait(self) -> None:
        known = f"cluster_known_nodes:{len(self.nodes)}\r".encode()

        def is_up() -> bool:
            said = [one("CLUSTER", "INFO") for one in self.running]
            return all(b"cluster_state:ok" in one and known in one for one in said)  # type: ignore[operator]

        wait_for("a cluster that is up", is_up)

    def owner(self, slot: int) -> Server:
        """As the first running node sees it."""
        for first, last, primary, *_ in self.running[0]("CLUSTER", "SLOTS"):  # type: ignore[attr-defined]
            if first <= slot <= last:
                return next(one for one in self.nodes if one.port == primary[1])
        raise AssertionError(f"nobody serves slot {slot}")

    def move_slot(self, slot: int, to: Server) -> None:
        """As redis-cli's --cluster reshard does it, keys and all."""
        source = self.owner(slot)
        if source is to:
            return
        there, here = source("CLUSTER", "MYID"), to("CLUSTER", "MYID")
        to("CLUSTER", "SETSLOT", slot, "IMPORTING", there)
        source("CLUSTER", "SETSLOT", slot, "MIGRATING", here)
        while keys := source("CLUSTER", "GETKEYSINSLOT", slot, 10):
            source("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)  # type: ignore[misc]
        for one in (to, source):
            one("CLUSTER", "SETSLOT", slot, "NODE", here)

    def keys(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self.primaries:
            found |= one.keys()
        return found

    def close(self) -> None:
        for one in self.nodes:
            one.close()


@contextlib.contextmanager
def cluster(primaries: int = 3, *, replicas: bool = False, timeout_ms: int = 1500) -> Iterator[Cluster]:
    some = Cluster(primaries, replicas=replicas, timeout_ms=timeout_ms)
    try:
        yield some
    finally:
        some.close()
