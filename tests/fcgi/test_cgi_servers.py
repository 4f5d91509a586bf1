"""examples/cgi/ on the real servers: nginx with fcgiwrap, Apache, lighttpd."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcgi_daemon import wait_for
from fcgi_stack import CLEAN, EXAMPLES, Nginx, Server, accepts, free_port, replace

HERE = EXAMPLES / "cgi"
APACHE, LIGHTTPD, FCGIWRAP = (
    shutil.which(name) or f"/usr/sbin/{name}" for name in ("apache2", "lighttpd", "fcgiwrap")
)


class Site:
    """Where the examples' paths lie in this test."""

    def __init__(self, folder: Path, build: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.cgi = folder / "cgi-bin"
        self.bin.mkdir()
        self.cgi.mkdir()
        shutil.copy(build / "bin" / "tidegate-cgi", self.bin)
        self.rules = folder / "rules.yaml"
        self.rules.write_text((HERE / "rules.yaml").read_text().replace("shared://web", f"shared://{folder}/table"))
        subprocess.run([build / "bin" / "tidegate", "compile", self.rules], check=True, capture_output=True)
        for name in ("shop.cgi", "gate.cgi"):
            (self.cgi / name).write_text(self.placed((HERE / name).read_text()))
            (self.cgi / name).chmod(0o755)
        self.port = free_port()

    def placed(self, text: str) -> str:
        for old, new in (("/usr/local/bin", str(self.bin)), ("/usr/lib/cgi-bin", str(self.cgi)),
                         ("/etc/tidegate/rules.yaml", str(self.rules))):
            text = text.replace(old, new)
        return text


class Wrapped(Nginx):
    """fcgiwrap serves until it is ended; its children leave with their requests."""

    def __init__(self, site: Site) -> None:
        path = site.folder / "wrap.sock"
        conf = site.folder / "example.conf"
        conf.write_text(site.placed((HERE / "nginx.conf").read_text()))
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(64)
        self.wrap_log = (site.folder / "wrap.log").open("wb")
        self.wrap = subprocess.Popen([FCGIWRAP, "-c", "2", "-f"], stdin=listening, stdout=self.wrap_log,
                                     stderr=self.wrap_log, start_new_session=True, env=CLEAN)
        listening.close()
        super().__init__(conf, site.folder / "nginx", [("unix:/run/fcgiwrap.socket", f"unix:{path}")])

    def stop(self, number: int = 3) -> None:
        super().stop(number)
        os.killpg(self.wrap.pid, 15)
        self.wrap.wait()
        self.wrap_log.close()


class Apache(Server):
    """With mod_cgid: a program's input and output are one socket."""

    others: tuple[tuple[str, str], ...] = ()

    def __init__(self, site: Site) -> None:
        self.port = site.port
        text = replace(site.placed((HERE / "apache.conf").read_text()), [
            ("Listen 80", f"Listen 127.0.0.1:{site.port}"),
            ("/run/apache2/apache2.pid", f"{site.folder}/apache.pid"),
            ("/run/apache2/cgisock", f"{site.folder}/cgisock"),
            ("/var/log/apache2/error.log", f"{site.folder}/apache.log"),
            *self.others,
        ])
        # The folder is the test's own; without root's rights there is nobody else to be.
        text = text.replace("User www-data\nGroup www-data\n", "User www-data\nGroup www-data\n" if os.geteuid() == 0 else "")
        (site.folder / "apache.conf").write_text(text)
        if os.geteuid() == 0:
            shutil.chown(site.folder, "www-data", "www-data")
        super().__init__([APACHE, "-DFOREGROUND", "-f", site.folder / "apache.conf"],
                         accepts(site.port), site.folder / "apache.log")

    ask = Nginx.ask


class Prefork(Apache):
    """With mod_cgi: they are pipes."""

    others = (("mpm_event", "mpm_prefork"), ("cgid_module", "cgi_module"), ("mod_cgid.so", "mod_cgi.so"),
              ("ScriptSock", "# ScriptSock"))


class Lighttpd(Server):
    def __init__(self, site: Site) -> None:
        self.port = site.port
        (site.folder / "html").mkdir()
        text = replace(site.placed((HERE / "lighttpd.conf").read_text()), [
            ("server.port = 80", f'server.port = {site.port}\nserver.bind = "127.0.0.1"'),
            ("/var/www/html", f"{site.folder}/html"),
            ("/var/log/lighttpd/error.log", f"{site.folder}/lighttpd.log"),
            ("/run/lighttpd.pid", f"{site.folder}/lighttpd.pid"),
        ])
        if os.geteuid() == 0:
            shutil.chown(site.folder, "www-data", "www-data")
        else:
            text = "".join(line for line in text.splitlines(True)
                           if not line.startswith(("server.username", "server.groupname")))
        (site.folder / "lighttpd.conf").write_text(text)
        super().__init__([LIGHTTPD, "-D", "-f", site.folder / "lighttpd.conf"], accepts(site.port),
                         site.folder / "lighttpd.log")

    ask = Nginx.ask


Web = Wrapped | Apache | Lighttpd


@pytest.fixture(params=[Wrapped, Apache, Prefork, Lighttpd], ids=["nginx", "apache", "prefork", "lighttpd"])
def web(request: pytest.FixtureRequest, program: Path, build: Path, folder: Path) -> Iterator[Web]:
    server: Web = request.param(Site(folder, build))
    yield server
    server.stop()


def log_of(web: Web) -> str:
    """With what lighttpd, in the foreground, leaves on its stderr, and fcgiwrap on its own."""
    others = [web.log_path.with_suffix(".out"), web.log_path.parent.parent / "wrap.log"]
    return web.log() + "".join(path.read_text(errors="replace") for path in others if path.exists())


@pytest.mark.parametrize("path", ["/cgi-bin/shop.cgi", "/cgi-bin/gate.cgi"])
def test_a_guarded_program_answers_until_the_limit_and_then_the_429_is_ours(web: Web, path: str) -> None:
    told = [web.ask(path) for _ in range(4)]
    assert [response.status for response, _ in told] == [200, 200, 200, 429], log_of(web)
    assert [body.decode().strip() for _, body in told[:3]] == ["shop GET left=2", "shop GET left=1", "shop GET left=0"]
    assert [response.headers["X-RateLimit-Remaining"] for response, _ in told] == ["2", "1", "0", "0"]
    assert told[0][0].headers["Content-Type"].startswith("text/plain")
    refused, body = told[3]
    assert refused.headers["Content-Type"] == "application/json"
    assert 0 < int(refused.headers["Retry-After"]) <= 60
    assert body.startswith(b'{"code": "RATE_LIMITED", ')
    assert "Status" not in refused.headers


def test_the_decision_itself_is_served_and_counts_with_the_others(web: Web) -> None:
    response, body = web.ask("/limit")
    assert (response.status, response.headers["X-RateLimit-Remaining"]) == (200, "2"), log_of(web)
    assert body.startswith(b'{"allowed": true, "policy": "shop", "limit": 3,')
    assert web.ask("/cgi-bin/shop.cgi")[1] == b"shop GET left=1\n"
    assert web.ask("/cgi-bin/gate.cgi")[1] == b"shop GET left=0\n"
    response, body = web.ask("/limit", "HEAD")
    assert (response.status, body) == (429, b"")
    assert web.ask("/limit")[0].status == 429


def test_an_upload_reaches_the_program_and_a_refused_one_is_answered(web: Web) -> None:
    upload = os.urandom(3_000_000)
    response, body = web.ask("/cgi-bin/shop.cgi", "POST", upload)
    assert response.status == 200, log_of(web)
    assert body.decode().split() == ["shop", "POST", "left=2", hashlib.sha256(upload).hexdigest(), "-"]
    for _ in range(2):
        web.ask("/cgi-bin/shop.cgi", "POST", b"little")
    refused = ask_with_patience(web.port, upload)
    assert refused == 429
    assert web.ask("/limit")[0].status == 429  # and the server goes on


def ask_with_patience(port: int, upload: bytes) -> int:
    """A server may answer and close while the upload is on its way: what it said is read all the same."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("POST", "/cgi-bin/shop.cgi")
    connection.putheader("Content-Length", str(len(upload)))
    connection.endheaders()
    try:
        connection.send(upload)
    except (BrokenPipeError, ConnectionResetError):
        pass
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_query_that_becomes_arguments_starts_nothing(web: Web) -> None:
    for path in ("/limit?/bin/sh+-c+id", "/cgi-bin/gate.cgi?/bin/sh+-c+id"):
        response, body = web.ask(path)
        assert response.status == 200 and b"uid=" not in body, log_of(web)


def test_a_field_that_looks_like_a_setting_is_a_field(web: Web) -> None:
    response, body = web.ask("/limit", TIDEGATE_PROGRAM="/bin/sh", TIDEGATE_POLICY="none", TIDEGATE_ENABLED="0")
    assert b'"policy": "shop"' in body, log_of(web)


def test_a_table_that_is_not_to_be_had_lets_through_and_is_told_in_the_servers_log(web: Web, folder: Path) -> None:
    (folder / "table").mkdir()
    assert web.ask("/cgi-bin/shop.cgi")[1] == b"shop GET left=\n"
    wait_for(lambda: "store-failing" in log_of(web), what="the line in the server's log")


def test_rules_that_are_gone_are_a_503_and_not_a_500(web: Web, folder: Path) -> None:
    (folder / "rules.yaml.compiled").unlink()
    response, _ = web.ask("/cgi-bin/shop.cgi")
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    wait_for(lambda: "rules-unreadable" in log_of(web), what="the line in the server's log")


def test_every_method_stays_and_a_kept_connection_stays_in_step(web: Web) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=10)
    for number, method in enumerate(("OPTIONS", "HEAD", "PUT", "POST", "GET", "HEAD", "DELETE")):
        try:
            connection.request(method, "/cgi-bin/shop.cgi", b"b" * 1000 if method in ("PUT", "POST") else None)
        except (BrokenPipeError, ConnectionResetError):
            assert number >= 3  # refused and closed: the server's right
        response = connection.getresponse()
        body = response.read()
        assert response.status == (200 if number < 3 else 429), log_of(web)
        if method == "HEAD":
            assert body == b""
        elif number < 3:
            assert body.decode().split()[1] == method
        if response.will_close:
            connection.close()
    connection.close()


def test_fields_before_the_programs_own_leave_its_status_cookies_and_redirects_alone(web: Web, folder: Path) -> None:
    program = folder / "cgi-bin" / "shop.cgi"
    for lines, status, name, value in [
        ("Status: 404 Not Found\\nSet-Cookie: a=1\\nContent-Type: text/html\\n\\ngone", 404, "Set-Cookie", "a=1"),
        ("Content-Type: text/plain\\r\\nStatus: 418 Short\\r\\nX-RateLimit-Limit: 9\\r\\n\\r\\nmine", 418, "Content-Type",
         "text/plain"),
        ("Location: https://shop.example/next\\r\\n\\r\\n", 302, "Location", "https://shop.example/next"),
    ]:
        program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
        response, body = web.ask("/cgi-bin/shop.cgi")
        assert response.status == status, (lines, log_of(web))
        assert response.headers[name] == value
        assert response.headers["X-RateLimit-Remaining"] in ("2", "1", "0")
        if status != 302:
            assert body in (b"gone", b"mine")
