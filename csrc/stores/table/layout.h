/* The table as it lies in memory that several processes map. docs/table-layout.md draws the same byte by byte; every
 * offset is pinned here. Numbers and offsets only, no pointers: each process maps the file elsewhere. Whatever is
 * read from these structs was perhaps written by another process, dead in the middle of it or broken: an index, a
 * link or a count is bounded before it is used, and what decides anything is first copied out. */
#ifndef TG_TABLE_LAYOUT_H
#define TG_TABLE_LAYOUT_H

#include "algorithms/algorithms.h"

#include <stdatomic.h>
#include <stddef.h>

#define TG_TABLE_LAYOUT 3u /* part of the file's name: another layout is another file */
#define TG_TABLE_LOCK_KIND 1u
#define TG_TABLE_BYTE_ORDER 0x01020304u
#define TG_TABLE_HEADER_BYTES 4096u
#define TG_TABLE_SEGMENTS_MAX 64u
/* A default rule keeps a log of up to 1000 words, which has to fit a quarter of one segment's blocks: not from 64
 * KiB on. */
#define TG_TABLE_SEGMENT_BYTES_MIN (UINT64_C(128) << 10)
#define TG_TABLE_BYTES_MIN (UINT64_C(64) << 10)
#define TG_TABLE_BYTES_MAX (UINT64_C(16) << 30)
#define TG_TABLE_BYTES_DEFAULT (UINT64_C(16) << 20)

#define TG_SET_ENTRIES 8u
#define TG_BLOCK_WORDS 7u
#define TG_BLOCK_NONE UINT32_MAX        /* no block */
#define TG_BLOCK_LOOSE (UINT32_MAX - 1) /* as `previous`, while the arena is rebuilt: belongs to no log yet */
#define TG_UNDO_ENTRIES TG_TARGETS_MAX
#define TG_UNDO_WORDS (3u * TG_TARGETS_MAX) /* the two newest words of each log, and the tag of its lease */
#define TG_LEASES_MAX 1024u /* in one segment, and not more than a quarter of its blocks */

/* ---- entries ---- */

/* The state of a sliding log: where its words lie. The end follows from first_word and words. */
typedef struct tg_log {
    uint64_t units;     /* costs of all words */
    uint32_t first;     /* block of the oldest word; TG_BLOCK_NONE: no block is held */
    uint32_t last;
    uint32_t words;
    uint8_t first_word; /* index of the oldest word in its block, 0..7 */
    uint8_t zero[3];
} tg_log;

#define TG_ENTRY_USED 1u
#define TG_ENTRY_OVERFLOW 2u

typedef struct tg_entry {
    uint64_t key[2];           /* SipHash of the identity XOR the rule's scope */
    uint64_t fresh_at_us;      /* from then on it may be forgotten without loss */
    uint64_t blocked_until_us; /* until then a hit of cost 1 is denied: never forgotten */
    uint16_t share;            /* used of what the rule holds, in 1/65535 */
    uint8_t algorithm;
    uint8_t flags;
    uint32_t leases; /* how many hold units of it */
    union {
        tg_state value;
        tg_log log;
    };
} tg_entry;

_Static_assert(sizeof(tg_state) == 24 && sizeof(tg_log) == 24, "a state is 24 bytes");
_Static_assert(offsetof(tg_entry, key) == 0, "layout");
_Static_assert(offsetof(tg_entry, fresh_at_us) == 16, "layout");
_Static_assert(offsetof(tg_entry, blocked_until_us) == 24, "layout");
_Static_assert(offsetof(tg_entry, share) == 32, "layout");
_Static_assert(offsetof(tg_entry, algorithm) == 34, "layout");
_Static_assert(offsetof(tg_entry, flags) == 35, "layout");
_Static_assert(offsetof(tg_entry, leases) == 36, "layout");
_Static_assert(offsetof(tg_entry, value) == 40 && offsetof(tg_entry, log) == 40, "layout");
_Static_assert(sizeof(tg_entry) == 64, "an entry is 64 bytes: one cache line");
_Static_assert(offsetof(tg_log, units) == 0 && offsetof(tg_log, first) == 8, "layout");
_Static_assert(offsetof(tg_log, last) == 12 && offsetof(tg_log, words) == 16, "layout");
_Static_assert(offsetof(tg_log, first_word) == 20, "layout");

/* ---- log blocks ---- */

/* Words of a log, oldest first: a hit of cost 1 is its time; any other cost is TG_WORD_COST | cost, then the time. A
 * hit of cost 1 that was given back keeps its time with TG_WORD_VOID. A time is its low 62 bits: the rest is that of
 * the reader's clock, from which no time lies 73 000 years away. */
#define TG_WORD_COST (UINT64_C(1) << 63)
#define TG_WORD_VOID (UINT64_C(1) << 62)
#define TG_WORD_TIME (TG_WORD_VOID - 1)

typedef struct tg_block {
    uint64_t words[TG_BLOCK_WORDS];
    uint32_t next; /* newer block; in the free list the next free one */
    uint32_t previous;
} tg_block;

_Static_assert(offsetof(tg_block, next) == 56 && offsetof(tg_block, previous) == 60, "layout");
_Static_assert(sizeof(tg_block) == 64, "a block is one cache line");

/* ---- leases: what was taken on an estimate. Each is one block, in the segment of its entry ----
 *
 * The tag is a word that no log holds (both upper bits). It is written last and taken back first, under the undo record, so a
 * block with a tag is a whole lease at any instant; the list they stand in is made anew after a death. */
#define TG_LEASE_TAG (UINT64_C(0xc1ea5e) << 40) /* the rest: aligned << 35 | algorithm << 32 | index of the entry */
#define TG_LEASE_ALIGNED (UINT64_C(1) << 35)
#define TG_LEASE_TAG_MASK (UINT64_C(0xffffff) << 40)
#define TG_LEASE_COST_BITS 34

typedef enum tg_lease_word {
    TG_LEASE_WORD_TAG,
    TG_LEASE_WORD_ID,     /* the first eight bytes of the reservation's */
    TG_LEASE_WORD_UNTIL,
    TG_LEASE_WORD_STAMP,  /* as a refund needs it */
    TG_LEASE_WORD_COST,   /* upper 30 bits of the entry's key << 34 | units not given back */
    TG_LEASE_WORD_PERIOD,
    TG_LEASE_WORD_RESOLUTION
} tg_lease_word;

/* ---- segments ---- */

typedef struct tg_undo_word {
    uint32_t block, word;
    uint64_t value;
} tg_undo_word;

/* A lock and what it guards. Behind it lie the entries, then the overflow entries, then the log blocks. */
typedef struct tg_segment {
    /* The first line is all that a hit touches here. */
    _Atomic uint64_t lock;       /* lock.h */
    _Atomic uint64_t generation; /* counts holders */
    _Atomic uint64_t stalled;    /* generation + 1 whose holder was found stopped; others then do not wait behind it */
    uint64_t lease_due_us;       /* when the first lease ends; 0: there is none */
    uint32_t undo_entries; /* saved below and not yet settled; 0: nothing is half done */
    uint32_t undo_words;
    uint32_t free_head;   /* blocks given back, linked by `next` */
    uint32_t free_count;
    uint32_t blocks_made; /* blocks below it were in use at some time; the others are still untouched memory */
    uint32_t entries_used;
    uint32_t reclaim_at;    /* where the search for logs to drop goes on */
    uint32_t compact_entry; /* index + 1 of the log being compacted, 0: none */
    uint64_t compact_progress; /* words written << 32 | words read */
    uint64_t evicted, overflowed, full, owner_deaths;
    _Atomic uint64_t stalled_at_us;
    uint32_t lease_first; /* leases by their ends, linked by `next` and `previous` */
    uint32_t lease_last;
    uint32_t lease_count;
    uint32_t zero;
    uint32_t undo_index[TG_UNDO_ENTRIES];
    tg_entry undo_entry[TG_UNDO_ENTRIES];
    tg_undo_word undo_word[TG_UNDO_WORDS];
} tg_segment;

_Static_assert(offsetof(tg_segment, lock) == 0, "layout");
_Static_assert(offsetof(tg_segment, generation) == 8, "layout");
_Static_assert(offsetof(tg_segment, stalled) == 16, "layout");
_Static_assert(offsetof(tg_segment, lease_due_us) == 24, "layout");
_Static_assert(offsetof(tg_segment, undo_entries) == 32, "layout");
_Static_assert(offsetof(tg_segment, undo_words) == 36, "layout");
_Static_assert(offsetof(tg_segment, free_head) == 40, "layout");
_Static_assert(offsetof(tg_segment, free_count) == 44, "layout");
_Static_assert(offsetof(tg_segment, blocks_made) == 48, "layout");
_Static_assert(offsetof(tg_segment, entries_used) == 52, "layout");
_Static_assert(offsetof(tg_segment, reclaim_at) == 56, "layout");
_Static_assert(offsetof(tg_segment, compact_entry) == 60, "layout");
_Static_assert(offsetof(tg_segment, compact_progress) == 64, "layout");
_Static_assert(offsetof(tg_segment, evicted) == 72, "layout");
_Static_assert(offsetof(tg_segment, owner_deaths) == 96, "layout");
_Static_assert(offsetof(tg_segment, stalled_at_us) == 104, "layout");
_Static_assert(offsetof(tg_segment, lease_first) == 112 && offsetof(tg_segment, lease_last) == 116, "layout");
_Static_assert(offsetof(tg_segment, lease_count) == 120, "layout");
_Static_assert(offsetof(tg_segment, undo_index) == 128, "layout");
_Static_assert(offsetof(tg_segment, undo_entry) == 256, "layout");
_Static_assert(offsetof(tg_segment, undo_word) == 2304, "layout");
_Static_assert(sizeof(tg_segment) == 3840, "layout");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock word in shared memory must be lock-free");

/* ---- the header: the file's first page ---- */

typedef struct tg_header_page {
    char magic[8]; /* "tidegate" */
    uint32_t layout;
    uint32_t byte_order;
    uint8_t pointer_bytes;
    uint8_t lock_kind;
    uint8_t manual; /* 1: a manual clock */
    uint8_t zero[5];
    uint64_t table_bytes;
    uint64_t segment_bytes;
    uint32_t segment_count;
    uint32_t entries;  /* of one segment, without the overflow buckets */
    uint32_t overflow; /* of one segment */
    uint32_t blocks;   /* of one segment */
    uint8_t hash_key[16];
    uint8_t check[16]; /* digest of all bytes before it */
    /* What may change while it lives. */
    uint8_t boot_id[16];
    uint64_t time_namespace;
    _Atomic int64_t utc_offset_us;
    _Atomic uint64_t timeouts;
} tg_header_page;

_Static_assert(offsetof(tg_header_page, layout) == 8, "layout");
_Static_assert(offsetof(tg_header_page, byte_order) == 12, "layout");
_Static_assert(offsetof(tg_header_page, pointer_bytes) == 16, "layout");
_Static_assert(offsetof(tg_header_page, lock_kind) == 17, "layout");
_Static_assert(offsetof(tg_header_page, manual) == 18, "layout");
_Static_assert(offsetof(tg_header_page, table_bytes) == 24, "layout");
_Static_assert(offsetof(tg_header_page, segment_bytes) == 32, "layout");
_Static_assert(offsetof(tg_header_page, segment_count) == 40, "layout");
_Static_assert(offsetof(tg_header_page, entries) == 44, "layout");
_Static_assert(offsetof(tg_header_page, overflow) == 48, "layout");
_Static_assert(offsetof(tg_header_page, blocks) == 52, "layout");
_Static_assert(offsetof(tg_header_page, hash_key) == 56, "layout");
_Static_assert(offsetof(tg_header_page, check) == 72, "layout");
_Static_assert(offsetof(tg_header_page, boot_id) == 88, "layout");
_Static_assert(offsetof(tg_header_page, time_namespace) == 104, "layout");
_Static_assert(offsetof(tg_header_page, utc_offset_us) == 112, "layout");
_Static_assert(offsetof(tg_header_page, timeouts) == 120, "layout");
_Static_assert(sizeof(tg_header_page) <= TG_TABLE_HEADER_BYTES, "layout");

/* ---- the side: what operators read and write, at the end of a table with room for it ---- */

#define TG_SIDE_TABLE_BYTES_MIN (UINT64_C(1) << 20) /* a smaller table has no side */
#define TG_METRIC_SHARDS 8u
#define TG_METRIC_SLOTS 128u
#define TG_METRIC_COUNTERS 8u
#define TG_LATENCY_BUCKETS 15u
#define TG_OVERRIDE_SLOTS 64u
#define TG_WATCH_LINES 32u

/* Whose counters these are. Claimed once, never given up: a name is written between `state` 1 and 2, and who dies between
 * costs one slot. */
typedef struct tg_metric_slot {
    char space[TG_NAME_BYTES_MAX]; /* padded with zeros */
    char name[TG_NAME_BYTES_MAX];
    _Atomic uint32_t state;        /* 0: free, 1: being written, 2: stands */
    uint32_t zero[3];
} tg_metric_slot;

/* One line for each slot in each shard: threads of different shards never write the same line. */
typedef struct tg_metric_line {
    _Alignas(64) _Atomic uint64_t counters[TG_METRIC_COUNTERS]; /* by tg_metric */
} tg_metric_line;

/* What an operator has set while everything runs. */
typedef struct tg_override_slot {
    _Atomic uint32_t state; /* counts changes; odd while it is written */
    uint32_t kind;          /* tg_override_kind; 0: free */
    uint64_t until_us;      /* the table's clock */
    char space[TG_NAME_BYTES_MAX];
    char policy[TG_NAME_BYTES_MAX];
    uint8_t identity[16];   /* BLAKE2b-128 of the joint identity; all zero: everybody */
    char rules[96];         /* rule texts, ended by a NUL */
    char shown[112];        /* the identity as people may see it */
    uint64_t zero;
} tg_override_slot;

/* How a policy's answers go, where its `pause_when` asks: core/watch.h says what the words are. */
typedef struct tg_watch_words {
    _Alignas(64) _Atomic uint64_t words[8]; /* TG_WATCH_WORDS */
} tg_watch_words;

typedef struct tg_side {
    _Alignas(64) _Atomic uint64_t overrides_standing; /* how many there were when last one was set; 0: none */
    _Alignas(64) _Atomic uint64_t latency[TG_LATENCY_BUCKETS]; /* how many measured decisions took how long */
    _Atomic uint64_t latency_sum_ns;
    tg_metric_slot slots[TG_METRIC_SLOTS];
    tg_metric_line lines[TG_METRIC_SHARDS][TG_METRIC_SLOTS];
    tg_override_slot overrides[TG_OVERRIDE_SLOTS];
    tg_watch_words watches[TG_WATCH_LINES];
    _Atomic uint32_t watch_owners[TG_WATCH_LINES]; /* a metric slot + 1; 0: free. Never given up, like a slot */
} tg_side;

#define TG_SIDE_BYTES UINT64_C(110592) /* whole pages of 4 KiB */

_Static_assert(sizeof(tg_metric_slot) == 144 && offsetof(tg_metric_slot, state) == 128, "layout");
_Static_assert(sizeof(tg_metric_line) == 64, "layout");
_Static_assert(sizeof(tg_override_slot) == 376 && offsetof(tg_override_slot, identity) == 144, "layout");
_Static_assert(offsetof(tg_side, latency) == 64 && offsetof(tg_side, slots) == 192, "layout");
_Static_assert(offsetof(tg_side, lines) == 18624 && offsetof(tg_side, overrides) == 84160, "layout");
_Static_assert(offsetof(tg_side, watches) == 108224 && offsetof(tg_side, watch_owners) == 110272, "layout");
_Static_assert(sizeof(tg_side) <= TG_SIDE_BYTES, "layout");

#endif
