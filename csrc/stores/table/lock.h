/* The lock of a segment: one 64-bit word in shared memory that names its holder. docs/locks.md tells why it is ours.
 * Must not enter: what the lock guards. */
#ifndef TG_TABLE_LOCK_H
#define TG_TABLE_LOCK_H

#include "layout.h"

/* The word, 0 when free. All of it is set by one compare-and-swap, so the holder is known from the first instant.
 *   bits  0..21  process id, in its own pid namespace
 *   bits 22..30  its start time in clock ticks, low 9 bits
 *   bit  31      somebody waits
 *   bits 32..42  the start time's next 11 bits
 *   bits 43..63  hash of the pid namespace, 0: not known
 * The futex is its low half. */
#define TG_LOCK_WAITERS (UINT64_C(1) << 31)

typedef enum tg_lock_outcome {
    TG_LOCK_TAKEN,
    TG_LOCK_INHERITED, /* taken from a dead holder: what it left half done must be undone first */
    TG_LOCK_TIMEOUT
} tg_lock_outcome;

/* This process as a holder's word; right in a forked child too. */
static inline uint64_t tg__lock_self(void);
/* CLOCK_BOOTTIME. */
uint64_t tg__boot_now_us(void);

/* Waits for the lock when the first attempt failed. A holder that can run is waited for, up to 2 s; one that is
 * stopped, for timeout_us; one whose state cannot be seen, until it has not moved for 1 s. Then it is
 * TG_LOCK_TIMEOUT, and for the others at once until the lock is free. */
tg_lock_outcome tg__lock_wait(tg_segment *segment, uint64_t self, uint64_t timeout_us);
void tg__lock_wake(tg_segment *segment);

/* Where lock.c keeps this process's word once it is known; wiped in a forked child. */
extern _Atomic(_Atomic uint64_t *) tg__lock_self_word __attribute__((visibility("hidden")));
uint64_t tg__lock_self_find(void);

static inline uint64_t
tg__lock_self(void)
{
    const _Atomic uint64_t *const word = atomic_load_explicit(&tg__lock_self_word, memory_order_acquire);
    const uint64_t self = __builtin_expect(word != NULL, 1) ? atomic_load_explicit(word, memory_order_relaxed) : 0;
    return __builtin_expect(self != 0, 1) ? self : tg__lock_self_find();
}

static inline void
tg__lock_count_holder(tg_segment *segment)
{
    const uint64_t generation = atomic_load_explicit(&segment->generation, memory_order_relaxed);
    atomic_store_explicit(&segment->generation, generation + 1, memory_order_relaxed);
}

/* Takes the lock if it is free. */
static inline bool
tg__lock_try(tg_segment *segment, uint64_t self)
{
    uint64_t expected = 0;
    if (!atomic_compare_exchange_strong_explicit(&segment->lock, &expected, self, memory_order_acquire,
                                                 memory_order_relaxed))
        return false;
    tg__lock_count_holder(segment);
    return true;
}

static inline tg_lock_outcome
tg__lock_take(tg_segment *segment, uint64_t self, uint64_t timeout_us)
{
    if (__builtin_expect(tg__lock_try(segment, self), 1))
        return TG_LOCK_TAKEN;
    const tg_lock_outcome outcome = tg__lock_wait(segment, self, timeout_us);
    if (outcome != TG_LOCK_TIMEOUT)
        tg__lock_count_holder(segment);
    return outcome;
}

/* Frees the lock, but never another's: a holder in a foreign pid namespace that was given up (docs/locks.md) finds
 * the word changed and leaves it. */
static inline void
tg__lock_release(tg_segment *segment, uint64_t self)
{
    /* Before the lock is free, or the next holder would pass for the one that was found stopped. */
    if (__builtin_expect(atomic_load_explicit(&segment->stalled, memory_order_relaxed) != 0, 0))
        atomic_store_explicit(&segment->stalled, 0, memory_order_relaxed);
    uint64_t held = self;
    if (__builtin_expect(atomic_compare_exchange_strong_explicit(&segment->lock, &held, 0, memory_order_release,
                                                                 memory_order_relaxed),
                         1))
        return;
    while ((held & ~TG_LOCK_WAITERS) == self) {
        if (atomic_compare_exchange_weak_explicit(&segment->lock, &held, 0, memory_order_release,
                                                  memory_order_relaxed)) {
            tg__lock_wake(segment);
            return;
        }
    }
}

#endif
