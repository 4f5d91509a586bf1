/* A cluster's insides, shared by the calls that wait (cluster.c) and those that do not (cluster_async.c).
 * Must not enter: what a rule means. */
#ifndef TG_REDIS_CLUSTER_H
#define TG_REDIS_CLUSTER_H

#include "stores/redis/async.h"
#include "stores/redis/redis.h"

#define TG__NODES_MAX 256
#define TG__NOBODY UINT16_MAX

typedef struct tg_node {
    tg_redis_store store;
    unsigned users; /* calls that hold this pointer; under the cluster's lock */
} tg_node;

struct tg_cluster {
    tg_store base; /* first: a tg_store * is one of these */
    tg_redis_address address; /* of no node: seeds, user, password, options */
    uint64_t timeout_us;
    bool manual;
    tg_clock *clock;
    tg_redis_names *names;

    pthread_mutex_t lock;
    pthread_cond_t refreshed;
    tg_node *nodes[TG__NODES_MAX];
    uint16_t owner[TG__SLOTS]; /* index into nodes, or TG__NOBODY */
    bool refreshing;
    unsigned turn; /* who is asked for the map first */
    uint64_t tried_at_us, refreshed_at_us; /* the map */
    tg_redis_wire map_wire; /* of who is refreshing */

    bool secret_given, secret_known;
    bool warned_secret;
    atomic_bool told_leases;
    char secret[128];
    tg_redis_keyring keyring;

    _Atomic int64_t ahead_us;
    _Atomic uint64_t timeouts;
};

typedef struct tg_part_call { /* what lies in one slot */
    unsigned slot;
    size_t count;
    uint8_t index[TG_TARGETS_MAX]; /* of the caller's targets */
    tg_call call;
    tg_heard heard;
    tg_node *node; /* who answered */
    bool charged;
    bool refused; /* a target of it was denied when it was asked last */
    bool counted; /* the denied hit, by itself, where that is to count */
    bool knocks;  /* what is asked now is that */
    bool brief; /* see tg__question_time */
    bool done;  /* each slot for itself: this one has answered */
    /* Of a reservation; NULL else. Each node has its own clock, so each slot its own end. */
    const tg_lease *lease;
    tg_lease_op lease_op;
    tg_lease own; /* what `lease` points to: the whole, with this slot's end */
    uint64_t now_us, until_us; /* by the node's clock: when it answered, and the end that it then set */
    bool there, full;          /* RENEW: it was still held; TAKE: no room for another */
} tg_part_call;

typedef struct tg_parts {
    tg_part_call *parts[TG_DIMENSIONS_MAX];
    tg_part_call room[TG_DIMENSIONS_MAX];
    size_t count;
} tg_parts;

/* ---- what both do ---- */

/* Whose slot it is, held until it is released. NULL: nobody's, or not known. */
tg_node *tg__owner_hold(tg_cluster *cluster, unsigned slot);
void tg__node_release(tg_cluster *cluster, tg_node *node); /* accepts NULL */
/* The node that a redirection names, held; with MOVED the slot is its from now on. */
tg_node *tg__cluster_follow(tg_cluster *cluster, unsigned slot, const char *reply, const char *asked, bool moved,
                            tg_error *error);
/* These two wait, by the deadline. */
tg_trouble tg__cluster_refresh(tg_cluster *cluster, const tg_redis_host *first, uint64_t deadline_us, tg_error *error);
tg_trouble tg__cluster_keyring(tg_cluster *cluster, uint64_t deadline_us, tg_redis_keyring *keyring, tg_error *error);
/* Whether the map was last looked at long enough ago to look again on behalf of a node that does not answer. */
bool tg__cluster_look_is_due(tg_cluster *cluster);
/* By slot, in the slots' order. false: more than TG_DIMENSIONS_MAX of them. */
bool tg__cluster_split(const tg_redis_keyring *keyring, const tg_target *targets, size_t target_count, tg_parts *parts);
/* Where what is denied counts: the groups that are denied, a bit each, and the next part from `at` on that has targets of
 * theirs and has not counted by itself; the count of parts where there is none. */
unsigned tg__cluster_denied_groups(const tg_target *targets, size_t target_count, const tg_result *results);
size_t tg__cluster_knocks_next(const tg_parts *parts, size_t at, const tg_target *targets, unsigned groups);
/* A target as its part is asked to count what those groups deny. */
void tg__cluster_knocking(tg_target *target, unsigned groups);
/* What stands in front of a charge: a node that is known not to answer must not cost the others a charge and a refund
 * with every request. */
bool tg__cluster_may_ask(tg_cluster *cluster, const tg_parts *parts, tg_error *error);

/* Until when a hit on several slots charges: a fifth of what is left is kept for giving back. */
uint64_t tg__cluster_charges_until(uint64_t deadline_us);

/* tg_store_ops.async_open. */
tg_status tg__cluster_async_open(tg_store *store, const tg_async_loop *loop, tg_store_async **client, tg_error *error);

#endif
