/* The daemon as a process: see process.h. */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

extern char **environ;

/* ---- rights */

bool
fcgi_user_find(const char *name, fcgi_user *user, char *error, size_t error_bytes)
{
    char *end;
    const struct passwd *found = getpwnam(name);
    if (!found && *name >= '0' && *name <= '9') {
        const unsigned long number = strtoul(name, &end, 10);
        found = *end == '\0' && number < UINT32_MAX ? getpwuid((uid_t)number) : NULL;
    }
    if (!found || strlen(found->pw_name) >= sizeof user->name) {
        snprintf(error, error_bytes, "%s: no such user", name);
        return false;
    }
    user->uid = found->pw_uid;
    user->gid = found->pw_gid;
    strcpy(user->name, found->pw_name);
    return true;
}

bool
fcgi_process_confine(const char *folder, const fcgi_user *user, char *error, size_t error_bytes)
{
    if (folder && (chroot(folder) != 0 || chdir("/") != 0)) {
        snprintf(error, error_bytes, "--chroot %s: %s", folder, strerror(errno));
        return false;
    }
    if (user && (geteuid() != user->uid || getegid() != user->gid)) {
        /* Groups first: afterwards they cannot be changed. */
        if (initgroups(user->name, user->gid) != 0 || setresgid(user->gid, user->gid, user->gid) != 0 ||
            setresuid(user->uid, user->uid, user->uid) != 0) {
            snprintf(error, error_bytes, "--user %s: %s", user->name, strerror(errno));
            return false;
        }
        if (user->uid != 0 && setuid(0) == 0) {
            snprintf(error, error_bytes, "--user %s: root's rights did not go", user->name);
            return false;
        }
    }
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        snprintf(error, error_bytes, "no_new_privs: %s", strerror(errno));
        return false;
    }
    return true;
}

/* ---- handing over: "READY_FD\nFD ADDRESS\nFD ADDRESS\n" */

void
fcgi_handover_read(fcgi_handover *handover)
{
    *handover = (fcgi_handover){ .ready_fd = -1 };
    const char *text = getenv(FCGI_HANDOVER_NAME);
    if (!text)
        return;
    int fd, used;
    if (sscanf(text, "%d\n%n", &fd, &used) == 1 && fd > STDERR_FILENO && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) {
        handover->ready_fd = fd;
        for (text += used; handover->count < FCGI_HANDOVER_MAX; text += used) {
            char address[FCGI_LISTEN_TEXT_MAX];
            used = 0;
            if (sscanf(text, "%d %159[^\n]\n%n", &fd, address, &used) != 2 || used == 0)
                break;
            handover->sockets[handover->count].fd = fd;
            strcpy(handover->sockets[handover->count++].text, address);
        }
    }
    unsetenv(FCGI_HANDOVER_NAME);
}

int
fcgi_handover_take(fcgi_handover *handover, const char *text)
{
    for (size_t i = 0; i < handover->count; i++)
        if (handover->sockets[i].fd != -1 && strcmp(handover->sockets[i].text, text) == 0) {
            const int fd = handover->sockets[i].fd;
            handover->sockets[i].fd = -1;
            return fd;
        }
    return -1;
}

void
fcgi_handover_done(fcgi_handover *handover)
{
    for (size_t i = 0; i < handover->count; i++)
        if (handover->sockets[i].fd != -1)
            close(handover->sockets[i].fd);
    if (handover->ready_fd == -1)
        return;
    (void)!write(handover->ready_fd, "1", 1);
    close(handover->ready_fd);
    *handover = (fcgi_handover){ .ready_fd = -1 };
}

/* The environment with our word and without a former one. */
static char **
make_environment(char *word)
{
    size_t count = 0;
    while (environ[count])
        count++;
    char **made = malloc((count + 2) * sizeof *made);
    if (!made)
        return NULL;
    size_t at = 0;
    for (size_t i = 0; i < count; i++)
        if (strncmp(environ[i], FCGI_HANDOVER_NAME "=", sizeof FCGI_HANDOVER_NAME) != 0)
            made[at++] = environ[i];
    made[at++] = word;
    made[at] = NULL;
    return made;
}

int
fcgi_handover_start(const char *program, char *const *arguments, const fcgi_listener *listeners, size_t count,
                    pid_t *process, char *error, size_t error_bytes)
{
    int ends[2] = { -1, -1 }, failed = 0;
    char word[sizeof FCGI_HANDOVER_NAME + 16 + FCGI_HANDOVER_MAX * (FCGI_LISTEN_TEXT_MAX + 16)];
    char **environment = NULL;
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    if (pipe2(ends, O_CLOEXEC) != 0) {
        snprintf(error, error_bytes, "pipe: %s", strerror(errno));
        return -1;
    }
    /* A descriptor duplicated onto itself stays open over the exec. */
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    failed = posix_spawn_file_actions_adddup2(&actions, ends[1], ends[1]);
    int length = snprintf(word, sizeof word, FCGI_HANDOVER_NAME "=%d\n", ends[1]);
    for (size_t i = 0; i < count && failed == 0; i++) {
        if (listeners[i].fd == -1)
            continue;
        failed = posix_spawn_file_actions_adddup2(&actions, listeners[i].fd, listeners[i].fd);
        length += snprintf(word + length, sizeof word - (size_t)length, "%d %s\n", listeners[i].fd, listeners[i].text);
    }
    sigemptyset(&none);
    if (failed == 0)
        failed = posix_spawnattr_setsigmask(&attributes, &none);
    if (failed == 0)
        failed = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    if (failed == 0 && (environment = make_environment(word)) == NULL)
        failed = ENOMEM;
    if (failed == 0)
        failed = posix_spawnp(process, program, &actions, &attributes, arguments, environment);
    free(environment);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (failed == 0)
        return ends[0];
    close(ends[0]);
    snprintf(error, error_bytes, "%s: %s", program, strerror(failed));
    return -1;
}

/* ---- the service manager */

void
fcgi_process_tell(const char *state)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (!path || (path[0] != '/' && path[0] != '@') || strlen(path) >= sizeof address.sun_path)
        return;
    const size_t length = strlen(path);
    memcpy(address.sun_path, path, length);
    if (path[0] == '@')
        address.sun_path[0] = '\0';
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd == -1)
        return;
    (void)!sendto(fd, state, strlen(state), MSG_NOSIGNAL | MSG_DONTWAIT, (const struct sockaddr *)&address,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length));
    close(fd);
}
