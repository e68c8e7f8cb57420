/* Functions on the memory of a one-sided window. */
#include "core.h"
#include "engine/kernels/update.h"

#define HELD_BYTES 1024 /* more bytes are updated without the interpreter's lock */
#define MOST_ITEMSIZE 8

/* The word at `offset` of a window's memory; NULL with an exception if the offset is invalid. */
static Word *word_of(const Py_buffer *memory, unsigned long long offset) {
    if (memory->len >= (Py_ssize_t)sizeof(Word) && offset <= (uint64_t)memory->len - sizeof(Word) && offset % sizeof(Word) == 0)
        return (Word *)(void *)((char *)memory->buf + offset);
    PyErr_Format(PyExc_ValueError, "offset %llu is not that of a word in %zd bytes", offset, memory->len);
    return NULL;
}

/* update_window(memory, offset, itemsize, dtype, op, values, expected, wakes): return the previous bytes. */
PyObject *update_window(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory, values, expected;
    unsigned long long offset;
    int itemsize, dtype, op, wakes;
    if (!PyArg_ParseTuple(args, "w*Kiiiy*y*p", &memory, &offset, &itemsize, &dtype, &op, &values, &expected, &wakes))
        return NULL;
    PyObject *before = NULL;
    uint64_t nbytes = (uint64_t)values.len, whole = (uint64_t)memory.len, width = itemsize > 0 ? (uint64_t)itemsize : 1;
    int sized = itemsize > 0 && itemsize <= MOST_ITEMSIZE && nbytes % width == 0;
    if (!sized || offset > whole || nbytes > whole - offset || ((uint64_t)(uintptr_t)memory.buf + offset) % width ||
        (op == REPLACE_IF && expected.len != values.len)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes at %llu are not elements of %zd bytes", values.len, offset, memory.len);
    } else if ((before = PyBytes_FromStringAndSize(NULL, values.len))) {
        char *at = (char *)memory.buf + offset, *into = PyBytes_AS_STRING(before);
        uint64_t count = nbytes / width;
        int failed;
        if (nbytes <= HELD_BYTES) {
            failed = update(dtype, op, at, values.buf, expected.buf, into, count);
        } else {
            Py_BEGIN_ALLOW_THREADS
            failed = update(dtype, op, at, values.buf, expected.buf, into, count);
            Py_END_ALLOW_THREADS
        }
        if (failed) {
            PyErr_Format(PyExc_TypeError, "dtype %d has no update %d", dtype, op);
            Py_CLEAR(before);
        } else if (wakes) {
            wake((Word *)(void *)at);
        }
    }
    PyBuffer_Release(&expected);
    PyBuffer_Release(&values);
    PyBuffer_Release(&memory);
    return before;
}

typedef struct {
    const Word *word;
    uint64_t seen;
} Change;
static int changed(const void *what) {
    const Change *change = what;
    return look_at(change->word) != change->seen;
}

/* await_word(memory, offset, seen): return the value of a word once its lower half differs from that of `seen`, or after
 * SLICE_SECONDS. */
PyObject *await_word(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    unsigned long long offset, seen;
    if (!PyArg_ParseTuple(args, "w*KK", &memory, &offset, &seen)) return NULL;
    Word *word = word_of(&memory, offset);
    PyObject *value = NULL;
    if (word) {
        Change change = {word, seen};
        SpinBudget budget;
        init_spin_budget(&budget, 1);
        if (!spin_until(&budget, GLANCE, changed, &change)) {
            Py_BEGIN_ALLOW_THREADS
            if (!spin_until(&budget, SPIN, changed, &change)) sleep_on(word, seen, SLICE_SECONDS);
            Py_END_ALLOW_THREADS
        }
        value = PyLong_FromUnsignedLongLong(look_at(word));
    }
    PyBuffer_Release(&memory);
    return value;
}

/* fence(): make this member's earlier writes visible before its later ones. */
PyObject *fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}
