"""A FastCGI application for tests: it answers as its request's path says, and remembers what arrived.

Written from the specification like client.py, and as independent of fcgi/. One thread a connection.

    /echo          what arrived, as JSON: parameters, length and digest of the body
    /bytes/N       N bytes, in records of any size
    /early         answers before the body is read
    /stderr        speaks on STDERR too
    /silent        never answers           /close   hangs up at once
    /half          breaks off in its answer /nonsense  sends what is no FastCGI
    /overloaded    END_REQUEST / OVERLOADED /empty   ends without a word
    /slow/N        N pieces, 20 ms apart
    /status/N/C    status N and X-Cost: C, its fields in records of one byte
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from client import ABORT, BEGIN, COMPLETE, DATA, END, OVERLOADED, PARAMS, STDERR, STDIN, STDOUT, decode_pairs, record


@dataclass
class Seen:
    params: dict[str, str]
    keep: bool
    role: int
    body: int = 0
    digest: str = ""
    data: int = 0
    aborted: bool = False
    closed: bool = False


@dataclass
class Application:
    address: str
    reading: threading.Event = field(default_factory=threading.Event)
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self.reading.set()
        if self.address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(self.address[5:])
        else:
            self.socket = socket.socket()
            self.socket.bind(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{self.socket.getsockname()[1]}"
        self.socket.listen(64)
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        if self.address.startswith("unix:"):
            Path(self.address[5:]).unlink(missing_ok=True)

    def accept(self) -> None:
        while True:
            try:
                peer, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.serve, args=(peer,), daemon=True).start()

    def serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            stream = peer.makefile("rb")
            while self.serve_one(peer, stream):
                pass

    def records(self, stream: object) -> object:
        while True:
            self.reading.wait()
            head = stream.read(8)  # type: ignore[attr-defined]
            if len(head) < 8:
                return
            version, kind, number, length, padding, _ = struct.unpack(">BBHHBB", head)
            assert (version, number) == (1, 1)
            body = stream.read(length + padding)[:length]  # type: ignore[attr-defined]
            yield kind, body

    def serve_one(self, peer: socket.socket, stream: object) -> bool:
        params = b""
        seen: Seen | None = None
        digest = hashlib.md5()
        keep, role = False, 0
        path = ""
        answered = False
        try:
            for kind, body in self.records(stream):  # type: ignore[attr-defined]
                if kind == BEGIN:
                    role, flags = struct.unpack(">HB5x", body)
                    keep = flags == 1
                elif kind == PARAMS and body:
                    params += body
                elif kind == PARAMS:
                    seen = Seen(decode_pairs(params), keep, role)
                    self.seen.append(seen)
                    path = seen.params["REQUEST_URI"].partition("?")[0]
                    if path == "/close":
                        return False
                    if path in ("/early", "/silent") or path.startswith("/slow"):
                        answered = True
                        self.answer(peer, path, seen)
                    if path == "/early":
                        return False
                elif kind == ABORT:
                    assert seen
                    seen.aborted = True
                elif kind == DATA:
                    assert seen
                    seen.data += len(body)
                elif kind == STDIN:
                    assert seen
                    seen.body += len(body)
                    digest.update(body)
                    if not body:
                        seen.digest = digest.hexdigest()
                        if path.startswith("/slow"):
                            return keep
                        if not answered:
                            return self.answer(peer, path, seen) and keep
        finally:
            if seen:
                seen.closed = True
        return False

    def answer(self, peer: socket.socket, path: str, seen: Seen) -> bool:
        end = record(STDOUT, 1) + record(END, 1, struct.pack(">IB3x", 7, COMPLETE))
        head = b"Content-Type: text/plain\r\nX-Path: " + path.encode() + b"\r\n\r\n"
        if path == "/nonsense":
            peer.sendall(b"HTTP/1.1 200 OK\r\n\r\nhello")
            return False
        if path == "/overloaded":
            peer.sendall(record(END, 1, struct.pack(">IB3x", 0, OVERLOADED)))
            return False
        if path == "/empty":
            peer.sendall(end)
        elif path == "/half":
            peer.sendall(record(STDOUT, 1, head + b"half of"))
            return False
        elif path == "/stderr":
            peer.sendall(record(STDERR, 1, b"first ", 3) + record(STDOUT, 1, head + b"out", 5) +
                         record(STDERR, 1, b"last") + end)
        elif path == "/silent":
            pass
        elif path.startswith("/bytes/"):
            left = int(path.rpartition("/")[2])
            peer.sendall(record(STDOUT, 1, head))
            size = 1
            while left:
                part = min(left, size)
                peer.sendall(record(STDOUT, 1, b"x" * part, size % 8))
                left -= part
                size = min(65535, size * 3 + 1)
            peer.sendall(end)
        elif path.startswith("/status/"):
            _, _, status, cost = path.split("/")
            fields = f"Status: {status} As asked\r\nX-Cost: {cost}\r\n\r\nStatus: 200\r\n\r\n".encode()
            peer.sendall(b"".join(record(STDOUT, 1, fields[at : at + 1]) for at in range(len(fields))) + end)
        elif path.startswith("/slow/"):
            peer.sendall(record(STDOUT, 1, head))
            for _ in range(int(path.rpartition("/")[2])):
                time.sleep(0.02)
                peer.sendall(record(STDOUT, 1, b"tick "))
            peer.sendall(end)
        else:
            body = json.dumps({"params": seen.params, "body": seen.body, "digest": seen.digest, "role": seen.role})
            peer.sendall(record(STDOUT, 1, head + body.encode(), 1) + end)
        return True
