/* The tiers on somebody else's loop: a denial that is known is answered at once, all else goes to the client of the store
 * behind, whose answers are learnt from on their way back.
 * Must not enter: what is known; that is said in tiered.c. */
#include "stores/tiered/tiered.h"

#include <stdlib.h>

typedef struct tiered_async {
    tg_store_async base; /* first: a tg_store_async * is one of these */
    tg_tiered *tiered;   /* a reference */
    tg_store_async *inner; /* NULL: closing */
    struct passed_on *spare;
} tiered_async;

/* One call under way. */
typedef struct passed_on {
    tiered_async *client;
    tg_store_call *call; /* of the client behind */
    tg_result *results;
    tg_async_done *done;
    void *data;
    uint64_t until_us; /* a second question has what is left */
    tg_tier_question question;
    tg_denial_key keys[TG_TARGETS_MAX];
    uint64_t marks[TG_TARGETS_MAX];
    tg_sight sights[TG_TARGETS_MAX];
    tg_target targets[TG_TARGETS_MAX];
} passed_on;

static tiered_async *
of(tg_store_async *base)
{
    return (tiered_async *)base;
}

static passed_on *
begin_passing(tiered_async *client)
{
    passed_on *passed = client->spare ? client->spare : malloc(sizeof *passed);
    client->spare = NULL;
    return passed;
}

static void
end_passing(passed_on *passed)
{
    tiered_async *client = passed->client;
    if (client->spare)
        free(passed);
    else
        client->spare = passed;
}

static void hear(void *data, tg_status status, const tg_error *error);

/* Without a call it is answered, or failed. */
static tg_status
ask(passed_on *passed, tg_error *error)
{
    tg_store_async *inner = passed->client->inner;
    passed->call = NULL;
    if (!inner)
        return tg__error(error, TG_E_STORE, "tiered store: this client is closed");
    return inner->ops->begin(inner, passed->question.op, passed->targets, passed->question.count, passed->until_us,
                             passed->results, hear, passed, &passed->call, error);
}

/* The client may be gone when `done` returns. */
static void
hear(void *data, tg_status status, const tg_error *error)
{
    passed_on *passed = data;
    tg_async_done *done = passed->done;
    void *for_whom = passed->data;
    tg_error fault;
    if (tg__tiered_learn(passed->client->tiered, &passed->question, status, passed->results)) {
        /* A batch did not fit: what is needed alone. */
        status = ask(passed, &fault);
        if (status == TG_OK && passed->call)
            return;
        tg__tiered_learn(passed->client->tiered, &passed->question, status, passed->results);
        error = &fault;
    }
    end_passing(passed);
    done(for_whom, status, error);
}

static tg_status
async_begin(tg_store_async *base, tg_op op, const tg_target *targets, size_t count, uint64_t until_us, tg_result *results,
            tg_async_done *done, void *data, tg_store_call **call, tg_error *error)
{
    tiered_async *client = of(base);
    *call = NULL;
    if (!client->inner)
        return tg__error(error, TG_E_STORE, "tiered store: this client is closed");
    passed_on *passed = begin_passing(client);
    if (!passed)
        return tg__error(error, TG_E_NOMEM, "tiered store: %zu bytes", sizeof *passed);
    passed->client = client;
    passed->results = results;
    passed->done = done;
    passed->data = data;
    passed->question = (tg_tier_question){ .keys = passed->keys, .marks = passed->marks, .sights = passed->sights,
                                    .targets = passed->targets };
    if (tg__tiered_answers(client->tiered, op, targets, count, results, &passed->question)) {
        end_passing(passed);
        return TG_OK;
    }
    passed->until_us = until_us ? until_us : tg__monotonic_us() + client->tiered->base.timeout_us;
    const tg_status status = ask(passed, error);
    if (status == TG_OK && passed->call) {
        *call = (tg_store_call *)passed;
        return TG_OK;
    }
    tg__tiered_learn(client->tiered, &passed->question, status, results);
    end_passing(passed);
    return status;
}

static void
async_cancel(tg_store_async *base, tg_store_call *call)
{
    passed_on *passed = (passed_on *)call;
    of(base)->inner->ops->cancel(of(base)->inner, passed->call);
    end_passing(passed);
}

static void
async_ready(tg_store_async *base, int fd, bool readable, bool writable)
{
    of(base)->inner->ops->ready(of(base)->inner, fd, readable, writable);
}

static void
async_wake(tg_store_async *base)
{
    of(base)->inner->ops->wake(of(base)->inner);
}

static void
async_flush(tg_store_async *base)
{
    of(base)->inner->ops->flush(of(base)->inner);
}

static void
async_close(tg_store_async *base)
{
    tiered_async *client = of(base);
    tg_store_async *inner = client->inner;
    if (!inner)
        return; /* from a `done` of its own closing */
    client->inner = NULL;
    inner->ops->close(inner);
    tg_store_close(&client->tiered->base);
    free(client->spare);
    free(client);
}

static const tg_store_async_ops async_ops = {
    .begin = async_begin,
    .cancel = async_cancel,
    .ready = async_ready,
    .wake = async_wake,
    .flush = async_flush,
    .close = async_close,
};

tg_status
tg__tiered_async_open(tg_store *store, const tg_async_loop *loop, tg_store_async **opened, tg_error *error)
{
    tg_tiered *tiered = tg__tiered_of(store);
    tiered_async *client = calloc(1, sizeof *client);
    if (!client)
        return tg__error(error, TG_E_NOMEM, "tiered store: %zu bytes", sizeof *client);
    client->base.ops = &async_ops;
    client->tiered = tiered;
    const tg_status status = tiered->inner->ops->async_open(tiered->inner, loop, &client->inner, error);
    if (status != TG_OK) {
        free(client);
        return status;
    }
    tg__store_retain(store);
    *opened = &client->base;
    return TG_OK;
}
