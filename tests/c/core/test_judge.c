/* What a rules file makes of one request, word for word as the client is told. */
#include "tidegate.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#define NOW_US UINT64_C(1700000000000000)

static tg_clock *now;
static tg_gate *gate;
static char told_text[4096];

/* Each test has a table of its own under a clock that stands. */
static void
rules(const char *yaml)
{
    static unsigned count;
    char path[] = "/tmp/tidegate-judge-XXXXXX", store[64];
    tg_error error;
    const int fd = mkstemp(path);
    assert_true(fd != -1);
    assert_int_equal(write(fd, yaml, strlen(yaml)), (ssize_t)strlen(yaml));
    close(fd);
    snprintf(store, sizeof store, "memory://judge-%d-%u", (int)getpid(), count++);
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of(store), .clock = now };
    const tg_status status = tg_gate_open(&options, &gate, &error);
    unlink(path);
    if (status != TG_OK)
        fail_msg("%s", error.message);
}

/* The outcome's first letter, the status, the fields and the body; '~' where the request is let through unmarked. */
static const char *
told_of(const tg_request *request)
{
    tg_judgement judgement;
    tg_answer answer;
    tg_error error;
    memset(&answer, 0xa5, sizeof answer);
    if (tg_gate_judge(gate, request, 1, NULL, 0, &judgement, &answer, &error) != TG_OK)
        fail_msg("%s", error.message);
    static const char *const outcomes[TG_OUTCOMES] = { "unmatched",    "allowed",     "denied", "forbidden",
                                                       "unidentified", "unavailable", "exempt" };
    int used = sprintf(told_text, "%s %d", outcomes[judgement.outcome], answer.status);
    assert_int_equal(answer.status, judgement.status);
    assert_true(answer.field_count <= TG_ANSWER_FIELDS_MAX && answer.storage_used <= TG_ANSWER_BYTES_MAX);
    for (size_t i = 0; i < answer.field_count; i++)
        used += sprintf(told_text + used, " | %.*s: %.*s", (int)answer.fields[i].name.length, answer.fields[i].name.data,
                        (int)answer.fields[i].value.length, answer.fields[i].value.data);
    if (answer.body.length)
        sprintf(told_text + used, " | %.*s", (int)answer.body.length, answer.body.data);
    return told_text;
}

static const char *
told(const char *method, const char *path, const char *peer)
{
    return told_of(&(tg_request){ .method = tg_text_of(method), .path = tg_text_of(path), .peer = tg_text_of(peer) });
}

/* Whether what was told holds a text. */
static void
holds(const char *text, const char *wanted)
{
    if (!strstr(text, wanted))
        fail_msg("\n%s\ndoes not hold\n%s", text, wanted);
}

static void
lacks(const char *text, const char *unwanted)
{
    if (strstr(text, unwanted))
        fail_msg("\n%s\nholds\n%s", text, unwanted);
}

static int
begin(void **unused)
{
    (void)unused;
    unsetenv("TIDEGATE_STORE");
    return tg_clock_open(NOW_US, &now, NULL) == TG_OK ? 0 : -1;
}

static int
end(void **unused)
{
    (void)unused;
    tg_gate_close(gate);
    tg_clock_close(now);
    gate = NULL;
    return 0;
}

/* ---- how an answer looks ---- */

static void
header_families_are_chosen_one_by_one_for_each_policy(void **unused)
{
    (void)unused;
    rules("defaults: {headers: [x-ratelimit, ietf]}\n"
          "policies:\n"
          "  - {name: both, match: {path: /both}, rules: 5/minute; 50/day}\n"
          "  - {name: ietf, match: {path: /ietf}, rules: 100/second burst 200 token_bucket, headers: ietf}\n"
          "  - {name: none, match: {path: /none}, rules: 5/minute, headers: none}\n"
          "  - {name: old, match: {path: /old}, rules: 5/minute, headers: x-ratelimit}\n");
    assert_string_equal(told("GET", "/both", "192.0.2.1"),
                        "allowed 0 | X-RateLimit-Limit: 5 | X-RateLimit-Remaining: 4 | X-RateLimit-Reset: 60"
                        " | RateLimit-Policy: \"both\";q=5;w=60, \"both:2\";q=50;w=86400"
                        " | RateLimit: \"both\";r=4;t=60, \"both:2\";r=49;t=86400");
    assert_string_equal(told("GET", "/ietf", "192.0.2.1"),
                        "allowed 0 | RateLimit-Policy: \"ietf\";q=200;w=2 | RateLimit: \"ietf\";r=199;t=1");
    assert_string_equal(told("GET", "/none", "192.0.2.1"), "allowed 0");
    assert_string_equal(told("GET", "/old", "192.0.2.1"),
                        "allowed 0 | X-RateLimit-Limit: 5 | X-RateLimit-Remaining: 4 | X-RateLimit-Reset: 60");
}

static void
of_several_identities_the_ietf_fields_show_the_nearest_to_its_limit(void **unused)
{
    (void)unused;
    rules("defaults: {headers: ietf}\n"
          "policies:\n  - {name: a, rules: 3/minute, by: [ip, path]}\n");
    told("GET", "/x", "192.0.2.1");
    assert_string_equal(told("GET", "/x", "192.0.2.2"), "allowed 0 | RateLimit-Policy: \"a\";q=3;w=60"
                                                        " | RateLimit: \"a\";r=1;t=60");
}

static void
reset_may_be_a_time_of_day(void **unused)
{
    (void)unused;
    rules("policies:\n  - {name: a, rules: 1/minute, reset_format: epoch}\n");
    /* A manual clock's microseconds are those since 1970. */
    holds(told("GET", "/", "192.0.2.1"), "X-RateLimit-Reset: 1700000060");
    tg_clock_advance_us(now, 1);
    holds(told("GET", "/", "192.0.2.1"), "X-RateLimit-Reset: 1700000060 | Retry-After: 60");
}

static void
a_problem_names_the_policies_that_refused(void **unused)
{
    (void)unused;
    rules("defaults: {body: problem, headers: none}\n"
          "policies:\n"
          "  - {name: site, rules: 1/minute, also: true}\n"
          "  - {name: api, match: {path: /api}, rules: 1/hour, by: [ip, path]}\n"
          "  - {name: shut, match: {path: /shut}, rules: deny}\n"
          "  - {name: me, match: {path: /me}, rules: 1/minute, by: user}\n");
    told("GET", "/api", "192.0.2.1");
    assert_string_equal(
        told("GET", "/api", "192.0.2.1"),
        "denied 429 | Retry-After: 3600 | Cache-Control: no-store | Content-Type: application/problem+json"
        " | {\"type\": \"https://iana.org/assignments/http-problem-types#quota-exceeded\","
        " \"title\": \"Request cannot be satisfied as assigned quota has been exceeded\", \"status\": 429,"
        " \"code\": \"RATE_LIMITED\", \"detail\": \"Too many requests. Try again in 3600 seconds.\","
        " \"retry_after\": 3600, \"violated-policies\": [\"site\", \"api\"]}");
    holds(told("GET", "/shut", "192.0.2.9"), "{\"type\": \"about:blank\", \"title\": \"Forbidden\", \"status\": 403, "
                                             "\"code\": \"FORBIDDEN\", \"detail\": \"This is not allowed.\"");
    holds(told("GET", "/me", "192.0.2.9"), "\"title\": \"Unauthorized\", \"status\": 401, \"code\": \"UNIDENTIFIED\"");
}

static void
texts_and_statuses_are_the_files(void **unused)
{
    (void)unused;
    rules("defaults:\n"
          "  texts: {denied: \"Zu viele Anfragen, \\\"{wait}\\\" s \\u00fcbrig \\U0001F40C\", unidentified: Who?}\n"
          "  statuses: {denied: 503}\n"
          "policies:\n"
          "  - {name: a, match: {path: /a}, rules: 1/minute}\n"
          "  - {name: b, match: {path: /b}, rules: deny, statuses: {forbidden: 404}, texts: {forbidden: Nothing here.}}\n"
          "  - {name: me, match: {path: /me}, rules: 1/minute, by: user}\n");
    told("GET", "/a", "192.0.2.1");
    holds(told("GET", "/a", "192.0.2.1"), "denied 503 | ");
    holds(told_text, "{\"code\": \"RATE_LIMITED\", \"message\": \"Zu viele Anfragen, \\\"60\\\" s \\u00fcbrig "
                     "\\ud83d\\udc0c\", \"retry_after\": 60}");
    holds(told("GET", "/b", "192.0.2.1"), "forbidden 404 | ");
    holds(told_text, "\"message\": \"Nothing here.\"");
    holds(told("GET", "/me", "192.0.2.1"), "unidentified 401 | ");
    holds(told_text, "\"message\": \"Who?\"");
}

static void
the_longest_answer_fits_and_stays_whole(void **unused)
{
    (void)unused;
    char yaml[8000], *at = yaml;
    at += sprintf(at, "defaults:\n  headers: [x-ratelimit, ietf, shadow]\n  body: problem\n  texts: {denied: \"");
    for (int i = 0; i < 50; i++)
        at = stpcpy(at, "\xf0\x9f\x90\x8c");
    at = stpcpy(at, "\"}\npolicies:\n");
    for (int i = 0; i < 7; i++)
        at += sprintf(at, "  - {name: %d%063d, rules: \"1/10year; 9999999999/week; 1/day; 1/hour\", also: true}\n", i, i);
    rules(yaml);
    told("GET", "/", "192.0.2.1");
    const char *text = told("GET", "/", "192.0.2.1");
    assert_int_equal(text[strlen(text) - 1], '}');
    holds(text, "\"violated-policies\": [\"0");
    holds(text, "0006\"]}");
    lacks(text, "t=18446744073710"); /* TG_NEVER */
}

int
main(void)
{
#define JUDGES(name) cmocka_unit_test_setup_teardown(name, begin, end)
    const struct CMUnitTest tests[] = {
        JUDGES(header_families_are_chosen_one_by_one_for_each_policy),
        JUDGES(of_several_identities_the_ietf_fields_show_the_nearest_to_its_limit),
        JUDGES(reset_may_be_a_time_of_day),
        JUDGES(a_problem_names_the_policies_that_refused),
        JUDGES(texts_and_statuses_are_the_files),
        JUDGES(the_longest_answer_fits_and_stays_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
