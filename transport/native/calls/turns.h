/* The lanes of a group, as the shortcut enters them. */
#pragma once
#include "../core.h"

/* A lane, what is queued there, and its turn's methods (an RLock's); all NULL: none. */
typedef struct {
    PyObject *lane, *queue, *owned, *acquire, *release;
} Turn;

int make_turn(Turn *turn, PyObject *lane, PyObject *queue, PyObject *lock); /* -1 with an exception */
Turn same_turn(const Turn *turn);                                           /* with references of its own */
void drop_turn(Turn *turn);
int visit_turn(const Turn *turn, visitproc visit, void *arg);

/* Take it if nobody has it or waits for it: 1, 0, or -1 with an exception. The calling thread itself may
 * have it, if a signal has come in the middle of its call. Does not give up the interpreter's lock. */
int take_turn(const Turn *turn);
int leave_turn(const Turn *turn);

/* Give the turn back, and return result, or NULL with the exception that there was. */
PyObject *leave_with(const Turn *turn, PyObject *result);

#define KNOWN_TURNS 16

typedef struct {
    int kind, peer;
    uint32_t tag;
    Turn turn;
} PeerTurn;

/* Those of the last point-to-point calls; parts_of_peer(kind, peer, tag) knows all. */
typedef struct {
    PyObject *parts_of_peer;
    int count, next;
    PeerTurn known[KNOWN_TURNS];
} PeerTurns;

/* The turn of a point-to-point call, with references of its own: -1 with an exception. */
int find_turn(PeerTurns *turns, const CallSpec *spec, Turn *found);

int init_turns(void); /* -1 with an exception */
