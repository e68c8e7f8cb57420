/* The type RingEnd: one end of a ring of messages; and functions on an inbox. */
#include "binding/ring.h"

#include <structmember.h>

#define HELD_BYTES (16 << 10) /* more bytes are moved without the interpreter's lock */

PyTypeObject *ring_end_type;

/* ------------------------------------------------------------------ moving bytes */

typedef Status (*Move)(Ring *r, char *data, uint64_t size, Mode mode);

static Status write_more(Ring *r, char *data, uint64_t size, Mode mode) { return ring_write(r, data, size, mode); }

/* Move the rest of a message, without the interpreter's lock if it is large or has to wait. */
static PyObject *move(RingObject *o, Move function, const Py_buffer *data, int mode) {
    Ring *r = &o->ring;
    if (r->left > (uint64_t)data->len)
        return PyErr_Format(PyExc_ValueError, "%llu bytes are left, but the buffer has %zd", (unsigned long long)r->left,
                            data->len);
    Status status = AGAIN;
    if (r->left <= HELD_BYTES) status = function(r, data->buf, (uint64_t)data->len, mode < GLANCE ? (Mode)mode : GLANCE);
    if (status == AGAIN && (mode > GLANCE || r->left > HELD_BYTES)) {
        Py_BEGIN_ALLOW_THREADS
        status = function(r, data->buf, (uint64_t)data->len, (Mode)mode);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(status);
}

/* begin(packed, data, mode): begin a message; return a status. After AGAIN, it has begun if `left` is not 0. */
static PyObject *end_begin(RingObject *o, PyObject *args) {
    Py_buffer packed, data;
    int mode;
    if (!PyArg_ParseTuple(args, "y*y*i", &packed, &data, &mode)) return NULL;
    PyObject *result = NULL;
    Ring *r = &o->ring;
    if (packed.len != HEADER_BYTES) {
        PyErr_Format(PyExc_ValueError, "a header has %d bytes, not %zd", HEADER_BYTES, packed.len);
    } else if (r->left) {
        PyErr_SetString(PyExc_ValueError, "a message is under way");
    } else {
        Header header;
        memcpy(&header, packed.buf, HEADER_BYTES);
        Status status = AGAIN;
        if (data.len <= HELD_BYTES)
            status = ring_begin(r, &header, data.buf, (uint64_t)data.len, mode < GLANCE ? (Mode)mode : GLANCE);
        if (status == AGAIN && r->left) {
            result = move(o, write_more, &data, mode);
        } else if (status == AGAIN && (mode > GLANCE || data.len > HELD_BYTES)) {
            Py_BEGIN_ALLOW_THREADS
            status = ring_begin(r, &header, data.buf, (uint64_t)data.len, (Mode)mode);
            Py_END_ALLOW_THREADS
        }
        if (!result && !PyErr_Occurred()) result = PyLong_FromLong(status);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&packed);
    return result;
}

static PyObject *move_args(RingObject *o, PyObject *args, const char *format, Move function) {
    Py_buffer data;
    int mode;
    if (!PyArg_ParseTuple(args, format, &data, &mode)) return NULL;
    PyObject *result = move(o, function, &data, mode);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *end_write(RingObject *o, PyObject *args) { return move_args(o, args, "y*i", write_more); }
static PyObject *end_take(RingObject *o, PyObject *args) { return move_args(o, args, "w*i", ring_take); }

int send_now(RingObject *o, const Header *header, const Py_buffer *data) {
    Ring *r = &o->ring;
    uint64_t size = (uint64_t)data->len;
    if (r->left || ring_is_broken(r) || !ring_has_room(r, size)) return 0;
    if (size <= HELD_BYTES) return ring_begin(r, header, data->buf, size, LOOK) == DONE_ALL;
    Status status;
    Py_BEGIN_ALLOW_THREADS
    status = ring_begin(r, header, data->buf, size, LOOK);
    Py_END_ALLOW_THREADS
    return status == DONE_ALL;
}

/* Accept the next message if it is the expected one: 1, or 0 without an effect. */
static int accept_if(Ring *r, const Header *expected, uint64_t size) {
    Head head;
    if (ring_peek(r, &head) != DONE_ALL || head.size != size || head.header.extra != expected->extra ||
        head.header.dtype != expected->dtype)
        return 0;
    ring_accept(r, size);
    return 1;
}

/* Stop using an end, unless it has a partly received message, which Python completes. */
static void give_back(RingObject *o, int lent) {
    int in_use = IN_USE;
    if (!o->ring.left) atomic_compare_exchange_strong(&o->lent, &in_use, lent);
}

int receive_now(RingObject *o, const Header *expected, const Py_buffer *into) {
    Ring *r = &o->ring;
    uint64_t size = (uint64_t)into->len;
    if (size > HELD_BYTES || r->left) return 0;
    int before = atomic_exchange(&o->lent, IN_USE);
    if (before == IN_USE) return 0;
    o->into = into->buf;
    int done = ring_await_whole(r, size, GLANCE) && accept_if(r, expected, size) &&
               ring_take(r, into->buf, size, GLANCE) == DONE_ALL;
    give_back(o, before);
    return done;
}

/* Wait for a message: 1, or 0 if Python has to check signals, deadlines and peers first. */
static int await_message(RingObject *o) {
    Ring *r = &o->ring, *const rings[] = {r};
    char *memory = o->memory.buf;
    if (ring_has_more(r)) return 1;
    return inbox_await(memory, rings, 1, inbox_wakeup(memory), SLEEP) && ring_has_more(r);
}

Status receive_lent(RingObject *o, const Header *expected, char *into, uint64_t size) {
    Ring *r = &o->ring;
    Status status = AGAIN;
    o->into = into;
    if (await_message(o) && accept_if(r, expected, size)) {
        if (!size) status = DONE_ALL;
        while (status == AGAIN && await_message(o)) status = ring_take(r, into, size, SPIN);
    }
    give_back(o, status == DONE_ALL ? LENT : KEPT);
    return status;
}

/* ------------------------------------------------------------------ the receiver */

/* peek(): return the packed header and the size of the next message, which has arrived; None if it is damaged. */
static PyObject *end_peek(RingObject *o, PyObject *Py_UNUSED(none)) {
    Head head;
    if (ring_peek(&o->ring, &head) != DONE_ALL) Py_RETURN_NONE;
    return Py_BuildValue("y#K", (const char *)&head.header, (Py_ssize_t)HEADER_BYTES, (unsigned long long)head.size);
}

/* accept(size): begin to receive the message that peek() returned. */
static PyObject *end_accept(RingObject *o, PyObject *size) {
    unsigned long long nbytes = PyLong_AsUnsignedLongLong(size);
    if (PyErr_Occurred()) return NULL;
    ring_accept(&o->ring, nbytes);
    Py_RETURN_NONE;
}

/* meet(into, known, tag, dtype): for the only posted receive. Wait a moment for the next message, and receive it if it
 * matches; else `position` does not change. */
static PyObject *end_meet(RingObject *o, PyObject *args) {
    Py_buffer into;
    unsigned long long known;
    unsigned int tag;
    unsigned short dtype;
    if (!PyArg_ParseTuple(args, "w*KIH", &into, &known, &tag, &dtype)) return NULL;
    Ring *r = &o->ring, *const rings[] = {r};
    Head head;
    PyObject *result = Py_NewRef(Py_None);
    char *memory = o->memory.buf;
    int changed = !r->left && inbox_await(memory, rings, 1, known, GLANCE);
    if (!r->left && !changed) {
        Py_BEGIN_ALLOW_THREADS
        changed = inbox_await(memory, rings, 1, known, SPIN);
        Py_END_ALLOW_THREADS
    }
    if (changed && ring_peek(r, &head) == DONE_ALL && head.header.extra == tag && head.header.dtype == dtype &&
        head.size == (uint64_t)into.len) {
        ring_accept(r, head.size);
        Py_SETREF(result, move(o, ring_take, &into, SPIN));
    }
    PyBuffer_Release(&into);
    return result;
}

/* ------------------------------------------------------------------ both */

static PyObject *end_has_room(RingObject *o, PyObject *size) {
    unsigned long long nbytes = PyLong_AsUnsignedLongLong(size);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(ring_has_room(&o->ring, nbytes));
}

static PyObject *end_give_up(RingObject *o, PyObject *Py_UNUSED(none)) {
    ring_give_up(&o->ring);
    Py_RETURN_NONE;
}

static PyObject *end_wake_sender(RingObject *o, PyObject *Py_UNUSED(none)) {
    ring_wake_sender(&o->ring);
    Py_RETURN_NONE;
}

/* lend(): let code without the interpreter's lock use this end, until take_back() or a read of `pending`. */
static PyObject *end_lend(RingObject *o, PyObject *Py_UNUSED(none)) {
    o->lent = LENT;
    Py_RETURN_NONE;
}

static PyObject *end_take_back(RingObject *o, PyObject *Py_UNUSED(none)) {
    o->lent = KEPT;
    Py_RETURN_NONE;
}

/* has_begun(into): True if lent code has received a part of a message into `into`. */
static PyObject *end_has_begun(RingObject *o, PyObject *into) {
    Py_buffer view;
    if (PyObject_GetBuffer(into, &view, PyBUF_WRITABLE)) return NULL;
    int begun = o->lent == IN_USE && o->into == view.buf && o->ring.left;
    PyBuffer_Release(&view);
    return PyBool_FromLong(begun);
}

/* Take the end back; return whether it is in use, and so cannot be taken back. */
static int is_in_use(RingObject *o) {
    int lent = LENT;
    atomic_compare_exchange_strong(&o->lent, &lent, KEPT);
    return lent == IN_USE;
}

static PyObject *get_in_use(RingObject *o, void *Py_UNUSED(closure)) { return PyBool_FromLong(is_in_use(o)); }
static PyObject *get_pending(RingObject *o, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(!is_in_use(o) && ring_has_more(&o->ring));
}
static PyObject *get_untaken(RingObject *o, void *Py_UNUSED(closure)) { return PyBool_FromLong(ring_has_more(&o->ring)); }
static PyObject *get_broken(RingObject *o, void *Py_UNUSED(closure)) { return PyBool_FromLong(ring_is_broken(&o->ring)); }

/* ------------------------------------------------------------------ inboxes */

static int is_inbox(const Py_buffer *memory) {
    if (memory->len >= 4096) return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are too few for an inbox", memory->len);
    return 0;
}

PyObject *await_inbox(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer inbox;
    PyObject *ends, *result = NULL;
    unsigned long long known;
    int mode;
    if (!PyArg_ParseTuple(args, "w*O!Ki", &inbox, &PyTuple_Type, &ends, &known, &mode)) return NULL;
    Ring *rings[MAX_MEMBERS];
    Py_ssize_t count = PyTuple_GET_SIZE(ends), valid = 0;
    for (; valid < count && valid < MAX_MEMBERS; valid++) {
        PyObject *end = PyTuple_GET_ITEM(ends, valid);
        if (!PyObject_TypeCheck(end, ring_end_type)) break;
        rings[valid] = &((RingObject *)end)->ring;
    }
    if (valid < count) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of RingEnds");
    } else if (is_inbox(&inbox)) {
        int changed = inbox_await(inbox.buf, rings, (int)count, known, mode < GLANCE ? (Mode)mode : GLANCE);
        if (!changed && mode > GLANCE) {
            Py_BEGIN_ALLOW_THREADS
            changed = inbox_await(inbox.buf, rings, (int)count, known, (Mode)mode);
            Py_END_ALLOW_THREADS
        }
        result = PyBool_FromLong(changed);
    }
    PyBuffer_Release(&inbox);
    return result;
}

PyObject *create_inbox(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    unsigned long long capacity;
    int size;
    if (!PyArg_ParseTuple(args, "w*iK", &memory, &size, &capacity)) return NULL;
    PyObject *result = is_inbox(&memory) ? Py_NewRef(Py_None) : NULL;
    if (result && refused(inbox_create(memory.buf, size, capacity))) Py_CLEAR(result);
    PyBuffer_Release(&memory);
    return result;
}

PyObject *wake_inbox(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    unsigned long long value;
    if (!PyArg_ParseTuple(args, "w*K", &memory, &value)) return NULL;
    PyObject *result = is_inbox(&memory) ? Py_NewRef(Py_None) : NULL;
    if (result) inbox_wake(memory.buf, value);
    PyBuffer_Release(&memory);
    return result;
}

PyObject *read_wakeup(PyObject *Py_UNUSED(module), PyObject *array) {
    Py_buffer memory;
    if (PyObject_GetBuffer(array, &memory, PyBUF_WRITABLE)) return NULL;
    PyObject *result = is_inbox(&memory) ? PyLong_FromUnsignedLongLong(inbox_wakeup(memory.buf)) : NULL;
    PyBuffer_Release(&memory);
    return result;
}

PyObject *measure_inbox(PyObject *Py_UNUSED(module), PyObject *args) {
    int size;
    unsigned long long given;
    if (!PyArg_ParseTuple(args, "iK", &size, &given)) return NULL;
    uint64_t capacity = given, nbytes = inbox_bytes(size, &capacity);
    return Py_BuildValue("KK", (unsigned long long)nbytes, (unsigned long long)capacity);
}

/* ------------------------------------------------------------------ the type */

/* RingEnd(memory, size, sender, member, may_spin): the end that `member` of `size` has in the ring of `sender`. */
static int end_init(RingObject *o, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *memory;
    int size, sender, member, may_spin;
    if (o->memory.obj) {
        PyErr_SetString(PyExc_RuntimeError, "a RingEnd is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "Oiiip", &memory, &size, &sender, &member, &may_spin) ||
        PyObject_GetBuffer(memory, &o->memory, PyBUF_WRITABLE))
        return -1;
    int opened = ring_open(&o->ring, o->memory.buf, (uint64_t)o->memory.len, size, sender, member, may_spin);
    if (opened >= 0) return refused(opened) ? -1 : 0;
    PyErr_Format(PyExc_ValueError, "memory of %zd bytes is not an inbox of %d members", o->memory.len, size);
    return -1;
}

static void end_dealloc(RingObject *o) {
    PyTypeObject *type = Py_TYPE(o);
    if (o->memory.obj) PyBuffer_Release(&o->memory);
    type->tp_free((PyObject *)o);
    Py_DECREF(type);
}

static PyMethodDef end_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))end_begin, METH_VARARGS, NULL},
    {"write", (PyCFunction)(void (*)(void))end_write, METH_VARARGS, NULL},
    {"peek", (PyCFunction)(void (*)(void))end_peek, METH_NOARGS, NULL},
    {"accept", (PyCFunction)(void (*)(void))end_accept, METH_O, NULL},
    {"take", (PyCFunction)(void (*)(void))end_take, METH_VARARGS, NULL},
    {"meet", (PyCFunction)(void (*)(void))end_meet, METH_VARARGS, NULL},
    {"has_begun", (PyCFunction)(void (*)(void))end_has_begun, METH_O, NULL},
    {"has_room", (PyCFunction)(void (*)(void))end_has_room, METH_O, NULL},
    {"give_up", (PyCFunction)(void (*)(void))end_give_up, METH_NOARGS, NULL},
    {"lend", (PyCFunction)(void (*)(void))end_lend, METH_NOARGS, NULL},
    {"take_back", (PyCFunction)(void (*)(void))end_take_back, METH_NOARGS, NULL},
    {"wake_sender", (PyCFunction)(void (*)(void))end_wake_sender, METH_NOARGS, NULL},
    {NULL}};
static PyMemberDef end_members[] = {{"position", T_ULONGLONG, offsetof(RingObject, ring.position), READONLY, NULL},
                                    {"left", T_ULONGLONG, offsetof(RingObject, ring.left), READONLY, NULL},
                                    {NULL}};
static PyGetSetDef end_computed[] = {{"pending", (getter)(void (*)(void))get_pending, NULL, NULL, NULL},
                                     {"in_use", (getter)(void (*)(void))get_in_use, NULL, NULL, NULL},
                                     {"untaken", (getter)(void (*)(void))get_untaken, NULL, NULL, NULL},
                                     {"broken", (getter)(void (*)(void))get_broken, NULL, NULL, NULL},
                                     {NULL}};
static PyType_Slot end_slots[] = {{Py_tp_init, end_init},
                                  {Py_tp_new, PyType_GenericNew},
                                  {Py_tp_dealloc, end_dealloc},
                                  {Py_tp_methods, end_methods},
                                  {Py_tp_members, end_members},
                                  {Py_tp_getset, end_computed},
                                  {0, NULL}};
static PyType_Spec end_spec = {"transport._native._core.RingEnd", sizeof(RingObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, end_slots};

int add_ring_end(PyObject *module) {
    ring_end_type = (PyTypeObject *)PyType_FromSpec(&end_spec);
    return ring_end_type ? PyModule_AddType(module, ring_end_type) : -1;
}
