/* The connections of one store in this process: at most so many, each used by one call at a time, never by a forked
 * child. Must not enter: what is said over them.
 *
 * A fork copies the table of connections but not the right to use them: what a child wrote there would mix with what
 * the parent writes. So the child closes its copies of the descriptors (the parent's stay open) and begins with none.
 * It can be forked at any instant, so whatever may be half done then must be safe to find: `fd` is taken out of its
 * slot before it is closed, and the list of stores changes by single pointers. */
#include "stores/redis/redis.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static _Atomic(tg_redis_store *) stores;
static pthread_mutex_t stores_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint generation;

unsigned
tg__fork_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}

static void
locks_init(tg_redis_store *store)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->freed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static void
begin_child(void)
{
    pthread_mutex_init(&stores_lock, NULL);
    atomic_fetch_add(&generation, 1);
    for (tg_redis_store *store = atomic_load(&stores); store; store = store->next) {
        locks_init(store); /* a thread that is not in this process may have held it */
        for (unsigned i = 0; i < store->address.connections_max; i++) {
            tg_redis_wire *wire = &store->wires[i];
            const int fd = atomic_exchange(&wire->fd, -1);
            if (fd != -1)
                close(fd);
            wire->reader = NULL; /* lost, a few KiB: its owner may have been in the middle of it */
            wire->tls = NULL;
            wire->taken = false;
        }
        store->idle_count = store->waiting = 0;
        atomic_store(&store->probing, false);
    }
}

static void
register_child(void)
{
    pthread_atfork(NULL, NULL, begin_child);
}

tg_status
tg__pool_init(tg_redis_store *store, tg_error *error)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_child);
    const unsigned count = store->address.connections_max;
    store->wires = calloc(count, sizeof *store->wires);
    if (!store->wires)
        return tg__error(error, TG_E_NOMEM, "redis: %u connections", count);
    for (unsigned i = 0; i < count; i++)
        atomic_init(&store->wires[i].fd, -1);
    locks_init(store);
    pthread_mutex_lock(&stores_lock);
    store->next = atomic_load(&stores);
    atomic_store(&stores, store);
    pthread_mutex_unlock(&stores_lock);
    return TG_OK;
}

void
tg__pool_fini(tg_redis_store *store)
{
    if (!store->wires)
        return;
    pthread_mutex_lock(&stores_lock);
    if (atomic_load(&stores) == store)
        atomic_store(&stores, store->next);
    else
        for (tg_redis_store *before = atomic_load(&stores); before; before = before->next)
            if (before->next == store) {
                before->next = store->next;
                break;
            }
    pthread_mutex_unlock(&stores_lock);
    for (unsigned i = 0; i < store->address.connections_max; i++) {
        tg__wire_close(&store->wires[i]);
        explicit_bzero(&store->wires[i].keyring, sizeof store->wires[i].keyring);
    }
    free(store->wires);
    pthread_cond_destroy(&store->freed);
    pthread_mutex_destroy(&store->lock);
}

/* Those in use are closed when they are given back unsound, or stay. */
void
tg__pool_close_idle(tg_redis_store *store)
{
    pthread_mutex_lock(&store->lock);
    while (store->idle_count > 0)
        tg__wire_close(&store->wires[store->idle_order[--store->idle_count]]);
    pthread_mutex_unlock(&store->lock);
}

static tg_redis_wire *
closed_one(tg_redis_store *store)
{
    for (unsigned i = 0; i < store->address.connections_max; i++)
        if (!store->wires[i].taken && atomic_load_explicit(&store->wires[i].fd, memory_order_relaxed) == -1)
            return &store->wires[i];
    return NULL;
}

/* An idle connection, the last used first so that those not needed go stale alone; else a closed one; else waits. */
static tg_redis_wire *
claim(tg_redis_store *store, uint64_t deadline_us)
{
    const struct timespec until = { (time_t)(deadline_us / 1000000), (long)(deadline_us % 1000000) * 1000 };
    pthread_mutex_lock(&store->lock);
    tg_redis_wire *wire = NULL;
    bool told = false;
    for (;;) {
        if (store->idle_count > 0)
            wire = &store->wires[store->idle_order[--store->idle_count]];
        else
            wire = closed_one(store);
        if (wire)
            break;
        if (!told) { /* and not under the lock */
            told = true;
            pthread_mutex_unlock(&store->lock);
            tg__store_waits();
            pthread_mutex_lock(&store->lock);
            continue;
        }
        store->waiting++;
        const int waited = pthread_cond_timedwait(&store->freed, &store->lock, &until);
        store->waiting--;
        if (waited == ETIMEDOUT)
            break;
    }
    if (wire)
        wire->taken = true;
    pthread_mutex_unlock(&store->lock);
    return wire;
}

void
tg__pool_give(tg_redis_store *store, tg_redis_wire *wire, bool sound)
{
    if (!sound) {
        tg__wire_close(wire); /* while it is still ours: closing need not happen under the lock */
        tg__redis_begins_epoch(store);
    }
    pthread_mutex_lock(&store->lock);
    wire->taken = false;
    if (sound)
        store->idle_order[store->idle_count++] = (unsigned)(wire - store->wires);
    if (store->waiting > 0)
        pthread_cond_signal(&store->freed);
    pthread_mutex_unlock(&store->lock);
}

bool
tg__pool_spare(tg_redis_store *store, bool open)
{
    pthread_mutex_lock(&store->lock);
    const bool spare = store->idle_count > 0 || (!open && closed_one(store));
    pthread_mutex_unlock(&store->lock);
    return spare;
}

tg_trouble
tg__pool_take(tg_redis_store *store, uint64_t now_us, uint64_t deadline_us, tg_redis_wire **taken, tg_error *error)
{
    tg_redis_wire *wire;
    for (;;) {
        wire = claim(store, deadline_us);
        if (!wire) {
            tg__error(error, TG_E_STORE, "redis: all %u connections were in use until the deadline",
                      store->address.connections_max);
            return TG__TROUBLE_TIMEOUT;
        }
        if (atomic_load_explicit(&wire->fd, memory_order_relaxed) == -1)
            break;
        if (tg__wire_sound(wire, now_us ? now_us : tg__monotonic_us())) {
            *taken = wire;
            return TG__TROUBLE_NONE;
        }
        /* Closed while idle, by a timeout or a restart: nothing was asked over it, so nothing is lost or repeated. */
        tg__pool_give(store, wire, false);
    }
    tg_trouble trouble = tg__wire_open(wire, &store->address, deadline_us, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = tg__redis_greet(store, wire, deadline_us, error);
    if (trouble != TG__TROUBLE_NONE) {
        tg__redis_led_nowhere(store);
        tg__pool_give(store, wire, false);
        return trouble;
    }
    *taken = wire;
    return TG__TROUBLE_NONE;
}
