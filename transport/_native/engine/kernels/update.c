/* Updates of one-sided windows. Hardware supports few ops and dtypes, so all updates use compare-and-swap. */
#include "engine/kernels/update.h"

#include <string.h>

/* BITS is an integer of the element's size. As in NumPy, integers wrap, and minima and maxima propagate NaN. */
#define UPDATE(NAME, T, BITS, NUMBER, CASES)                                                                      \
    static int update_##NAME(int op, char *at, const char *values, const char *expected, char *before, uint64_t n) { \
        for (uint64_t i = 0; i < n; i++) {                                                                        \
            _Atomic BITS *word = (_Atomic BITS *)(void *)at + i;                                                  \
            BITS seen = atomic_load_explicit(word, memory_order_relaxed), next;                                   \
            T a, b, x = 0, c;                                                                                     \
            memcpy(&b, values + i * sizeof b, sizeof b);                                                          \
            if (op == REPLACE_IF) memcpy(&x, expected + i * sizeof x, sizeof x);                                  \
            do {                                                                                                  \
                memcpy(&a, &seen, sizeof a);                                                                      \
                switch (op) {                                                                                     \
                case REPLACE: c = b; break;                                                                       \
                case REPLACE_IF: c = a == x ? b : a; break;                                                       \
                case UPDATE_SUM: c = (T)((NUMBER)a + (NUMBER)b); break;                                           \
                case UPDATE_PRODUCT: c = (T)((NUMBER)a * (NUMBER)b); break;                                       \
                case UPDATE_MIN: c = ((a < b) | (a != a)) ? a : b; break;                                         \
                case UPDATE_MAX: c = ((a > b) | (a != a)) ? a : b; break;                                         \
                    CASES                                                                                         \
                default: return -1;                                                                               \
                }                                                                                                 \
                memcpy(&next, &c, sizeof c);                                                                      \
            } while (!atomic_compare_exchange_weak(word, &seen, next));                                           \
            if (before) memcpy(before + i * sizeof seen, &seen, sizeof seen);                                     \
        }                                                                                                         \
        return 0;                                                                                                 \
    }
#define BITWISE                                                                                                   \
    case BITS_AND: c = a & b; break;                                                                              \
    case BITS_OR: c = a | b; break;                                                                               \
    case BITS_XOR: c = a ^ b; break;
#define INTEGER(NAME, T, BITS) UPDATE(NAME, T, BITS, uint64_t, BITWISE)
INTEGER(i1, int8_t, uint8_t)
INTEGER(u1, uint8_t, uint8_t)
INTEGER(i2, int16_t, uint16_t)
INTEGER(u2, uint16_t, uint16_t)
INTEGER(i4, int32_t, uint32_t)
INTEGER(u4, uint32_t, uint32_t)
INTEGER(i8, int64_t, uint64_t)
INTEGER(u8, uint64_t, uint64_t)
UPDATE(f4, float, uint32_t, float, )
UPDATE(f8, double, uint64_t, double, )

int update(int dtype, int op, char *at, const char *values, const char *expected, char *before, uint64_t count) {
    /* By the codes of transport/_calls/codes.py. */
    static int (*const known[])(int, char *, const char *, const char *, char *, uint64_t) = {
        [2] = update_i1, [3] = update_u1, [4] = update_i2, [5] = update_u2,  [6] = update_i4,
        [7] = update_u4, [8] = update_i8, [9] = update_u8, [11] = update_f4, [12] = update_f8,
    };
    if (dtype < 0 || dtype >= (int)(sizeof known / sizeof *known) || !known[dtype]) return -1;
    return known[dtype](op, at, values, expected, before, count);
}
