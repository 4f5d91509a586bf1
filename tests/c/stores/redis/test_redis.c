/* The Redis store while all goes well: keys, secret, expiry, the log's memory, threads, forks, many processes at
 * once, and target by target the answers of the table. What happens when it does not: test_failures.c.
 *
 * test-builds: plain asan tsan */
#include "one_server.h"

#include "core/core.h"

#include <pthread.h>

#ifdef __SANITIZE_THREAD__
#define FEWER 10 /* the thread sanitizer is slow, and finds a race in the first thousand rounds */
#else
#define FEWER 1
#endif

/* ---- addresses ---- */

static tg_status
opening(const char *uri, tg_error *error)
{
    tg_store *store = NULL;
    *error = (tg_error){ .message = "" };
    const tg_status status = tg_store_open(tg_text_of(uri), NULL, &store, error);
    if (status == TG_OK)
        tg_store_close(store);
    return status;
}

static void
a_wrong_uri_is_an_error_that_repeats_no_password(void **unused)
{
    (void)unused;
    static const struct {
        const char *uri;
        tg_status status;
        const char *says;
    } wrong[] = {
        { "redis://user:hunter2@host:0", TG_E_CONFIG, "port" },
        { "redis://user:hunter2@host:70000/1", TG_E_CONFIG, "port" },
        { "redis://user:hunter2@host/one", TG_E_CONFIG, "database" },
        { "redis://hunter2@host", TG_E_CONFIG, ":password" },
        { "redis://user:@host", TG_E_CONFIG, "empty password" },
        { "redis://user:hunter2%zz@host", TG_E_CONFIG, "%25" },
        { "redis://user:hunter2%4@host", TG_E_CONFIG, "%25" },
        { "redis://:hunter2@[::1/0", TG_E_CONFIG, "IPv6" },
        { "redis://:hunter2@host?conections=3", TG_E_CONFIG, "connections" },
        { "redis://:hunter2@host?connections=0", TG_E_CONFIG, "1 to" },
        { "redis://:hunter2@host?timeout_ms=1h", TG_E_CONFIG, "1 to" },
        { "redis://:hunter2@host?db", TG_E_CONFIG, "name=value" },
        { "redis:/:hunter2@host", TG_E_CONFIG, "redis://" },
        { "redis+unix://:hunter2@relative", TG_E_CONFIG, "absolute" },
        { "rediss://:hunter2@host/one", TG_E_CONFIG, "database" },
        { "rediss://:hunter2@host?verify=1", TG_E_CONFIG, "yes or no" },
        { "rediss://:hunter2@host?ca=/none/such", TG_E_CONFIG, "/none/such" },
        { "rediss+cluster://:hunter2@host?key=x", TG_E_CONFIG, "cert= is missing" },
        { "redis+sentinel://:hunter2@host", TG_E_CONFIG, "names the master" },
        { "redis+sentinel://:hunter2@host:x,other/name", TG_E_CONFIG, "port" },
        { "redis+sentinel://:hunter2@a,b,c,d,e,f,g,h,i/name", TG_E_CONFIG, "at most 8" },
        { "redis+cluster://:hunter2@host/2", TG_E_CONFIG, "no database but 0" },
        { "redis+cluster://:hunter2@host:x,other", TG_E_CONFIG, "port" },
        { "redis+cluster://:hunter2@a,b,c,d,e,f,g,h,i", TG_E_CONFIG, "at most 8" },
        { "tiered+redis://:hunter2@host/one", TG_E_CONFIG, "database" },
        { "tiered+memory://:hunter2@host", TG_E_CONFIG, "tiered+redis://" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        tg_error error;
        assert_int_equal(opening(wrong[i].uri, &error), wrong[i].status);
        if (!strstr(error.message, wrong[i].says) || strstr(error.message, "hunter2"))
            fail_msg("%s: %s", wrong[i].uri, error.message);
    }
}

static void
passwords_users_and_databases_are_taken_from_the_uri(void **unused)
{
    (void)unused;
    const tg_store_uri uri = { .scheme = tg_text_of("redis"), .rest = tg_text_of("me:p%40ss%2Fw%3Ard@w@[::1]:7000/5") };
    tg_redis_address address;
    assert_int_equal(tg__redis_address_parse(&uri, &address, NULL), TG_OK);
    assert_string_equal(address.user, "me");
    assert_string_equal(address.password, "p@ss/w:rd@w");
    assert_string_equal(address.host, "::1");
    assert_int_equal(address.port, 7000);
    assert_int_equal(address.db, 5);
    assert_string_equal(address.shown, "redis at ::1:7000");
    tg__redis_address_fini(&address);
    const tg_store_uri plain = { .scheme = tg_text_of("redis"), .rest = tg_text_of("") };
    assert_int_equal(tg__redis_address_parse(&plain, &address, NULL), TG_OK);
    assert_null(address.user);
    assert_string_equal(address.shown, "redis at 127.0.0.1:6379");
    const tg_store_uri sentinel = { .scheme = tg_text_of("redis+sentinel"),
                                    .rest = tg_text_of(":p@one,[::1]:5,three:7/main/2") };
    assert_int_equal(tg__redis_address_parse(&sentinel, &address, NULL), TG_OK);
    assert_int_equal(address.sentinel_count, 3);
    assert_string_equal(address.sentinels[0].host, "one");
    assert_int_equal(address.sentinels[0].port, 26379);
    assert_string_equal(address.sentinels[1].host, "::1");
    assert_int_equal(address.sentinels[2].port, 7);
    assert_string_equal(address.master, "main");
    assert_int_equal(address.db, 2);
    tg__redis_address_fini(&address);
    const tg_store_uri path = { .scheme = tg_text_of("redis+unix"), .rest = tg_text_of("u:p@/run/a@b.sock") };
    assert_int_equal(tg__redis_address_parse(&path, &address, NULL), TG_OK);
    assert_string_equal(address.password, "p");
    assert_string_equal(address.host, "/run/a@b.sock");
    tg__redis_address_fini(&address);
}

static void
tcp_names_and_numbers_reach_the_same_counts_as_the_socket(void **unused)
{
    (void)unused;
    char uri[128];
    tg_store *by_path = open_store(patient_uri, NULL);
    tg_limiter *first = open_limiter(by_path, "9/minute", "x");
    hit(first, "a");
    static const char *const forms[] = { "redis://127.0.0.1:%u?timeout_ms=2000", "redis://localhost:%u/0?timeout_ms=2000",
                                         "redis://127.0.0.1:%u/0?timeout_ms=2000&connections=1" };
    for (size_t i = 0; i < 3; i++) {
        snprintf(uri, sizeof uri, forms[i], redis.port);
        tg_store *store = open_store(uri, NULL);
        tg_limiter *limiter = open_limiter(store, "9/minute", "x");
        assert_int_equal(hit(limiter, "a").remaining, 7 - i);
        tg_limiter_close(limiter);
        tg_store_close(store);
    }
    snprintf(uri, sizeof uri, "redis://127.0.0.1:%u/2?timeout_ms=2000", redis.port);
    tg_store *other = open_store(uri, NULL);
    tg_limiter *elsewhere = open_limiter(other, "9/minute", "x");
    assert_int_equal(hit(elsewhere, "a").remaining, 8);
    tg_limiter_close(elsewhere);
    tg_store_close(other);
    tg_limiter_close(first);
    tg_store_close(by_path);
}

static void
a_name_that_does_not_exist_costs_no_more_than_the_deadline(void **unused)
{
    (void)unused;
    pthread_t lateness; /* not for all tests: some fork, which the thread sanitizer follows only without threads */
    lateness_begin(&lateness);
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    tg_store *store = open_store("redis://no-such-host.invalid:6379", NULL);
    assert_in_time(tg__monotonic_us() - began_us, 300000);
    lateness_end(lateness);
    tg_limiter *limiter = open_limiter(store, "9/minute", "x");
    assert_true(hit(limiter, "a").degraded);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- keys ---- */

/* Whether there is exactly one key of this pattern, with an expiry. */
static bool
one_key(const char *pattern)
{
    redisContext *link = server_connect(&redis);
    redisReply *keys = redisCommand(link, "KEYS %s", pattern);
    bool one = keys->elements == 1;
    if (one) {
        redisReply *left = redisCommand(link, "PTTL %s", keys->element[0]->str);
        one = left->integer > 0;
        freeReplyObject(left);
    }
    freeReplyObject(keys);
    redisFree(link);
    return one;
}

static void
keys_say_who_and_what_and_begin_with_the_secrets_fingerprint(void **unused)
{
    (void)unused;
    setenv("TIDEGATE_SECRET", "a secret of the test", 1);
    tg_store *store = open_store(patient_uri, NULL);
    tg_error error;
    tg_limiter *limiter;
    const tg_limiter_options options = { .rules = tg_text_of("5/minute token_bucket"), .name = tg_text_of("log in:x"),
                                         .space = tg_text_of("shop") };
    assert_int_equal(tg_limiter_open(store, NULL, &options, &limiter, &error), TG_OK);
    const tg_part ip = { tg_text_of("ip"), tg_text_of("2001:db8::/64") }, user = { tg_text_of("user"), tg_text_of("ann") };
    const tg_part both[] = { ip, user }, raw = { .value = tg_text_of("x") }, empty = { .value = tg_text_of("") };
    const tg_part odd = { tg_text_of("user"), tg_text_of("}{ \r\n") };
    char of_300[301];
    memset(of_300, 'y', 300);
    of_300[300] = '\0';
    const tg_part much = { tg_text_of("user"), tg_text_of(of_300) };
    const tg_part token = { tg_text_of("header:X-Token"), tg_text_of("s3cr3t") };
    const tg_dimension dimensions[] = { { &ip, 1 }, { both, 2 }, { &raw, 1 }, { &empty, 1 }, { &odd, 1 }, { &much, 1 },
                                        { &token, 1 } };
    tg_decision decision;
    assert_int_equal(tg_limiter_hit(limiter, dimensions, 7, 1, &decision, &error), TG_OK);
    assert_false(decision.degraded);
    assert_true(one_key("tg1:????????:{ip=2001:db8::/64}:shop:log%20in%3ax:token_bucket:60000000"));
    assert_true(one_key("tg1:????????:{ip=2001:db8::/64,user=ann}:shop:*"));
    assert_true(one_key("tg1:????????:{x}:shop:*"));
    assert_true(one_key("tg1:????????:{#}:shop:*")); /* "{}" would be no hash tag */
    assert_true(one_key("tg1:????????:{header:X-Token=#????????????????????????????????}:*"));
    assert_false(one_key("*s3cr3t*"));
    assert_int_equal(server_ask(&redis, NULL, "KEYS tg1:????????:{user=#????????????????????????????????}:*"), 2);
    assert_int_equal(server_counted(&redis), 7); /* and no secret beside them */
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
random_identities_never_share_a_key_and_stay_between_one_pair_of_braces(void **unused)
{
    (void)unused;
    tg_redis_keyring keyring;
    tg__redis_keyring_init(&keyring, tg_text_of("s"), false, 0);
    static const char alphabet[] = "ab{},=#:%\0 \xff" "1";
    static struct {
        tg_identity identity;
        char text[TG__REDIS_IDENTITY_MAX];
        size_t length;
    } seen[4000];
    unsigned random = 12345;
    for (size_t i = 0; i < 4000; i++) {
        tg_part parts[3];
        char bytes[3][2][70];
        random = random * 1103515245 + 12345;
        const size_t count = 1 + (random >> 16) % 3;
        for (size_t p = 0; p < count; p++)
            for (int k = 0; k < 2; k++) {
                random = random * 1103515245 + 12345;
                const size_t length = (random >> 16) % 10 == 0 ? 60 + (k ? (random >> 20) % 10 : 0) : (random >> 20) % 4;
                for (size_t b = 0; b < length; b++) {
                    random = random * 1103515245 + 12345;
                    bytes[p][k][b] = alphabet[(random >> 16) % (sizeof alphabet - 1)];
                }
                *(k ? &parts[p].value : &parts[p].kind) = (tg_text){ bytes[p][k], length };
            }
        assert_int_equal(tg__identity_join(parts, count, &seen[i].identity, NULL), TG_OK);
        seen[i].length = tg__redis_identity_text(&keyring, &seen[i].identity, seen[i].text);
        assert_in_range(seen[i].length, 1, TG__REDIS_IDENTITY_MAX);
        assert_null(memchr(seen[i].text, '{', seen[i].length));
        assert_null(memchr(seen[i].text, '}', seen[i].length));
        for (size_t j = 0; j < i; j++) {
            const bool same_text = seen[i].length == seen[j].length && memcmp(seen[i].text, seen[j].text, seen[i].length) == 0;
            const bool same = seen[i].identity.length == seen[j].identity.length &&
                              memcmp(seen[i].identity.bytes, seen[j].identity.bytes, seen[i].identity.length) == 0;
            assert_int_equal(same_text, same);
        }
    }
}

static void
another_secret_counts_apart_and_one_kept_in_redis_is_shared(void **unused)
{
    (void)unused;
    uint64_t remaining[4];
    static const char *const secrets[] = { "one", "two", NULL, NULL };
    for (size_t i = 0; i < 4; i++) {
        if (secrets[i])
            setenv("TIDEGATE_SECRET", secrets[i], 1);
        else
            unsetenv("TIDEGATE_SECRET");
        tg_store *store = open_store(patient_uri, NULL);
        tg_limiter *limiter = open_limiter(store, "9/minute", "x");
        remaining[i] = hit(limiter, "a").remaining;
        tg_limiter_close(limiter);
        tg_store_close(store);
        assert_int_equal(server_ask(&redis, NULL, "EXISTS tg1:secret"), !secrets[i]);
    }
    assert_int_equal(remaining[0], 8);
    assert_int_equal(remaining[1], 8);
    assert_int_equal(remaining[2], 8);
    assert_int_equal(remaining[3], 7); /* a second opening, as another machine would: the same secret */
    assert_int_equal(server_ask(&redis, NULL, "PTTL tg1:secret"), -1);
}

static void
another_secret_in_redis_is_taken_up_and_told_once(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "9/minute", "x");
    hit(limiter, "a");
    for (int i = 0; i < 3; i++) {
        char command[64];
        snprintf(command, sizeof command, "SET tg1:secret another%d", i);
        server_ask(&redis, NULL, command);
        server_ask(&redis, NULL, "CLIENT KILL TYPE normal SKIPME yes");
        assert_int_equal(hit(limiter, "a").remaining, 8);
        assert_int_equal(noticed("store-other-secret", "TIDEGATE_SECRET"), i == 0);
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- expiry ---- */

static void
a_key_lives_until_its_state_equals_a_fresh_one(void **unused)
{
    (void)unused;
    static const char *const algorithms[] = { "fixed_window", "sliding_log", "sliding_counter", "token_bucket",
                                              "leaky_bucket" };
    tg_store *store = open_store(patient_uri, NULL);
    for (size_t i = 0; i < 5; i++) {
        char rules[64];
        snprintf(rules, sizeof rules, "5/2s %s", algorithms[i]);
        tg_limiter *limiter = open_limiter(store, rules, algorithms[i]);
        redisContext *link = server_connect(&redis);
        for (int k = 0; k < 2; k++) {
            const tg_decision decision = hit(limiter, "a");
            redisReply *keys = redisCommand(link, "KEYS tg1:*:%s:*", algorithms[i]);
            assert_int_equal(keys->elements, 1);
            redisReply *left = redisCommand(link, "PTTL %s", keys->element[0]->str);
            const long long reset_ms = (long long)(decision.reset_after_us / 1000);
            if (left->integer > reset_ms + 2 || left->integer < reset_ms - 500)
                fail_msg("%s: %lld ms to live, fresh in %lld", algorithms[i], left->integer, reset_ms);
            freeReplyObject(left);
            freeReplyObject(keys);
        }
        redisFree(link);
        tg_limiter_close(limiter);
    }
    sleep_us(4100000); /* a counter lives two windows */
    assert_int_equal(server_counted(&redis), 0);
    tg_store_close(store);
}

static void
looking_refunding_and_denials_make_no_key(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/2s fixed_window; 5/2s sliding_log; 5/2s sliding_counter; 5/2s token_bucket", "x");
    const tg_part part = { .value = tg_text_of("a") };
    const tg_dimension dimension = { &part, 1 };
    tg_decision decision;
    assert_int_equal(tg_limiter_peek(limiter, &dimension, 1, 3, &decision, NULL), TG_OK);
    assert_int_equal(tg_limiter_refund(limiter, &dimension, 1, 3, NULL), TG_OK);
    assert_int_equal(tg_limiter_reset(limiter, &dimension, 1, NULL), TG_OK);
    assert_true(hit_cost(limiter, "a", 0).allowed);
    assert_false(hit_cost(limiter, "a", 6).allowed);
    assert_int_equal(server_counted(&redis), 0);
    hit(limiter, "a");
    assert_int_equal(server_counted(&redis), 4);
    assert_int_equal(tg_limiter_reset(limiter, &dimension, 1, NULL), TG_OK);
    assert_int_equal(server_counted(&redis), 0);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- memory ---- */

static long long
memory_of(const char *pattern)
{
    redisContext *link = server_connect(&redis);
    redisReply *keys = redisCommand(link, "KEYS %s", pattern);
    assert_int_equal(keys->elements, 1);
    redisReply *bytes = redisCommand(link, "MEMORY USAGE %s SAMPLES 0", keys->element[0]->str);
    const long long number = bytes->integer;
    freeReplyObject(bytes);
    freeReplyObject(keys);
    redisFree(link);
    return number;
}

static void
a_logged_hit_costs_at_most_16_bytes_and_24_with_costs(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    tg_limiter *ones = open_limiter(store, "10000/hour sliding_log", "ones");
    tg_limiter *twos = open_limiter(store, "30000/hour sliding_log", "twos");
    for (int i = 0; i < 10000; i++) {
        assert_true(hit(ones, "a").allowed);
        assert_true(hit_cost(twos, "a", 1 + (unsigned)i % 5).allowed);
    }
    assert_false(hit(ones, "a").allowed);
    const long long of_ones = memory_of("*:ones:*"), of_twos = memory_of("*:twos:*");
    print_message("a hit of cost 1: %.2f bytes; with costs: %.2f bytes\n", (double)of_ones / 10000, (double)of_twos / 10000);
    assert_in_range(of_ones, 0, 160000);
    assert_in_range(of_twos, 0, 240000);
    tg_limiter_close(ones);
    tg_limiter_close(twos);
    tg_store_close(store);
}

static void
a_log_that_turns_over_stays_within_its_memory(void **unused)
{
    (void)unused;
    tg_clock *clock;
    assert_int_equal(tg_clock_open(1000000, &clock, NULL), TG_OK);
    tg_store *store = open_store(patient_uri, clock);
    tg_limiter *limiter = open_limiter(store, "1000/s sliding_log", "x");
    long long most = 0;
    for (int i = 0; i < 20000; i++) {
        tg_clock_advance_us(clock, 1000);
        assert_true(hit(limiter, "a").allowed);
        if (i % 500 == 0 && memory_of("tg1m:*") > most)
            most = memory_of("tg1m:*");
    }
    assert_in_range(most, 1, 16500);
    tg_limiter_close(limiter);
    tg_store_close(store);
    tg_clock_close(clock);
}

/* ---- target by target as the table ---- */

static uint64_t random_state = 88172645463325252u;

static uint64_t
drawn(uint64_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % below;
}

static void
every_target_is_answered_as_the_table_answers_it(void **unused)
{
    (void)unused;
    tg_clock *clock;
    assert_int_equal(tg_clock_open(UINT64_C(1700000000000000), &clock, NULL), TG_OK);
    tg_store *here = open_store("memory://as-redis", clock), *there = open_store(patient_uri, clock);
    tg_rule rules[12];
    static const char *const texts[] = {
        "3/10s fixed_window",   "5/10s sliding_log",   "4/10s sliding_counter", "3/10s token_bucket burst 5",
        "2/10s leaky_bucket",   "deny",                "7/10s fixed_window",    "2/10s sliding_log",
        "9/10s sliding_counter", "5/10s token_bucket", "6/10s sliding_log resolution 1s", "1000000/month burst 5 leaky_bucket",
    };
    for (size_t i = 0; i < 12; i++) {
        size_t count;
        tg_rule parsed[TG_RULES_MAX];
        assert_int_equal(tg_rules_parse(tg_text_of(texts[i]), TG_ALGORITHM_DEFAULT, parsed, &count, NULL), TG_OK);
        rules[i] = parsed[0];
        tg__rule_scope(&rules[i], tg_text_of("s"), tg_text_of("n")); /* equal ones share their counts, with other limits */
    }
    tg_identity who[2];
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(tg__identity_join(&(tg_part){ .value = tg_text_of(i ? "b" : "a") }, 1, &who[i], NULL), TG_OK);
    const int rounds = 20000 / FEWER;
    for (int round = 0; round < rounds; round++) {
        if (drawn(3) == 0)
            tg_clock_advance_us(clock, drawn(4000000));
        tg_target targets[6];
        tg_result a[6], b[6];
        const size_t count = 1 + drawn(6);
        const tg_op op = (tg_op)(drawn(8) == 0 ? 1 + drawn(3) : 0);
        const uint64_t cost = drawn(6) == 0 ? drawn(7) : 1;
        memset(a, 0, sizeof a);
        memset(b, 0, sizeof b);
        for (size_t i = 0; i < count; i++)
            targets[i] = (tg_target){ .rule = &rules[drawn(drawn(10) == 0 ? 12 : 5)], .identity = &who[drawn(2)], .cost = cost,
                                      .charged = op <= TG_OP_PEEK && drawn(5) == 0,
                                      .stamp_us = tg_clock_now_us(clock) };
        /* One key is either paid by this request already or not. */
        for (size_t i = 0; i < count; i++)
            for (size_t j = 0; j < i; j++)
                if (targets[i].identity == targets[j].identity &&
                    memcmp(targets[i].rule->scope, targets[j].rule->scope, 16) == 0)
                    targets[i].charged = targets[j].charged;
        tg_error error = { .message = "" };
        bool overflow;
        if (here->ops->apply(here, op, targets, count, 0, a, &overflow, &error) != TG_OK ||
            there->ops->apply(there, op, targets, count, 0, b, &overflow, &error) != TG_OK)
            fail_msg("round %d: %s", round, error.message);
        if (op > TG_OP_PEEK)
            continue;
        for (size_t i = 0; i < count; i++) {
            const bool same = a[i].allowed == b[i].allowed && a[i].charged == b[i].charged &&
                              a[i].remaining == b[i].remaining && a[i].retry_after_us == b[i].retry_after_us &&
                              a[i].reset_after_us == b[i].reset_after_us && a[i].delay_us == b[i].delay_us &&
                              (!a[i].charged || a[i].stamp_us == b[i].stamp_us);
            if (!same) {
                char text[TG_RULE_TEXT_MAX];
                tg_rule_text(targets[i].rule, text);
                fail_msg("round %d, op %d, target %zu of %zu (%s, cost %" PRIu64 "%s): table %d %d %" PRIu64 " %" PRIu64
                         " %" PRIu64 " %" PRIu64 " %" PRIu64 ", redis %d %d %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64
                         " %" PRIu64, round, op, i, count, text, cost, targets[i].charged ? ", charged" : "", a[i].allowed,
                         a[i].charged, a[i].remaining, a[i].retry_after_us, a[i].reset_after_us, a[i].delay_us, a[i].stamp_us,
                         b[i].allowed, b[i].charged, b[i].remaining, b[i].retry_after_us, b[i].reset_after_us, b[i].delay_us,
                         b[i].stamp_us);
            }
        }
        /* What a hit took is given back now and then, by its own stamp. */
        if (op == TG_OP_HIT && drawn(4) == 0) {
            tg_target own[6];
            size_t owned = 0;
            for (size_t i = 0; i < count; i++)
                if (a[i].charged) {
                    own[owned] = targets[i];
                    own[owned].own = true;
                    own[owned++].stamp_us = a[i].stamp_us;
                }
            if (owned > 0) {
                assert_int_equal(here->ops->apply(here, TG_OP_REFUND, own, owned, 0, NULL, NULL, NULL), TG_OK);
                assert_int_equal(there->ops->apply(there, TG_OP_REFUND, own, owned, 0, NULL, NULL, NULL), TG_OK);
            }
        }
    }
    tg_store_close(here);
    tg_store_close(there);
    tg_clock_close(clock);
}

/* ---- many at once ---- */

typedef struct worker {
    tg_limiter *limiter;
    unsigned hits, first;
    unsigned admitted, degraded;
} worker;

static const char *const keys_of_all[] = { "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "k8", "k9" };

static void *
work(void *argument)
{
    worker *one = argument;
    for (unsigned i = 0; i < one->hits; i++) {
        const tg_decision decision = hit(one->limiter, keys_of_all[(one->first + i) % 10]);
        one->admitted += decision.allowed && !decision.degraded;
        one->degraded += decision.degraded;
    }
    return NULL;
}

static unsigned
work_in_threads(const char *uri, const char *rules, unsigned threads, unsigned hits, unsigned *degraded)
{
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, rules, "many");
    worker workers[16];
    pthread_t ids[16];
    for (unsigned i = 0; i < threads; i++) {
        workers[i] = (worker){ .limiter = limiter, .hits = hits, .first = i };
        assert_int_equal(pthread_create(&ids[i], NULL, work, &workers[i]), 0);
    }
    unsigned admitted = 0;
    for (unsigned i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        admitted += workers[i].admitted;
        *degraded += workers[i].degraded;
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
    return admitted;
}

static void
threads_share_few_connections_and_count_exactly(void **unused)
{
    (void)unused;
    char uri[200];
    snprintf(uri, sizeof uri, "%s&connections=3", patient_uri);
    const long long before = server_info(&redis, "stats", "total_connections_received");
    unsigned degraded = 0;
    const unsigned admitted = work_in_threads(uri, "100/hour", 12, 400 / FEWER * 2, &degraded);
    assert_int_equal(degraded, 0);
    assert_int_equal(admitted, FEWER == 1 ? 1000 : 960);
    assert_in_range(server_info(&redis, "stats", "total_connections_received") - before, 1, 3 + 1); /* and ours */
}

/* 8 processes on 4 connections each, 100 000 hits in all; TIDEGATE_LONG: 100 000 with each algorithm. */
static void
processes_count_exactly_with_every_algorithm(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "1000/hour fixed_window", "1000/hour sliding_log", "1000/10year sliding_counter",
                                         "1/10year burst 1000 token_bucket", "1/10year burst 1000 leaky_bucket" };
    const unsigned hits = (getenv("TIDEGATE_LONG") ? 100000 : 20000) / FEWER / (8 * 4);
    for (size_t r = 0; r < 5; r++) {
        server_ask(&redis, NULL, "FLUSHALL");
        int answers[2];
        assert_int_equal(pipe(answers), 0);
        pid_t children[8];
        for (size_t i = 0; i < 8; i++) {
            children[i] = fork();
            assert_true(children[i] != -1);
            if (children[i] == 0) {
                unsigned said[2] = { 0, 0 };
                char uri[200];
                snprintf(uri, sizeof uri, "%s&connections=4", patient_uri);
                said[0] = work_in_threads(uri, rules[r], 4, hits, &said[1]);
                (void)!write(answers[1], said, sizeof said);
                _exit(0);
            }
        }
        unsigned admitted = 0, degraded = 0;
        for (size_t i = 0; i < 8; i++) {
            unsigned said[2];
            assert_int_equal(read(answers[0], said, sizeof said), sizeof said);
            admitted += said[0];
            degraded += said[1];
            waitpid(children[i], NULL, 0);
        }
        close(answers[0]);
        close(answers[1]);
        assert_int_equal(degraded, 0);
        const unsigned all = hits * 8 * 4;
        assert_int_equal(admitted, all < 10 * 1000 ? all : 10 * 1000);
    }
}

static void
a_forked_child_never_uses_its_parents_connection(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    tg_store *store = open_store(patient_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1000/hour", "x");
    hit(limiter, "a");
    const long long before = server_info(&redis, "stats", "total_connections_received");
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        children[i] = fork();
        assert_true(children[i] != -1);
        if (children[i] == 0) {
            int wrong = 0;
            for (int k = 0; k < 50; k++)
                wrong += hit(limiter, "a").degraded;
            _exit(wrong);
        }
    }
    for (int k = 0; k < 50; k++)
        assert_false(hit(limiter, "a").degraded);
    for (int i = 0; i < 4; i++) {
        int status;
        waitpid(children[i], &status, 0);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    assert_int_equal(hit(limiter, "a").remaining, 1000 - 1 - 50 - 200 - 1);
    /* One each, or two where a child's keeper had its only one when a hit came; one more of the parent's; and ours. */
    assert_in_range(server_info(&redis, "stats", "total_connections_received") - before, 4 + 1, 2 * 4 + 1 + 1);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static atomic_bool forks_done;

static void *
hit_until_done(void *argument)
{
    tg_limiter *limiter = argument;
    while (!atomic_load(&forks_done))
        hit(limiter, "busy");
    return NULL;
}

static void
a_fork_while_other_threads_are_in_the_store_leaves_a_child_that_can_go_on(void **unused)
{
    (void)unused;
    SKIP_FORKS();
    char uri[200];
    snprintf(uri, sizeof uri, "%s&connections=2", patient_uri);
    tg_store *store = open_store(uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1000000/hour fixed_window", "x");
    atomic_store(&forks_done, false);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, hit_until_done, limiter), 0);
    int failed = 0;
    for (int i = 0; i < 60; i++) {
        const pid_t child = fork();
        assert_true(child != -1);
        if (child == 0) {
            alarm(20);
            int wrong = 0;
            for (int k = 0; k < 5; k++)
                wrong += hit(limiter, "child").degraded;
            _exit(wrong);
        }
        int status;
        waitpid(child, &status, 0);
        failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    atomic_store(&forks_done, true);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(failed, 0);
    assert_int_equal(hit(limiter, "child").remaining, 1000000 - 60 * 5 - 1);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- connections cut at random ---- */

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { CLIENTS = 200, HITS_ANSWERED = 100 };
#else
enum { CLIENTS = 200, HITS_ANSWERED = 1000 };
#endif

typedef struct cutting {
    tg_limiter *limiters[5];
    atomic_uint next, unanswered, cut;
    atomic_bool done;
} cutting;

/* A client of its own key, until Redis has answered so many of its hits and half the connections have been cut. */
static void *
hit_until_answered(void *argument)
{
    cutting *all = argument;
    const unsigned number = atomic_fetch_add(&all->next, 1);
    char who[16];
    snprintf(who, sizeof who, "cut%u", number);
    for (unsigned answered = 0; answered < HITS_ANSWERED || atomic_load(&all->cut) < CLIENTS / 2;) {
        if (!hit(all->limiters[number % 5], who).degraded) {
            answered++;
            continue;
        }
        atomic_fetch_add(&all->unanswered, 1);
        sleep_us(2000); /* while the breaker is open nothing reaches a connection that could be cut */
    }
    return NULL;
}

static void *
cut_connections(void *argument)
{
    cutting *all = argument;
    redisContext *link = server_connect(&redis);
    unsigned random = 1;
    while (!atomic_load(&all->done)) {
        redisReply *clients = redisCommand(link, "CLIENT LIST TYPE normal");
        for (char *line = clients ? strtok(clients->str, "\n") : NULL; line; line = strtok(NULL, "\n")) {
            random = random * 1103515245 + 12345;
            unsigned long long id;
            if ((random >> 16) % 50 == 0 && sscanf(line, "id=%llu", &id) == 1) {
                redisReply *reply = redisCommand(link, "CLIENT KILL ID %llu SKIPME yes", id);
                if (reply && reply->type == REDIS_REPLY_INTEGER)
                    atomic_fetch_add(&all->cut, (unsigned)reply->integer);
                if (reply)
                    freeReplyObject(reply);
            }
        }
        if (clients)
            freeReplyObject(clients);
        sleep_us(5000);
    }
    redisFree(link);
    return NULL;
}

static void
connections_cut_at_random_leave_no_key_without_an_expiry_and_none_a_window_later(void **unused)
{
    (void)unused;
    static const char *const rules[] = { "300/2s fixed_window", "300/2s sliding_log", "300/1s sliding_counter",
                                         "300/2s token_bucket", "300/2s leaky_bucket" };
    char uri[200];
    snprintf(uri, sizeof uri, "%s&connections=%d", patient_uri, CLIENTS);
    static cutting all;
    memset(&all, 0, sizeof all);
    tg_store *store = open_store(uri, NULL);
    for (size_t i = 0; i < 5; i++)
        all.limiters[i] = open_limiter(store, rules[i], "cut");
    pthread_t cutter, clients[CLIENTS];
    assert_int_equal(pthread_create(&cutter, NULL, cut_connections, &all), 0);
    for (size_t i = 0; i < CLIENTS; i++)
        assert_int_equal(pthread_create(&clients[i], NULL, hit_until_answered, &all), 0);
    for (size_t i = 0; i < CLIENTS; i++)
        pthread_join(clients[i], NULL);
    atomic_store(&all.done, true);
    pthread_join(cutter, NULL);
    print_message("%u hits answered, %u not, %u connections cut\n", CLIENTS * HITS_ANSWERED, atomic_load(&all.unanswered),
                  atomic_load(&all.cut));
    assert_true(atomic_load(&all.cut) >= CLIENTS / 2);
    assert_true(atomic_load(&all.unanswered) > 0); /* some in the middle of a call */
    long long keys = 0;
    redisContext *link = server_connect(&redis);
    redisReply *names = redisCommand(link, "KEYS *");
    for (size_t i = 0; i < names->elements; i++) {
        redisReply *left = redisCommand(link, "PTTL %s", names->element[i]->str);
        if (left->integer == -1 && strcmp(names->element[i]->str, "tg1:secret") != 0)
            fail_msg("%s would stand for ever", names->element[i]->str);
        keys += strncmp(names->element[i]->str, "tg1:", 4) == 0 && strstr(names->element[i]->str, ":{cut") != NULL;
        freeReplyObject(left);
    }
    freeReplyObject(names);
    redisFree(link);
    assert_true(keys > 0);
    for (size_t i = 0; i < 5; i++)
        tg_limiter_close(all.limiters[i]);
    tg_store_close(store);
    sleep_us(2100000);
    assert_int_equal(server_counted(&redis), 0);
    forget_notices();
}

/* ---- what is kept ---- */

static void
a_long_log_with_costs_tells_when_a_large_hit_passes(void **unused)
{
    (void)unused;
    tg_clock *clock;
    assert_int_equal(tg_clock_open(UINT64_C(1700000000000000), &clock, NULL), TG_OK);
    tg_store *store = open_store(patient_uri, clock), *table = open_store("memory://long-log", clock);
    tg_limiter *limiter = open_limiter(store, "40/minute sliding_log", "long"),
               *expected = open_limiter(table, "40/minute sliding_log", "long");
    for (int i = 0; i < 20; i++) {
        assert_true(hit_cost(limiter, "a", 2).allowed && hit_cost(expected, "a", 2).allowed);
        tg_clock_advance_us(clock, SECOND_US);
    }
    for (uint64_t cost = 1; cost <= 40; cost++) {
        const tg_decision refused = hit_cost(limiter, "a", cost);
        assert_false(refused.degraded || refused.allowed);
        assert_int_equal(refused.retry_after_us, hit_cost(expected, "a", cost).retry_after_us);
    }
    tg_limiter_close(limiter);
    tg_limiter_close(expected);
    tg_store_close(store);
    tg_store_close(table);
    tg_clock_close(clock);
}

static void
a_manual_clock_counts_under_keys_of_its_own(void **unused)
{
    (void)unused;
    tg_clock *clock;
    assert_int_equal(tg_clock_open(5, &clock, NULL), TG_OK);
    tg_store *manual = open_store(patient_uri, clock), *real = open_store(patient_uri, NULL);
    tg_limiter *test = open_limiter(manual, "1/minute", "x"), *site = open_limiter(real, "1/minute", "x");
    assert_true(hit(test, "a").allowed);
    assert_true(hit(site, "a").allowed);
    assert_false(hit(test, "a").allowed);
    tg_clock_advance_us(clock, 60 * SECOND_US);
    assert_true(hit(test, "a").allowed);
    assert_false(hit(site, "a").allowed);
    assert_int_equal(tg_store_now_us(manual), 5 + 60 * SECOND_US);
    assert_true(one_key("tg1m:*"));
    tg_clock_set_us(clock, UINT64_C(1) << 62);
    assert_true(hit(test, "a").degraded);
    tg_limiter_close(test);
    tg_limiter_close(site);
    tg_store_close(manual);
    tg_store_close(real);
    tg_clock_close(clock);
    forget_notices();
}

static void
the_stores_clock_is_the_servers(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "1/minute", "x");
    hit(limiter, "a");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t ours_us = (uint64_t)now.tv_sec * SECOND_US + (uint64_t)now.tv_nsec / 1000;
    assert_in_range(tg_store_now_us(store), ours_us - 500000, ours_us + 500000);
    assert_int_equal(tg_store_utc_offset_us(store), 0);
    tg_store_stats stats;
    assert_int_equal(tg_store_read_stats(store, &stats, NULL), TG_OK);
    assert_int_equal(stats.timeouts, 0);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
many_hits_keep_descriptors_and_memory_as_they_were(void **unused)
{
    (void)unused;
    tg_store *store = open_store(patient_uri, NULL);
    tg_limiter *limiter = open_limiter(store, "5/minute; 10/hour token_bucket", "x");
    for (int i = 0; i < 1000; i++)
        hit(limiter, "a");
    char line[256];
    long before = 0, after = 0;
    for (int round = 0; round < 2; round++) {
        FILE *status = fopen("/proc/self/status", "r");
        assert_non_null(status);
        while (fgets(line, sizeof line, status))
            sscanf(line, "RssAnon: %ld", round ? &after : &before); /* those of files come and go */
        fclose(status);
        for (int i = 0; round == 0 && i < 20000 / FEWER; i++)
            hit(limiter, keys_of_all[i % 10]);
    }
    assert_true(before > 0);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    assert_in_range(after, 0, before + 512); /* KiB */
#endif
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_wrong_uri_is_an_error_that_repeats_no_password, begin),
        cmocka_unit_test_setup(passwords_users_and_databases_are_taken_from_the_uri, begin),
        cmocka_unit_test_setup(tcp_names_and_numbers_reach_the_same_counts_as_the_socket, begin),
        cmocka_unit_test_setup(a_name_that_does_not_exist_costs_no_more_than_the_deadline, begin),
        cmocka_unit_test_setup(keys_say_who_and_what_and_begin_with_the_secrets_fingerprint, begin),
        cmocka_unit_test_setup(random_identities_never_share_a_key_and_stay_between_one_pair_of_braces, begin),
        cmocka_unit_test_setup(another_secret_counts_apart_and_one_kept_in_redis_is_shared, begin),
        cmocka_unit_test_setup(another_secret_in_redis_is_taken_up_and_told_once, begin),
        cmocka_unit_test_setup(a_key_lives_until_its_state_equals_a_fresh_one, begin),
        cmocka_unit_test_setup(looking_refunding_and_denials_make_no_key, begin),
        cmocka_unit_test_setup(a_logged_hit_costs_at_most_16_bytes_and_24_with_costs, begin),
        cmocka_unit_test_setup(a_log_that_turns_over_stays_within_its_memory, begin),
        cmocka_unit_test_setup(every_target_is_answered_as_the_table_answers_it, begin),
        cmocka_unit_test_setup(threads_share_few_connections_and_count_exactly, begin),
        cmocka_unit_test_setup(processes_count_exactly_with_every_algorithm, begin),
        cmocka_unit_test_setup(a_forked_child_never_uses_its_parents_connection, begin),
        cmocka_unit_test_setup(a_fork_while_other_threads_are_in_the_store_leaves_a_child_that_can_go_on, begin),
        cmocka_unit_test_setup(connections_cut_at_random_leave_no_key_without_an_expiry_and_none_a_window_later, begin),
        cmocka_unit_test_setup(a_long_log_with_costs_tells_when_a_large_hit_passes, begin),
        cmocka_unit_test_setup(a_manual_clock_counts_under_keys_of_its_own, begin),
        cmocka_unit_test_setup(the_stores_clock_is_the_servers, begin),
        cmocka_unit_test_setup(many_hits_keep_descriptors_and_memory_as_they_were, begin),
    };
    return cmocka_run_group_tests(tests, begin_all, end_all);
}
