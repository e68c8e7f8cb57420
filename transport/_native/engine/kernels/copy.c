/* Copying long pieces of memory. */
#include "engine/kernels/copy.h"

#include <string.h>

#define LONG_BYTES 4096
#define PAGE_BYTES 4096
#define CLOSE_BYTES 64

#if defined(__x86_64__)
/* 32 bytes of any alignment. */
typedef long long Wide __attribute__((vector_size(32), aligned(1), may_alias));
#define AT_A_TIME (4 * sizeof(Wide))

CLONES static void copy_wide(void *into, const void *from, size_t size) {
    Wide *to = into;
    const Wide *source = from;
    for (size_t i = 0; i < size / sizeof(Wide); i += 4) {
        Wide a = source[i], b = source[i + 1], c = source[i + 2], d = source[i + 3];
        to[i] = a, to[i + 1] = b, to[i + 2] = c, to[i + 3] = d;
    }
}
#endif

void copy_bytes(void *into, const void *from, size_t size) {
    size_t done = 0;
#if defined(__x86_64__)
    uintptr_t ahead = ((uintptr_t)into - (uintptr_t)from) % PAGE_BYTES;
    if (size >= LONG_BYTES && ahead && ahead < CLOSE_BYTES) {
        done = size / AT_A_TIME * AT_A_TIME;
        copy_wide(into, from, done);
    }
#endif
    memcpy((char *)into + done, (const char *)from + done, size - done);
}
