/* Network addresses: text to bytes and back, networks, prefixes.
 * Must not enter: requests, headers. */
#ifndef TG_ADDRESS_H
#define TG_ADDRESS_H

#include "base/base.h"

/* One address. IPv4 is kept as ::ffff:a.b.c.d, so that comparing and cutting is one piece of code. */
typedef struct tg_address {
    uint8_t bytes[16];
    bool ipv4;
} tg_address;

typedef struct tg_network {
    tg_address address; /* no bit set past `bits` */
    unsigned bits;      /* of 128, also for IPv4 */
} tg_network;

/* One address alone: no port, brackets, zone or space around it. IPv4-mapped and NAT64 (64:ff9b::/96) come out as
 * IPv4. false: anything else. Decimal parts with leading zeros are refused: one parser reads them as octal, the next
 * does not. */
bool tg__address_parse(tg_text text, tg_address *address);
/* Of these only "192.0.2.1". An address has one such spelling: what was read so is what tg__address_text writes. */
bool tg__address_parse_quad(tg_text text, tg_address *address);
/* The same as servers and gateways write it: "192.0.2.1:1111", "[2001:db8::1]:443", "fe80::1%eth0", spaces around. */
bool tg__address_parse_node(tg_text text, tg_address *address);

/* Clears the bits past the family's prefix and writes the text: whole addresses bare, cut ones with their prefix:
 * "192.0.2.1", "192.0.2.0/24", "2001:db8:1:2::/64" (RFC 5952). Returns its length without the NUL. */
size_t tg__address_text(const tg_address *address, unsigned ipv4_prefix, unsigned ipv6_prefix,
                        char text[TG_ADDRESS_TEXT_MAX]);
/* Loopback, private, link-local and shared (carrier) addresses: a peer there is likelier a proxy than a client. */
bool tg__address_private(const tg_address *address);

/* "10.0.0.0/8", "::1", "::ffff:10.0.0.0/104". TG_E_CONFIG names the entry and what was expected. */
tg_status tg__network_parse(tg_text text, tg_network *network, tg_error *error);
bool tg__network_holds(const tg_network *network, const tg_address *address);

#endif
