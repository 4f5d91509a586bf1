"""The daemon as a service: several loops, handing over to a newer program, rights given away, systemd's units."""

from __future__ import annotations

import configparser
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from client import Closed, Connection, Request, ask
from fcgi_daemon import RULES, Daemon, wait_for, within

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import server  # noqa: E402

BIG = Request(uri="/big")
SYSTEMD = Path(__file__).resolve().parents[2] / "examples" / "systemd"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving rights away takes root")


@pytest.fixture(scope="module", params=["plain", "tsan"])
def program(request: pytest.FixtureRequest, make: Callable[..., None], build: Path) -> Path:
    """Also under the thread sanitizer, whose finding makes the daemon's exit status another one."""
    make("programs", request.param)
    return (build if request.param == "plain" else build / request.param) / "bin" / "tidegate-fcgi"


def status_of(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(name + ":")).partition("\t")[2]


# ---- several loops


@pytest.mark.fault("R193")
def test_processes_and_threads_on_one_socket_all_serve_and_none_stalls(
    start: Callable[..., Daemon], folder: Path
) -> None:
    count, requests = 4, 100_000 if os.environ.get("TIDEGATE_LONG") == "1" else 10_000
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(1024)
        store = f"shared://{folder}/table?size=1MiB"
        rules = f"policies:\n  - {{name: all, rules: {requests - 500}/hour token_bucket}}\n"
        daemons = [start(rules, "--threads", "4", "--store", store, listen="", stdin=listener) for _ in range(count)]
        statuses = Counter[int]()
        lock = threading.Lock()

        def load() -> None:
            got = Counter[int]()
            left = requests // 8
            while left > 0:
                with Connection(f"unix:{folder}/s", timeout=10) as connection:
                    batch = min(left, 25)
                    connection.send(b"".join(BIG.encode(number) for number in range(1, batch + 1)))
                    for number in range(1, batch + 1):
                        got[connection.answer(number).status] += 1
                    left -= batch
            with lock:
                statuses.update(got)

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for daemon in daemons:
            assert daemon.stop() == 0
        served = [int(daemon.lines("stopped")[0].split("stopped: ")[1].split()[0]) for daemon in daemons]
    assert statuses.total() == sum(served) == requests
    assert statuses[429] <= 500
    assert set(statuses) <= {200, 429}
    assert min(served) > 0


def test_a_daemon_of_several_threads_admits_the_limit_exactly_and_ends_in_order(start: Callable[..., Daemon]) -> None:
    daemon = start("store: memory://\npolicies:\n  - {name: t, rules: 700/hour}\n", "--threads", "4")
    assert len(os.listdir(f"/proc/{daemon.process.pid}/task")) in (4, 5)  # a sanitizer has one of its own
    statuses = Counter[int]()
    lock = threading.Lock()

    def load() -> None:
        got = Counter[int]()
        for _ in range(50):
            with Connection(daemon.address) as connection:
                got.update(connection.ask(Request()).status for _ in range(3))
        with lock:
            statuses.update(got)

    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {200: 700, 429: 200}
    idle = [Connection(daemon.address) for _ in range(12)]
    for connection in idle:
        assert connection.ask(Request()).status == 429
    with within(1):
        assert daemon.stop() == 0
    assert all(connection.at_end() for connection in idle)
    for connection in idle:
        connection.close()
    assert "912 requests" in daemon.lines("stopped")[0]
    assert not Path(daemon.address[5:]).exists()


def test_a_reload_reaches_every_thread(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, "--threads", "3")
    connections = [Connection(daemon.address) for _ in range(12)]
    named = Request(set={"TIDEGATE_POLICY": "small", "TIDEGATE_COST": "0"})
    for connection in connections:
        assert connection.ask(named)["X-RateLimit-Limit"] == "2"
    daemon.rules.write_text(RULES.replace("rules: 2/hour", "rules: 5/hour"))
    daemon.reload()
    for connection in connections:
        assert connection.ask(named)["X-RateLimit-Limit"] == "5"
        assert connection.ask(Request(uri="/small", set={"TIDEGATE_COST": "0"}))["X-RateLimit-Limit"] == "5"
        connection.close()


def test_several_loops_on_redis_admit_the_limit_exactly_while_rules_are_read_again(
    start: Callable[..., Daemon], folder: Path
) -> None:
    rules = "policies:\n  - {name: shared, match: {path: /shared}, rules: 700/hour}\n" \
            "  - {name: turns, match: {path: /turns}, rules: 500/second burst 20 leaky_bucket}\n"
    with server() as redis:
        daemon = start(rules, "--store", redis.patient, "--threads", "3", listen=f"unix:{folder}/s,hold=1")
        statuses = Counter[tuple[str, int]]()
        lock = threading.Lock()

        def load(uri: str) -> None:
            request = Request(uri=uri, set={"TIDEGATE_MODE": "auth"})
            for _ in range(5):
                with Connection(daemon.address) as connection:
                    got = Counter((uri, connection.ask(request).status) for _ in range(50))
                with lock:
                    statuses.update(got)

        threads = [threading.Thread(target=load, args=(uri,)) for uri in ("/shared",) * 4 + ("/turns",)]
        for thread in threads:
            thread.start()
        for number in range(3):
            daemon.rules.write_text(rules + f"  - {{name: other{number}, match: {{path: /other}}, rules: deny}}\n")
            assert "rules-reloaded" in daemon.reload()
        for thread in threads:
            thread.join()
        assert statuses == {("/shared", 204): 700, ("/shared", 403): 300, ("/turns", 204): 250}
        assert daemon.stop() == 0


def test_threads_and_a_manual_clock_exclude_each_other(program: Path) -> None:
    done = subprocess.run([program, "--threads", "2", "--manual-clock"], capture_output=True, text=True, check=False)
    assert done.returncode == 2


# ---- handing over


class Load:
    """Requests from several threads, on new and on kept connections; whatever is refused or lost is kept."""

    def __init__(self, address: str, rate: float = 0.001) -> None:
        self.stop = threading.Event()
        self.trouble: list[str] = []
        self.answered = 0
        self.threads = [threading.Thread(target=self.run, args=(address, keep, rate)) for keep in (False, False, True)]
        for thread in self.threads:
            thread.start()

    def run(self, address: str, keep: bool, rate: float) -> None:
        encoded = Request(uri="/big", keep=keep).encode()
        connection: Connection | None = None
        while not self.stop.is_set():
            try:
                connection = connection or Connection(address)
            except OSError as error:
                self.trouble.append(f"not accepted: {error!r}")
                continue
            try:
                connection.send(encoded)
            except OSError as error:
                if not keep:
                    self.trouble.append(f"not taken: {error!r}")
                connection = None  # a kept connection that was closed while idle
                continue
            try:
                if connection.answer().status != 200:
                    self.trouble.append("no 200")
                self.answered += 1
            except (Closed, OSError) as error:
                self.trouble.append(f"sent and not answered: {error!r}")
            if not keep:
                connection.close()
                connection = None
            time.sleep(rate)

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(10)
        assert self.trouble == []


@pytest.mark.fault("R194")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_20_handovers_under_load_refuse_no_request_and_keep_the_count(
    program: Path, folder: Path, threads: str
) -> None:
    rules = folder / "rules.yaml"
    rules.write_text(f"store: shared://{folder}/table?size=1MiB\n" + RULES.partition("\n")[2])
    log = (folder / "log").open("wb")
    process = subprocess.Popen([program, "--config", rules, "--listen", f"unix:{folder}/s", "--threads", threads],
                               stdin=subprocess.DEVNULL, stderr=log)
    wait_for((folder / "s").exists)
    time.sleep(0.1)
    pid = process.pid
    load = Load(f"unix:{folder}/s")
    try:
        for generation in range(20):
            os.kill(pid, signal.SIGUSR2)

            def successors() -> list[int]:
                text = (folder / "log").read_text()
                return [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "handing-over: to process" in line]

            wait_for(lambda: len(successors()) > generation, what="a successor")
            wait_for(lambda: (folder / "log").read_text().count(": stopped: ") > generation, what="the former's end")
            pid = successors()[generation]
            if generation == 0:
                assert process.wait(5) == 0
            time.sleep(0.05)
    finally:
        os.kill(pid, 0)
        load.end()
        used = ask(f"unix:{folder}/s", uri="/big")["X-RateLimit-Remaining"]
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not (folder / "s").exists(), what="the last one's end")
    assert load.answered > 500
    assert int(used or 0) == 1_000_000 - load.answered - 1
    log.close()


def test_a_successor_that_fails_leaves_the_former_serving(start: Callable[..., Daemon]) -> None:
    daemon = start()
    daemon.rules.write_text("policies: nonsense\n")
    daemon.signal(signal.SIGUSR2)
    wait_for(lambda: daemon.lines("handover-failed"))
    assert ask(daemon.address, uri="/big").status == 200
    assert Path(daemon.address[5:]).exists()
    daemon.rules.write_text(RULES)
    daemon.signal(signal.SIGUSR2)
    wait_for(lambda: daemon.process.poll() is not None, what="the end after a handover")
    assert daemon.process.returncode == 0
    assert ask(daemon.address, uri="/big").status == 200
    successor = int(daemon.lines("handing-over")[-1].rsplit(" ", 1)[1])
    os.kill(successor, signal.SIGTERM)
    wait_for(lambda: not Path(daemon.address[5:]).exists(), what="the successor's end")


# ---- rights


def test_no_program_can_ever_get_more_rights(daemon: Daemon) -> None:
    assert status_of(daemon.process.pid, "NoNewPrivs") == "1"


def refused(pid: int) -> bool:
    """Whether a filter is in force."""
    return status_of(pid, "Seccomp") == "2"


def test_calls_that_it_never_makes_are_refused_to_it_and_everything_else_works(
    start: Callable[..., Daemon], folder: Path, program: Path
) -> None:
    daemon = start(RULES, "--threads", "2", listen=f"unix:{folder}/s")
    sanitized = program.parent.parent.name in ("asan", "tsan")  # those make such calls themselves
    assert refused(daemon.process.pid) != sanitized
    assert ask(daemon.address, uri="/big").status == 200
    assert "rules-reloaded" in daemon.reload()
    process = daemon.process.pid
    for _ in range(2):  # the filter is handed on, once
        daemon.signal(signal.SIGUSR2) if process == daemon.process.pid else os.kill(process, signal.SIGUSR2)
        before = process
        gone = Path(f"/proc/{before}/exe")
        wait_for(lambda gone=gone: not gone.exists(), what="handed over")  # type: ignore[misc]
        process = int(daemon.lines("handing-over")[-1].rsplit(" ", 1)[1])
        assert ask(daemon.address, uri="/big").status == 200
        assert refused(process) != sanitized
        assert sanitized or int(status_of(process, "Seccomp_filters")) == 1
    os.kill(process, signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{process}/exe").exists(), what="the successor's end")
    unfiltered = start(RULES, "--seccomp", "no")
    assert not refused(unfiltered.process.pid)


@needs_root
def test_rights_are_given_away_after_the_sockets_are_made(start: Callable[..., Daemon], folder: Path) -> None:
    daemon = start(RULES, "--user", "daemon", listen=f"unix:{folder}/s,mode=0600,owner=root")
    assert status_of(daemon.process.pid, "Uid").split() == ["1"] * 4
    assert status_of(daemon.process.pid, "Gid").split() == ["1"] * 4
    assert set(status_of(daemon.process.pid, "Groups").split()) <= {"1"}
    assert int(status_of(daemon.process.pid, "CapEff"), 16) == 0
    assert os.stat(folder / "s").st_uid == 0
    assert ask(daemon.address, uri="/big").status == 200
    daemon.signal(signal.SIGUSR2)
    wait_for(lambda: daemon.process.poll() is not None, what="the end after a handover")
    successor = int(daemon.lines("handing-over")[-1].rsplit(" ", 1)[1])
    assert ask(daemon.address, uri="/big").status == 200
    assert status_of(successor, "Uid").split() == ["1"] * 4
    os.kill(successor, signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{successor}/exe").exists(), what="the successor's end")


@needs_root
def test_below_a_chroot_rules_are_read_and_reloaded_from_inside(start: Callable[..., Daemon], folder: Path) -> None:
    cage = folder / "cage"
    cage.mkdir()
    (cage / "rules.yaml").write_text(RULES)
    daemon = start(RULES, "--config", "/rules.yaml", "--chroot", str(cage), "--user", "daemon",
                   listen=f"unix:{folder}/s,mode=0666")
    assert os.readlink(f"/proc/{daemon.process.pid}/root") == str(cage)
    assert ask(daemon.address, uri="/big").status == 200
    (cage / "rules.yaml").write_text(RULES.replace("2/hour", "3/hour"))
    assert "rules-reloaded" in daemon.reload()
    assert ask(daemon.address, uri="/small")["X-RateLimit-Limit"] == "3"
    daemon.signal(signal.SIGUSR2)
    wait_for(lambda: daemon.lines("handover-failed"))
    assert ask(daemon.address, uri="/big").status == 200


@pytest.mark.parametrize("options", [["--user", "nobody-of-this-name"], ["--threads", "0"], ["--threads", "65"]])
def test_wrong_process_options_are_one_line_and_exit_2(program: Path, options: list[str]) -> None:
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=5, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


# ---- systemd


def test_the_service_manager_is_told_of_readiness_and_of_the_successor(
    start: Callable[..., Daemon], folder: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{folder}/notify")
        manager.settimeout(5)
        daemon = start(RULES, env={**os.environ, "NOTIFY_SOCKET": f"{folder}/notify"})
        assert manager.recv(200).decode().split("\n") == ["READY=1", f"MAINPID={daemon.process.pid}"]
        daemon.signal(signal.SIGUSR2)
        told = manager.recv(200).decode().split("\n")
        successor = int(told[1].removeprefix("MAINPID="))
        assert (told[0], successor == daemon.process.pid) == ("READY=1", False)
        assert daemon.wait() == 0
        os.kill(successor, signal.SIGTERM)
        wait_for(lambda: not Path(daemon.address[5:]).exists(), what="the successor's end")


def unit(name: str) -> configparser.RawConfigParser:
    parsed = configparser.RawConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(SYSTEMD / name)
    return parsed


def test_the_units_command_serves_the_socket_units_socket(program: Path, folder: Path) -> None:
    service, listening = unit("tidegate-fcgi.service"), unit("tidegate-fcgi.socket")
    command = service["Service"]["ExecStart"].split()
    assert command[0] == "/usr/bin/tidegate-fcgi"
    (folder / "rules.yaml").write_text(RULES)
    path = listening["Socket"]["ListenStream"]
    assert path == "/run/tidegate/tidegate.sock"
    with socket.socket(socket.AF_UNIX) as handed:
        handed.bind(f"{folder}/s")
        handed.listen()
        command = [word.replace("/etc/tidegate/rules.yaml", f"{folder}/rules.yaml") for word in command[1:]]
        script = 'exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        process = subprocess.Popen(["sh", "-c", script, "sh", program, *command], stdin=handed,
                                   stderr=subprocess.DEVNULL)
        try:
            assert ask(f"unix:{folder}/s", uri="/big").status == 200
            process.send_signal(signal.SIGUSR2)  # also what was handed over by somebody else is handed on
            assert process.wait(5) == 0
            assert ask(f"unix:{folder}/s", uri="/big").status == 200
        finally:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and str(folder / "rules.yaml") in _command_line(entry):
                    os.kill(int(entry.name), signal.SIGTERM)
    if analyze := next((p for p in ("/usr/bin/systemd-analyze",) if Path(p).exists()), None):
        done = subprocess.run([analyze, "verify", "--man=no", SYSTEMD / "tidegate-fcgi.socket"], capture_output=True,
                              text=True, check=False)
        assert "Unknown" not in done.stderr, done.stderr


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
