/* When a store does not answer: one notice as trouble begins and one as it ends, whatever the number of requests. */
#include "core/core.h"

#include <inttypes.h>

#define CALM_US UINT64_C(1000000) /* with no failure for this long, trouble is over */

void
tg__failure_seen(tg_store *store, const tg_error *error)
{
    atomic_store_explicit(&store->last_failure_us, tg__monotonic_us(), memory_order_relaxed);
    atomic_fetch_add_explicit(&store->failures, 1, memory_order_relaxed);
    if (!atomic_exchange(&store->failing, true))
        tg__notice("store-failing", "store %s does not answer: %s; on_store_failure decides until it does",
                   store->shown ? store->shown : store->uri, error->message);
}

void
tg__success_seen(tg_store *store)
{
    if (!atomic_load_explicit(&store->failing, memory_order_relaxed))
        return;
    /* One segment of a table may fail while the others answer: an answer alone does not end the trouble. */
    if (tg__monotonic_us() - atomic_load_explicit(&store->last_failure_us, memory_order_relaxed) < CALM_US)
        return;
    if (atomic_exchange(&store->failing, false))
        tg__notice("store-answers", "store %s answers again; %" PRIu64 " decisions went by on_store_failure",
                   store->shown ? store->shown : store->uri, atomic_exchange(&store->failures, 0));
}
