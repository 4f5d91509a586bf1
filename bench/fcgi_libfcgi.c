/* The yardstick for a FastCGI responder: libfcgi's own server, a thread for each connection it keeps, with an answer that
 * never changes. usage: fcgi_libfcgi UNIX_PATH THREADS */
#include <fcgiapp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static int listener;

static void *
serve(void *context)
{
    (void)context;
    FCGX_Request request;
    FCGX_InitRequest(&request, listener, 0);
    while (FCGX_Accept_r(&request) == 0)
        FCGX_FPrintF(request.out, "Status: 204 No Content\r\nX-RateLimit-Limit: 100\r\nX-RateLimit-Remaining: 99\r\n"
                                  "X-RateLimit-Reset: 60\r\n\r\n");
    return NULL;
}

int
main(int argument_count, char **arguments)
{
    pthread_t threads[256];
    const long count = argument_count > 2 ? strtol(arguments[2], NULL, 10) : 0;
    if (count < 1 || count > 256) {
        fprintf(stderr, "usage: fcgi_libfcgi UNIX_PATH THREADS (1 to 256)\n");
        return 2;
    }
    if (FCGX_Init() != 0 || (listener = FCGX_OpenSocket(arguments[1], 1024)) < 0) {
        perror(arguments[1]);
        return 1;
    }
    for (long i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, serve, NULL) != 0) {
            perror("fcgi_libfcgi");
            return 1;
        }
    for (long i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
