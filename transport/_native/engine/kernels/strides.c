/* Copying to and from non-contiguous arrays. */
#include "engine/kernels/strides.h"
#include "engine/words.h"

#include <string.h>

#define SHORT_RUN 256
#define PREFETCH_BYTES 8192

Cursor cursor_at(void *array, const Strides *strides, uint64_t start) {
    Cursor c; /* not all zeros: it is large, and mostly unused */
    c.strides = strides;
    c.at = array;
    if (!strides || !strides->dims) {
        c.strides = NULL;
        c.at += start;
        c.left = UINT64_MAX;
        return c;
    }
    uint64_t number = start / strides->run, into = start % strides->run;
    for (int dim = strides->dims - 1; dim >= 0; dim--) {
        c.index[dim] = number % strides->counts[dim];
        number /= strides->counts[dim];
        c.at += (int64_t)c.index[dim] * strides->strides[dim];
    }
    c.at += into;
    c.left = strides->run - into;
    return c;
}

/* Move from the end of a run to the next one; after the last run, to the first, which is not used. */
static void next_run(Cursor *c) {
    const Strides *g = c->strides;
    c->at -= g->run;
    c->left = g->run;
    for (int dim = g->dims - 1; dim >= 0; dim--) {
        c->at += g->strides[dim];
        if (++c->index[dim] < g->counts[dim]) return;
        c->at -= (int64_t)g->counts[dim] * g->strides[dim];
        c->index[dim] = 0;
    }
}

static inline void advance(Cursor *c, uint64_t size) {
    c->at += size;
    c->left -= size;
    if (!c->left) next_run(c);
}

/* Constant sizes are compiled inline: a call of memcpy costs more than copying a few bytes. */
static inline void copy_short(char *to, const char *from, uint64_t size) {
    switch (size) {
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    case 32: memcpy(to, from, 32); break;
    case 64: memcpy(to, from, 64); break;
    default: memcpy(to, from, size);
    }
}

/* Prefetch the next run into the second-level cache; the first is for the bytes being copied now. The hardware
 * prefetcher handles contiguous memory only. */
static inline void prefetch_next_run(const Cursor *c) {
    const Strides *g = c->strides;
    const char *next = c->at + c->left - g->run + g->strides[g->dims - 1];
    for (uint64_t line = 0; line < least(g->run, PREFETCH_BYTES); line += LINE) __builtin_prefetch(next + line, 0, 2);
}

void move_bytes(Copy way, Cursor *to, Cursor *from, uint64_t size) {
    while (size) {
        uint64_t part = least(size, least(to->left, from->left));
        if (part <= SHORT_RUN)
            copy_short(to->at, from->at, part);
        else {
            if (from->strides && part == from->left) prefetch_next_run(from);
            way(to->at, from->at, part);
        }
        advance(to, part);
        advance(from, part);
        size -= part;
    }
}
