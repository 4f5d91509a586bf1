"""Plays a trace through Python limiters and tells their decisions in the words of tests/c/trace.h."""

from __future__ import annotations

from typing import Any

from tidegate._core import hit_within
from traces import Case, Step, numbers


def play(case: Case, limiter_type: Any, clock: Any, store: str, *, name: str) -> list[str]:
    """The answers to every hit and peek. A changed rule is another limiter of the same name on the same store. The case's
    states are reset at its end."""
    limiters: dict[str, Any] = {}
    decisions: dict[Step, Any] = {}
    limiter: Any = None
    keys, known, offset, said = ["k"], {"k"}, 0, []
    try:
        for step in case.steps:
            clock.now_us = step.at + offset
            # A mapping holds a key once: `answer_once` leaves out what a trace says of its second place.
            dims = {key: key for key in keys}
            if step.verb == "rule":
                limiter = limiters.get(step.text) or limiter_type(step.text, name=name, store=store, clock=clock)
                limiters[step.text] = limiter
            elif step.verb == "key":
                keys = step.text.split()
                known.update(keys)
            elif step.verb == "offset":
                offset = step.at
            elif step.verb == "hit":
                decisions[step] = limiter.hit(dims=dims, cost=step.cost)
                said.append(words(decisions[step]))
            elif step.verb == "wait":
                decisions[step] = hit_within(limiter, step.patience, dims=dims, cost=step.cost)
                said.append(words(decisions[step]))
            elif step.verb == "force":
                raise NotImplementedError("no caller of a limiter can force a hit just so")
            elif step.verb == "peek":
                said.append(words(limiter.peek(dims=dims, cost=step.cost)))
            elif step.verb == "refund":
                limiter.refund(dims=dims, cost=step.cost)
            elif step.verb == "undo" and step.of is not None:
                decisions[step.of].refund()
            elif step.verb == "reset":
                limiter.reset(dims=dims)
    finally:
        for other in limiters.values():
            for key in known:
                other.reset(dims={key: key})
    return said


def words(decision: Any) -> str:
    assert bool(decision) is decision.allowed
    assert not decision.degraded
    for told in (decision, *decision.rules):
        assert told.retry_after == (float("inf") if told.retry_after_us is None else told.retry_after_us / 1e6)
        assert told.reset_after == told.reset_after_us / 1e6
        assert told.delay == told.delay_us / 1e6
    reported = next(
        i
        for i, rule in enumerate(decision.rules)
        if rule.allowed == decision.allowed
        and (rule.rule, rule.limit, rule.burst) == (decision.rule, decision.limit, decision.burst)
        and (rule.retry_after_us, rule.reset_after_us) == (decision.retry_after_us, decision.reset_after_us)
        and (not decision.allowed or rule.remaining == decision.remaining)
    )
    return " | ".join([f"{numbers(decision)} @{reported}", *map(numbers, decision.rules)])


def answer_once(answer: str, keys: list[str]) -> str:
    """An answer of the trace as it is when each key is given once: a second place repeats the first."""
    joint, *each = answer.split(" | ")
    rule_count = len(each) // len(keys)
    kept = [i for i in range(len(each)) if keys.index(keys[i // rule_count]) == i // rule_count]
    head, reported = joint.split(" @")
    return " | ".join([f"{head} @{kept.index(int(reported))}", *(each[i] for i in kept)])
