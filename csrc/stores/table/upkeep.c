/* What is done beside decisions: the look around once a second, admitting rules, counting for the operator.
 * Must not enter: deciding and writing states (table.c). */
#include "table.h"

#include <inttypes.h>
#include <sodium.h>
#include <stdio.h>
#include <sys/mman.h>

#define SAMPLE_ENTRIES 2048u /* of each of some four segments */
#define STATS_ENTRIES 4096u  /* counted under one hold of a lock */

/* ---- once a second ---- */

static void
unmap_old(tg_table *table, tg_map *map)
{
    /* A thread that still holds one of its locks is waited for; one that comes later sees that another mapping is in
     * force before it touches anything but the lock. So after this round only lock words are touched here, and zero
     * pages do for them: the file's memory goes, the addresses stay until the store is closed. */
    const uint64_t self = tg__lock_self();
    for (uint32_t i = 0; i < map->segment_count; i++) {
        const tg_area area = tg__map_area(map, i);
        const tg_lock_outcome outcome = tg__lock_take(area.segment, self, table->timeout_us);
        if (outcome == TG_LOCK_TIMEOUT)
            return; /* it stays mapped: costs memory, breaks nothing */
        if (outcome == TG_LOCK_INHERITED)
            tg__segment_recover(&area);
        tg__lock_release(area.segment, self);
    }
    mmap(map->base, map->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

static void
follow_file(tg_table *table)
{
    tg_map *const old = atomic_load_explicit(&table->map, memory_order_relaxed);
    if (tg__map_current(&table->place, old)) {
        table->told_lost = false;
        return;
    }
    tg_error error = { .status = TG_OK };
    tg_map *map = NULL;
    if (tg__map_open(&table->place, &map, &error) != TG_OK) {
        if (!table->told_lost)
            tg__notice("table-replaced",
                       "%s was replaced or removed and its successor cannot be used; counting goes on in the old "
                       "table, which others no longer share: %.300s",
                       table->place.path, error.message);
        table->told_lost = true;
        return;
    }
    map->older = old;
    tg__metrics_follow(table, map);
    tg__overrides_follow(table, map);
    atomic_store_explicit(&table->map, map, memory_order_release);
    unmap_old(table, old);
    tg__notice("table-replaced", "%s was replaced or removed; counting goes on in the new table", table->place.path);
}

static void
size_text(uint64_t bytes, char text[24])
{
    if (bytes >= UINT64_C(1) << 30 && bytes % (UINT64_C(1) << 30) == 0)
        snprintf(text, 24, "%" PRIu64 "GiB", bytes >> 30);
    else if (bytes >= UINT64_C(1) << 20)
        snprintf(text, 24, "%" PRIu64 "MiB", (bytes + (UINT64_C(1) << 20) - 1) >> 20);
    else
        snprintf(text, 24, "%" PRIu64 "KiB", (bytes + 1023) >> 10);
}

/* How full the table is in percent, from a part of a few segments: entries or log blocks, whichever is more. */
static unsigned
fill_percent(const tg_table *table, const tg_map *map)
{
    const uint64_t self = tg__lock_self(), now_us = tg__table_now(table);
    uint64_t seen = 0, live = 0, blocks = 0, block_room = 0;
    const uint32_t step = map->segment_count > 4 ? map->segment_count / 4 : 1;
    for (uint32_t s = randombytes_uniform(step); s < map->segment_count; s += step) {
        const tg_area area = tg__map_area(map, s);
        const uint32_t most = area.normal < SAMPLE_ENTRIES ? area.normal : SAMPLE_ENTRIES;
        const uint32_t first = randombytes_uniform(area.normal - most + 1);
        const tg_lock_outcome outcome = tg__lock_take(area.segment, self, 0);
        if (outcome == TG_LOCK_TIMEOUT)
            continue;
        if (outcome == TG_LOCK_INHERITED)
            tg__segment_recover(&area);
        for (uint32_t i = first; i < first + most; i++) {
            tg_entry entry;
            tg__entry_read(&area.entries[i], &entry);
            if (!(entry.flags & TG_ENTRY_USED) || entry.fresh_at_us <= now_us)
                continue;
            live++;
            if (entry.algorithm == TG_SLIDING_LOG) {
                tg__log_check(&area, &entry.log);
                blocks += tg__log_chain(&entry.log).count;
            }
        }
        seen += most;
        block_room += (uint64_t)area.block_count * most / area.normal;
        tg__lock_release(area.segment, self);
    }
    const uint64_t entry_percent = seen ? live * 100 / seen : 0;
    const uint64_t block_percent = block_room ? blocks * 100 / block_room : 0;
    const uint64_t percent = entry_percent > block_percent ? entry_percent : block_percent;
    return percent > 100 ? 100 : (unsigned)percent;
}

static void
tell_fill(tg_table *table)
{
    const tg_map *const map = atomic_load_explicit(&table->map, memory_order_relaxed);
    const unsigned percent = fill_percent(table, map);
    if (percent < 60)
        table->told_full = false;
    if (percent < 80 || table->told_full)
        return;
    table->told_full = true;
    char size[24], now[24];
    size_text(map->bytes, now);
    size_text(map->bytes * 2 < TG_TABLE_BYTES_MAX ? map->bytes * 2 : TG_TABLE_BYTES_MAX, size);
    tg__notice("table-near-full", "table %s (%s) is %u %% full; %s%s?size=%s would fit", table->place.name, now,
               percent, table->place.path ? "shared://" : "memory://", table->place.name, size);
}

uint64_t
tg__table_follow_utc(const tg_map *map)
{
    if (map->manual)
        return 0;
    tg_header_page *const header = tg__map_header(map);
    const int64_t right = tg__utc_offset_now_us();
    const int64_t held = atomic_load_explicit(&header->utc_offset_us, memory_order_relaxed);
    /* One offset for all processes, so that they agree on an aligned window; not followed below a second, or each would
     * write its own reading. The difference is unsigned because `held` may be anything. */
    const uint64_t off = right > held ? (uint64_t)right - (uint64_t)held : (uint64_t)held - (uint64_t)right;
    if (off <= 1000000)
        return 0;
    atomic_store_explicit(&header->utc_offset_us, right, memory_order_relaxed);
    return right < held ? off : 0;
}

/* What nobody has hit since its lease ended. A segment whose lock is held is for the next second. */
static void
sweep_leases(const tg_table *table)
{
    const tg_map *const map = atomic_load_explicit(&table->map, memory_order_relaxed);
    const uint64_t self = tg__lock_self(), now_us = tg__table_now(table);
    for (uint32_t s = 0; s < map->segment_count; s++) {
        const tg_area area = tg__map_area(map, s);
        if (!tg__leases_due(area.segment, now_us))
            continue;
        const tg_lock_outcome outcome = tg__lock_take(area.segment, self, 0);
        if (outcome == TG_LOCK_TIMEOUT)
            continue;
        if (outcome == TG_LOCK_INHERITED)
            tg__segment_recover(&area);
        tg__leases_lapse(&area, now_us);
        tg__lock_release(area.segment, self);
    }
}

void
tg__table_check(tg_table *table, uint64_t real_us)
{
    uint64_t due_us = atomic_load_explicit(&table->check_at_us, memory_order_relaxed);
    const uint64_t next_us = real_us + TG_CHECK_EVERY_US;
    if (real_us < due_us || !atomic_compare_exchange_strong_explicit(&table->check_at_us, &due_us, next_us,
                                                                     memory_order_relaxed, memory_order_relaxed))
        return;
    /* One thread at a time. What a thread of the parent had begun does not hold up a forked child: its word differs. */
    const uint64_t self = tg__lock_self();
    uint64_t other = atomic_load_explicit(&table->checking, memory_order_relaxed);
    if (other == self || !atomic_compare_exchange_strong_explicit(&table->checking, &other, self, memory_order_acquire,
                                                                  memory_order_relaxed))
        return;
    follow_file(table);
    tg__doctor_clock(table, tg__table_follow_utc(atomic_load_explicit(&table->map, memory_order_relaxed)));
    tg__doctor_look(table);
    sweep_leases(table);
    if (atomic_exchange_explicit(&table->crowded, false, memory_order_relaxed) || table->told_full)
        tell_fill(table);
    atomic_store_explicit(&table->checking, 0, memory_order_release);
}

/* ---- rules and counters ---- */

static bool
fits(const tg_map *map, const tg_rule *rule)
{
    const uint64_t blocks = (tg__log_words_max(rule) + TG_BLOCK_WORDS - 1) / TG_BLOCK_WORDS;
    return blocks <= map->blocks / 4;
}

static tg_status
admit(const tg_place *place, const tg_map *map, const tg_rule *rule, tg_error *error)
{
    if (rule->algorithm != TG_SLIDING_LOG || fits(map, rule))
        return TG_OK;
    char text[TG_RULE_TEXT_MAX], size[24], now[24];
    tg_rule_text(rule, text);
    size_text(map->bytes, now);
    for (uint64_t bytes = map->bytes; bytes <= TG_TABLE_BYTES_MAX; bytes *= 2) {
        tg_map larger = { .bytes = 0 };
        tg__map_geometry(&larger, bytes);
        if (!fits(&larger, rule))
            continue;
        size_text(bytes, size);
        return tg__error(error, TG_E_RULE,
                         "rule '%s': its log of up to %" PRIu64 " words is too large for table %s of %s; use "
                         "%s%s?size=%s, a resolution, or sliding_counter",
                         text, tg__log_words_max(rule), place->name, now, place->path ? "shared://" : "memory://",
                         place->name, size);
    }
    return tg__error(error, TG_E_RULE,
                     "rule '%s': its log of up to %" PRIu64 " words is too large for any table; use a resolution, or "
                     "sliding_counter",
                     text, tg__log_words_max(rule));
}

tg_status
tg__table_admit_rule(tg_store *store, const tg_rule *rule, tg_error *error)
{
    const tg_table *const table = tg__table_of(store);
    return admit(&table->place, atomic_load_explicit(&table->map, memory_order_acquire), rule, error);
}

tg_status
tg__table_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error)
{
    tg_store_uri parsed = *uri;
    tg_place place;
    tg_map map = { .bytes = 0 };
    for (size_t i = 0; i < parsed.option_count; i++)
        if (tg__text_is(parsed.options[i].name, "owner") || tg__text_is(parsed.options[i].name, "group"))
            parsed.options[i].value = tg_text_of("0"); /* the names are those of the host that will open it */
    tg_status status = tg__place_parse(&parsed, false, &place, error);
    if (status != TG_OK || !rule)
        goto done;
    tg__map_geometry(&map, place.bytes ? place.bytes : TG_TABLE_BYTES_DEFAULT);
    status = admit(&place, &map, rule, error);
done:
    tg__place_close(&place);
    return status;
}

tg_status
tg__table_stats(tg_store *store, tg_store_stats *stats, tg_error *error)
{
    tg_table *const table = tg__table_of(store);
    const tg_map *const map = atomic_load_explicit(&table->map, memory_order_acquire);
    const uint64_t self = tg__lock_self(), now_us = tg__table_now(table);
    *stats = (tg_store_stats){
        .table_bytes = map->bytes,
        .entries = (uint64_t)map->segment_count * (map->entries + map->overflow),
        .log_blocks = (uint64_t)map->segment_count * map->blocks,
        .timeouts = atomic_load_explicit(&tg__map_header(map)->timeouts, memory_order_relaxed),
    };
    for (uint32_t s = 0; s < map->segment_count; s++) {
        const tg_area area = tg__map_area(map, s);
        for (uint32_t first = 0; first < area.total; first += STATS_ENTRIES) {
            const tg_lock_outcome outcome = tg__lock_take(area.segment, self, table->timeout_us);
            if (outcome == TG_LOCK_TIMEOUT)
                return tg__error(error, TG_E_STORE, "table %s: a lock's holder is stopped", table->place.name);
            if (outcome == TG_LOCK_INHERITED)
                tg__segment_recover(&area);
            if (tg__leases_due(area.segment, now_us))
                tg__leases_lapse(&area, now_us);
            if (first == 0) {
                stats->leases += area.segment->lease_count;
                stats->evicted += area.segment->evicted;
                stats->overflowed += area.segment->overflowed;
                stats->full += area.segment->full;
                stats->owner_deaths += area.segment->owner_deaths;
                stats->log_blocks_used += area.block_count - tg__blocks_left(&area);
            }
            for (uint32_t i = first; i < area.total && i < first + STATS_ENTRIES; i++)
                stats->entries_live +=
                    (area.entries[i].flags & TG_ENTRY_USED) && area.entries[i].fresh_at_us > now_us ? 1 : 0;
            tg__lock_release(area.segment, self);
        }
    }
    stats->keys = stats->entries_live;
    stats->keys_bytes = stats->entries_live * sizeof(tg_entry) + stats->log_blocks_used * sizeof(tg_block);
    return TG_OK;
}
