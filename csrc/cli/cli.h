/* What the commands share: options, errors, printing.
 * Must not enter: what a command does. */
#ifndef TG_CLI_H
#define TG_CLI_H

#include "tidegate.h"

#include "base/json.h"

#include <stdbool.h>
#include <stdio.h>

enum { CLI_FINE = 0, CLI_FAILED = 1, CLI_USAGE = 2 };

/* ---- the commands: arguments[0] is the command's name */

int cli_check(int count, char **arguments);
int cli_compile(int count, char **arguments);
int cli_explain(int count, char **arguments);
int cli_init(int count, char **arguments);
int cli_list(int count, char **arguments);
int cli_pause(int count, char **arguments);
int cli_reset(int count, char **arguments);
int cli_set(int count, char **arguments);
int cli_stats(int count, char **arguments);
int cli_top(int count, char **arguments);

/* ---- options */

typedef struct cli_option {
    const char *name;   /* "--config"; NULL ends the list */
    const char **value; /* takes a value ("--config F", "--config=F"); else NULL */
    bool *flag;         /* is there or not; else NULL */
    bool (*each)(const char *value, void *context); /* called for each; false: wrong usage, told already */
    void *context;
} cli_option;

/* Takes the options out of the arguments; what is left is moved to the front, arguments[0] included, and counted. Negative:
 * told on stderr, leave with CLI_USAGE. --help prints `usage` and leaves. */
int cli_options(int count, char **arguments, const cli_option *options, const char *usage);

#define CLI_PARTS_MAX TG_DIMENSIONS_MAX
/* KIND=VALUE arguments as dimensions of one part. Negative: told. */
int cli_parts(const char *command, int count, char **arguments, tg_part parts[CLI_PARTS_MAX],
              tg_dimension dimensions[CLI_PARTS_MAX]);

/* A gate to act on a running site's table, and the limiter of one of its policies; NULL: told. Both are the caller's. */
tg_limiter *cli_open_policy(const char *config, const char *store, const char *policy, tg_gate **gate);

/* The store of a running site, to look at. As everywhere `uri` comes first, then TIDEGATE_STORE, then the store of the rules
 * file; `config` or TIDEGATE_CONFIG names that, and it is read only where it is needed. */
typedef struct cli_site {
    tg_store *store;
    tg_gate *gate; /* whose store it is; NULL: opened by its address */
} cli_site;

/* Only what is there: who looks must not become a table's owner. false: told. */
bool cli_open_site(const char *config, const char *uri, cli_site *site);
void cli_close_site(cli_site *site);

/* ---- telling */

/* "tidegate: ..." on stderr. Returns CLI_FAILED. */
int cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* "tidegate COMMAND: ...; see tidegate COMMAND --help". Returns CLI_USAGE. */
int cli_misused(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A tg_sink to a FILE. */
void cli_put(void *file, tg_text piece);
/* A word in colour where `file` is a terminal that may have it, else as it is. 31 red, 33 yellow, 32 green. */
void cli_coloured(FILE *file, int colour, const char *word);
/* What the library had to say, on stderr. */
void cli_notices(void);
/* stdout written whole, or a failure told. */
int cli_leave(int code);

#endif
