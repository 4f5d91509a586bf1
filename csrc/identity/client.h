/* The client options, parsed; shared by the walk and by `by`.
 * Must not enter: anything a limiter counts. */
#ifndef TG_CLIENT_H
#define TG_CLIENT_H

#include "identity/address.h"
#include "identity/headers.h"

#include <stdatomic.h>

typedef enum tg_client_header {
    TG_CLIENT_HEADER_LIST,      /* X-Forwarded-For: addresses, each proxy appends its peer */
    TG_CLIENT_HEADER_FORWARDED, /* RFC 7239 */
    TG_CLIENT_HEADER_SINGLE     /* X-Real-IP and the like: one address, set by the proxy in front */
} tg_client_header;

struct tg_client {
    tg_network *networks;
    size_t network_count;
    bool trusts_local; /* "unix:" */
    unsigned ipv4_prefix, ipv6_prefix;
    tg_client_header kind;
    tg_header_name header;
    tg_header_name user_header; /* length 0: none */
};

/* The options of a limiter without any: nobody is trusted. */
extern const tg_client tg__client_default;

/* "", "unix:..." and "b''" (what some servers make of an unnamed socket). */
bool tg__peer_is_local(tg_text peer);
/* Whether the peer may speak for others. */
bool tg__client_trusts(const tg_client *client, tg_text peer);

/* The client's whole address, before it is cut to a prefix. false: not known. */
bool tg__client_address(const tg_client *client, const tg_request *request, tg_address *address);
/* The client's address as tg_client_resolve writes it: in `room`, or where the request has it so. false: not known. */
bool tg__client_text(const tg_client *client, const tg_request *request, char room[TG_ADDRESS_TEXT_MAX], tg_text *text);
/* The user: what the face authenticated, else what a trusted peer says in user_header. */
bool tg__client_user(const tg_client *client, const tg_request *request, tg_text *user);

/* One list element of RFC 7239: the node that `for` names, unquoted. false: malformed, no `for`, or two of them. */
bool tg__forwarded_for(tg_text element, char node[TG_ADDRESS_TEXT_MAX], size_t *length);
/* Takes the last element off `rest`, at the last ',' outside quotes. Scanned from the right, where the trusted proxy
 * wrote: a client's stray quote further left cannot swallow what the proxy appended. false: nothing is left. */
bool tg__list_last(tg_text *rest, bool quotes, tg_text *element);

/* Tells once, as a notice, when everybody seems to be one private address. A load where two have been seen. */
void tg__client_see(const tg_address *address);
/* There are several, or one that is no proxy, or it has been said. */
extern atomic_bool tg__client_seen_enough __attribute__((visibility("hidden")));
static inline void
tg__client_seen(const tg_address *address)
{
    if (!atomic_load_explicit(&tg__client_seen_enough, memory_order_relaxed))
        tg__client_see(address);
}

#endif
