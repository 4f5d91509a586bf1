"""Starts a real server on a socket of this test's own, waits until all its workers are up, and ends it.

Must not enter: what is expected of its answers.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = {"gunicorn": "Booting worker", "uvicorn": "Application startup complete", "hypercorn": "Running on"}
READY_SECONDS = 90


class Server:
    """`command` is `gunicorn`, `uvicorn` or `hypercorn` and its arguments but the socket; run as `python -m`."""

    def __init__(self, folder: Path, *command: str, workers: int = 1, **environment: str) -> None:
        self.log = folder / "server.log"
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self.listener.getsockname()[1]
        descriptor = self.listener.fileno()
        bind = {
            "gunicorn": ["--bind", f"fd://{descriptor}"],
            "uvicorn": ["--fd", str(descriptor)],
            "hypercorn": ["--bind", f"fd://{descriptor}"],
        }[command[0]]
        given = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1", **environment}
        given.setdefault("TIDEGATE_STORE", f"shared://{folder}/table?size=1MiB")
        given.pop("TIDEGATE_ENABLED", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *bind], pass_fds=[descriptor], cwd=folder, env=given, stdout=log, stderr=log
            )
        deadline = time.monotonic() + READY_SECONDS
        while self.log.read_text().count(STARTED[command[0]]) < workers:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"{command}:\n{self.log.read_text()}")
            time.sleep(0.05)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, bytes]:
        """On a connection of its own, so that any worker may take it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {"Connection": "close", **named})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self.listener.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
