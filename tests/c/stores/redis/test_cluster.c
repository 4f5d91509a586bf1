/* redis+cluster:// on a real cluster of three: each reply that only a cluster gives, brought about there, and identities
 * in different slots. Failover, and slots that move under load, are in test_cluster_moves.c. */
#define NODE_TIMEOUT_MS 1500
#include "three_nodes.h"

static tg_decision
hit_two(tg_limiter *limiter, const char *a, const char *b, uint64_t cost)
{
    const tg_part parts[] = { { .value = tg_text_of(a) }, { .value = tg_text_of(b) } };
    const tg_dimension dimensions[] = { { &parts[0], 1 }, { &parts[1], 1 } };
    tg_decision decision;
    tg_error error = { .message = "" };
    if (tg_limiter_hit(limiter, dimensions, 2, cost, &decision, &error) != TG_OK)
        fail_msg("hit: %s", error.message);
    return decision;
}

static uint64_t
remaining_of(tg_limiter *limiter, const char *who)
{
    const tg_decision decision = peek(limiter, who);
    assert_false(decision.degraded);
    return decision.remaining;
}

/* How many commands a node has run. */
static long long
errors_of(const server *one, const char *code)
{
    redisContext *link = server_connect(one);
    redisReply *reply = redisCommand(link, "INFO errorstats");
    char wanted[64];
    snprintf(wanted, sizeof wanted, "errorstat_%s:count=", code);
    const char *at = strstr(reply->str, wanted);
    const long long count = at ? atoll(at + strlen(wanted)) : 0;
    freeReplyObject(reply);
    redisFree(link);
    return count;
}

/* ---- slots ---- */

static void
a_slot_is_what_the_server_says_it_is(void **unused)
{
    (void)unused;
    redisContext *link = server_connect(&three.nodes[0]);
    unsigned random = 4711;
    for (int i = 0; i < 500; i++) {
        char text[64];
        size_t length = 1 + (size_t)i % 60;
        for (size_t j = 0; j < length; j++) {
            random = random * 1103515245 + 12345;
            text[j] = (char)('!' + (random >> 16) % 90); /* no braces */
        }
        redisReply *reply = redisCommand(link, "CLUSTER KEYSLOT x:{%b}:y", text, length);
        assert_int_equal(reply->integer, tg__cluster_slot((tg_text){ text, length }));
        freeReplyObject(reply);
    }
    redisFree(link);
}

/* R133 */
static void
a_thousand_identities_under_several_rules_never_cross_slots_and_are_limited(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "3/hour fixed_window; 100/day sliding_log; 50/hour token_bucket", "x");
    for (int i = 0; i < 1000; i++) {
        static const char *const forms[] = { "user%d", "{user}%d", "us{er%d", "}us{%d}er", "{}%d", "%d\xff {", "u}%d" };
        char who[64];
        snprintf(who, sizeof who, forms[i % 7], i);
        for (int hits = 0; hits < 4; hits++) {
            const tg_decision decision = hit(limiter, who);
            assert_false(decision.degraded);
            assert_int_equal(decision.allowed, hits < 3);
        }
    }
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(errors_of(&three.nodes[i], "CROSSSLOT"), 0);
        assert_true(server_ask(&three.nodes[i], NULL, "DBSIZE") > 500); /* each node has its part of 3000 keys */
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- identities in different slots ---- */

static void
a_denial_in_one_slot_charges_none_of_the_others(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "5/hour fixed_window", "5/hour sliding_log", "5/hour sliding_counter",
                                         "5/hour token_bucket", "5/hour leaky_bucket" };
    tg_store *store = open_store(three.patient, NULL);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        char name[16], low[64], high[64];
        snprintf(name, sizeof name, "all%zu", i);
        tg_limiter *limiter = open_limiter(store, rules[i], name);
        name_on(&three, 0, "low", low);   /* charged first */
        name_on(&three, 2, "high", high); /* and then this */
        for (int hits = 0; hits < 5; hits++)
            assert_true(hit(limiter, high).allowed);
        assert_true(hit(limiter, low).allowed);
        for (int knocks = 0; knocks < 20; knocks++) {
            const tg_decision decision = hit_two(limiter, low, high, 1);
            assert_false(decision.degraded);
            assert_false(decision.allowed);
            for (size_t j = 0; j < decision.result_count; j++) {
                const bool is_low = decision.results[j].remaining > 0;
                assert_int_equal(decision.results[j].allowed, is_low);
                assert_int_equal(decision.results[j].remaining, is_low ? 4 : 0); /* as if nothing had been taken */
                assert_false(decision.results[j].charged);
            }
        }
        assert_true(remaining_of(limiter, low) == 4);
        /* The other way round: the first slot denies, and the second is not even charged. */
        for (int hits = 0; hits < 4; hits++)
            assert_true(hit(limiter, low).allowed);
        name_on(&three, 2, "free", high);
        assert_false(hit_two(limiter, high, low, 1).allowed);
        assert_true(remaining_of(limiter, high) == 5);
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
}

static void
what_one_slot_took_is_given_back_when_another_then_fails(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "5/hour fixed_window", "5/hour sliding_log", "5/hour sliding_counter",
                                         "5/hour token_bucket", "5/hour leaky_bucket" };
    tg_store *store = open_store(three.patient, NULL);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        char name[16], low[64], high[64];
        snprintf(name, sizeof name, "fails%zu", i);
        tg_limiter *limiter = open_limiter(store, rules[i], name);
        name_on(&three, 0, "low", low);
        name_on(&three, 2, "high", high);
        assert_true(hit_two(limiter, low, high, 2).allowed);
        server_ask(&three.nodes[2], NULL, "CONFIG SET min-replicas-to-write 1"); /* may be looked at, not be charged */
        assert_true(hit_two(limiter, low, high, 2).degraded);
        server_ask(&three.nodes[2], NULL, "CONFIG SET min-replicas-to-write 0");
        assert_true(remaining_of(limiter, low) == 3 && remaining_of(limiter, high) == 3);
        tg_limiter_close(limiter);
    }
    assert_true(noticed("store-failing", "NOREPLICAS"));
    tg_store_close(store);
}

static void
identities_in_different_slots_are_all_charged_and_all_given_back(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "10/hour token_bucket; 100/day sliding_log", "x");
    char a[64], b[64];
    name_on(&three, 1, "a", a);
    name_on(&three, 2, "b", b);
    tg_decision decision = hit_two(limiter, a, b, 3);
    assert_true(decision.allowed);
    assert_true(remaining_of(limiter, a) == 7 && remaining_of(limiter, b) == 7);
    tg_error error;
    assert_int_equal(tg_decision_refund(store, &decision, &error), TG_OK);
    assert_true(remaining_of(limiter, a) == 10 && remaining_of(limiter, b) == 10);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

struct knocker {
    tg_limiter *limiter;
    const char *own, *shared;
    atomic_int *admitted;
};

static void *
knock(void *argument)
{
    const struct knocker *one = argument;
    for (int i = 0; i < 100; i++) {
        const tg_decision decision = hit_two(one->limiter, one->own, one->shared, 1);
        assert_false(decision.degraded);
        if (decision.allowed)
            atomic_fetch_add(one->admitted, 1);
    }
    return NULL;
}

/* The bounds that docs/redis.md states: never one too many, whichever slot is charged first; and all that was charged and
 * then refused has been given back. */
static void
clients_that_share_a_slot_are_never_admitted_once_too_often(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    for (size_t last = 0; last < 2; last++) {
        char shared[64], own[4][64];
        atomic_int admitted = 0;
        pthread_t threads[4];
        struct knocker knockers[4];
        tg_limiter *limiter = open_limiter(store, "50/hour sliding_log", last ? "last" : "first");
        name_on(&three, last ? 2 : 0, "shared", shared);
        for (int i = 0; i < 4; i++) {
            char stem[8];
            snprintf(stem, sizeof stem, "own%c", 'a' + i);
            name_on(&three, 1 - last, stem, own[i]);
            knockers[i] = (struct knocker){ limiter, own[i], shared, &admitted };
            assert_int_equal(pthread_create(&threads[i], NULL, knock, &knockers[i]), 0);
        }
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
        uint64_t used = 0;
        for (int i = 0; i < 4; i++)
            used += 50 - remaining_of(limiter, own[i]);
        assert_int_equal(atomic_load(&admitted), 50);
        assert_int_equal(used, 50);
        tg_limiter_close(limiter);
    }
    tg_store_close(store);
}

/* ---- slots on the move ---- */

static void
set_slot(unsigned slot, size_t from, size_t to, const char *state_from, const char *state_to)
{
    char command[160];
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u %s %s", slot, state_to, three.ids[strcmp(state_to, "NODE") ? from : to]);
    server_ask(&three.nodes[to], NULL, command);
    snprintf(command, sizeof command, "CLUSTER SETSLOT %u %s %s", slot, state_from, three.ids[to]);
    server_ask(&three.nodes[from], NULL, command);
}

static void
move_keys(unsigned slot, size_t from, size_t to, int most)
{
    redisContext *link = server_connect(&three.nodes[from]);
    redisReply *keys = redisCommand(link, "CLUSTER GETKEYSINSLOT %u %d", slot, most);
    for (size_t i = 0; i < keys->elements; i++) {
        redisReply *reply = redisCommand(link, "MIGRATE 127.0.0.1 %u %b 0 5000", three.nodes[to].port,
                                         keys->element[i]->str, keys->element[i]->len);
        if (!reply || reply->type == REDIS_REPLY_ERROR)
            fail_msg("MIGRATE: %s", reply ? reply->str : link->errstr);
        freeReplyObject(reply);
    }
    freeReplyObject(keys);
    redisFree(link);
}

static void
a_slot_that_moves_keeps_its_counts_through_ask_and_moved(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "10/hour sliding_log", "x");
    char who[64];
    const unsigned slot = slot_of(name_on(&three, 0, "mover", who));
    assert_true(hit(limiter, who).remaining == 9);
    set_slot(slot, 0, 2, "MIGRATING", "IMPORTING");
    assert_true(hit(limiter, who).remaining == 8); /* still here */
    move_keys(slot, 0, 2, 10);
    const long long asks = errors_of(&three.nodes[0], "ASK");
    assert_true(hit(limiter, who).remaining == 7);
    assert_true(hit(limiter, who).remaining == 6);
    assert_int_equal(errors_of(&three.nodes[0], "ASK"), asks + 2); /* the map does not change: it is asked there again */
    server_ask(&three.nodes[2], NULL, "SCRIPT FLUSH");
    assert_true(hit(limiter, who).remaining == 5); /* the text is sent behind ASKING too */
    set_slot(slot, 0, 2, "NODE", "NODE");
    const long long moves = errors_of(&three.nodes[0], "MOVED");
    assert_true(hit(limiter, who).remaining == 4);
    assert_true(hit(limiter, who).remaining == 3);
    assert_int_equal(errors_of(&three.nodes[0], "MOVED"), moves + 1); /* once, then it is known */
    set_slot(slot, 2, 0, "MIGRATING", "IMPORTING");
    move_keys(slot, 2, 0, 10);
    set_slot(slot, 2, 0, "NODE", "NODE");
    assert_true(hit(limiter, who).remaining == 2);
    assert_false(tg_notice_pending());
    tg_limiter_close(limiter);
    tg_store_close(store);
    cluster_wait(&three);
}

struct finisher {
    unsigned slot;
};

static void *
finish_moving(void *argument)
{
    const struct finisher *one = argument;
    sleep_us(30000);
    move_keys(one->slot, 0, 2, 10);
    return NULL;
}

static void
keys_half_moved_are_waited_for_within_the_deadline(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "10/hour fixed_window; 20/day fixed_window", "x");
    char who[64];
    struct finisher finisher = { slot_of(name_on(&three, 0, "half", who)) };
    hit(limiter, who);
    set_slot(finisher.slot, 0, 2, "MIGRATING", "IMPORTING");
    move_keys(finisher.slot, 0, 2, 1); /* one of two */
    const long long again = errors_of(&three.nodes[0], "TRYAGAIN") + errors_of(&three.nodes[2], "TRYAGAIN");
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, finish_moving, &finisher), 0);
    const tg_decision decision = hit(limiter, who);
    pthread_join(thread, NULL);
    assert_false(decision.degraded);
    assert_true(decision.remaining == 8);
    assert_true(errors_of(&three.nodes[0], "TRYAGAIN") + errors_of(&three.nodes[2], "TRYAGAIN") > again);

    /* Whoever moves them stops half way: by policy, at the deadline. */
    tg_store *hasty = open_store(three.uri, NULL);
    tg_limiter *other = open_limiter(hasty, "10/hour fixed_window; 20/day fixed_window", "y");
    recovery_us(other, "warm"); /* a busy machine may be late */
    set_slot(finisher.slot, 0, 2, "NODE", "NODE");
    recovery_us(other, who);
    set_slot(finisher.slot, 2, 0, "MIGRATING", "IMPORTING");
    redisContext *link = server_connect(&three.nodes[2]);
    redisReply *keys = redisCommand(link, "CLUSTER GETKEYSINSLOT %u 10", finisher.slot);
    for (size_t i = 0; i < keys->elements; i++)
        if (strstr(keys->element[i]->str, ":y:") && strstr(keys->element[i]->str, "3600000000")) {
            redisReply *reply = redisCommand(link, "MIGRATE 127.0.0.1 %u %s 0 5000", three.nodes[0].port,
                                             keys->element[i]->str);
            assert_int_equal(reply->type, REDIS_REPLY_STATUS);
            freeReplyObject(reply);
        }
    freeReplyObject(keys);
    redisFree(link);
    uint64_t took_us;
    const long long before = errors_of(&three.nodes[0], "TRYAGAIN") + errors_of(&three.nodes[2], "TRYAGAIN");
    assert_true(timed_hit(other, who, &took_us).degraded);
    assert_in_time(took_us, 60000);
    assert_true(errors_of(&three.nodes[0], "TRYAGAIN") + errors_of(&three.nodes[2], "TRYAGAIN") > before);
    assert_true(noticed("store-failing", "")); /* in which words depends on what the deadline fell into */
    move_keys(finisher.slot, 2, 0, 10);
    set_slot(finisher.slot, 2, 0, "NODE", "NODE");
    assert_false(hit(limiter, who).degraded);
    tg_limiter_close(other);
    tg_store_close(hasty);
    tg_limiter_close(limiter);
    tg_store_close(store);
    cluster_wait(&three);
}

/* ---- nodes that do not answer ---- */

static void
a_stopped_node_fails_its_own_slots_and_takes_nothing_of_the_others(void **unused)
{
    (void)unused;
    char uri[192];
    snprintf(uri, sizeof uri, "%s?timeout_ms=300", three.uri); /* time for those that answer, on a busy machine too */
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "100/hour token_bucket", "x");
    char low[64], high[64];
    name_on(&three, 0, "low", low);
    name_on(&three, 2, "high", high);
    while (hit_two(limiter, low, high, 1).degraded) /* a busy machine may be late */
        continue;
    const uint64_t left = remaining_of(limiter, low);
    server_signal(&three.nodes[2], SIGSTOP);
    uint64_t took_us;
    for (int i = 0; i < 3; i++) {
        time_begin();
        const uint64_t began_us = tg__monotonic_us();
        assert_true(hit_two(limiter, low, high, 1).degraded);
        took_us = tg__monotonic_us() - began_us;
        assert_in_time(took_us, 310000);
    }
    /* Known by now: no charge that would have to be given back, and hardly any time. */
    const long long commands = server_info(&three.nodes[0], "stats", "total_commands_processed");
    for (int i = 0; i < 10; i++)
        assert_true(hit_two(limiter, low, high, 1).degraded);
    assert_true(server_info(&three.nodes[0], "stats", "total_commands_processed") - commands <= 4);
    assert_false(timed_hit(limiter, low, &took_us).degraded);
    server_signal(&three.nodes[2], SIGCONT);
    assert_true(remaining_of(limiter, low) == left - 1); /* and the hit just made */
    assert_in_time(recovery_us(limiter, high), 2 * SECOND_US);
    tg_limiter_close(limiter);
    tg_store_close(store);
    cluster_wait(&three);
}

static void
a_killed_node_is_by_policy_until_it_is_back_and_a_cluster_that_is_down_says_so(void **unused)
{
    (void)unused;
    char uri[192];
    snprintf(uri, sizeof uri, "%s?timeout_ms=300", three.uri); /* time for those that answer, on a busy machine too */
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "100/hour", "x");
    char dead[64], live[64];
    name_on(&three, 1, "dead", dead);
    name_on(&three, 0, "live", live);
    recovery_us(limiter, dead);
    recovery_us(limiter, live);
    server_kill(&three.nodes[1]);
    uint64_t took_us;
    for (int i = 0; i < 20; i++) {
        assert_true(timed_hit(limiter, dead, &took_us).degraded);
        assert_in_time(took_us, 310000);
    }
    assert_false(hit(limiter, live).degraded); /* before the others have noticed */
    assert_true(noticed("store-failing", ""));
    /* Then they refuse everything: CLUSTERDOWN. */
    const uint64_t end_us = tg__monotonic_us() + 15 * SECOND_US;
    bool down = false;
    while (!down && tg__monotonic_us() < end_us) {
        down = timed_hit(limiter, live, &took_us).degraded;
        assert_in_time(took_us, 310000);
        sleep_us(50000);
    }
    assert_true(down);
    assert_true(errors_of(&three.nodes[0], "CLUSTERDOWN") > 0);
    cluster_start_node(&three, 1);
    cluster_wait(&three);
    assert_in_time(recovery_us(limiter, live), 2 * SECOND_US);
    assert_in_time(recovery_us(limiter, dead), 2 * SECOND_US);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
a_start_without_the_cluster_finds_it_later(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < 3; i++)
        server_signal(&three.nodes[i], SIGSTOP);
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    tg_store *store = open_store(three.uri, NULL);
    assert_in_time(tg__monotonic_us() - began_us, 300000);
    assert_true(noticed("store-failing", ""));
    tg_limiter *limiter = open_limiter(store, "100/hour", "x");
    uint64_t took_us;
    for (int i = 0; i < 5; i++) {
        assert_true(timed_hit(limiter, "a", &took_us).degraded);
        assert_in_time(took_us, 60000);
    }
    for (size_t i = 0; i < 3; i++)
        server_signal(&three.nodes[i], SIGCONT);
    cluster_wait(&three);
    assert_in_time(recovery_us(limiter, "a"), 2 * SECOND_US);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- opening ---- */

static tg_status
opening(const char *uri, tg_error *error)
{
    tg_store *store = NULL;
    char patient[256]; /* one that answers too late is taken for absent, and then opening succeeds */
    snprintf(patient, sizeof patient, "%s?timeout_ms=2000", uri);
    const tg_status status = tg_store_open(tg_text_of(patient), NULL, &store, error);
    if (status == TG_OK)
        tg_store_close(store);
    return status;
}

static void
what_a_person_has_to_change_is_an_error_at_start(void **unused)
{
    (void)unused;
    tg_error error;
    server alone;
    char uri[256];
    server_init(&alone, true);
    server_start(&alone, NULL);
    snprintf(uri, sizeof uri, "redis+cluster://127.0.0.1:%u", alone.port);
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "redis://"));
    server_fini(&alone);

    assert_int_equal(opening("redis+cluster://127.0.0.1:1/3", &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "no database but 0"));

    cluster_ask(&three, "ACL SETUSER poor on >hunter2 ~tg1:* +cluster +eval +evalsha +time +get +set +pexpire +lrange "
                        "+llen +lindex +rpush +lset +ltrim +del +role +info +asking");
    snprintf(uri, sizeof uri, "redis+cluster://poor:hunter2@127.0.0.1:%u", three.nodes[1].port);
    assert_int_equal(opening(uri, &error), TG_OK);
    cluster_ask(&three, "ACL SETUSER poor -rpush");
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "+rpush"));
    cluster_ask(&three, "ACL SETUSER poor +rpush -asking");
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "+asking"));
    cluster_ask(&three, "ACL SETUSER poor +asking -cluster");
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "+cluster|slots"));
    snprintf(uri, sizeof uri, "redis+cluster://poor:hunter3@127.0.0.1:%u", three.nodes[1].port);
    assert_int_equal(opening(uri, &error), TG_E_CONFIG);
    assert_null(strstr(error.message, "hunter"));
    cluster_ask(&three, "ACL DELUSER poor");
}

static void
one_node_asked_as_if_it_stood_alone_says_which_address_is_meant(void **unused)
{
    (void)unused;
    char uri[64];
    setenv("TIDEGATE_SECRET", "s", 1); /* else asking for it would say so already at the start */
    snprintf(uri, sizeof uri, "redis://127.0.0.1:%u?timeout_ms=2000", three.nodes[0].port);
    tg_error error;
    tg_store *store = NULL;
    const tg_status status = tg_store_open(tg_text_of(uri), NULL, &store, &error);
    unsetenv("TIDEGATE_SECRET");
    assert_int_equal(status, TG_E_CONFIG);
    assert_non_null(strstr(error.message, "redis+cluster://"));
}

/* ---- the secret, forks ---- */

static void
one_secret_is_shared_by_all_nodes_and_all_clients(void **unused)
{
    (void)unused;
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "10/hour", "x");
    char a[64];
    for (size_t i = 0; i < 3; i++)
        hit(limiter, name_on(&three, i, "a", a));
    tg_limiter_close(limiter);
    tg_store_close(store);
    store = open_store(three.patient, NULL); /* another client */
    limiter = open_limiter(store, "10/hour", "x");
    for (size_t i = 0; i < 3; i++)
        assert_true(hit(limiter, name_on(&three, i, "a", a)).remaining == 8);
    /* Everything is lost: with the next connections it is written back, and no count moves to other keys. */
    cluster_ask(&three, "FLUSHALL");
    cluster_ask(&three, "CLIENT KILL TYPE normal SKIPME yes");
    sleep_us(5000); /* used a moment ago, a connection is not looked at again */
    for (size_t i = 0; i < 3; i++)
        assert_true(hit(limiter, name_on(&three, i, "a", a)).remaining == 9);
    long long keys = 0;
    for (size_t i = 0; i < 3; i++)
        keys += server_ask(&three.nodes[i], NULL, "DBSIZE");
    assert_int_equal(keys, 4); /* three counts and the secret */
    assert_false(noticed("store-other-secret", ""));
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
forked_children_share_the_count_over_connections_of_their_own(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "1000/hour", "x");
    char names[3][64];
    for (size_t i = 0; i < 3; i++)
        hit(limiter, name_on(&three, i, "f", names[i]));
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            int degraded = 0;
            for (int j = 0; j < 60; j++)
                degraded += hit(limiter, names[j % 3]).degraded;
            _exit(degraded);
        }
    }
    for (int j = 0; j < 60; j++)
        assert_false(hit(limiter, names[j % 3]).degraded);
    for (int i = 0; i < 4; i++) {
        int status;
        waitpid(children[i], &status, 0);
        assert_int_equal(status, 0);
    }
    for (size_t i = 0; i < 3; i++)
        assert_true(remaining_of(limiter, names[i]) == 1000 - 1 - 5 * 20);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_slot_is_what_the_server_says_it_is, begin),
        cmocka_unit_test_setup(a_thousand_identities_under_several_rules_never_cross_slots_and_are_limited, begin),
        cmocka_unit_test_setup(a_denial_in_one_slot_charges_none_of_the_others, begin),
        cmocka_unit_test_setup(what_one_slot_took_is_given_back_when_another_then_fails, begin),
        cmocka_unit_test_setup(identities_in_different_slots_are_all_charged_and_all_given_back, begin),
        cmocka_unit_test_setup(clients_that_share_a_slot_are_never_admitted_once_too_often, begin),
        cmocka_unit_test_setup(a_slot_that_moves_keeps_its_counts_through_ask_and_moved, begin),
        cmocka_unit_test_setup(keys_half_moved_are_waited_for_within_the_deadline, begin),
        cmocka_unit_test_setup(a_stopped_node_fails_its_own_slots_and_takes_nothing_of_the_others, begin),
        cmocka_unit_test_setup(a_killed_node_is_by_policy_until_it_is_back_and_a_cluster_that_is_down_says_so, begin),
        cmocka_unit_test_setup(a_start_without_the_cluster_finds_it_later, begin),
        cmocka_unit_test_setup(what_a_person_has_to_change_is_an_error_at_start, begin),
        cmocka_unit_test_setup(one_node_asked_as_if_it_stood_alone_says_which_address_is_meant, begin),
        cmocka_unit_test_setup(one_secret_is_shared_by_all_nodes_and_all_clients, begin),
        cmocka_unit_test_setup(forked_children_share_the_count_over_connections_of_their_own, begin),
    };
    return cmocka_run_group_tests_name("redis cluster", tests, begin_all, end_all);
}
