/* The type CallSpec, as in meshlib/_calls/spec.py. */
#include "calls.h"

PyTypeObject *spec_type;

#define ARGS 10
static const char *const names[ARGS] = {"kind", "run",   "elements", "root",   "dtype",
                                        "op",   "extra", "nbytes",   "device", "peer"};
static PyObject *name_of[ARGS], *str_cpu;

static int index_of(PyObject *name) {
    for (int i = 0; i < ARGS; i++)
        if (name == name_of[i]) return i;
    for (int i = 0; i < ARGS; i++)
        if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) return i;
    return -1;
}

static long long number(PyObject *value, long long otherwise) {
    return value ? PyLong_AsLongLong(value) : otherwise;
}

/* CallSpec(kind, run, elements=0, root=NO_ROOT, dtype=0, op=0, extra=0, nbytes=0, device="cpu",
 * peer=COLLECTIVE) */
static PyObject *spec_new(PyObject *type, PyObject *const *args, size_t flags, PyObject *keywords) {
    Py_ssize_t count = PyVectorcall_NARGS(flags), named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    PyObject *given[ARGS] = {NULL};
    if (count > ARGS) return PyErr_Format(PyExc_TypeError, "CallSpec takes %d arguments, got %zd", ARGS, count);
    for (Py_ssize_t i = 0; i < count; i++) given[i] = args[i];
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, i);
        int place = index_of(name);
        if (place < 0 || given[place])
            return PyErr_Format(PyExc_TypeError, "CallSpec got an unknown or duplicate argument %R", name);
        given[place] = args[count + i];
    }
    if (!given[0] || !given[1]) {
        PyErr_SetString(PyExc_TypeError, "CallSpec needs kind and run");
        return NULL;
    }
    Header header;
    PyObject *fields[HEADER_ARGS] = {given[2], given[3], given[0], given[4], given[5], given[6]};
    if (read_header(fields, &header) < 0) return NULL;
    long long nbytes = number(given[7], 0), peer = number(given[9], COLLECTIVE);
    if (PyErr_Occurred()) return NULL;
    CallSpec *spec = PyObject_GC_New(CallSpec, (PyTypeObject *)type);
    if (!spec) return NULL;
    spec->kind = Py_NewRef(given[0]);
    spec->run = Py_NewRef(given[1]);
    spec->device = Py_NewRef(given[8] ? given[8] : str_cpu);
    spec->nbytes = nbytes;
    spec->peer = (int)peer;
    spec->header = header;
    PyObject_GC_Track(spec);
    return (PyObject *)spec;
}

int is_on_host(CallSpec *spec) {
    return spec->device == str_cpu || PyUnicode_Compare(spec->device, str_cpu) == 0;
}

static int spec_traverse(CallSpec *spec, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(spec));
    Py_VISIT(spec->kind);
    Py_VISIT(spec->run);
    Py_VISIT(spec->device);
    return 0;
}

static int spec_clear(CallSpec *spec) {
    Py_CLEAR(spec->run);
    return 0;
}

static void spec_dealloc(CallSpec *spec) {
    PyTypeObject *type = Py_TYPE(spec);
    PyObject_GC_UnTrack(spec);
    Py_XDECREF(spec->run);
    Py_DECREF(spec->kind);
    Py_DECREF(spec->device);
    PyObject_GC_Del(spec);
    Py_DECREF(type);
}

#define AT(FIELD) offsetof(CallSpec, FIELD)
static PyMemberDef spec_members[] = {
    {"kind", T_OBJECT_EX, AT(kind), READONLY, NULL},
    {"run", T_OBJECT_EX, AT(run), READONLY, NULL},
    {"elements", T_ULONGLONG, AT(header.elements), READONLY, NULL},
    {"root", T_INT, AT(header.root), READONLY, NULL},
    {"dtype", T_USHORT, AT(header.dtype), READONLY, NULL},
    {"op", T_UBYTE, AT(header.op), READONLY, NULL},
    {"extra", T_UINT, AT(header.extra), READONLY, NULL},
    {"nbytes", T_LONGLONG, AT(nbytes), READONLY, NULL},
    {"device", T_OBJECT_EX, AT(device), READONLY, NULL},
    {"peer", T_INT, AT(peer), READONLY, NULL},
    {NULL}};
static PyType_Slot spec_slots[] = {{Py_tp_dealloc, spec_dealloc},
                                   {Py_tp_traverse, spec_traverse},
                                   {Py_tp_clear, spec_clear},
                                   {Py_tp_members, spec_members},
                                   {0, NULL}};
static PyType_Spec spec_spec = {"meshlib._native._calls.CallSpec", sizeof(CallSpec), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
                                    Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                spec_slots};

int init_spec(PyObject *module) {
    for (int i = 0; i < ARGS; i++)
        if (!(name_of[i] = PyUnicode_InternFromString(names[i]))) return -1;
    if (!(str_cpu = PyUnicode_InternFromString("cpu"))) return -1;
    if (!(spec_type = (PyTypeObject *)PyType_FromSpec(&spec_spec))) return -1;
    spec_type->tp_vectorcall = spec_new;
    return PyModule_AddType(module, spec_type);
}
