/* The client that does not wait. hiredis' own asynchronous context is not used: it raises SIGPIPE, has no deadline
 * per call before 1.0 and fails every call with the first that is late after that, and its layout differs with each
 * version. Its reply reader is.
 *
 * Life of a call: *waiting* until there is a greeted connection, then its words are in `out` and it stands in the
 * *queue* of replies to come. It is *finished* when its `done` has been called or it was cancelled; what stands in
 * the queue stays there, finished or not, until its reply has come, for replies come in the order of the calls. When the
 * connection is lost, it stands in *ending* until its turn comes to be told.
 *
 * Must not enter: what replies mean; that is said where it is for calls that wait. */
#include "stores/redis/async.h"
#include "stores/redis/redis.h"

#include <netdb.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

#define FLUSH_EVERY 16 /* calls: the server then works on these while the next are written */
/* What one turn of the loop may be held for, so that others get their turns in between: the rest follows in the next. An answer
 * of a call is some microseconds for whoever asked, and all that wait may be answered, or given up, at one instant. */
#define ENDS_AT_ONCE 256
#define SENDS_AT_ONCE 512
#define READ_BYTES 16384
#define READS_BEFORE_LATE 32
#define WAKE_NEVER UINT64_MAX

typedef struct redis_async redis_async;
typedef struct asked asked;

/* What a call hears that ends before its beginning has returned: its caller is told by that, not by `done`. */
typedef struct tg_begun {
    bool failed;
    tg_error error;
} tg_begun;

struct asked {
    asked *queue_next; /* in `waiting` or in `queue` */
    asked *live_before, *live_next; /* until finished; in the order of deadlines */
    tg_op op;
    const tg_target *targets;
    size_t target_count;
    tg_result *results;
    tg_async_done *done;
    void *data;
    uint64_t deadline_us;
    uint64_t manual_now_us;
    bool finished, probe, whole; /* whole: its words hold the script's text */
    bool brief; /* see tg__question_time */
    bool put; /* its words were put behind those of the others, once */
    tg_begun *beginning; /* while its beginning has not returned */
    tg_node_call *how; /* of a cluster's node; NULL */
    uint8_t why; /* tg_trouble: it stands in `ending` for that */
    bool known;  /* that trouble has been heard of from others already */
    uint8_t repeats; /* after NOSCRIPT, or on another connection when nothing had gone out */
    tg_call plan;
};

typedef enum tg_async_state {
    STATE_ASLEEP, /* no connection, and nobody who needs one */
    STATE_LOOKUP,
    STATE_CONNECTING,
    STATE_SECURING, /* TLS greets first */
    STATE_GREETING,
    STATE_READY
} tg_async_state;

typedef struct tg_queue {
    asked *first, **last;
    size_t count;
} tg_queue;

struct redis_async {
    tg_store_async base; /* first: a tg_store_async * is one of these */
    tg_redis_store *store;
    tg_async_loop loop;
    unsigned generation; /* of the process, see tg__fork_generation */
    tg_async_state state;
    tg_redis_wire wire;
    tg_lookup *lookup;
    struct addrinfo *addresses, *address; /* all of the name's, and the one being tried */
    tg_greeting greeting;
    uint64_t connects_until_us;

    int watched_fd; /* -1: none */
    bool watches_write;

    tg_queue waiting, queue;
    tg_queue ending; /* lost with their connection, and to be told so */
    tg_error ending_why;
    unsigned ends_left; /* in this turn */
    unsigned reads_before_late;
    bool read_ahead; /* by TLS, perhaps: no descriptor tells of it */
    asked *live_first, *live_last;
    asked *spare; /* finished ones, for reuse */
    size_t pending;       /* in waiting and queue */
    size_t gone_out;      /* of the queue, from its front: some or all of their words were sent */
    unsigned texts_under_way[TG__SCRIPTS]; /* in the queue: an EVALSHA behind one finds its script */

    char *out;
    size_t out_length, out_sent, out_room;
    unsigned unflushed;
    bool flush_asked;
    uint64_t wakes_at_us;

    unsigned depth; /* of calls into the client: it is freed at the outermost */
    bool closing;
};

/* ---- queues ---- */

static void
queue_init(tg_queue *queue)
{
    *queue = (tg_queue){ .first = NULL };
    queue->last = &queue->first;
}

static void
queue_put(tg_queue *queue, asked *call)
{
    call->queue_next = NULL;
    *queue->last = call;
    queue->last = &call->queue_next;
    queue->count++;
}

static asked *
queue_take(tg_queue *queue)
{
    asked *call = queue->first;
    if (!call)
        return NULL;
    queue->first = call->queue_next;
    if (!queue->first)
        queue->last = &queue->first;
    queue->count--;
    return call;
}

/* The calls of `queue` come before those of `to`. */
static void
queue_prepend(tg_queue *to, tg_queue *queue)
{
    if (!queue->first)
        return;
    *queue->last = to->first;
    if (!to->first)
        to->last = queue->last;
    to->first = queue->first;
    to->count += queue->count;
    queue_init(queue);
}

/* Calls come in the order of their deadlines, but for those of a cluster, which may have lost time elsewhere. */
static void
live_add(redis_async *client, asked *call)
{
    asked *before = client->live_last;
    while (before && before->deadline_us > call->deadline_us)
        before = before->live_before;
    call->live_before = before;
    call->live_next = before ? before->live_next : client->live_first;
    *(before ? &before->live_next : &client->live_first) = call;
    *(call->live_next ? &call->live_next->live_before : &client->live_last) = call;
}

static void
live_remove(redis_async *client, asked *call)
{
    *(call->live_before ? &call->live_before->live_next : &client->live_first) = call->live_next;
    *(call->live_next ? &call->live_next->live_before : &client->live_last) = call->live_before;
}

/* It stands in no queue any more. */
static void
release(redis_async *client, asked *call)
{
    call->queue_next = client->spare;
    client->spare = call;
    client->pending--;
}

/* ---- the client's life ---- */

static void
enter(redis_async *client)
{
    if (client->depth++ == 0)
        client->ends_left = ENDS_AT_ONCE;
}

static void
dispose(redis_async *client)
{
    for (asked *call = client->spare, *next; call; call = next) {
        next = call->queue_next;
        free(call);
    }
    free(client->out);
    explicit_bzero(&client->wire.keyring, sizeof client->wire.keyring);
    if (!client->store->cluster)
        tg_store_close(&client->store->base);
    free(client);
}

static void
leave(redis_async *client)
{
    if (--client->depth == 0 && client->closing)
        dispose(client);
}

/* Nobody will hear how it ended: let another find out. */
static void
give_up_probe(redis_async *client, asked *call)
{
    tg__breaker_shrugs(client->store, call->probe);
    call->probe = false;
}

/* Nothing may follow that trusts the client's state: `done` may have changed all of it, though never freed it. */
static void
finish(redis_async *client, asked *call, tg_trouble trouble, tg_error *error)
{
    if (call->finished)
        return;
    call->finished = true;
    live_remove(client, call);
    tg_status status = TG_E_STORE;
    if (call->how) /* refused whole, or not put into words yet */
        call->how->unsent = trouble == TG__TROUBLE_PAUSED || (trouble == TG__TROUBLE_LINK && !call->put);
    if (client->closing || call->known) { /* says nothing of Redis, or nothing new */
        give_up_probe(client, call);
        error->status = TG_E_STORE;
    } else {
        status = tg__redis_conclude(client->store, trouble, call->probe, call->brief, error);
        call->probe = false;
    }
    if (call->beginning) {
        call->beginning->failed = true; /* no call ends well before its reply could come */
        call->beginning->error = *error;
        return;
    }
    call->done(call->data, status, error);
}

/* ---- what the loop is asked for ---- */

static void
watch(redis_async *client, int fd, bool writable)
{
    if (fd == client->watched_fd && (fd == -1 || writable == client->watches_write))
        return;
    if (client->watched_fd != -1 && fd != client->watched_fd)
        client->loop.watch(client->loop.data, client->watched_fd, false, false);
    client->watched_fd = fd;
    client->watches_write = writable;
    if (fd != -1)
        client->loop.watch(client->loop.data, fd, true, writable);
}

/* Something is left over from this turn of the loop. */
static bool
has_more(const redis_async *client)
{
    return client->ending.first || (client->state == STATE_READY && (client->waiting.first || client->read_ahead));
}

/* One timer, for the earliest deadline. Not moved for every call: it goes off, finds nothing late, and is set again. */
static void
set_timer(redis_async *client)
{
    uint64_t at_us = has_more(client) ? 0 : client->live_first ? client->live_first->deadline_us : WAKE_NEVER;
    if (client->state > STATE_ASLEEP && client->state < STATE_READY && client->connects_until_us < at_us)
        at_us = client->connects_until_us;
    if (at_us == WAKE_NEVER || client->wakes_at_us <= at_us)
        return;
    client->wakes_at_us = at_us;
    const uint64_t now_us = tg__monotonic_us();
    client->loop.wake(client->loop.data, at_us > now_us ? at_us - now_us : 0);
}

/* ---- losing the connection ---- */

static void
drop_connection(redis_async *client)
{
    watch(client, -1, false); /* before the number can be another's */
    tg__wire_close(&client->wire);
    tg__lookup_give_up(client->lookup);
    client->lookup = NULL;
    if (client->addresses)
        freeaddrinfo(client->addresses);
    client->addresses = client->address = NULL;
    tg__greeting_end(&client->greeting);
    client->state = STATE_ASLEEP;
    client->out_length = client->out_sent = 0;
    client->unflushed = 0;
    client->gone_out = 0;
    client->read_ahead = false;
    memset(client->texts_under_way, 0, sizeof client->texts_under_way);
}

static void connect_for_waiting(redis_async *client);

/* Tells those whose connection is lost, as many as this turn has room for. */
static void
end_some(redis_async *client)
{
    while (client->ending.first && (client->ends_left > 0 || client->closing)) {
        asked *call = queue_take(&client->ending);
        if (!call->finished && client->ends_left > 0)
            client->ends_left--;
        tg_error told = client->ending_why;
        finish(client, call, (tg_trouble)call->why, &told);
        release(client, call);
    }
}

/* Those in the queue will get no reply. With `unsent` not one byte of theirs has gone out: they wait for another
 * connection, once, as a call that waits does. */
static void
lose_connection(redis_async *client, tg_trouble trouble, const tg_error *error, bool unsent)
{
    tg_queue lost = client->queue, kept;
    if (lost.count == 0)
        queue_init(&lost);
    queue_init(&client->queue);
    queue_init(&kept);
    const bool was_ready = client->state == STATE_READY;
    drop_connection(client);
    tg__redis_begins_epoch(client->store);
    if (!was_ready) { /* no connection came about: those who wait for one hear why */
        tg__redis_led_nowhere(client->store);
        queue_prepend(&lost, &client->waiting);
    }
    for (size_t count = 0; lost.first;) {
        asked *call = queue_take(&lost);
        if (!call->finished && unsent && was_ready && call->repeats == 0) {
            call->repeats++;
            queue_put(&kept, call);
            continue;
        }
        call->why = (uint8_t)trouble;
        call->known = count++ >= ENDS_AT_ONCE && !call->probe; /* told later, and things may be better then */
        queue_put(&client->ending, call);
    }
    client->ending_why = *error;
    queue_prepend(&client->waiting, &kept);
    end_some(client);
    if (!client->closing && client->state == STATE_ASLEEP)
        connect_for_waiting(client);
}

/* ---- sending ---- */

static bool
make_room(redis_async *client, size_t bytes)
{
    if (client->out_sent > 0 && client->out_sent == client->out_length)
        client->out_length = client->out_sent = 0;
    if (bytes <= client->out_room - client->out_length)
        return true;
    size_t room = client->out_room ? client->out_room : 65536;
    while (room - client->out_length < bytes)
        room *= 2;
    char *moved = realloc(client->out, room);
    if (!moved)
        return false;
    client->out = moved;
    client->out_room = room;
    return true;
}

static void
flush(redis_async *client)
{
    client->unflushed = 0;
    while (client->out_sent < client->out_length) {
        tg_error error;
        size_t sent;
        short wants;
        const tg_trouble trouble = tg__wire_write(&client->wire, client->out + client->out_sent,
                                                  client->out_length - client->out_sent, &sent, &wants, &error);
        if (trouble != TG__TROUBLE_NONE) {
            lose_connection(client, trouble, &error, client->gone_out == 0);
            return;
        }
        if (wants) {
            watch(client, client->watched_fd, true);
            return;
        }
        client->out_sent += sent;
        if (client->state == STATE_READY)
            client->gone_out = client->queue.count;
    }
    client->out_length = client->out_sent = 0;
    watch(client, client->watched_fd, false);
}

/* ASKING holds for the command behind it. Its reply is nobody's. */
static bool
put_asking(redis_async *client)
{
    static const char words[] = "*1\r\n$6\r\nASKING\r\n";
    asked *nobody = client->spare;
    if (nobody)
        client->spare = nobody->queue_next;
    else if (!(nobody = malloc(sizeof *nobody)))
        return false;
    *nobody = (asked){ .finished = true };
    client->pending++;
    memcpy(client->out + client->out_length, words, sizeof words - 1);
    client->out_length += sizeof words - 1;
    queue_put(&client->queue, nobody);
    return true;
}

/* Puts the call's words behind those of the others. false: no memory; it is finished. */
static bool
put_call(redis_async *client, asked *call, bool whole)
{
    const tg_script script = tg__call_script(&call->plan, call->op);
    const tg_text text = whole ? tg__redis_script(script) : (tg_text){ NULL, 0 };
    if (!make_room(client, TG__CALL_BYTES_MAX + text.length) || (call->how && call->how->asking && !put_asking(client))) {
        tg_error error;
        tg__error(&error, TG_E_NOMEM, "redis: room for a call");
        finish(client, call, TG__TROUBLE_REFUSED, &error);
        return false;
    }
    tg_resp resp = { .data = client->out, .length = client->out_length, .size = client->out_room };
    tg__call_head(&resp, client->store, &call->plan, call->op, whole);
    if (whole) {
        memcpy(resp.data + resp.length, text.data, text.length); /* there is room: see make_room */
        memcpy(resp.data + resp.length + text.length, "\r\n", 2);
        resp.length += text.length + 2;
        client->texts_under_way[script]++;
    }
    call->whole = whole;
    call->put = true;
    tg__call_arguments(&resp, client->store, call->how ? call->how->keyring : &client->wire.keyring, call->op, &call->plan, call->targets,
                       call->target_count, call->manual_now_us);
    client->out_length = resp.length;
    queue_put(&client->queue, call);
    client->unflushed++;
    return true;
}

static void
flush_now_or_later(redis_async *client)
{
    if (client->unflushed >= FLUSH_EVERY) {
        flush(client);
    } else if (client->unflushed > 0 && !client->flush_asked) {
        client->flush_asked = true;
        client->loop.flush(client->loop.data);
    }
}

/* The rest with the next turn. */
static void
send_waiting(redis_async *client)
{
    for (unsigned left = SENDS_AT_ONCE; left > 0 && client->state == STATE_READY && client->waiting.first; left--) {
        asked *call = queue_take(&client->waiting);
        if (call->finished || !put_call(client, call, false))
            release(client, call);
    }
    if (client->state == STATE_READY)
        flush(client);
}

/* ---- connecting ---- */

static void
greet(redis_async *client)
{
    tg_error error;
    client->state = STATE_GREETING;
    tg_trouble trouble = TG__TROUBLE_LINK;
    if (!tg__wire_listen(&client->wire))
        tg__error(&error, TG_E_NOMEM, "redis: a reply reader");
    else
        trouble = tg__greeting_begin(client->store, &client->wire, &client->greeting, &error);
    if (trouble == TG__TROUBLE_NONE && !make_room(client, client->greeting.resp.length)) {
        tg__error(&error, TG_E_NOMEM, "redis: room for a greeting");
        trouble = TG__TROUBLE_LINK;
    }
    if (trouble != TG__TROUBLE_NONE) {
        lose_connection(client, trouble, &error, false);
        return;
    }
    memcpy(client->out, client->greeting.resp.data, client->greeting.resp.length);
    client->out_length = client->greeting.resp.length;
    watch(client, atomic_load(&client->wire.fd), false);
    flush(client);
}

static void
secure_on(redis_async *client)
{
    tg_error error;
    short wants;
    const tg_trouble trouble = tg__tls_handshake(&client->wire, &wants, &error);
    if (trouble != TG__TROUBLE_NONE)
        lose_connection(client, trouble, &error, false);
    else if (wants)
        watch(client, atomic_load(&client->wire.fd), wants == POLLOUT);
    else
        greet(client);
}

static void
connected(redis_async *client)
{
    tg_error error;
    const tg_trouble trouble = tg__wire_secure_begin(&client->wire, &client->store->address, &error);
    if (trouble != TG__TROUBLE_NONE) {
        lose_connection(client, trouble, &error, false);
    } else if (client->wire.tls) {
        client->state = STATE_SECURING;
        secure_on(client);
    } else {
        greet(client);
    }
}

/* The next address, until one can be tried. */
static void
connect_on(redis_async *client, tg_trouble trouble, tg_error *error)
{
    bool connecting = false;
    for (bool first = true; trouble != TG__TROUBLE_NONE || first; first = false) {
        if (trouble != TG__TROUBLE_NONE) {
            watch(client, -1, false);
            tg__wire_close(&client->wire);
            client->address = client->address ? client->address->ai_next : NULL;
            if (!client->address) {
                lose_connection(client, trouble, error, false);
                return;
            }
        }
        trouble = tg__wire_connect_begin(&client->wire, &client->store->address, client->address, &connecting, error);
    }
    if (!connecting) {
        connected(client);
        return;
    }
    client->state = STATE_CONNECTING;
    watch(client, atomic_load(&client->wire.fd), true);
}

static void
connect_for_waiting(redis_async *client)
{
    while (client->waiting.first && client->waiting.first->finished)
        release(client, queue_take(&client->waiting));
    if (!client->waiting.first || client->state != STATE_ASLEEP)
        return;
    tg_error error;
    client->connects_until_us = tg__monotonic_us() + client->store->timeout_us;
    const tg_trouble trouble =
        tg__lookup_begin(&client->store->address, client->connects_until_us, &client->lookup, &client->addresses,
                         &error);
    client->state = STATE_LOOKUP;
    if (trouble != TG__TROUBLE_NONE) {
        lose_connection(client, trouble, &error, false);
        return;
    }
    if (client->lookup) {
        watch(client, tg__lookup_fd(client->lookup), false);
        return;
    }
    client->address = client->addresses;
    connect_on(client, TG__TROUBLE_NONE, &error);
}

/* ---- hearing ---- */

static void
hear_greeting(redis_async *client, const redisReply *reply)
{
    tg_error error;
    const tg_trouble trouble = tg__greeting_hear(client->store, &client->wire, &client->greeting, reply, &error);
    if (trouble != TG__TROUBLE_NONE) {
        lose_connection(client, trouble, &error, false);
        return;
    }
    if (client->greeting.at < client->greeting.count)
        return;
    tg__greeting_end(&client->greeting);
    explicit_bzero(client->out, client->out_length); /* the password was in it */
    client->state = STATE_READY;
    send_waiting(client);
}

/* true: the connection is as it was. */
static void
hear_reply(redis_async *client, const redisReply *reply)
{
    asked *call = queue_take(&client->queue);
    tg_error error;
    if (!call) { /* unasked: "max number of clients reached", a shutdown's last words */
        char explained[320];
        const tg_trouble meant = tg__redis_trouble(reply->type == REDIS_REPLY_ERROR ? reply->str : "an unasked reply",
                                                   explained, sizeof explained);
        tg__error(&error, TG_E_STORE, "%s: %s", client->store->address.shown, explained);
        lose_connection(client, meant, &error, false);
        return;
    }
    if (client->gone_out > 0)
        client->gone_out--;
    const tg_script script = tg__call_script(&call->plan, call->op);
    if (call->whole)
        client->texts_under_way[script]--;
    if (call->finished) {
        release(client, call);
        return;
    }
    if (reply->type != REDIS_REPLY_ERROR) {
        const tg_trouble trouble = tg__redis_read(client->store, call->op, &call->plan, call->targets,
                                                  call->target_count, reply, tg__monotonic_us(), call->results, &error);
        finish(client, call, trouble, &error);
        release(client, call);
        return;
    }
    if (call->how && tg__cluster_redirects(reply->str)) {
        void *const data = call->data;
        void (*const moved)(void *, const char *) = call->how->moved;
        call->finished = true;
        live_remove(client, call);
        tg__breaker_hears(client->store, TG__TROUBLE_NONE, call->probe);
        release(client, call);
        moved(data, reply->str);
        return;
    }
    /* Nothing ran, so repeating is safe. The text goes out with the first of all those that miss it. */
    if (call->op != TG_OP_RESET && call->repeats < 3 && tg__redis_unknown_script(reply->str)) {
        const bool whole = client->texts_under_way[script] == 0 || call->repeats == 2;
        call->repeats = whole ? 3 : 2;
        if (!put_call(client, call, whole))
            release(client, call);
        else
            flush_now_or_later(client);
        return;
    }
    char explained[320];
    const tg_trouble meant = tg__redis_trouble(reply->str, explained, sizeof explained);
    tg__error(&error, TG_E_STORE, "%s: %s", client->store->address.shown, explained);
    const tg_error others = error;
    finish(client, call, meant, &error);
    release(client, call);
    /* Those behind it would hear the same; a replica's connection leads nowhere. */
    if (meant != TG__TROUBLE_REFUSED && client->state == STATE_READY)
        lose_connection(client, meant, &others, false);
}

/* What has been read, reply by reply. false: the connection was lost over it. */
static bool
take_replies(redis_async *client, const char *bytes, size_t length)
{
    tg_error error;
    redisReader *const reader = client->wire.reader;
    tg_trouble trouble = tg__wire_feed(&client->wire, bytes, length, &error);
    while (client->wire.reader == reader) { /* else a reply has ended this connection */
        redisReply *reply = NULL;
        if (trouble == TG__TROUBLE_NONE)
            trouble = tg__wire_take(&client->wire, &reply, &error);
        if (trouble != TG__TROUBLE_NONE) {
            lose_connection(client, trouble, &error, false);
            return false;
        }
        if (!reply)
            return true;
        if (client->state == STATE_GREETING)
            hear_greeting(client, reply);
        else
            hear_reply(client, reply);
        freeReplyObject(reply);
    }
    return false;
}

/* As much as one turn has room for; the rest the descriptor tells of again, or `read_ahead`. false: nothing has come. */
static bool
hear(redis_async *client)
{
    char bytes[READ_BYTES];
    tg_error error;
    size_t heard = 0, got;
    short wants;
    do {
        const tg_trouble trouble = tg__wire_read(&client->wire, bytes, sizeof bytes, &got, &wants, &error);
        client->read_ahead = false;
        if (trouble != TG__TROUBLE_NONE) {
            lose_connection(client, trouble, &error, client->gone_out == 0);
            return true;
        }
        if (wants)
            return heard > 0;
        heard += got;
        if (!take_replies(client, bytes, got))
            return true;
    } while (client->wire.tls && heard < READ_BYTES);
    client->read_ahead = client->wire.tls != NULL; /* perhaps: what TLS has taken no descriptor tells of */
    return true;
}

/* ---- called from outside ---- */

static redis_async *
of(tg_store_async *base)
{
    return (redis_async *)base;
}

static bool
ours(const redis_async *client)
{
    return client->generation == tg__fork_generation();
}

static void
async_close(tg_store_async *base)
{
    redis_async *client = of(base);
    if (client->closing)
        return;
    enter(client);
    client->closing = true;
    if (ours(client)) {
        tg_error error;
        tg__error(&error, TG_E_STORE, "redis: the client was closed");
        lose_connection(client, TG__TROUBLE_REFUSED, &error, false);
        queue_prepend(&client->ending, &client->waiting);
        end_some(client);
        if (client->wakes_at_us != WAKE_NEVER)
            client->loop.wake(client->loop.data, UINT64_MAX);
    } else {
        /* The loop is the parent's copy; the connection is only let go of here. */
        tg__wire_close(&client->wire);
        tg_queue *const queues[] = { &client->waiting, &client->queue, &client->ending };
        for (size_t i = 0; i < sizeof queues / sizeof *queues; i++)
            for (asked *call; (call = queue_take(queues[i]));)
                release(client, call);
        if (client->addresses)
            freeaddrinfo(client->addresses);
        tg__greeting_end(&client->greeting);
    }
    leave(client);
}

tg_status
tg__redis_async_begin_node(tg_store_async *base, tg_node_call *how, tg_op op, const tg_target *targets,
                           size_t target_count, uint64_t until_us, tg_result *results, tg_async_done *done, void *data,
                           tg_store_call **begun, tg_error *error)
{
    redis_async *client = of(base);
    tg_redis_store *store = client->store;
    *begun = NULL;
    if (!ours(client) || client->closing)
        return tg__error(error, TG_E_STORE, "redis: this client is %s",
                         client->closing ? "closed" : "another process's");
    tg_call plan;
    tg__call_plan(&plan, op, targets, target_count);
    if (how) {
        how->unsent = true;
        plan.denied = plan.denied || how->look;
        plan.knocks = how->knocks;
    }
    if (tg__call_answer_alone(&plan, op, target_count, results))
        return TG_OK;
    const uint64_t manual_now_us = store->manual ? tg_clock_now_us(store->clock) : 0;
    if (manual_now_us > TG__REDIS_CLOCK_US_MAX)
        return tg__error(error, TG_E_STORE, "redis: a manual clock beyond the year 2235 cannot be told to Redis");
    if (client->pending >= TG_ASYNC_PENDING_MAX)
        return tg__error(error, TG_E_STORE, "%s: %d calls wait for it already", store->address.shown,
                         TG_ASYNC_PENDING_MAX);
    bool probe, brief;
    uint64_t deadline_us;
    if (tg__question_time(store->address.shown, tg__monotonic_us(), until_us, store->timeout_us, &deadline_us, &brief, error) != TG_OK) {
        if (how && error)
            error->system_error = 0; /* its other nodes have used it up: one question all the same */
        return TG_E_STORE;
    }
    asked *call = client->spare;
    if (call)
        client->spare = call->queue_next;
    else if (!(call = malloc(sizeof *call)))
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *call);
    if (!tg__breaker_passes(store, &probe)) {
        call->queue_next = client->spare;
        client->spare = call;
        return tg__error(error, TG_E_STORE, "%s: not asked again yet", store->address.shown);
    }
    tg_begun beginning = { .failed = false };
    *call = (asked){
        .beginning = &beginning,
        .op = op,
        .targets = targets,
        .target_count = target_count,
        .results = results,
        .done = done,
        .data = data,
        .how = how,
        .deadline_us = deadline_us,
        .brief = how ? how->brief : brief,
        .manual_now_us = manual_now_us,
        .probe = probe,
        .plan = plan,
    };
    enter(client);
    client->pending++;
    live_add(client, call);
    if (client->state == STATE_READY && !client->waiting.first) {
        if (!put_call(client, call, false))
            release(client, call);
        else
            flush_now_or_later(client);
    } else {
        queue_put(&client->waiting, call);
        connect_for_waiting(client);
    }
    if (!beginning.failed) {
        call->beginning = NULL;
        *begun = (tg_store_call *)call;
    }
    if (!client->closing)
        set_timer(client);
    leave(client);
    if (beginning.failed && error)
        *error = beginning.error;
    return beginning.failed ? beginning.error.status : TG_OK;
}

static tg_status
async_begin(tg_store_async *base, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
            tg_result *results, tg_async_done *done, void *data, tg_store_call **begun, tg_error *error)
{
    return tg__redis_async_begin_node(base, NULL, op, targets, target_count, until_us, results, done, data, begun, error);
}

static void
async_cancel(tg_store_async *base, tg_store_call *begun)
{
    redis_async *client = of(base);
    asked *call = (asked *)begun;
    if (call->finished)
        return;
    call->finished = true;
    live_remove(client, call);
    give_up_probe(client, call);
}

static void
async_ready(tg_store_async *base, int fd, bool readable, bool writable)
{
    redis_async *client = of(base);
    if (!ours(client) || client->closing || fd != client->watched_fd)
        return;
    enter(client);
    tg_error error;
    switch (client->state) {
    case STATE_ASLEEP:
        break;
    case STATE_LOOKUP: {
        tg_lookup *lookup = client->lookup;
        client->lookup = NULL;
        watch(client, -1, false);
        const tg_trouble trouble = tg__lookup_end(lookup, &client->store->address, &client->addresses, &error);
        if (trouble != TG__TROUBLE_NONE) {
            lose_connection(client, trouble, &error, false);
            break;
        }
        client->address = client->addresses;
        connect_on(client, TG__TROUBLE_NONE, &error);
        break;
    }
    case STATE_CONNECTING: {
        const tg_trouble trouble = tg__wire_connect_end(&client->wire, &client->store->address, &error);
        if (trouble == TG__TROUBLE_NONE)
            connected(client);
        else
            connect_on(client, trouble, &error);
        break;
    }
    case STATE_SECURING:
        secure_on(client);
        break;
    default:
        if (writable && client->watches_write)
            flush(client);
        if (readable && client->state >= STATE_GREETING)
            hear(client);
    }
    if (!client->closing)
        set_timer(client);
    leave(client);
}

static void
async_flush(tg_store_async *base)
{
    redis_async *client = of(base);
    client->flush_asked = false;
    if (!ours(client) || client->closing)
        return;
    enter(client);
    if (client->state == STATE_READY && client->out_length > client->out_sent && !client->watches_write)
        flush(client);
    if (!client->closing)
        set_timer(client);
    leave(client);
}

static void
async_wake(tg_store_async *base)
{
    redis_async *client = of(base);
    client->wakes_at_us = WAKE_NEVER;
    if (!ours(client) || client->closing)
        return;
    enter(client);
    const uint64_t now_us = tg__monotonic_us();
    bool late = false, hears = false;
    end_some(client);
    if (!client->closing && client->state == STATE_READY && client->waiting.first)
        send_waiting(client);
    if (!client->closing && client->state >= STATE_GREETING && client->read_ahead)
        hear(client);
    /* A loop that was held up comes with the timer first: what has been answered meanwhile is no fault of Redis. */
    if (client->state != STATE_READY || !client->live_first || client->live_first->deadline_us > now_us)
        client->reads_before_late = 0;
    else if (!client->closing && client->reads_before_late < READS_BEFORE_LATE)
        hears = hear(client) && client->reads_before_late++ < READS_BEFORE_LATE;
    while (!client->closing && !hears && client->ends_left > 0 && client->live_first &&
           client->live_first->deadline_us <= now_us) {
        tg_error error;
        tg__error(&error, TG_E_STORE, "%s: no answer in time", client->store->address.shown);
        late = true;
        client->ends_left--;
        finish(client, client->live_first, TG__TROUBLE_TIMEOUT, &error);
    }
    if (client->closing) {
        leave(client);
        return;
    }
    tg_error error;
    tg__error(&error, TG_E_STORE, "%s: no answer in time", client->store->address.shown);
    if (client->state > STATE_ASLEEP && client->state < STATE_READY && client->connects_until_us <= now_us)
        lose_connection(client, TG__TROUBLE_TIMEOUT, &error, false);
    else if (late && client->state == STATE_READY && atomic_load(&client->store->asks_again_us) != 0)
        /* Known not to answer: those behind need not wait for their own deadlines to hear it. */
        lose_connection(client, TG__TROUBLE_TIMEOUT, &error, false);
    if (!client->closing)
        set_timer(client);
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
tg__redis_async_open_node(tg_redis_store *node, const tg_async_loop *loop, tg_store_async **opened, tg_error *error)
{
    redis_async *client = calloc(1, sizeof *client);
    if (!client)
        return tg__error(error, TG_E_NOMEM, "redis: %zu bytes", sizeof *client);
    client->base.ops = &async_ops;
    client->store = node;
    client->loop = *loop;
    client->generation = tg__fork_generation();
    atomic_init(&client->wire.fd, -1);
    client->watched_fd = -1;
    client->wakes_at_us = WAKE_NEVER;
    queue_init(&client->waiting);
    queue_init(&client->queue);
    queue_init(&client->ending);
    *opened = &client->base;
    return TG_OK;
}

tg_status
tg__redis_async_open(tg_store *store, const tg_async_loop *loop, tg_store_async **opened, tg_error *error)
{
    const tg_status status = tg__redis_async_open_node((tg_redis_store *)store, loop, opened, error);
    if (status == TG_OK)
        tg__store_retain(store);
    return status;
}

size_t
tg__redis_async_pending(const tg_store_async *client)
{
    return ((const redis_async *)client)->pending;
}
