/* Fixed window: a count that begins anew when its window has ended. Passes up to 2 * limit across an edge; the grammar
 * chooses it only where it is named or `aligned`.
 * In here: arithmetic on values. Not in here: clocks, locks, keys, I/O. */
#include "algorithms/parts.h"

#define DAY_US UINT64_C(86400000000)
#define WEEK_US (7 * DAY_US)

/* `running` says which clock `start_us` was read from: the store's, or UTC for an aligned rule. The two lie decades
 * apart, so a start of the other kind would lock its client out for as long; a window of the other kind has ended. */
enum { WINDOW_NONE = 0, WINDOW_PLAIN = 1, WINDOW_ALIGNED = 2 };

/* Times are compared signed: the week that holds 1 January 1970 began three days before it. */
typedef struct tg_window {
    bool running;
    uint64_t count;
    uint64_t start_us;
    uint64_t now_us;   /* never before start_us while running */
    uint64_t rest_us;  /* until the running window ends */
} tg_window;

uint64_t
tg__aligned_start_us(uint64_t period_us, uint64_t utc_us)
{
    const uint64_t phase_us = period_us % WEEK_US == 0 ? 4 * DAY_US : 0; /* 1 January 1970 was a Thursday */
    if (utc_us >= phase_us)
        return utc_us - (utc_us - phase_us) % period_us;
    const uint64_t before_us = phase_us - utc_us;
    const uint64_t windows = (before_us - 1) / period_us + 1;
    return phase_us - windows * period_us; /* before 1970: two's complement */
}

static tg_window
window_of(const tg_rule *rule, const tg_state *state, uint64_t now_us)
{
    if (now_us > INT64_MAX)
        now_us = INT64_MAX;
    tg_window window = { .now_us = now_us };
    if (state->fixed.running != (rule->aligned ? WINDOW_ALIGNED : WINDOW_PLAIN))
        return window;
    const uint64_t start_us = state->fixed.start_us;
    if ((int64_t)now_us < (int64_t)start_us)
        now_us = start_us; /* a clock that goes back grants nothing, and an aligned window's index never goes down */
    const uint64_t into_us = now_us - start_us;
    window.now_us = now_us;
    if (into_us < rule->period_us) {
        window.running = true;
        window.count = state->fixed.count;
        window.start_us = start_us;
        window.rest_us = rule->period_us - into_us;
    }
    return window;
}

static inline __attribute__((always_inline)) void
decide(const tg_rule *rule, const tg_state *state, tg_window window, uint64_t cost, bool allowed, tg_state *next,
       tg_verdict *verdict)
{
    tg__state_copy(state, next);
    if (allowed && cost > 0) {
        if (!window.running) { /* only an admitted hit starts a window: knocking or looking moves nothing */
            window.start_us = rule->aligned ? tg__aligned_start_us(rule->period_us, window.now_us) : window.now_us;
            window.rest_us = rule->period_us - (window.now_us - window.start_us);
        }
        window.count += cost;
        next->fixed.count = window.count;
        next->fixed.start_us = window.start_us;
        next->fixed.running = rule->aligned ? WINDOW_ALIGNED : WINDOW_PLAIN;
    }
    *verdict = (tg_verdict){
        .allowed = allowed,
        .remaining = tg__subtract_to_zero(rule->limit, window.count),
        .retry_after_us = allowed ? 0 : cost > rule->limit ? TG_NEVER : window.rest_us,
        .reset_after_us = window.rest_us,
        .stamp_us = window.start_us,
    };
}

void
tg__fixed_decide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                 tg_verdict *verdict)
{
    const tg_window window = window_of(rule, state, now_us);
    const bool fits = cost <= tg__subtract_to_zero(rule->limit, window.count);
    decide(rule, state, window, cost, fits, next, verdict);
}

void
tg__fixed_force(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                tg_verdict *verdict)
{
    const tg_window window = window_of(rule, state, now_us);
    decide(rule, state, window, tg__forced_cost(window.count, TG_HELD_MAX, cost), true, next, verdict);
}

void
tg__fixed_count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next)
{
    const tg_window window = window_of(rule, state, now_us);
    const uint64_t start_us = rule->aligned ? tg__aligned_start_us(rule->period_us, window.now_us) : window.now_us;
    *next = (tg_state){ .fixed = { tg__held_denied(window.count, rule->limit, cost), start_us,
                                   rule->aligned ? WINDOW_ALIGNED : WINDOW_PLAIN } };
}

void
tg__fixed_refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, bool own,
                 uint64_t stamp_us, tg_state *next)
{
    const tg_window window = window_of(rule, state, now_us);
    *next = *state;
    if (window.running && (!own || stamp_us == window.start_us))
        next->fixed.count = tg__subtract_to_zero(window.count, cost);
}

tg_pressure
tg__fixed_pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us)
{
    const tg_window window = window_of(rule, state, now_us);
    if (!window.running)
        return (tg_pressure){ .fresh_at_us = 0 };
    const uint64_t ends_at_us = window.now_us + window.rest_us; /* both below 2^63 */
    return (tg_pressure){
        .fresh_at_us = ends_at_us,
        .blocked_until_us = window.count >= rule->limit ? ends_at_us : 0,
        .share = tg__share(window.count, rule->limit),
    };
}
