/* A hit over slots of several nodes that is cancelled: at whatever moment, what it had charged is given back, without its
 * caller's memory and without anybody waiting for it.
 *
 * test-builds: plain asan */
#define NODE_TIMEOUT_MS 1500
#include "three_nodes.h"

#include "core/core.h"
#include "stores/redis/async.h"

#define HAND_LOOP_FDS 8
#include "hand_loop.h"

/* ---- a loop that is moved by hand ---- */

static tg_store_async *client;

static void
loop_begin(tg_store *store)
{
    const tg_async_loop wishes = hand_loop();
    assert_int_equal(store->ops->async_open(store, &wishes, &client, NULL), TG_OK);
}

/* One thing that the client is told: a flush, one descriptor, or the timer. */
static void
loop_step(void)
{
    if (loop.flushes) {
        loop.flushes = false;
        client->ops->flush(client);
        return;
    }
    const int ready = poll(loop.fds, loop.fd_count, 5);
    for (nfds_t i = 0; ready > 0 && i < loop.fd_count; i++)
        if (loop.fds[i].revents) {
            const short seen = loop.fds[i].revents;
            client->ops->ready(client, loop.fds[i].fd, (seen & (POLLIN | POLLHUP | POLLERR)) != 0,
                               (seen & (POLLOUT | POLLHUP | POLLERR)) != 0);
            return;
        }
    if (loop.wakes_at_us <= tg__monotonic_us()) {
        loop.wakes_at_us = UINT64_MAX;
        client->ops->wake(client);
    }
}

/* ---- a caller, whose memory goes with it ---- */

typedef struct caller {
    tg_rule rule;
    tg_identity identities[2];
    tg_target targets[2];
    tg_result results[2];
    tg_store_call *call;
    int done;
    tg_status status;
} caller;

static void
on_done(void *data, tg_status status, const tg_error *error)
{
    caller *one = data;
    (void)error;
    one->done++;
    one->status = status;
}

static caller *
call(tg_store *store, tg_op op, const char *text, const char *name, const char *low, const char *high)
{
    caller *one = calloc(1, sizeof *one);
    assert_non_null(one);
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    assert_int_equal(tg_rules_parse(tg_text_of(text), TG_ALGORITHM_DEFAULT, rules, &count, NULL), TG_OK);
    one->rule = rules[0];
    tg__rule_scope(&one->rule, tg_text_of("default"), tg_text_of(name));
    assert_int_equal(store->ops->name_rule(store, &one->rule, "default", name, NULL), TG_OK);
    for (int i = 0; i < 2; i++) {
        const tg_part part = { .value = tg_text_of(i ? high : low) };
        assert_int_equal(tg__identity_join(&part, 1, &one->identities[i], NULL), TG_OK);
        one->targets[i] = (tg_target){ .rule = &one->rule, .identity = &one->identities[i], .cost = 3 };
    }
    tg_error error = { .message = "" };
    if (tg__async_begin(client, op, one->targets, 2, 0, one->results, on_done, one, &one->call, &error) != TG_OK)
        fail_msg("not begun: %s", error.message);
    return one;
}

static uint64_t
used(tg_limiter *limiter, const char *who)
{
    const tg_decision decision = peek(limiter, who);
    assert_false(decision.degraded);
    return decision.limit - decision.remaining;
}

static const char *const rule_texts[] = { "100/hour fixed_window", "100/hour sliding_log", "100/hour sliding_counter",
                                          "100/hour token_bucket", "100/hour leaky_bucket" };
enum { RULES = sizeof rule_texts / sizeof *rule_texts };

/* Cancels after so many steps. false: it was done before. */
static bool
cancel_after(tg_store *store, const char *text, const char *name, unsigned steps, const char *low, const char *high)
{
    caller *one = call(store, TG_OP_HIT, text, name, low, high);
    for (unsigned i = 0; i < steps && !one->done; i++)
        loop_step();
    const bool was_done = one->done;
    if (was_done)
        assert_int_equal(one->status, TG_OK);
    else
        client->ops->cancel(client, one->call);
    free(one);
    return !was_done;
}

static void
whenever_a_hit_over_two_nodes_is_cancelled_neither_keeps_its_charge(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    char low[64], high[64];
    for (size_t r = 0; r < RULES; r++) {
        char name[16];
        unsigned steps = 0, charged_first = 0;
        snprintf(name, sizeof name, "any%zu", r);
        tg_limiter *limiter = open_limiter(store, rule_texts[r], name);
        loop_begin(store);
        for (bool cancelled = true; cancelled; steps++) {
            char stem[32];
            snprintf(stem, sizeof stem, "s%zu-%u-", r, steps);
            name_on(&three, 0, stem, low);
            name_on(&three, 2, stem, high);
            cancelled = cancel_after(store, rule_texts[r], name, steps, low, high);
            assert_true(steps < 200);
            if (!cancelled) {
                assert_true(used(limiter, low) == 3 && used(limiter, high) == 3);
                break;
            }
            sleep_us(2000);
            charged_first += used(limiter, low) > 0; /* it is on its way back */
            const uint64_t end_us = tg__monotonic_us() + 1000000;
            for (int quiet = 0; quiet < 8 || used(limiter, low) || used(limiter, high); quiet++) {
                if (tg__monotonic_us() > end_us)
                    fail_msg("%s, cancelled after %u steps: %u and %u are kept", rule_texts[r], steps,
                             (unsigned)used(limiter, low), (unsigned)used(limiter, high));
                loop_step();
            }
        }
        assert_true(charged_first > 0); /* the test has met what it is about */
        client->ops->close(client);
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
}

static void
a_refund_over_two_nodes_that_is_cancelled_on_its_way_still_reaches_both(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, rule_texts[0], "refund");
    char low[64], high[64];
    name_on(&three, 0, "refund", low);
    name_on(&three, 2, "refund", high);
    loop_begin(store);
    caller *one = call(store, TG_OP_HIT, rule_texts[0], "refund", low, high);
    while (!one->done)
        loop_step();
    free(one);
    one = call(store, TG_OP_REFUND, rule_texts[0], "refund", low, high);
    loop_step(); /* the words to the first node go out */
    assert_int_equal(one->done, 0);
    client->ops->cancel(client, one->call);
    free(one);
    const uint64_t end_us = tg__monotonic_us() + 1000000;
    while (used(limiter, low) || used(limiter, high)) {
        assert_true(tg__monotonic_us() < end_us);
        loop_step();
    }
    client->ops->close(client);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* Bounded: one that goes on alone is one of those that may be pending, and ends by the deadline that it had. */
static void
a_node_that_stops_keeps_a_cancelled_hit_no_longer_than_its_deadline(void **unused)
{
    (void)unused;
    char uri[192], low[64], high[64];
    snprintf(uri, sizeof uri, "%s?timeout_ms=300", three.uri);
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, rule_texts[3], "stop");
    name_on(&three, 0, "stop", low);
    name_on(&three, 2, "stop", high);
    loop_begin(store);
    caller *one = call(store, TG_OP_HIT, rule_texts[3], "stop", low, high);
    while (!one->done)
        loop_step();
    free(one);
    one = call(store, TG_OP_HIT, rule_texts[3], "stop", low, high);
    while (used(limiter, low) == 3) { /* looked at the last one, charges the first */
        assert_int_equal(one->done, 0);
        loop_step();
    }
    server_signal(&three.nodes[2], SIGSTOP);
    loop_step(); /* hears of it, and asks the one that is silent */
    const int already = one->done;
    if (!already)
        client->ops->cancel(client, one->call);
    free(one);
    const uint64_t end_us = tg__monotonic_us() + 300000;
    while (!already && used(limiter, low) != 3) {
        if (tg__monotonic_us() > end_us + 1000000)
            fail_msg("not given back");
        loop_step();
    }
    server_signal(&three.nodes[2], SIGCONT);
    assert_int_equal(already, 0);
    client->ops->close(client);
    cluster_wait(&three);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
a_client_that_is_closed_ends_what_goes_on_alone(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, rule_texts[3], "closed");
    char low[64], high[64];
    name_on(&three, 0, "closed", low);
    name_on(&three, 2, "closed", high);
    loop_begin(store);
    caller *one = call(store, TG_OP_HIT, rule_texts[3], "closed", low, high);
    while (used(limiter, low) == 0) {
        assert_int_equal(one->done, 0);
        loop_step();
    }
    client->ops->cancel(client, one->call);
    free(one);
    client->ops->close(client);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whenever_a_hit_over_two_nodes_is_cancelled_neither_keeps_its_charge),
        cmocka_unit_test(a_refund_over_two_nodes_that_is_cancelled_on_its_way_still_reaches_both),
        cmocka_unit_test(a_node_that_stops_keeps_a_cancelled_hit_no_longer_than_its_deadline),
        cmocka_unit_test(a_client_that_is_closed_ends_what_goes_on_alone),
    };
    return cmocka_run_group_tests_name("stores/redis/cluster_cancel", tests, begin_all, end_all);
}
