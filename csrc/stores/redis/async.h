/* Decisions without waiting, on a loop that is somebody else's: asyncio, uvloop, an epoll of our own. All calls share
 * one connection and travel behind each other; each has its own deadline. What the loop and the caller may do is said in
 * stores/store.h. */
#ifndef TG_REDIS_ASYNC_H
#define TG_REDIS_ASYNC_H

#include "stores/store.h"

/* tg_store_ops.async_open. */
tg_status tg__redis_async_open(tg_store *store, const tg_async_loop *loop, tg_store_async **client, tg_error *error);

/* For tests: calls without an answer, those whose late reply is still awaited included. */
size_t tg__redis_async_pending(const tg_store_async *client);

#endif
