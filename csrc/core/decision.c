/* From results to one decision. */
#include "core/core.h"

#include <assert.h>

/* Whether result `a` is to be reported rather than `b`, which stands before it in the list. */
static bool
reported_before(const tg_result *a, const tg_result *b, bool allowed)
{
    if (allowed && a->remaining != b->remaining)
        return a->remaining < b->remaining;
    if (!allowed && a->retry_after_us != b->retry_after_us)
        return a->retry_after_us > b->retry_after_us; /* TG_NEVER is the longest */
    return a->reset_after_us > b->reset_after_us;
}

void
tg__decision_report(tg_decision *decision)
{
    assert(decision->result_count > 0);
    const tg_result *results = decision->results;
    bool allowed = true;
    for (size_t i = 0; i < decision->result_count; i++)
        allowed = allowed && results[i].allowed;

    size_t reported = TG_TARGETS_MAX;
    uint64_t remaining = UINT64_MAX, delay_us = 0;
    for (size_t i = 0; i < decision->result_count; i++) {
        if (results[i].remaining < remaining)
            remaining = results[i].remaining;
        if (allowed && results[i].delay_us > delay_us)
            delay_us = results[i].delay_us;
        if (results[i].allowed != allowed)
            continue; /* of a denied decision only those that deny are reported */
        if (reported == TG_TARGETS_MAX || reported_before(&results[i], &results[reported], allowed))
            reported = i;
    }
    decision->allowed = allowed;
    decision->reported = (uint8_t)reported;
    decision->limit = results[reported].rule.limit;
    decision->burst = results[reported].rule.burst;
    decision->remaining = remaining;
    decision->retry_after_us = results[reported].retry_after_us;
    decision->reset_after_us = results[reported].reset_after_us;
    decision->delay_us = delay_us;
}

void
tg__rule_scope(tg_rule *rule, tg_text space, tg_text name)
{
    const uint64_t numbers[2] = { rule->algorithm, rule->period_us };
    uint8_t bytes[16];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(numbers[i / 8] >> (8 * (i % 8))); /* the same on every byte order */
    const tg_text pieces[] = { space, name, { (const char *)bytes, sizeof bytes } };
    tg__digest(pieces, sizeof pieces / sizeof *pieces, rule->scope, sizeof rule->scope);
}
