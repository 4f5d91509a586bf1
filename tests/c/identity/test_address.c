/* Addresses: every spelling of one host is one client, rubbish is none. */
#include "identity/address.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

/* The text it is counted by, or "no address". */
static const char *
counted(const char *written, char text[TG_ADDRESS_TEXT_MAX])
{
    tg_address address;
    if (!tg__address_parse_node(tg_text_of(written), &address))
        return "no address";
    tg__address_text(&address, 32, 64, text);
    return text;
}

static void
every_spelling_of_an_address_is_one_client(void **unused)
{
    (void)unused;
    static const char *const cases[][2] = {
        { "192.0.2.1", "192.0.2.1" },
        { "0.0.0.0", "0.0.0.0" },
        { "255.255.255.255", "255.255.255.255" },
        { " 192.0.2.1\t", "192.0.2.1" },
        { "198.51.100.7:1111", "198.51.100.7" },
        { "198.51.100.7:2222", "198.51.100.7" },
        { "198.51.100.7:_hidden", "198.51.100.7" },
        /* IPv4 within IPv6, in every spelling, before the prefix is taken */
        { "::ffff:192.0.2.1", "192.0.2.1" },
        { "::FFFF:192.0.2.1", "192.0.2.1" },
        { "::ffff:c000:201", "192.0.2.1" },
        { "0:0:0:0:0:FFFF:C000:201", "192.0.2.1" },
        { "0000:0000:0000:0000:0000:ffff:192.0.2.1", "192.0.2.1" },
        { "0:0::ffff:192.0.2.1", "192.0.2.1" },
        { "[::ffff:192.0.2.1]:443", "192.0.2.1" },
        { "64:ff9b::192.0.2.1", "192.0.2.1" },
        { "64:ff9b::c000:0201", "192.0.2.1" },
        { "0064:FF9B:0:0:0:0:192.0.2.1", "192.0.2.1" },
        { "64:ff9b:1::192.0.2.1", "64:ff9b:1::/64" }, /* local NAT64: its prefix is not known to us */
        /* IPv6 by its /64 */
        { "2001:db8:1:2::1", "2001:db8:1:2::/64" },
        { "2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64" },
        { "2001:0DB8:0001:0002:0000:0000:0000:0001", "2001:db8:1:2::/64" },
        { "2001:DB8::1", "2001:db8::/64" },
        { "2001:db8:0:0::1", "2001:db8::/64" },
        { "[2001:db8::1]:443", "2001:db8::/64" },
        { "[2001:db8::1]", "2001:db8::/64" },
        { "fe80::1%eth0", "fe80::/64" },
        { "[fe80::1%25en0]:80", "fe80::/64" },
        { "::1", "::/64" },
        { "::", "::/64" },
        { "1::", "1::/64" },
        { "1:2:3:4:5:6:7::", "1:2:3:4::/64" },
        { "::2:3:4:5:6:7:8", "0:2:3:4::/64" },
        { "1:0:0:2::", "1:0:0:2::/64" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char text[TG_ADDRESS_TEXT_MAX];
        if (strcmp(counted(cases[i][0], text), cases[i][1]) != 0)
            fail_msg("%s is counted as %s, not %s", cases[i][0], counted(cases[i][0], text), cases[i][1]);
    }
}

static void
rubbish_is_no_address(void **unused)
{
    (void)unused;
    static const char *const cases[] = {
        "", " ", "abc", "unknown", "_hidden", "localhost", "1", "1.2.3", "1.2.3.4.5", "1.2.3.", ".1.2.3", "1..2.3",
        "256.1.1.1", "1.2.3.999", "01.2.3.4", "1.2.3.04", "0x1.2.3.4", "1.2.3.4a", "1.2.3.4 5", "-1.2.3.4", "+1.2.3.4",
        "1.2.3.4:", "1.2.3.4:x", "1.2.3.4:123456", "1.2.3.4%eth0", "[1.2.3.4]", "[1.2.3.4]:80", "192.0.2.1/32",
        ":", ":::", "::1::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:8::", ":1:2:3:4:5:6:7:8",
        "1:2:3:4:5:6:7:8:", "12345::", "g::1", "::ffff:192.0.2.256", "::ffff:1.2.3", "::1.2.3.4.5", "1.2.3.4::",
        "1:2:3:4:5:6:7:1.2.3.4", "::192.0.2.1:80", "[::1", "::1]", "[::1]x", "[::1]:", "[::1]:99999999", "[]", "[]:80",
        "[[::1]]", "fe80::1%", "[fe80::1%]", "fe80::1%a b", "fe80::1%a/64", "fe80::1%a:1", "%eth0", "b''", "::1,::2", "192.0.2.1, 192.0.2.2",
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char text[TG_ADDRESS_TEXT_MAX];
        if (strcmp(counted(cases[i], text), "no address") != 0)
            fail_msg("\"%s\" is counted as %s", cases[i], counted(cases[i], text));
    }
}

static void
an_address_may_end_anywhere_in_a_larger_text(void **unused)
{
    (void)unused;
    /* Nothing behind the text is read: the byte after it would change the answer. */
    const char *larger = "192.0.2.17";
    tg_address address;
    char text[TG_ADDRESS_TEXT_MAX];
    assert_true(tg__address_parse_node((tg_text){ larger, 9 }, &address));
    tg__address_text(&address, 32, 64, text);
    assert_string_equal(text, "192.0.2.1");
    assert_false(tg__address_parse_node((tg_text){ larger, 8 }, &address));
    assert_false(tg__address_parse_node((tg_text){ NULL, 0 }, &address));
    assert_false(tg__address_parse_node((tg_text){ "192.0.2.1\0", 10 }, &address));
}

static void
prefixes_are_as_wide_as_asked(void **unused)
{
    (void)unused;
    static const struct {
        const char *address;
        unsigned ipv4, ipv6;
        const char *text;
    } cases[] = {
        { "192.0.2.129", 32, 64, "192.0.2.129" },   { "192.0.2.129", 24, 64, "192.0.2.0/24" },
        { "192.0.2.129", 25, 64, "192.0.2.128/25" }, { "192.0.2.129", 1, 64, "128.0.0.0/1" },
        { "2001:db8:1:2:3::1", 32, 128, "2001:db8:1:2:3::1" },
        { "2001:db8:1:2:3::1", 32, 48, "2001:db8:1::/48" },
        { "2001:db8:1:ffff::1", 32, 56, "2001:db8:1:ff00::/56" },
        { "2001:db8:1:2:3:4:5:6", 32, 127, "2001:db8:1:2:3:4:5:6/127" },
        { "ffff::", 32, 1, "8000::/1" },
        { "1:0:0:2:0:0:0:3", 32, 128, "1:0:0:2::3" }, /* RFC 5952: the longest run of zeros */
        { "1:0:0:2:3:0:0:4", 32, 128, "1::2:3:0:0:4" }, /* the first of two equal ones */
        { "1:0:2:3:4:5:6:7", 32, 128, "1:0:2:3:4:5:6:7" }, /* a single zero is no run */
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_address address;
        char text[TG_ADDRESS_TEXT_MAX];
        assert_true(tg__address_parse_node(tg_text_of(cases[i].address), &address));
        assert_int_equal(tg__address_text(&address, cases[i].ipv4, cases[i].ipv6, text), strlen(cases[i].text));
        assert_string_equal(text, cases[i].text);
    }
}

static void
what_is_written_reads_back_the_same(void **unused)
{
    (void)unused;
    uint64_t random = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        tg_address address = { .ipv4 = false }, again;
        for (size_t b = 0; b < 16; b++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            address.bytes[b] = random % 3 ? 0 : (uint8_t)(random >> 20); /* many zeros: the shape of the text varies */
        }
        address.bytes[0] = 0x20; /* neither mapped nor NAT64 */
        char text[TG_ADDRESS_TEXT_MAX];
        tg__address_text(&address, 32, 128, text);
        assert_true(tg__address_parse(tg_text_of(text), &again));
        assert_memory_equal(again.bytes, address.bytes, 16);
        assert_false(again.ipv4);
    }
}

static void
networks_hold_what_their_bits_say(void **unused)
{
    (void)unused;
    static const struct {
        const char *network, *address;
        bool holds;
    } cases[] = {
        { "10.0.0.0/8", "10.255.0.1", true },     { "10.0.0.0/8", "11.0.0.1", false },
        { "192.0.2.1", "192.0.2.1", true },       { "192.0.2.1", "192.0.2.2", false },
        { "192.0.2.128/25", "192.0.2.200", true }, { "192.0.2.128/25", "192.0.2.127", false },
        { "0.0.0.0/0", "203.0.113.9", true },     { "0.0.0.0/0", "2001:db8::1", false },
        { "::/0", "2001:db8::1", true },          { "::/0", "203.0.113.9", false },
        { "10.0.0.0/8", "::ffff:10.1.2.3", true }, { "::ffff:10.0.0.0/104", "10.1.2.3", true },
        { "::ffff:0:0/96", "10.1.2.3", true },    { "::ffff:10.0.0.1", "10.0.0.1", true },
        { "2001:db8::/33", "2001:db8:7fff::1", true }, { "2001:db8::/33", "2001:db8:8000::1", false },
        { "::1", "::1", true },                   { "::1", "::2", false },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_network network;
        tg_address address;
        assert_int_equal(tg__network_parse(tg_text_of(cases[i].network), &network, NULL), TG_OK);
        assert_true(tg__address_parse(tg_text_of(cases[i].address), &address));
        if (tg__network_holds(&network, &address) != cases[i].holds)
            fail_msg("%s in %s", cases[i].address, cases[i].network);
    }
}

static void
a_wrong_network_is_named_with_what_was_expected(void **unused)
{
    (void)unused;
    static const char *const cases[][2] = {
        { "10.0.0.0/33", "\"10.0.0.0/33\": expected a prefix from 0 to 32 behind the '/'" },
        { "10.0.0.0/", "\"10.0.0.0/\": expected a prefix from 0 to 32 behind the '/'" },
        { "10.0.0.0/-1", "\"10.0.0.0/-1\": expected a prefix from 0 to 32 behind the '/'" },
        { "2001:db8::/129", "\"2001:db8::/129\": expected a prefix from 0 to 128 behind the '/'" },
        { "::ffff:10.0.0.0/8", "\"::ffff:10.0.0.0/8\": expected a prefix from 96 to 128 behind the '/'" },
        { "10.0.0.1/8", "\"10.0.0.1/8\" has bits set past its prefix: expected \"10.0.0.0/8\" for the network" },
        { "2001:db8::1/32", "expected \"2001:db8::/32\" for the network" },
        { "proxy.example", "\"proxy.example\" is no network: expected an address" },
        { "*", "\"*\" is no network" },
        { "", "\"\" is no network" },
        { "10.0.0.1:80", "is no network" },
        { "10/8", "is no network" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_network network;
        tg_error error;
        assert_int_equal(tg__network_parse(tg_text_of(cases[i][0]), &network, &error), TG_E_CONFIG);
        if (!strstr(error.message, cases[i][1]))
            fail_msg("%s: %s", cases[i][0], error.message);
    }
}

static void
private_addresses_are_told_from_public_ones(void **unused)
{
    (void)unused;
    static const struct {
        const char *address;
        bool is_private;
    } cases[] = {
        { "127.0.0.1", true },   { "10.1.2.3", true },      { "172.16.0.1", true },  { "172.31.255.255", true },
        { "172.32.0.1", false }, { "192.168.1.1", true },   { "169.254.1.1", true }, { "100.64.0.1", true },
        { "100.128.0.1", false }, { "203.0.113.1", false }, { "::1", true },         { "fd00::1", true },
        { "fe80::1", true },     { "2001:db8::1", false },  { "::ffff:10.0.0.1", true },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_address address;
        assert_true(tg__address_parse(tg_text_of(cases[i].address), &address));
        assert_int_equal(tg__address_private(&address), cases[i].is_private);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_spelling_of_an_address_is_one_client),
        cmocka_unit_test(rubbish_is_no_address),
        cmocka_unit_test(an_address_may_end_anywhere_in_a_larger_text),
        cmocka_unit_test(prefixes_are_as_wide_as_asked),
        cmocka_unit_test(what_is_written_reads_back_the_same),
        cmocka_unit_test(networks_hold_what_their_bits_say),
        cmocka_unit_test(a_wrong_network_is_named_with_what_was_expected),
        cmocka_unit_test(private_addresses_are_told_from_public_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
