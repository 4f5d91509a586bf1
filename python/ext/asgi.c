/* What an ASGI face does for every request that is let through, in one piece: the request's state, the template of its
 * route, the judgement. Written in Python it took more time than all the C it called; whatever is rarer than that (a
 * refusal, a HEAD, a user to be asked for, a route seen for the first time) is left to Python, which is told by None.
 *
 * The state of a request is the list of its judgements in scope["tidegate"]. A plain list has a send of asgi_send()
 * around it.
 * Must not enter: deciding; how an answer looks. */
#include "ext.h"

#include <string.h>

static PyObject *
from_scope(const tgpy_state *state, PyObject *scope, tgpy_name name)
{
    return PyDict_GetItemWithError(scope, state->names[name]);
}

/* http or websocket: what is judged. */
static bool
is_request(const tgpy_state *state, PyObject *scope)
{
    PyObject *type = from_scope(state, scope, NAME_type);
    if (type == state->names[NAME_http] || type == state->names[NAME_websocket])
        return true;
    return type && PyUnicode_Check(type) &&
           (PyUnicode_Compare(type, state->names[NAME_http]) == 0 ||
            PyUnicode_Compare(type, state->names[NAME_websocket]) == 0);
}

/* What stands for the met route: FastAPI's effective context where it speaks of this route, else the route. Borrowed
 * from the scope, NULL where there is none or with an exception set. See route_template in _routes.py. */
static PyObject *
route_key(const tgpy_state *state, PyObject *scope)
{
    PyObject *route = from_scope(state, scope, NAME_route);
    PyObject *fastapi = route || !PyErr_Occurred() ? from_scope(state, scope, NAME_fastapi) : NULL;
    if (!fastapi || !PyDict_Check(fastapi))
        return PyErr_Occurred() ? NULL : route;
    PyObject *context = PyDict_GetItemWithError(fastapi, state->names[NAME_effective_route_context]);
    if (!context || context == Py_None)
        return PyErr_Occurred() ? NULL : route;
    static const tgpy_name names[] = { NAME_original_route, NAME_starlette_route };
    for (size_t i = 0; i < 2; i++) {
        PyObject *spoken_of = PyObject_GetAttr(context, state->names[names[i]]);
        if (!spoken_of)
            PyErr_Clear();
        Py_XDECREF(spoken_of); /* only compared */
        if (!route || spoken_of == route)
            return context;
    }
    return route;
}

/* A new reference; NULL: to be found by Python, or with an exception set. */
static PyObject *
template_of(const tgpy_state *state, PyObject *scope)
{
    PyObject *router = from_scope(state, scope, NAME_router);
    if (!router)
        return NULL;
    PyObject *ready = PyObject_GetAttr(router, state->names[NAME__tidegate_ready]);
    if (!ready) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *key = PyDict_Check(ready) ? route_key(state, scope) : NULL;
    PyObject *id = key ? PyLong_FromVoidPtr(key) : NULL;
    PyObject *template = id ? PyDict_GetItemWithError(ready, id) : NULL;
    Py_XINCREF(template);
    Py_XDECREF(id);
    Py_DECREF(ready);
    return template;
}

/* Let through, and nothing more to find out: neither a body to be read nor an answer to be waited for. */
static bool
is_done(PyObject *judgement)
{
    const tgpy_judgement *made = (tgpy_judgement *)judgement;
    return made->status == 0 && !made->needs_body && !made->settles && made->missing[0] == '\0';
}

/* ---- a dependency ---- */

/* `self` is (limiter, cost, by route, module). Gives the Decision of a request that is let through; the Judgement of
 * one that is not; None where Python has to see to it. */
static PyObject *
hit(PyObject *self, PyObject *scope)
{
    tgpy_state *state = PyModule_GetState(PyTuple_GetItem(self, 3));
    if (!PyDict_Check(scope))
        Py_RETURN_NONE;
    PyObject *judgements = from_scope(state, scope, NAME_tidegate);
    PyObject *method = judgements ? from_scope(state, scope, NAME_method) : NULL;
    if (PyErr_Occurred())
        return NULL;
    if (!judgements || !PyList_CheckExact(judgements) ||
        (method && PyUnicode_Check(method) && PyUnicode_CompareWithASCIIString(method, "HEAD") == 0))
        Py_RETURN_NONE;
    PyObject *route = NULL;
    if (PyTuple_GetItem(self, 2) == Py_True) {
        route = template_of(state, scope);
        if (!route && PyErr_Occurred())
            return NULL;
        if (!route)
            Py_RETURN_NONE;
    }
    Py_INCREF(judgements); /* reading the scope may run code that changes it */
    const unsigned long long cost = PyLong_AsUnsignedLongLong(PyTuple_GetItem(self, 1));
    PyObject *judgement = tgpy_judge_scope(state, PyTuple_GetItem(self, 0), scope, route, judgements, cost);
    PyObject *result = judgement;
    if (judgement && is_done(judgement)) {
        result = PyList_Append(judgements, judgement) == 0 ? (PyObject *)((tgpy_judgement *)judgement)->decision : NULL;
        Py_XINCREF(result);
        Py_DECREF(judgement);
    }
    Py_XDECREF(route);
    Py_DECREF(judgements);
    return result;
}

/* Stands for the two where the store is remote: there a question is awaited, and that is Python's. */
static PyObject *
leave_to_python(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count))
{
    Py_RETURN_NONE;
}

static PyMethodDef left_definition = { "left", (PyCFunction)(void (*)(void))leave_to_python, METH_FASTCALL, NULL };

static bool
is_remote(tgpy_state *state, PyObject *limiter_or_gate)
{
    const tg_store *store = tgpy_owner_store(state, limiter_or_gate);
    return store && tg_store_remote(store);
}

PyObject *
tgpy_asgi_hit(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static PyMethodDef definition = { "hit", hit, METH_O, NULL };
    tgpy_state *state = PyModule_GetState(module);
    uint64_t cost;
    if (count != 3 || Py_TYPE(args[0]) != state->limiter_type || !PyBool_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "asgi_hit() takes a Limiter, a cost and whether it counts by route");
        return NULL;
    }
    if (!tgpy_cost(args[1], &cost))
        return NULL;
    if (is_remote(state, args[0]))
        return PyCFunction_NewEx(&left_definition, NULL, NULL);
    PyObject *bound = PyTuple_Pack(4, args[0], args[1], args[2], module);
    PyObject *function = bound ? PyCFunction_NewEx(&definition, bound, NULL) : NULL;
    Py_XDECREF(bound);
    return function;
}

/* ---- the middleware ---- */

/* `self` is (gate, whether somebody tells the user, module). Gives the `send` for a request that is let through; the
 * Judgement of one that is not, or not yet; None where Python has to see to it. */
static PyObject *
enter(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    tgpy_state *state = PyModule_GetState(PyTuple_GetItem(self, 2));
    tgpy_gate *gate = (tgpy_gate *)PyTuple_GetItem(self, 0);
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a scope and a send");
        return NULL;
    }
    PyObject *scope = args[0];
    if (!gate->gate || !PyDict_Check(scope) || !is_request(state, scope)) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    const uint64_t generation = tg_gate_generation(gate->gate);
    if (gate->looked != generation) {
        gate->names_route = tg_gate_names(gate->gate, "route");
        gate->names_user = tg_gate_names(gate->gate, "user");
        gate->looked = generation;
    }
    PyObject *judgements = from_scope(state, scope, NAME_tidegate);
    if (!judgements && PyErr_Occurred())
        return NULL;
    if (gate->names_route || (gate->names_user && PyTuple_GetItem(self, 1) == Py_True) ||
        (judgements && !PyList_CheckExact(judgements)))
        Py_RETURN_NONE;
    PyObject *send = Py_NewRef(args[1]);
    Py_XINCREF(judgements);
    if (!judgements) {
        judgements = PyList_New(0);
        Py_DECREF(send);
        send = judgements && PyDict_SetItem(scope, state->names[NAME_tidegate], judgements) == 0
                   ? tgpy_bind_send(state, judgements, args[1], scope)
                   : NULL;
    }
    PyObject *judgement = send ? tgpy_judge_scope(state, (PyObject *)gate, scope, NULL, judgements, 1) : NULL;
    PyObject *result = judgement;
    if (judgement && is_done(judgement)) {
        result = PyList_Append(judgements, judgement) == 0 ? Py_NewRef(send) : NULL;
        Py_DECREF(judgement);
    } else if (judgement && send != args[1] && PyDict_DelItem(scope, state->names[NAME_tidegate]) != 0) {
        Py_CLEAR(result); /* the list goes with the send that was made for it */
        Py_DECREF(judgement);
    }
    Py_XDECREF(judgements);
    Py_XDECREF(send);
    return result;
}

PyObject *
tgpy_asgi_enter(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static PyMethodDef definition = { "enter", (PyCFunction)(void (*)(void))enter, METH_FASTCALL, NULL };
    tgpy_state *state = PyModule_GetState(module);
    if (count != 2 || Py_TYPE(args[0]) != state->gate_type || !PyBool_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "asgi_enter() takes a Gate and whether somebody tells the user");
        return NULL;
    }
    if (is_remote(state, args[0]))
        return PyCFunction_NewEx(&left_definition, NULL, NULL);
    PyObject *bound = PyTuple_Pack(3, args[0], args[1], module);
    PyObject *function = bound ? PyCFunction_NewEx(&definition, bound, NULL) : NULL;
    Py_XDECREF(bound);
    return function;
}

/* ---- around a whole application ---- */

typedef struct answers {
    PyObject_HEAD
    PyObject *app; /* as a middleware keeps it: others look along the chain */
    PyObject *module;
} answers;

static PyObject *
answers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "app", NULL };
    PyObject *app;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Answers", names, &app))
        return NULL;
    if (!PyCallable_Check(app)) {
        PyErr_SetString(PyExc_TypeError, "app must be an ASGI application");
        return NULL;
    }
    PyObject *module = PyType_GetModule(type);
    answers *self = module ? PyObject_GC_New(answers, type) : NULL;
    if (!self)
        return NULL;
    self->app = Py_NewRef(app);
    self->module = Py_NewRef(module);
    PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

static int
answers_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((answers *)self)->app);
    Py_VISIT(((answers *)self)->module);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int
answers_clear(PyObject *self)
{
    Py_CLEAR(((answers *)self)->app);
    Py_CLEAR(((answers *)self)->module);
    return 0;
}

static void
answers_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    answers_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *
answers_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    answers *self = (answers *)object;
    PyObject *scope, *receive, *send;
    static char *names[] = { "scope", "receive", "send", NULL };
    if (!kwargs && PyTuple_Size(args) == 3) {
        scope = PyTuple_GetItem(args, 0);
        receive = PyTuple_GetItem(args, 1);
        send = PyTuple_GetItem(args, 2);
    } else if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &scope, &receive, &send)) {
        return NULL;
    }
    tgpy_state *state = PyModule_GetState(self->module);
    PyObject *bound = NULL;
    if (PyDict_Check(scope) && is_request(state, scope) && !from_scope(state, scope, NAME_tidegate) &&
        !PyErr_Occurred()) {
        PyObject *judgements = PyList_New(0);
        if (judgements && PyDict_SetItem(scope, state->names[NAME_tidegate], judgements) == 0)
            bound = tgpy_bind_send(state, judgements, send, scope);
        Py_XDECREF(judgements);
    }
    PyObject *awaitable =
        PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(self->app, scope, receive, bound ? bound : send, NULL);
    Py_XDECREF(bound);
    return awaitable;
}

static PyObject *
answers_app(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((answers *)self)->app);
}

static PyGetSetDef answers_getset[] = {
    { "app", answers_app, NULL, "The application inside.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot answers_slots[] = {
    { Py_tp_doc, "Answers(app)\n--\n\n"
                 "An ASGI application around another that puts the fields of what is judged inside it on each\n"
                 "answer." },
    { Py_tp_new, answers_new },
    { Py_tp_traverse, answers_traverse },
    { Py_tp_clear, answers_clear },
    { Py_tp_dealloc, answers_dealloc },
    { Py_tp_call, answers_call },
    { Py_tp_getset, answers_getset },
    { 0, NULL },
};

PyType_Spec tgpy_answers_spec = {
    .name = "tidegate._core.Answers",
    .basicsize = sizeof(answers),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = answers_slots,
};
