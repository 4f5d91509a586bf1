/* The Redis store's insides. Read this, then redis.c.
 * Must not enter: identities as people write them, requests, policies. Nothing outside this folder includes hiredis.
 *
 * Lock order: the pool's lock is the only one, and nothing blocks while it is held but its own condition. */
#ifndef TG_REDIS_H
#define TG_REDIS_H

#include "algorithms/algorithms.h"
#include "stores/store.h"

#include <hiredis/hiredis.h>
#include <pthread.h>
#include <sys/uio.h>

#define TG__REDIS_VERSION_MIN 5 /* scripts that read the time and then write */

/* ---- why a call got no answer ---- */

typedef enum tg_trouble {
    TG__TROUBLE_NONE,
    TG__TROUBLE_LINK,    /* not reached, or the connection broke: new ones may fare better */
    TG__TROUBLE_TIMEOUT, /* whether the call took effect is not known */
    TG__TROUBLE_PAUSED,  /* reached, but it answers nothing for now: loading, busy, no master */
    TG__TROUBLE_REFUSED, /* this one call was refused: full, too few replicas, a foreign value */
    TG__TROUBLE_SETUP,   /* a person has to change something: password, permissions, a cluster's node */
    TG__TROUBLE_MOVED    /* within a cluster: nothing ran, another node is to be asked, or this one a moment later */
} tg_trouble;

/* What an error reply means. `explained` receives the reply and what to do about it. */
tg_trouble tg__redis_trouble(const char *reply, char *explained, size_t explained_bytes);
bool tg__redis_unknown_script(const char *reply);

/* ---- where the server is ---- */

#define TG__REDIS_HOST_MAX 255
#define TG__SENTINELS_MAX 8
#define TG__SENTINEL_NAME_MAX 64
#define TG__SEEDS_MAX 8

typedef struct tg_redis_host {
    char host[TG__REDIS_HOST_MAX + 1];
    uint16_t port;
} tg_redis_host;

typedef struct tg_tls tg_tls;

typedef struct tg_tls_options {
    char *ca;         /* file or folder of certificates to trust; NULL: the system's */
    char *cert, *key; /* our own, where the server asks for one */
    char *name;       /* what the server's certificate has to be for; NULL: the host */
    bool verifies;
} tg_tls_options;

typedef struct tg_redis_address {
    char host[TG__REDIS_HOST_MAX + 1]; /* or the socket's path */
    uint16_t port;                     /* 0: a unix socket */
    unsigned db;
    char *user, *password; /* NULL: none */
    tg_tls *tls; /* rediss: what every connection needs; NULL: none */
    char shown[TG__REDIS_HOST_MAX + 32]; /* for messages: nothing secret in it */
    unsigned connections_max;
    uint64_t timeout_us; /* a call's; 0: not said */
    /* redis+sentinel: who is asked where the master is, for each new connection. `host` is then empty. */
    tg_redis_host sentinels[TG__SENTINELS_MAX];
    size_t sentinel_count;
    _Atomic unsigned sentinel_turn; /* who is asked first: another when the word of the last one led nowhere */
    char master[TG__SENTINEL_NAME_MAX + 1];
    /* redis+cluster: nodes to ask for the others. `host` is then empty. */
    tg_redis_host seeds[TG__SEEDS_MAX];
    size_t seed_count;
} tg_redis_address;

/* TG_E_CONFIG names the piece; TG_E_UNSUPPORTED for kinds of address that this build cannot serve. No message holds a
 * password. Allocates user and password. */
tg_status tg__redis_address_parse(const tg_store_uri *uri, tg_redis_address *address, tg_error *error);
void tg__redis_address_fini(tg_redis_address *address);

/* ---- one connection ---- */

/* What is hashed, and what tells in each key that the same secret was used. */
typedef struct tg_redis_keyring {
    uint8_t secret[32];
    char prefix[24]; /* "tg1:0123abcd:{" */
    unsigned private_kinds; /* TG_PRIVATE_ bits */
} tg_redis_keyring;

typedef struct tg_redis_wire {
    _Atomic int fd; /* -1: closed. Set before it is used, cleared before it is closed: see pool.c on forks */
    bool taken;     /* under the pool's lock */
    uint64_t used_at_us; /* tg__monotonic_us of the last whole reply */
    redisReader *reader;
    size_t unheard; /* bytes that were fed to it since the last whole reply */
    uint64_t receives_for_us; /* SO_RCVTIMEO: see receive_by */
    void *tls; /* NULL: none */
    const char *shown; /* the address it was connected to last, which outlives the wire's use; NULL: never connected */
    tg_redis_keyring keyring; /* as learned from this very server */
} tg_redis_wire;

/* Whom a message is about: in a cluster, or where many stores are open, "redis" alone would send a person to the wrong one. */
static inline const char *
tg__wire_peer(const tg_redis_wire *wire)
{
    return wire->shown ? wire->shown : "redis";
}

/* These end by `deadline_us` of tg__monotonic_us, raise no SIGPIPE, and leave the wire for the caller to close. */
tg_trouble tg__wire_open(tg_redis_wire *wire, const tg_redis_address *address, uint64_t deadline_us, tg_error *error);
/* `unsent` (may be NULL) is set when not one byte went out. Changes `pieces`. */
tg_trouble tg__wire_send(tg_redis_wire *wire, struct iovec *pieces, int count, uint64_t deadline_us, bool *unsent,
                         tg_error *error);
/* A reply, and when it came. A short string that came whole lies in `bytes`, as what scripts answer does: an allocation
 * between an answer and the next question is time in which the server falls asleep. Any other reply is hiredis'. Not to be
 * copied: `reply` may point into it. */
typedef struct tg_heard {
    redisReply *reply; /* NULL: none */
    uint64_t at_us;    /* of tg__monotonic_us */
    redisReply string;
    char bytes[256];
} tg_heard;

/* An error reply is a reply. `heard` holds none before, and what it holds afterwards is for tg__heard_forget. */
tg_trouble tg__wire_hear(tg_redis_wire *wire, uint64_t deadline_us, tg_heard *heard, tg_error *error);
static inline void
tg__heard_forget(tg_heard *heard)
{
    if (heard->reply && heard->reply != &heard->string)
        freeReplyObject(heard->reply);
    heard->reply = NULL;
}
/* What can be moved at this instant, for who does not wait. 0 and no trouble: *wants (POLLIN or POLLOUT) has to come
 * first. A reading may leave more behind that no descriptor tells of: read until it wants. */
tg_trouble tg__wire_write(tg_redis_wire *wire, const void *data, size_t length, size_t *sent, short *wants,
                          tg_error *error);
tg_trouble tg__wire_read(tg_redis_wire *wire, void *data, size_t size, size_t *got, short *wants, tg_error *error);
/* The wire's reply reader, made before the first byte. Memory and time that a reply may take are bounded, whatever sends it. */
bool tg__wire_listen(tg_redis_wire *wire);
tg_trouble tg__wire_feed(tg_redis_wire *wire, const void *data, size_t length, tg_error *error);
/* What has been fed, reply by reply; NULL: none is whole yet. */
tg_trouble tg__wire_take(tg_redis_wire *wire, redisReply **reply, tg_error *error);
/* Whether an idle connection is still open and the server has said nothing unasked. Never blocks. `now_us` may be a little old. */
bool tg__wire_sound(tg_redis_wire *wire, uint64_t now_us);
void tg__wire_close(tg_redis_wire *wire);

/* Connecting in pieces, for who does not wait. A lookup is answered when its descriptor is readable; the addresses
 * are then the caller's. `connecting`: it is under way, and the descriptor is writable when it is done. */
typedef struct tg_lookup tg_lookup;
struct addrinfo;
/* Numbers and socket paths are known at once: *lookup stays NULL and *found is set (NULL for a path). Sentinels are
 * asked in the lookup too: never past `deadline_us`, and never for an address remembered from before. */
tg_trouble tg__lookup_begin(const tg_redis_address *address, uint64_t deadline_us, tg_lookup **lookup,
                            struct addrinfo **found, tg_error *error);
int tg__lookup_fd(const tg_lookup *lookup);
tg_trouble tg__lookup_end(tg_lookup *lookup, const tg_redis_address *address, struct addrinfo **found, tg_error *error);
void tg__lookup_give_up(tg_lookup *lookup); /* accepts NULL */
tg_trouble tg__wire_connect_begin(tg_redis_wire *wire, const tg_redis_address *address, const struct addrinfo *to,
                                  bool *connecting, tg_error *error);
tg_trouble tg__wire_connect_end(tg_redis_wire *wire, const tg_redis_address *address, tg_error *error);
/* After connecting: where the address asks for TLS, its beginning. Then tg__tls_handshake until it wants nothing. */
tg_trouble tg__wire_secure_begin(tg_redis_wire *wire, const tg_redis_address *address, tg_error *error);

/* ---- TLS: see tls.c ---- */

bool tg__tls_available(void);
tg_status tg__tls_open(const tg_tls_options *options, tg_tls **tls, tg_error *error);
tg_tls *tg__tls_retain(tg_tls *tls); /* accepts NULL */
void tg__tls_close(tg_tls *tls);     /* of the last who has it; accepts NULL */
tg_trouble tg__tls_begin(tg_redis_wire *wire, const tg_tls *tls, const char *host, tg_error *error);
tg_trouble tg__tls_handshake(tg_redis_wire *wire, short *wants, tg_error *error);
tg_trouble tg__tls_write(tg_redis_wire *wire, const void *data, size_t length, size_t *sent, short *wants,
                         tg_error *error);
tg_trouble tg__tls_read(tg_redis_wire *wire, void *data, size_t size, size_t *got, short *wants, tg_error *error);
bool tg__tls_quiet(tg_redis_wire *wire);
void tg__tls_end(void *tls);

/* A command in the making: RESP bulk strings behind each other in the caller's buffer. */
typedef struct tg_resp {
    char *data;
    size_t length, size;
    bool full; /* something did not fit: do not send */
} tg_resp;

/* Where so many bytes are to be written; NULL: they do not fit. */
static inline char *
tg__resp_room(tg_resp *resp, size_t length)
{
    if (length > resp->size - resp->length) {
        resp->full = true;
        return NULL;
    }
    char *const at = resp->data + resp->length;
    resp->length += length;
    return at;
}
void tg__resp_raw(tg_resp *resp, const void *data, size_t length); /* as it is: it is RESP already */
void tg__resp_count(tg_resp *resp, char kind, size_t count); /* "*3\r\n" */
void tg__resp_bulk(tg_resp *resp, const void *data, size_t length);
/* A whole command of terminated words. */
void tg__resp_command(tg_resp *resp, size_t count, const char *const *words);

/* A number as scripts read and write it: a double, little-endian. Not as loops: a compiler knows these for one move. */
static inline uint8_t *
tg__put_number(uint8_t *at, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    at[0] = (uint8_t)bits;
    at[1] = (uint8_t)(bits >> 8);
    at[2] = (uint8_t)(bits >> 16);
    at[3] = (uint8_t)(bits >> 24);
    at[4] = (uint8_t)(bits >> 32);
    at[5] = (uint8_t)(bits >> 40);
    at[6] = (uint8_t)(bits >> 48);
    at[7] = (uint8_t)(bits >> 56);
    return at + sizeof bits;
}

static inline double
tg__get_number(const uint8_t *at)
{
    const uint64_t bits = (uint64_t)at[0] | (uint64_t)at[1] << 8 | (uint64_t)at[2] << 16 | (uint64_t)at[3] << 24 |
                          (uint64_t)at[4] << 32 | (uint64_t)at[5] << 40 | (uint64_t)at[6] << 48 | (uint64_t)at[7] << 56;
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* ---- scripts ---- */

typedef enum tg_script {
    TG__SCRIPT_HIT_FIXED,
    TG__SCRIPT_HIT_LOG,
    TG__SCRIPT_HIT_COUNTER,
    TG__SCRIPT_HIT_BUCKET,
    TG__SCRIPT_HIT_MIXED, /* several algorithms in one call */
    TG__SCRIPT_HIT_MORE,  /* held by a lease, or counted where it is denied */
    TG__SCRIPT_REFUND,
    TG__SCRIPT_SETTLE, /* also renews */
    TG__SCRIPTS
} tg_script;

tg_text tg__redis_script(tg_script script); /* the whole text; assembled once, kept for good */
tg_status tg__redis_scripts_init(tg_error *error);
tg_text tg__redis_check_script(void);
/* The one for a plain hit under these algorithms: bit 1 << tg_algorithm set for each. */
tg_script tg__redis_hit_script(unsigned algorithms);

/* ---- keys ---- */

#define TG__REDIS_SUFFIX_MAX 480 /* two escaped names, an algorithm, a period */
#define TG__REDIS_IDENTITY_MAX 640
#define TG__REDIS_KEY_MAX (sizeof((tg_redis_keyring *)0)->prefix + TG__REDIS_IDENTITY_MAX + TG__REDIS_SUFFIX_MAX)

typedef struct tg_redis_names tg_redis_names; /* rule scope -> ":namespace:name:algorithm:period"; only grows */

tg_redis_names *tg__redis_names_open(void);
void tg__redis_names_close(tg_redis_names *names);
/* Remembers what a rule's keys end with. Thread-safe. TG_E_NOMEM. */
tg_status tg__redis_names_add(tg_redis_names *names, const tg_rule *rule, const char *space, const char *name,
                              tg_error *error);
/* Lock-free. A rule nobody has named ends with the digits of its scope. Returns the length. */
size_t tg__redis_names_suffix(const tg_redis_names *names, const tg_rule *rule, char suffix[TG__REDIS_SUFFIX_MAX]);

void tg__redis_keyring_init(tg_redis_keyring *keyring, tg_text secret, bool manual, unsigned private_kinds);
/* One dimension as it stands between the braces: readable where it is short and plain, hashed under the secret where it
 * is long, odd or private. Two identities never give one text. Returns the length. */
size_t tg__redis_identity_text(const tg_redis_keyring *keyring, const tg_identity *identity,
                               char text[TG__REDIS_IDENTITY_MAX]);

/* ---- the store ---- */

#define TG__REDIS_CONNECTIONS_MAX 256

typedef struct tg_cluster tg_cluster;

/* One server: a store by itself, or a node of a cluster's store. */
typedef struct tg_redis_store {
    tg_store base; /* first: a tg_store * is one of these */
    tg_cluster *cluster; /* whose node this is: secret, names and address' strings are the cluster's; NULL: none's */
    tg_redis_address address;
    uint64_t timeout_us;
    bool manual;
    tg_clock *clock;
    tg_redis_names *names;

    pthread_mutex_t lock;
    pthread_cond_t freed;
    tg_redis_wire *wires; /* address.connections_max of them */
    unsigned idle_order[TG__REDIS_CONNECTIONS_MAX]; /* open and not taken; the last used last */
    unsigned idle_count;
    unsigned waiting; /* for one to be given back */
    bool secret_given;              /* by TIDEGATE_SECRET: Redis is not asked for one */
    char secret[128];               /* what to write back when it is gone from there */
    _Atomic bool scripts_known;     /* `sha` is filled and the server was looked at */
    char sha[TG__SCRIPTS][41];

    /* The circuit breaker. While `asks_again_us` lies ahead nobody asks; then one does. */
    _Atomic uint32_t failures_in_row;
    _Atomic uint32_t openings;
    _Atomic uint64_t asks_again_us; /* tg__monotonic_us; 0: closed */
    atomic_bool probing;

    _Atomic int64_t ahead_us; /* the server's clock minus ours (monotonic) as last seen; INT64_MIN: never */
    _Atomic uint64_t timeouts;
    _Atomic bool warned_eviction, warned_checks, warned_secret;
    atomic_bool told_leases;
    struct tg_redis_store *next; /* all stores of this process, for its forked children */
} tg_redis_store;

/* Takes a connection that is open, greeted and not in use by anybody; waits for one until the deadline. `now_us`: the clock as
 * the caller has read it; 0: it has not. */
tg_trouble tg__pool_take(tg_redis_store *store, uint64_t now_us, uint64_t deadline_us, tg_redis_wire **wire, tg_error *error);
void tg__pool_give(tg_redis_store *store, tg_redis_wire *wire, bool sound);
/* Whether tg__pool_take would find one, an open one at that, without waiting for another call to end. */
bool tg__pool_spare(tg_redis_store *store, bool open);
unsigned tg__fork_generation(void); /* another in each forked child */
tg_status tg__pool_init(tg_redis_store *store, tg_error *error);
void tg__pool_fini(tg_redis_store *store);
void tg__pool_close_idle(tg_redis_store *store);

/* tg_store_ops.examine */
tg_status tg__redis_examine(tg_store *base, tg_error *error);

#define TG__EXAMINE_US UINT64_C(10000000) /* at most, of all servers together */

/* Keys as found, by the secret that made them. */
typedef struct tg_key_sample {
    size_t ours, foreign;
} tg_key_sample;

/* Looks at one server: greets it, where nobody has yet, and adds a sample of its keys. A connection is waited for, and a page of
 * keys, for a second each.
 *
 * keyring  a cluster's; NULL: one server's own, or that of a cluster is not known, whose keys are then not looked at */
tg_trouble tg__examine_server(tg_redis_store *server, const tg_redis_keyring *keyring, uint64_t until_us,
                              tg_key_sample *sample, tg_error *error);
void tg__examine_tell(const char *shown, const tg_key_sample *sample);

/* Everything a new connection begins with: password, database, role, secret, and once per store the look at version,
 * memory policy, permissions and the scripts' names. */
tg_trouble tg__redis_greet(tg_redis_store *store, tg_redis_wire *wire, uint64_t deadline_us, tg_error *error);

/* The same in pieces, for who does not wait: send `resp`, then hear each reply until `at` is `count`. */
typedef struct tg_greeting {
    tg_resp resp;
    unsigned char steps[20 + TG__SCRIPTS];
    size_t count, at;
    bool whole; /* the first of this store */
    size_t sha_count;
    char sha[TG__SCRIPTS][41];
    char set_refused[160]; /* why the secret could not be set; empty: it could, or was there */
} tg_greeting;

tg_trouble tg__greeting_begin(tg_redis_store *store, tg_redis_wire *wire, tg_greeting *greeting, tg_error *error);
tg_trouble tg__greeting_hear(tg_redis_store *store, tg_redis_wire *wire, tg_greeting *greeting, const redisReply *reply,
                             tg_error *error);
void tg__greeting_end(tg_greeting *greeting);

/* Whether this call may ask Redis. `probe`: it finds out whether trouble is over, and must be heard of. */
bool tg__breaker_passes(tg_redis_store *store, bool *probe);
void tg__breaker_hears(tg_redis_store *store, tg_trouble trouble, bool probe);
/* In place of that: the call could not find out how Redis is. */
void tg__breaker_shrugs(tg_redis_store *store, bool probe);

/* ---- one call ---- */

#define TG__CALL_BYTES_MAX 49152 /* TG_TARGETS_MAX keys and descriptions at their longest */
#define TG__REDIS_CLOCK_US_MAX ((UINT64_C(1) << 53) - 1 - 2 * TG_PERIOD_US_MAX) /* no sum in a script reaches 2^53 */

#define TG__DENIED_ELSEWHERE 16 /* beside a group in tg_target.counts_denied */

typedef struct tg_call {
    uint8_t first_of[TG_TARGETS_MAX]; /* the first target with the same counts */
    uint8_t key_of[TG_TARGETS_MAX];   /* 1-based, as KEYS is */
    size_t key_count;
    unsigned algorithms;
    bool denied;  /* a `deny` rule is among them */
    bool counts_denied; /* a denied hit is to be charged to one of them */
    bool knocks; /* of a cluster: it is denied in another slot, by the groups that say TG__DENIED_ELSEWHERE */
    size_t asked; /* targets that Redis is asked about */
    const tg_lease *lease; /* what a hit is held by, or what REFUND targets are settled or renewed of; else NULL */
    tg_lease_op lease_op;
} tg_call;

void tg__call_plan(tg_call *call, tg_op op, const tg_target *targets, size_t target_count);
/* What needs no server: only `deny` rules, or nothing to do. */
bool tg__call_answer_alone(const tg_call *call, tg_op op, size_t target_count, tg_result *results);
tg_script tg__call_script(const tg_call *call, tg_op op);
/* A command is its head, the script's text and "\r\n" where `whole`, and its arguments. */
void tg__call_head(tg_resp *resp, const tg_redis_store *store, const tg_call *call, tg_op op, bool whole);
void tg__call_arguments(tg_resp *resp, const tg_redis_store *store, const tg_redis_keyring *keyring, tg_op op,
                        const tg_call *call, const tg_target *targets, size_t target_count, uint64_t manual_now_us);

/* Asks over a connection of the store's pool by the deadline; one that broke before a byte of the call was out is
 * replaced once. What is heard is for the caller to forget, also when it is an error.
 *
 * unsent   set when the call certainly did not run
 * asking   a cluster's node is told first that it is asked for a slot which it does not have yet */
typedef struct tg_inquiry {
    tg_op op;
    const tg_call *call;
    const tg_target *targets;
    size_t target_count;
    const tg_redis_keyring *keyring; /* NULL: the connection's */
    uint64_t manual_now_us;
    uint64_t now_us; /* as tg__pool_take's */
    bool asking;
    bool brief; /* of a cluster's: see tg__question_time */
} tg_inquiry;

tg_trouble tg__redis_ask(tg_redis_store *store, const tg_inquiry *question, uint64_t deadline_us, tg_heard *heard,
                         bool *unsent, tg_error *error);

/* What every tg_store_ops.lease of this room begins with: nothing told yet, and a number of its own for what is taken. */
tg_status tg__lease_begin(tg_lease_op op, tg_lease *lease, bool *overflow, tg_error *error);

/* ---- answers ---- */

/* What a reply that is no error means for `results`. It was heard at `heard_us` of tg__monotonic_us. */
tg_trouble tg__redis_read(tg_redis_store *store, tg_op op, const tg_call *call, const tg_target *targets,
                          size_t target_count, const redisReply *reply, uint64_t heard_us, tg_result *results,
                          tg_error *error);
/* The beginning of an answer of hit.lua or settle.lua: the first byte, and the server's time. */
bool tg__redis_read_head(const redisReply *reply, uint8_t *first, uint64_t *now_us);
/* A connection has not come about: whichever sentinel was asked where to, another is asked first the next time. */
void tg__redis_led_nowhere(tg_redis_store *store);
/* What the store said before may no longer hold; of a node, what its cluster said. */
void tg__redis_begins_epoch(tg_redis_store *store);
/* Tells the breaker; TG_OK or TG_E_STORE. `brief`: as tg__question_time said. */
tg_status tg__redis_conclude(tg_redis_store *store, tg_trouble trouble, bool probe, bool brief, tg_error *error);

/* How long a question has: until `until_us` of tg_store_ops.apply, or, with 0, for `timeout_us`. TG_E_STORE: nothing is left.
 *
 * brief  other questions of its judgement have used more than half: who does not answer in the rest is not in trouble yet */
tg_status tg__question_time(const char *shown, uint64_t now_us, uint64_t until_us, uint64_t timeout_us, uint64_t *deadline_us, bool *brief,
                            tg_error *error);

/* ---- a cluster ---- */

tg_status tg__cluster_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **store, tg_error *error);
/* What a secret is to be offered or kept to the node that has it; false: this node does not, or none is asked for. */
bool tg__cluster_offers_secret(tg_redis_store *node, char secret[128]);
void tg__cluster_learns_secret(tg_redis_store *node, tg_text secret);
/* "tg1:{check12}", in a slot of this node's. false: it has none. */
bool tg__cluster_check_key(tg_redis_store *node, char key[32]);
bool tg__cluster_redirects(const char *reply);
#define TG__SLOTS 16384
unsigned tg__cluster_slot(tg_text hashed);

/* As named, else from the environment, or one of our own to offer; `given` tells which. */
tg_status tg__redis_choose_secret(tg_text named, char secret[128], bool *given, tg_error *error);

/* Reads a hit script's answer and fills results. false: it is not what the script writes, or the verdicts disagree. */
bool tg__redis_answer_read(tg_text answer, tg_op op, const tg_target *targets, const uint8_t *first_of,
                           size_t target_count, bool denied, tg_result *results, uint64_t *server_now_us);

#endif
