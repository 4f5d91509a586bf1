/* Decision: the answer to one hit.
 *
 * Made on every hit, so it costs what it must: one block that holds the numbers, the results and the identities in use and
 * nothing else, taken from a short list of blocks that earlier decisions left; everything a caller reads is made when read. */
#include "ext.h"

#include <stddef.h>
#include <string.h>

#define HEAD_BYTES offsetof(tgpy_decision, results)

static tgpy_decision *
of(PyObject *self)
{
    return (tgpy_decision *)self;
}

/* ---- making and freeing ---- */

static inline tgpy_decision *
decision_allocate(tgpy_state *state, size_t tail_bytes)
{
    const bool common = HEAD_BYTES + tail_bytes <= TGPY_FREE_BLOCK_BYTES;
    void *block;
    if (TGPY_KEEP_BLOCKS && common && state->free_count > 0)
        block = state->free_blocks[--state->free_count];
    else
        block = PyObject_Malloc(common ? TGPY_FREE_BLOCK_BYTES : HEAD_BYTES + tail_bytes);
    if (!block) {
        PyErr_NoMemory();
        return NULL;
    }
    return (tgpy_decision *)PyObject_InitVar(block, state->decision_type, (Py_ssize_t)tail_bytes);
}

static TGPY_HOT void
decision_dealloc(PyObject *object)
{
    tgpy_decision *self = of(object);
    PyTypeObject *type = Py_TYPE(object);
    tgpy_state *state = self->state;
    PyObject *owner = self->owner;
    const bool common = HEAD_BYTES + (size_t)Py_SIZE(object) <= TGPY_FREE_BLOCK_BYTES;
    if (TGPY_KEEP_BLOCKS && common && state->free_count < TGPY_FREE_MAX)
        state->free_blocks[state->free_count++] = self;
    else
        PyObject_Free(self);
    Py_XDECREF(owner);
    Py_DECREF(type); /* last: it may be what keeps the module and its state */
}

void
tgpy_decision_drop_blocks(tgpy_state *state)
{
    while (state->free_count > 0)
        PyObject_Free(state->free_blocks[--state->free_count]);
}

static inline size_t
identity_bytes(const tg_identity *identity)
{
    return sizeof identity->length + identity->length;
}

TGPY_HOT PyObject *
tgpy_decision_new(tgpy_state *state, PyObject *owner, const tg_decision *decision)
{
    const size_t results_bytes = decision->result_count * sizeof(tg_result);
    /* A degraded answer tells of identities that nothing was asked about. */
    const size_t identity_count = decision->result_count ? decision->identity_count : 0;
    size_t tail_bytes = results_bytes;
    for (size_t i = 0; i < identity_count; i++)
        tail_bytes += identity_bytes(&decision->identities[i]);
    tgpy_decision *self = decision_allocate(state, tail_bytes);
    if (!self)
        return NULL;
    self->state = state;
    self->owner = Py_XNewRef(owner);
    self->limit = decision->limit;
    self->burst = decision->burst;
    self->remaining = decision->remaining;
    self->retry_after_us = decision->retry_after_us;
    self->reset_after_us = decision->reset_after_us;
    self->delay_us = decision->delay_us;
    self->allowed = decision->allowed;
    self->degraded = decision->degraded;
    self->overflow = decision->overflow;
    self->reported = decision->reported;
    self->result_count = decision->result_count;
    self->identity_count = (uint8_t)identity_count;
    if (decision->result_count == 1)
        self->results[0] = decision->results[0]; /* copied where it stands, without a call */
    else if (results_bytes)
        memcpy(self->results, decision->results, results_bytes);
    char *to = (char *)self->results + results_bytes;
    for (size_t i = 0; i < identity_count; i++) {
        memcpy(to, &decision->identities[i], identity_bytes(&decision->identities[i]));
        to += identity_bytes(&decision->identities[i]);
    }
    return (PyObject *)self;
}

PyObject *
tgpy_decision_unasked(tgpy_state *state, const tg_rule *rules, size_t rule_count)
{
    tg_decision decision;
    decision.allowed = true;
    decision.degraded = decision.overflow = false;
    decision.reported = 0;
    decision.result_count = (uint8_t)rule_count;
    decision.identity_count = 0;
    decision.limit = decision.burst = decision.remaining = TG_LIMIT_MAX;
    decision.retry_after_us = decision.reset_after_us = decision.delay_us = 0;
    for (size_t i = 0; i < rule_count; i++) {
        const bool denies = rules[i].algorithm == TG_DENY; /* switched off, it refuses nobody: there is nothing to report */
        const uint64_t room = denies ? TG_LIMIT_MAX : rules[i].burst;
        decision.results[i] = (tg_result){ .rule = rules[i], .allowed = true, .remaining = room };
        if (room < decision.remaining) {
            decision.reported = (uint8_t)i;
            decision.remaining = room;
            decision.limit = rules[i].limit;
            decision.burst = rules[i].burst;
        }
    }
    return tgpy_decision_new(state, NULL, &decision);
}

void
tgpy_decision_restore(const tgpy_decision *self, tg_decision *decision)
{
    decision->allowed = self->allowed;
    decision->degraded = self->degraded;
    decision->overflow = self->overflow;
    decision->reported = self->reported;
    decision->result_count = self->result_count;
    decision->identity_count = self->identity_count;
    decision->limit = self->limit;
    decision->burst = self->burst;
    decision->remaining = self->remaining;
    decision->retry_after_us = self->retry_after_us;
    decision->reset_after_us = self->reset_after_us;
    decision->delay_us = self->delay_us;
    memcpy(decision->results, self->results, self->result_count * sizeof(tg_result));
    const char *from = (const char *)self->results + self->result_count * sizeof(tg_result);
    for (size_t i = 0; i < self->identity_count; i++) {
        memcpy(&decision->identities[i].length, from, sizeof decision->identities[i].length);
        memcpy(&decision->identities[i], from, identity_bytes(&decision->identities[i]));
        from += identity_bytes(&decision->identities[i]);
    }
}

/* ---- what a caller reads ---- */

static int
decision_bool(PyObject *self)
{
    return of(self)->allowed;
}

/* The closure is the field's offset in tgpy_decision. */
static PyObject *
get_flag(PyObject *self, void *closure)
{
    return PyBool_FromLong(*(const bool *)((const char *)self + (size_t)closure));
}

static uint64_t
number_at(PyObject *self, void *closure)
{
    return *(const uint64_t *)((const char *)self + (size_t)closure);
}

static PyObject *
get_number(PyObject *self, void *closure)
{
    return PyLong_FromUnsignedLongLong(number_at(self, closure));
}

static PyObject *
get_wait_us(PyObject *self, void *closure)
{
    const uint64_t us = number_at(self, closure);
    if (us == TG_NEVER)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(us);
}

static PyObject *
get_seconds(PyObject *self, void *closure)
{
    const uint64_t us = number_at(self, closure);
    return PyFloat_FromDouble(us == TG_NEVER ? Py_HUGE_VAL : (double)us / 1e6);
}

static PyObject *
get_rule(PyObject *self, void *Py_UNUSED(closure))
{
    const tgpy_decision *decision = of(self);
    char text[TG_RULE_TEXT_MAX];
    if (decision->result_count > 0) {
        tg_rule_text(&decision->results[decision->reported].rule, text);
        return PyUnicode_FromString(text);
    }
    /* Degraded: the numbers are those of a rule of the limiter's; a gate's may belong to any policy. */
    if (decision->degraded && decision->owner && Py_TYPE(decision->owner) == decision->state->limiter_type) {
        const tg_rule *rules = NULL;
        const size_t count = tg_limiter_rules(((tgpy_limiter *)decision->owner)->limiter, &rules);
        for (size_t i = 0; i < count; i++)
            if (rules[i].limit == decision->limit && rules[i].burst == decision->burst) {
                tg_rule_text(&rules[i], text);
                return PyUnicode_FromString(text);
            }
    }
    return PyUnicode_FromString("");
}

static PyObject *
get_rules(PyObject *self, void *Py_UNUSED(closure))
{
    const tgpy_decision *decision = of(self);
    PyObject *tuple = PyTuple_New(decision->result_count);
    for (Py_ssize_t i = 0; tuple && i < decision->result_count; i++) {
        tgpy_rule_result *item = PyObject_New(tgpy_rule_result, decision->state->rule_result_type);
        if (!item) {
            Py_CLEAR(tuple);
            break;
        }
        item->result = decision->results[i];
        PyTuple_SetItem(tuple, i, (PyObject *)item);
    }
    return tuple;
}

static PyObject *
decision_refund(PyObject *object, PyObject *Py_UNUSED(unused))
{
    tgpy_decision *self = of(object);
    if (!self->owner || self->result_count == 0)
        Py_RETURN_NONE; /* nothing was taken */
    tg_store *store = tgpy_owner_store(self->state, self->owner);
    if (!tgpy_may_block(self->state, store))
        return NULL;
    tg_decision decision;
    tg_error error;
    tgpy_decision_restore(self, &decision);
    /* Marked before another thread can run, which might give back the same. */
    for (size_t i = 0; i < self->result_count; i++)
        self->results[i].charged = false;
    PyThreadState *thread = tgpy_others_run(store);
    const tg_status status = store ? tg_decision_refund(store, &decision, &error) : TG_OK;
    tgpy_others_stop(thread);
    for (size_t i = 0; i < self->result_count; i++)
        self->results[i].charged = decision.results[i].charged;
    tgpy_log_notices(self->state);
    if (status != TG_OK)
        return tgpy_raise(self->state, &error, NULL);
    Py_RETURN_NONE;
}

static PyObject *
decision_refund_async(PyObject *object, PyObject *Py_UNUSED(unused))
{
    tgpy_decision *self = of(object);
    tg_store *store = self->owner && self->result_count ? tgpy_owner_store(self->state, self->owner) : NULL;
    tgpy_loop *loop = store && tg_store_remote(store) ? tgpy_loop_of(self->state, store) : NULL;
    if (loop)
        return tgpy_decision_refund_later(loop, self);
    return PyErr_Occurred() ? NULL : tgpy_ready(self->state, decision_refund(object, NULL));
}

static PyObject *
decision_repr(PyObject *object)
{
    const tgpy_decision *self = of(object);
    PyObject *rule = get_rule(object, NULL);
    PyObject *retry = get_seconds(object, (void *)offsetof(tgpy_decision, retry_after_us));
    PyObject *repr = rule && retry ? PyUnicode_FromFormat("<Decision %s%s by %R: remaining=%llu, retry_after=%R>",
                                                          self->allowed ? "allowed" : "denied",
                                                          self->degraded ? ", degraded" : "", rule,
                                                          (unsigned long long)self->remaining, retry)
                                   : NULL;
    Py_XDECREF(rule);
    Py_XDECREF(retry);
    return repr;
}

#define AT(field) (void *)offsetof(tgpy_decision, field)

static PyGetSetDef decision_getset[] = {
    { "allowed", get_flag, NULL, "The whole cost fits under every rule and has been taken; else nothing has.", AT(allowed) },
    { "degraded", get_flag, NULL, "The store did not answer; `allowed` is what on_store_failure says.", AT(degraded) },
    { "limit", get_number, NULL, "Units per period, of the reported rule.", AT(limit) },
    { "burst", get_number, NULL, "What the reported rule's bucket holds; else equal to limit.", AT(burst) },
    { "remaining", get_number, NULL,
      "Hits of cost 1 that would pass at this instant, after this decision: the smallest over all rules.", AT(remaining) },
    { "rule", get_rule, NULL,
      "The reported rule as text: when denied the one with the longest retry, else the one with the smallest remaining.",
      NULL },
    { "rules", get_rules, NULL, "What each rule said of each identity, a tuple of RuleResult; empty when degraded.", NULL },
    { "retry_after", get_seconds, NULL,
      "Seconds: 0.0 when allowed, else the wait after which this same hit passes if nobody else hits; math.inf: never.",
      AT(retry_after_us) },
    { "reset_after", get_seconds, NULL, "Seconds until the reported rule's state equals a fresh one.", AT(reset_after_us) },
    { "delay", get_seconds, NULL, "Leaky bucket: seconds to hold an allowed hit; the longest over all rules.", AT(delay_us) },
    { "retry_after_us", get_wait_us, NULL, "retry_after in microseconds, exact; None: never.", AT(retry_after_us) },
    { "reset_after_us", get_number, NULL, "reset_after in microseconds, exact.", AT(reset_after_us) },
    { "delay_us", get_number, NULL, "delay in microseconds, exact.", AT(delay_us) },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef decision_methods[] = {
    { "refund", decision_refund, METH_NOARGS,
      "refund($self, /)\n--\n\n"
      "Gives back exactly what this decision took, once; a second call, and one on a denied decision, does nothing.\n\n"
      "Raises StoreError when the store did not answer: it may then be called again." },
    { "refund_async", decision_refund_async, METH_NOARGS,
      "refund_async($self, /)\n--\n\nrefund() for async code: begun by the call; await it, once." },
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyType_Slot decision_slots[] = {
    { Py_tp_doc, "The answer to one hit over all rules and identities; true when allowed.\n\n"
                 "The plain numbers are those of the reported rule. docs/python.md says what each means, to the\n"
                 "microsecond. Made by a Limiter or a Judgement only." },
    { Py_tp_dealloc, decision_dealloc },
    { Py_tp_repr, decision_repr },
    { Py_nb_bool, decision_bool },
    { Py_tp_getset, decision_getset },
    { Py_tp_methods, decision_methods },
    { 0, NULL },
};

PyType_Spec tgpy_decision_spec = {
    .name = "tidegate.Decision",
    .basicsize = (int)HEAD_BYTES,
    .itemsize = 1,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = decision_slots,
};
