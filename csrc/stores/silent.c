/* The store that never answers: what stands in where a face cannot refuse to start, so that on_store_failure decides. */
#include "stores/store.h"

#include <stdlib.h>
#include <time.h>

typedef struct silent_store {
    tg_store base;
    tg_error why;
} silent_store;

static tg_status
apply(tg_store *store, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us, tg_result *results,
      bool *overflow, tg_error *error)
{
    (void)op, (void)targets, (void)target_count, (void)until_us, (void)results, (void)overflow;
    if (error) {
        *error = ((silent_store *)store)->why;
        error->status = TG_E_STORE;
    }
    return TG_E_STORE;
}

static tg_status
admit_rule(tg_store *store, const tg_rule *rule, tg_error *error)
{
    (void)store, (void)rule, (void)error;
    return TG_OK;
}

static uint64_t
now_us(tg_store *store)
{
    struct timespec now;
    (void)store;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static int64_t
utc_offset_us(tg_store *store)
{
    (void)store;
    return 0;
}

static tg_status
stats(tg_store *store, tg_store_stats *read, tg_error *error)
{
    (void)read;
    return apply(store, TG_OP_PEEK, NULL, 0, 0, NULL, NULL, error);
}

static void
close_store(tg_store *store)
{
    free(store);
}

static const tg_store_ops silent_ops = {
    .name = "silent",
    .apply = apply,
    .admit_rule = admit_rule,
    .now_us = now_us,
    .utc_offset_us = utc_offset_us,
    .stats = stats,
    .close = close_store,
};

tg_status
tg__silent_open(const char *uri, tg_clock *clock, const tg_error *why, tg_store **store, tg_error *error)
{
    silent_store *made = calloc(1, sizeof *made);
    char *copy = strdup(uri);
    if (!made || !copy) {
        free(made);
        free(copy);
        return tg__error(error, TG_E_NOMEM, "store: %zu bytes", sizeof *made);
    }
    made->base = (tg_store){ .ops = &silent_ops, .uri = copy, .clock = clock, .references = 1, .counts_denied = true };
    made->why = *why;
    if (clock)
        tg_clock_retain(clock);
    *store = &made->base;
    return TG_OK;
}
