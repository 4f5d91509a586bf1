/* tidegate-fcgi: the limiter as a FastCGI program for web servers. Options, start, end; the work is in loop.c and
 * answer.c. Must not enter: anything a request passes through. */
#include "answer.h"
#include "page.h"
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* A sanitizer looks at its own process from outside, and starts itself anew under another personality. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FILTERS false
#else
#define FILTERS true
#endif
#define LISTEN_FDS_START 3
#define THREADS_MAX 64u
#define SPARE_DESCRIPTORS 32u /* for the table, the log, epoll and whatever a library opens for a moment */

static const char usage_text[] =
    "usage: tidegate-fcgi [--config FILE] [--listen ADDRESS]... [option]...\n"
    "\n"
    "A FastCGI responder and authorizer that limits requests by the rules of FILE.\n"
    "\n"
    "  --config FILE           the rules file (else TIDEGATE_CONFIG)\n"
    "  --listen ADDRESS        unix:/path, tcp:127.0.0.1:PORT or fd:NUMBER; repeatable. Without one: the sockets of\n"
    "                          LISTEN_FDS, or descriptor 0 where it is a listening socket. Behind commas:\n"
    "      mode=0660 owner=NAME group=NAME       of a unix socket's file\n"
    "      modes=answer+auth+xaccel+authorizer+relay  what may be asked for; the first where nobody says\n"
    "      answers=MODE                          what is meant where TIDEGATE_MODE does not say\n"
    "      policies=A+B                          what TIDEGATE_POLICY may name; a single one is the default\n"
    "      peer-uid=USER+USER                    unix: who may connect at all\n"
    "      token=SECRET, token=@FILE             what TIDEGATE_TOKEN has to be; TCP without one: authorizers only\n"
    "      keyed=yes|no                          TIDEGATE_KEY, _COST, _PEEK, _BATCH: yes on unix, no on TCP\n"
    "      relay-to=unix:/path+tcp:IP:PORT       the application, and where else when it is away\n"
    "      keep=N                                connections to it kept while idle (0)\n"
    "      root=/folder                          pass SCRIPT_FILENAME on, below this folder\n"
    "      hold=S                                longest that an allowed request waits for its turn in a leaky bucket\n"
    "                                            (10 where only relays are served, else 0: told, not waited for)\n"
    "      php-values=yes|no                     pass PHP_VALUE and PHP_ADMIN_VALUE on (no)\n"
    "  --http ADDRESS          /metrics for Prometheus and a page of the same numbers, on unix:/path or tcp:127.0.0.1:PORT;\n"
    "                          with mode=, owner=, group=, peer-uid=, and beyond-loopback=yes, any-host=yes\n"
    "  --mode answer|auth      what a request without TIDEGATE_MODE gets where its listener does not say: answer (200\n"
    "                          or the refusal; the default), auth (204 or 403, for nginx's auth_request)\n"
    "  --store URI             the store (else TIDEGATE_STORE, the file's store, shared://default)\n"
    "  --store-timeout S       longest a decision waits for the store (0.05)\n"
    "  --threads N             loops that serve at once (1); each has a core's worth of requests\n"
    "  --user NAME             give root's rights away when the sockets are open\n"
    "  --chroot FOLDER         see nothing but this folder from then on; rules and table are looked for inside\n"
    "  --seccomp yes|no        refuse itself calls that it never makes: ptrace, mount, bpf and the like (yes)\n"
    "  --connections N         most connections at once (1024)\n"
    "  --request-timeout S     longest until a request that has begun is whole, or an answer is taken (10)\n"
    "  --idle-timeout S        longest a connection stays open without a request (300)\n"
    "  --relay-connect-timeout S  longest until an application accepts, then the next is tried (1)\n"
    "  --relay-timeout S       longest that nothing moves on a relayed request (60)\n"
    "  --drain-timeout S       longest from SIGTERM to the end (5)\n"
    "  --manual-clock          for replays: a table whose time is each request's TIDEGATE_NOW_US\n"
    "  --check                 read the rules, say whether they are right, and leave\n"
    "  --help, --version\n"
    "\n"
    "SIGHUP reads the rules again; SIGTERM and SIGINT answer what was accepted and leave; SIGUSR2 starts the program\n"
    "anew and leaves its sockets to it, with no moment in which nobody accepts.\n"
    "Exit status: 0 fine, 1 something failed, 2 wrong usage.\n";

typedef struct options {
    const char *config, *store;
    fcgi_listener listeners[FCGI_LISTENERS_MAX];
    size_t listener_count;
    fcgi_listener http;
    bool has_http, http_open;
    fcgi_mode mode;
    fcgi_loop_options loop;
    uint64_t store_timeout_us;
    size_t threads;
    const char *chroot;
    fcgi_user user;
    bool has_user;
    bool unfiltered;
    bool manual_clock, check;
} options;

/* ---- options */

static void __attribute__((noreturn, format(printf, 1, 2)))
fail_usage(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("tidegate-fcgi: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("; see tidegate-fcgi --help\n", stderr);
    va_end(arguments);
    exit(2);
}

static uint64_t
read_seconds(const char *name, const char *text)
{
    char *end;
    errno = 0;
    const double seconds = strtod(text, &end);
    if (errno != 0 || end == text || *end != '\0' || !(seconds >= 0.001 && seconds <= 86400.0))
        fail_usage("%s %s: expected seconds between 0.001 and 86400", name, text);
    return (uint64_t)(seconds * 1e6);
}

static size_t
read_count(const char *name, const char *text, unsigned long max)
{
    char *end;
    errno = 0;
    const unsigned long number = strtoul(text, &end, 10);
    if (*text < '1' || *text > '9' || *end != '\0' || errno != 0 || number > max)
        fail_usage("%s %s: expected a number from 1 to %lu", name, text, max);
    return number;
}

static void
add_listener(options *set, const char *text)
{
    char error[320];
    if (set->listener_count == FCGI_LISTENERS_MAX)
        fail_usage("--listen %s: too many listeners", text);
    if (fcgi_listener_parse(text, &set->listeners[set->listener_count], error, sizeof error) != FCGI_LISTEN_OK)
        fail_usage("--listen: %s", error);
    set->listener_count++;
}

static void
read_options(options *set, int argument_count, char **arguments)
{
    enum { CONFIG = 256, LISTEN, MODE, STORE, STORE_TIMEOUT, CONNECTIONS, REQUEST_TIMEOUT, IDLE_TIMEOUT, RELAY_TIMEOUT,
           RELAY_CONNECT_TIMEOUT, DRAIN_TIMEOUT,
           HTTP, MANUAL_CLOCK, THREADS, USER, CHROOT, SECCOMP, CHECK, HELP, VERSION };
    static const struct option known[] = {
        { "config", required_argument, NULL, CONFIG },
        { "listen", required_argument, NULL, LISTEN },
        { "http", required_argument, NULL, HTTP },
        { "mode", required_argument, NULL, MODE },
        { "store", required_argument, NULL, STORE },
        { "store-timeout", required_argument, NULL, STORE_TIMEOUT },
        { "connections", required_argument, NULL, CONNECTIONS },
        { "request-timeout", required_argument, NULL, REQUEST_TIMEOUT },
        { "idle-timeout", required_argument, NULL, IDLE_TIMEOUT },
        { "relay-timeout", required_argument, NULL, RELAY_TIMEOUT },
        { "relay-connect-timeout", required_argument, NULL, RELAY_CONNECT_TIMEOUT },
        { "drain-timeout", required_argument, NULL, DRAIN_TIMEOUT },
        { "manual-clock", no_argument, NULL, MANUAL_CLOCK },
        { "threads", required_argument, NULL, THREADS },
        { "user", required_argument, NULL, USER },
        { "chroot", required_argument, NULL, CHROOT },
        { "seccomp", required_argument, NULL, SECCOMP },
        { "check", no_argument, NULL, CHECK },
        { "help", no_argument, NULL, HELP },
        { "version", no_argument, NULL, VERSION },
        { 0 },
    };
    opterr = 0;
    int which;
    while ((which = getopt_long(argument_count, arguments, "", known, NULL)) != -1) {
        switch (which) {
        case CONFIG:
            set->config = optarg;
            break;
        case LISTEN:
            add_listener(set, optarg);
            break;
        case HTTP: {
            char error[320];
            if (set->has_http)
                fail_usage("--http %s: one is enough", optarg);
            if (fcgi_listener_parse_page(optarg, &set->http, error, sizeof error) != FCGI_LISTEN_OK)
                fail_usage("--http: %s", error);
            set->has_http = true;
            break;
        }
        case MODE:
            if (!fcgi_mode_parse(tg_text_of(optarg), false, &set->mode) || set->mode > FCGI_MODE_AUTH)
                fail_usage("--mode %s: expected answer or auth", optarg);
            break;
        case STORE:
            set->store = optarg;
            break;
        case STORE_TIMEOUT:
            set->store_timeout_us = read_seconds("--store-timeout", optarg);
            break;
        case CONNECTIONS:
            set->loop.connections_max = read_count("--connections", optarg, 1000000);
            break;
        case THREADS:
            set->threads = read_count("--threads", optarg, THREADS_MAX);
            break;
        case USER: {
            char error[160];
            if (!fcgi_user_find(optarg, &set->user, error, sizeof error))
                fail_usage("--user %s", error);
            set->has_user = true;
            break;
        }
        case CHROOT:
            set->chroot = optarg;
            break;
        case SECCOMP:
            if (strcmp(optarg, "yes") != 0 && strcmp(optarg, "no") != 0)
                fail_usage("--seccomp %s: expected yes or no", optarg);
            set->unfiltered = strcmp(optarg, "no") == 0;
            break;
        case REQUEST_TIMEOUT:
            set->loop.request_us = read_seconds("--request-timeout", optarg);
            break;
        case IDLE_TIMEOUT:
            set->loop.idle_us = read_seconds("--idle-timeout", optarg);
            break;
        case RELAY_TIMEOUT:
            set->loop.relay_us = read_seconds("--relay-timeout", optarg);
            break;
        case RELAY_CONNECT_TIMEOUT:
            set->loop.relay_connect_us = read_seconds("--relay-connect-timeout", optarg);
            break;
        case DRAIN_TIMEOUT:
            set->loop.drain_us = read_seconds("--drain-timeout", optarg);
            break;
        case MANUAL_CLOCK:
            set->manual_clock = true;
            break;
        case CHECK:
            set->check = true;
            break;
        case HELP:
            fputs(usage_text, stdout);
            exit(0);
        case VERSION:
            puts("tidegate-fcgi " TG_VERSION);
            exit(0);
        default:
            fail_usage("%s: unknown option, or its value is missing", arguments[optind - 1]);
        }
    }
    if (optind < argument_count)
        fail_usage("%s: no such argument", arguments[optind]);
    if (set->manual_clock && set->threads > 1)
        fail_usage("--manual-clock with --threads: each request sets the one clock, so they have to come one by one");
    if ((set->has_user && set->user.uid != geteuid() && geteuid() != 0) || (set->chroot && geteuid() != 0))
        fail_usage("--user and --chroot: only root can");
}

/* systemd's way: LISTEN_FDS sockets from descriptor 3 on, meant for LISTEN_PID only. */
static void
add_inherited(options *set, const fcgi_handover *handover)
{
    for (size_t i = 0; i < handover->count; i++) /* what a former process of ours was given so */
        if (strncmp(handover->sockets[i].text, "fd:", 3) == 0)
            add_listener(set, handover->sockets[i].text);
    if (set->listener_count > 0)
        return;
    const char *pid = getenv("LISTEN_PID"), *count = getenv("LISTEN_FDS");
    if (pid && count && strtol(pid, NULL, 10) == (long)getpid()) {
        const long sockets = strtol(count, NULL, 10);
        for (long i = 0; i < sockets && set->listener_count < FCGI_LISTENERS_MAX; i++) {
            char text[32];
            snprintf(text, sizeof text, "fd:%ld", LISTEN_FDS_START + i);
            add_listener(set, text);
        }
    }
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDS");
    if (set->listener_count == 0 && fcgi_is_listening(STDIN_FILENO))
        add_listener(set, "fd:0");
}

/* ---- running */

struct daemon_state;

/* What one loop has for itself. */
typedef struct worker {
    fcgi_answerer answerer; /* first: the loop's context is its address */
    struct daemon_state *state;
    fcgi_loop *loop;
    fcgi_listener listeners[FCGI_LISTENERS_MAX]; /* descriptors of its own; unused in the first worker */
    pthread_t thread;
    bool started, whole;
} worker;

typedef struct daemon_state {
    options set;
    const char *config;
    char *const *arguments;
    tg_gate *gate;
    fcgi_page *page;
    size_t worker_count;
    worker *workers; /* the first runs on the main thread and takes the signals */
    pid_t successor;
} daemon_state;

static void
log_notices(void *context)
{
    (void)context;
    tg_notice notice;
    while (tg_notice_pending() && tg_notice_take(&notice))
        fcgi_log(FCGI_WARN, notice.code, "%s", notice.message);
}

static void
reload_rules(void *context)
{
    const daemon_state *state = ((const worker *)context)->state;
    tg_error error;
    if (tg_gate_reload(state->gate, &error) == TG_OK)
        fcgi_log(FCGI_INFO, "rules-reloaded", "%s: in force, reading %llu", state->config,
                 (unsigned long long)tg_gate_generation(state->gate));
    else
        fcgi_log(FCGI_ERROR, "rules-refused", "%s; the rules in force stay", error.message);
}

/* Only a relay passes a body on and sees the answer, so only where nothing else is served may a policy ask for them. */
static bool
only_relays(const options *set)
{
    for (size_t i = 0; i < set->listener_count; i++) {
        const fcgi_rights *rights = &set->listeners[i].rights; /* of an inherited socket not settled yet */
        if (rights->modes != 1u << FCGI_MODE_RELAY && !(rights->modes == 0 && rights->backend_count > 0))
            return false;
    }
    return set->listener_count > 0;
}

static tg_status
open_gate(const options *set, tg_clock *clock, tg_gate **gate, tg_error *error)
{
    const tg_gate_options gate_options = {
        .path = tg_text_of(set->config),
        /* A check leaves nothing behind: the real table may belong to a user that is not the one who checks. */
        .store = tg_text_of(set->check ? "memory://" : set->store),
        .clock = clock,
        .timeout_us = set->store_timeout_us,
        .faces = TG_FACE_KNOWN | TG_FACE_USER | (only_relays(set) ? TG_FACE_BODY | TG_FACE_RESPONSE : 0),
    };
    return tg_gate_open(&gate_options, gate, error);
}

/* As `tidegate check --face` says it. */
static int
check_rules(const options *set, const char *path, tg_error *error)
{
    static tg_warning warnings[256];
    const size_t room = sizeof warnings / sizeof *warnings;
    const tg_check_options check = {
        .path = tg_text_of(path),
        .store = tg_text_of(set->store),
        .face = tg_text_of(only_relays(set) ? "fcgi-relay" : set->mode == FCGI_MODE_AUTH ? "fcgi-auth" : "fcgi"),
    };
    size_t count;
    if (tg_check(&check, warnings, room, &count, error) != TG_OK) {
        fprintf(stderr, "tidegate-fcgi: %s\n", error->message);
        return 1;
    }
    for (size_t i = 0; i < count && i < room; i++) {
        printf("%s:", path);
        if (warnings[i].line)
            printf("%u:%u:", warnings[i].line, warnings[i].column ? warnings[i].column : 1);
        printf(" warning: %s [%s]\n", warnings[i].message, warnings[i].code);
    }
    printf("tidegate-fcgi: %s: ok\n", path);
    return 0;
}

/* As many descriptors as the system lets us have, and no more connections than those allow. */
static void
fit_descriptors(options *set)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    const size_t connections = set->loop.connections_max ? set->loop.connections_max : 1024;
    bool relays = false;
    for (size_t i = 0; i < set->listener_count; i++)
        relays = relays || set->listeners[i].rights.backend_count > 0;
    const size_t wanted = relays ? 2 * connections : connections; /* each may have one behind it */
    if (limit.rlim_cur < wanted + SPARE_DESCRIPTORS && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max < wanted + SPARE_DESCRIPTORS ? limit.rlim_max : wanted + SPARE_DESCRIPTORS;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    const size_t possible = limit.rlim_cur > 2 * SPARE_DESCRIPTORS ? limit.rlim_cur - SPARE_DESCRIPTORS
                                                                   : SPARE_DESCRIPTORS;
    if (wanted > possible) {
        set->loop.connections_max = relays ? (possible + 1) / 2 : possible;
        fcgi_log(FCGI_WARN, "descriptors-few", "%zu connections at most: the system allows %llu descriptors",
                 set->loop.connections_max, (unsigned long long)limit.rlim_cur);
    }
}

/* A socket opened as 2 would receive what is logged. */
static void
fill_standard_descriptors(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO)
        close(fd);
}

static int
start_successor(void *context)
{
    daemon_state *state = ((worker *)context)->state;
    char error[320];
    if (state->set.chroot) {
        fcgi_log(FCGI_ERROR, "handover-failed", "below --chroot the program cannot be found again; start it anew");
        return -1;
    }
    fcgi_listener handed[FCGI_HANDOVER_MAX];
    size_t count = state->set.listener_count;
    memcpy(handed, state->set.listeners, count * sizeof *handed);
    if (state->set.has_http)
        handed[count++] = state->set.http;
    const int fd = fcgi_handover_start(state->arguments[0], state->arguments, handed, count, &state->successor, error,
                                       sizeof error);
    if (fd == -1)
        fcgi_log(FCGI_ERROR, "handover-failed", "%s", error);
    else
        fcgi_log(FCGI_INFO, "handing-over", "to process %ld", (long)state->successor);
    return fd;
}

static void
end_successor(void *context, bool served)
{
    daemon_state *state = ((worker *)context)->state;
    if (served) {
        state->set.http.inode = 0; /* the page's name is the new program's */
        return;
    }
    waitpid(state->successor, NULL, 0); /* it has closed its end, by ending */
    fcgi_log(FCGI_ERROR, "handover-failed", "the new program ended before it served; this one stays");
}

static void
stop_others(void *context)
{
    const daemon_state *state = ((const worker *)context)->state;
    for (size_t i = 1; i < state->worker_count; i++)
        if (state->workers[i].started)
            fcgi_loop_stop(state->workers[i].loop);
}

/* ---- a remote store's client, one for each loop */

static void
guest_ready(void *context, int fd, bool readable, bool writable)
{
    tg_async_ready(((worker *)context)->answerer.judge.client, fd, readable, writable);
}

static void
guest_wake(void *context)
{
    tg_async_wake(((worker *)context)->answerer.judge.client);
}

static void
guest_flush(void *context)
{
    tg_async_flush(((worker *)context)->answerer.judge.client);
}

static bool
open_client(worker *each, tg_error *error)
{
    fcgi_judge *judge = &each->answerer.judge;
    tg_store *store = tg_gate_store(each->state->gate);
    tg_async_loop hooks;
    if (!tg_store_remote(store))
        return true;
    fcgi_loop_house(each->loop, &hooks);
    judge->decided = fcgi_loop_decided;
    judge->loop = each->loop;
    return tg_async_open(store, &hooks, &judge->client, error) == TG_OK;
}

static void *
run_worker(void *context)
{
    worker *self = context;
    self->whole = fcgi_loop_run(self->loop);
    return NULL;
}

static bool
open_workers(daemon_state *state, tg_clock *clock)
{
    options *set = &state->set;
    const size_t count = set->threads ? set->threads : 1;
    state->workers = calloc(count, sizeof *state->workers);
    if (!state->workers)
        return false;
    const size_t connections = set->loop.connections_max ? set->loop.connections_max : 1024;
    for (; state->worker_count < count; state->worker_count++) {
        const bool first = state->worker_count == 0;
        worker *made = &state->workers[state->worker_count];
        made->state = state;
        made->answerer.gate = state->gate;
        made->answerer.manual = clock;
        made->answerer.mode = set->mode != FCGI_MODE_UNSET ? set->mode : FCGI_MODE_ANSWER;
        const fcgi_responder responder = {
            .answer = fcgi_answer_call,
            .pass = fcgi_answer_pass,
            .settle = fcgi_answer_settle,
            .forget = fcgi_answer_forget,
            .go_on = fcgi_answer_go_on,
            .guest_ready = guest_ready,
            .guest_wake = guest_wake,
            .guest_flush = guest_flush,
            .reload = reload_rules,
            .hand_over = start_successor,
            .handed_over = end_successor,
            .stopping = first ? stop_others : NULL,
            .round = first ? log_notices : NULL,
            .context = made,
        };
        fcgi_loop_options loop_options = set->loop;
        loop_options.secondary = !first;
        loop_options.accepts_in_turns = count > 1;
        loop_options.connections_max = (connections + count - 1) / count;
        made->loop = fcgi_loop_open(&loop_options, &responder, first ? set->listeners : made->listeners,
                                    set->listener_count);
        if (!made->loop)
            return false;
        tg_error error;
        if (!open_client(made, &error)) {
            fcgi_loop_close(made->loop);
            fprintf(stderr, "tidegate-fcgi: %s\n", error.message);
            return false;
        }
    }
    return true;
}

/* The other loops' threads, once the sockets are open. They begin with the main thread's signals blocked. */
static bool
start_workers(daemon_state *state)
{
    for (size_t i = 1; i < state->worker_count; i++) {
        worker *each = &state->workers[i];
        for (size_t k = 0; k < state->set.listener_count; k++)
            if (fcgi_listener_copy(&state->set.listeners[k], &each->listeners[k]) != FCGI_LISTEN_OK)
                return false;
        const int why = pthread_create(&each->thread, NULL, run_worker, each);
        if (why != 0) {
            errno = why;
            return false;
        }
        each->started = true;
    }
    return true;
}

/* Every loop's end. */
static bool
join_workers(daemon_state *state)
{
    bool whole = true;
    stop_others(state->workers);
    for (size_t i = 1; i < state->worker_count; i++)
        if (state->workers[i].started) {
            pthread_join(state->workers[i].thread, NULL);
            state->workers[i].started = false;
            whole = whole && state->workers[i].whole;
        }
    return whole;
}

static void
close_workers(daemon_state *state)
{
    for (size_t i = 0; i < state->worker_count; i++) {
        worker *each = &state->workers[i];
        fcgi_judge_close(&each->answerer.judge); /* it still speaks to the loop, and the loop's requests to it */
        fcgi_loop_close(each->loop);
        for (size_t k = 0; i > 0 && k < state->set.listener_count; k++)
            if (each->listeners[k].shared)
                fcgi_listener_close(&each->listeners[k]);
        fcgi_answerer_fini(&each->answerer);
    }
    free(state->workers);
}

static bool
open_listener(fcgi_listener *listener, fcgi_handover *handover)
{
    char why[320];
    const int fd = fcgi_handover_take(handover, listener->text);
    const fcgi_listen_status status = fd == -1 ? fcgi_listener_open(listener, why, sizeof why)
                                               : fcgi_listener_adopt(listener, fd, why, sizeof why);
    if (status != FCGI_LISTEN_OK)
        fprintf(stderr, "tidegate-fcgi: %s\n", why);
    return status == FCGI_LISTEN_OK;
}

/* Opens what is not handed over. How many are open is in `opened`, also after a failure. */
static bool
open_listeners(options *set, fcgi_handover *handover, size_t *opened)
{
    for (; *opened < set->listener_count; ++*opened)
        if (!open_listener(&set->listeners[*opened], handover))
            return false;
    if (set->has_http && !set->http_open)
        set->http_open = open_listener(&set->http, handover);
    return !set->has_http || set->http_open;
}

int
main(int argument_count, char **arguments)
{
    static daemon_state state;
    options *set = &state.set;
    fcgi_handover handover;
    tg_error error = { 0 };
    tg_clock *clock = NULL;
    size_t opened = 0;
    int leave = 1;
    char why[320];

    fill_standard_descriptors();
    signal(SIGPIPE, SIG_IGN);
    fcgi_handover_read(&handover);
    state.arguments = arguments;
    read_options(set, argument_count, arguments);
    if (!set->check && set->listener_count == 0)
        add_inherited(set, &handover);
    if (!set->check && set->listener_count == 0)
        fail_usage("--listen is missing, and no listening socket was handed over");

    /* Who finds a socket should be answered, so they are opened last; but where rights are given away, before that. */
    if (!set->check && (set->has_user || set->chroot) && !open_listeners(set, &handover, &opened))
        goto done;
    if (!set->check && !fcgi_process_confine(set->chroot, set->has_user ? &set->user : NULL, why, sizeof why)) {
        fprintf(stderr, "tidegate-fcgi: %s\n", why);
        goto done;
    }
    if (set->manual_clock && tg_clock_open(0, &clock, &error) != TG_OK)
        goto failed;
    if (open_gate(set, clock, &state.gate, &error) != TG_OK)
        goto failed;
    state.config = set->config ? set->config : getenv("TIDEGATE_CONFIG");
    for (size_t i = 0; i < set->listener_count; i++)
        if (fcgi_answer_check(state.gate, &set->listeners[i], &error) != TG_OK) {
            fprintf(stderr, "tidegate-fcgi: --listen %s: policies=: %s\n", set->listeners[i].text, error.message);
            goto done;
        }
    if (set->check) {
        leave = check_rules(set, state.config, &error);
        goto done;
    }
    fit_descriptors(set);
    if (!open_workers(&state, clock)) {
        fprintf(stderr, "tidegate-fcgi: the event loop: %s\n", strerror(errno));
        goto done;
    }
    if (!open_listeners(set, &handover, &opened))
        goto done;
    if (FILTERS && !set->unfiltered && !fcgi_process_filter(!set->chroot, handover.ready_fd != -1, why, sizeof why)) {
        fprintf(stderr, "tidegate-fcgi: %s\n", why);
        goto done;
    }
    if (!start_workers(&state)) {
        fprintf(stderr, "tidegate-fcgi: threads: %s\n", strerror(errno));
        join_workers(&state);
        goto done;
    }
    if (set->has_http) {
        state.page = fcgi_page_start(&set->http, state.gate, why, sizeof why);
        if (!state.page) {
            fprintf(stderr, "tidegate-fcgi: --http: %s\n", why);
            join_workers(&state);
            goto done;
        }
        fcgi_log(FCGI_INFO, "page", "http on %s", set->http.text);
    }
    for (size_t i = 0; i < set->listener_count; i++)
        fcgi_log(FCGI_INFO, "listening", "%s", set->listeners[i].text);
    fcgi_handover_done(&handover);
    snprintf(why, sizeof why, "READY=1\nMAINPID=%ld", (long)getpid());
    fcgi_process_tell(why);

    bool whole = fcgi_loop_run(state.workers[0].loop);
    whole = join_workers(&state) && whole;
    log_notices(NULL);
    fcgi_loop_counts sum = { 0 };
    for (size_t i = 0; i < state.worker_count; i++) {
        const fcgi_loop_counts *counts = fcgi_loop_read_counts(state.workers[i].loop);
        sum.requests += counts->requests;
        sum.connections += counts->connections;
    }
    fcgi_log(whole ? FCGI_INFO : FCGI_WARN, "stopped", "%llu requests on %llu connections%s",
             (unsigned long long)sum.requests, (unsigned long long)sum.connections,
             whole ? "" : "; some did not complete in time");
    leave = 0;
    goto done;

failed:
    fprintf(stderr, "tidegate-fcgi: %s\n", error.message);
done:
    fcgi_page_stop(state.page);
    close_workers(&state);
    for (size_t i = 0; i < opened; i++)
        fcgi_listener_close(&set->listeners[i]);
    if (set->http_open)
        fcgi_listener_close(&set->http);
    tg_gate_close(state.gate);
    tg_clock_close(clock);
    return leave;
}
