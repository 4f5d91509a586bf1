/* A Redis URI to an address. Passwords may hold any byte, percent-encoded; no message repeats one.
 * Must not enter: sockets, name lookup. */
#include "stores/redis/redis.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/un.h>

#define PORT_DEFAULT 6379
#define SENTINEL_PORT_DEFAULT 26379
#define CONNECTIONS_DEFAULT 16
#define TIMEOUT_MS_MAX 2000 /* as for every store */

static int
hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* NULL with *status TG_OK for an empty text. */
static char *
decode(tg_text text, const char *what, tg_status *status, tg_error *error)
{
    if (text.length == 0)
        return NULL;
    char *decoded = malloc(text.length + 1), *at = decoded;
    if (!decoded) {
        *status = tg__error(error, TG_E_NOMEM, "redis: %zu bytes", text.length + 1);
        return NULL;
    }
    for (size_t i = 0; i < text.length; i++) {
        char c = text.data[i];
        if (c == '%') {
            const int high = i + 2 < text.length ? hex(text.data[i + 1]) : -1;
            const int low = high >= 0 ? hex(text.data[i + 2]) : -1;
            if (low < 0 || high * 16 + low == 0) {
                *status = tg__error(error, TG_E_CONFIG,
                                    "a Redis URI's %s has a '%%' that is not followed by two hexadecimal digits "
                                    "(a '%%' itself is written %%25)",
                                    what);
                free(decoded);
                return NULL;
            }
            c = (char)(high * 16 + low);
            i += 2;
        }
        *at++ = c;
    }
    *at = '\0';
    return decoded;
}

static const char *
find_last(tg_text text, char c)
{
    return text.length ? memrchr(text.data, c, text.length) : NULL;
}

static tg_text
until(tg_text text, const char *end)
{
    return (tg_text){ text.data, (size_t)(end - text.data) };
}

static tg_text
after(tg_text text, const char *mark)
{
    return (tg_text){ mark + 1, (size_t)(text.data + text.length - mark - 1) };
}

static tg_status
parse_user(tg_text info, tg_redis_address *address, tg_error *error)
{
    tg_status status = TG_OK;
    const char *colon = info.length ? memchr(info.data, ':', info.length) : NULL;
    if (!colon)
        return tg__error(error, TG_E_CONFIG, "a Redis URI has user:password or :password before its '@'");
    address->user = decode(until(info, colon), "user", &status, error);
    if (status == TG_OK)
        address->password = decode(after(info, colon), "password", &status, error);
    if (status == TG_OK && !address->password)
        return tg__error(error, TG_E_CONFIG, "a Redis URI has an empty password before its '@'");
    return status;
}

static tg_status
parse_db(tg_text text, tg_redis_address *address, tg_error *error)
{
    uint64_t number = 0;
    char shown[32];
    if (text.length && !tg__text_number(text, 1000000, &number))
        return tg__error(error, TG_E_CONFIG, "Redis database '%s': expected a number",
                         tg__text_show(text, shown, sizeof shown));
    address->db = (unsigned)number;
    return TG_OK;
}

/* host, host:port, [IPv6], [IPv6]:port */
static tg_status
parse_host(tg_text text, uint16_t port_default, tg_redis_host *parsed, tg_error *error)
{
    char shown[80];
    tg_text host = text, port = { NULL, 0 };
    if (text.length && text.data[0] == '[') {
        const char *close = memchr(text.data, ']', text.length);
        if (!close || (close + 1 < text.data + text.length && close[1] != ':'))
            return tg__error(error, TG_E_CONFIG, "Redis host '%s': expected [IPv6 address] or [IPv6 address]:port",
                             tg__text_show(text, shown, sizeof shown));
        host = (tg_text){ text.data + 1, (size_t)(close - text.data - 1) };
        if (close + 1 < text.data + text.length)
            port = (tg_text){ close + 2, (size_t)(text.data + text.length - close - 2) };
    } else {
        const char *colon = find_last(text, ':');
        if (colon) {
            host = until(text, colon);
            port = after(text, colon);
        }
    }
    uint64_t number = port_default;
    if (port.data && (!tg__text_number(port, 65535, &number) || number == 0))
        return tg__error(error, TG_E_CONFIG, "Redis port '%s': expected 1 to 65535",
                         tg__text_show(port, shown, sizeof shown));
    if (host.length == 0)
        host = tg_text_of("127.0.0.1");
    if (host.length > TG__REDIS_HOST_MAX)
        return tg__error(error, TG_E_CONFIG, "a Redis host has at most %d bytes", TG__REDIS_HOST_MAX);
    memcpy(parsed->host, host.data, host.length);
    parsed->host[host.length] = '\0';
    parsed->port = (uint16_t)number;
    return TG_OK;
}

static tg_status
parse_server(tg_text text, tg_redis_address *address, tg_error *error)
{
    const char *slash = text.length ? memchr(text.data, '/', text.length) : NULL;
    if (slash) {
        const tg_status status = parse_db(after(text, slash), address, error);
        if (status != TG_OK)
            return status;
        text = until(text, slash);
    }
    tg_redis_host server;
    const tg_status status = parse_host(text, PORT_DEFAULT, &server, error);
    if (status != TG_OK)
        return status;
    memcpy(address->host, server.host, sizeof address->host);
    address->port = server.port;
    char shown[128];
    snprintf(address->shown, sizeof address->shown, "redis at %s:%u",
             tg__text_show(tg_text_of(server.host), shown, sizeof shown), server.port);
    return TG_OK;
}

/* sentinel,sentinel:port/master or with /db behind it */
static tg_status
parse_sentinels(tg_text text, tg_redis_address *address, tg_error *error)
{
    const char *slash = text.length ? memchr(text.data, '/', text.length) : NULL;
    tg_text name = slash ? after(text, slash) : (tg_text){ NULL, 0 };
    const char *second = name.length ? memchr(name.data, '/', name.length) : NULL;
    tg_status status = second ? parse_db(after(name, second), address, error) : TG_OK;
    if (status != TG_OK)
        return status;
    if (second)
        name = until(name, second);
    if (name.length == 0 || name.length > TG__SENTINEL_NAME_MAX)
        return tg__error(error, TG_E_CONFIG,
                         "a redis+sentinel:// URI names the master behind its sentinels, in at most %d bytes: "
                         "redis+sentinel://host,host:26379/mymaster",
                         TG__SENTINEL_NAME_MAX);
    memcpy(address->master, name.data, name.length);
    address->master[name.length] = '\0';
    tg_text hosts = until(text, slash);
    do {
        const char *comma = hosts.length ? memchr(hosts.data, ',', hosts.length) : NULL;
        if (address->sentinel_count == TG__SENTINELS_MAX)
            return tg__error(error, TG_E_CONFIG, "a redis+sentinel:// URI names at most %d sentinels",
                             TG__SENTINELS_MAX);
        status = parse_host(comma ? until(hosts, comma) : hosts, SENTINEL_PORT_DEFAULT,
                            &address->sentinels[address->sentinel_count++], error);
        if (status != TG_OK)
            return status;
        hosts = comma ? after(hosts, comma) : (tg_text){ NULL, 0 };
    } while (hosts.length);
    address->port = address->sentinels[0].port; /* not 0: no path */
    char shown[80];
    snprintf(address->shown, sizeof address->shown, "redis '%s' of sentinel",
             tg__text_show(tg_text_of(address->master), shown, sizeof shown));
    return TG_OK;
}

/* host,host:port: nodes of a cluster, any of which tells of the others */
static tg_status
parse_nodes(tg_text text, tg_redis_address *address, tg_error *error)
{
    const char *slash = text.length ? memchr(text.data, '/', text.length) : NULL;
    if (slash) {
        const tg_status status = parse_db(after(text, slash), address, error);
        if (status != TG_OK)
            return status;
        text = until(text, slash);
    }
    do {
        const char *comma = text.length ? memchr(text.data, ',', text.length) : NULL;
        if (address->seed_count == TG__SEEDS_MAX)
            return tg__error(error, TG_E_CONFIG, "a redis+cluster:// URI names at most %d nodes; the cluster tells of "
                                                 "the others", TG__SEEDS_MAX);
        const tg_status status = parse_host(comma ? until(text, comma) : text, PORT_DEFAULT,
                                            &address->seeds[address->seed_count++], error);
        if (status != TG_OK)
            return status;
        text = comma ? after(text, comma) : (tg_text){ NULL, 0 };
    } while (text.length);
    char shown[80];
    snprintf(address->shown, sizeof address->shown, "redis cluster at %s:%u",
             tg__text_show(tg_text_of(address->seeds[0].host), shown, sizeof shown), address->seeds[0].port);
    return TG_OK;
}

static tg_status
parse_path(tg_text path, tg_redis_address *address, tg_error *error)
{
    if (path.length == 0 || path.data[0] != '/')
        return tg__error(error, TG_E_CONFIG, "a redis+unix:// URI has an absolute path: redis+unix:///run/redis.sock");
    if (path.length >= sizeof((struct sockaddr_un *)0)->sun_path)
        return tg__error(error, TG_E_CONFIG, "a unix socket's path has at most %zu bytes, not %zu",
                         sizeof((struct sockaddr_un *)0)->sun_path - 1, path.length);
    memcpy(address->host, path.data, path.length);
    address->host[path.length] = '\0';
    address->port = 0;
    char shown[128];
    snprintf(address->shown, sizeof address->shown, "redis at %s", tg__text_show(path, shown, sizeof shown));
    return TG_OK;
}

/* Of rediss: files, a name, yes or no. Returns whether it is one of these. */
static bool
parse_tls_option(tg_text name, tg_text value, tg_tls_options *tls, tg_status *status, tg_error *error)
{
    const struct {
        const char *name;
        char **to;
    } texts[] = { { "ca", &tls->ca }, { "cert", &tls->cert }, { "key", &tls->key }, { "name", &tls->name } };
    char shown[32];
    if (tg__text_is(name, "verify")) {
        tls->verifies = !tg__text_is(value, "no");
        if (tls->verifies && !tg__text_is(value, "yes"))
            *status = tg__error(error, TG_E_CONFIG, "Redis option verify=%s: expected yes or no",
                                tg__text_show(value, shown, sizeof shown));
        return true;
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (tg__text_is(name, texts[i].name)) {
            *texts[i].to = decode(value, texts[i].name, status, error);
            if (*status == TG_OK && !*texts[i].to)
                *status = tg__error(error, TG_E_CONFIG, "Redis option %s=: it is empty", texts[i].name);
            return true;
        }
    return false;
}

static tg_status
parse_options(const tg_store_uri *uri, bool with_tls, tg_tls_options *tls, tg_redis_address *address, tg_error *error)
{
    tg_status tls_status = TG_OK;
    for (size_t i = 0; i < uri->option_count; i++) {
        const tg_text name = uri->options[i].name, value = uri->options[i].value;
        char shown[32];
        if (tg__text_is(name, "db")) {
            const tg_status status = parse_db(value, address, error);
            if (status != TG_OK)
                return status;
        } else if (tg__text_is(name, "connections")) {
            uint64_t number;
            if (!tg__text_number(value, TG__REDIS_CONNECTIONS_MAX, &number) || number == 0)
                return tg__error(error, TG_E_CONFIG, "Redis option connections=%s: expected 1 to %d",
                                 tg__text_show(value, shown, sizeof shown), TG__REDIS_CONNECTIONS_MAX);
            address->connections_max = (unsigned)number;
        } else if (tg__text_is(name, "timeout_ms")) {
            uint64_t number;
            if (!tg__text_number(value, TIMEOUT_MS_MAX, &number) || number == 0)
                return tg__error(error, TG_E_CONFIG, "Redis option timeout_ms=%s: expected 1 to %d",
                                 tg__text_show(value, shown, sizeof shown), TIMEOUT_MS_MAX);
            address->timeout_us = number * 1000;
        } else if (!with_tls || !parse_tls_option(name, value, tls, &tls_status, error)) {
            return tg__error(error, TG_E_CONFIG, "Redis option '%s': expected %sdb, connections%s timeout_ms%s",
                             tg__text_show(name, shown, sizeof shown),
                             uri->tiered ? "local, lease, workers, flush, " : "", with_tls ? "," : " or",
                             with_tls ? ", ca, cert, key, name or verify" : "");
        } else if (tls_status != TG_OK) {
            return tls_status;
        }
    }
    return TG_OK;
}

tg_status
tg__redis_address_parse(const tg_store_uri *uri, tg_redis_address *address, tg_error *error)
{
    *address = (tg_redis_address){ .connections_max = CONNECTIONS_DEFAULT };
    const bool unix_socket = tg__text_is(uri->scheme, "redis+unix");
    const bool with_tls = uri->scheme.length >= 6 && memcmp(uri->scheme.data, "rediss", 6) == 0;
    if (with_tls && !tg__tls_available())
        return tg__tls_open(NULL, NULL, error);
    const tg_text kind = with_tls ? after(uri->scheme, uri->scheme.data + 5) : after(uri->scheme, uri->scheme.data + 4);
    const bool sentinel = tg__text_is(kind, "+sentinel");
    const bool cluster = tg__text_is(kind, "+cluster");
    tg_tls_options tls = { .verifies = true };
    tg_text rest = uri->rest;
    /* A password may hold an '@' that was not encoded, and so may a path: the last one before a host, the first before
     * a '/'. */
    const char *at = unix_socket ? rest.length ? memmem(rest.data, rest.length, "@/", 2) : NULL : find_last(rest, '@');
    if (at && unix_socket && rest.data[0] == '/')
        at = NULL;
    tg_status status = TG_OK;
    if (at) {
        status = parse_user(until(rest, at), address, error);
        rest = after(rest, at);
    }
    if (status == TG_OK)
        status = unix_socket ? parse_path(rest, address, error)
                 : sentinel  ? parse_sentinels(rest, address, error)
                 : cluster   ? parse_nodes(rest, address, error)
                             : parse_server(rest, address, error);
    if (status == TG_OK)
        status = parse_options(uri, with_tls, &tls, address, error);
    if (status == TG_OK && cluster && address->db)
        status = tg__error(error, TG_E_CONFIG, "a Redis cluster has no database but 0, not %u", address->db);
    if (status == TG_OK && with_tls)
        status = tg__tls_open(&tls, &address->tls, error);
    free(tls.ca);
    free(tls.cert);
    free(tls.key);
    free(tls.name);
    if (status != TG_OK)
        tg__redis_address_fini(address);
    return status;
}

/* Before the memory is given back: it may end up in a core file. */
static void
forget(char *text)
{
    if (text)
        explicit_bzero(text, strlen(text));
    free(text);
}

void
tg__redis_address_fini(tg_redis_address *address)
{
    forget(address->user);
    forget(address->password);
    tg__tls_close(address->tls);
    address->user = address->password = NULL;
    address->tls = NULL;
}
