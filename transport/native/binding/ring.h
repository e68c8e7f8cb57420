/* Rings of messages, as Python has them. */
#pragma once
#include "core.h"

int add_ring_end(PyObject *module); /* the type RingEnd: -1 with an exception */

/* Functions of the module: what an inbox of so many members takes, (size, capacity of a ring or 0) -> bytes and
 * capacity; make one, (memory, size, capacity); have its owner look up, (memory, value); and the value it has, (memory). */
PyObject *measure_inbox(PyObject *module, PyObject *args);
/* (memory, ends, rung, mode): whether one of a tuple of RingEnds has news, or the bell has rung. */
PyObject *listen_to(PyObject *module, PyObject *args);
PyObject *create_inbox(PyObject *module, PyObject *args);
PyObject *ring_bell(PyObject *module, PyObject *args);
PyObject *read_bell(PyObject *module, PyObject *array);
