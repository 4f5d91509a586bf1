/* Starts programs in turn as a web server does and waits for each: the median time of one run of each, in microseconds,
 * and the median of its ratio to the first within a round.
 *
 *     cgi_spawn ROUNDS PROGRAM PROGRAM...
 *
 * Must not enter: what is expected of the ratio. */
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROGRAMS_MAX = 8, ROUNDS_MAX = 10000 };

static double times[PROGRAMS_MAX][ROUNDS_MAX], ratios[PROGRAMS_MAX][ROUNDS_MAX];

static double
now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int
in_order(const void *a, const void *b)
{
    const double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

static double
median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, in_order);
    return values[count / 2];
}

int
main(int count, char **arguments)
{
    const int rounds = count > 2 ? atoi(arguments[1]) : 0;
    const int programs = count - 2;
    posix_spawn_file_actions_t files;
    if (rounds < 1 || rounds > ROUNDS_MAX || programs > PROGRAMS_MAX) {
        fputs("usage: cgi_spawn ROUNDS PROGRAM PROGRAM...\n", stderr);
        return 2;
    }
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < programs; i++) {
            char *words[] = { arguments[i + 2], NULL };
            pid_t child;
            int status = 0;
            const double began = now_us();
            if (posix_spawn(&child, words[0], &files, NULL, words, environ) != 0 || waitpid(child, &status, 0) != child ||
                status != 0) {
                fprintf(stderr, "%s: did not run well (%d)\n", words[0], status);
                return 1;
            }
            times[i][round] = now_us() - began;
            ratios[i][round] = times[i][round] / times[0][round];
        }
    for (int i = 0; i < programs; i++)
        printf("%.1f us  %.3f  %s\n", median(times[i], rounds), median(ratios[i], rounds), arguments[i + 2]);
    return 0;
}
