/* The type Plans: a group's plans, each made when it is first used, and the arrays of the calls. */
#include "shm/plans.h"

#include <string.h>

static PyObject *str_begin, *str_check_later;

/* ------------------------------------------------------------------ plans */

static int within(int32_t number, int32_t least_one, int32_t count) { return number >= least_one && number < count; }

static int steps_fit(const Plan *plan, int size) {
    const Head *h = plan->head;
    for (int r = 0; r < size; r++)
        if (!within(plan->sends[r], NOTHING, h->arrays) || !within(plan->expects[r], NOTHING, h->arrays)) return 0;
    int loops = 0;
    for (int i = 0; i < h->steps; i++) {
        const Step *s = &plan->steps[i];
        if (!within(s->op, 0, OPS) || !within(s->peer, ALL, size) || s->first < 0 || s->count < 0 ||
            s->first > h->parts - s->count || s->count > MOST)
            return 0;
        if (s->op == KEEP && s->count != 2) return 0;
        if (s->op == FOLD && (s->count != size || !within(s->number, ALL, h->arrays))) return 0;
        loops += s->op == LOOP ? 1 : s->op == END ? -1 : 0;
        if (loops < 0 || loops > 1) return 0;
    }
    for (int i = 0; i < h->parts; i++) {
        const Part *part = &plan->parts[i];
        if (!within(part->peer, 0, size) || !within(part->array, 0, h->arrays) || !within(part->cut, 0, CUTS) ||
            part->share < 0)
            return 0;
    }
    return !loops;
}

/* Point into the numbers: 0 if they are a plan. */
static int read_plan(Plan *plan, int size) {
    if (!PyBytes_Check(plan->packed)) return -1;
    const int32_t *at = (const int32_t *)PyBytes_AS_STRING(plan->packed);
    Py_ssize_t left = PyBytes_GET_SIZE(plan->packed) - (Py_ssize_t)sizeof(Head) - 8 * (Py_ssize_t)size;
    if (left < 0) return -1;
    const Head *h = plan->head = (const Head *)at;
    if (h->steps < 0 || h->parts < 0 || !within(h->arrays, 1, MOST_ARRAYS + 1) || h->capacity < LINE ||
        h->wide < LINE || left != (Py_ssize_t)sizeof(Step) * h->steps + (Py_ssize_t)sizeof(Part) * h->parts)
        return -1;
    plan->sends = (const int32_t *)(h + 1);
    plan->expects = plan->sends + size;
    plan->steps = (const Step *)(plan->expects + size);
    plan->parts = (const Part *)(plan->steps + h->steps);
    if (!steps_fit(plan, size)) return -1;
    plan->sources = plan->along = 0;
    plan->width = 1;
    plan->keep = NULL;
    for (int r = 0; r < size; r++) plan->sources += plan->sends[r] != NOTHING;
    for (int i = 0; i < h->steps; i++) {
        const Step *s = &plan->steps[i];
        if (s->op == KEEP) plan->keep = plan->parts + s->first;
        if (s->count > plan->width) plan->width = s->count;
    }
    for (int i = 0; i < h->steps; i++) {
        const Step *s = &plan->steps[i];
        if (s->op != STAGE || !plan->keep) continue;
        plan->along = s->count == 1 && plan->parts[s->first].array == plan->keep->array;
    }
    return 0;
}

/* NULL with an exception. */
static const Plan *find_plan(Plans *plans, long number) {
    if (number < 0 || number >= plans->count) {
        PyErr_Format(PyExc_ValueError, "expected the number of a plan, less than %ld", plans->count);
        return NULL;
    }
    Plan *plan = &plans->plans[number];
    if (plan->packed) return plan;
    PyObject *packed = PyObject_CallFunction(plans->make, "l", number);
    if (!packed) return NULL;
    Plan made = {.packed = packed};
    if (read_plan(&made, plans->board->size) < 0) {
        Py_DECREF(packed);
        PyErr_Format(PyExc_ValueError, "what was made as number %ld is no plan", number);
        return NULL;
    }
    *plan = made;
    return plan;
}

/* ------------------------------------------------------------------ arrays */

static void release(Passage *p) {
    while (p->arrays > 0) PyBuffer_Release(&p->views[--p->arrays]);
    PyMem_Free(p->gaps);
}

/* Export each of a list: whether that was possible. */
static int export(Passage *p, PyObject *list, int reduces) {
    if (!PyList_Check(list) && !PyTuple_Check(list)) return 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        if (p->arrays == p->plan->head->arrays) return 0;
        int flags = reduces ? PyBUF_FORMAT : PyBUF_STRIDES;
        if (p->arrays >= p->plan->head->read_only) flags |= PyBUF_WRITABLE;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(list, i), &p->views[p->arrays], flags)) {
            PyErr_Clear();
            return 0;
        }
        p->arrays++;
    }
    return 1;
}

/* Note what lies how, where an array may have gaps: whether that is possible. */
static int note_gaps(Passage *p) {
    int first = 0;
    while (first < p->arrays && lies_in_a_row(&p->views[first])) first++;
    if (first == p->arrays) return 1;
    p->gaps = PyMem_Calloc((size_t)p->arrays, sizeof(Gaps));
    if (!p->gaps) return 0;
    for (int i = first; i < p->arrays; i++)
        if (find_gaps(&p->views[i], &p->gaps[i]) < 0) return 0;
    return 1;
}

/* Whether the loops can take the arrays. */
static int find_loops(Passage *p, long op) {
    const Py_buffer *first = &p->views[0];
    p->entry = entry_of(first, op);
    for (int i = 1; p->entry && i < p->arrays; i++) {
        const Py_buffer *view = &p->views[i];
        if (strcmp(view->format, first->format) || (uintptr_t)view->buf % p->entry->size || view->len != first->len)
            return 0;
    }
    return p->entry != NULL;
}

/* Take the arrays of a call: whether it can be made here. */
static int take_arrays(Passage *p, PyObject *inputs, PyObject *outputs, long op) {
    if (!export(p, inputs, op != 0) || !export(p, outputs, op != 0)) return 0;
    if (p->arrays != p->plan->head->arrays) return 0;
    const Part *keep = p->plan->keep;
    if (keep && p->views[keep[0].array].len != p->views[keep[1].array].len) return 0;
    if (op) {
        p->copy = copy_bytes; /* what comes back was near a moment ago */
        return find_loops(p, op);
    }
    uint64_t total = 0;
    for (int i = p->plan->head->read_only; i < p->arrays; i++) total += (uint64_t)p->views[i].len;
    p->copy = total < STREAMED_BYTES ? copy_bytes : stream_past;
    return note_gaps(p);
}

/* The places of the arrays, or None: -1 with an exception. */
static int take_places(Passage *p, PyObject *places) {
    p->in_place = places != Py_None;
    if (!p->in_place) return 0;
    PyObject *list = PySequence_Fast(places, "expected places, or None");
    if (!list) return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    memset(p->where, 0, sizeof p->where);
    for (Py_ssize_t i = 0; i < count && i < MOST_ARRAYS; i++)
        p->where[i] = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(list, i));
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

/* ------------------------------------------------------------------ calls */

/* Begin a call (Board.begin), and give up the interpreter's lock: -1, with the lock and an exception. */
static int begin(Passage *p, PyObject *call) {
    Board *b = p->plans->board;
    if (!PyObject_TypeCheck(call, fields_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a call");
        return -1;
    }
    if (may_begin(b)) {
        b->base += STEP;
        int slot = (int)(++b->number % SLOTS);
        memcpy(bytes_at(b, b->cards[b->rank][slot]), &((Fields *)call)->header, HEADER_BYTES);
    } else {
        PyObject *result = PyObject_CallMethodOneArg(p->plans->python, str_begin, call);
        Py_XDECREF(result);
        if (!result) return -1;
    }
    run_start(&p->run, b, p->plans->python, call);
    return 0;
}

static int make_call(Passage *p, PyObject *call) {
    for (int r = 0; r < p->plans->board->size; r++) p->places[r] = NULL;
    lay_out(p);
    if (begin(p, call) < 0) return -1;
    int at = run_plan(p);
    run_end(&p->run);
    if (at < 0 || !p->later) return at;
    PyObject *result = PyObject_CallMethodOneArg(p->plans->python, str_check_later, call);
    Py_XDECREF(result);
    return result ? at : -1;
}

/* run(number, call, inputs, outputs, op, places): op is its code, 0 where nothing is reduced; places are by array, None where
 * they are staged. Returns None where the call is done, else the step at which Python goes on with it; 0: nothing was done. */
static PyObject *plans_run(Plans *plans, PyObject *const *args, Py_ssize_t count) {
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "expected a number, a call, inputs, outputs, an op, and places");
        return NULL;
    }
    long number = PyLong_AsLong(args[0]), op = PyLong_AsLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    Passage p;
    p.plans = plans;
    p.plan = find_plan(plans, number);
    p.entry = NULL;
    p.gaps = NULL;
    p.arrays = p.later = 0;
    p.moved = 0;
    if (!p.plan || take_places(&p, args[5]) < 0) return NULL;
    if (!take_arrays(&p, args[2], args[3], op)) {
        release(&p);
        return PyLong_FromLong(0);
    }
    int at = make_call(&p, args[1]);
    release(&p);
    if (at < 0) return NULL;
    if (at > 0) return PyLong_FromLong(at);
    Py_RETURN_NONE;
}

/* lay_out(segments): be told where the symmetric memory is: numbers, addresses, and bytes a member. */
static PyObject *plans_lay_out(Plans *plans, PyObject *list) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of segments");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(list);
    Mapped *mapped = PyMem_Calloc((size_t)count + 1, sizeof(Mapped));
    if (!mapped) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long number, address, part;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "KKK", &number, &address, &part)) {
            PyMem_Free(mapped);
            return NULL;
        }
        mapped[i] = (Mapped){number, address, part};
    }
    PyMem_Free(plans->mapped);
    plans->mapped = mapped;
    plans->mappings = count;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ the type */

/* Plans(board, python, make, count): make gives the plan of a number below count. */
static int plans_init(Plans *plans, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *board, *python, *make;
    long count;
    if (plans->board) {
        PyErr_SetString(PyExc_RuntimeError, "Plans are made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O!OOl", board_type, &board, &python, &make, &count)) return -1;
    if (count < 1 || !(plans->plans = PyMem_Calloc((size_t)count, sizeof(Plan)))) {
        PyErr_Format(PyExc_ValueError, "no room for %ld plans", count);
        return -1;
    }
    plans->count = count;
    plans->board = (Board *)Py_NewRef(board);
    plans->python = Py_NewRef(python);
    plans->make = Py_NewRef(make);
    return 0;
}

static int plans_traverse(Plans *plans, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(plans));
    Py_VISIT(plans->python);
    Py_VISIT(plans->make);
    return 0;
}

static int plans_clear(Plans *plans) {
    Py_CLEAR(plans->python);
    Py_CLEAR(plans->make);
    return 0;
}

static void plans_dealloc(Plans *plans) {
    PyTypeObject *type = Py_TYPE(plans);
    PyObject_GC_UnTrack(plans);
    plans_clear(plans);
    for (long i = 0; i < plans->count; i++) Py_XDECREF(plans->plans[i].packed);
    PyMem_Free(plans->plans);
    PyMem_Free(plans->mapped);
    Py_CLEAR(plans->board);
    type->tp_free((PyObject *)plans);
    Py_DECREF(type);
}

static PyMethodDef plans_methods[] = {
    {"run", (PyCFunction)(void (*)(void))plans_run, METH_FASTCALL, NULL},
    {"lay_out", (PyCFunction)(void (*)(void))plans_lay_out, METH_O, NULL},
    {NULL}};
static PyType_Slot plans_slots[] = {{Py_tp_init, plans_init},
                                    {Py_tp_new, PyType_GenericNew},
                                    {Py_tp_dealloc, plans_dealloc},
                                    {Py_tp_traverse, plans_traverse},
                                    {Py_tp_clear, plans_clear},
                                    {Py_tp_methods, plans_methods},
                                    {0, NULL}};
PyType_Spec plans_spec = {"transport.native._core.Plans", sizeof(Plans), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plans_slots};

int init_plans(void) {
    str_begin = PyUnicode_InternFromString("begin");
    str_check_later = PyUnicode_InternFromString("check_later");
    return str_begin && str_check_later ? 0 : -1;
}
