/* `--http`: /metrics for Prometheus and a page of the same numbers for people, on a thread of its own, so that whoever
 * reads them never holds up a request. Must not enter: decisions, identities, anything that changes something. */
#ifndef TIDEGATE_FCGI_PAGE_H
#define TIDEGATE_FCGI_PAGE_H

#include "listen.h"

#define FCGI_PAGE_CONNECTIONS_MAX 32u

typedef struct fcgi_page fcgi_page;

/* Serves on an open listener until fcgi_page_stop. Both are borrowed. NULL: `error` says why.
 *
 * /  the page;  /numbers  what it fetches;  /metrics  text format 0.0.4;  /metrics.json
 * GET and HEAD, one request a connection. At most FCGI_PAGE_CONNECTIONS_MAX of them: a newcomer takes the oldest one's
 * place. A request has five seconds, its head 8 KiB. What is told is at most a quarter of a second old. */
fcgi_page *fcgi_page_start(const fcgi_listener *listener, tg_gate *gate, char *error, size_t error_bytes);
void fcgi_page_stop(fcgi_page *page); /* accepts NULL */

#endif
