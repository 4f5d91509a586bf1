/* tidegate check: errors and warnings of rules files. */
#include "cli.h"

#include <stdlib.h>

enum { WARNINGS_MAX = 4096 };

static const char usage[] =
    "usage: tidegate check [FILE]... [--face FACE] [--store URI] [--live] [--strict] [--json]\n"
    "\n"
    "Reads each rules file (else TIDEGATE_CONFIG) as a face would and says what is wrong, with line and column, and\n"
    "what is allowed but hardly meant. Opens no store unless told to, and changes nothing.\n"
    "\n"
    "  --face FACE   what asgi, flask, wsgi, fcgi, fcgi-auth, fcgi-relay or cgi cannot know is an error\n"
    "  --store URI   the store in use, where it is not the file's\n"
    "  --live        ask the store too: whether it answers, evicts, holds counts of another secret\n"
    "  --strict      warnings make the exit status 1 too\n"
    "  --json        one JSON list, an object a file\n";

static void
print_text(const char *path, tg_status status, const tg_warning *warnings, size_t shown, size_t count,
           const tg_error *error)
{
    if (status != TG_OK) {
        fputs("tidegate: ", stderr);
        cli_coloured(stderr, 31, "error");
        fprintf(stderr, ": %s\n", error->message);
        return;
    }
    for (size_t i = 0; i < shown; i++) {
        if (warnings[i].line)
            printf("%s:%u:%u: ", path, warnings[i].line, warnings[i].column ? warnings[i].column : 1);
        else
            printf("%s: ", path);
        cli_coloured(stdout, 33, "warning");
        printf(": %s [%s]\n", warnings[i].message, warnings[i].code);
    }
    printf("%s: ok", path);
    if (count)
        printf(", %zu warning%s", count, count == 1 ? "" : "s");
    putchar('\n');
}

static void
print_json(tg_json *json, const char *path, tg_status status, const tg_warning *warnings, size_t shown,
           const tg_error *error)
{
    tg__json_open(json, NULL, '{');
    tg__json_text(json, "file", tg_text_of(path));
    tg__json_flag(json, "ok", status == TG_OK);
    if (status != TG_OK) {
        tg__json_open(json, "error", '{');
        tg__json_text(json, "code", tg_text_of(tg_status_name(status)));
        tg__json_number(json, "line", error->line);
        tg__json_number(json, "column", error->column);
        tg__json_text(json, "message", tg_text_of(error->message));
        tg__json_close(json, '}');
    }
    tg__json_open(json, "warnings", '[');
    for (size_t i = 0; status == TG_OK && i < shown; i++) {
        tg__json_open(json, NULL, '{');
        tg__json_text(json, "code", tg_text_of(warnings[i].code));
        tg__json_number(json, "line", warnings[i].line);
        tg__json_number(json, "column", warnings[i].column);
        tg__json_text(json, "message", tg_text_of(warnings[i].message));
        tg__json_close(json, '}');
    }
    tg__json_close(json, ']');
    tg__json_close(json, '}');
}

int
cli_check(int count, char **arguments)
{
    const char *face = NULL, *store = NULL;
    bool strict = false, as_json = false, live = false;
    const cli_option options[] = {
        { .name = "--face", .value = &face },
        { .name = "--store", .value = &store },
        { .name = "--live", .flag = &live },
        { .name = "--strict", .flag = &strict },
        { .name = "--json", .flag = &as_json },
        { 0 },
    };
    count = cli_options(count, arguments, options, usage);
    if (count < 0)
        return CLI_USAGE;
    const char *named = getenv("TIDEGATE_CONFIG");
    if (count == 1 && !(named && named[0]))
        return cli_misused("check", "no rules file: give its path, or set TIDEGATE_CONFIG");
    tg_warning *warnings = calloc(WARNINGS_MAX, sizeof *warnings);
    if (!warnings)
        return cli_fail("out of memory");
    tg_json json = { .sink = cli_put, .context = stdout };
    int code = CLI_FINE;
    if (as_json)
        tg__json_open(&json, NULL, '[');
    for (int i = 1; i < count || (count == 1 && i == 1); i++) {
        const char *path = count == 1 ? named : arguments[i];
        const tg_check_options check = {
            .path = tg_text_of(path), .store = tg_text_of(store), .face = tg_text_of(face), .live = live
        };
        size_t found = 0;
        tg_error error;
        const tg_status status = tg_check(&check, warnings, WARNINGS_MAX, &found, &error);
        const size_t shown = found < WARNINGS_MAX ? found : WARNINGS_MAX;
        if (status == TG_E_ARG) {
            free(warnings);
            return cli_misused("check", "--face: %s", error.message);
        }
        if (as_json)
            print_json(&json, path, status, warnings, shown, &error);
        else
            print_text(path, status, warnings, shown, found, &error);
        if (status != TG_OK || (strict && found))
            code = CLI_FAILED;
    }
    if (as_json)
        tg__json_close(&json, ']');
    free(warnings);
    return code;
}
