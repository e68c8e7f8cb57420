/* Calls of compiled programs, made in the threads of XLA's without the interpreter. */
#pragma once
#include "../calls.h"

/* The place of a call's array: the number of the program's buffer, operands first, and the offset there. */
typedef struct {
    int buffer;
    uint64_t offset, nbytes;
} Place;

/* The record of a call that compiled code made. */
typedef struct {
    Header header;
    double issued, ended; /* 0: it is under way */
    long long nbytes;
    unsigned long thread;
    int peer, site;
    _Atomic uint64_t number; /* of the call, from 1; 0: nothing to be read */
} Entry;

typedef struct {
    RingObject *writer, *reader;
} Pair;

/* A group, as compiled programs make calls on it. One at a time: the programs' tokens see to that. */
typedef struct {
    PyObject_HEAD
    GroupObject *group; /* NULL: the members have not met, or share no memory */
    Order *order;
    Recorder *recorder;
    PyObject *observers;
    int size, rank;
    _Atomic int self_is_free; /* no message of this member to itself is on its way */
    Pair *pairs; /* by member: the rings to it and from it; NULL if there are none yet */
    Entry *entries;
    uint64_t capacity;
    _Atomic uint64_t count;
    _Atomic double open_until; /* seconds of CLOCK_MONOTONIC: Python has seen that all is as usual */
    _Atomic int busy;
} Calls;

typedef struct ProgramCall {
    PyObject_VAR_HEAD
    struct ProgramCall *sending; /* of an exchange, whose other half this is; else NULL */
    Calls *calls; /* NULL: Python makes it */
    PyObject *owner; /* owner.make(header or None, views): make the call, or go on with the one of that header */
    Header header;
    const Loops *loops;
    long long nbytes;
    int inputs, count; /* arrays that are read, and all */
    int peer, site;
    int clears; /* the result is zeros */
    int operands, results; /* buffers of the program, */
    uint64_t *itemsizes; /* and the bytes of an element of each */
    Place places[];
} ProgramCall;

/* A program's buffer. */
typedef struct {
    char *data;
    uint64_t nbytes;
} Memory;

typedef enum {
    MADE,   /* the call is done */
    BEGUN,  /* Python has to go on with it: `header` is its */
    REFUSED /* nothing has happened */
} Outcome;

/* Make a call, without the interpreter's lock. */
Outcome make_call(ProgramCall *call, const Memory *buffers, Header *header);

int add_program_calls(PyObject *module); /* -1 with an exception */
int add_handler(PyObject *module);       /* xla_handler: a capsule; None if XLA's header was not there */
