/* As much of HTTP/1.1 as a page of numbers needs: one request's head in, what it asks for out.
 * Must not enter: sockets, clocks, what is answered. */
#ifndef TIDEGATE_FCGI_HTTP_H
#define TIDEGATE_FCGI_HTTP_H

#include <stdbool.h>
#include <stddef.h>

#define FCGI_HTTP_HEAD_MAX 8192u

typedef struct fcgi_http_piece {
    const char *data;
    size_t length;
} fcgi_http_piece;

typedef struct fcgi_http_request {
    bool head;            /* HEAD: the fields alone */
    fcgi_http_piece path; /* without the query; begins with '/' */
    fcgi_http_piece host; /* without the port, in brackets where it is IPv6; empty: none was sent */
} fcgi_http_request;

/* Looks at what has come so far, at most FCGI_HTTP_HEAD_MAX bytes.
 *
 * 0: the head is not whole yet. 200: it is, and `request` says what it asks for, in the caller's bytes. Any other: the
 * status of the refusal: 400 no HTTP, 405 neither GET nor HEAD, 431 too long, 505 another version. */
int fcgi_http_read(const char *bytes, size_t length, fcgi_http_request *request);

/* Whether a host names this machine: "localhost", 127.0.0.0/8, [::1]. A page of somebody else's in a visitor's browser can
 * make the browser ask us under a name of its own; it cannot make it send one of these. */
bool fcgi_http_host_is_local(fcgi_http_piece host);

#endif
