/* A real cluster of redis-servers of a test's own. Must not enter: what is tested. */
#ifndef TG_TEST_REDIS_CLUSTER_H
#define TG_TEST_REDIS_CLUSTER_H

#include "server.h"

#define NODES_MAX 6

typedef struct cluster {
    server nodes[NODES_MAX]; /* primaries, then one replica for each where there are any */
    char ids[NODES_MAX][48];
    char bus[NODES_MAX][8], timeout[16];
    size_t primaries, count;
    char uri[160], patient[192];
} cluster;

static inline void
cluster_start_node(cluster *some, size_t i)
{
    const char *const options[] = { "--cluster-enabled", "yes", "--cluster-port", some->bus[i], "--cluster-node-timeout",
                                    some->timeout, "--repl-diskless-sync-delay", "0", "--cluster-config-file", "nodes",
                                    "--cluster-migration-barrier", "100", NULL };
    server_start(&some->nodes[i], options);
}

/* A text reply. */
static inline void
server_say(const server *one, const char *command, char *text, size_t size)
{
    redisContext *link = server_connect(one);
    assert_non_null(link);
    redisReply *reply = redisCommand(link, command);
    if (!reply || reply->type == REDIS_REPLY_ERROR)
        fail_msg("%s: %s", command, reply ? reply->str : link->errstr);
    snprintf(text, size, "%s", reply->str ? reply->str : "");
    freeReplyObject(reply);
    redisFree(link);
}

static inline bool
cluster_is_up(const cluster *some)
{
    for (size_t i = 0; i < some->count; i++) {
        char info[2048], known[64];
        if (some->nodes[i].pid <= 0)
            continue;
        server_say(&some->nodes[i], "CLUSTER INFO", info, sizeof info);
        snprintf(known, sizeof known, "cluster_known_nodes:%zu\r", some->count);
        if (!strstr(info, "cluster_state:ok") || !strstr(info, known) || !strstr(info, "cluster_slots_ok:16384"))
            return false;
    }
    return true;
}

static inline void
cluster_wait(const cluster *some)
{
    const uint64_t end_us = tg__monotonic_us() + 30 * SECOND_US;
    while (!cluster_is_up(some)) {
        if (tg__monotonic_us() > end_us)
            fail_msg("the cluster did not come up");
        sleep_us(20000);
    }
}

static inline void
cluster_init(cluster *some, size_t primaries, bool replicas, unsigned timeout_ms)
{
    *some = (cluster){ .primaries = primaries, .count = primaries * (replicas ? 2 : 1) };
    snprintf(some->timeout, sizeof some->timeout, "%u", timeout_ms);
    for (size_t i = 0; i < some->count; i++) {
        server_init(&some->nodes[i], true);
        snprintf(some->bus[i], sizeof some->bus[i], "%u", free_port());
        cluster_start_node(some, i);
    }
    for (size_t i = 0; i < some->count; i++) {
        char command[160];
        server_say(&some->nodes[i], "CLUSTER MYID", some->ids[i], sizeof some->ids[i]);
        snprintf(command, sizeof command, "CLUSTER SET-CONFIG-EPOCH %zu", i + 1);
        server_ask(&some->nodes[i], NULL, command);
        if (i < primaries) {
            snprintf(command, sizeof command, "CLUSTER ADDSLOTSRANGE %zu %zu", i * 16384 / primaries,
                     (i + 1) * 16384 / primaries - 1);
            server_ask(&some->nodes[i], NULL, command);
        }
        if (i > 0) {
            snprintf(command, sizeof command, "CLUSTER MEET 127.0.0.1 %u %s", some->nodes[0].port, some->bus[0]);
            server_ask(&some->nodes[i], NULL, command);
        }
    }
    for (size_t i = primaries; i < some->count; i++) {
        char command[160], refused[256];
        const uint64_t end_us = tg__monotonic_us() + 20 * SECOND_US;
        snprintf(command, sizeof command, "CLUSTER REPLICATE %s", some->ids[i - primaries]);
        do {
            sleep_us(20000);
            server_ask(&some->nodes[i], refused, command); /* until it has heard of that node */
        } while (refused[0] && tg__monotonic_us() < end_us);
        while (server_info(&some->nodes[i - primaries], "replication", "connected_slaves") < 1 &&
               tg__monotonic_us() < end_us)
            sleep_us(20000);
    }
    cluster_wait(some);
    snprintf(some->uri, sizeof some->uri, "redis+cluster://127.0.0.1:%u,127.0.0.1:%u", some->nodes[0].port,
             some->nodes[1].port);
    snprintf(some->patient, sizeof some->patient, "%s?timeout_ms=2000", some->uri);
}

static inline void
cluster_fini(cluster *some)
{
    for (size_t i = 0; i < some->count; i++)
        server_fini(&some->nodes[i]);
}

/* Which primary of the beginning has this identity's slot. */
static inline size_t
slot_index(const cluster *some, unsigned slot)
{
    for (size_t i = 0; i < some->primaries; i++)
        if (slot < (i + 1) * 16384 / some->primaries)
            return i;
    return 0;
}

static inline unsigned
slot_of(const char *who)
{
    return tg__cluster_slot(tg_text_of(who));
}

/* A name whose slot that primary has. */
static inline const char *
name_on(const cluster *some, size_t node, const char *stem, char name[64])
{
    for (unsigned i = 0;; i++) {
        snprintf(name, 64, "%s%u", stem, i);
        if (slot_index(some, slot_of(name)) == node)
            return name;
    }
}

/* For all nodes: the reply of the last. */
static inline void
cluster_ask(const cluster *some, const char *command)
{
    for (size_t i = 0; i < some->count; i++)
        if (some->nodes[i].pid > 0)
            server_ask(&some->nodes[i], NULL, command);
}

#endif
