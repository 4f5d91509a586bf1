"""Faults of what is counted, of who the client is, of keys and of configuration: rows of docs/faults.md."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tidegate import ConfigError, Gate, Limiter, ManualClock, RuleError

numbers = itertools.count()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def store() -> str:
    return f"memory://faults-rules-{os.getpid()}-{next(numbers)}"


class Site:
    def __init__(self, folder: Path, clock: ManualClock, rules: str) -> None:
        self.path = folder / "rules.yaml"
        self.path.write_text(rules)
        self.gate = Gate(self.path, store=store(), clock=clock)

    def judged(self, peer: str | None = "192.0.2.1", path: str = "/", user: str | None = None, **headers: str) -> Any:
        environ: dict[str, Any] = {"REQUEST_METHOD": "GET", "RAW_URI": path, "HTTP_HOST": "shop.example"}
        if peer is not None:
            environ["REMOTE_ADDR"] = peer
        environ.update({"HTTP_" + name.upper(): value for name, value in headers.items()})
        return self.gate.judge_wsgi(environ, user=user)

    def told(self, times: int, **asked: Any) -> str:
        return "".join("A" if self.judged(**asked) else "D" for _ in range(times))


def hits(limiter: Limiter, times: int, *parts: str) -> str:
    return "".join("A" if limiter.hit(*parts) else "D" for _ in range(times))


# ---- what is counted


@pytest.mark.fault("R10")
def test_of_two_limits_none_is_charged_when_one_refuses(clock: ManualClock) -> None:
    limiter = Limiter("3/5s; 5/hour", store=store(), clock=clock)
    assert hits(limiter, 4, "a") == "AAAD"
    assert [rule.remaining for rule in limiter.peek("a").rules] == [0, 2]
    clock.advance(6)
    assert hits(limiter, 3, "a") == "AAD"
    assert [rule.remaining for rule in limiter.peek("a").rules] == [1, 0]


@pytest.mark.fault("R11")
@pytest.mark.parametrize("order", ["client, host", "host, client"])
def test_a_chain_charges_nothing_when_any_of_it_refuses_in_either_order(
    clock: ManualClock, tmp_path: Path, order: str
) -> None:
    policies = {
        "client": "  - {name: client, rules: 2/10s, also: true}\n",
        "host": "  - {name: host, rules: 10/10s, by: host, also: true}\n",
    }
    site = Site(tmp_path, clock, "policies:\n" + "".join(policies[name] for name in order.split(", ")))
    assert site.told(20) == "AA" + "D" * 18
    for host in range(2, 6):
        assert site.told(3, peer=f"192.0.2.{host}") == "AAD"
    assert site.told(1, peer="192.0.2.6") == "D"  # ten by now


@pytest.mark.fault("R16")
def test_looking_is_free_and_says_what_the_next_hit_would(clock: ManualClock) -> None:
    limiter = Limiter("1/minute", store=store(), clock=clock)
    for _ in range(10):
        assert limiter.peek("a").allowed
        assert limiter.peek("a").remaining == 1
    assert limiter.hit("a").allowed
    assert not limiter.peek("a").allowed
    assert not limiter.hit("a").allowed


@pytest.mark.fault("R19")
def test_each_window_admits_exactly_the_limit_and_a_new_limit_keeps_what_was_used(clock: ManualClock) -> None:
    where = store()
    limiter = Limiter("3/minute fixed_window", name="a", store=where, clock=clock)
    for _ in range(3):
        assert hits(limiter, 4, "x") == "AAAD"
        clock.advance(60)
    assert hits(limiter, 2, "x") == "AA"
    assert Limiter("5/minute fixed_window", name="a", store=where, clock=clock).peek("x").remaining == 3


@pytest.mark.fault("R91")
def test_a_limits_value_is_no_part_of_what_is_counted(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 10/hour}]\n")
    assert site.told(8) == "A" * 8
    site.path.write_text("policies: [{name: a, rules: 20/hour}]\n")
    site.gate.reload()
    assert site.judged().decision.remaining == 11


# ---- who the client is

TRUSTED = "trusted_proxies: [10.0.0.1]\npolicies: [{name: a, rules: 5/minute}]\n"


@pytest.mark.fault("R71")
def test_a_forwarding_header_from_anybody_is_nobodys_word(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 5/minute}]\n")
    forged = [f"198.51.100.{random.randrange(256)}" for _ in range(20)]
    assert sum(bool(site.judged(x_forwarded_for=address)) for address in forged) == 5


@pytest.mark.fault("R73")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("198.51.100.7:1111", "198.51.100.7:2222"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("abc", "10.0.0.1"),  # rubbish: the peer itself
        ("", "10.0.0.1"),
    ],
)
def test_ports_brackets_and_zones_make_no_new_client(
    clock: ManualClock, tmp_path: Path, one: str, other: str
) -> None:
    site = Site(tmp_path, clock, TRUSTED)
    assert site.told(5, peer="10.0.0.1", x_forwarded_for=one) == "AAAAA"
    assert site.told(1, peer="10.0.0.1", x_forwarded_for=other) == "D"


@pytest.mark.fault("R74")
def test_clients_behind_one_proxy_have_budgets_of_their_own(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, TRUSTED.replace("policies", "client_header: x-FORWARDED-for\npolicies"))
    assert site.told(6, peer="10.0.0.1", x_forwarded_for="192.0.2.1") == "AAAAAD"
    assert site.told(1, peer="10.0.0.1", x_forwarded_for="192.0.2.2") == "A"


@pytest.mark.fault("R76")
@pytest.mark.parametrize("peer", [None, "", "b''"])
def test_a_local_socket_is_a_peer_of_its_own_and_never_a_crash(
    clock: ManualClock, tmp_path: Path, peer: str | None
) -> None:
    policies = "policies: [{name: a, rules: 1/minute}]\n"
    trusted = Site(tmp_path, clock, 'trusted_proxies: "unix:"\n' + policies)
    assert trusted.told(2, peer=peer, x_forwarded_for="203.0.113.5") == "AD"
    assert trusted.told(1, peer=peer, x_forwarded_for="203.0.113.6") == "A"
    untrusted = Site(tmp_path, clock, policies)
    judgement = untrusted.judged(peer=peer, x_forwarded_for="203.0.113.5")
    assert (judgement.outcome, judgement.missing, judgement.status) == ("unidentified", "ip", 401)


@pytest.mark.fault("R77")
def test_trusting_the_local_socket_trusts_nobody_else(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, 'trusted_proxies: "unix:"\npolicies: [{name: a, rules: 1/minute}]\n')
    assert site.told(1, peer="192.0.2.1", x_forwarded_for="198.51.100.1") == "A"
    assert site.told(1, peer="192.0.2.1", x_forwarded_for="198.51.100.2") == "D"
    assert site.told(2, peer="", x_forwarded_for="198.51.100.2") == "AD"


@pytest.mark.fault("R79")
def test_a_network_of_64_bits_is_one_client(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 5/minute}]\n")
    assert sum(bool(site.judged(peer=f"2001:db8:1:2::{n:x}")) for n in range(100)) == 5
    assert site.told(1, peer="2001:db8:1:3::1") == "A"


@pytest.mark.fault("R80")
def test_every_spelling_of_an_address_is_one_client_whatever_header_it_comes_in(
    clock: ManualClock, tmp_path: Path
) -> None:
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 1/minute}]\n")
    assert [site.told(1, peer=peer) for peer in ("::ffff:192.0.2.1", "192.0.2.1", "0:0:0:0:0:FFFF:C000:201")] == [*"ADD"]
    site = Site(tmp_path, clock, "client_header: CF-Connecting-IP\n" + TRUSTED.replace("5/", "1/"))
    assert site.told(1, peer="10.0.0.1", cf_connecting_ip="2001:DB8::1") == "A"
    assert site.told(1, peer="10.0.0.1", cf_connecting_ip="2001:db8:0:0::1") == "D"


@pytest.mark.fault("R82")
def test_what_is_configured_as_the_key_is_the_key(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, 'policies: [{name: a, rules: 1/minute, by: "header:X-User"}]\n')
    assert site.told(2, x_user="u1") == "AD"
    assert site.told(1, x_user="u2") == "A"
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 1/minute, by: path}]\n")
    assert [site.told(1, peer=peer, path="/a") for peer in ("192.0.2.1", "192.0.2.2")] == ["A", "D"]
    with pytest.raises(ConfigError):
        Site(tmp_path, clock, "policies: [{name: a, rules: 1/minute, by: header}]\n")


# ---- keys and routes


@pytest.mark.fault("R83")
def test_no_content_of_one_part_makes_two_identities_equal(clock: ManualClock, tmp_path: Path) -> None:
    limiter = Limiter("1/minute", store=store(), clock=clock)
    assert hits(limiter, 2, "a", "b:c") == "AD"
    assert hits(limiter, 1, "a:b", "c") == "A"
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 1/minute, by: user|ip}]\n")
    assert site.told(2, peer="127.0.0.1") == "AD"
    assert site.told(1, peer="127.0.0.1", user="127.0.0.1") == "A"


@pytest.mark.fault("R85")
def test_any_bytes_of_any_length_are_a_key_of_their_own(clock: ManualClock) -> None:
    limiter = Limiter("1/minute", store=store(), clock=clock)
    keys = [b"x" * 10_000, b"x" * 9_999 + b"y", b"\0", b"\n", b" ", b"", "🐌".encode(), b"\xff\xfe", b"a\0b", b"a\0c"]
    for key in keys:
        assert limiter.hit(key).allowed, key
    for key in keys:
        assert not limiter.hit(key).allowed, key


@pytest.mark.fault("R86")
def test_a_name_of_a_megabyte_takes_no_more_room_than_another(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 1/minute, by: user}]\n")
    one, other = "u" * (1 << 20), "u" * ((1 << 20) - 1) + "v"
    assert site.told(2, user=one) == "AD"
    assert site.told(1, user=other) == "A"


@pytest.mark.fault("R89")
def test_every_spelling_that_reaches_a_handler_counts_in_one_bucket(clock: ManualClock, tmp_path: Path) -> None:
    site = Site(tmp_path, clock, "policies: [{name: login, match: {path: /login}, rules: 3/minute, by: ip+path}]\n")
    spellings = ["/login", "//login", "/login/", "/%6Cogin", "/login?x=1", "/./login", "/a/../login", "/login%2F"]
    judged = [site.judged(path=path) for path in spellings]
    assert all(judgement.policy == "login" for judgement in judged)
    assert sum(bool(judgement) for judgement in judged) == 3


# ---- configuration


@pytest.mark.fault("R166")
@pytest.mark.parametrize("rules", ["sixty", "6O/min", "10/fortnight", "-5/minute", "NaN/minute", "5/", "5/minute fast"])
def test_a_misspelt_limit_stops_the_start_and_is_shown(clock: ManualClock, tmp_path: Path, rules: str) -> None:
    with pytest.raises(RuleError):
        Limiter(rules, store=store(), clock=clock)
    with pytest.raises(ConfigError) as wrong:
        Site(tmp_path, clock, f'policies: [{{name: a, rules: "{rules}"}}]\n')
    assert wrong.value.line == 1
    assert wrong.value.column > 0


@pytest.mark.fault("R166")
def test_an_empty_limit_and_an_unknown_option_stop_the_start(clock: ManualClock, tmp_path: Path) -> None:
    with pytest.raises(RuleError):
        Limiter("", store=store(), clock=clock)
    for rules in ('rules: ""', "rules:", "rules: 5/minute, limits: 3", "rule: 5/minute"):
        with pytest.raises(ConfigError):
            Site(tmp_path, clock, f"policies: [{{name: a, {rules}}}]\n")


@pytest.mark.fault("R167")
def test_a_string_where_a_list_may_stand_is_one_limit_and_a_missing_period_an_error(
    clock: ManualClock, tmp_path: Path
) -> None:
    site = Site(tmp_path, clock, "policies: [{name: a, rules: 1/second}]\n")
    assert [rule.rule for rule in site.judged().decision.rules] == ["1/second sliding_log"]
    with pytest.raises(ConfigError):
        Site(tmp_path, clock, "policies: [{name: a, rules: 5}]\n")
