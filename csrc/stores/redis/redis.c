/* redis:// and redis+unix://: one script call decides over all rules and identities of a decision. What happens when it
 * cannot: never past the deadline, and hardly any time at all once it is known (the circuit breaker).
 * Must not enter: what a rule means; RESP; sockets. */
#include "stores/redis/redis.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#define CALL_BYTES_MAX 49152 /* TG_TARGETS_MAX keys and descriptions at their longest */
#define DESCRIPTION_BYTES 52
#define OPEN_DEADLINE_US UINT64_C(250000) /* a start is not held up longer by a Redis that is not there */
#define CLOCK_US_MAX ((UINT64_C(1) << 53) - 1 - 2 * TG_PERIOD_US_MAX) /* no sum in a script reaches 2^53 */
#define TRIP_AFTER 3 /* failures in a row */

static tg_redis_store *
redis_of(tg_store *store)
{
    return (tg_redis_store *)store; /* base is its first member */
}

/* ---- the circuit breaker ---- */

/* The first pause is short: most troubles are a restart or a moment's stall. Then up to 1.6 s, so that Redis is asked again
 * within 2 s of being back; drawn anew each time, so that many processes do not come back at one instant. */
static uint64_t
pause_us(uint32_t openings)
{
    static const uint32_t spans_us[] = { 200000, 700000, 1500000 };
    const uint32_t span_us = spans_us[openings < 3 ? openings : 2];
    uint32_t drawn = 0;
    if (getrandom(&drawn, sizeof drawn, GRND_NONBLOCK) != sizeof drawn)
        drawn = (uint32_t)tg__monotonic_us() * UINT32_C(2654435761);
    return 50000 + (openings > 0 ? 50000 : 0) + (uint64_t)drawn * span_us / UINT32_MAX;
}

/* Whether this call may ask Redis. `probe`: it is the one that finds out whether trouble is over. */
static bool
breaker_passes(tg_redis_store *store, bool *probe)
{
    *probe = false;
    const uint64_t asks_again_us = atomic_load_explicit(&store->asks_again_us, memory_order_relaxed);
    if (asks_again_us == 0)
        return true;
    if (tg__monotonic_us() < asks_again_us || atomic_exchange(&store->probing, true))
        return false;
    *probe = true;
    return true;
}

static void
breaker_hears(tg_redis_store *store, tg_trouble trouble, bool probe)
{
    if (trouble == TG__TROUBLE_NONE || trouble == TG__TROUBLE_REFUSED) { /* refused: it answers, and quickly */
        if (atomic_load_explicit(&store->failures_in_row, memory_order_relaxed) != 0)
            atomic_store(&store->failures_in_row, 0);
        if (atomic_load_explicit(&store->asks_again_us, memory_order_relaxed) != 0)
            atomic_store(&store->asks_again_us, 0);
        if (atomic_load_explicit(&store->openings, memory_order_relaxed) != 0)
            atomic_store(&store->openings, 0);
    } else if (atomic_fetch_add(&store->failures_in_row, 1) + 1 >= TRIP_AFTER || probe) {
        const uint32_t openings = atomic_fetch_add(&store->openings, probe || atomic_load(&store->openings) == 0);
        atomic_store(&store->asks_again_us, tg__monotonic_us() + pause_us(openings));
    }
    if (probe)
        atomic_store(&store->probing, false);
}

/* ---- one call ---- */

typedef struct tg_call {
    uint8_t first_of[TG_TARGETS_MAX]; /* the first target with the same counts */
    uint8_t key_of[TG_TARGETS_MAX];   /* 1-based, as KEYS is */
    size_t key_count;
    unsigned algorithms;
    bool denied;  /* a `deny` rule is among them */
    size_t asked; /* targets that Redis is asked about */
} tg_call;

static bool
same_counts(const tg_target *a, const tg_target *b)
{
    return memcmp(a->rule->scope, b->rule->scope, sizeof a->rule->scope) == 0 &&
           (a->identity == b->identity ||
            (a->identity->length == b->identity->length &&
             memcmp(a->identity->bytes, b->identity->bytes, a->identity->length) == 0));
}

static void
plan_call(tg_call *call, tg_op op, const tg_target *targets, size_t target_count)
{
    *call = (tg_call){ .key_count = 0 };
    for (size_t i = 0; i < target_count; i++) {
        call->first_of[i] = (uint8_t)i;
        if (targets[i].rule->algorithm == TG_DENY) {
            call->denied = true;
            continue;
        }
        for (size_t j = 0; j < i; j++)
            if (targets[j].rule->algorithm != TG_DENY && same_counts(&targets[i], &targets[j])) {
                call->first_of[i] = (uint8_t)j;
                break;
            }
        if (call->first_of[i] == i)
            call->key_of[i] = (uint8_t)++call->key_count;
        else if (op == TG_OP_REFUND)
            continue; /* charged once, given back once */
        else
            call->key_of[i] = call->key_of[call->first_of[i]];
        call->asked++;
        call->algorithms |= 1u << targets[i].rule->algorithm;
    }
}

static void
put_keys(tg_resp *resp, const tg_redis_store *store, const tg_redis_keyring *keyring, const tg_call *call,
         const tg_target *targets, size_t target_count)
{
    char key[TG__REDIS_KEY_MAX];
    const size_t prefix_length = strlen(keyring->prefix);
    size_t identity_end = 0;
    const tg_identity *written = NULL; /* whose text stands in `key`; targets of one identity come behind each other */
    memcpy(key, keyring->prefix, prefix_length);
    for (size_t i = 0; i < target_count; i++) {
        if (call->key_of[i] == 0 || call->first_of[i] != i)
            continue;
        if (targets[i].identity != written) {
            written = targets[i].identity;
            identity_end = prefix_length + tg__redis_identity_text(keyring, written, key + prefix_length);
            key[identity_end++] = '}';
        }
        const size_t suffix_length = tg__redis_names_suffix(store->names, targets[i].rule, key + identity_end);
        tg__resp_bulk(resp, key, identity_end + suffix_length);
    }
}

static uint8_t *
put_number(uint8_t *at, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    for (unsigned i = 0; i < 8; i++)
        *at++ = (uint8_t)(bits >> (8 * i));
    return at;
}

/* What common.lua's rule_of() reads. */
static void
put_description(tg_resp *resp, const tg_target *target, uint8_t key, bool follows)
{
    const tg_rule *rule = target->rule;
    uint8_t bytes[DESCRIPTION_BYTES], *at = bytes;
    *at++ = rule->algorithm;
    *at++ = key;
    *at++ = (uint8_t)(target->charged | (follows ? 2 : 0));
    at = put_number(at, (double)rule->limit);
    at = put_number(at, (double)rule->burst);
    at = put_number(at, (double)rule->period_us);
    at = put_number(at, (double)target->cost);
    at = put_number(at, rule->algorithm == TG_FIXED_WINDOW ? (rule->aligned ? 1 : 0) : (double)rule->resolution_us);
    *at++ = target->own;
    /* Before 1970 a week's start is two's complement. */
    put_number(at, rule->algorithm == TG_FIXED_WINDOW ? (double)(int64_t)target->stamp_us : (double)target->stamp_us);
    tg__resp_bulk(resp, bytes, sizeof bytes);
}

/* Everything of the call behind the script's name: it is the same for EVALSHA and EVAL. */
static void
put_arguments(tg_resp *resp, const tg_redis_store *store, const tg_redis_keyring *keyring, tg_op op, const tg_call *call,
              const tg_target *targets, size_t target_count, uint64_t manual_now_us)
{
    char digits[8];
    const int digit_count = snprintf(digits, sizeof digits, "%zu", call->key_count);
    tg__resp_bulk(resp, digits, (size_t)digit_count);
    put_keys(resp, store, keyring, call, targets, target_count);
    uint8_t header[9];
    *put_number(header, store->manual ? (double)manual_now_us : -1.0) = op == TG_OP_HIT && !call->denied ? 0 : 1;
    tg__resp_bulk(resp, header, sizeof header);
    for (size_t i = 0; i < target_count; i++)
        if (call->key_of[i] != 0)
            put_description(resp, &targets[i], call->key_of[i], call->first_of[i] != i);
}

/* EVALSHA, or EVAL with the whole text. One wire, one call under way. */
static tg_trouble
send_script(tg_redis_store *store, tg_redis_wire *wire, tg_script script, bool whole, size_t word_count,
            const tg_resp *arguments, uint64_t deadline_us, bool *unsent, tg_error *error)
{
    char head_bytes[128];
    tg_resp head = { .data = head_bytes, .size = sizeof head_bytes };
    tg__resp_count(&head, '*', word_count);
    struct iovec pieces[4] = { { head_bytes, 0 } };
    int count = 1;
    const tg_text text = tg__redis_script(script);
    if (whole) {
        tg__resp_bulk(&head, "EVAL", 4);
        tg__resp_count(&head, '$', text.length);
        pieces[count++] = (struct iovec){ (void *)(uintptr_t)text.data, text.length };
        pieces[count++] = (struct iovec){ (void *)(uintptr_t) "\r\n", 2 };
    } else {
        tg__resp_bulk(&head, "EVALSHA", 7);
        tg__resp_bulk(&head, store->sha[script], 40);
    }
    pieces[0].iov_len = head.length;
    pieces[count++] = (struct iovec){ arguments->data, arguments->length };
    return tg__wire_send(wire, pieces, count, deadline_us, unsent, error);
}

/* The reply of the script, or of DEL. An error reply becomes the trouble it means. */
static tg_trouble
exchange(tg_redis_store *store, tg_redis_wire *wire, tg_op op, const tg_call *call, const tg_target *targets,
         size_t target_count, uint64_t manual_now_us, uint64_t deadline_us, bool *unsent, redisReply **reply,
         tg_error *error)
{
    char bytes[CALL_BYTES_MAX];
    tg_resp resp = { .data = bytes, .size = sizeof bytes };
    const tg_script script = op == TG_OP_REFUND ? TG__SCRIPT_REFUND : tg__redis_script_of(call->algorithms);
    const size_t word_count = op == TG_OP_RESET ? 1 + call->key_count : 4 + call->key_count + call->asked;
    if (op == TG_OP_RESET) {
        tg__resp_count(&resp, '*', word_count);
        tg__resp_bulk(&resp, "DEL", 3);
        put_keys(&resp, store, &wire->keyring, call, targets, target_count);
    } else {
        put_arguments(&resp, store, &wire->keyring, op, call, targets, target_count, manual_now_us);
    }
    if (resp.full) { /* cannot be: see CALL_BYTES_MAX */
        tg__error(error, TG_E_STORE, "redis: a call over %d bytes", CALL_BYTES_MAX);
        return TG__TROUBLE_REFUSED;
    }
    for (bool whole = false;; whole = true) {
        const tg_trouble sent =
            op == TG_OP_RESET
                ? tg__wire_send(wire, &(struct iovec){ bytes, resp.length }, 1, deadline_us, unsent, error)
                : send_script(store, wire, script, whole, word_count, &resp, deadline_us, unsent, error);
        if (sent != TG__TROUBLE_NONE)
            return sent;
        const tg_trouble trouble = tg__wire_reply(wire, deadline_us, reply, error);
        if (trouble != TG__TROUBLE_NONE || (*reply)->type != REDIS_REPLY_ERROR)
            return trouble;
        /* Nothing ran: a restart or SCRIPT FLUSH has taken the script away, and repeating is safe. Once. */
        if (!whole && op != TG_OP_RESET && tg__redis_unknown_script((*reply)->str)) {
            freeReplyObject(*reply);
            *reply = NULL;
            continue;
        }
        char explained[320];
        const tg_trouble meant = tg__redis_trouble((*reply)->str, explained, sizeof explained);
        tg__error(error, TG_E_STORE, "%s: %s", store->address.shown, explained);
        return meant;
    }
}

/* Takes a connection and asks over it. A connection that broke before one byte of the call was out is replaced once. */
static tg_trouble
ask(tg_redis_store *store, tg_op op, const tg_call *call, const tg_target *targets, size_t target_count,
    uint64_t manual_now_us, uint64_t deadline_us, redisReply **reply, tg_error *error)
{
    for (unsigned attempt = 0;; attempt++) {
        tg_redis_wire *wire = NULL;
        tg_trouble trouble = tg__pool_take(store, deadline_us, &wire, error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        bool unsent = false;
        trouble = exchange(store, wire, op, call, targets, target_count, manual_now_us, deadline_us, &unsent, reply,
                           error);
        /* After a timeout the late reply would be taken for the next one's; a replica's connection leads nowhere. */
        tg__pool_give(store, wire, trouble == TG__TROUBLE_NONE || trouble == TG__TROUBLE_REFUSED);
        if (trouble == TG__TROUBLE_LINK && unsent && attempt == 0)
            continue;
        return trouble;
    }
}

/* What needs no server: only `deny` rules, or nothing to do. */
static bool
answer_alone(const tg_call *call, tg_op op, size_t target_count, tg_result *results)
{
    if (call->asked > 0)
        return false;
    if (op == TG_OP_HIT || op == TG_OP_PEEK)
        for (size_t i = 0; i < target_count; i++) {
            results[i].allowed = results[i].charged = false;
            results[i].remaining = results[i].reset_after_us = results[i].delay_us = results[i].stamp_us = 0;
            results[i].retry_after_us = TG_NEVER;
        }
    return true;
}

static tg_status
redis_apply(tg_store *base, tg_op op, const tg_target *targets, size_t target_count, tg_result *results, bool *overflow,
            tg_error *error)
{
    tg_redis_store *store = redis_of(base);
    if (overflow)
        *overflow = false;
    tg_call call;
    plan_call(&call, op, targets, target_count);
    if (answer_alone(&call, op, target_count, results))
        return TG_OK;
    const uint64_t manual_now_us = store->manual ? tg_clock_now_us(store->clock) : 0;
    if (manual_now_us > CLOCK_US_MAX)
        return tg__error(error, TG_E_STORE, "redis: a manual clock beyond %" PRIu64 " us cannot be told to Redis", CLOCK_US_MAX);
    bool probe;
    if (!breaker_passes(store, &probe))
        return tg__error(error, TG_E_STORE, "%s: not asked again yet", store->address.shown);
    const uint64_t deadline_us = tg__monotonic_us() + store->timeout_us;
    redisReply *reply = NULL;
    tg_trouble trouble = ask(store, op, &call, targets, target_count, manual_now_us, deadline_us, &reply, error);
    if (trouble == TG__TROUBLE_NONE && (op == TG_OP_HIT || op == TG_OP_PEEK)) {
        uint64_t server_now_us;
        if (reply->type != REDIS_REPLY_STRING ||
            !tg__redis_answer_read((tg_text){ reply->str, reply->len }, op, targets, call.first_of, target_count,
                                   call.denied, results, &server_now_us)) {
            tg__error(error, TG_E_STORE, "%s: an answer that no script of this version gives", store->address.shown);
            trouble = TG__TROUBLE_REFUSED;
        } else if (!store->manual) {
            atomic_store_explicit(&store->ahead_us, (int64_t)server_now_us - (int64_t)tg__monotonic_us(),
                                  memory_order_relaxed);
        }
    }
    if (reply)
        freeReplyObject(reply);
    if (trouble == TG__TROUBLE_TIMEOUT)
        atomic_fetch_add_explicit(&store->timeouts, 1, memory_order_relaxed);
    breaker_hears(store, trouble, probe);
    if (trouble == TG__TROUBLE_NONE)
        return TG_OK;
    if (error)
        error->status = TG_E_STORE; /* while greeting it may be another: from here on it is a store that does not answer */
    return TG_E_STORE;
}

/* ---- the rest of what a store does ---- */

static tg_status
redis_admit_rule(tg_store *store, const tg_rule *rule, tg_error *error)
{
    (void)store, (void)rule, (void)error; /* Redis has no bound of its own on a state */
    return TG_OK;
}

static tg_status
redis_name_rule(tg_store *store, const tg_rule *rule, const char *space, const char *name, tg_error *error)
{
    return tg__redis_names_add(redis_of(store)->names, rule, space, name, error);
}

/* The server's clock as the last answer showed it; this machine's until there has been one. */
static uint64_t
redis_now_us(tg_store *base)
{
    const tg_redis_store *store = redis_of(base);
    if (store->manual)
        return tg_clock_now_us(store->clock);
    const int64_t ahead_us = atomic_load_explicit(&store->ahead_us, memory_order_relaxed);
    if (ahead_us != INT64_MIN)
        return (uint64_t)((int64_t)tg__monotonic_us() + ahead_us);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static int64_t
redis_utc_offset_us(tg_store *store)
{
    (void)store;
    return 0; /* the server's TIME counts from 1970 UTC */
}

static tg_status
redis_stats(tg_store *base, tg_store_stats *stats, tg_error *error)
{
    (void)error;
    const tg_redis_store *store = redis_of(base);
    *stats = (tg_store_stats){ .timeouts = atomic_load_explicit(&store->timeouts, memory_order_relaxed) };
    return TG_OK;
}

static void
redis_close(tg_store *base)
{
    if (!base)
        return;
    tg_redis_store *store = redis_of(base);
    tg__pool_fini(store);
    tg__redis_names_close(store->names);
    tg__redis_address_fini(&store->address);
    explicit_bzero(store->secret, sizeof store->secret);
    free(store);
}

static const tg_store_ops redis_ops = {
    .name = "redis",
    .remote = true,
    .apply = redis_apply,
    .admit_rule = redis_admit_rule,
    .name_rule = redis_name_rule,
    .now_us = redis_now_us,
    .utc_offset_us = redis_utc_offset_us,
    .stats = redis_stats,
    .close = redis_close,
};

/* ---- opening ---- */

/* From the environment, or one of our own to offer: the first that reaches Redis is kept there for all. */
static tg_status
choose_secret(tg_redis_store *store, tg_error *error)
{
    const char *given = getenv("TIDEGATE_SECRET");
    if (given && *given) {
        if (strlen(given) >= sizeof store->secret)
            return tg__error(error, TG_E_CONFIG, "TIDEGATE_SECRET has at most %zu bytes", sizeof store->secret - 1);
        memcpy(store->secret, given, strlen(given) + 1);
        store->secret_given = true;
        return TG_OK;
    }
    uint8_t bytes[32];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return tg__error_system(error, TG_E_SYSTEM, errno, "redis: random bytes for a secret");
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(store->secret + 2 * i, 3, "%02x", bytes[i]);
    explicit_bzero(bytes, sizeof bytes);
    return TG_OK;
}

/* What a person has to change is an error now. A Redis that is not there yet is none: the site starts, and
 * on_store_failure decides until it is. */
static tg_status
look_at_server(tg_redis_store *store, tg_error *error)
{
    tg_error seen = { .status = TG_OK };
    const uint64_t wait_us = store->timeout_us > OPEN_DEADLINE_US ? store->timeout_us : OPEN_DEADLINE_US;
    tg_redis_wire *wire = NULL;
    const tg_trouble trouble = tg__pool_take(store, tg__monotonic_us() + wait_us, &wire, &seen);
    if (trouble == TG__TROUBLE_NONE) {
        tg__pool_give(store, wire, true);
        return TG_OK;
    }
    if (seen.status == TG_E_CONFIG || seen.status == TG_E_NOMEM) {
        if (error)
            *error = seen;
        return seen.status;
    }
    /* Spoken of here, so that core/ does not say it again with the first decision. */
    atomic_store(&store->base.failing, true);
    atomic_store(&store->base.last_failure_us, tg__monotonic_us());
    tg__notice("store-failing", "store %s does not answer: %s; on_store_failure decides until it does",
               store->address.shown, seen.message);
    return TG_OK;
}

tg_status
tg__redis_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **opened, tg_error *error)
{
    tg_redis_store *store = calloc(1, sizeof *store);
    if (!store)
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *store);
    store->base.ops = &redis_ops;
    store->timeout_us = options->timeout_us;
    store->clock = options->clock; /* store.c holds the reference */
    store->manual = options->clock != NULL;
    atomic_init(&store->ahead_us, INT64_MIN);
    tg_status status = tg__redis_address_parse(uri, &store->address, error);
    store->base.shown = store->address.shown;
    if (store->address.timeout_us)
        store->timeout_us = store->address.timeout_us;
    if (status == TG_OK)
        status = tg__redis_scripts_init(error);
    if (status == TG_OK)
        status = choose_secret(store, error);
    if (status == TG_OK) {
        store->names = tg__redis_names_open();
        if (!store->names)
            status = tg__error(error, TG_E_NOMEM, "redis: the rules' names");
    }
    if (status == TG_OK)
        status = tg__pool_init(store, error);
    if (status == TG_OK)
        status = look_at_server(store, error);
    if (status == TG_OK) {
        *opened = &store->base;
        store = NULL;
    }
    redis_close((tg_store *)store);
    return status;
}
