/* One policy of a rules file: which requests it speaks of, its rules, whom it counts.
 * Must not enter: how policies act together (config.c). */
#include "config/reader.h"

#include "base/words.h"
#include "config/match.h"
#include "identity/identity.h"

/* ---- match ---- */

static const char *const METHODS[] = { "GET",   "HEAD",     "POST",      "PUT",   "PATCH",  "DELETE", "OPTIONS",
                                       "TRACE", "CONNECT",  "PROPFIND",  "MKCOL", "COPY",   "MOVE",   "LOCK",
                                       "UNLOCK", "PROPPATCH", "REPORT",  "SEARCH", "QUERY", "PURGE",  NULL };

typedef bool (*pattern_reader)(tg_arena *, tg_text, tg_pattern *, const char **);

static tg_status
read_patterns(const tg_reader *r, const tg_node *node, const char *what, pattern_reader read, tg_pattern **patterns,
              size_t *count)
{
    const tg_node *entry;
    tg_status status = tg__want_entries(r, node, what, &entry, count);
    if (status != TG_OK)
        return status;
    *patterns = tg__arena_take(r->kept, *count * sizeof **patterns);
    if (!*patterns)
        return tg__read_no_memory(r);
    for (size_t i = 0; entry; entry = tg__read_after(node, entry), i++) {
        const char *fault;
        char shown[96];
        const bool made = read(r->kept, entry->text, &(*patterns)[i], &fault);
        if (fault)
            return tg__source_error(&r->source, entry->at, "found %s, %s", tg__node_show(entry, shown, sizeof shown),
                                    fault);
        if (!made)
            return tg__read_no_memory(r);
    }
    return TG_OK;
}

static tg_status
read_match_headers(const tg_reader *r, const tg_node *node, tg_match *match)
{
    char shown[96];
    if (node->kind != TG_NODE_MAP || node->count == 0)
        return tg__source_error(&r->source, node->at, "found %s, expected headers and their values: {X-Beta: \"1\"}",
                                tg__node_show(node, shown, sizeof shown));
    match->headers = tg__arena_take(r->kept, node->count * sizeof *match->headers);
    if (!match->headers)
        return tg__read_no_memory(r);
    for (const tg_node *key = node->first; key; key = key->next->next) {
        tg_match_header *header = &match->headers[match->header_count];
        if (!tg__header_name(key->text, &header->name))
            return tg__source_error(&r->source, key->at, "found %s, expected a header's name",
                                    tg__node_show(key, shown, sizeof shown));
        for (size_t i = 0; i < match->header_count; i++)
            if (strcmp(match->headers[i].name.text, header->name.text) == 0)
                return tg__source_error(&r->source, key->at, "found the header %s a second time",
                                        tg__node_show(key, shown, sizeof shown));
        const tg_status status = read_patterns(r, key->next, "a value", tg__pattern_value, &header->values,
                                               &header->value_count);
        if (status != TG_OK)
            return status;
        match->header_count++;
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
    static const char *const known[] = { "path", "methods", "host", "route", "header", NULL };
    static const char *const later[] = { "query", NULL };
    static const tg_keys allowed = { "match", known, later };
    const tg_node *values[TG_KEYS_MAX];
    tg_status status = tg__read_keys(r, node, &allowed, values);
    if (status != TG_OK)
        return status;
    if (node->count == 0)
        return tg__source_error(&r->source, node->at, "found an empty match, expected path, methods, host, route or "
                                                      "header; a policy for every request has no match at all");
    policy->match = tg__arena_take(r->kept, sizeof *policy->match);
    if (!policy->match)
        return tg__read_no_memory(r);
    if (values[0])
        status = read_patterns(r, values[0], "a path", tg__pattern_path, &policy->match->paths,
                               &policy->match->path_count);
    if (status == TG_OK && values[1])
        status = read_methods(r, values[1], policy->match);
    if (status == TG_OK && values[2])
        status = read_patterns(r, values[2], "a host", tg__pattern_host, &policy->match->hosts,
                               &policy->match->host_count);
    if (status == TG_OK && values[3])
        policy->route_place = tg__source_place(&r->source, values[3]->at);
    if (status == TG_OK && values[3])
        status = read_patterns(r, values[3], "a route's template", tg__pattern_route, &policy->match->routes,
                               &policy->match->route_count);
    if (status == TG_OK && values[4])
        status = read_match_headers(r, values[4], policy->match);
    return status;
}

/* ---- rules and by ---- */

/* Where each rule of a text stands: `places` from the `count`-th on. */
static void
place_rules(const tg_reader *r, const tg_node *text, tg_place places[TG_RULES_MAX], size_t *count)
{
    bool before = true; /* between two rules */
    for (size_t i = 0; i < text->text.length && *count < TG_RULES_MAX; i++) {
        const char c = text->text.data[i];
        if (c == ';' || c == ',') {
            before = true;
        } else if (before && c != ' ' && !(c >= '\t' && c <= '\r')) {
            places[(*count)++] = tg__source_place(&r->source, tg__node_at(&r->source, text, i));
            before = false;
        }
    }
}

/* A rule text or a list of them, whole as one text. `places` may be NULL. */
static tg_status
read_rules(const tg_reader *r, const tg_node *node, tg_rule rules[TG_RULES_MAX], size_t *rule_count, char **rules_text,
           tg_place *places)
{
    size_t placed = 0;
    const tg_node *entry;
    tg_error fault;
    size_t count, length = 0;
    tg_status status = tg__want_entries(r, node, "rules (\"5/minute; 50/day\")", &entry, &count);
    if (status != TG_OK)
        return status;
    /* Each entry alone first: its faults have a place. Then all together: what two entries do to each other. */
    for (const tg_node *one = entry; one; one = tg__read_after(node, one)) {
        if (tg_rules_parse(one->text, TG_ALGORITHM_DEFAULT, rules, rule_count, &fault) != TG_OK)
            return tg__read_fault(r, one, &fault, true);
        length += one->text.length + 2;
        if (places)
            place_rules(r, one, places, &placed);
    }
    *rules_text = tg__arena_take(r->kept, length + 1);
    if (!*rules_text)
        return tg__read_no_memory(r);
    char *at = *rules_text;
    for (const tg_node *one = entry; one; one = tg__read_after(node, one)) {
        if (one != entry)
            at = stpcpy(at, "; ");
        memcpy(at, one->text.data, one->text.length);
        at += one->text.length;
    }
    const tg_text whole = { *rules_text, (size_t)(at - *rules_text) };
    if (memchr(whole.data, '\0', whole.length))
        return tg__source_error(&r->source, node->at, "found a NUL byte, expected rules");
    if (tg_rules_parse(whole, TG_ALGORITHM_DEFAULT, rules, rule_count, &fault) != TG_OK)
        return tg__read_fault(r, node, &fault, false);
    return TG_OK;
}

/* ---- plans ---- */

static const tg_plan *
plan_named(const tg_policy *policy, tg_text name)
{
    for (size_t i = 0; i < policy->plan_count; i++)
        if (policy->plans[i].name.length == name.length && memcmp(policy->plans[i].name.data, name.data, name.length) == 0)
            return &policy->plans[i];
    return NULL;
}

static tg_status
read_plan(const tg_reader *r, const tg_node *key, tg_policy *policy)
{
    char name[TG_NAME_BYTES_MAX + 1], shown[96];
    tg_rule rules[TG_RULES_MAX];
    tg_plan *plan = &policy->plans[policy->plan_count];
    tg_status status = tg__read_name(r, key, "a plan's name", name);
    if (status == TG_OK && plan_named(policy, tg_text_of(name)))
        return tg__source_error(&r->source, key->at, "found the plan %s a second time",
                                tg__node_show(key, shown, sizeof shown));
    if (status == TG_OK && policy->plan_count == TG_PLANS_MAX)
        return tg__source_error(&r->source, key->at, "found more than %d plans", TG_PLANS_MAX);
    if (status == TG_OK)
        status = tg__read_kept(r, tg_text_of(name), &plan->name);
    if (status == TG_OK)
        status = read_rules(r, key->next, rules, &plan->rule_count, &plan->rules_text, NULL);
    plan->place = tg__source_place(&r->source, key->next->at);
    if (status == TG_OK)
        policy->plan_count++;
    return status;
}

/* {header: X-Plan, default: free, free: 60/minute, pro: 600/minute} */
static tg_status
read_plans(const tg_reader *r, const tg_node *node, const tg_node *rules, tg_policy *policy)
{
    char shown[96];
    const tg_node *default_plan = NULL;
    tg_status status = TG_OK;
    if (node->kind != TG_NODE_MAP)
        return tg__source_error(&r->source, node->at, "found %s, expected plans and their rules: {default: free, free: "
                                                      "60/minute, pro: 600/minute}",
                                tg__node_show(node, shown, sizeof shown));
    policy->plans = tg__arena_take(r->kept, (TG_PLANS_MAX + 1) * sizeof *policy->plans);
    if (!policy->plans)
        return tg__read_no_memory(r);
    for (const tg_node *key = node->first; status == TG_OK && key; key = key->next->next) {
        if (tg__text_is(key->text, "default")) {
            default_plan = key->next;
            status = tg__want_text(r, default_plan, "the name of a plan");
        } else if (tg__text_is(key->text, "header")) {
            status = tg__want_text(r, key->next, "a header's name");
            if (status == TG_OK && !tg__header_name(key->next->text, &policy->plan_header))
                return tg__source_error(&r->source, key->next->at, "found %s, expected a header's name",
                                        tg__node_show(key->next, shown, sizeof shown));
        } else {
            status = read_plan(r, key, policy);
        }
    }
    if (status != TG_OK)
        return status;
    if (policy->plan_count == 0)
        return tg__source_error(&r->source, node->at, "found no plan, expected names and their rules");
    if (rules && default_plan)
        return tg__source_error(&r->source, default_plan->at, "found \"default\" beside \"rules\", which hold for whoever "
                                                              "has none of the plans: expected one of the two");
    if (!rules && !default_plan)
        return tg__source_error(&r->source, node->at, "found no \"default\", expected the plan of whoever has none");
    if (default_plan) {
        const tg_plan *plan = plan_named(policy, default_plan->text);
        tg_error fault;
        if (!plan)
            return tg__source_error(&r->source, default_plan->at, "found no plan %s, expected one of those given here",
                                    tg__node_show(default_plan, shown, sizeof shown));
        policy->rules_text = plan->rules_text;
        if (tg_rules_parse(tg_text_of(plan->rules_text), TG_ALGORITHM_DEFAULT, policy->rules, &policy->rule_count,
                           &fault) != TG_OK)
            return tg__read_fault(r, default_plan, &fault, false);
    }
    return TG_OK;
}

/* ---- cost ---- */

/* 5, or {header: X-Cost, default: 1, min: 1, max: 100}, or the same with query, or {response_header: X-Cost, reserve: 1,
 * max: 100} */
static tg_status
read_cost(const tg_reader *r, const tg_node *node, tg_cost *cost)
{
    enum { HEADER, QUERY, RESPONSE, DEFAULT, RESERVE, MIN, MAX };
    static const char *const known[] = { "header", "query", "response_header", "default", "reserve", "min", "max", NULL };
    static const char *const none[] = { NULL };
    static const tg_keys allowed = { "cost", known, none };
    const tg_node *values[TG_KEYS_MAX];
    char shown[96];
    if (node->kind == TG_NODE_SCALAR)
        return tg__read_number(r, node, 0, TG_LIMIT_MAX, &cost->units);
    tg_status status = tg__read_keys(r, node, &allowed, values);
    if (status != TG_OK)
        return status;
    if (!!values[HEADER] + !!values[QUERY] + !!values[RESPONSE] != 1)
        return tg__source_error(&r->source, node->at, "found %s of \"header\", \"query\" and \"response_header\", expected "
                                                      "one of them",
                                values[HEADER] || values[QUERY] || values[RESPONSE] ? "several" : "none");
    if (!!values[RESPONSE] && values[DEFAULT])
        return tg__source_error(&r->source, values[DEFAULT]->at, "found \"default\", expected \"reserve\": what is taken "
                                                                 "until the response says what it cost");
    if (!values[RESPONSE] && values[RESERVE])
        return tg__source_error(&r->source, values[RESERVE]->at, "found \"reserve\", expected \"default\": what is taken "
                                                                 "where nothing says what it costs");
    if (!values[MAX])
        return tg__source_error(&r->source, node->at, "found no \"max\", expected what one request costs at most");
    const tg_node *name = values[HEADER] ? values[HEADER] : values[QUERY] ? values[QUERY] : values[RESPONSE];
    const tg_node *standing = values[RESPONSE] ? values[RESERVE] : values[DEFAULT];
    cost->source = values[HEADER] ? TG_COST_HEADER : values[QUERY] ? TG_COST_QUERY : TG_COST_RESPONSE;
    cost->units = 1;
    cost->least = values[RESPONSE] ? 0 : 1;
    status = tg__want_text(r, name, "a name");
    if (status == TG_OK && !values[QUERY] && !tg__header_name(name->text, &cost->header))
        return tg__source_error(&r->source, name->at, "found %s, expected a header's name",
                                tg__node_show(name, shown, sizeof shown));
    if (status == TG_OK && values[QUERY])
        status = tg__read_kept(r, name->text, &cost->query);
    if (status == TG_OK)
        status = tg__read_number(r, values[MAX], 1, TG_LIMIT_MAX, &cost->most);
    if (status == TG_OK && values[MIN])
        status = tg__read_number(r, values[MIN], 0, cost->most, &cost->least);
    if (status == TG_OK && standing)
        status = tg__read_number(r, standing, 0, cost->most, &cost->units);
    return status;
}

/* ---- count ---- */

/* {status: [401, "4xx"]} */
static tg_status
read_count(const tg_reader *r, const tg_node *node, tg_counted *counted)
{
    static const char *const known[] = { "status", NULL };
    static const char *const none[] = { NULL };
    static const tg_keys allowed = { "count", known, none };
    const tg_node *values[TG_KEYS_MAX], *entry;
    char shown[96];
    size_t count;
    tg_status status = tg__read_keys(r, node, &allowed, values);
    if (status == TG_OK && !values[0])
        return tg__source_error(&r->source, node->at, "found no \"status\" in count, expected 401, \"4xx\" or a list");
    if (status == TG_OK)
        status = tg__want_entries(r, values[0], "a status (401, \"4xx\")", &entry, &count);
    if (status != TG_OK)
        return status;
    counted->some = true;
    for (; entry; entry = tg__read_after(values[0], entry)) {
        uint64_t first = 0, last = 0;
        const tg_text text = entry->text;
        if (text.length == 3 && text.data[0] >= '1' && text.data[0] <= '5' && text.data[1] == 'x' && text.data[2] == 'x') {
            first = (uint64_t)(text.data[0] - '0') * 100;
            last = first + 99;
        } else if (tg__text_number(text, 599, &first) && first >= 100) {
            last = first;
        } else {
            return tg__source_error(&r->source, entry->at, "found %s, expected a status from 100 to 599, or 1xx to 5xx",
                                    tg__node_show(entry, shown, sizeof shown));
        }
        for (uint64_t i = first; i <= last; i++)
            counted->statuses[(i - 100) / 8] |= (uint8_t)(1u << (i - 100) % 8);
    }
    return TG_OK;
}

/* ---- by ---- */

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
        policy->by_place[i] = tg__source_place(&r->source, entry->at);
        status = tg__read_kept(r, entry->text, &policy->by[i]);
    }
    return status;
}

/* ---- policies ---- */

tg_status
tg__read_policy(const tg_reader *r, const tg_node *node, const char *default_name, tg_policy *policy)
{
    enum { NAME = TG_SETTINGS, MATCH, RULES, BY, ALSO, EXEMPT, DENY, COST, PLANS, COUNT, COUNT_DENIED };
    static const char *const known[] = { TG_SETTINGS_WORDS, "name",  "match", "rules", "by",  "also", "exempt",
                                         "deny",            "cost",  "plans", "count", "count_denied",
                                         NULL };
    static const char *const later[] = { "max_delay", NULL };
    static const tg_keys allowed = { "a policy", known, later };
    const tg_node *values[TG_KEYS_MAX];
    tg_status status = tg__read_keys(r, node, &allowed, values);
    if (status != TG_OK)
        return status;
    *policy = r->defaults;
    policy->file = r->file;
    policy->line = tg__source_line(&r->source, node->at);
    policy->watch = 0;
    policy->cost.units = 1;
    if (!values[NAME] && !default_name)
        return tg__source_error(&r->source, node->at, "found a policy without \"name\"");
    if (values[NAME])
        status = tg__read_name(r, values[NAME], "a policy's name", policy->name);
    else
        strcpy(policy->name, default_name);
    if (status == TG_OK && default_name && (values[MATCH] || values[ALSO]))
        return tg__source_error(&r->source, (values[MATCH] ? values[MATCH] : values[ALSO])->at,
                                "found \"%s\" in \"%s\", which is for every request that no policy matches",
                                values[MATCH] ? "match" : "also", default_name);
    if (status == TG_OK && !values[RULES] && !values[PLANS])
        return tg__source_error(&r->source, node->at, "found policy \"%s\" without \"rules\" (\"5/minute; 50/day\")",
                                policy->name);
    if (status == TG_OK && values[MATCH])
        status = read_match(r, values[MATCH], policy);
    if (status == TG_OK && values[RULES])
        status = read_rules(r, values[RULES], policy->rules, &policy->rule_count, &policy->rules_text,
                            policy->rule_place);
    if (status == TG_OK && values[PLANS])
        status = read_plans(r, values[PLANS], values[RULES], policy);
    policy->rules_most = policy->rule_count;
    for (size_t i = 0; i < policy->plan_count; i++)
        if (policy->plans[i].rule_count > policy->rules_most)
            policy->rules_most = policy->plans[i].rule_count;
    if (status == TG_OK)
        status = read_by(r, values[BY], policy);
    if (status == TG_OK && values[EXEMPT])
        status = tg__read_roll(r, values[EXEMPT], &policy->exempt);
    if (status == TG_OK && values[DENY])
        status = tg__read_roll(r, values[DENY], &policy->deny);
    if (status == TG_OK && values[COST])
        status = read_cost(r, values[COST], &policy->cost);
    if (status == TG_OK && values[COUNT])
        status = read_count(r, values[COUNT], &policy->counted);
    if (status == TG_OK && (policy->counted.some || policy->cost.source == TG_COST_RESPONSE))
        policy->settle_place = tg__source_place(&r->source, (values[COUNT] ? values[COUNT] : values[COST])->at);
    if (status == TG_OK && policy->rules_most * policy->by_count > TG_TARGETS_MAX)
        return tg__source_error(&r->source, node->at,
                                "policy \"%s\" has %zu rules for each of %zu dimensions, expected at most %d pairs of "
                                "them",
                                policy->name, policy->rules_most, policy->by_count, TG_TARGETS_MAX);
    if (status == TG_OK)
        status = tg__read_settings(r, values, policy);
    if (status == TG_OK && values[ALSO])
        status = tg__read_flag(r, values[ALSO], &policy->also);
    if (status == TG_OK && values[COUNT_DENIED])
        status = tg__read_flag(r, values[COUNT_DENIED], &policy->count_denied);
    for (const char *at = policy->name; *at; at++)
        policy->watch = (policy->watch ^ (uint8_t)*at) * UINT32_C(16777619); /* FNV-1a; a clash mixes two error rates */
    return status;
}
