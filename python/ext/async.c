/* Questions to a remote store from a coroutine: nobody waits but the coroutine that asks.
 *
 * There is one client for each pair of event loop and store, found from the running loop. Its descriptors are watched by
 * that loop, its answers become results of the loop's futures. asyncio's own loops and uvloop have the same methods.
 *
 * Who keeps whom: the list in the module's state keeps a client, a client keeps its store. None of them keeps a loop: it would
 * never be let go. A loop that is closed lets go of what it watched, and that tells the client to end; one that was watching
 * nothing at the moment is told by a weak reference when it is gone, or noticed when another loop begins to ask. Futures do
 * keep their loop, but none for longer than the deadline of its call.
 * Must not enter: deciding; waiting. */
#include "ext.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What a loop holds while it watches a descriptor for reading, or for writing. */
typedef struct watcher {
    PyObject_HEAD
    tgpy_loop *of;
    int fd;
    bool writes;
} watcher;

typedef struct watched {
    int fd;
    const watcher *reads, *writes; /* borrowed: the loop's; NULL: not watched */
    bool dropped; /* by the loop, though it is open */
} watched;

struct question;

struct tgpy_loop {
    PyObject_HEAD
    tgpy_state *state;
    tgpy_loop *next;     /* in state->loops */
    PyObject *loop;      /* borrowed; NULL: gone or closed */
    PyObject *reference; /* the weak one */
    tg_store *store;     /* the client's */
    tg_async *client;    /* NULL: ended */
    unsigned generation; /* of the process */
    unsigned seen;       /* the last look at whether its loop is closed */
    struct question *asked;
    PyObject *on_wake, *on_flush; /* bound to this: let go when it ends */
    watched *watches;
    size_t watch_count, watch_room;
    uint64_t due_us; /* when to wake; 0: not at all */
};

/* What stands behind one future. */
typedef struct question {
    struct question *before, *next; /* in its loop's list */
    tgpy_loop *of;
    tg_async_call *call;
    PyObject *future;
    PyObject *owner; /* Limiter or Gate: whose store is asked */
    PyObject *about; /* the Decision or Judgement that is marked, or NULL */
    /* Gives the result, or NULL with an exception set. */
    PyObject *(*conclude)(struct question *question, tg_status status, const tg_error *error);
    void (*release)(struct question *question); /* of what stands behind; may be NULL */
} question;

#define EARLY_US 5000 /* that a loop's timer may be: uvloop's are by up to 1.5 ms */

/* ---- forks ---- */

static unsigned process_generation;

static void
in_child(void)
{
    process_generation++;
}

static void
mind_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

/* ---- what a client asks of its loop ---- */

static uint64_t
now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void
told(PyObject *result, PyObject *of)
{
    if (!result)
        PyErr_WriteUnraisable(of);
    Py_XDECREF(result);
}

/* With an empty context: a handle keeps its context for as long as the connection stands, and the request that happened to
 * open it, with all that its context holds, would stay as long. */
static void
begin_watch(tgpy_loop *self, tgpy_name method, int fd, PyObject *callback)
{
    PyObject *contextvars = PyImport_ImportModule("contextvars");
    PyObject *context = contextvars ? PyObject_CallMethod(contextvars, "Context", NULL) : NULL;
    PyObject *function = context ? PyObject_GetAttr(self->loop, self->state->names[method]) : NULL;
    told(function ? PyObject_CallMethod(context, "run", "OiO", function, fd, callback) : NULL, self->loop);
    Py_XDECREF(function);
    Py_XDECREF(context);
    Py_XDECREF(contextvars);
}

static void
end_watch(tgpy_loop *self, tgpy_name method, int fd)
{
    PyObject *number = PyLong_FromLong(fd);
    told(number ? PyObject_CallMethodObjArgs(self->loop, self->state->names[method], number, NULL) : NULL, self->loop);
    Py_XDECREF(number);
}

static watched *
watch_of(tgpy_loop *self, int fd)
{
    for (size_t i = 0; i < self->watch_count; i++)
        if (self->watches[i].fd == fd)
            return &self->watches[i];
    if (self->watch_count == self->watch_room) {
        const size_t room = self->watch_room ? 2 * self->watch_room : 4;
        watched *more = realloc(self->watches, room * sizeof *more);
        if (!more)
            return NULL;
        self->watches = more;
        self->watch_room = room;
    }
    self->watches[self->watch_count] = (watched){ .fd = fd };
    return &self->watches[self->watch_count++];
}

/* Of what the loop has dropped by itself it may keep something all the same, and then refuses the number when it is another's. */
static void
take_back(tgpy_loop *self, watched *one)
{
    one->dropped = false;
    const int fd = one->fd;
    end_watch(self, NAME_remove_reader, fd);
    if (self->loop)
        end_watch(self, NAME_remove_writer, fd);
}

static PyObject *loop_is_ready(PyObject *watcher, PyObject *unused);
static PyMethodDef ready_definition = { "ready", loop_is_ready, METH_NOARGS, NULL };

static const watcher *
new_watcher(tgpy_loop *self, int fd, bool writes)
{
    watcher *made = PyObject_New(watcher, self->state->watcher_type);
    PyObject *callback = NULL;
    if (made) {
        made->of = (tgpy_loop *)Py_NewRef((PyObject *)self);
        made->fd = fd;
        made->writes = writes;
        callback = PyCFunction_NewEx(&ready_definition, (PyObject *)made, NULL);
        Py_DECREF((PyObject *)made); /* lives on in the callback, and that in the loop */
    }
    if (!callback) {
        PyErr_WriteUnraisable((PyObject *)self);
        return NULL;
    }
    begin_watch(self, writes ? NAME_add_writer : NAME_add_reader, fd, callback);
    const bool kept = Py_REFCNT(callback) > 1;
    Py_DECREF(callback);
    return kept ? made : NULL;
}

static void
watch(void *data, int fd, bool readable, bool writable)
{
    tgpy_loop *self = data;
    if (!self->loop)
        return; /* a closed loop watches nothing */
    watched *one = watch_of(self, fd);
    if (!one) /* no memory: calls over it end by their deadlines */
        return;
    if (one->dropped) {
        take_back(self, one);
        if (!self->loop || !(one = watch_of(self, fd)))
            return;
    }
    const watched was = *one;
    /* Noted first: what the loop lets go of because it was told to, is not what tells that it is closed. */
    if (!readable)
        one->reads = NULL;
    if (!writable)
        one->writes = NULL;
    if (!readable && !writable)
        *one = self->watches[--self->watch_count];
    if (!readable && was.reads)
        end_watch(self, NAME_remove_reader, fd);
    if (!writable && was.writes)
        end_watch(self, NAME_remove_writer, fd);
    if (readable && !was.reads) {
        const watcher *made = new_watcher(self, fd, false);
        watch_of(self, fd)->reads = made;
    }
    if (writable && !was.writes) {
        const watcher *made = new_watcher(self, fd, true);
        watch_of(self, fd)->writes = made;
    }
}

/* A timer that is not wanted any more is left to go off: to cancel it, its handle would have to be kept, and a handle keeps
 * its loop. */
static void
wake(void *data, uint64_t in_us)
{
    tgpy_loop *self = data;
    self->due_us = in_us == UINT64_MAX ? 0 : now_us() + in_us;
    if (!self->loop || in_us == UINT64_MAX)
        return;
    /* uvloop's timers count whole milliseconds, from the last one that was whole: rounded up here, not to the nearest there. */
    PyObject *seconds = PyFloat_FromDouble((double)((in_us + 999) / 1000) / 1e3);
    told(seconds ? PyObject_CallMethodObjArgs(self->loop, self->state->names[NAME_call_later], seconds, self->on_wake, NULL)
                 : NULL,
         self->loop);
    Py_XDECREF(seconds);
}

static void
flush(void *data)
{
    tgpy_loop *self = data;
    if (self->loop)
        told(PyObject_CallMethodObjArgs(self->loop, self->state->names[NAME_call_soon], self->on_flush, NULL), self->loop);
}

/* ---- what the loop tells its client ---- */

static PyObject *
done_for_now(tgpy_loop *self)
{
    tgpy_log_notices(self->state);
    Py_RETURN_NONE;
}

static PyObject *
loop_wakes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    tgpy_loop *self = (tgpy_loop *)object;
    /* What is this early, another timer stands for. What is less early may be the very one that does: passed over, no other
     * would come, and whoever waits would wait for good. Waking the client too early costs it a look. */
    if (!self->client || self->due_us == 0 || now_us() + EARLY_US < self->due_us)
        Py_RETURN_NONE;
    self->due_us = 0;
    tg_async_wake(self->client);
    return done_for_now(self);
}

static PyObject *
loop_flushes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    tgpy_loop *self = (tgpy_loop *)object;
    if (!self->client)
        Py_RETURN_NONE;
    tg_async_flush(self->client);
    return done_for_now(self);
}

static PyObject *
loop_is_ready(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const watcher *by = (watcher *)object;
    tgpy_loop *self = by->of;
    if (!self->client)
        Py_RETURN_NONE;
    Py_INCREF((PyObject *)self); /* the watcher may end with what it tells */
    tg_async_ready(self->client, by->fd, !by->writes, by->writes);
    PyObject *done = done_for_now(self);
    Py_DECREF((PyObject *)self);
    return done;
}

/* In the turn after the one in which the loop has dropped it: whatever is wrong, reading tells. */
static PyObject *
loop_has_dropped(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const watcher *by = (watcher *)object;
    tgpy_loop *self = by->of;
    for (size_t i = 0; self->client && i < self->watch_count; i++)
        if (self->watches[i].fd == by->fd && self->watches[i].dropped) {
            take_back(self, &self->watches[i]);
            if (self->client)
                tg_async_ready(self->client, by->fd, true, false);
            return done_for_now(self);
        }
    Py_RETURN_NONE;
}

/* ---- the life of a question ---- */

static void
free_question(question *one)
{
    if (one->of) {
        *(one->before ? &one->before->next : &one->of->asked) = one->next;
        if (one->next)
            one->next->before = one->before;
    }
    if (one->release)
        one->release(one);
    Py_XDECREF(one->future);
    Py_XDECREF(one->about);
    Py_XDECREF(one->owner);
    PyMem_Free(one);
}

/* Those that a coroutine has left are cancelled: then there is nobody to tell. */
static void
resolve(const tgpy_state *state, PyObject *future, PyObject *value)
{
    PyObject *type = NULL, *exception = NULL, *trace = NULL, *set;
    if (value) {
        set = PyObject_CallMethodObjArgs(future, state->names[NAME_set_result], value, NULL);
    } else {
        PyErr_Fetch(&type, &exception, &trace);
        PyErr_NormalizeException(&type, &exception, &trace);
        set = PyObject_CallMethodObjArgs(future, state->names[NAME_set_exception], exception, NULL);
        Py_XDECREF(type);
        Py_XDECREF(exception);
        Py_XDECREF(trace);
    }
    if (!set)
        PyErr_Clear();
    Py_XDECREF(set);
}

static void
on_done(void *data, tg_status status, const tg_error *error)
{
    question *one = data;
    tgpy_loop *loop = one->of;
    if (loop->loop && one->future) {
        PyObject *value = one->conclude(one, status, error);
        resolve(loop->state, one->future, value);
        Py_XDECREF(value);
    }
    free_question(one);
}

static question *
new_question(tgpy_loop *loop, PyObject *owner, size_t bytes,
             PyObject *(*conclude)(struct question *, tg_status, const tg_error *))
{
    question *one = PyMem_Malloc(bytes);
    if (!one) {
        PyErr_NoMemory();
        return NULL;
    }
    *one = (question){ .of = loop, .owner = Py_XNewRef(owner), .conclude = conclude, .next = loop->asked };
    if (one->next)
        one->next->before = one;
    loop->asked = one;
    return one;
}

/* What stands after the beginning: a future, or the result itself where there was nothing to wait for. */
static PyObject *
begun(question *one, tg_status status, const tg_error *error, bool *waits)
{
    tgpy_loop *loop = one->of;
    tgpy_state *state = loop->state;
    PyObject *made;
    *waits = false;
    if (status == TG_OK && one->call) {
        made = PyObject_CallMethodObjArgs(loop->loop, state->names[NAME_create_future], NULL);
        if (made) {
            *waits = true;
            one->future = Py_NewRef(made);
        } else {
            tg_async_cancel(loop->client, one->call);
            free_question(one);
        }
    } else {
        made = one->conclude(one, status, error);
        free_question(one);
    }
    if (tg_notice_pending()) { /* logging runs what it likes, also on an exception's way */
        PyObject *type, *exception, *trace;
        PyErr_Fetch(&type, &exception, &trace);
        tgpy_log_notices_now(state);
        PyErr_Restore(type, exception, trace);
    }
    return made;
}

/* As begun(), for who awaits whatever comes. */
static PyObject *
awaitable(question *one, tg_status status, const tg_error *error)
{
    bool waits;
    tgpy_state *state = one->of->state;
    PyObject *made = begun(one, status, error, &waits);
    return waits ? made : tgpy_ready(state, made);
}

/* ---- the life of a client ---- */

/* Its loop is closed, or gone, or another process's. */
static void
end_client(tgpy_loop *self)
{
    PyObject *type, *exception, *trace;
    tgpy_loop **link = &self->state->loops;
    while (*link && *link != self)
        link = &(*link)->next;
    if (!*link)
        return; /* has ended already */
    *link = self->next;
    PyErr_Fetch(&type, &exception, &trace);
    self->loop = NULL;
    self->watch_count = 0;
    tg_async *client = self->client;
    self->client = NULL;
    tg_async_close(client);
    while (self->asked) /* a forked child's copies: nobody there waits for them */
        free_question(self->asked);
    Py_CLEAR(self->reference);
    Py_CLEAR(self->on_wake);
    Py_CLEAR(self->on_flush);
    PyErr_Restore(type, exception, trace);
    Py_DECREF(self); /* the list's; handles of its loop may still hold it */
}

void
tgpy_loops_end(tgpy_state *state)
{
    while (state->loops)
        end_client(state->loops);
}

static PyObject *
loop_is_gone(PyObject *self, PyObject *Py_UNUSED(reference))
{
    end_client((tgpy_loop *)self);
    Py_RETURN_NONE;
}

static bool
is_closed(PyObject *loop)
{
    PyObject *closed = PyObject_CallMethod(loop, "is_closed", NULL);
    const bool is = closed == Py_True;
    if (!closed)
        PyErr_Clear();
    Py_XDECREF(closed);
    return is;
}

/* A loop with a client that was not asked in this look yet; with a reference, which keeps it while the loop is asked. */
static tgpy_loop *
next_unseen(tgpy_state *state)
{
    for (tgpy_loop *one = state->loops; one; one = one->next)
        if (one->seen != state->looks) {
            one->seen = state->looks;
            return (tgpy_loop *)Py_NewRef((PyObject *)one);
        }
    return NULL;
}

/* A new loop asks for the first time: a time to look after the others. Asking a loop runs what it likes, and other threads:
 * any of them may be gone afterwards, so the list is gone through from its beginning each time. */
static void
end_closed(tgpy_state *state)
{
    state->looks++;
    for (tgpy_loop *one; (one = next_unseen(state)) != NULL; Py_DECREF((PyObject *)one)) {
        PyObject *loop = Py_NewRef(one->loop);
        if (one->generation != process_generation || is_closed(loop))
            end_client(one);
        Py_DECREF(loop);
    }
}

static PyMethodDef wake_definition = { "wake", loop_wakes, METH_NOARGS, NULL };
static PyMethodDef flush_definition = { "flush", loop_flushes, METH_NOARGS, NULL };
static PyMethodDef gone_definition = { "gone", loop_is_gone, METH_O, NULL };

/* NULL: this store cannot be asked so, or with an exception set. */
static tgpy_loop *
new_client(tgpy_state *state, PyObject *loop, tg_store *store)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, mind_forks);
    end_closed(state);
    tgpy_loop *self = PyObject_New(tgpy_loop, state->loop_type);
    if (!self)
        return NULL;
    memset((char *)self + offsetof(tgpy_loop, state), 0, sizeof *self - offsetof(tgpy_loop, state));
    self->state = state;
    self->loop = loop;
    self->store = store;
    self->generation = process_generation;
    self->next = state->loops;
    state->loops = self;
    PyObject *gone = PyCFunction_NewEx(&gone_definition, (PyObject *)self, NULL);
    self->reference = gone ? PyWeakref_NewRef(loop, gone) : NULL;
    Py_XDECREF(gone);
    self->on_wake = self->reference ? PyCFunction_NewEx(&wake_definition, (PyObject *)self, NULL) : NULL;
    self->on_flush = self->on_wake ? PyCFunction_NewEx(&flush_definition, (PyObject *)self, NULL) : NULL;
    const tg_async_loop asks = { .data = self, .watch = watch, .wake = wake, .flush = flush };
    tg_error error;
    const tg_status status = self->on_flush ? tg_async_open(store, &asks, &self->client, &error) : TG_OK;
    if (self->on_flush && status == TG_OK)
        return self;
    if (self->on_flush && status != TG_E_UNSUPPORTED) /* else there is only the call that waits */
        tgpy_raise(state, &error, NULL);
    end_client(self);
    return NULL;
}

static void
loop_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    free(((tgpy_loop *)object)->watches);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot loop_slots[] = {
    { Py_tp_doc, "The client of one event loop and one remote store." },
    { Py_tp_dealloc, loop_dealloc },
    { 0, NULL },
};

PyType_Spec tgpy_loop_spec = {
    .name = "tidegate._core.LoopClient",
    .basicsize = sizeof(tgpy_loop),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = loop_slots,
};

static PyMethodDef dropped_definition = { "dropped", loop_has_dropped, METH_NOARGS, NULL };

static void
drops(tgpy_loop *self, watched *one)
{
    PyObject *type, *exception, *trace, *callback = NULL;
    PyErr_Fetch(&type, &exception, &trace);
    one->reads = one->writes = NULL;
    one->dropped = true;
    watcher *made = PyObject_New(watcher, self->state->watcher_type);
    if (made) {
        made->of = (tgpy_loop *)Py_NewRef((PyObject *)self);
        made->fd = one->fd;
        made->writes = false;
        callback = PyCFunction_NewEx(&dropped_definition, (PyObject *)made, NULL);
        Py_DECREF((PyObject *)made);
    }
    told(callback ? PyObject_CallMethodObjArgs(self->loop, self->state->names[NAME_call_soon], callback, NULL) : NULL,
         self->loop);
    Py_XDECREF(callback);
    PyErr_Restore(type, exception, trace);
}

static watched *
watched_by(tgpy_loop *self, const watcher *by)
{
    for (size_t i = 0; i < self->watch_count; i++)
        if (self->watches[i].reads == by || self->watches[i].writes == by)
            return &self->watches[i];
    return NULL;
}

/* A loop that lets go of a watcher that it was not told to let go of has been closed; or it is uvloop, and the other end has
 * reset the connection: that drops whoever watches it, without a word to them. */
static void
watcher_dealloc(PyObject *object)
{
    watcher *self = (watcher *)object;
    PyTypeObject *type = Py_TYPE(object);
    tgpy_loop *of = self->of;
    if (watched_by(of, self)) {
        PyObject *error, *value, *trace;
        PyErr_Fetch(&error, &value, &trace);
        const bool closed = is_closed(of->loop);
        PyErr_Restore(error, value, trace);
        watched *one = watched_by(of, self); /* asking a loop runs what it likes */
        if (one && closed)
            end_client(of);
        else if (one)
            drops(of, one);
    }
    Py_DECREF((PyObject *)of);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot watcher_slots[] = {
    { Py_tp_doc, "A descriptor that an event loop watches." },
    { Py_tp_dealloc, watcher_dealloc },
    { 0, NULL },
};

PyType_Spec tgpy_watcher_spec = {
    .name = "tidegate._core.Watcher",
    .basicsize = sizeof(watcher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = watcher_slots,
};

/* ---- the running loop ---- */

/* A new reference; NULL: none runs in this thread, or with an exception set. */
static PyObject *
running_loop(tgpy_state *state)
{
    if (!state->get_running_loop) {
        PyObject *name = PyUnicode_FromString("asyncio");
        PyObject *asyncio = name ? PyImport_GetModule(name) : NULL; /* not imported: no loop of it runs */
        Py_XDECREF(name);
        if (!asyncio)
            return NULL;
        state->get_running_loop = PyObject_GetAttrString(asyncio, "_get_running_loop");
        Py_DECREF(asyncio);
        if (!state->get_running_loop) {
            PyErr_Clear(); /* it is being imported */
            return NULL;
        }
    }
    PyObject *loop = PyObject_CallNoArgs(state->get_running_loop);
    if (loop == Py_None)
        Py_CLEAR(loop);
    return loop;
}

tgpy_loop *
tgpy_loop_of(tgpy_state *state, tg_store *store)
{
    PyObject *loop = running_loop(state);
    if (!loop)
        return NULL;
    tgpy_loop *one = state->loops;
    while (one && (one->loop != loop || one->store != store || one->generation != process_generation))
        one = one->next;
    if (!one)
        one = new_client(state, loop, store);
    Py_DECREF(loop); /* it runs, so it stays */
    return one;
}

bool
tgpy_warn_in_loop(tgpy_state *state)
{
    PyObject *loop = running_loop(state);
    if (!loop)
        return !PyErr_Occurred();
    Py_DECREF(loop);
    return PyErr_WarnEx(PyExc_RuntimeWarning,
                        "a call that waits for a remote store holds up the whole event loop: await its _async form", 1) == 0;
}

/* ---- a limiter's questions ---- */

typedef struct deciding {
    question base;
    tg_decision decision;
} deciding;

static PyObject *
conclude_decision(question *one, tg_status status, const tg_error *error)
{
    if (status == TG_OK)
        return tgpy_decision_new(one->of->state, one->owner, &((deciding *)one)->decision);
    return tgpy_raise(one->of->state, error, NULL);
}

static PyObject *
conclude_none(question *one, tg_status status, const tg_error *error)
{
    return status == TG_OK ? Py_NewRef(Py_None) : tgpy_raise(one->of->state, error, NULL);
}

PyObject *
tgpy_limiter_ask(tgpy_loop *loop, PyObject *object, tg_question kind, const tg_dimension *dimensions, size_t dimension_count,
                 uint64_t cost, uint64_t patience_us)
{
    const bool decides = kind == TG_ASK_HIT || kind == TG_ASK_PEEK;
    question *one = new_question(loop, object, decides ? sizeof(deciding) : sizeof(question),
                                 decides ? conclude_decision : conclude_none);
    if (!one)
        return NULL;
    tg_error error;
    const tg_status status =
        tg_limiter_begin(loop->client, ((tgpy_limiter *)object)->limiter, kind, dimensions, dimension_count, cost, patience_us,
                         decides ? &((deciding *)one)->decision : NULL, on_done, one, &one->call, &error);
    return awaitable(one, status, &error);
}

static PyObject *
conclude_refund(question *one, tg_status status, const tg_error *error)
{
    tgpy_decision *decision = (tgpy_decision *)one->about;
    for (size_t i = 0; i < decision->result_count; i++)
        decision->results[i].charged = ((deciding *)one)->decision.results[i].charged;
    return conclude_none(one, status, error);
}

PyObject *
tgpy_decision_refund_later(tgpy_loop *loop, tgpy_decision *decision)
{
    deciding *one = (deciding *)new_question(loop, decision->owner, sizeof *one, conclude_refund);
    if (!one)
        return NULL;
    one->base.about = Py_NewRef((PyObject *)decision);
    tgpy_decision_restore(decision, &one->decision);
    for (size_t i = 0; i < decision->result_count; i++)
        decision->results[i].charged = false; /* until it is known to be not given back */
    tg_error error;
    const tg_status status =
        tg_decision_refund_begin(loop->client, &one->decision, on_done, one, &one->base.call, &error);
    return awaitable(&one->base, status, &error);
}

/* ---- requests ---- */

typedef struct judging {
    question base;
    tg_request *request; /* copied: what it was read from may change meanwhile */
    tgpy_prior prior;
    bool by_gate;
    tg_limiter *limiters[TG_LIMITERS_MAX];
    PyObject *held[TG_LIMITERS_MAX]; /* the Limiters */
    tg_judgement judgement;
    tg_answer answer;
} judging;

static void
take_text(tg_text *text, char **to)
{
    if (text->length == 0)
        return;
    memcpy(*to, text->data, text->length);
    text->data = *to;
    *to += text->length;
}

static tg_request *
copy_request(const tg_request *from)
{
    const tg_text texts[] = { from->method, from->path, from->host, from->peer, from->user,
                              from->route,  from->query, from->body, from->plan };
    size_t bytes = sizeof *from + from->header_count * sizeof(tg_header);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        bytes += texts[i].length;
    for (size_t i = 0; i < from->header_count; i++)
        bytes += from->headers[i].name.length + from->headers[i].value.length;
    for (size_t i = 0; i < from->key_count; i++)
        bytes += sizeof(tg_part) + from->keys[i].kind.length + from->keys[i].value.length;
    tg_request *copy = PyMem_Malloc(bytes);
    if (!copy) {
        PyErr_NoMemory();
        return NULL;
    }
    tg_header *headers = (tg_header *)(copy + 1);
    tg_part *keys = (tg_part *)(headers + from->header_count);
    char *to = (char *)(keys + from->key_count);
    *copy = *from;
    tg_text *const copied[] = { &copy->method, &copy->path,  &copy->host, &copy->peer, &copy->user,
                                &copy->route,  &copy->query, &copy->body, &copy->plan };
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        take_text(copied[i], &to);
    for (size_t i = 0; i < from->header_count; i++) {
        headers[i] = from->headers[i];
        take_text(&headers[i].name, &to);
        take_text(&headers[i].value, &to);
    }
    for (size_t i = 0; i < from->key_count; i++) {
        keys[i] = from->keys[i];
        take_text(&keys[i].kind, &to);
        take_text(&keys[i].value, &to);
    }
    copy->headers = headers;
    copy->keys = keys;
    return copy;
}

static void
release_judging(question *base)
{
    judging *one = (judging *)base;
    PyMem_Free(one->request);
    tgpy_prior_fini(&one->prior);
    for (size_t i = 0; i < TG_LIMITERS_MAX && one->held[i]; i++)
        Py_DECREF(one->held[i]);
}

static PyObject *
conclude_judgement(question *base, tg_status status, const tg_error *error)
{
    judging *one = (judging *)base;
    if (status == TG_OK)
        return tgpy_judgement_new(base->of->state, base->owner, &one->judgement, one->by_gate ? &one->answer : NULL);
    return tgpy_raise(base->of->state, error, NULL);
}

PyObject *
tgpy_judge_later(tgpy_loop *loop, PyObject *owner, tg_gate *gate, PyObject *const *limiters, size_t limiter_count,
                 const tg_request *request, tgpy_prior *prior, uint64_t cost)
{
    judging *one = (judging *)new_question(loop, owner, sizeof *one, conclude_judgement);
    if (!one)
        return NULL;
    one->base.release = release_judging;
    one->prior = *prior;
    *prior = (tgpy_prior){ .count = 0 };
    one->by_gate = gate != NULL;
    memset(one->held, 0, sizeof one->held);
    for (size_t i = 0; i < limiter_count; i++) {
        one->held[i] = Py_NewRef(limiters[i]);
        one->limiters[i] = ((tgpy_limiter *)limiters[i])->limiter;
    }
    one->request = copy_request(request);
    if (!one->request) {
        free_question(&one->base);
        return NULL;
    }
    tg_error error;
    const tg_status status =
        gate ? tg_gate_judge_begin(loop->client, gate, one->request, cost, one->prior.pointers, one->prior.count,
                                   &one->judgement, &one->answer, on_done, one, &one->base.call, &error)
             : tg_limiters_judge_begin(loop->client, one->limiters, limiter_count, one->request, cost, one->prior.pointers,
                                       one->prior.count, &one->judgement, on_done, one, &one->base.call, &error);
    return awaitable(&one->base, status, &error);
}

typedef struct settling {
    question base;
    tg_judgement judgement;
} settling;

static PyObject *
conclude_settling(question *one, tg_status status, const tg_error *error)
{
    tgpy_judgement_settled((tgpy_judgement *)one->about, &((settling *)one)->judgement);
    return conclude_none(one, status, error);
}

PyObject *
tgpy_settle_later(tgpy_loop *loop, tgpy_judgement *judgement, int status, const tg_header *headers, size_t header_count)
{
    PyObject *owner = judgement->settles_at;
    settling *one = (settling *)new_question(loop, owner, sizeof *one, conclude_settling);
    if (!one)
        return NULL;
    one->base.about = Py_NewRef((PyObject *)judgement);
    tgpy_judgement_settles(judgement, &one->judgement);
    tg_error error;
    const tg_status begun_so = tg_gate_settle_begin(loop->client, ((tgpy_gate *)owner)->gate, &one->judgement, status, headers,
                                                    header_count, on_done, one, &one->base.call, &error);
    return awaitable(&one->base, begun_so, &error);
}
