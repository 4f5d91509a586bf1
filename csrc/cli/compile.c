/* tidegate compile: rules for processes that live for one request. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: tidegate compile [RULES] [-o FILE] [--check]\n"
    "\n"
    "Reads a rules file (else TIDEGATE_CONFIG) with all that it includes, checks it, and writes it in a form that needs no\n"
    "parsing: RULES.compiled, or FILE. tidegate-cgi reads only such rules; every face can. it appears whole or not at all.\n"
    "\n"
    "  -o, --output FILE  where to write\n"
    "  --check            write nothing; exit status 1 if what is there is older than its sources\n";

int
cli_compile(int count, char **arguments)
{
    const char *output = NULL;
    bool check = false;
    const cli_option options[] = {
        { .name = "-o", .value = &output },
        { .name = "--output", .value = &output },
        { .name = "--check", .flag = &check },
        { 0 },
    };
    count = cli_options(count, arguments, options, usage);
    if (count < 0)
        return CLI_USAGE;
    const char *rules = count > 1 ? arguments[1] : getenv("TIDEGATE_CONFIG");
    if (!rules || !rules[0])
        return cli_misused("compile", "no rules file: give its path, or set TIDEGATE_CONFIG");
    if (count > 2)
        return cli_misused("compile", "\"%.80s\": expected one rules file", arguments[2]);
    char *beside = malloc(strlen(rules) + sizeof ".compiled");
    if (!beside)
        return cli_fail("out of memory");
    strcpy(stpcpy(beside, rules), ".compiled");
    const char *path = output ? output : beside;
    int code = CLI_FINE;
    tg_error error;
    if (check) {
        bool changed = false;
        char what[200];
        if (tg_rules_changed(path, &changed, what, sizeof what, &error) != TG_OK)
            code = cli_fail("%s", error.message);
        else if (changed)
            code = cli_fail("%s was compiled before %s changed", path, what);
        else
            printf("%s: as its sources are\n", path);
    } else if (tg_rules_compile(rules, path, &error) != TG_OK) {
        code = cli_fail("%s", error.message);
    } else {
        printf("%s: written\n", path);
    }
    free(beside);
    return code;
}
