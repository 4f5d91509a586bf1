/* Overrides and pauses as this process has last seen them on the server: lines "until kind =namespace =policy identity
 * =rules =shown". Two copies: judges read the one, the other takes what is new.
 * Must not enter: sockets, what an override does to a decision. */
#include "stores/redis/keep.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct sheet {
    _Atomic unsigned readers;
    size_t count;
    uint8_t secret[32]; /* identities are told apart under it */
    tg_override overrides[TG__OVERRIDES_MAX];
} sheet;

struct tg_orders {
    _Atomic uint64_t standing;
    _Atomic unsigned current;
    sheet sheets[2];
};

static const uint8_t everybody[16];

tg_orders *
tg__orders_open(void)
{
    return calloc(1, sizeof(tg_orders));
}

void
tg__orders_close(tg_orders *orders)
{
    if (orders)
        for (unsigned i = 0; i < 2; i++)
            explicit_bzero(orders->sheets[i].secret, sizeof orders->sheets[i].secret);
    free(orders);
}

void
tg__orders_after_fork(tg_orders *orders)
{
    for (unsigned i = 0; i < 2; i++)
        atomic_store(&orders->sheets[i].readers, 0); /* threads that are not here */
}

const _Atomic uint64_t *
tg__orders_standing(const tg_orders *orders)
{
    return &orders->standing;
}

/* ---- words ---- */

size_t
tg__escape(char *to, const char *text)
{
    static const char digits[] = "0123456789abcdef";
    char *at = to;
    *at++ = '=';
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if ((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '-' || c == '_' || c == '.' ||
            c == '/') {
            *at++ = *text;
            continue;
        }
        *at++ = '%';
        *at++ = digits[c >> 4];
        *at++ = digits[c & 15];
    }
    return (size_t)(at - to);
}

bool
tg__unescape(tg_text text, char *to, size_t size)
{
    if (text.length == 0 || text.data[0] != '=')
        return false;
    size_t length = 0;
    for (size_t i = 1; i < text.length; i++) {
        int c = (unsigned char)text.data[i];
        if (c == '%') {
            const int high = i + 2 < text.length ? tg__hex_value(text.data[i + 1]) : -1;
            const int low = high >= 0 ? tg__hex_value(text.data[i + 2]) : -1;
            c = low >= 0 ? high * 16 + low : 0;
            i += 2;
        }
        if (c == 0 || length + 1 >= size)
            return false;
        to[length++] = (char)c;
    }
    to[length] = '\0';
    return true;
}

/* Who an override is for, so that nobody who reads the database finds out by trying names. */
static void
veil(const uint8_t secret[32], const uint8_t identity[16], uint8_t veiled[16])
{
    if (memcmp(identity, everybody, sizeof everybody) == 0) {
        memset(veiled, 0, 16);
        return;
    }
    const tg_text pieces[] = { { (const char *)secret, 32 }, tg_text_of("override"), { (const char *)identity, 16 } };
    tg__digest(pieces, 3, veiled, 16);
}

void
tg__order_words(const tg_override *override, const tg_redis_keyring *keyring, char place[TG__ORDER_BYTES_MAX],
                char says[TG__ORDER_BYTES_MAX])
{
    uint8_t veiled[16];
    size_t length = (size_t)sprintf(place, "%d ", (int)override->kind);
    length += tg__escape(place + length, override->space);
    place[length++] = ' ';
    length += tg__escape(place + length, override->policy);
    place[length++] = ' ';
    veil(keyring->secret, override->identity, veiled);
    for (size_t i = 0; i < sizeof veiled; i++)
        length += (size_t)sprintf(place + length, "%02x", veiled[i]);
    length = tg__escape(says, override->rules);
    says[length++] = ' ';
    length += tg__escape(says + length, override->shown);
    says[length] = '\0';
}

/* ---- seeing ---- */

static tg_text
next_word(const char **at, const char *end)
{
    const char *from = *at;
    while (*at < end && **at != ' ')
        ++*at;
    const tg_text word = { from, (size_t)(*at - from) };
    if (*at < end)
        ++*at;
    return word;
}

static bool
read_line(const char *at, const char *end, tg_override *one)
{
    uint64_t kind;
    *one = (tg_override){ .until_us = 0 };
    if (!tg__text_number(next_word(&at, end), UINT64_C(1) << 53, &one->until_us) ||
        !tg__text_number(next_word(&at, end), TG_OVERRIDE_PAUSE, &kind) || kind < TG_OVERRIDE_RULES ||
        !tg__unescape(next_word(&at, end), one->space, sizeof one->space) ||
        !tg__unescape(next_word(&at, end), one->policy, sizeof one->policy))
        return false;
    one->kind = (tg_override_kind)kind;
    const tg_text identity = next_word(&at, end);
    if (identity.length != 2 * sizeof one->identity)
        return false;
    for (size_t i = 0; i < sizeof one->identity; i++) {
        const int high = tg__hex_value(identity.data[2 * i]), low = tg__hex_value(identity.data[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        one->identity[i] = (uint8_t)(high * 16 + low);
    }
    return tg__unescape(next_word(&at, end), one->rules, sizeof one->rules) &&
           tg__unescape(next_word(&at, end), one->shown, sizeof one->shown);
}

bool
tg__orders_see(tg_orders *orders, tg_text text, const tg_redis_keyring *keyring)
{
    const unsigned other = 1 - atomic_load(&orders->current);
    sheet *to = &orders->sheets[other];
    if (atomic_load(&to->readers) != 0)
        return false;
    to->count = 0;
    memcpy(to->secret, keyring->secret, sizeof to->secret);
    for (const char *at = text.data, *end = text.data + text.length; at && at < end && to->count < TG__OVERRIDES_MAX;) {
        const char *line_end = memchr(at, '\n', (size_t)(end - at));
        if (!line_end)
            break;
        to->count += read_line(at, line_end, &to->overrides[to->count]);
        at = line_end + 1;
    }
    const uint64_t standing = to->count;
    atomic_store(&orders->current, other);
    atomic_store(&orders->standing, standing);
    return true;
}

void
tg__orders_list(tg_orders *orders, uint64_t now_us, const char *space, const char *policy, const uint8_t identity[16],
                tg_override *overrides, size_t room, size_t *count)
{
    unsigned index;
    *count = 0;
    for (;;) { /* the sheet that is current is not written; one that was current a moment ago might be */
        index = atomic_load(&orders->current);
        atomic_fetch_add(&orders->sheets[index].readers, 1);
        if (atomic_load(&orders->current) == index)
            break;
        atomic_fetch_sub(&orders->sheets[index].readers, 1);
    }
    const sheet *from = &orders->sheets[index];
    uint8_t veiled[16];
    if (identity)
        veil(from->secret, identity, veiled);
    for (size_t i = 0; i < from->count; i++) {
        const tg_override *one = &from->overrides[i];
        if (one->until_us <= now_us || (policy && (strcmp(one->policy, policy) != 0 || strcmp(one->space, space) != 0)))
            continue;
        const bool is_for_all = memcmp(one->identity, everybody, sizeof everybody) == 0;
        if (identity && !is_for_all && memcmp(one->identity, veiled, sizeof veiled) != 0)
            continue;
        if (*count < room) {
            overrides[*count] = *one;
            if (identity && !is_for_all)
                memcpy(overrides[*count].identity, identity, 16);
        }
        ++*count;
    }
    atomic_fetch_sub(&orders->sheets[index].readers, 1);
}
