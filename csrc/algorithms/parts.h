/* What the files of this room share: one function per algorithm, and the arithmetic none of them may get wrong.
 * Must not enter: anything another room uses; that is algorithms.h. */
#ifndef TG_ALGORITHM_PARTS_H
#define TG_ALGORITHM_PARTS_H

#include "algorithms/algorithms.h"

/* ceil(dividend / divisor). One 64-bit division in all but extreme rules: the 128-bit one is a library call that costs
 * as much as the rest of a decision. */
static inline tg_u128
tg__ceil_div(tg_u128 dividend, uint64_t divisor)
{
    if ((dividend >> 64) == 0) {
        const uint64_t low = (uint64_t)dividend;
        return low == 0 ? 0 : (low - 1) / divisor + 1;
    }
    return (dividend - 1) / divisor + 1;
}

/* floor(dividend / divisor) where the caller knows that it fits 64 bits. */
static inline uint64_t
tg__floor_div(tg_u128 dividend, uint64_t divisor)
{
    return (dividend >> 64) == 0 ? (uint64_t)dividend / divisor : (uint64_t)(dividend / divisor);
}

/* A wait as every store reports it: Lua's doubles and JSON readers hold no more than 2^53 - 1. */
static inline uint64_t
tg__wait_us(tg_u128 wait_us)
{
    return wait_us > TG_WAIT_US_MAX ? TG_WAIT_US_MAX : (uint64_t)wait_us;
}

static inline uint64_t
tg__add_saturating(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static inline uint64_t
tg__subtract_to_zero(uint64_t from, uint64_t what)
{
    return from > what ? from - what : 0;
}

/* What is held when a denied hit counts: no more than the rule holds, and never less than before. */
static inline uint64_t
tg__held_denied(uint64_t held, uint64_t most, uint64_t cost)
{
    if (held >= most)
        return held;
    return cost < most - held ? held + cost : most;
}

/* What a forced hit takes of `cost`. */
static inline uint64_t
tg__forced_cost(uint64_t held, uint64_t most, uint64_t cost)
{
    const uint64_t room = tg__subtract_to_zero(most, held);
    return cost < room ? cost : room;
}

/* used / capacity in 1/65535, rounded up; what does not fit 48 bits is compared by its upper 48, still rounded up. */
static inline uint16_t
tg__share(tg_u128 used, tg_u128 capacity)
{
    if (used == 0)
        return 0;
    if (used >= capacity)
        return UINT16_MAX;
    if ((capacity >> 48) != 0) {
        const uint64_t high = (uint64_t)(capacity >> 64);
        const unsigned bits = high != 0 ? 128 - (unsigned)__builtin_clzll(high)
                                        : 64 - (unsigned)__builtin_clzll((uint64_t)capacity);
        const unsigned shift = bits - 48;
        capacity >>= shift;
        used = (used >> shift) + 1;
    }
    const uint64_t share = ((uint64_t)used * UINT16_MAX + (uint64_t)capacity - 1) / (uint64_t)capacity;
    return share > UINT16_MAX ? UINT16_MAX : (uint16_t)share;
}

void tg__fixed_decide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                       tg_verdict *verdict);
void tg__fixed_force(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                     tg_verdict *verdict);
void tg__fixed_count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next);
void tg__counter_count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next);
void tg__bucket_count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next);
void tg__fixed_refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, bool own,
                      uint64_t stamp_us, tg_state *next);
tg_pressure tg__fixed_pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us);

void tg__counter_decide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                         tg_verdict *verdict);
void tg__counter_force(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                       tg_verdict *verdict);
void tg__counter_refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, bool own,
                        uint64_t stamp_us, tg_state *next);
/* Without the newest `cost` units: those of this request itself. */
void tg__counter_uncharge(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next);
tg_pressure tg__counter_pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us);

void tg__bucket_decide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                        tg_verdict *verdict);
void tg__bucket_decide_on_terms(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost,
                                tg_terms terms, tg_state *next, tg_verdict *verdict);
void tg__bucket_refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next);
tg_pressure tg__bucket_pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us);

#endif
