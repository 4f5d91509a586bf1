/* tidegate-cgi: one decision a process. Either the decision is the answer, or another CGI program goes on in its place.
 *
 * What is asked and answered is the daemon's (../answer.c): the environment is written as the parameters that a web
 * server would have sent, and its text is ours, byte for byte. Must not enter: sockets, bodies, YAML, Redis. */
#include "../answer.h"
#include "settings.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PARAMS_BYTES_MAX (128u * 1024) /* as the daemon's */
#define DRAIN_IDLE_MS 500
#define DRAIN_SECONDS 5

extern char **environ;

static const char usage[] =
    "usage: tidegate-cgi is run by a web server, as a CGI program (RFC 3875) or as the interpreter of one:\n"
    "\n"
    "  #!/usr/local/bin/tidegate-cgi /usr/lib/cgi-bin/shop.cgi\n"
    "  TIDEGATE_CONFIG=/etc/tidegate/rules.yaml\n"
    "\n"
    "TIDEGATE_CONFIG   the rules, compiled: FILE.compiled beside it, else FILE itself (see tidegate compile)\n"
    "TIDEGATE_STORE    the table, where it is not the rules'\n"
    "TIDEGATE_PROGRAM  the program that goes on when a request is allowed; none: the decision as JSON is the answer\n"
    "TIDEGATE_POLICY, TIDEGATE_KEY, TIDEGATE_COST  as tidegate-fcgi takes them\n"
    "TIDEGATE_HOLD     seconds that an allowed request waits at most for its turn in a leaky bucket (0)\n"
    "TIDEGATE_ON_ERROR open or closed (the default): what happens when the rules cannot be read\n"
    "\n"
    "Arguments are not looked at: a client's query can become them. See tidegate-cgi(1).\n";

/* ---- parameters, as a web server sends them ---- */

typedef struct params {
    uint8_t bytes[PARAMS_BYTES_MAX];
    size_t length;
    bool too_large;
} params;

static void
put_length(params *all, size_t length)
{
    if (length < 0x80) {
        all->bytes[all->length++] = (uint8_t)length;
        return;
    }
    for (int shift = 24; shift >= 0; shift -= 8)
        all->bytes[all->length++] = (uint8_t)(length >> shift | (shift == 24 ? 0x80 : 0));
}

static void
put_param(params *all, const char *name, size_t name_length, const char *value, size_t value_length)
{
    if (name_length > PARAMS_BYTES_MAX || value_length > PARAMS_BYTES_MAX ||
        name_length + value_length + 8 > PARAMS_BYTES_MAX - all->length) {
        all->too_large = true;
        return;
    }
    put_length(all, name_length);
    put_length(all, value_length);
    memcpy(all->bytes + all->length, name, name_length);
    memcpy(all->bytes + all->length + name_length, value, value_length);
    all->length += name_length + value_length;
}

/* Said to this program, to other faces or to the library, and no part of the question. */
static bool
is_setting(const char *name, size_t length)
{
    static const char *const settings[] = { "TIDEGATE_CONFIG", "TIDEGATE_STORE", "TIDEGATE_PROGRAM", "TIDEGATE_ON_ERROR",
                                            "TIDEGATE_HOLD",
                                            "TIDEGATE_ENABLED", "TIDEGATE_SECRET", "TIDEGATE_MODE", "TIDEGATE_TOKEN",
                                            "TIDEGATE_NEXT" };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (strlen(settings[i]) == length && memcmp(settings[i], name, length) == 0)
            return true;
    return false;
}

/* Of a server that sends no REQUEST_URI, which RFC 3875 does not know: what the client asked for, from its decoded parts. */
static void
put_composed_uri(params *all)
{
    static const char hex[] = "0123456789ABCDEF";
    char uri[8192];
    size_t length = 0;
    const char *const parts[] = { getenv("SCRIPT_NAME"), getenv("PATH_INFO") };
    const char *query = getenv("QUERY_STRING");
    for (size_t i = 0; i < 2; i++)
        for (const char *at = parts[i]; at && *at && length < sizeof uri - 4; at++) {
            const unsigned char c = (unsigned char)*at;
            if (c > 0x20 && c < 0x7f && c != '%' && c != '?' && c != '#') {
                uri[length++] = (char)c;
            } else {
                uri[length++] = '%';
                uri[length++] = hex[c >> 4];
                uri[length++] = hex[c & 15];
            }
        }
    if (length == 0)
        uri[length++] = '/';
    const size_t query_length = query ? strlen(query) : 0;
    if (query_length && query_length < sizeof uri - length - 1) {
        uri[length++] = '?';
        memcpy(uri + length, query, query_length);
        length += query_length;
    }
    put_param(all, "REQUEST_URI", 11, uri, length);
}

static void
read_environment(params *all)
{
    for (char **at = environ; at && *at; at++) {
        const char *equals = strchr(*at, '=');
        if (!equals || is_setting(*at, (size_t)(equals - *at)))
            continue;
        put_param(all, *at, (size_t)(equals - *at), equals + 1, strlen(equals + 1));
    }
    const char *uri = getenv("REQUEST_URI");
    if ((!uri || !*uri) && getenv("SCRIPT_NAME"))
        put_composed_uri(all);
}

/* ---- answering ---- */

static bool
write_all(const char *text, size_t length)
{
    while (length > 0) {
        const ssize_t written = write(STDOUT_FILENO, text, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        text += written;
        length -= (size_t)written;
    }
    return true;
}

/* Servers take a program that leaves a body unread for a broken one: fcgiwrap answers 502, Apache's mod_cgid drops the
 * answer. So what is on its way is taken and thrown away, once the answer is out; from a client that dawdles only so much. */
static void
drain(void)
{
    const char *said = getenv("CONTENT_LENGTH");
    const uint64_t length = said ? strtoull(said, NULL, 10) : 0;
    struct stat kind;
    struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN };
    struct timespec now;
    char piece[16384];
    clock_gettime(CLOCK_MONOTONIC, &now);
    const time_t end = now.tv_sec + DRAIN_SECONDS;
    if (length == 0 || fstat(STDIN_FILENO, &kind) == -1 || !(S_ISFIFO(kind.st_mode) || S_ISSOCK(kind.st_mode)))
        return;
    for (uint64_t read_so_far = 0; read_so_far < length && now.tv_sec < end; clock_gettime(CLOCK_MONOTONIC, &now)) {
        if (poll(&in, 1, DRAIN_IDLE_MS) != 1)
            return;
        const ssize_t got = read(STDIN_FILENO, piece, sizeof piece);
        if (got <= 0)
            return;
        read_so_far += (uint64_t)got;
    }
}

/* A CGI answer, or where the server looks at nothing, an HTTP one. */
static void
answer(const cgi_settings *settings, const char *text, size_t length)
{
    static const char status[] = "Status: ";
    char head[64];
    if (settings->is_nph) {
        const char *protocol = getenv("SERVER_PROTOCOL");
        const bool said = length > sizeof status && memcmp(text, status, sizeof status - 1) == 0;
        const bool is_http = protocol && strncmp(protocol, "HTTP/1.", 7) == 0 && strlen(protocol) == 8;
        const int head_length = snprintf(head, sizeof head, "%s %s", is_http ? protocol : "HTTP/1.1",
                                         said ? "" : "200 OK\r\n");
        if (!write_all(head, (size_t)head_length))
            return;
        if (said) {
            text += sizeof status - 1;
            length -= sizeof status - 1;
        }
    }
    if (write_all(text, length)) {
        close(STDOUT_FILENO); /* the answer is whole, whatever becomes of the body */
        drain();
    }
}

static void
refuse(const cgi_settings *settings, const char *status, const char *code, const char *message)
{
    char text[512];
    const char *method = getenv("REQUEST_METHOD");
    const int head = snprintf(text, sizeof text, "Status: %s\r\nContent-Type: application/json\r\n%s\r\n", status,
                              status[0] == '5' && status[2] == '3' ? "Retry-After: 1\r\n" : "");
    const int body = snprintf(text + head, sizeof text - (size_t)head, "{\"code\": \"%s\", \"message\": \"%s\"}", code,
                              message);
    answer(settings, text, (size_t)(strcmp(method, "HEAD") == 0 ? head : head + body));
}

/* The program takes our place, in its own folder, as CGI programs are run; the body and the connection are untouched. */
static void
go_on(const cgi_settings *settings)
{
    char *arguments[] = { (char *)settings->program, NULL };
    char folder[4096];
    const size_t length = (size_t)(strrchr(settings->program, '/') - settings->program);
    if (length > 0 && length < sizeof folder) {
        memcpy(folder, settings->program, length);
        folder[length] = '\0';
        if (chdir(folder) == -1)
            fcgi_log(FCGI_WARN, "folder", "%s: %s", folder, strerror(errno));
    }
    execv(settings->program, arguments);
    fcgi_log(FCGI_ERROR, "program-failed", "%s: %s", settings->program, strerror(errno));
    refuse(settings, "502 Bad Gateway", "BAD_GATEWAY", "The application could not be started.");
}

static void
let_through(const cgi_settings *settings)
{
    static const char unmatched[] = "Content-Type: application/json\r\n\r\n{\"allowed\": true, \"policy\": null}";
    if (settings->program) {
        cgi_settings_clean(settings);
        go_on(settings);
    } else {
        answer(settings, unmatched, sizeof unmatched - 1);
    }
}

/* What the program may want to know, as servers hand on what an authorizer said. */
static void
export_decision(const tg_judgement *judgement)
{
    const tg_decision *decision = &judgement->decision;
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = { { "TIDEGATE_LIMIT", decision->limit },
                    { "TIDEGATE_REMAINING", decision->remaining },
                    { "TIDEGATE_RESET", decision->reset_after_us / 1000000 + (decision->reset_after_us % 1000000 != 0) } };
    char text[24];
    if (judgement->outcome != TG_ALLOWED)
        return;
    setenv("TIDEGATE_DECIDED_BY", judgement->policy, 1);
    for (size_t i = 0; !decision->degraded && i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)numbers[i].value);
        setenv(numbers[i].name, text, 1);
    }
}

/* ---- the gate ---- */

/* For tests: TIDEGATE_NOW_US is the time, and no table that counts by the real one opens with it. */
static tg_status
open_clock(tg_clock **clock, tg_error *error)
{
    const char *now = getenv("TIDEGATE_NOW_US");
    return now ? tg_clock_open(strtoull(now, NULL, 10), clock, error) : TG_OK;
}

static tg_status
open_gate(tg_clock *clock, tg_gate **gate, tg_error *error)
{
    static const char suffix[] = ".compiled";
    const char *path = getenv("TIDEGATE_CONFIG");
    char beside[4096];
    const size_t length = path ? strlen(path) : 0;
    const bool named = length >= sizeof suffix && strcmp(path + length - sizeof suffix + 1, suffix) == 0;
    if (length > 0 && !named && length < sizeof beside - sizeof suffix) {
        memcpy(beside, path, length);
        memcpy(beside + length, suffix, sizeof suffix);
        if (access(beside, F_OK) == 0)
            path = beside;
    }
    const tg_gate_options options = { .path = tg_text_of(path), .clock = clock, .unwatched = true,
                                      .starts_anyway = true, .brief = true };
    return tg_gate_open(&options, gate, error);
}

/* Each process has its first occasion to say a thing, and clients make processes: so lines are counted in the table like
 * anything else, one a minute for each kind. */
static void
say_notices(tg_gate *gate)
{
    const tg_limiter_options options = { .rules = tg_text_of("1/minute sliding_counter"),
                                         .name = tg_text_of("notices"), .space = tg_text_of("tidegate-cgi") };
    tg_notice notice;
    tg_limiter *limiter = NULL;
    if (!tg_notice_pending())
        return;
    tg_limiter_open(tg_gate_store(gate), NULL, &options, &limiter, NULL);
    while (tg_notice_take(&notice)) {
        const tg_part part = { .value = tg_text_of(notice.code) };
        const tg_dimension dimension = { &part, 1 };
        static tg_decision decision;
        if (limiter && tg_limiter_hit(limiter, &dimension, 1, 1, &decision, NULL) == TG_OK && !decision.allowed)
            continue;
        fcgi_log(FCGI_WARN, notice.code, "%s", notice.message);
    }
    tg_limiter_close(limiter);
}

static void
judge(const cgi_settings *settings, tg_gate *gate, tg_clock *clock)
{
    static params all;
    static fcgi_answerer answerer;
    static fcgi_listener listener;
    static char text[FCGI_TEXT_BYTES_MAX];
    const fcgi_mode mode = settings->program ? FCGI_MODE_RELAY : FCGI_MODE_ANSWER;
    fcgi_order order = { .relay = false };
    read_environment(&all);
    answerer.gate = gate;
    answerer.manual = clock;
    answerer.mode = mode;
    listener.fd = -1;
    listener.rights.modes = 1u << mode;
    listener.rights.keyed = true;
    listener.rights.hold_us = settings->hold_us;
    snprintf(listener.text, sizeof listener.text, "CGI");
    const fcgi_call call = {
        .listener = &listener,
        .role = FCGI_RESPONDER,
        .too_large = all.too_large,
        .params = { .data = all.bytes, .length = all.length },
        .body_read = true, /* it is not looked at: what would stand there is missing */
        .order = &order,
    };
    const size_t length = fcgi_answer_call(&answerer, &call, text);
    say_notices(gate);
    if (!order.relay) {
        answer(settings, text, length);
        return;
    }
    if (order.hold_us) { /* its turn in a leaky bucket comes then; a client that leaves meanwhile is not seen */
        const struct timespec turn = { .tv_sec = (time_t)(order.hold_us / 1000000),
                                       .tv_nsec = (long)(order.hold_us % 1000000) * 1000 };
        nanosleep(&turn, NULL);
    }
    /* The program's own fields follow ours, unless it speaks to the client itself. */
    if (!settings->is_nph && !write_all(text, length))
        return;
    cgi_settings_clean(settings);
    export_decision(fcgi_answer_judgement(&answerer));
    go_on(settings);
}

/* Told before anybody is charged. A folder may be "executed" too, but not run. */
static bool
can_be_run(const char *program)
{
    struct stat kind;
    if (stat(program, &kind) == 0 && S_ISDIR(kind.st_mode)) {
        errno = EISDIR;
        return false;
    }
    return access(program, X_OK) == 0;
}

int
main(int count, char **arguments)
{
    cgi_settings settings;
    tg_gate *gate = NULL;
    tg_clock *clock = NULL;
    tg_error error;
    fcgi_log_name = "tidegate-cgi";
    if (!getenv("REQUEST_METHOD")) {
        if (count == 2 && strcmp(arguments[1], "--version") == 0)
            return puts("tidegate-cgi " TG_VERSION) < 0;
        const bool asked = count == 2 && strcmp(arguments[1], "--help") == 0;
        fputs(usage, asked ? stdout : stderr);
        return asked ? 0 : 2;
    }
    cgi_settings_read(&settings);
    if (settings.wrong[0]) {
        fcgi_log(FCGI_ERROR, "set-wrongly", "%s", settings.wrong);
        refuse(&settings, "503 Service Unavailable", "MISCONFIGURED", "The limits of this site are set wrongly.");
    } else if (settings.program && !can_be_run(settings.program)) {
        fcgi_log(FCGI_ERROR, "program-failed", "%s: %s", settings.program, strerror(errno));
        refuse(&settings, "502 Bad Gateway", "BAD_GATEWAY", "The application could not be started.");
    } else if (!settings.enabled) {
        let_through(&settings);
    } else if (open_clock(&clock, &error) == TG_OK && open_gate(clock, &gate, &error) == TG_OK) {
        judge(&settings, gate, clock);
    } else {
        fcgi_log(FCGI_ERROR, "rules-unreadable", "%s", error.message);
        if (settings.open_on_error)
            let_through(&settings);
        else
            refuse(&settings, "503 Service Unavailable", "MISCONFIGURED", "The limits of this site cannot be read.");
    }
    _exit(0); /* what is open and mapped ends with the process */
}
