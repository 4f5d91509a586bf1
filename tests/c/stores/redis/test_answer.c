/* What a script answers is read as what comes from outside: no bytes whatever may do more than be refused. And what
 * error replies mean. No server is needed here. */
#include "stores/redis/redis.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static uint64_t random_state = 88172645463325252u;

static uint64_t
drawn(uint64_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % below;
}

static uint8_t *
put(uint8_t *at, double number)
{
    memcpy(at, &number, sizeof number); /* tests run on little-endian machines; the reader takes any */
    return at + sizeof number;
}

static const double some[] = { 0, 1, 2, 7, -1, 1e6, 1.5, 1700000000000000.0, 9007199254740992.0, 9007199254740994.0, 1e300,
                               -9007199254740992.0, 0.0 / 0.0, 1.0 / 0.0, 60000000, 59999999 };

static tg_rule
rule_of(unsigned algorithm)
{
    return (tg_rule){ .limit = drawn(3) ? 1 + drawn(10) : TG_LIMIT_MAX, .burst = 1 + drawn(10),
                      .period_us = drawn(2) ? 60000000 : TG_PERIOD_US_MAX, .algorithm = (uint8_t)algorithm,
                      .aligned = drawn(2) == 1 };
}

static void
any_bytes_are_an_answer_or_are_refused(void **unused)
{
    (void)unused;
    size_t taken = 0;
    for (int round = 0; round < 200000; round++) {
        tg_rule rules[4];
        tg_identity identity = { .length = 0 };
        tg_target targets[4];
        tg_result results[4];
        uint8_t first_of[4];
        const size_t count = 1 + drawn(4);
        uint8_t bytes[256], *at = bytes;
        *at++ = (uint8_t)drawn(3);
        at = put(at, some[drawn(sizeof some / sizeof *some)]);
        for (size_t i = 0; i < count; i++) {
            rules[i] = rule_of(1 + (unsigned)drawn(5));
            targets[i] = (tg_target){ .rule = &rules[i], .identity = &identity, .cost = drawn(4), .charged = drawn(4) == 0 };
            first_of[i] = i > 0 && drawn(4) == 0 && rules[i].algorithm == rules[0].algorithm ? 0 : (uint8_t)i;
            const size_t numbers = rules[i].algorithm == TG_SLIDING_LOG ? 5 : rules[i].algorithm == TG_FIXED_WINDOW ? 2 : 3;
            const size_t length = drawn(5) == 0 ? 0 : 8 * numbers + (rules[i].algorithm == TG_FIXED_WINDOW);
            *at++ = (uint8_t)(drawn(20) ? length : drawn(256));
            for (size_t k = 0; k < length / 8; k++)
                at = put(at, some[drawn(drawn(2) ? 4 : sizeof some / sizeof *some)]);
            if (length % 8)
                *at++ = (uint8_t)drawn(3);
        }
        size_t length = (size_t)(at - bytes);
        if (drawn(10) == 0)
            length = drawn(length + 1);
        if (drawn(10) == 0)
            bytes[drawn(length + 1)] ^= (uint8_t)(1 << drawn(8));
        /* Exactly as long as said, so that a sanitizer sees one byte too many. */
        char *exact = malloc(length + 1);
        assert_non_null(exact);
        memcpy(exact, bytes, length);
        char *end = realloc(exact, length ? length : 1);
        assert_non_null(end);
        uint64_t now_us = 0;
        taken += tg__redis_answer_read((tg_text){ end, length }, drawn(2) ? TG_OP_HIT : TG_OP_PEEK, targets, first_of, count,
                                       false, results, &now_us);
        free(end);
    }
    assert_in_range(taken, 200, 190000); /* both kinds were met */
}

static void
an_answer_whose_verdict_is_not_ours_is_refused(void **unused)
{
    (void)unused;
    const tg_rule rule = { .limit = 5, .burst = 5, .period_us = 60000000, .algorithm = TG_TOKEN_BUCKET };
    const tg_identity identity = { .length = 0 };
    const tg_target target = { .rule = &rule, .identity = &identity, .cost = 1 };
    const uint8_t first_of[] = { 0 };
    for (int used = 0; used <= 5; used++)
        for (uint8_t said = 0; said < 2; said++) {
            uint8_t bytes[34], *at = bytes;
            *at++ = said;
            at = put(at, 1e15);
            *at++ = 24;
            at = put(put(put(at, used), 0), 1e15);
            tg_result result;
            uint64_t now_us;
            const bool taken = tg__redis_answer_read((tg_text){ (char *)bytes, sizeof bytes }, TG_OP_HIT, &target, first_of,
                                                     1, false, &result, &now_us);
            assert_int_equal(taken, said == (used < 5));
            if (taken && said) {
                assert_int_equal(result.remaining, 4 - used);
                assert_true(result.charged);
            }
        }
}

static void
every_code_of_the_table_is_known_and_longer_words_are_not(void **unused)
{
    (void)unused;
    static const struct {
        const char *reply;
        tg_trouble trouble;
    } replies[] = {
        { "LOADING Redis is loading the dataset in memory", TG__TROUBLE_PAUSED },
        { "BUSY Redis is busy running a script.", TG__TROUBLE_PAUSED },
        { "MASTERDOWN Link with MASTER is down", TG__TROUBLE_PAUSED },
        { "READONLY You can't write against a read only replica. script: 1, on @user_script:9.", TG__TROUBLE_PAUSED },
        { "CLUSTERDOWN The cluster is down", TG__TROUBLE_PAUSED },
        { "TRYAGAIN Multiple keys request during rehashing of slot", TG__TROUBLE_PAUSED },
        { "ERR max number of clients reached", TG__TROUBLE_PAUSED },
        { "OOM command not allowed when used memory > 'maxmemory'.", TG__TROUBLE_REFUSED },
        { "NOREPLICAS Not enough good replicas to write.", TG__TROUBLE_REFUSED },
        { "MISCONF Redis is configured to save RDB snapshots", TG__TROUBLE_REFUSED },
        { "WRONGTYPE Operation against a key holding the wrong kind of value", TG__TROUBLE_REFUSED },
        { "ERR user_script:6: attempt to compare nil with number", TG__TROUBLE_REFUSED },
        { "NOAUTH Authentication required.", TG__TROUBLE_SETUP },
        { "WRONGPASS invalid username-password pair or user is disabled.", TG__TROUBLE_SETUP },
        { "NOPERM this user has no permissions to run the 'evalsha' command", TG__TROUBLE_SETUP },
        { "ERR The user executing the script can't run this command or subcommand", TG__TROUBLE_SETUP },
        { "MOVED 4574 127.0.0.1:17410", TG__TROUBLE_SETUP },
        { "CROSSSLOT Keys in request don't hash to the same slot", TG__TROUBLE_SETUP },
        { "ERR Error running script (call to f_0123456789abcdef0123456789abcdef01234567): @user_script:12: -OOM command not "
          "allowed", TG__TROUBLE_REFUSED },
        { "ERR Error running script (call to f_1): @user_script:12: -READONLY You can't write", TG__TROUBLE_PAUSED },
        { "BUSYKEY Target key name already exists.", TG__TROUBLE_REFUSED },
        { "ASKME", TG__TROUBLE_REFUSED },
        { "", TG__TROUBLE_REFUSED },
    };
    for (size_t i = 0; i < sizeof replies / sizeof *replies; i++) {
        char explained[320];
        if (tg__redis_trouble(replies[i].reply, explained, sizeof explained) != replies[i].trouble)
            fail_msg("%s", replies[i].reply);
    }
    assert_true(tg__redis_unknown_script("NOSCRIPT No matching script. Please use EVAL."));
    assert_true(tg__redis_unknown_script("ERR backend: No matching script"));
    assert_false(tg__redis_unknown_script("ERR user_script:1: boom"));
}

/* 100 000 replies cut and spoilt go through the reader that all connections use; memory does not grow. */
static void
spoilt_replies_leave_no_memory_behind(void **unused)
{
    (void)unused;
    static const char whole[] = "*3\r\n$6\r\nmaster\r\n:12\r\n*0\r\n+OK\r\n$5\r\nhello\r\n-ERR no\r\n:7\r\n$-1\r\n%1\r\n+a\r\n+b\r\n";
    for (int round = 0; round < 100000; round++) {
        char bytes[sizeof whole];
        memcpy(bytes, whole, sizeof whole);
        const size_t length = 1 + drawn(sizeof whole - 1);
        for (uint64_t spoilt = drawn(4); spoilt > 0; spoilt--)
            bytes[drawn(length)] = (char)drawn(256);
        redisReader *reader = redisReaderCreate();
        void *reply = NULL;
        if (redisReaderFeed(reader, bytes, length) == REDIS_OK)
            while (redisReaderGetReply(reader, &reply) == REDIS_OK && reply)
                freeReplyObject(reply);
        redisReaderFree(reader);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_bytes_are_an_answer_or_are_refused),
        cmocka_unit_test(an_answer_whose_verdict_is_not_ours_is_refused),
        cmocka_unit_test(every_code_of_the_table_is_known_and_longer_words_are_not),
        cmocka_unit_test(spoilt_replies_leave_no_memory_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
