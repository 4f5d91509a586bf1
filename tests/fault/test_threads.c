/* Many threads on one table, while its file is replaced under them; run by the thread sanitizer too. */
#include "tests/c/stores/table/table_test.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/resource.h>

#define THREADS 8
/* The thread sanitizer makes each hit some fifty times slower, and a fork more. */
#if defined(__SANITIZE_THREAD__)
#define HITS 2000u
#define FORKS 20
#else
#define HITS 20000u
#define FORKS 200
#endif

typedef struct job {
    tg_limiter *limiter;
    const char *keys;
    unsigned hits;
    atomic_bool *stop; /* NULL: `hits` of them */
    uint64_t admitted, unanswered;
} job;

static void *
work(void *memory)
{
    job *mine = memory;
    char keys[64];
    tg_decision decision;
    for (unsigned n = 0; mine->stop ? !atomic_load(mine->stop) : n < mine->hits; n++) {
        snprintf(keys, sizeof keys, mine->keys, n % 10, n % 7);
        if (ask(mine->limiter, HIT, keys, 1, &decision) != TG_OK || decision.degraded)
            mine->unanswered++;
        else
            mine->admitted += decision.allowed;
    }
    return NULL;
}

static uint64_t
run(tg_limiter *limiter, const char *keys, size_t count, unsigned hits)
{
    pthread_t threads[128];
    static job jobs[128];
    uint64_t admitted = 0;
    for (size_t i = 0; i < count; i++) {
        jobs[i] = (job){ .limiter = limiter, .keys = keys, .hits = hits };
        assert_int_equal(pthread_create(&threads[i], NULL, work, &jobs[i]), 0);
    }
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(jobs[i].unanswered, 0);
        admitted += jobs[i].admitted;
    }
    return admitted;
}

static void
eight_threads_admit_exactly_the_limit(void **state)
{
    (void)state;
    static const char *const rules[] = { "1000/10year fixed_window", "1000/10year sliding_log",
                                         "1000/10year sliding_counter", "1/10year burst 1000 token_bucket",
                                         "1000/10year sliding_log; 1/10year burst 1000 leaky_bucket" };
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        unlink(path_of("t"));
        tg_store *store = store_of(uri_of("t?size=2MiB"), NULL);
        tg_limiter *limiter = limiter_of(store, rules[r]);
        assert_int_equal(run(limiter, "key%u", THREADS, HITS), 10 * 1000);
        assert_table_sound(path_of("t"));
        tg_limiter_close(limiter);
        tg_store_close(store);
    }
}

/* Dimensions in either order take the same locks in one order. */
static void
several_segments_at_once_are_no_deadlock(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=8MiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10000000000/10year fixed_window");
    assert_int_equal(run(limiter, "a%u b%u c d e", THREADS, HITS), THREADS * HITS);
    tg_decision decision;
    assert_int_equal(ask(limiter, PEEK, "c", 1, &decision), TG_OK);
    assert_int_equal(decision.remaining, 10000000000 - THREADS * HITS);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static unsigned
count_in(const char *folder)
{
    unsigned count = 0;
    DIR *open_folder = opendir(folder);
    assert_non_null(open_folder);
    while (readdir(open_folder))
        count++;
    closedir(open_folder);
    return count;
}

/* R157 */
static void
ten_thousand_hits_from_a_hundred_threads_start_no_thread_and_open_no_file(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=2MiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10/minute");
    run(limiter, "warm%u", 1, 10);
    const unsigned threads = count_in("/proc/self/task"), files = count_in("/proc/self/fd");
    run(limiter, "key%u", 100, 100);
    assert_int_equal(count_in("/proc/self/task"), threads);
    assert_int_equal(count_in("/proc/self/fd"), files);
    tg_limiter_close(limiter);
    tg_store_close(store);
    assert_true(count_in("/proc/self/fd") <= files);
}

/* The file goes away, again and again, while threads are inside. */
static void
threads_move_over_to_a_replaced_file_while_they_hit(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=1MiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10000000000/10year fixed_window");
    atomic_bool stop = false;
    pthread_t threads[4];
    job jobs[4];
    for (size_t i = 0; i < 4; i++) {
        jobs[i] = (job){ .limiter = limiter, .keys = "key%u of%u", .stop = &stop };
        assert_int_equal(pthread_create(&threads[i], NULL, work, &jobs[i]), 0);
    }
    for (int round = 0; round < 3; round++) {
        const uint64_t begun = now_us();
        assert_int_equal(unlink(path_of("t")), 0);
        while (access(path_of("t"), F_OK) != 0 && now_us() - begun < 10 * SECOND)
            sleep_us(10000);
        assert_int_equal(access(path_of("t"), F_OK), 0); /* made anew by whoever looked */
    }
    atomic_store(&stop, true);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(jobs[i].unanswered, 0);
    }
    assert_table_sound(path_of("t"));
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* A child forked while another thread of its parent holds the lock goes on: the parent gives it back. */
static void
a_child_forked_while_a_thread_holds_the_lock_can_hit(void **state)
{
    (void)state;
    unlink(path_of("t"));
    tg_store *store = store_of(uri_of("t?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "10000000000/10year fixed_window");
    atomic_bool stop = false;
    pthread_t threads[2];
    job jobs[2];
    for (size_t i = 0; i < 2; i++) {
        jobs[i] = (job){ .limiter = limiter, .keys = "key", .stop = &stop };
        assert_int_equal(pthread_create(&threads[i], NULL, work, &jobs[i]), 0);
    }
    unsigned wrong = 0;
    for (int n = 0; n < FORKS; n++) {
        const pid_t pid = fork();
        if (pid == 0) {
            alarm(20);
            bool good = true;
            for (int i = 0; i < 20; i++)
                good = hit(limiter, "key") && good;
            _exit(good ? 0 : 1);
        }
        wrong += child_end(pid) != 0;
    }
    atomic_store(&stop, true);
    uint64_t admitted = FORKS * 20;
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        admitted += jobs[i].admitted;
    }
    assert_int_equal(wrong, 0);
    assert_int_equal(remaining(limiter, "key"), 10000000000 - admitted);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_threads_admit_exactly_the_limit),
        cmocka_unit_test(several_segments_at_once_are_no_deadlock),
        cmocka_unit_test(ten_thousand_hits_from_a_hundred_threads_start_no_thread_and_open_no_file),
        cmocka_unit_test(threads_move_over_to_a_replaced_file_while_they_hit),
        cmocka_unit_test(a_child_forked_while_a_thread_holds_the_lock_can_hit),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
