/* Values that clients put into queries, cookies, forms and JSON: which are found, and which count as missing. */
#include "identity/fields.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

typedef struct one {
    const char *from, *name, *value; /* value NULL: missing */
} one;

static void
check(const one *wanted, bool found, tg_text value)
{
    if (found != (wanted->value != NULL) || (found && !tg__text_is(value, wanted->value)))
        fail_msg("%s in %s: %s%.*s, expected %s", wanted->name, wanted->from, found ? "" : "missing ",
                 found ? (int)value.length : 0, found ? value.data : "", wanted->value ? wanted->value : "nothing");
}

static void
a_query_is_decoded_and_a_name_sent_twice_is_missing(void **unused)
{
    (void)unused;
    static const one cases[] = {
        { "/a?q=x", "q", "x" },
        { "/a?p=y&q=x&r", "q", "x" },
        { "/a?%71=%78+y", "q", "x y" },
        { "/a?q=100%&z", "q", "100%" },
        { "/a?q=a=b", "q", "a=b" },
        { "/a?q=x#q=y", "q", "x" },
        { "/a?q=x&q=x", "q", NULL },
        { "/a?q=x&%71=y", "q", NULL },
        { "/a?q=", "q", NULL },
        { "/a?q", "q", NULL },
        { "/a?qq=1", "q", NULL },
        { "/a?Q=1", "q", NULL },
        { "/a", "q", NULL },
        { "", "q", NULL },
    };
    char room[TG_VALUE_BYTES_MAX], path[1200] = "/?q=";
    tg_text value;
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_request request = { .path = tg_text_of(cases[i].from) };
        check(&cases[i], tg__query_value(&request, tg_text_of(cases[i].name), room, &value), value);
    }
    const tg_request apart = { .path = tg_text_of("/a?q=no"), .query = tg_text_of("q=yes") };
    assert_true(tg__query_value(&apart, tg_text_of("q"), room, &value));
    assert_true(tg__text_is(value, "yes"));
    memset(path + 4, 'a', TG_VALUE_BYTES_MAX + 1);
    assert_false(tg__query_value(&(tg_request){ .path = tg_text_of(path) }, tg_text_of("q"), room, &value));
    path[4 + TG_VALUE_BYTES_MAX] = '\0';
    assert_true(tg__query_value(&(tg_request){ .path = tg_text_of(path) }, tg_text_of("q"), room, &value));
}

static void
cookies_are_found_over_several_lines_and_once_only(void **unused)
{
    (void)unused;
    static const one cases[] = {
        { "a=1; sid=x", "sid", "x" },     { "sid=\"x\"", "sid", "x" },   { "sid = x ", "sid", "x" },
        { "sid=a=b", "sid", "a=b" },      { "sid=x; sid=y", "sid", NULL }, { "sid=", "sid", NULL },
        { "sid=\"\"", "sid", NULL },      { "sid=\"\\170\"", "sid", NULL }, { "SID=x", "sid", NULL },
        { "xsid=x", "sid", NULL },
    };
    tg_text value;
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_header header = { tg_text_of("Cookie"), tg_text_of(cases[i].from) };
        const tg_request request = { .headers = &header, .header_count = 1 };
        check(&cases[i], tg__cookie_value(&request, tg_text_of(cases[i].name), &value), value);
    }
    const tg_header lines[] = { { tg_text_of("cookie"), tg_text_of("a=1") }, { tg_text_of("cookie"), tg_text_of("b=2") } };
    const tg_request request = { .headers = lines, .header_count = 2 };
    assert_true(tg__cookie_value(&request, tg_text_of("a"), &value) && tg__text_is(value, "1"));
    assert_true(tg__cookie_value(&request, tg_text_of("b"), &value) && tg__text_is(value, "2"));
}

static tg_request
posted(const char *type, const char *body, tg_header *header)
{
    *header = (tg_header){ tg_text_of("Content-Type"), tg_text_of(type) };
    return (tg_request){ .headers = header, .header_count = 1, .body = tg_text_of(body), .body_read = true };
}

static void
a_form_is_read_in_both_of_its_types(void **unused)
{
    (void)unused;
    static const char plain[] = "application/x-www-form-urlencoded; charset=utf-8", parts[] = "multipart/form-data; boundary=XX",
                      quoted[] = "Multipart/Form-Data; boundary=\"XX\"";
#define FIELD(name, content) "--XX\r\nContent-Disposition: form-data; name=" name "\r\n\r\n" content "\r\n"
    static const struct {
        const char *type;
        one wanted;
    } cases[] = {
        { plain, { "account=a%40b&x=1", "account", "a@b" } },
        { plain, { "account=a&account=b", "account", NULL } },
        { "text/plain", { "account=a", "account", NULL } },
        { "application/json", { "account=a", "account", NULL } },
        { parts, { FIELD("\"account\"", "a@b") "--XX--", "account", "a@b" } },
        { quoted, { FIELD("\"x\"", "1") FIELD("account", "a") "--XX--\r\n", "account", "a" } },
        { parts, { "preamble\r\n" FIELD("\"account\"", "a") "--XX--", "account", "a" } },
        { parts, { FIELD("\"account\"", "a") FIELD("\"account\"", "b") "--XX--", "account", NULL } },
        { parts, { FIELD("\"account\"", "a") FIELD("\"b\"; filename=\"account\"", "b") "--XX--", "account", "a" } },
        { parts, { FIELD("\"acc\\\\ount\"", "a") "--XX--", "account", NULL } },
        { parts, { FIELD("\"account\"", "a"), "account", NULL } },                  /* cut off */
        { parts, { FIELD("\"account\"", "a") "--XX", "account", NULL } },
        { parts, { "--XX\r\nContent-Disposition: form-data; name=\"account\"\r\n--XX--", "account", NULL } },
        { parts, { "", "account", NULL } },
        { "multipart/form-data", { FIELD("\"account\"", "a") "--XX--", "account", NULL } },
        { "multipart/form-data; boundary=YY", { FIELD("\"account\"", "a") "--XX--", "account", NULL } },
    };
    char room[TG_VALUE_BYTES_MAX];
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_header header;
        tg_text value = { NULL, 0 };
        tg_request request = posted(cases[i].type, cases[i].wanted.from, &header);
        check(&cases[i].wanted, tg__form_value(&request, tg_text_of(cases[i].wanted.name), room, &value), value);
        request.body_read = false;
        assert_false(tg__form_value(&request, tg_text_of(cases[i].wanted.name), room, &value));
    }
}

static void
a_body_longer_than_is_looked_at_has_no_values(void **unused)
{
    (void)unused;
    char *body = malloc(TG_BODY_BYTES_MAX), room[TG_VALUE_BYTES_MAX];
    tg_header header;
    tg_text value;
    memset(body, '&', TG_BODY_BYTES_MAX);
    memcpy(body, "account=a", 9); /* and perhaps another behind what was read, which the application would take */
    tg_request request = posted("application/x-www-form-urlencoded", "", &header);
    request.body = (tg_text){ body, TG_BODY_BYTES_MAX - 1 };
    assert_true(tg__form_value(&request, tg_text_of("account"), room, &value));
    request.body.length++;
    assert_false(tg__form_value(&request, tg_text_of("account"), room, &value));
    free(body);
}

static void
json_gives_texts_whole_numbers_and_nothing_that_has_two_readings(void **unused)
{
    (void)unused;
    static const one cases[] = {
        { "{\"a\": \"x\"}", "a", "x" },
        { " {\"b\":[1,{\"a\":2}],\"a\":\"x\"} ", "a", "x" },
        { "{\"\\u0061\": \"\\u00fc\\ud83d\\udc0c\\n\\\"\"}", "a", "\xc3\xbc\xf0\x9f\x90\x8c\n\"" },
        { "{\"a\": 42}", "a", "42" },
        { "{\"a\": -7 }", "a", "-7" },
        { "{\"a\": 0}", "a", "0" },
        { "{\"a\": true}", "a", "true" },
        { "{\"user\": {\"id\": 7}}", "user.id", "7" },
        { "{\"a\": 4.2e1}", "a", NULL },
        { "{\"a\": 042}", "a", NULL },
        { "{\"a\": -0}", "a", NULL },
        { "{\"a\": null}", "a", NULL },
        { "{\"a\": \"\"}", "a", NULL },
        { "{\"a\": {}}", "a", NULL },
        { "{\"a\": [\"x\"]}", "a", NULL },
        { "{\"a\": \"x\", \"a\": \"y\"}", "a", NULL },
        { "{\"a\": \"x\", \"\\u0061\": \"y\"}", "a", NULL },
        { "{\"b\": {\"a\": \"x\"}}", "a", NULL },
        { "{\"a\": \"\\ud83d\"}", "a", NULL },
        { "{\"a\": \"\\q\"}", "a", NULL },
        { "{\"a\": \"x\"", "a", NULL },
        { "{\"a\": \"x\"} x", "a", NULL },
        { "{\"a\": \"x\",}", "a", NULL },
        { "{\"a\" \"x\"}", "a", NULL },
        { "[{\"a\": \"x\"}]", "a", NULL },
        { "{}", "a", NULL },
        { "", "a", NULL },
        { "{\"user\": 7}", "user.id", NULL },
    };
    char room[TG_VALUE_BYTES_MAX];
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_header header;
        tg_text value = { NULL, 0 };
        const tg_request request = posted("application/json", cases[i].from, &header);
        check(&cases[i], tg__json_value(&request, tg_text_of(cases[i].name), room, &value), value);
    }
    tg_header header;
    tg_text value;
    tg_request request = posted("application/vnd.api+json", "{\"a\": 1}", &header);
    assert_true(tg__json_value(&request, tg_text_of("a"), room, &value));
    request = posted("text/plain", "{\"a\": 1}", &header);
    assert_false(tg__json_value(&request, tg_text_of("a"), room, &value));
    char deep[400];
    memset(deep, '[', 200);
    memset(deep + 200, ']', 200);
    request = posted("application/json", "", &header);
    request.body = (tg_text){ deep, sizeof deep };
    assert_false(tg__json_value(&request, tg_text_of("a"), room, &value));
}

static bool
same_key(const char *name_a, const char *a, const char *name_b, const char *b)
{
    uint8_t digests[2][TG_DIGEST_BYTES];
    const tg_header first = { tg_text_of(name_a), tg_text_of(a) }, second = { tg_text_of(name_b), tg_text_of(b) };
    assert_true(tg__api_key(&(tg_request){ .headers = &first, .header_count = 1 }, digests[0]));
    assert_true(tg__api_key(&(tg_request){ .headers = &second, .header_count = 1 }, digests[1]));
    return memcmp(digests[0], digests[1], TG_DIGEST_BYTES) == 0;
}

static void
an_api_key_is_the_same_in_either_header_and_is_kept_as_a_digest(void **unused)
{
    (void)unused;
    uint8_t digest[TG_DIGEST_BYTES];
    assert_true(same_key("X-Api-Key", "k", "Authorization", "Bearer k"));
    assert_true(same_key("x_api_key", "k", "Authorization", "ApiKey  k"));
    assert_false(same_key("X-Api-Key", "k", "X-Api-Key", "K"));
    const tg_header basic = { tg_text_of("Authorization"), tg_text_of("Basic dTpw") };
    assert_false(tg__api_key(&(tg_request){ .headers = &basic, .header_count = 1 }, digest));
    const tg_header twice[] = { { tg_text_of("X-Api-Key"), tg_text_of("a") }, { tg_text_of("X-Api-Key"), tg_text_of("b") },
                                { tg_text_of("Authorization"), tg_text_of("Bearer c") } };
    assert_false(tg__api_key(&(tg_request){ .headers = twice, .header_count = 3 }, digest));
    assert_false(tg__api_key(&(tg_request){ .header_count = 0 }, digest));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_query_is_decoded_and_a_name_sent_twice_is_missing),
        cmocka_unit_test(cookies_are_found_over_several_lines_and_once_only),
        cmocka_unit_test(a_form_is_read_in_both_of_its_types),
        cmocka_unit_test(a_body_longer_than_is_looked_at_has_no_values),
        cmocka_unit_test(json_gives_texts_whole_numbers_and_nothing_that_has_two_readings),
        cmocka_unit_test(an_api_key_is_the_same_in_either_header_and_is_kept_as_a_digest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
