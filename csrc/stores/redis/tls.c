/* TLS around a connection: OpenSSL speaks it, the socket stays ours. hiredis' own TLS is not used: it writes in ways that
 * raise SIGPIPE, hides whether reading or writing is what it waits for, and cannot be given a descriptor that is not its
 * own; what is left of it is these calls to OpenSSL.
 *
 * Nothing here waits: what has to be waited for is told in `wants`. Must not enter: deadlines, what is said inside. */
#include "stores/redis/redis.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>

#ifdef TG_WITH_TLS

#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

struct tg_tls {
    _Atomic unsigned references;
    SSL_CTX *context;
    BIO_METHOD *method;
    bool verifies;
    char *name; /* what the server's certificate has to be for; NULL: the host */
};

bool
tg__tls_available(void)
{
    return true;
}

/* ---- the socket, as OpenSSL sees it ---- */

#define READ_AT_ONCE (32u * 1024)

/* What one call to OpenSSL may still take. It reads on by itself over what says nothing (greetings to begin anew, empty
 * records, warnings), so a server, or whoever stands in between, that sends that without end would keep the call for ever,
 * past every deadline. */
static _Thread_local size_t may_read;

static void
begin_call(void)
{
    ERR_clear_error();
    errno = 0;
    may_read = READ_AT_ONCE;
}

static int
bio_write(BIO *bio, const char *data, int length)
{
    const ssize_t sent = send((int)(intptr_t)BIO_get_data(bio), data, (size_t)length, MSG_NOSIGNAL | MSG_DONTWAIT);
    BIO_clear_retry_flags(bio);
    if (sent == -1 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_write(bio);
    return (int)sent;
}

static int
bio_read(BIO *bio, char *data, int length)
{
    BIO_clear_retry_flags(bio);
    if (may_read == 0) {
        errno = EAGAIN;
        BIO_set_retry_read(bio);
        return -1;
    }
    const size_t room = (size_t)length < may_read ? (size_t)length : may_read;
    const ssize_t got = recv((int)(intptr_t)BIO_get_data(bio), data, room, MSG_DONTWAIT);
    if (got > 0)
        may_read -= (size_t)got;
    if (got == -1 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_read(bio);
    if (got == 0)
        BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
    return (int)got;
}

static long
bio_control(BIO *bio, int command, long number, void *pointer)
{
    (void)number, (void)pointer;
    if (command == BIO_CTRL_EOF)
        return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0;
    return command == BIO_CTRL_FLUSH;
}

/* ---- the context ---- */

static const char *
reason(char *text, size_t size)
{
    const unsigned long code = ERR_peek_last_error();
    const char *said = code ? ERR_reason_error_string(code) : NULL;
    snprintf(text, size, "%s", said ? said : "no reason given");
    ERR_clear_error();
    return text;
}

/* A key under a password must not make a server ask for it at a terminal. */
static int
no_password(char *to, int size, int writing, void *unused)
{
    (void)to, (void)size, (void)writing, (void)unused;
    return -1;
}

static tg_status
load(SSL_CTX *context, const tg_tls_options *options, tg_error *error)
{
    char why[160];
    struct stat kind;
    if (options->ca) {
        const bool folder = stat(options->ca, &kind) == 0 && S_ISDIR(kind.st_mode);
        if (SSL_CTX_load_verify_locations(context, folder ? NULL : options->ca, folder ? options->ca : NULL) != 1)
            return tg__error(error, TG_E_CONFIG, "rediss://: ca=%s: no certificates could be read there (%s)", options->ca,
                             reason(why, sizeof why));
    } else if (SSL_CTX_set_default_verify_paths(context) != 1) {
        return tg__error(error, TG_E_CONFIG, "rediss://: the system's certificates: %s", reason(why, sizeof why));
    }
    if (!options->cert != !options->key)
        return tg__error(error, TG_E_CONFIG, "rediss://: cert= and key= belong together, and %s= is missing",
                         options->cert ? "key" : "cert");
    if (options->cert && SSL_CTX_use_certificate_chain_file(context, options->cert) != 1)
        return tg__error(error, TG_E_CONFIG, "rediss://: cert=%s: expected a certificate in PEM (%s)", options->cert,
                         reason(why, sizeof why));
    if (options->key && SSL_CTX_use_PrivateKey_file(context, options->key, SSL_FILETYPE_PEM) != 1)
        return tg__error(error, TG_E_CONFIG, "rediss://: key=%s: expected the certificate's key in PEM, without a "
                                             "password (%s)", options->key, reason(why, sizeof why));
    return TG_OK;
}

tg_status
tg__tls_open(const tg_tls_options *options, tg_tls **opened, tg_error *error)
{
    char why[160];
    tg_status status = TG_OK;
    tg_tls *tls = calloc(1, sizeof *tls);
    if (!tls)
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *tls);
    ERR_clear_error();
    atomic_init(&tls->references, 1);
    tls->verifies = options->verifies;
    tls->context = SSL_CTX_new(TLS_client_method());
    tls->method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "tidegate socket");
    tls->name = options->name ? strdup(options->name) : NULL;
    if (!tls->context || !tls->method || (options->name && !tls->name)) {
        status = tg__error(error, TG_E_NOMEM, "rediss://: %s", reason(why, sizeof why));
    } else {
        BIO_meth_set_write(tls->method, bio_write);
        BIO_meth_set_read(tls->method, bio_read);
        BIO_meth_set_ctrl(tls->method, bio_control);
        SSL_CTX_set_options(tls->context, SSL_OP_NO_RENEGOTIATION); /* a write would have to wait for a reading */
        SSL_CTX_set_min_proto_version(tls->context, TLS1_2_VERSION);
        SSL_CTX_set_mode(tls->context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        SSL_CTX_set_verify(tls->context, tls->verifies ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, NULL);
        SSL_CTX_set_default_passwd_cb(tls->context, no_password);
        /* A forked child lets go of its copy; the parent's server must not be told good-bye. */
        SSL_CTX_set_quiet_shutdown(tls->context, 1);
        status = load(tls->context, options, error);
    }
    if (status == TG_OK) {
        *opened = tls;
        tls = NULL;
    }
    tg__tls_close(tls);
    return status;
}

tg_tls *
tg__tls_retain(tg_tls *tls)
{
    if (tls)
        atomic_fetch_add(&tls->references, 1);
    return tls;
}

void
tg__tls_close(tg_tls *tls)
{
    if (!tls || atomic_fetch_sub(&tls->references, 1) != 1)
        return;
    SSL_CTX_free(tls->context);
    BIO_meth_free(tls->method);
    free(tls->name);
    free(tls);
}

/* ---- one connection ---- */

tg_trouble
tg__tls_begin(tg_redis_wire *wire, const tg_tls *tls, const char *host, tg_error *error)
{
    unsigned char number[16];
    const char *name = tls->name ? tls->name : host;
    const bool is_address = inet_pton(AF_INET, name, number) == 1 || inet_pton(AF_INET6, name, number) == 1;
    ERR_clear_error();
    SSL *ssl = SSL_new(tls->context);
    BIO *bio = ssl ? BIO_new(tls->method) : NULL;
    bool ready = bio != NULL;
    if (ready) {
        BIO_set_data(bio, (void *)(intptr_t)atomic_load(&wire->fd));
        BIO_set_init(bio, 1);
        SSL_set_bio(ssl, bio, bio);
        SSL_set_connect_state(ssl);
        /* The server is told the name it is asked for; an address is none. */
        ready = is_address ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name) == 1
                           : SSL_set_tlsext_host_name(ssl, name) == 1 && SSL_set1_host(ssl, name) == 1;
    }
    if (!ready) {
        char why[160];
        tg__error(error, TG_E_STORE, "%s: TLS: %s", tg__wire_peer(wire), reason(why, sizeof why));
        SSL_free(ssl);
        return TG__TROUBLE_LINK;
    }
    wire->tls = ssl;
    return TG__TROUBLE_NONE;
}

/* What a failed step means. *wants is set where it only has to wait. */
static tg_trouble
explain(tg_redis_wire *wire, int result, const char *what, short *wants, tg_error *error)
{
    SSL *ssl = wire->tls;
    const int failure = errno;
    char why[160];
    *wants = 0;
    switch (SSL_get_error(ssl, result)) {
    case SSL_ERROR_WANT_READ:
        *wants = POLLIN;
        return TG__TROUBLE_NONE;
    case SSL_ERROR_WANT_WRITE:
        *wants = POLLOUT;
        return TG__TROUBLE_NONE;
    case SSL_ERROR_ZERO_RETURN:
        tg__error(error, TG_E_STORE, "%s: the server closed the connection", tg__wire_peer(wire));
        return TG__TROUBLE_LINK;
    case SSL_ERROR_SYSCALL:
        if (failure)
            tg__error_system(error, TG_E_STORE, failure, "%s: TLS: %s", tg__wire_peer(wire), what);
        else
            tg__error(error, TG_E_STORE, "%s: the server closed the connection", tg__wire_peer(wire));
        ERR_clear_error();
        return TG__TROUBLE_LINK;
    default:
        break;
    }
    const unsigned long code = ERR_peek_last_error();
    const int which = ERR_GET_REASON(code);
    const long verdict = SSL_get_verify_result(ssl);
    /* Alerts about certificates, 40 to 49 and 116, come from a server that does not take ours, or misses one. */
    const bool alerted = (which >= 1040 && which <= 1049) || which == 1116;
    tg_trouble trouble = TG__TROUBLE_LINK;
    if (verdict != X509_V_OK && which == SSL_R_CERTIFICATE_VERIFY_FAILED) {
        tg__error(error, TG_E_CONFIG, "%s: TLS: the server's certificate is not accepted: %s (options: ca=FILE, "
                                      "name=NAME, verify=no)", tg__wire_peer(wire), X509_verify_cert_error_string(verdict));
        trouble = TG__TROUBLE_SETUP;
    } else if (alerted) {
        tg__error(error, TG_E_CONFIG, "%s: TLS: the server refuses: %s (options: cert=FILE&key=FILE)",
                  tg__wire_peer(wire), reason(why, sizeof why));
        trouble = TG__TROUBLE_SETUP;
    } else if (which == SSL_R_WRONG_VERSION_NUMBER || which == SSL_R_PACKET_LENGTH_TOO_LONG) {
        tg__error(error, TG_E_CONFIG, "%s: TLS: the server there does not speak TLS (redis:// is without)",
                  tg__wire_peer(wire));
        trouble = TG__TROUBLE_SETUP;
    } else if (which == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
        tg__error(error, TG_E_STORE, "%s: the server closed the connection", tg__wire_peer(wire));
    } else {
        tg__error(error, TG_E_STORE, "%s: TLS: %s: %s", tg__wire_peer(wire), what, reason(why, sizeof why));
    }
    ERR_clear_error();
    return trouble;
}

tg_trouble
tg__tls_handshake(tg_redis_wire *wire, short *wants, tg_error *error)
{
    begin_call();
    const int result = SSL_do_handshake(wire->tls);
    *wants = 0;
    return result == 1 ? TG__TROUBLE_NONE : explain(wire, result, "greeting", wants, error);
}

tg_trouble
tg__tls_write(tg_redis_wire *wire, const void *data, size_t length, size_t *sent, short *wants, tg_error *error)
{
    begin_call();
    *sent = 0;
    *wants = 0;
    const int result = SSL_write_ex(wire->tls, data, length, sent);
    if (result == 1)
        return TG__TROUBLE_NONE;
    char byte;
    size_t got;
    if (SSL_get_error(wire->tls, result) != SSL_ERROR_SYSCALL)
        return explain(wire, result, "send", wants, error);
    /* Closed while we write: why has been said, and lies unread. So it is where a server misses our certificate. */
    tg_trouble trouble = tg__tls_read(wire, &byte, sizeof byte, &got, wants, error);
    if (trouble == TG__TROUBLE_NONE) {
        *wants = 0;
        tg__error(error, TG_E_STORE, "%s: the server closed the connection", tg__wire_peer(wire));
        trouble = TG__TROUBLE_LINK;
    }
    return trouble;
}

tg_trouble
tg__tls_read(tg_redis_wire *wire, void *data, size_t size, size_t *got, short *wants, tg_error *error)
{
    begin_call();
    *got = 0;
    *wants = 0;
    const int result = SSL_read_ex(wire->tls, data, size, got);
    return result == 1 ? TG__TROUBLE_NONE : explain(wire, result, "receive", wants, error);
}

/* Whether nothing came but what TLS says to itself (tickets for a later session). */
bool
tg__tls_quiet(tg_redis_wire *wire)
{
    char byte;
    begin_call();
    const int result = SSL_peek(wire->tls, &byte, 1);
    const bool quiet = result <= 0 && SSL_get_error(wire->tls, result) == SSL_ERROR_WANT_READ;
    ERR_clear_error();
    return quiet;
}

void
tg__tls_end(void *tls)
{
    SSL_free(tls);
}

#else

bool
tg__tls_available(void)
{
    return false;
}

tg_status
tg__tls_open(const tg_tls_options *options, tg_tls **opened, tg_error *error)
{
    (void)options, (void)opened;
    return tg__error(error, TG_E_UNSUPPORTED, "rediss:// needs TLS, which this build was made without (OpenSSL was not "
                                              "found when it was compiled)");
}

tg_tls *
tg__tls_retain(tg_tls *tls)
{
    return tls;
}

void
tg__tls_close(tg_tls *tls)
{
    (void)tls;
}

tg_trouble
tg__tls_begin(tg_redis_wire *wire, const tg_tls *tls, const char *host, tg_error *error)
{
    (void)wire, (void)tls, (void)host;
    tg__error(error, TG_E_UNSUPPORTED, "rediss:// needs TLS, which this build was made without");
    return TG__TROUBLE_SETUP;
}

tg_trouble
tg__tls_handshake(tg_redis_wire *wire, short *wants, tg_error *error)
{
    *wants = 0;
    return tg__tls_begin(wire, NULL, NULL, error);
}

tg_trouble
tg__tls_write(tg_redis_wire *wire, const void *data, size_t length, size_t *sent, short *wants, tg_error *error)
{
    (void)data, (void)length;
    *sent = 0;
    return tg__tls_handshake(wire, wants, error);
}

tg_trouble
tg__tls_read(tg_redis_wire *wire, void *data, size_t size, size_t *got, short *wants, tg_error *error)
{
    (void)data, (void)size;
    *got = 0;
    return tg__tls_handshake(wire, wants, error);
}

bool
tg__tls_quiet(tg_redis_wire *wire)
{
    (void)wire;
    return false;
}

void
tg__tls_end(void *tls)
{
    (void)tls;
}

#endif
