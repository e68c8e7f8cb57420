/* What is kept of each call, and how it is put into the flight recorder. */
#include "core.h"

PyTypeObject *fields_type;
static PyObject *str_now;

static PyMemberDef fields_members[] = {
    {"packed", T_OBJECT_EX, offsetof(Fields, packed), 0, NULL},
    {"waiting_for", T_OBJECT_EX, offsetof(Fields, waiting_for), 0, NULL},
    {"completion", T_OBJECT_EX, offsetof(Fields, completion), 0, NULL},
    {"error", T_OBJECT_EX, offsetof(Fields, error), 0, NULL},
    {"group", T_OBJECT_EX, offsetof(Fields, group), 0, NULL},
    {"named", T_OBJECT_EX, offsetof(Fields, named), 0, NULL},
    {"code", T_OBJECT_EX, offsetof(Fields, code), 0, NULL},
    {"issued", T_DOUBLE, offsetof(Fields, issued), 0, NULL},
    {"started", T_DOUBLE, offsetof(Fields, started), 0, NULL},
    {"ended", T_DOUBLE, offsetof(Fields, ended), 0, NULL},
    {"seconds", T_DOUBLE, offsetof(Fields, seconds), 0, NULL},
    {"nbytes", T_LONGLONG, offsetof(Fields, nbytes), 0, NULL},
    {"peer", T_INT, offsetof(Fields, peer), 0, NULL},
    {"instruction", T_INT, offsetof(Fields, instruction), 0, NULL},
    {"sync", T_BOOL, offsetof(Fields, sync), 0, NULL},
    {NULL}};

static int fields_traverse(Fields *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->waiting_for);
    Py_VISIT(self->completion);
    Py_VISIT(self->error);
    Py_VISIT(self->group);
    Py_VISIT(self->named);
    Py_VISIT(self->code);
    return 0;
}

static int fields_clear(Fields *self) {
    Py_CLEAR(self->packed);
    Py_CLEAR(self->waiting_for);
    Py_CLEAR(self->completion);
    Py_CLEAR(self->error);
    Py_CLEAR(self->group);
    Py_CLEAR(self->named);
    Py_CLEAR(self->code);
    return 0;
}

static void fields_dealloc(Fields *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fields_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int fields_init(Fields *self, PyObject *args, PyObject *kwargs) {
    PyObject *packed, *group, *named, *code;
    int sync;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "CallFields takes no arguments by name");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "SpOLidOOi", &packed, &sync, &group, &self->nbytes, &self->peer,
                          &self->seconds, &named, &code, &self->instruction))
        return -1;
    self->sync = (char)sync;
    Py_XSETREF(self->packed, Py_NewRef(packed));
    Py_XSETREF(self->group, Py_NewRef(group));
    Py_XSETREF(self->named, Py_NewRef(named));
    Py_XSETREF(self->code, Py_NewRef(code));
    Py_XSETREF(self->waiting_for, Py_NewRef(Py_None));
    Py_XSETREF(self->completion, Py_NewRef(Py_None));
    Py_XSETREF(self->error, Py_NewRef(Py_None));
    self->issued = monotonic();
    self->started = self->ended = 0;
    return 0;
}

static PyType_Slot fields_slots[] = {{Py_tp_init, fields_init},
                                     {Py_tp_new, PyType_GenericNew},
                                     {Py_tp_dealloc, fields_dealloc},
                                     {Py_tp_traverse, fields_traverse},
                                     {Py_tp_clear, fields_clear},
                                     {Py_tp_members, fields_members},
                                     {0, NULL}};
PyType_Spec fields_spec = {
    "transport.native._core.CallFields", sizeof(Fields), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, fields_slots};

static uint32_t crc_table[256];

static void make_crc_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[n] = c;
    }
}

static uint32_t crc32_of(const unsigned char *data, size_t size) {
    uint32_t c = 0xFFFFFFFFu;
    while (size--) c = crc_table[(c ^ *data++) & 0xFF] ^ (c >> 8);
    return c ^ 0xFFFFFFFFu;
}

uint16_t history_after(const Header *header) {
    return (uint16_t)crc32_of((const unsigned char *)header, HEADER_BYTES);
}

Fields *open_record(const Recording *to, PyObject *group, const Header *header, long long nbytes,
                    double seconds) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (!frame) {
        PyErr_SetString(PyExc_RuntimeError, "no Python code calls this");
        return NULL;
    }
    Py_INCREF(frame);
    PyCodeObject *code = PyFrame_GetCode(frame);
    Fields *record = NULL;
    for (;;) {
        PyObject *own = PyObject_GetItem(to->own_files, code->co_filename);
        if (!own) goto done;
        PyFrameObject *caller = own == Py_True ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(own);
        if (!caller) break;
        Py_SETREF(frame, caller);
        Py_SETREF(code, PyFrame_GetCode(frame));
    }
    PyObject *named = PyObject_GetAttr(to->naming, str_now);
    if (!named) goto done;
    PyTypeObject *type = (PyTypeObject *)to->type;
    record = (Fields *)type->tp_alloc(type, 0);
    if (!record) {
        Py_DECREF(named);
        goto done;
    }
    record->named = named;
    record->packed = PyBytes_FromStringAndSize((const char *)header, HEADER_BYTES);
    record->code = Py_NewRef(code);
    record->instruction = PyFrame_GetLasti(frame);
    record->group = Py_NewRef(group);
    record->waiting_for = Py_NewRef(Py_None);
    record->completion = Py_NewRef(Py_None);
    record->error = Py_NewRef(Py_None);
    record->nbytes = nbytes;
    record->peer = -1;
    record->sync = 1;
    record->seconds = seconds;
    record->issued = record->started = monotonic();
    PyObject *appended = record->packed ? PyObject_CallOneArg(to->append, (PyObject *)record) : NULL;
    if (!appended) Py_CLEAR(record);
    Py_XDECREF(appended);
done:
    Py_DECREF(frame);
    Py_DECREF(code);
    return record;
}

int init_record(void) {
    make_crc_table();
    str_now = PyUnicode_InternFromString("now");
    return str_now ? 0 : -1;
}
