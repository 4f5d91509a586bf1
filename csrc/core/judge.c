/* One request under the rules file in force: which policies speak of it, what they say together, how it is answered.
 * Must not enter: YAML, faces, how a new reading comes into force. */
#include "core/gate.h"

#include "core/metrics.h"

/* What the client is told, in the words of the policy that is reported. */
static void
answer_for(const tg_snapshot *now, tg_store *store, const size_t *found, size_t count, const tg_judgement *judgement,
           size_t reported, tg_answer *answer)
{
    const tg_style *style = &now->config->policies[found[reported]].style;
    const char *names[TG_LIMITERS_MAX];
    tg_style_facts facts = { .names = names, .name_count = count };
    if (style->needs_facts) {
        for (size_t i = 0; i < count; i++)
            names[i] = now->config->policies[found[i]].name;
        if (style->epoch)
            facts.utc_us = tg_store_now_us(store) + (uint64_t)tg_store_utc_offset_us(store);
    }
    tg__answer_make(judgement, style, &facts, answer);
}

tg_status
tg__snapshot_judge(const tg_snapshot *now, tg_store *store, const tg_request *request, uint64_t cost,
                   const tg_decision *const *prior, size_t prior_count, tg_judgement *judgement, tg_answer *answer,
                   tg_error *error)
{
    size_t found[TG_LIMITERS_MAX], reported = 0;
    tg_limiter *limiters[TG_LIMITERS_MAX];
    const size_t count = tg__config_match(now->config, request, found);
    if (count == 0) {
        tg__judgement_unmatched(judgement);
        if (answer)
            tg_answer_make(judgement, answer);
        return TG_OK;
    }
    for (size_t i = 0; i < count; i++)
        limiters[i] = now->limiters[found[i]];
    const tg_status status = tg__limiters_judge(limiters, count, request, cost, prior, prior_count, judgement,
                                                &reported, error);
    if (status != TG_OK)
        return status;
    if (!request->peek)
        tg__metrics_judged(limiters, count, judgement, reported);
    const uint16_t own_status = now->config->policies[found[reported]].style.statuses[judgement->outcome];
    if (own_status)
        judgement->status = own_status;
    if (answer)
        answer_for(now, store, found, count, judgement, reported, answer);
    return TG_OK;
}
