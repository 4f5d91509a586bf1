/* From a rule's algorithm to its functions. The sliding log is not here: its state is a sequence, see sliding_log.c.
 * Must not enter: any arithmetic of an algorithm. */
#include "algorithms/parts.h"

/* The answer of `deny`, and of a log rule that was handed here by mistake: refusing is the safe one of the two. */
static const tg_verdict denied = { .allowed = false, .retry_after_us = TG_NEVER };

TG_EACH_REQUEST void
tg__decide_into(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                tg_verdict *verdict)
{
    switch (rule->algorithm) {
    case TG_TOKEN_BUCKET:
    case TG_LEAKY_BUCKET:
        tg__bucket_decide(rule, state, now_us, cost, next, verdict);
        break;
    case TG_FIXED_WINDOW:
        tg__fixed_decide(rule, state, now_us, cost, next, verdict);
        break;
    case TG_SLIDING_COUNTER:
        tg__counter_decide(rule, state, now_us, cost, next, verdict);
        break;
    default:
        *next = *state;
        *verdict = denied;
        break;
    }
}

void
tg__decide_on_terms(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_terms terms,
                    tg_state *next, tg_verdict *verdict)
{
    if (rule->algorithm == TG_TOKEN_BUCKET || rule->algorithm == TG_LEAKY_BUCKET)
        tg__bucket_decide_on_terms(rule, state, now_us, cost, terms, next, verdict);
    else if (terms.forced && rule->algorithm == TG_FIXED_WINDOW)
        tg__fixed_force(rule, state, now_us, cost, next, verdict);
    else if (terms.forced && rule->algorithm == TG_SLIDING_COUNTER)
        tg__counter_force(rule, state, now_us, cost, next, verdict);
    else
        tg__decide_into(rule, state, now_us, cost, next, verdict);
}

void
tg__count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next)
{
    if (rule->algorithm == TG_TOKEN_BUCKET || rule->algorithm == TG_LEAKY_BUCKET)
        tg__bucket_count_denied(rule, state, now_us, cost, next);
    else if (rule->algorithm == TG_FIXED_WINDOW)
        tg__fixed_count_denied(rule, state, now_us, cost, next);
    else if (rule->algorithm == TG_SLIDING_COUNTER)
        tg__counter_count_denied(rule, state, now_us, cost, next);
    else
        *next = *state;
}

bool
tg__refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, bool own, uint64_t stamp_us,
           tg_state *next)
{
    const tg_state before = *state; /* `next` may be `state` */
    switch (rule->algorithm) {
    case TG_TOKEN_BUCKET:
    case TG_LEAKY_BUCKET:
        tg__bucket_refund(rule, &before, now_us, cost, next);
        break;
    case TG_FIXED_WINDOW:
        tg__fixed_refund(rule, &before, now_us, cost, own, stamp_us, next);
        break;
    case TG_SLIDING_COUNTER:
        tg__counter_refund(rule, &before, now_us, cost, own, stamp_us, next);
        break;
    default:
        *next = before;
        break;
    }
    return memcmp(&before, next, sizeof before) != 0;
}

tg_verdict
tg__decide_charged(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost)
{
    tg_state without = *state;
    switch (rule->algorithm) {
    case TG_TOKEN_BUCKET:
    case TG_LEAKY_BUCKET:
        tg__bucket_refund(rule, state, now_us, cost, &without);
        break;
    case TG_FIXED_WINDOW:
        tg__fixed_refund(rule, state, now_us, cost, false, 0, &without);
        break;
    case TG_SLIDING_COUNTER:
        tg__counter_uncharge(rule, state, now_us, cost, &without);
        break;
    default:
        break;
    }
    tg_state unwritten;
    return tg__decide(rule, &without, now_us, cost, &unwritten);
}

tg_pressure
tg__pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us)
{
    switch (rule->algorithm) {
    case TG_TOKEN_BUCKET:
    case TG_LEAKY_BUCKET:
        return tg__bucket_pressure(rule, state, now_us);
    case TG_FIXED_WINDOW:
        return tg__fixed_pressure(rule, state, now_us);
    case TG_SLIDING_COUNTER:
        return tg__counter_pressure(rule, state, now_us);
    default:
        return (tg_pressure){ .fresh_at_us = 0 };
    }
}
