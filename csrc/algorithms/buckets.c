/* Token bucket (also called GCRA) and leaky bucket: one state, one rule; the leaky one also says how long to hold a hit.
 * A unit weighs period_us and each microsecond drains `limit`, so that 10 000 000/second and 1/year are both exact;
 * `level` is what has not drained yet, uncut when a limit was lowered meanwhile. Passes up to burst + limit a period.
 * In here: arithmetic on values. Not in here: clocks, locks, keys, I/O. */
#include "algorithms/parts.h"

/* No rule fills a bucket above 10^10 * 10 years < 2^82; a damaged level is cut here so that sums cannot wrap. */
#define LEVEL_HIGH_MAX (UINT64_C(1) << 36)

typedef struct tg_level {
    tg_u128 level; /* drained to now_us */
    uint64_t now_us;
} tg_level;

static inline tg_level
level_of(const tg_rule *rule, const tg_state *state, uint64_t now_us)
{
    const uint64_t at_us = state->bucket.at_us;
    if (now_us < at_us)
        now_us = at_us; /* A clock that goes back grants nothing and locks nobody out. */
    const uint64_t passed_us = now_us - at_us;
    if (state->bucket.level_high == 0) {
        uint64_t drained;
        if (__builtin_mul_overflow(passed_us, rule->limit, &drained))
            return (tg_level){ 0, now_us };
        return (tg_level){ tg__subtract_to_zero(state->bucket.level_low, drained), now_us };
    }
    const uint64_t high = state->bucket.level_high < LEVEL_HIGH_MAX ? state->bucket.level_high : LEVEL_HIGH_MAX;
    const tg_u128 level = ((tg_u128)high << 64) | state->bucket.level_low;
    const tg_u128 drained = (tg_u128)passed_us * rule->limit;
    return (tg_level){ level > drained ? level - drained : 0, now_us };
}

static inline void
store(tg_level bucket, tg_state *next)
{
    next->bucket.level_low = (uint64_t)bucket.level;
    next->bucket.level_high = (uint64_t)(bucket.level >> 64);
    next->bucket.at_us = bucket.now_us;
}

/* The decision where every product fits 64 bits, which is all but extreme rules: as below, in half the instructions.
 * false: it does not fit. */
static inline bool
decide_narrow(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
              tg_verdict *verdict)
{
    const uint64_t at_us = state->bucket.at_us, period_us = rule->period_us, limit = rule->limit;
    if (now_us < at_us)
        now_us = at_us;
    uint64_t drained, capacity, wanted, level = state->bucket.level_low;
    if (state->bucket.level_high != 0 || __builtin_mul_overflow(rule->burst, period_us, &capacity) ||
        __builtin_mul_overflow(cost, period_us, &wanted))
        return false;
    if (__builtin_mul_overflow(now_us - at_us, limit, &drained))
        drained = UINT64_MAX; /* no level lasts so long */
    level = tg__subtract_to_zero(level, drained);
    if (__builtin_add_overflow(wanted, level, &wanted))
        return false;
    verdict->stamp_us = now_us;
    verdict->delay_us = 0;
    verdict->allowed = cost == 0 || wanted <= capacity;
    if (__builtin_expect(!verdict->allowed, 0)) {
        *next = *state;
        verdict->remaining = level >= capacity ? 0 : (capacity - level) / period_us;
        verdict->retry_after_us = cost > rule->burst ? TG_NEVER : tg__wait_us(tg__ceil_div(wanted - capacity, limit));
        verdict->reset_after_us = tg__wait_us(tg__ceil_div(level, limit));
        return true;
    }
    verdict->remaining = wanted >= capacity ? 0 : (capacity - wanted) / period_us;
    verdict->retry_after_us = 0;
    verdict->reset_after_us = tg__wait_us(tg__ceil_div(wanted, limit));
    if (cost == 0) {
        *next = *state;
        return true;
    }
    if (rule->algorithm == TG_LEAKY_BUCKET)
        verdict->delay_us = tg__wait_us(tg__ceil_div(level, limit));
    next->bucket.level_low = wanted;
    next->bucket.level_high = 0;
    next->bucket.at_us = now_us;
    return true;
}

static __attribute__((noinline)) void
decide_wide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
            tg_verdict *verdict)
{
    const tg_level bucket = level_of(rule, state, now_us);
    const tg_u128 capacity = (tg_u128)rule->burst * rule->period_us;
    const tg_u128 wanted = bucket.level + (tg_u128)cost * rule->period_us;
    const bool allowed = cost == 0 || wanted <= capacity;
    const tg_u128 held = allowed ? wanted : bucket.level;
    *next = *state;
    if (allowed && cost > 0)
        store((tg_level){ wanted, bucket.now_us }, next);
    *verdict = (tg_verdict){
        .allowed = allowed,
        .remaining = held >= capacity ? 0 : tg__floor_div(capacity - held, rule->period_us),
        .retry_after_us = allowed              ? 0
                          : cost > rule->burst ? TG_NEVER
                                               : tg__wait_us(tg__ceil_div(wanted - capacity, rule->limit)),
        .reset_after_us = tg__wait_us(tg__ceil_div(held, rule->limit)),
        .delay_us = rule->algorithm == TG_LEAKY_BUCKET && allowed && cost > 0
                        ? tg__wait_us(tg__ceil_div(bucket.level, rule->limit))
                        : 0,
        .stamp_us = bucket.now_us,
    };
}

TG_EACH_REQUEST void
tg__bucket_decide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                  tg_verdict *verdict)
{
    if (__builtin_expect(!decide_narrow(rule, state, now_us, cost, next, verdict), 0))
        decide_wide(rule, state, now_us, cost, next, verdict);
}

/* Levels stay below 2^49 units of ten years (2^98) and patience below 2^53 us at 2^34 units each: no sum wraps. */
void
tg__bucket_decide_on_terms(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_terms terms,
                           tg_state *next, tg_verdict *verdict)
{
    const tg_level bucket = level_of(rule, state, now_us);
    const tg_u128 capacity = (tg_u128)rule->burst * rule->period_us;
    const tg_u128 most = (tg_u128)TG_HELD_MAX * rule->period_us;
    tg_u128 wanted = bucket.level + (tg_u128)cost * rule->period_us;
    /* What has to drain before it goes. */
    const tg_u128 before = rule->algorithm == TG_LEAKY_BUCKET ? bucket.level
                           : wanted > capacity                ? wanted - capacity
                                                              : 0;
    const uint64_t wait_us = tg__wait_us(tg__ceil_div(before, rule->limit));
    const bool waits = terms.patience_us > 0 && cost <= rule->burst && wanted <= most &&
                       before <= (tg_u128)terms.patience_us * rule->limit;
    *next = *state;
    if (cost == 0 || (terms.patience_us == 0 && !terms.forced)) {
        tg__bucket_decide(rule, state, now_us, cost, next, verdict);
        return;
    }
    if (terms.forced && wanted > most)
        wanted = bucket.level > most ? bucket.level : most;
    const bool allowed = terms.forced || waits;
    const tg_u128 held = allowed ? wanted : bucket.level;
    if (allowed)
        store((tg_level){ wanted, bucket.now_us }, next);
    *verdict = (tg_verdict){
        .allowed = allowed,
        .remaining = held >= capacity ? 0 : tg__floor_div(capacity - held, rule->period_us),
        .retry_after_us = allowed ? 0 : cost > rule->burst ? TG_NEVER : wait_us,
        .reset_after_us = tg__wait_us(tg__ceil_div(held, rule->limit)),
        .delay_us = allowed && (!terms.forced || rule->algorithm == TG_LEAKY_BUCKET) ? wait_us : 0,
        .stamp_us = bucket.now_us,
    };
}

void
tg__bucket_count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next)
{
    tg_level bucket = level_of(rule, state, now_us);
    const tg_u128 capacity = (tg_u128)rule->burst * rule->period_us, wanted = bucket.level + (tg_u128)cost * rule->period_us;
    if (bucket.level < capacity)
        bucket.level = wanted < capacity ? wanted : capacity;
    store(bucket, next);
}

void
tg__bucket_refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next)
{
    tg_level bucket = level_of(rule, state, now_us);
    if (bucket.level == 0) {
        *next = *state; /* fresh: nothing to give, and a state that may as well have been forgotten learns no time */
        return;
    }
    const tg_u128 given = (tg_u128)cost * rule->period_us;
    bucket.level = bucket.level > given ? bucket.level - given : 0;
    store(bucket, next);
}

tg_pressure
tg__bucket_pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us)
{
    const tg_level bucket = level_of(rule, state, now_us);
    if (bucket.level == 0)
        return (tg_pressure){ .fresh_at_us = 0 };
    const tg_u128 capacity = (tg_u128)rule->burst * rule->period_us;
    const tg_u128 wanted = bucket.level + rule->period_us;
    return (tg_pressure){
        .fresh_at_us = tg__add_saturating(bucket.now_us, tg__wait_us(tg__ceil_div(bucket.level, rule->limit))),
        .blocked_until_us =
            wanted <= capacity
                ? 0
                : tg__add_saturating(bucket.now_us, tg__wait_us(tg__ceil_div(wanted - capacity, rule->limit))),
        .share = tg__share(bucket.level, capacity),
    };
}
