/* The exceptions, how a tg_error becomes one, and the way of notices to the log.
 * Must not enter: deciding whether something is an error. */
#include "ext.h"

#include <string.h>

#define CARET_BEFORE 60 /* characters shown around the fault of a long rule text */
#define CARET_AFTER 40

static PyObject *
exception_new(PyObject *module, const char *name, const char *doc, PyObject *bases, PyObject *defaults)
{
    PyObject *made = PyErr_NewExceptionWithDoc(name, doc, bases, defaults);
    Py_XDECREF(defaults);
    if (made && PyModule_AddObjectRef(module, strchr(name, '.') + 1, made) != 0)
        Py_CLEAR(made);
    return made;
}

int
tgpy_errors_init(PyObject *module, tgpy_state *state)
{
    state->error = exception_new(module, "tidegate.Error",
                                 "Whatever tidegate raises but TypeError, ValueError and MemoryError for arguments.\n\n"
                                 "code: the C status, such as \"TG_E_RULE\".",
                                 NULL, Py_BuildValue("{ss}", "code", "TG_E_SYSTEM"));
    if (!state->error)
        return -1;
    PyObject *bases = PyTuple_Pack(2, state->error, PyExc_ValueError);
    if (!bases)
        return -1;
    state->rule_error = exception_new(module, "tidegate.RuleError",
                                      "A rule's text or numbers are wrong. text[offset:offset + length] is the word that "
                                      "is; str() shows it with a caret under it.",
                                      bases,
                                      Py_BuildValue("{sssssisi}", "code", "TG_E_RULE", "text", "", "offset", 0, "length", 0));
    state->config_error = exception_new(module, "tidegate.ConfigError",
                                        "The rules file or a setting is wrong. line and column are 1-based; 0 where no "
                                        "file is concerned.",
                                        bases, Py_BuildValue("{sssisi}", "code", "TG_E_CONFIG", "line", 0, "column", 0));
    state->identity_error = exception_new(module, "tidegate.IdentityError",
                                          "A value that a policy's `by` needs was not given, or an address is none.",
                                          bases, Py_BuildValue("{ss}", "code", "TG_E_IDENTITY"));
    Py_DECREF(bases);
    state->store_error = exception_new(module, "tidegate.StoreError",
                                       "A store could not be opened, or reset() or refund() got no answer. errno: what "
                                       "the system said, or 0. hit() and peek() never raise it.",
                                       state->error, Py_BuildValue("{sssi}", "code", "TG_E_STORE", "errno", 0));
    return state->rule_error && state->config_error && state->identity_error && state->store_error ? 0 : -1;
}

static PyObject *
class_of(const tgpy_state *state, tg_status status)
{
    switch (status) {
    case TG_E_ARG: return PyExc_ValueError;
    case TG_E_RULE: return state->rule_error;
    case TG_E_CONFIG: return state->config_error;
    case TG_E_IDENTITY: return state->identity_error;
    case TG_E_STORE:
    case TG_E_TRUST:
    case TG_E_FORMAT:
    case TG_E_SYSTEM: return state->store_error;
    case TG_E_NOMEM: return PyExc_MemoryError;
    case TG_OK:
    case TG_E_UNSUPPORTED: break;
    }
    return state->error;
}

static int
set_number(PyObject *object, const char *name, size_t value)
{
    PyObject *number = PyLong_FromSize_t(value);
    const int failed = number ? PyObject_SetAttrString(object, name, number) : -1;
    Py_XDECREF(number);
    return failed;
}

/* The text on one line with a caret under the fault: "\n  10/fortnight\n     ^^^^^^^^^". */
static PyObject *
draw_caret(PyObject *text, Py_ssize_t offset, Py_ssize_t length)
{
    const Py_ssize_t characters = PyUnicode_GetLength(text);
    const Py_ssize_t first = offset > CARET_BEFORE ? offset - CARET_BEFORE : 0;
    Py_ssize_t end = offset + length + CARET_AFTER;
    if (end > characters || end < 0)
        end = characters;
    if (end - first > 2 * (CARET_BEFORE + CARET_AFTER))
        end = first + 2 * (CARET_BEFORE + CARET_AFTER);
    PyObject *window = PyUnicode_Substring(text, first, end);
    if (!window)
        return NULL;
    /* A line feed or a tab would move the caret away from its word. */
    for (const char *control = "\n\r\t\v\f"; *control; control++) {
        PyObject *was = PyUnicode_FromStringAndSize(control, 1), *blank = PyUnicode_FromString(" ");
        PyObject *plain = was && blank ? PyUnicode_Replace(window, was, blank, -1) : NULL;
        Py_XDECREF(was);
        Py_XDECREF(blank);
        Py_DECREF(window);
        if (!plain)
            return NULL;
        window = plain;
    }
    char carets[2 * (CARET_BEFORE + CARET_AFTER) + 1], blanks[CARET_BEFORE + 4];
    size_t width = length > 0 ? (size_t)length : 1;
    if (width > (size_t)(end - offset) && end > offset)
        width = (size_t)(end - offset);
    if (width > sizeof carets - 1)
        width = sizeof carets - 1;
    memset(carets, '^', width);
    carets[width] = '\0';
    const bool cut_before = first > 0, cut_after = end < characters;
    const size_t margin = (size_t)(offset - first) + (cut_before ? 3 : 0);
    memset(blanks, ' ', margin);
    blanks[margin] = '\0';
    PyObject *drawn = PyUnicode_FromFormat("\n  %s%U%s\n  %s%s", cut_before ? "..." : "", window, cut_after ? "..." : "",
                                           blanks, carets);
    Py_DECREF(window);
    return drawn;
}

/* How many characters the first `bytes` bytes of the text's UTF-8 are. */
static Py_ssize_t
characters_of(tg_text text, size_t bytes)
{
    if (bytes > text.length)
        bytes = text.length;
    Py_ssize_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += ((unsigned char)text.data[i] & 0xC0) != 0x80;
    return count;
}

PyObject *
tgpy_raise(tgpy_state *state, const tg_error *error, PyObject *rule_text)
{
    PyObject *class = class_of(state, error->status);
    PyObject *message = PyUnicode_DecodeUTF8(error->message, (Py_ssize_t)strlen(error->message), "replace");
    PyObject *made_text = NULL, *exception = NULL;
    Py_ssize_t offset = 0, length = 0;
    const bool of_rule = error->status == TG_E_RULE && rule_text && PyUnicode_Check(rule_text);
    tg_text text = { NULL, 0 };
    if (message && of_rule && tgpy_text(rule_text, &text, &made_text)) {
        offset = characters_of(text, error->offset);
        length = characters_of(text, error->offset + error->length) - offset;
        /* A rule that is well written and too large for its table has no place to point at. */
        if (error->length > 0 || error->offset > 0 || text.length == 0) {
            PyObject *drawn = draw_caret(rule_text, offset, length);
            PyObject *whole = drawn ? PyUnicode_Concat(message, drawn) : NULL;
            Py_XDECREF(drawn);
            Py_DECREF(message);
            message = whole;
        }
    }
    Py_XDECREF(made_text);
    if (message)
        exception = PyObject_CallFunctionObjArgs(class, message, NULL);
    Py_XDECREF(message);
    if (!exception)
        return NULL;
    int failed = 0;
    if (PyErr_GivenExceptionMatches(exception, state->error)) {
        PyObject *code = PyUnicode_FromString(tg_status_name(error->status));
        failed = code ? PyObject_SetAttrString(exception, "code", code) : -1;
        Py_XDECREF(code);
    }
    if (!failed && of_rule)
        failed = PyObject_SetAttrString(exception, "text", rule_text) ||
                 set_number(exception, "offset", (size_t)offset) || set_number(exception, "length", (size_t)length);
    if (!failed && class == state->config_error)
        failed = set_number(exception, "line", error->line) || set_number(exception, "column", error->column);
    if (!failed && class == state->store_error)
        failed = set_number(exception, "errno", error->system_error > 0 ? (size_t)error->system_error : 0);
    if (!failed)
        PyErr_SetObject(class, exception);
    Py_DECREF(exception);
    return NULL;
}

PyObject *
tgpy_not_picklable(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PyObject *type = PyType_GetName(Py_TYPE(self));
    if (type)
        PyErr_Format(PyExc_TypeError,
                     "a %U belongs to its process and cannot be pickled or copied: make a Limiter in each process (those "
                     "with one store and name share their counts) and pass plain numbers of a decision",
                     type);
    Py_XDECREF(type);
    return NULL;
}

/* ---- notices ---- */

void
tgpy_log_warning(tgpy_state *state, const char *code, const char *message)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    /* Looked up each time: this is rare, and a test or a fork may have put logging up anew. */
    PyObject *logging = PyImport_ImportModule("logging");
    PyObject *logger = logging ? PyObject_CallMethod(logging, "getLogger", "s", "tidegate") : NULL;
    PyObject *text = logger ? PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace") : NULL;
    state->logging = true;
    PyObject *done = text ? PyObject_CallMethod(logger, "warning", "ssO", "%s: %s", code, text) : NULL;
    state->logging = false;
    if (!done)
        PyErr_Clear(); /* A broken log handler must not refuse a request. */
    Py_XDECREF(done);
    Py_XDECREF(text);
    Py_XDECREF(logger);
    Py_XDECREF(logging);
    PyErr_Restore(type, value, traceback);
}

void
tgpy_log_notices_now(tgpy_state *state)
{
    tg_notice notice;
    if (state->logging)
        return; /* we are inside a handler: the outer loop takes the rest */
    for (int i = 0; i < 64 && tg_notice_take(&notice); i++)
        tgpy_log_warning(state, notice.code, notice.message);
}

PyObject *
tgpy_take_notices(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    tg_notice notice;
    while (list && tg_notice_take(&notice)) {
        PyObject *message = PyUnicode_DecodeUTF8(notice.message, (Py_ssize_t)strlen(notice.message), "replace");
        PyObject *pair = message ? Py_BuildValue("(sO)", notice.code, message) : NULL;
        Py_XDECREF(message);
        if (!pair || PyList_Append(list, pair) != 0)
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}
