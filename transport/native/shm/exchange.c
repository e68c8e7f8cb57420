/* The calls in which every member has something for every other one: transport/shm/collectives/exchange.py has
 * the steps, transport/shm/collectives/exchange_plan.py says where everything lies. */
#include "memory/gaps.h"
#include "shm/laps.h"

#include <string.h>

enum { IN_PLACE, LAPS, LISTS }; /* what notes begin with; then bytes sent, bytes expected, places */

typedef struct {
    Laps *laps;
    Run run;
    int same;       /* all get the same */
    uint64_t share; /* what is a member's of a block, in bytes */
    uint64_t own_laps;
    const Entry *entry; /* how what arrives is reduced; NULL: it is copied */
    Way copy;
    Arrays in, out; /* where all get the same, or the result is one: one */
    Gaps *gaps;     /* of all inputs, then of all outputs; NULL: each lies in one piece */
} Passage;

static const Gaps *gaps_in(const Passage *p, int input) {
    return p->gaps && p->gaps[input].dims ? &p->gaps[input] : NULL;
}
static const Gaps *gaps_out(const Passage *p, int output) { return gaps_in(p, p->in.count + output); }

static uint64_t sent_to(const Passage *p, int peer) { return (uint64_t)p->in.views[p->same ? 0 : peer].len; }
static uint64_t expected_from(const Passage *p, int peer) {
    return (uint64_t)p->out.views[p->entry ? 0 : peer].len;
}

/* Where in the owner's block the peer's share begins: an owner has none for itself. */
static uint64_t share_of(const Passage *p, int peer, int owner) {
    return p->same ? 0 : p->share * (uint64_t)(peer - (peer > owner));
}

/* Where this member's own part goes, where that is not where it is. */
static char *kept_at(const Passage *p) {
    int rank = p->run.board->rank;
    char *own = p->out.views[rank].buf;
    return own == p->in.views[p->same ? 0 : rank].buf ? NULL : own;
}

/* Parts with gaps lie side by side: a run of each in turn is the order of the memory, in which the processor
 * foresees what is read next. */
static void stage_by_turns(Passage *p, uint64_t lap, int slot) {
    Board *b = p->run.board;
    Cursor to[MOST], from[MOST];
    uint64_t left[MOST], total = 0;
    for (int peer = 0; peer < b->size; peer++) {
        left[peer] = peer == b->rank ? 0 : part_of(sent_to(p, peer), p->share, lap);
        total += left[peer];
        to[peer] = cursor_at(block_at(b, b->rank, slot) + share_of(p, peer, b->rank), NULL, 0);
        from[peer] = cursor_at(p->in.views[peer].buf, gaps_in(p, peer), lap * p->share);
    }
    Way way = way_to_stage(&p->laps->staging, total);
    for (int peer = 0; total; peer = (peer + 1) % b->size) {
        uint64_t part = least(left[peer], from[peer].left);
        move_bytes(way, &to[peer], &from[peer], part);
        left[peer] -= part;
        total -= part;
    }
    if (way == stream_past) end_stream();
}

static int stage(Passage *p, uint64_t lap, uint64_t step) {
    Board *b = p->run.board;
    int slot = run_claim(&p->run, (int)lap);
    if (slot < 0) return -1;
    int by_turns = p->gaps && !p->same && lap; /* the first one is staged as what it is learned from */
    if (by_turns) stage_by_turns(p, lap, slot);
    for (int peer = 0; peer < b->size && !by_turns; peer++) {
        if (p->same ? peer != b->rank : peer == b->rank) continue;
        uint64_t size = part_of(sent_to(p, peer), p->share, lap), start = lap * p->share;
        /* What all get is near now: no better time to copy it for oneself. */
        char *own = p->same && !p->gaps ? kept_at(p) : NULL;
        int input = p->same ? 0 : peer;
        const Gaps *gaps = gaps_in(p, input);
        Source from = {(const char *)p->in.views[input].buf + (gaps ? 0 : start), gaps, start};
        if (size)
            stage_bytes(&p->laps->staging, block_at(b, b->rank, slot) + share_of(p, peer, b->rank), from, size,
                        size, (Also){own ? own + start : NULL, p->copy});
    }
    run_publish(&p->run, step);
    return 0;
}

/* What needs no other member, and is not done with the staging. */
static void keep(const Passage *p) {
    int rank = p->run.board->rank;
    char *own = p->entry || (p->same && !p->gaps) ? NULL : kept_at(p);
    if (!own) return;
    int input = p->same ? 0 : rank;
    Cursor to = cursor_at(own, gaps_out(p, rank), 0);
    Cursor from = cursor_at(p->in.views[input].buf, gaps_in(p, input), 0);
    move_bytes(p->copy, &to, &from, (uint64_t)p->in.views[input].len);
    if (p->copy == stream_past) end_stream();
}

/* Where this member finds what a peer has staged for it. */
static const char *arrived_from(const Passage *p, int peer, int slot) {
    const Board *b = p->run.board;
    return block_at(b, peer, slot) + share_of(p, b->rank, peer);
}

static void copy_arrived(const Passage *p, uint64_t lap) {
    const Board *b = p->run.board;
    int slot = run_slot(&p->run, (int)lap);
    for (int i = 1; i < b->size; i++) {
        int peer = (b->rank + i) % b->size; /* not all from one at a time */
        uint64_t size = part_of(expected_from(p, peer), p->share, lap);
        if (!size) continue;
        Cursor to = cursor_at(p->out.views[peer].buf, gaps_out(p, peer), lap * p->share);
        Cursor from = cursor_at((char *)arrived_from(p, peer, slot), NULL, 0);
        move_bytes(p->copy, &to, &from, size);
    }
    if (p->copy == stream_past) end_stream();
}

static void reduce_arrived(const Passage *p, uint64_t lap) {
    const Board *b = p->run.board;
    int slot = run_slot(&p->run, (int)lap);
    const char *parts[MOST];
    for (int r = 0; r < b->size; r++)
        parts[r] = r == b->rank ? (const char *)p->in.views[r].buf + lap * p->share : arrived_from(p, r, slot);
    char *out = (char *)p->out.views[0].buf + lap * p->share;
    uint64_t size = part_of(expected_from(p, 0), p->share, lap);
    for (uint64_t start = 0; start < size; start += MOST_REDUCED)
        reduce_parts(p->entry, out, parts, b->size, start, least(size - start, MOST_REDUCED));
}

static void write_notes(const Passage *p) {
    const Board *b = p->run.board;
    uint64_t *notes = notes_at(b, b->rank, run_slot(&p->run, 0));
    notes[IN_PLACE] = 0;
    notes[LAPS] = p->own_laps;
    for (int peer = 0; peer < b->size; peer++) {
        notes[LISTS + peer] = sent_to(p, peer);
        notes[LISTS + b->size + peer] = expected_from(p, peer);
        notes[LISTS + 2 * b->size + peer] = 0;
    }
}

/* The group's number of laps; 0: sizes disagree, or somebody has its parts read in place. */
static uint64_t agreed_laps(const Passage *p) {
    const Board *b = p->run.board;
    uint64_t laps = p->own_laps;
    for (int peer = 0; peer < b->size; peer++) {
        const uint64_t *notes = notes_at(b, peer, run_slot(&p->run, 0));
        if (peer == b->rank) continue;
        if (notes[IN_PLACE] || notes[LISTS + b->rank] != expected_from(p, peer) ||
            notes[LISTS + b->size + b->rank] != sent_to(p, peer))
            return 0;
        if (notes[LAPS] > laps) laps = notes[LAPS];
    }
    return laps;
}

static int pass(Passage *p) {
    write_notes(p);
    if (stage(p, 0, FIRST) < 0) return -1;
    keep(p);
    if (run_meet(&p->run) < 0) return -1;
    uint64_t laps = agreed_laps(p);
    if (!laps) return 0;
    for (uint64_t lap = 0; lap < laps; lap++) {
        /* The block that this overwrites was read before its readers published the step before. */
        if (lap + 1 < laps && stage(p, lap + 1, FIRST + lap + 1) < 0) return -1;
        if (run_reach_all(&p->run, FIRST + lap) < 0) return -1;
        if (p->entry)
            reduce_arrived(p, lap);
        else
            copy_arrived(p, lap);
        if ((lap + 1) % (1 + UNINTERRUPTED / p->run.board->block) == 0 && see_signals(&p->run) < 0) return -1;
    }
    if (laps > 1) close_laps(&p->run);
    return 1;
}

static void give_back(Passage *p) {
    PyMem_Free(p->gaps);
    release(&p->in);
    release(&p->out);
}

static PyObject *not_done(Passage *p) {
    give_back(p);
    Py_RETURN_NONE;
}

static const Py_buffer *view_of(const Passage *p, int i) {
    return i < p->in.count ? &p->in.views[i] : &p->out.views[i - p->in.count];
}

/* Note what lies how, where an array may have gaps: -1 where that is not possible. */
static int note_gaps(Passage *p) {
    int count = p->in.count + p->out.count, first = 0;
    while (first < count && lies_in_a_row(view_of(p, first))) first++;
    if (first == count) return 0;
    p->gaps = PyMem_Calloc((size_t)count, sizeof(Gaps));
    if (!p->gaps) return -1;
    for (int i = first; i < count; i++)
        if (find_gaps(view_of(p, i), &p->gaps[i]) < 0) return -1;
    return 0;
}

/* Make the call, and give the arrays back. */
static PyObject *make(Passage *p, PyObject *call, int symmetric) {
    const Board *b = p->laps->board;
    uint64_t most = 0, total = 0;
    for (int peer = 0; peer < b->size; peer++) {
        uint64_t sent = sent_to(p, peer), expected = expected_from(p, peer);
        if (sent > most) most = sent;
        if (expected > most) most = expected;
        total += expected;
    }
    p->share = b->block / (p->same ? 1 : (uint64_t)b->size - 1) / LINE * LINE;
    p->own_laps = laps_of(most, p->share);
    if (p->own_laps > 1 && symmetric) return not_done(p);
    p->copy = total < STREAMED_BYTES ? copy_bytes : stream_past;
    int done = begin_laps(p->laps, &p->run, call);
    if (!done) {
        done = pass(p);
        run_end(&p->run);
    }
    give_back(p);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* exchange(call, outputs, inputs, same, symmetric): inputs by member, or where all get the same a
 * single one; those of two dims and more may have gaps. Several laps of what is symmetric are left to Python, which reads it in place. */
PyObject *laps_exchange(Laps *laps, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "expected a call, outputs, inputs, True or False twice");
        return NULL;
    }
    Passage p = {.laps = laps, .same = args[3] == Py_True};
    int size = laps->board->size, rank = laps->board->rank;
    if (export_each(&p.out, args[1], size, PyBUF_WRITABLE | PyBUF_STRIDES) < 0 ||
        export_each(&p.in, args[2], p.same ? 1 : size, PyBUF_STRIDES) < 0 ||
        p.out.views[rank].len != p.in.views[p.same ? 0 : rank].len || note_gaps(&p) < 0)
        return not_done(&p);
    return make(&p, args[0], args[4] == Py_True);
}

/* Whether the loops can take the arrays. */
static const Entry *entry_for(const Passage *p, long op) {
    const Py_buffer *out = &p->out.views[0];
    const Entry *entry = entry_of(out, op);
    if (!entry) return NULL;
    for (int i = 0; i < p->in.count; i++) {
        const Py_buffer *in = &p->in.views[i];
        if (strcmp(in->format, out->format) || (uintptr_t)in->buf % entry->size || in->len != out->len)
            return NULL;
    }
    return entry;
}

/* reduce_scatter(call, output, inputs, op, symmetric): as exchange; op is its code. */
PyObject *laps_reduce_scatter(Laps *laps, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "expected a call, an output, inputs, an op, and True or False");
        return NULL;
    }
    Passage p = {.laps = laps};
    long op = PyLong_AsLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (export_one(&p.out, args[1], PyBUF_WRITABLE | PyBUF_FORMAT) < 0 ||
        export_each(&p.in, args[2], laps->board->size, PyBUF_FORMAT) < 0 || !(p.entry = entry_for(&p, op)))
        return not_done(&p);
    return make(&p, args[0], args[4] == Py_True);
}
