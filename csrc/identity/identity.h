/* Who is counted: client addresses, and how parts become one identity.
 * Must not enter: stores, rules, files. */
#ifndef TG_IDENTITY_H
#define TG_IDENTITY_H

#include "base/base.h"

/* Joins parts length-prefixed with their kinds: for each part [kind length][kind][0..64: value length, 255: hashed]
 * [value or its 32-byte BLAKE2b-256]; a joint identity over TG_IDENTITY_BYTES_MAX becomes [255][BLAKE2b-256 of it].
 * TG_E_ARG: part_count 0 or over TG_PARTS_MAX, a kind over TG_NAME_BYTES_MAX. Empty values are values. */
tg_status tg__identity_join(const tg_part *parts, size_t part_count, tg_identity *identity, tg_error *error);

#define TG_VALUE_AS_IT_IS_MAX 64 /* a longer value is hashed: no client decides how much we keep */

/* Puts one part behind those before it, up to `at`. Returns where it ends, or NULL where it does not simply fit: then all
 * parts together are for tg__identity_join. */
static inline uint8_t *
tg__identity_put(tg_identity *identity, uint8_t *at, tg_text kind, tg_text value)
{
    const size_t room = (size_t)(identity->bytes + TG_IDENTITY_BYTES_MAX - at);
    if (kind.length > TG_NAME_BYTES_MAX || value.length > TG_VALUE_AS_IT_IS_MAX || room < 2 + kind.length + value.length)
        return NULL;
    *at++ = (uint8_t)kind.length;
    if (kind.length)
        memcpy(at, kind.data, kind.length);
    at += kind.length;
    *at++ = (uint8_t)value.length;
    if (value.length)
        memcpy(at, value.data, value.length);
    return at + value.length;
}

/* Whether a header's name is this one: ASCII letters in any case, '_' equals '-' (RFC 3875 4.1.18 writes one for the other). */
bool tg__header_is(tg_text name, const char *wanted);

/* ---- `by`: which parts of a request make an identity ---- */

typedef struct tg_by tg_by; /* one dimension: alternatives ("|") of joined ("+") kinds, parsed */

/* "ip", "ip+route", "user|ip", "header:X-Api-Key". TG_E_CONFIG: unknown kind (lists those known), an empty word, too many
 * parts. error->offset marks the word. Allocates. */
tg_status tg__by_parse(tg_text text, tg_by **by, tg_error *error);
void tg__by_close(tg_by *by);

/* The identity of a request, or of values given by kind. The first alternative whose kinds are all present is taken.
 * TG_E_UNSUPPORTED, without a word in `error`: a part stands in the body, which is yet to be read.
 * With none present TG_E_IDENTITY, and `missing` names the first kind wanting of the last alternative.
 * A shared stand-in (missing_identity: shared) is the caller's: tg__by_shared. */
tg_status tg__by_of_request(const tg_by *by, const tg_client *client, const tg_request *request, tg_identity *identity,
                            char missing[TG_NAME_BYTES_MAX + 1], tg_error *error);
tg_status tg__by_of_values(const tg_by *by, const tg_client *client, const tg_part *values, size_t value_count,
                           tg_identity *identity, char missing[TG_NAME_BYTES_MAX + 1], tg_error *error);
/* The one identity that stands for everybody whose part is missing. */
void tg__by_shared(const tg_by *by, tg_identity *identity);
/* Whether any alternative names this kind (exact spelling, or "header:" for any header). */
bool tg__by_names(const tg_by *by, const char *kind);
/* What is looked at besides the peer, the user, the route and the method: TG_READ_ bits. */
unsigned tg__by_reads(const tg_by *by, const tg_client *client);
/* A kind that a face with these TG_FACE_ bits cannot tell, where no alternative does without; else NULL. */
const char *tg__by_unknown(const tg_by *by, unsigned faces);

#endif
