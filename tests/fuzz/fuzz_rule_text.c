/* Any bytes as rule text: an answer in bounds, errors that point into the text, and what was read is written and read
 * back the same. */
#include "base/base.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check(bool holds)
{
    if (!holds)
        abort();
}

static void
check_rule(const tg_rule *rule)
{
    if (rule->algorithm == TG_DENY) {
        check(rule->limit == 0 && rule->period_us == 0 && rule->burst == 0);
    } else {
        const bool bucket = rule->algorithm == TG_TOKEN_BUCKET || rule->algorithm == TG_LEAKY_BUCKET;
        check(rule->algorithm >= TG_FIXED_WINDOW && rule->algorithm < TG_DENY);
        check(rule->limit >= 1 && rule->limit <= TG_LIMIT_MAX);
        check(rule->period_us >= TG_PERIOD_US_MIN && rule->period_us <= TG_PERIOD_US_MAX);
        check(bucket ? rule->burst >= 1 && rule->burst <= TG_LIMIT_MAX : rule->burst == rule->limit);
        check(rule->resolution_us <= rule->period_us);
        check(rule->resolution_us == 0 || rule->algorithm == TG_SLIDING_LOG);
        check(!rule->aligned || rule->algorithm == TG_FIXED_WINDOW);
    }
    char text[TG_RULE_TEXT_MAX];
    tg_rule_text(rule, text);
    tg_rule again[TG_RULES_MAX];
    size_t count;
    check(tg_rules_parse(tg_text_of(text), TG_ALGORITHM_DEFAULT, again, &count, NULL) == TG_OK && count == 1);
    check(again->limit == rule->limit && again->period_us == rule->period_us && again->burst == rule->burst);
    check(again->algorithm == rule->algorithm && again->aligned == rule->aligned);
    check(again->resolution_us == rule->resolution_us);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    const tg_algorithm preferred = (tg_algorithm)(data[0] % TG_DENY);
    char *exact = malloc(size); /* so that a read past the end is seen */
    check(exact != NULL);
    memcpy(exact, data + 1, size - 1);
    tg_rule rules[TG_RULES_MAX];
    tg_error error = { .status = TG_OK };
    size_t count;
    if (tg_rules_parse((tg_text){ exact, size - 1 }, preferred, rules, &count, &error) == TG_OK) {
        check(count >= 1 && count <= TG_RULES_MAX);
        for (size_t i = 0; i < count; i++)
            check_rule(&rules[i]);
    } else {
        check(error.status == TG_E_RULE && count == 0);
        check(error.offset + error.length <= size - 1);
        check(error.message[0] != '\0' && memchr(error.message, '\0', sizeof error.message));
    }
    free(exact);
    return 0;
}
