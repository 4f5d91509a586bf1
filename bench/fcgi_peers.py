"""tidegate-fcgi beside what else could answer: on the raw socket beside libfcgi's own server, behind nginx beside an answer
that never changes, libfcgi and nginx's own limit_req, with 128 clients, and its memory over a million requests.

    python bench/fcgi_peers.py BUILD_FOLDER [--rounds N] [--seconds S] [--json]

Must not enter: what is expected of the numbers; that stands in table.py.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

THREADS = 16
CONF = """
user root; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log crit;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    limit_req_zone $binary_remote_addr zone=bench:10m rate=1000000r/s;
    # As many kept connections as libfcgi has threads: one more would wait for good.
    upstream constant {{ server unix:{folder}/constant.sock; keepalive {threads}; }}
    upstream tidegate {{ server unix:{folder}/tidegate.sock; keepalive {threads}; }}
    upstream libfcgi {{ server unix:{folder}/libfcgi.sock; keepalive {threads}; }}
    fastcgi_keep_conn on;
    server {{
        listen 127.0.0.1:{port};
        keepalive_requests 1000000000;
        root {folder}/site;
        include /etc/nginx/fastcgi_params;
        fastcgi_param TIDEGATE_MODE auth;
        location = /constant {{ fastcgi_pass constant; }}
        location = /tidegate {{ fastcgi_pass tidegate; }}
        location = /libfcgi {{ fastcgi_pass libfcgi; }}
        location = /limit_req {{ limit_req zone=bench burst=1000000 nodelay; return 204; }}
    }}
}}
"""
RULES = "policies:\n  - name: bench\n    rules: 10000000000/day token_bucket\n    by: ip\n"
BEHIND_NGINX = ("constant", "tidegate", "libfcgi", "limit_req")


class Stack:
    """The three responders and nginx, started in a folder of their own."""

    def __init__(self, build: Path) -> None:
        self.build = build
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
        self.running: list[subprocess.Popen[bytes]] = []
        (self.folder / "site").mkdir()
        (self.folder / "rules.yaml").write_text(RULES)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        conf = CONF.format(folder=self.folder, port=self.port, threads=THREADS)
        (self.folder / "nginx.conf").write_text(conf)
        self.start(build / "bench/fcgi_constant", f"unix:{self.folder}/constant.sock", "auth")
        for name in ("libfcgi", "libfcgi-raw"):  # nginx keeps its connections, and with them all threads of one
            self.start(build / "bench/fcgi_libfcgi", self.folder / f"{name}.sock", THREADS)
        self.daemon = self.start(
            build / "bin/tidegate-fcgi", "--config", self.folder / "rules.yaml", "--store", "memory://bench",
            "--listen", f"unix:{self.folder}/tidegate.sock", "--mode", "auth",
        )
        self.start("/usr/sbin/nginx", "-e", self.folder / "nginx.log", "-c", self.folder / "nginx.conf", "-g",
                   "daemon off;")
        deadline = time.monotonic() + 10
        while not self.is_up():
            if time.monotonic() > deadline:
                raise SystemExit((self.folder / "log").read_text())
            time.sleep(0.05)

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.running.append(process)
        return process

    def is_up(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0 and (self.folder / "tidegate.sock").exists()

    def stop(self) -> None:
        for process in reversed(self.running):
            # libfcgi takes SIGTERM as a word about the next request; nginx would leave its workers behind at SIGKILL.
            process.kill() if "fcgi_libfcgi" in str(process.args) else process.terminate()
            process.wait()
        shutil.rmtree(self.folder)

    def resident_kib(self) -> int:
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]

    def raw(self, whose: str, connections: int, in_flight: int, seconds: float) -> float:
        """Answers a second on the socket itself."""
        command = [self.build / "bench/fcgi_raw", self.folder / f"{whose}.sock", connections, in_flight, seconds]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
        return float(done.stdout.split()[0])

    def wrk(self, path: str, clients: int, seconds: float) -> tuple[float, float]:
        """Answers a second, and the 99th percentile in ms."""
        done = subprocess.run(
            ["wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", f"http://127.0.0.1:{self.port}/{path}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
        )
        rate = re.search(r"Requests/sec:\s*([\d.]+)", done.stdout)
        p99 = re.search(r"99%\s+([\d.]+)(us|ms|s)", done.stdout)
        if not rate or not p99 or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
            raise SystemExit(f"/{path}: {done.stdout}")
        return float(rate[1]), float(p99[1]) * {"us": 0.001, "ms": 1, "s": 1000}[p99[2]]


def measure(build: Path, rounds: int, seconds: float) -> dict[str, float]:
    samples: dict[str, list[float]] = {}

    def add(row: str, number: float) -> None:
        samples.setdefault(row, []).append(number)

    stack = Stack(build)
    try:
        for _ in range(rounds):
            add("raw libfcgi, 16 threads", stack.raw("libfcgi-raw", THREADS, 1, seconds))
            add("raw tidegate", stack.raw("tidegate", THREADS, 1, seconds))
            add("raw tidegate, 8 in flight", stack.raw("tidegate", THREADS, 8, seconds))
            for path in BEHIND_NGINX:
                add(f"nginx {path}", stack.wrk(path, 32, seconds)[0])
            for path in ("constant", "tidegate"):
                add(f"p99 ms of 128 clients, {path}", stack.wrk(path, 128, seconds)[1])
        before_kib, answered = stack.resident_kib(), 0.0
        while answered < 1_000_000:
            answered += stack.raw("tidegate", THREADS, 8, 1)
        table = {row: statistics.median(numbers) for row, numbers in samples.items()}
        table["KiB grown over a million requests"] = stack.resident_kib() - before_kib
        for row, above, below in (
            ("raw tidegate to libfcgi", "raw tidegate", "raw libfcgi, 16 threads"),
            ("8 in flight to 1", "raw tidegate, 8 in flight", "raw tidegate"),
            ("nginx tidegate to constant", "nginx tidegate", "nginx constant"),
            ("nginx tidegate to libfcgi", "nginx tidegate", "nginx libfcgi"),
            ("nginx tidegate to limit_req", "nginx tidegate", "nginx limit_req"),
        ):
            table[row] = statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))
        return table
    finally:
        stack.stop()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("build", type=Path)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--seconds", type=float, default=1)
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    table = measure(asked.build.resolve(), asked.rounds, asked.seconds)
    if asked.json:
        print(json.dumps(table))
    else:
        for row, number in table.items():
            print(f"{row:40} {number:12.3f}" if number < 1000 else f"{row:40} {number:12.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
