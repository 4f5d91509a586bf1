/* Listening sockets: what `--listen` says, made so that nobody who should not can connect for even a moment, and nobody
 * who listens already is pushed aside. Must not enter: connections, records, decisions. */
#ifndef TIDEGATE_FCGI_LISTEN_H
#define TIDEGATE_FCGI_LISTEN_H

#include "tidegate.h"

#include <sys/types.h>

#define FCGI_LISTENERS_MAX 16u
#define FCGI_LISTEN_TEXT_MAX 160u

/* What a Responder answers with when the web server does not say (TIDEGATE_MODE). */
typedef enum fcgi_mode {
    FCGI_MODE_UNSET = 0,
    FCGI_MODE_ANSWER, /* 200, or the refusal itself */
    FCGI_MODE_AUTH    /* 204, or a refusal in the two numbers that nginx's auth_request knows */
} fcgi_mode;

bool fcgi_mode_parse(tg_text text, fcgi_mode *mode);

typedef enum fcgi_listen_kind { FCGI_LISTEN_UNIX, FCGI_LISTEN_TCP, FCGI_LISTEN_INHERITED } fcgi_listen_kind;

typedef struct fcgi_listener {
    int fd; /* -1: not open */
    fcgi_listen_kind kind;
    fcgi_mode mode;
    bool is_tcp;
    char text[FCGI_LISTEN_TEXT_MAX]; /* "unix:/run/tidegate/tidegate.sock", for the log */
    char path[108];                  /* FCGI_LISTEN_UNIX: as in sockaddr_un, with its NUL */
    mode_t file_mode;
    uid_t owner; /* (uid_t)-1: as it comes */
    gid_t group; /* (gid_t)-1: as it comes */
    dev_t device; /* of the socket file we made: nobody else's is removed at the end */
    ino_t inode;
    char host[48];
    uint16_t port;
} fcgi_listener;

typedef enum fcgi_listen_status {
    FCGI_LISTEN_OK = 0,
    FCGI_LISTEN_USAGE, /* the text is wrong */
    FCGI_LISTEN_FAILED /* the system or another listener is in the way */
} fcgi_listen_status;

/* "unix:/path[,mode=0660][,owner=NAME][,group=NAME][,answers=answer|auth]", "tcp:127.0.0.1:9410[,answers=...]",
 * "fd:0[,answers=...]". Opens nothing. `error` gets one line. */
fcgi_listen_status fcgi_listener_parse(const char *text, fcgi_listener *listener, char *error, size_t error_bytes);

/* Opens it non-blocking and close-on-exec. A unix path on which somebody answers is refused, one that nobody serves any
 * more is replaced; mode and owner are right before anyone can connect, whatever the umask. */
fcgi_listen_status fcgi_listener_open(fcgi_listener *listener, char *error, size_t error_bytes);

/* Takes the socket's name away, so that no new peer finds it; the descriptor stays open. */
void fcgi_listener_unname(fcgi_listener *listener);
void fcgi_listener_close(fcgi_listener *listener); /* unnames too */

/* Whether `fd` is a listening stream socket (spawn-fcgi, lighttpd and mod_fcgid hand one over as 0). */
bool fcgi_is_listening(int fd);

#endif
