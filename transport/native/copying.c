/* Copying long pieces of memory. */
#include "core.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LONG_BYTES 4096

void copy_bytes(void *into, const void *from, size_t size) {
    size_t done = 0;
#if defined(__x86_64__)
    char *to = into;
    const char *source = from;
    if (size >= LONG_BYTES)
        for (; done + 64 <= size; done += 64)
            for (size_t i = 0; i < 64; i += 16)
                _mm_storeu_si128((__m128i *)(to + done + i),
                                 _mm_loadu_si128((const __m128i *)(source + done + i)));
#endif
    memcpy((char *)into + done, (const char *)from + done, size - done);
}
