/* Decisions without waiting, on a loop that is somebody else's: asyncio, uvloop, an epoll of our own. All calls share
 * one connection and travel behind each other; each has its own deadline.
 *
 * Everything is called from the loop's thread, and nothing here blocks. One client for each pair of process and loop:
 * in a forked child every call is TG_E_STORE, and only tg__async_close may follow. */
#ifndef TG_REDIS_ASYNC_H
#define TG_REDIS_ASYNC_H

#include "stores/store.h"

/* store  a Redis store, else TG_E_UNSUPPORTED; kept (another reference is taken)
 * Connects with the first call. TG_E_NOMEM. */
tg_status tg__async_open(tg_store *store, const tg_async_loop *loop, tg_async **client, tg_error *error);
/* Every call still under way is done with TG_E_STORE, from within. May be called from a `done`. Accepts NULL. */
/* A flush that the loop was asked for and a readiness it has yet to tell must not come any more. */
void tg__async_close(tg_async *client);

/* As tg_store_ops.apply. `targets`, all they point to, and `results` stay the caller's and as they are until `done`.
 *
 * call  receives what tg__async_cancel takes; NULL when it is answered already, and `done` will not be called
 * TG_E_STORE, TG_E_NOMEM: not begun, `done` will not be called. Redis is known not to answer, or too many wait. */
tg_status tg__async_begin(tg_async *client, tg_op op, const tg_target *targets, size_t target_count, tg_result *results,
                          tg_async_done *done, void *data, tg_async_call **call, tg_error *error);
/* `done` will not be called. Whether the hit is counted is not known if it was under way. */
void tg__async_cancel(tg_async *client, tg_async_call *call);

/* The loop's side. */
void tg__async_ready(tg_async *client, bool readable, bool writable);
void tg__async_wake(tg_async *client);
void tg__async_flush(tg_async *client);

/* For tests: calls without an answer, those whose late reply is still awaited included. */
size_t tg__async_pending(const tg_async *client);

#endif
