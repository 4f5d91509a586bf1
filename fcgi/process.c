/* The daemon as a process: see process.h. */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
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

/* ---- what the kernel still does for it */

/* What is forbidden, not what is allowed: a list of the latter is another one for each C library and each of its
 * versions, and one that is wrong takes the site down. What is left out where the system's headers do not know it. */
static const unsigned forbidden[] = {
#ifdef SYS_kexec_load
    SYS_kexec_load,
#endif
#ifdef SYS_kexec_file_load
    SYS_kexec_file_load,
#endif
#ifdef SYS_io_uring_setup
    SYS_io_uring_setup,
#endif
#ifdef SYS_userfaultfd
    SYS_userfaultfd,
#endif
#ifdef SYS_open_by_handle_at
    SYS_open_by_handle_at,
#endif
    SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_bpf, SYS_perf_event_open, SYS_init_module,
    SYS_finit_module, SYS_delete_module, SYS_mount, SYS_umount2, SYS_pivot_root, SYS_setns, SYS_unshare, SYS_chroot,
    SYS_reboot, SYS_swapon, SYS_swapoff, SYS_acct, SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_sethostname,
    SYS_setdomainname, SYS_add_key, SYS_request_key, SYS_keyctl, SYS_personality, SYS_quotactl, SYS_syslog,
};
static const unsigned running[] = { SYS_execve, SYS_execveat };

#if defined(__x86_64__)
#define OWN_ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define OWN_ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

#ifdef OWN_ARCHITECTURE
static void
put_step(struct sock_filter *filter, size_t *count, uint16_t code, uint32_t k, uint8_t if_true, uint8_t if_false)
{
    filter[(*count)++] = (struct sock_filter){ .code = code, .jt = if_true, .jf = if_false, .k = k };
}

static void
put_refusals(struct sock_filter *filter, size_t *count, const unsigned *numbers, size_t number_count)
{
    for (size_t i = 0; i < number_count; i++) {
        put_step(filter, count, BPF_JMP | BPF_JEQ | BPF_K, numbers[i], 0, 1);
        put_step(filter, count, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
    }
}
#endif

bool
fcgi_process_filter(bool runs, bool inherits, char *error, size_t error_bytes)
{
#ifdef OWN_ARCHITECTURE
    /* One more for each handover would slow every call down. */
    if (inherits && unshare(0) == -1 && errno == EPERM)
        return true;
    enum { FORBIDDEN = sizeof forbidden / sizeof *forbidden, RUNNING = sizeof running / sizeof *running };
    struct sock_filter filter[2 * (FORBIDDEN + RUNNING) + 8];
    size_t count = 0;
    put_step(filter, &count, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch), 0, 0);
    put_step(filter, &count, BPF_JMP | BPF_JEQ | BPF_K, OWN_ARCHITECTURE, 1, 0);
    put_step(filter, &count, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0); /* numbers that mean something else */
    put_step(filter, &count, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
    put_step(filter, &count, BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1); /* x32: the same calls under other numbers */
    put_step(filter, &count, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
    put_refusals(filter, &count, forbidden, FORBIDDEN);
    if (!runs)
        put_refusals(filter, &count, running, RUNNING);
    put_step(filter, &count, BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
    const struct sock_fprog program = { .len = (unsigned short)count, .filter = filter };
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0)
        return true;
    snprintf(error, error_bytes, "seccomp: %s; --seccomp no does without", strerror(errno));
    return false;
#else
    (void)runs, (void)inherits, (void)error, (void)error_bytes, (void)forbidden, (void)running;
    return true; /* the numbers of this architecture's calls are not known here */
#endif
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
