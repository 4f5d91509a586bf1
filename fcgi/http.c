/* One request's head: see http.h. */
#include "http.h"

#include <arpa/inet.h>
#include <string.h>
#include <strings.h>

/* The line that begins at `*at`, without its end, which may be a bare newline; `*at` moves behind it. false: no end. */
static bool
next_line(const char *bytes, size_t length, size_t *at, fcgi_http_piece *line)
{
    const char *end = memchr(bytes + *at, '\n', length - *at);
    if (!end)
        return false;
    *line = (fcgi_http_piece){ bytes + *at, (size_t)(end - (bytes + *at)) };
    *at += line->length + 1;
    if (line->length && line->data[line->length - 1] == '\r')
        line->length--;
    return true;
}

static bool
is(fcgi_http_piece piece, const char *word)
{
    return piece.length == strlen(word) && memcmp(piece.data, word, piece.length) == 0;
}

static bool
has_control(fcgi_http_piece piece)
{
    for (size_t i = 0; i < piece.length; i++)
        if ((unsigned char)piece.data[i] < ' ' || piece.data[i] == 0x7f)
            return true;
    return false;
}

/* Up to the next space. */
static fcgi_http_piece
cut(fcgi_http_piece *rest)
{
    const char *space = rest->length ? memchr(rest->data, ' ', rest->length) : NULL;
    const fcgi_http_piece word = { rest->data, space ? (size_t)(space - rest->data) : rest->length };
    const size_t used = word.length + (space != NULL);
    *rest = (fcgi_http_piece){ rest->data + used, rest->length - used };
    return word;
}

static int
read_request_line(fcgi_http_piece line, fcgi_http_request *request, bool *hostless)
{
    fcgi_http_piece rest = line;
    if (has_control(line))
        return 400;
    const fcgi_http_piece method = cut(&rest);
    fcgi_http_piece target = cut(&rest);
    if (method.length == 0 || target.length == 0 || rest.length < 5 || memcmp(rest.data, "HTTP/", 5) != 0)
        return 400;
    *hostless = is(rest, "HTTP/1.0");
    if (!*hostless && !is(rest, "HTTP/1.1"))
        return 505;
    request->head = is(method, "HEAD");
    if (!request->head && !is(method, "GET"))
        return 405;
    if (target.data[0] != '/')
        return 400; /* a proxy's absolute form: we are none */
    const char *query = memchr(target.data, '?', target.length);
    if (query)
        target.length = (size_t)(query - target.data);
    request->path = target;
    return 200;
}

static fcgi_http_piece
trim(fcgi_http_piece text)
{
    while (text.length && (text.data[0] == ' ' || text.data[0] == '\t'))
        text = (fcgi_http_piece){ text.data + 1, text.length - 1 };
    while (text.length && (text.data[text.length - 1] == ' ' || text.data[text.length - 1] == '\t'))
        text.length--;
    return text;
}

static void
cut_port(fcgi_http_piece *host)
{
    const char *end = host->length && host->data[0] == '[' ? memchr(host->data, ']', host->length)
                      : host->length                       ? memchr(host->data, ':', host->length)
                                                           : NULL;
    if (end)
        host->length = (size_t)(end - host->data) + (*end == ']');
}

int
fcgi_http_read(const char *bytes, size_t length, fcgi_http_request *request)
{
    size_t at = 0;
    fcgi_http_piece line;
    int status = 0;
    bool hosted = false, hostless = false, whole = false;
    *request = (fcgi_http_request){ .head = false };
    if (length > FCGI_HTTP_HEAD_MAX)
        return 431;
    while (at < length && next_line(bytes, length, &at, &line)) {
        if (status == 0) { /* the first line; empty ones before it are forgiven (RFC 9112 2.2) */
            if (line.length)
                status = read_request_line(line, request, &hostless);
            if (status != 0 && status != 200)
                return status;
            continue;
        }
        if (line.length == 0) {
            whole = true;
            break;
        }
        const char *colon = memchr(line.data, ':', line.length);
        if (!colon || colon == line.data || line.data[0] == ' ' || line.data[0] == '\t')
            return 400;
        const size_t name = (size_t)(colon - line.data);
        if (name != 4 || strncasecmp(line.data, "Host", 4) != 0)
            continue;
        request->host = trim((fcgi_http_piece){ colon + 1, line.length - name - 1 });
        if (hosted || has_control(request->host))
            return 400;
        hosted = true;
        cut_port(&request->host);
    }
    if (!whole)
        return length == FCGI_HTTP_HEAD_MAX ? 431 : 0;
    return hosted || hostless ? 200 : 400;
}

bool
fcgi_http_host_is_local(fcgi_http_piece host)
{
    char text[64];
    struct in_addr four;
    struct in6_addr six;
    if (host.length == 0 || host.length >= sizeof text)
        return false;
    memcpy(text, host.data, host.length);
    text[host.length] = '\0';
    if (strlen(text) != host.length)
        return false;
    if (strcasecmp(text, "localhost") == 0)
        return true;
    if (inet_pton(AF_INET, text, &four) == 1)
        return ntohl(four.s_addr) >> 24 == 127;
    if (text[0] != '[' || text[host.length - 1] != ']')
        return false;
    text[host.length - 1] = '\0';
    return inet_pton(AF_INET6, text + 1, &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six);
}
