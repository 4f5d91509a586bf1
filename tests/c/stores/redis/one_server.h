/* One real Redis for all tests of a program, emptied before each. Must not enter: what is tested with it. */
#ifndef TG_TEST_ONE_SERVER_H
#define TG_TEST_ONE_SERVER_H

#include "server.h"

static server redis;
static char patient_uri[160]; /* numbers are looked at, not time: a busy machine is no fault */

static int
begin_all(void **unused)
{
    (void)unused;
    server_init(&redis, true);
    server_start(&redis, NULL);
    snprintf(patient_uri, sizeof patient_uri, "%s?timeout_ms=2000", redis.uri);
    return 0;
}

static int
end_all(void **unused)
{
    (void)unused;
    server_fini(&redis);
    return 0;
}

static int
begin(void **unused)
{
    (void)unused;
    server_ask(&redis, NULL, "FLUSHALL");
    unsetenv("TIDEGATE_SECRET");
    forget_notices();
    return 0;
}

#endif
