/* Counting decisions for the operator: one relaxed add for each policy, and a clock's two readings for one decision in 64.
 * Must not enter: identities; how a store keeps the counters. */
#ifndef TG_METRICS_H
#define TG_METRICS_H

#include "core/core.h"

typedef _Atomic uint64_t tg_counter;

/* NULL: nothing is kept. */
static inline tg_counter *
tg__metric_line(const tg_limiter *limiter)
{
    return limiter->metric ? limiter->store->ops->metric_line(limiter->store, limiter->metric) : NULL;
}

static inline void
tg__metric_add(tg_counter *line, tg_metric metric)
{
    atomic_fetch_add_explicit(&line[metric], 1, memory_order_relaxed);
}

uint64_t tg__latency_clock_ns(void);

/* When a decision that is measured begins; 0 for the others. The counters themselves tell whose turn it is, so that no
 * other number has to be kept. */
static inline uint64_t
tg__latency_begin(tg_counter *line)
{
    const uint64_t counted = atomic_load_explicit(&line[TG_METRIC_ALLOWED], memory_order_relaxed) +
                             atomic_load_explicit(&line[TG_METRIC_DENIED], memory_order_relaxed);
    return __builtin_expect((counted & 63) == 63, 0) ? tg__latency_clock_ns() : 0;
}
void tg__latency_end(tg_store *store, uint64_t began_ns);

/* What one hit comes to. */
static inline tg_metric
tg__metric_of(const tg_decision *decision)
{
    if (__builtin_expect(decision->degraded, 0))
        return TG_METRIC_DEGRADED;
    if (decision->allowed)
        return TG_METRIC_ALLOWED;
    return decision->results[decision->reported].rule.algorithm == TG_DENY ? TG_METRIC_FORBIDDEN : TG_METRIC_DENIED;
}

/* Counts at one of them. */
void tg__metrics_one(const tg_limiter *limiter, tg_metric metric);

/* Counts a judgement. */
void tg__metrics_judged(const tg_bench *bench, const tg_judgement *judgement);

#endif
