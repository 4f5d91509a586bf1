/* Any bytes as compiled rules, their digest made right so that what it covers is reached: read or refused, never more. */
#include "config/compiled.h"

#include <stdlib.h>

enum { DIGEST_AT = 28, HEAD_BYTES = 44 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const tg_request request = { .method = { "GET", 3 }, .path = { "/api/x/edit?q", 13 } };
    tg_config *config = NULL;
    tg_error error = { 0 };
    char *bytes = malloc(size ? size : 1);
    if (!bytes)
        return 0;
    memcpy(bytes, data, size);
    if (size >= HEAD_BYTES) {
        const tg_text rest[] = { { bytes, DIGEST_AT }, { bytes + HEAD_BYTES, size - HEAD_BYTES } };
        tg__digest(rest, 2, (uint8_t *)bytes + DIGEST_AT, HEAD_BYTES - DIGEST_AT);
    }
    const tg_status status = tg__config_parse_compiled((tg_text){ bytes, size }, "rules.compiled", &config, &error);
    if (status == TG_OK) {
        size_t found[TG_LIMITERS_MAX];
        if (tg__config_match(config, &request, found) > TG_LIMITERS_MAX)
            abort();
        tg__config_close(config);
    } else if (status != TG_E_CONFIG || !error.message[0]) {
        abort();
    }
    free(bytes);
    return 0;
}
