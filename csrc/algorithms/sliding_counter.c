/* Sliding counter: this window's units and the previous window's, which weigh less with each microsecond. Two numbers
 * instead of a log; the worst case over any period is 2 * limit - 1.
 * In here: arithmetic on values. Not in here: clocks, locks, keys, I/O.
 *
 * Everything is compared in units * period_us, so that no weight is ever rounded: a hit fits when
 * previous * (period - into) + (current + cost) * period <= limit * period. */
#include "algorithms/parts.h"

/* The state brought forward to an instant: `into_us` of window `index` have passed. */
typedef struct tg_window {
    uint64_t index, into_us;
    uint64_t current, previous;
} tg_window;

static tg_window
window_of(const tg_rule *rule, const tg_state *state, uint64_t now_us)
{
    const uint64_t index = now_us / rule->period_us;
    const uint64_t known = state->counter.index;
    if (index < known) /* A clock that goes back counts as the start of the window it was in. */
        return (tg_window){ known, 0, state->counter.current, state->counter.previous };
    const uint64_t into_us = now_us - index * rule->period_us;
    if (index == known)
        return (tg_window){ index, into_us, state->counter.current, state->counter.previous };
    if (index - known == 1)
        return (tg_window){ index, into_us, 0, state->counter.current };
    return (tg_window){ index, into_us, 0, 0 };
}

/* Whole units that the previous window still weighs, rounded up: nothing that would not fit counts as free. */
static uint64_t
weight(const tg_rule *rule, const tg_window *window)
{
    const tg_u128 scaled = (tg_u128)window->previous * (rule->period_us - window->into_us);
    return (uint64_t)tg__ceil_div(scaled, rule->period_us); /* <= previous */
}

static uint64_t
remaining(const tg_rule *rule, const tg_window *window)
{
    return tg__subtract_to_zero(tg__subtract_to_zero(rule->limit, window->current), weight(rule, window));
}

static uint64_t
reset_after_us(const tg_rule *rule, const tg_window *window)
{
    if (window->current == 0 && window->previous == 0)
        return 0;
    return rule->period_us - window->into_us + (window->current > 0 ? rule->period_us : 0);
}

/* How far into a window `fading` units of the one before have faded to `room`; the whole period when room is 0. */
static uint64_t
faded_us(const tg_rule *rule, uint64_t fading, uint64_t room)
{
    return rule->period_us - tg__floor_div((tg_u128)room * rule->period_us, fading);
}

/* The wait for `cost` <= limit units that do not fit now. While `current + cost` fits the limit, fading of the previous
 * window makes the room; else the current window has to become the previous one first and fade in its turn. */
static uint64_t
retry_after_us(const tg_rule *rule, const tg_window *window, uint64_t cost)
{
    const uint64_t room = rule->limit - cost;
    if (window->current <= room)
        return faded_us(rule, window->previous, room - window->current) - window->into_us;
    return rule->period_us - window->into_us + faded_us(rule, window->current, room);
}

/* `left`: what remains before. */
static inline __attribute__((always_inline)) void
decide(const tg_rule *rule, const tg_state *state, tg_window window, uint64_t cost, uint64_t left, bool allowed,
       tg_state *next, tg_verdict *verdict)
{
    tg__state_copy(state, next);
    if (allowed && cost > 0) {
        window.current += cost;
        next->counter.index = window.index;
        next->counter.current = window.current;
        next->counter.previous = window.previous;
    }
    *verdict = (tg_verdict){
        .allowed = allowed,
        .remaining = allowed ? tg__subtract_to_zero(left, cost) : left,
        .retry_after_us = allowed ? 0 : cost > rule->limit ? TG_NEVER : retry_after_us(rule, &window, cost),
        .reset_after_us = reset_after_us(rule, &window),
        .stamp_us = window.index,
    };
}

void
tg__counter_decide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                   tg_verdict *verdict)
{
    const tg_window window = window_of(rule, state, now_us);
    const uint64_t left = remaining(rule, &window);
    /* The weight is rounded up, but cost is whole: the same as in exact parts. */
    decide(rule, state, window, cost, left, cost <= left, next, verdict);
}

void
tg__counter_force(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                  tg_verdict *verdict)
{
    const tg_window window = window_of(rule, state, now_us);
    decide(rule, state, window, tg__forced_cost(window.current, TG_HELD_MAX, cost), remaining(rule, &window), true, next,
           verdict);
}

/* Takes up to *cost units out of *units. */
static void
give(uint64_t *units, uint64_t *cost)
{
    const uint64_t given = *cost < *units ? *cost : *units;
    *units -= given;
    *cost -= given;
}

static void
store(const tg_window *window, tg_state *next)
{
    *next = (tg_state){ .counter = { window->index, window->current, window->previous } };
}

void
tg__counter_count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next)
{
    tg_window window = window_of(rule, state, now_us);
    window.current = tg__held_denied(window.current, rule->limit, cost);
    store(&window, next);
}

void
tg__counter_refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, bool own,
                   uint64_t stamp_us, tg_state *next)
{
    tg_window window = window_of(rule, state, now_us);
    if (window.current == 0 && window.previous == 0) {
        *next = *state; /* fresh: nothing to give, and a state that may as well have been forgotten learns no time */
        return;
    }
    if (!own || (window.index > 0 && stamp_us == window.index - 1))
        give(&window.previous, &cost);
    if (!own || stamp_us == window.index)
        give(&window.current, &cost);
    store(&window, next);
}

void
tg__counter_uncharge(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next)
{
    tg_window window = window_of(rule, state, now_us);
    give(&window.current, &cost);
    give(&window.previous, &cost); /* the window turned between the charge and now */
    store(&window, next);
}

tg_pressure
tg__counter_pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us)
{
    const tg_window window = window_of(rule, state, now_us);
    if (window.current == 0 && window.previous == 0)
        return (tg_pressure){ .fresh_at_us = 0 };
    uint64_t at_us; /* of the clamped clock; a damaged index may lie beyond 64 bits */
    if (__builtin_mul_overflow(window.index, rule->period_us, &at_us))
        at_us = UINT64_MAX;
    at_us = tg__add_saturating(at_us, window.into_us);
    const uint64_t used = tg__add_saturating(window.current, weight(rule, &window));
    return (tg_pressure){
        .fresh_at_us = tg__add_saturating(at_us, reset_after_us(rule, &window)),
        .blocked_until_us = used < rule->limit ? 0 : tg__add_saturating(at_us, retry_after_us(rule, &window, 1)),
        .share = tg__share(used, rule->limit),
    };
}
