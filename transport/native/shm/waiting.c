/* How a rank waits for what others write, all the while that counts without the interpreter's lock:
 * transport/waiting.py says why it looks before it sleeps.
 */
#include "core.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

#define MOST_SPINS 1000
#define HELD_SPINS 200
#define FEWEST_SPINS 50
#define YIELDS_PER_LOOK 8
#define FEW_YIELDS 2        /* what came after so few was done by somebody who waited for this very core */
#define LOOK_SECONDS 500e-6 /* as in transport/waiting.py */

void be_patient(Patience *p, int may_spin) { p->spins = p->most_spins = may_spin ? MOST_SPINS : 0; }

static inline int spin(Look look, const void *what, int spins) {
    for (int i = 0; i < spins; i++) {
        PAUSE();
        if (look(what)) return 1;
    }
    return 0;
}

/* Offer the core to others for a while. */
static int yield(Patience *p, Look look, const void *what) {
    double give_up = read_clock() + LOOK_SECONDS;
    long yields = 0;
    int come = 0;
    do {
        for (int i = 0; i < YIELDS_PER_LOOK && !come; i++) {
            sched_yield();
            yields++;
            come = look(what);
        }
    } while (!come && read_clock() < give_up);
    if (come) {
        int spins = yields <= FEW_YIELDS ? FEWEST_SPINS : p->most_spins;
        p->spins = spins < p->most_spins ? spins : p->most_spins;
    }
    return come;
}

int await_without(Patience *p, Look look, const void *what) {
    return look(what) || spin(look, what, p->spins) || yield(p, look, what);
}

int await_holding(Patience *p, Look look, const void *what) {
    if (look(what)) return 1;
    /* A thread that computes may keep the lock for milliseconds, once it has it: not for the few
     * microseconds that most waits take. */
    int held = p->spins < HELD_SPINS ? p->spins : HELD_SPINS;
    if (spin(look, what, held)) return 1;
    PyThreadState *state = PyEval_SaveThread();
    int come = spin(look, what, p->spins - held) || yield(p, look, what);
    PyEval_RestoreThread(state);
    return come;
}

void wake(Word *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
