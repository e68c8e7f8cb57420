/* The loop of wire.py: passes frames between TAP devices, each held back.
 *
 *     wire ONE_WAY_NANOSECONDS SECONDS SITES NEAR_NANOSECONDS DESCRIPTOR DESCRIPTOR ...
 *
 * The devices are cut into SITES equal parts, in each of which the delay is the last of the figures.
 * The last byte of a destination's address is its number; a frame for all goes to all others. Frames
 * come with what virtio says of them, and leave with it: up to 64 KiB that no processor has cut into
 * packets or summed up, as between two machines with good network cards.
 * Where WIRE_RATE is set, so many bytes a second leave each site for others.
 * SIGUSR1 cuts the network, or mends it. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MOST 64
#define HEADER 10 /* struct virtio_net_hdr */
#define FRAME (HEADER + 14 + 65536)
#define SLOTS (1 << 14)
#define BATCH 16

typedef struct {
    int64_t leaves;
    uint32_t size;
    char data[FRAME];
} Slot;

typedef struct {
    int device;
    uint32_t head, tail;
    Slot *slots[SLOTS];
} Queue;

static volatile sig_atomic_t cut;
static void toggle(int signal) { (void)signal; cut = !cut; }

/* Frames under way, all together. The one that was given back last is taken first: it is in cache. */
static Slot *unused[SLOTS];
static int left;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Return when the last byte of a frame has left a site whose line is free at the moment *line. */
static int64_t through(int64_t *line, int64_t read_at, int64_t size) {
    static int64_t rate = -1;
    if (rate < 0) rate = getenv("WIRE_RATE") ? atoll(getenv("WIRE_RATE")) : 0;
    if (!rate) return read_at;
    if (*line < read_at) *line = read_at;
    return *line += size * 1000000000LL / rate;
}

static void put(Queue *q, Slot *s, int64_t leaves) {
    s->leaves = leaves;
    q->slots[q->tail++ % SLOTS] = s;
}

static Slot *copy_of(const Slot *s) {
    Slot *other = left ? unused[--left] : NULL; /* as any network: what there is no room for is lost */
    if (other) {
        other->size = s->size;
        memcpy(other->data, s->data, s->size);
    }
    return other;
}

int main(int argc, char **argv) {
    static Queue queues[2 * MOST]; /* a device's frames from other sites, and from its own */
    static int64_t line[MOST];
    int count = argc - 5;
    if (count < 2 || count > MOST) return 2;
    int64_t delay[2] = {atoll(argv[1]), atoll(argv[4])}, sites = atoll(argv[3]);
    int64_t end = now() + (int64_t)(atof(argv[2]) * 1e9);
    struct pollfd polled[MOST];
    for (int i = 0; i < 2 * count; i++) {
        queues[i].device = atoi(argv[i / 2 + 5]);
        polled[i / 2] = (struct pollfd){queues[i].device, POLLIN, 0};
    }
    Slot *memory = mmap(NULL, SLOTS * sizeof(Slot), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return 3;
    for (left = 0; left < SLOTS; left++) unused[left] = &memory[SLOTS - 1 - left];
    struct sigaction action = {.sa_handler = toggle};
    sigaction(SIGUSR1, &action, NULL);
    prctl(PR_SET_TIMERSLACK, 1);
    puts("up");
    fflush(stdout);
    for (int64_t t = now(); t < end; t = now()) {
        int64_t wait = 50000000;
        for (int i = 0; i < 2 * count; i++) {
            Queue *q = &queues[i];
            while (q->head != q->tail && q->slots[q->head % SLOTS]->leaves <= t) {
                Slot *s = q->slots[q->head % SLOTS];
                if (write(q->device, s->data, s->size) < 0 && errno == EAGAIN) break;
                q->head++; /* also where the device is not up yet, or no more */
                unused[left++] = s;
            }
            if (q->head != q->tail) {
                int64_t until = q->slots[q->head % SLOTS]->leaves - now();
                if (until < wait) wait = until < 0 ? 0 : until;
            }
        }
        struct timespec timeout = {0, wait};
        if (ppoll(polled, count, &timeout, NULL) <= 0) continue;
        for (int i = 0; i < count; i++) {
            if (!(polled[i].revents & POLLIN)) continue;
            for (int n = 0; n < BATCH && left; n++) {
                Slot *s = unused[left - 1];
                ssize_t size = read(polled[i].fd, s->data, FRAME);
                if (size < HEADER + 14) break;
                if (cut) continue;
                left--;
                s->size = size;
                int64_t read_at = now();
                const unsigned char *to = (unsigned char *)s->data + HEADER;
                for (int j = 0; j < count; j++) {
                    if (to[0] & 1 ? j == i : j != to[5]) continue;
                    int near = i * sites / count == j * sites / count;
                    int64_t at = near ? read_at : through(&line[i * sites / count], read_at, size);
                    Slot *sent = to[0] & 1 ? copy_of(s) : s;
                    if (sent) put(&queues[2 * j + near], sent, at + delay[near]);
                }
                if (to[0] & 1 || to[5] >= count) unused[left++] = s;
            }
        }
    }
    return 0;
}
