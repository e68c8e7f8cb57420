/* The engine: collectives and messages of members that share memory. It does not depend on Python.
 *
 * The caller begins a call, and continues it until it is done. No function blocks for longer than SLICE_SECONDS or
 * calls back. The returned Status tells the caller what to do next.
 */
#pragma once
#include "engine/kernels/copy.h"
#include "engine/kernels/reduce.h"
#include "engine/kernels/staging.h"
#include "engine/kernels/strides.h"
#include "engine/waiting.h"
#include "engine/words.h"

#define MAX_MEMBERS 1024
#define MUCH (UINT64_C(64) << 20) /* bytes after which a call returns AGAIN, so that the caller can check signals */
#define SLOTS 4 /* headers and blocks of a member, used in rotation */
#define HEADER_BYTES 32
#define PAGE 4096
#define LARGEST_PAGE 65536 /* the size of a segment is a multiple of this, so layouts are equal on all machines */
#define NO_ROOT (-1)
#define SMALL_BYTES (LINE - HEADER_BYTES)

typedef enum {
    DONE_ALL,    /* the call is done */
    AGAIN,       /* check signals, deadline and lost peers, then continue */
    UNSUPPORTED, /* reduce `parts` into `out`, which the engine cannot, then continue */
    MISMATCH,    /* the members made different calls: see `problem` */
    DAMAGED      /* a member wrote impossible values or has no memory left: see `problem` */
} Status;

/* The kinds of calls: transport/_calls/header.py. */
enum { BARRIER = 1, BROADCAST, ALL_REDUCE, REDUCE, ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL, SEND, RECV };

#pragma pack(push, 1)
/* The fields that must be equal on all members: transport/_calls/header.py. */
typedef struct {
    uint64_t sequence, elements;
    int32_t root;
    uint16_t kind, dtype;
    uint8_t op, flags;
    uint16_t history;
    uint32_t extra;
} Header;
#pragma pack(pop)
_Static_assert(sizeof(Header) == HEADER_BYTES, "a header is 32 bytes");

/* ------------------------------------------------------------------ a group's control block and calls */

/* An array of a call. `strides` is NULL if it is contiguous. `place` is its offset in this member's symmetric memory
 * plus 1; 0 if it is private. */
typedef struct {
    char *data;
    uint64_t nbytes, place;
    const Strides *strides;
} Array;

/* A segment of symmetric memory: consecutive parts, one per member. A place is the segment's number, shifted by
 * PLACE_BITS, plus the offset in the part, plus 1. */
#define PLACE_BITS 40
typedef struct {
    uint64_t number;
    char *memory;
    uint64_t part;
} Arena;

typedef enum { NO_PROBLEM, OTHER_CALL, SENT, EXPECTS, BAD_PLACE, BAD_COUNTER, NO_MEMORY } Trouble;

/* Why a call failed. OTHER_CALL: `theirs` and `ours` differ. Otherwise, `found` and `wanted` are sizes, places or
 * counters. NO_MEMORY: `found` is an errno, `wanted` the number of bytes. */
typedef struct {
    Trouble trouble;
    int peer;
    Header ours, theirs;
    uint64_t found, wanted;
} Problem;

typedef struct Group Group;

/* The current call. Sizes are in bytes. The first `inputs` arrays are read, the others written. */
typedef struct {
    Status (*function)(Group *);
    int line; /* where its function continues */
    Header header;
    int kind, root, inputs, count; /* root 0 where the kind has none */
    int reduces;
    const Loops *loops; /* its reduction; NULL: the caller reduces */
    Copy copy;          /* how results are written */
    uint64_t chunk_bytes, chunks, chunk, moved;
    uint64_t blocks; /* the number it uses that all members can compute */
    uint64_t taken;  /* a member at step chunk + taken no longer reads the chunk */
    int in_place; /* the others read this member's arrays directly */
    int many;     /* it has several chunks, and may reuse blocks */
    int small;    /* its data is staged behind the header, which the others read anyway */
    int along;    /* this member copies its own part while staging it */
    uint64_t low, high, at; /* the bytes of the array `into` to reduce: from low to high, done up to `at` */
    int into;
} Call;

typedef struct {
    uint64_t block;    /* a block's size: the most that a member stages at a time */
    uint64_t direct;   /* up to this size each member reduces everything itself, not a share; with two members, more */
    uint64_t unstaged; /* the most that is read in place at a time */
} Sizes;

/* One member's view. One thread at a time, except for group_wake. */
struct Group {
    char *memory;
    int rank, size;
    Sizes sizes;
    uint64_t sleepers_at, counters_at, headers_at, header_stride, blocks_at;
    unsigned long long number, base; /* of the current call, and its first turn: its counter value at step 0 */
    uint64_t blocks;                 /* the sum of the earlier calls' `blocks` */
    unsigned long long floor;        /* a turn that all members have reached */
    unsigned long long free_at[SLOTS]; /* by slot: the turn they must reach before this member reuses its block */
    uint64_t allocated;              /* the bytes of each of this member's blocks that have pages */
    struct {
        unsigned long long number;
        Header header;
    } unchecked[SLOTS]; /* calls whose headers were not compared yet, oldest first */
    int unchecked_count;
    int compares; /* 0: skip the comparison, to measure its cost */
    int waits_for; /* the member that the call waits for, or ALL */
    _Atomic int wake_requested; /* set by another thread: waiting calls return AGAIN until the caller resets it */
    Mode mode;
    SpinBudget spin_budget;
    Staging staging;
    Arena *arenas;
    int arena_count;
    Problem problem;
    Call call;
    Array *arrays;      /* of the call: room for two for each member */
    char **places;      /* by member: the address of its data if read in place; NULL: it is staged */
    const char **parts; /* by member: the operands of a reduction, */
    char *out;          /* its result, */
    uint64_t part_bytes; /* and the bytes of each */
    Cursor *cursors;
    uint64_t *left;
};

/* The bytes of memory that `size` members share; sets `sizes->block` if it is 0. */
uint64_t group_bytes(int size, Sizes *sizes);

/* Write the head of zeroed shared memory before other members map it: 0, or an errno if it gets no pages. */
int group_create(char *memory, int size, uint64_t block);

/* Make a member's view: 0; -1: the shared memory has another layout, or is too small; -2: out of memory. */
int group_open(Group *g, char *memory, uint64_t nbytes, int rank, int size, Sizes sizes, int may_spin);
void group_close(Group *g);

/* Begin a call, whose arrays are in `arrays`, and continue it as far as `mode` allows. `loops` is NULL if the call does
 * not reduce, or the caller has to. */
typedef struct {
    int kind, root, inputs, count, reduces;
    Header header;
    const Loops *loops;
} CallSpecification;
Status group_begin(Group *g, const CallSpecification *what, Mode mode);
Status group_go_on(Group *g, Mode mode);

void group_wake(Group *g); /* wake all sleeping members; this member's call returns AGAIN. Thread-safe */
int group_arrays(int size, int rank, int kind, int root, int *inputs); /* a call's number of arrays; -1: invalid */

/* ------------------------------------------------------------------ rings of messages */

/* One end of a ring from one sender to one receiver, in the receiver's inbox: ring.c. */
typedef struct {
    char *data;
    Word *written, *broken, *sender_sleeps, *taken; /* the first three on one line */
    Word *wakeup, *asleep;                          /* of the inbox */
    uint64_t capacity, piece;
    uint64_t position, left; /* of this end; the bytes that the current message still lacks */
    uint64_t rings, number, step;
    SpinBudget spin_budget;
    Staging staging;
} Ring;

/* The header of a message in the ring. */
typedef struct {
    Header header;
    uint64_t size;
    unsigned char rest[LINE - HEADER_BYTES - 8];
} Head;
_Static_assert(sizeof(Head) == LINE, "a message begins with a line");

uint64_t inbox_bytes(int size, uint64_t *capacity); /* of an inbox with a ring for each member; sets capacity if 0 */
int inbox_create(char *memory, int size, uint64_t capacity); /* 0, or an errno if it gets no pages */
/* Open this `member`'s end of the ring from `sender` in an inbox: 0; -1: another layout; an errno: the sender gets no
 * pages for the ring. */
int ring_open(Ring *r, char *memory, uint64_t nbytes, int size, int sender, int member, int may_spin);

/* Write a message. After AGAIN, it has not begun if left == 0; otherwise continue with ring_write. */
Status ring_begin(Ring *r, const Header *header, const char *data, uint64_t size, Mode mode);
Status ring_write(Ring *r, const char *data, uint64_t size, Mode mode);
int ring_has_room(const Ring *r, uint64_t size); /* for a message of this size */
void ring_give_up(Ring *r);                      /* break the ring: the current message stays incomplete */
int ring_is_broken(const Ring *r);
void ring_wake_sender(Ring *r); /* thread-safe */

/* Read the head of the next message: AGAIN if there is none. ring_accept consumes it, and ring_take its bytes. */
Status ring_peek(const Ring *r, Head *head);
void ring_accept(Ring *r, uint64_t size);
Status ring_take(Ring *r, char *into, uint64_t size, Mode mode);
int ring_has_more(const Ring *r);
/* True if a whole message of `size` bytes has arrived, or arrives while `mode` lets this wait. */
int ring_await_whole(Ring *r, uint64_t size, Mode mode);

/* Wait until one of an inbox's `rings` has more bytes or is broken, or the wakeup word is not `known`: 1 or 0. */
int inbox_await(char *memory, Ring *const *rings, int count, uint64_t known, Mode mode);
void inbox_wake(char *memory, uint64_t value); /* wake its owner. Thread-safe */
uint64_t inbox_wakeup(const char *memory);

/* ------------------------------------------------------------------ pages.c */

/* Allocate the pages of a part of shared memory, so that no access there raises a signal: 0, or the kernel's errno. */
int allocate_pages(char *at, uint64_t nbytes);
int allocate_blocks(Group *g, uint64_t nbytes); /* of each of this member's blocks: 1, or 0 with a problem */

/* ------------------------------------------------------------------ control.c, for collectives.c */

#define STEP_BITS 24
#define STEPS (UINT64_C(1) << STEP_BITS) /* of a call */
#define FIRST 1
#define LAST (STEPS - 1)
#define ALL (-1)

static inline Word *word_at(const Group *g, uint64_t offset) { return (Word *)(void *)(g->memory + offset); }
static inline Word *counter_of(const Group *g, int member) {
    return word_at(g, g->counters_at + (uint64_t)member * LINE);
}
static inline int slot_of(const Group *g, uint64_t chunk) { return (int)((g->blocks + chunk) % SLOTS); }
static inline char *header_at(const Group *g, int member, int slot) {
    return g->memory + g->headers_at + (uint64_t)(member * SLOTS + slot) * g->header_stride;
}
static inline char *block_at(const Group *g, int member, int slot) {
    return g->memory + g->blocks_at + (uint64_t)(member * SLOTS + slot) * g->sizes.block;
}
/* A member's notes about the call, behind its header. */
static inline uint64_t *notes_of(const Group *g, int member) {
    return (uint64_t *)(void *)(header_at(g, member, (int)(g->number % SLOTS)) + HEADER_BYTES);
}
void publish(Group *g, uint64_t step);

/* These return 1, or 0 if the call has to wait or failed: then it returns stopped(). */
int enter(Group *g);                            /* begin a call: its number and header */
int reach(Group *g, int peer, uint64_t step);   /* wait until the peer, or ALL, has reached a step */
int meet(Group *g, int peer);                   /* wait for the first step, and compare headers */
int claim(Group *g, uint64_t chunk);            /* wait until no member reads the chunk's block any more */
static inline Status stopped(const Group *g) {
    if (g->problem.trouble == NO_PROBLEM) return AGAIN;
    return g->problem.trouble >= BAD_PLACE ? DAMAGED : MISMATCH;
}
int fail(Group *g, Trouble trouble, int peer, uint64_t found, uint64_t wanted); /* 0 */
void check_later(Group *g);                     /* compare headers when all members meet, before the call after next */
