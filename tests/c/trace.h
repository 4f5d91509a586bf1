/* Reading traces and vectors (tests/vectors/README.md): one line, one step. Must not enter: what a step does.
 *
 * Beyond the vectors a trace has
 *     key    A B A        the identities of the next steps, one dimension a word (default: k); a word may come twice
 * and what stands after "=" is the reader's. */
#ifndef TG_TEST_TRACE_H
#define TG_TEST_TRACE_H

#include "tidegate.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRACE_LINE_BYTES 4096
#define TRACE_KEYS_MAX TG_DIMENSIONS_MAX

typedef enum trace_verb {
    TRACE_NOTHING = 0, /* empty, or a comment */
    TRACE_CASE,
    TRACE_RULE,
    TRACE_KEY,
    TRACE_OFFSET,
    TRACE_HIT,
    TRACE_WAIT,
    TRACE_FORCE,
    TRACE_RESERVE,
    TRACE_SETTLE,
    TRACE_RENEW,
    TRACE_PEEK,
    TRACE_REFUND,
    TRACE_UNDO,
    TRACE_RESET,
    TRACE_BAD
} trace_verb;

typedef struct trace_step {
    trace_verb verb;
    char text[TRACE_LINE_BYTES]; /* after the verb, without the expectation; trimmed */
    char expected[256];          /* after " = "; empty when there is none */
    uint64_t at_us;              /* hit, wait, force, reserve and all that follow; offset: the number */
    uint64_t amount;             /* hit, wait, force, peek, refund: cost; undo: which hit, wait or force, from 1 */
    uint64_t patience_us;        /* wait; reserve: the lease; settle, renew: which reserve, from 1 */
    size_t key_count;            /* key */
    size_t keys[TRACE_KEYS_MAX]; /* offsets into text */
} trace_step;

static inline char *
trace_trim(char *text)
{
    while (*text == ' ' || *text == '\t')
        text++;
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r\n", text[length - 1]))
        text[--length] = '\0';
    return text;
}

static inline trace_verb
trace_verb_of(const char *word)
{
    static const char *const words[] = { "",      "case", "rule",   "key",  "offset",  "hit",    "wait",
                                         "force", "reserve", "settle", "renew", "peek", "refund", "undo", "reset" };
    for (size_t i = 1; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i]) == 0)
            return (trace_verb)i;
    return TRACE_BAD;
}

static inline bool
wants_three(trace_verb verb)
{
    return verb == TRACE_WAIT || verb == TRACE_RESERVE || verb == TRACE_SETTLE || verb == TRACE_RENEW;
}

/* Reads one line; TRACE_BAD for one that is not in the format. */
static inline trace_step
trace_read(const char *line)
{
    trace_step step = { .verb = TRACE_NOTHING };
    char copy[TRACE_LINE_BYTES];
    snprintf(copy, sizeof copy, "%s", line);
    char *rest = trace_trim(copy);
    if (*rest == '\0' || *rest == '#')
        return step;
    char *end = rest + strcspn(rest, " \t");
    if (*end)
        *end++ = '\0';
    step.verb = trace_verb_of(rest);
    rest = trace_trim(end);
    char *equals = strstr(rest, "= ");
    if (equals && step.verb >= TRACE_HIT) {
        snprintf(step.expected, sizeof step.expected, "%s", trace_trim(equals + 2));
        *equals = '\0';
        rest = trace_trim(rest);
    }
    snprintf(step.text, sizeof step.text, "%s", rest);
    if (step.verb == TRACE_KEY) {
        for (char *word = strtok(step.text, " "); word && step.key_count < TRACE_KEYS_MAX; word = strtok(NULL, " "))
            step.keys[step.key_count++] = (size_t)(word - step.text);
        if (step.key_count == 0)
            step.verb = TRACE_BAD;
    } else if (step.verb >= TRACE_OFFSET && step.verb != TRACE_BAD) {
        const int wanted = step.verb == TRACE_OFFSET || step.verb == TRACE_RESET ? 1 : wants_three(step.verb) ? 3 : 2;
        if (sscanf(step.text, "%" SCNu64 " %" SCNu64 " %" SCNu64, &step.at_us, &step.amount, &step.patience_us) != wanted)
            step.verb = TRACE_BAD;
    }
    return step;
}

static inline const char *
trace_key(const trace_step *step, size_t index)
{
    return step->text + step->keys[index];
}

/* "yes 3 0 60000000 0" of one set of numbers, as the vectors write them. */
static inline void
trace_numbers(char *text, size_t size, bool allowed, uint64_t remaining, uint64_t retry_us, uint64_t reset_us,
              uint64_t delay_us)
{
    char retry[24] = "never";
    if (retry_us != TG_NEVER)
        snprintf(retry, sizeof retry, "%" PRIu64, retry_us);
    snprintf(text, size, "%s %" PRIu64 " %s %" PRIu64 " %" PRIu64, allowed ? "yes" : "no", remaining, retry, reset_us,
             delay_us);
}

/* A decision on one line: its own numbers, which result it reports, then those of each result. */
static inline void
trace_print(FILE *out, const tg_decision *decision)
{
    char numbers[160];
    trace_numbers(numbers, sizeof numbers, decision->allowed, decision->remaining, decision->retry_after_us,
                  decision->reset_after_us, decision->delay_us);
    fprintf(out, "%s @%d", numbers, decision->reported);
    for (size_t i = 0; i < decision->result_count; i++) {
        const tg_result *result = &decision->results[i];
        trace_numbers(numbers, sizeof numbers, result->allowed, result->remaining, result->retry_after_us,
                      result->reset_after_us, result->delay_us);
        fprintf(out, " | %s", numbers);
    }
    fprintf(out, "%s%s\n", decision->degraded ? " degraded" : "", decision->overflow ? " overflow" : "");
}

#endif
