/* The module transport.native._core. */
#include "core.h"
#include "shm/plans.h"

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(spec);
    if (type && PyModule_AddType(module, type) < 0) Py_CLEAR(type);
    return type;
}

static PyMethodDef functions[] = {
    {"crc32c", crc32c, METH_VARARGS, NULL}, {NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "transport.native._core", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__core(void) {
#if defined(Py_GIL_DISABLED)
    PyErr_SetString(PyExc_ImportError, "needs the interpreter's lock");
    return NULL;
#endif
    init_clock();
    init_crc32c();
    PyObject *module = init_shortcut() || init_plans() ? NULL : PyModule_Create(&definition);
    if (!module) return NULL;
    order_type = add_type(module, &order_spec);
    fields_type = add_type(module, &fields_spec);
    ring_type = add_type(module, &ring_spec);
    board_type = add_type(module, &board_spec);
    ring_end_type = add_type(module, &ring_end_spec);
    if (!order_type || !fields_type || !ring_type || !board_type || !ring_end_type ||
        init_spec(module) < 0 || !add_type(module, &plans_spec) || !add_type(module, &shortcut_spec) ||
        PyModule_AddIntConstant(module, "MOST_MEMBERS", MOST) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
