/* The keeper: twice a second it carries what this process has counted to the server and brings back the overrides that stand,
 * over a connection of the pool that nobody needs at that moment. A forked child has its own from its first decision on.
 * Must not enter: decisions; the circuit breaker is looked at and never told anything.
 *
 * Locks: `talk` for a whole exchange (nothing else is held then but, for moments, the pool's lock), `sleep` for the
 * thread's nap. No request takes either. */
#include "stores/redis/keep.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Relative to where the compiler is called, as in script.c. */
#if defined(__APPLE__)
#define RODATA ".section __TEXT,__const\n"
#define TEXT_END ".text\n"
#define SYMBOL(name) "_" name
#else
#define RODATA ".section .rodata\n"
#define TEXT_END ".previous\n"
#define SYMBOL(name) name
#endif
#define EMBED(name)                                                                                                    \
    __asm__(RODATA ".globl " SYMBOL("tg__lua_" #name) "\n" ".globl " SYMBOL("tg__lua_" #name "_end") "\n"              \
            SYMBOL("tg__lua_" #name) ":\n" ".incbin \"csrc/stores/redis/" #name ".lua\"\n"                             \
            SYMBOL("tg__lua_" #name "_end") ":\n" ".byte 0\n" TEXT_END);                                               \
    extern const char tg__lua_##name[] __attribute__((visibility("hidden")));                                          \
    extern const char tg__lua_##name##_end[] __attribute__((visibility("hidden")))

EMBED(keep);
EMBED(census);

#define EVERY_US UINT64_C(500000) /* so that an override is followed within a second, whatever one exchange takes */
#define FIRST_US UINT64_C(100000) /* after a process' first decision */
#define EXCHANGE_US UINT64_C(250000) /* nobody waits for it: it may take longer than a decision may */
#define WANTED_FOR_US UINT64_C(300000000) /* who asked for counts will ask again: a page of metrics, a person's `top` */
#define SPARE_TRIES 10
#define SPARE_EVERY_NS 5000000L
#define FRESH_US UINT64_C(2000000)
#define COUNTS_LAST_MS "2592000000" /* 30 days after the last that was counted */
#define TEXT_BYTES 65536
#define HASHED "tidegate"
#define CENSUS_PAGES "8" /* of SCAN, a hundred keys each: below a millisecond of the server */
#define CENSUS_PAGE_KEYS "100"
#define CENSUS_EVERY_US UINT64_C(10000000) /* while somebody asks */
#define GROWTH_EVERY_US UINT64_C(60000000)

#define MASTERS_MAX 256

typedef struct tg_sample { /* of one server that has keys */
    char *shown;
    char cursor[32]; /* where the next look goes on */
    tg_census census;
    bool listed; /* still one of them */
} tg_sample;

struct tg_keeper {
    tg_store *store;
    const tg_keeper_ways *ways;
    bool manual; /* time is a test's: nothing is done by itself */
    tg_counts *counts;
    tg_orders *orders;

    pthread_mutex_t talk;
    char *text; /* what is carried; under `talk` */
    char *seen; /* the counts of all processes as last brought back, under `talk`; NULL: never */
    size_t seen_length;
    uint64_t seen_at_us, wanted_until_us;
    bool told; /* that it is not allowed to */
    tg_sample *samples; /* one for each server that has keys */
    size_t sample_count;
    unsigned census_turn; /* who is asked first: a deadline must not always cut off the same ones */
    tg_census census;     /* of all together */
    uint64_t census_at_us, growth_at_us;
    tg_growth growth;

    _Atomic unsigned generation; /* of the process that has a thread for it; 0: none */
    pthread_mutex_t sleep;
    pthread_cond_t woken;
    bool stop; /* under `sleep` */
    pthread_t thread;
    tg_keeper *next; /* all of this process, for its forked children */
};

/* ---- one exchange ---- */

typedef struct tg_errand {
    const tg_override *set; /* NULL: none */
    uint64_t lasts_us;
    bool wants_counts;
    uint64_t patience_us; /* for a connection: 0 takes only what is free */
    bool last;            /* somebody waits for it who closes the store: no longer than for a decision */
    bool full; /* set: no more overrides may stand */
} tg_errand;

static void
put_number(tg_resp *resp, const char *format, uint64_t number)
{
    char digits[24];
    const int length = snprintf(digits, sizeof digits, format, number);
    tg__resp_bulk(resp, digits, (size_t)length);
}

static void
compose(tg_keeper *keeper, const tg_errand *errand, const tg_redis_keyring *keyring, size_t text_length, tg_resp *resp)
{
    char place[TG__ORDER_BYTES_MAX], says[TG__ORDER_BYTES_MAX];
    const char *const counts = keeper->manual ? "tg1m:{" HASHED "}:counts" : "tg1:{" HASHED "}:counts";
    const char *const orders = keeper->manual ? "tg1m:{" HASHED "}:overrides" : "tg1:{" HASHED "}:overrides";
    tg__resp_count(resp, '*', errand->set ? 13 : 9);
    tg__resp_bulk(resp, "EVAL", 4);
    tg__resp_bulk(resp, tg__lua_keep, (size_t)(tg__lua_keep_end - tg__lua_keep));
    tg__resp_bulk(resp, "2", 1);
    tg__resp_bulk(resp, counts, strlen(counts));
    tg__resp_bulk(resp, orders, strlen(orders));
    if (keeper->manual)
        put_number(resp, "%" PRIu64, tg_store_now_us(keeper->store));
    else
        tg__resp_bulk(resp, "-1", 2);
    tg__resp_bulk(resp, COUNTS_LAST_MS, sizeof COUNTS_LAST_MS - 1);
    tg__resp_bulk(resp, keeper->text, text_length);
    tg__resp_bulk(resp, errand->wants_counts ? "1" : "0", 1);
    if (!errand->set)
        return;
    tg__order_words(errand->set, keyring, place, says);
    tg__resp_bulk(resp, place, strlen(place));
    put_number(resp, "%" PRIu64, errand->lasts_us);
    tg__resp_bulk(resp, says, strlen(says));
    put_number(resp, "%" PRIu64, (uint64_t)TG__OVERRIDES_MAX);
}

static bool
keep_counts(tg_keeper *keeper, const redisReply *text)
{
    char *copy = malloc(text->len + 1);
    if (!copy)
        return false;
    memcpy(copy, text->str, text->len);
    free(keeper->seen);
    keeper->seen = copy;
    keeper->seen_length = text->len;
    keeper->seen_at_us = tg__monotonic_us();
    return true;
}

static tg_trouble
hear(tg_keeper *keeper, tg_redis_store *server, tg_errand *errand, const tg_redis_keyring *keyring,
     const redisReply *reply, tg_error *error)
{
    char explained[320];
    if (reply->type == REDIS_REPLY_ERROR) {
        const tg_trouble meant = keeper->ways->moved && tg__cluster_redirects(reply->str)
                                     ? TG__TROUBLE_MOVED
                                     : tg__redis_trouble(reply->str, explained, sizeof explained);
        if (meant == TG__TROUBLE_MOVED)
            snprintf(explained, sizeof explained, "%s", reply->str);
        tg__error(error, TG_E_STORE, "%s: %s", server->address.shown, explained);
        return meant;
    }
    bool sound = reply->type == REDIS_REPLY_ARRAY && reply->elements == 4;
    for (size_t i = 0; sound && i < 4; i++)
        sound = reply->element[i]->type == REDIS_REPLY_STRING;
    uint64_t now_us = 0;
    if (!sound ||
        !tg__text_number((tg_text){ reply->element[0]->str, reply->element[0]->len }, UINT64_C(1) << 53, &now_us)) {
        tg__error(error, TG_E_STORE, "%s: an answer that no script of this version gives", server->address.shown);
        return TG__TROUBLE_REFUSED;
    }
    const redisReply *said = reply->element[3];
    errand->full = strcmp(said->str, "FULL") == 0;
    if (said->len == 0)
        tg__counts_carried(keeper->counts);
    if (!keeper->manual)
        keeper->ways->heard(keeper->store, (int64_t)now_us - (int64_t)tg__monotonic_us());
    const tg_text orders = { reply->element[1]->str, reply->element[1]->len };
    for (unsigned again = 0; !tg__orders_see(keeper->orders, orders, keyring) && again < 1000; again++)
        sched_yield(); /* a reader copies a few hundred bytes */
    if (errand->wants_counts)
        keep_counts(keeper, reply->element[2]);
    return TG__TROUBLE_NONE;
}

/* An open connection that is idle for a moment, so that no further one is opened for this; one that is closed where there
 * has been none for a while. */
static bool
find_spare(tg_redis_store *server)
{
    for (unsigned again = 0; again < SPARE_TRIES; again++) {
        if (tg__pool_spare(server, true))
            return true;
        nanosleep(&(struct timespec){ .tv_nsec = SPARE_EVERY_NS }, NULL);
    }
    return tg__pool_spare(server, false);
}

static tg_redis_store *
hold_server(tg_keeper *keeper)
{
    return keeper->ways->hold(keeper->store, tg_text_of(HASHED));
}

static void
release_server(tg_keeper *keeper, tg_redis_store *server)
{
    if (server && keeper->ways->release)
        keeper->ways->release(keeper->store, server);
}

static tg_trouble
exchange_with(tg_keeper *keeper, tg_redis_store *server, tg_errand *errand, uint64_t deadline_us, tg_error *error)
{
    if (!keeper->text && !(keeper->text = malloc(TEXT_BYTES))) {
        tg__error(error, TG_E_NOMEM, "redis: %d bytes", TEXT_BYTES);
        return TG__TROUBLE_REFUSED;
    }
    tg_redis_wire *wire = NULL;
    tg_trouble trouble = errand->patience_us || find_spare(server)
                             ? tg__pool_take(server, 0, deadline_us, &wire, error)
                             : TG__TROUBLE_PAUSED;
    if (!wire) {
        if (trouble == TG__TROUBLE_PAUSED)
            tg__error(error, TG_E_STORE, "%s: every connection is in use", server->address.shown);
        return trouble;
    }
    const size_t text_length = tg__counts_write(keeper->counts, keeper->text, TEXT_BYTES);
    tg_resp resp = { .size = text_length + (size_t)(tg__lua_keep_end - tg__lua_keep) + 2 * TG__ORDER_BYTES_MAX + 1024 };
    resp.data = malloc(resp.size);
    if (!resp.data) {
        tg__error(error, TG_E_NOMEM, "redis: %zu bytes", resp.size);
        tg__pool_give(server, wire, true);
        return TG__TROUBLE_REFUSED;
    }
    tg_redis_keyring keyring = wire->keyring;
    if (keeper->ways->keyring && !keeper->ways->keyring(keeper->store, &keyring)) {
        tg__error(error, TG_E_STORE, "%s: the secret is not known yet", server->address.shown);
        free(resp.data);
        tg__pool_give(server, wire, true);
        return TG__TROUBLE_PAUSED;
    }
    compose(keeper, errand, &keyring, text_length, &resp);
    bool unsent = true;
    tg_heard heard = { .reply = NULL };
    trouble = tg__wire_send(wire, &(struct iovec){ resp.data, resp.length }, 1, deadline_us, &unsent, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = tg__wire_hear(wire, deadline_us, &heard, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = hear(keeper, server, errand, &keyring, heard.reply, error);
    else if (!unsent)
        tg__counts_carried(keeper->counts); /* nobody knows: rather too few than the same ones twice */
    tg__heard_forget(&heard);
    free(resp.data);
    explicit_bzero(&keyring, sizeof keyring);
    tg__pool_give(server, wire,
                  trouble == TG__TROUBLE_NONE || trouble == TG__TROUBLE_REFUSED || trouble == TG__TROUBLE_MOVED);
    return trouble;
}

/* Under `talk`. */
static tg_trouble
exchange(tg_keeper *keeper, tg_errand *errand, tg_error *error)
{
    const uint64_t patience_us = errand->last && keeper->store->timeout_us < EXCHANGE_US ? keeper->store->timeout_us : EXCHANGE_US;
    const uint64_t deadline_us = tg__monotonic_us() + patience_us;
    for (bool again = false;; again = true) {
        tg_redis_store *server = hold_server(keeper);
        if (!server) {
            tg__error(error, TG_E_STORE, "redis: no server is known yet that keeps what operators see and set");
            return TG__TROUBLE_LINK;
        }
        const tg_trouble trouble = exchange_with(keeper, server, errand, deadline_us, error);
        release_server(keeper, server);
        if (trouble != TG__TROUBLE_MOVED || again || !keeper->ways->moved)
            return trouble;
        keeper->ways->moved(keeper->store, deadline_us);
    }
}

/* ---- how many keys there are ---- */

static bool
read_census(tg_sample *sample, const redisReply *reply)
{
    uint64_t numbers[5];
    bool sound = reply->type == REDIS_REPLY_ARRAY && reply->elements == 7;
    for (size_t i = 0; sound && i < 5; i++) {
        sound = reply->element[i]->type == REDIS_REPLY_INTEGER && reply->element[i]->integer >= 0;
        numbers[i] = sound ? (uint64_t)reply->element[i]->integer : 0;
    }
    if (!sound || reply->element[5]->type != REDIS_REPLY_STRING || reply->element[5]->len >= sizeof sample->cursor)
        return false;
    const uint64_t all = numbers[0], seen = numbers[1], ours = numbers[2], measured = numbers[3], bytes = numbers[4];
    memcpy(sample->cursor, reply->element[5]->str, reply->element[5]->len + 1);
    tg_census *census = &sample->census;
    census->sampled = seen ? seen : 1;
    census->keys = reply->element[6]->integer == 1 || seen == 0 ? ours : (uint64_t)((tg_u128)all * ours / seen);
    census->bytes = measured ? (uint64_t)((tg_u128)census->keys * bytes / measured) : 0;
    return true;
}

/* That of this server, one is made where there is none. NULL: no memory. */
static tg_sample *
sample_of(tg_keeper *keeper, const char *shown)
{
    for (size_t i = 0; i < keeper->sample_count; i++)
        if (strcmp(keeper->samples[i].shown, shown) == 0)
            return &keeper->samples[i];
    tg_sample *moved = realloc(keeper->samples, (keeper->sample_count + 1) * sizeof *moved);
    if (!moved)
        return NULL;
    keeper->samples = moved;
    tg_sample *made = &moved[keeper->sample_count];
    *made = (tg_sample){ .shown = strdup(shown) };
    if (!made->shown)
        return NULL;
    keeper->sample_count++;
    return made;
}

static void
drop_samples(tg_keeper *keeper, bool all)
{
    size_t kept = 0;
    for (size_t i = 0; i < keeper->sample_count; i++)
        if (all || !keeper->samples[i].listed)
            free(keeper->samples[i].shown);
        else
            keeper->samples[kept++] = keeper->samples[i];
    keeper->sample_count = kept;
    if (all)
        free(keeper->samples);
}

/* One script call to one server. */
static tg_trouble
sample_server(tg_keeper *keeper, tg_redis_store *server, tg_sample *sample, uint64_t patience_us, uint64_t deadline_us,
              tg_error *error)
{
    tg_redis_wire *wire = NULL;
    char bytes[2048];
    tg_resp resp = { .data = bytes, .size = sizeof bytes };
    const char *const words[] = { sample->cursor[0] ? sample->cursor : "0", keeper->manual ? "tg1m:" : "tg1:", CENSUS_PAGES,
                                  CENSUS_PAGE_KEYS };
    if (!patience_us && !find_spare(server)) {
        tg__error(error, TG_E_STORE, "%s: every connection is in use", server->address.shown);
        return TG__TROUBLE_PAUSED;
    }
    tg_trouble trouble = tg__pool_take(server, 0, deadline_us, &wire, error);
    if (trouble != TG__TROUBLE_NONE)
        return trouble;
    tg__resp_count(&resp, '*', 3 + sizeof words / sizeof *words);
    tg__resp_bulk(&resp, "EVAL", 4);
    tg__resp_bulk(&resp, tg__lua_census, (size_t)(tg__lua_census_end - tg__lua_census));
    tg__resp_bulk(&resp, "0", 1);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        tg__resp_bulk(&resp, words[i], strlen(words[i]));
    tg_heard heard = { .reply = NULL };
    trouble = tg__wire_send(wire, &(struct iovec){ resp.data, resp.length }, 1, deadline_us, NULL, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = tg__wire_hear(wire, deadline_us, &heard, error);
    if (trouble == TG__TROUBLE_NONE && !read_census(sample, heard.reply))
        sample->census = (tg_census){ .sampled = 0 };
    tg__heard_forget(&heard);
    tg__pool_give(server, wire, trouble == TG__TROUBLE_NONE);
    return trouble;
}

/* Under `talk`. Each server is asked as much as one alone would be, and all within one exchange's time: who does not answer in
 * it is told as it was seen last. What one of them does not let us see, or what was never seen, leaves the whole unknown. */
static tg_trouble
take_census(tg_keeper *keeper, uint64_t patience_us, tg_error *error)
{
    const uint64_t deadline_us = tg__monotonic_us() + EXCHANGE_US;
    tg_redis_store *servers[MASTERS_MAX];
    size_t count = 1;
    if (keeper->ways->masters)
        count = keeper->ways->masters(keeper->store, servers, MASTERS_MAX);
    else
        servers[0] = hold_server(keeper);
    keeper->census_at_us = tg__monotonic_us();
    for (size_t i = 0; i < keeper->sample_count; i++)
        keeper->samples[i].listed = false;
    tg_census all = { .sampled = 0 };
    tg_trouble trouble = TG__TROUBLE_NONE;
    bool whole = count > 0, any = false;
    if (count == 0) {
        tg__error(error, TG_E_STORE, "redis: no server is known yet that has keys");
        trouble = TG__TROUBLE_LINK;
    }
    const unsigned turn = keeper->census_turn++;
    for (size_t i = 0; i < count; i++) {
        tg_redis_store *server = servers[(turn + i) % count];
        tg_sample *sample = sample_of(keeper, server->address.shown);
        const uint64_t now_us = tg__monotonic_us();
        const bool silent = count > 1 && atomic_load_explicit(&server->asks_again_us, memory_order_relaxed) != 0;
        tg_trouble one = TG__TROUBLE_PAUSED;
        if (sample && !silent && now_us < deadline_us)
            one = sample_server(keeper, server, sample, patience_us, now_us + (deadline_us - now_us) / (count - i), error);
        else
            tg__error(error, TG_E_STORE, "%s: how many keys it has could not be asked", server->address.shown);
        release_server(keeper, server);
        any = any || one == TG__TROUBLE_NONE;
        trouble = trouble == TG__TROUBLE_NONE ? one : trouble;
        if (sample)
            sample->listed = true;
        whole = whole && sample && sample->census.sampled > 0;
        if (!whole)
            continue;
        all.keys += sample->census.keys;
        all.bytes += sample->census.bytes;
        all.sampled += sample->census.sampled;
    }
    drop_samples(keeper, false);
    if (!any)
        return trouble;
    keeper->census = whole ? all : (tg_census){ .sampled = 0 };
    return TG__TROUBLE_NONE;
}

static void
look_for_growth(tg_keeper *keeper)
{
    if (keeper->census.sampled == 0 || !tg__growth_look(&keeper->growth, keeper->census.keys))
        return;
    tg__notice("keys-growing",
               "store %s: about %" PRIu64 " keys, %" PRIu64 " MiB, and more with each of the last %d looks: identities that are "
               "made up with each request would do that; see which policy counts by something a client invents",
               keeper->store->shown ? keeper->store->shown : keeper->store->uri, keeper->census.keys,
               keeper->census.bytes >> 20, TG__GROWTH_LOOKS);
}

void
tg__keeper_look(tg_keeper *keeper)
{
    pthread_mutex_lock(&keeper->talk);
    if (take_census(keeper, EXCHANGE_US, NULL) == TG__TROUBLE_NONE)
        look_for_growth(keeper);
    pthread_mutex_unlock(&keeper->talk);
}

tg_status
tg__keeper_census(tg_keeper *keeper, tg_census *census, tg_error *error)
{
    pthread_mutex_lock(&keeper->talk);
    const uint64_t now_us = tg__monotonic_us();
    const bool runs = atomic_load(&keeper->generation) == tg__fork_generation() + 1;
    tg_trouble trouble = TG__TROUBLE_NONE;
    keeper->wanted_until_us = now_us + WANTED_FOR_US;
    if (!runs || keeper->census_at_us == 0 || now_us - keeper->census_at_us > 2 * CENSUS_EVERY_US)
        trouble = take_census(keeper, EXCHANGE_US, error);
    *census = keeper->census;
    pthread_mutex_unlock(&keeper->talk);
    if (trouble != TG__TROUBLE_NONE && error)
        error->status = TG_E_STORE;
    return trouble == TG__TROUBLE_NONE ? TG_OK : TG_E_STORE;
}

static tg_status
go(tg_keeper *keeper, tg_errand *errand, tg_error *error)
{
    pthread_mutex_lock(&keeper->talk);
    const tg_trouble trouble = exchange(keeper, errand, error);
    pthread_mutex_unlock(&keeper->talk);
    if (trouble != TG__TROUBLE_NONE && error)
        error->status = TG_E_STORE;
    return trouble == TG__TROUBLE_NONE ? TG_OK : TG_E_STORE;
}

/* ---- the thread ---- */

/* What only a person can change is said once; all else is said by those who decide. The last one, as the store is closed,
 * opens a connection at once where none is idle: nobody else does any more. */
static void
tick(tg_keeper *keeper, bool last)
{
    tg_error error = { .message = "" };
    tg_redis_store *server = hold_server(keeper);
    const bool answers = server && atomic_load_explicit(&server->asks_again_us, memory_order_relaxed) == 0;
    release_server(keeper, server);
    if (!answers)
        return; /* known not to answer: those who decide find out when it does again */
    pthread_mutex_lock(&keeper->talk);
    tg_errand errand = { .wants_counts = !last && tg__monotonic_us() < keeper->wanted_until_us,
                         .patience_us = last ? EXCHANGE_US : 0, .last = last };
    const tg_trouble trouble = exchange(keeper, &errand, &error);
    const uint64_t now_us = tg__monotonic_us();
    const bool grows = !last && now_us - keeper->growth_at_us >= GROWTH_EVERY_US;
    if (trouble == TG__TROUBLE_NONE && (grows || (errand.wants_counts && now_us - keeper->census_at_us >= CENSUS_EVERY_US)) &&
        take_census(keeper, 0, NULL) == TG__TROUBLE_NONE && grows) {
        keeper->growth_at_us = now_us;
        look_for_growth(keeper);
    }
    const bool tells = trouble == TG__TROUBLE_REFUSED && !keeper->told;
    keeper->told |= tells;
    pthread_mutex_unlock(&keeper->talk);
    if (tells)
        tg__notice("store-unkept", "%s; counts of decisions and overrides are not kept until that is put right",
                   error.message);
}

static void *
run(void *data)
{
    tg_keeper *keeper = data;
    uint64_t drawn;
    tg__random(&drawn, sizeof drawn);
    for (bool first = true;; first = false) {
        pthread_mutex_lock(&keeper->sleep);
        if (!keeper->stop) {
            /* Up to a tenth sooner, so that many processes do not ask at one instant. */
            drawn = drawn * UINT64_C(6364136223846793005) + 1442695040888963407u;
            const uint64_t until_us = tg__monotonic_us() + (first ? FIRST_US : EVERY_US) - (drawn >> 33) % (EVERY_US / 10);
            const struct timespec until = { (time_t)(until_us / 1000000), (long)(until_us % 1000000) * 1000 };
            while (!keeper->stop && pthread_cond_timedwait(&keeper->woken, &keeper->sleep, &until) != ETIMEDOUT)
                continue;
        }
        const bool stop = keeper->stop;
        pthread_mutex_unlock(&keeper->sleep);
        if (stop)
            return NULL;
        tick(keeper, false);
    }
}

static void
locks_init(tg_keeper *keeper)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&keeper->talk, NULL);
    pthread_mutex_init(&keeper->sleep, NULL);
    pthread_cond_init(&keeper->woken, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* Its own small stack, and no signal: handlers belong to the program. */
static void
begin_thread(tg_keeper *keeper)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&keeper->thread, &attributes, run, keeper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed)
        atomic_store(&keeper->generation, 0); /* the next decision tries again */
}

/* Sees to it that there is a thread in this process. One load where there is. */
static void
wake(tg_keeper *keeper)
{
    const unsigned generation = tg__fork_generation() + 1;
    unsigned had = atomic_load_explicit(&keeper->generation, memory_order_relaxed);
    if (__builtin_expect(had == generation, 1) || keeper->manual)
        return;
    if (atomic_compare_exchange_strong(&keeper->generation, &had, generation))
        begin_thread(keeper);
}

/* ---- forks ---- */

static _Atomic(tg_keeper *) all;
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;

static void
begin_child(void)
{
    pthread_mutex_init(&all_lock, NULL);
    for (tg_keeper *keeper = atomic_load(&all); keeper; keeper = keeper->next) {
        locks_init(keeper);
        keeper->stop = false;
        keeper->samples = NULL; /* lost, as `seen` is: the parent's thread may have been changing them */
        keeper->sample_count = 0;
        keeper->seen = NULL;
        if (keeper->ways->begin_child)
            keeper->ways->begin_child(keeper->store);
        atomic_store(&keeper->generation, 0);
        tg__counts_after_fork(keeper->counts);
        tg__orders_after_fork(keeper->orders);
    }
}

static void
register_child(void)
{
    pthread_atfork(NULL, NULL, begin_child);
}

/* The list changes by single pointers, so that a child forked meanwhile finds one. */
static void
enlist(tg_keeper *keeper)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_child);
    pthread_mutex_lock(&all_lock);
    keeper->next = atomic_load(&all);
    atomic_store(&all, keeper);
    pthread_mutex_unlock(&all_lock);
}

static void
strike_off(tg_keeper *keeper)
{
    pthread_mutex_lock(&all_lock);
    if (atomic_load(&all) == keeper)
        atomic_store(&all, keeper->next);
    for (tg_keeper *before = atomic_load(&all); before; before = before->next)
        if (before->next == keeper)
            before->next = keeper->next;
    pthread_mutex_unlock(&all_lock);
}

/* ---- its life ---- */

tg_keeper *
tg__keeper_open(tg_store *store, const tg_keeper_ways *ways, bool manual)
{
    tg_keeper *keeper = calloc(1, sizeof *keeper);
    if (!keeper)
        return NULL;
    keeper->store = store;
    keeper->ways = ways;
    keeper->manual = manual;
    keeper->counts = tg__counts_open();
    keeper->orders = tg__orders_open();
    locks_init(keeper);
    if (!keeper->counts || !keeper->orders) {
        tg__keeper_close(keeper);
        return NULL;
    }
    atomic_store(&store->overrides, tg__orders_standing(keeper->orders));
    enlist(keeper);
    return keeper;
}

void
tg__keeper_close(tg_keeper *keeper)
{
    if (!keeper)
        return;
    const bool runs = atomic_load(&keeper->generation) == tg__fork_generation() + 1;
    strike_off(keeper);
    if (runs) {
        pthread_mutex_lock(&keeper->sleep);
        keeper->stop = true;
        pthread_cond_signal(&keeper->woken);
        pthread_mutex_unlock(&keeper->sleep);
        pthread_join(keeper->thread, NULL);
    }
    if (runs)
        tick(keeper, true); /* what was counted since */
    atomic_store(&keeper->store->overrides, NULL);
    tg__counts_close(keeper->counts);
    tg__orders_close(keeper->orders);
    free(keeper->text);
    free(keeper->seen);
    drop_samples(keeper, true);
    pthread_cond_destroy(&keeper->woken);
    pthread_mutex_destroy(&keeper->sleep);
    pthread_mutex_destroy(&keeper->talk);
    free(keeper);
}

/* ---- for operators ---- */

const tg_metric_name *
tg__kept_metric_name(tg_store *store, const char *space, const char *name)
{
    return tg__counts_name(store->keeper->counts, space, name);
}

_Atomic uint64_t *
tg__kept_metric_line(tg_store *store, const tg_metric_name *name)
{
    wake(store->keeper);
    return tg__counts_line(name);
}

void
tg__kept_latency_add(tg_store *store, uint64_t latency_ns)
{
    tg__counts_latency_add(store->keeper->counts, latency_ns);
}

tg_status
tg__kept_metrics(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count, tg_latency_metrics *latency,
                 tg_error *error)
{
    tg_keeper *const keeper = store->keeper;
    tg_errand errand = { .wants_counts = true, .patience_us = EXCHANGE_US };
    tg_status status = TG_OK;
    pthread_mutex_lock(&keeper->talk);
    const uint64_t now_us = tg__monotonic_us();
    const bool fresh = keeper->seen && now_us - keeper->seen_at_us < FRESH_US &&
                       atomic_load(&keeper->generation) == tg__fork_generation() + 1;
    keeper->wanted_until_us = now_us + WANTED_FOR_US;
    if (!fresh && exchange(keeper, &errand, error) != TG__TROUBLE_NONE)
        status = TG_E_STORE;
    if (status == TG_OK && !keeper->seen)
        status = tg__error(error, TG_E_NOMEM, "redis: the counts of all processes");
    if (status == TG_OK)
        tg__counts_read((tg_text){ keeper->seen, keeper->seen_length }, policies, room, count, latency);
    pthread_mutex_unlock(&keeper->talk);
    if (status != TG_OK && error)
        error->status = status;
    return status;
}

tg_status
tg__kept_override_set(tg_store *store, const tg_override *override, tg_error *error)
{
    const uint64_t now_us = tg_store_now_us(store);
    tg_errand errand = { .set = override, .patience_us = EXCHANGE_US };
    if (override->until_us)
        errand.lasts_us = override->until_us > now_us ? override->until_us - now_us : 1;
    const tg_status status = go(store->keeper, &errand, error);
    if (status == TG_OK && errand.full)
        return tg__error(error, TG_E_SYSTEM, "redis: all %d places for overrides are taken; end some of them",
                         TG__OVERRIDES_MAX);
    return status;
}

tg_status
tg__kept_override_list(tg_store *store, const char *space, const char *policy, const uint8_t identity[16],
                       tg_override *overrides, size_t room, size_t *count, tg_error *error)
{
    tg_keeper *const keeper = store->keeper;
    if (!policy) { /* a person asks: as it is now */
        tg_errand errand = { .patience_us = EXCHANGE_US };
        const tg_status status = go(keeper, &errand, error);
        if (status != TG_OK)
            return status;
    }
    tg__orders_list(keeper->orders, tg_store_now_us(store), space, policy, identity, overrides, room, count);
    return TG_OK;
}
