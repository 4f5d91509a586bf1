/* Questions that do not wait, from the public interface down to a redis-server and back, on a small loop of poll.
 *
 * test-builds: plain asan */
#include "server.h"

#define HAND_LOOP_FDS 4
#include "hand_loop.h"

#define DEADLINE_US UINT64_C(50000)
#define SLACK_US UINT64_C(10000)
#define HELD_US UINT64_C(5000)

static server redis;
static char patient_uri[160], rules_path[112];

static int
begin(void **unused)
{
    (void)unused;
    server_init(&redis, false);
    server_start(&redis, NULL);
    snprintf(patient_uri, sizeof patient_uri, "%s?timeout_ms=2000", redis.uri);
    snprintf(rules_path, sizeof rules_path, "%s/rules", redis.folder);
    forget_notices();
    return 0;
}

static int
end(void **unused)
{
    (void)unused;
    server_fini(&redis);
    return 0;
}

/* ---- a loop ---- */

static tg_async *client;
static uint64_t longest_us; /* that the client held the loop */

static void
loop_begin(tg_store *store)
{
    const tg_async_loop wishes = hand_loop();
    longest_us = 0;
    assert_int_equal(tg_async_open(store, &wishes, &client, NULL), TG_OK);
}

static void
loop_end(void)
{
    tg_async_close(client);
    assert_int_equal(loop.fd_count, 0);
}

static void
held_since(uint64_t began_us)
{
    const uint64_t held_us = tg__monotonic_us() - began_us;
    longest_us = held_us > longest_us ? held_us : longest_us;
}

static void
loop_turn(void)
{
    uint64_t began_us = tg__monotonic_us();
    if (loop.flushes) {
        loop.flushes = false;
        tg_async_flush(client);
    }
    held_since(began_us);
    began_us = tg__monotonic_us();
    const uint64_t wait_us = loop.wakes_at_us <= began_us                ? 0
                             : loop.wakes_at_us - began_us < UINT64_C(5000) ? loop.wakes_at_us - began_us
                                                                            : 5000;
    const struct timespec wait = { 0, (long)wait_us * 1000 };
    const int ready = ppoll(loop.fds, loop.fd_count, &wait, NULL);
    began_us = tg__monotonic_us();
    struct pollfd seen[HAND_LOOP_FDS];
    const nfds_t count = loop.fd_count;
    memcpy(seen, loop.fds, sizeof seen);
    for (nfds_t i = 0; ready > 0 && i < count; i++)
        if (seen[i].revents)
            tg_async_ready(client, seen[i].fd, (seen[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0,
                           (seen[i].revents & (POLLOUT | POLLHUP | POLLERR)) != 0);
    if (loop.wakes_at_us <= began_us) {
        loop.wakes_at_us = UINT64_MAX;
        tg_async_wake(client);
    }
    held_since(began_us);
}

/* ---- what is asked ---- */

typedef struct asked {
    tg_request request;
    tg_judgement judgement;
    tg_decision decision;
    tg_async_call *call;
    uint64_t began_us, took_us;
    bool done;
} asked;

static size_t under_way;

static void
on_done(void *data, tg_status status, const tg_error *error)
{
    asked *one = data;
    if (status != TG_OK)
        fail_msg("%s", error->message);
    one->done = true;
    one->took_us = tg__monotonic_us() - one->began_us;
    under_way--;
}

static void
begun(asked *one, tg_status status, const tg_error *error)
{
    if (status != TG_OK)
        fail_msg("%s", error->message);
    one->took_us = tg__monotonic_us() - one->began_us;
    one->done = one->call == NULL;
    under_way += one->call != NULL;
}

static void
hit_later(asked *one, tg_limiter *limiter, const char *who)
{
    const tg_part part = { .value = tg_text_of(who) };
    const tg_dimension dimension = { &part, 1 };
    tg_error error;
    memset(one, 0, sizeof *one);
    one->began_us = tg__monotonic_us();
    begun(one, tg_limiter_begin(client, limiter, TG_ASK_HIT, &dimension, 1, 1, 0, &one->decision, on_done, one,
                                &one->call, &error), &error);
}

static void
judge_later(asked *one, tg_gate *gate, const char *peer)
{
    tg_error error;
    memset(one, 0, sizeof *one);
    one->request = (tg_request){ .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of(peer) };
    one->began_us = tg__monotonic_us();
    begun(one, tg_gate_judge_begin(client, gate, &one->request, 1, NULL, 0, &one->judgement, NULL, on_done, one,
                                   &one->call, &error), &error);
}

static void
run(void)
{
    const uint64_t end_us = tg__monotonic_us() + 10 * SECOND_US;
    while (under_way > 0) {
        if (tg__monotonic_us() > end_us)
            fail_msg("%zu calls are not done", under_way);
        loop_turn();
    }
}

static tg_gate *
open_gate(const char *yaml, const char *uri)
{
    FILE *file = fopen(rules_path, "w");
    assert_non_null(file);
    fputs(yaml, file);
    fclose(file);
    tg_gate *gate;
    tg_error error;
    const tg_gate_options options = { .path = tg_text_of(rules_path), .store = tg_text_of(uri) };
    if (tg_gate_open(&options, &gate, &error) != TG_OK)
        fail_msg("%s", error.message);
    return gate;
}

static void
requests_that_ask_three_times_at_once_are_counted_exactly(void **unused)
{
    (void)unused;
    tg_gate *gate = open_gate("policies:\n"
                              "  - {name: all, also: true, rules: 150/hour}\n"
                              "  - {name: proof, also: true, mode: challenge, rules: 100/hour}\n"
                              "  - {name: trial, mode: shadow, rules: 50/hour}\n", patient_uri);
    static asked calls[200];
    unsigned admitted = 0, challenged = 0, shadowed = 0;
    loop_begin(tg_gate_store(gate));
    for (size_t i = 0; i < 200; i++)
        judge_later(&calls[i], gate, "192.0.2.1");
    run();
    for (size_t i = 0; i < 200; i++) {
        assert_false(calls[i].judgement.decision.degraded);
        admitted += calls[i].judgement.status == 0;
        challenged += calls[i].judgement.challenged;
        shadowed += calls[i].judgement.shadow_denied;
    }
    assert_int_equal(admitted, 150);
    assert_int_equal(challenged, 50);
    assert_int_equal(shadowed, 100);
    loop_end();
    tg_gate_close(gate);
}

static void
a_stopped_redis_holds_no_loop_and_each_policy_answers_in_time(void **unused)
{
    (void)unused;
    tg_store *store = open_store(redis.uri, NULL);
    tg_limiter *limiters[3];
    for (size_t i = 0; i < 3; i++)
        limiters[i] = open_limiter_so(store, "20/hour", "x", (tg_on_failure)i);
    static asked calls[300];
    loop_begin(store);
    const uint64_t end_us = tg__monotonic_us() + 10 * SECOND_US;
    do { /* a busy machine may be late */
        assert_true(tg__monotonic_us() < end_us);
        hit_later(&calls[0], limiters[0], "a");
        run();
    } while (calls[0].decision.degraded);
    server_signal(&redis, SIGSTOP);
    time_begin();
    longest_us = 0;
    for (size_t i = 0; i < 300; i++)
        hit_later(&calls[i], limiters[i % 3], "a");
    run();
    unsigned local = 0;
    for (size_t i = 0; i < 300; i++) {
        assert_true(calls[i].decision.degraded);
        assert_in_time(calls[i].took_us, DEADLINE_US + SLACK_US);
        local += i % 3 == TG_FAIL_LOCAL && calls[i].decision.allowed;
        if (i % 3 != TG_FAIL_LOCAL)
            assert_int_equal(calls[i].decision.allowed, i % 3 == TG_FAIL_OPEN);
    }
    assert_int_equal(local, 20);
    assert_in_time(longest_us, HELD_US);
    server_signal(&redis, SIGCONT);
    loop_end();
    for (size_t i = 0; i < 3; i++)
        tg_limiter_close(limiters[i]);
    tg_store_close(store);
    assert_true(noticed("store-failing", "does not answer"));
}

static void
calls_are_cancelled_and_clients_closed_at_any_moment_of_their_life(void **unused)
{
    (void)unused;
    tg_gate *gate = open_gate("policies:\n"
                              "  - {name: all, also: true, rules: 150/hour token_bucket}\n"
                              "  - {name: trial, mode: shadow, rules: 50/hour}\n", patient_uri);
    static asked calls[16];
    unsigned seed = 3;
    for (int turns = 0; turns < 12; turns++) {
        loop_begin(tg_gate_store(gate));
        under_way = 0;
        for (size_t i = 0; i < 16; i++)
            judge_later(&calls[i], gate, "192.0.2.1");
        for (int k = 0; k < turns; k++)
            loop_turn();
        for (size_t i = 0; i < 16; i++)
            if (!calls[i].done && rand_r(&seed) % 2) {
                tg_async_cancel(client, calls[i].call);
                calls[i].call = NULL;
                under_way--;
            }
        if (turns % 3 == 0)
            run();
        loop_end(); /* those that are left are done, degraded */
        assert_int_equal(under_way, 0);
        for (size_t i = 0; i < 16; i++)
            assert_int_equal(calls[i].done, calls[i].call != NULL);
    }
    tg_gate_close(gate);
    forget_notices();
}

static void
a_forked_child_is_answered_by_policy_and_leaves_the_parent_alone(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1000/hour", "x");
    static asked calls[20], child_call;
    loop_begin(store);
    hit_later(&calls[0], limiter, "a");
    run();
    for (size_t i = 0; i < 20; i++)
        hit_later(&calls[i], limiter, "a");
    const pid_t child = fork();
    if (child == 0) {
        hit_later(&child_call, limiter, "a");
        const bool answered = child_call.done && child_call.decision.degraded;
        tg_async_close(client);
        tg_limiter_close(limiter);
        tg_store_close(store);
        _exit(answered ? 0 : 1);
    }
    run();
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    for (size_t i = 0; i < 20; i++)
        assert_false(calls[i].decision.degraded);
    hit_later(&calls[0], limiter, "a");
    run();
    assert_int_equal(calls[0].decision.remaining, 1000 - 22);
    loop_end();
    tg_limiter_close(limiter);
    tg_store_close(store);
    forget_notices();
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(requests_that_ask_three_times_at_once_are_counted_exactly, begin, end),
        cmocka_unit_test_setup_teardown(a_stopped_redis_holds_no_loop_and_each_policy_answers_in_time, begin, end),
        cmocka_unit_test_setup_teardown(calls_are_cancelled_and_clients_closed_at_any_moment_of_their_life, begin, end),
        cmocka_unit_test_setup_teardown(a_forked_child_is_answered_by_policy_and_leaves_the_parent_alone, begin, end),
    };
    pthread_t thread;
    lateness_begin(&thread);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    lateness_end(thread);
    return failed;
}
