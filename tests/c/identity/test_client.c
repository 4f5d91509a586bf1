/* Who the client is: the peer, or whom a trusted peer names. */
#include "identity/client.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

enum { TEXTS_MAX = 6 };

typedef struct walk_case {
    const char *trusted[TEXTS_MAX];
    const char *client_header;
    const char *peer;
    const char *headers[TEXTS_MAX]; /* "Name: value" */
    const char *client;             /* NULL: TG_E_IDENTITY */
} walk_case;

static tg_client *
client_of(const char *const trusted[TEXTS_MAX], const char *header)
{
    tg_text networks[TEXTS_MAX];
    size_t count = 0;
    for (; count < TEXTS_MAX && trusted[count]; count++)
        networks[count] = tg_text_of(trusted[count]);
    const tg_client_options options = {
        .trusted_proxies = networks,
        .trusted_proxy_count = count,
        .client_header = tg_text_of(header),
    };
    tg_client *client;
    tg_error error;
    if (tg_client_open(&options, &client, &error) != TG_OK)
        fail_msg("%s", error.message);
    return client;
}

static size_t
split_headers(const char *const lines[TEXTS_MAX], tg_header headers[TEXTS_MAX])
{
    size_t count = 0;
    for (; count < TEXTS_MAX && lines[count]; count++) {
        const char *colon = strchr(lines[count], ':');
        headers[count].name = (tg_text){ lines[count], (size_t)(colon - lines[count]) };
        headers[count].value = tg_text_of(colon + 1 + (colon[1] == ' '));
    }
    return count;
}

static void
check_walks(const walk_case *cases, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const walk_case *c = &cases[i];
        tg_header headers[TEXTS_MAX];
        tg_client *client = client_of(c->trusted, c->client_header);
        const tg_request request = {
            .peer = tg_text_of(c->peer),
            .headers = headers,
            .header_count = split_headers(c->headers, headers),
        };
        char address[TG_ADDRESS_TEXT_MAX] = "";
        tg_error error = { 0 };
        const tg_status status = tg_client_resolve(client, &request, address, &error);
        if (c->client ? status != TG_OK || strcmp(address, c->client) != 0 : status != TG_E_IDENTITY)
            fail_msg("case %zu (peer %s, %s): %s %s, expected %s", i + 1, c->peer ? c->peer : "none",
                     c->headers[0] ? c->headers[0] : "no header", tg_status_name(status),
                     status == TG_OK ? address : error.message, c->client ? c->client : "TG_E_IDENTITY");
        tg_client_close(client);
    }
}

static void
a_header_from_an_untrusted_peer_is_not_read(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { 0 }, NULL, "203.0.113.7", { "X-Forwarded-For: 198.51.100.1" }, "203.0.113.7" },
        { { 0 }, NULL, "203.0.113.7", { "Forwarded: for=198.51.100.1", "X-Real-IP: 198.51.100.1" }, "203.0.113.7" },
        { { "10.0.0.1" }, NULL, "203.0.113.7", { "X-Forwarded-For: 198.51.100.1, 10.0.0.1" }, "203.0.113.7" },
        { { "10.0.0.0/8" }, NULL, "11.0.0.1", { "X-Forwarded-For: 198.51.100.1" }, "11.0.0.1" },
        { { "unix:" }, NULL, "192.0.2.1", { "X-Forwarded-For: 198.51.100.1" }, "192.0.2.1" },
        { { "::/0" }, NULL, "203.0.113.7", { "X-Forwarded-For: 198.51.100.1" }, "203.0.113.7" },
    };
    check_walks(cases, COUNT(cases));
}

static void
forwarded_for_is_walked_from_the_right(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7" }, "198.51.100.7" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.8" }, "198.51.100.8" },
        { { "10.0.0.1" }, NULL, "10.0.0.1:4711", { "x-forwarded-for: 198.51.100.7:1111" }, "198.51.100.7" },
        { { "10.0.0.1" }, NULL, "::ffff:10.0.0.1", { "X-FORWARDED-FOR: [2001:db8::1]:443" }, "2001:db8::/64" },
        /* what the client forged stands left of what the proxy wrote */
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 1.1.1.1, 198.51.100.7" }, "198.51.100.7" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 10.0.0.1, 198.51.100.7" }, "198.51.100.7" },
        { { "10.0.0.0/8" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7,10.9.9.9 ,\t10.0.0.2" }, "198.51.100.7" },
        /* every hop trusted: the leftmost */
        { { "10.0.0.0/8" }, NULL, "10.0.0.1", { "X-Forwarded-For: 10.1.1.1, 10.2.2.2" }, "10.1.1.1" },
        /* repeated lines are one list, in order */
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 1.1.1.1", "A: b", "X-Forwarded-For: 198.51.100.7" },
          "198.51.100.7" },
        { { "10.0.0.0/8" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7", "X-Forwarded-For: 10.0.0.2" },
          "198.51.100.7" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "A: b" }, "10.0.0.1" },
        { { "unix:", "10.0.0.0/8" }, NULL, "unix:", { "X-Forwarded-For: 198.51.100.7, unix:, 10.0.0.1" }, "198.51.100.7" },
    };
    check_walks(cases, COUNT(cases));
}

static void
a_malformed_entry_ends_the_walk_at_the_last_good_hop(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: abc" }, "10.0.0.1" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For:" }, "10.0.0.1" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: , " }, "10.0.0.1" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7, unknown" }, "10.0.0.1" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7, unix:" }, "10.0.0.1" },
        /* a proxy that could not name its peer wrote nothing: what stands to the left is the client's own word */
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7, " }, "10.0.0.1" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7", "X-Forwarded-For:" }, "10.0.0.1" },
        { { "10.0.0.0/8" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7, rubbish, 10.0.0.2" }, "10.0.0.2" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: \"198.51.100.7\"" }, "10.0.0.1" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7; 198.51.100.8" }, "10.0.0.1" },
    };
    check_walks(cases, COUNT(cases));
}

static void
forwarded_is_read_as_rfc_7239_writes_it(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=192.0.2.60;proto=http;by=203.0.113.43" },
          "192.0.2.60" },
        { { "10.0.0.1" }, "forwarded", "10.0.0.1", { "Forwarded: For=\"[2001:db8:cafe::17]:4711\"" },
          "2001:db8:cafe::/64" },
        { { "10.0.0.0/8" }, "Forwarded", "10.0.0.1", { "Forwarded: for=192.0.2.43, for=10.0.0.2" }, "192.0.2.43" },
        { { "10.0.0.0/8" }, "Forwarded", "10.0.0.1", { "Forwarded: for=192.0.2.43", "Forwarded: for=10.0.0.2" },
          "192.0.2.43" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: proto=http;host=\"a, b;\\\"c\";for=\"192.0.2.60:80\"" },
          "192.0.2.60" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=\"192.0.2.\\6\\0\"" }, "192.0.2.60" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=192.0.2.60 ; proto=http;" }, "192.0.2.60" },
        /* no address: the walk ends */
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=unknown" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=_SEVKISEK" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: by=192.0.2.60" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=192.0.2.60;for=192.0.2.61" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=\"192.0.2.60" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=\"192.0.2.60\"x" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: 192.0.2.60" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for = 192.0.2.60" }, "10.0.0.1" },
        /* a client's stray quote cannot swallow what the proxy appended */
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=\", for=192.0.2.60" }, "192.0.2.60" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: for=1.1.1.1;x=\"a\\, for=192.0.2.60" }, "192.0.2.60" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "Forwarded: \\\"\\, for=192.0.2.60;host=\"h\"" }, "192.0.2.60" },
    };
    check_walks(cases, COUNT(cases));
}

static void
a_header_of_one_address_is_taken_once_only(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { "10.0.0.1" }, "X-Real-IP", "10.0.0.1", { "X-Real-IP: 198.51.100.7" }, "198.51.100.7" },
        { { "10.0.0.1" }, "x-real-ip", "10.0.0.1", { "X-REAL-IP: 2001:DB8::1" }, "2001:db8::/64" },
        { { "10.0.0.1" }, "CF-Connecting-IP", "10.0.0.1", { "CF-Connecting-IP: 2001:db8:0:0::1" }, "2001:db8::/64" },
        { { "10.0.0.1" }, "X-Real-IP", "10.0.0.1", { "X-Real-IP: 198.51.100.7", "X-Real-IP: 198.51.100.7" }, "10.0.0.1" },
        { { "10.0.0.1" }, "X-Real-IP", "10.0.0.1", { "X-Real-IP: 198.51.100.7, 198.51.100.8" }, "10.0.0.1" },
        { { "10.0.0.1" }, "X-Real-IP", "10.0.0.1", { "X-Real-IP: nobody" }, "10.0.0.1" },
        { { "10.0.0.1" }, "X-Real-IP", "10.0.0.1", { "X-Real-IP: unix:" }, "10.0.0.1" },
        { { "unix:" }, "X-Real-IP", "unix:", { "X-Real-IP: 198.51.100.7", "X-Real-IP: 198.51.100.8" }, NULL },
    };
    check_walks(cases, COUNT(cases));
}

static void
only_the_header_that_is_named_is_read(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Real-IP: 1.1.1.1", "Forwarded: for=1.1.1.1" }, "10.0.0.1" },
        { { "10.0.0.1" }, "X-Real-IP", "10.0.0.1", { "X-Forwarded-For: 1.1.1.1", "Forwarded: for=1.1.1.1" }, "10.0.0.1" },
        { { "10.0.0.1" }, "Forwarded", "10.0.0.1", { "X-Forwarded-For: 1.1.1.1", "X-Real-IP: 1.1.1.1" }, "10.0.0.1" },
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-Fo: 1.1.1.1", "X-Forwarded-Form: 1.1.1.1" }, "10.0.0.1" },
    };
    check_walks(cases, COUNT(cases));
}

static void
an_underscore_spelling_cannot_slip_past_the_proxys_own_line(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X-Forwarded-For: 198.51.100.7", "X_Forwarded_For: 1.1.1.1" },
          "198.51.100.7" },
        { { "10.0.0.1" }, "X-Real-IP", "10.0.0.1", { "X_Real_IP: 1.1.1.1", "X-Real-IP: 198.51.100.7" }, "198.51.100.7" },
        /* FastCGI knows that spelling alone */
        { { "10.0.0.1" }, NULL, "10.0.0.1", { "X_FORWARDED_FOR: 198.51.100.7" }, "198.51.100.7" },
    };
    check_walks(cases, COUNT(cases));
}

static void
a_local_socket_is_a_peer_of_its_own(void **unused)
{
    (void)unused;
    static const walk_case cases[] = {
        { { "unix:" }, NULL, NULL, { "X-Forwarded-For: 203.0.113.5" }, "203.0.113.5" },
        { { "unix:" }, NULL, "", { "X-Forwarded-For: 203.0.113.5" }, "203.0.113.5" },
        { { "unix:" }, NULL, "b''", { "X-Forwarded-For: 203.0.113.5" }, "203.0.113.5" },
        { { "unix:" }, NULL, "unix:", { "X-Forwarded-For: 203.0.113.5" }, "203.0.113.5" },
        { { "UNIX:" }, NULL, "unix:/run/app.sock", { "X-Forwarded-For: 203.0.113.5" }, "203.0.113.5" },
        { { "unix:" }, NULL, "unix:", { 0 }, NULL },
        { { "unix:" }, NULL, "unix:", { "X-Forwarded-For: unix:" }, NULL },
        { { "unix:" }, NULL, "unix:", { "X-Forwarded-For: rubbish" }, NULL },
        { { 0 }, NULL, NULL, { "X-Forwarded-For: 203.0.113.5" }, NULL },
        { { 0 }, NULL, "", { "X-Forwarded-For: 203.0.113.5" }, NULL },
        { { 0 }, NULL, "b''", { "X-Forwarded-For: 203.0.113.5" }, NULL },
        { { "0.0.0.0/0", "::/0" }, NULL, "unix:", { "X-Forwarded-For: 203.0.113.5" }, NULL },
        { { 0 }, NULL, "testclient", { "X-Forwarded-For: 203.0.113.5" }, NULL },
    };
    check_walks(cases, COUNT(cases));
}

static void
a_peer_already_resolved_is_not_walked_again(void **unused)
{
    (void)unused;
    static const char *const trusted[TEXTS_MAX] = { "0.0.0.0/0", "unix:" };
    tg_client *client = client_of(trusted, NULL);
    const tg_header header = { { "X-Forwarded-For", 15 }, { "1.1.1.1", 7 } };
    tg_request request = { .peer = tg_text_of("::ffff:198.51.100.7"), .headers = &header, .header_count = 1,
                           .client_resolved = true };
    char address[TG_ADDRESS_TEXT_MAX];
    assert_int_equal(tg_client_resolve(client, &request, address, NULL), TG_OK);
    assert_string_equal(address, "198.51.100.7");
    request.peer = tg_text_of("unix:");
    assert_int_equal(tg_client_resolve(client, &request, address, NULL), TG_E_IDENTITY);
    tg_client_close(client);
}

static void
without_a_client_nobody_is_trusted(void **unused)
{
    (void)unused;
    const tg_header header = { { "X-Forwarded-For", 15 }, { "1.1.1.1", 7 } };
    const tg_request request = { .peer = tg_text_of("127.0.0.1"), .headers = &header, .header_count = 1 };
    char address[TG_ADDRESS_TEXT_MAX];
    assert_int_equal(tg_client_resolve(NULL, &request, address, NULL), TG_OK);
    assert_string_equal(address, "127.0.0.1");
}

static void
prefixes_can_be_set(void **unused)
{
    (void)unused;
    tg_client *client;
    char address[TG_ADDRESS_TEXT_MAX];
    tg_client_options options = { .ipv4_prefix = 24, .ipv6_prefix = 48 };
    assert_int_equal(tg_client_open(&options, &client, NULL), TG_OK);
    assert_int_equal(tg_client_normalise(client, tg_text_of("192.0.2.77"), address, NULL), TG_OK);
    assert_string_equal(address, "192.0.2.0/24");
    assert_int_equal(tg_client_normalise(client, tg_text_of("2001:db8:1:2::3"), address, NULL), TG_OK);
    assert_string_equal(address, "2001:db8:1::/48");
    tg_client_close(client);
    options.ipv4_prefix = 33;
    assert_int_equal(tg_client_open(&options, &client, NULL), TG_E_CONFIG);
    options.ipv4_prefix = 0;
    options.ipv6_prefix = 129;
    assert_int_equal(tg_client_open(&options, &client, NULL), TG_E_CONFIG);
}

static void
a_normalised_address_is_its_own_normal_form(void **unused)
{
    (void)unused;
    char once[TG_ADDRESS_TEXT_MAX], twice[TG_ADDRESS_TEXT_MAX];
    static const char *const addresses[] = { "192.0.2.1", "::ffff:192.0.2.1", "2001:db8:1:2:3::4", "::1" };
    for (size_t i = 0; i < COUNT(addresses); i++) {
        assert_int_equal(tg_client_normalise(NULL, tg_text_of(addresses[i]), once, NULL), TG_OK);
        assert_int_equal(tg_client_normalise(NULL, tg_text_of(once), twice, NULL), TG_OK);
        assert_string_equal(once, twice);
    }
    static const char *const none[] = { "", "abc", "2001:db8::/48", "192.0.2.1/24", "2001:db8::/", "b''", "unix:" };
    for (size_t i = 0; i < COUNT(none); i++) {
        tg_error error;
        assert_int_equal(tg_client_normalise(NULL, tg_text_of(none[i]), once, &error), TG_E_IDENTITY);
        assert_non_null(strstr(error.message, "is no address"));
    }
}

static void
wrong_options_are_refused_by_name(void **unused)
{
    (void)unused;
    static const struct {
        const char *trusted, *header, *user, *message;
    } cases[] = {
        { "10.0.0.1/8", NULL, NULL, "\"10.0.0.1/8\" has bits set" },
        { "proxy", NULL, NULL, "\"proxy\" is no network" },
        { "unix", NULL, NULL, "\"unix\" is no network" },
        { NULL, "X-Forwaded-For", NULL, "client_header \"X-Forwaded-For\": did you mean X-Forwarded-For?" },
        { NULL, "X-Forwarded-Fro", NULL, "did you mean X-Forwarded-For?" },
        { NULL, "Forwarded-", NULL, "did you mean Forwarded?" },
        { NULL, "X-RealIP", NULL, "did you mean X-Real-IP?" },
        { NULL, "X Forwarded For", NULL, "is no header name" },
        { NULL, NULL, "X User", "user_header \"X User\" is no header name" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_text trusted = tg_text_of(cases[i].trusted);
        const tg_client_options options = {
            .trusted_proxies = &trusted,
            .trusted_proxy_count = cases[i].trusted != NULL,
            .client_header = tg_text_of(cases[i].header),
            .user_header = tg_text_of(cases[i].user),
        };
        tg_client *client;
        tg_error error;
        assert_int_equal(tg_client_open(&options, &client, &error), TG_E_CONFIG);
        if (!strstr(error.message, cases[i].message))
            fail_msg("%s", error.message);
    }
}

static void
a_forwarding_header_from_an_untrusted_peer_is_mentioned_once(void **unused)
{
    (void)unused;
    tg_notice notice;
    /* the_first_such_header... has made the process speak already: a thousand further requests add nothing */
    const tg_header header = { { "x_forwarded_for", 15 }, { "1.1.1.1", 7 } };
    char address[TG_ADDRESS_TEXT_MAX];
    for (int i = 0; i < 1000; i++) {
        const tg_request request = { .peer = tg_text_of(i % 2 ? "10.0.0.9" : "203.0.113.9"), .headers = &header,
                                     .header_count = 1 };
        assert_int_equal(tg_client_resolve(NULL, &request, address, NULL), TG_OK);
    }
    assert_false(tg_notice_take(&notice));
}

static void
the_first_such_header_is_mentioned_with_the_remedy(void **unused)
{
    (void)unused;
    const tg_header header = { { "X-Forwarded-For", 15 }, { "1.1.1.1", 7 } };
    char address[TG_ADDRESS_TEXT_MAX];
    tg_notice notice;
    const tg_request request = { .peer = tg_text_of("10.0.0.9"), .headers = &header, .header_count = 1 };
    assert_int_equal(tg_client_resolve(NULL, &request, address, NULL), TG_OK);
    assert_true(tg_notice_take(&notice));
    assert_string_equal(notice.code, "forwarded-from-untrusted");
    assert_non_null(strstr(notice.message, "add \"10.0.0.9\" to trusted_proxies"));
    /* a stranger's forged header has not used up the word about the proxy, nor the other way round */
    const tg_request stranger = { .peer = tg_text_of("203.0.113.9"), .headers = &header, .header_count = 1 };
    assert_int_equal(tg_client_resolve(NULL, &stranger, address, NULL), TG_OK);
    assert_true(tg_notice_take(&notice));
    assert_non_null(strstr(notice.message, "203.0.113.9"));
    assert_false(tg_notice_take(&notice));
}

static void
a_list_is_taken_apart_from_its_end(void **unused)
{
    (void)unused;
    tg_text rest = tg_text_of("a, \"b,c\" ,\"d\\\",e\""), element;
    static const char *const elements[] = { "\"d\\\",e\"", " \"b,c\" ", "a" };
    for (size_t i = 0; i < COUNT(elements); i++) {
        assert_true(tg__list_last(&rest, true, &element));
        assert_true(tg__text_is(element, elements[i]));
    }
    assert_false(tg__list_last(&rest, true, &element));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_such_header_is_mentioned_with_the_remedy), /* first: once a process */
        cmocka_unit_test(a_header_from_an_untrusted_peer_is_not_read),
        cmocka_unit_test(forwarded_for_is_walked_from_the_right),
        cmocka_unit_test(a_malformed_entry_ends_the_walk_at_the_last_good_hop),
        cmocka_unit_test(forwarded_is_read_as_rfc_7239_writes_it),
        cmocka_unit_test(a_header_of_one_address_is_taken_once_only),
        cmocka_unit_test(only_the_header_that_is_named_is_read),
        cmocka_unit_test(an_underscore_spelling_cannot_slip_past_the_proxys_own_line),
        cmocka_unit_test(a_local_socket_is_a_peer_of_its_own),
        cmocka_unit_test(a_peer_already_resolved_is_not_walked_again),
        cmocka_unit_test(without_a_client_nobody_is_trusted),
        cmocka_unit_test(prefixes_can_be_set),
        cmocka_unit_test(a_normalised_address_is_its_own_normal_form),
        cmocka_unit_test(wrong_options_are_refused_by_name),
        cmocka_unit_test(a_list_is_taken_apart_from_its_end),
        cmocka_unit_test(a_forwarding_header_from_an_untrusted_peer_is_mentioned_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
