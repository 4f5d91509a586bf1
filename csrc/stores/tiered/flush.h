/* Hits that are answered here and told to the store behind a moment later: flush=. Fixed memory; any number of threads,
 * and one of its own that sends.
 * Must not enter: arithmetic of an algorithm, decisions over several targets. */
#ifndef TG_FLUSH_H
#define TG_FLUSH_H

#include "stores/tiered/denials.h"

#define TG__FLUSH_PLACES 2048 /* 1.5 MiB at most; pages that were never needed take no memory */
#define TG__FLUSH_LIFE_US UINT64_C(1000000) /* a state that nothing was heard of for so long is asked about */

typedef struct tg_flush tg_flush;
struct tg_tiered;

tg_flush *tg__flush_open(struct tg_tiered *tiered, uint64_t every_us); /* NULL: no memory */
void tg__flush_close(tg_flush *flush); /* sends what waits, as `tg__flush_now`; accepts NULL */
/* What waits is the parent's, which sends it. While the child has one thread. */
void tg__flush_after_fork(tg_flush *flush);
/* Sends what waits until one call fails or a second is over. */
void tg__flush_now(tg_flush *flush);

/* Whether the target's cost fits by what is known and what waits: then it waits too, and `told` is what a hit's result
 * says. */
bool tg__flush_take(tg_flush *flush, const tg_target *target, const tg_denial_key *key, uint64_t epoch, uint64_t now_us,
                    tg_result *told);
/* false: it does not wait any more, and stays charged (too few pass, never too many) unless the store behind refunds it. */
bool tg__flush_give_back(tg_flush *flush, const tg_target *target, const tg_denial_key *key);
/* The state as a question sent in this epoch found it; `charged`: and then took from it. */
void tg__flush_learn(tg_flush *flush, const tg_target *target, const tg_denial_key *key, uint64_t epoch,
                     const tg_sight *sight, bool charged);
void tg__flush_drop(tg_flush *flush, const tg_denial_key *key); /* with what waits */

#endif
