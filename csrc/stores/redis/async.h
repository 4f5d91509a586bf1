/* Decisions without waiting, on a loop that is somebody else's: asyncio, uvloop, an epoll of our own. All calls share
 * one connection and travel behind each other; each has its own deadline. What the loop and the caller may do is said in
 * stores/store.h. */
#ifndef TG_REDIS_ASYNC_H
#define TG_REDIS_ASYNC_H

#include "stores/redis/redis.h"
#include "stores/store.h"

/* tg_store_ops.async_open. */
tg_status tg__redis_async_open(tg_store *store, const tg_async_loop *loop, tg_store_async **client, tg_error *error);

/* How a cluster asks one of its nodes; kept by the caller until the call is done. */
typedef struct tg_node_call {
    const tg_redis_keyring *keyring;
    bool brief;   /* see tg__question_time */
    bool look;    /* a hit only judged */
    bool knocks;  /* as in tg_call */
    bool asking;  /* for a slot that the node does not have yet */
    bool unsent;  /* told with a failure: nothing ran */
    void (*moved)(void *data, const char *reply); /* in place of `done`: nothing ran, the reply says where to */
} tg_node_call;

/* A cluster's node for a store: it holds the node, and gives no reference back. */
tg_status tg__redis_async_open_node(tg_redis_store *node, const tg_async_loop *loop, tg_store_async **client,
                                    tg_error *error);
/* tg_store_async_ops.begin. */
tg_status tg__redis_async_begin_node(tg_store_async *client, tg_node_call *how, tg_op op, const tg_target *targets,
                                     size_t target_count, uint64_t until_us, tg_result *results, tg_async_done *done,
                                     void *data, tg_store_call **call, tg_error *error);

/* For tests: calls without an answer, those whose late reply is still awaited included. */
size_t tg__redis_async_pending(const tg_store_async *client);

#endif
