/* Keys: tg1:<fingerprint>:{<identity>}:<namespace>:<name>:<algorithm>:<period_us>. The braces hold one dimension, so
 * that all rules on it lie in one slot of a cluster. docs/redis.md draws it. Must not enter: sockets, replies. */
#include "stores/redis/redis.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- what a rule's keys end with ---- */

#define BUCKETS 256

typedef struct tg_named {
    struct tg_named *next;
    uint8_t scope[16];
    uint16_t length;
    char suffix[];
} tg_named;

struct tg_redis_names {
    pthread_mutex_t lock; /* of those who add; who looks takes none, for nothing is ever changed or taken out */
    _Atomic(tg_named *) buckets[BUCKETS];
};

tg_redis_names *
tg__redis_names_open(void)
{
    tg_redis_names *names = calloc(1, sizeof *names);
    if (names)
        pthread_mutex_init(&names->lock, NULL);
    return names;
}

void
tg__redis_names_close(tg_redis_names *names)
{
    if (!names)
        return;
    for (size_t i = 0; i < BUCKETS; i++)
        for (tg_named *named = atomic_load(&names->buckets[i]), *next; named; named = next) {
            next = named->next;
            free(named);
        }
    pthread_mutex_destroy(&names->lock);
    free(names);
}

static const tg_named *
find(const tg_redis_names *names, const uint8_t scope[16])
{
    for (const tg_named *named = atomic_load_explicit(&names->buckets[scope[0]], memory_order_acquire); named;
         named = named->next)
        if (memcmp(named->scope, scope, sizeof named->scope) == 0)
            return named;
    return NULL;
}

static bool
plain(unsigned char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '-' || c == '_' ||
           c == '.';
}

/* %XX for all that is not plain, so that a ':' in a name is never one of ours. */
static size_t
escape(char *to, const char *name)
{
    static const char digits[] = "0123456789abcdef";
    char *at = to;
    for (; *name; name++) {
        const unsigned char c = (unsigned char)*name;
        if (plain(c)) {
            *at++ = *name;
            continue;
        }
        *at++ = '%';
        *at++ = digits[c >> 4];
        *at++ = digits[c & 15];
    }
    return (size_t)(at - to);
}

tg_status
tg__redis_names_add(tg_redis_names *names, const tg_rule *rule, const char *space, const char *name, tg_error *error)
{
    char suffix[TG__REDIS_SUFFIX_MAX];
    size_t length = 0;
    if (3 * (strlen(space) + strlen(name)) + 48 > sizeof suffix)
        return tg__error(error, TG_E_ARG, "redis: a rule's namespace and name are too long for a key");
    suffix[length++] = ':';
    length += escape(suffix + length, space);
    suffix[length++] = ':';
    length += escape(suffix + length, name);
    length += (size_t)snprintf(suffix + length, sizeof suffix - length, ":%s:%" PRIu64,
                               tg_algorithm_name((tg_algorithm)rule->algorithm), rule->period_us);
    tg_status status = TG_OK;
    pthread_mutex_lock(&names->lock);
    if (!find(names, rule->scope)) {
        tg_named *named = malloc(sizeof *named + length);
        if (named) {
            memcpy(named->scope, rule->scope, sizeof named->scope);
            named->length = (uint16_t)length;
            memcpy(named->suffix, suffix, length);
            _Atomic(tg_named *) *bucket = &names->buckets[rule->scope[0]];
            named->next = atomic_load_explicit(bucket, memory_order_relaxed);
            atomic_store_explicit(bucket, named, memory_order_release);
        } else {
            status = tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *named + length);
        }
    }
    pthread_mutex_unlock(&names->lock);
    return status;
}

static size_t
put_hex(char *to, const uint8_t *bytes, size_t count)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < count; i++) {
        *to++ = digits[bytes[i] >> 4];
        *to++ = digits[bytes[i] & 15];
    }
    return 2 * count;
}

size_t
tg__redis_names_suffix(const tg_redis_names *names, const tg_rule *rule, char suffix[TG__REDIS_SUFFIX_MAX])
{
    const tg_named *named = find(names, rule->scope);
    if (named) {
        memcpy(suffix, named->suffix, named->length);
        return named->length;
    }
    suffix[0] = ':';
    suffix[1] = '#';
    return 2 + put_hex(suffix + 2, rule->scope, sizeof rule->scope);
}

/* ---- who is counted ---- */

void
tg__redis_keyring_init(tg_redis_keyring *keyring, tg_text secret, bool manual, unsigned private_kinds)
{
    keyring->private_kinds = private_kinds;
    const tg_text key[] = { tg_text_of("tidegate key"), secret };
    tg__digest(key, 2, keyring->secret, sizeof keyring->secret);
    /* Four bytes: enough to tell two secrets apart by accident, too few to test guesses against. */
    const tg_text print[] = { tg_text_of("tidegate fingerprint"),
                              { (const char *)keyring->secret, sizeof keyring->secret } };
    uint8_t fingerprint[16];
    tg__digest(print, 2, fingerprint, sizeof fingerprint);
    size_t length = (size_t)snprintf(keyring->prefix, sizeof keyring->prefix, "%s", manual ? "tg1m:" : "tg1:");
    length += put_hex(keyring->prefix + length, fingerprint, 4);
    memcpy(keyring->prefix + length, ":{", 3);
}

/* What may stand between the braces as it is: none of it can end them or be taken for one of our own marks. A table: it is
 * asked of every character of every identity. */
static bool
readable(tg_text text)
{
    static const bool plainly[256] = {
        ['0' ... '9'] = true, ['A' ... 'Z'] = true, ['a' ... 'z'] = true, ['-'] = true, ['_'] = true, ['.'] = true,
        [':'] = true, ['/'] = true, ['@'] = true, ['+'] = true, ['~'] = true,
    };
    for (size_t i = 0; i < text.length; i++)
        if (!plainly[(unsigned char)text.data[i]])
            return false;
    return true;
}

/* Kinds whose values are credentials or what a person typed: never readable in a shared database. */
static bool
private_kind(tg_text kind)
{
    static const tg_text kinds[] = { { "header:", 7 }, { "cookie:", 7 }, { "query:", 6 }, { "form:", 5 }, { "json:", 5 } };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kind.length >= kinds[i].length && memcmp(kind.data, kinds[i].data, kinds[i].length) == 0)
            return true;
    return tg__text_is(kind, "api_key") || tg__text_is(kind, "fingerprint");
}

/* Keyed by the secret as its first piece; BLAKE2b takes no extension of what it hashed. */
static size_t
put_hashed(char *to, const tg_redis_keyring *keyring, const char *what, tg_text a, tg_text b)
{
    const tg_text pieces[] = { { (const char *)keyring->secret, sizeof keyring->secret }, tg_text_of(what), a, b };
    uint8_t hash[16];
    tg__digest(pieces, 4, hash, sizeof hash);
    *to = '#';
    return 1 + put_hex(to + 1, hash, sizeof hash);
}

enum { LONG_VALUE = 255, LONG_VALUE_BYTES = 32 }; /* see identity.h: a digest stands for a long value */

/* kind=value,kind=value; a raw part has no kind= before it; '#' begins what is hashed, and stands alone for nothing. */
static size_t
put_part(char *to, const tg_redis_keyring *keyring, tg_text kind, tg_text value, bool digest)
{
    size_t length = 0;
    if (kind.length) {
        memcpy(to, kind.data, kind.length);
        length = kind.length;
        to[length++] = '=';
    }
    const bool private = kind.length && (private_kind(kind) || (tg__private_bit(kind) & keyring->private_kinds));
    if (digest || private || !readable(value))
        return length + put_hashed(to + length, keyring, digest ? "long" : "value", kind, value);
    if (value.length == 0)
        to[length++] = '#';
    else
        memcpy(to + length, value.data, value.length);
    return length + value.length;
}

size_t
tg__redis_identity_text(const tg_redis_keyring *keyring, const tg_identity *identity, char text[TG__REDIS_IDENTITY_MAX])
{
    const uint8_t *at = identity->bytes, *const end = at + identity->length;
    const tg_text whole = { (const char *)at, identity->length };
    size_t length = 0;
    for (unsigned part = 0; at < end && part < TG_PARTS_MAX; part++) {
        const size_t kind_length = *at++;
        if (kind_length > TG_NAME_BYTES_MAX || kind_length + 1 > (size_t)(end - at))
            break; /* a digest of the whole, or no identity that we know how to read */
        const tg_text kind = { (const char *)at, kind_length };
        at += kind_length;
        const uint8_t value_mark = *at++;
        const size_t value_length = value_mark == LONG_VALUE ? LONG_VALUE_BYTES : value_mark;
        if (value_length > (size_t)(end - at) || !readable(kind))
            break;
        const tg_text value = { (const char *)at, value_length };
        at += value_length;
        if (length)
            text[length++] = ',';
        length += put_part(text + length, keyring, kind, value, value_mark == LONG_VALUE);
        if (at == end)
            return length;
    }
    text[0] = '#';
    return 1 + put_hashed(text + 1, keyring, "identity", whole, (tg_text){ NULL, 0 });
}
