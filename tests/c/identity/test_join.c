/* Joint identities: no content of one part makes two equal, and none grows with what a client sends. */
#include "identity/identity.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))
#define TEXT(literal) { (literal), sizeof(literal) - 1 }

static tg_identity
joined(const tg_part *parts, size_t count)
{
    tg_identity identity;
    assert_int_equal(tg__identity_join(parts, count, &identity, NULL), TG_OK);
    assert_in_range(identity.length, 1, TG_IDENTITY_BYTES_MAX);
    return identity;
}

static bool
equal(tg_identity a, tg_identity b)
{
    return a.length == b.length && memcmp(a.bytes, b.bytes, a.length) == 0;
}

static void
a_separator_inside_a_part_makes_no_two_identities_equal(void **unused)
{
    (void)unused;
    static const tg_part lists[][3] = {
        { { TEXT("a"), TEXT("b:c") } },
        { { TEXT("a:b"), TEXT("c") } },
        { { TEXT(""), TEXT("a") }, { TEXT(""), TEXT("b:c") } },
        { { TEXT(""), TEXT("a:b") }, { TEXT(""), TEXT("c") } },
        { { TEXT(""), TEXT("ab") }, { TEXT(""), TEXT("c") } },
        { { TEXT(""), TEXT("a") }, { TEXT(""), TEXT("bc") } },
        { { TEXT(""), TEXT("") }, { TEXT(""), TEXT("abc") } },
        { { TEXT(""), TEXT("abc") }, { TEXT(""), TEXT("") } },
        { { TEXT(""), TEXT("a") }, { TEXT(""), TEXT("b") }, { TEXT(""), TEXT("c") } },
        { { TEXT("user"), TEXT("127.0.0.1") } }, /* a user of that name is not that address */
        { { TEXT("ip"), TEXT("127.0.0.1") } },
        { { TEXT(""), TEXT("127.0.0.1") } },
        { { TEXT("ip"), TEXT("127.0.0.1") }, { TEXT("user"), TEXT("x") } },
        { { TEXT("ip"), TEXT("127.0.0.1\4user\1x") } }, /* the very bytes of the one above, as a value */
    };
    static const size_t counts[COUNT(lists)] = { 1, 1, 2, 2, 2, 2, 2, 2, 3, 1, 1, 1, 2, 1 };
    tg_identity identities[COUNT(lists)];
    for (size_t i = 0; i < COUNT(lists); i++) {
        identities[i] = joined(lists[i], counts[i]);
        for (size_t j = 0; j < i; j++)
            if (equal(identities[i], identities[j]))
                fail_msg("lists %zu and %zu are one identity", j, i);
    }
}

static void
any_bytes_are_a_value_and_differ_from_any_others(void **unused)
{
    (void)unused;
    char *long_a = malloc(1 << 20), *long_b = malloc(1 << 20);
    assert_non_null(long_a);
    assert_non_null(long_b);
    memset(long_a, 'x', 1 << 20);
    memset(long_b, 'x', 1 << 20);
    long_b[(1 << 20) - 1] = 'y'; /* they differ in the last byte */
    const tg_text values[] = {
        TEXT(""), TEXT(" "), TEXT("\0"), TEXT("\0\0"), TEXT("\n"), TEXT("\xf0\x9f\x8c\x8a"), TEXT("\xff\xfe\x80"),
        { long_a, 64 }, { long_a, 65 }, { long_a, 66 }, { long_a, 10000 }, { long_a, 1 << 20 }, { long_b, 1 << 20 },
    };
    tg_identity identities[COUNT(values)];
    for (size_t i = 0; i < COUNT(values); i++) {
        const tg_part part = { TEXT("user"), values[i] };
        identities[i] = joined(&part, 1);
        for (size_t j = 0; j < i; j++)
            if (equal(identities[i], identities[j]))
                fail_msg("values %zu and %zu are one identity", j, i);
    }
    /* A megabyte takes no more room than 65 bytes. */
    assert_int_equal(identities[11].length, identities[8].length);
    free(long_a);
    free(long_b);
}

static void
a_hashed_value_is_not_the_value_of_those_bytes(void **unused)
{
    (void)unused;
    char value[100], digest[32];
    memset(value, 'v', sizeof value);
    const tg_part hashed = { TEXT("user"), { value, sizeof value } };
    tg_identity identity = joined(&hashed, 1);
    memcpy(digest, identity.bytes + identity.length - 32, 32);
    const tg_part forged = { TEXT("user"), { digest, sizeof digest } };
    assert_false(equal(identity, joined(&forged, 1)));
}

static void
eight_long_parts_still_fit(void **unused)
{
    (void)unused;
    char kind[TG_NAME_BYTES_MAX], value[64];
    tg_part parts[TG_PARTS_MAX];
    memset(kind, 'k', sizeof kind);
    memset(value, 'v', sizeof value);
    for (size_t i = 0; i < TG_PARTS_MAX; i++)
        parts[i] = (tg_part){ { kind, sizeof kind }, { value, sizeof value } };
    const tg_identity all = joined(parts, TG_PARTS_MAX);
    parts[TG_PARTS_MAX - 1].value.length--;
    assert_false(equal(all, joined(parts, TG_PARTS_MAX)));
    assert_false(equal(all, joined(parts, TG_PARTS_MAX - 1)));
    assert_int_equal(all.length, 33);
}

static void
parts_outside_the_bounds_are_refused(void **unused)
{
    (void)unused;
    char kind[TG_NAME_BYTES_MAX + 1] = { 'k' };
    tg_part parts[TG_PARTS_MAX + 1] = { { { kind, sizeof kind }, { "v", 1 } } };
    tg_identity identity;
    assert_int_equal(tg__identity_join(parts, 0, &identity, NULL), TG_E_ARG);
    assert_int_equal(tg__identity_join(parts, 1, &identity, NULL), TG_E_ARG);
    parts[0].kind.length--;
    assert_int_equal(tg__identity_join(parts, 1, &identity, NULL), TG_OK);
    assert_int_equal(tg__identity_join(parts, TG_PARTS_MAX + 1, &identity, NULL), TG_E_ARG);
}

static void
the_bytes_of_an_identity_never_change(void **unused)
{
    (void)unused;
    /* Tables outlive programs: another encoding would forget what everybody used. */
    const tg_part parts[] = { { TEXT("ip"), TEXT("192.0.2.1") }, { TEXT(""), TEXT("x") } };
    static const char bytes[] = "\2ip\11" "192.0.2.1" "\0\1x";
    const tg_identity identity = joined(parts, 2);
    assert_int_equal(identity.length, sizeof bytes - 1);
    assert_memory_equal(identity.bytes, bytes, sizeof bytes - 1);
    /* the example of docs/keys.md */
    const tg_part example[] = { { TEXT("ip"), TEXT("192.0.2.1") }, { TEXT("path"), TEXT("/login") } };
    static const char example_bytes[] = "\2ip\11" "192.0.2.1" "\4path\6/login";
    const tg_identity documented = joined(example, 2);
    assert_int_equal(documented.length, sizeof example_bytes - 1);
    assert_memory_equal(documented.bytes, example_bytes, sizeof example_bytes - 1);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_separator_inside_a_part_makes_no_two_identities_equal),
        cmocka_unit_test(any_bytes_are_a_value_and_differ_from_any_others),
        cmocka_unit_test(a_hashed_value_is_not_the_value_of_those_bytes),
        cmocka_unit_test(eight_long_parts_still_fit),
        cmocka_unit_test(parts_outside_the_bounds_are_refused),
        cmocka_unit_test(the_bytes_of_an_identity_never_change),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
