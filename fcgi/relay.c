/* Applications behind the loop: see relay.h. */
#include "relay.h"

#include "loop_inside.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define QUEUE_BYTES_MAX 262144u /* for one application; above: its web server is not read */
#define DOWN_US UINT64_C(1000000) /* an application that was away is passed over for so long, if there is another */
#define KEPT_US UINT64_C(30000000)

typedef enum relay_state {
    RELAY_GATHERING, /* the beginning of its body is read, to decide by it */
    RELAY_PENDING,   /* its decision is under way */
    RELAY_DECIDED,   /* and is there: asked again at the end of the round */
    RELAY_HELD,      /* let through, and not yet its turn; this list is in the order of the turns */
    RELAY_CONNECTING,
    RELAY_WORKING,
    RELAY_KEPT,
    RELAY_DEAD
} relay_state;

struct fcgi_relay {
    source source;
    int fd;
    uint8_t state;
    bool polled;
    bool reused;     /* the connection has served before: it may have been closed meanwhile */
    bool repeatable;
    bool busy;       /* some application was there and had no room */
    bool late;       /* some application did not accept in time */
    bool gathered;   /* as much of the body as is decided by is in exchange.out */
    bool passes;     /* HELD: to an application; else `text` is the answer */
    char *text;      /* HELD: what the responder wrote; owned */
    size_t text_length;
    uint32_t interest;
    unsigned tried;  /* 1u << backend */
    size_t backend;
    connection *conn; /* NULL: kept or dead */
    fcgi_request *request;
    const fcgi_listener *listener;
    void *held; /* what the responder left: before CONNECTING for what comes next (the body so far is in exchange.out),
                   else for the answer's settling; NULL: nothing */
    uint64_t deadline_us;
    fcgi_relay *before, *after; /* in its list */
    fcgi_relay *sibling;        /* next of its connection */
    fcgi_exchange exchange;
};

/* ---- lists */

static fcgi_relay_list *
list_of(fcgi_loop *loop, const fcgi_relay *relay)
{
    _Static_assert(sizeof loop->relays.lists / sizeof *loop->relays.lists == RELAY_DEAD, "one for each that lives");
    return &loop->relays.lists[relay->state];
}

static void
leave_list(fcgi_loop *loop, fcgi_relay *relay)
{
    fcgi_relay_list *list = list_of(loop, relay);
    *(relay->before ? &relay->before->after : &list->first) = relay->after;
    *(relay->after ? &relay->after->before : &list->last) = relay->before;
    if (relay->state == RELAY_KEPT)
        loop->relays.kept_count--;
    else
        loop->relays.count--;
}

static void
enter_list_until(fcgi_loop *loop, fcgi_relay *relay, relay_state state, uint64_t deadline_us)
{
    relay->state = (uint8_t)state;
    relay->deadline_us = deadline_us;
    fcgi_relay_list *list = list_of(loop, relay);
    relay->before = list->last;
    while (relay->before && relay->before->deadline_us > deadline_us) /* HELD only: turns that come in another order */
        relay->before = relay->before->before;
    relay->after = relay->before ? relay->before->after : list->first;
    *(relay->before ? &relay->before->after : &list->first) = relay;
    *(relay->after ? &relay->after->before : &list->last) = relay;
    if (state == RELAY_KEPT)
        loop->relays.kept_count++;
    else
        loop->relays.count++;
}

static void
enter_list(fcgi_loop *loop, fcgi_relay *relay, relay_state state)
{
    const uint64_t waits_us = state == RELAY_CONNECTING ? loop->options.relay_connect_us
                              : state == RELAY_WORKING  ? loop->options.relay_us
                              : state == RELAY_KEPT     ? KEPT_US
                                                        : loop->options.request_us;
    enter_list_until(loop, relay, state, loop->now_us + waits_us);
}

static void
move_list(fcgi_loop *loop, fcgi_relay *relay, relay_state state)
{
    leave_list(loop, relay);
    enter_list(loop, relay, state);
}

/* ---- ends */

static void
close_backend(const fcgi_loop *loop, fcgi_relay *relay)
{
    if (relay->polled && relay->fd != -1) /* as in close_connection(): another process may hold a copy */
        epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, relay->fd, NULL);
    if (relay->fd != -1)
        close(relay->fd);
    relay->fd = -1;
    relay->polled = false;
}

static void
bury(fcgi_loop *loop, fcgi_relay *relay)
{
    leave_list(loop, relay);
    close_backend(loop, relay);
    fcgi_exchange_fini(&relay->exchange);
    if (relay->held)
        loop->responder.forget(loop->responder.context, relay->held);
    relay->held = NULL;
    free(relay->text);
    relay->text = NULL;
    relay->state = RELAY_DEAD;
    relay->after = loop->relays.dead;
    loop->relays.dead = relay;
}

void
fcgi_relay_bury(fcgi_loop *loop)
{
    while (loop->relays.dead) {
        fcgi_relay *relay = loop->relays.dead;
        loop->relays.dead = relay->after;
        free(relay);
    }
}

/* Parts the relay from its request and connection, which go on without it. */
static void
part(fcgi_relay *relay)
{
    fcgi_relay **link = &relay->conn->relays;
    while (*link != relay)
        link = &(*link)->sibling;
    *link = relay->sibling;
    relay->request->owner = NULL;
    relay->request->streams = false;
    relay->request = NULL;
    relay->conn = NULL;
}

static void
give_up(fcgi_loop *loop, fcgi_relay *relay)
{
    /* The record is for an application that looks; the closed connection is for all others. */
    if (relay->state == RELAY_WORKING && fcgi_queue_bytes(&relay->exchange.out) == 0 &&
        fcgi_exchange_abort(&relay->exchange))
        (void)!send(relay->fd, relay->exchange.out.data + relay->exchange.out.at,
                    fcgi_queue_bytes(&relay->exchange.out), MSG_NOSIGNAL | MSG_DONTWAIT);
    part(relay);
    bury(loop, relay);
}

void
fcgi_relay_abort(fcgi_loop *loop, fcgi_request *request)
{
    give_up(loop, request->owner);
}

void
fcgi_relay_drop_all(fcgi_loop *loop, connection *conn)
{
    while (conn->relays)
        give_up(loop, conn->relays);
}

/* ---- what the web server gets when the application gives nothing */

static void
put_failure(fcgi_loop *loop, uint16_t id, int status, const uint8_t *prefix, size_t prefix_length)
{
    static const struct failure {
        int status;
        const char *reason, *code, *message;
    } failures[] = {
        { 408, "Request Timeout", "REQUEST_TIMEOUT", "The request's body did not come in time." },
        { 502, "Bad Gateway", "BAD_GATEWAY", "The application cannot be reached or gave no answer." },
        { 503, "Service Unavailable", "OVERLOADED", "The application has no room for this request at the moment." },
        { 504, "Gateway Timeout", "GATEWAY_TIMEOUT", "The application did not answer in time." },
    };
    const struct failure *failure = failures;
    while (failure->status != status)
        failure++;
    uint8_t *record = loop->out + loop->out_length;
    char *text = (char *)record + FCGI_HEADER_BYTES;
    char body[160];
    const int body_length =
        snprintf(body, sizeof body, "{\"code\": \"%s\", \"message\": \"%s\"}", failure->code, failure->message);
    int length = snprintf(text, FCGI_TEXT_BYTES_MAX - FCGI_PREFIX_BYTES_MAX,
                          "Status: %d %s\r\nContent-Type: application/json\r\nCache-Control: no-store\r\n%s"
                          "Content-Length: %d\r\n",
                          status, failure->reason, status == 503 ? "Retry-After: 1\r\n" : "", body_length);
    if (prefix_length)
        memcpy(text + length, prefix, prefix_length);
    length += (int)prefix_length;
    length += snprintf(text + length, FCGI_TEXT_BYTES_MAX - (size_t)length, "\r\n%s", body);
    loop->out_length += fcgi_wrap_answer(record, id, (size_t)length);
}

static void
settle_answer(fcgi_loop *loop, fcgi_relay *relay, int status)
{
    void *held = relay->held;
    if (!held || relay->state < RELAY_CONNECTING)
        return;
    const fcgi_queue *seen = &relay->exchange.seen;
    relay->held = NULL;
    loop->responder.settle(loop->responder.context, held, status,
                           (tg_text){ .data = (const char *)seen->data, .length = seen->length });
}

/* Ends the request without the application. What it has begun to say is broken off so that the web server sees it, or a
 * client would take half an answer for a whole one. */
static void
fail(fcgi_loop *loop, fcgi_relay *relay, int status)
{
    connection *conn = relay->conn;
    fcgi_request *request = relay->request;
    const bool alone = conn->session.request_count == 1;
    settle_answer(loop, relay, status);
    const bool answered = relay->exchange.answered;
    if (!answered)
        put_failure(loop, request->id, status, relay->exchange.prefix, relay->exchange.prefix_length);
    else if (!alone)
        loop->out_length += fcgi_write_end(loop->out + loop->out_length, request->id, FCGI_OVERLOADED);
    part(relay);
    bury(loop, relay);
    fcgi_loop_end_request(conn, request);
    if (answered && alone)
        conn->done = true; /* closed without an end */
}

/* ---- connecting */

static void
want_backend_events(fcgi_loop *loop, fcgi_relay *relay, uint32_t interest)
{
    if (relay->polled && relay->interest == interest)
        return;
    if (interest == 0) { /* out of it altogether: that the application has left is told whatever is asked for, always */
        if (relay->polled)
            epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, relay->fd, NULL);
        relay->polled = false;
        relay->interest = 0;
        return;
    }
    struct epoll_event event = { .events = interest, .data.ptr = &relay->source };
    if (epoll_ctl(loop->epoll_fd, relay->polled ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, relay->fd, &event) == -1) {
        fcgi_log(FCGI_ERROR, "epoll", "%s", strerror(errno)); /* its deadline ends it */
        return;
    }
    relay->polled = true;
    relay->interest = interest;
}

static size_t
listener_index(const fcgi_loop *loop, const fcgi_listener *listener)
{
    for (size_t i = 0; i < loop->listener_count; i++)
        if (loop->listeners[i].listener == listener)
            return i;
    return 0;
}

static bool
take_kept(fcgi_loop *loop, fcgi_relay *relay, size_t backend)
{
    /* The latest used first. */
    for (fcgi_relay *kept = loop->relays.lists[RELAY_KEPT].last; kept; kept = kept->before) {
        if (kept->listener != relay->listener || kept->backend != backend)
            continue;
        char byte;
        if (recv(kept->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != -1 || (errno != EAGAIN && errno != EWOULDBLOCK))
            continue; /* it has been closed, or says something nobody asked for; its event comes */
        relay->fd = kept->fd;
        struct epoll_event event = { .events = EPOLLIN, .data.ptr = &relay->source };
        relay->polled = epoll_ctl(loop->epoll_fd, EPOLL_CTL_MOD, relay->fd, &event) == 0;
        relay->interest = EPOLLIN;
        relay->reused = true;
        kept->fd = -1;
        bury(loop, kept);
        return true;
    }
    return false;
}

/* The next application that was not tried: one that is not known to be away, else any. -1: none is left. */
static int
next_backend(const fcgi_loop *loop, const fcgi_relay *relay, size_t index)
{
    int fallback = -1;
    for (size_t i = 0; i < relay->listener->rights.backend_count; i++) {
        if (relay->tried & 1u << i)
            continue;
        if (loop->relays.down_until_us[index][i] <= loop->now_us)
            return (int)i;
        if (fallback == -1)
            fallback = (int)i;
    }
    return fallback;
}

/* Leaves the relay connecting or working on the next application that can be had; false: there is none. */
static bool
connect_next(fcgi_loop *loop, fcgi_relay *relay)
{
    const size_t index = listener_index(loop, relay->listener);
    close_backend(loop, relay);
    relay->reused = false;
    for (int next; (next = next_backend(loop, relay, index)) != -1;) {
        const fcgi_backend *backend = &relay->listener->rights.backends[next];
        relay->tried |= 1u << next;
        relay->backend = (size_t)next;
        if (take_kept(loop, relay, relay->backend)) {
            move_list(loop, relay, RELAY_WORKING);
            return true;
        }
        const int fd = socket(backend->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        int why = errno;
        if (fd == -1) {
            fcgi_log_rarely(&loop->relays.away_gate, FCGI_ERROR, "relay-failing", "socket: %s", strerror(why));
            relay->busy = true;
            return false;
        }
        const bool tcp = backend->address.ss_family != AF_UNIX;
        if (tcp) {
            const int one = 1;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        }
        relay->fd = fd;
        if (connect(fd, (const struct sockaddr *)&backend->address, backend->length) == 0) {
            move_list(loop, relay, RELAY_WORKING);
            return true;
        }
        why = errno;
        if (why == EINPROGRESS) {
            move_list(loop, relay, RELAY_CONNECTING);
            want_backend_events(loop, relay, EPOLLOUT);
            return true;
        }
        close_backend(loop, relay);
        relay->busy = relay->busy || why == EAGAIN; /* a unix socket's queue is full */
        if (why != EAGAIN)
            loop->relays.down_until_us[index][next] = loop->now_us + DOWN_US;
        fcgi_log_rarely(&loop->relays.away_gate, FCGI_WARN, "application-away", "%s: %s", backend->text, strerror(why));
    }
    return false;
}

static int
away_status(const fcgi_relay *relay)
{
    return relay->late ? 504 : relay->busy ? 503 : 502;
}

/* ---- carrying */

typedef struct passing {
    const fcgi_responder *responder;
    const fcgi_listener *listener;
} passing;

static bool
pass_param(void *context, tg_text name, tg_text *value)
{
    const passing *through = context;
    return through->responder->pass(through->responder->context, through->listener, name, value);
}

/* A relay in no list yet. NULL: there is no room; the request is answered and finished. */
static fcgi_relay *
make_relay(fcgi_loop *loop, connection *conn, fcgi_request *request)
{
    fcgi_relay *relay = loop->relays.count < loop->options.connections_max ? malloc(sizeof *relay) : NULL;
    if (!relay) {
        put_failure(loop, request->id, 503, NULL, 0);
        fcgi_loop_end_request(conn, request);
        return NULL;
    }
    memset(relay, 0, offsetof(fcgi_relay, exchange) + offsetof(fcgi_exchange, prefix));
    relay->source.kind = SOURCE_RELAY;
    relay->fd = -1;
    relay->listener = conn->listener;
    relay->conn = conn;
    relay->request = request;
    relay->sibling = conn->relays;
    conn->relays = relay;
    request->owner = relay;
    return relay;
}

/* From the decision on. The relay is in a list. */
static bool
begin_exchange(fcgi_loop *loop, fcgi_relay *relay, tg_text prefix)
{
    fcgi_request *request = relay->request;
    passing through = { &loop->responder, relay->listener };
    const fcgi_exchange_options options = {
        .front_id = request->id,
        .role = request->role,
        .keep = relay->listener->rights.keep > 0,
        .params = { .data = request->params, .length = request->params_length },
        .pass = loop->responder.pass ? pass_param : NULL,
        .context = &through,
        .wants_head = relay->held != NULL,
        .prefix = prefix,
    };
    return fcgi_exchange_begin(&relay->exchange, &options);
}

void
fcgi_relay_begin(fcgi_loop *loop, connection *conn, fcgi_request *request, const fcgi_order *order, tg_text prefix)
{
    fcgi_relay *relay = make_relay(loop, conn, request);
    if (!relay) {
        if (order->held)
            loop->responder.forget(loop->responder.context, order->held);
        return;
    }
    request->streams = true;
    relay->repeatable = order->repeatable;
    relay->held = order->held;
    enter_list(loop, relay, RELAY_CONNECTING);
    if (!begin_exchange(loop, relay, prefix))
        fail(loop, relay, 503);
    else if (!connect_next(loop, relay))
        fail(loop, relay, away_status(relay));
}

/* ---- requests that are answered or passed on later */

/* Puts it into the list that the order means; false: there is no room for the text, and what was held is forgotten. */
static bool
await(fcgi_loop *loop, fcgi_relay *relay, const fcgi_order *order, tg_text text)
{
    relay->held = order->held;
    relay->repeatable = order->repeatable;
    if (!order->hold_us) {
        enter_list(loop, relay, order->pends ? RELAY_PENDING : RELAY_GATHERING);
        if (order->pends)
            *order->ticket = relay;
        return true;
    }
    relay->passes = order->relay;
    relay->text = malloc(text.length + 1);
    relay->text_length = text.length;
    enter_list_until(loop, relay, RELAY_HELD, loop->now_us + order->hold_us);
    if (!relay->text)
        return false;
    memcpy(relay->text, text.data, text.length);
    return true;
}

void
fcgi_relay_defer(fcgi_loop *loop, connection *conn, fcgi_request *request, const fcgi_order *order, tg_text text)
{
    fcgi_relay *relay = make_relay(loop, conn, request);
    if (!relay) {
        loop->responder.forget(loop->responder.context, order->held);
        return;
    }
    request->streams = order->streams || order->relay;
    if (!await(loop, relay, order, text))
        fail(loop, relay, 503);
}

/* From here to an application, with what has come of the body. The relay is in a list. */
static void
pass_on(fcgi_loop *loop, fcgi_relay *relay, tg_text prefix)
{
    fcgi_queue body = relay->exchange.out;
    const bool ended = relay->exchange.stdin_ended;
    relay->exchange.out = (fcgi_queue){ 0 };
    move_list(loop, relay, RELAY_CONNECTING);
    bool fine = begin_exchange(loop, relay, prefix);
    if (fine && body.length > 0)
        fine = fcgi_exchange_stream(&relay->exchange, FCGI_STDIN, body.data, body.length);
    if (fine && ended)
        fine = fcgi_exchange_stream(&relay->exchange, FCGI_STDIN, NULL, 0);
    fcgi_queue_fini(&body);
    if (!fine)
        fail(loop, relay, 503);
    else if (!connect_next(loop, relay))
        fail(loop, relay, away_status(relay));
}

/* The text is in loop->out already, or is copied there. */
static void
answer_late(fcgi_loop *loop, fcgi_relay *relay, const char *text, size_t length)
{
    connection *conn = relay->conn;
    fcgi_request *request = relay->request;
    uint8_t *record = loop->out + loop->out_length;
    if (text)
        memcpy(record + FCGI_HEADER_BYTES, text, length);
    loop->out_length += fcgi_wrap_answer(record, request->id, length);
    part(relay);
    bury(loop, relay); /* and the body with it */
    fcgi_loop_end_request(conn, request);
}

/* Asks the responder again, and does what it says. */
static void
ask_again(fcgi_loop *loop, fcgi_relay *relay)
{
    fcgi_request *request = relay->request;
    fcgi_queue *body = &relay->exchange.out;
    for (;;) {
        fcgi_order order = { 0 };
        const fcgi_call call = {
            .listener = relay->listener,
            .role = request->role,
            .params = { .data = request->params, .length = request->params_length },
            .body = { .data = (const char *)body->data,
                      .length = !relay->gathered                  ? 0
                                : body->length < TG_BODY_BYTES_MAX ? body->length
                                                                   : TG_BODY_BYTES_MAX },
            .body_read = relay->gathered,
            .held = relay->held,
            .order = &order,
        };
        relay->held = NULL;
        char *text = (char *)loop->out + loop->out_length + FCGI_HEADER_BYTES;
        const size_t length = loop->responder.answer(loop->responder.context, &call, text);
        if (order.wants_body && (relay->exchange.stdin_ended || body->length >= TG_BODY_BYTES_MAX)) {
            relay->gathered = true; /* it has come meanwhile */
            relay->held = order.held;
            continue;
        }
        if (order.wants_body || order.pends || order.hold_us) {
            leave_list(loop, relay);
            if (!await(loop, relay, &order, (tg_text){ .data = text, .length = length }))
                fail(loop, relay, 503);
        } else if (order.relay) {
            relay->repeatable = order.repeatable;
            relay->held = order.held;
            pass_on(loop, relay, (tg_text){ .data = text, .length = length });
        } else {
            answer_late(loop, relay, NULL, length);
        }
        return;
    }
}

/* Its turn has come. */
static void
let_go(fcgi_loop *loop, fcgi_relay *relay)
{
    char *text = relay->text;
    const size_t length = relay->text_length;
    relay->text = NULL;
    relay->held = loop->responder.go_on(loop->responder.context, relay->held);
    if (relay->passes)
        pass_on(loop, relay, (tg_text){ .data = text, .length = length });
    else
        answer_late(loop, relay, text, length);
    free(text);
}

/* After something was done to it outside the connection's own events. */
static void
show(fcgi_loop *loop, connection *conn)
{
    if (!fcgi_loop_flush(loop, conn)) {
        loop->out_length = 0;
        fcgi_loop_close_connection(loop, conn);
        return;
    }
    fcgi_relay_flush(loop, conn);
    fcgi_loop_moved(loop, conn);
}

void
fcgi_loop_decided(void *loop, void *ticket)
{
    move_list(loop, ticket, RELAY_DECIDED);
}

void
fcgi_relay_conclude(fcgi_loop *loop)
{
    fcgi_relay *relay;
    while ((relay = loop->relays.lists[RELAY_DECIDED].first)) {
        connection *conn = relay->conn;
        ask_again(loop, relay);
        show(loop, conn);
    }
}

static void
gather(fcgi_loop *loop, fcgi_relay *relay, const fcgi_event *event)
{
    if (event->type != FCGI_STDIN || relay->exchange.stdin_ended)
        return; /* DATA is a Filter's */
    relay->exchange.stdin_ended = event->length == 0;
    if (!fcgi_queue_put(&relay->exchange.out, event->data, event->length)) {
        fail(loop, relay, 503);
    } else if (relay->state == RELAY_GATHERING &&
               (event->length == 0 || relay->exchange.out.length >= TG_BODY_BYTES_MAX)) {
        relay->gathered = true;
        ask_again(loop, relay);
    }
}

void
fcgi_relay_stream(fcgi_loop *loop, const fcgi_event *event)
{
    fcgi_relay *relay = event->request->owner;
    if (relay->state < RELAY_CONNECTING)
        gather(loop, relay, event);
    else if (!fcgi_exchange_stream(&relay->exchange, event->type, event->data, event->length))
        fail(loop, relay, 503);
    else
        move_list(loop, relay, relay->state); /* something moved */
}

bool
fcgi_relay_blocks(const connection *conn)
{
    for (const fcgi_relay *relay = conn->relays; relay; relay = relay->sibling)
        if (fcgi_queue_bytes(&relay->exchange.out) > QUEUE_BYTES_MAX ||
            (relay->state == RELAY_PENDING && relay->gathered)) /* it is being looked at: it must stay where it is */
            return true;
    return false;
}

/* A kept connection that was closed before a byte of the answer came: the request goes to another, if all of it is
 * still there and sending it twice does no harm. */
static bool
try_again(fcgi_loop *loop, fcgi_relay *relay)
{
    if (!relay->reused || !relay->repeatable || !fcgi_exchange_again(&relay->exchange))
        return false;
    relay->tried &= ~(1u << relay->backend);
    return connect_next(loop, relay);
}

/* The application hung up or talks nonsense. */
static void
lose(fcgi_loop *loop, fcgi_relay *relay, const char *why)
{
    if (try_again(loop, relay))
        return;
    fcgi_log_rarely(&loop->relays.broken_gate, FCGI_WARN, "application-broken", "%s: %s",
                    relay->listener->rights.backends[relay->backend].text, why);
    fail(loop, relay, 502);
}

/* Sends what is there. false: the application does not take it any more. It may still have answered. */
static bool
send_queue(fcgi_loop *loop, fcgi_relay *relay)
{
    fcgi_queue *queue = &relay->exchange.out;
    while (fcgi_queue_bytes(queue) > 0) {
        const ssize_t count =
            send(relay->fd, queue->data + queue->at, fcgi_queue_bytes(queue), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count >= 0) {
            fcgi_queue_take(queue, (size_t)count);
            move_list(loop, relay, RELAY_WORKING);
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
            return true;
        queue->at = queue->length; /* an answer to what it took may wait to be read */
        queue->keeps = queue->keeps && relay->reused;
        return false;
    }
    return true;
}

static void
settle_backend(fcgi_loop *loop, fcgi_relay *relay)
{
    const bool reads = unsent_bytes(relay->conn) <= UNSENT_BYTES_MAX;
    const bool sends = fcgi_queue_bytes(&relay->exchange.out) > 0;
    want_backend_events(loop, relay, (reads ? EPOLLIN : 0) | (sends ? EPOLLOUT : 0));
}

void
fcgi_relay_flush(fcgi_loop *loop, connection *conn)
{
    fcgi_relay *next;
    for (fcgi_relay *relay = conn->relays; relay; relay = next) {
        next = relay->sibling;
        if (relay->state != RELAY_WORKING)
            continue;
        if (fcgi_queue_bytes(&relay->exchange.out) > 0)
            send_queue(loop, relay);
        if (!(relay->interest & EPOLLIN))
            move_list(loop, relay, RELAY_WORKING); /* it waits for the web server, which has just moved */
        settle_backend(loop, relay);
    }
}

/* The application has ended the request. */
static void
finish(fcgi_loop *loop, fcgi_relay *relay)
{
    connection *conn = relay->conn;
    fcgi_request *request = relay->request;
    fcgi_exchange *exchange = &relay->exchange;
    if (exchange->status != FCGI_REQUEST_COMPLETE && !exchange->answered) {
        fail(loop, relay, exchange->status == FCGI_UNKNOWN_ROLE ? 502 : 503);
        return;
    }
    settle_answer(loop, relay, 502); /* an end without all of its fields, for which the web server has this word */
    const fcgi_listener *listener = relay->listener;
    /* Only a connection on which nothing is under way serves another request. */
    const bool keep = exchange->keep && !exchange->surplus && exchange->content_left == 0 &&
                      exchange->padding_left == 0 && exchange->stdin_ended && fcgi_queue_bytes(&exchange->out) == 0 &&
                      loop->relays.kept_count < listener->rights.keep && !loop->draining;
    part(relay);
    if (keep) {
        fcgi_exchange_fini(exchange);
        move_list(loop, relay, RELAY_KEPT);
        want_backend_events(loop, relay, EPOLLIN);
    } else {
        bury(loop, relay);
    }
    fcgi_loop_end_request(conn, request);
}

/* Reads once. The connection in front may be closed afterwards. */
static void
read_backend(fcgi_loop *loop, fcgi_relay *relay)
{
    ssize_t count;
    do
        count = recv(relay->fd, loop->in, IN_BYTES, MSG_DONTWAIT);
    while (count == -1 && errno == EINTR);
    if (count == -1 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return;
    if (count <= 0) {
        lose(loop, relay, count == 0 ? "it closed the connection before the end of its answer" : strerror(errno));
        return;
    }
    move_list(loop, relay, RELAY_WORKING);
    loop->out_length += fcgi_exchange_reply(&relay->exchange, loop->in, (size_t)count, loop->out + loop->out_length);
    if (relay->exchange.head_seen)
        settle_answer(loop, relay, 0);
    if (relay->exchange.state == FCGI_EXCHANGE_BROKEN)
        lose(loop, relay, relay->exchange.why);
    else if (relay->exchange.state == FCGI_EXCHANGE_ENDED)
        finish(loop, relay);
}

void
fcgi_relay_handle(fcgi_loop *loop, fcgi_relay *relay, uint32_t events)
{
    if (relay->state == RELAY_DEAD || relay->fd == -1)
        return;
    if (relay->state == RELAY_KEPT) {
        bury(loop, relay); /* closed by the application, or not to be trusted */
        return;
    }
    connection *conn = relay->conn;
    if (relay->state == RELAY_CONNECTING) {
        int why = 0;
        socklen_t length = sizeof why;
        if (getsockopt(relay->fd, SOL_SOCKET, SO_ERROR, &why, &length) != 0)
            why = errno;
        if (why != 0) {
            const size_t index = listener_index(loop, relay->listener);
            loop->relays.down_until_us[index][relay->backend] = loop->now_us + DOWN_US;
            fcgi_log_rarely(&loop->relays.away_gate, FCGI_WARN, "application-away", "%s: %s",
                            relay->listener->rights.backends[relay->backend].text, strerror(why));
            if (!connect_next(loop, relay))
                fail(loop, relay, away_status(relay));
        } else {
            move_list(loop, relay, RELAY_WORKING);
        }
    } else if (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
        if ((events & EPOLLIN) || unsent_bytes(conn) <= UNSENT_BYTES_MAX)
            read_backend(loop, relay);
        else /* gone, with its last words unread while the web server is slow: told again when that has caught up */
            want_backend_events(loop, relay, 0);
    }
    show(loop, conn);
}

/* ---- deadlines */

static void
expire_one(fcgi_loop *loop, fcgi_relay *relay)
{
    connection *conn = relay->conn;
    const char *text = relay->state < RELAY_CONNECTING ? "" : relay->listener->rights.backends[relay->backend].text;
    relay->late = true;
    if (relay->state == RELAY_HELD) {
        let_go(loop, relay);
    } else if (relay->state == RELAY_GATHERING) {
        fail(loop, relay, 408);
    } else if (relay->state < RELAY_CONNECTING) {
        fail(loop, relay, 503); /* a decision has a shorter deadline of its own */
    } else if (relay->state == RELAY_CONNECTING) {
        loop->relays.down_until_us[listener_index(loop, relay->listener)][relay->backend] = loop->now_us + DOWN_US;
        fcgi_log_rarely(&loop->relays.away_gate, FCGI_WARN, "application-away", "%s: not connected in time", text);
        if (!connect_next(loop, relay))
            fail(loop, relay, 504);
    } else {
        fcgi_log_rarely(&loop->relays.slow_gate, FCGI_WARN, "application-slow", "%s: nothing moved in time", text);
        fail(loop, relay, 504);
    }
    show(loop, conn);
}

void
fcgi_relay_expire(fcgi_loop *loop)
{
    fcgi_relay *relay;
    for (relay_state state = RELAY_GATHERING; state < RELAY_KEPT; state++)
        while ((relay = loop->relays.lists[state].first) && relay->deadline_us <= loop->now_us)
            expire_one(loop, relay);
    while ((relay = loop->relays.lists[RELAY_KEPT].first) && (relay->deadline_us <= loop->now_us || loop->draining))
        bury(loop, relay);
}

uint64_t
fcgi_relay_next_us(const fcgi_loop *loop)
{
    uint64_t next_us = NEVER_US;
    for (size_t i = 0; i < sizeof loop->relays.lists / sizeof *loop->relays.lists; i++) {
        const fcgi_relay *first = loop->relays.lists[i].first;
        if (first && first->deadline_us < next_us)
            next_us = first->deadline_us;
    }
    return next_us;
}

void
fcgi_relay_fini(fcgi_loop *loop)
{
    while (loop->relays.lists[RELAY_KEPT].first)
        bury(loop, loop->relays.lists[RELAY_KEPT].first);
    fcgi_relay_bury(loop);
}
