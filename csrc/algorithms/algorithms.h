/* The algorithms: state, time and cost in, verdict and next state out.
 * Must not enter: clocks, locks, keys, I/O, memory allocation. Everything is 64-bit integers with 128-bit products. */
#ifndef TG_ALGORITHMS_H
#define TG_ALGORITHMS_H

#include "base/base.h"

/* What one rule says; the numbers of tg_result. When `allowed` they speak of the state after the hit, else of the state
 * as it was. */
typedef struct tg_verdict {
    bool allowed;
    uint64_t remaining;
    uint64_t retry_after_us;
    uint64_t reset_after_us;
    uint64_t delay_us;
    uint64_t stamp_us; /* fixed window: its start; counter: its window's index; log and buckets: now, clamped */
} tg_verdict;

/* What a full table needs to know of a state to choose a victim. Times on the clock given as now_us. */
typedef struct tg_pressure {
    uint64_t fresh_at_us;      /* from then on it equals a fresh one */
    uint64_t blocked_until_us; /* until then a hit of cost 1 is denied; 0: it is not */
    uint16_t share;            /* units used of what the rule holds, in 1/65535, rounded up, at most 65535 */
} tg_pressure;

/* State of the algorithms that need only numbers: 24 bytes, all zero is fresh. */
typedef struct tg_state {
    union {
        struct {
            uint64_t count, start_us;
            uint64_t running; /* 1: a window has started (a refund to 0 does not end it); 2: an aligned one, in UTC */
        } fixed;
        struct {
            uint64_t index, current, previous; /* index of the window `current` belongs to */
        } counter;
        struct {
            uint64_t level_low, level_high; /* units * period_us not yet drained */
            uint64_t at_us;
        } bucket;
    };
} tg_state;

/* A state from place to place, also in and out of shared memory: each word is read once, and none in one piece with its
 * neighbour, which the processor can only do once the smaller writings before it are through. */
static inline void
tg__state_copy(const tg_state *from, tg_state *to)
{
    const volatile uint64_t *const source = &from->bucket.level_low;
    volatile uint64_t *const target = &to->bucket.level_low;
    for (size_t i = 0; i < sizeof *from / sizeof *source; i++)
        target[i] = source[i];
}

/* Fixed window, sliding counter, token and leaky bucket, and deny (which has no state).
 *
 * now_us  the store's clock; for an aligned rule the store's clock plus its UTC offset
 * next    receives the state to store; equal to *state when denied or when cost is 0 */
void tg__decide_into(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next,
                     tg_verdict *verdict);
/* The same as a value. On the hit path the copy of it would cost as much as a division. */
static inline tg_verdict
tg__decide(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next)
{
    tg_verdict verdict;
    tg__decide_into(rule, state, now_us, cost, next, &verdict);
    return verdict;
}

/* A hit on other terms than those of its rule. */
typedef struct tg_terms {
    /* Buckets: stands in line for so long at most. It goes once what stood before it leaves it room (token bucket) or has
     * left (leaky bucket), takes its units now, and is told that wait as delay_us; too long a wait is its retry_after_us.
     * 0: it does not wait. */
    uint64_t patience_us;
    bool forced; /* taken whether it fits or not, up to TG_HELD_MAX; `deny` alone still refuses */
} tg_terms;

/* No state is brought beyond so many units by a hit that waits in line (it is denied) or is forced (it takes what is left to
 * there), so no sum of a store overflows: 56 000 times the largest limit. A log, whose sums are kept in 40 bits by Redis, holds
 * three times the largest. */
#define TG_HELD_MAX (UINT64_C(1) << 49)
#define TG_LOG_HELD_MAX (UINT64_C(1) << 35)

/* tg__decide_into on these terms. Windows know no patience. */
void tg__decide_on_terms(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_terms terms,
                         tg_state *next, tg_verdict *verdict);

/* A denied hit of `cost` <= what the rule holds, where those count too: the state becomes as full as the rule holds, never
 * fuller, and is that full from now on. A fixed window begins anew (an aligned one cannot). Who keeps knocking stays out, and
 * is in after as long as the next verdict on `next` says. */
void tg__count_denied(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, tg_state *next);

/* Gives units back. `own`: those that a hit with this stamp took, else oldest first. Returns whether *next differs. */
bool tg__refund(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost, bool own, uint64_t stamp_us,
                tg_state *next);

/* The verdict a hit of `cost` would get on *state if this request's own earlier charge of `cost` were not in it. */
tg_verdict tg__decide_charged(const tg_rule *rule, const tg_state *state, uint64_t now_us, uint64_t cost);

tg_pressure tg__pressure(const tg_rule *rule, const tg_state *state, uint64_t now_us);

/* ---- the exact sliding log: its state is a sequence that a store keeps in its own way ---- */

typedef struct tg_log_entry {
    uint64_t at_us;
    uint64_t cost; /* 0: given back, counts nothing, still holds its place */
} tg_log_entry;

/* A log as its store shows it: `next` walks from the oldest kept entry to the newest, once per view. */
typedef struct tg_log_view {
    uint64_t units;      /* costs of all kept entries, expired ones too */
    bool empty;          /* no entry is kept */
    tg_log_entry newest; /* when not empty */
    void *cursor;
    bool (*next)(void *cursor, tg_log_entry *entry); /* false at the end */
} tg_log_view;

/* What an admitted hit changes: drop `expired_entries` (worth `expired_units`) at the old end, then append `entry` or put
 * it in the newest one's place. Nothing of it is done when denied or when cost is 0. */
typedef struct tg_log_change {
    size_t expired_entries;
    uint64_t expired_units;
    bool replace_newest;
    tg_log_entry entry;
} tg_log_change;

/* charged  the newest `charged` units of this very time are this request's own and do not count (0: none) */
tg_verdict tg__log_decide(const tg_rule *rule, const tg_log_view *view, uint64_t now_us, uint64_t cost,
                          uint64_t charged, tg_log_change *change);
/* A forced hit's. */
tg_verdict tg__log_force(const tg_rule *rule, const tg_log_view *view, uint64_t now_us, uint64_t cost,
                         tg_log_change *change);
/* As tg__count_denied: appends the hit and drops the oldest entries that the rule's limit no longer needs. */
void tg__log_count_denied(const tg_rule *rule, const tg_log_view *view, uint64_t now_us, uint64_t cost,
                          tg_log_change *change);
/* As tg__pressure, of the kept entries as they are; consumes the view. */
tg_pressure tg__log_pressure(const tg_rule *rule, const tg_log_view *view, uint64_t now_us);
/* Most entries a log of this rule can hold at once, and the most 8-byte words they take where a hit of cost 1 takes one
 * word and any other two. */
uint64_t tg__log_entries_max(const tg_rule *rule);
uint64_t tg__log_words_max(const tg_rule *rule);

/* The window's start for an aligned rule: multiples of the period since 1970 UTC, whole weeks from Monday 5 January. In
 * the first four days of 1970 it lies before 1970, in two's complement. */
uint64_t tg__aligned_start_us(uint64_t period_us, uint64_t utc_us);

#endif
