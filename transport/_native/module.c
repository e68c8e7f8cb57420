/* The module transport._native._core. */
#include "binding/api.h"

/* measure_group(size, block): return the bytes that `size` members share, and those of a block (0: default). */
static PyObject *measure_group(PyObject *Py_UNUSED(module), PyObject *args) {
    int size;
    unsigned long long block;
    if (!PyArg_ParseTuple(args, "iK", &size, &block)) return NULL;
    if (size < 2 || size > MAX_MEMBERS)
        return PyErr_Format(PyExc_ValueError, "expected 2 to %d members, got %d", MAX_MEMBERS, size);
    Sizes sizes = {.block = block};
    uint64_t nbytes = group_bytes(size, &sizes);
    return Py_BuildValue("KK", (unsigned long long)nbytes, (unsigned long long)sizes.block);
}

/* create_group(memory, size, block): write the head of memory that no other member has mapped yet. */
static PyObject *create_group(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    int size;
    unsigned long long block;
    if (!PyArg_ParseTuple(args, "w*iK", &memory, &size, &block)) return NULL;
    Sizes sizes = {.block = block};
    int fits = size >= 2 && size <= MAX_MEMBERS && (uint64_t)memory.len == group_bytes(size, &sizes);
    if (!fits) PyErr_Format(PyExc_ValueError, "%zd bytes are not those of %d members", memory.len, size);
    int done = fits && !refused(group_create(memory.buf, size, block));
    PyBuffer_Release(&memory);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* allocate(memory, start, size): allocate the pages of a part of shared memory. */
static PyObject *allocate(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    unsigned long long start, size;
    if (!PyArg_ParseTuple(args, "w*KK", &memory, &start, &size)) return NULL;
    uint64_t whole = (uint64_t)memory.len;
    int error = EINVAL;
    if (start <= whole && size <= whole - start) {
        Py_BEGIN_ALLOW_THREADS
        error = allocate_pages((char *)memory.buf + start, size);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&memory);
    return refused(error) ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {{"crc32c", crc32c, METH_VARARGS, NULL},
                                  {"measure_group", measure_group, METH_VARARGS, NULL},
                                  {"create_group", create_group, METH_VARARGS, NULL},
                                  {"allocate", allocate, METH_VARARGS, NULL},
                                  {"measure_inbox", measure_inbox, METH_VARARGS, NULL},
                                  {"create_inbox", create_inbox, METH_VARARGS, NULL},
                                  {"await_inbox", await_inbox, METH_VARARGS, NULL},
                                  {"wake_inbox", wake_inbox, METH_VARARGS, NULL},
                                  {"read_wakeup", read_wakeup, METH_O, NULL},
                                  {"update_window", update_window, METH_VARARGS, NULL},
                                  {"await_word", await_word, METH_VARARGS, NULL},
                                  {"fence", fence, METH_NOARGS, NULL},
                                  {NULL}};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type ? PyModule_AddType(module, *type) : -1;
}

static int add_api(PyObject *module) {
    static Api api;
    api = (Api){sizeof api,     group_type, fields_type, ring_end_type, export_array, export_view, describe_part,
                release_arrays, dtype_of,   find_loops,  is_small,      begin_call,   carry_on,    send_now,
                receive_now,    group_begin, ring_is_broken, ring_has_room, ring_begin, receive_lent};
    PyObject *capsule = PyCapsule_New(&api, API_NAME, NULL);
    int failed = !capsule || PyModule_AddObjectRef(module, "api", capsule);
    Py_XDECREF(capsule);
    return failed ? -1 : 0;
}

static int fill(PyObject *module) {
    init_crc32c();
    if (add_type(module, &fields_spec, &fields_type) || add_type(module, &group_spec, &group_type) ||
        add_ring_end(module) || add_api(module))
        return -1;
    static const struct {
        const char *name;
        long value;
    } numbers[] = {{"LOOK", LOOK},       {"SPIN", SPIN},   {"SLEEP", SLEEP},
                   {"NAP", NAP},         {"DONE", DONE_ALL}, {"AGAIN", AGAIN},
                   {"UNSUPPORTED", UNSUPPORTED}, {"MISMATCH", MISMATCH}, {"DAMAGED", DAMAGED},
                   {"OTHER_CALL", OTHER_CALL},   {"SENT", SENT},   {"EXPECTS", EXPECTS},
                   {"BAD_PLACE", BAD_PLACE},     {"NO_MEMORY", NO_MEMORY}, {"MAX_MEMBERS", MAX_MEMBERS}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value)) return -1;
    return 0;
}

/* Static pointers hold the types, so subinterpreters are not supported. */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill},
#if PY_VERSION_HEX >= 0x030C0000
                                   {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
                                   {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "transport._native._core", .m_methods = functions, .m_slots = slots};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
