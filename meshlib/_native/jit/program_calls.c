/* Calls of a compiled program on a group whose members share memory. This code numbers and records them, and the engine
 * makes them. Python handles all special cases.
 */
#include "program_calls.h"

static PyTypeObject *calls_type;

/* ------------------------------------------------------------------ records */

static Entry *begin_entry(const ProgramCall *call, const Header *header) {
    Calls *calls = call->calls;
    uint64_t number = calls->count + 1;
    Entry *entry = &calls->entries[number % calls->capacity];
    entry->number = 0;
    entry->header = *header;
    entry->issued = monotonic();
    entry->ended = 0;
    entry->nbytes = call->nbytes;
    entry->thread = PyThread_get_thread_ident();
    entry->peer = call->peer;
    entry->site = call->site;
    entry->number = calls->count = number;
    return entry;
}

/* ------------------------------------------------------------------ calls */

static int is_usual(const Calls *calls) {
    /* Values that change during this check take effect at the next call. */
    int wake_requested = calls->group && calls->group->group.wake_requested;
    return calls->open_until > monotonic() && !wake_requested && !calls->recorder->watched &&
           calls->recorder->annotate == Py_None && !PyDict_GET_SIZE(calls->recorder->labels) &&
           !PyDict_GET_SIZE(calls->observers);
}

static Outcome collective(ProgramCall *call, const Memory *buffers, Header *header) {
    Calls *calls = call->calls;
    GroupObject *o = calls->group;
    if (!o) return REFUSED;
    header->sequence = ++calls->order->sequence;
    header->history = calls->order->history;
    calls->order->history = history_after(header);
    Entry *entry = begin_entry(call, header);
    for (int i = 0; i < call->count; i++) {
        const Place *at = &call->places[i];
        o->group.arrays[i] = (Array){.data = buffers[at->buffer].data + at->offset, .nbytes = at->nbytes};
    }
    CallSpecification what = {.kind = header->kind, .root = header->root == NO_ROOT ? 0 : header->root,
                              .inputs = call->inputs, .count = call->count, .reduces = call->loops != NULL,
                              .header = *header, .loops = call->loops};
    o->sync = 1;
    Status status = transport->group_begin(&o->group, &what, SLEEP);
    entry->ended = monotonic();
    if (status == DONE_ALL) return MADE;
    entry->number = 0;           /* Python creates its own record. */
    o->group.wake_requested = 0; /* Python first checks why the call was woken. */
    return BEGUN;
}

/* Return the memory of a message's only array. */
static Memory only(const ProgramCall *call, const Memory *buffers) {
    const Place *at = &call->places[0];
    return (Memory){buffers[at->buffer].data + at->offset, at->nbytes};
}

static RingObject *writer_for(const ProgramCall *call) {
    RingObject *end = call->calls->pairs[call->peer].writer;
    return end && end->lent && !transport->ring_is_broken(&end->ring) ? end : NULL;
}

/* Borrow the reader's end of a ring, which the receive returns; NULL if it is unavailable. */
static RingObject *borrow_reader(const ProgramCall *call) {
    RingObject *end = call->calls->pairs[call->peer].reader;
    int expected = LENT;
    return end && atomic_compare_exchange_strong(&end->lent, &expected, IN_USE) ? end : NULL;
}

static Entry *begin_message(const ProgramCall *call, Header *header) {
    *header = call->header;
    header->sequence = ++call->calls->order->messages;
    return begin_entry(call, header);
}

static Outcome send(const ProgramCall *call, RingObject *end, const Memory *buffers, Header *header) {
    Memory data = only(call, buffers);
    Entry *entry = begin_message(call, header);
    Status status = transport->ring_begin(&end->ring, header, data.data, data.nbytes, SPIN);
    entry->ended = monotonic();
    if (status == DONE_ALL) return MADE;
    entry->number = 0;
    return BEGUN; /* The ring is full, so Python waits. */
}

static Outcome receive(const ProgramCall *call, RingObject *end, const Memory *buffers, Header *header) {
    Memory into = only(call, buffers);
    Entry *entry = begin_message(call, header);
    Status status = transport->receive_lent(end, header, into.data, into.nbytes);
    entry->ended = monotonic();
    if (status == DONE_ALL) return MADE;
    entry->number = 0;
    return BEGUN;
}

/* Send a message, if the ring has enough room for it, and receive another. */
static Outcome exchange(const ProgramCall *call, const Memory *buffers, Header *header) {
    const ProgramCall *sending = call->sending;
    Memory from = only(sending, buffers), into = only(call, buffers);
    int self = call->calls->rank;
    if (sending->peer == self && call->peer == self) {
        if (!call->calls->self_is_free || from.nbytes != into.nbytes) return REFUSED;
        Entry *sent = begin_message(sending, header), *received = begin_message(call, header);
        memcpy(into.data, from.data, into.nbytes);
        sent->ended = received->ended = monotonic();
        return MADE;
    }
    RingObject *writer = writer_for(sending), *reader;
    if (!writer || !transport->ring_has_room(&writer->ring, from.nbytes) || !(reader = borrow_reader(call))) return REFUSED;
    send(sending, writer, buffers, header);
    return receive(call, reader, buffers, header);
}

static Outcome message(const ProgramCall *call, const Memory *buffers, Header *header) {
    if (call->sending) return exchange(call, buffers, header);
    RingObject *end = call->header.kind == SEND ? writer_for(call) : borrow_reader(call);
    if (!end) return REFUSED;
    return call->header.kind == SEND ? send(call, end, buffers, header) : receive(call, end, buffers, header);
}

Outcome make_call(ProgramCall *call, const Memory *buffers, Header *header) {
    Calls *calls = call->calls;
    if (!calls || !is_usual(calls)) return REFUSED;
    *header = call->header;
    atomic_store(&calls->busy, 1);
    Outcome outcome = call->peer == COLLECTIVE ? collective(call, buffers, header) : message(call, buffers, header);
    atomic_store(&calls->busy, 0);
    if (outcome != MADE) calls->open_until = 0; /* until Python has checked the group */
    else if (call->clears)
        for (int i = call->operands; i < call->operands + call->results; i++)
            memset(buffers[i].data, 0, buffers[i].nbytes);
    return outcome;
}

/* ------------------------------------------------------------------ the type of a group's calls */

/* ProgramCalls(order, recorder, observers, rank, size, capacity): the calls of one member of a group. */
static int calls_init(Calls *calls, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *order, *recorder, *observers;
    Py_ssize_t capacity;
    int rank, size;
    if (calls->order) {
        PyErr_SetString(PyExc_RuntimeError, "this ProgramCalls is already initialised");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O!O!O!iin", order_type, &order, recorder_type, &recorder, &PyDict_Type, &observers,
                          &rank, &size, &capacity))
        return -1;
    if (capacity < 1 || size < 1) {
        PyErr_SetString(PyExc_ValueError, "expected a size and a capacity of at least 1");
        return -1;
    }
    calls->rank = rank, calls->size = size;
    calls->order = (Order *)Py_NewRef(order);
    calls->recorder = (Recorder *)Py_NewRef(recorder);
    calls->observers = Py_NewRef(observers);
    calls->capacity = (uint64_t)capacity;
    calls->entries = PyMem_Calloc((size_t)capacity, sizeof *calls->entries);
    calls->pairs = PyMem_Calloc((size_t)size, sizeof *calls->pairs);
    if (calls->entries && calls->pairs) return 0;
    PyErr_NoMemory();
    return -1;
}

static void calls_dealloc(Calls *calls) {
    PyTypeObject *type = Py_TYPE(calls);
    for (int i = 0; calls->pairs && i < calls->size; i++) {
        Py_XDECREF(calls->pairs[i].writer);
        Py_XDECREF(calls->pairs[i].reader);
    }
    PyMem_Free(calls->pairs);
    PyMem_Free(calls->entries);
    Py_XDECREF(calls->group);
    Py_XDECREF(calls->order);
    Py_XDECREF(calls->recorder);
    Py_XDECREF(calls->observers);
    type->tp_free((PyObject *)calls);
    Py_DECREF(type);
}

/* open(seconds): allow calls without Python for `seconds`, after which Python checks again; 0: not at all. */
static PyObject *calls_open(Calls *calls, PyObject *value) {
    double seconds = PyFloat_AsDouble(value);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    if (seconds > 0) calls->open_until = monotonic() + seconds;
    else calls->open_until = 0;
    if (seconds <= 0 && calls->group) calls->group->group.wake_requested = 0; /* Python now checks why it was woken. */
    Py_RETURN_NONE;
}

/* attach(group): set the engine's group at the first call. Return whether `group` is the one that was set. */
static PyObject *calls_attach(Calls *calls, PyObject *group) {
    if (!Py_IS_TYPE(group, transport->group_type)) return PyErr_Format(PyExc_TypeError, "expected a Group, got %R", group);
    if (!calls->group) calls->group = (GroupObject *)Py_NewRef(group); /* never replaced: a call may be using it */
    return PyBool_FromLong(calls->group == (GroupObject *)group);
}

/* connect(peer, writer or None, reader): set the rings to and from a member, which Python lends. */
static PyObject *calls_connect(Calls *calls, PyObject *args) {
    int peer;
    PyObject *writer, *reader;
    if (!PyArg_ParseTuple(args, "iOO!", &peer, &writer, transport->ring_end_type, &reader)) return NULL;
    if (writer != Py_None && !PyObject_TypeCheck(writer, transport->ring_end_type))
        return PyErr_Format(PyExc_TypeError, "expected a RingEnd or None, got %R", writer);
    if (peer < 0 || peer >= calls->size) return PyErr_Format(PyExc_ValueError, "no member %d", peer);
    Pair *pair = &calls->pairs[peer];
    /* Never replaced: a call may be using them. */
    if (!pair->writer && writer != Py_None) pair->writer = (RingObject *)Py_NewRef(writer);
    if (!pair->reader) pair->reader = (RingObject *)Py_NewRef(reader);
    Py_RETURN_NONE;
}

/* entries(): a list of (number, packed, issued, ended, nbytes, peer, site, thread) of the last calls, oldest first. */
static PyObject *calls_entries(Calls *calls, PyObject *Py_UNUSED(none)) {
    PyObject *list = PyList_New(0);
    uint64_t last = calls->count, first = last > calls->capacity ? last - calls->capacity + 1 : 1;
    for (uint64_t number = first; list && number <= last; number++) {
        Entry *entry = &calls->entries[number % calls->capacity];
        if (entry->number != number) continue;
        Entry copy;
        memcpy(&copy, entry, sizeof copy);
        if (entry->number != number) continue; /* It was overwritten during the copy. */
        PyObject *item = Py_BuildValue("Ky#ddLiik", (unsigned long long)number, (const char *)&copy.header, (Py_ssize_t)HEADER_BYTES,
                                       copy.issued, copy.ended, copy.nbytes, copy.peer, copy.site, copy.thread);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *get_busy(Calls *calls, void *Py_UNUSED(closure)) { return PyBool_FromLong(calls->busy); }

static PyGetSetDef calls_computed[] = {{"busy", (getter)(void (*)(void))get_busy, NULL, NULL, NULL}, {NULL}};
/* set_self(free): set whether no message of this member to itself is pending. */
static PyObject *calls_set_self(Calls *calls, PyObject *value) {
    calls->self_is_free = value == Py_True;
    Py_RETURN_NONE;
}

static PyMethodDef calls_methods[] = {{"open", (PyCFunction)(void (*)(void))calls_open, METH_O, NULL},
                                      {"attach", (PyCFunction)calls_attach, METH_O, NULL},
                                      {"set_self", (PyCFunction)calls_set_self, METH_O, NULL},
                                      {"connect", (PyCFunction)(void (*)(void))calls_connect, METH_VARARGS, NULL},
                                      {"entries", (PyCFunction)(void (*)(void))calls_entries, METH_NOARGS, NULL},
                                      {NULL}};
static PyType_Slot calls_slots[] = {{Py_tp_init, calls_init},       {Py_tp_new, PyType_GenericNew},
                                    {Py_tp_dealloc, calls_dealloc}, {Py_tp_methods, calls_methods},
                                    {Py_tp_getset, calls_computed}, {0, NULL}};
static PyType_Spec calls_spec = {"meshlib._native._calls.ProgramCalls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT,
                                 calls_slots};

/* ------------------------------------------------------------------ the type of a call */

/* ProgramCall(sending, calls, owner, header fields, reduces, nbytes, peer, site, clears, operands, results, inputs, places)
 *
 * `operands` and `results` have the item size of each. A place is (buffer, offset, nbytes). If `calls` is None, Python
 * makes the call. */
static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *sending, *calls, *owner, *fields, *places, *operands, *results;
    long long nbytes;
    int peer, site, clears, inputs, reduces;
    if (!PyArg_ParseTuple(args, "OOOO!pLiipO!O!iO!", &sending, &calls, &owner, &PyTuple_Type, &fields, &reduces, &nbytes,
                          &peer, &site, &clears, &PyTuple_Type, &operands, &PyTuple_Type, &results, &inputs,
                          &PyList_Type, &places))
        return NULL;
    if (calls != Py_None && !Py_IS_TYPE(calls, calls_type))
        return PyErr_Format(PyExc_TypeError, "expected ProgramCalls or None, got %R", calls);
    if (sending != Py_None && Py_TYPE(sending) != type)
        return PyErr_Format(PyExc_TypeError, "expected a ProgramCall or None, got %R", sending);
    if (PyTuple_GET_SIZE(fields) != HEADER_ARGS) return PyErr_Format(PyExc_TypeError, "expected %d fields", HEADER_ARGS);
    Py_ssize_t count = PyList_GET_SIZE(places);
    ProgramCall *call = (ProgramCall *)type->tp_alloc(type, count);
    if (!call) return NULL;
    call->owner = Py_NewRef(owner);
    call->sending = sending == Py_None ? NULL : (ProgramCall *)Py_NewRef(sending);
    call->nbytes = nbytes;
    call->peer = peer, call->site = site, call->clears = clears;
    call->operands = (int)PyTuple_GET_SIZE(operands), call->results = (int)PyTuple_GET_SIZE(results);
    call->inputs = inputs, call->count = (int)count;
    int buffers = call->operands + call->results;
    int failed = read_header(&PyTuple_GET_ITEM(fields, 0), &call->header) < 0;
    call->itemsizes = failed ? NULL : PyMem_Calloc((size_t)buffers + 1, sizeof *call->itemsizes);
    if (!failed && !call->itemsizes) PyErr_NoMemory(), failed = 1;
    for (int i = 0; !failed && i < buffers; i++) {
        PyObject *of = i < call->operands ? PyTuple_GET_ITEM(operands, i) : PyTuple_GET_ITEM(results, i - call->operands);
        call->itemsizes[i] = PyLong_AsUnsignedLongLong(of);
        failed = PyErr_Occurred() != NULL;
    }
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        unsigned long long offset, size;
        Place *place = &call->places[i];
        failed = !PyArg_ParseTuple(PyList_GET_ITEM(places, i), "iKK", &place->buffer, &offset, &size);
        place->offset = offset, place->nbytes = size;
        if (!failed && (place->buffer < 0 || place->buffer >= buffers))
            PyErr_Format(PyExc_ValueError, "no buffer %d", place->buffer), failed = 1;
    }
    if (!failed && reduces) call->loops = transport->find_loops(call->header.dtype, call->header.op);
    if (failed) Py_CLEAR(call);
    else if (calls != Py_None && (!reduces || call->loops)) call->calls = (Calls *)Py_NewRef(calls);
    return (PyObject *)call;
}

static void call_dealloc(ProgramCall *call) {
    PyTypeObject *type = Py_TYPE(call);
    Py_XDECREF(call->calls);
    Py_XDECREF(call->owner);
    Py_XDECREF(call->sending);
    PyMem_Free(call->itemsizes);
    type->tp_free((PyObject *)call);
    Py_DECREF(type);
}

/* XLA holds its callbacks, which must be callable, while a program runs. This one is never called: it has no index. */
static PyObject *call_call(PyObject *Py_UNUSED(call), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    PyErr_SetString(PyExc_TypeError, "only XLA's handler may call a ProgramCall");
    return NULL;
}

static PyObject *get_of_meshlib(PyObject *Py_UNUSED(call), void *Py_UNUSED(closure)) { Py_RETURN_TRUE; }
static PyGetSetDef call_computed[] = {{"of_meshlib", (getter)(void (*)(void))get_of_meshlib, NULL, NULL, NULL}, {NULL}};
static PyMemberDef call_members[] = {{"owner", T_OBJECT_EX, offsetof(ProgramCall, owner), READONLY, NULL}, {NULL}};
static PyType_Slot call_slots[] = {{Py_tp_new, call_new},           {Py_tp_dealloc, call_dealloc},
                                   {Py_tp_call, call_call},         {Py_tp_members, call_members},
                                   {Py_tp_getset, call_computed},   {0, NULL}};
/* Not tracked by the garbage collector, which could clear a running call while only XLA refers to the program. So the
 * objects that it refers to must not refer to it. */
static PyType_Spec call_spec = {"meshlib._native._calls.ProgramCall", sizeof(ProgramCall), sizeof(Place),
                                Py_TPFLAGS_DEFAULT, call_slots};

int add_program_calls(PyObject *module) {
    PyObject *call_type = PyType_FromSpec(&call_spec);
    calls_type = (PyTypeObject *)PyType_FromSpec(&calls_spec);
    if (!call_type || !calls_type || PyModule_AddType(module, calls_type)) return -1;
    return PyModule_AddType(module, (PyTypeObject *)call_type);
}
