/* A real redis-server of a test's own, in a folder of its own, and a connection to talk to it beside the store.
 * Must not enter: what is tested. */
#ifndef TG_TEST_REDIS_SERVER_H
#define TG_TEST_REDIS_SERVER_H

#include "stores/redis/redis.h"
#include "tests/c/busy.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define SECOND_US UINT64_C(1000000)

/* A child of a process of several threads, and a store's keeper is one, begins a thread of its own: that the thread
 * sanitizer does not follow. */
#ifdef __SANITIZE_THREAD__
#define SKIP_FORKS() skip()
#else
#define SKIP_FORKS() ((void)0)
#endif

typedef struct server {
    char folder[64], path[96], uri[128];
    uint16_t port;
    pid_t pid;
} server;

static inline void
sleep_us(uint64_t us)
{
    const struct timespec wait = { (time_t)(us / SECOND_US), (long)(us % SECOND_US) * 1000 };
    nanosleep(&wait, NULL);
}

static inline redisContext *
server_connect(const server *one)
{
    redisContext *link = redisConnectUnixWithTimeout(one->path, (struct timeval){ 5, 0 });
    if (link && link->err) {
        redisFree(link);
        return NULL;
    }
    if (link)
        redisSetTimeout(link, (struct timeval){ 10, 0 });
    return link;
}

/* Waits until it answers, whatever it answers. */
static inline void
server_start(server *one, const char *const *more)
{
    char port[8];
    const char *given = getenv("TIDEGATE_REDIS_SERVER"); /* valkey-server, another version */
    const char *words[40] = { given && *given ? given : "redis-server", "--port", port, "--bind", "127.0.0.1", "--unixsocket", one->path, "--save", "",
                              "--dir", one->folder, "--logfile", "log", "--appendonly", "no" };
    size_t count = 15;
    snprintf(port, sizeof port, "%u", one->port);
    for (size_t i = 0; more && more[i]; i++) {
        assert_true(count < 39);
        words[count++] = more[i];
    }
    unlink(one->path);
    one->pid = fork();
    assert_true(one->pid != -1);
    if (one->pid == 0) {
        if (!freopen("/dev/null", "r", stdin) || !freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr))
            _exit(126);
        execvp(words[0], (char *const *)(uintptr_t)words);
        _exit(127);
    }
    const uint64_t end_us = tg__monotonic_us() + 30 * SECOND_US;
    for (;;) {
        redisContext *link = server_connect(one);
        redisReply *reply = link ? redisCommand(link, "PING") : NULL;
        if (reply)
            freeReplyObject(reply);
        if (link)
            redisFree(link);
        if (reply)
            return;
        if (tg__monotonic_us() > end_us)
            fail_msg("redis-server did not start");
        sleep_us(5000);
    }
}

static inline void
server_signal(const server *one, int number)
{
    if (one->pid > 0)
        kill(one->pid, number);
}

static inline void
server_kill(server *one)
{
    if (one->pid <= 0)
        return;
    kill(one->pid, SIGKILL);
    waitpid(one->pid, NULL, 0);
    one->pid = 0;
}

/* Nobody's now, and nobody's either when it is used, or used again: below those that the kernel gives to whoever connects or
 * wants any, and each process begins at a place of its own. */
static inline uint16_t
free_port(void)
{
    static unsigned tried;
    if (tried == 0)
        tried = (unsigned)getpid() * 97;
    for (int i = 0; i < 1000; i++) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        const uint16_t port = (uint16_t)(20000 + tried++ % 12000);
        const struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port),
                                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        const int bound = bind(fd, (const struct sockaddr *)&address, sizeof address);
        close(fd);
        if (bound == 0)
            return port;
    }
    fail_msg("no port is free");
    return 0;
}

static inline void
server_init(server *one, bool tcp)
{
    *one = (server){ .port = tcp ? free_port() : 0 };
    snprintf(one->folder, sizeof one->folder, "/tmp/tg-redis-XXXXXX");
    assert_non_null(mkdtemp(one->folder));
    snprintf(one->path, sizeof one->path, "%s/s", one->folder);
    snprintf(one->uri, sizeof one->uri, "redis+unix://%s", one->path);
}

static inline void
server_fini(server *one)
{
    server_signal(one, SIGCONT);
    server_kill(one);
    DIR *folder = opendir(one->folder);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", one->folder, entry->d_name);
        if (entry->d_name[0] != '.' && unlink(path) == -1)
            rmdir(path);
    }
    if (folder)
        closedir(folder);
    rmdir(one->folder);
}

/* One command; its words are split at blanks. Fails on an error reply unless `refused` takes its text. */
static inline long long
server_ask(const server *one, char *refused, const char *command)
{
    redisContext *link = server_connect(one);
    assert_non_null(link);
    redisReply *reply = redisCommand(link, command);
    if (!reply)
        fail_msg("%s: %s", command, link->errstr);
    if (refused)
        snprintf(refused, 256, "%s", reply->type == REDIS_REPLY_ERROR ? reply->str : "");
    else if (reply->type == REDIS_REPLY_ERROR)
        fail_msg("%s: %s", command, reply->str);
    const long long number = reply->type == REDIS_REPLY_INTEGER ? reply->integer : (long long)reply->elements;
    freeReplyObject(reply);
    redisFree(link);
    return number;
}

/* How many keys there are, but for the secret and what is kept for operators. */
static inline long long
server_counted(const server *one)
{
    long long count = 0;
    redisContext *link = server_connect(one);
    assert_non_null(link);
    redisReply *keys = redisCommand(link, "KEYS *");
    assert_non_null(keys);
    for (size_t i = 0; i < keys->elements; i++)
        count += strcmp(keys->element[i]->str, "tg1:secret") != 0 && !strstr(keys->element[i]->str, "{tidegate}");
    freeReplyObject(keys);
    redisFree(link);
    return count;
}

/* A number out of INFO. */
static inline long long
server_info(const server *one, const char *section, const char *name)
{
    redisContext *link = server_connect(one);
    assert_non_null(link);
    redisReply *reply = redisCommand(link, "INFO %s", section);
    assert_non_null(reply);
    char wanted[80];
    snprintf(wanted, sizeof wanted, "%s:", name);
    const char *at = strstr(reply->str, wanted);
    if (!at)
        fail_msg("INFO %s has no %s", section, name);
    const long long number = atoll(at + strlen(wanted));
    freeReplyObject(reply);
    redisFree(link);
    return number;
}

/* ---- time on a machine that has other things to do ---- */

/* How much too late a thread woke that wanted to sleep a millisecond: what the machine adds to every wait. */
static _Atomic uint64_t late_us;
static atomic_bool late_watched;

static inline void *
watch_lateness(void *unused)
{
    (void)unused;
    while (atomic_load(&late_watched)) {
        const uint64_t began_us = tg__monotonic_us();
        sleep_us(1000);
        const uint64_t took_us = tg__monotonic_us() - began_us;
        if (took_us > 1000 + atomic_load(&late_us))
            atomic_store(&late_us, took_us - 1000);
    }
    return NULL;
}

static uint64_t unserved_before_us;

/* `took_us` since the last time_begin is at most `most_us`, but for what the machine was late meanwhile. Both by the thread that
 * is timed. */
static inline void
time_begin(void)
{
    atomic_store(&late_us, 0);
    unserved_before_us = unserved_us();
}

static inline bool
in_time(uint64_t took_us, uint64_t most_us, char *why, size_t size)
{
    if (took_us <= most_us)
        return true;
    const uint64_t unserved = unserved_us() - unserved_before_us;
    sleep_us(20000); /* whoever watches has to wake first */
    const uint64_t late = atomic_load(&late_us);
    snprintf(why, size,
             "took %" PRIu64 " us, at most %" PRIu64 "; the machine was %" PRIu64 " us late and served others for %" PRIu64,
             took_us, most_us, late, unserved);
    return took_us <= most_us + 3 * late + unserved;
}

static inline void
assert_in_time(uint64_t took_us, uint64_t most_us)
{
    char why[160];
    if (!in_time(took_us, most_us, why, sizeof why))
        fail_msg("%s", why);
}

static inline void
lateness_begin(pthread_t *thread)
{
    atomic_store(&late_watched, true);
    assert_int_equal(pthread_create(thread, NULL, watch_lateness, NULL), 0);
}

static inline void
lateness_end(pthread_t thread)
{
    atomic_store(&late_watched, false);
    pthread_join(thread, NULL);
}

/* ---- the store on it ---- */

static inline tg_store *
open_store(const char *uri, tg_clock *clock)
{
    tg_error error = { .message = "" };
    tg_store *store = NULL;
    if (tg_store_open(tg_text_of(uri), &(tg_store_options){ .clock = clock }, &store, &error) != TG_OK)
        fail_msg("%s: %s", uri, error.message);
    return store;
}

static inline tg_limiter *
open_limiter_so(tg_store *store, const char *rules, const char *name, tg_on_failure on_failure)
{
    tg_error error = { .message = "" };
    tg_limiter *limiter = NULL;
    const tg_limiter_options options = { .rules = tg_text_of(rules), .name = tg_text_of(name),
                                         .on_store_failure = on_failure };
    if (tg_limiter_open(store, NULL, &options, &limiter, &error) != TG_OK)
        fail_msg("%s: %s", rules, error.message);
    return limiter;
}

static inline tg_limiter *
open_limiter(tg_store *store, const char *rules, const char *name)
{
    return open_limiter_so(store, rules, name, TG_FAIL_OPEN);
}

static inline tg_decision
hit_cost(tg_limiter *limiter, const char *who, uint64_t cost)
{
    const tg_part part = { .value = tg_text_of(who) };
    const tg_dimension dimension = { &part, 1 };
    tg_decision decision;
    tg_error error = { .message = "" };
    if (tg_limiter_hit(limiter, &dimension, 1, cost, &decision, &error) != TG_OK)
        fail_msg("hit: %s", error.message);
    return decision;
}

static inline tg_decision
hit(tg_limiter *limiter, const char *who)
{
    return hit_cost(limiter, who, 1);
}

static inline tg_decision
peek(tg_limiter *limiter, const char *who)
{
    const tg_part part = { .value = tg_text_of(who) };
    const tg_dimension dimension = { &part, 1 };
    tg_decision decision;
    tg_error error = { .message = "" };
    if (tg_limiter_peek(limiter, &dimension, 1, 1, &decision, &error) != TG_OK)
        fail_msg("peek: %s", error.message);
    return decision;
}

/* The hit and how long it took. */
static inline tg_decision
timed_hit(tg_limiter *limiter, const char *who, uint64_t *took_us)
{
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    const tg_decision decision = hit(limiter, who);
    *took_us = tg__monotonic_us() - began_us;
    return decision;
}

static inline void
forget_notices(void)
{
    tg_notice notice;
    while (tg_notice_take(&notice))
        continue;
}

/* Whether a notice of this code was queued that holds `words`; all are taken. */
static inline bool
noticed(const char *code, const char *words)
{
    tg_notice notice;
    bool found = false;
    while (tg_notice_take(&notice)) {
        assert_null(strstr(notice.message, "hunter2")); /* the password of every test here */
        found = found || (strcmp(notice.code, code) == 0 && strstr(notice.message, words));
    }
    return found;
}

/* Hits until one is decided by Redis again; returns how long that took. */
static inline uint64_t
recovery_us(tg_limiter *limiter, const char *who)
{
    time_begin();
    const uint64_t began_us = tg__monotonic_us();
    while (hit(limiter, who).degraded) {
        if (tg__monotonic_us() - began_us > 10 * SECOND_US)
            fail_msg("no recovery in 10 s");
        sleep_us(10000);
    }
    return tg__monotonic_us() - began_us;
}

#endif
