/* What a decision through Redis costs, beside a plain hiredis loop that sends the very same bytes. Everything in one
 * interleaved run; medians over the rounds, of the rates and of the ratios within a round.
 *
 *   redis_sync SOCKET [ROUNDS] [MILLISECONDS]    a line a row: name, decisions/s, loop/s, ratio, us of server CPU at depth 1, at 64
 *
 * The bytes are learned by standing between the limiter and the server for one hit. Must not enter: csrc but
 * tidegate.h. */
#include "tidegate.h"

#include <hiredis/hiredis.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS_MAX 51
#define DEPTH 64

typedef struct row {
    const char *name, *rules; /* NULL: INCR */
    bool denied;
    tg_limiter *limiter;
    char *bytes;
    size_t length;
    double ours[ROUNDS_MAX], loop[ROUNDS_MAX], ratio[ROUNDS_MAX], cpu_1[ROUNDS_MAX], cpu_64[ROUNDS_MAX];
} row;

static row rows[] = {
    { .name = "INCR" },
    { .name = "token_bucket", .rules = "1000000000/second token_bucket" },
    { .name = "fixed_window", .rules = "10000000000/day fixed_window" },
    { .name = "sliding_counter", .rules = "10000000000/day sliding_counter" },
    { .name = "sliding_log", .rules = "100000000/10s sliding_log" },
    { .name = "two token_buckets", .rules = "1000000000/second token_bucket; 10000000000/minute token_bucket" },
    { .name = "token_bucket denied", .rules = "1/year token_bucket", .denied = true },
    { .name = "sliding_log denied", .rules = "100/year sliding_log", .denied = true },
};
#define ROWS (sizeof rows / sizeof *rows)

static const tg_part part = { .value = { "client-0123456789abcdef012345678", 32 } };
static const tg_dimension dimension = { .parts = &part, .part_count = 1 };

static void
fail(const char *what, const char *why)
{
    fprintf(stderr, "redis_sync: %s: %s\n", what, why);
    exit(1);
}

static double
seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- between the limiter and the server ---- */

static struct {
    char path[64], heard[1 << 16];
    size_t length;
    int listener;
    const char *server;
} between;

static int
unix_socket(const char *path, bool serve)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    const int failed = serve ? bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4)
                             : connect(fd, (struct sockaddr *)&address, sizeof address);
    if (failed)
        fail(path, "socket");
    return fd;
}

static void *
stand_between(void *unused)
{
    (void)unused;
    static char bytes[1 << 17];
    for (;;) {
        const int client = accept(between.listener, NULL, NULL);
        if (client == -1)
            return NULL;
        const int server = unix_socket(between.server, false);
        struct pollfd both[2] = { { .fd = client, .events = POLLIN }, { .fd = server, .events = POLLIN } };
        for (bool open = true; open;) {
            poll(both, 2, -1);
            for (int i = 0; i < 2; i++) {
                if (!both[i].revents)
                    continue;
                const ssize_t got = read(both[i].fd, bytes, sizeof bytes);
                open = open && got > 0 && write(both[1 - i].fd, bytes, (size_t)got) == got;
                if (i == 0 && got > 0 && (size_t)got < sizeof between.heard) {
                    memcpy(between.heard, bytes, (size_t)got);
                    between.length = (size_t)got;
                }
            }
        }
        close(client);
        close(server);
    }
}

static tg_decision
hit(tg_limiter *limiter)
{
    tg_decision decision;
    tg_error error;
    if (tg_limiter_hit(limiter, &dimension, 1, 1, &decision, &error) != TG_OK)
        fail("hit", error.message);
    return decision;
}

static tg_store *
open_store(const char *path)
{
    char uri[128];
    tg_error error;
    tg_store *store;
    snprintf(uri, sizeof uri, "redis+unix://%s?timeout_ms=2000", path);
    if (tg_store_open(tg_text_of(uri), NULL, &store, &error) != TG_OK)
        fail(uri, error.message);
    return store;
}

static tg_limiter *
open_limiter(tg_store *store, const row *r)
{
    tg_error error;
    tg_limiter *limiter;
    const tg_limiter_options options = { .rules = tg_text_of(r->rules), .name = tg_text_of(r->name) };
    if (tg_limiter_open(store, NULL, &options, &limiter, &error) != TG_OK)
        fail(r->rules, error.message);
    return limiter;
}

static void
learn_bytes(void)
{
    snprintf(between.path, sizeof between.path, "/tmp/redis_sync.%d", (int)getpid());
    between.listener = unix_socket(between.path, true);
    pthread_t thread;
    pthread_create(&thread, NULL, stand_between, NULL);
    tg_store *store = open_store(between.path);
    for (row *r = rows; r < rows + ROWS; r++) {
        if (!r->rules) {
            r->bytes = strdup("*2\r\n$4\r\nINCR\r\n$7\r\nbench:i\r\n");
            r->length = strlen(r->bytes);
            continue;
        }
        tg_limiter *limiter = open_limiter(store, r);
        for (int i = 0; i < (r->denied ? 102 : 2); i++) /* the first one of a script goes out with its text */
            if (hit(limiter).degraded)
                fail(r->name, "no decision");
        r->bytes = malloc(between.length);
        memcpy(r->bytes, between.heard, between.length);
        r->length = between.length;
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
    shutdown(between.listener, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(between.listener);
    unlink(between.path);
}

/* ---- measuring ---- */

static double
server_cpu(redisContext *link)
{
    redisReply *reply = redisCommand(link, "INFO cpu");
    double user = 0, system = 0;
    const char *at = strstr(reply->str, "used_cpu_user_main_thread:");
    const char *also = strstr(reply->str, "used_cpu_sys_main_thread:");
    if (!at || !also)
        fail("INFO cpu", reply->str);
    user = atof(strchr(at, ':') + 1);
    system = atof(strchr(also, ':') + 1);
    freeReplyObject(reply);
    return user + system;
}

/* Sends the row's bytes `depth` at a time for so long; returns decisions a second. */
static double
loop(redisContext *link, const row *r, int depth, double for_seconds, double *cpu_us)
{
    const double began = seconds(), cpu_began = server_cpu(link);
    long count = 0;
    double now;
    do {
        for (int i = 0; i < depth; i++)
            redisAppendFormattedCommand(link, r->bytes, r->length);
        for (int i = 0; i < depth; i++) {
            void *reply = NULL;
            if (redisGetReply(link, &reply) != REDIS_OK || ((redisReply *)reply)->type == REDIS_REPLY_ERROR)
                fail(r->name, reply ? ((redisReply *)reply)->str : link->errstr);
            freeReplyObject(reply);
        }
        count += depth;
        now = seconds();
    } while (now - began < for_seconds);
    if (cpu_us)
        *cpu_us = (server_cpu(link) - cpu_began) / (double)count * 1e6;
    return (double)count / (now - began);
}

static double
ours(const row *r, double for_seconds)
{
    const double began = seconds();
    long count = 0;
    double now;
    do {
        for (int i = 0; i < 16; i++)
            if (hit(r->limiter).degraded)
                fail(r->name, "degraded");
        count += 16;
        now = seconds();
    } while (now - began < for_seconds);
    return (double)count / (now - began);
}

static int
by_size(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double
median(double *numbers, int count)
{
    qsort(numbers, (size_t)count, sizeof *numbers, by_size);
    return numbers[count / 2];
}

int
main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: redis_sync SOCKET [ROUNDS] [MILLISECONDS]\n");
        return 2;
    }
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    rounds = rounds < 1 ? 1 : rounds > ROUNDS_MAX ? ROUNDS_MAX : rounds;
    const double each = (argc > 3 ? atof(argv[3]) : 300) / 1000;
    between.server = argv[1];
    redisContext *link = redisConnectUnix(argv[1]);
    if (!link || link->err)
        fail(argv[1], link ? link->errstr : "memory");
    freeReplyObject(redisCommand(link, "CONFIG SET latency-tracking no"));
    learn_bytes();
    tg_store *store = open_store(argv[1]);
    for (row *r = rows; r < rows + ROWS; r++)
        if (r->rules)
            r->limiter = open_limiter(store, r);
    for (int round = 0; round < rounds; round++)
        for (row *r = rows; r < rows + ROWS; r++) {
            r->loop[round] = loop(link, r, 1, each, &r->cpu_1[round]);
            r->ours[round] = r->rules ? ours(r, each) : 0;
            r->ratio[round] = r->ours[round] / r->loop[round];
            loop(link, r, DEPTH, each, &r->cpu_64[round]);
        }
    for (row *r = rows; r < rows + ROWS; r++)
        printf("%-22s %8.0f %8.0f %5.2f %6.1f %6.1f\n", r->name, median(r->ours, rounds), median(r->loop, rounds),
               median(r->ratio, rounds), median(r->cpu_1, rounds), median(r->cpu_64, rounds));
    for (row *r = rows; r < rows + ROWS; r++) {
        tg_limiter_close(r->limiter);
        free(r->bytes);
    }
    tg_store_close(store);
    redisFree(link);
    return 0;
}
