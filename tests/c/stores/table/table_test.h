/* What the table's tests share: opening tables in a folder of their own, hits, children, and a look at the bytes
 * from outside. Must not enter: tests. */
#ifndef TG_TABLE_TEST_H
#define TG_TABLE_TEST_H

#include "stores/table/table.h"
#include "tests/c/busy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above first */
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND UINT64_C(1000000)
#define MINUTE (60 * SECOND)
#define HOUR (60 * MINUTE)
#define UNUSED __attribute__((unused))

static char test_folder[64];

/* A folder in memory, so that nobody waits for a disk. */
UNUSED static int
folder_make(void **state)
{
    (void)state;
    const char *where = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(test_folder, sizeof test_folder, "%s/tidegate-test-XXXXXX", where);
    return mkdtemp(test_folder) ? 0 : -1;
}

UNUSED static int
folder_remove(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", test_folder);
    return system(command);
}

/* "shared:///FOLDER/NAME?..." in a buffer that the next call overwrites. */
UNUSED static const char *
uri_of(const char *name_and_options)
{
    static char uri[256];
    snprintf(uri, sizeof uri, "shared://%s/%s", test_folder, name_and_options);
    return uri;
}

UNUSED static const char *
path_of(const char *name)
{
    static char path[192];
    snprintf(path, sizeof path, "%s/%s", test_folder, name);
    return path;
}

UNUSED static tg_store *
store_of(const char *uri, tg_clock *clock)
{
    tg_store *store = NULL;
    tg_error error = { .message = "" };
    const tg_store_options options = { .clock = clock };
    if (tg_store_open(tg_text_of(uri), &options, &store, &error) != TG_OK)
        fail_msg("%s: %s", uri, error.message);
    return store;
}

UNUSED static tg_clock *
clock_at(uint64_t now_us)
{
    tg_clock *clock = NULL;
    assert_int_equal(tg_clock_open(now_us, &clock, NULL), TG_OK);
    return clock;
}

UNUSED static tg_limiter *
limiter_of(tg_store *store, const char *rules)
{
    tg_limiter *limiter = NULL;
    tg_error error = { .message = "" };
    const tg_limiter_options options = { .rules = tg_text_of(rules), .name = tg_text_of("test") };
    if (tg_limiter_open(store, NULL, &options, &limiter, &error) != TG_OK)
        fail_msg("%s: %s", rules, error.message);
    return limiter;
}

typedef enum verb { HIT, PEEK, REFUND, RESET, RESERVE, SETTLE, RENEW } verb;

/* What RESERVE makes, SETTLE makes `cost`, and RENEW renews for `cost` seconds. */
static tg_reservation test_reservation UNUSED;
#define TEST_LEASE (10 * SECOND)

/* One call for up to TG_DIMENSIONS_MAX raw keys, separated by blanks. No assertion: children use it too. */
UNUSED static tg_status
ask(tg_limiter *limiter, verb what, const char *keys, uint64_t cost, tg_decision *decision)
{
    tg_part parts[TG_DIMENSIONS_MAX];
    tg_dimension dimensions[TG_DIMENSIONS_MAX];
    size_t count = 0;
    while (*keys && count < TG_DIMENSIONS_MAX) {
        const size_t length = strcspn(keys, " ");
        parts[count] = (tg_part){ .value = { keys, length } };
        dimensions[count] = (tg_dimension){ &parts[count], 1 };
        count++;
        keys += length + strspn(keys + length, " ");
    }
    switch (what) {
    case HIT:
        return tg_limiter_hit(limiter, dimensions, count, cost, decision, NULL);
    case PEEK:
        return tg_limiter_peek(limiter, dimensions, count, cost, decision, NULL);
    case REFUND:
        return tg_limiter_refund(limiter, dimensions, count, cost, NULL);
    case RESERVE: {
        const tg_status status =
            tg_limiter_reserve(limiter, dimensions, count, cost, TEST_LEASE, &test_reservation, NULL);
        *decision = test_reservation.decision;
        return status;
    }
    case SETTLE:
        return tg_reservation_settle(limiter, &test_reservation, cost, NULL);
    case RENEW:
        return tg_reservation_renew(limiter, &test_reservation, cost * SECOND, NULL);
    default:
        return tg_limiter_reset(limiter, dimensions, count, NULL);
    }
}

/* allowed, by a store that answered */
UNUSED static bool
hit(tg_limiter *limiter, const char *keys)
{
    tg_decision decision;
    return ask(limiter, HIT, keys, 1, &decision) == TG_OK && decision.allowed && !decision.degraded;
}

UNUSED static uint64_t
remaining(tg_limiter *limiter, const char *keys)
{
    tg_decision decision;
    assert_int_equal(ask(limiter, PEEK, keys, 1, &decision), TG_OK);
    assert_false(decision.degraded);
    return decision.remaining;
}

UNUSED static tg_store_stats
stats_of(tg_store *store)
{
    tg_store_stats stats;
    tg_error error = { .message = "" };
    if (tg_store_read_stats(store, &stats, &error) != TG_OK)
        fail_msg("%s", error.message);
    return stats;
}

UNUSED static uint64_t
now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

UNUSED static void
sleep_us(uint64_t us)
{
    const struct timespec pause = { .tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000 };
    nanosleep(&pause, NULL);
}

/* Waits for a child; its exit status, or -signal. */
UNUSED static int
child_end(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* ---- the bytes, from outside ---- */

UNUSED static tg_map
bytes_of(const char *path)
{
    tg_map map = { .bytes = 0 };
    struct stat found;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_int_not_equal(fd, -1);
    assert_int_equal(fstat(fd, &found), 0);
    tg__map_geometry(&map, (uint64_t)found.st_size);
    map.base = mmap(NULL, map.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(map.base, MAP_FAILED);
    close(fd);
    return map;
}

/* Nothing is held, nothing is half done; each block belongs to one log, is a lease, or is free; each log's sum is that of its
 * words; leases stand in their order and are counted in their entries. */
UNUSED static void
assert_table_sound(const char *path)
{
    tg_map map = bytes_of(path);
    for (uint32_t s = 0; s < map.segment_count; s++) {
        const tg_area area = tg__map_area(&map, s);
        const tg_segment *segment = area.segment;
        assert_true(atomic_load(&segment->lock) == 0);
        assert_int_equal(segment->undo_entries, 0);
        assert_int_equal(segment->undo_words, 0);
        assert_int_equal(segment->compact_entry, 0);
        assert_true(segment->blocks_made <= area.block_count);
        uint8_t *claimed = calloc(area.block_count + 1, 1);
        uint32_t count = 0, used = 0;
        for (uint32_t i = 0; i < area.total; i++) {
            const tg_entry *entry = &area.entries[i];
            if (!(entry->flags & TG_ENTRY_USED))
                continue;
            used++;
            if (entry->algorithm != TG_SLIDING_LOG)
                continue;
            const tg_chain chain = tg__log_chain(&entry->log);
            uint32_t block = chain.first, previous = TG_BLOCK_NONE;
            for (uint32_t n = 0; n < chain.count; n++) {
                assert_true(block < segment->blocks_made);
                assert_false(claimed[block]);
                if (n > 0)
                    assert_int_equal(area.blocks[block].previous, previous);
                claimed[block] = 1;
                count++;
                previous = block;
                block = area.blocks[block].next;
            }
            assert_int_equal(previous, entry->log.last);
            tg_log_cursor cursor;
            const tg_log_view view = tg__log_view(&area, &entry->log, 0, &cursor);
            tg_log_entry word;
            uint64_t units = 0;
            while (view.next(view.cursor, &word))
                units = units + word.cost < units ? UINT64_MAX : units + word.cost;
            assert_int_equal(units, entry->log.units);
        }
        assert_int_equal(used, segment->entries_used);
        uint32_t leases = 0, before = TG_BLOCK_NONE;
        uint64_t until_us = 0;
        for (uint32_t lease = segment->lease_first; lease != TG_BLOCK_NONE; lease = area.blocks[lease].next, leases++) {
            assert_true(lease < segment->blocks_made && !claimed[lease]);
            const uint64_t *words = area.blocks[lease].words;
            assert_int_equal(words[TG_LEASE_WORD_TAG] & TG_LEASE_TAG_MASK, TG_LEASE_TAG);
            assert_int_equal(area.blocks[lease].previous, before);
            assert_true(words[TG_LEASE_WORD_UNTIL] >= until_us);
            until_us = words[TG_LEASE_WORD_UNTIL];
            claimed[lease] = 1;
            before = lease;
        }
        assert_int_equal(before, segment->lease_last);
        assert_int_equal(leases, segment->lease_count);
        assert_int_equal(segment->lease_due_us,
                         leases ? area.blocks[segment->lease_first].words[TG_LEASE_WORD_UNTIL] : 0);
        count += leases;
        for (uint32_t i = 0; i < area.total; i++)
            leases -= area.entries[i].flags & TG_ENTRY_USED ? area.entries[i].leases : 0;
        assert_int_equal(leases, 0);
        uint32_t block = segment->free_head, free_blocks = 0;
        for (; free_blocks < segment->free_count; free_blocks++) {
            assert_true(block < segment->blocks_made);
            assert_false(claimed[block]);
            claimed[block] = 1;
            block = area.blocks[block].next;
        }
        assert_int_equal(count + free_blocks, segment->blocks_made);
        free(claimed);
    }
    munmap(map.base, map.bytes);
}

#endif
