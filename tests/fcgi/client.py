"""A FastCGI web server's side for tests: records as bytes, so that a test can send what no server would.

Written from the FastCGI 1.0 specification and independent of fcgi/codec.c. Must not enter: anything of tidegate.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BEGIN, ABORT, END, PARAMS, STDIN, STDOUT, STDERR, DATA, GET_VALUES, GET_VALUES_RESULT, UNKNOWN_TYPE = range(1, 12)
RESPONDER, AUTHORIZER, FILTER = 1, 2, 3
COMPLETE, CANT_MPX, OVERLOADED, UNKNOWN_ROLE = range(4)

Pairs = Iterable[tuple[str | bytes, str | bytes]]


def as_bytes(text: str | bytes) -> bytes:
    return text.encode("latin-1") if isinstance(text, str) else text


def record(kind: int, request_id: int, content: bytes = b"", padding: int = 0, version: int = 1) -> bytes:
    head = struct.pack(">BBHHBB", version, kind, request_id, len(content), padding, 0)
    return head + content + b"\xa5" * padding


def length(number: int) -> bytes:
    return bytes([number]) if number < 128 else struct.pack(">I", number | 0x80000000)


def pairs(items: Pairs) -> bytes:
    out = bytearray()
    for name, value in items:
        name, value = as_bytes(name), as_bytes(value)
        out += length(len(name)) + length(len(value)) + name + value
    return bytes(out)


def begin(request_id: int = 1, role: int = RESPONDER, keep: bool = True, padding: int = 0) -> bytes:
    return record(BEGIN, request_id, struct.pack(">HB5x", role, 1 if keep else 0), padding)


def stream(kind: int, request_id: int, content: bytes, chunk: int = 65528, padding: int = 0) -> bytes:
    """Content in records of at most `chunk` bytes, and the empty one that ends it."""
    parts = [record(kind, request_id, content[at : at + chunk], padding) for at in range(0, len(content), chunk)]
    return b"".join(parts) + record(kind, request_id, b"", padding)


@dataclass
class Request:
    """What a web server sends for one request. `set` replaces or adds parameters, `extra` appends more behind them."""

    method: str = "GET"
    uri: str = "/"
    peer: str = "192.0.2.1"
    headers: list[tuple[str, str | bytes]] = field(default_factory=list)
    set: Mapping[str, str | bytes | None] = field(default_factory=dict)
    extra: list[tuple[str, str | bytes]] = field(default_factory=list)
    role: int = RESPONDER
    keep: bool = True
    stdin: bytes = b""
    chunk: int = 65528
    padding: int = 0

    def params(self) -> bytes:
        path, _, query = self.uri.partition("?")
        named: dict[str, str | bytes | None] = {
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.method,
            "CONTENT_TYPE": "",
            "CONTENT_LENGTH": str(len(self.stdin)) if self.stdin else "",
            "SCRIPT_NAME": path,
            "REQUEST_URI": self.uri,
            "DOCUMENT_URI": path,
            "DOCUMENT_ROOT": "/srv/www",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REQUEST_SCHEME": "http",
            "GATEWAY_INTERFACE": "CGI/1.1",
            "SERVER_SOFTWARE": "nginx/1.22.1",
            "REMOTE_ADDR": self.peer,
            "REMOTE_PORT": "50000",
            "SERVER_ADDR": "192.0.2.80",
            "SERVER_PORT": "80",
            "SERVER_NAME": "example.org",
            "REDIRECT_STATUS": "200",
            "HTTP_HOST": "example.org",
            "HTTP_USER_AGENT": "tests",
            "HTTP_ACCEPT": "*/*",
        }
        named.update(self.set)
        items: list[tuple[str | bytes, str | bytes]] = [(n, v) for n, v in named.items() if v is not None]
        items += [("HTTP_" + name.upper().replace("-", "_"), value) for name, value in self.headers]
        return pairs(items + self.extra)

    def encode(self, request_id: int = 1) -> bytes:
        out = begin(request_id, self.role, self.keep, self.padding)
        out += stream(PARAMS, request_id, self.params(), self.chunk, self.padding)
        if self.role != AUTHORIZER:
            out += stream(STDIN, request_id, self.stdin, self.chunk, self.padding)
        return out


@dataclass
class Answer:
    stdout: bytes
    stderr: bytes
    protocol_status: int

    @property
    def head(self) -> list[tuple[str, str]]:
        lines = self.stdout.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        return [(name, value) for name, _, value in (line.partition(": ") for line in lines if line)]

    @property
    def body(self) -> bytes:
        return self.stdout.partition(b"\r\n\r\n")[2]

    @property
    def status(self) -> int:
        return int((self["Status"] or "200").split()[0])

    def __getitem__(self, name: str) -> str | None:
        found = [value for key, value in self.head if key.lower() == name.lower()]
        assert len(found) < 2, f"{name} is sent twice: {found}"
        return found[0] if found else None


class Closed(Exception):
    """The daemon closed the connection before the answer was whole."""


class Connection:
    """One connection to the daemon; answers are sorted by request id as they come."""

    def __init__(self, address: str, timeout: float = 5.0) -> None:
        self.buffer = b""
        self.open: dict[int, tuple[bytearray, bytearray]] = {}
        self.answers: dict[int, list[Answer]] = {}
        self.management: list[tuple[int, bytes]] = []
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(timeout)
            self.socket.connect(address[5:])
        else:
            host, _, port = address.removeprefix("tcp:").rpartition(":")
            self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes, split: int = 0) -> None:
        """Whole, or in pieces of `split` bytes, each a send of its own."""
        for at in range(0, len(data), split or max(len(data), 1)):
            self.socket.sendall(data[at : at + split] if split else data)

    def read_record(self) -> tuple[int, int, bytes]:
        while True:
            if len(self.buffer) >= 8:
                version, kind, request_id, content, padding, _ = struct.unpack(">BBHHBB", self.buffer[:8])
                assert version == 1, self.buffer[:64]
                if len(self.buffer) >= 8 + content + padding:
                    body = self.buffer[8 : 8 + content]
                    self.buffer = self.buffer[8 + content + padding :]
                    return kind, request_id, body
            more = self.socket.recv(65536)
            if not more:
                raise Closed(self.buffer)
            self.buffer += more

    def step(self) -> None:
        kind, request_id, body = self.read_record()
        if request_id == 0:
            self.management.append((kind, body))
            return
        out, err = self.open.setdefault(request_id, (bytearray(), bytearray()))
        if kind == STDOUT:
            out += body
        elif kind == STDERR:
            err += body
        elif kind == END:
            del self.open[request_id]
            self.answers.setdefault(request_id, []).append(Answer(bytes(out), bytes(err), body[4]))
        else:
            raise AssertionError(f"record of type {kind} from an application")

    def answer(self, request_id: int = 1) -> Answer:
        while not self.answers.get(request_id):
            self.step()
        return self.answers[request_id].pop(0)

    def ask(self, request: Request, request_id: int = 1, split: int = 0) -> Answer:
        self.send(request.encode(request_id), split)
        return self.answer(request_id)

    def values(self, *names: str) -> dict[str, str]:
        self.send(record(GET_VALUES, 0, pairs((name, "") for name in names)))
        while not self.management:
            self.step()
        kind, body = self.management.pop(0)
        assert kind == GET_VALUES_RESULT
        return decode_pairs(body)

    def at_end(self) -> bool:
        """Whether the daemon has closed, with nothing left to read."""
        try:
            return not self.buffer and self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def decode_pairs(data: bytes) -> dict[str, str]:
    found = {}
    while data:
        lengths = []
        for _ in range(2):
            if data[0] < 128:
                lengths.append(data[0])
                data = data[1:]
            else:
                lengths.append(struct.unpack(">I", data[:4])[0] & 0x7FFFFFFF)
                data = data[4:]
        name, value = data[: lengths[0]], data[lengths[0] : sum(lengths)]
        found[name.decode()] = value.decode()
        data = data[sum(lengths) :]
    return found


def ask(address: str, request: Request | None = None, **changes: object) -> Answer:
    """One request on a connection of its own, which the daemon has to close."""
    request = request or Request(**{"keep": False, **changes})  # type: ignore[arg-type]
    with Connection(address) as connection:
        answer = connection.ask(request)
        if not request.keep:
            assert connection.at_end()
        return answer
