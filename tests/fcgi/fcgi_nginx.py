"""Real nginx on examples/nginx/nginx.conf: paths and ports replaced, and what a test changes on purpose."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from fcgi_daemon import free_port, wait_for

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nginx"


class Nginx:
    def __init__(self, folder: Path, socket_path: str, backend: int, keep: Callable[[str], bool],
                 changes: dict[str, str] | None = None, patient: bool = True) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / "www").mkdir(parents=True)
        for name in ("index", "two", "closed", "keyed", "keyed400", "user"):
            (folder / "www" / f"{name}.html").write_text(f"page {name}")
        (folder / "www" / "empty").mkdir()
        text = "".join(line for line in (EXAMPLE / "nginx.conf").read_text().splitlines(True) if keep(line))
        if patient:  # a test that is not about a silent limiter must not meet one on a busy machine
            text = text.replace("_timeout 100ms;", "_timeout 10s;").replace("_timeout 200ms;", "_timeout 10s;")
        for old, new in (
            *(changes or {}).items(),
            ("unix:/run/tidegate/tidegate.sock", socket_path),
            ("/srv/www", f"{folder}/www"),
            ("listen 80;", f"listen 127.0.0.1:{self.port};"),
            ("http://127.0.0.1:8000", f"http://127.0.0.1:{backend}"),
            ("/var/log/nginx/", f"{folder}/"),
            ("/run/nginx.pid", f"{folder}/nginx.pid"),
            ("worker_processes auto;", "worker_processes 2;"),
            ("include mime.types;", "include /etc/nginx/mime.types;"),
            ("include fastcgi_params;", "include /etc/nginx/fastcgi_params;"),
        ):
            assert text.count(old) >= 1, old
            text = text.replace(old, new)
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in
                            ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        text = text.replace("http {", f"http {{ {temporary}", 1)
        # Its folder is private; without root's rights nginx has no user to choose.
        text = text.replace("user www-data;", "user root;" if os.geteuid() == 0 else "", 1)
        self.conf = folder / "nginx.conf"
        self.conf.write_text(text)
        self.errors_path = folder / "error.log"
        self.process = subprocess.Popen(
            [NGINX, "-e", self.errors_path, "-c", self.conf, "-g", "daemon off;"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )

        def listening() -> bool:
            assert self.process.poll() is None, self.errors()
            with socket.socket() as peer:
                return peer.connect_ex(("127.0.0.1", self.port)) == 0

        wait_for(listening, what="nginx")

    def errors(self) -> str:
        return self.errors_path.read_text() if self.errors_path.exists() else ""

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def ask(self, path: str, method: str = "GET", body: bytes | Iterator[bytes] | None = None,
            **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names, encode_chunked=True)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response, data
