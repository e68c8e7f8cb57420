/* The turn on an ordered stream of calls: the base of meshlib/_calls/call_stream.py's CallStream. */
#pragma once
#include "calls.h"

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    _Atomic unsigned long owner; /* the thread that has the turn; 0: none */
    PyObject *queue;     /* the tasks that wait for it */
    int draining;        /* threads that wait for the end of all */
} StreamLock;

extern PyTypeObject *lock_type;
extern PyType_Spec lock_spec;

/* Take the turn if nobody has it or waits for it: 1, 0, or -1 with an exception. The calling thread itself may have
 * it, if a signal has arrived in the middle of its call. Does not give up the interpreter's lock. */
int try_enter(StreamLock *self);

/* Give the turn back, and return result, or NULL with the exception that there was. */
PyObject *leave_with(StreamLock *self, PyObject *result);
