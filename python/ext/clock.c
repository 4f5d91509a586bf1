/* ManualClock: a clock that only its owner moves. */
#include "ext.h"

#include <math.h>

static bool
microseconds(PyObject *object, const char *name, uint64_t *us)
{
    if (!PyLong_Check(object) || PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int: microseconds", name);
        return false;
    }
    *us = PyLong_AsUnsignedLongLong(object);
    const bool beyond = *us == (uint64_t)-1 && PyErr_Occurred();
    if (!beyond && *us <= INT64_MAX)
        return true;
    if (beyond && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return false;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s must be 0 to 2**63 - 1, not %R", name, object);
    return false;
}

static PyObject *
clock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "now_us", NULL };
    PyObject *now = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:ManualClock", names, &now))
        return NULL;
    uint64_t now_us = UINT64_C(1700000000000000);
    if (now && !microseconds(now, "now_us", &now_us))
        return NULL;
    tgpy_state *state = tgpy_state_of_type(type);
    tg_error error;
    tg_clock *clock = NULL;
    if (tg_clock_open(now_us, &clock, &error) != TG_OK)
        return tgpy_raise(state, &error, NULL);
    tgpy_clock *self = PyObject_New(tgpy_clock, type);
    if (!self) {
        tg_clock_close(clock);
        return NULL;
    }
    self->state = state;
    self->clock = clock;
    return (PyObject *)self;
}

static void
clock_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    tg_clock_close(((tgpy_clock *)self)->clock);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *
clock_get_now(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(tg_clock_now_us(((tgpy_clock *)self)->clock));
}

static int
clock_set_now(PyObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    uint64_t now_us = 0;
    if (!value) {
        PyErr_SetString(PyExc_AttributeError, "now_us cannot be deleted");
        return -1;
    }
    if (!microseconds(value, "now_us", &now_us))
        return -1;
    tg_clock_set_us(((tgpy_clock *)self)->clock, now_us);
    return 0;
}

static PyObject *
clock_advance(PyObject *self, PyObject *seconds)
{
    const double value = PyFloat_AsDouble(seconds);
    if (value == -1.0 && PyErr_Occurred())
        return NULL;
    const double us = round(value * 1e6);
    if (!(us >= 0 && us < 9223372036854775808.0)) { /* 2^63; NaN fails too */
        PyErr_SetString(PyExc_ValueError, "advance() takes seconds from 0 up; set now_us to go back");
        return NULL;
    }
    tg_clock_advance_us(((tgpy_clock *)self)->clock, (uint64_t)us);
    Py_RETURN_NONE;
}

static PyObject *
clock_advance_us(PyObject *self, PyObject *by)
{
    uint64_t by_us = 0;
    if (!microseconds(by, "microseconds", &by_us))
        return NULL;
    tg_clock_advance_us(((tgpy_clock *)self)->clock, by_us);
    Py_RETURN_NONE;
}

static PyObject *
clock_repr(PyObject *self)
{
    return PyUnicode_FromFormat("ManualClock(now_us=%llu)",
                                (unsigned long long)tg_clock_now_us(((tgpy_clock *)self)->clock));
}

static PyMethodDef clock_methods[] = {
    { "advance", clock_advance, METH_O,
      "advance($self, seconds, /)\n--\n\nMoves the clock on, rounded to the nearest microsecond." },
    { "advance_us", clock_advance_us, METH_O, "advance_us($self, microseconds, /)\n--\n\nMoves the clock on, exactly." },
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyGetSetDef clock_getset[] = {
    { "now_us", clock_get_now, clock_set_now, "Microseconds; may be set back.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot clock_slots[] = {
    { Py_tp_doc, "ManualClock(now_us=1700000000000000)\n--\n\n"
                 "A clock that only its owner moves, for tests and for replaying logs.\n\n"
                 "A store opened with one is marked manual: it never opens as a real one, nor a real one with a manual\n"
                 "clock. Its distance to UTC is 0. Limiters of one store and one ManualClock share their counts." },
    { Py_tp_new, clock_new },
    { Py_tp_dealloc, clock_dealloc },
    { Py_tp_repr, clock_repr },
    { Py_tp_methods, clock_methods },
    { Py_tp_getset, clock_getset },
    { 0, NULL },
};

PyType_Spec tgpy_clock_spec = {
    .name = "tidegate.ManualClock",
    .basicsize = sizeof(tgpy_clock),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = clock_slots,
};
