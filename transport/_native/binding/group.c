/* The type Group: one member's calls on memory that all members share. */
#include "binding/group.h"

#include <structmember.h>

PyTypeObject *group_type;

/* ------------------------------------------------------------------ arrays */

void release_arrays(GroupObject *o) {
    while (o->exported > 0) PyBuffer_Release(&o->views[--o->exported]);
}

int dtype_of(const Py_buffer *view) {
    static const struct {
        char format[3];
        char size, code;
    } known[] = {{"f", 4, 11}, {"d", 8, 12}, {"i", 4, 6},  {"l", 8, 8},  {"q", 8, 8},  {"I", 4, 7},   {"L", 8, 9},  {"Q", 8, 9},
                 {"?", 1, 1},  {"b", 1, 2},  {"B", 1, 3},  {"h", 2, 4},  {"H", 2, 5},  {"e", 2, 10},  {"Zf", 8, 13}, {"Zd", 16, 14}};
    if (!view->format) return 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(view->format, known[i].format) && view->itemsize == known[i].size) return known[i].code;
    return 0;
}

static int is_aligned(const Py_buffer *view) { return (uintptr_t)view->buf % (uintptr_t)view->itemsize == 0; }

/* Find the runs of a non-contiguous array, and return 1; return 0 if it is contiguous. */
static int find_strides(const Py_buffer *view, Strides *s) {
    s->dims = 0;
    s->run = (uint64_t)view->itemsize;
    if (view->len == 0 || !view->strides) return 0;
    int dim = view->ndim - 1;
    for (; dim >= 0; dim--) {
        if (view->shape[dim] != 1 && view->strides[dim] != (Py_ssize_t)s->run) break;
        s->run *= (uint64_t)view->shape[dim];
    }
    for (int outer = 0; outer <= dim; outer++) {
        if (view->shape[outer] == 1) continue;
        uint64_t count = (uint64_t)view->shape[outer];
        int64_t stride = view->strides[outer];
        int last = s->dims - 1;
        if (last >= 0 && s->strides[last] == stride * (int64_t)count) { /* merge the two dims */
            s->counts[last] *= count;
            s->strides[last] = stride;
            continue;
        }
        s->counts[s->dims] = count;
        s->strides[s->dims++] = stride;
    }
    return s->dims > 0;
}

/* The place of an array in this member's symmetric memory; 0: it is private. */
static uint64_t place_of(const Group *g, const Py_buffer *view) {
    for (int i = 0; i < g->arena_count; i++) {
        const Arena *a = &g->arenas[i];
        const char *part = a->memory + (uint64_t)g->rank * a->part, *start = view->buf;
        if (start >= part && start + view->len <= part + a->part)
            return (a->number << PLACE_BITS) + (uint64_t)(start - part) + 1;
    }
    return 0;
}

void describe_part(GroupObject *o, int at, int view, int part, int parts) {
    const Py_buffer *whole = &o->views[view];
    uint64_t nbytes = (uint64_t)(whole->len / parts), offset = (uint64_t)part * nbytes, place = place_of(&o->group, whole);
    o->group.arrays[at] = (Array){.data = (char *)whole->buf + offset, .nbytes = nbytes, .place = place ? place + offset : 0};
}

int export_view(PyObject *array, int writable, Py_buffer *view) {
    if (PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0))) {
        PyErr_Clear();
        return 0;
    }
    if (view->len && dtype_of(view) && is_aligned(view)) return 1;
    PyBuffer_Release(view);
    return 0;
}

int export_array(GroupObject *o, PyObject *array, int writable) {
    int exported = export_view(array, writable, &o->views[o->exported]);
    o->exported += exported;
    return exported;
}

static void describe_array(GroupObject *o, int i) {
    const Py_buffer *view = &o->views[i];
    int flat = !view->strides || view->ndim == 0 || (view->ndim == 1 && view->strides[0] == view->itemsize);
    int gaps = !flat && find_strides(view, &o->strides[i]);
    o->group.arrays[i] = (Array){.data = view->buf, .nbytes = (uint64_t)view->len,
                                 .place = gaps ? 0 : place_of(&o->group, view),
                                 .strides = gaps ? &o->strides[i] : NULL};
}

/* Export the arrays of a list; return 0, or -1 with an exception. */
static int take_arrays(GroupObject *o, PyObject *list, int flags, int most) {
    PyObject *fast = PySequence_Fast(list, "expected a sequence of arrays");
    if (!fast) return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    int failed = count > most - o->exported;
    if (failed) PyErr_Format(PyExc_ValueError, "%zd arrays are too many for the call", count);
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        PyObject *array = PySequence_Fast_GET_ITEM(fast, i);
        failed = PyObject_GetBuffer(array, &o->views[o->exported], flags);
        if (failed && flags & PyBUF_FORMAT) { /* bfloat16 arrays, for example, export no format */
            PyErr_Clear();
            failed = PyObject_GetBuffer(array, &o->views[o->exported], flags & ~PyBUF_FORMAT);
        }
        if (!failed) describe_array(o, o->exported++);
    }
    Py_DECREF(fast);
    return failed ? -1 : 0;
}

/* The loops that reduce the exported arrays; NULL if the engine has none for them. */
static const Loops *loops_for(const GroupObject *o, int op) {
    int dtype = dtype_of(&o->views[0]);
    for (int i = 0; i < o->exported; i++)
        if (!is_aligned(&o->views[i])) return NULL;
    for (int i = 1; dtype && i < o->exported; i++)
        if (dtype_of(&o->views[i]) != dtype || o->views[i].len != o->views[0].len) return NULL;
    return dtype ? find_loops(dtype, op) : NULL;
}

/* ------------------------------------------------------------------ calls */

static Status carry_on_free(GroupObject *o) {
    Status status;
    Py_BEGIN_ALLOW_THREADS
    status = group_go_on(&o->group, o->sync ? SLEEP : NAP);
    Py_END_ALLOW_THREADS
    return status;
}

int is_small(const GroupObject *o) {
    Py_ssize_t total = 0;
    for (int i = 0; i < o->exported; i++) total += o->views[i].len;
    return total <= HELD_BYTES;
}

Status begin_call(GroupObject *o, const CallSpecification *what) {
    if (is_small(o)) return group_begin(&o->group, what, LOOK);
    Status status;
    Py_BEGIN_ALLOW_THREADS
    status = group_begin(&o->group, what, LOOK);
    Py_END_ALLOW_THREADS
    return status;
}

Status carry_on(GroupObject *o) {
    /* Most waits take a few microseconds: keep the interpreter's lock, which a computing thread would
     * hold for milliseconds. */
    if (o->sync && is_small(o)) {
        Status status = group_go_on(&o->group, GLANCE);
        if (status != AGAIN) return status;
    }
    return carry_on_free(o);
}

/* A method's result. A finished call releases its arrays. After AGAIN, Python checks why the call was woken. */
static PyObject *return_status(GroupObject *o, Status status) {
    if (status == DONE_ALL) release_arrays(o);
    if (status == AGAIN) o->group.wake_requested = 0;
    return PyLong_FromLong(status);
}

/* start(kind, root, call, inputs, outputs, op): begin a call; `op` is a code, 0 without a reduction. */
static PyObject *group_start(GroupObject *o, PyObject *const *args, Py_ssize_t count) {
    if (count != 6 || !PyObject_TypeCheck(args[2], fields_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a kind, a root, a call, inputs, outputs, and an op");
        return NULL;
    }
    const Fields *call = (const Fields *)args[2];
    long kind = PyLong_AsLong(args[0]), root = PyLong_AsLong(args[1]), op = PyLong_AsLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    CallSpecification what = {.kind = (int)kind, .root = (int)root, .reduces = op != 0, .header = call->header};
    what.count = group_arrays(o->group.size, o->group.rank, what.kind, what.root, &what.inputs);
    if (what.count < 0) return PyErr_Format(PyExc_ValueError, "kind %ld with root %ld is not a call", kind, root);
    release_arrays(o);
    int flags = op ? PyBUF_FORMAT | PyBUF_ND : PyBUF_STRIDES;
    int inputs = take_arrays(o, args[3], flags, what.inputs), exported = o->exported;
    if (inputs || take_arrays(o, args[4], flags | PyBUF_WRITABLE, what.count)) {
        release_arrays(o);
        return NULL;
    }
    if (exported != what.inputs || o->exported != what.count) {
        release_arrays(o);
        return PyErr_Format(PyExc_ValueError, "expected %d inputs, and %d arrays in all", what.inputs, what.count);
    }
    if (op) what.loops = loops_for(o, (int)op);
    o->sync = call->sync;
    Status status = begin_call(o, &what);
    return return_status(o, status == AGAIN ? carry_on(o) : status);
}

static PyObject *group_continue(GroupObject *o, PyObject *Py_UNUSED(none)) { return return_status(o, carry_on_free(o)); }

static PyObject *group_stop(GroupObject *o, PyObject *Py_UNUSED(none)) {
    release_arrays(o);
    Py_RETURN_NONE;
}

/* parts(): each member's operand and the output of the reduction that the caller does. Valid until go_on(). */
static PyObject *group_parts(GroupObject *o, PyObject *Py_UNUSED(none)) {
    const Group *g = &o->group;
    PyObject *parts = PyList_New(g->size);
    for (int member = 0; parts && member < g->size; member++) {
        char *part = (char *)(uintptr_t)g->parts[member];
        PyObject *view = PyMemoryView_FromMemory(part, (Py_ssize_t)g->part_bytes, PyBUF_READ);
        if (!view) Py_CLEAR(parts);
        else PyList_SET_ITEM(parts, member, view);
    }
    PyObject *out = parts ? PyMemoryView_FromMemory(g->out, (Py_ssize_t)g->part_bytes, PyBUF_WRITE) : NULL;
    if (out) return Py_BuildValue("NN", parts, out);
    Py_XDECREF(parts);
    return NULL;
}

/* problem(): why the call failed: (trouble, other member, own header, the other's header, found value, wanted value). */
static PyObject *group_problem(GroupObject *o, PyObject *Py_UNUSED(none)) {
    const Problem *p = &o->group.problem;
    return Py_BuildValue("iiy#y#KK", p->trouble, p->peer, (const char *)&p->ours, (Py_ssize_t)HEADER_BYTES,
                         (const char *)&p->theirs, (Py_ssize_t)HEADER_BYTES, (unsigned long long)p->found,
                         (unsigned long long)p->wanted);
}

static PyObject *group_wake_all(GroupObject *o, PyObject *Py_UNUSED(none)) {
    group_wake(&o->group);
    Py_RETURN_NONE;
}

/* lay_out(segments): set the segments of symmetric memory: (number, address, bytes per member) each. */
static PyObject *group_lay_out(GroupObject *o, PyObject *list) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of segments");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(list);
    Arena *arenas = calloc((size_t)count + 1, sizeof *arenas);
    if (!arenas) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long number, address, part;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "KKK", &number, &address, &part)) {
            free(arenas);
            return NULL;
        }
        arenas[i] = (Arena){number, (char *)(uintptr_t)address, part};
    }
    free(o->group.arenas);
    o->group.arenas = arenas;
    o->group.arena_count = (int)count;
    Py_RETURN_NONE;
}

/* block(member, slot): a copy of one of a member's blocks, for tests. */
static PyObject *group_block(GroupObject *o, PyObject *args) {
    int member, slot;
    if (!PyArg_ParseTuple(args, "ii", &member, &slot)) return NULL;
    if (member < 0 || member >= o->group.size || slot < 0 || slot >= SLOTS)
        return PyErr_Format(PyExc_ValueError, "member %d has no block %d", member, slot);
    return PyBytes_FromStringAndSize(block_at(&o->group, member, slot), (Py_ssize_t)o->group.sizes.block);
}

/* ------------------------------------------------------------------ the type */

/* Group(memory, rank, size, (direct, unstaged), may_spin) */
static int group_init(GroupObject *o, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *memory;
    unsigned long long direct, unstaged;
    int rank, size, may_spin;
    if (o->memory.obj) {
        PyErr_SetString(PyExc_RuntimeError, "a Group is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "Oii(KK)p", &memory, &rank, &size, &direct, &unstaged, &may_spin) ||
        PyObject_GetBuffer(memory, &o->memory, PyBUF_WRITABLE))
        return -1;
    Sizes sizes = {.direct = direct, .unstaged = unstaged};
    int opened = group_open(&o->group, o->memory.buf, (uint64_t)o->memory.len, rank, size, sizes, may_spin);
    if (!opened) {
        size_t count = 2 * (size_t)size;
        o->views = PyMem_Calloc(count, sizeof *o->views);
        o->strides = PyMem_Calloc(count, sizeof *o->strides);
    }
    if (opened == -2 || (!opened && (!o->views || !o->strides))) {
        PyErr_NoMemory();
        return -1;
    }
    if (opened) PyErr_Format(PyExc_ValueError, "memory of %zd bytes has another version's layout", o->memory.len);
    return opened;
}

/* Group takes no part in cyclic garbage collection: a mapping refers to no other object. */
static void group_dealloc(GroupObject *o) {
    PyTypeObject *type = Py_TYPE(o);
    release_arrays(o);
    group_close(&o->group);
    PyMem_Free(o->views);
    PyMem_Free(o->strides);
    if (o->memory.obj) PyBuffer_Release(&o->memory);
    type->tp_free((PyObject *)o);
    Py_DECREF(type);
}

static PyMemberDef group_members[] = {
    {"waits_for", T_INT, offsetof(GroupObject, group.waits_for), READONLY, NULL},
    {"compares", T_INT, offsetof(GroupObject, group.compares), 0, NULL},
    {"number", T_ULONGLONG, offsetof(GroupObject, group.number), READONLY, NULL},
    {NULL}};
static PyMethodDef group_methods[] = {
    {"start", (PyCFunction)(void (*)(void))group_start, METH_FASTCALL, NULL},
    {"go_on", (PyCFunction)(void (*)(void))group_continue, METH_NOARGS, NULL},
    {"stop", (PyCFunction)(void (*)(void))group_stop, METH_NOARGS, NULL},
    {"parts", (PyCFunction)(void (*)(void))group_parts, METH_NOARGS, NULL},
    {"problem", (PyCFunction)(void (*)(void))group_problem, METH_NOARGS, NULL},
    {"wake", (PyCFunction)(void (*)(void))group_wake_all, METH_NOARGS, NULL},
    {"lay_out", (PyCFunction)(void (*)(void))group_lay_out, METH_O, NULL},
    {"block", (PyCFunction)(void (*)(void))group_block, METH_VARARGS, NULL},
    {NULL}};
static PyType_Slot group_slots[] = {{Py_tp_init, group_init},
                                    {Py_tp_members, group_members},
                                    {Py_tp_methods, group_methods},
                                    {Py_tp_new, PyType_GenericNew},
                                    {Py_tp_dealloc, group_dealloc},
                                    {0, NULL}};
PyType_Spec group_spec = {"transport._native._core.Group", sizeof(GroupObject), 0, Py_TPFLAGS_DEFAULT, group_slots};
