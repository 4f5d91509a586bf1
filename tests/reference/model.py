"""The reference: what each number of a decision means, written from the definitions with exact rational numbers.

It shares no formula with the C core. An algorithm here says only three things of a state: whether a cost *fits* at an
instant, what *taking* it changes, and whether the state is *fresh* at an instant. `remaining`, `retry_after` and
`reset_after` are then found by searching for the instant or number that their definition names, so a wrong closed form in
C cannot be repeated here. Slow and plain on purpose; it reads no clock and knows no store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

SECOND = 1_000_000
DAY = 86_400 * SECOND
WEEK = 7 * DAY
NEVER = None
WAIT_MAX = 2**53 - 1
NOTHING = Fraction(0)
# What a state holds at most, when hits are forced or wait in line: a number every store can keep.
HELD_MAX = 2**49
LOG_HELD_MAX = 2**35


@dataclass(frozen=True)
class Rule:
    limit: int
    period_us: int
    algorithm: str
    burst: int | None = None
    aligned: bool = False
    resolution_us: int = 0

    @property
    def capacity(self) -> int:
        """Units that fit into a fresh state."""
        return self.limit if self.burst is None else self.burst


@dataclass(frozen=True)
class Verdict:
    allowed: bool
    remaining: int
    retry_after_us: int | None
    reset_after_us: int
    delay_us: int = 0


def smallest(holds, at_most: int | None = None) -> int:
    """The smallest whole number n >= 0 with holds(n); `holds` is monotone, and true at `at_most` where that is given."""
    low, high = 0, 1
    while at_most is None and not holds(high):
        low, high = high + 1, 2 * high
    if at_most is not None:
        high = at_most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


class State:
    """One (rule, key). Subclasses define `now`, `fits`, `take`, `fresh` and `give`; the numbers follow from them."""

    def now(self, rule: Rule, t: int) -> int:
        raise NotImplementedError

    def fits(self, rule: Rule, t: int, cost: int) -> bool:
        raise NotImplementedError

    def take(self, rule: Rule, t: int, cost: int) -> int:
        """Returns the stamp that a refund of this very hit names."""
        raise NotImplementedError

    def fresh(self, rule: Rule, t: int) -> bool:
        raise NotImplementedError

    def give(self, rule: Rule, t: int, cost: int, stamp: int | None) -> None:
        raise NotImplementedError

    def knock(self, rule: Rule, t: int, cost: int) -> None:
        """A denied hit that counts: what is held grows by it, up to what the rule holds and no further."""
        raise NotImplementedError

    def delay(self, rule: Rule, t: int) -> int:
        return 0

    def room(self, rule: Rule, t: int) -> Fraction | int:
        """Units that a forced hit can still take."""
        raise NotImplementedError

    def judge(self, rule: Rule, t: int, cost: int, patience: int, forced: bool) -> tuple[bool, int | None, int]:
        """(allowed, retry_after_us, delay_us) at t, which is `now` already. Only buckets know patience."""
        allowed = forced or cost == 0 or self.fits(rule, t, cost)
        retry = 0 if allowed else self.retry(rule, t, cost)
        return allowed, retry, self.delay(rule, t) if allowed and cost else 0

    def numbers(self, rule: Rule, t: int) -> tuple[int, int]:
        """(remaining, reset_after_us) of the state as it is."""
        most = rule.capacity
        remaining = most - smallest(lambda n: n == most or self.fits(rule, t, most - n), most)
        reset = smallest(lambda w: self.fresh(rule, t + w))
        return remaining, min(reset, WAIT_MAX)

    def retry(self, rule: Rule, t: int, cost: int) -> int | None:
        if cost > rule.capacity:
            return NEVER
        return min(smallest(lambda w: self.fits(rule, t + w, cost)), WAIT_MAX)

    def allows(self, rule: Rule, t: int, cost: int, patience: int = 0, forced: bool = False) -> bool:
        return self.judge(rule, self.now(rule, t), cost, patience, forced)[0]

    def hit(self, rule: Rule, t: int, cost: int, patience: int = 0, forced: bool = False) -> tuple[Verdict, int | None]:
        t = self.now(rule, t)
        allowed, retry, delay = self.judge(rule, t, cost, patience, forced)
        stamp = None
        if allowed and cost:
            stamp = self.take(rule, t, min(cost, self.room(rule, t)) if forced else cost)
        return Verdict(allowed, *self._order(rule, t, retry), delay), stamp

    def peek(self, rule: Rule, t: int, cost: int, patience: int = 0, forced: bool = False) -> Verdict:
        t = self.now(rule, t)
        allowed, retry, delay = self.judge(rule, t, cost, patience, forced)
        return Verdict(allowed, *self._order(rule, t, retry), delay)

    def refund(self, rule: Rule, t: int, cost: int, stamp: int | None = None) -> None:
        t = self.now(rule, t)
        if not self.fresh(rule, t):  # nothing to give back, and no time to remember: a store may have forgotten it
            self.give(rule, t, cost, stamp)

    def _order(self, rule: Rule, t: int, retry: int | None) -> tuple[int, int | None, int]:
        remaining, reset = self.numbers(rule, t)
        return remaining, retry, reset


@dataclass
class FixedWindow(State):
    """For aligned rules times are UTC, for others the store's clock: a window that began on the one clock says nothing on
    the other, so when a rule becomes aligned, or ceases to be, its window has ended."""

    count: int = 0
    start: int | None = None
    aligned: bool = False

    def known(self, rule: Rule) -> bool:
        return self.start is not None and self.aligned == rule.aligned

    def now(self, rule: Rule, t: int) -> int:
        return max(t, self.start) if self.known(rule) else t

    def running(self, rule: Rule, t: int) -> bool:
        return self.known(rule) and t < self.start + rule.period_us

    def fits(self, rule: Rule, t: int, cost: int) -> bool:
        return (self.count if self.running(rule, t) else 0) + cost <= rule.limit

    def room(self, rule: Rule, t: int) -> int:
        return HELD_MAX - (self.count if self.running(rule, t) else 0)

    def take(self, rule: Rule, t: int, cost: int) -> int:
        if not self.running(rule, t):
            self.count, self.start, self.aligned = 0, t, rule.aligned
            if rule.aligned:
                phase = 4 * DAY if rule.period_us % WEEK == 0 else 0
                self.start = (t - phase) // rule.period_us * rule.period_us + phase
        self.count += cost
        return self.start

    def knock(self, rule: Rule, t: int, cost: int) -> None:
        held = self.count if self.running(rule, t) else 0
        self.start = None
        self.take(rule, t, 0)  # a window begins anew now; an aligned one where it began
        self.count = max(held, min(rule.limit, held + cost))

    def fresh(self, rule: Rule, t: int) -> bool:
        return not self.running(rule, t)

    def give(self, rule: Rule, t: int, cost: int, stamp: int | None) -> None:
        if self.running(rule, t) and stamp in (None, self.start):
            self.count = max(0, self.count - cost)


@dataclass
class SlidingLog(State):
    """Entries are [stamp, cost]; an admitted hit drops what has left the period. A refunded entry keeps its place."""

    entries: list[list[int]] = field(default_factory=list)

    def now(self, rule: Rule, t: int) -> int:
        return max(t, self.entries[-1][0]) if self.entries else t

    def used(self, rule: Rule, t: int) -> int:
        return sum(cost for stamp, cost in self.entries if stamp > t - rule.period_us)

    def fits(self, rule: Rule, t: int, cost: int) -> bool:
        return self.used(rule, t) + cost <= rule.limit

    def room(self, rule: Rule, t: int) -> int:
        return LOG_HELD_MAX - self.used(rule, t)

    def take(self, rule: Rule, t: int, cost: int) -> int:
        self.entries = [entry for entry in self.entries if entry[0] > t - rule.period_us]
        step = rule.resolution_us
        if step and self.entries and self.entries[-1][0] // step == t // step:
            self.entries[-1] = [t, self.entries[-1][1] + cost]
        else:
            self.entries.append([t, cost])
        return t

    def knock(self, rule: Rule, t: int, cost: int) -> None:
        """The newest units are kept, as many as the limit; an entry goes whole or stays."""
        before = [entry for entry in self.entries if entry[0] > t - rule.period_us]
        self.take(rule, t, cost)
        merged = len(self.entries) == len(before)
        if merged:
            newest = before[-1][1]
            self.entries[-1][1] = max(newest, min(rule.limit, newest + cost))
        kept, left = before[:-1] if merged else before, sum(entry[1] for entry in before)
        while kept and left - kept[0][1] + cost >= rule.limit:
            left -= kept.pop(0)[1]
        self.entries = [*kept, self.entries[-1]]

    def fresh(self, rule: Rule, t: int) -> bool:
        return self.used(rule, t) == 0

    def give(self, rule: Rule, t: int, cost: int, stamp: int | None) -> None:
        step = rule.resolution_us or 1
        order = range(len(self.entries)) if stamp is None else reversed(range(len(self.entries)))
        for i in order:
            at, had = self.entries[i]
            if at <= t - rule.period_us or (stamp is not None and at // step != stamp // step):
                continue
            given = min(cost, had)
            self.entries[i][1] -= given
            cost -= given


@dataclass
class SlidingCounter(State):
    index: int = 0
    current: int = 0
    previous: int = 0

    def now(self, rule: Rule, t: int) -> int:
        return max(t, self.index * rule.period_us)

    def at(self, rule: Rule, t: int) -> tuple[int, int, int]:
        index = t // rule.period_us
        if index == self.index:
            return index, self.current, self.previous
        if index == self.index + 1:
            return index, 0, self.current
        return index, 0, 0

    def fits(self, rule: Rule, t: int, cost: int) -> bool:
        index, current, previous = self.at(rule, t)
        still = (index + 1) * rule.period_us - t  # of the period, during which the previous window weighs
        return Fraction(previous * still, rule.period_us) <= rule.limit - current - cost

    def room(self, rule: Rule, t: int) -> int:
        return HELD_MAX - self.at(rule, t)[1]

    def take(self, rule: Rule, t: int, cost: int) -> int:
        self.index, self.current, self.previous = self.at(rule, t)
        self.current += cost
        return self.index

    def knock(self, rule: Rule, t: int, cost: int) -> None:
        self.index, current, self.previous = self.at(rule, t)
        self.current = max(current, min(rule.limit, current + cost))

    def fresh(self, rule: Rule, t: int) -> bool:
        return self.at(rule, t)[1:] == (0, 0)

    def give(self, rule: Rule, t: int, cost: int, stamp: int | None) -> None:
        index, current, previous = self.at(rule, t)
        if stamp is None or stamp == index - 1:
            given = min(cost, previous)
            previous -= given
            cost -= given
        if stamp is None or stamp == index:
            current -= min(cost, current)
        self.index, self.current, self.previous = index, current, previous


@dataclass
class Bucket(State):
    """Token bucket and leaky bucket: `level` units have not drained yet at `at`."""

    level: Fraction = NOTHING
    at: int = 0
    leaky: bool = False
    answered: tuple = (None, NOTHING)

    def now(self, rule: Rule, t: int) -> int:
        return max(t, self.at)

    def drained(self, rule: Rule, t: int) -> Fraction:
        asked = (t, self.at, self.level, rule.limit, rule.period_us)
        if self.answered[0] != asked:  # a search for `remaining` asks the same again and again
            # level - (t - at) * limit / period, over the common denominator
            above, below = self.level.numerator * rule.period_us, self.level.denominator
            left = above - (t - self.at) * rule.limit * below
            self.answered = (asked, Fraction(left, below * rule.period_us) if left > 0 else NOTHING)
        return self.answered[1]

    def fits(self, rule: Rule, t: int, cost: int) -> bool:
        return self.drained(rule, t) <= rule.capacity - cost

    def room(self, rule: Rule, t: int) -> Fraction:
        return HELD_MAX - self.drained(rule, t)

    def judge(self, rule: Rule, t: int, cost: int, patience: int, forced: bool) -> tuple[bool, int | None, int]:
        """With patience a hit stands in line: it goes when what stood before it leaves it room (token bucket), or when
        all of that has left (leaky bucket). It is let in if that comes soon enough; what it takes is taken now."""
        if forced or not patience or not cost or cost > rule.capacity:
            return super().judge(rule, t, cost, patience, forced)
        if self.leaky:
            wait = smallest(lambda w: self.fresh(rule, t + w))
        else:
            wait = smallest(lambda w: self.fits(rule, t + w, cost))
        if wait <= patience and self.drained(rule, t) + cost <= HELD_MAX:
            return True, 0, wait
        return False, min(wait, WAIT_MAX), 0

    def take(self, rule: Rule, t: int, cost: int) -> int:
        self.level, self.at = self.drained(rule, t) + cost, t
        return t

    def knock(self, rule: Rule, t: int, cost: int) -> None:
        held = self.drained(rule, t)
        self.level, self.at = max(held, min(Fraction(rule.capacity), held + cost)), t

    def fresh(self, rule: Rule, t: int) -> bool:
        return not self.drained(rule, t)

    def give(self, rule: Rule, t: int, cost: int, stamp: int | None) -> None:
        self.level, self.at = max(NOTHING, self.drained(rule, t) - cost), t

    def delay(self, rule: Rule, t: int) -> int:
        if not self.leaky:
            return 0
        wait = self.drained(rule, t) * rule.period_us / rule.limit
        return min(-(-wait.numerator // wait.denominator), WAIT_MAX)


class Deny(State):
    def allows(self, rule: Rule, t: int, cost: int, patience: int = 0, forced: bool = False) -> bool:
        return False

    def hit(self, rule: Rule, t: int, cost: int, patience: int = 0, forced: bool = False) -> tuple[Verdict, int | None]:
        return Verdict(False, 0, NEVER, 0), None

    def peek(self, rule: Rule, t: int, cost: int, patience: int = 0, forced: bool = False) -> Verdict:
        return Verdict(False, 0, NEVER, 0)

    def refund(self, rule: Rule, t: int, cost: int, stamp: int | None = None) -> None:
        pass


def fresh_state(rule: Rule) -> State:
    return {
        "fixed_window": FixedWindow,
        "sliding_log": SlidingLog,
        "sliding_counter": SlidingCounter,
        "token_bucket": Bucket,
        "leaky_bucket": lambda: Bucket(leaky=True),
        "deny": Deny,
    }[rule.algorithm]()


@dataclass(frozen=True)
class Joint:
    """The decision over several (rule, key) pairs."""

    allowed: bool
    reported: int
    remaining: int
    retry_after_us: int | None
    reset_after_us: int
    delay_us: int
    verdicts: tuple[Verdict, ...]


@dataclass(eq=False)
class Lease:
    """What was taken on an estimate: until its end each part can be settled, then it comes back by itself."""

    until: int
    parts: list[tuple[Rule, object, int, int | None]]  # rule, key, cost, stamp


class Table:
    """Many keys; a key's state belongs to (key, algorithm, period), as counts survive changed limits and bursts."""

    def __init__(self) -> None:
        self.states: dict[tuple, State] = {}
        self.leases: list[Lease] = []

    def key(self, rule: Rule, key: object) -> tuple:
        return (key, rule.algorithm, rule.period_us)

    def state(self, rule: Rule, key: object) -> State:
        return self.states.get(self.key(rule, key)) or fresh_state(rule)

    def decide(
        self,
        targets: list[tuple[Rule, object]],
        t: int,
        cost: int,
        take: bool = True,
        patience: int = 0,
        forced: bool = False,
    ) -> tuple[Joint, list]:
        """All or nothing. Returns the decision and, for refunds, [(rule, key, cost, stamp)] of what was taken."""
        how = (patience, forced)
        allowed = all(self.state(rule, key).allows(rule, t, cost, *how) for rule, key in targets)
        taken: list = []
        if not take or not allowed:
            verdicts = [self.state(rule, key).peek(rule, t, cost, *how) for rule, key in targets]
        else:
            verdicts, seen = [], {}
            for rule, key in targets:
                state = self.states.setdefault(self.key(rule, key), self.state(rule, key)) if cost else self.state(rule, key)
                if self.key(rule, key) in seen:  # the same key and the same rule: a list has no two of equal period
                    delay = seen[self.key(rule, key)]
                    remaining, reset = state.numbers(rule, state.now(rule, t))
                    verdicts.append(Verdict(True, remaining, 0, reset, delay))
                    continue
                verdict, stamp = state.hit(rule, t, cost, *how)
                seen[self.key(rule, key)] = verdict.delay_us
                verdicts.append(verdict)
                if cost:
                    taken.append((rule, key, cost, stamp))
        order = list(range(len(verdicts)))
        far = float("inf")
        if allowed:
            reported = min(order, key=lambda i: (verdicts[i].remaining, -verdicts[i].reset_after_us, i))
        else:
            denied = [i for i in order if not verdicts[i].allowed]
            wait = lambda i: far if verdicts[i].retry_after_us is NEVER else verdicts[i].retry_after_us
            reported = min(denied, key=lambda i: (-wait(i), -verdicts[i].reset_after_us, i))
        joint = Joint(
            allowed,
            reported,
            min(v.remaining for v in verdicts),
            verdicts[reported].retry_after_us,
            verdicts[reported].reset_after_us,
            max((v.delay_us for v in verdicts), default=0) if allowed else 0,
            tuple(verdicts),
        )
        return joint, taken

    def hit(self, targets, t: int, cost: int = 1, patience: int = 0, forced: bool = False):
        return self.decide(targets, t, cost, take=True, patience=patience, forced=forced)

    def peek(self, targets, t: int, cost: int = 1) -> Joint:
        return self.decide(targets, t, cost, take=False)[0]

    def hit_counting_denied(self, targets, t: int, cost: int = 1) -> Joint:
        """A hit that counts also where it is denied: at each rule, as far as the rule has room. What is told is of the state
        after that."""
        joint, _ = self.hit(targets, t, cost)
        if joint.allowed or not cost:
            return joint
        for rule, key in targets:
            if cost > rule.capacity or rule.algorithm == "deny":
                continue
            state = self.states.setdefault(self.key(rule, key), self.state(rule, key))
            now = state.now(rule, t)
            if state.fits(rule, now, cost):
                state.take(rule, now, cost)
            else:
                state.knock(rule, now, cost)
        told = self.peek(targets, t, cost)
        return Joint(False, joint.reported, *(getattr(told, name) for name in
                     ("remaining", "retry_after_us", "reset_after_us", "delay_us", "verdicts")))  # fmt: skip

    def refund(self, targets, t: int, cost: int) -> None:
        """A pair that comes twice is one state: it gives back once, as it was charged once."""
        for rule, key in {self.key(*target): target for target in reversed(targets)}.values():
            if self.key(rule, key) in self.states:
                self.states[self.key(rule, key)].refund(rule, t, cost)

    def refund_taken(self, taken: list, t: int) -> None:
        for rule, key, cost, stamp in taken:
            if self.key(rule, key) in self.states:
                self.states[self.key(rule, key)].refund(rule, t, cost, stamp)

    def reset(self, targets) -> None:
        for rule, key in targets:
            self.states.pop(self.key(rule, key), None)
            for lease in self.leases:
                lease.parts = [part for part in lease.parts if self.key(*part[:2]) != self.key(rule, key)]

    # ---- reservations. Their clock does not go back: what has ended stays ended ----

    def lapse(self, t: int) -> None:
        for lease in sorted((lease for lease in self.leases if lease.until <= t), key=lambda lease: lease.until):
            self.leases.remove(lease)
            for part in lease.parts:
                self.give_part(*part)

    def give_part(self, rule: Rule, key: object, cost: int, stamp: int | None) -> None:
        """As the state was left: what has drained since, drains whatever the rule is by then."""
        if self.key(rule, key) in self.states:
            self.states[self.key(rule, key)].refund(rule, 0, cost, stamp)

    def reserve(self, targets, t: int, cost: int, lease_us: int) -> tuple[Joint, Lease | None]:
        joint, taken = self.hit(targets, t, cost)
        lease = Lease(t + lease_us, taken) if taken else None
        if lease:
            self.leases.append(lease)
        return joint, lease

    def settle(self, lease: Lease, t: int, actual: int, parts: list) -> None:
        """`parts` are those of the reservation as it was made; the lease may have lost some to a reset."""
        lapsed = lease.until <= t
        for rule, key, cost, stamp in parts:
            if lease in self.leases and (rule, key, cost, stamp) in lease.parts and actual < cost:
                self.give_part(rule, key, cost - actual, stamp)
        for rule, key, cost, _ in parts:
            missing = actual - (0 if lapsed else cost)
            if missing > 0:
                self.hit([(rule, key)], t, missing, forced=True)
        if lease in self.leases:
            self.leases.remove(lease)

    def renew(self, lease: Lease, t: int, lease_us: int) -> bool:
        if lease not in self.leases or not lease.parts:
            return False
        self.leases.remove(lease)
        self.leases.append(lease)
        lease.until = t + lease_us
        return True


