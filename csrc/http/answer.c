/* What goes to the client: status, fields, body. Every face sends exactly this, so that a client sees one limiter.
 * Must not enter: sockets, frameworks, who asked. Plain text writing without printf: an allowed request's fields are
 * made on every request. */
#include "http/http.h"

#define SECOND_US UINT64_C(1000000)

const tg_style tg__style_default = { .fields = TG_FIELDS_X_RATELIMIT };

enum { IETF_FIELD_BYTES_MAX = 400 }; /* of each of the two fields: items that would go past it are left out, whole */

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

/* Of a literal the compiler counts the bytes. */
static inline tg_text
word(const char *literal)
{
    return (tg_text){ literal, strlen(literal) };
}

static void
put_word(writer *out, const char *text)
{
    put(out, word(text));
}

static void
put_number(writer *out, uint64_t number)
{
    char digits[TG__DIGITS_MAX], *const end = digits + sizeof digits, *const begin = tg__digits(end, number);
    put(out, (tg_text){ begin, (size_t)(end - begin) });
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
add(tg_answer *answer, tg_text name, tg_text value)
{
    answer->fields[answer->field_count++] = (tg_field){ name, value };
}

/* Each at the end of a place where any number would do, so that it is written where it stays. */
TG_EACH_REQUEST static void
add_number(writer *out, tg_text name, uint64_t number)
{
    if (TG__DIGITS_MAX > TG_ANSWER_BYTES_MAX - out->used)
        return;
    out->used += TG__DIGITS_MAX;
    char *const end = out->answer->storage + out->used, *const begin = tg__digits(end, number);
    add(out->answer, name, (tg_text){ begin, (size_t)(end - begin) });
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
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 402:
        return "Payment Required";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 409:
        return "Conflict";
    case 410:
        return "Gone";
    case 429:
        return "Too Many Requests";
    case 451:
        return "Unavailable For Legal Reasons";
    case 500:
        return "Internal Server Error";
    case 502:
        return "Bad Gateway";
    case 503:
        return "Service Unavailable";
    case 504:
        return "Gateway Timeout";
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
    case TG_EXEMPT:
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
    add(out->answer, word("WWW-Authenticate"), written_since(out, start));
}

/* A text of the rules file: already as JSON writes it, but for the seconds. */
static void
put_text(writer *out, tg_text text, uint64_t wait)
{
    static const char place[] = "{wait}";
    for (;;) {
        const char *found = memmem(text.data, text.length, place, sizeof place - 1);
        if (!found)
            break;
        put(out, (tg_text){ text.data, (size_t)(found - text.data) });
        put_number(out, wait);
        text.length -= (size_t)(found - text.data) + sizeof place - 1;
        text.data = found + sizeof place - 1;
    }
    put(out, text);
}

static void
put_message(writer *out, const tg_judgement *judgement, const tg_style *style, bool waits, uint64_t wait)
{
    if (style->texts[judgement->outcome].length) {
        put_text(out, style->texts[judgement->outcome], wait);
        return;
    }
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
    case TG_EXEMPT:
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

/* ---- the fields of the IETF draft (draft-ietf-httpapi-ratelimit-headers-10) ----
 *
 * Names and parameters stand here and nowhere else, since the draft still moves. One item for each rule of each policy,
 * named after the policy; from a policy's second rule on with ":2" and so on behind, for which a policy's name has no
 * character. Of a rule's identities the one that is nearest to its limit is shown. */

#define IETF_POLICY_FIELD "RateLimit-Policy"
#define IETF_STATE_FIELD "RateLimit"

/* The results of one rule of one policy, as one item. */
typedef struct item {
    const tg_result *nearest;
    size_t ordinal; /* of the rule in its policy, from 1 */
} item;

static bool
same_rule(const tg_result *a, const tg_result *b)
{
    return a->limiter == b->limiter && memcmp(a->rule.scope, b->rule.scope, sizeof a->rule.scope) == 0;
}

static size_t
find_items(const tg_decision *decision, const tg_style_facts *facts, item items[TG_TARGETS_MAX])
{
    size_t count = 0;
    for (size_t i = 0; i < decision->result_count; i++) {
        const tg_result *result = &decision->results[i];
        size_t at = 0, ordinal = 1;
        if (result->limiter >= facts->name_count || !facts->names[result->limiter] ||
            result->rule.algorithm == TG_DENY)
            continue;
        while (at < count && !same_rule(items[at].nearest, result)) {
            ordinal += items[at].nearest->limiter == result->limiter;
            at++;
        }
        if (at == count)
            items[count++] = (item){ result, ordinal };
        else if (result->remaining < items[at].nearest->remaining)
            items[at].nearest = result;
    }
    return count;
}

static void
put_name(writer *out, const tg_style_facts *facts, const item *one)
{
    put_word(out, "\"");
    put_word(out, facts->names[one->nearest->limiter]); /* A-Z a-z 0-9 _ . - */
    if (one->ordinal > 1) {
        put_word(out, ":");
        put_number(out, one->ordinal);
    }
    put_word(out, "\"");
}

/* What a bucket holds at once is its quota; its window is the time in which that much drains. */
static uint64_t
window_seconds(const tg_rule *rule)
{
    const tg_u128 us = (tg_u128)rule->period_us * rule->burst / rule->limit;
    return us > UINT64_MAX / 2 ? UINT64_MAX / 2 / SECOND_US : whole_seconds((uint64_t)us);
}

static __attribute__((noinline)) void
add_ietf(writer *out, const tg_judgement *judgement, const tg_style_facts *facts)
{
    item items[TG_TARGETS_MAX];
    const size_t count = find_items(&judgement->decision, facts, items);
    for (size_t field = 0; field < 2; field++) {
        const size_t start = out->used;
        for (size_t i = 0; i < count; i++) {
            const size_t before = out->used;
            put_word(out, i ? ", " : "");
            put_name(out, facts, &items[i]);
            if (field == 0) {
                put_word(out, ";q=");
                put_number(out, items[i].nearest->rule.burst);
                put_word(out, ";w=");
                put_number(out, window_seconds(&items[i].nearest->rule));
            } else {
                const tg_result *nearest = items[i].nearest;
                put_word(out, ";r=");
                put_number(out, nearest->remaining);
                const uint64_t until_us = nearest->allowed ? nearest->reset_after_us : nearest->retry_after_us;
                if (until_us != TG_NEVER) {
                    put_word(out, ";t=");
                    put_number(out, whole_seconds(until_us));
                }
            }
            if (out->used - start > IETF_FIELD_BYTES_MAX) {
                out->used = before;
                break;
            }
        }
        if (out->used > start)
            add(out->answer, word(field == 0 ? IETF_POLICY_FIELD : IETF_STATE_FIELD), written_since(out, start));
    }
}

/* ---- bodies ---- */

/* "violated-policies" of the draft's problem types: the policies that refused. */
static void
put_violated(writer *out, const tg_judgement *judgement, const tg_style_facts *facts)
{
    const tg_decision *decision = &judgement->decision;
    const char *before = "";
    put_word(out, ", \"violated-policies\": [");
    for (size_t name = 0; name < facts->name_count; name++) {
        bool violated = false;
        for (size_t i = 0; i < decision->result_count; i++)
            violated |= decision->results[i].limiter == name && !decision->results[i].allowed;
        if (!violated || !facts->names[name])
            continue;
        put_word(out, before);
        put_word(out, "\"");
        put_word(out, facts->names[name]);
        put_word(out, "\"");
        before = ", ";
    }
    put_word(out, "]");
}

static void
put_problem_kind(writer *out, const tg_judgement *judgement, int status)
{
    static const char registry[] = "https://iana.org/assignments/http-problem-types#";
    const char *kind = NULL, *title = reason_of(status);
    if (judgement->outcome == TG_DENIED) {
        kind = "quota-exceeded";
        title = "Request cannot be satisfied as assigned quota has been exceeded";
    } else if (judgement->outcome == TG_UNAVAILABLE) {
        kind = "temporary-reduced-capacity";
        title = "Request cannot be satisfied due to temporary server capacity constraints";
    }
    put_word(out, "{\"type\": \"");
    put_word(out, kind ? registry : "about:blank");
    put_word(out, kind ? kind : "");
    put_word(out, "\", \"title\": \"");
    put_word(out, title);
    put_word(out, "\", \"status\": ");
    put_number(out, (uint64_t)status);
    put_word(out, ", ");
}

static tg_text
write_body(writer *out, const tg_judgement *judgement, const tg_style *style, const tg_style_facts *facts, bool waits,
           uint64_t wait)
{
    const size_t start = out->used;
    if (style->problem)
        put_problem_kind(out, judgement, out->answer->status);
    else
        put_word(out, "{");
    put_word(out, "\"code\": \"");
    put_word(out, code_of(judgement->outcome));
    put_word(out, style->problem ? "\", \"detail\": \"" : "\", \"message\": \"");
    put_message(out, judgement, style, waits, wait);
    put_word(out, "\", \"retry_after\": ");
    if (waits)
        put_number(out, wait);
    else
        put_word(out, "null");
    if (style->problem && judgement->outcome == TG_DENIED)
        put_violated(out, judgement, facts);
    put_word(out, "}");
    return written_since(out, start);
}

/* ---- the answer ---- */

static void
add_limits(writer *out, const tg_judgement *judgement, const tg_style *style, const tg_style_facts *facts)
{
    const tg_decision *decision = &judgement->decision;
    if (style->fields & TG_FIELDS_X_RATELIMIT) {
        add_number(out, word("X-RateLimit-Limit"), decision->limit);
        add_number(out, word("X-RateLimit-Remaining"), decision->remaining);
        add_number(out, word("X-RateLimit-Reset"),
                   whole_seconds(style->epoch ? facts->utc_us + decision->reset_after_us : decision->reset_after_us));
    }
    if (style->fields & TG_FIELDS_IETF)
        add_ietf(out, judgement, facts);
}

/* All that only a refusal has. */
static __attribute__((noinline)) void
add_refusal(writer *out, const tg_judgement *judgement, const tg_style *style, const tg_style_facts *facts)
{
    tg_answer *const answer = out->answer;
    const tg_outcome outcome = judgement->outcome;
    const uint64_t retry_after_us = judgement->decision.retry_after_us;
    const bool waits = (outcome == TG_DENIED || outcome == TG_UNAVAILABLE) && retry_after_us != TG_NEVER;
    uint64_t wait = whole_seconds(retry_after_us);
    if (wait == 0 || outcome == TG_UNAVAILABLE)
        wait = 1; /* "0" invites the client back before it can pass; a silent store has no better guess */
    answer->reason = reason_of(answer->status);
    if (waits)
        add_number(out, word("Retry-After"), wait);
    if (answer->status == 401)
        add_challenge(out, tg_text_of(judgement->missing));
    add(answer, word("Cache-Control"), word("no-store")); /* or a cache answers in our place after the wait */
    add(answer, word("Content-Type"), word(style->problem ? "application/problem+json" : "application/json"));
    answer->body = write_body(out, judgement, style, facts, waits, wait);
}

TG_EACH_REQUEST void
tg__answer_make(const tg_judgement *judgement, const tg_style *style, const tg_style_facts *facts, tg_answer *answer)
{
    const tg_decision *decision = &judgement->decision;
    const tg_outcome outcome = judgement->outcome;
    writer out = { answer, 0 };
    /* Never NULL from here on: gcc 14 hands single members on by value and reads them before it is known whether they
     * are asked for (IPA-SRA). */
    static const tg_style_facts no_facts;
    if (!facts)
        facts = &no_facts;
    answer->status = outcome == TG_UNMATCHED || outcome == TG_EXEMPT ? 0 : judgement->status;
    answer->reason = "";
    answer->field_count = 0;
    answer->body = (tg_text){ NULL, 0 };

    /* A degraded decision counted nothing, and `deny` has no count: neither has numbers to show. */
    if ((outcome == TG_ALLOWED || outcome == TG_DENIED) && !decision->degraded)
        add_limits(&out, judgement, style, facts);
    if (judgement->challenged)
        add(answer, word("X-RateLimit-Challenge"), word("required"));
    if (judgement->shadow_denied && (style->fields & TG_FIELDS_SHADOW))
        add(answer, word("X-RateLimit-Shadow"), word("denied"));
    if (answer->status != 0)
        add_refusal(&out, judgement, style, facts);
    answer->storage_used = out.used;
}

TG_EACH_REQUEST void
tg_answer_make(const tg_judgement *judgement, tg_answer *answer)
{
    tg__answer_make(judgement, &tg__style_default, NULL, answer);
}

/* ---- texts of the rules file ---- */

/* One character of UTF-8 off the text. libyaml has checked the file's encoding; a text from elsewhere need not be. */
static bool
next_character(tg_text *text, uint32_t *character)
{
    const unsigned char *at = (const unsigned char *)text->data;
    const size_t length = at[0] < 0x80 ? 1 : at[0] >= 0xc2 && at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : at[0] < 0xf5 ? 4 : 0;
    if (length == 0 || length > text->length || (at[0] >= 0x80 && at[0] < 0xc2))
        return false;
    *character = length == 1 ? at[0] : at[0] & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return false;
        *character = *character << 6 | (at[i] & 0x3f);
    }
    text->data += length;
    text->length -= length;
    return true;
}

static size_t
put_unit(char *to, uint32_t unit)
{
    static const char digits[] = "0123456789abcdef";
    to[0] = '\\';
    to[1] = 'u';
    for (size_t i = 0; i < 4; i++)
        to[2 + i] = digits[unit >> (12 - 4 * i) & 15];
    return 6;
}

size_t
tg__text_escape(tg_text text, char escaped[TG_TEXT_ESCAPED_MAX])
{
    size_t used = 0;
    while (text.length) {
        uint32_t character;
        if (used + 12 > TG_TEXT_ESCAPED_MAX || !next_character(&text, &character))
            return SIZE_MAX;
        if (character == '"' || character == '\\')
            escaped[used++] = '\\';
        if (character >= ' ' && character <= '~') {
            escaped[used++] = (char)character;
        } else if (character < 0x10000) {
            used += put_unit(escaped + used, character);
        } else {
            used += put_unit(escaped + used, 0xd800 + ((character - 0x10000) >> 10));
            used += put_unit(escaped + used, 0xdc00 + ((character - 0x10000) & 0x3ff));
        }
    }
    return used;
}
