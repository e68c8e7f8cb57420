/* Pages of shared memory.
 *
 * The kernel allocates a page when somebody first touches it. Where it has none left it sends SIGBUS, or kills a
 * process of the same cgroup. So a member has its pages allocated before it writes there. It asks for those that
 * it needs soon, not for all that it has an address of.
 */
#include "engine/engine.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

int allocate_pages(char *at, uint64_t nbytes) {
    if (!nbytes) return 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = (uint64_t)(uintptr_t)at / page * page;
    uint64_t end = round_up((uint64_t)(uintptr_t)at + nbytes, page);
    if (!madvise((void *)(uintptr_t)start, end - start, MADV_POPULATE_WRITE)) return 0;
    return errno == EINVAL ? 0 : errno; /* EINVAL: a kernel before 5.14, which allocates at the first touch only */
}

int allocate_blocks(Group *g, uint64_t nbytes) {
    uint64_t whole = PAGE; /* doubled, so that growing messages ask seldom */
    while (whole < nbytes) whole *= 2;
    whole = least(whole, g->sizes.block);
    for (int slot = 0; slot < SLOTS; slot++) {
        int error = allocate_pages(block_at(g, g->rank, slot) + g->allocated, whole - g->allocated);
        if (error) return fail(g, NO_MEMORY, g->rank, (uint64_t)error, whole * SLOTS);
    }
    g->allocated = whole;
    return 1;
}
