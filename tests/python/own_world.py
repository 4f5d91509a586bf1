"""Runs commands as a reader would type them, in namespaces of their own: every port is free, /run, /srv and /dev/shm
are empty, and whatever was started ends with it.

    unshare … python own_world.py < {"folder", "path", "commands", "port", "requests", "files"}

Prints the answers as JSON: status, fields and body of each request, in order. Must not enter: what is expected of them.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
READY_SECONDS = 30


def main() -> None:
    asked = json.load(sys.stdin)
    with socket.socket() as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))
    for folder in ("/run", "/srv", "/dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    Path("/dev/shm").chmod(0o1777)
    for name, text in asked["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    environment = {"PATH": asked["path"], "HOME": asked["folder"], "PYTHONPATH": asked["folder"]}
    for command in asked["commands"]:
        log = Path(asked["folder"], "log")
        with log.open("ab") as out:
            started = subprocess.Popen(
                command,
                shell=True,
                cwd=asked["folder"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", asked["port"])).close()
            break
        except OSError:
            if started.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"nothing listens on port {asked['port']}:\n{Path(asked['folder'], 'log').read_text()}")
            time.sleep(0.05)
    answers = []
    for method, path in asked["requests"]:
        link = http.client.HTTPConnection("127.0.0.1", asked["port"], timeout=20)
        link.request(method, path)
        answer = link.getresponse()
        answers.append(
            [answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()]
        )
        link.close()
    json.dump(answers, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # this is the namespace's first process: with it the kernel ends what is left


if __name__ == "__main__":
    main()
