/* Non-temporal stores (past the caches), if they are faster. */
#pragma once
#include "engine/kernels/copy.h"

#include <stddef.h>
#include <stdint.h>

/* Copy past the caches. A thread that sees a later store of this thread also sees the copied bytes. */
void stream_bytes(void *into, const void *from, size_t size);

/* Copy past the caches, unordered: other threads can rely on the bytes only after end_stream. */
void stream_past(void *into, const void *from, size_t size);
void end_stream(void);

/* Results of at least this size are written past the caches, which could not hold them anyway. */
#define STREAMED_BYTES (8 << 20)

/* The measured best way to write pieces that others read next; starts as zeros. */
typedef struct {
    float gain; /* the time of a plain copy divided by that of a copy past the caches; 0: unknown */
    unsigned tries;
    size_t until; /* the bytes left until the next measurement */
} Staging;

/* A second target of a copy, and its copy function; `into` NULL: none. */
typedef struct {
    char *into;
    Copy way;
} Also;

struct Strides;

/* The source of a copy. If `strides` is NULL, it is contiguous. Otherwise the copy begins at byte `start` (strides.h). */
typedef struct {
    const char *data;
    const struct Strides *strides;
    uint64_t start;
} Source;

/* Copy `size` of `whole` bytes to memory that another core reads next, and to a second target. */
void stage_bytes(Staging *staging, char *into, Source from, size_t size, size_t whole, Also also);

/* The best copy function for parts of `whole` bytes. After stream_past, call end_stream. */
Copy way_to_stage(const Staging *staging, size_t whole);
