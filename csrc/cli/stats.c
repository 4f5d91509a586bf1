/* tidegate stats and top: the counts of a running site. */
#include "cli.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { POLICIES_MAX = 1024 };

static bool
open_counts(const char *config, const char *uri, cli_site *site)
{
    tg_store_stats stats;
    tg_error error;
    if (!cli_open_site(config, uri, site))
        return false;
    if (tg_store_remote(site->store) ||
        (tg_store_read_stats(site->store, &stats, &error) == TG_OK && stats.table_bytes > 0))
        return true;
    cli_close_site(site);
    cli_fail("this store is nobody else's: stats and top read shared:// and redis:// stores");
    return false;
}

/* ---- stats ---- */

static const char stats_usage[] =
    "usage: tidegate stats [--config FILE] [--store URI] [--json | --prometheus]\n"
    "\n"
    "Decisions by policy and outcome of all processes since the table was made (on Redis: of all machines), how long decisions\n"
    "took, and how full the table is.\n"
    "\n"
    "  --config FILE  the rules file that names the store (else TIDEGATE_CONFIG)\n"
    "  --store URI    else TIDEGATE_STORE, the file's store, shared://default\n"
    "  --json         one JSON object\n"
    "  --prometheus   Prometheus' text format, for a node exporter's textfile folder\n";

int
cli_stats(int count, char **arguments)
{
    const char *uri = NULL, *config = NULL;
    bool as_json = false, prometheus = false;
    const cli_option options[] = {
        { .name = "--config", .value = &config },
        { .name = "--store", .value = &uri },
        { .name = "--json", .flag = &as_json },
        { .name = "--prometheus", .flag = &prometheus },
        { 0 },
    };
    count = cli_options(count, arguments, options, stats_usage);
    if (count < 0)
        return CLI_USAGE;
    if (count > 1)
        return cli_misused("stats", "%.80s: no such argument", arguments[1]);
    if (as_json && prometheus)
        return cli_misused("stats", "--json or --prometheus, not both");
    cli_site site;
    if (!open_counts(config, uri, &site))
        return CLI_FAILED;
    tg_error error;
    const tg_metrics_format format = as_json ? TG_METRICS_JSON : prometheus ? TG_METRICS_PROMETHEUS : TG_METRICS_TEXT;
    const tg_status status = tg_store_write_metrics(site.store, format, cli_put, stdout, &error);
    cli_close_site(&site);
    return status == TG_OK ? CLI_FINE : cli_fail("%s", error.message);
}

/* ---- top ---- */

static const char top_usage[] =
    "usage: tidegate top [--config FILE] [--store URI] [--every SECONDS] [--times N]\n"
    "\n"
    "Decisions a second by policy, the busiest first, again and again. Ends with Ctrl-C, or after N looks.\n"
    "\n"
    "  --config FILE     the rules file that names the store (else TIDEGATE_CONFIG)\n"
    "  --store URI       else TIDEGATE_STORE, the file's store, shared://default\n"
    "  --every SECONDS   between two looks (1)\n"
    "  --times N         how many looks (no end)\n";

typedef struct rate {
    const tg_policy_metrics *now;
    uint64_t allowed, refused, other, sum;
} rate;

static uint64_t
since(const tg_policy_metrics *now, const tg_policy_metrics *before, tg_metric metric)
{
    const uint64_t was = before ? before->counts[metric] : 0;
    return now->counts[metric] >= was ? now->counts[metric] - was : now->counts[metric]; /* less: a new table */
}

static int
busiest_first(const void *left, const void *right)
{
    const rate *a = left, *b = right;
    if (a->sum != b->sum)
        return a->sum > b->sum ? -1 : 1;
    return strcmp(a->now->policy, b->now->policy);
}

static void
print_rates(const tg_policy_metrics *before, size_t before_count, const tg_policy_metrics *now, size_t now_count,
            double seconds)
{
    static rate rates[POLICIES_MAX];
    for (size_t i = 0; i < now_count; i++) {
        const tg_policy_metrics *was = NULL;
        for (size_t k = 0; k < before_count && !was; k++)
            if (strcmp(before[k].policy, now[i].policy) == 0 && strcmp(before[k].space, now[i].space) == 0)
                was = &before[k];
        rate *one = &rates[i];
        *one = (rate){ .now = &now[i], .allowed = since(&now[i], was, TG_METRIC_ALLOWED) };
        one->refused = since(&now[i], was, TG_METRIC_DENIED) + since(&now[i], was, TG_METRIC_FORBIDDEN) +
                       since(&now[i], was, TG_METRIC_UNIDENTIFIED);
        one->other = since(&now[i], was, TG_METRIC_EXEMPT) + since(&now[i], was, TG_METRIC_DEGRADED);
        one->sum = one->allowed + one->refused + one->other;
    }
    qsort(rates, now_count, sizeof *rates, busiest_first);
    printf("%12s %12s %12s  policy\n", "allowed/s", "refused/s", "other/s");
    for (size_t i = 0; i < now_count; i++) {
        char name[TG_NAME_BYTES_MAX + 1];
        size_t length = 0;
        for (const char *at = rates[i].now->policy; *at; at++) /* from shared memory: no control character gets out */
            name[length++] = *at >= ' ' && *at <= '~' ? *at : '?';
        name[length] = '\0';
        printf("%12.1f %12.1f %12.1f  %s\n", (double)rates[i].allowed / seconds, (double)rates[i].refused / seconds,
               (double)rates[i].other / seconds, name);
    }
    fflush(stdout);
}

static double
clock_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static volatile sig_atomic_t leaving;

static void
leave(int signal_number)
{
    (void)signal_number;
    leaving = 1;
}

int
cli_top(int count, char **arguments)
{
    static tg_policy_metrics looks[2][POLICIES_MAX];
    const char *uri = NULL, *config = NULL, *every_text = "1", *times_text = "0";
    const cli_option options[] = {
        { .name = "--config", .value = &config },
        { .name = "--store", .value = &uri },
        { .name = "--every", .value = &every_text },
        { .name = "--times", .value = &times_text },
        { 0 },
    };
    count = cli_options(count, arguments, options, top_usage);
    if (count < 0)
        return CLI_USAGE;
    char *every_end, *times_end;
    const double every = strtod(every_text, &every_end);
    const unsigned long times = strtoul(times_text, &times_end, 10);
    if (count > 1)
        return cli_misused("top", "%.80s: no such argument", arguments[1]);
    if (*every_end || every_end == every_text || !(every >= 0.05 && every <= 3600))
        return cli_misused("top", "--every %.40s: expected seconds between 0.05 and 3600", every_text);
    if (*times_end || *times_text < '0' || *times_text > '9')
        return cli_misused("top", "--times %.40s: expected a number", times_text);
    cli_site site;
    if (!open_counts(config, uri, &site))
        return CLI_FAILED;
    signal(SIGINT, leave);
    signal(SIGTERM, leave);
    tg_error error;
    size_t counts[2] = { 0, 0 };
    tg_status status = tg_store_read_metrics(site.store, looks[0], POLICIES_MAX, &counts[0], NULL, &error);
    double looked = clock_seconds();
    for (unsigned long i = 1; status == TG_OK && !leaving; i++) {
        poll(NULL, 0, (int)(every * 1000));
        if (leaving)
            break;
        const size_t now = i % 2;
        status = tg_store_read_metrics(site.store, looks[now], POLICIES_MAX, &counts[now], NULL, &error);
        const double at = clock_seconds();
        if (isatty(STDOUT_FILENO))
            fputs("\033[H\033[J", stdout);
        if (status == TG_OK)
            print_rates(looks[1 - now], counts[1 - now] < POLICIES_MAX ? counts[1 - now] : POLICIES_MAX, looks[now],
                        counts[now] < POLICIES_MAX ? counts[now] : POLICIES_MAX, at - looked);
        looked = at;
        if (i == times || ferror(stdout))
            break;
    }
    cli_close_site(&site);
    return status == TG_OK ? CLI_FINE : cli_fail("%s", error.message);
}
