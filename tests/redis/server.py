"""A real redis-server of our own: in a folder of its own, on a unix socket and, where asked, on a loopback port.

Must not enter: what is tested with it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAM = os.environ.get("TIDEGATE_REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")


class ReplyError(Exception):
    pass


def unserved(schedstat: str | Path) -> float:
    """Seconds for which that thread was ready and had no processor, so far; where the kernel does not tell: 0."""
    try:
        with open(schedstat, "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


class Lateness:
    """What a busy machine adds to every wait: how much too late a thread woke that wanted to sleep a millisecond, and for how
    long the thread that asks was kept from the processor by others."""

    def __enter__(self) -> Lateness:
        self.worst = 0.0
        self.schedstat = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self.unserved = [(time.monotonic(), unserved(self.schedstat))]
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.over.is_set():
            began = time.monotonic()
            time.sleep(0.001)
            now = time.monotonic()
            self.worst = max(self.worst, now - began - 0.001)
            self.unserved.append((now, unserved(self.schedstat)))

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def allows(self, took: float, most: float) -> bool:
        """Whether `took` seconds are at most `most`, but for what the machine was late."""
        if took <= most:
            return True
        time.sleep(0.02)  # whoever watches has to wake first
        late = 3 * self.worst
        return took <= most + late or took <= most + late + self.kept(took)

    def seen(self) -> list[tuple[float, float]]:
        """When, and the seconds for which the thread had been kept from the processor until then."""
        return list(self.unserved)

    def kept(self, took: float) -> float:
        """The most of them in any stretch as long as that."""
        most, first, seen = 0.0, 0, self.seen()
        for now, until_then in seen:
            while first + 1 < len(seen) and seen[first + 1][0] <= now - took:
                first += 1
            most = max(most, until_then - seen[first][1])
        return most


SAMPLES = 1 << 15
WATCHER = f"""
import mmap, os, struct, sys, time
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 0)
parent, at = os.getppid(), 0
try:
    stat = os.open(f"/proc/{{parent}}/task/{{parent}}/schedstat", os.O_RDONLY)
except OSError:
    stat = -1
while os.getppid() == parent:
    began = time.monotonic()
    time.sleep(0.001)
    now = time.monotonic()
    kept = int(os.pread(stat, 80, 0).split()[1]) / 1e9 if stat >= 0 else 0.0
    struct.pack_into("ddd", shared, 16 + at % {SAMPLES} * 24, now, now - began - 0.001, kept)
    at += 1
    struct.pack_into("q", shared, 0, at)
"""


class MachineLateness(Lateness):
    """The same from another process, of this one's main thread. A thread of this one needs the interpreter's lock as well, and
    so excuses whoever keeps that, or a loop, from others: where that is what is looked for, nothing but the machine may be an
    excuse."""

    _shared: mmap.mmap | None = None

    def __enter__(self) -> MachineLateness:
        if MachineLateness._shared is None:
            with tempfile.NamedTemporaryFile(prefix="tg-late-") as file:
                file.truncate(16 + SAMPLES * 24)
                MachineLateness._shared = mmap.mmap(file.fileno(), 0)
                quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
                command = [sys.executable, "-I", "-S", "-c", WATCHER, file.name]
                os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet)  # it ends with this process
                while self.samples() == 0:
                    time.sleep(0.001)
        self.since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def samples(self) -> int:
        assert MachineLateness._shared
        return int(struct.unpack_from("q", MachineLateness._shared, 0)[0])

    def numbers(self) -> list[tuple[float, float, float]]:
        """Since it was entered, in order: when, how late, and for how long kept from the processor until then."""
        assert MachineLateness._shared
        count = self.samples()
        numbers = struct.iter_unpack("ddd", MachineLateness._shared[16 : 16 + min(count, SAMPLES) * 24])
        return sorted(number for number in numbers if number[0] >= self.since)  # type: ignore[type-var]

    @property
    def worst(self) -> float:  # type: ignore[override]
        return max([late for _, late, _ in self.numbers()], default=0.0)

    def seen(self) -> list[tuple[float, float]]:
        return [(at, kept) for at, _, kept in self.numbers()]


class Connection:
    """As much of RESP2 as tests need, so that they share no code with what they test."""

    def __init__(self, path: str | Path, timeout: float = 5.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rb")

    def send(self, *words: object) -> None:
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.socket.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))

    def receive(self) -> object:
        line = self.file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return ReplyError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self.file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self.receive() for _ in range(int(rest))]
        raise ConnectionError(f"not RESP: {line!r}")

    def __call__(self, *words: object) -> object:
        self.send(*words)
        reply = self.receive()
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def close(self) -> None:
        self.file.close()
        self.socket.close()


PORTS = range(20000, 32000)  # below those that the kernel gives to whoever connects or wants any
_tried = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """Nobody's now, and nobody's either when it is used, or used again: a process begins at a place of its own."""
    for number in itertools.islice(_tried, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", PORTS[number % len(PORTS)]))
            return PORTS[number % len(PORTS)]
    raise AssertionError("no port is free")


class Server:
    def __init__(self, *options: str, port: int = 0, folder: Path | None = None, program: str | None = PROGRAM) -> None:
        self.program = program
        self.options = options
        self.port = port
        self.folder = folder or Path(tempfile.mkdtemp(prefix="tg-redis-"))
        self.path = self.folder / "s"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def uri(self) -> str:
        return f"redis+unix://{self.path}"

    @property
    def patient(self) -> str:
        """For tests that ask about numbers and not about time: a busy machine is no fault."""
        return f"{self.uri}?timeout_ms=2000"

    @property
    def tcp(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self, *more: str) -> None:
        assert self.program, "redis-server is not installed"
        self.path.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.path), "--save", "",
             "--dir", str(self.folder), "--logfile", str(self.folder / "log"), *self.options, *more],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ConnectionError, ReplyError):
                link = Connection(self.path)
                link.send("PING")
                link.receive()  # also an error is an answer: it may want a password
                link.close()
                return
            time.sleep(0.01)
        raise TimeoutError((self.folder / "log").read_text(errors="replace"))

    def connect(self) -> Connection:
        return Connection(self.path)

    def __call__(self, *words: object) -> object:
        link = self.connect()
        try:
            return link(*words)
        finally:
            link.close()

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def keys(self) -> dict[str, int]:
        """Every key that counts somebody and its PTTL: neither the secret nor what is kept for operators."""
        link = self.connect()
        names = [name for name in link("KEYS", "*") if name != b"tg1:secret" and b"{tidegate}" not in name]  # type: ignore[attr-defined]
        found = {name.decode(): link("PTTL", name) for name in names}
        link.close()
        return {name: left for name, left in found.items() if left != -2}  # type: ignore[misc]


@contextlib.contextmanager
def server(*options: str, port: int = 0) -> Iterator[Server]:
    one = Server(*options, port=port)
    try:
        yield one
    finally:
        one.close()
