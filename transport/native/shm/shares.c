/* Large all_reduces: each member reduces its share of the data. transport/shm/collectives/sharing.py has the rules,
 * and does the same in Python: places, steps and bytes are equal, so members may differ in who does it.
 */
#include "shm/laps.h"

#define CHUNK 4096 /* bytes that stay in the first cache between a reduction and its copies */
#define NO_ARENA (-1)

typedef struct {
    Run run;
    const Entry *entry;
    char *data; /* the array, which ends up with the result */
    size_t nbytes, per_lap;
    int laps, rank, size;
} Sharing;

typedef struct {
    size_t low, high; /* in bytes */
} Bounds;

static Bounds share_of(size_t nbytes, int size, int rank) {
    size_t share = whole_lines((nbytes + (size_t)size - 1) / (size_t)size);
    return (Bounds){least((size_t)rank * share, nbytes), least(((size_t)rank + 1) * share, nbytes)};
}

/* ------------------------------------------------------------------ reducing */

/* Reduce the members' parts into each of them. */
static void reduce_into_all(const Sharing *s, char *parts[], size_t nbytes) {
    if (s->size == 2) {
        s->entry->both(parts[0], parts[1], (Py_ssize_t)nbytes / s->entry->size);
        return;
    }
    char *own = parts[s->rank];
    for (size_t start = 0; start < nbytes; start += CHUNK) {
        size_t now = least(nbytes - start, CHUNK);
        reduce_parts(s->entry, own, (const char *const *)parts, s->size, start, now);
        for (int r = 0; r < s->size; r++)
            if (r != s->rank) copy_bytes(parts[r] + start, own + start, now);
    }
}

/* ------------------------------------------------------------------ laps */

static size_t lap_bytes(const Sharing *s, int lap) {
    return least(s->per_lap, s->nbytes - (size_t)lap * s->per_lap);
}

/* Copy what others reduce in a lap: from the array into this member's block, or back. */
static void move(const Sharing *s, int lap, int back) {
    char *block = block_at(s->run.board, s->rank, run_slot(&s->run, lap));
    char *data = s->data + (size_t)lap * s->per_lap;
    size_t end = lap_bytes(s, lap);
    Bounds own = share_of(end, s->size, s->rank);
    copy_bytes(back ? data : block, back ? block : data, own.low);
    copy_bytes((back ? data : block) + own.high, (back ? block : data) + own.high, end - own.high);
}

static int stage(Sharing *s, int lap, uint64_t step) {
    if (run_claim(&s->run, lap) < 0) return -1;
    move(s, lap, 0);
    run_publish(&s->run, step);
    return 0;
}

static void reduce_lap(const Sharing *s, int lap) {
    Bounds own = share_of(lap_bytes(s, lap), s->size, s->rank);
    int slot = run_slot(&s->run, lap);
    char *parts[MOST];
    for (int r = 0; r < s->size; r++) parts[r] = block_at(s->run.board, r, slot) + own.low;
    parts[s->rank] = s->data + (size_t)lap * s->per_lap + own.low;
    reduce_into_all(s, parts, own.high - own.low);
}

static int run_laps(Sharing *s, uint64_t first) {
    size_t moved = 0;
    for (int lap = 0; lap < s->laps; lap++) {
        if (run_reach_all(&s->run, first + (uint64_t)lap) < 0) return -1;
        reduce_lap(s, lap);
        if (lap + 1 == s->laps)
            run_publish(&s->run, first + (uint64_t)s->laps);
        else if (stage(s, lap + 1, first + (uint64_t)lap + 1) < 0)
            return -1;
        if (lap > 0) move(s, lap - 1, 1);
        moved += s->per_lap;
        if (moved >= UNINTERRUPTED) {
            moved = 0;
            if (see_signals(&s->run) < 0) return -1;
        }
    }
    if (run_reach_all(&s->run, first + (uint64_t)s->laps) < 0) return -1;
    move(s, s->laps - 1, 1);
    return 0;
}

/* ------------------------------------------------------------------ in place */

static int reduce_in_place(Sharing *s, Py_ssize_t apart) {
    Bounds own = share_of(s->nbytes, s->size, s->rank);
    for (size_t low = own.low, now; low < own.high; low += now) {
        now = least(own.high - low, UNINTERRUPTED);
        char *parts[MOST];
        for (int r = 0; r < s->size; r++) parts[r] = s->data + (r - s->rank) * apart + low;
        reduce_into_all(s, parts, now);
        if (low + now < own.high && see_signals(&s->run) < 0) return -1;
    }
    run_publish(&s->run, 2);
    return run_reach_all(&s->run, 2);
}

/* ------------------------------------------------------------------ the call */

/* Stage lap 0 where not all members have the array in one place of the symmetric memory. Returns the
 * step at which all have staged it; 0: all have that place; -1: there is an exception. */
static int enter(Sharing *s, int64_t place) {
    Run *run = &s->run;
    if (place == NO_ARENA) return stage(s, 0, 1) < 0 || run_meet(run) < 0 ? -1 : 1;
    int slot = run_slot(run, 0), anywhere = 0, same = 1;
    notes_at(run->board, s->rank, slot)[0] = (uint64_t)place;
    if (place)
        run_publish(run, 1);
    else if (stage(s, 0, 1) < 0)
        return -1;
    if (run_meet(run) < 0) return -1;
    for (int r = 0; r < s->size; r++) {
        uint64_t where = notes_at(run->board, r, slot)[0];
        anywhere |= where != 0;
        same &= where == (uint64_t)place;
    }
    if (!anywhere) return 1;
    if (same) return 0;
    if (!place)
        run_publish(run, 2);
    else if (stage(s, 0, 2) < 0)
        return -1;
    return 2;
}

static int reduce_all(Sharing *s, int64_t place, Py_ssize_t apart) {
    int first = enter(s, place);
    if (first <= 0) return first < 0 ? -1 : reduce_in_place(s, apart);
    return run_laps(s, (uint64_t)first);
}

/* all_reduce(call, array, op, place, apart): op is its code; place as in Python, and how far apart the
 * members' places are. */
PyObject *laps_all_reduce(Laps *laps, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "expected a call, an array, an op, a place and a distance");
        return NULL;
    }
    long op = PyLong_AsLong(args[2]);
    int64_t place = PyLong_AsLongLong(args[3]);
    Py_ssize_t apart = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred()) return NULL;
    Arrays arrays = {0};
    if (export_one(&arrays, args[1], PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) Py_RETURN_NONE;
    const Py_buffer *view = &arrays.views[0];
    const Board *b = laps->board;
    Sharing s = {.entry = entry_of(view, op), .data = view->buf, .nbytes = (size_t)view->len,
                 .rank = b->rank, .size = b->size};
    if (!s.entry || !s.nbytes) {
        release(&arrays);
        Py_RETURN_NONE;
    }
    s.laps = (int)laps_of(s.nbytes, b->block);
    s.per_lap = whole_lines((s.nbytes + (size_t)s.laps - 1) / (size_t)s.laps);
    int failed = begin_laps(laps, &s.run, args[0]) < 0;
    if (!failed) {
        failed = reduce_all(&s, place, apart) < 0;
        run_end(&s.run);
    }
    release(&arrays);
    if (failed) return NULL;
    Py_RETURN_TRUE;
}
