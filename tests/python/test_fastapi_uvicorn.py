"""FastAPI under a real uvicorn: what only a server does. WebSocket handshakes on the wire, forwarded addresses that
it puts in the peer's place, streams."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

APP = """
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from tidegate.fastapi import install, rate_limit

app = FastAPI()
install(app)

@app.get("/", dependencies=[Depends(rate_limit("2/hour", trusted_proxies=["127.0.0.1", "203.0.113.0/24"]))])
async def root() -> str:
    return "ok"

@app.get("/stream", dependencies=[Depends(rate_limit("2/hour"))])
async def stream() -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"part"
    return StreamingResponse(parts())

@app.websocket("/ws", dependencies=[Depends(rate_limit("2/hour"))])
async def ws(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()
"""


class Server:
    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "served.py").write_text(APP)
        self.log = folder / "log"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        environment = {**os.environ, "TIDEGATE_STORE": f"shared://{folder}/table?size=1MiB"}
        environment.pop("TIDEGATE_ENABLED", None)
        descriptor = self.listener.fileno()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "uvicorn", "--app-dir", str(folder), "--fd", str(descriptor), *options,
                 "served:app"],
                pass_fds=[descriptor], env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while "Application startup complete" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def ask(self, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        body = b"" if answer.status == 101 else answer.read()
        connection.close()
        return answer.status, answer.headers, body

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.listener.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*options: str) -> Server:
        servers.append(Server(tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


UPGRADE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


@pytest.mark.fault("R106")
def test_a_websocket_handshake_over_the_limit_gets_429_on_the_wire(serve: Callable[..., Server]) -> None:
    server = serve()
    answers = [server.ask("/ws", **UPGRADE) for _ in range(3)]
    assert [status for status, _, _ in answers] == [101, 101, 429]
    assert [headers["X-RateLimit-Remaining"] for _, headers, _ in answers] == ["1", "0", "0"]
    assert int(answers[2][1]["Retry-After"]) > 3500
    assert json.loads(answers[2][2])["code"] == "RATE_LIMITED"
    # uvicorn makes a WebSocket of an upgrade asked of a plain path: it meets no endpoint, so none does work for it.
    assert server.ask("/stream", **UPGRADE)[0] == 403


def test_a_stream_and_its_refusal_carry_the_fields_on_the_wire(serve: Callable[..., Server]) -> None:
    server = serve()
    answers = [server.ask("/stream") for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 429]
    assert [headers.get_all("X-RateLimit-Remaining") for _, headers, _ in answers] == [["1"], ["0"], ["0"]]
    assert answers[0][2] == b"part" * 3


def test_an_address_that_uvicorn_has_put_in_the_peers_place_is_the_client_and_is_said_once(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    # uvicorn stops at 203.0.113.9, which it does not trust. Walked again, what a client wrote before it would be
    # believed.
    forged = [server.ask("/", X_Forwarded_For=f"198.51.100.{number}, 203.0.113.9")[0] for number in range(4)]
    assert forged == [200, 200, 429, 429]
    assert server.ask("/", X_Forwarded_For="203.0.113.10")[0] == 200
    assert server.log.read_text().count("--no-proxy-headers") == 1


def test_without_uvicorns_own_walk_the_trusted_proxies_decide(serve: Callable[..., Server]) -> None:
    server = serve("--no-proxy-headers")
    behind = [server.ask("/", X_Forwarded_For=f"198.51.100.{number}, 203.0.113.9")[0] for number in (1, 2, 1, 1)]
    assert behind == [200, 200, 200, 429]
    assert "--no-proxy-headers" not in server.log.read_text()
