/* The smallest store there is: the pure functions over states in an array, one process, no clock. It judges what the
 * algorithms say apart from where a real store keeps it. Must not enter: tg_store, locks, files. */
#ifndef TG_TEST_PURE_H
#define TG_TEST_PURE_H

#include "../trace.h"
#include "algorithms/algorithms.h"
#include "core/core.h"

#define PURE_STATES_MAX 256
#define PURE_RESULTS_MAX TG_TARGETS_MAX

typedef struct pure_state {
    char key[64];
    uint8_t algorithm;
    uint64_t period_us;
    tg_state state;
    tg_log_entry *entries;
    size_t first, end, room;
    uint64_t units;
} pure_state;

typedef struct pure_hit {
    tg_decision decision;
    char keys[PURE_RESULTS_MAX][64];
} pure_hit;

typedef struct pure_table {
    pure_state states[PURE_STATES_MAX];
    size_t state_count;
    tg_rule rules[TG_RULES_MAX];
    size_t rule_count;
    trace_step keys;
    uint64_t offset_us;
    pure_hit *hits;
    size_t hit_count, hit_room;
} pure_table;

static inline void
pure_begin(pure_table *table)
{
    for (size_t i = 0; i < table->state_count; i++)
        free(table->states[i].entries);
    free(table->hits);
    memset(table, 0, sizeof *table);
    table->keys = trace_read("key k");
}

static inline pure_state *
pure_find(pure_table *table, const tg_rule *rule, const char *key)
{
    for (size_t i = 0; i < table->state_count; i++) {
        pure_state *state = &table->states[i];
        if (strcmp(state->key, key) == 0 && state->algorithm == rule->algorithm && state->period_us == rule->period_us)
            return state;
    }
    return NULL;
}

static inline void
pure_blank(pure_state *state, const tg_rule *rule, const char *key)
{
    *state = (pure_state){ .algorithm = rule->algorithm, .period_us = rule->period_us };
    snprintf(state->key, sizeof state->key, "%s", key);
}

typedef struct pure_cursor {
    const pure_state *state;
    size_t at;
} pure_cursor;

static inline bool
pure_next(void *cursor, tg_log_entry *entry)
{
    pure_cursor *walk = cursor;
    if (walk->at == walk->state->end)
        return false;
    *entry = walk->state->entries[walk->at++];
    return true;
}

static inline tg_log_view
pure_view(const pure_state *state, pure_cursor *cursor)
{
    *cursor = (pure_cursor){ state, state->first };
    tg_log_view view = {
        .units = state->units, .empty = state->first == state->end, .cursor = cursor, .next = pure_next,
    };
    if (!view.empty)
        view.newest = state->entries[state->end - 1];
    return view;
}

static inline void
pure_log_write(pure_state *state, const tg_log_change *change)
{
    state->first += change->expired_entries;
    state->units -= change->expired_units;
    if (change->replace_newest)
        state->units -= state->entries[--state->end].cost;
    if (state->end == state->room) {
        state->room = state->room ? 2 * state->room : 16;
        state->entries = realloc(state->entries, state->room * sizeof *state->entries);
        if (!state->entries)
            abort();
    }
    state->entries[state->end++] = change->entry;
    state->units += change->entry.cost;
}

/* The verdict of a hit; with `write` its change is made when it is allowed. */
static inline tg_verdict
pure_decide(pure_state *state, const tg_rule *rule, uint64_t now_us, uint64_t cost, tg_terms terms, bool write)
{
    if (rule->algorithm == TG_SLIDING_LOG) {
        pure_cursor cursor;
        const tg_log_view view = pure_view(state, &cursor);
        tg_log_change change;
        const tg_verdict verdict = terms.forced ? tg__log_force(rule, &view, now_us, cost, &change)
                                                : tg__log_decide(rule, &view, now_us, cost, 0, &change);
        if (write && verdict.allowed && cost > 0)
            pure_log_write(state, &change);
        return verdict;
    }
    tg_state next;
    tg_verdict verdict;
    if (terms.forced || terms.patience_us > 0)
        tg__decide_on_terms(rule, &state->state, now_us, cost, terms, &next, &verdict);
    else
        verdict = tg__decide(rule, &state->state, now_us, cost, &next);
    if (write)
        state->state = next;
    return verdict;
}

static inline void
pure_log_refund(pure_state *state, const tg_rule *rule, uint64_t now_us, uint64_t cost, bool own, uint64_t stamp_us)
{
    if (state->first == state->end)
        return;
    const tg_log_entry *newest = &state->entries[state->end - 1];
    if (now_us < newest->at_us)
        now_us = newest->at_us;
    const uint64_t step_us = rule->resolution_us ? rule->resolution_us : 1;
    for (size_t i = 0; cost > 0 && i < state->end - state->first; i++) {
        tg_log_entry *entry = &state->entries[own ? state->end - 1 - i : state->first + i];
        if (now_us - entry->at_us >= rule->period_us || (own && entry->at_us / step_us != stamp_us / step_us))
            continue;
        const uint64_t given = cost < entry->cost ? cost : entry->cost;
        entry->cost -= given;
        state->units -= given;
        cost -= given;
    }
}

static inline void
pure_refund(pure_table *table, const tg_rule *rule, const char *key, uint64_t at_us, uint64_t cost, bool own,
            uint64_t stamp_us)
{
    pure_state *state = pure_find(table, rule, key);
    const uint64_t now_us = at_us + (rule->aligned ? table->offset_us : 0);
    if (!state)
        return;
    if (rule->algorithm == TG_SLIDING_LOG)
        pure_log_refund(state, rule, now_us, cost, own, stamp_us);
    else
        tg__refund(rule, &state->state, now_us, cost, own, stamp_us, &state->state);
}

static inline void
pure_fill(tg_result *result, const tg_verdict *verdict)
{
    result->allowed = verdict->allowed;
    result->remaining = verdict->remaining;
    result->retry_after_us = verdict->retry_after_us;
    result->reset_after_us = verdict->reset_after_us;
    result->delay_us = verdict->delay_us;
    result->stamp_us = verdict->stamp_us;
}

/* All targets of a hit or a peek, all or nothing; a pair that comes twice is charged once. */
static inline const tg_decision *
pure_judge(pure_table *table, uint64_t at_us, uint64_t cost, tg_terms terms, bool take)
{
    const tg_terms none = { 0 };
    static pure_hit hit;
    tg_decision *decision = &hit.decision;
    *decision = (tg_decision){ .identity_count = 0 };
    bool allowed = true;
    for (size_t k = 0; k < table->keys.key_count; k++) {
        for (size_t r = 0; r < table->rule_count; r++) {
            const tg_rule *rule = &table->rules[r];
            tg_result *result = &decision->results[decision->result_count];
            snprintf(hit.keys[decision->result_count++], sizeof hit.keys[0], "%s", trace_key(&table->keys, k));
            pure_state blank;
            pure_blank(&blank, rule, "");
            pure_state *state = pure_find(table, rule, trace_key(&table->keys, k));
            state = state ? state : &blank;
            const uint64_t now_us = at_us + (rule->aligned ? table->offset_us : 0);
            const tg_verdict look = pure_decide(state, rule, now_us, cost, terms, false);
            const tg_verdict still = pure_decide(state, rule, now_us, 0, none, false);
            pure_fill(result, &look);
            result->rule = *rule;
            result->cost = cost;
            result->charged = false;
            result->remaining = still.remaining;
            result->reset_after_us = still.reset_after_us;
            allowed = allowed && look.allowed;
        }
    }
    for (size_t i = 0; take && allowed && i < decision->result_count; i++) {
        tg_result *result = &decision->results[i];
        pure_state *state = pure_find(table, &result->rule, hit.keys[i]);
        const uint64_t now_us = at_us + (result->rule.aligned ? table->offset_us : 0);
        bool charged = false;
        for (size_t j = 0; j < i; j++)
            charged = charged || (strcmp(hit.keys[j], hit.keys[i]) == 0 &&
                                  decision->results[j].rule.algorithm == result->rule.algorithm &&
                                  decision->results[j].rule.period_us == result->rule.period_us);
        pure_state blank;
        if (!state && cost == 0) {
            pure_blank(&blank, &result->rule, hit.keys[i]);
            state = &blank;
        } else if (!state) {
            if (table->state_count == PURE_STATES_MAX)
                abort();
            state = &table->states[table->state_count++];
            pure_blank(state, &result->rule, hit.keys[i]);
        }
        const uint64_t delay_us = result->delay_us;
        const tg_verdict verdict = pure_decide(state, &result->rule, now_us, charged ? 0 : cost, terms, true);
        pure_fill(result, &verdict);
        result->delay_us = delay_us;
        result->charged = !charged && cost > 0;
    }
    tg__decision_report(decision);
    if (take) {
        if (table->hit_count == table->hit_room) {
            table->hit_room = table->hit_room ? 2 * table->hit_room : 16;
            table->hits = realloc(table->hits, table->hit_room * sizeof *table->hits);
            if (!table->hits)
                abort();
        }
        table->hits[table->hit_count++] = hit;
    }
    return decision;
}

/* Does one step. Returns the decision of a hit or a peek, else NULL; *fault says what was wrong, else NULL. */
static inline const tg_decision *
pure_step(pure_table *table, const trace_step *step, const char **fault)
{
    static tg_error error;
    *fault = NULL;
    switch (step->verb) {
    case TRACE_NOTHING:
        return NULL;
    case TRACE_CASE:
        pure_begin(table);
        return NULL;
    case TRACE_RULE:
        if (tg_rules_parse(tg_text_of(step->text), TG_ALGORITHM_DEFAULT, table->rules, &table->rule_count, &error) !=
            TG_OK)
            *fault = error.message;
        return NULL;
    case TRACE_KEY:
        table->keys = *step;
        return NULL;
    case TRACE_OFFSET:
        table->offset_us = step->at_us;
        return NULL;
    case TRACE_HIT:
    case TRACE_WAIT:
    case TRACE_FORCE:
    case TRACE_PEEK:
        if (table->rule_count * table->keys.key_count - 1 >= PURE_RESULTS_MAX) {
            *fault = "no rule, or too many targets";
            return NULL;
        }
        return pure_judge(table, step->at_us, step->amount,
                          (tg_terms){ .patience_us = step->patience_us, .forced = step->verb == TRACE_FORCE },
                          step->verb != TRACE_PEEK);
    case TRACE_REFUND:
        for (size_t k = 0; k < table->keys.key_count; k++) {
            bool given = false; /* a key that comes twice was charged once */
            for (size_t before = 0; before < k; before++)
                given = given || strcmp(trace_key(&table->keys, before), trace_key(&table->keys, k)) == 0;
            for (size_t r = 0; !given && r < table->rule_count; r++)
                pure_refund(table, &table->rules[r], trace_key(&table->keys, k), step->at_us, step->amount, false, 0);
        }
        return NULL;
    case TRACE_UNDO:
        if (step->amount - 1 >= table->hit_count) {
            *fault = "no such hit";
            return NULL;
        }
        pure_hit *hit = &table->hits[step->amount - 1];
        for (size_t i = 0; i < hit->decision.result_count; i++) {
            tg_result *result = &hit->decision.results[i];
            if (result->charged)
                pure_refund(table, &result->rule, hit->keys[i], step->at_us, result->cost, true, result->stamp_us);
            result->charged = false;
        }
        return NULL;
    case TRACE_RESET:
        for (size_t k = 0; k < table->keys.key_count; k++)
            for (size_t r = 0; r < table->rule_count; r++) {
                pure_state *state = pure_find(table, &table->rules[r], trace_key(&table->keys, k));
                if (!state)
                    continue;
                free(state->entries);
                *state = table->states[--table->state_count];
            }
        return NULL;
    case TRACE_RESERVE:
    case TRACE_SETTLE:
    case TRACE_RENEW:
        *fault = "reservations are a store's";
        return NULL;
    case TRACE_BAD:
        break;
    }
    *fault = "not a step";
    return NULL;
}

#endif
