/* Pages on a kernel that cannot be asked for them: before Linux 5.14. */
#include "engine/engine.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int __wrap_madvise(void *at, size_t nbytes, int advice);
int __wrap_madvise(void *at, size_t nbytes, int advice) {
    (void)at, (void)nbytes, (void)advice;
    errno = EINVAL;
    return -1;
}

int main(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char resident[4];
    int fd = memfd_create("pages", 0);
    if (fd < 0 || ftruncate(fd, (off_t)(3 * page))) return 1;
    char *memory = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(memory, 7, 8);
    int found = allocate_pages(memory + 5, page);
    if (mincore(memory, 3 * page, resident)) return 1;
    int changed = memory[0] != 7 || memory[7] != 7;
    printf("%d %d %d %d %d", found, resident[0] & 1, resident[1] & 1, resident[2] & 1, changed);
    printf(" %d\n", allocate_pages(memory, 4 * page)); /* there is no fourth: to write there is a signal */
    return 0;
}
