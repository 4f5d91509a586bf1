/* Decisions without waiting beside a plain hiredis loop that sends the same bytes 64 at a time. One interleaved run;
 * medians.
 *
 *   redis_async SOCKET [ROUNDS] [MILLISECONDS]    a line a row: tasks, decisions/s, loop/s, ratio
 *
 * Each task begins its next decision when it has its answer, as many coroutines do. Must not enter: measuring Python. */
#include "core/core.h"
#include "stores/redis/async.h"
#include "stores/redis/redis.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#define TASKS_MAX 256
#define KEYS 1000
#define DEPTH 64
#define ROUNDS_MAX 51

static struct {
    tg_store_async *client;
    struct pollfd fd;
    uint64_t wakes_at_us;
    bool flushes;
} loop = { .fd = { .fd = -1 } };

static tg_rule rule;
static tg_identity identities[KEYS];
static uint64_t ends_at_us;
static long decided, under_way;
static unsigned next_key;

typedef struct task {
    tg_target target;
    tg_result result;
    tg_store_call *call;
} task;

static void
fail(const char *what, const char *why)
{
    fprintf(stderr, "redis_async: %s: %s\n", what, why);
    exit(1);
}

static void
on_watch(void *unused, int fd, bool readable, bool writable)
{
    (void)unused;
    loop.fd = (struct pollfd){ .fd = readable || writable ? fd : -1,
                               .events = (short)((readable ? POLLIN : 0) | (writable ? POLLOUT : 0)) };
}

static void
on_wake(void *unused, uint64_t in_us)
{
    (void)unused;
    loop.wakes_at_us = in_us == UINT64_MAX ? UINT64_MAX : tg__monotonic_us() + in_us;
}

static void
on_flush(void *unused)
{
    (void)unused;
    loop.flushes = true;
}

static void on_done(void *data, tg_status status, const tg_error *error);

static void
begin(task *one)
{
    tg_error error;
    one->target = (tg_target){ .rule = &rule, .identity = &identities[next_key++ % KEYS], .cost = 1 };
    if (tg__async_begin(loop.client, TG_OP_HIT, &one->target, 1, 0, &one->result, on_done, one, &one->call, &error) != TG_OK)
        fail("begin", error.message);
    under_way++;
}

static void
on_done(void *data, tg_status status, const tg_error *error)
{
    if (status != TG_OK)
        fail("hit", error->message);
    under_way--;
    decided++;
    if (decided % 64 != 0 || tg__monotonic_us() < ends_at_us)
        begin(data);
    else
        ends_at_us = 0; /* nobody begins another */
}

static void
turn(void)
{
    if (loop.flushes) {
        loop.flushes = false;
        loop.client->ops->flush(loop.client);
    }
    poll(&loop.fd, loop.fd.fd == -1 ? 0 : 1, 10);
    if (loop.fd.revents)
        loop.client->ops->ready(loop.client, loop.fd.fd, loop.fd.revents & (POLLIN | POLLHUP | POLLERR), loop.fd.revents & POLLOUT);
    if (loop.wakes_at_us <= tg__monotonic_us()) {
        loop.wakes_at_us = UINT64_MAX;
        loop.client->ops->wake(loop.client);
    }
}

static double
ours(unsigned tasks, uint64_t for_us)
{
    static task all[TASKS_MAX];
    const uint64_t began_us = tg__monotonic_us();
    ends_at_us = began_us + for_us;
    decided = under_way = 0;
    for (unsigned i = 0; i < tasks; i++)
        begin(&all[i]);
    while (ends_at_us != 0)
        turn();
    const double rate = (double)decided / (double)(tg__monotonic_us() - began_us) * 1e6;
    ends_at_us = 1;
    while (under_way > 0) { /* the others stop at their next full 64 */
        turn();
        ends_at_us = 1;
    }
    return rate;
}

static double
plain(redisContext *link, const tg_redis_store *store, const tg_redis_keyring *keyring, uint64_t for_us)
{
    static char bytes[TG__CALL_BYTES_MAX];
    const uint64_t began_us = tg__monotonic_us();
    long count = 0;
    uint64_t now_us;
    do {
        for (int i = 0; i < DEPTH; i++) {
            const tg_target target = { .rule = &rule, .identity = &identities[next_key++ % KEYS], .cost = 1 };
            tg_call call;
            tg_resp resp = { .data = bytes, .size = sizeof bytes };
            tg__call_plan(&call, TG_OP_HIT, &target, 1);
            tg__call_head(&resp, store, &call, TG_OP_HIT, false);
            tg__call_arguments(&resp, store, keyring, TG_OP_HIT, &call, &target, 1, 0);
            redisAppendFormattedCommand(link, resp.data, resp.length);
        }
        for (int i = 0; i < DEPTH; i++) {
            void *reply = NULL;
            if (redisGetReply(link, &reply) != REDIS_OK || ((redisReply *)reply)->type == REDIS_REPLY_ERROR)
                fail("loop", reply ? ((redisReply *)reply)->str : link->errstr);
            freeReplyObject(reply);
        }
        count += DEPTH;
        now_us = tg__monotonic_us();
    } while (now_us - began_us < for_us);
    return (double)count / (double)(now_us - began_us) * 1e6;
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
        fprintf(stderr, "usage: redis_async SOCKET [ROUNDS] [MILLISECONDS]\n");
        return 2;
    }
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    rounds = rounds < 1 ? 1 : rounds > ROUNDS_MAX ? ROUNDS_MAX : rounds;
    const uint64_t each_us = (uint64_t)(argc > 3 ? atoi(argv[3]) : 300) * 1000;
    char uri[160];
    tg_error error;
    tg_store *store;
    setenv("TIDEGATE_SECRET", "bench", 1);
    snprintf(uri, sizeof uri, "redis+unix://%s?timeout_ms=2000", argv[1]);
    if (tg_store_open(tg_text_of(uri), NULL, &store, &error) != TG_OK)
        fail(uri, error.message);
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    if (tg_rules_parse(tg_text_of("1000000000/second token_bucket"), TG_ALGORITHM_DEFAULT, rules, &count, &error) != TG_OK)
        fail("rule", error.message);
    rule = rules[0];
    tg__rule_scope(&rule, tg_text_of("bench"), tg_text_of("async"));
    store->ops->name_rule(store, &rule, "bench", "async", &error);
    for (unsigned i = 0; i < KEYS; i++) {
        char who[16];
        snprintf(who, sizeof who, "client-%u", i);
        tg__identity_join(&(tg_part){ .value = tg_text_of(who) }, 1, &identities[i], NULL);
    }
    const tg_async_loop wishes = { NULL, on_watch, on_wake, on_flush };
    loop.wakes_at_us = UINT64_MAX;
    if (store->ops->async_open(store, &wishes, &loop.client, &error) != TG_OK)
        fail("open", error.message);
    redisContext *link = redisConnectUnix(argv[1]);
    tg_redis_keyring keyring;
    tg__redis_keyring_init(&keyring, tg_text_of("bench"), false, 0);
    ours(1, 1000); /* the script is there now */
    static const unsigned tasks[] = { 1, 16, 64, 256 };
    static double mine[4][ROUNDS_MAX], loops[4][ROUNDS_MAX], ratios[4][ROUNDS_MAX];
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < 4; i++) {
            loops[i][round] = plain(link, (tg_redis_store *)store, &keyring, each_us);
            mine[i][round] = ours(tasks[i], each_us);
            ratios[i][round] = mine[i][round] / loops[i][round];
        }
    for (int i = 0; i < 4; i++)
        printf("%4u tasks %8.0f %8.0f %5.2f\n", tasks[i], median(mine[i], rounds), median(loops[i], rounds),
               median(ratios[i], rounds));
    redisFree(link);
    loop.client->ops->close(loop.client);
    tg_store_close(store);
    return 0;
}
