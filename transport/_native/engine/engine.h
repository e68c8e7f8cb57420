/* The engine: collectives and messages of members that share memory. It knows no Python.
 *
 * A call is begun and then carried on until it is done. It never blocks for longer than SLICE_SECONDS, makes no
 * callbacks and raises nothing: its result tells the caller what to do next.
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
#define SLOTS 4 /* headers and blocks of a member, which its calls use in rotation */
#define HEADER_BYTES 32
#define PAGE 4096
#define LARGEST_PAGE 65536 /* a segment has whole pages on every machine, and the same layout */
#define NO_ROOT (-1)
#define SMALL_BYTES (LINE - HEADER_BYTES)

typedef enum {
    DONE_ALL,    /* the call is done */
    AGAIN,       /* check signals, deadline and lost peers, then carry on */
    UNSUPPORTED, /* reduce `parts` into `out`, which the engine cannot, then carry on */
    MISMATCH,    /* the members made different calls, which `problem` has */
    DAMAGED      /* a member, named in `problem`, wrote impossible values or has no memory left */
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

/* An array of a call. `strides` NULL: it lies in one piece. `place`: where it begins in this member's symmetric
 * memory, and 1; 0: it is private. */
typedef struct {
    char *data;
    uint64_t nbytes, place;
    const Strides *strides;
} Array;

/* A segment of symmetric memory: a part for each member, one after the other. A place in a part is the number of the
 * segment, then an offset of this many bits, and 1. */
#define PLACE_BITS 40
typedef struct {
    uint64_t number;
    char *memory;
    uint64_t part;
} Arena;

typedef enum { NO_PROBLEM, OTHER_CALL, SENT, EXPECTS, BAD_PLACE, BAD_COUNTER, NO_MEMORY } Trouble;

/* Why a call cannot go on. OTHER_CALL compared `theirs` and `ours`. Else `found` and `wanted` are sizes, a place or
 * a counter. NO_MEMORY found an errno, where it wanted that many bytes. */
typedef struct {
    Trouble trouble;
    int peer;
    Header ours, theirs;
    uint64_t found, wanted;
} Problem;

typedef struct Group Group;

/* A call under way. Sizes are in bytes. The first `inputs` arrays are read, the others written. */
typedef struct {
    Status (*function)(Group *);
    int line; /* of its function, where it goes on */
    Header header;
    int kind, root, inputs, count; /* root 0 where the kind has none */
    int reduces;
    const Loops *loops; /* how it reduces; NULL: the caller does */
    Copy copy;          /* how results are written */
    uint64_t chunk_bytes, chunks, chunk, moved;
    uint64_t blocks; /* that it uses, as far as all members know it */
    uint64_t taken;  /* a member this many steps past a chunk's number has taken the chunk */
    int in_place; /* the others read this member's arrays where they lie */
    int many;     /* chunks enough for blocks to be used again within the call */
    int small;    /* staged data lies beside the header, which the others read anyway */
    int along;    /* what this member keeps is copied with what it stages */
    uint64_t low, high, at; /* the bytes to reduce: from low to high of the array `into`; `at`: so far */
    int into;
} Call;

typedef struct {
    uint64_t block;    /* the most that a member stages at a time */
    uint64_t direct;   /* the most that every member reduces for itself, instead of a share; two do more */
    uint64_t unstaged; /* the most that is read in place at a time */
} Sizes;

/* One member's view. One thread at a time, except for group_wake. */
struct Group {
    char *memory;
    int rank, size;
    Sizes sizes;
    uint64_t sleepers_at, counters_at, headers_at, header_stride, blocks_at;
    unsigned long long number, base; /* of the call under way, and the turn at which it begins */
    uint64_t blocks;                 /* how many earlier calls have used, as far as all members know it */
    unsigned long long floor;        /* a turn that all members have reached */
    unsigned long long free_at[SLOTS]; /* by slot: the turn they must reach before this member's block is used */
    uint64_t allocated;              /* the bytes of each of this member's blocks that have pages */
    struct {
        unsigned long long number;
        Header header;
    } unchecked[SLOTS]; /* calls whose headers are still to be compared, oldest first */
    int unchecked_count;
    int compares; /* 0: take every member's word, to measure what comparing costs */
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
    char **places;      /* by member: where its data is read in place; NULL: it is staged */
    const char **parts; /* by member: the operands of a reduction, */
    char *out;          /* its result, */
    uint64_t part_bytes; /* and the bytes of each */
    Cursor *cursors;
    uint64_t *left;
};

/* The bytes of the memory that `size` members share; `sizes.block` 0 is chosen. */
uint64_t group_bytes(int size, Sizes *sizes);

/* Write the head of such memory, which is zero, before others see it: 0, or an errno: it has no pages. */
int group_create(char *memory, int size, uint64_t block);

/* Make a member's view: 0; -1: the memory has another layout, or is too small; -2: there is none for the view. */
int group_open(Group *g, char *memory, uint64_t nbytes, int rank, int size, Sizes sizes, int may_spin);
void group_close(Group *g);

/* Begin a call, whose arrays are in `arrays`, and go on as far as `mode` lets it. `loops` is NULL where it reduces
 * nothing, or the caller has to reduce. */
typedef struct {
    int kind, root, inputs, count, reduces;
    Header header;
    const Loops *loops;
} CallSpecification;
Status group_begin(Group *g, const CallSpecification *what, Mode mode);
Status group_go_on(Group *g, Mode mode);

void group_wake(Group *g); /* wake all sleeping members; this member's call returns AGAIN. Any thread */
int group_arrays(int size, int rank, int kind, int root, int *inputs); /* how many a call has; -1: no such call */

/* ------------------------------------------------------------------ rings of messages */

/* One end of a ring from one sender to one receiver, in the receiver's inbox: ring.c. */
typedef struct {
    char *data;
    Word *written, *broken, *sender_sleeps, *taken; /* the first three on one line */
    Word *wakeup, *asleep;                          /* of the inbox */
    uint64_t capacity, piece;
    uint64_t position, left; /* of this end; the bytes that the message under way still lacks */
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

uint64_t inbox_bytes(int size, uint64_t *capacity); /* of an inbox with a ring for each member; 0: chosen */
int inbox_create(char *memory, int size, uint64_t capacity); /* 0, or an errno: it has no pages */
/* The end of the ring from `sender` in an inbox; `member` is this one. 0; -1: it has another layout; an errno: the
 * sender gets no pages for the ring. */
int ring_open(Ring *r, char *memory, uint64_t nbytes, int size, int sender, int member, int may_spin);

/* Write a message: AGAIN with left == 0 where it has not begun, and go on with ring_write else. */
Status ring_begin(Ring *r, const Header *header, const char *data, uint64_t size, Mode mode);
Status ring_write(Ring *r, const char *data, uint64_t size, Mode mode);
int ring_has_room(const Ring *r, uint64_t size); /* for a message as it is now */
void ring_give_up(Ring *r);                      /* the message under way will not be completed, and none follows */
int ring_is_broken(const Ring *r);
void ring_wake_sender(Ring *r); /* any thread */

/* The head of the next message: AGAIN if there is none. It is taken by ring_accept, its bytes by ring_take. */
Status ring_peek(const Ring *r, Head *head);
void ring_accept(Ring *r, uint64_t size);
Status ring_take(Ring *r, char *into, uint64_t size, Mode mode);
int ring_has_more(const Ring *r);
/* True if a whole message of `size` bytes is there, or arrives while `mode` lets this wait. */
int ring_await_whole(Ring *r, uint64_t size, Mode mode);

/* Wait until one of some rings of an inbox has more, or is broken, or its wakeup word is not `known`: 1 or 0. */
int inbox_await(char *memory, Ring *const *rings, int count, uint64_t known, Mode mode);
void inbox_wake(char *memory, uint64_t value); /* wake its owner. Any thread */
uint64_t inbox_wakeup(const char *memory);

/* ------------------------------------------------------------------ pages.c */

/* Have the pages of a part of shared memory allocated, so that no access there raises a signal: 0, or the errno with which
 * the kernel refuses. */
int allocate_pages(char *at, uint64_t nbytes);
int allocate_blocks(Group *g, uint64_t nbytes); /* that many bytes of each of this member's blocks: 1, or 0 */

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

/* These return 1, or 0 where the call cannot go on yet, or at all: then stopped() is what it returns. */
int enter(Group *g);                            /* begin a call: its number and header */
int reach(Group *g, int peer, uint64_t step);   /* the peer, or ALL, has reached a step */
int meet(Group *g, int peer);                   /* it has reached the first, and makes the same call */
int claim(Group *g, uint64_t chunk);            /* the block for a chunk is free of what was in it */
static inline Status stopped(const Group *g) {
    if (g->problem.trouble == NO_PROBLEM) return AGAIN;
    return g->problem.trouble >= BAD_PLACE ? DAMAGED : MISMATCH;
}
int fail(Group *g, Trouble trouble, int peer, uint64_t found, uint64_t wanted); /* 0 */
void check_later(Group *g);                     /* compare headers when all meet, at the latest the call after next */
