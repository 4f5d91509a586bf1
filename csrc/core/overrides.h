/* What an operator or a risk model has set while everything runs: other rules for a policy or one client of it, and pauses.
 * Kept in the store, so that all processes follow; asked for with one load where there is none.
 * Must not enter: how a store keeps them. */
#ifndef TG_OVERRIDES_H
#define TG_OVERRIDES_H

#include "core/core.h"

/* Whether the store has any at all. */
static inline bool
tg__overrides_any(const tg_store *store)
{
    const _Atomic uint64_t *const standing = atomic_load_explicit(&store->overrides, memory_order_relaxed);
    return __builtin_expect(standing != NULL, 1) && atomic_load_explicit(standing, memory_order_relaxed) != 0;
}

/* The rules and the cost that hold for one identity of a limiter at this moment; false: its own. `rules` have their scope. */
bool tg__override_find(const tg_limiter *limiter, const tg_identity *identity, tg_rule rules[TG_RULES_MAX], size_t *count,
                       bool *paused);

#endif
