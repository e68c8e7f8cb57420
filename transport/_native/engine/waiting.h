/* Waiting for other members' writes. */
#pragma once
#include "engine/words.h"

#define SLICE_SECONDS 0.05 /* the longest sleep, after which the caller checks signals and deadlines */

/* The limits of a wait. A thread may hold the interpreter's lock up to GLANCE only. */
typedef enum {
    LOOK,   /* check once */
    GLANCE, /* spin for a few microseconds */
    SPIN,   /* spin longer, then yield the processor between checks */
    SLEEP,  /* then sleep in the kernel, for SLICE_SECONDS at most */
    NAP     /* sleep at once: spinning would slow down a computing thread */
} Mode;

/* How long a member spins before it sleeps; adapted to its earlier waits. */
typedef struct {
    int spins, max_spins;    /* checks before the first yield of the processor */
    int waits_without_yield; /* waits left without a yield, because another process was slow to return the processor */
} SpinBudget;

void init_spin_budget(SpinBudget *p, int may_spin);

typedef int (*Ready)(const void *what);

/* Spin until ready(what), as `mode` allows: True if it is ready before this member would sleep. */
int spin_until(SpinBudget *p, Mode mode, Ready ready, const void *what);

/* Sleep while the lower half of *word is that of `seen`, at most `seconds`; may return early. */
void sleep_on(Word *word, uint64_t seen, double seconds);

/* Wake all threads that sleep on the word. */
void wake(Word *word);

double now(void); /* seconds of CLOCK_MONOTONIC */
