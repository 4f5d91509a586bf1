/* Settings of one run: see settings.h.
 *
 * `/limited.cgi?/bin/sh` gives many servers' CGI programs the argument "/bin/sh": a program that would run what its
 * arguments name runs what a client names. So they are not looked at. What a script says is read from its file, which
 * the kernel names in the auxiliary vector, where no client writes. */
#include "settings.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

static void
set_wrong(cgi_settings *settings, const char *what, const char *found)
{
    if (!settings->wrong[0])
        snprintf(settings->wrong, sizeof settings->wrong, "%s: found \"%.100s\"", what, found);
}

/* ---- a script: #!/usr/bin/tidegate-cgi [PROGRAM], then NAME=value lines */

static bool
is_setting(const char *line, size_t length)
{
    static const char *const names[] = { "TIDEGATE_CONFIG", "TIDEGATE_STORE", "TIDEGATE_PROGRAM", "TIDEGATE_POLICY",
                                         "TIDEGATE_KEY", "TIDEGATE_COST", "TIDEGATE_ON_ERROR", "TIDEGATE_ENABLED",
                                         "TIDEGATE_HOLD" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == length && memcmp(names[i], line, length) == 0)
            return true;
    return false;
}

static void
read_line(cgi_settings *settings, char *line, bool first)
{
    char *end = line + strlen(line);
    while (end > line && (end[-1] == '\r' || end[-1] == ' ' || end[-1] == '\t'))
        *--end = '\0';
    if (first) { /* the interpreter is us; what follows is one word to the kernel */
        char *argument = line + 2 + strspn(line + 2, " \t");
        argument += strcspn(argument, " \t");
        argument += strspn(argument, " \t");
        if (*argument)
            setenv("TIDEGATE_PROGRAM", argument, 1);
        return;
    }
    if (*line == '#' || *line == '\0')
        return;
    char *equals = strchr(line, '=');
    if (equals && strncmp(line, "TIDEGATE_", 9) == 0 && !is_setting(line, (size_t)(equals - line))) {
        set_wrong(settings, "the script may set TIDEGATE_CONFIG, _STORE, _PROGRAM, _POLICY, _KEY, _COST, _HOLD, _ON_ERROR, "
                            "_ENABLED", line);
        return;
    }
    if (!equals || !is_setting(line, (size_t)(equals - line))) {
        set_wrong(settings, "the script expects lines such as TIDEGATE_PROGRAM=/path", line);
        return;
    }
    *equals = '\0';
    setenv(line, equals + 1, 1);
}

static void
read_script(cgi_settings *settings)
{
    char text[CGI_SCRIPT_BYTES_MAX + 1];
    const char *path = (const char *)getauxval(AT_EXECFN);
    const int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
    if (fd == -1)
        return;
    ssize_t got = read(fd, text, 2);
    if (got == 2 && memcmp(text, "#!", 2) == 0) /* else it is ourselves */
        got = pread(fd, text, sizeof text, 0);
    else
        got = 0;
    close(fd);
    if (got <= 0)
        return;
    if ((size_t)got == sizeof text) {
        set_wrong(settings, "the script is longer than 4096 bytes", path);
        return;
    }
    text[got] = '\0';
    bool first = true;
    for (char *line = text, *next; line; line = next, first = false) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        read_line(settings, line, first);
    }
}

/* ---- all of them */

static bool
is_nph(void)
{
    const char *path = getenv("SCRIPT_FILENAME");
    if (!path)
        path = getenv("SCRIPT_NAME");
    const char *slash = path ? strrchr(path, '/') : NULL;
    return path && strncmp(slash ? slash + 1 : path, "nph-", 4) == 0;
}

static bool
is_ourselves(const char *program)
{
    struct stat other, own;
    return stat(program, &other) == 0 && stat("/proc/self/exe", &own) == 0 && other.st_dev == own.st_dev &&
           other.st_ino == own.st_ino;
}

static void
read_program(cgi_settings *settings)
{
    const char *program = getenv("TIDEGATE_PROGRAM");
    if (!program || !*program)
        return;
    const char *filename = getenv("SCRIPT_FILENAME");
    settings->is_script_filename_ours = filename && is_ourselves(filename);
    if (strcmp(program, "SCRIPT_FILENAME") == 0) /* for servers that call us as the interpreter of what they found */
        program = filename;
    if (!program || *program != '/') {
        set_wrong(settings, "TIDEGATE_PROGRAM expects an absolute path, or SCRIPT_FILENAME", program ? program : "");
        return;
    }
    if (is_ourselves(program))
        set_wrong(settings, "TIDEGATE_PROGRAM expects another program than tidegate-cgi", program);
    settings->program = program;
}

static void
read_hold(cgi_settings *settings)
{
    const char *text = getenv("TIDEGATE_HOLD");
    char *end;
    if (!text || !*text)
        return;
    const double seconds = strtod(text, &end);
    if (*end || end == text || !(seconds >= 0 && seconds <= 3600))
        set_wrong(settings, "TIDEGATE_HOLD expects seconds from 0 to 3600", text);
    else
        settings->hold_us = (uint64_t)(seconds * 1e6);
}

void
cgi_settings_read(cgi_settings *settings)
{
    *settings = (cgi_settings){ .enabled = true };
    read_script(settings);
    read_program(settings);
    read_hold(settings);
    settings->is_nph = is_nph();
    const char *enabled = getenv("TIDEGATE_ENABLED"), *on_error = getenv("TIDEGATE_ON_ERROR");
    if (enabled && strcmp(enabled, "0") == 0)
        settings->enabled = false;
    else if (enabled && *enabled && strcmp(enabled, "1") != 0)
        set_wrong(settings, "TIDEGATE_ENABLED expects 0 or 1", enabled);
    if (on_error && strcmp(on_error, "open") == 0)
        settings->open_on_error = true;
    else if (on_error && *on_error && strcmp(on_error, "closed") != 0)
        set_wrong(settings, "TIDEGATE_ON_ERROR expects open or closed", on_error);
}

void
cgi_settings_clean(const cgi_settings *settings)
{
    static const char *const ours[] = { "TIDEGATE_PROGRAM", "TIDEGATE_POLICY", "TIDEGATE_KEY", "TIDEGATE_COST",
                                        "TIDEGATE_HOLD", "TIDEGATE_PEEK", "TIDEGATE_BATCH", "TIDEGATE_ON_ERROR", "TIDEGATE_MODE",
                                        "TIDEGATE_TOKEN", "TIDEGATE_NEXT", "TIDEGATE_LIMIT", "TIDEGATE_REMAINING",
                                        "TIDEGATE_RESET", "TIDEGATE_DECIDED_BY" };
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        unsetenv(ours[i]);
    if (settings->program && settings->is_script_filename_ours)
        setenv("SCRIPT_FILENAME", settings->program, 1);
}
