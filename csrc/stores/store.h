/* What core/ asks of a store, and what every store shares: the reference count and the registry by URI.
 * Must not enter: identities as people write them, requests, policies. */
#ifndef TG_STORE_H
#define TG_STORE_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct tg_metric_name tg_metric_name; /* the store's */
typedef struct tg_sight tg_sight;             /* sight.h */

/* The words in which answers to a policy's requests are counted: a ring of the last stretches of time, then how often
 * somebody was let through. core/watch.c knows what is in them. */
enum { TG_WATCH_RING = 7, TG_WATCH_LET_THROUGH = TG_WATCH_RING, TG_WATCH_WORDS };

typedef enum tg_op {
    TG_OP_HIT,    /* decide over all targets; take from all or from none */
    TG_OP_PEEK,   /* the verdicts of a hit; remaining and reset of the untouched state; write nothing */
    TG_OP_REFUND, /* give `cost` back; with `own` what the hit of `stamp_us` took, else oldest first */
    TG_OP_RESET   /* forget the state */
} tg_op;

/* One (rule, identity) pair. Two targets of one call with equal scope and identity are one state: it is charged once,
 * each rule judging by its own numbers. */
typedef struct tg_target {
    const tg_rule *rule;
    const tg_identity *identity; /* equal pointers mean equal identities: a store may hash once per pointer */
    uint64_t cost;
    uint64_t stamp_us;  /* REFUND with `own`; HIT with `charged`: the earlier hit's stamp */
    uint8_t on_full;    /* tg_on_full */
    uint64_t patience_us; /* HIT, PEEK on buckets: admit what passes within so long; the wait is told as delay_us */
    bool forced;          /* HIT: take it whether it fits or not, and say so as allowed; later hits pay for it */
    /* HIT: where one of the targets with this same number, not 0, is denied, all of them are brought as near to full as
     * `cost` brings them (tg__count_denied). Only for stores that say `counts_denied`. */
    uint8_t counts_denied;
    bool own;
    bool overflow;      /* REFUND with `own`: the hit was charged in an overflow bucket */
    bool charged;       /* HIT, PEEK: this request has already paid here: judge without that charge, take nothing */
    bool gives_back;    /* what is taken here may be given back later: whoever remembers a denial remembers it shortly */
    tg_sight *sight;    /* HIT, PEEK: receives the state as it was before, from stores that are remote; may be NULL */
} tg_target;

typedef enum tg_lease_op {
    TG_LEASE_TAKE,   /* a hit; what it takes is held until the lease's end, and comes back then by itself */
    TG_LEASE_SETTLE, /* ends it: what was taken becomes `actual` */
    TG_LEASE_RENEW   /* moves its end */
} tg_lease_op;

/* What is taken on an estimate, in all targets of one hit. */
typedef struct tg_lease {
    uint8_t id[16];    /* TAKE: receives it, all zero where nothing is held; else which */
    uint64_t lease_us; /* TAKE, RENEW: from the store's now */
    uint64_t until_us; /* TAKE, RENEW: receives the end; SETTLE: the end as known */
    uint64_t actual;   /* SETTLE */
    /* One for each target, the store's own: TAKE writes them, RENEW may, and a SETTLE that fails may: UINT32_MAX for what
     * it has settled all the same. */
    uint32_t *places;
    bool full;         /* TAKE, with TG_E_STORE: the store answers, but has no room for another */
    bool over;         /* RENEW: it has ended */
} tg_lease;

/* ---- without waiting: what a remote store gives to a loop that is somebody else's ----
 *
 * Everything is called from the loop's thread, and nothing blocks. A store's own struct begins with tg_store_async, so that
 * one that stands before another (tiers) or has several connections (a cluster) is asked alike. In a forked child every
 * beginning is TG_E_STORE, and only `close` may follow. */
typedef struct tg_store_call tg_store_call; /* the store's own */
typedef struct tg_store_async tg_store_async;

typedef struct tg_store_async_ops {
    /* As `apply`, by `until_us`. `targets`, all they point to, and `results` stay the caller's and as they are until
     * `done`, which is called once: never from within the beginning of its own call, but perhaps of another.
     *
     * call  receives what `cancel` takes; NULL when it is answered already: `done` will not be called
     * TG_E_STORE, TG_E_NOMEM: not begun, `done` will not be called. */
    tg_status (*begin)(tg_store_async *client, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
                       tg_result *results, tg_async_done *done, void *data, tg_store_call **call, tg_error *error);
    void (*cancel)(tg_store_async *client, tg_store_call *call); /* `done` will not be called */
    void (*ready)(tg_store_async *client, int fd, bool readable, bool writable);
    void (*wake)(tg_store_async *client);
    void (*flush)(tg_store_async *client);
    /* Every call under way is done with TG_E_STORE, from within, except in a forked child: there none is. May be called
     * from a `done`. */
    void (*close)(tg_store_async *client);
} tg_store_async_ops;

struct tg_store_async {
    const tg_store_async_ops *ops;
};

typedef struct tg_store_ops {
    const char *name; /* "table": appears in errors and metrics */
    bool remote;      /* apply may wait for a network */
    bool tells_of_waiting; /* apply says tg__store_waits first, and waits behind no lock of who has said so */
    /* One atomic step for every thread and process that shares the store; the store supplies the clock.
     *
     * until_us  for stores that are remote, of tg__monotonic_us: the end of what one judgement may wait, of which this may be
     *           one question of several. 0: this one alone, so the store's own timeout from now on. Where it has come
     *           already nothing is asked: TG_E_STORE with system_error ETIME, which says nothing of the store
     * results   HIT and PEEK: allowed, charged, overflow, remaining, retry_after_us, reset_after_us, delay_us, stamp_us of
     *           each target are filled; the other fields are the caller's. When one target denies, those that would allow keep
     *           `allowed`, are not charged, and tell of the untouched state. REFUND and RESET: may be NULL
     * overflow  set when any target was judged in an overflow bucket; may be NULL
     * TG_E_STORE no answer in time: nothing is known to be taken. Never blocks past the store's timeout behind a stopped
     *           holder, never allocates. */
    tg_status (*apply)(tg_store *store, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
                       tg_result *results, bool *overflow, tg_error *error);
    /* NULL: TG_E_UNSUPPORTED. One atomic step like `apply`, by the store's own timeout.
     *
     * targets  TAKE: as of a hit. SETTLE, RENEW: those that were charged, each with what it was charged, `own` as in REFUND
     * A lease that has ended before it is settled or renewed has given its units back: then all of `actual` is taken. One that
     * has not, but is not found, was forgotten with its state (reset, evicted): then only what is above the estimate. */
    tg_status (*lease)(tg_store *store, tg_lease_op op, const tg_target *targets, size_t target_count, tg_lease *lease,
                       tg_result *results, bool *overflow, tg_error *error);
    /* A client for one loop; NULL where `remote` is false. Takes a reference to the store; connects with its first call.
     * No watch of a descriptor may outlive it: epoll forgets a closed one only with its last duplicate. TG_E_NOMEM. */
    tg_status (*async_open)(tg_store *store, const tg_async_loop *loop, tg_store_async **client, tg_error *error);
    /* TG_E_RULE when the store could never hold this rule's state: says which size would do. */
    tg_status (*admit_rule)(tg_store *store, const tg_rule *rule, tg_error *error);
    /* May be NULL. What a rule's scope stands for, for stores whose keys a person reads. TG_E_NOMEM. */
    tg_status (*name_rule)(tg_store *store, const tg_rule *rule, const char *space, const char *name, tg_error *error);
    uint64_t (*now_us)(tg_store *store);
    int64_t (*utc_offset_us)(tg_store *store);
    tg_status (*stats)(tg_store *store, tg_store_stats *stats, tg_error *error);
    void (*close)(tg_store *store); /* the last reference is gone */
    /* May be NULL. Says in notices what an operator should know; nothing that serves calls it, and it may take seconds. */
    tg_status (*examine)(tg_store *store, tg_error *error);
    /* Counters for the operator, for all processes together; all NULL where a store keeps none.
     * metric_name   where a policy counts, kept by the store until it is closed; NULL: no room. Allocates
     * metric_line   its TG_METRICS counters, this thread's share of them: for one relaxed add each, no lock. They stay
     *               valid until the store is closed; which ones they are may change from call to call
     * latency_add   how long one decision took, of those that were measured */
    const tg_metric_name *(*metric_name)(tg_store *store, const char *space, const char *name);
    _Atomic uint64_t *(*metric_line)(tg_store *store, const tg_metric_name *name);
    void (*latency_add)(tg_store *store, uint64_t latency_ns);
    /* May be NULL, and give NULL: the TG_WATCH_WORDS of a policy, which all processes share. */
    _Atomic uint64_t *(*watch_line)(tg_store *store, const tg_metric_name *name);
    tg_status (*metrics)(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count,
                         tg_latency_metrics *latency, tg_error *error);
    /* Overrides and pauses; NULL where a store keeps none. override_set takes the place of the one of the same policy,
     * identity and kind; with until_us 0 it ends that. override_list gives those that stand, of one policy and identity (and
     * of everybody) where they are not NULL; lock-free and without allocation, since judges call it. */
    tg_status (*override_set)(tg_store *store, const tg_override *override, tg_error *error);
    tg_status (*override_list)(tg_store *store, const char *space, const char *policy, const uint8_t identity[16],
                               tg_override *overrides, size_t room, size_t *count, tg_error *error);
} tg_store_ops;

struct tg_store {
    const tg_store_ops *ops;
    char *uri;        /* canonical; the registry's key together with `clock` */
    tg_clock *clock;  /* NULL: real */
    _Atomic unsigned references; /* the first and the last under the registry's lock */
    struct tg_store *next;
    unsigned private_kinds; /* of tg_store_options; a constructor of keys sets it itself */
    uint8_t keyed[16];   /* digest of secret and private kinds, as named when it was opened */
    bool in_slots;       /* a call about several identities is several: one for each slot that they lie in */
    bool counts_denied;  /* tg_target.counts_denied is followed */
    uint64_t timeout_us; /* of stores that are remote: how long one judgement may wait; else 0 */
    const char *shown;   /* the URI for messages where it may hold a password; NULL: `uri` */
    /* How many overrides stand, in memory that all processes share; NULL: the store keeps none. */
    _Atomic(const _Atomic uint64_t *) overrides;
    /* Moves on when what the store said before may no longer hold: a connection was lost, another server answers. */
    _Atomic uint64_t epoch;
    struct tg_keeper *keeper; /* of the stores that count for all machines: stores/redis/keep.h; else NULL */
    /* Trouble speaks once when it begins and once when it ends; kept by core/failure.c. All zero when made. */
    atomic_bool failing;
    _Atomic uint64_t last_failure_us; /* CLOCK_MONOTONIC */
    _Atomic uint64_t failures;        /* since trouble began */
};

/* A URI split into its pieces; parsed by store.c, so that every store reports a bad one alike. */
typedef struct tg_store_uri {
    tg_text scheme; /* "shared" */
    tg_text rest;   /* between "://" and "?" */
    struct {
        tg_text name, value;
    } options[16];
    size_t option_count;
    bool tiered; /* tiers stand before it, whose own options have been taken out */
} tg_store_uri;

/* Each store's constructor: fills a new tg_store's ops; store.c does the rest. */
tg_status tg__table_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **store, tg_error *error);
tg_status tg__redis_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **store, tg_error *error);
tg_status tg__tiered_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **store, tg_error *error);

/* One that answers nothing, but for `why`: each decision is a store failure. Not in the registry. TG_E_NOMEM. */
tg_status tg__silent_open(const char *uri, tg_clock *clock, const tg_error *why, tg_store **store, tg_error *error);

/* What a store's address alone tells, without opening it: that it is one, and, where `rule` is not NULL, whether such a
 * store could hold it. Users and groups of another host may be named. TG_E_CONFIG, TG_E_UNSUPPORTED, TG_E_RULE. */
tg_status tg__store_check_address(tg_text uri, const tg_rule *rule, tg_error *error);
tg_status tg__table_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error);
tg_status tg__redis_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error);
tg_status tg__tiered_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error);

/* Takes another reference. */
void tg__store_retain(tg_store *store);
/* What a store says right before it waits for the network; it holds no lock then. See tg_store_before_waiting. */
void tg__store_waits(void);

static inline tg_status
tg__async_begin(tg_store_async *client, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
                tg_result *results, tg_async_done *done, void *data, tg_store_call **call, tg_error *error)
{
    return client->ops->begin(client, op, targets, target_count, until_us, results, done, data, call, error);
}

#endif
