/* Overrides and pauses: set, listed, followed.
 * A judge reads them from the store each time there are any, and parses what speaks of its policy: a cache would have to
 * outlive the judges that read it, and a site has few of them for a short time. */
#include "core/overrides.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- following ---- */

static void
digest_of(const tg_identity *identity, uint8_t digest[16])
{
    const tg_text piece = { (const char *)identity->bytes, identity->length };
    tg__digest(&piece, 1, digest, 16);
}

static bool
is_everybody(const tg_override *override)
{
    static const uint8_t nobody[16];
    return memcmp(override->identity, nobody, sizeof nobody) == 0;
}

/* What stands for one client comes before what stands for the whole policy. */
static const tg_override *
choose(const tg_override *list, size_t count, tg_override_kind kind, const uint8_t digest[16])
{
    const tg_override *chosen = NULL;
    for (size_t i = 0; i < count; i++) {
        if (list[i].kind != kind)
            continue;
        if (memcmp(list[i].identity, digest, 16) == 0)
            return &list[i];
        if (is_everybody(&list[i]))
            chosen = &list[i];
    }
    return chosen;
}

enum { OF_ONE_POLICY = 16 };

bool
tg__override_find(const tg_limiter *limiter, const tg_identity *identity, tg_rule rules[TG_RULES_MAX], size_t *count,
                  bool *paused)
{
    tg_override list[OF_ONE_POLICY];
    uint8_t digest[16];
    size_t found = 0;
    *paused = false;
    digest_of(identity, digest);
    if (limiter->store->ops->override_list(limiter->store, limiter->space, limiter->name, digest, list, OF_ONE_POLICY,
                                           &found, NULL) != TG_OK ||
        found == 0)
        return false;
    found = found < OF_ONE_POLICY ? found : OF_ONE_POLICY;
    *paused = choose(list, found, TG_OVERRIDE_PAUSE, digest) != NULL;
    const tg_override *own = choose(list, found, TG_OVERRIDE_RULES, digest);
    *count = 0;
    if (own && tg_rules_parse(tg_text_of(own->rules), TG_ALGORITHM_DEFAULT, rules, count, NULL) == TG_OK) {
        for (size_t i = 0; i < *count; i++)
            tg__rule_scope(&rules[i], tg_text_of(limiter->space), tg_text_of(limiter->name));
        return true;
    }
    memcpy(rules, limiter->rules, limiter->rule_count * sizeof *rules);
    *count = limiter->rule_count;
    return *paused;
}

/* ---- setting ---- */

static tg_status
unsupported(const tg_store *store, tg_error *error)
{
    return tg__error(error, TG_E_UNSUPPORTED, "store %s keeps no overrides", store->shown ? store->shown : store->uri);
}

/* Rules that could not be judged later are refused now. */
static tg_status
check_rules(const tg_limiter *limiter, tg_text text, tg_error *error)
{
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    tg_status status = TG_OK;
    if (text.length >= sizeof((tg_override *)0)->rules)
        return tg__error(error, TG_E_RULE, "the rules of an override are at most %zu bytes long",
                         sizeof((tg_override *)0)->rules - 1);
    status = tg_rules_parse(text, TG_ALGORITHM_DEFAULT, rules, &count, error);
    if (status == TG_OK && count > limiter->rule_count)
        return tg__error(error, TG_E_RULE,
                         "an override of \"%s\" has at most as many rules as it has itself: %zu, not %zu", limiter->name,
                         limiter->rule_count, count);
    for (size_t i = 0; status == TG_OK && i < count; i++)
        status = limiter->store->ops->admit_rule(limiter->store, &rules[i], error);
    return status;
}

/* The identities that the values give; a policy's dimensions without a value are left alone. */
static tg_status
identities_of(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count,
              tg_identity identities[TG_DIMENSIONS_MAX], size_t *count, tg_error *error)
{
    *count = 0;
    if (limiter->by_count == 0) {
        tg_decision decision;
        const tg_status status = tg_limiter_peek(limiter, dimensions, dimension_count, 0, &decision, error);
        if (status != TG_OK)
            return status;
        *count = decision.identity_count;
        memcpy(identities, decision.identities, *count * sizeof *identities);
        return TG_OK;
    }
    tg_part values[TG_DIMENSIONS_MAX * TG_PARTS_MAX];
    size_t value_count = 0;
    for (size_t i = 0; i < dimension_count; i++)
        for (size_t k = 0; k < dimensions[i].part_count && value_count < sizeof values / sizeof *values; k++)
            values[value_count++] = dimensions[i].parts[k];
    tg_error fault = { .message = "" };
    for (size_t i = 0; i < limiter->by_count; i++) {
        char missing[TG_NAME_BYTES_MAX + 1];
        if (tg__by_of_values(limiter->by[i], limiter->client, values, value_count, &identities[*count], missing, &fault) ==
            TG_OK)
            ++*count;
    }
    if (*count == 0)
        return tg__error(error, TG_E_IDENTITY, "policy \"%s\" counts by nothing of what was given: %s", limiter->name,
                         fault.message);
    return TG_OK;
}

static tg_status
set(tg_limiter *limiter, tg_override *override, const tg_dimension *dimensions, size_t dimension_count,
    uint64_t duration_us, tg_error *error)
{
    tg_store *store = limiter->store;
    tg_identity identities[TG_DIMENSIONS_MAX];
    size_t count = 0;
    if (!store->ops->override_set)
        return unsupported(store, error);
    if (duration_us > TG_PERIOD_US_MAX)
        return tg__error(error, TG_E_ARG, "an override stands for at most ten years");
    snprintf(override->space, sizeof override->space, "%s", limiter->space);
    snprintf(override->policy, sizeof override->policy, "%s", limiter->name);
    override->until_us = duration_us ? tg_store_now_us(store) + duration_us : 0;
    if (dimension_count == 0) {
        snprintf(override->shown, sizeof override->shown, "everybody");
        return store->ops->override_set(store, override, error);
    }
    tg_status status = identities_of(limiter, dimensions, dimension_count, identities, &count, error);
    for (size_t i = 0; status == TG_OK && i < count; i++) {
        digest_of(&identities[i], override->identity);
        tg__identity_show(&identities[i], store->private_kinds, override->shown, sizeof override->shown);
        status = store->ops->override_set(store, override, error);
    }
    return status;
}

tg_status
tg_limiter_override(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, tg_text rules,
                    uint64_t duration_us, tg_error *error)
{
    tg_override override = { .kind = TG_OVERRIDE_RULES };
    if (duration_us) {
        const tg_status status = check_rules(limiter, rules, error);
        if (status != TG_OK)
            return status;
        memcpy(override.rules, rules.data, rules.length);
    }
    return set(limiter, &override, dimensions, dimension_count, duration_us, error);
}

tg_status
tg_limiter_pause(tg_limiter *limiter, uint64_t duration_us, tg_error *error)
{
    tg_override override = { .kind = TG_OVERRIDE_PAUSE };
    return set(limiter, &override, NULL, 0, duration_us, error);
}

tg_status
tg_store_list_overrides(tg_store *store, tg_override *overrides, size_t room, size_t *count, tg_error *error)
{
    if (!store->ops->override_list)
        return unsupported(store, error);
    return store->ops->override_list(store, NULL, NULL, NULL, overrides, room, count, error);
}
