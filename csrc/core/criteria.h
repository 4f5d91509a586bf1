/* A policy's `match`, one criterion at a time: why it does not speak of a request, and whether another takes all it could.
 * The matching itself is config/match.c; here it is only asked about less than the whole.
 * Must not enter: a second way to match. */
#ifndef TG_CRITERIA_H
#define TG_CRITERIA_H

#include "config/config.h"
#include "config/match.h"

#define TG_CRITERIA_MAX 12 /* headers past it are one criterion together */

typedef struct tg_criterion {
    const char *word; /* "path", "method", "host", "route", "header" */
    tg_match only;    /* a match with this criterion alone */
} tg_criterion;

size_t tg__criteria_of(const tg_match *match, tg_criterion found[TG_CRITERIA_MAX]);
bool tg__criterion_meets(const tg_criterion *criterion, const tg_request *request);
/* The n-th of its alternatives as it was written, in the spelling it is compared in. Cut where it is too long. */
size_t tg__criterion_count(const tg_criterion *criterion);
void tg__criterion_text(const tg_criterion *criterion, size_t n, char *text, size_t size);

#endif
