/* Copying long pieces of memory. */
#pragma once
#include <stddef.h>
#include <stdint.h> /* defines __GLIBC__ */

/* Compiles loops over long arrays for wider registers, too; the loader chooses for the processor. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(NO_CLONES)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

typedef void (*Copy)(void *into, const void *from, size_t size);

/* memcpy, but avoiding a case that is slow on some processors: `into` less than 64 bytes after `from`, modulo a page. */
void copy_bytes(void *into, const void *from, size_t size);
