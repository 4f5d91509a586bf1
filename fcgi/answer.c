/* Parameters in, CGI answer out: see answer.h.
 *
 * What the web server sets and what its client sent never mix: a client's header arrives only as HTTP_NAME, so it
 * cannot spell TIDEGATE_MODE or REMOTE_ADDR. The request is judged by REQUEST_URI alone: in a sub-request
 * SCRIPT_NAME and DOCUMENT_URI are those of the limiter's own location, and QUERY_STRING is empty. */
#include "answer.h"

#include <stdio.h>
#include <string.h>

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

typedef struct asked {
    tg_request request;
    tg_text server_name;
    tg_text mode;
    tg_text now;
    tg_text unknown; /* a TIDEGATE_ name that this version does not know */
    bool has_mode, has_now, has_uri;
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

static void
read_own(asked *ask, tg_text name, tg_text value)
{
    if (IS(name, "TIDEGATE_MODE")) {
        ask->mode = value;
        ask->has_mode = true;
    } else if (IS(name, "TIDEGATE_NOW_US")) {
        ask->now = value;
        ask->has_now = true;
    } else {
        ask->unknown = name;
    }
}

/* Of a parameter sent twice the last counts: web servers append what overrides an included file. Header lines are the
 * client's and keep their order and number. */
static void
read_params(fcgi_answerer *answerer, fcgi_params params, asked *ask)
{
    tg_text name, value;
    fcgi_params_step step;
    size_t header_count = 0;
    *ask = (asked){ 0 };
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
        case 'S':
            if (IS(name, "SERVER_NAME"))
                ask->server_name = value;
            break;
        case 'T':
            if (STARTS(name, "TIDEGATE_"))
                read_own(ask, name, value);
            break;
        case 'H':
            if (!STARTS(name, "HTTP_"))
                break;
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

typedef enum way { WAY_ANSWER, WAY_AUTH, WAY_AUTHORIZER } way;

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
put_refusal(writer *out, way how, const refusal *no, bool head)
{
    if (how == WAY_AUTH) {
        put_auth_refusal(out, no);
        return;
    }
    put_status(out, no->status, no->reason);
    for (size_t i = 0; i < no->field_count; i++)
        put_field(out, no->fields[i].name, no->fields[i].value);
    put_body(out, no->body, head);
}

/* The web server asked for something that cannot be: its configuration is wrong, not its client. Answered closed, or a
 * mistyped word would switch the limits off. `message` is ours and needs no escaping. */
static void
put_misuse(writer *out, way how, int status, const char *reason, const char *code, const char *message, bool head)
{
    static const tg_field type = {
        .name = { .data = "Content-Type", .length = 12 },
        .value = { .data = "application/json", .length = 16 },
    };
    char body[384];
    const int length = snprintf(body, sizeof body, "{\"code\": \"%s\", \"message\": \"%s\"}", code, message);
    const refusal no = {
        .status = status,
        .reason = tg_text_of(reason),
        .body = { .data = body, .length = length < 0 ? 0 : (size_t)length < sizeof body ? (size_t)length
                                                                                        : sizeof body - 1 },
        .fields = &type,
        .field_count = 1,
    };
    if (how == WAY_AUTH && status >= 500) {
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
    PUT(out, "{\"allowed\": true, \"policy\": ");
    if (judgement->outcome == TG_UNMATCHED) {
        PUT(out, "null}");
        return;
    }
    PUT(out, "\"");
    put(out, tg_text_of(judgement->policy)); /* names are [A-Za-z0-9_.-] */
    if (decision->degraded) {
        PUT(out, "\", \"degraded\": true}");
        return;
    }
    PUT(out, "\", \"limit\": ");
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
put_allowed(writer *out, way how, const tg_judgement *judgement, const tg_answer *answer, bool head)
{
    /* A 200 is left unsaid: some servers pass a Status line on to the client as a field of its own. */
    if (how == WAY_AUTH)
        PUT(out, "Status: 204 No Content\r\n");
    else if (how == WAY_AUTHORIZER)
        PUT(out, "Status: 200 OK\r\n"); /* an authorizer without fields still has to say something */
    for (size_t i = 0; i < answer->field_count; i++)
        put_field(out, answer->fields[i].name, answer->fields[i].value);
    if (how != WAY_ANSWER) {
        PUT(out, "\r\n");
        return;
    }
    PUT(out, "Content-Type: application/json\r\n");
    char json[512];
    writer body = { .text = json };
    put_decision_json(&body, judgement);
    put_body(out, (tg_text){ .data = json, .length = body.length }, head);
}

/* ---- one call */

static bool
read_now(tg_text text, uint64_t *now_us)
{
    uint64_t number = 0;
    if (text.length == 0 || text.length > 18)
        return false;
    for (size_t i = 0; i < text.length; i++) {
        if (text.data[i] < '0' || text.data[i] > '9')
            return false;
        number = number * 10 + (uint64_t)(text.data[i] - '0');
    }
    *now_us = number;
    return true;
}

/* What is wrong with the question itself, or NULL. */
static const char *
find_misuse(const fcgi_answerer *answerer, const asked *ask, bool mode_known, char *room, size_t room_bytes)
{
    if (!mode_known)
        return "TIDEGATE_MODE is unknown; expected answer or auth";
    if (ask->unknown.length) {
        /* Never half: a key or a policy that is not heeded would limit something else than was meant. */
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
    if (ask->has_now && !answerer->manual)
        return "TIDEGATE_NOW_US needs a daemon started with --manual-clock";
    if (!ask->has_now && answerer->manual)
        return "TIDEGATE_NOW_US is missing: this daemon runs on a manual clock";
    if (!ask->has_uri)
        return "REQUEST_URI is missing; the web server has to pass it";
    if (ask->request.method.length == 0)
        return "REQUEST_METHOD is missing; the web server has to pass it";
    return NULL;
}

size_t
fcgi_answer_call(void *context, const fcgi_call *call, char *text)
{
    fcgi_answerer *answerer = context;
    writer out = { .text = text };
    asked ask;
    read_params(answerer, call->params, &ask);

    fcgi_mode mode = call->listener->mode != FCGI_MODE_UNSET ? call->listener->mode : answerer->mode;
    const bool mode_known = !ask.has_mode || fcgi_mode_parse(ask.mode, &mode);
    const way how = call->role == FCGI_AUTHORIZER ? WAY_AUTHORIZER : mode == FCGI_MODE_AUTH ? WAY_AUTH : WAY_ANSWER;
    const bool head = IS(ask.request.method, "HEAD");

    if (call->too_large || ask.too_many_headers) {
        put_misuse(&out, how, 431, "Request Header Fields Too Large", "TOO_LARGE",
                   "The request's header fields are too large.", head);
        return out.length;
    }
    char room[160];
    const char *misuse = ask.bad ? "the parameters are cut off or damaged"
                                 : find_misuse(answerer, &ask, mode_known, room, sizeof room);
    uint64_t now_us = 0;
    if (!misuse && answerer->manual && !read_now(ask.now, &now_us))
        misuse = "TIDEGATE_NOW_US is no number of microseconds";
    if (misuse) {
        fcgi_log_rarely(&answerer->asked_gate, FCGI_ERROR, "asked-wrongly", "%s: %s", call->listener->text, misuse);
        put_misuse(&out, how, 500, "Internal Server Error", "MISCONFIGURED", misuse, head);
        return out.length;
    }
    if (answerer->manual)
        tg_clock_set_us(answerer->manual, now_us);

    tg_judgement *judgement = &answerer->judgement;
    tg_error error;
    const tg_status status = tg_gate_judge(answerer->gate, &ask.request, 1, NULL, 0, judgement, &error);
    if (status != TG_OK) {
        fcgi_log_rarely(&answerer->judge_gate, FCGI_ERROR, "not-judged", "%s: %s", tg_status_name(status),
                        error.message);
        put_misuse(&out, how, 500, "Internal Server Error", "INTERNAL", "The request could not be judged.", head);
        return out.length;
    }
    tg_answer *answer = &answerer->answer;
    tg_answer_make(judgement, answer);
    if (judgement->status == 0) {
        put_allowed(&out, how, judgement, answer, head);
    } else {
        const refusal no = {
            .status = answer->status,
            .reason = tg_text_of(answer->reason),
            .body = answer->body,
            .fields = answer->fields,
            .field_count = answer->field_count,
        };
        put_refusal(&out, how, &no, head);
    }
    return out.length;
}
