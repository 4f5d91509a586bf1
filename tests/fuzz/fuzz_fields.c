/* Any bytes as a query, a cookie, a form in both of its types, JSON, and the headers around them: whatever is found is
 * bounded and not empty, and found again alike. */
#include "identity/fields.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check(bool found, tg_text value)
{
    if (found && (value.length == 0 || value.length > TG_VALUE_BYTES_MAX))
        abort();
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const types[] = { "application/x-www-form-urlencoded", "multipart/form-data; boundary=X",
                                         "application/json" };
    char room[TG_VALUE_BYTES_MAX], again[TG_VALUE_BYTES_MAX];
    uint8_t digest[TG_DIGEST_BYTES];
    tg_text value, second;
    char *copy = malloc(size ? size : 1); /* exactly as long: a byte too far is seen */
    if (!copy)
        return 0;
    memcpy(copy, data, size);
    const tg_text bytes = { copy, size }, name = { "a", 1 };
    const tg_header cookie = { { "Cookie", 6 }, bytes }, type = { { "Content-Type", 12 }, bytes },
                    key = { { "Authorization", 13 }, bytes };
    check(tg__query_value(&(tg_request){ .query = bytes }, name, room, &value), value);
    check(tg__query_value(&(tg_request){ .path = bytes }, name, room, &value), value);
    check(tg__cookie_value(&(tg_request){ .headers = &cookie, .header_count = 1 }, name, &value), value);
    tg__api_key(&(tg_request){ .headers = &key, .header_count = 1 }, digest);
    check(tg__form_value(&(tg_request){ .headers = &type, .header_count = 1, .body = bytes, .body_read = true }, name,
                         room, &value),
          value);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const tg_header declared = { { "Content-Type", 12 }, tg_text_of(types[i]) };
        const tg_request request = { .headers = &declared, .header_count = 1, .body = bytes, .body_read = true };
        check(tg__form_value(&request, name, room, &value), value);
        const bool found = tg__json_value(&request, name, room, &value);
        check(found, value);
        if (found != tg__json_value(&request, name, again, &second) ||
            (found && (value.length != second.length || memcmp(value.data, second.data, value.length) != 0)))
            abort();
        check(tg__json_value(&request, (tg_text){ "a.b", 3 }, room, &value), value);
    }
    free(copy);
    return 0;
}
