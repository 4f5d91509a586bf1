"""The daemon as a process: start, options, signals, the end, limits of the system, and state shared with others."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import client
from client import Closed, Connection, Request, ask, begin, record
from fcgi_daemon import RULES, Daemon, Lateness, wait_for, within

BIG = Request(uri="/big")


def run(program: Path, *options: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *options], **{"stdin": subprocess.DEVNULL, "capture_output": True, "text": True,
                          "timeout": 10, "check": False, **more})  # type: ignore[call-overload,no-any-return]


# ---- options and start


def test_help_and_version_are_told(program: Path) -> None:
    told = run(program, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    for option in ("--config", "--listen", "--mode", "--store", "--manual-clock", "--check", "SIGHUP"):
        assert option in told.stdout
    assert run(program, "--version").stdout.startswith("tidegate-fcgi 0.")


@pytest.mark.parametrize(
    "options",
    [["--nonsense"], ["--config"], ["stray"], ["--mode", "xaccel"], ["--connections", "0"], ["--idle-timeout", "-1"],
     ["--request-timeout", "nan"], ["--drain-timeout", "1x"], ["-x"]],
)
def test_wrong_usage_is_one_line_and_exit_2(program: Path, options: list[str]) -> None:
    done = run(program, *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_wrong_rules_are_one_line_with_file_line_and_column_and_exit_1(program: Path, folder: Path) -> None:
    path = folder / "rules.yaml"
    path.write_text("store: memory://\npolicies:\n  - name: a\n    rules: 5/fortnight\n")
    for options in (["--check"], ["--listen", f"unix:{folder}/s"]):
        done = run(program, "--config", str(path), *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert f"{path}:4:" in done.stderr
    assert not (folder / "s").exists()


def test_missing_rules_are_one_line_and_exit_1(program: Path, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TIDEGATE_CONFIG"}
    for options in (["--config", f"{folder}/none.yaml"], []):
        done = run(program, *options, "--listen", f"unix:{folder}/s", env=environment)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_a_check_says_ok_and_leaves_nothing_behind(program: Path, folder: Path) -> None:
    path = folder / "rules.yaml"
    path.write_text(f"store: shared://{folder}/table\n" + RULES.partition("\n")[2])
    done = run(program, "--config", str(path), "--check")
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, f"tidegate-fcgi: {path}: ok", "")
    assert os.listdir(folder) == ["rules.yaml"]


def test_a_manual_clock_and_a_real_one_never_open_the_same_table(
    start: Callable[..., Daemon], program: Path, folder: Path
) -> None:
    for number, (first, second) in enumerate([([], ["--manual-clock"]), (["--manual-clock"], [])]):
        store = ["--store", f"shared://{folder}/table{number}"]
        running = start(RULES, *store, *first)
        done = run(program, "--config", str(running.rules), "--listen", f"unix:{folder}/s{number}", *store, *second)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "clock" in done.stderr


# ---- SIGHUP


def test_sighup_brings_new_rules_and_what_was_used_stays_used(start: Callable[..., Daemon]) -> None:
    daemon = start()
    assert [ask(daemon.address, uri="/small").status for _ in range(3)] == [200, 200, 429]
    daemon.rules.write_text(RULES.replace("rules: 2/hour", "rules: 3/hour"))
    assert "rules-reloaded" in daemon.reload()
    assert [ask(daemon.address, uri="/small").status for _ in range(2)] == [200, 429]


def test_sighup_with_wrong_rules_is_told_once_and_the_old_ones_stay(start: Callable[..., Daemon]) -> None:
    daemon = start()
    daemon.rules.write_text("store: memory://\npolicies:\n  - name: small\n    rules: 2 per lunch\n")
    line = daemon.reload()
    assert "rules-refused" in line
    assert f"{daemon.rules}:4:" in line
    for _ in range(20):
        assert ask(daemon.address, uri="/big").status == 200
    assert [ask(daemon.address, uri="/small").status for _ in range(3)] == [200, 200, 429]
    assert len(daemon.lines("rules-refused")) == 1
    daemon.rules.unlink()
    assert "rules-refused" in daemon.reload()
    daemon.rules.write_text(RULES.replace("memory://", "memory://other"))
    assert "rules-refused" in daemon.reload()
    assert ask(daemon.address, uri="/small").status == 429


def test_sighup_under_load_loses_no_request(start: Callable[..., Daemon]) -> None:
    daemon = start()
    stop = threading.Event()

    def reload() -> None:
        while not stop.is_set():
            daemon.signal(signal.SIGHUP)
            time.sleep(0.002)

    thread = threading.Thread(target=reload)
    thread.start()
    try:
        with Connection(daemon.address) as connection:
            remaining = [connection.ask(BIG)["X-RateLimit-Remaining"] for _ in range(3000)]
    finally:
        stop.set()
        thread.join()
    assert remaining == [str(999_999 - i) for i in range(3000)]


# ---- SIGTERM


@pytest.mark.fault("R181")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_leaves_at_once(start: Callable[..., Daemon], number: int) -> None:
    daemon = start()
    kept, silent = Connection(daemon.address), Connection(daemon.address)
    assert kept.ask(BIG).status == 200
    with within(1):
        daemon.signal(number)
        assert daemon.wait() == 0
    assert not Path(daemon.address.removeprefix("unix:")).exists()
    assert kept.at_end()
    assert silent.at_end()
    kept.close()
    silent.close()


def test_a_request_half_sent_at_sigterm_is_still_answered(start: Callable[..., Daemon]) -> None:
    daemon = start()
    encoded = BIG.encode()
    with Connection(daemon.address) as connection:
        connection.send(encoded[:300])
        wait_for(lambda: daemon.descriptors() > 6)
        time.sleep(0.05)
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: daemon.lines("stopping"))
        time.sleep(0.2)
        assert daemon.process.poll() is None
        connection.send(encoded[300:])
        assert connection.answer().status == 200
        assert connection.at_end()
    assert daemon.wait() == 0


def test_a_request_never_completed_does_not_hold_the_end_beyond_its_deadline(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, "--drain-timeout", "0.5")
    with Connection(daemon.address) as connection:
        connection.send(begin() + record(client.PARAMS, 1, b"\x01"))
        time.sleep(0.05)
        with within(1.5, least=0.3):
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0


def test_answers_not_yet_read_at_sigterm_are_all_delivered(start: Callable[..., Daemon]) -> None:
    daemon = start()
    count = 3000
    with Connection(daemon.address) as connection:

        def write() -> None:
            with contextlib.suppress(OSError):  # cut off by the end
                connection.send(BIG.encode() * count)

        writer = threading.Thread(target=write)
        writer.start()
        writer.join(0.3)  # the daemon's and the socket's buffers are full
        assert writer.is_alive()
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: daemon.lines("stopping"))
        answered = 0
        try:
            while answered < count:
                assert connection.answer().status == 200
                answered += 1
        except Closed as end:
            assert end.args == (b"",)  # between answers, not within one
        writer.join(5)
    assert daemon.wait() == 0
    assert f"{answered} requests" in daemon.lines("stopped")[0]


@pytest.mark.fault("R182")
def test_sigterm_at_a_random_moment_under_load_leaves_no_accepted_request_unanswered(
    start: Callable[..., Daemon]
) -> None:
    chance = random.Random(182)
    for _ in range(1000 if os.environ.get("TIDEGATE_LONG") == "1" else 50):
        daemon = start()
        trouble: list[str] = []
        answered = Counter[str]()

        def load(keep: bool, address: str = daemon.address, trouble: list[str] = trouble,
                 answered: Counter[str] = answered) -> None:
            encoded = Request(uri="/big", keep=keep).encode()
            connection = None
            while True:
                try:
                    connection = connection or Connection(address)
                    connection.send(encoded)  # whole or not at all: it fits the socket's buffer
                except OSError:
                    return  # not accepted any more
                try:
                    if connection.answer().status != 200:
                        trouble.append("no 200")
                except (Closed, OSError) as error:
                    trouble.append(f"keep={keep}: sent and not answered: {error!r}")
                    return
                answered[str(keep)] += 1
                if not keep:
                    connection.close()
                    connection = None

        threads = [threading.Thread(target=load, args=(number % 2 == 0,)) for number in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.005 + chance.random() * 0.06)
        assert daemon.stop() == 0
        for thread in threads:
            thread.join(5)
        assert trouble == []
        assert f"{answered.total()} requests" in daemon.lines("stopped")[0]


# ---- what the system has too little of


@pytest.mark.parametrize("way", ["cap", "descriptors"])
def test_when_no_more_connections_fit_new_ones_wait_without_a_busy_loop(
    start: Callable[..., Daemon], way: str
) -> None:
    daemon = start(RULES, "--connections", "10" if way == "cap" else "1000")
    if way == "descriptors":
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (daemon.descriptors() + 10,) * 2)
    half = []
    for _ in range(10):
        connection = Connection(daemon.address)
        connection.send(BIG.encode()[:100])
        half.append(connection)
    late = Connection(daemon.address)
    late.send(BIG.encode())
    time.sleep(0.1)
    before = daemon.cpu_seconds()
    late.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        late.answer()
    assert daemon.cpu_seconds() - before < 0.1
    late.socket.settimeout(5)
    half.pop().close()
    assert late.answer().status == 200
    for connection in half:
        connection.send(BIG.encode()[100:])
        assert connection.answer().status == 200
        connection.close()
    late.close()
    assert len(daemon.lines("connections-full" if way == "cap" else "accept-failing")) in (1, 2)


def test_a_connection_idle_for_long_makes_room_for_a_new_one(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, "--connections", "5")
    idle = [Connection(daemon.address) for _ in range(5)]
    for connection in idle:
        assert connection.ask(BIG).status == 200
    time.sleep(1.1)
    assert idle[0].ask(BIG).status == 200  # now the youngest
    assert ask(daemon.address, uri="/big").status == 200
    assert idle[1].at_end()
    assert idle[0].ask(BIG).status == 200
    for connection in idle:
        connection.close()


def test_a_thousand_silent_peers_do_not_keep_a_new_one_waiting(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    silent: list[Connection] = []
    try:
        kept = Connection(daemon.address)
        assert kept.ask(BIG).status == 200
        silent = [Connection(daemon.address) for _ in range(1000)]  # most of them in the socket's queue
        began = time.monotonic()
        with Connection(daemon.address, 10) as late:
            assert late.ask(BIG).status == 200
        assert time.monotonic() - began < 5
        assert kept.ask(BIG).status == 200  # whoever has spoken is not closed for them
        kept.close()
    finally:
        for peer in silent:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_log_that_nobody_reads_does_not_stop_the_answers(start: Callable[..., Daemon]) -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, b"x" * 4096)
        except BlockingIOError:
            pass
        os.set_blocking(writing, True)
        daemon = start(RULES, ready=False, stderr=writing)
        wait_for(lambda: Path(daemon.address.removeprefix("unix:")).exists())
        time.sleep(0.05)
        assert ask(daemon.address, uri="/big", set={"TIDEGATE_MODE": "wrong"}).status == 500
        assert ask(daemon.address, uri="/big").status == 200
        assert daemon.stop() == 0
    finally:
        os.close(reading)
        os.close(writing)


def test_closed_standard_descriptors_do_no_harm(program: Path, folder: Path) -> None:
    path = folder / "rules.yaml"
    path.write_text(RULES)
    command = 'exec 0<&- 1>&- 2>&-; exec "$@"'
    process = subprocess.Popen(["sh", "-c", command, "sh", program, "--config", path, "--listen", f"unix:{folder}/s"])
    try:
        wait_for((folder / "s").exists)
        time.sleep(0.05)
        assert ask(f"unix:{folder}/s", uri="/big", set={"TIDEGATE_MODE": "wrong"}).status == 500
        assert ask(f"unix:{folder}/s", uri="/big").status == 200
    finally:
        process.terminate()
        assert process.wait(5) == 0


# ---- shared state


SHARED = "policies:\n  - {{name: shared, rules: {limit}/hour}}\n"


def test_two_daemons_on_one_table_admit_the_limit_exactly(start: Callable[..., Daemon], folder: Path) -> None:
    rules = SHARED.format(limit=700)
    daemons = [start(rules, "--store", f"shared://{folder}/table?size=1MiB") for _ in range(2)]
    statuses = Counter[int]()
    lock = threading.Lock()

    def load(address: str) -> None:
        with Connection(address) as connection:
            got = Counter(connection.ask(Request()).status for _ in range(250))
        with lock:
            statuses.update(got)

    threads = [threading.Thread(target=load, args=(daemon.address,)) for daemon in daemons * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {200: 700, 429: 300}


def test_counts_outlive_kill_9_and_a_restart(start: Callable[..., Daemon], folder: Path) -> None:
    rules, store = SHARED.format(limit=30), ["--store", f"shared://{folder}/table?size=1MiB"]
    admitted = 0
    for _ in range(5):
        daemon = start(rules, *store, listen=f"unix:{folder}/s")
        with Connection(daemon.address) as connection:
            admitted += sum(connection.ask(Request()).status == 200 for _ in range(8))
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    assert admitted == 30


@pytest.mark.fault("R188")
@pytest.mark.parametrize("policy, status", [("open", 200), ("closed", 503)])
def test_while_the_store_stalls_every_request_is_answered_by_its_policy_and_nobody_waits_long(
    start: Callable[..., Daemon], make: Callable[..., None], build: Path, folder: Path, policy: str, status: int
) -> None:
    holder = build / "tests" / "fcgi" / "hold_store"
    make(str(holder))
    rules = f"policies:\n  - {{name: stalling, rules: 1000/hour, on_store_failure: {policy}}}\n"
    store = f"shared://{folder}/table?size=128KiB"
    daemon = start(rules, "--store", store)
    assert ask(daemon.address).status == 200
    holding = subprocess.Popen([holder, daemon.rules, store, "192.0.2.1"])
    try:
        stat = Path(f"/proc/{holding.pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(") ")[2].startswith("T"), what="the holder stands")
        waits = []
        with Connection(daemon.address) as first, Connection(daemon.address) as second, Lateness() as late:
            for number in range(100):
                began = time.monotonic()
                answer = (first if number % 2 else second).ask(Request())
                waits.append(time.monotonic() - began)
                assert (answer.status, answer["X-RateLimit-Limit"]) == (status, None)
                assert answer["Retry-After"] == (None if status == 200 else "1")
        assert late.allows(max(waits), 0.5)  # 50 ms, and what a busy machine adds
        assert late.allows(sorted(waits)[90], 0.02)  # behind a holder known to stand nobody waits
        assert len(daemon.lines("store-failing")) == 1
    finally:
        holding.send_signal(signal.SIGCONT)
        assert holding.wait(5) == 0
    wait_for(lambda: ask(daemon.address)["X-RateLimit-Limit"] == "1000", what="limits again")


def test_a_store_that_cannot_be_opened_is_one_line_and_exit_1(program: Path, folder: Path) -> None:
    path = folder / "rules.yaml"
    path.write_text(RULES)
    for store in (f"shared://{folder}/no/folder", "nonsense://x", "shared:///dev/null"):
        done = run(program, "--config", str(path), "--listen", f"unix:{folder}/s", "--store", store)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
