/* What is kept of a call. */
#include "core.h"

#include <string.h>

PyTypeObject *fields_type;

/* ------------------------------------------------------------------ CRC-32, eight bytes at a time */

/* Kounavis and Berry, "A Systematic Approach to Building High Performance, Software-based, CRC
 * Generators", 2005. crc_tables[k][n]: n, followed by k zeros. */
static uint32_t crc_tables[8][256];

void init_record(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_tables[0][n] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int n = 0; n < 256; n++) {
            uint32_t c = crc_tables[k - 1][n];
            crc_tables[k][n] = crc_tables[0][c & 0xFF] ^ (c >> 8);
        }
}

uint16_t history_after(const Header *header) {
    const unsigned char *data = (const unsigned char *)header;
    uint32_t c = 0xFFFFFFFFu;
    for (int done = 0; done < HEADER_BYTES; done += 8) {
        const unsigned char *d = data + done;
        c = crc_tables[7][d[0] ^ (c & 0xFF)] ^ crc_tables[6][d[1] ^ (c >> 8 & 0xFF)] ^
            crc_tables[5][d[2] ^ (c >> 16 & 0xFF)] ^ crc_tables[4][d[3] ^ (c >> 24)] ^
            crc_tables[3][d[4]] ^ crc_tables[2][d[5]] ^ crc_tables[1][d[6]] ^ crc_tables[0][d[7]];
    }
    return (uint16_t)(c ^ 0xFFFFFFFFu);
}

/* ------------------------------------------------------------------ the type */

static PyObject *get_packed(Fields *self, void *Py_UNUSED(closure)) {
    if (!self->packed)
        self->packed = PyBytes_FromStringAndSize((const char *)&self->header, HEADER_BYTES);
    return Py_XNewRef(self->packed);
}

static int set_packed(Fields *self, PyObject *value, void *Py_UNUSED(closure)) {
    if (!value || !PyBytes_Check(value) || PyBytes_GET_SIZE(value) != HEADER_BYTES) {
        PyErr_Format(PyExc_TypeError, "packed must be %d bytes", HEADER_BYTES);
        return -1;
    }
    memcpy(&self->header, PyBytes_AS_STRING(value), HEADER_BYTES);
    Py_XSETREF(self->packed, Py_NewRef(value));
    return 0;
}

static PyGetSetDef fields_computed[] = {
    {"packed", (getter)get_packed, (setter)set_packed, NULL, NULL}, {NULL}};

static PyMemberDef fields_members[] = {
    {"waiting_for", T_OBJECT_EX, offsetof(Fields, waiting_for), 0, NULL},
    {"completion", T_OBJECT_EX, offsetof(Fields, completion), 0, NULL},
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
PyType_Spec fields_spec = {"transport.native._core.CallFields", sizeof(Fields), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, fields_slots};
