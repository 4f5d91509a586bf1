/* Joins the rooms: one decision over several rules and identities, the limiter, the gate.
 * Must not enter: sockets, Python, FastCGI, YAML, the layout of any store. */
#ifndef TG_CORE_H
#define TG_CORE_H

#include "base/base.h"
#include "identity/identity.h"
#include "stores/store.h"

struct tg_limiter {
    tg_store *store;         /* a reference */
    tg_store *local;         /* on_store_failure local: the embedded stand-in, else NULL */
    const tg_client *client; /* the caller's, or own_client */
    tg_client *own_client;   /* made when the caller gave none: no proxy is trusted; else NULL */
    char name[TG_NAME_BYTES_MAX + 1];
    char space[TG_NAME_BYTES_MAX + 1];
    tg_rule rules[TG_RULES_MAX];
    size_t rule_count;
    tg_by *by[TG_DIMENSIONS_MAX];
    size_t by_count;
    tg_on_failure on_store_failure;
    unsigned local_percent;
    tg_on_full on_full;
    tg_missing missing_identity;
    bool count_denied;
    const tg_metric_name *metric; /* NULL: not counted */
    bool gives_back; /* what it takes may be given back after the response */
    unsigned reads;  /* TG_READ_ bits: what it looks at in a request */
};

/* Fills everything of a decision but results and identities from its results: allowed, reported, the plain fields. */
void tg__decision_report(tg_decision *decision);

/* A judgement that no policy spoke in: let through, an empty decision. */
void tg__judgement_unmatched(tg_judgement *judgement);

/* After a judgement that was waited for: how long. `until_us` as it was asked. */
void tg__judgement_waited(tg_judgement *judgement, const tg_store *store, const tg_request *request, uint64_t until_us);

/* The rules in force, held until they are let go: no reload frees them meanwhile. For looking at a gate, not for judging. */
typedef struct tg_held {
    const struct tg_config *config;
    const tg_client *client;
    tg_limiter *const *limiters; /* one for each policy */
    struct tg_watch *watches;    /* likewise; NULL: none watches how its answers go */
    size_t slot;
} tg_held;
tg_held tg__gate_hold(tg_gate *gate);
void tg__gate_let_go(tg_gate *gate, const tg_held *held);
const char *tg__gate_store_uri(const tg_gate *gate); /* as chosen when opened */

enum { TG_SUFFIX_BYTES_MAX = 16 };
/* tg_limiter_open; what is counted is named with the suffix, the limiter without it. */
tg_status tg__limiter_open(tg_store *store, const tg_client *client, const tg_limiter_options *options,
                           const char *suffix, tg_limiter **opened, tg_error *error);

/* Answers that are there already and the question that is put next; NULL: the store is waited for. See inquiry.h. */
typedef struct tg_inquiry tg_inquiry;

/* When one call's waiting for the store is over, however many questions it has: see tg_store_ops.apply. 0 where a store is
 * never waited for. `waited_us`: what others have waited for this same request; the end is then nearer, or here. */
static inline uint64_t
tg__waits_until(const tg_store *store, uint64_t waited_us)
{
    if (store->timeout_us == 0)
        return 0;
    return tg__monotonic_us() + (waited_us < store->timeout_us ? store->timeout_us - waited_us : 0);
}

/* What is to be judged. One pointer to it goes down where eight arguments would be put on the stack anew by each function. */
typedef struct tg_matter {
    const tg_request *request;
    uint64_t cost;
    const tg_decision *const *prior;
    size_t prior_count;
    uint64_t until_us;   /* of tg__waits_until */
    tg_inquiry *inquiry; /* NULL: the store is waited for */
} tg_matter;

/* Limiters that judge it together, all or nothing. */
typedef struct tg_bench {
    tg_limiter *const *limiters;
    const uint64_t *costs; /* of each, at most TG_LIMIT_MAX; NULL: the matter's own */
    size_t count;
    size_t reported;        /* receives the index of the limiter whose name the judgement bears */
    _Atomic uint64_t *line; /* receives where the first one counts; NULL: it was not asked for */
} tg_bench;

/* tg_limiters_judge of 1 to TG_LIMITERS_MAX limiters. TG__PENDING: see inquiry.h. */
tg_status tg__bench_judge(tg_bench *bench, const tg_matter *matter, tg_judgement *judgement, tg_error *error);

/* tg_identity_show; what is of `private_kinds` (TG_PRIVATE_) is hidden as well. */
void tg__identity_show(const tg_identity *identity, unsigned private_kinds, char *text, size_t size);

/* A CORS preflight: free on every face. */
bool tg__options_is_preflight(const tg_request *request);
static inline bool
tg__is_preflight(const tg_request *request)
{
    return __builtin_expect(tg__text_is(request->method, "OPTIONS"), 0) && tg__options_is_preflight(request);
}

/* Around each `apply`: one notice when a store begins to fail, one when it has answered for a second. */
void tg__failure_seen(tg_store *store, const tg_error *error);
void tg__success_seen(tg_store *store);

/* Which counts a rule shares: the digest of namespace, name, algorithm and period. */
void tg__rule_scope(tg_rule *rule, tg_text space, tg_text name);

#endif
