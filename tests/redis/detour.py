"""A way to a real server that takes its time, and knows when a decision has been answered.

Must not enter: what is tested with it; answers of its own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from server import Server


BROKEN = 120  # bytes: to break all that is said at the start takes a busy machine longer than anybody waits


class Detour:
    """Stands in front of a server that has a port. `delay` is in seconds, before each piece of an answer is passed on;
    `bytes_at_once`, if not 0, breaks its beginning, more than a decision takes, into smaller ones; `answered` is called with
    how many decisions have been answered, before that is passed on."""

    def __init__(self, to: Server) -> None:
        self.to = to
        self.delay = 0.0
        self.bytes_at_once = 0
        self.decisions = 0
        self.answered: Callable[[int], None] = lambda count: None
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listening.getsockname()[1])
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self.accept, daemon=True).start()

    @property
    def uri(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.to.port))
                self.sockets += [near, far]
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                asked = threading.Event()
                threading.Thread(target=self.ask, args=(near, far, asked), daemon=True).start()
                threading.Thread(target=self.answer, args=(near, far, asked), daemon=True).start()

    def ask(self, near: socket.socket, far: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while words := near.recv(65536):
                if b"EVALSHA" in words:
                    asked.set()
                far.sendall(words)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def answer(self, near: socket.socket, far: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while words := far.recv(65536):
                if self.delay:
                    time.sleep(self.delay)
                if asked.is_set():
                    asked.clear()
                    self.decisions += 1
                    self.answered(self.decisions)
                broken = min(len(words), BROKEN) if self.bytes_at_once else 0
                for at in range(0, broken, self.bytes_at_once or 1):
                    near.sendall(words[at : min(at + self.bytes_at_once, broken)])
                    time.sleep(0.0005)  # or the kernel puts them together again
                near.sendall(words[broken:])
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self.listening, *self.sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextlib.contextmanager
def detour(to: Server) -> Iterator[Detour]:
    one = Detour(to)
    try:
        yield one
    finally:
        one.close()
