/* tiered+redis:// and its like: what is known to be denied is denied here. A decision over several targets is told in full
 * from what is known of each; where something is not known the store behind is asked.
 * Must not enter: Redis, sockets, arithmetic of an algorithm. */
#include "stores/tiered/tiered.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

/* How often a client that is known to be denied is asked about for the sake of what stands beside it, before it is answered
 * by what is known: a client that invents an account with each request would else cost a question each. */
#define COMPANY_MAX 8
#define NOT_SEEN UINT64_MAX
#define PREFIX "tiered+"

/* ---- all of this process, for forks ---- */

static _Atomic(tg_tiered *) all;
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;

static void
begin_child(void)
{
    pthread_mutex_init(&all_lock, NULL);
    for (tg_tiered *one = atomic_load(&all); one; one = one->next) {
        tg__denials_after_fork(one->denials);
        if (one->grants)
            tg__grants_after_fork(one->grants);
        if (one->flush)
            tg__flush_after_fork(one->flush);
    }
}

static void
register_child(void)
{
    pthread_atfork(NULL, NULL, begin_child);
}

static void
enlist(tg_tiered *tiered)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_child);
    pthread_mutex_lock(&all_lock);
    tiered->next = atomic_load(&all);
    atomic_store(&all, tiered);
    pthread_mutex_unlock(&all_lock);
}

static void
flush_at_exit(void)
{
    pthread_mutex_lock(&all_lock);
    for (tg_tiered *one = atomic_load(&all); one; one = one->next)
        if (one->flush)
            tg__flush_now(one->flush);
    pthread_mutex_unlock(&all_lock);
}

static void
register_exit(void)
{
    atexit(flush_at_exit);
}

/* Called when a store behind has answered: what its connection needs is there, and is taken down after this. */
void
tg__tiered_flushes_at_exit(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_exit);
}

/* By single pointers, so that a child forked meanwhile finds a list. */
static void
strike_off(tg_tiered *tiered)
{
    pthread_mutex_lock(&all_lock);
    if (atomic_load(&all) == tiered)
        atomic_store(&all, tiered->next);
    for (tg_tiered *before = atomic_load(&all); before; before = before->next)
        if (before->next == tiered)
            before->next = tiered->next;
    pthread_mutex_unlock(&all_lock);
}

/* ---- what is known ---- */

/* Runs on while the machine sleeps. */
uint64_t
tg__tiered_now_us(const tg_tiered *tiered)
{
    if (tiered->clock)
        return tg_clock_now_us(tiered->clock);
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

uint64_t
tg__tiered_epoch(const tg_tiered *tiered)
{
    return tg__denials_epoch(tiered->denials, atomic_load(&tiered->inner->epoch));
}

/* One bit out of 1024: another rule's refunds may shorten a memory, and nothing worse. */
static void
note_given(tg_tiered *tiered, const tg_rule *rule)
{
    _Atomic uint64_t *word = &tiered->gives_back[rule->scope[0] & 15];
    const uint64_t bit = UINT64_C(1) << (rule->scope[1] & 63);
    if (!(atomic_load_explicit(word, memory_order_relaxed) & bit))
        atomic_fetch_or_explicit(word, bit, memory_order_relaxed);
}

static bool
gives_back(const tg_tiered *tiered, const tg_target *target)
{
    const uint64_t word = atomic_load_explicit(&tiered->gives_back[target->rule->scope[0] & 15], memory_order_relaxed);
    return target->gives_back || (word >> (target->rule->scope[1] & 63) & 1);
}

/* Judged by nothing but rule, state and cost. */
static bool
is_plain(const tg_target *targets, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (targets[i].charged || targets[i].forced || targets[i].patience_us || targets[i].counts_denied)
            return false;
    return true;
}

static void
see_nothing(const tg_rule *rule, uint64_t as_us, tg_sight *sight)
{
    *sight = (tg_sight){ .now_us = as_us };
    if (rule->algorithm == TG_SLIDING_LOG)
        sight->log.newest_us = sight->log.makes_room_us = sight->log.last_us = sight->log.leaves_us = -1;
}

/* `sent_us` is when this is asked. Returns whether the results are filled. */
static bool
know(tg_tiered *tiered, const tg_target *targets, size_t count, const tg_denial_key *keys, uint64_t sent_us,
     uint64_t epoch, tg_result *results)
{
    tg_sight sights[TG_TARGETS_MAX];
    tg_denial_found found[TG_TARGETS_MAX];
    uint8_t first_of[TG_TARGETS_MAX];
    uint64_t as_us = UINT64_MAX;
    size_t absent = 0;
    bool deny_rule = false;
    for (size_t i = 0; i < count; i++) {
        uint64_t this_us;
        first_of[i] = (uint8_t)i;
        found[i] = TG__DENIAL_HOLDS;
        if (targets[i].rule->algorithm == TG_DENY) {
            deny_rule = true;
            continue;
        }
        for (size_t j = 0; j < i && first_of[i] == i; j++)
            if (memcmp(&keys[i], &keys[j], sizeof keys[i]) == 0)
                first_of[i] = (uint8_t)j;
        found[i] = tg__denials_find(tiered->denials, &targets[i], &keys[i], epoch, sent_us, &sights[i], &this_us);
        if (found[i] == TG__DENIAL_MOVED)
            return false;
        if (found[i] == TG__DENIAL_ABSENT)
            absent++;
        else if (this_us < as_us)
            as_us = this_us; /* each is the server's time or later: the least is the nearest */
    }
    bool denied = false, told = false;
    for (size_t i = 0; i < count; i++) {
        if (targets[i].rule->algorithm == TG_DENY || found[i] != TG__DENIAL_HOLDS ||
            tg__sight_fits(&targets[i], &sights[i], as_us))
            continue;
        denied = true;
        if (absent && tg__denials_company(tiered->denials, &targets[i], &keys[i]) >= COMPANY_MAX)
            told = true;
    }
    if (!denied || (absent && (!told || deny_rule)))
        return false;
    for (size_t i = 0; i < count; i++)
        if (found[i] == TG__DENIAL_ABSENT)
            see_nothing(targets[i].rule, as_us, &sights[i]);
    return tg__sights_tell(TG_OP_HIT, targets, first_of, count, deny_rule, sights, as_us, 0, results);
}

/* ---- the first layer, where it was asked for ---- */

/* A token bucket of so much of each rule; no cost is beyond it for ever. */
static void
local_targets(const tg_tiered *tiered, const tg_target *targets, size_t count, tg_rule *rules, tg_target *local)
{
    for (size_t i = 0; i < count; i++) {
        const tg_rule *rule = targets[i].rule;
        rules[i] = *rule;
        local[i] = (tg_target){ .rule = &rules[i], .identity = targets[i].identity, .cost = targets[i].cost };
        if (rule->algorithm == TG_DENY)
            continue;
        rules[i].algorithm = TG_TOKEN_BUCKET;
        rules[i].aligned = false;
        rules[i].resolution_us = 0;
        rules[i].limit = (rule->limit * tiered->local_percent + 99) / 100;
        rules[i].burst = (rule->burst * tiered->local_percent + 99) / 100;
        if (local[i].cost > rules[i].burst)
            local[i].cost = rules[i].burst;
    }
}

static bool
passes_locally(tg_tiered *tiered, const tg_target *targets, size_t count, tg_result *results)
{
    tg_rule rules[TG_TARGETS_MAX];
    tg_target local[TG_TARGETS_MAX];
    local_targets(tiered, targets, count, rules, local);
    if (tiered->local->ops->apply(tiered->local, TG_OP_HIT, local, count, 0, results, NULL, NULL) != TG_OK)
        return true; /* it is a help, no judge */
    bool passes = true;
    for (size_t i = 0; i < count; i++) {
        passes &= results[i].allowed;
        results[i].charged = false;
    }
    return passes;
}

static void
forget_locally(tg_tiered *tiered, tg_op op, const tg_target *targets, size_t count)
{
    tg_rule rules[TG_TARGETS_MAX];
    tg_target local[TG_TARGETS_MAX];
    local_targets(tiered, targets, count, rules, local);
    tiered->local->ops->apply(tiered->local, op, local, count, 0, NULL, NULL, NULL);
}

/* ---- leases, where they were asked for ---- */

/* How many times its cost a decision may take ahead: a tenth of the limit for all workers together. */
static uint64_t
batch_of(const tg_tiered *tiered, const tg_target *targets, size_t count)
{
    uint64_t batch = tiered->lease;
    for (size_t i = 0; i < count; i++) {
        const tg_rule *rule = targets[i].rule;
        if (rule->algorithm == TG_DENY || rule->algorithm == TG_LEAKY_BUCKET || targets[i].cost == 0)
            return 1; /* each hit of a leaky bucket has a delay of its own */
        const uint64_t most = rule->limit / (10 * tiered->workers) / targets[i].cost;
        batch = most < batch ? most : batch;
    }
    return batch > 1 ? batch : 1;
}

/* From what was taken ahead, for all targets or for none. */
static bool
passes_on_lease(tg_tiered *tiered, const tg_tier_question *question, const tg_target *targets, tg_result *results,
                bool *scarce)
{
    size_t taken = 0;
    *scarce = false;
    for (; taken < question->count; taken++) {
        for (size_t j = 0; j < taken; j++)
            if (memcmp(&question->keys[j], &question->keys[taken], sizeof question->keys[j]) == 0)
                *scarce = true; /* two rules on one count are not leased */
        if (*scarce)
            break;
        const tg_grant_found found = tg__grants_take(tiered->grants, &targets[taken], &question->keys[taken],
                                                     question->epoch, question->sent_us, &results[taken]);
        *scarce = found == TG__GRANT_SCARCE;
        if (found != TG__GRANT_TAKEN)
            break;
    }
    if (taken == question->count)
        return true;
    for (size_t i = 0; i < taken; i++)
        tg__grants_give_back(tiered->grants, &targets[i], &question->keys[i]);
    return false;
}

/* What a batch has brought: the decision's own part, and the rest to be given out. */
static void
keep_rest(tg_tiered *tiered, const tg_tier_question *question, tg_result *results)
{
    for (size_t i = 0; i < question->count; i++) {
        const uint64_t cost = question->targets[i].cost / question->batch;
        tg__grants_put(tiered->grants, &question->targets[i], &question->keys[i], question->epoch, question->sent_us,
                       question->targets[i].cost - cost, &results[i]);
        results[i].remaining += question->targets[i].cost - cost;
    }
}

/* ---- hits that are told behind the answer, where that was asked for ---- */

static bool
is_repeated(const tg_tier_question *question, size_t at)
{
    for (size_t i = 0; i < at; i++)
        if (memcmp(&question->keys[i], &question->keys[at], sizeof question->keys[i]) == 0)
            return true;
    return false;
}

/* By what is known of all targets, or not. It lets through and never denies. */
static bool
passes_ahead(tg_tiered *tiered, const tg_tier_question *question, const tg_target *targets, tg_result *results)
{
    size_t taken = 0;
    while (taken < question->count && targets[taken].rule->algorithm != TG_DENY && !is_repeated(question, taken) &&
           tg__flush_take(tiered->flush, &targets[taken], &question->keys[taken], question->epoch, question->sent_us,
                          &results[taken]))
        taken++;
    const bool passes = taken == question->count;
    for (size_t i = 0; i < taken; i++)
        if (passes)
            tg__denials_drop(tiered->denials, &question->keys[i], false);
        else
            tg__flush_give_back(tiered->flush, &targets[i], &question->keys[i]);
    return passes;
}

/* What waits has not been charged, and is given back here. Whether nothing is left to be given back behind. */
static bool
gives_back_ahead(tg_tiered *tiered, tg_tier_question *question)
{
    bool given[TG_TARGETS_MAX], every = true;
    for (size_t i = 0; i < question->count; i++) {
        given[i] = tg__flush_give_back(tiered->flush, &question->targets[i], &question->keys[i]);
        every &= given[i];
    }
    if (every)
        tg__tiered_learn(tiered, question, TG_OK, NULL);
    for (size_t i = 0; i < question->count; i++)
        if (given[i])
            question->targets[i].cost = 0;
    return every;
}

static void
learn_states(tg_tiered *tiered, const tg_tier_question *question, const tg_result *results)
{
    for (size_t i = 0; i < question->count; i++)
        if (question->sights[i].now_us != NOT_SEEN && !is_repeated(question, i))
            tg__flush_learn(tiered->flush, &question->targets[i], &question->keys[i], question->epoch,
                            &question->sights[i], results[i].charged);
}

bool
tg__tiered_answers(tg_tiered *tiered, tg_op op, const tg_target *targets, size_t count, tg_result *results,
                   tg_tier_question *question)
{
    question->op = op;
    question->count = count;
    question->learns = (op == TG_OP_HIT || op == TG_OP_PEEK) && is_plain(targets, count);
    question->sent_us = tg__tiered_now_us(tiered);
    question->epoch = tg__tiered_epoch(tiered);
    tg__denials_keys(tiered->denials, targets, count, question->keys);
    if (op == TG_OP_HIT && question->learns &&
        know(tiered, targets, count, question->keys, question->sent_us, question->epoch, results))
        return true;
    question->local = false;
    question->batch = 1;
    if (op == TG_OP_HIT && question->learns && tiered->local) {
        if (!passes_locally(tiered, targets, count, results))
            return true;
        question->local = true;
    }
    if (op == TG_OP_HIT && question->learns && tiered->flush && passes_ahead(tiered, question, targets, results))
        return true;
    if (op == TG_OP_HIT && question->learns && tiered->grants) {
        bool scarce;
        if (passes_on_lease(tiered, question, targets, results, &scarce))
            return true;
        if (!scarce)
            question->batch = batch_of(tiered, targets, count);
    }
    for (size_t i = 0; i < count; i++) {
        question->marks[i] = tg__denials_mark(tiered->denials, &question->keys[i]);
        question->targets[i] = targets[i];
        question->targets[i].cost *= question->batch;
        if (tiered->flush && op == TG_OP_REFUND && targets[i].rule->algorithm == TG_SLIDING_LOG)
            question->targets[i].own = false; /* its entry bears the time of a batch, which nobody was told */
        question->targets[i].sight = question->learns ? &question->sights[i] : NULL;
        question->sights[i].now_us = NOT_SEEN;
    }
    if (tiered->flush && op == TG_OP_REFUND)
        return gives_back_ahead(tiered, question);
    return false;
}

static void
learn_denial(tg_tiered *tiered, const tg_tier_question *question)
{
    tg_denial denial = { .sent_us = question->sent_us, .epoch = question->epoch };
    uint64_t life_us = TG__DENIAL_LIFE_US;
    for (size_t i = 0; i < question->count; i++)
        if (gives_back(tiered, &question->targets[i]))
            life_us = TG__DENIAL_LIFE_SHORT_US;
    denial.until_us = denial.sent_us + life_us;
    for (size_t i = 0; i < question->count; i++) {
        if (question->sights[i].now_us == NOT_SEEN)
            continue;
        denial.sight = question->sights[i];
        tg__denials_put(tiered->denials, &question->targets[i], &question->keys[i], question->marks[i], &denial);
    }
}

bool
tg__tiered_learn(tg_tiered *tiered, tg_tier_question *question, tg_status status, tg_result *results)
{
    if (question->op == TG_OP_REFUND || question->op == TG_OP_RESET) { /* also when nobody knows whether it took effect */
        for (size_t i = 0; i < question->count; i++) {
            tg__denials_drop(tiered->denials, &question->keys[i], true);
            if (tiered->grants && question->op == TG_OP_RESET)
                tg__grants_drop(tiered->grants, &question->keys[i]);
            if (tiered->flush && question->op == TG_OP_RESET)
                tg__flush_drop(tiered->flush, &question->keys[i]);
            if (question->op == TG_OP_REFUND)
                note_given(tiered, question->targets[i].rule);
        }
        if (tiered->local)
            forget_locally(tiered, question->op, question->targets, question->count);
        return false;
    }
    if (status != TG_OK) { /* the store behind has begun another epoch, or was not asked */
        if (question->local)
            forget_locally(tiered, TG_OP_REFUND, question->targets, question->count);
        return false;
    }
    if (tiered->flush && question->op == TG_OP_HIT && question->learns)
        learn_states(tiered, question, results);
    bool denied = false;
    for (size_t i = 0; i < question->count; i++) {
        denied |= !results[i].allowed;
        if (results[i].charged)
            tg__denials_drop(tiered->denials, &question->keys[i], false);
    }
    if (question->batch > 1 && !denied)
        keep_rest(tiered, question, results);
    if (question->batch > 1 && denied) {
        for (size_t i = 0; i < question->count; i++) {
            tg__grants_put(tiered->grants, &question->targets[i], &question->keys[i], question->epoch, question->sent_us, 0,
                           &results[i]);
            question->targets[i].cost /= question->batch;
        }
        question->batch = 1;
        return true;
    }
    if (denied && question->local)
        forget_locally(tiered, TG_OP_REFUND, question->targets, question->count);
    if (denied && question->learns)
        learn_denial(tiered, question);
    return false;
}

/* ---- a store ---- */

static tg_status
tiered_apply(tg_store *store, tg_op op, const tg_target *targets, size_t count, uint64_t until_us, tg_result *results,
             bool *overflow, tg_error *error)
{
    tg_tiered *tiered = tg__tiered_of(store);
    tg_denial_key keys[TG_TARGETS_MAX];
    uint64_t marks[TG_TARGETS_MAX];
    tg_sight sights[TG_TARGETS_MAX];
    tg_target asked[TG_TARGETS_MAX];
    tg_tier_question question = { .keys = keys, .marks = marks, .sights = sights, .targets = asked };
    if (overflow)
        *overflow = false;
    if (tg__tiered_answers(tiered, op, targets, count, results, &question))
        return TG_OK;
    tg_status status;
    if (until_us == 0) /* a second question has what is left */
        until_us = tg__monotonic_us() + store->timeout_us;
    do
        status = tiered->inner->ops->apply(tiered->inner, op, asked, count, until_us, results, overflow, error);
    while (tg__tiered_learn(tiered, &question, status, results));
    return status;
}

static tg_store *
inner_of(tg_store *store)
{
    return tg__tiered_of(store)->inner;
}

/* Reservations are the store behind's own; what they change is forgotten here, and what they hold comes back by itself. */
static tg_status
tiered_lease(tg_store *store, tg_lease_op op, const tg_target *targets, size_t count, tg_lease *lease, tg_result *results,
             bool *overflow, tg_error *error)
{
    tg_tiered *tiered = tg__tiered_of(store);
    tg_denial_key keys[TG_TARGETS_MAX];
    tg__denials_keys(tiered->denials, targets, count, keys);
    const tg_status status =
        tiered->inner->ops->lease(tiered->inner, op, targets, count, lease, results, overflow, error);
    for (size_t i = 0; i < count; i++) {
        note_given(tiered, targets[i].rule);
        if (op != TG_LEASE_RENEW)
            tg__denials_drop(tiered->denials, &keys[i], op == TG_LEASE_SETTLE);
    }
    return status;
}

static tg_status
tiered_admit_rule(tg_store *store, const tg_rule *rule, tg_error *error)
{
    tg_store *inner = inner_of(store);
    return inner->ops->admit_rule(inner, rule, error);
}

static tg_status
tiered_name_rule(tg_store *store, const tg_rule *rule, const char *space, const char *name, tg_error *error)
{
    tg_store *inner = inner_of(store);
    return inner->ops->name_rule ? inner->ops->name_rule(inner, rule, space, name, error) : TG_OK;
}

static uint64_t
tiered_now_us(tg_store *store)
{
    return inner_of(store)->ops->now_us(inner_of(store));
}

static int64_t
tiered_utc_offset_us(tg_store *store)
{
    return inner_of(store)->ops->utc_offset_us(inner_of(store));
}

static tg_status
tiered_stats(tg_store *store, tg_store_stats *stats, tg_error *error)
{
    return inner_of(store)->ops->stats(inner_of(store), stats, error);
}

static tg_status
tiered_examine(tg_store *store, tg_error *error)
{
    tg_store *inner = inner_of(store);
    return inner->ops->examine ? inner->ops->examine(inner, error) : TG_OK;
}

static _Atomic uint64_t *
tiered_watch_line(tg_store *store, const tg_metric_name *name)
{
    tg_store *inner = inner_of(store);
    return inner->ops->watch_line ? inner->ops->watch_line(inner, name) : NULL;
}

static const tg_metric_name *
tiered_metric_name(tg_store *store, const char *space, const char *name)
{
    tg_store *inner = inner_of(store);
    return inner->ops->metric_name ? inner->ops->metric_name(inner, space, name) : NULL;
}

static _Atomic uint64_t *
tiered_metric_line(tg_store *store, const tg_metric_name *name)
{
    return inner_of(store)->ops->metric_line(inner_of(store), name);
}

static void
tiered_latency_add(tg_store *store, uint64_t latency_ns)
{
    inner_of(store)->ops->latency_add(inner_of(store), latency_ns);
}

static tg_status
tiered_metrics(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count, tg_latency_metrics *latency,
               tg_error *error)
{
    tg_store *inner = inner_of(store);
    if (!inner->ops->metrics)
        return tg__error(error, TG_E_UNSUPPORTED, "store %s keeps no metrics", store->shown);
    return inner->ops->metrics(inner, policies, room, count, latency, error);
}

static tg_status
tiered_override_set(tg_store *store, const tg_override *override, tg_error *error)
{
    tg_store *inner = inner_of(store);
    if (!inner->ops->override_set)
        return tg__error(error, TG_E_UNSUPPORTED, "store %s keeps no overrides", store->shown);
    return inner->ops->override_set(inner, override, error);
}

static tg_status
tiered_override_list(tg_store *store, const char *space, const char *policy, const uint8_t identity[16],
                     tg_override *overrides, size_t room, size_t *count, tg_error *error)
{
    tg_store *inner = inner_of(store);
    if (!inner->ops->override_list)
        return tg__error(error, TG_E_UNSUPPORTED, "store %s keeps no overrides", store->shown);
    return inner->ops->override_list(inner, space, policy, identity, overrides, room, count, error);
}

static void
tiered_close(tg_store *store)
{
    if (!store)
        return;
    tg_tiered *tiered = tg__tiered_of(store);
    if (tiered->inner) {
        strike_off(tiered);
        tg__flush_close(tiered->flush);
        tiered->flush = NULL;
        tg_store_close(tiered->inner);
    }
    tg_store_close(tiered->local);
    tg__denials_close(tiered->denials);
    tg__grants_close(tiered->grants);
    tg__flush_close(tiered->flush);
    free(tiered);
}

static const tg_store_ops tiered_ops = {
    .name = "tiered",
    .remote = true,
    .apply = tiered_apply,
    .async_open = tg__tiered_async_open,
    .admit_rule = tiered_admit_rule,
    .name_rule = tiered_name_rule,
    .now_us = tiered_now_us,
    .utc_offset_us = tiered_utc_offset_us,
    .stats = tiered_stats,
    .close = tiered_close,
    .examine = tiered_examine,
    .watch_line = tiered_watch_line,
    .metric_name = tiered_metric_name,
    .metric_line = tiered_metric_line,
    .latency_add = tiered_latency_add,
    .metrics = tiered_metrics,
    .override_set = tiered_override_set,
    .override_list = tiered_override_list,
};

/* ---- opening ---- */

/* The registry does not know of it: tg_store_close is all that may be called for it. */
static tg_status
adopt(tg_store *store, const char *name, const tg_store_options *options, tg_error *error)
{
    store->uri = strdup(name);
    store->clock = options->clock;
    if (store->clock)
        tg_clock_retain(store->clock);
    atomic_store(&store->references, 1);
    return store->uri ? TG_OK : tg__error(error, TG_E_NOMEM, "tiered store: %zu bytes", strlen(name) + 1);
}

static tg_status
read_option(tg_text name, tg_text value, uint64_t least, uint64_t most, uint64_t *number, tg_error *error)
{
    char shown[32], named[32];
    if (tg__text_number(value, most, number) && *number >= least)
        return TG_OK;
    return tg__error(error, TG_E_CONFIG, "a tiered store's %s is '%s': expected %" PRIu64 " to %" PRIu64,
                     tg__text_show(name, named, sizeof named), tg__text_show(value, shown, sizeof shown), least, most);
}

static tg_status
read_flush(tg_text value, uint64_t *us, tg_error *error)
{
    char shown[32];
    const bool in_ms = value.length > 2 && memcmp(value.data + value.length - 2, "ms", 2) == 0;
    const size_t unit = in_ms ? 2 : 1;
    uint64_t number;
    if (value.length > unit && value.data[value.length - 1] == 's' &&
        tg__text_number((tg_text){ value.data, value.length - unit }, in_ms ? 1000 : 1, &number) && number > 0) {
        *us = number * (in_ms ? 1000 : 1000000);
        return TG_OK;
    }
    return tg__error(error, TG_E_CONFIG, "a tiered store's flush is '%s': expected 1ms to 1000ms, or 1s",
                     tg__text_show(value, shown, sizeof shown));
}

/* Takes the tiers' own options out of the URI. */
static tg_status
read_options(tg_tiered *tiered, const tg_store_uri *uri, tg_store_uri *behind, tg_error *error)
{
    tg_status status = TG_OK;
    *behind = *uri;
    behind->scheme.data += sizeof PREFIX - 1;
    behind->scheme.length -= sizeof PREFIX - 1;
    behind->option_count = 0;
    behind->tiered = true;
    tiered->workers = 1;
    for (size_t i = 0; i < uri->option_count && status == TG_OK; i++) {
        const tg_text name = uri->options[i].name, value = uri->options[i].value;
        uint64_t number = 0;
        if (tg__text_is(name, "local")) {
            status = read_option(name, value, 1, 100, &number, error);
            tiered->local_percent = (unsigned)number;
        } else if (tg__text_is(name, "lease")) {
            status = read_option(name, value, 2, 1000000, &tiered->lease, error);
        } else if (tg__text_is(name, "flush")) {
            status = read_flush(value, &tiered->flush_us, error);
        } else if (tg__text_is(name, "workers")) {
            status = read_option(name, value, 1, 100000, &tiered->workers, error);
        } else {
            behind->options[behind->option_count++] = uri->options[i];
        }
    }
    if (status == TG_OK && tiered->flush_us && tiered->lease)
        return tg__error(error, TG_E_CONFIG, "a tiered store has both flush and lease: expected one of them");
    return status;
}

tg_status
tg__tiered_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error)
{
    tg_tiered unused = { .lease = 0 };
    tg_store_uri behind;
    const tg_status status = read_options(&unused, uri, &behind, error);
    return status == TG_OK ? tg__redis_check_address(&behind, rule, error) : status;
}

static tg_status
open_tiers(tg_tiered *tiered, const tg_store_uri *uri, const tg_store_options *options, tg_error *error)
{
    tg_store_uri behind;
    tg_status status = read_options(tiered, uri, &behind, error);
    tiered->denials = tg__denials_open();
    if (tiered->lease)
        tiered->grants = tg__grants_open();
    if (tiered->flush_us)
        tiered->flush = tg__flush_open(tiered, tiered->flush_us);
    if (status == TG_OK &&
        (!tiered->denials || (tiered->lease && !tiered->grants) || (tiered->flush_us && !tiered->flush)))
        status = tg__error(error, TG_E_NOMEM, "tiered store: what it remembers");
    if (status == TG_OK && tiered->local_percent) {
        const tg_store_uri table = { .scheme = tg_text_of("memory"), .rest = tg_text_of("tiers") };
        status = tg__table_open(&table, options, &tiered->local, error);
        if (status == TG_OK)
            status = adopt(tiered->local, "memory://tiers", options, error);
    }
    if (status == TG_OK)
        status = tg__redis_open(&behind, options, &tiered->inner, error);
    return status == TG_OK ? adopt(tiered->inner, PREFIX, options, error) : status;
}

tg_status
tg__tiered_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **opened, tg_error *error)
{
    tg_tiered *tiered = calloc(1, sizeof *tiered);
    if (!tiered)
        return tg__error(error, TG_E_NOMEM, "tiered store: %zu bytes", sizeof *tiered);
    tiered->ops = tiered_ops;
    tiered->base.ops = &tiered->ops;
    tiered->base.private_kinds = options->private_kinds;
    tiered->clock = options->clock; /* store.c holds the reference */
    const tg_status status = open_tiers(tiered, uri, options, error);
    if (status != TG_OK) {
        tiered_close(&tiered->base);
        return status;
    }
    if (tiered->inner->ops->lease)
        tiered->ops.lease = tiered_lease;
    enlist(tiered);
    tiered->base.shown = tiered->inner->shown;
    tiered->base.timeout_us = tiered->inner->timeout_us;
    tiered->base.counts_denied = tiered->inner->counts_denied;
    /* Trouble that was found at opening has been spoken of. */
    atomic_store(&tiered->base.failing, atomic_load(&tiered->inner->failing));
    atomic_store(&tiered->base.last_failure_us, atomic_load(&tiered->inner->last_failure_us));
    atomic_store(&tiered->base.overrides, atomic_load(&tiered->inner->overrides));
    *opened = &tiered->base;
    return TG_OK;
}
