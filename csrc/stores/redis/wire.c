/* One connection: opening it, sending, reading a reply, all by one deadline. hiredis reads the replies; the socket is
 * ours, because its own calls have a timeout each, not one for all of them, and write(2) in ways that raise SIGPIPE.
 * Must not enter: what a command means. */
#include "stores/redis/redis.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define IDLE_AFTER_US 2000
#define RECEIVES_FOR_US 100000 /* at most: see receive_by */
#define RECEIVES_LATE_US 15000 /* recv's own end: a tick of the slowest kernels' timers and a half */
#define BEFORE_US 2000         /* what a call does before it waits, on a bad day */
/* Of one reply. The longest there are tell of a cluster's 16384 slots, and of overrides. */
#define REPLY_BYTES_MAX (16u << 20)
#define REPLY_ELEMENTS_MAX 131072

/* ---- waiting ---- */

/* ppoll: poll's whole milliseconds would round a deadline. */
static tg_trouble
wait_for(int fd, short events, uint64_t deadline_us, const char *peer, const char *what, tg_error *error)
{
    for (;;) {
        const uint64_t now_us = tg__monotonic_us();
        if (now_us >= deadline_us) {
            tg__error(error, TG_E_STORE, "%s: no answer in time (%s)", peer, what);
            return TG__TROUBLE_TIMEOUT;
        }
        const uint64_t left_us = deadline_us - now_us;
        const struct timespec left = { (time_t)(left_us / 1000000), (long)(left_us % 1000000) * 1000 };
        tg__store_waits();
        struct pollfd poll = { .fd = fd, .events = events };
        const int ready = ppoll(&poll, 1, &left, NULL);
        if (ready > 0)
            return TG__TROUBLE_NONE; /* an error on the socket too: the next call on it tells which */
        if (ready == -1 && errno != EINTR) {
            tg__error_system(error, TG_E_STORE, errno, "%s: poll", peer);
            return TG__TROUBLE_LINK;
        }
    }
}

/* ---- names ---- */

/* getaddrinfo has no deadline: a thread of its own asks, and whoever gives up first leaves the rest to the other. The
 * answer shows on a descriptor, so that a loop can wait for it as well as a call with a deadline. */
struct tg_lookup {
    pthread_mutex_t lock;
    bool done, given_up;
    int result;
    int answered; /* an eventfd */
    uint64_t deadline_us;
    struct addrinfo *found;
    char says[256]; /* what went wrong */
    bool setup;     /* and it is a person's to change: one of them is no sentinel, or lets nobody ask */
    tg_redis_host server;
    size_t sentinel_count; /* 0: `server` is where to go */
    tg_redis_host sentinels[TG__SENTINELS_MAX];
    char master[TG__SENTINEL_NAME_MAX + 1];
    tg_tls *tls; /* for the sentinels too */
};

static void
lookup_free(tg_lookup *lookup)
{
    if (lookup->found)
        freeaddrinfo(lookup->found);
    if (lookup->answered != -1)
        close(lookup->answered);
    pthread_mutex_destroy(&lookup->lock);
    tg__tls_close(lookup->tls);
    free(lookup);
}

/* One sentinel's word on where the master is, into lookup->server. */
static bool
ask_sentinel(tg_lookup *lookup, const tg_redis_host *sentinel, unsigned left)
{
    const uint64_t now_us = tg__monotonic_us();
    if (now_us >= lookup->deadline_us)
        return false;
    const uint64_t until_us = now_us + (lookup->deadline_us - now_us) / left; /* one that is silent must not cost it all */
    tg_redis_address address = { .port = sentinel->port, .tls = lookup->tls };
    snprintf(address.host, sizeof address.host, "%s", sentinel->host);
    snprintf(address.shown, sizeof address.shown, "sentinel %s:%u", sentinel->host, sentinel->port);
    tg_redis_wire wire = { .fd = -1 };
    char bytes[192];
    tg_resp resp = { .data = bytes, .size = sizeof bytes };
    tg__resp_command(&resp, 3, (const char *const[]){ "SENTINEL", "GET-MASTER-ADDR-BY-NAME", lookup->master });
    tg_heard heard = { .reply = NULL };
    tg_error error;
    const char *said = NULL;
    tg_trouble trouble = tg__wire_open(&wire, &address, until_us, &error);
    if (trouble != TG__TROUBLE_NONE)
        said = !address.tls                                               ? "is not reached"
               : strncmp(error.message, address.shown, strlen(address.shown)) == 0 ? error.message + strlen(address.shown) + 2
                                                                          : error.message;
    else if (tg__wire_send(&wire, &(struct iovec){ bytes, resp.length }, 1, until_us, NULL, &error) != TG__TROUBLE_NONE ||
             tg__wire_hear(&wire, until_us, &heard, &error) != TG__TROUBLE_NONE)
        said = "does not answer";
    const redisReply *const reply = heard.reply;
    bool known = false;
    if (reply && reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
        reply->element[0]->type == REDIS_REPLY_STRING && reply->element[1]->type == REDIS_REPLY_STRING &&
        reply->element[0]->len > 0 && reply->element[0]->len <= TG__REDIS_HOST_MAX) {
        uint64_t port;
        known = tg__text_number((tg_text){ reply->element[1]->str, reply->element[1]->len }, 65535, &port) && port > 0;
        if (known) {
            memcpy(lookup->server.host, reply->element[0]->str, reply->element[0]->len + 1);
            lookup->server.port = (uint16_t)port;
        }
    }
    const bool refused = !said && reply->type == REDIS_REPLY_ERROR; /* its words tell why */
    const bool server = refused && strncasecmp(reply->str, "ERR unknown command", 19) == 0;
    char explained[320];
    if (server)
        trouble = TG__TROUBLE_SETUP;
    else if (refused)
        trouble = tg__redis_trouble(reply->str, explained, sizeof explained);
    if (!known && (!lookup->setup || trouble == TG__TROUBLE_SETUP))
        snprintf(lookup->says, sizeof lookup->says, "sentinel %.100s:%u %.120s%s%.100s", sentinel->host, sentinel->port,
                 said ? said
                 : reply->type == REDIS_REPLY_NIL || reply->type == REDIS_REPLY_ARRAY ? "does not know this master"
                 : server ? "is no sentinel (redis:// is for a server)"
                          : "refuses to say",
                 refused ? ": " : "", refused ? reply->str : "");
    lookup->setup = !known && (lookup->setup || trouble == TG__TROUBLE_SETUP);
    tg__heard_forget(&heard);
    tg__wire_close(&wire);
    return known;
}

static void *
lookup_run(void *argument)
{
    tg_lookup *lookup = argument;
    /* The application's handlers are for its own threads. */
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    bool known = lookup->sentinel_count == 0;
    for (size_t i = 0; !known && i < lookup->sentinel_count; i++)
        known = ask_sentinel(lookup, &lookup->sentinels[i], (unsigned)(lookup->sentinel_count - i));
    struct addrinfo *found = NULL;
    int result = EAI_FAIL;
    if (known) {
        const struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG };
        char port[8];
        snprintf(port, sizeof port, "%u", lookup->server.port);
        result = getaddrinfo(lookup->server.host, port, &hints, &found);
        if (result != 0)
            snprintf(lookup->says, sizeof lookup->says, "the name '%.120s': %s", lookup->server.host,
                     gai_strerror(result));
    }
    pthread_mutex_lock(&lookup->lock);
    lookup->result = result;
    lookup->found = result == 0 ? found : NULL;
    lookup->done = true;
    const bool given_up = lookup->given_up;
    if (!given_up)
        eventfd_write(lookup->answered, 1);
    pthread_mutex_unlock(&lookup->lock); /* from here on it is the other's, unless that has gone */
    if (given_up)
        lookup_free(lookup);
    return NULL;
}

static tg_lookup *
lookup_start(const tg_redis_address *address, uint64_t deadline_us, tg_error *error)
{
    tg_lookup *lookup = calloc(1, sizeof *lookup);
    if (!lookup) {
        tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *lookup);
        return NULL;
    }
    pthread_mutex_init(&lookup->lock, NULL);
    lookup->deadline_us = deadline_us;
    lookup->tls = tg__tls_retain(address->tls);
    memcpy(lookup->server.host, address->host, sizeof lookup->server.host);
    lookup->server.port = address->port;
    lookup->sentinel_count = address->sentinel_count;
    const unsigned turn = atomic_load_explicit(&address->sentinel_turn, memory_order_relaxed);
    for (size_t i = 0; i < lookup->sentinel_count; i++)
        lookup->sentinels[i] = address->sentinels[(turn + i) % lookup->sentinel_count];
    memcpy(lookup->master, address->master, sizeof lookup->master);
    lookup->answered = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int failure =
        lookup->answered == -1 ? errno : pthread_create(&thread, &detached, lookup_run, lookup);
    pthread_attr_destroy(&detached);
    if (failure) {
        tg__error_system(error, TG_E_STORE, failure, "%s: a thread to look it up", address->shown);
        lookup_free(lookup);
        return NULL;
    }
    return lookup;
}

tg_trouble
tg__lookup_begin(const tg_redis_address *address, uint64_t deadline_us, tg_lookup **lookup, struct addrinfo **found,
                 tg_error *error)
{
    const struct addrinfo numeric = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV };
    char port[8];
    *lookup = NULL;
    *found = NULL;
    snprintf(port, sizeof port, "%u", address->port);
    if (address->port == 0 ||
        (address->sentinel_count == 0 && getaddrinfo(address->host, port, &numeric, found) == 0))
        return TG__TROUBLE_NONE;
    *lookup = lookup_start(address, deadline_us, error);
    return *lookup ? TG__TROUBLE_NONE : TG__TROUBLE_LINK;
}

int
tg__lookup_fd(const tg_lookup *lookup)
{
    return lookup->answered;
}

void
tg__lookup_give_up(tg_lookup *lookup)
{
    if (!lookup)
        return;
    pthread_mutex_lock(&lookup->lock);
    lookup->given_up = true;
    const bool done = lookup->done;
    pthread_mutex_unlock(&lookup->lock);
    if (done)
        lookup_free(lookup);
}

tg_trouble
tg__lookup_end(tg_lookup *lookup, const tg_redis_address *address, struct addrinfo **found, tg_error *error)
{
    pthread_mutex_lock(&lookup->lock);
    const bool done = lookup->done;
    const int result = lookup->result;
    const bool setup = lookup->setup;
    if (done) {
        *found = lookup->found;
        lookup->found = NULL;
        if (result != 0)
            tg__error(error, setup ? TG_E_CONFIG : TG_E_STORE, "%s: %s", address->shown, lookup->says);
    }
    pthread_mutex_unlock(&lookup->lock);
    tg__lookup_give_up(lookup);
    if (!done) {
        tg__error(error, TG_E_STORE, "%s: it was not found in time", address->shown);
        return TG__TROUBLE_TIMEOUT;
    }
    return result == 0 ? TG__TROUBLE_NONE : setup ? TG__TROUBLE_SETUP : TG__TROUBLE_LINK;
}

/* ---- connecting ---- */

tg_trouble
tg__wire_connect_begin(tg_redis_wire *wire, const tg_redis_address *address, const struct addrinfo *to,
                       bool *connecting, tg_error *error)
{
    struct sockaddr_un path = { .sun_family = AF_UNIX };
    const struct sockaddr *where = to ? to->ai_addr : (const struct sockaddr *)&path;
    *connecting = false;
    if (!to)
        memcpy(path.sun_path, address->host, strlen(address->host) + 1);
    const int fd = socket(where->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd == -1) {
        tg__error_system(error, TG_E_STORE, errno, "redis: socket");
        return TG__TROUBLE_LINK;
    }
    atomic_store(&wire->fd, fd);
    wire->shown = address->shown;
    const int one = 1;
    if (to) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    }
    if (connect(fd, where, to ? to->ai_addrlen : sizeof path) == 0)
        return TG__TROUBLE_NONE;
    if (errno == EINPROGRESS || errno == EINTR) {
        *connecting = true;
        return TG__TROUBLE_NONE;
    }
    /* EAGAIN: a unix socket whose queue is full. It cannot be waited for, and says that nobody accepts. */
    const int failure = errno;
    tg__error_system(error, TG_E_STORE, failure, "%s: connect", address->shown);
    return failure == EAGAIN ? TG__TROUBLE_TIMEOUT : TG__TROUBLE_LINK;
}

tg_trouble
tg__wire_connect_end(tg_redis_wire *wire, const tg_redis_address *address, tg_error *error)
{
    int failure = 0;
    socklen_t bytes = sizeof failure;
    if (getsockopt(atomic_load(&wire->fd), SOL_SOCKET, SO_ERROR, &failure, &bytes) == -1)
        failure = errno;
    if (failure == 0)
        return TG__TROUBLE_NONE;
    tg__error_system(error, TG_E_STORE, failure, "%s: connect", address->shown);
    return TG__TROUBLE_LINK;
}

static tg_trouble
connect_to(tg_redis_wire *wire, const tg_redis_address *address, const struct addrinfo *to, uint64_t deadline_us,
           tg_error *error)
{
    bool connecting;
    tg_trouble trouble = tg__wire_connect_begin(wire, address, to, &connecting, error);
    if (trouble == TG__TROUBLE_NONE && connecting) {
        trouble = wait_for(atomic_load(&wire->fd), POLLOUT, deadline_us, address->shown, "connecting", error);
        if (trouble == TG__TROUBLE_NONE)
            trouble = tg__wire_connect_end(wire, address, error);
    }
    return trouble;
}

static tg_trouble
connect_any(tg_redis_wire *wire, const tg_redis_address *address, uint64_t deadline_us, tg_error *error)
{
    tg_lookup *lookup;
    struct addrinfo *found;
    tg_trouble trouble = tg__lookup_begin(address, deadline_us, &lookup, &found, error);
    if (trouble != TG__TROUBLE_NONE)
        return trouble;
    if (lookup) {
        wait_for(tg__lookup_fd(lookup), POLLIN, deadline_us, address->shown, "looking up", error);
        trouble = tg__lookup_end(lookup, address, &found, error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
    }
    if (!found)
        return connect_to(wire, address, NULL, deadline_us, error);
    /* Each address of a name gets its share of the time that is left: one that is silent must not cost all of it. */
    unsigned left = 0;
    for (const struct addrinfo *one = found; one; one = one->ai_next)
        left++;
    trouble = TG__TROUBLE_LINK;
    for (const struct addrinfo *one = found; one; one = one->ai_next, left--) {
        const uint64_t now_us = tg__monotonic_us();
        const uint64_t until_us = now_us < deadline_us ? now_us + (deadline_us - now_us) / left : deadline_us;
        trouble = connect_to(wire, address, one, until_us, error);
        if (trouble == TG__TROUBLE_NONE)
            break;
        tg__wire_close(wire);
    }
    freeaddrinfo(found);
    return trouble;
}

/* Who a certificate has to be for: the host as it was given, or, where a sentinel named it, where we are. */
static const char *
peer_name(const tg_redis_wire *wire, const tg_redis_address *address, char *text, size_t size)
{
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof peer;
    if (address->host[0] || getpeername(atomic_load(&wire->fd), (struct sockaddr *)&peer, &bytes) == -1 ||
        getnameinfo((struct sockaddr *)&peer, bytes, text, (socklen_t)size, NULL, 0, NI_NUMERICHOST) != 0)
        return address->host;
    return text;
}

tg_trouble
tg__wire_secure_begin(tg_redis_wire *wire, const tg_redis_address *address, tg_error *error)
{
    char text[64];
    return address->tls ? tg__tls_begin(wire, address->tls, peer_name(wire, address, text, sizeof text), error)
                        : TG__TROUBLE_NONE;
}

static tg_trouble
secure(tg_redis_wire *wire, const tg_redis_address *address, uint64_t deadline_us, tg_error *error)
{
    tg_trouble trouble = tg__wire_secure_begin(wire, address, error);
    for (short wants = 0; trouble == TG__TROUBLE_NONE && wire->tls;) {
        trouble = tg__tls_handshake(wire, &wants, error);
        if (trouble != TG__TROUBLE_NONE || wants == 0)
            break;
        trouble = wait_for(atomic_load(&wire->fd), wants, deadline_us, address->shown, "TLS", error);
    }
    return trouble;
}

/* How long recv itself may wait: as long as a call's time allows. */
static uint64_t
receives_for(uint64_t timeout_us)
{
    const uint64_t spared_us = RECEIVES_LATE_US + BEFORE_US;
    const uint64_t us = timeout_us > 2 * spared_us ? timeout_us - spared_us : timeout_us / 2;
    return us == 0 || us > RECEIVES_FOR_US ? RECEIVES_FOR_US : us;
}

tg_trouble
tg__wire_open(tg_redis_wire *wire, const tg_redis_address *address, uint64_t deadline_us, tg_error *error)
{
    tg_trouble trouble = connect_any(wire, address, deadline_us, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = secure(wire, address, deadline_us, error);
    if (trouble != TG__TROUBLE_NONE)
        return trouble;
    const int fd = atomic_load(&wire->fd);
    wire->receives_for_us = receives_for(address->timeout_us);
    const struct timeval wait = { 0, (suseconds_t)wire->receives_for_us };
    if (!wire->tls && (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) == -1 ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait) == -1)) {
        tg__error_system(error, TG_E_STORE, errno, "redis: a socket that waits");
        return TG__TROUBLE_LINK;
    }
    wire->used_at_us = 0;
    if (!tg__wire_listen(wire)) {
        tg__error(error, TG_E_NOMEM, "redis: a reply reader");
        return TG__TROUBLE_LINK;
    }
    return TG__TROUBLE_NONE;
}

void
tg__wire_close(tg_redis_wire *wire)
{
    const int fd = atomic_exchange(&wire->fd, -1); /* first: a child forked now must not close a reused number */
    redisReader *reader = wire->reader;
    void *tls = wire->tls;
    wire->reader = NULL;
    wire->tls = NULL;
    if (tls)
        tg__tls_end(tls); /* says nothing to the server */
    if (fd != -1)
        close(fd);
    if (reader)
        redisReaderFree(reader);
}

/* ---- replies ---- */

#if HIREDIS_MAJOR >= 1
typedef size_t element_count;
#else
typedef int element_count;
#endif

static redisReplyObjectFunctions replies; /* hiredis' own, but for create_bounded_array */
static void *(*create_array)(const redisReadTask *, element_count);
static pthread_once_t replies_once = PTHREAD_ONCE_INIT;

/* hiredis makes room for as many elements as the first line of an array promises, and gives it back one by one: what is no
 * Redis and promises a hundred million holds whoever asked for seconds. */
static void *
create_bounded_array(const redisReadTask *task, element_count elements)
{
    return elements > REPLY_ELEMENTS_MAX ? NULL : create_array(task, elements);
}

static void
make_replies(void)
{
    redisReader *reader = redisReaderCreate(); /* its functions have no name of their own */
    if (!reader)
        return; /* no memory: as hiredis does it, then */
    replies = *reader->fn;
    create_array = replies.createArray;
    replies.createArray = create_bounded_array;
    redisReaderFree(reader);
}

bool
tg__wire_listen(tg_redis_wire *wire)
{
    wire->unheard = 0;
    wire->reader = redisReaderCreate();
    if (!wire->reader)
        return false;
    pthread_once(&replies_once, make_replies);
    if (create_array)
        wire->reader->fn = &replies;
    return true;
}

tg_trouble
tg__wire_feed(tg_redis_wire *wire, const void *data, size_t length, tg_error *error)
{
    wire->unheard += length;
    if (wire->unheard > REPLY_BYTES_MAX)
        tg__error(error, TG_E_STORE, "%s: what came is no Redis reply (more than %u bytes)", tg__wire_peer(wire),
                  REPLY_BYTES_MAX);
    else if (redisReaderFeed(wire->reader, data, length) != REDIS_OK)
        tg__error(error, TG_E_STORE, "%s: a reply could not be kept (%s)", tg__wire_peer(wire), wire->reader->errstr);
    else
        return TG__TROUBLE_NONE;
    return TG__TROUBLE_LINK;
}

tg_trouble
tg__wire_take(tg_redis_wire *wire, redisReply **reply, tg_error *error)
{
    void *complete = NULL;
    if (redisReaderGetReply(wire->reader, &complete) != REDIS_OK) {
        tg__error(error, TG_E_STORE, "%s: what came is no Redis reply (%s)", tg__wire_peer(wire), wire->reader->errstr);
        return TG__TROUBLE_LINK;
    }
    *reply = complete;
    if (complete)
        wire->unheard = 0;
    return TG__TROUBLE_NONE;
}

/* ---- talking ---- */

tg_trouble
tg__wire_write(tg_redis_wire *wire, const void *data, size_t length, size_t *sent, short *wants, tg_error *error)
{
    if (wire->tls)
        return tg__tls_write(wire, data, length, sent, wants, error);
    *sent = 0;
    *wants = 0;
    ssize_t moved;
    do {
        moved = send(atomic_load(&wire->fd), data, length, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (moved == -1 && errno == EINTR);
    if (moved >= 0) {
        *sent = (size_t)moved;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        *wants = POLLOUT;
    } else {
        tg__error_system(error, TG_E_STORE, errno, "%s: send", tg__wire_peer(wire));
        return TG__TROUBLE_LINK;
    }
    return TG__TROUBLE_NONE;
}

tg_trouble
tg__wire_read(tg_redis_wire *wire, void *data, size_t size, size_t *got, short *wants, tg_error *error)
{
    if (wire->tls)
        return tg__tls_read(wire, data, size, got, wants, error);
    *got = 0;
    *wants = 0;
    ssize_t moved;
    do {
        moved = recv(atomic_load(&wire->fd), data, size, MSG_DONTWAIT);
    } while (moved == -1 && errno == EINTR);
    if (moved > 0) {
        *got = (size_t)moved;
    } else if (moved == 0) {
        tg__error(error, TG_E_STORE, "%s: the server closed the connection", tg__wire_peer(wire));
        return TG__TROUBLE_LINK;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        *wants = POLLIN;
    } else {
        tg__error_system(error, TG_E_STORE, errno, "%s: receive", tg__wire_peer(wire));
        return TG__TROUBLE_LINK;
    }
    return TG__TROUBLE_NONE;
}

/* In records as large as they get: each piece in one of its own would be a packet of its own. */
static tg_trouble
send_secured(tg_redis_wire *wire, struct iovec *pieces, int count, uint64_t deadline_us, bool *unsent, tg_error *error)
{
    char record[16384];
    while (count > 0) {
        size_t length = 0, sent;
        for (int i = 0; i < count && length < sizeof record; i++) {
            const size_t room = sizeof record - length, taken = pieces[i].iov_len < room ? pieces[i].iov_len : room;
            memcpy(record + length, pieces[i].iov_base, taken);
            length += taken;
        }
        short wants = 0;
        tg_trouble trouble = length ? tg__tls_write(wire, record, length, &sent, &wants, error) : TG__TROUBLE_NONE;
        if (trouble == TG__TROUBLE_NONE && wants)
            trouble = wait_for(atomic_load(&wire->fd), wants, deadline_us, tg__wire_peer(wire), "sending", error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        if (wants)
            continue; /* with the same bytes */
        if (unsent)
            *unsent = false;
        for (sent = length ? sent : 0; count > 0 && sent >= pieces->iov_len; pieces++, count--)
            sent -= pieces->iov_len;
        if (count > 0) {
            pieces->iov_base = (char *)pieces->iov_base + sent;
            pieces->iov_len -= sent;
        }
    }
    return TG__TROUBLE_NONE;
}

tg_trouble
tg__wire_send(tg_redis_wire *wire, struct iovec *pieces, int count, uint64_t deadline_us, bool *unsent, tg_error *error)
{
    const int fd = atomic_load(&wire->fd);
    if (unsent)
        *unsent = true;
    if (wire->tls)
        return send_secured(wire, pieces, count, deadline_us, unsent, error);
    while (count > 0) {
        const struct msghdr message = { .msg_iov = pieces, .msg_iovlen = (size_t)count };
        ssize_t sent = count == 1 ? send(fd, pieces->iov_base, pieces->iov_len, MSG_NOSIGNAL | MSG_DONTWAIT)
                                  : sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent == -1) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                tg__error_system(error, TG_E_STORE, errno, "%s: send", tg__wire_peer(wire));
                return TG__TROUBLE_LINK;
            }
            const tg_trouble trouble = wait_for(fd, POLLOUT, deadline_us, tg__wire_peer(wire), "sending", error);
            if (trouble != TG__TROUBLE_NONE)
                return trouble;
            continue;
        }
        if (unsent && sent > 0)
            *unsent = false;
        while (count > 0 && (size_t)sent >= pieces->iov_len) {
            sent -= (ssize_t)pieces->iov_len;
            pieces++, count--;
        }
        if (count > 0) {
            pieces->iov_base = (char *)pieces->iov_base + sent;
            pieces->iov_len -= (size_t)sent;
        }
    }
    return TG__TROUBLE_NONE;
}

static tg_trouble
receive_secured(tg_redis_wire *wire, char *bytes, size_t size, uint64_t deadline_us, ssize_t *got, tg_error *error)
{
    for (;;) {
        short wants;
        size_t length;
        if (tg__monotonic_us() >= deadline_us) { /* also of what never stops coming */
            tg__error(error, TG_E_STORE, "%s: no answer in time (reply)", tg__wire_peer(wire));
            return TG__TROUBLE_TIMEOUT;
        }
        tg_trouble trouble = tg__tls_read(wire, bytes, size, &length, &wants, error);
        if (trouble == TG__TROUBLE_NONE && wants)
            trouble = wait_for(atomic_load(&wire->fd), wants, deadline_us, tg__wire_peer(wire), "reply", error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        if (wants)
            continue;
        *got = (ssize_t)length;
        return TG__TROUBLE_NONE;
    }
}

/* A reply that is quick needs one system call, in which recv itself waits; trying, polling and receiving are three. But how
 * long recv waits is only roughly what SO_RCVTIMEO says (a tick of the kernel more: 4 to 10 ms), so it is given less than a
 * call's time, and a deadline that is near, or a reply that is slow, is waited for with ppoll. Much less it must not be: an end
 * that is near costs a processor about to idle more than one that is far, 7 % of each call at 12 ms, 5 % at 25, 3 % at 34, 1 %
 * from 60 on. */
static tg_trouble
receive_by(const tg_redis_wire *wire, char *bytes, size_t size, uint64_t deadline_us, bool *polls, ssize_t *got,
           tg_error *error)
{
    const int fd = atomic_load(&wire->fd);
    if (!*polls && tg__monotonic_us() + wire->receives_for_us + RECEIVES_LATE_US < deadline_us) {
        tg__store_waits();
        *got = recv(fd, bytes, size, 0);
        if (*got != -1 || (errno != EAGAIN && errno != EWOULDBLOCK))
            return TG__TROUBLE_NONE;
    }
    *polls = true;
    const tg_trouble trouble = wait_for(fd, POLLIN, deadline_us, tg__wire_peer(wire), "reply", error);
    if (trouble == TG__TROUBLE_NONE)
        *got = recv(fd, bytes, size, MSG_DONTWAIT);
    return trouble;
}

/* A short string that has come whole and alone, as what scripts answer does: there is nothing to search for. false: the
 * reader's. */
static bool
whole_string(const char *bytes, size_t length, tg_heard *heard)
{
    size_t at = 1, said = 0;
    if (length == 0 || bytes[0] != '$')
        return false;
    while (at < length && at < 8 && bytes[at] >= '0' && bytes[at] <= '9')
        said = said * 10 + (size_t)(bytes[at++] - '0');
    if (at == 1 || at + 2 + said + 2 != length || memcmp(bytes + at, "\r\n", 2) != 0 ||
        memcmp(bytes + length - 2, "\r\n", 2) != 0 || said >= sizeof heard->bytes)
        return false;
    memcpy(heard->bytes, bytes + at + 2, said);
    heard->bytes[said] = '\0';
    heard->string = (redisReply){ .type = REDIS_REPLY_STRING, .str = heard->bytes, .len = said };
    heard->reply = &heard->string;
    return true;
}

/* Nothing is left over of what came before. */
static bool
reader_empty(const redisReader *reader)
{
    return reader->pos == reader->len && reader->ridx == -1;
}

tg_trouble
tg__wire_hear(tg_redis_wire *wire, uint64_t deadline_us, tg_heard *heard, tg_error *error)
{
    char bytes[4096];
    bool polls = false;
    tg_trouble trouble = reader_empty(wire->reader) ? TG__TROUBLE_NONE : tg__wire_take(wire, &heard->reply, error);
    while (trouble == TG__TROUBLE_NONE && !heard->reply) {
        ssize_t got;
        trouble = wire->tls ? receive_secured(wire, bytes, sizeof bytes, deadline_us, &got, error)
                            : receive_by(wire, bytes, sizeof bytes, deadline_us, &polls, &got, error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        if (got > 0) {
            if (reader_empty(wire->reader) && whole_string(bytes, (size_t)got, heard))
                break;
            trouble = tg__wire_feed(wire, bytes, (size_t)got, error);
            if (trouble == TG__TROUBLE_NONE)
                trouble = tg__wire_take(wire, &heard->reply, error);
        } else if (got == 0) {
            tg__error(error, TG_E_STORE, "%s: the server closed the connection", tg__wire_peer(wire));
            trouble = TG__TROUBLE_LINK;
        } else if (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK) {
            tg__error_system(error, TG_E_STORE, errno, "%s: receive", tg__wire_peer(wire));
            trouble = TG__TROUBLE_LINK;
        }
    }
    if (trouble == TG__TROUBLE_NONE)
        wire->used_at_us = heard->at_us = tg__monotonic_us();
    return trouble;
}

bool
tg__wire_sound(tg_redis_wire *wire, uint64_t now_us)
{
    char byte;
    if (wire->reader->pos != wire->reader->len)
        return false; /* more came than was asked for: each answer from here on would be the one before's */
    if (now_us - wire->used_at_us < IDLE_AFTER_US)
        return true; /* has had no time to go stale; a system call less for who asks without a pause */
    if (wire->tls)
        return tg__tls_quiet(wire);
    const ssize_t got = recv(atomic_load(&wire->fd), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == -1 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

/* ---- commands ---- */

void
tg__resp_raw(tg_resp *resp, const void *data, size_t length)
{
    char *const at = tg__resp_room(resp, length);
    if (at)
        memcpy(at, data, length);
}

/* "$12\r\n", with room behind it for so many bytes, which are the caller's to write; NULL: it does not fit. */
static inline char *
put_line(tg_resp *resp, char kind, size_t count, size_t behind)
{
    char digits[TG__DIGITS_MAX], *const end = digits + sizeof digits;
    const char *digit = tg__digits(end, count);
    const size_t length = 1 + (size_t)(end - digit) + 2;
    char *at = tg__resp_room(resp, length + behind);
    if (!at)
        return NULL;
    *at++ = kind;
    while (digit < end)
        *at++ = *digit++;
    *at++ = '\r';
    *at++ = '\n';
    return at;
}

void
tg__resp_count(tg_resp *resp, char kind, size_t count)
{
    put_line(resp, kind, count, 0);
}

void
tg__resp_bulk(tg_resp *resp, const void *data, size_t length)
{
    char *const at = length > resp->size ? NULL : put_line(resp, '$', length, length + 2);
    if (!at) {
        resp->full = true;
        return;
    }
    if (length)
        memcpy(at, data, length);
    at[length] = '\r';
    at[length + 1] = '\n';
}

void
tg__resp_command(tg_resp *resp, size_t count, const char *const *words)
{
    tg__resp_count(resp, '*', count);
    for (size_t i = 0; i < count; i++)
        tg__resp_bulk(resp, words[i], strlen(words[i]));
}
