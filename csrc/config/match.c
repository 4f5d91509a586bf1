/* Which of a file's policies a request meets.
 * Must not enter: YAML, what a policy does. */
#include "config/match.h"

#include "config/config.h"

enum { PATTERN_BYTES_MAX = 1024 };

/* ---- patterns ---- */

static void
to_lower(tg_text text, char *lower)
{
    for (size_t i = 0; i < text.length; i++)
        lower[i] = text.data[i] >= 'A' && text.data[i] <= 'Z' ? (char)(text.data[i] | 0x20) : text.data[i];
}

static bool
compile(tg_arena *arena, tg_text text, tg_pattern *pattern)
{
    size_t count = 1;
    for (size_t i = 0; i < text.length; i++)
        count += text.data[i] == '*';
    const char *copy = tg__arena_copy(arena, text);
    tg_text *pieces = tg__arena_take(arena, count * sizeof *pieces);
    if (!copy || !pieces)
        return false;
    size_t start = 0, piece = 0;
    for (size_t i = 0; i <= text.length; i++) {
        if (i < text.length && copy[i] != '*')
            continue;
        pieces[piece++] = (tg_text){ copy + start, i - start };
        start = i + 1;
    }
    *pattern = (tg_pattern){ .pieces = pieces, .piece_count = count };
    return true;
}

/* Length of a "{name}" at the beginning of the text; 0: there is none. */
static size_t
segment_name(tg_text text)
{
    size_t i = 1;
    if (text.length < 3 || text.data[0] != '{')
        return 0;
    while (i < text.length && (text.data[i] == '_' || (text.data[i] >= '0' && text.data[i] <= '9') ||
                               ((text.data[i] | 0x20) >= 'a' && (text.data[i] | 0x20) <= 'z')))
        i++;
    return i > 1 && i < text.length && text.data[i] == '}' ? i + 1 : 0;
}

/* A path with "{id}" in it. Since each stands for a whole segment, what it takes is known at once, and no path makes
 * comparing slow. */
static bool
compile_segments(tg_arena *arena, tg_text text, tg_pattern *pattern, const char **fault)
{
    size_t count = 1, start = 0, piece = 0;
    const bool open = text.data[text.length - 1] == '*';
    text.length -= open;
    for (size_t i = 0; i < text.length; i++) {
        count += text.data[i] == '{';
        if (text.data[i] == '*')
            *fault = "expected '*' at the end alone where a path has \"{id}\"";
    }
    const char *copy = tg__arena_copy(arena, text);
    tg_text *pieces = tg__arena_take(arena, count * sizeof *pieces);
    if (!copy || !pieces)
        return false;
    for (size_t i = 0; i < text.length && !*fault; i++) {
        if (text.data[i] != '{' && text.data[i] != '}')
            continue;
        const size_t length = segment_name((tg_text){ text.data + i, text.length - i });
        if (length == 0 || i == 0 || text.data[i - 1] != '/' || (i + length < text.length && text.data[i + length] != '/'))
            *fault = "expected \"{id}\" to stand for one whole segment (\"/users/{id}/edit\"); '*' stands for anything";
        pieces[piece++] = (tg_text){ copy + start, i - start };
        start = i + length;
        i = start - 1;
    }
    if (*fault)
        return true;
    if (open && start == text.length)
        *fault = "expected '/' between \"{id}\" and '*'";
    pieces[piece++] = (tg_text){ copy + start, text.length - start };
    *pattern = (tg_pattern){ .pieces = pieces, .piece_count = piece, .segments = true, .open = open };
    return true;
}

bool
tg__pattern_path(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault)
{
    char normal[TG_PATH_BYTES_MAX];
    *fault = NULL;
    if (written.length == 0 || (written.data[0] != '/' && written.data[0] != '*'))
        *fault = "expected a path that begins with '/' (\"/login\", \"/api/*\")";
    else if (written.length > PATTERN_BYTES_MAX)
        *fault = "expected at most 1024 bytes";
    else if (memchr(written.data, '?', written.length) || memchr(written.data, '#', written.length))
        *fault = "expected a path alone: the query is never looked at";
    if (*fault)
        return true;
    const tg_text text = { normal, tg__path_normalise(written, normal) };
    if (memchr(text.data, '{', text.length) || memchr(text.data, '}', text.length)) {
        if (!compile_segments(arena, text, pattern, fault))
            return false;
    } else if (!compile(arena, text, pattern)) {
        return false;
    }
    pattern->below = text.length >= 2 && memcmp(text.data + text.length - 2, "/*", 2) == 0;
    return true;
}

bool
tg__pattern_host(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault)
{
    char normal[TG_HOST_BYTES_MAX];
    const char *bracket = written.length ? memrchr(written.data, ']', written.length) : NULL;
    const char *colon = written.length ? memrchr(written.data, ':', written.length) : NULL;
    *fault = NULL;
    if (written.length == 0 || memchr(written.data, '/', written.length) || memchr(written.data, ' ', written.length))
        *fault = "expected a host's name (\"shop.example\", \"*.shop.example\")";
    else if (colon && (!bracket || colon > bracket))
        *fault = "expected a host without a port: ports are not looked at";
    if (*fault)
        return true;
    const size_t length = tg__host_normalise(written, normal);
    if (length == 0) {
        *fault = "expected a host's name of at most 255 bytes";
        return true;
    }
    return compile(arena, (tg_text){ normal, length }, pattern);
}

bool
tg__pattern_route(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault)
{
    *fault = written.length > PATTERN_BYTES_MAX ? "expected at most 1024 bytes" : NULL;
    return *fault || compile(arena, written, pattern);
}

bool
tg__pattern_value(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault)
{
    char lower[PATTERN_BYTES_MAX];
    *fault = written.length > PATTERN_BYTES_MAX ? "expected at most 1024 bytes" : NULL;
    if (*fault)
        return true;
    to_lower(written, lower);
    return compile(arena, (tg_text){ lower, written.length }, pattern);
}

static bool
begins(tg_text text, tg_text with)
{
    return text.length >= with.length && (with.length == 0 || memcmp(text.data, with.data, with.length) == 0);
}

static bool
meets_segments(const tg_pattern *pattern, tg_text text)
{
    for (size_t i = 0; i < pattern->piece_count; i++) {
        if (i > 0) {
            const char *slash = text.length ? memchr(text.data, '/', text.length) : NULL;
            const size_t length = slash ? (size_t)(slash - text.data) : text.length;
            if (length == 0)
                return false;
            text = (tg_text){ text.data + length, text.length - length };
        }
        if (!begins(text, pattern->pieces[i]))
            return false;
        text = (tg_text){ text.data + pattern->pieces[i].length, text.length - pattern->pieces[i].length };
    }
    return text.length == 0 || pattern->open;
}

/* First and last piece stand at the ends; each piece between them is taken where it is found first. That never has to
 * be taken back, so the time is linear whatever pattern and path are. */
TG_EACH_REQUEST bool
tg__pattern_meets(const tg_pattern *pattern, tg_text text)
{
    if (pattern->segments)
        return meets_segments(pattern, text);
    const tg_text first = pattern->pieces[0], last = pattern->pieces[pattern->piece_count - 1];
    if (pattern->piece_count == 1)
        return text.length == first.length && begins(text, first);
    if (text.length < first.length + last.length || !begins(text, first))
        return false;
    if (!begins((tg_text){ text.data + text.length - last.length, last.length }, last))
        return false;
    const char *at = text.data + first.length, *end = text.data + text.length - last.length;
    for (size_t i = 1; i + 1 < pattern->piece_count; i++) {
        const tg_text piece = pattern->pieces[i];
        if (piece.length == 0)
            continue;
        const char *found = memmem(at, (size_t)(end - at), piece.data, piece.length);
        if (!found)
            return false;
        at = found + piece.length;
    }
    return true;
}

/* ---- requests ---- */

/* A request in the spelling of patterns, each part made when first asked for: most policies look at one. */
typedef struct subject {
    const tg_request *request;
    bool as_sent; /* the path with its empty and dot segments left in */
    bool differs; /* that is another path */
    size_t path_length, host_length, method_length;
    bool has_path, has_host, has_method;
    char path[TG_PATH_BYTES_MAX + 1]; /* with a '/' behind it: what lies below */
    char host[TG_HOST_BYTES_MAX];
    char method[TG_METHOD_BYTES_MAX];
} subject;

/* Each kind of criterion apart: what is passed through for a policy is what it asks for, and no more. */
#define OUT_OF_LINE __attribute__((noinline))

TG_EACH_REQUEST static OUT_OF_LINE bool
meets_path(const tg_match *match, subject *of)
{
    if (!of->has_path) {
        of->path_length = tg__path_spell(of->request->path, !of->as_sent, of->path, &of->differs);
        of->path[of->path_length] = '/';
        of->has_path = true;
    }
    for (size_t i = 0; i < match->path_count; i++)
        if (tg__pattern_meets(&match->paths[i],
                              (tg_text){ of->path, of->path_length + (match->paths[i].below && of->path_length > 1) }))
            return true;
    return false;
}

static OUT_OF_LINE bool
meets_method(const tg_match *match, subject *of)
{
    if (!of->has_method) {
        of->method_length = tg__method_normalise(of->request->method, of->method);
        of->has_method = true;
    }
    for (size_t i = 0; i < match->method_count; i++) {
        const tg_text method = match->methods[i];
        if (method.length == of->method_length && memcmp(method.data, of->method, method.length) == 0)
            return true; /* HEAD has become GET: the same handler answers it */
        if (tg__text_is(method, "HEAD") && tg__text_is_nocase(of->request->method, "HEAD"))
            return true;
    }
    return false;
}

static OUT_OF_LINE bool
meets_host(const tg_match *match, subject *of)
{
    if (!of->has_host) {
        of->host_length = tg__host_normalise(of->request->host, of->host);
        of->has_host = true;
    }
    for (size_t i = 0; i < match->host_count; i++)
        if (tg__pattern_meets(&match->hosts[i], (tg_text){ of->host, of->host_length }))
            return true;
    return false;
}

static OUT_OF_LINE bool
meets_route(const tg_match *match, const tg_request *request)
{
    for (size_t i = 0; i < match->route_count; i++)
        if (tg__pattern_meets(&match->routes[i], request->route))
            return true;
    return false;
}

enum { HEADER_BYTES_MAX = 8192 }; /* of a value; servers take no longer lines */

static bool
meets_value(const tg_match_header *header, tg_text value)
{
    char lower[HEADER_BYTES_MAX];
    value.length = value.length < sizeof lower ? value.length : sizeof lower;
    to_lower(value, lower);
    for (size_t i = 0; i < header->value_count; i++)
        if (tg__pattern_meets(&header->values[i], (tg_text){ lower, value.length }))
            return true;
    return false;
}

/* Sent several times, one line that meets is enough. */
static OUT_OF_LINE bool
meets_headers(const tg_match *match, const tg_request *request)
{
    for (size_t i = 0; i < match->header_count; i++) {
        tg_header_lines lines = tg__header_lines(request, &match->headers[i].name);
        tg_text value;
        bool met = false;
        while (!met && tg__header_previous(&lines, &value))
            met = meets_value(&match->headers[i], tg__text_trim(value));
        if (!met)
            return false;
    }
    return true;
}

static inline bool
meets(const tg_match *match, subject *of)
{
    return (match->method_count == 0 || meets_method(match, of)) && (match->path_count == 0 || meets_path(match, of)) &&
           (match->host_count == 0 || meets_host(match, of)) &&
           (match->route_count == 0 || meets_route(match, of->request)) &&
           (match->header_count == 0 || meets_headers(match, of->request));
}

/* The policies of one reading of the path, in the file's order. */
TG_EACH_REQUEST static size_t
find(const tg_config *config, subject *of, size_t found[TG_LIMITERS_MAX])
{
    size_t count = 0;
    bool decided = false;
    for (size_t i = 0; i < config->policy_count && count < TG_LIMITERS_MAX; i++) {
        const tg_policy *policy = &config->policies[i];
        if (decided && !policy->also)
            continue;
        if (policy->match && !meets(policy->match, of))
            continue;
        found[count++] = i;
        decided |= !policy->also;
    }
    return count;
}

/* Adds what is not there yet, keeping the order. */
static size_t
merge(size_t found[TG_LIMITERS_MAX], size_t count, const size_t *more, size_t more_count)
{
    for (size_t i = 0; i < more_count; i++) {
        size_t at = 0;
        while (at < count && found[at] < more[i])
            at++;
        if ((at < count && found[at] == more[i]) || count == TG_LIMITERS_MAX)
            continue;
        memmove(found + at + 1, found + at, (count - at) * sizeof *found);
        found[at] = more[i];
        count++;
    }
    return count;
}

TG_EACH_REQUEST size_t
tg__config_match(const tg_config *config, const tg_request *request, size_t found[TG_LIMITERS_MAX])
{
    subject of; /* not cleared: a site without paths in its rules never writes the path's 4 KiB */
    of.request = request;
    of.as_sent = of.differs = of.has_path = of.has_host = of.has_method = false;
    size_t count = find(config, &of, found);
    if (of.has_path && of.differs) {
        /* nginx routes "/files/../login" to /login, Starlette to the handler of "/files/{path:path}". Which of them
         * stands behind us is not known, so both readings' policies judge: choosing one would be a way around the
         * other. */
        size_t more[TG_LIMITERS_MAX];
        of.as_sent = true;
        of.has_path = false;
        count = merge(found, count, more, find(config, &of, more));
    }
    return count;
}
