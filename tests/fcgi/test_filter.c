/* The filter of system calls: what is refused, and what goes on. Each in a process of its own: it is for good. */
#include "fcgi/process.h"

#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* Runs `checks` filtered; its status is how many of the checks failed. */
static int
run(bool runs, int (*checks)(void))
{
    const pid_t child = fork();
    if (child == 0) {
        char error[160];
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || !fcgi_process_filter(runs, false, error, sizeof error))
            _exit(99);
        _exit(checks());
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

#define REFUSED(call) ((call) == -1 && errno == EPERM ? 0 : 1)

static int
reach_out(void)
{
    const struct timespec now = { .tv_sec = 1 };
    return REFUSED(ptrace(PTRACE_TRACEME, 0, NULL, NULL)) + REFUSED(mount("none", "/nowhere", "tmpfs", 0, NULL)) +
           REFUSED(unshare(0)) + REFUSED(chroot("/")) + REFUSED(clock_settime(CLOCK_REALTIME, &now));
}

static void
calls_that_reach_out_are_refused(void **unused)
{
    (void)unused;
    assert_int_equal(run(true, reach_out), 0);
    assert_int_equal(run(false, reach_out), 0);
}

static int
work(void)
{
    const pid_t child = fork();
    if (child == 0)
        execl("/bin/true", "true", (char *)NULL);
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
}

static void
programs_start_where_they_may(void **unused)
{
    (void)unused;
    assert_int_equal(run(true, work), 0);
}

static int
start_a_program(void)
{
    execl("/bin/true", "true", (char *)NULL);
    return errno == EPERM ? 0 : 1;
}

static void
no_program_starts_where_none_may(void **unused)
{
    (void)unused;
    assert_int_equal(run(false, start_a_program), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_that_reach_out_are_refused),
        cmocka_unit_test(programs_start_where_they_may),
        cmocka_unit_test(no_program_starts_where_none_may),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
