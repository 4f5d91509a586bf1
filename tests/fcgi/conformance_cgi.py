"""The conformance table asked of tidegate-cgi: one process a request, a table in a file, a clock that stands still."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / os.environ.get("TIDEGATE_BUILD", "build")
Told = tuple[int, dict[str, str], bytes]


def cgi(rules: Path, now_us: int) -> Callable[[str, str, dict[str, str]], Told]:
    """Asks by environment variables, as a web server does. What is allowed goes on to a program that says `done`."""
    program = rules.parent / "done.cgi"
    program.write_text("#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\ndone'\n")
    program.chmod(0o755)
    subprocess.run([BUILD / "bin" / "tidegate", "compile", rules], check=True, capture_output=True)
    settings = {"GATEWAY_INTERFACE": "CGI/1.1", "SERVER_PROTOCOL": "HTTP/1.1", "REMOTE_ADDR": "127.0.0.1",
                "TIDEGATE_CONFIG": str(rules), "TIDEGATE_STORE": f"shared://{rules.parent}/conformance.table",
                "TIDEGATE_PROGRAM": str(program), "TIDEGATE_NOW_US": str(now_us), "PATH": os.environ["PATH"]}

    def ask(method: str, target: str, headers: dict[str, str]) -> Told:
        sent = {"HTTP_" + name.upper().replace("-", "_"): value for name, value in headers.items()}
        done = subprocess.run([BUILD / "bin" / "tidegate-cgi"], stdin=subprocess.DEVNULL, capture_output=True, check=True,
                              env={**settings, "REQUEST_METHOD": method, "REQUEST_URI": target, **sent})
        assert b": error: " not in done.stderr, done.stderr
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        fields = {name.lower(): value for name, value in (line.split(": ", 1) for line in head.decode().split("\r\n"))}
        return int(fields.pop("status", "200").split()[0]), fields, body

    return ask
