/* The fields of a request's judgements on the answer that goes out: what an ASGI face would do for every message in
 * Python, where it costs more than the decision itself.
 * Must not enter: deciding, and which fields there are. */
#include "ext.h"

#include <string.h>

#define NOT_JUDGEMENTS "expected a list of Judgement"

/* Whose fields the client sees: of the last that refuses, else the tightest's, by the smallest remaining, then the longest
 * reset; of equals the first.
 * Borrowed; NULL where the list is empty, or with an exception set. */
static tgpy_judgement *
shown_of(const tgpy_state *state, PyObject *judgements)
{
    tgpy_judgement *shown = NULL;
    const Py_ssize_t count = PyList_Size(judgements);
    bool telling = false, refused = false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(judgements, i);
        if (Py_TYPE(item) != state->judgement_type) {
            PyErr_SetString(PyExc_TypeError, NOT_JUDGEMENTS);
            return NULL;
        }
        tgpy_judgement *judgement = (tgpy_judgement *)item;
        const tgpy_decision *decision = judgement->decision;
        const bool tells = judgement->outcome != TG_UNMATCHED && judgement->outcome != TG_EXEMPT &&
                           !decision->degraded;
        const bool tighter = !shown || (tells && !telling) ||
                             (tells && (decision->remaining < shown->decision->remaining ||
                                        (decision->remaining == shown->decision->remaining &&
                                         decision->reset_after_us > shown->decision->reset_after_us)));
        if (judgement->status || (!refused && tighter)) {
            shown = judgement;
            telling = tells;
            refused = judgement->status != 0;
        }
    }
    return shown;
}

/* A name of a pair in scope order, or NULL where the pair is none: the server will say so. Borrowed from the pair. */
static bool
name_of(PyObject *pair, tg_text *name)
{
    PyObject *first = PyTuple_Check(pair) && PyTuple_Size(pair) > 0  ? PyTuple_GetItem(pair, 0)
                      : PyList_Check(pair) && PyList_Size(pair) > 0 ? PyList_GetItem(pair, 0)
                                                                    : NULL;
    if (!first || !PyBytes_Check(first))
        return false;
    *name = (tg_text){ PyBytes_AsString(first), (size_t)PyBytes_Size(first) };
    return true;
}

/* `lower` is in lower case. */
static bool
same_name(tg_text name, tg_text lower)
{
    if (name.length != lower.length)
        return false;
    for (size_t i = 0; i < name.length; i++) {
        const char byte = name.data[i];
        if ((byte >= 'A' && byte <= 'Z' ? byte + ('a' - 'A') : byte) != lower.data[i])
            return false;
    }
    return true;
}

static bool
is_among(PyObject *pair, PyObject *fields)
{
    tg_text name, field;
    const Py_ssize_t count = PyList_Size(fields);
    if (!name_of(pair, &name))
        return false;
    for (Py_ssize_t i = 0; i < count; i++)
        if (name_of(PyList_GetItem(fields, i), &field) && same_name(name, field))
            return true;
    return false;
}

/* A new list: the headers with the fields in place of any of the same name. */
static PyObject *
merge(PyObject *headers, tgpy_judgement *judgement)
{
    static const tg_text content_type = { "content-type", 12 };
    PyObject *fields = tgpy_judgement_fields((PyObject *)judgement);
    PyObject *merged = headers ? PySequence_List(headers) : PyList_New(0);
    tg_text name;
    bool done = fields && merged;
    /* On a refusal the body may be the application's own by now, an error handler's: its type stays. */
    for (Py_ssize_t i = done && judgement->status ? PyList_Size(fields) : 0; done && i-- > 0;)
        if (name_of(PyList_GetItem(fields, i), &name) && same_name(name, content_type))
            done = PyList_SetSlice(fields, i, i + 1, NULL) == 0;
    for (Py_ssize_t i = done ? PyList_Size(merged) : 0; done && i-- > 0;)
        if (is_among(PyList_GetItem(merged, i), fields))
            done = PyList_SetSlice(merged, i, i + 1, NULL) == 0;
    if (done) {
        const Py_ssize_t end = PyList_Size(merged);
        done = PyList_SetSlice(merged, end, end, fields) == 0;
    }
    Py_XDECREF(fields);
    if (!done)
        Py_CLEAR(merged);
    return merged;
}

/* ---- the common answer: let through, by an application that writes no such fields itself ---- */

/* A new reference to (name, value). */
static PyObject *
pair_of(tgpy_pair *last, const tg_field *field)
{
    if (last->name == field->name.data && last->pair) {
        PyObject *value = PyTuple_GetItem(last->pair, 1);
        if ((size_t)PyBytes_Size(value) == field->value.length &&
            memcmp(PyBytes_AsString(value), field->value.data, field->value.length) == 0)
            return Py_NewRef(last->pair);
    }
    if (last->name != field->name.data) {
        char lower[64];
        const size_t length = field->name.length < sizeof lower ? field->name.length : sizeof lower;
        for (size_t i = 0; i < length; i++) {
            const char byte = field->name.data[i];
            lower[i] = (char)(byte >= 'A' && byte <= 'Z' ? byte + ('a' - 'A') : byte);
        }
        PyObject *made = PyBytes_FromStringAndSize(lower, (Py_ssize_t)length);
        if (!made)
            return NULL;
        Py_XDECREF(last->lower); /* bytes: letting go of them runs no code */
        Py_CLEAR(last->pair);
        last->lower = made;
        last->name = field->name.data;
    }
    PyObject *value = PyBytes_FromStringAndSize(field->value.data, (Py_ssize_t)field->value.length);
    PyObject *pair = value ? PyTuple_Pack(2, last->lower, value) : NULL;
    Py_XDECREF(value);
    if (pair) {
        Py_XDECREF(last->pair);
        last->pair = Py_NewRef(pair);
    }
    return pair;
}

static bool
may_be_ours(PyObject *pair)
{
    tg_text name;
    return !name_of(pair, &name) || (name.length >= 12 && (name.data[0] | 0x20) == 'x' && (name.data[1] == '-') &&
                                     (name.data[2] | 0x20) == 'r');
}

/* As merge(), of a judgement that lets through and headers in a list. NULL without an exception: take the long way. */
static PyObject *
merge_common(tgpy_state *state, PyObject *headers, const tgpy_judgement *judgement)
{
    const Py_ssize_t count = PyList_Size(headers);
    for (Py_ssize_t i = 0; i < count; i++)
        if (may_be_ours(PyList_GetItem(headers, i)))
            return NULL;
    tg_answer made;
    const tg_answer *answer = &made;
    if (judgement->answered) {
        made.field_count = 0;
        answer = judgement->answer ? judgement->answer : &made;
    } else {
        tg_judgement read; /* only what an allowed answer tells of */
        read.outcome = judgement->outcome;
        read.status = 0;
        read.missing[0] = '\0';
        read.challenged = read.shadow_denied = false;
        read.decision.degraded = judgement->decision->degraded;
        read.decision.limit = judgement->decision->limit;
        read.decision.remaining = judgement->decision->remaining;
        read.decision.reset_after_us = judgement->decision->reset_after_us;
        read.decision.retry_after_us = 0;
        tg_answer_make(&read, &made);
    }
    if (answer->field_count > TGPY_PAIRS_MAX)
        return NULL;
    for (size_t i = 0; i < answer->field_count; i++)
        if (answer->fields[i].name.data[0] != 'X') /* a family that may_be_ours() does not look for */
            return NULL;
    PyObject *merged = PyList_New(count + (Py_ssize_t)answer->field_count);
    for (Py_ssize_t i = 0; merged && i < count; i++)
        PyList_SetItem(merged, i, Py_NewRef(PyList_GetItem(headers, i)));
    for (size_t i = 0; merged && i < answer->field_count; i++) {
        PyObject *pair = pair_of(&state->pairs[i], &answer->fields[i]);
        if (pair)
            PyList_SetItem(merged, count + (Py_ssize_t)i, pair);
        else
            Py_CLEAR(merged);
    }
    return merged;
}

/* The messages that open an answer; an accepted WebSocket tells its client the numbers too. */
static bool
opens_answer(PyObject *type)
{
    if (!type || !PyUnicode_Check(type))
        return false;
    switch (PyUnicode_GetLength(type)) {
    case 16: return PyUnicode_CompareWithASCIIString(type, "websocket.accept") == 0;
    case 19: return PyUnicode_CompareWithASCIIString(type, "http.response.start") == 0;
    case 29: return PyUnicode_CompareWithASCIIString(type, "websocket.http.response.start") == 0;
    default: return false;
    }
}

/* A new reference to the message to send: the very same, or a copy with the fields. Applications may send one constant
 * message, and a response object may be sent twice, so neither the message nor its headers are changed. */
static PyObject *
with_fields(tgpy_state *state, PyObject *judgements, PyObject *message)
{
    if (!PyDict_Check(message) || PyList_Size(judgements) == 0)
        return Py_NewRef(message);
    PyObject *type = PyDict_GetItemWithError(message, state->names[NAME_type]);
    if (!opens_answer(type))
        return PyErr_Occurred() ? NULL : Py_NewRef(message);
    tgpy_judgement *shown = shown_of(state, judgements);
    if (!shown) /* looking up the type may have run a key's own comparison, which emptied the list */
        return PyErr_Occurred() ? NULL : Py_NewRef(message);
    Py_INCREF((PyObject *)shown); /* reading the headers may run code that empties the list */
    PyObject *headers = PyDict_GetItemWithError(message, state->names[NAME_headers]);
    PyObject *merged = NULL;
    if (headers && PyList_CheckExact(headers) && shown->status == 0)
        merged = merge_common(state, headers, shown);
    if (!merged && !PyErr_Occurred())
        merged = merge(headers, shown);
    Py_DECREF((PyObject *)shown);
    PyObject *copy = merged ? PyDict_Copy(message) : NULL;
    if (copy && PyDict_SetItem(copy, state->names[NAME_headers], merged) != 0)
        Py_CLEAR(copy);
    Py_XDECREF(merged);
    return copy;
}

/* What asgi_send() gives: `self` is (judgements, send, module, scope). Where a limit is charged by outcome it has left
 * scope["tidegate_settle"], which is told what is answered and then sends it. */
static PyObject *
send_message(PyObject *self, PyObject *message)
{
    tgpy_state *state = PyModule_GetState(PyTuple_GetItem(self, 2));
    PyObject *scope = PyTuple_GetItem(self, 3), *send = PyTuple_GetItem(self, 1), *sent = NULL;
    PyObject *out = with_fields(state, PyTuple_GetItem(self, 0), message);
    PyObject *settle = out && scope != Py_None ? PyDict_GetItemWithError(scope, state->names[NAME_tidegate_settle]) : NULL;
    if (settle) {
        Py_INCREF(settle); /* it may take itself out of the scope */
        sent = PyObject_CallFunctionObjArgs(settle, out, send, NULL);
        Py_DECREF(settle);
    } else if (out && !PyErr_Occurred()) {
        sent = PyObject_CallFunctionObjArgs(send, out, NULL);
    }
    Py_XDECREF(out);
    return sent;
}

PyObject *
tgpy_bind_send(PyObject *module, PyObject *judgements, PyObject *send, PyObject *scope)
{
    /* A built-in function bound to a tuple: the cheapest callable there is, to make as to call. */
    static PyMethodDef definition = { "send", send_message, METH_O,
                                      "send(message)\n--\n\nSends an ASGI message, with the limits' fields if it opens "
                                      "an answer." };
    PyObject *self = PyTuple_Pack(4, judgements, send, module, scope);
    PyObject *bound = self ? PyCFunction_NewEx(&definition, self, NULL) : NULL;
    Py_XDECREF(self);
    return bound;
}

PyObject *
tgpy_asgi_send(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if ((count == 2 || (count == 3 && PyDict_Check(args[2]))) && PyList_Check(args[0]) && PyCallable_Check(args[1]))
        return tgpy_bind_send(module, args[0], args[1], count == 3 ? args[2] : Py_None);
    PyErr_SetString(PyExc_TypeError, "asgi_send() takes a list of Judgement, a callable and perhaps a scope");
    return NULL;
}

PyObject *
tgpy_shown(PyObject *module, PyObject *judgements)
{
    if (!PyList_Check(judgements)) {
        PyErr_SetString(PyExc_TypeError, NOT_JUDGEMENTS);
        return NULL;
    }
    tgpy_judgement *shown = shown_of(PyModule_GetState(module), judgements);
    if (!shown && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no judgement has been made");
    return Py_XNewRef((PyObject *)shown);
}
