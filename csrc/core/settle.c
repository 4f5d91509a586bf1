/* What is known only after the response: whether it counts, and what it cost.
 *
 * It was taken before, and what should not have been is given back. The other way round, taking afterwards, requests that
 * run at the same time would all pass a limit of which one place is left.
 * Must not enter: deciding. */
#include "core/gate.h"
#include "identity/headers.h"

static bool
has_scope(const tg_limiter *limiter, const tg_rule *rule)
{
    for (size_t i = 0; i < limiter->rule_count; i++)
        if (memcmp(limiter->rules[i].scope, rule->scope, sizeof rule->scope) == 0)
            return true;
    return false;
}

/* The policy that a rule is of, by the counts it shares: places in the file may have changed since. */
static const tg_policy *
policy_of(const tg_snapshot *now, const tg_rule *rule)
{
    for (size_t i = 0; i < now->limiter_count; i++) {
        const tg_policy *policy = &now->config->policies[i];
        if (policy->settle_place.line == 0)
            continue;
        if (has_scope(now->limiters[i], rule))
            return policy;
        for (size_t k = 0; k < policy->plan_count; k++)
            if (has_scope(now->plans[i][k], rule))
                return policy;
    }
    return NULL;
}

static bool
counts(const tg_counted *counted, int status)
{
    if (!counted->some)
        return true;
    return status >= 100 && status <= 599 && (counted->statuses[(status - 100) / 8] >> (status - 100) % 8 & 1);
}

/* What the response says it cost; what was reserved where it does not say, the most where it says no number. */
static uint64_t
cost_told(const tg_cost *cost, const tg_request *response, uint64_t reserved)
{
    tg_header_lines lines = tg__header_lines(response, &cost->header);
    tg_text value;
    uint64_t units;
    if (!tg__header_previous(&lines, &value))
        return reserved;
    if (!tg__header_single(response, &cost->header, &value) || !tg__text_number(value, cost->most, &units))
        return cost->most;
    return units < cost->least ? cost->least : units;
}

static tg_target
target_of(tg_decision *decision, tg_result *result, uint64_t cost)
{
    return (tg_target){
        .rule = &result->rule,
        .identity = &decision->identities[result->identity],
        .cost = cost,
        .stamp_us = result->stamp_us,
        .own = true,
    };
}

/* Takes more from one count: all of it, or as much as is left. */
static tg_status
take_more(tg_store *store, tg_decision *decision, tg_result *result, uint64_t units, tg_error *error)
{
    tg_target target = target_of(decision, result, units);
    tg_result taken = *result;
    tg_status status = store->ops->apply(store, TG_OP_HIT, &target, 1, &taken, NULL, error);
    if (status == TG_OK && !taken.allowed && taken.remaining > 0) {
        target.cost = units = taken.remaining;
        status = store->ops->apply(store, TG_OP_HIT, &target, 1, &taken, NULL, error);
    }
    return status;
}

/* Policies that watch how their requests are answered; those that a reload has taken away since are no longer there. */
static void
tell_watches(const tg_snapshot *now, const tg_judgement *judgement, int status)
{
    for (size_t i = 0; now->watches && i < now->limiter_count; i++) {
        const tg_policy *policy = &now->config->policies[i];
        bool watched = false;
        for (size_t k = 0; policy->pause.period_us && k < judgement->watch_count; k++)
            watched |= judgement->watches[k] == policy->watch;
        if (watched)
            tg__watch_add(&now->watches[i], now->limiters[i], &policy->pause, status >= 500);
    }
}

tg_status
tg__snapshot_settle(const tg_snapshot *now, tg_store *store, tg_judgement *judgement, int status,
                    const tg_header *headers, size_t header_count, tg_error *error)
{
    const tg_request response = { .headers = headers, .header_count = header_count };
    tg_decision *decision = &judgement->decision;
    tg_target targets[TG_TARGETS_MAX];
    tg_result *given[TG_TARGETS_MAX];
    tg_status settled = TG_OK;
    size_t count = 0;
    if (!judgement->settles || judgement->status != 0)
        return TG_OK;
    judgement->settles = false;
    if (judgement->watch_count)
        tell_watches(now, judgement, status);
    for (size_t i = 0; i < decision->result_count; i++) {
        tg_result *result = &decision->results[i];
        const tg_policy *policy = result->charged ? policy_of(now, &result->rule) : NULL;
        if (!policy)
            continue;
        uint64_t cost = policy->cost.source == TG_COST_RESPONSE ? cost_told(&policy->cost, &response, result->cost)
                                                                : result->cost;
        if (!counts(&policy->counted, status))
            cost = 0;
        if (cost > result->cost) {
            const tg_status taken = take_more(store, decision, result, cost - result->cost, error);
            settled = settled == TG_OK ? taken : settled;
        } else if (cost < result->cost) {
            given[count] = result;
            targets[count++] = target_of(decision, result, result->cost - cost);
        }
    }
    if (count == 0)
        return settled;
    const tg_status back = store->ops->apply(store, TG_OP_REFUND, targets, count, NULL, NULL, error);
    for (size_t i = 0; back == TG_OK && i < count; i++) {
        given[i]->cost -= targets[i].cost;
        given[i]->charged = given[i]->cost > 0;
    }
    return settled == TG_OK ? back : settled;
}
