/* Counts of decisions in this process, and the lines that they travel in: "=namespace:=policy n n n".
 * Must not enter: sockets, threads of our own. */
#include "stores/redis/keep.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define NAMES_MAX 128u
#define OTHERS (NAMES_MAX - 1) /* where names count together that find no place of their own */
#define SHARDS 8u
#define LINE_WORDS 16u
#define LATENCY_NAME "latency"
#define FIRST_BOUND_NS UINT64_C(8000) /* a denial that is remembered, and a quick server, are both below the second */
#define NAME_BYTES_MAX (2 * (3 * TG_NAME_BYTES_MAX + 1) + 2)

_Static_assert(TG_METRICS <= LINE_WORDS, "a line holds all counters");

struct tg_metric_name {
    char space[TG_NAME_BYTES_MAX + 1], name[TG_NAME_BYTES_MAX + 1];
    uint64_t carried[TG_METRICS], written[TG_METRICS];
    _Alignas(64) _Atomic uint64_t lines[SHARDS][LINE_WORDS];
};

struct tg_counts {
    tg_metric_name *_Atomic names[NAMES_MAX]; /* only ever grows, by one compare-and-swap: safe to fork at any moment */
    _Atomic uint64_t latency[TG_LATENCIES], latency_sum_ns;
    uint64_t latency_carried[TG_LATENCIES + 1], latency_written[TG_LATENCIES + 1];
};

tg_counts *
tg__counts_open(void)
{
    return calloc(1, sizeof(tg_counts));
}

void
tg__counts_close(tg_counts *counts)
{
    for (unsigned i = 0; counts && i < NAMES_MAX; i++)
        free(atomic_load_explicit(&counts->names[i], memory_order_relaxed));
    free(counts);
}

/* ---- counting ---- */

static tg_metric_name *
make_name(const char *space, const char *name)
{
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(tg_metric_name)) != 0)
        return NULL;
    tg_metric_name *made = memory;
    memset(made, 0, sizeof *made);
    snprintf(made->space, sizeof made->space, "%s", space);
    snprintf(made->name, sizeof made->name, "%s", name);
    return made;
}

/* In the last place stand the others. */
const tg_metric_name *
tg__counts_name(tg_counts *counts, const char *space, const char *name)
{
    for (unsigned i = 0; i < NAMES_MAX; i++) {
        tg_metric_name *known = atomic_load_explicit(&counts->names[i], memory_order_acquire);
        if (!known) {
            tg_metric_name *made = i == OTHERS ? make_name("default", "(others)") : make_name(space, name);
            if (!made)
                return NULL;
            if (atomic_compare_exchange_strong(&counts->names[i], &known, made))
                return made;
            free(made);
        }
        if (i == OTHERS || (strcmp(known->space, space) == 0 && strcmp(known->name, name) == 0))
            return known;
    }
    return NULL;
}

/* Threads have their stacks apart. */
_Atomic uint64_t *
tg__counts_line(const tg_metric_name *name)
{
    const uint64_t stack = (uint64_t)(uintptr_t)__builtin_frame_address(0);
    return ((tg_metric_name *)(uintptr_t)name)->lines[(stack >> 23 ^ stack >> 17) % SHARDS];
}

/* Bucket i holds what took at most 8 << i microseconds; the last one the rest. */
void
tg__counts_latency_add(tg_counts *counts, uint64_t latency_ns)
{
    unsigned bucket = 0;
    while (bucket < TG_LATENCIES - 1 && latency_ns > FIRST_BOUND_NS << bucket)
        bucket++;
    atomic_fetch_add_explicit(&counts->latency[bucket], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->latency_sum_ns, latency_ns, memory_order_relaxed);
}

/* ---- carrying ---- */

static uint64_t
sum_of(const tg_metric_name *name, unsigned metric)
{
    uint64_t sum = 0;
    for (unsigned shard = 0; shard < SHARDS; shard++)
        sum += atomic_load_explicit(&name->lines[shard][metric], memory_order_relaxed);
    return sum;
}

static uint64_t
latency_of(const tg_counts *counts, unsigned i)
{
    return atomic_load_explicit(i < TG_LATENCIES ? &counts->latency[i] : &counts->latency_sum_ns, memory_order_relaxed);
}

static size_t
write_numbers(char *to, const uint64_t *now, const uint64_t *before, unsigned count)
{
    size_t length = 0;
    for (unsigned i = 0; i < count; i++)
        length += (size_t)sprintf(to + length, " %" PRIu64, now[i] - before[i]);
    to[length++] = '\n';
    return length;
}

size_t
tg__counts_write(tg_counts *counts, char *text, size_t size)
{
    enum { LINE_MAX_BYTES = NAME_BYTES_MAX + 21 * (LINE_WORDS + 1) + 2 };
    size_t length = 0;
    for (unsigned i = 0; i < NAMES_MAX; i++) {
        tg_metric_name *name = atomic_load_explicit(&counts->names[i], memory_order_acquire);
        if (!name)
            break;
        for (unsigned m = 0; m < TG_METRICS; m++)
            name->written[m] = sum_of(name, m);
        if (memcmp(name->written, name->carried, sizeof name->written) == 0)
            continue;
        if (size - length < LINE_MAX_BYTES) {
            memcpy(name->written, name->carried, sizeof name->written);
            continue;
        }
        length += tg__escape(text + length, name->space);
        text[length++] = ':';
        length += tg__escape(text + length, name->name);
        length += write_numbers(text + length, name->written, name->carried, TG_METRICS);
    }
    for (unsigned i = 0; i <= TG_LATENCIES; i++)
        counts->latency_written[i] = latency_of(counts, i);
    if (memcmp(counts->latency_written, counts->latency_carried, sizeof counts->latency_written) == 0)
        return length;
    if (size - length < LINE_MAX_BYTES) {
        memcpy(counts->latency_written, counts->latency_carried, sizeof counts->latency_written);
        return length;
    }
    memcpy(text + length, LATENCY_NAME, sizeof LATENCY_NAME - 1);
    length += sizeof LATENCY_NAME - 1;
    return length + write_numbers(text + length, counts->latency_written, counts->latency_carried, TG_LATENCIES + 1);
}

void
tg__counts_carried(tg_counts *counts)
{
    for (unsigned i = 0; i < NAMES_MAX; i++) {
        tg_metric_name *name = atomic_load_explicit(&counts->names[i], memory_order_acquire);
        if (!name)
            break;
        memcpy(name->carried, name->written, sizeof name->carried);
    }
    memcpy(counts->latency_carried, counts->latency_written, sizeof counts->latency_carried);
}

void
tg__counts_after_fork(tg_counts *counts)
{
    for (unsigned i = 0; i < NAMES_MAX; i++) {
        tg_metric_name *name = atomic_load_explicit(&counts->names[i], memory_order_acquire);
        for (unsigned m = 0; name && m < TG_METRICS; m++)
            name->carried[m] = sum_of(name, m);
    }
    for (unsigned i = 0; i <= TG_LATENCIES; i++)
        counts->latency_carried[i] = latency_of(counts, i);
}

/* ---- reading ---- */

static unsigned
read_numbers(const char *at, const char *end, uint64_t *numbers, unsigned room)
{
    unsigned count = 0;
    while (at < end && count < room) {
        while (at < end && *at == ' ')
            at++;
        uint64_t number = 0;
        const char *from = at;
        while (at < end && *at >= '0' && *at <= '9' && at - from < 19)
            number = 10 * number + (uint64_t)(*at++ - '0');
        if (at == from)
            break;
        numbers[count++] = number;
    }
    return count;
}

static void
read_policy(tg_text name, const char *at, const char *end, tg_policy_metrics *policies, size_t room, size_t *count)
{
    const char *colon = memchr(name.data, ':', name.length);
    tg_policy_metrics one = { .space = "" };
    if (!colon || !tg__unescape((tg_text){ name.data, (size_t)(colon - name.data) }, one.space, sizeof one.space) ||
        !tg__unescape((tg_text){ colon + 1, (size_t)(name.data + name.length - colon - 1) }, one.policy, sizeof one.policy))
        return;
    read_numbers(at, end, one.counts, TG_METRICS);
    if (*count < room)
        policies[*count] = one;
    ++*count;
}

void
tg__counts_read(tg_text text, tg_policy_metrics *policies, size_t room, size_t *count, tg_latency_metrics *latency)
{
    uint64_t times[TG_LATENCIES + 1] = { 0 };
    *count = 0;
    for (const char *at = text.data, *end = text.data + text.length; at && at < end;) {
        const char *line_end = memchr(at, '\n', (size_t)(end - at));
        const char *blank = memchr(at, ' ', (size_t)((line_end ? line_end : end) - at));
        if (!line_end)
            break;
        const tg_text name = { at, blank ? (size_t)(blank - at) : 0 };
        if (blank && tg__text_is(name, LATENCY_NAME))
            read_numbers(blank, line_end, times, TG_LATENCIES + 1);
        else if (blank)
            read_policy(name, blank, line_end, policies, room, count);
        at = line_end + 1;
    }
    for (unsigned i = 0; latency && i < TG_LATENCIES; i++) {
        latency->bounds_ns[i] = i == TG_LATENCIES - 1 ? UINT64_MAX : FIRST_BOUND_NS << i;
        latency->counts[i] = times[i];
    }
    if (latency)
        latency->sum_ns = times[TG_LATENCIES];
}

/* ---- growth ---- */

bool
tg__growth_look(tg_growth *growth, uint64_t keys)
{
    if (growth->count == TG__GROWTH_LOOKS) {
        memmove(growth->looks, growth->looks + 1, sizeof growth->looks - sizeof *growth->looks);
        growth->count--;
    }
    growth->looks[growth->count++] = keys;
    if (growth->told_at && keys < growth->told_at / 2)
        growth->told_at = 0;
    if (growth->told_at || growth->count < TG__GROWTH_LOOKS || keys < TG__GROWTH_LEAST || keys / 4 < growth->looks[0])
        return false;
    for (unsigned i = 1; i < TG__GROWTH_LOOKS; i++)
        if (growth->looks[i] < growth->looks[i - 1] - growth->looks[i - 1] / 8) /* a sample is not exact */
            return false;
    growth->told_at = keys;
    return true;
}
