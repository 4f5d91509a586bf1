"""What a request becomes and what is answered: modes, fields, who is counted, and questions asked wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction

import pytest

import client
from client import Answer, Connection, Request, ask
from fcgi_daemon import RULES, Daemon

AUTH = {"TIDEGATE_MODE": "auth"}


def several(address: str, count: int, request: Request) -> list[Answer]:
    with Connection(address) as connection:
        return [connection.ask(request) for _ in range(count)]


def test_answer_mode_gives_the_decision_as_json_and_the_refusal_whole(daemon: Daemon) -> None:
    first, second, third = several(daemon.address, 3, Request(uri="/small"))
    assert first.status == 200
    assert first["Content-Type"] == "application/json"
    decision = json.loads(first.body, parse_float=Fraction)
    assert decision == {"allowed": True, "policy": "small", "limit": 2, "burst": 2, "remaining": 1,
                        "reset_after": 3600, "delay": 0, "degraded": False}
    assert (first["X-RateLimit-Limit"], first["X-RateLimit-Remaining"]) == ("2", "1")
    assert first["Retry-After"] is None
    assert second["X-RateLimit-Remaining"] == "0"
    assert third.status == 429
    assert third["Status"] == "429 Too Many Requests"
    assert 3590 <= int(third["Retry-After"] or 0) <= 3600
    assert json.loads(third.body)["code"] == "RATE_LIMITED"
    assert int(third["Content-Length"] or 0) == len(third.body)


@pytest.mark.fault("R175")
def test_auth_mode_says_204_or_403_and_what_is_meant_in_fields(daemon: Daemon) -> None:
    first, _, third = several(daemon.address, 3, Request(uri="/small", set=AUTH))
    whole = several(daemon.address, 1, Request(uri="/small"))[0]
    assert first.status == 204
    assert first.body == b""
    assert first["X-RateLimit-Remaining"] == "1"
    assert third.status == 403
    assert third["X-Tidegate-Status"] == "429"
    assert third["Retry-After"] == whole["Retry-After"]
    assert (third["X-Tidegate-Body"] or "").encode() == whole.body.rstrip()
    assert third["Content-Type"] is None
    assert third.body == b""


def test_a_request_without_a_policy_passes_without_fields_in_both_modes(daemon: Daemon) -> None:
    answer = ask(daemon.address, uri="/other")
    assert answer.status == 200
    assert json.loads(answer.body) == {"allowed": True, "policy": None}
    assert answer["X-RateLimit-Limit"] is None
    passed = ask(daemon.address, uri="/other", set=AUTH)
    assert passed.status == 204
    assert passed.head == [("Status", "204 No Content")]


def test_a_deny_rule_is_403_without_a_time_to_come_back(daemon: Daemon) -> None:
    answer = ask(daemon.address, uri="/closed")
    assert (answer.status, answer["Retry-After"]) == (403, None)
    auth = ask(daemon.address, uri="/closed", set=AUTH)
    assert (auth.status, auth["X-Tidegate-Status"], auth["Retry-After"]) == (403, "403", None)


def test_a_missing_key_is_401_in_both_modes_and_names_the_way_in(daemon: Daemon) -> None:
    for parameters in ({}, AUTH):
        answer = ask(daemon.address, uri="/keyed", set=parameters)
        assert answer.status == 401
        assert answer["WWW-Authenticate"]


def test_a_missing_key_that_is_to_be_400_travels_through_auth_as_403(start: Callable[..., Daemon]) -> None:
    daemon = start(RULES.replace("by: header:X-Api-Key", "by: header:X-Api-Key\n    missing_identity: reject 400"))
    assert ask(daemon.address, uri="/keyed").status == 400
    answer = ask(daemon.address, uri="/keyed", set=AUTH)
    assert (answer.status, answer["X-Tidegate-Status"]) == (403, "400")


def test_head_gets_the_fields_and_no_body(daemon: Daemon) -> None:
    answers = several(daemon.address, 3, Request(uri="/small", method="HEAD"))
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert all(answer.body == b"" for answer in answers)
    assert answers[2]["Retry-After"]


def test_the_clients_method_is_told_where_the_web_server_asks_with_its_own(start: Callable[..., Daemon]) -> None:
    daemon = start("store: memory://\npolicies:\n  - {name: posts, match: {methods: [POST]}, rules: 1/hour}\n")
    told = [ask(daemon.address, set={"TIDEGATE_METHOD": method}) for method in ("GET", "POST", "HEAD", "POST")]
    assert [answer.status for answer in told] == [200, 200, 200, 429]
    assert told[2].body  # the question was a GET


def test_the_mode_comes_from_the_parameter_else_the_listener_else_the_option(
    start: Callable[..., Daemon], folder: object
) -> None:
    by_option = start(RULES, "--mode", "auth")
    assert ask(by_option.address, uri="/big").status == 204
    assert ask(by_option.address, uri="/big", set={"TIDEGATE_MODE": "answer"}).status == 200
    by_listener = start(RULES, "--mode", "auth", listen=f"unix:{folder}/l.sock,answers=answer")
    assert ask(by_listener.address, uri="/big").status == 200
    assert ask(by_listener.address, uri="/big", set=AUTH).status == 204


def test_of_a_parameter_sent_twice_the_last_counts(daemon: Daemon) -> None:
    twice = Request(uri="/big", keep=False, set={"TIDEGATE_MODE": "answer", "CONTENT_LENGTH": "3"},
                    extra=[("TIDEGATE_MODE", "auth"), ("CONTENT_LENGTH", "")])
    assert ask(daemon.address, twice).status == 204


def test_a_client_cannot_choose_the_mode_by_a_header(daemon: Daemon) -> None:
    assert ask(daemon.address, uri="/big", headers=[("TIDEGATE-MODE", "auth"), ("Tidegate_Mode", "x")]).status == 200


@pytest.mark.parametrize(
    "parameters, told",
    [
        ({"TIDEGATE_MODE": "xaccel"}, "TIDEGATE_NEXT"),
        ({"TIDEGATE_MODE": "relay"}, "modes="),
        ({"TIDEGATE_MODE": "authorizer"}, "TIDEGATE_MODE"),
        ({"TIDEGATE_MODE": "wrong"}, "TIDEGATE_MODE"),
        ({"TIDEGATE_MODE": ""}, "TIDEGATE_MODE"),
        ({"TIDEGATE_KEY": "somebody"}, "TIDEGATE_KEY"),
        ({"TIDEGATE_KEY": "ip=192.0.2.1"}, "TIDEGATE_POLICY"),
        ({"TIDEGATE_POLICY": "smell"}, "small"),
        ({"TIDEGATE_COST": "-2"}, "TIDEGATE_COST"),
        ({"TIDEGATE_COST": "10000000001"}, "TIDEGATE_COST"),
        ({"TIDEGATE_PEEK": "yes"}, "TIDEGATE_PEEK"),
        ({"TIDEGATE_BATCH": ""}, "TIDEGATE_BATCH"),
        ({"TIDEGATE_COLOR": "red"}, "TIDEGATE_COLOR"),
        ({"TIDEGATE_NEXT": "@app"}, "TIDEGATE_NEXT"),
        ({"TIDEGATE_NOW_US": "1"}, "--manual-clock"),
        ({"REQUEST_URI": None}, "REQUEST_URI"),
        ({"REQUEST_URI": ""}, "REQUEST_URI"),
        ({"REQUEST_METHOD": None}, "REQUEST_METHOD"),
        ({'TIDEGATE_"\r\nX: y': "1"}, "TIDEGATE_"),
    ],
)
def test_a_question_asked_wrongly_is_refused_closed_and_logged(
    daemon: Daemon, parameters: dict[str, str | None], told: str
) -> None:
    answer = ask(daemon.address, uri="/other", set=parameters)
    assert answer.status == 500
    assert told in json.loads(answer.body)["message"]
    auth = ask(daemon.address, uri="/other", set={**AUTH, **parameters})
    assert auth.status == 500
    assert told in daemon.lines("asked-wrongly")[0]
    assert len(daemon.lines("asked-wrongly")) == 1  # rarely, however often it happens


def test_only_request_uri_decides_the_path(daemon: Daemon) -> None:
    location = {"SCRIPT_NAME": "/_tidegate", "DOCUMENT_URI": "/_tidegate", "QUERY_STRING": ""}
    sub_request = Request(uri="/small?x=1", set=location)
    assert [answer.status for answer in several(daemon.address, 3, sub_request)] == [200, 200, 429]
    assert ask(daemon.address, uri="/sm%61ll").status == 429
    disguised = ask(daemon.address, uri="/other", set={"SCRIPT_NAME": "/small", "DOCUMENT_URI": "/small"})
    assert json.loads(disguised.body)["policy"] is None


def test_each_peer_has_its_own_count_and_a_forwarded_header_of_a_stranger_is_not_believed(daemon: Daemon) -> None:
    assert [a.status for a in several(daemon.address, 3, Request(uri="/small", peer="192.0.2.7"))] == [200, 200, 429]
    assert ask(daemon.address, uri="/small", peer="192.0.2.8").status == 200
    forged = Request(uri="/small", peer="192.0.2.7", headers=[("X-Forwarded-For", "203.0.113.1")], keep=False)
    assert ask(daemon.address, forged).status == 429


def test_forwarded_lines_of_a_trusted_proxy_are_joined_in_the_order_sent(start: Callable[..., Daemon]) -> None:
    daemon = start("trusted_proxies: [10.0.0.0/8]\n" + RULES)
    lines = [("X-Forwarded-For", "198.51.100.66"), ("X-Forwarded-For", "203.0.113.5")]
    through = Request(uri="/small", peer="10.0.0.1", headers=lines)
    assert [answer.status for answer in several(daemon.address, 3, through)] == [200, 200, 429]
    assert ask(daemon.address, uri="/small", peer="203.0.113.5").status == 429  # the nearest hop, not the first line
    assert ask(daemon.address, uri="/small", peer="198.51.100.66").status == 200


def test_a_key_sent_in_both_spellings_is_no_key(daemon: Daemon) -> None:
    once = Request(uri="/keyed", headers=[("X-Api-Key", "mine")], keep=False)
    assert ask(daemon.address, once).status == 200
    both = Request(uri="/keyed", headers=[("X-Api-Key", "other"), ("X_Api_Key", "mine")], keep=False)
    assert ask(daemon.address, both).status == 401


def test_a_local_socket_without_an_address_is_nobody(daemon: Daemon) -> None:
    assert ask(daemon.address, uri="/small", peer="").status == 401
    assert ask(daemon.address, uri="/small", peer="unix:").status == 401
    assert ask(daemon.address, uri="/small", set={"REMOTE_ADDR": None}).status == 401


def test_remote_user_is_the_user_and_a_header_is_not(start: Callable[..., Daemon]) -> None:
    daemon = start("store: memory://\npolicies:\n  - {name: users, rules: 1/hour, by: user}\n")
    assert ask(daemon.address, set={"REMOTE_USER": "ada"}).status == 200
    assert ask(daemon.address, set={"REMOTE_USER": "ada"}).status == 429
    assert ask(daemon.address, set={"REMOTE_USER": "bob"}).status == 200
    assert ask(daemon.address, headers=[("Remote-User", "eve")]).status == 401


def test_the_host_is_the_header_else_the_servers_name(start: Callable[..., Daemon]) -> None:
    daemon = start("store: memory://\npolicies:\n  - {name: h, match: {host: shop.example}, rules: 100/hour}\n")

    def policy(**parameters: str | None) -> object:
        return json.loads(ask(daemon.address, set=parameters).body)["policy"]

    assert policy(HTTP_HOST="shop.example:8080") == "h"
    assert policy(HTTP_HOST=None, SERVER_NAME="shop.example") == "h"
    assert policy(HTTP_HOST="other.example", SERVER_NAME="shop.example") is None


def test_a_preflight_is_free_in_both_modes(daemon: Daemon) -> None:
    preflight = Request(method="OPTIONS", uri="/small", set=AUTH,
                        headers=[("Origin", "https://example.org"), ("Access-Control-Request-Method", "POST")])
    assert [answer.status for answer in several(daemon.address, 5, preflight)] == [204] * 5
    assert json.loads(ask(daemon.address, uri="/small").body)["remaining"] == 1


def test_a_manual_clock_moves_with_each_request_and_only_then(start: Callable[..., Daemon]) -> None:
    daemon = start("store: memory://\npolicies:\n  - {name: m, rules: 2/minute sliding_log}\n", "--manual-clock")

    def at(second: float) -> Answer:
        return ask(daemon.address, set={"TIDEGATE_NOW_US": str(int(second * 1_000_000))})

    assert [at(1000).status, at(1030).status, at(1059.999999).status] == [200, 200, 429]
    assert at(1060).status == 200
    late = at(1060)
    assert (late.status, late["Retry-After"]) == (429, "30")
    assert ask(daemon.address).status == 500
    for bad in ("", "-1", "1e6", "99999999999999999999", "12x"):
        assert ask(daemon.address, set={"TIDEGATE_NOW_US": bad}).status == 500
    assert "TIDEGATE_NOW_US" in daemon.lines("asked-wrongly")[0]


def test_a_leaky_bucket_tells_its_delay_exactly(start: Callable[..., Daemon]) -> None:
    rules = "store: memory://\npolicies:\n  - {name: l, rules: 3/second burst 10 leaky_bucket}\n"
    daemon = start(rules, "--manual-clock")
    delays = [json.loads(ask(daemon.address, set={"TIDEGATE_NOW_US": "5000000"}).body, parse_float=Fraction)["delay"]
              for _ in range(4)]
    assert delays == [0, Fraction("0.333334"), Fraction("0.666667"), 1]


def test_an_authorizer_answers_whole_whatever_the_mode(daemon: Daemon) -> None:
    request = Request(uri="/small", role=client.AUTHORIZER, set=AUTH)
    assert [answer.status for answer in several(daemon.address, 3, request)] == [200, 200, 429]
