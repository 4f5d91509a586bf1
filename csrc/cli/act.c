/* tidegate set, pause, list and reset: acting on a site while it runs. */
#include "cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OVERRIDES_MAX = 256 };

/* ---- what they share ---- */

int
cli_parts(const char *command, int count, char **arguments, tg_part parts[CLI_PARTS_MAX],
          tg_dimension dimensions[CLI_PARTS_MAX])
{
    if (count > CLI_PARTS_MAX)
        return cli_misused(command, "at most %d values", CLI_PARTS_MAX), -1;
    for (int i = 0; i < count; i++) {
        const char *equal = strchr(arguments[i], '=');
        if (!equal || equal == arguments[i])
            return cli_misused(command, "%.80s: expected KIND=VALUE, such as ip=203.0.113.9", arguments[i]), -1;
        parts[i] = (tg_part){ { arguments[i], (size_t)(equal - arguments[i]) }, tg_text_of(equal + 1) };
        dimensions[i] = (tg_dimension){ &parts[i], 1 };
    }
    return count;
}

tg_limiter *
cli_open_policy(const char *config, const char *store, const char *policy, tg_gate **gate)
{
    const tg_gate_options options = {
        .path = tg_text_of(config), .store = tg_text_of(store), .look = true, .unwatched = true
    };
    tg_limiter *limiter = NULL;
    tg_error error;
    if (tg_gate_open(&options, gate, &error) != TG_OK) {
        cli_fail("%s", error.message);
        return NULL;
    }
    if (tg_gate_stands_in(*gate))
        cli_fail("there is no table yet for user %lu, so nothing runs that could follow; start the site, run this as its "
                 "user, or name its store with --store", (unsigned long)geteuid());
    else if (tg_gate_limiter(*gate, tg_text_of(policy), &limiter, &error) != TG_OK)
        cli_fail("%s", error.message);
    if (!limiter) {
        tg_gate_close(*gate);
        *gate = NULL;
    }
    return limiter;
}

bool
cli_open_site(const char *config, const char *uri, cli_site *site)
{
    const char *named = config ? config : getenv("TIDEGATE_CONFIG"), *store = getenv("TIDEGATE_STORE");
    const bool by_file = named && named[0] && (config || !((uri && uri[0]) || (store && store[0])));
    tg_error error;
    *site = (cli_site){ 0 };
    if (!by_file) {
        if (tg_store_open(tg_text_of(uri), &(tg_store_options){ .existing = true }, &site->store, &error) == TG_OK)
            return true;
        if (error.system_error == ENOENT)
            cli_fail("%s; start the site, or name its store with --store or its rules file with --config", error.message);
        else
            cli_fail("%s", error.message);
        return false;
    }
    const tg_gate_options options = {
        .path = tg_text_of(named), .store = tg_text_of(uri), .look = true, .unwatched = true
    };
    if (tg_gate_open(&options, &site->gate, &error) != TG_OK) {
        cli_fail("%s", error.message);
        return false;
    }
    site->store = tg_gate_store(site->gate);
    if (!tg_gate_stands_in(site->gate))
        return true;
    cli_close_site(site);
    cli_fail("the store of %.200s has no table yet for user %lu, nothing has been counted there; start the site, run this as "
             "its user, or name its store with --store", named, (unsigned long)geteuid());
    return false;
}

void
cli_close_site(cli_site *site)
{
    if (site->gate)
        tg_gate_close(site->gate);
    else
        tg_store_close(site->store);
    *site = (cli_site){ 0 };
}

/* "90s", "10m", "2h", "1d". false: anything else, and what is over a year. */
static bool
read_duration(const char *text, uint64_t *us)
{
    static const struct {
        char unit;
        uint64_t seconds;
    } units[] = { { 's', 1 }, { 'm', 60 }, { 'h', 3600 }, { 'd', 86400 } };
    char *end;
    const unsigned long long number = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || end[0] == '\0' || end[1] != '\0' || number == 0 || number > 31536000)
        return false;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (*end == units[i].unit && number <= 31536000 / units[i].seconds) {
            *us = number * units[i].seconds * 1000000;
            return true;
        }
    return false;
}

static int
ended(tg_limiter *limiter, tg_gate *gate, tg_status status, const tg_error *error, const char *policy, const char *done)
{
    tg_limiter_close(limiter);
    tg_gate_close(gate);
    if (status != TG_OK)
        return cli_fail("%s", error->message);
    printf("%s: %s\n", policy, done);
    return CLI_FINE;
}

/* ---- set ---- */

static const char set_usage[] =
    "usage: tidegate set POLICY RULES [KIND=VALUE]... --for TIME [--config FILE] [--store URI]\n"
    "       tidegate set POLICY --end [KIND=VALUE]... [--config FILE] [--store URI]\n"
    "\n"
    "Other rules for a policy of the rules file, or for one client of it, in all processes from the next request on. They are\n"
    "over by themselves.\n"
    "\n"
    "  tidegate set login 5/minute user=42 --for 10m\n"
    "\n"
    "  KIND=VALUE      of the policy's `by`; none: everybody\n"
    "  --user NAME, --ip ADDRESS   the same as user=NAME and ip=ADDRESS\n"
    "  --for TIME      90s, 10m, 2h, 1d; at most a year\n"
    "  --end           ends it now\n"
    "  --config FILE   the rules file (else TIDEGATE_CONFIG)\n"
    "  --store URI     else TIDEGATE_STORE, the file's store, shared://default\n";

int
cli_set(int count, char **arguments)
{
    const char *uri = NULL, *config = NULL, *time = NULL, *user = NULL, *ip = NULL;
    bool end = false;
    const cli_option options[] = {
        { .name = "--store", .value = &uri }, { .name = "--config", .value = &config }, { .name = "--for", .value = &time },
        { .name = "--user", .value = &user }, { .name = "--ip", .value = &ip },         { .name = "--end", .flag = &end },
        { 0 },
    };
    tg_part parts[CLI_PARTS_MAX + 2];
    tg_dimension dimensions[CLI_PARTS_MAX + 2];
    uint64_t duration_us = 0;
    count = cli_options(count, arguments, options, set_usage);
    if (count < 0)
        return CLI_USAGE;
    const int before = end ? 2 : 3;
    if (count < before)
        return cli_misused("set", end ? "expected a policy" : "expected a policy and its rules");
    if (!end && (!time || !read_duration(time, &duration_us)))
        return cli_misused("set", "--for %.40s: expected a time such as 90s, 10m, 2h or 1d", time ? time : "is missing");
    if (end && count > 2 && !strchr(arguments[2], '='))
        return cli_misused("set", "%.80s: --end takes no rules, only KIND=VALUE of whom it ends for", arguments[2]);
    int given = cli_parts("set", count - before, arguments + before, parts, dimensions);
    if (given < 0)
        return CLI_USAGE;
    if (user) {
        parts[given] = (tg_part){ tg_text_of("user"), tg_text_of(user) };
        dimensions[given] = (tg_dimension){ &parts[given], 1 };
        given++;
    }
    if (ip) {
        parts[given] = (tg_part){ tg_text_of("ip"), tg_text_of(ip) };
        dimensions[given] = (tg_dimension){ &parts[given], 1 };
        given++;
    }
    tg_gate *gate;
    tg_limiter *limiter = cli_open_policy(config, uri, arguments[1], &gate);
    if (!limiter)
        return CLI_FAILED;
    tg_error error;
    const tg_status status = tg_limiter_override(limiter, dimensions, (size_t)given, tg_text_of(end ? NULL : arguments[2]),
                                                 duration_us, &error);
    return ended(limiter, gate, status, &error, arguments[1], end ? "as in the file again" : "set");
}

/* ---- pause ---- */

static const char pause_usage[] =
    "usage: tidegate pause POLICY --for TIME [--config FILE] [--store URI]\n"
    "       tidegate pause POLICY --end [--config FILE] [--store URI]\n"
    "\n"
    "Lets everybody through a policy for a while, in all processes, and counts nothing meanwhile. It is over by itself.\n"
    "\n"
    "  --for TIME      90s, 10m, 2h, 1d; at most a year\n"
    "  --end           ends it now\n"
    "  --config FILE   the rules file (else TIDEGATE_CONFIG)\n"
    "  --store URI     else TIDEGATE_STORE, the file's store, shared://default\n";

int
cli_pause(int count, char **arguments)
{
    const char *uri = NULL, *config = NULL, *time = NULL;
    bool end = false;
    const cli_option options[] = {
        { .name = "--store", .value = &uri }, { .name = "--config", .value = &config }, { .name = "--for", .value = &time },
        { .name = "--end", .flag = &end },    { 0 },
    };
    uint64_t duration_us = 0;
    count = cli_options(count, arguments, options, pause_usage);
    if (count < 0)
        return CLI_USAGE;
    if (count != 2)
        return cli_misused("pause", "expected one policy");
    if (!end && (!time || !read_duration(time, &duration_us)))
        return cli_misused("pause", "--for %.40s: expected a time such as 90s, 10m, 2h or 1d", time ? time : "is missing");
    tg_gate *gate;
    tg_limiter *limiter = cli_open_policy(config, uri, arguments[1], &gate);
    if (!limiter)
        return CLI_FAILED;
    tg_error error;
    const tg_status status = tg_limiter_pause(limiter, duration_us, &error);
    return ended(limiter, gate, status, &error, arguments[1], end ? "limits again" : "paused");
}

/* ---- list ---- */

static const char list_usage[] =
    "usage: tidegate list [--config FILE] [--store URI] [--json]\n"
    "\n"
    "Which overrides and pauses stand, and for how long.\n"
    "\n"
    "  --config FILE   the rules file that names the store (else TIDEGATE_CONFIG)\n"
    "  --store URI     else TIDEGATE_STORE, the file's store, shared://default\n"
    "  --json          one JSON list\n";

static void
clean(char *text)
{
    for (; *text; text++) /* from shared memory: no control character gets out */
        if (*text < ' ' || *text > '~')
            *text = '?';
}

int
cli_list(int count, char **arguments)
{
    static tg_override overrides[OVERRIDES_MAX];
    const char *uri = NULL, *config = NULL;
    bool as_json = false;
    const cli_option options[] = {
        { .name = "--config", .value = &config },
        { .name = "--store", .value = &uri },
        { .name = "--json", .flag = &as_json },
        { 0 },
    };
    count = cli_options(count, arguments, options, list_usage);
    if (count < 0)
        return CLI_USAGE;
    if (count > 1)
        return cli_misused("list", "%.80s: no such argument", arguments[1]);
    cli_site site;
    tg_error error;
    size_t found = 0;
    if (!cli_open_site(config, uri, &site))
        return CLI_FAILED;
    const tg_status status = tg_store_list_overrides(site.store, overrides, OVERRIDES_MAX, &found, &error);
    const uint64_t now_us = tg_store_now_us(site.store);
    cli_close_site(&site);
    if (status != TG_OK)
        return cli_fail("%s", error.message);
    found = found < OVERRIDES_MAX ? found : OVERRIDES_MAX;
    tg_json json = { .sink = cli_put, .context = stdout };
    if (as_json)
        tg__json_open(&json, NULL, '[');
    for (size_t i = 0; i < found; i++) {
        tg_override *one = &overrides[i];
        const uint64_t left_us = one->until_us > now_us ? one->until_us - now_us : 0;
        clean(one->policy);
        clean(one->space);
        clean(one->rules);
        clean(one->shown);
        if (as_json) {
            tg__json_open(&json, NULL, '{');
            tg__json_text(&json, "namespace", tg_text_of(one->space));
            tg__json_text(&json, "policy", tg_text_of(one->policy));
            tg__json_text(&json, "kind", tg_text_of(one->kind == TG_OVERRIDE_PAUSE ? "pause" : "rules"));
            tg__json_text(&json, "rules", tg_text_of(one->rules));
            tg__json_text(&json, "identity", tg_text_of(one->shown));
            tg__json_number(&json, "left_us", left_us);
            tg__json_close(&json, '}');
        } else {
            printf("%s: %s for %s, %" PRIu64 " s left\n", one->policy,
                   one->kind == TG_OVERRIDE_PAUSE ? "paused" : one->rules, one->shown, (left_us + 999999) / 1000000);
        }
    }
    if (as_json)
        tg__json_close(&json, ']');
    else if (found == 0)
        puts("none");
    return CLI_FINE;
}

/* ---- reset ---- */

static const char reset_usage[] =
    "usage: tidegate reset POLICY KIND=VALUE... [--config FILE] [--store URI]\n"
    "\n"
    "Forgets what one client has used under a policy of the rules file, for all processes. The values are those of the\n"
    "policy's `by`:\n"
    "\n"
    "  tidegate reset login ip=203.0.113.9 'header:X-Account=anna'\n"
    "\n"
    "  --config FILE   the rules file (else TIDEGATE_CONFIG)\n"
    "  --store URI     else TIDEGATE_STORE, the file's store, shared://default\n";

int
cli_reset(int count, char **arguments)
{
    const char *uri = NULL, *config = NULL;
    const cli_option options[] = { { .name = "--store", .value = &uri }, { .name = "--config", .value = &config }, { 0 } };
    tg_part parts[CLI_PARTS_MAX];
    tg_dimension dimensions[CLI_PARTS_MAX];
    count = cli_options(count, arguments, options, reset_usage);
    if (count < 0)
        return CLI_USAGE;
    if (count < 3)
        return cli_misused("reset", "expected a policy and KIND=VALUE");
    const int given = cli_parts("reset", count - 2, arguments + 2, parts, dimensions);
    if (given < 0)
        return CLI_USAGE;
    tg_gate *gate;
    tg_limiter *limiter = cli_open_policy(config, uri, arguments[1], &gate);
    if (!limiter)
        return CLI_FAILED;
    tg_error error;
    const tg_status status = tg_limiter_reset(limiter, dimensions, (size_t)given, &error);
    return ended(limiter, gate, status, &error, arguments[1], "forgotten");
}
