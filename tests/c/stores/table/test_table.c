/* One decision over several targets, on both kinds of table: what is charged, what is told, what is kept. The
 * numbers of each algorithm are held to the reference by tests/c/replay.c and the shared vectors. */
#include "table_test.h"

#define START_US UINT64_C(1700000000000000)

typedef struct scene {
    tg_clock *clock;
    tg_store *store;
    tg_limiter *limiter;
} scene;

static const char *const kinds[] = { "memory://table-test?size=1MiB", "t?size=1MiB" };

static scene
begin(const char *kind, const char *rules)
{
    unlink(path_of("t"));
    scene now = { .clock = clock_at(START_US) };
    now.store = store_of(kind[0] == 'm' ? kind : uri_of(kind), now.clock);
    now.limiter = limiter_of(now.store, rules);
    return now;
}

static void
end(scene *now)
{
    tg_limiter_close(now->limiter);
    tg_store_close(now->store);
    tg_clock_close(now->clock);
}

#define FOR_BOTH_KINDS for (const char *const *kind = kinds; kind < kinds + 2; kind++)

/* R05 */
static void
every_hit_of_one_microsecond_is_counted(void **state)
{
    (void)state;
    static const char *const rules[] = {
        "3/10s sliding_log", "3/10s fixed_window", "3/10s sliding_counter",
        "3/10s token_bucket", "3/10s leaky_bucket", "3/10s sliding_log resolution 1s",
    };
    FOR_BOTH_KINDS
        for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
            scene now = begin(*kind, rules[r]);
            int admitted = 0;
            for (int i = 0; i < 10; i++)
                admitted += hit(now.limiter, "a");
            assert_int_equal(admitted, 3);
            assert_int_equal(remaining(now.limiter, "a"), 0);
            end(&now);
        }
}

/* R52 */
static void
a_client_that_returns_once_a_period_never_meets_old_counts(void **state)
{
    (void)state;
    static const char *const rules[] = {
        "2/minute sliding_log", "2/minute fixed_window", "2/minute fixed_window aligned",
        "2/minute token_bucket", "2/minute sliding_log resolution 1s",
    };
    FOR_BOTH_KINDS
        for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
            scene now = begin(*kind, rules[r]);
            tg_decision decision;
            for (int turn = 0; turn < 100; turn++) {
                assert_int_equal(ask(now.limiter, HIT, "a", 1, &decision), TG_OK);
                assert_true(decision.allowed);
                assert_int_equal(decision.remaining, 1);
                tg_clock_advance_us(now.clock, MINUTE);
            }
            assert_in_range(stats_of(now.store).log_blocks_used, 0, 2);
            end(&now);
        }
}

static void
all_is_taken_or_nothing_over_keys_in_many_segments(void **state)
{
    (void)state;
    FOR_BOTH_KINDS {
        scene now = begin(*kind, "5/minute fixed_window; 8/hour sliding_log");
        tg_decision decision;
        for (int i = 0; i < 4; i++)
            assert_true(hit(now.limiter, "a"));
        assert_int_equal(ask(now.limiter, HIT, "b c d e f g h a", 2, &decision), TG_OK);
        assert_false(decision.allowed);
        for (size_t i = 0; i < decision.result_count; i++) {
            assert_false(decision.results[i].charged);
            assert_int_equal(decision.results[i].allowed, i != 14);
        }
        assert_int_equal(stats_of(now.store).entries_live, 2);
        assert_int_equal(remaining(now.limiter, "h"), 5);
        assert_int_equal(ask(now.limiter, HIT, "b c d e f g h a", 1, &decision), TG_OK);
        assert_true(decision.allowed);
        assert_int_equal(stats_of(now.store).entries_live, 16);
        assert_int_equal(remaining(now.limiter, "h"), 4);
        assert_int_equal(remaining(now.limiter, "a"), 0);
        end(&now);
    }
}

static void
one_state_named_twice_is_charged_once(void **state)
{
    (void)state;
    FOR_BOTH_KINDS {
        scene now = begin(*kind, "5/minute sliding_log; 5/minute token_bucket");
        tg_decision decision;
        assert_int_equal(ask(now.limiter, HIT, "a b a", 1, &decision), TG_OK);
        assert_true(decision.allowed);
        assert_true(decision.results[0].charged && decision.results[2].charged);
        assert_false(decision.results[4].charged || decision.results[5].charged);
        assert_int_equal(decision.results[4].remaining, 4);
        assert_int_equal(remaining(now.limiter, "a"), 4);
        assert_int_equal(tg_decision_refund(now.store, &decision, NULL), TG_OK);
        assert_int_equal(remaining(now.limiter, "a"), 5);
        end(&now);
    }
}

/* A request that has paid already is judged, and pays no more. */
static void
a_charged_target_is_judged_without_its_own_charge(void **state)
{
    (void)state;
    static const char *const rules[] = { "1/minute sliding_log", "1/minute fixed_window", "1/minute sliding_counter",
                                         "1/minute token_bucket" };
    FOR_BOTH_KINDS
        for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
            scene now = begin(*kind, rules[r]);
            tg_decision decision;
            assert_int_equal(ask(now.limiter, HIT, "a", 1, &decision), TG_OK);
            tg_target target = { .rule = &decision.results[0].rule, .identity = &decision.identities[0], .cost = 1,
                                 .stamp_us = decision.results[0].stamp_us, .charged = true };
            tg_result result = { .allowed = false };
            bool overflow = true;
            assert_int_equal(now.store->ops->apply(now.store, TG_OP_HIT, &target, 1, 0, &result, &overflow, NULL), TG_OK);
            assert_true(result.allowed);
            assert_false(result.charged);
            assert_false(overflow);
            assert_int_equal(result.remaining, 0);
            target.charged = false;
            assert_int_equal(now.store->ops->apply(now.store, TG_OP_HIT, &target, 1, 0, &result, NULL, NULL), TG_OK);
            assert_false(result.allowed);
            end(&now);
        }
}

static void
a_denial_a_peek_and_a_cost_of_nothing_write_nothing(void **state)
{
    (void)state;
    scene now = begin(kinds[1], "1/minute sliding_log; 3/hour token_bucket");
    assert_true(hit(now.limiter, "a"));
    tg_map map = bytes_of(path_of("t"));
    uint8_t *before = malloc(map.bytes);
    memcpy(before, map.base, map.bytes);
    tg_decision decision;
    for (int i = 0; i < 10; i++) {
        assert_int_equal(ask(now.limiter, HIT, "a", 1, &decision), TG_OK);
        assert_false(decision.allowed);
        assert_int_equal(ask(now.limiter, PEEK, "a new one", 1, &decision), TG_OK);
        assert_int_equal(ask(now.limiter, HIT, "another new one", 0, &decision), TG_OK);
        assert_true(decision.allowed);
        assert_int_equal(ask(now.limiter, REFUND, "never seen", 1, NULL), TG_OK);
        tg_clock_advance_us(now.clock, SECOND);
    }
    for (uint32_t s = 0; s < map.segment_count; s++) {
        const tg_area area = tg__map_area(&map, s);
        /* a lock counts its holders; nothing else moves */
        memcpy(before + ((uint8_t *)area.segment - map.base), area.segment, offsetof(tg_segment, undo_entries));
        memcpy(before + ((uint8_t *)area.segment->undo_index - map.base), area.segment->undo_index,
               sizeof(tg_segment) - offsetof(tg_segment, undo_index));
    }
    /* the side behind them counts what was decided, for the operator */
    assert_memory_equal(before, map.base, map.bytes - (tg__map_side(&map) ? TG_SIDE_BYTES : 0));
    free(before);
    munmap(map.base, map.bytes);
    end(&now);
}

static void
a_log_too_large_for_the_table_is_refused_with_a_size_that_does(void **state)
{
    (void)state;
    tg_error error;
    tg_limiter *limiter = NULL;
    scene now = begin(kinds[1], "1/minute");
    const tg_limiter_options options = { .rules = tg_text_of("100000/hour sliding_log") };
    assert_int_equal(tg_limiter_open(now.store, NULL, &options, &limiter, &error), TG_E_RULE);
    const char *size = strstr(error.message, "?size=");
    assert_non_null(size);
    assert_non_null(strstr(error.message, path_of("t")));
    char uri[64];
    snprintf(uri, sizeof uri, "memory://big?size=%.*s", (int)strcspn(size + 6, ", "), size + 6);
    tg_store *big = store_of(uri, now.clock);
    assert_int_equal(tg_limiter_open(big, NULL, &options, &limiter, &error), TG_OK);
    tg_limiter_close(limiter);
    tg_store_close(big);
    const tg_limiter_options never = { .rules = tg_text_of("10000000000/hour sliding_log") };
    assert_int_equal(tg_limiter_open(now.store, NULL, &never, &limiter, &error), TG_E_RULE);
    assert_non_null(strstr(error.message, "any table"));
    end(&now);
}

/* The default rule's largest log fits every table of the default and smaller sizes down to 128 KiB. */
static void
a_thousand_a_period_fit_every_table_from_128_KiB(void **state)
{
    (void)state;
    static const char *const sizes[] = { "128KiB", "256KiB", "500KiB", "1MiB", "4MiB", "7MiB", "16MiB" };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char uri[64];
        snprintf(uri, sizeof uri, "memory://sized?size=%s", sizes[i]);
        tg_store *store = store_of(uri, NULL);
        tg_limiter_close(limiter_of(store, "1000/hour"));
        tg_store_close(store);
    }
}

static void
a_large_refund_of_a_log_gives_back_exactly_its_units(void **state)
{
    (void)state;
    scene now = begin(kinds[1], "1000/hour sliding_log");
    tg_decision decision;
    uint64_t used = 0;
    for (uint64_t i = 0; used < 900; i++) {
        const uint64_t cost = 1 + i % 3;
        assert_int_equal(ask(now.limiter, HIT, "a", cost, &decision), TG_OK);
        assert_true(decision.allowed);
        used += cost;
        tg_clock_advance_us(now.clock, 3);
    }
    assert_int_equal(ask(now.limiter, REFUND, "a", 333, NULL), TG_OK);
    assert_int_equal(remaining(now.limiter, "a"), 1000 - used + 333);
    assert_int_equal(ask(now.limiter, REFUND, "a", 10000, NULL), TG_OK);
    assert_int_equal(remaining(now.limiter, "a"), 1000);
    assert_table_sound(path_of("t"));
    end(&now);
}

static void
a_reset_forgets_and_gives_the_blocks_back(void **state)
{
    (void)state;
    scene now = begin(kinds[1], "1000/hour sliding_log; 2000/day token_bucket");
    for (int i = 0; i < 500; i++)
        assert_true(hit(now.limiter, "a"));
    assert_int_equal(stats_of(now.store).entries_live, 2);
    assert_int_equal(ask(now.limiter, RESET, "a b", 0, NULL), TG_OK);
    assert_int_equal(stats_of(now.store).entries_live, 0);
    assert_int_equal(stats_of(now.store).log_blocks_used, 0);
    assert_int_equal(remaining(now.limiter, "a"), 1000);
    assert_table_sound(path_of("t"));
    end(&now);
}

/* One offset for all, replaced when it is wrong by more than a second; a window never goes down. */
static void
the_offset_to_utc_is_the_headers_and_is_put_right(void **state)
{
    (void)state;
    unlink(path_of("utc"));
    tg_store *store = store_of(uri_of("utc?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "5/day fixed_window aligned");
    struct timespec utc;
    clock_gettime(CLOCK_REALTIME, &utc);
    const int64_t now = (int64_t)tg_store_now_us(store) + tg_store_utc_offset_us(store);
    assert_true(llabs(now / 1000000 - utc.tv_sec) <= 1);
    tg_map map = bytes_of(path_of("utc"));
    tg_header_page *header = tg__map_header(&map);
    const int64_t right = atomic_load(&header->utc_offset_us);
    assert_true(hit(limiter, "a"));
    atomic_store(&header->utc_offset_us, right + 500000); /* half a second: left alone */
    sleep_us(SECOND + 50000);
    assert_true(hit(limiter, "a"));
    assert_true(tg_store_utc_offset_us(store) == right + 500000);
    atomic_store(&header->utc_offset_us, right - (int64_t)(30 * HOUR));
    assert_true(hit(limiter, "a"));
    assert_int_equal(remaining(limiter, "a"), 2); /* yesterday's window is not opened again */
    sleep_us(SECOND + 50000);
    assert_true(hit(limiter, "a"));
    assert_true(llabs(tg_store_utc_offset_us(store) - right) < 100000);
    /* The other way round the clock went back, which is said. */
    tg_notice notice;
    while (tg_notice_take(&notice))
        continue;
    atomic_store(&header->utc_offset_us, right + (int64_t)(2 * HOUR));
    sleep_us(SECOND + 50000);
    assert_true(hit(limiter, "b"));
    assert_true(llabs(tg_store_utc_offset_us(store) - right) < 100000);
    assert_true(tg_notice_take(&notice));
    assert_string_equal(notice.code, "clock-back");
    assert_non_null(strstr(notice.message, "went back by 7200 s"));
    munmap(map.base, map.bytes);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
memory_of_one_name_is_one_table_and_ends_with_its_last_reference(void **state)
{
    (void)state;
    tg_store *first = store_of("memory://one?size=64KiB", NULL), *second = store_of("memory://one?size=64KiB", NULL);
    tg_store *other = store_of("memory://two?size=64KiB", NULL);
    tg_limiter *limiters[] = { limiter_of(first, "2/hour"), limiter_of(second, "2/hour"), limiter_of(other, "2/hour") };
    assert_true(hit(limiters[0], "a"));
    assert_true(hit(limiters[1], "a"));
    assert_false(hit(limiters[0], "a"));
    assert_true(hit(limiters[2], "a"));
    for (size_t i = 0; i < 3; i++)
        tg_limiter_close(limiters[i]);
    tg_store_close(first);
    tg_store_close(second);
    tg_store_close(other);
    first = store_of("memory://one?size=64KiB", NULL);
    limiters[0] = limiter_of(first, "2/hour");
    assert_true(hit(limiters[0], "a"));
    tg_limiter_close(limiters[0]);
    tg_store_close(first);
}

/* Random work of every kind leaves each block in one place. */
static void
blocks_are_neither_lost_nor_shared_whatever_is_done(void **state)
{
    (void)state;
    uint64_t seed = 4711;
    scene now = begin("t?size=128KiB", "9/minute sliding_log; 70/hour sliding_log; 5/30s sliding_log resolution 5s");
    tg_decision decisions[16] = { { .result_count = 0 } };
    for (int i = 0; i < 60000; i++) {
        char keys[32];
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
        const unsigned random = (unsigned)(seed >> 33);
        snprintf(keys, sizeof keys, "k%u k%u", random % 300, random / 7 % 300);
        tg_decision *decision = &decisions[random / 11 % 16];
        switch (random / 13 % 8) {
        case 0:
            ask(now.limiter, REFUND, keys, random % 5, NULL);
            break;
        case 1:
            tg_decision_refund(now.store, decision, NULL);
            break;
        case 2:
            if (random % 9 == 0)
                ask(now.limiter, RESET, keys, 0, NULL);
            break;
        default:
            ask(now.limiter, HIT, keys, random % 7 ? 1 : random / 17 % 4, decision);
        }
        tg_clock_advance_us(now.clock, random % 3000);
        if (i % 500 == 0)
            assert_table_sound(path_of("t"));
    }
    assert_table_sound(path_of("t"));
    assert_true(stats_of(now.store).evicted > 0);
    end(&now);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_hit_of_one_microsecond_is_counted),
        cmocka_unit_test(a_client_that_returns_once_a_period_never_meets_old_counts),
        cmocka_unit_test(all_is_taken_or_nothing_over_keys_in_many_segments),
        cmocka_unit_test(one_state_named_twice_is_charged_once),
        cmocka_unit_test(a_charged_target_is_judged_without_its_own_charge),
        cmocka_unit_test(a_denial_a_peek_and_a_cost_of_nothing_write_nothing),
        cmocka_unit_test(a_log_too_large_for_the_table_is_refused_with_a_size_that_does),
        cmocka_unit_test(a_thousand_a_period_fit_every_table_from_128_KiB),
        cmocka_unit_test(a_large_refund_of_a_log_gives_back_exactly_its_units),
        cmocka_unit_test(a_reset_forgets_and_gives_the_blocks_back),
        cmocka_unit_test(the_offset_to_utc_is_the_headers_and_is_put_right),
        cmocka_unit_test(memory_of_one_name_is_one_table_and_ends_with_its_last_reference),
        cmocka_unit_test(blocks_are_neither_lost_nor_shared_whatever_is_done),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
