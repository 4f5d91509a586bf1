/* A list of clients, as `exempt` and `deny` have it: networks, users, keys in a header.
 * Must not enter: what becomes of those on it. */
#ifndef TG_ROLL_H
#define TG_ROLL_H

#include "identity/client.h"

typedef struct tg_roll_entry {
    enum { TG_ROLL_NETWORK, TG_ROLL_USER, TG_ROLL_HEADER } kind;
    tg_network network;
    tg_header_name header;
    tg_text value; /* of the user or the header; borrowed from what was parsed */
} tg_roll_entry;

typedef struct tg_roll {
    const tg_roll_entry *entries;
    size_t count;
    bool has_network;
} tg_roll;

/* "10.0.0.0/8", "user:42", "header:X-Api-Key=abc". TG_E_CONFIG names the entry and what was expected. */
tg_status tg__roll_parse(tg_text text, tg_roll_entry *entry, tg_error *error);
/* Whether the request's client is on it: its whole address, before IPv6 is cut to a prefix. Values are compared in a time
 * that does not tell where they differ. */
bool tg__roll_holds(const tg_roll *roll, const tg_client *client, const tg_request *request);

#endif
