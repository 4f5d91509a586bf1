/* The shared vectors (tests/vectors/), answered by the pure functions. */
#include "pure.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define FOLDER "tests/vectors"

static size_t
run_file(const char *name)
{
    static pure_table table;
    static char line[TRACE_LINE_BYTES];
    char path[512];
    snprintf(path, sizeof path, "%s/%s", FOLDER, name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t checked = 0;
    pure_begin(&table);
    for (unsigned number = 1; fgets(line, sizeof line, file); number++) {
        const trace_step step = trace_read(line);
        const char *fault;
        const tg_decision *decision = pure_step(&table, &step, &fault);
        if (fault)
            fail_msg("%s:%u: %s", path, number, fault);
        if (!decision)
            continue;
        char said[160];
        trace_numbers(said, sizeof said, decision->allowed, decision->remaining, decision->retry_after_us,
                      decision->reset_after_us, decision->delay_us);
        if (strcmp(said, step.expected) != 0)
            fail_msg("%s:%u: %s: expected %s, got %s", path, number, step.text, step.expected, said);
        checked++;
    }
    fclose(file);
    pure_begin(&table);
    return checked;
}

static void
pure_functions_give_every_shared_vector(void **unused)
{
    (void)unused;
    DIR *folder = opendir(FOLDER);
    assert_non_null(folder); /* run from the repository */
    size_t files = 0;
    for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
        const char *ending = strrchr(entry->d_name, '.');
        if (!ending || strcmp(ending, ".txt") != 0)
            continue;
        assert_true(run_file(entry->d_name) > 0);
        files++;
    }
    closedir(folder);
    assert_true(files >= 8);
}

int
main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(pure_functions_give_every_shared_vector) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
