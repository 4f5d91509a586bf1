/* Questions that do not wait: the client of a loop, and the life of one call.
 *
 * A call is begun, asks its store as often as it has to (a judgement up to three times, a settlement more often), and is
 * finished by `done` or cancelled. In between it is in the list of those that live, with everything its question points to.
 * Must not enter: deciding (inquiry.h says how that is shared with calls that wait); what a store is. */
#include "core/gate.h"
#include "core/inquiry.h"
#include "core/metrics.h"

#include <errno.h>
#include <stdlib.h>

enum { SPARE_MAX = 256 }; /* finished calls that are kept for the next: 2 MiB, and mostly never written */

/* An answer that comes so much later than its deadline was there before, or the client's timer would have ended its call: what
 * took the time is a loop that was held up, which is no reason not to ask the store again. */
#define HELD_UP_US 5000

struct tg_async_call {
    tg_async *client;
    tg_async_call *before, *next; /* among those that live; `next` also among the spare */
    tg_store_call *under_way;
    tg_async_done *done;
    void *data;
    /* One turn: takes the answer to the question before, if there was one, and puts the next: TG__PENDING. Any other
     * status is the call's. */
    tg_status (*turn)(tg_async_call *call, bool answered, tg_status status, tg_error *error);
    /* The question. */
    tg_op op;
    const tg_target *targets;
    size_t target_count;
    tg_result *results;
    uint64_t began_us, until_us; /* of all its questions together: see tg__waits_until. 0: there is one only */
    /* What is judged. */
    tg_limiter *limiter;
    tg_limiter *const *limiters;
    size_t limiter_count;
    tg_gate *gate; /* holds `snapshot`; else NULL */
    const tg_snapshot *snapshot;
    size_t pinned;
    const tg_request *request;
    uint64_t cost;
    const tg_decision *const *prior;
    size_t prior_count;
    tg_decision *decision;
    tg_judgement *judgement;
    tg_answer *answer;
    tg_decision *said; /* room that is kept for inquiry.said; NULL: not needed yet */
    union {
        tg_inquiry inquiry;
        tg_settling settling;
    };
};

struct tg_async {
    tg_store *store;
    tg_store_async *inner; /* the store's own; NULL: closed */
    tg_async_call *live, *spare;
    size_t spare_count;
    unsigned depth; /* of calls into the client: it is freed at the outermost */
};

/* ---- the client's life ---- */

static void
free_call(tg_async_call *call)
{
    free(call->said);
    free(call);
}

/* Its `done` will not be called. */
static void
release(tg_async_call *call)
{
    tg_async *client = call->client;
    *(call->before ? &call->before->next : &client->live) = call->next;
    if (call->next)
        call->next->before = call->before;
    if (call->gate)
        tg__gate_unpin(call->gate, call->pinned);
    if (client->spare_count == SPARE_MAX) {
        free_call(call);
        return;
    }
    call->next = client->spare;
    client->spare = call;
    client->spare_count++;
}

static void
enter(tg_async *client)
{
    client->depth++;
}

static void
leave(tg_async *client)
{
    if (--client->depth > 0 || client->inner)
        return;
    while (client->live) /* of the parent, in a forked child: nobody there is told */
        release(client->live);
    for (tg_async_call *call = client->spare, *next; call; call = next) {
        next = call->next;
        free_call(call);
    }
    tg_store_close(client->store);
    free(client);
}

tg_status
tg_async_open(tg_store *store, const tg_async_loop *loop, tg_async **opened, tg_error *error)
{
    if (!store->ops->async_open)
        return tg__error(error, TG_E_UNSUPPORTED, "store %s answers at once: it needs no loop", store->ops->name);
    tg_async *client = calloc(1, sizeof *client);
    if (!client)
        return tg__error(error, TG_E_NOMEM, "a client for a loop: %zu bytes", sizeof *client);
    const tg_status status = store->ops->async_open(store, loop, &client->inner, error);
    if (status != TG_OK) {
        free(client);
        return status;
    }
    tg__store_retain(store);
    client->store = store;
    *opened = client;
    return TG_OK;
}

void
tg_async_close(tg_async *client)
{
    if (!client || !client->inner)
        return;
    enter(client);
    tg_store_async *const inner = client->inner;
    client->inner = NULL; /* what is begun from within a `done` is answered without the store */
    inner->ops->close(inner);
    leave(client);
}

void
tg_async_ready(tg_async *client, int fd, bool readable, bool writable)
{
    enter(client);
    if (client->inner)
        client->inner->ops->ready(client->inner, fd, readable, writable);
    leave(client);
}

void
tg_async_wake(tg_async *client)
{
    enter(client);
    if (client->inner)
        client->inner->ops->wake(client->inner);
    leave(client);
}

void
tg_async_flush(tg_async *client)
{
    enter(client);
    if (client->inner)
        client->inner->ops->flush(client->inner);
    leave(client);
}

/* ---- a call's life ---- */

static tg_async_call *
new_call(tg_async *client, tg_async_done *done, void *data, tg_error *error)
{
    tg_async_call *call = client->spare;
    tg_decision *said = NULL;
    if (call) {
        client->spare = call->next;
        client->spare_count--;
        said = call->said;
    } else if (!(call = malloc(sizeof *call))) {
        tg__error(error, TG_E_NOMEM, "a question to the store: %zu bytes", sizeof *call);
        return NULL;
    }
    memset(call, 0, offsetof(tg_async_call, inquiry)); /* the rest is large, and written where it is used */
    call->client = client;
    call->done = done;
    call->data = data;
    call->said = said;
    call->next = client->live;
    if (call->next)
        call->next->before = call;
    client->live = call;
    return call;
}

static void on_answer(void *data, tg_status status, const tg_error *error);

static void
begin_waiting(tg_async_call *call, uint64_t waited_us)
{
    call->began_us = tg__monotonic_us();
    call->until_us = tg__waits_until(call->client->store, waited_us);
}

static bool
was_held_up(const tg_async_call *call, uint64_t now_us)
{
    return now_us > call->until_us + HELD_UP_US;
}

static void
tell_waiting(const tg_async_call *call, bool answered)
{
    const uint64_t timeout_us = call->client->store->timeout_us, now_us = tg__monotonic_us();
    const uint64_t took_us = now_us - call->began_us;
    call->judgement->waited_us = answered && was_held_up(call, now_us) ? 0 : took_us < timeout_us ? took_us : timeout_us;
}

/* Goes on until the store has to be waited for: TG__PENDING. `error` is that of the answer, and then the call's. */
static tg_status
advance(tg_async_call *call, bool answered, tg_status status, tg_error *error)
{
    tg_async *client = call->client;
    for (;; answered = true) {
        const tg_status now = call->turn(call, answered, status, error);
        if (now == TG_OK && call->until_us && call->judgement)
            tell_waiting(call, answered && status == TG_OK);
        if (now != TG__PENDING)
            return now;
        if (!client->inner) {
            status = tg__error(error, TG_E_STORE, "the client of this loop is closed");
            error->system_error = ECANCELED;
            continue;
        }
        if (call->until_us && answered && status == TG_OK && was_held_up(call, tg__monotonic_us()))
            begin_waiting(call, 0);
        status = tg__async_begin(client->inner, call->op, call->targets, call->target_count, call->until_us, call->results,
                                 on_answer, call, &call->under_way, error);
        if (status == TG_OK && call->under_way)
            return TG__PENDING;
    }
}

static void
on_answer(void *data, tg_status status, const tg_error *error)
{
    tg_async_call *call = data;
    tg_error told;
    call->under_way = NULL;
    if (status != TG_OK) {
        told = *error;
        if (!call->client->inner)
            told.system_error = ECANCELED;
    }
    const tg_status concluded = advance(call, true, status, &told);
    if (concluded == TG__PENDING)
        return;
    tg_async_done *const done = call->done;
    void *const for_whom = call->data;
    release(call);
    done(for_whom, concluded, concluded == TG_OK ? NULL : &told);
}

/* The first turn, and what is said of the beginning. */
static tg_status
begin(tg_async_call *call, tg_async_call **begun, tg_error *error)
{
    tg_async *client = call->client;
    tg_error told;
    enter(client);
    const tg_status status = advance(call, false, TG_OK, &told);
    if (status == TG__PENDING) {
        *begun = call;
    } else {
        release(call);
        if (status != TG_OK && error)
            *error = told;
    }
    leave(client);
    return status == TG__PENDING ? TG_OK : status;
}

void
tg_async_cancel(tg_async *client, tg_async_call *call)
{
    enter(client);
    if (client->inner && call->under_way)
        client->inner->ops->cancel(client->inner, call->under_way);
    release(call);
    leave(client);
}

static tg_status
other_store(const tg_async *client, const tg_store *store, tg_error *error)
{
    if (store == client->store)
        return TG_OK;
    return tg__error(error, TG_E_ARG, "this client asks store %s, and the limits count in another",
                     client->store->shown ? client->store->shown : client->store->uri);
}

static void
ask(tg_async_call *call, tg_op op, const tg_target *targets, size_t target_count, tg_result *results)
{
    call->op = op;
    call->targets = targets;
    call->target_count = target_count;
    call->results = results;
}

/* ---- a limiter ---- */

static tg_status
decide_turn(tg_async_call *call, bool answered, tg_status status, tg_error *error)
{
    tg_inquiry *inquiry = &call->inquiry;
    if (!answered) {
        inquiry->began_ns = tg__decision_begun(call->limiter, inquiry->op);
        ask(call, inquiry->op, inquiry->plan.targets, inquiry->plan.count, call->decision->results);
        return TG__PENDING;
    }
    tg__decision_answered(call->limiter, inquiry->op, &inquiry->plan, call->decision, inquiry->began_ns, status, error);
    return TG_OK;
}

/* Administrative, so a silent store is told. */
static tg_status
administer_turn(tg_async_call *call, bool answered, tg_status status, tg_error *error)
{
    (void)error;
    if (answered)
        return status;
    ask(call, call->inquiry.op, call->inquiry.plan.targets, call->inquiry.plan.count, NULL);
    return TG__PENDING;
}

tg_status
tg_limiter_begin(tg_async *client, tg_limiter *limiter, tg_question question, const tg_dimension *dimensions,
                 size_t dimension_count, uint64_t cost, uint64_t patience_us, tg_decision *decision, tg_async_done *done,
                 void *data, tg_async_call **begun, tg_error *error)
{
    static const tg_op ops[] = { TG_OP_HIT, TG_OP_PEEK, TG_OP_RESET, TG_OP_REFUND };
    *begun = NULL;
    if ((unsigned)question >= sizeof ops / sizeof *ops)
        return tg__error(error, TG_E_ARG, "no such question");
    if (patience_us > TG_WAIT_US_MAX)
        return tg__error(error, TG_E_ARG, "nobody waits for longer than 285 years");
    tg_status status = other_store(client, limiter->store, error);
    if (status != TG_OK)
        return status;
    tg_async_call *call = new_call(client, done, data, error);
    if (!call)
        return TG_E_NOMEM;
    const tg_op op = ops[question];
    const bool decides = op == TG_OP_HIT || op == TG_OP_PEEK;
    tg_inquiry *inquiry = &call->inquiry;
    inquiry->op = op;
    call->turn = decides ? decide_turn : administer_turn;
    call->limiter = limiter;
    call->decision = decides ? decision : &inquiry->asked;
    status = tg__limiter_plan(limiter, dimensions, dimension_count, op == TG_OP_RESET ? 0 : cost, &inquiry->plan,
                              call->decision, error);
    if (status != TG_OK) {
        release(call);
        return status;
    }
    for (size_t i = 0; decides && i < inquiry->plan.count; i++)
        inquiry->plan.targets[i].patience_us = patience_us;
    return begin(call, begun, error);
}

static tg_status
refund_turn(tg_async_call *call, bool answered, tg_status status, tg_error *error)
{
    (void)error;
    if (answered) {
        if (status == TG_OK)
            tg__refund_done(call->decision);
        return status;
    }
    ask(call, TG_OP_REFUND, call->inquiry.plan.targets, call->inquiry.plan.count, NULL);
    return call->target_count ? TG__PENDING : TG_OK;
}

tg_status
tg_decision_refund_begin(tg_async *client, tg_decision *decision, tg_async_done *done, void *data,
                         tg_async_call **begun, tg_error *error)
{
    *begun = NULL;
    tg_async_call *call = new_call(client, done, data, error);
    if (!call)
        return TG_E_NOMEM;
    call->turn = refund_turn;
    call->decision = decision;
    call->inquiry.plan.count = tg__refund_targets(decision, call->inquiry.plan.targets);
    return begin(call, begun, error);
}

/* ---- a request ---- */

static tg_status
judge_turn(tg_async_call *call, bool answered, tg_status status, tg_error *error)
{
    tg_inquiry *inquiry = &call->inquiry;
    inquiry->told = 0;
    inquiry->answered = answered;
    inquiry->status = status;
    inquiry->error = error;
    const tg_matter matter = { call->request, call->cost, call->prior, call->prior_count, call->until_us, inquiry };
    const tg_status judged =
        call->snapshot
            ? tg__snapshot_judge(call->snapshot, call->client->store, &matter, call->judgement, call->answer, error)
            : tg__limiters_judge(call->limiters, call->limiter_count, &matter, call->judgement, error);
    if (judged == TG__PENDING)
        ask(call, inquiry->op, inquiry->plan.targets, inquiry->plan.count, inquiry->asked.results);
    return judged;
}

static tg_async_call *
new_judging(tg_async *client, const tg_request *request, uint64_t cost, const tg_decision *const *prior, size_t prior_count,
            tg_judgement *judgement, tg_async_done *done, void *data, tg_error *error)
{
    tg_async_call *call = new_call(client, done, data, error);
    if (!call)
        return NULL;
    call->turn = judge_turn;
    begin_waiting(call, request->waited_us);
    call->request = request;
    call->cost = cost;
    call->prior = prior;
    call->prior_count = prior_count;
    call->judgement = judgement;
    call->inquiry.said = NULL;
    call->inquiry.said_count = call->inquiry.paused = 0;
    return call;
}

tg_status
tg_limiters_judge_begin(tg_async *client, tg_limiter *const *limiters, size_t limiter_count, const tg_request *request,
                        uint64_t cost, const tg_decision *const *prior, size_t prior_count, tg_judgement *judgement,
                        tg_async_done *done, void *data, tg_async_call **begun, tg_error *error)
{
    *begun = NULL;
    const tg_status status = limiter_count ? other_store(client, limiters[0]->store, error) : TG_OK;
    if (status != TG_OK)
        return status;
    tg_async_call *call = new_judging(client, request, cost, prior, prior_count, judgement, done, data, error);
    if (!call)
        return TG_E_NOMEM;
    call->limiters = limiters;
    call->limiter_count = limiter_count;
    return begin(call, begun, error);
}

tg_status
tg_gate_judge_begin(tg_async *client, tg_gate *gate, const tg_request *request, uint64_t cost,
                    const tg_decision *const *prior, size_t prior_count, tg_judgement *judgement, tg_answer *answer,
                    tg_async_done *done, void *data, tg_async_call **begun, tg_error *error)
{
    *begun = NULL;
    const tg_status status = other_store(client, tg_gate_store(gate), error);
    if (status != TG_OK)
        return status;
    tg_async_call *call = new_judging(client, request, cost, prior, prior_count, judgement, done, data, error);
    if (!call)
        return TG_E_NOMEM;
    call->answer = answer;
    call->snapshot = tg__gate_pin(gate, true, &call->pinned);
    call->gate = gate;
    if (!call->snapshot->simple) { /* it may ask again */
        if (!call->said)
            call->said = malloc((TG_QUESTIONS_MAX - 1) * sizeof *call->said);
        if (!call->said) {
            release(call);
            return tg__error(error, TG_E_NOMEM, "a judgement's answers");
        }
        call->inquiry.said = call->said;
    }
    return begin(call, begun, error);
}

static tg_status
settle_turn(tg_async_call *call, bool answered, tg_status status, tg_error *error)
{
    tg_settling *settling = &call->settling;
    (void)answered;
    if (tg__settle_next(settling, status, error)) {
        ask(call, settling->op, settling->targets, settling->target_count, &settling->taken);
        return TG__PENDING;
    }
    if (settling->status != TG_OK)
        *error = settling->error;
    return settling->status;
}

tg_status
tg_gate_settle_begin(tg_async *client, tg_gate *gate, tg_judgement *judgement, int status, const tg_header *headers,
                     size_t header_count, tg_async_done *done, void *data, tg_async_call **begun, tg_error *error)
{
    *begun = NULL;
    const tg_status same = other_store(client, tg_gate_store(gate), error);
    if (same != TG_OK)
        return same;
    tg_async_call *call = new_call(client, done, data, error);
    if (!call)
        return TG_E_NOMEM;
    size_t pinned;
    const tg_snapshot *now = tg__gate_pin(gate, false, &pinned);
    const bool differs = tg__settle_begin(&call->settling, now, judgement, status, headers, header_count);
    tg__gate_unpin(gate, pinned);
    if (!differs) {
        release(call);
        return TG_OK;
    }
    call->turn = settle_turn;
    begin_waiting(call, 0);
    return begin(call, begun, error);
}
