/* One member's view of the board: transport/shm/board/board.py has the rules. */
#include "core.h"

#include <string.h>

PyTypeObject *board_type;

/* ------------------------------------------------------------------ what is on it */

int all_at(const Board *b, uint64_t turn) {
    for (int r = 0; r < b->size; r++)
        if (r != b->rank && atomic_load_explicit(word_at(b, b->counters[r]), memory_order_acquire) < turn)
            return 0;
    return 1;
}

void publish(const Board *b, uint64_t turn) {
    Word *mine = word_at(b, b->counters[b->rank]);
    /* A full fence: who sleeps is seen, or sees the counter. */
    atomic_store_explicit(mine, turn, memory_order_seq_cst);
    for (int i = 0; i < (b->size + 7) / 8; i++)
        if (atomic_load_explicit(word_at(b, b->sleepers + 8 * (uint64_t)i), memory_order_seq_cst)) {
            wake(mine);
            return;
        }
}

int may_begin(Board *b) {
    if (b->unchecked) return 0;
    unsigned long long need = b->base + FIRST > STEP ? b->base + FIRST - STEP : 0;
    if (b->busy > need) need = b->busy;
    if (b->floor < need) {
        if (!all_at(b, need)) return 0;
        b->floor = need;
    }
    return 1;
}

typedef struct {
    const Board *board;
    uint64_t turn;
    int peer;
} Awaited;

static int all_come(const void *what) {
    const Awaited *a = what;
    return all_at(a->board, a->turn);
}

static int one_come(const void *what) {
    const Awaited *a = what;
    return atomic_load_explicit(word_at(a->board, a->board->counters[a->peer]), memory_order_acquire) >=
           a->turn;
}

static int same_card(const Board *b, int rank, int slot, const void *header) {
    uint64_t theirs[HEADER_BYTES / 8], ours[HEADER_BYTES / 8], differ = 0;
    memcpy(theirs, bytes_at(b, b->cards[rank][slot]), HEADER_BYTES);
    memcpy(ours, header, HEADER_BYTES);
    for (int i = 0; i < HEADER_BYTES / 8; i++) differ |= theirs[i] ^ ours[i];
    return !differ;
}

static int same_cards(const Board *b, int slot, const void *header) {
    for (int r = 0; r < b->size; r++)
        if (r != b->rank && !same_card(b, r, slot, header)) return 0;
    return 1;
}

int meet_holding(Board *b, const Header *header, int checked) {
    Awaited awaited = {b, b->base + FIRST, 0};
    while (!await_holding(&b->patience, all_come, &awaited))
        if (checked) return 0;
    b->floor = awaited.turn;
    return !checked || same_cards(b, (int)(b->number % SLOTS), header);
}

/* ------------------------------------------------------------------ a call under way */

/* Have Python do the rest of a step: -1 with its exception. What others wrote before the turn that Python
 * has seen is visible once this thread has loaded the counters itself: Python's loads order nothing. */
static int ask_python(Run *run, const char *method, long number, long step) {
    PyEval_RestoreThread(run->state);
    PyObject *result = step < 0     ? PyObject_CallMethod(run->python, method, "O", run->call)
                       : number < 0 ? PyObject_CallMethod(run->python, method, "Ol", run->call, step)
                                    : PyObject_CallMethod(run->python, method, "Oll", run->call, number, step);
    Py_XDECREF(result);
    run->state = PyEval_SaveThread();
    all_at(run->board, 0);
    return result ? 0 : -1;
}

void run_start(Run *run, Board *board, PyObject *python, PyObject *call) {
    run->board = board;
    run->python = python;
    run->call = call;
    run->sync = ((Fields *)call)->sync;
    run->state = PyEval_SaveThread();
}

void run_end(Run *run) { PyEval_RestoreThread(run->state); }

void run_publish(const Run *run, uint64_t step) {
    publish(run->board, run->board->base + step);
}

static int reach(Run *run, Look look, const Awaited *awaited) {
    return run->sync ? await_without(&run->board->patience, look, awaited) : look(awaited);
}

int run_reach(Run *run, int peer, uint64_t step) {
    Awaited awaited = {run->board, run->board->base + step, peer};
    return reach(run, one_come, &awaited) ? 0 : ask_python(run, "reach", peer, (long)step);
}

int run_reach_all(Run *run, uint64_t step) {
    Board *b = run->board;
    Awaited awaited = {b, b->base + step, 0};
    if (b->floor >= awaited.turn) return 0;
    if (!reach(run, all_come, &awaited)) return ask_python(run, "reach_all", -1, (long)step);
    b->floor = awaited.turn;
    return 0;
}

/* This member's own card is what the others' are compared with. */
static const char *own_card(const Run *run, int slot) {
    return bytes_at(run->board, run->board->cards[run->board->rank][slot]);
}

int run_meet(Run *run) {
    Board *b = run->board;
    if (run_reach_all(run, FIRST) < 0) return -1;
    if (b->unchecked || !same_cards(b, run_slot(run, 0), own_card(run, run_slot(run, 0))))
        return ask_python(run, "meet", -1, -1);
    return 0;
}

int run_meet_one(Run *run, int peer) {
    int slot = run_slot(run, 0);
    if (run_reach(run, peer, FIRST) < 0) return -1;
    if (!same_card(run->board, peer, slot, own_card(run, slot)))
        return ask_python(run, "meet_one", -1, peer);
    return 0;
}

int run_claim(Run *run, int lap) {
    Board *b = run->board;
    if (0 < lap && lap < SLOTS) {
        /* Readers of a call of one block are through when they begin the next one. If it had
         * several, Board.begin has waited for its end. */
        unsigned long long earlier = (unsigned long long)(SLOTS - 1 - lap) * STEP;
        unsigned long long ended = b->base > earlier ? b->base - earlier : 0;
        if (b->floor < ended + FIRST && b->busy + 1 < ended) {
            Awaited awaited = {b, ended + FIRST, 0};
            if (!reach(run, all_come, &awaited)) return ask_python(run, "claim", -1, lap);
            b->floor = awaited.turn;
        }
    }
    return 0;
}

/* ------------------------------------------------------------------ the type */

static int offsets_from(PyObject *list, uint64_t *into, Py_ssize_t count) {
    PyObject *fast = PySequence_Fast(list, "expected a list of offsets");
    if (!fast) return -1;
    int bad = PySequence_Fast_GET_SIZE(fast) != count;
    for (Py_ssize_t i = 0; !bad && i < count; i++) {
        into[i] = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(fast, i));
        bad = PyErr_Occurred() != NULL;
    }
    Py_DECREF(fast);
    if (bad && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "expected %zd offsets", count);
    return bad ? -1 : 0;
}

/* Whether all that is kept for the members lies within the memory: 0, or -1 with an exception. */
static int check_offsets(const Board *b) {
    uint64_t size = (uint64_t)b->memory.len, card = HEADER_BYTES + 8 * (2 + 3 * (uint64_t)b->size);
    int fits = size >= LINE && b->block <= size && card <= size && b->sleepers <= size - LINE;
    for (int r = 0; fits && r < b->size; r++) {
        fits = b->counters[r] % 8 == 0 && b->counters[r] <= size - LINE;
        for (int slot = 0; slot < SLOTS; slot++)
            fits = fits && b->cards[r][slot] % 8 == 0 && b->cards[r][slot] <= size - card &&
                   b->blocks[r][slot] % LINE == 0 && b->blocks[r][slot] <= size - b->block;
    }
    if (!fits) PyErr_Format(PyExc_ValueError, "a board of %d members is not within %zd bytes", b->size, b->memory.len);
    return fits ? 0 : -1;
}

static int slots_from(PyObject *rows, uint64_t into[][SLOTS], int size) {
    for (int r = 0; r < size; r++) {
        PyObject *row = PySequence_GetItem(rows, r);
        int bad = !row || offsets_from(row, into[r], SLOTS);
        Py_XDECREF(row);
        if (bad) return -1;
    }
    return 0;
}

/* Board(memory, rank, size, counters, cards, blocks, sleepers, block, may_spin) */
static int board_init(Board *b, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *memory, *counters, *cards, *blocks;
    unsigned long long sleepers, block;
    int may_spin;
    if (b->memory.obj) {
        PyErr_SetString(PyExc_RuntimeError, "a Board is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OiiOOOKKp", &memory, &b->rank, &b->size, &counters, &cards, &blocks,
                          &sleepers, &block, &may_spin))
        return -1;
    if (b->size < 2 || b->size > MOST || b->rank < 0 || b->rank >= b->size) {
        PyErr_Format(PyExc_ValueError, "expected 2 to %d members, got %d", MOST, b->size);
        return -1;
    }
    b->sleepers = sleepers;
    b->block = block;
    be_patient(&b->patience, may_spin);
    if (offsets_from(counters, b->counters, b->size) || slots_from(cards, b->cards, b->size) ||
        slots_from(blocks, b->blocks, b->size) || PyObject_GetBuffer(memory, &b->memory, PyBUF_WRITABLE))
        return -1;
    return check_offsets(b);
}

/* A mapping refers to nothing. */
static void board_dealloc(Board *b) {
    PyTypeObject *type = Py_TYPE(b);
    if (b->memory.obj) PyBuffer_Release(&b->memory);
    type->tp_free((PyObject *)b);
    Py_DECREF(type);
}

static PyMemberDef board_members[] = {{"number", T_ULONGLONG, offsetof(Board, number), 0, NULL},
                                      {"base", T_ULONGLONG, offsetof(Board, base), 0, NULL},
                                      {"floor", T_ULONGLONG, offsetof(Board, floor), 0, NULL},
                                      {"busy", T_ULONGLONG, offsetof(Board, busy), 0, NULL},
                                      {"unchecked", T_UINT, offsetof(Board, unchecked), 0, NULL},
                                      {NULL}};
static PyType_Slot board_slots[] = {{Py_tp_init, board_init},
                                    {Py_tp_members, board_members},
                                    {Py_tp_new, PyType_GenericNew},
                                    {Py_tp_dealloc, board_dealloc},
                                    {0, NULL}};
PyType_Spec board_spec = {"transport.native._core.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, board_slots};
