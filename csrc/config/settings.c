/* Settings that stand in `defaults` and in each policy alike: what happens when something fails, and how an answer looks.
 * Must not enter: rules, identities, matching. */
#include "config/reader.h"

#include "base/words.h"

bool
tg_on_failure_parse(tg_text text, tg_on_failure *choice, unsigned *local_percent)
{
    static const char *const words[] = { "open", "closed", "local", NULL };
    static const char share[] = "local ";
    const size_t word = tg__word_index(text, words), before = sizeof share - 1;
    uint64_t percent = 100;
    if (word == SIZE_MAX && (text.length < before + 2 || memcmp(text.data, share, before) != 0 ||
                             text.data[text.length - 1] != '%' ||
                             !tg__text_number((tg_text){ text.data + before, text.length - before - 1 }, 100, &percent) ||
                             percent == 0))
        return false;
    *choice = word == SIZE_MAX ? TG_FAIL_LOCAL : (tg_on_failure)word;
    *local_percent = (unsigned)percent;
    return true;
}

static tg_status
read_on_failure(const tg_reader *r, const tg_node *node, tg_policy *policy)
{
    static const char *const words[] = { "open", "closed", "local", NULL };
    char shown[96];
    size_t unused;
    if (node->kind == TG_NODE_SCALAR &&
        tg_on_failure_parse(node->text, &policy->on_store_failure, &policy->local_percent))
        return TG_OK;
    if (node->kind == TG_NODE_SCALAR && node->text.length > 6 && memcmp(node->text.data, "local ", 6) == 0)
        return tg__source_error(&r->source, node->at, "found %s, expected a share of 1%% to 100%% behind local: local 25%%",
                                tg__node_show(node, shown, sizeof shown));
    return tg__read_choice(r, node, words, &unused);
}

static tg_status
read_failures(const tg_reader *r, const tg_node *on_failure, const tg_node *on_full, const tg_node *missing,
              tg_policy *policy)
{
    static const char *const full_words[] = { "overflow", "open", "closed", NULL };
    static const char *const missing_words[] = { "reject 401", "reject 400", "shared", NULL };
    tg_status status = TG_OK;
    size_t choice;
    if (on_failure)
        status = read_on_failure(r, on_failure, policy);
    if (status == TG_OK && on_full && (status = tg__read_choice(r, on_full, full_words, &choice)) == TG_OK)
        policy->on_full = (tg_on_full)choice;
    if (status == TG_OK && missing && (status = tg__read_choice(r, missing, missing_words, &choice)) == TG_OK)
        policy->missing_identity = (tg_missing)choice;
    return status;
}

/* ---- how an answer looks ---- */

static tg_status
read_headers(const tg_reader *r, const tg_node *node, tg_style *style)
{
    static const char *const words[] = { "x-ratelimit", "ietf", "shadow", NULL }; /* in the order of the bits */
    const tg_node *entry;
    size_t count;
    style->fields = 0;
    if (node->kind == TG_NODE_SCALAR && tg__text_is(node->text, "none"))
        return TG_OK;
    tg_status status = tg__want_entries(r, node, "x-ratelimit, ietf, shadow or none", &entry, &count);
    for (; status == TG_OK && entry; entry = tg__read_after(node, entry)) {
        size_t choice;
        if (node->kind == TG_NODE_LIST && tg__text_is(entry->text, "none"))
            return tg__source_error(&r->source, entry->at, "found \"none\" in a list, expected it alone: headers: none");
        status = tg__read_choice(r, entry, words, &choice);
        if (status == TG_OK)
            style->fields |= (uint8_t)(1u << choice);
    }
    return status;
}

/* The outcomes that texts and statuses speak of. */
static const char *const REFUSALS[] = { "denied", "forbidden", "unidentified", "unavailable", NULL };
static const tg_outcome REFUSAL_OUTCOMES[] = { TG_DENIED, TG_FORBIDDEN, TG_UNIDENTIFIED, TG_UNAVAILABLE };

static tg_status
read_texts(const tg_reader *r, const tg_node *node, tg_style *style)
{
    static const char *const none[] = { NULL };
    static const tg_keys allowed = { "texts", REFUSALS, none };
    const tg_node *values[TG_KEYS_MAX];
    tg_status status = tg__read_keys(r, node, &allowed, values);
    for (size_t i = 0; status == TG_OK && REFUSALS[i]; i++) {
        char escaped[TG_TEXT_ESCAPED_MAX];
        if (!values[i])
            continue;
        status = tg__want_text(r, values[i], "a text");
        if (status != TG_OK)
            return status;
        const size_t length = values[i]->text.length > TG_TEXT_WRITTEN_MAX ? SIZE_MAX
                                                                           : tg__text_escape(values[i]->text, escaped);
        if (length == SIZE_MAX)
            return tg__source_error(&r->source, values[i]->at, "found a text of %zu bytes, expected at most %d",
                                    values[i]->text.length, TG_TEXT_WRITTEN_MAX);
        status = tg__read_kept(r, (tg_text){ escaped, length }, &style->texts[REFUSAL_OUTCOMES[i]]);
    }
    return status;
}

static tg_status
read_statuses(const tg_reader *r, const tg_node *node, tg_style *style)
{
    static const char *const known[] = { "denied", "forbidden", "unavailable", NULL };
    static const char *const none[] = { NULL };
    static const tg_keys allowed = { "statuses", known, none };
    static const tg_outcome outcomes[] = { TG_DENIED, TG_FORBIDDEN, TG_UNAVAILABLE };
    const tg_node *values[TG_KEYS_MAX];
    tg_status status = tg__read_keys(r, node, &allowed, values);
    for (size_t i = 0; status == TG_OK && known[i]; i++) {
        uint64_t number = 0;
        if (!values[i])
            continue;
        status = tg__read_number(r, values[i], 400, 599, &number);
        style->statuses[outcomes[i]] = (uint16_t)number;
    }
    return status;
}

static tg_status
read_style(const tg_reader *r, const tg_node *const *values, tg_style *style)
{
    static const char *const bodies[] = { "plain", "problem", NULL };
    static const char *const resets[] = { "delta", "epoch", NULL };
    tg_status status = TG_OK;
    size_t choice;
    if (values[TG_SETTING_HEADERS])
        status = read_headers(r, values[TG_SETTING_HEADERS], style);
    if (status == TG_OK && values[TG_SETTING_BODY] &&
        (status = tg__read_choice(r, values[TG_SETTING_BODY], bodies, &choice)) == TG_OK)
        style->problem = choice == 1;
    if (status == TG_OK && values[TG_SETTING_RESET] &&
        (status = tg__read_choice(r, values[TG_SETTING_RESET], resets, &choice)) == TG_OK)
        style->epoch = choice == 1;
    if (status == TG_OK && values[TG_SETTING_TEXTS])
        status = read_texts(r, values[TG_SETTING_TEXTS], style);
    if (status == TG_OK && values[TG_SETTING_STATUSES])
        status = read_statuses(r, values[TG_SETTING_STATUSES], style);
    style->needs_facts = style->problem || style->epoch || (style->fields & TG_FIELDS_IETF);
    return status;
}

/* ---- what becomes of a decision ---- */

/* none, refused or all; or {what: all, sample: 100}: one of a hundred */
static tg_status
read_log(const tg_reader *r, const tg_node *node, tg_policy *policy)
{
    static const char *const words[] = { "none", "refused", "all", NULL };
    static const char *const known[] = { "what", "sample", NULL };
    static const char *const none[] = { NULL };
    static const tg_keys allowed = { "log_decisions", known, none };
    const tg_node *values[TG_KEYS_MAX] = { node };
    tg_status status = TG_OK;
    size_t choice;
    policy->log_sample = 1;
    if (node->kind != TG_NODE_SCALAR)
        status = tg__read_keys(r, node, &allowed, values);
    if (status == TG_OK && !values[0])
        return tg__source_error(&r->source, node->at, "found no \"what\" in log_decisions, expected none, refused or all");
    if (status == TG_OK && (status = tg__read_choice(r, values[0], words, &choice)) == TG_OK)
        policy->log = (tg_log)choice;
    if (status == TG_OK && values[1])
        status = tg__read_number(r, values[1], 1, 1000000000, &policy->log_sample);
    return status;
}

/* error_rate > 50% over 1m min 20; or none */
static tg_status
read_pause(const tg_reader *r, const tg_node *node, tg_policy *policy)
{
    tg_error fault;
    policy->pause = (tg_pause){ .period_us = 0 };
    const tg_status status = tg__want_text(r, node, "error_rate > 50%, or none");
    if (status != TG_OK || tg__text_is(node->text, "none"))
        return status;
    return tg__pause_parse(node->text, &policy->pause, &fault) == TG_OK ? TG_OK : tg__read_fault(r, node, &fault, true);
}

tg_status
tg__read_settings(const tg_reader *r, const tg_node *const *values, tg_policy *policy)
{
    tg_status status = read_failures(r, values[TG_SETTING_ON_FAILURE], values[TG_SETTING_ON_FULL],
                                     values[TG_SETTING_MISSING], policy);
    if (status == TG_OK)
        status = read_style(r, values, &policy->style);
    static const char *const modes[] = { "enforce", "shadow", "challenge", NULL };
    size_t choice;
    if (status == TG_OK && values[TG_SETTING_MODE] &&
        (status = tg__read_choice(r, values[TG_SETTING_MODE], modes, &choice)) == TG_OK)
        policy->mode = (tg_mode)choice;
    if (status == TG_OK && values[TG_SETTING_LOG])
        status = read_log(r, values[TG_SETTING_LOG], policy);
    if (status == TG_OK && values[TG_SETTING_PAUSE])
        status = read_pause(r, values[TG_SETTING_PAUSE], policy);
    return status;
}

/* ---- lists of clients ---- */

tg_status
tg__read_roll(const tg_reader *r, const tg_node *node, tg_roll *roll)
{
    const tg_node *entry;
    *roll = (tg_roll){ .count = 0 };
    if (node->kind == TG_NODE_LIST && node->count == 0)
        return TG_OK; /* nobody, said in so many words */
    tg_status status = tg__want_entries(r, node, "a network (\"10.0.0.0/8\"), \"user:NAME\" or \"header:NAME=VALUE\"",
                                        &entry, &roll->count);
    if (status != TG_OK)
        return status;
    tg_roll_entry *entries = tg__arena_take(r->kept, roll->count * sizeof *entries);
    if (!entries)
        return tg__read_no_memory(r);
    for (size_t i = 0; status == TG_OK && entry; entry = tg__read_after(node, entry), i++) {
        tg_error fault;
        tg_text kept;
        status = tg__read_kept(r, entry->text, &kept);
        if (status == TG_OK && tg__roll_parse(kept, &entries[i], &fault) != TG_OK)
            return tg__read_fault(r, entry, &fault, false);
        roll->has_network |= entries[i].kind == TG_ROLL_NETWORK;
    }
    roll->entries = entries;
    return status;
}
