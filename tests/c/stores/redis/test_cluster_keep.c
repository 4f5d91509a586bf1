/* How many keys a cluster has: the sum over its primaries, each asked no more than a server alone would be.
 *
 * test-builds: plain asan */
#define NODE_TIMEOUT_MS 5000
#include "three_nodes.h"
#include "stores/redis/keep.h"

static tg_store_stats
stats_of(tg_store *store)
{
    tg_store_stats stats;
    tg_error error = { .message = "" };
    if (tg_store_read_stats(store, &stats, &error) != TG_OK)
        fail_msg("stats: %s", error.message);
    return stats;
}

/* Keys of ours on one node, made there at once: names of other slots are passed over. */
static void
populate(size_t node, int count, int from)
{
    static const char script[] = "local made, i = 0, ARGV[2] * 10 "
                                 "while made < ARGV[1] + 0 do i = i + 1 "
                                 "local set = redis.pcall('SET', 'tg1:00000000:{' .. i .. '}:d:d:d:1', 'x', 'PX', 600000) "
                                 "if set.ok then made = made + 1 end end return made";
    redisContext *link = server_connect(&three.nodes[node]);
    redisReply *reply = redisCommand(link, "EVAL %s 0 %d %d", script, count, from);
    assert_non_null(reply);
    if (reply->type != REDIS_REPLY_INTEGER)
        fail_msg("%s", reply->str);
    freeReplyObject(reply);
    redisFree(link);
}

static void
keys_of_all_primaries_are_counted_exactly_where_few_and_estimated_where_many(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour token_bucket; 7/day token_bucket", "census");
    for (int i = 0; i < 60; i++) {
        char who[16];
        snprintf(who, sizeof who, "%d", i);
        hit(limiter, who);
    }
    tg__keeper_look(store->keeper); /* while it runs, its last look is told, which on a slow machine came before the last hit */
    tg_store_stats stats = stats_of(store);
    assert_int_equal(stats.keys, 120);
    assert_in_range(stats.keys_bytes, 120 * 40, 120 * 400);
    for (size_t i = 0; i < 3; i++)
        assert_in_range(server_counted(&three.nodes[i]), 10, 100); /* none has them all */
    tg_limiter_close(limiter);
    tg_store_close(store);
    populate(0, 20000, 0);
    populate(1, 5000, 0);
    store = open_store(three.patient, NULL);
    for (int i = 0; i < 3; i++) {
        stats = stats_of(store);
        assert_in_range(stats.keys, 22000, 28500);
        assert_in_range(stats.keys_sampled, 2 * 700, 4000); /* at most 800 or so of each */
    }
    tg_store_close(store);
}

static void
a_primary_that_does_not_answer_is_told_as_it_was_seen_last_and_holds_nobody_up(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL), *late = NULL;
    populate(1, 300, 0);
    populate(2, 100, 0);
    assert_int_equal(stats_of(store).keys, 400);
    server_signal(&three.nodes[1], SIGSTOP);
    populate(2, 50, 1000000);
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    tg__keeper_look(store->keeper);
    assert_in_time(tg__monotonic_us() - began_us, 300000);
    tg_census census;
    assert_int_equal(tg__keeper_census(store->keeper, &census, NULL), TG_OK);
    assert_int_equal(census.keys, 450);
    /* One that has never seen it knows no number, rather than a wrong one. */
    char uri[200];
    snprintf(uri, sizeof uri, "%s?timeout_ms=300", three.uri);
    late = open_store(uri, NULL);
    tg_store_stats stats;
    if (tg_store_read_stats(late, &stats, NULL) == TG_OK)
        assert_int_equal(stats.keys_sampled, 0);
    server_signal(&three.nodes[1], SIGCONT);
    cluster_wait(&three);
    const uint64_t end_us = tg__monotonic_us() + 5000000;
    do {
        assert_true(tg__monotonic_us() < end_us);
        sleep_us(20000);
        tg__keeper_look(late->keeper);
        assert_int_equal(tg__keeper_census(late->keeper, &census, NULL), TG_OK);
    } while (census.keys != 450);
    tg_store_close(late);
    tg_store_close(store);
}

static void
a_user_who_may_not_look_at_one_primarys_keys_is_shown_no_number(void **unused)
{
    (void)unused;
    char restricted[256];
    cluster_ask(&three, "ACL SETUSER narrow on >hunter2 ~tg1:* +@all");
    server_ask(&three.nodes[2], NULL, "ACL SETUSER narrow -scan");
    snprintf(restricted, sizeof restricted, "redis+cluster://narrow:hunter2@127.0.0.1:%u?timeout_ms=2000", three.nodes[0].port);
    tg_store *store = open_store(restricted, NULL);
    populate(0, 10, 0);
    const tg_store_stats stats = stats_of(store);
    assert_int_equal(stats.keys_sampled, 0);
    assert_int_equal(stats.keys, 0);
    tg_store_close(store);
    cluster_ask(&three, "ACL DELUSER narrow");
}

static void
keys_that_grow_without_end_on_all_primaries_together_are_told_of(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    for (int look = 0; look < TG__GROWTH_LOOKS; look++) {
        for (size_t node = 0; node < 3; node++)
            populate(node, 4500, look * 4500); /* no single one of them gets to where it is told */
        tg__keeper_look(store->keeper);
    }
    assert_true(noticed("keys-growing", "redis cluster"));
    tg_store_close(store);
}

static void
a_slot_on_its_way_is_counted_where_its_keys_are(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour token_bucket; 7/day fixed_window", "moves");
    char who[64], command[160];
    const unsigned slot = slot_of(name_on(&three, 0, "moves", who));
    hit(limiter, who);
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u IMPORTING %s", slot, three.ids[0]);
    server_ask(&three.nodes[2], NULL, command);
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u MIGRATING %s", slot, three.ids[2]);
    server_ask(&three.nodes[0], NULL, command);
    redisContext *link = server_connect(&three.nodes[0]);
    redisReply *keys = redisCommand(link, "CLUSTER GETKEYSINSLOT %u 10", slot);
    assert_int_equal(keys->elements, 2);
    for (size_t i = 0; i < keys->elements; i++) {
        redisReply *reply = redisCommand(link, "MIGRATE 127.0.0.1 %u %b 0 5000", three.nodes[2].port,
                                         keys->element[i]->str, keys->element[i]->len);
        assert_int_equal(reply->type, REDIS_REPLY_STATUS);
        freeReplyObject(reply);
        tg__keeper_look(store->keeper);
        assert_int_equal(stats_of(store).keys, 2);
    }
    freeReplyObject(keys);
    redisFree(link);
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u STABLE", slot);
    server_ask(&three.nodes[2], NULL, "FLUSHALL");
    server_ask(&three.nodes[2], NULL, command);
    server_ask(&three.nodes[0], NULL, command);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(keys_of_all_primaries_are_counted_exactly_where_few_and_estimated_where_many, begin),
        cmocka_unit_test_setup(a_primary_that_does_not_answer_is_told_as_it_was_seen_last_and_holds_nobody_up, begin),
        cmocka_unit_test_setup(a_user_who_may_not_look_at_one_primarys_keys_is_shown_no_number, begin),
        cmocka_unit_test_setup(a_slot_on_its_way_is_counted_where_its_keys_are, begin),
        cmocka_unit_test_setup(keys_that_grow_without_end_on_all_primaries_together_are_told_of, begin),
    };
    return cmocka_run_group_tests_name("stores/redis/cluster_keep", tests, begin_all, end_all);
}
