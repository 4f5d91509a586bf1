/* Listening sockets: see listen.h. */
#include "listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <netinet/in.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Long enough for a burst; short enough that a hung daemon's queue fills and the web server hears so at once. */
#define HOLD_US UINT64_C(10000000) /* of a socket that relays and does nothing else */
#define BACKLOG 1024

typedef struct trouble {
    char *error;
    size_t bytes;
} trouble;

static fcgi_listen_status __attribute__((format(printf, 3, 4)))
fail(trouble where, fcgi_listen_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(where.error, where.bytes, format, arguments);
    va_end(arguments);
    return status;
}

static const char *const mode_names[] = { "", "answer", "auth", "xaccel", "relay", "authorizer" };

bool
fcgi_mode_parse(tg_text text, bool listed, fcgi_mode *mode)
{
    const fcgi_mode last = listed ? FCGI_MODE_AUTHORIZER : FCGI_MODE_RELAY;
    for (fcgi_mode each = FCGI_MODE_ANSWER; each <= last; each++)
        if (text.length == strlen(mode_names[each]) && memcmp(text.data, mode_names[each], text.length) == 0) {
            *mode = each;
            return true;
        }
    return false;
}

const char *
fcgi_mode_name(fcgi_mode mode)
{
    return mode_names[mode];
}

/* ---- parsing */

static bool
parse_number(const char *text, unsigned long max, int base, unsigned long *number)
{
    if (*text < '0' || *text > '9') /* strtoul would take signs and blanks */
        return false;
    char *end;
    errno = 0;
    *number = strtoul(text, &end, base);
    return errno == 0 && *end == '\0' && *number <= max;
}

/* Loopback only: whoever can connect can speak for every client, and TCP has no file mode to say who may. */
static bool
is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == 127;
    if (address->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
    return false;
}

static bool
make_address(const fcgi_listener *listener, struct sockaddr_storage *storage, socklen_t *length)
{
    memset(storage, 0, sizeof *storage);
    struct sockaddr_in *four = (struct sockaddr_in *)storage;
    if (inet_pton(AF_INET, listener->host, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons(listener->port);
        *length = sizeof *four;
        return true;
    }
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)storage;
    if (inet_pton(AF_INET6, listener->host, &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons(listener->port);
        *length = sizeof *six;
        return true;
    }
    return false;
}

/* Cuts the next word of "a+b+c" off `*list`. NULL: none is left. */
static char *
next_word(char **list)
{
    char *word = *list;
    if (!word || *word == '\0')
        return NULL;
    char *plus = strchr(word, '+');
    if (plus)
        *plus++ = '\0';
    *list = plus;
    return word;
}

static fcgi_listen_status
parse_modes(fcgi_listener *listener, char *list, trouble where)
{
    fcgi_rights *rights = &listener->rights;
    for (char *word; (word = next_word(&list)) != NULL;) {
        fcgi_mode mode;
        if (!fcgi_mode_parse(tg_text_of(word), true, &mode))
            return fail(where, FCGI_LISTEN_USAGE,
                        "modes=%s is unknown; expected answer, auth, xaccel, authorizer or relay, joined by +", word);
        rights->modes |= 1u << mode;
        if (mode != FCGI_MODE_AUTHORIZER && rights->first == FCGI_MODE_UNSET)
            rights->first = mode;
    }
    if (rights->modes == 0)
        return fail(where, FCGI_LISTEN_USAGE, "modes= is empty; expected for example modes=answer+auth");
    return FCGI_LISTEN_OK;
}

static fcgi_listen_status
parse_policies(fcgi_rights *rights, char *list, trouble where)
{
    for (char *word; (word = next_word(&list)) != NULL;) {
        if (strlen(word) == 0 || strlen(word) > TG_NAME_BYTES_MAX)
            return fail(where, FCGI_LISTEN_USAGE, "policies=%s: a policy's name has 1 to %d bytes", word,
                        TG_NAME_BYTES_MAX);
        if (rights->policy_count == FCGI_POLICIES_MAX)
            return fail(where, FCGI_LISTEN_USAGE, "policies=: more than %u", FCGI_POLICIES_MAX);
        strcpy(rights->policies[rights->policy_count++], word);
    }
    if (rights->policy_count == 0)
        return fail(where, FCGI_LISTEN_USAGE, "policies= is empty; leave it out to allow every policy");
    return FCGI_LISTEN_OK;
}

static fcgi_listen_status
parse_uids(fcgi_rights *rights, char *list, trouble where)
{
    unsigned long number;
    for (char *word; (word = next_word(&list)) != NULL;) {
        const struct passwd *user = getpwnam(word);
        if (!user && !parse_number(word, UINT32_MAX - 1, 10, &number))
            return fail(where, FCGI_LISTEN_USAGE, "peer-uid=%s: no such user", word);
        if (rights->uid_count == FCGI_UIDS_MAX)
            return fail(where, FCGI_LISTEN_USAGE, "peer-uid=: more than %u", FCGI_UIDS_MAX);
        rights->uids[rights->uid_count++] = user ? user->pw_uid : (uid_t)number;
    }
    if (rights->uid_count == 0)
        return fail(where, FCGI_LISTEN_USAGE, "peer-uid= is empty; leave it out to admit everybody who can connect");
    return FCGI_LISTEN_OK;
}

/* On a command line everybody can read it: token=@FILE keeps it out of there. */
static fcgi_listen_status
parse_token(fcgi_rights *rights, const char *value, trouble where)
{
    char read_back[FCGI_TOKEN_BYTES_MAX + 2];
    const char *token = value;
    size_t length = strlen(value);
    if (*value == '@') {
        const int fd = open(value + 1, O_RDONLY | O_CLOEXEC);
        struct stat found;
        if (fd == -1 || fstat(fd, &found) == -1) {
            if (fd != -1)
                close(fd);
            return fail(where, FCGI_LISTEN_USAGE, "token=%s: %s", value, strerror(errno));
        }
        if (found.st_mode & 07) {
            close(fd);
            return fail(where, FCGI_LISTEN_USAGE, "token=%s: everybody may read or write this file; chmod 0640 it",
                        value);
        }
        const ssize_t count = read(fd, read_back, sizeof read_back);
        close(fd);
        length = count > 0 ? (size_t)count : 0;
        while (length > 0 && (read_back[length - 1] == '\n' || read_back[length - 1] == '\r'))
            length--;
        token = read_back;
    }
    if (length < FCGI_TOKEN_BYTES_MIN || length > FCGI_TOKEN_BYTES_MAX)
        return fail(where, FCGI_LISTEN_USAGE, "token=: expected %u to %u bytes, for example of: openssl rand -hex 16",
                    FCGI_TOKEN_BYTES_MIN, FCGI_TOKEN_BYTES_MAX);
    memcpy(rights->token, token, length);
    rights->token_length = length;
    return FCGI_LISTEN_OK;
}

static bool
parse_backend(const char *text, fcgi_backend *backend)
{
    if (strlen(text) >= sizeof backend->text)
        return false;
    strcpy(backend->text, text);
    struct sockaddr_un *local = (struct sockaddr_un *)&backend->address;
    if (strncmp(text, "unix:/", 6) == 0) {
        if (strlen(text + 5) >= sizeof local->sun_path)
            return false;
        local->sun_family = AF_UNIX;
        strcpy(local->sun_path, text + 5);
        backend->length = sizeof *local;
        return true;
    }
    fcgi_listener other = { .fd = -1 };
    unsigned long port;
    const char *colon = strrchr(text, ':');
    if (strncmp(text, "tcp:", 4) != 0 || !colon || colon < text + 4 || !parse_number(colon + 1, 65535, 10, &port))
        return false;
    const char *host = text + 4;
    size_t length = (size_t)(colon - host);
    if (length >= 2 && host[0] == '[' && host[length - 1] == ']') {
        host++;
        length -= 2;
    }
    if (port == 0 || length == 0 || length >= sizeof other.host)
        return false;
    memcpy(other.host, host, length);
    if (strcmp(other.host, "localhost") == 0)
        strcpy(other.host, "127.0.0.1");
    other.port = (uint16_t)port;
    return make_address(&other, &backend->address, &backend->length);
}

static fcgi_listen_status
parse_backends(fcgi_rights *rights, char *list, trouble where)
{
    for (char *word; (word = next_word(&list)) != NULL;) {
        if (rights->backend_count == FCGI_BACKENDS_MAX)
            return fail(where, FCGI_LISTEN_USAGE, "relay-to=: more than %u", FCGI_BACKENDS_MAX);
        if (!parse_backend(word, &rights->backends[rights->backend_count]))
            return fail(where, FCGI_LISTEN_USAGE,
                        "relay-to=%s: expected unix:/path or tcp:ADDRESS:PORT (no names), joined by +", word);
        rights->backend_count++;
    }
    if (rights->backend_count == 0)
        return fail(where, FCGI_LISTEN_USAGE, "relay-to= is empty; expected for example relay-to=unix:/run/app.sock");
    return FCGI_LISTEN_OK;
}

static fcgi_listen_status
parse_root(fcgi_rights *rights, const char *value, trouble where)
{
    size_t length = strlen(value);
    while (length > 1 && value[length - 1] == '/')
        length--;
    if (value[0] != '/' || length >= sizeof rights->root || strstr(value, "/../"))
        return fail(where, FCGI_LISTEN_USAGE, "root=%s: expected an absolute path of at most %zu bytes without ..",
                    value, sizeof rights->root - 1);
    memcpy(rights->root, value, length);
    rights->root[length] = '\0';
    return FCGI_LISTEN_OK;
}

static bool
parse_yes(const char *value, bool *yes)
{
    *yes = strcmp(value, "yes") == 0;
    return *yes || strcmp(value, "no") == 0;
}

static fcgi_listen_status
parse_option(fcgi_listener *listener, const char *name, char *value, trouble where)
{
    unsigned long number;
    if (strcmp(name, "answers") == 0) {
        if (!fcgi_mode_parse(tg_text_of(value), false, &listener->mode))
            return fail(where, FCGI_LISTEN_USAGE,
                        "answers=%s is unknown; expected answers=answer, auth, xaccel or relay", value);
        return FCGI_LISTEN_OK;
    }
    bool yes;
    fcgi_rights *rights = &listener->rights;
    if (strcmp(name, "modes") == 0)
        return parse_modes(listener, value, where);
    if (strcmp(name, "policies") == 0)
        return parse_policies(rights, value, where);
    if (strcmp(name, "peer-uid") == 0)
        return parse_uids(rights, value, where);
    if (strcmp(name, "token") == 0)
        return parse_token(rights, value, where);
    if (strcmp(name, "relay-to") == 0)
        return parse_backends(rights, value, where);
    if (strcmp(name, "root") == 0)
        return parse_root(rights, value, where);
    if (strcmp(name, "keep") == 0) {
        if (!parse_number(value, FCGI_KEEP_MAX, 10, &number))
            return fail(where, FCGI_LISTEN_USAGE, "keep=%s: expected a number up to %u", value, FCGI_KEEP_MAX);
        rights->keep = number;
        return FCGI_LISTEN_OK;
    }
    if (strcmp(name, "hold") == 0) {
        char *end;
        const double seconds = strtod(value, &end);
        if (*value < '0' || *value > '9' || *end != '\0' || !(seconds >= 0 && seconds <= 3600))
            return fail(where, FCGI_LISTEN_USAGE, "hold=%s: expected seconds from 0 to 3600", value);
        rights->hold_us = (uint64_t)(seconds * 1e6);
        listener->hold_said = true;
        return FCGI_LISTEN_OK;
    }
    if (listener->page && (strcmp(name, "beyond-loopback") == 0 || strcmp(name, "any-host") == 0)) {
        if (!parse_yes(value, &yes))
            return fail(where, FCGI_LISTEN_USAGE, "%s=%s: expected yes or no", name, value);
        if (name[0] == 'a')
            listener->any_host = yes;
        else
            listener->beyond_loopback = yes;
        return FCGI_LISTEN_OK;
    }
    if (strcmp(name, "keyed") == 0 || strcmp(name, "php-values") == 0) {
        if (!parse_yes(value, &yes))
            return fail(where, FCGI_LISTEN_USAGE, "%s=%s: expected yes or no", name, value);
        if (name[0] == 'k')
            listener->keyed_said = yes ? 2 : 1;
        else
            rights->php_values = yes;
        return FCGI_LISTEN_OK;
    }
    if (listener->kind != FCGI_LISTEN_UNIX && (strcmp(name, "mode") == 0 || strcmp(name, "owner") == 0 ||
                                               strcmp(name, "group") == 0))
        return fail(where, FCGI_LISTEN_USAGE, "%s= is for unix sockets only", name);
    if (strcmp(name, "mode") == 0) {
        if (!parse_number(value, 0777, 8, &number))
            return fail(where, FCGI_LISTEN_USAGE, "mode=%s is no octal mode; expected for example mode=0660", value);
        listener->file_mode = (mode_t)number;
        return FCGI_LISTEN_OK;
    }
    if (strcmp(name, "owner") == 0) {
        const struct passwd *user = getpwnam(value);
        if (!user && !parse_number(value, UINT32_MAX - 1, 10, &number))
            return fail(where, FCGI_LISTEN_USAGE, "owner=%s: no such user", value);
        listener->owner = user ? user->pw_uid : (uid_t)number;
        return FCGI_LISTEN_OK;
    }
    if (strcmp(name, "group") == 0) {
        const struct group *group = getgrnam(value);
        if (!group && !parse_number(value, UINT32_MAX - 1, 10, &number))
            return fail(where, FCGI_LISTEN_USAGE, "group=%s: no such group", value);
        listener->group = group ? group->gr_gid : (gid_t)number;
        return FCGI_LISTEN_OK;
    }
    return fail(where, FCGI_LISTEN_USAGE, "option %s= is unknown; tidegate-fcgi --help lists them", name);
}

/* What was said, made whole: nobody is given more than his way of connecting can bear. Whether the socket is TCP is
 * known by now. */
static fcgi_listen_status
settle_rights(fcgi_listener *listener, trouble where)
{
    fcgi_rights *rights = &listener->rights;
    const unsigned open_modes =
        1u << FCGI_MODE_ANSWER | 1u << FCGI_MODE_AUTH | 1u << FCGI_MODE_XACCEL | 1u << FCGI_MODE_AUTHORIZER;
    const bool trusted = !listener->is_tcp || rights->token_length > 0;
    if (rights->modes == 0) {
        if (rights->backend_count > 0) {
            rights->modes = 1u << FCGI_MODE_RELAY;
            rights->first = FCGI_MODE_RELAY;
        } else {
            rights->modes = trusted ? open_modes : 1u << FCGI_MODE_AUTHORIZER;
        }
    }
    if (!trusted && rights->modes != 1u << FCGI_MODE_AUTHORIZER)
        return fail(where, FCGI_LISTEN_USAGE,
                    "%s: without a token a TCP socket serves authorizers only, because every local user can connect; "
                    "write token=@/path/of/a/secret (sent as TIDEGATE_TOKEN), modes=authorizer, or use a unix socket",
                    listener->text);
    if (listener->is_tcp && rights->uid_count > 0)
        return fail(where, FCGI_LISTEN_USAGE, "%s: peer-uid= is for unix sockets; TCP does not tell who connects",
                    listener->text);
    if (fcgi_rights_allow(rights, FCGI_MODE_RELAY) && rights->backend_count == 0)
        return fail(where, FCGI_LISTEN_USAGE,
                    "%s: modes=relay needs the application's address: relay-to=unix:/path or relay-to=tcp:ADDRESS:PORT",
                    listener->text);
    if (!fcgi_rights_allow(rights, FCGI_MODE_RELAY) && rights->backend_count > 0)
        return fail(where, FCGI_LISTEN_USAGE, "%s: relay-to= is of no use without relay in modes=", listener->text);
    if (listener->mode != FCGI_MODE_UNSET && !fcgi_rights_allow(rights, listener->mode))
        return fail(where, FCGI_LISTEN_USAGE, "%s: answers=%s is not among its modes=", listener->text,
                    fcgi_mode_name(listener->mode));
    if (listener->keyed_said == 2 && !trusted)
        return fail(where, FCGI_LISTEN_USAGE, "%s: keyed=yes on TCP needs token=", listener->text);
    /* A web server waits for an application as long as it takes, for a decision a fraction of a second. */
    if (!listener->hold_said && rights->modes == 1u << FCGI_MODE_RELAY)
        rights->hold_us = HOLD_US;
    rights->keyed = listener->keyed_said == 2 || (listener->keyed_said == 0 && !listener->is_tcp);
    return FCGI_LISTEN_OK;
}

static fcgi_listen_status
parse_tcp(const char *rest, fcgi_listener *listener, trouble where)
{
    const char *colon = strrchr(rest, ':');
    unsigned long port;
    if (!colon || !parse_number(colon + 1, 65535, 10, &port))
        return fail(where, FCGI_LISTEN_USAGE, "tcp:%s: expected tcp:ADDRESS:PORT, for example tcp:127.0.0.1:9410",
                    rest);
    const char *host = rest;
    size_t host_length = (size_t)(colon - rest);
    if (host_length >= 2 && host[0] == '[' && host[host_length - 1] == ']') {
        host++;
        host_length -= 2;
    }
    if (host_length == 0 || host_length >= sizeof listener->host)
        return fail(where, FCGI_LISTEN_USAGE, "tcp:%s: expected an address before the port", rest);
    memcpy(listener->host, host, host_length);
    listener->host[host_length] = '\0';
    if (strcmp(listener->host, "localhost") == 0)
        strcpy(listener->host, "127.0.0.1");
    listener->port = (uint16_t)port;
    struct sockaddr_storage storage;
    socklen_t length;
    if (!make_address(listener, &storage, &length))
        return fail(where, FCGI_LISTEN_USAGE, "tcp:%s: '%s' is no address; names are not looked up", rest,
                    listener->host);
    if (!listener->page && !is_loopback((struct sockaddr *)&storage))
        return fail(where, FCGI_LISTEN_USAGE,
                    "tcp:%s: only loopback addresses are served in this version, because whoever can connect can speak "
                    "for every client; use a unix socket, or 127.0.0.1 or [::1]",
                    rest);
    return FCGI_LISTEN_OK;
}

/* Numbers are no secret that could harm a client, but nobody else's either. */
static fcgi_listen_status
settle_page(const fcgi_listener *listener, trouble where)
{
    struct sockaddr_storage storage;
    socklen_t length;
    if (listener->kind == FCGI_LISTEN_TCP && !listener->beyond_loopback && make_address(listener, &storage, &length) &&
        !is_loopback((struct sockaddr *)&storage))
        return fail(where, FCGI_LISTEN_USAGE,
                    "%s: others than this host can reach it and read the numbers; write beyond-loopback=yes if they shall, "
                    "or use a unix socket, 127.0.0.1 or [::1]",
                    listener->text);
    if (listener->is_tcp && listener->rights.uid_count > 0)
        return fail(where, FCGI_LISTEN_USAGE, "%s: peer-uid= is for unix sockets; TCP does not tell who connects",
                    listener->text);
    return FCGI_LISTEN_OK;
}

static bool
is_for_pages(const char *name)
{
    static const char *const names[] = { "mode", "owner", "group", "peer-uid", "beyond-loopback", "any-host" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

static fcgi_listen_status
parse(const char *text, bool page, fcgi_listener *listener, trouble where)
{
    *listener = (fcgi_listener){ .fd = -1, .page = page, .file_mode = 0660, .owner = (uid_t)-1, .group = (gid_t)-1 };
    char copy[2048];
    if (strlen(text) >= sizeof copy)
        return fail(where, FCGI_LISTEN_USAGE, "a listen address of %zu bytes is too long", strlen(text));
    strcpy(copy, text);
    char *option = strchr(copy, ',');
    if (option)
        *option++ = '\0';
    snprintf(listener->text, sizeof listener->text, "%.*s", (int)sizeof listener->text - 1, copy);

    if (strncmp(copy, "unix:", 5) == 0) {
        listener->kind = FCGI_LISTEN_UNIX;
        if (copy[5] == '\0')
            return fail(where, FCGI_LISTEN_USAGE, "%s: expected a path after unix:", text);
        if (strlen(copy + 5) >= sizeof listener->path)
            return fail(where, FCGI_LISTEN_USAGE, "%s: a socket's path has at most %zu bytes", copy,
                        sizeof listener->path - 1);
        strcpy(listener->path, copy + 5);
    } else if (strncmp(copy, "tcp:", 4) == 0) {
        listener->kind = FCGI_LISTEN_TCP;
        listener->is_tcp = true;
        const fcgi_listen_status status = parse_tcp(copy + 4, listener, where);
        if (status != FCGI_LISTEN_OK)
            return status;
    } else if (strncmp(copy, "fd:", 3) == 0) {
        unsigned long fd;
        listener->kind = FCGI_LISTEN_INHERITED;
        if (!parse_number(copy + 3, 1023, 10, &fd))
            return fail(where, FCGI_LISTEN_USAGE, "%s: expected fd:NUMBER, for example fd:0", text);
        listener->fd = (int)fd;
    } else {
        return fail(where, FCGI_LISTEN_USAGE, "%s: expected unix:/path, tcp:127.0.0.1:PORT or fd:NUMBER", text);
    }

    while (option && *option) {
        char *next = strchr(option, ',');
        if (next)
            *next++ = '\0';
        char *value = strchr(option, '=');
        if (!value)
            return fail(where, FCGI_LISTEN_USAGE, "%s: '%s' has no value; expected %s=...", text, option, option);
        *value++ = '\0';
        if (page && !is_for_pages(option))
            return fail(where, FCGI_LISTEN_USAGE,
                        "%s: option %s= is not for --http; expected mode, owner, group, peer-uid, beyond-loopback or any-host",
                        listener->text, option);
        const fcgi_listen_status status = parse_option(listener, option, value, where);
        if (status != FCGI_LISTEN_OK)
            return status;
        option = next;
    }
    if (page)
        return settle_page(listener, where);
    /* Of an inherited socket it is known only later whether it is TCP: see open_inherited. */
    return listener->kind == FCGI_LISTEN_INHERITED ? FCGI_LISTEN_OK : settle_rights(listener, where);
}

fcgi_listen_status
fcgi_listener_parse(const char *text, fcgi_listener *listener, char *error, size_t error_bytes)
{
    return parse(text, false, listener, (trouble){ error, error_bytes });
}

fcgi_listen_status
fcgi_listener_parse_page(const char *text, fcgi_listener *listener, char *error, size_t error_bytes)
{
    return parse(text, true, listener, (trouble){ error, error_bytes });
}

/* ---- opening */

bool
fcgi_is_listening(int fd)
{
    int value = 0;
    socklen_t length = sizeof value;
    return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &length) == 0 && value == 1;
}

/* OK: the way is free (a stale socket is removed). */
static fcgi_listen_status
clear_path(const fcgi_listener *listener, const struct sockaddr_un *address, trouble where)
{
    struct stat found;
    if (lstat(listener->path, &found) == -1) {
        if (errno == ENOENT)
            return FCGI_LISTEN_OK;
        return fail(where, FCGI_LISTEN_FAILED, "%s: %s", listener->text, strerror(errno));
    }
    if (!S_ISSOCK(found.st_mode))
        return fail(where, FCGI_LISTEN_FAILED, "%s: the path exists and is no socket; it is left alone",
                    listener->text);
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe == -1)
        return fail(where, FCGI_LISTEN_FAILED, "%s: socket: %s", listener->text, strerror(errno));
    const int answer = connect(probe, (const struct sockaddr *)address, sizeof *address) == 0 ? 0 : errno;
    close(probe);
    if (answer == 0 || answer == EAGAIN) /* EAGAIN: its queue is full, so it is there */
        return fail(where, FCGI_LISTEN_FAILED, "%s: another program is listening there", listener->text);
    if (answer != ECONNREFUSED)
        return fail(where, FCGI_LISTEN_FAILED, "%s: cannot tell whether somebody listens there: %s", listener->text,
                    strerror(answer));
    if (unlink(listener->path) == -1 && errno != ENOENT)
        return fail(where, FCGI_LISTEN_FAILED, "%s: a stale socket cannot be removed: %s", listener->text,
                    strerror(errno));
    return FCGI_LISTEN_OK;
}

/* Two daemons started at once must not each take the other's fresh, not yet listening socket for a stale one:
 * probing and binding are done under a lock on the folder, which needs no file of its own. -1: the folder cannot
 * be opened. */
static int
lock_folder(const char *path)
{
    char folder[sizeof ((fcgi_listener *)0)->path];
    strcpy(folder, path);
    char *slash = strrchr(folder, '/');
    if (!slash)
        strcpy(folder, ".");
    else if (slash == folder)
        folder[1] = '\0';
    else
        *slash = '\0';
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd == -1)
        return -1;
    while (flock(fd, LOCK_EX) == -1)
        if (errno != EINTR) { /* a file system without locks: the probe alone must do */
            break;
        }
    return fd;
}

static fcgi_listen_status
open_unix(fcgi_listener *listener, trouble where)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    memcpy(address.sun_path, listener->path, sizeof address.sun_path);
    fcgi_listen_status status = FCGI_LISTEN_OK;
    bool named = false;
    const int folder = lock_folder(listener->path);
    if (folder == -1 && errno != EACCES) /* a folder may be writable and not readable */
        return fail(where, FCGI_LISTEN_FAILED, "%s: its folder: %s", listener->text, strerror(errno));
    status = clear_path(listener, &address, where);
    if (status != FCGI_LISTEN_OK)
        goto done;
    status = FCGI_LISTEN_FAILED;
    listener->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd == -1) {
        fail(where, status, "%s: socket: %s", listener->text, strerror(errno));
        goto done;
    }
    /* The file is born with its mode: a chmod afterwards would leave a moment with another one. */
    const mode_t umask_before = umask(0777 & ~listener->file_mode);
    const int bound = bind(listener->fd, (struct sockaddr *)&address, sizeof address);
    const int bind_error = errno;
    umask(umask_before);
    if (bound == -1) {
        fail(where, status, "%s: bind: %s", listener->text, strerror(bind_error));
        goto done;
    }
    named = true;
    if ((listener->owner != (uid_t)-1 || listener->group != (gid_t)-1) &&
        lchown(listener->path, listener->owner, listener->group) == -1) {
        fail(where, status, "%s: its owner or group cannot be set: %s", listener->text, strerror(errno));
        goto done;
    }
    struct stat made;
    if (lstat(listener->path, &made) == -1 || !S_ISSOCK(made.st_mode)) {
        fail(where, status, "%s: vanished while it was being made", listener->text);
        goto done;
    }
    if ((made.st_mode & 0777) != listener->file_mode && chmod(listener->path, listener->file_mode) == -1) {
        fail(where, status, "%s: its mode cannot be set: %s", listener->text, strerror(errno)); /* default ACLs */
        goto done;
    }
    listener->device = made.st_dev;
    listener->inode = made.st_ino;
    if (listen(listener->fd, BACKLOG) == -1) {
        fail(where, status, "%s: listen: %s", listener->text, strerror(errno));
        goto done;
    }
    status = FCGI_LISTEN_OK;
done:
    if (status != FCGI_LISTEN_OK && listener->fd != -1) {
        if (named)
            unlink(listener->path);
        close(listener->fd);
        listener->fd = -1;
    }
    if (folder != -1)
        close(folder); /* and its lock with it */
    return status;
}

static fcgi_listen_status
open_tcp(fcgi_listener *listener, trouble where)
{
    struct sockaddr_storage storage;
    socklen_t length;
    if (!make_address(listener, &storage, &length))
        return fail(where, FCGI_LISTEN_USAGE, "%s: no address", listener->text);
    const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd == -1)
        return fail(where, FCGI_LISTEN_FAILED, "%s: socket: %s", listener->text, strerror(errno));
    const int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one); /* connections of a former run may linger */
    if (bind(fd, (struct sockaddr *)&storage, length) == -1 || listen(fd, BACKLOG) == -1) {
        fail(where, FCGI_LISTEN_FAILED, "%s: %s", listener->text, strerror(errno));
        close(fd);
        return FCGI_LISTEN_FAILED;
    }
    if (listener->port == 0 && getsockname(fd, (struct sockaddr *)&storage, &length) == 0) {
        listener->port = ntohs(storage.ss_family == AF_INET ? ((struct sockaddr_in *)&storage)->sin_port
                                                            : ((struct sockaddr_in6 *)&storage)->sin6_port);
        snprintf(listener->text, sizeof listener->text, storage.ss_family == AF_INET ? "tcp:%s:%u" : "tcp:[%s]:%u",
                 listener->host, listener->port);
    }
    listener->fd = fd;
    return FCGI_LISTEN_OK;
}

static fcgi_listen_status
open_inherited(fcgi_listener *listener, trouble where)
{
    if (!fcgi_is_listening(listener->fd))
        return fail(where, FCGI_LISTEN_FAILED, "%s: is no listening socket", listener->text);
    struct sockaddr_storage storage;
    socklen_t length = sizeof storage;
    if (getsockname(listener->fd, (struct sockaddr *)&storage, &length) == -1)
        return fail(where, FCGI_LISTEN_FAILED, "%s: %s", listener->text, strerror(errno));
    listener->is_tcp = storage.ss_family == AF_INET || storage.ss_family == AF_INET6;
    if (listener->is_tcp && !listener->beyond_loopback && !is_loopback((struct sockaddr *)&storage))
        return fail(where, FCGI_LISTEN_FAILED,
                    "%s: listens beyond loopback, which is not served in this version: whoever can connect can speak "
                    "for every client",
                    listener->text);
    if (!listener->is_tcp && storage.ss_family != AF_UNIX)
        return fail(where, FCGI_LISTEN_FAILED, "%s: neither a unix nor a TCP socket", listener->text);
    const fcgi_listen_status status = listener->page ? FCGI_LISTEN_OK : settle_rights(listener, where);
    if (status != FCGI_LISTEN_OK)
        return status;
    /* Whoever started us shares the flags of this socket; non-blocking is what a shared accept needs anyway. */
    const int flags = fcntl(listener->fd, F_GETFL);
    if (flags == -1 || fcntl(listener->fd, F_SETFL, flags | O_NONBLOCK) == -1 ||
        fcntl(listener->fd, F_SETFD, FD_CLOEXEC) == -1)
        return fail(where, FCGI_LISTEN_FAILED, "%s: %s", listener->text, strerror(errno));
    return FCGI_LISTEN_OK;
}

fcgi_listen_status
fcgi_listener_open(fcgi_listener *listener, char *error, size_t error_bytes)
{
    const trouble where = { error, error_bytes };
    switch (listener->kind) {
    case FCGI_LISTEN_UNIX:
        return open_unix(listener, where);
    case FCGI_LISTEN_TCP:
        return open_tcp(listener, where);
    case FCGI_LISTEN_INHERITED:
        return open_inherited(listener, where);
    }
    return FCGI_LISTEN_USAGE;
}

fcgi_listen_status
fcgi_listener_copy(const fcgi_listener *listener, fcgi_listener *copy)
{
    *copy = *listener;
    copy->inode = 0;
    copy->shared = true;
    copy->fd = fcntl(listener->fd, F_DUPFD_CLOEXEC, 3);
    return copy->fd == -1 ? FCGI_LISTEN_FAILED : FCGI_LISTEN_OK;
}

fcgi_listen_status
fcgi_listener_adopt(fcgi_listener *listener, int fd, char *error, size_t error_bytes)
{
    const trouble where = { error, error_bytes };
    if (!fcgi_is_listening(fd) || fcntl(fd, F_SETFD, FD_CLOEXEC) == -1)
        return fail(where, FCGI_LISTEN_FAILED, "%s: what was handed over is no listening socket", listener->text);
    struct stat found;
    if (listener->kind == FCGI_LISTEN_UNIX && lstat(listener->path, &found) == 0 && S_ISSOCK(found.st_mode)) {
        listener->device = found.st_dev;
        listener->inode = found.st_ino;
    }
    listener->fd = fd;
    return listener->kind == FCGI_LISTEN_INHERITED ? open_inherited(listener, where) : FCGI_LISTEN_OK;
}

bool
fcgi_listener_admits(const fcgi_listener *listener, int fd)
{
    const fcgi_rights *rights = &listener->rights;
    if (rights->uid_count == 0)
        return true;
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return false;
    for (size_t i = 0; i < rights->uid_count; i++)
        if (rights->uids[i] == peer.uid)
            return true;
    return false;
}

void
fcgi_listener_unname(fcgi_listener *listener)
{
    if (listener->kind != FCGI_LISTEN_UNIX || listener->inode == 0)
        return;
    struct stat found;
    if (lstat(listener->path, &found) == 0 && found.st_dev == listener->device && found.st_ino == listener->inode)
        unlink(listener->path);
    listener->inode = 0;
}

void
fcgi_listener_close(fcgi_listener *listener)
{
    fcgi_listener_unname(listener);
    if (listener->fd != -1 && (listener->kind != FCGI_LISTEN_INHERITED || listener->shared))
        close(listener->fd);
    listener->fd = -1;
}
