"""One limit, asked from FastAPI, Flask and nginx at once, each server under its own user.

Starts tidegate-fcgi, uvicorn (2 workers), gunicorn (2 workers) and nginx from a private folder, sends a mixed load of
real HTTP requests from several clients to all three faces at once, and shows that what was admitted for each client is
the limit exactly. Standard library only; runs as root, with the system's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import importlib.metadata
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT = 120
RULES = f"{LIMIT}/hour"
CLIENTS = [f"127.0.0.{last}" for last in (11, 12, 13, 14, 15, 16)]
REQUESTS_PER_FACE = 70  # of each client: three times that is well over the limit
STRIDE = 7  # a client's three connections wait for each other after so many, or the fastest face would take it all
READY_SECONDS = 30.0
PR_SET_CHILD_SUBREAPER = 36
SERVERS = ("tidegate", "fastapi", "flask", "nginx")


@dataclass
class Face:
    name: str
    served_by: str
    requests: list[tuple[str, str]]  # method and path, drawn from at random


FACES = [
    Face(
        "FastAPI",
        "uvicorn, 2 workers",
        [("GET", "/api/tides/brest"), ("GET", "/api/tides/dover"), ("POST", "/api/tides/brest")],
    ),
    Face("Flask", "gunicorn, 2 workers", [("GET", "/shop/kettle"), ("POST", "/shop/lamp")]),
    Face("nginx", "static files, tidegate-fcgi", [("GET", "/files/index.html"), ("HEAD", "/files/index.html")]),
]


@dataclass
class Count:
    sent: int = 0
    admitted: int = 0
    refused: int = 0
    workers: set[int] = field(default_factory=set)


class DemoError(Exception):
    """Something of the demo did not start or stay up; the text is for the reader."""


# ---- the servers -----------------------------------------------------------------------------------------------


def free_ids(count: int) -> range:
    """A run of ids that are nobody's: neither in the user nor in the group database, nor anyone running."""
    import grp
    import pwd

    taken = {entry.pw_uid for entry in pwd.getpwall()} | {entry.gr_gid for entry in grp.getgrall()}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            taken.add(process.stat().st_uid)
    for first in range(59000, 59900, count):
        if not taken.intersection(range(first, first + count)):
            return range(first, first + count)
    raise DemoError("no free user ids between 59000 and 59900")


def distributions(names: list[str], site: Path) -> Iterator[importlib.metadata.Distribution]:
    """The named distributions of a site folder, and what they need there."""
    installed = {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found
        for found in importlib.metadata.distributions(path=[str(site)])
    }
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in installed:
            continue
        seen.add(name)
        yield installed[name]
        for need in installed[name].requires or ():
            if "extra ==" not in need:
                waiting.append(re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", need.strip(), maxsplit=1)[0]).lower())


def copy_python(target: Path) -> None:
    """What the apps import, copied to where their users can read it: the repository may lie in a closed home."""
    (site,) = (ROOT / ".venv/lib").glob("python3.*/site-packages")
    for distribution in distributions(["fastapi", "uvicorn", "flask", "gunicorn"], site):
        for entry in distribution.files or ():
            source = site / entry
            if ".." in entry.parts or not source.is_file():
                continue
            (target / entry).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / entry)
    shutil.copytree(ROOT / "python/tidegate", target / "tidegate")


class Servers:
    """The four servers and their folder. Leaves nothing behind: neither a process nor a file."""

    def __init__(self) -> None:
        ids = free_ids(len(SERVERS) + 1)
        self.group = ids[0]
        self.users = dict(zip(SERVERS, ids[1:], strict=True))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.port = 0
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-demo-"))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def __enter__(self) -> Servers:
        try:
            self._lay_out()
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.running.values()):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 5
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            self._reap(process.pid, deadline)
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _reap(group: int, deadline: float) -> None:
        """Waits for a server's own group: it has a session, so its workers and nobody else. Orphans come to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                if os.waitpid(-group, os.WNOHANG)[0] == 0:
                    if time.monotonic() > deadline:
                        os.killpg(group, signal.SIGKILL)
                    time.sleep(0.01)

    def _lay_out(self) -> None:
        # Others of the machine cannot enter; the group's users can pass through, each writing only what is its own.
        os.chown(self.folder, 0, self.group)
        self.folder.chmod(0o710)
        for name in ("app", "bin", "site", "run", "log"):
            (self.folder / name).mkdir()
        shutil.copytree(HERE / "site", self.folder / "site/files")
        shutil.copy2(ROOT / "build/bin/tidegate-fcgi", self.folder / "bin")
        (self.folder / "bin/tidegate-fcgi").chmod(0o755)
        for app in ("fastapi_app.py", "flask_app.py"):
            shutil.copy2(HERE / app, self.folder / "app")
        copy_python(self.folder / "app")
        for path in [
            self.folder / "app",
            self.folder / "site",
            *self.folder.glob("app/**/*"),
            *self.folder.glob("site/**/*"),
        ]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        for name, user in self.users.items():
            for folder in (self.folder / "run" / name, *([self.folder / "nginx"] if name == "nginx" else [])):
                folder.mkdir()
                os.chown(folder, user, self.group)
                folder.chmod(0o750)
            log = self.folder / "log" / f"{name}.log"
            log.touch()
            os.chown(log, user, self.group)
        self.rules = self._fill(
            "rules.yaml",
            STATE=self.folder / "run/tidegate/limits",
            GROUP=self.group,
            OWNER=self.users["tidegate"],
            RULES=RULES,
        )

    def _fill(self, template: str, **values: object) -> Path:
        text = (HERE / template).read_text()
        for name, value in values.items():
            text = text.replace(f"@{name}@", str(value))
        path = self.folder / template
        path.write_text(text)
        path.chmod(0o644)
        return path

    def _start(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder / "run" / name),
            "PYTHONPATH": str(self.folder / "app"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TIDEGATE_CONFIG": str(self.rules),
        }
        # setpriv becomes the server; should this driver be killed, the kernel tells the server to leave.
        user = ["--reuid", str(self.users[name]), "--regid", str(self.group), "--clear-groups"]
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", *user, "--no-new-privs", "--pdeathsig", "TERM", "--", *map(str, command)],
                cwd=self.folder / "app",
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.running[name] = process
        return process

    def _start_all(self) -> None:
        run, python = self.folder / "run", "/usr/bin/python3"
        # First, so that the state is its own: the rules file names it as the owner that the others accept.
        self._start(
            "tidegate",
            self.folder / "bin/tidegate-fcgi",
            "--config",
            self.rules,
            "--listen",
            f"unix:{run}/tidegate/fcgi.sock,mode=0660",
        )
        self._await("tidegate", lambda: self._connects(run / "tidegate/fcgi.sock"))
        self._start(
            "fastapi",
            python,
            "-m",
            "uvicorn",
            "fastapi_app:app",
            "--workers",
            "2",
            "--uds",
            run / "fastapi/http.sock",
            "--no-access-log",
        )
        self._start(
            "flask",
            python,
            "-m",
            "gunicorn",
            "flask_app:app",
            "--workers",
            "2",
            "--worker-tmp-dir",
            run / "flask",
            "--bind",
            f"unix:{run}/flask/http.sock",
            "--no-control-socket",
        )
        for name in ("fastapi", "flask"):
            self._await(name, lambda name=name: self._connects(run / name / "http.sock"))
        for attempt in itertools.count(1):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            conf = self._fill("nginx.conf", FOLDER=self.folder, PORT=self.port)
            log = self.folder / "log/nginx.log"
            self._start(
                "nginx", "/usr/sbin/nginx", "-p", self.folder / "nginx", "-e", log, "-c", conf, "-g", "daemon off;"
            )
            try:
                self._await("nginx", lambda: self._connects(("127.0.0.1", self.port)))
                break
            except DemoError:
                if attempt == 3 or "Address already in use" not in log.read_text():
                    raise
        # Asked from an address that is none of the clients': the readiness of the apps costs them nothing.
        for name, path in (("fastapi", "/api/tides/ready"), ("flask", "/shop/ready")):
            self._await(name, lambda path=path: self._answers(path))

    def _await(self, name: str, ready: object) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not ready():  # type: ignore[operator]
            status = self.running[name].poll()
            if status is not None or time.monotonic() > deadline:
                log = self.folder / "log" / f"{name}.log"
                said = log.read_text(errors="replace")[-2000:]
                what = f"ended with {status}" if status is not None else f"is not ready after {READY_SECONDS:.0f} s"
                raise DemoError(f"{name} {what}:\n{said}")
            time.sleep(0.05)

    @staticmethod
    def _connects(address: Path | tuple[str, int]) -> bool:
        kind = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
        with socket.socket(kind) as probe:
            return probe.connect_ex(str(address) if isinstance(address, Path) else address) == 0

    def _answers(self, path: str) -> bool:
        with contextlib.closing(connection("127.0.0.2", self.port)) as probe:
            try:
                probe.request("GET", path)
                return probe.getresponse().status < 500
            except OSError:
                return False


def connection(client: str, port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(client, 0))


# ---- the load --------------------------------------------------------------------------------------------------


class Load:
    """Every client asks every face at once, each over a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.by_face = {face.name: Count() for face in FACES}
        self.by_client = {client: Count() for client in CLIENTS}
        self.remaining: dict[str, list[int]] = {client: [] for client in CLIENTS}
        self.faults: list[str] = []
        self.done = 0
        self.lock = threading.Lock()

    def run(self, screen: Screen) -> float:
        pairs = list(itertools.product(CLIENTS, FACES))
        strides = {client: threading.Barrier(len(FACES)) for client in CLIENTS}
        threads = [
            threading.Thread(target=self._ask, args=(client, face, strides[client]), daemon=True)
            for client, face in pairs
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        total = len(pairs) * REQUESTS_PER_FACE
        while any(thread.is_alive() for thread in threads):
            screen.progress(self.done, total)
            time.sleep(0.05)
        screen.progress(total, total)
        return time.monotonic() - started

    def _ask(self, client: str, face: Face, stride: threading.Barrier) -> None:
        draw = random.Random(f"{client} {face.name}")
        link = connection(client, self.port)
        for number in range(REQUESTS_PER_FACE):
            if number % STRIDE == 0:
                with contextlib.suppress(threading.BrokenBarrierError):
                    stride.wait(timeout=20)
            method, path = draw.choice(face.requests)
            try:
                link.request(method, path)
                answer = link.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as trouble:
                link.close()
                with self.lock:
                    self.done += 1
                    self.faults.append(f"{face.name}: {client} {method} {path}: {trouble!r}")
                continue
            with self.lock:
                self._note(client, face, f"{method} {path}", answer, body)
        link.close()

    def _note(self, client: str, face: Face, asked: str, answer: http.client.HTTPResponse, body: bytes) -> None:
        self.done += 1
        counts = (self.by_face[face.name], self.by_client[client])
        for count in counts:
            count.sent += 1
        if answer.status == 200:
            remaining = answer.headers.get("X-RateLimit-Remaining", "")
            if remaining.isdecimal():
                self.remaining[client].append(int(remaining))
            else:
                self.faults.append(f"{face.name}: {client} {asked}: 200 without X-RateLimit-Remaining")
            for count in counts:
                count.admitted += 1
            with contextlib.suppress(ValueError, KeyError, TypeError):
                counts[0].workers.add(json.loads(body)["worker"])
        elif answer.status == 429:
            for count in counts:
                count.refused += 1
            retry = answer.headers.get("Retry-After", "")
            if not re.fullmatch(r"[1-9][0-9]*", retry) or int(retry) > 3600:
                self.faults.append(f"{face.name}: {client} {asked}: 429 with Retry-After {retry!r}")
        else:
            self.faults.append(f"{face.name}: {client} {asked}: status {answer.status}")

    def judge(self) -> list[str]:
        """What is off; empty when every sum is the limit exactly."""
        off = list(self.faults)
        for client in CLIENTS:
            admitted = self.by_client[client].admitted
            if admitted != LIMIT:
                off.append(f"{client} was admitted {admitted} times, not {LIMIT}")
            elif sorted(self.remaining[client]) != list(range(LIMIT)):
                off.append(f"{client}: X-RateLimit-Remaining did not count down from {LIMIT - 1} to 0, each once")
        return off


# ---- what a reader sees ----------------------------------------------------------------------------------------


class Screen:
    def __init__(self) -> None:
        self.colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.moving = sys.stderr.isatty()

    def paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colours else text

    def say(self, text: str) -> None:
        if self.moving:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        width = 40
        filled = done * width // total
        self.say(f"{'█' * filled}{'·' * (width - filled)} {done} of {total} requests" if done < total else "")

    def table(self, titles: list[str], rows: list[list[str]], total: list[str]) -> None:
        def width_of(cell: str) -> int:
            return len(re.sub(r"\033\[\d+m", "", cell))

        widths = [max(width_of(row[column]) for row in [titles, *rows, total]) for column in range(len(titles))]
        numbers = [all(row[column].replace(" ", "").isdigit() for row in rows) for column in range(len(titles))]

        def line(cells: list[str]) -> str:
            aligned = [
                " " * (width - width_of(cell)) + cell if number else cell + " " * (width - width_of(cell))
                for cell, width, number in zip(cells, widths, numbers, strict=True)
            ]
            return "  " + "   ".join(aligned).rstrip()

        print(self.paint("1", line(titles)))
        print("  " + "   ".join("─" * width for width in widths))
        for row in rows:
            print(line(row))
        print("  " + "   ".join("─" * width for width in widths))
        print(self.paint("1", line(total)))


def show(screen: Screen, load: Load, seconds: float, off: list[str]) -> None:
    print(f"\nOne limit of {screen.paint('1', RULES)} for each client address, asked from three faces at once:\n")
    sums = [sum(getattr(count, name) for count in load.by_face.values()) for name in ("sent", "admitted", "refused")]
    rows = []
    for face in FACES:
        count = load.by_face[face.name]
        rows.append([face.name, face.served_by, str(count.sent), str(count.admitted), str(count.refused)])
    screen.table(["face", "served by", "sent", "admitted", "refused"], rows, ["all", "", *map(str, sums)])
    print()
    rows = []
    for client, count in load.by_client.items():
        word = screen.paint("32", "exact") if count.admitted == LIMIT else screen.paint("31", "OFF")
        rows.append([client, str(count.sent), str(count.admitted), str(count.refused), str(LIMIT), word])
    screen.table(
        ["client", "sent", "admitted", "refused", "limit", ""],
        rows,
        ["all", *map(str, sums), str(LIMIT * len(CLIENTS)), ""],
    )
    workers = ", ".join(f"{face.name} {len(load.by_face[face.name].workers)}" for face in FACES[:2])
    print(f"\n  {seconds:.1f} s; workers that admitted: {workers}")
    if off:
        print(screen.paint("31", f"\n  {len(off)} things are off:"))
        for line in off[:20]:
            print(f"    {line}")
    else:
        print(screen.paint("32", "\n  Every sum is the limit exactly; every refusal is a 429 with Retry-After."))


def report(load: Load, seconds: float, off: list[str], servers: Servers) -> dict[str, object]:
    def numbers(count: Count) -> dict[str, int]:
        return {"sent": count.sent, "admitted": count.admitted, "refused": count.refused}

    return {
        "rules": RULES,
        "seconds": round(seconds, 3),
        "faces": {name: {**numbers(count), "workers": len(count.workers)} for name, count in load.by_face.items()},
        "clients": {name: {**numbers(count), "limit": LIMIT} for name, count in load.by_client.items()},
        "users": servers.users,
        "exact": not off,
        "off": off,
        "addresses": addresses(servers.port),
    }


def addresses(port: int) -> dict[str, str]:
    return {face.name: f"http://127.0.0.1:{port}{face.requests[0][1]}" for face in FACES}


def stay(screen: Screen, servers: Servers) -> int:
    print("\nStill up, until Ctrl-C; your own address, 127.0.0.1, has its own count:\n")
    for name, address in addresses(servers.port).items():
        print(f"  {name:8} {screen.paint('36', address)}")
    print(f"\n  try     curl -i {addresses(servers.port)['Flask']}", flush=True)
    while True:
        for name, process in servers.running.items():
            if process.poll() is not None:
                print(f"demo: {name} ended with {process.returncode}", file=sys.stderr)
                return 1
        time.sleep(0.5)


ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt(*_: object) -> None:
    """Once: an impatient second Ctrl-C would cut short what stops the servers and removes the folder."""
    for end in ENDS:
        signal.signal(end, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--once", action="store_true", help="leave after the table; non-zero if a sum is off")
    arguments.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    asked = arguments.parse_args()
    if os.geteuid() != 0:
        print("demo: run it as root: each server gets a user of its own", file=sys.stderr)
        return 1
    os.umask(0o022)  # whatever root's own is: the servers' users have to read what is laid out for them
    for end in ENDS:
        signal.signal(end, interrupt)
    screen = Screen()
    try:
        screen.say("starting tidegate-fcgi, uvicorn, gunicorn and nginx …")
        with Servers() as servers:
            load = Load(servers.port)
            seconds = load.run(screen)
            off = load.judge()
            if asked.json:
                print(json.dumps(report(load, seconds, off, servers), indent=2), flush=True)
            else:
                show(screen, load, seconds, off)
            return (1 if off else 0) if asked.once else stay(screen, servers)
    except DemoError as trouble:
        screen.say("")
        print(f"demo: {trouble}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130 if "asked" in locals() and asked.once else 0


if __name__ == "__main__":
    sys.exit(main())
