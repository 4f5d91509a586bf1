/* Hold: what one reservation has taken, in C. tidegate/_reservation.py makes of it what people use in a `with`.
 * Must not enter: context managers, event loops. */
#include "ext.h"

#include <string.h>
#include <unistd.h>

typedef struct hold {
    PyObject_HEAD
    tgpy_state *state;
    PyObject *limiter;
    PyObject *decision;
    bool busy; /* another thread is settling it while a network is waited for */
    pid_t process; /* that has reserved. A child forked meanwhile has a copy, and would give back or charge once more */
    tg_reservation reservation;
} hold;

struct reserving {
    uint64_t lease_us;
    tg_reservation *reservation;
    bool full;
};

static tg_status
ask_reserve(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost, void *what,
            tg_error *error)
{
    struct reserving *reserving = what;
    const tg_status status = tg_limiter_reserve(limiter, dimensions, dimension_count, cost, reserving->lease_us,
                                                reserving->reservation, error);
    reserving->full = status == TG_E_STORE; /* its decision is on_store_failure's: no store's trouble reaches a request */
    return reserving->full ? TG_OK : status;
}

static bool
lease_us_of(PyObject *seconds, uint64_t *us)
{
    const double value = PyFloat_AsDouble(seconds);
    if (value == -1.0 && PyErr_Occurred())
        return false;
    if (!(value >= 1 && value <= 86400)) {
        PyErr_SetString(PyExc_ValueError, "lease is in seconds, 1 to 86400");
        return false;
    }
    *us = (uint64_t)(value * 1e6);
    return true;
}

PyObject *
tgpy_reserve(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    tgpy_state *state = PyModule_GetState(module);
    struct reserving reserving;
    bool asked;
    if (count < 2 || Py_TYPE(args[0]) != state->limiter_type) {
        PyErr_SetString(PyExc_TypeError, "expected a limiter, lease, *parts, cost=1, dims=None");
        return NULL;
    }
    if (!lease_us_of(args[1], &reserving.lease_us))
        return NULL;
    hold *self = PyObject_New(hold, state->hold_type);
    if (!self)
        return NULL;
    self->state = state;
    self->limiter = Py_NewRef(args[0]);
    self->decision = NULL;
    self->busy = false;
    self->process = getpid();
    memset(self->reservation.id, 0, sizeof self->reservation.id);
    reserving.reservation = &self->reservation;
    if (tgpy_limiter_with(args[0], args + 2, count - 2, names, ask_reserve, &reserving, &asked))
        self->decision = asked ? tgpy_decision_new(state, args[0], &self->reservation.decision)
                               : tgpy_limiter_unasked(args[0]);
    if (!self->decision)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
hold_dealloc(PyObject *object)
{
    hold *self = (hold *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->decision);
    Py_XDECREF(self->limiter);
    PyObject_Free(self);
    Py_DECREF(type);
}

static tg_limiter *
limiter_of(const hold *self)
{
    return ((tgpy_limiter *)self->limiter)->limiter;
}

/* Whether something is left for this process to settle. */
static bool
is_held(const hold *self)
{
    static const uint8_t nothing[sizeof self->reservation.id];
    return limiter_of(self) && memcmp(self->reservation.id, nothing, sizeof nothing) != 0 && self->process == getpid();
}

/* settle(actual) -> whether it is settled now */
static PyObject *
hold_settle(PyObject *object, PyObject *given)
{
    hold *self = (hold *)object;
    uint64_t actual;
    tg_error error;
    if (!tgpy_cost(given, &actual))
        return NULL;
    if (self->process != getpid())
        Py_RETURN_FALSE;
    if (!is_held(self) || self->busy)
        Py_RETURN_TRUE;
    tg_store *store = tg_limiter_store(limiter_of(self));
    if (!tgpy_may_block(self->state, store))
        return NULL;
    self->busy = true;
    PyThreadState *thread = tgpy_others_run(store);
    const tg_status status = tg_reservation_settle(limiter_of(self), &self->reservation, actual, &error);
    tgpy_others_stop(thread);
    self->busy = false;
    tgpy_log_notices(self->state);
    if (status != TG_OK && status != TG_E_STORE)
        return tgpy_raise(self->state, &error, NULL);
    return PyBool_FromLong(status == TG_OK);
}

/* renew(lease) -> whether it is held for that long */
static PyObject *
hold_renew(PyObject *object, PyObject *seconds)
{
    hold *self = (hold *)object;
    uint64_t lease_us;
    tg_error error;
    if (!lease_us_of(seconds, &lease_us))
        return NULL;
    if (!is_held(self) || self->busy)
        Py_RETURN_FALSE;
    tg_store *store = tg_limiter_store(limiter_of(self));
    if (!tgpy_may_block(self->state, store))
        return NULL;
    self->busy = true;
    PyThreadState *thread = tgpy_others_run(store);
    const tg_status status = tg_reservation_renew(limiter_of(self), &self->reservation, lease_us, &error);
    tgpy_others_stop(thread);
    self->busy = false;
    tgpy_log_notices(self->state);
    if (status != TG_OK && status != TG_E_STORE && status != TG_E_ARG)
        return tgpy_raise(self->state, &error, NULL);
    return PyBool_FromLong(status == TG_OK);
}

static PyObject *
get_decision(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((hold *)self)->decision);
}

static PyObject *
get_held(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(is_held((hold *)self));
}

static PyMethodDef hold_methods[] = {
    { "settle", hold_settle, METH_O,
      "settle($self, actual, /)\n--\n\n"
      "Makes it `actual` units, once; False: the store did not answer, and the lease's end decides; or another process has "
      "reserved." },
    { "renew", hold_renew, METH_O,
      "renew($self, lease, /)\n--\n\n"
      "Holds it for so many seconds from now; False: it has ended, or the store did not answer." },
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyGetSetDef hold_getset[] = {
    { "decision", get_decision, NULL, "Of the hit that took the units.", NULL },
    { "held", get_held, NULL, "Units are held by this process and not settled.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot hold_slots[] = {
    { Py_tp_doc, "What one reservation has taken: made by reserve() only." },
    { Py_tp_dealloc, hold_dealloc },
    { Py_tp_methods, hold_methods },
    { Py_tp_getset, hold_getset },
    { 0, NULL },
};

PyType_Spec tgpy_hold_spec = {
    .name = "tidegate.Hold",
    .basicsize = sizeof(hold),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = hold_slots,
};
