/* What runs plans: transport/shm/collectives/interpreter.py does the same with NumPy, with equal places, steps and
 * bytes, so members may differ in who does it. transport/shm/collectives/steps.py says what a step does. */
#include "shm/plans.h"

#include <string.h>

#define CHUNK 4096 /* bytes that stay in the first cache between a reduction and its copies */
enum { PLACED, LAPS, LISTS }; /* what notes begin with; then bytes sent, bytes expected, places */

typedef struct {
    uint64_t low, high; /* in bytes of an array */
} Piece;

static uint64_t laps_of(uint64_t size, uint64_t per_lap) {
    return size > per_lap ? (size + per_lap - 1) / per_lap : 1;
}

static uint64_t size_of(const Passage *p, int array) {
    return array == NOTHING ? 0 : (uint64_t)p->views[array].len;
}

static char *data_of(const Passage *p, int array) { return p->views[array].buf; }

static const Gaps *gaps_of(const Passage *p, int array) {
    return p->gaps && p->gaps[array].dims ? &p->gaps[array] : NULL;
}

void lay_out(Passage *p) {
    const Plan *plan = p->plan;
    uint64_t most = 0;
    for (int r = 0; r < p->plans->board->size; r++) {
        uint64_t sent = size_of(p, plan->sends[r]), expected = size_of(p, plan->expects[r]);
        if (sent > most) most = sent;
        if (expected > most) most = expected;
    }
    p->per_lap = (uint64_t)plan->head->capacity;
    p->laps = laps_of(most, p->per_lap);
    if (plan->head->spread) p->per_lap = whole_lines((most + p->laps - 1) / p->laps);
    p->many = p->laps > 1;
    p->in_place = p->in_place && p->laps >= (uint64_t)plan->head->places_from;
    p->along = plan->along && !p->gaps && !p->in_place;
}

/* ------------------------------------------------------------------ where everything is */

static Piece piece_of(const Passage *p, int array, uint64_t lap, int cut) {
    uint64_t start = lap * p->per_lap, size = size_of(p, array);
    uint64_t count = start < size ? least(size - start, p->per_lap) : 0;
    if (cut == WHOLE) return (Piece){start, start + count};
    const Board *b = p->run.board;
    uint64_t share = whole_lines((count + (uint64_t)b->size - 1) / (uint64_t)b->size);
    uint64_t low = least((uint64_t)b->rank * share, count), high = least(((uint64_t)b->rank + 1) * share, count);
    if (cut == OWN) return (Piece){start + low, start + high};
    return cut == BEFORE ? (Piece){start, start + low} : (Piece){start + high, start + count};
}

/* What lies `low` bytes into an array, in the block of the part's peer. */
static char *in_block(const Passage *p, const Part *part, uint64_t lap, uint64_t low) {
    return block_at(p->run.board, part->peer, run_slot(&p->run, (int)lap)) +
           (uint64_t)part->share * p->per_lap + low - lap * p->per_lap;
}

static char *theirs(const Passage *p, const Part *part, uint64_t lap, uint64_t low) {
    return p->places[part->peer] ? p->places[part->peer] + low : in_block(p, part, lap, low);
}

/* `nbytes` at a place in symmetric memory (Arena.locate), for the member `peer`: NULL where it has no such
 * memory there. */
static char *resolve(const Plans *plans, uint64_t place, int peer, uint64_t nbytes) {
    uint64_t number = (place - 1) >> 40, offset = (place - 1) & ((UINT64_C(1) << 40) - 1);
    for (Py_ssize_t i = 0; i < plans->mappings; i++) {
        const Mapped *m = &plans->mapped[i];
        if (m->number == number && nbytes <= m->part && offset <= m->part - nbytes)
            return (char *)(m->address + (uint64_t)peer * m->part + offset);
    }
    return NULL;
}

/* ------------------------------------------------------------------ notes */

static void note(const Passage *p) {
    const Board *b = p->run.board;
    const Plan *plan = p->plan;
    uint64_t *notes = notes_at(b, b->rank, run_slot(&p->run, 0));
    notes[PLACED] = p->in_place ? p->where[0] : 0;
    if (plan->head->known) return;
    notes[PLACED] = (uint64_t)p->in_place;
    notes[LAPS] = p->laps;
    uint64_t *list = notes + LISTS;
    for (int r = 0; r < b->size; r++, list++) {
        int array = plan->sends[r];
        list[0] = size_of(p, array);
        list[b->size] = size_of(p, plan->expects[r]);
        list[2 * b->size] = p->in_place && array != NOTHING ? p->where[array] : 0;
    }
}

/* Whether all is as it should be, and nobody's data is where Python only can read it. */
static int survey(Passage *p) {
    const Board *b = p->run.board;
    const Plan *plan = p->plan;
    int everywhere = p->in_place || !plan->sources;
    for (int r = 0; r < b->size; r++) {
        if (plan->expects[r] == NOTHING) continue;
        const uint64_t *notes = notes_at(b, r, run_slot(&p->run, 0)), *list = notes + LISTS + b->rank;
        uint64_t where = notes[PLACED];
        if (!plan->head->known) {
            if (list[0] != size_of(p, plan->expects[r])) return 0;
            if (plan->sends[r] != NOTHING && list[b->size] != size_of(p, plan->sends[r])) return 0;
            if (notes[LAPS] > p->laps) p->laps = notes[LAPS];
            if (where) where = list[2 * b->size];
        }
        p->places[r] = where ? resolve(p->plans, where, r, size_of(p, plan->expects[r])) : NULL;
        if (where && !p->places[r]) return 0;
        everywhere &= where != 0;
    }
    p->many = p->laps > 1;
    if (everywhere) {
        uint64_t total = p->laps * p->per_lap;
        p->per_lap = (uint64_t)plan->head->wide;
        p->laps = laps_of(total, p->per_lap);
    }
    return 1;
}

/* ------------------------------------------------------------------ copying */

/* Parts with gaps lie side by side: a run of each in turn is the order of the memory, in which the processor
 * foresees what is read next. */
static void stage_by_turns(Passage *p, const Step *step, uint64_t lap) {
    const Part *parts = p->plan->parts + step->first;
    Cursor to[MOST], from[MOST];
    uint64_t left[MOST], total = 0;
    for (int i = 0; i < step->count; i++) {
        Piece piece = piece_of(p, parts[i].array, lap, WHOLE);
        left[i] = piece.high - piece.low;
        total += left[i];
        to[i] = cursor_at(in_block(p, &parts[i], lap, piece.low), NULL, 0);
        from[i] = cursor_at(data_of(p, parts[i].array), gaps_of(p, parts[i].array), piece.low);
    }
    Way way = way_to_stage(&p->plans->staging, total);
    for (int i = 0; total; i = (i + 1) % step->count) {
        uint64_t size = least(left[i], from[i].left);
        move_bytes(way, &to[i], &from[i], size);
        left[i] -= size;
        total -= size;
    }
    if (way == stream_past) end_stream();
}

static void stage_part(Passage *p, const Part *part, uint64_t lap) {
    Piece piece = piece_of(p, part->array, lap, part->cut);
    uint64_t size = piece.high - piece.low;
    if (!size) return;
    char *into = in_block(p, part, lap, piece.low), *from = data_of(p, part->array);
    const Gaps *gaps = gaps_of(p, part->array);
    if (part->cut != WHOLE) { /* what comes back there */
        copy_bytes(into, from + piece.low, size);
        return;
    }
    /* What all get is near now: no better time to copy it for oneself. */
    char *own = p->along ? data_of(p, p->plan->keep[1].array) : NULL;
    Also also = {own && own != from ? own + piece.low : NULL, p->copy};
    Source source = {gaps ? from : from + piece.low, gaps, piece.low};
    stage_bytes(&p->plans->staging, into, source, size, size, also);
}

static int stage(Passage *p, const Step *step, uint64_t lap) {
    if (p->in_place) return 0;
    if (run_claim(&p->run, (int)lap) < 0) return -1;
    if (p->gaps && step->count > 1 && lap) { /* the first one is staged as what it is learned from */
        stage_by_turns(p, step, lap);
        return 0;
    }
    for (int i = 0; i < step->count; i++) stage_part(p, p->plan->parts + step->first + i, lap);
    return 0;
}

static void keep(const Passage *p) {
    int from = p->plan->keep[0].array, to = p->plan->keep[1].array;
    if (p->along || data_of(p, from) == data_of(p, to)) return;
    Cursor into = cursor_at(data_of(p, to), gaps_of(p, to), 0);
    Cursor source = cursor_at(data_of(p, from), gaps_of(p, from), 0);
    move_bytes(p->copy, &into, &source, size_of(p, from));
    if (p->copy == stream_past) end_stream();
}

static void take(const Passage *p, const Step *step, uint64_t lap) {
    for (int i = 0; i < step->count; i++) {
        const Part *part = p->plan->parts + step->first + i;
        Piece piece = piece_of(p, part->array, lap, part->cut);
        if (piece.low == piece.high || (part->peer == p->run.board->rank && p->in_place)) continue;
        Cursor to = cursor_at(data_of(p, part->array), gaps_of(p, part->array), piece.low);
        Cursor from = cursor_at(theirs(p, part, lap, piece.low), NULL, 0);
        move_bytes(p->copy, &to, &from, piece.high - piece.low);
    }
    if (p->copy == stream_past) end_stream();
}

/* ------------------------------------------------------------------ reducing */

/* Reduce the members' parts into each of them. */
static void reduce_into_all(const Passage *p, char *parts[], size_t nbytes) {
    const Board *b = p->run.board;
    if (b->size == 2) {
        p->entry->both(parts[0], parts[1], (Py_ssize_t)nbytes / p->entry->size);
        return;
    }
    char *own = parts[b->rank];
    for (size_t start = 0; start < nbytes; start += CHUNK) {
        size_t now = least(nbytes - start, CHUNK);
        reduce_parts(p->entry, own, (const char *const *)parts, b->size, start, now);
        for (int r = 0; r < b->size; r++)
            if (r != b->rank) copy_bytes(parts[r] + start, own + start, now);
    }
}

static void fold(const Passage *p, const Step *step, uint64_t lap) {
    const Board *b = p->run.board;
    const Part *of = p->plan->parts + step->first;
    int into = step->number == ALL ? of[b->rank].array : step->number;
    Piece piece = piece_of(p, into, lap, of[0].cut);
    uint64_t size = piece.high - piece.low;
    char *parts[MOST];
    for (int r = 0; r < b->size; r++)
        parts[r] = r == b->rank ? data_of(p, of[r].array) + piece.low : theirs(p, &of[r], lap, piece.low);
    if (step->number == ALL) {
        reduce_into_all(p, parts, size);
        return;
    }
    char *out = data_of(p, into) + piece.low;
    for (uint64_t start = 0; start < size; start += MOST_REDUCED)
        reduce_parts(p->entry, out, (const char *const *)parts, b->size, start,
                     least(size - start, MOST_REDUCED));
}

/* ------------------------------------------------------------------ the steps */

static int meet(Passage *p, int peer) {
    return peer == ALL ? run_meet(&p->run) : run_meet_one(&p->run, peer);
}

static int reach(Passage *p, int peer, uint64_t number) {
    return peer == ALL ? run_reach_all(&p->run, number) : run_reach(&p->run, peer, number);
}

/* Handle signals now and then, at the end of a turn. */
static int look_up(Passage *p) {
    p->moved += p->per_lap * (uint64_t)p->plan->width;
    if (p->moved < (uint64_t)p->plan->head->wide) return 0;
    p->moved = 0;
    PyEval_RestoreThread(p->run.state);
    int failed = PyErr_CheckSignals();
    p->run.state = PyEval_SaveThread();
    return failed;
}

static int do_step(Passage *p, const Step *step, uint64_t lap) {
    switch (step->op) {
    case NOTE: note(p); return 0;
    case STAGE: return stage(p, step, lap);
    case PUBLISH: run_publish(&p->run, lap + (uint64_t)step->number); return 0;
    case KEEP: keep(p); return 0;
    case MEET: return meet(p, step->peer);
    case REACH: return reach(p, step->peer, lap + (uint64_t)step->number);
    case TAKE: take(p, step, lap); return 0;
    case FOLD: fold(p, step, lap); return 0;
    case CHECK_LATER: p->later = 1; return 0;
    case CLOSE:
        if (p->many || step->number) {
            run_publish(&p->run, DONE);
            p->run.board->busy = p->run.board->base + DONE;
        }
        return 0;
    case AWAIT: return p->in_place && (meet(p, step->peer) < 0 || reach(p, step->peer, DONE) < 0) ? -1 : 0;
    }
    return 0;
}

int run_plan(Passage *p) {
    const Step *steps = p->plan->steps;
    int count = p->plan->head->steps, back = 0;
    int64_t turn = 0, turns = 0;
    for (int i = 0; i < count; i++) {
        const Step *step = &steps[i];
        if (step->op == LOOP) {
            back = i;
            turn = step->number;
            turns = (int64_t)p->laps + step->lap;
            if (turn < turns) continue;
            while (steps[i].op != END) i++;
            turn = 0;
        } else if (step->op == END) {
            if (look_up(p) < 0) return -1;
            if (++turn < turns)
                i = back;
            else
                turn = 0;
        } else {
            int64_t lap = turn + step->lap;
            if (lap < 0 || lap >= (int64_t)p->laps) continue;
            if (step->op != SURVEY) {
                if (do_step(p, step, (uint64_t)lap) < 0) return -1;
            } else if (!survey(p)) {
                if (p->along) { /* Python keeps nothing along, and KEEP is behind it */
                    p->along = 0;
                    keep(p);
                }
                return i;
            }
        }
    }
    return 0;
}
