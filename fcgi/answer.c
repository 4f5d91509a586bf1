/* Parameters in, CGI answer out: see answer.h.
 *
 * What the web server sets and what its client sent never mix: a client's header arrives only as HTTP_NAME, so it
 * cannot spell TIDEGATE_MODE or REMOTE_ADDR. The request is judged by REQUEST_URI alone: in a sub-request
 * SCRIPT_NAME and DOCUMENT_URI are those of the limiter's own location, and QUERY_STRING is empty. */
#include "answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- writing text; what does not fit is left out, and FCGI_TEXT_BYTES_MAX is several times what is ever written */

typedef struct writer {
    char *text;
    size_t length;
} writer;

static void
put(writer *out, tg_text text)
{
    if (text.length == 0 || text.length > FCGI_TEXT_BYTES_MAX - out->length)
        return;
    memcpy(out->text + out->length, text.data, text.length);
    out->length += text.length;
}

#define PUT(out, literal) put((out), (tg_text){ .data = (literal), .length = sizeof(literal) - 1 })

static void
put_number(writer *out, uint64_t number)
{
    char digits[20], *at = digits + sizeof digits;
    do {
        *--at = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    put(out, (tg_text){ .data = at, .length = (size_t)(digits + sizeof digits - at) });
}

/* Exactly, as a JSON number of seconds: no digit of a microsecond is rounded away. */
static void
put_seconds(writer *out, uint64_t us)
{
    if (us == TG_NEVER) {
        PUT(out, "null");
        return;
    }
    put_number(out, us / 1000000);
    uint32_t rest = (uint32_t)(us % 1000000);
    if (rest == 0)
        return;
    char digits[7] = ".000000";
    size_t length = 7;
    for (size_t i = 6; i > 0; i--, rest /= 10)
        digits[i] = (char)('0' + rest % 10);
    while (digits[length - 1] == '0')
        length--;
    put(out, (tg_text){ .data = digits, .length = length });
}

static void
put_field(writer *out, tg_text name, tg_text value)
{
    put(out, name);
    PUT(out, ": ");
    put(out, value);
    PUT(out, "\r\n");
}

static void
put_status(writer *out, int status, tg_text reason)
{
    PUT(out, "Status: ");
    put_number(out, (uint64_t)status);
    PUT(out, " ");
    put(out, reason);
    PUT(out, "\r\n");
}

/* ---- parameters */

/* "ip=203.0.113.7": what counts under one kind of a policy's `by`. */
typedef struct asked_key {
    tg_text kind, value;
} asked_key;

/* One decision that was asked for by name. */
typedef struct question {
    tg_text policy;
    asked_key keys[TG_DIMENSIONS_MAX];
    size_t key_count;
    uint64_t cost;
    bool peek;
    const char *wrong; /* what cannot be understood in it, or NULL */
} question;

typedef struct asked {
    tg_request request;
    question question;
    tg_text server_name;
    tg_text mode, next, token, now, batch, method;
    tg_text unknown; /* a TIDEGATE_ name that this version does not know */
    bool has_mode, has_now, has_uri, has_batch, has_cost;
    bool script_outside; /* SCRIPT_FILENAME is not below the listener's root */
    bool too_many_headers;
    bool bad;
} asked;

static bool
is(tg_text text, const char *word, size_t length)
{
    return text.length == length && memcmp(text.data, word, length) == 0;
}
#define IS(text, literal) is((text), (literal), sizeof(literal) - 1)

static bool
starts(tg_text text, const char *word, size_t length)
{
    return text.length > length && memcmp(text.data, word, length) == 0;
}
#define STARTS(text, literal) starts((text), (literal), sizeof(literal) - 1)

static bool
read_number(tg_text text, uint64_t *number)
{
    uint64_t read = 0;
    if (text.length == 0 || text.length > 18)
        return false;
    for (size_t i = 0; i < text.length; i++) {
        if (text.data[i] < '0' || text.data[i] > '9')
            return false;
        read = read * 10 + (uint64_t)(text.data[i] - '0');
    }
    *number = read;
    return true;
}

/* An empty value is none: a web server's variable that is not set. Of one kind the last counts. */
static void
read_key(question *one, tg_text text)
{
    const char *equals = text.length ? memchr(text.data, '=', text.length) : NULL;
    if (!equals || equals == text.data) {
        one->wrong = "TIDEGATE_KEY is not kind=value, for example ip=203.0.113.7";
        return;
    }
    const asked_key key = {
        .kind = { .data = text.data, .length = (size_t)(equals - text.data) },
        .value = { .data = equals + 1, .length = text.length - (size_t)(equals - text.data) - 1 },
    };
    for (size_t i = 0; i < one->key_count; i++)
        if (is(one->keys[i].kind, key.kind.data, key.kind.length)) {
            one->keys[i] = key;
            return;
        }
    if (one->key_count == TG_DIMENSIONS_MAX)
        one->wrong = "more kinds in TIDEGATE_KEY than one decision can have";
    else
        one->keys[one->key_count++] = key;
}

static void
read_cost(question *one, tg_text text)
{
    if (!read_number(text, &one->cost) || one->cost > TG_LIMIT_MAX)
        one->wrong = "TIDEGATE_COST is no whole number from 0 to 10000000000";
}

static void
read_peek(question *one, tg_text text)
{
    one->peek = IS(text, "1");
    if (!one->peek && !IS(text, "0") && text.length)
        one->wrong = "TIDEGATE_PEEK is neither 0 nor 1";
}

static void
read_own(asked *ask, tg_text name, tg_text value)
{
    if (IS(name, "TIDEGATE_MODE")) {
        ask->mode = value;
        ask->has_mode = true;
    } else if (IS(name, "TIDEGATE_POLICY")) {
        ask->question.policy = value;
    } else if (IS(name, "TIDEGATE_KEY")) {
        read_key(&ask->question, value);
    } else if (IS(name, "TIDEGATE_COST")) {
        read_cost(&ask->question, value);
        ask->has_cost = true;
    } else if (IS(name, "TIDEGATE_PEEK")) {
        read_peek(&ask->question, value);
    } else if (IS(name, "TIDEGATE_BATCH")) {
        ask->batch = value;
        ask->has_batch = true;
    } else if (IS(name, "TIDEGATE_NEXT")) {
        ask->next = value;
    } else if (IS(name, "TIDEGATE_METHOD")) {
        ask->method = value;
    } else if (IS(name, "TIDEGATE_TOKEN")) {
        ask->token = value;
    } else if (IS(name, "TIDEGATE_NOW_US")) {
        ask->now = value;
        ask->has_now = true;
    } else if (!IS(name, "TIDEGATE_LIMIT") && !IS(name, "TIDEGATE_REMAINING") && !IS(name, "TIDEGATE_RESET") &&
               !IS(name, "TIDEGATE_DECIDED_BY")) { /* what an authorizer in front was told by us */
        ask->unknown = name;
    }
}

/* ---- the application's script */

/* Apache writes where the proxied request goes before the script's path: "proxy:fcgi://host:port/srv/www/a.php". */
static tg_text
script_path(tg_text value)
{
    size_t at = 0;
    if (STARTS(value, "proxy:fcgi://"))
        at = sizeof "proxy:fcgi://" - 1;
    else if (STARTS(value, "proxy:balancer://"))
        at = sizeof "proxy:balancer://" - 1;
    else
        return value;
    const char *slash = memchr(value.data + at, '/', value.length - at);
    if (!slash)
        return (tg_text){ 0 };
    tg_text path = { .data = slash, .length = value.length - (size_t)(slash - value.data) };
    const char *query = memchr(path.data, '?', path.length);
    if (query)
        path.length = (size_t)(query - path.data);
    return path;
}

/* By its text: symbolic links below the root are the business of whoever owns it. */
static bool
is_below(const char *root, tg_text path)
{
    const size_t length = strlen(root);
    if (length == 0 || path.length <= length || memcmp(path.data, root, length) != 0)
        return false;
    if (length > 1 && path.data[length] != '/')
        return false;
    for (size_t i = 0; i < path.length; i++) {
        if (path.data[i] == '\0')
            return false;
        const size_t left = path.length - i;
        if (left >= 3 && memcmp(path.data + i, "/..", 3) == 0 && (left == 3 || path.data[i + 3] == '/'))
            return false;
    }
    return true;
}

bool
fcgi_answer_pass(void *context, const fcgi_listener *listener, tg_text name, tg_text *value)
{
    (void)context;
    const fcgi_rights *rights = &listener->rights;
    switch (name.length ? name.data[0] : '\0') {
    case 'T':
        return !STARTS(name, "TIDEGATE_");
    case 'S':
        if (!IS(name, "SCRIPT_FILENAME"))
            return true;
        *value = script_path(*value);
        return is_below(rights->root, *value);
    case 'P':
        if (IS(name, "PATH_TRANSLATED")) {
            *value = script_path(*value);
            return is_below(rights->root, *value);
        }
        return rights->php_values || (!IS(name, "PHP_VALUE") && !IS(name, "PHP_ADMIN_VALUE"));
    case 'H': /* a client's "Proxy:" field would tell the application which proxy to use */
        return !IS(name, "HTTP_PROXY");
    default:
        return true;
    }
}

/* Of a parameter sent twice the last counts: web servers append what overrides an included file. Header lines are the
 * client's and keep their order and number. */
static void
read_params(fcgi_answerer *answerer, const fcgi_listener *listener, fcgi_params params, asked *ask)
{
    tg_text name, value, content_type = { 0 }, content_type_header = { 0 };
    fcgi_params_step step;
    size_t header_count = 0;
    *ask = (asked){ .question.cost = 1 };
    while ((step = fcgi_params_next(&params, &name, &value)) == FCGI_PARAMS_PAIR) {
        switch (name.length ? name.data[0] : '\0') {
        case 'R':
            if (IS(name, "REQUEST_URI")) {
                ask->request.path = value;
                ask->has_uri = value.length > 0;
            } else if (IS(name, "REQUEST_METHOD")) {
                ask->request.method = value;
            } else if (IS(name, "REMOTE_ADDR")) {
                ask->request.peer = value;
            } else if (IS(name, "REMOTE_USER")) {
                ask->request.user = value;
            }
            break;
        case 'C':
            if (IS(name, "CONTENT_TYPE"))
                content_type = value;
            break;
        case 'S':
            if (IS(name, "SERVER_NAME"))
                ask->server_name = value;
            else if (IS(name, "SCRIPT_FILENAME"))
                ask->script_outside = ask->script_outside || !is_below(listener->rights.root, script_path(value));
            break;
        case 'T':
            if (STARTS(name, "TIDEGATE_"))
                read_own(ask, name, value);
            break;
        case 'H':
            if (!STARTS(name, "HTTP_"))
                break;
            if (IS(name, "HTTP_CONTENT_TYPE")) { /* some servers say it twice, and twice would be none */
                content_type_header = value;
                break;
            }
            if (header_count == FCGI_HEADERS_MAX) {
                ask->too_many_headers = true;
                break; /* the parameters behind still say how to refuse */
            }
            name = (tg_text){ .data = name.data + 5, .length = name.length - 5 };
            answerer->headers[header_count++] = (tg_header){ .name = name, .value = value };
            if (IS(name, "HOST"))
                ask->request.host = value;
            break;
        default:
            break;
        }
    }
    ask->bad = step == FCGI_PARAMS_BAD;
    if (content_type.length == 0)
        content_type = content_type_header;
    if (content_type.length && header_count < FCGI_HEADERS_MAX)
        answerer->headers[header_count++] = (tg_header){ .name = tg_text_of("Content-Type"), .value = content_type };
    ask->request.headers = answerer->headers;
    ask->request.header_count = header_count;
    if (ask->request.host.length == 0)
        ask->request.host = ask->server_name;
    if (ask->request.peer.length == 0) /* nginx on a unix socket says nothing, or "unix:" */
        ask->request.peer = tg_text_of("unix:");
}

/* ---- answers */

typedef struct refusal {
    int status;
    tg_text reason;
    tg_text body;
    const tg_field *fields;
    size_t field_count;
} refusal;

/* nginx's auth_request knows 2xx, 401 and 403; it turns anything else into a 500 and an error line for each. So what is
 * meant travels in fields, from which the web server's configuration makes the real answer. */
static void
put_auth_refusal(writer *out, const refusal *no)
{
    if (no->status == 401)
        PUT(out, "Status: 401 Unauthorized\r\n");
    else
        PUT(out, "Status: 403 Forbidden\r\n");
    for (size_t i = 0; i < no->field_count; i++)
        if (!IS(no->fields[i].name, "Content-Type"))
            put_field(out, no->fields[i].name, no->fields[i].value);
    PUT(out, "X-Tidegate-Status: ");
    put_number(out, (uint64_t)no->status);
    PUT(out, "\r\n");
    /* The sub-request's body never reaches the client: the body to send goes in a field. It is one line of text. */
    tg_text body = no->body;
    while (body.length && (body.data[body.length - 1] == '\n' || body.data[body.length - 1] == '\r'))
        body.length--;
    for (size_t i = 0; i < body.length; i++)
        if ((unsigned char)body.data[i] < 0x20)
            body.length = 0;
    if (body.length)
        put_field(out, tg_text_of("X-Tidegate-Body"), body);
    PUT(out, "\r\n");
}

static void
put_body(writer *out, tg_text body, bool head)
{
    PUT(out, "Content-Length: ");
    put_number(out, body.length);
    PUT(out, "\r\n\r\n");
    if (!head)
        put(out, body);
}

static void
put_refusal(writer *out, fcgi_mode how, const refusal *no, bool head)
{
    if (how == FCGI_MODE_AUTH) {
        put_auth_refusal(out, no);
        return;
    }
    put_status(out, no->status, no->reason);
    for (size_t i = 0; i < no->field_count; i++)
        put_field(out, no->fields[i].name, no->fields[i].value);
    put_body(out, no->body, head);
}

/* What JSON and a header field hold as it is. */
static void
copy_plain(char *plain, size_t bytes, const char *text)
{
    size_t length = 0;
    for (; text[length] && length < bytes - 1; length++) {
        const char c = text[length];
        plain[length] = c == '"' ? '\'' : c == '\\' || (unsigned char)c < 0x20 || (unsigned char)c > 0x7e ? '?' : c;
    }
    plain[length] = '\0';
}

/* The web server asked for something that cannot be: its configuration is wrong, not its client. Answered closed, or a
 * mistyped word would switch the limits off. What of `message` JSON cannot hold is replaced. */
static void
put_misuse(writer *out, fcgi_mode how, int status, const char *reason, const char *code, const char *message, bool head)
{
    static const tg_field type = {
        .name = { .data = "Content-Type", .length = 12 },
        .value = { .data = "application/json", .length = 16 },
    };
    char body[768], plain[640];
    copy_plain(plain, sizeof plain, message);
    const int length = snprintf(body, sizeof body, "{\"code\": \"%s\", \"message\": \"%s\"}", code, plain);
    const refusal no = {
        .status = status,
        .reason = tg_text_of(reason),
        .body = { .data = body, .length = length < 0 ? 0 : (size_t)length < sizeof body ? (size_t)length
                                                                                        : sizeof body - 1 },
        .fields = &type,
        .field_count = 1,
    };
    if (how == FCGI_MODE_AUTH && status >= 500) {
        /* nginx makes its own 500 of it, and a line in its error log: as it should. */
        put_status(out, status, no.reason);
        PUT(out, "\r\n");
        return;
    }
    put_refusal(out, how, &no, head);
}

static void
put_decision_json(writer *out, const tg_judgement *judgement)
{
    const tg_decision *decision = &judgement->decision;
    if (judgement->outcome == TG_UNMATCHED || judgement->outcome == TG_EXEMPT) {
        PUT(out, "{\"allowed\": true, \"policy\": null}");
        return;
    }
    const bool refused = judgement->status != 0;
    if (refused)
        PUT(out, "{\"allowed\": false, \"policy\": \"");
    else
        PUT(out, "{\"allowed\": true, \"policy\": \"");
    put(out, tg_text_of(judgement->policy)); /* names are [A-Za-z0-9_.-] */
    if (refused) {
        PUT(out, "\", \"status\": ");
        put_number(out, (uint64_t)judgement->status);
        if (judgement->outcome == TG_UNIDENTIFIED) {
            PUT(out, "}");
            return;
        }
        PUT(out, ", \"retry_after\": ");
        put_seconds(out, decision->retry_after_us);
    } else {
        PUT(out, "\"");
    }
    if (decision->degraded) {
        PUT(out, ", \"degraded\": true}");
        return;
    }
    PUT(out, ", \"limit\": ");
    put_number(out, decision->limit);
    PUT(out, ", \"burst\": ");
    put_number(out, decision->burst);
    PUT(out, ", \"remaining\": ");
    put_number(out, decision->remaining);
    PUT(out, ", \"reset_after\": ");
    put_seconds(out, decision->reset_after_us);
    PUT(out, ", \"delay\": ");
    put_seconds(out, decision->delay_us);
    PUT(out, ", \"degraded\": false}");
}

static void
put_json_answer(writer *out, tg_text json, bool head)
{
    PUT(out, "Content-Type: application/json\r\n");
    put_body(out, json, head);
}

/* For the next handler's environment: servers hand on an authorizer's Variable-NAME as NAME. */
static void
put_variables(writer *out, const tg_judgement *judgement)
{
    if (judgement->outcome != TG_ALLOWED)
        return;
    put_field(out, tg_text_of("Variable-TIDEGATE_DECIDED_BY"), tg_text_of(judgement->policy));
    const tg_decision *decision = &judgement->decision;
    if (decision->degraded)
        return;
    PUT(out, "Variable-TIDEGATE_LIMIT: ");
    put_number(out, decision->limit);
    PUT(out, "\r\nVariable-TIDEGATE_REMAINING: ");
    put_number(out, decision->remaining);
    PUT(out, "\r\nVariable-TIDEGATE_RESET: ");
    put_number(out, decision->reset_after_us / 1000000 + (decision->reset_after_us % 1000000 != 0));
    PUT(out, "\r\n");
}

/* `next`: FCGI_MODE_XACCEL only. For a relay only the fields are written: they go before the application's own. */
static void
put_allowed(writer *out, fcgi_mode how, const tg_judgement *judgement, const tg_answer *answer, tg_text next, bool head)
{
    /* A 200 is left unsaid: some servers pass a Status line on to the client as a field of its own. */
    if (how == FCGI_MODE_AUTH)
        PUT(out, "Status: 204 No Content\r\n");
    else if (how == FCGI_MODE_AUTHORIZER)
        PUT(out, "Status: 200 OK\r\n"); /* an authorizer without fields still has to say something */
    else if (how == FCGI_MODE_XACCEL)
        put_field(out, tg_text_of("X-Accel-Redirect"), next);
    for (size_t i = 0; i < answer->field_count; i++)
        put_field(out, answer->fields[i].name, answer->fields[i].value);
    if (how == FCGI_MODE_RELAY)
        return;
    if (how == FCGI_MODE_AUTHORIZER)
        put_variables(out, judgement);
    if (how != FCGI_MODE_ANSWER) {
        PUT(out, "\r\n");
        return;
    }
    char json[640];
    writer body = { .text = json };
    put_decision_json(&body, judgement);
    put_json_answer(out, (tg_text){ .data = json, .length = body.length }, head);
}

/* ---- decisions by name */

void
fcgi_answerer_fini(fcgi_answerer *answerer)
{
    fcgi_judge_fini(&answerer->judge);
}

const tg_judgement *
fcgi_answer_judgement(const fcgi_answerer *answerer)
{
    return &answerer->now.judgements[0];
}

tg_status
fcgi_answer_check(tg_gate *gate, const fcgi_listener *listener, tg_error *error)
{
    for (size_t i = 0; i < listener->rights.policy_count; i++) {
        tg_limiter *limiter;
        const tg_status status = tg_gate_limiter(gate, tg_text_of(listener->rights.policies[i]), &limiter, error);
        if (status != TG_OK)
            return status;
        tg_limiter_close(limiter);
    }
    return TG_OK;
}

static bool
may_name(const fcgi_rights *rights, tg_text policy)
{
    for (size_t i = 0; i < rights->policy_count; i++)
        if (is(policy, rights->policies[i], strlen(rights->policies[i])))
            return true;
    return rights->policy_count == 0;
}

/* Puts the question into the gate's words, `values` being the room for its keys. NULL, or what is wrong with it. */
static const char *
word_question(const fcgi_rights *rights, const question *one, tg_request *request, tg_part values[TG_DIMENSIONS_MAX])
{
    tg_text policy = one->policy;
    if (one->wrong)
        return one->wrong;
    if (policy.length == 0 && rights->policy_count == 1)
        policy = tg_text_of(rights->policies[0]);
    if (policy.length == 0)
        return rights->policy_count ? "TIDEGATE_POLICY is missing: this socket's policies= lists several"
                                    : "TIDEGATE_POLICY is missing: a key and a batch need one";
    if (!may_name(rights, policy))
        return "TIDEGATE_POLICY names a policy that this socket's policies= does not list";
    request->policy = policy;
    for (size_t i = 0; i < one->key_count; i++)
        values[i] = (tg_part){ .kind = one->keys[i].kind, .value = one->keys[i].value };
    request->values = values;
    request->value_count = one->key_count;
    return NULL;
}

/* ---- batches: one line a decision, each a query string (policy=login&key=ip%3D203.0.113.7&cost=2&peek=1) */

static int
read_hex(char digit)
{
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    digit = (char)(digit | 0x20);
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* application/x-www-form-urlencoded, into `room`; never longer than what is read. false: a broken escape. */
static bool
decode(tg_text text, char *room, tg_text *decoded)
{
    size_t length = 0;
    for (size_t i = 0; i < text.length; i++) {
        char c = text.data[i];
        if (c == '+') {
            c = ' ';
        } else if (c == '%') {
            const int high = text.length - i > 2 ? read_hex(text.data[i + 1]) : -1;
            const int low = text.length - i > 2 ? read_hex(text.data[i + 2]) : -1;
            if (high < 0 || low < 0)
                return false;
            c = (char)(high << 4 | low);
            i += 2;
        }
        room[length++] = c;
    }
    *decoded = (tg_text){ .data = room, .length = length };
    return true;
}

static tg_text
cut(tg_text *text, char at)
{
    const char *found = text->length ? memchr(text->data, at, text->length) : NULL;
    const tg_text first = { .data = text->data, .length = found ? (size_t)(found - text->data) : text->length };
    const size_t skipped = found ? first.length + 1 : first.length;
    *text = (tg_text){ .data = text->data + skipped, .length = text->length - skipped };
    return first;
}

static void
read_line(tg_text line, char *room, question *one)
{
    *one = (question){ .cost = 1 };
    if (line.length > FCGI_BATCH_LINE_BYTES_MAX) {
        one->wrong = "a line of the batch is too long";
        return;
    }
    while (line.length > 0) {
        tg_text value = cut(&line, '&');
        const tg_text name = cut(&value, '=');
        tg_text decoded;
        if (!decode(value, room, &decoded)) {
            one->wrong = "a line of the batch is not percent-encoded rightly";
            return;
        }
        room += decoded.length;
        if (IS(name, "policy"))
            one->policy = decoded;
        else if (IS(name, "key"))
            read_key(one, decoded);
        else if (IS(name, "cost"))
            read_cost(one, decoded);
        else if (IS(name, "peek"))
            read_peek(one, decoded);
        else
            one->wrong = "a line of the batch has a name that is none of policy, key, cost and peek";
    }
}

static void
put_line(writer *body, bool first, const char *wrong, const tg_judgement *judgement)
{
    char plain[240];
    if (!first)
        PUT(body, ", ");
    if (!wrong) {
        put_decision_json(body, judgement);
        return;
    }
    copy_plain(plain, sizeof plain, wrong);
    PUT(body, "{\"allowed\": false, \"status\": 500, \"message\": \"");
    put(body, tg_text_of(plain));
    PUT(body, "\"}");
}

static tg_text
cut_line(tg_text *batch)
{
    tg_text line = cut(batch, '\n');
    if (line.length && line.data[line.length - 1] == '\r')
        line.length--;
    return line;
}

/* NULL, or what is wrong with the line. */
static const char *
word_line(const fcgi_rights *rights, tg_text line, char *room, tg_request *request, tg_part values[TG_DIMENSIONS_MAX],
          uint64_t *cost)
{
    question one;
    read_line(line, room, &one);
    *request = (tg_request){ .peek = one.peek };
    *cost = one.cost;
    if (!one.wrong && one.key_count == 0)
        return "TIDEGATE_KEY is missing: who is meant cannot be told without";
    return word_question(rights, &one, request, values);
}

/* Each line is decided by itself, in order; one that cannot be is told so and refused. `judged`: the lines are decided
 * already. */
static void
put_batch(writer *out, fcgi_answerer *answerer, const fcgi_rights *rights, tg_text batch, const fcgi_judging *judged,
          bool head)
{
    char json[FCGI_TEXT_BYTES_MAX - 256];
    writer body = { .text = json };
    PUT(&body, "{\"decisions\": [");
    for (size_t i = 0; judged && i < judged->line_count; i++) {
        const fcgi_line *line = &judged->lines[i];
        put_line(&body, i == 0, line->status == TG_OK ? NULL : line->error.message, &line->judgement);
    }
    for (bool first = true; !judged && batch.length > 0; first = false) {
        tg_request request;
        tg_part values[TG_DIMENSIONS_MAX];
        uint64_t cost;
        fcgi_judging *now = &answerer->now;
        const char *wrong = word_line(rights, cut_line(&batch), answerer->line, &request, values, &cost);
        now->count = 0;
        if (!wrong) {
            fcgi_judging_begin(now, &request, cost);
            wrong = now->status == TG_OK ? NULL : now->error.message;
        }
        put_line(&body, first, wrong, &now->judgements[0]);
    }
    PUT(&body, "]}");
    put_json_answer(out, (tg_text){ .data = json, .length = body.length }, head);
}

/* All lines at once, where the store is not waited for. NULL: out of memory. */
static fcgi_judging *
ask_batch(fcgi_answerer *answerer, const fcgi_rights *rights, tg_text batch, size_t line_count)
{
    fcgi_judging *judging = fcgi_judging_new(&answerer->judge);
    if (!judging)
        return NULL;
    judging->lines = malloc(line_count * sizeof *judging->lines + batch.length + 1); /* and their texts, decoded */
    if (!judging->lines) {
        fcgi_judging_free(judging);
        return NULL;
    }
    char *room = (char *)(judging->lines + line_count);
    for (; judging->line_count < line_count; judging->line_count++) {
        fcgi_line *line = &judging->lines[judging->line_count];
        const tg_text text = cut_line(&batch);
        line->call = NULL;
        const char *wrong = word_line(rights, text, room, &line->request, line->values, &line->cost);
        line->status = wrong ? TG_E_ARG : TG_OK;
        if (wrong)
            snprintf(line->error.message, sizeof line->error.message, "%s", wrong);
        room += text.length;
    }
    fcgi_judging_begin_lines(judging);
    return judging;
}

static size_t
count_lines(tg_text batch)
{
    size_t lines = 0;
    while (batch.length > 0) {
        cut(&batch, '\n');
        lines++;
    }
    return lines;
}

/* ---- one call */

/* As long for a wrong token as for the right one, wherever they differ. */
static bool
token_fits(const fcgi_rights *rights, tg_text token)
{
    unsigned char differs = token.length != rights->token_length;
    for (size_t i = 0; i < rights->token_length; i++)
        differs |= (unsigned char)(rights->token[i] ^ (token.length ? token.data[i % token.length] : '\0'));
    return differs == 0;
}

/* Only a named location: with a path nginx would make a GET of a POST. Nothing of it can end the field. */
static bool
is_named_location(tg_text next)
{
    if (next.length < 2 || next.length > 128 || next.data[0] != '@')
        return false;
    for (size_t i = 1; i < next.length; i++) {
        const char c = next.data[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
              c == '.'))
            return false;
    }
    return true;
}

/* What is wrong with the question itself, or NULL. */
static const char *
find_misuse(const fcgi_answerer *answerer, const fcgi_rights *rights, const asked *ask, bool mode_known, fcgi_mode mode,
            char *room, size_t room_bytes)
{
    const question *one = &ask->question;
    if (ask->bad)
        return "the parameters are cut off or damaged";
    if (!mode_known)
        return "TIDEGATE_MODE is unknown; expected answer, auth, xaccel or relay";
    if (ask->unknown.length) {
        /* Never half: a setting that is not heeded would limit something else than was meant. */
        char name[48];
        size_t length = 0;
        for (; length < ask->unknown.length && length < sizeof name - 1; length++) {
            const char c = ask->unknown.data[length];
            name[length] = (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ? c : '?';
        }
        name[length] = '\0';
        snprintf(room, room_bytes, "parameter %s is not available in this version", name);
        return room;
    }
    if (!fcgi_rights_allow(rights, mode)) {
        snprintf(room, room_bytes, "this socket does not serve %s; its --listen has to list it in modes=",
                 fcgi_mode_name(mode));
        return room;
    }
    if (!rights->keyed && (one->key_count || ask->has_cost || one->peek || ask->has_batch))
        return "keys, costs, peeks and batches are not taken on this socket; its --listen has to say keyed=yes";
    if (one->wrong)
        return one->wrong;
    if ((one->peek || ask->has_batch) && mode != FCGI_MODE_ANSWER)
        return "TIDEGATE_PEEK and TIDEGATE_BATCH are for the mode answer only";
    if (mode == FCGI_MODE_XACCEL && !is_named_location(ask->next))
        return "TIDEGATE_NEXT has to be a named location such as @app";
    if (mode != FCGI_MODE_XACCEL && ask->next.length)
        return "TIDEGATE_NEXT is for the mode xaccel only";
    if (ask->has_now && !answerer->manual)
        return "TIDEGATE_NOW_US needs a daemon started with --manual-clock";
    if (!ask->has_now && answerer->manual)
        return "TIDEGATE_NOW_US is missing: this daemon runs on a manual clock";
    if (ask->has_batch) {
        const size_t lines = count_lines(ask->batch);
        return lines >= 1 && lines <= FCGI_BATCH_MAX ? NULL : "TIDEGATE_BATCH has no line, or more than 32";
    }
    if (one->key_count && mode == FCGI_MODE_ANSWER)
        return NULL; /* a program that asks for itself has no request to tell of */
    if (!ask->has_uri)
        return "REQUEST_URI is missing; the web server has to pass it";
    if (ask->request.method.length == 0)
        return "REQUEST_METHOD is missing; the web server has to pass it";
    return NULL;
}

static bool
is_repeatable(tg_text method)
{
    return IS(method, "GET") || IS(method, "HEAD") || IS(method, "OPTIONS");
}

void
fcgi_answer_forget(void *context, void *held)
{
    (void)context;
    fcgi_judging_forget(held);
}

void *
fcgi_answer_go_on(void *context, void *held)
{
    (void)context;
    fcgi_judging *judging = held;
    for (size_t i = 0; i < judging->count; i++)
        if (judging->judgements[i].settles && judging->stage == FCGI_STAGE_HELD) {
            judging->stage = FCGI_STAGE_PASSED;
            return judging;
        }
    fcgi_judging_free(judging);
    return NULL;
}

/* The fields of a CGI answer, into answerer->headers; its status. */
static int
read_head(fcgi_answerer *answerer, tg_text head, size_t *header_count)
{
    uint64_t status = 200;
    bool said = false, moved = false;
    *header_count = 0;
    while (head.length > 0 && *header_count < FCGI_HEADERS_MAX) {
        tg_text value = cut(&head, '\n');
        if (value.length && value.data[value.length - 1] == '\r')
            value.length--;
        const tg_text name = cut(&value, ':');
        while (value.length && (value.data[0] == ' ' || value.data[0] == '\t'))
            value = (tg_text){ .data = value.data + 1, .length = value.length - 1 };
        if (name.length == 6 && strncasecmp(name.data, "Status", 6) == 0) {
            tg_text rest = value;
            said = read_number(cut(&rest, ' '), &status) && status >= 100 && status < 1000;
        } else if (name.length == 8 && strncasecmp(name.data, "Location", 8) == 0) {
            moved = true;
        }
        answerer->headers[(*header_count)++] = (tg_header){ .name = name, .value = value };
    }
    return said ? (int)status : moved ? 302 : 200; /* RFC 3875 6.2 */
}

void
fcgi_answer_settle(void *context, void *held, int status, tg_text head)
{
    fcgi_answerer *answerer = context;
    size_t header_count = 0;
    if (status == 0)
        status = read_head(answerer, head, &header_count);
    fcgi_judging_settle(held, status, answerer->headers, header_count);
}

/* How long an allowed request is to wait for its turn: a leaky bucket lets through one by one. Who asks for a decision
 * as JSON is told. */
static uint64_t
hold_us(fcgi_answerer *answerer, const fcgi_listener *listener, fcgi_mode how, const fcgi_judging *judging)
{
    uint64_t delay_us = 0;
    for (size_t i = 0; i < judging->count; i++)
        if (judging->judgements[i].decision.delay_us > delay_us)
            delay_us = judging->judgements[i].decision.delay_us;
    if (delay_us == 0 || how == FCGI_MODE_ANSWER || listener->rights.hold_us == 0)
        return 0;
    if (delay_us <= listener->rights.hold_us)
        return delay_us;
    fcgi_log_rarely(&answerer->hold_gate, FCGI_WARN, "held-too-short",
                    "%s: a turn comes in %.3f s and hold= is less; it goes on then", listener->text,
                    (double)delay_us / 1e6);
    return listener->rights.hold_us;
}

/* What is to become of an allowed request besides its answer. The judging is the loop's afterwards, or done with. */
static void
let_pass(fcgi_answerer *answerer, const fcgi_call *call, fcgi_mode how, fcgi_judging *judging)
{
    fcgi_order *order = call->order;
    bool settles = false;
    for (size_t i = 0; i < judging->count && how == FCGI_MODE_RELAY; i++)
        settles = settles || judging->judgements[i].settles;
    order->hold_us = hold_us(answerer, call->listener, how, judging);
    order->relay = how == FCGI_MODE_RELAY;
    const fcgi_stage stage = order->hold_us ? FCGI_STAGE_HELD : FCGI_STAGE_PASSED;
    if (judging == &answerer->now) {
        order->held = settles || order->hold_us ? fcgi_judging_keep(&answerer->judge, judging, stage) : NULL;
    } else if (settles || order->hold_us) {
        judging->stage = stage;
        order->held = judging;
    } else {
        fcgi_judging_free(judging);
    }
    if (order->hold_us && !order->held)
        order->hold_us = 0; /* out of memory: it goes on at once, and what it took stays taken */
}

/* A relayed request whose policies ask for its body is judged twice: before the body by what needs none, then by all,
 * where what was taken already is not taken again. NULL: out of memory. */
static fcgi_judging *
judge_request(fcgi_answerer *answerer, const fcgi_call *call, const asked *ask)
{
    fcgi_judging *judging = call->held;
    if (!judging && !answerer->judge.client) {
        judging = &answerer->now;
        judging->count = 0;
    } else if (!judging) {
        judging = fcgi_judging_new(&answerer->judge);
    }
    if (judging)
        fcgi_judging_begin(judging, &ask->request, ask->question.cost);
    return judging;
}

static void
leave_pending(const fcgi_call *call, fcgi_mode how, fcgi_judging *judging)
{
    call->order->pends = true;
    call->order->streams = how == FCGI_MODE_RELAY;
    call->order->held = judging;
    call->order->ticket = &judging->ticket;
}

/* The end of a judging that lets nothing pass. */
static void
drop(const fcgi_answerer *answerer, fcgi_judging *judging)
{
    if (!judging || judging == &answerer->now)
        return;
    if (judging->count > 0 && (judging->count > 1 || judging->status != TG_OK))
        fcgi_judging_give_back(judging); /* refused by its body is refused: nothing was taken */
    else
        fcgi_judging_free(judging);
}

static void
put_judged(writer *out, fcgi_answerer *answerer, const fcgi_call *call, fcgi_mode how, const asked *ask, bool head,
           fcgi_judging *judging)
{
    const tg_judgement *judgement = &judging->judgements[judging->count - 1];
    const tg_answer *answer = &judging->answer;
    if (ask->question.peek) { /* asked about, not refused */
        char json[640];
        writer body = { .text = json };
        put_decision_json(&body, judgement);
        put_json_answer(out, (tg_text){ .data = json, .length = body.length }, head);
        drop(answerer, judging);
    } else if (judgement->status != 0) {
        const refusal no = {
            .status = answer->status,
            .reason = tg_text_of(answer->reason),
            .body = answer->body,
            .fields = answer->fields,
            .field_count = answer->field_count,
        };
        put_refusal(out, how, &no, head);
        drop(answerer, judging);
    } else {
        put_allowed(out, how, judgement, answer, ask->next, head);
        call->order->repeatable = is_repeatable(ask->request.method);
        let_pass(answerer, call, how, judging);
    }
}

size_t
fcgi_answer_call(void *context, const fcgi_call *call, char *text)
{
    fcgi_answerer *answerer = context;
    const fcgi_listener *listener = call->listener;
    const fcgi_rights *rights = &listener->rights;
    fcgi_judging *judging = call->held;
    const bool judged = judging && judging->stage == FCGI_STAGE_JUDGED;
    tg_part values[TG_DIMENSIONS_MAX];
    writer out = { .text = text };
    asked ask;
    answerer->judge.gate = answerer->gate;
    answerer->now.judge = &answerer->judge;
    read_params(answerer, listener, call->params, &ask);

    fcgi_mode how = listener->mode != FCGI_MODE_UNSET   ? listener->mode
                    : rights->first != FCGI_MODE_UNSET ? rights->first
                                                       : answerer->mode;
    bool mode_known = !ask.has_mode || fcgi_mode_parse(ask.mode, false, &how);
    if (call->role == FCGI_AUTHORIZER) {
        how = FCGI_MODE_AUTHORIZER;
        mode_known = true;
    }
    const bool head = IS(ask.request.method, "HEAD"); /* of the web server's question, not of what it is about */
    if (ask.method.length)
        ask.request.method = ask.method;

    if (rights->token_length && !token_fits(rights, ask.token)) {
        fcgi_log_rarely(&answerer->asked_gate, FCGI_ERROR, "token-wrong", "%s: TIDEGATE_TOKEN is missing or wrong",
                        listener->text);
        put_misuse(&out, how, 403, "Forbidden", "FORBIDDEN", "This is not allowed.", head);
        return out.length;
    }
    if (call->too_large || ask.too_many_headers) {
        put_misuse(&out, how, 431, "Request Header Fields Too Large", "TOO_LARGE",
                   "The request's header fields are too large.", head);
        return out.length;
    }
    char room[480];
    const char *misuse = find_misuse(answerer, rights, &ask, mode_known, how, room, sizeof room);
    uint64_t now_us = 0;
    if (!misuse && answerer->manual && !read_number(ask.now, &now_us))
        misuse = "TIDEGATE_NOW_US is no number of microseconds";
    if (!misuse && how == FCGI_MODE_RELAY && ask.script_outside && rights->root[0]) {
        fcgi_log_rarely(&answerer->asked_gate, FCGI_ERROR, "script-outside", "%s: SCRIPT_FILENAME is not below %s",
                        listener->text, rights->root);
        put_misuse(&out, how, 403, "Forbidden", "FORBIDDEN", "This is not allowed.", head);
        return out.length;
    }
    if (!misuse && answerer->manual)
        tg_clock_set_us(answerer->manual, now_us);

    const question *one = &ask.question;
    const bool named = one->policy.length || one->key_count || rights->policy_count;
    ask.request.peek = one->peek;
    ask.request.body = call->body;
    ask.request.body_read = call->body_read;
    ask.request.body_follows = how == FCGI_MODE_RELAY && !call->body_read;
    if (!misuse && named && !ask.has_batch)
        misuse = word_question(rights, one, &ask.request, values);
    if (!misuse && ask.has_batch && !answerer->judge.client && !judged) {
        put_batch(&out, answerer, rights, ask.batch, NULL, head);
        return out.length;
    }
    if (!misuse && !judged)
        judging = ask.has_batch ? ask_batch(answerer, rights, ask.batch, count_lines(ask.batch))
                                : judge_request(answerer, call, &ask);
    if (!misuse && judging && judging->stage == FCGI_STAGE_JUDGING) {
        leave_pending(call, how, judging);
        return 0;
    }
    if (!misuse && judging && ask.has_batch) {
        put_batch(&out, answerer, rights, ask.batch, judging, head);
        fcgi_judging_free(judging);
        return out.length;
    }
    if (!misuse && judging && judging->status != TG_OK && named) {
        snprintf(room, sizeof room, "%s", judging->error.message);
        misuse = room;
    }
    if (misuse) {
        fcgi_log_rarely(&answerer->asked_gate, FCGI_ERROR, "asked-wrongly", "%s: %s", listener->text, misuse);
        put_misuse(&out, how, 500, "Internal Server Error", "MISCONFIGURED", misuse, head);
        drop(answerer, judging);
        return out.length;
    }
    if (!judging || judging->status != TG_OK) {
        fcgi_log_rarely(&answerer->judge_gate, FCGI_ERROR, "not-judged", "%s: %s",
                        tg_status_name(judging ? judging->status : TG_E_NOMEM),
                        judging ? judging->error.message : "out of memory");
        put_misuse(&out, how, 500, "Internal Server Error", "INTERNAL", "The request could not be judged.", head);
        drop(answerer, judging);
        return out.length;
    }
    const tg_judgement *judgement = &judging->judgements[judging->count - 1];
    if (judgement->status == 0 && judgement->needs_body && judging->count == 1 && ask.request.body_follows) {
        if (judging == &answerer->now)
            judging = fcgi_judging_keep(&answerer->judge, judging, FCGI_STAGE_BODY);
        if (!judging) {
            put_misuse(&out, how, 503, "Service Unavailable", "OVERLOADED", "There is no room for this request.", head);
            return out.length;
        }
        judging->stage = FCGI_STAGE_BODY;
        call->order->wants_body = true;
        call->order->streams = true;
        call->order->held = judging;
        return 0;
    }
    put_judged(&out, answerer, call, how, &ask, head, judging);
    return out.length;
}
