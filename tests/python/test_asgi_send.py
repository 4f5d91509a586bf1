"""asgi_send and shown: the fields of a request's judgements on whatever opens its answer."""

import gc
import sys
import uuid
from typing import Any

import pytest
from tidegate import Judgement, Limiter, ManualClock
from tidegate._core import asgi_send, judge_asgi, shown
from tidegate._request_state import RequestState

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("192.0.2.1", 5000)}
STORE, CLOCK = f"memory://{uuid.uuid4().hex}", ManualClock()


def judged(rules: str, times: int = 1) -> Judgement:
    limiter = Limiter(rules, name=uuid.uuid4().hex, by="ip", store=STORE, clock=CLOCK)
    for _ in range(times):
        judgement = judge_asgi([limiter], SCOPE)
    return judgement


def sent_through(judgements: list[Judgement], message: Any) -> Any:
    sent: list[Any] = []
    assert asgi_send(judgements, sent.append)(message) is None  # type: ignore[arg-type]
    (out,) = sent
    return out


@pytest.mark.parametrize("kind", ["http.response.start", "websocket.http.response.start", "websocket.accept"])
def test_what_opens_an_answer_goes_out_as_a_copy_with_the_fields(kind: str) -> None:
    judgement = judged("5/minute")
    message = {"type": kind, "status": 200, "headers": ((b"content-type", b"text/plain"),)}
    out = sent_through([judgement], message)
    assert out == {"type": kind, "status": 200, "headers": [(b"content-type", b"text/plain"), *judgement.fields]}
    assert message["headers"] == ((b"content-type", b"text/plain"),)


@pytest.mark.parametrize(
    "kind", ["http.response.body", "http.response.trailer", "websocket.send", "http.response.push"]
)
def test_any_other_message_goes_out_as_it_is(kind: str) -> None:
    message = {"type": kind}
    assert sent_through([judged("5/minute")], message) is message


def test_without_a_judgement_nothing_is_added() -> None:
    message = {"type": "http.response.start", "status": 200, "headers": []}
    assert sent_through([], message) is message


def test_types_are_told_by_what_they_say_whoever_made_them_and_in_whatever_order() -> None:
    judgement = judged("5/minute")
    opening, other = "http.response.start", "http.response.body"
    for _ in range(3):
        for kind, opens in ((opening, True), (other, False), ("websocket.accept", True), ("websocket.close", False)):
            for same in (kind, "".join(kind), "".join(list(kind)), type("Kind", (str,), {})(kind)):
                out = sent_through([judgement], {"type": same, "headers": []})
                assert (out["headers"] == judgement.fields) == opens, kind
    assert sent_through([judgement], {"type": 5, "headers": []}) == {"type": 5, "headers": []}


def test_the_lists_of_two_answers_are_two_and_the_next_answer_changes_neither() -> None:
    first, second = judged("5/minute"), judged("7/minute")
    message = {"type": "http.response.start", "headers": [(b"a", b"b")]}
    outs = [sent_through([one], message)["headers"] for one in (first, second, first)]
    assert [out[1:] for out in outs] == [first.fields, second.fields, first.fields]
    outs[0].clear()
    assert outs[2][1:] == first.fields and sent_through([first], message)["headers"][1:] == first.fields


def test_a_message_without_headers_gets_them() -> None:
    judgement = judged("5/minute")
    assert sent_through([judgement], {"type": "http.response.start"})["headers"] == judgement.fields


def test_fields_of_the_same_name_in_any_case_are_replaced_and_others_stay() -> None:
    judgement = judged("5/minute")
    headers = [
        [b"X-RateLimit-Limit", b"upstream"],
        (b"retry-after", b"9"),
        (b"x-ratelimit-remaining", b"77"),
        (b"x", b"y"),
    ]
    out = sent_through([judgement], {"type": "http.response.start", "headers": headers})
    assert out["headers"] == [(b"retry-after", b"9"), (b"x", b"y"), *judgement.fields]


def test_a_refusal_leaves_the_type_of_a_body_that_may_be_an_error_handlers() -> None:
    judgement = judged("1/minute", times=2)
    assert judgement.status == 429
    headers = [(b"content-type", b"text/html"), (b"retry-after", b"9")]
    out = sent_through([judgement], {"type": "http.response.start", "headers": headers})
    names = [name for name, _ in out["headers"]]
    assert out["headers"][0] == (b"content-type", b"text/html")
    assert names.count(b"content-type") == names.count(b"retry-after") == 1
    assert dict(out["headers"])[b"retry-after"] == b"60"


def test_headers_that_are_no_pairs_of_bytes_are_left_for_the_server_to_refuse() -> None:
    out = sent_through([judged("5/minute")], {"type": "http.response.start", "headers": [("text", "pair"), 5, ()]})
    assert out["headers"][:3] == [("text", "pair"), 5, ()]
    with pytest.raises(TypeError):
        sent_through([judged("5/minute")], {"type": "http.response.start", "headers": 5})


def test_what_send_raises_and_returns_comes_through() -> None:
    def broken(message: Any) -> Any:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        asgi_send([judged("5/minute")], broken)({"type": "http.response.start"})
    returned: Any = asgi_send([], lambda message: message)(5)
    assert returned == 5


def test_the_tightest_is_shown_and_what_was_not_limited_never_before_it() -> None:
    loose, tight, late = judged("9/minute"), judged("3/minute"), judged("3/hour")
    free = judge_asgi([Limiter("1/minute", by="ip", enabled=False)], SCOPE)
    assert free.fields == []
    assert shown([loose, tight]) is tight
    assert shown([tight, loose]) is tight
    assert shown([tight, late]) is late  # as few remain, and it takes longer
    assert shown([free, loose]) is loose
    assert shown([loose, free]) is loose
    assert shown([free]) is free
    assert shown(RequestState([tight, judged("3/minute")])) is not None
    with pytest.raises(ValueError, match="no judgement"):
        shown([])
    with pytest.raises(TypeError, match="list of Judgement"):
        shown([5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="list of Judgement"):
        shown(())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="asgi_send"):
        asgi_send([], 5)  # type: ignore[arg-type]


def test_a_hundred_thousand_messages_leave_nothing_behind() -> None:
    judgement = judged("5/minute")
    message = {"type": "http.response.start", "headers": [(b"a", b"b")]}
    name, state = message["headers"][0], RequestState([judgement])

    def drop(message: Any) -> Any: ...

    def counts() -> tuple[int, ...]:
        return tuple(map(sys.getrefcount, (judgement, message, name, state, drop, None)))

    asgi_send(state, drop)(message)
    before, blocks = counts(), sys.getallocatedblocks()
    for _ in range(100_000):
        asgi_send(state, drop)(message)
    assert all(abs(now - then) < 20 for now, then in zip(counts(), before, strict=True))
    assert sys.getallocatedblocks() - blocks < 100


def test_an_answer_that_a_collection_sends_leaves_the_one_being_made_its_own_fields() -> None:
    """Up to CPython 3.11 making a tuple may set the collector off, and a finalizer or another thread may send then."""
    within: list[Any] = []
    senders = [asgi_send([judged(f"{limit}/minute")], within.append) for limit in range(100, 150)]
    senders.append(asgi_send([], within.append))
    judgement = judged("7/minute")
    message: Any = {"type": "http.response.start", "headers": []}
    turn = 0

    def send_another(phase: str, info: Any) -> None:
        nonlocal turn
        if phase == "start" and gc.isenabled():
            gc.disable()
            turn += 1
            senders[turn % len(senders)](message)

    threshold = gc.get_threshold()
    gc.callbacks.append(send_another)
    try:
        for i in range(900):
            out: list[Any] = []
            send = asgi_send([judgement], out.append)
            gc.disable()
            gc.collect()  # gives away the tuples kept for the next
            gc.set_threshold(1 + i % 9)
            gc.enable()
            send(message)
            gc.disable()
            assert out[0]["headers"] == judgement.fields
    finally:
        gc.callbacks.remove(send_another)
        gc.set_threshold(*threshold)
        gc.enable()
    if sys.version_info < (3, 12):
        assert within
