/* Any bytes as forwarding headers of each kind, from a trusted peer. Whatever a client writes, what the proxy appends
 * behind it is what counts. */
#include "identity/client.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static tg_client *clients[3];
static const char *const headers[3] = { "X-Forwarded-For", "Forwarded", "X-Real-IP" };
static const char *const appended[3] = { ", 198.51.100.7", ", for=\"198.51.100.7:80\";proto=http", "" };

static void
open_clients(void)
{
    static const tg_text trusted[] = { { "10.0.0.0/8", 10 }, { "unix:", 5 }, { "2001:db8::/32", 13 } };
    for (size_t i = 0; i < 3 && !clients[i]; i++) {
        const tg_client_options options = { .trusted_proxies = trusted, .trusted_proxy_count = 3,
                                            .client_header = tg_text_of(headers[i]) };
        if (tg_client_open(&options, &clients[i], NULL) != TG_OK)
            abort();
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char address[TG_ADDRESS_TEXT_MAX], again[TG_ADDRESS_TEXT_MAX];
    open_clients();
    for (size_t i = 0; i < 3; i++) {
        const size_t more = strlen(appended[i]), half = size / 2;
        char *value = malloc(size + more + 1);
        if (!value)
            return 0;
        memcpy(value, data, size);
        memcpy(value + size, appended[i], more);
        const tg_header lines[2] = { { tg_text_of(headers[i]), { value, half } },
                                     { tg_text_of(headers[i]), { value + half, size - half } } };
        tg_request request = { .peer = { "10.0.0.1", 8 }, .headers = lines, .header_count = 2 };
        if (tg_client_resolve(clients[i], &request, address, NULL) == TG_OK &&
            (tg_client_normalise(clients[i], tg_text_of(address), again, NULL) != TG_OK || strcmp(address, again) != 0))
            abort();
        if (i < 2) {
            const tg_header line = { tg_text_of(headers[i]), { value, size + more } };
            request.headers = &line;
            request.header_count = 1;
            if (tg_client_resolve(clients[i], &request, address, NULL) != TG_OK ||
                strcmp(address, "198.51.100.7") != 0)
                abort();
        }
        free(value);
    }
    return 0;
}
