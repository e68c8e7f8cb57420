/* Updates of memory that several members change concurrently, atomic for each element. */
#pragma once
#include "engine/words.h"

/* The ops of transport/_calls/codes.py that an update supports, and two others: REPLACE and REPLACE_IF. */
enum { REPLACE = 0, UPDATE_SUM = 1, UPDATE_PRODUCT = 3, UPDATE_MIN, UPDATE_MAX, BITS_AND, BITS_OR, BITS_XOR, REPLACE_IF = 16 };

/* Combine `count` elements at `at` with `values`, one after the other; `before` (may be NULL) gets the previous elements.
 * REPLACE_IF replaces an element that is equal to the one in `expected`. Sequentially consistent: a member that sees an
 * element's new value sees this member's earlier writes. 0; -1: the dtype has no such update. */
int update(int dtype, int op, char *at, const char *values, const char *expected, char *before, uint64_t count);
