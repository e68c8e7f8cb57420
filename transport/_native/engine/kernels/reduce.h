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
    BothLoop both; /* of two members, with the operands after them: into both of their parts */
} Loops;

/* NULL: there are none. */
const Loops *find_loops(int dtype, int op);

/* Reduce bytes [0, nbytes) of the members' parts into `out`, which may be one of them. The order is a binary tree
 * over the members that depends on their number alone: docs/inside/shm.md. */
void reduce_parts(const Loops *loops, char *out, const char *const *parts, int size, size_t nbytes);
