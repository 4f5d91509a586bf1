/* One spelling for each path, host and method.
 * Must not enter: patterns, policies. */
#include "identity/path.h"

enum {
    DIGEST_BYTES = 32,
    MARK_BYTES = 1 + 2 * DIGEST_BYTES,
    ROOM = TG_PATH_BYTES_MAX - MARK_BYTES, /* for beginning and end */
    KEPT = 1024,                           /* of the beginning, and of the end when room is made */
    NO_FOLD = ROOM + 1
};

/* The path so far. When it outgrows the buffer its middle is folded away; the number of '/' in it is kept, so that ".."
 * climbs through it all the same. */
typedef struct writer {
    char *bytes;
    size_t length;
    size_t fold;   /* where the folded middle stands; NO_FOLD: nothing is folded */
    size_t hidden; /* '/' in it */
} writer;

static void
fold(writer *out)
{
    if (out->fold == NO_FOLD)
        out->fold = KEPT;
    const size_t end = out->length - KEPT; /* above the fold: ROOM is over twice KEPT */
    for (size_t i = out->fold; i < end; i++)
        out->hidden += out->bytes[i] == '/';
    memmove(out->bytes + out->fold, out->bytes + end, KEPT);
    out->length = out->fold + KEPT;
}

static void
put(writer *out, char c)
{
    if (out->length == ROOM)
        fold(out);
    out->bytes[out->length++] = c;
}

/* Takes the last segment and its '/' away. */
static void
climb(writer *out)
{
    const size_t floor = out->fold == NO_FOLD ? 0 : out->fold;
    while (out->length > floor)
        if (out->bytes[--out->length] == '/')
            return;
    if (out->fold == NO_FOLD)
        return; /* never above the root */
    if (out->hidden > 0) {
        out->hidden--;
        return;
    }
    out->fold = NO_FOLD;
    climb(out);
}

/* The bytes of "http://" in front of a host; 0: none. Servers take any scheme and serve the path behind it, so a list of
 * known ones would leave the others as a way around a path's policies (RFC 3986 3.1 spells a scheme). */
static size_t
scheme_length(tg_text raw)
{
    size_t at = 0;
    while (at < raw.length) {
        const char c = raw.data[at], letter = (char)(c | 0x20);
        if (!(letter >= 'a' && letter <= 'z') &&
            (at == 0 || !((c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.')))
            break;
        at++;
    }
    return at > 0 && raw.length - at >= 3 && memcmp(raw.data + at, "://", 3) == 0 ? at + 3 : 0;
}

/* From "http://host/path?query" to "/path". '#' ends a path where it is sent at all: servers cut there. */
static tg_text
path_of(tg_text raw)
{
    const size_t scheme = raw.length && raw.data[0] != '/' ? scheme_length(raw) : 0;
    if (scheme) {
        raw.data += scheme;
        raw.length -= scheme;
        while (raw.length && raw.data[0] != '/' && raw.data[0] != '?' && raw.data[0] != '#')
            raw.data++, raw.length--;
    }
    for (size_t i = 0; i < raw.length; i++)
        if (raw.data[i] == '?' || raw.data[i] == '#')
            raw.length = i;
    return raw;
}

/* Puts the digest where the middle was folded away. */
static void
mark(writer *out, tg_text path)
{
    static const char digits[] = "0123456789abcdef";
    uint8_t digest[DIGEST_BYTES];
    tg__digest_init(NULL); /* BLAKE2b is right even where this fails: only the faster forms are then not chosen */
    tg__digest(&path, 1, digest, sizeof digest);
    char *at = out->bytes + out->fold;
    memmove(at + MARK_BYTES, at, out->length - out->fold);
    *at++ = (char)0xff;
    for (size_t i = 0; i < sizeof digest; i++) {
        *at++ = digits[digest[i] >> 4];
        *at++ = digits[digest[i] & 15];
    }
    out->length += MARK_BYTES;
}

static __attribute__((noinline)) size_t
spell(tg_text path, bool resolve, char spelt[TG_PATH_BYTES_MAX], bool *differs)
{
    const char *p = path.data, *end = p + path.length;
    writer out = { spelt, 0, NO_FOLD, 0 };
    while (p < end) {
        size_t segment = 0;
        bool dots = true;
        put(&out, '/');
        if (*p == '/')
            p++;
        for (; p < end && *p != '/'; p++) {
            char c = *p;
            if (c == '%' && end - p > 2 && tg__hex_value(p[1]) >= 0 && tg__hex_value(p[2]) >= 0) {
                c = (char)(tg__hex_value(p[1]) << 4 | tg__hex_value(p[2]));
                p += 2;
                if (c == '/') {
                    p++;
                    break;
                }
            }
            put(&out, c);
            segment++;
            dots &= c == '.';
        }
        if (segment <= 2 && dots) { /* "", ".", "..": none of them is a segment */
            const bool trailing = p == end && segment == 0; /* a '/' at the end, which no spelling keeps */
            *differs |= !trailing;
            if (resolve || trailing) {
                out.length -= segment + 1;
                if (segment == 2)
                    climb(&out);
            }
        }
    }
    if (out.length == 0 && out.fold == NO_FOLD)
        put(&out, '/');
    if (out.fold != NO_FOLD)
        mark(&out, path);
    return out.length;
}

/* How long a path is that is spelt already as it is to be, as most are: nothing in it to decode, to resolve or to fold.
 * 0: it is none of these. */
static size_t
plain_length(tg_text raw)
{
    const char *p = raw.data, *const end = p + (raw.length < ROOM ? raw.length : ROOM);
    if (raw.length == 0 || *p != '/')
        return 0;
    while (++p < end && *p != '?' && *p != '#')
        if (*p == '%' || (p[-1] == '/' && (*p == '/' || *p == '.')))
            return 0;
    return p[-1] == '/' || (p == end && raw.length > ROOM) ? 0 : (size_t)(p - raw.data);
}

TG_EACH_REQUEST size_t
tg__path_spell(tg_text raw, bool resolve, char spelt[TG_PATH_BYTES_MAX], bool *differs)
{
    const size_t plain = plain_length(raw);
    *differs = false;
    if (plain) {
        memcpy(spelt, raw.data, plain);
        return plain;
    }
    return spell(path_of(raw.length ? raw : (tg_text){ "/", 1 }), resolve, spelt, differs);
}

size_t
tg__path_normalise(tg_text raw, char normal[TG_PATH_BYTES_MAX])
{
    bool differs;
    return tg__path_spell(raw, true, normal, &differs);
}

size_t
tg__host_normalise(tg_text raw, char normal[TG_HOST_BYTES_MAX])
{
    tg_text host = tg__text_trim(raw);
    if (host.length == 0)
        return 0;
    const char *bracket = memrchr(host.data, ']', host.length), *colon = memrchr(host.data, ':', host.length);
    if (colon && (!bracket || colon > bracket))
        host.length = (size_t)(colon - host.data);
    if (host.length > 1 && host.data[host.length - 1] == '.')
        host.length--;
    if (host.length > TG_HOST_BYTES_MAX)
        return 0;
    for (size_t i = 0; i < host.length; i++)
        normal[i] = host.data[i] >= 'A' && host.data[i] <= 'Z' ? (char)(host.data[i] | 0x20) : host.data[i];
    return host.length;
}

TG_EACH_REQUEST size_t
tg__method_normalise(tg_text raw, char normal[TG_METHOD_BYTES_MAX])
{
    if (raw.length == 0 || raw.length > TG_METHOD_BYTES_MAX)
        return 0;
    for (size_t i = 0; i < raw.length; i++)
        normal[i] = raw.data[i] >= 'a' && raw.data[i] <= 'z' ? (char)(raw.data[i] & ~0x20) : raw.data[i];
    if (raw.length != 4 || memcmp(normal, "HEAD", 4) != 0)
        return raw.length;
    memcpy(normal, "GET", 3);
    return 3;
}
