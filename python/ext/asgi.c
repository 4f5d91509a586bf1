/* What an ASGI face does for every request that is let through, in one piece: the request's state, the template of its
 * route, the judgement. Written in Python it took more time than all the C it called; whatever is rarer than that (a
 * refusal, a HEAD, a user to be asked for, a route seen for the first time) is left to Python, which is told by None.
 *
 * The state of a request is the list of its judgements in scope["tidegate"]. A plain list has a send of asgi_send()
 * around it.
 * Must not enter: deciding; how an answer looks. */
#include "ext.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

static PyObject *
from_scope(const tgpy_state *state, PyObject *scope, tgpy_name name)
{
    return PyDict_GetItemWithError(scope, state->names[name]);
}

/* http or websocket: what is judged. */
static TGPY_HOT bool
is_request(const tgpy_state *state, PyObject *scope)
{
    PyObject *type = from_scope(state, scope, NAME_type);
    if (type == state->names[NAME_http] || type == state->names[NAME_websocket])
        return true;
    return type && PyUnicode_Check(type) &&
           (PyUnicode_Compare(type, state->names[NAME_http]) == 0 ||
            PyUnicode_Compare(type, state->names[NAME_websocket]) == 0);
}

/* What stands for the met route: FastAPI's effective context where it speaks of this route, else the route. A new reference;
 * NULL where there is none or with an exception set. See route_template in _routes.py. */
static PyObject *
route_key(const tgpy_state *state, PyObject *scope)
{
    PyObject *route = Py_XNewRef(from_scope(state, scope, NAME_route));
    PyObject *fastapi = route || !PyErr_Occurred() ? Py_XNewRef(from_scope(state, scope, NAME_fastapi)) : NULL;
    PyObject *context =
        fastapi && PyDict_Check(fastapi)
            ? Py_XNewRef(PyDict_GetItemWithError(fastapi, state->names[NAME_effective_route_context])) : NULL;
    Py_XDECREF(fastapi);
    static const tgpy_name names[] = { NAME_original_route, NAME_starlette_route };
    bool speaks = false;
    for (size_t i = 0; context && context != Py_None && !speaks && i < 2; i++) {
        PyObject *spoken_of = PyObject_GetAttr(context, state->names[names[i]]);
        if (!spoken_of)
            PyErr_Clear();
        speaks = !route || spoken_of == route;
        Py_XDECREF(spoken_of);
    }
    if (speaks) {
        Py_XDECREF(route);
        return context;
    }
    Py_XDECREF(context);
    if (PyErr_Occurred())
        Py_CLEAR(route);
    return route;
}

/* Let through, and nothing more to find out: neither a body to be read nor an answer to be waited for. */
static bool
is_done(PyObject *judgement)
{
    const tgpy_judgement *made = (tgpy_judgement *)judgement;
    return made->status == 0 && !made->needs_body && !made->settles && made->missing[0] == '\0';
}

/* ---- a dependency ---- */

enum { MET_ROUTES = 8 }; /* a limit of a router or an application stands before many */

/* The template of a route below a router: what the router's table has said. */
typedef struct met_route {
    PyObject *router, *key, *template;
    tg_text text; /* of the template */
} met_route;

typedef struct hit {
    PyObject_HEAD
    tgpy_called *called;
    tgpy_state *state;
    PyObject *limiter;
    uint64_t cost;
    bool by_route, by_user;
    unsigned routes; /* state->routes, of which the following speak */
    met_route met[MET_ROUTES];
} hit;

static void
forget_routes(hit *self)
{
    for (size_t i = 0; i < MET_ROUTES; i++) {
        const met_route old = self->met[i];
        self->met[i] = (met_route){ .key = NULL };
        Py_XDECREF(old.router);
        Py_XDECREF(old.key);
        Py_XDECREF(old.template);
    }
}

/* The template as the router's table has it. A new reference; NULL: to be found by Python, or with an exception set. */
static PyObject *
look_up_template(const tgpy_state *state, PyObject *router, PyObject *key)
{
    PyObject *ready = PyObject_GetAttr(router, state->names[NAME__tidegate_ready]);
    if (!ready) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *id = PyDict_Check(ready) ? PyLong_FromVoidPtr(key) : NULL;
    PyObject *template = id ? PyDict_GetItemWithError(ready, id) : NULL;
    Py_XINCREF(template);
    Py_XDECREF(id);
    Py_DECREF(ready);
    return template;
}

/* Remembers the template, if the router's table has it. */
static PyObject *
meet_route(hit *self, met_route *met, PyObject *router, PyObject *key, tg_text *text)
{
    const tgpy_state *state = self->state;
    PyObject *template = look_up_template(state, router, key), *made = NULL;
    if (!template || !PyUnicode_Check(template) || !tgpy_text(template, text, &made) || made) {
        Py_XDECREF(template); /* with a lone surrogate in it: Python knows what to do */
        Py_XDECREF(made);
        return NULL;
    }
    if (self->routes == state->routes) { /* looking it up may have run code that made another table */
        const met_route old = *met;
        *met = (met_route){ Py_NewRef(router), Py_NewRef(key), Py_NewRef(template), *text };
        Py_XDECREF(old.router);
        Py_XDECREF(old.key);
        Py_XDECREF(old.template);
    }
    return template;
}

/* The template and its text. A new reference; NULL: to be found by Python, or with an exception set. What is found on the
 * way is held: a lookup or an attribute may run code that changes the scope. */
static PyObject *
template_of(hit *self, PyObject *scope, tg_text *text)
{
    const tgpy_state *state = self->state;
    PyObject *router = Py_XNewRef(from_scope(state, scope, NAME_router));
    PyObject *key = router ? route_key(state, scope) : NULL, *template = NULL;
    if (key) {
        if (self->routes != state->routes) {
            forget_routes(self);
            self->routes = state->routes;
        }
        met_route *met = &self->met[((uintptr_t)key >> 6) % MET_ROUTES];
        if (met->key == key && met->router == router) {
            *text = met->text;
            template = Py_NewRef(met->template);
        } else {
            template = meet_route(self, met, router, key, text);
        }
        Py_DECREF(key);
    }
    Py_XDECREF(router);
    return template;
}

/* Gives the Decision of a request that is let through; the Judgement of one that is not; None where Python has to see to
 * it. */
static TGPY_HOT PyObject *
judge_routed(hit *self, PyObject *scope, PyObject *judgements, tg_text route)
{
    tgpy_request request;
    PyObject *result = NULL;
    if (tgpy_request_of_scope_late(self->state, &request, scope, route, self->by_user, TG_READ_HEADERS | TG_READ_TARGET)) {
        const tg_text method = request.request.method;
        if (method.length == 4 && memcmp(method.data, "HEAD", 4) == 0)
            result = Py_NewRef(Py_None);
        else
            result = tgpy_judge_late(self->state, self->limiter, &request, judgements, self->cost);
    }
    tgpy_request_fini(&request);
    if (result && result != Py_None && is_done(result)) {
        PyObject *judgement = result;
        result = PyList_Append(judgements, judgement) == 0 ? (PyObject *)((tgpy_judgement *)judgement)->decision : NULL;
        Py_XINCREF(result);
        Py_DECREF(judgement);
    }
    return result;
}

static TGPY_HOT PyObject *
charge(hit *self, PyObject *scope)
{
    if (!PyDict_Check(scope))
        Py_RETURN_NONE;
    PyObject *judgements = from_scope(self->state, scope, NAME_tidegate);
    if (!judgements || !PyList_CheckExact(judgements)) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(judgements); /* reading the scope may run code that changes it */
    tg_text text = { NULL, 0 };
    PyObject *route = self->by_route ? template_of(self, scope, &text) : NULL, *result = NULL;
    if (route || !self->by_route)
        result = judge_routed(self, scope, judgements, text);
    else if (!PyErr_Occurred())
        result = Py_NewRef(Py_None);
    Py_XDECREF(route);
    Py_DECREF(judgements);
    return result;
}

TGPY_HOT PyObject *
tgpy_hit_scope(const tgpy_state *state, PyObject *object, PyObject *scope)
{
    return Py_TYPE(object) == state->hit_type ? charge((hit *)object, scope)
                                              : PyObject_CallFunctionObjArgs(object, scope, NULL);
}

static PyObject *
hit_called(PyObject *object, PyObject *const *args, size_t count, PyObject *names)
{
    hit *self = (hit *)object;
    if (tgpy_count(count) != 1 || (names && PyTuple_Size(names) > 0)) {
        PyErr_SetString(PyExc_TypeError, "expected one argument, the scope");
        return NULL;
    }
    return charge(self, args[0]);
}

static PyObject *
hit_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return tgpy_call_with_tuple(object, hit_called, args, kwargs);
}

static int
hit_traverse(PyObject *object, visitproc visit, void *arg)
{
    const hit *self = (hit *)object;
    for (size_t i = 0; i < MET_ROUTES; i++) {
        Py_VISIT(self->met[i].router);
        Py_VISIT(self->met[i].key);
    }
    Py_VISIT(self->limiter);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int
hit_clear(PyObject *object)
{
    forget_routes((hit *)object); /* cycles go through those alone */
    return 0;
}

static void
hit_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    forget_routes((hit *)object);
    Py_DECREF(((hit *)object)->limiter);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMemberDef hit_members[] = {
    { TGPY_CALLED, T_PYSSIZET, offsetof(hit, called), READONLY, NULL },
    { NULL, 0, 0, 0, NULL },
};

static PyType_Slot hit_slots[] = {
    { Py_tp_doc, "Charges a routed request: see asgi_hit()." },
    { Py_tp_dealloc, hit_dealloc },
    { Py_tp_traverse, hit_traverse },
    { Py_tp_clear, hit_clear },
    { Py_tp_call, hit_call },
    { Py_tp_members, hit_members },
    { 0, NULL },
};

PyType_Spec tgpy_hit_spec = {
    .name = "tidegate._core.Hit",
    .basicsize = sizeof(hit),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = hit_slots,
};

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
    tgpy_state *state = PyModule_GetState(module);
    uint64_t cost;
    if (count < 3 || count > 4 || Py_TYPE(args[0]) != state->limiter_type || !PyBool_Check(args[2]) ||
        (count == 4 && !PyBool_Check(args[3]))) {
        PyErr_SetString(PyExc_TypeError, "asgi_hit() takes a Limiter, a cost and whether it counts by route, and by user");
        return NULL;
    }
    if (!tgpy_cost(args[1], &cost))
        return NULL;
    if (is_remote(state, args[0]))
        return PyCFunction_NewEx(&left_definition, NULL, NULL);
    hit *self = PyObject_GC_New(hit, state->hit_type);
    if (!self)
        return NULL;
    self->called = hit_called;
    self->state = state;
    self->limiter = Py_NewRef(args[0]);
    self->cost = cost;
    self->by_route = args[2] == Py_True;
    self->by_user = count == 3 || args[3] == Py_True;
    self->routes = state->routes;
    memset(self->met, 0, sizeof self->met);
    PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

PyObject *
tgpy_routes_changed(PyObject *module, PyObject *Py_UNUSED(unused))
{
    ((tgpy_state *)PyModule_GetState(module))->routes++;
    Py_RETURN_NONE;
}

/* ---- the middleware ---- */

/* `self` is (gate, whether somebody tells the user, module). Gives the `send` for a request that is let through; the
 * Judgement of one that is not, or not yet; None where Python has to see to it. */
static TGPY_HOT PyObject *
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
    tgpy_request request;
    PyObject *judgement = NULL;
    if (send) {
        /* A rules file always looks at the path. */
        if (tgpy_request_of_scope_late(state, &request, scope, (tg_text){ NULL, 0 }, true, TG_READ_HEADERS))
            judgement = tgpy_judge_late(state, (PyObject *)gate, &request, judgements, 1);
        tgpy_request_fini(&request);
    }
    PyObject *result = judgement;
    if (judgement && is_done(judgement)) {
        result = PyList_Append(judgements, judgement) == 0 ? Py_NewRef(send) : NULL;
        Py_DECREF(judgement);
    } else if (judgement && send != args[1] && PyDict_DelItem(scope, state->names[NAME_tidegate]) != 0) {
        Py_CLEAR(result); /* the list goes with the send that was made for it */
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
    tgpy_called *called;
    tgpy_state *state;
    PyObject *app; /* as a middleware keeps it: others look along the chain */
} answers;

static TGPY_HOT PyObject *
call_around(const answers *self, PyObject *scope, PyObject *receive, PyObject *send)
{
    tgpy_state *state = self->state;
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
answers_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *scope, *receive, *send;
    static char *names[] = { "scope", "receive", "send", NULL };
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &scope, &receive, &send))
        return NULL;
    return call_around((answers *)self, scope, receive, send);
}

/* As every server and framework calls an application. */
static TGPY_HOT PyObject *
answers_called(PyObject *self, PyObject *const *args, size_t count, PyObject *names)
{
    if (tgpy_count(count) == 3 && (!names || PyTuple_Size(names) == 0))
        return call_around((answers *)self, args[0], args[1], args[2]);
    PyObject *tuple = PyTuple_New(tgpy_count(count)), *named = PyDict_New(), *awaitable = NULL;
    bool done = tuple && named;
    for (Py_ssize_t i = 0; done && i < tgpy_count(count); i++)
        done = PyTuple_SetItem(tuple, i, Py_NewRef(args[i])) == 0;
    for (Py_ssize_t i = 0; done && names && i < PyTuple_Size(names); i++)
        done = PyDict_SetItem(named, PyTuple_GetItem(names, i), args[tgpy_count(count) + i]) == 0;
    if (done)
        awaitable = answers_call(self, tuple, named);
    Py_XDECREF(tuple);
    Py_XDECREF(named);
    return awaitable;
}

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
    tgpy_state *state = tgpy_state_of_type(type);
    answers *self = state ? PyObject_GC_New(answers, type) : NULL;
    if (!self)
        return NULL;
    self->called = answers_called;
    self->state = state;
    self->app = Py_NewRef(app);
    PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

static int
answers_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((answers *)self)->app);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int
answers_clear(PyObject *self)
{
    Py_CLEAR(((answers *)self)->app);
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
answers_app(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((answers *)self)->app);
}

static PyGetSetDef answers_getset[] = {
    { "app", answers_app, NULL, "The application inside.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyMemberDef answers_members[] = {
    { TGPY_CALLED, T_PYSSIZET, offsetof(answers, called), READONLY, NULL },
    { NULL, 0, 0, 0, NULL },
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
    { Py_tp_members, answers_members },
    { 0, NULL },
};

PyType_Spec tgpy_answers_spec = {
    .name = "tidegate._core.Answers",
    .basicsize = sizeof(answers),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = answers_slots,
};
