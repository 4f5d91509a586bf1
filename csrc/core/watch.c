/* Counting answers in a ring of seven words, each with the number of its stretch of time, so that one compare-and-swap
 * both counts and begins anew: no lock, nothing to be cleaned up, and a word that a dead process or a stranger left says
 * something of one stretch at most.
 * Must not enter: requests, policies' other keys. */
#include "core/watch.h"

#include "config/config.h"
#include "core/metrics.h"

#include <inttypes.h>

/* A word: 24 bits of the stretch's number, then twice 20 bits: answers, and errors among them. */
enum { COUNT_BITS = 20, STRETCH_BITS = 24 };
#define COUNT_MAX ((UINT64_C(1) << COUNT_BITS) - 1)
#define STRETCH_MAX ((UINT64_C(1) << STRETCH_BITS) - 1)

static uint64_t
stretch_of(uint64_t word)
{
    return word >> 2 * COUNT_BITS;
}

static uint64_t
answers_of(uint64_t word)
{
    return word >> COUNT_BITS & COUNT_MAX;
}

static uint64_t
errors_of(uint64_t word)
{
    return word & COUNT_MAX;
}

static uint64_t
word_of(uint64_t stretch, uint64_t answers, uint64_t errors)
{
    return (stretch & STRETCH_MAX) << 2 * COUNT_BITS | answers << COUNT_BITS | errors;
}

static _Atomic uint64_t *
line_of(tg_watch *watch, const tg_limiter *limiter)
{
    const tg_store_ops *ops = limiter->store->ops;
    _Atomic uint64_t *line = ops->watch_line && limiter->metric ? ops->watch_line(limiter->store, limiter->metric) : NULL;
    return line ? line : watch->own;
}

static uint64_t
stretch_at(const tg_limiter *limiter, const tg_pause *pause)
{
    return tg_store_now_us(limiter->store) / (pause->period_us / TG_WATCH_RING);
}

void
tg__watch_add(tg_watch *watch, const tg_limiter *limiter, const tg_pause *pause, bool is_error)
{
    const uint64_t stretch = stretch_at(limiter, pause);
    _Atomic uint64_t *const word = &line_of(watch, limiter)[stretch % TG_WATCH_RING];
    uint64_t before = atomic_load_explicit(word, memory_order_relaxed), since;
    do {
        uint64_t answers = answers_of(before), errors = errors_of(before);
        if (stretch_of(before) != (stretch & STRETCH_MAX))
            answers = errors = 0;
        if (answers == COUNT_MAX) { /* half of each says the same */
            answers /= 2;
            errors /= 2;
        }
        since = word_of(stretch, answers + 1, errors + is_error);
    } while (!atomic_compare_exchange_weak_explicit(word, &before, since, memory_order_relaxed, memory_order_relaxed));
}

bool
tg__watch_pauses(tg_watch *watch, const tg_limiter *limiter, const tg_pause *pause, tg_watched *watched)
{
    const uint64_t stretch = stretch_at(limiter, pause);
    _Atomic uint64_t *const line = line_of(watch, limiter);
    *watched = (tg_watched){ 0, 0 };
    for (uint64_t i = 0; i < TG_WATCH_RING; i++) {
        const uint64_t word = atomic_load_explicit(&line[i], memory_order_relaxed);
        if (((stretch - stretch_of(word)) & STRETCH_MAX) >= TG_WATCH_RING)
            continue;
        watched->answers += answers_of(word);
        watched->errors += errors_of(word);
    }
    return watched->answers >= pause->least && watched->errors * 100 > watched->answers * pause->percent;
}

void
tg__watch_tell(tg_watch *watch, const tg_limiter *limiter, const tg_pause *pause, bool pauses, const tg_watched *watched)
{
    bool told = atomic_load_explicit(&watch->told, memory_order_relaxed);
    if (told == pauses)
        return;
    const uint64_t at_us = tg_store_now_us(limiter->store);
    if (pauses && at_us < atomic_load_explicit(&watch->quiet_until_us, memory_order_relaxed))
        return;
    if (!atomic_compare_exchange_strong(&watch->told, &told, pauses))
        return;
    if (pauses) {
        tg__notice("refusals-paused", "policy \"%s\" refuses nobody: %" PRIu64 " of %" PRIu64 " answers within %" PRIu64
                                      " s were errors, over the %u %% of its pause_when",
                   limiter->name, watched->errors, watched->answers, pause->period_us / 1000000, pause->percent);
        return;
    }
    atomic_store_explicit(&watch->quiet_until_us, at_us + pause->period_us, memory_order_relaxed);
    tg__notice("refusals-resumed", "policy \"%s\" refuses again: %" PRIu64 " of %" PRIu64 " answers within %" PRIu64
                                   " s were errors",
               limiter->name, watched->errors, watched->answers, pause->period_us / 1000000);
}

void
tg__watch_let_through(tg_watch *watch, const tg_limiter *limiter)
{
    if (limiter->store->ops->watch_line) /* the table's lines of counters are full */
        atomic_fetch_add_explicit(&line_of(watch, limiter)[TG_WATCH_LET_THROUGH], 1, memory_order_relaxed);
    else
        tg__metrics_one(limiter, TG_METRIC_PAUSED);
}
