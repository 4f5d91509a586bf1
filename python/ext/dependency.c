/* What FastAPI calls for a dependency. Called as a coroutine function of Python's, a limit took more time for the frame, the
 * coroutine and the words of the call than for the hit; from here a request that is let through is answered by a Hit that is
 * done already. Everything else is handed to the subclass in Python, which is `tidegate.fastapi.RateLimit`.
 * Must not enter: what is hit, and what is done where it is not simply let through. */
#include "ext.h"

typedef struct dependency {
    PyObject_HEAD
    tgpy_state *state;
    PyObject *hit; /* a callable of a scope, as asgi_hit() makes it; NULL: not said yet */
} dependency;

static PyObject *
dependency_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    tgpy_state *state = tgpy_state_of_type(type);
    dependency *self = state ? (dependency *)PyType_GenericAlloc(type, 0) : NULL;
    if (self)
        self->state = state;
    return (PyObject *)self;
}

static int
dependency_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((dependency *)self)->hit);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int
dependency_clear(PyObject *self)
{
    Py_CLEAR(((dependency *)self)->hit);
    return 0;
}

static void
dependency_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    dependency_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* What was called with beside the two that every limit takes. */
static PyObject *
told_of(const tgpy_state *state, PyObject *kwargs)
{
    PyObject *told = PyDict_Copy(kwargs);
    if (told && (PyDict_DelItem(told, state->names[NAME_conn]) != 0 ||
                 PyDict_DelItem(told, state->names[NAME_response]) != 0))
        Py_CLEAR(told);
    return told;
}

static TGPY_HOT PyObject *
dependency_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    dependency *self = (dependency *)object;
    tgpy_state *state = self->state;
    PyObject *conn = kwargs && self->hit ? PyDict_GetItemWithError(kwargs, state->names[NAME_conn]) : NULL;
    PyObject *response = conn ? PyDict_GetItemWithError(kwargs, state->names[NAME_response]) : NULL;
    if (!response || PyTuple_Size(args) != 0) { /* not as FastAPI calls: what is wrong is Python's to say */
        PyObject *called = PyErr_Occurred() ? NULL : PyObject_GetAttr(object, state->names[NAME__called]);
        PyObject *awaitable = called ? PyObject_Call(called, args, kwargs) : NULL;
        Py_XDECREF(called);
        return awaitable;
    }
    PyObject *scope = PyObject_GetAttr(conn, state->names[NAME_scope]), *hit = Py_NewRef(self->hit);
    PyObject *got = scope ? tgpy_hit_scope(state, hit, scope) : NULL, *awaitable = NULL;
    Py_DECREF(hit); /* held: what a hit runs may set another */
    Py_XDECREF(scope);
    if (got && Py_TYPE(got) == state->decision_type)
        return tgpy_ready(state, got);
    PyObject *told = got ? told_of(state, kwargs) : NULL;
    if (told)
        awaitable = PyObject_CallMethodObjArgs(object, state->names[NAME__otherwise], conn, response, told, got, NULL);
    Py_XDECREF(told);
    Py_XDECREF(got);
    return awaitable;
}

static PyObject *
dependency_hit(PyObject *self, void *Py_UNUSED(closure))
{
    PyObject *hit = ((dependency *)self)->hit;
    return Py_NewRef(hit ? hit : Py_None);
}

static int
dependency_set_hit(PyObject *self, PyObject *hit, void *Py_UNUSED(closure))
{
    if (!hit || !PyCallable_Check(hit)) {
        PyErr_SetString(PyExc_TypeError, "_hit must be a callable of a scope");
        return -1;
    }
    PyObject *before = ((dependency *)self)->hit;
    ((dependency *)self)->hit = Py_NewRef(hit);
    Py_XDECREF(before);
    return 0;
}

static PyGetSetDef dependency_getset[] = {
    { "_hit", dependency_hit, dependency_set_hit, "A callable of a scope: see asgi_hit().", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot dependency_slots[] = {
    { Py_tp_doc, "What FastAPI calls for a dependency, by keywords: asks `_hit` of conn.scope. A Decision is what awaiting it gives\n"
                 "at once; for anything else it is `_otherwise(conn, response, told, got)` that is awaited. Called in another way\n"
                 "it is `_called`." },
    { Py_tp_new, dependency_new },
    { Py_tp_traverse, dependency_traverse },
    { Py_tp_clear, dependency_clear },
    { Py_tp_dealloc, dependency_dealloc },
    { Py_tp_call, dependency_call },
    { Py_tp_getset, dependency_getset },
    { 0, NULL },
};

PyType_Spec tgpy_dependency_spec = {
    .name = "tidegate._core.Dependency",
    .basicsize = sizeof(dependency),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = dependency_slots,
};
