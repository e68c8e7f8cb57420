/* Non-contiguous arrays: runs of bytes, at regular distances in each dim. */
#pragma once
#include "engine/kernels/copy.h"

#include <stdint.h>

#define MAX_STRIDES 64 /* as many dims as NumPy has */

/* The dims that count the runs; none if the array is contiguous. */
typedef struct Strides {
    int dims;
    uint64_t run, counts[MAX_STRIDES]; /* the bytes of a run; the size of each dim */
    int64_t strides[MAX_STRIDES];      /* in bytes */
} Strides;

/* A position in an array, in C order. */
typedef struct {
    const Strides *strides;
    char *at;
    uint64_t left; /* of the run, in bytes */
    uint64_t index[MAX_STRIDES];
} Cursor;

/* The position `start` bytes after the beginning; `strides` NULL or without dims: the array is contiguous. */
Cursor cursor_at(void *array, const Strides *strides, uint64_t start);

/* Copy `size` bytes between two cursors, and advance both. */
void move_bytes(Copy way, Cursor *to, Cursor *from, uint64_t size);
