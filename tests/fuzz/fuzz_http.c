/* Any bytes as the head of an HTTP request: bounded, the same however it is split, and what is said lies in the bytes. */
#include "../../fcgi/http.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
lies_within(fcgi_http_piece piece, const char *bytes, size_t size)
{
    if (piece.length && (piece.data < bytes || piece.data + piece.length > bytes + size))
        abort();
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fcgi_http_request request, again;
    const size_t length = size < FCGI_HTTP_HEAD_MAX + 1 ? size : FCGI_HTTP_HEAD_MAX + 1;
    char *bytes = malloc(length ? length : 1); /* its own allocation: a reading past the end is seen */
    if (!bytes)
        return 0;
    memcpy(bytes, data, length);
    const int status = fcgi_http_read(bytes, length, &request);
    if (status != 0 && status != 200 && status != 400 && status != 405 && status != 431 && status != 505)
        abort();
    if (status == 200) {
        if (request.path.length == 0 || request.path.data[0] != '/')
            abort();
        lies_within(request.path, bytes, length);
        lies_within(request.host, bytes, length);
        fcgi_http_host_is_local(request.host);
    }
    /* More bytes never take a verdict back, and fewer never make another one. */
    for (size_t part = 1; part < length && part < 64; part++) {
        const int earlier = fcgi_http_read(bytes, length - part, &again);
        if (earlier != 0 && earlier != status && !(length > FCGI_HTTP_HEAD_MAX && status == 431))
            abort();
    }
    free(bytes);
    return 0;
}
