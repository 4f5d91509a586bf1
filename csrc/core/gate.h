/* One reading of the rules file, as judges hold it.
 * Must not enter: how readings replace one another (gate.c). */
#ifndef TG_GATE_H
#define TG_GATE_H

#include "config/config.h"
#include "core/core.h"
#include "core/watch.h"

#include <stdatomic.h>

/* Decisions of one policy since a line was last written about it. */
typedef struct tg_logged {
    _Atomic uint64_t since, refused; /* decisions */
    _Atomic uint64_t next_us;        /* no line before it: CLOCK_MONOTONIC_COARSE */
} tg_logged;

/* Never changed once it is in force. */
typedef struct tg_snapshot {
    tg_config *config;
    const tg_client *client; /* the gate's: see client_entry */
    tg_limiter **limiters;   /* one for each policy, in the file's order; of policies with plans the one for the rest */
    tg_limiter ***plans;     /* for each policy with plans one for each of them, else NULL */
    size_t limiter_count;
    struct tg_logged *logged; /* for each policy, what has been said of it: this and what follows is all that changes */
    tg_watch *watches;       /* for each policy, how its answers go; NULL: none has a `pause_when` */
    bool simple;             /* no policy does more than judge: the short way */
    unsigned reads;          /* TG_READ_ bits: what it looks at in a request */
    tg_gate *brief;          /* whose limiters are made as their policies are met; else NULL */
} tg_snapshot;

/* gate.c: under `brief`, makes the limiters of policies that a request meets. TG_E_CONFIG: the store cannot hold them. */
tg_status tg__snapshot_meet(const tg_snapshot *now, const size_t *found, size_t count, tg_error *error);

/* gate.c: whether the face can know what the policies ask for, and the store hold their rules (NULL: as its address tells).
 * `faces` 0: not said. Opens nothing. */
tg_status tg__config_check(const tg_config *config, unsigned faces, tg_store *store, tg_text uri, tg_error *error);

/* A policy's place in the file, by its name; and the error that there is none, which lists them. */
bool tg__config_find(const tg_config *config, tg_text name, size_t *at);
tg_status tg__config_no_policy(const tg_config *config, tg_text name, tg_error *error);

/* judge.c: tg_gate_judge under a snapshot that stays where it is for the call. */
tg_status tg__snapshot_judge(const tg_snapshot *now, tg_store *store, const tg_matter *matter, tg_judgement *judgement,
                             tg_answer *answer, tg_error *error);

/* The snapshot in force, held until it is let go. `looks`: at the file first, where that is due. */
const tg_snapshot *tg__gate_pin(tg_gate *gate, bool looks, size_t *pinned);
void tg__gate_unpin(tg_gate *gate, size_t pinned);

/* settle.c: tg_gate_settle, question by question. */
typedef struct tg_settling {
    tg_decision *decision; /* the caller's, to be marked */
    uint64_t costs[TG_TARGETS_MAX]; /* of each result, as the response says */
    enum { TG_SETTLE_BEGINS, TG_SETTLE_TAKES, TG_SETTLE_GIVES } phase;
    size_t at; /* the result of which more is taken */
    /* The question. */
    tg_op op;
    tg_target targets[TG_TARGETS_MAX];
    size_t target_count;
    tg_result taken; /* its result, of a hit */
    tg_status status; /* the first failure */
    tg_error error;
} tg_settling;

/* Marks the judgement as settled. What the response says is read now, and is not needed any more. false: nothing is left
 * to do. */
bool tg__settle_begin(tg_settling *settling, const tg_snapshot *now, tg_judgement *judgement, int status,
                      const tg_header *headers, size_t header_count);
/* Hears the answer to the question before, at first none, and puts the next. false: there is none. */
bool tg__settle_next(tg_settling *settling, tg_status answer, const tg_error *error);

#endif
