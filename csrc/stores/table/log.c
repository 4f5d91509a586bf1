/* The words of sliding logs, in blocks of a segment's arena.
 * A log is the sequence of `words` words that begins at (first, first_word) and follows the blocks' `next`. Appending
 * writes only behind its end, so putting the old entry back undoes it; what overwrites a counted word saves it first.
 * Must not enter: what a log means (algorithms/), locks, which key it belongs to. */
#include "table.h"

/* ---- reading ---- */

static inline uint32_t
link_read(const uint32_t *link)
{
    return *(const volatile uint32_t *)link;
}

/* Index behind the newest word in the last block, 0..7. */
static inline uint32_t
end_word(const tg_log *log)
{
    return log->words == 0 ? log->first_word : (log->first_word + log->words - 1) % TG_BLOCK_WORDS + 1;
}

static inline uint32_t
block_count_of(const tg_log *log)
{
    if (log->first == TG_BLOCK_NONE)
        return 0;
    const uint32_t places = log->first_word + log->words;
    return places == 0 ? 1 : (places + TG_BLOCK_WORDS - 1) / TG_BLOCK_WORDS;
}

static inline uint64_t
time_of(uint64_t word, uint64_t now_us)
{
    const uint64_t ahead = (word - now_us) & TG_WORD_TIME;
    if (ahead <= TG_WORD_TIME / 2)
        return now_us + ahead;
    const uint64_t behind = TG_WORD_TIME + 1 - ahead;
    return behind < now_us ? now_us - behind : 0;
}

static bool
word_next(tg_log_cursor *cursor, uint64_t *word)
{
    if (cursor->left == 0)
        return false;
    if (cursor->word >= TG_BLOCK_WORDS) {
        cursor->block = link_read(&cursor->area->blocks[cursor->block].next);
        cursor->word = 0;
        if (cursor->block >= cursor->area->block_count) {
            cursor->block = 0;
            cursor->left = 0;
            return false;
        }
    }
    *word = cursor->area->blocks[cursor->block].words[cursor->word++];
    cursor->left--;
    return true;
}

static bool
entry_next(void *memory, tg_log_entry *entry)
{
    tg_log_cursor *const cursor = memory;
    uint64_t word;
    if (!word_next(cursor, &word))
        return false;
    if (word & TG_WORD_COST) {
        entry->cost = word & ~TG_WORD_COST;
        if (!word_next(cursor, &word))
            return false; /* a cost without its time: damaged */
        entry->at_us = time_of(word, cursor->now_us);
        return true;
    }
    entry->cost = word & TG_WORD_VOID ? 0 : 1;
    entry->at_us = time_of(word, cursor->now_us);
    return true;
}

static tg_log_cursor
cursor_begin(const tg_area *area, const tg_log *log, uint64_t now_us)
{
    return (tg_log_cursor){
        .area = area, .block = log->first, .word = log->first_word, .left = log->words, .now_us = now_us,
    };
}

/* Where the newest entry's words lie: one, or two with its cost before its time. */
typedef struct tail {
    struct {
        uint32_t block, word;
    } at[2];
    uint32_t count;
    tg_log_entry entry;
} tail;

/* One word back. false at the old end. */
static bool
step_back(const tg_area *area, uint32_t *block, uint32_t *word)
{
    if (*word > 0) {
        --*word;
        return true;
    }
    const uint32_t previous = link_read(&area->blocks[*block].previous);
    if (previous >= area->block_count)
        return false;
    *block = previous;
    *word = TG_BLOCK_WORDS - 1;
    return true;
}

/* Reads the entry whose last word is at (block, word), with `words` words from the old end up to it. */
static tail
tail_at(const tg_area *area, uint32_t block, uint32_t word, uint32_t words, uint64_t now_us)
{
    const uint64_t time = area->blocks[block].words[word];
    tail found = {
        .at = { { block, word } },
        .count = 1,
        .entry = { time_of(time, now_us), time & TG_WORD_VOID ? 0 : 1 },
    };
    uint32_t before_block = block, before_word = word;
    if (words < 2 || !step_back(area, &before_block, &before_word))
        return found;
    const uint64_t cost = area->blocks[before_block].words[before_word];
    if (!(cost & TG_WORD_COST))
        return found;
    found.at[0].block = before_block;
    found.at[0].word = before_word;
    found.at[1].block = block;
    found.at[1].word = word;
    found.count = 2;
    found.entry.cost = cost & ~TG_WORD_COST;
    return found;
}

static tail
newest_of(const tg_area *area, const tg_log *log, uint64_t now_us)
{
    return tail_at(area, log->last, end_word(log) - 1, log->words, now_us);
}

tg_log_view
tg__log_view(const tg_area *area, const tg_log *log, uint64_t now_us, tg_log_cursor *cursor)
{
    *cursor = cursor_begin(area, log, now_us);
    tg_log_view view = { .units = log->units, .empty = log->words == 0, .cursor = cursor, .next = entry_next };
    if (log->words > 0)
        view.newest = newest_of(area, log, now_us).entry;
    return view;
}

void
tg__log_check(const tg_area *area, tg_log *log)
{
    const bool sound = log->first < area->block_count && log->last < area->block_count &&
                       log->first_word <= TG_BLOCK_WORDS && (log->words == 0 || log->first_word < TG_BLOCK_WORDS) &&
                       log->words <= (uint64_t)area->block_count * TG_BLOCK_WORDS;
    if (!sound)
        *log = (tg_log){ .first = TG_BLOCK_NONE, .last = TG_BLOCK_NONE };
}

/* ---- blocks ---- */

uint32_t
tg__block_take(const tg_area *area)
{
    tg_segment *const segment = area->segment;
    const uint32_t made = link_read(&segment->blocks_made);
    const uint32_t head = link_read(&segment->free_head);
    if (segment->free_count > 0 && head < area->block_count && head < made) {
        segment->free_head = link_read(&area->blocks[head].next);
        segment->free_count--;
        return head;
    }
    segment->free_count = 0; /* the list ended: what it promised beyond was damage */
    if (made < area->block_count) {
        segment->blocks_made = made + 1;
        return made;
    }
    return TG_BLOCK_NONE;
}

tg_chain
tg__log_chain(const tg_log *log)
{
    return (tg_chain){ .first = log->first, .count = block_count_of(log) };
}

void
tg__chain_free(const tg_area *area, tg_chain chain)
{
    tg_segment *const segment = area->segment;
    uint32_t block = chain.first;
    for (uint32_t i = 0; i < chain.count && block < area->block_count; i++) {
        const uint32_t next = link_read(&area->blocks[block].next);
        area->blocks[block].next = segment->free_head;
        segment->free_head = block;
        segment->free_count++;
        TG_STEP("block freed");
        block = next;
    }
}

/* ---- writing ---- */

bool
tg__log_grows(const tg_log *log, const tg_log_change *change)
{
    if (log->first == TG_BLOCK_NONE)
        return true;
    const uint32_t wanted = change->entry.cost == 1 ? 1 : 2;
    return end_word(log) + wanted > TG_BLOCK_WORDS;
}

/* Drops `entries` at the old end; the blocks left behind come out as `loose`. */
static void
drop_oldest(const tg_area *area, tg_log *log, const tg_log_change *change, tg_chain *loose)
{
    tg_log_cursor cursor = cursor_begin(area, log, 0);
    tg_log_entry entry;
    const uint32_t blocks_before = block_count_of(log);
    for (size_t i = 0; i < change->expired_entries && entry_next(&cursor, &entry); i++)
        continue;
    loose->first = log->first;
    if (cursor.left == 0) {
        /* All gone: the log goes on in its last block. */
        log->first_word = (uint8_t)end_word(log);
        log->first = log->last;
        log->words = 0;
        log->units = 0;
        loose->count = blocks_before - 1;
        return;
    }
    if (cursor.word >= TG_BLOCK_WORDS) {
        cursor.block = link_read(&area->blocks[cursor.block].next);
        cursor.word = 0;
        if (cursor.block >= area->block_count) { /* breaks off here: nothing readable is left */
            *log = (tg_log){ .first = TG_BLOCK_NONE, .last = TG_BLOCK_NONE };
            loose->count = 1;
            return;
        }
    }
    log->first = cursor.block;
    log->first_word = (uint8_t)cursor.word;
    log->words = cursor.left;
    log->units -= change->expired_units < log->units ? change->expired_units : log->units;
    const uint32_t blocks_after = block_count_of(log);
    loose->count = blocks_before > blocks_after ? blocks_before - blocks_after : 0;
}

/* Writes one word behind the end. `spare` is a block taken beforehand; only a log found broken off meanwhile needs
 * another. */
static bool
append(const tg_area *area, tg_log *log, uint64_t word, uint32_t *spare, tg_chain *loose)
{
    uint32_t end = log->first == TG_BLOCK_NONE ? TG_BLOCK_WORDS : end_word(log);
    if (end == TG_BLOCK_WORDS) {
        const uint32_t block = *spare != TG_BLOCK_NONE ? *spare : tg__block_take(area);
        *spare = TG_BLOCK_NONE;
        if (block == TG_BLOCK_NONE)
            return false;
        area->blocks[block].previous = log->words > 0 ? log->last : TG_BLOCK_NONE;
        area->blocks[block].next = TG_BLOCK_NONE;
        if (log->first != TG_BLOCK_NONE)
            area->blocks[log->last].next = block;
        if (log->words == 0) {
            /* An emptied log leaves its last block too; it follows in the list of those before it. */
            if (log->first != TG_BLOCK_NONE) {
                if (loose->count == 0)
                    loose->first = log->first;
                loose->count++;
            }
            log->first = block;
            log->first_word = 0;
        }
        log->last = block;
        end = 0;
    } else if (log->words == 0) {
        log->first = log->last;
        log->first_word = (uint8_t)end;
    }
    area->blocks[log->last].words[end] = word;
    log->words++;
    TG_STEP("word appended");
    return true;
}

/* Overwrites a counted word. */
static void
replace(const tg_area *area, uint32_t block, uint32_t word, uint64_t value)
{
    tg__undo_save_word(area, block, word);
    area->blocks[block].words[word] = value;
    TG_STEP("word replaced");
}

/* Puts a hit into the place of the log's newest words, where the arena has no block left. The merged entry takes the
 * later time, so it holds the limit sooner than the exact log, never later. */
static bool
squeeze(const tg_area *area, tg_log *log, const tg_log_change *change)
{
    const uint64_t now_us = change->entry.at_us, time = now_us & TG_WORD_TIME;
    uint64_t cost = change->entry.cost;
    if (log->first == TG_BLOCK_NONE)
        return false;
    if (log->words == 0) {
        /* Its last block is all it needs; what stands there has expired, but an undone call counts it again. */
        log->first = log->last;
        log->first_word = 0;
        log->words = 2;
        replace(area, log->last, 0, TG_WORD_COST | cost);
        replace(area, log->last, 1, time);
        return true;
    }
    tail at = newest_of(area, log, now_us);
    uint32_t end = end_word(log);
    if (!change->replace_newest)
        cost += at.entry.cost;
    if (at.count == 1 && end < TG_BLOCK_WORDS) {
        replace(area, at.at[0].block, at.at[0].word, TG_WORD_COST | cost);
        area->blocks[log->last].words[end] = time;
        log->words++;
        return true;
    }
    if (at.count == 1) {
        /* One word at the end of a full block: with the entry before it there is place for two. */
        uint32_t block = at.at[0].block, word = at.at[0].word;
        const uint32_t last_word = at.at[0].word;
        if (log->words < 2) {
            /* The only one: the place before it in its block is nobody's, or that of a hit that has expired. */
            log->first_word--;
            log->words = 2;
            replace(area, block, last_word - 1, TG_WORD_COST | cost);
            replace(area, block, last_word, time);
            return true;
        }
        if (!step_back(area, &block, &word))
            return false;
        const tail before = tail_at(area, block, word, log->words - 1, now_us);
        cost += before.entry.cost;
        if (before.count == 1) {
            replace(area, before.at[0].block, before.at[0].word, TG_WORD_COST | cost);
            replace(area, log->last, last_word, time);
            return true;
        }
        at = before;
        log->words--;
    }
    replace(area, at.at[0].block, at.at[0].word, TG_WORD_COST | cost);
    replace(area, at.at[1].block, at.at[1].word, time);
    return true;
}

bool
tg__log_squeezes(const tg_log *log)
{
    return log->first != TG_BLOCK_NONE;
}

bool
tg__log_apply(const tg_area *area, tg_log *log, const tg_log_change *change, bool squeezed, tg_chain *loose)
{
    *loose = (tg_chain){ TG_BLOCK_NONE, 0 };
    uint32_t spare = TG_BLOCK_NONE;
    if (!squeezed && tg__log_grows(log, change)) {
        spare = tg__block_take(area);
        squeezed = spare == TG_BLOCK_NONE;
    }
    TG_STEP("block taken");
    if (change->expired_entries > 0)
        drop_oldest(area, log, change, loose);
    const uint64_t time = change->entry.at_us & TG_WORD_TIME;
    const uint64_t words[2] = { TG_WORD_COST | change->entry.cost, time };
    const tail newest = log->words > 0 ? newest_of(area, log, change->entry.at_us) : (tail){ .count = 0 };
    const bool take_place = newest.count > 0 && (change->replace_newest || newest.entry.cost == 0);
    uint32_t written = change->entry.cost == 1 ? 1 : 2; /* words still to be written, counted from the end of `words` */
    uint64_t added = change->entry.cost;
    if (change->replace_newest && newest.count > 0)
        added = change->entry.cost > newest.entry.cost ? change->entry.cost - newest.entry.cost : 0;
    if (squeezed) {
        if (!squeeze(area, log, change))
            return false;
        written = 0;
    } else if (take_place) {
        /* A newest one that was given back held its place only until something newer came. It never shrinks, so that
         * its end stays where it is. */
        if (newest.count > written)
            written = newest.count;
        for (uint32_t i = 0; i < newest.count; i++, written--)
            replace(area, newest.at[i].block, newest.at[i].word, words[2 - written]);
    }
    for (; written > 0; written--)
        if (!append(area, log, words[2 - written], &spare, loose))
            return false;
    log->units = log->units + added < log->units ? UINT64_MAX : log->units + added;
    if (spare != TG_BLOCK_NONE)
        tg__chain_free(area, (tg_chain){ spare, 1 });
    return true;
}

/* ---- giving back ---- */

/* Takes up to `cost` from the entry at `from`. */
static uint64_t
take_from(const tg_area *area, const tail *from, uint64_t cost)
{
    const uint64_t given = cost < from->entry.cost ? cost : from->entry.cost;
    uint64_t *const word = &area->blocks[from->at[0].block].words[from->at[0].word];
    tg__undo_save_word(area, from->at[0].block, from->at[0].word);
    if (from->count == 2)
        *word = TG_WORD_COST | (from->entry.cost - given);
    else
        *word |= TG_WORD_VOID;
    TG_STEP("word given back");
    return given;
}

static inline bool
expired(const tg_rule *rule, uint64_t at_us, uint64_t now_us)
{
    return at_us <= now_us && now_us - at_us >= rule->period_us;
}

uint64_t
tg__log_refund(const tg_area *area, const tg_rule *rule, tg_log *log, uint64_t now_us, uint64_t cost, bool own,
               uint64_t stamp_us, bool *changed, bool *more)
{
    *changed = *more = false;
    if (log->words == 0)
        return cost;
    tail at = newest_of(area, log, now_us);
    if (now_us < at.entry.at_us)
        now_us = at.entry.at_us;
    uint64_t left = cost;
    if (own) {
        const uint64_t step = rule->resolution_us ? rule->resolution_us : 1;
        uint32_t words = log->words;
        while (left > 0) {
            if (expired(rule, at.entry.at_us, now_us) || at.entry.at_us / step < stamp_us / step)
                break;
            if (at.entry.at_us / step == stamp_us / step && at.entry.cost > 0) {
                if (tg__undo_words_full(area)) {
                    *more = true;
                    break;
                }
                left -= take_from(area, &at, left);
            }
            words -= at.count;
            uint32_t block = at.at[0].block, word = at.at[0].word;
            if (words == 0 || words > log->words || !step_back(area, &block, &word))
                break;
            at = tail_at(area, block, word, words, now_us);
        }
    } else {
        tg_log_cursor cursor = cursor_begin(area, log, now_us);
        while (left > 0 && cursor.left > 0) {
            uint64_t word;
            if (!word_next(&cursor, &word))
                break;
            at = (tail){ .at = { { cursor.block, cursor.word - 1 } }, .count = 1 };
            at.entry.cost = word & TG_WORD_VOID ? 0 : 1;
            if (word & TG_WORD_COST) {
                at.count = 2;
                at.entry.cost = word & ~TG_WORD_COST;
                if (!word_next(&cursor, &word))
                    break;
            }
            at.entry.at_us = time_of(word, cursor.now_us);
            if (at.entry.cost == 0 || expired(rule, at.entry.at_us, now_us))
                continue;
            if (tg__undo_words_full(area)) {
                *more = true;
                break;
            }
            left -= take_from(area, &at, left);
        }
    }
    *changed = left < cost;
    const uint64_t given = cost - left;
    log->units -= given < log->units ? given : log->units;
    return left;
}

/* ---- compacting ---- */

/* A place in a log by the number of its word. */
typedef struct place {
    uint32_t block, word, ordinal;
    bool broken;
} place;

static void
place_advance(const tg_area *area, place *at, uint32_t by)
{
    for (; by > 0 && !at->broken; by--) {
        at->ordinal++;
        at->word++;
        if (at->word < TG_BLOCK_WORDS)
            continue;
        const uint32_t next = link_read(&area->blocks[at->block].next);
        /* Behind the last word of a full last block there is no next one: ends well when nothing is read there. */
        if (next >= area->block_count)
            at->broken = true;
        else
            at->block = next;
        at->word = 0;
    }
}

static inline uint64_t *
word_of(const tg_area *area, const place *at)
{
    return &area->blocks[at->block].words[at->word];
}

void
tg__log_compact(const tg_area *area, uint32_t index)
{
    tg_segment *const segment = area->segment;
    segment->compact_progress = 0;
    tg__in_order();
    segment->compact_entry = index + 1;
    tg__in_order();
    TG_STEP("compacting begun");
    tg__log_compact_resume(area);
}

/* The log is at every moment its first `write` words and those from `read` on; both numbers change in one store. */
void
tg__log_compact_resume(const tg_area *area)
{
    tg_segment *const segment = area->segment;
    const uint32_t index = link_read(&segment->compact_entry) - 1;
    const uint64_t progress = segment->compact_progress;
    if (index >= area->total) {
        segment->compact_entry = 0;
        return;
    }
    tg_entry entry;
    tg__entry_read(&area->entries[index], &entry);
    tg_log log = entry.log;
    tg__log_check(area, &log);
    const uint32_t words = log.words;
    uint32_t to = (uint32_t)(progress >> 32), from = (uint32_t)progress;
    if (!(entry.flags & TG_ENTRY_USED) || entry.algorithm != TG_SLIDING_LOG || words == 0 || to > from ||
        from > words) {
        segment->compact_entry = 0;
        return;
    }
    place write = { .block = log.first, .word = log.first_word }, read = write;
    place_advance(area, &write, to);
    place_advance(area, &read, from);
    while (read.ordinal < words && !read.broken) {
        uint64_t *const source = word_of(area, &read);
        const uint64_t word = *source;
        const bool newest = read.ordinal + (word & TG_WORD_COST ? 2 : 1) >= words;
        uint32_t skip = 0;
        if (word & TG_WORD_COST) {
            if (word == TG_WORD_COST && !newest) {
                skip = 2;
            } else if (word == (TG_WORD_COST | 1) && read.ordinal + 1 < words) {
                /* One unit left of a larger hit needs one word only. A word given back and its time mean the same as
                 * the cost and its time did, so this store changes nothing but what the next round sees. */
                place time = read;
                place_advance(area, &time, 1);
                *source = (time.broken ? 0 : *word_of(area, &time)) | TG_WORD_VOID;
                TG_STEP("cost word made void");
                continue;
            }
        } else if (word & TG_WORD_VOID && !newest) {
            skip = 1;
        }
        if (skip) {
            place_advance(area, &read, skip);
        } else {
            if (write.ordinal != read.ordinal)
                *word_of(area, &write) = word;
            TG_STEP("word moved");
            place_advance(area, &read, 1);
            place_advance(area, &write, 1);
        }
        tg__in_order();
        segment->compact_progress = (uint64_t)write.ordinal << 32 | read.ordinal;
        tg__in_order();
        TG_STEP("compacting went on");
    }
    /* The same bytes whenever this is done again. */
    const uint32_t blocks_before = block_count_of(&log);
    log.words = write.ordinal;
    const uint32_t blocks_after = block_count_of(&log);
    place end = { .block = log.first };
    tg_chain loose = { TG_BLOCK_NONE, 0 };
    for (uint32_t i = 1; i < blocks_after && !end.broken; i++)
        place_advance(area, &end, TG_BLOCK_WORDS);
    log.last = end.block;
    if (blocks_before > blocks_after)
        loose = (tg_chain){ link_read(&area->blocks[log.last].next), blocks_before - blocks_after };
    area->entries[index].log = log;
    tg__in_order();
    TG_STEP("compacted");
    segment->compact_entry = 0;
    tg__in_order();
    tg__chain_free(area, loose);
}
