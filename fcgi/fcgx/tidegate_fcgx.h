/* Limits inside an application that serves FastCGI with libfcgi. For C and C++; link with libtidegate and libfcgi
 * (pkg-config tidegate-fcgx).
 *
 *     tg_gate *gate;                                          // once, before threads or forks
 *     if (tidegate_fcgx_open("/etc/tidegate/rules.yaml", &gate, &error) != TG_OK) ...
 *
 *     while (FCGX_Accept_r(&request) == 0) {                  // in each thread
 *         tidegate_fcgx_call call;
 *         if (tidegate_fcgx_admit(gate, &request, &call)) {   // else it has been answered
 *             tidegate_fcgx_put_fields(&request, &call);      // X-RateLimit-..., before the application's own fields
 *             FCGX_PutS("Content-Type: ...
 *         }
 *         FCGX_Finish_r(&request);
 *     }
 *
 * Must not enter: anything that is kept between requests, anything that reads the body. */
#ifndef TIDEGATE_FCGX_H
#define TIDEGATE_FCGX_H

#include <fcgiapp.h>
#include <stdlib.h>
#include <string.h>
#include <tidegate.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TIDEGATE_FCGX_HEADERS_MAX 512 /* header lines of one request; more are refused with 431 */

/* What became of one request. On the stack of the thread that serves it: about 14 KB. */
typedef struct tidegate_fcgx_call {
    tg_judgement judgement; /* `policy`, `decision.remaining`, ... for the application to look at */
    tg_answer answer;       /* the fields for an allowed answer */
} tidegate_fcgx_call;

/* Reads the rules (NULL: TIDEGATE_CONFIG) and opens their store; changed rules are picked up while running. tg_gate_close
 * gives it back, when no thread asks any more. As tg_gate_open; does not write. */
static inline tg_status
tidegate_fcgx_open(const char *rules, tg_gate **gate, tg_error *error)
{
    tg_gate_options options;
    memset(&options, 0, sizeof options);
    options.path = tg_text_of(rules);
    return tg_gate_open(&options, gate, error);
}

/* ---- what follows up to tidegate_fcgx_admit is its own */

static inline int
tidegate_fcgx_put_text(FCGX_Stream *out, tg_text text)
{
    return text.length ? FCGX_PutStr(text.data, (int)text.length, out) : 0;
}

static inline void
tidegate_fcgx_put_all(FCGX_Stream *out, const tg_answer *answer)
{
    size_t i;
    for (i = 0; i < answer->field_count; i++) {
        tidegate_fcgx_put_text(out, answer->fields[i].name);
        FCGX_PutStr(": ", 2, out);
        tidegate_fcgx_put_text(out, answer->fields[i].value);
        FCGX_PutStr("\r\n", 2, out);
    }
}

static inline int
tidegate_fcgx_starts(const char *param, const char *name)
{
    return strncmp(param, name, strlen(name)) == 0;
}

/* The request as libfcgi has it; texts stay libfcgi's. 0: too many header lines. */
static inline int
tidegate_fcgx_read(FCGX_Request *request, tg_request *asked, tg_header *headers)
{
    char **at;
    const char *server_name = NULL, *script_name = NULL;
    int fits = 1;
    memset(asked, 0, sizeof *asked);
    asked->headers = headers;
    for (at = request->envp; at && *at; at++) {
        const char *equals = strchr(*at, '=');
        const char *name = *at;
        size_t length;
        if (!equals)
            continue;
        length = (size_t)(equals - *at);
        if (tidegate_fcgx_starts(name, "REQUEST_METHOD=")) {
            asked->method = tg_text_of(equals + 1);
        } else if (tidegate_fcgx_starts(name, "REQUEST_URI=")) {
            asked->path = tg_text_of(equals + 1);
        } else if (tidegate_fcgx_starts(name, "REMOTE_ADDR=")) {
            asked->peer = tg_text_of(equals + 1);
        } else if (tidegate_fcgx_starts(name, "REMOTE_USER=")) {
            asked->user = tg_text_of(equals + 1);
        } else if (tidegate_fcgx_starts(name, "SERVER_NAME=")) {
            server_name = equals + 1;
        } else if (tidegate_fcgx_starts(name, "SCRIPT_NAME=")) {
            script_name = equals + 1;
        } else if ((tidegate_fcgx_starts(name, "HTTP_") && length > 5 && !tidegate_fcgx_starts(name, "HTTP_CONTENT_TYPE=")) ||
                   (tidegate_fcgx_starts(name, "CONTENT_TYPE=") && equals[1])) {
            if (asked->header_count == TIDEGATE_FCGX_HEADERS_MAX) {
                fits = 0;
                continue;
            }
            if (name[0] == 'H') {
                name += 5;
                length -= 5;
            }
            headers[asked->header_count].name.data = name;
            headers[asked->header_count].name.length = length;
            headers[asked->header_count].value = tg_text_of(equals + 1);
            asked->header_count++;
            if (length == 4 && memcmp(name, "HOST", 4) == 0)
                asked->host = tg_text_of(equals + 1);
        }
    }
    if (asked->path.length == 0)
        asked->path = tg_text_of(script_name);
    if (asked->host.length == 0)
        asked->host = tg_text_of(server_name);
    if (asked->peer.length == 0) /* nginx on a unix socket says nothing, or "unix:" */
        asked->peer = tg_text_of("unix:");
    return fits;
}

static inline void
tidegate_fcgx_refuse(FCGX_Request *request, const tg_request *asked, int status, const char *reason, const tg_answer *answer,
                     tg_text body)
{
    FCGX_FPrintF(request->out, "Status: %d %s\r\n", status, reason);
    if (answer)
        tidegate_fcgx_put_all(request->out, answer);
    else
        FCGX_FPrintF(request->out, "Content-Type: application/json\r\n");
    FCGX_FPrintF(request->out, "Content-Length: %d\r\n\r\n", (int)body.length);
    if (asked->method.length != 4 || memcmp(asked->method.data, "HEAD", 4) != 0)
        tidegate_fcgx_put_text(request->out, body);
}

/* ---- the calls */

/* Judges a request that was just accepted, by the rules. Takes from all policies that speak of it, or from none.
 *
 * 1  let through: nothing has been written, the application answers
 * 0  refused, and answered whole: FCGX_Finish_r comes next
 *
 * A store that does not answer is no error: `on_store_failure` decides. What the library has to say to an operator goes to
 * the web server's error log, through request->err. Waits as tg_gate_judge does. `call` is filled in any case. */
static inline int
tidegate_fcgx_admit(tg_gate *gate, FCGX_Request *request, tidegate_fcgx_call *call)
{
    tg_header headers[TIDEGATE_FCGX_HEADERS_MAX];
    tg_request asked;
    tg_error error;
    tg_notice notice;
    tg_status status;
    const int fits = tidegate_fcgx_read(request, &asked, headers);
    call->answer.field_count = 0;
    if (!fits) {
        tidegate_fcgx_refuse(request, &asked, 431, "Request Header Fields Too Large", NULL,
                             tg_text_of("{\"code\": \"TOO_LARGE\", \"message\": \"The request's header fields are too large.\"}"));
        return 0;
    }
    status = tg_gate_judge(gate, &asked, 1, NULL, 0, &call->judgement, &call->answer, &error);
    while (tg_notice_pending() && tg_notice_take(&notice))
        FCGX_FPrintF(request->err, "tidegate: %s: %s\n", notice.code, notice.message);
    if (status != TG_OK) {
        call->answer.field_count = 0;
        FCGX_FPrintF(request->err, "tidegate: not-judged: %s: %s\n", tg_status_name(error.status), error.message);
        tidegate_fcgx_refuse(request, &asked, 500, "Internal Server Error", NULL,
                             tg_text_of("{\"code\": \"INTERNAL\", \"message\": \"The request could not be judged.\"}"));
        return 0;
    }
    if (call->judgement.status == 0)
        return 1;
    tidegate_fcgx_refuse(request, &asked, call->answer.status, call->answer.reason, &call->answer, call->answer.body);
    return 0;
}

/* The fields of an allowed answer: X-RateLimit-... or what the rules say, each with its line's end. Before the empty line
 * that ends the application's own. */
static inline void
tidegate_fcgx_put_fields(FCGX_Request *request, const tidegate_fcgx_call *call)
{
    tidegate_fcgx_put_all(request->out, &call->answer);
}

/* For rules whose count or cost depends on the answer: what the application answered. Does nothing where none does. */
static inline void
tidegate_fcgx_settle(tg_gate *gate, FCGX_Request *request, tidegate_fcgx_call *call, int status, const tg_header *headers,
                     size_t header_count)
{
    tg_error error;
    if (call->judgement.settles && tg_gate_settle(gate, &call->judgement, status, headers, header_count, &error) != TG_OK)
        FCGX_FPrintF(request->err, "tidegate: not-settled: %s\n", error.message);
}

#ifdef __cplusplus
}
#endif
#endif
