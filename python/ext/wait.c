/* Waiting in line: Limiter.wait, and what tidegate/_wait.py needs to wait on an event loop.
 *
 * A bucket's place is taken at once and slept for once. A window has none to give ahead of its time: there the hit is tried
 * again, some time after it could pass, so that those who wait do not all come at one instant.
 * Must not enter: what a hit means; event loops. */
#include "ext.h"

#include <time.h>

#define SLICE_US UINT64_C(100000)      /* a signal that another thread got is looked for so often */
#define MANUAL_SLICE_US UINT64_C(2000) /* and a manual clock */
#define JITTER_US_MIN UINT64_C(1000)
#define JITTER_US_MAX UINT64_C(100000)

/* ---- time ---- */

static uint64_t
monotonic_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* Under a manual clock a wait is over when its owner has moved it so far, and in any case after the real time: a test that
 * never moves it does not hang. */
struct since {
    tg_store *manual; /* NULL: real */
    uint64_t real_us, manual_us;
};

static struct since
since_now(const tgpy_limiter *limiter)
{
    tg_store *manual = limiter->manual && limiter->limiter ? tg_limiter_store(limiter->limiter) : NULL;
    return (struct since){ manual, monotonic_us(), manual ? tg_store_now_us(manual) : 0 };
}

static uint64_t
passed_us(const struct since *since)
{
    const uint64_t real_us = monotonic_us() - since->real_us;
    const uint64_t now_us = since->manual ? tg_store_now_us(since->manual) : 0;
    const uint64_t manual_us = now_us > since->manual_us ? now_us - since->manual_us : 0;
    return real_us > manual_us ? real_us : manual_us;
}

/* false: a signal's handler raised. */
static bool
sleep_us(const tgpy_limiter *limiter, uint64_t us)
{
    const struct since begun = since_now(limiter);
    const uint64_t most_us = begun.manual ? MANUAL_SLICE_US : SLICE_US;
    for (;;) {
        const uint64_t gone_us = passed_us(&begun);
        if (gone_us >= us)
            return true;
        const uint64_t slice_us = us - gone_us < most_us ? us - gone_us : most_us;
        const struct timespec slice = { (time_t)(slice_us / 1000000), (long)(slice_us % 1000000) * 1000 };
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&slice, NULL); /* interrupted: looked at below */
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() != 0)
            return false;
    }
}

/* So much more than the wait that was told. Anybody may guess it: it only has to differ. */
static uint64_t
jitter_us(uint64_t retry_us)
{
    static _Thread_local uint64_t state;
    const uint64_t eighth_us = retry_us / 8 < JITTER_US_MAX ? retry_us / 8 : JITTER_US_MAX;
    const uint64_t most_us = eighth_us > JITTER_US_MIN ? eighth_us : JITTER_US_MIN;
    if (state == 0)
        state = monotonic_us() ^ (uint64_t)(uintptr_t)&state;
    state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    uint64_t mixed = (state ^ state >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94d049bb133111eb);
    return (mixed ^ mixed >> 31) % (most_us + 1);
}

/* ---- one attempt ---- */

struct within {
    uint64_t patience_us;
    tg_decision decision;
};

static tg_status
ask_within(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost, void *what,
           tg_error *error)
{
    struct within *within = what;
    return tg_limiter_hit_within(limiter, dimensions, dimension_count, cost, within->patience_us, &within->decision, error);
}

static bool
read_first(const tgpy_state *state, PyObject *const *args, Py_ssize_t count, uint64_t *patience_us)
{
    if (count < 2 || Py_TYPE(args[0]) != state->limiter_type) {
        PyErr_SetString(PyExc_TypeError, "expected a limiter, patience_us, *parts, cost=1, dims=None");
        return false;
    }
    *patience_us = PyLong_AsUnsignedLongLong(args[1]);
    return *patience_us != (uint64_t)-1 || !PyErr_Occurred();
}

PyObject *
tgpy_hit_within_async(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const tgpy_state *state = PyModule_GetState(module);
    uint64_t patience_us;
    if (!read_first(state, args, count, &patience_us))
        return NULL;
    const tgpy_limiter *limiter = (tgpy_limiter *)args[0];
    if (!limiter->limiter || !tg_store_remote(tg_limiter_store(limiter->limiter))) {
        PyErr_SetString(PyExc_TypeError, "hit_within_async is for a store that is asked over a network");
        return NULL;
    }
    return tgpy_limiter_hit_later(args[0], args + 2, count - 2, names, patience_us);
}

PyObject *
tgpy_hit_within(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    tgpy_state *state = PyModule_GetState(module);
    struct within within;
    bool asked;
    if (!read_first(state, args, count, &within.patience_us))
        return NULL;
    if (!tgpy_limiter_with(args[0], args + 2, count - 2, names, ask_within, &within, &asked))
        return NULL;
    return asked ? tgpy_decision_new(state, args[0], &within.decision) : tgpy_limiter_unasked(args[0]);
}

PyObject *
tgpy_limiter_kind(PyObject *module, PyObject *object)
{
    const tgpy_state *state = PyModule_GetState(module);
    if (Py_TYPE(object) != state->limiter_type) {
        PyErr_SetString(PyExc_TypeError, "expected a Limiter");
        return NULL;
    }
    const tgpy_limiter *limiter = (tgpy_limiter *)object;
    tg_store *store = limiter->limiter ? tg_limiter_store(limiter->limiter) : NULL;
    PyObject *now = store && limiter->manual ? PyLong_FromUnsignedLongLong(tg_store_now_us(store)) : Py_NewRef(Py_None);
    const bool remote = store && !state->off && tg_store_remote(store);
    return now ? Py_BuildValue("(ON)", remote ? Py_True : Py_False, now) : NULL;
}

/* ---- Limiter.wait ---- */

enum { ARGUMENTS_MAX = TG_PARTS_MAX + 4 };

/* The arguments without `timeout`. */
struct arguments {
    PyObject *values[ARGUMENTS_MAX];
    Py_ssize_t count;
    PyObject *names; /* NULL: none */
    PyObject *timeout; /* borrowed; NULL: not given */
};

static bool
split_timeout(PyObject *const *args, Py_ssize_t count, PyObject *names, struct arguments *arguments)
{
    const Py_ssize_t name_count = names ? PyTuple_Size(names) : 0;
    *arguments = (struct arguments){ .count = count };
    if (count + name_count > ARGUMENTS_MAX) {
        PyErr_Format(PyExc_TypeError, "one identity has at most %d parts, and the keywords are cost, timeout and dims",
                     TG_PARTS_MAX);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        arguments->values[i] = args[i];
    PyObject *kept = name_count > 0 ? PyList_New(0) : NULL;
    Py_ssize_t to = count;
    for (Py_ssize_t i = 0; i < name_count; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        if (PyUnicode_CompareWithASCIIString(name, "timeout") == 0) {
            arguments->timeout = args[count + i];
            continue;
        }
        if (!kept || PyList_Append(kept, name) != 0) {
            Py_XDECREF(kept);
            return false;
        }
        arguments->values[to++] = args[count + i];
    }
    if (to > count) {
        arguments->names = PyList_AsTuple(kept);
        if (!arguments->names) {
            Py_DECREF(kept);
            return false;
        }
    }
    Py_XDECREF(kept);
    return true;
}

static bool
timeout_us_of(PyObject *given, uint64_t *us)
{
    *us = TG_WAIT_US_MAX;
    if (!given || given == Py_None)
        return true;
    const double seconds = PyFloat_AsDouble(given);
    if (seconds == -1.0 && PyErr_Occurred())
        return false;
    if (!(seconds >= 0)) {
        PyErr_SetString(PyExc_ValueError, "timeout is in seconds, 0 or more; None: as long as it takes");
        return false;
    }
    if (seconds * 1e6 < (double)TG_WAIT_US_MAX)
        *us = (uint64_t)(seconds * 1e6);
    return true;
}

static bool
give_back(tgpy_limiter *limiter, tg_decision *decision)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    tg_store *store = tg_limiter_store(limiter->limiter);
    PyThreadState *thread = tgpy_others_run(store);
    tg_decision_refund(store, decision, NULL); /* of a silent store nobody can be told: an exception is on its way */
    tgpy_others_stop(thread);
    PyErr_Restore(type, value, traceback);
    return false;
}

static bool
wait_in_line(PyObject *object, const struct arguments *arguments, uint64_t timeout_us, struct within *within, bool *asked)
{
    tgpy_limiter *limiter = (tgpy_limiter *)object;
    const struct since begun = since_now(limiter);
    for (uint64_t gone_us = 0;; gone_us = passed_us(&begun)) {
        const uint64_t left_us = timeout_us > gone_us ? timeout_us - gone_us : 0;
        const tg_decision *decision = &within->decision;
        within->patience_us = left_us > 0 ? left_us : 1; /* 0 would let into a leaky bucket whose turn is too late */
        if (!tgpy_limiter_with(object, arguments->values, arguments->count, arguments->names, ask_within, within, asked))
            return false;
        if (!*asked)
            return true;
        if (decision->allowed)
            return sleep_us(limiter, decision->delay_us) || give_back(limiter, &within->decision);
        if (decision->degraded || decision->retry_after_us == TG_NEVER || decision->retry_after_us > left_us)
            return true;
        const uint64_t pause_us = decision->retry_after_us + jitter_us(decision->retry_after_us);
        if (!sleep_us(limiter, pause_us < left_us ? pause_us : left_us))
            return false;
    }
}

PyObject *
tgpy_limiter_wait(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    struct arguments arguments;
    struct within within;
    uint64_t timeout_us;
    bool asked = false;
    if (!split_timeout(args, count, names, &arguments))
        return NULL;
    const bool done = timeout_us_of(arguments.timeout, &timeout_us) &&
                      wait_in_line(self, &arguments, timeout_us, &within, &asked);
    Py_XDECREF(arguments.names);
    tgpy_limiter *limiter = (tgpy_limiter *)self;
    if (!done)
        return NULL;
    return asked ? tgpy_decision_new(limiter->state, self, &within.decision) : tgpy_limiter_unasked(self);
}

/* A method that is written in Python. */
static PyObject *
call_python(const char *module_name, const char *name, PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *function = module ? PyObject_GetAttrString(module, name) : NULL;
    PyObject *first = function ? PyTuple_Pack(1, self) : NULL;
    PyObject *all = first ? PySequence_Concat(first, args) : NULL;
    PyObject *result = all ? PyObject_Call(function, all, kwargs) : NULL;
    Py_XDECREF(all);
    Py_XDECREF(first);
    Py_XDECREF(function);
    Py_XDECREF(module);
    return result;
}

/* It is the event loop that sleeps. */
PyObject *
tgpy_limiter_wait_async(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return call_python("tidegate._wait", "wait_async", self, args, kwargs);
}

PyObject *
tgpy_limiter_reserve(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return call_python("tidegate._reservation", "Reservation", self, args, kwargs);
}
