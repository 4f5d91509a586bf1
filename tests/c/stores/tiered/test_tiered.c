/* Tiers before a real Redis: how often it is asked, that nobody is refused for longer than Redis would refuse, and that
 * what is told of a remembered denial is what Redis would tell. That all numbers are those of the reference, under a manual
 * clock: tests/python/test_redis_conformance.py.
 *
 * TIDEGATE_TEST_TIERS, where it is set, names a store that stands already, and the pid and the unix socket of each server
 * behind it: "URI pid=socket pid=socket ...". tests/python/test_redis_tiers.py does so for a cluster, TLS and Sentinel.
 *
 * test-builds: plain asan tsan */
#include "../redis/server.h"

#include "core/core.h"
#include "stores/tiered/tiered.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#define SERVERS_MAX 6

static server redis; /* our own, or the first of those that stand */
static server servers[SERVERS_MAX];
static size_t server_count;
static bool own;
static char uri[1200], plain_uri[1100];

static void
for_all(int number)
{
    for (size_t i = 0; i < server_count; i++)
        server_signal(own ? &redis : &servers[i], number);
}

/* What others have started. */
static void
take_those_that_stand(const char *named)
{
    char text[2000], *rest;
    snprintf(text, sizeof text, "%s", named);
    const char *word = strtok_r(text, " ", &rest);
    snprintf(plain_uri, sizeof plain_uri, "%s", word);
    while ((word = strtok_r(NULL, " ", &rest)) && server_count < SERVERS_MAX) {
        server *one = &servers[server_count++];
        one->pid = (pid_t)atol(word);
        assert_non_null(strchr(word, '='));
        snprintf(one->path, sizeof one->path, "%s", strchr(word, '=') + 1);
    }
    assert_true(server_count > 0);
    redis = servers[0];
}

static int
begin_all(void **unused)
{
    (void)unused;
    const char *named = getenv("TIDEGATE_TEST_TIERS");
    own = !named;
    if (named) {
        take_those_that_stand(named);
    } else {
        server_init(&redis, true);
        server_start(&redis, NULL);
        server_count = 1;
        snprintf(plain_uri, sizeof plain_uri, "%s?timeout_ms=2000", redis.uri);
    }
    snprintf(uri, sizeof uri, "tiered+%s", plain_uri);
    return 0;
}

static int
end_all(void **unused)
{
    (void)unused;
    if (own)
        server_fini(&redis);
    return 0;
}

static int
begin(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < server_count; i++)
        server_ask(own ? &redis : &servers[i], NULL, "FLUSHALL");
    forget_notices();
    return 0;
}

/* Decisions and resets that reached the server; the keeper's calls are EVALs. */
static long long
asked_of(const server *one)
{
    long long sum = 0;
    redisContext *link = server_connect(one);
    redisReply *reply = redisCommand(link, "INFO commandstats");
    assert_non_null(reply);
    static const char *const names[] = { "cmdstat_evalsha:calls=", "cmdstat_del:calls=" };
    for (size_t i = 0; i < 2; i++) {
        const char *at = strstr(reply->str, names[i]);
        sum += at ? atoll(at + strlen(names[i])) : 0;
    }
    freeReplyObject(reply);
    redisFree(link);
    return sum;
}

static long long
asked(void)
{
    long long sum = 0;
    for (size_t i = 0; i < server_count; i++)
        sum += asked_of(own ? &redis : &servers[i]);
    return sum;
}

static void
hit_times(tg_limiter *limiter, const char *who, unsigned times)
{
    while (times--)
        hit(limiter, who);
}

static void
reset(tg_limiter *limiter, const char *who)
{
    const tg_part part = { .value = tg_text_of(who) };
    assert_int_equal(tg_limiter_reset(limiter, &(tg_dimension){ &part, 1 }, 1, NULL), TG_OK);
}

/* ---- how often Redis is asked ---- */

static void
a_denial_asks_redis_once_until_it_can_have_changed(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "5/minute fixed_window", "5/minute sliding_log", "5/minute sliding_counter",
                                         "5/minute token_bucket", "5/minute leaky_bucket", "5/second; 6/hour",
                                         "6/hour token_bucket; 5/second burst 3" };
    tg_store *store = open_store(uri, NULL);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        tg_limiter *limiter = open_limiter(store, rules[i], rules[i]);
        hit_times(limiter, "a", 6);
        const tg_decision first = hit(limiter, "a");
        assert_false(first.allowed);
        const long long before = asked();
        const uint64_t began_us = tg__monotonic_us();
        uint64_t last_us = began_us;
        tg_decision last = first;
        for (int k = 0; k < 1000; k++) {
            last_us = tg__monotonic_us();
            const tg_decision decision = hit(limiter, "a");
            assert_false(decision.allowed);
            assert_false(decision.degraded);
            assert_true(decision.retry_after_us <= last.retry_after_us);
            assert_int_equal(decision.result_count, first.result_count);
            for (size_t r = 0; r < first.result_count; r++) {
                assert_int_equal(decision.results[r].allowed, first.results[r].allowed);
                assert_int_equal(decision.results[r].remaining, first.results[r].remaining);
                assert_false(decision.results[r].charged);
            }
            last = decision;
        }
        const uint64_t took_us = tg__monotonic_us() - began_us;
        if (took_us < 150000) /* a busy machine may take so long that the shortest window opens */
            assert_int_equal(asked() - before, 0);
        assert_true(first.retry_after_us - last.retry_after_us <= took_us + 2000000);
        assert_true(first.retry_after_us - last.retry_after_us + 50000 >= last_us - began_us);
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
}

static void
a_denial_of_one_dimension_answers_for_whatever_stands_beside_it(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "3/hour", "company");
    long long before = 0;
    for (int i = 0; i < 200; i++) {
        char account[16];
        snprintf(account, sizeof account, "account%d", i);
        const tg_part address = { .value = tg_text_of("a") }, invented = { .value = tg_text_of(account) };
        const tg_dimension dimensions[] = { { &address, 1 }, { &invented, 1 } };
        tg_decision decision;
        assert_int_equal(tg_limiter_hit(limiter, dimensions, 2, 1, &decision, NULL), TG_OK);
        assert_int_equal(decision.allowed, i < 3);
        if (i >= 3) { /* the numbers are those of the address whichever account is tried */
            assert_int_equal(decision.reported, 0);
            assert_int_equal(decision.results[1].remaining, 3);
            assert_true(decision.results[1].allowed);
        }
        if (i == 3)
            before = asked();
    }
    assert_in_range(asked() - before, 0, server_count > 1 ? 16 : 8); /* two slots of a cluster are looked at in two calls */
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
what_denies_one_cost_asks_again_for_a_smaller_one(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "5/minute fixed_window", "5/minute sliding_log", "5/minute sliding_counter",
                                         "5/minute token_bucket" };
    tg_store *store = open_store(uri, NULL);
    for (size_t i = 0; i < 4; i++) {
        tg_limiter *limiter = open_limiter(store, rules[i], rules[i]);
        hit_times(limiter, "a", 3);
        assert_false(hit_cost(limiter, "a", 3).allowed);
        assert_false(hit_cost(limiter, "a", 3).allowed);
        assert_true(hit_cost(limiter, "a", 2).allowed);
        assert_int_equal(hit_cost(limiter, "a", 3).remaining, 0); /* no longer what the first denial saw */
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
}

/* ---- what ends a denial ---- */

static void
a_denial_ends_when_redis_would_let_through(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "5/300ms fixed_window", "5/300ms sliding_log", "5/300ms sliding_counter",
                                         "5/300ms token_bucket" };
    tg_store *store = open_store(uri, NULL);
    for (size_t i = 0; i < 4; i++) {
        tg_limiter *limiter = open_limiter(store, rules[i], rules[i]);
        hit_times(limiter, "a", 5);
        for (int round = 0; round < 3; round++) {
            tg_decision decision = hit(limiter, "a");
            while (decision.allowed)
                decision = hit(limiter, "a");
            assert_true(decision.retry_after_us > 0 && decision.retry_after_us <= 600000);
            sleep_us(decision.retry_after_us);
            if (!hit(limiter, "a").allowed) { /* told up to a question's way too short */
                sleep_us(2000);
                assert_true(hit(limiter, "a").allowed);
            }
        }
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
}

static void
a_reset_and_a_refund_end_a_denial_at_once(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "given");
    tg_decision taken = hit(limiter, "a");
    hit_times(limiter, "a", 6);
    assert_false(hit(limiter, "a").allowed);
    assert_int_equal(tg_decision_refund(store, &taken, NULL), TG_OK);
    assert_true(hit(limiter, "a").allowed);
    assert_false(hit(limiter, "a").allowed);
    assert_false(hit(limiter, "a").allowed);
    reset(limiter, "a");
    assert_int_equal(hit(limiter, "a").remaining, 4);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* What a gate says of one more request of the only client. */
static bool
lets_through(tg_gate *gate)
{
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    tg_judgement judgement;
    tg_answer answer;
    tg_error error;
    assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, &answer, &error), TG_OK);
    return judgement.status == 0;
}

static void
a_reset_made_elsewhere_shows_in_a_second_or_in_five_under_a_policy_that_gives_nothing_back(void **unused)
{
    (void)unused;
    char path[] = "/tmp/tg-tiered-XXXXXX";
    const int fd = mkstemp(path);
    static const char text[] = "policies:\n  - {name: kept, rules: 5/hour}\n";
    assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
    close(fd);
    tg_gate *gate, *gate_there;
    tg_limiter *kept_there;
    tg_error error;
    assert_int_equal(tg_gate_open(&(tg_gate_options){ .path = tg_text_of(path), .store = tg_text_of(uri) }, &gate, &error), TG_OK);
    assert_int_equal(
        tg_gate_open(&(tg_gate_options){ .path = tg_text_of(path), .store = tg_text_of(plain_uri) }, &gate_there, &error), TG_OK);
    assert_int_equal(tg_gate_limiter(gate_there, tg_text_of("kept"), &kept_there, &error), TG_OK);
    tg_store *store = open_store(uri, NULL), *elsewhere = open_store(plain_uri, NULL);
    tg_limiter *given = open_limiter(store, "5/hour", "given"), *given_there = open_limiter(elsewhere, "5/hour", "given");
    for (int i = 0; i < 6; i++)
        lets_through(gate);
    hit_times(given, "a", 6);

    const tg_part address = { tg_text_of("ip"), tg_text_of("192.0.2.1") };
    const uint64_t began_us = tg__monotonic_us();
    assert_int_equal(tg_limiter_reset(kept_there, &(tg_dimension){ &address, 1 }, 1, &error), TG_OK);
    reset(given_there, "a");
    bool kept_through = lets_through(gate), given_through = hit(given, "a").allowed;
    if (tg__monotonic_us() - began_us < 500000) {
        assert_false(kept_through);
        assert_false(given_through);
    }
    while (tg__monotonic_us() - began_us < 1100000)
        sleep_us(10000);
    assert_true(given_through || hit(given, "a").allowed);
    while (tg__monotonic_us() - began_us < 5100000)
        sleep_us(10000);
    assert_true(kept_through || lets_through(gate));
    tg_limiter_close(given);
    tg_limiter_close(given_there);
    tg_limiter_close(kept_there);
    tg_store_close(store);
    tg_store_close(elsewhere);
    tg_gate_close(gate);
    tg_gate_close(gate_there);
    unlink(path);
}

static void
a_changed_rule_is_judged_anew(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *before = open_limiter(store, "5/hour token_bucket", "changed");
    hit_times(before, "a", 7);
    tg_limiter *after = open_limiter(store, "7/hour token_bucket", "changed");
    assert_true(hit(after, "a").allowed);
    assert_true(hit(after, "a").allowed);
    assert_false(hit(after, "a").allowed);
    tg_limiter_close(after);
    tg_limiter_close(before);
    tg_store_close(store);
}

static void
a_connection_that_is_lost_takes_what_was_known_with_it(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "lost");
    hit_times(limiter, "a", 7);
    server_kill(&redis);
    server_start(&redis, NULL);
    hit(limiter, "b"); /* meets the closed connection */
    assert_true(hit(limiter, "a").allowed);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
a_redis_that_is_away_is_answered_for_by_policy(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "away"), *closed = open_limiter_so(store, "5/hour", "shut", TG_FAIL_CLOSED);
    hit_times(limiter, "a", 7);
    server_kill(&redis);
    assert_true(hit(limiter, "b").degraded);
    assert_true(hit(limiter, "b").allowed);
    assert_false(hit(closed, "b").allowed);
    assert_true(noticed("store-failing", "redis at"));
    server_start(&redis, NULL);
    recovery_us(limiter, "b");
    tg_limiter_close(closed);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- without waiting ---- */

typedef struct loop {
    tg_store_async *client;
    int fd;
    short events;
    bool flushes;
    unsigned answered;
    tg_status status;
} loop;

static void
on_watch(void *data, int fd, bool readable, bool writable)
{
    loop *one = data;
    one->fd = readable || writable ? fd : -1;
    one->events = (short)((readable ? POLLIN : 0) | (writable ? POLLOUT : 0));
}

static void
on_wake(void *data, uint64_t in_us)
{
    (void)data, (void)in_us; /* no deadline is met here */
}

static void
on_flush(void *data)
{
    ((loop *)data)->flushes = true;
}

static void
on_done(void *data, tg_status status, const tg_error *error)
{
    loop *one = data;
    (void)error;
    one->answered++;
    one->status = status;
}

static void
open_on(loop *one, tg_store *store)
{
    *one = (loop){ .fd = -1 };
    assert_int_equal(store->ops->async_open(store, &(tg_async_loop){ one, on_watch, on_wake, on_flush }, &one->client, NULL),
                     TG_OK);
}

/* Of the limiter's one rule, for client "a". */
static tg_target
target_of(const tg_limiter *named, tg_identity *identity)
{
    const tg_rule *rules;
    assert_int_equal(tg_limiter_rules(named, &rules), 1);
    assert_int_equal(tg__identity_join(&(tg_part){ .value = tg_text_of("a") }, 1, identity, NULL), TG_OK);
    return (tg_target){ .rule = &rules[0], .identity = identity, .cost = 1 };
}

/* Whether it was answered without the loop. */
static bool
ask(loop *one, tg_op op, const tg_target *target, tg_result *result)
{
    tg_store_call *call;
    const unsigned before = one->answered;
    one->status = one->client->ops->begin(one->client, op, target, 1, 0, result, on_done, one, &call, NULL);
    if (!call)
        return true;
    while (one->answered == before) {
        struct pollfd fd = { .fd = one->fd, .events = one->events };
        if (one->flushes) {
            one->flushes = false;
            one->client->ops->flush(one->client);
        }
        if (poll(&fd, 1, 10) > 0)
            one->client->ops->ready(one->client, fd.fd, fd.revents & POLLIN, fd.revents & POLLOUT);
    }
    return false;
}

static void
on_a_loop_a_known_denial_is_answered_at_once(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    loop one;
    open_on(&one, store);
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    tg_identity identity;
    tg_result result, taken = { .charged = false };
    assert_int_equal(tg_rules_parse(tg_text_of("2/hour"), TG_ALGORITHM_DEFAULT, rules, &count, NULL), TG_OK);
    tg__rule_scope(&rules[0], tg_text_of("tiers"), tg_text_of("loop"));
    assert_int_equal(tg__identity_join(&(tg_part){ .value = tg_text_of("a") }, 1, &identity, NULL), TG_OK);
    tg_target target = { .rule = &rules[0], .identity = &identity, .cost = 1 };
    assert_false(ask(&one, TG_OP_HIT, &target, &taken));
    assert_false(ask(&one, TG_OP_HIT, &target, &result));
    assert_true(result.allowed && result.charged);
    assert_false(ask(&one, TG_OP_HIT, &target, &result));
    assert_false(result.allowed);
    const uint64_t retry_us = result.retry_after_us;
    for (int i = 0; i < 100; i++) {
        assert_true(ask(&one, TG_OP_HIT, &target, &result));
        assert_int_equal(one.status, TG_OK);
        assert_false(result.allowed || result.charged);
        assert_true(result.retry_after_us <= retry_us);
    }
    target.own = true;
    target.stamp_us = taken.stamp_us;
    assert_false(ask(&one, TG_OP_REFUND, &target, NULL));
    assert_false(ask(&one, TG_OP_HIT, &target, &result));
    assert_true(result.allowed);
    tg_store_call *call, *dropped;
    assert_int_equal(one.client->ops->begin(one.client, TG_OP_HIT, &target, 1, 0, &result, on_done, &one, &call, NULL), TG_OK);
    assert_int_equal(one.client->ops->begin(one.client, TG_OP_HIT, &target, 1, 0, &result, on_done, &one, &dropped, NULL),
                     TG_OK);
    one.client->ops->cancel(one.client, dropped);
    const unsigned before = one.answered;
    one.client->ops->close(one.client); /* ends the other one */
    assert_int_equal(one.answered, before + 1);
    assert_int_equal(one.status, TG_E_STORE);
    tg_store_close(store);
}

/* ---- what is asked for in the URI ---- */

static tg_store *open_with(const char *options);

static void
on_a_loop_a_batch_that_does_not_fit_is_followed_by_what_is_needed(void **unused)
{
    (void)unused;
    tg_store *store = open_with("lease=10"), *elsewhere = open_store(plain_uri, NULL);
    tg_limiter *other = open_limiter(elsewhere, "100/hour token_bucket", "batch");
    tg_limiter *named = open_limiter(store, "100/hour token_bucket", "batch");
    loop one;
    open_on(&one, store);
    tg_identity identity;
    tg_result result;
    const tg_target target = target_of(named, &identity);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(ask(&one, TG_OP_HIT, &target, &result), i > 0);
        assert_true(result.allowed && result.charged);
    }
    hit_cost(other, "a", 85);
    for (int i = 0; i < 5; i++) {
        assert_false(ask(&one, TG_OP_HIT, &target, &result));
        assert_int_equal(one.status, TG_OK);
        assert_true(result.allowed && result.charged);
        assert_int_equal(result.remaining, 4 - i);
    }
    assert_false(ask(&one, TG_OP_HIT, &target, &result));
    assert_false(result.allowed);
    one.client->ops->close(one.client);
    tg_limiter_close(other);
    tg_limiter_close(named);
    tg_store_close(elsewhere);
    tg_store_close(store);
}


static tg_store *
open_with(const char *options)
{
    char asked_for[1300];
    snprintf(asked_for, sizeof asked_for, "%s&%s", uri, options);
    return open_store(asked_for, NULL);
}

static void
wrong_options_are_told_with_what_was_expected(void **unused)
{
    (void)unused;
    static const char *const wrong[] = { "lease=1", "lease=x", "local=0", "local=101", "workers=0", "leese=10",
                                         "flush=0ms", "flush=1001ms", "flush=2s", "flush=10", "flush=ms", "flush=10ms&lease=5" };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char asked_for[1300];
        tg_store *store;
        tg_error error;
        snprintf(asked_for, sizeof asked_for, "%s&%s", uri, wrong[i]);
        assert_int_equal(tg_store_open(tg_text_of(asked_for), NULL, &store, &error), TG_E_CONFIG);
        assert_non_null(strstr(error.message, "expected"));
        if (strncmp(wrong[i], "leese", 5) == 0)
            assert_non_null(strstr(error.message, "expected local, lease, workers, flush, db, connections"));
        assert_int_equal(tg__store_check_address(tg_text_of(asked_for), NULL, &error), TG_E_CONFIG);
    }
    char right[1300];
    tg_error error = { .message = "" };
    snprintf(right, sizeof right, "%s&flush=10ms&workers=4&local=50", uri); /* as `check` looks at it, without opening */
    if (tg__store_check_address(tg_text_of(right), NULL, &error) != TG_OK)
        fail_msg("%s: %s", right, error.message);
}

static void
a_local_layer_lets_its_share_through_and_asks_redis_no_more(void **unused)
{
    (void)unused;
    tg_store *store = open_with("local=50");
    tg_limiter *limiter = open_limiter(store, "10/hour", "local");
    for (int i = 0; i < 5; i++)
        assert_true(hit(limiter, "a").allowed);
    const long long before = asked();
    for (int i = 0; i < 100; i++) {
        const tg_decision decision = hit(limiter, "a");
        assert_false(decision.allowed);
        assert_int_equal(decision.limit, 10);
        assert_true(decision.retry_after_us > 0 && decision.retry_after_us <= 720 * SECOND_US);
    }
    assert_int_equal(asked() - before, 0);
    tg_store *elsewhere = open_store(plain_uri, NULL); /* another process, that has no such layer */
    tg_limiter *other = open_limiter(elsewhere, "10/hour", "local");
    assert_int_equal(hit(other, "a").remaining, 4);
    reset(limiter, "a");
    assert_int_equal(hit(limiter, "a").remaining, 9);
    tg_limiter_close(other);
    tg_store_close(elsewhere);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
what_redis_denies_is_given_back_to_the_local_layer(void **unused)
{
    (void)unused;
    tg_store *store = open_with("local=50"), *elsewhere = open_store(plain_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "10/hour token_bucket", "back"), *other = open_limiter(elsewhere, "10/hour token_bucket", "back");
    hit_cost(other, "a", 10);
    for (int i = 0; i < 20; i++)
        assert_false(hit(limiter, "a").allowed);
    reset(other, "a");
    sleep_us(5100000); /* what was remembered is over */
    for (int i = 0; i < 5; i++)
        assert_true(hit(limiter, "a").allowed);
    assert_false(hit(limiter, "a").allowed);
    tg_limiter_close(limiter);
    tg_limiter_close(other);
    tg_store_close(store);
    tg_store_close(elsewhere);
}

static void
a_lease_asks_once_for_many_hits_and_counts_each(void **unused)
{
    (void)unused;
    tg_store *store = open_with("lease=10");
    tg_limiter *limiter = open_limiter(store, "1000/hour token_bucket", "lease");
    const long long before = asked();
    for (int i = 0; i < 100; i++) {
        const tg_decision decision = hit(limiter, "a");
        assert_true(decision.allowed && decision.results[0].charged);
        assert_in_range(decision.remaining, 899 - i + 0, 1000 - i - 1);
    }
    assert_in_range(asked() - before, 10, 14); /* a lease may lapse on a busy machine */
    reset(limiter, "a");
    assert_int_equal(hit(limiter, "a").remaining, 999); /* what was left of the lease is gone with it */
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
where_a_lease_is_more_than_a_tenth_for_all_workers_none_is_taken(void **unused)
{
    (void)unused;
    tg_store *store = open_with("lease=10&workers=4");
    tg_limiter *few = open_limiter(store, "79/hour token_bucket", "few"), *leaky = open_limiter(store, "1000/hour leaky_bucket", "leaky");
    long long before = asked();
    for (int i = 0; i < 20; i++) {
        assert_int_equal(hit(few, "a").remaining, 78 - i);
        hit(leaky, "a");
    }
    assert_int_equal(asked() - before, 40);
    tg_limiter_close(few);
    tg_limiter_close(leaky);
    tg_store_close(store);
}

/* Four workers, each with leases of its own, on one limit at twice its rate: what all of them let through, and the most within
 * any one period, against the bounds of docs/tiered.md. */
static void
leases_of_four_workers_stay_within_the_bounds_that_are_stated(void **unused)
{
    (void)unused;
    enum { WORKERS = 4, LIMIT = 200, LEASE = 5, PERIOD_US = 500000, ROUNDS = 4, HITS_MAX = 4000 };
    static const char *const algorithms[] = { "sliding_log", "token_bucket burst 200", "fixed_window" };
    for (size_t a = 0; a < 3; a++) {
        tg_store *stores[WORKERS];
        tg_limiter *limiters[WORKERS];
        static uint64_t let_through_us[HITS_MAX];
        size_t count = 0;
        char rules[64];
        snprintf(rules, sizeof rules, "%d/500ms %s", LIMIT, algorithms[a]);
        for (int i = 0; i < WORKERS; i++) {
            char options[64];
            snprintf(options, sizeof options, "lease=%d&workers=4&connections=%d", LEASE, i + 1); /* a store of its own */
            stores[i] = open_with(options);
            limiters[i] = open_limiter(stores[i], rules, rules);
        }
        const uint64_t began_us = tg__monotonic_us(), end_us = began_us + ROUNDS * PERIOD_US;
        uint64_t next_us = began_us;
        for (unsigned i = 0; tg__monotonic_us() < end_us && count < HITS_MAX; i++) {
            if (hit(limiters[i % WORKERS], "a").allowed)
                let_through_us[count++] = tg__monotonic_us();
            next_us += PERIOD_US / (2 * LIMIT);
            while (tg__monotonic_us() < next_us)
                continue;
        }
        const size_t stranded = WORKERS * (LEASE - 1);
        size_t most = 0;
        for (size_t from = 0, to = 0; to < count; to++) {
            while (let_through_us[to] - let_through_us[from] >= PERIOD_US)
                from++;
            most = to - from + 1 > most ? to - from + 1 : most;
        }
        const size_t allowance = a == 0 ? LIMIT : 2 * LIMIT; /* within any period a bucket or a fixed window lets through twice */
        if (most > allowance + stranded)
            fail_msg("%s: %zu within one period, at most %zu", rules, most, allowance + stranded);
        /* Under: what is stranded in each period, of what was asked for; a busy machine asks for less. */
        const uint64_t ran_us = tg__monotonic_us() - began_us;
        if (ran_us < ROUNDS * PERIOD_US + 50000 && count + ROUNDS * stranded + LIMIT / 10 < ROUNDS * LIMIT * 9 / 10)
            fail_msg("%s: %zu let through in %d periods", rules, count, ROUNDS);
        for (int i = 0; i < WORKERS; i++) {
            tg_limiter_close(limiters[i]);
            tg_store_close(stores[i]);
        }
    }
}

static void
a_forked_child_has_no_lease_of_its_parents(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    tg_store *store = open_with("lease=100");
    tg_limiter *limiter = open_limiter(store, "1000/hour token_bucket", "forked");
    hit(limiter, "a"); /* 99 in hand */
    const pid_t child = fork();
    assert_true(child != -1);
    if (child == 0) {
        const uint64_t remaining = hit(limiter, "a").remaining;
        _exit(remaining == 1000 - 100 - 1 ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- hits that are told behind the answer ---- */

/* Until a process without tiers sees so many units of it taken. */
static void
await_remaining(tg_limiter *elsewhere, uint64_t expected)
{
    tg_decision decision = { .remaining = UINT64_MAX };
    for (int i = 0; i < 1000 && decision.remaining != expected; i++) {
        sleep_us(10000);
        decision = peek(elsewhere, "a");
    }
    assert_int_equal(decision.remaining, expected);
}

static void
hits_within_a_flush_reach_redis_in_one_call_and_each_is_counted(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "1000/hour token_bucket", "1000/hour fixed_window", "1000/hour sliding_log",
                                         "1000/hour sliding_counter", "1000/hour token_bucket; 2000/day" };
    tg_store *store = open_with("flush=200ms"), *elsewhere = open_store(plain_uri, NULL);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        tg_limiter *limiter = open_limiter(store, rules[i], rules[i]), *other = open_limiter(elsewhere, rules[i], rules[i]);
        long long before = asked();
        const uint64_t began_us = tg__monotonic_us();
        for (int k = 0; k < 60; k++) {
            const tg_decision decision = hit(limiter, "a");
            assert_true(decision.allowed && decision.results[0].charged && !decision.degraded);
            assert_int_equal(decision.remaining, 999 - k);
        }
        const long long flushes = (long long)((tg__monotonic_us() - began_us) / 200000);
        assert_in_range(asked() - before, 1, 3 + flushes); /* the first one, and what a busy machine is late with */
        await_remaining(other, 940);
        reset(limiter, "a");
        before = asked();
        assert_int_equal(hit(limiter, "a").remaining, 999);
        assert_int_equal(asked() - before, 1);
        tg_limiter_close(limiter);
        tg_limiter_close(other);
    }
    tg_store_close(store);
    tg_store_close(elsewhere);
}

static void
what_is_more_than_a_tenth_for_all_workers_or_waits_in_a_leaky_bucket_is_asked_about(void **unused)
{
    (void)unused;
    tg_store *store = open_with("flush=1s&workers=4");
    tg_limiter *few = open_limiter(store, "39/hour token_bucket", "few"), *leaky = open_limiter(store, "1000/hour leaky_bucket", "leaky"),
               *more = open_limiter(store, "400/hour", "more");
    long long before = asked();
    for (int i = 0; i < 20; i++) {
        assert_int_equal(hit(few, "a").remaining, 38 - i);
        hit(leaky, "a");
        hit_cost(more, "a", 11);
    }
    assert_int_equal(asked() - before, 60);
    before = asked();
    for (int i = 0; i < 60; i++)
        assert_true(hit(more, "a").allowed);
    assert_in_range(asked() - before, 6, 60); /* ten may wait; the eleventh does not wait for the flush to be due */
    tg_limiter_close(few);
    tg_limiter_close(leaky);
    tg_limiter_close(more);
    tg_store_close(store);
}

static void
many_clients_in_one_flush_are_each_counted(void **unused)
{
    (void)unused;
    enum { CLIENTS = 70 }; /* three calls, and on a cluster as many slots */
    tg_store *store = open_with("flush=100ms"), *elsewhere = open_store(plain_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1000/hour sliding_log", "many"),
               *other = open_limiter(elsewhere, "1000/hour sliding_log", "many");
    for (int round = 0; round < 10; round++)
        for (int i = 0; i < CLIENTS; i++) {
            char who[16];
            snprintf(who, sizeof who, "%d", i);
            assert_int_equal(hit(limiter, who).remaining, 999 - round);
        }
    const uint64_t end_us = tg__monotonic_us() + 10 * SECOND_US;
    for (int i = 0; i < CLIENTS; i++) {
        char who[16];
        snprintf(who, sizeof who, "%d", i);
        tg_decision decision = { .remaining = 0 };
        while (decision.remaining != 990) {
            if (tg__monotonic_us() > end_us)
                fail_msg("client %d: %u remain", i, (unsigned)decision.remaining);
            decision = peek(other, who);
        }
    }
    tg_limiter_close(limiter);
    tg_limiter_close(other);
    tg_store_close(store);
    tg_store_close(elsewhere);
}

static void
what_waits_is_told_when_the_store_is_closed_and_when_a_process_exits(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    static tg_store *store; /* the child that exits has them still */
    static tg_limiter *limiter;
    for (int exits = 0; exits < 2; exits++) {
        char name[8];
        snprintf(name, sizeof name, "last%d", exits);
        const pid_t child = exits ? fork() : 0;
        assert_true(child != -1);
        if (child == 0) {
            store = open_with("flush=1s");
            limiter = open_limiter(store, "1000/hour token_bucket", name);
            hit_times(limiter, "a", 40);
            if (exits)
                exit(0);
            tg_limiter_close(limiter);
            tg_store_close(store);
        } else {
            int status;
            waitpid(child, &status, 0);
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        tg_store *elsewhere = open_store(plain_uri, NULL);
        tg_limiter *other = open_limiter(elsewhere, "1000/hour token_bucket", name);
        await_remaining(other, 960);
        tg_limiter_close(other);
        tg_store_close(elsewhere);
    }
}

static void
a_refund_of_what_waits_and_of_what_was_told_is_counted_once(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "1000/hour token_bucket", "1000/hour fixed_window", "1000/hour sliding_log" };
    tg_store *store = open_with("flush=200ms"), *elsewhere = open_store(plain_uri, NULL);
    for (size_t i = 0; i < 3; i++) {
        tg_limiter *limiter = open_limiter(store, rules[i], rules[i]), *other = open_limiter(elsewhere, rules[i], rules[i]);
        hit_times(limiter, "a", 20);
        tg_decision waits = hit(limiter, "a"), told = hit(limiter, "a");
        assert_int_equal(tg_decision_refund(store, &waits, NULL), TG_OK);
        await_remaining(other, 979);
        assert_int_equal(tg_decision_refund(store, &told, NULL), TG_OK);
        await_remaining(other, 980);
        tg_limiter_close(limiter);
        tg_limiter_close(other);
    }
    tg_store_close(store);
    tg_store_close(elsewhere);
}

static void
what_waits_at_a_fork_is_told_once_and_by_the_parent(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    tg_store *store = open_with("flush=300ms"), *elsewhere = open_store(plain_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1000/hour token_bucket", "forked"), *other = open_limiter(elsewhere, "1000/hour token_bucket", "forked");
    hit_times(limiter, "a", 31);
    const pid_t child = fork();
    assert_true(child != -1);
    if (child == 0) {
        hit_times(limiter, "a", 21);
        tg_limiter_close(limiter);
        tg_store_close(store);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    await_remaining(other, 1000 - 31 - 21);
    tg_limiter_close(limiter);
    tg_limiter_close(other);
    tg_store_close(store);
    tg_store_close(elsewhere);
}

static void
a_redis_that_is_away_ends_what_is_known_within_a_flush_and_a_deadline(void **unused)
{
    (void)unused;
    char quick[1300], *patience;
    snprintf(quick, sizeof quick, "%s&flush=20ms", uri);
    patience = strstr(quick, "timeout_ms=2000"); /* here a decision is to be late soon */
    assert_non_null(patience);
    memmove(patience + sizeof "timeout_ms=100" - 1, patience + sizeof "timeout_ms=2000" - 1,
            strlen(patience + sizeof "timeout_ms=2000" - 1) + 1);
    memcpy(patience, "timeout_ms=100", sizeof "timeout_ms=100" - 1);
    tg_store *store = open_store(quick, NULL);
    tg_limiter *closed = open_limiter_so(store, "100000/hour token_bucket", "away", TG_FAIL_CLOSED);
    hit_times(closed, "a", 5);
    for_all(SIGSTOP);
    const uint64_t began_us = tg__monotonic_us();
    unsigned let_through = 0;
    while (hit(closed, "a").allowed) {
        let_through++;
        sleep_us(1000);
        assert_true(tg__monotonic_us() - began_us < 2000000);
    }
    assert_in_range(let_through, 1, 1000);
    assert_true(hit(closed, "a").degraded);
    for_all(SIGCONT);
    recovery_us(closed, "a");
    tg_limiter_close(closed);
    tg_store_close(store);
}

static void
on_a_loop_what_is_known_to_fit_is_let_through_at_once(void **unused)
{
    (void)unused;
    tg_store *store = open_with("flush=200ms"), *elsewhere = open_store(plain_uri, NULL);
    tg_limiter *named = open_limiter(store, "1000/hour token_bucket", "loop"), *other = open_limiter(elsewhere, "1000/hour token_bucket", "loop");
    loop one;
    open_on(&one, store);
    tg_identity identity;
    tg_result result;
    const tg_target target = target_of(named, &identity);
    for (int i = 0; i < 50; i++) {
        assert_int_equal(ask(&one, TG_OP_HIT, &target, &result), i > 0);
        assert_true(result.allowed && result.charged);
        assert_int_equal(result.remaining, 999 - i);
    }
    one.client->ops->close(one.client);
    tg_limiter_close(named);
    tg_store_close(store);
    await_remaining(other, 950);
    tg_limiter_close(other);
    tg_store_close(elsewhere);
}

static int
by_time(const void *a, const void *b)
{
    const uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return (one > other) - (one < other);
}

/* Four processes on one limit at twice its rate: what all of them let through, and the most within any one period, against the
 * bounds of docs/tiered.md. */
static void
four_processes_that_flush_stay_within_the_bounds_that_are_stated(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    enum { WORKERS = 4, LIMIT = 400, MOST = LIMIT / (10 * WORKERS), PERIOD_US = 500000, ROUNDS = 4, HITS_MAX = 4000 };
    static const char *const algorithms[] = { "sliding_log", "token_bucket burst 400", "fixed_window" };
    typedef struct seen {
        _Atomic size_t count, asked, late;
        uint64_t at_us[HITS_MAX];
    } seen;
    seen *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(all != MAP_FAILED);
    for (size_t a = 0; a < 3; a++) {
        pid_t workers[WORKERS];
        char rules[64];
        snprintf(rules, sizeof rules, "%d/500ms %s", LIMIT, algorithms[a]);
        memset(all, 0, sizeof *all);
        const long long before = asked();
        const uint64_t began_us = tg__monotonic_us() + 50000, end_us = began_us + ROUNDS * PERIOD_US;
        for (int w = 0; w < WORKERS; w++) {
            workers[w] = fork();
            assert_true(workers[w] != -1);
            if (workers[w] != 0)
                continue;
            tg_store *store = open_with("flush=10ms&workers=4");
            tg_limiter *limiter = open_limiter(store, rules, rules);
            const uint64_t step_us = PERIOD_US * WORKERS / (2 * LIMIT);
            uint64_t next_us = began_us + (uint64_t)w * step_us / WORKERS, now_us;
            while ((now_us = tg__monotonic_us()) < end_us) {
                if (now_us < next_us) {
                    sleep_us(next_us - now_us);
                    continue;
                }
                next_us += step_us;
                all->late += now_us > next_us + 50000;
                all->asked++;
                if (hit(limiter, "a").allowed) {
                    const size_t at = atomic_fetch_add(&all->count, 1);
                    if (at < HITS_MAX)
                        all->at_us[at] = tg__monotonic_us();
                }
            }
            tg_limiter_close(limiter);
            tg_store_close(store);
            _exit(0);
        }
        for (int w = 0; w < WORKERS; w++) {
            int status;
            waitpid(workers[w], &status, 0);
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        const size_t count = all->count, allowance = a == 0 ? LIMIT : 2 * LIMIT;
        assert_true(count <= HITS_MAX);
        qsort(all->at_us, count, sizeof all->at_us[0], by_time);
        size_t most = 0;
        for (size_t from = 0, to = 0; to < count; to++) {
            while (all->at_us[to] - all->at_us[from] >= PERIOD_US - 2000) /* a hit's own way */
                from++;
            most = to - from + 1 > most ? to - from + 1 : most;
        }
        if (most > allowance + WORKERS * MOST)
            fail_msg("%s: %zu within one period, at most %d", rules, most, (int)(allowance + WORKERS * MOST));
        /* Over all: what a bucket was overdrawn by is paid for, what is beyond a window is not. */
        const uint64_t ran_us = all->at_us[count ? count - 1 : 0] - began_us;
        const size_t total_most = a == 1 ? LIMIT + ran_us * LIMIT / PERIOD_US + 1 + WORKERS * MOST
                                         : (size_t)(ran_us / PERIOD_US + 1) * (LIMIT + WORKERS * MOST);
        if (count > total_most)
            fail_msg("%s: %zu let through in %d periods, at most %zu", rules, count, ROUNDS, total_most);
        if (all->late == 0 && count + ROUNDS * WORKERS * MOST < ROUNDS * LIMIT * 9 / 10)
            fail_msg("%s: %zu let through in %d periods of %d", rules, count, ROUNDS, LIMIT);
        print_message("%s: %zu of %zu let through, %zu within one period, %lld questions\n", rules, count, (size_t)all->asked,
                      most, asked() - before);
    }
    munmap(all, sizeof *all);
}

/* ---- threads and forks ---- */

typedef struct worker {
    tg_limiter *limiter;
    unsigned admitted;
} worker;

static void *
knock(void *data)
{
    worker *one = data;
    for (unsigned i = 0; i < 3000; i++) {
        char who[8];
        snprintf(who, sizeof who, "%u", i % 7);
        one->admitted += hit(one->limiter, who).allowed;
    }
    return NULL;
}

static void
threads_that_share_a_cache_admit_exactly_the_limit(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "50/hour token_bucket; 60/day", "threads");
    worker workers[6];
    pthread_t threads[6];
    unsigned admitted = 0;
    const long long before = asked();
    for (int i = 0; i < 6; i++) {
        workers[i] = (worker){ .limiter = limiter };
        assert_int_equal(pthread_create(&threads[i], NULL, knock, &workers[i]), 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(threads[i], NULL);
        admitted += workers[i].admitted;
    }
    assert_int_equal(admitted, 7 * 50);
    assert_in_range(asked() - before, 350, 6000); /* of 18 000 */
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static atomic_bool over;

static void *
knock_on(void *data)
{
    while (!atomic_load(&over))
        hit(data, "a");
    return NULL;
}

static void
a_fork_while_other_threads_are_in_the_cache_leaves_a_child_that_can_go_on(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "forks");
    pthread_t threads[2];
    atomic_store(&over, false);
    hit_times(limiter, "a", 6);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, knock_on, limiter), 0);
    for (int round = 0; round < 40; round++) {
        const pid_t child = fork();
        assert_true(child != -1);
        if (child == 0) {
            alarm(20);
            const bool allowed = hit(limiter, "a").allowed;
            _exit(allowed || hit(limiter, "b").degraded);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    atomic_store(&over, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- bounds ---- */

static void
a_flood_of_clients_lets_nobody_through(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1/hour", "flood");
    hit_times(limiter, "a", 2);
    for (unsigned i = 0; i < 3 * TG__DENIALS / 2; i++) {
        char who[16];
        snprintf(who, sizeof who, "%u", i);
        hit_cost(limiter, who, 2); /* cannot fit: a denial of its own for each */
        if (i % 64 == 0)
            assert_false(hit(limiter, "a").allowed);
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_denial_asks_redis_once_until_it_can_have_changed, begin),
        cmocka_unit_test_setup(a_denial_of_one_dimension_answers_for_whatever_stands_beside_it, begin),
        cmocka_unit_test_setup(what_denies_one_cost_asks_again_for_a_smaller_one, begin),
        cmocka_unit_test_setup(a_denial_ends_when_redis_would_let_through, begin),
        cmocka_unit_test_setup(a_reset_and_a_refund_end_a_denial_at_once, begin),
        cmocka_unit_test_setup(a_reset_made_elsewhere_shows_in_a_second_or_in_five_under_a_policy_that_gives_nothing_back, begin),
        cmocka_unit_test_setup(a_changed_rule_is_judged_anew, begin),
        cmocka_unit_test_setup(a_connection_that_is_lost_takes_what_was_known_with_it, begin),
        cmocka_unit_test_setup(a_redis_that_is_away_is_answered_for_by_policy, begin),
        cmocka_unit_test_setup(on_a_loop_a_known_denial_is_answered_at_once, begin),
        cmocka_unit_test_setup(on_a_loop_a_batch_that_does_not_fit_is_followed_by_what_is_needed, begin),
        cmocka_unit_test_setup(wrong_options_are_told_with_what_was_expected, begin),
        cmocka_unit_test_setup(a_local_layer_lets_its_share_through_and_asks_redis_no_more, begin),
        cmocka_unit_test_setup(what_redis_denies_is_given_back_to_the_local_layer, begin),
        cmocka_unit_test_setup(a_lease_asks_once_for_many_hits_and_counts_each, begin),
        cmocka_unit_test_setup(where_a_lease_is_more_than_a_tenth_for_all_workers_none_is_taken, begin),
        cmocka_unit_test_setup(leases_of_four_workers_stay_within_the_bounds_that_are_stated, begin),
        cmocka_unit_test_setup(a_forked_child_has_no_lease_of_its_parents, begin),
        cmocka_unit_test_setup(hits_within_a_flush_reach_redis_in_one_call_and_each_is_counted, begin),
        cmocka_unit_test_setup(what_is_more_than_a_tenth_for_all_workers_or_waits_in_a_leaky_bucket_is_asked_about, begin),
        cmocka_unit_test_setup(many_clients_in_one_flush_are_each_counted, begin),
        cmocka_unit_test_setup(what_waits_is_told_when_the_store_is_closed_and_when_a_process_exits, begin),
        cmocka_unit_test_setup(a_refund_of_what_waits_and_of_what_was_told_is_counted_once, begin),
        cmocka_unit_test_setup(what_waits_at_a_fork_is_told_once_and_by_the_parent, begin),
        cmocka_unit_test_setup(a_redis_that_is_away_ends_what_is_known_within_a_flush_and_a_deadline, begin),
        cmocka_unit_test_setup(on_a_loop_what_is_known_to_fit_is_let_through_at_once, begin),
        cmocka_unit_test_setup(four_processes_that_flush_stay_within_the_bounds_that_are_stated, begin),
        cmocka_unit_test_setup(threads_that_share_a_cache_admit_exactly_the_limit, begin),
        cmocka_unit_test_setup(a_fork_while_other_threads_are_in_the_cache_leaves_a_child_that_can_go_on, begin),
        cmocka_unit_test_setup(a_flood_of_clients_lets_nobody_through, begin),
    };
    /* Where servers stand already: nothing that kills one or is about none, and what is lengthy last. */
    const struct CMUnitTest elsewhere[] = {
        cmocka_unit_test_setup(a_denial_asks_redis_once_until_it_can_have_changed, begin),
        cmocka_unit_test_setup(a_denial_of_one_dimension_answers_for_whatever_stands_beside_it, begin),
        cmocka_unit_test_setup(a_reset_and_a_refund_end_a_denial_at_once, begin),
        cmocka_unit_test_setup(on_a_loop_a_known_denial_is_answered_at_once, begin),
        cmocka_unit_test_setup(on_a_loop_a_batch_that_does_not_fit_is_followed_by_what_is_needed, begin),
        cmocka_unit_test_setup(wrong_options_are_told_with_what_was_expected, begin),
        cmocka_unit_test_setup(a_local_layer_lets_its_share_through_and_asks_redis_no_more, begin),
        cmocka_unit_test_setup(a_lease_asks_once_for_many_hits_and_counts_each, begin),
        cmocka_unit_test_setup(where_a_lease_is_more_than_a_tenth_for_all_workers_none_is_taken, begin),
        cmocka_unit_test_setup(a_forked_child_has_no_lease_of_its_parents, begin),
        cmocka_unit_test_setup(hits_within_a_flush_reach_redis_in_one_call_and_each_is_counted, begin),
        cmocka_unit_test_setup(what_is_more_than_a_tenth_for_all_workers_or_waits_in_a_leaky_bucket_is_asked_about, begin),
        cmocka_unit_test_setup(many_clients_in_one_flush_are_each_counted, begin),
        cmocka_unit_test_setup(what_waits_is_told_when_the_store_is_closed_and_when_a_process_exits, begin),
        cmocka_unit_test_setup(a_refund_of_what_waits_and_of_what_was_told_is_counted_once, begin),
        cmocka_unit_test_setup(what_waits_at_a_fork_is_told_once_and_by_the_parent, begin),
        cmocka_unit_test_setup(a_redis_that_is_away_ends_what_is_known_within_a_flush_and_a_deadline, begin),
        cmocka_unit_test_setup(on_a_loop_what_is_known_to_fit_is_let_through_at_once, begin),
        cmocka_unit_test_setup(threads_that_share_a_cache_admit_exactly_the_limit, begin),
        cmocka_unit_test_setup(leases_of_four_workers_stay_within_the_bounds_that_are_stated, begin),
        cmocka_unit_test_setup(four_processes_that_flush_stay_within_the_bounds_that_are_stated, begin),
    };
    if (!getenv("TIDEGATE_TEST_TIERS"))
        return cmocka_run_group_tests(tests, begin_all, end_all);
    const size_t count = sizeof elsewhere / sizeof *elsewhere - (getenv("TIDEGATE_TEST_BRIEFLY") ? 2 : 0);
    return _cmocka_run_group_tests("elsewhere", elsewhere, count, begin_all, end_all);
}
