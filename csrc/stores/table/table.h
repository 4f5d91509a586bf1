/* What the files of the table share: one mapping of the file, one segment of it, and who does what.
 * Read layout.h first. Must not enter: URIs as people write them (open.c has them), requests, policies. */
#ifndef TG_TABLE_H
#define TG_TABLE_H

#include "layout.h"
#include "lock.h"
#include "stores/store.h"

#include <sys/types.h>

/* ---- one mapping ---- */

/* The geometry is checked once, when the file is opened, and then never read from shared memory again. */
typedef struct tg_map {
    uint8_t *base;
    size_t bytes;
    size_t segment_bytes;
    uint32_t segment_count;
    uint32_t entries;  /* of one segment; multiples of TG_SET_ENTRIES */
    uint32_t overflow;
    uint32_t blocks;
    uint8_t hash_key[16];
    bool manual;
    dev_t device; /* where the file was; 0 for memory:// */
    ino_t inode;
    struct tg_map *older; /* mappings given up for a replaced file: freed with the store */
} tg_map;

/* Fills the geometry for a table of `bytes`. */
void tg__map_geometry(tg_map *map, uint64_t bytes);

static inline tg_header_page *
tg__map_header(const tg_map *map)
{
    return (tg_header_page *)(void *)map->base;
}

/* NULL: the table is too small to have one. */
static inline tg_side *
tg__map_side(const tg_map *map)
{
    return map->bytes >= TG_SIDE_TABLE_BYTES_MIN ? (tg_side *)(void *)(map->base + (map->bytes - TG_SIDE_BYTES)) : NULL;
}

/* One segment, with bounds. */
typedef struct tg_area {
    tg_segment *segment;
    tg_entry *entries; /* `normal` of them, then the overflow buckets up to `total` */
    tg_block *blocks;
    uint32_t normal, total, block_count;
} tg_area;

static inline tg_area
tg__map_area(const tg_map *map, uint32_t index)
{
    uint8_t *const base = map->base + TG_TABLE_HEADER_BYTES + (size_t)index * map->segment_bytes;
    const uint32_t total = map->entries + map->overflow;
    return (tg_area){
        .segment = (tg_segment *)(void *)base,
        .entries = (tg_entry *)(void *)(base + sizeof(tg_segment)),
        .blocks = (tg_block *)(void *)(base + sizeof(tg_segment) + (size_t)total * sizeof(tg_entry)),
        .normal = map->entries,
        .total = total,
        .block_count = map->blocks,
    };
}

/* Copies an entry out of shared memory so that what is checked is what is used: without the barrier a compiler may read
 * the original a second time. */
static inline void
tg__entry_read(const tg_entry *shared, tg_entry *copy)
{
    *copy = *shared;
    __asm__ volatile("" : "+m"(*copy));
}

/* Keeps stores in the order written. The reader of a dead holder's segment learns of the death through the kernel,
 * which orders everything the dead one stored; so only the compiler has to be held. */
static inline void
tg__in_order(void)
{
    atomic_signal_fence(memory_order_seq_cst);
}

/* ---- tests stop or kill a process at every step of the write path ---- */

#ifdef TG_TEST_HOOKS
extern void (*tg__table_hook)(const char *step);
extern bool tg__table_no_tmpfile; /* open.c: as on a file system without O_TMPFILE */
#define TG_STEP(name)                                                                                                  \
    do {                                                                                                               \
        if (tg__table_hook)                                                                                            \
            tg__table_hook(name);                                                                                      \
    } while (0)
#else
#define TG_STEP(name) ((void)0)
#endif

/* ---- undo.c: nothing stays half done ---- */

/* Saves an entry or a word before it is changed. Room is sure: TG_UNDO_* is what one call can change at most; undo_full
 * tells a refund of many hits when to settle. */
void tg__undo_save_entry(const tg_area *area, uint32_t index);
void tg__undo_save_word(const tg_area *area, uint32_t block, uint32_t word);
bool tg__undo_words_full(const tg_area *area);
/* What was written since stands. */
static inline void
tg__undo_settle(const tg_area *area)
{
    tg__in_order();
    area->segment->undo_entries = 0;
    area->segment->undo_words = 0;
    tg__in_order();
}
/* The holder died: puts back what it had saved, carries on what cannot be put back, and makes the arena's lists
 * anew. Called with the lock. May itself be cut short by death at any point. */
void tg__segment_recover(const tg_area *area);

/* ---- log.c: the words of a sliding log ---- */

typedef struct tg_log_cursor {
    const tg_area *area;
    uint32_t block, word; /* of the next word */
    uint32_t left;        /* words not read yet */
    uint64_t now_us;      /* what makes a word a whole time again */
} tg_log_cursor;

/* A view for tg__log_decide; `cursor` is its memory. A log that breaks off ends there. */
tg_log_view tg__log_view(const tg_area *area, const tg_log *log, uint64_t now_us, tg_log_cursor *cursor);
/* The log of an entry, made harmless: counts and links inside the arena. */
void tg__log_check(const tg_area *area, tg_log *log);
/* Whether a change may need one more block than the log has. */
bool tg__log_grows(const tg_log *log, const tg_log_change *change);

/* Blocks to be given back once the change stands. */
typedef struct tg_chain {
    uint32_t first, count;
} tg_chain;

/* Whether a hit can go into the place of the newest words, where no block is left. */
bool tg__log_squeezes(const tg_log *log);
/* Does a change: words go where the log's old end was or beyond (saved where something is overwritten), with
 * `squeezed` or without a block left into its newest words; `log` becomes the new state for the caller to store;
 * `loose` the blocks it no longer needs. false: no place, the log's words are as they were. */
bool tg__log_apply(const tg_area *area, tg_log *log, const tg_log_change *change, bool squeezed, tg_chain *loose);
/* Gives units back by the reference's order, at most as many as one undo record holds words; returns what of `cost` is
 * still to be given. The caller stores *log, settles, and calls again while *more. */
uint64_t tg__log_refund(const tg_area *area, const tg_rule *rule, tg_log *log, uint64_t now_us, uint64_t cost, bool own,
                        uint64_t stamp_us, bool *changed, bool *more);
/* Drops what holds a place but counts nothing. The log of entry `index` is rewritten in place; a death inside it is
 * carried on by tg__segment_recover. The undo record must be empty. */
void tg__log_compact(const tg_area *area, uint32_t index);
void tg__log_compact_resume(const tg_area *area);
/* All blocks of a log. */
tg_chain tg__log_chain(const tg_log *log);
/* A free block, or TG_BLOCK_NONE. */
uint32_t tg__block_take(const tg_area *area);
void tg__chain_free(const tg_area *area, tg_chain chain);
/* Blocks that a new log or a growing one could still get. */
static inline uint32_t
tg__blocks_left(const tg_area *area)
{
    const uint32_t written = area->segment->blocks_made, spare = area->segment->free_count;
    const uint32_t made = written < area->block_count ? written : area->block_count;
    return area->block_count - made + (spare <= made ? spare : 0);
}

/* ---- lease.c: units taken on an estimate. All with the lock ---- */

typedef struct tg_lease_terms {
    uint64_t id, until_us, stamp_us, cost;
} tg_lease_terms;

/* Whether so many leases have room, beside blocks that logs of the same call may need. */
bool tg__lease_room(const tg_area *area, uint32_t count, uint32_t blocks_beside);
/* As part of a call that has saved the entry and is yet to settle. Returns its block. */
uint32_t tg__lease_add(const tg_area *area, uint32_t index, const tg_rule *rule, const tg_lease_terms *terms);
/* The index of the entry that the lease at `place` is of; TG_BLOCK_NONE: there is no such lease. */
uint32_t tg__lease_find(const tg_area *area, uint32_t place, uint64_t id);
/* The undo record is empty before and after. */
void tg__lease_end(const tg_area *area, uint32_t block, uint64_t given, uint64_t now_us);
void tg__lease_renew(const tg_area *area, uint32_t block, uint64_t until_us);
void tg__leases_lapse(const tg_area *area, uint64_t now_us);
void tg__leases_forget(const tg_area *area, uint32_t index, const uint64_t key[2]);
void tg__leases_rebuild(const tg_area *area, uint32_t made);
/* Whether some have ended: two instructions of a hit. */
static inline bool
tg__leases_due(const tg_segment *segment, uint64_t now_us)
{
    return *(const volatile uint64_t *)&segment->lease_due_us - 1 < now_us; /* 0: none */
}

/* ---- open.c: finding, trusting and making the file ---- */

typedef struct tg_place {
    char *path;           /* NULL: memory:// */
    char *name;           /* as in the URI, for messages */
    uint64_t bytes;       /* wanted; 0: what the file has, or the default */
    unsigned mode;
    bool has_group;
    gid_t group;
    uid_t owners[8];
    size_t owner_count;
    bool manual;
    bool existing;        /* never make it */
} tg_place;

tg_status tg__place_parse(const tg_store_uri *uri, bool manual, tg_place *place, tg_error *error);
void tg__place_close(tg_place *place);
/* Opens the table of a place, or makes it. */
tg_status tg__map_open(const tg_place *place, tg_map **map, tg_error *error);
void tg__map_close(tg_map *map);
/* Whether the path still leads to this file. */
bool tg__map_current(const tg_place *place, const tg_map *map);
int64_t tg__utc_offset_now_us(void);

/* ---- one open table ---- */

#define TG_CHECK_EVERY_US UINT64_C(1000000)

typedef struct tg_table {
    tg_store base;
    _Atomic(tg_map *) map;
    tg_place place;
    tg_clock *clock; /* kept alive by store.c */
    uint64_t timeout_us;
    _Atomic uint64_t check_at_us;
    _Atomic uint64_t checking; /* the process (tg__lock_self) one of whose threads is in the once-a-second check */
    _Atomic bool crowded;      /* since the last check something was forgotten or had no room */
    struct tg_metric_names *_Atomic metric_names; /* metrics.c */
    _Atomic uint64_t told_leases_us; /* when it was last said that there is no room for another; 0: never */
    bool told_full;            /* only used inside the check */
    bool told_lost;
    bool told_alone;
    long opened_by; /* pid: those forked from it share a memory store with it */
} tg_table;

static inline tg_table *
tg__table_of(tg_store *store)
{
    return (tg_table *)store; /* `base` is its first member */
}

static inline uint64_t
tg__table_now(const tg_table *table)
{
    return __builtin_expect(table->clock != NULL, 0) ? tg_clock_now_us(table->clock) : tg__boot_now_us();
}

static inline int64_t
tg__table_offset(const tg_map *map)
{
    if (map->manual)
        return 0;
    const int64_t offset_us = atomic_load_explicit(&tg__map_header(map)->utc_offset_us, memory_order_relaxed);
    return offset_us == INT64_MIN ? -INT64_MAX : offset_us; /* damaged; its negative has to be a number too */
}

/* ---- upkeep.c: what is done beside decisions ---- */

/* The look around; the call that comes first after a second does it, after its locks are released. */
void tg__table_check(tg_table *table, uint64_t real_us);
/* Returns by how much the system's clock went back, where this call found it; else 0. */
uint64_t tg__table_follow_utc(const tg_map *map);
tg_status tg__table_admit_rule(tg_store *store, const tg_rule *rule, tg_error *error);
tg_status tg__table_stats(tg_store *store, tg_store_stats *stats, tg_error *error);

/* ---- metrics.c: counters for the operator ---- */

const tg_metric_name *tg__table_metric_name(tg_store *store, const char *space, const char *name);
_Atomic uint64_t *tg__table_metric_line(tg_store *store, const tg_metric_name *name);
_Atomic uint64_t *tg__table_watch_line(tg_store *store, const tg_metric_name *name);
void tg__table_latency_add(tg_store *store, uint64_t latency_ns);
tg_status tg__table_metrics(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count,
                            tg_latency_metrics *latency, tg_error *error);
/* Before another mapping comes into force: finds the names' slots in it. */
void tg__metrics_follow(tg_table *table, const tg_map *map);
void tg__metrics_close(tg_table *table);

/* ---- doctor.c: what is amiss around the table, said once ---- */

void tg__doctor_look(tg_table *table);
void tg__doctor_clock(const tg_table *table, uint64_t back_us);

/* ---- overrides.c ---- */

tg_status tg__table_override_set(tg_store *store, const tg_override *override, tg_error *error);
tg_status tg__table_override_list(tg_store *store, const char *space, const char *policy, const uint8_t identity[16],
                                  tg_override *overrides, size_t room, size_t *count, tg_error *error);
/* Where judges look whether any stands. */
void tg__overrides_follow(tg_table *table, const tg_map *map);

#endif
