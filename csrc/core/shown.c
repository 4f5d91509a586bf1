/* An identity as people may see it: in terminals, logs and answers to "why was I refused?".
 * Must not enter: a secret. What is not known to be harmless is hidden. */
#include "core/core.h"

#include <stdio.h>

enum { HASHED = 255, DIGEST_BYTES = 32, VALUE_SHOWN_MAX = 72 };

typedef struct text_out {
    char *text;
    size_t size, used;
} text_out;

static void __attribute__((format(printf, 2, 3)))
put(text_out *out, const char *format, ...)
{
    if (out->used >= out->size)
        return;
    va_list arguments;
    va_start(arguments, format);
    const int written = vsnprintf(out->text + out->used, out->size - out->used, format, arguments);
    va_end(arguments);
    out->used += written > 0 ? (size_t)written : 0;
}

/* A header, a cookie, a form's field, a raw part of a script's own: any of them may let somebody in. */
static bool
harmless(tg_text kind)
{
    static const char *const kinds[] = { "ip", "user", "route", "path", "method", "host" };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (tg__text_is(kind, kinds[i]))
            return true;
    return false;
}

static void
put_part(text_out *out, tg_text kind, tg_text value, bool hashed, unsigned private_kinds)
{
    char shown[VALUE_SHOWN_MAX + 1];
    if (tg__text_is(kind, "?")) {
        put(out, "everybody without %s", tg__text_show(value, shown, sizeof shown));
        return;
    }
    if (kind.length)
        put(out, "%s ", tg__text_show(kind, shown, sizeof shown));
    if (hashed) {
        put(out, "(over 64 bytes, #%02x%02x%02x%02x)", (unsigned char)value.data[0], (unsigned char)value.data[1],
            (unsigned char)value.data[2], (unsigned char)value.data[3]);
    } else if (harmless(kind) && !(tg__private_bit(kind) & private_kinds)) {
        put(out, "%s", value.length ? tg__text_show(value, shown, sizeof shown) : "\"\"");
    } else {
        uint8_t digest[DIGEST_BYTES];
        tg__digest(&value, 1, digest, sizeof digest);
        put(out, "(hidden, %zu bytes, #%02x%02x%02x%02x)", value.length, digest[0], digest[1], digest[2], digest[3]);
    }
}

/* The way back from identity/join.c. */
void
tg__identity_show(const tg_identity *identity, unsigned private_kinds, char *text, size_t size)
{
    text_out out = { text, size, 0 };
    const char *at = (const char *)identity->bytes, *const end = at + identity->length;
    if (size)
        text[0] = '\0';
    if (tg__digest_init(NULL) != TG_OK)
        return;
    if (identity->length == 1 + DIGEST_BYTES && identity->bytes[0] == HASHED) {
        put_part(&out, (tg_text){ "joint", 5 }, (tg_text){ at + 1, DIGEST_BYTES }, true, 0);
        return;
    }
    while (at < end) {
        const tg_text kind = { at + 1, (unsigned char)*at };
        if (kind.length + 2 > (size_t)(end - at))
            return;
        at += 1 + kind.length;
        const bool hashed = (unsigned char)*at == HASHED;
        const tg_text value = { at + 1, hashed ? DIGEST_BYTES : (unsigned char)*at };
        if (value.length + 1 > (size_t)(end - at))
            return;
        at += 1 + value.length;
        put_part(&out, kind, value, hashed, private_kinds);
        if (at < end)
            put(&out, " + ");
    }
}

void
tg_identity_show(const tg_identity *identity, char *text, size_t size)
{
    tg__identity_show(identity, 0, text, size);
}
