/* The same codec and loop as tidegate-fcgi with an answer that never changes: what a decision costs is the difference
 * between the two behind one web server. usage: fcgi_constant LISTEN [auth] */
#include "../fcgi/log.h"
#include "../fcgi/loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char answer_text[] = "Content-Type: application/json\r\nContent-Length: 17\r\n"
                                  "X-RateLimit-Limit: 100\r\nX-RateLimit-Remaining: 99\r\nX-RateLimit-Reset: 60\r\n\r\n"
                                  "{\"allowed\": true}";
static const char auth_text[] = "Status: 204 No Content\r\n"
                                "X-RateLimit-Limit: 100\r\nX-RateLimit-Remaining: 99\r\nX-RateLimit-Reset: 60\r\n\r\n";

static size_t
answer_constant(void *context, const fcgi_call *call, char *text)
{
    (void)call;
    const char *constant = context;
    const size_t length = strlen(constant);
    memcpy(text, constant, length);
    return length;
}

int
main(int argument_count, char **arguments)
{
    char error[256];
    fcgi_listener listener;
    if (argument_count < 2) {
        fprintf(stderr, "usage: fcgi_constant LISTEN [auth]\n");
        return 2;
    }
    if (fcgi_listener_parse(arguments[1], &listener, error, sizeof error) != FCGI_LISTEN_OK ||
        fcgi_listener_open(&listener, error, sizeof error) != FCGI_LISTEN_OK) {
        fprintf(stderr, "fcgi_constant: %s\n", error);
        return 1;
    }
    const bool auth = argument_count > 2 && strcmp(arguments[2], "auth") == 0;
    const fcgi_responder responder = {
        .answer = answer_constant,
        .context = (void *)(uintptr_t)(auth ? auth_text : answer_text),
    };
    fcgi_loop *loop = fcgi_loop_open(&(fcgi_loop_options){ 0 }, &responder, &listener, 1);
    if (!loop) {
        perror("fcgi_constant");
        return 1;
    }
    const bool whole = fcgi_loop_run(loop);
    fcgi_loop_close(loop);
    fcgi_listener_close(&listener);
    return whole ? 0 : 1;
}
