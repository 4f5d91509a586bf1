/* Tables smaller than the flood: who is forgotten, who never is, and where newcomers are judged. */
#include "tests/c/stores/table/table_test.h"

#define START_US UINT64_C(1700000000000000)

typedef struct scene {
    tg_clock *clock;
    tg_store *store;
    tg_limiter *limiter;
} scene;

static tg_limiter *
limiter_on_full(tg_store *store, const char *rules, const char *name, tg_on_full on_full)
{
    tg_limiter *limiter = NULL;
    const tg_limiter_options options = { .rules = tg_text_of(rules), .name = tg_text_of(name), .on_full = on_full };
    assert_int_equal(tg_limiter_open(store, NULL, &options, &limiter, NULL), TG_OK);
    return limiter;
}

static scene
begin(const char *rules, const char *name_and_size)
{
    unlink(path_of("t"));
    scene now = { .clock = clock_at(START_US) };
    now.store = store_of(uri_of(name_and_size), now.clock);
    now.limiter = limiter_on_full(now.store, rules, "test", TG_FULL_OVERFLOW);
    return now;
}

static void
end(scene *now)
{
    assert_table_sound(path_of("t"));
    tg_limiter_close(now->limiter);
    tg_store_close(now->store);
    tg_clock_close(now->clock);
}

static bool
hit_number(tg_limiter *limiter, const char *kind, unsigned number, tg_decision *decision)
{
    char key[32];
    snprintf(key, sizeof key, "%s%u", kind, number);
    assert_int_equal(ask(limiter, HIT, key, 1, decision), TG_OK);
    return decision->allowed;
}

/* R94: a victim at its limit, then ten times as many new keys as the table has entries. */
static void
a_key_at_its_limit_stays_denied_through_ten_times_as_many_new_keys(void **state)
{
    (void)state;
    static const char *const rules[] = { "3/minute token_bucket", "3/minute fixed_window", "3/minute sliding_log",
                                         "3/10minute sliding_counter" };
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        scene now = begin(rules[r], "t?size=128KiB");
        tg_decision decision;
        for (int i = 0; i < 3; i++)
            assert_true(hit(now.limiter, "victim"));
        assert_false(hit(now.limiter, "victim"));
        const uint64_t entries = stats_of(now.store).entries;
        for (unsigned i = 0; i < 10 * entries; i++) {
            hit_number(now.limiter, "new", i, &decision);
            if (i % 100 == 0)
                assert_false(hit(now.limiter, "victim"));
        }
        assert_false(hit(now.limiter, "victim"));
        const tg_store_stats stats = stats_of(now.store);
        assert_true(stats.evicted > 5 * entries);
        assert_true(stats.entries_live <= entries);
        end(&now);
    }
}

/* R95 */
static void
known_keys_keep_working_in_a_table_of_blocking_entries_and_newcomers_share_buckets(void **state)
{
    (void)state;
    scene now = begin("2/hour token_bucket", "t?size=128KiB");
    tg_decision decision;
    assert_true(hit(now.limiter, "known")); /* below its limit, but written before the rest */
    const tg_store_stats empty = stats_of(now.store);
    unsigned keys = 0, overflowed = 0;
    for (; keys < 4 * empty.entries; keys++) {
        for (int n = 0; n < 2; n++)
            hit_number(now.limiter, "full", keys, &decision);
        hit_number(now.limiter, "full", keys, &decision); /* denied: blocks */
        assert_false(decision.allowed);
        overflowed += decision.overflow;
        /* The known one is used now and then; no place it could have lost to a blocking one is given back to it. */
        if (keys == 20)
            assert_true(hit(now.limiter, "known"));
    }
    assert_true(overflowed > empty.entries);
    const tg_store_stats stats = stats_of(now.store);
    assert_int_equal(stats.evicted, 0); /* all block: nobody was forgotten */
    assert_true(stats.overflowed >= overflowed);
    assert_false(hit(now.limiter, "known")); /* at its limit, still known */
    for (unsigned i = 0; i < 100; i++)
        assert_false(hit_number(now.limiter, "full", i, &decision));

    /* A newcomer is judged by the rule's own numbers, in a bucket it shares. */
    hit_number(now.limiter, "newcomer", 1, &decision);
    assert_true(decision.overflow);
    assert_int_equal(decision.limit, 2);
    /* An hour later everything is fresh, and newcomers have places of their own again. */
    tg_clock_advance_us(now.clock, HOUR);
    hit_number(now.limiter, "later", 1, &decision);
    assert_true(decision.allowed);
    assert_false(decision.overflow);
    assert_int_equal(decision.remaining, 1);
    end(&now);
}

static void
a_refund_goes_where_the_hit_was_charged_also_when_the_key_has_moved_out_of_its_bucket(void **state)
{
    (void)state;
    scene now = begin("10/hour token_bucket", "t?size=128KiB");
    tg_limiter *closed = limiter_on_full(now.store, "10/hour token_bucket", "test", TG_FULL_CLOSED);
    tg_decision decision, in_bucket, in_place;
    const uint64_t entries = stats_of(now.store).entries;
    char key[32];
    for (unsigned i = 0; i < 4 * entries; i++) { /* takes every place and no bucket */
        snprintf(key, sizeof key, "full%u", i);
        assert_int_equal(ask(closed, HIT, key, 10, &decision), TG_OK);
    }
    unsigned number = 0; /* one that finds no place */
    do {
        snprintf(key, sizeof key, "newcomer%u", number++);
        assert_int_equal(ask(now.limiter, HIT, key, 3, &in_bucket), TG_OK);
    } while (!in_bucket.overflow && number < 10000);
    assert_true(in_bucket.allowed && in_bucket.overflow && in_bucket.results[0].overflow);
    for (unsigned i = 0; i < 4 * entries; i++) {
        char full[32];
        snprintf(full, sizeof full, "full%u", i);
        assert_int_equal(ask(now.limiter, RESET, full, 0, NULL), TG_OK);
    }
    assert_int_equal(ask(now.limiter, HIT, key, 5, &in_place), TG_OK);
    assert_true(in_place.allowed && !in_place.overflow);
    assert_int_equal(tg_decision_refund(now.store, &in_bucket, NULL), TG_OK);
    assert_int_equal(remaining(now.limiter, key), 5); /* what it took lies in the bucket, not here */
    assert_int_equal(tg_decision_refund(now.store, &in_place, NULL), TG_OK);
    assert_int_equal(remaining(now.limiter, key), 10);
    tg_limiter_close(closed);
    end(&now);
}

static void
buckets_of_one_policy_are_at_most_1024(void **state)
{
    (void)state;
    scene now = begin("1/hour fixed_window", "t?size=1MiB");
    tg_decision decision;
    const uint64_t entries = stats_of(now.store).entries;
    for (unsigned i = 0; i < 4 * entries; i++)
        hit_number(now.limiter, "key", i, &decision);
    tg_map map = bytes_of(path_of("t"));
    unsigned buckets = 0;
    for (uint32_t s = 0; s < map.segment_count; s++) {
        const tg_area area = tg__map_area(&map, s);
        for (uint32_t i = area.normal; i < area.total; i++)
            buckets += (area.entries[i].flags & TG_ENTRY_USED) != 0;
    }
    assert_in_range(buckets, 100, 1024);
    munmap(map.base, map.bytes);
    end(&now);
}

static void
on_full_open_lets_newcomers_through_uncharged_and_closed_denies_them(void **state)
{
    (void)state;
    scene now = begin("1/hour fixed_window", "t?size=64KiB");
    tg_limiter *open_one = limiter_on_full(now.store, "1/hour fixed_window", "open", TG_FULL_OPEN);
    tg_limiter *closed = limiter_on_full(now.store, "1/hour fixed_window", "closed", TG_FULL_CLOSED);
    tg_decision decision;
    for (unsigned i = 0; i < 3000; i++)
        hit_number(now.limiter, "key", i, &decision);
    unsigned let = 0, refused = 0;
    for (unsigned i = 0; i < 50; i++) {
        char key[16];
        snprintf(key, sizeof key, "n%u", i);
        for (int n = 0; n < 3; n++) {
            assert_int_equal(ask(open_one, HIT, key, 1, &decision), TG_OK);
            let += decision.allowed;
            if (n == 2 && decision.allowed) {
                assert_false(decision.overflow);
                assert_false(decision.results[0].charged);
                assert_int_equal(decision.remaining, 1);
            }
        }
        assert_int_equal(ask(closed, HIT, key, 1, &decision), TG_OK);
        if (!decision.allowed) {
            refused++;
            assert_int_equal(decision.retry_after_us, SECOND);
        }
    }
    assert_true(let > 140); /* all but those that found a last place */
    assert_true(refused > 45);
    assert_true(stats_of(now.store).full >= 140 + 45);
    tg_limiter_close(open_one);
    tg_limiter_close(closed);
    end(&now);
}

static void
a_peek_of_a_newcomer_answers_as_its_hit_would_and_writes_nothing(void **state)
{
    (void)state;
    scene now = begin("1/hour fixed_window", "t?size=64KiB");
    tg_decision peeked, decision;
    for (unsigned i = 0; i < 3000; i++)
        hit_number(now.limiter, "key", i, &decision);
    const tg_store_stats before = stats_of(now.store);
    for (unsigned i = 0; i < 200; i++) {
        char key[16];
        snprintf(key, sizeof key, "n%u", i);
        assert_int_equal(ask(now.limiter, PEEK, key, 1, &peeked), TG_OK);
    }
    assert_int_equal(stats_of(now.store).overflowed, before.overflowed);
    assert_int_equal(stats_of(now.store).full, before.full);
    assert_int_equal(stats_of(now.store).entries_live, before.entries_live);
    for (unsigned i = 0; i < 200; i++) {
        char key[16];
        snprintf(key, sizeof key, "n%u", i);
        assert_int_equal(ask(now.limiter, PEEK, key, 1, &peeked), TG_OK);
        assert_int_equal(ask(now.limiter, HIT, key, 1, &decision), TG_OK);
        assert_int_equal(peeked.allowed, decision.allowed);
        assert_int_equal(peeked.overflow, decision.overflow);
        assert_int_equal(peeked.retry_after_us, decision.retry_after_us);
    }
    end(&now);
}

static void
the_least_used_and_nearest_to_fresh_is_forgotten_first(void **state)
{
    (void)state;
    scene now = begin("100/hour token_bucket", "t?size=64KiB");
    tg_decision decision;
    /* Heavy users first, then a crowd of light ones that has to push out its own kind. */
    for (unsigned i = 0; i < 40; i++) {
        char key[16];
        snprintf(key, sizeof key, "heavy%u", i);
        assert_int_equal(ask(now.limiter, HIT, key, 60, &decision), TG_OK);
    }
    for (unsigned i = 0; i < 5000; i++)
        hit_number(now.limiter, "light", i, &decision);
    unsigned known = 0;
    for (unsigned i = 0; i < 40; i++) {
        char key[16];
        snprintf(key, sizeof key, "heavy%u", i);
        known += remaining(now.limiter, key) < 50;
    }
    assert_int_equal(known, 40);
    end(&now);
}

/* ---- the log arena ---- */

static void
a_full_arena_takes_blocks_from_logs_that_may_be_forgotten(void **state)
{
    (void)state;
    scene now = begin("500/hour sliding_log", "t?size=128KiB");
    tg_decision decision;
    /* 972 blocks of 7 words hold thirteen such logs; forty come, each up to 400. */
    for (unsigned key = 0; key < 40; key++)
        for (int n = 0; n < 400; n++) {
            hit_number(now.limiter, "key", key, &decision);
            assert_true(decision.allowed);
            assert_false(decision.overflow);
            tg_clock_advance_us(now.clock, 1);
        }
    const tg_store_stats stats = stats_of(now.store);
    assert_true(stats.evicted >= 20);
    assert_true(stats.log_blocks_used <= stats.log_blocks);
    end(&now);
}

static void
an_arena_of_blocking_logs_sends_newcomers_to_coarse_buckets(void **state)
{
    (void)state;
    scene now = begin("500/hour sliding_log", "t?size=128KiB");
    tg_decision decision;
    unsigned blocked = 0;
    for (unsigned key = 0; key < 20; key++) {
        for (int n = 0; n < 500; n++) {
            hit_number(now.limiter, "key", key, &decision);
            tg_clock_advance_us(now.clock, 1);
        }
        blocked += !hit_number(now.limiter, "key", key, &decision) && !decision.overflow;
    }
    assert_in_range(blocked, 5, 20);
    /* Those that block go on blocking. */
    unsigned still = 0;
    for (unsigned key = 0; key < 20; key++)
        still += !hit_number(now.limiter, "key", key, &decision) && !decision.overflow;
    assert_int_equal(still, blocked);
    unsigned admitted = 0;
    for (unsigned key = 0; key < 20; key++) {
        hit_number(now.limiter, "newcomer", key, &decision);
        admitted += decision.allowed;
        assert_true(decision.overflow);
    }
    assert_true(admitted > 0); /* a part of the arena is kept for the buckets */
    assert_true(stats_of(now.store).overflowed >= 20);
    tg_clock_advance_us(now.clock, HOUR);
    for (unsigned key = 0; key < 20; key++) {
        assert_true(hit_number(now.limiter, "key", key, &decision));
        assert_false(decision.overflow);
    }
    end(&now);
}

/* A key that is known keeps its own count when its log cannot grow: to be judged anew elsewhere would double its
 * limit. */
static void
a_log_that_cannot_grow_never_admits_more_than_its_limit(void **state)
{
    (void)state;
    scene now = begin("500/hour sliding_log", "t?size=128KiB");
    tg_decision decision;
    uint64_t admitted[40] = { 0 };
    bool known[40];
    for (unsigned key = 0; key < 40; key++) {
        hit_number(now.limiter, "key", key, &decision);
        admitted[key] += decision.allowed;
        known[key] = !decision.overflow;
    }
    for (int n = 0; n < 600; n++) {
        tg_clock_advance_us(now.clock, SECOND);
        for (unsigned key = 0; key < 40; key++)
            if (known[key])
                admitted[key] += hit_number(now.limiter, "key", key, &decision) && !decision.overflow;
    }
    for (unsigned key = 0; key < 40; key++)
        assert_true(known[key] && admitted[key] == 500);
    end(&now);
}

/* The one word such a log has left stands at the end of its block, where it cannot grow in place. */
static void
a_log_with_one_hit_left_at_its_blocks_end_counts_on_in_a_full_arena(void **state)
{
    (void)state;
    scene now = begin("500/hour sliding_log", "t?size=128KiB");
    tg_limiter *quick = limiter_on_full(now.store, "100/minute sliding_log", "quick", TG_FULL_OVERFLOW);
    tg_decision decision;
    for (unsigned key = 0; key < 20; key++)
        hit_number(now.limiter, "key", key, &decision);
    for (int n = 0; n < 6; n++)
        assert_true(hit(quick, "client"));
    tg_clock_advance_us(now.clock, 30 * SECOND);
    assert_true(hit(quick, "client")); /* the seventh word of its block */
    for (int n = 0; n < 500; n++)
        for (unsigned key = 0; key < 20; key++)
            hit_number(now.limiter, "key", key, &decision);
    tg_clock_advance_us(now.clock, 31 * SECOND);
    unsigned admitted = 1;
    for (int n = 0; n < 300; n++) {
        assert_int_equal(ask(quick, HIT, "client", 1, &decision), TG_OK);
        assert_false(decision.overflow);
        admitted += decision.allowed;
    }
    assert_int_equal(admitted, 100);
    tg_limiter_close(quick);
    end(&now);
}

static void
hits_that_are_given_back_do_not_fill_the_arena(void **state)
{
    (void)state;
    scene now = begin("50/hour sliding_log", "t?size=64KiB");
    tg_decision older, newer;
    for (int i = 0; i < 20000; i++) {
        assert_int_equal(ask(now.limiter, HIT, "a", i % 4 == 0 ? 3 : 1, &older), TG_OK);
        tg_clock_advance_us(now.clock, 1);
        assert_int_equal(ask(now.limiter, HIT, "a", 1, &newer), TG_OK);
        tg_clock_advance_us(now.clock, 1);
        assert_true(older.allowed && newer.allowed);
        assert_int_equal(tg_decision_refund(now.store, &older, NULL), TG_OK);
        assert_int_equal(tg_decision_refund(now.store, &newer, NULL), TG_OK);
    }
    assert_int_equal(remaining(now.limiter, "a"), 50);
    assert_in_range(stats_of(now.store).log_blocks_used, 1, 11); /* 50 + 6 + 14 words */
    end(&now);
}

static void
a_logged_hit_takes_at_most_sixteen_bytes(void **state)
{
    (void)state;
    scene now = begin("1000/hour sliding_log", "t?size=1MiB");
    for (int n = 0; n < 1000; n++)
        assert_true(hit(now.limiter, "a"));
    assert_true(stats_of(now.store).log_blocks_used * 64 <= 1000 * 16);
    end(&now);
}

/* ---- words to the operator ---- */

static void
one_notice_at_80_percent_names_the_size_that_would_fit(void **state)
{
    (void)state;
    tg_notice notice;
    while (tg_notice_take(&notice))
        continue;
    scene now = begin("100/hour token_bucket", "t?size=128KiB");
    tg_decision decision;
    unsigned told = 0;
    for (unsigned i = 0; i < 20000; i++) {
        hit_number(now.limiter, "key", i, &decision);
        if (i % 5000 == 4999)
            sleep_us(SECOND + 50000); /* the check is once a second */
    }
    hit_number(now.limiter, "last", 1, &decision);
    while (tg_notice_take(&notice)) {
        if (strcmp(notice.code, "table-near-full") != 0)
            continue;
        told++;
        assert_non_null(strstr(notice.message, "size=256KiB"));
    }
    assert_int_equal(told, 1);
    end(&now);
}

static void
keys_and_the_memory_they_take_are_told_exactly_and_go_as_they_are_fresh(void **state)
{
    (void)state;
    scene now = begin("60/minute token_bucket", "t?size=1MiB");
    tg_limiter *logs = limiter_on_full(now.store, "200/minute sliding_log", "logs", TG_FULL_OVERFLOW);
    tg_decision decision;
    assert_true(stats_of(now.store).keys == 0 && stats_of(now.store).keys_bytes == 0);
    for (unsigned i = 0; i < 100; i++) {
        assert_true(hit_number(now.limiter, "bucket", i, &decision));
        assert_true(hit_number(now.limiter, "bucket", i, &decision));
    }
    assert_int_equal(stats_of(now.store).keys, 100);
    assert_int_equal(stats_of(now.store).keys_bytes, 100 * sizeof(tg_entry));
    for (unsigned i = 0; i < 200; i++)
        assert_true(hit_number(logs, "log", 0, &decision));
    assert_int_equal(stats_of(now.store).keys, 101);
    const uint64_t of_log = stats_of(now.store).keys_bytes - 101 * sizeof(tg_entry);
    assert_in_range(of_log, 200 * 8, 200 * 16); /* what is written of 16 bytes a hit */
    tg_clock_advance_us(now.clock, UINT64_C(2000000)); /* two units a bucket: drained */
    assert_int_equal(stats_of(now.store).keys, 1);
    tg_clock_advance_us(now.clock, UINT64_C(60000000));
    assert_int_equal(stats_of(now.store).keys, 0);
    tg_limiter_close(logs);
    end(&now);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_key_at_its_limit_stays_denied_through_ten_times_as_many_new_keys),
        cmocka_unit_test(known_keys_keep_working_in_a_table_of_blocking_entries_and_newcomers_share_buckets),
        cmocka_unit_test(a_refund_goes_where_the_hit_was_charged_also_when_the_key_has_moved_out_of_its_bucket),
        cmocka_unit_test(buckets_of_one_policy_are_at_most_1024),
        cmocka_unit_test(on_full_open_lets_newcomers_through_uncharged_and_closed_denies_them),
        cmocka_unit_test(a_peek_of_a_newcomer_answers_as_its_hit_would_and_writes_nothing),
        cmocka_unit_test(the_least_used_and_nearest_to_fresh_is_forgotten_first),
        cmocka_unit_test(a_full_arena_takes_blocks_from_logs_that_may_be_forgotten),
        cmocka_unit_test(an_arena_of_blocking_logs_sends_newcomers_to_coarse_buckets),
        cmocka_unit_test(a_log_that_cannot_grow_never_admits_more_than_its_limit),
        cmocka_unit_test(a_log_with_one_hit_left_at_its_blocks_end_counts_on_in_a_full_arena),
        cmocka_unit_test(hits_that_are_given_back_do_not_fill_the_arena),
        cmocka_unit_test(keys_and_the_memory_they_take_are_told_exactly_and_go_as_they_are_fresh),
        cmocka_unit_test(a_logged_hit_takes_at_most_sixteen_bytes),
        cmocka_unit_test(one_notice_at_80_percent_names_the_size_that_would_fit),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
