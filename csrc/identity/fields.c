/* Values of queries, cookies, forms and JSON, found by name: see fields.h. */
#include "identity/fields.h"

#include "identity/headers.h"

static const tg_header_name COOKIE = { "cookie", 6 }, CONTENT_TYPE = { "content-type", 12 },
                            API_KEY = { "x-api-key", 9 }, AUTHORIZATION = { "authorization", 13 },
                            USER_AGENT = { "user-agent", 10 }, ACCEPT_LANGUAGE = { "accept-language", 15 };

static bool
same(tg_text a, tg_text b)
{
    return a.length == b.length && (a.length == 0 || memcmp(a.data, b.data, a.length) == 0);
}

/* What has been found so far. */
typedef struct finding {
    bool found, invalid;
    tg_text value;
} finding;

static void
met(finding *so_far, tg_text value)
{
    so_far->invalid |= so_far->found;
    so_far->found = true;
    so_far->value = value;
}

static bool
valid(const finding *so_far, tg_text *value)
{
    *value = so_far->value;
    return so_far->found && !so_far->invalid && value->length > 0 && value->length <= TG_VALUE_BYTES_MAX;
}

/* Takes the text up to the next separator off `rest`. false: nothing is left. */
static bool
next_piece(tg_text *rest, char separator, tg_text *piece)
{
    if (rest->length == 0)
        return false;
    const char *end = memchr(rest->data, separator, rest->length);
    *piece = (tg_text){ rest->data, end ? (size_t)(end - rest->data) : rest->length };
    const size_t taken = piece->length + (end != NULL);
    *rest = (tg_text){ rest->data + taken, rest->length - taken };
    return true;
}

static void
split_at(tg_text piece, char sign, tg_text *name, tg_text *value)
{
    const char *at = piece.length ? memchr(piece.data, sign, piece.length) : NULL;
    *name = (tg_text){ piece.data, at ? (size_t)(at - piece.data) : piece.length };
    *value = at ? (tg_text){ at + 1, piece.length - name->length - 1 } : (tg_text){ NULL, 0 };
}

/* ---- name=value&name=value (WHATWG URL, application/x-www-form-urlencoded) ---- */

/* The next decoded byte, or -1 at the end. */
static int
decoded(tg_text *rest)
{
    if (rest->length == 0)
        return -1;
    size_t taken = 1;
    int byte = (unsigned char)rest->data[0];
    if (byte == '+') {
        byte = ' ';
    } else if (byte == '%' && rest->length >= 3 && tg__hex_value(rest->data[1]) >= 0 && tg__hex_value(rest->data[2]) >= 0) {
        byte = tg__hex_value(rest->data[1]) * 16 + tg__hex_value(rest->data[2]);
        taken = 3;
    }
    *rest = (tg_text){ rest->data + taken, rest->length - taken };
    return byte;
}

static bool
decodes_to(tg_text coded, tg_text plain)
{
    for (size_t i = 0; i < plain.length; i++)
        if (decoded(&coded) != (unsigned char)plain.data[i])
            return false;
    return coded.length == 0;
}

static bool
pair_value(tg_text pairs, tg_text wanted, char room[TG_VALUE_BYTES_MAX], tg_text *value)
{
    finding so_far = { 0 };
    tg_text piece, name, coded;
    while (next_piece(&pairs, '&', &piece)) {
        split_at(piece, '=', &name, &coded);
        if (decodes_to(name, wanted))
            met(&so_far, coded);
    }
    if (!so_far.found || so_far.invalid)
        return false;
    size_t used = 0;
    for (int byte; (byte = decoded(&so_far.value)) != -1; room[used++] = (char)byte)
        if (used == TG_VALUE_BYTES_MAX)
            return false;
    *value = (tg_text){ room, used };
    return used > 0;
}

static tg_text
query_of(const tg_request *request)
{
    tg_text query = request->query, ignored;
    if (query.length == 0)
        split_at(request->path, '?', &ignored, &query);
    split_at(query, '#', &query, &ignored);
    return query;
}

bool
tg__query_value(const tg_request *request, tg_text name, char room[TG_VALUE_BYTES_MAX], tg_text *value)
{
    return pair_value(query_of(request), name, room, value);
}

bool
tg__query_has(const tg_request *request, tg_text wanted)
{
    tg_text query = query_of(request), piece, name, coded;
    while (next_piece(&query, '&', &piece)) {
        split_at(piece, '=', &name, &coded);
        if (decodes_to(name, wanted))
            return true;
    }
    return false;
}

/* ---- cookies (RFC 6265 5.4) ---- */

bool
tg__cookie_value(const tg_request *request, tg_text wanted, tg_text *value)
{
    finding so_far = { 0 };
    tg_text line, piece, name, found;
    tg_header_lines lines = tg__header_lines(request, &COOKIE);
    while (tg__header_previous(&lines, &line))
        while (next_piece(&line, ';', &piece)) {
            split_at(piece, '=', &name, &found);
            if (same(tg__text_trim(name), wanted))
                met(&so_far, tg__text_trim(found));
        }
    if (!valid(&so_far, value))
        return false;
    if (value->length >= 2 && value->data[0] == '"' && value->data[value->length - 1] == '"')
        *value = (tg_text){ value->data + 1, value->length - 2 };
    /* Python undoes "\054" and the like inside quotes; others do not: two readings, so none. */
    return value->length > 0 && !memchr(value->data, '\\', value->length);
}

/* ---- bodies ---- */

/* The declared type without its parameters, which go to `parameters`. false: none, or nothing to be read of it. */
static bool
body_type(const tg_request *request, tg_text *type, tg_text *parameters)
{
    tg_text line;
    if (!request->body_read || request->body.length == 0 || request->body.length >= TG_BODY_BYTES_MAX ||
        !tg__header_single(request, &CONTENT_TYPE, &line))
        return false;
    split_at(line, ';', type, parameters);
    *type = tg__text_trim(*type);
    return true;
}

/* One parameter of a header's value, unquoted (RFC 9110 5.6.6). Escapes inside quotes are two readings: missing. */
static bool
parameter(tg_text parameters, const char *wanted, tg_text *value)
{
    finding so_far = { 0 };
    while (parameters.length) {
        const char *at = parameters.data, *end = at + parameters.length;
        while (at < end && (*at == ' ' || *at == '\t' || *at == ';'))
            at++;
        const char *name = at;
        while (at < end && *at != '=' && *at != ';')
            at++;
        const tg_text key = tg__text_trim((tg_text){ name, (size_t)(at - name) });
        tg_text found = { NULL, 0 };
        if (at < end && *at == '=') {
            const char *begin = ++at;
            if (at < end && *at == '"') {
                begin = ++at;
                while (at < end && *at != '"')
                    if (*at++ == '\\')
                        return false;
                if (at == end)
                    return false;
                found = (tg_text){ begin, (size_t)(at++ - begin) };
                while (at < end && *at != ';')
                    at++;
            } else {
                while (at < end && *at != ';')
                    at++;
                found = tg__text_trim((tg_text){ begin, (size_t)(at - begin) });
            }
        }
        if (tg__text_is_nocase(key, wanted))
            met(&so_far, found);
        parameters = (tg_text){ at, (size_t)(end - at) };
    }
    return valid(&so_far, value);
}

/* The name that one part of a multipart body has, and where its content begins. */
static bool
part_name(tg_text part, tg_text *name, tg_text *content)
{
    static const char disposition[] = "content-disposition:";
    const char *blank = memmem(part.data, part.length, "\r\n\r\n", 4);
    bool found = false;
    if (!blank)
        return false;
    *content = (tg_text){ blank + 4, part.length - (size_t)(blank + 4 - part.data) };
    tg_text head = { part.data, (size_t)(blank - part.data) }, line, type, parameters;
    while (next_piece(&head, '\n', &line)) {
        if (line.length < sizeof disposition ||
            !tg__text_is_nocase((tg_text){ line.data, sizeof disposition - 1 }, disposition))
            continue;
        line.length -= line.data[line.length - 1] == '\r';
        split_at((tg_text){ line.data + sizeof disposition - 1, line.length - (sizeof disposition - 1) }, ';', &type,
                 &parameters);
        if (found || !parameter(parameters, "name", name))
            return false;
        found = true;
    }
    return found;
}

/* RFC 7578. */
static bool
multipart_value(tg_text body, tg_text boundary, tg_text wanted, tg_text *value)
{
    char mark[76] = "\r\n--";
    finding so_far = { 0 };
    if (boundary.length > 70)
        return false;
    memcpy(mark + 4, boundary.data, boundary.length);
    const size_t mark_length = boundary.length + 4;
    /* The first delimiter may stand at the very beginning, without a line before it. */
    const char *end = body.data + body.length, *at;
    if (body.length >= mark_length - 2 && memcmp(body.data, mark + 2, mark_length - 2) == 0)
        at = body.data + mark_length - 2;
    else if ((at = memmem(body.data, body.length, mark, mark_length)))
        at += mark_length;
    else
        return false;
    while (end - at >= 2 && memcmp(at, "--", 2) != 0) {
        const char *next = memmem(at, (size_t)(end - at), mark, mark_length);
        tg_text name, content;
        if (!next)
            return false; /* cut off */
        if (!part_name((tg_text){ at, (size_t)(next - at) }, &name, &content))
            return false;
        if (same(name, wanted))
            met(&so_far, content);
        at = next + mark_length;
    }
    return end - at >= 2 && valid(&so_far, value);
}

bool
tg__form_value(const tg_request *request, tg_text name, char room[TG_VALUE_BYTES_MAX], tg_text *value)
{
    tg_text type, parameters, boundary;
    if (!body_type(request, &type, &parameters))
        return false;
    if (tg__text_is_nocase(type, "application/x-www-form-urlencoded"))
        return pair_value(request->body, name, room, value);
    return tg__text_is_nocase(type, "multipart/form-data") && parameter(parameters, "boundary", &boundary) &&
           multipart_value(request->body, boundary, name, value);
}

/* ---- JSON (RFC 8259), as far as it takes to find one value ---- */

enum { JSON_DEPTH_MAX = 64 };

static void
json_blank(tg_text *rest)
{
    while (rest->length && (*rest->data == ' ' || *rest->data == '\t' || *rest->data == '\n' || *rest->data == '\r'))
        *rest = (tg_text){ rest->data + 1, rest->length - 1 };
}

static bool
json_sign(tg_text *rest, char sign)
{
    json_blank(rest);
    if (rest->length == 0 || *rest->data != sign)
        return false;
    *rest = (tg_text){ rest->data + 1, rest->length - 1 };
    return true;
}

/* A string without its quotes, escapes left in. */
static bool
json_string(tg_text *rest, tg_text *inside)
{
    if (!json_sign(rest, '"'))
        return false;
    for (size_t i = 0; i < rest->length; i++) {
        const unsigned char c = (unsigned char)rest->data[i];
        if (c < 0x20)
            return false;
        if (c == '\\')
            i++;
        if (c != '"')
            continue;
        *inside = (tg_text){ rest->data, i };
        *rest = (tg_text){ rest->data + i + 1, rest->length - i - 1 };
        return true;
    }
    return false;
}

static bool
json_unit(tg_text text, uint32_t *unit)
{
    *unit = 0;
    if (text.length < 4)
        return false;
    for (size_t i = 0; i < 4; i++) {
        const int digit = tg__hex_value(text.data[i]);
        if (digit < 0)
            return false;
        *unit = *unit << 4 | (uint32_t)digit;
    }
    return true;
}

static size_t
put_utf8(uint32_t c, char to[4])
{
    if (c < 0x80) {
        to[0] = (char)c;
        return 1;
    }
    const size_t length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; c >>= 6)
        to[i] = (char)(0x80 | (c & 0x3f));
    to[0] = (char)((length == 2 ? 0xc0 : length == 3 ? 0xe0 : 0xf0) | c);
    return length;
}

/* Undoes the escapes. SIZE_MAX: wrong, or longer than `room`. */
static size_t
json_unescape(tg_text inside, char room[TG_VALUE_BYTES_MAX])
{
    static const char signs[] = "\"\"\\\\//b\bf\fn\nr\rt\t";
    size_t used = 0;
    while (inside.length) {
        char bytes[4] = { inside.data[0] };
        size_t taken = 1, made = 1;
        if (inside.data[0] == '\\') {
            uint32_t unit, low;
            const char sign = inside.length > 1 ? inside.data[1] : '\0';
            const char *known = NULL;
            for (size_t i = 0; signs[i] && !known; i += 2)
                if (signs[i] == sign)
                    known = signs + i + 1;
            taken = 2;
            if (known) {
                bytes[0] = *known;
            } else if (sign == 'u' && json_unit((tg_text){ inside.data + 2, inside.length - 2 }, &unit)) {
                taken = 6;
                if (unit >= 0xd800 && unit < 0xdc00 && inside.length >= 12 && inside.data[6] == '\\' &&
                    inside.data[7] == 'u' && json_unit((tg_text){ inside.data + 8, inside.length - 8 }, &low) &&
                    low >= 0xdc00 && low < 0xe000) {
                    unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
                    taken = 12;
                } else if (unit >= 0xd800 && unit < 0xe000) {
                    return SIZE_MAX; /* half a pair is no character */
                }
                made = put_utf8(unit, bytes);
            } else {
                return SIZE_MAX;
            }
        }
        if (used + made > TG_VALUE_BYTES_MAX)
            return SIZE_MAX;
        memcpy(room + used, bytes, made);
        used += made;
        inside = (tg_text){ inside.data + taken, inside.length - taken };
    }
    return used;
}

static bool
json_word(tg_text *rest, tg_text *word)
{
    json_blank(rest);
    size_t length = 0;
    while (length < rest->length && rest->data[length] && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", rest->data[length]))
        length++;
    *word = (tg_text){ rest->data, length };
    *rest = (tg_text){ rest->data + length, rest->length - length };
    return length > 0;
}

/* Steps over one value, whatever it is; its text goes to `whole`. Without recursion: the depth is the sender's. */
static bool
json_skip(tg_text *rest, tg_text *whole)
{
    char open[JSON_DEPTH_MAX];
    size_t depth = 0;
    tg_text inside;
    json_blank(rest);
    const char *begin = rest->data;
    for (;;) {
        bool after_value = true;
        json_blank(rest);
        if (rest->length == 0)
            return false;
        if (*rest->data == '{' || *rest->data == '[') {
            const char close = *rest->data == '{' ? '}' : ']';
            if (depth == JSON_DEPTH_MAX)
                return false;
            json_sign(rest, *rest->data);
            if (!json_sign(rest, close)) {
                open[depth++] = close;
                after_value = false;
                if (close == '}' && !(json_string(rest, &inside) && json_sign(rest, ':')))
                    return false;
            }
        } else if (!(*rest->data == '"' ? json_string(rest, &inside) : json_word(rest, &inside))) {
            return false;
        }
        while (after_value && depth) {
            if (json_sign(rest, ',')) {
                after_value = false;
                if (open[depth - 1] == '}' && !(json_string(rest, &inside) && json_sign(rest, ':')))
                    return false;
            } else if (json_sign(rest, open[depth - 1])) {
                depth--;
            } else {
                return false;
            }
        }
        if (depth == 0) {
            *whole = (tg_text){ begin, (size_t)(rest->data - begin) };
            return true;
        }
    }
}

/* The member of one object. */
static bool
json_member(tg_text object, tg_text wanted, tg_text *value)
{
    char room[TG_VALUE_BYTES_MAX];
    finding so_far = { 0 };
    tg_text name, whole;
    if (!json_sign(&object, '{'))
        return false;
    if (json_sign(&object, '}'))
        return false;
    do {
        if (!json_string(&object, &name) || !json_sign(&object, ':') || !json_skip(&object, &whole))
            return false;
        const size_t length = json_unescape(name, room);
        if (length != SIZE_MAX && same((tg_text){ room, length }, wanted))
            met(&so_far, whole);
    } while (json_sign(&object, ','));
    *value = so_far.value;
    return json_sign(&object, '}') && so_far.found && !so_far.invalid;
}

/* 0, or digits that do not begin with it, perhaps with a '-' before them; the two other words. */
static bool
json_plain(tg_text word)
{
    if (tg__text_is(word, "true") || tg__text_is(word, "false"))
        return true;
    const bool minus = word.length && word.data[0] == '-';
    const tg_text digits = { word.data + minus, word.length - minus };
    if (digits.length == 0 || (digits.data[0] == '0' && (digits.length > 1 || minus)))
        return false;
    for (size_t i = 0; i < digits.length; i++)
        if (digits.data[i] < '0' || digits.data[i] > '9')
            return false;
    return true;
}

bool
tg__json_value(const tg_request *request, tg_text path, char room[TG_VALUE_BYTES_MAX], tg_text *value)
{
    tg_text type, parameters, rest = request->body, whole, name;
    if (!body_type(request, &type, &parameters))
        return false;
    if (!tg__text_is_nocase(type, "application/json") &&
        !(type.length > 5 && tg__text_is_nocase((tg_text){ type.data + type.length - 5, 5 }, "+json")))
        return false;
    if (!json_skip(&rest, &whole))
        return false;
    json_blank(&rest);
    if (rest.length)
        return false;
    while (next_piece(&path, '.', &name))
        if (!json_member(whole, name, &whole))
            return false;
    if (whole.length && whole.data[0] == '"') {
        tg_text inside;
        const size_t length = json_string(&whole, &inside) ? json_unescape(inside, room) : SIZE_MAX;
        *value = (tg_text){ room, length };
        return length != SIZE_MAX && length > 0;
    }
    *value = tg__text_trim(whole);
    return value->length <= TG_VALUE_BYTES_MAX && json_plain(*value);
}

/* ---- keys and fingerprints ---- */

bool
tg__api_key(const tg_request *request, uint8_t digest[TG_DIGEST_BYTES])
{
    static const char *const schemes[] = { "bearer", "token", "apikey" };
    tg_text key = { NULL, 0 }, line, scheme;
    if (!tg__header_single(request, &API_KEY, &key)) {
        tg_header_lines lines = tg__header_lines(request, &API_KEY);
        bool known = false;
        if (tg__header_previous(&lines, &line) || !tg__header_single(request, &AUTHORIZATION, &line))
            return false; /* sent twice, or not at all */
        split_at(line, ' ', &scheme, &key);
        for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
            known |= tg__text_is_nocase(scheme, schemes[i]);
        key = tg__text_trim(key);
        if (!known || key.length == 0)
            return false;
    }
    tg__digest(&key, 1, digest, TG_DIGEST_BYTES);
    return true;
}

void
tg__fingerprint(const tg_request *request, tg_text address, uint8_t digest[TG_DIGEST_BYTES])
{
    tg_text pieces[3] = { address };
    if (!tg__header_single(request, &USER_AGENT, &pieces[1]))
        pieces[1] = (tg_text){ NULL, 0 };
    if (!tg__header_single(request, &ACCEPT_LANGUAGE, &pieces[2]))
        pieces[2] = (tg_text){ NULL, 0 };
    tg__digest(pieces, 3, digest, TG_DIGEST_BYTES);
}
