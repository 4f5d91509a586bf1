/* The client that does not wait, on a small loop of poll: right answers to right calls, deadlines, and Redis away.
 * Nothing here sleeps but the loop.
 *
 * test-builds: plain asan */
#include "server.h"

#include "core/core.h"
#include "stores/redis/async.h"

#include <poll.h>
#include <pthread.h>

#define DEADLINE_US UINT64_C(50000)
#define SLACK_US UINT64_C(10000)

static server redis;
static char patient_uri[160];

static int
begin(void **unused)
{
    (void)unused;
    server_init(&redis, true);
    server_start(&redis, NULL);
    snprintf(patient_uri, sizeof patient_uri, "%s?timeout_ms=2000", redis.uri);
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

typedef struct loop {
    tg_store_async *client;
    struct pollfd fds[4];
    nfds_t fd_count;
    uint64_t wakes_at_us;
    bool flushes;
    uint64_t longest_turn_us; /* that the client held the loop */
    unsigned flush_count;
} loop;

static void
on_watch(void *data, int fd, bool readable, bool writable)
{
    loop *one = data;
    nfds_t i = 0;
    while (i < one->fd_count && one->fds[i].fd != fd)
        i++;
    if (!readable && !writable) {
        assert_true(i < one->fd_count);
        one->fds[i] = one->fds[--one->fd_count];
        return;
    }
    assert_true(i < 4);
    one->fds[i] = (struct pollfd){ .fd = fd, .events = (short)((readable ? POLLIN : 0) | (writable ? POLLOUT : 0)) };
    if (i == one->fd_count)
        one->fd_count++;
}

static void
on_wake(void *data, uint64_t in_us)
{
    ((loop *)data)->wakes_at_us = in_us == UINT64_MAX ? UINT64_MAX : tg__monotonic_us() + in_us;
}

static void
on_flush(void *data)
{
    ((loop *)data)->flushes = true;
}

static loop
loop_open(tg_store *store, loop *one)
{
    *one = (loop){ .wakes_at_us = UINT64_MAX };
    const tg_async_loop wishes = { one, on_watch, on_wake, on_flush };
    assert_int_equal(store->ops->async_open(store, &wishes, &one->client, NULL), TG_OK);
    return *one;
}

static void
loop_turn(loop *one, uint64_t at_most_us)
{
    uint64_t began_us = tg__monotonic_us();
    if (one->flushes && one->client) {
        one->flushes = false;
        one->flush_count++;
        one->client->ops->flush(one->client);
    }
    uint64_t held_us = tg__monotonic_us() - began_us;
    const uint64_t now_us = tg__monotonic_us();
    uint64_t wait_us = at_most_us;
    if (one->wakes_at_us != UINT64_MAX && one->wakes_at_us < now_us + wait_us)
        wait_us = one->wakes_at_us > now_us ? one->wakes_at_us - now_us : 0;
    const struct timespec wait = { 0, (long)wait_us * 1000 };
    const int ready = ppoll(one->fds, one->fd_count, &wait, NULL);
    began_us = tg__monotonic_us();
    struct pollfd seen[4];
    const nfds_t count = one->fd_count;
    memcpy(seen, one->fds, sizeof seen);
    for (nfds_t i = 0; ready > 0 && i < count; i++)
        if (seen[i].revents && one->client)
            one->client->ops->ready(one->client, seen[i].fd, (seen[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0,
                            (seen[i].revents & (POLLOUT | POLLHUP | POLLERR)) != 0);
    if (one->wakes_at_us <= began_us) {
        one->wakes_at_us = UINT64_MAX;
        if (one->client)
            one->client->ops->wake(one->client);
    }
    held_us += tg__monotonic_us() - began_us;
    if (held_us > one->longest_turn_us)
        one->longest_turn_us = held_us;
}

/* ---- what is asked ---- */

static tg_rule
rule_of(tg_store *store, const char *text, const char *name)
{
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    assert_int_equal(tg_rules_parse(tg_text_of(text), TG_ALGORITHM_DEFAULT, rules, &count, NULL), TG_OK);
    tg__rule_scope(&rules[0], tg_text_of("async"), tg_text_of(name));
    assert_int_equal(store->ops->name_rule(store, &rules[0], "async", name, NULL), TG_OK);
    return rules[0];
}

typedef struct asked {
    loop *on;
    tg_rule rule;
    tg_identity identity;
    tg_target target;
    tg_result result;
    tg_store_call *call;
    int done; /* how often */
    tg_status status;
    uint64_t began_us, took_us;
    struct asked *then; /* begun when this one is done */
    bool closes;
} asked;

static tg_status ask(asked *one);

static void
on_done(void *data, tg_status status, const tg_error *error)
{
    asked *one = data;
    one->done++;
    one->status = status;
    one->took_us = tg__monotonic_us() - one->began_us;
    assert_true(status == TG_OK || error->message[0] != '\0');
    assert_null(strstr(status == TG_OK ? "" : error->message, "hunter2"));
    if (one->then && one->on->client)
        ask(one->then);
    else if (one->then)
        one->then->status = TG_E_STORE;
    if (one->closes) {
        tg_store_async *client = one->on->client;
        one->on->client = NULL;
        client->ops->close(client);
    }
}

static void
prepare(asked *one, loop *on, const tg_rule *rule, const char *who)
{
    *one = (asked){ .on = on, .rule = *rule };
    assert_int_equal(tg__identity_join(&(tg_part){ .value = tg_text_of(who) }, 1, &one->identity, NULL), TG_OK);
    one->target = (tg_target){ .rule = &one->rule, .identity = &one->identity, .cost = 1 };
}

static tg_status
ask(asked *one)
{
    tg_error error = { .message = "" };
    one->began_us = tg__monotonic_us();
    one->status = tg__async_begin(one->on->client, TG_OP_HIT, &one->target, 1, 0, &one->result, on_done, one, &one->call, &error);
    if (one->status != TG_OK) {
        assert_true(error.message[0] != '\0');
        one->took_us = tg__monotonic_us() - one->began_us;
    }
    return one->status;
}

static void
run_until_done(loop *on, const asked *calls, size_t count, uint64_t within_us)
{
    const uint64_t end_us = tg__monotonic_us() + within_us;
    for (size_t i = 0; i < count; i++)
        while (calls[i].status == TG_OK && calls[i].done == 0) {
            if (tg__monotonic_us() > end_us)
                fail_msg("call %zu of %zu is not done", i, count);
            loop_turn(on, 10000);
        }
}

/* Asks until Redis decides again; returns how long that took. */
static uint64_t
loop_recovery_us(loop *on, const tg_rule *rule)
{
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    for (;;) {
        asked one;
        prepare(&one, on, rule, "recovery");
        if (ask(&one) == TG_OK)
            run_until_done(on, &one, 1, SECOND_US);
        if (one.status == TG_OK)
            return tg__monotonic_us() - began_us;
        if (tg__monotonic_us() - began_us > 10 * SECOND_US)
            fail_msg("no recovery in 10 s");
        loop_turn(on, 10000);
    }
}

/* ---- tests ---- */

static void
each_call_gets_its_own_answer_over_one_connection(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "50/hour", "own");
    loop on;
    loop_open(store, &on);
    const long long before = server_info(&redis, "stats", "total_connections_received");
    static asked calls[2000];
    static const char *const who[] = { "a", "b", "c", "d", "e", "f", "g" };
    unsigned admitted[7] = { 0 };
    /* The server knows the script from here on: a call that has to be repeated with its text goes behind later ones. */
    asked first;
    const tg_rule other = rule_of(store, "50/hour", "first");
    prepare(&first, &on, &other, "a");
    assert_int_equal(ask(&first), TG_OK);
    run_until_done(&on, &first, 1, SECOND_US);
    for (size_t i = 0; i < 2000; i++) {
        prepare(&calls[i], &on, &rule, who[i % 7]);
        assert_int_equal(ask(&calls[i]), TG_OK);
        if (i % 100 == 99)
            loop_turn(&on, 0);
    }
    run_until_done(&on, calls, 2000, 5 * SECOND_US);
    for (size_t i = 0; i < 2000; i++) {
        assert_int_equal(calls[i].status, TG_OK);
        assert_int_equal(calls[i].done, 1);
        admitted[i % 7] += calls[i].result.allowed;
        if (calls[i].result.allowed) /* in the order in which they were asked */
            assert_int_equal(calls[i].result.remaining, 50 - admitted[i % 7]);
    }
    for (size_t k = 0; k < 7; k++)
        assert_int_equal(admitted[k], 50);
    assert_int_equal(server_info(&redis, "stats", "total_connections_received") - before, 1 + 1); /* and ours */
    assert_int_equal(tg__redis_async_pending(on.client), 0);
    on.client->ops->close(on.client);
    assert_int_equal(on.fd_count, 0);
    tg_store_close(store);
}

static void
a_deny_rule_is_answered_without_a_word_to_redis(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "deny", "deny");
    loop on;
    loop_open(store, &on);
    asked one;
    prepare(&one, &on, &rule, "a");
    assert_int_equal(ask(&one), TG_OK);
    assert_null(one.call);
    assert_false(one.result.allowed);
    assert_int_equal(on.fd_count, 0);
    on.client->ops->close(on.client);
    tg_store_close(store);
}

static void
sixty_four_calls_that_miss_their_script_send_it_once(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "100/hour", "x");
    loop on;
    loop_open(store, &on);
    static asked calls[64];
    for (int round = 0; round < 2; round++) {
        server_ask(&redis, NULL, "SCRIPT FLUSH");
        server_ask(&redis, NULL, "CONFIG RESETSTAT");
        for (size_t i = 0; i < 64; i++) {
            prepare(&calls[i], &on, &rule, round ? "b" : "a");
            assert_int_equal(ask(&calls[i]), TG_OK);
        }
        run_until_done(&on, calls, 64, 5 * SECOND_US);
        for (size_t i = 0; i < 64; i++)
            assert_int_equal(calls[i].status, TG_OK);
    }
    redisContext *link = server_connect(&redis);
    redisReply *reply = redisCommand(link, "INFO commandstats");
    const char *at = strstr(reply->str, "cmdstat_eval:calls=");
    assert_non_null(at);
    assert_in_range(atoi(at + strlen("cmdstat_eval:calls=")), 1, 2); /* this connection sent the text before: once more at most */
    freeReplyObject(reply);
    redisFree(link);
    assert_false(tg_notice_pending());
    on.client->ops->close(on.client);
    tg_store_close(store);
}

static void
a_stopped_redis_costs_each_call_its_deadline_and_the_loop_nothing(void **unused)
{
    (void)unused;
    tg_store *store = open_store(redis.uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    loop on;
    loop_open(store, &on);
    loop_recovery_us(&on, &rule);
    server_signal(&redis, SIGSTOP);
    static asked calls[300];
    for (size_t i = 0; i < 100; i++) {
        prepare(&calls[i], &on, &rule, "a");
        assert_int_equal(ask(&calls[i]), TG_OK);
    }
    on.longest_turn_us = 0;
    time_begin();
    run_until_done(&on, calls, 100, SECOND_US);
    for (size_t i = 0; i < 100; i++) {
        assert_int_equal(calls[i].status, TG_E_STORE);
        assert_int_equal(calls[i].done, 1);
        assert_in_time(calls[i].took_us, DEADLINE_US + SLACK_US);
    }
    assert_in_time(on.longest_turn_us, 5000);
    for (size_t i = 100; i < 200; i++) { /* known by now */
        prepare(&calls[i], &on, &rule, "a");
        if (ask(&calls[i]) != TG_OK)
            assert_in_time(calls[i].took_us, 1000);
    }
    server_signal(&redis, SIGCONT);
    assert_in_time(loop_recovery_us(&on, &rule), 2 * SECOND_US);
    on.client->ops->close(on.client);
    tg_store_close(store);
    forget_notices();
}

static void
a_late_reply_goes_to_nobody(void **unused)
{
    (void)unused;
    char uri[160];
    snprintf(uri, sizeof uri, "%s?timeout_ms=500", redis.uri);
    tg_store *store = open_store(uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    loop on;
    loop_open(store, &on);
    static asked calls[3];
    prepare(&calls[0], &on, &rule, "a");
    ask(&calls[0]);
    run_until_done(&on, calls, 1, SECOND_US);
    server_ask(&redis, NULL, "CLIENT PAUSE 700 ALL");
    prepare(&calls[1], &on, &rule, "a");
    ask(&calls[1]);
    run_until_done(&on, &calls[1], 1, SECOND_US); /* late */
    assert_int_equal(calls[1].status, TG_E_STORE);
    assert_int_equal(tg__redis_async_pending(on.client), 1);
    prepare(&calls[2], &on, &rule, "b");
    assert_int_equal(ask(&calls[2]), TG_OK); /* behind it, over the same connection */
    run_until_done(&on, &calls[2], 1, SECOND_US);
    assert_int_equal(calls[2].status, TG_OK);
    assert_int_equal(calls[2].result.remaining, 999);
    assert_int_equal(calls[1].done, 1);
    assert_int_equal(tg__redis_async_pending(on.client), 0);
    on.client->ops->close(on.client);
    tg_store_close(store);
}

static void
a_cancelled_call_is_never_done_and_disturbs_no_other(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "100000/hour token_bucket", "x");
    loop on;
    loop_open(store, &on);
    static asked calls[1000];
    for (int round = 0; round < 2; round++) { /* first while it connects, then while it is connected */
        for (size_t i = 0; i < 1000; i++) {
            prepare(&calls[i], &on, &rule, i % 2 ? "odd" : "even");
            assert_int_equal(ask(&calls[i]), TG_OK);
        }
        if (round)
            loop_turn(&on, 0);
        for (size_t i = 0; i < 1000; i += 2)
            if (calls[i].done == 0)
                on.client->ops->cancel(on.client, calls[i].call);
            else
                calls[i].done = 0; /* had its answer already */
        for (size_t i = 1; i < 1000; i += 2)
            run_until_done(&on, &calls[i], 1, 5 * SECOND_US);
        for (int k = 0; k < 20; k++)
            loop_turn(&on, 1000);
        for (size_t i = 0; i < 1000; i++) {
            assert_int_equal(calls[i].done, i % 2);
            assert_int_equal(calls[i].status, TG_OK);
        }
        assert_int_equal(tg__redis_async_pending(on.client), 0);
    }
    on.client->ops->close(on.client);
    tg_store_close(store);
}

static void
more_calls_than_the_bound_are_refused_at_once(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "100000/hour token_bucket", "x");
    loop on;
    loop_open(store, &on);
    static asked calls[TG_ASYNC_PENDING_MAX + 10];
    server_signal(&redis, SIGSTOP);
    for (size_t i = 0; i < TG_ASYNC_PENDING_MAX + 10; i++) {
        prepare(&calls[i], &on, &rule, "a");
        assert_int_equal(ask(&calls[i]), i < TG_ASYNC_PENDING_MAX ? TG_OK : TG_E_STORE);
    }
    server_signal(&redis, SIGCONT);
    run_until_done(&on, calls, TG_ASYNC_PENDING_MAX, 10 * SECOND_US);
    for (size_t i = 0; i < TG_ASYNC_PENDING_MAX; i++)
        assert_int_equal(calls[i].status, TG_OK);
    on.client->ops->close(on.client);
    tg_store_close(store);
    forget_notices();
}

static void
a_killed_redis_ends_every_call_and_is_found_again(void **unused)
{
    (void)unused;
    tg_store *store = open_store(redis.uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    loop on;
    loop_open(store, &on);
    for (int round = 0; round < 3; round++) {
        loop_recovery_us(&on, &rule);
        static asked calls[64];
        server_signal(&redis, SIGSTOP);
        for (size_t i = 0; i < 64; i++) {
            prepare(&calls[i], &on, &rule, "a");
            assert_int_equal(ask(&calls[i]), TG_OK);
        }
        loop_turn(&on, 1000);
        server_kill(&redis);
        run_until_done(&on, calls, 64, SECOND_US);
        for (size_t i = 0; i < 64; i++)
            assert_int_equal(calls[i].status, TG_E_STORE);
        const uint64_t until_us = tg__monotonic_us() + (uint64_t)round * SECOND_US / 2;
        while (tg__monotonic_us() < until_us) {
            asked one;
            prepare(&one, &on, &rule, "a");
            if (ask(&one) == TG_OK)
                run_until_done(&on, &one, 1, SECOND_US);
            assert_int_equal(one.status, TG_E_STORE);
            loop_turn(&on, 2000);
        }
        server_start(&redis, NULL);
        assert_in_time(loop_recovery_us(&on, &rule), 2 * SECOND_US);
    }
    assert_in_time(on.longest_turn_us, 10000);
    on.client->ops->close(on.client);
    tg_store_close(store);
    forget_notices();
}

/* ---- many that end at one instant ---- */

enum { MANY = TG_ASYNC_PENDING_MAX };
static asked many[MANY];

static void
ask_many(loop *on, const tg_rule *rule)
{
    static const char *const who[] = { "a", "b", "c", "d", "e" };
    for (size_t i = 0; i < MANY; i++) {
        prepare(&many[i], on, rule, who[i % 5]);
        assert_int_equal(ask(&many[i]), TG_OK);
        if (i % 100 == 99)
            loop_turn(on, 0);
    }
}

static size_t
how_many_are_done(void)
{
    size_t done = 0;
    for (size_t i = 0; i < MANY; i++) {
        assert_in_range(many[i].done, 0, 1);
        done += (size_t)many[i].done;
    }
    return done;
}

/* The most that any one turn of the loop has ended. */
static size_t
most_in_a_turn(loop *on, size_t until)
{
    const uint64_t end_us = tg__monotonic_us() + 20 * SECOND_US;
    size_t most = 0;
    for (size_t done = how_many_are_done(); done < until;) {
        assert_true(tg__monotonic_us() < end_us);
        loop_turn(on, 10000);
        const size_t now = how_many_are_done();
        if (now - done > most)
            most = now - done;
        done = now;
    }
    return most;
}

static void
deadlines_that_come_together_are_told_over_several_turns(void **unused)
{
    (void)unused;
    char uri[160];
    snprintf(uri, sizeof uri, "%s?timeout_ms=500", redis.uri);
    tg_store *store = open_store(uri, NULL);
    const tg_rule rule = rule_of(store, "1000000/hour", "together");
    loop on;
    loop_open(store, &on);
    loop_recovery_us(&on, &rule);
    server_signal(&redis, SIGSTOP);
    ask_many(&on, &rule);
    assert_in_range(most_in_a_turn(&on, MANY), 1, 512); /* the timer's, and those of a reading */
    for (size_t i = 0; i < MANY; i++)
        assert_int_equal(many[i].status, TG_E_STORE);
    server_signal(&redis, SIGCONT);
    loop_recovery_us(&on, &rule);
    on.client->ops->close(on.client);
    tg_store_close(store);
}

static void
calls_lost_with_their_connection_may_be_cancelled_or_closed_upon_before_they_are_told(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "1000000/hour", "lost");
    loop on;
    loop_open(store, &on);
    for (int closes = 0; closes < 2; closes++) {
        loop_recovery_us(&on, &rule);
        server_signal(&redis, SIGSTOP);
        ask_many(&on, &rule);
        server_kill(&redis);
        assert_in_range(most_in_a_turn(&on, 1), 1, 512);
        size_t cancelled = 0, left = 0;
        for (size_t i = 0; i < MANY; i++)
            if (!many[i].done && i % 3 == 0 && !closes) {
                on.client->ops->cancel(on.client, many[i].call);
                cancelled++;
            }
        left = MANY - cancelled;
        if (closes)
            on.client->ops->close(on.client);
        else
            assert_in_range(most_in_a_turn(&on, left), 1, 512);
        assert_int_equal(how_many_are_done(), left);
        server_start(&redis, NULL);
    }
    tg_store_close(store);
}

static void
a_connection_closed_while_idle_is_replaced_in_silence_here_too(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    loop on;
    loop_open(store, &on);
    for (int round = 0; round < 20; round++) {
        server_ask(&redis, NULL, "CLIENT KILL TYPE normal SKIPME yes");
        if (round % 2)
            loop_turn(&on, 1000); /* the loop hears of it, or the next call does */
        asked one;
        prepare(&one, &on, &rule, "a");
        assert_int_equal(ask(&one), TG_OK);
        run_until_done(&on, &one, 1, 5 * SECOND_US);
        assert_int_equal(one.status, TG_OK);
        assert_int_equal(one.result.remaining, 999 - round);
    }
    on.client->ops->close(on.client);
    tg_store_close(store);
}

static void
calls_may_be_begun_and_the_client_closed_from_within_an_answer(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    static asked calls[40];
    for (int killed = 0; killed < 2; killed++) {
        loop on;
        loop_open(store, &on);
        for (size_t i = 0; i < 40; i++) {
            prepare(&calls[i], &on, &rule, "a");
            if (i % 2)
                calls[i - 1].then = &calls[i];
        }
        calls[20].closes = true;
        for (size_t i = 0; i < 40; i += 2)
            assert_int_equal(ask(&calls[i]), TG_OK);
        if (killed) {
            server_ask(&redis, NULL, "CLIENT KILL TYPE normal SKIPME yes");
            server_kill(&redis);
        }
        for (int turn = 0; turn < 200 && on.client; turn++)
            loop_turn(&on, 10000);
        assert_null(on.client);
        for (size_t i = 0; i < 40; i += 2)
            assert_int_equal(calls[i].done, 1);
        for (size_t i = 1; i < 40; i += 2)
            assert_true(calls[i].done == 1 || calls[i].status != TG_OK);
        assert_int_equal(on.fd_count, 0);
    }
    tg_store_close(store);
    forget_notices();
}

static void
closing_ends_every_call(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    for (int turns = 0; turns < 6; turns++) { /* in each state of the connection */
        loop on;
        loop_open(store, &on);
        static asked calls[30];
        for (size_t i = 0; i < 30; i++) {
            prepare(&calls[i], &on, &rule, "a");
            assert_int_equal(ask(&calls[i]), TG_OK);
        }
        for (int i = 0; i < turns; i++)
            loop_turn(&on, 500);
        on.client->ops->close(on.client);
        for (size_t i = 0; i < 30; i++)
            assert_int_equal(calls[i].done, 1);
        assert_int_equal(on.fd_count, 0);
    }
    tg_store_close(store);
}

static void
a_forked_child_is_refused_and_leaves_the_parents_connection_alone(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    loop on;
    loop_open(store, &on);
    loop_recovery_us(&on, &rule);
    static asked calls[20];
    for (size_t i = 0; i < 20; i++) {
        prepare(&calls[i], &on, &rule, "a");
        assert_int_equal(ask(&calls[i]), TG_OK);
    }
    const pid_t child = fork();
    assert_true(child != -1);
    if (child == 0) {
        asked one;
        prepare(&one, &on, &rule, "a");
        int wrong = ask(&one) != TG_E_STORE;
        on.client->ops->close(on.client);
        loop own;
        loop_open(store, &own);
        prepare(&one, &own, &rule, "child");
        wrong += ask(&one) != TG_OK;
        run_until_done(&own, &one, 1, 2 * SECOND_US);
        wrong += one.status != TG_OK;
        _exit(wrong);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    run_until_done(&on, calls, 20, 5 * SECOND_US);
    for (size_t i = 0; i < 20; i++)
        assert_int_equal(calls[i].result.remaining, 999 - i);
    on.client->ops->close(on.client);
    tg_store_close(store);
}

static void
names_ports_and_calls_that_wait_share_counts_with_it(void **unused)
{
    (void)unused;
    char uri[160];
    static const char *const forms[] = { "redis://localhost:%u?timeout_ms=2000", "redis://127.0.0.1:%u?timeout_ms=2000" };
    for (unsigned i = 0; i < 2; i++) {
        snprintf(uri, sizeof uri, forms[i], redis.port);
        tg_store *store = open_store(uri, NULL);
        const tg_rule rule = rule_of(store, "1000/hour", "x");
        loop on;
        loop_open(store, &on);
        asked one;
        prepare(&one, &on, &rule, "a");
        assert_int_equal(ask(&one), TG_OK);
        run_until_done(&on, &one, 1, 5 * SECOND_US);
        assert_int_equal(one.status, TG_OK);
        tg_result waited;
        assert_int_equal(store->ops->apply(store, TG_OP_HIT, &one.target, 1, 0, &waited, NULL, NULL), TG_OK);
        assert_int_equal(waited.remaining, one.result.remaining - 1);
        assert_int_equal(waited.remaining, 998 - 2 * i);
        on.client->ops->close(on.client);
        tg_store_close(store);
    }
}

static void
a_port_nobody_listens_on_and_an_unknown_name_are_told_at_once_or_in_time(void **unused)
{
    (void)unused;
    char uri[160];
    snprintf(uri, sizeof uri, "redis://127.0.0.1:%u", free_port());
    const char *const uris[] = { uri, "redis://no-such-host.invalid", "redis+unix:///nonexistent/socket" };
    for (size_t i = 0; i < 3; i++) {
        tg_store *store = open_store(uris[i], NULL);
        const tg_rule rule = rule_of(store, "1000/hour", "x");
        loop on;
        loop_open(store, &on);
        for (int k = 0; k < 6; k++) {
            asked one;
            prepare(&one, &on, &rule, "a");
            time_begin();
            if (ask(&one) == TG_OK)
                run_until_done(&on, &one, 1, SECOND_US);
            assert_int_equal(one.status, TG_E_STORE);
            assert_in_time(one.took_us, DEADLINE_US + SLACK_US);
        }
        on.client->ops->close(on.client);
        tg_store_close(store);
    }
    forget_notices();
}

static void
passwords_and_errors_are_those_of_calls_that_wait(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    const tg_rule rule = rule_of(store, "1000/hour", "x");
    loop on;
    loop_open(store, &on);
    loop_recovery_us(&on, &rule);
    server_ask(&redis, NULL, "REPLICAOF 127.0.0.1 1");
    asked one;
    prepare(&one, &on, &rule, "a");
    ask(&one);
    run_until_done(&on, &one, 1, SECOND_US);
    assert_int_equal(one.status, TG_E_STORE);
    server_ask(&redis, NULL, "REPLICAOF NO ONE");
    loop_recovery_us(&on, &rule);
    server_ask(&redis, NULL, "CONFIG SET maxmemory 1");
    prepare(&one, &on, &rule, "new");
    ask(&one);
    run_until_done(&on, &one, 1, SECOND_US);
    assert_int_equal(one.status, TG_E_STORE);
    server_ask(&redis, NULL, "CONFIG SET maxmemory 0");
    prepare(&one, &on, &rule, "new");
    assert_int_equal(ask(&one), TG_OK); /* a refusal is no silence: no pause */
    run_until_done(&on, &one, 1, SECOND_US);
    assert_int_equal(one.status, TG_OK);
    on.client->ops->close(on.client);
    tg_store_close(store);
    forget_notices();
}

int
main(void)
{
    pthread_t lateness;
    lateness_begin(&lateness);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(each_call_gets_its_own_answer_over_one_connection, begin, end),
        cmocka_unit_test_setup_teardown(a_deny_rule_is_answered_without_a_word_to_redis, begin, end),
        cmocka_unit_test_setup_teardown(sixty_four_calls_that_miss_their_script_send_it_once, begin, end),
        cmocka_unit_test_setup_teardown(a_stopped_redis_costs_each_call_its_deadline_and_the_loop_nothing, begin, end),
        cmocka_unit_test_setup_teardown(a_late_reply_goes_to_nobody, begin, end),
        cmocka_unit_test_setup_teardown(a_cancelled_call_is_never_done_and_disturbs_no_other, begin, end),
        cmocka_unit_test_setup_teardown(more_calls_than_the_bound_are_refused_at_once, begin, end),
        cmocka_unit_test_setup_teardown(a_killed_redis_ends_every_call_and_is_found_again, begin, end),
        cmocka_unit_test_setup_teardown(deadlines_that_come_together_are_told_over_several_turns, begin, end),
        cmocka_unit_test_setup_teardown(calls_lost_with_their_connection_may_be_cancelled_or_closed_upon_before_they_are_told,
                                        begin, end),
        cmocka_unit_test_setup_teardown(a_connection_closed_while_idle_is_replaced_in_silence_here_too, begin, end),
        cmocka_unit_test_setup_teardown(calls_may_be_begun_and_the_client_closed_from_within_an_answer, begin, end),
        cmocka_unit_test_setup_teardown(closing_ends_every_call, begin, end),
        cmocka_unit_test_setup_teardown(a_forked_child_is_refused_and_leaves_the_parents_connection_alone, begin, end),
        cmocka_unit_test_setup_teardown(names_ports_and_calls_that_wait_share_counts_with_it, begin, end),
        cmocka_unit_test_setup_teardown(a_port_nobody_listens_on_and_an_unknown_name_are_told_at_once_or_in_time, begin, end),
        cmocka_unit_test_setup_teardown(passwords_and_errors_are_those_of_calls_that_wait, begin, end),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    lateness_end(lateness);
    return failed;
}
