/* RuleResult: what one rule said about one identity. Plain numbers, made when `Decision.rules` is asked for. */
#include "ext.h"

#include <stddef.h>

static const tg_result *
of(PyObject *self)
{
    return &((tgpy_rule_result *)self)->result;
}

static void
rule_result_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *
get_rule(PyObject *self, void *Py_UNUSED(closure))
{
    char text[TG_RULE_TEXT_MAX];
    tg_rule_text(&of(self)->rule, text);
    return PyUnicode_FromString(text);
}

static PyObject *
get_allowed(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(of(self)->allowed);
}

static PyObject *
get_algorithm(PyObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(tg_algorithm_name(of(self)->rule.algorithm));
}

/* The closure is the number's offset in tg_result. */
static uint64_t
number_at(PyObject *self, void *closure)
{
    return *(const uint64_t *)((const char *)of(self) + (size_t)closure);
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
rule_result_repr(PyObject *self)
{
    char text[TG_RULE_TEXT_MAX];
    tg_rule_text(&of(self)->rule, text);
    PyObject *retry = get_seconds(self, (void *)offsetof(tg_result, retry_after_us));
    PyObject *repr = retry ? PyUnicode_FromFormat("RuleResult('%s', allowed=%s, remaining=%llu, retry_after=%R)", text,
                                                  of(self)->allowed ? "True" : "False",
                                                  (unsigned long long)of(self)->remaining, retry)
                           : NULL;
    Py_XDECREF(retry);
    return repr;
}

#define AT(field) (void *)offsetof(tg_result, field)

static PyGetSetDef rule_result_getset[] = {
    { "rule", get_rule, NULL, "The rule as text, in its canonical spelling.", NULL },
    { "allowed", get_allowed, NULL, "Whether this rule alone allows the hit.", NULL },
    { "limit", get_number, NULL, "Units per period; 0 for deny.", AT(rule.limit) },
    { "burst", get_number, NULL, "What a bucket holds; else equal to limit.", AT(rule.burst) },
    { "period_us", get_number, NULL, "The period in microseconds; 0 for deny.", AT(rule.period_us) },
    { "algorithm", get_algorithm, NULL, "Such as \"sliding_log\".", NULL },
    { "remaining", get_number, NULL, "Hits of cost 1 that would pass at this instant, after this decision.", AT(remaining) },
    { "retry_after_us", get_wait_us, NULL, "Microseconds; 0 when allowed, None when no wait can help.", AT(retry_after_us) },
    { "reset_after_us", get_number, NULL, "Microseconds until the state equals a fresh one.", AT(reset_after_us) },
    { "delay_us", get_number, NULL, "Leaky bucket: microseconds to hold an allowed hit.", AT(delay_us) },
    { "retry_after", get_seconds, NULL, "Seconds; 0.0 when allowed, math.inf when no wait can help.", AT(retry_after_us) },
    { "reset_after", get_seconds, NULL, "Seconds until the state equals a fresh one.", AT(reset_after_us) },
    { "delay", get_seconds, NULL, "Leaky bucket: seconds to hold an allowed hit.", AT(delay_us) },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef rule_result_methods[] = {
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyType_Slot rule_result_slots[] = {
    { Py_tp_doc, "What one rule said about one identity. Made by a decision only." },
    { Py_tp_dealloc, rule_result_dealloc },
    { Py_tp_repr, rule_result_repr },
    { Py_tp_getset, rule_result_getset },
    { Py_tp_methods, rule_result_methods },
    { 0, NULL },
};

PyType_Spec tgpy_rule_result_spec = {
    .name = "tidegate.RuleResult",
    .basicsize = sizeof(tgpy_rule_result),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = rule_result_slots,
};
