/* No test: a FastCGI application made with libfcgi, for the relay's tests. It gives back the body it was sent. */
#include <fcgiapp.h>
#include <stdlib.h>

int
main(int argument_count, char **arguments)
{
    FCGX_Request request;
    if (argument_count != 2 || FCGX_Init() != 0)
        return 2;
    const int fd = FCGX_OpenSocket(arguments[1], 64);
    if (fd < 0 || FCGX_InitRequest(&request, fd, 0) != 0)
        return 1;
    while (FCGX_Accept_r(&request) == 0) {
        const char *length = FCGX_GetParam("CONTENT_LENGTH", request.envp);
        const int wanted = length ? atoi(length) : 0;
        char *body = malloc((size_t)wanted + 1);
        if (!body)
            return 1;
        const int got = FCGX_GetStr(body, wanted, request.in);
        FCGX_FPrintF(request.err, "said on stderr");
        FCGX_FPrintF(request.out, "Content-Type: text/plain\r\n\r\nread %d\n", got);
        FCGX_PutStr(body, got, request.out);
        free(body);
        FCGX_Finish_r(&request);
    }
    return 0;
}
