/* Digests, all of them libsodium's. */
#include "base/base.h"

#include <assert.h>
#include <sodium.h>

tg_status
tg__digest_init(tg_error *error)
{
    if (sodium_init() < 0)
        return tg__error(error, TG_E_SYSTEM, "libsodium did not start: no source of random bytes");
    return TG_OK;
}

void
tg__digest(const tg_text *pieces, size_t piece_count, uint8_t *out, size_t out_bytes)
{
    assert(out_bytes >= 16 && out_bytes <= crypto_generichash_BYTES_MAX);
    crypto_generichash_state state;
    crypto_generichash_init(&state, NULL, 0, out_bytes);
    for (size_t i = 0; i < piece_count; i++) {
        const uint64_t length = pieces[i].length;
        uint8_t prefix[8];
        for (size_t byte = 0; byte < sizeof prefix; byte++)
            prefix[byte] = (uint8_t)(length >> (8 * byte));
        crypto_generichash_update(&state, prefix, sizeof prefix);
        crypto_generichash_update(&state, (const unsigned char *)pieces[i].data, length);
    }
    crypto_generichash_final(&state, out, out_bytes);
}

void
tg__keyed_hash(const uint8_t key[16], const void *data, size_t length, uint8_t hash[16])
{
    crypto_shorthash_siphashx24(hash, data, length, key);
}

void
tg__random(void *bytes, size_t count)
{
    randombytes_buf(bytes, count);
}
