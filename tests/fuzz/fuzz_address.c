/* Any bytes as an address or a network: what is accepted has one normal form, which reads back to itself. */
#include "identity/address.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* An exact copy on the heap: a byte read past the end is then seen. */
    char *copy = malloc(size ? size : 1);
    if (!copy)
        return 0;
    memcpy(copy, data, size);
    const tg_text text = { copy, size };
    char once[TG_ADDRESS_TEXT_MAX], twice[TG_ADDRESS_TEXT_MAX];
    tg_address address, again;
    tg_network network;
    if (tg__address_parse_node(text, &address)) {
        if (tg__address_text(&address, 32, 128, once) >= TG_ADDRESS_TEXT_MAX)
            abort();
        if (!tg__address_parse(tg_text_of(once), &again) || again.ipv4 != address.ipv4 ||
            memcmp(again.bytes, address.bytes, 16) != 0)
            abort();
        if (tg_client_normalise(NULL, text, once, NULL) != TG_OK ||
            tg_client_normalise(NULL, tg_text_of(once), twice, NULL) != TG_OK || strcmp(once, twice) != 0)
            abort();
    }
    if (tg__network_parse(text, &network, NULL) == TG_OK && !tg__network_holds(&network, &network.address))
        abort();
    free(copy);
    return 0;
}
