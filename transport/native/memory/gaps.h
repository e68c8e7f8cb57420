/* Arrays that do not lie in one piece: runs of bytes, at regular distances in each dim. */
#pragma once
#include "core.h"
#include "memory/staging.h"

#define MOST_GAPS 8

/* The dims that count the runs; none where all lies in one piece. */
typedef struct Gaps {
    int dims;
    uint64_t run, counts[MOST_GAPS]; /* a run has bytes */
    int64_t strides[MOST_GAPS];      /* bytes from one to the next */
} Gaps;

/* Whether a buffer has a single dim and no gaps. */
static inline int lies_in_a_row(const Py_buffer *view) {
    return view->ndim == 0 || (view->ndim == 1 && (!view->strides || view->strides[0] == view->itemsize));
}

/* What a buffer exported with its strides has; -1 where those are more dims. */
int find_gaps(const Py_buffer *view, Gaps *gaps);

/* A place in such an array, in the order of its indices (C order). */
typedef struct {
    const Gaps *gaps;
    char *at;
    uint64_t left; /* of the run, in bytes */
    uint64_t index[MOST_GAPS];
} Cursor;

/* `start` bytes behind the beginning; `gaps` NULL, or one without dims: all lies in one piece. */
Cursor cursor_at(void *array, const Gaps *gaps, uint64_t start);

/* Copy so many bytes from where one cursor is to where the other is; both go on by as many. */
void move_bytes(Way way, Cursor *to, Cursor *from, uint64_t size);
