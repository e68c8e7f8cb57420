/* Numbers and records the common calls of a group. If the ranks share memory, the engine also makes these calls. */
#include "kinds.h"

#define KNOWN_LOCKS 16

/* The lock of messages to a peer, or of messages from a peer with a tag. */
typedef struct {
    int kind, peer;
    uint32_t tag;
    StreamLock *lock;
} PeerLock;

typedef struct {
    PyObject_HEAD
    GroupObject *group; /* NULL: the ranks share no memory; calls are opened here, but Python makes them */
    Order *order;
    char checked; /* 0: calls are neither recorded nor compared, to measure the cost of doing so */
    char met;     /* 0: the members are not connected yet, so Python makes collectives */
    GroupFacts facts;
    PyObject *senders, *receivers; /* lists of the rings to and from each member; entries of None: Python */
    PyObject *arrived[4];          /* receives and messages that Python handles; all must be empty for a receive here */
    /* Shared with the calls that Python makes: the recorder, checks and functions. */
    Recorder *ring;
    PyObject *id, *resume, *carry_message, *run, *observers, *is_logged, *of_peer;
    StreamLock *collectives;
    PeerLock known[KNOWN_LOCKS]; /* a cache of of_peer(kind, peer, tag) for the last point-to-point calls */
    int known_count, next_known;
} FastPath;

/* A call that is made here. */
typedef struct {
    Header header;
    long long nbytes;
    PyObject *kind; /* of a message */
    int peer;
    double seconds;
    StreamLock *lock;
    Opening opening;
    Fields *record; /* NULL if not checked */
} NewCall;

static PyObject *str_cpu, *debug_level;

/* Acquire the lock of a call if no special case applies. Return 1, 0, or -1 with an exception. The GIL is held from
 * here until the call is recorded, which preserves the order of calls. */
static int enter_stream(FastPath *s, StreamLock *lock, int peer) {
    if (PyTuple_GET_SIZE(s->ring->followers) || s->ring->annotate != Py_None) return 0;
    if (peer == COLLECTIVE && PyDict_GET_SIZE(s->observers)) return 0;
    PyObject *is_logged = PyObject_CallOneArg(s->is_logged, debug_level);
    Py_XDECREF(is_logged); /* True or False */
    if (is_logged != Py_False) return is_logged ? 0 : -1;
    return s->order->numbering ? 0 : try_enter(lock);
}

/* Number a call whose lock is held, and find its caller. Return 0, or -1 with an exception and the lock released. */
static int open_call(FastPath *s, NewCall *call) {
    int collective = call->peer == COLLECTIVE;
    call->record = NULL;
    Py_BEGIN_CRITICAL_SECTION(s->order);
    call->header.sequence = collective ? ++s->order->sequence : ++s->order->messages;
    if (collective && s->checked) {
        call->header.history = s->order->history;
        s->order->history = history_after(&call->header);
    }
    Py_END_CRITICAL_SECTION();
    if (!s->checked) return 0;
    /* Other threads may run during this; their calls have later numbers. */
    if (prepare_record(s->ring, &call->opening) == 0) return 0;
    leave_with(call->lock, NULL);
    return -1;
}

static void record(FastPath *s, NewCall *call) {
    if (!s->checked) return;
    call->record = fill_record(&call->opening, s->id, &call->header, call->nbytes, call->peer, 1, call->seconds);
    call->record->started = call->record->issued;
}

/* ------------------------------------------------------------------ calls of the engine */

/* Make a call whose arrays are exported. Return 0, or -1 with an exception. */
static int carry_out(FastPath *s, NewCall *call, CallSpecification *what) {
    GroupObject *o = s->group;
    what->header = call->header;
    o->sync = 1;
    /* A small call is recorded after it has started, while data is in flight. Starting a large call releases the GIL,
     * so it is recorded first, to keep records in the order of calls. */
    int small = transport->is_small(o);
    if (!small) record(s, call);
    Status status = transport->begin_call(o, what);
    if (small) record(s, call);
    if (status == AGAIN) status = transport->carry_on(o);
    while (status == AGAIN && !s->checked) status = transport->carry_on(o);
    if (status == DONE_ALL) {
        transport->release_arrays(o);
        if (call->record) call->record->ended = monotonic();
        Py_XDECREF(call->record);
        return 0;
    }
    o->group.wake_requested = 0; /* Python first checks why the call was woken. */
    /* Called from here, so that the lock is released even if a signal ends `resume` before its first line. */
    PyObject *record = call->record ? (PyObject *)call->record : Py_NewRef(Py_None);
    PyObject *done = PyObject_CallFunction(s->resume, "Oi", record, (int)status);
    Py_DECREF(record);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* ------------------------------------------------------------------ calls of Python */

/* Return the lock of a point-to-point call (a new reference), or NULL with an exception. */
static StreamLock *lock_of_peer(FastPath *s, PyObject *kind, int peer, uint32_t tag) {
    long number = PyLong_AsLong(kind);
    for (int i = 0; i < s->known_count; i++) {
        const PeerLock *known = &s->known[i];
        if (known->kind == number && known->peer == peer && (known->tag == tag || number == SEND))
            return (StreamLock *)Py_NewRef(known->lock);
    }
    PyObject *found = PyObject_CallFunction(s->of_peer, "OiI", kind, peer, (unsigned int)tag);
    if (!found) return NULL;
    if (!PyObject_TypeCheck(found, lock_type)) {
        PyErr_Format(PyExc_TypeError, "expected a StreamLock, got %R", found);
        Py_DECREF(found);
        return NULL;
    }
    /* Another thread may have added the same lock; a duplicate in the table is harmless. */
    int at = s->known_count < KNOWN_LOCKS ? s->known_count++ : s->next_known;
    s->next_known = (at + 1) % KNOWN_LOCKS;
    PyObject *before = (PyObject *)s->known[at].lock;
    s->known[at] = (PeerLock){(int)number, peer, tag, (StreamLock *)Py_NewRef(found)};
    Py_XDECREF(before);
    return (StreamLock *)found;
}

/* ------------------------------------------------------------------ messages */

static int none_arrived(const FastPath *s) {
    for (int i = 0; i < 4; i++)
        if (PyObject_Size(s->arrived[i])) return 0;
    return 1;
}

/* Return the ring for a message, or NULL if Python must handle the message. */
static RingObject *find_ring(const FastPath *s, int kind, int peer) {
    PyObject *rings = kind == SEND ? s->senders : s->receivers;
    if (!rings || peer >= PyList_GET_SIZE(rings) || (kind == RECV && !none_arrived(s))) return NULL;
    PyObject *ring = PyList_GET_ITEM(rings, peer);
    return Py_IS_TYPE(ring, transport->ring_end_type) ? (RingObject *)ring : NULL;
}

/* Send or receive an opened message. If it has to wait, Python continues it. */
static PyObject *carry_message(FastPath *s, NewCall *call, const Py_buffer *view, PyObject *array) {
    int kind = call->header.kind;
    record(s, call);
    /* Find the ring again, because recording may have run other code. */
    RingObject *ring = find_ring(s, kind, call->peer);
    Py_XINCREF(ring);
    int done = ring && (kind == SEND ? transport->send_now : transport->receive_now)(ring, &call->header, view);
    Py_XDECREF(ring);
    PyObject *gone_on = NULL;
    if (done) call->record->ended = monotonic();
    else gone_on = PyObject_CallFunction(s->carry_message, "OiO", call->record, kind, array);
    Py_XDECREF(gone_on);
    Py_DECREF(call->record);
    if (!done && !gone_on) return NULL;
    return kind == SEND ? Py_NewRef(Py_None) : PyLong_FromLong(s->facts.ranks[call->peer]);
}

static PyObject *message(FastPath *s, NewCall *call, const Arguments *given) {
    int kind = call->header.kind;
    PyObject *array = given->arguments[0];
    Py_buffer view;
    if (!s->checked || !find_ring(s, kind, call->peer) || !Py_IS_TYPE(array, s->facts.array_type) ||
        !transport->export_view(array, kind == RECV, &view))
        Py_RETURN_NOTIMPLEMENTED;
    call->nbytes = view.len;
    call->header.elements = (uint64_t)(view.len / view.itemsize);
    call->header.dtype = (uint16_t)transport->dtype_of(&view);
    PyObject *result = NULL;
    call->lock = lock_of_peer(s, call->kind, call->peer, call->header.extra);
    int entered = call->lock ? enter_stream(s, call->lock, call->peer) : -1;
    if (!entered) result = Py_NewRef(Py_NotImplemented);
    if (entered > 0 && !open_call(s, call)) result = leave_with(call->lock, carry_message(s, call, &view, array));
    Py_XDECREF(call->lock);
    PyBuffer_Release(&view);
    return result;
}

/* ------------------------------------------------------------------ the entry */

/* make(kind, listed, arguments, seconds): make a call of `kind` with the arguments of its Python method. */
static PyObject *fast_path_make(FastPath *s, PyObject *const *args, Py_ssize_t count) {
    if (!s->group && !s->senders) Py_RETURN_NOTIMPLEMENTED;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "expected kind, listed, arguments and seconds");
    NewCall call = {.peer = COLLECTIVE, .lock = s->collectives};
    if (PyFloat_CheckExact(args[3])) call.seconds = PyFloat_AS_DOUBLE(args[3]);
    else if (PyLong_CheckExact(args[3])) call.seconds = PyLong_AsDouble(args[3]);
    else call.seconds = -1;
    Arguments given;
    CallSpecification what;
    if (PyErr_Occurred()) PyErr_Clear();
    long kind = PyLong_AsLong(args[0]);
    if (kind == -1 && PyErr_Occurred()) return NULL;
    if (!(call.seconds >= 0) || !read_arguments(&s->facts, kind, args[1] == Py_True, args[2], &given))
        Py_RETURN_NOTIMPLEMENTED;
    if (kind >= SEND) {
        call.kind = args[0];
        call.peer = given.root;
        call.header = (Header){.root = NO_ROOT, .kind = (uint16_t)kind, .extra = given.tag};
        return message(s, &call, &given);
    }
    int entered = s->group ? enter_stream(s, call.lock, COLLECTIVE) : 0;
    if (entered > 0 && !take_arguments(&s->facts, s->group, &given, &what, &call.nbytes)) {
        leave_with(call.lock, NULL);
        entered = 0;
    }
    if (entered <= 0) return entered < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    call.header = what.header;
    if (open_call(s, &call) < 0) {
        transport->release_arrays(s->group);
        return NULL;
    }
    return leave_with(call.lock, carry_out(s, &call, &what) < 0 ? NULL : result_of(&given));
}

/* Open a call, and let Python's `run` make it. */
static PyObject *run(FastPath *s, CallSpec *spec, NewCall *call) {
    int entered = enter_stream(s, call->lock, call->peer);
    if (entered <= 0) return entered < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    if (open_call(s, call) < 0) return NULL;
    record(s, call);
    PyObject *result = PyObject_CallFunctionObjArgs(s->run, spec->run, (PyObject *)call->record, str_cpu, NULL);
    Py_DECREF(call->record);
    return leave_with(call->lock, result);
}

/* open(spec, seconds): number and record a call, and let Python make it. */
static PyObject *fast_path_open(FastPath *s, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !Py_IS_TYPE(args[0], spec_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a CallSpec and seconds");
        return NULL;
    }
    CallSpec *spec = (CallSpec *)args[0];
    NewCall call = {.seconds = PyFloat_AsDouble(args[1]), .nbytes = spec->nbytes, .header = spec->header,
                    .peer = spec->peer, .lock = s->collectives};
    if (PyErr_Occurred()) return NULL;
    if (!is_on_host(spec) || !s->checked || (call.peer == COLLECTIVE && !s->met)) Py_RETURN_NOTIMPLEMENTED;
    if (call.peer == COLLECTIVE) return run(s, spec, &call);
    if (!(call.lock = lock_of_peer(s, spec->kind, spec->peer, spec->header.extra))) return NULL;
    PyObject *result = run(s, spec, &call);
    Py_DECREF(call.lock);
    return result;
}

/* ------------------------------------------------------------------ the type */

static int keep_ranks(GroupFacts *u, PyObject *ranks) {
    u->size = (int)PyTuple_GET_SIZE(ranks);
    u->ranks = PyMem_Calloc((size_t)u->size + 1, sizeof *u->ranks);
    if (!u->ranks) PyErr_NoMemory();
    for (int i = 0; u->ranks && i < u->size; i++) u->ranks[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(ranks, i));
    return PyErr_Occurred() ? -1 : 0;
}

/* FastPath(native, rings, met, parts): `native` is the engine's group or None; `rings` is the result of `Messages.rings`
 * or None. `parts` is (id, ranks, resume, carry_message, run, order, collectives, of_peer, ring, observers, is_logged,
 * ops, array type). */
static int fast_path_init(FastPath *s, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *native, *rings, *id, *ranks, *resume, *carry_message, *run, *order, *collectives, *of_peer, *ring, *observers, *is_logged, *ops,
        *array_type;
    int met;
    if (s->order) {
        PyErr_SetString(PyExc_RuntimeError, "this FastPath is already initialised");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OOp(OO!OOOO!O!OO!O!OO!O!)", &native, &rings, &met, &id, &PyTuple_Type, &ranks,
                          &resume, &carry_message, &run, order_type, &order, lock_type, &collectives, &of_peer, recorder_type, &ring, &PyDict_Type,
                          &observers, &is_logged, &PyTuple_Type, &ops, &PyType_Type, &array_type))
        return -1;
    if (native != Py_None && !Py_IS_TYPE(native, transport->group_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Group or None, got %R", native);
        return -1;
    }
#ifndef Py_GIL_DISABLED /* Only the GIL keeps other threads from using a ring at the same time. */
    if (rings != Py_None) {
        PyObject *const *found = s->arrived;
        if (!PyArg_ParseTuple(rings, "O!O!OOOO", &PyList_Type, &s->senders, &PyList_Type, &s->receivers, &s->arrived[0],
                              &s->arrived[1], &s->arrived[2], &s->arrived[3])) {
            s->senders = s->receivers = NULL;
            memset(s->arrived, 0, sizeof s->arrived);
            return -1;
        }
        Py_INCREF(s->senders);
        Py_INCREF(s->receivers);
        for (int i = 0; i < 4; i++) Py_INCREF(found[i]);
    }
#endif
    s->checked = 1;
    s->met = (char)met;
    s->group = native == Py_None ? NULL : (GroupObject *)Py_NewRef(native);
    s->order = (Order *)Py_NewRef(order);
    s->id = Py_NewRef(id);
    s->resume = Py_NewRef(resume);
    s->carry_message = Py_NewRef(carry_message);
    s->run = Py_NewRef(run);
    s->collectives = (StreamLock *)Py_NewRef(collectives);
    s->of_peer = Py_NewRef(of_peer);
    s->ring = (Recorder *)Py_NewRef(ring);
    s->observers = Py_NewRef(observers);
    s->is_logged = Py_NewRef(is_logged);
    s->facts.ops = Py_NewRef(ops);
    s->facts.array_type = (PyTypeObject *)Py_NewRef(array_type);
    return keep_ranks(&s->facts, ranks);
}

#define EACH_OBJECT(DO)                                                                                    \
    DO(s->group) DO(s->order) DO(s->ring) DO(s->id) DO(s->resume) DO(s->carry_message) DO(s->run) DO(s->observers)             \
    DO(s->is_logged) DO(s->of_peer) DO(s->collectives) DO(s->senders) DO(s->receivers) DO(s->arrived[0]) DO(s->arrived[1])      \
    DO(s->arrived[2]) DO(s->arrived[3]) DO(s->facts.ops) DO(s->facts.array_type)

static int fast_path_traverse(FastPath *s, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(s));
#define DO(X) Py_VISIT(X);
    EACH_OBJECT(DO)
#undef DO
    for (int i = 0; i < s->known_count; i++) Py_VISIT(s->known[i].lock);
    return 0;
}

static int fast_path_clear(FastPath *s) {
#define DO(X) Py_CLEAR(X);
    EACH_OBJECT(DO)
#undef DO
    while (s->known_count) {
        StreamLock *lock = s->known[--s->known_count].lock;
        Py_DECREF(lock);
    }
    return 0;
}

static void fast_path_dealloc(FastPath *s) {
    PyTypeObject *type = Py_TYPE(s);
    PyObject_GC_UnTrack(s);
    fast_path_clear(s);
    PyMem_Free(s->facts.ranks);
    type->tp_free((PyObject *)s);
    Py_DECREF(type);
}

static PyMethodDef fast_path_methods[] = {
    {"make", (PyCFunction)(void (*)(void))fast_path_make, METH_FASTCALL, NULL},
    {"open", (PyCFunction)(void (*)(void))fast_path_open, METH_FASTCALL, NULL},
    {NULL}};
static PyMemberDef fast_path_members[] = {{"checked", T_BOOL, offsetof(FastPath, checked), 0, NULL},
                                         {"met", T_BOOL, offsetof(FastPath, met), READONLY, NULL},
                                         {NULL}};
static PyType_Slot fast_path_slots[] = {{Py_tp_init, fast_path_init},
                                       {Py_tp_members, fast_path_members},
                                       {Py_tp_new, PyType_GenericNew},
                                       {Py_tp_dealloc, fast_path_dealloc},
                                       {Py_tp_traverse, fast_path_traverse},
                                       {Py_tp_clear, fast_path_clear},
                                       {Py_tp_methods, fast_path_methods},
                                       {0, NULL}};
PyType_Spec fast_path_spec = {"meshlib._native._calls.FastPath", sizeof(FastPath), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, fast_path_slots};

int init_fast_path(void) {
    str_cpu = PyUnicode_InternFromString("cpu");
    debug_level = PyLong_FromLong(10);
    return str_cpu && debug_level ? 0 : -1;
}
