/* Leases: one place for each key, under one of 64 short locks. Who does not get one at once has no lease.
 * Must not enter: the store behind. */
#include "stores/tiered/grants.h"

#include <stdlib.h>

#define STRIPES 64u
#define SPINS 2000u

typedef struct place {
    uint64_t key[2];
    uint64_t limit, burst, period_us;
    uint64_t left; /* units */
    uint64_t sent_us, until_us, epoch;
    uint64_t remaining, reset_after_us, stamp_us;
    bool scarce;
} place;

typedef struct stripe {
    _Atomic uint32_t held;
    char apart[60]; /* a cache line each */
} stripe;

struct tg_grants {
    stripe stripes[STRIPES];
    place places[TG__GRANTS];
};

tg_grants *
tg__grants_open(void)
{
    return calloc(1, sizeof(tg_grants)); /* pages not touched yet are none */
}

void
tg__grants_close(tg_grants *grants)
{
    free(grants);
}

void
tg__grants_after_fork(tg_grants *grants)
{
    memset(grants, 0, sizeof *grants);
}

static place *
hold(tg_grants *grants, const tg_denial_key *key)
{
    _Atomic uint32_t *held = &grants->stripes[key->words[1] % STRIPES].held;
    for (unsigned i = 0; i < SPINS; i++) {
        uint32_t free_now = 0;
        if (atomic_compare_exchange_weak_explicit(held, &free_now, 1, memory_order_acquire, memory_order_relaxed))
            return &grants->places[key->words[1] % TG__GRANTS];
    }
    return NULL;
}

static void
let_go(tg_grants *grants, const tg_denial_key *key)
{
    atomic_store_explicit(&grants->stripes[key->words[1] % STRIPES].held, 0, memory_order_release);
}

static bool
is_of(const place *at, const tg_rule *rule, const tg_denial_key *key)
{
    return at->key[0] == key->words[0] && at->key[1] == key->words[1] && at->limit == rule->limit &&
           at->burst == rule->burst && at->period_us == rule->period_us;
}

tg_grant_found
tg__grants_take(tg_grants *grants, const tg_target *target, const tg_denial_key *key, uint64_t epoch, uint64_t now_us,
                tg_result *told)
{
    place *at = hold(grants, key);
    tg_grant_found found = TG__GRANT_NONE;
    if (!at)
        return TG__GRANT_SCARCE;
    if (is_of(at, target->rule, key) && at->epoch == epoch && now_us >= at->sent_us && now_us < at->until_us) {
        if (at->scarce) {
            found = TG__GRANT_SCARCE;
        } else if (at->left >= target->cost) {
            const uint64_t passed_us = now_us - at->sent_us;
            found = TG__GRANT_TAKEN;
            at->left -= target->cost;
            told->allowed = told->charged = true;
            told->remaining = at->remaining + at->left;
            told->retry_after_us = told->delay_us = 0;
            told->reset_after_us = at->reset_after_us > passed_us ? at->reset_after_us - passed_us : 0;
            told->stamp_us = at->stamp_us;
        }
    }
    let_go(grants, key);
    return found;
}

void
tg__grants_give_back(tg_grants *grants, const tg_target *target, const tg_denial_key *key)
{
    place *at = hold(grants, key);
    if (!at)
        return; /* lost to all: too few pass, never too many */
    if (is_of(at, target->rule, key) && !at->scarce)
        at->left += target->cost;
    let_go(grants, key);
}

void
tg__grants_put(tg_grants *grants, const tg_target *target, const tg_denial_key *key, uint64_t epoch, uint64_t sent_us,
               uint64_t units, const tg_result *result)
{
    place *at = hold(grants, key);
    if (!at)
        return;
    *at = (place){
        .key = { key->words[0], key->words[1] },
        .limit = target->rule->limit,
        .burst = target->rule->burst,
        .period_us = target->rule->period_us,
        .left = units,
        .sent_us = sent_us,
        .until_us = sent_us + TG__GRANT_LIFE_US,
        .epoch = epoch,
        .remaining = result->remaining,
        .reset_after_us = result->reset_after_us,
        .stamp_us = result->stamp_us,
        .scarce = units == 0,
    };
    let_go(grants, key);
}

void
tg__grants_drop(tg_grants *grants, const tg_denial_key *key)
{
    place *at = hold(grants, key);
    if (!at)
        return; /* over in a second at the latest */
    if (at->key[0] == key->words[0] && at->key[1] == key->words[1])
        at->until_us = 0;
    let_go(grants, key);
}
