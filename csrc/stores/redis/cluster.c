/* redis+cluster://: which node has which slot, and a decision over identities that lie in several slots.
 *
 * All rules on one identity lie in one slot (keys.c), and what lies in one slot is one call to one node: all or nothing
 * as everywhere. Identities in several slots are looked at first and then charged slot after slot, in the order of the
 * slots' numbers, so that two clients who share both never refuse each other; when a later slot denies or fails all the
 * same, what the earlier ones took is given back. docs/redis.md says what that leaves inexact.
 *
 * A node is a store of its own: connections, circuit breaker, scripts. Who has which slot is a guess that the nodes
 * themselves correct (MOVED, ASK), in which case nothing has run.
 *
 * Lock order: the cluster's lock, then a pool's. Must not enter: what a rule means; RESP; sockets. */
#include "stores/redis/cluster.h"
#include "stores/redis/keep.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define TRIES_MAX 8             /* nodes asked for one call: a map that never holds still ends here */
#define OPEN_DEADLINE_US UINT64_C(250000)
#define MAP_HOLDS_US 10000      /* asked for again sooner, the last answer is the answer */
#define MAP_FAILED_US 50000     /* nobody could tell: not asked for again sooner */
#define MAP_LOOKS_US 250000     /* while a node does not answer: whether another has taken its place */
#define CANDIDATES_MAX 24
#define SECRET_KEY "tg1:secret"

static tg_cluster *
cluster_of(tg_store *store)
{
    return (tg_cluster *)store; /* base is its first member */
}

/* ---- nodes ---- */

static void
node_free(tg_node *node)
{
    tg__pool_fini(&node->store);
    free(node);
}

/* Those that have no slots any more and that no call holds. Under the lock. */
static void
drop_idle_nodes(tg_cluster *cluster)
{
    bool serves[TG__NODES_MAX] = { false };
    for (unsigned slot = 0; slot < TG__SLOTS; slot++)
        if (cluster->owner[slot] != TG__NOBODY)
            serves[cluster->owner[slot]] = true;
    for (unsigned i = 0; i < TG__NODES_MAX; i++)
        if (cluster->nodes[i] && !serves[i] && cluster->nodes[i]->users == 0) {
            tg_node *left = cluster->nodes[i];
            cluster->nodes[i] = NULL; /* first: a child that is forked meanwhile must not find it half freed */
            node_free(left);
        }
}

/* The address of one server of the cluster. */
static void
address_of(const tg_cluster *cluster, const char *host, uint16_t port, tg_redis_address *address)
{
    char shown[128];
    *address = cluster->address;
    address->seed_count = 0;
    snprintf(address->host, sizeof address->host, "%s", host);
    address->port = port;
    snprintf(address->shown, sizeof address->shown, "redis at %s:%u", tg__text_show(tg_text_of(host), shown, sizeof shown),
             port);
}

/* Under the lock. TG__NOBODY: no memory, or more nodes than any cluster of ours has. */
static uint16_t
node_at(tg_cluster *cluster, const char *host, uint16_t port, tg_error *error)
{
    for (uint16_t i = 0; i < TG__NODES_MAX; i++)
        if (cluster->nodes[i] && cluster->nodes[i]->store.address.port == port &&
            strcmp(cluster->nodes[i]->store.address.host, host) == 0)
            return i;
    uint16_t index = 0;
    while (index < TG__NODES_MAX && cluster->nodes[index])
        index++;
    tg_node *node = index == TG__NODES_MAX ? NULL : calloc(1, sizeof *node);
    if (!node) {
        tg__error(error, index == TG__NODES_MAX ? TG_E_CONFIG : TG_E_NOMEM,
                  "redis cluster: room for a node; at most %d are known", TG__NODES_MAX);
        return TG__NOBODY;
    }
    tg_redis_store *store = &node->store;
    store->cluster = cluster;
    store->base.shown = store->address.shown;
    address_of(cluster, host, port, &store->address);
    store->timeout_us = store->address.timeout_us = cluster->timeout_us;
    store->manual = cluster->manual;
    store->clock = cluster->clock;
    store->names = cluster->names;
    atomic_init(&store->ahead_us, INT64_MIN);
    if (tg__pool_init(store, error) != TG_OK) {
        free(node);
        return TG__NOBODY;
    }
    cluster->nodes[index] = node;
    return index;
}

void
tg__node_release(tg_cluster *cluster, tg_node *node)
{
    if (!node)
        return;
    pthread_mutex_lock(&cluster->lock);
    if (node->users > 0) /* a forked child has set it to 0 */
        node->users--;
    pthread_mutex_unlock(&cluster->lock);
}

/* Whose slot it is, held. NULL: nobody's, or not known. */
tg_node *
tg__owner_hold(tg_cluster *cluster, unsigned slot)
{
    pthread_mutex_lock(&cluster->lock);
    const uint16_t index = cluster->owner[slot];
    tg_node *node = index == TG__NOBODY ? NULL : cluster->nodes[index];
    if (node)
        node->users++;
    pthread_mutex_unlock(&cluster->lock);
    return node;
}

/* ---- the map of slots ---- */

static bool
host_and_port(const redisReply *host, const redisReply *port, const char *asked, tg_redis_host *parsed)
{
    if (port->type != REDIS_REPLY_INTEGER || port->integer < 1 || port->integer > 65535)
        return false;
    parsed->port = (uint16_t)port->integer;
    /* None, or "?" where it does not know its own name: the one it was reached by. */
    const bool named = host->type == REDIS_REPLY_STRING && host->len > 0 && strcmp(host->str, "?") != 0;
    const char *name = named ? host->str : asked;
    if (strlen(name) > TG__REDIS_HOST_MAX || (named && strlen(name) != host->len))
        return false;
    snprintf(parsed->host, sizeof parsed->host, "%s", name);
    return true;
}

/* What CLUSTER SLOTS says, into the map. Slots that nobody serves are nobody's. */
static tg_trouble
take_map(tg_cluster *cluster, const redisReply *reply, const tg_redis_host *asked, tg_error *error)
{
    uint16_t owner[TG__SLOTS];
    memset(owner, 0xff, sizeof owner);
    size_t served = 0;
    tg_trouble trouble = TG__TROUBLE_NONE;
    pthread_mutex_lock(&cluster->lock);
    for (size_t i = 0; i < reply->elements && trouble == TG__TROUBLE_NONE; i++) {
        const redisReply *range = reply->element[i];
        tg_redis_host host;
        if (range->type != REDIS_REPLY_ARRAY || range->elements < 3 || range->element[0]->type != REDIS_REPLY_INTEGER ||
            range->element[1]->type != REDIS_REPLY_INTEGER || range->element[2]->type != REDIS_REPLY_ARRAY ||
            range->element[2]->elements < 2 || range->element[0]->integer < 0 ||
            range->element[0]->integer > range->element[1]->integer || range->element[1]->integer >= TG__SLOTS ||
            !host_and_port(range->element[2]->element[0], range->element[2]->element[1], asked->host, &host)) {
            tg__error(error, TG_E_STORE, "redis at %s:%u: CLUSTER SLOTS: an answer that no Redis gives", asked->host,
                      asked->port);
            trouble = TG__TROUBLE_REFUSED;
            break;
        }
        const uint16_t index = node_at(cluster, host.host, host.port, error);
        if (index == TG__NOBODY)
            trouble = TG__TROUBLE_REFUSED;
        for (long long slot = range->element[0]->integer; index != TG__NOBODY && slot <= range->element[1]->integer; slot++) {
            owner[slot] = index;
            served++;
        }
    }
    if (trouble == TG__TROUBLE_NONE && served == 0) {
        tg__error(error, TG_E_STORE, "redis at %s:%u: CLUSTERDOWN, not one slot is served", asked->host, asked->port);
        trouble = TG__TROUBLE_PAUSED;
    }
    if (trouble == TG__TROUBLE_NONE) {
        const unsigned secret_slot = tg__cluster_slot(tg_text_of(SECRET_KEY));
        /* Where the secret is now it is read again, or written back, with the next connection. */
        if (owner[secret_slot] != TG__NOBODY && cluster->owner[secret_slot] != owner[secret_slot])
            tg__pool_close_idle(&cluster->nodes[owner[secret_slot]]->store);
        if (memcmp(cluster->owner, owner, sizeof owner) != 0)
            atomic_fetch_add(&cluster->base.epoch, 1); /* other servers answer */
        memcpy(cluster->owner, owner, sizeof owner);
        cluster->refreshed_at_us = tg__monotonic_us();
    }
    drop_idle_nodes(cluster); /* also those of a map that was not taken: the next one needs their places */
    pthread_mutex_unlock(&cluster->lock);
    return trouble;
}

/* Asks one server for the map, over a connection that is for this alone: those of the pools belong to nodes whose place
 * is known, and may all be in use. */
static tg_trouble
ask_map(tg_cluster *cluster, const tg_redis_host *host, uint64_t deadline_us, tg_error *error)
{
    tg_redis_address address;
    address_of(cluster, host->host, host->port, &address);
    tg_redis_wire *wire = &cluster->map_wire;
    char bytes[2048];
    tg_resp resp = { .data = bytes, .size = sizeof bytes };
    unsigned replies = 1;
    if (address.password) {
        const char *const words[] = { "AUTH", address.user ? address.user : address.password, address.password };
        tg__resp_command(&resp, address.user ? 3 : 2, words);
        replies = 2;
    }
    tg__resp_command(&resp, 2, (const char *const[]){ "CLUSTER", "SLOTS" });
    if (resp.full) {
        tg__error(error, TG_E_CONFIG, "redis: user and password have more than %zu bytes", sizeof bytes - 100);
        return TG__TROUBLE_SETUP;
    }
    tg_trouble trouble = tg__wire_open(wire, &address, deadline_us, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = tg__wire_send(wire, &(struct iovec){ bytes, resp.length }, 1, deadline_us, NULL, error);
    explicit_bzero(bytes, sizeof bytes);
    while (trouble == TG__TROUBLE_NONE && replies > 0) {
        tg_heard heard = { .reply = NULL };
        trouble = tg__wire_hear(wire, deadline_us, &heard, error);
        if (trouble != TG__TROUBLE_NONE)
            break;
        const redisReply *const reply = heard.reply;
        replies--;
        if (reply->type == REDIS_REPLY_ERROR || (replies == 0 && reply->type != REDIS_REPLY_ARRAY)) {
            char explained[320];
            trouble = tg__redis_trouble(reply->type == REDIS_REPLY_ERROR ? reply->str : "an unexpected reply", explained,
                                        sizeof explained);
            tg__error(error, trouble == TG__TROUBLE_SETUP ? TG_E_CONFIG : TG_E_STORE, "%s: %s: %s", address.shown,
                      replies > 0 ? "AUTH" : "CLUSTER SLOTS (a cluster's user needs +cluster|slots, before version 7 "
                                             "+cluster)", explained);
        } else if (replies == 0) {
            trouble = take_map(cluster, reply, host, error);
        }
        tg__heard_forget(&heard);
    }
    tg__wire_close(wire);
    return trouble;
}

/* Who may know: `first`, the nodes that answer, the seeds, the others. Under the lock. */
static size_t
candidates(tg_cluster *cluster, const tg_redis_host *first, tg_redis_host *hosts)
{
    size_t count = 0;
    if (first && first->port)
        hosts[count++] = *first;
    const unsigned from = cluster->turn++;
    for (unsigned well = 0; well < 2; well++) {
        for (unsigned i = 0; i < TG__NODES_MAX && count < CANDIDATES_MAX - TG__SEEDS_MAX; i++) {
            const tg_node *node = cluster->nodes[(from + i) % TG__NODES_MAX];
            const bool answers = node && atomic_load(&node->store.failures_in_row) == 0 &&
                                 atomic_load(&node->store.asks_again_us) == 0;
            if (!node || answers != (well == 0) ||
                (first && node->store.address.port == first->port && strcmp(node->store.address.host, first->host) == 0))
                continue;
            snprintf(hosts[count].host, sizeof hosts[count].host, "%s", node->store.address.host);
            hosts[count++].port = node->store.address.port;
        }
        if (well == 0)
            for (size_t i = 0; i < cluster->address.seed_count; i++)
                hosts[count++] = cluster->address.seeds[i];
    }
    return count;
}

/* One of all threads asks, the others wait for it. TG__TROUBLE_NONE: the map is as somebody in the cluster sees it
 * now. A deadline is shared out: a server that is silent must not cost all of it. */
tg_trouble
tg__cluster_refresh(tg_cluster *cluster, const tg_redis_host *first, uint64_t deadline_us, tg_error *error)
{
    const struct timespec until = { (time_t)(deadline_us / 1000000), (long)(deadline_us % 1000000) * 1000 };
    pthread_mutex_lock(&cluster->lock);
    const bool waited = cluster->refreshing;
    const uint64_t seen_at_us = cluster->refreshed_at_us;
    while (cluster->refreshing && pthread_cond_timedwait(&cluster->refreshed, &cluster->lock, &until) != ETIMEDOUT)
        continue;
    const uint64_t now_us = tg__monotonic_us();
    const bool fresh = cluster->refreshed_at_us + MAP_HOLDS_US > now_us || (waited && cluster->refreshed_at_us != seen_at_us);
    if (fresh || cluster->refreshing || waited || cluster->tried_at_us + MAP_FAILED_US > now_us) {
        const bool late = cluster->refreshing;
        pthread_mutex_unlock(&cluster->lock);
        if (!fresh)
            tg__error(error, TG_E_STORE, "%s: no node could tell who has which slot%s", cluster->address.shown,
                      late ? " in time" : "");
        return fresh ? TG__TROUBLE_NONE : late ? TG__TROUBLE_TIMEOUT : TG__TROUBLE_LINK;
    }
    tg_redis_host hosts[CANDIDATES_MAX + TG__SEEDS_MAX];
    const size_t count = candidates(cluster, first, hosts);
    cluster->refreshing = true;
    pthread_mutex_unlock(&cluster->lock);

    tg_trouble trouble = TG__TROUBLE_LINK;
    tg_error setup = { .status = TG_OK };
    for (size_t i = 0; i < count; i++) {
        const uint64_t at_us = tg__monotonic_us();
        if (at_us >= deadline_us)
            break;
        trouble = ask_map(cluster, &hosts[i], at_us + (deadline_us - at_us) / (count - i > 3 ? 3 : count - i), error);
        if (trouble == TG__TROUBLE_NONE)
            break;
        if (trouble == TG__TROUBLE_SETUP && error && setup.status == TG_OK)
            setup = *error;
    }
    if (trouble != TG__TROUBLE_NONE && setup.status != TG_OK) {
        *error = setup;
        trouble = TG__TROUBLE_SETUP;
    }
    pthread_mutex_lock(&cluster->lock);
    cluster->tried_at_us = trouble == TG__TROUBLE_NONE ? 0 : tg__monotonic_us();
    cluster->refreshing = false;
    pthread_cond_broadcast(&cluster->refreshed);
    pthread_mutex_unlock(&cluster->lock);
    return trouble;
}

/* Whether the map was last looked at long enough ago to look again on behalf of a node that does not answer. */
bool
tg__cluster_look_is_due(tg_cluster *cluster)
{
    pthread_mutex_lock(&cluster->lock);
    const uint64_t now_us = tg__monotonic_us();
    const bool due = !cluster->refreshing && cluster->refreshed_at_us + MAP_LOOKS_US < now_us &&
                     cluster->tried_at_us + MAP_LOOKS_US < now_us;
    pthread_mutex_unlock(&cluster->lock);
    return due;
}

/* ---- the secret ---- */

bool
tg__cluster_offers_secret(tg_redis_store *node, char secret[128])
{
    tg_cluster *cluster = node->cluster;
    pthread_mutex_lock(&cluster->lock);
    const uint16_t index = cluster->owner[tg__cluster_slot(tg_text_of(SECRET_KEY))];
    const bool here = !cluster->secret_given && index != TG__NOBODY && &cluster->nodes[index]->store == node;
    if (here)
        memcpy(secret, cluster->secret, sizeof cluster->secret);
    pthread_mutex_unlock(&cluster->lock);
    return here;
}

void
tg__cluster_learns_secret(tg_redis_store *node, tg_text secret)
{
    tg_cluster *cluster = node->cluster;
    pthread_mutex_lock(&cluster->lock);
    const bool same = cluster->secret_known && tg__text_is(secret, cluster->secret);
    const bool another = cluster->secret_known && !same;
    if (!same) { /* the same is left alone: a child that is forked meanwhile has it whole */
        memcpy(cluster->secret, secret.data, secret.length);
        cluster->secret[secret.length] = '\0';
        tg__redis_keyring_init(&cluster->keyring, secret, cluster->manual, cluster->base.private_kinds);
        cluster->secret_known = true;
    }
    if (another)
        atomic_fetch_add(&cluster->base.epoch, 1);
    const bool tells = another && !cluster->warned_secret;
    cluster->warned_secret = cluster->warned_secret || another;
    pthread_mutex_unlock(&cluster->lock);
    if (tells)
        tg__notice("store-other-secret", "%s holds another secret than before: counts begin anew under it. "
                                         "TIDEGATE_SECRET, the same on all machines, keeps them", cluster->address.shown);
}

/* The keyring as it stands; where it is not known yet a connection to the node that has it learns it. */
tg_trouble
tg__cluster_keyring(tg_cluster *cluster, uint64_t deadline_us, tg_redis_keyring *keyring, tg_error *error)
{
    const unsigned slot = tg__cluster_slot(tg_text_of(SECRET_KEY));
    for (unsigned attempt = 0; attempt < 3; attempt++) {
        pthread_mutex_lock(&cluster->lock);
        const bool known = cluster->secret_known;
        *keyring = cluster->keyring;
        pthread_mutex_unlock(&cluster->lock);
        if (known)
            return TG__TROUBLE_NONE;
        tg_node *node = attempt == 0 ? tg__owner_hold(cluster, slot) : NULL;
        if (!node) {
            const tg_trouble trouble = tg__cluster_refresh(cluster, NULL, deadline_us, error);
            if (trouble != TG__TROUBLE_NONE)
                return trouble;
            node = tg__owner_hold(cluster, slot);
        }
        if (!node)
            break;
        bool probe;
        if (!tg__breaker_passes(&node->store, &probe)) {
            tg__error(error, TG_E_STORE, "%s: not asked again yet", node->store.address.shown);
            tg__node_release(cluster, node);
            return TG__TROUBLE_PAUSED;
        }
        tg_redis_wire *wire = NULL;
        tg__pool_close_idle(&node->store); /* greeted before the slot was known to be here */
        const tg_trouble trouble = tg__pool_take(&node->store, 0, deadline_us, &wire, error);
        if (trouble == TG__TROUBLE_NONE)
            tg__pool_give(&node->store, wire, true);
        tg__breaker_hears(&node->store, trouble == TG__TROUBLE_MOVED ? TG__TROUBLE_NONE : trouble, probe);
        tg__node_release(cluster, node);
        if (trouble != TG__TROUBLE_NONE && trouble != TG__TROUBLE_MOVED)
            return trouble;
    }
    tg__error(error, TG_E_STORE, "%s: no node serves the slot of the secret (" SECRET_KEY "); TIDEGATE_SECRET needs none",
              cluster->address.shown);
    return TG__TROUBLE_PAUSED;
}

bool
tg__cluster_check_key(tg_redis_store *node, char key[32])
{
    tg_cluster *cluster = node->cluster;
    bool found = false;
    pthread_mutex_lock(&cluster->lock);
    for (unsigned i = 0; i < 4 * TG__SLOTS && !found; i++) {
        char hashed[24];
        const int length = snprintf(hashed, sizeof hashed, "check%u", i);
        const uint16_t index = cluster->owner[tg__cluster_slot((tg_text){ hashed, (size_t)length })];
        found = index != TG__NOBODY && &cluster->nodes[index]->store == node;
        if (found)
            snprintf(key, 32, "%s:{%s}", cluster->manual ? "tg1m" : "tg1", hashed);
    }
    pthread_mutex_unlock(&cluster->lock);
    return found;
}

/* ---- one slot ---- */

bool
tg__cluster_redirects(const char *reply)
{
    return strncmp(reply, "MOVED ", 6) == 0 || strncmp(reply, "ASK ", 4) == 0 || strncmp(reply, "TRYAGAIN", 8) == 0;
}

/* "MOVED 3999 127.0.0.1:6381"; a host left out is the one that says so. */
static bool
redirected_to(const char *reply, const char *asked, tg_redis_host *to)
{
    const char *at = strchr(reply, ' ');
    at = at ? strchr(at + 1, ' ') : NULL;
    const char *colon = at ? strrchr(at + 1, ':') : NULL;
    uint64_t port;
    if (!colon || !tg__text_number(tg_text_of(colon + 1), 65535, &port) || port == 0)
        return false;
    tg_text host = { at + 1, (size_t)(colon - at - 1) };
    if (host.length == 0 || tg__text_is(host, "?"))
        host = tg_text_of(asked);
    if (host.length > TG__REDIS_HOST_MAX)
        return false;
    memcpy(to->host, host.data, host.length);
    to->host[host.length] = '\0';
    to->port = (uint16_t)port;
    return true;
}

/* The node that a redirection names, held; with MOVED the slot is its from now on. */
tg_node *
tg__cluster_follow(tg_cluster *cluster, unsigned slot, const char *reply, const char *asked, bool moved, tg_error *error)
{
    tg_redis_host to;
    if (!redirected_to(reply, asked, &to)) {
        tg__error(error, TG_E_STORE, "%s: a redirection to nowhere", cluster->address.shown);
        return NULL;
    }
    pthread_mutex_lock(&cluster->lock);
    uint16_t index = node_at(cluster, to.host, to.port, error);
    if (index == TG__NOBODY) { /* full of nodes that were named once */
        drop_idle_nodes(cluster);
        index = node_at(cluster, to.host, to.port, error);
    }
    tg_node *node = index == TG__NOBODY ? NULL : cluster->nodes[index];
    if (node && moved && cluster->owner[slot] != index) {
        cluster->owner[slot] = index;
        atomic_fetch_add(&cluster->base.epoch, 1); /* another server answers */
    }
    if (node)
        node->users++;
    pthread_mutex_unlock(&cluster->lock);
    return node;
}

static uint64_t
half_way(uint64_t deadline_us)
{
    const uint64_t now_us = tg__monotonic_us();
    return now_us < deadline_us ? now_us + (deadline_us - now_us) / 2 : deadline_us;
}

static void
pause_until(uint64_t at_us)
{
    const uint64_t now_us = tg__monotonic_us();
    if (at_us <= now_us)
        return;
    const struct timespec wait = { (time_t)((at_us - now_us) / 1000000), (long)((at_us - now_us) % 1000000) * 1000 };
    nanosleep(&wait, NULL); /* woken early by a signal it only asks sooner */
}

/* After `trouble` in which nothing ran: whether another node has the slot by now, which is then in *node. */
static bool
another_has_it(tg_cluster *cluster, unsigned slot, uint64_t deadline_us, tg_node **node)
{
    tg_error unused;
    if (tg__cluster_refresh(cluster, NULL, deadline_us, &unused) != TG__TROUBLE_NONE)
        return false;
    tg_node *now = tg__owner_hold(cluster, slot);
    if (!now || now == *node) {
        tg__node_release(cluster, now);
        return false;
    }
    tg__node_release(cluster, *node);
    *node = now;
    return true;
}

/* One call about one slot, at whichever node has it. *asked (held, may be NULL) is who answered. A call that may have
 * run is not repeated. */
static tg_trouble
ask_slot(tg_cluster *cluster, unsigned slot, tg_inquiry *question, uint64_t deadline_us, tg_heard *heard,
         tg_node **asked, tg_error *error)
{
    tg_node *node = tg__owner_hold(cluster, slot);
    tg_trouble trouble = TG__TROUBLE_NONE;
    unsigned pauses = 0;
    bool map_asked = false;
    question->asking = false;
    if (!node) {
        trouble = tg__cluster_refresh(cluster, NULL, deadline_us, error);
        node = trouble == TG__TROUBLE_NONE ? tg__owner_hold(cluster, slot) : NULL;
        if (trouble == TG__TROUBLE_NONE && !node) {
            tg__error(error, TG_E_STORE, "%s: CLUSTERDOWN, nobody serves slot %u", cluster->address.shown, slot);
            trouble = TG__TROUBLE_PAUSED;
        }
    }
    for (unsigned attempt = 0; node && attempt < TRIES_MAX; attempt++) {
        bool probe, unsent = false;
        if (!tg__breaker_passes(&node->store, &probe)) {
            if (!map_asked && tg__cluster_look_is_due(cluster)) {
                map_asked = true;
                if (another_has_it(cluster, slot, deadline_us, &node))
                    continue;
            }
            tg__error(error, TG_E_STORE, "%s: not asked again yet", node->store.address.shown);
            trouble = TG__TROUBLE_PAUSED;
            break;
        }
        trouble = tg__redis_ask(&node->store, question, deadline_us, heard, &unsent, error);
        if (trouble == TG__TROUBLE_TIMEOUT)
            atomic_fetch_add_explicit(&cluster->timeouts, 1, memory_order_relaxed);
        if (question->brief && trouble == TG__TROUBLE_TIMEOUT)
            tg__breaker_shrugs(&node->store, probe);
        else
            tg__breaker_hears(&node->store, trouble == TG__TROUBLE_MOVED ? TG__TROUBLE_NONE : trouble, probe);
        if (trouble == TG__TROUBLE_MOVED && !heard->reply) { /* while greeting: where the secret is has changed */
            if (map_asked || !another_has_it(cluster, slot, deadline_us, &node))
                map_asked = true;
            continue;
        }
        if (trouble == TG__TROUBLE_MOVED) {
            const bool again = strncmp(heard->reply->str, "TRYAGAIN", 8) == 0;
            const bool moved = strncmp(heard->reply->str, "MOVED", 5) == 0;
            tg_node *to = again ? NULL : tg__cluster_follow(cluster, slot, heard->reply->str, node->store.address.host, moved, error);
            tg__heard_forget(heard);
            if (again) { /* keys of one slot, half of them moved: the rest will be in a moment */
                const uint64_t now_us = tg__monotonic_us();
                const uint64_t at_us = now_us + (UINT64_C(500) << (pauses < 4 ? pauses++ : 4));
                if (at_us + (at_us - now_us) >= deadline_us) /* no time for an answer */
                    break;
                pause_until(at_us);
                attempt--; /* bounded by the deadline */
                continue;  /* with ASKING where that was how */
            }
            if (!to)
                break;
            tg_redis_host first = { .port = to->store.address.port };
            snprintf(first.host, sizeof first.host, "%s", to->store.address.host);
            tg__node_release(cluster, node);
            node = to;
            question->asking = !moved;
            if (moved && !map_asked) { /* one slot is known now; more may have moved with it */
                tg_error unused;
                map_asked = true;
                if (tg__cluster_look_is_due(cluster))
                    tg__cluster_refresh(cluster, &first, half_way(deadline_us), &unused);
            }
            continue;
        }
        const bool nothing_ran = unsent || trouble == TG__TROUBLE_PAUSED;
        if (trouble == TG__TROUBLE_NONE || trouble == TG__TROUBLE_REFUSED || !nothing_ran || map_asked)
            break;
        map_asked = true;
        tg__heard_forget(heard);
        question->asking = false;
        if (!another_has_it(cluster, slot, deadline_us, &node))
            break;
    }
    *asked = node;
    if (trouble == TG__TROUBLE_MOVED) {
        if (error->status == TG_OK)
            tg__error(error, TG_E_STORE, "%s: slot %u was not found", cluster->address.shown, slot);
        return TG__TROUBLE_PAUSED;
    }
    return trouble;
}

/* ---- one decision ---- */

bool
tg__cluster_split(const tg_redis_keyring *keyring, const tg_target *targets, size_t target_count, tg_parts *parts)
{
    const tg_identity *hashed = NULL;
    unsigned slot = 0;
    parts->count = 0;
    for (size_t i = 0; i < target_count; i++) {
        if (targets[i].rule->algorithm == TG_DENY)
            continue;
        if (targets[i].identity != hashed) {
            char text[TG__REDIS_IDENTITY_MAX];
            hashed = targets[i].identity;
            slot = tg__cluster_slot((tg_text){ text, tg__redis_identity_text(keyring, hashed, text) });
        }
        size_t at = 0;
        while (at < parts->count && parts->parts[at]->slot < slot)
            at++;
        if (at == parts->count || parts->parts[at]->slot != slot) {
            if (parts->count == TG_DIMENSIONS_MAX)
                return false;
            tg_part_call *part = &parts->room[parts->count];
            memmove(parts->parts + at + 1, parts->parts + at, (parts->count - at) * sizeof *parts->parts);
            parts->parts[at] = part;
            parts->count++;
            *part = (tg_part_call){ .slot = slot };
        }
        tg_part_call *part = parts->parts[at];
        part->index[part->count++] = (uint8_t)i;
    }
    return true;
}

/* Reads (again) what a part answered into the caller's results. */
static tg_trouble
tell(tg_op op, tg_part_call *part, const tg_target *targets, bool untaken, tg_result *results, tg_error *error)
{
    tg_target own[TG_TARGETS_MAX];
    tg_result told[TG_TARGETS_MAX];
    for (size_t i = 0; i < part->count; i++) {
        own[i] = targets[part->index[i]];
        told[i] = results[part->index[i]];
    }
    tg_call call = part->call;
    call.denied = call.denied || untaken;
    const tg_trouble trouble =
        tg__redis_read(&part->node->store, op, &call, own, part->count, part->heard.reply, part->heard.at_us, told, error);
    if (trouble == TG__TROUBLE_NONE)
        for (size_t i = 0; i < part->count; i++)
            results[part->index[i]] = told[i];
    return trouble;
}

static void
part_forget(tg_cluster *cluster, tg_part_call *part)
{
    tg__heard_forget(&part->heard);
    tg__node_release(cluster, part->node);
    part->node = NULL;
}

static tg_trouble
ask_part(tg_cluster *cluster, tg_op op, tg_part_call *part, bool look, const tg_redis_keyring *keyring,
         const tg_target *targets, uint64_t manual_now_us, uint64_t deadline_us, tg_error *error)
{
    tg_target own[TG_TARGETS_MAX];
    for (size_t i = 0; i < part->count; i++)
        own[i] = targets[part->index[i]];
    part_forget(cluster, part);
    tg__call_plan(&part->call, op, own, part->count);
    part->call.denied = look; /* only judged, as where a rule of the call denies by itself */
    part->call.knocks = part->knocks;
    part->call.lease = part->lease;
    part->call.lease_op = part->lease_op;
    if (part->call.asked == 0)
        return TG__TROUBLE_NONE;
    tg_inquiry question = { .op = op, .call = &part->call, .targets = own, .target_count = part->count,
                             .keyring = keyring, .manual_now_us = manual_now_us, .brief = part->brief };
    const tg_trouble trouble = ask_slot(cluster, part->slot, &question, deadline_us, &part->heard, &part->node, error);
    if (trouble == TG__TROUBLE_NONE)
        atomic_store_explicit(&cluster->ahead_us, atomic_load_explicit(&part->node->store.ahead_us, memory_order_relaxed),
                              memory_order_relaxed);
    return trouble;
}

/* Takes back what a part has charged. Whether it succeeds nobody can be told: the decision stands. */
static void
give_back(tg_cluster *cluster, const tg_part_call *part, const tg_redis_keyring *keyring, const tg_target *targets,
          const tg_result *results, uint64_t manual_now_us, uint64_t deadline_us)
{
    tg_target own[TG_TARGETS_MAX];
    size_t count = 0;
    for (size_t i = 0; i < part->count; i++) {
        const tg_result *result = &results[part->index[i]];
        if (!result->charged)
            continue;
        own[count] = targets[part->index[i]];
        own[count].own = true;
        own[count++].stamp_us = result->stamp_us;
    }
    tg_call call;
    tg_lease lease;
    tg__call_plan(&call, TG_OP_REFUND, own, count);
    if (part->lease) { /* by its number, so exactly what was taken */
        lease = part->own;
        lease.until_us = part->until_us;
        lease.actual = 0;
        call.lease = &lease;
        call.lease_op = TG_LEASE_SETTLE;
    }
    tg_inquiry question = { .op = TG_OP_REFUND, .call = &call, .targets = own, .target_count = count,
                             .keyring = keyring, .manual_now_us = manual_now_us, .brief = part->brief };
    tg_heard heard = { .reply = NULL };
    tg_node *node = NULL;
    tg_error unused = { .status = TG_OK };
    if (call.asked > 0)
        ask_slot(cluster, part->slot, &question, deadline_us, &heard, &node, &unused);
    tg__heard_forget(&heard);
    tg__node_release(cluster, node);
}

/* What stands in front of a charge: a node that is known not to answer must not cost the others a charge and a refund
 * with every request. */
bool
tg__cluster_may_ask(tg_cluster *cluster, const tg_parts *parts, tg_error *error)
{
    bool may = true;
    const uint64_t now_us = tg__monotonic_us();
    pthread_mutex_lock(&cluster->lock);
    for (size_t i = 0; i < parts->count && may; i++) {
        const uint16_t index = cluster->owner[parts->parts[i]->slot];
        if (index == TG__NOBODY)
            continue;
        const tg_redis_store *store = &cluster->nodes[index]->store;
        may = atomic_load_explicit(&store->asks_again_us, memory_order_relaxed) <= now_us;
        if (!may)
            tg__error(error, TG_E_STORE, "%s: not asked again yet", store->address.shown);
    }
    pthread_mutex_unlock(&cluster->lock);
    return may;
}

/* What an answer says of the lease of its slot. */
static tg_trouble
hear_lease(tg_part_call *part, tg_error *error)
{
    uint8_t first = 0;
    if (!tg__redis_read_head(part->heard.reply, &first, &part->now_us)) {
        tg__error(error, TG_E_STORE, "%s: an answer that no script of this version gives", part->node->store.address.shown);
        return TG__TROUBLE_REFUSED;
    }
    part->there = first != 0;
    part->until_us = part->lease_op == TG_LEASE_SETTLE ? part->own.until_us : part->now_us + part->own.lease_us;
    part->full = part->lease_op == TG_LEASE_TAKE && first == 2;
    if (!part->full)
        return TG__TROUBLE_NONE;
    tg__error(error, TG_E_STORE, "%s: no room for another reservation", part->node->store.address.shown);
    return TG__TROUBLE_REFUSED;
}

/* Asks one part and tells the results; `refused` is set when a target of it denies. */
static tg_trouble
judge_part(tg_cluster *cluster, tg_op op, tg_part_call *part, bool look, const tg_redis_keyring *keyring,
           const tg_target *targets, tg_result *results, uint64_t manual_now_us, uint64_t deadline_us, bool *refused,
           tg_error *error)
{
    tg_trouble trouble = ask_part(cluster, op, part, look, keyring, targets, manual_now_us, deadline_us, error);
    if (trouble == TG__TROUBLE_NONE && part->lease && !look)
        trouble = hear_lease(part, error);
    if (trouble == TG__TROUBLE_NONE)
        trouble = tell(op, part, targets, false, results, error);
    for (size_t i = 0; i < part->count && trouble == TG__TROUBLE_NONE; i++) {
        part->charged = part->charged || results[part->index[i]].charged;
        part->refused = part->refused || !results[part->index[i]].allowed;
    }
    *refused = *refused || part->refused;
    part->counted = !look && part->refused && trouble == TG__TROUBLE_NONE;
    return trouble;
}

/* ---- where what is denied counts ---- */

unsigned
tg__cluster_denied_groups(const tg_target *targets, size_t target_count, const tg_result *results)
{
    unsigned groups = 0;
    for (size_t i = 0; i < target_count; i++)
        if (targets[i].counts_denied && !results[i].allowed)
            groups |= 1u << targets[i].counts_denied;
    return groups;
}

static bool
is_denied(const tg_target *target, unsigned groups)
{
    return target->counts_denied && (groups >> target->counts_denied & 1);
}

size_t
tg__cluster_knocks_next(const tg_parts *parts, size_t at, const tg_target *targets, unsigned groups)
{
    for (; at < parts->count; at++) {
        const tg_part_call *part = parts->parts[at];
        for (size_t i = 0; i < part->count && !part->counted; i++)
            if (is_denied(&targets[part->index[i]], groups))
                return at;
    }
    return parts->count;
}

void
tg__cluster_knocking(tg_target *target, unsigned groups)
{
    if (is_denied(target, groups))
        target->counts_denied |= TG__DENIED_ELSEWHERE;
}

/* Has the slots count what is denied, once all is known. The decision stands whether they do or not. */
static void
count_denied(tg_cluster *cluster, tg_parts *parts, const tg_redis_keyring *keyring, const tg_target *targets,
             size_t target_count, tg_result *results, uint64_t manual_now_us, uint64_t deadline_us)
{
    const unsigned groups = tg__cluster_denied_groups(targets, target_count, results);
    tg_target knocking[TG_TARGETS_MAX];
    for (size_t i = 0; i < target_count && groups; i++) {
        knocking[i] = targets[i];
        tg__cluster_knocking(&knocking[i], groups);
    }
    for (size_t at = 0; groups && (at = tg__cluster_knocks_next(parts, at, targets, groups)) < parts->count; at++) {
        tg_part_call *part = parts->parts[at];
        tg_result told[TG_TARGETS_MAX];
        tg_error unused = { .status = TG_OK };
        bool refuses = false;
        memcpy(told, results, target_count * sizeof *told);
        part->knocks = true;
        tg_trouble trouble =
            ask_part(cluster, TG_OP_HIT, part, true, keyring, knocking, manual_now_us, deadline_us, &unused);
        if (trouble == TG__TROUBLE_NONE)
            trouble = tell(TG_OP_HIT, part, knocking, false, told, &unused);
        for (size_t i = 0; i < part->count; i++)
            refuses = refuses || !told[part->index[i]].allowed;
        /* What denied a moment ago, and would not now, has denied all the same. */
        for (size_t i = 0; i < part->count && trouble == TG__TROUBLE_NONE && (refuses || !part->refused); i++)
            results[part->index[i]] = told[part->index[i]];
    }
}

uint64_t
tg__cluster_charges_until(uint64_t deadline_us)
{
    const uint64_t now_us = tg__monotonic_us();
    return now_us < deadline_us ? deadline_us - (deadline_us - now_us) / 5 : deadline_us;
}

/* A hit on several slots. All but the first are looked at before anything is charged: whoever keeps knocking at a limit
 * that denies then never charges the others, not for a moment. Only when somebody else takes what was seen to be left,
 * or a node stops answering, is there something to give back. */
static tg_trouble
charge(tg_cluster *cluster, tg_parts *parts, const tg_redis_keyring *keyring, const tg_target *targets,
       size_t target_count, tg_result *results, uint64_t manual_now_us, uint64_t deadline_us, tg_error *error)
{
    const uint64_t charges_until_us = tg__cluster_charges_until(deadline_us);
    tg_trouble trouble = TG__TROUBLE_NONE;
    bool refused = false;
    if (!tg__cluster_may_ask(cluster, parts, error)) {
        if (!tg__cluster_look_is_due(cluster))
            return TG__TROUBLE_PAUSED;
        tg__cluster_refresh(cluster, NULL, charges_until_us, error);
        if (!tg__cluster_may_ask(cluster, parts, error))
            return TG__TROUBLE_PAUSED;
    }
    for (size_t i = parts->count; i-- > 0 && trouble == TG__TROUBLE_NONE;)
        if (i > 0 || refused)
            trouble = judge_part(cluster, TG_OP_HIT, parts->parts[i], true, keyring, targets, results, manual_now_us,
                                 charges_until_us, &refused, error);
    size_t asked = 0;
    for (; asked < parts->count && trouble == TG__TROUBLE_NONE && !refused; asked++)
        trouble = judge_part(cluster, TG_OP_HIT, parts->parts[asked], false, keyring, targets, results, manual_now_us,
                             charges_until_us, &refused, error);
    if (trouble == TG__TROUBLE_NONE && !refused)
        return trouble;
    for (size_t i = 0; i < asked; i++) {
        tg_part_call *part = parts->parts[i];
        if (!part->charged)
            continue;
        give_back(cluster, part, keyring, targets, results, manual_now_us, deadline_us);
        if (trouble == TG__TROUBLE_NONE)
            tell(TG_OP_HIT, part, targets, true, results, error); /* as it stood before: it has been read once already */
    }
    if (trouble == TG__TROUBLE_NONE && !parts->parts[0]->lease)
        count_denied(cluster, parts, keyring, targets, target_count, results, manual_now_us, deadline_us);
    return trouble;
}

/* Where each slot is for itself: of what is left one takes half at most, so that a node which is silent leaves time for the
 * others. `left`: slots that have not been asked, this one included. */
static uint64_t
own_time(const tg_cluster *cluster, tg_part_call *part, size_t left, uint64_t deadline_us)
{
    const uint64_t now_us = tg__monotonic_us();
    uint64_t us = now_us < deadline_us ? deadline_us - now_us : 0;
    if (left > 1)
        us /= 2;
    if (us > cluster->timeout_us)
        us = cluster->timeout_us;
    part->brief = part->brief || us < cluster->timeout_us / 4;
    return now_us + us;
}

static tg_trouble
decide(tg_cluster *cluster, tg_op op, tg_parts *parts, bool denied, const tg_redis_keyring *keyring,
       const tg_target *targets, size_t target_count, tg_result *results, uint64_t manual_now_us, uint64_t deadline_us, tg_error *error)
{
    if (op == TG_OP_HIT && !denied && parts->count > 1)
        return charge(cluster, parts, keyring, targets, target_count, results, manual_now_us, deadline_us, error);
    tg_trouble trouble = TG__TROUBLE_NONE;
    bool refused = false; /* nobody asks: each slot stands for itself */
    for (size_t i = 0; i < parts->count; i++) {
        tg_part_call *part = parts->parts[i];
        if (op == TG_OP_HIT || op == TG_OP_PEEK) {
            trouble = judge_part(cluster, op, part, denied, keyring, targets, results, manual_now_us, deadline_us, &refused,
                                 error);
            if (trouble != TG__TROUBLE_NONE)
                return trouble;
        } else { /* each slot for itself: when one fails, or is silent, the others have their time all the same */
            const uint64_t until_us = own_time(cluster, part, parts->count - i, deadline_us);
            tg_trouble one = ask_part(cluster, op, part, false, keyring, targets, manual_now_us, until_us, error);
            if (one == TG__TROUBLE_NONE && part->lease)
                one = hear_lease(part, error);
            part->done = one == TG__TROUBLE_NONE;
            trouble = one != TG__TROUBLE_NONE ? one : trouble;
        }
    }
    return trouble;
}

typedef struct tg_asking { /* what stands in front of the first slot that is asked */
    tg_call call; /* as if all lay in one slot */
    uint64_t manual_now_us, deadline_us;
    bool brief; /* of tg__question_time */
    tg_redis_keyring keyring;
    tg_parts parts;
} tg_asking;

/* `answered`: nobody has to be asked. */
static tg_status
begin_asking(tg_cluster *cluster, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
             tg_result *results, tg_asking *now, bool *answered, tg_error *error)
{
    tg__call_plan(&now->call, op, targets, target_count);
    *answered = tg__call_answer_alone(&now->call, op, target_count, results);
    if (*answered)
        return TG_OK;
    now->manual_now_us = cluster->manual ? tg_clock_now_us(cluster->clock) : 0;
    if (now->manual_now_us > TG__REDIS_CLOCK_US_MAX)
        return tg__error(error, TG_E_STORE, "redis: a manual clock beyond %" PRIu64 " us cannot be told to Redis",
                         TG__REDIS_CLOCK_US_MAX);
    if (tg__question_time(cluster->address.shown, tg__monotonic_us(), until_us, cluster->timeout_us, &now->deadline_us, &now->brief, error) != TG_OK)
        return TG_E_STORE;
    if (tg__cluster_keyring(cluster, now->deadline_us, &now->keyring, error) != TG__TROUBLE_NONE)
        return error->status = TG_E_STORE;
    return TG_OK;
}

static tg_status
find_slots(tg_op op, const tg_target *targets, size_t target_count, tg_result *results, tg_asking *now, tg_error *error)
{
    if (!tg__cluster_split(&now->keyring, targets, target_count, &now->parts))
        return tg__error(error, TG_E_ARG, "redis: more than %d identities in one decision", TG_DIMENSIONS_MAX);
    for (size_t i = 0; i < now->parts.count; i++)
        now->parts.parts[i]->brief = now->brief;
    for (size_t i = 0; i < target_count && now->call.denied; i++)
        if (targets[i].rule->algorithm == TG_DENY && (op == TG_OP_HIT || op == TG_OP_PEEK)) {
            results[i].allowed = results[i].charged = false;
            results[i].remaining = results[i].reset_after_us = results[i].delay_us = results[i].stamp_us = 0;
            results[i].retry_after_us = TG_NEVER;
        }
    return TG_OK;
}

/* What is charged whether it fits or not: nobody can deny it, so each slot is for itself, and there may be any number of them
 * (hits that tiers bring together). */
static bool
is_forced(const tg_target *targets, size_t target_count)
{
    for (size_t i = 0; i < target_count; i++)
        if (!targets[i].forced)
            return false;
    return true;
}

static tg_status
force_all(tg_cluster *cluster, tg_asking *now, const tg_target *targets, size_t target_count, tg_result *results,
          tg_error *error)
{
    unsigned slots[TG_TARGETS_MAX];
    size_t left = 0; /* slots, or a little more */
    tg_trouble trouble = TG__TROUBLE_NONE;
    for (size_t i = 0; i < target_count; i++) {
        char text[TG__REDIS_IDENTITY_MAX];
        slots[i] = i > 0 && targets[i].identity == targets[i - 1].identity
                       ? slots[i - 1]
                       : tg__cluster_slot((tg_text){ text, tg__redis_identity_text(&now->keyring, targets[i].identity, text) });
        left += i == 0 || slots[i] != slots[i - 1];
    }
    for (size_t i = 0; i < target_count; i++) {
        if (slots[i] == TG__SLOTS)
            continue;
        tg_part_call part = { .slot = slots[i], .brief = now->brief };
        for (size_t k = i; k < target_count; k++)
            if (slots[k] == part.slot) {
                part.index[part.count++] = (uint8_t)k;
                slots[k] = TG__SLOTS; /* done */
            }
        bool refused = false;
        const uint64_t until_us = own_time(cluster, &part, left, now->deadline_us);
        const tg_trouble one = judge_part(cluster, TG_OP_HIT, &part, false, &now->keyring, targets, results,
                                          now->manual_now_us, until_us, &refused, error);
        part_forget(cluster, &part);
        trouble = trouble == TG__TROUBLE_NONE ? one : trouble;
        left -= left > 0;
    }
    if (trouble == TG__TROUBLE_NONE)
        return TG_OK;
    return error->status = TG_E_STORE;
}

static tg_status
ask_all(tg_cluster *cluster, tg_op op, tg_asking *now, const tg_target *targets, size_t target_count, tg_result *results,
        tg_error *error)
{
    const tg_trouble trouble = decide(cluster, op, &now->parts, now->call.denied, &now->keyring, targets, target_count,
                                      results, now->manual_now_us, now->deadline_us, error);
    for (size_t i = 0; i < now->parts.count; i++)
        part_forget(cluster, &now->parts.room[i]);
    if (trouble == TG__TROUBLE_NONE)
        return TG_OK;
    return error->status = TG_E_STORE;
}

static tg_status
cluster_apply(tg_store *base, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
              tg_result *results, bool *overflow, tg_error *error)
{
    tg_cluster *cluster = cluster_of(base);
    tg_error own;
    error = error ? error : &own;
    error->status = TG_OK;
    if (overflow)
        *overflow = false;
    tg_asking now;
    bool answered;
    tg_status status = begin_asking(cluster, op, targets, target_count, until_us, results, &now, &answered, error);
    if (status != TG_OK || answered)
        return status;
    if (op == TG_OP_HIT && !now.call.denied && is_forced(targets, target_count))
        return force_all(cluster, &now, targets, target_count, results, error);
    status = find_slots(op, targets, target_count, results, &now, error);
    return status != TG_OK ? status : ask_all(cluster, op, &now, targets, target_count, results, error);
}

/* ---- reservations ----
 *
 * One lease for each slot, all of one number. A place says how many milliseconds later than the reservation's its slot's
 * lease ends: nodes' clocks differ. */

#define NO_PLACE UINT32_MAX

static uint64_t
place_until(const tg_lease *lease, uint32_t place)
{
    return lease->until_us + (uint64_t)place * 1000;
}

/* The ends that the slots have set: the earliest, and by how much the others are later. */
static void
keep_ends(const tg_parts *parts, const bool *held, tg_lease *lease)
{
    uint64_t first_us = UINT64_MAX;
    for (size_t i = 0; i < parts->count; i++)
        for (size_t k = 0; k < parts->parts[i]->count; k++)
            if (held[parts->parts[i]->index[k]] && parts->parts[i]->until_us < first_us)
                first_us = parts->parts[i]->until_us;
    lease->until_us = first_us;
    for (size_t i = 0; i < parts->count; i++) {
        const tg_part_call *part = parts->parts[i];
        for (size_t k = 0; k < part->count; k++) {
            const uint64_t later_ms = (part->until_us - first_us) / 1000;
            if (held[part->index[k]])
                lease->places[part->index[k]] = later_ms < NO_PLACE ? (uint32_t)later_ms : NO_PLACE - 1;
        }
    }
}

static void
taken(const tg_asking *now, size_t target_count, tg_lease *lease, const tg_result *results)
{
    bool held[TG_TARGETS_MAX], any = false;
    for (size_t i = 0; i < target_count; i++) {
        held[i] = results[i].charged;
        any = any || held[i];
        lease->places[i] = NO_PLACE;
    }
    if (any)
        keep_ends(&now->parts, held, lease);
    else
        memset(lease->id, 0, sizeof lease->id);
}

/* Over when no slot has it any more, or one of them has given its part back: what was reset there owes nothing. */
static void
renewed(const tg_asking *now, size_t target_count, tg_lease *lease)
{
    bool held[TG_TARGETS_MAX], any = false;
    for (size_t i = 0; i < now->parts.count; i++) {
        const tg_part_call *part = now->parts.parts[i];
        any = any || part->there;
        lease->over = lease->over || (!part->there && part->now_us >= part->own.until_us);
    }
    lease->over = lease->over || !any;
    for (size_t i = 0; i < target_count; i++)
        held[i] = true;
    keep_ends(&now->parts, held, lease);
}

static tg_status
cluster_lease(tg_store *base, tg_lease_op op, const tg_target *targets, size_t target_count, tg_lease *lease,
              tg_result *results, bool *overflow, tg_error *error)
{
    tg_cluster *cluster = cluster_of(base);
    const tg_op as = op == TG_LEASE_TAKE ? TG_OP_HIT : TG_OP_REFUND;
    tg_error own;
    error = error ? error : &own;
    error->status = TG_OK;
    tg_status status = tg__lease_begin(op, lease, overflow, error);
    if (status != TG_OK)
        return status;
    tg_asking now;
    bool answered;
    status = begin_asking(cluster, as, targets, target_count, 0, results, &now, &answered, error);
    if (status == TG_OK && answered)
        memset(lease->id, 0, sizeof lease->id);
    else if (status == TG_OK)
        status = find_slots(as, targets, target_count, results, &now, error);
    if (status != TG_OK || answered)
        return status;
    for (size_t i = 0; i < now.parts.count; i++) {
        tg_part_call *part = now.parts.parts[i];
        part->own = *lease;
        if (op != TG_LEASE_TAKE)
            part->own.until_us = place_until(lease, lease->places[part->index[0]]);
        part->lease = &part->own;
        part->lease_op = op;
    }
    status = ask_all(cluster, as, &now, targets, target_count, results, error);
    if (status == TG_OK && op == TG_LEASE_TAKE)
        taken(&now, target_count, lease, results);
    if (status == TG_OK && op == TG_LEASE_RENEW)
        renewed(&now, target_count, lease);
    for (size_t i = 0; i < now.parts.count && status != TG_OK; i++) {
        const tg_part_call *part = now.parts.parts[i];
        lease->full = lease->full || part->full;
        for (size_t k = 0; k < part->count && op == TG_LEASE_SETTLE && part->done; k++)
            lease->places[part->index[k]] = NO_PLACE; /* settled for good: whoever tries again tries the others */
    }
    if (lease->full && !atomic_exchange(&cluster->told_leases, true))
        tg__notice("leases-full", "%s: a client has 512 reservations under way and gets no other; on_store_failure decides until "
                                  "some are settled or end", cluster->address.shown);
    if (status != TG_OK && op == TG_LEASE_TAKE)
        memset(lease->id, 0, sizeof lease->id);
    return status;
}

/* ---- the rest of what a store does ---- */

static tg_status
cluster_admit_rule(tg_store *store, const tg_rule *rule, tg_error *error)
{
    (void)store, (void)rule, (void)error; /* Redis has no bound of its own on a state */
    return TG_OK;
}

static tg_status
cluster_name_rule(tg_store *store, const tg_rule *rule, const char *space, const char *name, tg_error *error)
{
    return tg__redis_names_add(cluster_of(store)->names, rule, space, name, error);
}

/* Of the node that answered last; their clocks are theirs. */
static uint64_t
cluster_now_us(tg_store *base)
{
    const tg_cluster *cluster = cluster_of(base);
    if (cluster->manual)
        return tg_clock_now_us(cluster->clock);
    const int64_t ahead_us = atomic_load_explicit(&cluster->ahead_us, memory_order_relaxed);
    if (ahead_us != INT64_MIN)
        return (uint64_t)((int64_t)tg__monotonic_us() + ahead_us);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static int64_t
cluster_utc_offset_us(tg_store *store)
{
    (void)store;
    return 0;
}

static tg_status
cluster_stats(tg_store *base, tg_store_stats *stats, tg_error *error)
{
    const tg_cluster *cluster = cluster_of(base);
    tg_census census;
    *stats = (tg_store_stats){ .timeouts = atomic_load_explicit(&cluster->timeouts, memory_order_relaxed) };
    const tg_status status = tg__keeper_census(base->keeper, &census, error);
    stats->keys = census.keys;
    stats->keys_bytes = census.bytes;
    stats->keys_sampled = census.sampled;
    return status;
}

/* ---- what operators see and set: in one slot, so on one node ---- */

static tg_redis_store *
keeping_node(tg_store *store, tg_text hashed)
{
    tg_node *node = tg__owner_hold(cluster_of(store), tg__cluster_slot(hashed));
    return node ? &node->store : NULL;
}

static void
release_node(tg_store *store, tg_redis_store *server)
{
    tg__node_release(cluster_of(store), (tg_node *)server); /* store is its first member */
}

static void
heard_from(tg_store *store, int64_t ahead_us)
{
    atomic_store_explicit(&cluster_of(store)->ahead_us, ahead_us, memory_order_relaxed);
}

static bool
known_keyring(tg_store *store, tg_redis_keyring *keyring)
{
    return tg__cluster_keyring(cluster_of(store), tg__monotonic_us() + cluster_of(store)->timeout_us, keyring, NULL) ==
           TG__TROUBLE_NONE;
}

static void
look_again(tg_store *store, uint64_t deadline_us)
{
    tg__cluster_refresh(cluster_of(store), NULL, deadline_us, NULL);
}

static size_t
hold_masters(tg_store *store, tg_redis_store **servers, size_t room)
{
    tg_cluster *cluster = cluster_of(store);
    bool serves[TG__NODES_MAX] = { false };
    size_t count = 0;
    pthread_mutex_lock(&cluster->lock);
    for (unsigned slot = 0; slot < TG__SLOTS; slot++)
        if (cluster->owner[slot] != TG__NOBODY)
            serves[cluster->owner[slot]] = true;
    for (unsigned i = 0; i < TG__NODES_MAX && count < room; i++)
        if (serves[i] && cluster->nodes[i]) {
            cluster->nodes[i]->users++;
            servers[count++] = &cluster->nodes[i]->store;
        }
    pthread_mutex_unlock(&cluster->lock);
    return count;
}

static void begin_child(tg_store *store);

static const tg_keeper_ways ways = {
    .begin_child = begin_child,
    .masters = hold_masters,
    .hold = keeping_node,
    .release = release_node,
    .heard = heard_from,
    .keyring = known_keyring,
    .moved = look_again,
};

static void
cluster_close(tg_store *base)
{
    if (!base)
        return;
    tg_cluster *cluster = cluster_of(base);
    tg__keeper_close(base->keeper);
    for (unsigned i = 0; i < TG__NODES_MAX; i++)
        if (cluster->nodes[i])
            node_free(cluster->nodes[i]);
    tg__redis_names_close(cluster->names);
    tg__redis_address_fini(&cluster->address);
    explicit_bzero(cluster->secret, sizeof cluster->secret);
    explicit_bzero(&cluster->keyring, sizeof cluster->keyring);
    pthread_cond_destroy(&cluster->refreshed);
    pthread_mutex_destroy(&cluster->lock);
    free(cluster);
}

/* Slots of a node's, or of nobody's with NULL. */
static unsigned
slots_of(tg_cluster *cluster, const tg_redis_store *server)
{
    unsigned count = 0;
    pthread_mutex_lock(&cluster->lock);
    for (unsigned slot = 0; slot < TG__SLOTS; slot++) {
        const uint16_t index = cluster->owner[slot];
        count += (index == TG__NOBODY ? NULL : &cluster->nodes[index]->store) == server;
    }
    pthread_mutex_unlock(&cluster->lock);
    return count;
}

/* Every primary, also one that opening had no time for: that is where role, version, permissions and memory policy are seen. */
static tg_status
cluster_examine(tg_store *base, tg_error *error)
{
    tg_cluster *cluster = cluster_of(base);
    tg_redis_store *servers[TG__NODES_MAX];
    tg_redis_keyring keyring;
    tg_key_sample sample = { 0 };
    const uint64_t until_us = tg__monotonic_us() + TG__EXAMINE_US;
    const size_t count = hold_masters(base, servers, TG__NODES_MAX);
    if (count == 0)
        return TG_OK; /* it was said when it was opened */
    const bool keyed = tg__cluster_keyring(cluster, tg__monotonic_us() + TG__EXAMINE_US / 10, &keyring, error) == TG__TROUBLE_NONE;
    for (size_t i = 0; i < count; i++) {
        tg_error seen = { .message = "" };
        if (tg__examine_server(servers[i], keyed ? &keyring : NULL, until_us, &sample, &seen) != TG__TROUBLE_NONE)
            tg__notice("store-unchecked", "a node that has %u of the %d slots was left out: %.300s",
                       slots_of(cluster, servers[i]), TG__SLOTS, seen.message);
        release_node(base, servers[i]);
    }
    const unsigned unserved = slots_of(cluster, NULL);
    if (unserved)
        tg__notice("store-slots-unserved", "%s: %u of the %d slots are served by no node; on_store_failure decides for those "
                                           "who are counted there", cluster->address.shown, unserved, TG__SLOTS);
    tg__examine_tell(cluster->address.shown, &sample);
    explicit_bzero(&keyring, sizeof keyring);
    return keyed ? TG_OK : TG_E_STORE;
}

static const tg_store_ops cluster_ops = {
    .name = "redis",
    .remote = true,
    .apply = cluster_apply,
    .lease = cluster_lease,
    .async_open = tg__cluster_async_open,
    .admit_rule = cluster_admit_rule,
    .name_rule = cluster_name_rule,
    .now_us = cluster_now_us,
    .utc_offset_us = cluster_utc_offset_us,
    .stats = cluster_stats,
    .close = cluster_close,
    .metric_name = tg__kept_metric_name,
    .metric_line = tg__kept_metric_line,
    .latency_add = tg__kept_latency_add,
    .metrics = tg__kept_metrics,
    .override_set = tg__kept_override_set,
    .override_list = tg__kept_override_list,
    .examine = cluster_examine,
};

/* ---- opening, and forks ---- */

static void
locks_init(tg_cluster *cluster)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&cluster->lock, NULL);
    pthread_cond_init(&cluster->refreshed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* A thread that is not in this process may have held the lock, or been the one who refreshes: also of a cluster whose
 * nodes are not known yet. Half a new map is no harm: each slot has an owner that is, or was, right. */
static void
begin_child(tg_store *store)
{
    tg_cluster *cluster = cluster_of(store);
    locks_init(cluster);
    cluster->refreshing = false;
    const int fd = atomic_exchange(&cluster->map_wire.fd, -1);
    if (fd != -1)
        close(fd);
    cluster->map_wire.reader = NULL; /* lost, as in pool.c */
    cluster->map_wire.tls = NULL;
    for (unsigned i = 0; i < TG__NODES_MAX; i++)
        if (cluster->nodes[i])
            cluster->nodes[i]->users = 0;
}

/* What a person has to change is an error now, at whichever node it shows. Nodes that are not there are none. */
static tg_status
look_at_cluster(tg_cluster *cluster, uint64_t began_us, tg_error *error)
{
    tg_error seen = { .status = TG_OK };
    const uint64_t wait_us = cluster->timeout_us > OPEN_DEADLINE_US ? cluster->timeout_us : OPEN_DEADLINE_US;
    const uint64_t deadline_us = began_us + wait_us;
    tg_redis_keyring keyring;
    tg_trouble trouble = tg__cluster_refresh(cluster, NULL, deadline_us, &seen);
    bool failing = trouble != TG__TROUBLE_NONE;
    for (unsigned i = 0; i < TG__NODES_MAX && trouble == TG__TROUBLE_NONE; i++) {
        if (!cluster->nodes[i] || tg__monotonic_us() >= deadline_us)
            continue;
        tg_redis_store *store = &cluster->nodes[i]->store;
        tg_redis_wire *wire = NULL;
        const tg_trouble found = tg__pool_take(store, 0, deadline_us, &wire, &seen);
        if (found == TG__TROUBLE_NONE)
            tg__pool_give(store, wire, true);
        failing = failing || found != TG__TROUBLE_NONE;
        if (found == TG__TROUBLE_SETUP || seen.status == TG_E_NOMEM)
            trouble = TG__TROUBLE_SETUP;
    }
    if (trouble == TG__TROUBLE_NONE && !failing)
        failing = tg__cluster_keyring(cluster, deadline_us, &keyring, &seen) != TG__TROUBLE_NONE;
    if (trouble == TG__TROUBLE_SETUP || seen.status == TG_E_NOMEM) {
        if (error)
            *error = seen;
        return seen.status;
    }
    if (!failing)
        return TG_OK;
    /* Spoken of here, so that core/ does not say it again with the first decision. */
    atomic_store(&cluster->base.failing, true);
    atomic_store(&cluster->base.last_failure_us, tg__monotonic_us());
    tg__notice("store-failing", "store %s does not answer: %s; on_store_failure decides until it does",
               cluster->address.shown, seen.message);
    return TG_OK;
}

tg_status
tg__cluster_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **opened, tg_error *error)
{
    const uint64_t began_us = tg__monotonic_us();
    tg_cluster *cluster = calloc(1, sizeof *cluster);
    if (!cluster)
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *cluster);
    cluster->base.ops = &cluster_ops;
    cluster->base.in_slots = true;
    cluster->base.counts_denied = true;
    cluster->base.shown = cluster->address.shown;
    cluster->base.private_kinds = options->private_kinds;
    cluster->timeout_us = options->timeout_us;
    cluster->clock = options->clock; /* store.c holds the reference */
    cluster->manual = options->clock != NULL;
    atomic_init(&cluster->ahead_us, INT64_MIN);
    atomic_init(&cluster->map_wire.fd, -1);
    memset(cluster->owner, 0xff, sizeof cluster->owner);
    locks_init(cluster);
    tg_status status = tg__redis_address_parse(uri, &cluster->address, error);
    if (cluster->address.timeout_us)
        cluster->timeout_us = cluster->address.timeout_us;
    cluster->base.timeout_us = cluster->timeout_us;
    if (status == TG_OK)
        status = tg__redis_scripts_init(error);
    if (status == TG_OK)
        status = tg__redis_choose_secret(options->secret, cluster->secret, &cluster->secret_given, error);
    if (status == TG_OK && cluster->secret_given) {
        tg__redis_keyring_init(&cluster->keyring, tg_text_of(cluster->secret), cluster->manual,
                               cluster->base.private_kinds);
        cluster->secret_known = true;
    }
    if (status == TG_OK) {
        cluster->names = tg__redis_names_open();
        if (!cluster->names)
            status = tg__error(error, TG_E_NOMEM, "redis: the rules' names");
    }
    if (status == TG_OK) {
        cluster->base.keeper = tg__keeper_open(&cluster->base, &ways, cluster->manual);
        if (!cluster->base.keeper)
            status = tg__error(error, TG_E_NOMEM, "redis: what is kept for operators");
    }
    if (status == TG_OK)
        status = look_at_cluster(cluster, began_us, error);
    if (status == TG_OK) {
        *opened = &cluster->base;
        cluster = NULL;
    }
    cluster_close((tg_store *)cluster);
    return status;
}
