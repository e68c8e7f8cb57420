/* A ring buffer of a rank's last calls: the base of FlightRecorder in meshlib/_recording/recorder.py. */
#include "calls.h"

PyTypeObject *recorder_type;

static inline void refer(PyObject **to, PyObject *object) {
    if (*to != object) Py_XSETREF(*to, Py_NewRef(object));
}

/* Return a record for the next call, without a group until it is filled in. Reuses the oldest record if it has no other
 * references, because the new record mostly refers to the same objects. */
static Fields *next_record(Recorder *ring) {
    Fields *oldest = ring->records[ring->next], *record;
    PyObject *completion = NULL, *error = NULL;
    if (oldest && Py_REFCNT(oldest) == 1) {
        record = oldest;
        oldest = NULL;
        completion = record->completion;
        record->completion = Py_NewRef(Py_None);
        error = record->error;
        record->error = Py_NewRef(Py_None);
        refer(&record->waiting_for, Py_None);
        Py_CLEAR(record->packed);
        Py_CLEAR(record->group);
    } else {
        record = (Fields *)ring->type->tp_alloc(ring->type, 0);
        if (!record) return NULL;
        record->waiting_for = Py_NewRef(Py_None);
        record->completion = Py_NewRef(Py_None);
        record->error = Py_NewRef(Py_None);
        /* Read again: the allocation may have collected garbage, which may have made calls. */
        oldest = ring->records[ring->next];
        ring->records[ring->next] = record;
    }
    if (++ring->next == ring->capacity) ring->next = 0;
    const char *next = (const char *)ring->records[ring->next];
    for (size_t at = 0; next && at < sizeof(Fields); at += LINE) __builtin_prefetch(next + at, 1);
    Py_INCREF(record);
    /* These may run code that makes calls. */
    Py_XDECREF(oldest);
    Py_XDECREF(completion);
    Py_XDECREF(error);
    return record;
}

/* Return the label of the calling thread's calls or None, or NULL with an exception. */
static PyObject *find_label(Recorder *ring) {
    if (!PyDict_GET_SIZE(ring->labels)) return Py_NewRef(Py_None);
    PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident()), *label = NULL;
    int found = thread ? PyDict_GetItemRef(ring->labels, thread, &label) : -1;
    Py_XDECREF(thread);
    return found ? label : Py_NewRef(Py_None);
}

static int prepare(Recorder *ring, Opening *opening) {
    if (find_caller(ring, &opening->code, &opening->instruction) < 0) return -1;
    opening->record = next_record(ring);
    opening->label = opening->record ? find_label(ring) : NULL;
    if (opening->label) return 0;
    Py_DECREF(opening->code);
    Py_XDECREF(opening->record);
    return -1;
}

int prepare_record(Recorder *ring, Opening *opening) {
    int failed;
    Py_BEGIN_CRITICAL_SECTION(ring);
    failed = prepare(ring, opening);
    Py_END_CRITICAL_SECTION();
    return failed;
}

Fields *fill_record(Opening *opening, PyObject *group, const Header *header, long long nbytes, int peer,
                    int sync, double seconds) {
    Fields *record = opening->record;
    record->issued = monotonic();
    record->started = record->ended = 0;
    record->seconds = seconds;
    record->header = *header;
    record->instruction = opening->instruction;
    record->thread = PyThread_get_thread_ident();
    record->nbytes = nbytes;
    record->peer = peer;
    record->sync = (char)sync;
    Py_XSETREF(record->label, opening->label);
    Py_XSETREF(record->code, (PyObject *)opening->code);
    record->group = Py_NewRef(group);
    return record;
}

static PyObject *get_followers(Recorder *ring, void *Py_UNUSED(closure)) {
    PyObject *followers;
    Py_BEGIN_CRITICAL_SECTION(ring);
    followers = Py_NewRef(ring->followers);
    Py_END_CRITICAL_SECTION();
    return followers;
}

static PyObject *recorder_open(Recorder *ring, PyObject *const *args, Py_ssize_t count) {
    if (count != 6 || !PyUnicode_Check(args[0]) || !PyBytes_Check(args[1]) ||
        PyBytes_GET_SIZE(args[1]) != HEADER_BYTES) {
        PyErr_SetString(PyExc_TypeError, "expected group, packed, nbytes, peer, sync, seconds");
        return NULL;
    }
    long long nbytes = PyLong_AsLongLong(args[2]);
    long peer = PyLong_AsLong(args[3]);
    int sync = PyObject_IsTrue(args[4]);
    double seconds = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    Opening opening;
    if (prepare_record(ring, &opening) < 0) return NULL;
    const Header *header = (const Header *)PyBytes_AS_STRING(args[1]);
    Fields *record = fill_record(&opening, args[0], header, nbytes, (int)peer, sync, seconds);
    record->packed = Py_NewRef(args[1]);
    PyObject *followers = get_followers(ring, NULL);
    for (Py_ssize_t i = 0; record && i < PyTuple_GET_SIZE(followers); i++)
        if (PyList_Append(PyTuple_GET_ITEM(followers, i), (PyObject *)record) < 0) Py_CLEAR(record);
    Py_DECREF(followers);
    return (PyObject *)record;
}

/* copy(): a list of the records that are filled in, oldest first. */
static PyObject *recorder_copy(Recorder *ring, PyObject *Py_UNUSED(none)) {
    PyObject *list = PyList_New(0);
    Py_BEGIN_CRITICAL_SECTION(ring);
    for (Py_ssize_t i = 0; list && i < ring->capacity; i++) {
        Fields *record = ring->records[(ring->next + i) % ring->capacity];
        if (record && record->group && PyList_Append(list, (PyObject *)record) < 0) Py_CLEAR(list);
    }
    Py_END_CRITICAL_SECTION();
    return list;
}

/* Recorder(capacity, type, own_files) */
static int recorder_init(Recorder *ring, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *type, *own_files;
    Py_ssize_t capacity;
    if (ring->records) {
        PyErr_SetString(PyExc_RuntimeError, "this Recorder is already initialised");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "nO!O!", &capacity, &PyType_Type, &type, &PyDict_Type, &own_files))
        return -1;
    if (capacity < 1 || !PyType_IsSubtype((PyTypeObject *)type, transport->fields_type)) {
        PyErr_SetString(PyExc_ValueError, "expected a capacity of at least 1, and a subclass of CallFields");
        return -1;
    }
    ring->followers = PyTuple_New(0);
    ring->labels = PyDict_New();
    ring->records = PyMem_Calloc((size_t)capacity, sizeof *ring->records);
    if (!ring->followers || !ring->labels || !ring->records) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        return -1;
    }
    ring->capacity = capacity;
    ring->type = (PyTypeObject *)Py_NewRef(type);
    ring->own_files = Py_NewRef(own_files);
    ring->annotate = Py_NewRef(Py_None);
    return 0;
}

static int recorder_traverse(Recorder *ring, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(ring));
    Py_VISIT(ring->followers);
    Py_VISIT(ring->annotate);
    Py_VISIT(ring->labels);
    Py_VISIT(ring->own_files);
    Py_VISIT(ring->type);
    for (Py_ssize_t i = 0; i < ring->capacity; i++) Py_VISIT(ring->records[i]);
    return 0;
}

static int recorder_clear(Recorder *ring) {
    for (Py_ssize_t i = 0; i < ring->capacity; i++) Py_CLEAR(ring->records[i]);
    return 0;
}

static void recorder_dealloc(Recorder *ring) {
    PyTypeObject *type = Py_TYPE(ring);
    PyObject_GC_UnTrack(ring);
    recorder_clear(ring);
    for (int i = 0; i < KNOWN_FILES; i++) Py_XDECREF(ring->files[i].name);
    PyMem_Free(ring->records);
    Py_XDECREF(ring->followers);
    Py_XDECREF(ring->annotate);
    Py_XDECREF(ring->labels);
    Py_XDECREF(ring->own_files);
    Py_XDECREF(ring->type);
    type->tp_free((PyObject *)ring);
    Py_DECREF(type);
}

static int set_followers(Recorder *ring, PyObject *value, void *Py_UNUSED(closure)) {
    int good = value && PyTuple_Check(value);
    for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(value); i++)
        good = PyList_Check(PyTuple_GET_ITEM(value, i));
    if (!good) {
        PyErr_SetString(PyExc_TypeError, "followers must be a tuple of lists");
        return -1;
    }
    Py_BEGIN_CRITICAL_SECTION(ring);
    ring->watched = PyTuple_GET_SIZE(value) > 0;
    Py_XSETREF(ring->followers, Py_NewRef(value));
    Py_END_CRITICAL_SECTION();
    return 0;
}

static PyGetSetDef recorder_computed[] = {
    {"followers", (getter)get_followers, (setter)set_followers, NULL, NULL}, {NULL}};
static PyMemberDef recorder_members[] = {{"annotate", T_OBJECT_EX, offsetof(Recorder, annotate), 0, NULL},
                                     {"labels", T_OBJECT_EX, offsetof(Recorder, labels), READONLY, NULL},
                                     {NULL}};
static PyMethodDef recorder_methods[] = {
    {"open", (PyCFunction)(void (*)(void))recorder_open, METH_FASTCALL, NULL},
    {"copy", (PyCFunction)recorder_copy, METH_NOARGS, NULL},
    {NULL}};
static PyType_Slot recorder_slots[] = {{Py_tp_init, recorder_init},
                                   {Py_tp_new, PyType_GenericNew},
                                   {Py_tp_dealloc, recorder_dealloc},
                                   {Py_tp_traverse, recorder_traverse},
                                   {Py_tp_clear, recorder_clear},
                                   {Py_tp_methods, recorder_methods},
                                   {Py_tp_members, recorder_members},
                                   {Py_tp_getset, recorder_computed},
                                   {0, NULL}};
PyType_Spec recorder_spec = {"meshlib._native._calls.Ring", sizeof(Recorder), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, recorder_slots};
