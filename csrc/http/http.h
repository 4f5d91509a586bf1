/* How a refusal and its fields look, as the rules file chooses it; and the answer made so.
 * Must not enter: policies, limiters, who asked. */
#ifndef TG_HTTP_H
#define TG_HTTP_H

#include "base/base.h"

enum {
    TG_FIELDS_X_RATELIMIT = 1, /* X-RateLimit-Limit, -Remaining, -Reset */
    TG_FIELDS_IETF = 2,        /* RateLimit-Policy, RateLimit */
    TG_FIELDS_SHADOW = 4       /* X-RateLimit-Shadow: denied */
};

#define TG_TEXT_WRITTEN_MAX 200 /* bytes of one text as written in the rules file */
#define TG_TEXT_ESCAPED_MAX 600 /* the same as it stands in JSON */

typedef struct tg_style {
    uint8_t fields;     /* TG_FIELDS_ bits */
    bool problem;       /* application/problem+json (RFC 9457) rather than the plain body */
    bool epoch;         /* X-RateLimit-Reset as seconds since 1970 UTC rather than from now */
    bool needs_facts;   /* it shows what no judgement holds: tg_style_facts */
    tg_text texts[TG_OUTCOMES];     /* by outcome; as JSON writes them, "{wait}" for the seconds; empty: our own words */
    uint16_t statuses[TG_OUTCOMES]; /* by outcome; 0: our own */
} tg_style;

extern const tg_style tg__style_default;

/* What a style may need that no judgement holds. */
typedef struct tg_style_facts {
    const char *const *names; /* of the policies, by tg_result.limiter; NULL: not to be shown */
    size_t name_count;
    uint64_t utc_us;          /* now */
} tg_style_facts;

/* A text of the rules file as it stands inside a JSON string, ASCII alone: what is not becomes \uXXXX, so that one line
 * can also travel in a header field. Returns its length, or SIZE_MAX: no UTF-8, or longer than TG_TEXT_ESCAPED_MAX. */
size_t tg__text_escape(tg_text text, char escaped[TG_TEXT_ESCAPED_MAX]);

/* `facts` may be NULL where the style's needs_facts is false. */
void tg__answer_make(const tg_judgement *judgement, const tg_style *style, const tg_style_facts *facts,
                     tg_answer *answer);

#endif
