/* CRC-32C (Castagnoli), as in transport/_crc32c.py. It uses the processor's instruction if there is one,
 * on three streams at a time, because each step depends on the previous one; else eight tables.
 *
 * Combining streams: a CRC is linear, so tables give, for each byte of a block's CRC, what n zero bytes
 * after the block make of it (M. Adler, crc32c.c of 2013).
 */
#include "core.h"

#define POLYNOMIAL 0x82f63b78u
#define STREAM 4096

static uint32_t tables[8][256];
static uint32_t after_stream[4][256]; /* by byte of a CRC: its value after STREAM zero bytes */

static uint32_t add_zeros(uint32_t crc, int count) {
    while (count--) crc = crc >> 8 ^ tables[0][crc & 255];
    return crc;
}

void init_crc32c(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        tables[0][i] = crc;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++)
            tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
    uint32_t bits[32];
    for (int bit = 0; bit < 32; bit++) bits[bit] = add_zeros(UINT32_C(1) << bit, STREAM);
    for (int byte = 0; byte < 4; byte++)
        for (int i = 0; i < 256; i++) {
            uint32_t crc = 0;
            for (int bit = 0; bit < 8; bit++)
                if (i >> bit & 1) crc ^= bits[8 * byte + bit];
            after_stream[byte][i] = crc;
        }
}

static uint32_t by_tables(uint32_t crc, const unsigned char *data, size_t size) {
    for (; size >= 8; size -= 8, data += 8) {
        uint32_t low = crc ^ (data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
        crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^
              tables[4][low >> 24] ^ tables[3][data[4]] ^ tables[2][data[5]] ^ tables[1][data[6]] ^
              tables[0][data[7]];
    }
    while (size--) crc = crc >> 8 ^ tables[0][(crc ^ *data++) & 255];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define HAVE_INSTRUCTION (__builtin_cpu_supports("sse4.2"))
#ifdef __clang__ // from version 20 on, sse4.2 does not include crc32; GCC before version 11 rejects crc32
#define WITH_INSTRUCTION __attribute__((target("sse4.2,crc32")))
#else
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#endif
#define STEP_WORD(crc, word) ((uint32_t)_mm_crc32_u64((crc), (word)))
#define STEP_BYTE(crc, byte) (_mm_crc32_u8((crc), (byte)))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define HAVE_INSTRUCTION 1
#define WITH_INSTRUCTION
#define STEP_WORD(crc, word) (__crc32cd((crc), (word)))
#define STEP_BYTE(crc, byte) (__crc32cb((crc), (byte)))
#endif

#ifdef HAVE_INSTRUCTION
static inline uint64_t load_word(const unsigned char *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

static inline uint32_t shifted(uint32_t crc) {
    return after_stream[0][crc & 255] ^ after_stream[1][crc >> 8 & 255] ^
           after_stream[2][crc >> 16 & 255] ^ after_stream[3][crc >> 24];
}

WITH_INSTRUCTION static uint32_t by_instruction(uint32_t crc, const unsigned char *data, size_t size) {
    for (; size >= 3 * STREAM; size -= 3 * STREAM, data += 3 * STREAM) {
        uint32_t second = 0, third = 0;
        for (size_t i = 0; i < STREAM; i += 8) {
            crc = STEP_WORD(crc, load_word(data + i));
            second = STEP_WORD(second, load_word(data + STREAM + i));
            third = STEP_WORD(third, load_word(data + 2 * STREAM + i));
        }
        crc = shifted(shifted(crc) ^ second) ^ third;
    }
    for (; size >= 8; size -= 8, data += 8) crc = STEP_WORD(crc, load_word(data));
    while (size--) crc = STEP_BYTE(crc, *data++);
    return crc;
}
#endif

PyObject *crc32c(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer view;
    unsigned int begun = 0;
    if (!PyArg_ParseTuple(args, "y*|I:crc32c", &view, &begun)) return NULL;
    uint32_t crc = ~(uint32_t)begun;
    Py_BEGIN_ALLOW_THREADS;
#ifdef HAVE_INSTRUCTION
    if (HAVE_INSTRUCTION)
        crc = by_instruction(crc, view.buf, (size_t)view.len);
    else
#endif
        crc = by_tables(crc, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(~crc & 0xffffffffu);
}
