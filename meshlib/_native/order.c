/* The call numbers and the history of a group, which Python and C share. */
#include "calls.h"

#define PRIME 65521u /* as in transport/_calls/header.py */

PyTypeObject *order_type;

/* Return the header, read as one little-endian number, modulo PRIME: the sum of its words times powers of 2**64. */
uint16_t history_after(const Header *header) {
    const uint64_t one = UINT64_MAX % PRIME + 1; /* 2**64 */
    uint64_t words[HEADER_BYTES / 8], sum = 0, worth = 1;
    memcpy(words, header, HEADER_BYTES);
    for (int i = 0; i < HEADER_BYTES / 8; i++, worth = worth * one % PRIME) sum += words[i] % PRIME * worth;
    return (uint16_t)(sum % PRIME);
}

static PyMemberDef order_members[] = {
    {"sequence", T_ULONGLONG, offsetof(Order, sequence), 0, NULL},
    {"history", T_USHORT, offsetof(Order, history), 0, NULL},
    {"messages", T_ULONGLONG, offsetof(Order, messages), 0, NULL},
    {"numbering", T_BOOL, offsetof(Order, numbering), 0, NULL},
    {NULL}};

/* Read one argument of read_header for a field of `bits` bits. Return 0, or -1 with an exception. */
static int read_field(PyObject *value, const char *name, int bits, int64_t least, int64_t otherwise,
                      int64_t *into) {
    *into = otherwise;
    if (!value) return 0;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (overflow || number < least || number > (1LL << bits) - 1) {
        PyErr_Format(PyExc_ValueError, "%s is %R; expected %lld to 2**%d - 1", name, value, (long long)least,
                     bits);
        return -1;
    }
    *into = number;
    return 0;
}

int read_header(PyObject *const *args, Header *header) {
    int64_t elements, root, kind, dtype, op, extra;
    if (read_field(args[0], "elements", 62, 0, 0, &elements) ||
        read_field(args[1], "root", 31, NO_ROOT, NO_ROOT, &root) ||
        read_field(args[2], "kind", 16, 0, 0, &kind) || read_field(args[3], "dtype", 16, 0, 0, &dtype) ||
        read_field(args[4], "op", 8, 0, 0, &op) || read_field(args[5], "extra", 32, 0, 0, &extra))
        return -1;
    *header = (Header){.elements = (uint64_t)elements, .root = (int32_t)root, .kind = (uint16_t)kind,
                       .dtype = (uint16_t)dtype, .op = (uint8_t)op, .extra = (uint32_t)extra};
    return 0;
}

static PyObject *number(Order *order, const CallSpec *spec) {
    Header header = spec->header;
    int collective = spec->peer == COLLECTIVE;
    header.sequence = (collective ? order->sequence : order->messages) + 1;
    if (collective) header.history = order->history;
    PyObject *packed = PyBytes_FromStringAndSize((const char *)&header, HEADER_BYTES);
    if (!packed) return NULL;
    if (collective) {
        order->sequence++;
        order->history = history_after(&header);
    } else {
        order->messages++;
    }
    return packed;
}

static PyObject *order_next_header(Order *order, PyObject *spec) {
    if (!Py_IS_TYPE(spec, spec_type)) {
        PyErr_Format(PyExc_TypeError, "expected a CallSpec, got %R", spec);
        return NULL;
    }
    PyObject *packed;
    Py_BEGIN_CRITICAL_SECTION(order);
    packed = number(order, (CallSpec *)spec);
    Py_END_CRITICAL_SECTION();
    return packed;
}

static PyMethodDef order_methods[] = {
    {"next_header", (PyCFunction)order_next_header, METH_O, NULL}, {NULL}};

static PyType_Slot order_slots[] = {{Py_tp_new, PyType_GenericNew},
                                    {Py_tp_methods, order_methods},
                                    {Py_tp_members, order_members},
                                    {0, NULL}};
PyType_Spec order_spec = {"meshlib._native._calls.Order", sizeof(Order), 0, Py_TPFLAGS_DEFAULT, order_slots};
