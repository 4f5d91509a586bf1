/* Parts to one identity. Length-prefixed with their kinds, so that no content of one part can look like another's.
 * Must not enter: where parts come from. */
#include "identity/identity.h"

enum {
    VALUE_BYTES_MAX = 64, /* longer values are hashed: no client decides how much we keep */
    HASHED = 255,         /* no length: neither a kind's nor a value's */
    DIGEST_BYTES = 32,
    JOINT_BYTES_MAX = TG_PARTS_MAX * (1 + TG_NAME_BYTES_MAX + 1 + VALUE_BYTES_MAX)
};

static uint8_t *
put_bytes(uint8_t *at, tg_text text)
{
    if (text.length)
        memcpy(at, text.data, text.length);
    return at + text.length;
}

static inline uint8_t *
put_part(uint8_t *at, tg_text kind, tg_text value)
{
    *at++ = (uint8_t)kind.length;
    at = put_bytes(at, kind);
    *at++ = (uint8_t)value.length;
    return put_bytes(at, value);
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
        if (value.length <= VALUE_BYTES_MAX) {
            at = put_part(at, kind, value);
        } else {
            *at++ = (uint8_t)kind.length;
            at = put_bytes(at, kind);
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
    for (size_t i = 0; i < part_count; i++) {
        const tg_text kind = parts[i].kind, value = parts[i].value;
        const size_t room = (size_t)(identity->bytes + TG_IDENTITY_BYTES_MAX - at);
        if (part_count > TG_PARTS_MAX || kind.length > TG_NAME_BYTES_MAX || value.length > VALUE_BYTES_MAX ||
            room < 2 + kind.length + value.length)
            return join_long(parts, part_count, identity, error);
        at = put_part(at, kind, value);
    }
    if (part_count == 0)
        return join_long(parts, part_count, identity, error);
    identity->length = (uint16_t)(at - identity->bytes);
    return TG_OK;
}

void
tg__identity_of_address(tg_text address, tg_identity *identity)
{
    const uint8_t *const end = put_part(identity->bytes, (tg_text){ "ip", 2 }, address);
    identity->length = (uint16_t)(end - identity->bytes);
}
