"""Traces: steps to do, the answers the reference gives to them, and random ones.

A trace is a list of steps in the format of tests/vectors/README.md, with `key` lines beside; `answers` says what each hit and
peek of it has to be answered, in the words of tests/c/trace.h. Random cases are made together with the reference's state,
so that they can aim at the very microsecond at which something becomes possible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import rule_text
from model import DAY, SECOND, WAIT_MAX, Joint, Rule, Table, Verdict


@dataclass(eq=False)
class Step:
    verb: str  # rule, key, offset, hit, wait, force, reserve, settle, renew, peek, refund, undo, reset
    text: str = ""  # rule, key
    at: int = 0  # also the number of an offset
    cost: int = 0
    patience: int = 0  # wait; reserve, renew: the lease
    of: Step | None = None  # undo: the hit; settle, renew: the reservation
    expected: str = ""  # a vector's, worked out by hand
    where: str = ""


TAKES = ("hit", "wait", "force")  # what an undo can give back
ANSWERED = (*TAKES, "reserve", "peek")


@dataclass
class Case:
    title: str
    steps: list[Step]

    def text(self) -> str:
        return "\n".join([f"case {self.title}", *lines(self.steps)]) + "\n"


def lines(steps: Iterable[Step]) -> Iterator[str]:
    number: dict[Step, int] = {}
    for step in steps:
        if step.verb in TAKES:
            number[step] = sum(other.verb in TAKES for other in number) + 1
        elif step.verb == "reserve":
            number[step] = sum(other.verb == "reserve" for other in number) + 1
        if step.verb in ("rule", "key"):
            yield f"{step.verb} {step.text}"
        elif step.verb in ("offset", "reset"):
            yield f"{step.verb} {step.at}"
        elif step.verb == "undo":
            yield f"undo {step.at} {number[step.of]}"  # type: ignore[index]
        elif step.verb in ("wait", "reserve"):
            yield f"{step.verb} {step.at} {step.cost} {step.patience}"
        elif step.verb in ("settle", "renew"):
            yield f"{step.verb} {step.at} {step.patience if step.verb == 'renew' else step.cost} {number[step.of]}"  # type: ignore[index]
        else:
            yield f"{step.verb} {step.at} {step.cost}"


def read(text: str, name: str) -> list[Case]:
    """The cases of a vector file."""
    cases: list[Case] = []
    hits: list[Step] = []
    reservations: list[Step] = []
    for number, line in enumerate(text.splitlines(), 1):
        words, _, expected = line.partition(" = ")
        verb, _, rest = words.strip().partition(" ")
        if not verb or verb.startswith("#"):
            continue
        if verb == "case":
            cases.append(Case(rest, []))
            hits, reservations = [], []
            continue
        step = Step(verb, expected=expected.strip(), where=f"{name}:{number}")
        if verb in ("rule", "key"):
            step.text = rest
        else:
            numbers = [int(word) for word in rest.split()]
            step.at = numbers[0]
            if verb == "undo":
                step.of = hits[numbers[1] - 1]
            elif len(numbers) > 1:
                step.cost = numbers[1]
            if verb in ("wait", "reserve"):
                step.patience = numbers[2]
            if verb in ("settle", "renew"):
                step.of = reservations[numbers[2] - 1]
            if verb == "renew":
                step.cost, step.patience = 0, numbers[1]
        if verb == "reserve":
            reservations.append(step)
        if verb in TAKES:
            hits.append(step)
        cases[-1].steps.append(step)
    return cases


def vector_cases() -> list[Case]:
    folder = Path(__file__).resolve().parent.parent / "vectors"
    return [case for path in sorted(folder.glob("*.txt")) for case in read(path.read_text(), path.name)]


def numbers(verdict: Verdict | Joint) -> str:
    retry = "never" if verdict.retry_after_us is None else verdict.retry_after_us
    return (
        f"{'yes' if verdict.allowed else 'no'} {verdict.remaining} {retry} {verdict.reset_after_us} {verdict.delay_us}"
    )


def answer(joint: Joint) -> str:
    return " | ".join([f"{numbers(joint)} @{joint.reported}", *map(numbers, joint.verdicts)])


class Player:
    """Does steps on the reference."""

    def __init__(self) -> None:
        self.table = Table()
        self.rules: list[Rule] = []
        self.keys = ["k"]
        self.offset = 0
        self.taken: dict[Step, list] = {}
        self.held: dict[Step, tuple] = {}

    def targets(self) -> list[tuple[Rule, object]]:
        return [(rule, key) for key in self.keys for rule in self.rules]

    def play(self, step: Step) -> Joint | None:
        # The offset moves every rule of a case: no vector mixes aligned rules with others under one.
        at = step.at + self.offset
        if step.verb not in ("rule", "key", "offset"):
            self.table.lapse(at)
        if step.verb == "rule":
            self.rules = rule_text.rules(step.text)
        elif step.verb == "key":
            self.keys = step.text.split()
        elif step.verb == "offset":
            self.offset = step.at
        elif step.verb in TAKES:
            joint, self.taken[step] = self.table.hit(self.targets(), at, step.cost, step.patience, step.verb == "force")
            return joint
        elif step.verb == "reserve":
            joint, lease = self.table.reserve(self.targets(), at, step.cost, step.patience)
            if lease:
                self.held[step] = (lease, list(lease.parts))
            return joint
        elif step.verb == "settle":
            if step.of in self.held:
                lease, parts = self.held.pop(step.of)  # type: ignore[arg-type]
                self.table.settle(lease, at, step.cost, parts)
        elif step.verb == "renew":
            if step.of in self.held:
                self.table.renew(self.held[step.of][0], at, step.patience)  # type: ignore[index]
        elif step.verb == "peek":
            return self.table.peek(self.targets(), at, step.cost)
        elif step.verb == "refund":
            self.table.refund(self.targets(), at, step.cost)
        elif step.verb == "undo":
            self.table.refund_taken(self.taken.pop(step.of, []), at)  # type: ignore[arg-type]
        elif step.verb == "reset":
            self.table.reset(self.targets())
        return None


def answers(case: Case) -> list[str]:
    player = Player()
    joints = (player.play(step) for step in case.steps)
    return [answer(joint) for joint in joints if joint is not None]


def asked(case: Case) -> list[Step]:
    return [step for step in case.steps if step.verb in ANSWERED]


def forces(case: Case) -> bool:
    """Whether it takes what no caller of a limiter can take just so."""
    return any(step.verb == "force" for step in case.steps)


def reserves(case: Case) -> bool:
    return any(step.verb == "reserve" for step in case.steps)


# ---- random cases ----

LIMIT_MAX = 10**10
LEASE_MIN, LEASE_MAX = SECOND, DAY
PERIOD_MAX = 3650 * DAY
# A table refuses a rule whose full log is larger than a quarter of a segment's arena: traces stay below.
LOG_WORDS_MAX = 1000


class Maker:
    """`reserves`: with reservations, and then a clock that does not go back."""

    def __init__(self, seed: str, reserves: bool = False) -> None:
        self.reserves = reserves
        self.reservations: list[Step] = []
        self.random = random.Random(seed)
        self.player = Player()
        self.case = Case(f"seed {seed}", [])
        self.force = self.random.random() < 0.25
        self.hits: list[Step] = []
        self.waits: list[int] = []  # instants at which something was said to become possible
        self.at = self.random.choice(
            [0, 5, self.random.randrange(10**9), self.random.randrange(10**13), 1_700_000_000_000_000,
             self.random.randrange(2**53), self.random.randrange(2**62)]
        )  # fmt: skip

    def up_to(self, most: int) -> int:
        """1..most, small numbers as likely as large ones."""
        return min(most, max(1, int(2 ** (self.random.random() * most.bit_length()))))

    def period(self) -> tuple[int, str]:
        choice = self.random.random()
        unit = self.random.choice(list(rule_text.UNITS))
        us = rule_text.UNITS[unit]
        if choice < 0.4:
            return us, unit
        count = self.random.choice([self.random.randrange(1, 100), self.up_to(PERIOD_MAX // us)])
        count = max(1, min(count, PERIOD_MAX // us))
        return count * us, f"{count}{self.random.choice(['', ' '])}{unit}"

    def limit(self) -> int:
        return self.random.choice(
            [self.random.randrange(1, 6), self.random.randrange(1, 11), self.up_to(1000), self.up_to(LIMIT_MAX), LIMIT_MAX]
            if self.random.random() < 0.5
            else [self.random.randrange(1, 6), self.random.randrange(1, 60)]
        )

    def rule(self, algorithm: str, period: tuple[int, str]) -> str:
        limit, words = self.limit(), [algorithm]
        if algorithm == "sliding_log":
            if limit > LOG_WORDS_MAX or self.random.random() < 0.3:
                step = -(-period[0] // 1000 // self.random.choice([1, 2, 7, 60, 400])) or 1  # ms
                words += [f"resolution {step}{self.random.choice(['', ' '])}ms"]
                if -(-period[0] // (step * 1000)) > 450:
                    limit = min(limit, LOG_WORDS_MAX)
        elif algorithm == "fixed_window":
            if self.random.random() < 0.3 and "month" not in period[1] and "year" not in period[1]:
                words += ["aligned"]
        elif algorithm.endswith("bucket") and self.random.random() < 0.5:
            burst = self.random.choice([self.random.randrange(1, 20), self.limit(), self.up_to(4 * limit)])
            words += [f"burst {max(1, min(burst, LIMIT_MAX))}"]
        mark = self.random.choice(["/", " / ", " per "])
        amount = f"{limit}{mark}{period[1]}"
        if rule_text.rule(" ".join([amount, *words[1:]])).algorithm == algorithm and self.random.random() < 0.5:
            del words[0]  # it is the default
        elif algorithm == "token_bucket" and self.random.random() < 0.3:
            words[0] = "gcra"
        self.random.shuffle(words)
        text = " ".join([amount, *words])
        return text.upper() if self.random.random() < 0.1 else text

    def rules(self) -> None:
        texts = [self.rule(*kind) for kind in self.kinds]
        if self.random.random() < 0.03:
            texts.insert(self.random.randrange(len(texts) + 1), "deny")
        self.case.steps.append(Step("rule", self.random.choice(["; ", ", ", ";"]).join(texts)))
        self.player.play(self.case.steps[-1])

    def keys(self) -> None:
        count = self.random.choices([1, 2, 3], [6, 3, 1])[0]
        names = [self.random.choice("abc") for _ in range(count)]  # now and then one twice
        self.case.steps.append(Step("key", " ".join(names)))
        self.player.play(self.case.steps[-1])

    def move(self) -> None:
        before = self.at
        self.move_anywhere()
        if self.reserves:
            self.at = max(self.at, before)

    def move_anywhere(self) -> None:
        rule = self.random.choice(self.player.rules)
        choice = self.random.random()
        if choice < 0.35:
            return
        if choice < 0.42:
            self.at += 1
        elif choice < 0.62 and self.waits:
            self.at = max(0, self.random.choice(self.waits[-4:]) + self.random.choice([-1, 0, 0, 1]))
        elif choice < 0.75 and rule.limit:
            self.at += self.random.randrange(1 + 3 * rule.period_us // rule.limit)
        elif choice < 0.87:
            self.at += self.random.randrange(1 + 2 * rule.period_us)
        elif choice < 0.92:
            self.at += self.random.randrange(1, 4) * rule.period_us
        elif choice < 0.97:
            self.at = max(0, self.at - self.random.randrange(1 + 2 * rule.period_us))
        else:
            self.at += self.up_to(2**50)
        self.at = min(self.at, 2**63 - 2**55)

    def cost(self) -> int:
        rule = self.random.choice(self.player.rules)
        choice = self.random.random()
        if choice < 0.55:
            return 1
        if choice < 0.6:
            return 0
        if choice < 0.9:
            return min(LIMIT_MAX, self.random.randrange(1 + max(rule.capacity, 1)))
        return min(LIMIT_MAX, self.random.choice([rule.capacity, rule.capacity + 1, rule.limit, LIMIT_MAX]))

    def patience(self) -> int:
        rule = self.random.choice(self.player.rules)
        choice = self.random.random()
        if choice < 0.1:
            return self.random.choice([0, 1, WAIT_MAX - 1, WAIT_MAX])
        if choice < 0.4 and self.waits:  # to the microsecond what was said to be the wait
            return min(WAIT_MAX, max(0, self.random.choice(self.waits[-4:]) - self.at + self.random.choice([-1, 0, 0, 1])))
        if choice < 0.7 and rule.limit:
            return self.random.randrange(1 + 4 * rule.period_us // rule.limit)
        return min(WAIT_MAX, self.random.randrange(1 + 3 * max(rule.period_us, 1)))

    def lease(self) -> int:
        rule = self.random.choice(self.player.rules)
        most = max(LEASE_MIN, min(LEASE_MAX, 3 * rule.period_us))
        return self.random.choice([LEASE_MIN, LEASE_MAX, self.random.randrange(LEASE_MIN, most + 1)])

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.05:
            return self.rules()
        if choice < 0.15:
            return self.keys()
        self.move()
        if choice < 0.27:
            step = Step("peek", at=self.at, cost=self.cost())
        elif choice < 0.32:
            step = Step("refund", at=self.at, cost=self.cost())
        elif choice < 0.37 and self.hits:
            step = Step("undo", at=self.at, of=self.random.choice(self.hits[-8:]))
        elif choice < 0.38:
            step = Step("reset", at=self.at)
        elif self.reserves and choice < 0.62:
            step = Step("reserve", at=self.at, cost=self.cost(), patience=self.lease())
            self.reservations.append(step)
            self.waits.append(self.at + step.patience)
        elif self.reserves and choice < 0.75 and self.reservations:
            of = self.random.choice(self.reservations[-8:])
            step = Step("settle", at=self.at, cost=self.random.choice([of.cost, self.cost(), self.cost(), 0]), of=of)
        elif self.reserves and choice < 0.78 and self.reservations:
            step = Step("renew", at=self.at, of=self.random.choice(self.reservations[-4:]), patience=self.lease())
            self.waits.append(self.at + step.patience)
        else:
            step = Step("hit", at=self.at, cost=self.cost())
            kind = self.random.random()
            if kind < 0.2:
                step.verb, step.patience = "wait", self.patience()
            elif kind < 0.25 and self.force:
                step.verb = "force"
            self.hits.append(step)
        self.case.steps.append(step)
        joint = self.player.play(step)
        if joint is not None:
            self.answers.append(answer(joint))
            self.waits += [self.at + wait for wait in (joint.retry_after_us, joint.reset_after_us) if wait]

    def make(self, asked_count: int) -> tuple[Case, list[str]]:
        self.answers: list[str] = []
        algorithms = ["fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket"]
        self.kinds = []
        for _ in range(self.random.choices([1, 2, 3], [6, 2, 1])[0]):
            kind = (self.random.choice(algorithms), self.period())
            if (kind[0], kind[1][0]) not in [(known[0], known[1][0]) for known in self.kinds]:
                self.kinds.append(kind)
        self.rules()
        while len(self.answers) < asked_count:
            self.step()
        return self.case, self.answers


def random_case(seed: str, asked_count: int, reserves: bool = False) -> tuple[Case, list[str]]:
    return Maker(seed, reserves).make(asked_count)


def shortest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case without every step that it fails without."""
    steps = list(case.steps)
    for step in reversed(case.steps):
        fewer = [other for other in steps if other is not step and other.of is not step]
        if fails(Case(case.title, fewer)):
            steps = fewer
    return Case(case.title, steps)


def as_vector(case: Case) -> str:
    """The case with the reference's numbers, to be looked at and, once worked out by hand, kept in tests/vectors."""
    player = Player()
    text = [f"case {case.title}"]
    for step, line in zip(case.steps, lines(case.steps), strict=True):
        joint = player.play(step)
        text.append(line if joint is None else f"{line} = {numbers(joint)}")
    return "\n".join(text) + "\n"
