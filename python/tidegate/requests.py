"""An adapter for requests that keeps to a limit, and to what the server says if asked.

    session = requests.Session()
    session.mount("https://api.example.com", RateLimitAdapter(Limiter("10/second leaky_bucket", name="api")))

See docs/client.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

from tidegate._core import Limiter
from tidegate.client import Pace, Part, WaitTimeout

__all__ = ["RateLimitAdapter", "RateLimitTimeout"]

KeyOf = Callable[[requests.PreparedRequest], Part]


class RateLimitTimeout(WaitTimeout, requests.exceptions.Timeout):
    """No place came up in time, and nothing was sent: for requests, a timeout as any other."""

    def __init__(self, waited: WaitTimeout, request: requests.PreparedRequest) -> None:
        requests.exceptions.Timeout.__init__(self, str(waited), request=request)
        self.decision = waited.decision


def host_of(request: requests.PreparedRequest) -> str:
    return urlsplit(request.url or "").netloc.rpartition("@")[2]


class RateLimitAdapter(HTTPAdapter):
    """Waits for a place before each request is sent. The arguments are those of tidegate.httpx.RateLimitTransport; the
    others are HTTPAdapter's: pool_connections, max_retries, ..."""

    def __init__(
        self,
        limiter: Limiter | None,
        *,
        key: KeyOf = host_of,
        cost: int = 1,
        timeout: float | None = None,
        obey_server: bool = False,
        longest: float = 3600.0,
        retries: int = 0,
        **adapter: Any,
    ) -> None:
        self.pace = Pace(limiter, cost, timeout, obey_server, longest, retries)
        self.key = key
        super().__init__(**adapter)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **named: Any) -> requests.Response:
        host, attempt = host_of(request), 0
        while True:
            try:
                self.pace.wait(host, self.key(request))
            except WaitTimeout as waited:
                raise RateLimitTimeout(waited, request) from None
            response = super().send(request, *arguments, **named)
            if not self.pace.learn(host, response.status_code, response.headers, attempt):
                return response
            if not (request.body is None or isinstance(request.body, (bytes, str))):
                return response  # a body that was a stream has gone with the first attempt
            response.close()
            attempt += 1
