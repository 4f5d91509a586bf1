/* One request under the rules file in force: which policies speak of it, what they say together, how it is answered.
 * Must not enter: YAML, faces, how a new reading comes into force. */
#include "core/gate.h"
#include "core/inquiry.h"
#include "core/metrics.h"
#include "identity/client.h"
#include "identity/fields.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

/* The policies that a request meets, and what they make of it. */
typedef struct court {
    const tg_snapshot *now;
    tg_store *store;
    const tg_matter *matter;
    const tg_request *request; /* the matter's */
    tg_judgement *judgement;
    const size_t *found;                      /* the policies that the request meets, by their place in the file */
    const tg_style *style;                    /* of the policy that is reported */
    /* Those that the request meets, by their place among which tg_result.limiter names them; NULL: not judging with the
     * others. */
    const tg_policy *judging[TG_LIMITERS_MAX];
    size_t judging_count;
} court;

/* Where policies sit: those that are enforced, and beside them those that refuse nobody, each kind for itself. */
enum { BENCH_ENFORCE = TG_MODE_ENFORCE, BENCH_SHADOW = TG_MODE_SHADOW, BENCH_CHALLENGE = TG_MODE_CHALLENGE, BENCH_PAUSED,
       BENCHES };

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

/* Those that judge together, and of each its place among the policies that the request meets. */
typedef struct seats {
    tg_bench bench; /* of what follows */
    tg_limiter *limiters[TG_LIMITERS_MAX];
    uint64_t costs[TG_LIMITERS_MAX];
    size_t places[TG_LIMITERS_MAX];
} seats;

/* A peek is no decision, and one that waits for the body comes again with it. */
static inline bool
is_counted(const court *of)
{
    return !of->request->peek && !of->judgement->needs_body && !tg__inquiry_repeats(of->matter->inquiry);
}

static void
count_at(const court *of, size_t at, tg_metric metric)
{
    if (is_counted(of))
        tg__metrics_one(of->now->limiters[at], metric);
}

/* `places`: of those who judge; NULL: each sits at its own. */
static inline tg_status
judge_together(court *of, tg_bench *bench, const size_t *places, tg_error *error)
{
    tg_judgement *judgement = of->judgement;
    const tg_status status = tg__bench_judge(bench, of->matter, judgement, error);
    if (status == TG_OK && is_counted(of))
        tg__metrics_judged(bench, judgement);
    of->style = &of->judging[places ? places[bench->reported] : bench->reported]->style;
    const uint16_t own_status = of->style->statuses[judgement->outcome];
    if (__builtin_expect(status == TG_OK && own_status != 0, 0))
        judgement->status = own_status;
    return status;
}

/* ---- the short way: policies that only judge ---- */

static inline tg_status
judge_simply(court *of, size_t count, tg_error *error)
{
    tg_limiter *limiters[TG_LIMITERS_MAX];
    if (count == 0) {
        tg__judgement_unmatched(of->judgement);
        return TG_OK;
    }
    for (size_t i = 0; i < count; i++) {
        of->judging[i] = &of->now->config->policies[of->found[i]];
        limiters[i] = of->now->limiters[of->found[i]];
    }
    of->judging_count = count;
    tg_bench bench = { .limiters = limiters, .count = count };
    return judge_together(of, &bench, NULL, error);
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

/* Results name their policy by its place among all that the request meets. */
static void
name_places(tg_decision *decision, const seats *sit)
{
    for (size_t i = 0; i < decision->result_count; i++)
        decision->results[i].limiter = (uint8_t)sit->places[decision->results[i].limiter];
}

static bool
is_refusal(const tg_judgement *judgement)
{
    return judgement->status != 0 && judgement->outcome != TG_UNAVAILABLE; /* a silent store refuses nobody by proxy */
}

/* What is not enforced judges when the rest has let through: on its own, so that it takes nothing from a request that it
 * would refuse, and nothing of what it says reaches the rest. */
static tg_status
judge_aside(const court *of, seats *aside, tg_metric refused, tg_judgement *said, size_t *reported, tg_error *error)
{
    const tg_status status = tg__bench_judge(&aside->bench, of->matter, said, error);
    *reported = aside->places[aside->bench.reported];
    if (status == TG_OK && is_counted(of) && !said->needs_body) {
        const size_t at = of->found[*reported];
        if (is_refusal(said) && refused == TG_METRIC_PAUSED)
            tg__watch_let_through(&of->now->watches[at], of->now->limiters[at]);
        else if (is_refusal(said))
            tg__metrics_one(aside->limiters[aside->bench.reported], refused);
        else
            tg__metrics_judged(&aside->bench, said);
    }
    return status;
}

/* What was charged aside joins the decision: a later refusal gives it back, a second look at the request finds it. */
static void
keep_charges(tg_decision *decision, const tg_decision *aside, const seats *sit)
{
    for (size_t i = 0; i < aside->result_count; i++) {
        const tg_result *result = &aside->results[i];
        const tg_identity *identity = &aside->identities[result->identity];
        size_t at = 0;
        if (!result->charged || aside->degraded || decision->result_count == TG_TARGETS_MAX)
            continue;
        while (at < decision->identity_count &&
               (decision->identities[at].length != identity->length ||
                memcmp(decision->identities[at].bytes, identity->bytes, identity->length) != 0))
            at++;
        if (at == TG_DIMENSIONS_MAX)
            continue; /* the file's check sees to it that all fit; a plan's or a reading's surplus stays charged */
        if (at == decision->identity_count)
            decision->identities[decision->identity_count++] = *identity;
        tg_result *kept = &decision->results[decision->result_count++];
        *kept = *result;
        kept->identity = (uint8_t)at;
        kept->limiter = (uint8_t)sit->places[result->limiter];
    }
}

/* Those in `mode: challenge`, or those that are paused: what they refuse is let through, what they let through counts. */
static tg_status
judge_lenient(court *of, seats *lenient, tg_metric refused, bool alone, tg_error *error)
{
    tg_judgement said;
    size_t reported;
    const tg_status status = judge_aside(of, lenient, refused, &said, &reported, error);
    if (status != TG_OK)
        return status;
    of->judgement->needs_body |= said.needs_body;
    if (is_refusal(&said)) {
        memcpy(of->judgement->missing, said.missing, sizeof said.missing);
        of->judgement->challenged |= refused == TG_METRIC_CHALLENGED;
        if (!alone)
            return TG_OK;
        of->style = &of->now->config->policies[of->found[reported]].style;
        name_policy(of->judgement, said.policy);
        return TG_OK;
    }
    if (alone && said.outcome == TG_ALLOWED) { /* nothing else speaks: its numbers are the request's */
        *of->judgement = said;
        name_places(&of->judgement->decision, lenient);
        for (size_t i = 0; i < lenient->bench.count; i++)
            of->judging[lenient->places[i]] = &of->now->config->policies[of->found[lenient->places[i]]];
        of->style = &of->now->config->policies[of->found[reported]].style;
    } else if (!alone) {
        keep_charges(&of->judgement->decision, &said.decision, lenient);
    }
    return TG_OK;
}

static tg_status
judge_shadows(court *of, seats *shadows, bool alone, tg_error *error)
{
    tg_judgement said;
    size_t reported;
    const tg_status status = judge_aside(of, shadows, TG_METRIC_SHADOW_DENIED, &said, &reported, error);
    if (status != TG_OK)
        return status;
    of->judgement->needs_body |= said.needs_body;
    if (is_refusal(&said)) {
        memcpy(of->judgement->missing, said.missing, sizeof said.missing);
        of->judgement->shadow_denied = true;
        memcpy(of->judgement->shadow_policy, said.policy, sizeof said.policy);
    } else {
        keep_charges(&of->judgement->decision, &said.decision, shadows);
    }
    if (alone)
        of->style = &of->now->config->policies[of->found[reported]].style;
    return TG_OK;
}

static void
take_seat(const court *of, seats *sit, size_t place)
{
    const tg_policy *policy = &of->now->config->policies[of->found[place]];
    const size_t at = sit->bench.count++;
    sit->limiters[at] = limiter_of(of, of->found[place]);
    sit->costs[at] = times(of->matter->cost, cost_of(&policy->cost, of->request));
    sit->places[at] = place;
}

/* Whether so many of its answers are errors that it is to refuse nobody. One that forbids goes on: what it refuses was
 * never to reach the application. */
static bool
is_paused(const court *of, size_t at)
{
    const tg_policy *policy = &of->now->config->policies[at];
    const tg_limiter *limiter = of->now->limiters[at];
    tg_watched watched;
    if (policy->mode != TG_MODE_ENFORCE)
        return false;
    for (size_t i = 0; i < limiter->rule_count; i++)
        if (limiter->rules[i].algorithm == TG_DENY)
            return false;
    const bool pauses = tg__watch_pauses(&of->now->watches[at], limiter, &policy->pause, &watched);
    if (!of->request->peek)
        tg__watch_tell(&of->now->watches[at], limiter, &policy->pause, pauses, &watched);
    return pauses;
}

/* Looked at once: a judge that begins again finds the policy on the bench where it sat before. */
static bool
is_paused_here(const court *of, size_t place)
{
    if (of->now->config->policies[of->found[place]].pause.period_us == 0)
        return false;
    if (tg__inquiry_repeats(of->matter->inquiry))
        return of->matter->inquiry->paused >> place & 1;
    const bool paused = is_paused(of, of->found[place]);
    if (of->matter->inquiry && paused)
        of->matter->inquiry->paused |= (uint8_t)(1u << place);
    return paused;
}

static bool
settles(const tg_policy *policy)
{
    return policy->settle_place.line != 0;
}

/* Those that are enforced first; the others when nothing of it is refused, nor waits for the body. */
static tg_status
judge_seated(court *of, seats benches[BENCHES], tg_error *error)
{
    bool alone = benches[BENCH_ENFORCE].bench.count == 0;
    tg_status status = TG_OK;
    if (!alone) {
        status = judge_together(of, &benches[BENCH_ENFORCE].bench, benches[BENCH_ENFORCE].places, error);
        if (status != TG_OK)
            return status;
        name_places(&of->judgement->decision, &benches[BENCH_ENFORCE]);
    }
    if (of->judgement->status != 0 || of->judgement->needs_body)
        return TG_OK;
    if (benches[BENCH_PAUSED].bench.count)
        status = judge_lenient(of, &benches[BENCH_PAUSED], TG_METRIC_PAUSED, alone, error);
    alone &= benches[BENCH_PAUSED].bench.count == 0;
    if (status == TG_OK && benches[BENCH_CHALLENGE].bench.count)
        status = judge_lenient(of, &benches[BENCH_CHALLENGE], TG_METRIC_CHALLENGED, alone, error);
    alone &= benches[BENCH_CHALLENGE].bench.count == 0;
    if (status == TG_OK && benches[BENCH_SHADOW].bench.count)
        status = judge_shadows(of, &benches[BENCH_SHADOW], alone, error);
    return status;
}

static tg_status
judge_wholly(court *of, size_t count, tg_error *error)
{
    const tg_config *config = of->now->config;
    tg_judgement *judgement = of->judgement;
    seats benches[BENCHES];
    uint32_t watches[TG_LIMITERS_MAX];
    size_t watch_count = 0;
    bool settling = false, judged = false;
    tg__judgement_unmatched(judgement);
    if (tg__is_preflight(of->request))
        return TG_OK;
    if (is_on(of, &config->deny))
        return forbid(of, "", &config->style);
    for (size_t i = 0; i < count; i++)
        if (is_on(of, &config->policies[of->found[i]].deny)) {
            count_at(of, of->found[i], TG_METRIC_FORBIDDEN);
            return forbid(of, config->policies[of->found[i]].name, &config->policies[of->found[i]].style);
        }
    if (count == 0)
        return TG_OK;
    if (is_on(of, &config->exempt)) {
        for (size_t i = 0; i < count; i++)
            count_at(of, of->found[i], TG_METRIC_EXEMPT);
        return exempt(of, "");
    }
    for (size_t i = 0; i < BENCHES; i++)
        benches[i].bench = (tg_bench){ .limiters = benches[i].limiters, .costs = benches[i].costs };
    of->judging_count = count;
    for (size_t i = 0; i < count; i++) {
        const tg_policy *policy = &config->policies[of->found[i]];
        of->judging[i] = NULL;
        if (is_on(of, &policy->exempt)) {
            count_at(of, of->found[i], TG_METRIC_EXEMPT);
            continue;
        }
        const bool paused = is_paused_here(of, i);
        if (policy->mode == TG_MODE_ENFORCE && !paused)
            of->judging[i] = policy;
        if (policy->pause.period_us)
            watches[watch_count++] = policy->watch;
        judged = true;
        settling |= settles(policy);
        take_seat(of, &benches[paused ? BENCH_PAUSED : (int)policy->mode], i);
    }
    if (!judged)
        return exempt(of, config->policies[of->found[0]].name);
    const tg_status status = judge_seated(of, benches, error);
    const bool goes_on = status == TG_OK && judgement->status == 0;
    judgement->settles = goes_on && settling && !judgement->decision.degraded;
    if (watch_count && goes_on && is_counted(of)) { /* else it is judged again */
        memcpy(judgement->watches, watches, watch_count * sizeof *watches);
        judgement->watch_count = (uint8_t)watch_count;
        judgement->settles = true;
    }
    return status;
}

/* ---- log_decisions ---- */

#define LINE_EVERY_US UINT64_C(1000000)

/* One line a second at most for each policy, with how many it stands for: under attack a line for each refusal would be
 * trouble of its own. */
static void
log_decision(const court *of, size_t at, bool refused)
{
    const tg_policy *policy = &of->now->config->policies[at];
    tg_logged *logged = &of->now->logged[at];
    const tg_decision *decision = &of->judgement->decision;
    struct timespec coarse;
    const uint64_t since = atomic_fetch_add_explicit(&logged->since, 1, memory_order_relaxed) + 1;
    if (refused)
        atomic_fetch_add_explicit(&logged->refused, 1, memory_order_relaxed);
    clock_gettime(CLOCK_MONOTONIC_COARSE, &coarse);
    const uint64_t now_us = (uint64_t)coarse.tv_sec * 1000000 + (uint64_t)coarse.tv_nsec / 1000;
    uint64_t next_us = atomic_load_explicit(&logged->next_us, memory_order_relaxed);
    if (since < policy->log_sample || now_us < next_us ||
        !atomic_compare_exchange_strong(&logged->next_us, &next_us, now_us + LINE_EVERY_US))
        return;
    char who[400] = "", path[80], method[16];
    if (decision->result_count)
        tg__identity_show(&decision->identities[decision->results[decision->reported].identity], of->store->private_kinds, who,
                          sizeof who);
    else if (of->judgement->missing[0])
        snprintf(who, sizeof who, "a request without %s", of->judgement->missing);
    tg_text shown_path = of->request->path; /* a query may hold a secret */
    const char *query = shown_path.length ? memchr(shown_path.data, '?', shown_path.length) : NULL;
    shown_path.length = query ? (size_t)(query - shown_path.data) : shown_path.length;
    tg__notice("decision", "policy \"%s\" %s %s %s for %.60s; %" PRIu64 " decisions since the last line, %" PRIu64 " refused",
               policy->name, refused ? "refused" : "let through",
               tg__text_show(of->request->method, method, sizeof method),
               tg__text_show(shown_path, path, sizeof path), who[0] ? who : "somebody",
               atomic_exchange(&logged->since, 0), atomic_exchange(&logged->refused, 0));
}

static void
log_decisions(const court *of, size_t count)
{
    if (of->request->peek)
        return;
    for (size_t i = 0; i < count; i++) {
        const tg_policy *policy = &of->now->config->policies[of->found[i]];
        const bool refused = of->judgement->status != 0 && strcmp(of->judgement->policy, policy->name) == 0;
        if (policy->log == TG_LOG_ALL || (policy->log == TG_LOG_REFUSED && refused))
            log_decision(of, of->found[i], refused);
    }
}

TG_EACH_REQUEST tg_status
tg__snapshot_judge(const tg_snapshot *now, tg_store *store, const tg_matter *matter, tg_judgement *judgement,
                   tg_answer *answer, tg_error *error)
{
    const tg_request *const request = matter->request;
    size_t found[TG_LIMITERS_MAX];
    court of; /* `judging` is not cleared */
    of.now = now;
    of.store = store;
    of.matter = matter;
    of.request = request;
    of.judgement = judgement;
    of.style = &now->config->style;
    of.judging_count = 0;
    of.found = found;
    if (matter->cost > TG_LIMIT_MAX)
        return tg__error(error, TG_E_ARG, "a cost is at most %" PRIu64 ", not %" PRIu64, TG_LIMIT_MAX, matter->cost);
    const tg_status read = tg__request_read(request, now->reads, error);
    if (read != TG_OK)
        return read;
    size_t count = 1;
    if (request->policy.length == 0)
        count = tg__config_match(now->config, request, found);
    else if (!tg__config_find(now->config, request->policy, &found[0]))
        return tg__config_no_policy(now->config, request->policy, error);
    tg_status status = now->brief ? tg__snapshot_meet(now, found, count, error) : TG_OK;
    if (status == TG_OK)
        status = now->simple ? judge_simply(&of, count, error) : judge_wholly(&of, count, error);
    if (status == TG_OK && !now->simple)
        log_decisions(&of, count);
    if (status == TG_OK && answer)
        answer_for(&of, answer);
    return status;
}
