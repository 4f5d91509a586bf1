"""The extension as an extension: references, memory, interpreters, build. What it decides is held elsewhere."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable

import pytest

import tidegate
from tidegate import Decision, Gate, Judgement, Limiter, ManualClock, RuleError, RuleResult, _core

HERE = str(pathlib.Path(__file__).resolve().parent)

SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/a%b",
    "client": ("192.0.2.1", 50000),
    "headers": [(b"host", b"example.com"), (b"x-forwarded-for", b"192.0.2.9")],
}


def limiter(rules: str = "5/minute", **options: object) -> Limiter:
    return Limiter(rules, store="memory://test", clock=ManualClock(), **options)  # type: ignore[arg-type]


def resident_bytes() -> int:
    """Of its own: pages of files come and go as the machine has room for them."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1]) * 1024


def in_a_process_of_its_own(measure: Callable[..., int], *arguments: object) -> int:
    """What it returns there. In this one allocators keep what other tests have left, and give it back when they please."""
    program = f"import sys; sys.path[:0] = [{HERE!r}]; import {__name__} as tests; print(tests.{measure.__name__}(*sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def every_call(one: Limiter) -> None:
    """Each way through the extension once, the failing ones too."""
    decision = one.hit("192.0.2.1")
    one.hit("a\ud800", "é" * 3, b"b", cost=2)
    one.peek(dims={"ip": "192.0.2.1", "user+ip": ("a", "192.0.2.1")})
    repr(decision), decision.rules, decision.rule, decision.retry_after, decision.reset_after_us
    decision.refund()
    one.refund("a")
    one.reset("a")
    one.hit_async("a")
    for wrong in (
        lambda: one.hit(5),  # type: ignore[arg-type]
        lambda: one.hit("a", cost=-1),
        lambda: one.hit("a", cost="1"),  # type: ignore[arg-type]
        lambda: one.hit(dims={"ip": "no address"}),
        lambda: one.hit(dims={"ip+user": ("a\ud800", 5)}),  # type: ignore[dict-item]
        lambda: one.hit("a\ud800", None),  # type: ignore[arg-type]
        lambda: Limiter("5/fortnight"),
        lambda: Limiter("5/minute", store="nonsense"),
        lambda: Limiter("5/minute", by=["ip", "ipp"], store="memory://x"),
        lambda: Limiter(policy="x", config="/nonexistent"),
        lambda: Gate("/nonexistent"),
        lambda: _core.judge_asgi([one], {"type": "http", "headers": [(b"a", "b")]}),
    ):
        try:
            wrong()
        except (TypeError, ValueError, tidegate.Error):
            pass
        else:
            raise AssertionError("nothing was wrong")


def every_judgement(one: Limiter) -> None:
    first = _core.judge_asgi([one], SCOPE, route="/a", user="u", cost=1)
    second = _core.judge_wsgi(
        (one,),
        {"REQUEST_METHOD": "GET", "PATH_INFO": "/\xe9", "REMOTE_ADDR": "192.0.2.1", "HTTP_X_NAME": "\xe9"},
        prior=[first],
    )
    for judgement in (first, second):
        repr(judgement), judgement.fields, judgement.fields_text, judgement.body, judgement.decision
        judgement.outcome, judgement.policy, judgement.missing, judgement.status
    _core.client_address(SCOPE, one)
    _core.take_notices()


def a_million_hits() -> int:
    one = limiter("10000000000/minute token_bucket")
    hit = one.hit
    for _ in range(10_000):
        hit("203.0.113.7")
    gc.collect()
    before = resident_bytes()
    for _ in range(1_000_000):
        hit("203.0.113.7")
    gc.collect()
    return resident_bytes() - before


def test_a_million_hits_leak_no_memory() -> None:
    assert in_a_process_of_its_own(a_million_hits) < 512 * 1024


def test_a_million_hits_leave_no_reference_behind() -> None:
    one = limiter("10000000000/minute token_bucket")
    part, dims = "203.0.113.7-" + str(os.getpid()), {"user": "u" + str(os.getpid())}
    watched = (one, part, dims, dims["user"], Limiter, Decision, None)
    gc.collect()
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(500_000):
        one.hit(part)
        one.hit(dims=dims, cost=3)
    gc.collect()
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(now - was) < 10 for now, was in zip(after, before)), (before, after)


def test_every_call_leaves_memory_and_references_as_they_were() -> None:
    one = limiter("10000000000/minute", algorithm="token_bucket", by="ip")
    free = limiter("10000000000/minute", algorithm="token_bucket")
    kinds = (Limiter, Decision, RuleResult, ManualClock, Judgement, Gate, RuleError)

    def run(times: int) -> None:
        for _ in range(times):
            every_call(free)
            every_judgement(one)

    run(200)
    gc.collect()
    tracemalloc.start()
    try:
        run(200)
        gc.collect()
        references = [sys.getrefcount(kind) for kind in kinds]
        before = tracemalloc.get_traced_memory()[0]
        run(2000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # 2000 rounds: ten bytes a round would be one byte a call
    assert all(abs(sys.getrefcount(kind) - was) < 5 for kind, was in zip(kinds, references))


def a_thousand_limiters(store: str) -> int:
    def make() -> None:
        clock = ManualClock()
        one = Limiter("5/minute; 7/hour", store=store, clock=clock, by=["ip"], trusted_proxies=["10.0.0.0/8"])
        one.hit(dims={"ip": "192.0.2.1"})

    for _ in range(1000):  # what the allocators keep for themselves is kept by then
        make()
    gc.collect()
    before = [sys.getrefcount(kind) for kind in (Limiter, Decision, ManualClock)]
    files, memory = len(os.listdir("/proc/self/fd")), resident_bytes()
    for _ in range(1000):
        make()
    gc.collect()
    after = [sys.getrefcount(kind) for kind in (Limiter, Decision, ManualClock)]
    assert all(abs(now - was) < 5 for now, was in zip(after, before)), (before, after)
    assert len(os.listdir("/proc/self/fd")) == files
    return resident_bytes() - memory


def test_a_thousand_limiters_leave_no_type_reference_no_file_and_no_memory_behind(tmp_path: pathlib.Path) -> None:
    assert in_a_process_of_its_own(a_thousand_limiters, f"shared://{tmp_path}/table?size=1MiB") < 1024 * 1024


def test_decisions_are_not_the_collectors_business() -> None:
    one = limiter()
    assert not any(gc.is_tracked(thing) for thing in (one, one.hit("a"), one.hit("a").rules[0], ManualClock()))


def test_more_decisions_than_are_kept_free_can_live_at_once() -> None:
    one = limiter("10000000000/minute token_bucket")
    held = [one.hit(str(i)) for i in range(1000)]
    assert [decision.remaining for decision in held] == [9_999_999_999] * 1000
    held.reverse()
    del held[::2]
    again = [one.hit(str(i)) for i in range(1000)]
    assert {decision.remaining for decision in again} == {9_999_999_998}


def test_a_small_decision_is_small() -> None:
    assert sys.getsizeof(limiter().hit("203.0.113.7")) < 300


def test_the_module_uses_the_stable_abi() -> None:
    assert _core.__file__.endswith(".abi3.so")


def test_the_module_exports_its_init_function_and_the_c_interface_only() -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert "PyInit__core" in names
    assert all(name.startswith("tg_") and not name.startswith("tg__") for name in names - {"PyInit__core", "_init", "_fini"})


def test_a_sub_interpreter_has_its_own_types_and_the_same_counts() -> None:
    program = """
import _testcapi, tidegate
one = tidegate.Limiter("3/hour", store="memory://shared-by-interpreters")
assert one.hit("a")
code = '''
import tidegate
one = tidegate.Limiter("3/hour", store="memory://shared-by-interpreters")
assert one.hit("a").remaining == 1
try:
    tidegate.Limiter("5/fortnight")
except tidegate.RuleError as error:
    assert type(error).__mro__[1] is tidegate.Error
'''
for _ in range(20):
    assert _testcapi.run_in_subinterp(code) == 0
    assert one.peek("a").remaining == 1
    one.refund("a")
print(one.hit("a").remaining)
"""
    pytest.importorskip("_testcapi", reason="this interpreter comes without its test modules")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_the_module_can_be_imported_anew_beside_itself() -> None:
    """Two copies of the module: neither takes the other's objects for its own."""
    program = """
import sys, tidegate._core as first
del sys.modules["tidegate._core"]
import importlib
second = importlib.import_module("tidegate._core")
assert second is not first and second.Limiter is not first.Limiter
one = second.Limiter("5/minute", store="memory://x", clock=second.ManualClock())
assert one.hit("a")
try:
    second.Limiter("5/minute", store="memory://x", clock=first.ManualClock())
except TypeError:
    pass
else:
    raise SystemExit("a foreign clock was taken")
del first, sys.modules["tidegate._core"]
import gc; gc.collect()
assert one.hit("a").remaining == 3
print("done")
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_objects_that_outlive_the_interpreters_end_do_no_harm() -> None:
    program = """
import builtins, tidegate
one = tidegate.Limiter("5/minute", store="memory://x")
class Late:
    def __del__(self):
        self.one.hit("a")
        self.decision.refund()
late = Late()
late.one, late.decision, late.me = one, one.hit("a"), late
builtins.kept = (one, one.hit("b"), late)
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_signatures_and_docstrings_are_there() -> None:
    assert str(inspect.signature(Limiter.hit)) == "(self, /, *parts, cost=1, dims=None)"
    assert list(inspect.signature(Limiter).parameters)[:3] == ["rules", "name", "policy"]
    for kind in (Limiter, Decision, RuleResult, ManualClock, Judgement, Gate):
        assert kind.__doc__ and kind.__module__ == "tidegate"
        for name, member in vars(kind).items():
            if not name.startswith("_"):
                assert member.__doc__, f"{kind.__name__}.{name}"


# ---- notices


NOTICE = """
import logging, sys, tidegate
from tidegate import _core
one = tidegate.Limiter("5/minute", store="memory://x", by="ip", clock=tidegate.ManualClock())
scope = {"type": "http", "client": ("192.0.2.1", 5), "headers": [(b"x-forwarded-for", b"192.0.2.9")]}
"""


def run_notice(rest: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", NOTICE + rest], capture_output=True, text=True, timeout=60)


def test_what_the_library_has_to_say_goes_to_the_log_once() -> None:
    done = run_notice(
        "logging.basicConfig(format='%(name)s %(levelname)s %(message)s')\n"
        "for _ in range(3): _core.judge_asgi([one], scope)\n"
        "print(_core.take_notices())\n"
    )
    assert done.returncode == 0 and done.stdout == "[]\n"
    assert done.stderr.startswith("tidegate WARNING forwarded-from-untrusted: ")
    assert done.stderr.count("forwarded-from-untrusted") == 1


def test_a_broken_log_handler_refuses_no_request() -> None:
    done = run_notice(
        "class Broken(logging.Handler):\n"
        "    def handle(self, record): raise RuntimeError('disk full')\n"
        "logging.getLogger('tidegate').addHandler(Broken())\n"
        "print(_core.judge_asgi([one], scope).outcome)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "allowed\n", "")


def test_a_log_handler_may_ask_a_limiter() -> None:
    done = run_notice(
        "class Asking(logging.Handler):\n"
        "    def emit(self, record): print(record.getMessage().split(':')[0], _core.judge_asgi([one], scope).outcome)\n"
        "logging.getLogger('tidegate').addHandler(Asking())\n"
        "print(_core.judge_asgi([one], scope).outcome)\n"
    )
    assert (done.returncode, done.stdout) == (0, "forwarded-from-untrusted allowed\nallowed\n")


def test_taking_notices_keeps_them_from_the_log() -> None:
    assert _core.take_notices() == []


# ---- a store that does not answer: a stopped process holds the lock of the identity's segment

STOPPED = """
import os, signal, sys, tidegate
one = tidegate.Limiter("1000000000/second token_bucket", store=sys.argv[1])
print("ready", flush=True)
while True: one.hit("a")
"""


def stop_inside_the_lock(store: str, program: list[str], one: Limiter) -> subprocess.Popen[str] | None:
    """A hitter stopped while it holds the lock, found by trying: it holds it for a good part of its time."""
    hitter = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert hitter.stdout is not None and hitter.stdout.readline() == "ready\n"
    for _ in range(400):
        time.sleep(0.002)
        hitter.send_signal(signal.SIGSTOP)
        while "T" not in pathlib.Path(f"/proc/{hitter.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            time.sleep(0.0005)
        if one.peek("a").degraded:
            return hitter
        hitter.send_signal(signal.SIGCONT)
    hitter.kill()
    hitter.wait()
    return None


@pytest.mark.parametrize("on_failure", ["open", "closed", "local"])
def test_a_silent_store_is_answered_by_on_store_failure_and_hit_never_raises(
    tmp_path: pathlib.Path, on_failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = f"shared://{tmp_path}/table?size=1MiB"
    one = Limiter(
        "1000000000/second token_bucket", store=store, on_store_failure=on_failure, timeout=0.01, by=None, name="default"
    )
    with caplog.at_level(logging.WARNING, "tidegate"):
        hitter = stop_inside_the_lock(store, [sys.executable, "-c", STOPPED, store], one)
        if hitter is None:
            pytest.fail("in 400 tries no process was stopped inside the lock")
        try:
            decision = one.hit("a")
            assert decision.degraded
            assert decision.allowed == (on_failure != "closed")
            assert decision.limit == 1_000_000_000
            assert decision.rule == "1000000000/second token_bucket"
            if on_failure == "open":
                assert (decision.remaining, decision.retry_after, decision.rules) == (1_000_000_000, 0.0, ())
            elif on_failure == "closed":
                assert (decision.remaining, decision.retry_after, decision.rules) == (0, 1.0, ())
            else:
                assert decision.remaining <= 999_999_999 and len(decision.rules) == 1
            decision.refund()  # nothing was taken there: nothing to ask
            for admin in (one.reset, one.refund):
                with pytest.raises(tidegate.StoreError) as caught:
                    admin("a")
                assert caught.value.code == "TG_E_STORE"
        finally:
            hitter.kill()
            hitter.wait()
        # The holder is dead now; whether it is, is looked up now and then, not by each hit.
        until = time.monotonic() + 5
        while one.hit("a").degraded and time.monotonic() < until:
            time.sleep(0.005)
        assert not one.hit("a").degraded
    assert [record.getMessage().split(":")[0] for record in caplog.records].count("store-failing") == 1


# ---- out of memory

NO_MEMORY = """
import _testcapi, faulthandler, sys, tidegate
from tidegate import _core
faulthandler.enable()
clock = tidegate.ManualClock()
one = tidegate.Limiter("1000000/minute token_bucket; 5/hour burst 1000000", store="memory://x", by="ip", clock=clock)
free = tidegate.Limiter("1000000/minute token_bucket", store="memory://x", clock=clock)
scope = {"type": "http", "path": "/a%b", "client": ("192.0.2.1", 5), "headers": [(b"x-%d" % i, b"v") for i in range(70)]}
environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/\\xe9", "REMOTE_ADDR": "192.0.2.1", "HTTP_X": "\\xe9"}
kept = _core.judge_asgi([one], scope)
decision = free.hit("a")

def make():
    return tidegate.Limiter("5/minute; 7/hour", store="memory://y", clock=clock, by=["ip", "user"], trusted_proxies=["::1"])

def wrong():
    try: tidegate.Limiter("5/fortnight")
    except tidegate.RuleError: pass

calls = [
    lambda: [free.hit("b") for _ in range(80)],  # more than are kept free
    lambda: free.hit("\\ud800", "\\xe9" * 9, cost=2),
    lambda: free.peek(dims={"ip": "192.0.2.1", "user+host": ("\\ud800", "b")}),
    lambda: free.hit_async("a"),
    lambda: (decision.rules, decision.rule, decision.retry_after, decision.remaining, repr(decision)),
    lambda: _core.judge_asgi([one], scope, route="/\\ud800", user="u", prior=[kept]),
    lambda: _core.judge_wsgi([one], environ, prior=(kept,), keys={"tenant": "\\ud800"}),
    lambda: (kept.fields, kept.fields_text, kept.body, repr(kept)),
    lambda: _core.client_address(scope, one),
    tidegate.ManualClock,
    make,
    wrong,
]
failed = 0
for call in calls:
    call()
    for n in range(1, 400):
        _testcapi.set_nomemory(n, n + 1)
        try:
            call()
        except MemoryError:
            failed += 1
        else:
            if n > 60: break
        finally:
            _testcapi.remove_mem_hooks()
print(failed > 50, free.peek("a").allowed)
"""


def test_no_failing_allocation_of_python_does_harm() -> None:
    pytest.importorskip("_testcapi", reason="this interpreter comes without its test modules")
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr[-3000:]


# ---- the build


def build(root: pathlib.Path, folder: pathlib.Path, program: str) -> str:
    pytest.importorskip("setuptools")
    if program:
        (folder / "pkg-config").write_text(program)
        (folder / "pkg-config").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", f"--build-lib={folder}/lib", f"--build-temp={folder}/temp"],
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "PKG_CONFIG": f"{folder}/pkg-config"} if program else {"PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    return done.stderr


def test_a_missing_library_is_named_with_the_package_that_brings_it(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    said = build(root, tmp_path, '#!/bin/sh\n[ "$2" != yaml-0.1 ]\n')
    assert "does not know yaml-0.1" in said
    assert "apt-get install libyaml-dev\n" in said


def test_a_missing_pkg_config_is_named_with_all_packages(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    said = build(root, tmp_path, "")
    assert "pkg-config was not found" in said
    assert "apt-get install gcc pkg-config python3-dev libsodium-dev libyaml-dev" in said


def test_the_version_stands_in_one_place(root: pathlib.Path) -> None:
    header = (root / "csrc/include/tidegate.h").read_text()
    assert f'#define TG_VERSION "{tidegate.__version__}"' in header
