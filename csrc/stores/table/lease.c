/* Leases: units taken on an estimate, each in a block of its own, in a list by when they end. A segment's first lease tells
 * every caller that takes its lock whether something has to be given back first; so what has ended is back for the next hit,
 * and nobody else pays for it.
 * Must not enter: what an algorithm does with units that are given back, locks. */
#include "table.h"

#define COST_MASK ((UINT64_C(1) << TG_LEASE_COST_BITS) - 1)

static inline uint32_t
link_read(const uint32_t *link)
{
    return *(const volatile uint32_t *)link;
}

static inline uint64_t
word_read(const tg_area *area, uint32_t block, tg_lease_word word)
{
    return *(const volatile uint64_t *)&area->blocks[block].words[word];
}

static inline uint64_t
key_bits(const uint64_t key[2])
{
    return key[0] & ~COST_MASK;
}

static inline bool
is_tag(uint64_t word)
{
    return (word & TG_LEASE_TAG_MASK) == TG_LEASE_TAG;
}

/* The entry that a lease is of. false: it is no lease, or its entry is another's by now. */
static bool
entry_of(const tg_area *area, uint32_t block, uint32_t *index)
{
    const uint64_t tag = word_read(area, block, TG_LEASE_WORD_TAG);
    *index = (uint32_t)tag;
    if (!is_tag(tag) || *index >= area->total)
        return false;
    const tg_entry *const entry = &area->entries[*index];
    const uint64_t key = *(const volatile uint64_t *)&entry->key[0];
    return (entry->flags & TG_ENTRY_USED) && entry->algorithm == ((tag >> 32) & 7) &&
           (word_read(area, block, TG_LEASE_WORD_COST) & ~COST_MASK) == (key & ~COST_MASK);
}

/* ---- the list ---- */

static void
tell_due(const tg_area *area)
{
    tg_segment *const segment = area->segment;
    const uint32_t first = link_read(&segment->lease_first);
    const uint64_t due_us = first < area->block_count ? word_read(area, first, TG_LEASE_WORD_UNTIL) : 0;
    segment->lease_due_us = first < area->block_count && due_us == 0 ? 1 : due_us;
}

/* Behind the last one that ends no later: most leases are of one length, so that is at the end. */
static void
link_in(const tg_area *area, uint32_t block, uint64_t until_us)
{
    tg_segment *const segment = area->segment;
    uint32_t before = link_read(&segment->lease_last), next = TG_BLOCK_NONE;
    for (uint32_t i = 0; i < area->block_count && before < area->block_count; i++) {
        if (word_read(area, before, TG_LEASE_WORD_UNTIL) <= until_us)
            break;
        next = before;
        before = link_read(&area->blocks[before].previous);
    }
    if (before >= area->block_count)
        before = TG_BLOCK_NONE;
    area->blocks[block].previous = before;
    area->blocks[block].next = next;
    *(before == TG_BLOCK_NONE ? &segment->lease_first : &area->blocks[before].next) = block;
    *(next == TG_BLOCK_NONE ? &segment->lease_last : &area->blocks[next].previous) = block;
    segment->lease_count++;
}

static void
link_out(const tg_area *area, uint32_t block)
{
    tg_segment *const segment = area->segment;
    const uint32_t before = link_read(&area->blocks[block].previous), next = link_read(&area->blocks[block].next);
    if (before < area->block_count)
        area->blocks[before].next = next;
    else
        segment->lease_first = next;
    if (next < area->block_count)
        area->blocks[next].previous = before;
    else
        segment->lease_last = before;
    if (segment->lease_count > 0)
        segment->lease_count--;
}

/* Its tag is gone. */
static void
let_go(const tg_area *area, uint32_t block)
{
    TG_STEP("lease ended");
    link_out(area, block);
    tell_due(area);
    TG_STEP("lease left its list");
    tg__chain_free(area, (tg_chain){ block, 1 });
}

/* ---- taking ---- */

bool
tg__lease_room(const tg_area *area, uint32_t count, uint32_t blocks_beside)
{
    const uint32_t quarter = area->block_count / 4, most = quarter < TG_LEASES_MAX ? quarter : TG_LEASES_MAX;
    const uint32_t held = link_read(&area->segment->lease_count);
    return held <= most && most - held >= count &&
           tg__blocks_left(area) >= count + blocks_beside + area->block_count / 16;
}

uint32_t
tg__lease_add(const tg_area *area, uint32_t index, const tg_rule *rule, const tg_lease_terms *terms)
{
    tg_entry *const entry = &area->entries[index];
    const uint32_t block = tg__block_take(area);
    if (block == TG_BLOCK_NONE)
        return block; /* only where counts were damaged */
    uint64_t *const words = area->blocks[block].words;
    words[TG_LEASE_WORD_ID] = terms->id;
    words[TG_LEASE_WORD_UNTIL] = terms->until_us;
    words[TG_LEASE_WORD_STAMP] = terms->stamp_us;
    words[TG_LEASE_WORD_COST] = key_bits(entry->key) | (terms->cost & COST_MASK);
    words[TG_LEASE_WORD_PERIOD] = rule->period_us;
    words[TG_LEASE_WORD_RESOLUTION] = rule->resolution_us;
    TG_STEP("lease written");
    tg__undo_save_word(area, block, TG_LEASE_WORD_TAG); /* what stands there is no tag */
    words[TG_LEASE_WORD_TAG] =
        TG_LEASE_TAG | (rule->aligned ? TG_LEASE_ALIGNED : 0) | (uint64_t)rule->algorithm << 32 | index;
    tg__in_order();
    entry->leases++;
    TG_STEP("lease tagged");
    link_in(area, block, terms->until_us);
    tell_due(area);
    TG_STEP("lease in its list");
    return block;
}

/* ---- ending ---- */

uint32_t
tg__lease_find(const tg_area *area, uint32_t place, uint64_t id)
{
    uint32_t index;
    const uint32_t made = link_read(&area->segment->blocks_made);
    if (place >= area->block_count || place >= made || !entry_of(area, place, &index) ||
        word_read(area, place, TG_LEASE_WORD_ID) != id)
        return TG_BLOCK_NONE;
    return index;
}

/* Gives `given` of a lease's units back to its entry and ends it: one step, or for a log with very many hits of one
 * microsecond several, each of which leaves a lease of what is left. */
void
tg__lease_end(const tg_area *area, uint32_t block, uint64_t given, uint64_t now_us)
{
    uint32_t index;
    bool more = false;
    if (!entry_of(area, block, &index)) { /* its entry has gone, or was taken by another */
        area->blocks[block].words[TG_LEASE_WORD_TAG] = 0;
        let_go(area, block);
        return;
    }
    tg_entry *const shared = &area->entries[index];
    uint64_t *const words = area->blocks[block].words;
    const uint64_t held = word_read(area, block, TG_LEASE_WORD_COST) & COST_MASK;
    if (given > held)
        given = held;
    do {
        tg_entry entry;
        bool changed = false;
        tg__entry_read(shared, &entry);
        tg_rule rule = {
            .limit = 1,
            .burst = 1,
            .period_us = words[TG_LEASE_WORD_PERIOD] ? words[TG_LEASE_WORD_PERIOD] : 1,
            .resolution_us = words[TG_LEASE_WORD_RESOLUTION],
            .algorithm = entry.algorithm,
            .aligned = (words[TG_LEASE_WORD_TAG] & TG_LEASE_ALIGNED) != 0,
        };
        const uint64_t stamp_us = words[TG_LEASE_WORD_STAMP];
        uint64_t left = 0;
        tg__undo_save_entry(area, index);
        tg__undo_save_word(area, block, TG_LEASE_WORD_TAG);
        tg__undo_save_word(area, block, TG_LEASE_WORD_COST);
        if (entry.algorithm == TG_SLIDING_LOG) {
            rule.period_us = UINT64_MAX; /* what has left the log by now counts nothing, whether it is there or not */
            tg__log_check(area, &entry.log);
            left = given > 0 ? tg__log_refund(area, &rule, &entry.log, now_us, given, true, stamp_us, &changed, &more) : 0;
            words[TG_LEASE_WORD_COST] -= given - left;
            given = left;
        } else {
            /* At the state's own last time: what has drained since, whatever the rule is by then, drains as it would. */
            changed = tg__refund(&rule, &entry.value, 0, given, true, stamp_us, &entry.value);
        }
        if (changed)
            tg__state_copy(&entry.value, &shared->value);
        more = more && changed && left > 0;
        if (!more) {
            shared->leases -= shared->leases > 0;
            words[TG_LEASE_WORD_TAG] = 0;
        }
        TG_STEP("lease given back");
        tg__undo_settle(area);
    } while (more);
    let_go(area, block);
}

/* All that have ended. */
void
tg__leases_lapse(const tg_area *area, uint64_t now_us)
{
    for (uint32_t i = 0; i < area->block_count; i++) {
        const uint32_t block = link_read(&area->segment->lease_first);
        if (block >= area->block_count || word_read(area, block, TG_LEASE_WORD_UNTIL) > now_us)
            break;
        tg__lease_end(area, block, word_read(area, block, TG_LEASE_WORD_COST) & COST_MASK, now_us);
    }
    tell_due(area);
}

void
tg__lease_renew(const tg_area *area, uint32_t block, uint64_t until_us)
{
    area->blocks[block].words[TG_LEASE_WORD_UNTIL] = until_us;
    TG_STEP("lease renewed");
    link_out(area, block);
    link_in(area, block, until_us);
    tell_due(area);
}

/* Those of an entry that is forgotten. */
void
tg__leases_forget(const tg_area *area, uint32_t index, const uint64_t key[2])
{
    uint32_t block = link_read(&area->segment->lease_first);
    for (uint32_t i = 0; i < area->block_count && block < area->block_count; i++) {
        const uint32_t next = link_read(&area->blocks[block].next);
        if (is_tag(word_read(area, block, TG_LEASE_WORD_TAG)) &&
            (uint32_t)word_read(area, block, TG_LEASE_WORD_TAG) == index &&
            (word_read(area, block, TG_LEASE_WORD_COST) & ~COST_MASK) == key_bits(key)) {
            area->blocks[block].words[TG_LEASE_WORD_TAG] = 0;
            let_go(area, block);
        }
        block = next;
    }
}

/* After a death: the blocks that no log has claimed, each a lease, or free with no tag. The entries' counts are 0. */
void
tg__leases_rebuild(const tg_area *area, uint32_t made)
{
    tg_segment *const segment = area->segment;
    segment->lease_first = segment->lease_last = TG_BLOCK_NONE;
    segment->lease_count = 0;
    for (uint32_t block = 0; block < made; block++) {
        uint32_t index;
        if (link_read(&area->blocks[block].previous) != TG_BLOCK_LOOSE)
            continue;
        if (entry_of(area, block, &index)) {
            link_in(area, block, word_read(area, block, TG_LEASE_WORD_UNTIL));
            area->entries[index].leases++;
        } else if (is_tag(word_read(area, block, TG_LEASE_WORD_TAG))) {
            area->blocks[block].words[TG_LEASE_WORD_TAG] = 0;
        }
    }
    tell_due(area);
    TG_STEP("leases rebuilt");
}
