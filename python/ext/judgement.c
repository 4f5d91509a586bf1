/* Judgement: the answer to one request; and the calls that make it. */
#include "ext.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PRIOR_MAX 64
#define NOT_LIMITERS "limiters must be a sequence of Limiter"
#define NOT_JUDGEMENTS "prior must be a sequence of Judgement"

static tgpy_judgement *
of(PyObject *self)
{
    return (tgpy_judgement *)self;
}

/* A copy without the room that is not used. What points into the storage points into the copy's; names and other texts
 * are constants. */
static TGPY_HOT __attribute__((noinline)) tg_answer *
copy_answer(const tg_answer *answer)
{
    const size_t bytes = offsetof(tg_answer, storage) + answer->storage_used;
    tg_answer *copy = PyMem_Malloc(bytes);
    if (!copy) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(copy, answer, bytes);
    const uintptr_t from = (uintptr_t)answer->storage, end = from + answer->storage_used;
    for (size_t i = 0; i < copy->field_count; i++) {
        tg_text *value = &copy->fields[i].value;
        if ((uintptr_t)value->data >= from && (uintptr_t)value->data < end)
            value->data = copy->storage + ((uintptr_t)value->data - from);
    }
    if (copy->body.length)
        copy->body.data = copy->storage + ((uintptr_t)copy->body.data - from);
    return copy;
}

static inline tgpy_judgement *
allocate(tgpy_state *state)
{
    void *block = TGPY_KEEP_BLOCKS && state->free_judgement_count > 0
                      ? state->free_judgements[--state->free_judgement_count]
                      : PyObject_Malloc(sizeof(tgpy_judgement));
    return block ? (tgpy_judgement *)PyObject_Init(block, state->judgement_type) : (tgpy_judgement *)PyErr_NoMemory();
}

void
tgpy_judgement_drop_blocks(tgpy_state *state)
{
    while (state->free_judgement_count > 0)
        PyObject_Free(state->free_judgements[--state->free_judgement_count]);
}

TGPY_HOT PyObject *
tgpy_judgement_new(tgpy_state *state, PyObject *owner, const tg_judgement *judgement, const tg_answer *answer)
{
    tg_answer *kept = NULL;
    if (answer && (answer->field_count || answer->status)) {
        kept = copy_answer(answer);
        if (!kept)
            return NULL;
    }
    /* Where nothing was asked and nothing refused, the decision says that nothing limits. */
    PyObject *decision = judgement->decision.result_count == 0 && !judgement->decision.degraded && judgement->status == 0
                             ? tgpy_decision_unasked(state, NULL, 0)
                             : tgpy_decision_new(state, owner, &judgement->decision);
    tgpy_judgement *self = decision ? allocate(state) : NULL;
    if (!self) {
        Py_XDECREF(decision);
        PyMem_Free(kept);
        return NULL;
    }
    self->state = state;
    self->decision = (tgpy_decision *)decision;
    self->outcome = judgement->outcome;
    self->status = judgement->status;
    memcpy(self->policy, judgement->policy, sizeof self->policy);
    self->missing[0] = self->shadow_policy[0] = '\0';
    if (judgement->missing[0])
        memcpy(self->missing, judgement->missing, sizeof self->missing);
    if (judgement->shadow_policy[0])
        memcpy(self->shadow_policy, judgement->shadow_policy, sizeof self->shadow_policy);
    self->challenged = judgement->challenged;
    self->shadow_denied = judgement->shadow_denied;
    self->needs_body = judgement->needs_body;
    self->settles = judgement->settles;
    self->waited_us = judgement->waited_us;
    self->settles_at = judgement->settles ? Py_XNewRef(owner) : NULL;
    self->watch_count = judgement->settles ? judgement->watch_count : 0;
    memcpy(self->watches, judgement->watches, self->watch_count * sizeof *self->watches);
    self->answered = answer != NULL;
    self->answer = kept;
    return (PyObject *)self;
}

static TGPY_HOT void
judgement_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(of(self)->decision);
    Py_XDECREF(of(self)->settles_at);
    if (of(self)->answer)
        PyMem_Free(of(self)->answer);
    tgpy_state *state = of(self)->state;
    if (TGPY_KEEP_BLOCKS && state->free_judgement_count < TGPY_FREE_MAX)
        state->free_judgements[state->free_judgement_count++] = self;
    else
        PyObject_Free(self);
    Py_DECREF(type); /* last: it may be what keeps the module and its state */
}

/* ---- what a face reads ---- */

/* What the client is told: kept, or made in `room`. */
static const tg_answer *
answer_of(const tgpy_judgement *self, tg_answer *room)
{
    if (self->answer)
        return self->answer;
    if (self->answered) {
        room->status = 0;
        room->field_count = 0;
        room->body = (tg_text){ NULL, 0 };
        return room;
    }
    tg_judgement judgement;
    judgement.outcome = self->outcome;
    judgement.status = self->status;
    memcpy(judgement.policy, self->policy, sizeof judgement.policy);
    memcpy(judgement.missing, self->missing, sizeof judgement.missing);
    judgement.challenged = judgement.shadow_denied = false;
    tgpy_decision_restore(self->decision, &judgement.decision);
    tg_answer_make(&judgement, room);
    return room;
}

static PyObject *
get_outcome(PyObject *self, void *Py_UNUSED(closure))
{
    static const char *const words[] = {
        [TG_UNMATCHED] = "unmatched", [TG_ALLOWED] = "allowed",           [TG_DENIED] = "denied",
        [TG_FORBIDDEN] = "forbidden", [TG_UNIDENTIFIED] = "unidentified", [TG_UNAVAILABLE] = "unavailable",
        [TG_EXEMPT] = "exempt",
    };
    return PyUnicode_FromString(words[of(self)->outcome]);
}

static PyObject *
get_status(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(of(self)->status);
}

static PyObject *
get_policy(PyObject *self, void *Py_UNUSED(closure))
{
    return tgpy_str(tg_text_of(of(self)->policy));
}

static PyObject *
get_missing(PyObject *self, void *Py_UNUSED(closure))
{
    return tgpy_str(tg_text_of(of(self)->missing));
}

static PyObject *
get_decision(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)of(self)->decision);
}

PyObject *
tgpy_lower_name(tgpy_state *state, tg_text name)
{
    char lower[64];
    const size_t length = name.length < sizeof lower ? name.length : sizeof lower;
    for (size_t i = 0; i < length; i++)
        lower[i] = (char)(name.data[i] >= 'A' && name.data[i] <= 'Z' ? name.data[i] + ('a' - 'A') : name.data[i]);
    for (size_t i = 0; i < state->field_name_count; i++) {
        PyObject *known = state->field_names[i];
        if ((size_t)PyBytes_Size(known) == length && memcmp(PyBytes_AsString(known), lower, length) == 0)
            return Py_NewRef(known);
    }
    PyObject *made = PyBytes_FromStringAndSize(lower, (Py_ssize_t)length);
    if (made && state->field_name_count < TGPY_FIELD_NAMES_MAX)
        state->field_names[state->field_name_count++] = Py_NewRef(made);
    return made;
}

static PyObject *
bytes_of(tg_text text)
{
    return PyBytes_FromStringAndSize(text.data, (Py_ssize_t)text.length);
}

static PyObject *
list_fields(PyObject *object, bool text)
{
    tgpy_judgement *self = of(object);
    tg_answer room;
    const tg_answer *answer = answer_of(self, &room);
    PyObject *list = PyList_New((Py_ssize_t)answer->field_count);
    for (size_t i = 0; list && i < answer->field_count; i++) {
        const tg_field *field = &answer->fields[i];
        PyObject *name = text ? tgpy_str(field->name) : tgpy_lower_name(self->state, field->name);
        PyObject *value = text ? tgpy_str(field->value) : bytes_of(field->value);
        PyObject *pair = name && value ? PyTuple_New(2) : NULL;
        if (!pair) {
            Py_XDECREF(name);
            Py_XDECREF(value);
            Py_CLEAR(list);
            break;
        }
        PyTuple_SetItem(pair, 0, name);
        PyTuple_SetItem(pair, 1, value);
        PyList_SetItem(list, (Py_ssize_t)i, pair);
    }
    return list;
}

PyObject *
tgpy_judgement_fields(PyObject *judgement)
{
    return list_fields(judgement, false);
}

static PyObject *
get_fields(PyObject *self, void *Py_UNUSED(closure))
{
    return list_fields(self, false);
}

static PyObject *
get_fields_text(PyObject *self, void *Py_UNUSED(closure))
{
    return list_fields(self, true);
}

static PyObject *
get_body(PyObject *self, void *Py_UNUSED(closure))
{
    tg_answer room;
    return bytes_of(answer_of(of(self), &room)->body);
}

static PyObject *
get_challenged(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(of(self)->challenged);
}

static PyObject *
get_shadow_policy(PyObject *self, void *Py_UNUSED(closure))
{
    return tgpy_str(tg_text_of(of(self)->shadow_denied ? of(self)->shadow_policy : ""));
}

static PyObject *
get_needs_body(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(of(self)->needs_body);
}

static PyObject *
get_settles(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(of(self)->settles);
}

static int
judgement_bool(PyObject *self)
{
    return of(self)->status == 0;
}

static PyObject *
judgement_repr(PyObject *self)
{
    PyObject *outcome = get_outcome(self, NULL);
    PyObject *repr = outcome ? PyUnicode_FromFormat("<Judgement %U, status %d, policy '%s'>", outcome, of(self)->status,
                                                    of(self)->policy)
                             : NULL;
    Py_XDECREF(outcome);
    return repr;
}

static PyGetSetDef judgement_getset[] = {
    { "outcome", get_outcome, NULL,
      "\"unmatched\", \"exempt\", \"allowed\", \"denied\", \"forbidden\", \"unidentified\" or \"unavailable\".", NULL },
    { "status", get_status, NULL, "0: let through; else the HTTP status of the refusal.", NULL },
    { "policy", get_policy, NULL, "The name of the policy or limiter whose rule is reported; empty when unmatched.", NULL },
    { "missing", get_missing, NULL, "When unidentified, the kind that is missing.", NULL },
    { "decision", get_decision, NULL, "The Decision over all policies.", NULL },
    { "fields", get_fields, NULL,
      "Answer fields as pairs of bytes, names in lower case, a new list each time. Status 0: to be added to the\n"
      "application's answer; else the refusal's own, Content-Type among them.",
      NULL },
    { "fields_text", get_fields_text, NULL, "The same as pairs of str, names in their usual case, for WSGI.", NULL },
    { "body", get_body, NULL, "The refusal's body; empty with status 0.", NULL },
    { "challenged", get_challenged, NULL, "Over a limit of `mode: challenge`: let through, for you to ask for a proof.", NULL },
    { "shadow_policy", get_shadow_policy, NULL, "The policy of `mode: shadow` that would have refused; else empty.", NULL },
    { "needs_body", get_needs_body, NULL, "Let through so far: read the body and judge again with it and this as prior.", NULL },
    { "settles", get_settles, NULL, "What it costs is known after the response: Gate.settle() is called then.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

/* One pair of name and value as bytes or str. What it is borrowed from is held in `held`. */
static bool
read_header(PyObject *pair, PyObject *held, tg_header *header)
{
    PyObject *fast = PySequence_Tuple(pair), *made[2] = { NULL, NULL };
    bool done = fast && PyList_Append(held, fast) == 0 && PyTuple_Size(fast) == 2;
    if (done)
        done = tgpy_text(PyTuple_GetItem(fast, 0), &header->name, &made[0]) &&
               tgpy_text(PyTuple_GetItem(fast, 1), &header->value, &made[1]);
    for (size_t i = 0; i < 2; i++) {
        done = done && (!made[i] || PyList_Append(held, made[i]) == 0);
        Py_XDECREF(made[i]);
    }
    Py_XDECREF(fast);
    if (!done && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "headers must be pairs of bytes or str");
    return done;
}

enum { RESPONSE_HEADERS_MAX = 256 }; /* what lies beyond is not looked at */

void
tgpy_judgement_settles(tgpy_judgement *self, tg_judgement *judgement)
{
    self->settles = false;
    judgement->settles = true;
    judgement->watch_count = self->watch_count;
    memcpy(judgement->watches, self->watches, sizeof judgement->watches);
    judgement->status = self->status;
    tgpy_decision_restore(self->decision, &judgement->decision);
}

void
tgpy_judgement_settled(tgpy_judgement *self, const tg_judgement *judgement)
{
    for (size_t i = 0; i < self->decision->result_count; i++) {
        self->decision->results[i].charged = judgement->decision.results[i].charged;
        self->decision->results[i].cost = judgement->decision.results[i].cost;
    }
}

static PyObject *
settle_now(tgpy_judgement *self, int status, const tg_header *headers, size_t header_count)
{
    tg_judgement judgement;
    tg_error error;
    tg_gate *gate = ((tgpy_gate *)self->settles_at)->gate;
    tgpy_judgement_settles(self, &judgement);
    PyThreadState *thread = tgpy_others_run(tg_gate_store(gate));
    const tg_status settled = tg_gate_settle(gate, &judgement, status, headers, header_count, &error);
    tgpy_others_stop(thread);
    tgpy_judgement_settled(self, &judgement);
    return settled == TG_OK ? Py_NewRef(Py_None) : tgpy_raise(self->state, &error, NULL);
}

static PyObject *
settle(tgpy_judgement *self, PyObject *args, bool later)
{
    int status;
    PyObject *given;
    if (!PyArg_ParseTuple(args, "iO:settle", &status, &given))
        return NULL;
    if (!self->settles || !self->settles_at || Py_TYPE(self->settles_at) != self->state->gate_type)
        return later ? tgpy_ready(self->state, Py_NewRef(Py_None)) : Py_NewRef(Py_None);
    tg_store *store = tgpy_owner_store(self->state, self->settles_at);
    PyObject *list = PySequence_List(given), *held = PyList_New(0), *made = NULL;
    const Py_ssize_t count = list ? PyList_Size(list) : 0;
    const size_t header_count = count < RESPONSE_HEADERS_MAX ? (size_t)count : RESPONSE_HEADERS_MAX;
    tg_header headers[RESPONSE_HEADERS_MAX];
    bool read = list && held;
    for (size_t i = 0; read && i < header_count; i++)
        read = read_header(PyList_GetItem(list, (Py_ssize_t)i), held, &headers[i]);
    tgpy_loop *loop = read && later && tg_store_remote(store) ? tgpy_loop_of(self->state, store) : NULL;
    read = read && !PyErr_Occurred() && (later || tgpy_may_block(self->state, store));
    if (read && !self->settles) /* reading headers may have run code that settled it */
        made = later ? tgpy_ready(self->state, Py_NewRef(Py_None)) : Py_NewRef(Py_None);
    else if (read && loop)
        made = tgpy_settle_later(loop, self, status, headers, header_count);
    else if (read)
        made = later ? tgpy_ready(self->state, settle_now(self, status, headers, header_count))
                     : settle_now(self, status, headers, header_count);
    Py_XDECREF(list);
    Py_XDECREF(held);
    tgpy_log_notices(self->state);
    return made;
}

static PyObject *
judgement_settle(PyObject *self, PyObject *args)
{
    return settle(of(self), args, false);
}

static PyObject *
judgement_settle_async(PyObject *self, PyObject *args)
{
    return settle(of(self), args, true);
}

static PyMethodDef judgement_methods[] = {
    { "settle", judgement_settle, METH_VARARGS,
      "settle($self, status, headers, /)\n--\n\n"
      "Once the request has been answered with this status and these headers (pairs of bytes or str): gives back what\n"
      "should not have been taken. Does nothing where `settles` is false. Raises StoreError when the store did not answer." },
    { "settle_async", judgement_settle_async, METH_VARARGS,
      "settle_async($self, status, headers, /)\n--\n\nsettle() for async code: begun by the call; await it, once." },
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyType_Slot judgement_slots[] = {
    { Py_tp_doc, "The answer to one request; true when it may go on. Made by judge_asgi and its kin only." },
    { Py_tp_dealloc, judgement_dealloc },
    { Py_tp_repr, judgement_repr },
    { Py_nb_bool, judgement_bool },
    { Py_tp_getset, judgement_getset },
    { Py_tp_methods, judgement_methods },
    { 0, NULL },
};

PyType_Spec tgpy_judgement_spec = {
    .name = "tidegate.Judgement",
    .basicsize = sizeof(tgpy_judgement),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = judgement_slots,
};

/* ---- judging ---- */

typedef bool (*read_function)(tgpy_state *, tgpy_request *, PyObject *, PyObject *, PyObject *);

struct options {
    PyObject *route, *user;
    PyObject *plan, *body; /* str, bytes; NULL: not given */
    PyObject *keys;        /* a dict of str; NULL: none */
    bool reads_body;
    PyObject *prior; /* a list or tuple, owned; NULL: none */
    uint64_t cost;
};

static bool
parse_options(const tgpy_state *state, PyObject *const *values, PyObject *names, struct options *options)
{
    *options = (struct options){ .cost = 1 };
    const Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    PyObject *prior = Py_None;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyTuple_GetItem(names, i), *value = values[i];
        tgpy_name found = NAME_cost;
        enum { KNOWN = 8 };
        static const tgpy_name known[KNOWN] = { NAME_route, NAME_user, NAME_cost,      NAME_prior,
                                                NAME_plan,  NAME_body, NAME_reads_body, NAME_keys };
        bool matched = false;
        for (size_t k = 0; k < KNOWN && !matched; k++)
            if (name == state->names[known[k]]) {
                found = known[k];
                matched = true;
            }
        for (size_t k = 0; k < KNOWN && !matched; k++)
            if (PyUnicode_Compare(name, state->names[known[k]]) == 0) {
                found = known[k];
                matched = true;
            }
        if (!matched) {
            PyErr_Format(PyExc_TypeError, "unexpected keyword argument %R: expected route, user, cost, prior, plan, keys, body or "
                                          "reads_body",
                         name);
            return false;
        }
        if (found == NAME_route)
            options->route = value;
        else if (found == NAME_user)
            options->user = value;
        else if (found == NAME_prior)
            prior = value;
        else if (found == NAME_plan || found == NAME_body) {
            const bool plan = found == NAME_plan;
            if (value != Py_None && !(plan ? PyUnicode_Check(value) : PyBytes_Check(value))) {
                PyErr_Format(PyExc_TypeError, "%s must be %s or None", plan ? "plan" : "body", plan ? "str" : "bytes");
                return false;
            }
            *(plan ? &options->plan : &options->body) = value == Py_None ? NULL : value;
        } else if (found == NAME_keys) {
            if (value != Py_None && !PyDict_Check(value)) {
                PyErr_SetString(PyExc_TypeError, "keys must be a dict of str, or None");
                return false;
            }
            options->keys = value == Py_None ? NULL : value;
        } else if (found == NAME_reads_body)
            options->reads_body = PyObject_IsTrue(value) == 1;
        else if (!tgpy_cost(value, &options->cost))
            return false;
    }
    if (prior != Py_None)
        options->prior = tgpy_sequence(prior, NOT_JUDGEMENTS); /* last: nothing can fail after it */
    return prior == Py_None || options->prior;
}

void
tgpy_prior_fini(tgpy_prior *prior)
{
    PyMem_Free(prior->decisions);
    PyMem_Free(prior->pointers);
}

static bool
charged(const tgpy_decision *decision)
{
    for (size_t i = 0; i < decision->result_count; i++)
        if (decision->results[i].charged)
            return true;
    return false;
}

/* waited_us  receives how long they have all waited, also for other stores */
static bool
read_prior(tgpy_state *state, PyObject *given, const tg_store *store, tgpy_prior *prior, uint64_t *waited_us)
{
    *prior = (tgpy_prior){ .count = 0 };
    if (!given)
        return true;
    const bool tuple = PyTuple_Check(given);
    const Py_ssize_t count = tuple ? PyTuple_Size(given) : PyList_Size(given);
    if (count == 0)
        return true;
    if (count > PRIOR_MAX) {
        PyErr_Format(PyExc_ValueError, "prior holds %zd judgements, at most %d are possible", count, PRIOR_MAX);
        return false;
    }
    const tgpy_decision *found[PRIOR_MAX];
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = tuple ? PyTuple_GetItem(given, i) : PyList_GetItem(given, i);
        const tgpy_decision *decision = NULL;
        if (Py_TYPE(item) == state->judgement_type) {
            decision = of(item)->decision;
            *waited_us += of(item)->waited_us;
        } else if (Py_TYPE(item) == state->decision_type) {
            decision = (tgpy_decision *)item;
        }
        if (!decision) {
            PyErr_SetString(PyExc_TypeError, NOT_JUDGEMENTS);
            return false;
        }
        if (decision->owner && charged(decision) && tgpy_owner_store(state, decision->owner) == store)
            found[prior->count++] = decision;
    }
    if (prior->count == 0)
        return true;
    prior->decisions = PyMem_Malloc(prior->count * sizeof *prior->decisions);
    prior->pointers = PyMem_Malloc(prior->count * sizeof *prior->pointers);
    if (!prior->decisions || !prior->pointers) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < prior->count; i++) {
        tgpy_decision_restore(found[i], &prior->decisions[i]);
        prior->pointers[i] = &prior->decisions[i];
    }
    return true;
}

static PyObject *
unmatched(tgpy_state *state)
{
    tg_judgement judgement;
    judgement.outcome = TG_UNMATCHED;
    judgement.status = 0;
    memset(judgement.policy, 0, sizeof judgement.policy);
    memset(judgement.missing, 0, sizeof judgement.missing);
    judgement.shadow_policy[0] = '\0';
    judgement.challenged = judgement.shadow_denied = judgement.needs_body = judgement.settles = false;
    judgement.waited_us = 0;
    judgement.decision.degraded = false;
    judgement.decision.result_count = 0;
    return tgpy_judgement_new(state, NULL, &judgement, NULL);
}

/* Once a process: whoever lists trusted proxies should know that they are not what decides here. */
static void
say_resolved(tgpy_state *state, const tg_request *request)
{
    if (!request->client_resolved || state->said_resolved)
        return;
    state->said_resolved = true;
    tgpy_log_warning(state, "client-resolved",
                     "the server in front has put the forwarded client's address in the peer's place (uvicorn's "
                     "--proxy-headers, which is its default for 127.0.0.1, or ProxyFix): it is taken as the client, and "
                     "trusted_proxies is not applied again. Start uvicorn with --no-proxy-headers to let tidegate walk the "
                     "header itself");
}

/* What the application says for `key:NAME`. */
static bool
add_keys(tgpy_request *request, PyObject *keys)
{
    Py_ssize_t position = 0;
    PyObject *name, *value;
    tg_request *to = &request->request;
    while (keys && PyDict_Next(keys, &position, &name, &value)) {
        if (to->key_count == TG_PARTS_MAX) {
            PyErr_Format(PyExc_ValueError, "keys holds more than %d values", TG_PARTS_MAX);
            return false;
        }
        tg_part *part = &request->keys[to->key_count];
        if (!tgpy_request_str(request, name, "a name in keys", &part->kind) ||
            !tgpy_request_str(request, value, "a value in keys", &part->value))
            return false;
        to->key_count++;
    }
    to->keys = request->keys;
    return true;
}

/* What a face knows beside the scope or environ. Borrowed from the caller's arguments. */
static bool
add_options(tgpy_request *request, const struct options *options)
{
    tg_request *to = &request->request;
    PyObject *made = NULL;
    to->body_follows = options->reads_body;
    to->body_read = options->body != NULL;
    if (options->body)
        to->body = (tg_text){ PyBytes_AsString(options->body), (size_t)PyBytes_Size(options->body) };
    if (to->body.length > TG_BODY_BYTES_MAX)
        to->body.length = TG_BODY_BYTES_MAX;
    if (!add_keys(request, options->keys))
        return false;
    if (options->plan && !tgpy_text_argument(options->plan, "plan", &to->plan, &made))
        return false;
    if (!made)
        return true;
    to->plan.length = 0; /* lone surrogates: no plan's name */
    Py_DECREF(made);
    return true;
}

/* Who judges: a gate or limiters, never both. */
struct judges {
    PyObject *owner; /* holds the store */
    tg_gate *gate;
    PyObject *objects[TG_LIMITERS_MAX]; /* the Limiters, borrowed */
    tg_limiter *limiters[TG_LIMITERS_MAX];
    size_t limiter_count;
    bool later; /* gives an awaitable */
};

static PyObject *
judge_now(tgpy_state *state, const struct judges *judges, const tg_request *request, const tgpy_prior *prior, uint64_t cost)
{
    tg_judgement judgement;
    tg_answer answer;
    tg_error error;
    tg_gate *gate = judges->gate;
    PyThreadState *thread;
    const tg_store *store = gate ? tg_gate_store(gate) : tg_limiter_store(judges->limiters[0]);
    tgpy_others_run_meanwhile(store, &thread);
    const tg_status status =
        gate ? tg_gate_judge(gate, request, cost, prior->pointers, prior->count, &judgement, &answer, &error)
             : tg_limiters_judge(judges->limiters, judges->limiter_count, request, cost, prior->pointers, prior->count,
                                 &judgement, &error);
    tgpy_others_stop_meanwhile(store, &thread);
    if (status == TG_OK)
        return tgpy_judgement_new(state, judges->owner, &judgement, gate ? &answer : NULL);
    return tgpy_raise(state, &error, NULL);
}

static PyObject *
judge(tgpy_state *state, const struct judges *judges, tgpy_request *request, const struct options *options)
{
    if (request->unjudged || state->off || (!judges->gate && judges->limiter_count == 0)) {
        PyObject *made = unmatched(state);
        return judges->later ? tgpy_ready(state, made) : made;
    }
    if (!add_options(request, options))
        return NULL;
    tg_store *store = tgpy_owner_store(state, judges->owner);
    tgpy_prior prior;
    PyObject *made = NULL;
    if (read_prior(state, options->prior, store, &prior, &request->request.waited_us)) {
        tgpy_loop *loop = judges->later && tg_store_remote(store) ? tgpy_loop_of(state, store) : NULL;
        if (loop) {
            made = tgpy_judge_later(loop, judges->owner, judges->gate, judges->objects, judges->limiter_count,
                                    &request->request, &prior, options->cost);
        } else if (!PyErr_Occurred() && (judges->later || tgpy_may_block(state, store))) {
            made = judge_now(state, judges, &request->request, &prior, options->cost);
            if (judges->later)
                made = tgpy_ready(state, made);
        }
    }
    tgpy_prior_fini(&prior);
    return made;
}

static PyObject *
gate_judge(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names, read_function read, const char *what,
           bool later)
{
    tgpy_gate *gate = (tgpy_gate *)self;
    tgpy_state *state = gate->state;
    struct options options;
    if (count != 1) {
        PyErr_Format(PyExc_TypeError, "expected one positional argument, the %s, not %zd", what, count);
        return NULL;
    }
    if (!parse_options(state, args + count, names, &options))
        return NULL;
    PyObject *made = NULL;
    if (gate->gate && !state->off) {
        tgpy_request request;
        struct judges judges;
        judges.owner = self;
        judges.gate = gate->gate;
        judges.limiter_count = 0;
        judges.later = later;
        if (read(state, &request, args[0], options.route, options.user)) {
            made = judge(state, &judges, &request, &options);
            say_resolved(state, &request.request);
        }
        tgpy_request_fini(&request);
        tgpy_log_notices(state);
    } else {
        made = unmatched(state);
        if (later)
            made = tgpy_ready(state, made);
    }
    Py_XDECREF(options.prior);
    return made;
}

PyObject *
tgpy_gate_judge_asgi(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return gate_judge(self, args, count, names, tgpy_request_of_scope, "scope", false);
}

PyObject *
tgpy_gate_judge_asgi_async(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return gate_judge(self, args, count, names, tgpy_request_of_scope, "scope", true);
}

PyObject *
tgpy_gate_judge_wsgi(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return gate_judge(self, args, count, names, tgpy_request_of_environ, "environ", false);
}

/* Those that are not switched off; the first of them is the owner of what is decided. */
static bool
read_limiters(const tgpy_state *state, PyObject *given, struct judges *judges)
{
    const bool tuple = PyTuple_Check(given);
    judges->owner = NULL;
    judges->gate = NULL;
    judges->limiter_count = 0;
    const Py_ssize_t count = tuple ? PyTuple_Size(given) : PyList_Size(given);
    if (count == 0 || count > TG_LIMITERS_MAX) {
        PyErr_Format(PyExc_ValueError, "a request is judged by 1 to %d limiters, not %zd", TG_LIMITERS_MAX, count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = tuple ? PyTuple_GetItem(given, i) : PyList_GetItem(given, i);
        if (Py_TYPE(item) != state->limiter_type) {
            PyErr_SetString(PyExc_TypeError, NOT_LIMITERS);
            return false;
        }
        tgpy_limiter *limiter = (tgpy_limiter *)item;
        if (!limiter->limiter)
            continue;
        if (!judges->owner)
            judges->owner = item;
        judges->objects[judges->limiter_count] = item;
        judges->limiters[judges->limiter_count++] = limiter->limiter;
    }
    return true;
}

static PyObject *
module_judge(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, read_function read,
             const char *what, bool later)
{
    tgpy_state *state = PyModule_GetState(module);
    struct judges judges;
    struct options options;
    judges.later = later;
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "expected two positional arguments, the limiters and the %s, not %zd", what, count);
        return NULL;
    }
    if (!parse_options(state, args + count, names, &options))
        return NULL;
    PyObject *made = NULL, *given = tgpy_sequence(args[0], NOT_LIMITERS);
    if (given) {
        tgpy_request request;
        /* The limiters are read after the request, whose reading may run Python code that empties the list. */
        if (read(state, &request, args[1], options.route, options.user) && read_limiters(state, given, &judges)) {
            made = judge(state, &judges, &request, &options);
            say_resolved(state, &request.request);
        }
        tgpy_request_fini(&request);
        tgpy_log_notices(state);
    }
    Py_XDECREF(given);
    Py_XDECREF(options.prior);
    return made;
}

TGPY_HOT PyObject *
tgpy_judge_late(tgpy_state *state, PyObject *limiter_or_gate, tgpy_request *request, PyObject *prior, uint64_t cost)
{
    const bool by_gate = Py_TYPE(limiter_or_gate) == state->gate_type;
    tg_gate *gate = by_gate ? ((tgpy_gate *)limiter_or_gate)->gate : NULL;
    tg_limiter *limiter = by_gate ? NULL : ((tgpy_limiter *)limiter_or_gate)->limiter;
    if (state->off || (!gate && !limiter))
        return unmatched(state);
    tgpy_prior before = { .count = 0 };
    tg_judgement judgement;
    tg_answer answer;
    tg_error error;
    PyObject *made = NULL;
    request->request.body_follows = true;
    if (Py_SIZE(prior) == 0 ||
        read_prior(state, prior, by_gate ? tg_gate_store(gate) : tg_limiter_store(limiter), &before, &request->request.waited_us)) {
        const tg_status status =
            by_gate ? tg_gate_judge(gate, &request->request, cost, before.pointers, before.count, &judgement, &answer, &error)
                    : tg_limiters_judge(&limiter, 1, &request->request, cost, before.pointers, before.count, &judgement, &error);
        if (status == TG_OK)
            made = tgpy_judgement_new(state, limiter_or_gate, &judgement, by_gate ? &answer : NULL);
        else if (!PyErr_Occurred()) /* what was read late raises in its own words */
            tgpy_raise(state, &error, NULL);
    }
    if (before.count)
        tgpy_prior_fini(&before);
    say_resolved(state, &request->request);
    tgpy_log_notices(state);
    return made;
}

PyObject *
tgpy_judge_asgi(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return module_judge(module, args, count, names, tgpy_request_of_scope, "scope", false);
}

PyObject *
tgpy_judge_asgi_async(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return module_judge(module, args, count, names, tgpy_request_of_scope, "scope", true);
}

PyObject *
tgpy_judge_wsgi(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    return module_judge(module, args, count, names, tgpy_request_of_environ, "environ", false);
}

PyObject *
tgpy_refusal(PyObject *module, PyObject *decision)
{
    tgpy_state *state = PyModule_GetState(module);
    if (Py_TYPE(decision) != state->decision_type) {
        PyErr_Format(PyExc_TypeError, "refusal() takes a Decision, not %R", (PyObject *)Py_TYPE(decision));
        return NULL;
    }
    const tgpy_decision *given = (tgpy_decision *)decision;
    if (given->allowed) {
        PyErr_SetString(PyExc_ValueError, "refusal() takes a decision that refuses, and this one allows");
        return NULL;
    }
    tg_judgement judgement;
    tgpy_decision_restore(given, &judgement.decision);
    /* Of several limiters that judged together only the first is known, and of a gate none. */
    const bool known = given->owner && Py_TYPE(given->owner) == state->limiter_type &&
                       (given->result_count == 0 || given->results[given->reported].limiter == 0);
    tg_limiter_conclude(known ? ((tgpy_limiter *)given->owner)->limiter : NULL, &judgement);
    return tgpy_judgement_new(state, given->owner, &judgement, NULL);
}

PyObject *
tgpy_client_address(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    tgpy_state *state = PyModule_GetState(module);
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "client_address() takes a scope or environ and a Limiter or Gate, not %zd arguments",
                     count);
        return NULL;
    }
    const tg_client *client = NULL;
    if (Py_TYPE(args[1]) == state->limiter_type) {
        const tgpy_limiter *limiter = (tgpy_limiter *)args[1];
        client = limiter->gate ? tg_gate_client(limiter->gate) : limiter->client;
    } else if (Py_TYPE(args[1]) == state->gate_type) {
        const tgpy_gate *gate = (tgpy_gate *)args[1];
        client = gate->gate ? tg_gate_client(gate->gate) : NULL;
    } else {
        PyErr_SetString(PyExc_TypeError, "the second argument of client_address() must be a Limiter or a Gate");
        return NULL;
    }
    if (!client) {
        tg_error off = { .status = TG_E_IDENTITY };
        PyOS_snprintf(off.message, sizeof off.message, "the rules file was not read: tidegate is switched off");
        return tgpy_raise(state, &off, NULL);
    }
    /* An environ says REQUEST_METHOD (PEP 3333), a scope never does. */
    const int wsgi = PyMapping_Check(args[0]) ? PyMapping_HasKey(args[0], state->names[NAME_REQUEST_METHOD]) : 0;
    tgpy_request request;
    PyObject *made = NULL;
    const bool read = wsgi ? tgpy_request_of_environ(state, &request, args[0], NULL, NULL)
                           : tgpy_request_of_scope(state, &request, args[0], NULL, NULL);
    if (read) {
        char address[TG_ADDRESS_TEXT_MAX];
        tg_error error;
        if (tg_client_resolve(client, &request.request, address, &error) == TG_OK)
            made = PyUnicode_FromString(address);
        else
            tgpy_raise(state, &error, NULL);
    }
    tgpy_request_fini(&request);
    tgpy_log_notices(state);
    return made;
}
