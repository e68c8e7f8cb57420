/* The type CallFields: a running or completed call, with its header. */
#pragma once
#include "core.h"

/* transport/_calls/call.py */
typedef struct {
    PyObject_HEAD
    PyObject *packed; /* the header as bytes; NULL before the first use */
    PyObject *waiting_for, *completion, *rest, *error, *group, *label, *code;
    double issued, started, ended, seconds;
    long long nbytes;
    unsigned long thread;
    int peer, instruction;
    char sync;
    Header header;
} Fields;

extern PyTypeObject *fields_type;
extern PyType_Spec fields_spec;
