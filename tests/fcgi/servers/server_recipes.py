"""The recipes: each an example, what the daemon has to offer for it, and where its server has its own mind.

A claim that all of them keep stands in test_server_recipes.py; here is only in what they differ, one line each.
"""

from __future__ import annotations

from dataclasses import dataclass

from server_stack import Apache, Caddy, Haproxy, Kind, Lighttpd, NginxKind

RELAY = "unix:{folder}/l.sock,group={group},relay-to=unix:{php},root={folder}/www"
SOCKET = "unix:{folder}/l.sock,group={group}"


@dataclass(frozen=True)
class Recipe:
    name: str
    kind: type[Kind]
    example: str
    listen: str
    php: bool = False      # a relay before php-fpm, else before an application over HTTP
    fields: bool = True    # an allowed answer carries X-RateLimit-* to the client
    early: bool = False    # a denied upload is answered before its body has come
    dead: int = 502        # without the lines marked fail-open
    hung: int = 504
    has_open: bool = True  # there are lines marked fail-open
    dead_open: int = 200
    hung_open: int = 200
    chunked: int = 200     # 411: the server cannot hand an upload without a length to the application
    slow: float = 3.0      # the longest that a hung limiter holds a request
    hangs_up: bool = False # without a word on who is waiting when the limiter begins to hang; from then on it knows
    quick: tuple[tuple[str, str], ...] = ()  # the application's time, cut for the tests of a hung limiter
    why: str = ""          # what the exceptions are

    @property
    def path(self) -> str:
        return "/page.php" if self.php else "/app/page"

    @property
    def two(self) -> str:
        return "/two.php" if self.php else "/app/two"

    @property
    def canary(self) -> str:
        return "/tidegate-canary.php" if self.php else "/app/tidegate-canary"


RECIPES = [
    Recipe("nginx auth_request", NginxKind, "nginx/nginx.conf", SOCKET, early=True, dead=500, hung=500, slow=1.0),
    Recipe("nginx X-Accel", NginxKind, "nginx/xaccel.conf", SOCKET, slow=1.0),
    Recipe("nginx relay", NginxKind, "php-fpm/nginx.conf", RELAY, php=True,
           quick=(("fastcgi_keep_conn on;", "fastcgi_keep_conn on; fastcgi_read_timeout 1s; fastcgi_send_timeout 1s;"),)),
    Recipe("Apache authorizer", Apache, "apache/authorizer.conf", "tcp:127.0.0.1:{port}", has_open=False, dead=500,
           hung=500, slow=33),
    Recipe("Apache relay", Apache, "apache/relay.conf", RELAY, php=True, dead=503, hung_open=504,
           quick=(("timeout=60", "timeout=1"),)),
    Recipe("lighttpd authorizer", Lighttpd, "lighttpd/authorizer.conf", SOCKET, fields=False, early=True,
           has_open=False, dead=503, slow=5),
    Recipe("lighttpd relay", Lighttpd, "lighttpd/relay.conf", RELAY, php=True, has_open=False, dead=503, slow=5,
           quick=(('"read-timeout" => 60', '"read-timeout" => 1'),)),
    Recipe("HAProxy relay", Haproxy, "haproxy/relay.cfg", RELAY, php=True, dead=503, hung=503, chunked=411,
           hangs_up=True, quick=(("timeout server 60s", "timeout server 1s"),)),
    Recipe("Caddy forward_auth", Caddy, "caddy/Caddyfile", SOCKET, early=True),
    Recipe("Caddy relay", Caddy, "caddy/relay.Caddyfile", RELAY, php=True, chunked=411, hung_open=504,
           quick=(("_timeout 60s", "_timeout 1s"),)),
]
