/* One spelling for each path, host and method. */
#include "identity/path.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

static void
whatever_reaches_one_handler_is_one_path(void **unused)
{
    (void)unused;
    static const char *const cases[][2] = {
        { "/login", "/login" },
        { "//login", "/login" },
        { "/login/", "/login" },
        { "/login//", "/login" },
        { "/%6Cogin", "/login" },
        { "/%6cogi%6e", "/login" },
        { "/login?x=1", "/login" },
        { "/login/?x=/../y", "/login" },
        { "/login#top", "/login" },
        { "/./login/.", "/login" },
        { "/a/../login", "/login" },
        { "/a/b/../../login", "/login" },
        { "/../login", "/login" },
        { "/%2e%2E/login", "/login" },
        { "/a/%2e./login", "/login" },
        { "login", "/login" },
        { "http://shop.example/login", "/login" }, { "ftp://x/login", "/login" }, { "a+1:/login", "/a+1:/login" },
        { "HTTPS://shop.example:443/login?x", "/login" },
        { "/a%2Flogin", "/a/login" }, /* servers route it so */
        { "/a%2F%2flogin%2f", "/a/login" },
        { "/a%2F..%2flogin", "/login" },
        { "/", "/" }, { "", "/" }, { "//", "/" }, { "/.", "/" }, { "/..", "/" }, { "?x", "/" }, { "/../..", "/" },
        { "http://shop.example", "/" }, { "http://shop.example?x", "/" },
        { "*", "/*" },
        { "/a%", "/a%" }, { "/a%4", "/a%4" }, { "/a%zz", "/a%zz" }, { "/%", "/%" },
        { "/a%2541", "/a%41" }, /* once */
        { "/a+b", "/a+b" },
        { "/.../a", "/.../a" }, { "/..a/b", "/..a/b" }, { "/a../b", "/a../b" }, { "/.a", "/.a" },
        { "/LOGIN", "/LOGIN" },
        { "/caf%C3%A9", "/caf\xc3\xa9" },
        { "/http://x/y", "/http:/x/y" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char normal[TG_PATH_BYTES_MAX];
        const tg_text text = { normal, tg__path_normalise(tg_text_of(cases[i][0]), normal) };
        if (!tg__text_is(text, cases[i][1]))
            fail_msg("%s is %.*s, not %s", cases[i][0], (int)text.length, text.data, cases[i][1]);
    }
}

static void
a_path_as_sent_keeps_its_empty_and_dot_segments(void **unused)
{
    (void)unused;
    static const struct {
        const char *raw, *as_sent;
        bool differs;
    } cases[] = {
        { "/a/b", "/a/b", false },           { "/a/b/", "/a/b", false },        { "/", "/", false },
        { "", "/", false },                  { "/%61/b?x/../y", "/a/b", false }, { "/a/...", "/a/...", false },
        { "/a/../b", "/a/../b", true },      { "/a/%2e%2E/b/", "/a/../b", true }, { "/a//b", "/a//b", true },
        { "//", "/", true },                 { "/a//", "/a/", true },           { "/a/.", "/a/.", true },
        { "/a/..", "/a/..", true },          { "/a%2F%2Fb", "/a//b", true },    { "..", "/..", true },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char spelt[TG_PATH_BYTES_MAX];
        bool differs, again;
        const tg_text text = { spelt, tg__path_spell(tg_text_of(cases[i].raw), false, spelt, &differs) };
        if (!tg__text_is(text, cases[i].as_sent) || differs != cases[i].differs)
            fail_msg("%s is %.*s", cases[i].raw, (int)text.length, text.data);
        tg__path_spell(tg_text_of(cases[i].raw), true, spelt, &again);
        assert_int_equal(again, differs);
    }
}

static void
a_nul_byte_is_a_byte_like_any_other(void **unused)
{
    (void)unused;
    char normal[TG_PATH_BYTES_MAX];
    assert_int_equal(tg__path_normalise(tg_text_of("/a%00b"), normal), 4);
    assert_memory_equal(normal, "/a\0b", 4);
}

static void
a_long_path_keeps_both_ends_and_stays_distinct(void **unused)
{
    (void)unused;
    enum { LONG = 100000 };
    char *raw = malloc(LONG + 16), a[TG_PATH_BYTES_MAX], b[TG_PATH_BYTES_MAX];
    assert_non_null(raw);
    memset(raw, 'x', LONG);
    memcpy(raw, "/api/", 5);
    memcpy(raw + LONG, "/edit", 5);
    const size_t length = tg__path_normalise((tg_text){ raw, LONG + 5 }, a);
    assert_in_range(length, 2000, TG_PATH_BYTES_MAX);
    assert_memory_equal(a, "/api/xxx", 8);
    assert_memory_equal(a + length - 6, "x/edit", 6);
    assert_non_null(memchr(a, 0xff, length));
    raw[LONG / 2] = 'y'; /* in the part that is folded away */
    assert_int_equal(tg__path_normalise((tg_text){ raw, LONG + 5 }, b), length);
    assert_memory_not_equal(a, b, length);
    free(raw);
}

static void
dots_climb_out_of_a_path_longer_than_the_buffer(void **unused)
{
    (void)unused;
    /* Junk of any length, in one segment or in many, then as many ".." as lead out of it: the handler is /login. */
    for (size_t segments = 1; segments <= 2000; segments += 333) {
        for (size_t each = 1; each <= 9000; each = each * 9 + 1) {
            const size_t room = segments * (each + 1) + segments * 3 + 32;
            char *raw = malloc(room), *at = raw, normal[TG_PATH_BYTES_MAX];
            assert_non_null(raw);
            at = stpcpy(at, "/");
            for (size_t i = 0; i < segments; i++) {
                memset(at, 'j', each);
                at[each] = '/';
                at += each + 1;
            }
            for (size_t i = 0; i < segments; i++)
                at = stpcpy(at, "../");
            at = stpcpy(at, "login");
            const tg_text text = { normal, tg__path_normalise((tg_text){ raw, (size_t)(at - raw) }, normal) };
            if (!tg__text_is(text, "/login"))
                fail_msg("%zu segments of %zu bytes: %zu bytes", segments, each, text.length);
            free(raw);
        }
    }
}

static void
slashes_without_end_do_not_fill_the_buffer(void **unused)
{
    (void)unused;
    static char raw[50000];
    char normal[TG_PATH_BYTES_MAX];
    memset(raw, '/', sizeof raw);
    memcpy(raw + sizeof raw - 5, "login", 5);
    assert_int_equal(tg__path_normalise((tg_text){ raw, sizeof raw }, normal), 6);
    assert_memory_equal(normal, "/login", 6);
}

static void
hosts_have_one_spelling(void **unused)
{
    (void)unused;
    static const char *const cases[][2] = {
        { "shop.example", "shop.example" }, { "SHOP.Example", "shop.example" }, { "shop.example:8080", "shop.example" },
        { "shop.example.", "shop.example" }, { "shop.example.:80", "shop.example" }, { " shop.example ", "shop.example" },
        { "[2001:DB8::1]:443", "[2001:db8::1]" }, { "[::1]", "[::1]" }, { "192.0.2.1:80", "192.0.2.1" },
        { "", "" }, { ".", "." }, { ":80", "" },
    };
    char normal[TG_HOST_BYTES_MAX];
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_text text = { normal, tg__host_normalise(tg_text_of(cases[i][0]), normal) };
        if (!tg__text_is(text, cases[i][1]))
            fail_msg("%s is %.*s", cases[i][0], (int)text.length, text.data);
    }
    static char longer[TG_HOST_BYTES_MAX + 1];
    memset(longer, 'h', sizeof longer);
    assert_int_equal(tg__host_normalise((tg_text){ longer, sizeof longer }, normal), 0);
    assert_int_equal(tg__host_normalise((tg_text){ longer, sizeof longer - 1 }, normal), TG_HOST_BYTES_MAX);
}

static void
methods_have_one_spelling(void **unused)
{
    (void)unused;
    static const char *const cases[][2] = { { "GET", "GET" }, { "get", "GET" }, { "HEAD", "GET" }, { "head", "GET" },
                                            { "M-SEARCH", "M-SEARCH" }, { "", "" } };
    char normal[TG_METHOD_BYTES_MAX];
    for (size_t i = 0; i < COUNT(cases); i++) {
        const tg_text text = { normal, tg__method_normalise(tg_text_of(cases[i][0]), normal) };
        assert_true(tg__text_is(text, cases[i][1]));
    }
    assert_int_equal(tg__method_normalise(tg_text_of("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFG"), normal), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whatever_reaches_one_handler_is_one_path),
        cmocka_unit_test(a_path_as_sent_keeps_its_empty_and_dot_segments),
        cmocka_unit_test(a_nul_byte_is_a_byte_like_any_other),
        cmocka_unit_test(a_long_path_keeps_both_ends_and_stays_distinct),
        cmocka_unit_test(dots_climb_out_of_a_path_longer_than_the_buffer),
        cmocka_unit_test(slashes_without_end_do_not_fill_the_buffer),
        cmocka_unit_test(hosts_have_one_spelling),
        cmocka_unit_test(methods_have_one_spelling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
