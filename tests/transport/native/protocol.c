/* The engine under threads, with no interpreter: every member has its own view of one mapping, as processes have.
 *
 *     protocol calls SIZE CALLS SEED   mixed calls and messages, values checked; prints how many wake-ups were lost
 *     protocol damage SIZE ROUNDS SEED bits of shared memory are flipped meanwhile: every call ends, and nothing crashes;
 *                                      a flipped word may lose wake-ups
 */
#include "engine/engine.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_SIZE 8
#define MAX_FLOATS 10000
#define PART ((uint64_t)(2 * MAX_SIZE + 2) * MAX_FLOATS * 4)
#define RING_BYTES 4096

static int size, calls, damaging;
static uint64_t seed;
static char *memory, *inboxes[MAX_SIZE], *arena;
static uint64_t memory_bytes, inbox_size;
static _Atomic int broken, running;
static _Atomic long sleeps, lost_wakeups;

static uint64_t next(uint64_t *s) {
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

/* In place of the engine's: a sleep that ends late though the word has changed was not woken. */
void __wrap_sleep_on(Word *word, uint64_t seen, double seconds);
void __wrap_sleep_on(Word *word, uint64_t seen, double seconds) {
    struct timespec limit = {0, (long)(seconds * 1e9)};
    atomic_fetch_add(&sleeps, 1);
    long ended = syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &limit, NULL, 0);
    if (ended < 0 && errno == ETIMEDOUT && look_at(word) != seen) atomic_fetch_add(&lost_wakeups, 1);
}

#define CHECK(CONDITION)                                                                                       \
    do {                                                                                                       \
        if (!damaging && !(CONDITION)) {                                                                       \
            fprintf(stderr, "WRONG line %d: member %d of %d, kind %d root %d, call %llu\n", __LINE__, g->rank, \
                    size, g->call.kind, g->call.root, g->number);                                              \
            abort();                                                                                           \
        }                                                                                                      \
    } while (0)

static float value(size_t i, int from, int to, uint64_t call) {
    return (float)((from * 7 + to * 3 + (int)(i % 11) + (int)(call % 5)) % 64);
}

static int matches(const float *x, size_t n, int from, int to, uint64_t call) {
    for (size_t i = 0; i < n; i++)
        if (x[i] != value(i, from, to, call)) return 0;
    return 1;
}

static int is_sum(const float *x, size_t n, int to, uint64_t call) {
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int member = 0; member < size; member++) sum += value(i, member, to, call);
        if (x[i] != sum) return 0;
    }
    return 1;
}

static void fill(float *x, size_t n, int from, int to, uint64_t call) {
    for (size_t i = 0; i < n; i++) x[i] = value(i, from, to, call);
}

static int give_up(void) {
    broken = 1;
    return 0;
}

/* What NumPy does for the engine. */
static void reduce_for(Group *g) {
    float *out = (float *)(void *)g->out;
    for (size_t i = 0; i < g->part_bytes / 4; i++) {
        float sum = 0;
        for (int member = 0; member < size; member++) sum += ((const float *)(const void *)g->parts[member])[i];
        out[i] = sum;
    }
}

/* Carry a call on to its end: whether it came to one. */
static int finish(Group *g, Status status, int nap) {
    for (int attempts = 0; status != DONE_ALL; attempts++) {
        if (status == UNSUPPORTED) reduce_for(g);
        else if (status != AGAIN || (damaging && (attempts > 4 || broken))) {
            CHECK(0);
            broken = 1;
            return 0;
        }
        status = group_go_on(g, nap ? NAP : SLEEP);
    }
    return 1;
}

static int make_call(Group *g, float *own, uint64_t number, uint64_t *shared, uint64_t *mine) {
    int kind = BARRIER + (int)(next(shared) % 9), root = (int)(next(shared) % (uint64_t)size), me = g->rank;
    size_t most = next(shared) % 3 ? 150 : MAX_FLOATS, n = 1 + next(shared) % (most - 1);
    int symmetric = next(shared) % 4 == 0, engine_reduces = next(shared) % 2 == 0, reduces = 0;
    CallSpecification what = {.kind = kind, .root = root};
    if (kind == BARRIER || kind == ALL_REDUCE || kind == ALL_GATHER || kind == REDUCE_SCATTER || kind == ALL_TO_ALL)
        what.root = root = 0;
    what.header = (Header){.sequence = number, .elements = n, .root = root, .kind = (uint16_t)kind};
    what.count = group_arrays(size, me, kind, root, &what.inputs);
    reduces = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
    what.reduces = reduces;
    what.loops = reduces && engine_reduces ? find_loops(11, SUM) : NULL;
    size_t stride = (n + 15) / 16 * 16;
    float *base = symmetric ? (float *)(void *)(arena + (uint64_t)me * PART) : own, *x[2 * MAX_SIZE];
    for (int i = 0; i < what.count; i++) {
        x[i] = base + stride * (size_t)i;
        uint64_t place = symmetric ? (uint64_t)((char *)x[i] - (char *)base) + 1 : 0;
        g->arrays[i] = (Array){.data = (char *)x[i], .nbytes = n * 4, .place = place};
        if (i < what.inputs) fill(x[i], n, me, what.inputs == 1 ? 0 : i, number);
        else memset(x[i], 0xAB, n * 4);
    }
    if (kind == ALL_REDUCE || (kind == REDUCE && me == root)) fill(x[0], n, me, 0, number);
    int nap = next(mine) % 4 == 0;
    if (!finish(g, group_begin(g, &what, next(mine) % 2 ? LOOK : SPIN), nap)) return 0;
    const float *result = what.count ? x[what.inputs < what.count ? what.inputs : 0] : NULL;
    switch (kind) {
    case BROADCAST: CHECK(matches(x[0], n, root, 0, number)); break;
    case ALL_REDUCE: CHECK(is_sum(x[0], n, 0, number)); break;
    case REDUCE: CHECK(me == root ? is_sum(x[0], n, 0, number) : matches(x[0], n, me, 0, number)); break;
    case REDUCE_SCATTER: CHECK(is_sum(result, n, me, number)); break;
    case SCATTER: CHECK(matches(result, n, root, me, number)); break;
    case ALL_GATHER:
        for (int r = 0; r < size; r++) CHECK(matches(x[1 + r], n, r, 0, number));
        break;
    case GATHER:
        for (int r = 0; r < size && me == root; r++) CHECK(matches(x[1 + r], n, r, 0, number));
        break;
    case ALL_TO_ALL:
        for (int r = 0; r < size; r++) CHECK(matches(x[size + r], n, r, me, number));
        break;
    default: break;
    }
    return 1;
}

/* A message to the next member and one from the one before: whether both came to an end. */
static int exchange_messages(Group *g, Ring *to, Ring *from, char *data, char *into, uint64_t number, uint64_t n) {
    Header header = {.sequence = number, .elements = n, .extra = (uint32_t)number};
    for (uint64_t i = 0; i < n; i++) data[i] = (char)(i * 3 + number + (uint64_t)g->rank);
    Status sent = ring_begin(to, &header, data, n, LOOK), received = AGAIN;
    int begun = to->left || sent == DONE_ALL, taken = 0;
    for (int attempts = 0; sent != DONE_ALL || received != DONE_ALL; attempts++) {
        if (damaging && (attempts > 8 || broken || sent == DAMAGED || received == DAMAGED)) return give_up();
        if (sent != DONE_ALL) {
            sent = begun ? ring_write(to, data, n, SPIN) : ring_begin(to, &header, data, n, SPIN);
            begun |= to->left || sent == DONE_ALL;
        }
        if (received == DONE_ALL) continue;
        Head head;
        Ring *const rings[] = {from};
        if (!taken && !inbox_await(inboxes[g->rank], rings, 1, inbox_wakeup(inboxes[g->rank]), sent == DONE_ALL ? SLEEP : SPIN))
            continue;
        if (!taken) {
            received = ring_peek(from, &head);
            if (received == AGAIN) continue;
            CHECK(received == DONE_ALL && head.size == n && head.header.extra == (uint32_t)number);
            if (received != DONE_ALL || head.size > MAX_FLOATS * 4) return give_up();
            n = head.size;
            ring_accept(from, n);
            taken = 1;
        }
        received = ring_take(from, into, n, SPIN);
    }
    int before = (g->rank + size - 1) % size;
    for (uint64_t i = 0; i < n; i++) CHECK(into[i] == (char)(i * 3 + number + (uint64_t)before));
    return 1;
}

static void *member(void *argument) {
    int me = *(int *)argument, after = (me + 1) % size, before = (me + size - 1) % size;
    Group *g = calloc(1, sizeof *g);
    Ring *to = calloc(1, sizeof *to), *from = calloc(1, sizeof *from);
    Sizes sizes = {.direct = 64, .unstaged = 1024};
    if (group_open(g, memory, memory_bytes, me, size, sizes, 1) ||
        ring_open(to, inboxes[after], inbox_size, size, me, me, 1) ||
        ring_open(from, inboxes[me], inbox_size, size, before, me, 1))
        abort();
    g->arenas = calloc(1, sizeof *g->arenas);
    g->arenas[0] = (Arena){0, arena, PART};
    g->arena_count = 1;
    float *own = calloc(2 * MAX_SIZE + 2, MAX_FLOATS * 4);
    char *data = malloc(MAX_FLOATS * 4), *into = malloc(MAX_FLOATS * 4);
    uint64_t shared = seed, mine = seed * 31 + (uint64_t)me + 1;
    for (uint64_t number = 1; number <= (uint64_t)calls && !broken; number++) {
        if (next(&mine) % 16 == 0)
            for (volatile int spin = (int)(next(&mine) % 40000); spin > 0; spin--);
        if (next(&mine) % 128 == 0) usleep((useconds_t)(next(&mine) % 1500));
        uint64_t messages = next(&shared) % 3, nbytes = next(&shared) % 4 ? next(&shared) % 300 : next(&shared) % 30000;
        if (!make_call(g, own, number, &shared, &mine)) break;
        if (messages == 0 && !exchange_messages(g, to, from, data, into, number, nbytes)) break;
    }
    group_close(g);
    free(g), free(to), free(from), free(own), free(data), free(into);
    running--;
    return NULL;
}

/* Flip bits of what members tell each other, while they do. */
static void damage(uint64_t *s) {
    while (running) {
        usleep((useconds_t)(next(s) % 300));
        uint64_t control = memory_bytes - (uint64_t)size * SLOTS * 1024, where = next(s), bit = UINT64_C(1) << next(s) % 64;
        int inbox = next(s) % 3 == 0;
        char *base = inbox ? inboxes[next(s) % (uint64_t)size] : memory;
        uint64_t words = (inbox ? inbox_size : control) / 8;
        /* Not the head: it is read once, when the memory is mapped. */
        atomic_fetch_xor((Word *)(void *)(base + 64 + where % (words - 8) * 8), bit);
    }
}

static void *map(uint64_t nbytes) {
    void *found = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) abort();
    return found;
}

static void run(uint64_t *s) {
    Sizes sizes = {.block = 1024};
    uint64_t capacity = RING_BYTES;
    memory_bytes = group_bytes(size, &sizes);
    inbox_size = inbox_bytes(size, &capacity);
    memory = map(memory_bytes);
    group_create(memory, size, sizes.block);
    arena = map((uint64_t)size * PART);
    pthread_t threads[MAX_SIZE];
    int ranks[MAX_SIZE];
    for (int r = 0; r < size; r++) inbox_create(inboxes[r] = map(inbox_size), size, capacity);
    broken = 0;
    running = size;
    for (int r = 0; r < size; r++) {
        ranks[r] = r;
        pthread_create(&threads[r], NULL, member, &ranks[r]);
    }
    if (damaging) damage(s);
    for (int r = 0; r < size; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < size; r++) munmap(inboxes[r], inbox_size);
    munmap(memory, memory_bytes);
    munmap(arena, (uint64_t)size * PART);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    damaging = !strcmp(argv[1], "damage");
    size = atoi(argv[2]);
    seed = strtoull(argv[4], NULL, 0) * 2 + 88172645463325253u;
    if (size < 2 || size > MAX_SIZE) return 2;
    uint64_t s = seed;
    calls = damaging ? 1000 : atoi(argv[3]);
    for (int round = 0; round < (damaging ? atoi(argv[3]) : 1); round++, seed += 2) run(&s);
    printf("%ld sleeps, %ld wake-ups lost\n", sleeps, lost_wakeups);
    return !damaging && lost_wakeups > 2;
}
