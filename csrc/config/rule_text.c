/* Rules as people write them ("10/second; 1000/hour burst 50"), and back. The grammar is in tidegate.h.
 * Must not enter: files, YAML, names and scopes of rules, anything that counts.
 *
 * Strict on purpose: a misspelt limit that is read as some other limit, or as none, is found only when it is needed.
 * Every error marks the word it is about. */
#include "config/config.h"

#include "base/words.h"

#include <inttypes.h>
#include <stdio.h>

#define MS_US UINT64_C(1000)
#define SECOND_US (1000 * MS_US)
#define MINUTE_US (60 * SECOND_US)
#define HOUR_US (60 * MINUTE_US)
#define DAY_US (24 * HOUR_US)
#define WEEK_US (7 * DAY_US)
#define MONTH_US (30 * DAY_US)
#define YEAR_US (365 * DAY_US)

/* Up to this many units in a period an exact log is small enough to be the default. */
#define LOG_LIMIT_MAX 1000

/* ---- words ---- */

static const struct unit {
    const char *word;
    uint64_t us;
    bool calendar; /* a month or a year of the calendar is not a multiple of anything */
} units[] = {
    { "s", SECOND_US, false },     { "sec", SECOND_US, false },    { "second", SECOND_US, false },
    { "seconds", SECOND_US, false }, { "m", MINUTE_US, false },    { "min", MINUTE_US, false },
    { "minute", MINUTE_US, false }, { "minutes", MINUTE_US, false }, { "h", HOUR_US, false },
    { "hour", HOUR_US, false },    { "hours", HOUR_US, false },    { "d", DAY_US, false },
    { "day", DAY_US, false },      { "days", DAY_US, false },      { "w", WEEK_US, false },
    { "week", WEEK_US, false },    { "weeks", WEEK_US, false },    { "ms", MS_US, false },
    { "month", MONTH_US, true },   { "year", YEAR_US, true },
};
#define UNITS_EXPECTED "s, sec, second, m, min, minute, h, hour, d, day, w, week, ms, month or year"

static const struct algorithm_word {
    const char *word;
    tg_algorithm algorithm;
} algorithm_words[] = {
    { "fixed_window", TG_FIXED_WINDOW }, { "sliding_log", TG_SLIDING_LOG },   { "sliding_counter", TG_SLIDING_COUNTER },
    { "token_bucket", TG_TOKEN_BUCKET }, { "leaky_bucket", TG_LEAKY_BUCKET }, { "gcra", TG_TOKEN_BUCKET },
};
#define WORDS_EXPECTED                                                                                                 \
    "burst, aligned, resolution, fixed_window, sliding_log, sliding_counter, token_bucket, leaky_bucket, gcra or `;`"

/* Words that later versions give a meaning: an error now, so that no rule changes its meaning then. */
static const char *const reserved_words[] = {
    "concurrency", "concurrent", "penalty", "penalties", "calendar", "calendars",
};

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

const char *
tg_algorithm_name(tg_algorithm algorithm)
{
    switch (algorithm) {
    case TG_ALGORITHM_DEFAULT:
        return "default";
    case TG_FIXED_WINDOW:
        return "fixed_window";
    case TG_SLIDING_LOG:
        return "sliding_log";
    case TG_SLIDING_COUNTER:
        return "sliding_counter";
    case TG_TOKEN_BUCKET:
        return "token_bucket";
    case TG_LEAKY_BUCKET:
        return "leaky_bucket";
    case TG_DENY:
        return "deny";
    }
    return "unknown";
}

static bool
is_bucket(tg_algorithm algorithm)
{
    return algorithm == TG_TOKEN_BUCKET || algorithm == TG_LEAKY_BUCKET;
}

/* ---- near misses ---- */

/* The word that was probably meant, or NULL. One- and two-letter words are near to everything and never offered. */
typedef struct tg_guess {
    const char *word;
    unsigned slips;
} tg_guess;

static void
consider(tg_guess *guess, tg_text typed, const char *word)
{
    const size_t length = strlen(word);
    const unsigned most = length < 5 ? 1 : 2;
    if (length < 3 || typed.length < 3)
        return;
    const unsigned distance = tg__word_distance(typed, (tg_text){ word, length }, most);
    if (distance <= most && (!guess->word || distance < guess->slips))
        *guess = (tg_guess){ word, distance };
}

static const char *
nearest_unit(tg_text typed)
{
    tg_guess guess = { NULL, 0 };
    for (size_t i = 0; i < COUNT_OF(units); i++)
        consider(&guess, typed, units[i].word);
    return guess.word;
}

static const char *
nearest_word(tg_text typed)
{
    tg_guess guess = { NULL, 0 };
    consider(&guess, typed, "burst");
    consider(&guess, typed, "aligned");
    consider(&guess, typed, "resolution");
    for (size_t i = 0; i < COUNT_OF(algorithm_words); i++)
        consider(&guess, typed, algorithm_words[i].word);
    return guess.word;
}

static bool
is_reserved(tg_text typed)
{
    for (size_t i = 0; i < COUNT_OF(reserved_words); i++)
        if (tg__text_is_nocase(typed, reserved_words[i]))
            return true;
    return false;
}

/* ---- reading ---- */

/* A stretch of the rule text: what an error marks. */
typedef struct tg_span {
    size_t offset, length;
} tg_span;

typedef struct tg_parser {
    tg_text text;
    size_t at;
    tg_error *error;
} tg_parser;

/* What one rule says, before it is known to make sense. Spans of length 0: not said. */
typedef struct tg_saying {
    uint64_t limit, period_us, burst, resolution_us;
    tg_algorithm algorithm; /* TG_ALGORITHM_DEFAULT: not named */
    bool calendar;          /* the period is given in months or years */
    tg_span whole, limit_span, period_span, burst_span, algorithm_span, aligned_span, resolution_span;
} tg_saying;

static tg_status fail(tg_parser *parser, tg_span span, const char *format, ...) __attribute__((format(printf, 3, 4)));

static tg_status
fail(tg_parser *parser, tg_span span, const char *format, ...)
{
    if (!parser->error)
        return TG_E_RULE;
    char message[sizeof parser->error->message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    tg__error(parser->error, TG_E_RULE, "%s", message);
    parser->error->offset = span.offset;
    parser->error->length = span.length;
    return TG_E_RULE;
}

typedef struct tg_shown {
    char text[56];
} tg_shown;

/* "`6O`", or "the end" for an empty span. */
static tg_shown
show(const tg_parser *parser, tg_span span)
{
    tg_shown shown;
    if (span.length == 0) {
        snprintf(shown.text, sizeof shown.text, "the end");
        return shown;
    }
    char word[48];
    tg__text_show((tg_text){ parser->text.data + span.offset, span.length }, word, sizeof word);
    snprintf(shown.text, sizeof shown.text, "`%s`", word);
    return shown;
}

static bool
is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static bool
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool
is_letter(char c)
{
    return ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || c == '_';
}

static bool
is_separator(char c)
{
    return c == ';' || c == ',';
}

static void
skip_space(tg_parser *parser)
{
    while (parser->at < parser->text.length && is_space(parser->text.data[parser->at]))
        parser->at++;
}

static bool
at_end(const tg_parser *parser)
{
    return parser->at >= parser->text.length;
}

/* The character that comes next; NUL at the end (a NUL in the text is part of a word and no mark of anything). */
static char
peek(const tg_parser *parser)
{
    return at_end(parser) ? '\0' : parser->text.data[parser->at];
}

/* What stands at `from` as a reader sees it: up to white space or a mark; a mark is a word of its own. */
static tg_span
span_at(const tg_parser *parser, size_t from)
{
    size_t end = from;
    while (end < parser->text.length) {
        const char c = parser->text.data[end];
        if (is_space(c) || is_separator(c) || c == '/')
            break;
        end++;
    }
    if (end == from && end < parser->text.length && !is_space(parser->text.data[end]))
        end++;
    return (tg_span){ from, end - from };
}

static tg_text
text_of(const tg_parser *parser, tg_span span)
{
    return (tg_text){ parser->text.data + span.offset, span.length };
}

/* The word that comes next: all that stands together, except that a number may follow a word that takes one without
 * white space between ("per5m", "burst50"). */
static tg_span
read_word(tg_parser *parser)
{
    skip_space(parser);
    tg_span span = span_at(parser, parser->at);
    size_t letters = 0;
    while (letters < span.length && is_letter(parser->text.data[span.offset + letters]))
        letters++;
    if (letters < span.length && is_digit(parser->text.data[span.offset + letters])) {
        const tg_text head = { parser->text.data + span.offset, letters };
        if (tg__text_is_nocase(head, "per") || tg__text_is_nocase(head, "burst") ||
            tg__text_is_nocase(head, "resolution"))
            span.length = letters;
    }
    parser->at = span.offset + span.length;
    return span;
}

/* Digits, as long as they go; UINT64_MAX for any number beyond 64 bits. Whether what follows may is the caller's. */
static tg_span
read_digits(tg_parser *parser, uint64_t *number)
{
    skip_space(parser);
    const size_t from = parser->at;
    *number = 0;
    for (; !at_end(parser) && is_digit(peek(parser)); parser->at++) {
        const uint64_t digit = (uint64_t)(peek(parser) - '0');
        if (__builtin_mul_overflow(*number, 10, number) || __builtin_add_overflow(*number, digit, number))
            *number = UINT64_MAX;
    }
    return (tg_span){ from, parser->at - from };
}

static tg_status
fail_number(tg_parser *parser, size_t from, const char *what)
{
    const tg_span span = span_at(parser, from);
    const tg_text found = text_of(parser, span);
    const char *hint = "";
    if (found.length > 1 && found.data[0] == '-')
        hint = "; it cannot be negative";
    else if (found.length && (memchr(found.data, '.', found.length) || memchr(found.data, 'e', found.length)))
        hint = "; fractions and exponents are not read, choose a smaller unit";
    return fail(parser, span, "found %s, expected %s: a whole number in digits%s", show(parser, span).text, what, hint);
}

/* A whole number that stands alone. */
static tg_status
read_number(tg_parser *parser, const char *what, uint64_t *number, tg_span *span)
{
    *span = read_digits(parser, number);
    const tg_span seen = span_at(parser, span->offset);
    if (span->length == 0 || seen.length != span->length)
        return fail_number(parser, span->offset, what);
    return TG_OK;
}

/* [int] unit */
static tg_status
read_duration(tg_parser *parser, const char *what, uint64_t *duration_us, bool *calendar, tg_span *span)
{
    uint64_t count;
    const tg_span digits = read_digits(parser, &count);
    if (digits.length == 0)
        count = 1;
    else if (!at_end(parser) && !is_letter(peek(parser)) && !is_space(peek(parser)) && peek(parser) != '/' &&
             !is_separator(peek(parser)))
        return fail_number(parser, digits.offset, what);
    skip_space(parser);
    const tg_span word = span_at(parser, parser->at);
    const tg_text typed = text_of(parser, word);
    *span = (tg_span){ digits.length ? digits.offset : word.offset, 0 };
    span->length = word.offset + word.length - span->offset;
    for (size_t i = 0; i < COUNT_OF(units); i++) {
        if (!tg__text_is_nocase(typed, units[i].word))
            continue;
        parser->at = word.offset + word.length;
        *calendar = units[i].calendar;
        if (digits.length && count == 0)
            return fail(parser, digits, "found `0`, expected %s of at least 1 ms", what);
        if (__builtin_mul_overflow(count, units[i].us, duration_us) || *duration_us > TG_PERIOD_US_MAX)
            return fail(parser, *span, "found %s, expected %s of at most 10 years (3650 days)",
                        show(parser, *span).text, what);
        return TG_OK;
    }
    if (is_reserved(typed))
        return fail(parser, word, "found %s: the word is reserved and not available yet; expected the unit of %s",
                    show(parser, word).text, what);
    if (digits.length == 0 && word.length && !is_letter(typed.data[0]) && typed.data[0] != '/' &&
        !is_separator(typed.data[0]))
        return fail_number(parser, word.offset, what);
    const char *guess = nearest_unit(typed);
    if (guess)
        return fail(parser, word, "found %s, expected the unit of %s: did you mean `%s`?", show(parser, word).text,
                    what, guess);
    return fail(parser, word, "found %s, expected the unit of %s: " UNITS_EXPECTED, show(parser, word).text, what);
}

/* int ( "/" | "per" ) [ int ] unit */
static tg_status
read_amount(tg_parser *parser, tg_saying *saying)
{
    saying->limit_span = read_digits(parser, &saying->limit);
    const tg_span seen = span_at(parser, saying->limit_span.offset);
    if (saying->limit_span.length == 0) {
        const tg_text typed = text_of(parser, seen);
        tg_guess guess = { NULL, 0 };
        consider(&guess, typed, "deny");
        if (guess.word)
            return fail(parser, seen, "found %s, expected a rule: did you mean `deny`?", show(parser, seen).text);
        if (is_reserved(typed))
            return fail(parser, seen, "found %s: the word is reserved and not available yet", show(parser, seen).text);
        if (seen.length > 1 && typed.data[0] == '-' && is_digit(typed.data[1]))
            return fail_number(parser, seen.offset, "a limit");
        return fail(parser, seen, "found %s, expected a rule such as `100/minute`, or `deny`", show(parser, seen).text);
    }
    /* In "100per5m" the rest of what stands together is the next word; in "6O/min" it makes the whole no number. */
    if (seen.length > saying->limit_span.length) {
        const size_t after = parser->at;
        const tg_span rest = read_word(parser);
        parser->at = after;
        if (!tg__text_is_nocase(text_of(parser, rest), "per"))
            return fail_number(parser, seen.offset, "a limit");
    }
    const tg_span by = read_word(parser);
    if (!tg__text_is(text_of(parser, by), "/") && !tg__text_is_nocase(text_of(parser, by), "per")) {
        if (is_reserved(text_of(parser, by)))
            return fail(parser, by, "found %s: the word is reserved and not available yet", show(parser, by).text);
        return fail(parser, by, "found %s, expected `/` or `per` and a period after the limit%s", show(parser, by).text,
                    tg__text_is(text_of(parser, by), ",") ? " (`,` begins another rule)" : "");
    }
    const tg_status status =
        read_duration(parser, "a period", &saying->period_us, &saying->calendar, &saying->period_span);
    if (status != TG_OK)
        return status;
    if (saying->limit == 0)
        return fail(parser, saying->limit_span,
                    "found a limit of 0, expected at least 1: write `deny` to refuse everything");
    if (saying->limit > TG_LIMIT_MAX)
        return fail(parser, saying->limit_span, "found a limit of %s, expected at most %" PRIu64,
                    show(parser, saying->limit_span).text, TG_LIMIT_MAX);
    return TG_OK;
}

static tg_status
read_burst(tg_parser *parser, tg_span word, tg_saying *saying)
{
    tg_span number;
    if (saying->burst_span.length)
        return fail(parser, word, "found a second `burst`, expected one a rule");
    const tg_status status = read_number(parser, "a burst", &saying->burst, &number);
    if (status != TG_OK)
        return status;
    if (saying->burst == 0)
        return fail(parser, number,
                    "found a burst of 0, expected at least 1: a bucket that holds nothing lets nothing in");
    if (saying->burst > TG_LIMIT_MAX)
        return fail(parser, number, "found a burst of %s, expected at most %" PRIu64, show(parser, number).text,
                    TG_LIMIT_MAX);
    saying->burst_span = word;
    return TG_OK;
}

static tg_status
read_resolution(tg_parser *parser, tg_span word, tg_saying *saying)
{
    tg_span span;
    bool calendar;
    if (saying->resolution_span.length)
        return fail(parser, word, "found a second `resolution`, expected one a rule");
    const tg_status status = read_duration(parser, "a resolution", &saying->resolution_us, &calendar, &span);
    if (status != TG_OK)
        return status;
    if (saying->resolution_us > saying->period_us)
        return fail(parser, span, "found a resolution of %s, expected at most the rule's period",
                    show(parser, span).text);
    saying->resolution_span = word;
    return TG_OK;
}

/* One word after the amount. */
static tg_status
read_option(tg_parser *parser, tg_saying *saying)
{
    const tg_span word = read_word(parser);
    const tg_text typed = text_of(parser, word);
    if (tg__text_is_nocase(typed, "burst"))
        return read_burst(parser, word, saying);
    if (tg__text_is_nocase(typed, "resolution"))
        return read_resolution(parser, word, saying);
    if (tg__text_is_nocase(typed, "aligned")) {
        if (saying->aligned_span.length)
            return fail(parser, word, "found a second `aligned`, expected one a rule");
        saying->aligned_span = word;
        return TG_OK;
    }
    for (size_t i = 0; i < COUNT_OF(algorithm_words); i++) {
        if (!tg__text_is_nocase(typed, algorithm_words[i].word))
            continue;
        if (saying->algorithm != TG_ALGORITHM_DEFAULT)
            return fail(parser, word, "found %s after %s, expected one algorithm a rule", show(parser, word).text,
                        show(parser, saying->algorithm_span).text);
        saying->algorithm = algorithm_words[i].algorithm;
        saying->algorithm_span = word;
        return TG_OK;
    }
    if (is_reserved(typed))
        return fail(parser, word, "found %s: the word is reserved and not available yet; expected " WORDS_EXPECTED,
                    show(parser, word).text);
    const char *guess = nearest_word(typed);
    if (guess)
        return fail(parser, word, "found %s: did you mean `%s`?", show(parser, word).text, guess);
    return fail(parser, word, "found %s, expected " WORDS_EXPECTED, show(parser, word).text);
}

/* ---- making sense ---- */

/* The algorithm, and why it is this one: for the messages of the three checks below. */
static tg_algorithm
choose(const tg_saying *saying, tg_algorithm preferred, const char **why)
{
    *why = "named";
    if (saying->algorithm != TG_ALGORITHM_DEFAULT)
        return saying->algorithm;
    *why = "preferred for rules that name no algorithm";
    if (preferred != TG_ALGORITHM_DEFAULT)
        return preferred;
    *why = "what `burst` chooses";
    if (saying->burst_span.length)
        return TG_TOKEN_BUCKET;
    *why = "what `aligned` chooses";
    if (saying->aligned_span.length)
        return TG_FIXED_WINDOW;
    *why = "what `resolution` chooses";
    if (saying->resolution_span.length || saying->limit <= LOG_LIMIT_MAX)
        return TG_SLIDING_LOG;
    return TG_SLIDING_COUNTER;
}

static tg_status
make_rule(tg_parser *parser, const tg_saying *saying, tg_algorithm preferred, tg_rule *rule)
{
    const char *why;
    const tg_algorithm algorithm = choose(saying, preferred, &why);
    const char *name = tg_algorithm_name(algorithm);
    if (saying->burst_span.length && !is_bucket(algorithm))
        return fail(parser, saying->burst_span,
                    "found `burst` with %s (%s), expected token_bucket or leaky_bucket: nothing else holds a burst",
                    name, why);
    if (saying->aligned_span.length && algorithm != TG_FIXED_WINDOW)
        return fail(parser, saying->aligned_span, "found `aligned` with %s (%s), expected fixed_window", name, why);
    if (saying->resolution_span.length && algorithm != TG_SLIDING_LOG)
        return fail(parser, saying->resolution_span, "found `resolution` with %s (%s), expected sliding_log", name,
                    why);
    if (saying->aligned_span.length && saying->calendar)
        return fail(parser, saying->aligned_span,
                    "found `aligned` on a month or year, expected weeks or shorter: these are 30 and 365 days and "
                    "would not follow the calendar");
    *rule = (tg_rule){
        .limit = saying->limit,
        .period_us = saying->period_us,
        .burst = saying->burst_span.length ? saying->burst : saying->limit,
        .resolution_us = saying->resolution_us,
        .algorithm = (uint8_t)algorithm,
        .aligned = saying->aligned_span.length > 0,
    };
    return TG_OK;
}

/* One rule, up to its separator or the end. */
static tg_status
read_rule(tg_parser *parser, tg_algorithm preferred, tg_rule *rule, tg_span *whole)
{
    skip_space(parser);
    const size_t from = parser->at;
    const tg_span first = read_word(parser);
    if (tg__text_is_nocase(text_of(parser, first), "deny")) {
        *rule = (tg_rule){ .algorithm = TG_DENY };
        *whole = first;
        skip_space(parser);
        if (at_end(parser) || is_separator(peek(parser)))
            return TG_OK;
        const tg_span word = read_word(parser);
        return fail(parser, word, "found %s after `deny`, expected `;` or the end: it stands alone",
                    show(parser, word).text);
    }
    parser->at = from;
    tg_saying saying = { .algorithm = TG_ALGORITHM_DEFAULT };
    tg_status status = read_amount(parser, &saying);
    for (size_t end = parser->at; status == TG_OK; end = parser->at) {
        *whole = (tg_span){ from, end - from };
        skip_space(parser);
        if (at_end(parser) || is_separator(peek(parser)))
            return make_rule(parser, &saying, preferred, rule);
        status = read_option(parser, &saying);
    }
    return status;
}

static tg_status
read_rules(tg_parser *parser, tg_algorithm preferred, tg_rule rules[TG_RULES_MAX], size_t *count)
{
    skip_space(parser);
    if (at_end(parser))
        return fail(parser, (tg_span){ parser->at, 0 }, "found no rule, expected one such as `100/minute`, or `deny`");
    for (size_t n = 0;;) {
        if (n == TG_RULES_MAX)
            return fail(parser, span_at(parser, parser->at), "found more than %d rules, expected at most that many",
                        TG_RULES_MAX);
        tg_span whole = { 0, 0 };
        const tg_status status = read_rule(parser, preferred, &rules[n], &whole);
        if (status != TG_OK)
            return status;
        for (size_t i = 0; i < n; i++)
            if (rules[i].algorithm == rules[n].algorithm && rules[i].period_us == rules[n].period_us)
                return fail(parser, whole,
                            "found %s beside another %s rule of the same period, expected each algorithm and period "
                            "once: the stricter of the two is the one that counts",
                            show(parser, whole).text, tg_algorithm_name((tg_algorithm)rules[n].algorithm));
        n++;
        if (at_end(parser)) {
            *count = n;
            return TG_OK;
        }
        parser->at++; /* the separator */
        skip_space(parser);
        if (at_end(parser))
            return fail(parser, (tg_span){ parser->at, 0 }, "found the end, expected another rule after `%c`",
                        parser->text.data[parser->at - 1] == ',' ? ',' : ';');
    }
}

tg_status
tg_rules_parse(tg_text text, tg_algorithm preferred, tg_rule rules[TG_RULES_MAX], size_t *count, tg_error *error)
{
    *count = 0;
    if ((int)preferred < TG_ALGORITHM_DEFAULT || (int)preferred >= TG_DENY)
        return tg__error(error, TG_E_ARG, "algorithm %d cannot be preferred, expected fixed_window, sliding_log, "
                         "sliding_counter, token_bucket or leaky_bucket", (int)preferred);
    tg_parser parser = { .text = text.length ? text : tg_text_of(""), .error = error };
    return read_rules(&parser, preferred, rules, count);
}

/* ---- pause_when ---- */

#define PAUSE_US_MIN (10 * SECOND_US)
#define PAUSE_US_MAX HOUR_US
#define PAUSE_LEAST_MAX 100000 /* one word of watch.c counts to ten times that */

/* A sign that stands for itself, however it is spaced. */
static tg_status
expect_sign(tg_parser *parser, char sign)
{
    skip_space(parser);
    const tg_span found = span_at(parser, parser->at);
    if (peek(parser) != sign)
        return fail(parser, found, "found %s, expected `%c`: error_rate > 50%%", show(parser, found).text, sign);
    parser->at++;
    return TG_OK;
}

/* [ "over" duration ] [ "min" int ] */
static tg_status
read_pause_option(tg_parser *parser, tg_pause *pause, bool *over, bool *min)
{
    bool calendar;
    const tg_span word = span_at(parser, parser->at);
    const tg_text text = text_of(parser, word);
    tg_span span;
    const bool is_over = tg__text_is_nocase(text, "over"), is_min = tg__text_is_nocase(text, "min");
    if ((!is_over || *over) && (!is_min || *min))
        return fail(parser, word, "found %s, expected `over` with a duration or `min` with a number of answers",
                    show(parser, word).text);
    parser->at += word.length;
    if (is_min) {
        *min = true;
        const tg_status status = read_number(parser, "how many answers at least", &pause->least, &span);
        if (status != TG_OK || (pause->least >= 1 && pause->least <= PAUSE_LEAST_MAX))
            return status;
        return fail(parser, span, "found %s, expected from 1 to %d answers", show(parser, span).text, PAUSE_LEAST_MAX);
    }
    *over = true;
    const tg_status status = read_duration(parser, "a duration", &pause->period_us, &calendar, &span);
    if (status != TG_OK || (pause->period_us >= PAUSE_US_MIN && pause->period_us <= PAUSE_US_MAX))
        return status;
    return fail(parser, span, "found %s, expected from 10 seconds to an hour", show(parser, span).text);
}

/* "error_rate" ">" int "%" [ "over" duration ] [ "min" int ] */
tg_status
tg__pause_parse(tg_text text, tg_pause *pause, tg_error *error)
{
    tg_parser parser = { .text = text.length ? text : tg_text_of(""), .error = error };
    bool over = false, min = false;
    uint64_t percent;
    *pause = (tg_pause){ .period_us = MINUTE_US, .least = 20 };
    skip_space(&parser);
    tg_span word = { parser.at, 0 };
    while (!at_end(&parser) && is_letter(peek(&parser)))
        parser.at++;
    word.length = parser.at - word.offset;
    if (!tg__text_is_nocase(text_of(&parser, word), "error_rate")) {
        word = span_at(&parser, word.offset);
        return fail(&parser, word, "found %s, expected `error_rate`: error_rate > 50%%", show(&parser, word).text);
    }
    tg_status status = expect_sign(&parser, '>');
    if (status != TG_OK)
        return status;
    const tg_span digits = read_digits(&parser, &percent);
    if (digits.length == 0 || percent > 99)
        return fail(&parser, span_at(&parser, digits.offset), "found %s, expected a whole number from 0 to 99 and `%%`",
                    show(&parser, span_at(&parser, digits.offset)).text);
    status = expect_sign(&parser, '%');
    pause->percent = (unsigned)percent;
    for (skip_space(&parser); status == TG_OK && !at_end(&parser); skip_space(&parser))
        status = read_pause_option(&parser, pause, &over, &min);
    return status;
}

/* ---- from numbers, and back to text ---- */

tg_status
tg_rule_make(uint64_t limit, uint64_t period_us, uint64_t burst, tg_algorithm algorithm, tg_rule *rule, tg_error *error)
{
    if ((int)algorithm < TG_ALGORITHM_DEFAULT || (int)algorithm > TG_DENY)
        return tg__error(error, TG_E_ARG, "there is no algorithm %d", (int)algorithm);
    if (limit == 0 || algorithm == TG_DENY) { /* a computed limit of 0 is no error: it refuses */
        *rule = (tg_rule){ .algorithm = TG_DENY };
        return TG_OK;
    }
    if (limit > TG_LIMIT_MAX)
        return tg__error(error, TG_E_RULE, "found a limit of %" PRIu64 ", expected at most %" PRIu64, limit,
                         TG_LIMIT_MAX);
    if (burst > TG_LIMIT_MAX)
        return tg__error(error, TG_E_RULE, "found a burst of %" PRIu64 ", expected at most %" PRIu64, burst,
                         TG_LIMIT_MAX);
    if (period_us < TG_PERIOD_US_MIN || period_us > TG_PERIOD_US_MAX)
        return tg__error(error, TG_E_RULE, "found a period of %" PRIu64 " us, expected 1 ms to 10 years (3650 days)",
                         period_us);
    if (period_us % MS_US != 0) /* or no text could name the rule */
        return tg__error(error, TG_E_RULE, "found a period of %" PRIu64 " us, expected whole milliseconds", period_us);
    tg_parser parser = { .error = error };
    const tg_saying saying = {
        .limit = limit,
        .period_us = period_us,
        .burst = burst,
        .algorithm = algorithm,
        .burst_span = { 0, burst > 0 },
    };
    const tg_status status = make_rule(&parser, &saying, TG_ALGORITHM_DEFAULT, rule);
    if (status != TG_OK && error)
        error->length = 0; /* no text to mark a word in */
    return status;
}

/* The largest unit that divides a duration, and how often. */
static const struct step {
    uint64_t us;
    const char *one, *many;
} steps[] = {
    { WEEK_US, "week", "w" },     { DAY_US, "day", "d" },      { HOUR_US, "hour", "h" },
    { MINUTE_US, "minute", "m" }, { SECOND_US, "second", "s" }, { MS_US, "ms", "ms" },
};

static const struct step *
step_of(uint64_t duration_us)
{
    size_t step = 0;
    while (step + 1 < COUNT_OF(steps) && duration_us % steps[step].us != 0)
        step++;
    return &steps[step];
}

/* "minute", "30s". A month or a year only where it stands alone, and never with `aligned`, which takes none. */
static void
write_period(const tg_rule *rule, char text[32])
{
    const struct step *step = step_of(rule->period_us);
    if (!rule->aligned && (rule->period_us == MONTH_US || rule->period_us == YEAR_US))
        snprintf(text, 32, "%s", rule->period_us == MONTH_US ? "month" : "year");
    else if (rule->period_us == step->us)
        snprintf(text, 32, "%s", step->one);
    else
        snprintf(text, 32, "%" PRIu64 "%s", rule->period_us / step->us, step->many);
}

void
tg_rule_text(const tg_rule *rule, char text[TG_RULE_TEXT_MAX])
{
    if (rule->algorithm == TG_DENY) {
        snprintf(text, TG_RULE_TEXT_MAX, "deny");
        return;
    }
    char period[32], burst[32] = "", option[48] = "";
    write_period(rule, period);
    if (is_bucket((tg_algorithm)rule->algorithm) && rule->burst != rule->limit)
        snprintf(burst, sizeof burst, " burst %" PRIu64, rule->burst);
    if (rule->aligned)
        snprintf(option, sizeof option, " aligned");
    if (rule->resolution_us > 0) {
        const struct step *step = step_of(rule->resolution_us);
        snprintf(option, sizeof option, " resolution %" PRIu64 "%s", rule->resolution_us / step->us, step->many);
    }
    snprintf(text, TG_RULE_TEXT_MAX, "%" PRIu64 "/%s%s %s%s", rule->limit, period, burst,
             tg_algorithm_name((tg_algorithm)rule->algorithm), option);
}
