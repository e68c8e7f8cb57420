/* Copying long pieces of memory. */
#pragma once
#include <stddef.h>
#include <stdint.h> /* defines __GLIBC__ */

/* Loops over long arrays, for wider registers as well: which ones is decided where it is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(NO_CLONES)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

typedef void (*Copy)(void *into, const void *from, size_t size);

/* memcpy, except for what makes it slow on some processors: transport/_operands/copying.py. */
void copy_bytes(void *into, const void *from, size_t size);
