/* What is done for a holder that died: its segment goes back to before its call, or on to where no step can be seen.
 * Saving costs the hit path two stores and a copy of 64 bytes; everything else here is only for the rare death.
 * Must not enter: the lock itself, and any trust in what the dead one left. */
#include "table.h"

static inline uint32_t
shared_read(const uint32_t *shared)
{
    return *(const volatile uint32_t *)shared;
}

TG_EACH_REQUEST void
tg__undo_save_entry(const tg_area *area, uint32_t index)
{
    tg_segment *const segment = area->segment;
    const uint32_t count = segment->undo_entries;
    if (count >= TG_UNDO_ENTRIES)
        return; /* only when the count was damaged */
    segment->undo_index[count] = index;
    segment->undo_entry[count] = area->entries[index];
    tg__in_order();
    segment->undo_entries = count + 1;
    tg__in_order();
    TG_STEP("entry saved");
}

bool
tg__undo_words_full(const tg_area *area)
{
    return area->segment->undo_words >= TG_UNDO_WORDS;
}

void
tg__undo_save_word(const tg_area *area, uint32_t block, uint32_t word)
{
    tg_segment *const segment = area->segment;
    const uint32_t count = segment->undo_words;
    if (count >= TG_UNDO_WORDS)
        return;
    segment->undo_word[count] = (tg_undo_word){ block, word, area->blocks[block].words[word] };
    tg__in_order();
    segment->undo_words = count + 1;
    tg__in_order();
    TG_STEP("word saved");
}

/* Follows one log, claims its blocks and cuts it where it breaks off. */
static void
claim_log(const tg_area *area, tg_entry *shared, uint32_t made)
{
    tg_entry entry;
    tg__entry_read(shared, &entry);
    tg_log log = entry.log;
    tg__log_check(area, &log);
    uint32_t places = log.first_word + log.words, readable = 0;
    uint32_t block = log.first, previous = TG_BLOCK_NONE;
    while (block < made && shared_read(&area->blocks[block].previous) == TG_BLOCK_LOOSE) {
        area->blocks[block].previous = previous;
        previous = block;
        if (places <= readable + TG_BLOCK_WORDS) {
            readable = places;
            break;
        }
        readable += TG_BLOCK_WORDS;
        block = shared_read(&area->blocks[block].next);
    }
    if (previous == TG_BLOCK_NONE) {
        log = (tg_log){ .first = TG_BLOCK_NONE, .last = TG_BLOCK_NONE };
    } else {
        log.last = previous;
        log.words = readable > log.first_word ? readable - log.first_word : 0;
        /* The sum is made anew: the words are what is true. */
        tg_log_cursor cursor;
        const tg_log_view view = tg__log_view(area, &log, 0, &cursor);
        tg_log_entry hit;
        log.units = 0;
        while (view.next(view.cursor, &hit))
            log.units = log.units + hit.cost < log.units ? UINT64_MAX : log.units + hit.cost;
    }
    shared->log = log;
}

/* Every block is first loose; each log claims its own; what is still loose then is free. A second death in here only
 * means that it is done again: the logs' `next` links are read, and only `previous` and the free list are written. */
static void
rebuild_arena(const tg_area *area)
{
    tg_segment *const segment = area->segment;
    uint32_t made = shared_read(&segment->blocks_made);
    if (made > area->block_count)
        made = area->block_count;
    for (uint32_t i = 0; i < made; i++)
        area->blocks[i].previous = TG_BLOCK_LOOSE;
    TG_STEP("blocks made loose");
    uint32_t used = 0;
    for (uint32_t i = 0; i < area->total; i++) {
        tg_entry *const entry = &area->entries[i];
        if (!(entry->flags & TG_ENTRY_USED))
            continue;
        used++;
        entry->leases = 0;
        if (entry->algorithm == TG_SLIDING_LOG)
            claim_log(area, entry, made);
    }
    TG_STEP("logs claimed");
    tg__leases_rebuild(area, made);
    uint32_t head = TG_BLOCK_NONE, count = 0;
    for (uint32_t i = made; i-- > 0;) {
        if (area->blocks[i].previous != TG_BLOCK_LOOSE)
            continue;
        area->blocks[i].next = head;
        head = i;
        count++;
    }
    segment->free_head = head;
    segment->free_count = count;
    segment->blocks_made = made;
    segment->entries_used = used;
    TG_STEP("arena rebuilt");
}

void
tg__segment_recover(const tg_area *area)
{
    tg_segment *const segment = area->segment;
    uint32_t words = shared_read(&segment->undo_words), entries = shared_read(&segment->undo_entries);
    if (words > TG_UNDO_WORDS)
        words = TG_UNDO_WORDS;
    if (entries > TG_UNDO_ENTRIES)
        entries = TG_UNDO_ENTRIES;
    /* Newest first, so that of two savings of one place the older wins. */
    while (words-- > 0) {
        const uint32_t block = shared_read(&segment->undo_word[words].block);
        const uint32_t word = shared_read(&segment->undo_word[words].word);
        if (block < area->block_count && word < TG_BLOCK_WORDS)
            area->blocks[block].words[word] = segment->undo_word[words].value;
        TG_STEP("word put back");
    }
    while (entries-- > 0) {
        const uint32_t index = shared_read(&segment->undo_index[entries]);
        if (index < area->total)
            area->entries[index] = segment->undo_entry[entries];
        TG_STEP("entry put back");
    }
    if (shared_read(&segment->compact_entry) != 0)
        tg__log_compact_resume(area);
    rebuild_arena(area);
    tg__undo_settle(area);
    segment->owner_deaths++;
}
