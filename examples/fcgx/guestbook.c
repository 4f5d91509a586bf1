/* A FastCGI application in C with libfcgi, several threads, limited by tidegate.
 *
 *     cc guestbook.c $(pkg-config --cflags --libs tidegate-fcgx) -pthread -o guestbook
 *     TIDEGATE_CONFIG=rules.yaml ./guestbook /run/guestbook.sock 8 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <tidegate_fcgx.h>

static tg_gate *gate;
static int listening;

static void
answer(FCGX_Request *request, tidegate_fcgx_call *call)
{
    const char *method = FCGX_GetParam("REQUEST_METHOD", request->envp);
    const char *length = FCGX_GetParam("CONTENT_LENGTH", request->envp);
    char piece[4096];
    long body = 0;
    for (int got; (got = FCGX_GetStr(piece, sizeof piece, request->in)) > 0;)
        body += got;
    tidegate_fcgx_put_fields(request, call);
    FCGX_FPrintF(request->out, "Content-Type: text/plain\r\n\r\nC %s %ld of %s\n", method ? method : "", body,
                 length && *length ? length : "0");
}

static void *
serve(void *unused)
{
    FCGX_Request request;
    (void)unused;
    if (FCGX_InitRequest(&request, listening, 0) != 0)
        return NULL;
    while (FCGX_Accept_r(&request) == 0) {
        tidegate_fcgx_call call;
        if (tidegate_fcgx_admit(gate, &request, &call)) /* else it has been answered */
            answer(&request, &call);
        FCGX_Finish_r(&request);
    }
    return NULL;
}

int
main(int count, char **arguments)
{
    const int threads = count == 3 ? atoi(arguments[2]) : 1;
    pthread_t thread;
    tg_error error;
    if (count < 2 || threads < 1) {
        fprintf(stderr, "usage: guestbook SOCKET [THREADS]\n");
        return 2;
    }
    if (tidegate_fcgx_open(NULL, &gate, &error) != TG_OK) {
        fprintf(stderr, "guestbook: %s\n", error.message);
        return 1;
    }
    if (FCGX_Init() != 0 || (listening = FCGX_OpenSocket(arguments[1], 128)) < 0)
        return 1;
    for (int i = 1; i < threads; i++)
        if (pthread_create(&thread, NULL, serve, NULL) != 0)
            return 1;
    serve(NULL);
    return 0;
}
