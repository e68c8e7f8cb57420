/* The engine's group, as Python and the C of the floors above have it. */
#pragma once
#include "binding/call.h"
#include "engine/engine.h"

#define HELD_BYTES (128 << 10) /* a call of more gives up the interpreter's lock at once */

typedef struct {
    PyObject_HEAD
    Group group;
    Py_buffer memory; /* of the segment, which stays mapped as long as this lives */
    Py_buffer *views; /* of the arrays of the call under way */
    Strides *strides;
    int exported;
    char sync; /* the thread that issued the call waits for its end */
} GroupObject;

extern PyTypeObject *group_type;
extern PyType_Spec group_spec;

int is_small(const GroupObject *o); /* whether the call whose arrays are exported is one of few bytes */

/* Begin a call, and carry it on. The interpreter's lock is given up where that takes a while. */
Status begin_call(GroupObject *o, const CallSpecification *what);
Status carry_on(GroupObject *o);

/* Export an array, which is then the last of the views: 1; 0: it does not lie in one piece, cannot be written to, is
 * empty, or has a dtype without a code. No exception. */
int export_array(GroupObject *o, PyObject *array, int writable);
int export_view(PyObject *array, int writable, Py_buffer *view); /* the same, into a view of the caller's */

/* Have array number `at` of a call be one of the parts of a view, all of one size. */
void describe_part(GroupObject *o, int at, int view, int part, int parts);
void release_arrays(GroupObject *o);

/* The code of the dtype that a buffer's format and size of elements stand for (transport/_calls/codes.py); 0: none. */
int dtype_of(const Py_buffer *view);
