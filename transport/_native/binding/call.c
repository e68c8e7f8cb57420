/* The type CallFields. */
#include "binding/call.h"

PyTypeObject *fields_type;

static PyObject *get_packed(Fields *self, void *Py_UNUSED(closure)) {
    PyObject *packed;
    Py_BEGIN_CRITICAL_SECTION(self);
    if (!self->packed) self->packed = PyBytes_FromStringAndSize((const char *)&self->header, HEADER_BYTES);
    packed = Py_XNewRef(self->packed);
    Py_END_CRITICAL_SECTION();
    return packed;
}

static int set_packed(Fields *self, PyObject *value, void *Py_UNUSED(closure)) {
    if (!value || !PyBytes_Check(value) || PyBytes_GET_SIZE(value) != HEADER_BYTES) {
        PyErr_Format(PyExc_TypeError, "packed must be %d bytes", HEADER_BYTES);
        return -1;
    }
    Py_BEGIN_CRITICAL_SECTION(self);
    memcpy(&self->header, PyBytes_AS_STRING(value), HEADER_BYTES);
    Py_XSETREF(self->packed, Py_NewRef(value));
    Py_END_CRITICAL_SECTION();
    return 0;
}

static PyGetSetDef fields_computed[] = {
    {"packed", (getter)get_packed, (setter)set_packed, NULL, NULL}, {NULL}};

static PyMemberDef fields_members[] = {
    {"waiting_for", T_OBJECT_EX, offsetof(Fields, waiting_for), 0, NULL},
    {"completion", T_OBJECT_EX, offsetof(Fields, completion), 0, NULL},
    {"rest", T_OBJECT, offsetof(Fields, rest), 0, NULL},
    {"error", T_OBJECT_EX, offsetof(Fields, error), 0, NULL},
    {"group", T_OBJECT_EX, offsetof(Fields, group), 0, NULL},
    {"label", T_OBJECT_EX, offsetof(Fields, label), 0, NULL},
    {"code", T_OBJECT_EX, offsetof(Fields, code), 0, NULL},
    {"issued", T_DOUBLE, offsetof(Fields, issued), 0, NULL},
    {"started", T_DOUBLE, offsetof(Fields, started), 0, NULL},
    {"ended", T_DOUBLE, offsetof(Fields, ended), 0, NULL},
    {"seconds", T_DOUBLE, offsetof(Fields, seconds), 0, NULL},
    {"nbytes", T_LONGLONG, offsetof(Fields, nbytes), 0, NULL},
    {"thread", T_ULONG, offsetof(Fields, thread), 0, NULL},
    {"peer", T_INT, offsetof(Fields, peer), 0, NULL},
    {"instruction", T_INT, offsetof(Fields, instruction), 0, NULL},
    {"sync", T_BOOL, offsetof(Fields, sync), 0, NULL},
    {NULL}};

static int fields_traverse(Fields *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->waiting_for);
    Py_VISIT(self->completion);
    Py_VISIT(self->rest);
    Py_VISIT(self->error);
    Py_VISIT(self->group);
    Py_VISIT(self->label);
    Py_VISIT(self->code);
    return 0;
}

static int fields_clear(Fields *self) {
    Py_CLEAR(self->packed);
    Py_CLEAR(self->waiting_for);
    Py_CLEAR(self->completion);
    Py_CLEAR(self->rest);
    Py_CLEAR(self->error);
    Py_CLEAR(self->group);
    Py_CLEAR(self->label);
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

static PyType_Slot fields_slots[] = {{Py_tp_new, PyType_GenericNew},
                                     {Py_tp_dealloc, fields_dealloc},
                                     {Py_tp_traverse, fields_traverse},
                                     {Py_tp_clear, fields_clear},
                                     {Py_tp_members, fields_members},
                                     {Py_tp_getset, fields_computed},
                                     {0, NULL}};
PyType_Spec fields_spec = {"transport._native._core.CallFields", sizeof(Fields), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, fields_slots};
