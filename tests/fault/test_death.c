/* A process is killed at every step of the write path, one step after the other until none is left, and again at
 * every step of the recovery that follows. Afterwards the state is that of before or of after, and the table is
 * sound. Built with TG_TEST_HOOKS. */
#include "tests/c/stores/table/table_test.h"

#define START_US UINT64_C(1700000000000000)

static long steps_left;
static bool in_recovery_only, recovering;

static void
die_at_last_step(const char *step)
{
    if (strcmp(step, "lock inherited") == 0)
        recovering = true;
    if (in_recovery_only && !recovering)
        return;
    if (--steps_left == 0)
        kill(getpid(), SIGKILL);
}

/* ---- what is interrupted ---- */

typedef struct scene {
    const char *name;
    const char *uri; /* after the folder */
    const char *rules;
    const char *keys;
    void (*prepare)(tg_limiter *limiter, tg_clock *clock);
    verb what;
    uint64_t cost;
    bool steps;    /* done in several steps: anything between before and after is right */
    long at_least; /* steps it has when it does what its name says */
    uint64_t later_us; /* the clock goes on before it; what came back by then is seen as well */
} scene;

static void
prepare_nothing(tg_limiter *limiter, tg_clock *clock)
{
    (void)limiter;
    (void)clock;
}

static void
prepare_some(tg_limiter *limiter, tg_clock *clock)
{
    for (int i = 0; i < 3; i++) {
        hit(limiter, "a");
        hit(limiter, "a b c");
        tg_clock_advance_us(clock, 7);
    }
}

static void
prepare_block_border(tg_limiter *limiter, tg_clock *clock)
{
    for (int i = 0; i < 14; i++) {
        hit(limiter, "a");
        tg_clock_advance_us(clock, SECOND);
    }
}

static void
prepare_expired(tg_limiter *limiter, tg_clock *clock)
{
    for (int i = 0; i < 20; i++) {
        hit(limiter, "a");
        tg_clock_advance_us(clock, SECOND);
    }
    tg_clock_advance_us(clock, 50 * SECOND); /* of a minute: eleven have left */
}

static void
prepare_all_expired(tg_limiter *limiter, tg_clock *clock)
{
    for (int i = 0; i < 21; i++)
        hit(limiter, "a");
    tg_clock_advance_us(clock, HOUR);
}

static void
prepare_many(tg_limiter *limiter, tg_clock *clock)
{
    tg_decision decision;
    for (int i = 0; i < 150; i++) {
        ask(limiter, HIT, "a", i % 3 ? 1 : 2, &decision);
        tg_clock_advance_us(clock, 10);
    }
}

/* Hits given back in the middle of the log leave holes, until only a pass over it makes room: 8/hour may grow to 8
 * words, an eighth more and two blocks. The next hit is the one that has to compact. */
static void
prepare_holes(tg_limiter *limiter, tg_clock *clock)
{
    tg_decision decision;
    ask(limiter, HIT, "a", 3, &decision);
    for (int i = 0; i < 4; i++)
        hit(limiter, "a");
    ask(limiter, REFUND, "a", 2, NULL); /* one unit is left in two words */
    for (int i = 0; i < 15; i++) {
        tg_decision older, newer;
        tg_clock_advance_us(clock, 10);
        ask(limiter, HIT, "a", 1, &older);
        tg_clock_advance_us(clock, 10);
        ask(limiter, HIT, "a", 1, &newer);
        tg_decision_refund(tg_limiter_store(limiter), &older, NULL);
        if (i < 14)
            tg_decision_refund(tg_limiter_store(limiter), &newer, NULL);
    }
}

static void
prepare_crowd(tg_limiter *limiter, tg_clock *clock)
{
    char key[16];
    for (int i = 0; i < 700; i++) { /* a table of 64 KiB holds fewer */
        snprintf(key, sizeof key, "crowd%d", i);
        hit(limiter, key);
        tg_clock_advance_us(clock, 1);
    }
}

/* All blocks are in use, none can be had: the next hit goes into the newest words. */
static void
prepare_no_block(tg_limiter *limiter, tg_clock *clock)
{
    char key[16];
    for (int n = 0; n < 200; n++) {
        tg_clock_advance_us(clock, 10);
        for (int i = 0; i < 40; i++) {
            snprintf(key, sizeof key, "k%d", i);
            hit(limiter, key);
        }
    }
}

static void
prepare_reserved(tg_limiter *limiter, tg_clock *clock)
{
    tg_decision decision;
    prepare_some(limiter, clock);
    ask(limiter, RESERVE, "a", 5, &decision);
    hit(limiter, "a");
}

/* Some 600 keys, each with a lease, so that the newcomer takes the place of one that has leases. */
static void
prepare_reserved_crowd(tg_limiter *limiter, tg_clock *clock)
{
    char key[16];
    tg_decision decision;
    prepare_crowd(limiter, clock);
    for (int i = 0; i < 700; i++) {
        snprintf(key, sizeof key, "crowd%d", i);
        ask(limiter, i % 7 ? PEEK : RESERVE, key, 1, &decision);
    }
}

static const scene scenes[] = {
    { "the first hit of a key", "t?size=64KiB", "5/minute token_bucket", "a", prepare_nothing, HIT, 1, false, 5, 0 },
    { "a later hit", "t?size=64KiB", "50/minute fixed_window", "a", prepare_some, HIT, 2, false, 5, 0 },
    { "several rules", "t?size=64KiB", "50/minute sliding_counter; 90/hour leaky_bucket; 80/hour sliding_log", "a",
      prepare_some, HIT, 1, false, 13, 0 },
    { "the first words of a log", "t?size=64KiB", "100/minute sliding_log", "a", prepare_nothing, HIT, 3, false, 8,
      0 },
    { "a log's new block", "t?size=64KiB", "100/minute sliding_log", "a", prepare_block_border, HIT, 1, false, 7, 0 },
    { "a cost across two blocks", "t?size=64KiB", "100/minute sliding_log", "a", prepare_some, HIT, 5, false, 8, 0 },
    { "expired words go", "t?size=64KiB", "100/minute sliding_log", "a", prepare_expired, HIT, 2, false, 9, 0 },
    { "all words have expired", "t?size=64KiB", "100/minute sliding_log", "a", prepare_all_expired, HIT, 1, false,
      10, 0 },
    { "a hit is merged", "t?size=64KiB", "100/minute sliding_log resolution 10s", "a", prepare_some, HIT, 1, false,
      10, 0 },
    { "a refund", "t?size=64KiB", "100/minute token_bucket", "a", prepare_some, REFUND, 1, false, 5, 0 },
    { "a log's refund", "t?size=64KiB", "100/minute sliding_log", "a", prepare_some, REFUND, 4, false, 13, 0 },
    { "a refund of many hits", "t?size=128KiB", "1000/hour sliding_log", "a", prepare_many, REFUND, 120, true, 185,
      0 },
    { "a log is compacted", "t?size=64KiB", "8/hour sliding_log", "a", prepare_holes, HIT, 1, true, 40, 0 },
    { "a log without a block", "t?size=128KiB", "500/hour sliding_log", "k7", prepare_no_block, HIT, 1, false, 9, 0 },
    { "a newcomer takes another log's blocks", "t?size=128KiB", "500/hour sliding_log", "newcomer",
      prepare_no_block, HIT, 1, false, 12, 0 },
    { "a reset", "t?size=64KiB", "100/minute sliding_log", "a", prepare_block_border, RESET, 0, false, 4, 0 },
    { "another entry is forgotten", "t?size=64KiB", "9/minute sliding_log", "newcomer", prepare_crowd, HIT, 1,
      false, 6, 0 }, /* which entry is forgotten is the hash's word, and how many steps that takes */
    { "a reservation", "t?size=64KiB", "100/minute token_bucket", "a", prepare_some, RESERVE, 5, false, 9, 0 },
    { "a reservation under several rules", "t?size=64KiB", "50/minute sliding_counter; 90/hour sliding_log; 9/s",
      "a", prepare_some, RESERVE, 3, false, 20, 0 },
    { "a reservation of two keys", "t?size=128KiB", "80/hour sliding_log; 50/minute fixed_window", "a b",
      prepare_some, RESERVE, 3, false, 20, 0 },
    { "a settlement that gives back", "t?size=64KiB", "100/minute token_bucket", "a", prepare_reserved, SETTLE, 2,
      false, 8, 0 },
    { "a settlement that gives back to a log", "t?size=64KiB", "100/minute sliding_log", "a", prepare_reserved,
      SETTLE, 2, false, 8, 0 },
    { "a settlement that takes more", "t?size=64KiB", "100/minute fixed_window", "a", prepare_reserved, SETTLE, 9,
      true, 12, 0 },
    { "a hit after a lease has ended", "t?size=64KiB", "100/hour fixed_window", "a", prepare_reserved, HIT, 1,
      false, 12, TEST_LEASE },
    { "a hit on a log after a lease has ended", "t?size=64KiB", "100/hour sliding_log", "a", prepare_reserved, HIT,
      1, false, 14, TEST_LEASE },
    { "a hit of another after a lease has ended", "t?size=64KiB", "100/hour sliding_counter", "b", prepare_reserved,
      HIT, 1, false, 12, TEST_LEASE },
    { "a lease is renewed", "t?size=64KiB", "100/minute token_bucket", "a", prepare_reserved, RENEW, 60, false, 2, 0
      },
    { "an entry with leases is forgotten", "t?size=64KiB", "9/minute sliding_log", "newcomer",
      prepare_reserved_crowd, HIT, 1, false, 6, 0 },
};

/* What can be told of the keys: everything a client would see. */
typedef struct sight {
    uint64_t numbers[6];
} sight;

static sight
look(tg_limiter *limiter, const char *keys)
{
    sight seen = { { 0 } };
    char one[32];
    size_t n = 0;
    while (*keys && n + 1 < 6) {
        const size_t length = strcspn(keys, " ");
        snprintf(one, sizeof one, "%.*s", (int)length, keys);
        tg_decision decision;
        assert_int_equal(ask(limiter, PEEK, one, 1, &decision), TG_OK);
        assert_false(decision.degraded);
        seen.numbers[n++] = decision.remaining;
        seen.numbers[n++] = decision.reset_after_us;
        keys += length + strspn(keys + length, " ");
    }
    return seen;
}

/* Does the scene's call in a child that dies at `step` (0: never). Whether it died. */
static bool
do_in_child(tg_limiter *limiter, const scene *of, long step, bool only_recovery)
{
    const pid_t pid = fork();
    if (pid == 0) {
        tg_decision decision;
        steps_left = step;
        in_recovery_only = only_recovery;
        recovering = false;
        tg__table_hook = die_at_last_step;
        _exit(ask(limiter, of->what, of->keys, of->cost, &decision) == TG_OK ? 0 : 1);
    }
    const int end = child_end(pid);
    if (end != 0 && end != -SIGKILL)
        fail_msg("%s, step %ld: child ended with %d", of->name, step, end);
    return end == -SIGKILL;
}

static bool
between(uint64_t value, uint64_t one, uint64_t other)
{
    return (value >= one && value <= other) || (value <= one && value >= other);
}

static void
judge(const scene *of, long step, sight seen, sight before, sight after)
{
    if (memcmp(&seen, &before, sizeof seen) == 0 || memcmp(&seen, &after, sizeof seen) == 0)
        return;
    if (of->later_us) { /* what had ended is back, once; the hit stands or does not, or with two deaths twice */
        const uint64_t hits = step > 1000 ? 2 : 1;
        if (seen.numbers[0] > after.numbers[0] + of->cost || seen.numbers[0] + (hits - 1) * of->cost < after.numbers[0])
            fail_msg("%s, step %ld: remaining %" PRIu64 ", afterwards %" PRIu64, of->name, step, seen.numbers[0],
                     after.numbers[0]);
        return;
    }
    for (size_t i = 0; of->steps && i < 6; i += 2)
        if (!between(seen.numbers[i], before.numbers[i], after.numbers[i]))
            fail_msg("%s, step %ld: neither before, after, nor between", of->name, step);
    if (!of->steps)
        fail_msg("%s, step %ld: remaining %" PRIu64 " reset %" PRIu64 " is neither before (%" PRIu64 " %" PRIu64
                 ") nor after (%" PRIu64 " %" PRIu64 ")",
                 of->name, step, seen.numbers[0], seen.numbers[1], before.numbers[0], before.numbers[1],
                 after.numbers[0], after.numbers[1]);
}

/* One run of a scene: a first child dies at `first` (0: nobody), a second one at `second` of its recovery (0: nobody).
 * Returns whether the one that was to die last did. */
static bool
run(const scene *of, long first, long second)
{
    unlink(path_of("t"));
    tg_clock *clock = clock_at(START_US);
    tg_store *store = store_of(uri_of(of->uri), clock);
    tg_limiter *limiter = limiter_of(store, of->rules);
    of->prepare(limiter, clock);
    const sight before = look(limiter, of->keys);
    tg_clock_advance_us(clock, of->later_us);
    bool died = do_in_child(limiter, of, first, false);
    if (died && second > 0)
        died = do_in_child(limiter, of, second, true);
    else if (second > 0)
        died = false;
    const sight seen = look(limiter, of->keys);
    tg_decision decision;
    /* It goes on: another call does what one call does. */
    assert_int_equal(ask(limiter, HIT, "other", 1, &decision), TG_OK);
    assert_false(decision.degraded);
    assert_table_sound(path_of("t"));

    /* And the table without any death, for what "after" is. */
    unlink(path_of("u"));
    tg_clock *same_clock = clock_at(START_US);
    char uri[64];
    snprintf(uri, sizeof uri, "u%s", of->uri + 1);
    tg_store *other_store = store_of(uri_of(uri), same_clock);
    tg_limiter *other = limiter_of(other_store, of->rules);
    of->prepare(other, same_clock);
    tg_clock_advance_us(same_clock, of->later_us);
    assert_int_equal(ask(other, of->what, of->keys, of->cost, &decision), TG_OK);
    const sight after = look(other, of->keys);
    sight last = after;
    if (second > 0) {
        /* the second child's own call may stand as well */
        assert_int_equal(ask(other, of->what, of->keys, of->cost, &decision), TG_OK);
        last = look(other, of->keys);
    }
    if (memcmp(&seen, &last, sizeof seen) != 0)
        judge(of, first * 1000 + second, seen, before, after);
    assert_table_sound(path_of("u"));
    tg_limiter_close(other);
    tg_store_close(other_store);
    tg_clock_close(same_clock);
    tg_limiter_close(limiter);
    tg_store_close(store);
    tg_clock_close(clock);
    return died;
}

static void
a_death_at_any_step_leaves_before_or_after(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        long step = 1;
        while (run(&scenes[i], step, 0))
            step++;
        print_message("%s: %ld steps\n", scenes[i].name, step - 1);
        assert_true(step > scenes[i].at_least);
    }
}

static void
a_death_at_any_step_of_the_recovery_is_recovered_too(void **state)
{
    (void)state;
    static const size_t chosen[] = { 2, 6, 8, 12, 18, 21, 24 };
    for (size_t i = 0; i < sizeof chosen / sizeof *chosen; i++) {
        const scene *of = &scenes[chosen[i]];
        long last = 1;
        while (run(of, last, 0))
            last++;
        /* Somewhere in the middle of the writing, and near its end. */
        const long firsts[] = { last / 2, last - 3 };
        for (size_t f = 0; f < 2; f++)
            for (long second = 1; firsts[f] > 0 && run(of, firsts[f], second); second++)
                continue;
    }
}

static void
hold_and_die(const char *step)
{
    if (strcmp(step, "entry saved") == 0)
        kill(getpid(), SIGKILL);
}

/* R160 */
static void
two_deaths_in_a_row_are_both_recovered(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10/hour");
    assert_true(hit(limiter, "a"));
    for (unsigned death = 1; death <= 2; death++) {
        const pid_t pid = fork();
        if (pid == 0) {
            tg__table_hook = hold_and_die;
            hit(limiter, "a");
            _exit(0);
        }
        assert_int_equal(child_end(pid), -SIGKILL);
        if (death == 2)
            break;
        /* the second child finds the first one's lock, inherits it and dies in turn */
    }
    assert_true(hit(limiter, "a"));
    assert_int_equal(remaining(limiter, "a"), 8);
    assert_int_equal(stats_of(store).owner_deaths, 2);
    assert_table_sound(path_of("t"));
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* The kernel shows a killed child as a zombie until its parent asks. */
static void
a_zombie_is_dead(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10/hour");
    const pid_t pid = fork();
    if (pid == 0) {
        tg__table_hook = hold_and_die;
        hit(limiter, "a");
        _exit(0);
    }
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    const uint64_t begun = now_us();
    assert_true(hit(limiter, "a"));
    assert_true(now_us() - begun < SECOND);
    assert_int_equal(remaining(limiter, "a"), 9);
    child_end(pid);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* A word as a process would have left it whose number the kernel has given to another since: here, to us. */
static void
a_reused_process_number_does_not_keep_a_lock(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10/hour");
    assert_true(hit(limiter, "a"));
    tg_map map = bytes_of(path_of("t"));
    atomic_store(&tg__map_area(&map, 0).segment->lock, tg__lock_self() ^ UINT64_C(1) << 23); /* another start time */
    assert_true(hit(limiter, "a"));
    assert_int_equal(stats_of(store).owner_deaths, 1);
    munmap(map.base, map.bytes);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_deaths_in_a_row_are_both_recovered),
        cmocka_unit_test(a_zombie_is_dead),
        cmocka_unit_test(a_reused_process_number_does_not_keep_a_lock),
        cmocka_unit_test(a_death_at_any_step_leaves_before_or_after),
        cmocka_unit_test(a_death_at_any_step_of_the_recovery_is_recovered_too),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
