/* Pages of shared memory.
 *
 * The kernel allocates a page at its first use. If it has none left, it sends SIGBUS, or kills a process of the same
 * cgroup. So a member allocates pages before it writes to them: those that it needs soon, not all that it maps.
 */
#include "engine/engine.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Let the kernel write a word of each page without changing it. */
static int touch_pages(char *at, const char *end, uint64_t page) {
    static uint32_t nobody;
    long failed = 0;
    for (; at < end && failed >= 0; at += page)
        failed = syscall(SYS_futex, &nobody, FUTEX_WAKE_OP_PRIVATE, 0, NULL, at, FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_LT, 0));
    return failed < 0 ? errno : 0;
}

int allocate_pages(char *at, uint64_t nbytes) {
    if (!nbytes) return 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), into = (uint64_t)(uintptr_t)at % page;
    uint64_t whole = round_up(into + nbytes, page);
    if (!madvise(at - into, whole, MADV_POPULATE_WRITE)) return 0;
    if (errno != EINVAL) return errno;
    return touch_pages(at - into, at - into + whole, page); /* a kernel before 5.14 */
}

int allocate_blocks(Group *g, uint64_t nbytes) {
    uint64_t whole = PAGE; /* doubled, so that growing messages rarely allocate */
    while (whole < nbytes) whole *= 2;
    whole = least(whole, g->sizes.block);
    for (int slot = 0; slot < SLOTS; slot++) {
        int error = allocate_pages(block_at(g, g->rank, slot) + g->allocated, whole - g->allocated);
        if (error) return fail(g, NO_MEMORY, g->rank, (uint64_t)error, whole * SLOTS);
    }
    g->allocated = whole;
    return 1;
}
