/* What `tidegate check --live` says of a cluster: every primary is looked at, and what one of them has is told with its name.
 *
 * test-builds: plain asan */
#define NODE_TIMEOUT_MS 5000
#include "three_nodes.h"

/* Opens the cluster as the check does, and looks at it. */
static void
examine(const char *uri, tg_status expected)
{
    const tg_store_options options = { .existing = true };
    tg_error error = { .message = "" };
    tg_store *store = NULL;
    if (tg_store_open(tg_text_of(uri), &options, &store, &error) != TG_OK)
        fail_msg("%s: %s", uri, error.message);
    const tg_status status = store->ops->examine(store, &error);
    if (status != expected)
        fail_msg("examine: %s: %s", tg_status_name(status), error.message);
    tg_store_close(store);
}

static void
count_under(const char *secret)
{
    setenv("TIDEGATE_SECRET", secret, 1);
    tg_store *store = open_store(three.patient, NULL);
    tg_limiter *limiter = open_limiter(store, "5/hour", "examined");
    for (int i = 0; i < 40; i++) {
        char who[16];
        snprintf(who, sizeof who, "%d", i);
        hit(limiter, who);
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
    unsetenv("TIDEGATE_SECRET");
}

static void
of_a_cluster_that_is_well_nothing_is_said(void **unused)
{
    (void)unused;
    tg_notice notice;
    examine(three.patient, TG_OK);
    if (tg_notice_take(&notice))
        fail_msg("%s: %s", notice.code, notice.message);
}

static void
keys_of_another_secret_are_found_on_every_node_and_told_of_once_with_their_sum(void **unused)
{
    (void)unused;
    count_under("one");
    setenv("TIDEGATE_SECRET", "one", 1);
    examine(three.patient, TG_OK);
    assert_false(noticed("store-two-secrets", ""));
    setenv("TIDEGATE_SECRET", "another", 1);
    examine(three.patient, TG_OK);
    unsetenv("TIDEGATE_SECRET");
    for (size_t i = 0; i < 3; i++)
        assert_in_range(server_counted(&three.nodes[i]), 1, 39); /* none has them all */
    tg_notice notice;
    assert_true(tg_notice_take(&notice));
    assert_string_equal(notice.code, "store-two-secrets");
    assert_non_null(strstr(notice.message, "redis cluster"));
    assert_non_null(strstr(notice.message, " 40 keys made under another secret"));
    assert_false(tg_notice_take(&notice));
}

static void
a_node_that_evicts_and_one_that_may_not_be_looked_at_are_named_each(void **unused)
{
    (void)unused;
    char evicts[64], unchecked[64];
    server_ask(&three.nodes[1], NULL, "CONFIG SET maxmemory-policy allkeys-lru");
    server_ask(&three.nodes[2], NULL, "ACL SETUSER default -scan");
    examine(three.patient, TG_OK);
    server_ask(&three.nodes[1], NULL, "CONFIG SET maxmemory-policy noeviction");
    server_ask(&three.nodes[2], NULL, "ACL SETUSER default +@all");
    snprintf(evicts, sizeof evicts, "redis at 127.0.0.1:%u: maxmemory-policy", three.nodes[1].port);
    snprintf(unchecked, sizeof unchecked, "redis at 127.0.0.1:%u: SCAN is refused", three.nodes[2].port);
    tg_notice notice;
    bool evicting = false, refusing = false;
    while (tg_notice_take(&notice)) {
        evicting = evicting || (strcmp(notice.code, "store-evicts") == 0 && strncmp(notice.message, evicts, strlen(evicts)) == 0);
        refusing = refusing || (strcmp(notice.code, "store-unchecked") == 0 && strncmp(notice.message, unchecked, strlen(unchecked)) == 0);
        assert_true(strstr(notice.message, evicts) || strstr(notice.message, unchecked));
    }
    assert_true(evicting);
    assert_true(refusing);
}

/* The others are looked at all the same, and it takes a second and what opening takes. */
static void
a_node_that_does_not_answer_is_named_with_what_it_has_and_keeps_nobody_from_the_others(void **unused)
{
    (void)unused;
    char silent[96], uri[192];
    snprintf(uri, sizeof uri, "%s?timeout_ms=300", three.uri);
    count_under("one");
    setenv("TIDEGATE_SECRET", "another", 1);
    server_signal(&three.nodes[0], SIGSTOP);
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    examine(uri, TG_OK);
    assert_in_time(tg__monotonic_us() - began_us, 1600000);
    server_signal(&three.nodes[0], SIGCONT);
    unsetenv("TIDEGATE_SECRET");
    snprintf(silent, sizeof silent, "5461 of the 16384 slots was left out: redis at 127.0.0.1:%u: no answer in time",
             three.nodes[0].port);
    tg_notice notice;
    bool left_out = false, found = false;
    while (tg_notice_take(&notice)) {
        left_out = left_out || (strcmp(notice.code, "store-unchecked") == 0 && strstr(notice.message, silent));
        found = found || strcmp(notice.code, "store-two-secrets") == 0;
    }
    assert_true(left_out);
    assert_true(found);
    cluster_wait(&three);
}

static void
slots_that_no_node_serves_are_counted(void **unused)
{
    (void)unused;
    cluster_ask(&three, "CONFIG SET cluster-require-full-coverage no");
    for (size_t i = 0; i < 3; i++)
        server_ask(&three.nodes[i], NULL, "CLUSTER DELSLOTSRANGE 100 109");
    examine(three.patient, TG_OK);
    server_ask(&three.nodes[0], NULL, "CLUSTER ADDSLOTSRANGE 100 109");
    cluster_ask(&three, "CONFIG SET cluster-require-full-coverage yes");
    cluster_wait(&three);
    assert_true(noticed("store-slots-unserved", "10 of the 16384 slots"));
}

static void
of_a_cluster_that_is_away_opening_has_said_all(void **unused)
{
    (void)unused;
    char uri[64];
    snprintf(uri, sizeof uri, "redis+cluster://127.0.0.1:%u", free_port());
    examine(uri, TG_OK);
    tg_notice notice;
    assert_true(tg_notice_take(&notice));
    assert_string_equal(notice.code, "store-failing");
    assert_false(tg_notice_take(&notice));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(of_a_cluster_that_is_well_nothing_is_said, begin),
        cmocka_unit_test_setup(keys_of_another_secret_are_found_on_every_node_and_told_of_once_with_their_sum, begin),
        cmocka_unit_test_setup(a_node_that_evicts_and_one_that_may_not_be_looked_at_are_named_each, begin),
        cmocka_unit_test_setup(a_node_that_does_not_answer_is_named_with_what_it_has_and_keeps_nobody_from_the_others, begin),
        cmocka_unit_test_setup(slots_that_no_node_serves_are_counted, begin),
        cmocka_unit_test_setup(of_a_cluster_that_is_away_opening_has_said_all, begin),
    };
    return cmocka_run_group_tests_name("stores/redis/cluster_examine", tests, begin_all, end_all);
}
