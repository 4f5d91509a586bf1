"""What the relay costs in front of php-fpm: the same script behind one nginx, asked through tidegate-fcgi and directly,
loaded in turn by wrk.

    python bench/fcgi_relay.py BUILD_FOLDER [--rounds N] [--seconds S] [--clients C] [--json]

Must not enter: what is expected of the ratio.
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

CONF = """
user root; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream relay {{ server unix:{folder}/relay.sock; keepalive 64; }}
    upstream direct {{ server unix:{folder}/php.sock; }}
    server {{
        listen 127.0.0.1:{port};
        keepalive_requests 1000000000;
        root {folder}/site;
        include /etc/nginx/fastcgi_params;
        fastcgi_param SCRIPT_FILENAME {folder}/site/index.php;
        # php is not to keep a connection: that would hold one of its workers.
        location = /direct {{ fastcgi_pass direct; }}
        location = /relay {{ fastcgi_keep_conn on; fastcgi_pass relay; }}
    }}
}}
"""
POOL = """
[global]
pid = {folder}/php.pid
error_log = {folder}/php.log
[www]
user = root
group = root
listen = {folder}/php.sock
listen.backlog = 511
pm = static
pm.max_children = 4
"""
RULES = "policies:\n  - name: bench\n    rules: 10000000000/day token_bucket\n    by: ip\n"


def load(port: int, path: str, seconds: int, clients: int) -> tuple[float, float]:
    """Requests a second, and the 99th percentile in ms."""
    done = subprocess.run(
        ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--latency", f"http://127.0.0.1:{port}{path}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Requests/sec:\s*([\d.]+)", done.stdout)
    late = re.search(r"99%\s*([\d.]+)(us|ms|s)", done.stdout)
    if not found or not late or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise SystemExit(f"{path}: {done.stdout}")
    return float(found.group(1)), float(late.group(1)) * {"us": 0.001, "ms": 1, "s": 1000}[late.group(2)]


def measure(build: Path, rounds: int, seconds: int, clients: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
    running: list[subprocess.Popen[bytes]] = []
    php = sorted(Path("/usr/sbin").glob("php-fpm*"))[0]
    try:
        (folder / "site").mkdir()
        (folder / "site/index.php").write_text("<?php echo str_repeat('x', 100);")
        (folder / "rules.yaml").write_text(RULES)
        (folder / "pool.conf").write_text(POOL.format(folder=folder))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "nginx.conf").write_text(CONF.format(folder=folder, port=port))
        log = (folder / "log").open("wb")
        relay = f"unix:{folder}/relay.sock,relay-to=unix:{folder}/php.sock,root={folder}/site"
        for command in (
            [php, "-F", "-R", "-n", "-y", folder / "pool.conf"],
            [build / "bin/tidegate-fcgi", "--config", folder / "rules.yaml", "--store", "memory://", "--listen", relay],
            ["/usr/sbin/nginx", "-e", folder / "nginx.log", "-c", folder / "nginx.conf", "-g", "daemon off;"],
        ):
            running.append(
                subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        deadline = time.monotonic() + 10
        while not ((folder / "php.sock").exists() and (folder / "relay.sock").exists()):
            if time.monotonic() > deadline:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.05)
        time.sleep(0.3)
        rows: dict[str, list[tuple[float, float]]] = {"/direct": [], "/relay": []}
        for number in range(rounds):
            for path in sorted(rows, reverse=number % 2 == 1):
                rows[path].append(load(port, path, seconds, clients))
        return {
            "direct": statistics.median(rate for rate, _ in rows["/direct"]),
            "relay": statistics.median(rate for rate, _ in rows["/relay"]),
            "ratio": statistics.median(
                ours[0] / theirs[0] for ours, theirs in zip(rows["/relay"], rows["/direct"], strict=True)
            ),
            "direct_p99_ms": statistics.median(late for _, late in rows["/direct"]),
            "relay_p99_ms": statistics.median(late for _, late in rows["/relay"]),
        }
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("build", type=Path)
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument("--seconds", type=int, default=1)
    arguments.add_argument("--clients", type=int, default=16)
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    row = measure(asked.build.resolve(), asked.rounds, asked.seconds, asked.clients)
    if asked.json:
        print(json.dumps(row))
    else:
        print(f"direct {row['direct']:8.0f}/s p99 {row['direct_p99_ms']:.1f} ms   relay {row['relay']:8.0f}/s "
              f"p99 {row['relay_p99_ms']:.1f} ms   ratio {row['ratio']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
