"""Real servers on the files under examples/: paths, ports and users replaced, not a line else."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from fcgi_daemon import free_port, wait_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"


CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}  # what the tests are told


def php_fpm() -> str | None:
    found = [path for folder in ("/usr/sbin", "/usr/local/sbin", "/usr/bin") for path in Path(folder).glob("php-fpm*")]
    return str(sorted(found)[0]) if found else None


def replace(text: str, changes: Iterable[tuple[str, str]]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Server:
    """A program that was started for a test and is ended by its pid."""

    def __init__(self, command: list[object], ready: Callable[[], bool], log: Path) -> None:
        self.log_path = log
        self.output = log.with_suffix(".out").open("wb")
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                                        stdout=self.output, stderr=self.output, env=CLEAN)

        def up() -> bool:
            assert self.process.poll() is None, self.log() + log.with_suffix(".out").read_text()
            return ready()

        wait_for(up, 30, str(command[0]))

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stop(self, number: int = signal.SIGQUIT) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.output.close()


def accepts(port: int) -> Callable[[], bool]:
    def probe() -> bool:
        with socket.socket() as peer:
            return peer.connect_ex(("127.0.0.1", port)) == 0

    return probe


class Nginx(Server):
    def __init__(self, example: Path, folder: Path, changes: Iterable[tuple[str, str]],
                 keep: Callable[[str], bool] = lambda line: True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        text = "".join(line for line in example.read_text().splitlines(True) if keep(line))
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in
                            ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        text = replace(text, [
            *changes,
            ("listen 80;", f"listen 127.0.0.1:{self.port};"),
            ("/var/log/nginx/", f"{folder}/"),
            ("/run/nginx.pid", f"{folder}/nginx.pid"),
            ("worker_processes auto;", "worker_processes 1;"),
            ("include mime.types;", "include /etc/nginx/mime.types;"),
            ("include fastcgi_params;", "include /etc/nginx/fastcgi_params;"),
            ("http {", f"http {{ {temporary}"),
        ])
        # Its folder is private; without root's rights nginx has no user to choose.
        text = text.replace("user www-data;", "user root;" if os.geteuid() == 0 else "", 1)
        (folder / "nginx.conf").write_text(text)
        super().__init__([NGINX, "-e", folder / "error.log", "-c", folder / "nginx.conf", "-g", "daemon off;"],
                         accepts(self.port), folder / "error.log")

    def ask(self, path: str, method: str = "GET", body: object = None,
            **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names, encode_chunked=True)  # type: ignore[arg-type]
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response, data


class PhpFpm(Server):
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "php.sock"
        root = os.geteuid() == 0
        text = replace((EXAMPLES / "php-fpm" / "pool.conf").read_text(), [
            ("/run/php/php-fpm.sock", str(self.socket)),
            ("/run/php/php-fpm.pid", f"{folder}/pid"),
            ("/var/log/php-fpm.log", f"{folder}/error.log"),
        ])
        if not root:
            text = "".join(line for line in text.splitlines(True)
                           if not line.startswith(("user", "group", "listen.owner", "listen.group")))
        (folder / "pool.conf").write_text(text)
        super().__init__([php_fpm(), "-F", "-n", "-y", folder / "pool.conf"], self.socket.exists, folder / "error.log")
