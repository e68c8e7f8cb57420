/* Reductions. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { SUM = 1, AVG, PRODUCT, MIN, MAX }; /* transport/_calls/codes.py */

typedef void (*Loop)(void *out, const void *left, const void *right, size_t n);
typedef void (*BothLoop)(void *left, void *right, size_t n);

/* The loops for a dtype and an op, by their codes on the wire. */
typedef struct {
    uint16_t dtype;
    uint8_t op, itemsize;
    Loop combine;
    BothLoop both; /* for two members: write the result into both parts */
} Loops;

/* NULL if the pair has no loops. */
const Loops *find_loops(int dtype, int op);

/* Reduce bytes [0, nbytes) of the members' parts into `out`, which may be one of the parts. The order is a binary tree
 * that depends on the number of members alone: docs/inside/shm.md. */
void reduce_parts(const Loops *loops, char *out, const char *const *parts, int size, size_t nbytes);
