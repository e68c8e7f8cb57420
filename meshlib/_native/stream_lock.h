/* The lock of an ordered stream of calls: the base of CallStream in meshlib/_calls/call_stream.py. */
#pragma once
#include "calls.h"

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    _Atomic unsigned long owner; /* the thread that holds the lock, or 0 */
    PyObject *queue;     /* the tasks that wait for the lock */
    int draining;        /* the number of threads that wait until all tasks are done */
} StreamLock;

extern PyTypeObject *lock_type;
extern PyType_Spec lock_spec;

/* Acquire the lock if it is free and no task waits for it. Return 1, 0, or -1 with an exception. The calling thread
 * itself may hold it, if a signal handler runs during its call. Does not release the GIL. */
int try_enter(StreamLock *self);

/* Release the lock and return `result`, preserving a raised exception. Return NULL if waking the waiting threads fails. */
PyObject *leave_with(StreamLock *self, PyObject *result);
