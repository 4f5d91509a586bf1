/* What tests need of the whole process: a clock for what names none, and a switch. Not for anything that serves. */
#include "ext.h"

tg_clock *
tgpy_default_clock(const tgpy_state *state)
{
    return state->default_clock ? ((tgpy_clock *)state->default_clock)->clock : NULL;
}

PyObject *
tgpy_use_clock(PyObject *module, PyObject *clock)
{
    tgpy_state *state = PyModule_GetState(module);
    if (clock != Py_None && Py_TYPE(clock) != state->clock_type) {
        PyErr_SetString(PyExc_TypeError, "clock must be a ManualClock or None");
        return NULL;
    }
    PyObject *before = state->default_clock;
    state->default_clock = clock == Py_None ? NULL : Py_NewRef(clock);
    return before ? before : Py_NewRef(Py_None);
}

PyObject *
tgpy_switch_off(PyObject *module, PyObject *off)
{
    tgpy_state *state = PyModule_GetState(module);
    if (!PyBool_Check(off)) {
        PyErr_SetString(PyExc_TypeError, "switch_off() takes True or False");
        return NULL;
    }
    const bool before = state->off;
    state->off = off == Py_True;
    return PyBool_FromLong(before);
}
