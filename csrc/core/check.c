/* What a rules file says that is allowed but hardly meant. Each warning is sound: where it is not sure it is silent.
 * Must not enter: what is wrong outright (config/ refuses that), stores that would have to be asked. */
#include "core/gate.h"

#include "config/config.h"
#include "config/yaml_tree.h"
#include "core/criteria.h"
#include "identity/address.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define DAY_US UINT64_C(86400000000)

typedef struct checker {
    const tg_config *config;
    const char *store;
    tg_warning *warnings;
    size_t room, count;
    /* The tree of the file once more, for places that the config does not keep. */
    tg_source source;
    tg_node *root;
    tg_text face;
    unsigned known; /* TG_FACE_ bits; 0: no face is named */
} checker;

/* ---- places ---- */

static const tg_node *
child(const tg_node *map, const char *key)
{
    if (map && map->kind == TG_NODE_MAP)
        for (const tg_node *at = map->first; at; at = at->next->next)
            if (tg__text_is(at->text, key))
                return at->next;
    return NULL;
}

/* The n-th entry of a list, or the value that stands in a list's place. */
static const tg_node *
entry(const tg_node *list, size_t n)
{
    if (!list || list->kind != TG_NODE_LIST)
        return n == 0 ? list : NULL;
    const tg_node *at = list->first;
    while (at && n-- > 0)
        at = at->next;
    return at;
}

/* The policy in the tree, found by its name: one that came by another way than this file has no node here. */
static const tg_node *
policy_node(const checker *c, const tg_policy *policy)
{
    const tg_node *list = child(c->root, "policies");
    for (const tg_node *at = list && list->kind == TG_NODE_LIST ? list->first : NULL; at; at = at->next) {
        const tg_node *name = child(at, "name");
        if (name && name->kind == TG_NODE_SCALAR && tg__text_is(name->text, policy->name))
            return at;
    }
    return NULL;
}

static void __attribute__((format(printf, 5, 6)))
warn(checker *c, const char *code, const tg_node *at, unsigned line, const char *format, ...)
{
    if (c->count++ >= c->room)
        return;
    tg_warning *warning = &c->warnings[c->count - 1];
    *warning = (tg_warning){ .line = line };
    snprintf(warning->code, sizeof warning->code, "%s", code);
    if (at) {
        size_t start = at->at;
        warning->line = tg__source_line(&c->source, start);
        while (start > 0 && c->source.text.data[start - 1] != '\n')
            start--;
        warning->column = (unsigned)(at->at - start + 1);
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(warning->message, sizeof warning->message, format, arguments);
    va_end(arguments);
}

/* ---- rules that never bite ---- */

static bool
is_bucket(const tg_rule *rule)
{
    return rule->algorithm == TG_TOKEN_BUCKET || rule->algorithm == TG_LEAKY_BUCKET;
}

/* The most units that `rule` admits in any interval of `interval_us`. Never too little. */
static tg_u128
admits_at_most(const tg_rule *rule, tg_u128 interval_us)
{
    const tg_u128 limit = rule->limit, period = rule->period_us;
    const tg_u128 periods = (interval_us + period - 1) / period;
    if (is_bucket(rule))
        return rule->burst + (limit * interval_us + period - 1) / period;
    if (rule->algorithm == TG_SLIDING_LOG)
        return limit * periods;
    return limit * (periods + 1); /* windows: the interval may touch one more */
}

/* Whether `rule` never denies what `other`, judged with it for the same identity, would allow. Then every unit that it
 * counts has passed `other`, and that alone keeps it below its own limit. */
static bool
never_bites(const tg_rule *rule, const tg_rule *other)
{
    if (rule->algorithm == TG_DENY || other->algorithm == TG_DENY)
        return rule->algorithm != TG_DENY;
    if (!is_bucket(rule)) {
        /* The counter weighs units of up to two periods. */
        const tg_u128 memory_us = (tg_u128)rule->period_us * (rule->algorithm == TG_SLIDING_COUNTER ? 2 : 1);
        return admits_at_most(other, memory_us) <= rule->limit;
    }
    /* A bucket holds whatever keeps below burst + rate * time: `other` does with its own peak and rate. */
    const tg_u128 peak = is_bucket(other)                        ? other->burst
                         : other->algorithm == TG_SLIDING_LOG ? other->limit
                                                                 : (tg_u128)2 * other->limit;
    return peak <= rule->burst &&
           (tg_u128)other->limit * rule->period_us <= (tg_u128)rule->limit * other->period_us;
}

/* The rules of a policy, or of one plan of it, and where they stand. */
typedef struct rule_list {
    const tg_rule *rules;
    size_t count;
    const tg_node *at;
    const char *of; /* "", or " for plan " and then its name */
    const char *plan;
} rule_list;

static void
check_rules(checker *c, const tg_policy *policy, const rule_list *list)
{
    char one[TG_RULE_TEXT_MAX], other[TG_RULE_TEXT_MAX];
    const tg_rule *rules = list->rules;
    for (size_t i = 0; i < list->count; i++)
        for (size_t j = 0; j < list->count; j++) {
            if (i == j || !never_bites(&rules[i], &rules[j]) || (j > i && never_bites(&rules[j], &rules[i])))
                continue; /* of two that come to the same the second is named */
            tg_rule_text(&rules[i], one);
            tg_rule_text(&rules[j], other);
            warn(c, "never-bites", list->at, policy->line,
                 "policy \"%s\"%s%s: \"%s\" never refuses anything that \"%s\" lets through; drop it, or one of the two is "
                 "mistyped",
                 policy->name, list->of, list->plan, one, other);
            break;
        }
}

/* ---- policies that never judge ---- */

/* A byte that no pattern's text holds stands for whatever a '*' could be: what meets a pattern with it meets it with
 * anything in its place. */
#define ANYTHING '\x01'

enum { SAMPLE_BYTES = 2048, SAMPLES_MAX = 64 };

/* Each '*' as so many segments: what stands for one segment only must not pass for what stands for any run of them.
 * false: too long to be sure of anything. */
static bool
sample_of(const tg_criterion *criterion, size_t n, unsigned segments, char sample[SAMPLE_BYTES])
{
    char written[1100] = "/*"; /* any path */
    size_t used = 0;
    if (criterion)
        tg__criterion_text(criterion, n, written, sizeof written);
    for (const char *at = written; *at; at++) {
        if (used + 2 * segments + 2 > SAMPLE_BYTES)
            return false;
        if (*at != '*')
            sample[used++] = *at;
        else
            for (unsigned i = 0; i < segments; i++) {
                if (i)
                    sample[used++] = '/';
                sample[used++] = ANYTHING;
            }
    }
    sample[used] = '\0';
    return strlen(written) + 1 < sizeof written;
}

/* The policy before `index` that takes this request, NULL when none does. */
static const tg_policy *
taken_before(const tg_config *config, size_t index, const tg_request *request)
{
    const tg_config before = { .policies = config->policies, .policy_count = index };
    size_t found[TG_LIMITERS_MAX];
    const size_t count = tg__config_match(&before, request, found);
    for (size_t i = 0; i < count; i++)
        if (!config->policies[found[i]].also)
            return &config->policies[found[i]];
    return NULL;
}

/* The first policy that takes what this one speaks of, when all of it is taken. */
static const tg_policy *
shadowed_by(const checker *c, size_t index, unsigned segments)
{
    const tg_policy *policy = &c->config->policies[index], *first = NULL;
    tg_criterion criteria[TG_CRITERIA_MAX], *of[3] = { NULL, NULL, NULL };
    static const char *const words[] = { "path", "method", "host" };
    char sample[3][SAMPLE_BYTES] = { "/\x01", "\x01", "\x01" };
    size_t counts[3] = { 1, 1, 1 };
    const size_t count = tg__criteria_of(policy->match, criteria);
    for (size_t i = 0; i < count; i++)
        for (size_t w = 0; w < 3; w++)
            if (strcmp(criteria[i].word, words[w]) == 0) {
                of[w] = &criteria[i];
                counts[w] = tg__criterion_count(&criteria[i]);
            }
    if (counts[0] * counts[1] * counts[2] > SAMPLES_MAX)
        return NULL;
    for (size_t p = 0; p < counts[0]; p++)
        for (size_t m = 0; m < counts[1]; m++)
            for (size_t h = 0; h < counts[2]; h++) {
                const size_t chosen[3] = { p, m, h };
                for (size_t w = 0; w < 3; w++)
                    if ((of[w] || w == 0) && !sample_of(of[w], chosen[w], w == 0 ? segments : 1, sample[w]))
                        return NULL;
                tg_request request = {
                    .path = tg_text_of(sample[0]), .method = tg_text_of(sample[1]), .host = tg_text_of(sample[2])
                };
                const tg_policy *taken = taken_before(c->config, index, &request);
                if (!taken)
                    return NULL;
                /* "/api/" and '*' meets "/api" too. */
                const size_t length = strlen(sample[0]);
                if (segments == 1 && length >= 2 && sample[0][length - 1] == ANYTHING &&
                    sample[0][length - 2] == '/') {
                    request.path.length = length > 2 ? length - 2 : 1;
                    if (!taken_before(c->config, index, &request))
                        return NULL;
                }
                if (!first)
                    first = taken;
            }
    return first;
}

static void
check_shadowed(checker *c, size_t index)
{
    static const unsigned runs[] = { 1, 2, 3, 4, 41 }; /* nobody writes a pattern of 41 segments */
    const tg_policy *policy = &c->config->policies[index], *first = NULL;
    if (policy->also)
        return;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        const tg_policy *taken = shadowed_by(c, index, runs[i]);
        if (!taken)
            return;
        if (!first)
            first = taken;
    }
    warn(c, "shadowed", policy_node(c, policy), policy->line,
         "policy \"%s\" never judges: \"%s\" in line %u takes every request it speaks of; put it first, or mark it "
         "also: true",
         policy->name, first->name, first->line);
}

/* ---- who is counted ---- */

static bool
has_prefix(tg_text word, const char *prefix)
{
    const size_t length = strlen(prefix);
    return word.length >= length && tg__text_is_nocase((tg_text){ word.data, length }, prefix);
}

/* Cuts the next word off at any of the separators. */
static bool
next_word(tg_text *rest, const char *separators, tg_text *word)
{
    if (!rest->data)
        return false;
    size_t length = 0;
    while (length < rest->length && !strchr(separators, rest->data[length]))
        length++;
    *word = tg__text_trim((tg_text){ rest->data, length });
    *rest = length < rest->length ? (tg_text){ rest->data + length + 1, rest->length - length - 1 } : (tg_text){ NULL, 0 };
    return true;
}

/* A part whose value is the client's own word. */
static bool
is_invented(tg_text word)
{
    static const char *const prefixes[] = { "header:", "cookie:", "query:", "form:", "json:", "api_key", "fingerprint" };
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (has_prefix(word, prefixes[i]))
            return true;
    return false;
}

/* A part that tells one client from another. */
static bool
tells_clients_apart(tg_text word)
{
    return is_invented(word) || tg__text_is(word, "ip") || tg__text_is(word, "user");
}

static const char *
forwarding_header(tg_text word)
{
    static const char *const names[] = { "X-Forwarded-For", "Forwarded",       "X-Real-IP",      "True-Client-IP",
                                         "CF-Connecting-IP", "X-Client-IP", "X-Cluster-Client-IP" };
    if (!has_prefix(word, "header:"))
        return NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (tg__header_is((tg_text){ word.data + 7, word.length - 7 }, names[i]))
            return names[i];
    return NULL;
}

/* What a face can know: a policy that asks for more is an error, as it is when that face starts. */
static const struct {
    const char *word;
    unsigned bits;
} faces[] = {
    { "asgi", TG_FACE_KNOWN | TG_FACE_BODY | TG_FACE_USER | TG_FACE_ROUTE | TG_FACE_RESPONSE },
    { "flask", TG_FACE_KNOWN | TG_FACE_BODY | TG_FACE_USER | TG_FACE_ROUTE | TG_FACE_RESPONSE },
    { "wsgi", TG_FACE_KNOWN | TG_FACE_BODY | TG_FACE_USER | TG_FACE_RESPONSE },
    { "fcgi", TG_FACE_KNOWN | TG_FACE_USER },
    { "fcgi-relay", TG_FACE_KNOWN | TG_FACE_USER | TG_FACE_BODY | TG_FACE_RESPONSE },
    { "fcgi-auth", TG_FACE_KNOWN | TG_FACE_USER },
    { "cgi", TG_FACE_KNOWN | TG_FACE_USER },
};

static void
check_word(checker *c, const tg_policy *policy, const tg_node *at, tg_text word)
{
    const char *name = forwarding_header(word);
    if (name)
        warn(c, "by-forwarding-header", at, policy->line,
             "policy \"%s\" counts by header:%s as the client sent it: each new value begins a new count; use ip, with "
             "client_header: %s and the proxies in trusted_proxies",
             policy->name, name, name);
}

static void
check_by(checker *c, const tg_policy *policy)
{
    const tg_node *list = child(policy_node(c, policy), "by");
    bool apart = false, firm = false;
    const bool denies = policy->rule_count == 1 && policy->rules[0].algorithm == TG_DENY;
    for (size_t i = 0; i < policy->by_count; i++) {
        tg_text rest = policy->by[i], alternative, word;
        bool all_firm = true;
        while (next_word(&rest, "|", &alternative)) {
            while (next_word(&alternative, "+", &word)) {
                apart |= tells_clients_apart(word);
                all_firm &= !is_invented(word);
                check_word(c, policy, entry(list, i), word);
            }
        }
        firm |= all_firm;
    }
    if (denies)
        return;
    if (!apart)
        warn(c, "one-bucket", list, policy->line,
             "policy \"%s\" counts all clients together: one of them can use it up for everybody; add ip or user, unless "
             "that is what protects what stands behind it",
             policy->name);
    else if (!firm)
        warn(c, "by-invented", list, policy->line,
             "policy \"%s\" counts only by what a client can make up: each new value begins a new count; add a dimension "
             "that it cannot choose, by: [ip, ...]",
             policy->name);
}

static void
check_proxies(checker *c)
{
    const tg_node *list = child(c->root, "trusted_proxies");
    for (size_t i = 0; i < c->config->trusted_proxy_count; i++) {
        tg_network network;
        const tg_text text = c->config->trusted_proxies[i];
        char shown[80];
        if (tg__network_parse(text, &network, NULL) != TG_OK)
            continue; /* "unix:" */
        const bool wide = network.address.ipv4 ? network.bits < 96 + 8 : network.bits < 16;
        if (wide)
            warn(c, "trusts-everybody", entry(list, i), 0,
                 "trusted_proxies holds %s, most of the internet: whoever is in it chooses the address it is counted by; "
                 "name your own proxies",
                 tg__text_show(text, shown, sizeof shown));
    }
}

/* ---- the secret of the store's keys ---- */

enum { SECRET_BYTES_MIN = 16 };

/* Two machines with different secrets each let through the whole limit. */
static void
check_secret(checker *c)
{
    const char *variable = getenv("TIDEGATE_SECRET"), *secret = c->config->secret ? c->config->secret : variable;
    const bool remote = strncmp(c->store, "redis", 5) == 0 || strncmp(c->store, "tiered+", 7) == 0;
    if (!remote || !secret || !*secret)
        return;
    if (!c->config->secret)
        warn(c, "secret-apart", NULL, 0,
             "TIDEGATE_SECRET is set here and the file does not name it: a machine without it counts apart under the one kept "
             "in Redis; with secret: ${TIDEGATE_SECRET} it would not start");
    if (secret[0] != '@' && strlen(secret) < SECRET_BYTES_MIN)
        warn(c, "secret-short", NULL, c->config->secret ? c->config->secret_line : 0,
             "the secret has %zu bytes: whoever reads the keys finds it out by trying; %d random ones will do", strlen(secret),
             SECRET_BYTES_MIN);
}

/* ---- what the store remembers ---- */

static void
check_memory(checker *c, const tg_policy *policy, const rule_list *list)
{
    const bool memory = strncmp(c->store, "memory:", 7) == 0, shared = strncmp(c->store, "shared:", 7) == 0;
    const uint64_t remembers_us = memory ? DAY_US : 7 * DAY_US;
    char rule[TG_RULE_TEXT_MAX];
    for (size_t i = 0; i < list->count && (memory || shared); i++) {
        if (list->rules[i].period_us <= remembers_us)
            continue;
        tg_rule_text(&list->rules[i], rule);
        warn(c, "forgets-before", list->at, policy->line,
             memory ? "policy \"%s\"%s%s: \"%s\" outlasts what memory:// remembers: it begins anew with each start of the "
                      "process"
                    : "policy \"%s\"%s%s: \"%s\" outlasts what shared:// remembers: it begins anew with each boot of the host",
             policy->name, list->of, list->plan, rule);
        break;
    }
}

/* What is said of rules, of the policy's own and of those of its plans; a default plan's are its own too. */
static void
check_all_rules(checker *c, const tg_policy *policy)
{
    const tg_node *node = policy_node(c, policy), *plans = child(node, "plans");
    tg_rule rules[TG_RULES_MAX];
    rule_list list = { policy->rules, policy->rule_count, child(node, "rules"), "", "" };
    if (policy->rule_place[0].line) {
        check_rules(c, policy, &list);
        check_memory(c, policy, &list);
    }
    for (size_t i = 0; i < policy->plan_count; i++) {
        const tg_plan *plan = &policy->plans[i];
        if (tg_rules_parse(tg_text_of(plan->rules_text), TG_ALGORITHM_DEFAULT, rules, &list.count, NULL) != TG_OK)
            continue; /* it was read so */
        list = (rule_list){ rules, list.count, child(plans, plan->name.data), " for plan ", plan->name.data };
        check_rules(c, policy, &list);
        check_memory(c, policy, &list);
    }
}

/* ---- what the face can know ---- */

/* A policy that could not judge at all is an error by now; this one judges, and never pauses. */
static void
check_pause(checker *c, const tg_policy *policy)
{
    const tg_node *node = policy_node(c, policy);
    char shown[24];
    if (policy->pause.period_us == 0 || c->known == 0 || (c->known & TG_FACE_RESPONSE))
        return;
    warn(c, "pause-unseen", child(node, "pause_when") ? child(node, "pause_when") : node, policy->line,
         "policy \"%s\" pauses by how requests are answered, which %s does not see: only other faces on the same table can "
         "make it pause",
         policy->name, tg__text_show(c->face, shown, sizeof shown));
}

/* ---- the whole ---- */

/* The file once more, as a tree. Whatever hinders that only costs columns. */
static void
read_tree(checker *c, tg_arena *arena, char **text)
{
    FILE *file = fopen(c->config->path, "re");
    *text = file ? malloc(TG_CONFIG_BYTES_MAX) : NULL;
    if (*text) {
        const size_t length = fread(*text, 1, TG_CONFIG_BYTES_MAX, file);
        c->source = (tg_source){ .text = { *text, length }, .path = c->config->path, .arena = arena };
        if (tg__yaml_read(&c->source, &c->root) != TG_OK)
            c->root = NULL;
    }
    if (file)
        fclose(file);
}

static int
in_order(const void *left, const void *right)
{
    const tg_warning *a = left, *b = right;
    if (a->line != b->line)
        return a->line < b->line ? -1 : 1;
    if (a->column != b->column)
        return a->column < b->column ? -1 : 1;
    return strcmp(a->message, b->message);
}

static tg_status
open_config(const tg_check_options *options, tg_config **config, tg_error *error)
{
    char path[4096];
    tg_text named = options->path.length ? options->path : tg_text_of(getenv("TIDEGATE_CONFIG"));
    if (named.length == 0)
        return tg__error(error, TG_E_CONFIG, "no rules file: give its path, or set TIDEGATE_CONFIG");
    if (named.length >= sizeof path || memchr(named.data, '\0', named.length))
        return tg__error(error, TG_E_CONFIG, "the path of the rules file is over %zu bytes long, or holds a NUL byte",
                         sizeof path - 1);
    memcpy(path, named.data, named.length);
    path[named.length] = '\0';
    return tg__config_read(path, config, error);
}

/* As a gate chooses it; `given` is room for what the options name. */
static const char *
chosen_store(const tg_check_options *options, const tg_config *config, char *given, size_t size)
{
    const char *variable = getenv("TIDEGATE_STORE");
    snprintf(given, size, "%.*s", (int)options->store.length, options->store.data ? options->store.data : "");
    return given[0]                   ? given
           : variable && variable[0]  ? variable
           : config->store            ? config->store
                                      : "shared://default";
}

/* That the store's address is one; told at its line where the file names it. */
static tg_status
check_store(const tg_config *config, const char *store, tg_error *error)
{
    tg_error fault;
    const tg_status status = tg__store_check_address(tg_text_of(store), NULL, &fault);
    if (status == TG_OK || !error)
        return status;
    *error = fault;
    if (store == config->store && config->store_line) {
        tg__error(error, fault.status, "%s:%u:1: %s", config->store_file, config->store_line, fault.message);
        error->line = config->store_line;
        error->column = 1;
    }
    return status;
}

/* What the store itself says, and what it says of itself, as warnings. One that is not there yet says nothing. */
static tg_status
check_live(checker *c, const tg_config *config, tg_error *error)
{
    const tg_store_options options = { .existing = true, .secret = tg_text_of(config->secret),
                                       .private_kinds = config->private_kinds };
    tg_store *store = NULL;
    tg_notice notice;
    tg_error fault;
    while (tg_notice_take(&notice))
        continue; /* not of this file */
    const tg_status status = tg_store_open(tg_text_of(c->store), &options, &store, &fault);
    if (status != TG_OK && !(status == TG_E_SYSTEM && fault.system_error == ENOENT)) {
        if (error)
            *error = fault;
        return status;
    }
    const tg_status fits = store ? tg__config_check(config, 0, store, (tg_text){ NULL, 0 }, error) : TG_OK;
    if (fits != TG_OK) { /* the table is there, and smaller than its address says now */
        tg_store_close(store);
        return fits;
    }
    if (store && store->ops->examine && store->ops->examine(store, &fault) != TG_OK)
        tg__notice("store-unchecked", "%.400s", fault.message);
    const unsigned line = c->store == config->store ? config->store_line : 0;
    while (tg_notice_take(&notice)) {
        if (strcmp(notice.code, "store-failing") == 0)
            warn(c, notice.code, NULL, line, "the store does not answer, so nothing more is known of it: %.380s",
                 notice.message);
        else
            warn(c, notice.code, NULL, line, "%s", notice.message);
    }
    tg_store_close(store);
    return TG_OK;
}

tg_status
tg_check(const tg_check_options *options, tg_warning *warnings, size_t room, size_t *count, tg_error *error)
{
    checker c = { .warnings = warnings, .room = room, .face = options->face };
    char shown[40], path[4096];
    unsigned known = 0;
    for (size_t i = 0; options->face.length && i < sizeof faces / sizeof *faces; i++)
        if (tg__text_is(options->face, faces[i].word))
            known = faces[i].bits;
    if (options->face.length && !known)
        return tg__error(error, TG_E_ARG,
                         "found the face \"%s\", expected asgi, flask, wsgi, fcgi, fcgi-auth, fcgi-relay or cgi",
                         tg__text_show(options->face, shown, sizeof shown));

    tg_config *config = NULL;
    tg_status status = open_config(options, &config, error);
    if (status != TG_OK)
        return status;
    c.config = config;
    c.known = known;
    c.store = chosen_store(options, config, path, sizeof path);
    status = check_store(config, c.store, error);
    if (status == TG_OK)
        status = tg__config_check(config, known, NULL, tg_text_of(c.store), error);
    if (status != TG_OK) {
        tg__config_close(config);
        return status;
    }
    tg_arena arena = { 0 };
    char *text;
    read_tree(&c, &arena, &text);
    check_proxies(&c);
    check_secret(&c);
    for (size_t i = 0; i < c.config->policy_count; i++) {
        const tg_policy *policy = &c.config->policies[i];
        check_all_rules(&c, policy);
        check_shadowed(&c, i);
        check_by(&c, policy);
        check_pause(&c, policy);
    }
    if (options->live)
        status = check_live(&c, config, error);
    *count = c.count;
    if (c.count > 0 && room > 0)
        qsort(warnings, c.count < room ? c.count : room, sizeof *warnings, in_order);
    tg__arena_free(&arena);
    free(text);
    tg__config_close(config);
    return status;
}
