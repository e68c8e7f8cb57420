/* The type Laps, and how calls of several laps take their arrays and end. */
#include "shm/laps.h"

#include <string.h>

static PyObject *str_begin;

int export_one(Arrays *arrays, PyObject *array, int flags) {
    if (arrays->count < MOST && !PyObject_GetBuffer(array, &arrays->views[arrays->count], flags)) {
        arrays->count++;
        return 0;
    }
    PyErr_Clear();
    release(arrays);
    return -1;
}

int export_each(Arrays *arrays, PyObject *list, int count, int flags) {
    if ((!PyList_Check(list) && !PyTuple_Check(list)) || PySequence_Fast_GET_SIZE(list) != count) return -1;
    for (int i = 0; i < count; i++)
        if (export_one(arrays, PySequence_Fast_GET_ITEM(list, i), flags) < 0) return -1;
    return 0;
}

void release(Arrays *arrays) {
    while (arrays->count > 0) PyBuffer_Release(&arrays->views[--arrays->count]);
}

int begin_laps(Laps *laps, Run *run, PyObject *call) {
    Board *b = laps->board;
    if (!PyObject_TypeCheck(call, fields_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a call");
        return -1;
    }
    if (may_begin(b)) {
        b->progress->base += STEP;
        int slot = (int)(++b->progress->number % SLOTS);
        memcpy(bytes_at(b, b->cards[b->rank][slot]), &((Fields *)call)->header, HEADER_BYTES);
    } else {
        PyObject *result = PyObject_CallMethodOneArg(laps->python, str_begin, call);
        Py_XDECREF(result);
        if (!result) return -1;
    }
    run_start(run, b, laps->python, call);
    return 0;
}

int see_signals(Run *run) {
    PyEval_RestoreThread(run->state);
    int failed = PyErr_CheckSignals();
    run->state = PyEval_SaveThread();
    return failed;
}

void close_laps(Run *run) {
    run_publish(run, DONE);
    Progress *p = run->board->progress;
    p->busy = p->base + DONE;
}

/* Laps(board, python) */
static int laps_init(Laps *laps, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *board, *python;
    if (laps->board) {
        PyErr_SetString(PyExc_RuntimeError, "Laps are made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O!O", board_type, &board, &python)) return -1;
    laps->board = (Board *)Py_NewRef(board);
    laps->python = Py_NewRef(python);
    return 0;
}

static int laps_traverse(Laps *laps, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(laps));
    Py_VISIT(laps->python);
    return 0;
}

static int laps_clear(Laps *laps) {
    Py_CLEAR(laps->python);
    return 0;
}

static void laps_dealloc(Laps *laps) {
    PyTypeObject *type = Py_TYPE(laps);
    PyObject_GC_UnTrack(laps);
    laps_clear(laps);
    Py_CLEAR(laps->board);
    type->tp_free((PyObject *)laps);
    Py_DECREF(type);
}

/* copy(into, source): whether that was done. Both have the same size. */
static PyObject *laps_copy(Laps *Py_UNUSED(laps), PyObject *const *args, Py_ssize_t count) {
    Arrays arrays = {0};
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "expected two arrays");
        return NULL;
    }
    if (export_one(&arrays, args[0], PyBUF_WRITABLE) < 0 || export_one(&arrays, args[1], PyBUF_SIMPLE) < 0)
        Py_RETURN_FALSE;
    const Py_buffer *into = &arrays.views[0], *from = &arrays.views[1];
    int fits = into->len == from->len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        (into->len < STREAMED_BYTES ? copy_bytes : stream_bytes)(into->buf, from->buf, (size_t)into->len);
        Py_END_ALLOW_THREADS
    }
    release(&arrays);
    return PyBool_FromLong(fits);
}

static PyMethodDef laps_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))laps_copy, METH_FASTCALL, NULL},
    {"all_reduce", (PyCFunction)(void (*)(void))laps_all_reduce, METH_FASTCALL, NULL},
    {"broadcast", (PyCFunction)(void (*)(void))laps_broadcast, METH_FASTCALL, NULL},
    {"exchange", (PyCFunction)(void (*)(void))laps_exchange, METH_FASTCALL, NULL},
    {"reduce_scatter", (PyCFunction)(void (*)(void))laps_reduce_scatter, METH_FASTCALL, NULL},
    {NULL}};
static PyType_Slot laps_slots[] = {{Py_tp_init, laps_init},
                                   {Py_tp_new, PyType_GenericNew},
                                   {Py_tp_dealloc, laps_dealloc},
                                   {Py_tp_traverse, laps_traverse},
                                   {Py_tp_clear, laps_clear},
                                   {Py_tp_methods, laps_methods},
                                   {0, NULL}};
PyType_Spec laps_spec = {"transport.native._core.Laps", sizeof(Laps), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, laps_slots};

int init_laps(void) {
    str_begin = PyUnicode_InternFromString("begin");
    return str_begin ? 0 : -1;
}
