"""examples/nginx/xaccel.conf on real nginx: what is allowed goes on as it was, what is refused is refused whole."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fcgi_daemon import Daemon
from fcgi_stack import EXAMPLES, Nginx

RULES = """\
store: memory://
policies:
  - {name: two, match: {path: /app/two}, rules: 2/hour}
  - {name: rest, rules: 1000000/hour}
"""


class Application(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        text = json.dumps({"method": self.command, "path": self.path, "length": len(body)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = handle_any

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def backend() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Application)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def setting(start: Callable[..., Daemon], folder: Path, backend: int) -> Iterator[Callable[..., tuple[Nginx, Daemon]]]:
    running: list[Nginx] = []

    def run(fail_open: bool = True, patient: bool = True) -> tuple[Nginx, Daemon]:
        daemon = start(RULES)
        slow = [("_timeout 100ms;", "_timeout 10s;"), ("_timeout 200ms;", "_timeout 10s;")]
        running.append(Nginx(EXAMPLES / "nginx" / "xaccel.conf", folder / "nginx", [
            *(slow if patient else []),
            ("unix:/run/tidegate/tidegate.sock", daemon.address),
            ("http://127.0.0.1:8000", f"http://127.0.0.1:{backend}"),
        ], lambda line: fail_open or "# fail-open" not in line))
        return running[0], daemon

    yield run
    for nginx in running:
        nginx.stop()


Setting = Callable[..., tuple[Nginx, Daemon]]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_what_is_allowed_reaches_the_application_with_method_path_and_body(setting: Setting, method: str) -> None:
    nginx, _ = setting()
    body = b"b" * 3_000_000 if method in ("POST", "PUT") else None
    response, text = nginx.ask("/app/x%20y?q=1", method, body)
    assert (response.status, response.getheader("X-RateLimit-Limit")) == (200, "1000000")
    if method != "HEAD":
        assert json.loads(text) == {"method": method, "path": "/app/x%20y?q=1", "length": len(body or b"")}


def test_the_third_request_is_the_429_of_the_limiter_itself(setting: Setting) -> None:
    nginx, _ = setting()
    assert [nginx.ask("/app/two")[0].getheader("X-RateLimit-Remaining") for _ in range(2)] == ["1", "0"]
    third, body = nginx.ask("/app/two")
    assert (third.status, json.loads(body)["code"]) == (429, "RATE_LIMITED")
    assert third.getheader("Retry-After")
    assert nginx.ask("/app/two", "POST", b"p" * 3_000_000)[0].status == 429
    head, body = nginx.ask("/app/two", "HEAD")
    assert (head.status, body) == (429, b"")


@pytest.mark.parametrize("fail_open", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_limiter_lets_pass_or_refuses_as_the_file_says(
    setting: Setting, fail_open: bool, number: int
) -> None:
    nginx, daemon = setting(fail_open, patient=number == signal.SIGKILL)
    assert nginx.ask("/app/x")[0].status == 200
    daemon.signal(number)
    try:
        began = time.monotonic()
        response, text = nginx.ask("/app/x", "POST", b"x" * 100_000)
        assert time.monotonic() - began < 2
        if fail_open:
            assert (response.status, json.loads(text)["length"]) == (200, 100_000)
            assert response.getheader("X-RateLimit-Limit") is None
        else:
            assert response.status in (502, 504)
    finally:
        if number == signal.SIGSTOP:
            daemon.signal(signal.SIGCONT)
        else:
            daemon.wait()
