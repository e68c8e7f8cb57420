/* One end of a ring of messages: transport/shm/messages/ring.py has the rules, and the same class in Python.
 *
 * What is different here: pieces are smaller, since one costs next to nothing, and who has to wait
 * for the other end between two of them looks for a moment before it leaves that to Python.
 */
#include "core.h"
#include "memory/staging.h"

#include <string.h>

PyTypeObject *ring_end_type;

#define LOW_HALF UINT64_C(0xFFFFFFFF)
/* Half of what a core's own cache has room for, together with where it comes from. */
#define MOST_PIECE (32 << 10)
/* From here on the other end is told of a message before its bytes are there. */
#define ANNOUNCED (16 << 10)
enum { SENDER_SLEEPS = 2 }; /* a word of the sender's line, after its counter and `broken` */

typedef struct {
    PyObject_HEAD
    Py_buffer memory; /* of the inbox, which stays mapped as long as this lives */
    char *data;
    Word *written, *taken, *bell, *asleep;
    unsigned long long capacity, piece, position, left;
    uint64_t rings, number, step;
    Patience patience;
    Staging staging;
} RingEnd;

static inline uint64_t seen(const Word *word) { return atomic_load_explicit(word, memory_order_acquire); }

/* ------------------------------------------------------------------ the bytes */

/* Write a part of a message of `whole` bytes. */
static void copy_in(RingEnd *r, const char *from, uint64_t size, uint64_t whole) {
    uint64_t at = r->position % r->capacity, first = least(size, r->capacity - at);
    stage_bytes(&r->staging, r->data + at, (Source){from}, first, whole, (Also){0});
    if (first < size) stage_bytes(&r->staging, r->data, (Source){from + first}, size - first, whole, (Also){0});
}

static void copy_out(const RingEnd *r, uint64_t position, char *into, uint64_t size) {
    uint64_t at = position % r->capacity, first = least(size, r->capacity - at);
    copy_bytes(into, r->data + at, first);
    if (first < size) copy_bytes(into + first, r->data, size - first);
}

/* ------------------------------------------------------------------ one end tells the other */

/* A full fence each: who sleeps is seen, or sees the counter. */
static void tell_receiver(RingEnd *r) {
    atomic_store_explicit(r->written, r->position, memory_order_seq_cst);
    if (!atomic_load_explicit(r->asleep, memory_order_seq_cst)) return;
    atomic_store_explicit(r->bell, (++r->rings * r->step + r->number) & LOW_HALF, memory_order_seq_cst);
    wake(r->bell);
}

static void tell_sender(RingEnd *r) {
    atomic_store_explicit(r->taken, r->position, memory_order_seq_cst);
    if (atomic_load_explicit(r->written + SENDER_SLEEPS, memory_order_seq_cst)) wake(r->taken);
}

/* ------------------------------------------------------------------ waiting for the other end */

typedef struct {
    RingEnd *end;
    uint64_t nbytes;
} Room;

static int has_room(const void *what) {
    const Room *room = what;
    const RingEnd *r = room->end;
    return r->capacity - (r->position - seen(r->taken)) >= room->nbytes;
}

static int has_more(const void *what) {
    const RingEnd *r = what;
    return seen(r->written) != r->position;
}

/* `free`: this thread has given up the interpreter's lock. */
static int await(RingEnd *r, Look look, const void *what, int patient, int free) {
    if (!patient) return look(what);
    return free ? await_without(&r->patience, look, what) : await_holding(&r->patience, look, what);
}

/* ------------------------------------------------------------------ the loops */

static void write_on(RingEnd *r, char *data, uint64_t size, int patient, int free) {
    while (r->left) {
        uint64_t count = least(r->left, r->piece);
        Room room = {r, whole_lines(count)};
        if (!await(r, has_room, &room, patient, free)) return;
        copy_in(r, data + (size - r->left), count, size);
        r->position += room.nbytes;
        r->left -= count;
        tell_receiver(r);
    }
}

static void take_on(RingEnd *r, char *into, uint64_t size, int patient, int free) {
    while (r->left) {
        if (!await(r, has_more, r, patient, free)) return;
        uint64_t count = least(least(r->left, r->piece), seen(r->written) - r->position);
        copy_out(r, r->position, into + (size - r->left), count);
        r->position += whole_lines(count);
        r->left -= count;
        tell_sender(r);
    }
}

/* Run a loop on the rest of a message; without the interpreter's lock where that takes a while. */
static int run(RingEnd *r, void (*loop)(RingEnd *, char *, uint64_t, int, int), const Py_buffer *of,
               int patient) {
    if (r->left > (unsigned long long)of->len) {
        PyErr_Format(PyExc_ValueError, "%llu bytes are to come, of %zd", r->left, of->len);
        return -1;
    }
    if (r->left <= ANNOUNCED) {
        loop(r, of->buf, (uint64_t)of->len, patient, 0);
        return 0;
    }
    PyThreadState *state = PyEval_SaveThread();
    loop(r, of->buf, (uint64_t)of->len, patient, 1);
    PyEval_RestoreThread(state);
    return 0;
}

/* ------------------------------------------------------------------ the sender's methods */

typedef struct {
    unsigned char header[HEADER_BYTES];
    uint64_t size, address;
    unsigned char rest[LINE - HEADER_BYTES - 16];
} Head;

static PyObject *end_begin(RingEnd *r, PyObject *args) {
    Py_buffer packed, data;
    int patient;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*p", &packed, &data, &patient)) return NULL;
    uint64_t size = (uint64_t)data.len;
    Room room = {r, LINE + whole_lines(least(size, r->piece))};
    if (packed.len != HEADER_BYTES) {
        PyErr_Format(PyExc_ValueError, "a header has %d bytes, not %zd", HEADER_BYTES, packed.len);
    } else if (!await(r, has_room, &room, patient, 0)) {
        result = Py_NewRef(Py_False);
    } else {
        Head head = {.size = size};
        memcpy(head.header, packed.buf, HEADER_BYTES);
        memcpy(r->data + r->position % r->capacity, &head, LINE);
        r->position += LINE;
        r->left = size;
        if (!size || size > ANNOUNCED) tell_receiver(r);
        if (!run(r, write_on, &data, patient)) result = Py_NewRef(Py_True);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&packed);
    return result;
}

static PyObject *end_go_on(RingEnd *r, PyObject *args) {
    Py_buffer data;
    int patient;
    if (!PyArg_ParseTuple(args, "y*p", &data, &patient)) return NULL;
    int failed = run(r, write_on, &data, patient);
    PyBuffer_Release(&data);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *end_publish(RingEnd *r, PyObject *Py_UNUSED(none)) {
    tell_receiver(r);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ the receiver's methods */

static PyObject *end_take(RingEnd *r, PyObject *args) {
    Py_buffer into;
    int patient;
    if (!PyArg_ParseTuple(args, "w*p", &into, &patient)) return NULL;
    if (seen(r->taken) != r->position) tell_sender(r); /* the head */
    int failed = run(r, take_on, &into, patient);
    PyBuffer_Release(&into);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

typedef struct {
    const RingEnd *end;
    uint64_t rung;
} Meeting;

static int has_come(const void *what) {
    const Meeting *m = what;
    return has_more(m->end) || seen(m->end->bell) != m->rung;
}

/* For a receive that is the only one: wait for the next message for a moment, and take it if it is
 * the one; else `position` is where it was. */
static PyObject *end_meet(RingEnd *r, PyObject *args) {
    Py_buffer into;
    unsigned long long rung;
    unsigned int tag;
    unsigned short dtype;
    if (!PyArg_ParseTuple(args, "w*KIH", &into, &rung, &tag, &dtype)) return NULL;
    Meeting meeting = {r, rung};
    int failed = 0;
    if (!r->left && await_holding(&r->patience, has_come, &meeting) && has_more(r)) {
        Head head;
        Header header;
        memcpy(&head, r->data + r->position % r->capacity, LINE);
        memcpy(&header, head.header, HEADER_BYTES);
        if (header.extra == tag && header.dtype == dtype && !head.address &&
            head.size == (uint64_t)into.len) {
            r->position += LINE;
            r->left = head.size;
            if (!r->left) tell_sender(r);
            failed = run(r, take_on, &into, 1);
        }
    }
    PyBuffer_Release(&into);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

typedef struct {
    PyObject *ends; /* a tuple */
    uint64_t rung;
} Listening;

static int has_news(const void *what) {
    const Listening *l = what;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(l->ends); i++) {
        const RingEnd *r = (RingEnd *)PyTuple_GET_ITEM(l->ends, i);
        if (has_more(r) || seen(r->bell) != l->rung) return 1;
    }
    return 0;
}

static PyObject *end_listen(PyObject *Py_UNUSED(none), PyObject *args) {
    Listening l;
    unsigned long long rung;
    if (!PyArg_ParseTuple(args, "O!K", &PyTuple_Type, &l.ends, &rung)) return NULL;
    l.rung = rung;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(l.ends); i++)
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(l.ends, i), ring_end_type)) {
            PyErr_SetString(PyExc_TypeError, "expected a tuple of RingEnds");
            return NULL;
        }
    if (!PyTuple_GET_SIZE(l.ends)) Py_RETURN_FALSE;
    RingEnd *first = (RingEnd *)PyTuple_GET_ITEM(l.ends, 0);
    return PyBool_FromLong(await_holding(&first->patience, has_news, &l));
}

/* ------------------------------------------------------------------ the type */

/* RingEnd(segment, control, start, capacity, piece, bell, asleep, number, step, may_spin): control to
 * piece in bytes, bell and asleep in words. */
static int end_init(RingEnd *r, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *segment;
    unsigned long long control, start, capacity, piece, bell, asleep, number, step;
    int may_spin;
    if (r->data) {
        PyErr_SetString(PyExc_RuntimeError, "a RingEnd is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OKKKKKKKKp", &segment, &control, &start, &capacity, &piece, &bell,
                          &asleep, &number, &step, &may_spin))
        return -1;
    PyObject *data = PyObject_GetAttrString(segment, "data");
    int failed = !data || PyObject_GetBuffer(data, &r->memory, PyBUF_WRITABLE);
    Py_XDECREF(data);
    if (failed) return -1;
    uint64_t size = (uint64_t)r->memory.len;
    if (capacity < 4 * LINE || capacity % LINE || control % LINE || start > size || capacity > size - start ||
        control > size || size - control < 2 * LINE || bell >= size / 8 || asleep >= size / 8) {
        PyErr_Format(PyExc_ValueError, "a ring of %llu bytes at %llu, %llu is not within %llu", capacity,
                     control, start, (unsigned long long)size);
        return -1;
    }
    char *memory = r->memory.buf;
    r->data = memory + start;
    r->written = (Word *)(memory + control);
    r->taken = (Word *)(memory + control + LINE);
    r->bell = (Word *)memory + bell;
    r->asleep = (Word *)memory + asleep;
    r->capacity = capacity;
    piece = least(least(piece, MOST_PIECE), capacity / 2) / LINE * LINE;
    r->piece = piece ? piece : LINE;
    r->number = number;
    r->step = step;
    r->position = r->left = r->rings = 0;
    be_patient(&r->patience, may_spin);
    r->staging = (Staging){0};
    return 0;
}

static void end_dealloc(RingEnd *r) {
    PyTypeObject *type = Py_TYPE(r);
    if (r->memory.obj) PyBuffer_Release(&r->memory);
    type->tp_free((PyObject *)r);
    Py_DECREF(type);
}

static PyMethodDef end_methods[] = {
    {"begin", (PyCFunction)end_begin, METH_VARARGS, NULL},
    {"go_on", (PyCFunction)end_go_on, METH_VARARGS, NULL},
    {"publish", (PyCFunction)end_publish, METH_NOARGS, NULL},
    {"take", (PyCFunction)end_take, METH_VARARGS, NULL},
    {"meet", (PyCFunction)end_meet, METH_VARARGS, NULL},
    {"listen", (PyCFunction)end_listen, METH_VARARGS | METH_STATIC, NULL},
    {NULL}};
static PyMemberDef end_members[] = {{"position", T_ULONGLONG, offsetof(RingEnd, position), 0, NULL},
                                    {"left", T_ULONGLONG, offsetof(RingEnd, left), 0, NULL},
                                    {"capacity", T_ULONGLONG, offsetof(RingEnd, capacity), READONLY, NULL},
                                    {"piece", T_ULONGLONG, offsetof(RingEnd, piece), READONLY, NULL},
                                    {NULL}};
static PyType_Slot end_slots[] = {{Py_tp_init, end_init},
                                  {Py_tp_new, PyType_GenericNew},
                                  {Py_tp_dealloc, end_dealloc},
                                  {Py_tp_methods, end_methods},
                                  {Py_tp_members, end_members},
                                  {0, NULL}};
PyType_Spec ring_end_spec = {"transport.native._core.RingEnd", sizeof(RingEnd), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, end_slots};
