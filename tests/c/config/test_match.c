/* Which policies a request meets. */
#include "config/match.h"

#include "config/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

static tg_config *
parsed(const char *yaml)
{
    tg_config *config;
    tg_error error;
    if (tg__config_parse(tg_text_of(yaml), "r.yaml", &config, &error) != TG_OK)
        fail_msg("%s\n%s", error.message, yaml);
    return config;
}

static bool
meets(const char *match, const tg_request *request)
{
    char yaml[1000];
    size_t found[TG_LIMITERS_MAX];
    snprintf(yaml, sizeof yaml, "policies:\n  - name: a\n    rules: 1/s\n    match: %s\n", match);
    tg_config *config = parsed(yaml);
    const size_t count = tg__config_match(config, request, found);
    tg__config_close(config);
    return count == 1;
}

static void
paths_meet_their_patterns_in_any_spelling(void **unused)
{
    (void)unused;
    static const struct {
        const char *pattern, *path;
        bool meets;
    } cases[] = {
        { "/login", "/login", true },       { "/login", "/login/", true },      { "/login", "//login", true },
        { "/login", "/%6Cogin?x=1", true }, { "/login", "/a/../login", true },  { "/login", "/login%2F", true },
        { "/login", "/loginx", false },     { "/login", "/login/x", false },    { "/login", "/LOGIN", false },
        { "/login/", "/login", true },      { "/a/../login", "/login", true },  { "/%6Cogin", "/login", true },
        { "/", "/", true },                 { "/", "", true },                  { "/", "/a", false },
        { "/api/*", "/api/x", true },       { "/api/*", "/api/x/y", true },     { "/api/*", "/api/", true },
        { "/api/*", "/api", true },         { "/api/*", "/apix", false },       { "/api/*", "/ap", false },
        { "/api/*", "/api?x", true },       { "/api/*", "/v/api/x", false },    { "/api*", "/apix", true },
        { "/api*", "/api", true },          { "/api*", "/ap", false },          { "*", "/", true },
        { "*", "/a/b", true },              { "/*", "/", true },                { "/*", "/a", true },
        { "*.php", "/a/b.php", true },      { "*.php", "/a/b.php/c", false },   { "/*.php", "/.php", true },
        { "/u/*/edit", "/u/7/edit", true }, { "/u/*/edit", "/u/7/8/edit", true }, { "/u/*/edit", "/u/edit", false },
        { "/u/*/edit", "/u//edit", true }, /* as sent */
        { "/u/*/*", "/u/7", true },         { "/u/*/*", "/u", false },
        { "/u/{id}", "/u/7", true },        { "/u/{id}", "/u/7/", true },       { "/u/{id}", "/u", false },
        { "/u/{id}", "/u/7/x", false },     { "/u/{id}/x", "/u/7/x", true },    { "/u/{id}/x", "/u/x", false },
        { "/{a}/{b}", "/1/2", true },       { "/{a}/{b}", "/1/2/3", false },    { "/u/{id}/*", "/u/7/a/b", true },
        { "/u/{id}/*", "/u/7", true },      { "/u/{id}/*", "/u", false },       { "/u/{id}", "/u/%2e%2e", true }, /* as sent */
        { "/a*b*c", "/abc", true },         { "/a*b*c", "/axxbxxc", true },     { "/a*b*c", "/acb", false },
        { "/a*a", "/a", false },            { "/a*a", "/aa", true },            { "/a**b", "/ab", true },
        { "/*a*", "/bab", true },           { "/*a*", "/b", false },
        { "/caf\xc3\xa9", "/caf%C3%A9", true },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char match[200];
        snprintf(match, sizeof match, "{path: \"%s\"}", cases[i].pattern);
        const tg_request request = { .path = tg_text_of(cases[i].path) };
        if (meets(match, &request) != cases[i].meets)
            fail_msg("%s %s %s", cases[i].path, cases[i].meets ? "should meet" : "should not meet", cases[i].pattern);
    }
}

static void
a_path_that_servers_read_two_ways_meets_the_policies_of_both(void **unused)
{
    (void)unused;
    static const struct {
        const char *path;
        size_t count, found[2];
    } cases[] = {
        { "/login", 1, { 0 } },
        { "/files/x", 1, { 1 } },
        { "/other", 1, { 3 } },
        { "/files/../login", 2, { 0, 1 } }, /* nginx: /login; Starlette: the handler of "/files/{path:path}" */
        { "/login/../files/x", 2, { 1, 3 } },
        { "/files/%2e%2e/login", 2, { 0, 1 } },
        { "/files%2F..%2Flogin", 2, { 0, 1 } },
        { "/u//edit", 2, { 2, 3 } },
        { "/u/./edit", 2, { 2, 3 } },
        { "/u/7/edit/.", 2, { 2, 3 } },
        { "//login", 2, { 0, 3 } },
        { "/login/", 1, { 0 } },
        { "/files/a/../b", 1, { 1 } }, /* both readings meet the same one */
    };
    tg_config *config = parsed("policies:\n"
                               "  - {name: login, rules: 1/s, match: {path: /login}}\n"
                               "  - {name: files, rules: 1/s, match: {path: /files/*}}\n"
                               "  - {name: edit, rules: 1/s, match: {path: /u/*/edit}}\n"
                               "  - {name: rest, rules: 1/s}\n");
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_request request = { .path = tg_text_of(cases[i].path) };
        size_t found[TG_LIMITERS_MAX];
        const size_t count = tg__config_match(config, &request, found);
        if (count != cases[i].count || memcmp(found, cases[i].found, count * sizeof *found) != 0)
            fail_msg("%s meets %zu, the first is %zu", cases[i].path, count, found[0]);
    }
    tg__config_close(config);
}

static void
a_path_too_long_to_keep_still_meets_its_pattern(void **unused)
{
    (void)unused;
    enum { LONG = 20000 };
    char *path = malloc(LONG);
    assert_non_null(path);
    memset(path, 'x', LONG);
    memcpy(path, "/u/", 3);
    memcpy(path + LONG - 5, "/edit", 5);
    const tg_request request = { .path = { path, LONG } };
    assert_true(meets("{path: \"/u/*/edit\"}", &request));
    assert_true(meets("{path: \"/u/*\"}", &request));
    assert_true(meets("{path: \"*edit\"}", &request));
    assert_false(meets("{path: \"/u/*/view\"}", &request));
    free(path);
}

static void
methods_and_hosts_are_compared_in_their_one_spelling(void **unused)
{
    (void)unused;
    static const struct {
        const char *match, *method, *host;
        bool meets;
    } cases[] = {
        { "{methods: POST}", "POST", "", true },         { "{methods: post}", "POST", "", true },
        { "{methods: [POST, PUT]}", "PUT", "", true },   { "{methods: [POST, PUT]}", "GET", "", false },
        { "{methods: GET}", "HEAD", "", true },          { "{methods: HEAD}", "HEAD", "", true },
        { "{methods: HEAD}", "GET", "", false },         { "{methods: POST}", "HEAD", "", false },
        { "{methods: GET}", "", "", false },             { "{methods: PURGE}", "purge", "", true },
        { "{host: shop.example}", "GET", "shop.example", true },
        { "{host: SHOP.example.}", "GET", "shop.Example:8080", true },
        { "{host: shop.example}", "GET", "shop.example.", true },
        { "{host: shop.example}", "GET", "a.shop.example", false },
        { "{host: shop.example}", "GET", "", false },
        { "{host: \"*.shop.example\"}", "GET", "a.shop.example", true },
        { "{host: \"*.shop.example\"}", "GET", "a.b.shop.example:443", true },
        { "{host: \"*.shop.example\"}", "GET", "shop.example", false },
        { "{host: \"*.shop.example\"}", "GET", "xshop.example", false },
        { "{host: [a.example, \"*.shop.example\"]}", "GET", "b.shop.example", true },
        { "{host: \"[2001:db8::1]\"}", "GET", "[2001:DB8::1]:443", true },
        { "{methods: POST, host: shop.example}", "POST", "shop.example", true },
        { "{methods: POST, host: shop.example}", "GET", "shop.example", false },
        { "{methods: POST, host: shop.example}", "POST", "other.example", false },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_request request = { .method = tg_text_of(cases[i].method), .host = tg_text_of(cases[i].host) };
        if (meets(cases[i].match, &request) != cases[i].meets)
            fail_msg("%s: %s %s", cases[i].match, cases[i].method, cases[i].host);
    }
}

static void
the_first_match_wins_and_also_goes_on(void **unused)
{
    (void)unused;
    tg_config *config = parsed("policies:\n"
                               "  - {name: all, rules: 1/s, also: true}\n"
                               "  - {name: login, rules: 1/s, match: {path: /login}}\n"
                               "  - {name: api, rules: 1/s, match: {path: /api/*}}\n"
                               "  - {name: deep, rules: 1/s, match: {path: /api/deep}}\n"
                               "  - {name: post, rules: 1/s, match: {methods: POST}, also: true}\n"
                               "  - {name: login2, rules: 1/s, match: {path: /login}}\n");
    static const struct {
        const char *method, *path;
        size_t count, found[3];
    } cases[] = {
        { "GET", "/login", 2, { 0, 1 } },         { "POST", "/login", 3, { 0, 1, 4 } }, { "GET", "/api/deep", 2, { 0, 2 } },
        { "POST", "/api/deep", 3, { 0, 2, 4 } },  { "GET", "/other", 1, { 0 } },        { "POST", "/other", 2, { 0, 4 } },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_request request = { .method = tg_text_of(cases[i].method), .path = tg_text_of(cases[i].path) };
        size_t found[TG_LIMITERS_MAX];
        assert_int_equal(tg__config_match(config, &request, found), cases[i].count);
        for (size_t j = 0; j < cases[i].count; j++)
            assert_int_equal(found[j], cases[i].found[j]);
    }
    tg__config_close(config);
}

static void
a_request_that_no_policy_speaks_of_meets_none(void **unused)
{
    (void)unused;
    tg_config *config = parsed("policies:\n  - {name: login, rules: 1/s, match: {path: /login}}\n");
    const tg_request request = { .path = tg_text_of("/") };
    size_t found[TG_LIMITERS_MAX];
    assert_int_equal(tg__config_match(config, &request, found), 0);
    tg__config_close(config);
}

static void
no_pattern_takes_long(void **unused)
{
    (void)unused;
    /* What makes a backtracking matcher take for ever: many stars, nearly matching text. */
    char pattern[1000], text[4000];
    const char *fault;
    tg_arena arena = { 0 };
    tg_pattern made;
    memset(text, 'a', sizeof text);
    pattern[0] = '/';
    for (size_t i = 1; i + 1 < sizeof pattern; i += 2)
        memcpy(pattern + i, "*a", 2);
    pattern[sizeof pattern - 1] = 'b';
    text[0] = '/';
    assert_true(tg__pattern_path(&arena, (tg_text){ pattern, sizeof pattern }, &made, &fault));
    assert_null(fault);
    const clock_t begun = clock();
    for (int i = 0; i < 100; i++)
        assert_false(tg__pattern_meets(&made, (tg_text){ text, sizeof text }));
    assert_true(clock() - begun < 5 * CLOCKS_PER_SEC);
    tg__arena_free(&arena);
}

/* The definition, slow and plain: '*' is any run of bytes. */
static bool
meets_slowly(const char *pattern, const char *text)
{
    if (*pattern == '*')
        return meets_slowly(pattern + 1, text) || (*text && meets_slowly(pattern, text + 1));
    if (*pattern == '\0' || *text == '\0')
        return *pattern == *text;
    return *pattern == *text && meets_slowly(pattern + 1, text + 1);
}

static void
patterns_agree_with_their_definition(void **unused)
{
    (void)unused;
    srandom(11);
    for (int i = 0; i < 50000; i++) {
        char pattern[10], text[12];
        tg_text pieces[10];
        size_t pattern_length = (size_t)random() % 9, text_length = (size_t)random() % 11, count = 0, start = 0;
        for (size_t j = 0; j < pattern_length; j++)
            pattern[j] = "ab*"[random() % 3];
        for (size_t j = 0; j < text_length; j++)
            text[j] = "ab"[random() % 2];
        pattern[pattern_length] = text[text_length] = '\0';
        for (size_t j = 0; j <= pattern_length; j++) {
            if (pattern[j] != '*' && pattern[j] != '\0')
                continue;
            pieces[count++] = (tg_text){ pattern + start, j - start };
            start = j + 1;
        }
        const tg_pattern made = { .pieces = pieces, .piece_count = count };
        if (tg__pattern_meets(&made, (tg_text){ text, text_length }) != meets_slowly(pattern, text))
            fail_msg("%s and %s", pattern, text);
    }
}

static void
routes_and_headers_narrow_a_match(void **unused)
{
    (void)unused;
    const tg_header headers[] = { { tg_text_of("user-agent"), tg_text_of("Mozilla BadBot/1.0") },
                                  { tg_text_of("X-Beta"), tg_text_of("0") },
                                  { tg_text_of("X-Beta"), tg_text_of(" 1 ") } };
    const tg_request request = { .route = tg_text_of("/users/{id}"), .path = tg_text_of("/users/7"),
                                 .headers = headers, .header_count = 3 };
    assert_true(meets("{route: \"/users/{id}\"}", &request));
    assert_true(meets("{route: [/a, \"/users/*\"]}", &request));
    assert_false(meets("{route: /users/7}", &request));
    assert_true(meets("{header: {User-Agent: \"*badbot*\"}}", &request));
    assert_true(meets("{header: {USER_AGENT: \"*BadBot*\", X-Beta: 1}}", &request));
    assert_false(meets("{header: {User-Agent: \"*badbot\"}}", &request));
    assert_false(meets("{header: {X-Beta: [\"2\", \"3\"]}}", &request));
    assert_false(meets("{header: {X-Gamma: \"*\"}}", &request));
    assert_false(meets("{header: {X-Beta: 1}, path: /other}", &request));
    assert_false(meets("{route: /a}", &(tg_request){ .path = tg_text_of("/a") }));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paths_meet_their_patterns_in_any_spelling),
        cmocka_unit_test(a_path_that_servers_read_two_ways_meets_the_policies_of_both),
        cmocka_unit_test(a_path_too_long_to_keep_still_meets_its_pattern),
        cmocka_unit_test(methods_and_hosts_are_compared_in_their_one_spelling),
        cmocka_unit_test(the_first_match_wins_and_also_goes_on),
        cmocka_unit_test(a_request_that_no_policy_speaks_of_meets_none),
        cmocka_unit_test(no_pattern_takes_long),
        cmocka_unit_test(patterns_agree_with_their_definition),
        cmocka_unit_test(routes_and_headers_narrow_a_match),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
