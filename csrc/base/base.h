/* The lowest room: what every other room may use. Errors, texts, digests, the notice queue.
 * Must not enter: anything that knows a rule, a store, a request or a file format. */
#ifndef TG_BASE_H
#define TG_BASE_H

#include "tidegate.h"

#include <stdarg.h>
#include <string.h>

typedef unsigned __int128 tg_u128;

/* Runs once in nearly every request. The linker lays these side by side: they then share cache lines at their ends, and a few
 * pages instead of one each. */
#define TG_EACH_REQUEST __attribute__((hot))

/* ---- errors */

/* Fills `error` (may be NULL) and returns `status`, so that a failing line reads `return tg__error(...)`. */
tg_status tg__error(tg_error *error, tg_status status, const char *format, ...) __attribute__((format(printf, 3, 4), cold));
/* The same with an errno; appends ": " and its text. */
tg_status tg__error_system(tg_error *error, tg_status status, int system_error, const char *format, ...)
    __attribute__((format(printf, 4, 5), cold));

/* ---- texts */

static inline bool
tg__text_is(tg_text text, const char *word)
{
    const size_t length = strlen(word);
    return text.length == length && (length == 0 || memcmp(text.data, word, length) == 0);
}
bool tg__text_is_nocase(tg_text text, const char *word); /* ASCII letters only, no locale */
tg_text tg__text_trim(tg_text text);                     /* spaces and tabs at both ends */
/* For messages: at most `size` - 1 bytes, control and non-ASCII bytes as '?', "..." where cut. Returns `buffer`. */
const char *tg__text_show(tg_text text, char *buffer, size_t size);
/* A whole number in decimal digits alone. false: empty, another character, or above `max`. */
bool tg__text_number(tg_text text, uint64_t max, uint64_t *number);

enum { TG__DIGITS_MAX = 20 }; /* of a uint64_t */

/* Decimal digits, backwards from `end`; returns where the number begins. */
static inline char *
tg__digits(char *end, uint64_t number)
{
    do {
        *--end = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    return end;
}

/* The value of a hexadecimal digit in either case; -1: it is none. */
static inline int
tg__hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The TG_PRIVATE_ bit of a kind; 0: it has none. */
static inline unsigned
tg__private_bit(tg_text kind)
{
#define TG_PRIVATE_BIT(name, bit, word)                                                                                \
    if (tg__text_is(kind, word))                                                                                       \
        return bit;
    TG_PRIVATE_KINDS(TG_PRIVATE_BIT)
#undef TG_PRIVATE_BIT
    return 0;
}

/* CLOCK_MONOTONIC: for deadlines. A store's own clock may be manual, or be what does not answer. */
uint64_t tg__monotonic_us(void);

/* ---- digests (libsodium) */

/* Must succeed once before any other digest call; thread-safe, repeatable. */
tg_status tg__digest_init(tg_error *error);
/* Unkeyed BLAKE2b of several pieces, each length-prefixed: the pieces cannot be shifted against each other. */
void tg__digest(const tg_text *pieces, size_t piece_count, uint8_t *out, size_t out_bytes);
/* SipHash-2-4-128 under a key of this process: whom it is not told cannot make two texts meet. */
void tg__keyed_hash(const uint8_t key[16], const void *data, size_t length, uint8_t hash[16]);
/* Random bytes from the system. */
void tg__random(void *bytes, size_t count);

/* ---- notices */

/* Queues one for the face to log. Thread-safe, never blocks on I/O, never fails: past 64 the oldest is dropped and the
 * number of dropped ones is added to the next. The caller sees to it that it speaks once per occasion. */
void tg__notice(const char *code, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
