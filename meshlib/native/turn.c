/* Whose turn it is: a lock that knows its thread, and those who wait in a queue beside it. */
#include "turn.h"

PyTypeObject *turn_type;

static inline int is_mine(const Turn *turn) { return turn->owner == PyThread_get_thread_ident(); }

int try_enter(Turn *turn) {
    Py_ssize_t queued = PyObject_Size(turn->queue);
    if (queued) return queued < 0 ? -1 : 0;
    if (is_mine(turn) || !PyThread_acquire_lock(turn->lock, NOWAIT_LOCK)) return 0;
    turn->owner = PyThread_get_thread_ident();
    return 1;
}

static void release(Turn *turn) {
    if (!is_mine(turn)) return;
    turn->owner = 0;
    PyThread_release_lock(turn->lock);
}

static int leave(Turn *turn) {
    release(turn);
    if (!turn->draining) return 0;
    PyObject *value = PyObject_CallMethod((PyObject *)turn, "notify", NULL);
    Py_XDECREF(value);
    return value ? 0 : -1;
}

PyObject *leave_with(Turn *turn, PyObject *result) {
    PyObject *type, *value, *trace;
    if (!turn->draining) { /* the usual case at once */
        release(turn);
        return result;
    }
    PyErr_Fetch(&type, &value, &trace);
    if (leave(turn) < 0) {
        Py_CLEAR(result);
        if (type) PyErr_Clear();
    }
    if (type) PyErr_Restore(type, value, trace);
    return result;
}

/* ------------------------------------------------------------------ the type */

static PyObject *turn_try_enter(Turn *turn, PyObject *Py_UNUSED(none)) {
    int entered = try_enter(turn);
    return entered < 0 ? NULL : PyBool_FromLong(entered);
}

static PyObject *turn_enter(Turn *turn, PyObject *Py_UNUSED(none)) {
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(turn->lock, WAIT_LOCK);
    Py_END_ALLOW_THREADS
    turn->owner = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

static PyObject *turn_release(Turn *turn, PyObject *Py_UNUSED(none)) {
    release(turn);
    Py_RETURN_NONE;
}

static PyObject *turn_leave(Turn *turn, PyObject *Py_UNUSED(none)) {
    if (leave(turn) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *turn_is_mine(Turn *turn, PyObject *Py_UNUSED(none)) { return PyBool_FromLong(is_mine(turn)); }

/* Turn(queue) */
static int turn_init(Turn *turn, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *queue;
    if (turn->lock) {
        PyErr_SetString(PyExc_RuntimeError, "a Turn is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O", &queue)) return -1;
    if (!(turn->lock = PyThread_allocate_lock())) {
        PyErr_NoMemory();
        return -1;
    }
    turn->queue = Py_NewRef(queue);
    return 0;
}

static int turn_traverse(Turn *turn, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(turn));
    Py_VISIT(turn->queue);
    return 0;
}

static int turn_clear(Turn *turn) {
    Py_CLEAR(turn->queue);
    return 0;
}

static void turn_dealloc(Turn *turn) {
    PyTypeObject *type = Py_TYPE(turn);
    PyObject_GC_UnTrack(turn);
    turn_clear(turn);
    if (turn->lock) PyThread_free_lock(turn->lock);
    type->tp_free((PyObject *)turn);
    Py_DECREF(type);
}

static PyMethodDef turn_methods[] = {{"try_enter", (PyCFunction)(void (*)(void))turn_try_enter, METH_NOARGS, NULL},
                                     {"enter", (PyCFunction)(void (*)(void))turn_enter, METH_NOARGS, NULL},
                                     {"release", (PyCFunction)(void (*)(void))turn_release, METH_NOARGS, NULL},
                                     {"leave", (PyCFunction)(void (*)(void))turn_leave, METH_NOARGS, NULL},
                                     {"is_mine", (PyCFunction)(void (*)(void))turn_is_mine, METH_NOARGS, NULL},
                                     {NULL}};
static PyMemberDef turn_members[] = {{"draining", T_INT, offsetof(Turn, draining), 0, NULL}, {NULL}};
static PyType_Slot turn_slots[] = {{Py_tp_init, turn_init},
                                   {Py_tp_new, PyType_GenericNew},
                                   {Py_tp_dealloc, turn_dealloc},
                                   {Py_tp_traverse, turn_traverse},
                                   {Py_tp_clear, turn_clear},
                                   {Py_tp_methods, turn_methods},
                                   {Py_tp_members, turn_members},
                                   {0, NULL}};
PyType_Spec turn_spec = {"meshlib.native._calls.Turn", sizeof(Turn), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, turn_slots};
