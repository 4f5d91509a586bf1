/* The deny cache: states that a remote store showed when it denied, so that it need not be asked again before they can have
 * changed. Fixed memory; any number of threads.
 * Must not enter: the store that is asked, what is done where nothing is known. */
#ifndef TG_DENIALS_H
#define TG_DENIALS_H

#include "stores/sight.h"

#define TG__DENIALS 8192 /* states kept at most, 1 MiB; pages that were never needed take no memory */
#define TG__DENIAL_LIFE_US UINT64_C(5000000)       /* a reset made elsewhere shows after so long */
#define TG__DENIAL_LIFE_SHORT_US UINT64_C(1000000) /* where units may be given back */

typedef struct tg_denials tg_denials;

/* Who is asking, for one target; hashed once per identity. */
typedef struct tg_denial_key {
    uint64_t words[2];
} tg_denial_key;

tg_denials *tg__denials_open(void); /* NULL: no memory */
void tg__denials_close(tg_denials *denials); /* accepts NULL */
/* In a forked child, while it has one thread: what was being changed by a thread that is not there any more is forgotten. */
void tg__denials_after_fork(tg_denials *denials);

void tg__denials_keys(const tg_denials *denials, const tg_target *targets, size_t count, tg_denial_key *keys);

/* What is to be remembered of one target. Times are on the caller's clock. */
typedef struct tg_denial {
    uint64_t sent_us;  /* when the store was asked: the state was seen then or later */
    uint64_t until_us;
    uint64_t epoch;    /* of the store when it was asked */
    tg_sight sight;
} tg_denial;

/* What an answer has to be of to be remembered or told: the store's epoch when it was asked, and this cache's own. */
uint64_t tg__denials_epoch(const tg_denials *denials, uint64_t store_epoch);
/* Goes with a question: what is given back while it is under way makes its answer old. */
uint64_t tg__denials_mark(const tg_denials *denials, const tg_denial_key *key);
void tg__denials_put(tg_denials *denials, const tg_target *target, const tg_denial_key *key, uint64_t mark,
                     const tg_denial *denial);

typedef enum tg_denial_found {
    TG__DENIAL_ABSENT, /* nothing is known of it */
    TG__DENIAL_MOVED,  /* it was known and has changed since: ask */
    TG__DENIAL_HOLDS
} tg_denial_found;
/* `as_us` receives the store's time at `now_us`, or a later one. */
tg_denial_found tg__denials_find(tg_denials *denials, const tg_target *target, const tg_denial_key *key, uint64_t epoch,
                                 uint64_t now_us, tg_sight *sight, uint64_t *as_us);
/* How often the store was asked, while this target was known to deny, only because of others beside it. Counts this time. */
unsigned tg__denials_company(tg_denials *denials, const tg_target *target, const tg_denial_key *key);
/* What is known of it has changed. `given`: units came back, so that what is under way now is old as well. */
void tg__denials_drop(tg_denials *denials, const tg_denial_key *key, bool given);

#endif
