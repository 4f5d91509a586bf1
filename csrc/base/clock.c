/* The manual clock, and the one that deadlines go by. */
#include "base/base.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct tg_clock {
    _Atomic uint64_t now_us;
    atomic_uint references;
};

tg_status
tg_clock_open(uint64_t now_us, tg_clock **clock, tg_error *error)
{
    /* Half of the range: no sum of a time and a period can then overflow. */
    if (now_us > INT64_MAX)
        return tg__error(error, TG_E_ARG, "a clock's time is at most 2^63 - 1 us");
    tg_clock *made = malloc(sizeof *made);
    if (!made)
        return tg__error(error, TG_E_NOMEM, "clock: %zu bytes", sizeof *made);
    atomic_init(&made->now_us, now_us);
    atomic_init(&made->references, 1);
    *clock = made;
    return TG_OK;
}

uint64_t
tg_clock_now_us(const tg_clock *clock)
{
    return atomic_load_explicit(&clock->now_us, memory_order_acquire);
}

void
tg_clock_set_us(tg_clock *clock, uint64_t now_us)
{
    atomic_store_explicit(&clock->now_us, now_us > INT64_MAX ? INT64_MAX : now_us, memory_order_release);
}

void
tg_clock_advance_us(tg_clock *clock, uint64_t by_us)
{
    uint64_t now = atomic_load(&clock->now_us), then;
    do {
        then = by_us > (uint64_t)INT64_MAX - now ? INT64_MAX : now + by_us;
    } while (!atomic_compare_exchange_weak(&clock->now_us, &now, then));
}

void
tg_clock_retain(tg_clock *clock)
{
    atomic_fetch_add_explicit(&clock->references, 1, memory_order_relaxed);
}

void
tg_clock_close(tg_clock *clock)
{
    if (clock && atomic_fetch_sub_explicit(&clock->references, 1, memory_order_acq_rel) == 1)
        free(clock);
}

uint64_t
tg__monotonic_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}
