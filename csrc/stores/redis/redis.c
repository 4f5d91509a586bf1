/* redis:// and redis+unix://: one script call decides over all rules and identities of a decision. What happens when it
 * cannot: never past the deadline, and hardly any time at all once it is known (the circuit breaker).
 * Must not enter: what a rule means; RESP; sockets. */
#include "stores/redis/async.h"
#include "stores/redis/keep.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SECRET_BYTES = sizeof((tg_redis_store *)0)->secret };
enum { HEAD_BYTES_MAX = 128 }; /* of a call: see tg__call_head */
#define OPEN_DEADLINE_US UINT64_C(250000) /* a start is not held up longer by a Redis that is not there */

static tg_redis_store *
redis_of(tg_store *store)
{
    return (tg_redis_store *)store; /* base is its first member */
}

/* ---- one call ---- */

/* EVALSHA, or EVAL with the whole text. One wire, one call under way. `named`: the call with its script by name, whose first
 * `head_length` bytes are what calling it by its text begins otherwise. */
static tg_trouble
send_call(tg_redis_store *store, tg_redis_wire *wire, const tg_inquiry *question, bool whole, const tg_resp *named,
          size_t head_length, uint64_t deadline_us, bool *unsent, tg_error *error)
{
    static const char asking[] = "*1\r\n$6\r\nASKING\r\n";
    char head_bytes[HEAD_BYTES_MAX];
    struct iovec pieces[5];
    int count = 0;
    if (question->asking)
        pieces[count++] = (struct iovec){ (void *)(uintptr_t)asking, sizeof asking - 1 };
    if (whole) {
        tg_resp head = { .data = head_bytes, .size = sizeof head_bytes };
        tg__call_head(&head, store, question->call, question->op, true);
        const tg_text text = tg__redis_script(tg__call_script(question->call, question->op));
        pieces[count++] = (struct iovec){ head_bytes, head.length };
        pieces[count++] = (struct iovec){ (void *)(uintptr_t)text.data, text.length };
        pieces[count++] = (struct iovec){ (void *)(uintptr_t) "\r\n", 2 };
        pieces[count++] = (struct iovec){ named->data + head_length, named->length - head_length };
    } else {
        pieces[count++] = (struct iovec){ named->data, named->length };
    }
    return tg__wire_send(wire, pieces, count, deadline_us, unsent, error);
}

/* The reply to the call; what ASKING says before it matters only when it is refused. */
static tg_trouble
hear(tg_redis_wire *wire, const tg_inquiry *question, uint64_t deadline_us, tg_heard *heard, tg_error *error)
{
    if (question->asking) {
        const tg_trouble trouble = tg__wire_hear(wire, deadline_us, heard, error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        tg__heard_forget(heard);
    }
    return tg__wire_hear(wire, deadline_us, heard, error);
}

/* The reply of the script, or of DEL. An error reply becomes the trouble it means. */
static tg_trouble
exchange(tg_redis_store *store, tg_redis_wire *wire, const tg_inquiry *question, uint64_t deadline_us, bool *unsent,
         tg_heard *heard, tg_error *error)
{
    char bytes[HEAD_BYTES_MAX + TG__CALL_BYTES_MAX];
    tg_resp resp = { .data = bytes, .size = sizeof bytes };
    tg__call_head(&resp, store, question->call, question->op, false);
    const size_t head_length = resp.length;
    tg__call_arguments(&resp, store, question->keyring ? question->keyring : &wire->keyring, question->op,
                       question->call, question->targets, question->target_count, question->manual_now_us);
    if (resp.full) { /* cannot be: see TG__CALL_BYTES_MAX */
        tg__error(error, TG_E_STORE, "redis: a call over %d bytes", TG__CALL_BYTES_MAX);
        return TG__TROUBLE_REFUSED;
    }
    for (bool whole = false;; whole = true) {
        const tg_trouble sent = send_call(store, wire, question, whole, &resp, head_length, deadline_us, unsent, error);
        if (sent != TG__TROUBLE_NONE)
            return sent;
        const tg_trouble trouble = hear(wire, question, deadline_us, heard, error);
        if (trouble != TG__TROUBLE_NONE || heard->reply->type != REDIS_REPLY_ERROR)
            return trouble;
        /* Nothing ran: a restart or SCRIPT FLUSH has taken the script away, and repeating is safe. Once. */
        if (!whole && question->op != TG_OP_RESET && tg__redis_unknown_script(heard->reply->str)) {
            tg__heard_forget(heard);
            continue;
        }
        char explained[320];
        const tg_trouble meant = tg__redis_trouble(heard->reply->str, explained, sizeof explained);
        tg__error(error, TG_E_STORE, "%s: %s", store->address.shown, explained);
        return store->cluster && tg__cluster_redirects(heard->reply->str) ? TG__TROUBLE_MOVED : meant;
    }
}

tg_trouble
tg__redis_ask(tg_redis_store *store, const tg_inquiry *question, uint64_t deadline_us, tg_heard *heard,
              bool *unsent, tg_error *error)
{
    for (unsigned attempt = 0;; attempt++) {
        tg_redis_wire *wire = NULL;
        *unsent = true;
        tg_trouble trouble = tg__pool_take(store, attempt == 0 ? question->now_us : 0, deadline_us, &wire, error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        trouble = exchange(store, wire, question, deadline_us, unsent, heard, error);
        /* After a timeout the late reply would be taken for the next one's; a replica's connection leads nowhere. */
        tg__pool_give(store, wire, trouble == TG__TROUBLE_NONE || trouble == TG__TROUBLE_REFUSED ||
                                       trouble == TG__TROUBLE_MOVED);
        if (trouble == TG__TROUBLE_LINK && *unsent && attempt == 0)
            continue;
        return trouble;
    }
}

tg_status
tg__question_time(const char *shown, uint64_t now_us, uint64_t until_us, uint64_t timeout_us, uint64_t *deadline_us, bool *brief,
                  tg_error *error)
{
    *deadline_us = until_us ? until_us : now_us + timeout_us;
    *brief = *deadline_us < now_us + timeout_us / 2;
    if (*deadline_us > now_us)
        return TG_OK;
    tg__error(error, TG_E_STORE, "%s: not asked: the questions before have taken all the time that a judgement has", shown);
    if (error)
        error->system_error = ETIME;
    return TG_E_STORE;
}

static tg_status
redis_apply(tg_store *base, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us, tg_result *results,
            bool *overflow, tg_error *error)
{
    tg_redis_store *store = redis_of(base);
    if (overflow)
        *overflow = false;
    tg_call call;
    tg__call_plan(&call, op, targets, target_count);
    if (tg__call_answer_alone(&call, op, target_count, results))
        return TG_OK;
    const uint64_t manual_now_us = store->manual ? tg_clock_now_us(store->clock) : 0;
    if (manual_now_us > TG__REDIS_CLOCK_US_MAX)
        return tg__error(error, TG_E_STORE, "redis: a manual clock beyond %" PRIu64 " us cannot be told to Redis",
                         TG__REDIS_CLOCK_US_MAX);
    bool probe, brief;
    const uint64_t now_us = tg__monotonic_us();
    uint64_t deadline_us;
    if (tg__question_time(store->address.shown, now_us, until_us, store->timeout_us, &deadline_us, &brief, error) != TG_OK)
        return TG_E_STORE;
    if (!tg__breaker_passes(store, &probe))
        return tg__error(error, TG_E_STORE, "%s: not asked again yet", store->address.shown);
    const tg_inquiry question = { .op = op, .call = &call, .targets = targets, .target_count = target_count,
                                   .manual_now_us = manual_now_us, .now_us = now_us };
    tg_heard heard; /* its bytes are not cleared: every decision comes by here */
    heard.reply = NULL;
    bool unsent;
    tg_trouble trouble = tg__redis_ask(store, &question, deadline_us, &heard, &unsent, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = tg__redis_read(store, op, &call, targets, target_count, heard.reply, heard.at_us, results, error);
    tg__heard_forget(&heard);
    return tg__redis_conclude(store, trouble, probe, brief, error);
}

tg_trouble
tg__redis_read(tg_redis_store *store, tg_op op, const tg_call *call, const tg_target *targets, size_t target_count,
               const redisReply *reply, uint64_t heard_us, tg_result *results, tg_error *error)
{
    uint64_t server_now_us;
    if (op != TG_OP_HIT && op != TG_OP_PEEK)
        return TG__TROUBLE_NONE;
    if (reply->type != REDIS_REPLY_STRING ||
        !tg__redis_answer_read((tg_text){ reply->str, reply->len }, op, targets, call->first_of, target_count,
                               call->denied, results, &server_now_us)) {
        tg__error(error, TG_E_STORE, "%s: an answer that no script of this version gives", store->address.shown);
        return TG__TROUBLE_REFUSED;
    }
    if (!store->manual)
        atomic_store_explicit(&store->ahead_us, (int64_t)server_now_us - (int64_t)heard_us,
                              memory_order_relaxed);
    return TG__TROUBLE_NONE;
}

void
tg__redis_led_nowhere(tg_redis_store *store)
{
    if (store->address.sentinel_count > 1)
        atomic_fetch_add_explicit(&store->address.sentinel_turn, 1, memory_order_relaxed);
}

void
tg__redis_begins_epoch(tg_redis_store *store)
{
    tg_store *base = store->cluster ? (tg_store *)store->cluster : &store->base; /* base is its first member too */
    atomic_fetch_add(&base->epoch, 1);
}

tg_status
tg__redis_conclude(tg_redis_store *store, tg_trouble trouble, bool probe, bool brief, tg_error *error)
{
    if (trouble == TG__TROUBLE_TIMEOUT)
        atomic_fetch_add_explicit(&store->timeouts, 1, memory_order_relaxed);
    if (brief && trouble == TG__TROUBLE_TIMEOUT)
        tg__breaker_shrugs(store, probe);
    else
        tg__breaker_hears(store, trouble, probe);
    if (trouble == TG__TROUBLE_NONE)
        return TG_OK;
    if (error)
        error->status = TG_E_STORE; /* while greeting it may be another: from here on a store does not answer */
    return TG_E_STORE;
}

/* ---- reservations ---- */

bool
tg__redis_read_head(const redisReply *reply, uint8_t *first, uint64_t *now_us)
{
    if (reply->type != REDIS_REPLY_STRING || reply->len < 9)
        return false;
    *first = (uint8_t)reply->str[0];
    const double number = tg__get_number((const uint8_t *)reply->str + 1);
    if (!(number >= 0 && number <= 9007199254740992.0))
        return false;
    *now_us = (uint64_t)number;
    return true;
}

/* In `lease` what the answer says of it. */
static tg_trouble
read_lease(tg_redis_store *store, const tg_call *call, const tg_target *targets, size_t target_count,
           const tg_heard *heard, tg_lease *lease, tg_result *results, tg_error *error)
{
    uint8_t first = 0;
    uint64_t now_us = 0;
    if (!tg__redis_read_head(heard->reply, &first, &now_us)) {
        tg__error(error, TG_E_STORE, "%s: an answer that no script of this version gives", store->address.shown);
        return TG__TROUBLE_REFUSED;
    }
    lease->until_us = call->lease_op == TG_LEASE_SETTLE ? lease->until_us : now_us + lease->lease_us;
    lease->over = call->lease_op == TG_LEASE_RENEW && first == 0;
    lease->full = call->lease_op == TG_LEASE_TAKE && first == 2;
    if (call->lease_op != TG_LEASE_TAKE || lease->full)
        return TG__TROUBLE_NONE;
    const tg_trouble trouble = tg__redis_read(store, TG_OP_HIT, call, targets, target_count, heard->reply, heard->at_us, results,
                                              error);
    bool held = false;
    for (size_t i = 0; trouble == TG__TROUBLE_NONE && i < target_count; i++) {
        lease->places[i] = results[i].charged ? 0 : UINT32_MAX;
        held |= results[i].charged;
    }
    if (!held)
        memset(lease->id, 0, sizeof lease->id);
    return trouble;
}

tg_status
tg__lease_begin(tg_lease_op op, tg_lease *lease, bool *overflow, tg_error *error)
{
    if (overflow)
        *overflow = false;
    lease->full = lease->over = false;
    if (op == TG_LEASE_TAKE && getrandom(lease->id, sizeof lease->id, 0) != sizeof lease->id)
        return tg__error_system(error, TG_E_STORE, errno, "redis: random bytes for a reservation");
    return TG_OK;
}

static tg_status
redis_lease(tg_store *base, tg_lease_op op, const tg_target *targets, size_t target_count, tg_lease *lease,
            tg_result *results, bool *overflow, tg_error *error)
{
    tg_redis_store *store = redis_of(base);
    const tg_op as = op == TG_LEASE_TAKE ? TG_OP_HIT : TG_OP_REFUND;
    tg_call call;
    const tg_status begun = tg__lease_begin(op, lease, overflow, error);
    if (begun != TG_OK)
        return begun;
    tg__call_plan(&call, as, targets, target_count);
    if (tg__call_answer_alone(&call, as, target_count, results)) {
        memset(lease->id, 0, sizeof lease->id);
        return TG_OK;
    }
    call.lease = lease;
    call.lease_op = op;
    const uint64_t manual_now_us = store->manual ? tg_clock_now_us(store->clock) : 0;
    if (manual_now_us > TG__REDIS_CLOCK_US_MAX)
        return tg__error(error, TG_E_STORE, "redis: a manual clock beyond %" PRIu64 " us cannot be told to Redis",
                         TG__REDIS_CLOCK_US_MAX);
    bool probe, unsent;
    if (!tg__breaker_passes(store, &probe))
        return tg__error(error, TG_E_STORE, "%s: not asked again yet", store->address.shown);
    const tg_inquiry question = { .op = as, .call = &call, .targets = targets, .target_count = target_count,
                                  .manual_now_us = manual_now_us };
    tg_heard heard = { .reply = NULL };
    tg_trouble trouble =
        tg__redis_ask(store, &question, tg__monotonic_us() + store->timeout_us, &heard, &unsent, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = read_lease(store, &call, targets, target_count, &heard, lease, results, error);
    tg__heard_forget(&heard);
    const tg_status status = tg__redis_conclude(store, trouble, probe, false, error);
    if (status != TG_OK || !lease->full)
        return status;
    memset(lease->id, 0, sizeof lease->id);
    if (!atomic_exchange(&store->told_leases, true))
        tg__notice("leases-full", "%s: a client has 512 reservations under way and gets no other; on_store_failure decides until "
                                  "some are settled or end", store->address.shown);
    return tg__error(error, TG_E_STORE, "%s: no room for another reservation", store->address.shown);
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
    tg_redis_store *store = redis_of(base);
    tg_census census;
    *stats = (tg_store_stats){ .timeouts = atomic_load_explicit(&store->timeouts, memory_order_relaxed) };
    const tg_status status = tg__keeper_census(base->keeper, &census, error);
    stats->keys = census.keys;
    stats->keys_bytes = census.bytes;
    stats->keys_sampled = census.sampled;
    return status;
}

/* ---- what operators see and set ---- */

static tg_redis_store *
this_server(tg_store *store, tg_text hashed)
{
    (void)hashed; /* there is but one */
    return redis_of(store);
}

static void
heard_from(tg_store *store, int64_t ahead_us)
{
    atomic_store_explicit(&redis_of(store)->ahead_us, ahead_us, memory_order_relaxed);
}

static const tg_keeper_ways ways = { .hold = this_server, .heard = heard_from };

static void
redis_close(tg_store *base)
{
    if (!base)
        return;
    tg_redis_store *store = redis_of(base);
    tg__keeper_close(base->keeper);
    tg__pool_fini(store);
    tg__redis_names_close(store->names);
    tg__redis_address_fini(&store->address);
    explicit_bzero(store->secret, sizeof store->secret);
    free(store);
}

static const tg_store_ops redis_ops = {
    .name = "redis",
    .remote = true,
    .tells_of_waiting = true,
    .apply = redis_apply,
    .lease = redis_lease,
    .async_open = tg__redis_async_open,
    .admit_rule = redis_admit_rule,
    .name_rule = redis_name_rule,
    .now_us = redis_now_us,
    .utc_offset_us = redis_utc_offset_us,
    .stats = redis_stats,
    .close = redis_close,
    .metric_name = tg__kept_metric_name,
    .metric_line = tg__kept_metric_line,
    .latency_add = tg__kept_latency_add,
    .metrics = tg__kept_metrics,
    .override_set = tg__kept_override_set,
    .override_list = tg__kept_override_list,
    .examine = tg__redis_examine,
};

/* ---- opening ---- */

/* From a file that nobody but its owner can read; a line's end is not part of it. */
static tg_status
read_secret(const char *path, char secret[SECRET_BYTES], tg_error *error)
{
    struct stat found;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd == -1)
        return tg__error_system(error, TG_E_CONFIG, errno, "the secret's file %s", path);
    ssize_t length = -1;
    tg_status status = TG_OK;
    if (fstat(fd, &found) == -1 || !S_ISREG(found.st_mode))
        status = tg__error(error, TG_E_CONFIG, "the secret's file %s is no regular file", path);
    else if ((found.st_mode & 077) != 0 || (found.st_uid != 0 && found.st_uid != geteuid()))
        status = tg__error(error, TG_E_TRUST, "the secret's file %s has owner %u and mode %04o, expected %u or root and 0600",
                           path, (unsigned)found.st_uid, (unsigned)found.st_mode & 07777, (unsigned)geteuid());
    else if ((length = read(fd, secret, SECRET_BYTES)) == -1)
        status = tg__error_system(error, TG_E_CONFIG, errno, "the secret's file %s", path);
    close(fd);
    while (status == TG_OK && length > 0 && length <= SECRET_BYTES && (secret[length - 1] == '\n' || secret[length - 1] == '\r'))
        length--;
    if (status == TG_OK && (length <= 0 || length >= SECRET_BYTES || memchr(secret, '\0', (size_t)length)))
        status = tg__error(error, TG_E_CONFIG, "the secret's file %s: expected one line of 1 to %d bytes", path,
                           SECRET_BYTES - 1);
    if (status == TG_OK)
        secret[length] = '\0';
    return status;
}

/* One of our own is only an offer: the first that reaches Redis is kept there for all. */
tg_status
tg__redis_choose_secret(tg_text named, char secret[SECRET_BYTES], bool *given, tg_error *error)
{
    const bool environments = named.length == 0;
    if (environments)
        named = tg_text_of(getenv("TIDEGATE_SECRET"));
    *given = named.length != 0;
    if (*given && named.data[0] == '@') {
        char path[PATH_MAX];
        if (named.length > sizeof path || memchr(named.data, '\0', named.length))
            return tg__error(error, TG_E_CONFIG, "the path of the secret's file is too long, or holds a NUL byte");
        memcpy(path, named.data + 1, named.length - 1);
        path[named.length - 1] = '\0';
        return read_secret(path, secret, error);
    }
    if (*given) {
        if (named.length >= SECRET_BYTES || memchr(named.data, '\0', named.length))
            return tg__error(error, TG_E_CONFIG, "%s has at most %d bytes, and no NUL byte among them",
                             environments ? "TIDEGATE_SECRET" : "the secret", SECRET_BYTES - 1);
        memcpy(secret, named.data, named.length);
        secret[named.length] = '\0';
        return TG_OK;
    }
    uint8_t bytes[32];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return tg__error_system(error, TG_E_SYSTEM, errno, "redis: random bytes for a secret");
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(secret + 2 * i, 3, "%02x", bytes[i]);
    explicit_bzero(bytes, sizeof bytes);
    return TG_OK;
}

/* A Redis without TLS says nothing to a TLS greeting: it waits for the end of a line. */
static bool
speaks_plainly(const tg_redis_address *address, uint64_t until_us)
{
    static char words[] = "PING\r\n";
    tg_redis_address plain = *address;
    tg_redis_wire wire = { .fd = -1 };
    tg_heard heard = { .reply = NULL };
    plain.tls = NULL;
    const bool answers =
        tg__wire_open(&wire, &plain, until_us, NULL) == TG__TROUBLE_NONE &&
        tg__wire_send(&wire, &(struct iovec){ words, sizeof words - 1 }, 1, until_us, NULL, NULL) == TG__TROUBLE_NONE &&
        tg__wire_hear(&wire, until_us, &heard, NULL) == TG__TROUBLE_NONE; /* "+PONG", "-NOAUTH ..." */
    tg__heard_forget(&heard);
    tg__wire_close(&wire);
    return answers;
}

/* What a person has to change is an error now. A Redis that is not there yet is none: the site starts, and
 * on_store_failure decides until it is. */
static tg_status
look_at_server(tg_redis_store *store, uint64_t began_us, tg_error *error)
{
    tg_error seen = { .status = TG_OK };
    const uint64_t wait_us = store->timeout_us > OPEN_DEADLINE_US ? store->timeout_us : OPEN_DEADLINE_US;
    const uint64_t until_us = began_us + wait_us;
    /* Some of it is kept for finding out why TLS is not answered. */
    const bool asks_plainly = store->address.tls && store->address.sentinel_count == 0;
    tg_redis_wire *wire = NULL;
    const tg_trouble trouble = tg__pool_take(store, 0, asks_plainly ? until_us - wait_us / 5 : until_us, &wire, &seen);
    if (trouble == TG__TROUBLE_TIMEOUT && asks_plainly && speaks_plainly(&store->address, until_us))
        tg__error(&seen, TG_E_CONFIG, "%s: TLS: the server there does not speak TLS (redis:// is without)",
                  store->address.shown);
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
tg__redis_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error)
{
    tg_redis_address address;
    (void)rule; /* as in redis_admit_rule */
    const tg_status status = tg__redis_address_parse(uri, &address, error);
    if (status == TG_OK)
        tg__redis_address_fini(&address);
    return status;
}

tg_status
tg__redis_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **opened, tg_error *error)
{
    if (tg__text_is(uri->scheme, "redis+cluster") || tg__text_is(uri->scheme, "rediss+cluster"))
        return tg__cluster_open(uri, options, opened, error);
    const uint64_t began_us = tg__monotonic_us(); /* reading the system's certificates takes a share of it, too */
    tg_redis_store *store = calloc(1, sizeof *store);
    if (!store)
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *store);
    store->base.ops = &redis_ops;
    store->base.counts_denied = true;
    store->timeout_us = options->timeout_us;
    store->base.private_kinds = options->private_kinds;
    store->clock = options->clock; /* store.c holds the reference */
    store->manual = options->clock != NULL;
    atomic_init(&store->ahead_us, INT64_MIN);
    tg_status status = tg__redis_address_parse(uri, &store->address, error);
    store->base.shown = store->address.shown;
    if (store->address.timeout_us)
        store->timeout_us = store->address.timeout_us;
    store->address.timeout_us = store->timeout_us;
    store->base.timeout_us = store->timeout_us;
    if (status == TG_OK)
        status = tg__redis_scripts_init(error);
    if (status == TG_OK)
        status = tg__redis_choose_secret(options->secret, store->secret, &store->secret_given, error);
    if (status == TG_OK) {
        store->names = tg__redis_names_open();
        if (!store->names)
            status = tg__error(error, TG_E_NOMEM, "redis: the rules' names");
    }
    if (status == TG_OK) {
        store->base.keeper = tg__keeper_open(&store->base, &ways, store->manual);
        if (!store->base.keeper)
            status = tg__error(error, TG_E_NOMEM, "redis: what is kept for operators");
    }
    if (status == TG_OK)
        status = tg__pool_init(store, error);
    if (status == TG_OK)
        status = look_at_server(store, began_us, error);
    if (status == TG_OK) {
        *opened = &store->base;
        store = NULL;
    }
    redis_close((tg_store *)store);
    return status;
}
