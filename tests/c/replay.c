/* Runs a trace from stdin on a real store, through tidegate.h (`force`, which no caller can do just so: on the store's own
 * `apply`), and prints one line for each hit and peek.
 *
 *     replay STORE-URI < trace
 *
 * The format is that of tests/vectors/README.md with the `key` lines of trace.h. The store is opened with a manual
 * clock, set to AT (plus the case's offset) before each step. A changed rule is another limiter of the same name on the same
 * store, as after a reload; a case is a name of its own, and what it left in the store is reset at its end. */
#include "core/core.h"
#include "trace.h"

#define LIMITERS_MAX 64

typedef struct replay {
    tg_clock *clock;
    tg_store *store;
    char name[32];
    unsigned cases;
    struct {
        char text[TRACE_LINE_BYTES];
        tg_limiter *limiter;
    } limiters[LIMITERS_MAX]; /* of this case, by rule text */
    size_t limiter_count;
    tg_limiter *limiter;
    trace_step keys;
    char known[64][64]; /* every key of this case, to be reset */
    size_t known_count;
    uint64_t offset_us;
    tg_decision *hits;
    size_t hit_count, hit_room;
    struct {
        tg_reservation held;
        tg_limiter *limiter;
    } *reservations;
    size_t reservation_count, reservation_room;
} replay;

/* Identities are raw positional parts: the same word is the same identity, in whichever place. */
static size_t
dimensions_of(const trace_step *keys, tg_part parts[TRACE_KEYS_MAX], tg_dimension dimensions[TRACE_KEYS_MAX])
{
    for (size_t i = 0; i < keys->key_count; i++) {
        parts[i] = (tg_part){ .value = tg_text_of(trace_key(keys, i)) };
        dimensions[i] = (tg_dimension){ &parts[i], 1 };
    }
    return keys->key_count;
}

static tg_status
end_case(replay *run, tg_error *error)
{
    tg_status status = TG_OK;
    for (size_t i = 0; i < run->limiter_count; i++) {
        for (size_t k = 0; status == TG_OK && k < run->known_count; k++) {
            const tg_part part = { .value = tg_text_of(run->known[k]) };
            const tg_dimension dimension = { &part, 1 };
            status = tg_limiter_reset(run->limiters[i].limiter, &dimension, 1, error);
        }
        tg_limiter_close(run->limiters[i].limiter);
    }
    run->limiter = NULL;
    run->limiter_count = run->known_count = run->hit_count = run->reservation_count = 0;
    run->offset_us = 0;
    return status;
}

static void
learn_keys(replay *run, const trace_step *keys)
{
    run->keys = *keys;
    for (size_t i = 0; i < keys->key_count; i++) {
        size_t k = 0;
        while (k < run->known_count && strcmp(run->known[k], trace_key(keys, i)) != 0)
            k++;
        if (k == run->known_count && k < sizeof run->known / sizeof *run->known)
            snprintf(run->known[run->known_count++], sizeof run->known[0], "%s", trace_key(keys, i));
    }
}

static tg_status
begin_case(replay *run, tg_error *error)
{
    const tg_status status = end_case(run, error);
    snprintf(run->name, sizeof run->name, "case %u", ++run->cases);
    const trace_step keys = trace_read("key k");
    learn_keys(run, &keys);
    return status;
}

static tg_status
use_rules(replay *run, const char *text, tg_error *error)
{
    for (size_t i = 0; i < run->limiter_count; i++) {
        if (strcmp(run->limiters[i].text, text) == 0) {
            run->limiter = run->limiters[i].limiter;
            return TG_OK;
        }
    }
    if (run->limiter_count == LIMITERS_MAX) {
        fprintf(stderr, "more than %d rules in one case\n", LIMITERS_MAX);
        exit(2);
    }
    const tg_limiter_options options = {
        .rules = tg_text_of(text), .name = tg_text_of(run->name), .space = tg_text_of("replay"),
    };
    const tg_status status = tg_limiter_open(run->store, NULL, &options, &run->limiter, error);
    if (status == TG_OK) {
        snprintf(run->limiters[run->limiter_count].text, sizeof run->limiters[0].text, "%s", text);
        run->limiters[run->limiter_count++].limiter = run->limiter;
    }
    return status;
}

/* Of a peek, which names rules and identities. */
static tg_status
force(replay *run, tg_decision *decision, tg_error *error)
{
    tg_target targets[TG_TARGETS_MAX];
    for (size_t i = 0; i < decision->result_count; i++)
        targets[i] = (tg_target){
            .rule = &decision->results[i].rule,
            .identity = &decision->identities[decision->results[i].identity],
            .cost = decision->results[i].cost,
            .forced = true,
        };
    const tg_status status = run->store->ops->apply(run->store, TG_OP_HIT, targets, decision->result_count, 0,
                                                    decision->results, &decision->overflow, error);
    if (status == TG_OK)
        tg__decision_report(decision);
    return status;
}

static tg_status
judge(replay *run, const trace_step *step, tg_error *error)
{
    tg_part parts[TRACE_KEYS_MAX];
    tg_dimension dimensions[TRACE_KEYS_MAX];
    const size_t count = dimensions_of(&run->keys, parts, dimensions);
    tg_decision decision;
    tg_status status;
    if (step->verb == TRACE_HIT)
        status = tg_limiter_hit(run->limiter, dimensions, count, step->amount, &decision, error);
    else if (step->verb == TRACE_WAIT)
        status = tg_limiter_hit_within(run->limiter, dimensions, count, step->amount, step->patience_us, &decision, error);
    else
        status = tg_limiter_peek(run->limiter, dimensions, count, step->amount, &decision, error);
    if (status == TG_OK && step->verb == TRACE_FORCE)
        status = force(run, &decision, error);
    if (status != TG_OK)
        return status;
    trace_print(stdout, &decision);
    if (step->verb == TRACE_PEEK)
        return TG_OK;
    if (run->hit_count == run->hit_room) {
        run->hit_room = run->hit_room ? 2 * run->hit_room : 64;
        run->hits = realloc(run->hits, run->hit_room * sizeof *run->hits);
        if (!run->hits)
            abort();
    }
    run->hits[run->hit_count++] = decision;
    return TG_OK;
}

static tg_status
reserve(replay *run, const trace_step *step, tg_error *error)
{
    tg_part parts[TRACE_KEYS_MAX];
    tg_dimension dimensions[TRACE_KEYS_MAX];
    const size_t count = dimensions_of(&run->keys, parts, dimensions);
    if (run->reservation_count == run->reservation_room) {
        run->reservation_room = run->reservation_room ? 2 * run->reservation_room : 16;
        run->reservations = realloc(run->reservations, run->reservation_room * sizeof *run->reservations);
        if (!run->reservations)
            abort();
    }
    tg_reservation *held = &run->reservations[run->reservation_count].held;
    run->reservations[run->reservation_count++].limiter = run->limiter;
    const tg_status status =
        tg_limiter_reserve(run->limiter, dimensions, count, step->amount, step->patience_us, held, error);
    if (status == TG_OK)
        trace_print(stdout, &held->decision);
    return status;
}

/* A lease that has ended is no failure of the trace. */
static tg_status
settle_or_renew(replay *run, const trace_step *step, tg_error *error)
{
    const size_t n = step->patience_us - 1;
    if (n >= run->reservation_count) {
        snprintf(error->message, sizeof error->message, "no such reservation");
        return TG_E_ARG;
    }
    if (step->verb == TRACE_SETTLE)
        return tg_reservation_settle(run->reservations[n].limiter, &run->reservations[n].held, step->amount, error);
    const tg_status status =
        tg_reservation_renew(run->reservations[n].limiter, &run->reservations[n].held, step->amount, error);
    return status == TG_E_ARG ? TG_OK : status;
}

static tg_status
do_step(replay *run, const trace_step *step, tg_error *error)
{
    tg_part parts[TRACE_KEYS_MAX];
    tg_dimension dimensions[TRACE_KEYS_MAX];
    if (step->verb >= TRACE_HIT && step->verb <= TRACE_RESET) {
        tg_clock_set_us(run->clock, step->at_us + run->offset_us);
        if (!run->limiter) {
            snprintf(error->message, sizeof error->message, "no rule yet");
            return TG_E_ARG;
        }
    }
    switch (step->verb) {
    case TRACE_NOTHING:
        return TG_OK;
    case TRACE_CASE:
        return begin_case(run, error);
    case TRACE_RULE:
        return use_rules(run, step->text, error);
    case TRACE_KEY:
        learn_keys(run, step);
        return TG_OK;
    case TRACE_OFFSET:
        run->offset_us = step->at_us;
        return TG_OK;
    case TRACE_HIT:
    case TRACE_WAIT:
    case TRACE_FORCE:
    case TRACE_PEEK:
        return judge(run, step, error);
    case TRACE_RESERVE:
        return reserve(run, step, error);
    case TRACE_SETTLE:
    case TRACE_RENEW:
        return settle_or_renew(run, step, error);
    case TRACE_REFUND:
        return tg_limiter_refund(run->limiter, dimensions, dimensions_of(&run->keys, parts, dimensions), step->amount,
                                 error);
    case TRACE_UNDO:
        if (step->amount - 1 >= run->hit_count)
            break;
        return tg_decision_refund(run->store, &run->hits[step->amount - 1], error);
    case TRACE_RESET:
        return tg_limiter_reset(run->limiter, dimensions, dimensions_of(&run->keys, parts, dimensions), error);
    case TRACE_BAD:
        break;
    }
    snprintf(error->message, sizeof error->message, "not a step");
    return TG_E_ARG;
}

int
main(int argc, char **argv)
{
    static replay run;
    static char line[TRACE_LINE_BYTES];
    tg_error error = { .message = "" };
    if (argc != 2) {
        fprintf(stderr, "usage: replay STORE-URI < trace\n");
        return 2;
    }
    tg_status status = tg_clock_open(0, &run.clock, &error);
    if (status == TG_OK)
        status = tg_store_open(tg_text_of(argv[1]), &(tg_store_options){ .clock = run.clock }, &run.store, &error);
    if (status == TG_OK)
        status = begin_case(&run, &error);
    unsigned long number = 0;
    while (status == TG_OK && fgets(line, sizeof line, stdin)) {
        number++;
        const trace_step step = trace_read(line);
        status = do_step(&run, &step, &error);
    }
    if (status == TG_OK)
        status = end_case(&run, &error);
    if (status != TG_OK)
        fprintf(stderr, "line %lu: %s: %s: %s\n", number, tg_status_name(status), error.message, line);
    for (size_t i = 0; i < run.limiter_count; i++)
        tg_limiter_close(run.limiters[i].limiter);
    free(run.hits);
    free(run.reservations);
    tg_store_close(run.store);
    tg_clock_close(run.clock);
    return status == TG_OK ? 0 : 1;
}
