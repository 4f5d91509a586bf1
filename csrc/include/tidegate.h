/* tidegate: one rate limiter for every part of a site.
 *
 * This is the whole C interface and the only place where it is documented. Everything here is `tg_`; nothing else is
 * exported. No function prints, exits, aborts or installs a signal handler.
 *
 * Conventions
 *   Time      uint64_t microseconds, names end in `_us`. TG_NEVER: no wait can help.
 *   Text      tg_text, borrowed for the call unless said otherwise; any bytes, no terminating NUL needed.
 *   Failure   a negative tg_status, with `error` (may always be NULL) filled. A denial is an answer, not a failure.
 *   Threads   a tg_limiter, tg_gate and tg_store may be used by any number of threads and by forked children at once.
 *   Blocking  only what says so. The decision path (`tg_limiter_hit`, `tg_gate_judge`) allocates nothing.
 */
#ifndef TIDEGATE_H
#define TIDEGATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TG_VERSION "0.1.0"

#if defined(__GNUC__)
#define TG_API __attribute__((visibility("default")))
#else
#define TG_API
#endif

/* ---- bounds ----------------------------------------------------------------------------------------------------- */

#define TG_LIMIT_MAX UINT64_C(10000000000)          /* limit, burst and cost: 10^10 */
#define TG_PERIOD_US_MIN UINT64_C(1000)             /* 1 ms */
#define TG_PERIOD_US_MAX UINT64_C(315360000000000)  /* ten years of 365 days */
#define TG_WAIT_US_MAX UINT64_C(9007199254740991)   /* 2^53 - 1: any longer wait is reported as this one */
#define TG_NEVER UINT64_MAX                         /* a retry_after_us that no waiting reaches */

#define TG_RULES_MAX 16        /* rules of one limiter or policy */
#define TG_DIMENSIONS_MAX 8    /* identities judged in one decision, over all policies together */
#define TG_PARTS_MAX 8         /* parts of one joint identity */
#define TG_TARGETS_MAX 32      /* (rule, identity) pairs judged in one decision */
#define TG_LIMITERS_MAX 8      /* limiters (policies) judged in one decision */
#define TG_NAME_BYTES_MAX 64   /* a limiter's, policy's or namespace's name; a kind such as "header:X-Api-Key" */
#define TG_RULE_TEXT_MAX 128   /* what tg_rule_text writes, with its NUL */
#define TG_BODY_BYTES_MAX 65536 /* of a request's body: what is looked at for `form:` and `json:` */

/* ---- status and errors ------------------------------------------------------------------------------------------ */

/* name, value, meaning */
#define TG_STATUSES(X)                                                                                                 \
    X(TG_OK, 0, "success")                                                                                             \
    X(TG_E_ARG, -1, "an argument is outside its stated bounds")                                                        \
    X(TG_E_RULE, -2, "a rule's text or numbers are wrong")                                                             \
    X(TG_E_CONFIG, -3, "the rules file or a setting is wrong")                                                         \
    X(TG_E_IDENTITY, -4, "who is asking cannot be told")                                                               \
    X(TG_E_STORE, -5, "the store gave no answer in time")                                                              \
    X(TG_E_TRUST, -6, "the store exists but its owner or mode is not to be trusted")                                   \
    X(TG_E_FORMAT, -7, "the store is damaged, foreign, or of another version or clock")                                \
    X(TG_E_SYSTEM, -8, "the system refused a call")                                                                    \
    X(TG_E_NOMEM, -9, "out of memory")                                                                                 \
    X(TG_E_UNSUPPORTED, -10, "not available in this build or version")

typedef enum tg_status {
#define TG_STATUS_ENUM(name, value, text) name = value,
    TG_STATUSES(TG_STATUS_ENUM)
#undef TG_STATUS_ENUM
} tg_status;

TG_API const char *tg_status_name(tg_status status); /* "TG_E_RULE"; "TG_E_UNKNOWN" for any other number */
TG_API const char *tg_status_text(tg_status status); /* "a rule's text or numbers are wrong" */

typedef struct tg_text {
    const char *data; /* may be NULL when length is 0 */
    size_t length;
} tg_text;

TG_API tg_text tg_text_of(const char *terminated); /* NULL gives the empty text */

/* Filled by a failing call. `message` says what was found, what was expected and what to do; it never holds a secret. */
typedef struct tg_error {
    tg_status status;
    int system_error;     /* errno where the system refused, else 0 */
    unsigned line;        /* 1-based position in the rules file; 0: no file concerned */
    unsigned column;      /* 1-based, in bytes */
    size_t offset;        /* TG_E_RULE: byte offset in the rule text where the fault lies */
    size_t length;        /* TG_E_RULE: bytes of the offending word; 0 at the end of the text */
    char message[480];
} tg_error;

/* ---- clock ------------------------------------------------------------------------------------------------------ */

/* A clock that only its owner moves, for tests and for replaying logs. A store opened with one is marked manual; a
 * real store never opens with it nor the other way round. Its offset to UTC is 0. Reference counted; thread-safe. */
typedef struct tg_clock tg_clock;

TG_API tg_status tg_clock_open(uint64_t now_us, tg_clock **clock, tg_error *error);
TG_API uint64_t tg_clock_now_us(const tg_clock *clock);
TG_API void tg_clock_set_us(tg_clock *clock, uint64_t now_us);        /* may go back */
TG_API void tg_clock_advance_us(tg_clock *clock, uint64_t by_us);     /* saturates */
TG_API void tg_clock_retain(tg_clock *clock);
TG_API void tg_clock_close(tg_clock *clock);                          /* accepts NULL */

/* ---- rules ------------------------------------------------------------------------------------------------------ */

typedef enum tg_algorithm {
    TG_ALGORITHM_DEFAULT = 0, /* only as an argument: the choice of the rule grammar */
    TG_FIXED_WINDOW,
    TG_SLIDING_LOG,
    TG_SLIDING_COUNTER,
    TG_TOKEN_BUCKET, /* "gcra" is another name of it */
    TG_LEAKY_BUCKET,
    TG_DENY          /* refuses everything, takes and stores nothing */
} tg_algorithm;

TG_API const char *tg_algorithm_name(tg_algorithm algorithm); /* "sliding_log" */

/* One rule. A value: copy it freely. Made by tg_rules_parse or tg_rule_make only. */
typedef struct tg_rule {
    uint64_t limit;         /* units per period; 0 for deny */
    uint64_t period_us;     /* 0 for deny */
    uint64_t burst;         /* buckets: what the bucket holds; else equal to limit */
    uint64_t resolution_us; /* sliding log: hits within one multiple of it are merged; 0 keeps each */
    uint8_t algorithm;      /* tg_algorithm, never the default */
    bool aligned;           /* fixed window: starts at multiples of the period in UTC */
    uint8_t scope[16];      /* digest of (namespace, name, algorithm, period): which counts it shares */
} tg_rule;

/* Parses "10/second; 1000/hour burst 50 token_bucket". Units, words and defaults:
 *
 *   rules  = rule { (";" | ",") rule }
 *   rule   = ( amount [ "burst" int ] [ algorithm ] [ option ] ) | "deny"
 *   amount = int ( "/" | "per" ) [ int ] unit
 *   unit   = s sec second(s) m min minute(s) h hour(s) d day(s) w week(s) ms month (30 d) year (365 d)
 *   option = "aligned" | "resolution" duration
 *
 * Words after the amount stand in any order; letters in any case; white space between words is free. Without an
 * algorithm: token_bucket where a burst is given, fixed_window where aligned, sliding_log where a resolution is given or
 * limit <= 1000, else sliding_counter; `preferred` (TG_ALGORITHM_DEFAULT: none) replaces that choice where a rule names
 * no algorithm.
 *
 * rules  receives at most TG_RULES_MAX rules, `count` how many
 * TG_E_RULE  wrong text; error->offset and ->length mark the word, the message says what was expected */
TG_API tg_status tg_rules_parse(tg_text text, tg_algorithm preferred, tg_rule rules[TG_RULES_MAX], size_t *count,
                                tg_error *error);

/* A rule from numbers (a plan, a computed limit): limit 0 makes `deny`. burst 0: the default. TG_E_RULE beyond bounds. */
TG_API tg_status tg_rule_make(uint64_t limit, uint64_t period_us, uint64_t burst, tg_algorithm algorithm, tg_rule *rule,
                              tg_error *error);

/* Writes the rule in its canonical spelling ("100/minute sliding_log"), which parses back to the same rule. */
TG_API void tg_rule_text(const tg_rule *rule, char text[TG_RULE_TEXT_MAX]);

/* ---- identities ------------------------------------------------------------------------------------------------- */

/* One part of an identity: its kind ("ip", "user", "header:X-Api-Key"; empty for a raw positional part) and value. */
typedef struct tg_part {
    tg_text kind;
    tg_text value; /* any bytes, any length; over 64 bytes its BLAKE2b-256 digest stands for it */
} tg_part;

/* One dimension: the parts of one joint identity. */
typedef struct tg_dimension {
    const tg_part *parts;
    size_t part_count; /* 1..TG_PARTS_MAX */
} tg_dimension;

#define TG_IDENTITY_BYTES_MAX 254
/* A joint identity, length-prefixed part by part with its kind, so that no content of one part makes two equal.
 * A value; `bytes` past `length` are unset. */
typedef struct tg_identity {
    uint16_t length;
    uint8_t bytes[TG_IDENTITY_BYTES_MAX];
} tg_identity;

/* ---- decisions -------------------------------------------------------------------------------------------------- */

/* What one rule says about one identity. */
typedef struct tg_result {
    tg_rule rule;
    bool allowed;            /* by this rule alone */
    bool charged;            /* units were taken from it: a refund has something to give back */
    uint8_t identity;        /* index into tg_decision.identities */
    uint8_t limiter;         /* index of the limiter (policy) it came from */
    bool overflow;           /* charged in an overflow bucket: a refund goes there */
    uint64_t cost;
    uint64_t remaining;      /* hits of cost 1 that would pass at this instant, after this decision */
    uint64_t retry_after_us; /* 0 when allowed; passes after this wait if nobody else hits, 1 us earlier it does not */
    uint64_t reset_after_us; /* until the state equals a fresh one */
    uint64_t delay_us;       /* leaky bucket: how long to hold an allowed hit */
    uint64_t stamp_us;       /* what a refund needs to find its hit again: log stamp, counter window; else when */
} tg_result;

/* The answer over all rules and identities. The plain fields are those of the reported rule: when denied the one with the
 * longest retry, when allowed the one with the smallest remaining; ties: longest reset, then first in the list. Entries of
 * `results` and `identities` past their counts are unset. */
typedef struct tg_decision {
    bool allowed;   /* everything fits and has been taken; else nothing has */
    bool degraded;  /* the store did not answer; `allowed` is what on_store_failure says */
    bool overflow;  /* the table was full; judged in a shared overflow bucket */
    uint8_t reported;
    uint8_t result_count; /* 0 when degraded */
    uint8_t identity_count;
    uint64_t limit, burst;
    uint64_t remaining;      /* smallest over all results */
    uint64_t retry_after_us; /* longest */
    uint64_t reset_after_us; /* of the reported rule */
    uint64_t delay_us;       /* longest */
    tg_result results[TG_TARGETS_MAX];
    tg_identity identities[TG_DIMENSIONS_MAX];
} tg_decision;

/* ---- stores ----------------------------------------------------------------------------------------------------- */

typedef struct tg_store tg_store;

typedef struct tg_store_options {
    tg_clock *clock;     /* NULL: the store's own clock (CLOCK_BOOTTIME) */
    uint64_t timeout_us; /* longest a call waits for the store, however often it has to ask it; 0: 50 ms */
    bool existing;       /* only what is there: a table is never made */
    /* Redis: what private values in keys are hashed under, the same on all machines; 1 to 127 bytes, or "@/path" of a file
     * that nobody but its owner can read. Empty: TIDEGATE_SECRET; without that, one that is made once and kept in Redis. */
    tg_text secret;
    unsigned private_kinds; /* TG_PRIVATE_ bits: kinds whose values are hashed as well, and hidden where identities are shown */
} tg_store_options;

/* Headers, cookies, fields and keys are private in any case. bit, kind */
#define TG_PRIVATE_KINDS(X)                                                                                            \
    X(TG_PRIVATE_IP, 1, "ip")                                                                                          \
    X(TG_PRIVATE_USER, 2, "user")                                                                                      \
    X(TG_PRIVATE_ROUTE, 4, "route")                                                                                    \
    X(TG_PRIVATE_PATH, 8, "path")                                                                                      \
    X(TG_PRIVATE_METHOD, 16, "method")                                                                                 \
    X(TG_PRIVATE_HOST, 32, "host")
#define TG_PRIVATE_ENUM(name, bit, kind) name = bit,
enum { TG_PRIVATE_KINDS(TG_PRIVATE_ENUM) };
#undef TG_PRIVATE_ENUM

/* Opens a store, or takes another reference to one this process has open under the same URI and clock.
 *
 *   memory://[NAME]                  this process and its forks; gone with the last reference
 *   shared://NAME?size=16MiB&mode=0660&group=web&owner=www-data
 *   shared:///absolute/path?...      every process of this host that opens it
 *
 * uri  empty: TIDEGATE_STORE from the environment, else shared://default
 *
 * TG_E_CONFIG  the URI is wrong, or two references name different sizes, secrets or private kinds
 * TG_E_TRUST   path, owner, mode and the option that would allow it are in the message
 * TG_E_FORMAT  damaged or foreign file, other clock kind
 * TG_E_SYSTEM  the system refused (no space: nothing is left behind); with `existing` ENOENT where there is no table
 * Blocks on a file lock while another process makes the table. */
TG_API tg_status tg_store_open(tg_text uri, const tg_store_options *options, tg_store **store, tg_error *error);
TG_API void tg_store_close(tg_store *store); /* accepts NULL; decisions under way on other threads must have ended */
TG_API uint64_t tg_store_now_us(tg_store *store);
/* Adds this to tg_store_now_us to get microseconds since 1970 UTC; 0 under a manual clock. */
TG_API int64_t tg_store_utc_offset_us(tg_store *store);
/* Whether a decision may wait for a network: a binding then lets its other threads run meanwhile. */
TG_API bool tg_store_remote(const tg_store *store);
/* Has `wait` called once, by what this thread asks a remote store next, where it begins to wait: by then the question is on
 * its way already. A binding lets go of its interpreter there, and forgets it afterwards with `wait` NULL, whether it was
 * called or not.
 *
 * false: this store does not tell. What asks it may wait from its beginning on. */
TG_API bool tg_store_before_waiting(const tg_store *store, void (*wait)(void *context), void *context);

/* Counters and fill of a table since it was made, for all processes together. */
typedef struct tg_store_stats {
    uint64_t table_bytes, entries, entries_live, log_blocks, log_blocks_used;
    uint64_t evicted;            /* entries forgotten for lack of room: fresh or non-blocking ones only */
    uint64_t overflowed;         /* decisions in an overflow bucket */
    uint64_t full;               /* decisions refused a place even there */
    uint64_t owner_deaths;       /* locks taken back from a dead holder */
    uint64_t timeouts;           /* decisions that got no lock in time */
    uint64_t leases;             /* rules and identities under which something is reserved and not settled */
    /* States that are kept, each for one rule and identity, and the memory that they take. */
    uint64_t keys, keys_bytes;
    uint64_t keys_sampled;       /* Redis: how many keys were looked at for that; 0: the server lets nobody look */
} tg_store_stats;
TG_API tg_status tg_store_read_stats(tg_store *store, tg_store_stats *stats, tg_error *error);

/* What is counted of decisions, by policy. An identity is never part of it.
 * name, word, meaning */
#define TG_METRIC_NAMES(X)                                                                                             \
    X(TG_METRIC_ALLOWED, "allowed", "let through and counted")                                                         \
    X(TG_METRIC_DENIED, "denied", "over a limit")                                                                      \
    X(TG_METRIC_FORBIDDEN, "forbidden", "refused by a deny rule or list")                                              \
    X(TG_METRIC_UNIDENTIFIED, "unidentified", "a part of the identity was missing")                                    \
    X(TG_METRIC_EXEMPT, "exempt", "listed in exempt")                                                                  \
    X(TG_METRIC_DEGRADED, "degraded", "the store did not answer: on_store_failure decided")                            \
    X(TG_METRIC_SHADOW_DENIED, "shadow_denied", "a policy in shadow mode would have refused")                          \
    X(TG_METRIC_CHALLENGED, "challenged", "over a limit in challenge mode, let through")                               \
    X(TG_METRIC_PAUSED, "paused", "would have been refused, let through by pause_when")

typedef enum tg_metric {
#define TG_METRIC_ENUM(name, word, text) name,
    TG_METRIC_NAMES(TG_METRIC_ENUM)
#undef TG_METRIC_ENUM
    TG_METRICS
} tg_metric;
TG_API const char *tg_metric_word(tg_metric metric); /* "allowed" */

/* A decision over several policies is counted at each of them when it lets through, at the reported one when it refuses. */
typedef struct tg_policy_metrics {
    char space[TG_NAME_BYTES_MAX + 1];
    char policy[TG_NAME_BYTES_MAX + 1]; /* or a limiter's name */
    uint64_t counts[TG_METRICS];
} tg_policy_metrics;

/* How long the store took to decide, of about one decision in 64. */
#define TG_LATENCIES 15
typedef struct tg_latency_metrics {
    uint64_t bounds_ns[TG_LATENCIES]; /* counts[i] took at most bounds_ns[i] and more than the one before; UINT64_MAX last */
    uint64_t counts[TG_LATENCIES];
    uint64_t sum_ns;
} tg_latency_metrics;

/* What all processes have counted in this store since it was made.
 *
 * policies  receives at most `room`, in no order; `count` says how many there are
 * TG_E_UNSUPPORTED  this store keeps none (a table under 1 MiB) */
TG_API tg_status tg_store_read_metrics(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count,
                                       tg_latency_metrics *latency, tg_error *error);

typedef enum tg_metrics_format {
    TG_METRICS_TEXT,       /* a table for a person */
    TG_METRICS_JSON,       /* one object */
    TG_METRICS_PROMETHEUS  /* text format 0.0.4 */
} tg_metrics_format;

/* Takes a text piece by piece; the pieces are borrowed for the call. */
typedef void tg_sink(void *context, tg_text piece);
/* The metrics and the counters of tg_store_read_stats. Nothing is written where it fails. Allocates. */
TG_API tg_status tg_store_write_metrics(tg_store *store, tg_metrics_format format, tg_sink *sink, void *context,
                                        tg_error *error);

/* ---- notices ---------------------------------------------------------------------------------------------------- */

/* What the library has to say to an operator: store trouble began or ended, table near full, table replaced, forwarded
 * header from an untrusted peer. Once per occasion, never once per request. Faces take them and log them. */
typedef struct tg_notice {
    char code[32];     /* "store-failing", "table-near-full", ... each with a paragraph in docs/notices.md */
    char message[480];
} tg_notice;

TG_API bool tg_notice_pending(void);           /* one relaxed load: cheap enough for each request */
TG_API bool tg_notice_take(tg_notice *notice); /* false: none. At most 64 are kept; the rest is counted in the last */

/* ---- requests --------------------------------------------------------------------------------------------------- */

typedef struct tg_header {
    tg_text name; /* any case; FastCGI's HTTP_X_NAME is given as X-Name or X_NAME: '_' equals '-' */
    tg_text value;
} tg_header;

/* What a face may leave unread until a judging function asks for it: most limits need neither.
 * name, bit, the fields of tg_request */
#define TG_READ_HEADERS 1u /* headers, header_count, host */
#define TG_READ_TARGET 2u  /* path, query */
#define TG_READ_GLANCE 4u  /* beside TG_READ_HEADERS: nothing hangs on them, so those that cannot be read are none */
/* Fills the fields of these TG_READ_ bits into the tg_request that names it, and takes the bits out of `unread`. Called at
 * most once in a judging, before anything is decided or taken; what it returns but TG_OK is what the judging returns. */
typedef tg_status tg_request_reader(void *reading, unsigned parts, tg_error *error);

/* What a face knows about the request being judged. All borrowed for the call. Empty text: not known. */
typedef struct tg_request {
    tg_text method;
    tg_text path;  /* as the client sent it, percent-encoded, with or without "?query" */
    tg_text host;
    tg_text peer;  /* the peer's address; "unix:" or empty for a local socket */
    tg_text user;  /* as authenticated by the face */
    tg_text route; /* the route's template, where the face has routes */
    const tg_header *headers; /* in the order received, repeated lines repeated */
    size_t header_count;
    bool client_resolved; /* the server in front has already put the client's address into `peer` */
    tg_text query; /* without '?'; empty: what stands behind '?' in `path` */
    tg_text body;  /* at most TG_BODY_BYTES_MAX of it; looked at where `body_read` says that it is there */
    bool body_read;
    bool body_follows; /* the face reads it when `needs_body` says so; else what would stand there is missing */
    tg_text plan;  /* the client's plan, where the application knows it; empty: the file's `plans` says how to tell */
    bool peek; /* decide as the request would be decided, take nothing: `remaining` is that of the untouched state */
    tg_text policy; /* tg_gate_judge: this policy of the file alone judges, whatever it matches. TG_E_CONFIG: none is so named */
    /* Where there are some: who is counted, by kind, in place of all that the request shows. Empty values are missing ones. */
    const tg_part *values;
    size_t value_count;
    /* What the application says itself, for `key:NAME`: each kind without "key:". Empty values are missing ones. */
    const tg_part *keys;
    size_t key_count;
    /* The sum of tg_judgement.waited_us of what was judged for this same request before, in whatever stores: a request waits
     * for all of them together no longer than one judgement may. */
    uint64_t waited_us;
    /* TG_READ_ bits of what the face has not read yet, and who does. 0 for tg_client_resolve, and where nobody waits
     * (tg_gate_judge_begin and its like), for which the request may have to outlive what it was read from. */
    unsigned unread;
    tg_request_reader *read;
    void *reading;
} tg_request;

#define TG_ADDRESS_TEXT_MAX 64
/* The client's address as it is counted: proxies walked from the right, mapped and NAT64 addresses unmapped, IPv6 cut to
 * its prefix ("2001:db8:1:2::/64"). See tg_client_options. */
typedef struct tg_client_options {
    const tg_text *trusted_proxies; /* networks ("10.0.0.0/8", "::1"), or "unix:" */
    size_t trusted_proxy_count;
    tg_text client_header; /* empty: X-Forwarded-For; also Forwarded (RFC 7239) and X-Real-IP */
    unsigned ipv4_prefix;  /* 0: 32 */
    unsigned ipv6_prefix;  /* 0: 64 */
    tg_text user_header;   /* empty: none; read from trusted peers only */
} tg_client_options;

typedef struct tg_client tg_client; /* parsed tg_client_options */
/* TG_E_CONFIG names the entry and what was expected. Allocates. */
TG_API tg_status tg_client_open(const tg_client_options *options, tg_client **client, tg_error *error);
TG_API void tg_client_close(tg_client *client); /* accepts NULL */
/* TG_E_IDENTITY: a local socket that is not trusted, or a peer that is no address. */
TG_API tg_status tg_client_resolve(const tg_client *client, const tg_request *request,
                                   char address[TG_ADDRESS_TEXT_MAX], tg_error *error);
/* The normalised spelling of one address, cut to the client's prefixes. TG_E_IDENTITY: not an address. */
TG_API tg_status tg_client_normalise(const tg_client *client, tg_text address, char normal[TG_ADDRESS_TEXT_MAX],
                                     tg_error *error);

/* ---- limiters --------------------------------------------------------------------------------------------------- */

typedef enum tg_on_failure { TG_FAIL_OPEN = 0, TG_FAIL_CLOSED, TG_FAIL_LOCAL } tg_on_failure;
/* "open", "closed", "local", and "local 25%": by 1 to 100 percent of each limit and burst. False: none of these. Without a
 * share `local_percent` is 100. */
TG_API bool tg_on_failure_parse(tg_text text, tg_on_failure *choice, unsigned *local_percent);

typedef enum tg_on_full { TG_FULL_OVERFLOW = 0, TG_FULL_OPEN, TG_FULL_CLOSED } tg_on_full;
typedef enum tg_missing { TG_MISSING_REJECT_401 = 0, TG_MISSING_REJECT_400, TG_MISSING_SHARED } tg_missing;

typedef struct tg_limiter_options {
    tg_text rules;           /* required */
    tg_text name;            /* empty: "default"; limiters of one name share their counts */
    tg_text space;           /* the namespace; empty: "default" */
    tg_algorithm preferred;  /* for rules that name no algorithm */
    const tg_text *by;       /* dimensions: "ip", "user|ip", "ip+route"; none: tg_limiter_judge is TG_E_ARG */
    size_t by_count;
    tg_on_failure on_store_failure;
    unsigned local_percent; /* TG_FAIL_LOCAL: the share of each limit and burst, at least 1 unit; 0 as 100 */
    tg_on_full on_full;
    tg_missing missing_identity;
    bool count_denied; /* what is refused counts too: who keeps knocking stays out. TG_E_CONFIG where the store cannot */
} tg_limiter_options;

typedef struct tg_limiter tg_limiter;

/* store   kept (another reference is taken)
 * client  may be NULL: no proxy is trusted; borrowed, must outlive the limiter
 * TG_E_RULE, TG_E_CONFIG (names the option), TG_E_NOMEM; TG_E_RULE also when a rule's full log is larger than the table
 * can hold: the message names the size that would do. */
TG_API tg_status tg_limiter_open(tg_store *store, const tg_client *client, const tg_limiter_options *options,
                                 tg_limiter **limiter, tg_error *error);
TG_API void tg_limiter_close(tg_limiter *limiter); /* accepts NULL */
TG_API size_t tg_limiter_rules(const tg_limiter *limiter, const tg_rule **rules); /* borrowed; returns how many */
TG_API const char *tg_limiter_name(const tg_limiter *limiter);
TG_API tg_store *tg_limiter_store(const tg_limiter *limiter); /* borrowed */

/* Takes `cost` units from every dimension under every rule of the limiter, or from none.
 *
 * dimensions  a limiter with `by` (a policy) composes its own from the kinds given here, each a one-part dimension;
 *             positional parts (empty kind) are then TG_E_ARG. Kind "ip" is normalised as a face would.
 * cost        0 takes nothing and makes no state; above what a rule can hold it is denied with TG_NEVER
 * decision    filled on TG_OK only
 *
 * TG_OK also covers a denial and a store that did not answer (decision->degraded): on_store_failure decides then.
 *   TG_E_ARG       no or too many dimensions or parts, kind over TG_NAME_BYTES_MAX, cost over TG_LIMIT_MAX
 *   TG_E_IDENTITY  a policy's kind is missing, or kind "ip" is no address
 * Blocks: the table for a segment lock only, up to the store's timeout behind a stopped holder. Allocates nothing. */
TG_API tg_status tg_limiter_hit(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
                                uint64_t cost, tg_decision *decision, tg_error *error);
/* As tg_limiter_hit would decide; `remaining` and `reset_after_us` are those of the untouched state. Takes nothing. */
TG_API tg_status tg_limiter_peek(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
                                 uint64_t cost, tg_decision *decision, tg_error *error);
/* Forgets the identities under every rule, and under what overrides it. TG_E_STORE when the store did not answer. */
TG_API tg_status tg_limiter_reset(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
                                  tg_error *error);
/* Gives `cost` units back, never below zero, oldest first in a log. TG_E_STORE when the store did not answer. */
TG_API tg_status tg_limiter_refund(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
                                   uint64_t cost, tg_error *error);
/* Gives back exactly what `decision` took and marks it as given back: a second call does nothing.
 * TG_E_STORE when the store did not answer (the decision keeps its marks). */
TG_API tg_status tg_decision_refund(tg_store *store, tg_decision *decision, tg_error *error);

/* As tg_limiter_hit, for somebody who would rather wait than be refused: on buckets a hit that passes within `patience_us`
 * is taken now, from what flows in until then, and decision->delay_us says how long to sleep before going on: first come,
 * first served. On windows and logs nothing can be taken ahead of its time, so there it is tg_limiter_hit, and the caller
 * sleeps `retry_after_us` and asks again. Whoever gives up gives back: tg_decision_refund.
 *
 * patience_us  0..TG_WAIT_US_MAX; 0 is tg_limiter_hit */
TG_API tg_status tg_limiter_hit_within(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
                                       uint64_t cost, uint64_t patience_us, tg_decision *decision, tg_error *error);

/* ---- reservations --------------------------------------------------------------------------------------------------- */

#define TG_LEASE_US_MIN UINT64_C(1000000)      /* 1 s */
#define TG_LEASE_US_MAX UINT64_C(86400000000)  /* a day */

/* Units taken on an estimate, until somebody says what it really was. Plain bytes; of all copies, a forked child's among
 * them, one is settled: each settling moves the difference again once the lease has ended. */
typedef struct tg_reservation {
    uint8_t id[16];        /* all zero: nothing is held (refused, degraded, or settled) */
    uint64_t until_us;     /* the store's clock: the lease's end */
    uint32_t places[TG_TARGETS_MAX]; /* of each result, the store's own; UINT32_MAX: nothing is held there */
    tg_decision decision;  /* of the hit that took them. Its results are marked as not charged: a refund does nothing */
} tg_reservation;

/* As tg_limiter_hit. If allowed, the store remembers until the lease ends that all of it is an estimate: what is not
 * settled by then is given back by whoever asks next, so a process that dies holds nothing for longer.
 *
 * lease_us  TG_LEASE_US_MIN..TG_LEASE_US_MAX
 * TG_E_STORE: the store has no room for another lease, and allows nothing it could not give back. Nothing is taken, and the
 * decision is what on_store_failure says (degraded). A store that did not answer is TG_OK and degraded, as for a hit.
 * TG_E_UNSUPPORTED: this store keeps none (no table, no Redis). */
TG_API tg_status tg_limiter_reserve(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
                                    uint64_t cost, uint64_t lease_us, tg_reservation *reservation, tg_error *error);
/* Makes it `actual` units: gives back what was too much, or takes what was too little, beyond the limit if it must (the
 * work is done; the next hits pay). Ends the lease and marks the reservation; a second call does nothing. After the
 * lease's end its units are back, so all of `actual` is taken then.
 * TG_E_STORE when the store did not answer: the lease stands until its end. */
TG_API tg_status tg_reservation_settle(tg_limiter *limiter, tg_reservation *reservation, uint64_t actual, tg_error *error);
/* Moves the lease's end to `lease_us` from now. TG_E_ARG: it has ended, or was settled. */
TG_API tg_status tg_reservation_renew(tg_limiter *limiter, tg_reservation *reservation, uint64_t lease_us, tg_error *error);

/* ---- overrides and pauses ---------------------------------------------------------------------------------------------
 * Set while everything runs, kept in the store, followed by every process from the next decision on, and over by
 * themselves. What was used stays used where algorithm and period stay the same. */

typedef enum tg_override_kind { TG_OVERRIDE_RULES = 1, TG_OVERRIDE_PAUSE } tg_override_kind;

typedef struct tg_override {
    tg_override_kind kind;
    uint64_t until_us;      /* the store's clock */
    char space[TG_NAME_BYTES_MAX + 1];
    char policy[TG_NAME_BYTES_MAX + 1];
    uint8_t identity[16];   /* digest of the joint identity; all zero: everybody */
    char rules[96];         /* rule texts */
    char shown[112];        /* the identity, as tg_identity_show writes it */
} tg_override;

/* Judges one client of a limiter, or all of them, by other rules for a while: at most as many as it has itself.
 *
 * dimensions   as in tg_limiter_hit; none: everybody. Of a policy with several dimensions, those without a value are left
 *              alone. One client's override goes before everybody's
 * rules        "5/minute", "deny"; at most 95 bytes
 * duration_us  0: ends the one that stands
 * TG_E_RULE, TG_E_IDENTITY, TG_E_STORE, TG_E_UNSUPPORTED (a table under 1 MiB), TG_E_SYSTEM (64 stand already) */
TG_API tg_status tg_limiter_override(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
                                     tg_text rules, uint64_t duration_us, tg_error *error);
/* Lets everybody through for a while and counts nothing: a hit is one of cost 0. `deny` is paused too. 0: ends it. */
TG_API tg_status tg_limiter_pause(tg_limiter *limiter, uint64_t duration_us, tg_error *error);
/* Those that stand; `count` may exceed `room`. */
TG_API tg_status tg_store_list_overrides(tg_store *store, tg_override *overrides, size_t room, size_t *count,
                                         tg_error *error);

/* ---- judging a request ------------------------------------------------------------------------------------------ */

typedef enum tg_outcome {
    TG_UNMATCHED = 0,  /* no policy speaks of this request: let it through, no fields */
    TG_ALLOWED,
    TG_DENIED,         /* over a limit */
    TG_FORBIDDEN,      /* a `deny` rule */
    TG_UNIDENTIFIED,   /* a part of the identity is missing and missing_identity rejects */
    TG_UNAVAILABLE,    /* the store did not answer and on_store_failure is closed */
    TG_EXEMPT          /* every policy that speaks of it lists the client in `exempt`: let it through, no fields */
} tg_outcome;
#define TG_OUTCOMES 7

typedef struct tg_judgement {
    tg_outcome outcome;
    int status;                          /* 0: let through; else the HTTP status of the refusal */
    char policy[TG_NAME_BYTES_MAX + 1];  /* of the reported rule */
    char missing[TG_NAME_BYTES_MAX + 1]; /* TG_UNIDENTIFIED, or a policy not enforced: the kind */
    tg_decision decision;                /* ALLOWED, DENIED, FORBIDDEN, UNAVAILABLE; else result_count is 0 */
    /* Only tg_gate_judge sets what follows; elsewhere it is false. */
    bool challenged;    /* over a limit of `mode: challenge`: let through, for the application to ask for a proof */
    bool shadow_denied; /* a policy of `mode: shadow` would have refused: let through */
    char shadow_policy[TG_NAME_BYTES_MAX + 1]; /* which; empty unless shadow_denied */
    /* Let through so far, by the dimensions that need no body. Read the body (up to TG_BODY_BYTES_MAX, to be replayed to
     * the application) and judge again with it, and with this decision among `prior`. */
    bool needs_body;
    bool settles; /* what it costs, or how it went, is known after the response: call tg_gate_settle then */
    uint8_t watch_count; /* for tg_gate_settle: which policies want to know how it went */
    uint32_t watches[TG_LIMITERS_MAX];
    uint64_t waited_us; /* how long it waited for its store, at most the store's timeout: see tg_request. 0: a table's */
} tg_judgement;

/* Judges one request under several limiters at once, all or nothing, each by its own `by`. All share one store.
 *
 * prior        decisions already taken for this same request: a (rule scope, identity) charged there is judged by this
 *              limiter's numbers but not charged again. May be NULL.
 * cost         as in tg_limiter_hit
 *
 * CORS preflight (OPTIONS with Origin and Access-Control-Request-Method) is TG_UNMATCHED: free on every face.
 * TG_E_ARG  no limiter, over TG_LIMITERS_MAX, a limiter without `by`, different stores, too many targets */
TG_API tg_status tg_limiters_judge(tg_limiter *const *limiters, size_t limiter_count, const tg_request *request,
                                   uint64_t cost, const tg_decision *const *prior, size_t prior_count,
                                   tg_judgement *judgement, tg_error *error);
/* What tg_limiters_judge would have made of judgement->decision, which is the caller's: of a hit or a reservation that the
 * application asked for itself, so that its refusal is answered as any other.
 *
 * limiter  that has decided; NULL: not known, `policy` stays empty */
TG_API void tg_limiter_conclude(const tg_limiter *limiter, tg_judgement *judgement);

/* ---- the gate: a rules file in force ------------------------------------------------------------------------------ */

typedef struct tg_gate tg_gate;

typedef struct tg_gate_options {
    tg_text path;  /* the rules file; empty: TIDEGATE_CONFIG from the environment, TG_E_CONFIG without one */
    tg_text store; /* empty: TIDEGATE_STORE, the file's `store`, shared://default */
    tg_clock *clock;
    uint64_t timeout_us;
    unsigned faces;  /* what the face can know of a request, TG_FACE_ bits; 0: not said, nothing is checked */
    bool unwatched;  /* the file is read again by tg_gate_reload only, not when it has changed */
    bool brief; /* for a process of one thread that judges one request: what a policy needs is made when it is met */
    bool starts_anyway; /* a store that cannot be opened is one that does not answer: on_store_failure decides. Not where the
                           URI is wrong or its kind unknown */
    bool look; /* to look at a site's counts: a table that is not there is not made, an empty one stands in for it */
} tg_gate_options;

/* A policy that asks for what the face cannot know is TG_E_CONFIG when the file is read: it would never limit anybody.
 * Other bits are other faces' and say nothing. */
#define TG_FACE_KNOWN 1u    /* something is said at all */
#define TG_FACE_BODY 2u     /* `form:`, `json:`: the face can read a body and replay it */
#define TG_FACE_USER 4u     /* `user` */
#define TG_FACE_ROUTE 8u    /* `route`, in `by` and in `match` */
#define TG_FACE_KEYS 32u     /* `key:`: the application answers for itself */
#define TG_FACE_RESPONSE 16u /* `count`, `cost` of the response: the face sees the answer and calls tg_gate_settle */

/* Reads the file, opens its store and makes its limiters. TG_E_CONFIG: line, column and what was expected. */
TG_API tg_status tg_gate_open(const tg_gate_options *options, tg_gate **gate, tg_error *error);
TG_API void tg_gate_close(tg_gate *gate); /* accepts NULL */
/* Reads the file again. Any failure leaves the rules in force as they were. No request sees half of a change; what was
 * used stays used. The store cannot change while running (TG_E_CONFIG says so). */
TG_API tg_status tg_gate_reload(tg_gate *gate, tg_error *error);
typedef struct tg_answer tg_answer; /* below */
/* Finds the policies of the request (first match wins) and judges it. Never waits for a reload.
 * Once a second at most it looks whether the file has changed, and reads it again, as tg_gate_reload would: a notice says
 * that it is in force, or what is wrong with it and that the rules stay. The one request that finds it so takes that long.
 *
 * cost    multiplied by what a policy's own `cost` says
 * answer  may be NULL. Else made from the very rules that judged: their texts, statuses and header families */
TG_API tg_status tg_gate_judge(tg_gate *gate, const tg_request *request, uint64_t cost,
                               const tg_decision *const *prior, size_t prior_count, tg_judgement *judgement,
                               tg_answer *answer, tg_error *error);
/* For a judgement whose `settles` is true, once its request has been answered with this status and these headers: tells
 * policies with `pause_when` how it went, gives back what policies that count certain statuses took for another one, and
 * takes or gives back what a policy whose cost the response says took too little or too much, beyond its limit if it must:
 * the next ones pay. By the rules in force now; what a policy took that is no longer there stays taken. Marks what is given back, so that a refund does not give it twice.
 * TG_E_STORE when the store did not answer: what was taken stays taken. */
TG_API tg_status tg_gate_settle(tg_gate *gate, tg_judgement *judgement, int status, const tg_header *headers,
                                size_t header_count, tg_error *error);
/* A limiter of its own for the file's policy `name`, sharing its counts with every face. Close it before the gate.
 * It keeps the rules of this moment until it is opened again. TG_E_CONFIG: no such policy; the message lists them. */
TG_API tg_status tg_gate_limiter(tg_gate *gate, tg_text name, tg_limiter **limiter, tg_error *error);
TG_API tg_store *tg_gate_store(tg_gate *gate);          /* borrowed */
TG_API bool tg_gate_stands_in(const tg_gate *gate);     /* opened to look, and there is no table: see tg_gate_options */
TG_API const tg_client *tg_gate_client(tg_gate *gate);  /* borrowed; that of the file as first read */
TG_API uint64_t tg_gate_generation(const tg_gate *gate); /* counts successful reads, from 1 */
/* Whether any policy in force counts by this kind ("user", "route"; "header:" for any header): what none asks for, a face
 * need not find out. Holds for one generation. Walks the policies. */
TG_API bool tg_gate_names(tg_gate *gate, const char *kind);

/* ---- without waiting ------------------------------------------------------------------------------------------------
 * The same questions for callers on an event loop, where a remote store must not be waited for. All calls of one client
 * travel behind each other over one connection (one for each node of a cluster); each has its own deadline, for all that it
 * has to ask.
 *
 * Everything is called from the loop's thread, and nothing here blocks. One client for each pair of loop and store; in a
 * forked child every call is TG_E_STORE, and only tg_async_close may follow. */

typedef struct tg_async tg_async;
typedef struct tg_async_call tg_async_call;

/* What the client asks of the loop. Each may be called at any time from within a call to the client. */
typedef struct tg_async_loop {
    void *data;
    /* From now on call tg_async_ready when `fd` is readable, or writable, as wanted; both false: forget it. */
    void (*watch)(void *data, int fd, bool readable, bool writable);
    /* Call tg_async_wake once, in so many microseconds; replaces an earlier wish. UINT64_MAX: not at all. */
    void (*wake)(void *data, uint64_t in_us);
    /* Call tg_async_flush once, at the end of this turn of the loop. */
    void (*flush)(void *data);
} tg_async_loop;

#define TG_ASYNC_PENDING_MAX 4096 /* calls without an answer; one more is degraded at once */

/* store  kept (another reference is taken). TG_E_UNSUPPORTED: tg_store_remote is false; ask it directly, it never waits.
 * Connects with the first call. TG_E_NOMEM. */
TG_API tg_status tg_async_open(tg_store *store, const tg_async_loop *loop, tg_async **client, tg_error *error);
/* Every call still under way is done, degraded, from within. May be called from a `done`. Accepts NULL.
 * A flush that the loop was asked for and a readiness it has yet to tell must not come any more. */
TG_API void tg_async_close(tg_async *client);

/* The loop's side: `fd` as given to `watch`. */
TG_API void tg_async_ready(tg_async *client, int fd, bool readable, bool writable);
TG_API void tg_async_wake(tg_async *client);
TG_API void tg_async_flush(tg_async *client);

/* Called once for each call that was begun and not cancelled. What the call was to fill is filled if `status` is TG_OK, as
 * it would be by the function that waits. It may begin and cancel calls, and close the client. Never from within the
 * beginning of its own call, but perhaps of another. */
typedef void tg_async_done(void *data, tg_status status, const tg_error *error);

typedef enum tg_question { TG_ASK_HIT, TG_ASK_PEEK, TG_ASK_RESET, TG_ASK_REFUND } tg_question;

/* tg_limiter_hit_within, _peek, _reset, _refund. The dimensions are borrowed for this call only; `decision` (NULL for RESET
 * and REFUND) stays as it is until `done`.
 *
 * call  receives what tg_async_cancel takes; NULL: answered already, `done` will not be called
 * Any other status than TG_OK: not begun, `done` will not be called. */
TG_API tg_status tg_limiter_begin(tg_async *client, tg_limiter *limiter, tg_question question,
                                  const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                                  uint64_t patience_us, tg_decision *decision, tg_async_done *done, void *data,
                                  tg_async_call **call, tg_error *error);
/* tg_limiters_judge. The limiters, the request with all it points to, and `prior` stay as they are until `done`. */
TG_API tg_status tg_limiters_judge_begin(tg_async *client, tg_limiter *const *limiters, size_t limiter_count,
                                         const tg_request *request, uint64_t cost, const tg_decision *const *prior,
                                         size_t prior_count, tg_judgement *judgement, tg_async_done *done, void *data,
                                         tg_async_call **call, tg_error *error);
/* tg_gate_judge, likewise, by the rules in force at the beginning. A reload keeps them until `done`. */
TG_API tg_status tg_gate_judge_begin(tg_async *client, tg_gate *gate, const tg_request *request, uint64_t cost,
                                     const tg_decision *const *prior, size_t prior_count, tg_judgement *judgement,
                                     tg_answer *answer, tg_async_done *done, void *data, tg_async_call **call,
                                     tg_error *error);
/* tg_gate_settle; `headers` are borrowed for this call only. */
TG_API tg_status tg_gate_settle_begin(tg_async *client, tg_gate *gate, tg_judgement *judgement, int status,
                                      const tg_header *headers, size_t header_count, tg_async_done *done, void *data,
                                      tg_async_call **call, tg_error *error);
/* tg_decision_refund. */
TG_API tg_status tg_decision_refund_begin(tg_async *client, tg_decision *decision, tg_async_done *done, void *data,
                                          tg_async_call **call, tg_error *error);
/* `done` will not be called. Whether the hit is counted is not known if it was under way. */
TG_API void tg_async_cancel(tg_async *client, tg_async_call *call);

/* ---- the answer --------------------------------------------------------------------------------------------------- */

#define TG_ANSWER_FIELDS_MAX 12
#define TG_ANSWER_BYTES_MAX 3072

typedef struct tg_field {
    tg_text name, value;
} tg_field;

/* What goes to the client: with status 0 only the fields, to be added to the application's own answer; else the whole
 * refusal. Texts point into `storage`: copy the struct and they still point into the original. */
struct tg_answer {
    int status;
    const char *reason; /* "Too Many Requests" */
    size_t field_count;
    tg_field fields[TG_ANSWER_FIELDS_MAX]; /* Content-Type among them when there is a body */
    tg_text body;
    size_t storage_used; /* of `storage`, from its beginning */
    char storage[TG_ANSWER_BYTES_MAX];
};

/* Retry-After in whole seconds, rounded up, at least 1 (RFC 9110 10.2.3), absent when no wait can help; X-RateLimit-Limit,
 * -Remaining, -Reset (delta seconds, rounded up); body {"code": "RATE_LIMITED", "message": ..., "retry_after": ...}
 * as application/json. A degraded answer has no limit fields; a closed one is 503 with Retry-After: 1.
 * For what tg_limiters_judge said: a rules file has its own texts, statuses and fields, which tg_gate_judge gives. */
TG_API void tg_answer_make(const tg_judgement *judgement, tg_answer *answer);

/* ---- looking at it: explain and check ------------------------------------------------------------------------------ */

typedef struct tg_explained_policy {
    char name[TG_NAME_BYTES_MAX + 1];
    unsigned line;  /* where it begins in the rules file */
    bool applies;
    char why[320];  /* "path matches \"/login\"", "method GET is none of POST" */
} tg_explained_policy;

/* What one request would meet. */
typedef struct tg_explanation {
    tg_judgement judgement;  /* as of a peek */
    tg_answer answer;        /* what a client would get if it asked now; texts point into this struct */
    const tg_explained_policy *policies; /* all of the file, in its order */
    size_t policy_count;
    size_t applied[TG_LIMITERS_MAX]; /* indexes of those that apply: results[i].limiter counts in these */
    size_t applied_count;
    char client[TG_ADDRESS_TEXT_MAX]; /* empty: cannot be told */
    char client_why[320];             /* from where the address was taken */
    char identities[TG_DIMENSIONS_MAX][400]; /* of judgement.decision, as keyed; see tg_identity_show */
    char store[120];                  /* its URI */
    bool store_missing;               /* opened to look (tg_gate_options) and nobody has counted there yet */
    uint64_t now_us, generation;
    int64_t utc_offset_us;
} tg_explanation;

/* What tg_gate_judge would say of this request, and why: takes nothing. The store is asked, so a segment lock may be waited
 * for. Allocates. Returns what tg_gate_judge would. */
TG_API tg_status tg_gate_explain(tg_gate *gate, const tg_request *request, uint64_t cost, tg_explanation **explanation,
                                 tg_error *error);
TG_API void tg_explanation_close(tg_explanation *explanation); /* accepts NULL */

/* For a person, or as one JSON object; every face shows the same. */
TG_API void tg_explanation_write(const tg_explanation *explanation, bool json, tg_sink *sink, void *context);

/* "ip 203.0.113.9 + header:x-api-key (hidden, 24 bytes, #5d41402a)". Addresses, users, paths, methods and hosts are shown,
 * shortened where long; any other value may be a secret: its length and four bytes of its digest tell two of them apart. */
TG_API void tg_identity_show(const tg_identity *identity, char *text, size_t size);

/* What somebody should look at, though it works. */
typedef struct tg_warning {
    char code[32];      /* "never-bites", each with a paragraph in docs/cli.md */
    unsigned line;      /* 1-based; 0: of the file as a whole */
    unsigned column;    /* 1-based; 0: not known */
    char message[480];  /* without file and position */
} tg_warning;

typedef struct tg_check_options {
    tg_text path;  /* as in tg_gate_options */
    tg_text store; /* likewise; its address is looked at, and it is opened with `live` only */
    tg_text face;  /* "asgi", "flask", "wsgi", "fcgi", "fcgi-auth", "fcgi-relay",
                   * "cgi"; empty: any. TG_E_ARG: another */
    bool live;     /* open the store too, as it is, and warn of what it tells: a Redis that evicts, another secret. Takes up to
                    * some seconds, and takes the notices that are pending */
} tg_check_options;

/* Reads the rules file as a gate would and looks for what is allowed but hardly meant. Leaves nothing behind.
 *
 * warnings  receives at most `room`, in the file's order; `count` says how many there are
 * TG_E_CONFIG  the file is wrong: line, column, and what was expected */
TG_API tg_status tg_check(const tg_check_options *options, tg_warning *warnings, size_t room, size_t *count, tg_error *error);

/* ---- compiled rules ------------------------------------------------------------------------------------------------ */

/* Reads a rules file with all that it includes and the variables it names, checks it whole, and writes what a process that
 * lives for one request can read without parsing YAML. Wherever a rules file's path is taken, a compiled one may stand.
 * The output appears whole or not at all, readable for whom the rules file is (not for others where a variable went in).
 *
 * TG_E_CONFIG: as tg_gate_open; TG_E_SYSTEM: the output cannot be written */
TG_API tg_status tg_rules_compile(const char *path, const char *output, tg_error *error);
/* Whether a source is another than when it was compiled: `what` names it. Those that are not there say nothing. */
TG_API tg_status tg_rules_changed(const char *compiled, bool *changed, char *what, size_t what_bytes, tg_error *error);

#ifdef __cplusplus
}
#endif
#endif
