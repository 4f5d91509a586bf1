/* What a Redis store keeps for operators: counts of decisions of all machines, overrides and pauses. Counted in memory and
 * carried to the server twice a second by a thread of the process, which brings the overrides back with it; no request
 * waits for that.
 * Must not enter: what is counted and when, what an override does to a decision. */
#ifndef TG_REDIS_KEEP_H
#define TG_REDIS_KEEP_H

#include "stores/redis/redis.h"

/* ---- counts of this process ---- */

typedef struct tg_counts tg_counts;

tg_counts *tg__counts_open(void); /* NULL: no memory */
void tg__counts_close(tg_counts *counts);
const tg_metric_name *tg__counts_name(tg_counts *counts, const char *space, const char *name);
_Atomic uint64_t *tg__counts_line(const tg_metric_name *name);
void tg__counts_latency_add(tg_counts *counts, uint64_t latency_ns);
/* What has been counted since tg__counts_carried, as lines of text: at most `size` bytes, the rest later. Returns how many. One
 * caller at a time. */
size_t tg__counts_write(tg_counts *counts, char *text, size_t size);
void tg__counts_carried(tg_counts *counts); /* what was written is on the server */
void tg__counts_after_fork(tg_counts *counts); /* what the parent has not carried yet is the parent's */
/* Lines of text, of all processes. What is no line of ours is passed over. */
void tg__counts_read(tg_text text, tg_policy_metrics *policies, size_t room, size_t *count, tg_latency_metrics *latency);

/* ---- overrides as last seen ---- */

#define TG__OVERRIDES_MAX 64

typedef struct tg_orders tg_orders;

tg_orders *tg__orders_open(void);
void tg__orders_close(tg_orders *orders);
void tg__orders_after_fork(tg_orders *orders);
const _Atomic uint64_t *tg__orders_standing(const tg_orders *orders);
/* Takes the place of what was seen before. One caller at a time. false: a reader is in the way, try again soon. */
bool tg__orders_see(tg_orders *orders, tg_text text, const tg_redis_keyring *keyring);
/* Lock-free. As tg_store_ops.override_list. */
void tg__orders_list(tg_orders *orders, uint64_t now_us, const char *space, const char *policy, const uint8_t identity[16],
                     tg_override *overrides, size_t room, size_t *count);

#define TG__ORDER_BYTES_MAX 1200
/* The two words of a script call: what it takes the place of, and what it says. */
void tg__order_words(const tg_override *override, const tg_redis_keyring *keyring, char place[TG__ORDER_BYTES_MAX],
                     char says[TG__ORDER_BYTES_MAX]);

/* Both escape names alike: '=' and the text with %XX for what is not plain. Returns the length. */
size_t tg__escape(char *to, const char *text);
/* false: not such a text, or longer than `size` - 1. */
bool tg__unescape(tg_text text, char *to, size_t size);

/* ---- how many keys there are ---- */

typedef struct tg_census {
    uint64_t keys, bytes; /* of ours */
    uint64_t sampled;     /* keys that were looked at; 0: nothing is known */
} tg_census;

#define TG__GROWTH_LOOKS 10 /* a minute apart */
#define TG__GROWTH_LEAST UINT64_C(100000) /* keys: fewer are nobody's trouble */

typedef struct tg_growth {
    uint64_t looks[TG__GROWTH_LOOKS]; /* the oldest first */
    unsigned count;
    uint64_t told_at; /* 0: not told, or it has fallen to half of that since */
} tg_growth;

/* Whether it is to be told now: many keys, four times as many as ten looks ago, and never noticeably fewer between. */
bool tg__growth_look(tg_growth *growth, uint64_t keys);

/* ---- the keeper ---- */

typedef struct tg_keeper tg_keeper;

/* How a keeper finds whom it asks: one server, or the node of a cluster that has a slot. */
typedef struct tg_keeper_ways {
    tg_redis_store *(*hold)(tg_store *store, tg_text hashed); /* NULL: none is known */
    void (*release)(tg_store *store, tg_redis_store *server); /* may be NULL */
    void (*heard)(tg_store *store, int64_t ahead_us);         /* the server's clock minus ours (monotonic) */
    /* All NULL but for a cluster. */
    bool (*keyring)(tg_store *store, tg_redis_keyring *keyring); /* false: not known yet */
    void (*moved)(tg_store *store, uint64_t deadline_us); /* the slot is another's now: look again */
    /* Who has keys, each held; NULL: whom `hold` gives. Returns how many, at most `room`. */
    size_t (*masters)(tg_store *store, tg_redis_store **servers, size_t room);
    void (*begin_child)(tg_store *store); /* in a forked child; a cluster has a keeper before it knows a node */
} tg_keeper_ways;

tg_keeper *tg__keeper_open(tg_store *store, const tg_keeper_ways *ways, bool manual);
/* Carries what is left, within a short while; its thread is gone then. Accepts NULL. */
void tg__keeper_close(tg_keeper *keeper);
/* As last sampled; a process that has no thread for it asks. */
tg_status tg__keeper_census(tg_keeper *keeper, tg_census *census, tg_error *error);
/* What the thread does once a minute. */
void tg__keeper_look(tg_keeper *keeper);

/* tg_store_ops of these names, of every store whose `keeper` is set. */
const tg_metric_name *tg__kept_metric_name(tg_store *store, const char *space, const char *name);
_Atomic uint64_t *tg__kept_metric_line(tg_store *store, const tg_metric_name *name);
void tg__kept_latency_add(tg_store *store, uint64_t latency_ns);
tg_status tg__kept_metrics(tg_store *store, tg_policy_metrics *policies, size_t room, size_t *count,
                           tg_latency_metrics *latency, tg_error *error);
tg_status tg__kept_override_set(tg_store *store, const tg_override *override, tg_error *error);
tg_status tg__kept_override_list(tg_store *store, const char *space, const char *policy, const uint8_t identity[16],
                                 tg_override *overrides, size_t room, size_t *count, tg_error *error);

#endif
