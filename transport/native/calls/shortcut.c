/* The door for usual calls of a group: Door.issue, and for small ones what it calls, in one step. */
#include "binding/group.h"
#include "calls/turns.h"

#include <string.h>

typedef struct {
    PyObject_HEAD
    GroupObject *group; /* NULL: the ranks share no memory, and no call is made here, only opened */
    Order *order;
    char checked; /* 0: neither recorded nor compared, to measure what that costs */
    char met;     /* 0: the members have not met yet, and collectives are left to Python */
    /* What Python's way looks at, and where it keeps its records. */
    Recorder *ring;
    PyObject *id, *resume, *run, *observers, *log_cache, *locked;
    Turn collectives;
    PeerTurns messages;
} Shortcut;

static PyObject *str_cpu, *str_code, *debug_level;

/* Whether nobody looks on: 1, 0, or -1 with an exception. */
static int is_unwatched(Shortcut *s) {
    if (PyDict_GetItemWithError(s->log_cache, debug_level) != Py_False) return PyErr_Occurred() ? -1 : 0;
    return PyTuple_GET_SIZE(s->ring->followers) == 0 && s->ring->annotate == Py_None;
}

/* Take a turn of the group: 1, 0, or -1 with an exception. Nothing between here and the record gives up
 * the interpreter's lock, so the order of calls is kept. */
static int enter_turn(Shortcut *s, const Turn *turn) {
    PyObject *value = PyObject_CallNoArgs(s->locked);
    if (!value) return -1;
    int free = value == Py_False;
    Py_DECREF(value);
    return free ? take_turn(turn) : 0;
}

/* A call that is made here. */
typedef struct {
    Header header;
    long long nbytes;
    double seconds;
    Opening opening;
    Fields *record; /* NULL if not checked */
} Short;

/* Begin a call of this group if that is as usual: 1; 0: it is left to Python; -1: there is an
 * exception. Whether its board is free is another question. */
static int begin(Shortcut *s, Short *call) {
    int usual = PyDict_GET_SIZE(s->observers) ? 0 : is_unwatched(s);
    if (usual > 0) usual = enter_turn(s, &s->collectives);
    if (usual <= 0) return usual;
    call->header.sequence = ++s->order->sequence;
    call->record = NULL;
    if (!s->checked) return 1;
    call->header.history = s->order->history;
    s->order->history = history_after(&call->header);
    /* Other threads may run meanwhile: their calls come after this one. */
    if (prepare_record(s->ring, &call->opening) == 0) return 1;
    leave_with(&s->collectives, NULL);
    return -1;
}

static void record(Shortcut *s, Short *call, int peer) {
    call->record = fill_record(&call->opening, s->id, &call->header, call->nbytes, peer, 1, call->seconds);
    call->record->started = call->record->issued;
}

/* What the engine is told of a call. */
static CallSpecification specify(const Short *call, int count, const Loops *loops) {
    return (CallSpecification){.kind = call->header.kind, .count = count, .reduces = loops != NULL,
                               .header = call->header, .loops = loops};
}

/* End a call that went well, and return what it returns. */
static PyObject *end(Shortcut *s, Short *call, PyObject *result) {
    if (call->record) call->record->ended = monotonic();
    Py_XDECREF(call->record);
    return leave_with(&s->collectives, Py_NewRef(result));
}

/* Let Python wait for the others, or say what went wrong. Called from here, so that the turn is given
 * back also where a signal ends it before its first line. */
static PyObject *resume(Shortcut *s, Short *call, PyObject *array, PyObject *op) {
    PyObject *result =
        PyObject_CallFunctionObjArgs(s->resume, (PyObject *)call->record, array, op, NULL);
    Py_DECREF(call->record);
    return leave_with(&s->collectives, result);
}

static PyObject *left_to_python(int begun) {
    if (begun < 0) return NULL;
    Py_RETURN_NOTIMPLEMENTED;
}

/* Make a call whose arrays are exported. What the engine cannot end soon goes on in Python. */
static PyObject *make(Shortcut *s, Short *call, int count, const Loops *loops, PyObject *array, PyObject *op) {
    GroupObject *o = s->group;
    CallSpecification what = specify(call, count, loops);
    o->sync = 1;
    /* A small call is recorded while its data is on its way to the others, and theirs to this member. To begin a
     * large one gives up the interpreter's lock, so it is recorded before: records are in the order of the calls. */
    int small = is_small(o);
    if (s->checked && !small) record(s, call, COLLECTIVE);
    Status status = begin_call(o, &what);
    if (s->checked && small) record(s, call, COLLECTIVE);
    if (status == AGAIN) status = carry_on(o);
    while (status == AGAIN && !s->checked) status = carry_on(o);
    if (status != DONE_ALL) {
        o->group.news = 0; /* Python looks for it first */
        return resume(s, call, array, op);
    }
    release_arrays(o);
    return end(s, call, array);
}

/* Reduce the array where it lies; op is the code of reduce_op. */
static PyObject *all_reduce(Shortcut *s, PyObject *array, PyObject *reduce_op, long op, double seconds) {
    GroupObject *o = s->group;
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)) {
        PyErr_Clear(); /* read-only, with gaps, no buffer at all: Python's way has words for it */
        Py_RETURN_NOTIMPLEMENTED;
    }
    const Loops *loops = view.len ? find_loops(dtype_of(&view), (int)op) : NULL;
    if (!loops) {
        PyBuffer_Release(&view);
        Py_RETURN_NOTIMPLEMENTED;
    }
    Short call = {.nbytes = view.len, .seconds = seconds,
                  .header = {.elements = (uint64_t)view.len / loops->itemsize, .root = NO_ROOT, .kind = ALL_REDUCE,
                             .dtype = loops->dtype, .op = loops->op}};
    int begun = begin(s, &call);
    if (begun <= 0) {
        PyBuffer_Release(&view);
        return left_to_python(begun);
    }
    release_arrays(o); /* of a call that was broken off */
    o->views[0] = view;
    o->exported = 1;
    describe_array(o, 0);
    return make(s, &call, 1, loops, array, reduce_op);
}

static PyObject *barrier(Shortcut *s, double seconds) {
    Short call = {.seconds = seconds, .header = {.root = NO_ROOT, .kind = BARRIER}};
    int begun = begin(s, &call);
    if (begun <= 0) return left_to_python(begun);
    release_arrays(s->group);
    return make(s, &call, 0, NULL, Py_None, Py_None);
}

/* Have the door's run make the call. */
static PyObject *run_spec(Shortcut *s, CallSpec *spec, Short *call, const Turn *turn) {
    record(s, call, spec->peer);
    PyObject *result =
        PyObject_CallFunctionObjArgs(s->run, spec->run, (PyObject *)call->record, str_cpu, NULL);
    Py_DECREF(call->record);
    return leave_with(turn, result);
}

static PyObject *collective(Shortcut *s, CallSpec *spec, double seconds) {
    Short call = {.seconds = seconds, .nbytes = spec->nbytes, .header = spec->header};
    int begun = s->checked && s->met ? begin(s, &call) : 0;
    return begun > 0 ? run_spec(s, spec, &call, &s->collectives) : left_to_python(begun);
}

static PyObject *message(Shortcut *s, CallSpec *spec, double seconds) {
    if (!s->checked) Py_RETURN_NOTIMPLEMENTED;
    Short call = {.seconds = seconds, .nbytes = spec->nbytes, .header = spec->header};
    Turn turn;
    if (find_turn(&s->messages, spec, &turn) < 0) return NULL;
    PyObject *result = NULL;
    int usual = is_unwatched(s);
    if (usual > 0) usual = enter_turn(s, &turn);
    if (usual <= 0) {
        result = left_to_python(usual);
    } else {
        call.header.sequence = ++s->order->messages;
        if (prepare_record(s->ring, &call.opening) < 0)
            leave_with(&turn, NULL);
        else
            result = run_spec(s, spec, &call, &turn);
    }
    drop_turn(&turn);
    return result;
}

static PyObject *issue_spec(Shortcut *s, CallSpec *spec, double seconds) {
    if (!is_on_host(spec)) Py_RETURN_NOTIMPLEMENTED;
    if (spec->peer != COLLECTIVE) return message(s, spec, seconds);
    if (s->group && spec->header.kind == BARRIER) return barrier(s, seconds);
    return collective(s, spec, seconds);
}

/* An all_reduce that is not made here. */
static PyObject *spell_out(Shortcut *s, PyObject *what, double seconds) {
    if (!s->met) Py_RETURN_NOTIMPLEMENTED;
    PyObject *args[] = {PyTuple_GET_ITEM(what, 0), PyTuple_GET_ITEM(what, 1)};
    PyObject *spec = PyObject_Vectorcall(PyTuple_GET_ITEM(what, 2), args, 2, NULL), *result = NULL;
    if (spec && Py_IS_TYPE(spec, spec_type)) result = issue_spec(s, (CallSpec *)spec, seconds);
    else if (spec) PyErr_Format(PyExc_TypeError, "expected a CallSpec, got %R", spec);
    Py_XDECREF(spec);
    return result;
}

/* issue(what, seconds): what is a CallSpec or an InPlace. */
static PyObject *shortcut_issue(Shortcut *s, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "expected what the call is, and seconds");
        return NULL;
    }
    PyObject *what = args[0];
    double seconds = PyFloat_AsDouble(args[1]);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    if (Py_IS_TYPE(what, spec_type)) return issue_spec(s, (CallSpec *)what, seconds);
    if (!PyTuple_CheckExact(what) || PyTuple_GET_SIZE(what) != 3) {
        PyErr_SetString(PyExc_TypeError, "expected a CallSpec, or an array, an op and what spells them out");
        return NULL;
    }
    if (!s->group) return spell_out(s, what, seconds);
    PyObject *array = PyTuple_GET_ITEM(what, 0), *op = PyTuple_GET_ITEM(what, 1);
    PyObject *code = PyObject_GetAttr(op, str_code);
    long number = code ? PyLong_AsLong(code) : -1;
    Py_XDECREF(code);
    return number == -1 && PyErr_Occurred() ? NULL : all_reduce(s, array, op, number, seconds);
}

static PyObject *keep(PyObject *owner, const char *name) {
    return owner ? PyObject_GetAttrString(owner, name) : NULL;
}

/* Shortcut(native, met, group): native is the engine's group, or None; group is (id, resume, run, order, lock, lane, queue, turn, parts_of_peer, ring, observers, cache of the log's
 * levels). */
static int shortcut_init(Shortcut *s, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *native, *lock, *queue, *turn, *ring, *order, *id, *resume, *run, *lane, *observers;
    PyObject *log_cache, *parts_of_peer;
    int met;
    if (s->order) {
        PyErr_SetString(PyExc_RuntimeError, "a Shortcut is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "Op(OOOO!OOOOOO!O!O!)", &native, &met, &id, &resume, &run,
                          order_type, &order, &lock, &lane, &queue, &turn, &parts_of_peer, recorder_type,
                          &ring, &PyDict_Type, &observers, &PyDict_Type, &log_cache))
        return -1;
    if (native != Py_None && !Py_IS_TYPE(native, group_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Group or None, got %R", native);
        return -1;
    }
    s->checked = 1;
    s->met = (char)met;
    s->group = native == Py_None ? NULL : (GroupObject *)Py_NewRef(native);
    s->order = (Order *)Py_NewRef(order);
    s->id = Py_NewRef(id);
    s->resume = Py_NewRef(resume);
    s->run = Py_NewRef(run);
    s->messages.parts_of_peer = Py_NewRef(parts_of_peer);
    s->ring = (Recorder *)Py_NewRef(ring);
    s->observers = Py_NewRef(observers);
    s->log_cache = Py_NewRef(log_cache);
    s->locked = keep(lock, "locked");
    return s->locked ? make_turn(&s->collectives, lane, queue, turn) : -1;
}

#define EACH_OBJECT(DO)                                                                     \
    DO(s->ring) DO(s->id) DO(s->resume) DO(s->run) DO(s->observers) DO(s->log_cache) DO(s->locked)     \
    DO(s->messages.parts_of_peer)

static int shortcut_traverse(Shortcut *s, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(s));
#define DO(X) Py_VISIT(X);
    EACH_OBJECT(DO)
#undef DO
    for (int i = 0; i < s->messages.count; i++) {
        int stop = visit_turn(&s->messages.known[i].turn, visit, arg);
        if (stop) return stop;
    }
    return visit_turn(&s->collectives, visit, arg);
}

static int shortcut_clear(Shortcut *s) {
#define DO(X) Py_CLEAR(X);
    EACH_OBJECT(DO)
#undef DO
    drop_turn(&s->collectives);
    while (s->messages.count) drop_turn(&s->messages.known[--s->messages.count].turn);
    Py_CLEAR(s->group);
    Py_CLEAR(s->order);
    return 0;
}

static void shortcut_dealloc(Shortcut *s) {
    PyTypeObject *type = Py_TYPE(s);
    PyObject_GC_UnTrack(s);
    shortcut_clear(s);
    type->tp_free((PyObject *)s);
    Py_DECREF(type);
}

static PyMethodDef shortcut_methods[] = {
    {"issue", (PyCFunction)(void (*)(void))shortcut_issue, METH_FASTCALL, NULL},
    {NULL}};
static PyMemberDef shortcut_members[] = {{"checked", T_BOOL, offsetof(Shortcut, checked), 0, NULL},
                                         {"met", T_BOOL, offsetof(Shortcut, met), READONLY, NULL},
                                         {NULL}};
static PyType_Slot shortcut_slots[] = {{Py_tp_init, shortcut_init},
                                       {Py_tp_members, shortcut_members},
                                       {Py_tp_new, PyType_GenericNew},
                                       {Py_tp_dealloc, shortcut_dealloc},
                                       {Py_tp_traverse, shortcut_traverse},
                                       {Py_tp_clear, shortcut_clear},
                                       {Py_tp_methods, shortcut_methods},
                                       {0, NULL}};
PyType_Spec shortcut_spec = {"transport.native._core.Shortcut", sizeof(Shortcut), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, shortcut_slots};

int init_shortcut(void) {
    str_cpu = PyUnicode_InternFromString("cpu");
    str_code = PyUnicode_InternFromString("code");
    debug_level = PyLong_FromLong(10);
    return str_cpu && str_code && debug_level ? init_turns() : -1;
}
