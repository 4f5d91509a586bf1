/* Counting decisions, and what was counted put into words.
 * Must not enter: an identity, in any form. */
#include "core/metrics.h"

#include "base/json.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* ---- counting ---- */

uint64_t
tg__latency_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void
tg__latency_end(tg_store *store, uint64_t began_ns)
{
    store->ops->latency_add(store, tg__latency_clock_ns() - began_ns);
}

void
tg__metrics_one(const tg_limiter *limiter, tg_metric metric)
{
    tg_counter *const line = tg__metric_line(limiter);
    if (line)
        tg__metric_add(line, metric);
}

TG_EACH_REQUEST void
tg__metrics_judged(const tg_bench *bench, const tg_judgement *judgement)
{
    static const uint8_t metrics[TG_OUTCOMES] = {
        [TG_ALLOWED] = TG_METRIC_ALLOWED,     [TG_DENIED] = TG_METRIC_DENIED,
        [TG_FORBIDDEN] = TG_METRIC_FORBIDDEN, [TG_UNIDENTIFIED] = TG_METRIC_UNIDENTIFIED,
        [TG_EXEMPT] = TG_METRIC_EXEMPT,       [TG_UNAVAILABLE] = TG_METRIC_DEGRADED,
    };
    const tg_outcome outcome = judgement->outcome;
    if (outcome == TG_UNMATCHED)
        return;
    tg_metric metric = (tg_metric)metrics[outcome];
    if (__builtin_expect(judgement->decision.degraded, 0) && (outcome == TG_ALLOWED || outcome == TG_DENIED))
        metric = TG_METRIC_DEGRADED;
    const bool each = outcome == TG_ALLOWED || outcome == TG_EXEMPT;
    for (size_t i = 0; i < bench->count; i++) {
        if (!each && i != bench->reported)
            continue;
        if (i == 0 && bench->line)
            tg__metric_add(bench->line, metric);
        else
            tg__metrics_one(bench->limiters[i], metric);
    }
}

/* ---- reading ---- */

const char *
tg_metric_word(tg_metric metric)
{
    static const char *const words[] = {
#define TG_METRIC_WORD(name, word, text) [name] = word,
        TG_METRIC_NAMES(TG_METRIC_WORD)
#undef TG_METRIC_WORD
    };
    return (unsigned)metric < TG_METRICS ? words[metric] : "?";
}

tg_status
tg_store_read_metrics(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count, tg_latency_metrics *latency,
                      tg_error *error)
{
    if (!store->ops->metrics)
        return tg__error(error, TG_E_UNSUPPORTED, "store %s keeps no metrics", store->uri);
    return store->ops->metrics(store, policies, room, count, latency, error);
}

/* ---- writing ---- */

typedef struct report {
    tg_store *store;
    tg_store_stats stats;
    tg_latency_metrics latency;
    tg_policy_metrics *policies; /* sorted */
    size_t count;
    bool counted; /* the store keeps metrics */
    bool table;   /* it is one */
    tg_sink *sink;
    void *context;
} report;

static void __attribute__((format(printf, 2, 3)))
say(const report *r, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length > 0)
        r->sink(r->context, (tg_text){ text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1 });
}

static int
by_name(const void *left, const void *right)
{
    const tg_policy_metrics *a = left, *b = right;
    const int spaces = strcmp(a->space, b->space);
    return spaces ? spaces : strcmp(a->policy, b->policy);
}

typedef struct gauge {
    const char *name, *type, *help;
    size_t offset;
} gauge;

#define STAT(field) offsetof(tg_store_stats, field)
static const gauge gauges[] = {
    { "table_bytes", "gauge", "Bytes of the table.", STAT(table_bytes) },
    { "table_entries", "gauge", "Entries the table has room for.", STAT(entries) },
    { "table_entries_live", "gauge", "Entries in use.", STAT(entries_live) },
    { "table_log_blocks", "gauge", "Log blocks of the table.", STAT(log_blocks) },
    { "table_log_blocks_used", "gauge", "Log blocks in use.", STAT(log_blocks_used) },
    { "table_evicted_total", "counter", "Entries forgotten for lack of room.", STAT(evicted) },
    { "table_overflowed_total", "counter", "Decisions in an overflow bucket.", STAT(overflowed) },
    { "table_full_total", "counter", "Decisions refused a place even there.", STAT(full) },
    { "table_owner_deaths_total", "counter", "Locks taken back from a dead holder.", STAT(owner_deaths) },
    { "table_timeouts_total", "counter", "Decisions that got no lock in time.", STAT(timeouts) },
};
enum { GAUGES = sizeof gauges / sizeof *gauges };

static uint64_t
value_of(const report *r, const gauge *one)
{
    uint64_t value;
    memcpy(&value, (const char *)&r->stats + one->offset, sizeof value);
    return value;
}

/* Names come from shared memory: what is not printable does not reach a terminal, and quotes do not end a label. */
static const char *
label(const char *name, char text[TG_NAME_BYTES_MAX + 1])
{
    tg__text_show(tg_text_of(name), text, TG_NAME_BYTES_MAX + 1);
    for (char *at = text; *at; at++)
        if (*at == '"' || *at == '\\')
            *at = '?';
    return text;
}

/* A Redis may let nobody look. */
static bool
knows_keys(const report *r)
{
    return r->table || r->stats.keys_sampled > 0;
}

static void
write_prometheus(const report *r)
{
    char space[TG_NAME_BYTES_MAX + 1], policy[TG_NAME_BYTES_MAX + 1];
    if (r->counted) {
        say(r, "# HELP tidegate_decisions_total Decisions by policy and outcome.\n"
               "# TYPE tidegate_decisions_total counter\n");
        for (size_t i = 0; i < r->count; i++)
            for (size_t m = 0; m < TG_METRICS; m++)
                say(r, "tidegate_decisions_total{namespace=\"%s\",policy=\"%s\",outcome=\"%s\"} %" PRIu64 "\n",
                    label(r->policies[i].space, space), label(r->policies[i].policy, policy), tg_metric_word((tg_metric)m),
                    r->policies[i].counts[m]);
        say(r, "# HELP tidegate_store_seconds How long the store took to decide, of about one decision in 64.\n"
               "# TYPE tidegate_store_seconds histogram\n");
        uint64_t total = 0;
        for (size_t i = 0; i < TG_LATENCIES; i++) {
            total += r->latency.counts[i];
            if (r->latency.bounds_ns[i] == UINT64_MAX)
                say(r, "tidegate_store_seconds_bucket{le=\"+Inf\"} %" PRIu64 "\n", total);
            else
                say(r, "tidegate_store_seconds_bucket{le=\"%.9g\"} %" PRIu64 "\n", (double)r->latency.bounds_ns[i] / 1e9,
                    total);
        }
        say(r, "tidegate_store_seconds_sum %.9f\ntidegate_store_seconds_count %" PRIu64 "\n",
            (double)r->latency.sum_ns / 1e9, total);
    }
    say(r, "# HELP tidegate_store_failing Whether the store does not answer, as this process sees it.\n"
           "# TYPE tidegate_store_failing gauge\ntidegate_store_failing %d\n",
        atomic_load_explicit(&r->store->failing, memory_order_relaxed));
    if (knows_keys(r))
        say(r, "# HELP tidegate_keys States that are kept, each for one rule and identity.\n# TYPE tidegate_keys gauge\n"
               "tidegate_keys %" PRIu64 "\n# HELP tidegate_keys_bytes Memory that they take.\n"
               "# TYPE tidegate_keys_bytes gauge\ntidegate_keys_bytes %" PRIu64 "\n",
            r->stats.keys, r->stats.keys_bytes);
    for (size_t i = 0; r->table && i < GAUGES; i++)
        say(r, "# HELP tidegate_%s %s\n# TYPE tidegate_%s %s\ntidegate_%s %" PRIu64 "\n", gauges[i].name, gauges[i].help,
            gauges[i].name, gauges[i].type, gauges[i].name, value_of(r, &gauges[i]));
}

static void
write_json(const report *r)
{
    tg_json json = { .sink = r->sink, .context = r->context };
    tg__json_open(&json, NULL, '{');
    tg__json_flag(&json, "counted", r->counted);
    tg__json_open(&json, "policies", '[');
    for (size_t i = 0; i < r->count; i++) {
        tg__json_open(&json, NULL, '{');
        tg__json_text(&json, "namespace", tg_text_of(r->policies[i].space));
        tg__json_text(&json, "policy", tg_text_of(r->policies[i].policy));
        for (size_t m = 0; m < TG_METRICS; m++)
            tg__json_number(&json, tg_metric_word((tg_metric)m), r->policies[i].counts[m]);
        tg__json_close(&json, '}');
    }
    tg__json_close(&json, ']');
    tg__json_open(&json, "store_latency", '[');
    for (size_t i = 0; r->counted && i < TG_LATENCIES; i++) {
        tg__json_open(&json, NULL, '{');
        if (r->latency.bounds_ns[i] == UINT64_MAX)
            tg__json_null(&json, "at_most_ns");
        else
            tg__json_number(&json, "at_most_ns", r->latency.bounds_ns[i]);
        tg__json_number(&json, "decisions", r->latency.counts[i]);
        tg__json_close(&json, '}');
    }
    tg__json_close(&json, ']');
    if (knows_keys(r)) {
        tg__json_number(&json, "keys", r->stats.keys);
        tg__json_number(&json, "keys_bytes", r->stats.keys_bytes);
    }
    tg__json_open(&json, "table", '{');
    for (size_t i = 0; r->table && i < GAUGES; i++)
        tg__json_number(&json, gauges[i].name + sizeof "table_" - 1, value_of(r, &gauges[i]));
    tg__json_close(&json, '}');
    tg__json_close(&json, '}');
}

/* "512 ns", "4 us": bounds are powers of two. */
static void
bound_text(uint64_t ns, char text[24])
{
    if (ns < 1000)
        snprintf(text, 24, "%" PRIu64 " ns", ns);
    else if (ns < 1000000)
        snprintf(text, 24, "%.3g us", (double)ns / 1e3);
    else
        snprintf(text, 24, "%.3g ms", (double)ns / 1e6);
}

static void
write_latency(const report *r)
{
    static const struct {
        const char *name;
        unsigned percent;
    } points[] = { { "half", 50 }, { "90 %", 90 }, { "99 %", 99 } };
    uint64_t total = 0;
    for (size_t i = 0; i < TG_LATENCIES; i++)
        total += r->latency.counts[i];
    if (total == 0)
        return;
    say(r, "decided within");
    for (size_t p = 0; p < sizeof points / sizeof *points; p++) {
        char text[24] = "longer";
        uint64_t below = 0;
        for (size_t i = 0; i < TG_LATENCIES; i++) {
            below += r->latency.counts[i];
            if (below * 100 >= total * points[p].percent) {
                if (r->latency.bounds_ns[i] != UINT64_MAX)
                    bound_text(r->latency.bounds_ns[i], text);
                break;
            }
        }
        say(r, "%s %s (%s)", p ? "," : "", text, points[p].name);
    }
    say(r, " of %" PRIu64 " measured\n", total);
}

static void
write_text(const report *r)
{
    char space[TG_NAME_BYTES_MAX + 1], policy[TG_NAME_BYTES_MAX + 1], both[2 * TG_NAME_BYTES_MAX + 2];
    int width = 6;
    for (size_t i = 0; i < r->count; i++) {
        const int length = (int)strlen(r->policies[i].policy) +
                           (strcmp(r->policies[i].space, "default") ? 1 + (int)strlen(r->policies[i].space) : 0);
        width = length > width ? length : width;
    }
    if (r->count) {
        say(r, "%-*s", width, "policy");
        for (size_t m = 0; m < TG_METRICS; m++)
            say(r, " %13s", tg_metric_word((tg_metric)m));
        say(r, "\n");
    }
    for (size_t i = 0; i < r->count; i++) {
        label(r->policies[i].policy, policy);
        label(r->policies[i].space, space);
        if (strcmp(space, "default") == 0)
            snprintf(both, sizeof both, "%s", policy);
        else
            snprintf(both, sizeof both, "%s/%s", space, policy);
        say(r, "%-*s", width, both);
        for (size_t m = 0; m < TG_METRICS; m++)
            say(r, " %13" PRIu64, r->policies[i].counts[m]);
        say(r, "\n");
    }
    if (!r->counted)
        say(r, "this store keeps no counts by policy; a table does from 1 MiB on\n");
    else if (!r->count)
        say(r, "nothing has been counted yet\n");
    write_latency(r);
    if (knows_keys(r))
        say(r, "%s%" PRIu64 " key%s, %" PRIu64 " KiB\n", r->table ? "" : "about ", r->stats.keys,
            r->stats.keys == 1 ? "" : "s", (r->stats.keys_bytes + 1023) / 1024); /* one key is not nothing */
    if (!r->table)
        return;
    say(r, "table %" PRIu64 " KiB, %" PRIu64 " of %" PRIu64 " entries in use, %" PRIu64 " of %" PRIu64 " log blocks\n",
        r->stats.table_bytes / 1024, r->stats.entries_live, r->stats.entries, r->stats.log_blocks_used,
        r->stats.log_blocks);
    say(r, "evicted %" PRIu64 ", overflowed %" PRIu64 ", full %" PRIu64 ", locks of the dead %" PRIu64 ", timeouts %" PRIu64
           "\n",
        r->stats.evicted, r->stats.overflowed, r->stats.full, r->stats.owner_deaths, r->stats.timeouts);
}

enum { POLICIES_MAX = 1024 };

tg_status
tg_store_write_metrics(tg_store *store, tg_metrics_format format, tg_sink *sink, void *context, tg_error *error)
{
    report r = { .store = store, .table = !tg_store_remote(store), .sink = sink, .context = context };
    tg_status status = tg_store_read_stats(store, &r.stats, error);
    if (status != TG_OK)
        return status;
    r.policies = calloc(POLICIES_MAX, sizeof *r.policies);
    if (!r.policies)
        return tg__error(error, TG_E_NOMEM, "metrics: %d policies", POLICIES_MAX);
    status = tg_store_read_metrics(store, r.policies, POLICIES_MAX, &r.count, &r.latency, error);
    r.counted = status == TG_OK;
    if (status == TG_OK || status == TG_E_UNSUPPORTED) {
        status = TG_OK;
        r.count = r.counted ? (r.count < POLICIES_MAX ? r.count : POLICIES_MAX) : 0;
        qsort(r.policies, r.count, sizeof *r.policies, by_name);
        if (format == TG_METRICS_PROMETHEUS)
            write_prometheus(&r);
        else if (format == TG_METRICS_JSON)
            write_json(&r);
        else
            write_text(&r);
    }
    free(r.policies);
    return status;
}
