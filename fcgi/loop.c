/* One epoll loop: see loop.h.
 *
 * A connection is in exactly one phase, each with its own deadline; a phase's list is in the order of entry, so
 * that the next deadline is at a head and no timer needs searching. Input is read into one buffer of the loop and
 * answers are built in another: a connection owns memory only while its peer is slow. */
#include "loop_inside.h"

#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

uint64_t
fcgi_loop_clock_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* ---- phases and deadlines */

static void
leave_phase(fcgi_loop *loop, connection *conn)
{
    connection_list *list = &loop->phases[conn->phase];
    *(conn->before ? &conn->before->after : &list->first) = conn->after;
    *(conn->after ? &conn->after->before : &list->last) = conn->before;
}

static void
enter_phase(fcgi_loop *loop, connection *conn, phase next, uint64_t deadline_us)
{
    connection_list *list = &loop->phases[next];
    conn->phase = (uint8_t)next;
    conn->deadline_us = deadline_us;
    conn->before = list->last;
    conn->after = NULL;
    *(list->last ? &list->last->after : &list->first) = conn;
    list->last = conn;
}

static void
move_phase(fcgi_loop *loop, connection *conn, phase next, uint64_t deadline_us)
{
    leave_phase(loop, conn);
    enter_phase(loop, conn, next, deadline_us);
}

/* ---- closing */

static void
watch_listeners(fcgi_loop *loop, bool watched)
{
    for (size_t i = 0; i < loop->listener_count; i++) {
        listen_source *from = &loop->listeners[i];
        if (from->listener->fd == -1 || from->polled == watched)
            continue;
        /* Level-triggered: a listener nobody accepts from would wake every round, so it is taken out meanwhile.
         * EPOLLEXCLUSIVE: several loops or processes on one socket are not all woken for one connection. */
        struct epoll_event event = { .events = EPOLLIN | EPOLLEXCLUSIVE, .data.ptr = &from->source };
        if (epoll_ctl(loop->epoll_fd, watched ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, from->listener->fd, &event) == 0)
            from->polled = watched;
    }
}

static void
close_connection(fcgi_loop *loop, connection *conn)
{
    if (conn->fd == -1)
        return;
    fcgi_relay_drop_all(loop, conn);
    /* Said, not left to close(): epoll forgets a socket with its last descriptor, and while another program is being
     * started for a handover, that one holds a copy until its exec. */
    if (conn->polled)
        epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
    close(conn->fd);
    conn->fd = -1;
    fcgi_session_fini(&conn->session);
    free(conn->unsent);
    free(conn->stash);
    conn->unsent = conn->stash = NULL;
    leave_phase(loop, conn);
    conn->after = loop->dead;
    loop->dead = conn;
    loop->connection_count--;
    if (loop->accept_after_us != 0 && !loop->draining) { /* a place and a descriptor are free again */
        loop->accept_after_us = 0;
        watch_listeners(loop, true);
    }
}

static void
bury_dead(fcgi_loop *loop)
{
    while (loop->dead) {
        connection *conn = loop->dead;
        loop->dead = conn->after;
        free(conn);
    }
    fcgi_relay_bury(loop);
    fcgi_guest_bury(loop);
}

/* ---- sending */

static bool
keep_unsent(connection *conn, const uint8_t *data, size_t length)
{
    if (conn->unsent_at > 0 && conn->unsent_length + length > conn->unsent_room) {
        memmove(conn->unsent, conn->unsent + conn->unsent_at, conn->unsent_length - conn->unsent_at);
        conn->unsent_length -= conn->unsent_at;
        conn->unsent_at = 0;
    }
    if (conn->unsent_length + length > conn->unsent_room) {
        size_t room = conn->unsent_room ? conn->unsent_room : 4096;
        while (room < conn->unsent_length + length)
            room *= 2;
        uint8_t *grown = realloc(conn->unsent, room);
        if (!grown)
            return false;
        conn->unsent = grown;
        conn->unsent_room = room;
    }
    memcpy(conn->unsent + conn->unsent_length, data, length);
    conn->unsent_length += length;
    return true;
}

/* Bytes sent; -1: the connection is broken. */
static ssize_t
send_some(const connection *conn, const uint8_t *data, size_t length)
{
    size_t sent = 0;
    while (sent < length) {
        const ssize_t count = send(conn->fd, data + sent, length - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count >= 0) {
            sent += (size_t)count;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)
            break;
        return -1;
    }
    return (ssize_t)sent;
}

/* What an application answers may go to a client that reads slowly, and the web server waits for it. */
static uint64_t
sending_us(const fcgi_loop *loop, const connection *conn)
{
    return conn->relays && loop->options.relay_us > loop->options.request_us ? loop->options.relay_us
                                                                             : loop->options.request_us;
}

/* Sends what was kept for this peer. false: broken. */
static bool
send_unsent(fcgi_loop *loop, connection *conn)
{
    const ssize_t sent = send_some(conn, conn->unsent + conn->unsent_at, unsent_bytes(conn));
    if (sent < 0)
        return false;
    conn->unsent_at += (size_t)sent;
    if (sent > 0 && conn->phase == PHASE_SENDING)
        move_phase(loop, conn, PHASE_SENDING, loop->now_us + sending_us(loop, conn));
    if (unsent_bytes(conn) == 0) {
        free(conn->unsent); /* being slow is the exception */
        conn->unsent = NULL;
        conn->unsent_at = conn->unsent_length = conn->unsent_room = 0;
    }
    return true;
}

/* Sends the loop's output buffer, which belongs to this connection; keeps what the peer does not take. false:
 * broken. */
static bool
flush_out(fcgi_loop *loop, connection *conn)
{
    if (loop->out_length == 0)
        return true;
    size_t sent = 0;
    if (unsent_bytes(conn) == 0) {
        const ssize_t count = send_some(conn, loop->out, loop->out_length);
        if (count < 0)
            return false;
        sent = (size_t)count;
    }
    const size_t left = loop->out_length - sent;
    const bool kept = left == 0 || keep_unsent(conn, loop->out + sent, left);
    loop->out_length = 0;
    return kept;
}

/* ---- understanding */

static void
end_request(connection *conn, fcgi_request *request)
{
    if (!request->keep) {
        conn->closing = true;
        if (request->role == FCGI_AUTHORIZER)
            conn->end_seen = true; /* an Authorizer is sent no STDIN that could end */
    }
    fcgi_session_finish(&conn->session, request);
    if (conn->closing && conn->session.request_count == 0)
        conn->done = true;
}

static void
answer_request(fcgi_loop *loop, connection *conn, const fcgi_event *event)
{
    fcgi_request *request = event->request;
    fcgi_order order = { 0 };
    const fcgi_call call = {
        .listener = conn->listener,
        .role = request->role,
        .too_large = event->kind == FCGI_EVENT_TOO_LARGE,
        .params = { .data = request->params, .length = request->params_length },
        .order = &order,
    };
    uint8_t *record = loop->out + loop->out_length;
    const size_t length =
        loop->responder.answer(loop->responder.context, &call, (char *)record + FCGI_HEADER_BYTES);
    assert(length <= FCGI_TEXT_BYTES_MAX);
    loop->counts.requests++;
    if (order.wants_body || order.pends || order.hold_us) {
        fcgi_relay_defer(loop, conn, request, &order, (tg_text){ .data = (char *)record + FCGI_HEADER_BYTES,
                                                                 .length = length });
        return;
    }
    if (order.relay) {
        fcgi_relay_begin(loop, conn, request, &order, (tg_text){ .data = (char *)record + FCGI_HEADER_BYTES,
                                                                 .length = length });
        return;
    }
    loop->out_length += fcgi_wrap_answer(record, request->id, length);
    end_request(conn, request);
}

/* false: the connection is broken. */
static bool
handle_event(fcgi_loop *loop, connection *conn, const fcgi_event *event)
{
    switch (event->kind) {
    case FCGI_EVENT_MORE:
    case FCGI_EVENT_BUSY:
        return true;
    case FCGI_EVENT_READY:
    case FCGI_EVENT_TOO_LARGE:
        if (conn->done) /* behind a request after which the peer wanted the connection closed */
            fcgi_session_finish(&conn->session, event->request);
        else
            answer_request(loop, conn, event);
        return true;
    case FCGI_EVENT_STREAM:
        fcgi_relay_stream(loop, event);
        return true;
    case FCGI_EVENT_ABORTED:
        if (event->request->owner)
            fcgi_relay_abort(loop, event->request);
        loop->out_length += fcgi_write_end(loop->out + loop->out_length, event->request->id, FCGI_REQUEST_COMPLETE);
        end_request(conn, event->request);
        return true;
    case FCGI_EVENT_REPLY:
        if (conn->done)
            return true;
        memcpy(loop->out + loop->out_length, event->reply, event->reply_length);
        loop->out_length += event->reply_length;
        if (event->last) {
            conn->closing = true;
            conn->done = conn->session.request_count == 0;
        }
        return true;
    case FCGI_EVENT_BROKEN:
        loop->counts.refused_frames++;
        fcgi_log_rarely(&loop->broken_gate, FCGI_WARN, "peer-broken", "%s: connection closed: %s",
                        conn->listener->text, event->why);
        /* What was answered before still goes out; after that there is nothing to say. */
        fcgi_relay_drop_all(loop, conn);
        conn->done = true;
        conn->end_seen = false;
        return true;
    }
    return false;
}

static bool
stash_input(connection *conn, const uint8_t *data, size_t length)
{
    if (length == 0)
        return true;
    assert(!conn->stash);
    conn->stash = malloc(length);
    if (!conn->stash)
        return false;
    memcpy(conn->stash, data, length);
    conn->stash_at = 0;
    conn->stash_length = length;
    return true;
}

static bool
is_blocked(const connection *conn)
{
    return fcgi_relay_blocks(conn) || fcgi_session_is_busy(&conn->session);
}

/* Whoever is to take what this peer's input leads to does not. */
static bool
must_wait(const connection *conn)
{
    return unsent_bytes(conn) > UNSENT_BYTES_MAX || is_blocked(conn);
}

/* Understands input and answers it. Stops where the peer does not take its answers and sets `*used` short of the end.
 * false: broken. */
static bool
understand(fcgi_loop *loop, connection *conn, const uint8_t *data, size_t length, size_t *used)
{
    fcgi_event event;
    size_t at = 0;
    do {
        while (at < length && !must_wait(conn)) {
            if (loop->out_length > OUT_BYTES - OUT_ROOM && !flush_out(loop, conn))
                return false;
            if (unsent_bytes(conn) > UNSENT_BYTES_MAX)
                break;
            at += fcgi_session_feed(&conn->session, data + at, length - at, &event);
            if (event.kind == FCGI_EVENT_MORE)
                break;
            if (!handle_event(loop, conn, &event))
                return false;
            if (event.kind == FCGI_EVENT_BROKEN)
                at = length;
        }
        if (!flush_out(loop, conn))
            return false;
        fcgi_relay_flush(loop, conn);
        /* If the application took all of what was too much, nothing will tell us later: so on, at once. */
    } while (at < length && !must_wait(conn));
    *used = at;
    return true;
}

/* ---- a connection's next state */

static void
want_events(fcgi_loop *loop, connection *conn, uint32_t interest)
{
    if (conn->polled && conn->interest == interest)
        return;
    struct epoll_event event = { .events = interest, .data.ptr = &conn->source };
    if (epoll_ctl(loop->epoll_fd, conn->polled ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, conn->fd, &event) == -1) {
        fcgi_log(FCGI_ERROR, "epoll", "%s", strerror(errno));
        close_connection(loop, conn);
        return;
    }
    conn->polled = true;
    conn->interest = interest;
}

static uint64_t
limit_deadline(const fcgi_loop *loop, uint64_t deadline_us)
{
    return loop->draining && deadline_us > loop->drain_deadline_us ? loop->drain_deadline_us : deadline_us;
}

/* When the oldest thing that has begun and is not whole began. A deadline from there, and not from the latest
 * byte, or a peer that sends a byte a second would hold its place for ever. */
static uint64_t
oldest_begin_us(const fcgi_loop *loop, const connection *conn)
{
    uint64_t oldest_us = NEVER_US;
    for (fcgi_request *request = conn->session.requests; request; request = request->next) {
        if (request->complete)
            continue;
        if (request->begun_us == 0)
            request->begun_us = loop->now_us;
        if (request->begun_us < oldest_us)
            oldest_us = request->begun_us;
    }
    if (oldest_us != NEVER_US)
        return oldest_us;
    const bool same = conn->waiting_since_us && conn->waiting_record == conn->session.record_count;
    return same ? conn->waiting_since_us : loop->now_us; /* part of a record */
}

/* Puts a connection where it belongs after anything happened to it. */
static void
settle(fcgi_loop *loop, connection *conn)
{
    if (unsent_bytes(conn) > 0) {
        if (conn->phase != PHASE_SENDING)
            move_phase(loop, conn, PHASE_SENDING, loop->now_us + sending_us(loop, conn));
        const bool reads = !conn->stash && !conn->eof && !conn->done && !must_wait(conn);
        want_events(loop, conn, EPOLLOUT | (reads ? EPOLLIN : 0));
        return;
    }
    if (conn->eof) {
        close_connection(loop, conn);
        return;
    }
    if (conn->done) {
        /* Closing with unread bytes resets the connection, and the peer may lose the answer it has not read yet. */
        if (conn->end_seen) {
            close_connection(loop, conn);
            return;
        }
        if (conn->phase != PHASE_LINGERING) {
            shutdown(conn->fd, SHUT_WR);
            move_phase(loop, conn, PHASE_LINGERING, loop->now_us + (loop->draining ? GRACE_US : LINGER_US));
        }
        want_events(loop, conn, EPOLLIN);
        return;
    }
    const bool blocked = conn->stash || is_blocked(conn);
    if (!blocked && fcgi_session_waits(&conn->session)) {
        conn->waiting_since_us = oldest_begin_us(loop, conn);
        conn->waiting_record = conn->session.record_count;
        move_phase(loop, conn, PHASE_WAITING,
                   limit_deadline(loop, conn->waiting_since_us + loop->options.request_us));
    } else if (conn->relays) {
        conn->waiting_since_us = 0;
        if (conn->phase != PHASE_RELAYING)
            move_phase(loop, conn, PHASE_RELAYING, limit_deadline(loop, NEVER_US));
    } else {
        conn->waiting_since_us = 0;
        move_phase(loop, conn, PHASE_IDLE, limit_deadline(loop, loop->now_us + loop->options.idle_us));
    }
    want_events(loop, conn, blocked ? 0 : EPOLLIN);
}

/* The peer has sent an empty STDIN or will send none: with nothing half-read behind it, nothing is under way any
 * more. */
static void
note_end(connection *conn)
{
    if (conn->done && conn->session.stdin_ended && !fcgi_session_waits(&conn->session))
        conn->end_seen = true;
}

/* Reads what has arrived. Returns the bytes read; 0: nothing more now, or the connection is closed. */
static size_t
read_connection(fcgi_loop *loop, connection *conn)
{
    ssize_t count;
    do
        count = recv(conn->fd, loop->in, IN_BYTES, MSG_DONTWAIT);
    while (count == -1 && errno == EINTR);
    if (count == -1) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            settle(loop, conn);
        else
            close_connection(loop, conn);
        return 0;
    }
    if (count == 0) {
        conn->eof = true;
        settle(loop, conn);
        return 0;
    }
    conn->spoken = true;
    if (conn->phase == PHASE_LINGERING)
        return (size_t)count; /* read away */
    size_t used = 0;
    if (!understand(loop, conn, loop->in, (size_t)count, &used) ||
        !stash_input(conn, loop->in + used, (size_t)count - used)) {
        loop->out_length = 0;
        close_connection(loop, conn);
        return 0;
    }
    note_end(conn);
    settle(loop, conn);
    return (size_t)count;
}

/* While draining: what a peer managed to send is answered; then the connection ends. */
static void
drain_connection(fcgi_loop *loop, connection *conn)
{
    if (conn->fd == -1 || conn->phase != PHASE_IDLE)
        return;
    if (!conn->spoken) { /* connected, and perhaps between connect and send */
        if (conn->deadline_us > loop->now_us + GRACE_US)
            move_phase(loop, conn, PHASE_IDLE, limit_deadline(loop, loop->now_us + GRACE_US));
        return;
    }
    /* A unix peer's later sends now fail at once, and what it sent before can still be read: no request is both sent
     * and lost. TCP has no such edge; there a request may cross our close, and the web server asks again. */
    if (!conn->listener->is_tcp)
        shutdown(conn->fd, SHUT_RD);
    while (conn->fd != -1 && conn->phase == PHASE_IDLE && read_connection(loop, conn) > 0)
        ;
    if (conn->fd != -1 && conn->phase == PHASE_IDLE)
        close_connection(loop, conn);
}

/* Goes on with input that had to wait. false: the connection is closed. */
static bool
use_stash(fcgi_loop *loop, connection *conn)
{
    if (!conn->stash || unsent_bytes(conn) > UNSENT_BYTES_MAX / 4 || is_blocked(conn))
        return true;
    uint8_t *stash = conn->stash;
    const size_t length = conn->stash_length;
    conn->stash = NULL;
    size_t used = 0;
    const bool fine = understand(loop, conn, stash, length, &used) && stash_input(conn, stash + used, length - used);
    free(stash);
    if (!fine) {
        loop->out_length = 0;
        close_connection(loop, conn);
        return false;
    }
    note_end(conn);
    return true;
}

void
fcgi_loop_moved(fcgi_loop *loop, connection *conn)
{
    if (conn->fd == -1 || !use_stash(loop, conn))
        return;
    note_end(conn);
    settle(loop, conn);
    if (loop->draining)
        drain_connection(loop, conn);
}

void
fcgi_loop_close_connection(fcgi_loop *loop, connection *conn)
{
    close_connection(loop, conn);
}

bool
fcgi_loop_flush(fcgi_loop *loop, connection *conn)
{
    return flush_out(loop, conn);
}

void
fcgi_loop_end_request(connection *conn, fcgi_request *request)
{
    end_request(conn, request);
}

static void
handle_connection(fcgi_loop *loop, connection *conn, uint32_t events)
{
    if (conn->fd == -1)
        return;
    if (unsent_bytes(conn) > 0 && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
        if (!send_unsent(loop, conn)) {
            close_connection(loop, conn);
            return;
        }
        if (!use_stash(loop, conn))
            return;
        fcgi_relay_flush(loop, conn); /* applications that waited for this peer may go on */
        settle(loop, conn);
        if (conn->fd == -1)
            return;
    }
    if ((events & (EPOLLERR | EPOLLHUP)) && conn->stash && unsent_bytes(conn) == 0) {
        close_connection(loop, conn); /* nobody is there to be answered, and epoll would say so again and again */
        return;
    }
    if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) && !conn->stash && !conn->eof)
        read_connection(loop, conn);
    if (loop->draining)
        drain_connection(loop, conn);
}

/* ---- accepting */

static bool
reclaim_idle(fcgi_loop *loop)
{
    /* First whoever has been silent from the beginning: a web server's request is there with its connection, and a
     * thousand of the others in the queue must not keep it waiting for a second each. */
    for (connection *conn = loop->phases[PHASE_IDLE].first; conn; conn = conn->after)
        if (!conn->spoken) {
            if (conn->deadline_us > loop->now_us + loop->options.idle_us - RECLAIM_SILENT_US)
                return false; /* soon */
            close_connection(loop, conn);
            return true;
        }
    connection *conn = loop->phases[PHASE_IDLE].first;
    if (!conn || conn->deadline_us > loop->now_us + loop->options.idle_us - RECLAIM_IDLE_US)
        return false;
    close_connection(loop, conn);
    return true;
}

static void
pause_accepting(fcgi_loop *loop, uint64_t until_us)
{
    loop->accept_after_us = until_us;
    watch_listeners(loop, false);
}

/* false: nothing more to accept now. */
static bool
accept_one(fcgi_loop *loop, const fcgi_listener *listener)
{
    if (loop->connection_count >= loop->options.connections_max && !loop->draining && !reclaim_idle(loop)) {
        fcgi_log_rarely(&loop->cap_gate, FCGI_WARN, "connections-full",
                        "%zu connections are open, the most allowed; new ones wait", loop->connection_count);
        /* Looked at again when one closes, and now and then because one may have become idle long enough. */
        pause_accepting(loop, loop->now_us + ACCEPT_PAUSE_US);
        return false;
    }
    const int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd == -1) {
        if (errno == EINTR || errno == ECONNABORTED)
            return true;
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            const int why = errno;
            if (!loop->draining && !reclaim_idle(loop)) {
                fcgi_log_rarely(&loop->accept_gate, FCGI_ERROR, "accept-failing", "%s: new connections wait",
                                strerror(why));
                pause_accepting(loop, loop->now_us + ACCEPT_PAUSE_US);
                return false;
            }
            return !loop->draining;
        }
        return false; /* EAGAIN: nothing waits; EINVAL: shut down */
    }
    if (!fcgi_listener_admits(listener, fd)) {
        fcgi_log_rarely(&loop->peer_gate, FCGI_WARN, "peer-refused", "%s: somebody whom peer-uid= does not name",
                        listener->text);
        close(fd);
        return true;
    }
    connection *conn = calloc(1, sizeof *conn);
    if (!conn) {
        close(fd);
        return true;
    }
    if (listener->is_tcp) {
        const int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* each answer is one send already */
    }
    conn->source.kind = SOURCE_CONNECTION;
    conn->fd = fd;
    conn->listener = listener;
    fcgi_session_init(&conn->session, &loop->pool);
    enter_phase(loop, conn, PHASE_IDLE, loop->now_us + loop->options.idle_us);
    loop->connection_count++;
    loop->counts.connections++;
    /* The request is usually there already: a connection for one request then never meets epoll. */
    read_connection(loop, conn);
    if (loop->draining)
        drain_connection(loop, conn);
    return true;
}

static void
handle_listener(fcgi_loop *loop, listen_source *from)
{
    const fcgi_listener *listener = from->listener;
    /* Where several accept from one socket, nobody takes a whole queue at once, and the kernel wakes whoever has waited
     * longest in its list: always the same, unless each goes to the end now and then. */
    const bool many = listener->shared || listener->kind == FCGI_LISTEN_INHERITED || loop->options.accepts_in_turns;
    for (int i = 0; i < (many ? TURN_ACCEPTS : ACCEPTS_PER_ROUND) && loop->accept_after_us == 0; i++, from->taken++)
        if (!accept_one(loop, listener))
            break;
    if (!many || from->taken < TURN_ACCEPTS || !from->polled)
        return;
    from->taken = 0;
    epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, listener->fd, NULL);
    struct epoll_event event = { .events = EPOLLIN | EPOLLEXCLUSIVE, .data.ptr = &from->source };
    from->polled = epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, listener->fd, &event) == 0;
}

/* ---- signals and the end */

static void
begin_drain(fcgi_loop *loop, const char *why)
{
    if (loop->draining)
        return;
    if (!loop->options.secondary)
        fcgi_log(FCGI_INFO, "stopping", "%s: no new connections; %zu are open", why, loop->connection_count);
    if (loop->responder.stopping)
        loop->responder.stopping(loop->responder.context);
    loop->draining = true;
    loop->drain_deadline_us = loop->now_us + loop->options.drain_us;
    loop->accept_after_us = 0;
    watch_listeners(loop, false);
    for (size_t i = 0; i < loop->listener_count; i++) {
        fcgi_listener *listener = loop->listeners[i].listener;
        fcgi_listener_unname(listener);
        if (listener->shared) {
            fcgi_listener_close(listener);
            continue;
        }
        if (listener->kind == FCGI_LISTEN_INHERITED)
            continue; /* its queue is for whoever serves it next */
        if (listener->kind == FCGI_LISTEN_UNIX)
            shutdown(listener->fd, SHUT_RDWR); /* ends the queue, keeps what is in it */
        while (accept_one(loop, listener))
            ;
        fcgi_listener_close(listener);
    }
    connection *next;
    for (connection *conn = loop->phases[PHASE_IDLE].first; conn; conn = next) {
        next = conn->after;
        drain_connection(loop, conn);
    }
    for (phase which = PHASE_WAITING; which < PHASES; which++)
        for (connection *conn = loop->phases[which].first; conn; conn = conn->after) {
            const uint64_t deadline_us =
                which == PHASE_LINGERING ? loop->now_us + GRACE_US : loop->drain_deadline_us;
            if (conn->deadline_us > deadline_us)
                conn->deadline_us = deadline_us;
        }
}

static void
begin_handover(fcgi_loop *loop)
{
    if (!loop->responder.hand_over || loop->draining || loop->handover_fd != -1)
        return;
    const int fd = loop->responder.hand_over(loop->responder.context);
    if (fd == -1)
        return;
    struct epoll_event event = { .events = EPOLLIN, .data.ptr = &loop->handover };
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) == -1) {
        fcgi_log(FCGI_ERROR, "epoll", "%s", strerror(errno));
        close(fd);
        return;
    }
    loop->handover_fd = fd;
}

/* The other program serves, or has failed. Until here both or we alone accept: at no moment nobody does. */
static void
end_handover(fcgi_loop *loop)
{
    char byte;
    ssize_t count;
    do
        count = read(loop->handover_fd, &byte, 1);
    while (count == -1 && errno == EINTR);
    close(loop->handover_fd);
    loop->handover_fd = -1;
    const bool served = count == 1;
    if (loop->responder.handed_over)
        loop->responder.handed_over(loop->responder.context, served);
    if (!served)
        return;
    for (size_t i = 0; i < loop->listener_count; i++) {
        loop->listeners[i].listener->shared = true;
        loop->listeners[i].listener->inode = 0; /* the name is the other's */
    }
    begin_drain(loop, "handed over");
}

static void
handle_signals(fcgi_loop *loop)
{
    struct signalfd_siginfo info;
    while (read(loop->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGHUP) {
            if (loop->responder.reload && !loop->draining)
                loop->responder.reload(loop->responder.context);
        } else if (info.ssi_signo == SIGUSR2) {
            begin_handover(loop);
        } else {
            begin_drain(loop, info.ssi_signo == SIGINT ? "SIGINT" : "SIGTERM");
        }
    }
}

void
fcgi_loop_stop(fcgi_loop *loop)
{
    const uint64_t one = 1;
    while (write(loop->wake_fd, &one, sizeof one) == -1 && errno == EINTR)
        ;
}

static void
expire(fcgi_loop *loop)
{
    for (phase which = 0; which < PHASES; which++) {
        connection *conn;
        while ((conn = loop->phases[which].first) && conn->deadline_us <= loop->now_us) {
            if (which == PHASE_RELAYING)
                loop->cut_off = true;
            if (which == PHASE_WAITING || which == PHASE_SENDING) {
                loop->counts.timeouts++;
                loop->cut_off = loop->cut_off || loop->draining;
                fcgi_log_rarely(&loop->timeout_gate, FCGI_WARN, "peer-slow", "%s: connection closed: %s",
                                conn->listener->text,
                                which == PHASE_WAITING ? "a request was begun and not completed in time"
                                                       : "an answer was not taken in time");
            }
            close_connection(loop, conn);
        }
    }
    if (loop->draining && loop->now_us >= loop->drain_deadline_us)
        for (phase which = 0; which < PHASES; which++)
            while (loop->phases[which].first) {
                loop->cut_off = loop->cut_off || (which >= PHASE_WAITING && which <= PHASE_RELAYING);
                close_connection(loop, loop->phases[which].first);
            }
    if (loop->accept_after_us != 0 && loop->now_us >= loop->accept_after_us && !loop->draining) {
        loop->accept_after_us = 0;
        watch_listeners(loop, true);
    }
}

static int
next_timeout_ms(const fcgi_loop *loop)
{
    uint64_t next_us = loop->draining ? loop->drain_deadline_us : NEVER_US;
    if (loop->accept_after_us != 0 && loop->accept_after_us < next_us)
        next_us = loop->accept_after_us;
    for (phase which = 0; which < PHASES; which++) {
        const connection *first = loop->phases[which].first;
        if (first && first->deadline_us < next_us)
            next_us = first->deadline_us;
    }
    const uint64_t relay_us = fcgi_relay_next_us(loop);
    if (relay_us < next_us)
        next_us = relay_us;
    const uint64_t guest_us = fcgi_guest_next_us(loop);
    if (guest_us < next_us)
        next_us = guest_us;
    if (next_us == NEVER_US)
        return -1;
    if (next_us <= loop->now_us)
        return 0;
    const uint64_t wait_ms = (next_us - loop->now_us + 999) / 1000;
    return wait_ms > 60000 ? 60000 : (int)wait_ms;
}

bool
fcgi_loop_run(fcgi_loop *loop)
{
    struct epoll_event events[EVENTS_PER_ROUND];
    loop->now_us = fcgi_loop_clock_us();
    watch_listeners(loop, true);
    while (!loop->draining || loop->connection_count > 0) {
        const int count = epoll_wait(loop->epoll_fd, events, EVENTS_PER_ROUND, next_timeout_ms(loop));
        if (count == -1 && errno != EINTR) {
            fcgi_log(FCGI_ERROR, "epoll", "%s", strerror(errno));
            return false;
        }
        loop->now_us = fcgi_loop_clock_us();
        bool signalled = false, stopped = false, handed = false;
        for (int i = 0; i < count; i++) {
            source *from = events[i].data.ptr;
            switch (from->kind) {
            case SOURCE_SIGNALS:
                signalled = true;
                break;
            case SOURCE_WAKE:
                stopped = true;
                break;
            case SOURCE_HANDOVER:
                handed = true;
                break;
            case SOURCE_LISTENER:
                if (loop->accept_after_us == 0 && !loop->draining)
                    handle_listener(loop, (listen_source *)from);
                break;
            case SOURCE_CONNECTION:
                handle_connection(loop, (connection *)from, events[i].events);
                break;
            case SOURCE_RELAY:
                fcgi_relay_handle(loop, (fcgi_relay *)from, events[i].events);
                break;
            case SOURCE_GUEST:
                fcgi_guest_handle(loop, (fcgi_guest_source *)from, events[i].events);
                break;
            }
        }
        if (signalled) /* last, when every event of this round has been looked at */
            handle_signals(loop);
        if (handed && loop->handover_fd != -1)
            end_handover(loop);
        if (stopped) {
            uint64_t told;
            (void)!read(loop->wake_fd, &told, sizeof told);
            begin_drain(loop, "told to");
        }
        expire(loop);
        fcgi_relay_expire(loop);
        fcgi_guest_expire(loop);
        /* What was asked in this round goes out together; what is answered may ask again. */
        do
            fcgi_relay_conclude(loop);
        while (fcgi_guest_flush(loop));
        bury_dead(loop);
        if (loop->responder.round)
            loop->responder.round(loop->responder.context);
    }
    bury_dead(loop);
    return !loop->cut_off;
}

const fcgi_loop_counts *
fcgi_loop_read_counts(const fcgi_loop *loop)
{
    return &loop->counts;
}

/* ---- opening and closing */

fcgi_loop *
fcgi_loop_open(const fcgi_loop_options *options, const fcgi_responder *responder, fcgi_listener *listeners,
               size_t listener_count)
{
    assert(listener_count <= FCGI_LISTENERS_MAX);
    fcgi_loop *loop = calloc(1, sizeof *loop);
    if (!loop)
        return NULL;
    loop->epoll_fd = loop->signal_fd = loop->wake_fd = loop->handover_fd = -1;
    loop->options = *options;
    fcgi_loop_options *set = &loop->options;
    set->connections_max = set->connections_max ? set->connections_max : 1024;
    set->params_bytes_max = set->params_bytes_max ? set->params_bytes_max : 128u << 10;
    set->requests_max = set->requests_max ? set->requests_max : 64;
    set->request_us = set->request_us ? set->request_us : UINT64_C(10000000);
    set->idle_us = set->idle_us ? set->idle_us : UINT64_C(300000000);
    set->drain_us = set->drain_us ? set->drain_us : UINT64_C(5000000);
    set->relay_connect_us = set->relay_connect_us ? set->relay_connect_us : UINT64_C(1000000);
    set->relay_us = set->relay_us ? set->relay_us : UINT64_C(60000000);
    loop->responder = *responder;
    loop->signals.kind = SOURCE_SIGNALS;
    loop->wake.kind = SOURCE_WAKE;
    loop->handover.kind = SOURCE_HANDOVER;
    const size_t held_min = set->params_bytes_max * 4;
    fcgi_pool_init(&loop->pool, &(fcgi_bounds){ .params_bytes_max = set->params_bytes_max,
                                                .requests_max = set->requests_max,
                                                .held_bytes_max = held_min > 64u << 20 ? held_min : 64u << 20,
                                                .connections_max = set->connections_max });
    for (size_t i = 0; i < listener_count; i++)
        loop->listeners[i] = (listen_source){ .source.kind = SOURCE_LISTENER, .listener = &listeners[i] };
    loop->listener_count = listener_count;

    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGHUP);
    sigaddset(&mask, SIGUSR2);
    int why = options->secondary ? 0 : pthread_sigmask(SIG_BLOCK, &mask, &loop->mask_before);
    if (why != 0) {
        free(loop);
        errno = why;
        return NULL;
    }
    loop->in = malloc(IN_BYTES);
    loop->out = malloc(OUT_BYTES);
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (!options->secondary)
        loop->signal_fd = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    loop->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN, .data.ptr = &loop->signals };
    struct epoll_event wake = { .events = EPOLLIN, .data.ptr = &loop->wake };
    if (!loop->in || !loop->out || loop->epoll_fd == -1 || (loop->signal_fd == -1 && !options->secondary) ||
        loop->wake_fd == -1 || epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->wake_fd, &wake) == -1 ||
        (loop->signal_fd != -1 && epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->signal_fd, &event) == -1)) {
        why = errno;
        fcgi_loop_close(loop);
        errno = why;
        return NULL;
    }
    return loop;
}

void
fcgi_loop_close(fcgi_loop *loop)
{
    if (!loop)
        return;
    loop->draining = true; /* nothing is accepted again */
    for (phase which = 0; which < PHASES; which++)
        while (loop->phases[which].first)
            close_connection(loop, loop->phases[which].first);
    fcgi_relay_fini(loop);
    bury_dead(loop);
    fcgi_guest_fini(loop);
    fcgi_pool_fini(&loop->pool);
    if (loop->signal_fd != -1)
        close(loop->signal_fd);
    if (loop->wake_fd != -1)
        close(loop->wake_fd);
    if (loop->handover_fd != -1)
        close(loop->handover_fd);
    if (loop->epoll_fd != -1)
        close(loop->epoll_fd);
    if (!loop->options.secondary)
        pthread_sigmask(SIG_SETMASK, &loop->mask_before, NULL);
    free(loop->in);
    free(loop->out);
    free(loop);
}
