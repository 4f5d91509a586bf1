/* Whether all the world seems to be one client: then it is a proxy that nobody named, and everybody shares one limit.
 * Must not enter: what is counted. */
#include "identity/client.h"

#include <stdatomic.h>

#define ENOUGH 1000u

/* Of this process, as its requests come over one way in. 0: nobody yet. */
static _Atomic uint64_t first;
static atomic_uint alone;
atomic_bool tg__client_seen_enough;

static uint64_t
mixed(const tg_address *address)
{
    uint64_t halves[2];
    memcpy(halves, address->bytes, sizeof halves);
    return (halves[0] * UINT64_C(0x9e3779b97f4a7c15) ^ halves[1]) | 1;
}

void
tg__client_see(const tg_address *address)
{
    const uint64_t self = mixed(address);
    uint64_t known = 0;
    if (!atomic_compare_exchange_strong(&first, &known, self) && known != self) {
        atomic_store_explicit(&tg__client_seen_enough, true, memory_order_relaxed);
        return;
    }
    if (atomic_fetch_add_explicit(&alone, 1, memory_order_relaxed) + 1 < ENOUGH ||
        atomic_exchange(&tg__client_seen_enough, true) || !tg__address_private(address))
        return;
    char text[TG_ADDRESS_TEXT_MAX];
    tg__address_text(address, 32, 128, text);
    tg__notice("one-client", "all of the first %u requests came from %s, a private address: if that is a proxy, all its "
                             "clients share one count; add it to trusted_proxies and see that it sends client_header",
               ENOUGH, text);
}
