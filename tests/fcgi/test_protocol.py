"""The FastCGI protocol as a web server may speak it, against the running daemon."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import client
from client import Connection, Request, ask, begin, record, stream
from fcgi_daemon import RULES, Daemon, wait_for, within

BIG = Request(uri="/big")


@pytest.fixture(scope="module", params=["plain", "asan"])
def program(request: pytest.FixtureRequest, make: Callable[..., None], build: Path) -> Path:
    """Also under the address and undefined-behaviour sanitizers, whose finding ends the daemon."""
    make("programs", request.param)
    return (build if request.param == "plain" else build / request.param) / "bin" / "tidegate-fcgi"


@pytest.mark.parametrize("split", [1, 2, 3, 7, 8, 9, 16, 100])
def test_a_request_split_into_pieces_of_any_size_is_answered(daemon: Daemon, split: int) -> None:
    with Connection(daemon.address) as connection:
        assert connection.ask(BIG, split=split).status == 200
        assert connection.ask(Request(uri="/big", padding=5, chunk=11), split=split).status == 200


def test_a_request_split_in_two_at_every_byte_is_answered(daemon: Daemon) -> None:
    encoded = Request(uri="/big", padding=3, chunk=200).encode()
    with Connection(daemon.address) as connection:
        for at in range(1, len(encoded)):
            connection.send(encoded[:at])
            connection.send(encoded[at:])
            assert connection.answer().status == 200, at


def test_pipelined_requests_are_all_answered_in_order(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        connection.send(BIG.encode() * 200)
        remaining = [int(connection.answer()["X-RateLimit-Remaining"] or "") for _ in range(200)]
        assert remaining == sorted(remaining, reverse=True)
        assert len(set(remaining)) == 200


def test_multiplexed_requests_are_answered_by_their_own_ids(daemon: Daemon) -> None:
    ids = list(range(1, 65))
    params = {i: Request(uri="/big", method="GET", peer=f"192.0.2.{i}").params() for i in ids}
    with Connection(daemon.address) as connection:
        connection.send(b"".join(begin(i) for i in ids))
        middle = {i: len(params[i]) // 2 for i in ids}
        connection.send(b"".join(record(client.PARAMS, i, params[i][: middle[i]]) for i in ids))
        connection.send(b"".join(record(client.PARAMS, i, params[i][middle[i] :]) for i in reversed(ids)))
        for i in reversed(ids):
            connection.send(record(client.PARAMS, i))
            assert connection.answer(i)["X-RateLimit-Remaining"] == "999999"


def test_the_65th_request_at_once_is_told_overloaded_and_the_others_are_not_harmed(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        connection.send(b"".join(begin(i) for i in range(1, 66)))
        assert connection.answer(65).protocol_status == client.OVERLOADED
        connection.send(stream(client.PARAMS, 64, BIG.params()))
        assert connection.answer(64).status == 200
        connection.send(BIG.encode(65))
        assert connection.answer(65).status == 200


@pytest.mark.fault("R191")
def test_a_kept_connection_survives_paddings_aborts_and_changing_ids(daemon: Daemon) -> None:
    chance = random.Random(191)
    with Connection(daemon.address) as connection:
        for _ in range(3000):
            request_id = chance.randrange(1, 65536)
            padding = chance.randrange(256)
            if chance.random() < 0.2:
                connection.send(begin(request_id, padding=padding) + record(client.PARAMS, request_id, b"\x01\x01Aa"))
                connection.send(record(client.ABORT, request_id, padding=padding))
                assert connection.answer(request_id).protocol_status == client.COMPLETE
            else:
                request = Request(uri="/big", padding=padding, chunk=chance.choice([13, 500, 65000]),
                                  stdin=b"x" * chance.choice([0, 10, 70000]))
                assert connection.ask(request, request_id).status == 200


def test_a_connection_that_is_not_kept_is_closed_after_its_answer(daemon: Daemon) -> None:
    assert ask(daemon.address, uri="/big").status == 200  # ask() wants the end
    assert ask(daemon.address, uri="/big", stdin=b"x" * 3_000_000).status == 200
    wait_for(lambda: daemon.descriptors() <= 12, what="closed descriptors")


def test_an_answer_comes_before_the_body_and_the_late_body_harms_nobody(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        connection.send(begin() + stream(client.PARAMS, 1, BIG.params()))
        assert connection.answer().status == 200
        connection.send(stream(client.STDIN, 1, b"x" * 100_000, padding=3))
        assert connection.ask(BIG).status == 200


def test_an_authorizer_is_answered_when_its_parameters_end(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        answers = [connection.ask(Request(uri="/small", role=client.AUTHORIZER)) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[0]["X-RateLimit-Remaining"] == "1"
    assert answers[2]["Retry-After"] is not None
    assert b"RATE_LIMITED" in answers[2].body


@pytest.mark.parametrize("role", [client.FILTER, 0, 4, 65535])
def test_a_role_that_is_not_served_is_told_so(daemon: Daemon, role: int) -> None:
    with Connection(daemon.address) as connection:
        assert connection.ask(Request(role=role)).protocol_status == client.UNKNOWN_ROLE
        assert connection.ask(BIG).status == 200


def test_get_values_is_answered_at_once(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        connection.socket.settimeout(1)
        assert connection.values("FCGI_MAX_CONNS", "FCGI_MPXS_CONNS", "SOMETHING") == {
            "FCGI_MAX_CONNS": "1024", "FCGI_MPXS_CONNS": "1",
        }
        assert connection.values() == {}
        assert connection.values(*["FCGI_MAX_REQS"] * 100) == {}  # more than a question: bounded, and still answered
        assert connection.ask(BIG).status == 200


@pytest.mark.parametrize("kind, request_id", [(12, 0), (255, 0), (0, 0), (4, 0), (99, 7)])
def test_a_record_type_that_is_not_known_is_told_so(daemon: Daemon, kind: int, request_id: int) -> None:
    with Connection(daemon.address) as connection:
        connection.send(record(kind, request_id, b"content", padding=9))
        connection.step()
        assert connection.management == [(client.UNKNOWN_TYPE, bytes([kind]) + bytes(7))]
        assert connection.ask(BIG).status == 200


def test_an_abort_of_nothing_is_ignored(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        connection.send(record(client.ABORT, 9))
        assert connection.ask(BIG).status == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        record(client.BEGIN, 1, b"\0\1", version=2),
        record(client.BEGIN, 1, b"\0\1\0"),
        begin(5) + begin(5),
    ],
)
def test_a_stream_that_cannot_be_understood_is_closed_and_others_go_on(daemon: Daemon, garbage: bytes) -> None:
    with Connection(daemon.address) as other, Connection(daemon.address) as connection:
        assert other.ask(BIG).status == 200
        connection.send(BIG.encode(7) + garbage)
        assert connection.answer(7).status == 200
        assert connection.at_end()
        assert other.ask(BIG).status == 200
    assert len(daemon.lines("peer-broken")) == 1


def test_random_bytes_never_stop_the_daemon(daemon: Daemon) -> None:
    chance = random.Random(5)
    valid = Request(uri="/big", chunk=60, padding=2).encode()
    for _ in range(600):
        data = bytearray(valid * 2)
        for _ in range(chance.randrange(1, 12)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with Connection(daemon.address) as connection:
            connection.send(bytes(data[: chance.randrange(1, len(data))]))
    assert ask(daemon.address, uri="/big").status == 200


@pytest.mark.fault("R190")
def test_64_kib_of_cookie_and_8_kib_of_path_reach_the_decision_whole(daemon: Daemon) -> None:
    headers = [("Cookie", "c" * 65536), ("X-Api-Key", "k" * 300)]
    request = Request(uri="/keyed?" + "q" * 8192, headers=headers, chunk=999)
    with Connection(daemon.address) as connection:
        assert [connection.ask(request, split=split).status for split in (0, 1009, 4096)] == [200, 200, 429]
        other = Request(uri="/keyed", headers=[("X-Api-Key", "k" * 299 + "j")])
        assert connection.ask(other).status == 200


def test_parameters_over_the_bound_are_refused_cleanly_and_the_connection_goes_on(daemon: Daemon) -> None:
    large = Request(uri="/big", headers=[("Cookie", "c" * 140_000)])
    with Connection(daemon.address) as connection:
        answer = connection.ask(large)
        assert answer.status == 431
        assert b"TOO_LARGE" in answer.body
        assert connection.ask(BIG).status == 200
    assert ask(daemon.address, Request(uri="/big", headers=[("Cookie", "c" * 140_000)], keep=False)).status == 431
    fits = Request(uri="/big", headers=[("Cookie", "c" * 125_000)])
    assert ask(daemon.address, Request(uri="/big", headers=fits.headers, keep=False)).status == 200


def test_more_header_lines_than_are_counted_are_refused(daemon: Daemon) -> None:
    assert ask(daemon.address, uri="/big", headers=[(f"X-{i}", "1") for i in range(509)]).status == 200
    assert ask(daemon.address, uri="/big", headers=[(f"X-{i}", "1") for i in range(600)]).status == 431


@pytest.mark.parametrize(
    "params",
    [b"\x05", b"\x05\x80", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\x01\x05Ab", b"\x80\x00\x00", b"\x00"],
)
def test_damaged_parameters_are_refused_and_the_connection_goes_on(daemon: Daemon, params: bytes) -> None:
    with Connection(daemon.address) as connection:
        connection.send(begin() + stream(client.PARAMS, 1, params))
        assert connection.answer().status == 500
        assert connection.ask(BIG).status == 200


def test_lengths_that_wrap_32_bits_are_refused(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        connection.send(begin() + stream(client.PARAMS, 1, struct.pack(">II", 0xFFFFFFFF, 0xFFFFFFFF) + b"x" * 100))
        assert connection.answer().status == 500


def test_idle_and_silent_connections_do_not_keep_others_waiting(daemon: Daemon) -> None:
    silent = [Connection(daemon.address) for _ in range(50)]
    kept = [Connection(daemon.address) for _ in range(50)]
    for connection in kept:
        assert connection.ask(BIG).status == 200
    half = Connection(daemon.address)
    half.send(begin() + record(client.PARAMS, 1, BIG.params()[:20]))
    with within(0.5):
        assert ask(daemon.address, uri="/big").status == 200
    for connection in [*silent, *kept, half]:
        connection.close()


def test_a_half_sent_request_is_given_up_after_its_deadline_however_slowly_it_drips(
    start: Callable[..., Daemon]
) -> None:
    daemon = start(RULES, "--request-timeout", "0.4")
    with Connection(daemon.address) as idle, Connection(daemon.address) as connection:
        assert idle.ask(BIG).status == 200
        encoded = BIG.encode()
        with within(1.5, least=0.3), pytest.raises((BrokenPipeError, ConnectionResetError)):
            for byte in encoded[:-1]:
                connection.send(bytes([byte]))
                time.sleep(0.02)
        assert idle.ask(BIG).status == 200  # idle is not half-sent
    assert daemon.lines("peer-slow")


def test_a_busy_connection_that_always_ends_in_the_middle_of_a_record_is_not_given_up(
    start: Callable[..., Daemon]
) -> None:
    daemon = start(RULES, "--request-timeout", "0.3")
    encoded = BIG.encode()
    with Connection(daemon.address) as connection:
        connection.send(encoded[:5])
        for _ in range(20):
            connection.send(encoded[5:] + encoded[:5])
            assert connection.answer().status == 200
            time.sleep(0.05)


def test_an_idle_connection_is_closed_after_its_time(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, "--idle-timeout", "0.3")
    with Connection(daemon.address) as connection:
        assert connection.ask(BIG).status == 200
        with within(1.5, least=0.2):
            assert connection.at_end()


def test_a_peer_that_does_not_read_is_bounded_and_given_up(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES, "--request-timeout", "0.6")
    assert ask(daemon.address, uri="/big").status == 200
    before = daemon.resident_kb()
    with Connection(daemon.address) as connection:
        connection.socket.setblocking(False)
        sent, flood = 0, memoryview(BIG.encode() * 100_000)
        deadline = time.monotonic() + 3
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < deadline:
                try:
                    sent += connection.socket.send(flood[sent:])
                except BlockingIOError:
                    time.sleep(0.01)
        assert sent < 3_000_000
        assert daemon.resident_kb() - before < 3000
    assert ask(daemon.address, uri="/big").status == 200


def test_a_slow_reader_gets_every_answer(daemon: Daemon) -> None:
    count = 20_000
    with Connection(daemon.address, timeout=20) as connection:
        writer = threading.Thread(target=connection.send, args=(BIG.encode() * count,))
        writer.start()
        for number in range(count):
            if number % 2000 == 0:
                time.sleep(0.05)  # the daemon's own buffer fills, then the socket's, then the writer stands
            assert connection.answer().status == 200
        writer.join(5)
        assert not writer.is_alive()


def test_memory_and_descriptors_stay_flat_over_100_000_requests(daemon: Daemon) -> None:
    batch = 500
    encoded = b"".join(
        Request(uri="/big", peer=f"198.51.100.{i % 250}", headers=[("Cookie", "c" * (i % 97 * 20))]).encode(i % 64 + 1)
        for i in range(batch)
    )

    def run(rounds: int) -> None:
        with Connection(daemon.address) as connection:
            for _ in range(rounds):
                connection.send(encoded)
                for i in range(batch):
                    assert connection.answer(i % 64 + 1).protocol_status == client.COMPLETE

    run(20)
    memory, descriptors = daemon.resident_kb(), daemon.descriptors()
    run(180)
    for _ in range(500):
        assert ask(daemon.address, uri="/big").status == 200
    assert daemon.resident_kb() - memory < 256
    assert daemon.descriptors() <= descriptors + 1
    assert daemon.stop() == 0
    assert "100500 requests" in daemon.lines("stopped")[0]
