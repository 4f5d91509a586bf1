"""Several limits that meet one request, equal to the reference: what an earlier one has charged is judged by the next
one's numbers as if it were not there yet, is not charged again, and every number told is that of the state as it then is.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tidegate import Judgement, Limiter, ManualClock
from tidegate._core import judge_asgi

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
import model

ALGORITHMS = ["fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket"]
Key = tuple[str, tuple[str, str], str, int]


@dataclass
class Part:
    """A limiter with what the reference needs to know of it."""

    limiter: Limiter
    name: str
    by: list[str]
    rules: list[model.Rule]


def random_rule(dice: random.Random) -> tuple[str, model.Rule]:
    algorithm, limit, seconds = dice.choice(ALGORITHMS), dice.randint(1, 12), dice.choice([1, 1, 10, 60])
    burst = dice.randint(1, 15) if "bucket" in algorithm and dice.random() < 0.6 else None
    aligned = algorithm == "fixed_window" and dice.random() < 0.3
    step_ms = dice.choice([0, 0, 500]) if algorithm == "sliding_log" else 0
    text = f"{limit}/{seconds}s {algorithm}"
    text += f" burst {burst}" if burst else ""
    text += " aligned" if aligned else ""
    text += f" resolution {step_ms}ms" if step_ms else ""
    return text, model.Rule(limit, seconds * model.SECOND, algorithm, burst, aligned, step_ms * 1000)


def random_part(dice: random.Random, store: str, clock: ManualClock) -> Part:
    chosen = {}
    for _ in range(dice.randint(1, 3)):
        text, rule = random_rule(dice)
        chosen.setdefault((rule.algorithm, rule.period_us), (text, rule))
    if dice.random() < 0.05:
        chosen[("deny", 0)] = ("deny", model.Rule(0, 0, "deny"))
    name = dice.choice(["a", "a", "b"])
    by = dice.choice([["ip"], ["ip"], ["ip", "header:x-k"], ["header:x-k"]])
    rules = "; ".join(text for text, _ in chosen.values())
    return Part(Limiter(rules, name=name, store=store, clock=clock, by=by), name, by, [rule for _, rule in chosen.values()])


@dataclass
class Request:
    address: str
    key: str
    judged: list[Judgement] = field(default_factory=list)
    paid: dict[Key, tuple[model.Rule, int, int | None]] = field(default_factory=dict)

    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "method": "GET",
            "path": "/",
            "client": (self.address, 50000),
            "headers": [(b"x-k", self.key.encode())],
        }

    def targets(self, parts: Sequence[Part]) -> list[tuple[model.Rule, Key]]:
        value = {"ip": self.address, "header:x-k": self.key}
        return [
            (rule, (part.name, (kind, value[kind]), rule.algorithm, rule.period_us))
            for part in parts
            for kind in part.by
            for rule in part.rules
        ]


class World:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = ManualClock(1_700_000_000_000_000 + self.dice.randrange(10**9))
        self.parts = [random_part(self.dice, f"memory://paid{seed}", self.clock) for _ in range(self.dice.randint(2, 5))]
        self.states: dict[Key, Any] = {}

    def state(self, rule: model.Rule, key: Key) -> Any:
        return self.states.get(key) or model.fresh_state(rule)

    def verdict(self, request: Request, rule: model.Rule, key: Key, cost: int) -> model.Verdict:
        state, now = self.state(rule, key), self.clock.now_us
        if key in request.paid and rule.algorithm != "deny":
            _, cost, stamp = request.paid[key]
            state = copy.deepcopy(state)
            state.refund(rule, now, cost, stamp)
        verdict: model.Verdict = state.peek(rule, now, cost)
        return verdict

    def charge(self, request: Request, targets: Sequence[tuple[model.Rule, Key]], cost: int) -> None:
        for rule, key in targets:
            if cost and key not in request.paid:
                _, stamp = self.states.setdefault(key, model.fresh_state(rule)).hit(rule, self.clock.now_us, cost)
                request.paid[key] = (rule, cost, stamp)

    def judge(self, request: Request) -> bool:
        parts = self.dice.sample(self.parts, self.dice.randint(1, min(3, len(self.parts))))
        cost = self.dice.choice([0, 1, 1, 1, 2, 3])
        targets = request.targets(parts)
        expected = [self.verdict(request, rule, key, cost) for rule, key in targets]
        judgement = judge_asgi([part.limiter for part in parts], request.scope(), cost=cost, prior=request.judged)
        request.judged.append(judgement)
        told, allowed = judgement.decision.rules, all(verdict.allowed for verdict in expected)
        assert judgement.decision.allowed == allowed
        assert [rule.allowed for rule in told] == [verdict.allowed for verdict in expected]
        if not allowed:
            assert [rule.retry_after_us for rule in told] == [verdict.retry_after_us for verdict in expected]
            return False
        self.charge(request, targets, cost)
        for (rule, key), said in zip(targets, told, strict=True):
            state = self.state(rule, key)
            assert (said.remaining, said.reset_after_us) == state.numbers(rule, state.now(rule, self.clock.now_us))
        return True

    def serve(self) -> None:
        request = Request(f"192.0.2.{self.dice.randint(1, 2)}", self.dice.choice("xy"))
        for _ in range(self.dice.randint(1, 4)):
            if not self.judge(request):
                if self.dice.random() < 0.7:
                    self.give_back(request)
                break
            self.clock.advance_us(self.dice.choice([0, 0, 0, 5, 1000, 300_000, 1_500_000]))
        self.clock.advance_us(self.dice.choice([0, 10, 10**5, 10**6, 4 * 10**6]))

    def give_back(self, request: Request) -> None:
        for judgement in request.judged:
            judgement.decision.refund()
        for key, (rule, cost, stamp) in request.paid.items():
            self.states[key].refund(rule, self.clock.now_us, cost, stamp)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_what_a_request_has_paid_already_is_judged_as_the_reference_judges_it(first: int) -> None:
    for seed in range(first, first + 20):
        world = World(seed)
        for _ in range(60):
            world.serve()
