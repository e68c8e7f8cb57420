/* A ring buffer between one sender and one receiver of messages, in the receiver's inbox.
 *
 * The first cache line of an inbox has its wakeup word, the bytes of a ring, and the number of members. The second has
 * its owner's sleeping flag. Each member has two lines: the sender writes one, the receiver the other. The rings follow.
 *
 * Two counters of bytes only rise: the bytes that the sender has written, and those that the receiver has consumed. A
 * message is a line with its header and size, then its bytes, rounded up to lines. A message larger than the ring
 * passes through it in pieces, which fit a core's own cache.
 *
 * A receiver sleeps on its inbox's wakeup word. Each sender writes a new value into it, which the word never had.
 */
#include "engine/engine.h"

#include <string.h>

#define LOW_HALF UINT64_C(0xFFFFFFFF)
#define MAX_PIECE (32 << 10) /* source and copy fit a core's own cache */
#define EARLY_NOTIFY_BYTES (16 << 10) /* the sender of a larger message notifies the receiver before it writes the bytes */
#define MAX_RINGS (UINT64_C(4) << 20)
#define MAX_RING (UINT64_C(256) << 10)
#define MIN_RING (UINT64_C(64) << 10)

/* ------------------------------------------------------------------ the layout */

static uint64_t rings_at(int size) { return round_up(LINE * (2 + 2 * (uint64_t)size), PAGE); }

uint64_t inbox_bytes(int size, uint64_t *capacity) {
    uint64_t senders = size > 1 ? (uint64_t)size - 1 : 1, most = least(MAX_RING, MAX_RINGS / senders);
    *capacity = whole_lines(*capacity ? *capacity : most < MIN_RING ? MIN_RING : most);
    return round_up(rings_at(size) + (uint64_t)size * *capacity, LARGEST_PAGE);
}

int inbox_create(char *memory, int size, uint64_t capacity) {
    Word *words = (Word *)(void *)memory;
    int error = allocate_pages(memory, rings_at(size));
    if (error) return error;
    put(words + 1, capacity);
    put(words + 2, (uint64_t)size);
    return 0;
}

int ring_open(Ring *r, char *memory, uint64_t nbytes, int size, int sender, int member, int may_spin) {
    *r = (Ring){0};
    if (nbytes < PAGE || sender < 0 || sender >= size || size > MAX_MEMBERS) return -1;
    Word *words = (Word *)(void *)memory, *control = words + 8 * (2 + 2 * sender);
    uint64_t capacity = look_at(words + 1);
    if (look_at(words + 2) != (uint64_t)size) return -1;
    if (capacity < 4 * LINE || capacity % LINE || capacity > nbytes || inbox_bytes(size, &capacity) != nbytes) return -1;
    r->data = memory + rings_at(size) + (uint64_t)sender * capacity;
    r->written = control;
    r->broken = control + 1;
    r->sender_sleeps = control + 2;
    r->taken = control + 8;
    r->wakeup = words;
    r->asleep = words + 8;
    r->capacity = capacity;
    r->piece = least(MAX_PIECE, capacity / 4) / LINE * LINE;
    r->number = (uint64_t)member;
    r->step = (uint64_t)size;
    r->position = member == sender ? look_at(r->written) : 0;
    init_spin_budget(&r->spin_budget, may_spin);
    return member == sender ? allocate_pages(r->data, capacity) : 0;
}

/* ------------------------------------------------------------------ the bytes */

/* Write a part of a message of `whole` bytes. */
static void copy_in(Ring *r, const char *from, uint64_t size, uint64_t whole) {
    uint64_t at = r->position % r->capacity, first = least(size, r->capacity - at);
    stage_bytes(&r->staging, r->data + at, (Source){from, NULL, 0}, first, whole, (Also){0});
    if (first < size) stage_bytes(&r->staging, r->data, (Source){from + first, NULL, 0}, size - first, whole, (Also){0});
}

static void copy_out(const Ring *r, char *into, uint64_t size) {
    uint64_t at = r->position % r->capacity, first = least(size, r->capacity - at);
    copy_bytes(into, r->data + at, first);
    if (first < size) copy_bytes(into + first, r->data, size - first);
}

/* ------------------------------------------------------------------ notifying the other end */

static void notify_receiver(Ring *r) {
    put(r->written, r->position);
    if (!sleepers_of(r->asleep)) return;
    put(r->wakeup, (++r->rings * r->step + r->number) & LOW_HALF);
    wake(r->wakeup);
}

static void notify_sender(Ring *r) {
    put(r->taken, r->position);
    if (sleepers_of(r->sender_sleeps)) wake(r->taken);
}

void ring_give_up(Ring *r) {
    put(r->broken, 1);
    notify_receiver(r);
}

int ring_is_broken(const Ring *r) { return look_at(r->broken) != 0; }
void ring_wake_sender(Ring *r) { wake(r->taken); }

/* ------------------------------------------------------------------ waiting for the other end */

typedef struct {
    const Ring *ring;
    uint64_t nbytes;
} Room;

/* If damaged counters show more bytes than the ring holds, it has no room. */
static uint64_t room_of(const Ring *r) {
    uint64_t untaken = r->position - look_at(r->taken);
    return untaken <= r->capacity ? r->capacity - untaken : 0;
}

static int has_room(const void *what) {
    const Room *room = what;
    return room_of(room->ring) >= room->nbytes;
}

static int has_more(const void *what) { return ring_has_more(what); }
int ring_has_more(const Ring *r) { return look_at(r->written) != r->position; }
int ring_has_room(const Ring *r, uint64_t size) { return room_of(r) >= LINE + whole_lines(size); }

static int await_room(Ring *r, uint64_t nbytes, Mode mode) {
    Room room = {r, nbytes};
    if (spin_until(&r->spin_budget, mode, has_room, &room)) return 1;
    if (mode < SLEEP) return 0;
    double end = now() + SLICE_SECONDS, left = SLICE_SECONDS;
    add_sleeper(r->sender_sleeps, 1);
    for (; left > 0; left = end - now()) {
        uint64_t seen = look_again(r->taken);
        if (has_room(&room)) break;
        sleep_on(r->taken, seen, left);
        if (look_at(r->taken) == seen) break; /* timed out, or another thread woke this one */
    }
    remove_sleeper(r->sender_sleeps, 1);
    return has_room(&room);
}

/* The number of available bytes; DAMAGED if that number is impossible. */
static Status available(const Ring *r, uint64_t *nbytes) {
    *nbytes = look_at(r->written) - r->position;
    if (*nbytes > r->capacity || *nbytes % LINE) return DAMAGED;
    return *nbytes ? DONE_ALL : AGAIN;
}

int ring_await_whole(Ring *r, uint64_t size, Mode mode) {
    uint64_t nbytes;
    return spin_until(&r->spin_budget, mode, has_more, r) && available(r, &nbytes) == DONE_ALL &&
           nbytes >= LINE + whole_lines(size);
}

/* ------------------------------------------------------------------ the sender's end */

Status ring_write(Ring *r, const char *data, uint64_t size, Mode mode) {
    for (uint64_t moved = 0; r->left; moved += r->piece) {
        if (moved > MUCH) return AGAIN;
        uint64_t count = least(r->left, r->piece), room = whole_lines(count);
        if (!await_room(r, room, mode)) return AGAIN;
        copy_in(r, data + (size - r->left), count, size);
        r->position += room;
        r->left -= count;
        notify_receiver(r);
    }
    return DONE_ALL;
}

Status ring_begin(Ring *r, const Header *header, const char *data, uint64_t size, Mode mode) {
    if (!await_room(r, LINE + whole_lines(least(size, r->piece)), mode)) return AGAIN;
    Head head = {.header = *header, .size = size};
    memcpy(r->data + r->position % r->capacity, &head, LINE);
    r->position += LINE;
    r->left = size;
    if (!size || size > EARLY_NOTIFY_BYTES) notify_receiver(r);
    return ring_write(r, data, size, mode);
}

/* ------------------------------------------------------------------ the receiver's end */

Status ring_peek(const Ring *r, Head *head) {
    uint64_t nbytes;
    Status status = available(r, &nbytes);
    if (status != DONE_ALL) return status;
    memcpy(head, r->data + r->position % r->capacity, LINE);
    /* An element has 1 to 32 bytes. */
    uint64_t elements = head->header.elements, fewest = head->size / 32 + (head->size % 32 != 0);
    return head->size < elements || fewest > elements ? DAMAGED : DONE_ALL;
}

void ring_accept(Ring *r, uint64_t size) {
    r->position += LINE;
    r->left = size;
    if (!size) notify_sender(r);
}

Status ring_take(Ring *r, char *into, uint64_t size, Mode mode) {
    for (uint64_t moved = 0; r->left; moved += r->piece) {
        if (moved > MUCH) return AGAIN;
        uint64_t nbytes;
        if (!spin_until(&r->spin_budget, mode, has_more, r)) return AGAIN;
        if (available(r, &nbytes) != DONE_ALL) return DAMAGED;
        uint64_t count = least(least(r->left, r->piece), nbytes);
        copy_out(r, into + (size - r->left), count);
        r->position += whole_lines(count);
        r->left -= count;
        notify_sender(r);
    }
    return DONE_ALL;
}

/* ------------------------------------------------------------------ an inbox */

typedef struct {
    const Word *wakeup;
    Ring *const *rings;
    int count;
    uint64_t known;
} InboxWait;

static int inbox_changed(const void *what) {
    const InboxWait *inbox = what;
    for (int i = 0; i < inbox->count; i++)
        if (ring_has_more(inbox->rings[i]) || ring_is_broken(inbox->rings[i])) return 1;
    return look_at(inbox->wakeup) != inbox->known;
}

int inbox_await(char *memory, Ring *const *rings, int count, uint64_t known, Mode mode) {
    Word *wakeup = (Word *)(void *)memory, *asleep = wakeup + 8;
    InboxWait inbox = {wakeup, rings, count, known};
    SpinBudget none = {0};
    if (spin_until(count ? &rings[0]->spin_budget : &none, mode, inbox_changed, &inbox)) return 1;
    if (mode < SLEEP) return 0;
    add_sleeper(asleep, 1);
    for (int i = 0; i < count; i++) look_again(rings[i]->written), look_again(rings[i]->broken);
    look_again(wakeup);
    if (!inbox_changed(&inbox)) sleep_on(wakeup, known, SLICE_SECONDS);
    remove_sleeper(asleep, 1);
    return inbox_changed(&inbox);
}

void inbox_wake(char *memory, uint64_t value) {
    Word *wakeup = (Word *)(void *)memory;
    put(wakeup, value & LOW_HALF);
    wake(wakeup);
}

uint64_t inbox_wakeup(const char *memory) { return look_at((const Word *)(const void *)memory); }
