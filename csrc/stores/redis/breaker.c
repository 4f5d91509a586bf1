/* The circuit breaker: while Redis is known not to answer nobody asks it, so that trouble costs requests next to
 * nothing. One for all threads of a process that share a store, and for its calls that wait and those that do not.
 * Must not enter: what trouble is; that is said in trouble.c. */
#include "stores/redis/redis.h"

#include <sys/random.h>

#define TRIP_AFTER 3 /* failures in a row */

/* The first pause is short: most troubles are a restart or a moment's stall. Then up to 1.6 s, so that Redis is asked
 * again within 2 s of being back; drawn anew each time, so that many processes do not come back at one instant. */
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

bool
tg__breaker_passes(tg_redis_store *store, bool *probe)
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

void
tg__breaker_hears(tg_redis_store *store, tg_trouble trouble, bool probe)
{
    if (trouble == TG__TROUBLE_NONE || trouble == TG__TROUBLE_REFUSED) { /* refused: it answers, and quickly */
        if (atomic_load_explicit(&store->failures_in_row, memory_order_relaxed) != 0)
            atomic_store(&store->failures_in_row, 0);
        if (atomic_load_explicit(&store->asks_again_us, memory_order_relaxed) != 0)
            atomic_store(&store->asks_again_us, 0);
        if (atomic_load_explicit(&store->openings, memory_order_relaxed) != 0)
            atomic_store(&store->openings, 0);
    } else if (atomic_fetch_add(&store->failures_in_row, 1) + 1 >= TRIP_AFTER || probe) {
        /* Many calls that fail together have found out one thing, not one each. */
        if (probe || atomic_load(&store->asks_again_us) == 0)
            atomic_store(&store->asks_again_us,
                         tg__monotonic_us() + pause_us(atomic_fetch_add(&store->openings, 1)));
    }
    tg__breaker_shrugs(store, probe);
}

void
tg__breaker_shrugs(tg_redis_store *store, bool probe)
{
    if (probe)
        atomic_store(&store->probing, false);
}
