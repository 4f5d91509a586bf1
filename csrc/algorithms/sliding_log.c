/* Exact sliding log: the admitted hits of the last period, each with its time. At most `limit` units in any period.
 * The sequence lives in a store and is shown through a view; what comes out is what to drop and what to append.
 * In here: arithmetic on values. Not in here: clocks, locks, keys, I/O, where entries are kept.
 *
 * An allowed hit reads only the entries it drops, so its cost is O(1) over the life of an entry. A denied one reads on
 * to the entry whose departure makes room. A damaged log (times out of order, sums that disagree) gives some answer:
 * every sum is bounded, and the walk ends where the store's `next` ends. */
#include "algorithms/parts.h"

static inline bool
expired(const tg_rule *rule, const tg_log_entry *entry, uint64_t now_us)
{
    return entry->at_us <= now_us && now_us - entry->at_us >= rule->period_us;
}

/* The wait until an entry has left the period. */
static inline uint64_t
leaves_after_us(const tg_rule *rule, const tg_log_entry *entry, uint64_t now_us)
{
    const uint64_t at_us = entry->at_us < now_us ? entry->at_us : now_us; /* never newer than the newest */
    const uint64_t age_us = now_us - at_us;
    return age_us < rule->period_us ? rule->period_us - age_us : 0;
}

/* The walk over a view, past the expired entries. */
typedef struct tg_walk {
    const tg_log_view *view;
    uint64_t now_us;
    bool more;          /* `entry` is the oldest not expired */
    tg_log_entry entry;
    size_t expired_entries;
    uint64_t expired_units;
    uint64_t used;      /* units of the entries that have not expired */
} tg_walk;

static tg_walk
walk_begin(const tg_rule *rule, const tg_log_view *view, uint64_t now_us)
{
    tg_walk walk = { .view = view, .now_us = now_us };
    if (view->empty)
        return walk;
    if (now_us < view->newest.at_us)
        walk.now_us = view->newest.at_us; /* A clock that goes back grants nothing. */
    while ((walk.more = view->next(view->cursor, &walk.entry)) && expired(rule, &walk.entry, walk.now_us)) {
        walk.expired_entries++;
        walk.expired_units = tg__add_saturating(walk.expired_units, walk.entry.cost);
    }
    if (walk.more)
        walk.used = tg__subtract_to_zero(view->units, walk.expired_units);
    return walk;
}

/* Two waits found in one pass over what is left of the walk: until `wanted` units have left (0: do not look), and until
 * all of the oldest `all` have. */
typedef struct tg_departures {
    uint64_t wanted_us, all_us;
} tg_departures;

static tg_departures
walk_departures(const tg_rule *rule, tg_walk *walk, uint64_t wanted, uint64_t all, bool look_for_all)
{
    tg_departures departures = { 0, 0 };
    uint64_t gone = 0;
    bool found = wanted == 0;
    while (walk->more && (!found || (look_for_all && gone < all))) {
        if (walk->entry.cost > 0) { /* given back whole: holds its place, counts nothing */
            const uint64_t leaves_us = leaves_after_us(rule, &walk->entry, walk->now_us);
            if (gone < all)
                departures.all_us = leaves_us;
            gone = tg__add_saturating(gone, walk->entry.cost);
            if (!found && gone >= wanted) {
                departures.wanted_us = leaves_us;
                found = true;
            }
        }
        walk->more = walk->view->next(walk->view->cursor, &walk->entry);
    }
    if (!found) /* only in a damaged log: its sum promised more than its entries hold */
        departures.wanted_us = rule->period_us;
    return departures;
}

/* Until the last unit has left. The newest entry tells, unless it was given back whole. */
static uint64_t
reset_after_us(const tg_rule *rule, tg_walk *walk)
{
    if (walk->used == 0)
        return 0;
    if (walk->view->newest.cost > 0)
        return leaves_after_us(rule, &walk->view->newest, walk->now_us);
    return walk_departures(rule, walk, 0, walk->used, true).all_us;
}

static inline __attribute__((always_inline)) tg_verdict
decide(const tg_rule *rule, const tg_log_view *view, uint64_t now_us, uint64_t cost, uint64_t charged, bool forced,
       tg_log_change *change)
{
    tg_walk walk = walk_begin(rule, view, now_us);
    now_us = walk.now_us;
    const uint64_t used = tg__subtract_to_zero(walk.used, charged);
    const uint64_t room = tg__subtract_to_zero(rule->limit, used);
    if (forced)
        cost = tg__forced_cost(used, TG_LOG_HELD_MAX, cost);
    *change = (tg_log_change){
        .expired_entries = walk.expired_entries,
        .expired_units = walk.expired_units,
        .entry = { now_us, cost },
    };
    if (forced || cost <= room) {
        if (rule->resolution_us > 0 && walk.more &&
            view->newest.at_us / rule->resolution_us == now_us / rule->resolution_us) {
            change->replace_newest = true;
            change->entry.cost = tg__add_saturating(cost, view->newest.cost);
        }
        return (tg_verdict){
            .allowed = true,
            .remaining = tg__subtract_to_zero(room, cost),
            .reset_after_us = cost > 0 && charged == 0 ? rule->period_us : reset_after_us(rule, &walk),
            .stamp_us = now_us,
        };
    }
    tg_verdict denied = { .remaining = room, .stamp_us = now_us };
    /* Without a charge of its own the newest entry tells the reset; with one, the last unit of the others does. */
    const bool newest_tells = !view->empty && charged == 0 && view->newest.cost > 0;
    const bool never = cost > rule->limit;
    const uint64_t wanted = never ? 0 : used - (rule->limit - cost);
    const tg_departures departures = walk_departures(rule, &walk, wanted, used, !newest_tells);
    denied.retry_after_us = never ? TG_NEVER : departures.wanted_us;
    denied.reset_after_us = used == 0      ? 0
                            : newest_tells ? leaves_after_us(rule, &view->newest, now_us)
                                           : departures.all_us;
    return denied;
}

tg_verdict
tg__log_decide(const tg_rule *rule, const tg_log_view *view, uint64_t now_us, uint64_t cost, uint64_t charged,
               tg_log_change *change)
{
    return decide(rule, view, now_us, cost, charged, false, change);
}

tg_verdict
tg__log_force(const tg_rule *rule, const tg_log_view *view, uint64_t now_us, uint64_t cost, tg_log_change *change)
{
    return decide(rule, view, now_us, cost, 0, true, change);
}

void
tg__log_count_denied(const tg_rule *rule, const tg_log_view *view, uint64_t now_us, uint64_t cost, tg_log_change *change)
{
    tg_walk walk = walk_begin(rule, view, now_us);
    uint64_t kept = walk.used;
    *change = (tg_log_change){ .entry = { walk.now_us, cost } };
    if (rule->resolution_us > 0 && walk.more &&
        view->newest.at_us / rule->resolution_us == walk.now_us / rule->resolution_us) {
        change->replace_newest = true;
        change->entry.cost = tg__held_denied(view->newest.cost, rule->limit, cost);
    }
    /* Only the newest `limit` units decide anything; without the others the log is bounded however long somebody knocks. */
    while (walk.more && !(change->replace_newest && kept <= view->newest.cost) &&
           kept - (walk.entry.cost < kept ? walk.entry.cost : kept) + cost >= rule->limit) {
        kept = tg__subtract_to_zero(kept, walk.entry.cost);
        walk.expired_entries++;
        walk.expired_units = tg__add_saturating(walk.expired_units, walk.entry.cost);
        walk.more = view->next(view->cursor, &walk.entry);
    }
    change->expired_entries = walk.expired_entries;
    change->expired_units = walk.expired_units;
}

tg_pressure
tg__log_pressure(const tg_rule *rule, const tg_log_view *view, uint64_t now_us)
{
    tg_walk walk = walk_begin(rule, view, now_us);
    now_us = walk.now_us;
    if (walk.used == 0)
        return (tg_pressure){ .fresh_at_us = 0 };
    const bool newest_tells = view->newest.cost > 0;
    const uint64_t wanted = walk.used < rule->limit ? 0 : walk.used - (rule->limit - 1);
    const tg_departures departures = walk_departures(rule, &walk, wanted, walk.used, !newest_tells);
    const uint64_t reset_us = newest_tells ? leaves_after_us(rule, &view->newest, now_us) : departures.all_us;
    return (tg_pressure){
        .fresh_at_us = tg__add_saturating(now_us, reset_us),
        .blocked_until_us = wanted == 0 ? 0 : tg__add_saturating(now_us, departures.wanted_us),
        .share = tg__share(walk.used, rule->limit),
    };
}

uint64_t
tg__log_entries_max(const tg_rule *rule)
{
    if (rule->resolution_us == 0)
        return rule->limit;
    /* (t - period, t] touches at most this many multiples of the resolution, one entry in each */
    const uint64_t touched = (rule->period_us + rule->resolution_us - 2) / rule->resolution_us + 1;
    return touched < rule->limit ? touched : rule->limit;
}

uint64_t
tg__log_words_max(const tg_rule *rule)
{
    const uint64_t entries = 2 * tg__log_entries_max(rule);
    return entries < rule->limit ? entries : rule->limit; /* two words hold at least two units */
}
