"""A transport for httpx that keeps to a limit, and to what the server says if asked.

    client = httpx.Client(transport=RateLimitTransport(Limiter("10/second leaky_bucket", name="api")))
    client = httpx.AsyncClient(transport=AsyncRateLimitTransport(limiter, obey_server=True, retries=2))

See docs/client.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import httpx

from tidegate._core import Limiter
from tidegate.client import Pace, Part, WaitTimeout

__all__ = ["AsyncRateLimitTransport", "RateLimitTimeout", "RateLimitTransport"]

KeyOf = Callable[[httpx.Request], Part]


class RateLimitTimeout(WaitTimeout, httpx.TimeoutException):
    """No place came up in time, and nothing was sent: for httpx, a timeout as any other."""

    def __init__(self, waited: WaitTimeout, request: httpx.Request) -> None:
        httpx.TimeoutException.__init__(self, str(waited), request=request)
        self.decision = waited.decision


def host_of(request: httpx.Request) -> str:
    return request.url.netloc.decode("ascii", "replace")


def _fields(response: httpx.Response) -> Mapping[str, str]:
    return response.headers


def _can_be_sent_again(request: httpx.Request) -> bool:
    """A body that was a stream has gone with the first attempt."""
    return isinstance(request.stream, httpx.ByteStream)


class RateLimitTransport(httpx.BaseTransport):
    """Waits for a place before each request is sent.

    limiter      whose places; one store for several processes, one count. None: only what the server says
    transport    what sends; httpx.HTTPTransport() by default
    key          callable(request) -> who is counted; by default the host and port that is asked
    cost         units that a request takes
    timeout      seconds to wait at most, None: as long as it takes; RateLimitTimeout then, and nothing is sent or taken
    obey_server  leave a host alone for as long as Retry-After, RateLimit or X-RateLimit-* fields say, at most `longest`
                 seconds
    retries      how often a request is sent again that was answered 429 or 503 with such a wait
    """

    def __init__(
        self,
        limiter: Limiter | None,
        transport: httpx.BaseTransport | None = None,
        *,
        key: KeyOf = host_of,
        cost: int = 1,
        timeout: float | None = None,
        obey_server: bool = False,
        longest: float = 3600.0,
        retries: int = 0,
    ) -> None:
        self.pace = Pace(limiter, cost, timeout, obey_server, longest, retries)
        self.key = key
        self.transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Sends the request when its turn has come, and again where `retries` says so."""
        host, attempt = host_of(request), 0
        while True:
            try:
                self.pace.wait(host, self.key(request))
            except WaitTimeout as waited:
                raise RateLimitTimeout(waited, request) from None
            response = self.transport.handle_request(request)
            if not self.pace.learn(host, response.status_code, _fields(response), attempt):
                return response
            if not _can_be_sent_again(request):
                return response
            response.close()
            attempt += 1

    def close(self) -> None:
        """Closes the transport below."""
        self.transport.close()

    def __enter__(self) -> Self:
        self.transport.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.transport.__exit__(exc_type, exc_value, traceback)


class AsyncRateLimitTransport(httpx.AsyncBaseTransport):
    """The same for httpx.AsyncClient under asyncio; arguments as of RateLimitTransport."""

    def __init__(
        self,
        limiter: Limiter | None,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        key: KeyOf = host_of,
        cost: int = 1,
        timeout: float | None = None,
        obey_server: bool = False,
        longest: float = 3600.0,
        retries: int = 0,
    ) -> None:
        self.pace = Pace(limiter, cost, timeout, obey_server, longest, retries)
        self.key = key
        self.transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends the request when its turn has come, and again where `retries` says so."""
        host, attempt = host_of(request), 0
        while True:
            try:
                await self.pace.wait_async(host, self.key(request))
            except WaitTimeout as waited:
                raise RateLimitTimeout(waited, request) from None
            response = await self.transport.handle_async_request(request)
            if not self.pace.learn(host, response.status_code, _fields(response), attempt):
                return response
            if not _can_be_sent_again(request):
                return response
            await response.aclose()
            attempt += 1

    async def aclose(self) -> None:
        """Closes the transport below."""
        await self.transport.aclose()

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.transport.__aexit__(exc_type, exc_value, traceback)
