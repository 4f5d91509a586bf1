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

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

static tg_clock *now;
static tg_gate *gate;
static unsigned faces;
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
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of(store), .clock = now,
                                      .faces = faces };
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
    faces = 0;
    return 0;
}

/* ---- what the application asks itself ---- */

/* What a hit of an own limiter concludes, over what its caller left in the judgement. */
static tg_judgement
concluded(tg_limiter *limiter, const tg_limiter *known, uint64_t cost)
{
    const tg_part part = { tg_text_of(""), tg_text_of("somebody") };
    const tg_dimension dimension = { &part, 1 };
    tg_judgement judgement;
    tg_error error;
    memset(&judgement, 0xa5, sizeof judgement);
    if (tg_limiter_hit(limiter, &dimension, 1, cost, &judgement.decision, &error) != TG_OK)
        fail_msg("%s", error.message);
    tg_limiter_conclude(known, &judgement);
    assert_false(judgement.settles || judgement.needs_body || judgement.challenged || judgement.shadow_denied);
    assert_int_equal(judgement.waited_us, 0);
    return judgement;
}

static tg_limiter *
own_limiter(const char *rule, const char *address, tg_on_failure on_failure)
{
    tg_store *store = NULL;
    tg_limiter *limiter = NULL;
    tg_error error;
    const tg_limiter_options options = { .rules = tg_text_of(rule), .name = tg_text_of("own"),
                                         .on_store_failure = on_failure };
    const tg_store_options with = { .timeout_us = 1000 };
    if (tg_store_open(tg_text_of(address), &with, &store, &error) != TG_OK ||
        tg_limiter_open(store, NULL, &options, &limiter, &error) != TG_OK)
        fail_msg("%s", error.message);
    tg_store_close(store);
    return limiter;
}

static void
what_an_application_asks_itself_is_concluded_as_a_request_would_be(void **unused)
{
    (void)unused;
    tg_answer answer;
    tg_limiter *limiter = own_limiter("5/minute token_bucket", "memory://judge-own", TG_FAIL_OPEN);
    tg_judgement judgement = concluded(limiter, limiter, 3);
    assert_int_equal(judgement.outcome, TG_ALLOWED);
    assert_int_equal(judgement.status, 0);
    assert_string_equal(judgement.policy, "own");
    judgement = concluded(limiter, NULL, 3);
    assert_int_equal(judgement.outcome, TG_DENIED);
    assert_int_equal(judgement.status, 429);
    assert_string_equal(judgement.policy, "");
    tg_answer_make(&judgement, &answer);
    assert_int_equal(answer.status, 429);
    assert_non_null(memmem(answer.body.data, answer.body.length, "\"RATE_LIMITED\"", 14));
    tg_limiter_close(limiter);

    limiter = own_limiter("deny", "memory://judge-own", TG_FAIL_OPEN);
    judgement = concluded(limiter, limiter, 1);
    assert_int_equal(judgement.outcome, TG_FORBIDDEN);
    assert_int_equal(judgement.status, 403);
    tg_limiter_close(limiter);

    limiter = own_limiter("5/minute", "redis+unix:///nowhere/socket", TG_FAIL_CLOSED);
    judgement = concluded(limiter, limiter, 1);
    assert_int_equal(judgement.outcome, TG_UNAVAILABLE);
    assert_int_equal(judgement.status, 503);
    assert_string_equal(judgement.policy, "own");
    tg_limiter_close(limiter);
}

/* ---- a policy by its name ---- */

static void
a_policy_by_name_judges_alone_whatever_it_matches_and_in_its_own_style(void **unused)
{
    (void)unused;
    rules("policies:\n"
          "  - {name: all, rules: 1/hour}\n"
          "  - {name: named, match: {path: /never}, rules: 2/hour, statuses: {denied: 420}}\n");
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"),
                                 .policy = tg_text_of("named") };
    holds(told_of(&request), "allowed 0 | X-RateLimit-Limit: 2");
    holds(told_of(&request), "allowed 0");
    holds(told_of(&request), "denied 420");
    holds(told("GET", "/", "192.0.2.1"), "allowed 0 | X-RateLimit-Limit: 1");

    tg_judgement judgement;
    tg_error error;
    const tg_request unknown = { .policy = tg_text_of("nam") };
    assert_int_equal(tg_gate_judge(gate, &unknown, 1, NULL, 0, &judgement, NULL, &error), TG_E_CONFIG);
    holds(error.message, "all, named");
}

static void
values_count_in_place_of_all_that_the_request_shows(void **unused)
{
    (void)unused;
    rules("policies:\n"
          "  - {name: one, rules: 1/hour, by: [ip, 'header:x-key']}\n");
    const tg_header header = { tg_text_of("X-Key"), tg_text_of("shown") };
    tg_part values[] = { { tg_text_of("ip"), tg_text_of("::ffff:203.0.113.7") },
                         { tg_text_of("header:X_Key"), tg_text_of("given") } };
    tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"),
                           .headers = &header, .header_count = 1, .values = values, .value_count = 2 };
    holds(told_of(&request), "allowed");
    values[0].value = tg_text_of("203.0.113.8");
    holds(told_of(&request), "denied"); /* by the key alone */
    values[1].value = tg_text_of("another");
    holds(told_of(&request), "allowed");
    values[1].value = tg_text_of(""); /* not the one that the request shows */
    holds(told_of(&request), "unidentified 401");
    values[0].value = tg_text_of("no address");
    holds(told_of(&request), "unidentified 401");
    request.value_count = 0;
    holds(told_of(&request), "allowed");
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

/* ---- whom it does not concern ---- */

static const char *
told_with(const char *name, const char *value, const char *path, const char *peer)
{
    const tg_header header = { tg_text_of(name), tg_text_of(value) };
    return told_of(&(tg_request){ .method = tg_text_of("GET"), .path = tg_text_of(path), .peer = tg_text_of(peer),
                                  .headers = &header, .header_count = 1 });
}

static void
who_is_exempt_is_not_counted_and_gets_no_fields(void **unused)
{
    (void)unused;
    rules("trusted_proxies: 192.0.2.99\n"
          "user_header: X-User\n"
          "exempt: 2001:db8:1::/48\n"
          "policies:\n"
          "  - {name: site, rules: 1/minute, also: true, exempt: \"user:42\"}\n"
          "  - {name: api, match: {path: /api}, rules: 1/minute, exempt: [10.1.0.0/16, \"header:X-Api-Key=s3cret\"]}\n");
    for (int i = 0; i < 3; i++) {
        assert_string_equal(told("GET", "/", "2001:db8:1:7::9"), "exempt 0");
        assert_string_equal(told_with("X-User", "42", "/", "192.0.2.99"), "exempt 0");
    }
    /* Exempt from one of two: the other still counts. */
    holds(told("GET", "/api", "10.1.2.3"), "allowed 0 | X-RateLimit-Limit: 1");
    holds(told("GET", "/api", "10.1.2.3"), "denied 429");
    holds(told_with("X-Api-Key", "s3cret", "/api", "192.0.2.7"), "allowed 0");
    holds(told_with("X-Api-Key", "s3cret", "/api", "192.0.2.7"), "denied 429"); /* by `site` */
    holds(told_with("X-Api-Key", "s3cre", "/api", "192.0.2.7"), "denied 429");
    /* A stranger's word is nobody's. */
    holds(told_with("X-User", "42", "/", "192.0.2.1"), "allowed 0");
    holds(told_with("X-User", "42", "/", "192.0.2.1"), "denied 429");
}

static void
who_is_denied_is_forbidden_wherever_and_nothing_is_taken(void **unused)
{
    (void)unused;
    rules("deny: 198.51.100.0/24\n"
          "exempt: 198.51.100.7\n"
          "policies:\n"
          "  - {name: api, match: {path: /api}, rules: 2/minute, by: path, deny: 203.0.113.0/24}\n");
    assert_string_equal(told("GET", "/elsewhere", "198.51.100.1"),
                        "forbidden 403 | Cache-Control: no-store | Content-Type: application/json"
                        " | {\"code\": \"FORBIDDEN\", \"message\": \"This is not allowed.\", \"retry_after\": null}");
    holds(told("GET", "/elsewhere", "198.51.100.7"), "forbidden 403"); /* `deny` comes before `exempt` */
    for (int i = 0; i < 3; i++)
        holds(told("GET", "/api", "203.0.113.5"), "forbidden 403");
    assert_string_equal(told("GET", "/elsewhere", "203.0.113.5"), "unmatched 0");
    holds(told("GET", "/api", "192.0.2.1"), "X-RateLimit-Remaining: 1");
    const tg_header cors[] = { { tg_text_of("Origin"), tg_text_of("https://a.example") },
                               { tg_text_of("Access-Control-Request-Method"), tg_text_of("GET") } };
    const tg_request preflight = { .method = tg_text_of("OPTIONS"), .path = tg_text_of("/api"),
                                   .peer = tg_text_of("198.51.100.1"), .headers = cors, .header_count = 2 };
    assert_string_equal(told_of(&preflight), "unmatched 0");
}

/* ---- what it costs, and under which rules ---- */

static void
a_request_costs_what_its_policy_says(void **unused)
{
    (void)unused;
    rules("policies:\n"
          "  - {name: five, match: {path: /five}, rules: 100/hour, cost: 5}\n"
          "  - {name: free, match: {path: /free}, rules: 100/hour, cost: 0}\n"
          "  - {name: said, match: {path: /said}, rules: 100/hour, cost: {header: X-Cost, default: 2, max: 50}}\n"
          "  - {name: asked, match: {path: /asked}, rules: 100/hour, cost: {query: n, min: 0, max: 50}}\n");
    holds(told("GET", "/five", "192.0.2.1"), "Remaining: 95");
    holds(told("GET", "/free", "192.0.2.1"), "Remaining: 100");
    static const struct {
        const char *value;
        unsigned left;
    } cases[] = { { "10", 90 }, { "0", 99 }, { "50", 50 }, { "51", 50 }, { "99999999999999999999", 50 }, { "-1", 50 },
                  { "ten", 50 } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char peer[20], wanted[40];
        snprintf(peer, sizeof peer, "192.0.2.%zu", i + 1);
        snprintf(wanted, sizeof wanted, "Remaining: %u |", cases[i].left);
        holds(told_with("X-Cost", cases[i].value, "/said", peer), wanted);
    }
    holds(told("GET", "/said", "192.0.2.77"), "Remaining: 98");
    holds(told("GET", "/asked?n=7", "192.0.2.1"), "Remaining: 93");
    holds(told("GET", "/asked?n=0", "192.0.2.1"), "Remaining: 93");
    holds(told("GET", "/asked?n=1&n=2", "192.0.2.2"), "Remaining: 50");
    holds(told("GET", "/asked", "192.0.2.1"), "Remaining: 92");
}

static void
a_cost_in_a_header_sent_twice_is_the_most(void **unused)
{
    (void)unused;
    rules("policies:\n  - {name: said, rules: 100/hour, cost: {header: X-Cost, max: 50}}\n");
    const tg_header twice[] = { { tg_text_of("X-Cost"), tg_text_of("1") }, { tg_text_of("X-Cost"), tg_text_of("1") } };
    holds(told_of(&(tg_request){ .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"),
                                 .headers = twice, .header_count = 2 }),
          "Remaining: 50");
}

static void
a_plan_has_its_own_rules_and_keeps_what_was_used(void **unused)
{
    (void)unused;
    rules("trusted_proxies: 192.0.2.99\n"
          "policies:\n"
          "  - {name: api, by: \"header:X-Key\", plans: {header: X-Plan, default: free, free: 3/minute, pro: 10/minute}}\n");
    static const struct {
        const char *plan, *peer, *wanted;
    } cases[] = {
        { "", "192.0.2.99", "Limit: 3 | X-RateLimit-Remaining: 2" },
        { "pro", "192.0.2.99", "Limit: 10 | X-RateLimit-Remaining: 8" },
        { "gold", "192.0.2.99", "Limit: 3 | X-RateLimit-Remaining: 0" },
        { "free", "192.0.2.99", "denied" },
        { "pro", "192.0.2.1", "denied" }, /* nobody may choose for himself */
        { "pro", "192.0.2.99", "Limit: 10 | X-RateLimit-Remaining: 6" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_header headers[] = { { tg_text_of("X-Key"), tg_text_of("k") },
                                      { tg_text_of("X-Plan"), tg_text_of(cases[i].plan) } };
        holds(told_of(&(tg_request){ .method = tg_text_of("GET"), .path = tg_text_of("/"),
                                     .peer = tg_text_of(cases[i].peer), .headers = headers, .header_count = 2 }),
              cases[i].wanted);
    }
    const tg_header key = { tg_text_of("X-Key"), tg_text_of("k") };
    holds(told_of(&(tg_request){ .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"),
                                 .headers = &key, .header_count = 1, .plan = tg_text_of("pro") }),
          "Limit: 10 | X-RateLimit-Remaining: 5"); /* the application knows */
}

static void
what_no_policy_matches_has_a_policy_of_its_own(void **unused)
{
    (void)unused;
    rules("policies:\n"
          "  - {name: site, rules: 100/minute, also: true}\n"
          "  - {name: login, match: {path: /login}, rules: 5/minute}\n"
          "unmatched: {rules: 2/minute, headers: ietf}\n");
    holds(told("GET", "/login", "192.0.2.1"), "Limit: 5");
    holds(told("GET", "/other", "192.0.2.1"), "RateLimit: \"site\";r=98;t=60, \"unmatched\";r=1;t=60");
}

/* ---- bodies and faces ---- */

static void
a_form_is_judged_last_and_only_where_a_face_can_read_it(void **unused)
{
    (void)unused;
    static const char login[] = "policies:\n  - {name: login, rules: 2/minute, by: [ip, \"form:account\"]}\n";
    const tg_header type = { tg_text_of("Content-Type"), tg_text_of("application/x-www-form-urlencoded") };
    tg_request request = { .method = tg_text_of("POST"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"),
                           .headers = &type, .header_count = 1 };
    tg_judgement first, second;
    faces = TG_FACE_BODY;
    rules(login);
    holds(told_of(&request), "unidentified 401"); /* a face that does not read it: never a way through */
    request.body_follows = true;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &first, NULL, NULL), TG_OK);
        assert_true(first.needs_body);
        assert_int_equal(first.outcome, TG_ALLOWED);
        request.body_read = true;
        request.body = tg_text_of("account=a");
        const tg_decision *prior[] = { &first.decision };
        assert_int_equal(tg_gate_judge(gate, &request, 1, prior, 1, &second, NULL, NULL), TG_OK);
        assert_false(second.needs_body);
        assert_int_equal(second.outcome, TG_ALLOWED);
        assert_int_equal(second.decision.remaining, 1 - i);
        request.body_read = false;
    }
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &first, NULL, NULL), TG_OK);
    assert_int_equal(first.outcome, TG_DENIED); /* by the address alone: the body is never read */
    assert_false(first.needs_body);
    request.peer = tg_text_of("192.0.2.2");
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &first, NULL, NULL), TG_OK);
    assert_true(first.needs_body);
    request.body_read = true;
    const tg_decision *prior[] = { &first.decision };
    assert_int_equal(tg_gate_judge(gate, &request, 1, prior, 1, &second, NULL, NULL), TG_OK);
    assert_int_equal(second.outcome, TG_DENIED); /* the account's count holds for every address */
    request.body = tg_text_of("");
    assert_int_equal(tg_gate_judge(gate, &request, 1, prior, 1, &second, NULL, NULL), TG_OK);
    assert_int_equal(second.outcome, TG_UNIDENTIFIED);
}

static void
a_policy_of_the_body_alone_waits_for_it(void **unused)
{
    (void)unused;
    tg_judgement judgement;
    faces = TG_FACE_BODY;
    rules("policies:\n  - {name: login, rules: 2/minute, by: \"json:account\"}\n");
    const tg_request request = { .method = tg_text_of("POST"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"),
                                 .body_follows = true };
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    assert_true(judgement.needs_body);
    assert_int_equal(judgement.status, 0);
    assert_int_equal(judgement.decision.result_count, 0);
}

static void
a_policy_that_a_face_cannot_judge_stops_it_from_starting(void **unused)
{
    (void)unused;
    static const struct {
        const char *yaml;
        unsigned faces, line, column;
        const char *message;
    } cases[] = {
        { "policies:\n  - name: a\n    rules: 1/s\n    by: [ip, \"form:x\"]\n", TG_FACE_USER, 4, 14, "asks for \"form:x\"" },
        { "policies:\n  - name: a\n    rules: 1/s\n    by: user\n", TG_FACE_KNOWN, 4, 9, "asks for \"user\"" },
        { "policies:\n  - name: a\n    rules: 1/s\n    match: {route: /a}\n", TG_FACE_KNOWN, 4, 20, "asks for the route" },
        { "policies:\n  - name: a\n    rules: 1/s\n    count: {status: 401}\n", TG_FACE_KNOWN, 4, 12, "asks for what is answered" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char path[] = "/tmp/tidegate-judge-XXXXXX";
        tg_error error;
        const int fd = mkstemp(path);
        assert_int_equal(write(fd, cases[i].yaml, strlen(cases[i].yaml)), (ssize_t)strlen(cases[i].yaml));
        close(fd);
        const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of("memory://judge-faces"),
                                          .clock = now, .faces = cases[i].faces };
        assert_int_equal(tg_gate_open(&options, &gate, &error), TG_E_CONFIG);
        unlink(path);
        gate = NULL;
        holds(error.message, cases[i].message);
        assert_int_equal(error.line, cases[i].line);
        assert_int_equal(error.column, cases[i].column);
    }
    faces = TG_FACE_KNOWN;
    rules("policies:\n  - {name: a, rules: 1/s, by: user|ip}\n");
}

/* ---- modes ---- */

static void
a_shadow_decides_on_counts_of_its_own_and_refuses_nobody(void **unused)
{
    (void)unused;
    tg_judgement judgement;
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("defaults: {headers: [x-ratelimit, shadow]}\n"
          "policies:\n"
          "  - {name: tried, rules: 1/minute, mode: shadow, also: true}\n"
          "  - {name: site, rules: 3/minute}\n");
    assert_string_equal(told_of(&request),
                        "allowed 0 | X-RateLimit-Limit: 3 | X-RateLimit-Remaining: 2 | X-RateLimit-Reset: 60");
    assert_string_equal(told_of(&request), "allowed 0 | X-RateLimit-Limit: 3 | X-RateLimit-Remaining: 1"
                                           " | X-RateLimit-Reset: 60 | X-RateLimit-Shadow: denied");
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    assert_true(judgement.shadow_denied);
    assert_string_equal(judgement.shadow_policy, "tried");
    assert_string_equal(judgement.policy, "site");
    lacks(told_of(&request), "X-RateLimit-Shadow"); /* refused by `site`: the shadow is not asked */
    holds(told_text, "denied 429");
}

static void
a_shadow_that_becomes_enforced_begins_anew(void **unused)
{
    (void)unused;
    char path[] = "/tmp/tidegate-judge-XXXXXX";
    const int fd = mkstemp(path);
    static const char shadow[] = "policies: [{name: a, rules: 1/minute, mode: shadow}]\n",
                      enforced[] = "policies: [{name: a, rules: 1/minute}]\n";
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of("memory://judge-shadow"), .clock = now };
    assert_int_equal(pwrite(fd, shadow, sizeof shadow - 1, 0), sizeof shadow - 1);
    assert_int_equal(tg_gate_open(&options, &gate, NULL), TG_OK);
    assert_string_equal(told("GET", "/", "192.0.2.1"), "unmatched 0");
    assert_string_equal(told("GET", "/", "192.0.2.1"), "unmatched 0");
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(pwrite(fd, enforced, sizeof enforced - 1, 0), sizeof enforced - 1);
    assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
    holds(told("GET", "/", "192.0.2.1"), "allowed 0");
    holds(told("GET", "/", "192.0.2.1"), "denied 429");
    close(fd);
    unlink(path);
}

static void
a_challenge_lets_through_and_says_so(void **unused)
{
    (void)unused;
    tg_judgement judgement;
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("policies:\n"
          "  - {name: robots, rules: 1/minute, mode: challenge, also: true}\n"
          "  - {name: alone, match: {path: /alone}, rules: 100/minute, mode: challenge}\n"
          "  - {name: site, rules: 3/minute}\n");
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    assert_false(judgement.challenged);
    assert_int_equal(judgement.decision.remaining, 2); /* of what is enforced */
    assert_int_equal(tg_decision_refund(tg_gate_store(gate), &judgement.decision, NULL), TG_OK); /* of both */
    lacks(told_of(&request), "Challenge");
    assert_string_equal(told_of(&request), "allowed 0 | X-RateLimit-Limit: 3 | X-RateLimit-Remaining: 1"
                                           " | X-RateLimit-Reset: 60 | X-RateLimit-Challenge: required");
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    assert_true(judgement.challenged);
    assert_int_equal(judgement.status, 0);
    assert_string_equal(told("GET", "/alone", "192.0.2.2"),
                        "allowed 0 | X-RateLimit-Limit: 1 | X-RateLimit-Remaining: 0 | X-RateLimit-Reset: 60");
    assert_string_equal(told("GET", "/alone", "192.0.2.2"), "unmatched 0 | X-RateLimit-Challenge: required");
}

static void
what_is_not_enforced_is_charged_once_however_often_a_request_is_judged(void **unused)
{
    (void)unused;
    tg_judgement first, second;
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("policies:\n"
          "  - {name: tried, rules: 2/minute, mode: shadow, also: true}\n"
          "  - {name: robots, rules: 2/minute, mode: challenge, also: true}\n"
          "  - {name: site, rules: 9/minute}\n");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &first, NULL, NULL), TG_OK);
        const tg_decision *prior[] = { &first.decision };
        assert_int_equal(tg_gate_judge(gate, &request, 1, prior, 1, &second, NULL, NULL), TG_OK);
        assert_false(first.challenged || second.challenged || first.shadow_denied || second.shadow_denied);
    }
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &first, NULL, NULL), TG_OK);
    assert_true(first.challenged && first.shadow_denied);
}

/* ---- after the response ---- */

static tg_judgement
judged_and_settled(const tg_request *request, int status, const char *cost)
{
    tg_judgement judgement;
    const tg_header header = { tg_text_of("X-Cost"), tg_text_of(cost) };
    assert_int_equal(tg_gate_judge(gate, request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    if (judgement.settles)
        assert_int_equal(tg_gate_settle(gate, &judgement, status, &header, cost != NULL, NULL), TG_OK);
    assert_false(judgement.settles);
    return judgement;
}

static void
only_the_statuses_that_count_are_counted(void **unused)
{
    (void)unused;
    const tg_request request = { .method = tg_text_of("POST"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("policies:\n"
          "  - {name: site, rules: 100/minute, also: true}\n"
          "  - {name: login, rules: 5/minute; 6/hour fixed_window; 7/day burst 7, count: {status: [401, \"5xx\"]}}\n");
    for (int i = 0; i < 10; i++)
        assert_int_equal(judged_and_settled(&request, 200, NULL).status, 0);
    for (int i = 0; i < 5; i++)
        assert_int_equal(judged_and_settled(&request, i % 2 ? 401 : 503, NULL).status, 0);
    tg_judgement judgement = judged_and_settled(&request, 200, NULL);
    assert_int_equal(judgement.status, 429); /* before the handler runs */
    assert_string_equal(judgement.policy, "login");
    tg_clock_advance_us(now, 60000000);
    assert_int_equal(judged_and_settled(&request, 404, NULL).decision.remaining, 0); /* 6/hour: five used, one taken */
    judgement = judged_and_settled(&request, 404, NULL);
    assert_int_equal(judgement.status, 0);
    /* What settling gave back is not given twice. */
    assert_int_equal(tg_decision_refund(tg_gate_store(gate), &judgement.decision, NULL), TG_OK);
    assert_int_equal(judged_and_settled(&request, 401, NULL).status, 0);
    assert_int_equal(judged_and_settled(&request, 401, NULL).status, 429);
}

static void
requests_under_way_hold_their_places_until_their_answers_are_known(void **unused)
{
    (void)unused;
    tg_judgement judgements[3];
    const tg_request request = { .method = tg_text_of("POST"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("policies: [{name: login, rules: 2/minute, count: {status: 401}}]\n");
    for (int i = 0; i < 3; i++) {
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgements[i], NULL, NULL), TG_OK);
        assert_int_equal(judgements[i].status, i < 2 ? 0 : 429);
    }
    assert_int_equal(tg_gate_settle(gate, &judgements[0], 200, NULL, 0, NULL), TG_OK);
    assert_int_equal(tg_gate_settle(gate, &judgements[0], 200, NULL, 0, NULL), TG_OK); /* once only */
    assert_int_equal(tg_gate_settle(gate, &judgements[2], 200, NULL, 0, NULL), TG_OK); /* it took nothing */
    assert_int_equal(judged_and_settled(&request, 401, NULL).status, 0);
    assert_int_equal(judged_and_settled(&request, 401, NULL).status, 429);
}

static void
a_response_says_what_its_request_cost(void **unused)
{
    (void)unused;
    static const char *const words[] = { "", "sliding_log", "fixed_window", "sliding_counter", "burst 10 token_bucket" };
    for (size_t i = 0; i < COUNT(words); i++) {
        char yaml[200];
        const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
        snprintf(yaml, sizeof yaml, "policies:\n  - {name: a, rules: 10/minute %s, cost: {response_header: X-Cost, reserve: 2, "
                                    "max: 5}}\n", words[i]);
        tg_gate_close(gate);
        rules(yaml);
        assert_int_equal(judged_and_settled(&request, 200, "0").decision.remaining, 8);
        assert_int_equal(judged_and_settled(&request, 200, "5").decision.remaining, 8); /* the 0 was given back */
        assert_int_equal(judged_and_settled(&request, 200, NULL).decision.remaining, 3);
        assert_int_equal(judged_and_settled(&request, 200, "4").decision.remaining, 1); /* 9 used, 2 more than are left */
        const tg_judgement refused = judged_and_settled(&request, 200, "1");
        assert_int_equal(refused.status, 429);
        assert_int_equal(refused.decision.remaining, 0);
        if (i == 4) /* 11 used of 10: two more pass when three have drained */
            assert_int_equal(refused.decision.retry_after_us, 18000000);
        tg_clock_advance_us(now, 120000000);
        assert_int_equal(judged_and_settled(&request, 200, "1").decision.remaining, 8);
        assert_int_equal(judged_and_settled(&request, 200, "99999").decision.remaining, 7);
        assert_int_equal(judged_and_settled(&request, 200, "x").decision.remaining, 2);
    }
}

static void
settling_follows_the_rules_in_force_and_needs_no_reading_of_its_own(void **unused)
{
    (void)unused;
    tg_judgement judgement;
    char path[] = "/tmp/tidegate-judge-XXXXXX";
    const int fd = mkstemp(path);
    static const char before[] = "policies: [{name: a, rules: 2/minute, count: {status: 401}}]\n",
                      since[] = "policies: [{name: b, match: {path: /b}, rules: 9/s}, {name: a, rules: 3/minute, count: {status: 4xx}}]\n";
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of("memory://judge-settle"), .clock = now };
    assert_int_equal(pwrite(fd, before, sizeof before - 1, 0), sizeof before - 1);
    assert_int_equal(tg_gate_open(&options, &gate, NULL), TG_OK);
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(pwrite(fd, since, sizeof since - 1, 0), sizeof since - 1);
    assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
    assert_int_equal(tg_gate_settle(gate, &judgement, 200, NULL, 0, NULL), TG_OK);
    assert_int_equal(judged_and_settled(&request, 200, NULL).decision.remaining, 2);
    close(fd);
    unlink(path);
}

/* ---- pause_when ---- */

static uint64_t
counted_at(const char *policy, tg_metric metric)
{
    tg_policy_metrics policies[16];
    size_t count;
    assert_int_equal(tg_store_read_metrics(tg_gate_store(gate), policies, COUNT(policies), &count, NULL, NULL), TG_OK);
    for (size_t i = 0; i < count; i++)
        if (strcmp(policies[i].policy, policy) == 0)
            return policies[i].counts[metric];
    return 0;
}

/* How often a code was spoken, and what was said last. */
static unsigned
notices_of(const char *code, char last[480])
{
    tg_notice notice;
    unsigned count = 0;
    while (tg_notice_take(&notice))
        if (strcmp(notice.code, code) == 0) {
            memcpy(last, notice.message, sizeof notice.message);
            count++;
        }
    return count;
}

static void
append_words(void *context, tg_text piece)
{
    strncat(context, piece.data, piece.length);
}

static void
nobody_is_refused_while_most_answers_are_errors(void **unused)
{
    (void)unused;
    char last[480];
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("policies:\n"
          "  - {name: site, rules: 5/10minutes, pause_when: error_rate > 50% over 70s min 4}\n");
    notices_of("", last);
    for (int i = 0; i < 3; i++)
        assert_int_equal(judged_and_settled(&request, 503, NULL).status, 0);
    assert_int_equal(judged_and_settled(&request, 200, NULL).status, 0); /* three of three are too few to say */
    assert_int_equal(judged_and_settled(&request, 200, NULL).status, 0);
    assert_int_equal(notices_of("refusals-paused", last), 1); /* three of four were, when the fifth was judged */
    assert_string_equal(last, "policy \"site\" refuses nobody: 3 of 4 answers within 70 s were errors, over the 50 % of its "
                              "pause_when");
    /* The limit is used up: three of five are still over 50 %. */
    assert_string_equal(told("GET", "/", "192.0.2.1"), "unmatched 0");
    tg_explanation *why;
    assert_int_equal(tg_gate_explain(gate, &request, 1, &why, NULL), TG_OK);
    holds(why->policies[0].why, "it refuses nobody at the moment: 3 of 5 answers were errors");
    char words[2048] = "";
    tg_explanation_write(why, false, append_words, words);
    holds(words, "decision  paused by \"site\": over its limit, and it refuses nobody at the moment");
    tg_explanation_close(why);
    assert_int_equal(judged_and_settled(&request, 200, NULL).status, 0);
    assert_int_equal(counted_at("site", TG_METRIC_PAUSED), 2);
    /* Three of six are not over 50 %. */
    assert_int_equal(judged_and_settled(&request, 200, NULL).status, 429);
    assert_int_equal(notices_of("refusals-resumed", last), 1);
    holds(last, "policy \"site\" refuses again: 3 of 6 answers");
    assert_int_equal(counted_at("site", TG_METRIC_DENIED), 1);
    assert_int_equal(counted_at("site", TG_METRIC_ALLOWED), 5);
}

static void
errors_are_forgotten_after_the_time_that_pause_when_names(void **unused)
{
    (void)unused;
    char last[480];
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("policies:\n"
          "  - {name: site, rules: 2/hour, pause_when: error_rate > 0% over 70s min 2}\n");
    notices_of("", last);
    for (int i = 0; i < 2; i++)
        assert_int_equal(judged_and_settled(&request, 500, NULL).status, 0);
    tg_clock_advance_us(now, 60000000);
    assert_int_equal(judged_and_settled(&request, 200, NULL).status, 0);
    tg_clock_advance_us(now, 10000000);
    assert_int_equal(judged_and_settled(&request, 200, NULL).status, 429);
    /* A rate about its bound does not fill the log: silence for as long as it looks back. */
    assert_int_equal(notices_of("refusals-resumed", last), 1);
    assert_int_equal(notices_of("refusals-paused", last), 0);
}

static void
a_pause_lifts_no_other_policy_and_no_prohibition(void **unused)
{
    (void)unused;
    tg_judgement judgement;
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    rules("defaults: {pause_when: error_rate > 50% min 1}\n"
          "policies:\n"
          "  - {name: wide, rules: 4/hour, also: true, pause_when: none}\n"
          "  - {name: shut, match: {path: /shut}, rules: deny}\n"
          "  - {name: kept, match: {path: /kept}, rules: 9/hour, deny: 192.0.2.9}\n"
          "  - {name: site, rules: 2/hour}\n");
    for (int i = 0; i < 3; i++)
        assert_int_equal(judged_and_settled(&request, 502, NULL).status, 0);
    judgement = judged_and_settled(&request, 502, NULL);
    assert_int_equal(judgement.status, 0);
    assert_string_equal(judgement.policy, "wide"); /* what is told is of the policy that still refuses */
    assert_int_equal(judgement.decision.remaining, 0);
    assert_int_equal(judged_and_settled(&request, 502, NULL).status, 429);
    assert_int_equal(counted_at("site", TG_METRIC_PAUSED), 2);
    assert_int_equal(counted_at("wide", TG_METRIC_DENIED), 1);
    holds(told("GET", "/shut", "192.0.2.2"), "forbidden 403");
    const tg_request kept = { .method = tg_text_of("GET"), .path = tg_text_of("/kept"), .peer = tg_text_of("192.0.2.3") };
    judged_and_settled(&kept, 500, NULL);
    holds(told("GET", "/kept", "192.0.2.9"), "forbidden 403");
}

static void
how_answers_go_is_known_to_every_gate_of_a_table_and_outlives_a_reload(void **unused)
{
    (void)unused;
    tg_gate *other = NULL;
    tg_judgement judgement;
    char path[] = "/tmp/tidegate-judge-XXXXXX";
    const int fd = mkstemp(path);
    static const char yaml[] = "policies: [{name: a, rules: 1/hour, pause_when: error_rate > 10% min 3}]\n";
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of("memory://judge-watch"), .clock = now };
    assert_int_equal(pwrite(fd, yaml, sizeof yaml - 1, 0), sizeof yaml - 1);
    assert_int_equal(tg_gate_open(&options, &gate, NULL), TG_OK);
    assert_int_equal(tg_gate_open(&options, &other, NULL), TG_OK);
    assert_int_equal(judged_and_settled(&request, 500, NULL).status, 0);
    assert_int_equal(judged_and_settled(&request, 500, NULL).status, 429);
    for (int i = 0; i < 2; i++) { /* under way while the rules are read again */
        tg_clock_advance_us(now, 1);
        const tg_request stranger = { .method = tg_text_of("GET"), .path = tg_text_of("/"),
                                      .peer = tg_text_of(i ? "192.0.2.8" : "192.0.2.9") };
        assert_int_equal(tg_gate_judge(gate, &stranger, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
        assert_int_equal(tg_gate_settle(gate, &judgement, 500, NULL, 0, NULL), TG_OK);
    }
    assert_int_equal(tg_gate_judge(other, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    assert_int_equal(judgement.status, 0);
    tg_gate_close(other);
    close(fd);
    unlink(path);
}

static void
a_table_too_small_to_count_still_pauses_by_what_its_process_has_seen(void **unused)
{
    (void)unused;
    char path[] = "/tmp/tidegate-judge-XXXXXX";
    const int fd = mkstemp(path);
    static const char yaml[] = "policies: [{name: a, rules: 1/hour, pause_when: error_rate > 10% min 1}]\n";
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of("memory://judge-small?size=512KiB"),
                                      .clock = now };
    assert_int_equal(pwrite(fd, yaml, sizeof yaml - 1, 0), sizeof yaml - 1);
    assert_int_equal(tg_gate_open(&options, &gate, NULL), TG_OK);
    assert_int_equal(judged_and_settled(&request, 500, NULL).status, 0);
    assert_int_equal(judged_and_settled(&request, 500, NULL).status, 0);
    close(fd);
    unlink(path);
}

/* ---- count_denied ---- */

static const char *const EVERY_ALGORITHM[] = { "sliding_log", "fixed_window", "sliding_counter", "token_bucket",
                                               "leaky_bucket", "sliding_log resolution 2s" };

static tg_judgement
asked(const char *path)
{
    tg_judgement judgement;
    tg_error error;
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of(path), .peer = tg_text_of("192.0.2.1") };
    if (tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, &error) != TG_OK)
        fail_msg("%s", error.message);
    return judgement;
}

/* Once a second for a minute: how often it passed. */
static unsigned
knocked(uint64_t *retry_us)
{
    unsigned passed = 0;
    for (int second = 0; second < 60; second++) {
        const tg_judgement judgement = asked("/");
        passed += judgement.status == 0;
        *retry_us = judgement.decision.retry_after_us;
        tg_clock_advance_us(now, 1000000);
    }
    return passed;
}

static void
who_keeps_knocking_stays_out_where_denied_hits_count_and_only_there(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < COUNT(EVERY_ALGORITHM); i++)
        for (int counting = 0; counting < 2; counting++) {
            char yaml[200];
            uint64_t retry_us;
            snprintf(yaml, sizeof yaml, "policies:\n  - {name: a, rules: 2/4s %s%s}\n", EVERY_ALGORITHM[i],
                     counting ? ", count_denied: true" : "");
            tg_gate_close(gate);
            rules(yaml);
            const unsigned passed = knocked(&retry_us);
            if (!counting) {
                assert_in_range(passed, 15, 32); /* about two in every four seconds */
                continue;
            }
            assert_in_range(passed, 2, 3); /* a bucket drains while the first come */
            /* After as long as was told it passes, a microsecond earlier it does not; and that is no more than two periods. */
            assert_in_range(retry_us, 1, 8000000);
            tg_judgement judgement = asked("/");
            assert_int_equal(judgement.status, 429);
            assert_int_equal(judgement.decision.remaining, 0);
            tg_clock_advance_us(now, judgement.decision.retry_after_us - 1);
            judgement = asked("/");
            assert_int_equal(judgement.status, 429); /* and begins anew by that */
            tg_clock_advance_us(now, judgement.decision.retry_after_us);
            assert_int_equal(asked("/").status, 0);
        }
}

static void
a_look_counts_nothing_and_a_cost_that_never_fits_neither(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < COUNT(EVERY_ALGORITHM); i++) {
        char yaml[200];
        tg_judgement judgement;
        tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"),
                               .peek = true };
        snprintf(yaml, sizeof yaml, "policies:\n  - {name: a, rules: 2/hour %s, count_denied: true}\n", EVERY_ALGORITHM[i]);
        tg_gate_close(gate);
        rules(yaml);
        assert_int_equal(tg_gate_judge(gate, &request, 3, NULL, 0, &judgement, NULL, NULL), TG_OK);
        request.peek = false;
        assert_int_equal(tg_gate_judge(gate, &request, 3, NULL, 0, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(judgement.decision.retry_after_us, TG_NEVER);
        assert_int_equal(judgement.decision.remaining, 2);
        asked("/");
        asked("/");
        request.peek = true;
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        const uint64_t wait_us = judgement.decision.retry_after_us;
        tg_clock_advance_us(now, wait_us - 1);
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(judgement.status, 429);
        tg_clock_advance_us(now, 1);
        assert_int_equal(asked("/").status, 0);
    }
}

static void
a_denied_hit_counts_at_all_rules_of_its_policy_and_at_no_other_policy(void **unused)
{
    (void)unused;
    rules("policies:\n"
          "  - {name: wide, rules: 100/day, also: true}\n"
          "  - {name: shut, match: {path: /shut}, rules: 1/minute; 6/day, count_denied: true}\n"
          "  - {name: full, match: {path: /full}, rules: 3/day, count_denied: true}\n");
    assert_int_equal(asked("/shut").status, 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(asked("/shut").status, 429);
    tg_clock_advance_us(now, 60000000);
    assert_int_equal(asked("/shut").decision.remaining, 0); /* 6/day: one passed, four counted, this one */
    tg_clock_advance_us(now, 60000000);
    assert_int_equal(asked("/shut").status, 429);
    assert_int_equal(asked("/").decision.remaining, 97); /* "wide" let through and was not charged for what "shut" refused */
    for (int i = 0; i < 96; i++)
        assert_int_equal(asked("/").status, 0);
    assert_int_equal(asked("/full").status, 0); /* the hundredth */
    assert_int_equal(asked("/full").status, 429);
    assert_string_equal(asked("/full").policy, "wide");
    /* "full" took one, and nothing for what "wide" refused. */
    const tg_part part = { tg_text_of("ip"), tg_text_of("192.0.2.1") };
    const tg_dimension dimension = { &part, 1 };
    tg_decision decision;
    tg_limiter *full;
    assert_int_equal(tg_gate_limiter(gate, tg_text_of("full"), &full, NULL), TG_OK);
    assert_int_equal(tg_limiter_peek(full, &dimension, 1, 1, &decision, NULL), TG_OK);
    assert_int_equal(decision.remaining, 2);
    tg_limiter_close(full);
}

static void
knocking_for_long_takes_no_more_room_than_the_rule(void **unused)
{
    (void)unused;
    tg_store_stats before, since;
    rules("policies:\n  - {name: a, rules: 20/hour, count_denied: true}\n");
    for (int i = 0; i < 40; i++)
        asked("/");
    assert_int_equal(tg_store_read_stats(tg_gate_store(gate), &before, NULL), TG_OK);
    for (int i = 0; i < 100000; i++) {
        tg_clock_advance_us(now, 1000);
        assert_int_equal(asked("/").status, 429);
    }
    assert_int_equal(tg_store_read_stats(tg_gate_store(gate), &since, NULL), TG_OK);
    assert_in_range(since.log_blocks_used, 1, before.log_blocks_used + 2);
    tg_clock_advance_us(now, asked("/").decision.retry_after_us);
    assert_int_equal(asked("/").status, 0);
}

/* ---- log_decisions ---- */

static unsigned
lines_about_decisions(char last[480])
{
    tg_notice notice;
    unsigned count = 0;
    while (tg_notice_take(&notice))
        if (strcmp(notice.code, "decision") == 0) {
            memcpy(last, notice.message, sizeof notice.message);
            count++;
        }
    return count;
}

static void
a_hundred_thousand_refusals_are_a_few_lines_with_their_number(void **unused)
{
    (void)unused;
    char last[480] = "";
    tg_judgement judgement;
    rules("policies:\n"
          "  - {name: site, rules: 5/hour, log_decisions: refused}\n");
    lines_about_decisions(last);
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/a?password=x"),
                                 .peer = tg_text_of("192.0.2.1") };
    unsigned lines = 0;
    for (int i = 0; i < 100000; i++) {
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        if (i % 10 == 0)
            lines += lines_about_decisions(last);
    }
    assert_in_range(lines, 1, 20);
    holds(last, "policy \"site\" refused GET /a for ip 192.0.2.1; ");
    lacks(last, "password");
}

static void
decisions_are_logged_where_asked_for_and_never_by_a_look(void **unused)
{
    (void)unused;
    char last[480] = "";
    rules("defaults: {log_decisions: {what: all, sample: 3}}\n"
          "policies:\n"
          "  - {name: quiet, match: {path: /quiet}, rules: 100/hour, log_decisions: none}\n"
          "  - {name: site, rules: 100/hour}\n");
    lines_about_decisions(last);
    tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1"), .peek = true };
    for (int i = 0; i < 5; i++)
        told_of(&request);
    told("GET", "/quiet", "192.0.2.1");
    told("GET", "/", "192.0.2.1");
    told("GET", "/", "192.0.2.1");
    assert_int_equal(lines_about_decisions(last), 0);
    told("GET", "/", "192.0.2.1");
    assert_int_equal(lines_about_decisions(last), 1);
    holds(last, "policy \"site\" let through GET / for ip 192.0.2.1; 3 decisions since the last line, 0 refused");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_an_application_asks_itself_is_concluded_as_a_request_would_be, begin, end),
        cmocka_unit_test_setup_teardown(a_policy_by_name_judges_alone_whatever_it_matches_and_in_its_own_style, begin, end),
        cmocka_unit_test_setup_teardown(values_count_in_place_of_all_that_the_request_shows, begin, end),
        cmocka_unit_test_setup_teardown(header_families_are_chosen_one_by_one_for_each_policy, begin, end),
        cmocka_unit_test_setup_teardown(of_several_identities_the_ietf_fields_show_the_nearest_to_its_limit, begin, end),
        cmocka_unit_test_setup_teardown(reset_may_be_a_time_of_day, begin, end),
        cmocka_unit_test_setup_teardown(a_problem_names_the_policies_that_refused, begin, end),
        cmocka_unit_test_setup_teardown(texts_and_statuses_are_the_files, begin, end),
        cmocka_unit_test_setup_teardown(the_longest_answer_fits_and_stays_whole, begin, end),
        cmocka_unit_test_setup_teardown(who_is_exempt_is_not_counted_and_gets_no_fields, begin, end),
        cmocka_unit_test_setup_teardown(who_is_denied_is_forbidden_wherever_and_nothing_is_taken, begin, end),
        cmocka_unit_test_setup_teardown(a_request_costs_what_its_policy_says, begin, end),
        cmocka_unit_test_setup_teardown(a_cost_in_a_header_sent_twice_is_the_most, begin, end),
        cmocka_unit_test_setup_teardown(a_plan_has_its_own_rules_and_keeps_what_was_used, begin, end),
        cmocka_unit_test_setup_teardown(what_no_policy_matches_has_a_policy_of_its_own, begin, end),
        cmocka_unit_test_setup_teardown(a_form_is_judged_last_and_only_where_a_face_can_read_it, begin, end),
        cmocka_unit_test_setup_teardown(a_policy_of_the_body_alone_waits_for_it, begin, end),
        cmocka_unit_test_setup_teardown(a_policy_that_a_face_cannot_judge_stops_it_from_starting, begin, end),
        cmocka_unit_test_setup_teardown(a_shadow_decides_on_counts_of_its_own_and_refuses_nobody, begin, end),
        cmocka_unit_test_setup_teardown(a_shadow_that_becomes_enforced_begins_anew, begin, end),
        cmocka_unit_test_setup_teardown(a_challenge_lets_through_and_says_so, begin, end),
        cmocka_unit_test_setup_teardown(what_is_not_enforced_is_charged_once_however_often_a_request_is_judged, begin, end),
        cmocka_unit_test_setup_teardown(only_the_statuses_that_count_are_counted, begin, end),
        cmocka_unit_test_setup_teardown(requests_under_way_hold_their_places_until_their_answers_are_known, begin, end),
        cmocka_unit_test_setup_teardown(a_response_says_what_its_request_cost, begin, end),
        cmocka_unit_test_setup_teardown(settling_follows_the_rules_in_force_and_needs_no_reading_of_its_own, begin, end),
        cmocka_unit_test_setup_teardown(nobody_is_refused_while_most_answers_are_errors, begin, end),
        cmocka_unit_test_setup_teardown(errors_are_forgotten_after_the_time_that_pause_when_names, begin, end),
        cmocka_unit_test_setup_teardown(a_pause_lifts_no_other_policy_and_no_prohibition, begin, end),
        cmocka_unit_test_setup_teardown(how_answers_go_is_known_to_every_gate_of_a_table_and_outlives_a_reload, begin, end),
        cmocka_unit_test_setup_teardown(a_table_too_small_to_count_still_pauses_by_what_its_process_has_seen, begin, end),
        cmocka_unit_test_setup_teardown(who_keeps_knocking_stays_out_where_denied_hits_count_and_only_there, begin, end),
        cmocka_unit_test_setup_teardown(a_look_counts_nothing_and_a_cost_that_never_fits_neither, begin, end),
        cmocka_unit_test_setup_teardown(a_denied_hit_counts_at_all_rules_of_its_policy_and_at_no_other_policy, begin, end),
        cmocka_unit_test_setup_teardown(knocking_for_long_takes_no_more_room_than_the_rule, begin, end),
        cmocka_unit_test_setup_teardown(a_hundred_thousand_refusals_are_a_few_lines_with_their_number, begin, end),
        cmocka_unit_test_setup_teardown(decisions_are_logged_where_asked_for_and_never_by_a_look, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
