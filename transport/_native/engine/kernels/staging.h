/* Writing past the caches, where that is faster. */
#pragma once
#include "engine/kernels/copy.h"

#include <stddef.h>
#include <stdint.h>

/* copy_bytes past the caches. A thread that sees a later store of this thread sees the copied bytes. */
void stream_bytes(void *into, const void *from, size_t size);

/* The same without that: until `end_stream` nobody but this thread can count on it. */
void stream_past(void *into, const void *from, size_t size);
void end_stream(void);

/* From how many bytes of results on they are written so: the caches would not keep them anyway. */
#define STREAMED_BYTES (8 << 20)

/* The measured best way to write pieces that others read next; starts as zeros. */
typedef struct {
    float gain; /* how often as long a plain copy takes as one past the caches; 0: not known */
    unsigned tries;
    size_t until; /* the bytes of the next try */
} Staging;

/* A second target of a copy, and its copy function; `into` NULL: none. */
typedef struct {
    char *into;
    Copy way;
} Also;

struct Strides;

/* The source of a copy. `strides` NULL: it lies in one piece. Else the copy begins at `start` (strides.h). */
typedef struct {
    const char *data;
    const struct Strides *strides;
    uint64_t start;
} Source;

/* Copy a part of `whole` bytes to where another core reads them next, and elsewhere. */
void stage_bytes(Staging *staging, char *into, Source from, size_t size, size_t whole, Also also);

/* The best copy function for parts of this many bytes; after stream_past comes end_stream. */
Copy way_to_stage(const Staging *staging, size_t whole);
