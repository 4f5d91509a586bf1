"""Listening sockets: who may connect, who is already there, and what is left behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from client import AUTHORIZER, Connection, Request, ask
from fcgi_daemon import RULES, Daemon, wait_for


def run(program: Path, *options: str, **popen: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10,
                          check=False, **popen)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def rules(folder: Path) -> str:
    path = folder / "rules.yaml"
    path.write_text(RULES)
    return str(path)


@pytest.mark.fault("R187")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("option, mode", [("", 0o660), (",mode=0600", 0o600), (",mode=0666", 0o666)])
def test_the_sockets_mode_is_what_was_asked_for_under_any_umask(
    start: Callable[..., Daemon], folder: Path, umask: int, option: str, mode: int
) -> None:
    start(RULES, listen=f"unix:{folder}/s{option}", umask=umask)
    found = os.stat(folder / "s").st_mode
    assert stat.S_ISSOCK(found)
    assert stat.S_IMODE(found) == mode


@pytest.mark.fault("R187")
@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away takes root")
def test_owner_and_group_are_set_and_a_stranger_cannot_connect(start: Callable[..., Daemon], folder: Path) -> None:
    daemon = start(RULES, listen=f"unix:{folder}/s,mode=0660,owner=daemon,group=12345")
    found = os.stat(folder / "s")
    assert (found.st_uid, found.st_gid) == (1, 12345)
    probe = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"

    def connects(uid: int, gid: int) -> bool:
        command = [sys.executable, "-c", probe, f"{folder}/s"]
        # /usr/bin/python3, where the interpreter in use may be out of other users' reach
        command[0] = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
        return subprocess.run(command, user=uid, group=gid, extra_groups=[], capture_output=True, check=False,
                              cwd="/").returncode == 0

    assert connects(65000, 12345)
    assert not connects(65000, 65000)
    assert ask(daemon.address, uri="/big").status == 200


def test_a_socket_somebody_serves_is_refused_and_goes_on_being_served(
    start: Callable[..., Daemon], program: Path, rules: str
) -> None:
    daemon = start()
    second = run(program, "--config", rules, "--listen", daemon.address)
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert "another program is listening there" in second.stderr
    assert ask(daemon.address, uri="/big").status == 200


def test_a_full_queue_counts_as_served(program: Path, rules: str, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(0)
        waiting = []
        for _ in range(5):
            peer = socket.socket(socket.AF_UNIX)
            peer.setblocking(False)
            try:
                peer.connect(f"{folder}/s")
            except BlockingIOError:
                pass
            waiting.append(peer)
        assert "another program" in run(program, "--config", rules, "--listen", f"unix:{folder}/s").stderr
        for peer in waiting:
            peer.close()


def test_a_stale_socket_is_replaced_after_kill_9(start: Callable[..., Daemon], folder: Path) -> None:
    first = start(RULES, listen=f"unix:{folder}/s")
    first.signal(signal.SIGKILL)
    first.wait()
    assert (folder / "s").exists()
    second = start(RULES, listen=f"unix:{folder}/s")
    assert ask(second.address, uri="/big").status == 200


def test_of_two_started_at_once_on_one_path_exactly_one_serves(program: Path, rules: str, folder: Path) -> None:
    for _ in range(10):
        command = [program, "--config", rules, "--listen", f"unix:{folder}/s"]
        both = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
        try:
            wait_for(lambda: sum(process.poll() is None for process in both) == 1, what="one refusal")
            assert ask(f"unix:{folder}/s", uri="/big").status == 200
        finally:
            for process in both:
                process.terminate()
                process.wait(5)
                assert process.stderr
                process.stderr.close()


@pytest.mark.parametrize("kind", ["file", "folder", "symlink"])
def test_what_is_no_socket_is_left_alone(program: Path, rules: str, folder: Path, kind: str) -> None:
    path = folder / "s"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(folder / "rules.yaml")
    done = run(program, "--config", rules, "--listen", f"unix:{path}")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no socket" in done.stderr
    assert path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_socket_file_is_removed_at_the_end(start: Callable[..., Daemon], folder: Path, number: int) -> None:
    daemon = start(RULES, listen=f"unix:{folder}/s")
    daemon.signal(number)
    assert daemon.wait() == 0
    assert not (folder / "s").exists()


def test_a_socket_file_that_is_somebody_elses_by_now_is_not_removed(start: Callable[..., Daemon], folder: Path) -> None:
    first = start(RULES, listen=f"unix:{folder}/s")
    (folder / "s").rename(folder / "moved")
    second = start(RULES, listen=f"unix:{folder}/s")
    assert first.stop() == 0
    assert ask(second.address, uri="/big").status == 200


def test_tcp_on_loopback_is_served_to_authorizers(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, listen="tcp:127.0.0.1:0")
    assert ask(daemon.address, uri="/big", role=AUTHORIZER).status == 200


def test_a_tcp_port_in_use_is_one_line_and_exit_1(start: Callable[..., Daemon], program: Path, rules: str) -> None:
    daemon = start(RULES, listen="tcp:127.0.0.1:0")
    second = run(program, "--config", rules, "--listen", daemon.address)
    assert (second.returncode, second.stderr.count("\n")) == (1, 1)
    assert ask(daemon.address, uri="/big", role=AUTHORIZER).status == 200


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:9410", "tcp:192.0.2.1:9410", "tcp:[::]:9410"])
def test_tcp_beyond_loopback_is_refused_with_the_reason(program: Path, rules: str, address: str) -> None:
    done = run(program, "--config", rules, "--listen", address)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "only loopback" in done.stderr


@pytest.mark.parametrize(
    "address, told",
    [
        ("/run/x.sock", "expected unix:/path"),
        ("unix:", "path"),
        ("unix:/" + "x" * 200, "at most 107 bytes"),
        ("unix:/tmp/s,mode=999", "octal"),
        ("unix:/tmp/s,owner=nobody-of-this-name", "no such user"),
        ("unix:/tmp/s,group=nobody-of-this-name", "no such group"),
        ("unix:/tmp/s,answers=maybe", "answers=answer"),
        ("unix:/tmp/s,color=red", "unknown"),
        ("unix:/tmp/s,mode", "no value"),
        ("tcp:127.0.0.1", "tcp:ADDRESS:PORT"),
        ("tcp:127.0.0.1:99999", "tcp:ADDRESS:PORT"),
        ("tcp:example.org:9410", "no address"),
        ("tcp:127.0.0.1:9410,mode=0600", "unix sockets only"),
        ("fd:x", "fd:NUMBER"),
    ],
)
def test_a_wrong_listen_address_is_one_line_and_exit_2(program: Path, rules: str, address: str, told: str) -> None:
    done = run(program, "--config", rules, "--listen", address)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


def test_several_listeners_are_served_at_once(start: Callable[..., Daemon], folder: Path) -> None:
    daemon = start(RULES, "--listen", f"unix:{folder}/second,answers=auth", listen=f"unix:{folder}/first")
    wait_for(lambda: len(daemon.lines("listening")) == 2, what="two listeners")
    assert ask(f"unix:{folder}/first", uri="/big").status == 200
    assert ask(f"unix:{folder}/second", uri="/big").status == 204


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_a_listening_socket_handed_over_as_descriptor_0_is_served_and_left_open(
    start: Callable[..., Daemon], folder: Path, family: str
) -> None:
    listener = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET)
    with listener:
        if family == "unix":
            listener.bind(f"{folder}/s")
            address = f"unix:{folder}/s"
        else:
            listener.bind(("127.0.0.1", 0))
            address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        listener.listen()
        first = start(RULES, listen="", stdin=listener)
        assert ask(address, uri="/big", role=AUTHORIZER).status == 200
        assert first.stop() == 0
        start(RULES, listen="", stdin=listener)
        assert ask(address, uri="/big", role=AUTHORIZER).status == 200


def test_an_inherited_socket_beyond_loopback_is_refused(program: Path, rules: str) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        done = subprocess.run([program, "--config", rules], stdin=listener, capture_output=True, text=True, timeout=5,
                              check=False)
    assert done.returncode == 1
    assert "beyond loopback" in done.stderr


def test_sockets_of_listen_fds_are_served(program: Path, rules: str, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        script = 'exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        process = subprocess.Popen(["sh", "-c", script, "sh", program, "--config", rules], stdin=listener,
                                   stderr=subprocess.DEVNULL)
        try:
            assert ask(f"unix:{folder}/s", uri="/big").status == 200
        finally:
            process.terminate()
            assert process.wait(5) == 0
        assert (folder / "s").exists()  # whoever made it removes it


def test_without_any_socket_the_usage_is_told(program: Path, rules: str) -> None:
    done = run(program, "--config", rules)
    assert done.returncode == 2
    assert "--listen is missing" in done.stderr


def test_spawn_fcgi_starts_it(program: Path, rules: str, folder: Path) -> None:
    pid_file = folder / "pid"
    subprocess.run(["spawn-fcgi", "-s", f"{folder}/s", "-P", pid_file, "--", program, "--config", rules], check=True,
                   capture_output=True, timeout=10)
    pid = int(pid_file.read_text())
    try:
        assert ask(f"unix:{folder}/s", uri="/big").status == 200
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text(),
             what="the end")


def test_a_descriptor_above_1024_is_served(start: Callable[..., Daemon]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("fewer than 4096 descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    try:
        daemon = start(RULES, "--connections", "2000")
        peers = [Connection(daemon.address) for _ in range(1100)]
        try:
            wait_for(lambda: daemon.descriptors() > 1100, what="all are accepted")
            assert [peer.ask(Request(uri="/big")).status for peer in peers[-50:]] == [200] * 50
        finally:
            for peer in peers:
                peer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
