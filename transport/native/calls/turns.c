/* Whose turn it is: meshlib/calls/lane.py, entered from here. */
#include "turns.h"

static PyObject *str_draining, *str_notify;

int make_turn(Turn *turn, PyObject *lane, PyObject *queue, PyObject *lock) {
    *turn = (Turn){.lane = Py_NewRef(lane), .queue = Py_NewRef(queue)};
    turn->owned = PyObject_GetAttrString(lock, "_is_owned");
    turn->acquire = turn->owned ? PyObject_GetAttrString(lock, "acquire") : NULL;
    turn->release = turn->acquire ? PyObject_GetAttrString(lock, "release") : NULL;
    if (turn->release) return 0;
    drop_turn(turn);
    return -1;
}

Turn same_turn(const Turn *turn) {
    Py_INCREF(turn->lane);
    Py_INCREF(turn->queue);
    Py_INCREF(turn->owned);
    Py_INCREF(turn->acquire);
    Py_INCREF(turn->release);
    return *turn;
}

void drop_turn(Turn *turn) {
    Py_CLEAR(turn->lane);
    Py_CLEAR(turn->queue);
    Py_CLEAR(turn->owned);
    Py_CLEAR(turn->acquire);
    Py_CLEAR(turn->release);
}

int visit_turn(const Turn *turn, visitproc visit, void *arg) {
    Py_VISIT(turn->lane);
    Py_VISIT(turn->queue);
    Py_VISIT(turn->owned);
    Py_VISIT(turn->acquire);
    Py_VISIT(turn->release);
    return 0;
}

int take_turn(const Turn *turn) {
    Py_ssize_t queued = PyObject_Size(turn->queue);
    if (queued) return queued < 0 ? -1 : 0;
    PyObject *value = PyObject_CallNoArgs(turn->owned);
    int mine = value == Py_True;
    Py_XDECREF(value);
    if (!value || mine) return value ? 0 : -1;
    value = PyObject_CallOneArg(turn->acquire, Py_False);
    if (!value) return -1;
    int taken = value == Py_True;
    Py_DECREF(value);
    return taken;
}

int leave_turn(const Turn *turn) {
    PyObject *value = PyObject_CallNoArgs(turn->release);
    if (!value) return -1;
    Py_DECREF(value);
    value = PyObject_GetAttr(turn->lane, str_draining);
    if (!value) return -1;
    int draining = PyObject_IsTrue(value);
    Py_DECREF(value);
    if (draining <= 0) return draining;
    value = PyObject_CallMethodNoArgs(turn->lane, str_notify);
    Py_XDECREF(value);
    return value ? 0 : -1;
}

PyObject *leave_with(const Turn *turn, PyObject *result) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (leave_turn(turn) < 0) {
        Py_CLEAR(result);
        if (type) PyErr_Clear();
    }
    if (type) PyErr_Restore(type, value, trace);
    return result;
}

/* ------------------------------------------------------------------ of messages */

#define SEND 10 /* transport.call.Kind's, whose turns have no tags: meshlib/calls/lanes.py */

static int has(const PeerTurn *of, const CallSpec *spec) {
    return of->kind == spec->header.kind && of->peer == spec->peer &&
           (of->tag == spec->header.extra || of->kind == SEND);
}

int find_turn(PeerTurns *turns, const CallSpec *spec, Turn *found) {
    for (int i = 0; i < turns->count; i++)
        if (has(&turns->known[i], spec)) {
            *found = same_turn(&turns->known[i].turn);
            return 0;
        }
    PyObject *parts = PyObject_CallFunction(turns->parts_of_peer, "OiI", spec->kind, spec->peer,
                                            (unsigned int)spec->header.extra);
    PyObject *lane, *queue, *lock;
    int failed = !parts || !PyArg_ParseTuple(parts, "OOO", &lane, &queue, &lock) ||
                 make_turn(found, lane, queue, lock) < 0;
    Py_XDECREF(parts);
    if (failed) return -1;
    /* Another thread may have come here meanwhile: one of them stands twice then. */
    int at = turns->count < KNOWN_TURNS ? turns->count++ : turns->next;
    turns->next = (at + 1) % KNOWN_TURNS;
    Turn before = turns->known[at].turn;
    turns->known[at] = (PeerTurn){spec->header.kind, spec->peer, spec->header.extra, same_turn(found)};
    drop_turn(&before);
    return 0;
}

int init_turns(void) {
    str_draining = PyUnicode_InternFromString("_draining");
    str_notify = PyUnicode_InternFromString("_notify");
    return str_draining && str_notify ? 0 : -1;
}
