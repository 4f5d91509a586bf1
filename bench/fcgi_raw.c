/* Load for a FastCGI daemon without a web server in between: requests like nginx's over kept connections, answered
 * as fast as they come. usage: fcgi_raw UNIX_PATH CONNECTIONS IN_FLIGHT SECONDS [PID]
 *
 * Prints answers a second and, with the daemon's PID, its processor time per answer, which a busy client does not
 * spoil. */
#include "../fcgi/codec.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS_MAX 1024
#define IN_BYTES 65536

typedef struct client {
    int fd;
    size_t skip;     /* bytes of the current record's content still to come */
    uint8_t head[8];
    size_t head_length;
    bool ends;       /* the current record is an END_REQUEST */
} client;

static uint8_t request[4096];
static size_t request_length;

static void
add_record(uint8_t type, const void *content, size_t length)
{
    const uint8_t head[8] = { 1, type, 0, 1, (uint8_t)(length >> 8), (uint8_t)length, 0, 0 };
    memcpy(request + request_length, head, 8);
    if (length)
        memcpy(request + request_length + 8, content, length);
    request_length += 8 + length;
}

static void
make_request(void)
{
    static const char *const pairs[][2] = {
        { "QUERY_STRING", "" },
        { "REQUEST_METHOD", "GET" },
        { "CONTENT_TYPE", "" },
        { "CONTENT_LENGTH", "" },
        { "SCRIPT_NAME", "/_tidegate" },
        { "REQUEST_URI", "/api/items?page=3" },
        { "DOCUMENT_URI", "/_tidegate" },
        { "DOCUMENT_ROOT", "/srv/www" },
        { "SERVER_PROTOCOL", "HTTP/1.1" },
        { "REQUEST_SCHEME", "http" },
        { "GATEWAY_INTERFACE", "CGI/1.1" },
        { "SERVER_SOFTWARE", "nginx/1.22.1" },
        { "REMOTE_ADDR", "203.0.113.77" },
        { "REMOTE_PORT", "50123" },
        { "REMOTE_USER", "" },
        { "SERVER_ADDR", "192.0.2.80" },
        { "SERVER_PORT", "80" },
        { "SERVER_NAME", "example.org" },
        { "REDIRECT_STATUS", "200" },
        { "TIDEGATE_MODE", "auth" },
        { "HTTP_HOST", "example.org" },
        { "HTTP_USER_AGENT", "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0" },
        { "HTTP_ACCEPT", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8" },
        { "HTTP_ACCEPT_ENCODING", "gzip, deflate, br" },
    };
    uint8_t params[2048];
    size_t length = 0;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const size_t name = strlen(pairs[i][0]), value = strlen(pairs[i][1]);
        params[length++] = (uint8_t)name;
        params[length++] = (uint8_t)value;
        memcpy(params + length, pairs[i][0], name);
        memcpy(params + length + name, pairs[i][1], value);
        length += name + value;
    }
    const uint8_t begin[8] = { 0, FCGI_RESPONDER, 1 };
    add_record(FCGI_BEGIN_REQUEST, begin, sizeof begin);
    add_record(FCGI_PARAMS, params, length);
    add_record(FCGI_PARAMS, NULL, 0);
    add_record(FCGI_STDIN, NULL, 0);
}

static size_t
count_answers(client *from, const uint8_t *data, size_t length)
{
    size_t answers = 0;
    while (length > 0) {
        if (from->skip > 0) {
            const size_t part = length < from->skip ? length : from->skip;
            from->skip -= part;
            data += part;
            length -= part;
        } else {
            from->head[from->head_length++] = *data++;
            length--;
            if (from->head_length < 8)
                continue;
            from->head_length = 0;
            from->skip = ((size_t)from->head[4] << 8 | from->head[5]) + from->head[6];
            from->ends = from->head[1] == FCGI_END_REQUEST;
        }
        if (from->skip == 0 && from->ends) {
            answers++;
            from->ends = false;
        }
    }
    return answers;
}

static double
seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double
cpu_seconds(const char *pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%s/schedstat", pid);
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, sizeof text, file)) {
        perror(path);
        exit(1);
    }
    fclose(file);
    return strtod(text, NULL) * 1e-9; /* nanoseconds on a processor */
}

static void
send_all(int fd, const uint8_t *data, size_t length)
{
    while (length > 0) {
        const ssize_t sent = send(fd, data, length, MSG_NOSIGNAL);
        if (sent < 0) {
            perror("send");
            exit(1);
        }
        data += sent;
        length -= (size_t)sent;
    }
}

int
main(int argument_count, char **arguments)
{
    static client clients[CONNECTIONS_MAX];
    static uint8_t in[IN_BYTES];
    static uint8_t batch[64 * sizeof request];
    if (argument_count < 5) {
        fprintf(stderr, "usage: fcgi_raw UNIX_PATH CONNECTIONS IN_FLIGHT SECONDS [PID]\n");
        return 2;
    }
    const size_t connections = strtoul(arguments[2], NULL, 10), in_flight = strtoul(arguments[3], NULL, 10);
    const double seconds = strtod(arguments[4], NULL);
    const char *pid = argument_count > 5 ? arguments[5] : NULL;
    if (connections < 1 || connections > CONNECTIONS_MAX || in_flight < 1 || in_flight > 64) {
        fprintf(stderr, "fcgi_raw: 1 to %d connections, 1 to 64 in flight\n", CONNECTIONS_MAX);
        return 2;
    }
    make_request();
    for (size_t i = 0; i < 64; i++)
        memcpy(batch + i * request_length, request, request_length);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%s", arguments[1]);
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    for (size_t i = 0; i < connections; i++) {
        clients[i].fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct epoll_event event = { .events = EPOLLIN, .data.ptr = &clients[i] };
        if (connect(clients[i].fd, (struct sockaddr *)&address, sizeof address) == -1 ||
            epoll_ctl(epoll, EPOLL_CTL_ADD, clients[i].fd, &event) == -1) {
            perror(arguments[1]);
            return 1;
        }
        send_all(clients[i].fd, batch, in_flight * request_length);
    }
    const double began = seconds_now(), cpu_began = pid ? cpu_seconds(pid) : 0;
    double now = began;
    unsigned long long answers = 0;
    while (now < began + seconds) {
        struct epoll_event events[64];
        const int count = epoll_wait(epoll, events, 64, 1000);
        for (int i = 0; i < count; i++) {
            client *from = events[i].data.ptr;
            const ssize_t got = recv(from->fd, in, sizeof in, 0);
            if (got <= 0) {
                fprintf(stderr, "fcgi_raw: the daemon closed a connection\n");
                return 1;
            }
            const size_t done = count_answers(from, in, (size_t)got);
            answers += done;
            if (done)
                send_all(from->fd, batch, done * request_length);
        }
        now = seconds_now();
    }
    const double took = now - began;
    printf("%.0f answers/s", (double)answers / took);
    if (pid)
        printf(", %.2f us of the daemon's processor each", (cpu_seconds(pid) - cpu_began) * 1e6 / (double)answers);
    printf("\n");
    return 0;
}
