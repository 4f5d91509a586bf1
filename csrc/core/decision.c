/* From results to one decision. */
#include "core/core.h"

#include <assert.h>

/* Whether result `a` is to be reported rather than `b`, which stands before it in the list. */
static inline bool
reported_before(const tg_result *a, const tg_result *b)
{
    if (a->allowed != b->allowed)
        return b->allowed; /* of a denied decision only those that deny are reported */
    if (a->allowed && a->remaining != b->remaining)
        return a->remaining < b->remaining;
    if (!a->allowed && a->retry_after_us != b->retry_after_us)
        return a->retry_after_us > b->retry_after_us; /* TG_NEVER is the longest */
    return a->reset_after_us > b->reset_after_us;
}

TG_EACH_REQUEST void
tg__decision_report(tg_decision *decision)
{
    assert(decision->result_count > 0);
    const tg_result *const results = decision->results, *reported = results;
    uint64_t remaining = results->remaining, delay_us = results->delay_us;
    for (size_t i = 1; __builtin_expect(i < decision->result_count, 0); i++) {
        const tg_result *const result = &results[i];
        if (result->remaining < remaining)
            remaining = result->remaining;
        if (result->delay_us > delay_us)
            delay_us = result->delay_us;
        if (reported_before(result, reported))
            reported = result;
    }
    decision->allowed = reported->allowed; /* one that denies comes before all that allow */
    decision->reported = (uint8_t)(reported - results);
    decision->limit = reported->rule.limit;
    decision->burst = reported->rule.burst;
    decision->remaining = remaining;
    decision->retry_after_us = reported->retry_after_us;
    decision->reset_after_us = reported->reset_after_us;
    decision->delay_us = reported->allowed ? delay_us : 0;
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
