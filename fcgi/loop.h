/* One epoll loop: listening sockets, connections, deadlines, signals. It knows how to carry requests and answers,
 * not what they say: that is the responder's. Must not enter: rules, parameters' names, CGI texts.
 *
 * One thread owns a loop; several loops share nothing but their listening sockets. */
#ifndef TIDEGATE_FCGI_LOOP_H
#define TIDEGATE_FCGI_LOOP_H

#include "codec.h"
#include "listen.h"

#define FCGI_TEXT_BYTES_MAX 16384u /* most that one answer's text may take */

/* What becomes of a call besides its text. All false at first. */
typedef struct fcgi_order {
    bool relay;      /* pass the request on to one of the listener's backends, the text before the answer's fields */
    bool repeatable; /* it may be sent a second time when a backend vanished without a word */
    bool wants_body; /* there is no text yet: ask again with the beginning of the body, and with `held` */
    bool pends;      /* there is no text yet: ask again, with `held`, once fcgi_loop_decided is called with the ticket */
    bool streams;    /* wants_body, pends: its body may be wanted, so what comes of it meanwhile is kept */
    uint64_t hold_us; /* the text is right, and so late it is sent or the request passed on */
    void **ticket;   /* pends: receives what fcgi_loop_decided takes */
    void *held;      /* wants_body, pends: for the next call; hold_us: for `go_on`; relay: for `settle`, NULL where
                        nobody asks for the answer */
} fcgi_order;

typedef struct fcgi_call {
    const fcgi_listener *listener; /* where it came in: decides what it may ask for */
    uint8_t role;                  /* fcgi_role: responder or authorizer */
    bool too_large;                /* its parameters exceeded the bound; `params` holds only their beginning */
    fcgi_params params;            /* borrowed for the call */
    tg_text body;   /* a second call: the first TG_BODY_BYTES_MAX of it */
    bool body_read; /* as much as there is of it */
    void *held;     /* what a former call for this request left; the responder's again. NULL: this is the first */
    fcgi_order *order;
} fcgi_call;

typedef struct fcgi_responder {
    /* Writes the CGI answer (fields, empty line, body) into text[FCGI_TEXT_BYTES_MAX]; returns its length. Must
     * not wait. */
    size_t (*answer)(void *context, const fcgi_call *call, char *text);
    /* Whether a relayed request's parameter goes on to the application, and as what value; NULL: as they are. */
    bool (*pass)(void *context, const fcgi_listener *listener, tg_text name, tg_text *value);
    /* What an application answered to a relayed request whose order held something: its fields, as far as 16 KiB; or
     * `status` alone, where it gave no answer. */
    void (*settle)(void *context, void *held, int status, tg_text head);
    void (*forget)(void *context, void *held); /* there will be no further call, and no answer */
    void *(*go_on)(void *context, void *held); /* its time has come: what is left for `settle`, or NULL */
    /* For a client of tg_async_open that lives on this loop; NULL where there is none. */
    void (*guest_ready)(void *context, int fd, bool readable, bool writable);
    void (*guest_wake)(void *context);
    void (*guest_flush)(void *context);
    void (*reload)(void *context); /* SIGHUP; may be NULL */
    /* SIGUSR2: starts a program that is to take the listening sockets over, and returns a descriptor from which one
     * byte comes when it serves them; it closes it without one if it fails. -1: it could not be started. May be
     * NULL. */
    int (*hand_over)(void *context);
    void (*handed_over)(void *context, bool served); /* what became of it */
    void (*stopping)(void *context); /* nothing is accepted any more; may be NULL */
    void (*round)(void *context);  /* after each round of events; may be NULL */
    void *context;
} fcgi_responder;

typedef struct fcgi_loop_options {
    size_t connections_max;   /* 0: 1024 */
    size_t params_bytes_max;  /* of one request; 0: 128 KiB */
    size_t requests_max;      /* at once on one connection; 0: 64 */
    uint64_t request_us;      /* a request begun, or an answer not taken, for this long ends its connection; 0: 10 s */
    uint64_t idle_us;         /* a connection without a request for this long is closed; 0: 300 s */
    uint64_t relay_connect_us; /* an application that does not accept for this long is passed over; 0: 1 s */
    uint64_t relay_us;        /* a relayed request on which nothing moves for this long is ended; 0: 60 s */
    bool accepts_in_turns;    /* others accept from these sockets too */
    bool secondary;           /* one loop of several: another one takes the signals and stops this one */
    uint64_t drain_us;        /* SIGTERM: longest until the end; 0: 5 s */
} fcgi_loop_options;

typedef struct fcgi_loop_counts {
    uint64_t connections, requests, refused_frames, timeouts;
} fcgi_loop_counts;

typedef struct fcgi_loop fcgi_loop;

/* Unless it is a secondary one: blocks SIGTERM, SIGINT, SIGHUP and SIGUSR2 and takes them from a descriptor instead.
 * Returns NULL with errno. `listeners` are open before it runs, borrowed, and closed when the loop stops accepting. */
fcgi_loop *fcgi_loop_open(const fcgi_loop_options *options, const fcgi_responder *responder, fcgi_listener *listeners,
                          size_t listener_count);
/* Serves until SIGTERM or SIGINT, then answers what was accepted. true: everything was answered; false: the drain
 * deadline cut something off, or epoll failed. */
bool fcgi_loop_run(fcgi_loop *loop);
/* As SIGTERM would. The only function that any thread may call. */
void fcgi_loop_stop(fcgi_loop *loop);
/* A call that pended is to be asked again, at the end of this round. On the loop's thread, and never from within its
 * own call. */
void fcgi_loop_decided(void *loop, void *ticket);
/* What a client of tg_async_open asks of this loop. The guest_ functions answer it. */
void fcgi_loop_house(fcgi_loop *loop, tg_async_loop *hooks);
const fcgi_loop_counts *fcgi_loop_read_counts(const fcgi_loop *loop);
void fcgi_loop_close(fcgi_loop *loop); /* accepts NULL */

#endif
