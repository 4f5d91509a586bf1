"""A real master, a replica and a sentinel that knows them, of our own. Must not enter: what is tested with it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import wait_for
from server import PROGRAM, Connection, Server, free_port


@dataclass
class Site:
    master: Server
    replica: Server
    port: int
    sentinel: subprocess.Popen[bytes]
    path: Path  # of the sentinel's socket

    def ask(self, *words: object) -> object:
        """Of the sentinel."""
        link = Connection(self.path)
        with contextlib.closing(link):
            return link(*words)

    @property
    def uri(self) -> str:
        # The first one is not there: another is asked.
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.port}/site"

    @property
    def patient(self) -> str:
        return f"{self.uri}?timeout_ms=2000"

    def keys(self) -> dict[str, int]:
        return self.master.keys()


@contextlib.contextmanager
def site(*, down_after_ms: int = 500) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="tg-sentinel-") as folder, contextlib.ExitStack() as open_ones:
        master = Server("--repl-diskless-sync-delay", "0", port=free_port())
        open_ones.callback(master.close)
        replica = Server("--repl-diskless-sync-delay", "0", port=free_port())
        open_ones.callback(replica.close)
        replica("REPLICAOF", "127.0.0.1", master.port)
        wait_for("a synchronised replica", lambda: b"master_link_status:up" in replica("INFO", "replication"))  # type: ignore[operator]
        port = free_port()
        config = Path(folder) / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\nunixsocket {folder}/sentinel\ndir {folder}\nlogfile {folder}/sentinel.log\n"
            f"sentinel monitor site 127.0.0.1 {master.port} 1\nsentinel down-after-milliseconds site {down_after_ms}\n"
            "sentinel failover-timeout site 3000\n"
        )
        assert PROGRAM
        sentinel = subprocess.Popen([PROGRAM, str(config), "--sentinel"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        open_ones.callback(sentinel.wait)
        open_ones.callback(sentinel.kill)

        def knows_replica() -> bool:
            link = Connection(f"{folder}/sentinel")
            with contextlib.closing(link):
                return len(link("SENTINEL", "REPLICAS", "site")) == 1  # type: ignore[arg-type]

        wait_for("a sentinel that knows the replica", knows_replica)
        yield Site(master, replica, port, sentinel, Path(folder) / "sentinel")
