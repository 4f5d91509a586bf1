/* The inside of the loop, shared by loop.c (connections) and relay.c (applications behind). Nobody else includes it.
 *
 * Memory of connections and relays is freed at the end of a round only: an event of this round may still point
 * there. */
#ifndef TIDEGATE_FCGI_LOOP_INSIDE_H
#define TIDEGATE_FCGI_LOOP_INSIDE_H

#include "guest.h"
#include "log.h"
#include "loop.h"
#include "relay.h"

#include <signal.h>

#define IN_BYTES 65536u
#define OUT_BYTES 262144u
#define OUT_ROOM (FCGI_TEXT_BYTES_MAX + FCGI_WRAP_BYTES) /* kept free for the next answer */
#define UNSENT_BYTES_MAX 262144u /* above: nothing more is read from this peer */
#define EVENTS_PER_ROUND 256
#define ACCEPTS_PER_ROUND 64
#define TURN_ACCEPTS 16
#define RECLAIM_SILENT_US UINT64_C(40000) /* likewise, if it has not said a word yet */
#define ACCEPT_PAUSE_US UINT64_C(50000) /* after the system had no descriptor or memory for a connection */
#define RECLAIM_IDLE_US UINT64_C(1000000) /* at the cap, a connection idle for so long makes room for a new one */
#define LINGER_US UINT64_C(2000000)
#define GRACE_US UINT64_C(250000) /* SIGTERM: a connection that has not spoken yet gets so long to begin */
#define NEVER_US UINT64_MAX

typedef enum phase {
    PHASE_IDLE = 0, /* nothing begun, nothing to send */
    PHASE_WAITING,  /* something begun has not arrived whole */
    PHASE_SENDING,  /* the peer has not taken its answers */
    PHASE_RELAYING, /* an application works for it; the relay has its own deadlines */
    PHASE_LINGERING,/* closed on our side; bytes still under way are read away, or they would reset what we sent */
    PHASES
} phase;

typedef enum source_kind {
    SOURCE_SIGNALS,
    SOURCE_WAKE,
    SOURCE_HANDOVER,
    SOURCE_LISTENER,
    SOURCE_CONNECTION,
    SOURCE_RELAY,
    SOURCE_GUEST
} source_kind;

typedef struct source {
    source_kind kind; /* what epoll's pointer points to */
} source;

typedef struct connection {
    source source;
    int fd; /* -1: closed, freed at the end of the round: an event of this round may still point here */
    uint8_t phase;
    bool polled;  /* epoll knows the descriptor */
    bool spoken;  /* at least one byte has arrived */
    bool closing; /* a request ended that did not ask to keep the connection */
    bool done;    /* nothing more is answered here; close when everything is sent */
    bool end_seen;/* the peer has said all it had to say */
    bool eof;
    uint32_t interest;
    const fcgi_listener *listener;
    uint64_t deadline_us;
    uint64_t waiting_since_us; /* 0: not waiting */
    uint32_t waiting_record;   /* the session's record_count then */
    struct connection *before, *after; /* in its phase's list */
    uint8_t *unsent;
    size_t unsent_at, unsent_length, unsent_room;
    uint8_t *stash; /* input read but not understood yet, while the peer does not take its answers */
    size_t stash_at, stash_length;
    struct fcgi_relay *relays; /* its requests that applications work on */
    fcgi_session session;
} connection;

typedef struct listen_source {
    source source;
    fcgi_listener *listener;
    bool polled;
    unsigned taken; /* connections since it went to the end of the queue of those who wait for them */
} listen_source;

typedef struct connection_list {
    connection *first, *last;
} connection_list;

struct fcgi_loop {
    int epoll_fd;
    source signals, wake, handover;
    int signal_fd;   /* -1 in a secondary loop */
    int wake_fd;     /* an eventfd: fcgi_loop_stop */
    int handover_fd; /* -1: no other program is being started */
    sigset_t mask_before;
    fcgi_loop_options options;
    fcgi_responder responder;
    fcgi_pool pool;
    listen_source listeners[FCGI_LISTENERS_MAX];
    size_t listener_count;
    connection_list phases[PHASES];
    connection *dead;
    fcgi_relays relays;
    fcgi_guest guest;
    size_t connection_count;
    uint64_t now_us;
    uint64_t accept_after_us; /* 0: accepting; NEVER_US: at the cap; else a pause */
    bool draining;
    bool cut_off;
    uint64_t drain_deadline_us;
    fcgi_loop_counts counts;
    fcgi_log_gate broken_gate, timeout_gate, cap_gate, accept_gate, peer_gate;
    uint8_t *in;
    uint8_t *out;
    size_t out_length;
};

static inline size_t
unsent_bytes(const connection *conn)
{
    return conn->unsent_length - conn->unsent_at;
}

/* loop.c, for relay.c */
void fcgi_loop_close_connection(fcgi_loop *loop, connection *conn);
bool fcgi_loop_flush(fcgi_loop *loop, connection *conn); /* loop->out belongs to conn; false: broken */
void fcgi_loop_end_request(connection *conn, fcgi_request *request);
uint64_t fcgi_loop_clock_us(void);
void fcgi_loop_moved(fcgi_loop *loop, connection *conn); /* after anything happened to it from outside */

#endif
