/* The lock of one stream of calls, which stores its owner thread and a queue of waiting tasks. */
#include "stream_lock.h"

PyTypeObject *lock_type;

static inline int is_mine(const StreamLock *self) { return self->owner == PyThread_get_thread_ident(); }

int try_enter(StreamLock *self) {
    Py_ssize_t queued = PyObject_Size(self->queue);
    if (queued) return queued < 0 ? -1 : 0;
    if (is_mine(self) || !PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) return 0;
    self->owner = PyThread_get_thread_ident();
    return 1;
}

static void release(StreamLock *self) {
    if (!is_mine(self)) return;
    self->owner = 0;
    PyThread_release_lock(self->lock);
}

static int leave(StreamLock *self) {
    release(self);
    if (!self->draining) return 0;
    PyObject *value = PyObject_CallMethod((PyObject *)self, "notify", NULL);
    Py_XDECREF(value);
    return value ? 0 : -1;
}

PyObject *leave_with(StreamLock *self, PyObject *result) {
    PyObject *type, *value, *trace;
    if (!self->draining) { /* fast path */
        release(self);
        return result;
    }
    PyErr_Fetch(&type, &value, &trace);
    if (leave(self) < 0) {
        Py_CLEAR(result);
        if (type) PyErr_Clear();
    }
    if (type) PyErr_Restore(type, value, trace);
    return result;
}

/* ------------------------------------------------------------------ the type */

static PyObject *lock_try_enter(StreamLock *self, PyObject *Py_UNUSED(none)) {
    int entered = try_enter(self);
    return entered < 0 ? NULL : PyBool_FromLong(entered);
}

static PyObject *lock_enter(StreamLock *self, PyObject *Py_UNUSED(none)) {
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    Py_END_ALLOW_THREADS
    self->owner = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

static PyObject *lock_release(StreamLock *self, PyObject *Py_UNUSED(none)) {
    release(self);
    Py_RETURN_NONE;
}

static PyObject *lock_leave(StreamLock *self, PyObject *Py_UNUSED(none)) {
    if (leave(self) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *lock_is_mine(StreamLock *self, PyObject *Py_UNUSED(none)) { return PyBool_FromLong(is_mine(self)); }

/* StreamLock(queue) */
static int lock_init(StreamLock *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *queue;
    if (self->lock) {
        PyErr_SetString(PyExc_RuntimeError, "this StreamLock is already initialised");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O", &queue)) return -1;
    if (!(self->lock = PyThread_allocate_lock())) {
        PyErr_NoMemory();
        return -1;
    }
    self->queue = Py_NewRef(queue);
    return 0;
}

static int lock_traverse(StreamLock *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->queue);
    return 0;
}

static int lock_clear(StreamLock *self) {
    Py_CLEAR(self->queue);
    return 0;
}

static void lock_dealloc(StreamLock *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    lock_clear(self);
    if (self->lock) PyThread_free_lock(self->lock);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef lock_methods[] = {{"try_enter", (PyCFunction)(void (*)(void))lock_try_enter, METH_NOARGS, NULL},
                                     {"enter", (PyCFunction)(void (*)(void))lock_enter, METH_NOARGS, NULL},
                                     {"release", (PyCFunction)(void (*)(void))lock_release, METH_NOARGS, NULL},
                                     {"leave", (PyCFunction)(void (*)(void))lock_leave, METH_NOARGS, NULL},
                                     {"is_mine", (PyCFunction)(void (*)(void))lock_is_mine, METH_NOARGS, NULL},
                                     {NULL}};
static PyMemberDef lock_members[] = {{"draining", T_INT, offsetof(StreamLock, draining), 0, NULL}, {NULL}};
static PyType_Slot lock_slots[] = {{Py_tp_init, lock_init},
                                   {Py_tp_new, PyType_GenericNew},
                                   {Py_tp_dealloc, lock_dealloc},
                                   {Py_tp_traverse, lock_traverse},
                                   {Py_tp_clear, lock_clear},
                                   {Py_tp_methods, lock_methods},
                                   {Py_tp_members, lock_members},
                                   {0, NULL}};
PyType_Spec lock_spec = {"meshlib._native._calls.StreamLock", sizeof(StreamLock), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, lock_slots};
