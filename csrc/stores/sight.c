/* From states that were seen to the numbers a client is told, by the same functions that every store uses.
 * Must not enter: where a sight comes from, clocks, I/O. */
#include "stores/sight.h"

/* A clock that goes back counts as the newest entry. */
static uint64_t
log_now(const tg_sight *sight, uint64_t now_us)
{
    return sight->log.newest_us >= 0 && (uint64_t)sight->log.newest_us > now_us ? (uint64_t)sight->log.newest_us : now_us;
}

static tg_terms
terms_of(const tg_target *target)
{
    return (tg_terms){ .patience_us = target->patience_us, .forced = target->forced && !target->charged };
}

/* What a hit takes of a log. */
static uint64_t
log_cost(const tg_target *target, const tg_sight *sight)
{
    const uint64_t room = sight->log.units < TG_LOG_HELD_MAX ? TG_LOG_HELD_MAX - sight->log.units : 0;
    return terms_of(target).forced && target->cost > room ? room : target->cost;
}

/* The log's, from what was found in it. */
static tg_verdict
log_verdict(const tg_target *target, const tg_sight *sight, uint64_t now_us)
{
    const tg_rule *rule = target->rule;
    now_us = log_now(sight, now_us);
    const uint64_t own = !target->charged ? 0 : target->cost < sight->log.units ? target->cost : sight->log.units;
    const uint64_t used = sight->log.units - own;
    const uint64_t room = rule->limit > used ? rule->limit - used : 0;
    const bool forced = terms_of(target).forced;
    const uint64_t cost = log_cost(target, sight);
    tg_verdict verdict = { .allowed = forced || cost <= room, .remaining = room, .stamp_us = now_us };
    if (sight->log.last_us >= 0)
        verdict.reset_after_us = (uint64_t)sight->log.last_us + rule->period_us - now_us;
    if (verdict.allowed) {
        verdict.remaining = room > cost ? room - cost : 0;
        if (cost > 0 && !target->charged)
            verdict.reset_after_us = rule->period_us;
    } else {
        verdict.retry_after_us = target->cost > rule->limit
                                     ? TG_NEVER
                                     : (uint64_t)sight->log.makes_room_us + rule->period_us - now_us;
    }
    return verdict;
}

/* Of the state as it is, nothing taken. */
static void
tell_untouched(const tg_rule *rule, const tg_sight *sight, uint64_t now_us, tg_verdict *verdict)
{
    if (rule->algorithm == TG_SLIDING_LOG) {
        now_us = log_now(sight, now_us);
        verdict->remaining = rule->limit > sight->log.units ? rule->limit - sight->log.units : 0;
        verdict->reset_after_us =
            sight->log.last_us >= 0 ? (uint64_t)sight->log.last_us + rule->period_us - now_us : 0;
        return;
    }
    tg_state unwritten;
    const tg_verdict untouched = tg__decide(rule, &sight->state, now_us, 0, &unwritten);
    verdict->remaining = untouched.remaining;
    verdict->reset_after_us = untouched.reset_after_us;
}

static tg_verdict
verdict_of(const tg_target *target, const tg_sight *sight, uint64_t now_us, tg_state *next)
{
    if (target->rule->algorithm == TG_SLIDING_LOG)
        return log_verdict(target, sight, now_us);
    *next = sight->state;
    if (target->charged)
        return tg__decide_charged(target->rule, &sight->state, now_us, target->cost);
    if (target->forced || target->patience_us > 0) {
        tg_verdict verdict;
        tg__decide_on_terms(target->rule, &sight->state, now_us, target->cost, terms_of(target), next, &verdict);
        return verdict;
    }
    return tg__decide(target->rule, &sight->state, now_us, target->cost, next);
}

/* What a hit has made of a state. */
static tg_sight
taken_from(const tg_target *target, const tg_sight *sight, const tg_state *next, uint64_t now_us)
{
    tg_sight after = *sight;
    if (target->rule->algorithm == TG_SLIDING_LOG) {
        if (sight->log.newest_us < (int64_t)now_us)
            after.log.newest_us = (int64_t)now_us;
        after.log.units += log_cost(target, sight);
        after.log.last_us = after.log.newest_us;
    } else {
        after.state = *next;
    }
    return after;
}

void
tg__sight_take(const tg_target *target, tg_sight *sight)
{
    tg_state next = { 0 };
    verdict_of(target, sight, sight->now_us, &next);
    *sight = taken_from(target, sight, &next, sight->now_us);
}

bool
tg__sights_tell(tg_op op, const tg_target *targets, const uint8_t *first_of, size_t target_count, bool denied,
                const tg_sight *sights, uint64_t now_us, int expected, tg_result *results)
{
    tg_state next[TG_TARGETS_MAX];
    tg_verdict verdicts[TG_TARGETS_MAX];
    bool fits = true;
    for (size_t i = 0; i < target_count; i++) {
        if (targets[i].rule->algorithm == TG_DENY) {
            verdicts[i] = (tg_verdict){ .retry_after_us = TG_NEVER };
            continue;
        }
        verdicts[i] = verdict_of(&targets[i], &sights[i], now_us, &next[i]);
        if (verdicts[i].reset_after_us > TG_WAIT_US_MAX ||
            (verdicts[i].retry_after_us > TG_WAIT_US_MAX && verdicts[i].retry_after_us != TG_NEVER))
            return false; /* a time that nobody could have found in that log */
        fits = fits && verdicts[i].allowed;
    }
    if (expected >= 0 && fits != (expected != 0))
        return false;
    const bool taken = op == TG_OP_HIT && fits && !denied;
    for (size_t i = 0; i < target_count; i++) {
        tg_verdict *verdict = &verdicts[i];
        const size_t first = first_of[i];
        const tg_target *payer = &targets[first];
        const bool paid = taken && !payer->charged && payer->cost > 0;
        bool charged = false;
        if (targets[i].rule->algorithm == TG_DENY) {
            ;
        } else if (first != i) { /* a second rule on the same counts: charged once, it tells of the state after that */
            const tg_sight after = paid ? taken_from(payer, &sights[first], &next[first], now_us) : sights[i];
            tell_untouched(targets[i].rule, &after, now_us, verdict);
        } else if (paid) {
            charged = true;
        } else if (verdict->allowed && targets[i].cost > 0) { /* taken by none, or paid before: as it stands now */
            tell_untouched(targets[i].rule, &sights[i], now_us, verdict);
        }
        tg_result *result = &results[i];
        result->allowed = verdict->allowed;
        result->charged = charged;
        result->overflow = false;
        result->remaining = verdict->remaining;
        result->retry_after_us = verdict->retry_after_us;
        result->reset_after_us = verdict->reset_after_us;
        result->delay_us = verdict->delay_us;
        result->stamp_us = verdict->stamp_us;
    }
    return true;
}

bool
tg__sight_fits(const tg_target *target, const tg_sight *sight, uint64_t now_us)
{
    tg_state next;
    return verdict_of(target, sight, now_us, &next).allowed;
}

bool
tg__sight_holds(const tg_target *target, const tg_sight *sight, uint64_t asked_cost, uint64_t now_us)
{
    const tg_rule *rule = target->rule;
    if (rule->algorithm != TG_SLIDING_LOG)
        return true;
    if (sight->log.units == 0)
        return true;
    if (sight->log.leaves_us < 0 || now_us >= (uint64_t)sight->log.leaves_us + rule->period_us)
        return false;
    const uint64_t room = rule->limit > sight->log.units ? rule->limit - sight->log.units : 0;
    return target->cost <= room || target->cost > rule->limit ||
           (target->cost == asked_cost && sight->log.makes_room_us >= 0);
}
