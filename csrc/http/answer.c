/* What goes to the client: status, fields, body. Every face sends exactly this, so that a client sees one limiter.
 * Must not enter: sockets, frameworks, who asked. Plain text writing without printf: an allowed request's fields are
 * made on every request. */
#include "base/base.h"

#define SECOND_US UINT64_C(1000000)

/* Writes into the answer's storage; what does not fit is left out rather than cut in two. */
typedef struct writer {
    tg_answer *answer;
    size_t used;
} writer;

static void
put(writer *out, tg_text text)
{
    if (text.length > TG_ANSWER_BYTES_MAX - out->used)
        return;
    if (text.length)
        memcpy(out->answer->storage + out->used, text.data, text.length);
    out->used += text.length;
}

static void
put_word(writer *out, const char *word)
{
    put(out, tg_text_of(word));
}

static void
put_number(writer *out, uint64_t number)
{
    char digits[20], *at = digits + sizeof digits;
    do {
        *--at = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    put(out, (tg_text){ at, (size_t)(digits + sizeof digits - at) });
}

/* Into a JSON string, and into a quoted string of a header: both escape '"' and '\' alike. What is not printable
 * ASCII is left out: control characters fit in neither, and of other bytes nobody knows the encoding. */
static void
put_escaped(writer *out, tg_text text)
{
    for (size_t i = 0; i < text.length; i++) {
        const char c = text.data[i];
        if ((unsigned char)c < ' ' || (unsigned char)c > '~')
            continue;
        if (c == '"' || c == '\\')
            put(out, (tg_text){ "\\", 1 });
        put(out, (tg_text){ &c, 1 });
    }
}

static tg_text
written_since(const writer *out, size_t start)
{
    return (tg_text){ out->answer->storage + start, out->used - start };
}

static void
add(tg_answer *answer, const char *name, tg_text value)
{
    answer->fields[answer->field_count++] = (tg_field){ tg_text_of(name), value };
}

static void
add_number(writer *out, const char *name, uint64_t number)
{
    const size_t start = out->used;
    put_number(out, number);
    add(out->answer, name, written_since(out, start));
}

/* Rounded up: waiting as long as we say is always enough. */
static uint64_t
whole_seconds(uint64_t us)
{
    return us / SECOND_US + (us % SECOND_US != 0);
}

static const char *
reason_of(int status)
{
    switch (status) {
    case 0:
        return "";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 429:
        return "Too Many Requests";
    case 503:
        return "Service Unavailable";
    }
    return "Refused";
}

static const char *
code_of(tg_outcome outcome)
{
    switch (outcome) {
    case TG_FORBIDDEN:
        return "FORBIDDEN";
    case TG_UNIDENTIFIED:
        return "UNIDENTIFIED";
    case TG_UNAVAILABLE:
        return "UNAVAILABLE";
    case TG_UNMATCHED:
    case TG_ALLOWED:
    case TG_DENIED:
        break;
    }
    return "RATE_LIMITED";
}

/* A 401 has to name a way to identify oneself (RFC 9110 15.5.2). A missing header is named; anything else is a matter
 * of signing in, for which Bearer does not make browsers ask for a password. */
static void
add_challenge(writer *out, tg_text missing)
{
    static const char header[] = "header:";
    const size_t prefix = sizeof header - 1, start = out->used;
    tg_text name = { 0 };
    if (missing.length > prefix && tg__text_is_nocase((tg_text){ missing.data, prefix }, header))
        name = (tg_text){ missing.data + prefix, missing.length - prefix };
    if (name.length == 0 || tg__text_is_nocase(name, "authorization")) {
        put_word(out, "Bearer");
    } else {
        put_word(out, "Header name=\"");
        put_escaped(out, name);
        put_word(out, "\"");
    }
    add(out->answer, "WWW-Authenticate", written_since(out, start));
}

static void
put_message(writer *out, const tg_judgement *judgement, bool waits, uint64_t wait)
{
    switch (judgement->outcome) {
    case TG_FORBIDDEN:
        put_word(out, "This is not allowed.");
        return;
    case TG_UNIDENTIFIED:
        put_word(out, "The request does not say who is asking: ");
        put_escaped(out, tg_text_of(judgement->missing));
        put_word(out, " is missing.");
        return;
    case TG_UNAVAILABLE:
        put_word(out, "The service cannot count requests at the moment.");
        break;
    case TG_UNMATCHED:
    case TG_ALLOWED:
    case TG_DENIED:
        if (!waits) {
            put_word(out, "This request asks for more than the limit can ever allow.");
            return;
        }
        put_word(out, "Too many requests.");
    }
    put_word(out, " Try again in ");
    put_number(out, wait);
    put_word(out, wait == 1 ? " second." : " seconds.");
}

void
tg_answer_make(const tg_judgement *judgement, tg_answer *answer)
{
    const tg_decision *decision = &judgement->decision;
    const tg_outcome outcome = judgement->outcome;
    writer out = { answer, 0 };
    answer->status = outcome == TG_UNMATCHED ? 0 : judgement->status;
    answer->reason = reason_of(answer->status);
    answer->field_count = 0;
    answer->body = (tg_text){ NULL, 0 };

    /* A degraded decision counted nothing, and `deny` has no count: neither has numbers to show. */
    if ((outcome == TG_ALLOWED || outcome == TG_DENIED) && !decision->degraded) {
        add_number(&out, "X-RateLimit-Limit", decision->limit);
        add_number(&out, "X-RateLimit-Remaining", decision->remaining);
        add_number(&out, "X-RateLimit-Reset", whole_seconds(decision->reset_after_us));
    }
    if (answer->status == 0)
        return;

    const bool waits = (outcome == TG_DENIED || outcome == TG_UNAVAILABLE) && decision->retry_after_us != TG_NEVER;
    uint64_t wait = whole_seconds(decision->retry_after_us);
    if (wait == 0 || outcome == TG_UNAVAILABLE)
        wait = 1; /* "0" invites the client back before it can pass; a silent store has no better guess */
    if (waits)
        add_number(&out, "Retry-After", wait);
    if (answer->status == 401)
        add_challenge(&out, tg_text_of(judgement->missing));
    add(answer, "Cache-Control", tg_text_of("no-store")); /* or a cache answers in our place after the wait */
    add(answer, "Content-Type", tg_text_of("application/json"));

    const size_t start = out.used;
    put_word(&out, "{\"code\": \"");
    put_word(&out, code_of(outcome));
    put_word(&out, "\", \"message\": \"");
    put_message(&out, judgement, waits, wait);
    put_word(&out, "\", \"retry_after\": ");
    if (waits)
        put_number(&out, wait);
    else
        put_word(&out, "null");
    put_word(&out, "}");
    answer->body = written_since(&out, start);
}
