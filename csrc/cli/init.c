/* tidegate init: a first rules file. */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: tidegate init [FILE]\n"
    "\n"
    "Writes a first rules file with comments: rules.yaml, or FILE, or on stdout for \"-\". An existing file is left alone.\n";

/* Passes `tidegate check` without a warning; a test sees to it. */
static const char first_rules[] =
    "# Which requests are limited, how, and by whom they are counted. Every face of tidegate reads this file.\n"
    "#   tidegate check rules.yaml           what is wrong with it, and what is hardly meant\n"
    "#   tidegate explain --config rules.yaml --request 'POST /login' --ip 203.0.113.9\n"
    "# All keys: docs/rules-file.md.\n"
    "\n"
    "# Where counts are kept: a table in memory that all processes of this host share. Nothing has to run for it.\n"
    "store: shared://default\n"
    "\n"
    "# Your own proxies. Only they may say in client_header who the client is; anybody else would choose the address it\n"
    "# is counted by. \"unix:\" is whatever comes over a local socket.\n"
    "trusted_proxies: [127.0.0.1, \"::1\", \"unix:\"]\n"
    "client_header: X-Forwarded-For\n"
    "\n"
    "# What every policy says that does not say otherwise.\n"
    "defaults:\n"
    "  on_store_failure: open       # a store that does not answer lets through; closed: 503\n"
    "  # pause_when: error_rate > 50%   # no refusals on top where most answers are errors already\n"
    "\n"
    "# From the top, the first policy that matches judges a request, and every one marked `also` beside it.\n"
    "policies:\n"
    "  - name: everybody            # a wide net under everything: no single client takes the whole site\n"
    "    rules: 600/minute\n"
    "    by: ip\n"
    "    also: true\n"
    "\n"
    "  - name: login                # guessing passwords: few tries, by address\n"
    "    match: {path: /login, methods: [POST]}\n"
    "    rules: 5/minute; 50/day    # both hold\n"
    "    by: ip\n"
    "    on_store_failure: closed\n"
    "    # count_denied: true         # what is refused counts too: who keeps trying stays out until it is silent\n"
    "    # plans: {header: X-Plan, default: free, free: 5/minute, pro: 50/minute}   # in the place of rules\n"
    "\n"
    "  - name: api                  # short bursts are fine, 100 a second on the whole are not\n"
    "    match: {path: \"/api/*\"}\n"
    "    rules: 100/second burst 200 token_bucket\n"
    "    by: user|ip                # who is signed in by name, others by address\n"
    "\n"
    "  # - name: old-api            # gone for good: 403 to everybody\n"
    "  #   match: {path: \"/v1/*\"}\n"
    "  #   rules: deny\n";

int
cli_init(int count, char **arguments)
{
    const cli_option options[] = { { 0 } };
    count = cli_options(count, arguments, options, usage);
    if (count < 0)
        return CLI_USAGE;
    if (count > 2)
        return cli_misused("init", "%.80s: one file at a time", arguments[2]);
    const char *path = count == 2 ? arguments[1] : "rules.yaml";
    if (strcmp(path, "-") == 0) {
        fputs(first_rules, stdout);
        return CLI_FINE;
    }
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd == -1)
        return errno == EEXIST ? cli_fail("%s is already there and stays as it is; name another file", path)
                               : cli_fail("%s: %s", path, strerror(errno));
    const ssize_t written = write(fd, first_rules, sizeof first_rules - 1);
    const int failed = written != (ssize_t)(sizeof first_rules - 1) ? (errno ? errno : EIO) : 0;
    if (close(fd) != 0 || failed) {
        unlink(path);
        return cli_fail("%s: %s", path, strerror(failed ? failed : errno));
    }
    printf("%s: written. Next: tidegate check %s\n", path, path);
    return CLI_FINE;
}
