/* To sleep and be woken takes longer than most small calls, so a member looks for a moment before it sleeps;
 * transport/_waiting.py has the figures. Offering the processor to others between looks serves ranks that
 * share one. A stranger keeps it for milliseconds, while the kernel wakes a sleeper in time. So a wait that saw
 * this happen sleeps at once, and so do the next ones.
 */
#include "engine/waiting.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

#define MOST_SPINS 1000
#define GLANCE_SPINS 200
#define FEWEST_SPINS 50
#define FEW_YIELDS 2           /* what came after so few was done by a rank that waited for this very core */
#define YIELD_SECONDS 500e-6   /* as in transport/_waiting.py */
#define STRANGER_SECONDS 1e-3  /* a rank that waits gives the core back sooner */
#define WAITS_WITHOUT_YIELD 64

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void be_patient(Patience *p, int may_spin) { *p = (Patience){.spins = may_spin ? MOST_SPINS : 0}, p->most_spins = p->spins; }

static inline int spin(Ready ready, const void *what, int spins) {
    for (int i = 0; i < spins; i++) {
        PAUSE();
        if (ready(what)) return 1;
    }
    return 0;
}

/* Offer the core to others for a while. */
static int yield(Patience *p, Ready ready, const void *what) {
    double begin = now(), before = begin, after = begin;
    for (int yields = 1; after - begin < YIELD_SECONDS; yields++, before = after) {
        sched_yield();
        after = now();
        if (after - before > STRANGER_SECONDS) p->strangers = WAITS_WITHOUT_YIELD;
        if (ready(what)) {
            int spins = yields <= FEW_YIELDS ? FEWEST_SPINS : p->most_spins;
            p->spins = spins < p->most_spins ? spins : p->most_spins;
            return 1;
        }
    }
    return 0;
}

int await_awake(Patience *p, Mode mode, Ready ready, const void *what) {
    if (ready(what)) return 1;
    if (mode == LOOK || mode == NAP) return 0;
    int glance = p->spins < GLANCE_SPINS ? p->spins : GLANCE_SPINS;
    if (mode == GLANCE) return spin(ready, what, glance);
    if (p->strangers > 0) {
        p->strangers--;
        return spin(ready, what, glance);
    }
    return spin(ready, what, p->spins) || yield(p, ready, what);
}

void sleep_on(Word *word, uint64_t seen, double seconds) {
    struct timespec limit = {.tv_sec = (time_t)seconds};
    limit.tv_nsec = (long)((seconds - (double)limit.tv_sec) * 1e9);
    /* The private variants know only one process. The lower half comes first: little-endian machines only. */
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &limit, NULL, 0);
}

void wake(Word *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
