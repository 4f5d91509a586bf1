/* One policy of a rules file: which requests it speaks of, its rules, whom it counts.
 * Must not enter: how policies act together (config.c). */
#include "config/reader.h"

#include "config/config_words.h"
#include "config/match.h"
#include "identity/identity.h"

/* ---- match ---- */

static const char *const METHODS[] = { "GET",   "HEAD",     "POST",      "PUT",   "PATCH",  "DELETE", "OPTIONS",
                                       "TRACE", "CONNECT",  "PROPFIND",  "MKCOL", "COPY",   "MOVE",   "LOCK",
                                       "UNLOCK", "PROPPATCH", "REPORT",  "SEARCH", "QUERY", "PURGE",  NULL };

static tg_status
read_patterns(const tg_reader *r, const tg_node *node, bool paths, tg_pattern **patterns, size_t *count)
{
    const tg_node *entry;
    tg_status status = tg__want_entries(r, node, paths ? "a path" : "a host", &entry, count);
    if (status != TG_OK)
        return status;
    *patterns = tg__arena_take(r->kept, *count * sizeof **patterns);
    if (!*patterns)
        return tg__read_no_memory(r);
    for (size_t i = 0; entry; entry = tg__read_after(node, entry), i++) {
        const char *fault;
        char shown[96];
        const bool made = paths ? tg__pattern_path(r->kept, entry->text, &(*patterns)[i], &fault)
                                : tg__pattern_host(r->kept, entry->text, &(*patterns)[i], &fault);
        if (fault)
            return tg__source_error(&r->source, entry->at, "found %s, %s", tg__node_show(entry, shown, sizeof shown),
                                    fault);
        if (!made)
            return tg__read_no_memory(r);
    }
    return TG_OK;
}

static tg_status
read_method(const tg_reader *r, const tg_node *node, tg_text *method)
{
    char upper[TG_METHOD_BYTES_MAX], shown[96];
    bool good = node->text.length <= sizeof upper;
    for (size_t i = 0; good && i < node->text.length; i++) {
        const char c = node->text.data[i];
        good = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '-';
        upper[i] = c >= 'a' && c <= 'z' ? (char)(c & ~0x20) : c;
    }
    if (!good)
        return tg__source_error(&r->source, node->at, "found %s, expected a method (GET, POST)",
                                tg__node_show(node, shown, sizeof shown));
    const tg_text text = { upper, node->text.length };
    const char *near = tg__word_index(text, METHODS) == SIZE_MAX ? tg__word_nearest(text, METHODS) : NULL;
    if (near && tg__word_distance(text, tg_text_of(near), 1) == 1) /* "PSOT" would never be met by anybody */
        return tg__source_error(&r->source, node->at, "found the method %s: did you mean %s?",
                                tg__node_show(node, shown, sizeof shown), near);
    return tg__read_kept(r, text, method);
}

static tg_status
read_methods(const tg_reader *r, const tg_node *node, tg_match *match)
{
    const tg_node *entry;
    tg_status status = tg__want_entries(r, node, "a method", &entry, &match->method_count);
    if (status != TG_OK)
        return status;
    match->methods = tg__arena_take(r->kept, match->method_count * sizeof *match->methods);
    if (!match->methods)
        return tg__read_no_memory(r);
    for (size_t i = 0; entry && status == TG_OK; entry = tg__read_after(node, entry), i++)
        status = read_method(r, entry, &match->methods[i]);
    return status;
}

static tg_status
read_match(const tg_reader *r, const tg_node *node, tg_policy *policy)
{
    static const char *const known[] = { "path", "methods", "host", NULL };
    static const char *const later[] = { "headers", "query", "route", NULL };
    static const tg_keys allowed = { "match", known, later };
    const tg_node *values[TG_KEYS_MAX];
    tg_status status = tg__read_keys(r, node, &allowed, values);
    if (status != TG_OK)
        return status;
    if (node->count == 0)
        return tg__source_error(&r->source, node->at, "found an empty match, expected path, methods or host; a policy "
                                                      "for every request has no match at all");
    policy->match = tg__arena_take(r->kept, sizeof *policy->match);
    if (!policy->match)
        return tg__read_no_memory(r);
    if (values[0])
        status = read_patterns(r, values[0], true, &policy->match->paths, &policy->match->path_count);
    if (status == TG_OK && values[1])
        status = read_methods(r, values[1], policy->match);
    if (status == TG_OK && values[2])
        status = read_patterns(r, values[2], false, &policy->match->hosts, &policy->match->host_count);
    return status;
}

/* ---- rules and by ---- */

static tg_status
read_rules(const tg_reader *r, const tg_node *node, tg_policy *policy)
{
    const tg_node *entry;
    tg_error fault;
    size_t count, length = 0;
    tg_status status = tg__want_entries(r, node, "rules (\"5/minute; 50/day\")", &entry, &count);
    if (status != TG_OK)
        return status;
    /* Each entry alone first: its faults have a place. Then all together: what two entries do to each other. */
    for (const tg_node *one = entry; one; one = tg__read_after(node, one)) {
        if (tg_rules_parse(one->text, TG_ALGORITHM_DEFAULT, policy->rules, &policy->rule_count, &fault) != TG_OK)
            return tg__read_fault(r, one, &fault, true);
        length += one->text.length + 2;
    }
    policy->rules_text = tg__arena_take(r->kept, length + 1);
    if (!policy->rules_text)
        return tg__read_no_memory(r);
    char *at = policy->rules_text;
    for (const tg_node *one = entry; one; one = tg__read_after(node, one)) {
        if (one != entry)
            at = stpcpy(at, "; ");
        memcpy(at, one->text.data, one->text.length);
        at += one->text.length;
    }
    const tg_text whole = { policy->rules_text, (size_t)(at - policy->rules_text) };
    if (memchr(whole.data, '\0', whole.length))
        return tg__source_error(&r->source, node->at, "found a NUL byte, expected rules");
    if (tg_rules_parse(whole, TG_ALGORITHM_DEFAULT, policy->rules, &policy->rule_count, &fault) != TG_OK)
        return tg__read_fault(r, node, &fault, false);
    return TG_OK;
}

static tg_status
read_by(const tg_reader *r, const tg_node *node, tg_policy *policy)
{
    static const tg_text by_address = { "ip", 2 };
    const tg_node *entry = NULL;
    tg_status status = TG_OK;
    policy->by_count = 1;
    if (node)
        status = tg__want_entries(r, node, "what to count by (\"ip\", \"user|ip\", \"ip+route\")", &entry,
                              &policy->by_count);
    if (status != TG_OK)
        return status;
    if (policy->by_count > TG_DIMENSIONS_MAX)
        return tg__source_error(&r->source, node->at, "found %zu entries, expected at most %d", policy->by_count,
                                TG_DIMENSIONS_MAX);
    policy->by = tg__arena_take(r->kept, policy->by_count * sizeof *policy->by);
    if (!policy->by)
        return tg__read_no_memory(r);
    if (!node)
        policy->by[0] = by_address;
    for (size_t i = 0; entry && status == TG_OK; entry = tg__read_after(node, entry), i++) {
        tg_by *parsed;
        tg_error fault;
        char shown[96];
        if (tg__by_parse(entry->text, &parsed, &fault) != TG_OK)
            return tg__read_fault(r, entry, &fault, true);
        tg__by_close(parsed);
        for (size_t j = 0; j < i; j++)
            if (policy->by[j].length == entry->text.length &&
                memcmp(policy->by[j].data, entry->text.data, entry->text.length) == 0)
                return tg__source_error(&r->source, entry->at, "found %s a second time, expected another dimension",
                                        tg__node_show(entry, shown, sizeof shown));
        status = tg__read_kept(r, entry->text, &policy->by[i]);
    }
    return status;
}

/* ---- policies ---- */

tg_status
tg__read_policy(const tg_reader *r, const tg_node *node, tg_policy *policy)
{
    enum { NAME = TG_SETTINGS, MATCH, RULES, BY, ALSO };
    static const char *const known[] = { TG_SETTINGS_WORDS, "name", "match", "rules", "by", "also", NULL };
    static const char *const later[] = { "mode",          "exempt",     "deny",         "cost",      "plans",
                                         "log_decisions", "pause_when", "count_denied", "max_delay", "count",
                                         NULL };
    static const tg_keys allowed = { "a policy", known, later };
    const tg_node *values[TG_KEYS_MAX];
    tg_status status = tg__read_keys(r, node, &allowed, values);
    if (status != TG_OK)
        return status;
    *policy = r->defaults;
    policy->line = tg__source_line(&r->source, node->at);
    if (!values[NAME])
        return tg__source_error(&r->source, node->at, "found a policy without \"name\"");
    status = tg__read_name(r, values[NAME], "a policy's name", policy->name);
    if (status == TG_OK && !values[RULES])
        return tg__source_error(&r->source, node->at, "found policy \"%s\" without \"rules\" (\"5/minute; 50/day\")",
                                policy->name);
    if (status == TG_OK && values[MATCH])
        status = read_match(r, values[MATCH], policy);
    if (status == TG_OK)
        status = read_rules(r, values[RULES], policy);
    if (status == TG_OK)
        status = read_by(r, values[BY], policy);
    if (status == TG_OK && policy->rule_count * policy->by_count > TG_TARGETS_MAX)
        return tg__source_error(&r->source, node->at,
                                "policy \"%s\" has %zu rules for each of %zu dimensions, expected at most %d pairs of "
                                "them",
                                policy->name, policy->rule_count, policy->by_count, TG_TARGETS_MAX);
    if (status == TG_OK)
        status = tg__read_settings(r, values, policy);
    if (status == TG_OK && values[ALSO])
        status = tg__read_flag(r, values[ALSO], &policy->also);
    return status;
}
