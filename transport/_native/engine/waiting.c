/* Sleeping and waking take longer than most small calls, so a member spins for a moment before it sleeps (see
 * transport/_waiting/spinning.py). Yielding the processor between checks helps ranks that share a core. But another
 * program may keep the processor for milliseconds, while the kernel wakes a sleeper in time. After a wait with such a
 * slow yield, the next waits sleep without yielding.
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
#define FEW_YIELDS 2           /* after so few yields, the event came from a rank that waited for this core */
#define YIELD_SECONDS 500e-6   /* as in transport/_waiting/spinning.py */
#define SLOW_YIELD_SECONDS 1e-3 /* longer than another waiting rank keeps the core */
#define WAITS_WITHOUT_YIELD 64

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void init_spin_budget(SpinBudget *p, int may_spin) {
    *p = (SpinBudget){.spins = may_spin ? MOST_SPINS : 0};
    p->max_spins = p->spins;
}

static inline int spin(Ready ready, const void *what, int spins) {
    for (int i = 0; i < spins; i++) {
        PAUSE();
        if (ready(what)) return 1;
    }
    return 0;
}

/* Yield the core for a while. */
static int yield(SpinBudget *p, Ready ready, const void *what) {
    double begin = now(), before = begin, after = begin;
    for (int yields = 1; after - begin < YIELD_SECONDS; yields++, before = after) {
        sched_yield();
        after = now();
        if (after - before > SLOW_YIELD_SECONDS) p->waits_without_yield = WAITS_WITHOUT_YIELD;
        if (ready(what)) {
            int spins = yields <= FEW_YIELDS ? FEWEST_SPINS : p->max_spins;
            p->spins = spins < p->max_spins ? spins : p->max_spins;
            return 1;
        }
    }
    return 0;
}

int spin_until(SpinBudget *p, Mode mode, Ready ready, const void *what) {
    if (ready(what)) return 1;
    if (mode == LOOK || mode == NAP) return 0;
    int glance = p->spins < GLANCE_SPINS ? p->spins : GLANCE_SPINS;
    if (mode == GLANCE) return spin(ready, what, glance);
    if (p->waits_without_yield > 0) {
        p->waits_without_yield--;
        return spin(ready, what, glance);
    }
    return spin(ready, what, p->spins) || yield(p, ready, what);
}

void sleep_on(Word *word, uint64_t seen, double seconds) {
    struct timespec limit = {.tv_sec = (time_t)seconds};
    limit.tv_nsec = (long)((seconds - (double)limit.tv_sec) * 1e9);
    /* The private variants work within one process only. The kernel compares the first half of the word: on a
     * little-endian machine, the lower one. */
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &limit, NULL, 0);
}

void wake(Word *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
