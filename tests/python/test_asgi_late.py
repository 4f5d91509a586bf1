"""What the dependency and the middleware leave unread until a limit asks for it: a scope's headers, and its path where no
rules file looks at it."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tidegate import Decision, Gate, Judgement, Limiter, ManualClock
from tidegate._core import asgi_enter, asgi_hit, judge_asgi

HEADERS = [
    (b"host", b"shop.example"), (b"user-agent", b"curl"), (b"x-api-key", b"key"), (b"cookie", b"session=s"),
    (b"x-forwarded-for", b"198.51.100.9"), (b"x-user", b"ada"),
]  # fmt: skip


def scope(**more: Any) -> dict[str, Any]:
    return {
        "type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "query_string": b"page=2", "headers": HEADERS,
        "client": ("192.0.2.1", 5000), "tidegate": [], **more,
    }  # fmt: skip


def limiter(by: str, rules: str = "5/minute", **more: Any) -> Limiter:
    return Limiter(rules, by=by, store=f"memory://{uuid.uuid4().hex}", clock=ManualClock(), **more)


def past_the_first() -> None:
    """Of the first requests of a process all headers are read."""
    hit = asgi_hit(limiter("ip", "1000/minute"), 1, False)
    for _ in range(64):
        hit(scope(headers=[]))


async def send(message: Any) -> None: ...


KINDS = [
    "ip", "user|ip", "method", "path", "host", "api_key", "fingerprint", "header:X-Api-Key", "cookie:session", "query:page",
    "ip+path+host+query:page+header:user-agent", "user|header:x-user|ip",
]  # fmt: skip


@pytest.mark.parametrize("trusted", [None, ["192.0.2.0/24"]])
@pytest.mark.parametrize("by", KINDS)
def test_every_kind_counts_the_same_client_as_where_all_is_read_at_once(by: str, trusted: list[str] | None) -> None:
    past_the_first()
    one = limiter(by, trusted_proxies=trusted, user_header="x-user" if trusted else None)
    got = asgi_hit(one, 1, False)(scope())
    assert isinstance(got, Decision) and got.remaining == 4
    assert judge_asgi([one], scope()).decision.remaining == 3


@pytest.mark.parametrize("by", KINDS)
def test_behind_the_middleware_every_kind_counts_the_same_client(by: str, tmp_path: Path) -> None:
    past_the_first()
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"policies:\n  - {{name: all, rules: 5/minute, by: '{by}'}}\n")
    gate = Gate(str(rules), store=f"memory://{uuid.uuid4().hex}", clock=ManualClock())
    entered = scope()
    assert asgi_enter(gate, False)(entered, send) is send
    assert entered["tidegate"][0].decision.remaining == 4
    assert gate.judge_asgi(scope()).decision.remaining == 3


RULES = "policies:\n  - {name: all, rules: 5/minute%s}\n"
ASKING = {
    "a host in match": RULES % ", match: {host: shop.example}",
    "a header in match": RULES % ", match: {header: {x-api-key: key}}",
    "a cost in a header": RULES % ", cost: {header: x-cost, max: 3}",
    "trusted proxies": "trusted_proxies: [192.0.2.0/24]\n" + RULES % "",
}


@pytest.mark.parametrize("rules", ASKING.values(), ids=ASKING.keys())
def test_a_rules_file_that_looks_at_headers_sees_them(rules: str, tmp_path: Path) -> None:
    past_the_first()
    (tmp_path / "rules.yaml").write_text(rules)
    gate = Gate(str(tmp_path / "rules.yaml"), store=f"memory://{uuid.uuid4().hex}", clock=ManualClock())
    cost = (b"x-cost", b"2")
    entered, other = (scope(headers=[*HEADERS, cost]) for _ in range(2))
    assert asgi_enter(gate, False)(entered, send) is send
    took = 2 if "cost" in rules else 1
    assert entered["tidegate"][0].decision.remaining == 5 - took
    assert gate.judge_asgi(other).decision.remaining == 5 - 2 * took


def test_a_rules_file_that_begins_to_look_at_headers_sees_those_of_the_very_next_request(tmp_path: Path) -> None:
    past_the_first()
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES % ", by: ip")
    gate = Gate(str(rules), store=f"memory://{uuid.uuid4().hex}", clock=ManualClock())
    enter = asgi_enter(gate, False)
    rules.write_text(RULES % ", by: 'header:x-api-key'")
    os.utime(rules, (time.time() - 60,) * 2)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # the file is looked at once a second, by whichever request comes by
        entered = scope()
        enter(entered, send)
        judgement: Judgement = entered["tidegate"][0]
        assert judgement.outcome == "allowed"  # never "unidentified"
        if judgement.decision.remaining == 4 and gate.generation == 2:
            break
        time.sleep(0.4)
    assert gate.generation == 2


@pytest.mark.parametrize("headers", [[5], [(b"a", "b")], [(b"a",)], [[b"a", b"b", b"c"]], [("a", b"b")]])
def test_headers_that_are_wrong_are_told_of_where_somebody_reads_them(headers: Any) -> None:
    past_the_first()
    wanting, ip = limiter("header:x-api-key", "1/minute"), limiter("ip", "1/minute")
    with pytest.raises(TypeError) as at_once:
        judge_asgi([wanting], scope(headers=headers))
    with pytest.raises(TypeError) as late:
        asgi_hit(wanting, 1, False)(scope(headers=headers))
    assert str(late.value) == str(at_once.value) and "headers" in str(late.value)
    assert judge_asgi([wanting], scope()).status == 0  # nothing has been taken
    free = asgi_hit(limiter("ip", "1000/minute"), 1, False)
    for _ in range(200):  # some of them are looked at without need
        assert isinstance(free(scope(headers=headers)), Decision)
    assert isinstance(asgi_hit(ip, 1, False)(scope(headers=headers)), Decision)


@pytest.mark.parametrize("headers", [5, "host", iter([(b"a", b"b")]), {b"a": b"b"}])
def test_headers_that_are_no_list_are_told_of_at_once(headers: Any) -> None:
    past_the_first()
    with pytest.raises(TypeError, match="headers"):
        asgi_hit(limiter("ip"), 1, False)(scope(headers=headers))


@pytest.mark.parametrize("wrong", [{"raw_path": "/x"}, {"query_string": 5}, {"raw_path": None, "path": b"/x"}])
def test_a_path_that_is_wrong_is_told_of_where_somebody_reads_it(wrong: dict[str, Any]) -> None:
    by_path = limiter("ip+path", "1/minute")
    with pytest.raises(TypeError) as at_once:
        judge_asgi([by_path], scope(**wrong))
    with pytest.raises(TypeError) as late:
        asgi_hit(by_path, 1, False)(scope(**wrong))
    assert str(late.value) == str(at_once.value)
    assert isinstance(asgi_hit(limiter("ip"), 1, False)(scope(**wrong)), Decision)


def test_a_scope_with_keys_that_empty_it_while_they_are_compared_does_no_harm() -> None:
    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            hostile.clear()
            return str.__eq__(self, other)

    for name in ("raw_path", "query_string", "path", "headers", "method", "client"):
        hostile: dict[Any, Any] = scope()
        value = hostile.pop(name)
        hostile[Key(name)] = value
        state = hostile["tidegate"]
        got = asgi_hit(limiter("path+header:x-api-key|method"), 1, False)(hostile)
        assert isinstance(got, Decision) == (len(state) == 1)


def test_a_preflight_is_free_though_no_limit_asks_for_headers() -> None:
    past_the_first()
    asks = [(b"origin", b"https://shop.example"), (b"access-control-request-method", b"POST")]
    one = limiter("ip", "1/minute")
    hit = asgi_hit(one, 1, False)
    for _ in range(3):
        assert isinstance(hit(scope(method="OPTIONS", headers=asks)), Decision)
    assert isinstance(hit(scope(method="OPTIONS")), Decision)  # no preflight: it counts
    assert isinstance(hit(scope(method="OPTIONS")), Judgement)


def run_python(program: str, environment: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forwarding_header_of_an_unnamed_proxy_is_found_among_later_requests_too() -> None:
    said = run_python("""
import logging, tidegate
from tidegate._core import asgi_hit
codes = []
class Keeping(logging.Handler):
    def emit(self, record): codes.append(record.getMessage().split(":")[0])
logging.getLogger("tidegate").addHandler(Keeping())
hit = asgi_hit(tidegate.Limiter("100000/minute", store="memory://x", by="ip"), 1, False)
def ask(*headers):
    hit({"type": "http", "client": ("10.0.0.1", 5), "headers": list(headers), "tidegate": []})
for _ in range(200): ask()
asked = 0
while not codes and asked < 1000:
    ask((b"x-forwarded-for", b"192.0.2.9"))
    asked += 1
print(codes, asked <= 64)
""")
    assert said == "['forwarded-from-untrusted'] True\n"
