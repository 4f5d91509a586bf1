/* tidegate._core: the module, its state, and nothing that a request meets. */
#include "ext.h"

static tgpy_state *
state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

tgpy_state *
tgpy_state_of_type(PyTypeObject *type)
{
    for (; type; type = PyType_GetSlot(type, Py_tp_base)) {
        tgpy_state *state = PyType_GetModuleState(type);
        if (state)
            return state;
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_SystemError, "a type of tidegate has lost its module");
    return NULL;
}

static int
add_type(PyObject *module, PyTypeObject **type, PyType_Spec *spec, bool public)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (!*type)
        return -1;
    return public ? PyModule_AddType(module, *type) : 0;
}

static int
module_exec(PyObject *module)
{
    static const char *const words[TGPY_NAME_COUNT] = {
#define TGPY_NAME_WORD(name) [NAME_##name] = #name,
        TGPY_NAMES(TGPY_NAME_WORD)
#undef TGPY_NAME_WORD
            [NAME_proxy_fix] = "werkzeug.proxy_fix.orig",
    };
    tgpy_state *state = state_of(module);
    for (size_t i = 0; i < TGPY_NAME_COUNT; i++) {
        state->names[i] = PyUnicode_InternFromString(words[i]);
        if (!state->names[i])
            return -1;
    }
    if (tgpy_errors_init(module, state) != 0 ||
        add_type(module, &state->clock_type, &tgpy_clock_spec, true) != 0 ||
        add_type(module, &state->rule_result_type, &tgpy_rule_result_spec, true) != 0 ||
        add_type(module, &state->decision_type, &tgpy_decision_spec, true) != 0 ||
        add_type(module, &state->limiter_type, &tgpy_limiter_spec, true) != 0 ||
        add_type(module, &state->judgement_type, &tgpy_judgement_spec, true) != 0 ||
        add_type(module, &state->gate_type, &tgpy_gate_spec, true) != 0 ||
        add_type(module, &state->ready_type, &tgpy_ready_spec, false) != 0 ||
        add_type(module, &state->loop_type, &tgpy_loop_spec, false) != 0 ||
        add_type(module, &state->watcher_type, &tgpy_watcher_spec, false) != 0 ||
        add_type(module, &state->answers_type, &tgpy_answers_spec, true) != 0 ||
        add_type(module, &state->dependency_type, &tgpy_dependency_spec, true) != 0 ||
        add_type(module, &state->hit_type, &tgpy_hit_spec, false) != 0 ||
        add_type(module, &state->sender_type, &tgpy_sender_spec, false) != 0 ||
        add_type(module, &state->hold_type, &tgpy_hold_spec, true) != 0)
        return -1;
    return PyModule_AddStringConstant(module, "__version__", TG_VERSION);
}

/* Everything the state holds, for the three functions below. */
#define EACH_OBJECT(X)                                                                                                 \
    X(clock_type) X(rule_result_type) X(decision_type) X(limiter_type) X(judgement_type) X(gate_type) X(ready_type)    \
    X(answers_type) X(sender_type) X(hit_type) X(dependency_type) X(hold_type) X(loop_type) X(watcher_type)                      \
    X(get_running_loop) X(default_clock)                                                                               \
    X(fields) X(opening) X(body) X(error) X(rule_error) X(config_error) X(store_error) X(identity_error)

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    tgpy_state *state = state_of(module);
#define VISIT(name) Py_VISIT(state->name);
    EACH_OBJECT(VISIT)
#undef VISIT
    return 0;
}

static int
module_clear(PyObject *module)
{
    tgpy_state *state = state_of(module);
    tgpy_loops_end(state);
#define CLEAR(name) Py_CLEAR(state->name);
    EACH_OBJECT(CLEAR)
#undef CLEAR
    for (size_t i = 0; i < TGPY_NAME_COUNT; i++)
        Py_CLEAR(state->names[i]);
    for (size_t i = 0; i < state->field_name_count; i++)
        Py_CLEAR(state->field_names[i]);
    state->field_name_count = 0;
    for (size_t i = 0; i < TGPY_PAIRS_MAX; i++) {
        state->pairs[i].name = NULL;
        Py_CLEAR(state->pairs[i].lower);
    }
    return 0;
}

static void
module_free(void *module)
{
    module_clear(module);
    tgpy_decision_drop_blocks(state_of(module));
    tgpy_judgement_drop_blocks(state_of(module));
}

#define FAST(name) #name, (PyCFunction)(void (*)(void))tgpy_##name

static PyMethodDef module_methods[] = {
    { FAST(judge_asgi), METH_FASTCALL | METH_KEYWORDS,
      "judge_asgi($module, limiters, scope, /, *, route=None, user=None, cost=1, prior=(), plan=None, "
      "body=None, reads_body=False, keys=None)\n--\n\n"
      "Judges an ASGI scope (http or websocket) under several limiters at once, all or nothing, each by its own `by`.\n\n"
      "route: the route's template. user: else scope[\"user\"] when authenticated. prior: judgements already made for this\n"
      "same request: what they charged is judged again but not charged again." },
    { FAST(judge_asgi_async), METH_FASTCALL | METH_KEYWORDS,
      "judge_asgi_async($module, limiters, scope, /, *, route=None, user=None, cost=1, prior=(), plan=None, "
      "body=None, reads_body=False, keys=None)\n--\n\n"
      "judge_asgi() for async code: await it, once, for the Judgement." },
    { FAST(judge_wsgi), METH_FASTCALL | METH_KEYWORDS,
      "judge_wsgi($module, limiters, environ, /, *, route=None, user=None, cost=1, prior=(), plan=None, "
      "body=None, reads_body=False, keys=None)\n--\n\n"
      "As judge_asgi, of a WSGI environ. user: else REMOTE_USER." },
    { "refusal", tgpy_refusal, METH_O,
      "refusal($module, decision, /)\n--\n\n"
      "The answer to a request that the application refuses itself, of a decision of hit(), wait() or reserve(): the status,\n"
      "the fields and the body that every face sends for it, 429 with Retry-After in whole seconds, rounded up (RFC 9110\n"
      "10.2.3). Raises ValueError for one that allows." },
    { FAST(client_address), METH_FASTCALL,
      "client_address($module, scope_or_environ, limiter_or_gate, /)\n--\n\n"
      "The client's address as it is counted: proxies walked, mapped addresses unmapped, IPv6 cut to its prefix.\n\n"
      "Raises IdentityError for a local socket that is not trusted, or a peer that is no address." },
    { FAST(asgi_hit), METH_FASTCALL,
      "asgi_hit($module, limiter, cost, by_route, by_user=True, /)\n--\n\n"
      "A callable of a scope that charges a routed request, for a dependency: the Decision of one that is let through, the\n"
      "Judgement of one that is not, None where the caller has to see to it." },
    { FAST(asgi_enter), METH_FASTCALL,
      "asgi_enter($module, gate, tells_user, /)\n--\n\n"
      "A function of a scope and a send that judges a request, for a middleware: the send of one that is let through, the\n"
      "Judgement of one that is not, None where the caller has to see to it." },
    { FAST(asgi_send), METH_FASTCALL,
      "asgi_send($module, judgements, send, scope=..., /)\n--\n\n"
      "A `send` for an ASGI application: calls `send`, and puts the fields of the judgements that the list holds by then on\n"
      "the message that opens the answer, in place of fields of the same name. The message itself is not changed." },
    { "routes_changed", tgpy_routes_changed, METH_NOARGS,
      "routes_changed($module, /)\n--\n\n"
      "What asgi_hit() remembers of templates is over: routes are reached in other ways." },
    { "tell_outcomes", tgpy_tell_outcomes, METH_NOARGS,
      "tell_outcomes($module, /)\n--\n\n"
      "From now on the callables of asgi_send() look for scope[\"tidegate_settle\"], which is told what is answered." },
    { "shown", tgpy_shown, METH_O,
      "shown($module, judgements, /)\n--\n\n"
      "The judgement of a list whose fields a client sees: the last that refuses, else the tightest, by the smallest remaining,\n"
      "then the longest reset." },
    { FAST(store_metrics), METH_FASTCALL,
      "store_metrics($module, limiter_or_gate, format, /)\n--\n\n"
      "What all processes have counted in its store, as \"text\", \"json\" or \"prometheus\"; as `tidegate stats`." },
    { "use_clock", tgpy_use_clock, METH_O,
      "use_clock($module, clock, /)\n--\n\n"
      "The clock of every Limiter and Gate made from now on that names none; None: the store's own. Gives the one before.\n"
      "For tests: see tidegate.pytest_plugin." },
    { "switch_off", tgpy_switch_off, METH_O,
      "switch_off($module, off, /)\n--\n\n"
      "While True everything is let through and no store is asked, whatever has been made. Gives what it was. For tests." },
    { FAST(hit_within), METH_FASTCALL | METH_KEYWORDS,
      "hit_within($module, limiter, patience_us, /, *parts, cost=1, dims=None)\n--\n\n"
      "A hit that on buckets may wait for so many microseconds: when allowed, its `delay` says how long it has to." },
    { FAST(hit_within_async), METH_FASTCALL | METH_KEYWORDS,
      "hit_within_async($module, limiter, patience_us, /, *parts, cost=1, dims=None)\n--\n\n"
      "The same for a coroutine, of a limiter whose store is asked over a network." },
    { FAST(reserve), METH_FASTCALL | METH_KEYWORDS,
      "reserve($module, limiter, lease, /, *parts, cost=1, dims=None)\n--\n\n"
      "Takes units on an estimate, held for `lease` seconds; returns a Hold." },
    { "limiter_kind", tgpy_limiter_kind, METH_O,
      "limiter_kind($module, limiter, /)\n--\n\n"
      "(its store is asked over a network, the time of its manual clock or None)" },
    { "take_notices", tgpy_take_notices, METH_NOARGS,
      "take_notices($module, /)\n--\n\n"
      "Takes what the library has to say to an operator, as (code, message); empty almost always. Each call of a limiter\n"
      "sends what is waiting to the logger \"tidegate\" by itself." },
    { NULL, NULL, 0, NULL },
};

static PyModuleDef_Slot module_slots[] = {
    { Py_mod_exec, module_exec },
/* These slots are unknown to 3.11, where a module of the Limited API must still load. No state outside the module's is
 * kept here and the C core is thread-safe, so an interpreter with its own lock may have its own copy. Py_mod_gil is left
 * out: the free list of decisions relies on the lock, and a free-threaded interpreter then turns it on. */
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX >= 0x030C0000
    { Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED },
#endif
    { 0, NULL },
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tidegate._core",
    .m_doc = "The compiled part of tidegate: glue to csrc/include/tidegate.h, where each number is defined.",
    .m_size = sizeof(tgpy_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&module_definition);
}
