/* The compiled core. engine/ moves bytes and does not depend on Python. binding/ exposes it to Python, and
 * through binding/api.h to the C modules of the packages above.
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

/* Backports of Python 3.13. On free-threaded Python, an object's own lock guards its shared fields. */
#if PY_VERSION_HEX < 0x030D0000
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
static inline int PyDict_GetItemRef(PyObject *dict, PyObject *key, PyObject **found) {
    *found = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    return *found ? 1 : PyErr_Occurred() ? -1 : 0;
}
#endif

/* Return `error`, an errno of the engine; set an OSError if it is not 0. */
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
