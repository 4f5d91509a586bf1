/* `by`: which parts of a request make an identity. */
#include "identity/identity.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))
#define TEXT(literal) { (literal), sizeof(literal) - 1 }

static tg_by *
parsed(const char *text)
{
    tg_by *by;
    tg_error error;
    if (tg__by_parse(tg_text_of(text), &by, &error) != TG_OK)
        fail_msg("%s: %s", text, error.message);
    return by;
}

/* Readable: "ip=192.0.2.1+path=/a"; what is hashed as "#". */
static const char *
shown(const tg_identity *identity, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t at = 0; at < identity->length && used < size;) {
        const size_t kind = identity->bytes[at], value = identity->bytes[at + 1 + kind];
        used += (size_t)snprintf(text + used, size - used, "%s%.*s=%.*s", at ? "+" : "", (int)kind,
                                 (const char *)identity->bytes + at + 1, value == 255 ? 1 : (int)value,
                                 value == 255 ? "#" : (const char *)identity->bytes + at + 2 + kind);
        at += 2 + kind + (value == 255 ? 32 : value);
    }
    return text;
}

static void
check_request(const char *by_text, const tg_client *client, const tg_request *request, const char *expected)
{
    tg_by *by = parsed(by_text);
    tg_identity identity;
    tg_error error;
    char missing[TG_NAME_BYTES_MAX + 1] = "", text[600];
    const tg_status status = tg__by_of_request(by, client, request, &identity, missing, &error);
    if (expected[0] == '!') {
        if (status != TG_E_IDENTITY || strcmp(missing, expected + 1) != 0)
            fail_msg("%s: %s, missing \"%s\", expected \"%s\"", by_text, tg_status_name(status), missing, expected + 1);
        assert_non_null(strstr(error.message, missing));
    } else if (status != TG_OK || strcmp(shown(&identity, text, sizeof text), expected) != 0) {
        fail_msg("%s: %s %s, expected %s", by_text, tg_status_name(status), status == TG_OK ? text : error.message,
                 expected);
    }
    tg__by_close(by);
}

static void
each_kind_takes_its_part_of_the_request(void **unused)
{
    (void)unused;
    static const tg_header headers[] = {
        { TEXT("x-api-key"), TEXT(" k1 ") }, { TEXT("X-Twice"), TEXT("a") }, { TEXT("x-twice"), TEXT("a") },
        { TEXT("X-Empty"), TEXT("  ") },     { TEXT("X_Under"), TEXT("u") },
    };
    static const tg_request request = {
        .method = TEXT("post"), .path = TEXT("//a/./b/?q=1"), .host = TEXT("Shop.Example.:8080"),
        .peer = TEXT("::ffff:192.0.2.1"), .user = TEXT("u1"), .route = TEXT("/a/{id}"),
        .headers = headers, .header_count = COUNT(headers),
    };
    static const char *const cases[][2] = {
        { "ip", "ip=192.0.2.1" },
        { "user", "user=u1" },
        { "route", "route=/a/{id}" },
        { "path", "path=/a/b" },
        { "method", "method=POST" },
        { "host", "host=shop.example" },
        { "header:X-Api-Key", "header:x-api-key=k1" },
        { "header:x_api_key", "header:x-api-key=k1" },
        { "Header:X-API-KEY", "header:x-api-key=k1" },
        { "header:X-Under", "header:x-under=u" },
        { "ip+path", "ip=192.0.2.1+path=/a/b" },
        { " ip + method ", "ip=192.0.2.1+method=POST" },
        { "user|ip", "user=u1" },
        { "header:X-None|ip", "ip=192.0.2.1" },
        { "header:X-None+ip|user+ip", "user=u1+ip=192.0.2.1" },
        { "header:X-Twice|user", "user=u1" },
        { "header:X-Empty|user", "user=u1" },
        { "header:X-Twice", "!header:X-Twice" },
        { "header:X-Empty", "!header:X-Empty" },
        { "header:X-None+header:X-Twice", "!header:X-None" },
        { "user+header:X-None", "!header:X-None" },
        { "header:X-None|header:X-Twice", "!header:X-Twice" },
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        check_request(cases[i][0], NULL, &request, cases[i][1]);
}

static void
what_is_not_known_is_missing_and_never_an_empty_key(void **unused)
{
    (void)unused;
    static const tg_request nothing = { 0 };
    static const char *const cases[][2] = {
        { "ip", "!ip" },         { "user", "!user" },       { "route", "!route" },   { "method", "!method" },
        { "host", "!host" },     { "path", "path=/" },      { "user|ip", "!ip" },    { "route|path", "path=/" },
        { "user+ip", "!user" },  { "header:A", "!header:A" },
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        check_request(cases[i][0], NULL, &nothing, cases[i][1]);
    static const tg_request local = { .peer = TEXT("unix:") };
    check_request("ip", NULL, &local, "!ip");
}

static void
head_counts_as_get(void **unused)
{
    (void)unused;
    static const tg_request head = { .method = TEXT("HEAD") }, get = { .method = TEXT("GET") };
    check_request("method", NULL, &head, "method=GET");
    check_request("method", NULL, &get, "method=GET");
}

static void
a_user_header_counts_from_a_trusted_peer_only(void **unused)
{
    (void)unused;
    static const tg_text trusted = TEXT("10.0.0.1");
    static const tg_header header[] = { { TEXT("X-Remote-User"), TEXT("u7") }, { TEXT("X-Remote-User"), TEXT("u8") } };
    tg_client *client;
    const tg_client_options options = { .trusted_proxies = &trusted, .trusted_proxy_count = 1,
                                        .user_header = TEXT("x-remote-user") };
    assert_int_equal(tg_client_open(&options, &client, NULL), TG_OK);
    tg_request request = { .peer = TEXT("10.0.0.1"), .headers = header, .header_count = 1 };
    check_request("user", client, &request, "user=u7");
    check_request("user", NULL, &request, "!user");
    request.peer = tg_text_of("10.0.0.2");
    check_request("user", client, &request, "!user");
    request.user = tg_text_of("u1"); /* whom the face has authenticated comes first */
    check_request("user", client, &request, "user=u1");
    request = (tg_request){ .peer = TEXT("10.0.0.1"), .headers = header, .header_count = 2 };
    check_request("user", client, &request, "!user");
    request.header_count = 1;
    request.client_resolved = true; /* then the peer is no longer the one that sent the header */
    check_request("user", client, &request, "!user");
    tg_client_close(client);
}

static void
a_user_named_like_an_address_shares_nothing_with_it(void **unused)
{
    (void)unused;
    static const tg_request request = { .peer = TEXT("127.0.0.1"), .user = TEXT("127.0.0.1") };
    tg_by *ip = parsed("ip"), *user = parsed("user");
    tg_identity a, b;
    char missing[TG_NAME_BYTES_MAX + 1];
    assert_int_equal(tg__by_of_request(ip, NULL, &request, &a, missing, NULL), TG_OK);
    assert_int_equal(tg__by_of_request(user, NULL, &request, &b, missing, NULL), TG_OK);
    assert_false(a.length == b.length && memcmp(a.bytes, b.bytes, a.length) == 0);
    tg__by_close(ip);
    tg__by_close(user);
}

static void
values_by_kind_make_the_identity_a_request_would(void **unused)
{
    (void)unused;
    static const tg_header headers[] = { { TEXT("X-Api-Key"), TEXT("k1") } };
    static const tg_request request = {
        .method = TEXT("HEAD"), .path = TEXT("/a//b/"), .host = TEXT("SHOP.example:80"), .peer = TEXT("2001:db8::7"),
        .user = TEXT("u1"), .route = TEXT("/a/{b}"), .headers = headers, .header_count = 1,
    };
    static const tg_part values[] = {
        { TEXT("method"), TEXT("GET") }, { TEXT("path"), TEXT("/a/b") }, { TEXT("host"), TEXT("shop.example") },
        { TEXT("ip"), TEXT("2001:db8:0:0:ffff::1") }, { TEXT("user"), TEXT("u1") }, { TEXT("route"), TEXT("/a/{b}") },
        { TEXT("header:x-api-key"), TEXT("k1") },
    };
    static const char *const bys[] = { "ip", "user", "route", "path", "method", "host", "header:X-Api-Key",
                                       "ip+user+route+path+method+host+header:X-Api-Key", "header:None|user" };
    for (size_t i = 0; i < COUNT(bys); i++) {
        tg_by *by = parsed(bys[i]);
        tg_identity a, b;
        char missing[TG_NAME_BYTES_MAX + 1];
        assert_int_equal(tg__by_of_request(by, NULL, &request, &a, missing, NULL), TG_OK);
        assert_int_equal(tg__by_of_values(by, NULL, values, COUNT(values), &b, missing, NULL), TG_OK);
        assert_int_equal(a.length, b.length);
        assert_memory_equal(a.bytes, b.bytes, a.length);
        tg__by_close(by);
    }
}

static void
values_that_are_missing_or_no_address_are_told(void **unused)
{
    (void)unused;
    static const tg_part values[] = { { TEXT("ip"), TEXT("nobody") }, { TEXT("user"), TEXT("") } };
    tg_by *by = parsed("user|ip");
    tg_identity identity;
    tg_error error;
    char missing[TG_NAME_BYTES_MAX + 1];
    assert_int_equal(tg__by_of_values(by, NULL, values, 2, &identity, missing, &error), TG_E_IDENTITY);
    assert_string_equal(missing, "ip");
    assert_non_null(strstr(error.message, "\"nobody\" is no address"));
    assert_int_equal(tg__by_of_values(by, NULL, values, 0, &identity, missing, &error), TG_E_IDENTITY);
    assert_string_equal(missing, "ip");
    assert_non_null(strstr(error.message, "\"ip\" is missing"));
    tg__by_close(by);
}

static void
the_shared_stand_in_is_nobody_elses_identity(void **unused)
{
    (void)unused;
    tg_by *by = parsed("user|header:X-Key"), *other = parsed("user");
    tg_identity shared, others, again;
    tg__by_shared(by, &shared);
    tg__by_shared(other, &others);
    tg__by_shared(by, &again);
    assert_memory_equal(shared.bytes, again.bytes, shared.length);
    assert_false(shared.length == others.length && memcmp(shared.bytes, others.bytes, shared.length) == 0);
    /* What a user calls himself cannot reach it: the kind differs. */
    assert_int_equal(shared.bytes[0], 1);
    assert_int_equal(shared.bytes[1], '?');
    tg__by_close(by);
    tg__by_close(other);
}

static void
a_wrong_by_is_refused_at_its_word(void **unused)
{
    (void)unused;
    static const struct {
        const char *text;
        size_t offset, length;
        const char *message;
    } cases[] = {
        { "", 0, 0, "an empty word: expected one of ip, user, route, path, method, host, api_key, fingerprint, header:NAME" },
        { "ip+", 3, 0, "an empty word" },
        { "|ip", 0, 0, "an empty word" },
        { "ip||user", 3, 0, "an empty word" },
        { "ip + adress", 5, 6, "unknown kind \"adress\": expected one of ip, user" },
        { "IP", 0, 2, "unknown kind \"IP\"" },
        { "user|cookie:", 5, 7, "\"cookie:\": expected a name behind \"cookie:\"" },
        { "query:a b", 0, 9, "expected a name behind \"query:\"" },
        { "form:", 0, 5, "expected a name behind" },
        { "apikey", 0, 6, "unknown kind \"apikey\"" },
        { "header", 0, 6, "unknown kind \"header\"" },
        { "header:", 0, 7, "expected a header's name behind \"header:\"" },
        { "header:X Y", 0, 10, "expected a header's name" },
        { "ip+user+ip", 8, 2, "\"ip\" is joined with itself" },
        { "header:A+header:a", 9, 8, "is joined with itself" },
        { "ip,user", 0, 7, "unknown kind \"ip,user\"" },
        { "header:aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffff", 0, 67, "is longer than 64 bytes" },
        { "header:a+header:b+header:c+header:d+header:e+header:f+header:g+header:h+ip", 72, 2, "one part too many" },
        { "ip|ip|ip|ip|ip|ip|ip|ip|ip", 0, 26, "has more than 8 alternatives" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_by *by;
        tg_error error;
        assert_int_equal(tg__by_parse(tg_text_of(cases[i].text), &by, &error), TG_E_CONFIG);
        if (!strstr(error.message, cases[i].message) || error.offset != cases[i].offset ||
            error.length != cases[i].length)
            fail_msg("%s: at %zu, %zu bytes: %s", cases[i].text, error.offset, error.length, error.message);
    }
    tg_by *by;
    assert_int_equal(tg__by_parse((tg_text){ NULL, 0 }, &by, NULL), TG_E_CONFIG);
}

static void
a_by_knows_which_kinds_it_names(void **unused)
{
    (void)unused;
    tg_by *by = parsed("user+path|header:X-Key|ip");
    assert_true(tg__by_names(by, "user"));
    assert_true(tg__by_names(by, "path"));
    assert_true(tg__by_names(by, "ip"));
    assert_true(tg__by_names(by, "header:"));
    assert_true(tg__by_names(by, "header:x_key"));
    assert_false(tg__by_names(by, "header:x-other"));
    assert_false(tg__by_names(by, "route"));
    tg__by_close(by);
    by = parsed("ip");
    assert_false(tg__by_names(by, "header:"));
    tg__by_close(by);
    by = parsed("ip+FORM:account|json:a.b");
    assert_true(tg__by_names(by, "form:"));
    assert_true(tg__by_names(by, "form:account"));
    assert_true(tg__by_names(by, "json:"));
    assert_false(tg__by_names(by, "form:Account"));
    assert_false(tg__by_names(by, "query:"));
    tg__by_close(by);
}

static void
what_stands_in_the_body_waits_for_it(void **unused)
{
    (void)unused;
    tg_identity identity;
    char missing[TG_NAME_BYTES_MAX + 1] = "";
    const tg_header header = { TEXT("Content-Type"), TEXT("application/x-www-form-urlencoded") };
    tg_request request = { .peer = TEXT("192.0.2.1"), .headers = &header, .header_count = 1,
                           .body_follows = true };
    tg_by *by = parsed("user|form:account|ip");
    assert_int_equal(tg__by_of_request(by, NULL, &request, &identity, missing, NULL), TG_E_UNSUPPORTED);
    request.user = tg_text_of("u");
    assert_int_equal(tg__by_of_request(by, NULL, &request, &identity, missing, NULL), TG_OK);
    tg__by_close(by);
    request.body_follows = false;
    check_request("form:account", NULL, &request, "!form:account");
    request.body_read = true;
    check_request("form:account", NULL, &request, "!form:account");
    request.body = tg_text_of("account=a%20b");
    check_request("ip+form:account", NULL, &request, "ip=192.0.2.1+form:account=a b");
    request.path = tg_text_of("/?q=1");
    check_request("query:q", NULL, &request, "query:q=1");
}

static void
a_by_tells_what_a_face_cannot_know(void **unused)
{
    (void)unused;
    static const struct {
        const char *by;
        unsigned faces;
        const char *unknown;
    } cases[] = {
        { "ip+header:x", TG_FACE_KNOWN, NULL },
        { "user", TG_FACE_KNOWN, "user" },
        { "user", TG_FACE_USER, NULL },
        { "user|ip", TG_FACE_KNOWN, NULL },
        { "ip+form:account", TG_FACE_USER, "form:account" },
        { "user+json:a|route", TG_FACE_BODY, "route" },
        { "user+json:a|route", TG_FACE_BODY | TG_FACE_USER, NULL },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_by *by = parsed(cases[i].by);
        const char *unknown = tg__by_unknown(by, cases[i].faces);
        if (!unknown != !cases[i].unknown || (unknown && strcmp(unknown, cases[i].unknown) != 0))
            fail_msg("%s: %s", cases[i].by, unknown ? unknown : "known");
        tg__by_close(by);
    }
}

static void
a_huge_value_makes_no_larger_identity(void **unused)
{
    (void)unused;
    static char huge[1 << 20];
    memset(huge, 'u', sizeof huge);
    tg_by *by = parsed("user");
    tg_identity a, b;
    char missing[TG_NAME_BYTES_MAX + 1];
    tg_request request = { .user = { huge, sizeof huge } };
    assert_int_equal(tg__by_of_request(by, NULL, &request, &a, missing, NULL), TG_OK);
    huge[sizeof huge - 1] = 'v';
    assert_int_equal(tg__by_of_request(by, NULL, &request, &b, missing, NULL), TG_OK);
    assert_int_equal(a.length, b.length);
    assert_int_equal(a.length, 1 + 4 + 1 + 32);
    assert_memory_not_equal(a.bytes, b.bytes, a.length);
    tg__by_close(by);
}

static void
a_key_is_what_the_application_says_and_no_header_of_its_name(void **unused)
{
    (void)unused;
    static const tg_header headers[] = { { TEXT("key:tenant"), TEXT("forged") }, { TEXT("tenant"), TEXT("forged") } };
    static const tg_part keys[] = { { TEXT("tenant"), TEXT("t1") }, { TEXT("empty"), TEXT("") } };
    const tg_request request = {
        .peer = TEXT("192.0.2.1"), .headers = headers, .header_count = COUNT(headers), .keys = keys, .key_count = COUNT(keys),
    };
    check_request("key:tenant", NULL, &request, "key:tenant=t1");
    check_request("key:tenant+ip", NULL, &request, "key:tenant=t1+ip=192.0.2.1");
    check_request("key:other|key:tenant", NULL, &request, "key:tenant=t1");
    check_request("key:empty", NULL, &request, "!key:empty");
    check_request("key:ten", NULL, &request, "!key:ten");
    const tg_request silent = { .peer = TEXT("192.0.2.1"), .headers = headers, .header_count = COUNT(headers) };
    check_request("key:tenant", NULL, &silent, "!key:tenant");
    tg_by *by = parsed("key:tenant");
    assert_string_equal(tg__by_unknown(by, TG_FACE_KNOWN | TG_FACE_BODY | TG_FACE_USER | TG_FACE_ROUTE), "key:tenant");
    assert_null(tg__by_unknown(by, TG_FACE_KNOWN | TG_FACE_KEYS));
    tg__by_close(by);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_kind_takes_its_part_of_the_request),
        cmocka_unit_test(what_is_not_known_is_missing_and_never_an_empty_key),
        cmocka_unit_test(head_counts_as_get),
        cmocka_unit_test(a_user_header_counts_from_a_trusted_peer_only),
        cmocka_unit_test(a_user_named_like_an_address_shares_nothing_with_it),
        cmocka_unit_test(values_by_kind_make_the_identity_a_request_would),
        cmocka_unit_test(values_that_are_missing_or_no_address_are_told),
        cmocka_unit_test(the_shared_stand_in_is_nobody_elses_identity),
        cmocka_unit_test(a_wrong_by_is_refused_at_its_word),
        cmocka_unit_test(a_by_knows_which_kinds_it_names),
        cmocka_unit_test(what_stands_in_the_body_waits_for_it),
        cmocka_unit_test(a_by_tells_what_a_face_cannot_know),
        cmocka_unit_test(a_key_is_what_the_application_says_and_no_header_of_its_name),
        cmocka_unit_test(a_huge_value_makes_no_larger_identity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
