/* Gate: a rules file in force. */
#include "ext.h"

#include <stdlib.h>
#include <string.h>

static tgpy_gate *
of(PyObject *self)
{
    return (tgpy_gate *)self;
}

static PyObject *
gate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "config", "store", "clock", "timeout", "look", NULL };
    PyObject *config = NULL, *store = NULL, *clock = NULL;
    double timeout = 0.05;
    int look = 0;
    uint64_t timeout_us = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$OOdp:Gate", names, &config, &store, &clock, &timeout,
                                     &look) ||
        !tgpy_timeout(timeout, &timeout_us))
        return NULL;
    tgpy_state *state = tgpy_state_of_type(type);
    const int enabled = tgpy_enabled(state);
    if (enabled < 0)
        return NULL;
    if (clock && clock != Py_None && Py_TYPE(clock) != state->clock_type) {
        PyErr_SetString(PyExc_TypeError, "clock must be a ManualClock or None");
        return NULL;
    }
    PyObject *path = tgpy_path(config);
    if (!path)
        return NULL;
    tgpy_gate *self = PyObject_New(tgpy_gate, type);
    if (!self) {
        Py_DECREF(path);
        return NULL;
    }
    self->state = state;
    self->gate = NULL;
    self->looked = 0; /* generations count from 1 */

    tg_text path_text, store_text;
    PyObject *path_made = NULL, *store_made = NULL;
    /* Copied while the interpreter lock is held: another thread may change the environment. */
    const char *config_variable = getenv("TIDEGATE_CONFIG"), *store_variable = getenv("TIDEGATE_STORE");
    char *default_path = strdup(config_variable ? config_variable : "");
    char *default_store = strdup(store_variable ? store_variable : "");
    bool done = default_path && default_store;
    if (!done)
        PyErr_NoMemory();
    done = done && tgpy_text_argument(path, "config", &path_text, &path_made) &&
           tgpy_text_argument(store, "store", &store_text, &store_made);
    if (done && enabled) {
        const tg_gate_options options = {
            .path = path_text.length ? path_text : tg_text_of(default_path),
            .store = store_text.length ? store_text : tg_text_of(default_store),
            .clock = clock && clock != Py_None ? ((tgpy_clock *)clock)->clock : tgpy_default_clock(state),
            .timeout_us = timeout_us,
            .look = look,
        };
        tg_error error;
        tg_status status;
        Py_BEGIN_ALLOW_THREADS
        status = tg_gate_open(&options, &self->gate, &error);
        Py_END_ALLOW_THREADS
        if (status != TG_OK) {
            tgpy_raise(state, &error, NULL);
            done = false;
        }
    }
    free(default_path);
    free(default_store);
    Py_XDECREF(path_made);
    Py_XDECREF(store_made);
    Py_DECREF(path);
    tgpy_log_notices(state);
    if (!done)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
gate_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyThreadState *thread = tgpy_others_run(of(self)->gate ? tg_gate_store(of(self)->gate) : NULL);
    tg_gate_close(of(self)->gate); /* a remote store that nobody else has open waits for its last word */
    tgpy_others_stop(thread);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *
gate_reload(PyObject *self, PyObject *Py_UNUSED(unused))
{
    tg_error error;
    tg_status status = TG_OK;
    if (of(self)->gate) {
        Py_BEGIN_ALLOW_THREADS
        status = tg_gate_reload(of(self)->gate, &error);
        Py_END_ALLOW_THREADS
    }
    tgpy_log_notices(of(self)->state);
    if (status != TG_OK)
        return tgpy_raise(of(self)->state, &error, NULL);
    Py_RETURN_NONE;
}

static PyObject *
gate_names(PyObject *self, PyObject *kind)
{
    PyObject *bytes = PyUnicode_Check(kind) ? PyUnicode_AsUTF8String(kind) : NULL;
    if (!bytes) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "names() takes a kind as str, such as \"user\"");
        return NULL;
    }
    const bool named = of(self)->gate && tg_gate_names(of(self)->gate, PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    return PyBool_FromLong(named);
}

static PyObject *
get_generation(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(of(self)->gate ? tg_gate_generation(of(self)->gate) : 0);
}

static PyObject *
get_enabled(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(of(self)->gate != NULL);
}

tg_store *
tgpy_owner_store(tgpy_state *state, PyObject *owner)
{
    if (Py_TYPE(owner) == state->gate_type)
        return of(owner)->gate ? tg_gate_store(of(owner)->gate) : NULL;
    const tgpy_limiter *limiter = (tgpy_limiter *)owner;
    return limiter->limiter ? tg_limiter_store(limiter->limiter) : NULL;
}

#define METHOD(name) #name, (PyCFunction)(void (*)(void))tgpy_gate_##name, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef gate_methods[] = {
    { "reload", gate_reload, METH_NOARGS,
      "reload($self, /)\n--\n\n"
      "Reads the rules file again. Raises ConfigError with file, line and column, and then the rules in force stay.\n"
      "What was used stays used; no request sees half of a change." },
    { "names", gate_names, METH_O,
      "names($self, kind, /)\n--\n\n"
      "Whether any policy in force counts by this kind, such as \"user\" or \"route\". Holds for one generation." },
    { "explain_as", (PyCFunction)(void (*)(void))tgpy_gate_explain_as, METH_VARARGS | METH_KEYWORDS,
      "explain_as($self, /, method, path, headers=(), peer=None, host=None, user=None, route=None, cost=1, json=False)\n"
      "--\n\nWhat a request would meet and why, as text or JSON. Takes nothing. tidegate.explain is made of it." },
    { METHOD(judge_asgi), "judge_asgi($self, scope, /, *, route=None, user=None, cost=1, prior=(), plan=None,\n"
                          "           body=None, reads_body=False, keys=None)\n--\n\n"
                          "Judges an ASGI scope (http or websocket) by the policies that match it; see docs/python.md." },
    { METHOD(judge_asgi_async), "judge_asgi_async($self, scope, /, *, route=None, user=None, cost=1, prior=(), plan=None,\n"
                                "                 body=None, reads_body=False, keys=None)\n--\n\n"
                                "judge_asgi() for async code: await it, once, for the Judgement." },
    { METHOD(judge_wsgi), "judge_wsgi($self, environ, /, *, route=None, user=None, cost=1, prior=(), plan=None,\n"
                          "           body=None, reads_body=False, keys=None)\n--\n\n"
                          "Judges a WSGI environ by the policies that match it; see docs/python.md." },
    { "__reduce__", tgpy_not_picklable, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyGetSetDef gate_getset[] = {
    { "generation", get_generation, NULL, "Counts successful reads of the file, from 1; 0 when switched off.", NULL },
    { "enabled", get_enabled, NULL, "False under TIDEGATE_ENABLED=0: no file is read, every request is unmatched.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot gate_slots[] = {
    { Py_tp_doc, "Gate(config=None, *, store=None, clock=None, timeout=0.05, look=False)\n--\n\n"
                 "A rules file in force: finds the policies of a request and judges it.\n\n"
                 "config: its path, else TIDEGATE_CONFIG. store: else TIDEGATE_STORE, the file's, shared://default.\n"
                 "look: to look at counts only; a table that is not there is not made.\n"
                 "Raises ConfigError with file, line and column; StoreError when the store cannot be opened." },
    { Py_tp_new, gate_new },
    { Py_tp_dealloc, gate_dealloc },
    { Py_tp_methods, gate_methods },
    { Py_tp_getset, gate_getset },
    { 0, NULL },
};

PyType_Spec tgpy_gate_spec = {
    .name = "tidegate.Gate",
    .basicsize = sizeof(tgpy_gate),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = gate_slots,
};
