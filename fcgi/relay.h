/* Applications behind the loop: connecting, failing over, deadlines, back pressure, kept connections. What the bytes
 * mean is exchange.h's. Must not enter: decisions, parameters' names.
 *
 * A relay is one request on its way to one application. It belongs to its connection until it is finished, and ends
 * with it: a web server that hangs up has given its request up. */
#ifndef TIDEGATE_FCGI_RELAY_H
#define TIDEGATE_FCGI_RELAY_H

#include "exchange.h"
#include "log.h"
#include "loop.h"

struct connection;
typedef struct fcgi_relay fcgi_relay;

typedef struct fcgi_relay_list {
    fcgi_relay *first, *last; /* in the order of their deadlines */
} fcgi_relay_list;

/* A loop's part of it. */
typedef struct fcgi_relays {
    fcgi_relay_list lists[7]; /* by state */
    fcgi_relay *dead;
    size_t count; /* all but the kept */
    size_t kept_count;
    uint64_t down_until_us[FCGI_LISTENERS_MAX][FCGI_BACKENDS_MAX];
    fcgi_log_gate away_gate, broken_gate, slow_gate;
} fcgi_relays;

/* The request's parameters are in and it may pass: `prefix` goes before the application's fields. Either it is under
 * way afterwards, or its refusal is in loop->out and it is finished. */
void fcgi_relay_begin(fcgi_loop *loop, struct connection *conn, fcgi_request *request, const fcgi_order *order,
                      tg_text prefix);
/* The request is answered or passed on later: when its body is there, its decision, or its turn. Any request, whether
 * an application is to see it or not. */
void fcgi_relay_defer(fcgi_loop *loop, struct connection *conn, fcgi_request *request, const fcgi_order *order,
                      tg_text text);
void fcgi_relay_conclude(fcgi_loop *loop); /* asks again for what has been decided */
void fcgi_relay_stream(fcgi_loop *loop, const fcgi_event *event);
/* The web server gave this request up; the request itself is left to the caller. */
void fcgi_relay_abort(fcgi_loop *loop, fcgi_request *request);
void fcgi_relay_drop_all(fcgi_loop *loop, struct connection *conn); /* the connection is being closed */
/* Sends what gathered for the applications of this connection. */
void fcgi_relay_flush(fcgi_loop *loop, struct connection *conn);
/* Whether nothing more may be read from this connection: an application does not take what came before. */
bool fcgi_relay_blocks(const struct connection *conn);

void fcgi_relay_handle(fcgi_loop *loop, fcgi_relay *relay, uint32_t events);
void fcgi_relay_expire(fcgi_loop *loop);
uint64_t fcgi_relay_next_us(const fcgi_loop *loop); /* UINT64_MAX: nothing is due */
void fcgi_relay_bury(fcgi_loop *loop);
void fcgi_relay_fini(fcgi_loop *loop);

#endif
