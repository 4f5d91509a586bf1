/* What a busy machine adds to the time that something takes, as the kernel tells it. Must not enter: what is timed. */
#ifndef TG_TEST_BUSY_H
#define TG_TEST_BUSY_H

#include <stdint.h>
#include <stdio.h>

/* For how long this thread was ready and had no processor, so far; where the kernel does not tell: 0. */
static inline uint64_t
unserved_us(void)
{
    unsigned long long ran_ns = 0, waited_ns = 0;
    FILE *stat = fopen("/proc/thread-self/schedstat", "r");
    if (stat) {
        if (fscanf(stat, "%llu %llu", &ran_ns, &waited_ns) != 2)
            waited_ns = 0;
        fclose(stat);
    }
    return waited_ns / 1000;
}

#endif
