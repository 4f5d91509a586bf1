/* Python values to C ones: texts, costs, times. */
#include "ext.h"

#include <math.h>
#include <string.h>

TGPY_HOT bool
tgpy_text(PyObject *object, tg_text *text, PyObject **made)
{
    *made = NULL;
    Py_ssize_t length = 0;
    if (PyUnicode_Check(object)) {
        text->data = PyUnicode_AsUTF8AndSize(object, &length); /* an ASCII str lends its own buffer */
        if (!text->data) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
                return false;
            PyErr_Clear();
            /* Not surrogateescape: that would make a str equal to another one's bytes, and a count shared by accident. */
            *made = PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass");
            if (!*made)
                return false;
            text->data = PyBytes_AsString(*made);
            length = PyBytes_Size(*made);
        }
        text->length = (size_t)length;
        return true;
    }
    if (PyBytes_Check(object)) {
        char *data = NULL;
        if (PyBytes_AsStringAndSize(object, &data, &length) != 0)
            return false;
        *text = (tg_text){ data, (size_t)length };
        return true;
    }
    return false;
}

bool
tgpy_text_argument(PyObject *object, const char *name, tg_text *text, PyObject **made)
{
    *made = NULL;
    *text = (tg_text){ NULL, 0 };
    if (!object || object == Py_None)
        return true;
    if (!PyUnicode_Check(object)) {
        PyObject *type = PyType_GetName(Py_TYPE(object));
        if (type)
            PyErr_Format(PyExc_TypeError, "%s must be str, not %U", name, type);
        Py_XDECREF(type);
        return false;
    }
    return tgpy_text(object, text, made);
}

PyObject *
tgpy_path(PyObject *object)
{
    if (!object || object == Py_None)
        return Py_NewRef(Py_None);
    PyObject *path = PyOS_FSPath(object);
    if (path && PyBytes_Check(path)) {
        PyObject *decoded = PyUnicode_DecodeFSDefaultAndSize(PyBytes_AsString(path), PyBytes_Size(path));
        Py_DECREF(path);
        path = decoded;
    }
    return path;
}

PyObject *
tgpy_sequence(PyObject *object, const char *expected)
{
    if (PyTuple_Check(object) || PyList_Check(object))
        return Py_NewRef(object);
    PyObject *tuple = PySequence_Check(object) && !PyUnicode_Check(object) ? PySequence_Tuple(object) : NULL;
    if (!tuple && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, expected);
    return tuple;
}

PyObject *
tgpy_str(tg_text text)
{
    return PyUnicode_DecodeUTF8(text.data ? text.data : "", (Py_ssize_t)text.length, "surrogateescape");
}

bool
tgpy_cost(PyObject *object, uint64_t *cost)
{
    PyObject *number = object;
    /* True is an int to Python; as a cost it is a slip of the pen. */
    if (PyBool_Check(object) || (!PyLong_Check(object) && !PyIndex_Check(object))) {
        PyObject *type = PyType_GetName(Py_TYPE(object));
        if (type)
            PyErr_Format(PyExc_TypeError, "cost must be a whole number, an int, not %U", type);
        Py_XDECREF(type);
        return false;
    }
    if (PyLong_CheckExact(object))
        Py_INCREF(number);
    else
        number = PyNumber_Index(object);
    if (!number)
        return false;
    const unsigned long long value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    const bool beyond = value == (unsigned long long)-1 && PyErr_Occurred();
    if (beyond) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return false;
        PyErr_Clear();
    }
    if (beyond || value > TG_LIMIT_MAX) {
        PyErr_Format(PyExc_ValueError, "cost must be 0 to %llu, not %R", (unsigned long long)TG_LIMIT_MAX, object);
        return false;
    }
    *cost = value;
    return true;
}

bool
tgpy_timeout(double seconds, uint64_t *timeout_us)
{
    if (!(seconds > 0 && seconds <= 2.0)) {
        PyErr_SetString(PyExc_ValueError, "timeout must be more than 0 and at most 2 seconds");
        return false;
    }
    const double us = ceil(seconds * 1e6);
    *timeout_us = us < 1 ? 1 : (uint64_t)us;
    return true;
}

PyObject *
tgpy_call_with_tuple(PyObject *callable, tgpy_called *called, PyObject *args, PyObject *kwargs)
{
    enum { ARGS_MAX = 4 };
    PyObject *given[ARGS_MAX];
    const Py_ssize_t count = PyTuple_Size(args);
    if (count > ARGS_MAX || (kwargs && PyDict_Size(kwargs) > 0)) {
        PyErr_Format(PyExc_TypeError, "expected at most %d arguments, and none by name", ARGS_MAX);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        given[i] = PyTuple_GetItem(args, i);
    return called(callable, given, (size_t)count, NULL);
}
