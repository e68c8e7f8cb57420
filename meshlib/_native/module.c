/* The module meshlib._native._calls. */
#include "jit/program_calls.h"
#include "stream_lock.h"

const Api *transport;

/* Import the C API of transport's module. Return 0, or -1 with an exception. */
static int find_transport(void) {
    PyObject *module = PyImport_ImportModule(API_MODULE);
    PyObject *capsule = module ? PyObject_GetAttrString(module, "api") : NULL;
    transport = capsule ? PyCapsule_GetPointer(capsule, API_NAME) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(capsule); /* Its pointer is to static memory. */
    if (transport && transport->size == sizeof *transport) return 0;
    if (transport) PyErr_SetString(PyExc_ImportError, API_MODULE " was built from different sources");
    return -1;
}

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type ? PyModule_AddType(module, *type) : -1;
}

static int fill(PyObject *module) {
    PyTypeObject *fast_path_type;
    if (find_transport() || init_fast_path() || add_type(module, &order_spec, &order_type) ||
        add_type(module, &lock_spec, &lock_type) || add_type(module, &recorder_spec, &recorder_type) ||
        init_spec(module) || add_type(module, &fast_path_spec, &fast_path_type) || add_program_calls(module) ||
        add_handler(module))
        return -1;
    return 0;
}

/* Static pointers refer to the types, so only one interpreter is supported. */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill},
#if PY_VERSION_HEX >= 0x030C0000
                                   {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
                                   {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "meshlib._native._calls", .m_slots = slots};

PyMODINIT_FUNC PyInit__calls(void) { return PyModuleDef_Init(&definition); }
