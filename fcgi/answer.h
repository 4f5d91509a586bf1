/* From FastCGI parameters to a decision, and from the decision to a CGI answer. The only place of the daemon that knows
 * parameters' names and asks the gate. Must not enter: sockets, records, events. */
#ifndef TIDEGATE_FCGI_ANSWER_H
#define TIDEGATE_FCGI_ANSWER_H

#include "judging.h"
#include "log.h"
#include "loop.h"

#define FCGI_HEADERS_MAX 512u /* request header lines; more are refused with 431 */

#define FCGI_BATCH_MAX 32u        /* decisions asked for at once */
#define FCGI_BATCH_LINE_BYTES_MAX 4096u

/* One per loop: not for several threads. */
typedef struct fcgi_answerer {
    tg_gate *gate;
    tg_clock *manual; /* not NULL: each request brings its time as TIDEGATE_NOW_US */
    fcgi_mode mode;   /* where neither the web server nor the listener says */
    fcgi_log_gate asked_gate, judge_gate, hold_gate;
    fcgi_judge judge;
    fcgi_judging now; /* of stores that answer at once: the request that is being answered */
    tg_header headers[FCGI_HEADERS_MAX];
    char line[FCGI_BATCH_LINE_BYTES_MAX]; /* a batch's line, decoded */
} fcgi_answerer;

/* fcgi_responder.answer; context is a fcgi_answerer. */
size_t fcgi_answer_call(void *context, const fcgi_call *call, char *text);

/* fcgi_responder.pass: whether a relayed request's parameter goes on to the application, and as what. */
bool fcgi_answer_pass(void *context, const fcgi_listener *listener, tg_text name, tg_text *value);

/* fcgi_responder.settle */
void fcgi_answer_settle(void *context, void *held, int status, tg_text head);
/* fcgi_responder.forget */
void fcgi_answer_forget(void *context, void *held);
/* fcgi_responder.go_on */
void *fcgi_answer_go_on(void *context, void *held);

/* What the latest answer said of its request, of stores that answer at once. */
const tg_judgement *fcgi_answer_judgement(const fcgi_answerer *answerer);

/* Every policy that a listener names is in the rules file. TG_E_CONFIG says which is not. */
tg_status fcgi_answer_check(tg_gate *gate, const fcgi_listener *listener, tg_error *error);

void fcgi_answerer_fini(fcgi_answerer *answerer); /* before its gate is closed */

#endif
