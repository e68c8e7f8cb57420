/* The collectives: one function per pattern of data movement. A function returns when it has to wait. Called again, it
 * continues there. Its state is in the call, because local variables do not survive a return.
 *
 * Exchanges: every member has data for every other one. Each notes its sizes and stages the first chunk. All meet.
 * Then each stages one chunk ahead of the chunk that it copies out.
 *
 * From or to a root: senders stage ahead as many chunks as they have blocks. Receivers publish each chunk that they
 * have copied out. Except in a broadcast, a sender meets its receivers before its second chunk. It leaves a call of one
 * chunk without waiting.
 *
 * A large all_reduce: each member stages the other members' shares of each chunk. It reduces its own share from all
 * other blocks and its own array. It writes the result to its array, and back to where the share was staged. Then
 * every member copies the other results out of its own block. So two members alternate on each place in a block, and
 * each reads it before it writes it: processors are slower to write a line that another has only read.
 */
#include "engine/chunks.h"

/* The function continues at this line until the condition holds, and returns stopped() until then. */
#define RESUME switch (c->line) { case 0:
#define HERE c->line = __LINE__; __attribute__((fallthrough)); case __LINE__:
#define WAIT_UNTIL(CONDITION) HERE if (!(CONDITION)) return stopped(g)
#define REDUCE_ALL HERE if (!reduce_on(g)) return UNSUPPORTED
#define CHECK(CONDITION) if (!(CONDITION)) return stopped(g)
/* Let the caller check signals after much data. */
#define REST if (has_moved_much(g)) { c->line = __LINE__; return AGAIN; case __LINE__:; }
#define COMPLETE } return DONE_ALL

static int has_moved_much(Group *g) {
    Call *c = &g->call;
    c->moved += c->chunk_bytes * (uint64_t)g->size;
    if (c->moved < MUCH) return 0;
    c->moved = 0;
    return 1;
}

static Status barrier(Group *g) {
    Call *c = &g->call;
    RESUME
    WAIT_UNTIL(enter(g));
    publish(g, FIRST);
    WAIT_UNTIL(meet(g, ALL));
    COMPLETE;
}

/* Reduce all of a small array: 1, or 0 if the caller has to. */
static int reduce_small(Group *g) {
    const Array *array = g->arrays;
    if (g->part_bytes || !array->nbytes) return 1;
    /* This member's operand is its array, which is in its cache. */
    for (int member = 0; member < g->size; member++)
        g->parts[member] = member == g->rank ? array->data : in_block(g, member, g->rank, 0, 0);
    g->out = array->data;
    if (!g->call.loops) {
        g->part_bytes = array->nbytes;
        return 0;
    }
    reduce_parts(g->call.loops, g->out, g->parts, g->size, array->nbytes);
    return 1;
}

/* Each member stages its whole array, and reduces all members' arrays itself. */
static Status small_all_reduce(Group *g) {
    Call *c = &g->call;
    Array *array = g->arrays;
    RESUME
    WAIT_UNTIL(enter(g));
    stage_bytes(&g->staging, in_block(g, g->rank, g->rank, 0, 0), (Source){array->data, NULL, 0}, array->nbytes, array->nbytes, (Also){0});
    publish(g, FIRST);
    WAIT_UNTIL(meet(g, ALL));
    HERE if (!reduce_small(g)) return UNSUPPORTED;
    COMPLETE;
}

static Status all_reduce(Group *g) {
    Call *c = &g->call;
    RESUME
    WAIT_UNTIL(enter(g));
    note_sizes(g);
    stage_others(g, 0);
    publish(g, FIRST);
    WAIT_UNTIL(meet(g, ALL));
    CHECK(compare_sizes(g));
    /* At step n + 1, chunk n is staged and chunk n - 1 is reduced. */
    for (c->chunk = 0; c->chunk <= c->chunks; c->chunk++) {
        if (c->chunk) {
            WAIT_UNTIL(reach(g, ALL, c->chunk + 1));
        }
        if (c->chunk < c->chunks) {
            begin_reduce(g, 0, c->chunk, OWN);
            REDUCE_ALL;
            if (c->chunk + 1 < c->chunks) {
                WAIT_UNTIL(c->in_place || claim(g, c->chunk + 1));
                stage_others(g, c->chunk + 1);
            }
            publish(g, c->chunk + 2);
        }
        if (c->chunk) take_others(g, c->chunk - 1);
        REST
    }
    /* From here on, no member uses another one's block, nor its own before the next call. */
    COMPLETE;
}

static Status exchange(Group *g) {
    Call *c = &g->call;
    RESUME
    WAIT_UNTIL(enter(g));
    note_sizes(g);
    stage(g, 0);
    publish(g, FIRST);
    if (c->kind != REDUCE_SCATTER) keep_own(g);
    WAIT_UNTIL(meet(g, ALL));
    CHECK(compare_sizes(g));
    for (c->chunk = 0; c->chunk < c->chunks; c->chunk++) {
        if (c->chunk + 1 < c->chunks) {
            WAIT_UNTIL(c->in_place || claim(g, c->chunk + 1));
            stage(g, c->chunk + 1);
            publish(g, c->chunk + 2);
        }
        WAIT_UNTIL(reach(g, ALL, c->chunk + 1));
        if (c->kind == REDUCE_SCATTER) {
            begin_reduce(g, c->inputs, c->chunk, WHOLE);
            REDUCE_ALL;
        } else {
            take(g, c->chunk);
        }
        REST
    }
    if (c->many) publish(g, LAST);
    WAIT_UNTIL(!c->in_place || reach(g, ALL, LAST));
    COMPLETE;
}

/* The member, or ALL, at the other end of a call with a root. */
static int other_end(const Group *g) { return g->call.root == g->rank ? ALL : g->call.root; }

static Status send(Group *g) {
    Call *c = &g->call;
    RESUME
    WAIT_UNTIL(enter(g));
    CHECK(compare_sizes(g));
    note_sizes(g);
    stage(g, 0);
    /* Other senders may have more chunks: LAST satisfies a receiver that waits for all. */
    publish(g, c->many ? FIRST : LAST);
    if (c->kind != BROADCAST && c->chunks > 1) {
        WAIT_UNTIL(meet(g, other_end(g)));
    }
    for (c->chunk = 1; c->chunk < c->chunks; c->chunk++) {
        WAIT_UNTIL(c->in_place || claim(g, c->chunk));
        stage(g, c->chunk);
        publish(g, c->chunk + 1);
        REST
    }
    if (c->kind == SCATTER) keep_own(g);
    check_later(g);
    if (c->many) publish(g, LAST);
    WAIT_UNTIL(!c->in_place || meet(g, other_end(g)));
    WAIT_UNTIL(!c->in_place || reach(g, other_end(g), LAST));
    COMPLETE;
}

static Status receive(Group *g) {
    Call *c = &g->call;
    RESUME
    WAIT_UNTIL(enter(g));
    publish(g, FIRST);
    if (c->kind == GATHER) keep_own(g);
    WAIT_UNTIL(meet(g, other_end(g)));
    CHECK(compare_sizes(g));
    for (c->chunk = 0; c->chunk < c->chunks; c->chunk++) {
        WAIT_UNTIL(reach(g, other_end(g), c->chunk + 1));
        if (c->kind == REDUCE) {
            begin_reduce(g, 0, c->chunk, WHOLE);
            REDUCE_ALL;
        } else {
            take(g, c->chunk);
        }
        if (c->chunk + 1 < c->chunks) publish(g, c->chunk + 2);
        REST
    }
    if (other_end(g) != ALL) check_later(g); /* otherwise meet() has compared all headers */
    if (c->many) publish(g, LAST);
    COMPLETE;
}

/* ------------------------------------------------------------------ calls */

static Status (*function_of(const Group *g))(Group *) {
    const Call *c = &g->call;
    switch (c->kind) {
    case BARRIER: return barrier;
    case ALL_REDUCE: return g->arrays->nbytes <= g->sizes.direct ? small_all_reduce : all_reduce;
    case BROADCAST:
    case SCATTER: return c->root == g->rank ? send : receive;
    case REDUCE:
    case GATHER: return c->root == g->rank ? receive : send;
    default: return exchange;
    }
}

int group_arrays(int size, int rank, int kind, int root, int *inputs) {
    int is_root = root == rank;
    if (root < 0 || root >= size) return -1;
    *inputs = 0;
    switch (kind) {
    case BARRIER: return 0;
    case ALL_REDUCE: return 1;
    case BROADCAST: *inputs = is_root; return 1;
    case REDUCE: *inputs = !is_root; return 1;
    case ALL_GATHER: *inputs = 1; return size + 1;
    case REDUCE_SCATTER: *inputs = size; return size + 1;
    case GATHER: *inputs = 1; return is_root ? size + 1 : 1;
    case SCATTER: *inputs = is_root ? size : 0; return *inputs + 1;
    case ALL_TO_ALL: *inputs = size; return 2 * size;
    default: return -1;
    }
}

Status group_begin(Group *g, const CallSpecification *what, Mode mode) {
    Call *c = &g->call;
    g->number++;
    g->base += STEPS;
    g->blocks += c->blocks;
    *c = (Call){.header = what->header, .kind = what->kind, .root = what->root, .inputs = what->inputs,
                  .count = what->count, .reduces = what->reduces, .loops = what->loops,
                .copy = copy_bytes, .blocks = 1};
    g->problem.trouble = NO_PROBLEM;
    g->part_bytes = 0;
    c->function = function_of(g);
    c->taken = c->function == exchange ? 3 : 2; /* an exchange stages one chunk ahead */
    uint64_t staged = 0;
    if (c->function == small_all_reduce) {
        staged = g->arrays->nbytes;
        c->small = staged <= SMALL_BYTES;
    } else if (c->function != barrier) {
        uint64_t written = 0;
        for (int i = c->inputs; i < c->count; i++) written += g->arrays[i].nbytes;
        /* A reduction's results are in the cache, so don't bypass it. */
        if (!c->reduces && written >= STREAMED_BYTES) c->copy = stream_past;
        size_chunks(g);
        staged = staged_bytes(g);
    }
    if (staged > g->allocated && !allocate_blocks(g, staged)) return stopped(g);
    return group_go_on(g, mode);
}

Status group_go_on(Group *g, Mode mode) {
    g->mode = mode;
    g->waits_for = ALL;
    return g->call.function(g);
}
