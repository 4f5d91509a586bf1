"""examples/nginx/nginx.conf on real nginx: paths and ports replaced, not a line else."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from client import Connection, Request
from fcgi_daemon import Daemon, wait_for, within
from fcgi_nginx import EXAMPLE, NGINX, Nginx

RULES = """\
store: memory://
policies:
  - name: closed
    match: {path: /closed.html}
    rules: deny
  - name: keyed
    match: {path: /keyed.html}
    rules: 100/hour
    by: header:X-Api-Key
  - name: bad-request
    match: {path: /keyed400.html}
    rules: 100/hour
    by: header:X-Api-Key
    missing_identity: reject 400
  - name: users
    match: {path: /user.html}
    rules: 1/hour
    by: user|ip
  - name: two
    match: {path: ["/two.html", "/app/two"]}
    rules: 2/hour
    by: ip+path
  - name: rest
    rules: 1000000/hour
"""


class Application(BaseHTTPRequestHandler):
    """Says what arrived; /app/own403 refuses on its own account."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, int]] = []

    def handle_any(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.command, self.path, len(body)))
        self.send_response(403 if self.path == "/app/own403" else 200)
        text = f"application {self.command} {len(body)}".encode()
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
    """setting(fail_open=True, patient=True): nginx with the example, and the daemon behind it."""
    running: list[Nginx] = []
    Application.seen.clear()

    def run(fail_open: bool = True, patient: bool = True) -> tuple[Nginx, Daemon]:
        daemon = start(RULES)
        nginx = Nginx(folder / "nginx", daemon.address, backend, lambda line: fail_open or "# fail-open" not in line,
                      patient=patient)
        running.append(nginx)
        return nginx, daemon

    yield run
    for nginx in running:
        nginx.stop()


def only_expected(errors: str, *expected: str) -> None:
    left = [line for line in errors.splitlines()
            if re.search(r"\[(warn|error|crit|alert|emerg)\]", line) and not any(text in line for text in expected)]
    assert left == []


@pytest.mark.fault("R175")
@pytest.mark.fault("R176")
def test_the_third_request_is_the_429_of_the_limiter_itself(setting: Callable[..., tuple[Nginx, Daemon]]) -> None:
    nginx, daemon = setting()
    first, page = nginx.ask("/two.html")
    assert (first.status, page) == (200, b"page two")
    assert first.getheader("X-RateLimit-Limit") == "2"
    assert first.getheader("X-RateLimit-Remaining") == "1"
    assert first.getheader("X-RateLimit-Reset") == "3600"
    assert first.getheader("Retry-After") is None
    assert nginx.ask("/two.html")[0].getheader("X-RateLimit-Remaining") == "0"
    third, body = nginx.ask("/two.html")
    with Connection(daemon.address) as direct:
        own = direct.ask(Request(uri="/two.html", peer="127.0.0.1"))
    assert (third.status, own.status) == (429, 429)
    assert body.rstrip() == own.body.rstrip()
    assert third.getheader("Content-Type") == "application/json"
    for name in ("Retry-After", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"):
        assert third.getheader(name) == own[name], name
    assert 3590 <= int(third.getheader("Retry-After") or 0) <= 3600
    assert third.getheader("Cache-Control") == "no-store"
    only_expected(nginx.errors())


def test_head_and_options_keep_their_method_and_are_counted(setting: Callable[..., tuple[Nginx, Daemon]]) -> None:
    nginx, _ = setting()
    response, body = nginx.ask("/two.html", "HEAD")
    assert (response.status, body, response.getheader("X-RateLimit-Remaining")) == (200, b"", "1")
    assert nginx.ask("/two.html", "HEAD")[0].status == 200
    refused, body = nginx.ask("/two.html", "HEAD")
    assert (refused.status, body) == (429, b"")
    assert refused.getheader("Retry-After")
    for method in ("OPTIONS", "DELETE", "PUT"):
        assert nginx.ask("/app/x", method)[0].status == 200
    assert [seen[0] for seen in Application.seen] == ["OPTIONS", "DELETE", "PUT"]
    preflight = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    for _ in range(5):
        assert nginx.ask("/app/two", "OPTIONS", **preflight)[0].status == 200
    assert nginx.ask("/app/two")[0].getheader("X-RateLimit-Remaining") == "1"
    only_expected(nginx.errors())


def test_bodies_of_3_mb_reach_the_application_whole(setting: Callable[..., tuple[Nginx, Daemon]]) -> None:
    nginx, _ = setting()
    size = 3_000_000
    for method in ("POST", "PUT"):
        response, text = nginx.ask("/app/upload", method, b"x" * size)
        assert (response.status, text) == (200, f"application {method} {size}".encode())
        assert response.getheader("X-RateLimit-Limit") == "1000000"
    chunked, text = nginx.ask("/app/upload", "POST", iter([b"y" * 100_000] * 30))
    assert (chunked.status, text) == (200, f"application POST {size}".encode())
    only_expected(nginx.errors(), "a client request body is buffered")


def test_a_refused_upload_gets_its_429_before_the_body_is_sent(setting: Callable[..., tuple[Nginx, Daemon]]) -> None:
    nginx, _ = setting()
    for _ in range(2):
        assert nginx.ask("/app/two")[0].status == 200
    with socket.create_connection(("127.0.0.1", nginx.port), timeout=5) as peer:
        with within(0.5):
            peer.sendall(b"POST /app/two HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n")
            answer = peer.recv(65536)
        assert answer.startswith(b"HTTP/1.1 429 ")
    assert len(Application.seen) == 2


def test_an_application_behind_it_keeps_its_own_403(setting: Callable[..., tuple[Nginx, Daemon]]) -> None:
    nginx, _ = setting()
    response, text = nginx.ask("/app/own403")
    assert (response.status, text) == (403, b"application GET 0")
    listing, page = nginx.ask("/empty/")
    assert listing.status == 403
    assert b"<html>" in page
    assert listing.getheader("Retry-After") is None


def test_the_other_refusals_reach_the_client_as_they_are_meant(setting: Callable[..., tuple[Nginx, Daemon]]) -> None:
    nginx, _ = setting()
    closed, body = nginx.ask("/closed.html")
    assert (closed.status, closed.getheader("Retry-After")) == (403, None)
    assert b'"FORBIDDEN"' in body
    unknown, body = nginx.ask("/keyed.html")
    assert unknown.status == 401
    assert unknown.getheader("WWW-Authenticate")
    assert b'"UNIDENTIFIED"' in body
    assert nginx.ask("/keyed400.html")[0].status == 400
    assert nginx.ask("/keyed.html", X_Api_Key="k")[0].status == 200
    only_expected(nginx.errors(), "directory index")


def test_an_unchecked_user_name_does_not_make_a_new_client(setting: Callable[..., tuple[Nginx, Daemon]]) -> None:
    nginx, _ = setting()
    names = ["YTpi", "Yjpj", "Yzpk"]  # a:b, b:c, c:d
    statuses = [nginx.ask("/user.html", Authorization=f"Basic {name}")[0].status for name in names]
    assert statuses == [200, 429, 429]


def test_a_folders_index_page_and_an_error_page_are_counted_once(
    start: Callable[..., Daemon], folder: Path, backend: int
) -> None:
    daemon = start("store: memory://\npolicies:\n  - {name: all, rules: 5/hour}\n")
    nginx = Nginx(folder / "nginx", daemon.address, backend, lambda _: True,
                  {"index index.html;": "index index.html; error_page 404 /two.html;"
                                        " error_page 403 = @tidegate_refused;"})
    try:
        told = [nginx.ask(path) for path in ("/", "/missing", "/index.html", "/", "/nothing/here")]
        assert [(response.status, response.getheader("X-RateLimit-Remaining")) for response, _ in told] == [
            (200, "4"), (404, "3"), (200, "2"), (200, "1"), (404, "0"),
        ]
        assert (told[0][1], told[1][1]) == (b"page index", b"page two")
        assert nginx.ask("/")[0].status == 429
    finally:
        nginx.stop()
    only_expected(nginx.errors(), "No such file")


@pytest.mark.parametrize("fail_open, status", [(True, 200), (False, 500)])
@pytest.mark.parametrize("trouble", ["dead", "killed between requests", "hung", "gone with its socket"])
def test_while_no_limiter_answers_requests_pass_or_fail_as_chosen(
    setting: Callable[..., tuple[Nginx, Daemon]], fail_open: bool, status: int, trouble: str
) -> None:
    nginx, daemon = setting(fail_open, patient=False)
    if trouble != "dead":
        assert nginx.ask("/index.html")[0].status == 200
    if trouble == "hung":
        daemon.signal(signal.SIGSTOP)
    elif trouble == "gone with its socket":
        assert daemon.stop() == 0
    else:
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    try:
        for _ in range(5):
            with within(1):
                response, page = nginx.ask("/index.html")
            assert response.status == status
            assert (page == b"page index") == fail_open
            assert response.getheader("X-RateLimit-Limit") is None
        assert nginx.ask("/app/upload", "POST", b"x" * 3_000_000)[0].status == status
        assert ("auth request unexpected status" in nginx.errors()) == (not fail_open)
    finally:
        if trouble == "hung":
            daemon.signal(signal.SIGCONT)
    if trouble == "hung":
        wait_for(lambda: nginx.ask("/index.html")[0].getheader("X-RateLimit-Limit"), what="limits again")


@pytest.mark.fault("R191")
def test_nginx_over_kept_connections_never_meets_a_502(
    start: Callable[..., Daemon], folder: Path, backend: int
) -> None:
    daemon = start(RULES)
    direct = f"""location /decision {{ include fastcgi_params; fastcgi_keep_conn on; fastcgi_pass kept; }} }}
        upstream kept {{ server {daemon.address}; keepalive 4; }}
    }}
    """
    nginx = Nginx(folder / "nginx", daemon.address, backend, lambda _: True, {
        "auth_request /_tidegate;": "", "\n    }\n}\n": direct,
    })
    statuses: list[int] = []
    each = 25_000 if os.environ.get("TIDEGATE_LONG") == "1" else 2500

    def load() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", nginx.port, timeout=10)
        for number in range(each):
            path = f"/decision?{'q' * (number % 50)}"
            body = b"x" * 20_000 if number % 10 == 0 else None  # a body that the daemon does not wait for
            connection.request("POST" if body else "GET", path, body, {"Cookie": "c" * (number % 31 * 90)})
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        connection.close()

    def leave() -> None:
        for number in range(left):  # clients that hang up, some in the middle of their upload
            with socket.create_connection(("127.0.0.1", nginx.port), 5) as peer:
                method, length = (b"POST", 50_000) if number % 2 else (b"GET", 0)
                peer.sendall(b"%s /decision?left HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (method, length)
                             + b"x" * (length // 2))

    left = each // 10
    try:
        threads = [threading.Thread(target=load) for _ in range(4)] + [threading.Thread(target=leave)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        nginx.stop()
    assert set(statuses) == {200}
    assert len(statuses) == 4 * each
    only_expected(nginx.errors())
    assert daemon.stop() == 0
    requests, connections = re.findall(r"(\d+) requests on (\d+)", daemon.lines("stopped")[0])[0]
    assert 4 * each <= int(requests) <= 4 * each + left
    assert int(connections) < each / 25 + left


def test_the_example_rules_are_right_and_the_example_is_accepted_by_nginx(
    program: Path, setting: Callable[..., tuple[Nginx, Daemon]]
) -> None:
    nginx, _ = setting()
    command = [NGINX, "-t", "-q", "-e", nginx.errors_path, "-c", nginx.conf]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    checked = subprocess.run([program, "--config", EXAMPLE / "rules.yaml", "--check"], capture_output=True, text=True,
                             check=False)
    assert checked.stdout.endswith("ok\n"), checked.stderr
