/* The daemon as a process: whose rights it has, how it hands its sockets to a newer one, whom it tells that it serves.
 * Must not enter: requests, rules. */
#ifndef TIDEGATE_FCGI_PROCESS_H
#define TIDEGATE_FCGI_PROCESS_H

#include "listen.h"

typedef struct fcgi_user {
    uid_t uid;
    gid_t gid;
    char name[64];
} fcgi_user;

/* Looks a user up. false: `error` says that there is none. */
bool fcgi_user_find(const char *name, fcgi_user *user, char *error, size_t error_bytes);

/* Locks the process up below `folder` (may be NULL) and gives root's rights away for those of `user` (may be NULL), for
 * good. In any case no program it might run gets more rights than it has. false: `error` says why. */
bool fcgi_process_confine(const char *folder, const fcgi_user *user, char *error, size_t error_bytes);

/* Calls that nothing here makes fail with EPERM from now on, in this process and whatever it starts: those that reach
 * into other processes, load code into the kernel, mount, or leave a namespace; `runs` false: starting a program as well.
 * `inherits`: a former process of ours may have handed its filter on. Before any thread is started. false: `error` says
 * why. */
bool fcgi_process_filter(bool runs, bool inherits, char *error, size_t error_bytes);

#define FCGI_HANDOVER_NAME "TIDEGATE_HANDOVER"
#define FCGI_HANDOVER_MAX (FCGI_LISTENERS_MAX + 1u) /* and the page's */

/* What a former process of ours handed to this one. */
typedef struct fcgi_handover {
    int ready_fd; /* -1: nothing was handed over */
    size_t count;
    struct {
        int fd;
        char text[FCGI_LISTEN_TEXT_MAX];
    } sockets[FCGI_HANDOVER_MAX];
} fcgi_handover;

/* Reads and removes the environment's word of it. */
void fcgi_handover_read(fcgi_handover *handover);
/* The descriptor for this address, which is the caller's from now on; -1: there is none. */
int fcgi_handover_take(fcgi_handover *handover, const char *text);
/* Everything that was taken is served: the former process may go. What was not taken is closed. */
void fcgi_handover_done(fcgi_handover *handover);

/* Starts `program` with these arguments and the listeners' sockets. Returns the descriptor that its word comes from,
 * and its process id; -1: `error` says why. Safe with several threads. */
int fcgi_handover_start(const char *program, char *const *arguments, const fcgi_listener *listeners, size_t count,
                        pid_t *process, char *error, size_t error_bytes);

/* "READY=1" and the like to the service manager, if there is one (sd_notify's protocol). */
void fcgi_process_tell(const char *state);

#endif
