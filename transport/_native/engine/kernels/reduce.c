/* Reductions. */
#include "engine/kernels/reduce.h"
#include "engine/kernels/copy.h"
#include "engine/words.h"

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define CHUNK 8192 /* bytes: the tree's intermediate results of a chunk fit the cache */
#define MAX_WAITING 11 /* blocks that wait for their other half: log2(MAX_MEMBERS) + 1 */

/* Integers wrap as NumPy's do: the loops compute unsigned. As in NumPy, the minimum and the maximum of floats is NaN
 * if an operand is NaN. Of two NaNs, the left one's bits win. out may be left or right, but does not overlap them
 * otherwise. both_* write the result into left and right. Peers choose the addresses, so any alignment is accepted. */
#define LOOP(NAME, T, EXPR)                                                                 \
    CLONES static void NAME(void *out, const void *left, const void *right, size_t n) { \
        typedef T Any __attribute__((aligned(1)));                                          \
        Any *o = out;                                                                       \
        const Any *a = left, *b = right;                                                    \
        INDEPENDENT                                                                          \
        for (size_t i = 0; i < n; i++) o[i] = (T)(EXPR);                                \
    }
#define BOTH(NAME, T, EXPR)                                                                 \
    CLONES static void both_##NAME(void *left, void *right, size_t n) {                 \
        typedef T Any __attribute__((aligned(1)));                                          \
        Any *a = left, *b = right;                                                          \
        INDEPENDENT                                                                          \
        for (size_t i = 0; i < n; i++) a[i] = b[i] = (T)(EXPR);                         \
    }
#define LOOPS(NAME, T, EXPR) LOOP(NAME, T, EXPR) BOTH(NAME, T, EXPR)
#define INTEGERS(SUFFIX, T, U)                                                              \
    LOOPS(sum_##SUFFIX, T, (U)a[i] + (U)b[i])                                               \
    LOOPS(product_##SUFFIX, T, (U)a[i] * (U)b[i])                                           \
    LOOPS(min_##SUFFIX, T, a[i] < b[i] ? a[i] : b[i])                                       \
    LOOPS(max_##SUFFIX, T, a[i] > b[i] ? a[i] : b[i])
INTEGERS(i4, int32_t, uint32_t)
INTEGERS(u4, uint32_t, uint32_t)
INTEGERS(i8, int64_t, uint64_t)
INTEGERS(u8, uint64_t, uint64_t)
#define FLOATS(SUFFIX, T)                                                                   \
    LOOPS(sum_##SUFFIX, T, a[i] + b[i])                                                     \
    LOOPS(product_##SUFFIX, T, a[i] * b[i])                                                 \
    BOTH(avg_##SUFFIX, T, (a[i] + b[i]) / 2)                                                \
    LOOPS(min_##SUFFIX, T, ((a[i] < b[i]) | (a[i] != a[i])) ? a[i] : b[i])                  \
    LOOPS(max_##SUFFIX, T, ((a[i] > b[i]) | (a[i] != a[i])) ? a[i] : b[i])
FLOATS(f4, float)
FLOATS(f8, double)

#define ROW(CODE, OP, SIZE, NAME) {CODE, OP, SIZE, NAME, both_##NAME}
#define ROWS(CODE, SIZE, S)                                                              \
    ROW(CODE, SUM, SIZE, sum_##S), ROW(CODE, PRODUCT, SIZE, product_##S),                \
    ROW(CODE, MIN, SIZE, min_##S), ROW(CODE, MAX, SIZE, max_##S)
#define FLOAT_ROWS(CODE, SIZE, S) ROWS(CODE, SIZE, S), {CODE, AVG, SIZE, sum_##S, both_avg_##S}
static const Loops known[] = {
    FLOAT_ROWS(11, 4, f4),  FLOAT_ROWS(12, 8, f8),  ROWS(6, 4, i4),
    ROWS(7, 4, u4), ROWS(8, 8, i8), ROWS(9, 8, u8),
};

const Loops *find_loops(int dtype, int op) {
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].dtype == dtype && known[i].op == op) return &known[i];
    return NULL;
}

/* If the op is AVG, divide the n elements of a sum by the number of members. */
static void finish(const Loops *loops, void *data, size_t n, int size) {
    if (loops->op != AVG) return;
    if (loops->itemsize == 4) {
        float *x = data, by = (float)size;
        for (size_t i = 0; i < n; i++) x[i] /= by;
    } else {
        double *x = data, by = (double)size;
        for (size_t i = 0; i < n; i++) x[i] /= by;
    }
}

/* The result of a block of 2^k members waits until the next block of 2^k members is reduced, too. So blocks merge as
 * the bits of a member counter carry. At the end, the remaining blocks merge from last to first. Only the last merge
 * writes to `out`, which may therefore be one of the parts. */
static void reduce_chunk(const Loops *loops, char *out, const char *const *parts, int size, size_t start, size_t n) {
    _Alignas(LINE) char memory[MAX_WAITING][CHUNK];
    const char *waiting[MAX_WAITING + 1];
    int count = 0;
    for (int member = 0; member < size; member++) {
        waiting[count++] = parts[member] + start;
        int last = member + 1 == size;
        for (int whole = member + 1; last ? count > 1 : !(whole & 1); whole >>= 1) {
            char *into = last && count == 2 ? out + start : memory[count - 2];
            loops->combine(into, waiting[count - 2], waiting[count - 1], n);
            waiting[--count - 1] = into;
        }
    }
    finish(loops, out + start, n, size);
}

void reduce_parts(const Loops *loops, char *out, const char *const *parts, int size, size_t nbytes) {
    /* Two parts need no intermediate memory, and the processor prefetches better in one long loop. */
    size_t chunk = size == 2 ? nbytes : CHUNK;
    for (size_t start = 0; start < nbytes; start += chunk)
        reduce_chunk(loops, out, parts, size, start, least(nbytes - start, chunk) / loops->itemsize);
}
