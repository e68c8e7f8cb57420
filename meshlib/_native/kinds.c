/* The calls of each kind that C can make. Python makes all other calls, and raises their errors. */
#include "kinds.h"

#define NO_SIDE {NONE, NEVER, 0}

/* Arguments are numbered from 0 as in the methods of meshlib/_collectives. */
static const KindRow table[] = {
    [BARRIER] = {NO_SIDE, NO_SIDE, .op = NONE, .rank = NONE, .spare = 0, .result = NONE},
    [BROADCAST] = {{0, AT_ROOT, 0}, {0, ELSEWHERE, 0}, .op = NONE, .rank = 1, .place = 2, .spare = 3, .agreed = 1},
    [ALL_REDUCE] = {NO_SIDE, {0, ALWAYS, 0}, .op = 1, .rank = NONE, .spare = 2, .agreed = 1},
    [REDUCE] = {{0, ELSEWHERE, 0}, {0, AT_ROOT, 0}, .op = 2, .rank = 1, .place = 3, .spare = 4, .agreed = 1},
    [ALL_GATHER] = {{1, ALWAYS, 0}, {0, ALWAYS, 1}, .op = NONE, .rank = NONE, .spare = 2, .agreed = 1, .records_output = 1},
    [REDUCE_SCATTER] = {{1, ALWAYS, 1}, {0, ALWAYS, 0}, .op = 2, .rank = NONE, .spare = 3, .agreed = 1},
    [GATHER] = {{0, ALWAYS, 0}, {1, AT_ROOT, 1}, .op = NONE, .rank = 2, .place = 3, .spare = 4, .result = 1, .has_default = 1},
    [SCATTER] = {{1, AT_ROOT, 1}, {0, ALWAYS, 0}, .op = NONE, .rank = 2, .place = 3, .spare = 4, .has_default = 1, .records_output = 1},
    [SEND] = {{0, ALWAYS, 0}, NO_SIDE, .op = NONE, .rank = 1, .place = 3, .tag = 2, .spare = 4, .result = NONE},
    [RECV] = {NO_SIDE, {0, ALWAYS, 0}, .op = NONE, .rank = 1, .place = 3, .tag = 2, .spare = 4, .result = NONE},
    [ALL_TO_ALL] = {{1, ALWAYS, 1}, {0, ALWAYS, 1}, .op = NONE, .rank = NONE, .spare = 2},
};
#define KINDS ((long)(sizeof table / sizeof *table))

static int is_whole(PyObject *number, long *value) {
    int overflow;
    if (!PyLong_CheckExact(number)) return 0;
    *value = PyLong_AsLongAndOverflow(number, &overflow);
    return !overflow;
}

/* Return the group rank of a global rank or a group rank. Return `otherwise` if both are None, -1 if invalid. */
static int find_place(const GroupFacts *u, PyObject *rank, PyObject *place, int otherwise) {
    long value;
    if (rank == Py_None) {
        if (place == Py_None) return otherwise;
        return is_whole(place, &value) && value >= 0 && value < u->size ? (int)value : -1;
    }
    if (place != Py_None || !is_whole(rank, &value)) return -1;
    if (value >= 0 && value < u->size && u->ranks[value] == value) return (int)value;
    for (int i = 0; i < u->size; i++)
        if (u->ranks[i] == value) return i;
    return -1;
}

static int find_op(const GroupFacts *u, PyObject *op) {
    for (Py_ssize_t code = 1; code < PyTuple_GET_SIZE(u->ops); code++)
        if (PyTuple_GET_ITEM(u->ops, code) == op) return (int)code;
    return 0;
}

int read_arguments(const GroupFacts *u, long kind, int listed, PyObject *tuple, Arguments *a) {
    if (kind < BARRIER || kind >= KINDS || !PyTuple_CheckExact(tuple)) return 0;
    const KindRow *row = &table[kind];
    *a = (Arguments){.row = row, .arguments = &PyTuple_GET_ITEM(tuple, 0), .listed = listed,
                     .count = (int)PyTuple_GET_SIZE(tuple)};
    if (a->count < row->spare) return 0;
    PyObject *const *given = a->arguments;
    for (int i = row->spare; i < a->count; i++)
        if (given[i] != Py_None && given[i] != Py_False) return 0;
    if (row->rank != NONE)
        a->root = find_place(u, given[row->rank], given[row->place], row->has_default ? 0 : -1);
    long tag = 0;
    if (row->tag && (!is_whole(given[row->tag], &tag) || tag < 0 || tag > UINT32_MAX)) return 0;
    a->tag = (uint32_t)tag;
    if (row->op != NONE && !(a->op = find_op(u, given[row->op]))) return 0;
    return a->root >= 0;
}

/* ------------------------------------------------------------------ arrays */

static int is_there(const Side *side, int is_root) {
    return side->presence == ALWAYS || (side->presence != NEVER && (side->presence == AT_ROOT) == is_root);
}

static int take_array(const GroupFacts *u, GroupObject *o, PyObject *array, int writable) {
    return Py_IS_TYPE(array, u->array_type) && transport->export_array(o, array, writable);
}

/* Export the arrays of a side. Return their number, or 0 if Python must handle them. */
static int take_side(const GroupFacts *u, GroupObject *o, const Arguments *a, const Side *side, int at, int writable) {
    PyObject *argument = a->arguments[side->argument];
    int parts = side->parts ? u->size : 1, first = o->exported;
    if (!side->parts || !a->listed) {
        if (!take_array(u, o, argument, writable)) return 0;
        const Py_buffer *view = &o->views[first];
        /* With parts on both sides, as in an all-to-all, an array is split by rows. */
        Py_ssize_t units = view->len / view->itemsize;
        if (a->row->input.parts && a->row->output.parts) units = view->ndim ? view->shape[0] : 1;
        if (units % parts) return 0;
        for (int i = 0; i < parts; i++) transport->describe_part(o, at + i, first, i, parts);
        return parts;
    }
    if (!PyList_CheckExact(argument) || PyList_GET_SIZE(argument) != parts) return 0;
    for (int i = 0; i < parts; i++) {
        PyObject *array = PyList_GetItemRef(argument, i);
        int taken = array && take_array(u, o, array, writable);
        Py_XDECREF(array);
        if (!array) PyErr_Clear(); /* Another thread has shortened the list. */
        if (!taken) return 0;
        transport->describe_part(o, at + i, first + i, 0, 1);
    }
    return parts;
}

static int overlap(const Py_buffer *x, const Py_buffer *y) {
    const char *a = x->buf, *b = y->buf;
    return a < b + y->len && b < a + x->len;
}

/* Return whether no output shares memory with another array. A member's own input may be its own output. */
static int are_apart(const GroupObject *o, int inputs, const Array *own_input, const Array *own_output) {
    int is_copy = own_input && own_output && own_input->data == own_output->data;
    for (int i = inputs; i < o->exported; i++)
        for (int j = 0; j < i; j++) {
            if (!overlap(&o->views[i], &o->views[j])) continue;
            const char *from = o->views[j].buf, *to = o->views[i].buf;
            int own = j < inputs && is_copy && from <= own_input->data && own_input->data < from + o->views[j].len &&
                      to <= own_output->data && own_output->data < to + o->views[i].len;
            if (!own) return 0;
        }
    return 1;
}

static uint64_t bytes_of(const Array *arrays, int count) {
    uint64_t total = 0;
    for (int i = 0; i < count; i++) total += arrays[i].nbytes;
    return total;
}

static int take_all(const GroupFacts *u, GroupObject *o, const Arguments *a, CallSpecification *what, long long *nbytes) {
    const KindRow *row = a->row;
    const Side *input = &row->input, *output = &row->output;
    int is_root = a->root == o->group.rank, gives = is_there(input, is_root), gets = is_there(output, is_root);
    if (gives && !(what->inputs = take_side(u, o, a, input, 0, 0))) return 0;
    int inputs = o->exported, outputs = 0;
    if (gets && !(outputs = take_side(u, o, a, output, what->inputs, 1))) return 0;
    what->count = what->inputs + outputs;
    /* Members without the list, which only the root has, must pass None. */
    const Side *list = input->parts ? input : output;
    if (list->parts && !is_there(list, is_root) && a->arguments[list->argument] != Py_None) return 0;
    if (!what->count) return 1; /* a barrier */
    int dtype = transport->dtype_of(&o->views[0]);
    for (int i = 1; i < o->exported; i++)
        if (transport->dtype_of(&o->views[i]) != dtype) return 0;
    if (a->op && !(what->loops = transport->find_loops(dtype, a->op))) return 0;
    Array *from = o->group.arrays, *to = from + what->inputs;
    const Array *own_input = gives ? from + (input->parts ? o->group.rank : 0) : NULL;
    const Array *own_output = gets ? to + (output->parts ? o->group.rank : 0) : NULL;
    if (own_input && own_output && own_input->nbytes != own_output->nbytes) return 0;
    if (!are_apart(o, inputs, row->agreed ? own_input : NULL, own_output)) return 0;
    uint64_t given = bytes_of(from, what->inputs), got = bytes_of(to, outputs);
    uint64_t recorded = !given || (row->records_output && got) ? got : given;
    *nbytes = (long long)recorded;
    what->header.dtype = (uint16_t)dtype;
    what->header.op = (uint8_t)a->op;
    if (row->agreed) what->header.elements = recorded / (uint64_t)o->views[0].itemsize;
    return 1;
}

int take_arguments(const GroupFacts *u, GroupObject *o, const Arguments *a, CallSpecification *what, long long *nbytes) {
    int kind = (int)(a->row - table);
    *what = (CallSpecification){.kind = kind, .root = a->root, .reduces = a->op != 0};
    what->header = (Header){.kind = (uint16_t)kind, .root = a->row->rank == NONE ? NO_ROOT : a->root};
    *nbytes = 0;
    transport->release_arrays(o); /* of a call that was interrupted */
    if (take_all(u, o, a, what, nbytes)) return 1;
    transport->release_arrays(o);
    return 0;
}

PyObject *result_of(const Arguments *a) {
    if (a->row->result == NONE) Py_RETURN_NONE;
    PyObject *result = a->arguments[a->row->result];
    if (PyList_CheckExact(result)) return PyList_GetSlice(result, 0, PyList_GET_SIZE(result));
    return Py_NewRef(result);
}
