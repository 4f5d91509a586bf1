/* One relayed request between two connections: what the web server sends becomes bytes for the application, what the
 * application sends becomes bytes for the web server. Pure: no I/O, no clock. Must not enter: sockets, epoll, rules,
 * parameters' names.
 *
 * The application's connection carries this one request, as number 1; the web server's number is put back into whatever
 * comes from there. Content is passed on piece by piece as it arrives, each piece a record of its own, so nothing is
 * gathered that an answer of any size would fill memory with. */
#ifndef TIDEGATE_FCGI_EXCHANGE_H
#define TIDEGATE_FCGI_EXCHANGE_H

#include "codec.h"

/* Bytes on their way out, in order. */
typedef struct fcgi_queue {
    uint8_t *data;
    size_t at, length, room;
    bool keeps; /* what was taken stays, so that it can be sent again */
} fcgi_queue;

bool fcgi_queue_put(fcgi_queue *queue, const void *data, size_t length); /* false: out of memory */
static inline size_t
fcgi_queue_bytes(const fcgi_queue *queue)
{
    return queue->length - queue->at;
}
void fcgi_queue_take(fcgi_queue *queue, size_t length); /* the first `length` bytes have left */
void fcgi_queue_fini(fcgi_queue *queue);

#define FCGI_PREFIX_BYTES_MAX 4096u /* more than all fields of a tg_answer */
#define FCGI_HEAD_BYTES_MAX 16384u /* of an answer's fields that somebody wants to see */
#define FCGI_AGAIN_BYTES_MAX 65536u /* a request of more is not kept for a second try */

typedef enum fcgi_exchange_state {
    FCGI_EXCHANGE_OPEN,
    FCGI_EXCHANGE_ENDED, /* the application has ended the request */
    FCGI_EXCHANGE_BROKEN /* `why`: what it sends cannot be understood */
} fcgi_exchange_state;

typedef struct fcgi_exchange {
    fcgi_exchange_state state;
    uint16_t front_id;
    bool keep;        /* the application is asked to keep the connection */
    bool heard;       /* it has sent at least one byte */
    bool answered;    /* some of its answer has been passed on */
    bool stdin_ended; /* the web server has sent all of the body */
    bool surplus;     /* bytes came behind the end: the connection is not to be used again */
    fcgi_protocol_status status; /* ENDED: what the application said; if not COMPLETE and nothing is answered, nothing
                                    was written: the refusal is for the caller to word */
    const char *why;
    fcgi_queue out;   /* to the application */
    bool wants_head;  /* the answer's fields are gathered in `seen`, beside being passed on */
    bool head_seen;   /* all of them are there, or more than FCGI_HEAD_BYTES_MAX */
    fcgi_queue seen;
    uint8_t head[FCGI_HEADER_BYTES];
    uint8_t head_length;
    uint8_t type;
    uint16_t content_left;
    uint8_t padding_left;
    bool ours;        /* the record being read belongs to this request */
    uint8_t end[8];
    uint8_t end_length;
    size_t prefix_length;
    uint8_t prefix[FCGI_PREFIX_BYTES_MAX];
} fcgi_exchange;

typedef struct fcgi_exchange_options {
    uint16_t front_id;
    uint8_t role;
    bool keep;
    fcgi_params params;
    /* Whether a parameter is passed on, and as what; NULL: all, as they are. */
    bool (*pass)(void *context, tg_text name, tg_text *value);
    void *context;
    bool wants_head;
    tg_text prefix; /* fields to be put before the application's own; at most FCGI_PREFIX_BYTES_MAX */
} fcgi_exchange_options;

/* false: out of memory, or the parameters are damaged. fcgi_exchange_fini in either case. */
bool fcgi_exchange_begin(fcgi_exchange *exchange, const fcgi_exchange_options *options);
void fcgi_exchange_fini(fcgi_exchange *exchange);

/* A piece of a stream of the web server's; length 0 ends it. false: out of memory. */
bool fcgi_exchange_stream(fcgi_exchange *exchange, uint8_t type, const uint8_t *data, size_t length);
bool fcgi_exchange_abort(fcgi_exchange *exchange);

/* Everything is to be sent to another connection from its beginning. false: it is not all there any more. */
bool fcgi_exchange_again(fcgi_exchange *exchange);

#define FCGI_EXCHANGE_EXTRA_BYTES (FCGI_PREFIX_BYTES_MAX + 64u)
/* Understands `length` bytes of the application and writes what goes to the web server: at most `length` +
 * FCGI_EXCHANGE_EXTRA_BYTES. Returns how many. */
size_t fcgi_exchange_reply(fcgi_exchange *exchange, const uint8_t *data, size_t length, uint8_t *out);

#endif
