/* Rule text: what is read, what is refused and where the error points, and that what is written reads back the same. */
#include "base/base.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define MS UINT64_C(1000)
#define SECOND (1000 * MS)
#define MINUTE (60 * SECOND)
#define HOUR (60 * MINUTE)
#define DAY (24 * HOUR)
#define WEEK (7 * DAY)

static tg_rule
rule_of(const char *text)
{
    tg_rule rules[TG_RULES_MAX];
    tg_error error;
    size_t count;
    if (tg_rules_parse(tg_text_of(text), TG_ALGORITHM_DEFAULT, rules, &count, &error) != TG_OK)
        fail_msg("\"%s\": %s", text, error.message);
    assert_int_equal(count, 1);
    return rules[0];
}

static void
assert_same(const tg_rule *a, const tg_rule *b)
{
    assert_int_equal(a->limit, b->limit);
    assert_int_equal(a->period_us, b->period_us);
    assert_int_equal(a->burst, b->burst);
    assert_int_equal(a->resolution_us, b->resolution_us);
    assert_int_equal(a->algorithm, b->algorithm);
    assert_int_equal(a->aligned, b->aligned);
}

/* ---- what is read ---- */

static void
every_unit_has_its_length(void **unused)
{
    (void)unused;
    static const struct {
        const char *unit;
        uint64_t us;
    } units[] = {
        { "s", SECOND },     { "sec", SECOND },     { "second", SECOND },  { "seconds", SECOND },  { "m", MINUTE },
        { "min", MINUTE },   { "minute", MINUTE },  { "minutes", MINUTE }, { "h", HOUR },          { "hour", HOUR },
        { "hours", HOUR },   { "d", DAY },          { "day", DAY },        { "days", DAY },        { "w", WEEK },
        { "week", WEEK },    { "weeks", WEEK },     { "ms", MS },          { "month", 30 * DAY }, { "year", 365 * DAY },
    };
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        char text[64];
        snprintf(text, sizeof text, "7/%s", units[i].unit);
        assert_int_equal(rule_of(text).limit, 7);
        assert_int_equal(rule_of(text).period_us, units[i].us);
        snprintf(text, sizeof text, "7 per 3 %s", units[i].unit);
        assert_int_equal(rule_of(text).period_us, 3 * units[i].us);
    }
}

static void
the_spellings_of_an_amount_mean_the_same(void **unused)
{
    (void)unused;
    static const char *const spellings[] = {
        "100/5m", "100 / 5 m", "100 per 5 minutes", "100per5m", "100 PER 5 MINUTES", "\t100/\n5\r\nmin ", "0100/05m",
        "100/300s",
    };
    const tg_rule expected = { .limit = 100, .burst = 100, .period_us = 5 * MINUTE, .algorithm = TG_SLIDING_LOG };
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        const tg_rule rule = rule_of(spellings[i]);
        assert_same(&rule, &expected);
    }
}

static void
the_words_after_the_amount_stand_in_any_order_and_case(void **unused)
{
    (void)unused;
    const tg_rule bucket = { .limit = 10, .burst = 50, .period_us = HOUR, .algorithm = TG_LEAKY_BUCKET };
    tg_rule rule = rule_of("10/h burst 50 leaky_bucket");
    assert_same(&rule, &bucket);
    rule = rule_of("10/h leaky_bucket burst 50");
    assert_same(&rule, &bucket);
    rule = rule_of("10/h Leaky_Bucket BURST50");
    assert_same(&rule, &bucket);
    const tg_rule log = {
        .limit = 3, .burst = 3, .period_us = HOUR, .resolution_us = 2 * SECOND, .algorithm = TG_SLIDING_LOG,
    };
    rule = rule_of("3/h resolution 2s sliding_log");
    assert_same(&rule, &log);
    rule = rule_of("3/h sliding_log resolution 2 seconds");
    assert_same(&rule, &log);
    const tg_rule window = { .limit = 3, .burst = 3, .period_us = HOUR, .algorithm = TG_FIXED_WINDOW, .aligned = true };
    rule = rule_of("3/h aligned fixed_window");
    assert_same(&rule, &window);
    rule = rule_of("3/h fixed_window aligned");
    assert_same(&rule, &window);
    assert_int_equal(rule_of("3/h resolution second").resolution_us, SECOND);
}

static void
the_default_algorithm_follows_burst_aligned_resolution_and_limit(void **unused)
{
    (void)unused;
    assert_int_equal(rule_of("1000/h").algorithm, TG_SLIDING_LOG);
    assert_int_equal(rule_of("1001/h").algorithm, TG_SLIDING_COUNTER);
    assert_int_equal(rule_of("10/h burst 10").algorithm, TG_TOKEN_BUCKET);
    assert_int_equal(rule_of("100000/h burst 10").algorithm, TG_TOKEN_BUCKET);
    assert_int_equal(rule_of("100000/h aligned").algorithm, TG_FIXED_WINDOW);
    assert_int_equal(rule_of("100000/h resolution 1m").algorithm, TG_SLIDING_LOG);
    assert_int_equal(rule_of("5/h gcra").algorithm, TG_TOKEN_BUCKET);
    assert_int_equal(rule_of("5/h gcra").burst, 5);
    assert_int_equal(rule_of("5/h").burst, 5);
}

static void
a_preferred_algorithm_stands_in_only_where_a_rule_names_none(void **unused)
{
    (void)unused;
    tg_rule rules[TG_RULES_MAX];
    tg_error error;
    size_t count;
    const tg_text text = tg_text_of("5/s; 5/m sliding_counter; 5/h burst 9");
    assert_int_equal(tg_rules_parse(text, TG_LEAKY_BUCKET, rules, &count, &error), TG_OK);
    assert_int_equal(count, 3);
    assert_int_equal(rules[0].algorithm, TG_LEAKY_BUCKET);
    assert_int_equal(rules[1].algorithm, TG_SLIDING_COUNTER);
    assert_int_equal(rules[2].algorithm, TG_LEAKY_BUCKET);
    assert_int_equal(rules[2].burst, 9);
    /* It is no silent loser either: what cannot be had is said. */
    assert_int_equal(tg_rules_parse(text, TG_SLIDING_LOG, rules, &count, &error), TG_E_RULE);
    assert_non_null(strstr(error.message, "preferred"));
    assert_int_equal(error.offset, 30);
    assert_int_equal(tg_rules_parse(text, TG_DENY, rules, &count, &error), TG_E_ARG);
    assert_int_equal(tg_rules_parse(text, (tg_algorithm)99, rules, &count, &error), TG_E_ARG);
}

static void
rules_are_parted_by_semicolon_or_comma_and_deny_may_be_among_them(void **unused)
{
    (void)unused;
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    const tg_text text = tg_text_of("10/s;100/min , DENY ;5/h burst 2");
    assert_int_equal(tg_rules_parse(text, TG_ALGORITHM_DEFAULT, rules, &count, NULL), TG_OK);
    assert_int_equal(count, 4);
    assert_int_equal(rules[1].period_us, MINUTE);
    assert_int_equal(rules[2].algorithm, TG_DENY);
    assert_int_equal(rules[2].limit, 0);
    assert_int_equal(rules[2].period_us, 0);
    assert_int_equal(rules[3].burst, 2);
}

static void
the_bounds_themselves_are_allowed(void **unused)
{
    (void)unused;
    assert_int_equal(rule_of("10000000000/s").limit, TG_LIMIT_MAX);
    assert_int_equal(rule_of("1/s burst 10000000000").burst, TG_LIMIT_MAX);
    assert_int_equal(rule_of("1/ms").period_us, TG_PERIOD_US_MIN);
    assert_int_equal(rule_of("1/10 year").period_us, TG_PERIOD_US_MAX);
    assert_int_equal(rule_of("1/3650d").period_us, TG_PERIOD_US_MAX);
    assert_int_equal(rule_of("10000000/month").period_us, 30 * DAY);
    assert_int_equal(rule_of("5/10s resolution 10s").resolution_us, 10 * SECOND);
    tg_rule rules[TG_RULES_MAX];
    char text[512] = "1/1s";
    size_t count;
    for (int i = 2; i <= TG_RULES_MAX; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), ";1/%ds", i);
    assert_int_equal(tg_rules_parse(tg_text_of(text), TG_ALGORITHM_DEFAULT, rules, &count, NULL), TG_OK);
    assert_int_equal(count, TG_RULES_MAX);
}

/* ---- what is refused ---- */

static void
a_wrong_text_is_an_error_that_marks_the_word_and_says_what_was_expected(void **unused)
{
    (void)unused;
    static const struct {
        const char *text;
        const char *marked; /* the first of these in the text; "" at its end */
        const char *says;
    } cases[] = {
        { "", "", "100/minute" },
        { "   ", "", "100/minute" },
        { "sixty", "sixty", "100/minute" },
        { "NaN/min", "NaN", "100/minute" },
        { "6O/min", "6O", "whole number" },
        { "-5/min", "-5", "negative" },
        { "-5", "-5", "negative" },
        { "+5/min", "+5", "100/minute" },
        { "1.5/min", "1.5", "fractions" },
        { "1e3/min", "1e3", "exponents" },
        { "1_000/min", "1_000", "whole number" },
        { "1,000/min", ",", "another rule" },
        { "0x10/min", "0x10", "whole number" },
        { "/min", "/", "100/minute" },
        { "5", "", "`per`" },
        { "5 fortnights", "fortnights", "`per`" },
        { "5/", "", "unit" },
        { "5/;", ";", "unit" },
        { "5//s", NULL, "unit" },
        { "5 per", "", "unit" },
        { "10/fortnight", "fortnight", "month or year" },
        { "10/x", "x", "month or year" },
        { "10/minuet", "minuet", "did you mean `minute`" },
        { "10/SECNOD", "SECNOD", "did you mean `second`" },
        { "10/dya", "dya", "did you mean `day`" },
        { "10/months", "months", "did you mean `month`" },
        { "10/0s", "0", "at least 1 ms" },
        { "10/-5s", "-5s", "negative" },
        { "10/600.001 ms", "600.001", "fractions" },
        { "10/1.5s", "1.5s", "fractions" },
        { "10/11year", "11year", "10 years" },
        { "10/3651d", "3651d", "10 years" },
        { "10/99999999999999999999999 d", "99999999999999999999999 d", "10 years" },
        { "98765432198765432198765/h", "98765432198765432198765", "98765432198765432198765" },
        { "10000000001/h", "10000000001", "at most 10000000000" },
        { "0/minute", "0", "`deny`" },
        { "000/minute", "000", "`deny`" },
        { "5/s burst", "", "a burst" },
        { "5/s burst x", "x", "a burst" },
        { "5/s burst -1", "-1", "negative" },
        { "5/s burst 1.5", "1.5", "fractions" },
        { "5/s burst 0", "0", "at least 1" },
        { "5/s burst 10000000001", "10000000001", "at most 10000000000" },
        { "5/s burst 5 burst 6", NULL, "second `burst`" },
        { "5/s 10", "10", "burst" },
        { "5/s brust 10", "brust", "did you mean `burst`" },
        { "5/s burst 10 token-bucket", "token-bucket", "did you mean `token_bucket`" },
        { "5/s fixedwindow", "fixedwindow", "did you mean `fixed_window`" },
        { "5/s sliding_window", "sliding_window", "expected" },
        { "5/s aligend", "aligend", "did you mean `aligned`" },
        { "5/s sliding_log fixed_window", "fixed_window", "one algorithm" },
        { "5/s burst 10 sliding_log", "burst", "token_bucket or leaky_bucket" },
        { "5/s fixed_window burst 10", "burst", "token_bucket or leaky_bucket" },
        { "5/s sliding_counter burst 10", "burst", "token_bucket or leaky_bucket" },
        { "5/s aligned burst 10", "aligned", "expected fixed_window" },
        { "5/s aligned sliding_log", "aligned", "expected fixed_window" },
        { "5/s aligned aligned", NULL, "second `aligned`" },
        { "5/month aligned", "aligned", "calendar" },
        { "5/2 year fixed_window aligned", "aligned", "calendar" },
        { "5/s resolution", "", "a resolution" },
        { "5/s resolution 0s", "0", "at least 1 ms" },
        { "5/s resolution 2s", "2s", "the rule's period" },
        { "5/s resolution 1x", "x", "month or year" },
        { "5/s resolution 1ms token_bucket", "resolution", "expected sliding_log" },
        { "5/s resolution 1ms aligned", "resolution", "expected sliding_log" },
        { "5/s resolution 1ms resolution 2ms", NULL, "second `resolution`" },
        { "5/s;", "", "another rule" },
        { "5/s,", "", "another rule" },
        { ";5/s", ";", "100/minute" },
        { "5/s;;5/m", NULL, "100/minute" },
        { "5/s/5", NULL, "expected" },
        { "5/s5", "s5", "unit" },
        { "5/s 6/m", "6", "`;`" },
        { "deny 5/s", "5", "stands alone" },
        { "deny deny", NULL, "stands alone" },
        { "dney", "dney", "did you mean `deny`" },
        { "5/s; deny; deny", NULL, "once" },
        { "5/s; 10/s", "10/s", "once" },
        { "5/60s burst 3; 10/minute gcra", "10/minute gcra", "once" },
        { "10 concurrent", "concurrent", "not available yet" },
        { "concurrency 10", "concurrency", "not available yet" },
        { "5/s concurrency 10", "concurrency", "not available yet" },
        { "5/s penalty 10m", "penalty", "not available yet" },
        { "5/calendar month", "calendar", "not available yet" },
        { "5/minute\xc3\xa9", "minute\xc3\xa9", "did you mean `minute`" },
        { "\xff\xfe/s", "\xff\xfe", "100/minute" },
        { "\xd9\xa3/s", "\xd9\xa3", "100/minute" }, /* an Arabic 3 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tg_rule rules[TG_RULES_MAX];
        size_t count = 77;
        tg_error error;
        const tg_status status = tg_rules_parse(tg_text_of(cases[i].text), TG_ALGORITHM_DEFAULT, rules, &count, &error);
        if (status != TG_E_RULE)
            fail_msg("\"%s\" gives %s", cases[i].text, tg_status_name(status));
        assert_int_equal(count, 0);
        assert_int_equal(error.status, TG_E_RULE);
        assert_true(error.offset + error.length <= strlen(cases[i].text));
        if (!strstr(error.message, cases[i].says))
            fail_msg("\"%s\": \"%s\" does not say \"%s\"", cases[i].text, error.message, cases[i].says);
        if (!cases[i].marked)
            continue;
        const char *marked = cases[i].text + error.offset;
        if (cases[i].marked[0] == '\0') {
            assert_int_equal(error.offset, strlen(cases[i].text));
            assert_int_equal(error.length, 0);
        } else if (error.length != strlen(cases[i].marked) || memcmp(cases[i].marked, marked, error.length) != 0) {
            fail_msg("\"%s\": marks \"%.*s\", not \"%s\" (%s)", cases[i].text, (int)error.length, marked,
                     cases[i].marked, error.message);
        }
    }
}

static void
errors_point_to_the_second_of_two_equal_words(void **unused)
{
    (void)unused;
    static const struct {
        const char *text;
        size_t offset, length;
    } cases[] = {
        { "5/s aligned aligned", 12, 7 }, { "5/s;;5/m", 4, 1 }, { "5/s/5", 3, 1 }, { "5/s; deny; deny", 11, 4 },
        { "5/s resolution 1ms resolution 2ms", 19, 10 }, { "deny deny", 5, 4 }, { "  5/s;  10/s  ; 1/m", 8, 4 },
        { "5/s burst 5 burst 6", 12, 5 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tg_rule rules[TG_RULES_MAX];
        size_t count;
        tg_error error;
        const tg_text text = tg_text_of(cases[i].text);
        assert_int_equal(tg_rules_parse(text, TG_ALGORITHM_DEFAULT, rules, &count, &error), TG_E_RULE);
        assert_int_equal(error.offset, cases[i].offset);
        assert_int_equal(error.length, cases[i].length);
    }
}

static void
more_rules_than_fit_are_refused_at_the_first_too_many(void **unused)
{
    (void)unused;
    tg_rule rules[TG_RULES_MAX];
    char text[512] = "1/1s";
    size_t count;
    tg_error error;
    for (int i = 2; i <= TG_RULES_MAX + 1; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), ";1/%ds", i);
    assert_int_equal(tg_rules_parse(tg_text_of(text), TG_ALGORITHM_DEFAULT, rules, &count, &error), TG_E_RULE);
    assert_int_equal(error.offset, strlen(text) - strlen("1/17s"));
    assert_non_null(strstr(error.message, "16"));
}

static void
nul_bytes_and_unterminated_texts_are_read_to_their_length_only(void **unused)
{
    (void)unused;
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    tg_error error;
    static const char *const texts[] = {
        "5/s\0", "5\0/s", "\0", "5/s \0", "5/\0s", "5/s;\0", "5/3\0s", "5/s burst\0 3",
    };
    static const size_t lengths[] = { 4, 4, 1, 5, 4, 5, 5, 12 };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const tg_text text = { texts[i], lengths[i] };
        assert_int_equal(tg_rules_parse(text, TG_ALGORITHM_DEFAULT, rules, &count, &error), TG_E_RULE);
        assert_true(error.length > 0);
    }
    char *exact = malloc(6); /* a sanitizer sees a read past it */
    assert_non_null(exact);
    memcpy(exact, "12/min", 6);
    assert_int_equal(tg_rules_parse((tg_text){ exact, 6 }, TG_ALGORITHM_DEFAULT, rules, &count, &error), TG_OK);
    assert_int_equal(tg_rules_parse((tg_text){ exact, 1 }, TG_ALGORITHM_DEFAULT, rules, &count, &error), TG_E_RULE);
    free(exact);
    assert_int_equal(tg_rules_parse((tg_text){ NULL, 0 }, TG_ALGORITHM_DEFAULT, rules, &count, &error), TG_E_RULE);
    assert_int_equal(tg_rules_parse((tg_text){ NULL, 0 }, TG_ALGORITHM_DEFAULT, rules, &count, NULL), TG_E_RULE);
}

/* ---- from numbers, and back to text ---- */

static void
a_rule_from_numbers_obeys_the_same_bounds(void **unused)
{
    (void)unused;
    tg_rule rule;
    tg_error error;
    assert_int_equal(tg_rule_make(5, MINUTE, 0, TG_ALGORITHM_DEFAULT, &rule, &error), TG_OK);
    assert_int_equal(rule.algorithm, TG_SLIDING_LOG);
    assert_int_equal(tg_rule_make(1001, MINUTE, 0, TG_ALGORITHM_DEFAULT, &rule, &error), TG_OK);
    assert_int_equal(rule.algorithm, TG_SLIDING_COUNTER);
    assert_int_equal(tg_rule_make(5, MINUTE, 7, TG_ALGORITHM_DEFAULT, &rule, &error), TG_OK);
    assert_int_equal(rule.algorithm, TG_TOKEN_BUCKET);
    assert_int_equal(rule.burst, 7);
    assert_int_equal(tg_rule_make(5, MINUTE, 0, TG_LEAKY_BUCKET, &rule, &error), TG_OK);
    assert_int_equal(rule.burst, 5);

    assert_int_equal(tg_rule_make(5, MINUTE, 7, TG_SLIDING_LOG, &rule, &error), TG_E_RULE);
    assert_int_equal(tg_rule_make(TG_LIMIT_MAX + 1, MINUTE, 0, TG_ALGORITHM_DEFAULT, &rule, &error), TG_E_RULE);
    assert_int_equal(tg_rule_make(5, MINUTE, TG_LIMIT_MAX + 1, TG_ALGORITHM_DEFAULT, &rule, &error), TG_E_RULE);
    assert_int_equal(tg_rule_make(5, 0, 0, TG_ALGORITHM_DEFAULT, &rule, &error), TG_E_RULE);
    assert_int_equal(tg_rule_make(5, 999, 0, TG_ALGORITHM_DEFAULT, &rule, &error), TG_E_RULE);
    assert_int_equal(tg_rule_make(5, TG_PERIOD_US_MAX + 1000, 0, TG_ALGORITHM_DEFAULT, &rule, &error), TG_E_RULE);
    assert_int_equal(tg_rule_make(5, 600001, 0, TG_ALGORITHM_DEFAULT, &rule, &error), TG_E_RULE); /* 600.001 ms */
    assert_non_null(strstr(error.message, "whole milliseconds"));
    assert_int_equal(error.length, 0);
    assert_int_equal(tg_rule_make(5, MINUTE, 0, (tg_algorithm)-1, &rule, NULL), TG_E_ARG);
    assert_int_equal(tg_rule_make(5, MINUTE, 0, (tg_algorithm)7, &rule, NULL), TG_E_ARG);
}

static void
a_computed_limit_of_0_behaves_as_deny(void **unused)
{
    (void)unused;
    tg_rule rule;
    const tg_rule deny = rule_of("deny");
    assert_int_equal(tg_rule_make(0, MINUTE, 0, TG_ALGORITHM_DEFAULT, &rule, NULL), TG_OK);
    assert_same(&rule, &deny);
    assert_int_equal(tg_rule_make(0, 0, 5, TG_TOKEN_BUCKET, &rule, NULL), TG_OK);
    assert_same(&rule, &deny);
    assert_int_equal(tg_rule_make(9, MINUTE, 0, TG_DENY, &rule, NULL), TG_OK);
    assert_same(&rule, &deny);
}

static void
the_canonical_spelling_is_the_expected_one(void **unused)
{
    (void)unused;
    static const char *const spellings[][2] = {
        { "100/60s", "100/minute sliding_log" },
        { "100 per 5 minutes", "100/5m sliding_log" },
        { "5/30s aligned", "5/30s fixed_window aligned" },
        { "3/10s resolution second", "3/10s sliding_log resolution 1s" },
        { "3/10s resolution 1500ms", "3/10s sliding_log resolution 1500ms" },
        { "deny", "deny" },
        { "10/s burst 20", "10/second burst 20 token_bucket" },
        { "10/s burst 10", "10/second token_bucket" },
        { "10/s gcra", "10/second token_bucket" },
        { "10/s leaky_bucket", "10/second leaky_bucket" },
        { "2000/24h", "2000/day sliding_counter" },
        { "2000/168h", "2000/week sliding_counter" },
        { "2000/14d", "2000/2w sliding_counter" },
        { "5/30d", "5/month sliding_log" },
        { "5/365d", "5/year sliding_log" },
        { "5/30d aligned", "5/30d fixed_window aligned" },
        { "5/730d", "5/730d sliding_log" },
        { "5/1ms", "5/ms sliding_log" },
        { "5/90m", "5/90m sliding_log" },
    };
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        const tg_rule rule = rule_of(spellings[i][0]);
        char text[TG_RULE_TEXT_MAX];
        tg_rule_text(&rule, text);
        assert_string_equal(text, spellings[i][1]);
        const tg_rule again = rule_of(text);
        assert_same(&rule, &again);
    }
}

static void
what_is_written_reads_back_as_the_same_rule(void **unused)
{
    (void)unused;
    uint64_t state = 42;
    for (unsigned round = 0; round < 100000; round++) {
        uint64_t random[6];
        for (size_t i = 0; i < 6; i++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            random[i] = (state >> 16) >> ((state >> 11) % 48);
        }
        static const uint64_t units[] = { MS, SECOND, MINUTE, HOUR, DAY, WEEK, 30 * DAY, 365 * DAY };
        const uint64_t unit = units[random[0] % 8];
        tg_rule rule;
        const uint64_t limit = 1 + random[1] % TG_LIMIT_MAX;
        const uint64_t period_us = unit * (1 + random[2] % (TG_PERIOD_US_MAX / unit));
        assert_int_equal(tg_rule_make(limit, period_us, 0, (tg_algorithm)(1 + random[3] % 5), &rule, NULL), TG_OK);
        if (rule.algorithm == TG_TOKEN_BUCKET || rule.algorithm == TG_LEAKY_BUCKET)
            rule.burst = random[4] % 3 ? 1 + random[4] % TG_LIMIT_MAX : rule.limit;
        if (rule.algorithm == TG_SLIDING_LOG && random[4] % 2)
            rule.resolution_us = MS * (1 + random[5] % (rule.period_us / MS));
        rule.aligned = rule.algorithm == TG_FIXED_WINDOW && random[4] % 2;
        char text[TG_RULE_TEXT_MAX];
        tg_rule_text(&rule, text);
        const tg_rule again = rule_of(text);
        assert_same(&rule, &again);
    }
}

static void
the_algorithms_have_their_names(void **unused)
{
    (void)unused;
    assert_string_equal(tg_algorithm_name(TG_ALGORITHM_DEFAULT), "default");
    assert_string_equal(tg_algorithm_name(TG_FIXED_WINDOW), "fixed_window");
    assert_string_equal(tg_algorithm_name(TG_SLIDING_LOG), "sliding_log");
    assert_string_equal(tg_algorithm_name(TG_SLIDING_COUNTER), "sliding_counter");
    assert_string_equal(tg_algorithm_name(TG_TOKEN_BUCKET), "token_bucket");
    assert_string_equal(tg_algorithm_name(TG_LEAKY_BUCKET), "leaky_bucket");
    assert_string_equal(tg_algorithm_name(TG_DENY), "deny");
    assert_string_equal(tg_algorithm_name((tg_algorithm)99), "unknown");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_unit_has_its_length),
        cmocka_unit_test(the_spellings_of_an_amount_mean_the_same),
        cmocka_unit_test(the_words_after_the_amount_stand_in_any_order_and_case),
        cmocka_unit_test(the_default_algorithm_follows_burst_aligned_resolution_and_limit),
        cmocka_unit_test(a_preferred_algorithm_stands_in_only_where_a_rule_names_none),
        cmocka_unit_test(rules_are_parted_by_semicolon_or_comma_and_deny_may_be_among_them),
        cmocka_unit_test(the_bounds_themselves_are_allowed),
        cmocka_unit_test(a_wrong_text_is_an_error_that_marks_the_word_and_says_what_was_expected),
        cmocka_unit_test(errors_point_to_the_second_of_two_equal_words),
        cmocka_unit_test(more_rules_than_fit_are_refused_at_the_first_too_many),
        cmocka_unit_test(nul_bytes_and_unterminated_texts_are_read_to_their_length_only),
        cmocka_unit_test(a_rule_from_numbers_obeys_the_same_bounds),
        cmocka_unit_test(a_computed_limit_of_0_behaves_as_deny),
        cmocka_unit_test(the_canonical_spelling_is_the_expected_one),
        cmocka_unit_test(what_is_written_reads_back_as_the_same_rule),
        cmocka_unit_test(the_algorithms_have_their_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
