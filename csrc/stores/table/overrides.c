/* Overrides and pauses in the table's side: written under the first segment's lock, read without one.
 * Whatever is read may have been written by another process, broken or dead in the middle: a slot is copied out, its texts are
 * ended, and what is not whole is not followed.
 * Must not enter: what an override does to a decision. */
#include "table.h"

#include <inttypes.h>

_Static_assert(sizeof(((tg_override *)0)->rules) == sizeof(((tg_override_slot *)0)->rules), "the same text");
_Static_assert(sizeof(((tg_override *)0)->shown) == sizeof(((tg_override_slot *)0)->shown), "the same text");

static tg_status
no_side(const tg_table *table, tg_error *error)
{
    return tg__error(error, TG_E_UNSUPPORTED, "table %s: a table under 1 MiB keeps no overrides; remove it and give it "
                                              "size=1MiB",
                     table->place.name);
}

/* ---- reading ---- */

/* `state` is odd while a slot is written and counts up with each change. false: not whole. */
static bool
read_slot(const tg_override_slot *slot, tg_override *copy)
{
    const uint32_t before = atomic_load_explicit(&slot->state, memory_order_acquire);
    if (before % 2 != 0 || before == 0)
        return false;
    *copy = (tg_override){ .kind = (tg_override_kind)slot->kind, .until_us = slot->until_us };
    memcpy(copy->space, slot->space, sizeof slot->space);
    memcpy(copy->policy, slot->policy, sizeof slot->policy);
    memcpy(copy->identity, slot->identity, sizeof copy->identity);
    memcpy(copy->rules, slot->rules, sizeof copy->rules);
    memcpy(copy->shown, slot->shown, sizeof copy->shown);
    copy->rules[sizeof copy->rules - 1] = copy->shown[sizeof copy->shown - 1] = '\0';
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&slot->state, memory_order_relaxed) == before &&
           (copy->kind == TG_OVERRIDE_RULES || copy->kind == TG_OVERRIDE_PAUSE);
}

static bool
speaks_of(const tg_override *override, const char *space, const char *policy, const uint8_t identity[16])
{
    static const uint8_t everybody[16];
    if (policy && (strcmp(override->policy, policy) != 0 || strcmp(override->space, space) != 0))
        return false;
    return !identity || memcmp(override->identity, identity, 16) == 0 || memcmp(override->identity, everybody, 16) == 0;
}

/* The same of a slot as it lies, to pass over most of them without a copy. One that is being written may be passed over, as
 * if it had been set a moment later. */
static bool
may_speak_of(const tg_override_slot *slot, const char *policy, const uint8_t identity[16])
{
    static const uint8_t everybody[16];
    if (slot->kind == 0 || (policy && strncmp(slot->policy, policy, sizeof slot->policy) != 0))
        return false;
    return !identity || memcmp(slot->identity, identity, 16) == 0 || memcmp(slot->identity, everybody, 16) == 0;
}

tg_status
tg__table_override_list(tg_store *store, const char *space, const char *policy, const uint8_t identity[16],
                        tg_override *overrides, size_t room, size_t *count, tg_error *error)
{
    tg_table *const table = tg__table_of(store);
    const tg_side *const side = tg__map_side(atomic_load_explicit(&table->map, memory_order_acquire));
    if (!side)
        return no_side(table, error);
    const uint64_t now_us = tg__table_now(table);
    *count = 0;
    for (uint32_t i = 0; i < TG_OVERRIDE_SLOTS; i++) {
        tg_override one;
        if (!may_speak_of(&side->overrides[i], policy, identity))
            continue;
        bool whole = read_slot(&side->overrides[i], &one);
        for (unsigned again = 0; !whole && again < 3; again++)
            whole = read_slot(&side->overrides[i], &one); /* it was being written */
        if (!whole || one.until_us <= now_us || !speaks_of(&one, space, policy, identity))
            continue;
        if (*count < room)
            overrides[*count] = one;
        ++*count;
    }
    return TG_OK;
}

void
tg__overrides_follow(tg_table *table, const tg_map *map)
{
    tg_side *const side = tg__map_side(map);
    atomic_store_explicit(&table->base.overrides, side ? &side->overrides_standing : NULL, memory_order_release);
}

/* ---- writing ---- */

static void
write_slot(tg_override_slot *slot, const tg_override *override)
{
    const uint32_t state = atomic_load_explicit(&slot->state, memory_order_relaxed) | 1; /* odd already: its writer died */
    atomic_store_explicit(&slot->state, state, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    slot->kind = override->until_us ? (uint32_t)override->kind : 0;
    slot->until_us = override->until_us;
    memcpy(slot->space, override->space, sizeof slot->space);
    memcpy(slot->policy, override->policy, sizeof slot->policy);
    memcpy(slot->identity, override->identity, sizeof slot->identity);
    memcpy(slot->rules, override->rules, sizeof slot->rules);
    memcpy(slot->shown, override->shown, sizeof slot->shown);
    atomic_store_explicit(&slot->state, state + 1 ? state + 1 : 2, memory_order_release);
}

static bool
same(const tg_override *a, const tg_override *b)
{
    return a->kind == b->kind && strcmp(a->policy, b->policy) == 0 && strcmp(a->space, b->space) == 0 &&
           memcmp(a->identity, b->identity, sizeof a->identity) == 0;
}

/* Where it goes: in the place of the same one, else into one that is free, over, or was never finished. */
static tg_override_slot *
place_for(tg_side *side, const tg_override *override, uint64_t now_us)
{
    tg_override_slot *spare = NULL;
    for (uint32_t i = 0; i < TG_OVERRIDE_SLOTS; i++) {
        tg_override one;
        tg_override_slot *slot = &side->overrides[i];
        const bool whole = read_slot(slot, &one);
        if (whole && one.until_us > now_us && same(&one, override))
            return slot;
        if (!spare && (!whole || one.until_us <= now_us))
            spare = slot;
    }
    return spare;
}

tg_status
tg__table_override_set(tg_store *store, const tg_override *override, tg_error *error)
{
    tg_table *const table = tg__table_of(store);
    const tg_map *const map = atomic_load_explicit(&table->map, memory_order_acquire);
    tg_side *const side = tg__map_side(map);
    if (!side)
        return no_side(table, error);
    const uint64_t self = tg__lock_self(), now_us = tg__table_now(table);
    const tg_area area = tg__map_area(map, 0); /* its lock survives its holder, so it guards this as well */
    const tg_lock_outcome outcome = tg__lock_take(area.segment, self, table->timeout_us);
    if (outcome == TG_LOCK_TIMEOUT)
        return tg__error(error, TG_E_STORE, "table %s: a lock's holder is stopped", table->place.name);
    if (outcome == TG_LOCK_INHERITED)
        tg__segment_recover(&area);
    tg_override_slot *slot = place_for(side, override, now_us);
    if (slot)
        write_slot(slot, override);
    uint64_t standing = 0;
    for (uint32_t i = 0; i < TG_OVERRIDE_SLOTS; i++) {
        tg_override one;
        standing += read_slot(&side->overrides[i], &one) && one.until_us > now_us;
    }
    atomic_store_explicit(&side->overrides_standing, standing, memory_order_release);
    tg__lock_release(area.segment, self);
    if (!slot)
        return tg__error(error, TG_E_SYSTEM, "table %s: all %u places for overrides are taken; end some of them",
                         table->place.name, TG_OVERRIDE_SLOTS);
    return TG_OK;
}
