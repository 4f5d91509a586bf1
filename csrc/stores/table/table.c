/* The table as a store: one call decides over all its targets under the locks of their segments, writes all or none.
 * Order of a call: the clock; hash; locks, ascending; find and place; decide; write with undo; release.
 * Must not enter: arithmetic of an algorithm, how a log's words lie (log.c), how a file is found (open.c). */
#include "table.h"

#include <sodium.h>
#include <stdlib.h>
#include <unistd.h>

#define DEFAULT_TIMEOUT_US UINT64_C(50000)
#define BUCKETS_PER_POLICY 1024u
#define FULL_RETRY_US UINT64_C(1000000) /* when even the overflow buckets are full, or on_full is closed */
#define RECLAIM_ENTRIES 512u            /* entries looked at for blocks to take back, per call: some microseconds */
#define NO_INDEX UINT32_MAX
#define LEASES_FULL_EVERY_US UINT64_C(60000000)

/* What a call with one target, the most by far, goes through: compiled for it alone (table_apply), so that no loop and
 * no question about other targets is left in it. Such functions take the count as an argument of its own. */
#define ON_HIT_PATH static inline __attribute__((always_inline))

#ifdef TG_TEST_HOOKS
void (*tg__table_hook)(const char *step);
#endif

/* ---- time ---- */

/* A time moved by an offset that may be damaged. */
static inline uint64_t
shift(uint64_t time_us, int64_t by_us)
{
    if (by_us >= 0)
        return time_us > (uint64_t)(INT64_MAX - by_us) ? INT64_MAX : time_us + (uint64_t)by_us;
    const uint64_t back_us = -(uint64_t)by_us;
    return time_us > back_us ? time_us - back_us : 0;
}

/* ---- a call, target by target ---- */

typedef enum kind {
    KIND_NONE,    /* `deny`: no state */
    KIND_FOUND,   /* the entry `index` holds the state */
    KIND_MISSING, /* no state; nothing to be written */
    KIND_NEW,     /* no state; `index` is where it goes */
    KIND_OPEN,    /* no room anywhere, on_full: let through */
    KIND_CLOSED   /* no room anywhere */
} kind;

typedef struct plan {
    uint64_t key[2]; /* what is looked at most stands where an instruction reaches it with one byte */
    const tg_rule *rule;
    const tg_target *target;
    uint64_t now_us; /* on the rule's clock */
    uint32_t index;
    kind kind;
    bool bucket;  /* an overflow bucket */
    bool squeeze; /* the log has to do with the blocks it has */
    bool charges; /* set by decide(): an admitted call takes units here */
    bool orphans; /* leases of the entry whose place was taken are to be forgotten; only set where call.loosened */
    uint32_t segment;
    tg_verdict verdict;
    int64_t offset_us;
    uint64_t identity_key[2];
    tg_area area;
    uint32_t leader; /* the first target of the same state: itself, or an earlier one */
    union {
        tg_state state;
        tg_log log;
    };
    union {
        tg_state next;
        tg_log_change change;
    };
    uint64_t old_key[2]; /* of those leases */
    tg_chain loose[2]; /* blocks of expired words, and of the log whose entry was taken; only set where call.loosened */
    tg_rule coarse;    /* the rule of an overflow bucket's log */
} plan;

typedef struct call {
    tg_table *table;
    tg_map *map;
    const tg_target *targets;
    plan *plans;
    size_t count;
    uint64_t self;
    uint64_t segments; /* one bit each */
    uint64_t now_us;
    bool waited;   /* for a lock: the time that was read is no longer the time */
    bool loosened; /* some plan's `loose` is set */
} call;

static inline bool
is_log(const plan *at)
{
    return at->rule->algorithm == TG_SLIDING_LOG;
}

/* ---- keys ---- */

ON_HIT_PATH void
hash_identity(const call *now, size_t i)
{
    const tg_identity *const identity = now->targets[i].identity;
    plan *const at = &now->plans[i];
    for (size_t j = i; j-- > 0;)
        if (now->targets[j].identity == identity) {
            at->identity_key[0] = now->plans[j].identity_key[0];
            at->identity_key[1] = now->plans[j].identity_key[1];
            return;
        }
    crypto_shorthash_siphashx24((unsigned char *)at->identity_key, identity->bytes, identity->length,
                                now->map->hash_key);
}

/* The segment comes from the identity alone, so that all rules of one identity share one lock; the set also from the
 * rule. */
ON_HIT_PATH void
make_keys(call *now, size_t count)
{
    const uint32_t segment_mask = now->map->segment_count - 1;
    uint64_t segments = 0;
    for (size_t i = 0; i < count; i++) {
        const tg_target *const target = &now->targets[i];
        const tg_rule *const rule = target->rule;
        plan *const at = &now->plans[i];
        hash_identity(now, i);
        uint64_t scope[2];
        memcpy(scope, rule->scope, sizeof scope);
        at->key[0] = at->identity_key[0] ^ scope[0];
        at->key[1] = at->identity_key[1] ^ scope[1];
        at->segment = (uint32_t)(at->identity_key[0] >> 58) & segment_mask;
        at->rule = rule;
        at->target = target;
        at->leader = (uint32_t)i;
        at->bucket = at->squeeze = false;
        if (rule->algorithm != TG_DENY)
            segments |= UINT64_C(1) << at->segment;
    }
    now->segments = segments;
}

/* ---- locks ---- */

static inline void
release(const call *now, uint64_t segments)
{
    while (segments) {
        const uint32_t index = (uint32_t)__builtin_ctzll(segments);
        segments &= segments - 1;
        tg__lock_release(tg__map_area(now->map, index).segment, now->self);
    }
}

/* A lock that is not free at once. False: nothing is held any more. */
static __attribute__((noinline)) bool
take_held(call *now, uint32_t index)
{
    const tg_area area = tg__map_area(now->map, index);
    now->waited = true;
    const tg_lock_outcome outcome = tg__lock_take(area.segment, now->self, now->table->timeout_us);
    if (outcome == TG_LOCK_TIMEOUT) {
        release(now, now->segments & ((UINT64_C(1) << index) - 1));
        atomic_fetch_add_explicit(&tg__map_header(now->map)->timeouts, 1, memory_order_relaxed);
        return false;
    }
    if (outcome == TG_LOCK_INHERITED) {
        TG_STEP("lock inherited");
        tg__segment_recover(&area);
    }
    return true;
}

/* Ascending, so that two calls cannot wait for each other. False: nothing is held.
 * due  set when some lease in these segments has ended */
ON_HIT_PATH bool
take(call *now, bool *due)
{
    for (uint64_t left = now->segments; left; left &= left - 1) {
        const uint32_t index = (uint32_t)__builtin_ctzll(left);
        tg_segment *const segment = tg__map_area(now->map, index).segment;
        if (__builtin_expect(!tg__lock_try(segment, now->self), 0) && !take_held(now, index))
            return false;
        *due |= tg__leases_due(segment, now->now_us);
    }
    TG_STEP("locks taken");
    return true;
}

/* What was reserved and never settled comes back before anything is looked at. */
static __attribute__((noinline)) void
lapse(const call *now)
{
    for (uint64_t left = now->segments; left; left &= left - 1) {
        const tg_area area = tg__map_area(now->map, (uint32_t)__builtin_ctzll(left));
        if (tg__leases_due(area.segment, now->now_us))
            tg__leases_lapse(&area, now->now_us);
    }
}

/* Takes all locks of a call on the mapping in force, and the time.
 *
 * The time is read before the hash because a reading waits for all that stands before it and holds up little that comes
 * after: 6 ns of a hit. It lies within the call either way, and what another call wrote meanwhile under a later time
 * counts as now (the clock that goes back). Behind a held lock it is read again. */
ON_HIT_PATH tg_status
begin(call *now, tg_table *table, const tg_target *targets, size_t count, plan *plans, tg_error *error)
{
    now->table = table;
    now->targets = targets;
    now->plans = plans;
    now->count = count;
    now->waited = now->loosened = false;
    now->now_us = tg__table_now(table);
    now->self = tg__lock_self();
    bool due;
    for (;;) {
        due = false;
        now->map = atomic_load_explicit(&table->map, memory_order_acquire);
        make_keys(now, count);
        if (__builtin_expect(!take(now, &due), 0))
            return tg__error(error, TG_E_STORE, "table %s: a lock's holder is stopped, or did not move in time",
                             table->place.name);
        /* A mapping given up meanwhile is not written: its memory goes as soon as all its locks were free once. */
        if (__builtin_expect(atomic_load_explicit(&table->map, memory_order_relaxed) == now->map, 1))
            break;
        release(now, now->segments);
        now->waited = true;
    }
    if (__builtin_expect(now->waited | due, 0)) {
        if (now->waited)
            now->now_us = tg__table_now(table);
        lapse(now);
    }
    return TG_OK;
}

/* ---- finding ---- */

typedef struct sets {
    uint32_t first[2]; /* index of the first entry of each candidate set */
    uint32_t home;     /* where in the set a key prefers to be */
} sets;

static inline sets
sets_of(const plan *at)
{
    const uint32_t base = at->bucket ? at->area.normal : 0;
    const uint64_t count = (at->bucket ? at->area.total - at->area.normal : at->area.normal) / TG_SET_ENTRIES;
    return (sets){
        .first = { base + (uint32_t)((at->key[0] & UINT32_MAX) * count >> 32) * TG_SET_ENTRIES,
                   base + (uint32_t)((at->key[1] >> 32) * count >> 32) * TG_SET_ENTRIES },
        .home = (uint32_t)at->key[1] & (TG_SET_ENTRIES - 1),
    };
}

static inline bool
holds(const tg_entry *entry, const plan *at)
{
    /* Without a jump between the three: an entry is one cache line. */
    return ((entry->key[0] ^ at->key[0]) | (entry->key[1] ^ at->key[1])) == 0 && (entry->flags & TG_ENTRY_USED);
}

static __attribute__((noinline)) uint32_t
find_in_sets(const plan *at)
{
    const sets in = sets_of(at);
    /* Where another rule of the same identities lives in the first set, all of this one's are here. */
    if (holds(&at->area.entries[in.first[1] + in.home], at))
        return in.first[1] + in.home;
    for (unsigned s = 0; s < 2; s++)
        for (uint32_t i = 0; i < TG_SET_ENTRIES; i++)
            if (holds(&at->area.entries[in.first[s] + i], at))
                return in.first[s] + i;
    return NO_INDEX;
}

ON_HIT_PATH uint32_t
find(const plan *at)
{
    const sets in = sets_of(at);
    const uint32_t index = in.first[0] + in.home;
    return __builtin_expect(holds(&at->area.entries[index], at), 1) ? index : find_in_sets(at);
}

/* Whether a slot is another target's of this call. */
static bool
spoken_for(const call *now, uint32_t segment, uint32_t index)
{
    for (size_t i = 0; i < now->count; i++) {
        const plan *const other = &now->plans[i];
        const bool placed = other->kind == KIND_FOUND || other->kind == KIND_NEW;
        if (placed && other->segment == segment && other->index == index)
            return true;
    }
    return false;
}

/* Where a new entry goes: an unused slot of the emptier set, a fresh entry, the non-blocking one with the smallest
 * share (nearest to fresh among equals). A blocking entry is never forgotten. */
static uint32_t
find_place(const call *now, const plan *at)
{
    const sets in = sets_of(at);
    uint32_t used[2] = { 0, 0 }, unused[2] = { NO_INDEX, NO_INDEX }, fresh = NO_INDEX, victim = NO_INDEX;
    uint16_t victim_share = 0;
    uint64_t victim_fresh_us = 0;
    for (unsigned s = 0; s < 2; s++)
        for (uint32_t i = 0; i < TG_SET_ENTRIES; i++) {
            const uint32_t index = in.first[s] + ((i + in.home) & (TG_SET_ENTRIES - 1));
            const tg_entry *const entry = &at->area.entries[index];
            if (spoken_for(now, at->segment, index)) {
                used[s]++;
                continue;
            }
            if (!(entry->flags & TG_ENTRY_USED)) {
                if (unused[s] == NO_INDEX)
                    unused[s] = index;
                continue;
            }
            used[s]++;
            const uint64_t fresh_us = entry->fresh_at_us;
            const uint16_t share = entry->share;
            if (fresh_us <= now->now_us) {
                if (fresh == NO_INDEX)
                    fresh = index;
            } else if (entry->blocked_until_us <= now->now_us &&
                       (victim == NO_INDEX || share < victim_share ||
                        (share == victim_share && fresh_us < victim_fresh_us))) {
                victim = index;
                victim_share = share;
                victim_fresh_us = fresh_us;
            }
        }
    const unsigned emptier = used[1] < used[0];
    if (unused[emptier] != NO_INDEX)
        return unused[emptier];
    if (unused[!emptier] != NO_INDEX)
        return unused[!emptier];
    return fresh != NO_INDEX ? fresh : victim;
}

/* Copies a found entry's state out; a state that cannot be one is a fresh one. */
ON_HIT_PATH void
load(plan *at)
{
    if (at->kind == KIND_FOUND) {
        const tg_entry *const shared = &at->area.entries[at->index];
        tg__state_copy(&shared->value, &at->state);
        if (__builtin_expect(*(const volatile uint8_t *)&shared->algorithm == at->rule->algorithm, 1)) {
            if (is_log(at))
                tg__log_check(&at->area, &at->log);
            return;
        }
    }
    at->state = (tg_state){ .bucket = { 0, 0, 0 } };
    if (is_log(at))
        at->log = (tg_log){ .first = TG_BLOCK_NONE, .last = TG_BLOCK_NONE };
}

ON_HIT_PATH void
look_up(call *now, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        plan *const at = &now->plans[i];
        at->now_us = now->now_us;
        at->offset_us = 0;
        if (__builtin_expect(at->rule->aligned, 0)) {
            at->offset_us = tg__table_offset(now->map);
            at->now_us = shift(now->now_us, at->offset_us);
        }
        at->kind = KIND_NONE;
        if (__builtin_expect(at->rule->algorithm == TG_DENY, 0)) {
            at->state = (tg_state){ .bucket = { 0, 0, 0 } };
            continue;
        }
        at->area = tg__map_area(now->map, at->segment);
        for (size_t j = 0; j < i; j++)
            if (now->plans[j].key[0] == at->key[0] && now->plans[j].key[1] == at->key[1]) {
                at->leader = (uint32_t)j;
                break;
            }
        if (i > 0 && at->leader != i)
            continue; /* follow() */
        at->index = find(at);
        at->kind = at->index == NO_INDEX ? KIND_MISSING : KIND_FOUND;
        load(at);
    }
}

/* ---- full tables ---- */

static void
crowd(const call *now)
{
    if (!atomic_load_explicit(&now->table->crowded, memory_order_relaxed))
        atomic_store_explicit(&now->table->crowded, true, memory_order_relaxed);
}

static void
count_event(const call *now, uint64_t *counter, bool writing)
{
    crowd(now);
    if (writing)
        ++*counter;
}

/* A log in an overflow bucket is kept coarsely: at most 17 entries, so that a few blocks do for each. */
static void
coarsen(plan *at)
{
    if (!is_log(at))
        return;
    at->coarse = *at->rule;
    const uint64_t step_us = (at->rule->period_us + 15) / 16;
    if (at->coarse.resolution_us < step_us)
        at->coarse.resolution_us = step_us;
    at->rule = &at->coarse;
}

/* Turns a target to its overflow bucket: at most BUCKETS_PER_POLICY over the table, chosen by the keyed hash, so that
 * nobody can aim at another's. */
static void
to_bucket(const call *now, plan *at)
{
    uint32_t buckets = BUCKETS_PER_POLICY / now->map->segment_count;
    if (buckets > now->map->overflow / 2)
        buckets = now->map->overflow / 2;
    const uint64_t bucket = (at->identity_key[1] >> 8) % buckets;
    uint64_t scope[2];
    memcpy(scope, at->rule->scope, sizeof scope);
    at->bucket = true;
    at->key[0] = scope[0] ^ (bucket + 1) * UINT64_C(0x9e3779b97f4a7c15);
    at->key[1] = scope[1] ^ (bucket + 1) * UINT64_C(0xc2b2ae3d27d4eb4f);
    coarsen(at);
}

/* A second target of one state stands where the first stands. */
static void
follow(const call *now, size_t i)
{
    plan *const at = &now->plans[i];
    const plan *const leader = &now->plans[at->leader];
    at->kind = leader->kind;
    at->index = leader->index;
    at->key[0] = leader->key[0];
    at->key[1] = leader->key[1];
    at->state = leader->state;
    if (leader->bucket && !at->bucket) {
        at->bucket = true;
        coarsen(at);
    }
}

/* No room: the target is judged in an overflow bucket, or as its policy says. `writing` is false for a peek. */
static void
overflow(const call *now, size_t i, bool writing)
{
    plan *const at = &now->plans[i];
    tg_segment *const segment = at->area.segment;
    const uint8_t on_full = now->targets[i].on_full;
    if (on_full == TG_FULL_OPEN || on_full == TG_FULL_CLOSED || at->bucket) {
        at->kind = on_full == TG_FULL_OPEN ? KIND_OPEN : KIND_CLOSED;
        count_event(now, &segment->full, writing);
        return;
    }
    to_bucket(now, at);
    /* Another target of this call may have come to the same bucket: it is then one state, charged once. */
    for (size_t j = 0; j < i; j++)
        if (now->plans[j].bucket && now->plans[j].key[0] == at->key[0] && now->plans[j].key[1] == at->key[1]) {
            at->leader = now->plans[j].leader;
            follow(now, i);
            return;
        }
    at->kind = KIND_MISSING; /* its own former slot is free again */
    at->index = find(at);
    at->kind = KIND_FOUND;
    if (at->index == NO_INDEX) {
        at->kind = KIND_MISSING;
        at->index = find_place(now, at);
        at->kind = at->index == NO_INDEX ? KIND_CLOSED : KIND_NEW;
    }
    if (at->kind == KIND_CLOSED)
        count_event(now, &segment->full, writing);
    else
        count_event(now, &segment->overflowed, writing);
    load(at);
}

/* Blocks for a log from logs that may be forgotten: all fresh ones that a bounded search meets, else, for a
 * newcomer, the non-blocking one with the smallest share; a known key can do with the blocks it has. Nothing of this
 * call has been written yet, so this is a step of its own. */
static void
reclaim(const call *now, const plan *at)
{
    const tg_area *const area = &at->area;
    tg_segment *const segment = area->segment;
    uint32_t index = segment->reclaim_at < area->total ? segment->reclaim_at : 0;
    uint32_t victim = NO_INDEX, freed = 0;
    uint16_t victim_share = 0;
    for (uint32_t i = 0; i <= RECLAIM_ENTRIES && i <= area->total; i++) {
        const bool last = i == RECLAIM_ENTRIES || i == area->total;
        uint32_t drop = NO_INDEX;
        if (last) {
            drop = freed == 0 && at->kind == KIND_NEW && !at->bucket ? victim : NO_INDEX;
        } else {
            const tg_entry *const entry = &area->entries[index];
            if ((entry->flags & TG_ENTRY_USED) && entry->algorithm == TG_SLIDING_LOG &&
                entry->log.first != TG_BLOCK_NONE && !spoken_for(now, at->segment, index)) {
                if (entry->fresh_at_us <= now->now_us) {
                    drop = index;
                } else if (entry->blocked_until_us <= now->now_us &&
                           (victim == NO_INDEX || entry->share < victim_share)) {
                    victim = index;
                    victim_share = entry->share;
                }
            }
            index = index + 1 < area->total ? index + 1 : 0;
        }
        if (drop == NO_INDEX)
            continue;
        tg_entry entry;
        tg__entry_read(&area->entries[drop], &entry);
        tg__log_check(area, &entry.log);
        area->entries[drop].flags = 0;
        tg__in_order();
        TG_STEP("entry forgotten");
        if (entry.leases > 0)
            tg__leases_forget(area, drop, entry.key);
        tg__chain_free(area, tg__log_chain(&entry.log));
        segment->entries_used--;
        segment->evicted++;
        freed++;
    }
    segment->reclaim_at = index;
}

/* ---- deciding ---- */

static void
judge(const plan *at, const tg_target *target, uint64_t cost, tg_state *next, tg_log_change *change,
      tg_verdict *verdict)
{
    const tg_terms terms = { .patience_us = target->patience_us, .forced = target->forced && !target->charged };
    if (is_log(at)) {
        tg_log_cursor cursor;
        const tg_log_view view = tg__log_view(&at->area, &at->log, at->now_us, &cursor);
        *verdict = terms.forced ? tg__log_force(at->rule, &view, at->now_us, cost, change)
                                : tg__log_decide(at->rule, &view, at->now_us, cost, target->charged ? cost : 0, change);
    } else if (target->charged) {
        *next = at->state;
        *verdict = tg__decide_charged(at->rule, &at->state, at->now_us, cost);
    } else if (terms.forced || terms.patience_us > 0) {
        tg__decide_on_terms(at->rule, &at->state, at->now_us, cost, terms, next, verdict);
    } else {
        tg__decide_into(at->rule, &at->state, at->now_us, cost, next, verdict);
    }
}

/* remaining and reset of the state as it is, into `verdict`. */
static void
tell_untouched(const plan *at, const tg_state *state, const tg_log *log, tg_verdict *verdict)
{
    tg_verdict untouched;
    if (at->kind == KIND_OPEN || at->kind == KIND_CLOSED)
        return;
    if (is_log(at)) {
        tg_log_cursor cursor;
        tg_log_change change;
        const tg_log_view view = tg__log_view(&at->area, log, at->now_us, &cursor);
        untouched = tg__log_decide(at->rule, &view, at->now_us, 0, 0, &change);
    } else {
        tg_state next;
        untouched = tg__decide(at->rule, state, at->now_us, 0, &next);
    }
    verdict->remaining = untouched.remaining;
    verdict->reset_after_us = untouched.reset_after_us;
}

static inline uint64_t
capacity_of(const tg_rule *rule)
{
    return rule->algorithm == TG_TOKEN_BUCKET || rule->algorithm == TG_LEAKY_BUCKET ? rule->burst : rule->limit;
}

/* Whether a log that a hit is to grow holds so much that counts nothing that it is worth a pass over it. The slack over
 * what its rule needs pays for that pass. */
static inline bool
log_is_long(const plan *at)
{
    const uint64_t slack = 2 * TG_BLOCK_WORDS;
    uint64_t words = at->log.words;
    words -= at->change.expired_entries < words ? at->change.expired_entries : words;
    if (words + 2 <= slack)
        return false;
    const uint64_t most = tg__log_words_max(at->rule);
    return words + 2 > most + most / 8 + slack;
}

/* Whether every log of this call that grows in this segment finds a block; `at` has just been decided. A sixteenth
 * of the arena is for the overflow buckets alone, as of the entries. */
static bool
has_block(const call *now, const plan *at)
{
    uint32_t wanted = at->bucket ? 1 : 1 + at->area.block_count / 16;
    for (const plan *other = now->plans; other < at; other++)
        if (other->segment == at->segment && other->leader == (uint32_t)(other - now->plans) &&
            other->rule->algorithm == TG_SLIDING_LOG && (other->kind == KIND_FOUND || other->kind == KIND_NEW) &&
            other->verdict.allowed)
            wanted++; /* perhaps it needs none: then this is one too many */
    return tg__blocks_left(&at->area) >= wanted;
}

/* All that can come: new keys, full tables, logs, charges already paid. */
static __attribute__((noinline)) void
decide_any(call *now, size_t i, bool writing)
{
    plan *const at = &now->plans[i];
    const tg_target *const target = at->target;
    const uint64_t cost = target->cost;
    const bool takes = cost > 0 && !target->charged && at->rule->algorithm != TG_DENY;
    if (at->leader != i) {
        follow(now, i);
    } else if (takes && at->kind == KIND_MISSING) {
        at->index = find_place(now, at);
        if (at->index == NO_INDEX)
            overflow(now, i, writing);
        else
            at->kind = KIND_NEW;
    }
    bool compacted = false, reclaimed = false;
again:
    if (at->kind >= KIND_OPEN) {
        at->verdict = (tg_verdict){ .allowed = at->kind == KIND_OPEN };
        if (at->kind == KIND_OPEN)
            at->verdict.remaining = capacity_of(at->rule);
        else
            at->verdict.retry_after_us = FULL_RETRY_US;
        at->charges = false;
        return;
    }
    judge(at, target, cost, &at->next, &at->change, &at->verdict);
    at->charges = takes && at->leader == i && (at->kind == KIND_FOUND || at->kind == KIND_NEW);
    if (!is_log(at) || !writing || !takes || !at->verdict.allowed || at->leader != i)
        return;
    /* An admitted log hit needs its words to have room before anything is promised. */
    /* A forced one may go beyond what its rule needs: the next that is not will see to that. */
    if (at->kind == KIND_FOUND && !compacted && !target->forced && log_is_long(at)) {
        compacted = true;
        tg__log_compact(&at->area, at->index);
        load(at);
        goto again;
    }
    if (tg__log_grows(&at->log, &at->change) && !has_block(now, at)) {
        if (!reclaimed) {
            reclaimed = true;
            crowd(now);
            reclaim(now, at);
        }
        if (!has_block(now, at)) {
            /* A known key goes on in its own log, less finely: in a bucket it would be given its limit once more. */
            at->squeeze = at->kind == KIND_FOUND && tg__log_squeezes(&at->log);
            if (at->squeeze)
                return;
            overflow(now, i, writing);
            goto again;
        }
    }
}

ON_HIT_PATH void
decide(call *now, size_t i, bool writing)
{
    plan *const at = &now->plans[i];
    const tg_target *const target = at->target;
    /* By far the most: a known key whose state is numbers. */
    if (__builtin_expect(at->kind == KIND_FOUND && (i == 0 || at->leader == i) && !is_log(at) && !target->charged &&
                             !target->forced && target->patience_us == 0,
                         1)) {
        tg__decide_into(at->rule, &at->state, at->now_us, target->cost, &at->next, &at->verdict);
        at->charges = target->cost > 0;
        return;
    }
    decide_any(now, i, writing);
}

/* ---- writing ---- */

static inline uint16_t
share_of(const tg_rule *rule, uint64_t remaining)
{
    const uint64_t most = capacity_of(rule);
    if (__builtin_expect(remaining == 0 || most == 0, 0))
        return UINT16_MAX;
    return __builtin_expect(remaining >= most, 0) ? 0 : (uint16_t)(((most - remaining) * UINT16_MAX + most - 1) / most);
}

/* What a full table will need to know of the state, from the verdict where that tells it: dividing again would cost
 * as much as the decision. `next` is not looked at for a log. */
static inline tg_pressure
pressure_after_hit(const tg_rule *rule, const tg_verdict *verdict, const tg_state *next)
{
    tg_pressure found;
    switch (rule->algorithm) {
    case TG_FIXED_WINDOW:
        found.fresh_at_us = next->fixed.start_us + rule->period_us;
        break;
    case TG_SLIDING_COUNTER:
        found.fresh_at_us = (next->counter.index + 2) * rule->period_us;
        break;
    default:
        found.fresh_at_us = verdict->stamp_us + verdict->reset_after_us;
        break;
    }
    found.share = share_of(rule, verdict->remaining);
    found.blocked_until_us = 0;
    return found;
}

/* Field by field into shared memory: put together first and then copied, an entry costs twice, and the processor waits
 * for the small stores before it can read them back in one piece. The undo record makes the order free. */
ON_HIT_PATH void
store_entry(const plan *at, const tg_pressure *pressure, const tg_state *state)
{
    tg_entry *const shared = &at->area.entries[at->index];
    uint64_t fresh_at_us = pressure->fresh_at_us, blocked_until_us = pressure->blocked_until_us;
    if (__builtin_expect(at->offset_us != 0, 0)) {
        fresh_at_us = shift(fresh_at_us, -at->offset_us);
        blocked_until_us = blocked_until_us ? shift(blocked_until_us, -at->offset_us) : 0;
    }
    shared->key[0] = at->key[0];
    shared->key[1] = at->key[1];
    shared->fresh_at_us = fresh_at_us;
    shared->blocked_until_us = blocked_until_us;
    shared->share = pressure->share;
    shared->algorithm = at->rule->algorithm;
    shared->flags = (uint8_t)(TG_ENTRY_USED | (at->bucket ? TG_ENTRY_OVERFLOW : 0));
    TG_STEP("half an entry written"); /* what a death inside this store leaves */
    tg__state_copy(state, &shared->value);
    tg__in_order();
    TG_STEP("entry written");
}

/* The slot of a new entry; what was in it is forgotten. */
static void
occupy(const call *now, plan *at)
{
    tg_entry old;
    tg__entry_read(&at->area.entries[at->index], &old);
    at->area.entries[at->index].leases = 0;
    at->orphans = (old.flags & TG_ENTRY_USED) && old.leases > 0;
    if (!(old.flags & TG_ENTRY_USED)) {
        at->area.segment->entries_used++;
        return;
    }
    at->area.segment->evicted++;
    crowd(now);
    at->old_key[0] = old.key[0];
    at->old_key[1] = old.key[1];
    if (old.algorithm == TG_SLIDING_LOG) {
        tg__log_check(&at->area, &old.log);
        at->loose[1] = tg__log_chain(&old.log);
    }
}

static __attribute__((noinline)) void
write_log(plan *at)
{
    /* Room was sure; only a damaged arena can say no, and then the hit is let through uncounted. */
    if (!tg__log_apply(&at->area, &at->log, &at->change, at->squeeze, &at->loose[0])) {
        at->loose[0].count = at->loose[1].count = 0;
        return;
    }
    tg_pressure pressure = pressure_after_hit(at->rule, &at->verdict, &at->next);
    if (at->verdict.remaining == 0) {
        tg_log_cursor cursor;
        const tg_log_view view = tg__log_view(&at->area, &at->log, at->now_us, &cursor);
        pressure.blocked_until_us = tg__log_pressure(at->rule, &view, at->now_us).blocked_until_us;
    }
    store_entry(at, &pressure, &at->state); /* the log is the state's other name */
}

ON_HIT_PATH void
write_target(call *now, size_t count, plan *at)
{
    tg__undo_save_entry(&at->area, at->index);
    if (__builtin_expect(at->kind == KIND_NEW || is_log(at), 0)) {
        now->loosened = true;
        at->orphans = false;
        at->loose[0].count = at->loose[1].count = 0;
        if (at->kind == KIND_NEW)
            occupy(now, at);
        if (is_log(at)) {
            write_log(at);
            return;
        }
    }
    tg_pressure pressure = pressure_after_hit(at->rule, &at->verdict, &at->next);
    if (__builtin_expect(at->verdict.remaining == 0, 0))
        pressure.blocked_until_us = tg__pressure(at->rule, &at->next, at->now_us).blocked_until_us;
    store_entry(at, &pressure, &at->next);
    if (count > 1)
        at->state = at->next; /* what a second target of this state is told */
}

ON_HIT_PATH void
settle(const call *now, size_t count)
{
    if (count == 1) {
        tg__undo_settle(&now->plans[0].area);
        TG_STEP("settled");
        return;
    }
    for (uint64_t left = now->segments; left; left &= left - 1) {
        const tg_area area = tg__map_area(now->map, (uint32_t)__builtin_ctzll(left));
        tg__undo_settle(&area);
        TG_STEP("settled");
    }
}

/* ---- the operations ---- */

ON_HIT_PATH void
report(const tg_verdict *verdict, bool charged, bool bucket, tg_result *result)
{
    result->allowed = verdict->allowed;
    result->charged = charged;
    result->overflow = bucket;
    result->remaining = verdict->remaining;
    result->retry_after_us = verdict->retry_after_us;
    result->reset_after_us = verdict->reset_after_us;
    result->delay_us = verdict->delay_us;
    result->stamp_us = verdict->stamp_us;
}

static __attribute__((noinline)) void
free_loose(const call *now)
{
    for (size_t i = 0; i < now->count; i++) {
        const plan *const at = &now->plans[i];
        if (!at->charges || (at->kind != KIND_NEW && !is_log(at)))
            continue; /* its `loose` was not set */
        for (unsigned j = 0; j < 2; j++)
            if (at->loose[j].count > 0)
                tg__chain_free(&at->area, at->loose[j]);
        if (at->orphans)
            tg__leases_forget(&at->area, at->index, at->old_key);
    }
}

/* Whether all that this call takes can be leased. What a log is to grow by was made sure of before. */
static bool
leases_fit(const call *now, bool again)
{
    for (uint64_t left = now->segments; left; left &= left - 1) {
        const uint32_t segment = (uint32_t)__builtin_ctzll(left);
        const plan *one = NULL;
        uint32_t leases = 0, logs = 0;
        for (size_t i = 0; i < now->count; i++) {
            const plan *const at = &now->plans[i];
            if (!at->charges || at->segment != segment)
                continue;
            one = at;
            leases++;
            logs += is_log(at);
        }
        if (!one || tg__lease_room(&one->area, leases, logs))
            continue;
        if (!again)
            return false;
        reclaim(now, one);
        return leases_fit(now, false);
    }
    return true;
}

/* Whether a target counts although the call is denied: one of its group refuses. */
static bool
counts_denied(const call *now, size_t i)
{
    const tg_target *const target = &now->targets[i];
    const plan *const at = &now->plans[i];
    bool refused = false;
    if (target->counts_denied == 0 || !at->charges || at->leader != i)
        return false;
    for (size_t j = 0; j < now->count; j++)
        refused |= now->targets[j].counts_denied == target->counts_denied && !now->plans[j].verdict.allowed;
    return refused && target->cost <= capacity_of(at->rule);
}

/* Fills `next` or `change` of a target that denied. false: a log without a place for it. */
static bool
plan_denied(call *now, plan *at)
{
    const uint64_t cost = at->target->cost;
    if (!is_log(at)) {
        tg__count_denied(at->rule, &at->state, at->now_us, cost, &at->next);
        return true;
    }
    tg_log_cursor cursor;
    const tg_log_view view = tg__log_view(&at->area, &at->log, at->now_us, &cursor);
    tg__log_count_denied(at->rule, &view, at->now_us, cost, &at->change);
    if (tg__log_grows(&at->log, &at->change) && !has_block(now, at)) {
        at->squeeze = tg__log_squeezes(&at->log);
        return at->squeeze;
    }
    return true;
}

static void
take_leases(const call *now, tg_lease *lease)
{
    tg_lease_terms terms;
    memcpy(&terms.id, lease->id, sizeof terms.id);
    terms.until_us = lease->until_us;
    for (size_t i = 0; i < now->count; i++) {
        const plan *const at = &now->plans[i];
        lease->places[i] = TG_BLOCK_NONE;
        if (!at->charges)
            continue;
        terms.stamp_us = at->verdict.stamp_us;
        terms.cost = at->target->cost;
        lease->places[i] = tg__lease_add(&at->area, at->index, at->rule, &terms);
    }
}

/* What is told of a target that counted a denied hit: whether and when the same would pass the state that this one has
 * brought about. */
static void
tell_denied(plan *at)
{
    if (is_log(at)) {
        tg_log_cursor cursor;
        tg_log_change unwritten;
        const tg_log_view view = tg__log_view(&at->area, &at->log, at->now_us, &cursor);
        at->verdict = tg__log_decide(at->rule, &view, at->now_us, at->target->cost, 0, &unwritten);
    } else {
        tg_state unwritten;
        at->verdict = tg__decide(at->rule, &at->state, at->now_us, at->target->cost, &unwritten);
    }
}

/* Denied, and counted all the same. Rare enough to look at everything twice. */
static __attribute__((noinline, cold)) void
hit_denied(call *now, size_t count)
{
    bool counting[TG_TARGETS_MAX], any = false;
    for (size_t i = 0; i < count; i++) {
        plan *const at = &now->plans[i];
        counting[i] = counts_denied(now, i) && (at->verdict.allowed || plan_denied(now, at));
        any |= counting[i];
    }
    if (!any)
        return;
    for (size_t i = 0; i < count; i++) {
        plan *const at = &now->plans[i];
        if (!counting[i]) {
            at->charges = false; /* nothing of it is written, or to be freed */
            continue;
        }
        if (at->verdict.allowed) {
            write_target(now, TG_TARGETS_MAX, at);
            tell_denied(at);
            continue;
        }
        at->verdict = (tg_verdict){ .stamp_us = is_log(at) ? at->change.entry.at_us : at->now_us,
                                    .reset_after_us = at->rule->period_us };
        tg__undo_save_entry(&at->area, at->index);
        if (is_log(at)) {
            now->loosened = true;
            at->orphans = false;
            at->loose[0].count = at->loose[1].count = 0;
            write_log(at);
        } else {
            const tg_pressure pressure = tg__pressure(at->rule, &at->next, at->now_us);
            store_entry(at, &pressure, &at->next);
            at->state = at->next;
        }
        tell_denied(at);
    }
    settle(now, count);
    if (now->loosened)
        free_loose(now);
}

/* lease  NULL, or what all that is taken is held under; it refuses where there is no room for it */
ON_HIT_PATH void
hit(call *now, size_t count, bool writing, tg_lease *lease, tg_result *results, bool *overflowed)
{
    bool allowed = true, charges = false, bucket = false;
    for (size_t i = 0; i < count; i++) {
        const plan *const at = &now->plans[i];
        decide(now, i, writing);
        allowed &= at->verdict.allowed;
        charges |= at->charges;
        bucket |= at->bucket;
    }
    const bool takes = allowed && writing;
    if (lease) {
        lease->full = takes && charges && !leases_fit(now, true);
        if (lease->full)
            return;
        if (!takes || !charges)
            memset(lease->id, 0, sizeof lease->id);
    }
    if (__builtin_expect(takes && charges, 1)) {
        for (size_t i = 0; i < count; i++)
            if (now->plans[i].charges)
                write_target(now, count, &now->plans[i]);
        if (lease)
            take_leases(now, lease);
        settle(now, count);
        if (__builtin_expect(now->loosened, 0))
            free_loose(now);
    }
    if (!allowed && writing) {
        uint8_t counting = 0;
        for (size_t i = 0; i < count; i++)
            counting |= now->targets[i].counts_denied;
        if (__builtin_expect(counting, 0))
            hit_denied(now, count);
    }
    for (size_t i = 0; i < count; i++) {
        plan *const at = &now->plans[i];
        if (__builtin_expect(i > 0 && at->leader != i, 0)) {
            const plan *const leader = &now->plans[at->leader];
            tell_untouched(at, &leader->state, &leader->log, &at->verdict); /* after the leader's charge, if any */
        } else if (!(takes && at->charges) && at->verdict.allowed && at->target->cost > 0) {
            tell_untouched(at, &at->state, &at->log, &at->verdict);
        }
        report(&at->verdict, takes && at->charges, at->bucket, &results[i]);
    }
    *overflowed = bucket;
}

/* A decision knows where it was charged. Else: a key that has no entry of its own was perhaps charged in its bucket. */
static bool
find_charged(call *now, plan *at)
{
    if (at->target->own ? at->target->overflow : at->kind == KIND_MISSING) {
        to_bucket(now, at);
        at->index = find(at);
        if (at->index == NO_INDEX)
            return false;
        at->kind = KIND_FOUND;
        load(at);
    }
    return at->kind == KIND_FOUND;
}

/* Each target is a step of its own, and a refund of many logged hits several: a death in between leaves a part given
 * back, never more than was asked. */
static void
refund(call *now)
{
    for (size_t i = 0; i < now->count; i++) {
        plan *const at = &now->plans[i];
        const tg_target *const target = &now->targets[i];
        if (at->leader != i || at->rule->algorithm == TG_DENY || !find_charged(now, at))
            continue;
        uint64_t left = target->cost;
        bool changed, more = false;
        do {
            tg_pressure pressure;
            tg__undo_save_entry(&at->area, at->index);
            if (is_log(at)) {
                left = tg__log_refund(&at->area, at->rule, &at->log, at->now_us, left, target->own, target->stamp_us,
                                      &changed, &more);
                if (changed) {
                    tg_log_cursor cursor;
                    const tg_log_view view = tg__log_view(&at->area, &at->log, at->now_us, &cursor);
                    pressure = tg__log_pressure(at->rule, &view, at->now_us);
                    store_entry(at, &pressure, &at->state);
                }
            } else {
                changed = tg__refund(at->rule, &at->state, at->now_us, left, target->own, target->stamp_us, &at->next);
                if (changed) {
                    pressure = tg__pressure(at->rule, &at->next, at->now_us);
                    store_entry(at, &pressure, &at->next);
                }
            }
            tg__undo_settle(&at->area);
            TG_STEP("settled");
        } while (more && changed && left > 0);
    }
}

static void
reset(call *now)
{
    for (size_t i = 0; i < now->count; i++) {
        plan *const at = &now->plans[i];
        if (at->leader != i || at->kind != KIND_FOUND)
            continue;
        const bool log = at->area.entries[at->index].algorithm == TG_SLIDING_LOG;
        const bool leases = at->area.entries[at->index].leases > 0;
        at->area.entries[at->index].flags = 0; /* one byte: done or not done */
        tg__in_order();
        TG_STEP("entry forgotten");
        if (leases)
            tg__leases_forget(&at->area, at->index, at->key);
        at->area.segment->entries_used--;
        if (log && is_log(at))
            tg__chain_free(&at->area, tg__log_chain(&at->log));
    }
}

/* ---- the store ---- */

ON_HIT_PATH tg_status
apply(tg_store *store, tg_op op, const tg_target *targets, size_t target_count, plan *plans, tg_result *results,
      bool *overflowed, tg_error *error)
{
    tg_table *const table = tg__table_of(store);
    call now;
    bool in_bucket = false;
    const tg_status status = begin(&now, table, targets, target_count, plans, error);
    if (__builtin_expect(status == TG_OK, 1)) {
        look_up(&now, target_count);
        if (op == TG_OP_HIT || op == TG_OP_PEEK)
            hit(&now, target_count, op == TG_OP_HIT, NULL, results, &in_bucket);
        else if (op == TG_OP_REFUND)
            refund(&now);
        else
            reset(&now);
        release(&now, now.segments);
        if (overflowed)
            *overflowed = in_bucket;
    }
    const bool is_read = __builtin_expect(!table->clock && status == TG_OK, 1);
    const uint64_t real_us = is_read ? now.now_us : tg__boot_now_us();
    if (__builtin_expect(real_us >= atomic_load_explicit(&table->check_at_us, memory_order_relaxed), 0))
        tg__table_check(table, real_us);
    return status;
}

static __attribute__((noinline)) tg_status
apply_any(tg_store *store, tg_op op, const tg_target *targets, size_t target_count, tg_result *results,
          bool *overflowed, tg_error *error)
{
    plan plans[TG_TARGETS_MAX]; /* unset: each field is written before it is read */
    if (target_count == 0 || target_count > TG_TARGETS_MAX)
        return tg__error(error, TG_E_ARG, "1 to %d targets, not %zu", TG_TARGETS_MAX, target_count);
    return apply(store, op, targets, target_count, plans, results, overflowed, error);
}

TG_EACH_REQUEST static tg_status
table_apply(tg_store *store, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
            tg_result *results, bool *overflowed, tg_error *error)
{
    (void)until_us; /* it waits for a lock only, see lock.h */
    plan only;
    if (target_count == 1 && op == TG_OP_HIT)
        return apply(store, TG_OP_HIT, targets, 1, &only, results, overflowed, error);
    return apply_any(store, op, targets, target_count, results, overflowed, error);
}

/* ---- leases ---- */

/* Ends those that are there, then takes what was too little: all or none of that, and always all. */
static void
settle_lease(call *now, const tg_lease *lease)
{
    uint64_t id;
    memcpy(&id, lease->id, sizeof id);
    const bool lapsed = now->now_us >= lease->until_us;
    tg_target targets[TG_TARGETS_MAX];
    size_t count = 0;
    for (size_t i = 0; i < now->count; i++) {
        const plan *const at = &now->plans[i];
        if (at->rule->algorithm == TG_DENY)
            continue;
        const tg_area area = tg__map_area(now->map, at->segment);
        const uint64_t taken = at->target->cost;
        const bool found = tg__lease_find(&area, lease->places[i], id) != TG_BLOCK_NONE;
        if (found)
            tg__lease_end(&area, lease->places[i], taken > lease->actual ? taken - lease->actual : 0, now->now_us);
        const uint64_t already = found || !lapsed ? taken : 0;
        if (lease->actual <= already)
            continue;
        targets[count] = *at->target;
        targets[count].cost = lease->actual - already;
        targets[count].own = false;
        targets[count++].forced = true;
    }
    if (count == 0)
        return;
    plan plans[TG_TARGETS_MAX];
    tg_result results[TG_TARGETS_MAX];
    bool overflowed;
    call more = *now;
    more.targets = targets;
    more.plans = plans;
    more.count = count;
    make_keys(&more, count);
    more.segments = now->segments; /* their locks are held already */
    look_up(&more, count);
    hit(&more, count, true, NULL, results, &overflowed);
}

static void
renew_lease(const call *now, tg_lease *lease)
{
    uint64_t id;
    memcpy(&id, lease->id, sizeof id);
    lease->until_us = now->now_us + lease->lease_us;
    lease->over = true;
    for (size_t i = 0; i < now->count; i++) {
        const tg_area area = tg__map_area(now->map, now->plans[i].segment);
        if (tg__lease_find(&area, lease->places[i], id) == TG_BLOCK_NONE)
            continue;
        tg__lease_renew(&area, lease->places[i], lease->until_us);
        lease->over = false;
    }
}

static void
tell_leases_full(tg_table *table)
{
    const uint64_t now_us = tg__boot_now_us();
    uint64_t told_us = atomic_load_explicit(&table->told_leases_us, memory_order_relaxed);
    if ((told_us == 0 || now_us - told_us >= LEASES_FULL_EVERY_US) &&
        atomic_compare_exchange_strong_explicit(&table->told_leases_us, &told_us, now_us, memory_order_relaxed,
                                                memory_order_relaxed))
        tg__notice("leases-full", "table %s has no room for another reservation beside those of the same clients; "
                                  "on_store_failure decides until some are settled or end",
                   table->place.name);
}

static tg_status
table_lease(tg_store *store, tg_lease_op op, const tg_target *targets, size_t target_count, tg_lease *lease,
            tg_result *results, bool *overflowed, tg_error *error)
{
    tg_table *const table = tg__table_of(store);
    plan plans[TG_TARGETS_MAX];
    call now;
    bool in_bucket = false;
    if (target_count == 0 || target_count > TG_TARGETS_MAX)
        return tg__error(error, TG_E_ARG, "1 to %d targets, not %zu", TG_TARGETS_MAX, target_count);
    if (op == TG_LEASE_TAKE)
        randombytes_buf(lease->id, sizeof lease->id);
    lease->full = lease->over = false;
    tg_status status = begin(&now, table, targets, target_count, plans, error);
    if (status == TG_OK) {
        switch (op) {
        case TG_LEASE_TAKE:
            lease->until_us = now.now_us + lease->lease_us;
            look_up(&now, target_count);
            hit(&now, target_count, true, lease, results, &in_bucket);
            break;
        case TG_LEASE_SETTLE:
            settle_lease(&now, lease);
            break;
        case TG_LEASE_RENEW:
            renew_lease(&now, lease);
            break;
        }
        release(&now, now.segments);
        if (overflowed)
            *overflowed = in_bucket;
    }
    if (lease->full) {
        memset(lease->id, 0, sizeof lease->id);
        tell_leases_full(table);
        status = tg__error(error, TG_E_STORE, "table %s: no room for another reservation", table->place.name);
    }
    const uint64_t real_us = tg__boot_now_us();
    if (real_us >= atomic_load_explicit(&table->check_at_us, memory_order_relaxed))
        tg__table_check(table, real_us);
    return status;
}

static uint64_t
table_now_us(tg_store *store)
{
    return tg__table_now(tg__table_of(store));
}

static int64_t
table_utc_offset_us(tg_store *store)
{
    tg_table *const table = tg__table_of(store);
    for (;;) {
        const tg_map *const map = atomic_load_explicit(&table->map, memory_order_acquire);
        const int64_t offset_us = tg__table_offset(map);
        if (atomic_load_explicit(&table->map, memory_order_acquire) == map)
            return offset_us; /* else perhaps read from zero pages: unmap_old */
    }
}

static void
table_close(tg_store *store)
{
    tg_table *const table = tg__table_of(store);
    tg_map *map = atomic_load_explicit(&table->map, memory_order_acquire);
    while (map) {
        tg_map *const older = map->older;
        tg__map_close(map);
        map = older;
    }
    tg__place_close(&table->place);
    tg__metrics_close(table);
    free(table);
}

static const tg_store_ops table_ops = {
    .name = "table",
    .apply = table_apply,
    .lease = table_lease,
    .admit_rule = tg__table_admit_rule,
    .now_us = table_now_us,
    .utc_offset_us = table_utc_offset_us,
    .stats = tg__table_stats,
    .close = table_close,
    .metric_name = tg__table_metric_name,
    .metric_line = tg__table_metric_line,
    .latency_add = tg__table_latency_add,
    .watch_line = tg__table_watch_line,
    .metrics = tg__table_metrics,
    .override_set = tg__table_override_set,
    .override_list = tg__table_override_list,
};

tg_status
tg__table_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **store, tg_error *error)
{
    tg_status status = tg__digest_init(error);
    if (status != TG_OK)
        return status;
    tg_place place;
    tg_map *map = NULL;
    status = tg__place_parse(uri, options->clock != NULL, &place, error);
    if (status != TG_OK)
        return status;
    place.existing = options->existing;
    status = tg__map_open(&place, &map, error);
    tg_table *table = status == TG_OK ? calloc(1, sizeof *table) : NULL;
    if (!table) {
        if (status == TG_OK)
            status = tg__error(error, TG_E_NOMEM, "table: %zu bytes", sizeof *table);
        tg__map_close(map);
        tg__place_close(&place);
        return status;
    }
    table->base.ops = &table_ops;
    table->base.counts_denied = true;
    table->place = place;
    table->clock = options->clock;
    table->timeout_us = options->timeout_us ? options->timeout_us : DEFAULT_TIMEOUT_US;
    atomic_init(&table->map, map);
    atomic_init(&table->check_at_us, tg__boot_now_us() + TG_CHECK_EVERY_US);
    tg__table_follow_utc(map);
    tg__overrides_follow(table, map);
    table->opened_by = (long)getpid();
    *store = &table->base;
    return TG_OK;
}
