/* An extension type with one method that does nothing, called in the way Limiter.hit is: what Python itself takes for
 * the call. The yardstick of bench/python_decision.py. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

static PyObject *
hit(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    (void)self, (void)arguments, (void)count, (void)names;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "hit", (PyCFunction)(void (*)(void))hit, METH_FASTCALL | METH_KEYWORDS, NULL },
    { NULL, NULL, 0, NULL },
};
static PyType_Slot slots[] = { { Py_tp_methods, methods }, { 0, NULL } };
static PyType_Spec spec = { .name = "empty_method.Empty", .flags = Py_TPFLAGS_DEFAULT, .slots = slots };
static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, .m_name = "empty_method", .m_size = -1 };

PyMODINIT_FUNC PyInit_empty_method(void);

PyMODINIT_FUNC
PyInit_empty_method(void)
{
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (!made || !type || PyModule_AddObjectRef(made, "Empty", type) < 0) {
        Py_XDECREF(made);
        made = NULL;
    }
    Py_XDECREF(type);
    return made;
}
