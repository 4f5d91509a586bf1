/* One real cluster of three primaries for all tests of a program, emptied before each. NODE_TIMEOUT_MS comes before it: after
 * how long a node that is silent is given up by the others. Must not enter: what is tested with it. */
#ifndef TG_TEST_THREE_NODES_H
#define TG_TEST_THREE_NODES_H

#include "cluster.h"

static cluster three;
static pthread_t lateness;

static inline int
begin_all(void **unused)
{
    (void)unused;
    unsetenv("TIDEGATE_SECRET");
    lateness_begin(&lateness);
    cluster_init(&three, 3, false, NODE_TIMEOUT_MS);
    return 0;
}

static inline int
end_all(void **unused)
{
    (void)unused;
    cluster_fini(&three);
    lateness_end(lateness);
    return 0;
}

static inline int
begin(void **unused)
{
    (void)unused;
    cluster_ask(&three, "FLUSHALL");
    forget_notices();
    return 0;
}

#endif
