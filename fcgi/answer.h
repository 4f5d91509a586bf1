/* From FastCGI parameters to a decision, and from the decision to a CGI answer. The only place of the daemon that knows
 * parameters' names and asks the gate. Must not enter: sockets, records, events. */
#ifndef TIDEGATE_FCGI_ANSWER_H
#define TIDEGATE_FCGI_ANSWER_H

#include "log.h"
#include "loop.h"

#define FCGI_HEADERS_MAX 512u /* request header lines; more are refused with 431 */

/* One per loop: not for several threads. */
typedef struct fcgi_answerer {
    tg_gate *gate;
    tg_clock *manual; /* not NULL: each request brings its time as TIDEGATE_NOW_US */
    fcgi_mode mode;   /* where neither the web server nor the listener says */
    fcgi_log_gate asked_gate, judge_gate;
    tg_header headers[FCGI_HEADERS_MAX];
    tg_judgement judgement;
    tg_answer answer;
} fcgi_answerer;

/* fcgi_responder.answer; context is a fcgi_answerer. */
size_t fcgi_answer_call(void *context, const fcgi_call *call, char *text);

#endif
