/* A cluster on somebody else's loop: one client (async.c) for each node, and decisions that go from slot to slot as those
 * that wait do (cluster.c says why in that order): all but the first slot are looked at, then each is charged, and what
 * was charged is given back when a later one denies or fails.
 *
 * A hit over several slots whose caller has gone goes on without one until what it has charged is given back.
 *
 * What can only be found out by waiting (who has which slot, the secret) is asked by a thread of its own, at most one for
 * each client, as a name is looked up. Must not enter: what replies mean; RESP; sockets. */
#include "stores/redis/cluster.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define WAKE_NEVER UINT64_MAX
#define TRIES_MAX 8
#define GO_ON_AT_ONCE 256  /* the rest with the next turn of the loop: others have theirs in between */
#define GIVES_FOR_US 1000 /* at least: eight slots are then given back within 10 ms of any deadline */
#define SCOUT_RESTS_US 50000 /* what it has found, or not, holds so long */

typedef struct cluster_async cluster_async;

/* The client of one node. */
typedef struct node_client {
    cluster_async *owner;
    tg_node *node; /* held */
    tg_store_async *inner;
    uint64_t wakes_at_us;
    bool flush_asked;
    int fd; /* as last watched; -1 */
} node_client;

typedef enum phase {
    PHASE_WHOLE,   /* slot by slot, none depends on another */
    PHASE_LOOK,    /* all but the first slot, last to second; the first too once one denies */
    PHASE_CHARGE,  /* first to last */
    PHASE_GIVE,    /* back what was charged */
    PHASE_TELL,    /* of the slots that were given back, as they are now */
    PHASE_KNOCK    /* where what is denied counts, once all is known */
} phase;

/* What a decision needs of its caller's, once that has gone. */
typedef struct keepsake {
    tg_rule rules[TG_TARGETS_MAX];
    tg_identity identities[TG_TARGETS_MAX]; /* where equal pointers stood, the first of them */
    tg_target targets[TG_TARGETS_MAX];
    tg_result results[TG_TARGETS_MAX];
} keepsake;

typedef struct deciding {
    struct deciding *before, *next; /* in the client's list of all */
    cluster_async *client;
    tg_op op;
    const tg_target *targets;
    size_t target_count;
    tg_result *results;
    tg_async_done *done;
    void *data;
    uint64_t deadline_us, charges_until_us, manual_now_us;
    bool denied, split, refused, concluded, beginning;
    unsigned groups; /* that are denied, where that counts */
    tg_status status;
    tg_error error;
    tg_redis_keyring keyring;
    tg_parts parts;
    phase phase;
    size_t at;       /* which part */
    unsigned tries, pauses;
    bool map_asked;  /* for this part */
    struct deciding *beside, *behind; /* in the list that it is parked in */
    struct deciding **parked_in;      /* the client's `parked` or `due`; NULL: waits for a node, or is on its way */
    uint64_t again_at_us; /* parked until then; 0: until the scout is back, or the deadline has come */
    bool late;            /* due because its deadline has come */
    tg_node *node;   /* held: where a redirection leads, or who is being asked */
    tg_node *missed; /* who did not answer when the scout was sent: not held, only compared */
    tg_node_call how;
    node_client *asked;
    tg_store_call *call;
    tg_target own[TG_TARGETS_MAX];
    tg_result told[TG_TARGETS_MAX];
    size_t own_count;
    keepsake *kept; /* cancelled: nobody waits for it; else NULL */
} deciding;

typedef struct scout { /* whoever ends last frees it: the thread, or the client */
    pthread_mutex_t lock;
    bool done, given_up;
    int answered; /* an eventfd */
    uint64_t deadline_us;
    tg_cluster *cluster; /* a reference */
} scout;

struct cluster_async {
    tg_store_async base; /* first: a tg_store_async * is one of these */
    tg_cluster *cluster; /* a reference */
    tg_async_loop loop;
    unsigned generation;
    node_client *nodes[TG__NODES_MAX];
    size_t node_count;
    deciding *first, *spare;
    deciding *parked, *due; /* that wait, and that can go on as soon as a turn has room */
    uint64_t parked_until_us; /* none of those that are parked goes on before */
    size_t pending;
    scout *scout;
    uint64_t scouted_at_us;
    uint64_t wakes_at_us;
    bool flush_asked, closing;
    unsigned depth;
};

static cluster_async *
of(tg_store_async *base)
{
    return (cluster_async *)base;
}

static bool
ours(const cluster_async *client)
{
    return client->generation == tg__fork_generation();
}

/* ---- the scout ---- */

static void
scout_free(scout *one)
{
    close(one->answered);
    pthread_mutex_destroy(&one->lock);
    free(one);
}

static void *
scout_run(void *argument)
{
    scout *one = argument;
    tg_cluster *cluster = one->cluster;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL); /* the application's handlers are for its own threads */
    tg_redis_keyring keyring;
    tg_error error = { .status = TG_OK };
    if (tg__cluster_refresh(cluster, NULL, one->deadline_us, &error) == TG__TROUBLE_NONE)
        tg__cluster_keyring(cluster, one->deadline_us, &keyring, &error);
    pthread_mutex_lock(&one->lock);
    one->done = true;
    const bool given_up = one->given_up;
    if (!given_up)
        eventfd_write(one->answered, 1);
    pthread_mutex_unlock(&one->lock); /* from here on it is the other's, unless that has gone */
    if (given_up)
        scout_free(one);
    tg_store_close(&cluster->base);
    return NULL;
}

static bool
send_scout(cluster_async *client)
{
    if (client->scout)
        return true;
    const uint64_t now_us = tg__monotonic_us();
    if (client->scouted_at_us + SCOUT_RESTS_US > now_us)
        return false;
    scout *one = calloc(1, sizeof *one);
    if (!one)
        return false;
    pthread_mutex_init(&one->lock, NULL);
    one->answered = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    one->deadline_us = now_us + client->cluster->timeout_us;
    one->cluster = client->cluster;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    tg__store_retain(&client->cluster->base);
    const bool sent = one->answered != -1 && pthread_create(&thread, &detached, scout_run, one) == 0;
    pthread_attr_destroy(&detached);
    if (!sent) {
        tg_store_close(&client->cluster->base);
        if (one->answered != -1)
            close(one->answered);
        pthread_mutex_destroy(&one->lock);
        free(one);
        client->scouted_at_us = now_us; /* no thread, no descriptor: not tried with every call */
        return false;
    }
    client->scout = one;
    client->loop.watch(client->loop.data, one->answered, true, false);
    return true;
}

static void
end_scout(cluster_async *client)
{
    scout *one = client->scout;
    if (!one)
        return;
    client->scout = NULL;
    client->scouted_at_us = tg__monotonic_us();
    if (ours(client))
        client->loop.watch(client->loop.data, one->answered, false, false);
    else
        return; /* its thread is the parent's: lost, a few bytes and a descriptor */
    pthread_mutex_lock(&one->lock);
    one->given_up = true;
    const bool done = one->done;
    pthread_mutex_unlock(&one->lock);
    if (done)
        scout_free(one);
}

/* ---- the nodes' clients, whose loop is this client ---- */

static void
set_timer(cluster_async *client)
{
    uint64_t at_us = WAKE_NEVER;
    if (client->closing)
        return;
    for (size_t i = 0; i < client->node_count; i++)
        if (client->nodes[i]->wakes_at_us < at_us)
            at_us = client->nodes[i]->wakes_at_us;
    if (client->parked && client->parked_until_us < at_us)
        at_us = client->parked_until_us;
    if (client->due)
        at_us = 0;
    if (at_us == WAKE_NEVER || client->wakes_at_us <= at_us)
        return;
    client->wakes_at_us = at_us;
    const uint64_t now_us = tg__monotonic_us();
    client->loop.wake(client->loop.data, at_us > now_us ? at_us - now_us : 0);
}

static void
node_watches(void *data, int fd, bool readable, bool writable)
{
    node_client *one = data;
    one->fd = readable || writable ? fd : -1;
    one->owner->loop.watch(one->owner->loop.data, fd, readable, writable);
}

static void
node_wakes(void *data, uint64_t in_us)
{
    node_client *one = data;
    one->wakes_at_us = in_us == UINT64_MAX ? WAKE_NEVER : tg__monotonic_us() + in_us;
}

static void
node_flushes(void *data)
{
    node_client *one = data;
    one->flush_asked = true;
    if (!one->owner->flush_asked) {
        one->owner->flush_asked = true;
        one->owner->loop.flush(one->owner->loop.data);
    }
}

/* Takes over the hold on `node`, or releases it. */
static node_client *
client_of(cluster_async *client, tg_node *node, tg_error *error)
{
    for (size_t i = 0; i < client->node_count; i++)
        if (client->nodes[i]->node == node) {
            tg__node_release(client->cluster, node);
            return client->nodes[i];
        }
    node_client *one = client->node_count < TG__NODES_MAX ? calloc(1, sizeof *one) : NULL;
    if (one) {
        *one = (node_client){ .owner = client, .node = node, .wakes_at_us = WAKE_NEVER, .fd = -1 };
        const tg_async_loop loop = { .data = one, .watch = node_watches, .wake = node_wakes, .flush = node_flushes };
        if (tg__redis_async_open_node(&node->store, &loop, &one->inner, error) != TG_OK) {
            free(one);
            one = NULL;
        }
    } else {
        tg__error(error, TG_E_NOMEM, "redis cluster: room for a node's client");
    }
    if (one)
        client->nodes[client->node_count++] = one;
    else
        tg__node_release(client->cluster, node);
    return one;
}

/* Of nodes that have left the cluster, when nobody waits for them. Only from outside of all clients. */
static void
drop_left_nodes(cluster_async *client)
{
    for (size_t i = 0; i < client->node_count;) {
        node_client *one = client->nodes[i];
        bool serves = tg__redis_async_pending(one->inner) > 0;
        pthread_mutex_lock(&client->cluster->lock);
        for (unsigned slot = 0; slot < TG__SLOTS && !serves; slot++) {
            const uint16_t index = client->cluster->owner[slot];
            serves = index != TG__NOBODY && client->cluster->nodes[index] == one->node;
        }
        pthread_mutex_unlock(&client->cluster->lock);
        if (serves) {
            i++;
            continue;
        }
        client->nodes[i] = client->nodes[--client->node_count];
        one->inner->ops->close(one->inner);
        tg__node_release(client->cluster, one->node);
        free(one);
    }
}

/* ---- one decision ---- */

static void
enter(cluster_async *client)
{
    client->depth++;
}

static void
dispose(cluster_async *client)
{
    for (size_t i = 0; i < client->node_count; i++) {
        tg__node_release(client->cluster, client->nodes[i]->node);
        free(client->nodes[i]);
    }
    free(client->spare);
    tg_store_close(&client->cluster->base);
    free(client);
}

static void
leave(cluster_async *client)
{
    if (--client->depth == 0 && client->closing)
        dispose(client);
    else
        set_timer(client);
}

static void
unpark(deciding *one)
{
    if (!one->parked_in)
        return;
    *(one->beside ? &one->beside->behind : one->parked_in) = one->behind;
    if (one->behind)
        one->behind->beside = one->beside;
    one->parked_in = NULL;
}

static void
park(deciding *one, deciding **in)
{
    unpark(one);
    one->parked_in = in;
    one->beside = NULL;
    one->behind = *in;
    if (one->behind)
        one->behind->beside = one;
    *in = one;
}

/* Until when a decision that is parked waits at most. */
static uint64_t
parked_until(const deciding *one)
{
    return one->again_at_us ? one->again_at_us : one->deadline_us;
}

/* For the scout, or for a moment. */
static void
park_until(deciding *one, uint64_t again_at_us)
{
    cluster_async *client = one->client;
    one->again_at_us = again_at_us;
    if (!client->parked || parked_until(one) < client->parked_until_us)
        client->parked_until_us = parked_until(one);
    park(one, &client->parked);
}

static void
take_out(deciding *one)
{
    cluster_async *client = one->client;
    unpark(one);
    *(one->before ? &one->before->next : &client->first) = one->next;
    if (one->next)
        one->next->before = one->before;
    client->pending--;
    tg__node_release(client->cluster, one->node);
    one->node = NULL;
    free(one->kept);
    one->kept = NULL;
    if (client->spare)
        free(one);
    else
        client->spare = one;
}

/* Nothing may follow that trusts the decision. */
static void
conclude(deciding *one, tg_status status)
{
    one->concluded = true;
    one->status = status;
    if (status != TG_OK)
        one->error.status = TG_E_STORE;
    if (one->beginning)
        return; /* its caller is told by the beginning */
    tg_async_done *done = one->done;
    void *data = one->data;
    const tg_error error = one->error;
    take_out(one);
    done(data, status == TG_OK ? TG_OK : TG_E_STORE, &error);
}

static tg_part_call *
part_of(deciding *one)
{
    return one->parts.parts[one->at];
}

static void
next_part(deciding *one, phase to, size_t at)
{
    one->phase = to;
    one->at = at;
    one->tries = one->pauses = 0;
    one->map_asked = false;
    one->how.asking = false;
    tg__node_release(one->client->cluster, one->node);
    one->node = NULL;
}

/* The next part that was charged, from `at` on; the count of parts where there is none. */
static size_t
charged_part(const deciding *one, size_t at)
{
    while (at < one->parts.count && !one->parts.parts[at]->charged)
        at++;
    return at;
}

/* The slots that have to count what is denied, if there are any. */
static bool
knock(deciding *one)
{
    one->groups = tg__cluster_denied_groups(one->targets, one->target_count, one->results);
    if (!one->groups)
        return false;
    next_part(one, PHASE_KNOCK, tg__cluster_knocks_next(&one->parts, 0, one->targets, one->groups));
    return one->at < one->parts.count;
}

/* Where to go on once this part has been asked, `failed` or answered. false: that was all. */
static bool
go_on(deciding *one, bool failed)
{
    const bool keeps_failure = failed && one->phase < PHASE_GIVE;
    if (keeps_failure)
        one->status = TG_E_STORE;
    switch (one->phase) {
    case PHASE_WHOLE:
        if (failed && (one->op == TG_OP_HIT || one->op == TG_OP_PEEK))
            return false;
        next_part(one, PHASE_WHOLE, one->at + 1);
        return one->at < one->parts.count;
    case PHASE_LOOK:
        if (failed)
            return false;
        if (one->at > 1 || (one->at == 1 && one->refused)) {
            next_part(one, PHASE_LOOK, one->at - 1);
            return true;
        }
        if (one->refused)
            return knock(one);
        next_part(one, PHASE_CHARGE, 0);
        return true;
    case PHASE_CHARGE:
        if (!failed && !one->refused && !one->kept) {
            next_part(one, PHASE_CHARGE, one->at + 1);
            return one->at < one->parts.count;
        }
        next_part(one, PHASE_GIVE, charged_part(one, 0));
        if (one->at < one->parts.count)
            return true;
        return one->status == TG_OK && !one->kept && knock(one);
    case PHASE_GIVE:
        next_part(one, PHASE_GIVE, charged_part(one, one->at + 1));
        if (one->at < one->parts.count)
            return true;
        if (one->status != TG_OK || one->kept)
            return false;
        next_part(one, PHASE_TELL, charged_part(one, 0));
        return true;
    case PHASE_TELL:
        next_part(one, PHASE_TELL, charged_part(one, one->at + 1));
        return one->at < one->parts.count || knock(one);
    default:
        next_part(one, PHASE_KNOCK, tg__cluster_knocks_next(&one->parts, one->at + 1, one->targets, one->groups));
        return one->at < one->parts.count;
    }
}

/* What a part's node has answered, into the caller's results. */
static void
take_answer(deciding *one)
{
    tg_part_call *part = part_of(one);
    if ((one->op != TG_OP_HIT && one->op != TG_OP_PEEK) || one->phase == PHASE_GIVE)
        return;
    bool refuses = false;
    for (size_t i = 0; i < part->count; i++)
        refuses = refuses || !one->told[i].allowed;
    if (one->phase == PHASE_KNOCK && part->refused && !refuses)
        return; /* what denied a moment ago, and would not now, has denied all the same */
    part->refused = part->refused || refuses;
    part->counted = part->counted || (one->phase == PHASE_CHARGE && refuses);
    for (size_t i = 0; i < part->count; i++) {
        one->results[part->index[i]] = one->told[i];
        one->refused = one->refused || !one->told[i].allowed;
        part->charged = part->charged || (one->phase == PHASE_CHARGE && one->told[i].charged);
    }
}

static void heard(void *data, tg_status status, const tg_error *error);
static void moved(void *data, const char *reply);

/* It was cancelled while this part was asked to charge: one that has not is not asked again. */
static bool
charges_for_nobody(const deciding *one)
{
    return one->kept && one->phase == PHASE_CHARGE;
}

/* What this part's node is to be asked. */
static tg_op
compose(deciding *one, uint64_t *until_us)
{
    const tg_part_call *part = part_of(one);
    one->own_count = 0;
    for (size_t i = 0; i < part->count; i++) {
        const size_t index = part->index[i];
        if (one->phase == PHASE_GIVE && !one->results[index].charged)
            continue;
        tg_target *own = &one->own[one->own_count];
        *own = one->targets[index];
        if (one->phase == PHASE_KNOCK)
            tg__cluster_knocking(own, one->groups);
        if (one->phase == PHASE_GIVE) {
            own->own = true;
            own->stamp_us = one->results[index].stamp_us;
        }
        if (one->results)
            one->told[one->own_count] = one->results[index];
        one->own_count++;
    }
    const bool charges = one->op == TG_OP_HIT && !one->denied && one->parts.count > 1;
    one->how.keyring = &one->keyring;
    one->how.moved = moved;
    one->how.look = one->denied || one->phase == PHASE_LOOK || one->phase >= PHASE_TELL;
    one->how.knocks = one->phase == PHASE_KNOCK;
    *until_us = charges && (one->phase == PHASE_LOOK || one->phase == PHASE_CHARGE) ? one->charges_until_us : one->deadline_us;
    if (one->phase == PHASE_GIVE && *until_us < tg__monotonic_us() + GIVES_FOR_US)
        *until_us = tg__monotonic_us() + GIVES_FOR_US; /* late or not, it is to go out */
    return one->phase == PHASE_GIVE ? TG_OP_REFUND : one->op;
}

static bool
find_slots(deciding *one)
{
    tg_cluster *cluster = one->client->cluster;
    pthread_mutex_lock(&cluster->lock);
    const bool known = cluster->secret_known;
    one->keyring = cluster->keyring;
    pthread_mutex_unlock(&cluster->lock);
    if (!known) {
        tg__error(&one->error, TG_E_STORE, "%s: the secret is not known yet", cluster->address.shown);
        return false;
    }
    one->split = true;
    tg__cluster_split(&one->keyring, one->targets, one->target_count, &one->parts);
    const bool charges = one->op == TG_OP_HIT && !one->denied && one->parts.count > 1;
    next_part(one, charges ? PHASE_LOOK : PHASE_WHOLE, charges ? one->parts.count - 1 : 0);
    return true;
}

/* Lets the scout find out; false: it has just been, or cannot. */
static bool
wait_for_scout(deciding *one)
{
    const bool waits = !one->map_asked && send_scout(one->client);
    one->map_asked = true;
    if (waits)
        park_until(one, 0);
    return waits;
}

/* One step after another until something has to be waited for, or all is done. */
static void
advance(deciding *one)
{
    cluster_async *client = one->client;
    for (;;) {
        if (!one->split && !find_slots(one)) {
            if (!wait_for_scout(one))
                conclude(one, TG_E_STORE);
            return;
        }
        if (one->phase == PHASE_LOOK && one->at + 1 == one->parts.count && one->tries == 0 &&
            !tg__cluster_may_ask(client->cluster, &one->parts, &one->error)) {
            if (tg__cluster_look_is_due(client->cluster))
                send_scout(client); /* for those who come later: this one has waited for nobody */
            conclude(one, TG_E_STORE);
            return;
        }
        tg_node *node = one->node;
        one->node = NULL;
        if (!node)
            node = tg__owner_hold(client->cluster, part_of(one)->slot);
        if (!node) {
            tg__error(&one->error, TG_E_STORE, "%s: CLUSTERDOWN, nobody serves slot %u", client->cluster->address.shown,
                      part_of(one)->slot);
            one->missed = NULL;
            if (wait_for_scout(one))
                return;
            if (go_on(one, true))
                continue;
            conclude(one, one->status);
            return;
        }
        one->missed = node;
        one->asked = client_of(client, node, &one->error);
        tg_status status = TG_E_STORE;
        one->call = NULL;
        one->tries++;
        if (one->asked) {
            uint64_t until_us;
            const tg_op op = compose(one, &until_us);
            enter(client);
            status = tg__redis_async_begin_node(one->asked->inner, &one->how, op, one->own, one->own_count, until_us,
                                                one->told, heard, one, &one->call, &one->error);
            leave(client);
        }
        if (status == TG_OK && one->call)
            return;
        if (status == TG_OK)
            take_answer(one);
        else if (tg__cluster_look_is_due(client->cluster))
            send_scout(client); /* a node that is known not to answer: has another taken its place? */
        if (!go_on(one, status != TG_OK)) {
            conclude(one, one->status);
            return;
        }
    }
}

static void
heard(void *data, tg_status status, const tg_error *error)
{
    deciding *one = data;
    cluster_async *client = one->client;
    one->call = NULL;
    if (status == TG_OK)
        take_answer(one);
    else
        one->error = *error;
    if (client->closing) {
        conclude(one, status == TG_OK && one->phase == PHASE_WHOLE && one->at + 1 == one->parts.count ? TG_OK : TG_E_STORE);
        return;
    }
    /* Nothing ran: perhaps another node has the slot by now. */
    if (status != TG_OK && one->how.unsent && one->phase < PHASE_TELL && !charges_for_nobody(one) && wait_for_scout(one))
        return;
    if (go_on(one, status != TG_OK))
        advance(one);
    else
        conclude(one, one->status);
}

/* MOVED, ASK or TRYAGAIN: nothing ran. */
static void
moved(void *data, const char *reply)
{
    deciding *one = data;
    cluster_async *client = one->client;
    one->call = NULL;
    tg__error(&one->error, TG_E_STORE, "%s: %.100s", client->cluster->address.shown, reply);
    if (client->closing) {
        conclude(one, TG_E_STORE);
        return;
    }
    const uint64_t now_us = tg__monotonic_us();
    if (charges_for_nobody(one)) {
        ;
    } else if (strncmp(reply, "TRYAGAIN", 8) == 0) { /* keys of one slot, half of them moved: the rest will be in a moment */
        const uint64_t pause_us = UINT64_C(500) << (one->pauses < 4 ? one->pauses++ : 4);
        const bool charges = one->phase == PHASE_LOOK || one->phase == PHASE_CHARGE;
        if (now_us + 2 * pause_us < (charges ? one->charges_until_us : one->deadline_us)) {
            pthread_mutex_lock(&client->cluster->lock);
            one->node = one->asked->node; /* with ASKING where that was how */
            one->node->users++;
            pthread_mutex_unlock(&client->cluster->lock);
            park_until(one, now_us + pause_us);
            set_timer(client);
            return;
        }
    } else if (one->tries < TRIES_MAX) {
        const bool for_good = reply[0] == 'M';
        one->node = tg__cluster_follow(client->cluster, part_of(one)->slot, reply,
                                       one->asked->node->store.address.host, for_good, &one->error);
        one->how.asking = !for_good;
        if (for_good && tg__cluster_look_is_due(client->cluster))
            send_scout(client); /* one slot is known now; more may have moved with it */
        if (one->node) {
            advance(one);
            return;
        }
    }
    if (go_on(one, true))
        advance(one);
    else
        conclude(one, one->status);
}

/* The scout is back, or the deadline has come. */
static void
go_on_after_scout(deciding *one, bool late)
{
    if (!one->split && !late) {
        advance(one);
        return;
    }
    if (one->split && !late) {
        tg_node *now = tg__owner_hold(one->client->cluster, part_of(one)->slot);
        if (now && now != one->missed) { /* held no longer, it is only compared: the same address means the same node, or a new one */
            one->how.asking = false;
            one->node = now;
            advance(one);
            return;
        }
        tg__node_release(one->client->cluster, now);
    }
    if (one->split && go_on(one, true))
        advance(one);
    else
        conclude(one, TG_E_STORE);
}

/* Of those that are parked; `scout_back`: all that wait for it. */
static void
find_due(cluster_async *client, uint64_t now_us, bool scout_back)
{
    client->parked_until_us = WAKE_NEVER;
    for (deciding *one = client->parked, *behind; one; one = behind) {
        behind = one->behind;
        const bool found = scout_back && !one->again_at_us;
        one->late = !found && parked_until(one) <= now_us;
        if (found || one->late)
            park(one, &client->due);
        else if (parked_until(one) < client->parked_until_us)
            client->parked_until_us = parked_until(one);
    }
}

static void
go_on_with_due(cluster_async *client)
{
    deciding *one;
    for (unsigned left = GO_ON_AT_ONCE; left > 0 && !client->closing && (one = client->due) != NULL; left--) {
        unpark(one);
        if (!one->again_at_us) {
            go_on_after_scout(one, one->late);
            continue;
        }
        one->again_at_us = 0;
        one->tries--; /* bounded by the deadline */
        advance(one);
    }
}

static void
after_scout(cluster_async *client)
{
    end_scout(client);
    find_due(client, tg__monotonic_us(), true);
    go_on_with_due(client);
    if (!client->closing && client->depth == 1)
        drop_left_nodes(client);
}

/* ---- called from outside ---- */

static tg_status
async_begin(tg_store_async *base, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
            tg_result *results, tg_async_done *done, void *data, tg_store_call **begun, tg_error *error)
{
    cluster_async *client = of(base);
    tg_cluster *cluster = client->cluster;
    *begun = NULL;
    if (!ours(client) || client->closing)
        return tg__error(error, TG_E_STORE, "redis: this client is %s",
                         client->closing ? "closed" : "another process's");
    tg_call plan;
    tg__call_plan(&plan, op, targets, target_count);
    if (tg__call_answer_alone(&plan, op, target_count, results))
        return TG_OK;
    const uint64_t manual_now_us = cluster->manual ? tg_clock_now_us(cluster->clock) : 0;
    if (manual_now_us > TG__REDIS_CLOCK_US_MAX)
        return tg__error(error, TG_E_STORE, "redis: a manual clock beyond the year 2235 cannot be told to Redis");
    if (client->pending >= TG_ASYNC_PENDING_MAX)
        return tg__error(error, TG_E_STORE, "%s: %d calls wait for it already", cluster->address.shown,
                         TG_ASYNC_PENDING_MAX);
    uint64_t deadline_us;
    bool brief;
    if (tg__question_time(cluster->address.shown, tg__monotonic_us(), until_us, cluster->timeout_us, &deadline_us, &brief, error) != TG_OK)
        return TG_E_STORE;
    deciding *one = client->spare ? client->spare : malloc(sizeof *one);
    client->spare = NULL;
    if (!one)
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *one);
    one->client = client;
    one->op = op;
    one->targets = targets;
    one->target_count = target_count;
    one->results = results;
    one->done = done;
    one->data = data;
    one->deadline_us = deadline_us;
    one->charges_until_us = tg__cluster_charges_until(deadline_us);
    one->manual_now_us = manual_now_us;
    one->denied = plan.denied;
    one->split = one->refused = one->concluded = one->map_asked = one->late = false;
    one->beginning = true;
    one->status = TG_OK;
    one->error = (tg_error){ .status = TG_OK };
    one->tries = one->pauses = 0;
    one->again_at_us = 0;
    one->parked_in = NULL;
    one->node = one->missed = NULL;
    one->how = (tg_node_call){ .brief = brief };
    one->asked = NULL;
    one->call = NULL;
    one->kept = NULL;
    one->before = NULL;
    one->next = client->first;
    if (one->next)
        one->next->before = one;
    client->first = one;
    client->pending++;
    for (size_t i = 0; i < target_count && plan.denied; i++)
        if (targets[i].rule->algorithm == TG_DENY && (op == TG_OP_HIT || op == TG_OP_PEEK)) {
            results[i].allowed = results[i].charged = false;
            results[i].remaining = results[i].reset_after_us = results[i].delay_us = results[i].stamp_us = 0;
            results[i].retry_after_us = TG_NEVER;
        }
    enter(client);
    advance(one);
    tg_status status = TG_OK;
    if (one->concluded) {
        status = one->status;
        if (status != TG_OK && error)
            *error = one->error;
        take_out(one);
    } else {
        one->beginning = false;
        *begun = (tg_store_call *)one;
    }
    leave(client);
    return status;
}

static void
nobody_hears(void *data, tg_status status, const tg_error *error)
{
    (void)data, (void)status, (void)error;
}

/* Whether something is left to do for which nobody needs to wait: giving back. A refund over several slots is one too. */
static bool
leaves_work(const deciding *one)
{
    if (!one->split || one->parts.count < 2 || one->client->closing || !ours(one->client))
        return false;
    return one->op == TG_OP_REFUND || one->phase == PHASE_GIVE ||
           (one->phase == PHASE_CHARGE && (one->call || charged_part(one, 0) < one->parts.count));
}

/* So that it can go on when its caller's memory is gone. false: no memory. */
static bool
keep(deciding *one)
{
    keepsake *kept = malloc(sizeof *kept);
    if (!kept)
        return false;
    for (size_t i = 0; i < one->target_count; i++) {
        size_t same = 0;
        while (one->targets[same].identity != one->targets[i].identity)
            same++;
        kept->rules[i] = *one->targets[i].rule;
        if (same == i)
            kept->identities[i] = *one->targets[i].identity;
        kept->targets[i] = one->targets[i];
        kept->targets[i].rule = &kept->rules[i];
        kept->targets[i].identity = &kept->identities[same];
        kept->targets[i].sight = NULL;
        if (one->results)
            kept->results[i] = one->results[i];
        for (size_t k = 0; k < one->own_count; k++) /* what is asked just now */
            if (one->own[k].rule == one->targets[i].rule && one->own[k].identity == one->targets[i].identity) {
                one->own[k].rule = kept->targets[i].rule;
                one->own[k].identity = kept->targets[i].identity;
                one->own[k].sight = NULL;
            }
    }
    one->kept = kept;
    one->targets = kept->targets;
    one->results = one->results ? kept->results : NULL;
    one->done = nobody_hears;
    return true;
}

/* Nobody waits for it any more, but what it has charged has to be given back: it stays one of those that are pending, with the
 * deadline that it had. */
static void
async_cancel(tg_store_async *base, tg_store_call *call)
{
    cluster_async *client = of(base);
    deciding *one = (deciding *)call;
    if (!leaves_work(one) || !keep(one)) {
        if (one->call)
            one->asked->inner->ops->cancel(one->asked->inner, one->call);
        take_out(one);
        return;
    }
    if (one->call || one->phase != PHASE_CHARGE)
        return;
    unpark(one); /* it waited to charge another */
    next_part(one, PHASE_GIVE, charged_part(one, 0));
    enter(client);
    advance(one);
    leave(client);
}

static void
async_ready(tg_store_async *base, int fd, bool readable, bool writable)
{
    cluster_async *client = of(base);
    if (!ours(client) || client->closing)
        return;
    enter(client);
    if (client->scout && client->scout->answered == fd)
        after_scout(client);
    else
        for (size_t i = 0; i < client->node_count; i++)
            if (client->nodes[i]->fd == fd) {
                client->nodes[i]->inner->ops->ready(client->nodes[i]->inner, fd, readable, writable);
                break;
            }
    leave(client);
}

static void
async_wake(tg_store_async *base)
{
    cluster_async *client = of(base);
    client->wakes_at_us = WAKE_NEVER;
    if (!ours(client) || client->closing)
        return;
    enter(client);
    const uint64_t now_us = tg__monotonic_us();
    for (size_t i = 0; i < client->node_count && !client->closing; i++)
        if (client->nodes[i]->wakes_at_us <= now_us) {
            client->nodes[i]->wakes_at_us = WAKE_NEVER;
            client->nodes[i]->inner->ops->wake(client->nodes[i]->inner);
        }
    if (client->parked && client->parked_until_us <= now_us)
        find_due(client, now_us, false);
    go_on_with_due(client);
    leave(client);
}

static void
async_flush(tg_store_async *base)
{
    cluster_async *client = of(base);
    client->flush_asked = false;
    if (!ours(client) || client->closing)
        return;
    enter(client);
    for (size_t i = 0; i < client->node_count && !client->closing; i++)
        if (client->nodes[i]->flush_asked) {
            client->nodes[i]->flush_asked = false;
            client->nodes[i]->inner->ops->flush(client->nodes[i]->inner);
        }
    leave(client);
}

static void
async_close(tg_store_async *base)
{
    cluster_async *client = of(base);
    if (client->closing)
        return;
    enter(client);
    client->closing = true;
    end_scout(client);
    if (ours(client) && client->wakes_at_us != WAKE_NEVER)
        client->loop.wake(client->loop.data, UINT64_MAX);
    for (size_t i = 0; i < client->node_count; i++)
        client->nodes[i]->inner->ops->close(client->nodes[i]->inner);
    while (client->first) { /* those that waited for no node; in a forked child all */
        deciding *one = client->first;
        if (ours(client)) {
            tg__error(&one->error, TG_E_STORE, "redis: the client was closed");
            conclude(one, TG_E_STORE);
        } else {
            take_out(one);
        }
    }
    leave(client);
}

static const tg_store_async_ops async_ops = {
    .begin = async_begin,
    .cancel = async_cancel,
    .ready = async_ready,
    .wake = async_wake,
    .flush = async_flush,
    .close = async_close,
};

tg_status
tg__cluster_async_open(tg_store *store, const tg_async_loop *loop, tg_store_async **opened, tg_error *error)
{
    cluster_async *client = calloc(1, sizeof *client);
    if (!client)
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *client);
    client->base.ops = &async_ops;
    tg__store_retain(store);
    client->cluster = (tg_cluster *)store;
    client->loop = *loop;
    client->generation = tg__fork_generation();
    client->wakes_at_us = WAKE_NEVER;
    *opened = &client->base;
    return TG_OK;
}
