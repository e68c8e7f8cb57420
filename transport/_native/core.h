/* The compiled core. engine/ moves bytes and knows no Python. binding/ shows it to Python, and by binding/api.h to the
 * C of the floors above.
 */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "engine/engine.h"

/* Names of Python 3.13. Without an interpreter's lock an object's own lock guards what several threads change. */
#if PY_VERSION_HEX < 0x030D0000
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
static inline int PyDict_GetItemRef(PyObject *dict, PyObject *key, PyObject **found) {
    *found = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    return *found ? 1 : PyErr_Occurred() ? -1 : 0;
}
#endif

/* True if the engine's errno is one: then with an OSError. */
static inline int refused(int error) {
    errno = error;
    if (error) PyErr_SetFromErrno(PyExc_OSError);
    return error;
}

/* ------------------------------------------------------------------ crc32c.c: a checksum */

void init_crc32c(void);
PyObject *crc32c(PyObject *module, PyObject *args);

/* ------------------------------------------------------------------ binding/window.c: one-sided windows */

PyObject *update_window(PyObject *module, PyObject *args);
PyObject *await_word(PyObject *module, PyObject *args);
PyObject *fence(PyObject *module, PyObject *unused);
