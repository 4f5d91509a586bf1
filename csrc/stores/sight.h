/* A state as a store saw it, and what a decision over such states says. For stores whose state lies elsewhere: the server
 * tells what it saw, and the numbers are worked out here.
 * Must not enter: where a sight comes from, clocks, I/O. */
#ifndef TG_SIGHT_H
#define TG_SIGHT_H

#include "algorithms/algorithms.h"
#include "stores/store.h"

struct tg_sight {
    uint64_t now_us; /* the store's clock when it was seen */
    union {
        tg_state state;
        struct { /* a sliding log's; a time of -1: there is none */
            uint64_t units;        /* within the period */
            int64_t newest_us;     /* its newest entry */
            int64_t makes_room_us; /* the entry with whose leaving the cost that was asked for fits; -1 also where it does */
            int64_t last_us;       /* the entry with whose leaving it is fresh */
            int64_t leaves_us;     /* the oldest entry that weighs something */
        } log;
    };
};

/* Fills `results` as tg_store_ops.apply does for HIT and PEEK, from the states that all targets see at `now_us`.
 *
 * first_of  for each target the first one with the same counts
 * denied    a `deny` rule is among the targets: nothing was taken
 * expected  0 or 1: whether all has to fit; -1: either
 * Returns false, with `results` untouched, where it does not come out as expected or a log shows times it cannot hold. */
bool tg__sights_tell(tg_op op, const tg_target *targets, const uint8_t *first_of, size_t target_count, bool denied,
                     const tg_sight *sights, uint64_t now_us, int expected, tg_result *results);

/* Whether what a sight says of this target at this moment is all that would be needed to tell it: as long as nothing has
 * left a log since, and `asked_cost` is what its makes_room_us is about. */
bool tg__sight_holds(const tg_target *target, const tg_sight *sight, uint64_t asked_cost, uint64_t now_us);
/* What its hit, which is let through, makes of a sight at that sight's own time. */
void tg__sight_take(const tg_target *target, tg_sight *sight);
/* By this sight alone. */
bool tg__sight_fits(const tg_target *target, const tg_sight *sight, uint64_t now_us);

#endif
