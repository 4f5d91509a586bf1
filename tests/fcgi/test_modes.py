"""What may be asked for, and where: policies and keys by name, batches, X-Accel, authorizers, and a socket's rights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from client import AUTHORIZER, Answer, Closed, Connection, Request, ask
from fcgi_daemon import RULES, Daemon

TOKEN = "0123456789abcdef-secret"
NAMED = RULES + """\
  - name: user
    match: {path: /never}
    rules: 3/hour
    by: user
  - name: pair
    match: {path: /never}
    rules: 2/hour
    by: ip+header:X-Tenant
"""


def decision(answer: Answer) -> dict[str, object]:
    found = json.loads(answer.body)
    assert isinstance(found, dict)
    return found


# ---- policies, keys, costs


def test_a_policy_named_counts_whatever_the_path_and_shares_with_the_file(daemon: Daemon) -> None:
    named = {"TIDEGATE_POLICY": "small"}
    assert ask(daemon.address, uri="/small").status == 200
    assert decision(ask(daemon.address, uri="/elsewhere", set=named))["remaining"] == 0
    assert ask(daemon.address, uri="/elsewhere", set=named).status == 429
    assert ask(daemon.address, uri="/small").status == 429


def test_a_key_given_counts_in_place_of_who_connects(start: Callable[..., Daemon]) -> None:
    daemon = start(NAMED)

    def hit(user: str, peer: str) -> int:
        return ask(daemon.address, peer=peer, set={"TIDEGATE_POLICY": "user", "TIDEGATE_KEY": f"user={user}"}).status

    assert [hit("ada", f"192.0.2.{i}") for i in range(4)] == [200, 200, 200, 429]
    assert hit("bob", "192.0.2.1") == 200
    assert ask(daemon.address, set={"TIDEGATE_POLICY": "user", "REMOTE_USER": "ada"}).status == 429


def test_several_keys_make_one_joint_identity_and_of_one_kind_the_last_counts(start: Callable[..., Daemon]) -> None:
    daemon = start(NAMED)

    def hit(ip: str, tenant: str) -> int:
        request = Request(keep=False, set={"TIDEGATE_POLICY": "pair"},
                          extra=[("TIDEGATE_KEY", "ip=203.0.113.99"), ("TIDEGATE_KEY", f"ip={ip}"),
                                 ("TIDEGATE_KEY", f"header:X-Tenant={tenant}")])
        return ask(daemon.address, request).status

    assert [hit("192.0.2.1", "a") for _ in range(3)] == [200, 200, 429]
    assert hit("192.0.2.2", "a") == 200
    assert hit("192.0.2.1", "b") == 200
    assert hit("::ffff:192.0.2.1", "a") == 429


def test_a_key_without_a_value_or_of_the_wrong_kind_is_nobody(start: Callable[..., Daemon]) -> None:
    daemon = start(NAMED)
    for key in ("user=", "ip=192.0.2.1"):
        assert ask(daemon.address, set={"TIDEGATE_POLICY": "user", "TIDEGATE_KEY": key}).status == 401


def test_no_content_of_a_value_reaches_another_kind(start: Callable[..., Daemon]) -> None:
    daemon = start(NAMED)
    keys = {"TIDEGATE_POLICY": "user", "TIDEGATE_KEY": "user=ada&user=bob\nuser=eve"}
    assert [ask(daemon.address, set=keys).status for _ in range(4)] == [200, 200, 200, 429]
    assert ask(daemon.address, set={"TIDEGATE_POLICY": "user", "TIDEGATE_KEY": "user=bob"}).status == 200


def test_a_cost_takes_so_many_units_in_every_mode(daemon: Daemon) -> None:
    assert ask(daemon.address, uri="/small", set={"TIDEGATE_COST": "2"}).status == 200
    assert ask(daemon.address, uri="/small", set={"TIDEGATE_COST": "0"}).status == 200
    assert ask(daemon.address, uri="/small", set={"TIDEGATE_MODE": "auth"}).status == 403
    never = ask(daemon.address, peer="192.0.2.9", uri="/small", set={"TIDEGATE_COST": "3"})
    assert (never.status, never["Retry-After"]) == (429, None)


def test_a_peek_tells_what_a_hit_would_get_and_takes_nothing(daemon: Daemon) -> None:
    hit = {"TIDEGATE_POLICY": "small", "TIDEGATE_KEY": "ip=192.0.2.1", "REQUEST_URI": None, "REQUEST_METHOD": None}
    peek = {**hit, "TIDEGATE_PEEK": "1"}
    for _ in range(3):
        told = decision(ask(daemon.address, set=peek))
        assert (told["allowed"], told["remaining"]) == (True, 2)
    assert [ask(daemon.address, set=hit).status for _ in range(3)] == [200, 200, 429]
    last = ask(daemon.address, set=peek)
    assert last.status == 200  # asked about, not refused
    assert (decision(last)["allowed"], decision(last)["status"]) == (False, 429)
    assert 3590 < float(str(decision(last)["retry_after"])) <= 3600


def test_a_peek_without_a_key_tells_of_the_request_itself(daemon: Daemon) -> None:
    for named in ({}, {"TIDEGATE_POLICY": "small"}):
        peek = {**named, "TIDEGATE_PEEK": "1"}
        told = [decision(ask(daemon.address, uri="/small", set=peek)) for _ in range(3)]
        assert [(one["policy"], one["allowed"], one["remaining"]) for one in told] == [("small", True, 2)] * 3
    assert [ask(daemon.address, uri="/small").status for _ in range(3)] == [200, 200, 429]
    assert decision(ask(daemon.address, uri="/small", set={"TIDEGATE_PEEK": "1"}))["allowed"] is False


def test_a_reload_is_seen_by_policies_named(start: Callable[..., Daemon]) -> None:
    daemon = start()
    hit = {"TIDEGATE_POLICY": "small"}
    assert [ask(daemon.address, set=hit).status for _ in range(3)] == [200, 200, 429]
    daemon.rules.write_text(RULES.replace("rules: 2/hour", "rules: 3/hour").replace("name: keyed", "name: renamed"))
    daemon.reload()
    assert [ask(daemon.address, set=hit).status for _ in range(2)] == [200, 429]
    assert ask(daemon.address, set={"TIDEGATE_POLICY": "keyed"}).status == 500


def test_a_batch_is_answered_line_by_line_in_order(start: Callable[..., Daemon]) -> None:
    daemon = start(NAMED)
    odd = "a&b=c%+\n\u00e9"
    lines = [f"policy=user&key={quote('user=' + odd)}"] * 4 + [
        "policy=user&key=user%3Dbob&cost=3", "policy=user&key=user%3Dbob&peek=1", "policy=none&key=user%3Dx",
        "policy=user&key=user%3Dx&colour=red", "policy=user&key=%zz", "policy=closed&key=ip%3D192.0.2.1", "",
        "policy=user&key=user%3Dx",
    ]
    answer = ask(daemon.address, set={"TIDEGATE_BATCH": "\n".join(lines), "REQUEST_URI": None})
    assert answer.status == 200
    told = json.loads(answer.body)["decisions"]
    assert [one["allowed"] for one in told] == [True, True, True, False, True, False, False, False, False, False, False,
                                                True]
    assert [one.get("status", 200) for one in told] == [200, 200, 200, 429, 200, 429, 500, 500, 500, 403, 500, 200]
    assert told[0]["remaining"] == 2


def test_the_longest_batch_is_answered_whole_and_one_line_more_is_refused(daemon: Daemon) -> None:
    line = "policy=big&key=ip%3D192.0.2.1"
    told = decision(ask(daemon.address, set={"TIDEGATE_BATCH": "\n".join([line] * 32)}))["decisions"]
    assert isinstance(told, list)
    assert [one["remaining"] for one in told] == list(range(999_999, 999_967, -1))
    assert ask(daemon.address, set={"TIDEGATE_BATCH": "\n".join([line] * 33)}).status == 500
    wrong = decision(ask(daemon.address, set={"TIDEGATE_BATCH": "\n".join(["policy=" + "x" * 4000] * 31)}))["decisions"]
    assert isinstance(wrong, list)
    assert len(wrong) == 31


# ---- X-Accel and authorizers


def test_xaccel_redirects_what_is_allowed_and_refuses_whole(daemon: Daemon) -> None:
    way = {"TIDEGATE_MODE": "xaccel", "TIDEGATE_NEXT": "@app"}
    first, _, third = (ask(daemon.address, uri="/small", set=way) for _ in range(3))
    assert (first["X-Accel-Redirect"], first["X-RateLimit-Remaining"], first.body) == ("@app", "1", b"")
    assert (third.status, third["X-Accel-Redirect"]) == (429, None)
    assert json.loads(third.body)["code"] == "RATE_LIMITED"


@pytest.mark.parametrize("place", ["", "@", "/path", "app", "@a b", "@a\r\nX: y", "@" + "a" * 200])
def test_xaccel_goes_to_named_locations_only(daemon: Daemon, place: str) -> None:
    answer = ask(daemon.address, uri="/big", set={"TIDEGATE_MODE": "xaccel", "TIDEGATE_NEXT": place})
    assert answer.status == 500
    assert answer["X-Accel-Redirect"] is None


@pytest.mark.fault("R179")
@pytest.mark.parametrize("phase", [None, "AUTHENTICATOR", "AUTHORIZER", "ACCESS_CHECKER"])
def test_an_authorizer_of_any_phase_is_told_variables_or_the_refusal(
    start: Callable[..., Daemon], phase: str | None
) -> None:
    daemon = start(RULES, listen="tcp:127.0.0.1:0")
    request = Request(uri="/small", role=AUTHORIZER, keep=False,
                      set={"FCGI_ROLE": "AUTHORIZER", **({"FCGI_APACHE_ROLE": phase} if phase else {})})
    first, _, third = (ask(daemon.address, request) for _ in range(3))
    assert (first["Status"], first.body) == ("200 OK", b"")
    assert first["Variable-TIDEGATE_LIMIT"] == "2"
    assert first["Variable-TIDEGATE_REMAINING"] == "1"
    assert first["Variable-TIDEGATE_RESET"] == "3600"
    assert first["Variable-TIDEGATE_DECIDED_BY"] == "small"
    assert third.status == 429
    assert json.loads(third.body)["code"] == "RATE_LIMITED"


@pytest.mark.fault("R179")
def test_10_000_short_connections_leave_no_descriptor_behind(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, listen="tcp:127.0.0.1:0")
    before = daemon.descriptors()
    encoded = Request(uri="/big", role=AUTHORIZER, keep=False).encode()
    for _ in range(10_000):
        with Connection(daemon.address) as connection:
            connection.send(encoded)
            assert connection.answer().status == 200
    assert daemon.descriptors() <= before + 1


# ---- what a socket allows


def test_a_socket_serves_the_modes_it_lists_and_the_first_where_nobody_says(
    start: Callable[..., Daemon], folder: Path
) -> None:
    daemon = start(RULES, listen=f"unix:{folder}/s,modes=auth+answer")
    assert ask(daemon.address, uri="/big").status == 204
    assert ask(daemon.address, uri="/big", set={"TIDEGATE_MODE": "answer"}).status == 200
    xaccel = ask(daemon.address, uri="/big", set={"TIDEGATE_MODE": "xaccel", "TIDEGATE_NEXT": "@app"})
    assert (xaccel.status, xaccel["X-Accel-Redirect"]) == (500, None)
    assert ask(daemon.address, uri="/big", role=AUTHORIZER).status == 500
    assert "modes=" in daemon.lines("asked-wrongly")[0]


def test_a_socket_lets_speak_of_the_policies_it_lists(start: Callable[..., Daemon], folder: Path) -> None:
    daemon = start(RULES, "--listen", f"unix:{folder}/two,policies=small+big", listen=f"unix:{folder}/one,policies=big")
    assert decision(ask(daemon.address, uri="/small"))["policy"] == "big"
    assert ask(daemon.address, uri="/", set={"TIDEGATE_POLICY": "small"}).status == 500
    assert ask(f"unix:{folder}/two", uri="/small").status == 500
    assert decision(ask(f"unix:{folder}/two", set={"TIDEGATE_POLICY": "small"}))["policy"] == "small"
    assert decision(ask(f"unix:{folder}/two", set={"TIDEGATE_BATCH": "policy=closed&key=ip%3D192.0.2.1"}))[
        "decisions"] != []
    assert b"does not list" in ask(f"unix:{folder}/two", set={"TIDEGATE_BATCH": "policy=closed&key=ip%3D1.2.3.4"}).body


def test_keys_costs_peeks_and_batches_are_refused_where_a_socket_says_no(
    start: Callable[..., Daemon], folder: Path
) -> None:
    daemon = start(RULES, listen=f"unix:{folder}/s,keyed=no")
    for extra in ({"TIDEGATE_KEY": "ip=192.0.2.1"}, {"TIDEGATE_COST": "1"}, {"TIDEGATE_PEEK": "1"},
                  {"TIDEGATE_BATCH": "policy=small&key=ip%3D192.0.2.1"}):
        assert ask(daemon.address, set={"TIDEGATE_POLICY": "small", **extra}).status == 500
    assert ask(daemon.address, set={"TIDEGATE_POLICY": "small"}).status == 200


def test_a_token_is_asked_of_every_request_on_tcp(start: Callable[..., Daemon], folder: Path) -> None:
    secret = folder / "token"
    secret.write_text(TOKEN + "\n")
    secret.chmod(0o640)
    daemon = start(RULES, listen=f"tcp:127.0.0.1:0,token=@{secret}")
    right = {"TIDEGATE_TOKEN": TOKEN}
    assert ask(daemon.address, uri="/big", set=right).status == 200
    assert ask(daemon.address, uri="/big", role=AUTHORIZER, set=right).status == 200
    for wrong in ({}, {"TIDEGATE_TOKEN": ""}, {"TIDEGATE_TOKEN": TOKEN[:-1]}, {"TIDEGATE_TOKEN": TOKEN + "x"},
                  {"TIDEGATE_TOKEN": TOKEN * 2}, {"TIDEGATE_TOKEN": TOKEN[:-1] + "T"}):
        for role in (1, AUTHORIZER):
            assert ask(daemon.address, uri="/big", role=role, set=wrong).status == 403
    assert ask(daemon.address, uri="/big", headers=[("Tidegate-Token", TOKEN)]).status == 403
    assert TOKEN not in daemon.log()
    keyed = {**right, "TIDEGATE_POLICY": "small", "TIDEGATE_KEY": "ip=192.0.2.1"}
    assert ask(daemon.address, set=keyed).status == 500  # keys on TCP are asked for


def test_tcp_without_a_token_serves_authorizers_only(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, listen="tcp:127.0.0.1:0")
    assert ask(daemon.address, uri="/big", role=AUTHORIZER).status == 200
    assert ask(daemon.address, uri="/big").status == 500


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user takes root")
def test_a_peer_of_another_user_is_closed_out_whatever_the_sockets_mode(
    start: Callable[..., Daemon], folder: Path
) -> None:
    daemon = start(RULES, listen=f"unix:{folder}/s,mode=0666,peer-uid=65000+daemon")
    with pytest.raises((Closed, OSError)):
        ask(daemon.address, uri="/big")
    assert len(daemon.lines("peer-refused")) == 1
    probe = ("import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
             "s.sendall(bytes.fromhex(sys.argv[2])); sys.stdout.buffer.write(s.recv(65536))")
    encoded = Request(uri="/big", keep=False).encode()
    for uid in (65000, 1):
        done = subprocess.run(["/usr/bin/python3", "-c", probe, f"{folder}/s", encoded.hex()], user=uid, group=65000,
                              extra_groups=[], capture_output=True, check=False, cwd="/")
        assert b"X-RateLimit-Limit" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "options, told",
    [
        ("tcp:127.0.0.1:0,modes=answer", "token="),
        ("tcp:127.0.0.1:0,modes=authorizer+auth", "token="),
        ("tcp:127.0.0.1:0,keyed=yes", "token="),
        ("tcp:127.0.0.1:0,token=short", "16 to 128"),
        ("tcp:127.0.0.1:0,token=@/nowhere/token", "No such file"),
        ("tcp:127.0.0.1:0,peer-uid=0,token=0123456789abcdef", "unix sockets"),
        ("unix:/tmp/s,modes=answer+all", "modes=all is unknown"),
        ("unix:/tmp/s,modes=", "empty"),
        ("unix:/tmp/s,modes=relay", "relay-to="),
        ("unix:/tmp/s,modes=auth,relay-to=unix:/run/a", "relay in modes="),
        ("unix:/tmp/s,modes=auth,answers=answer", "modes="),
        ("unix:/tmp/s,relay-to=example.org:9000", "tcp:ADDRESS:PORT"),
        ("unix:/tmp/s,relay-to=tcp:127.0.0.1:0", "tcp:ADDRESS:PORT"),
        ("unix:/tmp/s,relay-to=unix:/run/a,root=www", "absolute"),
        ("unix:/tmp/s,relay-to=unix:/run/a,keep=many", "number"),
        ("unix:/tmp/s,peer-uid=nobody-of-this-name", "no such user"),
        ("unix:/tmp/s,keyed=perhaps", "yes or no"),
        ("unix:/tmp/s,hold=-1", "seconds from 0 to 3600"),
        ("unix:/tmp/s,hold=nan", "seconds from 0 to 3600"),
        ("unix:/tmp/s,hold=1s", "seconds from 0 to 3600"),
    ],
)
def test_rights_that_cannot_be_given_are_one_line_that_says_what_to_write(
    program: Path, folder: Path, options: str, told: str
) -> None:
    path = folder / "rules.yaml"
    path.write_text(RULES)
    done = subprocess.run([program, "--config", path, "--listen", options], capture_output=True, text=True, timeout=5,
                          check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


def test_a_token_file_that_everybody_may_read_is_refused(program: Path, folder: Path) -> None:
    secret = folder / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o644)
    done = subprocess.run([program, "--listen", f"tcp:127.0.0.1:0,token=@{secret}"], capture_output=True, text=True,
                          timeout=5, check=False)
    assert done.returncode == 2
    assert "chmod" in done.stderr


def test_a_listed_policy_that_is_not_in_the_rules_stops_the_start_and_the_check(program: Path, folder: Path) -> None:
    path = folder / "rules.yaml"
    path.write_text(RULES)
    for more in ([], ["--check"]):
        done = subprocess.run([program, "--config", path, "--listen", f"unix:{folder}/s,policies=smell", *more],
                              capture_output=True, text=True, timeout=5, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "small, closed" in done.stderr


def test_an_inherited_tcp_socket_has_the_rights_of_tcp(program: Path, folder: Path) -> None:
    path = folder / "rules.yaml"
    path.write_text(RULES)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        done = subprocess.run([program, "--config", path, "--listen", "fd:0,modes=answer"], stdin=listener,
                              capture_output=True, text=True, timeout=5, check=False)
    assert done.returncode == 1
    assert "token=" in done.stderr
