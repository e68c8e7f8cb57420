/* What is reduced, and how. */
#include "core.h"

/* Integers wrap as NumPy's do: computed without sign. Floats have no MIN and MAX here, because which
 * of two NaNs comes out is NumPy's own affair. out may be left or right, but does not overlap them
 * otherwise. */
#define LOOP(NAME, T, U, EXPR)                                                              \
    static void NAME(void *out, const void *left, const void *right, Py_ssize_t n) {        \
        T *o = out;                                                                         \
        const T *a = left, *b = right;                                                      \
        _Pragma("GCC ivdep")                                                                \
        for (Py_ssize_t i = 0; i < n; i++) o[i] = (T)(EXPR);                                \
    }
#define INTEGERS(SUFFIX, T, U)                                                              \
    LOOP(sum_##SUFFIX, T, U, (U)a[i] + (U)b[i])                                             \
    LOOP(product_##SUFFIX, T, U, (U)a[i] * (U)b[i])                                         \
    LOOP(min_##SUFFIX, T, U, a[i] < b[i] ? a[i] : b[i])                                     \
    LOOP(max_##SUFFIX, T, U, a[i] > b[i] ? a[i] : b[i])
INTEGERS(i4, int32_t, uint32_t)
INTEGERS(u4, uint32_t, uint32_t)
INTEGERS(i8, int64_t, uint64_t)
INTEGERS(u8, uint64_t, uint64_t)
#define FLOATS(SUFFIX, T)                                                                   \
    LOOP(sum_##SUFFIX, T, T, a[i] + b[i])                                                   \
    LOOP(product_##SUFFIX, T, T, a[i] * b[i])
FLOATS(f4, float)
FLOATS(f8, double)

#define ROWS(F, CODE, SIZE, S)                                                              \
    {F, CODE, SUM, SIZE, sum_##S}, {F, CODE, PRODUCT, SIZE, product_##S},                   \
    {F, CODE, MIN, SIZE, min_##S}, {F, CODE, MAX, SIZE, max_##S}
static const Entry entries[] = {
    {'f', 11, SUM, 4, sum_f4}, {'f', 11, AVG, 4, sum_f4}, {'f', 11, PRODUCT, 4, product_f4},
    {'d', 12, SUM, 8, sum_f8}, {'d', 12, AVG, 8, sum_f8}, {'d', 12, PRODUCT, 8, product_f8},
    ROWS('i', 6, 4, i4), ROWS('I', 7, 4, u4), ROWS('l', 8, 8, i8), ROWS('L', 9, 8, u8),
};

const Entry *find_entry(const char *format, long op) {
    if (!format || !format[0] || format[1]) return NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].format == format[0] && entries[i].op == op) return &entries[i];
    return NULL;
}

void finish(const Entry *entry, void *data, Py_ssize_t n, int size) {
    if (entry->op != AVG) return;
    if (entry->size == 4) {
        float *x = data, by = (float)size;
        for (Py_ssize_t i = 0; i < n; i++) x[i] /= by;
    } else {
        double *x = data, by = (double)size;
        for (Py_ssize_t i = 0; i < n; i++) x[i] /= by;
    }
}
