/* The compiled core: what Python does in some 700 steps for an all_reduce of a few kilobytes among
 * ranks that share memory, on the same state, with the same bytes in the same places and the same
 * checks; and the loops that move more. It takes the usual case only; whatever is unusual, or has to
 * wait for long, is left to Python. calls/ has what makes a call, shm/ the ways that its bytes go, memory/
 * the loops over them.
 */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define STEP (UINT64_C(1) << 24)
#define FIRST 1
#define DONE (STEP - 1)
#define SLOTS 4
#define HEADER_BYTES 32
#define LINE 64
#define MOST 64
#define NO_ROOT (-1)
#define COLLECTIVE (-1)
enum { BARRIER = 1, ALL_REDUCE = 3 };

typedef _Atomic uint64_t Word;

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t whole_lines(uint64_t nbytes) { return (nbytes + LINE - 1) / LINE * LINE; }

/* Seconds of CLOCK_MONOTONIC, as time.monotonic() has them, to a fraction of a microsecond. Under the
 * interpreter's lock; read_clock needs none. */
double monotonic(void);
double read_clock(void);
void init_clock(void);

/* ------------------------------------------------------------------ state.c: numbers */

/* meshlib/calls/shortcut.py */
typedef struct {
    PyObject_HEAD
    unsigned long long sequence, messages;
    unsigned short history;
} Order;

/* ------------------------------------------------------------------ record.c: a call's record */

#pragma pack(push, 1)
typedef struct {
    uint64_t sequence, elements;
    int32_t root;
    uint16_t kind, dtype;
    uint8_t op, flags;
    uint16_t history;
    uint32_t extra;
} Header;
#pragma pack(pop)

uint16_t history_after(const Header *header); /* transport/call.py */

/* All of a header but its number and history, from elements, root, kind, dtype, op, extra, of which all
 * but the kind may be NULL: -1 with an exception. */
#define HEADER_ARGS 6
int read_header(PyObject *const *args, Header *header);

/* transport/call.py */
typedef struct {
    PyObject_HEAD
    PyObject *packed; /* the header as bytes, once somebody has asked for it; else NULL */
    PyObject *waiting_for, *completion, *error, *group, *label, *code;
    double issued, started, ended, seconds;
    long long nbytes;
    unsigned long thread;
    int peer, instruction;
    char sync;
    Header header;
} Fields;

/* ------------------------------------------------------------------ spec.c */

/* meshlib/calls/spec.py; the header has neither a number nor a history. */
typedef struct {
    PyObject_HEAD
    PyObject *kind, *run, *device;
    long long nbytes;
    int peer;
    Header header;
} CallSpec;

/* Whether the call is on arrays in the host's memory. */
int is_on_host(CallSpec *spec);

/* ------------------------------------------------------------------ ring.c, frames.c */

#define KNOWN_FILES 8

/* The last calls: meshlib/diagnosis/recorder.py. */
typedef struct {
    PyObject_HEAD
    PyObject *followers, *annotate, *labels, *own_files;
    PyTypeObject *type; /* of the records */
    Py_ssize_t capacity, next;
    Fields **records; /* NULL where none has been yet */
    struct {
        PyObject *name;
        int own;
    } files[KNOWN_FILES]; /* the last that were asked for, and what own_files says of them */
    int next_file;
} Ring;

/* A record that is still to be filled in. */
typedef struct {
    Fields *record;
    PyCodeObject *code; /* of the nearest caller that is none of this project's files */
    int instruction;
    PyObject *label; /* borrowed from the ring */
} Opening;

/* What may fail, and may run other code, of recording a call: -1 with an exception. */
int prepare_record(Ring *ring, Opening *opening);

/* The rest, which does neither: the record (a new reference). */
Fields *fill_record(Opening *opening, PyObject *group, const Header *header, long long nbytes, int peer,
                    int sync, double seconds);

/* The code of that caller (a new reference) and where in it it is: -1 with an exception. */
int find_caller(Ring *ring, PyCodeObject **code, int *instruction);

/* Whether the frames of a file are to be skipped: 1, 0, or -1 with an exception. */
int is_own(Ring *ring, PyObject *file);

/* ------------------------------------------------------------------ waiting.c */

/* How often to look before the core is first offered to others: a few times where offering turns out
 * to be what helps, as it does where other programs leave the ranks one core together. */
typedef struct {
    int spins, most_spins;
} Patience;

void be_patient(Patience *p, int may_spin);

/* Whether what is waited for has come. */
typedef int (*Look)(const void *what);

/* Look until it has come, or until it is worth to sleep, which is for Python: 1 or 0. The
 * interpreter's lock is held on entry and on exit, and given up if this takes long. */
int await_holding(Patience *p, Look look, const void *what);

/* The same for a thread that has given up the lock. */
int await_without(Patience *p, Look look, const void *what);

/* Wake all who sleep until the word changes. */
void wake(Word *word);

/* ------------------------------------------------------------------ board.c */

/* transport/shm/board/board.py: where everything lies, for the member `rank`. */
typedef struct {
    PyObject_HEAD
    unsigned long long number, base, floor, busy; /* how far the member is, which Python counts on, too */
    unsigned int unchecked;                       /* cards that are still to be compared */
    Py_buffer memory;                             /* of the segment, which stays mapped as long as this lives */
    int rank, size;
    Patience patience;
    uint64_t block; /* bytes */
    uint64_t sleepers, counters[MOST], cards[MOST][SLOTS], blocks[MOST][SLOTS];
} Board;

static inline char *bytes_at(const Board *b, uint64_t offset) { return (char *)b->memory.buf + offset; }
static inline Word *word_at(const Board *b, uint64_t offset) { return (Word *)bytes_at(b, offset); }
static inline char *block_at(const Board *b, int rank, int slot) {
    return bytes_at(b, b->blocks[rank][slot]);
}
/* Where so many bytes of a call of one block are: Board.small_parts. */
static inline char *part_at(const Board *b, int rank, int slot, Py_ssize_t nbytes) {
    return nbytes <= LINE - HEADER_BYTES ? bytes_at(b, b->cards[rank][slot]) + HEADER_BYTES
                                         : block_at(b, rank, slot);
}
/* What a card says about the call, behind its header. */
static inline uint64_t *notes_at(const Board *b, int rank, int slot) {
    return (uint64_t *)(bytes_at(b, b->cards[rank][slot]) + HEADER_BYTES);
}

int all_at(const Board *b, uint64_t turn);       /* whether all members have come to a turn */
void publish(const Board *b, uint64_t turn);     /* that this member has come to it */
int may_begin(Board *b);                         /* Board.begin without its waits */
int meet_holding(Board *b, const Header *header, int checked); /* 0: Python goes on with it */

/* A call that Python has begun on the board (Board.begin), carried on without the interpreter's
 * lock. `python` is the transport.shm.board.board.Board, which waits where that takes long, and raises.
 * Those that return an int give -1 with an exception, else 0 or what they say: then leave by
 * run_end and return NULL. Both objects are borrowed. */
typedef struct {
    Board *board;
    PyObject *python, *call;
    PyThreadState *state;
    int sync; /* else there may be a thread that computes, and that looking would disturb */
} Run;

void run_start(Run *run, Board *board, PyObject *python, PyObject *call); /* gives up the lock */
void run_end(Run *run);                                                   /* takes it again */
void run_publish(const Run *run, uint64_t step);
int run_reach(Run *run, int peer, uint64_t step);
int run_reach_all(Run *run, uint64_t step);
int run_meet(Run *run);                      /* all at the first step, with the same card */
int run_meet_one(Run *run, int peer);
int run_claim(Run *run, int lap);            /* a lap's block is free: Board.claim */
static inline int run_slot(const Run *run, int lap) {
    return (int)((run->board->number + (unsigned long long)lap) % SLOTS);
}

/* ------------------------------------------------------------------ reduce.c, copying.c */

/* Loops over long arrays, for wider registers as well: which ones is decided where it is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

typedef void (*Loop)(void *out, const void *left, const void *right, Py_ssize_t n);
typedef void (*Both)(void *left, void *right, Py_ssize_t n);

enum { SUM = 1, AVG = 2, PRODUCT = 3, MIN = 4, MAX = 5 };

typedef struct {
    char format;
    uint16_t dtype;
    uint8_t op, size;
    Loop loop;
    Both both; /* of two members, with what comes after: into both of their parts */
} Entry;

/* NULL: what NumPy has to do. */
const Entry *find_entry(const char *format, long op);

/* The same for the elements of an array, where they lie as the loops need them. */
const Entry *entry_of(const Py_buffer *view, long op);

/* Reduce at most MOST_REDUCED bytes of the members' parts, from byte `start` on, in the order of the
 * ranks. `out` may be one of the parts: it is written last. */
#define MOST_REDUCED 16384
void reduce_parts(const Entry *entry, char *out, const char *const *parts, int size, uint64_t start,
                  size_t bytes);

/* Divide the n elements of a sum by the number of members, where the op is AVG. */
void finish(const Entry *entry, void *data, Py_ssize_t n, int size);

/* memcpy, but for what makes it slow on some processors: see transport/operands/copying.py. */
void copy_bytes(void *into, const void *from, size_t size);

/* ------------------------------------------------------------------ crc32c.c: a checksum */

void init_crc32c(void);
PyObject *crc32c(PyObject *module, PyObject *args);

/* ------------------------------------------------------------------ types */

extern PyTypeObject *order_type, *fields_type, *ring_type, *board_type, *ring_end_type, *spec_type;
extern PyType_Spec order_spec, fields_spec, ring_spec, board_spec, shortcut_spec, ring_end_spec;
int init_shortcut(void); /* -1 with an exception */
int init_spec(PyObject *module);
