/* FastCGI 1.0 on the wire: records in, events out; answers in, records out. Pure: no I/O, no clock, no decision.
 * Must not enter: sockets, epoll, rules, anything of tidegate.h but its texts.
 *
 * A session is one connection's half-understood input. It is fed bytes as they arrive, split anywhere, and tells what
 * they mean one event at a time. What it may hold is bounded per request, per connection and, through the pool it
 * borrows its buffers from, over all connections of a loop together. */
#ifndef TIDEGATE_FCGI_CODEC_H
#define TIDEGATE_FCGI_CODEC_H

#include "tidegate.h"

#define FCGI_HEADER_BYTES 8u
#define FCGI_CONTENT_BYTES_MAX 65535u

typedef enum fcgi_type {
    FCGI_BEGIN_REQUEST = 1,
    FCGI_ABORT_REQUEST,
    FCGI_END_REQUEST,
    FCGI_PARAMS,
    FCGI_STDIN,
    FCGI_STDOUT,
    FCGI_STDERR,
    FCGI_DATA,
    FCGI_GET_VALUES,
    FCGI_GET_VALUES_RESULT,
    FCGI_UNKNOWN_TYPE
} fcgi_type;

typedef enum fcgi_role { FCGI_RESPONDER = 1, FCGI_AUTHORIZER, FCGI_FILTER } fcgi_role;

typedef enum fcgi_protocol_status {
    FCGI_REQUEST_COMPLETE = 0,
    FCGI_CANT_MPX_CONN,
    FCGI_OVERLOADED,
    FCGI_UNKNOWN_ROLE
} fcgi_protocol_status;

/* ---- parameters ---- */

typedef struct fcgi_params {
    const uint8_t *data;
    size_t length;
    size_t offset; /* start at 0 */
} fcgi_params;

typedef enum fcgi_params_step { FCGI_PARAMS_PAIR, FCGI_PARAMS_END, FCGI_PARAMS_BAD } fcgi_params_step;

/* The next pair, borrowed from `data`, in the order sent; repeated names are repeated. Bad: a length that does not fit;
 * it stays bad. */
fcgi_params_step fcgi_params_next(fcgi_params *params, tg_text *name, tg_text *value);

/* ---- what is being read ---- */

#define FCGI_PARAMS_KEPT_BYTES 4096u /* buffers up to this size stay with their request in the pool */
#define FCGI_POOL_KEPT 64u           /* requests that wait in the pool for the next one */

typedef struct fcgi_request {
    uint16_t id;
    uint8_t role;
    bool keep;          /* the peer wants the connection to stay open after this request */
    bool complete;      /* all parameters are in */
    bool streams;       /* set by the owner: what follows (STDIN, DATA) is wanted and told, else it is skipped */
    void *owner;        /* who carries it on until it is finished; NULL at first */
    uint8_t *params;
    size_t params_length;
    size_t params_room;
    uint64_t begun_us;  /* for whoever owns a clock; 0 at first */
    struct fcgi_request *next;
} fcgi_request;

typedef struct fcgi_bounds {
    size_t params_bytes_max;  /* of one request */
    size_t requests_max;      /* at once on one connection; above: OVERLOADED */
    size_t held_bytes_max;    /* parameters of all unfinished requests of the pool; above: OVERLOADED */
    size_t connections_max;   /* what FCGI_GET_VALUES is told */
} fcgi_bounds;

/* Buffers of all sessions of one loop, so that an idle connection holds none. Not shared between threads. */
typedef struct fcgi_pool {
    fcgi_bounds bounds;
    fcgi_request *idle;
    size_t idle_count;
    size_t held_bytes;
} fcgi_pool;

void fcgi_pool_init(fcgi_pool *pool, const fcgi_bounds *bounds);
void fcgi_pool_fini(fcgi_pool *pool); /* every session of it has ended */

#define FCGI_VALUES_BYTES_MAX 512u /* content of a FCGI_GET_VALUES record; a longer one gets an empty result */
#define FCGI_REPLY_BYTES_MAX 96u

typedef struct fcgi_session {
    fcgi_pool *pool;
    fcgi_request *requests; /* begun and not finished, newest first */
    size_t request_count;
    uint32_t record_count; /* headers understood, to wrap: whether a half-read record is still the same one */
    uint8_t head[FCGI_HEADER_BYTES];
    uint8_t head_length;
    uint8_t type;
    uint16_t id;
    uint16_t content_left;
    uint8_t padding_left;
    bool broken;
    bool busy;              /* BEGIN_REQUEST was read for a number whose former request is not answered yet */
    bool stdin_ended;       /* the latest completed request's STDIN has been seen to end */
    fcgi_request *filling; /* the request whose PARAMS content is being read */
    fcgi_request *streaming; /* the request whose STDIN or DATA content is being read */
    uint16_t small_length; /* BEGIN_REQUEST and GET_VALUES are gathered: they mean something only when whole */
    uint8_t *small;        /* FCGI_VALUES_BYTES_MAX bytes while a GET_VALUES is being read, else `begin` */
    uint8_t begin[8];
} fcgi_session;

typedef enum fcgi_event_kind {
    FCGI_EVENT_MORE,     /* everything given is used up */
    FCGI_EVENT_READY,    /* request: its parameters are complete. Answer it, then fcgi_session_finish */
    FCGI_EVENT_TOO_LARGE,/* request: its parameters exceed the bound. Refuse it, then fcgi_session_finish */
    FCGI_EVENT_ABORTED,  /* request: the peer gave it up. End it, then fcgi_session_finish */
    FCGI_EVENT_STREAM,   /* request, type, data, length: a piece of its STDIN or DATA; length 0: it has ended */
    FCGI_EVENT_BUSY,     /* the next request has the number of one that is not finished: feed again when it is */
    FCGI_EVENT_REPLY,    /* reply: bytes of the protocol itself to be sent */
    FCGI_EVENT_BROKEN    /* why: the stream can no longer be understood; close the connection */
} fcgi_event_kind;

typedef struct fcgi_event {
    fcgi_event_kind kind;
    fcgi_request *request; /* valid until it is finished */
    const char *why;
    uint8_t type;          /* STREAM: FCGI_STDIN or FCGI_DATA */
    const uint8_t *data;   /* STREAM: borrowed from what was fed */
    size_t length;
    bool last;             /* REPLY: it ended a request that did not ask to keep the connection */
    size_t reply_length;
    uint8_t reply[FCGI_REPLY_BYTES_MAX];
} fcgi_event;

void fcgi_session_init(fcgi_session *session, fcgi_pool *pool);
void fcgi_session_fini(fcgi_session *session);

/* Takes bytes up to the next event; returns how many it used. Call again with the rest until FCGI_EVENT_MORE.
 * Records of requests that are not (or no longer) known are skipped, so late STDIN of an answered request is
 * harmless. */
size_t fcgi_session_feed(fcgi_session *session, const uint8_t *data, size_t length, fcgi_event *event);
void fcgi_session_finish(fcgi_session *session, fcgi_request *request);

/* Whether nothing can be fed before a request is finished. */
bool fcgi_session_is_busy(const fcgi_session *session);
/* Whether something was begun and has not arrived whole: a request, or a record that is not skipped. */
bool fcgi_session_waits(const fcgi_session *session);

/* ---- what is written ---- */

#define FCGI_WRAP_BYTES (FCGI_HEADER_BYTES * 3u + 8u + 7u) /* most that fcgi_wrap_answer adds to the text */

/* Makes the records of one whole answer around its text, so that it leaves in one send: STDOUT, the empty STDOUT
 * and END_REQUEST. `out` holds the text at out + FCGI_HEADER_BYTES; room for FCGI_WRAP_BYTES more is the caller's
 * duty. text_length at most FCGI_CONTENT_BYTES_MAX; 0 gives END_REQUEST behind an empty STDOUT. Returns the bytes
 * in `out`. */
size_t fcgi_wrap_answer(uint8_t *out, uint16_t id, size_t text_length);
/* 8 bytes. content at most FCGI_CONTENT_BYTES_MAX, padding at most 255: both follow and are the caller's. */
void fcgi_put_header(uint8_t *out, fcgi_type type, uint16_t id, size_t content, size_t padding);
/* 16 bytes. */
size_t fcgi_write_end(uint8_t *out, uint16_t id, fcgi_protocol_status status);

#endif
