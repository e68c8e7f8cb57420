/* A table of the kinds of calls that C makes, and the functions that read a call's arguments by it. */
#pragma once
#include "stream_lock.h"

typedef enum { NEVER, ALWAYS, AT_ROOT, ELSEWHERE } Presence;

/* The arrays that a member passes as input or as output. */
typedef struct {
    signed char argument;
    char presence;
    char parts; /* true: one for each member, in a list, or one after the other in one array */
} Side;

/* The numbers of a kind's arguments; NONE if the kind lacks the argument. */
#define NONE (-1)
typedef struct {
    Side input, output;
    signed char op, rank, place; /* `rank` is the root's global rank, `place` its group rank */
    signed char tag;             /* of a message; 0 if the kind has none */
    signed char spare;           /* arguments from this one on must be None or False */
    signed char result;          /* the argument that the call returns */
    char has_default;            /* true: the root defaults to group rank 0 */
    char agreed;                 /* true: all members have the same number of elements */
    char records_output;         /* true: the record has the bytes of the output */
} KindRow;

/* The properties of a group that these calls need. */
typedef struct {
    PyTypeObject *array_type; /* NumPy's */
    PyObject *ops;            /* the reduce ops, by code */
    int *ranks;               /* the members' global ranks */
    int size;
} GroupFacts;

/* The arguments of a call, read before the call has any effect. */
typedef struct {
    const KindRow *row;
    PyObject *const *arguments;
    int count, listed; /* `listed`: parts are in a list */
    int root, op;      /* the root of a message is its peer */
    uint32_t tag;
} Arguments;

/* Read the arguments. Return 1, or 0, without an exception, if Python must make the call. */
int read_arguments(const GroupFacts *u, long kind, int listed, PyObject *tuple, Arguments *a);

/* Export the arrays, and set the header's fields and the call's bytes. Return 1, or 0 as above with the arrays released. */
int take_arguments(const GroupFacts *u, GroupObject *o, const Arguments *a, CallSpecification *what, long long *nbytes);

/* Return the call's result (a new reference), or NULL with an exception. */
PyObject *result_of(const Arguments *a);
