/* Any bytes as a path, a host and a method: bounded, and a path's normal form keeps its shape. */
#include "identity/path.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char normal[TG_PATH_BYTES_MAX], slashed[TG_PATH_BYTES_MAX], host[TG_HOST_BYTES_MAX], method[TG_METHOD_BYTES_MAX];
    char *copy = malloc(size + 3);
    if (!copy)
        return 0;
    memcpy(copy, data, size);
    const size_t length = tg__path_normalise((tg_text){ copy, size }, normal);
    if (length == 0 || length > sizeof normal || normal[0] != '/' || (length > 1 && normal[length - 1] == '/') ||
        memmem(normal, length, "//", 2) || memmem(normal, length, "/./", 3) || memmem(normal, length, "/../", 4))
        abort();
    bool differs;
    const size_t as_sent = tg__path_spell((tg_text){ copy, size }, false, slashed, &differs);
    if (as_sent == 0 || as_sent > sizeof slashed || slashed[0] != '/' ||
        (!differs && (as_sent != length || memcmp(slashed, normal, length) != 0)))
        abort();
    /* A '/' behind it and a query make no other path, as long as it has none of its own. ("http:/" would become a
     * scheme.) */
    if (size > 0 && copy[0] == '/' && !memchr(copy, '?', size) && !memchr(copy, '#', size) && length < 1024) {
        memcpy(copy + size, "/?x", 3);
        if (tg__path_normalise((tg_text){ copy, size + 3 }, slashed) != length || memcmp(normal, slashed, length) != 0)
            abort();
    }
    if (tg__host_normalise((tg_text){ copy, size }, host) > sizeof host ||
        tg__method_normalise((tg_text){ copy, size }, method) > sizeof method)
        abort();
    free(copy);
    return 0;
}
