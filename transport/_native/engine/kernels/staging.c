/* Non-temporal stores (past the caches), if they are faster. All writes for other cores go through this file.
 *
 * Memory that another core has read (a block, a stretch of a ring) is in that core's cache. If both cores share a
 * cache, plain stores are cheap, and the next reader finds the data there. If they do not, a plain store first fetches
 * each line, and a non-temporal store is several times faster. The host of a virtual machine places its cores, may
 * move them, and does not show where they are. So now and then two parts of a piece are written, one with each kind
 * of store, and timed.
 */
#include "engine/kernels/staging.h"
#include "engine/kernels/strides.h"
#include "engine/waiting.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PAGE_BYTES 4096
#define TRIED_BYTES 16384
#define LEAST_STAGED (4 * TRIED_BYTES)
#define BYTES_PER_TRY (2 << 20)
#define WORTH_IT 2.0f
#define MOST_GAIN 4.0f
#define WEIGHT 0.25f

#if defined(__x86_64__)
/* `to` is aligned to a cache line. */
static size_t stream_sse(char *to, const char *from, size_t size) {
    size_t done = 0;
    for (; done + 64 <= size; done += 64)
        for (size_t i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(to + done + i),
                             _mm_loadu_si128((const __m128i *)(from + done + i)));
    return done;
}

__attribute__((target("avx2"))) static size_t stream_avx(char *to, const char *from, size_t size) {
    size_t done = 0;
    for (; done + 128 <= size; done += 128) {
        __m256i part[4];
        for (int i = 0; i < 4; i++)
            part[i] = _mm256_loadu_si256((const __m256i *)(from + done + 32 * i));
        for (int i = 0; i < 4; i++) _mm256_stream_si256((__m256i *)(to + done + 32 * i), part[i]);
    }
    return done;
}
#endif

void stream_past(void *into, const void *from, size_t size) {
#if defined(__x86_64__)
    char *to = into;
    const char *source = from;
    size_t done = -(uintptr_t)to & 63;
    if (size < PAGE_BYTES) done = size;
    memcpy(to, source, done);
    done += __builtin_cpu_supports("avx2") ? stream_avx(to + done, source + done, size - done)
                                           : stream_sse(to + done, source + done, size - done);
    memcpy(to + done, source + done, size - done);
#else
    copy_bytes(into, from, size);
#endif
}

void end_stream(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

void stream_bytes(void *into, const void *from, size_t size) {
    stream_past(into, from, size);
    end_stream();
}

/* Copy `size` bytes, beginning `done` bytes into the source. */
static void fetch(Copy way, char *into, Source from, size_t done, size_t size) {
    if (!from.strides) {
        way(into, from.data + done, size);
        return;
    }
    Cursor to = cursor_at(into, NULL, 0), at = cursor_at((char *)from.data, from.strides, from.start + done);
    move_bytes(way, &to, &at, size);
}

static double timed(Copy way, char *into, Source from, size_t done) {
    double begin = now();
    fetch(way, into + done, from, done, TRIED_BYTES);
    return now() - begin;
}

/* Write two parts, one with each kind of store, and update the gain. */
static void try_both(Staging *s, char *into, Source from) {
    double plain, past;
    /* The order alternates, because the second copy has an advantage. */
    if (s->tries++ & 1) {
        past = timed(stream_bytes, into, from, 0);
        plain = timed(copy_bytes, into, from, TRIED_BYTES);
    } else {
        plain = timed(copy_bytes, into, from, 0);
        past = timed(stream_bytes, into, from, TRIED_BYTES);
    }
    float gain = past > 0 ? (float)(plain / past) : 1.0f;
    if (gain > MOST_GAIN) gain = MOST_GAIN;
    s->gain = s->gain == 0 ? gain : s->gain + WEIGHT * (gain - s->gain);
}

/* Copy to both targets, a page at a time, which is still in the cache for the second copy. */
static void copy_twice(Copy way, char *into, Source from, size_t begin, size_t size, Also also) {
    for (size_t done = begin; done < size; done += PAGE_BYTES) {
        size_t part = size - done < PAGE_BYTES ? size - done : PAGE_BYTES;
        fetch(way, into + done, from, done, part);
        fetch(also.way, also.into + done, from, done, part);
    }
}

Copy way_to_stage(const Staging *s, size_t whole) {
    return whole >= LEAST_STAGED && s->gain > WORTH_IT ? stream_past : copy_bytes;
}

static int time_to_try(Staging *s, size_t size, size_t whole) {
    if (whole < LEAST_STAGED || size < 2 * TRIED_BYTES) return 0;
    int due = s->until <= size;
    s->until = due ? BYTES_PER_TRY : s->until - size;
    return due;
}

void stage_bytes(Staging *s, char *into, Source from, size_t size, size_t whole, Also also) {
    size_t done = 0;
    if (time_to_try(s, size, whole)) {
        try_both(s, into, from);
        done = 2 * TRIED_BYTES;
        if (also.into) fetch(also.way, also.into, from, 0, done);
    }
    Copy way = way_to_stage(s, whole);
    if (also.into)
        copy_twice(way, into, from, done, size, also);
    else
        fetch(way, into + done, from, done, size - done);
    if (way == stream_past || also.way == stream_past) end_stream();
}
