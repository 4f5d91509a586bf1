/* Decisions without waiting, on a loop that is somebody else's: asyncio, uvloop, an epoll of our own. All calls share
 * one connection and travel behind each other; each has its own deadline.
 *
 * Everything is called from the loop's thread, and nothing here blocks. One client for each pair of process and loop:
 * in a forked child every call is TG_E_STORE, and only tg__async_close may follow. */
#ifndef TG_REDIS_ASYNC_H
#define TG_REDIS_ASYNC_H

#include "stores/store.h"

typedef struct tg_async tg_async;
typedef struct tg_async_call tg_async_call;

/* What the client asks of the loop. Each may be called at any time from within a call to the client. */
typedef struct tg_async_loop {
    void *data;
    /* From now on call tg__async_ready when `fd` is readable, or writable, as wanted; both false: forget it. */
    void (*watch)(void *data, int fd, bool readable, bool writable);
    /* Call tg__async_wake once, in so many microseconds; replaces an earlier wish. UINT64_MAX: not at all. */
    void (*wake)(void *data, uint64_t in_us);
    /* Call tg__async_flush once, at the end of this turn of the loop. */
    void (*flush)(void *data);
} tg_async_loop;

#define TG__ASYNC_PENDING_MAX 4096 /* calls without an answer; one more is TG_E_STORE at once */

/* store  a Redis store, else TG_E_UNSUPPORTED; kept (another reference is taken)
 * Connects with the first call. TG_E_NOMEM. */
tg_status tg__async_open(tg_store *store, const tg_async_loop *loop, tg_async **client, tg_error *error);
/* Every call still under way is done with TG_E_STORE, from within. May be called from a `done`. Accepts NULL. */
/* A flush that the loop was asked for and a readiness it has yet to tell must not come any more. */
void tg__async_close(tg_async *client);

/* Called once for each call that was begun and not cancelled; `error` is filled unless status is TG_OK. It may begin
 * and cancel calls, and close the client. Never from within the beginning of its own call, but perhaps of another. */
typedef void tg_async_done(void *data, tg_status status, const tg_error *error);

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
