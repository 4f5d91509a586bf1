/* The yardstick of decisions through Redis: a plain hiredis loop that sends one command over and over, as it was heard from
 * tidegate, so many at a time.
 *
 *   redis_loop SOCKET FILE    FILE holds the command's bytes. For each line "DEPTH MILLISECONDS" of the standard input:
 *                             commands a second, and microseconds of the server's processor for each
 *
 * Must not enter: tidegate. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void
fail(const char *what, const char *why)
{
    fprintf(stderr, "redis_loop: %s: %s\n", what, why);
    exit(1);
}

static double
seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double
number_behind(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    if (!at)
        fail("INFO cpu", "no such line");
    return strtod(at + strlen(name), NULL);
}

static double
server_cpu_us(redisContext *link)
{
    redisReply *reply = redisCommand(link, "INFO cpu");
    if (!reply || reply->type != REDIS_REPLY_STRING)
        fail("INFO cpu", link->errstr);
    const double cpu = number_behind(reply->str, "used_cpu_user:") + number_behind(reply->str, "used_cpu_sys:");
    freeReplyObject(reply);
    return cpu * 1e6;
}

int
main(int argc, char **argv)
{
    static char bytes[65536];
    FILE *file = argc == 3 ? fopen(argv[2], "rb") : NULL;
    if (!file) {
        fprintf(stderr, "usage: redis_loop SOCKET FILE\n");
        return 2;
    }
    const size_t length = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    redisContext *link = redisConnectUnix(argv[1]);
    if (!link || link->err)
        fail(argv[1], link ? link->errstr : "no memory");
    int depth, milliseconds;
    while (scanf("%d %d", &depth, &milliseconds) == 2) {
        const double cpu_us = server_cpu_us(link), began = seconds();
        long count = 0;
        double now;
        do {
            for (int i = 0; i < depth; i++)
                redisAppendFormattedCommand(link, bytes, length);
            for (int i = 0; i < depth; i++) {
                void *reply = NULL;
                if (redisGetReply(link, &reply) != REDIS_OK || ((redisReply *)reply)->type == REDIS_REPLY_ERROR)
                    fail("reply", reply ? ((redisReply *)reply)->str : link->errstr);
                freeReplyObject(reply);
            }
            count += depth;
            now = seconds();
        } while (now - began < milliseconds / 1000.0);
        printf("%.0f %.3f\n", (double)count / (now - began), (server_cpu_us(link) - cpu_us) / (double)count);
        fflush(stdout);
    }
    redisFree(link);
    return 0;
}
