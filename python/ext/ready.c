/* What the *_async methods return while the store is in memory: an awaitable that is done already.
 *
 * The hit is made by the call. `await limiter.hit_async(...)` therefore never gives the loop a turn, and no cancellation can
 * fall between a hit that was taken and the decision that tells of it. */
#include "ext.h"

struct ready {
    PyObject_HEAD
    PyObject *value; /* NULL once it has been awaited */
};

PyObject *
tgpy_ready(tgpy_state *state, PyObject *value)
{
    if (!value)
        return NULL;
    struct ready *self = PyObject_New(struct ready, state->ready_type);
    if (self)
        self->value = value;
    else
        Py_DECREF(value);
    return (PyObject *)self;
}

static void
ready_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((struct ready *)self)->value);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *
take(PyObject *object)
{
    struct ready *self = (struct ready *)object;
    PyObject *value = self->value;
    if (!value)
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse an already awaited hit: each call is one hit, await it once");
    self->value = NULL;
    return value;
}

static PyObject *
ready_await(PyObject *self)
{
    return Py_NewRef(self);
}

static PySendResult
ready_send(PyObject *self, PyObject *Py_UNUSED(argument), PyObject **result)
{
    *result = take(self);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *
ready_next(PyObject *self)
{
    PyObject *value = take(self);
    if (value) {
        /* StopIteration carries the value; given as its one argument, so that a tuple would stay one value. */
        PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, value, NULL);
        Py_DECREF(value);
        if (stop)
            PyErr_SetObject(PyExc_StopIteration, stop);
        Py_XDECREF(stop);
    }
    return NULL;
}

static PyMethodDef ready_methods[] = {
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyType_Slot ready_slots[] = {
    { Py_tp_doc, "A hit that has been made: await it, once, for its decision." },
    { Py_tp_dealloc, ready_dealloc },
    { Py_am_await, ready_await },
    { Py_am_send, ready_send },
    { Py_tp_iter, PyObject_SelfIter },
    { Py_tp_iternext, ready_next },
    { Py_tp_methods, ready_methods },
    { 0, NULL },
};

PyType_Spec tgpy_ready_spec = {
    .name = "tidegate.Hit",
    .basicsize = sizeof(struct ready),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = ready_slots,
};
