/* Gate.explain_as: what tg_gate_explain says, as text or JSON. */
#include "ext.h"

#include <string.h>
#include <strings.h>

#define HEADERS_MAX 128

typedef struct collector {
    PyObject *pieces; /* a list of bytes; NULL: out of memory, raised */
} collector;

static void
collect(void *context, tg_text piece)
{
    collector *into = context;
    PyObject *bytes = into->pieces ? PyBytes_FromStringAndSize(piece.data, (Py_ssize_t)piece.length) : NULL;
    if (!bytes || PyList_Append(into->pieces, bytes) != 0)
        Py_CLEAR(into->pieces);
    Py_XDECREF(bytes);
}

static PyObject *
joined(PyObject *pieces)
{
    PyObject *none = PyBytes_FromStringAndSize("", 0);
    PyObject *whole = none ? PyObject_CallMethod(none, "join", "O", pieces) : NULL;
    Py_XDECREF(none);
    PyObject *text = whole ? tgpy_str((tg_text){ PyBytes_AsString(whole), (size_t)PyBytes_Size(whole) }) : NULL;
    Py_XDECREF(whole);
    return text;
}

/* Pairs of str or bytes, borrowed from `given`. */
static bool
read_headers(PyObject *given, tg_header headers[HEADERS_MAX], size_t *count, tg_text *host)
{
    *count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(given); i++) {
        PyObject *pair = PyTuple_GetItem(given, i), *made[2] = { NULL, NULL };
        tg_text texts[2];
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2 || i >= HEADERS_MAX ||
            !tgpy_text(PyTuple_GetItem(pair, 0), &texts[0], &made[0]) ||
            !tgpy_text(PyTuple_GetItem(pair, 1), &texts[1], &made[1]) || made[0] || made[1]) {
            Py_XDECREF(made[0]);
            Py_XDECREF(made[1]);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "headers must be at most 128 pairs of str or bytes");
            return false;
        }
        headers[*count].name = texts[0];
        headers[(*count)++].value = texts[1];
        if (texts[0].length == 4 && strncasecmp(texts[0].data, "host", 4) == 0)
            *host = texts[1];
    }
    return true;
}

PyObject *
tgpy_gate_explain_as(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "method", "path", "headers", "peer", "host", "user", "route", "cost", "json", NULL };
    tgpy_gate *gate = (tgpy_gate *)self;
    PyObject *given[7] = { NULL }, *headers = NULL, *cost = NULL, *made[7] = { NULL };
    int json = 0;
    uint64_t units = 1;
    tg_text texts[7];
    tg_header list[HEADERS_MAX];
    tg_request request = { .header_count = 0 };
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O!OOOOOp:explain_as", names, &given[0], &given[1], &PyTuple_Type,
                                     &headers, &given[2], &given[3], &given[4], &given[5], &cost, &json) ||
        (cost && !tgpy_cost(cost, &units)))
        return NULL;
    if (!gate->gate) {
        PyErr_SetString(PyExc_RuntimeError, "tidegate is switched off (TIDEGATE_ENABLED=0): no file is read");
        return NULL;
    }
    PyObject *text = NULL;
    bool good = true;
    for (size_t i = 0; good && i < 6; i++)
        good = tgpy_text_argument(given[i], names[i < 2 ? i : i + 1], &texts[i], &made[i]);
    if (good && (!headers || read_headers(headers, list, &request.header_count, &request.host))) {
        request.method = texts[0];
        request.path = texts[1];
        request.peer = texts[2];
        if (texts[3].length)
            request.host = texts[3];
        request.user = texts[4];
        request.route = texts[5];
        request.headers = list;
        tg_explanation *explanation = NULL;
        tg_error error;
        if (tg_gate_explain(gate->gate, &request, units, &explanation, &error) == TG_OK) {
            collector into = { PyList_New(0) };
            tg_explanation_write(explanation, json, collect, &into);
            text = into.pieces ? joined(into.pieces) : NULL;
            Py_XDECREF(into.pieces);
        } else {
            tgpy_raise(gate->state, &error, NULL);
        }
        tg_explanation_close(explanation);
    }
    for (size_t i = 0; i < 6; i++)
        Py_XDECREF(made[i]);
    return text;
}
