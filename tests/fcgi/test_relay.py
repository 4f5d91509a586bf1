"""The relay between a web server's side and an application, both written from the specification."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from application import Application
from client import (
    ABORT,
    AUTHORIZER,
    DATA,
    OVERLOADED,
    PARAMS,
    STDIN,
    Answer,
    Closed,
    Connection,
    Request,
    ask,
    begin,
    record,
    stream,
)
from fcgi_daemon import RULES, Daemon, wait_for, within

RELAYED = RULES + "  - name: rest\n    rules: 1000000/hour\n"


@pytest.fixture(scope="module", params=["plain", "asan"])
def program(request: pytest.FixtureRequest, make: Callable[..., None], build: Path) -> Path:
    """Also under the address and undefined-behaviour sanitizers, whose finding ends the daemon."""
    make("programs", request.param)
    return (build if request.param == "plain" else build / request.param) / "bin" / "tidegate-fcgi"


@pytest.fixture
def allowance(program: Path) -> int:
    """KiB that a daemon may grow by; a sanitizer keeps freed memory back."""
    return 10_000_000 if "asan" in program.parts else 3000


@pytest.fixture
def application(folder: Path) -> Iterator[Application]:
    running = Application(f"unix:{folder}/app")
    yield running
    running.stop()


@pytest.fixture
def relay(start: Callable[..., Daemon], folder: Path, application: Application) -> Daemon:
    return start(RELAYED, listen=f"unix:{folder}/relay,relay-to={application.address},root=/srv/www")


def post(path: str, body: bytes, **more: object) -> Request:
    return Request(method="POST", uri=path, stdin=body, **more)  # type: ignore[arg-type]


def test_an_allowed_request_reaches_the_application_and_its_answer_comes_back_with_the_fields(
    relay: Daemon, application: Application
) -> None:
    answer = ask(relay.address, uri="/echo?a=b")
    assert answer.head[0] == ("X-RateLimit-Limit", "1000000")
    assert answer["X-RateLimit-Remaining"] == "999999"
    assert answer["X-Path"] == "/echo"
    told = json.loads(answer.body)
    sent = {name: value for name, value in told["params"].items()}
    assert sent["REQUEST_URI"] == "/echo?a=b"
    assert sent["QUERY_STRING"] == "a=b"
    assert sent["HTTP_USER_AGENT"] == "tests"
    assert (told["role"], told["body"]) == (1, 0)
    assert application.seen[0].keep is False


def test_a_refused_request_never_reaches_the_application_and_gets_the_whole_refusal(
    relay: Daemon, application: Application
) -> None:
    statuses = [ask(relay.address, uri="/small").status for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = ask(relay.address, uri="/small")
    assert json.loads(refused.body)["code"] == "RATE_LIMITED"
    assert refused["Retry-After"]
    assert len(application.seen) == 2


def test_a_refusal_is_told_before_the_body_is_sent_and_the_connection_goes_on(relay: Daemon) -> None:
    for _ in range(2):
        ask(relay.address, uri="/small")
    upload = post("/small", b"u" * 3_000_000)
    encoded = upload.encode()
    with Connection(relay.address) as connection:
        connection.send(encoded[:2000])
        assert connection.answer().status == 429
        connection.send(encoded[2000:])
        assert connection.ask(Request(uri="/echo", set={}), 2).status == 200


@pytest.mark.parametrize("size", [0, 1, 65528, 65536, 3_000_000])
@pytest.mark.parametrize("split", [0, 4093])
def test_a_body_of_any_size_arrives_whole(relay: Daemon, size: int, split: int) -> None:
    body = bytes(i * 7 % 251 for i in range(min(size, 70000))) * (1 + size // 70000)
    body = body[:size]
    with Connection(relay.address) as connection:
        told = json.loads(connection.ask(post("/echo", body, chunk=50001, padding=3), 9, split).body)
    assert (told["body"], told["digest"]) == (size, hashlib.md5(body).hexdigest())


@pytest.mark.parametrize("size", [0, 1, 65535, 10_000_000])
def test_an_answer_of_any_size_arrives_whole(relay: Daemon, size: int) -> None:
    answer = ask(relay.address, uri=f"/bytes/{size}")
    assert len(answer.body) == size
    assert answer.protocol_status == 0


def test_parameters_split_at_every_byte_are_passed_on_whole(relay: Daemon) -> None:
    encoded = Request(uri="/echo", keep=True, headers=[("X-Long", "v" * 300)]).encode()
    with Connection(relay.address) as connection:
        for byte in range(len(encoded)):
            connection.socket.sendall(encoded[byte : byte + 1])
        told = json.loads(connection.answer().body)
    assert told["params"]["HTTP_X_LONG"] == "v" * 300


def test_no_parameter_of_ours_and_no_proxy_header_is_passed_on(relay: Daemon) -> None:
    own = {"TIDEGATE_MODE": "relay", "TIDEGATE_POLICY": "big", "TIDEGATE_COST": "1", "HTTP_PROXY": "http://192.0.2.9/"}
    told = json.loads(ask(relay.address, uri="/echo", set=own).body)
    assert [name for name in told["params"] if "TIDEGATE" in name or "PROXY" in name] == []


@pytest.mark.parametrize(
    "script, passed",
    [
        ("/srv/www/a.php", "/srv/www/a.php"),
        ("/srv/www/..a/b.php", "/srv/www/..a/b.php"),
        ("proxy:fcgi://127.0.0.1:9410/srv/www/a.php", "/srv/www/a.php"),
        ("proxy:fcgi://localhost/srv/www/a.php?x=/etc", "/srv/www/a.php"),
        ("proxy:balancer://rl/srv/www/a.php", "/srv/www/a.php"),
        ("/etc/passwd", None),
        ("/srv/wwwevil/a.php", None),
        ("/srv/www/../../etc/passwd", None),
        ("/srv/www/..", None),
        ("/srv/www/a\0.php", None),
        ("/srv/www", None),
        ("", None),
        ("proxy:fcgi://127.0.0.1:9410", None),
        ("proxy:fcgi://127.0.0.1:9410/etc/passwd", None),
    ],
)
def test_a_script_is_passed_on_below_the_root_only(
    relay: Daemon, application: Application, script: str, passed: str | None
) -> None:
    answer = ask(relay.address, uri="/echo", set={"SCRIPT_FILENAME": script})
    if passed is None:
        assert answer.status == 403
        assert application.seen == []
        return
    assert json.loads(answer.body)["params"]["SCRIPT_FILENAME"] == passed


def test_of_two_scripts_neither_may_lie_outside_and_a_translated_path_outside_is_left_out(relay: Daemon) -> None:
    good, bad = ("SCRIPT_FILENAME", "/srv/www/a.php"), ("SCRIPT_FILENAME", "/etc/a.php")
    for extra in ([good, bad], [bad, good]):
        assert ask(relay.address, Request(uri="/echo", keep=False, extra=extra)).status == 403
    told = json.loads(ask(relay.address, uri="/echo", set={"SCRIPT_FILENAME": "/srv/www/a.php",
                                                           "PATH_TRANSLATED": "/etc/passwd"}).body)
    assert "PATH_TRANSLATED" not in told["params"]


def test_without_a_root_no_script_is_passed_on_and_php_settings_only_where_allowed(
    start: Callable[..., Daemon], folder: Path, application: Application
) -> None:
    bare = start(RELAYED, listen=f"unix:{folder}/bare,relay-to={application.address}")
    given = {"SCRIPT_FILENAME": "/srv/www/a.php", "PHP_VALUE": "auto_prepend_file=/tmp/x", "PHP_ADMIN_VALUE": "x=1"}
    told = json.loads(ask(bare.address, uri="/echo", set=given).body)
    assert not set(given) & set(told["params"])
    free = start(RELAYED, listen=f"unix:{folder}/free,relay-to={application.address},root=/,php-values=yes")
    assert set(given) <= set(json.loads(ask(free.address, uri="/echo", set=given).body)["params"])


def test_stderr_is_passed_on_and_the_exit_status_too(relay: Daemon) -> None:
    answer = ask(relay.address, uri="/stderr")
    assert (answer.stderr, answer.body) == (b"first last", b"out")


def test_data_is_passed_on(relay: Daemon, application: Application) -> None:
    params = Request(uri="/echo").params()
    sent = begin(5) + stream(PARAMS, 5, params) + record(DATA, 5, b"d" * 1000) + record(DATA, 5) + record(STDIN, 5)
    with Connection(relay.address) as connection:
        connection.send(sent)
        assert connection.answer(5).status == 200
    assert application.seen[0].data == 1000


def test_an_early_answer_is_told_while_the_body_still_comes(relay: Daemon) -> None:
    encoded = post("/early", b"u" * 2_000_000).encode()
    with Connection(relay.address) as connection:
        connection.send(encoded[:70000])
        assert connection.answer()["X-Path"] == "/early"
        connection.send(encoded[70000:])
        assert connection.ask(Request(uri="/echo"), 2).status == 200


def test_an_abort_reaches_the_application_and_is_ended_at_once(relay: Daemon, application: Application) -> None:
    with Connection(relay.address) as connection:
        connection.send(Request(uri="/silent").encode(3))
        wait_for(lambda: application.seen)
        connection.send(record(ABORT, 3))
        assert connection.answer(3).stdout == b""
        wait_for(lambda: application.seen[0].aborted and application.seen[0].closed)
        assert connection.ask(Request(uri="/echo"), 3).status == 200


def test_a_web_server_that_hangs_up_frees_the_application(relay: Daemon, application: Application) -> None:
    connection = Connection(relay.address)
    connection.send(Request(uri="/silent").encode())
    wait_for(lambda: application.seen)
    connection.close()
    wait_for(lambda: application.seen[0].closed)


def test_a_web_server_that_sends_nonsense_frees_the_application_and_is_closed(
    relay: Daemon, application: Application
) -> None:
    with Connection(relay.address) as connection:
        connection.send(Request(uri="/silent").encode())
        wait_for(lambda: application.seen)
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        assert connection.at_end()
        wait_for(lambda: application.seen[0].closed)
    assert ask(relay.address, uri="/echo").status == 200


def test_many_requests_at_once_on_one_connection_each_get_their_own_answer(relay: Daemon) -> None:
    with Connection(relay.address) as connection:
        for number in range(1, 61):
            kind = "/slow/3" if number % 2 else f"/bytes/{number * 1000}"
            connection.send(Request(uri=kind).encode(number))
        for number in reversed(range(1, 61)):
            body = connection.answer(number).body
            assert body == b"tick " * 3 if number % 2 else len(body) == number * 1000


# ---- back pressure


def test_a_slow_client_holds_the_application_and_not_the_memory(relay: Daemon, allowance: int) -> None:
    ask(relay.address, uri="/bytes/1000")
    before = relay.resident_kb()
    with Connection(relay.address, timeout=20) as connection:
        connection.send(Request(uri="/bytes/50000000").encode())
        time.sleep(0.5)
        assert relay.resident_kb() - before < allowance
        cpu = relay.cpu_seconds()
        time.sleep(0.3)
        assert relay.cpu_seconds() - cpu < 0.05
        assert len(connection.answer().body) == 50_000_000


def test_an_application_that_has_left_its_answer_to_a_slow_client_costs_no_time(
    relay: Daemon, application: Application
) -> None:
    for size in range(450_000, 750_000, 25_000):  # what all buffers on the way hold, about
        with Connection(relay.address, timeout=20) as connection:
            connection.send(Request(uri=f"/bytes/{size}").encode())
            time.sleep(0.1)
            cpu = relay.cpu_seconds()
            time.sleep(0.15)
            assert relay.cpu_seconds() - cpu < 0.05
            assert len(connection.answer().body) == size


def test_a_slow_application_holds_the_client_and_not_the_memory(
    relay: Daemon, application: Application, allowance: int
) -> None:
    ask(relay.address, uri="/echo")
    before = relay.resident_kb()
    body = b"b" * 20_000_000
    with Connection(relay.address, timeout=20) as connection:
        application.reading.clear()
        writer = threading.Thread(target=connection.send, args=(post("/echo", body).encode(),))
        writer.start()
        writer.join(0.5)
        assert writer.is_alive()
        assert relay.resident_kb() - before < allowance
        cpu = relay.cpu_seconds()
        time.sleep(0.3)
        assert relay.cpu_seconds() - cpu < 0.05
        application.reading.set()
        writer.join(10)
        assert json.loads(connection.answer().body)["digest"] == hashlib.md5(body).hexdigest()


def test_no_upload_of_many_stands_still_when_the_application_catches_up(relay: Daemon) -> None:
    # Input that waits for an application which then takes everything at once: nobody would tell of it later.
    for number in range(150):
        sent = post("/echo", b"u" * (300_000 + number * 20_011))
        with Connection(relay.address, timeout=5) as connection:
            assert json.loads(connection.ask(sent).body)["body"] == len(sent.stdin)


def test_a_client_that_leaves_while_the_application_does_not_read_ends_it(
    relay: Daemon, application: Application
) -> None:
    application.reading.clear()
    connection = Connection(relay.address)
    upload = post("/echo", b"b" * 9_000_000).encode()
    writer = threading.Thread(target=lambda: pytest.raises(OSError, connection.send, upload))
    writer.start()
    time.sleep(0.2)
    count = relay.descriptors()
    connection.socket.shutdown(socket.SHUT_RDWR)
    writer.join(5)
    connection.close()
    wait_for(lambda: relay.descriptors() <= count - 2)
    application.reading.set()


# ---- applications that fail


@pytest.mark.parametrize("path, status", [("/close", 502), ("/nonsense", 502), ("/overloaded", 503)])
def test_an_application_that_fails_is_answered_for(relay: Daemon, path: str, status: int) -> None:
    with Connection(relay.address) as connection:
        answer = connection.ask(Request(uri=path))
        assert answer.status == status
        assert answer["X-RateLimit-Limit"] == "1000000"
        assert answer["Retry-After"] == ("1" if status == 503 else None)
        assert json.loads(answer.body)["code"] in ("BAD_GATEWAY", "OVERLOADED")
        assert connection.ask(Request(uri="/echo"), 2).status == 200


def test_an_answer_broken_off_is_seen_to_be_broken_off(relay: Daemon) -> None:
    with Connection(relay.address) as connection:
        connection.send(Request(uri="/half").encode())
        with pytest.raises(Closed):
            connection.answer()
    with Connection(relay.address) as connection:  # beside others only this one is broken off
        connection.send(Request(uri="/slow/9").encode(1) + Request(uri="/half").encode(2))
        assert connection.answer(2).protocol_status == OVERLOADED
        assert connection.answer(1).body == b"tick " * 9


def test_an_application_that_is_away_is_502_and_one_that_comes_back_is_used_again(
    start: Callable[..., Daemon], folder: Path
) -> None:
    relay = start(RELAYED, listen=f"unix:{folder}/relay,relay-to=unix:{folder}/app")
    for _ in range(20):
        assert ask(relay.address, uri="/echo").status == 502
    assert len(relay.lines("application-away")) == 1
    application = Application(f"unix:{folder}/app")
    assert ask(relay.address, uri="/echo").status == 200
    application.stop()
    assert ask(relay.address, uri="/echo").status == 502


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_next_application_is_used_while_the_first_is_away(
    start: Callable[..., Daemon], folder: Path, kind: str
) -> None:
    second = Application(f"unix:{folder}/second" if kind == "unix" else "tcp:")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"unix:{folder}/first" if kind == "unix" else f"tcp:127.0.0.1:{free.getsockname()[1]}"
        relay = start(RELAYED, listen=f"unix:{folder}/relay,relay-to={away}+{second.address}")
        assert [ask(relay.address, uri="/echo").status for _ in range(50)] == [200] * 50
        assert len(second.seen) == 50
        if kind == "unix":
            first = Application(away)
            time.sleep(1.1)
            assert ask(relay.address, uri="/echo").status == 200
            assert len(first.seen) == 1
            first.stop()
    second.stop()


def test_a_silent_application_is_504_after_the_relays_time(
    start: Callable[..., Daemon], folder: Path, application: Application
) -> None:
    relay = start(RELAYED, "--relay-timeout", "0.4", listen=f"unix:{folder}/relay,relay-to={application.address}")
    with Connection(relay.address) as connection:
        with within(1.5, least=0.35):
            answer = connection.ask(Request(uri="/silent"))
        assert (answer.status, json.loads(answer.body)["code"]) == (504, "GATEWAY_TIMEOUT")
        assert connection.ask(Request(uri="/slow/40"), 2).body == b"tick " * 40  # longer, and never silent


def test_an_application_whose_queue_is_full_is_503(start: Callable[..., Daemon], folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/app")
        listener.listen(0)
        waiting = []
        for _ in range(4):
            peer = socket.socket(socket.AF_UNIX)
            peer.setblocking(False)
            try:
                peer.connect(f"{folder}/app")
            except BlockingIOError:
                pass
            waiting.append(peer)
        relay = start(RELAYED, listen=f"unix:{folder}/relay,relay-to=unix:{folder}/app")
        assert ask(relay.address, uri="/echo").status == 503
        for peer in waiting:
            peer.close()


def test_an_application_that_does_not_accept_in_time_is_504(start: Callable[..., Daemon], folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = []
        for _ in range(4):
            peer = socket.socket()
            peer.setblocking(False)
            peer.connect_ex(("127.0.0.1", port))
            waiting.append(peer)
        relay = start(RELAYED, "--relay-connect-timeout", "0.3",
                      listen=f"unix:{folder}/relay,relay-to=tcp:127.0.0.1:{port}")
        with within(1.2, least=0.25):
            assert ask(relay.address, uri="/echo").status == 504
        for peer in waiting:
            peer.close()


# ---- kept connections


def test_connections_are_kept_when_asked_for_and_only_so_many(
    start: Callable[..., Daemon], folder: Path, application: Application
) -> None:
    relay = start(RELAYED, listen=f"unix:{folder}/relay,relay-to={application.address},keep=2")
    for _ in range(30):
        assert ask(relay.address, uri="/echo").status == 200
    assert application.connections == 1
    assert all(seen.keep for seen in application.seen)
    threads = [threading.Thread(target=ask, args=(relay.address,), kwargs={"uri": "/slow/5"}) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = application.connections
    for _ in range(10):
        assert ask(relay.address, uri="/echo").status == 200
    assert application.connections == count


def test_a_kept_connection_that_died_meanwhile_costs_no_request(start: Callable[..., Daemon], folder: Path) -> None:
    first = Application(f"unix:{folder}/app")
    relay = start(RELAYED, listen=f"unix:{folder}/relay,relay-to=unix:{folder}/app,keep=8")
    assert ask(relay.address, uri="/echo").status == 200
    for number in range(10):
        with Connection(relay.address) as connection:
            assert connection.ask(Request(uri="/echo")).status == 200
            first.seen.clear()
            assert connection.ask(Request(uri="/close")).status == 502  # ... on a fresh one too
            assert len(first.seen) == 2, number  # a GET is tried once more
            assert connection.ask(post("/echo", b"x")).status == 200
            first.seen.clear()
            assert connection.ask(post("/close", b"x")).status == 502
            assert len(first.seen) == 1  # a POST is not
    first.stop()


def test_an_answer_before_the_body_is_sent_leaves_no_kept_connection_out_of_step(
    start: Callable[..., Daemon], folder: Path, application: Application
) -> None:
    relay = start(RELAYED, listen=f"unix:{folder}/relay,relay-to={application.address},keep=8")
    with Connection(relay.address) as connection:
        for number in range(1, 20):
            encoded = post("/early", b"u" * 100_000).encode(number)
            connection.send(encoded[:1500])
            assert connection.answer(number)["X-Path"] == "/early"
            connection.send(encoded[1500:])
            assert connection.ask(Request(uri="/echo"), 100)["X-Path"] == "/echo"


# ---- policies that count by what stands in the body

BODIES = """\
store: memory://
policies:
  - name: login
    match: {path: /echo}
    rules: 3/hour
    by: [ip, "form:account"]
  - {name: rest, rules: 1000000/hour}
"""


def login(account: str, peer: str, more: bytes = b"", **options: object) -> Request:
    return post("/echo", f"account={account}&password=x".encode() + more, peer=peer, keep=False,
                set={"CONTENT_TYPE": "application/x-www-form-urlencoded"}, **options)


@pytest.fixture
def reader(start: Callable[..., Daemon], folder: Path, application: Application) -> Daemon:
    return start(BODIES, "--request-timeout", "1", listen=f"unix:{folder}/relay,relay-to={application.address}")


def test_a_form_field_is_counted_and_the_body_passed_on_whole(reader: Daemon, application: Application) -> None:
    for number in range(3):
        sent = login("ada", f"192.0.2.{number}")
        answer = ask(reader.address, sent)
        assert answer["X-RateLimit-Remaining"] == str(2 - number)
        assert json.loads(answer.body)["digest"] == hashlib.md5(sent.stdin).hexdigest()
    assert ask(reader.address, login("ada", "192.0.2.9")).status == 429
    assert ask(reader.address, login("bob", "192.0.2.9")).status == 200
    assert len(application.seen) == 4


def test_what_was_taken_before_the_body_is_given_back_when_the_body_is_refused(reader: Daemon) -> None:
    assert [ask(reader.address, login("ada", f"192.0.2.{number}")).status for number in range(3)] == [200] * 3
    for _ in range(5):
        assert ask(reader.address, login("ada", "192.0.2.50")).status == 429
    statuses = [ask(reader.address, login(f"user{number}", "192.0.2.50")).status for number in range(4)]
    assert statuses == [200, 200, 200, 429]


def test_an_address_over_its_limit_is_refused_before_the_body(reader: Daemon) -> None:
    for number in range(3):
        assert ask(reader.address, login(f"user{number}", "192.0.2.1")).status == 200
    encoded = login("new", "192.0.2.1", b"&" + b"x" * 1_000_000).encode()
    with Connection(reader.address) as connection:
        connection.send(encoded[:1500])
        assert connection.answer().status == 429


@pytest.mark.parametrize("size", [0, 65_000, 65_536, 200_000, 3_000_000])
@pytest.mark.parametrize("chunk", [65528, 1000])
def test_a_body_is_passed_on_whole_and_one_too_long_to_be_looked_at_is_nobodys(
    start: Callable[..., Daemon], folder: Path, application: Application, size: int, chunk: int
) -> None:
    rules = BODIES.replace("    rules: 3/hour\n", "    rules: 3/hour\n    missing_identity: shared\n")
    relay = start(rules, listen=f"unix:{folder}/relay,relay-to={application.address}")
    sent = login("ada", "192.0.2.1", b"&f=" + b"y" * size, chunk=chunk)
    told = json.loads(ask(relay.address, sent).body)
    assert (told["body"], told["digest"]) == (len(sent.stdin), hashlib.md5(sent.stdin).hexdigest())
    for number in range(2):
        assert ask(relay.address, login("ada", f"192.0.2.1{number}")).status == 200
    assert ask(relay.address, login("ada", "192.0.2.3")).status == (429 if size <= 65_000 else 200)


def test_a_body_too_long_to_be_looked_at_is_refused_where_the_policy_says_so(
    reader: Daemon, application: Application
) -> None:
    assert ask(reader.address, login("ada", "192.0.2.1", b"&f=" + b"y" * 100_000)).status == 401
    assert application.seen == []


def test_a_body_that_does_not_come_is_408_and_one_given_up_is_forgotten(
    reader: Daemon, application: Application
) -> None:
    encoded = login("ada", "192.0.2.1", b"&" + b"x" * 100_000).encode()
    with Connection(reader.address) as connection:
        connection.send(encoded[:2000])
        assert connection.answer().status == 408
    for _ in range(3):
        with Connection(reader.address) as connection:
            connection.send(encoded[:2000])
    with Connection(reader.address) as connection:
        connection.send(encoded[:2000] if len(encoded) > 2000 else b"")
        time.sleep(0.05)
    assert application.seen == []


# ---- policies that count by the answer

ANSWERED = """\
store: memory://
policies:
  - name: guessing
    match: {path: ["/status/*", "/close", "/silent", "/half", "/empty"]}
    rules: 3/hour
    count: {status: 401}
  - name: costly
    match: {path: "/status2/*"}
    rules: 100/hour
    cost: {response_header: X-Cost, reserve: 1, max: 50}
  - name: login
    match: {path: "/echo"}
    rules: 3/hour
    by: [ip, "form:account"]
    count: {status: 401}
  - name: failing
    match: {path: ["/status/503/*", "/status/201/*"]}
    rules: 2/hour
    pause_when: error_rate > 50% min 2
  - {name: rest, rules: 1000000/hour}
"""


@pytest.fixture
def watcher(start: Callable[..., Daemon], folder: Path, application: Application) -> Daemon:
    rules = ANSWERED.replace('"/status2/*"', '"/status/200/*"').replace('"/status/*"', '"/status/4*"')
    return start(rules, "--relay-timeout", "0.5", listen=f"unix:{folder}/relay,relay-to={application.address}")


def test_only_answers_of_the_status_named_stay_counted(watcher: Daemon) -> None:
    for _ in range(6):
        assert ask(watcher.address, uri="/status/404/0").status == 404
    assert [ask(watcher.address, uri="/status/401/0").status for _ in range(4)] == [401, 401, 401, 429]
    assert ask(watcher.address, uri="/status/404/0").status == 429


def test_a_cost_that_the_answer_names_is_charged(watcher: Daemon) -> None:
    def left() -> int:
        return int(ask(watcher.address, uri="/status/200/1")["X-RateLimit-Remaining"] or 0)

    assert left() == 99
    assert ask(watcher.address, uri="/status/200/40").status == 200
    assert left() == 100 - 1 - 40 - 1
    assert ask(watcher.address, uri="/status/200/0").status == 200
    assert left() in (100 - 43, 100 - 44)


def test_while_the_application_fails_nobody_is_refused(watcher: Daemon) -> None:
    assert [ask(watcher.address, uri="/status/503/0").status for _ in range(3)] == [503] * 3
    assert [ask(watcher.address, uri="/status/201/0").status for _ in range(4)] == [201, 201, 201, 429]
    wait_for(lambda: watcher.lines("refusals-paused"))
    assert 'policy "failing" refuses nobody: 2 of 2 answers' in watcher.log()


def test_what_an_application_does_not_answer_is_not_counted_as_what_it_would_have_been(watcher: Daemon) -> None:
    for path, status in (("/close", 502), ("/silent", 504), ("/empty", None)):
        for _ in range(4):
            answer = ask(watcher.address, uri=path)
            assert status is None or answer.status == status
    assert ask(watcher.address, uri="/status/404/0")["X-RateLimit-Remaining"] == "2"


def test_a_request_whose_answer_is_never_seen_stays_counted(watcher: Daemon, application: Application) -> None:
    for number in range(3):
        with Connection(watcher.address) as connection:
            connection.send(Request(uri="/silent").encode())
            wait_for(lambda: len(application.seen) == number + 1)  # noqa: B023
    assert ask(watcher.address, uri="/status/404/0").status == 429


def test_a_login_is_counted_by_its_form_and_only_where_it_fails(watcher: Daemon) -> None:
    for number in range(8):
        assert ask(watcher.address, login("ada", "192.0.2.1")).status == 200, number
    assert ask(watcher.address, login("ada", "192.0.2.1"))["X-RateLimit-Remaining"] == "2"


def test_a_policy_by_the_body_is_refused_at_start_where_not_only_a_relay_is_served(
    program: Path, folder: Path
) -> None:
    path = folder / "rules.yaml"
    path.write_text(BODIES)
    for listen in (f"unix:{folder}/s", f"unix:{folder}/s,modes=relay+auth,relay-to=unix:{folder}/app"):
        done = subprocess.run([program, "--config", path, "--listen", listen], capture_output=True, text=True,
                              timeout=10, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"{path}:6:" in done.stderr


# ---- the end, and where relaying is not meant


def test_a_relayed_request_under_way_at_sigterm_is_still_answered(relay: Daemon) -> None:
    with Connection(relay.address) as connection:
        connection.send(Request(uri="/slow/30").encode())
        time.sleep(0.1)
        relay.signal(signal.SIGTERM)
        assert connection.answer().body == b"tick " * 30
        assert connection.at_end()
    assert relay.wait() == 0


def test_a_relay_that_never_ends_does_not_hold_the_end_beyond_its_deadline(
    start: Callable[..., Daemon], folder: Path, application: Application
) -> None:
    relay = start(RELAYED, "--drain-timeout", "0.5", listen=f"unix:{folder}/relay,relay-to={application.address}")
    with Connection(relay.address) as connection:
        connection.send(Request(uri="/silent").encode())
        wait_for(lambda: application.seen)
        with within(2, least=0.3):
            assert relay.stop() == 0


def test_a_relay_serves_no_other_mode_unless_it_is_listed(
    start: Callable[..., Daemon], folder: Path, application: Application
) -> None:
    target = f"relay-to={application.address}"
    only = start(RELAYED, listen=f"unix:{folder}/only,{target}")
    assert ask(only.address, uri="/echo", set={"TIDEGATE_MODE": "auth"}).status == 500
    assert ask(only.address, uri="/echo", role=AUTHORIZER).status == 500
    both = start(RELAYED, listen=f"unix:{folder}/both,modes=auth+relay,{target}")
    assert ask(both.address, uri="/echo").status == 204
    assert ask(both.address, uri="/echo", set={"TIDEGATE_MODE": "relay"})["X-Path"] == "/echo"


def test_a_request_without_a_policy_is_passed_on_without_fields(
    start: Callable[..., Daemon], folder: Path, application: Application
) -> None:
    relay = start(RULES, listen=f"unix:{folder}/relay,relay-to={application.address}")
    answer: Answer = ask(relay.address, uri="/echo")
    assert answer["X-Path"] == "/echo"
    assert answer["X-RateLimit-Limit"] is None


def test_memory_stays_flat_over_many_relayed_requests(relay: Daemon, allowance: int) -> None:
    def many(count: int) -> None:
        with Connection(relay.address) as connection:
            for number in range(count):
                assert connection.ask(post("/echo", b"b" * (number % 7 * 20_000))).status == 200

    many(300)
    before, descriptors = relay.resident_kb(), relay.descriptors()
    many(1500)
    assert relay.resident_kb() - before < allowance / 10
    assert relay.descriptors() <= descriptors + 1
