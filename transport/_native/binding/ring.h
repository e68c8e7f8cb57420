/* Rings of messages, as Python has them. */
#pragma once
#include "core.h"

/* LENT: code without the interpreter's lock may use the end. Python takes a lent end back without waiting: to Python an
 * end IN_USE looks empty. If such code leaves a message half received, the end stays in use until Python goes on with
 * that message. */
enum { KEPT, LENT, IN_USE };

typedef struct {
    PyObject_HEAD
    Ring ring;
    Py_buffer memory; /* of the inbox, which stays mapped as long as this lives */
    _Atomic int lent;
    const void *into; /* where the message goes that is received while this is in use */
} RingObject;

extern PyTypeObject *ring_end_type;

/* Send or receive a whole message if that can be done now, or in a moment: 1; 0: nothing has happened. For the only
 * thread that uses this end. */
int send_now(RingObject *o, const Header *header, const Py_buffer *data);
int receive_now(RingObject *o, const Header *expected, const Py_buffer *into);

/* Receive a message into an end that was lent and is in use now, without the interpreter's lock, and give the end
 * back: DONE_ALL; else Python has to go on. */
Status receive_lent(RingObject *o, const Header *expected, char *into, uint64_t size);

int add_ring_end(PyObject *module); /* the type RingEnd: -1 with an exception */

/* Functions of the module.
 *
 * - measure_inbox(size, capacity of a ring or 0): the bytes of an inbox, and the capacity.
 * - create_inbox(memory, size, capacity): write its head.
 * - wake_inbox(memory, value): wake the owner of the inbox.
 * - read_wakeup(memory): the value of its wakeup word.
 */
PyObject *measure_inbox(PyObject *module, PyObject *args);
/* await_inbox(memory, ends, known, mode): whether a RingEnd of the tuple has more or is broken, or the wakeup word is
 * not `known`. */
PyObject *await_inbox(PyObject *module, PyObject *args);
PyObject *create_inbox(PyObject *module, PyObject *args);
PyObject *wake_inbox(PyObject *module, PyObject *args);
PyObject *read_wakeup(PyObject *module, PyObject *array);
