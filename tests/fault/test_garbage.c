/* Whatever stands in the mapping, a hit neither crashes nor hangs: random bytes are written over a table in use. */
#include "tests/c/stores/table/table_test.h"

static uint64_t seed = 88172645463325252u;

static uint64_t
next_random(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

typedef struct scene {
    tg_clock *clock;
    tg_store *store;
    tg_limiter *limiter;
    tg_map map;
} scene;

static scene
begin(const char *rules)
{
    unlink(path_of("t"));
    scene now = { .clock = clock_at(1700000000 * SECOND) };
    const tg_store_options options = { .clock = now.clock, .timeout_us = 1000 };
    assert_int_equal(tg_store_open(tg_text_of(uri_of("t?size=128KiB")), &options, &now.store, NULL), TG_OK);
    now.limiter = limiter_of(now.store, rules);
    now.map = bytes_of(path_of("t"));
    return now;
}

static void
end(scene *now)
{
    munmap(now->map.base, now->map.bytes);
    tg_limiter_close(now->limiter);
    tg_store_close(now->store);
    tg_clock_close(now->clock);
}

/* Every operation on a few keys. Only that it comes back is asked; how long it took is returned. */
static uint64_t
use(scene *now)
{
    tg_decision decision;
    char keys[32];
    const uint64_t begun = now_us();
    for (int i = 0; i < 40; i++) {
        const unsigned key = (unsigned)(next_random() % 20);
        snprintf(keys, sizeof keys, "k%u k%u", key, key + 1);
        const uint64_t cost = next_random() % 4;
        switch (next_random() % 8) {
        case 0:
            ask(now->limiter, PEEK, keys, cost, &decision);
            break;
        case 1:
            ask(now->limiter, REFUND, keys, cost, NULL);
            break;
        case 2:
            ask(now->limiter, RESET, keys, 0, NULL);
            break;
        case 3:
            if (ask(now->limiter, HIT, keys, cost, &decision) == TG_OK && !decision.degraded)
                tg_decision_refund(now->store, &decision, NULL);
            break;
        default:
            ask(now->limiter, HIT, keys, cost, &decision);
        }
        tg_clock_advance_us(now->clock, next_random() % (20 * SECOND));
    }
    return now_us() - begun;
}

static const char *const every_algorithm =
    "5/minute sliding_log; 40/hour sliding_log resolution 1m; 9/minute fixed_window; 9/10s fixed_window aligned; "
    "9/minute sliding_counter; 9/minute token_bucket; 9/minute leaky_bucket";

/* All but the lock words, of which a wrong one is a holder elsewhere and costs a second: test_stopped.c. */
static void
any_bytes_in_entries_and_blocks_neither_crash_nor_hang(void **state)
{
    (void)state;
    scene now = begin(every_algorithm);
    const size_t from = TG_TABLE_HEADER_BYTES + 32; /* behind lock, generation, stalled */
    for (int round = 0; round < 3000; round++) {
        const size_t bytes = 1 + next_random() % 4096;
        size_t at = from + next_random() % (now.map.bytes - from - bytes);
        for (size_t i = 0; i < bytes; i++, at++)
            now.map.base[at] = (uint8_t)next_random();
        assert_true(use(&now) < 2 * SECOND);
    }
    tg_store_stats stats;
    assert_int_equal(tg_store_read_stats(now.store, &stats, NULL), TG_OK);
    end(&now);
}

/* Plausible numbers reach further than random ones: links that form circles, blocks in two logs, counts that
 * disagree. */
static void
circles_and_shared_blocks_are_walked_to_an_end(void **state)
{
    (void)state;
    scene now = begin(every_algorithm);
    const tg_area area = tg__map_area(&now.map, 0);
    for (int round = 0; round < 3000; round++) {
        use(&now);
        for (int i = 0; i < 200; i++) {
            const uint32_t made = area.segment->blocks_made < area.block_count ? area.segment->blocks_made + 1 : 1;
            tg_block *block = &area.blocks[next_random() % made];
            if (next_random() % 2)
                block->next = (uint32_t)(next_random() % made);
            else
                block->previous = (uint32_t)(next_random() % made);
        }
        for (uint32_t i = 0; i < area.total; i++) {
            tg_entry *entry = &area.entries[i];
            if (!(entry->flags & TG_ENTRY_USED) || entry->algorithm != TG_SLIDING_LOG || next_random() % 4)
                continue;
            switch (next_random() % 4) {
            case 0:
                entry->log.words = (uint32_t)(next_random() % (area.block_count * 8));
                break;
            case 1:
                entry->log.first = (uint32_t)(next_random() % (area.block_count + 1));
                break;
            case 2:
                entry->log.last = (uint32_t)(next_random() % (area.block_count + 1));
                break;
            default:
                entry->log.first_word = (uint8_t)(next_random() % 9);
            }
        }
        if (round % 10 == 0) {
            /* and a death on top: the recovery reads all of it */
            area.segment->undo_entries = (uint32_t)next_random() % 40;
            area.segment->undo_words = (uint32_t)next_random() % 80;
            area.segment->compact_entry = (uint32_t)(next_random() % (area.total + 2));
            area.segment->compact_progress = next_random() % 16 << 32 | next_random() % 64;
            atomic_store(&area.segment->lock, (tg__lock_self() ^ UINT64_C(1) << 24)); /* us with another start time */
        }
        assert_true(use(&now) < 2 * SECOND);
    }
    end(&now);
}

/* A recovery makes a damaged arena sound again. */
static void
a_recovery_leaves_a_sound_table_whatever_it_found(void **state)
{
    (void)state;
    scene now = begin("5/minute sliding_log; 40/hour sliding_log");
    const tg_area area = tg__map_area(&now.map, 0);
    for (int round = 0; round < 500; round++) {
        use(&now);
        for (int i = 0; i < 300; i++) {
            uint8_t *at = (uint8_t *)area.entries + next_random() % (area.total * 64 + area.block_count * 64);
            *at = (uint8_t)next_random();
        }
        for (uint32_t i = 0; i < area.total; i++)
            area.entries[i].flags &= TG_ENTRY_USED | TG_ENTRY_OVERFLOW;
        atomic_store(&area.segment->lock, (tg__lock_self() ^ UINT64_C(1) << 24));
        assert_int_equal(stats_of(now.store).table_bytes, 128 << 10); /* takes the lock, recovers */
        assert_table_sound(path_of("t"));
    }
    end(&now);
}

/* Any lock word: a live process, a dead one, one of another namespace, nobody. */
static void
any_lock_word_gives_way_in_bounded_time(void **state)
{
    (void)state;
    scene now = begin("1000/hour fixed_window");
    tg_segment *segment = tg__map_area(&now.map, 0).segment;
    tg_decision decision;
    for (int round = 0; round < 12; round++) {
        uint64_t word = next_random();
        if (round % 3 == 0)
            word = (word & ((UINT64_C(1) << 43) - 1)) | tg__lock_self() >> 43 << 43;
        atomic_store(&segment->lock, word);
        atomic_store(&segment->stalled, round % 2 ? atomic_load(&segment->generation) + 1 : next_random());
        atomic_store(&segment->stalled_at_us, next_random());
        const uint64_t begun = now_us();
        assert_int_equal(ask(now.limiter, HIT, "a", 1, &decision), TG_OK);
        assert_true(now_us() - begun < 3 * SECOND);
    }
    atomic_store(&segment->lock, 0);
    assert_int_equal(ask(now.limiter, HIT, "a", 1, &decision), TG_OK);
    assert_false(decision.degraded);
    end(&now);
}

/* The offset to UTC lies in the header for everybody to write; until the look around once a second has put it right, it is
 * what aligned windows are found by. */
static void
any_offset_to_utc_gives_an_answer(void **state)
{
    (void)state;
    static const int64_t offsets[] = { INT64_MIN, INT64_MIN + 1, -1, 0, 1, INT64_MAX - 1, INT64_MAX };
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=128KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "9/10s fixed_window aligned; 9/week aligned");
    tg_map map = bytes_of(path_of("t"));
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        char key[8];
        snprintf(key, sizeof key, "k%zu", i);
        tg_decision decision;
        atomic_store(&tg__map_header(&map)->utc_offset_us, offsets[i]);
        assert_int_equal(ask(limiter, HIT, key, 1, &decision), TG_OK);
        assert_true(decision.allowed && !decision.degraded);
        assert_int_equal(tg_decision_refund(store, &decision, NULL), TG_OK);
        assert_int_equal(ask(limiter, REFUND, key, 1, NULL), TG_OK);
        assert_int_equal(ask(limiter, PEEK, "k0", 9, &decision), TG_OK);
    }
    munmap(map.base, map.bytes);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_bytes_in_entries_and_blocks_neither_crash_nor_hang),
        cmocka_unit_test(circles_and_shared_blocks_are_walked_to_an_end),
        cmocka_unit_test(a_recovery_leaves_a_sound_table_whatever_it_found),
        cmocka_unit_test(any_lock_word_gives_way_in_bounded_time),
        cmocka_unit_test(any_offset_to_utc_gives_an_answer),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
