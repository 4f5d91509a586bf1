"""--http: the numbers for Prometheus and for people, on a thread of its own, whoever asks for them and however."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from client import ask
from fcgi_daemon import RULES, Daemon, wait_for

SITE = """
store: memory://
policies:
  - {name: small, match: {path: /small}, rules: 2/hour}
  - {name: "big", rules: 1000/hour}
"""


class Page:
    """The page's address out of the log, and as much of an HTTP client as tests need."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        wait_for(lambda: daemon.lines("page"))
        self.address = daemon.lines("page")[0].rpartition("http on ")[2]

    def connect(self) -> socket.socket:
        if self.address.startswith("unix:"):
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(10)
            made.connect(self.address[5:])
            return made
        host, _, port = self.address[4:].rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=10)

    def raw(self, sent: bytes) -> bytes:
        with self.connect() as connection:
            connection.sendall(sent)
            received = b""
            while piece := connection.recv(65536):
                received += piece
            return received

    def get(self, path: str, method: str = "GET", host: str = "localhost") -> tuple[int, dict[str, str], str]:
        whole = self.raw(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        head, _, body = whole.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), fields, body.decode()

    def status(self, sent: bytes) -> int:
        answer = self.raw(sent)
        return int(answer.split()[1]) if answer else 0


@pytest.fixture
def page(start: Callable[..., Daemon], folder: Path) -> Page:
    return Page(start(SITE, "--http", f"unix:{folder}/http"))


# ---- what is told


def test_prometheus_reads_what_was_decided(page: Page) -> None:
    for _ in range(3):
        ask(page.daemon.address, uri="/small")
    status, fields, body = page.get("/metrics")
    assert (status, fields["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'tidegate_decisions_total{namespace="default",policy="small",outcome="allowed"} 2\n' in body
    assert 'tidegate_decisions_total{namespace="default",policy="small",outcome="denied"} 1\n' in body
    assert len(body.encode()) == int(fields["content-length"])
    told = json.loads(page.get("/metrics.json")[2])
    assert {one["policy"]: one["denied"] for one in told["policies"]} == {"small": 1, "big": 0}


class Reader(HTMLParser):
    """Every tag is closed that has to be, and nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.resources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.resources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def test_the_page_shows_the_same_numbers_and_loads_nothing_from_elsewhere(page: Page) -> None:
    for _ in range(5):
        ask(page.daemon.address, uri="/small")
    status, fields, body = page.get("/")
    assert (status, fields["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in fields["content-security-policy"]
    seen = Reader()
    seen.feed(body)
    assert seen.open == []
    assert sorted(seen.resources) == ["data:,", "page.css", "page.js"]
    assert re.search(r"small\s+\S+\s+2\s+3\b", seen.text)
    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript")):
        status, fields, text = page.get(f"/{name}")
        assert (status, fields["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert "//" not in re.sub(r"^//.*$", "", text, flags=re.MULTILINE)
    time.sleep(0.3)  # what is told is at most a quarter of a second old
    ask(page.daemon.address, uri="/small")
    inner = page.get("/numbers")[2]
    assert re.search(r"<th scope=row>small</th><td>\d+(\.\d)?</td><td>2</td><td>4</td>", inner)  # a rate by now


def test_names_in_the_table_are_no_markup(start: Callable[..., Daemon], folder: Path, root: Path) -> None:
    """A limiter of another program on the same table may be called anything."""
    store = f"shared://{folder}/table"
    site = Page(start(SITE.replace("memory://", store), "--http", f"unix:{folder}/http"))
    from tidegate import Limiter

    Limiter("5/minute", name='<script>"&\x01\xff', store=store).hit("a")
    body = site.get("/numbers")[2]
    assert "&lt;script&gt;&quot;&amp;?" in body
    assert "<script" not in body


def test_no_client_is_ever_named(start: Callable[..., Daemon], folder: Path) -> None:
    site = Page(start(SITE, "--http", f"unix:{folder}/http"))
    ask(site.daemon.address, uri="/small", peer="203.0.113.77")
    for path in ("/", "/metrics", "/metrics.json"):
        assert "203.0.113" not in site.get(path)[2]


# ---- what is asked


def test_head_tells_the_fields_alone_and_other_methods_and_paths_are_refused(page: Page) -> None:
    for path in ("/", "/metrics", "/page.css"):
        status, fields, body = page.get(path, "HEAD")
        assert (status, body) == (200, "")
        assert int(fields["content-length"]) > 100
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"):
        status, fields, _ = page.get("/metrics", method)
        assert (status, fields["allow"]) == (405, "GET, HEAD")
    assert page.get("/metrics?x=1")[0] == 200
    for path in ("/nothing", "/metrics/", "/../etc/passwd", "//metrics", "/%6detrics"):
        assert page.get(path)[0] == 404


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"\r\nGET / HTTP/1.1\nhost:x\n\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 2000 + b"\r\n", 431),
        (b"\r\n" * 5000, 431),
    ],
)
def test_what_is_no_request_is_refused_and_nobody_else_notices(page: Page, sent: bytes, status: int) -> None:
    assert page.status(sent) == status
    assert page.get("/metrics")[0] == 200


def test_any_bytes_leave_the_page_serving(page: Page) -> None:
    chance = random.Random(7)
    for _ in range(300):
        base = bytearray(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
        for _ in range(chance.randrange(1, 8)):
            base[chance.randrange(len(base))] = chance.randrange(256)
        with page.connect() as connection:
            connection.sendall(bytes(base[: chance.randrange(1, len(base) + 1)]))
    assert page.get("/metrics")[0] == 200
    assert ask(page.daemon.address, uri="/big").status == 200


def test_a_page_of_somebody_elses_cannot_read_it_through_a_visitors_browser(
    start: Callable[..., Daemon], folder: Path
) -> None:
    site = Page(start(SITE, "--http", "tcp:127.0.0.1:0"))
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:9464", "127.1.2.3", "[::1]:80"):
        assert site.get("/metrics", host=host)[0] == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", "[::1", "", "0"):
        assert site.get("/metrics", host=host)[0] == 421, host
    other = Page(start(SITE, "--http", "tcp:127.0.0.1:0,any-host=yes"))
    assert other.get("/metrics", host="stats.example")[0] == 200


# ---- bounds


def test_slow_and_silent_clients_take_nobody_elses_place(page: Page) -> None:
    silent = [page.connect() for _ in range(100)]
    silent[-1].sendall(b"GET /metr")
    for _ in range(3):
        assert page.get("/metrics")[0] == 200
    assert page.daemon.descriptors() < 32 + 30
    began = time.monotonic()
    silent[-1].settimeout(10)
    assert silent[-1].recv(100) == b""  # its five seconds are over
    assert time.monotonic() - began < 8
    for one in silent:
        one.close()
    wait_for(lambda: page.daemon.descriptors() < 30)


def test_requests_are_answered_while_a_crowd_reads_the_page(page: Page) -> None:
    over = threading.Event()

    def crowd() -> None:
        while not over.is_set():
            page.get("/metrics")

    readers = [threading.Thread(target=crowd) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(200):
            assert ask(page.daemon.address, uri="/big").status == 200
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert page.daemon.process.poll() is None


# ---- where it listens


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("tcp:0.0.0.0:9464", "beyond-loopback=yes"),
        ("tcp:[::]:9464", "beyond-loopback=yes"),
        ("tcp:localhost:9464,token=0123456789abcdef", "not for --http"),
        ("unix:/tmp/x,modes=auth", "not for --http"),
        ("unix:/tmp/x,any-host=perhaps", "expected yes or no"),
        ("127.0.0.1:9464", "expected unix:/path"),
    ],
)
def test_beyond_loopback_it_listens_only_when_asked(program: Path, folder: Path, address: str, told: str) -> None:
    (folder / "r").write_text(SITE)
    done = subprocess.run(
        [program, "--config", folder / "r", "--listen", f"unix:{folder}/s", "--http", address],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert told in done.stderr


def test_asked_for_it_listens_everywhere(start: Callable[..., Daemon]) -> None:
    site = Page(start(SITE, "--http", "tcp:0.0.0.0:0,beyond-loopback=yes"))
    site.address = site.address.replace("0.0.0.0", "127.0.0.1")
    assert site.get("/metrics", host="stats.example")[0] == 200


def test_the_sockets_mode_is_as_asked_and_its_name_goes_with_the_daemon(
    start: Callable[..., Daemon], folder: Path
) -> None:
    site = Page(start(RULES, "--http", f"unix:{folder}/http,mode=0600"))
    assert os.stat(f"{folder}/http").st_mode & 0o777 == 0o600
    assert site.daemon.stop() == 0
    assert not (folder / "http").exists()


def test_an_address_in_use_stops_the_start(start: Callable[..., Daemon], program: Path, folder: Path) -> None:
    site = Page(start(SITE, "--http", "tcp:127.0.0.1:0"))
    done = subprocess.run(
        [program, "--config", site.daemon.rules, "--listen", f"unix:{folder}/other", "--http", site.address],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert site.address in done.stderr
    assert not (folder / "other").exists()


def test_a_handover_passes_the_page_on_and_keeps_its_name(start: Callable[..., Daemon], folder: Path) -> None:
    for kind in (f"unix:{folder}/http", "tcp:127.0.0.1:0"):
        daemon = start(SITE.replace("memory://", f"shared://{folder}/handed"), "--http", kind,
                       listen=f"unix:{folder}/{len(kind)}")
        site = Page(daemon)
        first = daemon.process.pid
        daemon.signal(signal.SIGUSR2)
        wait_for(lambda: len(daemon.lines("page")) == 2 or kind.endswith(":0") and daemon.process.poll() is not None,  # noqa: B023
                 what="the new program's page")
        daemon.wait()
        successor = int(re.findall(r"to process (\d+)", daemon.log())[0])
        try:
            assert successor != first
            if kind.startswith("unix"):
                assert site.get("/metrics")[0] == 200
        finally:
            os.kill(successor, signal.SIGTERM)
            wait_for(lambda: not Path(f"/proc/{successor}").exists() or "Z" in Path(f"/proc/{successor}/stat").read_text(),  # noqa: B023
                     what="the end")
