/* How the answers to a policy's requests go, for `pause_when`: a short count of them, for all processes where the store
 * keeps one, else for this one.
 * Must not enter: what is done about it (judge.c), whose requests they are. */
#ifndef TG_WATCH_H
#define TG_WATCH_H

#include "core/core.h"

#include <stdatomic.h>

struct tg_pause;

typedef struct tg_watch {
    _Atomic uint64_t own[TG_WATCH_WORDS]; /* where the store keeps no line */
    atomic_bool told;                     /* that it has begun, and not that it has ended */
    _Atomic uint64_t quiet_until_us;      /* a rate that goes up and down around its bound does not fill the log */
} tg_watch;

/* Of answers within the period. */
typedef struct tg_watched {
    uint64_t answers, errors;
} tg_watched;

/* One answer. */
void tg__watch_add(tg_watch *watch, const tg_limiter *limiter, const struct tg_pause *pause, bool is_error);
/* Whether nobody is to be refused at this moment. */
bool tg__watch_pauses(tg_watch *watch, const tg_limiter *limiter, const struct tg_pause *pause, tg_watched *watched);
/* One notice as it begins, one as it ends. */
void tg__watch_tell(tg_watch *watch, const tg_limiter *limiter, const struct tg_pause *pause, bool pauses,
                    const tg_watched *watched);
/* Somebody who would have been refused. */
void tg__watch_let_through(tg_watch *watch, const tg_limiter *limiter);

#endif
