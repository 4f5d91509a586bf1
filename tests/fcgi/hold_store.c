/* Stands still inside a decision, with the segment's lock held: what a store that stalls looks like to a daemon.
 * Built with TG_TEST_HOOKS. usage: hold_store RULES STORE PEER */
#include "stores/table/table.h"

#include <signal.h>
#include <stdio.h>

static void
stop_under_the_lock(const char *step)
{
    if (strcmp(step, "entry saved") == 0) {
        tg__table_hook = NULL; /* once */
        raise(SIGSTOP);
    }
}

int
main(int argument_count, char **arguments)
{
    tg_gate *gate;
    tg_error error;
    tg_judgement judgement;
    if (argument_count != 4)
        return 2;
    const tg_gate_options options = { .path = tg_text_of(arguments[1]), .store = tg_text_of(arguments[2]) };
    if (tg_gate_open(&options, &gate, &error) != TG_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    const tg_request request = {
        .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of(arguments[3])
    };
    tg__table_hook = stop_under_the_lock;
    const tg_status status = tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, &error);
    tg_gate_close(gate);
    return status == TG_OK && judgement.outcome == TG_ALLOWED ? 0 : 1;
}
