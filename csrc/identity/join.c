/* Parts to one identity. Length-prefixed with their kinds, so that no content of one part can look like another's.
 * Must not enter: where parts come from. */
#include "identity/identity.h"

enum {
    HASHED = 255,         /* no length: neither a kind's nor a value's */
    DIGEST_BYTES = 32,
    JOINT_BYTES_MAX = TG_PARTS_MAX * (1 + TG_NAME_BYTES_MAX + 1 + TG_VALUE_AS_IT_IS_MAX)
};

static uint8_t *
put_bytes(uint8_t *at, tg_text text)
{
    if (text.length)
        memcpy(at, text.data, text.length);
    return at + text.length;
}

static tg_status
put_digest(uint8_t **at, tg_text text, tg_error *error)
{
    const tg_status status = tg__digest_init(error); /* a load and a compare once it has succeeded */
    if (status != TG_OK)
        return status;
    *(*at)++ = HASHED;
    tg__digest(&text, 1, *at, DIGEST_BYTES);
    *at += DIGEST_BYTES;
    return TG_OK;
}

/* Whatever does not simply fit: values to be hashed, joint identities over the bound, and what is wrong. */
static __attribute__((noinline, cold)) tg_status
join_long(const tg_part *parts, size_t part_count, tg_identity *identity, tg_error *error)
{
    uint8_t joint[JOINT_BYTES_MAX], *at = joint;
    if (part_count == 0 || part_count > TG_PARTS_MAX)
        return tg__error(error, TG_E_ARG, "an identity has 1 to %d parts, not %zu", TG_PARTS_MAX, part_count);
    for (size_t i = 0; i < part_count; i++) {
        const tg_text kind = parts[i].kind, value = parts[i].value;
        if (kind.length > TG_NAME_BYTES_MAX)
            return tg__error(error, TG_E_ARG, "part %zu: a kind has at most %d bytes, not %zu", i + 1,
                             TG_NAME_BYTES_MAX, kind.length);
        *at++ = (uint8_t)kind.length;
        at = put_bytes(at, kind);
        if (value.length <= TG_VALUE_AS_IT_IS_MAX) {
            *at++ = (uint8_t)value.length;
            at = put_bytes(at, value);
        } else {
            const tg_status status = put_digest(&at, value, error);
            if (status != TG_OK)
                return status;
        }
    }
    const size_t length = (size_t)(at - joint);
    if (length <= TG_IDENTITY_BYTES_MAX) {
        memcpy(identity->bytes, joint, length);
        identity->length = (uint16_t)length;
        return TG_OK;
    }
    at = identity->bytes;
    const tg_status status = put_digest(&at, (tg_text){ (const char *)joint, length }, error);
    identity->length = (uint16_t)(at - identity->bytes);
    return status;
}

tg_status
tg__identity_join(const tg_part *parts, size_t part_count, tg_identity *identity, tg_error *error)
{
    uint8_t *at = identity->bytes;
    if (part_count == 0 || part_count > TG_PARTS_MAX)
        return join_long(parts, part_count, identity, error);
    for (size_t i = 0; i < part_count; i++) {
        at = tg__identity_put(identity, at, parts[i].kind, parts[i].value);
        if (!at)
            return join_long(parts, part_count, identity, error);
    }
    identity->length = (uint16_t)(at - identity->bytes);
    return TG_OK;
}
