/* One line an event on stderr: see log.h. */
#include "log.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES_MAX 1024u /* under PIPE_BUF: a line arrives whole also where processes share a pipe */
#define RARELY_US UINT64_C(1000000)

const char *fcgi_log_name = "tidegate-fcgi";
static _Atomic uint64_t dropped;

static void
write_line(fcgi_level level, const char *code, const char *message)
{
    static const char *const names[] = { "info", "warn", "error" };
    char line[LINE_BYTES_MAX];
    struct pollfd out = { .fd = STDERR_FILENO, .events = POLLOUT };
    if (poll(&out, 1, 0) != 1 || !(out.revents & POLLOUT)) {
        dropped++;
        return;
    }
    const time_t now = time(NULL);
    struct tm utc;
    char when[32];
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    int length = snprintf(line, sizeof line, "%s %s: %s: %s: %s", when, fcgi_log_name, names[level], code,
                          message);
    if (length < 0)
        return;
    size_t end = (size_t)length < sizeof line - 48 ? (size_t)length : sizeof line - 48;
    for (size_t i = 0; i < end; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?';
    if (dropped) {
        length = snprintf(line + end, sizeof line - end, " (%llu lines dropped)", (unsigned long long)dropped);
        end += length > 0 && (size_t)length < sizeof line - end ? (size_t)length : 0;
    }
    line[end++] = '\n';
    if (write(STDERR_FILENO, line, end) < 0)
        dropped++;
    else
        dropped = 0;
}

void
fcgi_log(fcgi_level level, const char *code, const char *format, ...)
{
    char message[LINE_BYTES_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    write_line(level, code, message);
}

void
fcgi_log_rarely(fcgi_log_gate *gate, fcgi_level level, const char *code, const char *format, ...)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    const uint64_t now_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    if (now_us < gate->quiet_until_us) {
        gate->suppressed++;
        return;
    }
    gate->quiet_until_us = now_us + RARELY_US;
    char message[LINE_BYTES_MAX];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (gate->suppressed && length >= 0) {
        const size_t at = (size_t)length < 800 ? (size_t)length : 800;
        snprintf(message + at, sizeof message - at, " (and %llu more like it)", (unsigned long long)gate->suppressed);
        gate->suppressed = 0;
    }
    write_line(level, code, message);
}
