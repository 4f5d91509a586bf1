"""Real web servers on the files under examples/: a server is what replaces its paths and ports, and how it is started.

Must not enter: what a server is expected to answer; that is recipes.py's.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from fcgi_stack import EXAMPLES, Nginx, Server, accepts, free_port, replace

PHP = """<?php
$body = file_get_contents("php://input");
header("Content-Type: application/json");
if ($_SERVER["REQUEST_METHOD"] != "HEAD")
    echo json_encode(["method" => $_SERVER["REQUEST_METHOD"], "uri" => $_SERVER["REQUEST_URI"],
                      "length" => strlen($body), "md5" => md5($body), "case" => $_SERVER["HTTP_X_CASE"] ?? "",
                      "told" => count(preg_grep("/^TIDEGATE_/", array_keys($_SERVER)))]);
"""


class Application(BaseHTTPRequestHandler):
    """An application over HTTP that says what arrived, as the php script above does."""

    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        told = {"method": self.command, "uri": self.path, "length": len(body), "md5": hashlib.md5(body).hexdigest(),
                "case": self.headers.get("X-Case", ""), "told": 0}
        text = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = handle_any

    def log_message(self, *_: object) -> None:
        pass


def close(text: str) -> str:
    """Without the lines marked fail-open; where a server takes no comment behind a line, the mark stands before it."""
    kept, drops = [], False
    for line in text.splitlines(True):
        if not drops and "# fail-open" not in line:
            kept.append(line)
        drops = line.strip() == "# fail-open:"
    return "".join(kept)


@dataclass
class Place:
    """What a recipe's paths become in a test."""

    folder: Path
    application: int  # its port
    php: Path  # php-fpm's socket
    limiter: str  # the daemon's address, with "tcp:" or "unix:" before it
    changes: list[tuple[str, str]] = field(default_factory=list)  # what a test changes on purpose
    fail_open: bool = True

    def text(self, example: str, changes: Iterable[tuple[str, str]]) -> str:
        text = (EXAMPLES / example).read_text()
        if not self.fail_open:
            text = close(text)
        known = [
            ("/run/tidegate/tidegate.sock", self.limiter.removeprefix("unix:")),
            ("/run/tidegate/decide.sock", self.limiter.removeprefix("unix:")),
            ("/run/tidegate/php.sock", self.limiter.removeprefix("unix:")),
            ("127.0.0.1:9410", self.limiter.removeprefix("tcp:")),
            ("/run/php/php-fpm.sock", str(self.php)),
            ("127.0.0.1:8000", f"127.0.0.1:{self.application}"),
            ('"port" => 8000', f'"port" => {self.application}'),
            ("/srv/www", f"{self.folder}/www"),
        ]
        return replace(text, [*self.changes, *((old, new) for old, new in known if old in text), *changes])


def ask(port: int, path: str, method: str = "GET", body: bytes | Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None, timeout: float = 10) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    headers = {"Content-Type": "application/octet-stream", **(headers or {})} if body else headers or {}
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # answered and closed before the body was all sent
        connection.request(method, path, body, headers, encode_chunked=True)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response, data


def group_of(name: str) -> str:
    """The group that a server runs as, where it can change it."""
    return name if os.geteuid() == 0 else grp.getgrgid(os.getegid()).gr_name


def rooted(lines: str, *words: str) -> str:
    """Without root's rights a server has no user to choose."""
    if os.geteuid() == 0:
        return lines
    return "".join(line for line in lines.splitlines(True) if not line.strip().startswith(words))


class Kind:
    """A kind of server: where its program is, whom it runs as, how it is started on an example."""

    program: str
    group = "www-data"

    @classmethod
    def found(cls) -> str | None:
        return shutil.which(cls.program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

    @classmethod
    def start(cls, example: str, place: Place) -> Running:
        port = free_port()
        conf = place.folder / "server.conf"
        log = place.folder / "server.log"
        log.touch()
        log.chmod(0o666)
        conf.write_text(cls.write(example, place, port))
        environment = dict(os.environ, XDG_DATA_HOME=str(place.folder), XDG_CONFIG_HOME=str(place.folder))
        checked = subprocess.run(cls.check(conf), capture_output=True, text=True, env=environment, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        return Running(Server(cls.command(conf), accepts(port), log), port, cls.signal)

    signal = signal.SIGTERM

    @classmethod
    def write(cls, example: str, place: Place, port: int) -> str:
        raise NotImplementedError

    @classmethod
    def command(cls, conf: Path) -> list[object]:
        raise NotImplementedError

    @classmethod
    def check(cls, conf: Path) -> list[object]:
        """The server's own test of a configuration."""
        raise NotImplementedError


@dataclass
class Running:
    server: Server
    port: int
    number: int
    patience: float = 10

    def ask(self, path: str, method: str = "GET", body: bytes | Iterator[bytes] | None = None,
            **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return ask(self.port, path, method, body, named, self.patience)

    def log(self) -> str:
        out = self.server.log_path.with_suffix(".out")
        return self.server.log() + (out.read_text(errors="replace") if out.exists() else "")

    def stop(self) -> None:
        self.server.stop(self.number)


class NginxKind(Kind):
    program = "nginx"
    signal = signal.SIGQUIT

    @classmethod
    def start(cls, example: str, place: Place) -> Running:
        place.text(example, [])
        path = place.folder / "example.conf"
        path.write_text(place.text(example, []))
        nginx = Nginx(path, place.folder / "nginx", [])
        return Running(nginx, nginx.port, cls.signal)


class Apache(Kind):
    program = "apache2"

    @classmethod
    def write(cls, example: str, place: Place, port: int) -> str:
        text = place.text(example, [
            ('ServerRoot "/etc/apache2"', f'ServerRoot "{place.folder}"\nDefaultRuntimeDir "{place.folder}"'),
            ("/run/apache2/apache2.pid", f"{place.folder}/apache.pid"),
            ("/var/log/apache2/error.log", f"{place.folder}/server.log"),
            ("Listen 80", f"Listen 127.0.0.1:{port}"),
        ])
        return rooted(text, "User", "Group")

    @classmethod
    def command(cls, conf: Path) -> list[object]:
        return [cls.found(), "-f", conf, "-DFOREGROUND"]

    @classmethod
    def check(cls, conf: Path) -> list[object]:
        return [cls.found(), "-f", conf, "-t"]


class Lighttpd(Kind):
    program = "lighttpd"

    @classmethod
    def write(cls, example: str, place: Place, port: int) -> str:
        text = place.text(example, [
            ("server.port = 80", f'server.port = {port}\nserver.bind = "127.0.0.1"\n'
                                 f'server.upload-dirs = ( "{place.folder}/tmp" )'),
            ("/run/lighttpd.pid", f"{place.folder}/lighttpd.pid"),
            ("/var/log/lighttpd/error.log", f"{place.folder}/server.log"),
        ])
        return rooted(text, "server.username", "server.groupname")

    @classmethod
    def command(cls, conf: Path) -> list[object]:
        return [cls.found(), "-D", "-f", conf]

    @classmethod
    def check(cls, conf: Path) -> list[object]:
        return [cls.found(), "-tt", "-f", conf]


class Haproxy(Kind):
    program = "haproxy"

    @classmethod
    def write(cls, example: str, place: Place, port: int) -> str:
        text = place.text(example, [
            ("bind :80" if "bind :80" in (EXAMPLES / example).read_text() else "bind 127.0.0.1:80",
             f"bind 127.0.0.1:{port}"),
        ])
        text = text.replace("/etc/haproxy/allowed.http", str(EXAMPLES / "haproxy" / "allowed.http"))
        return rooted(text, "user", "group")

    @classmethod
    def command(cls, conf: Path) -> list[object]:
        return [cls.found(), "-db", "-f", conf]

    @classmethod
    def check(cls, conf: Path) -> list[object]:
        return [cls.found(), "-c", "-q", "-f", conf]


class Caddy(Kind):
    program = "caddy"
    group = "root"

    @classmethod
    def write(cls, example: str, place: Place, port: int) -> str:
        return place.text(example, [(":80 {", f":{port} {{\n\tbind 127.0.0.1")])

    @classmethod
    def command(cls, conf: Path) -> list[object]:
        return [cls.found(), "run", "--adapter", "caddyfile", "--config", conf]

    @classmethod
    def check(cls, conf: Path) -> list[object]:
        return [cls.found(), "adapt", "--adapter", "caddyfile", "--validate", "--config", conf]
