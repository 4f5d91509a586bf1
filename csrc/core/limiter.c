/* The limiter: several rules and several identities in one decision, and what is answered when the store is silent. */
#include "core/inquiry.h"
#include "core/metrics.h"
#include "core/overrides.h"
#include "identity/headers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#define DEGRADED_RETRY_US UINT64_C(1000000)
#define LOCAL_URI "memory://on-store-failure"

/* ---- opening ---- */

static tg_status
copy_name(char to[TG_NAME_BYTES_MAX + 1], tg_text name, const char *what, tg_error *error)
{
    if (name.length == 0)
        name = tg_text_of("default");
    if (name.length > TG_NAME_BYTES_MAX)
        return tg__error(error, TG_E_CONFIG, "a limiter's %s is at most %d bytes long, not %zu", what, TG_NAME_BYTES_MAX,
                         name.length);
    if (memchr(name.data, '\0', name.length))
        return tg__error(error, TG_E_CONFIG, "a limiter's %s holds a NUL byte", what);
    memcpy(to, name.data, name.length);
    to[name.length] = '\0';
    return TG_OK;
}

/* Before anything is decided, so that a rule the store could never hold is refused when it is made. */
static tg_status
admit_rules(tg_limiter *limiter, tg_text space, const char *suffix, tg_error *error)
{
    char name[TG_NAME_BYTES_MAX + TG_SUFFIX_BYTES_MAX + 1];
    stpcpy(stpcpy(name, limiter->name), suffix);
    for (size_t i = 0; i < limiter->rule_count; i++) {
        tg__rule_scope(&limiter->rules[i], space, tg_text_of(name));
        const tg_store_ops *ops = limiter->store->ops;
        tg_status status = ops->admit_rule(limiter->store, &limiter->rules[i], error);
        if (status == TG_OK && ops->name_rule)
            status = ops->name_rule(limiter->store, &limiter->rules[i], space.data, name, error);
        if (status != TG_OK)
            return status;
    }
    return TG_OK;
}

tg_status
tg__limiter_open(tg_store *store, const tg_client *client, const tg_limiter_options *options, const char *suffix,
                 tg_limiter **opened, tg_error *error)
{
    if (options->by_count > TG_DIMENSIONS_MAX)
        return tg__error(error, TG_E_CONFIG, "`by` lists %zu dimensions, at most %d are possible", options->by_count,
                         TG_DIMENSIONS_MAX);
    tg_limiter *limiter = calloc(1, sizeof *limiter);
    if (!limiter)
        return tg__error(error, TG_E_NOMEM, "limiter: %zu bytes", sizeof *limiter);
    tg__store_retain(store);
    limiter->store = store;
    limiter->client = client;
    limiter->on_store_failure = options->on_store_failure;
    limiter->local_percent = options->local_percent ? options->local_percent : 100;
    limiter->on_full = options->on_full;
    limiter->missing_identity = options->missing_identity;
    limiter->count_denied = options->count_denied;
    limiter->gives_back = true; /* by whoever holds it; a gate says where nobody does */

    tg_status status = TG_OK;
    if (options->count_denied && !store->counts_denied)
        status = tg__error(error, TG_E_CONFIG, "count_denied: %s cannot count what it denies yet",
                           store->shown ? store->shown : store->uri);
    if (status == TG_OK)
        status = copy_name(limiter->name, options->name, "name", error);
    if (status == TG_OK)
        status = copy_name(limiter->space, options->space, "namespace", error);
    if (status == TG_OK)
        status = tg_rules_parse(options->rules, options->preferred, limiter->rules, &limiter->rule_count, error);
    if (status == TG_OK)
        status = admit_rules(limiter, tg_text_of(limiter->space), suffix, error);
    if (status == TG_OK && !client) {
        status = tg_client_open(&(tg_client_options){ .trusted_proxy_count = 0 }, &limiter->own_client, error);
        limiter->client = limiter->own_client;
    }
    for (size_t i = 0; status == TG_OK && i < options->by_count; i++) {
        status = tg__by_parse(options->by[i], &limiter->by[i], error);
        if (status == TG_OK)
            limiter->reads |= tg__by_reads(limiter->by[limiter->by_count++], limiter->client);
    }
    if (status == TG_OK && options->on_store_failure == TG_FAIL_LOCAL)
        status = tg_store_open(tg_text_of(LOCAL_URI), &(tg_store_options){ .clock = store->clock }, &limiter->local,
                               error);
    if (status == TG_OK) {
        if (store->ops->metric_name)
            limiter->metric = store->ops->metric_name(store, limiter->space, limiter->name);
        *opened = limiter;
        limiter = NULL;
    }
    tg_limiter_close(limiter);
    return status;
}

tg_status
tg_limiter_open(tg_store *store, const tg_client *client, const tg_limiter_options *options, tg_limiter **opened,
                tg_error *error)
{
    return tg__limiter_open(store, client, options, "", opened, error);
}

void
tg_limiter_close(tg_limiter *limiter)
{
    if (!limiter)
        return;
    for (size_t i = 0; i < limiter->by_count; i++)
        tg__by_close(limiter->by[i]);
    tg_client_close(limiter->own_client);
    tg_store_close(limiter->local);
    tg_store_close(limiter->store);
    free(limiter);
}

size_t
tg_limiter_rules(const tg_limiter *limiter, const tg_rule **rules)
{
    *rules = limiter->rules;
    return limiter->rule_count;
}

const char *
tg_limiter_name(const tg_limiter *limiter)
{
    return limiter->name;
}

tg_store *
tg_limiter_store(const tg_limiter *limiter)
{
    return limiter->store;
}

/* ---- from identities to targets ---- */

static void
begin_decision(tg_decision *decision)
{
    decision->degraded = false;
    decision->overflow = false;
    decision->result_count = 0;
    decision->identity_count = 0;
}

/* The plain fields, where nothing was decided: all that comes of a decision else writes them. */
static void
say_nothing(tg_decision *decision)
{
    decision->allowed = true;
    decision->reported = 0;
    decision->limit = decision->burst = decision->remaining = 0;
    decision->retry_after_us = decision->reset_after_us = decision->delay_us = 0;
}

/* All but the decision. */
static inline void
clear_judgement(tg_judgement *judgement)
{
    judgement->outcome = TG_UNMATCHED;
    judgement->status = 0;
    judgement->policy[0] = judgement->missing[0] = judgement->shadow_policy[0] = '\0';
    judgement->challenged = judgement->shadow_denied = judgement->needs_body = judgement->settles = false;
    judgement->watch_count = 0;
    judgement->waited_us = 0;
}

/* What stands in the place of the limiter's own rules for this identity. false: nothing does. An override has at most as
 * many rules as its policy, so there is room. */
static bool
add_overridden(tg_target_list *plan, const tg_limiter *limiter, size_t limiter_index, size_t identity_index, uint64_t cost,
               tg_decision *decision)
{
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    bool paused;
    if (!tg__override_find(limiter, &decision->identities[identity_index], rules, &count, &paused) ||
        plan->count + count > TG_TARGETS_MAX)
        return false;
    for (size_t i = 0; i < count; i++) {
        tg_result *const result = &decision->results[plan->count];
        result->rule = rules[i];
        if (paused && rules[i].algorithm == TG_DENY) /* a limit that is far away; cost 0 makes no state of it */
            tg_rule_make(TG_LIMIT_MAX, 1000000, 0, TG_TOKEN_BUCKET, &result->rule, NULL);
        result->identity = (uint8_t)identity_index;
        result->limiter = (uint8_t)limiter_index;
        result->cost = paused ? 0 : cost;
        plan->targets[plan->count++] = (tg_target){
            .rule = &result->rule,
            .identity = &decision->identities[identity_index],
            .cost = result->cost,
            .on_full = (uint8_t)limiter->on_full,
            .counts_denied = limiter->count_denied ? (uint8_t)(limiter_index + 1) : 0,
            .gives_back = limiter->gives_back,
        };
    }
    decision->result_count = (uint8_t)plan->count;
    return true;
}

/* Every rule of the limiter, for one identity of the decision. */
static inline tg_status
add_targets(tg_target_list *plan, const tg_limiter *limiter, size_t limiter_index, size_t identity_index, uint64_t cost,
            tg_decision *decision, tg_error *error)
{
    const size_t first = plan->count, rule_count = limiter->rule_count;
    if (first + rule_count > TG_TARGETS_MAX)
        return tg__error(error, TG_E_ARG, "one decision judges at most %d pairs of rule and identity", TG_TARGETS_MAX);
    const tg_identity *const identity = &decision->identities[identity_index];
    if (__builtin_expect(tg__overrides_any(limiter->store), 0) &&
        add_overridden(plan, limiter, limiter_index, identity_index, cost, decision))
        return TG_OK;
    const tg_rule *rule = limiter->rules;
    tg_result *result = &decision->results[first];
    for (tg_target *target = &plan->targets[first]; target < plan->targets + first + rule_count; target++) {
        result->rule = *rule;
        result->identity = (uint8_t)identity_index;
        result->limiter = (uint8_t)limiter_index;
        result++->cost = cost;
        *target = (tg_target){
            .rule = rule++,
            .identity = identity,
            .cost = cost,
            .on_full = (uint8_t)limiter->on_full,
            .counts_denied = limiter->count_denied ? (uint8_t)(limiter_index + 1) : 0,
            .gives_back = limiter->gives_back,
        };
    }
    plan->count = first + rule_count;
    decision->result_count = (uint8_t)plan->count;
    return TG_OK;
}

/* A dimension one of whose parts is of kind "ip": written as every face writes it. */
static __attribute__((noinline)) tg_status
join_address(const tg_limiter *limiter, const tg_dimension *dimension, tg_identity *identity, tg_error *error)
{
    tg_part parts[TG_PARTS_MAX];
    char address[TG_ADDRESS_TEXT_MAX]; /* one will do: a joint identity names a kind once */
    bool addressed = false;
    for (size_t i = 0; i < dimension->part_count; i++) {
        parts[i] = dimension->parts[i];
        if (!tg__text_is(parts[i].kind, "ip"))
            continue;
        if (addressed)
            return tg__error(error, TG_E_ARG, "a joint identity names the kind 'ip' twice");
        addressed = true;
        const tg_status status = tg_client_normalise(limiter->client, parts[i].value, address, error);
        if (status != TG_OK)
            return status;
        parts[i].value = tg_text_of(address);
    }
    return tg__identity_join(parts, dimension->part_count, identity, error);
}

/* One dimension given by value. Parts of other kinds than "ip" stay as they are. */
static inline tg_status
join_values(const tg_limiter *limiter, const tg_dimension *dimension, tg_identity *identity, tg_error *error)
{
    if (dimension->part_count == 0 || dimension->part_count > TG_PARTS_MAX)
        return tg__error(error, TG_E_ARG, "an identity has 1 to %d parts, not %zu", TG_PARTS_MAX,
                         dimension->part_count);
    for (size_t i = 0; i < dimension->part_count; i++)
        if (tg__text_is(dimension->parts[i].kind, "ip"))
            return join_address(limiter, dimension, identity, error);
    return tg__identity_join(dimension->parts, dimension->part_count, identity, error);
}

/* A policy composes its own identities from values given by kind. */
static __attribute__((noinline)) tg_status
compose_by(const tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, tg_decision *decision,
           tg_error *error)
{
    tg_part values[TG_DIMENSIONS_MAX * TG_PARTS_MAX];
    size_t value_count = 0;
    for (size_t i = 0; i < dimension_count; i++)
        for (size_t part = 0; part < dimensions[i].part_count; part++) {
            if (dimensions[i].parts[part].kind.length == 0)
                return tg__error(error, TG_E_ARG,
                                 "policy '%s' composes its identity itself: give values by kind, not positional parts",
                                 limiter->name);
            if (value_count == sizeof values / sizeof *values)
                return tg__error(error, TG_E_ARG, "too many parts");
            values[value_count++] = dimensions[i].parts[part];
        }
    for (size_t i = 0; i < limiter->by_count; i++) {
        char missing[TG_NAME_BYTES_MAX + 1];
        const tg_status status = tg__by_of_values(limiter->by[i], limiter->client, values, value_count,
                                                  &decision->identities[i], missing, error);
        if (status == TG_E_IDENTITY && limiter->missing_identity == TG_MISSING_SHARED)
            tg__by_shared(limiter->by[i], &decision->identities[i]);
        else if (status != TG_OK)
            return status;
    }
    decision->identity_count = (uint8_t)limiter->by_count;
    return TG_OK;
}

static inline __attribute__((always_inline)) tg_status
compose(const tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
        tg_target_list *plan, tg_decision *decision, tg_error *error)
{
    if (cost > TG_LIMIT_MAX)
        return tg__error(error, TG_E_ARG, "a cost is at most %" PRIu64 ", not %" PRIu64, TG_LIMIT_MAX, cost);
    if (dimension_count == 0 || dimension_count > TG_DIMENSIONS_MAX)
        return tg__error(error, TG_E_ARG, "a decision has 1 to %d dimensions, not %zu", TG_DIMENSIONS_MAX,
                         dimension_count);
    begin_decision(decision);
    plan->count = 0;
    if (limiter->by_count > 0) {
        const tg_status status = compose_by(limiter, dimensions, dimension_count, decision, error);
        if (status != TG_OK)
            return status;
    } else {
        for (size_t i = 0; i < dimension_count; i++) {
            const tg_status status = join_values(limiter, &dimensions[i], &decision->identities[i], error);
            if (status != TG_OK)
                return status;
        }
        decision->identity_count = (uint8_t)dimension_count;
    }
    const size_t identity_count = decision->identity_count;
    for (size_t i = 0; i < identity_count; i++) {
        const tg_status status = add_targets(plan, limiter, 0, i, cost, decision, error);
        if (status != TG_OK)
            return status;
    }
    return TG_OK;
}

/* ---- asking the store ---- */

/* A silent store's stand-in answer. The caller's rules tell the strictest policy of all that were matched. */
static void
degrade(tg_decision *decision, bool allowed, const tg_rule *rule)
{
    decision->allowed = allowed;
    decision->degraded = true;
    decision->reported = 0;
    decision->result_count = 0;
    decision->limit = rule->limit;
    decision->burst = rule->burst;
    decision->remaining = allowed ? rule->limit : 0;
    decision->retry_after_us = allowed ? 0 : DEGRADED_RETRY_US;
    decision->reset_after_us = 0;
    decision->delay_us = 0;
}

static uint64_t
share_of(uint64_t units, unsigned percent)
{
    const uint64_t share = units * percent / 100; /* units are at most TG_LIMIT_MAX */
    return share > 0 || units == 0 ? share : 1;
}

/* The embedded stand-in's answer, by a share of each rule. Its charges are not given back: a refund goes to the store that
 * stands again by then. */
static bool
decide_locally(tg_store *local, unsigned percent, tg_op op, const tg_target_list *plan, tg_decision *decision)
{
    tg_target targets[TG_TARGETS_MAX];
    tg_rule rules[TG_TARGETS_MAX];
    for (size_t i = 0; i < plan->count; i++) {
        targets[i] = plan->targets[i];
        rules[i] = *targets[i].rule;
        rules[i].limit = share_of(rules[i].limit, percent);
        rules[i].burst = share_of(rules[i].burst, percent);
        targets[i].rule = &rules[i];
    }
    if (local->ops->apply(local, op, targets, plan->count, 0, decision->results, &decision->overflow, NULL) != TG_OK)
        return false;
    for (size_t i = 0; i < plan->count; i++) {
        decision->results[i].rule = rules[i]; /* by which it was judged */
        decision->results[i].charged = false;
    }
    tg__decision_report(decision);
    decision->degraded = true;
    return true;
}

static void
decide_by_policy(tg_limiter *const *limiters, size_t limiter_count, tg_op op, const tg_target_list *plan,
                 tg_decision *decision)
{
    tg_store *local = NULL;
    unsigned percent = 100; /* of several policies the strictest holds */
    for (size_t i = 0; i < limiter_count; i++) {
        if (limiters[i]->on_store_failure == TG_FAIL_CLOSED) {
            degrade(decision, false, &limiters[i]->rules[0]);
            return;
        }
        if (!limiters[i]->local)
            continue;
        local = limiters[i]->local;
        if (limiters[i]->local_percent < percent)
            percent = limiters[i]->local_percent;
    }
    if (!local || !decide_locally(local, percent, op, plan, decision))
        degrade(decision, true, &limiters[0]->rules[0]);
}

static __attribute__((noinline, cold)) void
decide_without_store(tg_limiter *const *limiters, size_t limiter_count, tg_op op, const tg_target_list *plan,
                     tg_decision *decision, const tg_error *error)
{
    /* No fault of the store's: a loop was closed, or there was no time left to ask. */
    if (error->system_error != ECANCELED && error->system_error != ETIME)
        tg__failure_seen(limiters[0]->store, error);
    decide_by_policy(limiters, limiter_count, op, plan, decision);
}

void
tg__decision_degraded(tg_limiter *limiter, tg_op op, const tg_target_list *plan, tg_decision *decision)
{
    tg_counter *const line = tg__metric_line(limiter);
    decide_by_policy(&limiter, 1, op, plan, decision);
    if (line)
        tg__metric_add(line, TG_METRIC_DEGRADED);
}

/* Never fails: what a silent store leaves open, on_store_failure answers. Returns where its outcome is counted, or NULL. */
static inline tg_counter *
decide(tg_limiter *const *limiters, size_t limiter_count, tg_op op, const tg_target_list *plan, uint64_t until_us,
       tg_decision *decision)
{
    tg_store *const store = limiters[0]->store;
    tg_error error;
    tg_counter *const line = op == TG_OP_HIT ? tg__metric_line(limiters[0]) : NULL;
    const uint64_t began_ns = line ? tg__latency_begin(line) : 0;
    const tg_status status =
        store->ops->apply(store, op, plan->targets, plan->count, until_us, decision->results, &decision->overflow, &error);
    if (__builtin_expect(began_ns != 0, 0))
        tg__latency_end(store, began_ns);
    if (__builtin_expect(status != TG_OK, 0)) {
        decide_without_store(limiters, limiter_count, op, plan, decision, &error);
        return line;
    }
    if (__builtin_expect(atomic_load_explicit(&store->failing, memory_order_relaxed), 0))
        tg__success_seen(store);
    tg__decision_report(decision);
    return line;
}

uint64_t
tg__decision_begun(const tg_limiter *limiter, tg_op op)
{
    tg_counter *const line = op == TG_OP_HIT ? tg__metric_line(limiter) : NULL;
    return line ? tg__latency_begin(line) : 0;
}

/* decide() from where the store has answered. */
static void
decide_on(tg_limiter *const *limiters, size_t limiter_count, tg_op op, const tg_target_list *plan, tg_decision *decision,
          uint64_t began_ns, tg_status status, const tg_error *error)
{
    tg_store *const store = limiters[0]->store;
    if (began_ns != 0)
        tg__latency_end(store, began_ns);
    decision->overflow = false; /* a table's: it is never asked so */
    if (status != TG_OK) {
        decide_without_store(limiters, limiter_count, op, plan, decision, error);
        return;
    }
    tg__success_seen(store);
    tg__decision_report(decision);
}

void
tg__decision_answered(tg_limiter *limiter, tg_op op, const tg_target_list *plan, tg_decision *decision, uint64_t began_ns,
                      tg_status status, const tg_error *error)
{
    decide_on(&limiter, 1, op, plan, decision, began_ns, status, error);
    tg_counter *const line = op == TG_OP_HIT ? tg__metric_line(limiter) : NULL;
    if (line)
        tg__metric_add(line, tg__metric_of(decision));
}

/* All but the identities, which are found anew in each turn and are the same. */
static void
copy_decision(tg_decision *to, const tg_decision *from)
{
    memcpy(to, from, offsetof(tg_decision, results) + from->result_count * sizeof from->results[0]);
}

static void
put_question(tg_inquiry *inquiry, const tg_limiter *first, tg_op op, const tg_target_list *plan, const tg_decision *decision)
{
    tg_decision *asked = &inquiry->asked;
    inquiry->op = op;
    inquiry->plan.count = plan->count;
    copy_decision(asked, decision);
    for (size_t i = 0; i < decision->identity_count; i++) {
        asked->identities[i].length = decision->identities[i].length;
        memcpy(asked->identities[i].bytes, decision->identities[i].bytes, decision->identities[i].length);
    }
    for (size_t i = 0; i < plan->count; i++) {
        tg_target *target = &inquiry->plan.targets[i];
        *target = plan->targets[i];
        target->rule = &asked->results[i].rule;
        target->identity = &asked->identities[asked->results[i].identity];
        asked->results[i].rule = *plan->targets[i].rule;
    }
    inquiry->began_ns = tg__decision_begun(first, op);
}

/* As decide(), where nobody waits. false: the question is put. */
static __attribute__((noinline)) bool
decide_later(tg_inquiry *inquiry, tg_limiter *const *limiters, size_t limiter_count, tg_op op, const tg_target_list *plan,
             tg_decision *decision)
{
    if (inquiry->told < inquiry->said_count) {
        copy_decision(decision, &inquiry->said[inquiry->told++]);
        return true;
    }
    if (!inquiry->answered) {
        put_question(inquiry, limiters[0], op, plan, decision);
        return false;
    }
    inquiry->answered = false;
    copy_decision(decision, &inquiry->asked);
    decide_on(limiters, limiter_count, op, plan, decision, inquiry->began_ns, inquiry->status, inquiry->error);
    if (inquiry->said && inquiry->said_count < TG_QUESTIONS_MAX - 1) {
        copy_decision(&inquiry->said[inquiry->said_count++], decision);
        inquiry->told++;
    }
    return true;
}

static inline __attribute__((always_inline)) tg_status
hit_or_peek(tg_limiter *limiter, tg_op op, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
            uint64_t patience_us, tg_decision *decision, tg_error *error)
{
    tg_target_list plan;
    const tg_status status = compose(limiter, dimensions, dimension_count, cost, &plan, decision, error);
    if (status == TG_OK) {
        for (size_t i = 0; patience_us > 0 && i < plan.count; i++)
            plan.targets[i].patience_us = patience_us;
        tg_counter *const line = decide(&limiter, 1, op, &plan, 0, decision);
        if (line)
            tg__metric_add(line, tg__metric_of(decision));
    }
    return status;
}

tg_status
tg_limiter_hit(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
               tg_decision *decision, tg_error *error)
{
    return hit_or_peek(limiter, TG_OP_HIT, dimensions, dimension_count, cost, 0, decision, error);
}

tg_status
tg_limiter_hit_within(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                      uint64_t patience_us, tg_decision *decision, tg_error *error)
{
    if (patience_us > TG_WAIT_US_MAX)
        return tg__error(error, TG_E_ARG, "a patience is at most %" PRIu64 " us, not %" PRIu64, TG_WAIT_US_MAX,
                         patience_us);
    return hit_or_peek(limiter, TG_OP_HIT, dimensions, dimension_count, cost, patience_us, decision, error);
}

tg_status
tg_limiter_peek(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                tg_decision *decision, tg_error *error)
{
    return hit_or_peek(limiter, TG_OP_PEEK, dimensions, dimension_count, cost, 0, decision, error);
}

/* REFUND and RESET: administrative, so a silent store is told to the caller. */
static __attribute__((noinline)) tg_status
administer(tg_limiter *limiter, tg_op op, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
           uint64_t until_us, tg_error *error)
{
    tg_target_list plan;
    tg_decision decision;
    const tg_status status = compose(limiter, dimensions, dimension_count, cost, &plan, &decision, error);
    if (status != TG_OK)
        return status;
    return limiter->store->ops->apply(limiter->store, op, plan.targets, plan.count, until_us, NULL, NULL, error);
}

/* While an override stands, what the limiter's own rules have counted is forgotten besides: it would hold again afterwards. */
static __attribute__((noinline)) tg_status
reset_own(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t until_us, tg_error *error)
{
    tg_target targets[TG_TARGETS_MAX];
    tg_target_list plan;
    tg_decision decision;
    size_t count = 0;
    const tg_status status = compose(limiter, dimensions, dimension_count, 0, &plan, &decision, error);
    for (size_t i = 0; status == TG_OK && i < decision.identity_count; i++)
        for (size_t k = 0; k < limiter->rule_count && count < TG_TARGETS_MAX; k++)
            targets[count++] = (tg_target){ .rule = &limiter->rules[k], .identity = &decision.identities[i] };
    return status == TG_OK
               ? limiter->store->ops->apply(limiter->store, TG_OP_RESET, targets, count, until_us, NULL, NULL, error)
               : status;
}

tg_status
tg_limiter_reset(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, tg_error *error)
{
    const uint64_t until_us = tg__waits_until(limiter->store, 0);
    const tg_status status = administer(limiter, TG_OP_RESET, dimensions, dimension_count, 0, until_us, error);
    return status == TG_OK && tg__overrides_any(limiter->store)
               ? reset_own(limiter, dimensions, dimension_count, until_us, error)
               : status;
}

tg_status
tg_limiter_refund(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                  tg_error *error)
{
    return administer(limiter, TG_OP_REFUND, dimensions, dimension_count, cost, 0, error);
}

tg_status
tg__limiter_plan(const tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                 tg_target_list *plan, tg_decision *decision, tg_error *error)
{
    return compose(limiter, dimensions, dimension_count, cost, plan, decision, error);
}

size_t
tg__refund_targets(const tg_decision *decision, tg_target targets[TG_TARGETS_MAX])
{
    size_t count = 0;
    for (size_t i = 0; i < decision->result_count; i++) {
        const tg_result *result = &decision->results[i];
        if (!result->charged)
            continue;
        targets[count++] = (tg_target){
            .rule = &result->rule,
            .identity = &decision->identities[result->identity],
            .cost = result->cost,
            .stamp_us = result->stamp_us,
            .own = true,
            .overflow = result->overflow,
        };
    }
    return count;
}

void
tg__refund_done(tg_decision *decision)
{
    for (size_t i = 0; i < decision->result_count; i++)
        decision->results[i].charged = false;
}

tg_status
tg_decision_refund(tg_store *store, tg_decision *decision, tg_error *error)
{
    tg_target targets[TG_TARGETS_MAX];
    const size_t count = tg__refund_targets(decision, targets);
    if (count == 0)
        return TG_OK;
    const tg_status status = store->ops->apply(store, TG_OP_REFUND, targets, count, 0, NULL, NULL, error);
    if (status == TG_OK)
        tg__refund_done(decision);
    return status;
}

/* ---- judging a request ---- */

static bool
has_header(const tg_request *request, const char *name)
{
    for (size_t i = 0; i < request->header_count; i++)
        if (tg__header_is(request->headers[i].name, name))
            return true;
    return false;
}

/* A browser asks before it sends: to count or refuse the question would hide the answer from the page (Fetch standard,
 * CORS-preflight request). */
bool
tg__options_is_preflight(const tg_request *request)
{
    return has_header(request, "Origin") &&
           has_header(request, "Access-Control-Request-Method");
}

static bool
same_identity(const tg_identity *a, const tg_identity *b)
{
    return a->length == b->length && memcmp(a->bytes, b->bytes, a->length) == 0;
}

/* The earlier charge of this same request on the target's counts, if there was one. */
static void
mark_charged(tg_target *target, const tg_decision *const *prior, size_t prior_count)
{
    for (size_t i = 0; i < prior_count; i++)
        for (size_t j = 0; j < prior[i]->result_count; j++) {
            const tg_result *result = &prior[i]->results[j];
            if (result->charged && memcmp(result->rule.scope, target->rule->scope, sizeof target->rule->scope) == 0 &&
                same_identity(&prior[i]->identities[result->identity], target->identity)) {
                target->charged = true;
                target->cost = result->cost;
                target->stamp_us = result->stamp_us;
                return;
            }
        }
}

static __attribute__((noinline)) void
mark_all_charged(tg_target_list *plan, const tg_matter *matter)
{
    for (size_t i = 0; i < plan->count; i++)
        mark_charged(&plan->targets[i], matter->prior, matter->prior_count);
}

/* The identity of one dimension, or the stand-in for it. TG_E_UNSUPPORTED: it waits for the body. */
static inline tg_status
identity_of(const tg_limiter *limiter, const tg_by *by, const tg_request *request, tg_judgement *judgement,
            tg_identity *identity, tg_error *error)
{
    const tg_status status = tg__by_of_request(by, limiter->client, request, identity, judgement->missing, error);
    if (__builtin_expect(status != TG_E_IDENTITY || limiter->missing_identity != TG_MISSING_SHARED, 1))
        return status;
    tg__by_shared(by, identity);
    return TG_OK;
}

/* Its index among those of the decision; their number: it is none of them. */
static __attribute__((noinline)) size_t
find_identity(const tg_decision *decision, const tg_identity *identity)
{
    size_t at = 0;
    while (at < decision->identity_count && !same_identity(&decision->identities[at], identity))
        at++;
    return at;
}

/* Where no identity has a place any more it may still be one of those that are there. */
static __attribute__((noinline, cold)) tg_status
identify_beyond(const tg_limiter *limiter, const tg_by *by, const tg_request *request, tg_judgement *judgement,
                size_t *index, tg_error *error)
{
    tg_identity beyond;
    const tg_status status = identity_of(limiter, by, request, judgement, &beyond, error);
    if (status != TG_OK)
        return status;
    *index = find_identity(&judgement->decision, &beyond);
    if (*index == TG_DIMENSIONS_MAX)
        return tg__error(error, TG_E_ARG, "one decision judges at most %d identities", TG_DIMENSIONS_MAX);
    return TG_OK;
}

/* Puts the identity of one dimension into the decision, or finds it there: the store hashes each once. */
static inline tg_status
identify(const tg_limiter *limiter, const tg_by *by, const tg_request *request, tg_judgement *judgement, size_t *index,
         tg_error *error)
{
    tg_decision *const decision = &judgement->decision;
    const size_t count = decision->identity_count;
    if (__builtin_expect(count == TG_DIMENSIONS_MAX, 0))
        return identify_beyond(limiter, by, request, judgement, index, error);
    tg_identity *const identity = &decision->identities[count];
    const tg_status status = identity_of(limiter, by, request, judgement, identity, error);
    if (status != TG_OK)
        return status;
    *index = count > 0 ? find_identity(decision, identity) : 0;
    if (*index == count)
        decision->identity_count = (uint8_t)(count + 1);
    return TG_OK;
}

/* Identities are missing: what missing_identity asks for is an answer, not a failure. */
static __attribute__((noinline, cold)) void
conclude_unidentified(const tg_limiter *limiter, tg_judgement *judgement)
{
    judgement->outcome = TG_UNIDENTIFIED;
    judgement->status = limiter->missing_identity == TG_MISSING_REJECT_400 ? 400 : 401;
    memcpy(judgement->policy, limiter->name, sizeof judgement->policy);
    judgement->needs_body = false;
    judgement->decision.allowed = false;
    judgement->decision.result_count = 0;
}

TG_EACH_REQUEST static __attribute__((noinline)) tg_status
plan_request(tg_bench *bench, const tg_matter *matter, tg_target_list *plan, tg_judgement *judgement, tg_error *error)
{
    for (size_t i = 0; i < bench->count; i++) {
        const tg_limiter *const limiter = bench->limiters[i];
        const uint64_t cost = bench->costs ? bench->costs[i] : matter->cost;
        if (limiter->by_count == 0)
            return tg__error(error, TG_E_ARG, "limiter '%s' has no `by`: it cannot tell who sent a request", limiter->name);
        if (limiter->store != bench->limiters[0]->store)
            return tg__error(error, TG_E_ARG, "limiters '%s' and '%s' count in different stores: judge them one by one",
                             bench->limiters[0]->name, limiter->name);
        for (size_t j = 0; j < limiter->by_count; j++) {
            size_t index;
            tg_status status = identify(limiter, limiter->by[j], matter->request, judgement, &index, error);
            if (status == TG_E_UNSUPPORTED) {
                judgement->needs_body = true;
                continue;
            }
            if (status == TG_OK)
                status = add_targets(plan, limiter, i, index, cost, &judgement->decision, error);
            if (status != TG_OK) {
                bench->reported = i;
                return status;
            }
        }
    }
    return TG_OK;
}

static inline void
conclude(const tg_limiter *reported, tg_judgement *judgement)
{
    const tg_decision *decision = &judgement->decision;
    if (reported)
        memcpy(judgement->policy, reported->name, sizeof judgement->policy);
    if (decision->allowed) {
        judgement->outcome = TG_ALLOWED;
        judgement->status = 0;
    } else if (decision->result_count == 0) {
        judgement->outcome = TG_UNAVAILABLE;
        judgement->status = 503;
    } else if (decision->results[decision->reported].rule.algorithm == TG_DENY) {
        judgement->outcome = TG_FORBIDDEN;
        judgement->status = 403;
    } else {
        judgement->outcome = TG_DENIED;
        judgement->status = 429; /* RFC 6585 section 4 */
    }
}

void
tg_limiter_conclude(const tg_limiter *limiter, tg_judgement *judgement)
{
    clear_judgement(judgement);
    conclude(limiter, judgement);
}

TG_EACH_REQUEST tg_status
tg__bench_judge(tg_bench *bench, const tg_matter *matter, tg_judgement *judgement, tg_error *error)
{
    const tg_request *const request = matter->request;
    tg_target_list plan;
    bench->reported = 0;
    bench->line = NULL;
    clear_judgement(judgement);
    begin_decision(&judgement->decision);
    plan.count = 0;
    const tg_status status = tg__is_preflight(request) ? TG_OK : plan_request(bench, matter, &plan, judgement, error);
    if (__builtin_expect(status != TG_OK || plan.count == 0, 0)) { /* perhaps all of it waits for the body */
        say_nothing(&judgement->decision);
        if (status != TG_E_IDENTITY)
            return status;
        conclude_unidentified(bench->limiters[bench->reported], judgement);
        return TG_OK;
    }
    if (matter->prior_count > 0)
        mark_all_charged(&plan, matter);
    const tg_op op = request->peek ? TG_OP_PEEK : TG_OP_HIT;
    if (__builtin_expect(matter->inquiry != NULL, 0)) {
        if (!decide_later(matter->inquiry, bench->limiters, bench->count, op, &plan, &judgement->decision))
            return TG__PENDING;
    } else {
        bench->line = decide(bench->limiters, bench->count, op, &plan, matter->until_us, &judgement->decision);
    }
    const tg_decision *const decision = &judgement->decision;
    if (decision->result_count > 0)
        bench->reported = decision->results[decision->reported].limiter;
    conclude(bench->limiters[bench->reported], judgement);
    judgement->needs_body &= judgement->status == 0; /* a refusal is final: its body is never read */
    return TG_OK;
}

/* Part of both that follow, so that the shorter way is not one call longer. */
static inline __attribute__((always_inline)) tg_status
judge_alike(tg_limiter *const *limiters, size_t limiter_count, const tg_matter *matter, tg_judgement *judgement,
            tg_error *error)
{
    if (limiter_count == 0 || limiter_count > TG_LIMITERS_MAX)
        return tg__error(error, TG_E_ARG, "a request is judged by 1 to %d limiters, not %zu", TG_LIMITERS_MAX,
                         limiter_count);
    if (matter->cost > TG_LIMIT_MAX)
        return tg__error(error, TG_E_ARG, "a cost is at most %" PRIu64 ", not %" PRIu64, TG_LIMIT_MAX, matter->cost);
    tg_bench bench = { .limiters = limiters, .count = limiter_count };
    unsigned reads = 0;
    for (size_t i = 0; i < limiter_count; i++)
        reads |= limiters[i]->reads;
    const tg_status read = tg__request_read(matter->request, reads, error);
    if (read != TG_OK)
        return read;
    const tg_status status = tg__bench_judge(&bench, matter, judgement, error);
    if (status == TG_OK && !matter->request->peek)
        tg__metrics_judged(&bench, judgement);
    return status;
}

tg_status
tg__limiters_judge(tg_limiter *const *limiters, size_t limiter_count, const tg_matter *matter, tg_judgement *judgement,
                   tg_error *error)
{
    return judge_alike(limiters, limiter_count, matter, judgement, error);
}

TG_EACH_REQUEST tg_status
tg_limiters_judge(tg_limiter *const *limiters, size_t limiter_count, const tg_request *request, uint64_t cost,
                  const tg_decision *const *prior, size_t prior_count, tg_judgement *judgement, tg_error *error)
{
    const uint64_t until_us = limiter_count ? tg__waits_until(limiters[0]->store, request->waited_us) : 0;
    const tg_matter matter = { request, cost, prior, prior_count, until_us, NULL };
    const tg_status status = judge_alike(limiters, limiter_count, &matter, judgement, error);
    if (until_us)
        tg__judgement_waited(judgement, limiters[0]->store, request, until_us);
    return status;
}

void
tg__judgement_waited(tg_judgement *judgement, const tg_store *store, const tg_request *request, uint64_t until_us)
{
    const uint64_t before_us = request->waited_us < store->timeout_us ? request->waited_us : store->timeout_us;
    const uint64_t began_us = until_us - (store->timeout_us - before_us);
    const uint64_t took_us = tg__monotonic_us() - began_us;
    judgement->waited_us = took_us < store->timeout_us ? took_us : store->timeout_us;
}

void
tg__judgement_unmatched(tg_judgement *judgement)
{
    clear_judgement(judgement);
    begin_decision(&judgement->decision);
    say_nothing(&judgement->decision);
}
