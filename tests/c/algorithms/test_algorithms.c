/* What the shared vectors and the reference cannot say: the corners of the numbers, damaged state, what a full table is
 * told, and what a log may hold. */
#include "pure.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define SECOND UINT64_C(1000000)
#define DAY (86400 * SECOND)
#define WEEK (7 * DAY)
#define NOW_MAX (UINT64_C(1) << 63)

static const tg_algorithm value_algorithms[] = {
    TG_FIXED_WINDOW, TG_SLIDING_COUNTER, TG_TOKEN_BUCKET, TG_LEAKY_BUCKET,
};
#define VALUE_ALGORITHMS (sizeof value_algorithms / sizeof *value_algorithms)

/* A generator of our own: the same numbers on every machine, seeded in each test. */
static uint64_t seed;

static uint64_t
random_bits(void)
{
    seed += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t mixed = seed;
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ (mixed >> 31);
}

static uint64_t
random_below(uint64_t bound)
{
    return random_bits() % bound;
}

/* Small numbers as likely as large ones; 1..most. */
static uint64_t
random_size(uint64_t most)
{
    const uint64_t number = random_bits() >> random_below(64);
    return 1 + number % most;
}

static tg_rule
rule_of(const char *text)
{
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    assert_int_equal(tg_rules_parse(tg_text_of(text), TG_ALGORITHM_DEFAULT, rules, &count, NULL), TG_OK);
    assert_int_equal(count, 1);
    return rules[0];
}

static tg_rule
random_rule(tg_algorithm algorithm)
{
    tg_rule rule = {
        .limit = random_size(TG_LIMIT_MAX),
        .period_us = TG_PERIOD_US_MIN * random_size(TG_PERIOD_US_MAX / TG_PERIOD_US_MIN),
        .algorithm = (uint8_t)algorithm,
    };
    const bool bucket = algorithm == TG_TOKEN_BUCKET || algorithm == TG_LEAKY_BUCKET;
    rule.burst = bucket && random_below(2) ? random_size(TG_LIMIT_MAX) : rule.limit;
    return rule;
}

/* Field by field: what lies between them is not part of the answer. */
static void
assert_same(const tg_verdict *a, const tg_verdict *b)
{
    assert_int_equal(a->allowed, b->allowed);
    assert_int_equal(a->remaining, b->remaining);
    assert_int_equal(a->retry_after_us, b->retry_after_us);
    assert_int_equal(a->reset_after_us, b->reset_after_us);
    assert_int_equal(a->delay_us, b->delay_us);
    assert_int_equal(a->stamp_us, b->stamp_us);
}

/* ---- every algorithm whose state is numbers ---- */

static void
a_reported_wait_passes_then_and_not_a_microsecond_earlier(void **unused)
{
    (void)unused;
    seed = 1;
    unsigned denials = 0;
    for (unsigned round = 0; round < 200000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        tg_state state = { .counter = { 0, 0, 0 } }, next;
        uint64_t now_us = random_size(NOW_MAX / 2);
        tg_verdict verdict = { .allowed = true };
        uint64_t cost = 1;
        for (unsigned hit = 0; verdict.allowed && hit < 12; hit++) {
            cost = random_below(3) ? random_size(rule.burst) : rule.burst;
            verdict = tg__decide(&rule, &state, now_us, cost, &next);
            state = next;
            now_us += verdict.allowed ? random_below(rule.period_us / 4 + 1) : 0;
        }
        if (verdict.allowed || verdict.retry_after_us >= TG_WAIT_US_MAX)
            continue;
        denials++;
        assert_true(verdict.retry_after_us > 0);
        const tg_verdict early = tg__decide(&rule, &state, now_us + verdict.retry_after_us - 1, cost, &next);
        assert_false(early.allowed);
        assert_int_equal(early.retry_after_us, 1);
        assert_true(tg__decide(&rule, &state, now_us + verdict.retry_after_us, cost, &next).allowed);
    }
    assert_true(denials > 50000);
}

static void
so_many_pass_as_remaining_says_and_not_one_more(void **unused)
{
    (void)unused;
    seed = 2;
    for (unsigned round = 0; round < 100000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        tg_state state = { .counter = { 0, 0, 0 } }, next;
        uint64_t now_us = random_size(NOW_MAX / 2);
        for (unsigned hit = 0; hit < 4; hit++) {
            tg__decide(&rule, &state, now_us, random_size(rule.burst), &state);
            now_us += random_below(rule.period_us);
        }
        const uint64_t remaining = tg__decide(&rule, &state, now_us, 0, &next).remaining;
        assert_true(tg__decide(&rule, &state, now_us, remaining, &next).allowed);
        assert_false(tg__decide(&rule, &state, now_us, remaining + 1, &next).allowed);
    }
}

static void
a_reset_is_the_first_instant_at_which_the_state_equals_a_fresh_one(void **unused)
{
    (void)unused;
    seed = 3;
    for (unsigned round = 0; round < 100000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        tg_state state = { .counter = { 0, 0, 0 } }, next;
        const uint64_t now_us = random_size(NOW_MAX / 2);
        const tg_verdict verdict = tg__decide(&rule, &state, now_us, random_size(rule.burst), &state);
        assert_true(verdict.allowed);
        if (verdict.reset_after_us >= TG_WAIT_US_MAX)
            continue;
        const uint64_t then_us = now_us + verdict.reset_after_us;
        assert_int_equal(tg__decide(&rule, &state, then_us, 0, &next).reset_after_us, 0);
        assert_int_equal(tg__decide(&rule, &state, then_us - 1, 0, &next).reset_after_us, 1);
        assert_int_equal(tg__decide(&rule, &state, then_us, 0, &next).remaining, rule.burst);
        assert_true(tg__pressure(&rule, &state, then_us - 1).fresh_at_us == then_us);
        assert_true(tg__pressure(&rule, &state, then_us).fresh_at_us <= then_us);
    }
}

static void
a_denied_hit_a_look_and_a_cost_of_0_leave_every_bit_of_the_state(void **unused)
{
    (void)unused;
    seed = 4;
    for (unsigned round = 0; round < 100000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        const tg_state state = { .counter = { random_size(UINT64_MAX), random_size(UINT64_MAX), random_below(3) } };
        tg_state next;
        assert_true(tg__decide(&rule, &state, random_bits(), 0, &next).allowed);
        assert_memory_equal(&next, &state, sizeof state);
        assert_false(tg__decide(&rule, &state, random_bits(), rule.burst + 1, &next).allowed);
        assert_memory_equal(&next, &state, sizeof state);
    }
}

static void
a_refund_of_what_was_taken_gives_the_same_answers_as_before(void **unused)
{
    (void)unused;
    seed = 5;
    for (unsigned round = 0; round < 100000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        tg_state before = { .counter = { 0, 0, 0 } }, after, given, next;
        const uint64_t now_us = random_size(NOW_MAX / 2);
        tg__decide(&rule, &before, now_us, random_size(rule.burst), &before); /* so that a window runs */
        const uint64_t cost = random_size(rule.burst);
        const tg_verdict taken = tg__decide(&rule, &before, now_us, cost, &after);
        if (!taken.allowed)
            continue;
        assert_true(tg__refund(&rule, &after, now_us, cost, true, taken.stamp_us, &given));
        const tg_verdict now = tg__decide(&rule, &given, now_us, 1, &next);
        const tg_verdict then = tg__decide(&rule, &before, now_us, 1, &next);
        assert_same(&now, &then);
    }
}

static void
a_charge_of_this_very_request_is_judged_as_if_it_were_not_there(void **unused)
{
    (void)unused;
    seed = 6;
    for (unsigned round = 0; round < 100000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        tg_state before = { .counter = { 0, 0, 0 } }, after, next;
        const uint64_t now_us = random_size(NOW_MAX / 2);
        tg__decide(&rule, &before, now_us, random_size(rule.burst), &before);
        const uint64_t cost = random_size(rule.burst);
        if (!tg__decide(&rule, &before, now_us, cost, &after).allowed)
            continue;
        const tg_verdict charged = tg__decide_charged(&rule, &after, now_us, cost);
        const tg_verdict direct = tg__decide(&rule, &before, now_us, cost, &next);
        assert_same(&charged, &direct);
    }
    /* With other numbers than those it was charged under: 8 of 10 used, 3 of them by this request, asked under 6. */
    for (size_t i = 0; i < VALUE_ALGORITHMS; i++) {
        tg_rule wide = { .limit = 10, .burst = 10, .period_us = SECOND, .algorithm = (uint8_t)value_algorithms[i] };
        tg_rule narrow = wide;
        narrow.limit = narrow.burst = 6;
        tg_state state = { .counter = { 0, 0, 0 } };
        tg__decide(&wide, &state, 5 * SECOND, 5, &state);
        tg__decide(&wide, &state, 5 * SECOND, 3, &state);
        assert_false(tg__decide_charged(&narrow, &state, 5 * SECOND, 3).allowed);
        assert_true(tg__decide_charged(&wide, &state, 5 * SECOND, 3).allowed);
        assert_int_equal(tg__decide_charged(&wide, &state, 5 * SECOND, 3).remaining, 2);
        narrow.limit = narrow.burst = 8;
        assert_true(tg__decide_charged(&narrow, &state, 5 * SECOND, 3).allowed);
        assert_int_equal(tg__decide_charged(&narrow, &state, 5 * SECOND, 3).remaining, 0);
    }
}

static void
a_blocking_state_says_until_when_and_a_hit_of_1_passes_then(void **unused)
{
    (void)unused;
    seed = 7;
    unsigned blocking = 0;
    for (unsigned round = 0; round < 200000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        tg_state state = { .counter = { 0, 0, 0 } }, next;
        uint64_t now_us = random_size(NOW_MAX / 2);
        for (unsigned hit = 0; hit < 3; hit++) {
            const uint64_t left = tg__decide(&rule, &state, now_us, 0, &next).remaining;
            tg__decide(&rule, &state, now_us, random_below(2) ? left : left / 2, &state);
            now_us += random_below(rule.period_us / 8 + 1);
        }
        const tg_verdict one = tg__decide(&rule, &state, now_us, 1, &next);
        const tg_pressure pressure = tg__pressure(&rule, &state, now_us);
        assert_int_equal(pressure.blocked_until_us != 0, !one.allowed);
        if (one.allowed)
            continue;
        blocking++;
        assert_int_equal(pressure.blocked_until_us, now_us + one.retry_after_us);
        assert_true(pressure.share > 0);
    }
    assert_true(blocking > 50000);
}

static void
the_share_used_is_rounded_up_and_full_only_when_nothing_is_left(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < VALUE_ALGORITHMS; i++) {
        tg_rule rule = { .limit = 10, .burst = 10, .period_us = SECOND, .algorithm = (uint8_t)value_algorithms[i] };
        tg_state state = { .counter = { 0, 0, 0 } };
        assert_int_equal(tg__pressure(&rule, &state, 0).share, 0);
        tg__decide(&rule, &state, 0, 5, &state);
        assert_int_equal(tg__pressure(&rule, &state, 0).share, 32768); /* 32767.5 */
        tg__decide(&rule, &state, 0, 5, &state);
        assert_int_equal(tg__pressure(&rule, &state, 0).share, 65535);
        rule.limit = rule.burst = TG_LIMIT_MAX; /* now almost nothing of a huge rule */
        rule.period_us = TG_PERIOD_US_MAX;
        state = (tg_state){ .counter = { 0, 0, 0 } };
        tg__decide(&rule, &state, 0, 1, &state);
        assert_int_equal(tg__pressure(&rule, &state, 0).share, 1);
    }
}

/* ---- corners ---- */

static void
a_refund_on_a_fresh_state_changes_nothing(void **unused)
{
    (void)unused;
    seed = 13;
    for (unsigned round = 0; round < 20000; round++) {
        const tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        tg_state state = { .counter = { 0, 0, 0 } }, next;
        const uint64_t now_us = random_size(NOW_MAX / 2);
        assert_false(tg__refund(&rule, &state, now_us, random_size(TG_LIMIT_MAX), false, 0, &next));
        const tg_verdict verdict = tg__decide(&rule, &state, now_us, random_size(rule.burst), &state);
        if (verdict.reset_after_us == TG_WAIT_US_MAX)
            continue;
        const uint64_t fresh_us = now_us + verdict.reset_after_us;
        assert_false(tg__refund(&rule, &state, fresh_us, 1, true, verdict.stamp_us, &next));
        assert_memory_equal(&next, &state, sizeof state);
    }
}

static void
the_largest_limit_burst_cost_period_and_clock_do_not_overflow(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < VALUE_ALGORITHMS; i++) {
        for (unsigned small_limit = 0; small_limit < 2; small_limit++) {
            tg_rule rule = {
                .limit = TG_LIMIT_MAX, .burst = TG_LIMIT_MAX, .period_us = TG_PERIOD_US_MAX,
                .algorithm = (uint8_t)value_algorithms[i],
            };
            const bool bucket = rule.algorithm == TG_TOKEN_BUCKET || rule.algorithm == TG_LEAKY_BUCKET;
            if (small_limit && bucket)
                rule.limit = 1; /* draining it takes 10^11 years: reported as 2^53 - 1 us */
            tg_state state = { .counter = { 0, 0, 0 } }, next;
            const uint64_t now_us = NOW_MAX - 1;
            tg_verdict verdict = tg__decide(&rule, &state, now_us, TG_LIMIT_MAX, &state);
            assert_true(verdict.allowed);
            assert_int_equal(verdict.remaining, 0);
            assert_true(verdict.reset_after_us > 0 && verdict.reset_after_us <= TG_WAIT_US_MAX);
            verdict = tg__decide(&rule, &state, now_us, 1, &next);
            assert_false(verdict.allowed);
            assert_true(verdict.retry_after_us > 0 && verdict.retry_after_us <= TG_WAIT_US_MAX);
            verdict = tg__decide(&rule, &state, now_us, TG_LIMIT_MAX, &next);
            assert_false(verdict.allowed);
            if (small_limit && bucket)
                assert_int_equal(verdict.retry_after_us, TG_WAIT_US_MAX);
            assert_int_equal(tg__decide(&rule, &state, now_us, TG_LIMIT_MAX + 1, &next).retry_after_us, TG_NEVER);
        }
    }
}

static void
a_count_at_its_types_maximum_refuses_and_goes_on_refusing(void **unused)
{
    (void)unused;
    tg_state full = { .fixed = { UINT64_MAX, 5 * SECOND, 1 } }, next;
    const tg_rule fixed = rule_of("10/minute fixed_window");
    assert_false(tg__decide(&fixed, &full, 6 * SECOND, 1, &next).allowed);
    assert_false(tg__decide(&fixed, &next, 6 * SECOND, 1, &next).allowed);
    full = (tg_state){ .counter = { 0, UINT64_MAX, UINT64_MAX } };
    const tg_rule counter = rule_of("10/minute sliding_counter");
    assert_false(tg__decide(&counter, &full, 6 * SECOND, 1, &next).allowed);
    assert_false(tg__decide(&counter, &next, 6 * SECOND, 1, &next).allowed);
    full = (tg_state){ .bucket = { UINT64_MAX, UINT64_MAX, 5 * SECOND } };
    const tg_rule bucket = rule_of("10/minute token_bucket");
    assert_false(tg__decide(&bucket, &full, 6 * SECOND, 1, &next).allowed);
    assert_false(tg__decide(&bucket, &next, 6 * SECOND, 1, &next).allowed);
}

static void
any_bits_as_state_give_an_answer_in_bounds(void **unused)
{
    (void)unused;
    seed = 8;
    for (unsigned round = 0; round < 400000; round++) {
        tg_rule rule = random_rule(value_algorithms[round % VALUE_ALGORITHMS]);
        rule.aligned = rule.algorithm == TG_FIXED_WINDOW && random_below(2);
        tg_state state, next;
        uint64_t words[3] = { random_bits() >> random_below(64), random_bits() >> random_below(64), random_bits() };
        words[2] = random_below(2) ? words[2] >> random_below(64) : random_below(3);
        memcpy(&state, words, sizeof state);
        const uint64_t now_us = random_bits() >> random_below(64);
        const uint64_t cost = random_below(2) ? random_size(TG_LIMIT_MAX) : random_bits();
        const tg_verdict verdict = tg__decide(&rule, &state, now_us, cost, &next);
        assert_true(verdict.allowed ? verdict.retry_after_us == 0 : verdict.retry_after_us > 0);
        assert_true(verdict.retry_after_us <= TG_WAIT_US_MAX || verdict.retry_after_us == TG_NEVER);
        assert_true(verdict.reset_after_us <= TG_WAIT_US_MAX);
        assert_true(verdict.remaining <= rule.burst);
        if (!verdict.allowed)
            assert_memory_equal(&next, &state, sizeof state);
        tg__pressure(&rule, &state, now_us);
        tg__decide_charged(&rule, &state, now_us, cost);
        tg__refund(&rule, &state, now_us, cost, random_below(2), random_bits() >> random_below(64), &next);
        /* What came of it is a state like any other. */
        assert_true(tg__decide(&rule, &next, now_us, 0, &state).reset_after_us <= TG_WAIT_US_MAX);
    }
}

static void
deny_refuses_all_costs_and_keeps_no_state(void **unused)
{
    (void)unused;
    const tg_rule rule = rule_of("deny");
    const tg_state fresh = { .counter = { 0, 0, 0 } };
    tg_state next = { .counter = { 1, 1, 1 } };
    for (uint64_t cost = 0; cost < 3; cost++) {
        const tg_verdict verdict = tg__decide(&rule, &fresh, 5, cost, &next);
        assert_false(verdict.allowed);
        assert_int_equal(verdict.remaining, 0);
        assert_int_equal(verdict.retry_after_us, TG_NEVER);
        assert_int_equal(verdict.reset_after_us, 0);
        assert_memory_equal(&next, &fresh, sizeof next);
        assert_false(tg__refund(&rule, &fresh, 5, cost, false, 0, &next));
        assert_false(tg__decide_charged(&rule, &fresh, 5, cost).allowed);
    }
    assert_int_equal(tg__pressure(&rule, &fresh, 5).share, 0);
}

static void
an_aligned_window_starts_at_a_multiple_of_its_period_and_a_week_on_monday(void **unused)
{
    (void)unused;
    assert_int_equal(tg__aligned_start_us(60 * SECOND, 119 * SECOND), 60 * SECOND);
    assert_int_equal(tg__aligned_start_us(60 * SECOND, 120 * SECOND), 120 * SECOND);
    assert_int_equal(tg__aligned_start_us(WEEK, 4 * DAY), 4 * DAY); /* Monday 5 January 1970 */
    assert_int_equal(tg__aligned_start_us(WEEK, 11 * DAY - 1), 4 * DAY);
    assert_int_equal(tg__aligned_start_us(WEEK, 11 * DAY), 11 * DAY);
    assert_int_equal(tg__aligned_start_us(WEEK, 0), -3 * DAY); /* two's complement */
    assert_int_equal(tg__aligned_start_us(2 * WEEK, 4 * DAY - 1), -10 * DAY);
    assert_int_equal(tg__aligned_start_us(WEEK, UINT64_C(1700000000) * SECOND), UINT64_C(1699833600) * SECOND);
    /* 1 700 000 000 is a Tuesday; its Monday is 13 November 2023, 1 699 833 600 */
}

static void
an_aligned_window_does_not_go_back_when_the_clocks_offset_does(void **unused)
{
    (void)unused;
    const tg_rule rule = rule_of("1/minute aligned");
    tg_state state = { .fixed = { 0, 0, 0 } };
    const uint64_t noon_us = UINT64_C(1700000040) * SECOND; /* the beginning of a minute */
    assert_true(tg__decide(&rule, &state, noon_us + 5, 1, &state).allowed);
    /* UTC is found to be an hour earlier: the window that was entered is still the one that counts */
    const tg_verdict back = tg__decide(&rule, &state, noon_us - 3600 * SECOND, 1, &state);
    assert_false(back.allowed);
    assert_int_equal(back.retry_after_us, 60 * SECOND);
}

static void
a_window_of_the_other_clock_has_ended_and_locks_nobody_out(void **unused)
{
    (void)unused;
    const tg_rule aligned = rule_of("1/minute aligned"), plain = rule_of("1/minute fixed_window");
    tg_state state = { .fixed = { 0, 0, 0 } };
    const uint64_t utc_us = UINT64_C(1700000000) * SECOND, boot_us = 1000 * SECOND;
    assert_true(tg__decide(&aligned, &state, utc_us, 1, &state).allowed);
    assert_true(tg__decide(&plain, &state, boot_us, 1, &state).allowed); /* the rule ceased to be aligned */
    assert_false(tg__decide(&plain, &state, boot_us, 1, &state).allowed);
    assert_true(tg__decide(&aligned, &state, utc_us, 1, &state).allowed); /* and is again */
}

static void
a_bucket_drains_to_the_same_level_in_one_step_and_in_many(void **unused)
{
    (void)unused;
    seed = 9;
    for (unsigned round = 0; round < 20000; round++) {
        const tg_rule rule = random_rule(TG_TOKEN_BUCKET);
        tg_state steps = { .bucket = { 0, 0, 0 } }, once;
        tg__decide(&rule, &steps, 0, rule.burst, &steps);
        once = steps;
        uint64_t now_us = 0;
        for (unsigned i = 0; i < 10; i++) {
            now_us += random_below(rule.period_us / rule.limit + 3);
            tg__refund(&rule, &steps, now_us, 0, false, 0, &steps); /* writes the drained level */
        }
        tg_state next;
        const tg_verdict in_steps = tg__decide(&rule, &steps, now_us, 1, &next);
        const tg_verdict at_once = tg__decide(&rule, &once, now_us, 1, &next);
        assert_same(&in_steps, &at_once);
    }
}

static void
a_fixed_window_passes_twice_its_limit_across_an_edge_and_the_others_do_not(void **unused)
{
    (void)unused;
    static const struct {
        const char *rule;
        uint64_t passes;
    } cases[] = { /* 60 at 59 s, then as many as go at 61 s */
        { "60/minute fixed_window aligned", 60 }, { "60/minute sliding_counter", 1 }, { "60/minute token_bucket", 2 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const tg_rule rule = rule_of(cases[i].rule);
        tg_state state = { .counter = { 0, 0, 0 } };
        assert_true(tg__decide(&rule, &state, 59 * SECOND, 60, &state).allowed);
        uint64_t passed = 0;
        while (tg__decide(&rule, &state, 61 * SECOND, 1, &state).allowed)
            passed++;
        assert_int_equal(passed, cases[i].passes);
    }
}

/* ---- the log ---- */

static tg_verdict
log_hit(pure_state *state, const tg_rule *rule, uint64_t now_us, uint64_t cost)
{
    return pure_decide(state, rule, now_us, cost, (tg_terms){ 0 }, true);
}

/* A view that counts how many entries are read. */
typedef struct counting {
    pure_cursor cursor;
    size_t reads;
} counting;

static bool
count_next(void *cursor, tg_log_entry *entry)
{
    counting *counted = cursor;
    counted->reads++;
    return pure_next(&counted->cursor, entry);
}

static size_t
reads_of_a_hit(const pure_state *state, const tg_rule *rule, uint64_t now_us, bool *allowed)
{
    counting counted = { .reads = 0 };
    tg_log_view view = pure_view(state, &counted.cursor);
    view.cursor = &counted;
    view.next = count_next;
    tg_log_change change;
    *allowed = tg__log_decide(rule, &view, now_us, 1, 0, &change).allowed;
    return counted.reads;
}

static void
an_allowed_hit_reads_one_entry_more_than_it_drops_and_a_denied_one_stops_at_its_room(void **unused)
{
    (void)unused;
    const tg_rule rule = rule_of("1000/10s sliding_log");
    pure_state state;
    pure_blank(&state, &rule, "k");
    bool allowed;
    for (uint64_t i = 0; i < 999; i++)
        log_hit(&state, &rule, i, 1);
    assert_int_equal(reads_of_a_hit(&state, &rule, 1000, &allowed), 1);
    assert_true(allowed);
    log_hit(&state, &rule, 1000, 1);
    assert_true(reads_of_a_hit(&state, &rule, 1001, &allowed) <= 2);
    assert_false(allowed);
    assert_int_equal(reads_of_a_hit(&state, &rule, 10 * SECOND + 499, &allowed), 501); /* 500 have left */
    assert_true(allowed);
    free(state.entries);
}

static void
the_logs_bound_holds_for_every_sequence_of_hits(void **unused)
{
    (void)unused;
    seed = 10;
    static const char *const rules[] = {
        "7/100ms sliding_log",
        "50/100ms sliding_log resolution 7ms",
        "50/100ms sliding_log resolution 100ms",
        "1000/100ms sliding_log resolution 1ms",
        "5/100ms sliding_log resolution 30ms",
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const tg_rule rule = rule_of(rules[i]);
        pure_state state;
        pure_blank(&state, &rule, "k");
        uint64_t now_us = 0, most_entries = 0, most_words = 0;
        for (unsigned hit = 0; hit < 20000; hit++) {
            now_us += random_below(hit % 2000 < 1000 ? 1000 : 40000); /* crowded, then spread over the period */
            log_hit(&state, &rule, now_us, 1 + random_below(2) * random_below(2));
            uint64_t words = 0;
            for (size_t j = state.first; j < state.end; j++)
                words += state.entries[j].cost == 1 ? 1 : 2;
            most_entries = most_entries > state.end - state.first ? most_entries : state.end - state.first;
            most_words = most_words > words ? most_words : words;
        }
        assert_true(most_entries <= tg__log_entries_max(&rule));
        assert_true(most_words <= tg__log_words_max(&rule));
        assert_true(2 * most_entries >= tg__log_entries_max(&rule)); /* and is not idly large */
        free(state.entries);
    }
    const tg_rule huge = rule_of("10000000000/year sliding_log");
    assert_int_equal(tg__log_words_max(&huge), TG_LIMIT_MAX);
}

static void
a_resolution_never_admits_more_than_the_exact_log(void **unused)
{
    (void)unused;
    seed = 11;
    const tg_rule merged = rule_of("20/100ms sliding_log resolution 10ms");
    pure_state state;
    pure_blank(&state, &merged, "k");
    static uint64_t stamps[40000];
    size_t count = 0, oldest = 0;
    uint64_t now_us = 0;
    for (unsigned hit = 0; hit < 40000; hit++) {
        now_us += random_below(8000);
        if (!log_hit(&state, &merged, now_us, 1).allowed)
            continue;
        stamps[count++] = now_us;
        while (stamps[oldest] + merged.period_us <= now_us)
            oldest++;
        assert_true(count - oldest <= merged.limit);
    }
    assert_true(count > 5000);
    free(state.entries);
}

static void
a_log_says_until_when_it_blocks_and_when_it_is_fresh(void **unused)
{
    (void)unused;
    const tg_rule rule = rule_of("3/10s sliding_log");
    pure_state state;
    pure_blank(&state, &rule, "k");
    pure_cursor cursor;
    tg_log_view view = pure_view(&state, &cursor);
    assert_int_equal(tg__log_pressure(&rule, &view, 5).fresh_at_us, 0);
    log_hit(&state, &rule, 1 * SECOND, 1);
    log_hit(&state, &rule, 2 * SECOND, 1);
    view = pure_view(&state, &cursor);
    tg_pressure pressure = tg__log_pressure(&rule, &view, 3 * SECOND);
    assert_int_equal(pressure.blocked_until_us, 0);
    assert_int_equal(pressure.fresh_at_us, 12 * SECOND);
    assert_int_equal(pressure.share, 43690);
    log_hit(&state, &rule, 3 * SECOND, 1);
    view = pure_view(&state, &cursor);
    pressure = tg__log_pressure(&rule, &view, 3 * SECOND);
    assert_int_equal(pressure.blocked_until_us, 11 * SECOND);
    assert_int_equal(pressure.fresh_at_us, 13 * SECOND);
    assert_int_equal(pressure.share, 65535);
    pure_log_refund(&state, &rule, 3 * SECOND, 1, true, 3 * SECOND); /* the newest keeps its place, counts nothing */
    view = pure_view(&state, &cursor);
    pressure = tg__log_pressure(&rule, &view, 3 * SECOND);
    assert_int_equal(pressure.blocked_until_us, 0);
    assert_int_equal(pressure.fresh_at_us, 12 * SECOND);
    view = pure_view(&state, &cursor);
    assert_int_equal(tg__log_pressure(&rule, &view, 12 * SECOND).share, 0);
    free(state.entries);
}

static void
a_logs_own_charge_of_this_request_does_not_count(void **unused)
{
    (void)unused;
    const tg_rule wide = rule_of("10/10s sliding_log"), narrow = rule_of("6/10s sliding_log");
    pure_state state;
    pure_blank(&state, &wide, "k");
    log_hit(&state, &wide, 1 * SECOND, 4);
    log_hit(&state, &wide, 2 * SECOND, 2);
    log_hit(&state, &wide, 3 * SECOND, 2); /* this request */
    pure_cursor cursor;
    tg_log_change change;
    tg_log_view view = pure_view(&state, &cursor);
    tg_verdict verdict = tg__log_decide(&wide, &view, 3 * SECOND, 2, 2, &change);
    assert_true(verdict.allowed);
    assert_int_equal(verdict.remaining, 2);
    assert_int_equal(verdict.reset_after_us, 10 * SECOND);
    view = pure_view(&state, &cursor);
    verdict = tg__log_decide(&narrow, &view, 3 * SECOND, 2, 2, &change);
    assert_false(verdict.allowed); /* 6 of others and 2 more: fits when the 4 have left */
    assert_int_equal(verdict.remaining, 0);
    assert_int_equal(verdict.retry_after_us, 8 * SECOND);
    assert_int_equal(verdict.reset_after_us, 9 * SECOND); /* of the others' last */
    free(state.entries);
}

static void
a_damaged_log_gives_an_answer_in_bounds(void **unused)
{
    (void)unused;
    seed = 12;
    for (unsigned round = 0; round < 100000; round++) {
        tg_rule rule = random_rule(TG_SLIDING_LOG);
        rule.resolution_us = random_below(2) ? 0 : TG_PERIOD_US_MIN;
        tg_log_entry entries[6];
        for (size_t i = 0; i < 6; i++)
            entries[i] = (tg_log_entry){ random_bits() >> random_below(64), random_bits() >> random_below(64) };
        const uint64_t units = random_bits() >> random_below(64);
        const pure_state state = { .entries = entries, .end = random_below(7), .units = units };
        pure_cursor cursor;
        tg_log_view view = pure_view(&state, &cursor);
        view.empty = view.empty || random_below(8) == 0;
        const uint64_t now_us = random_bits() >> random_below(64), cost = random_bits() >> random_below(64);
        tg_log_change change;
        const tg_verdict verdict = tg__log_decide(&rule, &view, now_us, cost, random_below(3), &change);
        assert_true(verdict.retry_after_us <= rule.period_us || verdict.retry_after_us == TG_NEVER);
        assert_true(verdict.reset_after_us <= rule.period_us);
        assert_true(verdict.remaining <= rule.limit);
        assert_true(change.expired_entries <= state.end);
        view = pure_view(&state, &cursor);
        tg__log_pressure(&rule, &view, now_us);
    }
}

/* The hardest numbers: 10^10 a millisecond, whose line is 56 s long, and states that are full to the brim. */
static void
debts_end_at_a_stated_number_of_units_and_no_sum_wraps(void **unused)
{
    (void)unused;
    const tg_terms forced = { .forced = true }, waits = { .patience_us = TG_WAIT_US_MAX };
    static const tg_algorithm algorithms[] = { TG_FIXED_WINDOW, TG_SLIDING_COUNTER, TG_TOKEN_BUCKET, TG_LEAKY_BUCKET };
    static const uint64_t periods[] = { TG_PERIOD_US_MIN, TG_PERIOD_US_MAX };
    for (size_t a = 0; a < sizeof algorithms / sizeof *algorithms; a++)
        for (size_t p = 0; p < 2; p++) {
            tg_rule rule;
            tg_state state = { .bucket = { 0, 0, 0 } };
            tg_verdict verdict;
            assert_int_equal(tg_rule_make(TG_LIMIT_MAX, periods[p], 0, algorithms[a], &rule, NULL), TG_OK);
            for (int i = 0; i < 60000; i++) { /* 6 * 10^14 units: more than any state holds */
                tg__decide_on_terms(&rule, &state, 5, TG_LIMIT_MAX, forced, &state, &verdict);
                assert_true(verdict.allowed && verdict.reset_after_us <= TG_WAIT_US_MAX);
            }
            const tg_u128 level = (tg_u128)state.bucket.level_high << 64 | state.bucket.level_low;
            if (algorithms[a] == TG_FIXED_WINDOW)
                assert_true(state.fixed.count == TG_HELD_MAX);
            else if (algorithms[a] == TG_SLIDING_COUNTER)
                assert_true(state.counter.current == TG_HELD_MAX);
            else
                assert_true(level == (tg_u128)TG_HELD_MAX * periods[p]);
            tg__decide_on_terms(&rule, &state, 5, 1, waits, &state, &verdict);
            assert_false(verdict.allowed); /* one more would be beyond it */
            assert_true(verdict.retry_after_us > 0 && verdict.retry_after_us <= TG_WAIT_US_MAX);
            assert_true(tg__decide(&rule, &state, 5, 1, &state).remaining == 0);
            tg__pressure(&rule, &state, 5);
        }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(debts_end_at_a_stated_number_of_units_and_no_sum_wraps),
        cmocka_unit_test(a_reported_wait_passes_then_and_not_a_microsecond_earlier),
        cmocka_unit_test(so_many_pass_as_remaining_says_and_not_one_more),
        cmocka_unit_test(a_reset_is_the_first_instant_at_which_the_state_equals_a_fresh_one),
        cmocka_unit_test(a_denied_hit_a_look_and_a_cost_of_0_leave_every_bit_of_the_state),
        cmocka_unit_test(a_refund_of_what_was_taken_gives_the_same_answers_as_before),
        cmocka_unit_test(a_charge_of_this_very_request_is_judged_as_if_it_were_not_there),
        cmocka_unit_test(a_blocking_state_says_until_when_and_a_hit_of_1_passes_then),
        cmocka_unit_test(the_share_used_is_rounded_up_and_full_only_when_nothing_is_left),
        cmocka_unit_test(a_refund_on_a_fresh_state_changes_nothing),
        cmocka_unit_test(the_largest_limit_burst_cost_period_and_clock_do_not_overflow),
        cmocka_unit_test(a_count_at_its_types_maximum_refuses_and_goes_on_refusing),
        cmocka_unit_test(any_bits_as_state_give_an_answer_in_bounds),
        cmocka_unit_test(deny_refuses_all_costs_and_keeps_no_state),
        cmocka_unit_test(an_aligned_window_starts_at_a_multiple_of_its_period_and_a_week_on_monday),
        cmocka_unit_test(an_aligned_window_does_not_go_back_when_the_clocks_offset_does),
        cmocka_unit_test(a_window_of_the_other_clock_has_ended_and_locks_nobody_out),
        cmocka_unit_test(a_bucket_drains_to_the_same_level_in_one_step_and_in_many),
        cmocka_unit_test(a_fixed_window_passes_twice_its_limit_across_an_edge_and_the_others_do_not),
        cmocka_unit_test(an_allowed_hit_reads_one_entry_more_than_it_drops_and_a_denied_one_stops_at_its_room),
        cmocka_unit_test(the_logs_bound_holds_for_every_sequence_of_hits),
        cmocka_unit_test(a_resolution_never_admits_more_than_the_exact_log),
        cmocka_unit_test(a_log_says_until_when_it_blocks_and_when_it_is_fresh),
        cmocka_unit_test(a_logs_own_charge_of_this_request_does_not_count),
        cmocka_unit_test(a_damaged_log_gives_an_answer_in_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
