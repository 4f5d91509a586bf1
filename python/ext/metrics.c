/* A store's metrics as a text, which csrc/core/metrics.c writes. */
#include "ext.h"

#include <string.h>

static void
collect(void *context, tg_text piece)
{
    PyObject **list = context; /* NULL once memory has run out */
    PyObject *bytes = *list ? PyBytes_FromStringAndSize(piece.data, (Py_ssize_t)piece.length) : NULL;
    if (*list && (!bytes || PyList_Append(*list, bytes) != 0))
        Py_CLEAR(*list);
    Py_XDECREF(bytes);
}

PyObject *
tgpy_store_metrics(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const char *const words[] = { "text", "json", "prometheus" };
    static const tg_metrics_format formats[] = { TG_METRICS_TEXT, TG_METRICS_JSON, TG_METRICS_PROMETHEUS };
    tgpy_state *state = PyModule_GetState(module);
    size_t format = sizeof words / sizeof words[0];
    if (count != 2 || (Py_TYPE(args[0]) != state->limiter_type && Py_TYPE(args[0]) != state->gate_type)) {
        PyErr_SetString(PyExc_TypeError, "store_metrics() takes a Limiter or a Gate and a format");
        return NULL;
    }
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (PyUnicode_Check(args[1]) && PyUnicode_CompareWithASCIIString(args[1], words[i]) == 0)
            format = i;
    if (format == sizeof words / sizeof words[0]) {
        PyErr_Format(PyExc_ValueError, "the format is %R, expected \"text\", \"json\" or \"prometheus\"", args[1]);
        return NULL;
    }
    const bool limiter = Py_TYPE(args[0]) == state->limiter_type;
    if (limiter ? !((tgpy_limiter *)args[0])->limiter : !((tgpy_gate *)args[0])->gate) {
        PyErr_SetString(PyExc_ValueError, "tidegate is switched off: no store is open");
        return NULL;
    }
    PyObject *pieces = PyList_New(0), *empty = PyBytes_FromString(""), *text = NULL;
    tg_error error;
    const tg_status status = pieces && empty ? tg_store_write_metrics(tgpy_owner_store(state, args[0]), formats[format],
                                                                      collect, &pieces, &error)
                                             : TG_OK;
    if (status != TG_OK) {
        tgpy_raise(state, &error, NULL);
    } else if (pieces && empty) {
        PyObject *joined = PyObject_CallMethod(empty, "join", "O", pieces);
        if (joined)
            text = PyUnicode_FromEncodedObject(joined, "utf-8", "replace");
        Py_XDECREF(joined);
    }
    Py_XDECREF(pieces);
    Py_XDECREF(empty);
    tgpy_log_notices(state);
    return text;
}
