/* The gate over a fork that happens while other threads judge and reload.
 *
 * test-builds: plain The sanitizers' own allocators do not carry their locks over a fork of a process with threads,
 * as glibc's does: under them the child hangs in free(), not in the gate. */
#include "tidegate.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

enum { FORKS = 40, RELOADS = 40 };

static atomic_bool stop;

static tg_status
judge(tg_gate *gate)
{
    const tg_request request = { .path = tg_text_of("/a"), .peer = tg_text_of("192.0.2.1") };
    tg_judgement judgement;
    return tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL);
}

static void *
judge_on(void *gate)
{
    while (!atomic_load(&stop))
        if (judge(gate) != TG_OK)
            return (void *)1;
    return NULL;
}

static void *
reload_on(void *gate)
{
    while (!atomic_load(&stop))
        if (tg_gate_reload(gate, NULL) != TG_OK)
            return (void *)1;
    return NULL;
}

static void
a_child_forked_in_the_middle_reloads_and_judges(void **unused)
{
    (void)unused;
    char path[] = "/tmp/tidegate-gate-XXXXXX";
    static const char rules[] = "policies:\n"
                                "  - {name: all, rules: 1000000/hour sliding_counter, also: true}\n"
                                "  - {name: a, rules: 1000000/hour sliding_counter, match: {path: /a}}\n";
    const int fd = mkstemp(path);
    assert_true(fd != -1);
    assert_int_equal(write(fd, rules, sizeof rules - 1), sizeof rules - 1);
    close(fd);
    tg_gate *gate;
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of("memory://gate-fork") };
    assert_int_equal(tg_gate_open(&options, &gate, NULL), TG_OK);
    for (int i = 0; i < FORKS; i++) {
        pthread_t judging, reloading;
        void *result;
        int status;
        atomic_store(&stop, false);
        assert_int_equal(pthread_create(&judging, NULL, judge_on, gate), 0);
        assert_int_equal(pthread_create(&reloading, NULL, reload_on, gate), 0);
        usleep((useconds_t)(200 + i * 37));
        const pid_t child = fork();
        if (child == 0) {
            alarm(30); /* a lock that nobody here holds would be waited for until then */
            for (int j = 0; j < RELOADS; j++)
                if (tg_gate_reload(gate, NULL) != TG_OK || judge(gate) != TG_OK)
                    _exit(1);
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        atomic_store(&stop, true);
        pthread_join(judging, &result);
        assert_null(result);
        pthread_join(reloading, &result);
        assert_null(result);
    }
    tg_gate_close(gate);
    unlink(path);
}

int
main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_child_forked_in_the_middle_reloads_and_judges) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
