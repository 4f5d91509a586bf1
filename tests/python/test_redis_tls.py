"""rediss://: a real server that speaks nothing but TLS. Who is believed, who has to be let in, and that a deadline covers it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop

from tidegate import ConfigError, Limiter

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "reference"), str(TESTS / "redis")]
import traces
from cluster import Cluster
from server import Lateness, Server, free_port, server
from test_traces import compare, run_program
from tls import Certificates, tls_server

ROOT = TESTS.parent


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


class Secured:
    def __init__(self, certificates: Certificates, clients: str) -> None:
        self.certificates = certificates
        self.redis, self.port = tls_server(certificates, clients=clients)

    def uri(self, host: str = "127.0.0.1", **options: object) -> str:
        words = {"timeout_ms": 2000, "ca": self.certificates.path("ca.crt"), **options}
        return f"rediss://{host}:{self.port}?" + "&".join(f"{name}={text}" for name, text in words.items() if text is not None)


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[Secured]:
    one = Secured(certificates, "no")
    yield one
    one.redis.close()


def test_a_server_whose_certificate_is_good_counts_as_any_other(secured: Secured) -> None:
    one = Limiter("3/minute", name="good", store=secured.uri())
    assert [one.hit("a").remaining for _ in range(4)] == [2, 1, 0, 0]
    assert not one.hit("a").degraded
    assert Limiter("3/minute", name="good", store=secured.uri("localhost")).peek("a").remaining == 0
    name = f"redis.test&db=0&ca={secured.certificates.folder}"  # a folder without hashed names holds nobody's certificate
    with pytest.raises(ConfigError, match="not accepted"):
        Limiter("3/minute", name="good", store=secured.uri(ca=None, name=name))


def test_vectors_hold_over_tls(secured: Secured, build: Path, make: Callable[..., None]) -> None:
    make(str(build / "tests" / "replay"))
    compare([(case, traces.answers(case)) for case in traces.vector_cases()],
            run_program(build / "tests" / "replay", secured.uri()))  # fmt: skip


def test_nobody_is_believed_whom_no_authority_vouches_for(secured: Secured) -> None:
    for options in ({"ca": None}, {"ca": secured.certificates.path("stranger.crt")}):
        with pytest.raises(ConfigError, match="certificate is not accepted"):
            Limiter("3/minute", name="x", store=secured.uri(**options))
    with pytest.raises(ConfigError, match="mismatch"):
        Limiter("3/minute", name="x", store=secured.uri(name="other.test"))
    assert not Limiter("3/minute", name="x", store=secured.uri(name="redis.test")).hit("a").degraded
    assert not Limiter("3/minute", name="x", store=secured.uri(ca=None, verify="no")).hit("a").degraded
    with pytest.raises(ConfigError, match="expected yes or no"):
        Limiter("3/minute", name="x", store=secured.uri(verify="perhaps"))


def test_a_sentinel_that_is_not_believed_and_a_server_that_is_none_are_errors_when_opened(secured: Secured) -> None:
    def uri(**options: object) -> str:
        return secured.uri(**options).replace("rediss://", "rediss+sentinel://").replace("?", "/site?")

    with pytest.raises(ConfigError, match="certificate is not accepted"):
        Limiter("3/minute", name="x", store=uri(ca=None))
    with pytest.raises(ConfigError, match="is no sentinel"):
        Limiter("3/minute", name="x", store=uri())


def test_a_server_that_asks_for_a_certificate_is_shown_ours(certificates: Certificates) -> None:
    one = Secured(certificates, "yes")
    try:
        with pytest.raises(ConfigError, match="the server refuses.*cert="):
            Limiter("3/minute", name="x", store=one.uri())
        store = one.uri() + "&" + certificates.client_options
        assert Limiter("3/minute", name="x", store=store).hit("a").remaining == 2
        with pytest.raises(ConfigError, match="key= is missing"):
            Limiter("3/minute", name="x", store=one.uri(cert=certificates.path("client.crt")))
    finally:
        one.redis.close()


def test_files_that_are_not_what_they_should_be_are_named(secured: Secured, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate\n")
    locked = tmp_path / "locked.key"
    subprocess.run(["openssl", "ec", "-in", secured.certificates.path("client.key"), "-aes128", "-passout", "pass:secret",
                    "-out", locked], check=True, capture_output=True)  # fmt: skip
    certificate = secured.certificates.path("client.crt")
    for options, named in (
        ({"ca": junk}, "junk.pem"),
        ({"ca": tmp_path / "none.pem"}, "none.pem"),
        ({"cert": junk, "key": junk}, "junk.pem"),
        ({"cert": certificate, "key": secured.certificates.path("server.key")}, "server.key"),
        ({"cert": certificate, "key": locked}, "without a password"),
    ):
        with pytest.raises(ConfigError, match=named):
            Limiter("3/minute", name="x", store=secured.uri(**options))
    with pytest.raises(ConfigError, match="expected db, connections or timeout_ms"):
        Limiter("3/minute", name="x", store=f"redis://127.0.0.1:{secured.port}?ca={junk}")


def test_a_decision_larger_than_a_record_arrives_whole(secured: Secured) -> None:
    rules = ";".join(f"1000/{seconds}s token_bucket" for seconds in range(100, 104))
    one = Limiter(rules, name="n" * 60, store=secured.uri())
    dims = {f"header:{'h' * 40}-{i}": "v" * 60 for i in range(8)}
    assert [one.hit(dims=dims).remaining for _ in range(3)] == [999, 998, 997]


def test_many_threads_and_forked_children_share_the_count(secured: Secured) -> None:
    one = Limiter("100000/hour fixed_window", name="many", store=secured.uri(connections=6))
    one.hit("a")
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(sum(one.hit("a").degraded for _ in range(40)))
        children.append(child)
    with ThreadPoolExecutor(20) as pool:
        assert not any(decision.degraded for decision in pool.map(lambda _: one.hit("a"), range(400)))
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert one.peek("a").remaining == 100000 - 1 - 3 * 40 - 400


def test_idle_connections_are_used_again_and_closed_ones_replaced_in_silence(secured: Secured) -> None:
    one = Limiter("100/hour", name="idle", store=secured.uri(connections=1))
    before = int(info(secured.redis, "total_connections_received"))
    for _ in range(3):
        assert not one.hit("a").degraded
        time.sleep(0.01)  # long enough to be looked at: tickets for later sessions are no reason to close it
    assert int(info(secured.redis, "total_connections_received")) - before == 1, "the one that asks; ours was there when it was opened"
    secured.redis("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    time.sleep(0.01)
    assert not one.hit("a").degraded


def info(redis: Server, name: str) -> str:
    said = redis("INFO", "stats")
    assert isinstance(said, bytes)
    return next(line.split(":")[1] for line in said.decode().splitlines() if line.startswith(name + ":"))


def test_a_killed_server_is_found_again_and_no_call_is_late(certificates: Certificates) -> None:
    secured = Secured(certificates, "no")
    try:
        one = Limiter("100/hour", name="x", store=secured.uri(timeout_ms=50))
        while one.hit("warm").degraded:
            pass
        with Lateness() as late:
            for way in ("kill", "stop"):
                if way == "kill":
                    secured.redis.kill()
                else:
                    secured.redis.signal(signal.SIGSTOP)
                for _ in range(10):
                    began = time.monotonic()
                    assert one.hit("a").degraded
                    assert late.allows(time.monotonic() - began, 0.06)
                if way == "kill":
                    secured.redis.start()
                else:
                    secured.redis.signal(signal.SIGCONT)
                began = time.monotonic()
                while one.hit("a").degraded:
                    assert late.allows(time.monotonic() - began, 2), "recovery within 2 s"
                    time.sleep(0.01)
    finally:
        secured.redis.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_tasks_share_one_secured_connection(certificates: Certificates, run: Callable[..., None]) -> None:
    secured = Secured(certificates, "no")
    one = Limiter("700/hour", name="tasks", store=secured.uri())

    async def main() -> None:
        for _ in range(2):  # a thousand calls fill more than one record each way
            decisions = await asyncio.gather(*[one.hit_async("a") for _ in range(1000)])
            assert not any(decision.degraded for decision in decisions)
        assert (await one.peek_async("a")).remaining == 0
        assert sum(bool(decision) for decision in decisions) == 0
        before = int(info(secured.redis, "total_connections_received"))
        secured.redis.kill()
        assert (await one.hit_async("b")).degraded
        secured.redis.start()
        began = time.monotonic()
        while (await one.hit_async("b")).degraded:
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.02)
        assert before < 20

    try:
        run(main())
    finally:
        secured.redis.close()


def test_a_task_hears_what_is_wrong_with_a_certificate_as_a_store_that_fails(
    secured: Secured, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    one = Secured(certificates, "no")
    limiter = Limiter("700/hour", name="x", store=one.uri())
    one.redis.kill()
    one.redis.options = tuple("yes" if word == "no" else word for word in one.redis.options)  # now it wants to see ours
    one.redis.start()

    async def main() -> None:
        for _ in range(3):
            assert (await limiter.hit_async("a")).degraded

    try:
        asyncio.run(main())
    finally:
        one.redis.close()
    assert "the server refuses" in caplog.text


@pytest.mark.fault("R137")
def test_a_redis_without_tls_is_told_of_as_such_by_opening_check_and_explain(
    secured: Secured, tmp_path: Path, build: Path, make: Callable[..., None]
) -> None:
    make("programs")
    program = build / "bin" / "tidegate"
    with server(port=free_port()) as plain:
        store = f"rediss://127.0.0.1:{plain.port}?timeout_ms=1000"  # of which a fifth is for asking in the clear
        told = f"redis at 127.0.0.1:{plain.port}: TLS: the server there does not speak TLS (redis:// is without)"
        plain("CONFIG", "SET", "requirepass", "hunter2")  # whoever may not ask is answered too
        with Lateness() as late:
            began = time.monotonic()
            with pytest.raises(ConfigError) as refused:
                Limiter("3/minute", name="x", store=store)
            assert late.allows(time.monotonic() - began, 1 + 0.01)
        assert str(refused.value) == told
        (tmp_path / "rules.yaml").write_text("policies:\n  - {name: a, rules: 3/minute}\n")
        for command in (["check", "rules.yaml", "--live"], ["explain", "--config", "rules.yaml", "--request", "/"]):
            done = subprocess.run([program, *command, "--store", store], cwd=tmp_path, capture_output=True, text=True, timeout=30,
                                  check=False)  # fmt: skip
            assert done.returncode == 1 and told in done.stderr
    assert Limiter("3/minute", name="x", store=f"redis://127.0.0.1:{secured.port}").hit("a").degraded


@pytest.mark.fault("R137")
def test_a_peer_that_says_nothing_costs_opening_a_quarter_of_a_second_and_a_hit_its_deadline(secured: Secured) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for scheme in ("rediss", "redis"):
            with Lateness() as late:
                began = time.monotonic()
                one = Limiter("3/minute", name="x", store=f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
                took = time.monotonic() - began
                assert late.allows(took, 0.25 + 0.01), took
                for _ in range(5):
                    began = time.monotonic()
                    assert one.hit("a").degraded
                    assert late.allows(time.monotonic() - began, 0.06)
    secured.redis.signal(signal.SIGSTOP)
    try:  # slow, but it does speak TLS: that is no mistake in the URI
        Limiter("3/minute", name="x", store=f"rediss://127.0.0.1:{secured.port}?verify=no")
    finally:
        secured.redis.signal(signal.SIGCONT)


def test_a_cluster_is_reached_over_tls_at_every_node(certificates: Certificates) -> None:
    some = Cluster(3, tls=certificates.options())
    try:
        one = Limiter("3/minute", name="x", store=f"{some.tls_uri}?timeout_ms=2000&ca={certificates.path('ca.crt')}")
        for who in range(60):
            assert [one.hit(f"u{who}").remaining for _ in range(2)] == [2, 1]
        assert len(some.keys()) == 60
        assert all(node.keys() for node in some.primaries)
    finally:
        some.close()


def test_a_build_without_openssl_says_so_when_it_is_opened(tmp_path: Path) -> None:
    flags = subprocess.check_output(["pkg-config", "--cflags", "hiredis"], text=True).split()
    sources = ["tests/redis/peer_without_tls.c", "csrc/base/error.c", "csrc/base/text.c"]
    subprocess.run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-Icsrc", "-Icsrc/include", *flags, *sources, "-o",
                    tmp_path / "without"], cwd=ROOT, check=True)  # fmt: skip
    said = subprocess.check_output([tmp_path / "without"], text=True)
    assert said.startswith("1 rediss:// needs TLS, which this build was made without")
