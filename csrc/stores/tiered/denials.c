/* The deny cache. A set of four places for each key, under one of 256 short locks: what is done under one is comparing and
 * copying, and who does not get it at once does without (reads as unknown, remembers nothing, or forgets everything).
 * Must not enter: the store that is asked. */
#include "stores/tiered/denials.h"

#include <stdlib.h>

#define WAYS 4u
#define SETS (TG__DENIALS / WAYS)
#define STRIPES 256u
#define SPINS 2000u /* a holder that is not running may be away for long: nobody waits for that */

typedef struct place {
    uint64_t key[2];
    uint64_t limit, burst;
    uint64_t cost; /* that was asked for */
    uint8_t algorithm;
    bool aligned, used, old; /* old: not looked for since its set was last full */
    uint8_t company;         /* see tg__denials_company */
    tg_denial denial;
} place;

typedef struct stripe {
    _Atomic uint64_t given; /* counts what was given back or reset */
    _Atomic uint32_t held;
    char apart[52]; /* a cache line each */
} stripe;

struct tg_denials {
    uint8_t hash_key[16];
    _Atomic uint64_t dropped_all; /* part of each epoch */
    stripe stripes[STRIPES];
    place places[SETS][WAYS];
};

tg_denials *
tg__denials_open(void)
{
    tg_denials *denials = calloc(1, sizeof *denials); /* pages not touched yet are none */
    if (denials)
        tg__random(denials->hash_key, sizeof denials->hash_key);
    return denials;
}

void
tg__denials_close(tg_denials *denials)
{
    free(denials);
}

static bool
hold(stripe *one)
{
    for (unsigned i = 0; i < SPINS; i++) {
        uint32_t free_now = 0;
        if (atomic_compare_exchange_weak_explicit(&one->held, &free_now, 1, memory_order_acquire, memory_order_relaxed))
            return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    return false;
}

static void
let_go(stripe *one)
{
    atomic_store_explicit(&one->held, 0, memory_order_release);
}

static size_t
set_of(const tg_denial_key *key)
{
    return key->words[1] % SETS;
}

static stripe *
stripe_of(tg_denials *denials, const tg_denial_key *key)
{
    return &denials->stripes[set_of(key) % STRIPES];
}

void
tg__denials_after_fork(tg_denials *denials)
{
    for (unsigned i = 0; i < STRIPES; i++) {
        if (!atomic_load_explicit(&denials->stripes[i].held, memory_order_relaxed))
            continue;
        for (size_t set = i; set < SETS; set += STRIPES)
            memset(denials->places[set], 0, sizeof denials->places[set]);
        let_go(&denials->stripes[i]);
    }
}

void
tg__denials_keys(const tg_denials *denials, const tg_target *targets, size_t count, tg_denial_key *keys)
{
    const tg_identity *hashed = NULL;
    uint64_t hash[2] = { 0, 0 };
    for (size_t i = 0; i < count; i++) {
        uint64_t scope[2];
        if (targets[i].identity != hashed) {
            hashed = targets[i].identity;
            tg__keyed_hash(denials->hash_key, hashed->bytes, hashed->length, (uint8_t *)hash);
        }
        memcpy(scope, targets[i].rule->scope, sizeof scope);
        keys[i] = (tg_denial_key){ { hash[0] ^ scope[0], hash[1] ^ scope[1] } };
    }
}

static bool
is_key(const place *at, const tg_denial_key *key)
{
    return at->used && at->key[0] == key->words[0] && at->key[1] == key->words[1];
}

/* Of the same numbers too: a changed rule finds nothing. */
static bool
is_rule(const place *at, const tg_rule *rule)
{
    return at->limit == rule->limit && at->burst == rule->burst && at->algorithm == rule->algorithm &&
           at->aligned == rule->aligned;
}

uint64_t
tg__denials_mark(const tg_denials *denials, const tg_denial_key *key)
{
    const stripe *one = &denials->stripes[set_of(key) % STRIPES];
    return atomic_load(&one->given);
}

uint64_t
tg__denials_epoch(const tg_denials *denials, uint64_t store_epoch)
{
    return store_epoch + atomic_load(&denials->dropped_all); /* neither goes back */
}

/* One that is over, else one that was not looked for of late, else the one that is over first. */
static place *
victim_of(place set[WAYS], uint64_t now_us)
{
    place *victim = &set[0];
    for (unsigned i = 0; i < WAYS; i++) {
        if (!set[i].used || set[i].denial.until_us <= now_us)
            return &set[i];
        if (set[i].old != victim->old ? set[i].old : set[i].denial.until_us < victim->denial.until_us)
            victim = &set[i];
    }
    for (unsigned i = 0; i < WAYS; i++)
        set[i].old = true;
    return victim;
}

void
tg__denials_put(tg_denials *denials, const tg_target *target, const tg_denial_key *key, uint64_t mark,
                const tg_denial *denial)
{
    stripe *one = stripe_of(denials, key);
    place *set = denials->places[set_of(key)], *at = NULL;
    if (!hold(one))
        return;
    if (tg__denials_mark(denials, key) == mark) {
        for (unsigned i = 0; i < WAYS && !at; i++)
            if (is_key(&set[i], key) && is_rule(&set[i], target->rule))
                at = &set[i];
        const uint8_t company = at && at->denial.until_us > denial->sent_us ? at->company : 0;
        if (!at)
            at = victim_of(set, denial->sent_us);
        *at = (place){
            .company = company,
            .key = { key->words[0], key->words[1] },
            .limit = target->rule->limit,
            .burst = target->rule->burst,
            .cost = target->cost,
            .algorithm = target->rule->algorithm,
            .aligned = target->rule->aligned,
            .used = true,
            .denial = *denial,
        };
    }
    let_go(one);
}

tg_denial_found
tg__denials_find(tg_denials *denials, const tg_target *target, const tg_denial_key *key, uint64_t epoch, uint64_t now_us,
                 tg_sight *sight, uint64_t *as_us)
{
    stripe *one = stripe_of(denials, key);
    place *set = denials->places[set_of(key)];
    tg_denial_found found = TG__DENIAL_ABSENT;
    uint64_t asked_cost = 0;
    if (!hold(one))
        return TG__DENIAL_MOVED;
    for (unsigned i = 0; i < WAYS && found != TG__DENIAL_HOLDS; i++) {
        place *at = &set[i];
        const tg_denial *denial = &at->denial;
        if (!is_key(at, key) || !is_rule(at, target->rule))
            continue;
        found = TG__DENIAL_MOVED;
        if (denial->epoch != epoch || now_us < denial->sent_us || now_us >= denial->until_us)
            continue;
        found = TG__DENIAL_HOLDS;
        at->old = false;
        *sight = denial->sight;
        asked_cost = at->cost;
        *as_us = denial->sight.now_us + (now_us - denial->sent_us);
    }
    let_go(one);
    if (found == TG__DENIAL_HOLDS && !tg__sight_holds(target, sight, asked_cost, *as_us))
        found = TG__DENIAL_MOVED;
    return found;
}

unsigned
tg__denials_company(tg_denials *denials, const tg_target *target, const tg_denial_key *key)
{
    stripe *one = stripe_of(denials, key);
    place *set = denials->places[set_of(key)];
    unsigned company = 0;
    if (!hold(one))
        return 0;
    for (unsigned i = 0; i < WAYS; i++)
        if (is_key(&set[i], key) && is_rule(&set[i], target->rule)) {
            company = set[i].company;
            set[i].company += company < UINT8_MAX;
        }
    let_go(one);
    return company;
}

void
tg__denials_drop(tg_denials *denials, const tg_denial_key *key, bool given)
{
    stripe *one = stripe_of(denials, key);
    place *set = denials->places[set_of(key)];
    if (given)
        atomic_fetch_add(&one->given, 1);
    if (!hold(one)) { /* never waited for: then all is forgotten by those who look */
        atomic_fetch_add(&denials->dropped_all, 1);
        return;
    }
    for (unsigned i = 0; i < WAYS; i++)
        if (is_key(&set[i], key))
            set[i].denial.until_us = 0; /* stays to say so; the next newcomer takes its place */
    let_go(one);
}
