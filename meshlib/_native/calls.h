/* The C of calls: it numbers and records the usual ones, and begins them in the engine of transport._native.
 *
 * Python does the same where this is not built; a type with a twin there names its file.
 */
#pragma once
#include "binding/api.h"

#include <time.h>

#define COLLECTIVE (-1)

extern const Api *transport; /* module.c */

#if PY_VERSION_HEX < 0x030D0000 /* a name of Python 3.13 */
static inline PyObject *PyList_GetItemRef(PyObject *list, Py_ssize_t i) { return Py_XNewRef(PyList_GetItem(list, i)); }
#endif

/* Seconds of CLOCK_MONOTONIC, as time.monotonic() has them. */
static inline double monotonic(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ------------------------------------------------------------------ order.c: numbers and headers */

/* meshlib/_calls/fast_path.py */
typedef struct {
    PyObject_HEAD
    unsigned long long sequence, messages;
    unsigned short history;
    char numbering; /* a thread is about to number and queue a call in Python */
} Order;

uint16_t history_after(const Header *header); /* transport/_calls/header.py */

/* All of a header but its number and history, from elements, root, kind, dtype, op, extra, of which all
 * but the kind may be NULL: -1 with an exception. */
#define HEADER_ARGS 6
int read_header(PyObject *const *args, Header *header);

/* ------------------------------------------------------------------ spec.c */

/* meshlib/_calls/spec.py; the header has neither a number nor a history. */
typedef struct {
    PyObject_HEAD
    PyObject *kind, *run, *device;
    long long nbytes;
    int peer;
    Header header;
} CallSpec;

/* True if the call is on arrays in the host's memory. */
int is_on_host(CallSpec *spec);

/* ------------------------------------------------------------------ recorder.c, frames.c */

#define KNOWN_FILES 8

/* The last calls: meshlib/_recording/recorder.py. */
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
    } files[KNOWN_FILES]; /* the last ones looked up, with the result of own_files */
    int next_file;
} Recorder;

/* A record that is still to be filled in. */
typedef struct {
    Fields *record;
    PyCodeObject *code; /* of the nearest caller that is none of this project's files */
    int instruction;
    PyObject *label; /* borrowed from the ring */
} Opening;

/* The part of recording a call that may fail, and may run other code: -1 with an exception. */
int prepare_record(Recorder *ring, Opening *opening);

/* The rest, which does neither: the record (a new reference). */
Fields *fill_record(Opening *opening, PyObject *group, const Header *header, long long nbytes, int peer,
                    int sync, double seconds);

/* The code of that caller (a new reference) and where in it it is: -1 with an exception. */
int find_caller(Recorder *ring, PyCodeObject **code, int *instruction);

/* ------------------------------------------------------------------ types */

extern PyTypeObject *order_type, *recorder_type, *spec_type;
extern PyType_Spec order_spec, recorder_spec, fast_path_spec;
int init_fast_path(void); /* -1 with an exception */
int init_spec(PyObject *module);
