/* The tiered store's insides: tiers before a remote store that saves it questions.
 * Must not enter: Redis, sockets; the store behind is asked through its operations alone. */
#ifndef TG_TIERED_H
#define TG_TIERED_H

#include "stores/tiered/flush.h"
#include "stores/tiered/grants.h"

typedef struct tg_tiered {
    tg_store base;   /* first: a tg_store * is one of these */
    tg_store_ops ops; /* of this store: `lease` is what the store behind has */
    tg_store *inner; /* the store behind: a reference that the registry does not know of */
    tg_clock *clock; /* NULL: real */
    tg_denials *denials;
    tg_store *local;        /* local=: a table of this process, judged first; NULL: not asked for */
    unsigned local_percent; /* of each rule, for one client */
    tg_grants *grants;      /* lease=; NULL: not asked for */
    uint64_t lease, workers;
    tg_flush *flush;        /* flush=; NULL: not asked for */
    uint64_t flush_us;
    _Atomic uint64_t gives_back[16]; /* a bit for what scopes hash to whose units were ever given back */
    struct tg_tiered *next; /* all of this process, for its forked children */
} tg_tiered;

static inline tg_tiered *
tg__tiered_of(tg_store *store)
{
    return (tg_tiered *)store;
}

uint64_t tg__tiered_now_us(const tg_tiered *tiered);
uint64_t tg__tiered_epoch(const tg_tiered *tiered);
void tg__tiered_flushes_at_exit(void); /* what waits in any of this process' */

/* One question to the store behind, with what is to be learnt from its answer. */
typedef struct tg_tier_question {
    tg_op op;
    size_t count;
    bool learns;      /* from a denial */
    bool local;       /* the first layer has been charged */
    uint64_t batch;   /* times the cost is asked for; 1: as it is */
    uint64_t sent_us; /* on the tiers' own clock */
    uint64_t epoch;
    tg_denial_key *keys;  /* `count` of each of these */
    uint64_t *marks;
    tg_sight *sights;
    tg_target *targets;   /* the caller's, with a place for what was seen */
} tg_tier_question;

/* The answer where it is known; else `question` (whose arrays are the caller's) is what the store behind is to be asked. */
bool tg__tiered_answers(tg_tiered *tiered, tg_op op, const tg_target *targets, size_t count, tg_result *results,
                        tg_tier_question *question);
/* After the store behind has answered, or not. true: a batch did not fit, and the question, which is now about what is needed
 * alone, is to be asked again. */
bool tg__tiered_learn(tg_tiered *tiered, tg_tier_question *question, tg_status status, tg_result *results);

/* tg_store_ops.async_open. */
tg_status tg__tiered_async_open(tg_store *store, const tg_async_loop *loop, tg_store_async **client, tg_error *error);

#endif
