/* Which rule a decision reports, and which counts a rule shares. */
#include "core/core.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static tg_result
result(bool allowed, uint64_t limit, uint64_t remaining, uint64_t retry_after_us, uint64_t reset_after_us)
{
    return (tg_result){
        .rule = { .limit = limit, .burst = limit, .period_us = 1000000, .algorithm = TG_SLIDING_LOG },
        .allowed = allowed,
        .remaining = remaining,
        .retry_after_us = retry_after_us,
        .reset_after_us = reset_after_us,
    };
}

static tg_decision
report(size_t count, const tg_result *results)
{
    tg_decision decision = { .result_count = (uint8_t)count };
    memcpy(decision.results, results, count * sizeof *results);
    tg__decision_report(&decision);
    return decision;
}

static void
allowed_reports_the_smallest_remaining(void **unused)
{
    (void)unused;
    const tg_decision decision = report(3, (tg_result[]){ result(true, 10, 5, 0, 100), result(true, 20, 2, 0, 50),
                                                          result(true, 30, 7, 0, 900) });
    assert_true(decision.allowed);
    assert_int_equal(decision.reported, 1);
    assert_int_equal(decision.limit, 20);
    assert_int_equal(decision.remaining, 2);
    assert_int_equal(decision.reset_after_us, 50);
}

static void
denied_reports_the_longest_retry_and_the_smallest_remaining_of_all(void **unused)
{
    (void)unused;
    const tg_decision decision = report(3, (tg_result[]){ result(false, 10, 3, 70, 100), result(true, 20, 1, 0, 500),
                                                          result(false, 30, 4, 90, 80) });
    assert_false(decision.allowed);
    assert_int_equal(decision.reported, 2);
    assert_int_equal(decision.retry_after_us, 90);
    assert_int_equal(decision.remaining, 1);
}

static void
never_is_the_longest_retry(void **unused)
{
    (void)unused;
    const tg_decision decision =
        report(2, (tg_result[]){ result(false, 10, 0, TG_WAIT_US_MAX, 9), result(false, 20, 0, TG_NEVER, 1) });
    assert_int_equal(decision.reported, 1);
    assert_true(decision.retry_after_us == TG_NEVER);
}

static void
ties_go_to_the_longest_reset_then_to_the_first(void **unused)
{
    (void)unused;
    assert_int_equal(report(2, (tg_result[]){ result(true, 1, 3, 0, 10), result(true, 2, 3, 0, 20) }).reported, 1);
    assert_int_equal(report(2, (tg_result[]){ result(true, 1, 3, 0, 10), result(true, 2, 3, 0, 10) }).reported, 0);
    assert_int_equal(report(2, (tg_result[]){ result(false, 1, 0, 5, 10), result(false, 2, 0, 5, 20) }).reported, 1);
    assert_int_equal(report(2, (tg_result[]){ result(false, 1, 0, 5, 10), result(false, 2, 0, 5, 10) }).reported, 0);
}

static void
the_longest_delay_holds_and_a_denial_has_none(void **unused)
{
    (void)unused;
    tg_result first = result(true, 1, 3, 0, 10), second = result(true, 1, 2, 0, 10);
    first.delay_us = 8;
    second.delay_us = 5;
    assert_int_equal(report(2, (tg_result[]){ first, second }).delay_us, 8);
    second.allowed = false;
    assert_int_equal(report(2, (tg_result[]){ first, second }).delay_us, 0);
}

static void
scope_follows_namespace_name_algorithm_and_period_but_not_the_limit(void **unused)
{
    (void)unused;
    const tg_rule rule = { .limit = 5, .burst = 5, .period_us = 60000000, .algorithm = TG_TOKEN_BUCKET };
    tg_rule same = rule, other[4] = { rule, rule, rule, rule };
    tg__rule_scope(&same, tg_text_of("shop"), tg_text_of("login"));
    tg_rule raised = rule;
    raised.limit = raised.burst = 9;
    tg__rule_scope(&raised, tg_text_of("shop"), tg_text_of("login"));
    assert_memory_equal(same.scope, raised.scope, sizeof same.scope);

    other[2].period_us++;
    other[3].algorithm = TG_LEAKY_BUCKET;
    tg__rule_scope(&other[0], tg_text_of("shoplogin"), tg_text_of("")); /* the border between the two counts */
    tg__rule_scope(&other[1], tg_text_of("shop"), tg_text_of("logout"));
    tg__rule_scope(&other[2], tg_text_of("shop"), tg_text_of("login"));
    tg__rule_scope(&other[3], tg_text_of("shop"), tg_text_of("login"));
    for (size_t i = 0; i < 4; i++)
        assert_memory_not_equal(same.scope, other[i].scope, sizeof same.scope);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(allowed_reports_the_smallest_remaining),
        cmocka_unit_test(denied_reports_the_longest_retry_and_the_smallest_remaining_of_all),
        cmocka_unit_test(never_is_the_longest_retry),
        cmocka_unit_test(ties_go_to_the_longest_reset_then_to_the_first),
        cmocka_unit_test(the_longest_delay_holds_and_a_denial_has_none),
        cmocka_unit_test(scope_follows_namespace_name_algorithm_and_period_but_not_the_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
