"""tidegate.client, tidegate.httpx and tidegate.requests: places are waited for, and what servers say is kept to."""

from __future__ import annotations

import asyncio
import email.utils
import http.server
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests
from tidegate import Limiter, ManualClock
from tidegate.client import WaitTimeout, limited, told_wait
from tidegate.httpx import AsyncRateLimitTransport, RateLimitTimeout, RateLimitTransport
from tidegate.requests import RateLimitAdapter
from tidegate.requests import RateLimitTimeout as RequestsTimeout

numbers = itertools.count()


def limiter(rules: str = "20/second burst 1 leaky_bucket", **settings: Any) -> Limiter:
    return Limiter(rules, store=f"memory://client-{next(numbers)}", **settings)


# ---- decorator and context manager ----


def test_a_decorated_function_waits_for_its_place_and_gives_what_it_gave() -> None:
    @limited(limiter())
    def ask(word: str) -> str:
        """Asks."""
        return word

    begun = time.monotonic()
    assert [ask(word) for word in "abcd"] == ["a", "b", "c", "d"]
    assert time.monotonic() - begun >= 0.149  # three waits of 50 ms
    assert (ask.__name__, ask.__doc__) == ("ask", "Asks.")


def test_an_async_function_waits_without_holding_the_loop() -> None:
    @limited(limiter())
    async def ask(word: str) -> str:
        return word

    async def main() -> int:
        turns, done = 0, asyncio.gather(*(ask(word) for word in "abcd"))
        while not done.done():
            await asyncio.sleep(0.002)
            turns += 1
        assert await done == ["a", "b", "c", "d"]
        return turns

    begun = time.monotonic()
    assert asyncio.run(main()) > 10
    assert time.monotonic() - begun >= 0.149


def test_a_block_waits_and_knows_its_decision() -> None:
    one = limiter("2/minute")
    with limited(one, "searches", cost=2) as decision:
        assert decision.remaining == 0

    async def main() -> None:
        with pytest.raises(WaitTimeout):
            async with limited(one, "searches", timeout=0.01):
                raise AssertionError("entered")

    asyncio.run(main())
    with limited(one, "others", timeout=0):
        pass


def test_the_time_that_runs_out_says_how_long_it_would_have_been_and_takes_nothing() -> None:
    one = limiter("1/minute", clock=ManualClock())
    one.hit("client")
    with pytest.raises(WaitTimeout, match=r"no place within 0.01 s, which would have come after 60.000 s") as told:
        limited(one, timeout=0.01)(lambda: None)()
    assert told.value.decision is not None and told.value.decision.retry_after == 60
    assert isinstance(told.value, TimeoutError)
    with pytest.raises(WaitTimeout, match="no wait brings about"):
        limited(limiter("deny"))(lambda: None)()


def test_key_tells_from_the_arguments_who_is_counted() -> None:
    one = limiter("1/minute")

    @limited(one, key=lambda host, path="/": host, timeout=0)
    def ask(host: str, path: str = "/") -> str:
        return host + path

    assert [ask("a"), ask("b", path="/x")] == ["a/", "b/x"]
    with pytest.raises(WaitTimeout):
        ask("a", "/other")


def test_what_an_exception_of_refund_on_took_is_given_back_and_what_another_took_is_not() -> None:
    one = limiter("3/minute")
    kept = limited(one, refund_on=ConnectionError)

    @kept
    def ask(error: type[Exception]) -> None:
        raise error

    @kept
    async def ask_async(error: type[Exception]) -> None:
        raise error

    def block(error: type[Exception]) -> None:
        with kept:
            raise error

    for call in (ask, block, lambda error: asyncio.run(ask_async(error))):
        for _ in range(4):
            with pytest.raises(ConnectionRefusedError):
                call(ConnectionRefusedError)
    assert one.peek("client").remaining == 3
    with pytest.raises(ValueError):
        ask(ValueError)
    assert one.peek("client").remaining == 2


def test_who_is_cancelled_while_waiting_gives_the_place_back() -> None:
    one = limiter("1/second burst 1 leaky_bucket")

    async def main() -> None:
        await one.wait_async("client")

        @limited(one)
        async def ask() -> None: ...

        task = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        begun = time.monotonic()
        await one.wait_async("client")
        assert time.monotonic() - begun < 1.5  # one place ahead, not two

    asyncio.run(main())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: limited("5/minute"), TypeError, "waits for a Limiter, not for str"),  # type: ignore[arg-type]
        (lambda: limited(limiter(), timeout=-1), ValueError, "0 or more"),
        (lambda: limited(limiter(), "a", key=lambda: "b"), TypeError, "given twice"),
        (lambda: limited(limiter(), cost=-1), ValueError, "cost must be from 0"),
        (lambda: limited(limiter())("text"), TypeError, "decorates a function"),  # type: ignore[type-var]
        (lambda: RateLimitTransport(None), ValueError, "nothing to keep to"),
        (lambda: RateLimitTransport(limiter(), retries=1), ValueError, "obey_server=True"),
        (lambda: RateLimitAdapter(limiter(), obey_server=True, retries=-1), ValueError, "retries must be 0"),
        (lambda: AsyncRateLimitTransport("10/s"), TypeError, "must be a Limiter or None"),  # type: ignore[arg-type]
        (lambda: RateLimitAdapter(limiter(), obey_server=True, longest=0), ValueError, "longest"),
    ],
)
def test_what_is_wrong_raises_where_it_is_written(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


# ---- what servers say ----


@pytest.mark.parametrize(
    ("status", "fields", "wait"),
    [
        (429, {"retry-after": "7"}, 7),
        (503, {"retry-after": " 7 "}, 7),
        (200, {"retry-after": "7"}, 0),
        (429, {}, 0),
        (429, {"retry-after": "soon"}, 0),
        (429, {"retry-after": "-5"}, 0),
        (429, {"retry-after": "9" * 400}, 0),
        (200, {"ratelimit": '"a";r=0;t=12'}, 12),
        (200, {"ratelimit": '"a";r=5;t=12, "b";r=0;t=3'}, 3),
        (200, {"ratelimit": '"a";r=5;t=12'}, 0),
        (200, {"ratelimit": '"a;r=0";t=x'}, 0),
        (200, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "9"}, 9),
        (200, {"x-ratelimit-remaining": "3", "x-ratelimit-reset": "9"}, 0),
        (200, {"x-ratelimit-remaining": "0"}, 0),
        (429, {"retry-after": "2", "ratelimit": '"a";r=0;t=12'}, 12),
    ],
)
def test_the_longest_wait_that_a_server_tells_is_read(status: int, fields: dict[str, str], wait: float) -> None:
    assert told_wait(status, fields) == wait


def test_dates_and_epochs_are_waits_from_now_and_past_ones_none() -> None:
    now = time.time()
    assert told_wait(429, {"retry-after": email.utils.formatdate(now + 30, usegmt=True)}) == pytest.approx(30, abs=2)
    assert told_wait(429, {"retry-after": email.utils.formatdate(now - 30, usegmt=True)}) == 0
    reset = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(now) + 30)}
    assert told_wait(200, reset) == pytest.approx(30, abs=2)


class Site:
    """A real server: counts what arrives, and refuses the first `refusals` requests with Retry-After: 1."""

    def __init__(self) -> None:
        self.arrived: list[tuple[float, str, bytes]] = []
        self.refusals = 0
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                chunked = self.headers.get("Transfer-Encoding") == "chunked"
                body = b""
                while chunked and (size := int(self.rfile.readline(), 16)):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                if chunked:
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                site.arrived.append((time.monotonic(), self.path, body))
                refused = site.refusals > 0
                site.refusals -= refused
                self.send_response(429 if refused else 200)
                if refused:
                    self.send_header("Retry-After", "1")
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"done")

            do_GET = do_POST

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.host = self.url.removeprefix("http://")
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def gaps(self) -> list[float]:
        times = [at for at, _, _ in self.arrived]
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.server.shutdown()
    made.server.server_close()


Ask = Callable[..., int]


def httpx_sync(one: Limiter | None, **options: Any) -> Callable[..., Any]:
    client = httpx.Client(transport=RateLimitTransport(one, **options), timeout=20)
    return lambda url, body=None: client.post(url, content=body).status_code


def httpx_async(one: Limiter | None, **options: Any) -> Callable[..., Any]:
    transport: list[AsyncRateLimitTransport] = [AsyncRateLimitTransport(one, **options)]

    def ask(url: str, body: Any = None) -> int:
        async def main() -> int:
            # A connection pool is one loop's; the pace is kept.
            transport[0].transport = httpx.AsyncHTTPTransport()
            async with httpx.AsyncClient(transport=transport[0], timeout=20) as client:
                content = body if body is None or isinstance(body, bytes) else streamed(body)
                return (await client.post(url, content=content)).status_code

        return asyncio.run(main())

    async def streamed(pieces: Any) -> Any:
        for piece in pieces:
            yield piece

    return ask


def with_requests(one: Limiter | None, **options: Any) -> Callable[..., Any]:
    session = requests.Session()
    session.mount("http://", RateLimitAdapter(one, **options))
    return lambda url, body=None: session.post(url, data=body, timeout=20).status_code


CLIENTS = {"httpx": httpx_sync, "httpx async": httpx_async, "requests": with_requests}


@pytest.fixture(params=list(CLIENTS))
def client(request: pytest.FixtureRequest) -> Callable[..., Callable[..., Any]]:
    return CLIENTS[request.param]


def test_requests_leave_at_the_rate_of_the_limiter_one_count_for_each_host(
    client: Callable[..., Any], site: Site
) -> None:
    one = limiter("10/second burst 1 leaky_bucket")
    ask = client(one)
    begun = time.monotonic()
    assert [ask(site.url) for _ in range(4)] == [200] * 4
    assert site.arrived[-1][0] - begun >= 0.3
    assert one.peek(site.host).limit == 10
    assert one.peek("elsewhere.test").remaining == 1


def test_where_no_place_comes_up_in_time_nothing_is_sent_and_it_is_a_timeout_of_the_library(
    client: Callable[..., Any], site: Site
) -> None:
    ask = client(limiter("1/hour"), timeout=0.05)
    assert ask(site.url) == 200
    with pytest.raises((RateLimitTimeout, RequestsTimeout), match="no place within 0.05 s") as told:
        ask(site.url)
    assert isinstance(told.value, (httpx.TimeoutException, requests.exceptions.Timeout)) and isinstance(told.value, WaitTimeout)
    assert told.value.decision.retry_after > 3000  # type: ignore[union-attr]
    assert len(site.arrived) == 1


def test_a_host_that_says_when_is_left_alone_until_then_and_asked_again_with_the_same_body(
    client: Callable[..., Any], site: Site
) -> None:
    site.refusals = 1
    ask = client(None, obey_server=True, retries=2)
    assert ask(site.url, b"body") == 200
    assert [body for _, _, body in site.arrived] == [b"body", b"body"]
    assert site.gaps()[0] >= 0.99


def test_a_body_that_was_a_stream_is_not_sent_twice_and_the_next_request_waits(
    client: Callable[..., Any], site: Site
) -> None:
    site.refusals = 1
    ask = client(None, obey_server=True, retries=2)
    assert ask(site.url, iter([b"one", b"two"])) == 429
    assert ask(site.url) == 200
    assert site.gaps()[0] >= 0.99
    assert site.arrived[0][2] == b"onetwo"


def test_a_server_that_wants_more_than_is_left_of_the_time_is_a_timeout_and_nobody_waits_longer_than_longest(
    client: Callable[..., Any], site: Site
) -> None:
    site.refusals = 1
    ask = client(None, obey_server=True, timeout=0.05)
    assert ask(site.url) == 429
    with pytest.raises((RateLimitTimeout, RequestsTimeout), match="wants to be asked again in"):
        ask(site.url)
    site.refusals = 1
    ask = client(None, obey_server=True, longest=0.1, retries=1)
    assert ask(site.url) == 200
    assert 0.09 <= site.gaps()[-1] < 0.9


def test_without_being_asked_nobody_keeps_to_the_server(client: Callable[..., Any], site: Site) -> None:
    site.refusals = 1
    ask = client(limiter("100/second"))
    assert [ask(site.url), ask(site.url)] == [429, 200]
    assert site.gaps()[0] < 0.9


def test_a_key_of_ones_own_counts_what_it_says(client: Callable[..., Any], site: Site) -> None:
    one = limiter("9/minute")
    ask = client(one, key=lambda request: "everything", cost=2)
    ask(site.url + "/a")
    ask(site.url + "/b")
    assert one.peek("everything").remaining == 5


def test_many_hosts_that_want_to_be_left_alone_take_a_bounded_place() -> None:
    from tidegate.client import Pace

    pace = Pace(None, 1, 0.0, True, 3600.0, 0)
    for number in range(5000):
        pace.learn(f"host-{number}", 429, {"retry-after": "600"}, 0)
    assert len(pace._holds) <= 1024
