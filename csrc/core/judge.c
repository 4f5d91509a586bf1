/* One request under the rules file in force: which policies speak of it, what they say together, how it is answered.
 * Must not enter: YAML, faces, how a new reading comes into force. */
#include "core/gate.h"
#include "core/metrics.h"
#include "identity/client.h"
#include "identity/fields.h"

#include <inttypes.h>

/* The policies that a request meets, and what they make of it. */
typedef struct court {
    const tg_snapshot *now;
    tg_store *store;
    const tg_request *request;
    const tg_decision *const *prior;
    size_t prior_count;
    uint64_t cost;
    tg_judgement *judgement;
    const tg_style *style;                    /* of the policy that is reported */
    /* Those that the request meets, by their place among which tg_result.limiter names them; NULL: not judging with the
     * others. */
    const tg_policy *judging[TG_LIMITERS_MAX];
    size_t judging_count;
} court;

/* What the client is told, in the words of the policy that is reported. */
static void
answer_for(const court *of, tg_answer *answer)
{
    const char *names[TG_LIMITERS_MAX];
    tg_style_facts facts = { .names = names, .name_count = of->judging_count };
    if (of->style->needs_facts) {
        for (size_t i = 0; i < of->judging_count; i++)
            names[i] = of->judging[i] ? of->judging[i]->name : NULL;
        if (of->style->epoch)
            facts.utc_us = tg_store_now_us(of->store) + (uint64_t)tg_store_utc_offset_us(of->store);
    }
    tg__answer_make(of->judgement, of->style, &facts, answer);
}

static void
name_policy(tg_judgement *judgement, const char *name)
{
    memcpy(judgement->policy, name, strlen(name) + 1);
}

/* Limiters that judge together, all or nothing; of each its place among the policies that the request meets. */
typedef struct bench {
    tg_limiter *limiters[TG_LIMITERS_MAX];
    uint64_t costs[TG_LIMITERS_MAX];
    size_t places[TG_LIMITERS_MAX];
    size_t count;
} bench;

static tg_status
judge_together(court *of, const bench *together, tg_error *error)
{
    size_t reported;
    tg_judgement *judgement = of->judgement;
    const tg_status status = tg__limiters_judge(together->limiters, together->costs, together->count, of->request,
                                                of->prior, of->prior_count, judgement, &reported, error);
    if (status == TG_OK && !of->request->peek)
        tg__metrics_judged(together->limiters, together->count, judgement, reported);
    of->style = &of->judging[together->places[reported]]->style;
    const uint16_t own_status = of->style->statuses[judgement->outcome];
    if (status == TG_OK && own_status)
        judgement->status = own_status;
    return status;
}

/* ---- the short way: policies that only judge ---- */

static tg_status
judge_simply(court *of, const size_t *found, size_t count, tg_error *error)
{
    bench together;
    if (count == 0) {
        tg__judgement_unmatched(of->judgement);
        return TG_OK;
    }
    for (size_t i = 0; i < count; i++) {
        of->judging[i] = &of->now->config->policies[found[i]];
        together.limiters[i] = of->now->limiters[found[i]];
        together.costs[i] = of->cost;
        together.places[i] = i;
    }
    together.count = of->judging_count = count;
    return judge_together(of, &together, error);
}

/* ---- the long way ---- */

static uint64_t
times(uint64_t a, uint64_t b)
{
    const tg_u128 product = (tg_u128)a * b;
    return product > TG_LIMIT_MAX ? TG_LIMIT_MAX : (uint64_t)product;
}

/* What one request takes. A value that is no number counts as the most: nobody gains by writing nonsense. */
static uint64_t
cost_of(const tg_cost *cost, const tg_request *request)
{
    char room[TG_VALUE_BYTES_MAX];
    tg_text value;
    uint64_t units;
    bool given = false;
    if (cost->source == TG_COST_HEADER) {
        tg_header_lines lines = tg__header_lines(request, &cost->header);
        given = tg__header_previous(&lines, &value);
        if (given && !tg__header_single(request, &cost->header, &value))
            return cost->most;
    } else if (cost->source == TG_COST_QUERY) {
        given = tg__query_has(request, cost->query);
        if (given && !tg__query_value(request, cost->query, room, &value))
            return cost->most;
    }
    if (!given)
        return cost->units;
    if (!tg__text_number(value, UINT64_MAX, &units) || units > cost->most)
        return cost->most;
    return units < cost->least ? cost->least : units;
}

/* The limiter of the client's plan. Only trusted peers may say it in a header: clients would choose the best. */
static tg_limiter *
limiter_of(const court *of, size_t at)
{
    const tg_policy *policy = &of->now->config->policies[at];
    tg_text plan = of->request->plan;
    if (policy->plan_count == 0)
        return of->now->limiters[at];
    if (plan.length == 0 && (policy->plan_header.length == 0 || !tg__client_trusts(of->now->client, of->request->peer) ||
                             !tg__header_single(of->request, &policy->plan_header, &plan)))
        return of->now->limiters[at];
    for (size_t i = 0; i < policy->plan_count; i++)
        if (policy->plans[i].name.length == plan.length && memcmp(policy->plans[i].name.data, plan.data, plan.length) == 0)
            return of->now->plans[at][i];
    return of->now->limiters[at];
}

static bool
is_on(const court *of, const tg_roll *roll)
{
    return tg__roll_holds(roll, of->now->client, of->request);
}

static tg_status
forbid(court *of, const char *policy, const tg_style *style)
{
    tg_judgement *judgement = of->judgement;
    tg__judgement_unmatched(judgement);
    judgement->outcome = TG_FORBIDDEN;
    judgement->status = style->statuses[TG_FORBIDDEN] ? style->statuses[TG_FORBIDDEN] : 403;
    judgement->decision.allowed = false;
    judgement->decision.retry_after_us = TG_NEVER;
    name_policy(judgement, policy);
    of->style = style;
    of->judging_count = 0;
    return TG_OK;
}

static tg_status
exempt(court *of, const char *policy)
{
    tg__judgement_unmatched(of->judgement);
    of->judgement->outcome = TG_EXEMPT;
    name_policy(of->judgement, policy);
    return TG_OK;
}

static void
count_at(const court *of, size_t at, tg_metric metric)
{
    if (!of->request->peek)
        tg__metrics_one(of->now->limiters[at], metric);
}

static void
take_seat(const court *of, bench *seats, const size_t *found, size_t place)
{
    const tg_policy *policy = &of->now->config->policies[found[place]];
    seats->limiters[seats->count] = limiter_of(of, found[place]);
    seats->costs[seats->count] = times(of->cost, cost_of(&policy->cost, of->request));
    seats->places[seats->count++] = place;
}

/* Results name their policy by its place among all that the request meets. */
static void
name_places(tg_decision *decision, const bench *seats)
{
    for (size_t i = 0; i < decision->result_count; i++)
        decision->results[i].limiter = (uint8_t)seats->places[decision->results[i].limiter];
}

static tg_status
judge_wholly(court *of, const size_t *found, size_t count, tg_error *error)
{
    const tg_config *config = of->now->config;
    tg_judgement *judgement = of->judgement;
    bench together = { .count = 0 };
    tg__judgement_unmatched(judgement);
    if (tg__is_preflight(of->request))
        return TG_OK;
    if (is_on(of, &config->deny))
        return forbid(of, "", &config->style);
    for (size_t i = 0; i < count; i++)
        if (is_on(of, &config->policies[found[i]].deny)) {
            count_at(of, found[i], TG_METRIC_FORBIDDEN);
            return forbid(of, config->policies[found[i]].name, &config->policies[found[i]].style);
        }
    if (count == 0)
        return TG_OK;
    if (is_on(of, &config->exempt)) {
        for (size_t i = 0; i < count; i++)
            count_at(of, found[i], TG_METRIC_EXEMPT);
        return exempt(of, "");
    }
    of->judging_count = count;
    for (size_t i = 0; i < count; i++) {
        const tg_policy *policy = &config->policies[found[i]];
        of->judging[i] = is_on(of, &policy->exempt) ? NULL : policy;
        if (of->judging[i])
            take_seat(of, &together, found, i);
        else
            count_at(of, found[i], TG_METRIC_EXEMPT);
    }
    if (together.count == 0)
        return exempt(of, config->policies[found[0]].name);
    const tg_status status = judge_together(of, &together, error);
    if (status == TG_OK)
        name_places(&judgement->decision, &together);
    return status;
}

tg_status
tg__snapshot_judge(const tg_snapshot *now, tg_store *store, const tg_request *request, uint64_t cost,
                   const tg_decision *const *prior, size_t prior_count, tg_judgement *judgement, tg_answer *answer,
                   tg_error *error)
{
    size_t found[TG_LIMITERS_MAX];
    court of; /* `judging` is not cleared */
    of.now = now;
    of.store = store;
    of.request = request;
    of.prior = prior;
    of.prior_count = prior_count;
    of.cost = cost;
    of.judgement = judgement;
    of.style = &now->config->style;
    of.judging_count = 0;
    if (cost > TG_LIMIT_MAX)
        return tg__error(error, TG_E_ARG, "a cost is at most %" PRIu64 ", not %" PRIu64, TG_LIMIT_MAX, cost);
    const size_t count = tg__config_match(now->config, request, found);
    const tg_status status = now->simple ? judge_simply(&of, found, count, error)
                                         : judge_wholly(&of, found, count, error);
    if (status == TG_OK && answer)
        answer_for(&of, answer);
    return status;
}
