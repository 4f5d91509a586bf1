/* The rules file: what its keys mean, checked whole before anything of it is in force.
 * Must not enter: stores, counting, answers, libyaml (yaml_tree.c). */
#include "config/config.h"

#include "config/config_words.h"
#include "config/match.h"
#include "config/yaml_tree.h"
#include "identity/identity.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* The config and all that it points to, given back at once. */
typedef struct holder {
    tg_config config; /* first: a tg_config of ours is its holder */
    tg_arena arena;
} holder;

typedef struct reader {
    tg_source source;
    tg_arena *kept; /* what the config points to; the tree lives in source.arena and dies with the reading */
    tg_config *config;
    tg_policy defaults;
} reader;

static tg_status
no_memory(const reader *r)
{
    return tg__error(r->source.error, TG_E_NOMEM, "%s: out of memory while reading", r->source.path);
}

/* ---- mappings ---- */

/* The keys that a mapping may have, and those that later versions know. */
typedef struct keys {
    const char *where;
    const char *const *known; /* NULL-terminated */
    const char *const *later;
} keys;

enum { KEYS_MAX = 16 };

static size_t
index_of(tg_text word, const char *const *words)
{
    for (size_t i = 0; words[i]; i++)
        if (tg__text_is(word, words[i]))
            return i;
    return SIZE_MAX;
}

static tg_status
unknown_key(const reader *r, const tg_node *key, const keys *allowed)
{
    char shown[80], list[200];
    const char *near = tg__word_nearest(key->text, allowed->known);
    tg__text_show(key->text, shown, sizeof shown);
    if (index_of(key->text, allowed->later) != SIZE_MAX)
        return tg__source_error(&r->source, key->at, "found \"%s\" in %s, which is not available yet", shown,
                                allowed->where);
    if (near)
        return tg__source_error(&r->source, key->at, "found the unknown key \"%s\" in %s: did you mean \"%s\"?", shown,
                                allowed->where, near);
    return tg__source_error(&r->source, key->at, "found the unknown key \"%s\" in %s, expected %s", shown,
                            allowed->where, tg__words_list(allowed->known, list, sizeof list));
}

/* Sorts a mapping's values by key: values[i] belongs to known[i], NULL where it is not given. Every key is known and
 * stands there once, or it is an error. */
static tg_status
read_keys(const reader *r, const tg_node *map, const keys *allowed, const tg_node *values[KEYS_MAX])
{
    char shown[96];
    const tg_node *names[KEYS_MAX] = { 0 };
    for (size_t i = 0; i < KEYS_MAX; i++)
        values[i] = NULL;
    if (map->kind != TG_NODE_MAP)
        return tg__source_error(&r->source, map->at, "found %s, expected %s: a mapping of keys to values",
                                tg__node_show(map, shown, sizeof shown), allowed->where);
    for (const tg_node *key = map->first; key; key = key->next->next) {
        const size_t index = index_of(key->text, allowed->known);
        if (index == SIZE_MAX)
            return unknown_key(r, key, allowed);
        if (names[index])
            return tg__source_error(&r->source, key->at,
                                    "found \"%s\" a second time in %s: it already stands in line %u",
                                    allowed->known[index], allowed->where,
                                    tg__source_line(&r->source, names[index]->at));
        if (tg__node_is_nothing(key->next))
            return tg__source_error(&r->source, key->at, "found nothing behind \"%s:\", expected a value or no key",
                                    allowed->known[index]);
        names[index] = key;
        values[index] = key->next;
    }
    return TG_OK;
}

/* ---- values ---- */

static tg_status
want_text(const reader *r, const tg_node *node, const char *what)
{
    char shown[96];
    if (node->kind == TG_NODE_SCALAR && !tg__node_is_nothing(node) && node->text.length > 0)
        return TG_OK;
    if (node->kind == TG_NODE_SCALAR && node->text.length == 0)
        return tg__source_error(&r->source, node->at, "found an empty text, expected %s", what);
    return tg__source_error(&r->source, node->at, "found %s, expected %s", tg__node_show(node, shown, sizeof shown),
                            what);
}

/* A list, or one entry alone. */
static tg_status
want_entries(const reader *r, const tg_node *node, const char *what, const tg_node **first, size_t *count)
{
    char shown[96];
    if (node->kind == TG_NODE_MAP)
        return tg__source_error(&r->source, node->at, "found %s, expected %s or a list of them",
                                tg__node_show(node, shown, sizeof shown), what);
    *first = node->kind == TG_NODE_LIST ? node->first : node;
    *count = node->kind == TG_NODE_LIST ? node->count : 1;
    if (*count == 0)
        return tg__source_error(&r->source, node->at, "found an empty list, expected %s or a list of them", what);
    for (const tg_node *entry = *first; entry; entry = node->kind == TG_NODE_LIST ? entry->next : NULL) {
        const tg_status status = want_text(r, entry, what);
        if (status != TG_OK)
            return status;
    }
    return TG_OK;
}

/* The next entry of what want_entries found. */
static const tg_node *
after(const tg_node *list, const tg_node *entry)
{
    return list->kind == TG_NODE_LIST ? entry->next : NULL;
}

static tg_status
keep_text(const reader *r, tg_text text, tg_text *kept)
{
    const char *copy = tg__arena_copy(r->kept, text);
    if (!copy)
        return no_memory(r);
    *kept = (tg_text){ copy, text.length };
    return TG_OK;
}

static tg_status
read_string(const reader *r, const tg_node *node, const char *what, char **kept)
{
    tg_status status = want_text(r, node, what);
    if (status != TG_OK)
        return status;
    if (memchr(node->text.data, '\0', node->text.length))
        return tg__source_error(&r->source, node->at, "found a NUL byte, expected %s", what);
    *kept = tg__arena_copy(r->kept, node->text);
    return *kept ? TG_OK : no_memory(r);
}

static tg_status
read_name(const reader *r, const tg_node *node, const char *what, char name[TG_NAME_BYTES_MAX + 1])
{
    char shown[96];
    const tg_status status = want_text(r, node, what);
    if (status != TG_OK)
        return status;
    bool good = node->text.length <= TG_NAME_BYTES_MAX;
    for (size_t i = 0; good && i < node->text.length; i++) {
        const char c = node->text.data[i];
        good = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || c == '.' ||
               c == '-';
    }
    if (!good)
        return tg__source_error(&r->source, node->at,
                                "found %s, expected %s: 1 to %d of the characters A-Z a-z 0-9 _ . -",
                                tg__node_show(node, shown, sizeof shown), what, TG_NAME_BYTES_MAX);
    memcpy(name, node->text.data, node->text.length);
    name[node->text.length] = '\0';
    return TG_OK;
}

/* One of a few words; *choice is its place in the list. */
static tg_status
read_choice(const reader *r, const tg_node *node, const char *const *words, size_t *choice)
{
    char shown[96], list[120];
    tg__words_list(words, list, sizeof list);
    *choice = node->kind == TG_NODE_SCALAR ? index_of(node->text, words) : SIZE_MAX;
    if (*choice != SIZE_MAX)
        return TG_OK;
    const char *near = node->kind == TG_NODE_SCALAR ? tg__word_nearest(node->text, words) : NULL;
    return tg__source_error(&r->source, node->at, "found %s, expected %s%s%s%s",
                            tg__node_show(node, shown, sizeof shown), list, near ? ": did you mean \"" : "", near ? near : "", near ? "\"?" : "");
}

static tg_status
read_flag(const reader *r, const tg_node *node, bool *flag)
{
    char shown[96];
    if (node->kind == TG_NODE_SCALAR && node->plain && tg__text_is(node->text, "true"))
        *flag = true;
    else if (node->kind == TG_NODE_SCALAR && node->plain && tg__text_is(node->text, "false"))
        *flag = false;
    else
        return tg__source_error(&r->source, node->at, "found %s, expected true or false",
                                tg__node_show(node, shown, sizeof shown));
    return TG_OK;
}

/* ---- what stands in `defaults` and in each policy alike ---- */

static tg_status
read_choices(const reader *r, const tg_node *on_failure, const tg_node *on_full, const tg_node *missing,
             tg_policy *policy)
{
    static const char *const failure_words[] = { "open", "closed", "local", NULL };
    static const char *const full_words[] = { "overflow", "open", "closed", NULL };
    static const char *const missing_words[] = { "reject 401", "reject 400", "shared", NULL };
    tg_status status = TG_OK;
    size_t choice;
    if (on_failure && (status = read_choice(r, on_failure, failure_words, &choice)) == TG_OK)
        policy->on_store_failure = (tg_on_failure)choice;
    if (status == TG_OK && on_full && (status = read_choice(r, on_full, full_words, &choice)) == TG_OK)
        policy->on_full = (tg_on_full)choice;
    if (status == TG_OK && missing && (status = read_choice(r, missing, missing_words, &choice)) == TG_OK)
        policy->missing_identity = (tg_missing)choice;
    return status;
}

/* ---- match ---- */

static const char *const METHODS[] = { "GET",   "HEAD",     "POST",      "PUT",   "PATCH",  "DELETE", "OPTIONS",
                                       "TRACE", "CONNECT",  "PROPFIND",  "MKCOL", "COPY",   "MOVE",   "LOCK",
                                       "UNLOCK", "PROPPATCH", "REPORT",  "SEARCH", "QUERY", "PURGE",  NULL };

static tg_status
read_patterns(const reader *r, const tg_node *node, bool paths, tg_pattern **patterns, size_t *count)
{
    const tg_node *entry;
    tg_status status = want_entries(r, node, paths ? "a path" : "a host", &entry, count);
    if (status != TG_OK)
        return status;
    *patterns = tg__arena_take(r->kept, *count * sizeof **patterns);
    if (!*patterns)
        return no_memory(r);
    for (size_t i = 0; entry; entry = after(node, entry), i++) {
        const char *fault;
        char shown[96];
        const bool made = paths ? tg__pattern_path(r->kept, entry->text, &(*patterns)[i], &fault)
                                : tg__pattern_host(r->kept, entry->text, &(*patterns)[i], &fault);
        if (fault)
            return tg__source_error(&r->source, entry->at, "found %s, %s", tg__node_show(entry, shown, sizeof shown),
                                    fault);
        if (!made)
            return no_memory(r);
    }
    return TG_OK;
}

static tg_status
read_method(const reader *r, const tg_node *node, tg_text *method)
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
    const char *near = index_of(text, METHODS) == SIZE_MAX ? tg__word_nearest(text, METHODS) : NULL;
    if (near && tg__word_distance(text, tg_text_of(near), 1) == 1) /* "PSOT" would never be met by anybody */
        return tg__source_error(&r->source, node->at, "found the method %s: did you mean %s?",
                                tg__node_show(node, shown, sizeof shown), near);
    return keep_text(r, text, method);
}

static tg_status
read_methods(const reader *r, const tg_node *node, tg_match *match)
{
    const tg_node *entry;
    tg_status status = want_entries(r, node, "a method", &entry, &match->method_count);
    if (status != TG_OK)
        return status;
    match->methods = tg__arena_take(r->kept, match->method_count * sizeof *match->methods);
    if (!match->methods)
        return no_memory(r);
    for (size_t i = 0; entry && status == TG_OK; entry = after(node, entry), i++)
        status = read_method(r, entry, &match->methods[i]);
    return status;
}

static tg_status
read_match(const reader *r, const tg_node *node, tg_policy *policy)
{
    static const char *const known[] = { "path", "methods", "host", NULL };
    static const char *const later[] = { "headers", "query", "route", NULL };
    static const keys allowed = { "match", known, later };
    const tg_node *values[KEYS_MAX];
    tg_status status = read_keys(r, node, &allowed, values);
    if (status != TG_OK)
        return status;
    if (node->count == 0)
        return tg__source_error(&r->source, node->at, "found an empty match, expected path, methods or host; a policy "
                                                      "for every request has no match at all");
    policy->match = tg__arena_take(r->kept, sizeof *policy->match);
    if (!policy->match)
        return no_memory(r);
    if (values[0])
        status = read_patterns(r, values[0], true, &policy->match->paths, &policy->match->path_count);
    if (status == TG_OK && values[1])
        status = read_methods(r, values[1], policy->match);
    if (status == TG_OK && values[2])
        status = read_patterns(r, values[2], false, &policy->match->hosts, &policy->match->host_count);
    return status;
}

/* ---- rules and by ---- */

/* What another room's parser found wrong, at its place in the file. */
static tg_status
fault_in(const reader *r, const tg_node *scalar, const tg_error *fault, bool placed)
{
    if (fault->status == TG_E_NOMEM)
        return no_memory(r);
    return tg__source_error(&r->source, placed ? tg__node_at(&r->source, scalar, fault->offset) : scalar->at, "%s",
                            fault->message);
}

static tg_status
read_rules(const reader *r, const tg_node *node, tg_policy *policy)
{
    const tg_node *entry;
    tg_error fault;
    size_t count, length = 0;
    tg_status status = want_entries(r, node, "rules (\"5/minute; 50/day\")", &entry, &count);
    if (status != TG_OK)
        return status;
    /* Each entry alone first: its faults have a place. Then all together: what two entries do to each other. */
    for (const tg_node *one = entry; one; one = after(node, one)) {
        if (tg_rules_parse(one->text, TG_ALGORITHM_DEFAULT, policy->rules, &policy->rule_count, &fault) != TG_OK)
            return fault_in(r, one, &fault, true);
        length += one->text.length + 2;
    }
    policy->rules_text = tg__arena_take(r->kept, length + 1);
    if (!policy->rules_text)
        return no_memory(r);
    char *at = policy->rules_text;
    for (const tg_node *one = entry; one; one = after(node, one)) {
        if (one != entry)
            at = stpcpy(at, "; ");
        memcpy(at, one->text.data, one->text.length);
        at += one->text.length;
    }
    const tg_text whole = { policy->rules_text, (size_t)(at - policy->rules_text) };
    if (memchr(whole.data, '\0', whole.length))
        return tg__source_error(&r->source, node->at, "found a NUL byte, expected rules");
    if (tg_rules_parse(whole, TG_ALGORITHM_DEFAULT, policy->rules, &policy->rule_count, &fault) != TG_OK)
        return fault_in(r, node, &fault, false);
    return TG_OK;
}

static tg_status
read_by(const reader *r, const tg_node *node, tg_policy *policy)
{
    static const tg_text by_address = { "ip", 2 };
    const tg_node *entry = NULL;
    tg_status status = TG_OK;
    policy->by_count = 1;
    if (node)
        status = want_entries(r, node, "what to count by (\"ip\", \"user|ip\", \"ip+route\")", &entry,
                              &policy->by_count);
    if (status != TG_OK)
        return status;
    if (policy->by_count > TG_DIMENSIONS_MAX)
        return tg__source_error(&r->source, node->at, "found %zu entries, expected at most %d", policy->by_count,
                                TG_DIMENSIONS_MAX);
    policy->by = tg__arena_take(r->kept, policy->by_count * sizeof *policy->by);
    if (!policy->by)
        return no_memory(r);
    if (!node)
        policy->by[0] = by_address;
    for (size_t i = 0; entry && status == TG_OK; entry = after(node, entry), i++) {
        tg_by *parsed;
        tg_error fault;
        char shown[96];
        if (tg__by_parse(entry->text, &parsed, &fault) != TG_OK)
            return fault_in(r, entry, &fault, true);
        tg__by_close(parsed);
        for (size_t j = 0; j < i; j++)
            if (policy->by[j].length == entry->text.length &&
                memcmp(policy->by[j].data, entry->text.data, entry->text.length) == 0)
                return tg__source_error(&r->source, entry->at, "found %s a second time, expected another dimension",
                                        tg__node_show(entry, shown, sizeof shown));
        status = keep_text(r, entry->text, &policy->by[i]);
    }
    return status;
}

/* ---- policies ---- */

static tg_status
read_policy(const reader *r, const tg_node *node, tg_policy *policy)
{
    enum { NAME, MATCH, RULES, BY, ON_FAILURE, ON_FULL, MISSING, ALSO };
    static const char *const known[] = { "name",    "match",            "rules", "by", "on_store_failure",
                                         "on_full", "missing_identity", "also",  NULL };
    static const char *const later[] = { "mode",          "exempt",     "deny",         "cost",        "plans",
                                         "headers",       "body",       "log_decisions", "pause_when", "include",
                                         "count_denied",  "max_delay",  "status",       "message",     NULL };
    static const keys allowed = { "a policy", known, later };
    const tg_node *values[KEYS_MAX];
    tg_status status = read_keys(r, node, &allowed, values);
    if (status != TG_OK)
        return status;
    *policy = r->defaults;
    policy->line = tg__source_line(&r->source, node->at);
    if (!values[NAME])
        return tg__source_error(&r->source, node->at, "found a policy without \"name\"");
    status = read_name(r, values[NAME], "a policy's name", policy->name);
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
        status = read_choices(r, values[ON_FAILURE], values[ON_FULL], values[MISSING], policy);
    if (status == TG_OK && values[ALSO])
        status = read_flag(r, values[ALSO], &policy->also);
    return status;
}

/* Counts the dimensions of `policy` that do not stand in `seen` yet, and adds them there. */
static size_t
add_dimensions(const tg_policy *policy, tg_text *seen, size_t seen_count, size_t room)
{
    size_t added = 0;
    for (size_t i = 0; i < policy->by_count; i++) {
        bool known = false;
        for (size_t j = 0; j < seen_count + added && j < room && !known; j++)
            known = seen[j].length == policy->by[i].length &&
                    memcmp(seen[j].data, policy->by[i].data, seen[j].length) == 0;
        if (known)
            continue;
        if (seen_count + added < room)
            seen[seen_count + added] = policy->by[i];
        added++;
    }
    return added;
}

/* One request may meet every policy marked `also` and one other; two others where its path can be read two ways (match.c).
 * What one decision cannot hold is an error now, not a surprise for the first request that meets them all. */
static tg_status
check_together(const reader *r, const tg_node *list)
{
    const tg_config *config = r->config;
    tg_text seen[2 * TG_DIMENSIONS_MAX];
    size_t together = 0, pairs = 0, dimensions = 0, most_pairs = 0, most_dimensions = 0, others = 0;
    for (size_t i = 0; i < config->policy_count; i++) {
        const tg_policy *policy = &config->policies[i];
        if (!policy->also)
            continue;
        together++;
        pairs += policy->rule_count * policy->by_count;
        dimensions += add_dimensions(policy, seen, dimensions, TG_DIMENSIONS_MAX);
    }
    if (together == 0)
        return TG_OK;
    for (size_t i = 0; i < config->policy_count; i++) {
        const tg_policy *policy = &config->policies[i];
        if (policy->also)
            continue;
        const size_t own_pairs = policy->rule_count * policy->by_count;
        const size_t known = dimensions < TG_DIMENSIONS_MAX ? dimensions : TG_DIMENSIONS_MAX;
        const size_t own = add_dimensions(policy, seen, known, sizeof seen / sizeof seen[0]);
        others = others < 2 ? others + 1 : 2;
        most_pairs = own_pairs > most_pairs ? own_pairs : most_pairs;
        most_dimensions = own > most_dimensions ? own : most_dimensions;
    }
    if (together + others > TG_LIMITERS_MAX)
        return tg__source_error(&r->source, list->at, "found %zu policies marked \"also\", expected at most %zu beside "
                                                      "the first match",
                                together, TG_LIMITERS_MAX - others);
    if (pairs + most_pairs > TG_TARGETS_MAX)
        return tg__source_error(&r->source, list->at, "one request may meet %zu pairs of rule and dimension, with the "
                                                      "policies marked \"also\": expected at most %d",
                                pairs + most_pairs, TG_TARGETS_MAX);
    if (dimensions + most_dimensions > TG_DIMENSIONS_MAX)
        return tg__source_error(&r->source, list->at, "one request may meet %zu dimensions, with the policies marked "
                                                      "\"also\": expected at most %d",
                                dimensions + most_dimensions, TG_DIMENSIONS_MAX);
    return TG_OK;
}

static tg_status
read_policies(const reader *r, const tg_node *node)
{
    tg_config *config = r->config;
    char shown[96];
    if (node->kind != TG_NODE_LIST)
        return tg__source_error(&r->source, node->at, "found %s, expected a list of policies",
                                tg__node_show(node, shown, sizeof shown));
    if (node->count > TG_POLICIES_MAX)
        return tg__source_error(&r->source, node->at, "found %zu policies, expected at most %d", node->count,
                                TG_POLICIES_MAX);
    config->policies = tg__arena_take(r->kept, (node->count + 1) * sizeof *config->policies);
    if (!config->policies)
        return no_memory(r);
    for (const tg_node *entry = node->first; entry; entry = entry->next) {
        tg_policy *policy = &config->policies[config->policy_count];
        const tg_status status = read_policy(r, entry, policy);
        if (status != TG_OK)
            return status;
        for (size_t i = 0; i < config->policy_count; i++)
            if (strcmp(config->policies[i].name, policy->name) == 0)
                return tg__source_error(&r->source, entry->at, "found a second policy \"%s\": the first begins in line "
                                                               "%u, and names tell counts apart",
                                        policy->name, config->policies[i].line);
        config->policy_count++;
    }
    return check_together(r, node);
}

/* ---- who the client is ---- */

static tg_status
check_client(const reader *r, const tg_node *at, const tg_client_options *options)
{
    tg_client *client;
    tg_error fault;
    if (tg_client_open(options, &client, &fault) != TG_OK)
        return fault_in(r, at, &fault, false);
    tg_client_close(client);
    return TG_OK;
}

static tg_status
read_proxies(const reader *r, const tg_node *node)
{
    tg_config *config = r->config;
    const tg_node *entry;
    if (node->kind == TG_NODE_LIST && node->count == 0)
        return TG_OK; /* nobody, said in so many words */
    tg_status status = want_entries(r, node, "a network (\"10.0.0.0/8\", \"unix:\")", &entry,
                                    &config->trusted_proxy_count);
    if (status != TG_OK)
        return status;
    config->trusted_proxies = tg__arena_take(r->kept, config->trusted_proxy_count * sizeof *config->trusted_proxies);
    if (!config->trusted_proxies)
        return no_memory(r);
    for (size_t i = 0; entry && status == TG_OK; entry = after(node, entry), i++) {
        status = check_client(r, entry,
                              &(tg_client_options){ .trusted_proxies = &entry->text, .trusted_proxy_count = 1 });
        if (status == TG_OK)
            status = keep_text(r, entry->text, &config->trusted_proxies[i]);
    }
    return status;
}

/* ---- the whole ---- */

static tg_status
read_defaults(reader *r, const tg_node *node)
{
    static const char *const known[] = { "on_store_failure", "on_full", "missing_identity", NULL };
    static const char *const later[] = { "headers", "body", "mode", "reset_format", "exempt", "deny", "log_decisions",
                                         NULL };
    static const keys allowed = { "defaults", known, later };
    const tg_node *values[KEYS_MAX];
    const tg_status status = read_keys(r, node, &allowed, values);
    return status == TG_OK ? read_choices(r, values[0], values[1], values[2], &r->defaults) : status;
}

static tg_status
read_file(reader *r, const tg_node *root)
{
    enum { STORE, SPACE, PROXIES, CLIENT_HEADER, USER_HEADER, DEFAULTS, POLICIES };
    static const char *const known[] = { "store",       "namespace", "trusted_proxies", "client_header",
                                         "user_header", "defaults",  "policies",        NULL };
    static const char *const later[] = { "include", "plans", "headers", "body",         "log_decisions", "pause_when",
                                         "exempt",  "deny",  "secret",  "reset_format", "mode",          NULL };
    static const keys allowed = { "the rules file", known, later };
    tg_config *config = r->config;
    const tg_node *values[KEYS_MAX];
    if (!root)
        return tg__source_error(&r->source, 0, "found nothing, expected a mapping with \"policies\"");
    tg_status status = read_keys(r, root, &allowed, values);
    if (status == TG_OK && values[STORE]) {
        config->store_line = tg__source_line(&r->source, values[STORE]->at);
        status = read_string(r, values[STORE], "a store (\"shared://shop\")", &config->store);
    }
    if (status == TG_OK && values[SPACE])
        status = read_name(r, values[SPACE], "a namespace", config->space);
    if (status == TG_OK && values[PROXIES])
        status = read_proxies(r, values[PROXIES]);
    if (status == TG_OK && values[CLIENT_HEADER]) {
        status = read_string(r, values[CLIENT_HEADER], "a header's name", &config->client_header);
        if (status == TG_OK)
            status = check_client(r, values[CLIENT_HEADER],
                                  &(tg_client_options){ .client_header = tg_text_of(config->client_header) });
    }
    if (status == TG_OK && values[USER_HEADER]) {
        status = read_string(r, values[USER_HEADER], "a header's name", &config->user_header);
        if (status == TG_OK)
            status = check_client(r, values[USER_HEADER],
                                  &(tg_client_options){ .user_header = tg_text_of(config->user_header) });
    }
    if (status == TG_OK && values[DEFAULTS])
        status = read_defaults(r, values[DEFAULTS]);
    if (status == TG_OK && !values[POLICIES])
        return tg__source_error(&r->source, root->at, "found no \"policies\", expected a list of them");
    if (status == TG_OK)
        status = read_policies(r, values[POLICIES]);
    return status;
}

tg_status
tg__config_parse(tg_text yaml, const char *path, tg_config **config, tg_error *error)
{
    holder *held = calloc(1, sizeof *held);
    tg_arena tree = { 0 };
    tg_node *root = NULL;
    if (!held)
        return tg__error(error, TG_E_NOMEM, "%s: out of memory while reading", path);
    reader r = {
        .source = { .text = yaml, .path = path, .arena = &tree, .error = error },
        .kept = &held->arena,
        .config = &held->config,
    };
    strcpy(held->config.space, "default");
    held->config.path = tg__arena_copy(&held->arena, tg_text_of(path));
    tg_status status = held->config.path ? tg__yaml_read(&r.source, &root) : no_memory(&r);
    if (status == TG_OK)
        status = read_file(&r, root);
    tg__arena_free(&tree);
    if (status == TG_OK)
        *config = &held->config;
    else
        tg__config_close(&held->config);
    return status;
}

void
tg__config_close(tg_config *config)
{
    if (!config)
        return;
    holder *held = (holder *)config;
    tg__arena_free(&held->arena);
    free(held);
}

/* Reads at most one byte more than a rules file may have, so that a too long one is told apart from a full one. */
static tg_status
read_all(int fd, const char *path, char *buffer, size_t *length, tg_error *error)
{
    *length = 0;
    while (*length <= TG_CONFIG_BYTES_MAX) {
        const ssize_t got = read(fd, buffer + *length, TG_CONFIG_BYTES_MAX + 1 - *length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return tg__error_system(error, TG_E_CONFIG, errno, "%s: cannot be read", path);
        if (got == 0)
            return TG_OK;
        *length += (size_t)got;
    }
    return TG_OK;
}

tg_status
tg__config_read(const char *path, tg_config **config, tg_error *error)
{
    char *buffer = NULL;
    struct stat before, since;
    size_t length;
    tg_status status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* a FIFO's writer is not waited for */
    if (fd == -1)
        return tg__error_system(error, TG_E_CONFIG, errno, "%s: the rules file cannot be opened", path);
    if (fstat(fd, &before) == -1) {
        status = tg__error_system(error, TG_E_CONFIG, errno, "%s: the rules file cannot be read", path);
        goto done;
    }
    if (!S_ISREG(before.st_mode)) {
        status = tg__error(error, TG_E_CONFIG, "%s: found no regular file, expected a rules file", path);
        goto done;
    }
    buffer = malloc(TG_CONFIG_BYTES_MAX + 1);
    if (!buffer) {
        status = tg__error(error, TG_E_NOMEM, "%s: out of memory while reading", path);
        goto done;
    }
    status = read_all(fd, path, buffer, &length, error);
    if (status != TG_OK)
        goto done;
    /* An editor that writes in place may have written half: half a list of policies is a good file that lets much
     * through. */
    if (fstat(fd, &since) == -1 || since.st_size != before.st_size || since.st_mtim.tv_sec != before.st_mtim.tv_sec ||
        since.st_mtim.tv_nsec != before.st_mtim.tv_nsec || (off_t)length < before.st_size)
        status = tg__error(error, TG_E_CONFIG, "%s: the rules file was being written while it was read: read it again",
                           path);
    if (length > TG_CONFIG_BYTES_MAX)
        status = tg__error(error, TG_E_CONFIG, "%s: found more than %u bytes, expected a rules file", path,
                           TG_CONFIG_BYTES_MAX);
    if (status == TG_OK)
        status = tg__config_parse((tg_text){ buffer, length }, path, config, error);
done:
    close(fd);
    free(buffer);
    return status;
}
