/* `by`: which parts of a request make an identity.
 * Must not enter: rules, stores, what becomes of a missing part. Allocates in tg__by_parse only. */
#include "base/words.h"
#include "identity/identity.h"

#include "identity/client.h"
#include "identity/fields.h"
#include "identity/path.h"

#include <stdlib.h>

enum { ALTERNATIVES_MAX = 8 };

typedef enum part_kind {
    KIND_IP,
    KIND_USER,
    KIND_ROUTE,
    KIND_PATH,
    KIND_METHOD,
    KIND_HOST,
    KIND_API_KEY,
    KIND_FINGERPRINT,
    KIND_HEADER,
    KIND_COOKIE,
    KIND_QUERY,
    KIND_FORM,
    KIND_JSON,
    KIND_KEY
} part_kind;

static const struct {
    const char *word;
    part_kind kind;
} kinds[] = {
    { "ip", KIND_IP },         { "user", KIND_USER }, { "route", KIND_ROUTE },     { "path", KIND_PATH },
    { "method", KIND_METHOD }, { "host", KIND_HOST }, { "api_key", KIND_API_KEY }, { "fingerprint", KIND_FINGERPRINT },
};
/* Those with a name behind them, which counts letter by letter. */
static const struct {
    const char *prefix;
    part_kind kind;
} named[] = {
    { "cookie:", KIND_COOKIE },
    { "query:", KIND_QUERY },
    { "form:", KIND_FORM },
    { "json:", KIND_JSON },
    { "key:", KIND_KEY }, /* the application says it */
};
#define KINDS_SHOWN                                                                                                    \
    "ip, user, route, path, method, host, api_key, fingerprint, header:NAME, cookie:NAME, query:NAME, form:NAME, "      \
    "json:NAME, key:NAME"

typedef struct part {
    part_kind kind;
    uint8_t length;
    char text[TG_NAME_BYTES_MAX + 1];    /* as it stands in the identity: header names in lower case, '_' as '-' */
    char written[TG_NAME_BYTES_MAX + 1]; /* as the operator wrote it, for messages */
    tg_header_name header;
    tg_text name; /* cookie, query, form, json: in `written` */
} part;

typedef struct alternative {
    size_t count;
    part parts[TG_PARTS_MAX];
} alternative;

struct tg_by {
    size_t count;
    bool plain; /* of kinds alone that plain_value() knows */
    char text[2 * TG_NAME_BYTES_MAX]; /* canonical, cut where too long: what the shared stand-in is named after */
    alternative alternatives[];
};

/* ---- parsing ---- */

static tg_status
word_error(tg_error *error, tg_text whole, tg_text word, const char *format, const char *more)
{
    char shown[TG_NAME_BYTES_MAX + 1];
    tg__error(error, TG_E_CONFIG, format, tg__text_show(word, shown, sizeof shown), more);
    if (error) {
        error->offset = word.data ? (size_t)(word.data - whole.data) : 0;
        error->length = word.length;
    }
    return TG_E_CONFIG;
}

/* A cookie's, parameter's or member's name: anything visible, so that it can be told from its neighbours. */
static bool
is_name(tg_text name)
{
    for (size_t i = 0; i < name.length; i++)
        if ((unsigned char)name.data[i] <= ' ' || name.data[i] == 0x7f)
            return false;
    return name.length > 0;
}

/* What was probably meant: a kind, or one that stands before a name. */
static const char *
nearest_kind(tg_text word)
{
    static const char *const whole[] = { "user", "route", "path", "method", "host", "api_key", "fingerprint", NULL };
    static const char *const before_names[] = { "header", "cookie", "query", "form", "json", "key", NULL };
    static const char *const with_names[] = { "header:NAME", "cookie:NAME", "query:NAME", "form:NAME", "json:NAME", "key:NAME" };
    const char *colon = memchr(word.data, ':', word.length);
    if (!colon) {
        const char *near = tg__word_nearest(word, whole);
        if (near)
            return near;
    }
    const tg_text head = { word.data, colon ? (size_t)(colon - word.data) : word.length };
    const char *near = tg__word_nearest(head, before_names);
    for (size_t i = 0; near && before_names[i]; i++)
        if (near == before_names[i])
            return with_names[i];
    return NULL;
}

static tg_status
parse_part(tg_text whole, tg_text word, part *into, tg_error *error)
{
    static const char header[] = "header:";
    *into = (part){ 0 };
    if (word.length == 0)
        return word_error(error, whole, word, "by: an empty word%s: expected one of %s", KINDS_SHOWN);
    if (word.length > TG_NAME_BYTES_MAX)
        return word_error(error, whole, word, "by: \"%s\" is longer than %s bytes", "64");
    memcpy(into->written, word.data, word.length);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (tg__text_is(word, kinds[i].word)) {
            into->kind = kinds[i].kind;
            into->length = (uint8_t)word.length;
            memcpy(into->text, word.data, word.length);
            return TG_OK;
        }
    }
    if (word.length >= 7 && tg__text_is_nocase((tg_text){ word.data, 7 }, header)) {
        if (!tg__header_name((tg_text){ word.data + 7, word.length - 7 }, &into->header))
            return word_error(error, whole, word, "by: \"%s\": expected a header's name behind \"header:\"%s", "");
        into->kind = KIND_HEADER;
        into->length = (uint8_t)word.length;
        memcpy(into->text, header, 7);
        memcpy(into->text + 7, into->header.text, into->header.length);
        return TG_OK;
    }
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++) {
        const size_t prefix = strlen(named[i].prefix);
        if (word.length < prefix || !tg__text_is_nocase((tg_text){ word.data, prefix }, named[i].prefix))
            continue;
        if (!is_name((tg_text){ word.data + prefix, word.length - prefix }))
            return word_error(error, whole, word, "by: \"%s\": expected a name behind \"%s\"", named[i].prefix);
        into->kind = named[i].kind;
        into->length = (uint8_t)word.length;
        memcpy(into->text, named[i].prefix, prefix);
        memcpy(into->text + prefix, word.data + prefix, word.length - prefix);
        into->name = (tg_text){ into->text + prefix, word.length - prefix };
        return TG_OK;
    }
    const char *near = nearest_kind(word);
    if (near)
        return word_error(error, whole, word, "by: unknown kind \"%s\": did you mean \"%s\"?", near);
    return word_error(error, whole, word, "by: unknown kind \"%s\": expected one of %s, joined by '+', or alternatives "
                                          "separated by '|'",
                      KINDS_SHOWN);
}

/* Takes the text up to the next `separator` off `rest`. */
static tg_text
next_word(tg_text *rest, char separator, bool *more)
{
    const char *end = rest->length ? memchr(rest->data, separator, rest->length) : NULL;
    const tg_text word = { rest->data, end ? (size_t)(end - rest->data) : rest->length };
    *more = end != NULL;
    if (end)
        *rest = (tg_text){ end + 1, rest->length - word.length - 1 };
    return word;
}

static tg_status
parse_alternative(tg_text whole, tg_text text, alternative *into, tg_error *error)
{
    bool more = true;
    while (more) {
        const tg_text word = tg__text_trim(next_word(&text, '+', &more));
        if (into->count == TG_PARTS_MAX)
            return word_error(error, whole, word, "by: \"%s\" is one part too many: at most %s are joined", "8");
        part *made = &into->parts[into->count];
        const tg_status status = parse_part(whole, word, made, error);
        if (status != TG_OK)
            return status;
        for (size_t i = 0; i < into->count; i++)
            if (strcmp(into->parts[i].text, made->text) == 0)
                return word_error(error, whole, word, "by: \"%s\" is joined with itself%s", "");
        into->count++;
    }
    return TG_OK;
}

static bool
is_plain(const tg_by *by)
{
    for (size_t a = 0; a < by->count; a++)
        for (size_t i = 0; i < by->alternatives[a].count; i++) {
            const part_kind kind = by->alternatives[a].parts[i].kind;
            if (kind != KIND_IP && kind != KIND_USER && kind != KIND_ROUTE && kind != KIND_METHOD)
                return false;
        }
    return true;
}

static void
write_text(tg_by *by)
{
    size_t used = 0;
    for (size_t a = 0; a < by->count; a++) {
        for (size_t i = 0; i < by->alternatives[a].count; i++) {
            const part *p = &by->alternatives[a].parts[i];
            if (used + p->length + 2u > sizeof by->text)
                return;
            if (used)
                by->text[used++] = i ? '+' : '|';
            memcpy(by->text + used, p->text, p->length);
            used += p->length;
        }
    }
}

tg_status
tg__by_parse(tg_text text, tg_by **by, tg_error *error)
{
    size_t count = 1;
    for (size_t i = 0; i < text.length; i++)
        count += text.data[i] == '|';
    if (count > ALTERNATIVES_MAX)
        return word_error(error, text, text, "by: \"%s\" has more than %s alternatives", "8");
    tg_by *made = calloc(1, sizeof *made + count * sizeof made->alternatives[0]);
    if (!made)
        return tg__error(error, TG_E_NOMEM, "by: %zu alternatives", count);
    tg_text rest = text;
    bool more = true;
    while (more) {
        const tg_text word = next_word(&rest, '|', &more);
        const tg_status status = parse_alternative(text, word, &made->alternatives[made->count], error);
        if (status != TG_OK) {
            tg__by_close(made);
            return status;
        }
        made->count++;
    }
    made->plain = is_plain(made);
    write_text(made);
    *by = made;
    return TG_OK;
}

void
tg__by_close(tg_by *by)
{
    free(by);
}

static bool
is_kind(const part *wanted, tg_text kind)
{
    tg_header_name name;
    if (wanted->kind != KIND_HEADER)
        return tg__text_is(kind, wanted->text);
    return kind.length > 7 && tg__text_is_nocase((tg_text){ kind.data, 7 }, "header:") &&
           tg__header_name((tg_text){ kind.data + 7, kind.length - 7 }, &name) &&
           strcmp(name.text, wanted->header.text) == 0;
}

bool
tg__by_names(const tg_by *by, const char *kind)
{
    const size_t length = strlen(kind);
    for (size_t a = 0; a < by->count; a++) {
        for (size_t i = 0; i < by->alternatives[a].count; i++) {
            const part *p = &by->alternatives[a].parts[i];
            const bool whole_kind = length && kind[length - 1] == ':'; /* "header:": any of them */
            if (whole_kind && p->length > length && tg__text_is_nocase((tg_text){ p->text, length }, kind))
                return true;
            if (is_kind(p, tg_text_of(kind)))
                return true;
        }
    }
    return false;
}

static unsigned
part_reads(const part *wanted, const tg_client *client)
{
    switch (wanted->kind) {
    case KIND_IP:
        return client->network_count || client->trusts_local ? TG_READ_HEADERS : 0; /* who else may speak for others? */
    case KIND_USER:
        return client->user_header.length ? TG_READ_HEADERS : 0;
    case KIND_ROUTE:
    case KIND_METHOD:
    case KIND_KEY:
        return 0;
    case KIND_PATH:
    case KIND_QUERY:
        return TG_READ_TARGET;
    case KIND_HOST:
    case KIND_API_KEY:
    case KIND_FINGERPRINT:
    case KIND_HEADER:
    case KIND_COOKIE:
    case KIND_FORM: /* a body is of the type that a header says */
    case KIND_JSON:
        break;
    }
    return TG_READ_HEADERS;
}

unsigned
tg__by_reads(const tg_by *by, const tg_client *client)
{
    unsigned reads = 0;
    for (size_t a = 0; a < by->count; a++)
        for (size_t i = 0; i < by->alternatives[a].count; i++)
            reads |= part_reads(&by->alternatives[a].parts[i], client);
    return reads;
}

static bool
is_of_body(const part *wanted)
{
    return wanted->kind == KIND_FORM || wanted->kind == KIND_JSON;
}

/* Whether a face can tell all parts of one alternative. */
static bool
face_knows(const alternative *one, unsigned faces)
{
    for (size_t i = 0; i < one->count; i++) {
        const unsigned needed = is_of_body(&one->parts[i])          ? TG_FACE_BODY
                                : one->parts[i].kind == KIND_USER  ? TG_FACE_USER
                                : one->parts[i].kind == KIND_ROUTE ? TG_FACE_ROUTE
                                : one->parts[i].kind == KIND_KEY   ? TG_FACE_KEYS
                                                                   : 0;
        if (needed & ~faces)
            return false;
    }
    return true;
}

const char *
tg__by_unknown(const tg_by *by, unsigned faces)
{
    for (size_t a = 0; a < by->count; a++)
        if (face_knows(&by->alternatives[a], faces))
            return NULL;
    const alternative *last = &by->alternatives[by->count - 1];
    for (size_t i = 0; i < last->count; i++)
        if (!face_knows(&(alternative){ .count = 1, .parts = { last->parts[i] } }, faces))
            return last->parts[i].written;
    return last->parts[0].written;
}

/* Where values that need another spelling are written. One `by` names a kind once per alternative, so one place for
 * each is enough. */
typedef struct scratch {
    char address[TG_ADDRESS_TEXT_MAX];
    char host[TG_HOST_BYTES_MAX];
    char method[TG_METHOD_BYTES_MAX];
    char path[TG_PATH_BYTES_MAX];
    char fields[TG_PARTS_MAX][TG_VALUE_BYTES_MAX]; /* one for each part */
} scratch;

static bool
present(tg_text text, tg_text *value)
{
    *value = text;
    return text.length > 0;
}

/* ---- from a request ---- */

static bool
key_value(const tg_request *request, tg_text name, tg_text *value)
{
    for (size_t i = 0; i < request->key_count; i++) {
        const tg_text kind = request->keys[i].kind;
        if (kind.length == name.length && memcmp(kind.data, name.data, name.length) == 0)
            return present(request->keys[i].value, value);
    }
    return false;
}

enum { PLAIN_BYTES_MAX = TG_ADDRESS_TEXT_MAX };
_Static_assert(TG_METHOD_BYTES_MAX <= PLAIN_BYTES_MAX, "a method is written there as well");

/* The kinds that most count by. */
static inline bool
plain_value(const part *wanted, const tg_client *client, const tg_request *request, char room[PLAIN_BYTES_MAX],
            tg_text *value)
{
    if (wanted->kind == KIND_IP)
        return tg__client_text(client, request, room, value);
    if (wanted->kind == KIND_USER)
        return tg__client_user(client, request, value);
    if (wanted->kind == KIND_ROUTE)
        return present(request->route, value);
    return present((tg_text){ room, tg__method_normalise(request->method, room) }, value);
}

static bool
value_of_request(const part *wanted, const tg_client *client, const tg_request *request, scratch *at, char *room,
                 tg_text *value)
{
    switch (wanted->kind) {
    case KIND_IP:
    case KIND_USER:
    case KIND_ROUTE:
    case KIND_METHOD:
        return plain_value(wanted, client, request, room, value);
    case KIND_PATH:
        *value = (tg_text){ at->path, tg__path_normalise(request->path, at->path) };
        return true;
    case KIND_HOST:
        return present((tg_text){ at->host, tg__host_normalise(request->host, at->host) }, value);
    case KIND_HEADER:
        return tg__header_single(request, &wanted->header, value);
    case KIND_COOKIE:
        return tg__cookie_value(request, wanted->name, value);
    case KIND_QUERY:
        return tg__query_value(request, wanted->name, room, value);
    case KIND_FORM:
        return tg__form_value(request, wanted->name, room, value);
    case KIND_JSON:
        return tg__json_value(request, wanted->name, room, value);
    case KIND_KEY:
        return key_value(request, wanted->name, value);
    case KIND_API_KEY:
        *value = (tg_text){ room, TG_DIGEST_BYTES };
        return tg__api_key(request, (uint8_t *)room);
    case KIND_FINGERPRINT:
        if (!tg__client_text(client, request, at->address, value))
            return false;
        tg__fingerprint(request, *value, (uint8_t *)room);
        *value = (tg_text){ room, TG_DIGEST_BYTES };
        return true;
    }
    return false;
}

/* ---- from values given by kind ---- */

static tg_status
value_of_values(const part *wanted, const tg_client *client, const tg_part *values, size_t value_count, scratch *at,
                char *room, tg_text *value, tg_error *error)
{
    tg_text given = { 0 };
    for (size_t i = 0; i < value_count; i++)
        if (is_kind(wanted, values[i].kind))
            given = values[i].value;
    bool found = present(given, value);
    if (!found)
        return TG_E_IDENTITY;
    switch (wanted->kind) {
    case KIND_IP: {
        const tg_status status = tg_client_normalise(client, given, at->address, error);
        *value = tg_text_of(at->address);
        return status == TG_OK ? TG_OK : TG_E_ARG; /* given, but no address: no alternative is a substitute for it */
    }
    case KIND_PATH:
        *value = (tg_text){ at->path, tg__path_normalise(given, at->path) };
        break;
    case KIND_METHOD:
        found = present((tg_text){ at->method, tg__method_normalise(given, at->method) }, value);
        break;
    case KIND_HOST:
        found = present((tg_text){ at->host, tg__host_normalise(given, at->host) }, value);
        break;
    case KIND_HEADER:
        found = present(tg__text_trim(given), value);
        break;
    case KIND_API_KEY:
        tg__digest(value, 1, (uint8_t *)room, TG_DIGEST_BYTES);
        *value = (tg_text){ room, TG_DIGEST_BYTES };
        break;
    case KIND_USER:
    case KIND_ROUTE:
    case KIND_FINGERPRINT:
    case KIND_COOKIE:
    case KIND_QUERY:
    case KIND_FORM:
    case KIND_JSON:
    case KIND_KEY:
        break;
    }
    return found ? TG_OK : TG_E_IDENTITY;
}

/* ---- the identity ---- */

static tg_status
report_missing(const part *wanted, char missing[TG_NAME_BYTES_MAX + 1], tg_error *error)
{
    memcpy(missing, wanted->written, sizeof wanted->written);
    return tg__error(error, TG_E_IDENTITY, "who is asking cannot be told: \"%s\" is missing", wanted->written);
}

/* Apart from the short way, which would else have these KiB of stack between its callers and what it calls. */
static __attribute__((noinline)) tg_status
find_parts(const tg_by *by, const tg_client *client, const tg_request *request, tg_identity *identity,
           char missing[TG_NAME_BYTES_MAX + 1], tg_error *error)
{
    const part *wanting = NULL;
    scratch at; /* not cleared: 4 KiB that most identities never touch */
    if (request->value_count)
        return tg__by_of_values(by, client, request->values, request->value_count, identity, missing, error);
    for (size_t a = 0; a < by->count; a++) {
        const alternative *one = &by->alternatives[a];
        tg_part parts[TG_PARTS_MAX];
        bool in_body = false;
        wanting = NULL;
        for (size_t i = 0; i < one->count && !wanting; i++) {
            parts[i].kind = (tg_text){ one->parts[i].text, one->parts[i].length };
            if (request->body_follows && !request->body_read && is_of_body(&one->parts[i]))
                in_body = true;
            else if (!value_of_request(&one->parts[i], client, request, &at, at.fields[i], &parts[i].value))
                wanting = &one->parts[i];
        }
        if (!wanting && in_body)
            return TG_E_UNSUPPORTED; /* later alternatives are for requests whose body lacks it */
        if (!wanting)
            return tg__identity_join(parts, one->count, identity, error);
    }
    return report_missing(wanting, missing, error);
}

/* All parts as they are, each put where it stays. false: some part is missing, or so long that it is hashed. */
static inline bool
join_plain(const tg_by *by, const tg_client *client, const tg_request *request, tg_identity *identity)
{
    for (size_t a = 0; a < by->count; a++) {
        const alternative *one = &by->alternatives[a];
        uint8_t *at = identity->bytes;
        size_t i = 0;
        for (; i < one->count; i++) {
            char room[PLAIN_BYTES_MAX];
            tg_text value;
            if (!plain_value(&one->parts[i], client, request, room, &value))
                break;
            at = tg__identity_put(identity, at, (tg_text){ one->parts[i].text, one->parts[i].length }, value);
            if (!at)
                return false;
        }
        if (i == one->count) {
            identity->length = (uint16_t)(at - identity->bytes);
            return true;
        }
    }
    return false;
}

TG_EACH_REQUEST tg_status
tg__by_of_request(const tg_by *by, const tg_client *client, const tg_request *request, tg_identity *identity,
                  char missing[TG_NAME_BYTES_MAX + 1], tg_error *error)
{
    if (by->plain && request->value_count == 0 && join_plain(by, client, request, identity))
        return TG_OK;
    return find_parts(by, client, request, identity, missing, error);
}

tg_status
tg__by_of_values(const tg_by *by, const tg_client *client, const tg_part *values, size_t value_count,
                 tg_identity *identity, char missing[TG_NAME_BYTES_MAX + 1], tg_error *error)
{
    const part *wanting = NULL;
    scratch at;
    for (size_t a = 0; a < by->count; a++) {
        const alternative *one = &by->alternatives[a];
        tg_part parts[TG_PARTS_MAX];
        wanting = NULL;
        for (size_t i = 0; i < one->count && !wanting; i++) {
            parts[i].kind = (tg_text){ one->parts[i].text, one->parts[i].length };
            const tg_status status = value_of_values(&one->parts[i], client, values, value_count, &at,
                                                     at.fields[i], &parts[i].value, error);
            if (status == TG_E_ARG) {
                memcpy(missing, one->parts[i].written, sizeof one->parts[i].written);
                return TG_E_IDENTITY;
            }
            if (status != TG_OK)
                wanting = &one->parts[i];
        }
        if (!wanting)
            return tg__identity_join(parts, one->count, identity, error);
    }
    return report_missing(wanting, missing, error);
}

void
tg__by_shared(const tg_by *by, tg_identity *identity)
{
    /* No kind is spelt "?": nobody can be counted here by naming themselves. */
    const tg_part everybody = { { "?", 1 }, tg_text_of(by->text) };
    const tg_status status = tg__identity_join(&everybody, 1, identity, NULL);
    if (status != TG_OK) {
        identity->length = 2;
        identity->bytes[0] = 1;
        identity->bytes[1] = '?';
    }
}
