/* Rings of messages, for Python. */
#pragma once
#include "core.h"

/* LENT: code without the interpreter's lock may use the end. Python takes a lent end back without waiting; an end
 * IN_USE looks empty to Python. If that code leaves a message partly received, the end stays IN_USE until Python
 * continues the message. */
enum { KEPT, LENT, IN_USE };

typedef struct {
    PyObject_HEAD
    Ring ring;
    Py_buffer memory; /* keeps the inbox mapped */
    _Atomic int lent;
    const void *into; /* the target of the message that is received while this is IN_USE */
} RingObject;

extern PyTypeObject *ring_end_type;

/* Send or receive a whole message if that is possible at once or in a moment: 1, or 0 without an effect. Only one thread
 * may use this end. */
int send_now(RingObject *o, const Header *header, const Py_buffer *data);
int receive_now(RingObject *o, const Header *expected, const Py_buffer *into);

/* Receive a message from a lent end, now IN_USE, without the interpreter's lock, and return the end: DONE_ALL;
 * otherwise Python has to continue. */
Status receive_lent(RingObject *o, const Header *expected, char *into, uint64_t size);

int add_ring_end(PyObject *module); /* add the type RingEnd: 0, or -1 with an exception */

/* Functions of the module.
 *
 * - measure_inbox(size, capacity): return the bytes of an inbox, and the capacity of a ring (0: default).
 * - create_inbox(memory, size, capacity): write its head.
 * - wake_inbox(memory, value): wake the owner of the inbox.
 * - read_wakeup(memory): return the value of the inbox's wakeup word.
 */
PyObject *measure_inbox(PyObject *module, PyObject *args);
/* await_inbox(memory, ends, known, mode): wait until a RingEnd in the tuple has more bytes or is broken, or the wakeup
 * word is not `known`; return whether that happened. */
PyObject *await_inbox(PyObject *module, PyObject *args);
PyObject *create_inbox(PyObject *module, PyObject *args);
PyObject *wake_inbox(PyObject *module, PyObject *args);
PyObject *read_wakeup(PyObject *module, PyObject *array);
