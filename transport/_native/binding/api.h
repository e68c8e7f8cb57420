/* The interface of this module for other C modules: the capsule `api`. All are built together. */
#pragma once
#include "binding/group.h"
#include "binding/ring.h"

#define API_MODULE "transport._native._core"
#define API_NAME API_MODULE ".api"

typedef struct {
    size_t size; /* of this struct: detects modules that were not built together */
    PyTypeObject *group_type, *fields_type, *ring_end_type;
    int (*export_array)(GroupObject *, PyObject *, int);
    int (*export_view)(PyObject *, int, Py_buffer *);
    void (*describe_part)(GroupObject *, int, int, int, int);
    void (*release_arrays)(GroupObject *);
    int (*dtype_of)(const Py_buffer *);
    const Loops *(*find_loops)(int, int);
    int (*is_small)(const GroupObject *);
    Status (*begin_call)(GroupObject *, const CallSpecification *);
    Status (*carry_on)(GroupObject *);
    int (*send_now)(RingObject *, const Header *, const Py_buffer *);
    int (*receive_now)(RingObject *, const Header *, const Py_buffer *);
    /* Without the interpreter's lock: */
    Status (*group_begin)(Group *, const CallSpecification *, Mode);
    int (*ring_is_broken)(const Ring *);
    int (*ring_has_room)(const Ring *, uint64_t);
    Status (*ring_begin)(Ring *, const Header *, const char *, uint64_t, Mode);
    Status (*receive_lent)(RingObject *, const Header *, char *, uint64_t);
} Api;
