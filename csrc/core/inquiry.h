/* Deciding without waiting. The same functions judge as for callers that wait: where the store has no answer yet they
 * return TG__PENDING from under a question, and begin again from the top when the answer has come, with the answers so far
 * given to them at once. So there is one judging, and what it does besides (counting, notices) it does once.
 * Must not enter: loops, calls, how a store is asked. */
#ifndef TG_INQUIRY_H
#define TG_INQUIRY_H

#include "core/core.h"

#define TG__PENDING ((tg_status)1) /* a question is put: no status that leaves core/ */

/* The (rule, identity) pairs of one call. Identities and what is known of each result before the store is asked stand in
 * the decision, so that nothing is copied twice. */
typedef struct tg_target_list {
    tg_target targets[TG_TARGETS_MAX];
    size_t count;
} tg_target_list;

enum { TG_QUESTIONS_MAX = 4 }; /* of one judgement: enforced policies, paused ones, challenges, shadows */

struct tg_inquiry {
    /* The question: all it points to is in here or in the caller's decision, and stays. */
    tg_op op;
    tg_target_list plan;
    tg_decision asked; /* its results and identities; of a limiter's own call the caller's decision has them */
    uint64_t began_ns; /* 0: its time is not taken */
    /* The answer, while the judge is told. */
    bool answered;
    tg_status status;
    const tg_error *error;
    /* What was decided on the answers before, for judges that begin again. */
    tg_decision *said; /* TG_QUESTIONS_MAX - 1 of them; NULL: there is one question only */
    uint8_t said_count, told; /* told: of these, in this turn of the judge */
    uint8_t paused;           /* a bit for each place of judge.c, as seen in the first turn */
};

/* Whether what is being done now was done already, in a turn before. */
static inline bool
tg__inquiry_repeats(const tg_inquiry *inquiry)
{
    return inquiry && (inquiry->told < inquiry->said_count || inquiry->answered);
}

/* The pieces of the calls that wait, for those that do not. */

/* The targets of a limiter's own call; identities and results stand in the decision. */
tg_status tg__limiter_plan(const tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                           tg_target_list *plan, tg_decision *decision, tg_error *error);
/* Before and after the store is asked. Its failure is answered by on_store_failure. */
uint64_t tg__decision_begun(const tg_limiter *limiter, tg_op op);
void tg__decision_answered(tg_limiter *limiter, tg_op op, const tg_target_list *plan, tg_decision *decision, uint64_t began_ns,
                           tg_status status, const tg_error *error);
/* As on_store_failure answers, where it is not the store that is silent. */
void tg__decision_degraded(tg_limiter *limiter, tg_op op, const tg_target_list *plan, tg_decision *decision);
/* What a decision has taken, and that it is given back. */
size_t tg__refund_targets(const tg_decision *decision, tg_target targets[TG_TARGETS_MAX]);
void tg__refund_done(tg_decision *decision);
/* tg_limiters_judge. */
tg_status tg__limiters_judge(tg_limiter *const *limiters, size_t limiter_count, const tg_matter *matter,
                             tg_judgement *judgement, tg_error *error);

#endif
