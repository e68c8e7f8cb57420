/* Arrays that do not lie in one piece: runs of bytes, at regular distances in each dim. */
#pragma once
#include "engine/kernels/copy.h"

#include <stdint.h>

#define MAX_STRIDES 64 /* as many dims as NumPy has */

/* The dims that count the runs; none where all lies in one piece. */
typedef struct Strides {
    int dims;
    uint64_t run, counts[MAX_STRIDES]; /* a run has bytes */
    int64_t strides[MAX_STRIDES];      /* bytes from one to the next */
} Strides;

/* A place in such an array, in the order of its indices (C order). */
typedef struct {
    const Strides *strides;
    char *at;
    uint64_t left; /* of the run, in bytes */
    uint64_t index[MAX_STRIDES];
} Cursor;

/* `start` bytes behind the beginning; `strides` NULL, or one without dims: all lies in one piece. */
Cursor cursor_at(void *array, const Strides *strides, uint64_t start);

/* Copy this many bytes from one cursor's place to the other's, and move both on by as many. */
void move_bytes(Copy way, Cursor *to, Cursor *from, uint64_t size);
