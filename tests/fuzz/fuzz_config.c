/* Any bytes as a rules file: read or refused with a place, and a request matched against what was read. */
#include "config/config.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char form[] = "policies:\n- {name: a, rules: 5/minute, match: {path: \"";
    static const tg_request requests[] = {
        { .method = { "GET", 3 }, .path = { "/api/x/edit?q", 13 }, .host = { "a.shop.example:80", 17 } },
        { .method = { "HEAD", 4 }, .path = { "", 0 }, .host = { "", 0 } },
    };
    tg_config *config = NULL;
    tg_error error = { 0 };
    const tg_text text = { (const char *)data, size };
    tg_status status = tg__config_parse(text, "rules.yaml", &config, &error);
    if (status == TG_OK) {
        size_t found[TG_LIMITERS_MAX];
        for (size_t i = 0; i < 2; i++)
            if (tg__config_match(config, &requests[i], found) > TG_LIMITERS_MAX)
                abort();
        tg__config_close(config);
    } else if (status != TG_E_CONFIG || error.line == 0 || error.column == 0 || error.line > size + 1) {
        abort();
    }
    /* The same bytes as a pattern within a good file, which they otherwise rarely reach. */
    if (size > 2000 || memchr(data, '"', size))
        return 0;
    char yaml[2200];
    char *at = stpcpy(yaml, form);
    memcpy(at, data, size);
    at = stpcpy(at + size, "\"}}\n");
    if (tg__config_parse((tg_text){ yaml, (size_t)(at - yaml) }, "rules.yaml", &config, NULL) == TG_OK) {
        size_t found[TG_LIMITERS_MAX];
        tg__config_match(config, &requests[0], found);
        tg__config_close(config);
    }
    return 0;
}
