"""A log replayed through nginx and tidegate-fcgi with the log's times: each decision is the reference's.

The log is made up, with what real ones have: bursts, crawlers, several requests in one second, times that go back.
Name a real one in the combined format with TIDEGATE_ACCESS_LOG to replay that too.
"""

from __future__ import annotations

import datetime
import http.client
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from fcgi_daemon import Daemon
from fcgi_nginx import Nginx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

from model import DAY, SECOND, Rule, Table  # noqa: E402

MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
RULES = """\
trusted_proxies: [127.0.0.1/32]
store: memory://
policies:
  - name: pictures
    match: {path: ["*.png", "*.jpg", "*.gif", "*.ico"]}
    rules: 20/minute; 60/hour sliding_counter
  - name: blog
    match: {path: "/blog/*"}
    rules: 6/minute burst 10 token_bucket; 40/day fixed_window aligned
  - name: talks
    match: {path: "/presentations/*"}
    rules: 30 per 10 minutes resolution 5 seconds
  - name: rest
    rules: 12/minute burst 5 leaky_bucket; 100/day fixed_window
"""
EXPECTED = {
    "pictures": [Rule(20, MINUTE, "sliding_log"), Rule(60, HOUR, "sliding_counter")],
    "blog": [Rule(6, MINUTE, "token_bucket", burst=10), Rule(40, DAY, "fixed_window", aligned=True)],
    "talks": [Rule(30, 10 * MINUTE, "sliding_log", resolution_us=5 * SECOND)],
    "rest": [Rule(12, MINUTE, "leaky_bucket", burst=5), Rule(100, DAY, "fixed_window")],
}
LINE = re.compile(r'^(\S+) \S+ \S+ \[([^\]]+)\] "(\S+) (\S+) HTTP/[\d.]+"')

Entry = tuple[int, str, str, str]  # time in microseconds, client, method, target


def made_up_log() -> list[Entry]:
    chance = random.Random(20150517)
    clients = [f"198.18.{number // 250}.{number % 250 + 1}" for number in range(40)]
    targets = ["/", "/favicon.ico", "/images/a%20b.png", "/style.css", "/blog/tags/a%2Fb", "/blog//x?y=/p.png",
               "/blog/./post.html", "/presentations/one/two.js", "/presentations/../misc/x", "/p.jpg?size=1"]
    now_us, entries = 1_431_857_103 * SECOND, []
    while len(entries) < 2500:
        client, target = chance.choice(clients[: chance.choice([2, 5, 40])]), chance.choice(targets)
        for _ in range(chance.choice([1, 1, 2, 8, 30])):
            when_us = now_us + chance.choice([0, 0, 0, -3 * SECOND])
            entries.append((when_us, client, chance.choice(["GET"] * 9 + ["HEAD"]), target))
            now_us += chance.choice([0, 0, SECOND, 7 * SECOND])
        now_us += chance.choice([0, SECOND, 20 * SECOND, 300 * SECOND])
    return entries


def real_log(path: str) -> list[Entry]:
    entries = []
    for line in Path(path).read_text(errors="replace").splitlines():
        if found := LINE.match(line):
            client, when, method, target = found.groups()
            stamp = datetime.datetime.strptime(when, "%d/%b/%Y:%H:%M:%S %z")
            entries.append((int(stamp.timestamp()) * SECOND, client, method, target))
    return entries


def policies_of(target: str) -> list[str]:
    """Those of both readings of the path, in the file's order: with its dot and empty segments resolved, and as sent."""
    sent = [
        unquote(part.replace("%2F", "%252F").replace("%2f", "%252F"), errors="replace")
        for part in target.partition("?")[0].split("/")
    ]
    resolved: list[str] = []
    for text in sent:
        if text == "..":
            resolved[-1:] = []
        elif text not in ("", "."):
            resolved.append(text)
    met = {policy_at("/" + "/".join(resolved)), policy_at("/".join(sent).removesuffix("/"))}
    return [policy for policy in EXPECTED if policy in met]


def policy_at(path: str) -> str:
    if path.endswith((".png", ".jpg", ".gif", ".ico")):
        return "pictures"
    under = path + "/"  # "/blog/*" speaks of "/blog" too
    return "blog" if under.startswith("/blog/") else "talks" if under.startswith("/presentations/") else "rest"


def whole_seconds(us: int) -> int:
    return -(-us // SECOND)


LOGS = [pytest.param("", id="made-up")]
if "TIDEGATE_ACCESS_LOG" in os.environ:
    LOGS.append(pytest.param(os.environ["TIDEGATE_ACCESS_LOG"], id="real"))


@pytest.mark.parametrize("log", LOGS)
def test_a_log_replayed_through_nginx_gives_the_decisions_of_the_reference(
    start: Callable[..., Daemon], folder: Path, log: str
) -> None:
    entries = real_log(log) if log else made_up_log()
    daemon = start(RULES, "--manual-clock")
    nginx = Nginx(folder / "nginx", daemon.address, 9, lambda line: "# fail-open" not in line, {
        'fastcgi_param REMOTE_USER "";': 'fastcgi_param REMOTE_USER ""; fastcgi_param TIDEGATE_NOW_US $http_x_now;',
        "auth_request /_tidegate;": "auth_request /_tidegate; keepalive_requests 1000000;",
    })
    table, refused, judged = Table(), 0, 0
    try:
        connection = http.client.HTTPConnection("127.0.0.1", nginx.port, timeout=10)
        for number, (now_us, client, method, target) in enumerate(entries):
            connection.request(method, target, headers={"X-Forwarded-For": client, "X-Now": str(now_us)})
            response = connection.getresponse()
            response.read()
            if response.status == 400:  # nginx itself would not have it, and asked nobody
                continue
            judged += 1
            policies = policies_of(target)
            rules = [(rule, (policy, client)) for policy in policies for rule in EXPECTED[policy]]
            decision, _ = table.hit(rules, now_us)
            rule, _ = rules[decision.reported]
            got = {name: response.getheader(name) for name in
                   ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "Retry-After")}
            wait = max(1, whole_seconds(decision.retry_after_us or 0))
            assert (response.status != 429, got) == (decision.allowed, {
                "X-RateLimit-Limit": str(rule.limit),
                "X-RateLimit-Remaining": str(decision.remaining),
                "X-RateLimit-Reset": str(whole_seconds(decision.reset_after_us)),
                "Retry-After": None if decision.allowed else str(wait),
            }), f"entry {number}: {now_us} {client} {method} {target} ({policies})"
            refused += not decision.allowed
        connection.close()
    finally:
        nginx.stop()
    assert judged > 0.99 * len(entries)
    assert 0.02 * judged < refused < 0.9 * judged
    print(f"{judged} of {len(entries)} judged, {refused} refused")
