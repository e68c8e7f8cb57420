/* Calls of compiled programs, made in XLA's threads without the interpreter. */
#pragma once
#include "../calls.h"

/* The place of a call's array: the number of the program's buffer (operands first), the offset in it, and the size. */
typedef struct {
    int buffer;
    uint64_t offset, nbytes;
} Place;

/* The record of a call that this code made. */
typedef struct {
    Header header;
    double issued, ended; /* `ended` is 0 while the call runs */
    long long nbytes;
    unsigned long thread;
    int peer, site;
    _Atomic uint64_t number; /* of the call, from 1; 0: the entry is invalid */
} Entry;

typedef struct {
    RingObject *writer, *reader;
} Pair;

/* A group's calls from compiled programs. One call runs at a time, because the programs' tokens order them. */
typedef struct {
    PyObject_HEAD
    GroupObject *group; /* NULL: the members are not connected, or share no memory */
    Order *order;
    Recorder *recorder;
    PyObject *observers;
    int size, rank;
    _Atomic int self_is_free; /* true if no message of this member to itself is pending */
    Pair *pairs; /* the rings to and from each member; NULL until connected */
    Entry *entries;
    uint64_t capacity;
    _Atomic uint64_t count;
    _Atomic double open_until; /* the time of CLOCK_MONOTONIC until which no check by Python is needed */
    _Atomic int busy;
} Calls;

typedef struct ProgramCall {
    PyObject_VAR_HEAD
    struct ProgramCall *sending; /* in an exchange, the send that belongs to this receive; else NULL */
    Calls *calls; /* NULL: Python makes the call */
    PyObject *owner; /* owner.make(header or None, views) makes the call, or continues the call with that header */
    Header header;
    const Loops *loops;
    long long nbytes;
    int inputs, count; /* the number of input arrays, and of all arrays */
    int peer, site;
    int clears; /* true: fill the results with zeros */
    int operands, results; /* the numbers of the program's buffers */
    uint64_t *itemsizes; /* of each buffer */
    Place places[];
} ProgramCall;

/* A program's buffer. */
typedef struct {
    char *data;
    uint64_t nbytes;
} Memory;

typedef enum {
    MADE,   /* the call is done */
    BEGUN,  /* Python must continue the call with `header` */
    REFUSED /* the call has had no effect */
} Outcome;

/* Make a call, without the GIL. */
Outcome make_call(ProgramCall *call, const Memory *buffers, Header *header);

int add_program_calls(PyObject *module); /* -1 with an exception */
int add_handler(PyObject *module);       /* xla_handler: a capsule; None if XLA's header was not there */
