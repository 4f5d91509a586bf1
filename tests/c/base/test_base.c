/* Errors, texts, digests, the manual clock and the notice queue. */
#include "base/base.h"

#include <errno.h>
#include <setjmp.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <stdarg.h>
#include <cmocka.h>

static void
an_error_may_be_unwanted(void **unused)
{
    (void)unused;
    assert_int_equal(tg__error(NULL, TG_E_RULE, "x"), TG_E_RULE);
    tg_error error;
    assert_int_equal(tg__error_system(&error, TG_E_SYSTEM, ENOSPC, "table '%s'", "t"), TG_E_SYSTEM);
    assert_int_equal(error.system_error, ENOSPC);
    assert_string_equal(error.message, "table 't': No space left on device");
}

static void
an_overlong_message_is_cut_within_its_room(void **unused)
{
    (void)unused;
    char text[2000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    tg_error error;
    tg__error_system(&error, TG_E_SYSTEM, EIO, "%s", text);
    assert_int_equal(strlen(error.message), sizeof error.message - 1);
}

static void
every_status_has_a_name_and_a_text(void **unused)
{
    (void)unused;
    assert_string_equal(tg_status_name(TG_E_RULE), "TG_E_RULE");
    assert_string_equal(tg_status_name((tg_status)7), "TG_E_UNKNOWN");
    for (int status = 0; status >= -10; status--)
        assert_string_not_equal(tg_status_name((tg_status)status), "TG_E_UNKNOWN");
}

static void
a_number_is_digits_alone_and_within_its_bound(void **unused)
{
    (void)unused;
    uint64_t number;
    assert_true(tg__text_number(tg_text_of("10000000000"), TG_LIMIT_MAX, &number));
    assert_true(number == TG_LIMIT_MAX);
    assert_true(tg__text_number(tg_text_of("0"), 0, &number));
    assert_true(tg__text_number(tg_text_of("18446744073709551615"), UINT64_MAX, &number));
    static const char *const wrong[] = { "", "-5", "+5", "5 ", "6O", "1e3", "10000000001", "18446744073709551616" };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_false(tg__text_number(tg_text_of(wrong[i]), i == 7 ? UINT64_MAX : TG_LIMIT_MAX, &number));
    assert_false(tg__text_number(tg_text_of("7"), 5, &number));
}

static void
a_text_is_shown_without_control_bytes_and_cut(void **unused)
{
    (void)unused;
    char shown[8];
    assert_string_equal(tg__text_show((tg_text){ "a\0\n\xff", 4 }, shown, sizeof shown), "a???");
    assert_string_equal(tg__text_show(tg_text_of("12345678"), shown, sizeof shown), "1234...");
    assert_string_equal(tg__text_show(tg_text_of("1234567"), shown, sizeof shown), "1234567");
}

static void
digests_of_shifted_pieces_differ(void **unused)
{
    (void)unused;
    assert_int_equal(tg__digest_init(NULL), TG_OK);
    uint8_t a[16], b[16];
    tg__digest((tg_text[]){ tg_text_of("ab"), tg_text_of("c") }, 2, a, sizeof a);
    tg__digest((tg_text[]){ tg_text_of("a"), tg_text_of("bc") }, 2, b, sizeof b);
    assert_memory_not_equal(a, b, sizeof a);
}

static void
a_clock_goes_back_when_told_and_saturates_forward(void **unused)
{
    (void)unused;
    tg_clock *clock;
    assert_int_equal(tg_clock_open(100, &clock, NULL), TG_OK);
    tg_clock_set_us(clock, 40);
    assert_int_equal(tg_clock_now_us(clock), 40);
    tg_clock_advance_us(clock, 2);
    assert_int_equal(tg_clock_now_us(clock), 42);
    tg_clock_advance_us(clock, UINT64_MAX);
    assert_true(tg_clock_now_us(clock) == INT64_MAX);
    tg_clock_retain(clock);
    tg_clock_close(clock);
    assert_true(tg_clock_now_us(clock) == INT64_MAX);
    tg_clock_close(clock);
    tg_error error;
    assert_int_equal(tg_clock_open(UINT64_MAX, &clock, &error), TG_E_ARG);
}

static void
notices_come_in_order_and_the_dropped_are_counted(void **unused)
{
    (void)unused;
    tg_notice notice;
    assert_false(tg_notice_pending());
    assert_false(tg_notice_take(&notice));
    for (int i = 0; i < 66; i++)
        tg__notice("test", "number %d", i);
    assert_true(tg_notice_pending());
    assert_true(tg_notice_take(&notice));
    assert_string_equal(notice.code, "test");
    assert_string_equal(notice.message, "number 2 (2 earlier notices were dropped)");
    for (int i = 3; i < 66; i++) {
        char wanted[32];
        snprintf(wanted, sizeof wanted, "number %d", i);
        assert_true(tg_notice_take(&notice));
        assert_string_equal(notice.message, wanted);
    }
    assert_false(tg_notice_pending());
}

static void
a_child_leaves_its_parents_notices_to_the_parent(void **unused)
{
    (void)unused;
    tg__notice("test", "of the parent");
    const pid_t child = fork();
    if (child == 0)
        _exit(tg_notice_pending() ? 1 : 0);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    tg_notice notice;
    assert_true(tg_notice_take(&notice));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_error_may_be_unwanted),
        cmocka_unit_test(an_overlong_message_is_cut_within_its_room),
        cmocka_unit_test(every_status_has_a_name_and_a_text),
        cmocka_unit_test(a_number_is_digits_alone_and_within_its_bound),
        cmocka_unit_test(a_text_is_shown_without_control_bytes_and_cut),
        cmocka_unit_test(digests_of_shifted_pieces_differ),
        cmocka_unit_test(a_clock_goes_back_when_told_and_saturates_forward),
        cmocka_unit_test(notices_come_in_order_and_the_dropped_are_counted),
        cmocka_unit_test(a_child_leaves_its_parents_notices_to_the_parent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
