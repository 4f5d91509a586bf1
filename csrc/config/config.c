/* The rules file: what its keys mean, checked whole before anything of it is in force.
 * Must not enter: stores, counting, answers, libyaml (yaml_tree.c). */
#include "base/words.h"
#include "config/compiled.h"
#include "config/match.h"
#include "config/reader.h"
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

/* ---- policies ---- */

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

/* Whether one request may be judged by both, as the first match of the two readings of its path (match.c). */
static bool
may_meet(const tg_policy *a, const tg_policy *b)
{
    return (a->match && a->match->path_count) || (b->match && b->match->path_count);
}

static tg_status
too_many(const tg_reader *r, const tg_node *list, const char *what, size_t found, int most, const tg_policy *a,
         const tg_policy *b)
{
    return tg__source_error(&r->source, list->at, "one request may meet %zu %s, with %s%s%s%s%s%sthe policies marked "
                                                  "\"also\": expected at most %d",
                            found, what, a ? "\"" : "", a ? a->name : "", a ? "\", " : "", b ? "\"" : "",
                            b ? b->name : "", b ? "\" and " : "", most);
}

/* One request may meet every policy marked `also` and one other; two others where its path can be read two ways. What one
 * decision cannot hold is an error now, not a surprise for the first request that meets them all. */
static tg_status
check_together(const tg_reader *r, const tg_node *list)
{
    const tg_config *config = r->config;
    tg_text seen[3 * TG_DIMENSIONS_MAX];
    size_t together = 0, pairs = 0, dimensions = 0, others = 0;
    for (size_t i = 0; i < config->policy_count; i++) {
        const tg_policy *policy = &config->policies[i];
        others += !policy->also && others < 2;
        if (!policy->also)
            continue;
        together++;
        pairs += policy->rules_most * policy->by_count;
        if (dimensions <= TG_DIMENSIONS_MAX)
            dimensions += add_dimensions(policy, seen, dimensions, 2 * TG_DIMENSIONS_MAX);
    }
    if (together + others > TG_LIMITERS_MAX)
        return tg__source_error(&r->source, list->at, "found %zu policies marked \"also\", expected at most %zu beside "
                                                      "the first match",
                                together, TG_LIMITERS_MAX - others);
    if (pairs > TG_TARGETS_MAX)
        return too_many(r, list, "pairs of rule and dimension", pairs, TG_TARGETS_MAX, NULL, NULL);
    if (dimensions > TG_DIMENSIONS_MAX)
        return too_many(r, list, "dimensions", dimensions, TG_DIMENSIONS_MAX, NULL, NULL);
    for (size_t i = 0; i < config->policy_count; i++) {
        const tg_policy *a = &config->policies[i];
        if (a->also)
            continue;
        const size_t own_pairs = pairs + a->rules_most * a->by_count;
        const size_t own = dimensions + add_dimensions(a, seen, dimensions, 2 * TG_DIMENSIONS_MAX);
        if (own_pairs > TG_TARGETS_MAX)
            return too_many(r, list, "pairs of rule and dimension", own_pairs, TG_TARGETS_MAX, a, NULL);
        if (own > TG_DIMENSIONS_MAX)
            return too_many(r, list, "dimensions", own, TG_DIMENSIONS_MAX, a, NULL);
        for (size_t j = i + 1; j < config->policy_count; j++) {
            const tg_policy *b = &config->policies[j];
            const size_t both_pairs = own_pairs + b->rules_most * b->by_count;
            if (b->also || !may_meet(a, b))
                continue;
            if (both_pairs > TG_TARGETS_MAX)
                return too_many(r, list, "pairs of rule and dimension", both_pairs, TG_TARGETS_MAX, a, b);
            if (own + b->by_count <= TG_DIMENSIONS_MAX)
                continue;
            const size_t both = own + add_dimensions(b, seen, own, sizeof seen / sizeof seen[0]);
            if (both > TG_DIMENSIONS_MAX)
                return too_many(r, list, "dimensions", both, TG_DIMENSIONS_MAX, a, b);
        }
    }
    return TG_OK;
}

static tg_status
add_policy(const tg_reader *r, const tg_node *node, const char *default_name)
{
    tg_config *config = r->config;
    tg_policy *policy = &config->policies[config->policy_count];
    const tg_status status = tg__read_policy(r, node, default_name, policy);
    if (status != TG_OK)
        return status;
    for (size_t i = 0; i < config->policy_count; i++)
        if (strcmp(config->policies[i].name, policy->name) == 0)
            return tg__source_error(&r->source, node->at, "found a second policy \"%s\": the first begins in line "
                                                          "%u, and names tell counts apart",
                                    policy->name, config->policies[i].line);
    config->policy_count++;
    return TG_OK;
}

/* The policies of one file, behind those of the files that include it. */
static tg_status
read_policies(const tg_reader *r, const tg_node *node)
{
    tg_config *config = r->config;
    char shown[96];
    if (node->kind != TG_NODE_LIST)
        return tg__source_error(&r->source, node->at, "found %s, expected a list of policies",
                                tg__node_show(node, shown, sizeof shown));
    if (config->policy_count + node->count > TG_POLICIES_MAX)
        return tg__source_error(&r->source, node->at, "found %zu policies, expected at most %d",
                                config->policy_count + node->count, TG_POLICIES_MAX);
    tg_policy *policies = tg__arena_take(r->kept, (config->policy_count + node->count + 1) * sizeof *policies);
    if (!policies)
        return tg__read_no_memory(r);
    if (config->policy_count)
        memcpy(policies, config->policies, config->policy_count * sizeof *policies);
    config->policies = policies; /* with room for `unmatched` */
    tg_status status = TG_OK;
    for (const tg_node *entry = node->first; status == TG_OK && entry; entry = entry->next)
        status = add_policy(r, entry, NULL);
    return status;
}

/* ---- who the client is ---- */

static tg_status
check_client(const tg_reader *r, const tg_node *at, const tg_client_options *options)
{
    tg_client *client;
    tg_error fault;
    if (tg_client_open(options, &client, &fault) != TG_OK)
        return tg__read_fault(r, at, &fault, false);
    tg_client_close(client);
    return TG_OK;
}

static tg_status
read_proxies(const tg_reader *r, const tg_node *node)
{
    tg_config *config = r->config;
    const tg_node *entry;
    if (node->kind == TG_NODE_LIST && node->count == 0)
        return TG_OK; /* nobody, said in so many words */
    tg_status status = tg__want_entries(r, node, "a network (\"10.0.0.0/8\", \"unix:\")", &entry,
                                    &config->trusted_proxy_count);
    if (status != TG_OK)
        return status;
    config->trusted_proxies = tg__arena_take(r->kept, config->trusted_proxy_count * sizeof *config->trusted_proxies);
    if (!config->trusted_proxies)
        return tg__read_no_memory(r);
    for (size_t i = 0; entry && status == TG_OK; entry = tg__read_after(node, entry), i++) {
        status = check_client(r, entry,
                              &(tg_client_options){ .trusted_proxies = &entry->text, .trusted_proxy_count = 1 });
        if (status == TG_OK)
            status = tg__read_kept(r, entry->text, &config->trusted_proxies[i]);
    }
    return status;
}

/* ---- the whole ---- */

static tg_status
read_defaults(tg_reader *r, const tg_node *node)
{
    static const char *const known[] = { TG_SETTINGS_WORDS, NULL };
    static const char *const later[] = { NULL };
    static const tg_keys allowed = { "defaults", known, later };
    const tg_node *values[TG_KEYS_MAX];
    const tg_status status = tg__read_keys(r, node, &allowed, values);
    return status == TG_OK ? tg__read_settings(r, values, &r->defaults) : status;
}

enum { INCLUDE, STORE, SPACE, PROXIES, CLIENT_HEADER, USER_HEADER, EXEMPT, DENY, DEFAULTS, POLICIES, UNMATCHED, SECRET, PRIVATE,
       TOP_KEYS };

/* What all files of one reading share. */
struct tg_whole {
    bool given[TOP_KEYS];     /* by a file read before: what includes a file has the last word */
    const tg_node *policies;  /* of the file itself, for what is wrong with all together */
    tg_reader unmatched_in;   /* where `unmatched` stands */
    const tg_node *unmatched;
    const tg_compiled *compiled; /* read from there; else NULL */
    size_t compiled_next;        /* which of its files an include has to be */
    tg_recording *recording;     /* written down there; else NULL */
};

/* "${NAME}" becomes the variable's value: secrets need not stand in the file. */
static tg_status
expand(const tg_reader *r, const tg_node *node, const char *written, char **expanded)
{
    char text[1024], name[64];
    size_t used = 0;
    for (const char *at = written; *at;) {
        const char *value = at;
        size_t length = 1;
        if (at[0] == '$' && at[1] == '{') {
            const char *end = strchr(at, '}');
            const size_t place = tg__node_at(&r->source, node, (size_t)(at - written));
            const size_t name_length = end ? (size_t)(end - at - 2) : 0;
            if (name_length == 0 || name_length >= sizeof name)
                return tg__source_error(&r->source, place, "found \"${\" without a variable's name and \"}\" behind it");
            memcpy(name, at + 2, name_length);
            name[name_length] = '\0';
            value = r->whole->compiled ? tg__compiled_variable(r->whole->compiled, name).data : getenv(name);
            if (!value || !*value)
                return tg__source_error(&r->source, place, "found ${%s}, which is not set in the environment", name);
            if (r->whole->recording && !tg__record_variable(r->whole->recording, name, value))
                return tg__source_error(&r->source, place, "found more than %d variables", TG_COMPILED_VARIABLES_MAX);
            length = strlen(value);
            at = end;
        }
        if (used + length >= sizeof text)
            return tg__source_error(&r->source, node->at, "found more than %zu bytes", sizeof text - 1);
        memcpy(text + used, value, length);
        used += length;
        at++;
    }
    *expanded = tg__arena_copy(r->kept, (tg_text){ text, used });
    return *expanded ? TG_OK : tg__read_no_memory(r);
}

static tg_status read_included(tg_reader *r, const tg_node *entry);

static tg_status
read_private(const tg_reader *r, const tg_node *node)
{
    const tg_node *entry;
    size_t count;
    char shown[96];
    tg_status status = tg__want_entries(r, node, "a kind (\"user\", \"ip\")", &entry, &count);
    for (; status == TG_OK && entry; entry = tg__read_after(node, entry)) {
        const unsigned bit = tg__private_bit(entry->text);
        if (!bit)
            return tg__source_error(&r->source, entry->at, "found %s, expected ip, user, route, path, method or host (all other "
                                                           "kinds are private in any case)",
                                    tg__node_show(entry, shown, sizeof shown));
        r->config->private_kinds |= bit;
    }
    return status;
}

static tg_status
read_includes(tg_reader *r, const tg_node *node)
{
    const tg_node *entry;
    size_t count;
    tg_status status = tg__want_entries(r, node, "a file", &entry, &count);
    for (; status == TG_OK && entry; entry = tg__read_after(node, entry))
        status = read_included(r, entry);
    return status;
}

static tg_status
read_client(tg_reader *r, const tg_node *const *values)
{
    tg_config *config = r->config;
    tg_status status = TG_OK;
    if (values[PROXIES])
        status = read_proxies(r, values[PROXIES]);
    if (status == TG_OK && values[CLIENT_HEADER]) {
        status = tg__read_string(r, values[CLIENT_HEADER], "a header's name", &config->client_header);
        if (status == TG_OK)
            status = check_client(r, values[CLIENT_HEADER],
                                  &(tg_client_options){ .client_header = tg_text_of(config->client_header) });
    }
    if (status == TG_OK && values[USER_HEADER]) {
        status = tg__read_string(r, values[USER_HEADER], "a header's name", &config->user_header);
        if (status == TG_OK)
            status = check_client(r, values[USER_HEADER],
                                  &(tg_client_options){ .user_header = tg_text_of(config->user_header) });
    }
    return status;
}

static tg_status
read_file(tg_reader *r, const tg_node *root)
{
    static const char *const known[] = { "include", "store", "namespace", "trusted_proxies", "client_header",
                                         "user_header", "exempt", "deny", "defaults", "policies", "unmatched", "secret",
                                         "private", NULL };
    static const char *const later[] = { "plans", "pause_when", NULL };
    static const tg_keys allowed = { "the rules file", known, later };
    tg_config *config = r->config;
    const tg_node *values[TG_KEYS_MAX];
    if (!root)
        return tg__source_error(&r->source, 0, "found nothing, expected a mapping with \"policies\"");
    tg_status status = tg__read_keys(r, root, &allowed, values);
    if (status != TG_OK)
        return status;
    const tg_node *include = values[INCLUDE], *policies = values[POLICIES], *defaults = values[DEFAULTS];
    for (size_t i = 0; i < TOP_KEYS; i++) {
        const bool before = r->whole->given[i];
        r->whole->given[i] |= values[i] != NULL;
        if (before)
            values[i] = NULL;
    }
    if (values[STORE]) {
        char *written;
        config->store_line = tg__source_line(&r->source, values[STORE]->at);
        config->store_file = r->file;
        status = tg__read_string(r, values[STORE], "a store (\"shared://shop\")", &written);
        if (status == TG_OK)
            status = expand(r, values[STORE], written, &config->store);
    }
    if (status == TG_OK && values[SECRET]) {
        char *written;
        config->secret_line = tg__source_line(&r->source, values[SECRET]->at);
        status = tg__read_string(r, values[SECRET], "a secret (\"${TIDEGATE_SECRET}\", \"@/path\")", &written);
        if (status == TG_OK)
            status = expand(r, values[SECRET], written, &config->secret);
    }
    if (status == TG_OK && values[PRIVATE])
        status = read_private(r, values[PRIVATE]);
    if (status == TG_OK && values[SPACE])
        status = tg__read_name(r, values[SPACE], "a namespace", config->space);
    if (status == TG_OK)
        status = read_client(r, values);
    if (status == TG_OK && values[EXEMPT])
        status = tg__read_roll(r, values[EXEMPT], &config->exempt);
    if (status == TG_OK && values[DENY])
        status = tg__read_roll(r, values[DENY], &config->deny);
    if (status == TG_OK && defaults)
        status = read_defaults(r, defaults);
    if (r->depth == 0)
        config->style = r->defaults.style;
    if (status == TG_OK && !policies && !include)
        return tg__source_error(&r->source, root->at, "found no \"policies\", expected a list of them");
    if (status == TG_OK && values[UNMATCHED]) {
        r->whole->unmatched = values[UNMATCHED];
        r->whole->unmatched_in = *r;
    }
    if (r->depth == 0)
        r->whole->policies = policies;
    if (status == TG_OK && policies)
        status = read_policies(r, policies);
    if (status == TG_OK && include)
        status = read_includes(r, include);
    return status;
}

/* ---- files ---- */

/* The text and the tree of an included file. */
static tg_status
read_included_tree(const tg_reader *r, const tg_node *entry, tg_reader *inner, tg_node **root)
{
    tg_config *config = r->config;
    char *text = NULL;
    size_t length = 0;
    tg_error fault;
    uint64_t *mark = config->marks[config->file_count];
    config->files[config->file_count++] = (char *)inner->file;
    if (tg__config_text(inner->file, &text, &length, mark, &fault) != TG_OK)
        return tg__source_error(&r->source, entry->at, "%s", fault.message);
    /* Places are looked for as long as the tree is there. */
    const char *kept = tg__arena_copy(r->source.arena, (tg_text){ text, length });
    free(text);
    if (!kept)
        return tg__read_no_memory(r);
    inner->source.text = (tg_text){ kept, length };
    const tg_status status = tg__yaml_read(&inner->source, root);
    if (status == TG_OK && r->whole->recording)
        tg__record_file(r->whole->recording, &inner->source, mark, *root);
    return status;
}

/* The same as it was compiled, where files stand in the order in which they were read. */
static tg_status
read_compiled_tree(const tg_reader *r, const tg_node *entry, tg_reader *inner, tg_node **root)
{
    const tg_compiled *compiled = r->whole->compiled;
    const size_t next = r->whole->compiled_next++;
    if (next >= compiled->file_count || !tg__text_is(compiled->files[next].path, inner->file))
        return tg__source_error(&r->source, entry->at, "this include is not the next file of %s: compile it again",
                                compiled->path);
    inner->source.text = compiled->files[next].text;
    return tg__compiled_tree(compiled, next, r->source.arena, root, r->source.error);
}

static tg_status
read_included(tg_reader *r, const tg_node *entry)
{
    const tg_config *config = r->config;
    char shown[96], path[1024];
    tg_node *root = NULL;
    tg_place last = { 0 };
    const char *slash = entry->text.data[0] == '/' ? NULL : strrchr(r->file, '/');
    const int folder = slash ? (int)(slash - r->file + 1) : 0;
    if (memchr(entry->text.data, '\0', entry->text.length) || (size_t)folder + entry->text.length >= sizeof path)
        return tg__source_error(&r->source, entry->at, "found no file's name: %s",
                                tg__node_show(entry, shown, sizeof shown));
    if (r->depth == TG_INCLUDE_DEPTH_MAX)
        return tg__source_error(&r->source, entry->at, "found includes %d deep, expected at most %d: does a file include "
                                                       "itself?",
                                TG_INCLUDE_DEPTH_MAX + 1, TG_INCLUDE_DEPTH_MAX);
    if (config->file_count == TG_CONFIG_FILES_MAX)
        return tg__source_error(&r->source, entry->at, "found more than %d files in all", TG_CONFIG_FILES_MAX);
    snprintf(path, sizeof path, "%.*s%.*s", folder, r->file, (int)entry->text.length, entry->text.data);
    tg_reader inner = *r;
    inner.file = tg__arena_copy(r->kept, tg_text_of(path));
    if (!inner.file)
        return tg__read_no_memory(r);
    inner.source.path = inner.file;
    inner.source.last = &last;
    inner.depth++;
    tg_status status = r->whole->compiled ? read_compiled_tree(r, entry, &inner, &root)
                                          : read_included_tree(r, entry, &inner, &root);
    if (status == TG_OK)
        status = read_file(&inner, root);
    if (r->whole->unmatched_in.source.last == &last)
        r->whole->unmatched_in.source.last = NULL;
    return status;
}

/* What fails to be copied is not watched, and no more. */
static void
keep_files(const tg_config *config, tg_files *files)
{
    for (size_t i = files->count; i < config->file_count; i++) {
        files->paths[files->count] = strdup(config->files[i]);
        if (!files->paths[files->count])
            return;
        memcpy(files->marks[files->count++], config->marks[i], sizeof config->marks[i]);
    }
}

void
tg__files_close(tg_files *files)
{
    for (size_t i = 0; i < files->count; i++)
        free(files->paths[i]);
    files->count = 0;
}

/* What to read and how: exactly one of `yaml` and `compiled` holds something. */
typedef struct reading {
    tg_text yaml;
    const char *path;            /* of the rules file, as errors name it */
    const uint64_t *mark;        /* of the file that is read, TG_MARKS of them */
    const tg_compiled *compiled;
    tg_recording *recording;
    tg_files *files;             /* receives what is looked at, behind the file itself; NULL: nobody asks */
} reading;

static tg_status
read_tree(const reading *how, tg_reader *r, tg_node **root)
{
    if (how->compiled)
        return tg__compiled_tree(how->compiled, 0, r->source.arena, root, r->source.error);
    const tg_status status = tg__yaml_read(&r->source, root);
    if (status == TG_OK && how->recording)
        tg__record_file(how->recording, &r->source, how->mark, *root);
    return status;
}

static tg_status
read_whole(const reading *how, tg_config **config, tg_error *error)
{
    holder *held = calloc(1, sizeof *held);
    tg_arena tree = { 0 };
    tg_node *root = NULL;
    tg_place last = { 0 };
    if (!held)
        return tg__error(error, TG_E_NOMEM, "%s: out of memory while reading", how->path);
    struct tg_whole whole = { .compiled = how->compiled, .compiled_next = 1, .recording = how->recording };
    tg_reader r = {
        .source = { .text = how->compiled ? how->compiled->files[0].text : how->yaml, .path = how->path, .arena = &tree,
                    .error = error, .last = &last },
        .kept = &held->arena,
        .config = &held->config,
        .defaults = { .style = tg__style_default },
        .whole = &whole,
    };
    strcpy(held->config.space, "default");
    held->config.path = tg__arena_copy(&held->arena, tg_text_of(how->path));
    r.file = held->config.files[0] = held->config.path;
    if (how->compiled) /* the one whose change says anything */
        held->config.files[0] = tg__arena_copy(&held->arena, tg_text_of(how->compiled->path));
    held->config.file_count = 1;
    if (how->mark)
        memcpy(held->config.marks[0], how->mark, sizeof held->config.marks[0]);
    tg_status status = held->config.path && held->config.files[0] ? read_tree(how, &r, &root) : tg__read_no_memory(&r);
    if (status == TG_OK)
        status = read_file(&r, root);
    if (status == TG_OK && !held->config.policies) {
        held->config.policies = tg__arena_take(&held->arena, sizeof *held->config.policies);
        status = held->config.policies ? TG_OK : tg__read_no_memory(&r);
    }
    if (status == TG_OK && whole.unmatched)
        status = add_policy(&whole.unmatched_in, whole.unmatched, "unmatched");
    if (status == TG_OK)
        status = check_together(&r, whole.policies ? whole.policies : root);
    tg__arena_free(&tree);
    if (how->files)
        keep_files(&held->config, how->files);
    if (status == TG_OK)
        *config = &held->config;
    else
        tg__config_close(&held->config);
    return status;
}

tg_status
tg__config_parse(tg_text yaml, const char *path, tg_config **config, tg_error *error)
{
    return read_whole(&(reading){ .yaml = yaml, .path = path }, config, error);
}

tg_status
tg__config_parse_compiled(tg_text bytes, const char *path, tg_config **config, tg_error *error)
{
    tg_compiled compiled;
    tg_status status = tg__digest_init(error);
    if (status == TG_OK)
        status = tg__compiled_open(bytes, path, &compiled, error);
    return status == TG_OK ? read_whole(&(reading){ .path = compiled.files[0].path.data, .compiled = &compiled }, config,
                                        error)
                           : status;
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

/* Reads at most `most` bytes, one more than there should be. */
static tg_status
read_all(int fd, const char *path, char *buffer, size_t most, size_t *length, tg_error *error)
{
    *length = 0;
    while (*length < most) {
        const ssize_t got = read(fd, buffer + *length, most - *length);
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

void
tg__config_mark(const struct stat *file, uint64_t mark[TG_MARKS])
{
    const uint64_t numbers[TG_MARKS] = { file->st_dev, file->st_ino, (uint64_t)file->st_size,
                                         (uint64_t)file->st_mtim.tv_sec, (uint64_t)file->st_mtim.tv_nsec };
    memcpy(mark, numbers, sizeof numbers);
}

tg_status
tg__config_text(const char *path, char **text, size_t *length, uint64_t mark[TG_MARKS], tg_error *error)
{
    char *buffer = NULL;
    struct stat before = { 0 }, since;
    tg_status status;
    tg__config_mark(&before, mark);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* a FIFO's writer is not waited for */
    if (fd == -1)
        return tg__error_system(error, TG_E_CONFIG, errno, "%s: the rules file cannot be opened", path);
    if (fstat(fd, &before) == -1) {
        status = tg__error_system(error, TG_E_CONFIG, errno, "%s: the rules file cannot be read", path);
        goto done;
    }
    tg__config_mark(&before, mark);
    if (!S_ISREG(before.st_mode)) {
        status = tg__error(error, TG_E_CONFIG, "%s: found no regular file, expected a rules file", path);
        goto done;
    }
    if (before.st_size > (off_t)TG_COMPILED_BYTES_MAX) {
        status = tg__error(error, TG_E_CONFIG, "%s: found more than %u bytes, expected a rules file", path,
                           TG_CONFIG_BYTES_MAX);
        goto done;
    }
    const size_t room = (size_t)before.st_size + 1;
    buffer = malloc(room);
    if (!buffer) {
        status = tg__error(error, TG_E_NOMEM, "%s: out of memory while reading", path);
        goto done;
    }
    status = read_all(fd, path, buffer, room, length, error);
    if (status != TG_OK)
        goto done;
    /* An editor that writes in place may have written half: half a list of policies is a good file that lets much
     * through. */
    if (fstat(fd, &since) == -1 || since.st_size != before.st_size || since.st_mtim.tv_sec != before.st_mtim.tv_sec ||
        since.st_mtim.tv_nsec != before.st_mtim.tv_nsec || (off_t)*length != before.st_size)
        status = tg__error(error, TG_E_CONFIG, "%s: the rules file was being written while it was read: read it again",
                           path);
    if (*length > TG_CONFIG_BYTES_MAX && !tg__is_compiled((tg_text){ buffer, *length }))
        status = tg__error(error, TG_E_CONFIG, "%s: found more than %u bytes, expected a rules file", path,
                           TG_CONFIG_BYTES_MAX);
    if (status == TG_OK) {
        *text = buffer;
        buffer = NULL;
    }
done:
    close(fd);
    free(buffer);
    return status;
}

tg_status
tg__config_read_files(const char *path, tg_config **config, tg_files *files, tg_error *error)
{
    char *text = NULL;
    size_t length = 0;
    *files = (tg_files){ .count = 0 };
    files->paths[0] = strdup(path);
    if (!files->paths[0])
        return tg__error(error, TG_E_NOMEM, "%s: out of memory while reading", path);
    files->count = 1;
    tg_compiled compiled;
    tg_status status = tg__config_text(path, &text, &length, files->marks[0], error);
    const tg_text bytes = { text, length };
    reading how = { .yaml = bytes, .path = path, .mark = files->marks[0], .files = files };
    if (status == TG_OK && tg__is_compiled(bytes)) {
        status = tg__digest_init(error);
        if (status == TG_OK)
            status = tg__compiled_open(bytes, path, &compiled, error);
        if (status == TG_OK) {
            how.compiled = &compiled;
            how.path = compiled.files[0].path.data;
        }
    }
    if (status == TG_OK)
        status = read_whole(&how, config, error);
    char what[200];
    if (status == TG_OK && how.compiled && tg__compiled_changed(&compiled, what, sizeof what))
        tg__notice("rules-stale", "%s was compiled before %s changed, and stays in force as it is: run tidegate compile",
                   path, what);
    free(text);
    return status;
}

tg_status
tg__config_record(const char *path, tg_recording *recording, tg_config **config, tg_error *error)
{
    char *text = NULL;
    size_t length = 0;
    uint64_t mark[TG_MARKS];
    tg_status status = tg__config_text(path, &text, &length, mark, error);
    const tg_text bytes = { text, length };
    if (status == TG_OK && tg__is_compiled(bytes))
        status = tg__error(error, TG_E_CONFIG, "%s: found compiled rules, expected the rules file itself", path);
    if (status == TG_OK)
        status = read_whole(&(reading){ .yaml = bytes, .path = path, .mark = mark, .recording = recording }, config, error);
    free(text);
    return status;
}

tg_status
tg__config_read(const char *path, tg_config **config, tg_error *error)
{
    tg_files files;
    const tg_status status = tg__config_read_files(path, config, &files, error);
    tg__files_close(&files);
    return status;
}
