/* The compiled core. engine/ moves bytes and knows no Python. binding/ shows it to Python. calls/ makes the calls of
 * the usual case: it numbers and records them, and begins them in the engine.
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

#define COLLECTIVE (-1)

/* Whether the engine's errno is one: then with an OSError. */
static inline int refused(int error) {
    errno = error;
    if (error) PyErr_SetFromErrno(PyExc_OSError);
    return error;
}

/* Seconds of CLOCK_MONOTONIC, as time.monotonic() has them, to a fraction of a microsecond. Under the
 * interpreter's lock; the engine's now() needs none. */
double monotonic(void);
void init_clock(void);

/* ------------------------------------------------------------------ state.c: numbers */

/* meshlib/calls/shortcut.py */
typedef struct {
    PyObject_HEAD
    unsigned long long sequence, messages;
    unsigned short history;
} Order;

/* ------------------------------------------------------------------ record.c: a call's record */

uint16_t history_after(const Header *header); /* transport/call.py */

/* All of a header but its number and history, from elements, root, kind, dtype, op, extra, of which all
 * but the kind may be NULL: -1 with an exception. */
#define HEADER_ARGS 6
int read_header(PyObject *const *args, Header *header);

/* transport/call.py */
typedef struct {
    PyObject_HEAD
    PyObject *packed; /* the header as bytes, once somebody has asked for it; else NULL */
    PyObject *waiting_for, *completion, *error, *group, *label, *code;
    double issued, started, ended, seconds;
    long long nbytes;
    unsigned long thread;
    int peer, instruction;
    char sync;
    Header header;
} Fields;

/* ------------------------------------------------------------------ spec.c */

/* meshlib/calls/spec.py; the header has neither a number nor a history. */
typedef struct {
    PyObject_HEAD
    PyObject *kind, *run, *device;
    long long nbytes;
    int peer;
    Header header;
} CallSpec;

/* Whether the call is on arrays in the host's memory. */
int is_on_host(CallSpec *spec);

/* ------------------------------------------------------------------ recorder.c, frames.c */

#define KNOWN_FILES 8

/* The last calls: meshlib/recording/recorder.py. */
typedef struct {
    PyObject_HEAD
    PyObject *followers, *annotate, *labels, *own_files;
    int watched; /* whether there are followers: read without the interpreter's lock */
    PyTypeObject *type; /* of the records */
    Py_ssize_t capacity, next;
    Fields **records; /* NULL where none has been yet */
    struct {
        PyObject *name;
        int own;
    } files[KNOWN_FILES]; /* the last that were asked for, and what own_files says of them */
    int next_file;
} Recorder;

/* A record that is still to be filled in. */
typedef struct {
    Fields *record;
    PyCodeObject *code; /* of the nearest caller that is none of this project's files */
    int instruction;
    PyObject *label;
} Opening;

/* What may fail, and may run other code, of recording a call: -1 with an exception. */
int prepare_record(Recorder *ring, Opening *opening);

/* The rest, which does neither: the record (a new reference). */
Fields *fill_record(Opening *opening, PyObject *group, const Header *header, long long nbytes, int peer,
                    int sync, double seconds);

/* The code of that caller (a new reference) and where in it it is: -1 with an exception. */
int find_caller(Recorder *ring, PyCodeObject **code, int *instruction);

/* Whether the frames of a file are to be skipped: 1, 0, or -1 with an exception. */
int is_own(Recorder *ring, PyObject *file);

/* ------------------------------------------------------------------ crc32c.c: a checksum */

void init_crc32c(void);
PyObject *crc32c(PyObject *module, PyObject *args);

/* ------------------------------------------------------------------ types */

extern PyTypeObject *order_type, *fields_type, *recorder_type, *spec_type;
extern PyType_Spec order_spec, fields_spec, recorder_spec, shortcut_spec;
int init_shortcut(void); /* -1 with an exception */
int init_spec(PyObject *module);
