/* Limiter: rules, a store, and the hit.
 *
 * The interpreter lock is kept during a decision in a table: letting it go and taking it back costs more than that does. It
 * is let go where a network is waited for, and where a store or a rules file is opened, which may wait for another process. */
#include "ext.h"

#include <stdlib.h>
#include <string.h>

#define CALL_PARTS_MAX (TG_DIMENSIONS_MAX * TG_PARTS_MAX)

static tgpy_limiter *
of(PyObject *self)
{
    return (tgpy_limiter *)self;
}

/* ---- the arguments of a hit ---- */

/* Borrowed texts of one call. No Python code runs between reading them and the decision, so the arguments stay as they are;
 * `made` holds what had to be encoded. */
struct call {
    uint64_t cost;
    size_t dimension_count;
    size_t part_count;
    size_t made_count;
    tg_dimension dimensions[CALL_PARTS_MAX];
    tg_part parts[CALL_PARTS_MAX];
    PyObject *made[CALL_PARTS_MAX];
    PyObject *dims; /* a dict of our own when the caller's mapping is none, else NULL */
};

static inline void
call_fini(struct call *call)
{
    for (size_t i = 0; i < call->made_count; i++)
        Py_DECREF(call->made[i]);
    Py_XDECREF(call->dims);
}

static bool
wrong_type(const char *what, PyObject *object)
{
    if (PyErr_Occurred())
        return false;
    PyObject *type = PyType_GetName(Py_TYPE(object));
    if (type)
        PyErr_Format(PyExc_TypeError, "%s must be str or bytes, not %U%s", what, type,
                     PyLong_Check(object) && !PyBool_Check(object) ? "; write str(value)" : "");
    Py_XDECREF(type);
    return false;
}

static inline bool
add_part(struct call *call, tg_text kind, PyObject *object, const char *what)
{
    if (call->part_count == CALL_PARTS_MAX) {
        PyErr_Format(PyExc_ValueError, "at most %d parts can be judged in one call", CALL_PARTS_MAX);
        return false;
    }
    tg_part *part = &call->parts[call->part_count++];
    PyObject *made;
    part->kind = kind;
    if (!tgpy_text(object, &part->value, &made))
        return wrong_type(what, object);
    if (made)
        call->made[call->made_count++] = made;
    return true;
}

static inline bool
positional(struct call *call, PyObject *const *args, Py_ssize_t count)
{
    if (count > TG_PARTS_MAX) {
        PyErr_Format(PyExc_ValueError, "one identity has at most %d parts, not %zd", TG_PARTS_MAX, count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (!add_part(call, (tg_text){ NULL, 0 }, args[i], "each part of an identity"))
            return false;
    call->dimensions[0] = (tg_dimension){ call->parts, (size_t)count };
    call->dimension_count = 1;
    return true;
}

/* {"ip+user": (a, u)}: one joint identity, its values in the order of its kinds. `flat`: a policy puts the values together
 * as its own `by` says, whatever they were given with, so each stands alone. */
static bool
add_dimension(struct call *call, tg_text kinds, PyObject *values, bool flat)
{
    const size_t first = call->part_count;
    const bool several = PyTuple_Check(values);
    const size_t value_count = several ? (size_t)PyTuple_Size(values) : 1;
    size_t kind_count = 1;
    for (size_t i = 0; i < kinds.length; i++)
        kind_count += kinds.data[i] == '+';
    if (kind_count != value_count || kind_count > TG_PARTS_MAX) {
        PyErr_Format(PyExc_ValueError, "a key of dims joins %zu kinds (at most %d) and its value is a tuple of as many, not %zu",
                     kind_count, TG_PARTS_MAX, value_count);
        return false;
    }
    for (size_t i = 0, from = 0; i < kind_count; i++) {
        size_t end = from;
        while (end < kinds.length && kinds.data[end] != '+')
            end++;
        const tg_text kind = { kinds.data + from, end - from };
        if (kind.length == 0 || memchr(kind.data, '|', kind.length)) {
            PyErr_SetString(PyExc_ValueError, "a key of dims is a kind such as \"ip\", or several joined by '+'");
            return false;
        }
        if (!add_part(call, kind, several ? PyTuple_GetItem(values, (Py_ssize_t)i) : values, "each value of dims"))
            return false;
        from = end + 1;
    }
    for (size_t i = first; flat && i < call->part_count; i++)
        call->dimensions[call->dimension_count++] = (tg_dimension){ &call->parts[i], 1 };
    if (!flat)
        call->dimensions[call->dimension_count++] = (tg_dimension){ &call->parts[first], call->part_count - first };
    return true;
}

static bool
by_kind(struct call *call, PyObject *dims, bool flat, bool remote)
{
    if (!PyDict_Check(dims) || remote) { /* another thread may change the dictionary while a network is waited for */
        if (!PyMapping_Check(dims) || PyUnicode_Check(dims) || PyBytes_Check(dims) || PyTuple_Check(dims) ||
            PyList_Check(dims)) {
            PyErr_SetString(PyExc_TypeError, "dims must be a mapping of kinds to values, such as {\"ip\": address}");
            return false;
        }
        call->dims = PyDict_New();
        if (!call->dims || PyDict_Update(call->dims, dims) != 0)
            return false;
        dims = call->dims;
    }
    Py_ssize_t position = 0;
    PyObject *key, *value;
    while (PyDict_Next(dims, &position, &key, &value)) {
        tg_text kinds;
        PyObject *made = NULL;
        if (!PyUnicode_Check(key) || !tgpy_text(key, &kinds, &made)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "the keys of dims must be str, such as \"ip\"");
            return false;
        }
        if (made) {
            Py_DECREF(made);
            PyErr_SetString(PyExc_ValueError, "a key of dims holds a lone surrogate");
            return false;
        }
        if (call->dimension_count >= TG_DIMENSIONS_MAX) {
            PyErr_Format(PyExc_ValueError, "one decision has at most %d dimensions", TG_DIMENSIONS_MAX);
            return false;
        }
        if (!add_dimension(call, kinds, value, flat))
            return false;
    }
    if (call->dimension_count == 0) {
        PyErr_SetString(PyExc_ValueError, "dims is empty: who is asking?");
        return false;
    }
    return true;
}

static __attribute__((noinline)) bool
parse_names(const tgpy_limiter *self, PyObject *const *args, Py_ssize_t count, PyObject *names, bool costs,
            struct call *call)
{
    PyObject *dims = NULL;
    if (names) {
        PyObject *const *interned = self->state->names;
        const Py_ssize_t name_count = PyTuple_Size(names);
        for (Py_ssize_t i = 0; i < name_count; i++) {
            PyObject *name = PyTuple_GetItem(names, i); /* interned by the compiler: the pointers are equal */
            if (costs && (name == interned[NAME_cost] || PyUnicode_Compare(name, interned[NAME_cost]) == 0)) {
                if (!tgpy_cost(args[count + i], &call->cost))
                    return false;
            } else if (name == interned[NAME_dims] || PyUnicode_Compare(name, interned[NAME_dims]) == 0) {
                dims = args[count + i] == Py_None ? NULL : args[count + i];
            } else {
                PyErr_Format(PyExc_TypeError, "unexpected keyword argument %R: expected %sdims", name,
                             costs ? "cost or " : "");
                return false;
            }
        }
    }
    if (dims && count > 0) {
        PyErr_SetString(PyExc_TypeError, "give positional parts, which are one identity, or dims, not both");
        return false;
    }
    if (dims)
        return by_kind(call, dims, self->composes, self->limiter && tg_store_remote(tg_limiter_store(self->limiter)));
    if (count == 0) {
        PyErr_SetString(PyExc_TypeError, "who is asking? give at least one part, or dims");
        return false;
    }
    return positional(call, args, count);
}

static inline bool
parse_call(const tgpy_limiter *self, PyObject *const *args, Py_ssize_t count, PyObject *names, bool costs,
           struct call *call)
{
    call->cost = 1;
    call->dimension_count = call->part_count = call->made_count = 0;
    call->dims = NULL;
    if (!names && count > 0) /* as most are called */
        return positional(call, args, count);
    return parse_names(self, args, count, names, costs, call);
}

/* Whether a store is to be asked: not where the limiter is switched off, nor while a test has switched all off. */
static inline bool
asks(const tgpy_limiter *self)
{
    return self->limiter && !self->state->off;
}

PyObject *
tgpy_limiter_unasked(PyObject *object)
{
    tgpy_limiter *self = of(object);
    if (!self->limiter)
        return Py_NewRef(self->off);
    const tg_rule *rules = NULL;
    const size_t rule_count = tg_limiter_rules(self->limiter, &rules);
    return tgpy_decision_unasked(self->state, rules, rule_count);
}

bool
tgpy_limiter_with(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names, tgpy_asker *asker, void *what,
                  bool *asked)
{
    tgpy_limiter *self = of(object);
    struct call call;
    *asked = false;
    bool done = parse_call(self, args, count, names, true, &call);
    const bool asking = asks(self);
    if (done && asking)
        done = tgpy_may_block(self->state, tg_limiter_store(self->limiter));
    if (done && asking) {
        tg_error error;
        PyThreadState *thread = tgpy_others_run(tg_limiter_store(self->limiter));
        const tg_status status = asker(self->limiter, call.dimensions, call.dimension_count, call.cost, what, &error);
        tgpy_others_stop(thread);
        *asked = done = status == TG_OK;
        if (!done)
            tgpy_raise(self->state, &error, NULL);
        tgpy_log_notices(self->state);
    }
    call_fini(&call);
    return done;
}

/* ---- hit and its kin ---- */

typedef tg_status (*decide_function)(tg_limiter *, const tg_dimension *, size_t, uint64_t, tg_decision *, tg_error *);

static inline PyObject *
decide(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names, decide_function function)
{
    tgpy_limiter *self = of(object);
    struct call call;
    PyObject *made = NULL;
    if (!parse_call(self, args, count, names, true, &call))
        goto done;
    if (!asks(self)) {
        made = tgpy_limiter_unasked(object);
        goto done;
    }
    if (!tgpy_may_block(self->state, tg_limiter_store(self->limiter)))
        goto done;
    tg_decision decision; /* 5 KiB that nobody clears: what is in use is written */
    tg_error error;
    PyThreadState *thread;
    const tg_store *store = tg_limiter_store(self->limiter);
    tgpy_others_run_meanwhile(store, &thread);
    const tg_status status = function(self->limiter, call.dimensions, call.dimension_count, call.cost, &decision, &error);
    tgpy_others_stop_meanwhile(store, &thread);
    if (status == TG_OK)
        made = tgpy_decision_new(self->state, object, &decision);
    else
        tgpy_raise(self->state, &error, NULL);
    tgpy_log_notices(self->state);
done:
    call_fini(&call);
    return made;
}

static PyObject *
limiter_hit(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return decide(self, args, count, names, tg_limiter_hit);
}

static PyObject *
limiter_peek(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return decide(self, args, count, names, tg_limiter_peek);
}

static PyObject *
administer(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names, bool refund)
{
    tgpy_limiter *self = of(object);
    struct call call;
    bool done = parse_call(self, args, count, names, refund, &call);
    const bool asking = asks(self);
    if (done && asking)
        done = tgpy_may_block(self->state, tg_limiter_store(self->limiter));
    if (done && asking) {
        tg_error error;
        PyThreadState *thread = tgpy_others_run(tg_limiter_store(self->limiter));
        const tg_status status =
            refund ? tg_limiter_refund(self->limiter, call.dimensions, call.dimension_count, call.cost, &error)
                   : tg_limiter_reset(self->limiter, call.dimensions, call.dimension_count, &error);
        tgpy_others_stop(thread);
        done = status == TG_OK;
        if (!done)
            tgpy_raise(self->state, &error, NULL);
        tgpy_log_notices(self->state);
    }
    call_fini(&call);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* Seconds of an override: more than 0, at most ten years. */
static bool
standing_time(PyObject *seconds, uint64_t *us)
{
    const double value = PyFloat_AsDouble(seconds);
    if (value == -1.0 && PyErr_Occurred())
        return false;
    if (!(value > 0 && value <= (double)TG_PERIOD_US_MAX / 1e6)) {
        PyErr_SetString(PyExc_ValueError, "seconds must be more than 0 and at most ten years");
        return false;
    }
    *us = value < 1e-6 ? 1 : (uint64_t)(value * 1e6);
    return true;
}

static bool
told(tgpy_limiter *self, tg_status status, const tg_error *error)
{
    tgpy_log_notices(self->state);
    if (status != TG_OK)
        tgpy_raise(self->state, error, NULL);
    return status == TG_OK;
}

/* override(rules, *parts, seconds=..., dims=None) */
static PyObject *
limiter_override(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char expected[] = "expected override(rules, *parts, seconds=..., dims=None), rules a str or None";
    tgpy_limiter *self = of(object);
    enum { PARTS_MAX = TG_PARTS_MAX };
    PyObject *values[PARTS_MAX + 1], *names = NULL, *made = NULL;
    PyObject *seconds = kwargs ? PyDict_GetItemString(kwargs, "seconds") : NULL;
    PyObject *dims = kwargs ? PyDict_GetItemString(kwargs, "dims") : NULL;
    const Py_ssize_t count = PyTuple_Size(args) - 1, known = (seconds != NULL) + (dims != NULL);
    uint64_t duration_us = 0;
    tg_text rules;
    if (count < 0 || count > PARTS_MAX || (kwargs && PyDict_Size(kwargs) != known)) {
        PyErr_SetString(PyExc_TypeError, expected);
        return NULL;
    }
    PyObject *given = PyTuple_GetItem(args, 0);
    const bool ends = given == Py_None;
    if (!ends && (!seconds || !PyUnicode_Check(given))) {
        PyErr_SetString(PyExc_TypeError, expected);
        return NULL;
    }
    if ((!ends && !standing_time(seconds, &duration_us)) || !tgpy_text_argument(given, "rules", &rules, &made))
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        values[i] = PyTuple_GetItem(args, i + 1);
    if (dims == Py_None)
        dims = NULL;
    if (dims) {
        values[count] = dims;
        names = PyTuple_Pack(1, self->state->names[NAME_dims]);
    }
    struct call call;
    bool done = !dims || names;
    const bool somebody = count > 0 || dims;
    if (somebody)
        done = done && parse_call(self, values, count, names, false, &call);
    if (done && asks(self)) {
        tg_error error;
        done = told(self, tg_limiter_override(self->limiter, somebody ? call.dimensions : NULL,
                                              somebody ? call.dimension_count : 0, rules, duration_us, &error), &error);
    }
    if (somebody && (!dims || names))
        call_fini(&call);
    Py_XDECREF(names);
    Py_XDECREF(made);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *
limiter_pause(PyObject *object, PyObject *seconds)
{
    tgpy_limiter *self = of(object);
    uint64_t duration_us = 0;
    tg_error error;
    if (seconds != Py_None && !standing_time(seconds, &duration_us))
        return NULL;
    if (asks(self) && !told(self, tg_limiter_pause(self->limiter, duration_us, &error), &error))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
limiter_reset(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return administer(self, args, count, names, false);
}

static PyObject *
limiter_refund(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return administer(self, args, count, names, true);
}

/* An awaitable: done already where the store is in memory, of the running loop where it is not. Outside of a loop nothing
 * but the caller is held up, so there it is asked as by the call that waits. */
static PyObject *
ask(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names, tg_question question,
    PyObject *(*waits)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *))
{
    tgpy_limiter *self = of(object);
    tg_store *store = asks(self) ? tg_limiter_store(self->limiter) : NULL;
    tgpy_loop *loop = store && tg_store_remote(store) ? tgpy_loop_of(self->state, store) : NULL;
    if (!loop)
        return PyErr_Occurred() ? NULL : tgpy_ready(self->state, waits(object, args, count, names));
    struct call call;
    PyObject *made = NULL;
    if (parse_call(self, args, count, names, question != TG_ASK_RESET, &call))
        made = tgpy_limiter_ask(loop, object, question, call.dimensions, call.dimension_count, call.cost, 0);
    call_fini(&call);
    return made;
}

PyObject *
tgpy_limiter_hit_later(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names, uint64_t patience_us)
{
    tgpy_limiter *self = of(object);
    tgpy_loop *loop = tgpy_loop_of(self->state, tg_limiter_store(self->limiter));
    struct call call;
    PyObject *made = NULL;
    if (!loop) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "no event loop runs in this thread");
        return NULL;
    }
    if (parse_call(self, args, count, names, true, &call))
        made = tgpy_limiter_ask(loop, object, TG_ASK_HIT, call.dimensions, call.dimension_count, call.cost, patience_us);
    call_fini(&call);
    return made;
}

static PyObject *
limiter_hit_async(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return ask(self, args, count, names, TG_ASK_HIT, limiter_hit);
}

static PyObject *
limiter_peek_async(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return ask(self, args, count, names, TG_ASK_PEEK, limiter_peek);
}

static PyObject *
limiter_reset_async(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return ask(self, args, count, names, TG_ASK_RESET, limiter_reset);
}

static PyObject *
limiter_refund_async(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return ask(self, args, count, names, TG_ASK_REFUND, limiter_refund);
}

/* ---- making one ---- */

/* Texts that stay valid while the interpreter lock is let go: the objects they are borrowed from are held here. */
#define TEXTS_MAX (TG_DIMENSIONS_MAX + 1)
struct texts {
    PyObject *objects; /* tuple */
    tg_text *items;
    size_t count;
};

static void
texts_fini(struct texts *texts)
{
    Py_XDECREF(texts->objects);
    PyMem_Free(texts->items);
}

/* A str is a list of one; NULL and None are the empty list. */
static bool
texts_of(PyObject *given, const char *name, struct texts *texts)
{
    *texts = (struct texts){ .objects = NULL };
    if (!given || given == Py_None)
        return true;
    texts->objects = PyUnicode_Check(given) ? PyTuple_Pack(1, given) : PySequence_Tuple(given);
    if (!texts->objects) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s must be a sequence of str", name);
        }
        return false;
    }
    texts->count = (size_t)PyTuple_Size(texts->objects);
    texts->items = PyMem_Malloc((texts->count + 1) * sizeof *texts->items);
    if (!texts->items) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < texts->count; i++) {
        PyObject *made, *item = PyTuple_GetItem(texts->objects, (Py_ssize_t)i);
        if (!PyUnicode_Check(item) || !tgpy_text(item, &texts->items[i], &made) || made) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_TypeError, "%s must be str, or a sequence of str", name);
            return false; /* a lone surrogate is in no name of anything: no need to keep `made` */
        }
    }
    return true;
}

/* An option with few spellings. */
static bool
choose(tgpy_state *state, const char *option, tg_text given, const char *const *words, int *index)
{
    char expected[160] = "", shown[64];
    if (given.length == 0)
        return true; /* not given: the default stands */
    for (int i = 0; words[i]; i++) {
        if (given.length == strlen(words[i]) && memcmp(given.data, words[i], given.length) == 0) {
            *index = i;
            return true;
        }
        PyOS_snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%s\"%s\"", i ? ", " : "", words[i]);
    }
    const int length = given.length < sizeof shown ? (int)given.length : (int)sizeof shown - 1;
    tg_error error = { .status = TG_E_CONFIG };
    PyOS_snprintf(error.message, sizeof error.message, "%s is \"%.*s\", expected one of %s", option, length, given.data,
                  expected);
    tgpy_raise(state, &error, NULL);
    return false;
}

int
tgpy_enabled(tgpy_state *state)
{
    static const char *const words[] = { "0", "false", "no", "off", "1", "true", "yes", "on", NULL };
    int index = 4;
    if (!choose(state, "TIDEGATE_ENABLED", tg_text_of(getenv("TIDEGATE_ENABLED")), words, &index))
        return -1;
    return index >= 4;
}

struct settings {
    PyObject *rules, *name, *policy, *algorithm, *store, *clock, *space, *by, *proxies, *client_header, *user_header;
    PyObject *on_store_failure, *on_full, *missing, *config, *enabled;
    double timeout;
};

/* Copied before the interpreter lock is let go: another thread may then change the environment. */
static char *
environment(const char *name)
{
    const char *value = getenv(name);
    if (!value)
        return strdup("");
    return strdup(value);
}

static PyObject *
rule_texts(const tg_rule *rules, size_t count)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; tuple && i < count; i++) {
        char text[TG_RULE_TEXT_MAX];
        tg_rule_text(&rules[i], text);
        PyObject *item = PyUnicode_FromString(text);
        if (!item)
            Py_CLEAR(tuple);
        else
            PyTuple_SetItem(tuple, (Py_ssize_t)i, item);
    }
    return tuple;
}

/* What every way of making one ends with. */
static bool
describe(tgpy_limiter *self)
{
    const tg_rule *rules = NULL;
    const size_t count = tg_limiter_rules(self->limiter, &rules);
    self->rules = rule_texts(rules, count);
    self->name = tgpy_str(tg_text_of(tg_limiter_name(self->limiter)));
    return self->rules && self->name;
}

/* A text argument and what its bytes live in. */
struct argument {
    tg_text text;
    PyObject *made;
};

enum { RULES, NAME, POLICY, ALGORITHM, STORE, SPACE, CLIENT_HEADER, USER_HEADER, ON_FAILURE, ON_FULL, MISSING, CONFIG, ARGUMENTS };

static bool
read_arguments(const struct settings *given, struct argument arguments[ARGUMENTS])
{
    const struct {
        PyObject *object;
        const char *name;
    } all[ARGUMENTS] = {
        [RULES] = { given->rules, "rules" },
        [NAME] = { given->name, "name" },
        [POLICY] = { given->policy, "policy" },
        [ALGORITHM] = { given->algorithm, "algorithm" },
        [STORE] = { given->store, "store" },
        [SPACE] = { given->space, "namespace" },
        [CLIENT_HEADER] = { given->client_header, "client_header" },
        [USER_HEADER] = { given->user_header, "user_header" },
        [ON_FAILURE] = { given->on_store_failure, "on_store_failure" },
        [ON_FULL] = { given->on_full, "on_full" },
        [MISSING] = { given->missing, "missing_identity" },
        [CONFIG] = { given->config, "config" },
    };
    for (int i = 0; i < ARGUMENTS; i++)
        if (!tgpy_text_argument(all[i].object, all[i].name, &arguments[i].text, &arguments[i].made))
            return false;
    return true;
}

/* Of a policy, everything but where the file and the store are stands in the file. */
static bool
refuse_beside_policy(const struct settings *given)
{
    const struct {
        PyObject *object;
        const char *name;
    } others[] = {
        { given->rules, "rules" },
        { given->name, "name" },
        { given->algorithm, "algorithm" },
        { given->space, "namespace" },
        { given->by, "by" },
        { given->proxies, "trusted_proxies" },
        { given->client_header, "client_header" },
        { given->user_header, "user_header" },
        { given->on_store_failure, "on_store_failure" },
        { given->on_full, "on_full" },
        { given->missing, "missing_identity" },
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].object && others[i].object != Py_None) {
            PyErr_Format(PyExc_TypeError, "a policy brings its own %s: write it in the rules file, or leave out policy",
                         others[i].name);
            return false;
        }
    return true;
}

static bool
open_policy(tgpy_limiter *self, const struct argument arguments[ARGUMENTS], tg_clock *clock, uint64_t timeout_us)
{
    tg_error error;
    tg_status status = TG_OK;
    char *config = environment("TIDEGATE_CONFIG"), *store = environment("TIDEGATE_STORE");
    if (!config || !store) {
        free(config);
        free(store);
        PyErr_NoMemory();
        return false;
    }
    const tg_gate_options options = {
        .path = arguments[CONFIG].text.length ? arguments[CONFIG].text : tg_text_of(config),
        .store = arguments[STORE].text.length ? arguments[STORE].text : tg_text_of(store),
        .clock = clock,
        .timeout_us = timeout_us,
    };
    Py_BEGIN_ALLOW_THREADS
    status = tg_gate_open(&options, &self->gate, &error);
    if (status == TG_OK)
        status = tg_gate_limiter(self->gate, arguments[POLICY].text, &self->limiter, &error);
    Py_END_ALLOW_THREADS
    free(config);
    free(store);
    if (status != TG_OK) {
        tgpy_raise(self->state, &error, NULL);
        return false;
    }
    self->composes = true;
    return describe(self);
}

static bool
open_rules(tgpy_limiter *self, const struct settings *given, const struct argument arguments[ARGUMENTS], tg_clock *clock,
           uint64_t timeout_us, bool enabled)
{
    static const char *const algorithms[] = { "fixed_window", "sliding_log", "sliding_counter", "token_bucket",
                                              "leaky_bucket", "gcra",        NULL };
    static const tg_algorithm meanings[] = { TG_FIXED_WINDOW, TG_SLIDING_LOG,  TG_SLIDING_COUNTER,
                                             TG_TOKEN_BUCKET, TG_LEAKY_BUCKET, TG_TOKEN_BUCKET };
    static const char *const on_failures[] = { "open", "closed", "local", "local 25%", NULL }; /* what may be written */
    static const char *const on_fulls[] = { "overflow", "open", "closed", NULL };
    static const char *const missings[] = { "reject 401", "reject 400", "shared", NULL };
    tg_on_failure on_failure = TG_FAIL_OPEN;
    unsigned local_percent = 100;
    int unknown, algorithm = -1, on_full = TG_FULL_OVERFLOW, missing = TG_MISSING_REJECT_401;
    if (!choose(self->state, "algorithm", arguments[ALGORITHM].text, algorithms, &algorithm) ||
        (arguments[ON_FAILURE].text.length > 0 &&
         !tg_on_failure_parse(arguments[ON_FAILURE].text, &on_failure, &local_percent) &&
         !choose(self->state, "on_store_failure", arguments[ON_FAILURE].text, on_failures, &unknown)) ||
        !choose(self->state, "on_full", arguments[ON_FULL].text, on_fulls, &on_full) ||
        !choose(self->state, "missing_identity", arguments[MISSING].text, missings, &missing))
        return false;

    tg_error error;
    tg_store *store = NULL;
    char *uri = NULL;
    struct texts by, proxies = { .objects = NULL };
    bool done = texts_of(given->by, "by", &by) && texts_of(given->proxies, "trusted_proxies", &proxies);
    if (!done)
        goto done;
    done = false;

    /* Wrong rules are wrong also when everything is switched off, and before a store is opened for them. */
    tg_rule rules[TG_RULES_MAX];
    size_t rule_count = 0;
    const tg_algorithm preferred = algorithm >= 0 ? meanings[algorithm] : TG_ALGORITHM_DEFAULT;
    tg_status status = tg_rules_parse(arguments[RULES].text, preferred, rules, &rule_count, &error);
    if (status == TG_OK) {
        const tg_client_options options = {
            .trusted_proxies = proxies.items,
            .trusted_proxy_count = proxies.count,
            .client_header = arguments[CLIENT_HEADER].text,
            .user_header = arguments[USER_HEADER].text,
        };
        status = tg_client_open(&options, &self->client, &error);
    }
    if (status == TG_OK && !enabled) {
        self->rules = rule_texts(rules, rule_count);
        self->off = tgpy_decision_unasked(self->state, rules, rule_count);
        self->name = tgpy_str(arguments[NAME].text.length ? arguments[NAME].text : tg_text_of("default"));
        done = self->rules && self->off && self->name;
        goto done;
    }
    if (status == TG_OK) {
        uri = environment("TIDEGATE_STORE");
        if (!uri) {
            PyErr_NoMemory();
            goto done;
        }
        const tg_store_options store_options = { .clock = clock, .timeout_us = timeout_us };
        const tg_limiter_options options = {
            .rules = arguments[RULES].text,
            .name = arguments[NAME].text,
            .space = arguments[SPACE].text,
            .preferred = preferred,
            .by = by.items,
            .by_count = by.count,
            .on_store_failure = on_failure,
            .local_percent = local_percent,
            .on_full = (tg_on_full)on_full,
            .missing_identity = (tg_missing)missing,
        };
        Py_BEGIN_ALLOW_THREADS
        status = tg_store_open(arguments[STORE].text.length ? arguments[STORE].text : tg_text_of(uri), &store_options,
                               &store, &error);
        if (status == TG_OK)
            status = tg_limiter_open(store, self->client, &options, &self->limiter, &error);
        tg_store_close(store); /* the limiter has a reference of its own */
        Py_END_ALLOW_THREADS
    }
    if (status != TG_OK) {
        tgpy_raise(self->state, &error, given->rules);
        goto done;
    }
    self->composes = by.count > 0;
    done = describe(self);
done:
    free(uri);
    texts_fini(&by);
    texts_fini(&proxies);
    return done;
}

static bool
open_limiter(tgpy_limiter *self, const struct settings *given, const struct argument arguments[ARGUMENTS])
{
    uint64_t timeout_us = 0;
    tg_clock *clock = NULL;
    const int allowed = tgpy_enabled(self->state);
    if (allowed < 0 || !tgpy_timeout(given->timeout, &timeout_us))
        return false;
    if (given->clock && given->clock != Py_None) {
        if (Py_TYPE(given->clock) != self->state->clock_type) {
            PyErr_SetString(PyExc_TypeError, "clock must be a ManualClock or None");
            return false;
        }
        clock = ((tgpy_clock *)given->clock)->clock;
        self->manual = true;
    } else {
        clock = tgpy_default_clock(self->state);
        self->manual = clock != NULL;
    }
    bool enabled = allowed;
    if (given->enabled && given->enabled != Py_None) {
        if (!PyBool_Check(given->enabled)) {
            PyErr_SetString(PyExc_TypeError, "enabled must be True, False or None");
            return false;
        }
        enabled = enabled && given->enabled == Py_True; /* the operator's switch is not overruled by a program */
    }
    const bool has_rules = given->rules && given->rules != Py_None;
    if (!given->policy || given->policy == Py_None) {
        if (!has_rules) {
            PyErr_SetString(PyExc_TypeError, "give rules such as \"100/minute\", or policy, the name of one of a rules file");
            return false;
        }
        if (given->config && given->config != Py_None) {
            PyErr_SetString(PyExc_TypeError, "config names a rules file: it goes with policy");
            return false;
        }
        return open_rules(self, given, arguments, clock, timeout_us, enabled);
    }
    if (!refuse_beside_policy(given))
        return false;
    if (enabled)
        return open_policy(self, arguments, clock, timeout_us);
    /* Not even the file is read: its rules are not known. */
    self->composes = true;
    self->rules = PyTuple_New(0);
    self->name = Py_NewRef(given->policy);
    self->off = tgpy_decision_unasked(self->state, NULL, 0);
    return self->rules && self->off;
}

/* Made while a request is served it opens its store anew each time, and what is wrong with it is found only then: a warning
 * at the caller's line. Python looks for the request; what tidegate itself makes late, for rules that a callable answers
 * with, it keeps. false: the warning is an exception. */
static bool
warn_in_a_request(void)
{
    PyObject *globals = PyEval_GetGlobals(); /* of the caller; borrowed */
    PyObject *name = globals ? PyDict_GetItemString(globals, "__name__") : NULL;
    PyObject *prefix = name && PyUnicode_Check(name) ? PyUnicode_FromString("tidegate.") : NULL;
    const Py_ssize_t ours = prefix ? PyUnicode_Tailmatch(name, prefix, 0, PY_SSIZE_T_MAX, -1) : 1;
    Py_XDECREF(prefix);
    if (ours != 0)
        return !PyErr_Occurred();
    PyObject *module = PyImport_ImportModule("tidegate._limits");
    PyObject *warned = module ? PyObject_CallMethod(module, "warn_in_a_request", NULL) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(warned);
    return warned != NULL;
}

static PyObject *
limiter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "rules",         "name",        "policy",           "algorithm",   "store",
                             "clock",         "namespace",   "by",               "trusted_proxies",
                             "client_header", "user_header", "on_store_failure", "on_full",     "missing_identity",
                             "timeout",       "config",      "enabled",          NULL };
    struct settings given = { .timeout = 0.05 };
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$OOOOOOOOOOOOOdOO:Limiter", names, &given.rules, &given.name,
                                     &given.policy, &given.algorithm, &given.store, &given.clock, &given.space, &given.by,
                                     &given.proxies, &given.client_header, &given.user_header, &given.on_store_failure,
                                     &given.on_full, &given.missing, &given.timeout, &given.config, &given.enabled))
        return NULL;
    PyObject *path = tgpy_path(given.config);
    tgpy_limiter *self = path ? PyObject_New(tgpy_limiter, type) : NULL;
    if (!self) {
        Py_XDECREF(path);
        return NULL;
    }
    given.config = path;
    tgpy_state *state = tgpy_state_of_type(type);
    self->state = state;
    self->limiter = NULL;
    self->client = NULL;
    self->gate = NULL;
    self->composes = self->manual = false;
    self->name = self->rules = self->off = NULL;
    struct argument arguments[ARGUMENTS] = { 0 };
    const bool done = read_arguments(&given, arguments) && open_limiter(self, &given, arguments) && warn_in_a_request();
    for (int i = 0; i < ARGUMENTS; i++)
        Py_XDECREF(arguments[i].made);
    Py_DECREF(path);
    tgpy_log_notices(state);
    if (!done)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
limiter_dealloc(PyObject *object)
{
    tgpy_limiter *self = of(object);
    PyTypeObject *type = Py_TYPE(object);
    /* The last reference to a remote store tells it once more what was counted, and that is waited for. */
    PyThreadState *thread = tgpy_others_run(self->limiter ? tg_limiter_store(self->limiter) : NULL);
    tg_limiter_close(self->limiter);
    tg_client_close(self->client);
    tg_gate_close(self->gate); /* after what was made from it */
    tgpy_others_stop(thread);
    Py_XDECREF(self->name);
    Py_XDECREF(self->rules);
    Py_XDECREF(self->off);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *
get_name(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(of(self)->name);
}

static PyObject *
get_rules(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(of(self)->rules);
}

static PyObject *
get_enabled(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(of(self)->limiter != NULL);
}

static PyObject *
limiter_repr(PyObject *self)
{
    PyObject *separator = PyUnicode_FromString("; ");
    PyObject *rules = separator ? PyUnicode_Join(separator, of(self)->rules) : NULL;
    PyObject *repr = rules ? PyUnicode_FromFormat("<Limiter %R: %U%s>", of(self)->name, rules,
                                                  of(self)->limiter ? "" : " (switched off)")
                           : NULL;
    Py_XDECREF(separator);
    Py_XDECREF(rules);
    return repr;
}

#define METHOD(name) #name, (PyCFunction)(void (*)(void))limiter_##name, METH_FASTCALL | METH_KEYWORDS

#define IDENTITY                                                                                                       \
    "parts: the parts of one joint identity, each str (as UTF-8) or bytes: any content, also none, no two alike.\n"    \
    "dims: instead, several dimensions, judged all or nothing: {\"ip\": address, \"user\": user}; a joint one is\n"   \
    "{\"ip+user\": (address, user)}. Under a policy, the values its `by` is composed of.\n"

static PyMethodDef limiter_methods[] = {
    { METHOD(hit),
      "hit($self, /, *parts, cost=1, dims=None)\n--\n\n"
      "Takes cost units from every identity under every rule, or from none; returns the Decision.\n\n" IDENTITY
      "cost: 0 to 10**10. 0 takes nothing; more than a rule can hold is denied, never to pass.\n\n"
      "Raises TypeError and ValueError for wrong arguments, IdentityError when a policy's value is missing or no address;\n"
      "never for a store that does not answer: the decision is then `degraded`, as on_store_failure says." },
    { METHOD(peek), "peek($self, /, *parts, cost=1, dims=None)\n--\n\n"
                    "What hit() would decide; remaining and reset_after are those of the untouched state. Takes nothing." },
    { METHOD(reset), "reset($self, /, *parts, dims=None)\n--\n\n"
                     "Forgets the identities under every rule. Raises StoreError when the store did not answer." },
    { "override", (PyCFunction)(void (*)(void))limiter_override, METH_VARARGS | METH_KEYWORDS,
      "override($self, rules, /, *parts, seconds=None, dims=None)\n--\n\n"
      "Judges one identity, or without parts and dims everybody, by other rules for so many seconds, in all processes.\n"
      "None ends it. Raises RuleError, StoreError; at most as many rules as the limiter has." },
    { "pause", limiter_pause, METH_O,
      "pause($self, seconds, /)\n--\n\n"
      "Lets everybody through for so many seconds and counts nothing, in all processes. None ends it." },
    { METHOD(refund), "refund($self, /, *parts, cost=1, dims=None)\n--\n\n"
                      "Gives cost units back, never below zero, oldest first in a log. To give back what one hit took,\n"
                      "call refund() of its decision. Raises StoreError when the store did not answer." },
    { METHOD(hit_async), "hit_async($self, /, *parts, cost=1, dims=None)\n--\n\n"
                         "hit() for async code: await it, once, for the Decision.\n\n"
                         "With a store in memory the hit is made by the call and awaiting it never gives the loop a turn,\n"
                         "so no cancellation can fall between the hit and its decision. A remote store is asked while the\n"
                         "loop goes on; whether a hit counts whose awaiting is cancelled is then not known." },
    { METHOD(peek_async), "peek_async($self, /, *parts, cost=1, dims=None)\n--\n\npeek() for async code." },
    { METHOD(reset_async), "reset_async($self, /, *parts, dims=None)\n--\n\nreset() for async code." },
    { METHOD(refund_async), "refund_async($self, /, *parts, cost=1, dims=None)\n--\n\nrefund() for async code." },
    { "wait", (PyCFunction)(void (*)(void))tgpy_limiter_wait, METH_FASTCALL | METH_KEYWORDS,
      "wait($self, /, *parts, cost=1, timeout=None, dims=None)\n--\n\n"
      "hit() for who would rather wait than be refused: sleeps until it passes, at most `timeout` seconds, then returns its\n"
      "Decision. One that cannot pass in time is not allowed, and that is said at once: retry_after is what it would take.\n\n"
      "Token and leaky buckets: the place is taken at once and slept for once, first come, first served. Windows and logs:\n"
      "sleeps retry_after and some more and asks again; who comes meanwhile may be faster. Other threads run meanwhile;\n"
      "an exception of a signal handler (Ctrl-C) gives the place back. Raises as hit() does." },
    { "wait_async", (PyCFunction)(void (*)(void))tgpy_limiter_wait_async, METH_VARARGS | METH_KEYWORDS,
      "wait_async($self, /, *parts, cost=1, timeout=None, dims=None)\n--\n\n"
      "wait() for async code: a coroutine of asyncio. One that is cancelled gives its place back." },
    { "reserve", (PyCFunction)(void (*)(void))tgpy_limiter_reserve, METH_VARARGS | METH_KEYWORDS,
      "reserve($self, /, *parts, cost=1, lease=60.0, dims=None)\n--\n\n"
      "A hit on an estimate, as a context manager for `with` and `async with`: takes cost units when entered; settle(actual)\n"
      "makes it what it really was. Left by an exception all is given back; left without a word the estimate stands. If\n"
      "the process dies, the units come back when the lease ends, `lease` seconds later (1 to 86400).\n\n"
      "The Reservation is true when allowed. Never raises for a store that does not answer." },
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyGetSetDef limiter_getset[] = {
    { "name", get_name, NULL, "Limiters of one name, namespace and store share their counts.", NULL },
    { "rules", get_rules, NULL, "The rules in their canonical spelling, with the algorithm of each.", NULL },
    { "enabled", get_enabled, NULL, "False: every hit is allowed and no store is asked.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot limiter_slots[] = {
    { Py_tp_doc,
      "Limiter(rules=None, *, name=None, policy=None, algorithm=None, store=None, clock=None, namespace=None, by=None, "
      "trusted_proxies=None, client_header=None, user_header=None, on_store_failure=None, on_full=None, "
      "missing_identity=None, timeout=0.05, config=None, enabled=None)\n--\n\n"
      "Limits how often each identity may do a thing. Threads and forked children may use one at once.\n\n"
      "rules: such as \"10/second; 1000/hour burst 50 token_bucket\". Without an algorithm: token_bucket where a burst is\n"
      "given, else sliding_log up to 1000 per period, else sliding_counter; `algorithm` replaces that choice.\n"
      "policy: instead, the name of a policy of the rules file `config` (else TIDEGATE_CONFIG), sharing its counts.\n"
      "store: memory://NAME, shared://NAME; else TIDEGATE_STORE, else the file's, else shared://default.\n"
      "timeout: seconds that a hit waits for a stopped process that holds the store, at most 2.\n"
      "on_store_failure: \"open\" (default), \"closed\", \"local\" or \"local 25%\". on_full: \"overflow\" (default), \"open\", \"closed\".\n"
      "missing_identity: \"reject 401\" (default), \"reject 400\", \"shared\".\n"
      "enabled: False, or TIDEGATE_ENABLED=0 in the environment, lets everything through without asking a store.\n\n"
      "Raises RuleError (wrong rules, or one too large for its table), ConfigError (wrong option, URI or rules file),\n"
      "StoreError (the store cannot be opened)." },
    { Py_tp_new, limiter_new },
    { Py_tp_dealloc, limiter_dealloc },
    { Py_tp_repr, limiter_repr },
    { Py_tp_methods, limiter_methods },
    { Py_tp_getset, limiter_getset },
    { 0, NULL },
};

PyType_Spec tgpy_limiter_spec = {
    .name = "tidegate.Limiter",
    .basicsize = sizeof(tgpy_limiter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = limiter_slots,
};
