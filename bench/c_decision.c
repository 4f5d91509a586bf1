/* What one decision costs in C, beside one reading of the clock. Everything is measured in one interleaved run: each
 * round times every row once, and what is reported are medians over the rounds, of the times and of the ratios within a
 * round.
 *
 *   c_decision [--store URI] [--rounds N]   one line a row: name, median ns, median ratio to its base row; at the end
 *                                           the bytes that a logged hit takes
 *   c_decision [--store URI] --only ROW N   does N of one row and leaves: for counting instructions
 *
 * Must not enter: anything but tidegate.h. */
#include "tidegate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS_MAX 501
#define CALLS 20000 /* about 3 ms a row and round: short enough that a round meets one speed of the processor */

typedef struct row {
    const char *name;
    const char *base;  /* the row it is compared with */
    const char *rules; /* NULL: not a decision */
    bool denied;
    bool peek;
    const char *file; /* a rules file: a whole request is judged by it, and answered */
    size_t reset_every; /* a log fills: forgotten after so many hits, at a cost that spreads over them; 0: never */
    tg_limiter *limiter;
    tg_gate *gate;
    double ns[ROUNDS_MAX];
} row;

/* Limits that no speed of hitting reaches, so that each hit is admitted and writes. */
static row rows[] = {
    { .name = "clock" },
    { .name = "one_rule", .base = "clock", .rules = "1000000000/second token_bucket" },
    { .name = "two_rules", .base = "one_rule",
      .rules = "1000000000/second token_bucket; 10000000000/minute token_bucket" },
    { .name = "three_rules", .base = "one_rule",
      .rules = "1000000000/second token_bucket; 10000000000/minute token_bucket; 10000000000/hour token_bucket" },
    { .name = "denied", .base = "one_rule", .rules = "1/year token_bucket", .denied = true },
    { .name = "peek", .base = "one_rule", .rules = "1000000000/second token_bucket", .peek = true },
    { .name = "fixed_window", .base = "clock", .rules = "10000000000/day fixed_window" },
    { .name = "sliding_counter", .base = "clock", .rules = "10000000000/day sliding_counter" },
    { .name = "sliding_log", .base = "clock", .rules = "1000/day sliding_log", .reset_every = 1000 },
    { .name = "sliding_log_denied", .base = "sliding_log", .rules = "1/year sliding_log", .denied = true },
    { .name = "gate", .base = "one_rule", .rules = "",
      .file = "trusted_proxies: [127.0.0.1]\npolicies:\n"
              "  - {name: login, match: {path: /login, methods: POST}, rules: 5/minute}\n"
              "  - {name: api, match: {path: \"/api/*\"}, rules: 1000000000/second token_bucket}\n" },
    { .name = "gate_long_way", .base = "gate", .rules = "", /* no policy of it is simple */
      .file = "trusted_proxies: [127.0.0.1]\npolicies:\n"
              "  - {name: login, match: {path: /login, methods: POST}, rules: 5/minute, exempt: 10.0.0.0/8}\n"
              "  - {name: api, match: {path: \"/api/*\"}, rules: 1000000000/second token_bucket}\n" },
};
#define ROWS (sizeof rows / sizeof *rows)

static const tg_part part = { .value = { "client-0123456789abcdef012345678", 32 } };
static const tg_dimension dimension = { .parts = &part, .part_count = 1 };

static void
fail(const char *what, const tg_error *error)
{
    fprintf(stderr, "c_decision: %s: %s\n", what, error->message);
    exit(1);
}

static tg_judgement judgement;
static tg_answer answer;

static tg_status
judge(const row *r, tg_error *error)
{
    static const tg_header headers[] = {
        { { "Host", 4 }, { "shop.example", 12 } },
        { { "User-Agent", 10 }, { "Mozilla/5.0 (X11; Linux x86_64)", 31 } },
        { { "Accept", 6 }, { "text/html,application/xhtml+xml", 31 } },
        { { "Accept-Language", 15 }, { "en-GB,en;q=0.5", 14 } },
        { { "X-Forwarded-For", 15 }, { "203.0.113.9", 11 } },
        { { "Cookie", 6 }, { "sid=0123456789abcdef", 20 } },
    };
    static const tg_request request = {
        .method = { "GET", 3 }, .path = { "/api/items/7?page=2", 19 }, .host = { "shop.example", 12 },
        .peer = { "127.0.0.1", 9 }, .headers = headers, .header_count = sizeof headers / sizeof *headers,
    };
    return tg_gate_judge(r->gate, &request, 1, NULL, 0, &judgement, &answer, error);
}

static void
open_gate(row *r, const char *uri)
{
    char path[] = "/tmp/tidegate-bench-XXXXXX";
    tg_error error = { 0 };
    const int fd = mkstemp(path);
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of(uri) };
    const bool written = fd != -1 && write(fd, r->file, strlen(r->file)) == (ssize_t)strlen(r->file);
    if (!written || tg_gate_open(&options, &r->gate, &error) != TG_OK || judge(r, &error) != TG_OK ||
        judgement.outcome != TG_ALLOWED || answer.field_count == 0)
        fail(r->name, &error);
    close(fd);
    unlink(path);
}

static void
open_rows(tg_store *store, const char *uri)
{
    for (row *r = rows; r < rows + ROWS; r++) {
        if (!r->rules)
            continue;
        if (r->file) {
            open_gate(r, uri);
            continue;
        }
        tg_error error = { 0 };
        const tg_limiter_options options = { .rules = tg_text_of(r->rules), .name = tg_text_of(r->name) };
        if (tg_limiter_open(store, NULL, &options, &r->limiter, &error) != TG_OK)
            fail(r->name, &error);
        static tg_decision decision;
        if (tg_limiter_hit(r->limiter, &dimension, 1, 1, &decision, &error) != TG_OK || decision.degraded)
            fail(r->name, &error);
    }
}

/* Returns a sum over the answers, so that nothing of the work can be left out. */
static uint64_t
work(const row *r, size_t calls)
{
    static tg_decision decision;
    uint64_t sum = 0;
    for (size_t i = 0; i < calls; i++) {
        if (!r->rules) {
            struct timespec now;
            clock_gettime(CLOCK_BOOTTIME, &now); /* the one that the table reads */
            sum += (uint64_t)now.tv_nsec;
        } else if (r->file) {
            sum += judge(r, NULL) == TG_OK && judgement.status == 0;
        } else if (r->peek) {
            sum += tg_limiter_peek(r->limiter, &dimension, 1, 1, &decision, NULL) == TG_OK && decision.allowed;
        } else {
            if (r->reset_every > 0 && i % r->reset_every == 0)
                tg_limiter_reset(r->limiter, &dimension, 1, NULL);
            sum += tg_limiter_hit(r->limiter, &dimension, 1, 1, &decision, NULL) == TG_OK && decision.allowed;
        }
    }
    return sum;
}

/* The processor's time of this process: what else runs on the machine does not count. */
static double
seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* What the log arena holds for each logged hit, its share of half-filled blocks included. */
static double
bytes_per_logged_hit(tg_store *store)
{
    enum { HITS = 1000, BLOCK_BYTES = 64 };
    tg_error error = { 0 };
    tg_store_stats before, after;
    tg_limiter *limiter;
    const tg_limiter_options options = { .rules = tg_text_of("1000/day sliding_log"), .name = tg_text_of("memory") };
    static tg_decision decision;
    if (tg_limiter_open(store, NULL, &options, &limiter, &error) != TG_OK ||
        tg_store_read_stats(store, &before, &error) != TG_OK)
        fail("memory", &error);
    for (int i = 0; i < HITS; i++)
        tg_limiter_hit(limiter, &dimension, 1, 1, &decision, NULL);
    if (tg_store_read_stats(store, &after, &error) != TG_OK)
        fail("memory", &error);
    tg_limiter_close(limiter);
    return (double)(after.log_blocks_used - before.log_blocks_used) * BLOCK_BYTES / HITS;
}

static int
by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double
median(const double *values, size_t count)
{
    static double sorted[ROUNDS_MAX];
    memcpy(sorted, values, count * sizeof *values);
    qsort(sorted, count, sizeof *sorted, by_value);
    return sorted[count / 2];
}

static row *
find(const char *name)
{
    for (row *r = rows; r < rows + ROWS; r++) {
        if (strcmp(r->name, name) == 0)
            return r;
    }
    fprintf(stderr, "c_decision: no row \"%s\"\n", name);
    exit(2);
}

int
main(int argc, char **argv)
{
    const char *uri = "memory://bench", *only = NULL;
    size_t count = 51;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--store") == 0 && i + 1 < argc) {
            uri = argv[++i];
        } else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
            count = (size_t)strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--only") == 0 && i + 2 < argc) {
            only = argv[++i];
            count = (size_t)strtoul(argv[++i], NULL, 10);
        } else {
            fprintf(stderr, "usage: c_decision [--store URI] [--rounds N | --only ROW N]\n");
            return 2;
        }
    }
    if (count == 0 || (!only && count > ROUNDS_MAX)) {
        fprintf(stderr, "c_decision: from 1 to %d rounds\n", ROUNDS_MAX);
        return 2;
    }
    tg_error error = { 0 };
    tg_store *store;
    if (tg_store_open(tg_text_of(uri), NULL, &store, &error) != TG_OK)
        fail(uri, &error);
    open_rows(store, uri);
    if (only) {
        const row *r = find(only);
        if (r->denied != (work(r, count) == 0))
            return 1;
    } else {
        for (size_t round = 0; round < count; round++) {
            for (row *r = rows; r < rows + ROWS; r++) {
                const double from = seconds();
                const uint64_t allowed = work(r, CALLS);
                r->ns[round] = (seconds() - from) * 1e9 / CALLS;
                if (r->rules && !r->peek && r->denied != (allowed == 0)) {
                    fprintf(stderr, "c_decision: %s: %llu of %d allowed\n", r->name, (unsigned long long)allowed,
                            CALLS);
                    return 1;
                }
            }
        }
        for (row *r = rows; r < rows + ROWS; r++) {
            double ratios[ROUNDS_MAX];
            for (size_t round = 0; round < count && r->base; round++)
                ratios[round] = r->ns[round] / find(r->base)->ns[round];
            printf("%s %.1f %.3f\n", r->name, median(r->ns, count), r->base ? median(ratios, count) : 1.0);
        }
        printf("logged_hit_bytes %.2f 1\n", bytes_per_logged_hit(store));
    }
    for (row *r = rows; r < rows + ROWS; r++) {
        tg_limiter_close(r->limiter);
        tg_gate_close(r->gate);
    }
    tg_store_close(store);
    return 0;
}
