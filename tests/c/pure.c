/* Runs a trace from stdin on the pure functions and prints one line for each hit and peek: what replay.c says of a
 * store, said of the algorithms alone. */
#include "algorithms/pure.h"

int
main(void)
{
    static pure_table table;
    static char line[TRACE_LINE_BYTES];
    unsigned long number = 0;
    pure_begin(&table);
    while (fgets(line, sizeof line, stdin)) {
        number++;
        const trace_step step = trace_read(line);
        const char *fault;
        const tg_decision *decision = pure_step(&table, &step, &fault);
        if (fault) {
            fprintf(stderr, "line %lu: %s: %s", number, fault, line);
            return 1;
        }
        if (decision)
            trace_print(stdout, decision);
    }
    pure_begin(&table);
    return 0;
}
