/* Waiting for other members' writes. */
#pragma once
#include "engine/words.h"

#define SLICE_SECONDS 0.05 /* the longest sleep: then the caller looks at signals and deadlines */

/* The limits of a wait. The interpreter's lock may be held up to GLANCE only. */
typedef enum {
    LOOK,   /* look once */
    GLANCE, /* look for a few microseconds */
    SPIN,   /* look for a while, then offer the processor to others between looks */
    SLEEP,  /* then sleep in the kernel, for SLICE_SECONDS at most */
    NAP     /* sleep at once: looking would take the processor from a thread that computes */
} Mode;

/* How long a member spins before it sleeps; adapted by its earlier waits. */
typedef struct {
    int spins, max_spins;    /* looks before the first yield of the processor */
    int waits_without_yield; /* waits left that sleep without a yield, because another process would keep the processor */
} SpinBudget;

void init_spin_budget(SpinBudget *p, int may_spin);

typedef int (*Ready)(const void *what);

/* True if it is ready, or becomes so before this member would sleep. */
int spin_until(SpinBudget *p, Mode mode, Ready ready, const void *what);

/* Sleep while the lower half of *word is that of `seen`, at most `seconds`; it may be shorter. */
void sleep_on(Word *word, uint64_t seen, double seconds);

/* Wake all that sleep on it. */
void wake(Word *word);

double now(void); /* seconds of CLOCK_MONOTONIC */
