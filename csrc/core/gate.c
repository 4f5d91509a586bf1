/* The gate: a rules file in force, and its change while requests are judged.
 * Must not enter: YAML, faces, what is answered. */
#include "core/gate.h"

#include "config/match.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Client options outlive their reading: limiters given out by tg_gate_limiter borrow them. A reading with the same
 * options as the one before shares its entry, so the list grows only when the options change. */
typedef struct client_entry {
    tg_client *client;
    struct client_entry *next;
} client_entry;

/* What tells one content of the files from the next, without reading them. */
typedef struct stamp {
    uint8_t digest[16];
    bool settled; /* none of them was written within the last second */
    bool there;
} stamp;

enum {
    SLOTS = 16,
    SLOT_SHIFT = 56 /* of the word below: the slot above, the pins underneath */
};

typedef struct slot {
    _Atomic(tg_snapshot *) held; /* written under the reload lock, before the slot is in force */
    /* Pins left on a snapshot that is no longer in force. Below zero while the pins counted in the word have not been
     * carried over yet. */
    _Atomic int64_t pins;
} slot;

struct tg_gate {
    char *path;
    char *store_uri;       /* as chosen when opened */
    bool store_from_file;
    uint8_t keyed[16];     /* digest of the file's secret and private kinds, as when opened */
    unsigned faces;        /* TG_FACE_ bits; 0: not said */
    bool stands_in;        /* opened to look, and there is no table: `store` is an empty one of this process */
    bool brief;
    tg_store *store;
    client_entry *clients; /* the newest first */
    const tg_client *first_client;
    /* Which slot is in force, and how many judges hold it, in one word: taking both is one instruction, so there is
     * no moment at which a judge has read the slot but not pinned it. */
    _Atomic uint64_t in_force;
    slot slots[SLOTS];
    _Atomic uint64_t generation;
    _Atomic int reloading; /* pid of the process that holds the reload lock; 0: nobody */
    bool watched;
    _Atomic uint64_t next_look_us; /* at the file: CLOCK_MONOTONIC_COARSE */
    /* The files of the last reading, also where it was refused: what may have to change. Under the reload lock. */
    tg_files files;
    stamp read, seen; /* of them: when last read, and at the last look */
};

/* ---- pins ---- */

static size_t
slot_of(uint64_t word)
{
    return (size_t)(word >> SLOT_SHIFT);
}

static int64_t
pins_of(uint64_t word)
{
    return (int64_t)(word & ((UINT64_C(1) << SLOT_SHIFT) - 1));
}

static size_t
pin(tg_gate *gate)
{
    return slot_of(atomic_fetch_add_explicit(&gate->in_force, 1, memory_order_acquire));
}

static void
unpin(tg_gate *gate, size_t pinned)
{
    uint64_t word = atomic_load_explicit(&gate->in_force, memory_order_relaxed);
    /* A pinned slot is not used again, so the same number means the same snapshot. */
    while (slot_of(word) == pinned)
        if (atomic_compare_exchange_weak_explicit(&gate->in_force, &word, word - 1, memory_order_release,
                                                  memory_order_relaxed))
            return;
    atomic_fetch_sub_explicit(&gate->slots[pinned].pins, 1, memory_order_release);
}

/* ---- snapshots ---- */

static void
snapshot_close(tg_snapshot *old)
{
    if (!old)
        return;
    for (size_t i = 0; i < old->limiter_count; i++) {
        tg_limiter_close(old->limiters[i]);
        for (size_t k = 0; old->plans[i] && k < old->config->policies[i].plan_count; k++)
            tg_limiter_close(old->plans[i][k]);
        free(old->plans[i]);
    }
    free(old->plans);
    free(old->logged);
    free(old->watches);
    free(old->limiters);
    tg__config_close(old->config);
    free(old);
}

/* The pins of a snapshot out of force are over: it goes. Only ever called under the reload lock, so no judge frees.
 * The slot lets go first: a child forked in the middle then has a snapshot too many, and not one half freed. */
static void
collect(tg_gate *gate)
{
    const size_t current = slot_of(atomic_load(&gate->in_force));
    for (size_t i = 0; i < SLOTS; i++) {
        slot *old = &gate->slots[i];
        if (i != current && atomic_load_explicit(&old->pins, memory_order_acquire) == 0)
            snapshot_close(atomic_exchange(&old->held, NULL));
    }
}

/* Puts a snapshot in force and takes the old one out. false: every slot is still pinned. */
static bool
publish(tg_gate *gate, tg_snapshot *made)
{
    const size_t current = slot_of(atomic_load(&gate->in_force));
    size_t next = 0;
    while (next < SLOTS && (next == current || atomic_load(&gate->slots[next].held)))
        next++;
    if (next == SLOTS)
        return false;
    atomic_store(&gate->slots[next].pins, 0);
    atomic_store(&gate->slots[next].held, made);
    const uint64_t old = atomic_exchange(&gate->in_force, (uint64_t)next << SLOT_SHIFT);
    atomic_fetch_add(&gate->slots[slot_of(old)].pins, pins_of(old));
    atomic_fetch_add(&gate->generation, 1);
    return true;
}

/* ---- the reload lock ---- */

/* Of our own, because a child forked while another thread was reloading has to be able to reload all the same: the
 * holder's process tells it that nobody here holds the lock. Reloading is rare, so waiting is a short sleep. */
static void
lock(tg_gate *gate)
{
    const int self = (int)getpid();
    const struct timespec moment = { .tv_nsec = 1000000 };
    int holder = 0;
    while (!atomic_compare_exchange_strong(&gate->reloading, &holder, self)) {
        if (holder != self)
            continue; /* a holder of the process we were forked from: the next turn replaces it */
        nanosleep(&moment, NULL);
        holder = 0;
    }
}

static void
unlock(tg_gate *gate)
{
    atomic_store(&gate->reloading, 0);
}

/* ---- reading ---- */

static bool
same_text(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

static bool
same_client(const tg_config *a, const tg_config *b)
{
    if (a->trusted_proxy_count != b->trusted_proxy_count || !same_text(a->client_header, b->client_header) ||
        !same_text(a->user_header, b->user_header))
        return false;
    for (size_t i = 0; i < a->trusted_proxy_count; i++)
        if (a->trusted_proxies[i].length != b->trusted_proxies[i].length ||
            memcmp(a->trusted_proxies[i].data, b->trusted_proxies[i].data, a->trusted_proxies[i].length) != 0)
            return false;
    return true;
}

static tg_status
take_client(tg_gate *gate, const tg_config *config, const tg_client **client, tg_error *error)
{
    const tg_snapshot *current = atomic_load(&gate->slots[slot_of(atomic_load(&gate->in_force))].held);
    if (current && same_client(current->config, config)) {
        *client = current->client;
        return TG_OK;
    }
    const tg_client_options options = {
        .trusted_proxies = config->trusted_proxies,
        .trusted_proxy_count = config->trusted_proxy_count,
        .client_header = tg_text_of(config->client_header),
        .user_header = tg_text_of(config->user_header),
    };
    client_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return tg__error(error, TG_E_NOMEM, "%s: out of memory", config->path);
    const tg_status status = tg_client_open(&options, &entry->client, error);
    if (status != TG_OK) {
        free(entry);
        return status;
    }
    entry->next = gate->clients;
    gate->clients = entry;
    *client = entry->client;
    return TG_OK;
}

/* The limiter of one policy, or of one plan of it. What the store cannot hold is a fault of the file: it is told with the
 * policy's place. */
static tg_status
open_policy(tg_gate *gate, const tg_config *config, const tg_client *client, const tg_policy *policy,
            const char *rules_text, tg_limiter **limiter, tg_error *error)
{
    const tg_limiter_options options = {
        .rules = tg_text_of(rules_text),
        .name = tg_text_of(policy->name),
        .space = tg_text_of(config->space),
        .by = policy->by,
        .by_count = policy->by_count,
        .on_store_failure = policy->on_store_failure,
        .local_percent = policy->local_percent,
        .on_full = policy->on_full,
        .missing_identity = policy->missing_identity,
        .count_denied = policy->count_denied,
    };
    tg_error fault;
    const tg_status status = tg__limiter_open(
        gate->store, client, &options, policy->mode == TG_MODE_SHADOW ? "~shadow" : "", limiter, &fault);
    if (status == TG_OK)
        (*limiter)->gives_back = policy->settle_place.line != 0;
    if (status == TG_OK || !error)
        return status == TG_E_RULE ? TG_E_CONFIG : status;
    if (status != TG_E_RULE && status != TG_E_CONFIG) {
        *error = fault;
        return status;
    }
    tg__error(error, TG_E_CONFIG, "%s:%u:1: policy \"%s\": %s", policy->file, policy->line, policy->name,
              fault.message);
    error->line = policy->line;
    error->column = 1;
    return TG_E_CONFIG;
}

static tg_status
face_error(const tg_policy *policy, tg_place place, const char *what, tg_error *error)
{
    tg__error(error, TG_E_CONFIG, "%s:%u:%u: policy \"%s\" asks for %s, which this face cannot know: it would never limit "
                                  "anybody here",
              policy->file, place.line, place.column, policy->name, what);
    if (error) {
        error->line = place.line;
        error->column = place.column;
    }
    return TG_E_CONFIG;
}

/* A policy that asks for what the face cannot know would be read and never bite. */
static tg_status
check_face(unsigned faces, const tg_policy *policy, tg_error *error)
{
    for (size_t i = 0; i < policy->by_count; i++) {
        tg_by *by;
        char what[TG_NAME_BYTES_MAX + 3];
        const tg_status status = tg__by_parse(policy->by[i], &by, error);
        if (status != TG_OK)
            return status;
        const char *unknown = tg__by_unknown(by, faces);
        if (unknown)
            snprintf(what, sizeof what, "\"%s\"", unknown);
        tg__by_close(by);
        if (unknown)
            return face_error(policy, policy->by_place[i], what, error);
    }
    if (policy->route_place.line && !(faces & TG_FACE_ROUTE))
        return face_error(policy, policy->route_place, "the route", error);
    if (policy->settle_place.line && !(faces & TG_FACE_RESPONSE))
        return face_error(policy, policy->settle_place, "what is answered", error);
    return TG_OK;
}

/* What the store could never hold is a fault of the file, told at the rule. `store` NULL: as its address tells. */
static tg_status
check_fit(const tg_policy *policy, const char *rules_text, const tg_place *places, bool each, tg_store *store, tg_text uri,
          tg_error *error)
{
    tg_rule rules[TG_RULES_MAX];
    size_t count;
    tg_status status = tg_rules_parse(tg_text_of(rules_text), TG_ALGORITHM_DEFAULT, rules, &count, error);
    for (size_t i = 0; status == TG_OK && i < count; i++) {
        tg_error fault;
        const tg_place place = places[each ? i : 0];
        status = store ? store->ops->admit_rule(store, &rules[i], &fault) : tg__store_check_address(uri, &rules[i], &fault);
        if (status != TG_E_RULE)
            continue; /* an address that is wrong is told when it is opened */
        status = tg__error(error, TG_E_CONFIG, "%s:%u:%u: policy \"%s\": %s", policy->file, place.line, place.column,
                           policy->name, fault.message);
        if (error) {
            error->line = place.line;
            error->column = place.column;
        }
    }
    return status;
}

tg_status
tg__config_check(const tg_config *config, unsigned faces, tg_store *store, tg_text uri, tg_error *error)
{
    tg_status status = TG_OK;
    for (size_t i = 0; status == TG_OK && i < config->policy_count; i++) {
        const tg_policy *policy = &config->policies[i];
        if (faces)
            status = check_face(faces, policy, error);
        if (status == TG_OK && policy->rule_place[0].line) /* else they are those of a plan */
            status = check_fit(policy, policy->rules_text, policy->rule_place, true, store, uri, error);
        for (size_t k = 0; status == TG_OK && k < policy->plan_count; k++)
            status = check_fit(policy, policy->plans[k].rules_text, &policy->plans[k].place, false, store, uri, error);
    }
    return status;
}

/* All limiters of a policy. What is made is the snapshot's, also on failure. */
static tg_status
prepare_policy(tg_gate *gate, tg_snapshot *made, size_t at, tg_error *error)
{
    const tg_policy *policy = &made->config->policies[at];
    tg_status status = open_policy(gate, made->config, made->client, policy, policy->rules_text, &made->limiters[at],
                                   error);
    if (status != TG_OK || policy->plan_count == 0)
        return status;
    made->plans[at] = calloc(policy->plan_count, sizeof *made->plans[at]);
    if (!made->plans[at])
        return tg__error(error, TG_E_NOMEM, "%s: out of memory", made->config->path);
    for (size_t i = 0; status == TG_OK && i < policy->plan_count; i++)
        status = open_policy(gate, made->config, made->client, policy, policy->plans[i].rules_text,
                             &made->plans[at][i], error);
    return status;
}

tg_status
tg__snapshot_meet(const tg_snapshot *now, const size_t *found, size_t count, tg_error *error)
{
    tg_status status = TG_OK;
    for (size_t i = 0; status == TG_OK && i < count; i++)
        if (!now->limiters[found[i]])
            status = prepare_policy(now->brief, (tg_snapshot *)now, found[i], error); /* ours alone: see tg_gate_options */
    return status;
}

/* Whether the policy does no more than judge by its rules. */
static bool
is_simple(const tg_policy *policy)
{
    return policy->exempt.count == 0 && policy->deny.count == 0 && policy->plan_count == 0 &&
           policy->cost.source == TG_COST_FIXED && policy->cost.units == 1 && policy->mode == TG_MODE_ENFORCE &&
           policy->log == TG_LOG_NONE && policy->settle_place.line == 0 && policy->pause.period_us == 0;
}

static bool
reads_headers(const tg_snapshot *made)
{
    for (size_t i = 0; i < made->limiter_count; i++) {
        const tg_match *match = made->config->policies[i].match;
        if ((made->limiters[i]->reads & TG_READ_HEADERS) || (match && (match->host_count || match->header_count)))
            return true;
    }
    return false;
}

static void
look_over(tg_snapshot *made)
{
    made->simple = made->config->exempt.count == 0 && made->config->deny.count == 0;
    for (size_t i = 0; i < made->limiter_count; i++)
        made->simple &= is_simple(&made->config->policies[i]);
    made->reads = TG_READ_HEADERS | TG_READ_TARGET;
    if (made->simple && !made->brief && !reads_headers(made))
        made->reads = TG_READ_TARGET;
}

static tg_status
make_watches(tg_snapshot *made, tg_error *error)
{
    const tg_config *config = made->config;
    bool any = false;
    for (size_t i = 0; i < config->policy_count; i++)
        any |= config->policies[i].pause.period_us != 0;
    if (!any)
        return TG_OK;
    made->watches = calloc(config->policy_count, sizeof *made->watches);
    return made->watches ? TG_OK : tg__error(error, TG_E_NOMEM, "%s: out of memory", config->path);
}

static const char *
store_of(const tg_config *config)
{
    return config->store ? config->store : "shared://default";
}

static void
keyed_by(const tg_config *config, uint8_t keyed[16])
{
    const tg_text pieces[] = { tg_text_of(config->secret), { (const char *)&config->private_kinds, sizeof(unsigned) } };
    tg__digest(pieces, 2, keyed, 16);
}

static tg_status
check_store(const tg_gate *gate, const tg_config *config, tg_error *error)
{
    char before[120], since[120];
    uint8_t keyed[16];
    keyed_by(config, keyed);
    if (memcmp(keyed, gate->keyed, sizeof keyed) != 0)
        return tg__error(error, TG_E_CONFIG,
                         "%s:%u:1: neither `secret` nor `private` can change while running: keys would be others; restart to "
                         "count by them",
                         config->path, config->secret_line ? config->secret_line : 1);
    if (!gate->store_from_file || strcmp(gate->store_uri, store_of(config)) == 0)
        return TG_OK;
    tg__error(error, TG_E_CONFIG,
              "%s:%u:1: the store cannot change while running: it is \"%s\", found \"%s\"; restart to count there",
              config->store_file ? config->store_file : config->path, config->store_line ? config->store_line : 1,
              tg__text_show(tg_text_of(gate->store_uri), before, sizeof before),
              tg__text_show(tg_text_of(store_of(config)), since, sizeof since));
    if (error) {
        error->line = config->store_line ? config->store_line : 1;
        error->column = 1;
    }
    return TG_E_CONFIG;
}

/* Makes everything of a reading before any of it is in force. Takes the config over, whatever happens. */
static tg_status
prepare(tg_gate *gate, tg_config *config, tg_snapshot **prepared, tg_error *error)
{
    tg_snapshot *made = calloc(1, sizeof *made);
    tg_status status = TG_OK;
    if (!made) {
        tg__config_close(config);
        return tg__error(error, TG_E_NOMEM, "%s: out of memory", gate->path);
    }
    made->config = config;
    if (!gate->brief)
        status = tg__config_check(config, gate->faces, gate->store, (tg_text){ NULL, 0 }, error);
    if (status != TG_OK) {
        snapshot_close(made);
        return status;
    }
    made->limiters = calloc(config->policy_count + 1, sizeof(tg_limiter *));
    made->plans = calloc(config->policy_count + 1, sizeof(tg_limiter **));
    made->logged = calloc(config->policy_count + 1, sizeof *made->logged);
    if (!made->limiters || !made->plans || !made->logged)
        status = tg__error(error, TG_E_NOMEM, "%s: out of memory", gate->path);
    if (status == TG_OK)
        status = make_watches(made, error);
    if (status == TG_OK)
        status = take_client(gate, config, &made->client, error);
    for (size_t i = 0; status == TG_OK && i < config->policy_count; i++) {
        made->limiter_count++; /* closing takes what is there */
        if (!gate->brief)
            status = prepare_policy(gate, made, i, error);
    }
    if (status == TG_OK) {
        made->brief = gate->brief ? gate : NULL;
        look_over(made);
        *prepared = made;
    } else {
        snapshot_close(made);
    }
    return status;
}

/* ---- what tells one content from the next ---- */

static stamp
stamp_of_marks(uint64_t marks[TG_CONFIG_FILES_MAX][TG_MARKS], size_t count)
{
    stamp made = { .settled = true, .there = true };
    tg_text pieces[TG_CONFIG_FILES_MAX];
    for (size_t i = 0; i < count; i++)
        pieces[i] = (tg_text){ (const char *)marks[i], sizeof marks[i] };
    tg__digest(pieces, count, made.digest, sizeof made.digest);
    return made;
}

/* As the files are now: the file and those that it includes. */
static stamp
look_at_files(const tg_files *files)
{
    uint64_t marks[TG_CONFIG_FILES_MAX][TG_MARKS];
    struct timespec today;
    bool settled = true, there = true;
    clock_gettime(CLOCK_REALTIME, &today);
    for (size_t i = 0; i < files->count; i++) {
        struct stat found = { 0 };
        const bool was_there = files->marks[i][1] != 0; /* an inode */
        there &= stat(files->paths[i], &found) == 0 || !was_there;
        tg__config_mark(&found, marks[i]);
        settled &= found.st_mtim.tv_sec + 1 < today.tv_sec;
    }
    stamp made = stamp_of_marks(marks, files->count);
    made.settled = settled;
    made.there = there;
    return made;
}

static bool
same_stamp(const stamp *a, const stamp *b)
{
    return memcmp(a->digest, b->digest, sizeof a->digest) == 0;
}

/* ---- opening ---- */

static tg_status
choose_path(const tg_gate_options *options, char **path, tg_error *error)
{
    tg_text chosen = options->path;
    if (chosen.length == 0)
        chosen = tg_text_of(getenv("TIDEGATE_CONFIG"));
    if (chosen.length == 0)
        return tg__error(error, TG_E_CONFIG, "no rules file: give its path, or set TIDEGATE_CONFIG");
    if (memchr(chosen.data, '\0', chosen.length))
        return tg__error(error, TG_E_CONFIG, "the path of the rules file holds a NUL byte");
    *path = strndup(chosen.data, chosen.length);
    return *path ? TG_OK : tg__error(error, TG_E_NOMEM, "the path of the rules file");
}

static bool
fault_is_absence(tg_status status, const tg_error *fault)
{
    return status == TG_E_SYSTEM && fault->system_error == ENOENT;
}

static tg_status
open_store(tg_gate *gate, const tg_gate_options *options, const tg_config *config, tg_error *error)
{
    tg_text chosen = options->store;
    if (chosen.length == 0)
        chosen = tg_text_of(getenv("TIDEGATE_STORE"));
    gate->store_from_file = chosen.length == 0;
    if (gate->store_from_file)
        chosen = tg_text_of(store_of(config));
    gate->store_uri = strndup(chosen.data, chosen.length);
    if (!gate->store_uri)
        return tg__error(error, TG_E_NOMEM, "the store's name");
    tg_store_options store_options = { .clock = options->clock, .timeout_us = options->timeout_us, .existing = true,
                                       .secret = tg_text_of(config->secret), .private_kinds = config->private_kinds };
    keyed_by(config, gate->keyed);
    tg_error fault;
    tg_status status = tg_store_open(chosen, &store_options, &gate->store, &fault);
    if (fault_is_absence(status, &fault)) {
        gate->stands_in = options->look;
        store_options.existing = options->look;
        /* A start that its rules refuse leaves no table behind. */
        status = options->look ? TG_OK : tg__config_check(config, gate->faces, NULL, chosen, error);
        if (status != TG_OK)
            return status;
        status = tg_store_open(options->look ? tg_text_of("memory://tidegate-look") : chosen, &store_options, &gate->store,
                               &fault);
    }
    const bool is_fault_of_settings = status == TG_E_CONFIG || status == TG_E_UNSUPPORTED || status == TG_E_ARG;
    if (status != TG_OK && options->starts_anyway && !is_fault_of_settings)
        status = tg__silent_open(gate->store_uri, options->clock, &fault, &gate->store, &fault);
    if (status != TG_OK && error) {
        *error = fault;
        if (gate->store_from_file && config->store_line) {
            snprintf(error->message, sizeof error->message, "%s:%u:1: %.*s", config->store_file, config->store_line,
                     (int)(sizeof error->message / 2), fault.message);
            error->line = config->store_line;
            error->column = 1;
        }
    }
    return status;
}

static tg_status
open_all(tg_gate *gate, const tg_gate_options *options, tg_error *error)
{
    tg_config *config;
    tg_snapshot *first = NULL;
    gate->faces = options->faces;
    gate->brief = options->brief;
    tg_status status = choose_path(options, &gate->path, error);
    if (status == TG_OK)
        status = tg__config_read_files(gate->path, &config, &gate->files, error);
    if (status != TG_OK)
        return status;
    status = open_store(gate, options, config, error);
    if (status != TG_OK) {
        tg__config_close(config);
        return status;
    }
    status = prepare(gate, config, &first, error);
    if (status != TG_OK)
        return status;
    atomic_store(&gate->slots[0].held, first); /* slot 0 is what the word says from the beginning */
    gate->first_client = first->client;
    gate->watched = !options->unwatched && !options->look;
    gate->read = gate->seen = stamp_of_marks(gate->files.marks, gate->files.count);
    atomic_store(&gate->generation, 1);
    return TG_OK;
}

tg_status
tg_gate_open(const tg_gate_options *options, tg_gate **gate, tg_error *error)
{
    static const tg_gate_options none = { 0 };
    tg_gate *made = calloc(1, sizeof *made);
    if (!made)
        return tg__error(error, TG_E_NOMEM, "gate: %zu bytes", sizeof *made);
    const tg_status status = open_all(made, options ? options : &none, error);
    if (status == TG_OK)
        *gate = made;
    else
        tg_gate_close(made);
    return status;
}

void
tg_gate_close(tg_gate *gate)
{
    if (!gate)
        return;
    for (size_t i = 0; i < SLOTS; i++)
        snapshot_close(atomic_load(&gate->slots[i].held));
    while (gate->clients) {
        client_entry *entry = gate->clients;
        gate->clients = entry->next;
        tg_client_close(entry->client);
        free(entry);
    }
    tg_store_close(gate->store);
    tg__files_close(&gate->files);
    free(gate->store_uri);
    free(gate->path);
    free(gate);
}

/* ---- when the file has changed ---- */

#define LOOK_EVERY_US UINT64_C(1000000)

static tg_status reload(tg_gate *gate, tg_error *error);

/* Reads the file again if it is another. One that was written a moment ago is left until it has rested for a second, or
 * for a look: half a list of policies is a good file that lets much through. */
static void
read_if_changed(tg_gate *gate)
{
    tg_error error;
    const stamp now = look_at_files(&gate->files);
    const bool rests = now.settled || same_stamp(&now, &gate->seen);
    gate->seen = now;
    if (!now.there || same_stamp(&now, &gate->read) || !rests)
        return; /* a file that is gone for a moment is on its way */
    const tg_status status = reload(gate, &error);
    if (status == TG_E_NOMEM)
        gate->read = now; /* said once, not once a second */
    if (status == TG_OK)
        tg__notice("rules-read", "%s has changed and is in force from now on", gate->path);
    else
        tg__notice("rules-refused", "%s has changed and is refused, the rules before it stay in force: %s", gate->path,
                   error.message);
}

/* Once a second at most, by whichever request comes by; nobody waits for it. */
static __attribute__((noinline, cold)) void
look(tg_gate *gate, uint64_t now_us, uint64_t due_us)
{
    int nobody = 0;
    if (!atomic_compare_exchange_strong(&gate->next_look_us, &due_us, now_us + LOOK_EVERY_US) ||
        !atomic_compare_exchange_strong(&gate->reloading, &nobody, (int)getpid()))
        return;
    read_if_changed(gate);
    unlock(gate);
}

/* No system call: the coarse clock is a look into a page that the kernel keeps. */
static inline void
look_if_due(tg_gate *gate)
{
    struct timespec coarse;
    if (!gate->watched)
        return;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &coarse);
    const uint64_t now_us = (uint64_t)coarse.tv_sec * 1000000 + (uint64_t)coarse.tv_nsec / 1000;
    const uint64_t due_us = atomic_load_explicit(&gate->next_look_us, memory_order_relaxed);
    if (__builtin_expect(now_us >= due_us, 0))
        look(gate, now_us, due_us);
}

/* Under the reload lock. */
static tg_status
reload(tg_gate *gate, tg_error *error)
{
    tg_config *config = NULL;
    tg_snapshot *made = NULL;
    tg_files files;
    tg_status status = tg__config_read_files(gate->path, &config, &files, error);
    if (status != TG_E_NOMEM) { /* also of a reading that is refused: said once, not once a second */
        tg__files_close(&gate->files);
        gate->files = files;
        gate->read = stamp_of_marks(files.marks, files.count);
    } else {
        tg__files_close(&files);
    }
    if (status == TG_OK) {
        status = check_store(gate, config, error);
        if (status == TG_OK)
            status = prepare(gate, config, &made, error);
        else
            tg__config_close(config);
    }
    if (status == TG_OK) {
        collect(gate);
        if (!publish(gate, made)) {
            snapshot_close(made);
            status = tg__error(error, TG_E_SYSTEM, "%s: %d earlier readings are still judging requests: try again",
                               gate->path, SLOTS - 1);
        }
        collect(gate);
    }
    return status;
}

tg_status
tg_gate_reload(tg_gate *gate, tg_error *error)
{
    lock(gate);
    const tg_status status = reload(gate, error);
    unlock(gate);
    return status;
}

/* ---- judging ---- */

static const tg_snapshot *
snapshot_at(const tg_gate *gate, size_t pinned)
{
    return atomic_load_explicit(&gate->slots[pinned].held, memory_order_relaxed);
}

const tg_snapshot *
tg__gate_pin(tg_gate *gate, bool looks, size_t *pinned)
{
    if (looks)
        look_if_due(gate);
    *pinned = pin(gate);
    return snapshot_at(gate, *pinned);
}

void
tg__gate_unpin(tg_gate *gate, size_t pinned)
{
    unpin(gate, pinned);
}

TG_EACH_REQUEST tg_status
tg_gate_judge(tg_gate *gate, const tg_request *request, uint64_t cost, const tg_decision *const *prior,
              size_t prior_count, tg_judgement *judgement, tg_answer *answer, tg_error *error)
{
    look_if_due(gate);
    const size_t pinned = pin(gate);
    const tg_matter matter = { request, cost, prior, prior_count, tg__waits_until(gate->store, request->waited_us), NULL };
    const tg_status status = tg__snapshot_judge(snapshot_at(gate, pinned), gate->store, &matter, judgement, answer, error);
    unpin(gate, pinned);
    if (matter.until_us)
        tg__judgement_waited(judgement, gate->store, request, matter.until_us);
    return status;
}

tg_status
tg_gate_settle(tg_gate *gate, tg_judgement *judgement, int status, const tg_header *headers, size_t header_count,
               tg_error *error)
{
    tg_settling settling;
    tg_status answer = TG_OK;
    tg_error fault;
    const size_t pinned = pin(gate);
    const bool begun = tg__settle_begin(&settling, snapshot_at(gate, pinned), judgement, status, headers, header_count);
    unpin(gate, pinned);
    if (!begun)
        return TG_OK;
    const uint64_t until_us = tg__waits_until(gate->store, 0);
    while (tg__settle_next(&settling, answer, &fault))
        answer = gate->store->ops->apply(gate->store, settling.op, settling.targets, settling.target_count, until_us,
                                         &settling.taken, NULL, &fault);
    if (settling.status != TG_OK && error)
        *error = settling.error;
    return settling.status;
}

bool
tg__config_find(const tg_config *config, tg_text name, size_t *at)
{
    for (*at = 0; *at < config->policy_count; ++*at)
        if (tg__text_is(name, config->policies[*at].name))
            return true;
    return false;
}

tg_status
tg__config_no_policy(const tg_config *config, tg_text name, tg_error *error)
{
    char names[300] = "", shown[TG_NAME_BYTES_MAX + 1];
    size_t used = 0;
    for (size_t i = 0; i < config->policy_count && used < sizeof names; i++) {
        const int written = snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "",
                                     config->policies[i].name);
        used += written > 0 ? (size_t)written : 0;
    }
    return tg__error(error, TG_E_CONFIG, "no policy \"%s\" in the rules file, which has: %s",
                     tg__text_show(name, shown, sizeof shown), config->policy_count ? names : "none");
}

tg_status
tg_gate_limiter(tg_gate *gate, tg_text name, tg_limiter **limiter, tg_error *error)
{
    const size_t pinned = pin(gate);
    const tg_snapshot *now = atomic_load_explicit(&gate->slots[pinned].held, memory_order_relaxed);
    size_t at;
    tg_status status;
    if (tg__config_find(now->config, name, &at))
        status = open_policy(gate, now->config, now->client, &now->config->policies[at],
                             now->config->policies[at].rules_text, limiter, error);
    else
        status = tg__config_no_policy(now->config, name, error);
    unpin(gate, pinned);
    if (status == TG_OK)
        (*limiter)->gives_back = true;
    return status;
}

tg_held
tg__gate_hold(tg_gate *gate)
{
    const size_t pinned = pin(gate);
    const tg_snapshot *now = atomic_load_explicit(&gate->slots[pinned].held, memory_order_relaxed);
    return (tg_held){ now->config, now->client, now->limiters, now->watches, pinned };
}

const char *
tg__gate_store_uri(const tg_gate *gate)
{
    return gate->store_uri;
}

bool
tg_gate_stands_in(const tg_gate *gate)
{
    return gate->stands_in;
}

void
tg__gate_let_go(tg_gate *gate, const tg_held *held)
{
    unpin(gate, held->slot);
}

tg_store *
tg_gate_store(tg_gate *gate)
{
    return gate->store;
}

const tg_client *
tg_gate_client(tg_gate *gate)
{
    return gate->first_client;
}

uint64_t
tg_gate_generation(const tg_gate *gate)
{
    return atomic_load(&gate->generation);
}

bool
tg_gate_names(tg_gate *gate, const char *kind)
{
    bool named = false;
    const size_t pinned = pin(gate);
    const tg_snapshot *now = atomic_load_explicit(&gate->slots[pinned].held, memory_order_relaxed);
    for (size_t i = 0; i < now->limiter_count && !named; i++)
        for (size_t k = 0; now->limiters[i] && k < now->limiters[i]->by_count && !named; k++)
            named = tg__by_names(now->limiters[i]->by[k], kind);
    unpin(gate, pinned);
    return named;
}
