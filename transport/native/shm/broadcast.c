/* One member's array to all others: transport/shm/collectives/copies.py has the steps. */
#include "shm/laps.h"

typedef struct {
    Run run;
    Staging *staging;
    char *data;
    uint64_t size, piece, laps; /* bytes, and how many pieces */
    int root;
} Passage;

/* Now and then, at the end of a lap. */
static int look_up(Passage *p, uint64_t lap) {
    return (lap + 1) % (1 + UNINTERRUPTED / p->piece) ? 0 : see_signals(&p->run);
}

static int give(Passage *p) {
    Board *b = p->run.board;
    if (p->laps > 1) *notes_at(b, p->root, run_slot(&p->run, 0)) = 0; /* no place where it is read */
    for (uint64_t lap = 0; lap < p->laps; lap++) {
        if (lap >= SLOTS && run_reach_all(&p->run, lap - SLOTS + 2) < 0) return -1;
        int slot = run_claim(&p->run, (int)lap);
        if (slot < 0) return -1;
        size_t part = part_of(p->size, p->piece, lap);
        stage_bytes(p->staging, block_at(b, p->root, slot), (Source){p->data + lap * p->piece}, part, part,
                    (Also){0});
        run_publish(&p->run, FIRST + lap);
        if (look_up(p, lap) < 0) return -1;
    }
    return 1;
}

static int take(Passage *p) {
    const Board *b = p->run.board;
    run_publish(&p->run, FIRST);
    if (run_meet_one(&p->run, p->root) < 0) return -1;
    if (p->laps > 1 && *notes_at(b, p->root, run_slot(&p->run, 0))) return 0;
    for (uint64_t lap = 0; lap < p->laps; lap++) {
        if (run_reach(&p->run, p->root, FIRST + lap) < 0) return -1;
        char *to = p->data + lap * p->piece, *from = block_at(b, p->root, run_slot(&p->run, (int)lap));
        (p->size < STREAMED_BYTES ? copy_bytes : stream_bytes)(to, from, part_of(p->size, p->piece, lap));
        if (p->laps > 1) run_publish(&p->run, FIRST + lap + 1);
        if (look_up(p, lap) < 0) return -1;
    }
    return 1;
}

/* broadcast(call, buffer, root, piece, symmetric): in pieces of so many bytes. Several of what is
 * symmetric are left to Python, which reads them in place. */
PyObject *laps_broadcast(Laps *laps, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "expected a call, an array, a root, a size, and True or False");
        return NULL;
    }
    Passage p = {.staging = &laps->staging, .root = (int)PyLong_AsLong(args[2])};
    p.piece = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (p.root < 0 || p.root >= laps->board->size || !p.piece || p.piece > laps->board->block) {
        PyErr_SetString(PyExc_ValueError, "expected a member, and what fits a block");
        return NULL;
    }
    int is_root = p.root == laps->board->rank;
    Arrays arrays = {0};
    if (export_one(&arrays, args[1], is_root ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) Py_RETURN_NONE;
    p.data = arrays.views[0].buf;
    p.size = (uint64_t)arrays.views[0].len;
    p.laps = laps_of(p.size, p.piece);
    if (p.laps > 1 && args[4] == Py_True) {
        release(&arrays);
        Py_RETURN_NONE;
    }
    int done = begin_laps(laps, &p.run, args[0]);
    if (!done) {
        done = is_root ? give(&p) : take(&p);
        if (done > 0 && p.laps > 1) close_laps(&p.run);
        run_end(&p.run);
    }
    release(&arrays);
    return done < 0 ? NULL : PyBool_FromLong(done);
}
