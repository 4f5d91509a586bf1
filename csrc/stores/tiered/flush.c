/* One place for each key, under one of 64 short locks. A hit only adds to the units that wait; a thread takes them from
 * there and has them charged, whether they fit or not, in calls of many keys; what those calls saw is what is judged by.
 * Must not enter: arithmetic of an algorithm, decisions over several targets.
 *
 * For each key one batch is under way at a time, and what waits with what is under way is never more than a tenth of the
 * rule for all workers. So, from when the store behind is full, no worker lets more than that through: its next batch says
 * so. */
#include "stores/tiered/flush.h"

#include "stores/tiered/tiered.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#define STRIPES 64u
#define SPINS 2000u
#define WORDS (TG__FLUSH_PLACES / 64u)
#define NOT_SEEN UINT64_MAX
#define CLOSING_US UINT64_C(1000000)

typedef struct place {
    tg_denial_key key;
    tg_rule rule;
    tg_identity identity;
    uint64_t unsent, under_way; /* units */
    uint64_t heard_us, epoch;   /* of the state; on the tiers' clock */
    uint32_t turn;              /* moves on with whom it belongs to */
    bool known;
    tg_sight sight;
} place;

typedef struct stripe {
    _Atomic uint32_t held;
    char apart[60]; /* a cache line each */
} stripe;

/* One call to the store behind. */
typedef struct message {
    size_t count;
    uint32_t places[TG_TARGETS_MAX], turns[TG_TARGETS_MAX];
    tg_rule rules[TG_TARGETS_MAX];
    tg_identity identities[TG_TARGETS_MAX];
    tg_target targets[TG_TARGETS_MAX];
    tg_sight sights[TG_TARGETS_MAX];
    tg_result results[TG_TARGETS_MAX];
} message;

struct tg_flush {
    tg_tiered *tiered;
    uint64_t every_us;
    _Atomic uint64_t waits[WORDS]; /* a bit for each place with unsent units */
    atomic_bool awake, stop;
    atomic_bool running; /* this process has a thread for it */
    pthread_t thread;
    sem_t wake, hurry;
    pthread_mutex_t sending; /* of whoever sends; never of a request */
    message batch;           /* under `sending` */
    stripe stripes[STRIPES];
    place places[TG__FLUSH_PLACES];
};

/* ---- places ---- */

static uint32_t
index_of(const tg_denial_key *key)
{
    return (uint32_t)(key->words[1] % TG__FLUSH_PLACES);
}

static place *
hold(tg_flush *flush, uint32_t index)
{
    _Atomic uint32_t *held = &flush->stripes[index % STRIPES].held;
    for (unsigned i = 0; i < SPINS; i++) {
        uint32_t free_now = 0;
        if (atomic_compare_exchange_weak_explicit(held, &free_now, 1, memory_order_acquire, memory_order_relaxed))
            return &flush->places[index];
    }
    return NULL;
}

/* For who is no request. */
static place *
hold_patiently(tg_flush *flush, uint32_t index)
{
    place *at;
    while (!(at = hold(flush, index)))
        sched_yield();
    return at;
}

static void
let_go(tg_flush *flush, uint32_t index)
{
    atomic_store_explicit(&flush->stripes[index % STRIPES].held, 0, memory_order_release);
}

static bool
is_key(const place *at, const tg_denial_key *key)
{
    return at->key.words[0] == key->words[0] && at->key.words[1] == key->words[1];
}

static bool
is_of(const place *at, const tg_rule *rule, const tg_denial_key *key)
{
    return is_key(at, key) && at->rule.limit == rule->limit && at->rule.burst == rule->burst &&
           at->rule.period_us == rule->period_us && at->rule.algorithm == rule->algorithm &&
           at->rule.aligned == rule->aligned && at->rule.resolution_us == rule->resolution_us;
}

/* Units of one key that this process may have let through and the store behind not know of. */
static uint64_t
most_of(const tg_flush *flush, const tg_rule *rule)
{
    const uint64_t least = rule->burst < rule->limit ? rule->burst : rule->limit;
    return least / (10 * flush->tiered->workers);
}

/* Server times tell which of two answers is the newer one: they come over different connections. */
static void
know(place *at, const tg_sight *sight, uint64_t epoch, uint64_t heard_us)
{
    if (at->known && at->epoch == epoch && sight->now_us < at->sight.now_us)
        return;
    at->sight = *sight;
    at->known = true;
    at->epoch = epoch;
    at->heard_us = heard_us;
}

static void
mark_waiting(tg_flush *flush, uint32_t index)
{
    atomic_fetch_or(&flush->waits[index / 64], UINT64_C(1) << (index % 64));
    if (!atomic_load(&flush->awake) && !atomic_exchange(&flush->awake, true))
        sem_post(&flush->wake);
}

bool
tg__flush_take(tg_flush *flush, const tg_target *target, const tg_denial_key *key, uint64_t epoch, uint64_t now_us,
               tg_result *told)
{
    const uint32_t index = index_of(key);
    const uint64_t most = most_of(flush, target->rule);
    if (target->cost == 0 || target->cost > most || target->rule->algorithm == TG_LEAKY_BUCKET)
        return false; /* each hit of a leaky bucket has a delay of its own */
    place *at = hold(flush, index);
    bool taken = false, first = false, full = false;
    if (!at)
        return false;
    const uint64_t waiting = at->unsent + at->under_way;
    if (is_of(at, target->rule, key) && at->known && at->epoch == epoch && now_us >= at->heard_us &&
        now_us - at->heard_us < TG__FLUSH_LIFE_US && waiting + target->cost <= most) {
        /* Reckoned from when it was heard, so that the server's time is never behind: nothing is let through early. */
        const uint64_t as_us = at->sight.now_us + (now_us - at->heard_us);
        tg_target all = *target;
        all.cost += waiting;
        taken = tg__sights_tell(TG_OP_HIT, &all, &(uint8_t){ 0 }, 1, false, &at->sight, as_us, 1, told);
    }
    if (taken) {
        first = at->unsent == 0;
        at->unsent += target->cost;
        full = waiting + 2 * target->cost > most;
    }
    let_go(flush, index);
    if (first)
        mark_waiting(flush, index);
    if (full)
        sem_post(&flush->hurry);
    return taken;
}

bool
tg__flush_give_back(tg_flush *flush, const tg_target *target, const tg_denial_key *key)
{
    const uint32_t index = index_of(key);
    place *at = hold(flush, index);
    if (!at)
        return false;
    /* What was taken a period ago is not what waits now. */
    const bool given = is_of(at, target->rule, key) && at->unsent >= target->cost &&
                       (!target->own || target->stamp_us + target->rule->period_us > at->sight.now_us);
    if (given)
        at->unsent -= target->cost;
    let_go(flush, index);
    return given;
}

void
tg__flush_drop(tg_flush *flush, const tg_denial_key *key)
{
    const uint32_t index = index_of(key);
    place *at = hold(flush, index);
    if (!at)
        return; /* what is known is over in a second at the latest */
    if (is_key(at, key)) {
        at->known = false;
        at->unsent = at->under_way = 0;
        at->turn++;
    }
    let_go(flush, index);
}

/* ---- sending ---- */

static uint64_t
real_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void
put_in_batch(tg_flush *flush, message *batch, uint32_t index)
{
    place *at = hold_patiently(flush, index);
    const size_t i = batch->count;
    if (at->unsent > 0) {
        batch->count++;
        batch->places[i] = index;
        batch->turns[i] = at->turn;
        batch->rules[i] = at->rule;
        batch->identities[i] = at->identity;
        batch->sights[i].now_us = NOT_SEEN;
        batch->targets[i] = (tg_target){ .rule = &batch->rules[i], .identity = &batch->identities[i],
                                         .cost = at->unsent, .forced = true, .sight = &batch->sights[i] };
        at->under_way = at->unsent;
        at->unsent = 0;
    }
    let_go(flush, index);
}

/* What was not answered is not sent again: nobody knows whether it was taken. */
static bool
send_batch(tg_flush *flush, message *batch)
{
    tg_tiered *tiered = flush->tiered;
    const uint64_t epoch = tg__tiered_epoch(tiered);
    /* Nobody waits for it: many slots, of which each has the store's deadline, may take longer together. */
    const uint64_t until_us = tiered->inner->in_slots ? tg__monotonic_us() + CLOSING_US : 0;
    const bool sent = tiered->inner->ops->apply(tiered->inner, TG_OP_HIT, batch->targets, batch->count, until_us, batch->results,
                                                NULL, NULL) == TG_OK;
    const uint64_t heard_us = tg__tiered_now_us(tiered);
    for (size_t i = 0; i < batch->count; i++) {
        tg_sight *sight = &batch->sights[i];
        const bool seen = sight->now_us != NOT_SEEN; /* of a cluster perhaps some: each is charged by itself */
        if (seen)
            tg__sight_take(&batch->targets[i], sight);
        place *at = hold_patiently(flush, batch->places[i]);
        if (at->turn == batch->turns[i]) {
            at->under_way = 0;
            if (seen)
                know(at, sight, epoch, heard_us);
            else
                at->known = false; /* the next hit asks, and its rule's on_store_failure holds */
        }
        let_go(flush, batch->places[i]);
    }
    batch->count = 0;
    return sent;
}

/* `until_us` 0: everything, whatever fails; on CLOCK_MONOTONIC. */
static void
send_all(tg_flush *flush, uint64_t until_us)
{
    message *batch = &flush->batch;
    bool goes_on = true;
    pthread_mutex_lock(&flush->sending);
    batch->count = 0;
    for (uint32_t word = 0; word < WORDS && goes_on; word++) {
        uint64_t bits = atomic_load(&flush->waits[word]) ? atomic_exchange(&flush->waits[word], 0) : 0;
        for (; bits && goes_on; bits &= bits - 1) {
            put_in_batch(flush, batch, word * 64 + (uint32_t)__builtin_ctzll(bits));
            if (batch->count == TG_TARGETS_MAX)
                goes_on = send_batch(flush, batch) || until_us == 0;
            if (until_us && real_us() >= until_us)
                goes_on = false;
        }
    }
    if (batch->count > 0 && goes_on)
        send_batch(flush, batch);
    pthread_mutex_unlock(&flush->sending);
}

void
tg__flush_now(tg_flush *flush)
{
    send_all(flush, real_us() + CLOSING_US);
}

static void *
run(void *data)
{
    tg_flush *flush = data;
    for (;;) {
        while (sem_wait(&flush->wake) != 0)
            continue;
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        const uint64_t ns = (uint64_t)until.tv_nsec + flush->every_us * 1000;
        until.tv_sec += (time_t)(ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
        if (!atomic_load(&flush->stop))
            sem_clockwait(&flush->hurry, CLOCK_MONOTONIC, &until);
        while (sem_trywait(&flush->hurry) == 0)
            continue;
        if (atomic_load(&flush->stop))
            return NULL;
        atomic_store(&flush->awake, false); /* before looking: who comes after that wakes it again */
        send_all(flush, 0);
    }
}

/* From the first answer on, and in a forked child from its own first. */
static bool
runs(tg_flush *flush)
{
    if (atomic_load_explicit(&flush->running, memory_order_relaxed))
        return true;
    if (atomic_exchange(&flush->running, true))
        return true;
    sigset_t none, before;
    sigfillset(&none);
    pthread_sigmask(SIG_SETMASK, &none, &before); /* the application's handlers are for its own threads */
    const bool failed = pthread_create(&flush->thread, NULL, run, flush) != 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        atomic_store(&flush->running, false); /* then everything is asked about */
    else
        tg__tiered_flushes_at_exit();
    return !failed;
}

void
tg__flush_learn(tg_flush *flush, const tg_target *target, const tg_denial_key *key, uint64_t epoch,
                const tg_sight *sight, bool charged)
{
    if (target->rule->algorithm == TG_LEAKY_BUCKET || most_of(flush, target->rule) == 0 || !runs(flush))
        return;
    const uint64_t heard_us = tg__tiered_now_us(flush->tiered);
    const uint32_t index = index_of(key);
    tg_sight after = *sight;
    if (charged)
        tg__sight_take(target, &after);
    place *at = hold(flush, index);
    if (!at)
        return;
    if (!is_of(at, target->rule, key) && at->unsent == 0 && at->under_way == 0) {
        at->key = *key;
        at->rule = *target->rule;
        at->identity = *target->identity;
        at->known = false;
        at->turn++;
    }
    if (is_of(at, target->rule, key))
        know(at, &after, epoch, heard_us);
    let_go(flush, index);
}

/* ---- from first to last ---- */

static void
begin(tg_flush *flush)
{
    sem_init(&flush->wake, 0, 0);
    sem_init(&flush->hurry, 0, 0);
    pthread_mutex_init(&flush->sending, NULL);
}

tg_flush *
tg__flush_open(tg_tiered *tiered, uint64_t every_us)
{
    tg_flush *flush = calloc(1, sizeof *flush); /* pages not touched yet are none */
    if (!flush)
        return NULL;
    flush->tiered = tiered;
    flush->every_us = every_us;
    begin(flush);
    return flush;
}

void
tg__flush_after_fork(tg_flush *flush)
{
    tg_tiered *tiered = flush->tiered;
    const uint64_t every_us = flush->every_us;
    memset(flush, 0, sizeof *flush);
    flush->tiered = tiered;
    flush->every_us = every_us;
    begin(flush);
}

void
tg__flush_close(tg_flush *flush)
{
    if (!flush)
        return;
    if (atomic_load(&flush->running)) {
        atomic_store(&flush->stop, true);
        sem_post(&flush->hurry);
        sem_post(&flush->wake);
        pthread_join(flush->thread, NULL);
        tg__flush_now(flush);
    }
    sem_destroy(&flush->wake);
    sem_destroy(&flush->hurry);
    pthread_mutex_destroy(&flush->sending);
    free(flush);
}
