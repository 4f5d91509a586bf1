/* Network addresses: text to bytes and back. An own parser, because inet_pton wants a terminated string, knows
 * nothing of ports, brackets and zones, and costs several times as much on the path of every request. Must not enter:
 * requests, headers. */
#include "identity/address.h"

#include <limits.h>

static const uint8_t MAPPED[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff };
static const uint8_t NAT64[12] = { 0, 0x64, 0xff, 0x9b };

/* Four decimal parts and nothing beside them. Behind a 0 no digit stands, so each has one spelling. */
TG_EACH_REQUEST static bool
parse_ipv4(const char *p, const char *end, uint8_t bytes[4])
{
    for (int i = 0;; i++) {
        unsigned digit, value = p < end ? (unsigned char)*p++ - (unsigned)'0' : 10;
        if (value > 9)
            return false;
        while (value != 0 && p < end && (digit = (unsigned char)*p - (unsigned)'0') <= 9) {
            value = value * 10 + digit;
            if (value > 255)
                return false;
            p++;
        }
        bytes[i] = (uint8_t)value;
        if (i == 3)
            return p == end;
        if (p == end || *p++ != '.')
            return false;
    }
}

static bool
parse_ipv6(const char *p, const char *end, uint8_t bytes[16])
{
    uint8_t read[16] = { 0 };
    int count = 0; /* bytes read */
    int gap = -1;  /* where "::" stands */
    if (end - p >= 2 && p[0] == ':' && p[1] == ':') {
        gap = 0;
        p += 2;
    }
    while (p < end) {
        const char *group = p;
        unsigned value = 0;
        while (p < end && p - group < 4 && tg__hex_value(*p) >= 0)
            value = value << 4 | (unsigned)tg__hex_value(*p++);
        if (p < end && *p == '.') { /* the last 32 bits may be written as IPv4 */
            if (count > 12 || !parse_ipv4(group, end, read + count))
                return false;
            count += 4;
            p = end;
            break;
        }
        if (p == group || count > 14)
            return false;
        read[count++] = (uint8_t)(value >> 8);
        read[count++] = (uint8_t)value;
        if (p == end)
            break;
        if (*p++ != ':' || p == end)
            return false; /* a fifth digit, a foreign character, or a single ':' at the end */
        if (*p == ':') {
            if (gap >= 0)
                return false;
            gap = count;
            p++;
        }
    }
    if (gap < 0 ? count != 16 : count > 14)
        return false; /* "::" stands for at least one group */
    memset(bytes, 0, 16);
    if (gap < 0) {
        memcpy(bytes, read, 16);
    } else {
        memcpy(bytes, read, (size_t)gap);
        memcpy(bytes + 16 - (count - gap), read + gap, (size_t)(count - gap));
    }
    return true;
}

/* One host has one identity however it came in: over IPv4, over a dual-stack socket, or through a NAT64 gateway. */
static void
unmap(tg_address *address)
{
    address->ipv4 = memcmp(address->bytes, MAPPED, sizeof MAPPED) == 0;
    if (!address->ipv4 && memcmp(address->bytes, NAT64, sizeof NAT64) == 0) {
        memcpy(address->bytes, MAPPED, sizeof MAPPED);
        address->ipv4 = true;
    }
}

TG_EACH_REQUEST bool
tg__address_parse_quad(tg_text text, tg_address *address)
{
    if (text.length > 15) /* also: a file's worth of digits is not read through */
        return false;
    memcpy(address->bytes, MAPPED, sizeof MAPPED);
    address->ipv4 = true;
    return parse_ipv4(text.data, text.data + text.length, address->bytes + 12);
}

bool
tg__address_parse(tg_text text, tg_address *address)
{
    if (text.length < 2 || text.length > 45) /* "::" .. the longest spelling of a mapped address */
        return false;
    if (tg__address_parse_quad(text, address))
        return true;
    if (!parse_ipv6(text.data, text.data + text.length, address->bytes))
        return false;
    unmap(address);
    return true;
}

static bool
is_word(char c)
{
    return (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || c == '.' || c == '_' || c == '-';
}

/* A port as RFC 7239 6.3 has it: up to five digits, or an obfuscated "_name". Nothing is made of it. */
static bool
is_port(const char *p, const char *end)
{
    if (p == end)
        return false;
    if (*p == '_') {
        while (++p < end)
            if (!is_word(*p))
                return false;
        return true;
    }
    if (end - p > 5)
        return false;
    for (; p < end; p++)
        if (*p < '0' || *p > '9')
            return false;
    return true;
}

/* Cuts "%eth0" off a link-local address. false: a '%' with nothing sensible behind it. */
static bool
cut_zone(tg_text *text)
{
    const char *zone = text->length ? memchr(text->data, '%', text->length) : NULL;
    if (!zone)
        return true;
    const size_t length = (size_t)(zone - text->data);
    if (length + 1 == text->length || text->length - length > 1 + 32)
        return false;
    for (const char *p = zone + 1; p < text->data + text->length; p++)
        if (!is_word(*p) && *p != '~' && *p != '%') /* RFC 6874, and "%25" as a URL writes the '%' itself */
            return false;
    text->length = length;
    return memchr(text->data, ':', length) != NULL; /* IPv4 has no zones */
}

bool
tg__address_parse_node(tg_text text, tg_address *address)
{
    text = tg__text_trim(text);
    if (text.length < 2)
        return false;
    const char *end = text.data + text.length;
    if (text.data[0] == '[') {
        const char *close = memchr(text.data, ']', text.length);
        if (!close || (close + 1 < end && (close[1] != ':' || !is_port(close + 2, end))))
            return false;
        text = (tg_text){ text.data + 1, (size_t)(close - text.data) - 1 };
        return cut_zone(&text) && text.length && memchr(text.data, ':', text.length) &&
               tg__address_parse(text, address);
    }
    const char *colon = memchr(text.data, ':', text.length);
    if (colon && !memchr(colon + 1, ':', (size_t)(end - colon) - 1)) { /* one colon: IPv4 and a port */
        if (!is_port(colon + 1, end))
            return false;
        text.length = (size_t)(colon - text.data);
    } else if (!cut_zone(&text)) {
        return false;
    }
    return tg__address_parse(text, address);
}

/* ---- text ---- */

static char *
put_decimal(char *at, unsigned value) /* at most three digits */
{
    if (value >= 100)
        *at++ = (char)('0' + value / 100);
    if (value >= 10)
        *at++ = (char)('0' + value / 10 % 10);
    *at++ = (char)('0' + value % 10);
    return at;
}

static char *
put_hex(char *at, unsigned value)
{
    static const char digits[] = "0123456789abcdef";
    for (int shift = value > 0xfff ? 12 : value > 0xff ? 8 : value > 0xf ? 4 : 0; shift >= 0; shift -= 4)
        *at++ = digits[value >> shift & 15];
    return at;
}

static void
cut(uint8_t bytes[16], unsigned bits)
{
    for (unsigned i = bits / 8; i < 16; i++)
        bytes[i] = i == bits / 8 ? (uint8_t)(bytes[i] & ~(0xffu >> bits % 8)) : 0;
}

static char *
put_ipv6(char *at, const uint8_t bytes[16])
{
    unsigned groups[8];
    for (int i = 0; i < 8; i++)
        groups[i] = (unsigned)bytes[2 * i] << 8 | bytes[2 * i + 1];
    int gap = -1, gap_length = 1; /* RFC 5952: the first longest run of at least two zero groups */
    for (int i = 0; i < 8; i++) {
        int length = 0;
        while (i + length < 8 && groups[i + length] == 0)
            length++;
        if (length > gap_length) {
            gap = i;
            gap_length = length;
        }
        i += length;
    }
    for (int i = 0; i < 8; i++) {
        if (i == gap) {
            *at++ = ':';
            *at++ = ':';
            i += gap_length - 1;
            continue;
        }
        if (i > 0 && at[-1] != ':')
            *at++ = ':';
        at = put_hex(at, groups[i]);
    }
    return at;
}

size_t
tg__address_text(const tg_address *address, unsigned ipv4_prefix, unsigned ipv6_prefix, char text[TG_ADDRESS_TEXT_MAX])
{
    tg_address kept = *address;
    char *at = text;
    const unsigned prefix = kept.ipv4 ? ipv4_prefix : ipv6_prefix;
    const unsigned whole = kept.ipv4 ? 32 : 128;
    if (prefix < whole)
        cut(kept.bytes, prefix + 128 - whole);
    if (kept.ipv4) {
        for (int i = 12; i < 16; i++) {
            at = put_decimal(at, kept.bytes[i]);
            *at++ = '.';
        }
        at--;
    } else {
        at = put_ipv6(at, kept.bytes);
    }
    if (prefix < whole) {
        *at++ = '/';
        at = put_decimal(at, prefix);
    }
    *at = '\0';
    return (size_t)(at - text);
}

bool
tg__address_private(const tg_address *address)
{
    const uint8_t *b = address->bytes;
    if (address->ipv4) {
        b += 12;
        return b[0] == 10 || b[0] == 127 || (b[0] == 172 && (b[1] & 0xf0) == 16) || (b[0] == 192 && b[1] == 168) ||
               (b[0] == 169 && b[1] == 254) || (b[0] == 100 && (b[1] & 0xc0) == 64);
    }
    static const uint8_t loopback[16] = { [15] = 1 };
    return (b[0] & 0xfe) == 0xfc || (b[0] == 0xfe && (b[1] & 0xc0) == 0x80) || memcmp(b, loopback, 16) == 0;
}

/* ---- networks ---- */

tg_status
tg__network_parse(tg_text text, tg_network *network, tg_error *error)
{
    char shown[80];
    tg_text address = text;
    const char *slash = text.length ? memchr(text.data, '/', text.length) : NULL;
    uint64_t prefix = UINT64_MAX;
    if (slash) {
        address.length = (size_t)(slash - text.data);
        if (!tg__text_number((tg_text){ slash + 1, text.length - address.length - 1 }, 128, &prefix))
            prefix = UINT_MAX;
    }
    if (!tg__address_parse(address, &network->address))
        return tg__error(error, TG_E_CONFIG,
                         "\"%s\" is no network: expected an address (\"192.0.2.1\", \"2001:db8::1\"), a network "
                         "(\"10.0.0.0/8\") or \"unix:\"",
                         tg__text_show(text, shown, sizeof shown));
    /* The mapped spelling of an IPv4 network counts its prefix over 128 bits. */
    const bool wide = memchr(address.data, ':', address.length) != NULL;
    if (!slash)
        prefix = wide ? 128 : 32;
    if (prefix > (wide ? 128u : 32u) || (wide && network->address.ipv4 && prefix < 96))
        return tg__error(error, TG_E_CONFIG, "\"%s\": expected a prefix from %u to %u behind the '/'",
                         tg__text_show(text, shown, sizeof shown), wide && network->address.ipv4 ? 96u : 0u,
                         wide ? 128u : 32u);
    network->bits = (unsigned)prefix + (wide ? 0 : 96);
    tg_address kept = network->address;
    cut(kept.bytes, network->bits);
    if (memcmp(kept.bytes, network->address.bytes, 16) != 0) {
        char base[TG_ADDRESS_TEXT_MAX];
        const unsigned own = kept.ipv4 ? network->bits - 96 : network->bits;
        tg__address_text(&kept, own, own, base);
        return tg__error(error, TG_E_CONFIG,
                         "\"%s\" has bits set past its prefix: expected \"%s\" for the network, or the address "
                         "without a prefix",
                         tg__text_show(text, shown, sizeof shown), base);
    }
    return TG_OK;
}

bool
tg__network_holds(const tg_network *network, const tg_address *address)
{
    if (network->address.ipv4 != address->ipv4)
        return false; /* "::/0" is every IPv6 address, not every address */
    const unsigned whole = network->bits / 8, rest = network->bits % 8;
    if (memcmp(network->address.bytes, address->bytes, whole) != 0)
        return false;
    return rest == 0 || (network->address.bytes[whole] ^ address->bytes[whole]) >> (8 - rest) == 0;
}
