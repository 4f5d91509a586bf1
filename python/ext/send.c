/* The fields of a request's judgements on the answer that goes out: what an ASGI face would do for every message in
 * Python, where it costs more than the decision itself.
 * Must not enter: deciding, and which fields there are. */
#include "ext.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

#define NOT_JUDGEMENTS "expected a list of Judgement"

/* Whose fields the client sees: of the last that refuses, else the tightest's, by the smallest remaining, then the longest
 * reset; of equals the first.
 * Borrowed; NULL where the list is empty, or with an exception set. */
static inline tgpy_judgement *
shown_of(const tgpy_state *state, PyObject *judgements)
{
    tgpy_judgement *shown = NULL;
    if (PyList_CheckExact(judgements) && Py_SIZE(judgements) == 1) { /* there is nothing to choose from */
        PyObject *only = PyList_GetItem(judgements, 0);
        if (Py_TYPE(only) == state->judgement_type)
            return (tgpy_judgement *)only;
    }
    const Py_ssize_t count = PyList_Check(judgements) ? Py_SIZE(judgements) : 0;
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

static bool
is_last(const tgpy_pair *last, const tg_field *field)
{
    return last->name == field->name.data && last->length == field->value.length &&
           memcmp(last->value, field->value.data, field->value.length) == 0;
}

/* A new pair (name, value) for a place of the list. */
static PyObject *
pair_of(tgpy_state *state, const tgpy_pair *last, const tg_field *field)
{
    PyObject *name = last->name == field->name.data ? Py_NewRef(last->lower) : tgpy_lower_name(state, field->name);
    PyObject *value = name ? PyBytes_FromStringAndSize(field->value.data, (Py_ssize_t)field->value.length) : NULL;
    PyObject *pair = value ? PyTuple_New(2) : NULL;
    if (!pair) {
        Py_XDECREF(name);
        Py_XDECREF(value);
        return NULL;
    }
    PyTuple_SetItem(pair, 0, name);
    PyTuple_SetItem(pair, 1, value);
    return pair;
}

/* Steals the pair. Makes nothing: see fields_of. */
static bool
put_pair(tgpy_state *state, size_t at, const tg_field *field, PyObject *pair)
{
    tgpy_pair *last = &state->pairs[at];
    if (last->name != field->name.data) {
        Py_XDECREF(last->lower); /* bytes: letting go of them runs no code */
        last->lower = Py_NewRef(PyTuple_GetItem(pair, 0));
        last->name = field->name.data;
    }
    last->length = field->value.length;
    memcpy(last->value, field->value.data, field->value.length);
    return PyList_SetItem(state->fields, (Py_ssize_t)at, pair) == 0;
}

/* Makes the list long enough, of places that hold nothing yet. */
static TGPY_COLD bool
begin_fields(tgpy_state *state, size_t count, unsigned turn)
{
    PyObject *made = PyList_New((Py_ssize_t)count), *old = state->fields;
    for (size_t i = 0; made && i < count; i++)
        PyList_SetItem(made, (Py_ssize_t)i, Py_NewRef(Py_None));
    if (!made || state->turn != turn) {
        Py_XDECREF(made);
        return false;
    }
    for (size_t i = 0; i < count; i++)
        state->pairs[i].length = TGPY_PAIR_VALUE_MAX + 1; /* no value is that long: nothing is the last one */
    state->fields = made;
    Py_XDECREF(old); /* of tuples of bytes */
    return true;
}

/* The fields as a list that nobody else sees, and that stays as it is until the next answer. Borrowed.
 *
 * Whatever the collector watches over may set it off when it is made, and what that runs, a finalizer or another thread, may
 * send an answer too. That one counts up `turn`, and the list is then its own. NULL without an exception: so it was. */
static PyObject *
fields_of(tgpy_state *state, const tg_answer *answer, unsigned turn)
{
    const size_t count = answer->field_count;
    if ((!state->fields || (size_t)Py_SIZE(state->fields) != count) && !begin_fields(state, count, turn))
        return NULL;
    for (size_t i = 0; i < count; i++) {
        if (is_last(&state->pairs[i], &answer->fields[i]))
            continue;
        PyObject *pair = pair_of(state, &state->pairs[i], &answer->fields[i]);
        if (!pair || state->turn != turn) {
            Py_XDECREF(pair);
            return NULL;
        }
        if (!put_pair(state, i, &answer->fields[i], pair))
            return NULL;
    }
    return state->fields;
}

/* The same as a list of its own. */
static TGPY_COLD PyObject *
own_fields(tgpy_state *state, const tg_answer *answer)
{
    static const tgpy_pair none;
    PyObject *fields = PyList_New(0);
    for (size_t i = 0; fields && i < answer->field_count; i++) {
        PyObject *pair = pair_of(state, &none, &answer->fields[i]);
        if (!pair || PyList_Append(fields, pair) != 0)
            Py_CLEAR(fields);
        Py_XDECREF(pair);
    }
    return fields;
}

/* A new list: the headers, and behind them the fields. */
static PyObject *
join_fields(tgpy_state *state, PyObject *headers, const tg_answer *answer)
{
    const unsigned turn = ++state->turn;
    PyObject *fields = Py_XNewRef(fields_of(state, answer, turn));
    PyObject *joined = fields ? PySequence_Concat(headers, fields) : NULL;
    Py_XDECREF(fields);
    if (__builtin_expect(state->turn == turn, 1) || PyErr_Occurred())
        return joined;
    Py_XDECREF(joined); /* the list may have become another answer's under it */
    fields = own_fields(state, answer);
    joined = fields ? PySequence_Concat(headers, fields) : NULL;
    Py_XDECREF(fields);
    return joined;
}

enum { SHORTEST_FIELD = 17 }; /* x-ratelimit-limit */

static bool
may_be_ours(PyObject *pair)
{
    tg_text name;
    if (PyTuple_CheckExact(pair) && Py_SIZE(pair) > 0) {
        PyObject *first = PyTuple_GetItem(pair, 0);
        if (PyBytes_CheckExact(first) && Py_SIZE(first) < SHORTEST_FIELD)
            return false;
    }
    return !name_of(pair, &name) || (name.length >= SHORTEST_FIELD && (name.data[0] | 0x20) == 'x' && name.data[1] == '-' &&
                                     (name.data[2] | 0x20) == 'r');
}

static bool
is_common(const tg_answer *answer)
{
    for (size_t i = 0; i < answer->field_count; i++)
        if (answer->fields[i].name.data[0] != 'X' || /* a family that may_be_ours() does not look for */
            answer->fields[i].value.length > TGPY_PAIR_VALUE_MAX)
            return false;
    return answer->field_count <= TGPY_PAIRS_MAX;
}

/* As merge(), of a judgement that lets through and headers in a list. NULL without an exception: take the long way. */
static TGPY_HOT PyObject *
merge_common(tgpy_state *state, PyObject *headers, const tgpy_judgement *judgement)
{
    const Py_ssize_t count = Py_SIZE(headers);
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
    return is_common(answer) ? join_fields(state, headers, answer) : NULL;
}

/* The messages that open an answer; an accepted WebSocket tells its client the numbers too. */
static bool
opens_answer_by_text(PyObject *type)
{
    switch (PyUnicode_GetLength(type)) {
    case 16: return PyUnicode_CompareWithASCIIString(type, "websocket.accept") == 0;
    case 19: return PyUnicode_CompareWithASCIIString(type, "http.response.start") == 0;
    case 29: return PyUnicode_CompareWithASCIIString(type, "websocket.http.response.start") == 0;
    default: return false;
    }
}

static bool
opens_answer(tgpy_state *state, PyObject *type)
{
    if (type == state->body)
        return false;
    if (type == state->opening)
        return true;
    if (!PyUnicode_CheckExact(type))
        return PyUnicode_Check(type) && opens_answer_by_text(type);
    const bool opens = opens_answer_by_text(type);
    PyObject **last = opens ? &state->opening : &state->body;
    Py_XDECREF(*last); /* a str: letting go of it runs no code */
    *last = Py_NewRef(type);
    return opens;
}

/* A new reference to a copy of the message with the fields; or to the very same, where `shown` has gone meanwhile.
 * Applications may send one constant message, and a response object may be sent twice, so neither the message nor its headers
 * are changed. */
static PyObject *
with_fields(tgpy_state *state, tgpy_judgement *shown, PyObject *message)
{
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

/* ---- the callable ---- */

typedef struct sender {
    PyObject_HEAD
    tgpy_called *called;
    tgpy_state *state;
    PyObject *judgements, *send;
    PyObject *scope; /* NULL: nobody charges by outcome */
} sender;

/* Where a limit is charged by outcome it has left scope["tidegate_settle"], which is told what is answered and then sends. */
static PyObject *
send_settled(sender *self, PyObject *message, bool *settled)
{
    PyObject *settle = PyDict_GetItemWithError(self->scope, self->state->names[NAME_tidegate_settle]);
    *settled = settle != NULL || PyErr_Occurred();
    if (!settle)
        return NULL;
    Py_INCREF(settle); /* it may take itself out of the scope */
    PyObject *sent = PyObject_CallFunctionObjArgs(settle, message, self->send, NULL);
    Py_DECREF(settle);
    return sent;
}

static PyObject *
send_message(sender *self, PyObject *message)
{
    tgpy_state *state = self->state;
    PyObject *type = PyDict_Check(message) ? PyDict_GetItemWithError(message, state->names[NAME_type]) : NULL;
    PyObject *out = NULL;
    if (type && opens_answer(state, type)) {
        tgpy_judgement *shown = shown_of(state, self->judgements);
        out = shown ? with_fields(state, shown, message) : NULL;
    }
    if (!out) {
        if (PyErr_Occurred())
            return NULL;
        out = Py_NewRef(message);
    }
    bool settled = false;
    PyObject *sent = state->outcomes && self->scope ? send_settled(self, out, &settled) : NULL;
    if (!settled)
        sent = PyObject_CallFunctionObjArgs(self->send, out, NULL);
    Py_DECREF(out);
    return sent;
}

static TGPY_HOT PyObject *
sender_called(PyObject *object, PyObject *const *args, size_t count, PyObject *names)
{
    if (tgpy_count(count) != 1 || (names && PyTuple_Size(names) > 0)) {
        PyErr_SetString(PyExc_TypeError, "send() takes one argument, the message");
        return NULL;
    }
    return send_message((sender *)object, args[0]);
}

static PyObject *
sender_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return tgpy_call_with_tuple(object, sender_called, args, kwargs);
}

TGPY_HOT PyObject *
tgpy_bind_send(tgpy_state *state, PyObject *judgements, PyObject *send, PyObject *scope)
{
    sender *self = PyObject_GC_New(sender, state->sender_type);
    if (!self)
        return NULL;
    self->called = sender_called;
    self->state = state;
    self->judgements = Py_NewRef(judgements);
    self->send = Py_NewRef(send);
    self->scope = Py_XNewRef(scope);
    PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

static int
sender_traverse(PyObject *object, visitproc visit, void *arg)
{
    const sender *self = (sender *)object;
    Py_VISIT(self->judgements);
    Py_VISIT(self->send);
    Py_VISIT(self->scope);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int
sender_clear(PyObject *object)
{
    sender *self = (sender *)object;
    PyObject *judgements = self->judgements, *send = self->send, *scope = self->scope;
    /* It can still be called, by what goes with it: then it sends to nobody. */
    self->judgements = Py_NewRef(Py_None);
    self->send = Py_NewRef(Py_None);
    self->scope = NULL;
    Py_DECREF(judgements);
    Py_DECREF(send);
    Py_XDECREF(scope);
    return 0;
}

static TGPY_HOT void
sender_dealloc(PyObject *object)
{
    sender *self = (sender *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_DECREF(self->judgements);
    Py_DECREF(self->send);
    Py_XDECREF(self->scope);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMemberDef sender_members[] = {
    { TGPY_CALLED, T_PYSSIZET, offsetof(sender, called), READONLY, NULL },
    { NULL, 0, 0, 0, NULL },
};

static PyType_Slot sender_slots[] = {
    { Py_tp_doc, "Sends an ASGI message, with the limits' fields if it opens an answer. Made by asgi_send() and its kin only." },
    { Py_tp_dealloc, sender_dealloc },
    { Py_tp_traverse, sender_traverse },
    { Py_tp_clear, sender_clear },
    { Py_tp_call, sender_call },
    { Py_tp_members, sender_members },
    { 0, NULL },
};

PyType_Spec tgpy_sender_spec = {
    .name = "tidegate._core.Sender",
    .basicsize = sizeof(sender),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = sender_slots,
};

PyObject *
tgpy_tell_outcomes(PyObject *module, PyObject *Py_UNUSED(unused))
{
    ((tgpy_state *)PyModule_GetState(module))->outcomes = true;
    Py_RETURN_NONE;
}

PyObject *
tgpy_asgi_send(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if ((count == 2 || (count == 3 && PyDict_Check(args[2]))) && PyList_Check(args[0]) && PyCallable_Check(args[1]))
        return tgpy_bind_send(PyModule_GetState(module), args[0], args[1], count == 3 ? args[2] : NULL);
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
