/* What goes to the client: status, fields, body. */
#include "base/base.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

/* "429 Too Many Requests | Name: value | ... | body" */
static const char *
written(const tg_judgement *judgement, char *text, size_t size)
{
    tg_answer answer;
    memset(&answer, 0xa5, sizeof answer); /* nothing of the caller's memory may be taken for content */
    tg_answer_make(judgement, &answer);
    size_t used = (size_t)snprintf(text, size, "%d %s", answer.status, answer.reason);
    assert_true(answer.field_count <= TG_ANSWER_FIELDS_MAX);
    for (size_t i = 0; i < answer.field_count; i++)
        used += (size_t)snprintf(text + used, size - used, " | %.*s: %.*s", (int)answer.fields[i].name.length,
                                 answer.fields[i].name.data, (int)answer.fields[i].value.length,
                                 answer.fields[i].value.data);
    if (answer.body.length)
        snprintf(text + used, size - used, " | %.*s", (int)answer.body.length, answer.body.data);
    return text;
}

static void
check(const tg_judgement *judgement, const char *expected)
{
    char text[3000];
    if (strcmp(written(judgement, text, sizeof text), expected) != 0)
        fail_msg("\n%s\nexpected\n%s", text, expected);
}

static void
an_unmatched_request_gets_no_fields(void **unused)
{
    (void)unused;
    check(&(tg_judgement){ .outcome = TG_UNMATCHED, .decision = { .allowed = true, .limit = 5 } }, "0 ");
}

static void
an_allowed_request_gets_its_limits(void **unused)
{
    (void)unused;
    check(&(tg_judgement){ .outcome = TG_ALLOWED,
                           .decision = { .allowed = true, .limit = 5, .remaining = 4, .reset_after_us = 1000001 } },
          "0  | X-RateLimit-Limit: 5 | X-RateLimit-Remaining: 4 | X-RateLimit-Reset: 2");
    check(&(tg_judgement){ .outcome = TG_ALLOWED, .decision = { .allowed = true, .limit = 10000000000, .remaining = 0 } },
          "0  | X-RateLimit-Limit: 10000000000 | X-RateLimit-Remaining: 0 | X-RateLimit-Reset: 0");
}

static void
a_refusal_says_when_to_come_back(void **unused)
{
    (void)unused;
    check(&(tg_judgement){ .outcome = TG_DENIED, .status = 429,
                           .decision = { .limit = 5, .retry_after_us = 5000000, .reset_after_us = 9500000 } },
          "429 Too Many Requests | X-RateLimit-Limit: 5 | X-RateLimit-Remaining: 0 | X-RateLimit-Reset: 10"
          " | Retry-After: 5 | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"RATE_LIMITED\", \"message\": \"Too many requests. Try again in 5 seconds.\","
          " \"retry_after\": 5}");
}

static void
a_cost_that_never_fits_is_given_no_time(void **unused)
{
    (void)unused;
    check(&(tg_judgement){ .outcome = TG_DENIED, .status = 429,
                           .decision = { .limit = 5, .remaining = 5, .retry_after_us = TG_NEVER } },
          "429 Too Many Requests | X-RateLimit-Limit: 5 | X-RateLimit-Remaining: 5 | X-RateLimit-Reset: 0"
          " | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"RATE_LIMITED\", \"message\": \"This request asks for more than the limit can ever allow.\","
          " \"retry_after\": null}");
}

static void
deny_is_403_without_numbers(void **unused)
{
    (void)unused;
    check(&(tg_judgement){ .outcome = TG_FORBIDDEN, .status = 403, .decision = { .retry_after_us = TG_NEVER } },
          "403 Forbidden | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"FORBIDDEN\", \"message\": \"This is not allowed.\", \"retry_after\": null}");
}

static void
who_is_not_known_is_told_how_to_be(void **unused)
{
    (void)unused;
    check(&(tg_judgement){ .outcome = TG_UNIDENTIFIED, .status = 401, .missing = "user" },
          "401 Unauthorized | WWW-Authenticate: Bearer | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"UNIDENTIFIED\", \"message\": \"The request does not say who is asking: user is missing.\","
          " \"retry_after\": null}");
    check(&(tg_judgement){ .outcome = TG_UNIDENTIFIED, .status = 401, .missing = "header:X-Api-Key" },
          "401 Unauthorized | WWW-Authenticate: Header name=\"X-Api-Key\" | Cache-Control: no-store"
          " | Content-Type: application/json | {\"code\": \"UNIDENTIFIED\", \"message\": \"The request does not say who"
          " is asking: header:X-Api-Key is missing.\", \"retry_after\": null}");
    check(&(tg_judgement){ .outcome = TG_UNIDENTIFIED, .status = 401, .missing = "header:authorization" },
          "401 Unauthorized | WWW-Authenticate: Bearer | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"UNIDENTIFIED\", \"message\": \"The request does not say who is asking:"
          " header:authorization is missing.\", \"retry_after\": null}");
    check(&(tg_judgement){ .outcome = TG_UNIDENTIFIED, .status = 400, .missing = "ip" },
          "400 Bad Request | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"UNIDENTIFIED\", \"message\": \"The request does not say who is asking: ip is missing.\","
          " \"retry_after\": null}");
}

static void
a_degraded_answer_shows_no_numbers(void **unused)
{
    (void)unused;
    check(&(tg_judgement){ .outcome = TG_ALLOWED, .decision = { .allowed = true, .degraded = true, .limit = 5 } }, "0 ");
    check(&(tg_judgement){ .outcome = TG_UNAVAILABLE, .status = 503,
                           .decision = { .degraded = true, .limit = 5, .retry_after_us = 1000000 } },
          "503 Service Unavailable | Retry-After: 1 | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"UNAVAILABLE\", \"message\": \"The service cannot count requests at the moment. Try again in"
          " 1 second.\", \"retry_after\": 1}");
    /* on_store_failure: local may refuse by its own count */
    check(&(tg_judgement){ .outcome = TG_DENIED, .status = 429,
                           .decision = { .degraded = true, .limit = 5, .retry_after_us = 2000000 } },
          "429 Too Many Requests | Retry-After: 2 | Cache-Control: no-store | Content-Type: application/json"
          " | {\"code\": \"RATE_LIMITED\", \"message\": \"Too many requests. Try again in 2 seconds.\","
          " \"retry_after\": 2}");
}

static uint64_t
field_number(const tg_answer *answer, const char *name)
{
    for (size_t i = 0; i < answer->field_count; i++) {
        uint64_t number;
        if (!tg__text_is(answer->fields[i].name, name))
            continue;
        assert_true(tg__text_number(answer->fields[i].value, UINT64_MAX, &number)); /* digits alone */
        return number;
    }
    fail_msg("no %s", name);
    return 0;
}

static void
seconds_are_whole_and_rounded_up_and_never_zero(void **unused)
{
    (void)unused;
    static const uint64_t cases[][2] = {
        { 0, 1 },       { 1, 1 },           { 106000, 1 },         { 999999, 1 },        { 1000000, 1 },
        { 1000001, 2 }, { 59000000, 59 },   { 59999999, 60 },      { 60000000, 60 },     { 3600000001, 3601 },
        { TG_WAIT_US_MAX, 9007199255 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_judgement judgement = { .outcome = TG_DENIED, .status = 429,
                                         .decision = { .limit = 10, .retry_after_us = cases[i][0] } };
        tg_answer answer;
        tg_answer_make(&judgement, &answer);
        assert_int_equal(field_number(&answer, "Retry-After"), cases[i][1]);
    }
}

static void
retry_after_is_the_least_number_that_is_enough(void **unused)
{
    (void)unused;
    srandom(7);
    for (int i = 0; i < 1000; i++) {
        const uint64_t wait_us = 1 + (uint64_t)random() * 97 % 100000000;
        const tg_judgement judgement = { .outcome = TG_DENIED, .status = 429, .decision = { .retry_after_us = wait_us } };
        tg_answer answer;
        tg_answer_make(&judgement, &answer);
        const uint64_t seconds = field_number(&answer, "Retry-After");
        assert_true(seconds * 1000000 >= wait_us);
        assert_true(seconds == 1 || (seconds - 1) * 1000000 < wait_us);
    }
}

static void
the_largest_numbers_and_names_fit(void **unused)
{
    (void)unused;
    tg_judgement judgement = { .outcome = TG_UNIDENTIFIED, .status = 401 };
    memset(judgement.missing, '"', TG_NAME_BYTES_MAX); /* each takes two bytes */
    memcpy(judgement.missing, "header:", 7);
    tg_answer answer;
    tg_answer_make(&judgement, &answer);
    assert_non_null(memmem(answer.body.data, answer.body.length, "null}", 5));
    assert_ptr_equal(answer.body.data + answer.body.length - 1, (const char *)memrchr(answer.body.data, '}', answer.body.length));
    judgement = (tg_judgement){ .outcome = TG_DENIED, .status = 429,
                                .decision = { .limit = UINT64_MAX, .remaining = UINT64_MAX,
                                              .retry_after_us = UINT64_MAX - 1, .reset_after_us = UINT64_MAX } };
    tg_answer_make(&judgement, &answer);
    assert_int_equal(field_number(&answer, "X-RateLimit-Limit"), UINT64_MAX);
    assert_int_equal(field_number(&answer, "Retry-After"), UINT64_MAX / 1000000 + 1);
}

static void
no_byte_of_a_name_breaks_out_of_its_quotes(void **unused)
{
    (void)unused;
    const tg_judgement judgement = { .outcome = TG_UNIDENTIFIED, .status = 401,
                                     .missing = "header:a\"b\\c\r\nX: y\xff" };
    char text[3000];
    written(&judgement, text, sizeof text);
    assert_non_null(strstr(text, "Header name=\"a\\\"b\\\\cX: y\""));
    for (const char *c = text; *c; c++)
        assert_in_range(*c, ' ', '~');
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_unmatched_request_gets_no_fields),
        cmocka_unit_test(an_allowed_request_gets_its_limits),
        cmocka_unit_test(a_refusal_says_when_to_come_back),
        cmocka_unit_test(a_cost_that_never_fits_is_given_no_time),
        cmocka_unit_test(deny_is_403_without_numbers),
        cmocka_unit_test(who_is_not_known_is_told_how_to_be),
        cmocka_unit_test(a_degraded_answer_shows_no_numbers),
        cmocka_unit_test(seconds_are_whole_and_rounded_up_and_never_zero),
        cmocka_unit_test(retry_after_is_the_least_number_that_is_enough),
        cmocka_unit_test(the_largest_numbers_and_names_fit),
        cmocka_unit_test(no_byte_of_a_name_breaks_out_of_its_quotes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
