/* Units that were taken ahead from the store behind and are this process' to give out: leases. Fixed memory; any number of
 * threads. Must not enter: how they are taken. */
#ifndef TG_GRANTS_H
#define TG_GRANTS_H

#include "stores/tiered/denials.h"

#define TG__GRANTS 4096
#define TG__GRANT_LIFE_US UINT64_C(1000000) /* what is not given out by then is lost to others until the rule forgets it */

typedef struct tg_grants tg_grants;

tg_grants *tg__grants_open(void); /* NULL: no memory */
void tg__grants_close(tg_grants *grants); /* accepts NULL */
/* A child forked has none of its parent's: they would be given out twice. While it has one thread. */
void tg__grants_after_fork(tg_grants *grants);

typedef enum tg_grant_found {
    TG__GRANT_NONE,
    TG__GRANT_SCARCE, /* a batch did not fit a moment ago: ask for what is needed, no more */
    TG__GRANT_TAKEN
} tg_grant_found;

/* Takes the target's cost. `told` receives what the result of a hit says. */
tg_grant_found tg__grants_take(tg_grants *grants, const tg_target *target, const tg_denial_key *key, uint64_t epoch,
                               uint64_t now_us, tg_result *told);
void tg__grants_give_back(tg_grants *grants, const tg_target *target, const tg_denial_key *key);
/* `units` were taken ahead at `sent_us`, with this result; 0: it is scarce. */
void tg__grants_put(tg_grants *grants, const tg_target *target, const tg_denial_key *key, uint64_t epoch, uint64_t sent_us,
                    uint64_t units, const tg_result *result);
void tg__grants_drop(tg_grants *grants, const tg_denial_key *key);

#endif
