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
        if (policy->settle_place.line == 0 || !now->limiters[i]) /* not met: see `brief` */
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
        .overflow = result->overflow,
    };
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
        if (watched && now->limiters[i]) /* met: see `brief` */
            tg__watch_add(&now->watches[i], now->limiters[i], &policy->pause, status >= 500);
    }
}

bool
tg__settle_begin(tg_settling *settling, const tg_snapshot *now, tg_judgement *judgement, int status,
                 const tg_header *headers, size_t header_count)
{
    const tg_request response = { .headers = headers, .header_count = header_count };
    tg_decision *decision = &judgement->decision;
    bool differs = false;
    if (!judgement->settles || judgement->status != 0)
        return false;
    judgement->settles = false;
    settling->decision = decision;
    settling->phase = TG_SETTLE_BEGINS;
    settling->at = 0;
    settling->status = TG_OK;
    if (judgement->watch_count)
        tell_watches(now, judgement, status);
    for (size_t i = 0; i < decision->result_count; i++) {
        const tg_result *result = &decision->results[i];
        const tg_policy *policy = result->charged ? policy_of(now, &result->rule) : NULL;
        settling->costs[i] = result->cost;
        if (policy && policy->cost.source == TG_COST_RESPONSE)
            settling->costs[i] = cost_told(&policy->cost, &response, result->cost);
        if (policy && !counts(&policy->counted, status))
            settling->costs[i] = 0;
        differs |= settling->costs[i] != result->cost;
    }
    return differs;
}

static void
note_failure(tg_settling *settling, tg_status answer, const tg_error *error)
{
    if (answer == TG_OK || settling->status != TG_OK)
        return;
    settling->status = answer;
    settling->error = *error;
}

/* Takes more from one count, also beyond its limit: the work is done, and the next ones pay. */
static void
ask_to_take(tg_settling *settling, uint64_t units)
{
    tg_result *result = &settling->decision->results[settling->at];
    settling->op = TG_OP_HIT;
    settling->targets[0] = target_of(settling->decision, result, units);
    settling->targets[0].forced = true;
    settling->target_count = 1;
    settling->taken = *result;
}

static bool
ask_to_give(tg_settling *settling)
{
    tg_decision *decision = settling->decision;
    settling->phase = TG_SETTLE_GIVES;
    settling->op = TG_OP_REFUND;
    settling->target_count = 0;
    for (size_t i = 0; i < decision->result_count; i++)
        if (settling->costs[i] < decision->results[i].cost)
            settling->targets[settling->target_count++] =
                target_of(decision, &decision->results[i], decision->results[i].cost - settling->costs[i]);
    return settling->target_count > 0;
}

static void
mark_given(tg_settling *settling)
{
    for (size_t i = 0; i < settling->decision->result_count; i++) {
        tg_result *result = &settling->decision->results[i];
        if (settling->costs[i] < result->cost) {
            result->cost = settling->costs[i];
            result->charged = result->cost > 0;
        }
    }
}

bool
tg__settle_next(tg_settling *settling, tg_status answer, const tg_error *error)
{
    const tg_decision *decision = settling->decision;
    if (settling->phase != TG_SETTLE_BEGINS)
        note_failure(settling, answer, error);
    if (settling->phase == TG_SETTLE_GIVES) {
        if (answer == TG_OK)
            mark_given(settling);
        return false;
    }
    if (settling->phase != TG_SETTLE_BEGINS)
        settling->at++;
    while (settling->at < decision->result_count && settling->costs[settling->at] <= decision->results[settling->at].cost)
        settling->at++;
    if (settling->at == decision->result_count)
        return ask_to_give(settling);
    settling->phase = TG_SETTLE_TAKES;
    ask_to_take(settling, settling->costs[settling->at] - decision->results[settling->at].cost);
    return true;
}
