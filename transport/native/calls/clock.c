/* The time of CLOCK_MONOTONIC, from the processor's counter where the kernel takes it from there, too:
 * half as long as to ask for it, and a small call asks twice.
 */
#include "core.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__) && !defined(Py_GIL_DISABLED)
#include <x86intrin.h>

#define KERNELS_CHOICE "/sys/devices/system/clocksource/clocksource0/current_clocksource"
#define FEWEST_SECONDS 0.02 /* to know how fast the counter counts, to a millionth */
#define RATE_SECONDS 1.0    /* after which it is found out anew: the kernel corrects it, slowly */
#define MOST_TICKS 500      /* to read the clock, some 100 usually */
#define MOST_SECONDS 1e-3   /* to go on from one moment: a millionth of that is a nanosecond */
#define MOST_PASSED 1e7     /* the same in ticks, whatever the rate seems to be: a machine that slept */

/* A moment by both; under the interpreter's lock. */
static struct {
    uint64_t ticks, first_ticks, most_ticks;
    double seconds, first_seconds, per_tick;
    int trusted;
} moment;

/* A time by both at once: 0 if this thread was away in between. */
static int read_both(uint64_t *ticks, double *seconds) {
    *ticks = __rdtsc();
    *seconds = now();
    return __rdtsc() - *ticks < MOST_TICKS;
}

void init_clock(void) {
    char choice[8] = "";
    FILE *file = fopen(KERNELS_CHOICE, "r");
    if (!file) return;
    moment.trusted = fgets(choice, sizeof choice, file) && !strcmp(choice, "tsc\n");
    fclose(file);
}

static double look(void) {
    uint64_t ticks;
    double seconds;
    if (!read_both(&ticks, &seconds) || !moment.trusted) return seconds;
    double passed = seconds - moment.first_seconds;
    if (!moment.first_ticks) {
        moment.first_ticks = ticks;
        moment.first_seconds = seconds;
    } else if (passed > FEWEST_SECONDS) {
        moment.per_tick = passed / (double)(ticks - moment.first_ticks);
        double most = MOST_SECONDS / moment.per_tick;
        moment.most_ticks = (uint64_t)(most < MOST_PASSED ? most : MOST_PASSED);
        if (passed > RATE_SECONDS) {
            moment.first_ticks = ticks;
            moment.first_seconds = seconds;
        }
    }
    moment.ticks = ticks;
    moment.seconds = seconds;
    return seconds;
}

double monotonic(void) {
    uint64_t ticks = __rdtsc(), passed = ticks - moment.ticks;
    /* Also where the counter has gone back, which makes this a large number. */
    if (passed >= moment.most_ticks) return look();
    return moment.seconds + (double)passed * moment.per_tick;
}

#else

void init_clock(void) {}

double monotonic(void) { return now(); }

#endif
