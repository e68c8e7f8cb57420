/* Writing past the caches, and what is better written so. */
#pragma once
#include <stddef.h>

typedef void (*Way)(void *into, const void *from, size_t size);

/* copy_bytes past the caches. Who sees a later store of this thread sees what was written. */
void stream_bytes(void *into, const void *from, size_t size);

/* From how many bytes of results on they are written so: the caches would not keep them anyway. */
#define STREAMED_BYTES (8 << 20)

/* How the pieces that others read next are best written; starts as zeros. */
typedef struct {
    float gain; /* how often as long a plain copy takes as one past the caches; 0: not known */
    unsigned pieces;
} Staging;

/* Where else to copy, and how; `into` NULL: nowhere. */
typedef struct {
    char *into;
    Way way;
} Also;

/* Copy into a block, and elsewhere. */
void stage_bytes(Staging *staging, char *into, const char *from, size_t size, Also also);
