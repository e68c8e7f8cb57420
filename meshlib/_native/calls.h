/* C code that numbers and records common calls, and starts them in the engine of transport._native.
 *
 * Without it, Python code does the same. The comment of a type names the file of its Python twin.
 */
#pragma once
#include "binding/api.h"

#include <time.h>

#define COLLECTIVE (-1)

extern const Api *transport; /* module.c */

#if PY_VERSION_HEX < 0x030D0000 /* new in Python 3.13 */
static inline PyObject *PyList_GetItemRef(PyObject *list, Py_ssize_t i) { return Py_XNewRef(PyList_GetItem(list, i)); }
#endif

/* Return the seconds of CLOCK_MONOTONIC, as time.monotonic() does. */
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
    char numbering; /* true while a thread numbers and queues a call in Python */
} Order;

uint16_t history_after(const Header *header); /* transport/_calls/header.py */

/* Set a header, except for its sequence and history, from elements, root, kind, dtype, op and extra. All but the kind
 * may be NULL. Return 0, or -1 with an exception. */
#define HEADER_ARGS 6
int read_header(PyObject *const *args, Header *header);

/* ------------------------------------------------------------------ spec.c */

/* meshlib/_calls/spec.py; the header has neither a sequence number nor a history. */
typedef struct {
    PyObject_HEAD
    PyObject *kind, *run, *device;
    long long nbytes;
    int peer;
    Header header;
} CallSpec;

/* Return whether the call's arrays are in host memory. */
int is_on_host(CallSpec *spec);

/* ------------------------------------------------------------------ recorder.c, frames.c */

#define KNOWN_FILES 8

/* The last calls; see meshlib/_recording/recorder.py. */
typedef struct {
    PyObject_HEAD
    PyObject *followers, *annotate, *labels, *own_files;
    int watched; /* true if there are followers; may be read without the GIL */
    PyTypeObject *type; /* of the records */
    Py_ssize_t capacity, next;
    Fields **records; /* unused entries are NULL */
    struct {
        PyObject *name;
        int own;
    } files[KNOWN_FILES]; /* a cache of own_files */
    int next_file;
} Recorder;

/* A record that is not filled in yet. */
typedef struct {
    Fields *record;
    PyCodeObject *code; /* of the nearest caller outside of this project's files */
    int instruction;
    PyObject *label; /* a new reference, which fill_record takes over */
} Opening;

/* Do the part of recording that may fail and may run other code. Return 0, or -1 with an exception. */
int prepare_record(Recorder *ring, Opening *opening);

/* Fill in the record, without failing or running other code; return it (a new reference). */
Fields *fill_record(Opening *opening, PyObject *group, const Header *header, long long nbytes, int peer,
                    int sync, double seconds);

/* Find the nearest caller outside of this project's files: its code (a new reference) and its current instruction.
 * Return 0, or -1 with an exception. */
int find_caller(Recorder *ring, PyCodeObject **code, int *instruction);

/* ------------------------------------------------------------------ types */

extern PyTypeObject *order_type, *recorder_type, *spec_type;
extern PyType_Spec order_spec, recorder_spec, fast_path_spec;
int init_fast_path(void); /* -1 with an exception */
int init_spec(PyObject *module);
