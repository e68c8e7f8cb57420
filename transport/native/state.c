/* The numbers that Python and C both count on: of a board, and of a group. */
#include "core.h"

PyTypeObject *progress_type, *order_type;

static PyMemberDef progress_members[] = {
    {"number", T_ULONGLONG, offsetof(Progress, number), 0, NULL},
    {"base", T_ULONGLONG, offsetof(Progress, base), 0, NULL},
    {"floor", T_ULONGLONG, offsetof(Progress, floor), 0, NULL},
    {"busy", T_ULONGLONG, offsetof(Progress, busy), 0, NULL},
    {"unchecked", T_UINT, offsetof(Progress, unchecked), 0, NULL},
    {NULL}};

static void progress_dealloc(Progress *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot progress_slots[] = {{Py_tp_new, PyType_GenericNew},
                                       {Py_tp_dealloc, progress_dealloc},
                                       {Py_tp_members, progress_members},
                                       {0, NULL}};
PyType_Spec progress_spec = {"transport.native._core.Progress", sizeof(Progress), 0, Py_TPFLAGS_DEFAULT,
                                   progress_slots};

static PyMemberDef order_members[] = {
    {"sequence", T_ULONGLONG, offsetof(Order, sequence), 0, NULL},
    {"history", T_USHORT, offsetof(Order, history), 0, NULL},
    {NULL}};

static void order_dealloc(Order *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot order_slots[] = {{Py_tp_new, PyType_GenericNew},
                                       {Py_tp_dealloc, order_dealloc},
                                       {Py_tp_members, order_members},
                                       {0, NULL}};
PyType_Spec order_spec = {"transport.native._core.Order", sizeof(Order), 0, Py_TPFLAGS_DEFAULT,
                                   order_slots};
