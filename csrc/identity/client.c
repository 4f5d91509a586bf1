/* Who the client is: the peer, or whom a trusted peer says it speaks for.
 * Must not enter: anything a limiter counts. Allocates in tg_client_open only. */
#include "identity/client.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

const tg_client tg__client_default = {
    .ipv4_prefix = 32,
    .ipv6_prefix = 64,
    .kind = TG_CLIENT_HEADER_LIST,
    .header = { .text = "x-forwarded-for", .length = 15 },
};

/* ---- opening ---- */

static bool
is_near(const char *a, size_t a_length, const char *b)
{
    /* One letter too many, missing, wrong, or two swapped: what a typing mistake does. */
    const size_t b_length = strlen(b);
    size_t head = 0, tail = 0;
    while (head < a_length && head < b_length && a[head] == b[head])
        head++;
    while (tail < a_length - head && tail < b_length - head && a[a_length - 1 - tail] == b[b_length - 1 - tail])
        tail++;
    const size_t a_rest = a_length - head - tail, b_rest = b_length - head - tail;
    return (a_rest <= 1 && b_rest <= 1) ||
           (a_rest == 2 && b_rest == 2 && a[head] == b[head + 1] && a[head + 1] == b[head]);
}

static tg_status
choose_header(tg_client *client, tg_text written, tg_error *error)
{
    static const struct {
        const char *name, *shown;
        tg_client_header kind;
    } known[] = {
        { "x-forwarded-for", "X-Forwarded-For", TG_CLIENT_HEADER_LIST },
        { "forwarded", "Forwarded", TG_CLIENT_HEADER_FORWARDED },
        { "x-real-ip", "X-Real-IP", TG_CLIENT_HEADER_SINGLE },
    };
    char shown[TG_NAME_BYTES_MAX + 1];
    if (written.length == 0)
        return TG_OK;
    if (!tg__header_name(written, &client->header))
        return tg__error(error, TG_E_CONFIG,
                         "client_header \"%s\" is no header name: expected X-Forwarded-For, Forwarded, X-Real-IP or "
                         "another header that holds one address",
                         tg__text_show(written, shown, sizeof shown));
    client->kind = TG_CLIENT_HEADER_SINGLE;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(client->header.text, known[i].name) == 0) {
            client->kind = known[i].kind;
            return TG_OK;
        }
    }
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (is_near(client->header.text, client->header.length, known[i].name))
            return tg__error(error, TG_E_CONFIG, "client_header \"%s\": did you mean %s?",
                             tg__text_show(written, shown, sizeof shown), known[i].shown);
    return TG_OK;
}

static tg_status
fill(tg_client *client, const tg_client_options *options, tg_error *error)
{
    char shown[TG_NAME_BYTES_MAX + 1];
    *client = tg__client_default;
    if (options->ipv4_prefix > 32 || options->ipv6_prefix > 128)
        return tg__error(error, TG_E_CONFIG,
                         "an address prefix is out of bounds: expected 1..32 for IPv4 (found %u) and 1..128 for IPv6 "
                         "(found %u)",
                         options->ipv4_prefix, options->ipv6_prefix);
    if (options->ipv4_prefix)
        client->ipv4_prefix = options->ipv4_prefix;
    if (options->ipv6_prefix)
        client->ipv6_prefix = options->ipv6_prefix;
    tg_status status = choose_header(client, options->client_header, error);
    if (status != TG_OK)
        return status;
    if (options->user_header.length && !tg__header_name(options->user_header, &client->user_header))
        return tg__error(error, TG_E_CONFIG, "user_header \"%s\" is no header name",
                         tg__text_show(options->user_header, shown, sizeof shown));
    if (options->trusted_proxy_count == 0)
        return TG_OK;
    client->networks = calloc(options->trusted_proxy_count, sizeof *client->networks);
    if (!client->networks)
        return tg__error(error, TG_E_NOMEM, "%zu trusted networks", options->trusted_proxy_count);
    for (size_t i = 0; i < options->trusted_proxy_count && status == TG_OK; i++) {
        if (tg__text_is_nocase(options->trusted_proxies[i], "unix:"))
            client->trusts_local = true;
        else
            status = tg__network_parse(options->trusted_proxies[i], &client->networks[client->network_count++], error);
    }
    return status;
}

tg_status
tg_client_open(const tg_client_options *options, tg_client **client, tg_error *error)
{
    static const tg_client_options none = { 0 };
    tg_client *made = malloc(sizeof *made);
    if (!made)
        return tg__error(error, TG_E_NOMEM, "client options: %zu bytes", sizeof *made);
    const tg_status status = fill(made, options ? options : &none, error);
    if (status != TG_OK) {
        tg_client_close(made);
        return status;
    }
    *client = made;
    return TG_OK;
}

void
tg_client_close(tg_client *client)
{
    if (!client)
        return;
    free(client->networks);
    free(client);
}

/* ---- header elements ---- */

static bool
is_escaped(const char *first, const char *quote)
{
    const char *p = quote;
    while (p > first && p[-1] == '\\')
        p--;
    return (quote - p) % 2 == 1;
}

/* Where the last ',' outside quotes stands; NULL: there is none. */
static const char *
last_unquoted_comma(tg_text text)
{
    bool quoted = false;
    for (const char *p = text.data + text.length; p > text.data; p--) {
        if (p[-1] == '"' && !is_escaped(text.data, p - 1))
            quoted = !quoted;
        else if (p[-1] == ',' && !quoted)
            return p - 1;
    }
    return NULL;
}

bool
tg__list_last(tg_text *rest, bool quotes, tg_text *element)
{
    if (!rest->data)
        return false;
    const char *comma = quotes ? last_unquoted_comma(*rest) : memrchr(rest->data, ',', rest->length);
    const char *begin = comma ? comma + 1 : rest->data;
    *element = (tg_text){ begin, (size_t)(rest->data + rest->length - begin) };
    if (comma)
        rest->length = (size_t)(comma - rest->data);
    else
        *rest = (tg_text){ 0 };
    return true;
}

static bool
is_blank(char c)
{
    return c == ' ' || c == '\t';
}

bool
tg__forwarded_for(tg_text element, char node[TG_ADDRESS_TEXT_MAX], size_t *length)
{
    const char *p = element.data, *end = p + element.length;
    bool found = false;
    for (;;) {
        while (p < end && (is_blank(*p) || *p == ';'))
            p++;
        if (p == end)
            return found;
        const char *name = p;
        while (p < end && *p != '=' && *p != ';' && *p != '"' && !is_blank(*p))
            p++;
        const tg_text key = { name, (size_t)(p - name) };
        if (key.length == 0 || p == end || *p++ != '=')
            return false;
        const bool wanted = tg__text_is_nocase(key, "for");
        if (wanted && found)
            return false;
        size_t count = 0;
        char c;
        if (p < end && *p == '"') {
            for (p++;; p++) {
                if (p == end)
                    return false;
                c = *p;
                if (c == '"')
                    break;
                if (c == '\\' && ++p == end)
                    return false;
                if (wanted && count < TG_ADDRESS_TEXT_MAX)
                    node[count] = *p;
                count++;
            }
            p++;
        } else {
            for (; p < end && *p != ';' && !is_blank(*p); p++) {
                if (*p == '"')
                    return false;
                if (wanted && count < TG_ADDRESS_TEXT_MAX)
                    node[count] = *p;
                count++;
            }
        }
        while (p < end && is_blank(*p))
            p++;
        if (p < end && *p != ';')
            return false;
        if (wanted) {
            if (count == 0 || count > TG_ADDRESS_TEXT_MAX)
                return false; /* no node is that long, whatever stands in it */
            found = true;
            *length = count;
        }
    }
}

/* ---- the walk ---- */

bool
tg__peer_is_local(tg_text peer)
{
    static const char scheme[] = "unix:";
    return peer.length == 0 || (peer.length >= 5 && memcmp(peer.data, scheme, 5) == 0) || tg__text_is(peer, "b''");
}

static bool
trusts_address(const tg_client *client, const tg_address *address)
{
    for (size_t i = 0; i < client->network_count; i++)
        if (tg__network_holds(&client->networks[i], address))
            return true;
    return false;
}

bool
tg__client_trusts(const tg_client *client, tg_text peer)
{
    tg_address address;
    peer = tg__text_trim(peer);
    if (tg__peer_is_local(peer))
        return client->trusts_local;
    return client->network_count && tg__address_parse_node(peer, &address) && trusts_address(client, &address);
}

/* A hop of the walk: an address, or a local socket. */
typedef struct hop {
    tg_address address;
    bool local;
    tg_text spelt; /* the address as it is written, where the request has it so; else empty */
} hop;

static bool
parse_hop(tg_text text, hop *next)
{
    text = tg__text_trim(text);
    next->local = false;
    next->spelt = text;
    if (tg__address_parse_quad(text, &next->address))
        return true;
    next->spelt = (tg_text){ 0 };
    next->local = text.length >= 5 && tg__peer_is_local(text);
    return next->local || tg__address_parse_node(text, &next->address);
}

static bool
is_trusted(const tg_client *client, const hop *at)
{
    return at->local ? client->trusts_local : trusts_address(client, &at->address);
}

/* Moves `at` from the trusted peer to the client: leftwards as long as the hop that wrote an entry is itself trusted.
 * The last hop that could be read stays. */
static __attribute__((noinline)) void
walk(const tg_client *client, const tg_request *request, hop *at)
{
    tg_text value, element;
    if (client->kind == TG_CLIENT_HEADER_SINGLE) {
        hop next;
        if (tg__header_single(request, &client->header, &value) && parse_hop(value, &next) && !next.local)
            *at = next;
        return;
    }
    tg_header_lines lines = tg__header_lines(request, &client->header);
    while (tg__header_previous(&lines, &value)) {
        /* An empty line is an empty entry: a proxy that cannot name its peer may write just that, and what stands to
         * the left of it is then nobody's word. */
        if (!value.data)
            value = (tg_text){ "", 0 };
        while (tg__list_last(&value, client->kind == TG_CLIENT_HEADER_FORWARDED, &element)) {
            hop next;
            char node[TG_ADDRESS_TEXT_MAX];
            if (client->kind == TG_CLIENT_HEADER_FORWARDED) {
                size_t length;
                if (!tg__forwarded_for(element, node, &length))
                    return;
                element = (tg_text){ node, length };
            }
            if (!parse_hop(element, &next) || (next.local && !client->trusts_local))
                return;
            *at = next;
            if (element.data == node)
                at->spelt = (tg_text){ 0 }; /* `node` does not outlive this turn */
            if (!is_trusted(client, at))
                return;
        }
    }
}

/* Once for a peer that is likely the operator's own proxy, once for any other: a stranger's forged header must not
 * use up the word that would have told of a forgotten setting. */
static __attribute__((noinline)) void
mention_untrusted(const tg_client *client, const tg_request *request, const hop *peer)
{
    static atomic_bool told[2];
    const bool near = peer->local || tg__address_private(&peer->address);
    tg_text value;
    if (atomic_load_explicit(&told[near], memory_order_relaxed))
        return;
    tg_header_lines lines = tg__header_lines(request, &client->header);
    if (!tg__header_previous(&lines, &value) || atomic_exchange(&told[near], true))
        return;
    char text[TG_ADDRESS_TEXT_MAX] = "unix:";
    if (!peer->local)
        tg__address_text(&peer->address, 32, 128, text);
    tg__notice("forwarded-from-untrusted",
               "%s sent %s but is not among trusted_proxies, so the header is ignored and the peer itself is counted; "
               "if it is your proxy, add \"%s\" to trusted_proxies, or all its clients share one count",
               text, client->header.text, text);
}

/* A peer that is more than four numbers. */
static __attribute__((noinline)) tg_status
read_peer(tg_text peer, hop *at, tg_error *error)
{
    peer = tg__text_trim(peer);
    at->spelt = (tg_text){ 0 };
    at->local = tg__peer_is_local(peer);
    if (!at->local && !tg__address_parse_node(peer, &at->address)) {
        char shown[TG_ADDRESS_TEXT_MAX];
        return tg__error(error, TG_E_IDENTITY, "the peer \"%s\" is no address",
                         error ? tg__text_show(peer, shown, sizeof shown) : "");
    }
    return TG_OK;
}

static inline __attribute__((always_inline)) tg_status
find(const tg_client *client, const tg_request *request, hop *at, tg_error *error)
{
    at->local = false;
    at->spelt = request->peer;
    if (!tg__address_parse_quad(request->peer, &at->address)) {
        const tg_status status = read_peer(request->peer, at, error);
        if (status != TG_OK)
            return status;
    }
    if (!request->client_resolved) {
        if (is_trusted(client, at))
            walk(client, request, at);
        else if (request->header_count)
            mention_untrusted(client, request, at);
    }
    if (!at->local)
        return TG_OK;
    return tg__error(error, TG_E_IDENTITY,
                     client->trusts_local && !request->client_resolved
                         ? "the peer is a local socket and sent no usable %s: the client's address is not known"
                         : "the peer is a local socket that is not trusted to name the client in %s: list \"unix:\" "
                           "in trusted_proxies if it is your proxy",
                     client->header.text);
}

bool
tg__client_address(const tg_client *client, const tg_request *request, tg_address *address)
{
    hop at;
    const bool found = find(client ? client : &tg__client_default, request, &at, NULL) == TG_OK;
    if (found)
        *address = at.address;
    return found;
}

bool
tg__client_user(const tg_client *client, const tg_request *request, tg_text *user)
{
    *user = request->user;
    if (request->user.length)
        return true;
    return client && client->user_header.length && !request->client_resolved &&
           tg__client_trusts(client, request->peer) && tg__header_single(request, &client->user_header, user);
}

/* `text` is in `room`, or the request's own. */
TG_EACH_REQUEST static inline tg_status
resolve(const tg_client *client, const tg_request *request, char room[TG_ADDRESS_TEXT_MAX], tg_text *text,
        tg_error *error)
{
    hop at;
    if (!client)
        client = &tg__client_default;
    const tg_status status = find(client, request, &at, error);
    if (status != TG_OK)
        return status;
    tg__client_seen(&at.address);
    if (at.spelt.length && client->ipv4_prefix == 32)
        *text = at.spelt; /* writing the same again would cost as much as reading it */
    else
        *text = (tg_text){ room, tg__address_text(&at.address, client->ipv4_prefix, client->ipv6_prefix, room) };
    return TG_OK;
}

TG_EACH_REQUEST bool
tg__client_text(const tg_client *client, const tg_request *request, char room[TG_ADDRESS_TEXT_MAX], tg_text *text)
{
    return resolve(client, request, room, text, NULL) == TG_OK;
}

tg_status
tg_client_resolve(const tg_client *client, const tg_request *request, char address[TG_ADDRESS_TEXT_MAX],
                  tg_error *error)
{
    tg_text text;
    const tg_status status = resolve(client, request, address, &text, error);
    if (status == TG_OK && text.data != address) {
        memcpy(address, text.data, text.length);
        address[text.length] = '\0';
    }
    return status;
}

tg_status
tg_client_normalise(const tg_client *client, tg_text address, char normal[TG_ADDRESS_TEXT_MAX], tg_error *error)
{
    if (!client)
        client = &tg__client_default;
    /* What this function wrote it also reads: a cut address with the client's own prefix. */
    tg_text bare = tg__text_trim(address);
    uint64_t prefix = 0;
    const char *slash = bare.length ? memrchr(bare.data, '/', bare.length) : NULL;
    if (slash) {
        if (!tg__text_number((tg_text){ slash + 1, (size_t)(bare.data + bare.length - slash) - 1 }, 128, &prefix))
            prefix = UINT64_MAX;
        bare.length = (size_t)(slash - bare.data);
    }
    tg_address parsed;
    if (!tg__address_parse_node(bare, &parsed) ||
        (slash && prefix != (parsed.ipv4 ? client->ipv4_prefix : client->ipv6_prefix))) {
        char shown[TG_ADDRESS_TEXT_MAX];
        return tg__error(error, TG_E_IDENTITY, "\"%s\" is no address: expected \"192.0.2.1\" or \"2001:db8::1\"",
                         error ? tg__text_show(address, shown, sizeof shown) : "");
    }
    tg__address_text(&parsed, client->ipv4_prefix, client->ipv6_prefix, normal);
    return TG_OK;
}
