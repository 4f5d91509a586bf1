/* Counters for the operator in the table's side: each thread adds in its own share of lines, a reader sums them.
 * Everything read here may have been written by another process, broken or dead: a name is bounded and a count is only ever
 * shown.
 * Must not enter: what is counted and when (core/metrics.c), identities. */
#include "table.h"

#include <inttypes.h>
#include <stdlib.h>

#define NAMES_MAX 1024u
#define OTHERS (TG_METRIC_SLOTS - 1) /* where names count together that find no slot of their own */

_Static_assert((int)TG_METRIC_PAUSED == (int)TG_METRIC_COUNTERS && TG_METRICS == TG_METRIC_PAUSED + 1,
               "one counter for each metric but that which a watch counts");
_Static_assert((int)TG_LATENCIES == (int)TG_LATENCY_BUCKETS, "one counter for each bound");

/* A name of this process and its slot in the mapping in force. What limiters hold is this: a replaced file may have given
 * the slot to another name. */
struct tg_metric_name {
    _Atomic uint32_t slot;
    _Atomic uint32_t watch; /* its line + 1; 0: not looked for yet */
    char space[TG_NAME_BYTES_MAX], name[TG_NAME_BYTES_MAX];
};

/* Only ever grows, by one compare-and-swap, so that a child forked at any moment finds it whole. */
struct tg_metric_names {
    tg_metric_name *_Atomic names[NAMES_MAX];
};

/* ---- slots ---- */

static bool
slot_is(const tg_metric_slot *slot, const tg_metric_name *name)
{
    return memcmp(slot->space, name->space, sizeof slot->space) == 0 &&
           memcmp(slot->name, name->name, sizeof slot->name) == 0;
}

static void
slot_name(tg_metric_slot *slot, const tg_metric_name *name)
{
    memcpy(slot->space, name->space, sizeof slot->space);
    memcpy(slot->name, name->name, sizeof slot->name);
    atomic_store_explicit(&slot->state, 2, memory_order_release);
}

/* Two processes that look for a new name at once may each give it a slot: the reader adds both up. */
static uint32_t
find_slot(tg_side *side, const tg_metric_name *name)
{
    for (uint32_t i = 0; i < OTHERS; i++) {
        tg_metric_slot *slot = &side->slots[i];
        uint32_t state = atomic_load_explicit(&slot->state, memory_order_acquire);
        if (state == 0 && atomic_compare_exchange_strong(&slot->state, &state, 1)) {
            slot_name(slot, name);
            return i;
        }
        if (state == 2 && slot_is(slot, name))
            return i;
    }
    uint32_t state = 0;
    const tg_metric_name others = { .space = "default", .name = "(others)" };
    if (atomic_compare_exchange_strong(&side->slots[OTHERS].state, &state, 1))
        slot_name(&side->slots[OTHERS], &others);
    return OTHERS;
}

static struct tg_metric_names *
names_of(tg_table *table)
{
    struct tg_metric_names *names = atomic_load_explicit(&table->metric_names, memory_order_acquire);
    if (names)
        return names;
    struct tg_metric_names *made = calloc(1, sizeof *made);
    if (made && !atomic_compare_exchange_strong(&table->metric_names, &names, made)) {
        free(made);
        return names;
    }
    return made;
}

const tg_metric_name *
tg__table_metric_name(tg_store *store, const char *space, const char *name)
{
    tg_table *const table = tg__table_of(store);
    tg_side *const side = tg__map_side(atomic_load_explicit(&table->map, memory_order_acquire));
    struct tg_metric_names *const names = side ? names_of(table) : NULL;
    tg_metric_name *made = names ? calloc(1, sizeof *made) : NULL;
    if (!made)
        return NULL;
    memcpy(made->space, space, strnlen(space, sizeof made->space));
    memcpy(made->name, name, strnlen(name, sizeof made->name));
    for (unsigned i = 0; i < NAMES_MAX; i++) {
        tg_metric_name *known = atomic_load_explicit(&names->names[i], memory_order_acquire);
        if (!known) {
            atomic_store_explicit(&made->slot, find_slot(side, made), memory_order_relaxed);
            if (atomic_compare_exchange_strong(&names->names[i], &known, made))
                return made;
        }
        if (memcmp(known->space, made->space, sizeof made->space) == 0 &&
            memcmp(known->name, made->name, sizeof made->name) == 0) {
            free(made);
            return known;
        }
    }
    free(made);
    return NULL;
}

void
tg__metrics_follow(tg_table *table, const tg_map *map)
{
    struct tg_metric_names *const names = atomic_load_explicit(&table->metric_names, memory_order_acquire);
    tg_side *const side = tg__map_side(map);
    for (unsigned i = 0; names && side && i < NAMES_MAX; i++) {
        tg_metric_name *name = atomic_load_explicit(&names->names[i], memory_order_acquire);
        if (!name)
            continue;
        atomic_store_explicit(&name->slot, find_slot(side, name), memory_order_relaxed);
        atomic_store_explicit(&name->watch, 0, memory_order_relaxed);
    }
}

void
tg__metrics_close(tg_table *table)
{
    struct tg_metric_names *const names = atomic_load_explicit(&table->metric_names, memory_order_acquire);
    for (unsigned i = 0; names && i < NAMES_MAX; i++)
        free(atomic_load_explicit(&names->names[i], memory_order_relaxed));
    free(names);
}

/* ---- counting ---- */

/* Threads have their stacks apart (8 MiB with glibc, 128 KiB with musl), sibling processes their numbers: no thread-local
 * variable, which costs a call in a library that is loaded late. */
static inline unsigned
own_shard(void)
{
    const uint64_t stack = (uint64_t)(uintptr_t)__builtin_frame_address(0);
    return (unsigned)(tg__lock_self() ^ stack >> 23 ^ stack >> 17) % TG_METRIC_SHARDS;
}

TG_EACH_REQUEST _Atomic uint64_t *
tg__table_metric_line(tg_store *store, const tg_metric_name *name)
{
    tg_side *const side = tg__map_side(atomic_load_explicit(&tg__table_of(store)->map, memory_order_acquire));
    if (__builtin_expect(!side, 0))
        return NULL; /* the file was replaced by one that has none */
    return side->lines[own_shard()][atomic_load_explicit(&name->slot, memory_order_relaxed)].counters;
}

/* The line that a slot has, or gets; TG_WATCH_LINES: all are others'. */
static uint32_t
find_watch(tg_side *side, uint32_t slot)
{
    uint32_t i = 0;
    for (; slot != OTHERS && i < TG_WATCH_LINES; i++) {
        uint32_t owner = atomic_load_explicit(&side->watch_owners[i], memory_order_relaxed);
        if (owner == slot + 1 ||
            (owner == 0 && atomic_compare_exchange_strong(&side->watch_owners[i], &owner, slot + 1)) || owner == slot + 1)
            return i;
    }
    return TG_WATCH_LINES;
}

_Atomic uint64_t *
tg__table_watch_line(tg_store *store, const tg_metric_name *name)
{
    tg_side *const side = tg__map_side(atomic_load_explicit(&tg__table_of(store)->map, memory_order_acquire));
    if (!side)
        return NULL;
    tg_metric_name *const known = (tg_metric_name *)name; /* only what is remembered of the search changes */
    uint32_t watch = atomic_load_explicit(&known->watch, memory_order_relaxed);
    if (watch == 0) {
        watch = find_watch(side, atomic_load_explicit(&name->slot, memory_order_relaxed)) + 1;
        atomic_store_explicit(&known->watch, watch, memory_order_relaxed);
    }
    return watch <= TG_WATCH_LINES ? side->watches[watch - 1].words : NULL;
}

/* Bucket i holds what took at most 128 << i nanoseconds; the last one the rest. */
void
tg__table_latency_add(tg_store *store, uint64_t latency_ns)
{
    tg_side *const side = tg__map_side(atomic_load_explicit(&tg__table_of(store)->map, memory_order_acquire));
    unsigned bucket = 0;
    while (bucket < TG_LATENCY_BUCKETS - 1 && latency_ns > UINT64_C(128) << bucket)
        bucket++;
    if (!side)
        return;
    atomic_fetch_add_explicit(&side->latency[bucket], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&side->latency_sum_ns, latency_ns, memory_order_relaxed);
}

/* ---- reading ---- */

static void
read_slot(const tg_side *side, uint32_t index, tg_policy_metrics *into)
{
    for (uint32_t shard = 0; shard < TG_METRIC_SHARDS; shard++)
        for (uint32_t i = 0; i < TG_METRIC_COUNTERS; i++)
            into->counts[i] += atomic_load_explicit(&side->lines[shard][index].counters[i], memory_order_relaxed);
    for (uint32_t i = 0; i < TG_WATCH_LINES; i++)
        if (atomic_load_explicit(&side->watch_owners[i], memory_order_relaxed) == index + 1)
            into->counts[TG_METRIC_PAUSED] +=
                atomic_load_explicit(&side->watches[i].words[TG_WATCH_LET_THROUGH], memory_order_relaxed);
}

tg_status
tg__table_metrics(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count, tg_latency_metrics *latency,
                  tg_error *error)
{
    tg_table *const table = tg__table_of(store);
    const tg_side *const side = tg__map_side(atomic_load_explicit(&table->map, memory_order_acquire));
    if (!side)
        return tg__error(error, TG_E_UNSUPPORTED, "table %s: a table under 1 MiB keeps no metrics", table->place.name);
    *count = 0;
    for (uint32_t i = 0; i < TG_METRIC_SLOTS; i++) {
        const tg_metric_slot *slot = &side->slots[i];
        if (atomic_load_explicit(&slot->state, memory_order_acquire) != 2)
            continue;
        tg_policy_metrics one = { .space = "" };
        memcpy(one.space, slot->space, sizeof slot->space);
        memcpy(one.policy, slot->name, sizeof slot->name);
        read_slot(side, i, &one);
        size_t at = 0;
        while (at < *count && at < room &&
               (strcmp(policies[at].policy, one.policy) != 0 || strcmp(policies[at].space, one.space) != 0))
            at++;
        if (at < *count && at < room) {
            for (size_t m = 0; m < TG_METRICS; m++)
                policies[at].counts[m] += one.counts[m];
            continue;
        }
        if (*count < room)
            policies[*count] = one;
        ++*count;
    }
    for (uint32_t i = 0; latency && i < TG_LATENCY_BUCKETS; i++) {
        latency->bounds_ns[i] = i == TG_LATENCY_BUCKETS - 1 ? UINT64_MAX : UINT64_C(128) << i;
        latency->counts[i] = atomic_load_explicit(&side->latency[i], memory_order_relaxed);
    }
    if (latency)
        latency->sum_ns = atomic_load_explicit(&side->latency_sum_ns, memory_order_relaxed);
    return TG_OK;
}
