/* What is kept on a real Redis for operators: counts of all processes, overrides and pauses. That no request waits for it,
 * nothing is counted twice, nothing stands for ever.
 *
 * test-builds: plain asan tsan */
#include "one_server.h"

#include "core/core.h"
#include "stores/redis/keep.h"

static const char *const uri = patient_uri;

/* Read by somebody who counts nothing. */
static tg_policy_metrics
counted(const char *policy)
{
    static tg_policy_metrics all[256];
    tg_policy_metrics found = { .space = "" };
    tg_store *store = open_store(uri, NULL);
    tg_error error = { .message = "" };
    size_t count;
    if (tg_store_read_metrics(store, all, 256, &count, NULL, &error) != TG_OK)
        fail_msg("%s", error.message);
    for (size_t i = 0; i < count; i++)
        if (strcmp(all[i].policy, policy) == 0)
            found = all[i];
    tg_store_close(store);
    return found;
}

static void
assert_keys_expire(void)
{
    redisContext *link = server_connect(&redis);
    redisReply *keys = redisCommand(link, "KEYS tg1*{tidegate}*");
    for (size_t i = 0; i < keys->elements; i++) {
        redisReply *left = redisCommand(link, "PTTL %s", keys->element[i]->str);
        assert_true(left->integer > 0);
        freeReplyObject(left);
    }
    freeReplyObject(keys);
    redisFree(link);
}

/* ---- counts ---- */

static void
counts_of_all_processes_come_together_and_none_twice(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "10/hour", "shared");
    for (int i = 0; i < 5; i++)
        hit(limiter, "a"); /* not carried yet when the children begin */
    pid_t children[3];
    for (int i = 0; i < 3; i++) {
        children[i] = fork();
        assert_true(children[i] != -1);
        if (children[i] == 0) {
            for (int k = 0; k < 7; k++)
                hit(limiter, "a");
            tg_limiter_close(limiter);
            tg_store_close(store);
            _exit(0);
        }
    }
    for (int i = 0; i < 3; i++) {
        int status;
        waitpid(children[i], &status, 0);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    hit(limiter, "a");
    tg_limiter_close(limiter);
    tg_store_close(store);
    const tg_policy_metrics all = counted("shared");
    assert_string_equal(all.space, "default");
    assert_int_equal(all.counts[TG_METRIC_ALLOWED], 10);
    assert_int_equal(all.counts[TG_METRIC_DENIED], 5 + 21 + 1 - 10);
    assert_keys_expire();
}

static void
counts_show_within_a_second_while_a_process_runs_on(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "100000/hour token_bucket", "running");
    for (int i = 0; i < 70; i++)
        hit(limiter, "a");
    const uint64_t began_us = tg__monotonic_us();
    time_begin();
    while (counted("running").counts[TG_METRIC_ALLOWED] != 70) {
        if (tg__monotonic_us() - began_us > 5 * SECOND_US)
            fail_msg("not carried in 5 s");
        sleep_us(20000);
    }
    assert_in_time(tg__monotonic_us() - began_us, SECOND_US);
    tg_latency_metrics latency;
    tg_policy_metrics one;
    size_t count;
    uint64_t measured = 0;
    assert_int_equal(tg_store_read_metrics(store, &one, 1, &count, &latency, NULL), TG_OK);
    assert_int_equal(count, 1);
    for (size_t i = 0; i < TG_LATENCIES; i++)
        measured += latency.counts[i];
    assert_int_equal(measured, 1); /* one decision in 64 */
    assert_true(latency.sum_ns > 0 && latency.bounds_ns[TG_LATENCIES - 1] == UINT64_MAX);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
names_of_any_bytes_come_back_as_they_were(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    static const char *const names[] = { "a b", "x:y", "=", "%41", "caf\xc3\xa9", "new\nline", "latency",
                                         "0123456789012345678901234567890123456789012345678901234567890123" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        tg_limiter *limiter = open_limiter(store, "5/hour", names[i]);
        hit(limiter, "a");
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        assert_int_equal(counted(names[i]).counts[TG_METRIC_ALLOWED], 1);
}

static void
more_policies_than_there_is_room_for_count_together(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    for (unsigned i = 0; i < 140; i++) {
        char name[16];
        snprintf(name, sizeof name, "policy%u", i);
        tg_limiter *limiter = open_limiter(store, "5/hour token_bucket", name);
        hit(limiter, "a");
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
    assert_int_equal(counted("policy126").counts[TG_METRIC_ALLOWED], 1);
    assert_int_equal(counted("(others)").counts[TG_METRIC_ALLOWED], 13);
}

static void
what_a_full_redis_refuses_is_carried_later(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1/hour token_bucket", "full");
    hit(limiter, "a");
    server_ask(&redis, NULL, "CONFIG SET maxmemory 1");
    for (int i = 0; i < 4; i++)
        assert_false(hit(limiter, "a").allowed);
    sleep_us(700000);
    server_ask(&redis, NULL, "CONFIG SET maxmemory 0");
    tg_limiter_close(limiter);
    tg_store_close(store);
    assert_int_equal(counted("full").counts[TG_METRIC_DENIED], 4);
}

static void
a_foreign_value_in_their_place_is_told_once_and_hits_go_on(void **unused)
{
    (void)unused;
    server_ask(&redis, NULL, "RPUSH tg1:{tidegate}:overrides x");
    server_ask(&redis, NULL, "PEXPIRE tg1:{tidegate}:overrides 60000");
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "foreign");
    assert_false(hit(limiter, "a").degraded);
    const uint64_t began_us = tg__monotonic_us();
    while (!noticed("store-unkept", "WRONGTYPE"))
        if (tg__monotonic_us() - began_us > 5 * SECOND_US)
            fail_msg("not told");
    sleep_us(1200000);
    assert_false(noticed("store-unkept", ""));
    assert_false(hit(limiter, "a").degraded);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- overrides ---- */

static void
override_so(tg_limiter *limiter, const char *who, const char *rules, uint64_t duration_us)
{
    tg_error error = { .message = "" };
    const tg_part part = { .value = tg_text_of(who) };
    if (tg_limiter_override(limiter, &(tg_dimension){ &part, 1 }, who ? 1 : 0, tg_text_of(rules), duration_us, &error) != TG_OK)
        fail_msg("%s", error.message);
}

static void
an_override_is_followed_at_once_here_and_within_a_second_elsewhere(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "o");
    int ready[2], told[2];
    assert_int_equal(pipe(ready), 0);
    assert_int_equal(pipe(told), 0);
    const pid_t child = fork();
    assert_true(child != -1);
    if (child == 0) {
        char byte = 0;
        hit(limiter, "b");
        if (write(ready[1], "", 1) != 1 || read(told[0], &byte, 1) != 1)
            _exit(9);
        time_begin();
        const uint64_t began_us = tg__monotonic_us();
        while (hit(limiter, "a").limit != 2)
            if (tg__monotonic_us() - began_us > 3 * SECOND_US)
                _exit(8);
        const uint64_t took_us = tg__monotonic_us() - began_us;
        _exit(took_us > 1200000 + unserved_us() - unserved_before_us ? 7 : 0); /* a second, and a busy machine */
    }
    char byte;
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(hit(limiter, "a").limit, 5);
    override_so(limiter, "a", "2/hour", 60 * SECOND_US);
    assert_int_equal(hit(limiter, "a").limit, 2);
    assert_int_equal(hit(limiter, "b").limit, 5);
    assert_int_equal(write(told[1], "", 1), 1);
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_keys_expire();
    override_so(limiter, "a", "", 0);
    assert_int_equal(hit(limiter, "a").limit, 5);
    assert_int_equal(server_ask(&redis, NULL, "EXISTS tg1:{tidegate}:overrides"), 0);
    for (int i = 0; i < 2; i++) {
        close(ready[i]);
        close(told[i]);
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
an_override_is_over_by_itself_and_its_key_too(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "o");
    override_so(limiter, NULL, "deny", 300000);
    assert_false(hit(limiter, "a").allowed);
    sleep_us(350000);
    assert_true(hit(limiter, "a").allowed);
    assert_int_equal(server_ask(&redis, NULL, "EXISTS tg1:{tidegate}:overrides"), 0);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
a_pause_lets_everybody_through_and_is_listed(void **unused)
{
    (void)unused;
    char apart[200];
    snprintf(apart, sizeof apart, "%s&connections=2", uri); /* a store of its own */
    tg_store *store = open_store(uri, NULL), *elsewhere = open_store(apart, NULL);
    tg_limiter *limiter = open_limiter(store, "1/hour", "p");
    hit(limiter, "a");
    assert_false(hit(limiter, "a").allowed);
    assert_int_equal(tg_limiter_pause(limiter, 60 * SECOND_US, NULL), TG_OK);
    assert_true(hit(limiter, "a").allowed);
    tg_override listed[4];
    size_t count;
    assert_int_equal(tg_store_list_overrides(elsewhere, listed, 4, &count, NULL), TG_OK);
    assert_int_equal(count, 1);
    assert_int_equal(listed[0].kind, TG_OVERRIDE_PAUSE);
    assert_string_equal(listed[0].policy, "p");
    assert_string_equal(listed[0].shown, "everybody");
    assert_in_range(listed[0].until_us - tg_store_now_us(elsewhere), 55 * SECOND_US, 60 * SECOND_US);
    assert_int_equal(tg_limiter_pause(limiter, 0, NULL), TG_OK);
    assert_false(hit(limiter, "a").allowed);
    tg_limiter_close(limiter);
    tg_store_close(store);
    tg_store_close(elsewhere);
}

static void
no_hit_asks_redis_about_overrides(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "100000/hour token_bucket", "o");
    override_so(limiter, "a", "2/hour", 60 * SECOND_US);
    hit(limiter, "a");
    const long long before = server_info(&redis, "stats", "total_commands_processed");
    const uint64_t began_us = tg__monotonic_us();
    for (int i = 0; i < 1000; i++)
        hit(limiter, i % 2 ? "a" : "b");
    const long long ticks = (long long)((tg__monotonic_us() - began_us) / 400000) + 1;
    /* EVALSHA and what the script calls (TIME, GET, SET or a log's two or three); a tick is four at most */
    assert_in_range(server_info(&redis, "stats", "total_commands_processed") - before, 1000, 5000 + 4 * ticks + 2);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
at_most_64_stand_and_their_places_come_free(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "many");
    tg_error error;
    for (int i = 0; i < 64; i++) {
        char who[8];
        snprintf(who, sizeof who, "%d", i);
        override_so(limiter, who, "2/hour", (i ? 60 : 1) * SECOND_US);
    }
    const tg_part part = { .value = tg_text_of("one more") };
    assert_int_equal(tg_limiter_override(limiter, &(tg_dimension){ &part, 1 }, 1, tg_text_of("2/hour"), 60 * SECOND_US, &error),
                     TG_E_SYSTEM);
    assert_non_null(strstr(error.message, "64"));
    override_so(limiter, "5", "3/hour", 60 * SECOND_US); /* in its own place */
    assert_int_equal(hit(limiter, "5").limit, 3);
    sleep_us(1010000);
    override_so(limiter, "one more", "2/hour", 60 * SECOND_US);
    assert_int_equal(hit(limiter, "one more").limit, 2);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
what_an_override_is_for_cannot_be_tried_out_without_the_secret(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "o");
    override_so(limiter, "a", "2/hour", 60 * SECOND_US);
    tg_identity identity;
    uint8_t digest[16];
    char hex[33];
    assert_int_equal(tg__identity_join(&(tg_part){ .value = tg_text_of("a") }, 1, &identity, NULL), TG_OK);
    tg__digest(&(tg_text){ (const char *)identity.bytes, identity.length }, 1, digest, 16);
    for (size_t i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    redisContext *link = server_connect(&redis);
    redisReply *text = redisCommand(link, "GET tg1:{tidegate}:overrides");
    assert_int_equal(text->type, REDIS_REPLY_STRING);
    assert_null(strstr(text->str, hex));
    freeReplyObject(text);
    redisFree(link);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
no_bytes_in_their_places_do_harm(void **unused)
{
    (void)unused;
    static const char *const texts[] = { "x", "\n\n\n", "1 1\n", "9007199254740991 1 =a =b 00 =c =d\n", "latency\n", "=a 5\n",
                                         "=a:=b 99999999999999999999999999 -1 x\n", "=%00:=b 1\n", "=%4:=b 1\n" };
    tg_orders *orders = tg__orders_open();
    tg_redis_keyring keyring;
    tg__redis_keyring_init(&keyring, tg_text_of("s"), false, 0);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        tg_policy_metrics policies[2];
        size_t count = 9;
        char *exact = strdup(texts[i]); /* a sanitizer sees one byte too many */
        assert_non_null(exact);
        char *text = malloc(strlen(exact));
        assert_non_null(text);
        memcpy(text, exact, strlen(exact));
        tg__counts_read((tg_text){ text, strlen(exact) }, policies, 2, &count, NULL);
        assert_in_range(count, 0, 1);
        assert_true(tg__orders_see(orders, (tg_text){ text, strlen(exact) }, &keyring));
        assert_int_equal(atomic_load(tg__orders_standing(orders)), 0);
        free(text);
        free(exact);
    }
    tg__orders_close(orders);
}

/* ---- how many keys there are ---- */

static void
populate(int count, int from)
{
    redisContext *link = server_connect(&redis);
    redisReply *reply = redisCommand(link, "EVAL %s 0 %d %d",
                                     "for i=ARGV[2]+1,ARGV[2]+ARGV[1] do redis.call('SET','tg1:00000000:{'..i..'}:d:d:d:1','x','PX',"
                                     "600000) end return 1", count, from);
    assert_non_null(reply);
    assert_int_equal(reply->type, REDIS_REPLY_INTEGER);
    freeReplyObject(reply);
    redisFree(link);
}

static void
keys_and_their_memory_are_counted_exactly_where_few_and_estimated_where_many(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour token_bucket; 7/day token_bucket", "census");
    tg_error error = { .message = "" };
    tg_store_stats stats;
    for (int i = 0; i < 40; i++) {
        char who[16];
        snprintf(who, sizeof who, "%d", i);
        hit(limiter, who);
    }
    server_ask(&redis, NULL, "SET other x PX 60000"); /* not ours */
    tg__keeper_look(store->keeper); /* while it runs, its last look is told, which on a slow machine came before the last hit */
    if (tg_store_read_stats(store, &stats, &error) != TG_OK)
        fail_msg("%s", error.message);
    assert_int_equal(stats.keys, 80);
    assert_in_range(stats.keys_bytes, 80 * 40, 80 * 400); /* 48 each on Valkey 8 */
    tg_limiter_close(limiter);
    tg_store_close(store);
    populate(30000, 0);
    store = open_store(uri, NULL);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(tg_store_read_stats(store, &stats, NULL), TG_OK);
        assert_in_range(stats.keys, 27000, 33000);
        assert_in_range(stats.keys_sampled, 700, 2000);
    }
    tg_store_close(store);
}

static void
a_user_who_may_not_look_at_keys_is_shown_no_number(void **unused)
{
    (void)unused;
    char restricted[200];
    server_ask(&redis, NULL, "ACL SETUSER narrow on >hunter2 ~tg1:* +@all -scan");
    snprintf(restricted, sizeof restricted, "redis+unix://narrow:hunter2@%s?timeout_ms=2000", redis.path);
    tg_store *store = open_store(restricted, NULL);
    tg_store_stats stats;
    assert_int_equal(tg_store_read_stats(store, &stats, NULL), TG_OK);
    assert_int_equal(stats.keys_sampled, 0);
    assert_int_equal(stats.keys, 0);
    tg_store_close(store);
    server_ask(&redis, NULL, "ACL DELUSER narrow");
}

static void
growth_is_told_once_and_only_where_it_is_many_and_steady(void **unused)
{
    (void)unused;
    tg_growth few = { .count = 0 }, steady = { .count = 0 }, wavy = { .count = 0 }, level = { .count = 0 };
    unsigned told = 0;
    for (uint64_t i = 1; i <= 60; i++) {
        assert_false(tg__growth_look(&few, i * 1000));
        assert_false(tg__growth_look(&level, 500000 + i));
        assert_false(tg__growth_look(&wavy, i % 5 == 0 ? 1000 : i * 200000));
        told += tg__growth_look(&steady, i * 30000);
    }
    assert_int_equal(told, 1);
    for (uint64_t i = 1; i <= 20; i++)
        told += tg__growth_look(&steady, i * 30000);
    assert_int_equal(told, 2); /* it had fallen */
}

static void
keys_that_grow_without_end_are_told_of(void **unused)
{
    (void)unused;
    tg_store *store = open_store(uri, NULL);
    tg_keeper *keeper = store->keeper;
    for (int look = 0; look < TG__GROWTH_LOOKS; look++) {
        populate(14000, look * 14000);
        tg__keeper_look(keeper);
    }
    assert_true(noticed("keys-growing", "keys"));
    tg_store_close(store);
}

/* ---- nobody waits ---- */

static void
a_stopped_redis_holds_up_no_hit_for_longer_and_closing_only_shortly(void **unused)
{
    (void)unused;
    pthread_t watcher;
    lateness_begin(&watcher);
    tg_store *store = open_store(redis.uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "stopped");
    hit(limiter, "a");
    sleep_us(700000);
    server_signal(&redis, SIGSTOP);
    const uint64_t end_us = tg__monotonic_us() + 1500000;
    while (tg__monotonic_us() < end_us) {
        uint64_t took_us;
        assert_true(timed_hit(limiter, "a", &took_us).degraded);
        assert_in_time(took_us, 60000);
        sleep_us(1000);
    }
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    tg_limiter_close(limiter);
    tg_store_close(store);
    assert_in_time(tg__monotonic_us() - began_us, 600000);
    server_signal(&redis, SIGCONT);
    lateness_end(watcher);
}

static void
under_a_manual_clock_they_are_kept_apart_and_by_that_clock(void **unused)
{
    (void)unused;
    tg_clock *clock;
    assert_int_equal(tg_clock_open(1700000000000000, &clock, NULL), TG_OK);
    tg_store *store = open_store(uri, clock);
    tg_limiter *limiter = open_limiter(store, "5/hour", "manual");
    override_so(limiter, "a", "2/hour", 60 * SECOND_US);
    assert_int_equal(hit(limiter, "a").limit, 2);
    tg_clock_advance_us(clock, 61 * SECOND_US);
    assert_int_equal(hit(limiter, "a").limit, 5);
    tg_policy_metrics one;
    size_t count;
    assert_int_equal(tg_store_read_metrics(store, &one, 1, &count, NULL, NULL), TG_OK);
    assert_int_equal(one.counts[TG_METRIC_ALLOWED], 2);
    assert_int_equal(server_ask(&redis, NULL, "EXISTS tg1:{tidegate}:counts tg1:{tidegate}:overrides"), 0);
    assert_keys_expire();
    tg_limiter_close(limiter);
    tg_store_close(store);
    tg_clock_close(clock);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(counts_of_all_processes_come_together_and_none_twice, begin),
        cmocka_unit_test_setup(counts_show_within_a_second_while_a_process_runs_on, begin),
        cmocka_unit_test_setup(names_of_any_bytes_come_back_as_they_were, begin),
        cmocka_unit_test_setup(more_policies_than_there_is_room_for_count_together, begin),
        cmocka_unit_test_setup(what_a_full_redis_refuses_is_carried_later, begin),
        cmocka_unit_test_setup(a_foreign_value_in_their_place_is_told_once_and_hits_go_on, begin),
        cmocka_unit_test_setup(an_override_is_followed_at_once_here_and_within_a_second_elsewhere, begin),
        cmocka_unit_test_setup(an_override_is_over_by_itself_and_its_key_too, begin),
        cmocka_unit_test_setup(a_pause_lets_everybody_through_and_is_listed, begin),
        cmocka_unit_test_setup(no_hit_asks_redis_about_overrides, begin),
        cmocka_unit_test_setup(at_most_64_stand_and_their_places_come_free, begin),
        cmocka_unit_test_setup(what_an_override_is_for_cannot_be_tried_out_without_the_secret, begin),
        cmocka_unit_test_setup(no_bytes_in_their_places_do_harm, begin),
        cmocka_unit_test_setup(keys_and_their_memory_are_counted_exactly_where_few_and_estimated_where_many, begin),
        cmocka_unit_test_setup(a_user_who_may_not_look_at_keys_is_shown_no_number, begin),
        cmocka_unit_test_setup(growth_is_told_once_and_only_where_it_is_many_and_steady, begin),
        cmocka_unit_test_setup(keys_that_grow_without_end_are_told_of, begin),
        cmocka_unit_test_setup(a_stopped_redis_holds_up_no_hit_for_longer_and_closing_only_shortly, begin),
        cmocka_unit_test_setup(under_a_manual_clock_they_are_kept_apart_and_by_that_clock, begin),
    };
    return cmocka_run_group_tests(tests, begin_all, end_all);
}
