/* A table of the kinds of calls that are made here, and the arguments of a call read by it. */
#pragma once
#include "stream_lock.h"

typedef enum { NEVER, ALWAYS, AT_ROOT, ELSEWHERE } Presence;

/* The arrays that a member gives, or gets. */
typedef struct {
    signed char argument;
    char presence;
    char parts; /* one for each member, in a list or one after the other in one array */
} Side;

/* Numbers of arguments; NONE: the kind has none. */
#define NONE (-1)
typedef struct {
    Side input, output;
    signed char op, rank, place; /* the root's global rank, and its place in the group */
    signed char tag;             /* of a message; 0: the kind has none */
    signed char spare;           /* those from here on are None or False */
    signed char result;          /* the one that the call returns */
    char has_default;            /* without a rank or a place the root's place is 0 */
    char agreed;                 /* all members have as many elements */
    char records_output;            /* the record has the bytes of the output */
} KindRow;

/* A group as such calls see it. */
typedef struct {
    PyTypeObject *array_type; /* NumPy's */
    PyObject *ops;            /* the reductions, by their codes */
    int *ranks;               /* the members' global ranks */
    int size;
} GroupFacts;

/* The arguments of a call, read before anything happens. */
typedef struct {
    const KindRow *row;
    PyObject *const *arguments;
    int count, listed; /* parts come in a list */
    int root, op; /* the root of a message is its other end */
    uint32_t tag;
} Arguments;

/* 1; 0: the call is not one that can be made here. No exception. */
int read_arguments(const GroupFacts *u, long kind, int listed, PyObject *tuple, Arguments *a);

/* Export the arrays, and describe the call: its header's fields and its bytes. 1; 0 as above, the arrays released. */
int take_arguments(const GroupFacts *u, GroupObject *o, const Arguments *a, CallSpecification *what, long long *nbytes);

/* The call's result: NULL with an exception. */
PyObject *result_of(const Arguments *a);
