/* The engine's group, for Python and for other C modules. */
#pragma once
#include "binding/call.h"
#include "engine/engine.h"

#define HELD_BYTES (128 << 10) /* larger calls release the interpreter's lock at once */

typedef struct {
    PyObject_HEAD
    Group group;
    Py_buffer memory; /* keeps the segment mapped */
    Py_buffer *views; /* of the current call's arrays */
    Strides *strides;
    int exported;
    char sync; /* the thread that issued the call waits for its end */
} GroupObject;

extern PyTypeObject *group_type;
extern PyType_Spec group_spec;

int is_small(const GroupObject *o); /* True if the exported arrays have few bytes */

/* Begin a call, and continue it. Long operations release the interpreter's lock. */
Status begin_call(GroupObject *o, const CallSpecification *what);
Status carry_on(GroupObject *o);

/* Append an array's view to `views`: 1; 0 without an exception: the array is empty, not contiguous or not writable, or
 * its dtype has no code. */
int export_array(GroupObject *o, PyObject *array, int writable);
int export_view(PyObject *array, int writable, Py_buffer *view); /* as above, into the caller's view */

/* Make number `part` of the `parts` equal parts of a view the call's array number `at`. */
void describe_part(GroupObject *o, int at, int view, int part, int parts);
void release_arrays(GroupObject *o);

/* The code (transport/_calls/codes.py) of a buffer's dtype, by its format and item size; 0: none. */
int dtype_of(const Py_buffer *view);
