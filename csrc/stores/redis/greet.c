/* What a new connection begins with, in one round trip: password, database, role and, without a secret of our own,
 * the one kept in Redis. The first connection of a store also looks at the version, the memory policy and the user's
 * permissions, and asks the server for the scripts' names (their SHA-1), so that no implementation of that is needed
 * here. Must not enter: decisions. */
#include "stores/redis/redis.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define SECRET_KEY "tg1:secret"
#define WORDS_BYTES_MAX 8192 /* all of a greeting but the scripts' texts */

enum step { STEP_AUTH, STEP_SELECT, STEP_ASKING, STEP_ROLE, STEP_SECRET_SET, STEP_SECRET_GET, STEP_SERVER, STEP_MEMORY, STEP_CHECK,
            STEP_SHA };

static void
add(tg_greeting *greeting, enum step step, size_t count, const char *const *words)
{
    greeting->steps[greeting->count++] = (unsigned char)step;
    tg__resp_command(&greeting->resp, count, words);
}
#define ADD(greeting, step, ...)                                                                                       \
    add(greeting, step, sizeof((const char *[]){ __VA_ARGS__ }) / sizeof(const char *), (const char *[]){ __VA_ARGS__ })

static void
compose(tg_redis_store *store, tg_greeting *greeting, const char *secret)
{
    char probe[32];
    const tg_redis_address *address = &store->address;
    if (address->user)
        ADD(greeting, STEP_AUTH, "AUTH", address->user, address->password);
    else if (address->password)
        ADD(greeting, STEP_AUTH, "AUTH", address->password);
    if (address->db) {
        char db[16];
        snprintf(db, sizeof db, "%u", address->db);
        ADD(greeting, STEP_SELECT, "SELECT", db);
    }
    if (store->cluster && greeting->whole)
        ADD(greeting, STEP_ASKING, "ASKING"); /* holds for one command: whether the user may */
    ADD(greeting, STEP_ROLE, "ROLE");
    if (*secret && !store->secret_given) {
        ADD(greeting, STEP_SECRET_SET, "SET", SECRET_KEY, secret, "NX");
        ADD(greeting, STEP_SECRET_GET, "GET", SECRET_KEY);
    }
    if (!greeting->whole)
        return;
    ADD(greeting, STEP_SERVER, "INFO", "server");
    ADD(greeting, STEP_MEMORY, "INFO", "memory");
    snprintf(probe, sizeof probe, "%s", store->manual ? "tg1m:{check}" : "tg1:{check}");
    if (!store->cluster || tg__cluster_check_key(store, probe)) {
        const tg_text check = tg__redis_check_script();
        greeting->steps[greeting->count++] = STEP_CHECK;
        tg__resp_count(&greeting->resp, '*', 4);
        tg__resp_bulk(&greeting->resp, "EVAL", 4);
        tg__resp_bulk(&greeting->resp, check.data, check.length);
        tg__resp_bulk(&greeting->resp, "1", 1);
        tg__resp_bulk(&greeting->resp, probe, strlen(probe));
    }
    static const char sha1[] = "return redis.sha1hex(ARGV[1])";
    for (size_t i = 0; i < TG__SCRIPTS; i++) {
        const tg_text text = tg__redis_script((tg_script)i);
        greeting->steps[greeting->count++] = STEP_SHA;
        tg__resp_count(&greeting->resp, '*', 4);
        tg__resp_bulk(&greeting->resp, "EVAL", 4);
        tg__resp_bulk(&greeting->resp, sha1, strlen(sha1));
        tg__resp_bulk(&greeting->resp, "0", 1);
        tg__resp_bulk(&greeting->resp, text.data, text.length);
    }
}

/* ---- the replies ---- */

static tg_trouble
refuse(const tg_redis_store *store, const char *what, const redisReply *reply, tg_error *error)
{
    char explained[320];
    const tg_trouble trouble = tg__redis_trouble(reply->type == REDIS_REPLY_ERROR ? reply->str : "an unexpected reply",
                                                 explained, sizeof explained);
    tg__error(error, trouble == TG__TROUBLE_SETUP ? TG_E_CONFIG : TG_E_STORE, "%s: %s: %s", store->address.shown, what,
              explained);
    return trouble;
}

/* A cluster's slots move at any time, also between the look at the map and the greeting. */
static bool
moved(const tg_redis_store *store, const redisReply *reply)
{
    return store->cluster && reply->type == REDIS_REPLY_ERROR && tg__cluster_redirects(reply->str);
}

static bool
forbidden(const redisReply *reply)
{
    return reply->type == REDIS_REPLY_ERROR && strncmp(reply->str, "NOPERM", 6) == 0;
}

static tg_trouble
see_role(tg_redis_store *store, const redisReply *reply, tg_error *error)
{
    if (forbidden(reply)) {
        /* Without it a replica is found out only by its first refused write. */
        if (!atomic_exchange(&store->warned_checks, true))
            tg__notice("store-unchecked", "%s: the user may not call ROLE, so a replica is not told from a master; "
                                          "+role and +info allow the checks", store->address.shown);
        return TG__TROUBLE_NONE;
    }
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements < 1 || reply->element[0]->type != REDIS_REPLY_STRING)
        return refuse(store, "ROLE", reply, error);
    if (strcmp(reply->element[0]->str, "master") == 0)
        return TG__TROUBLE_NONE;
    char role[32], master[96];
    tg__text_show(tg_text_of(reply->element[0]->str), role, sizeof role);
    master[0] = '\0';
    if (reply->elements >= 3 && reply->element[1]->type == REDIS_REPLY_STRING &&
        reply->element[2]->type == REDIS_REPLY_INTEGER) {
        char host[64];
        snprintf(master, sizeof master, "; its master is %s:%lld",
                 tg__text_show(tg_text_of(reply->element[1]->str), host, sizeof host), reply->element[2]->integer);
    }
    tg__error(error, TG_E_CONFIG, "%s: its role is '%s', and only a master can count%s", store->address.shown, role,
              master);
    return TG__TROUBLE_PAUSED; /* it may be made the master any moment; opening a store does not wait for that */
}

static tg_trouble
see_secret(tg_redis_store *store, tg_redis_wire *wire, const redisReply *reply, char *set_refused, tg_error *error)
{
    if (reply->type == REDIS_REPLY_NIL && *set_refused) {
        const redisReply refusal = { .type = REDIS_REPLY_ERROR, .str = set_refused };
        return refuse(store, "SET " SECRET_KEY, &refusal, error);
    }
    if (moved(store, reply)) {
        refuse(store, "GET " SECRET_KEY, reply, error);
        return TG__TROUBLE_MOVED;
    }
    if (reply->type != REDIS_REPLY_STRING || reply->len == 0 || reply->len >= sizeof store->secret)
        return refuse(store, "GET " SECRET_KEY, reply, error);
    if (store->cluster) {
        tg__cluster_learns_secret(store, (tg_text){ reply->str, reply->len });
        return TG__TROUBLE_NONE;
    }
    pthread_mutex_lock(&store->lock);
    const bool another = atomic_load(&store->scripts_known) && strcmp(store->secret, reply->str) != 0;
    memcpy(store->secret, reply->str, reply->len + 1);
    pthread_mutex_unlock(&store->lock);
    tg__redis_keyring_init(&wire->keyring, (tg_text){ reply->str, reply->len }, store->manual, store->base.private_kinds);
    if (another)
        tg__redis_begins_epoch(store);
    if (another && !atomic_exchange(&store->warned_secret, true))
        tg__notice("store-other-secret", "%s holds another secret than before: counts begin anew under it. "
                                         "TIDEGATE_SECRET, the same on all machines, keeps them", store->address.shown);
    return TG__TROUBLE_NONE;
}

/* "name:value\r\n" lines. */
static tg_text
info_line(const redisReply *reply, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = reply->str, *end; at && *at; at = end ? end + 1 : NULL) {
        end = strchr(at, '\n');
        if (strncmp(at, name, length) != 0 || at[length] != ':')
            continue;
        at += length + 1;
        return (tg_text){ at, strcspn(at, "\r\n") };
    }
    return (tg_text){ NULL, 0 };
}

static tg_trouble
see_server(tg_redis_store *store, const redisReply *reply, tg_error *error)
{
    if (reply->type != REDIS_REPLY_STRING)
        return forbidden(reply) ? TG__TROUBLE_NONE : refuse(store, "INFO server", reply, error);
    const tg_text version = info_line(reply, "redis_version");
    const char *dot = version.length ? memchr(version.data, '.', version.length) : NULL;
    uint64_t major;
    if (dot && tg__text_number((tg_text){ version.data, (size_t)(dot - version.data) }, 1000, &major) &&
        major < TG__REDIS_VERSION_MIN) {
        char shown[32];
        tg__error(error, TG_E_CONFIG, "%s: version %s; %d or later is needed", store->address.shown,
                  tg__text_show(version, shown, sizeof shown), TG__REDIS_VERSION_MIN);
        return TG__TROUBLE_SETUP;
    }
    return TG__TROUBLE_NONE;
}

static tg_trouble
see_memory(tg_redis_store *store, const redisReply *reply, tg_error *error)
{
    if (reply->type != REDIS_REPLY_STRING) {
        if (!forbidden(reply))
            return refuse(store, "INFO memory", reply, error);
        if (!atomic_exchange(&store->warned_checks, true))
            tg__notice("store-unchecked", "%s: the user may not call INFO, so version and maxmemory-policy are not "
                                          "looked at; +info allows it", store->address.shown);
        return TG__TROUBLE_NONE;
    }
    const tg_text policy = info_line(reply, "maxmemory_policy"), most = info_line(reply, "maxmemory");
    /* Also without a limit: it may be set later, and the policy is what then decides. */
    if (policy.length && !tg__text_is(policy, "noeviction") && !atomic_exchange(&store->warned_eviction, true)) {
        char shown[32];
        tg__notice("store-evicts",
                   "%s: maxmemory-policy is %s%s: eviction frees clients who are denied, and whoever can make keys can "
                   "bring it about; noeviction keeps them", store->address.shown, tg__text_show(policy, shown, sizeof shown),
                   tg__text_is(most, "0") ? " (maxmemory is not set yet)" : "");
    }
    return TG__TROUBLE_NONE;
}

static tg_trouble
see_check(tg_redis_store *store, const redisReply *reply, tg_error *error)
{
    if (moved(store, reply))
        return TG__TROUBLE_NONE; /* what the user lacks shows with the first decision */
    if (reply->type != REDIS_REPLY_STRING)
        return refuse(store, "EVAL", reply, error);
    if (reply->len == 0)
        return TG__TROUBLE_NONE;
    char shown[128];
    tg__error(error, TG_E_CONFIG,
              "%s: the user's permissions lack %s (all that is needed: ~tg1:* +eval +evalsha +time +get +set +pexpire "
              "+lrange +llen +lindex +rpush +lset +ltrim +del; +role +info for the checks)",
              store->address.shown, tg__text_show((tg_text){ reply->str, reply->len }, shown, sizeof shown));
    return TG__TROUBLE_SETUP;
}

static tg_trouble
see(tg_redis_store *store, tg_redis_wire *wire, enum step step, const redisReply *reply, tg_greeting *seen,
    tg_error *error)
{
    switch (step) {
    case STEP_AUTH:
        return reply->type == REDIS_REPLY_STATUS ? TG__TROUBLE_NONE : refuse(store, "AUTH", reply, error);
    case STEP_SELECT:
        return reply->type == REDIS_REPLY_STATUS ? TG__TROUBLE_NONE : refuse(store, "SELECT", reply, error);
    case STEP_ASKING:
        return reply->type == REDIS_REPLY_STATUS ? TG__TROUBLE_NONE
                                                 : refuse(store, "ASKING (a cluster's user needs +asking)", reply, error);
    case STEP_ROLE:
        return see_role(store, reply, error);
    case STEP_SECRET_SET:
        /* nil: there is one already. A full server refuses even then, so GET tells whether that matters. */
        if (reply->type == REDIS_REPLY_ERROR)
            tg__text_show(tg_text_of(reply->str), seen->set_refused, sizeof seen->set_refused);
        return TG__TROUBLE_NONE;
    case STEP_SECRET_GET:
        return see_secret(store, wire, reply, seen->set_refused, error);
    case STEP_SERVER:
        return see_server(store, reply, error);
    case STEP_MEMORY:
        return see_memory(store, reply, error);
    case STEP_CHECK:
        return see_check(store, reply, error);
    default:
        if (reply->type != REDIS_REPLY_STRING || reply->len != 40)
            return refuse(store, "EVAL", reply, error);
        memcpy(seen->sha[seen->sha_count++], reply->str, 41);
        return TG__TROUBLE_NONE;
    }
}

tg_trouble
tg__greeting_begin(tg_redis_store *store, tg_redis_wire *wire, tg_greeting *greeting, tg_error *error)
{
    *greeting = (tg_greeting){ .whole = !atomic_load_explicit(&store->scripts_known, memory_order_acquire),
                               .resp = { .size = WORDS_BYTES_MAX } };
    if (greeting->whole) {
        greeting->resp.size += tg__redis_check_script().length;
        for (size_t i = 0; i < TG__SCRIPTS; i++)
            greeting->resp.size += tg__redis_script((tg_script)i).length;
    }
    greeting->resp.data = malloc(greeting->resp.size);
    if (!greeting->resp.data) {
        tg__error(error, TG_E_NOMEM, "redis: %zu bytes", greeting->resp.size);
        return TG__TROUBLE_LINK;
    }
    char secret[sizeof store->secret] = "";
    if (store->cluster) {
        tg__cluster_offers_secret(store, secret);
    } else {
        pthread_mutex_lock(&store->lock);
        memcpy(secret, store->secret, sizeof secret);
        pthread_mutex_unlock(&store->lock);
    }
    compose(store, greeting, secret);
    if (store->secret_given && !store->cluster)
        tg__redis_keyring_init(&wire->keyring, tg_text_of(secret), store->manual, store->base.private_kinds);
    explicit_bzero(secret, sizeof secret);
    if (greeting->resp.full) {
        tg__error(error, TG_E_CONFIG, "redis: user and password have more than %d bytes", WORDS_BYTES_MAX - 1024);
        return TG__TROUBLE_SETUP;
    }
    return TG__TROUBLE_NONE;
}

tg_trouble
tg__greeting_hear(tg_redis_store *store, tg_redis_wire *wire, tg_greeting *greeting, const redisReply *reply,
                  tg_error *error)
{
    const tg_trouble trouble = see(store, wire, (enum step)greeting->steps[greeting->at++], reply, greeting, error);
    if (trouble != TG__TROUBLE_NONE || !greeting->whole || greeting->at < greeting->count)
        return trouble;
    /* Several threads may greet at once; what is read without the lock is written once. */
    pthread_mutex_lock(&store->lock);
    if (!atomic_load(&store->scripts_known))
        memcpy(store->sha, greeting->sha, sizeof store->sha);
    atomic_store_explicit(&store->scripts_known, true, memory_order_release);
    pthread_mutex_unlock(&store->lock);
    return TG__TROUBLE_NONE;
}

void
tg__greeting_end(tg_greeting *greeting)
{
    if (greeting->resp.data)
        explicit_bzero(greeting->resp.data, greeting->resp.length); /* the password is in it */
    free(greeting->resp.data);
    greeting->resp.data = NULL;
}

tg_trouble
tg__redis_greet(tg_redis_store *store, tg_redis_wire *wire, uint64_t deadline_us, tg_error *error)
{
    tg_greeting greeting;
    tg_trouble trouble = tg__greeting_begin(store, wire, &greeting, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = tg__wire_send(wire, &(struct iovec){ greeting.resp.data, greeting.resp.length }, 1, deadline_us, NULL,
                                error);
    while (trouble == TG__TROUBLE_NONE && greeting.at < greeting.count) {
        tg_heard heard = { .reply = NULL };
        trouble = tg__wire_hear(wire, deadline_us, &heard, error);
        if (trouble != TG__TROUBLE_NONE)
            break;
        trouble = tg__greeting_hear(store, wire, &greeting, heard.reply, error);
        tg__heard_forget(&heard);
    }
    tg__greeting_end(&greeting);
    return trouble;
}
