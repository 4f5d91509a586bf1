/* Many processes on one table: sums are exact, also on a saturated machine and while processes are killed.
 * TIDEGATE_LONG=1 lets the killing go on for 60 s. */
#include "tests/c/stores/table/table_test.h"

#define PROCESSES 8
#define HITS 50000
#define KEYS 100

typedef struct worker {
    volatile uint32_t pending;          /* key + 1 while a hit is under way */
    volatile uint32_t stop;
    volatile uint64_t unanswered;       /* degraded or failed */
    volatile uint64_t slow, hits;       /* slower than 1 ms */
    volatile uint32_t admitted[KEYS];
} worker;

static worker *
workers_make(size_t count)
{
    worker *workers = mmap(NULL, count * sizeof *workers, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(workers, MAP_FAILED);
    return workers;
}

static void
hit_once(tg_limiter *limiter, worker *mine, uint32_t key)
{
    char name[16];
    tg_decision decision;
    snprintf(name, sizeof name, "key %u", key);
    const tg_part part = { .value = tg_text_of(name) };
    const tg_dimension dimension = { &part, 1 };
    mine->pending = key + 1;
    const tg_status status = tg_limiter_hit(limiter, &dimension, 1, 1, &decision, NULL);
    if (status != TG_OK || decision.degraded || decision.overflow)
        mine->unanswered++;
    else if (decision.allowed)
        mine->admitted[key]++;
    mine->pending = 0;
    mine->hits++;
}

/* A step of a generator, so that processes do not march in line. */
static uint32_t
next_random(uint32_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 17;
    *seed ^= *seed << 5;
    return *seed;
}

static uint64_t
sum_of(const worker *workers, size_t count, uint32_t key)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += workers[i].admitted[key];
    return sum;
}

static uint64_t
used(tg_limiter *limiter, uint64_t limit, uint32_t key)
{
    tg_decision decision;
    char name[16];
    snprintf(name, sizeof name, "key %u", key);
    const tg_part part = { .value = tg_text_of(name) };
    const tg_dimension dimension = { &part, 1 };
    assert_int_equal(tg_limiter_peek(limiter, &dimension, 1, 1, &decision, NULL), TG_OK);
    assert_false(decision.degraded);
    return limit - decision.remaining;
}

/* Rules whose counts do not drain while a test runs. */
static const struct {
    const char *rules;
    uint64_t limit;
} steady[] = {
    { "1000/10year fixed_window", 1000 },      { "1000/10year sliding_log", 1000 },
    { "1000/10year sliding_counter", 1000 },   { "1/10year burst 1000 token_bucket", 1000 },
    { "1/10year burst 1000 leaky_bucket", 1000 }, { "1000/10year sliding_log resolution 30d", 1000 },
};

static void
eight_processes_admit_exactly_the_limit_for_every_algorithm(void **state)
{
    (void)state;
    for (size_t r = 0; r < sizeof steady / sizeof *steady; r++) {
        unlink(path_of("t"));
        tg_store *store = store_of(uri_of("t"), NULL);
        tg_limiter *limiter = limiter_of(store, steady[r].rules);
        worker *workers = workers_make(PROCESSES);
        pid_t pids[PROCESSES];
        for (size_t i = 0; i < PROCESSES; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                uint32_t seed = (uint32_t)(i + 1) * 2654435761u;
                for (uint32_t n = 0; n < HITS; n++)
                    hit_once(limiter, &workers[i], next_random(&seed) % KEYS);
                _exit(0);
            }
        }
        for (size_t i = 0; i < PROCESSES; i++) {
            assert_int_equal(child_end(pids[i]), 0);
            assert_true(workers[i].unanswered == 0);
        }
        for (uint32_t key = 0; key < KEYS; key++) {
            assert_int_equal(sum_of(workers, PROCESSES, key), steady[r].limit);
            assert_int_equal(used(limiter, steady[r].limit, key), steady[r].limit);
        }
        assert_int_equal(stats_of(store).evicted, 0);
        assert_table_sound(path_of("t"));
        munmap(workers, PROCESSES * sizeof *workers);
        tg_limiter_close(limiter);
        tg_store_close(store);
    }
}

/* Sums below the limit are exact too: each admitted hit is in the table, and no other. */
static void
every_admitted_hit_is_counted_once(void **state)
{
    (void)state;
    static const char *const rules[] = { "10000000000/10year fixed_window", "10000000000/10year sliding_counter",
                                         "1/10year burst 10000000000 token_bucket",
                                         "10000000000/10year sliding_log resolution 30d" };
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        unlink(path_of("t"));
        tg_store *store = store_of(uri_of("t?size=1MiB"), NULL);
        tg_limiter *limiter = limiter_of(store, rules[r]);
        worker *workers = workers_make(PROCESSES);
        pid_t pids[PROCESSES];
        for (size_t i = 0; i < PROCESSES; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                for (uint32_t n = 0; n < HITS / 5; n++)
                    hit_once(limiter, &workers[i], n % 3);
                _exit(0);
            }
        }
        for (size_t i = 0; i < PROCESSES; i++)
            assert_int_equal(child_end(pids[i]), 0);
        uint64_t sum = 0;
        for (uint32_t key = 0; key < 3; key++) {
            assert_int_equal(used(limiter, 10000000000, key), sum_of(workers, PROCESSES, key));
            sum += sum_of(workers, PROCESSES, key);
        }
        assert_int_equal(sum, PROCESSES * (HITS / 5));
        munmap(workers, PROCESSES * sizeof *workers);
        tg_limiter_close(limiter);
        tg_store_close(store);
    }
}

/* ---- killed ---- */

typedef struct storm {
    const char *rules;
    uint64_t limit;
    bool slowly; /* a log fills: few hits a second */
} storm;

static pid_t
start_hitter(tg_limiter *limiter, worker *mine, uint32_t seed, bool slowly)
{
    const pid_t pid = fork();
    if (pid == 0) {
        while (!mine->stop) {
            for (int burst = 0; burst < 50 && !mine->stop; burst++)
                hit_once(limiter, mine, next_random(&seed) % KEYS);
            if (slowly)
                sleep_us(20000);
        }
        _exit(0);
    }
    return pid;
}

static void
weather(const storm *of, uint64_t duration_us)
{
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=2MiB"), NULL);
    tg_limiter *limiter = limiter_of(store, of->rules);
    worker *workers = workers_make(PROCESSES);
    uint32_t lost[KEYS] = { 0 }, seed = 12345, kills = 0;
    pid_t pids[PROCESSES];
    for (uint32_t i = 0; i < PROCESSES; i++)
        pids[i] = start_hitter(limiter, &workers[i], i + 1, of->slowly);
    const uint64_t begun = now_us();
    while (now_us() - begun < duration_us) {
        sleep_us(50000);
        const uint32_t i = next_random(&seed) % PROCESSES;
        assert_int_equal(kill(pids[i], SIGKILL), 0);
        assert_int_equal(child_end(pids[i]), -SIGKILL);
        kills++;
        if (workers[i].pending) {
            lost[workers[i].pending - 1]++; /* charged or not: its answer was heard by nobody */
            workers[i].pending = 0;
        }
        pids[i] = start_hitter(limiter, &workers[i], seed, of->slowly);
    }
    uint64_t hits = 0;
    for (size_t i = 0; i < PROCESSES; i++)
        workers[i].stop = 1;
    for (size_t i = 0; i < PROCESSES; i++) {
        assert_int_equal(child_end(pids[i]), 0); /* nobody hangs */
        assert_true(workers[i].unanswered == 0);
        hits += workers[i].hits;
    }
    for (uint32_t key = 0; key < KEYS; key++) {
        const uint64_t heard = sum_of(workers, PROCESSES, key), counted = used(limiter, of->limit, key);
        if (counted < heard || counted > heard + lost[key])
            fail_msg("%s, key %u: %" PRIu64 " admitted, %" PRIu64 " counted, %u killed in a hit", of->rules, key, heard,
                     counted, lost[key]);
    }
    assert_table_sound(path_of("t"));
    print_message("%s: %u killed, %" PRIu64 " locks taken back, %" PRIu64 " hits\n", of->rules, kills,
                  stats_of(store).owner_deaths, hits);
    munmap(workers, PROCESSES * sizeof *workers);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
a_killed_process_loses_at_most_one_hit_per_kill_and_key_and_invents_none(void **state)
{
    (void)state;
    static const storm storms[] = {
        { "10000000000/10year fixed_window", 10000000000, false },
        { "1000/10year sliding_log", 1000, true },
        { "10000000000/10year sliding_log resolution 30d", 10000000000, false },
        { "1/10year burst 10000000000 token_bucket", 10000000000, false },
        { "10000000000/10year sliding_counter", 10000000000, false },
    };
    const size_t count = sizeof storms / sizeof *storms;
    const char *is_long = getenv("TIDEGATE_LONG");
    const uint64_t total_us = is_long && *is_long == '1' ? 60 * SECOND : 10 * SECOND;
    for (size_t i = 0; i < count; i++)
        weather(&storms[i], total_us / count);
}

/* ---- saturated ---- */

static void
sums_stay_exact_on_a_saturated_machine(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=1MiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10000000000/10year fixed_window; 1000/10year sliding_log");
    worker *workers = workers_make(PROCESSES);
    pid_t pids[PROCESSES], busy[PROCESSES];
    for (size_t i = 0; i < PROCESSES; i++) {
        busy[i] = fork();
        if (busy[i] == 0)
            for (volatile uint64_t turns = 0;; turns++)
                continue;
    }
    for (size_t i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            uint32_t seed = (uint32_t)i + 77;
            while (!workers[i].stop)
                hit_once(limiter, &workers[i], next_random(&seed) % 4);
            _exit(0);
        }
    }
    sleep_us(3 * SECOND);
    for (size_t i = 0; i < PROCESSES; i++)
        workers[i].stop = 1;
    uint64_t unanswered = 0;
    for (size_t i = 0; i < PROCESSES; i++) {
        child_end(pids[i]);
        unanswered += workers[i].unanswered;
    }
    for (size_t i = 0; i < PROCESSES; i++) {
        kill(busy[i], SIGKILL);
        child_end(busy[i]);
    }
    assert_true(unanswered == 0); /* a preempted holder lets nobody through */
    for (uint32_t key = 0; key < 4; key++)
        assert_int_equal(sum_of(workers, PROCESSES, key), 1000);
    assert_int_equal(stats_of(store).timeouts, 0);
    assert_table_sound(path_of("t"));
    munmap(workers, PROCESSES * sizeof *workers);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* ---- rows of docs/faults.md ---- */

/* R02: all at once at one instant. */
static void
of_a_hundred_requests_released_together_exactly_five_pass(void **state)
{
    (void)state;
    for (int round = 0; round < 20; round++) {
        unlink(path_of("t"));
        tg_clock *clock = clock_at(1700000000 * SECOND);
        tg_store *store = store_of(uri_of("t?size=64KiB"), clock);
        tg_limiter *limiter = limiter_of(store, "5/second");
        worker *workers = workers_make(11);
        pid_t pids[10];
        for (size_t i = 0; i < 10; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                while (!workers[10].stop)
                    continue;
                for (int n = 0; n < 10; n++)
                    hit_once(limiter, &workers[i], 0);
                _exit(0);
            }
        }
        sleep_us(2000);
        workers[10].stop = 1;
        for (size_t i = 0; i < 10; i++)
            assert_int_equal(child_end(pids[i]), 0);
        assert_int_equal(sum_of(workers, 10, 0), 5);
        munmap(workers, 11 * sizeof *workers);
        tg_limiter_close(limiter);
        tg_store_close(store);
        tg_clock_close(clock);
    }
}

/* R04 */
static void
sixteen_processes_on_one_key_get_its_rate_and_its_burst(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "100/second burst 1");
    worker *workers = workers_make(16);
    pid_t pids[16];
    const uint64_t begun = tg_store_now_us(store);
    for (size_t i = 0; i < 16; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            while (!workers[i].stop)
                hit_once(limiter, &workers[i], 0);
            _exit(0);
        }
    }
    sleep_us(2 * SECOND);
    for (size_t i = 0; i < 16; i++)
        workers[i].stop = 1;
    for (size_t i = 0; i < 16; i++)
        child_end(pids[i]);
    const uint64_t took = tg_store_now_us(store) - begun;
    const uint64_t allowed = sum_of(workers, 16, 0);
    assert_true(allowed <= 1 + took * 100 / SECOND);
    assert_true(allowed >= 20); /* nobody is starved, however busy the machine */
    munmap(workers, 16 * sizeof *workers);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* R158 */
static void
contention_is_no_error_and_999_of_1000_hits_take_less_than_a_millisecond(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "1000/minute token_bucket");
    worker *workers = workers_make(PROCESSES);
    pid_t pids[PROCESSES];
    for (size_t i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            while (!workers[i].stop) {
                const uint64_t begun = now_us();
                hit_once(limiter, &workers[i], 0);
                workers[i].slow += now_us() - begun >= 1000;
            }
            _exit(0);
        }
    }
    sleep_us(2 * SECOND);
    uint64_t slow = 0, hits = 0, unanswered = 0;
    for (size_t i = 0; i < PROCESSES; i++)
        workers[i].stop = 1;
    for (size_t i = 0; i < PROCESSES; i++) {
        child_end(pids[i]);
        slow += workers[i].slow;
        hits += workers[i].hits;
        unanswered += workers[i].unanswered;
    }
    print_message("%" PRIu64 " hits, %" PRIu64 " slower than 1 ms\n", hits, slow);
    assert_int_equal(unanswered, 0);
#if !defined(__SANITIZE_ADDRESS__) /* instrumented, a hit is several times as long and meets more changes of process */
    assert_true(slow * 1000 < hits);
#endif
    munmap(workers, PROCESSES * sizeof *workers);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* R155, as a pre-fork server does it; tests/python/test_table_processes.py has pools by fork and by spawn. */
static void
forty_forked_processes_share_one_state_also_in_memory(void **state)
{
    (void)state;
    const char *const uris[] = { "memory://forty", uri_of("t?size=1MiB") };
    for (size_t u = 0; u < 2; u++) {
        tg_store *store = store_of(uris[u], NULL);
        tg_limiter *limiter = limiter_of(store, "7/hour");
        worker *workers = workers_make(40);
        pid_t pids[40];
        for (size_t i = 0; i < 40; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                for (int n = 0; n < 20; n++)
                    hit_once(limiter, &workers[i], 0);
                _exit(0);
            }
        }
        for (size_t i = 0; i < 40; i++)
            assert_int_equal(child_end(pids[i]), 0);
        assert_int_equal(sum_of(workers, 40, 0), 7);
        munmap(workers, 40 * sizeof *workers);
        tg_limiter_close(limiter);
        tg_store_close(store);
        unlink(path_of("t"));
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_processes_admit_exactly_the_limit_for_every_algorithm),
        cmocka_unit_test(every_admitted_hit_is_counted_once),
        cmocka_unit_test(a_killed_process_loses_at_most_one_hit_per_kill_and_key_and_invents_none),
        cmocka_unit_test(sums_stay_exact_on_a_saturated_machine),
        cmocka_unit_test(of_a_hundred_requests_released_together_exactly_five_pass),
        cmocka_unit_test(sixteen_processes_on_one_key_get_its_rate_and_its_burst),
        cmocka_unit_test(contention_is_no_error_and_999_of_1000_hits_take_less_than_a_millisecond),
        cmocka_unit_test(forty_forked_processes_share_one_state_also_in_memory),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
