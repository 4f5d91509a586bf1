/* The Redis store when Redis does not do what it is asked: every row of the table in docs/redis.md, each with a real
 * server brought into that state.
 *
 * test-builds: plain asan */
#include "server.h"

#include <poll.h>
#include <pthread.h>

#define DEADLINE_US UINT64_C(50000)
#define SLACK_US UINT64_C(10000)

static server redis;

static int
begin(void **unused)
{
    (void)unused;
    server_init(&redis, false);
    server_start(&redis, NULL);
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

/* The state is not kept between tests: each starts from an open store and an untouched server. */
typedef struct site {
    tg_store *store;
    tg_limiter *limiter;
} site;

static site
site_open_so(const char *uri, const char *rules)
{
    site one;
    one.store = open_store(uri, NULL);
    one.limiter = open_limiter(one.store, rules, "site");
    return one;
}

static site
site_open_with(const char *options, const char *rules)
{
    char uri[200];
    snprintf(uri, sizeof uri, "%s?%s", redis.uri, options);
    return site_open_so(uri, rules);
}

/* Where not time but the answer is looked at: a busy machine is no fault. */
static site
site_open(const char *rules)
{
    return site_open_with("timeout_ms=2000", rules);
}

static site
site_open_prompt(const char *rules)
{
    return site_open_so(redis.uri, rules);
}

static void
site_close(site *one)
{
    tg_limiter_close(one->limiter);
    tg_store_close(one->store);
}

/* What is claimed here is about a server that answers, so it is given the time to: one that is too late is taken for absent,
 * and then opening succeeds, whatever is wrong with it. */
static tg_status
opening(const char *uri, tg_error *error)
{
    tg_store *store = NULL;
    char patient[256];
    snprintf(patient, sizeof patient, "%s%ctimeout_ms=2000", uri, strchr(uri, '?') ? '&' : '?');
    *error = (tg_error){ .message = "" };
    const tg_status status = tg_store_open(tg_text_of(patient), NULL, &store, error);
    assert_null(strstr(error->message, "hunter2"));
    if (status == TG_OK)
        tg_store_close(store);
    return status;
}

/* ---- scripts and counters that are gone ---- */

static void
a_flushed_script_is_sent_again_within_the_same_call(void **unused)
{
    (void)unused;
    site one = site_open("3/minute");
    assert_int_equal(hit(one.limiter, "a").remaining, 2);
    server_ask(&redis, NULL, "SCRIPT FLUSH");
    const tg_decision decision = hit(one.limiter, "a");
    assert_false(decision.degraded);
    assert_int_equal(decision.remaining, 1);
    assert_false(tg_notice_pending());
    site_close(&one);
}

static void
a_restarted_empty_redis_is_used_without_an_error(void **unused)
{
    (void)unused;
    site one = site_open("3/minute");
    hit(one.limiter, "a");
    server_kill(&redis);
    server_start(&redis, NULL);
    const tg_decision decision = hit(one.limiter, "a"); /* connection, script, secret and counters were all gone */
    assert_false(decision.degraded);
    assert_int_equal(decision.remaining, 2);
    assert_false(tg_notice_pending());
    site_close(&one);
}

static void
after_flushall_counting_begins_anew_with_the_same_secret(void **unused)
{
    (void)unused;
    site one = site_open("3/minute");
    hit(one.limiter, "a");
    server_ask(&redis, NULL, "FLUSHALL");
    assert_int_equal(hit(one.limiter, "a").remaining, 2);
    /* The secret is written back by the next connection, and it is the same: keys made before and after agree. */
    server_ask(&redis, NULL, "CLIENT KILL TYPE normal SKIPME yes");
    assert_int_equal(hit(one.limiter, "a").remaining, 1);
    assert_int_equal(server_ask(&redis, NULL, "EXISTS tg1:secret"), 1);
    site_close(&one);
}

/* ---- refused calls ---- */

static void
a_full_redis_fails_writes_by_policy_and_still_denies(void **unused)
{
    (void)unused;
    site one = site_open("1/minute token_bucket");
    assert_true(hit(one.limiter, "a").allowed);
    server_ask(&redis, NULL, "CONFIG SET maxmemory 1");
    const tg_decision denied = hit(one.limiter, "a");
    assert_false(denied.allowed || denied.degraded); /* a denial writes nothing */
    forget_notices();
    assert_true(hit(one.limiter, "b").degraded);
    assert_true(noticed("store-failing", "OOM"));
    for (int i = 0; i < 10; i++)
        assert_false(hit(one.limiter, "a").degraded); /* it answers: no pause */
    server_ask(&redis, NULL, "CLIENT KILL TYPE normal SKIPME yes");
    assert_false(hit(one.limiter, "a").degraded); /* nor does a new connection need to write anything */
    server_ask(&redis, NULL, "CONFIG SET maxmemory 0");
    assert_false(hit(one.limiter, "b").degraded);
    site_close(&one);
}

static void
a_refused_write_leaves_none_of_several_rules_charged(void **unused)
{
    (void)unused;
    site one = site_open("5/minute fixed_window; 5/minute sliding_log; 5/minute sliding_counter; 5/minute token_bucket");
    server_ask(&redis, NULL, "CONFIG SET maxmemory 1");
    for (int i = 0; i < 5; i++)
        assert_true(hit(one.limiter, "a").degraded);
    server_ask(&redis, NULL, "CONFIG SET maxmemory 0");
    const tg_decision decision = hit(one.limiter, "a");
    assert_int_equal(decision.result_count, 4);
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(decision.results[i].remaining, 4);
    site_close(&one);
}

static void
too_few_replicas_are_told_by_policy(void **unused)
{
    (void)unused;
    site one = site_open("3/minute");
    server_ask(&redis, NULL, "CONFIG SET min-replicas-to-write 1");
    assert_true(hit(one.limiter, "a").degraded);
    assert_true(noticed("store-failing", "NOREPLICAS"));
    server_ask(&redis, NULL, "CONFIG SET min-replicas-to-write 0");
    assert_false(hit(one.limiter, "a").degraded);
    site_close(&one);
}

static void
a_redis_that_cannot_save_is_told_by_policy(void **unused)
{
    (void)unused;
    site one = site_open("3/minute");
    char path[96];
    snprintf(path, sizeof path, "%s/dump.rdb", redis.folder);
    assert_int_equal(mkdir(path, 0700), 0); /* a file cannot be renamed over a folder */
    char refused[256];
    redisContext *link = server_connect(&redis);
    freeReplyObject(redisCommand(link, "CONFIG SET save %s", "3600 1"));
    redisFree(link);
    server_ask(&redis, refused, "BGSAVE");
    const uint64_t began_us = tg__monotonic_us();
    while (server_info(&redis, "persistence", "rdb_bgsave_in_progress") != 0 &&
           tg__monotonic_us() - began_us < 5 * SECOND_US)
        sleep_us(10000);
    assert_true(hit(one.limiter, "a").degraded);
    assert_true(noticed("store-failing", "MISCONF"));
    server_ask(&redis, NULL, "CONFIG SET stop-writes-on-bgsave-error no");
    assert_false(hit(one.limiter, "a").degraded);
    site_close(&one);
}

static void
a_foreign_value_under_our_key_is_told_and_not_overwritten(void **unused)
{
    (void)unused;
    site one = site_open("3/minute token_bucket; 3/minute sliding_log");
    hit(one.limiter, "a");
    redisContext *link = server_connect(&redis);
    redisReply *keys = redisCommand(link, "KEYS %s", "tg1:*:{a}:*");
    assert_int_equal(keys->elements, 2);
    for (size_t i = 0; i < keys->elements; i++)
        freeReplyObject(redisCommand(link, "DEL %s", keys->element[i]->str));
    static const char *const spoils[] = { "SADD %s junk", "SET %s junk", "LPUSH %s junk" };
    for (size_t i = 0; i < sizeof spoils / sizeof *spoils; i++)
        for (size_t k = 0; k < keys->elements; k++) {
            freeReplyObject(redisCommand(link, spoils[i], keys->element[k]->str));
            assert_true(hit(one.limiter, "a").degraded);
            assert_false(hit(one.limiter, "b").degraded);
            assert_true(hit(one.limiter, "a").degraded);
            redisReply *gone = redisCommand(link, "DEL %s", keys->element[k]->str);
            assert_int_equal(gone->integer, 1);
            freeReplyObject(gone);
            freeReplyObject(redisCommand(link, "DEL %s", keys->element[1 - k]->str));
            tg_limiter_reset(one.limiter, &(tg_dimension){ &(tg_part){ .value = tg_text_of("b") }, 1 }, 1, NULL);
        }
    freeReplyObject(keys);
    redisFree(link);
    site_close(&one);
}

/* ---- a Redis that answers nothing for now ---- */

#define PAUSE_US UINT64_C(50000) /* the shortest */

/* So many hits that nobody answers: within the deadline each, and once that is known hardly any takes time: `finding` of them
 * find out, and then one in a pause. A busy machine may let a pause go by between two of them. */
static void
unanswered(const site *one, unsigned times, unsigned finding)
{
    char why[160] = "";
    unsigned slow = 0;
    uint64_t quiet_us = 0, last_us = tg__monotonic_us();
    for (unsigned i = 0; i < times; i++) {
        uint64_t took_us;
        quiet_us += tg__monotonic_us() - last_us;
        assert_true(timed_hit(one->limiter, "a", &took_us).degraded);
        assert_in_time(took_us, DEADLINE_US + SLACK_US);
        if (in_time(took_us, 1000, why, sizeof why))
            quiet_us += took_us;
        else
            slow++;
        last_us = tg__monotonic_us();
    }
    if (slow > finding + quiet_us / PAUSE_US)
        fail_msg("%u of %u had to wait, the last one %s", slow, times, why);
}

static void *
loop_in_lua(void *unused)
{
    (void)unused;
    redisContext *link = server_connect(&redis);
    redisReply *reply = redisCommand(link, "EVAL %s 0", "while true do end");
    if (reply)
        freeReplyObject(reply);
    redisFree(link);
    return NULL;
}

static void
a_busy_redis_is_left_alone_until_it_answers(void **unused)
{
    (void)unused;
    site one = site_open_prompt("100/minute");
    hit(one.limiter, "a");
    server_ask(&redis, NULL, "CONFIG SET lua-time-limit 5");
    pthread_t looper;
    assert_int_equal(pthread_create(&looper, NULL, loop_in_lua, NULL), 0);
    sleep_us(100000);
    bool busy = false;
    unanswered(&one, 50, 10); /* three that it told of itself, or that were too late to hear of it */
    busy = noticed("store-failing", "BUSY");
    server_ask(&redis, NULL, "SCRIPT KILL");
    pthread_join(looper, NULL);
    assert_true(busy);
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    site_close(&one);
}

static void
a_loading_redis_is_left_alone_until_it_answers(void **unused)
{
    (void)unused;
    site one = site_open("100/minute");
    hit(one.limiter, "a");
    redisContext *link = server_connect(&redis);
    freeReplyObject(redisCommand(link, "EVAL %s 0", "for i = 1, 2000 do redis.call('SET', 'filler' .. i, ('x'):rep(100)) end"));
    redisFree(link);
    server_ask(&redis, NULL, "SAVE");
    server_kill(&redis);
    static const char *const slowly[] = { "--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024",
                                          NULL };
    server_start(&redis, slowly); /* about a second, during which PING is LOADING too */
    assert_true(hit(one.limiter, "a").degraded);
    assert_true(noticed("store-failing", "LOADING"));
    while (server_info(&redis, "persistence", "loading") == 1)
        assert_true(hit(one.limiter, "a").degraded || server_info(&redis, "persistence", "loading") == 0);
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    site_close(&one);
}

static void
a_replica_is_not_counted_on(void **unused)
{
    (void)unused;
    site one = site_open("100/minute");
    hit(one.limiter, "a");
    server_ask(&redis, NULL, "REPLICAOF 127.0.0.1 1");
    assert_true(hit(one.limiter, "a").degraded); /* READONLY on the old connection */
    assert_true(noticed("store-failing", "READONLY"));
    for (int i = 0; i < 20; i++)
        assert_true(hit(one.limiter, "a").degraded); /* ROLE on new ones */
    tg_error error;
    char uri[200];
    snprintf(uri, sizeof uri, "%s?connections=3", redis.uri); /* another store than the one that is open */
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "'slave'"));
    assert_non_null(strstr(error.message, "127.0.0.1:1"));
    server_ask(&redis, NULL, "REPLICAOF NO ONE");
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    site_close(&one);
}

static void
a_replica_without_its_master_is_not_counted_on(void **unused)
{
    (void)unused;
    site one = site_open("100/minute");
    hit(one.limiter, "a");
    server_ask(&redis, NULL, "CONFIG SET replica-serve-stale-data no");
    server_ask(&redis, NULL, "REPLICAOF 127.0.0.1 1");
    assert_true(hit(one.limiter, "a").degraded);
    assert_true(noticed("store-failing", "MASTERDOWN"));
    server_ask(&redis, NULL, "REPLICAOF NO ONE");
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    site_close(&one);
}

static void
paused_writes_end_by_the_deadline_and_are_counted_at_most_once(void **unused)
{
    (void)unused;
    site one = site_open_with("timeout_ms=300", "100/minute");
    hit(one.limiter, "a");
    server_ask(&redis, NULL, "CLIENT PAUSE 900 WRITE");
    uint64_t took_us;
    assert_true(timed_hit(one.limiter, "a", &took_us).degraded);
    assert_true(took_us >= 290000);
    assert_in_time(took_us, 300000 + SLACK_US);
    sleep_us(800000);
    const tg_decision decision = hit(one.limiter, "a");
    assert_false(decision.degraded);
    assert_in_range(decision.remaining, 97, 98); /* taken or not, but not twice */
    site_close(&one);
}

/* ---- connections ---- */

static void
a_stopped_redis_costs_the_deadline_and_then_nothing(void **unused)
{
    (void)unused;
    site one = site_open_prompt("100/minute");
    hit(one.limiter, "a");
    server_signal(&redis, SIGSTOP);
    uint64_t quick = 0;
    for (int i = 0; i < 200; i++) {
        uint64_t took_us;
        const tg_decision decision = timed_hit(one.limiter, "a", &took_us);
        assert_true(decision.degraded && decision.allowed);
        assert_in_time(took_us, DEADLINE_US + SLACK_US);
        quick += took_us < 1000;
    }
    assert_in_range(quick, 150, 197); /* three to find out, and a busy machine that interrupts */
    assert_true(noticed("store-failing", "in time"));
    server_signal(&redis, SIGCONT);
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    const tg_decision after = hit(one.limiter, "a");
    assert_in_range(after.remaining, 60, 97); /* what timed out may have been taken, once each */
    assert_false(noticed("store-failing", ""));
    sleep_us(1100000);
    hit(one.limiter, "a");
    assert_true(noticed("store-answers", ""));
    site_close(&one);
}

/* ---- what is told before a wait ---- */

typedef struct watching {
    redisContext *link; /* NULL: the server is stopped */
    unsigned times;
    size_t keys;
} watching;

static void
looks_at_the_server(void *context)
{
    watching *one = context;
    one->times++;
    if (!one->link)
        return;
    redisReply *keys = redisCommand(one->link, "KEYS %s", "*{b}*");
    one->keys = keys->elements;
    freeReplyObject(keys);
}

static void
a_wait_is_told_once_with_the_question_on_its_way(void **unused)
{
    (void)unused;
    site one = site_open("5/minute");
    hit(one.limiter, "a"); /* the script is known from here on */
    watching watch = { .link = server_connect(&redis) };
    assert_true(tg_store_before_waiting(one.store, looks_at_the_server, &watch));
    assert_int_equal(hit(one.limiter, "b").remaining, 4);
    assert_int_equal(watch.times, 1);
    assert_int_equal(watch.keys, 1); /* counted before it was waited for */
    hit(one.limiter, "b");
    assert_int_equal(watch.times, 1); /* once */
    assert_true(tg_store_before_waiting(one.store, looks_at_the_server, &watch));
    assert_true(tg_store_before_waiting(one.store, NULL, NULL));
    hit(one.limiter, "b");
    assert_int_equal(watch.times, 1); /* forgotten */
    redisFree(watch.link);
    site_close(&one);
}

static void
a_call_that_waits_for_nothing_tells_of_none(void **unused)
{
    (void)unused;
    site one = site_open_prompt("5/minute");
    hit(one.limiter, "a");
    server_signal(&redis, SIGSTOP);
    for (int i = 0; i < 3; i++) {
        watching watch = { .times = 0 };
        assert_true(tg_store_before_waiting(one.store, looks_at_the_server, &watch));
        assert_true(hit(one.limiter, "a").degraded);
        assert_int_equal(watch.times, 1); /* for an answer, or for a new connection: both would be two waits */
    }
    watching watch = { .times = 0 };
    assert_true(tg_store_before_waiting(one.store, looks_at_the_server, &watch));
    assert_true(hit(one.limiter, "a").degraded); /* nobody is asked any more */
    assert_int_equal(watch.times, 0);
    tg_store_before_waiting(one.store, NULL, NULL);
    server_signal(&redis, SIGCONT);
    site_close(&one);
    tg_store *table = open_store("memory://", NULL);
    assert_false(tg_store_before_waiting(table, looks_at_the_server, &watch));
    tg_store_close(table);
}

static void *
waits_for_a_connection(void *argument)
{
    site *one = argument;
    watching watch = { .times = 0 };
    tg_store_before_waiting(one->store, looks_at_the_server, &watch);
    hit(one->limiter, "b");
    tg_store_before_waiting(one->store, NULL, NULL);
    return (void *)(uintptr_t)watch.times;
}

static void
who_waits_for_a_connection_that_another_uses_tells_of_it(void **unused)
{
    (void)unused;
    site one = site_open_with("connections=1&timeout_ms=300", "5/minute");
    hit(one.limiter, "a");
    server_signal(&redis, SIGSTOP);
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, waits_for_a_connection, &one), 0);
    for (size_t i = 0; i < 3; i++) {
        void *times;
        pthread_join(threads[i], &times);
        assert_int_equal((uintptr_t)times, 1);
    }
    server_signal(&redis, SIGCONT);
    site_close(&one);
}

static void
a_late_reply_is_never_taken_for_the_next_ones(void **unused)
{
    (void)unused;
    site one = site_open_with("timeout_ms=300", "100/minute");
    for (int i = 0; i < 50; i++)
        hit(one.limiter, "a"); /* 50 left */
    hit(one.limiter, "b");
    const long long before = server_info(&redis, "stats", "total_connections_received");
    server_ask(&redis, NULL, "CLIENT PAUSE 700 ALL");
    assert_true(hit(one.limiter, "a").degraded);
    sleep_us(600000);
    assert_int_equal(hit(one.limiter, "b").remaining, 98);
    assert_true(server_info(&redis, "stats", "total_connections_received") >= before + 2); /* a new one, and ours here */
    site_close(&one);
}

static volatile sig_atomic_t pipe_signals;

static void
count_signal(int number)
{
    (void)number;
    pipe_signals++;
}

static void
a_connection_closed_while_idle_is_replaced_in_silence(void **unused)
{
    (void)unused;
    struct sigaction ours = { .sa_handler = count_signal }, was;
    sigaction(SIGPIPE, &ours, &was);
    site one = site_open("100/minute");
    for (int i = 0; i < 20; i++) {
        hit(one.limiter, "a");
        server_ask(&redis, NULL, "CLIENT KILL TYPE normal SKIPME yes");
    }
    assert_int_equal(hit(one.limiter, "a").remaining, 79);
    assert_int_equal(pipe_signals, 0);
    assert_false(tg_notice_pending());
    sigaction(SIGPIPE, &was, NULL);
    site_close(&one);
}

static void
a_killed_redis_is_found_again_within_two_seconds(void **unused)
{
    (void)unused;
    site one = site_open_prompt("100/minute");
    hit(one.limiter, "a");
    for (int round = 0; round < 2; round++) {
        server_kill(&redis);
        const uint64_t until_us = tg__monotonic_us() + (round ? 3 : 1) * SECOND_US;
        while (tg__monotonic_us() < until_us) {
            uint64_t took_us;
            assert_true(timed_hit(one.limiter, "a", &took_us).degraded);
            assert_in_time(took_us, DEADLINE_US + SLACK_US);
            sleep_us(2000);
        }
        server_start(&redis, NULL);
        assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    }
    site_close(&one);
}

static void
trouble_under_load_speaks_once_as_it_begins_and_once_as_it_ends(void **unused)
{
    (void)unused;
    site one = site_open("1000000/hour token_bucket"); /* dead, not slow: a busy machine would be told of as well */
    hit(one.limiter, "a");
    server_kill(&redis);
    for (const uint64_t until_us = tg__monotonic_us() + 3 * SECOND_US; tg__monotonic_us() < until_us; sleep_us(500))
        assert_true(hit(one.limiter, "a").degraded);
    server_start(&redis, NULL);
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    for (const uint64_t until_us = tg__monotonic_us() + 1500000; tg__monotonic_us() < until_us; sleep_us(500))
        assert_false(hit(one.limiter, "a").degraded);
    tg_notice notice;
    const char *const expected[] = { "store-failing", "store-answers" };
    for (size_t i = 0; i < 2; i++) {
        assert_true(tg_notice_take(&notice));
        assert_string_equal(notice.code, expected[i]);
    }
    assert_false(tg_notice_take(&notice));
    site_close(&one);
}

static void
closed_policy_refuses_and_local_policy_counts_while_redis_is_away(void **unused)
{
    (void)unused;
    char uri[200];
    snprintf(uri, sizeof uri, "%s?timeout_ms=2000", redis.uri);
    tg_store *store = open_store(uri, NULL);
    tg_limiter *closed = open_limiter_so(store, "2/minute", "closed", TG_FAIL_CLOSED);
    tg_limiter *local = open_limiter_so(store, "2/minute", "local", TG_FAIL_LOCAL);
    server_kill(&redis);
    const tg_decision refused = hit(closed, "a");
    assert_true(refused.degraded);
    assert_false(refused.allowed);
    assert_int_equal(refused.retry_after_us, SECOND_US);
    assert_true(hit(local, "a").allowed && hit(local, "a").allowed);
    const tg_decision third = hit(local, "a");
    assert_true(third.degraded);
    assert_false(third.allowed);
    server_start(&redis, NULL);
    recovery_us(closed, "b");
    assert_true(hit(local, "a").allowed);
    tg_limiter_close(closed);
    tg_limiter_close(local);
    tg_store_close(store);
}

static void
no_more_clients_is_told_and_passes(void **unused)
{
    (void)unused;
    site one = site_open("100/minute");
    redisContext *talk = server_connect(&redis);
    freeReplyObject(redisCommand(talk, "CONFIG SET maxclients 1"));
    redisReply *killed = redisCommand(talk, "CLIENT KILL TYPE normal SKIPME yes");
    assert_true(killed->integer >= 1);
    freeReplyObject(killed);
    for (int i = 0; i < 5; i++)
        assert_true(hit(one.limiter, "a").degraded);
    assert_true(noticed("store-failing", ""));
    freeReplyObject(redisCommand(talk, "CONFIG SET maxclients 100"));
    redisFree(talk);
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    site_close(&one);
}

/* ---- peers that are no Redis ---- */

typedef struct liar {
    int fd;
    const char *says; /* NULL: nothing */
    size_t length;
    pthread_t thread;
    char path[96];
} liar;

static void *
lie(void *argument)
{
    liar *one = argument;
    for (;;) {
        const int fd = accept(one->fd, NULL, NULL);
        if (fd == -1)
            return NULL;
        char heard[65536];
        const ssize_t got = recv(fd, heard, sizeof heard, 0);
        if (got > 0 && one->says)
            (void)!send(fd, one->says, one->length, MSG_NOSIGNAL);
        if (one->says)
            close(fd);
    }
}

static void
liar_begin(liar *one, const char *says, size_t length)
{
    *one = (liar){ .says = says, .length = length };
    snprintf(one->path, sizeof one->path, "%s/liar", redis.folder);
    unlink(one->path);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%s", one->path);
    one->fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(one->fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(one->fd, 16), 0);
    assert_int_equal(pthread_create(&one->thread, NULL, lie, one), 0);
}

static void
liar_end(liar *one)
{
    shutdown(one->fd, SHUT_RDWR);
    pthread_join(one->thread, NULL);
    close(one->fd);
}

static void
a_silent_peer_does_not_hold_up_start_or_requests(void **unused)
{
    (void)unused;
    liar silent;
    liar_begin(&silent, NULL, 0);
    char uri[128];
    snprintf(uri, sizeof uri, "redis+unix://%s", silent.path);
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    site one = site_open_so(uri, "5/minute");
    assert_in_time(tg__monotonic_us() - began_us, 300000);
    unanswered(&one, 10, 3);
    assert_true(noticed("store-failing", "in time"));
    site_close(&one);
    liar_end(&silent);
}

static void
garbage_for_a_reply_is_a_store_that_does_not_answer(void **unused)
{
    (void)unused;
    static const struct {
        const char *bytes;
        size_t length;
    } replies[] = {
        { "HTTP/1.1 400 Bad Request\r\n\r\n", 28 }, { "*3\r\n$6\r\nmaster\r\n:1\r\n", 21 }, { "$100\r\nshort", 11 },
        { "%1\r\n+a\r\n+b\r\n", 12 }, { "*-1\r\n", 5 }, { "$-5\r\n", 5 }, { ":1\r\n:2\r\n:3\r\n", 12 },
        { "-", 1 }, { "*99999999999\r\n", 14 }, { "\0\0\0\0", 4 },
    };
    for (size_t i = 0; i < sizeof replies / sizeof *replies; i++) {
        liar one;
        liar_begin(&one, replies[i].bytes, replies[i].length);
        char uri[128];
        snprintf(uri, sizeof uri, "redis+unix://%s", one.path);
        site broken = site_open_so(uri, "5/minute");
        for (int k = 0; k < 4; k++)
            assert_true(hit(broken.limiter, "a").degraded);
        site_close(&broken);
        liar_end(&one);
    }
    forget_notices();
}

/* ---- between the store and the server ---- */

/* Passes everything on, but tells of a missing script in words of its own, as proxies do, and makes it missing again
 * before the store's next word. */
typedef struct proxy {
    int listener;
    char path[96], after_miss[16]; /* how the store's next call began */
    pthread_t thread;
} proxy;

static void *
pass_on(void *argument)
{
    proxy *one = argument;
    static char bytes[1 << 18];
    const int client = accept(one->listener, NULL, NULL);
    redisContext *behind = redisConnectUnix(redis.path);
    struct pollfd both[2] = { { .fd = client, .events = POLLIN }, { .fd = behind->fd, .events = POLLIN } };
    bool missed = false;
    while (poll(both, 2, 5000) > 0) {
        if (both[0].revents) {
            const ssize_t got = read(client, bytes, sizeof bytes);
            if (got <= 0)
                break;
            if (missed && one->after_miss[0] == '\0')
                memcpy(one->after_miss, bytes, sizeof one->after_miss - 1);
            (void)!write(behind->fd, bytes, (size_t)got);
        }
        if (both[1].revents) {
            ssize_t got = read(behind->fd, bytes, sizeof bytes);
            if (got <= 0)
                break;
            if (strncmp(bytes, "-NOSCRIPT", 9) == 0) {
                got = sprintf(bytes, "-ERR backend 3: NOSCRIPT No matching script. Please use EVAL.\r\n");
                missed = true;
                server_ask(&redis, NULL, "SCRIPT FLUSH");
            }
            (void)!write(client, bytes, (size_t)got);
        }
    }
    redisFree(behind);
    close(client);
    return NULL;
}

static void
a_missing_script_is_understood_in_a_proxys_words_and_sent_whole(void **unused)
{
    (void)unused;
    proxy one = { .listener = socket(AF_UNIX, SOCK_STREAM, 0) };
    snprintf(one.path, sizeof one.path, "%s/proxy", redis.folder);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%s", one.path);
    assert_int_equal(bind(one.listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(one.listener, 4), 0);
    assert_int_equal(pthread_create(&one.thread, NULL, pass_on, &one), 0);
    char uri[200];
    snprintf(uri, sizeof uri, "redis+unix://%s?connections=1&timeout_ms=2000", one.path);
    site through = site_open_so(uri, "5/minute");
    const tg_decision decision = hit(through.limiter, "a"); /* no script is there yet */
    assert_false(decision.degraded);
    assert_int_equal(decision.remaining, 4);
    site_close(&through);
    pthread_join(one.thread, NULL);
    close(one.listener);
    assert_non_null(strstr(one.after_miss, "$4\r\nEVAL\r\n"));
}

/* ---- start ---- */

static void
a_start_without_redis_succeeds_and_finds_it_later(void **unused)
{
    (void)unused;
    server_kill(&redis);
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    site one = site_open_prompt("5/minute");
    assert_in_time(tg__monotonic_us() - began_us, 300000);
    assert_true(hit(one.limiter, "a").degraded);
    tg_notice notice;
    int spoken = 0;
    while (tg_notice_take(&notice))
        spoken++;
    assert_int_equal(spoken, 1);
    server_start(&redis, NULL);
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    site_close(&one);
}

static void
a_wrong_or_missing_password_is_an_error_at_start(void **unused)
{
    (void)unused;
    server_ask(&redis, NULL, "CONFIG SET requirepass hunter2");
    tg_error error;
    char uri[200];
    assert_int_equal(opening(redis.uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "NOAUTH"));
    snprintf(uri, sizeof uri, "redis+unix://:hunter22@%s", redis.path);
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "WRONGPASS"));
    snprintf(uri, sizeof uri, "redis+unix://default:hunter2@%s?db=3", redis.path);
    assert_int_equal(opening(uri, &error), TG_OK);
    assert_false(tg_notice_pending());
    snprintf(uri, sizeof uri, "redis+unix://:hunter2@%s?db=999", redis.path);
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "DB index"));
}

static void
a_password_changed_while_running_is_a_store_failure(void **unused)
{
    (void)unused;
    site one = site_open("5/minute");
    hit(one.limiter, "a");
    redisContext *talk = server_connect(&redis); /* before there is a password */
    freeReplyObject(redisCommand(talk, "CONFIG SET requirepass hunter2"));
    freeReplyObject(redisCommand(talk, "CLIENT KILL TYPE normal SKIPME yes"));
    assert_true(hit(one.limiter, "a").degraded);
    assert_true(noticed("store-failing", "NOAUTH"));
    redisReply *reply = redisCommand(talk, "CONFIG SET requirepass %s", "");
    freeReplyObject(reply);
    redisFree(talk);
    assert_in_time(recovery_us(one.limiter, "a"), 2 * SECOND_US);
    site_close(&one);
}

static void
a_missing_permission_is_named_at_start(void **unused)
{
    (void)unused;
    static const char base[] = "ACL SETUSER site reset on >hunter2 ~tg1:* +eval +evalsha +time +get +set +pexpire +lrange "
                               "+llen +lindex +rpush +lset +ltrim +del +role +info";
    char uri[200], command[400];
    snprintf(uri, sizeof uri, "redis+unix://site:hunter2@%s", redis.path);
    tg_error error;
    server_ask(&redis, NULL, base);
    assert_int_equal(opening(uri, &error), TG_OK);
    assert_false(tg_notice_pending());
    static const char *const needed[] = { "eval", "time", "get", "set", "pexpire", "lrange", "llen", "lindex", "rpush",
                                          "lset", "ltrim", "del" };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        snprintf(command, sizeof command, "%s -%s", base, needed[i]);
        server_ask(&redis, NULL, command);
        assert_int_equal(opening(uri, &error), TG_E_CONFIG);
        if (!strstr(error.message, needed[i]))
            fail_msg("without %s: %s", needed[i], error.message);
    }
    static const char *const useful[] = { "role", "info" };
    for (size_t i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "%s -%s", base, useful[i]);
        server_ask(&redis, NULL, command);
        assert_int_equal(opening(uri, &error), TG_OK);
        assert_true(noticed("store-unchecked", useful[i]));
    }
    server_ask(&redis, NULL, base);
    server_ask(&redis, NULL, "ACL SETUSER site resetkeys ~other:*");
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "NOPERM"));
}

static void
a_permission_taken_away_while_running_leaves_no_key_without_an_expiry(void **unused)
{
    (void)unused;
    char uri[200];
    snprintf(uri, sizeof uri, "redis+unix://site:hunter2@%s?timeout_ms=2000", redis.path);
    server_ask(&redis, NULL, "ACL SETUSER site reset on >hunter2 ~tg1:* +@all");
    site one = site_open_so(uri, "5/minute sliding_log");
    assert_false(hit(one.limiter, "a").degraded);
    static const char *const taken[] = { "-pexpire", "-evalsha", "-time", "-rpush", "-lrange" };
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        char command[120], who[16];
        snprintf(command, sizeof command, "ACL SETUSER site +@all %s", taken[i]);
        snprintf(who, sizeof who, "who%zu", i);
        server_ask(&redis, NULL, command);
        assert_true(hit(one.limiter, who).degraded);
        snprintf(command, sizeof command, "KEYS tg1:*{%s}*", who);
        assert_int_equal(server_ask(&redis, NULL, command), 0);
        server_ask(&redis, NULL, "ACL SETUSER site +@all");
        recovery_us(one.limiter, "a");
    }
    forget_notices();
    site_close(&one);
}

static void
an_evicting_redis_is_warned_of_once(void **unused)
{
    (void)unused;
    server_ask(&redis, NULL, "CONFIG SET maxmemory-policy allkeys-lru");
    site one = site_open("5/minute");
    assert_true(noticed("store-evicts", "allkeys-lru"));
    server_ask(&redis, NULL, "CLIENT KILL TYPE normal SKIPME yes");
    hit(one.limiter, "a");
    assert_false(tg_notice_pending());
    site_close(&one);
}

static void
one_node_of_a_cluster_is_an_error_that_says_so(void **unused)
{
    (void)unused;
    server_kill(&redis);
    char bus[8]; /* else it would be the port's number and ten thousand, which may be none */
    snprintf(bus, sizeof bus, "%u", free_port());
    const char *const cluster[] = { "--cluster-enabled", "yes", "--cluster-port", bus, NULL };
    redis.port = free_port();
    server_start(&redis, cluster);
    site one = site_open("5/minute"); /* not one slot is served: a cluster that is down */
    assert_true(hit(one.limiter, "a").degraded);
    assert_true(noticed("store-failing", "CLUSTERDOWN"));
    site_close(&one);
}

int
main(void)
{
    pthread_t lateness;
    lateness_begin(&lateness);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_flushed_script_is_sent_again_within_the_same_call, begin, end),
        cmocka_unit_test_setup_teardown(a_restarted_empty_redis_is_used_without_an_error, begin, end),
        cmocka_unit_test_setup_teardown(after_flushall_counting_begins_anew_with_the_same_secret, begin, end),
        cmocka_unit_test_setup_teardown(a_full_redis_fails_writes_by_policy_and_still_denies, begin, end),
        cmocka_unit_test_setup_teardown(a_refused_write_leaves_none_of_several_rules_charged, begin, end),
        cmocka_unit_test_setup_teardown(too_few_replicas_are_told_by_policy, begin, end),
        cmocka_unit_test_setup_teardown(a_redis_that_cannot_save_is_told_by_policy, begin, end),
        cmocka_unit_test_setup_teardown(a_foreign_value_under_our_key_is_told_and_not_overwritten, begin, end),
        cmocka_unit_test_setup_teardown(a_busy_redis_is_left_alone_until_it_answers, begin, end),
        cmocka_unit_test_setup_teardown(a_loading_redis_is_left_alone_until_it_answers, begin, end),
        cmocka_unit_test_setup_teardown(a_replica_is_not_counted_on, begin, end),
        cmocka_unit_test_setup_teardown(a_replica_without_its_master_is_not_counted_on, begin, end),
        cmocka_unit_test_setup_teardown(paused_writes_end_by_the_deadline_and_are_counted_at_most_once, begin, end),
        cmocka_unit_test_setup_teardown(a_stopped_redis_costs_the_deadline_and_then_nothing, begin, end),
        cmocka_unit_test_setup_teardown(a_wait_is_told_once_with_the_question_on_its_way, begin, end),
        cmocka_unit_test_setup_teardown(a_call_that_waits_for_nothing_tells_of_none, begin, end),
        cmocka_unit_test_setup_teardown(who_waits_for_a_connection_that_another_uses_tells_of_it, begin, end),
        cmocka_unit_test_setup_teardown(a_late_reply_is_never_taken_for_the_next_ones, begin, end),
        cmocka_unit_test_setup_teardown(a_connection_closed_while_idle_is_replaced_in_silence, begin, end),
        cmocka_unit_test_setup_teardown(a_killed_redis_is_found_again_within_two_seconds, begin, end),
        cmocka_unit_test_setup_teardown(trouble_under_load_speaks_once_as_it_begins_and_once_as_it_ends, begin, end),
        cmocka_unit_test_setup_teardown(closed_policy_refuses_and_local_policy_counts_while_redis_is_away, begin, end),
        cmocka_unit_test_setup_teardown(no_more_clients_is_told_and_passes, begin, end),
        cmocka_unit_test_setup_teardown(a_silent_peer_does_not_hold_up_start_or_requests, begin, end),
        cmocka_unit_test_setup_teardown(garbage_for_a_reply_is_a_store_that_does_not_answer, begin, end),
        cmocka_unit_test_setup_teardown(a_missing_script_is_understood_in_a_proxys_words_and_sent_whole, begin, end),
        cmocka_unit_test_setup_teardown(a_start_without_redis_succeeds_and_finds_it_later, begin, end),
        cmocka_unit_test_setup_teardown(a_wrong_or_missing_password_is_an_error_at_start, begin, end),
        cmocka_unit_test_setup_teardown(a_password_changed_while_running_is_a_store_failure, begin, end),
        cmocka_unit_test_setup_teardown(a_missing_permission_is_named_at_start, begin, end),
        cmocka_unit_test_setup_teardown(a_permission_taken_away_while_running_leaves_no_key_without_an_expiry, begin, end),
        cmocka_unit_test_setup_teardown(an_evicting_redis_is_warned_of_once, begin, end),
        cmocka_unit_test_setup_teardown(one_node_of_a_cluster_is_an_error_that_says_so, begin, end),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    lateness_end(lateness);
    return failed;
}
