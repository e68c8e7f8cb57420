/* Arrays are cut into chunks, which pass through the members' blocks one after the other. A block holds a chunk of one
 * array, or a share for each reader. Data in symmetric memory is not staged: the other members read it directly. If
 * that is true of all of a call's data, chunks are longer.
 */
#include "engine/chunks.h"

#include <string.h>

enum { PLACED, CHUNKS, LISTS }; /* the start of notes; then lists by member: bytes sent, bytes expected, places */

#define MAX_REDUCED (256 << 10) /* bytes that the caller reduces at a time */

static int has_many_inputs(const Call *c) {
    return c->kind == ALL_TO_ALL || c->kind == REDUCE_SCATTER || c->kind == SCATTER;
}
static int has_many_outputs(const Call *c) {
    return c->kind == ALL_TO_ALL || c->kind == ALL_GATHER || c->kind == GATHER;
}
/* True if the header contains all sizes, so that members know them before they meet. */
static int sizes_are_known(const Call *c) {
    return c->kind == BROADCAST || c->kind == REDUCE || c->kind == ALL_REDUCE;
}

/* ------------------------------------------------------------------ senders and receivers */

Array *sent_to(Group *g, int peer) {
    Call *c = &g->call;
    int roots = c->kind == BROADCAST || c->kind == SCATTER, to_root = c->kind == REDUCE || c->kind == GATHER;
    if (peer == g->rank || (roots && c->root != g->rank) || (to_root && c->root != peer)) return NULL;
    return &g->arrays[has_many_inputs(c) ? peer : 0];
}

Array *expected_from(Group *g, int peer) {
    Call *c = &g->call;
    int roots = c->kind == BROADCAST || c->kind == SCATTER, to_root = c->kind == REDUCE || c->kind == GATHER;
    if (peer == g->rank || (roots && c->root != peer) || (to_root && c->root != g->rank)) return NULL;
    return &g->arrays[c->inputs + (has_many_outputs(c) ? peer : 0)];
}

void size_chunks(Group *g) {
    Call *c = &g->call;
    uint64_t most = 0, size = (uint64_t)g->size, block = g->sizes.block, sources = 0, placed = 0;
    for (int member = 0; member < g->size; member++) {
        const Array *sent = sent_to(g, member), *expected = expected_from(g, member);
        if (sent && sent->nbytes > most) most = sent->nbytes;
        if (expected && expected->nbytes > most) most = expected->nbytes;
        sources += sent != NULL;
        placed += sent && sent->place;
    }
    c->chunk_bytes = has_many_inputs(c) ? block / (size - 1) / LINE * LINE : block;
    c->chunks = most > c->chunk_bytes ? (most + c->chunk_bytes - 1) / c->chunk_bytes : 1;
    if (c->kind == ALL_REDUCE) c->chunk_bytes = whole_lines((most + c->chunks - 1) / c->chunks);
    if (sizes_are_known(c)) c->blocks = c->chunks;
    c->small = sizes_are_known(c) && most <= SMALL_BYTES;
    c->many = c->chunks > 1;
    c->in_place = sources && placed == sources && (c->many || c->kind == ALL_REDUCE);
    c->along = c->kind == ALL_GATHER && !c->in_place;
    for (int i = 0; c->along && i < c->count; i++) c->along = !g->arrays[i].strides;
    for (int member = 0; member < g->size; member++) g->places[member] = NULL;
}

uint64_t staged_bytes(Group *g) {
    const Call *c = &g->call;
    if (c->in_place || (!c->inputs && c->kind != ALL_REDUCE)) return 0;
    if (has_many_inputs(c)) return g->sizes.block; /* a share for each reader, from the first to the last byte */
    return c->chunks > 1 ? c->chunk_bytes : g->arrays[0].nbytes;
}

/* ------------------------------------------------------------------ addresses */

typedef struct {
    uint64_t low, high; /* in bytes of an array */
} Piece;

static Piece piece_of(const Group *g, const Array *array, uint64_t chunk, Cut cut) {
    const Call *c = &g->call;
    uint64_t start = chunk * c->chunk_bytes, size = (uint64_t)g->size, rank = (uint64_t)g->rank;
    uint64_t count = start < array->nbytes ? least(array->nbytes - start, c->chunk_bytes) : 0;
    if (cut == WHOLE) return (Piece){start, start + count};
    uint64_t share = whole_lines((count + size - 1) / size);
    uint64_t low = least(rank * share, count), high = least((rank + 1) * share, count);
    if (cut == OWN) return (Piece){start + low, start + high};
    return cut == BEFORE ? (Piece){start, start + low} : (Piece){start + high, start + count};
}

char *in_block(const Group *g, int owner, int reader, uint64_t chunk, uint64_t low) {
    const Call *c = &g->call;
    if (c->small) return (char *)notes_of(g, owner) + low;
    uint64_t share = has_many_inputs(c) && reader != owner ? (uint64_t)(reader - (reader > owner)) : 0;
    return block_at(g, owner, slot_of(g, chunk)) + share * c->chunk_bytes + low - chunk * c->chunk_bytes;
}

static char *theirs(const Group *g, int peer, uint64_t chunk, uint64_t low) {
    return g->places[peer] ? g->places[peer] + low : in_block(g, peer, g->rank, chunk, low);
}

/* The address of `nbytes` at a place in a member's symmetric memory; NULL if the place is invalid. */
static char *resolve(const Group *g, uint64_t place, int member, uint64_t nbytes) {
    uint64_t number = (place - 1) >> PLACE_BITS, offset = (place - 1) & ((UINT64_C(1) << PLACE_BITS) - 1);
    for (int i = 0; i < g->arena_count; i++) {
        const Arena *a = &g->arenas[i];
        if (a->number == number && nbytes <= a->part && offset <= a->part - nbytes)
            return a->memory + (uint64_t)member * a->part + offset;
    }
    return NULL;
}

/* ------------------------------------------------------------------ notes */

void note_sizes(Group *g) {
    const Call *c = &g->call;
    uint64_t *notes = notes_of(g, g->rank), *list = notes + LISTS;
    if (sizes_are_known(c)) {
        if (!c->small) notes[PLACED] = c->in_place ? g->arrays[0].place : 0;
        return;
    }
    notes[PLACED] = (uint64_t)c->in_place;
    notes[CHUNKS] = c->chunks;
    for (int member = 0; member < g->size; member++, list++) {
        const Array *sent = sent_to(g, member), *expected = expected_from(g, member);
        list[0] = sent ? sent->nbytes : 0;
        list[g->size] = expected ? expected->nbytes : 0;
        list[2 * g->size] = sent && c->in_place ? sent->place : 0;
    }
}

/* Compare the sizes in a sender's notes: 1, or 0 with a problem. *place is that of the sender's data. */
static int compare_with(Group *g, int peer, uint64_t expected, uint64_t *place) {
    Call *c = &g->call;
    const uint64_t *notes = notes_of(g, peer), *list = notes + LISTS + g->rank;
    const Array *sent = sent_to(g, peer);
    *place = c->small ? 0 : notes[PLACED];
    if (sizes_are_known(c)) return 1;
    uint64_t their_sent = list[0], their_expected = list[g->size], chunks = notes[CHUNKS];
    if (*place) *place = list[2 * g->size];
    if (their_sent != expected) return fail(g, SENT, peer, their_sent, expected);
    if (sent && their_expected != sent->nbytes) return fail(g, EXPECTS, peer, their_expected, sent->nbytes);
    if (chunks > LAST / 2) return fail(g, BAD_COUNTER, peer, chunks, c->chunks);
    if (chunks > c->chunks) c->chunks = chunks;
    return 1;
}

int compare_sizes(Group *g) {
    Call *c = &g->call;
    int everywhere = 1;
    for (int peer = 0; peer < g->size; peer++) {
        const Array *expected = expected_from(g, peer);
        uint64_t place = 0;
        everywhere &= !sent_to(g, peer) || c->in_place;
        if (!expected) continue;
        if (!compare_with(g, peer, expected->nbytes, &place)) return 0;
        if (place && !(g->places[peer] = resolve(g, place, peer, expected->nbytes)))
            return fail(g, BAD_PLACE, peer, place, expected->nbytes);
        everywhere &= place != 0;
    }
    c->many = c->chunks > 1;
    if (everywhere) {
        uint64_t total = c->chunks * c->chunk_bytes;
        c->chunk_bytes = g->sizes.unstaged;
        c->chunks = total > c->chunk_bytes ? (total + c->chunk_bytes - 1) / c->chunk_bytes : 1;
    }
    return 1;
}

/* ------------------------------------------------------------------ copying */

/* Interleaved parts: copying a run of each in turn follows the order of memory, which the processor prefetches. */
static void stage_in_turn(Group *g, uint64_t chunk) {
    Cursor *to = g->cursors, *from = g->cursors + g->size;
    int readers[MAX_MEMBERS], count = 0;
    uint64_t total = 0;
    for (int reader = 0; reader < g->size; reader++) {
        Array *array = sent_to(g, reader);
        if (!array) continue;
        Piece piece = piece_of(g, array, chunk, WHOLE);
        g->left[reader] = piece.high - piece.low;
        total += g->left[reader];
        to[reader] = cursor_at(in_block(g, g->rank, reader, chunk, piece.low), NULL, 0);
        from[reader] = cursor_at(array->data, array->strides, piece.low);
        readers[count++] = reader;
    }
    Copy way = way_to_stage(&g->staging, total);
    for (int i = 0; total; i = (i + 1) % count) {
        int reader = readers[i];
        uint64_t size = least(g->left[reader], from[reader].left);
        move_bytes(way, &to[reader], &from[reader], size);
        g->left[reader] -= size;
        total -= size;
    }
    if (way == stream_past) end_stream();
}

static void stage_for(Group *g, const Array *array, int reader, uint64_t chunk) {
    const Call *c = &g->call;
    Piece piece = piece_of(g, array, chunk, WHOLE);
    uint64_t size = piece.high - piece.low;
    if (!size) return;
    char *into = in_block(g, g->rank, reader, chunk, piece.low);
    /* Data for all members is in the cache now, so copy this member's own as well. */
    char *own = c->along ? g->arrays[c->inputs + g->rank].data : NULL;
    Also also = {own && own != array->data ? own + piece.low : NULL, c->copy};
    Source source = {array->strides ? array->data : array->data + piece.low, array->strides, piece.low};
    stage_bytes(&g->staging, into, source, size, size, also);
}

void stage(Group *g, uint64_t chunk) {
    const Call *c = &g->call;
    if (c->in_place) return;
    int has_gaps = 0;
    for (int i = 0; i < c->inputs; i++) has_gaps |= g->arrays[i].strides != NULL;
    if (has_gaps && has_many_inputs(c) && g->size > 2 && chunk) { /* stage_for measures on the first chunk */
        stage_in_turn(g, chunk);
        return;
    }
    for (int reader = 0; reader < g->size; reader++) {
        const Array *array = sent_to(g, reader);
        if (!array) continue;
        stage_for(g, array, reader, chunk);
        if (!has_many_inputs(c)) return;
    }
}

void stage_others(Group *g, uint64_t chunk) {
    if (g->call.in_place) return;
    for (Cut cut = BEFORE; cut <= AFTER; cut += AFTER - BEFORE) {
        Piece piece = piece_of(g, g->arrays, chunk, cut);
        copy_bytes(in_block(g, g->rank, g->rank, chunk, piece.low), g->arrays->data + piece.low, piece.high - piece.low);
    }
}

void keep_own(Group *g) {
    const Call *c = &g->call;
    const Array *from = &g->arrays[has_many_inputs(c) ? g->rank : 0];
    const Array *to = &g->arrays[c->inputs + (has_many_outputs(c) ? g->rank : 0)];
    if (c->along || from->data == to->data) return;
    Cursor into = cursor_at(to->data, to->strides, 0), source = cursor_at(from->data, from->strides, 0);
    move_bytes(c->copy, &into, &source, from->nbytes);
    if (c->copy == stream_past) end_stream();
}

static void take_from(Group *g, const Array *array, int peer, uint64_t chunk, Cut cut) {
    Piece piece = piece_of(g, array, chunk, cut);
    if (piece.low == piece.high) return;
    Cursor to = cursor_at(array->data, array->strides, piece.low);
    Cursor from = cursor_at(theirs(g, peer, chunk, piece.low), NULL, 0);
    move_bytes(g->call.copy, &to, &from, piece.high - piece.low);
}

void take(Group *g, uint64_t chunk) {
    for (int i = 1; i < g->size; i++) { /* members begin with different peers */
        int peer = (g->rank + i) % g->size;
        const Array *array = expected_from(g, peer);
        if (array) take_from(g, array, peer, chunk, WHOLE);
    }
    if (g->call.copy == stream_past) end_stream();
}

void take_others(Group *g, uint64_t chunk) {
    if (g->call.in_place) return;
    take_from(g, g->arrays, g->rank, chunk, BEFORE);
    take_from(g, g->arrays, g->rank, chunk, AFTER);
}

/* ------------------------------------------------------------------ reducing */

void begin_reduce(Group *g, int into, uint64_t chunk, Cut cut) {
    Call *c = &g->call;
    Piece piece = piece_of(g, &g->arrays[into], chunk, cut);
    c->into = into;
    c->chunk = chunk;
    c->low = c->at = piece.low;
    c->high = piece.high;
    g->part_bytes = 0;
}

/* Write a share's result of an all_reduce back to the places of its operands. */
static void return_result(Group *g, char *result, uint64_t low, uint64_t size) {
    for (int member = 0; member < g->size; member++)
        if (member != g->rank) copy_bytes(theirs(g, member, g->call.chunk, low), result, size);
}

int reduce_on(Group *g) {
    Call *c = &g->call;
    int returns = c->kind == ALL_REDUCE;
    if (g->part_bytes) { /* the caller has reduced these */
        if (returns) return_result(g, g->out, c->at, g->part_bytes);
        c->at += g->part_bytes;
        g->part_bytes = 0;
    }
    if (c->at == c->high) return 1;
    const char *own = g->arrays[has_many_inputs(c) ? g->rank : 0].data;
    int pair = c->loops && returns && g->size == 2;
    /* return_result copies a result while it is in the cache. */
    uint64_t most = !c->loops ? MAX_REDUCED : pair || !returns ? UINT64_MAX : 4096;
    while (c->at < c->high) {
        uint64_t size = least(c->high - c->at, most);
        for (int member = 0; member < g->size; member++)
            g->parts[member] = member == g->rank ? own + c->at : theirs(g, member, c->chunk, c->at);
        g->out = g->arrays[c->into].data + c->at;
        if (!c->loops) {
            g->part_bytes = size;
            return 0;
        }
        if (pair) {
            c->loops->both((void *)(uintptr_t)g->parts[0], (void *)(uintptr_t)g->parts[1], size / c->loops->itemsize);
        } else {
            reduce_parts(c->loops, g->out, g->parts, g->size, size);
            if (returns) return_result(g, g->out, c->at, size);
        }
        c->at += size;
    }
    return 1;
}
