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


class Sentinel:
    def __init__(self, folder: Path, master: Server, quorum: int, down_after_ms: int) -> None:
        assert PROGRAM
        self.port = free_port()
        self.path = folder / f"sentinel{self.port}"  # of its socket
        self.config = folder / f"sentinel{self.port}.conf"
        self.config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nunixsocket {self.path}\ndir {folder}\nlogfile {self.config}.log\n"
            f"sentinel monitor site 127.0.0.1 {master.port} {quorum}\n"
            f"sentinel down-after-milliseconds site {down_after_ms}\nsentinel failover-timeout site 3000\n"
        )
        self.process = subprocess.Popen([PROGRAM, str(self.config), "--sentinel"], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL)  # fmt: skip

    def __call__(self, *words: object) -> object:
        link = Connection(self.path)
        with contextlib.closing(link):
            return link(*words)

    def knows(self, others: int) -> bool:
        """The replica, and so many other sentinels that are well."""
        with contextlib.suppress(OSError):
            sentinels = self("SENTINEL", "SENTINELS", "site")
            replicas = self("SENTINEL", "REPLICAS", "site")
            return len(replicas) == 1 and len(sentinels) == others  # type: ignore[arg-type]
        return False

    def names(self, server: Server) -> bool:
        """As the master."""
        said = self("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "site")
        return said == [b"127.0.0.1", str(server.port).encode()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Site:
    master: Server
    replica: Server
    sentinels: list[Sentinel]

    def ask(self, *words: object) -> object:
        """Of the first sentinel."""
        return self.sentinels[0](*words)

    @property
    def port(self) -> int:
        return self.sentinels[0].port

    @property
    def uri(self) -> str:
        if len(self.sentinels) > 1:
            return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/site"
        # The first one is not there: another is asked.
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.port}/site"

    @property
    def prompt(self) -> str:
        """With a deadline that is to be kept, and enough of it for a busy machine to find the way within."""
        return f"{self.uri}?timeout_ms=300"

    @property
    def patient(self) -> str:
        return f"{self.uri}?timeout_ms=2000"

    def keys(self) -> dict[str, int]:
        return self.master.keys()


@contextlib.contextmanager
def site(*, down_after_ms: int = 500, sentinels: int = 1) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="tg-sentinel-") as folder, contextlib.ExitStack() as open_ones:
        master = Server("--repl-diskless-sync-delay", "0", port=free_port())
        open_ones.callback(master.close)
        replica = Server("--repl-diskless-sync-delay", "0", port=free_port())
        open_ones.callback(replica.close)
        replica("REPLICAOF", "127.0.0.1", master.port)
        wait_for("a synchronised replica", lambda: b"master_link_status:up" in replica("INFO", "replication"))  # type: ignore[operator]
        some = []
        for _ in range(sentinels):
            some.append(Sentinel(Path(folder), master, sentinels // 2 + 1, down_after_ms))
            open_ones.callback(some[-1].close)
        wait_for("sentinels that know the replica and each other", lambda: all(one.knows(sentinels - 1) for one in some))
        yield Site(master, replica, some)
