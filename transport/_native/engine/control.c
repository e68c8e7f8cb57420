/* The control block of a group: each member's current call and its progress.
 *
 * - head: magic, members, bytes of a block;
 * - sleepers: a bit for each member, set while it sleeps in the kernel;
 * - counters: a cache line for each member, with its progress;
 * - headers: SLOTS for each member, each with a call and notes about it;
 * - blocks: SLOTS for each member, with data.
 *
 * Each member has a counter that it alone writes and that only rises: the number of its call, and in the low bits a
 * step of that call. A value of this counter is called a turn. Counters are never reset, so no event can be missed.
 *
 * A member compares all other headers with its own: at once if it waits for the other member anyway. Otherwise it does
 * so when all members meet in a later call, at the latest before the call after next.
 *
 * Headers and blocks are used in rotation. When a member begins a call, all others have begun its last call but one,
 * so headers of four calls are enough. For each block, a member records the turn at which all others have read the
 * data, and waits for that turn before it reuses the block. A member that has read the last chunk publishes the step
 * LAST if there were several chunks; otherwise it begins the next call.
 */
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC UINT64_C(0x6D6573686C696202)
#define MAX_STAGED (UINT64_C(16) << 20) /* bytes of all blocks */
#define MAX_BLOCK (UINT64_C(256) << 10) /* four blocks, and arrays of that size, fit a core's cache */
#define DIRECT_OF_TWO 8
#define AHEAD (16 * STEPS) /* a counter further ahead is damaged */

/* ------------------------------------------------------------------ the layout */

static uint64_t lay_out(Group *g) {
    uint64_t size = (uint64_t)g->size, at = LINE;
    g->sleepers_at = at;
    at += whole_lines((size + 63) / 64 * 8);
    g->counters_at = at;
    at += size * LINE;
    g->headers_at = at;
    g->header_stride = whole_lines(HEADER_BYTES + 8 * (2 + 3 * size));
    at = round_up(at + size * SLOTS * g->header_stride, PAGE);
    g->blocks_at = at;
    return round_up(at + size * SLOTS * g->sizes.block, LARGEST_PAGE);
}

uint64_t group_bytes(int size, Sizes *sizes) {
    uint64_t block = sizes->block ? sizes->block : least(MAX_BLOCK, MAX_STAGED / ((uint64_t)size * SLOTS));
    if (block < LINE * (uint64_t)size) block = LINE * (uint64_t)size; /* a share for each */
    sizes->block = whole_lines(block);
    Group g = {.size = size, .sizes = *sizes};
    return lay_out(&g);
}

int group_create(char *memory, int size, uint64_t block) {
    Group g = {.size = size, .sizes.block = block};
    lay_out(&g);
    int error = allocate_pages(memory, g.blocks_at);
    if (error) return error;
    Word *head = (Word *)(void *)memory;
    put(&head[1], (uint64_t)size);
    put(&head[2], block);
    put(&head[0], MAGIC);
    return 0;
}

int group_open(Group *g, char *memory, uint64_t nbytes, int rank, int size, Sizes sizes, int may_spin) {
    *g = (Group){.memory = memory, .rank = rank, .size = size, .sizes = sizes, .compares = 1, .waits_for = ALL,
                 .floor = FIRST, .allocated = SMALL_BYTES};
    if (nbytes < PAGE || size < 2 || size > MAX_MEMBERS || rank < 0 || rank >= size) return -1;
    const Word *head = word_at(g, 0);
    uint64_t block = g->sizes.block = look_at(&head[2]);
    if (look_at(&head[0]) != MAGIC || look_at(&head[1]) != (uint64_t)size) return -1;
    if (block < LINE || block % LINE || block > nbytes || lay_out(g) != nbytes) return -1;
    if (size == 2) g->sizes.direct *= DIRECT_OF_TWO;
    g->sizes.direct = least(g->sizes.direct, block);
    g->sizes.unstaged = g->sizes.unstaged < LINE ? LINE : g->sizes.unstaged / LINE * LINE;
    size_t members = (size_t)size;
    g->arrays = calloc(2 * members, sizeof *g->arrays);
    g->places = calloc(members, sizeof *g->places);
    g->parts = calloc(members, sizeof *g->parts);
    g->cursors = calloc(2 * members, sizeof *g->cursors);
    g->left = calloc(members, sizeof *g->left);
    if (!g->arrays || !g->places || !g->parts || !g->cursors || !g->left) {
        group_close(g);
        return -2;
    }
    init_spin_budget(&g->spin_budget, may_spin);
    return 0;
}

void group_close(Group *g) {
    free(g->arrays);
    free(g->places);
    free(g->parts);
    free(g->cursors);
    free(g->left);
    free(g->arenas);
    g->arrays = NULL, g->places = NULL, g->parts = NULL, g->cursors = NULL, g->left = NULL, g->arenas = NULL;
}

/* ------------------------------------------------------------------ counters */

int fail(Group *g, Trouble trouble, int peer, uint64_t found, uint64_t wanted) {
    g->problem = (Problem){.trouble = trouble, .peer = peer, .found = found, .wanted = wanted};
    return 0;
}

void publish(Group *g, uint64_t step) {
    Word *mine = counter_of(g, g->rank), *sleepers = word_at(g, g->sleepers_at);
    put(mine, g->base + step);
    for (int i = 0; i < (g->size + 63) / 64; i++)
        if (sleepers_of(&sleepers[i])) {
            wake(mine);
            return;
        }
}

void group_wake(Group *g) {
    g->wake_requested = 1;
    for (int member = 0; member < g->size; member++) wake(counter_of(g, member));
}

typedef struct {
    const Group *group;
    uint64_t turn;
    int peer;
} Awaited;

/* A damaged counter, too far ahead, does not count as arrived. */
static inline int has_arrived(const Group *g, int member, uint64_t turn) {
    return look_at(counter_of(g, member)) - turn < AHEAD;
}

static int have_arrived(const void *what) {
    const Awaited *a = what;
    const Group *g = a->group;
    if (g->wake_requested) return 1;
    if (a->peer != ALL) return has_arrived(g, a->peer, a->turn);
    for (int member = 0; member < g->size; member++)
        if (member != g->rank && !has_arrived(g, member, a->turn)) return 0;
    return 1;
}

static int first_missing(const Group *g, const Awaited *a) {
    if (a->peer != ALL) return has_arrived(g, a->peer, a->turn) ? ALL : a->peer;
    for (int member = 0; member < g->size; member++)
        if (member != g->rank && !has_arrived(g, member, a->turn)) return member;
    return ALL;
}

/* Sleep until the awaited members arrive. An arriving member wakes the threads that sleep on its counter. */
static int sleep_until(Group *g, const Awaited *a) {
    Word *flags = word_at(g, g->sleepers_at) + g->rank / 64;
    uint64_t bit = UINT64_C(1) << g->rank % 64;
    double end = now() + SLICE_SECONDS, left = SLICE_SECONDS;
    int arrived = 0;
    add_sleeper(flags, bit);
    while (left > 0 && !g->wake_requested) {
        g->waits_for = first_missing(g, a);
        if (g->waits_for == ALL) {
            arrived = 1;
            break;
        }
        Word *counter = counter_of(g, g->waits_for);
        uint64_t seen = look_again(counter);
        if (seen - a->turn < AHEAD) continue;
        sleep_on(counter, seen, left);
        if (look_at(counter) == seen) break; /* the slice is over, or group_wake was called */
        left = end - now();
    }
    remove_sleeper(flags, bit);
    return arrived;
}

static int await(Group *g, int peer, uint64_t turn) {
    Awaited awaited = {g, turn, peer};
    int arrived = spin_until(&g->spin_budget, g->mode, have_arrived, &awaited) ||
                  (g->mode >= SLEEP && sleep_until(g, &awaited));
    if (g->wake_requested) return 0; /* the caller decides whether the call goes on, even if all have arrived by now */
    if (arrived) return 1;
    int missing = first_missing(g, &awaited);
    g->waits_for = missing;
    if (missing == ALL) return 1;
    uint64_t seen = look_at(counter_of(g, missing));
    if (seen >= turn + AHEAD) return fail(g, BAD_COUNTER, missing, seen, turn);
    return 0;
}

static int await_all(Group *g, uint64_t turn) {
    if (g->floor >= turn) return 1;
    if (!await(g, ALL, turn)) return 0;
    uint64_t first = UINT64_MAX;
    for (int member = 0; member < g->size; member++)
        if (member != g->rank) first = least(first, look_at(counter_of(g, member)));
    g->floor = first;
    return 1;
}

int reach(Group *g, int peer, uint64_t step) {
    return peer == ALL ? await_all(g, g->base + step) : await(g, peer, g->base + step);
}

/* ------------------------------------------------------------------ headers */

static int is_same(Group *g, int peer, unsigned long long number, const Header *ours) {
    uint64_t found[HEADER_BYTES / 8], own[HEADER_BYTES / 8], differ = 0;
    memcpy(found, header_at(g, peer, (int)(number % SLOTS)), HEADER_BYTES);
    memcpy(own, ours, HEADER_BYTES);
    for (int i = 0; i < HEADER_BYTES / 8; i++) differ |= found[i] ^ own[i];
    if (!differ || !g->compares) return 1;
    g->problem = (Problem){.trouble = OTHER_CALL, .peer = peer, .ours = *ours};
    memcpy(&g->problem.theirs, found, HEADER_BYTES);
    return 0;
}

static int are_same(Group *g, unsigned long long number, const Header *ours) {
    for (int member = 0; member < g->size; member++)
        if (member != g->rank && !is_same(g, member, number, ours)) return 0;
    return 1;
}

/* Compare the deferred headers of the calls before `limit`. All members have begun those calls, and none has begun the
 * fourth call after any of them, which would overwrite its header. */
static int compare_earlier(Group *g, unsigned long long limit) {
    while (g->unchecked_count && g->unchecked[0].number < limit) {
        if (!are_same(g, g->unchecked[0].number, &g->unchecked[0].header)) return 0;
        memmove(g->unchecked, g->unchecked + 1, sizeof *g->unchecked * (size_t)--g->unchecked_count);
    }
    return 1;
}

void check_later(Group *g) {
    g->unchecked[g->unchecked_count].number = g->number;
    g->unchecked[g->unchecked_count++].header = g->call.header;
}

int enter(Group *g) {
    uint64_t begun = g->base > 2 * STEPS ? g->base - 2 * STEPS + FIRST : 0;
    if (!await_all(g, begun) || !claim(g, 0) || !compare_earlier(g, g->number - 1)) return 0;
    memcpy(header_at(g, g->rank, (int)(g->number % SLOTS)), &g->call.header, HEADER_BYTES);
    return 1;
}

int meet(Group *g, int peer) {
    if (!reach(g, peer, FIRST)) return 0;
    if (peer != ALL) return is_same(g, peer, g->number, &g->call.header);
    return are_same(g, g->number, &g->call.header) && compare_earlier(g, g->number);
}

int claim(Group *g, uint64_t chunk) {
    unsigned long long *free_at = &g->free_at[slot_of(g, chunk)];
    if (!await_all(g, *free_at)) return 0;
    *free_at = g->base + chunk + g->call.taken;
    return 1;
}
