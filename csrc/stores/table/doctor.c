/* What the table's once-a-second look notices about its surroundings and says once.
 * Must not enter: anything that a decision waits for. */
#include "table.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SIBLINGS_MAX = 256, LINE_BYTES = 1024 };

static size_t
read_file(const char *path, char *text, size_t size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == -1)
        return 0;
    const ssize_t length = read(fd, text, size - 1);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    return length > 0 ? (size_t)length : 0;
}

static size_t
command_of(long pid, char line[LINE_BYTES])
{
    char path[48];
    snprintf(path, sizeof path, "/proc/%ld/cmdline", pid);
    return read_file(path, line, LINE_BYTES);
}

/* Children of our parent that run what we run: the workers of one server. */
static unsigned
siblings(void)
{
    char path[64], list[8192], own[LINE_BYTES], other[LINE_BYTES];
    const long parent = (long)getppid();
    snprintf(path, sizeof path, "/proc/%ld/task/%ld/children", parent, parent);
    const size_t own_length = command_of((long)getpid(), own);
    if (own_length == 0 || read_file(path, list, sizeof list) == 0)
        return 0; /* a kernel that does not tell */
    unsigned found = 0, looked = 0;
    for (char *at = list, *end; looked < SIBLINGS_MAX; at = end, looked++) {
        const long pid = strtol(at, &end, 10);
        if (end == at)
            break;
        if (pid != (long)getpid() && command_of(pid, other) == own_length && memcmp(own, other, own_length) == 0)
            found++;
    }
    return found;
}

/* A memory store is shared with what is forked after it was opened, and with nobody else: each worker that opened its own
 * counts for itself, and a limit is what was written times the workers. */
void
tg__doctor_look(tg_table *table)
{
    if (table->place.path || table->told_alone || table->clock || (long)getpid() != table->opened_by)
        return;
    table->told_alone = true; /* one look, when the other workers had a second to come up */
    const unsigned others = siblings();
    if (others)
        tg__notice("memory-workers", "store memory://%s counts in this process alone, and %u more run the same command "
                                     "beside it: each lets through the whole limit; use shared://%s",
                   table->place.name, others, table->place.name);
}

/* Only the process that puts the offset right says it. */
void
tg__doctor_clock(const tg_table *table, uint64_t back_us)
{
    if (back_us)
        tg__notice("clock-back", "the system's clock went back by %" PRIu64 " s: windows that are `aligned` (table %s) stay "
                                 "where they were until it has caught up; all others do not look at it",
                   back_us / 1000000 + (back_us % 1000000 >= 500000), table->place.name);
}
