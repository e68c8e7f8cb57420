/* Calls whose data goes through the blocks of a board a lap at a time, with the steps and notes of
 * transport/shm/collectives/copies.py, exchange.py and sharing.py. */
#pragma once
#include "core.h"
#include "memory/staging.h"

/* What all such calls of a group share. */
typedef struct {
    PyObject_HEAD
    Board *board;
    PyObject *python; /* the transport.shm.board.board.Board */
    Staging staging;
} Laps;

/* The memory of arrays while a call runs. */
typedef struct {
    int count;
    Py_buffer views[MOST];
} Arrays;

/* Export an array, or each of a list of `count`: -1, with nothing exported and no exception, where
 * that is not possible. */
int export_one(Arrays *arrays, PyObject *array, int flags);
int export_each(Arrays *arrays, PyObject *list, int count, int flags);
void release(Arrays *arrays);

/* Begin a call (Board.begin), and give up the interpreter's lock: -1, with the lock and an exception. */
int begin_laps(Laps *laps, Run *run, PyObject *call);

/* How much is moved between two looks for signals, which Python's way sees at each of its steps. */
#define UNINTERRUPTED (64 << 20)

/* Have signals handled that came meanwhile: -1 with what a handler raised. */
int see_signals(Run *run);

/* End one of several laps (Board.close). */
void close_laps(Run *run);

/* The laps that `size` bytes take, and how many of them lap number `lap` has. */
static inline uint64_t laps_of(uint64_t size, uint64_t per_lap) {
    return size > per_lap ? (size + per_lap - 1) / per_lap : 1;
}
static inline uint64_t part_of(uint64_t size, uint64_t per_lap, uint64_t lap) {
    uint64_t start = lap * per_lap;
    if (start >= size) return 0;
    return size - start < per_lap ? size - start : per_lap;
}

/* The methods. They return True where the call is done; False where it is begun, all that are
 * waited for have met, and something is not as usual; None where nothing was done. */
PyObject *laps_all_reduce(Laps *laps, PyObject *const *args, Py_ssize_t count);
PyObject *laps_broadcast(Laps *laps, PyObject *const *args, Py_ssize_t count);
PyObject *laps_exchange(Laps *laps, PyObject *const *args, Py_ssize_t count);
PyObject *laps_reduce_scatter(Laps *laps, PyObject *const *args, Py_ssize_t count);

extern PyType_Spec laps_spec;
int init_laps(void);
