/* tidegate: the limiter from a shell. Which command, and what all of them share.
 * Must not enter: what one command does. */
#include "cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name;
    int (*run)(int, char **);
    const char *what;
} commands[] = {
    { "init", cli_init, "write a first rules file, with comments" },
    { "check", cli_check, "say what is wrong with a rules file, and what is hardly meant" },
    { "compile", cli_compile, "write the rules as tidegate-cgi reads them, without YAML" },
    { "explain", cli_explain, "why a request is answered as it is; takes nothing" },
    { "stats", cli_stats, "what has been decided, by policy and outcome; for people, JSON, Prometheus" },
    { "top", cli_top, "decisions a second by policy, again and again" },
    { "set", cli_set, "other rules for a policy, or for one client of it, for a while" },
    { "pause", cli_pause, "let everybody through a policy for a while" },
    { "list", cli_list, "which overrides and pauses stand" },
    { "reset", cli_reset, "forget what one client has used under a policy" },
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static void
print_usage(FILE *file)
{
    fputs("usage: tidegate COMMAND [argument]...\n\n", file);
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(file, "  %-8s  %s\n", commands[i].name, commands[i].what);
    fputs("\n  tidegate COMMAND --help tells more; --version.\n"
          "\n"
          "TIDEGATE_CONFIG names the rules file and TIDEGATE_STORE the store where no option does.\n"
          "Exit status: 0 fine, 1 something failed or is wrong, 2 wrong usage.\n",
          file);
}

/* ---- options */

static const cli_option *
find_option(const cli_option *options, const char *argument, size_t length)
{
    for (const cli_option *option = options; option->name; option++)
        if (strlen(option->name) == length && memcmp(option->name, argument, length) == 0)
            return option;
    return NULL;
}

int
cli_options(int count, char **arguments, const cli_option *options, const char *usage)
{
    int left = 1;
    bool plain = false; /* behind "--" */
    for (int i = 1; i < count; i++) {
        char *argument = arguments[i];
        if (plain || argument[0] != '-' || argument[1] == '\0') {
            arguments[left++] = argument;
            continue;
        }
        if (strcmp(argument, "--") == 0) {
            plain = true;
            continue;
        }
        if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) {
            fputs(usage, stdout);
            exit(cli_leave(CLI_FINE));
        }
        const char *equal = strchr(argument, '=');
        const size_t length = equal ? (size_t)(equal - argument) : strlen(argument);
        const cli_option *option = find_option(options, argument, length);
        if (!option) {
            cli_misused(arguments[0], "%.*s: unknown option", (int)length, argument);
            return -1;
        }
        if (option->flag) {
            if (equal) {
                cli_misused(arguments[0], "%s takes no value", option->name);
                return -1;
            }
            *option->flag = true;
            continue;
        }
        const char *value = equal ? equal + 1 : i + 1 < count ? arguments[++i] : NULL;
        if (!value) {
            cli_misused(arguments[0], "%s: its value is missing", option->name);
            return -1;
        }
        if (option->value)
            *option->value = value;
        else if (!option->each(value, option->context))
            return -1;
    }
    return left;
}

/* ---- telling */

int
cli_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("tidegate: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return CLI_FAILED;
}

int
cli_misused(const char *command, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "tidegate %s: ", command);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "; see tidegate %s --help\n", command);
    va_end(arguments);
    return CLI_USAGE;
}

void
cli_put(void *file, tg_text piece)
{
    fwrite(piece.data, 1, piece.length, file);
}

void
cli_coloured(FILE *file, int colour, const char *word)
{
    const char *none = getenv("NO_COLOR"), *terminal = getenv("TERM"); /* https://no-color.org */
    if (isatty(fileno(file)) && !(none && none[0]) && terminal && strcmp(terminal, "dumb") != 0)
        fprintf(file, "\033[%dm%s\033[0m", colour, word);
    else
        fputs(word, file);
}

void
cli_notices(void)
{
    tg_notice notice;
    while (tg_notice_pending() && tg_notice_take(&notice))
        fprintf(stderr, "tidegate: %s: %s\n", notice.code, notice.message);
}

int
cli_leave(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    return cli_fail("writing the answer: %s", strerror(errno));
}

int
main(int count, char **arguments)
{
    if (count < 2) {
        print_usage(stderr);
        return CLI_USAGE;
    }
    if (strcmp(arguments[1], "--help") == 0 || strcmp(arguments[1], "-h") == 0 || strcmp(arguments[1], "help") == 0) {
        print_usage(stdout);
        return cli_leave(CLI_FINE);
    }
    if (strcmp(arguments[1], "--version") == 0) {
        puts("tidegate " TG_VERSION);
        return cli_leave(CLI_FINE);
    }
    for (size_t i = 0; i < COMMANDS; i++)
        if (strcmp(arguments[1], commands[i].name) == 0)
            return cli_leave(commands[i].run(count - 1, arguments + 1));
    fprintf(stderr, "tidegate: \"%.80s\" is no command; see tidegate --help\n", arguments[1]);
    return CLI_USAGE;
}
