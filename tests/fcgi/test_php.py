"""examples/php-fpm/ on real nginx and php-fpm, and the relay in front of a libfcgi application."""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client import Connection, Request, ask
from fcgi_daemon import Daemon, wait_for
from fcgi_stack import EXAMPLES, Nginx, PhpFpm, php_fpm

RULES = """\
store: memory://
policies:
  - {name: two, match: {path: /two.php}, rules: 2/hour}
  - {name: rest, rules: 1000000/hour}
"""

SCRIPT = """<?php
$body = file_get_contents("php://input");
header("Content-Type: application/json");
header("X-Php: yes");
if (isset($_GET["bytes"])) { for ($i = 0; $i < $_GET["bytes"] / 1000; $i++) echo str_repeat("p", 1000); exit; }
if (isset($_GET["status"])) http_response_code((int)$_GET["status"]);
if (isset($_GET["sleep"])) usleep($_GET["sleep"] * 1000);
if (isset($_GET["log"])) error_log("said by php");
$server = $_SERVER;
ksort($server);
echo json_encode(["method" => $_SERVER["REQUEST_METHOD"], "length" => strlen($body), "md5" => md5($body),
                  "uri" => $_SERVER["REQUEST_URI"], "names" => array_keys($server)]);
"""


@pytest.fixture
def stack(start: Callable[..., Daemon], folder: Path) -> Iterator[Callable[..., tuple[Nginx, Daemon, PhpFpm]]]:
    if not php_fpm():
        pytest.skip("php-fpm is not installed")
    servers: list[Nginx | PhpFpm] = []

    def run(fail_open: bool = True, stream: bool = False, more: str = "") -> tuple[Nginx, Daemon, PhpFpm]:
        www = folder / "www"
        www.mkdir()
        for name in ("index", "two", "three"):
            (www / f"{name}.php").write_text(SCRIPT)
        php = PhpFpm(folder / "php")
        servers.append(php)
        rights = f"modes=relay,relay-to=unix:{php.socket},root={www}{more}"
        daemon = start(RULES, listen=f"unix:{folder}/relay.sock,{rights}")
        nginx = Nginx(EXAMPLES / "php-fpm" / "nginx.conf", folder / "nginx", [
            ("server unix:/run/tidegate/php.sock", f"server unix:{folder}/relay.sock"),
            *([("server unix:/run/php/php-fpm.sock", f"server unix:{php.socket}")] if fail_open else []),
            ("root /srv/www;", f"root {www};"),
            *([("# fastcgi_request_buffering off;", "fastcgi_request_buffering off;")] if stream else []),
        ], lambda line: fail_open or "# fail-open" not in line)
        servers.append(nginx)
        return nginx, daemon, php

    yield run
    for server in reversed(servers):
        server.stop()


Stack = Callable[..., tuple[Nginx, Daemon, PhpFpm]]


def test_php_answers_with_the_fields_and_the_third_request_is_the_429(stack: Stack) -> None:
    nginx, daemon, _ = stack()
    first, body = nginx.ask("/two.php?a=b%20c")
    assert (first.status, first.getheader("X-Php"), first.getheader("X-RateLimit-Remaining")) == (200, "yes", "1")
    told = json.loads(body)
    assert told["uri"] == "/two.php?a=b%20c"
    assert [name for name in told["names"] if "TIDEGATE" in name] == []
    nginx.ask("/two.php")
    third, body = nginx.ask("/two.php")
    assert (third.status, third.getheader("X-Php")) == (429, None)
    assert json.loads(body)["code"] == "RATE_LIMITED"
    assert third.getheader("Retry-After")
    assert third.getheader("Content-Type") == "application/json"
    assert len(daemon.lines("application-broken")) == 0


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_method_and_a_body_of_3_mb_arrive_whole(stack: Stack, method: str, stream: bool) -> None:
    nginx, _, _ = stack(stream=stream)
    upload = bytes(range(256)) * 12_000 if method in ("POST", "PUT") else b""

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(upload), 100_000):
            yield upload[at : at + 100_000]

    for body in (upload or None, pieces() if upload and not stream else None):
        response, text = nginx.ask("/index.php", method, body)
        assert (response.status, response.getheader("X-Php")) == (200, "yes")
        if method != "HEAD":
            told = json.loads(text)
            assert (told["method"], told["length"]) == (method, len(upload) if body else 0)
            assert told["md5"] == hashlib.md5(upload if body else b"").hexdigest()


def test_an_answer_of_10_mb_and_a_status_of_phps_own_arrive_whole(stack: Stack) -> None:
    nginx, _, _ = stack()
    assert hashlib.md5(nginx.ask("/index.php?bytes=10000000")[1]).hexdigest() == \
        hashlib.md5(b"p" * 10_000_000).hexdigest()
    assert nginx.ask("/index.php?status=418")[0].status == 418
    assert nginx.ask("/index.php?log=1")[0].status == 200
    assert "said by php" in nginx.log()


def test_a_refused_upload_is_answered_before_its_body_is_sent_where_nginx_streams_it(stack: Stack) -> None:
    nginx, _, _ = stack(stream=True)
    nginx.ask("/two.php")
    nginx.ask("/two.php")
    with socket.create_connection(("127.0.0.1", nginx.port), 5) as peer:
        peer.sendall(b"POST /two.php HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n")
        assert peer.recv(4096).startswith(b"HTTP/1.1 429")


def test_kept_connections_serve_many_requests_and_hold_no_php_worker(stack: Stack) -> None:
    nginx, daemon, php = stack()
    connection = http.client.HTTPConnection("127.0.0.1", nginx.port, timeout=10)
    for number in range(200):
        connection.request("GET", f"/index.php?{number}")
        response = connection.getresponse()
        assert json.loads(response.read())["uri"] == f"/index.php?{number}"
    assert ask(f"unix:{php.socket}", uri="/x").stdout  # a worker is free
    daemon.stop()
    assert int(daemon.lines("stopped")[0].split(" on ")[1].split()[0]) < 20  # connections


def test_the_limiter_killed_under_load_fails_no_request(stack: Stack, folder: Path) -> None:
    nginx, daemon, _ = stack()
    stop = threading.Event()
    got = Counter[int]()

    def load() -> None:
        while not stop.is_set():
            got[nginx.ask("/index.php")[0].status] += 1

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    before = got.total()
    wait_for(lambda: got.total() > before + 50, what="requests without the limiter")
    stop.set()
    for thread in threads:
        thread.join()
    assert set(got) == {200}
    assert nginx.ask("/index.php")[0].getheader("X-RateLimit-Limit") is None


def test_without_the_backup_line_a_dead_limiter_is_a_502(stack: Stack) -> None:
    nginx, daemon, _ = stack(fail_open=False)
    assert nginx.ask("/index.php")[0].status == 200
    daemon.stop()
    assert nginx.ask("/index.php")[0].status == 502


def test_a_dead_php_is_a_502_and_one_that_comes_back_is_used(stack: Stack, folder: Path) -> None:
    nginx, _, php = stack(fail_open=False)
    assert nginx.ask("/index.php")[0].status == 200
    php.stop()
    response, body = nginx.ask("/index.php")
    assert (response.status, json.loads(body)["code"]) == (502, "BAD_GATEWAY")
    php.socket.unlink(missing_ok=True)
    again = PhpFpm(folder / "php")
    try:
        assert nginx.ask("/index.php")[0].status == 200
    finally:
        again.stop()


def test_kept_connections_to_php_work_when_asked_for(stack: Stack) -> None:
    nginx, _, _ = stack(more=",keep=2")
    for number in range(100):
        assert json.loads(nginx.ask(f"/index.php?{number}")[1])["uri"] == f"/index.php?{number}"


def test_php_runs_nothing_outside_the_root(stack: Stack, folder: Path) -> None:
    _, daemon, _ = stack()
    outside = folder / "evil.php"
    outside.write_text("<?php echo 'evil';")
    www = folder / "www"
    for script in (f"{outside}", f"{www}/../evil.php"):
        assert ask(daemon.address, set={"SCRIPT_FILENAME": script}).status == 403
    for name in ("PHP_VALUE", "PHP_ADMIN_VALUE"):
        answer = ask(daemon.address, uri="/index.php",
                     set={"SCRIPT_FILENAME": f"{www}/index.php", name: f"auto_prepend_file={outside}"})
        assert (answer.status, b"evil" in answer.body) == (200, False)
    assert b"evil" not in ask(daemon.address, set={"SCRIPT_FILENAME": None, "PATH_TRANSLATED": str(outside)}).body


def test_a_libfcgi_application_is_relayed_to(
    start: Callable[..., Daemon], make: Callable[..., None], build: Path, folder: Path
) -> None:
    program = folder / "echo"
    subprocess.run(["cc", "-O1", "-o", program, Path(__file__).parent / "peer_libfcgi.c", "-lfcgi"], check=True,
                   capture_output=True)
    echo = subprocess.Popen([program, f"{folder}/app"], stdin=subprocess.DEVNULL)
    try:
        wait_for((folder / "app").exists)
        for number, keep in enumerate(("", ",keep=1")):
            relay = start(RULES, listen=f"unix:{folder}/relay{number},relay-to=unix:{folder}/app{keep}")
            with Connection(relay.address) as connection:
                for size in (0, 1, 8192, 100_000, 2_000_000) * 2:
                    answer = connection.ask(Request(method="POST", uri="/echo", stdin=b"e" * size))
                    assert answer["X-RateLimit-Limit"] == "1000000"
                    assert answer.body == f"read {size}".encode() + b"\n" + b"e" * size
                    assert answer.stderr == b"said on stderr"
            relay.stop()
    finally:
        echo.terminate()
        try:
            echo.wait(3)
        except subprocess.TimeoutExpired:
            echo.kill()
            echo.wait()
