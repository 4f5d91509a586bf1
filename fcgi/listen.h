/* Listening sockets: what `--listen` says, made so that nobody who should not can connect for even a moment, and nobody
 * who listens already is pushed aside. Must not enter: connections, records, decisions. */
#ifndef TIDEGATE_FCGI_LISTEN_H
#define TIDEGATE_FCGI_LISTEN_H

#include "tidegate.h"

#include <sys/socket.h>
#include <sys/types.h>

#define FCGI_LISTENERS_MAX 16u
#define FCGI_LISTEN_TEXT_MAX 160u
#define FCGI_POLICIES_MAX 32u
#define FCGI_BACKENDS_MAX 8u
#define FCGI_UIDS_MAX 16u
#define FCGI_TOKEN_BYTES_MIN 16u
#define FCGI_TOKEN_BYTES_MAX 128u
#define FCGI_KEEP_MAX 1024u

/* How a request may be answered. A Responder's way is what TIDEGATE_MODE says; the role Authorizer has its own. */
typedef enum fcgi_mode {
    FCGI_MODE_UNSET = 0,
    FCGI_MODE_ANSWER,    /* 200 and the decision, or the refusal itself */
    FCGI_MODE_AUTH,      /* 204, or a refusal in the two numbers that nginx's auth_request knows */
    FCGI_MODE_XACCEL,    /* X-Accel-Redirect to TIDEGATE_NEXT, or the refusal itself */
    FCGI_MODE_RELAY,     /* what the application behind answers, or the refusal itself */
    FCGI_MODE_AUTHORIZER /* role Authorizer: 200 with Variable-..., or the refusal itself */
} fcgi_mode;

/* The word of a parameter or option; "authorizer" only where `listed`: it is a role and not to be asked for. */
bool fcgi_mode_parse(tg_text text, bool listed, fcgi_mode *mode);
const char *fcgi_mode_name(fcgi_mode mode);

/* An application that requests are passed on to. */
typedef struct fcgi_backend {
    char text[FCGI_LISTEN_TEXT_MAX];
    struct sockaddr_storage address;
    socklen_t length;
} fcgi_backend;

/* What peers of one listening socket may do: whoever can connect says what he likes, so that this is never taken from a
 * parameter. */
typedef struct fcgi_rights {
    unsigned modes;   /* 1u << fcgi_mode */
    fcgi_mode first;  /* the first Responder's mode listed: what is meant where nobody says; UNSET without modes= */
    bool keyed;       /* keys, costs, peeks and batches may be given */
    size_t policy_count; /* 0: any; else TIDEGATE_POLICY has to be one of these, and the only one is the default */
    char policies[FCGI_POLICIES_MAX][TG_NAME_BYTES_MAX + 1];
    size_t uid_count; /* unix sockets: 0: anybody who can connect */
    uid_t uids[FCGI_UIDS_MAX];
    size_t token_length; /* 0: none is asked for */
    char token[FCGI_TOKEN_BYTES_MAX];
    size_t backend_count;
    fcgi_backend backends[FCGI_BACKENDS_MAX]; /* in the order in which they are tried */
    size_t keep;      /* backend connections kept open while idle, per loop; 0: one connection per request */
    char root[256];   /* SCRIPT_FILENAME is passed on below here only; empty: never */
    uint64_t hold_us; /* the longest that an allowed request waits for its turn in a leaky bucket; 0: it is told */
    bool php_values;  /* PHP_VALUE and PHP_ADMIN_VALUE are passed on: they can make php run anything */
} fcgi_rights;

static inline bool
fcgi_rights_allow(const fcgi_rights *rights, fcgi_mode mode)
{
    return (rights->modes & 1u << mode) != 0;
}

typedef enum fcgi_listen_kind { FCGI_LISTEN_UNIX, FCGI_LISTEN_TCP, FCGI_LISTEN_INHERITED } fcgi_listen_kind;

typedef struct fcgi_listener {
    int fd; /* -1: not open */
    fcgi_listen_kind kind;
    fcgi_mode mode; /* answers=: what a Responder gets when the web server does not say */
    bool is_tcp;
    bool page;        /* of --http: HTTP is spoken, and of rights there is only who may connect */
    bool beyond_loopback, any_host;
    bool shared; /* somebody else accepts from this socket too and will after us: its queue and name are his */
    fcgi_rights rights;
    bool hold_said;
    unsigned keyed_said; /* 0: not said, 1: keyed=no, 2: keyed=yes */
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

/* "unix:/path", "tcp:127.0.0.1:9410" or "fd:0", and options behind commas:
 *
 *   mode= owner= group=   of a unix socket's file
 *   modes=answer+auth+xaccel+authorizer+relay   what may be asked for; the first is what is meant where nobody says
 *   answers=MODE          what is meant where nobody says
 *   policies=A+B          what TIDEGATE_POLICY may name; the only one counts where it names none
 *   peer-uid=USER+USER    unix: who may connect besides what the file's mode says
 *   token=SECRET, token=@FILE   what TIDEGATE_TOKEN has to be; without one TCP serves authorizers only
 *   keyed=yes|no          whether keys, costs, peeks and batches may be given: yes on unix sockets, no on TCP
 *   relay-to=ADDRESS+ADDRESS  unix:/path or tcp:IP:PORT, tried in this order
 *   keep=N                backend connections kept while idle
 *   hold=S                the longest that an allowed request waits for its turn
 *   root=/folder          SCRIPT_FILENAME is passed on below it only
 *   php-values=yes|no     whether PHP_VALUE and PHP_ADMIN_VALUE are passed on
 *
 * Opens nothing but the token's file. `error` gets one line. */
fcgi_listen_status fcgi_listener_parse(const char *text, fcgi_listener *listener, char *error, size_t error_bytes);

/* The same for `--http`: of the options mode=, owner=, group= and peer-uid=, and
 *
 *   beyond-loopback=yes   a TCP address that others than this host can reach; whoever can reads the numbers
 *   any-host=yes          whatever name a request has for us: behind a proxy that passes its own on */
fcgi_listen_status fcgi_listener_parse_page(const char *text, fcgi_listener *listener, char *error, size_t error_bytes);

/* Opens it non-blocking and close-on-exec. A unix path on which somebody answers is refused, one that nobody serves any
 * more is replaced; mode and owner are right before anyone can connect, whatever the umask. */
fcgi_listen_status fcgi_listener_open(fcgi_listener *listener, char *error, size_t error_bytes);

/* A descriptor of the same socket for another loop: it neither unnames the socket nor empties its queue. */
fcgi_listen_status fcgi_listener_copy(const fcgi_listener *listener, fcgi_listener *copy);

/* Takes over `fd`, on which a former process of ours listens for this same address. Its name is ours from now on. */
fcgi_listen_status fcgi_listener_adopt(fcgi_listener *listener, int fd, char *error, size_t error_bytes);

/* Whether whoever is at the other end of `fd` may speak here. */
bool fcgi_listener_admits(const fcgi_listener *listener, int fd);

/* Takes the socket's name away, so that no new peer finds it; the descriptor stays open. */
void fcgi_listener_unname(fcgi_listener *listener);
void fcgi_listener_close(fcgi_listener *listener); /* unnames too */

/* Whether `fd` is a listening stream socket (spawn-fcgi, lighttpd and mod_fcgid hand one over as 0). */
bool fcgi_is_listening(int fd);

#endif
