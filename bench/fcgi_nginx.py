"""What a FastCGI decision costs behind nginx: tidegate-fcgi beside the same codec and loop with an answer that never
changes, both behind one nginx over kept connections, loaded in turn by wrk.

    python bench/fcgi_nginx.py BUILD_FOLDER [--rounds N] [--seconds S] [--json]

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
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream constant {{ server unix:{folder}/constant.sock; keepalive 64; }}
    upstream tidegate {{ server unix:{folder}/tidegate.sock; keepalive 64; }}
    upstream constant_auth {{ server unix:{folder}/constant-auth.sock; keepalive 64; }}
    fastcgi_keep_conn on;
    include /etc/nginx/fastcgi_params;
    server {{
        listen 127.0.0.1:{port};
        keepalive_requests 1000000000;
        root {folder}/site;
        location = /answer/constant {{ fastcgi_pass constant; }}
        location = /answer/tidegate {{ fastcgi_pass tidegate; }}
        location = /_constant {{ internal; fastcgi_pass constant_auth; }}
        location = /_tidegate {{
            internal;
            include /etc/nginx/fastcgi_params;
            fastcgi_param TIDEGATE_MODE auth;
            fastcgi_pass tidegate;
        }}
        location = /auth/constant {{ auth_request /_constant; }}
        location = /auth/tidegate {{ auth_request /_tidegate; }}
    }}
}}
"""
RULES = "policies:\n  - name: bench\n    rules: 10000000000/day token_bucket\n    by: ip\n"


def rate(port: int, path: str, seconds: float) -> float:
    url = f"http://127.0.0.1:{port}{path}"
    done = subprocess.run(
        ["wrk", "-t1", "-c32", f"-d{seconds:g}s", url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Requests/sec:\s*([\d.]+)", done.stdout)
    if not found or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise SystemExit(f"{url}: {done.stdout}")
    return float(found.group(1))


def measure(build: Path, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
    running: list[subprocess.Popen[bytes]] = []
    try:
        (folder / "site/auth").mkdir(parents=True)
        for name in ("constant", "tidegate"):
            (folder / "site/auth" / name).write_text("x" * 100)
        (folder / "rules.yaml").write_text(RULES)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "nginx.conf").write_text(CONF.format(folder=folder, port=port))
        log = (folder / "log").open("wb")
        for command in (
            [build / "bench/fcgi_constant", f"unix:{folder}/constant.sock"],
            [build / "bench/fcgi_constant", f"unix:{folder}/constant-auth.sock", "auth"],
            [
                build / "bin/tidegate-fcgi",
                "--config",
                folder / "rules.yaml",
                "--store",
                "memory://bench",
                "--listen",
                f"unix:{folder}/tidegate.sock",
            ],
            ["/usr/sbin/nginx", "-e", folder / "nginx.log", "-c", folder / "nginx.conf", "-g", "daemon off;"],
        ):
            running.append(
                subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        deadline = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline:
                raise SystemExit((folder / "log").read_text() + (folder / "nginx.log").read_text())
            time.sleep(0.05)
        rates: dict[str, list[float]] = {}
        for path in (
            f"/{kind}/{whose}"
            for _ in range(rounds)
            for kind in ("answer", "auth")
            for whose in ("constant", "tidegate")
        ):
            rates.setdefault(path, []).append(rate(port, path, seconds))
        return {
            kind: {
                "constant": statistics.median(rates[f"/{kind}/constant"]),
                "tidegate": statistics.median(rates[f"/{kind}/tidegate"]),
                "ratio": statistics.median(
                    ours / theirs
                    for ours, theirs in zip(rates[f"/{kind}/tidegate"], rates[f"/{kind}/constant"], strict=True)
                ),
            }
            for kind in ("answer", "auth")
        }
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
        shutil.rmtree(folder)


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
        for kind, row in table.items():
            rates = f"constant {row['constant']:8.0f}/s   tidegate {row['tidegate']:8.0f}/s"
            print(f"{kind:8} {rates}   ratio {row['ratio']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
