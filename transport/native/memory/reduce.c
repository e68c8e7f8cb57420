/* What is reduced, and how. */
#include "core.h"

/* Integers wrap as NumPy's do: computed without sign. Floats have no MIN and MAX here, because which
 * of two NaNs comes out is NumPy's own affair. out may be left or right, but does not overlap them
 * otherwise; both_* write what comes out into left and right. */
#define LOOP(NAME, T, EXPR)                                                                 \
    CLONES static void NAME(void *out, const void *left, const void *right, Py_ssize_t n) { \
        T *o = out;                                                                         \
        const T *a = left, *b = right;                                                      \
        _Pragma("GCC ivdep")                                                                \
        for (Py_ssize_t i = 0; i < n; i++) o[i] = (T)(EXPR);                                \
    }
#define BOTH(NAME, T, EXPR)                                                                 \
    CLONES static void both_##NAME(void *left, void *right, Py_ssize_t n) {                 \
        T *a = left, *b = right;                                                            \
        _Pragma("GCC ivdep")                                                                \
        for (Py_ssize_t i = 0; i < n; i++) a[i] = b[i] = (T)(EXPR);                         \
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
    BOTH(avg_##SUFFIX, T, (a[i] + b[i]) / 2)
FLOATS(f4, float)
FLOATS(f8, double)

#define ROW(F, CODE, OP, SIZE, NAME) {F, CODE, OP, SIZE, NAME, both_##NAME}
#define ROWS(F, CODE, SIZE, S)                                                              \
    ROW(F, CODE, SUM, SIZE, sum_##S), ROW(F, CODE, PRODUCT, SIZE, product_##S)
#define INTEGER_ROWS(F, CODE, SIZE, S)                                                      \
    ROWS(F, CODE, SIZE, S), ROW(F, CODE, MIN, SIZE, min_##S), ROW(F, CODE, MAX, SIZE, max_##S)
#define FLOAT_ROWS(F, CODE, SIZE, S)                                                        \
    ROWS(F, CODE, SIZE, S), {F, CODE, AVG, SIZE, sum_##S, both_avg_##S}
static const Entry entries[] = {
    FLOAT_ROWS('f', 11, 4, f4),  FLOAT_ROWS('d', 12, 8, f8),  INTEGER_ROWS('i', 6, 4, i4),
    INTEGER_ROWS('I', 7, 4, u4), INTEGER_ROWS('l', 8, 8, i8), INTEGER_ROWS('L', 9, 8, u8),
};

const Entry *find_entry(const char *format, long op) {
    if (!format || !format[0] || format[1]) return NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].format == format[0] && entries[i].op == op) return &entries[i];
    return NULL;
}

const Entry *entry_of(const Py_buffer *view, long op) {
    const Entry *entry = find_entry(view->format, op);
    int fits = entry && view->itemsize == entry->size && !((uintptr_t)view->buf % entry->size);
    return fits ? entry : NULL;
}

void reduce_parts(const Entry *entry, char *out, const char *const *parts, int size, uint64_t start,
                  size_t bytes) {
    _Alignas(LINE) char total[MOST_REDUCED];
    Py_ssize_t n = (Py_ssize_t)(bytes / entry->size);
    const void *left = parts[0] + start;
    for (int r = 1; r + 1 < size; r++) {
        entry->loop(total, left, parts[r] + start, n);
        left = total;
    }
    entry->loop(out + start, left, parts[size - 1] + start, n);
    finish(entry, out + start, n, size);
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
