/* Rings of messages, as Python has them. */
#pragma once
#include "core.h"

int add_ring_end(PyObject *module); /* the type RingEnd: -1 with an exception */

/* Functions of the module.
 *
 * - measure_inbox(size, capacity of a ring or 0): the bytes of an inbox, and the capacity.
 * - create_inbox(memory, size, capacity): write its head.
 * - ring_bell(memory, value): have its owner look up.
 * - read_bell(memory): the value of its bell.
 */
PyObject *measure_inbox(PyObject *module, PyObject *args);
/* listen_to(memory, ends, rung, mode): whether a RingEnd of a tuple has news, or the bell has rung. */
PyObject *listen_to(PyObject *module, PyObject *args);
PyObject *create_inbox(PyObject *module, PyObject *args);
PyObject *ring_bell(PyObject *module, PyObject *args);
PyObject *read_bell(PyObject *module, PyObject *array);
