/* The gate: a rules file in force, and its change while requests are judged. */
#include "tidegate.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#define NOW_US UINT64_C(1700000000000000)

static char folder[64];
static char rules_path[96];

static void
write_rules(const char *yaml)
{
    /* As an editor should: whole under another name, then in place at once. */
    char temporary[128];
    snprintf(temporary, sizeof temporary, "%s.new", rules_path);
    FILE *file = fopen(temporary, "w");
    assert_non_null(file);
    assert_true(fputs(yaml, file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(temporary, rules_path), 0);
}

static int
make_folder(void **unused)
{
    (void)unused;
    strcpy(folder, "/tmp/tidegate-gate-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(rules_path, sizeof rules_path, "%s/rules.yaml", folder);
    unsetenv("TIDEGATE_CONFIG");
    unsetenv("TIDEGATE_STORE");
    return 0;
}

static int
remove_folder(void **unused)
{
    (void)unused;
    unlink(rules_path);
    rmdir(folder);
    return 0;
}

/* A memory store of its own for each test, under a clock that stands. */
static tg_gate *
opened(const char *yaml, const char *store, tg_clock *clock)
{
    tg_gate *gate;
    tg_error error;
    write_rules(yaml);
    const tg_gate_options options = { .path = tg_text_of(rules_path), .store = tg_text_of(store), .clock = clock };
    if (tg_gate_open(&options, &gate, &error) != TG_OK)
        fail_msg("%s", error.message);
    return gate;
}

static tg_judgement
judged(tg_gate *gate, const char *method, const char *path, const char *peer)
{
    const tg_request request = { .method = tg_text_of(method), .path = tg_text_of(path), .peer = tg_text_of(peer) };
    tg_judgement judgement;
    tg_error error;
    if (tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, &error) != TG_OK)
        fail_msg("%s", error.message);
    return judgement;
}

static tg_clock *
clock_at_now(void)
{
    tg_clock *clock;
    assert_int_equal(tg_clock_open(NOW_US, &clock, NULL), TG_OK);
    return clock;
}

static void
the_policies_of_a_request_judge_it(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("policies:\n"
                           "  - name: login\n    match: {path: /login, methods: POST}\n    rules: 2/minute\n"
                           "  - name: admin\n    match: {path: /admin/*}\n    rules: deny\n"
                           "  - name: me\n    match: {path: /me}\n    rules: 5/minute\n    by: user\n",
                           "memory://gate-judges", clock);
    tg_judgement judgement = judged(gate, "POST", "/login", "192.0.2.1");
    assert_int_equal(judgement.outcome, TG_ALLOWED);
    assert_string_equal(judgement.policy, "login");
    assert_int_equal(judgement.decision.remaining, 1);
    assert_int_equal(judged(gate, "POST", "//login/?x", "192.0.2.1").outcome, TG_ALLOWED);
    judgement = judged(gate, "POST", "/%6Cogin", "::ffff:192.0.2.1");
    assert_int_equal(judgement.outcome, TG_DENIED);
    assert_int_equal(judgement.status, 429);
    assert_int_equal(judgement.decision.retry_after_us, 60000000);
    assert_int_equal(judged(gate, "POST", "/login", "192.0.2.2").outcome, TG_ALLOWED);
    assert_int_equal(judged(gate, "GET", "/login", "192.0.2.1").outcome, TG_UNMATCHED);
    judgement = judged(gate, "GET", "/admin/x", "192.0.2.1");
    assert_int_equal(judgement.outcome, TG_FORBIDDEN);
    assert_int_equal(judgement.status, 403);
    judgement = judged(gate, "GET", "/me", "192.0.2.1");
    assert_int_equal(judgement.outcome, TG_UNIDENTIFIED);
    assert_int_equal(judgement.status, 401);
    assert_string_equal(judgement.missing, "user");
    assert_string_equal(judgement.policy, "me");
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
policies_marked_also_are_all_or_nothing_with_the_first_match(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("policies:\n"
                           "  - {name: site, rules: 3/minute, also: true}\n"
                           "  - {name: login, match: {path: /login}, rules: 1/minute}\n",
                           "memory://gate-also", clock);
    assert_int_equal(judged(gate, "GET", "/login", "192.0.2.1").outcome, TG_ALLOWED);
    tg_judgement judgement = judged(gate, "GET", "/login", "192.0.2.1");
    assert_int_equal(judgement.outcome, TG_DENIED);
    assert_string_equal(judgement.policy, "login");
    judgement = judged(gate, "GET", "/", "192.0.2.1"); /* the refused one was not charged: one and this make two */
    assert_int_equal(judgement.decision.remaining, 1);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
a_preflight_is_free_and_a_prior_charge_is_not_repeated(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("policies:\n  - {name: all, rules: 2/minute}\n", "memory://gate-prior", clock);
    const tg_header headers[] = { { tg_text_of("origin"), tg_text_of("https://a.example") },
                                  { tg_text_of("access-control-request-method"), tg_text_of("POST") } };
    const tg_request preflight = { .method = tg_text_of("OPTIONS"), .path = tg_text_of("/"),
                                   .peer = tg_text_of("192.0.2.1"), .headers = headers, .header_count = 2 };
    tg_judgement judgement;
    for (int i = 0; i < 10; i++) {
        assert_int_equal(tg_gate_judge(gate, &preflight, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(judgement.outcome, TG_UNMATCHED);
    }
    const tg_request get = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    assert_int_equal(tg_gate_judge(gate, &get, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    const tg_decision earlier = judgement.decision;
    const tg_decision *const prior[] = { &earlier };
    for (int i = 0; i < 5; i++) {
        assert_int_equal(tg_gate_judge(gate, &get, 1, prior, 1, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(judgement.outcome, TG_ALLOWED);
    }
    assert_int_equal(tg_gate_judge(gate, &get, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
    assert_int_equal(judgement.decision.remaining, 0);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
trusted_proxies_of_the_file_name_the_client(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("trusted_proxies: [10.0.0.1]\nclient_header: X-Real-IP\n"
                           "policies:\n  - {name: all, rules: 1/minute}\n",
                           "memory://gate-proxies", clock);
    for (int i = 0; i < 3; i++) {
        char client[32];
        snprintf(client, sizeof client, "198.51.100.%d", i);
        const tg_header header = { tg_text_of("X-Real-IP"), tg_text_of(client) };
        tg_request request = { .path = tg_text_of("/"), .peer = tg_text_of("10.0.0.1"), .headers = &header,
                               .header_count = 1 };
        tg_judgement judgement;
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(judgement.outcome, TG_ALLOWED); /* each client has its own */
        request.peer = tg_text_of("203.0.113.1");
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(judgement.outcome, i == 0 ? TG_ALLOWED : TG_DENIED); /* forging helps nobody */
    }
    char address[TG_ADDRESS_TEXT_MAX];
    const tg_request direct = { .peer = tg_text_of("10.0.0.1") };
    assert_int_equal(tg_client_resolve(tg_gate_client(gate), &direct, address, NULL), TG_OK);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
what_was_used_stays_used_over_a_reload(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("policies:\n  - {name: all, rules: 10/hour}\n", "memory://gate-used", clock);
    assert_int_equal(tg_gate_generation(gate), 1);
    for (int i = 0; i < 8; i++)
        judged(gate, "GET", "/", "192.0.2.1");
    write_rules("policies:\n  - {name: all, rules: 20/hour}\n");
    assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
    assert_int_equal(tg_gate_generation(gate), 2);
    const tg_judgement judgement = judged(gate, "GET", "/", "192.0.2.1");
    assert_int_equal(judgement.decision.limit, 20);
    assert_int_equal(judgement.decision.remaining, 11);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
a_bad_file_is_refused_and_the_old_rules_stay(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("policies:\n  - {name: all, rules: 1/minute}\n", "memory://gate-bad", clock);
    judged(gate, "GET", "/", "192.0.2.1");
    static const char *const bad[] = { "policies:\n  - {name: all, rules: 1/minuet}\n", "", "policies: [\n",
                                       "trusted_proxies: [x]\npolicies: []\n" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tg_error error;
        write_rules(bad[i]);
        assert_int_equal(tg_gate_reload(gate, &error), TG_E_CONFIG);
        assert_true(error.line > 0);
        assert_non_null(strstr(error.message, rules_path));
        assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").outcome, TG_DENIED);
        assert_int_equal(tg_gate_generation(gate), 1);
    }
    unlink(rules_path);
    tg_error error;
    assert_int_equal(tg_gate_reload(gate, &error), TG_E_CONFIG);
    assert_int_equal(error.system_error, ENOENT);
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").outcome, TG_DENIED);
    write_rules("policies: []\n");
    assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").outcome, TG_UNMATCHED);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
the_store_is_chosen_by_argument_then_environment_then_file(void **unused)
{
    (void)unused;
    static const char rules[] = "store: memory://gate-file\npolicies:\n  - {name: all, rules: 1/minute}\n";
    tg_clock *clock = clock_at_now();
    tg_store *file, *environment, *argument;
    const tg_store_options options = { .clock = clock };
    assert_int_equal(tg_store_open(tg_text_of("memory://gate-file"), &options, &file, NULL), TG_OK);
    assert_int_equal(tg_store_open(tg_text_of("memory://gate-environment"), &options, &environment, NULL), TG_OK);
    assert_int_equal(tg_store_open(tg_text_of("memory://gate-argument"), &options, &argument, NULL), TG_OK);
    tg_gate *gate = opened(rules, NULL, clock);
    assert_ptr_equal(tg_gate_store(gate), file);
    tg_gate_close(gate);
    setenv("TIDEGATE_STORE", "memory://gate-environment", 1);
    gate = opened(rules, NULL, clock);
    assert_ptr_equal(tg_gate_store(gate), environment);
    tg_gate_close(gate);
    gate = opened(rules, "memory://gate-argument", clock);
    assert_ptr_equal(tg_gate_store(gate), argument);
    tg_gate_close(gate);
    unsetenv("TIDEGATE_STORE");
    tg_store_close(file);
    tg_store_close(environment);
    tg_store_close(argument);
    tg_clock_close(clock);
}

static void
the_file_is_chosen_by_argument_or_environment(void **unused)
{
    (void)unused;
    tg_gate *gate;
    tg_error error;
    const tg_gate_options options = { .store = tg_text_of("memory://gate-path") };
    assert_int_equal(tg_gate_open(&options, &gate, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "TIDEGATE_CONFIG"));
    write_rules("policies: []\n");
    setenv("TIDEGATE_CONFIG", rules_path, 1);
    assert_int_equal(tg_gate_open(&options, &gate, &error), TG_OK);
    tg_gate_close(gate);
    unsetenv("TIDEGATE_CONFIG");
}

static void
a_store_that_cannot_be_opened_is_named_with_its_line(void **unused)
{
    (void)unused;
    tg_gate *gate;
    tg_error error;
    write_rules("namespace: a\nstore: nonsense://x\npolicies: []\n");
    const tg_gate_options options = { .path = tg_text_of(rules_path) };
    const tg_status status = tg_gate_open(&options, &gate, &error);
    assert_true(status < 0);
    assert_int_equal(error.line, 2);
    assert_non_null(strstr(error.message, "rules.yaml:2:1: "));
    assert_non_null(strstr(error.message, "nonsense"));
}

static void
the_store_cannot_change_while_running(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_error error;
    tg_gate *gate = opened("store: memory://gate-one\npolicies:\n  - {name: all, rules: 1/minute}\n", NULL, clock);
    write_rules("policies: []\nstore: memory://gate-two\n");
    assert_int_equal(tg_gate_reload(gate, &error), TG_E_CONFIG);
    assert_int_equal(error.line, 2);
    assert_non_null(strstr(error.message, "the store cannot change while running: it is \"memory://gate-one\", found "
                                          "\"memory://gate-two\""));
    write_rules("policies: []\n"); /* nor vanish: that would mean shared://default */
    assert_int_equal(tg_gate_reload(gate, &error), TG_E_CONFIG);
    tg_gate_close(gate);
    /* What the argument or the environment chose is not the file's to change. */
    gate = opened("store: memory://gate-one\npolicies: []\n", "memory://gate-argument", clock);
    write_rules("store: memory://gate-two\npolicies: []\n");
    assert_int_equal(tg_gate_reload(gate, &error), TG_OK);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
a_limiter_of_a_policy_shares_its_counts(void **unused)
{
    (void)unused;
    tg_clock *clock = clock_at_now();
    tg_limiter *limiter;
    tg_error error;
    tg_gate *gate = opened("namespace: shop\npolicies:\n"
                           "  - {name: login, match: {path: /login}, rules: 3/minute, by: [ip, path]}\n"
                           "  - {name: api, match: {path: /api/*}, rules: 3/minute}\n",
                           "memory://gate-shares", clock);
    assert_int_equal(tg_gate_limiter(gate, tg_text_of("login"), &limiter, &error), TG_OK);
    assert_string_equal(tg_limiter_name(limiter), "login");
    judged(gate, "GET", "/login", "2001:db8::1");
    const tg_part ip = { tg_text_of("ip"), tg_text_of("2001:db8::2") }, path = { tg_text_of("path"), tg_text_of("/login/") };
    const tg_dimension dimensions[] = { { &ip, 1 }, { &path, 1 } };
    tg_decision decision;
    assert_int_equal(tg_limiter_hit(limiter, dimensions, 2, 1, &decision, &error), TG_OK);
    assert_int_equal(decision.remaining, 1);
    assert_int_equal(judged(gate, "GET", "/login", "2001:db8::1").decision.remaining, 0);
    /* It keeps its rules over a reload, also when the policy is gone, and its proxies when they are. */
    write_rules("trusted_proxies: [10.0.0.1]\npolicies: []\n");
    assert_int_equal(tg_gate_reload(gate, &error), TG_OK);
    assert_int_equal(tg_limiter_peek(limiter, dimensions, 2, 1, &decision, &error), TG_OK);
    assert_false(decision.allowed);
    assert_int_equal(tg_gate_limiter(gate, tg_text_of("login"), &limiter, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "which has: none"));
    tg_limiter_close(limiter);
    write_rules("policies:\n  - {name: one, rules: 1/s}\n  - {name: two, rules: 1/s}\n");
    assert_int_equal(tg_gate_reload(gate, &error), TG_OK);
    assert_int_equal(tg_gate_limiter(gate, tg_text_of("thre"), &limiter, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "no policy \"thre\" in the rules file, which has: one, two"));
    tg_gate_close(gate);
    tg_clock_close(clock);
}

/* ---- reload under load ---- */

enum { JUDGES = 4, RELOADS = 60 };

static atomic_bool stop;
static atomic_ulong judgements;

static void *
judge_on(void *argument)
{
    tg_gate *gate = argument;
    while (!atomic_load(&stop)) {
        const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/a"),
                                     .peer = tg_text_of("192.0.2.1") };
        tg_judgement judgement;
        tg_error error;
        if (tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, &error) != TG_OK)
            return (void *)1;
        /* Both policies of one reading, never one of each: their limits are the same number. */
        const tg_decision *decision = &judgement.decision;
        if (decision->result_count != 2 || decision->results[0].rule.limit != decision->results[1].rule.limit)
            return (void *)2;
        atomic_fetch_add(&judgements, 1);
    }
    return NULL;
}

static void
no_request_sees_half_of_a_change(void **unused)
{
    (void)unused;
    pthread_t judges[JUDGES];
    tg_clock *clock = clock_at_now();
    static const char form[] = "trusted_proxies: [10.0.0.%d]\npolicies:\n"
                               "  - {name: all, rules: %d/hour sliding_counter, also: true}\n"
                               "  - {name: a, rules: %d/hour sliding_counter, match: {path: /a}}\n";
    char yaml[400];
    snprintf(yaml, sizeof yaml, form, 1, 1000000, 1000000);
    tg_gate *gate = opened(yaml, "memory://gate-reload", clock);
    atomic_store(&stop, false);
    for (int i = 0; i < JUDGES; i++)
        assert_int_equal(pthread_create(&judges[i], NULL, judge_on, gate), 0);
    for (int i = 0; i < RELOADS; i++) {
        const unsigned long before = atomic_load(&judgements);
        snprintf(yaml, sizeof yaml, form, i % 7, 1000001 + i, 1000001 + i);
        if (i % 5 == 4)
            strcpy(yaml, "policies: [oops"); /* refused, nothing changes */
        write_rules(yaml);
        assert_int_equal(tg_gate_reload(gate, NULL), i % 5 == 4 ? TG_E_CONFIG : TG_OK);
        while (atomic_load(&judgements) < before + 20)
            usleep(100);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < JUDGES; i++) {
        void *result;
        pthread_join(judges[i], &result);
        assert_null(result);
    }
    assert_int_equal(tg_gate_generation(gate), 1 + RELOADS - RELOADS / 5);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void *
reload_on(void *argument)
{
    for (int i = 0; i < 20; i++)
        if (tg_gate_reload(argument, NULL) != TG_OK)
            return (void *)1;
    return NULL;
}

static void
reloads_at_once_take_their_turn(void **unused)
{
    (void)unused;
    pthread_t threads[3];
    tg_gate *gate = opened("policies:\n  - {name: all, rules: 1/hour}\n", "memory://gate-turns", NULL);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, reload_on, gate), 0);
    for (int i = 0; i < 3; i++) {
        void *result;
        pthread_join(threads[i], &result);
        assert_null(result);
    }
    assert_int_equal(tg_gate_generation(gate), 61);
    tg_gate_close(gate);
}

/* As if it had been written a while ago. */
static void
write_rules_long_ago(const char *yaml)
{
    static long ago = 1000;
    write_rules(yaml);
    const struct timespec times[2] = { { .tv_nsec = UTIME_NOW }, { .tv_sec = 1700000000 + ago++ } };
    assert_int_equal(utimensat(AT_FDCWD, rules_path, times, 0), 0);
}

static unsigned
notices(const char *code, char last[480])
{
    tg_notice notice;
    unsigned count = 0;
    while (tg_notice_take(&notice))
        if (strcmp(notice.code, code) == 0) {
            memcpy(last, notice.message, sizeof notice.message);
            count++;
        }
    return count;
}

static void
a_changed_file_is_in_force_from_the_next_look_on_and_a_bad_one_is_told_once(void **unused)
{
    (void)unused;
    const struct timespec a_look = { .tv_sec = 1, .tv_nsec = 50000000 };
    char last[480] = "";
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("policies: [{name: a, rules: 5/minute}]\n", "memory://gate-watch", clock);
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").decision.remaining, 4);
    notices("rules-read", last);
    write_rules_long_ago("policies: [{name: a, rules: 9/minute}]\n");
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").decision.limit, 5); /* not looked at for each request */
    nanosleep(&a_look, NULL);
    tg_judgement judgement = judged(gate, "GET", "/", "192.0.2.1");
    assert_int_equal(judgement.decision.limit, 9);
    assert_int_equal(judgement.decision.remaining, 6); /* what was used stays used */
    assert_int_equal(tg_gate_generation(gate), 2);
    assert_int_equal(notices("rules-read", last), 1);
    write_rules_long_ago("policies: [{name: a, rules: 9/minuet}]\n");
    for (int i = 0; i < 2; i++) {
        nanosleep(&a_look, NULL);
        assert_int_equal(judged(gate, "GET", "/", "192.0.2.2").decision.limit, 9);
        assert_int_equal(notices("rules-refused", last), i == 0);
    }
    assert_non_null(strstr(last, ":1:31: found `minuet`"));
    unlink(rules_path); /* on its way */
    nanosleep(&a_look, NULL);
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.2").decision.limit, 9);
    /* One that was just written is left until it has rested. */
    write_rules("policies: [{name: a, rules: 7/minute}]\n");
    nanosleep(&a_look, NULL);
    judged(gate, "GET", "/", "192.0.2.2");
    nanosleep(&a_look, NULL);
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.2").decision.limit, 7);
    assert_int_equal(tg_gate_generation(gate), 3);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
a_bad_include_is_watched_and_its_repair_is_read(void **unused)
{
    (void)unused;
    const struct timespec a_look = { .tv_sec = 1, .tv_nsec = 50000000 };
    char last[480] = "", base[128], yaml[300];
    tg_clock *clock = clock_at_now();
    tg_gate *gate = opened("policies: [{name: a, rules: 5/minute}]\n", "memory://gate-include", clock);
    snprintf(base, sizeof base, "%s/base.yaml", folder);
    snprintf(yaml, sizeof yaml, "include: %s\npolicies: [{name: a, rules: 7/minute}]\n", base);
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").decision.limit, 5);
    notices("rules-read", last);
    write_rules_long_ago(yaml); /* what it includes is not there yet */
    nanosleep(&a_look, NULL);
    assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").decision.limit, 5);
    assert_int_equal(notices("rules-refused", last), 1);
    assert_non_null(strstr(last, "base.yaml"));
    for (int good = 0; good < 2; good++) {
        FILE *file = fopen(base, "w");
        const struct timespec times[2] = { { .tv_sec = 1600000000 + good }, { .tv_sec = 1600000000 + good } };
        assert_non_null(file);
        assert_true(fputs(good ? "policies: []\n" : "policies: [}\n", file) >= 0);
        assert_int_equal(fclose(file), 0);
        assert_int_equal(utimensat(AT_FDCWD, base, times, 0), 0);
        nanosleep(&a_look, NULL);
        assert_int_equal(judged(gate, "GET", "/", "192.0.2.1").decision.limit, good ? 7 : 5);
        assert_int_equal(notices(good ? "rules-read" : "rules-refused", last), 1);
    }
    unlink(base);
    tg_gate_close(gate);
    tg_clock_close(clock);
}

static void
a_start_that_its_rules_refuse_leaves_no_table_behind(void **unused)
{
    (void)unused;
    static const struct {
        const char *yaml;
        unsigned faces, line, column;
        const char *message;
    } cases[] = {
        { "policies:\n  - name: a\n    rules: [5/minute, \"9/s;  900/day sliding_log\"]\n", 0, 3, 30, "is too large for table" },
        { "policies:\n  - name: a\n    rules: 5/minute\n    plans: {pro: 900/day sliding_log}\n", 0, 4, 18, "too large" },
        { "policies:\n  - name: a\n    rules: 5/minute\n    by: [ip, \"form:a\"]\n", TG_FACE_KNOWN, 4, 14, "\"form:a\"" },
        { "policies:\n  - name: a\n    rules: 5/minuet\n", 0, 3, 14, "`minuet`" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char store[128], table[80];
        tg_gate *gate;
        tg_error error;
        snprintf(table, sizeof table, "%s/table", folder);
        snprintf(store, sizeof store, "shared://%s?size=64KiB", table);
        write_rules(cases[i].yaml);
        const tg_gate_options options = { .path = tg_text_of(rules_path), .store = tg_text_of(store), .faces = cases[i].faces };
        assert_int_equal(tg_gate_open(&options, &gate, &error), TG_E_CONFIG);
        if (error.line != cases[i].line || error.column != cases[i].column || !strstr(error.message, cases[i].message))
            fail_msg("case %zu: %s", i + 1, error.message);
        assert_int_equal(access(table, F_OK), -1);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_policies_of_a_request_judge_it),
        cmocka_unit_test(policies_marked_also_are_all_or_nothing_with_the_first_match),
        cmocka_unit_test(a_preflight_is_free_and_a_prior_charge_is_not_repeated),
        cmocka_unit_test(trusted_proxies_of_the_file_name_the_client),
        cmocka_unit_test(what_was_used_stays_used_over_a_reload),
        cmocka_unit_test(a_bad_file_is_refused_and_the_old_rules_stay),
        cmocka_unit_test(the_store_is_chosen_by_argument_then_environment_then_file),
        cmocka_unit_test(the_file_is_chosen_by_argument_or_environment),
        cmocka_unit_test(a_store_that_cannot_be_opened_is_named_with_its_line),
        cmocka_unit_test(the_store_cannot_change_while_running),
        cmocka_unit_test(a_limiter_of_a_policy_shares_its_counts),
        cmocka_unit_test(no_request_sees_half_of_a_change),
        cmocka_unit_test(reloads_at_once_take_their_turn),
        cmocka_unit_test(a_changed_file_is_in_force_from_the_next_look_on_and_a_bad_one_is_told_once),
        cmocka_unit_test(a_bad_include_is_watched_and_its_repair_is_read),
        cmocka_unit_test(a_start_that_its_rules_refuse_leaves_no_table_behind),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
