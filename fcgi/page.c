/* The page of numbers: see page.h. One thread, one poll, bounded connections. */
#include "page.h"

#include "http.h"
#include "log.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define REQUEST_US UINT64_C(5000000)
#define LINGER_US UINT64_C(1000000) /* what a client still sends is read for so long: a reset would destroy the answer */
#define FRESH_US UINT64_C(250000)
#define SPAN_US UINT64_C(1800000) /* what rates are reckoned from is replaced when it is older */
#define TEXT_BYTES_MAX (4u << 20)
#define POLICIES_MAX 128u

/* Written into the program, so that it needs no files where it runs; the path is relative to the top of the tree. */
#define EMBED(name, file)                                                                                              \
    __asm__(".section .rodata\n" ".globl fcgi_page_" #name "\n" ".globl fcgi_page_" #name "_end\n"                     \
            "fcgi_page_" #name ":\n" ".incbin \"fcgi/" file "\"\n" "fcgi_page_" #name "_end:\n" ".byte 0\n"            \
            ".previous\n");                                                                                            \
    extern const char fcgi_page_##name[], fcgi_page_##name##_end[]

EMBED(css, "page.css");
EMBED(js, "page.js");

typedef struct text {
    char *data;
    size_t length, size;
    bool failed; /* out of memory, or too long */
} text;

/* What the store told at one moment. */
typedef struct numbers {
    uint64_t at_us; /* 0: never */
    tg_store_stats stats;
    bool has_stats, counted;
    size_t policy_count, override_count;
    tg_policy_metrics policies[POLICIES_MAX];
    tg_latency_metrics latency;
} numbers;

/* What was last told in one format. */
typedef struct told {
    uint64_t at_us; /* 0: never */
    text body;
} told;

typedef enum phase { PHASE_READING, PHASE_WRITING, PHASE_LINGERING } phase;

typedef struct client {
    int fd; /* -1: free */
    phase phase;
    uint64_t deadline_us;
    size_t head_length, sent;
    text answer;
    char head[FCGI_HTTP_HEAD_MAX];
} client;

struct fcgi_page {
    const fcgi_listener *listener;
    tg_gate *gate;
    int stop_fd;
    pthread_t thread;
    client clients[FCGI_PAGE_CONNECTIONS_MAX];
    numbers *now, *before; /* `before` is what rates are reckoned from */
    told metrics[2];       /* by "is JSON" */
    fcgi_log_gate accepting;
};

static uint64_t
monotonic_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* ---- texts */

static void
put(text *out, const char *data, size_t length)
{
    if (out->failed || length > TEXT_BYTES_MAX - out->length) {
        out->failed = true;
        return;
    }
    if (out->length + length > out->size) {
        const size_t size = 2 * (out->length + length) + 1024;
        char *larger = realloc(out->data, size);
        if (!larger) {
            out->failed = true;
            return;
        }
        out->data = larger;
        out->size = size;
    }
    memcpy(out->data + out->length, data, length);
    out->length += length;
}

static void __attribute__((format(printf, 2, 3)))
say(text *out, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof line)
        out->failed = true;
    else
        put(out, line, (size_t)length);
}

static void
sink(void *context, tg_text piece)
{
    put(context, piece.data, piece.length);
}

/* Names lie in memory that others write: nothing of them is markup, and what cannot be shown is a '?'. */
static void
put_name(text *out, const char *name)
{
    for (; *name; name++) {
        const char *entity = *name == '<'   ? "&lt;"
                             : *name == '>' ? "&gt;"
                             : *name == '&' ? "&amp;"
                             : *name == '"' ? "&quot;"
                                            : NULL;
        if (entity)
            put(out, entity, strlen(entity));
        else
            put(out, *name >= ' ' && *name < 0x7f ? name : "?", 1);
    }
}

/* ---- the numbers */

static int
by_name(const void *left, const void *right)
{
    const tg_policy_metrics *a = left, *b = right;
    const int spaces = strcmp(a->space, b->space);
    return spaces ? spaces : strcmp(a->policy, b->policy);
}

/* What is a moment old will do: whoever asks in a circle does not take the store's locks in a circle. */
static void
refresh(fcgi_page *page)
{
    tg_store *store = tg_gate_store(page->gate);
    const uint64_t now_us = monotonic_us();
    if (page->now->at_us && now_us - page->now->at_us < FRESH_US)
        return;
    if (page->now->at_us && (page->before->at_us == 0 || now_us - page->before->at_us > SPAN_US)) {
        numbers *older = page->before;
        page->before = page->now;
        page->now = older;
    }
    numbers *now = page->now;
    now->at_us = now_us;
    now->has_stats = tg_store_read_stats(store, &now->stats, NULL) == TG_OK;
    memset(now->policies, 0, sizeof now->policies);
    now->counted = tg_store_read_metrics(store, now->policies, POLICIES_MAX, &now->policy_count, &now->latency, NULL) ==
                   TG_OK;
    if (!now->counted)
        now->policy_count = 0;
    if (now->policy_count > POLICIES_MAX)
        now->policy_count = POLICIES_MAX;
    qsort(now->policies, now->policy_count, sizeof *now->policies, by_name);
    if (tg_store_list_overrides(store, NULL, 0, &now->override_count, NULL) != TG_OK)
        now->override_count = 0;
}

/* /metrics, likewise. */
static const text *
tell_metrics(fcgi_page *page, bool json)
{
    told *last = &page->metrics[json];
    const uint64_t now_us = monotonic_us();
    tg_error error;
    if (last->at_us && now_us - last->at_us < FRESH_US)
        return &last->body;
    last->body.length = 0;
    last->body.failed = false;
    last->at_us = 0;
    if (tg_store_write_metrics(tg_gate_store(page->gate), json ? TG_METRICS_JSON : TG_METRICS_PROMETHEUS, sink, &last->body,
                               &error) != TG_OK ||
        last->body.failed)
        return NULL;
    last->at_us = now_us;
    return &last->body;
}

/* All that was decided: what a shadow or a challenge would have done is told besides. */
static uint64_t
decisions(const tg_policy_metrics *policy)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < TG_METRICS; i++)
        if (i != TG_METRIC_SHADOW_DENIED && i != TG_METRIC_CHALLENGED)
            sum += policy->counts[i];
    return sum;
}

static const tg_policy_metrics *
same_policy(const numbers *of, const tg_policy_metrics *policy)
{
    return of->at_us ? bsearch(policy, of->policies, of->policy_count, sizeof *policy, by_name) : NULL;
}

static void
say_rate(text *out, const fcgi_page *page, const tg_policy_metrics *policy)
{
    const tg_policy_metrics *earlier = same_policy(page->before, policy);
    const uint64_t passed_us = page->now->at_us - page->before->at_us, since = decisions(policy);
    const uint64_t until = earlier ? decisions(earlier) : 0;
    if (page->before->at_us == 0 || since < until || passed_us < FRESH_US)
        say(out, "<td class=zero>\xe2\x80\x93</td>");
    else if (since == until)
        say(out, "<td class=zero>0</td>");
    else
        say(out, "<td>%.*f</td>", since - until < 100 ? 1 : 0, (double)(since - until) * 1e6 / (double)passed_us);
}

static void
write_policies(text *out, const fcgi_page *page)
{
    const numbers *now = page->now;
    bool shown[TG_METRICS] = { [TG_METRIC_ALLOWED] = true, [TG_METRIC_DENIED] = true };
    say(out, "<h2>Decisions</h2>\n");
    if (!now->counted || now->policy_count == 0) {
        say(out, "<p>%s</p>\n", now->counted ? "Nothing has been counted yet."
                                             : "This store keeps no counts by policy; a table does from 1 MiB on.");
        return;
    }
    for (size_t i = 0; i < now->policy_count; i++)
        for (size_t m = 0; m < TG_METRICS; m++)
            shown[m] |= now->policies[i].counts[m] != 0;
    say(out, "<div class=wide><table>\n<thead><tr><th scope=col>policy</th><th scope=col>a second</th>");
    for (size_t m = 0; m < TG_METRICS; m++)
        if (shown[m])
            say(out, "<th scope=col>%s</th>", tg_metric_word((tg_metric)m));
    say(out, "</tr></thead>\n<tbody>\n");
    for (size_t i = 0; i < now->policy_count; i++) {
        const tg_policy_metrics *policy = &now->policies[i];
        say(out, "<tr><th scope=row>");
        if (strcmp(policy->space, "default") != 0) {
            put_name(out, policy->space);
            say(out, "/");
        }
        put_name(out, policy->policy);
        say(out, "</th>");
        say_rate(out, page, policy);
        for (size_t m = 0; m < TG_METRICS; m++)
            if (shown[m])
                say(out, "<td%s>%" PRIu64 "</td>", policy->counts[m] ? "" : " class=zero", policy->counts[m]);
        say(out, "</tr>\n");
    }
    say(out, "</tbody></table></div>\n");
}

static void
say_bound(text *out, uint64_t ns)
{
    if (ns == UINT64_MAX)
        say(out, "longer");
    else if (ns < 1000)
        say(out, "%" PRIu64 " ns", ns);
    else if (ns < 1000000)
        say(out, "%.3g \xc2\xb5s", (double)ns / 1e3);
    else
        say(out, "%.3g ms", (double)ns / 1e6);
}

static void
write_latency(text *out, const tg_latency_metrics *latency)
{
    static const unsigned percents[] = { 50, 90, 99 };
    uint64_t total = 0;
    for (size_t i = 0; i < TG_LATENCIES; i++)
        total += latency->counts[i];
    if (total == 0)
        return;
    say(out, "<dt>decided within</dt><dd>");
    for (size_t p = 0; p < sizeof percents / sizeof *percents; p++) {
        uint64_t below = latency->counts[0];
        size_t i = 0;
        while (i < TG_LATENCIES - 1 && below * 100 < total * percents[p])
            below += latency->counts[++i];
        say(out, "%s", p ? ", " : "");
        say_bound(out, latency->bounds_ns[i]);
        say(out, " (%u&nbsp;%%)", percents[p]);
    }
    say(out, "</dd>\n");
}

static void
write_fill(text *out, const char *what, uint64_t used, uint64_t of)
{
    if (of == 0)
        return;
    say(out, "<dt>%s</dt><dd>%" PRIu64 " of %" PRIu64 "<meter min=0 max=1 high=0.8 value=%.3f>%.0f %%</meter></dd>\n", what,
        used, of, (double)used / (double)of, 100.0 * (double)used / (double)of);
}

static void
write_store(text *out, const numbers *now)
{
    const tg_store_stats *stats = &now->stats;
    say(out, "<h2>Store</h2>\n");
    if (!now->has_stats) {
        say(out, "<p class=bad>It does not answer.</p>\n");
        return;
    }
    say(out, "<dl>\n");
    if (stats->table_bytes)
        say(out, "<dt>table</dt><dd>%" PRIu64 " KiB</dd>\n", stats->table_bytes / 1024);
    write_fill(out, "entries", stats->entries_live, stats->entries);
    write_fill(out, "log blocks", stats->log_blocks_used, stats->log_blocks);
    if (now->counted)
        write_latency(out, &now->latency);
    const struct {
        const char *what;
        uint64_t value;
    } rows[] = {
        { "forgotten for lack of room", stats->evicted }, { "judged in shared buckets", stats->overflowed },
        { "refused for lack of room", stats->full },      { "locks taken back from the dead", stats->owner_deaths },
        { "decisions without an answer in time", stats->timeouts },
        { "overrides and pauses that stand", now->override_count },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        say(out, "<dt>%s</dt><dd>%" PRIu64 "</dd>\n", rows[i].what, rows[i].value);
    say(out, "</dl>\n");
}

static void
write_numbers(text *out, fcgi_page *page)
{
    refresh(page);
    say(out, "<p>rules read %" PRIu64 " time%s since this process began</p>\n", tg_gate_generation(page->gate),
        tg_gate_generation(page->gate) == 1 ? "" : "s");
    write_policies(out, page);
    write_store(out, page->now);
}

static void
write_page(text *out, fcgi_page *page)
{
    say(out, "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
             "<meta name=viewport content=\"width=device-width, initial-scale=1\">\n<title>tidegate</title>\n"
             "<link rel=stylesheet href=\"page.css\">\n<link rel=icon href=\"data:,\">\n"
             "<script src=\"page.js\" defer></script>\n"
             "</head>\n<body>\n<header><h1>tidegate</h1><p id=state role=status></p></header>\n<main id=numbers>\n");
    write_numbers(out, page);
    say(out, "</main>\n</body>\n</html>\n");
}

/* ---- answers */

static void
begin_answer(text *out, const char *status, const char *type, size_t length, const char *more)
{
    say(out, "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\nCache-Control: no-store\r\n"
             "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nContent-Security-Policy: default-src 'none'; "
             "img-src data:; style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
             "frame-ancestors 'none'\r\n%s\r\n",
        status, type, length, more);
}

static void
refuse(text *out, int status)
{
    const struct {
        int status;
        const char *line, *more;
    } lines[] = {
        { 400, "400 Bad Request", "" },
        { 404, "404 Not Found", "" },
        { 405, "405 Method Not Allowed", "Allow: GET, HEAD\r\n" },
        { 421, "421 Misdirected Request", "" },
        { 431, "431 Request Header Fields Too Large", "" },
        { 500, "500 Internal Server Error", "" },
        { 503, "503 Service Unavailable", "" },
        { 505, "505 HTTP Version Not Supported", "" },
    };
    size_t i = 0;
    while (i < sizeof lines / sizeof *lines - 1 && lines[i].status != status)
        i++;
    begin_answer(out, lines[i].line, "text/plain; charset=utf-8", strlen(lines[i].line) + 1, lines[i].more);
    say(out, "%s\n", lines[i].line);
}

static bool
path_is(fcgi_http_piece path, const char *word)
{
    return path.length == strlen(word) && memcmp(path.data, word, path.length) == 0;
}

static const char *
write_body(fcgi_page *page, fcgi_http_piece path, text *body, int *status)
{
    const bool json = path_is(path, "/metrics.json");
    *status = 200;
    if (path_is(path, "/")) {
        write_page(body, page);
        return "text/html; charset=utf-8";
    }
    if (path_is(path, "/numbers")) {
        write_numbers(body, page);
        return "text/html; charset=utf-8";
    }
    if (path_is(path, "/page.css")) {
        put(body, fcgi_page_css, (size_t)(fcgi_page_css_end - fcgi_page_css));
        return "text/css; charset=utf-8";
    }
    if (path_is(path, "/page.js")) {
        put(body, fcgi_page_js, (size_t)(fcgi_page_js_end - fcgi_page_js));
        return "text/javascript; charset=utf-8";
    }
    if (!json && !path_is(path, "/metrics")) {
        *status = 404;
        return NULL;
    }
    const text *metrics = tell_metrics(page, json);
    if (metrics)
        put(body, metrics->data, metrics->length);
    else
        *status = 503;
    return json ? "application/json" : "text/plain; version=0.0.4; charset=utf-8";
}

static void
answer(fcgi_page *page, client *who, int status, const fcgi_http_request *request)
{
    text body = { .data = NULL };
    const char *type = NULL;
    if (status == 200 && page->listener->is_tcp && !page->listener->any_host && !page->listener->beyond_loopback &&
        !fcgi_http_host_is_local(request->host))
        status = 421;
    if (status == 200)
        type = write_body(page, request->path, &body, &status);
    if (status == 200 && body.failed)
        status = 500;
    if (status == 200) {
        begin_answer(&who->answer, "200 OK", type, body.length, "");
        if (!request->head)
            put(&who->answer, body.data, body.length);
    } else {
        refuse(&who->answer, status);
    }
    free(body.data);
}

/* ---- connections */

static void
drop(client *who)
{
    if (who->fd != -1)
        close(who->fd);
    free(who->answer.data);
    who->fd = -1;
    who->answer = (text){ .data = NULL };
}

static client *
place_for(fcgi_page *page)
{
    client *oldest = &page->clients[0];
    for (size_t i = 0; i < FCGI_PAGE_CONNECTIONS_MAX; i++) {
        if (page->clients[i].fd == -1)
            return &page->clients[i];
        if (page->clients[i].deadline_us < oldest->deadline_us)
            oldest = &page->clients[i];
    }
    drop(oldest);
    return oldest;
}

static void
accept_one(fcgi_page *page)
{
    const int fd = accept4(page->listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd == -1) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            fcgi_log_rarely(&page->accepting, FCGI_WARN, "page-busy", "%s: %s", page->listener->text, strerror(errno));
            usleep(20000); /* the connection waits in the queue, and poll would say so at once */
        }
        return;
    }
    if (!fcgi_listener_admits(page->listener, fd)) {
        close(fd);
        return;
    }
    client *who = place_for(page);
    who->fd = fd;
    who->phase = PHASE_READING;
    who->deadline_us = monotonic_us() + REQUEST_US;
    who->head_length = who->sent = 0;
}

static void
write_some(client *who)
{
    const ssize_t sent = send(who->fd, who->answer.data + who->sent, who->answer.length - who->sent, MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (sent < 0) {
        drop(who);
        return;
    }
    who->sent += (size_t)sent;
    if (who->sent < who->answer.length)
        return;
    shutdown(who->fd, SHUT_WR);
    who->phase = PHASE_LINGERING;
    who->deadline_us = monotonic_us() + LINGER_US;
}

static void
read_some(fcgi_page *page, client *who)
{
    fcgi_http_request request;
    const ssize_t got = recv(who->fd, who->head + who->head_length, sizeof who->head - who->head_length, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got <= 0) {
        drop(who);
        return;
    }
    who->head_length += (size_t)got;
    const int status = fcgi_http_read(who->head, who->head_length, &request);
    if (status == 0)
        return;
    answer(page, who, status, &request);
    if (who->answer.failed) {
        drop(who);
        return;
    }
    who->phase = PHASE_WRITING;
    write_some(who);
}

/* What comes after the request is read and forgotten; until the client closes, or the deadline. */
static void
linger(client *who)
{
    char nothing[4096];
    const ssize_t got = recv(who->fd, nothing, sizeof nothing, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
        drop(who);
}

static void
serve(fcgi_page *page, client *who)
{
    switch (who->phase) {
    case PHASE_READING:
        read_some(page, who);
        break;
    case PHASE_WRITING:
        write_some(who);
        break;
    case PHASE_LINGERING:
        linger(who);
        break;
    }
}

static int
next_timeout(fcgi_page *page)
{
    const uint64_t now_us = monotonic_us();
    uint64_t next_us = UINT64_MAX;
    for (size_t i = 0; i < FCGI_PAGE_CONNECTIONS_MAX; i++) {
        client *who = &page->clients[i];
        if (who->fd != -1 && who->deadline_us <= now_us)
            drop(who);
        if (who->fd != -1 && who->deadline_us < next_us)
            next_us = who->deadline_us;
    }
    return next_us == UINT64_MAX ? -1 : (int)((next_us - now_us) / 1000) + 1;
}

static void *
run(void *context)
{
    fcgi_page *page = context;
    struct pollfd waits[FCGI_PAGE_CONNECTIONS_MAX + 2];
    client *whose[FCGI_PAGE_CONNECTIONS_MAX];
    for (;;) {
        const int timeout = next_timeout(page);
        size_t count = 0;
        for (size_t i = 0; i < FCGI_PAGE_CONNECTIONS_MAX; i++) {
            client *who = &page->clients[i];
            if (who->fd == -1)
                continue;
            whose[count] = who;
            waits[count++] = (struct pollfd){ who->fd, who->phase == PHASE_WRITING ? POLLOUT : POLLIN, 0 };
        }
        waits[count] = (struct pollfd){ page->listener->fd, POLLIN, 0 };
        waits[count + 1] = (struct pollfd){ page->stop_fd, POLLIN, 0 };
        if (poll(waits, count + 2, timeout) < 0 && errno != EINTR)
            break;
        if (waits[count + 1].revents)
            break;
        for (size_t i = 0; i < count; i++)
            if (waits[i].revents)
                serve(page, whose[i]);
        if (waits[count].revents)
            accept_one(page);
    }
    for (size_t i = 0; i < FCGI_PAGE_CONNECTIONS_MAX; i++)
        drop(&page->clients[i]);
    return NULL;
}

/* ---- beginning and end */

static void
give_up(fcgi_page *page)
{
    if (page->stop_fd != -1)
        close(page->stop_fd);
    free(page->now);
    free(page->before);
    free(page->metrics[0].body.data);
    free(page->metrics[1].body.data);
    free(page);
}

fcgi_page *
fcgi_page_start(const fcgi_listener *listener, tg_gate *gate, char *error, size_t error_bytes)
{
    sigset_t all, mine;
    fcgi_page *page = calloc(1, sizeof *page);
    if (!page) {
        snprintf(error, error_bytes, "%s: out of memory", listener->text);
        return NULL;
    }
    page->listener = listener;
    page->gate = gate;
    for (size_t i = 0; i < FCGI_PAGE_CONNECTIONS_MAX; i++)
        page->clients[i].fd = -1;
    page->now = calloc(1, sizeof *page->now);
    page->before = calloc(1, sizeof *page->before);
    page->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int why = page->now && page->before && page->stop_fd != -1 ? 0 : ENOMEM;
    if (why == 0) {
        sigfillset(&all); /* they are the loop's */
        pthread_sigmask(SIG_SETMASK, &all, &mine);
        why = pthread_create(&page->thread, NULL, run, page);
        pthread_sigmask(SIG_SETMASK, &mine, NULL);
    }
    if (why == 0)
        return page;
    snprintf(error, error_bytes, "%s: %s", listener->text, strerror(why));
    give_up(page);
    return NULL;
}

void
fcgi_page_stop(fcgi_page *page)
{
    if (!page)
        return;
    const uint64_t one = 1;
    while (write(page->stop_fd, &one, sizeof one) == -1 && errno == EINTR)
        continue;
    pthread_join(page->thread, NULL);
    give_up(page);
}
