"""The source of the CUDA kernels for reductions, scaling and flags.

Experimental, not run on a GPU (``docs/run/gpu.md``).

NVRTC compiles one module for each dtype at its first use. The source includes no headers, because
NVRTC finds none on many machines, so it defines the conversions of 16-bit floats itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transport._operands.reduce_op import RedOpType

MAX_INPUTS = 16

# By dtype name: the storage type, the compute type, and the family of operations.
TYPES = {
    "bool": ("unsigned char", "unsigned char", "Bool"),
    "int8": ("signed char", "signed char", "Integer"),
    "uint8": ("unsigned char", "unsigned char", "Integer"),
    "int16": ("short", "short", "Integer"),
    "uint16": ("unsigned short", "unsigned short", "Integer"),
    "int32": ("int", "int", "Integer"),
    "uint32": ("unsigned int", "unsigned int", "Integer"),
    "int64": ("long long", "long long", "Integer"),
    "uint64": ("unsigned long long", "unsigned long long", "Integer"),
    "float16": ("Half", "float", "Real"),
    "bfloat16": ("BFloat16", "float", "Real"),
    "float32": ("float", "float", "Real"),
    "float64": ("double", "double", "Real"),
    "complex64": ("Complex<float>", "Complex<float>", "Complex_"),
    "complex128": ("Complex<double>", "Complex<double>", "Complex_"),
}
_FAMILIES = {
    "Bool": ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"),
    "Integer": ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"),
    "Real": ("SUM", "AVG", "PRODUCT", "MIN", "MAX"),
    "Complex_": ("SUM", "AVG", "PRODUCT"),
}

_PRELUDE = r"""
typedef unsigned long long u64;

struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
template <typename T> struct alignas(2 * sizeof(T)) Complex { T re, im; };

// Conversion from the storage type to the compute type and back. Rounds to nearest, ties to even.
template <typename W, typename S> struct Convert {
    static __device__ W widen(S x) { return x; }
    static __device__ S narrow(W x) { return x; }
};
template <> struct Convert<float, Half> {
    static __device__ float widen(Half x) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
        return wide;
    }
    static __device__ Half narrow(float x) {
        Half small;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(small.bits) : "f"(x));
        return small;
    }
};
template <> struct Convert<float, BFloat16> {
    static __device__ float widen(BFloat16 x) { return __int_as_float((int)x.bits << 16); }
    static __device__ BFloat16 narrow(float x) {
        unsigned int bits = (unsigned int)__float_as_int(x);
        BFloat16 small;
        if (x != x) small.bits = (unsigned short)((bits >> 16) | 0x40);  // quiet NaN
        else small.bits = (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        return small;
    }
};

struct Integer {
    template <typename W> static __device__ W SUM(W a, W b) { return (W)(a + b); }
    template <typename W> static __device__ W PRODUCT(W a, W b) { return (W)(a * b); }
    template <typename W> static __device__ W MIN(W a, W b) { return b < a ? b : a; }
    template <typename W> static __device__ W MAX(W a, W b) { return b > a ? b : a; }
    template <typename W> static __device__ W BAND(W a, W b) { return (W)(a & b); }
    template <typename W> static __device__ W BOR(W a, W b) { return (W)(a | b); }
    template <typename W> static __device__ W BXOR(W a, W b) { return (W)(a ^ b); }
};
struct Bool {
    template <typename W> static __device__ W SUM(W a, W b) { return a | b; }
    template <typename W> static __device__ W PRODUCT(W a, W b) { return a & b; }
    template <typename W> static __device__ W MIN(W a, W b) { return a & b; }
    template <typename W> static __device__ W MAX(W a, W b) { return a | b; }
    template <typename W> static __device__ W BAND(W a, W b) { return a & b; }
    template <typename W> static __device__ W BOR(W a, W b) { return a | b; }
    template <typename W> static __device__ W BXOR(W a, W b) { return a ^ b; }
};
struct Real {
    template <typename W> static __device__ W SUM(W a, W b) { return a + b; }
    template <typename W> static __device__ W AVG(W a, W b) { return a + b; }
    template <typename W> static __device__ W PRODUCT(W a, W b) { return a * b; }
    // Propagates NaN, as NumPy does.
    template <typename W> static __device__ W MIN(W a, W b) {
        return a != a ? a : (b != b || b < a ? b : a);
    }
    template <typename W> static __device__ W MAX(W a, W b) {
        return a != a ? a : (b != b || b > a ? b : a);
    }
};
struct Complex_ {
    template <typename W> static __device__ W SUM(W a, W b) { return {a.re + b.re, a.im + b.im}; }
    template <typename W> static __device__ W AVG(W a, W b) { return SUM(a, b); }
    template <typename W> static __device__ W PRODUCT(W a, W b) {
        return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    }
};

template <typename W> __device__ W divide(W x, double by) { return x / (W)by; }
template <typename T> __device__ Complex<T> divide(Complex<T> x, double by) {
    return {x.re / (T)by, x.im / (T)by};
}
template <typename W> __device__ W times(W x, double re, double im) { return x * (W)re; }
template <typename T> __device__ Complex<T> times(Complex<T> x, double re, double im) {
    return {x.re * (T)re - x.im * (T)im, x.re * (T)im + x.im * (T)re};
}

// The elements of one 16-byte access.
template <typename S> struct alignas(16) Pack { S item[16 / sizeof(S)]; };

// Adds lower ranks first, for the same bits on every rank and in every run.
#define FOLD(NAME, S, W, FAMILY, OP, FINISH)                                                    \
extern "C" __global__ void NAME(u64 out, PARAMETERS, int inputs, u64 count) {                  \
    const u64 input[] = {ARGUMENTS};                                                           \
    const int wide = 16 / sizeof(S);                                                           \
    const u64 threads = (u64)gridDim.x * blockDim.x;                                           \
    const u64 me = (u64)blockIdx.x * blockDim.x + threadIdx.x;                                 \
    u64 all = out;                                                                             \
    for (int i = 0; i < inputs; ++i) all |= input[i];                                          \
    const u64 packs = all % 16 ? 0 : count / wide;                                             \
    for (u64 at = me; at < packs; at += threads) {                                             \
        W total[wide];                                                                         \
        for (int i = 0; i < inputs; ++i) {                                                     \
            const Pack<S> pack = ((const Pack<S>*)input[i])[at];                               \
            for (int k = 0; k < wide; ++k) {                                                   \
                const W item = Convert<W, S>::widen(pack.item[k]);                             \
                total[k] = i ? FAMILY::OP(total[k], item) : item;                              \
            }                                                                                  \
        }                                                                                      \
        Pack<S> result;                                                                        \
        for (int k = 0; k < wide; ++k)                                                         \
            result.item[k] = Convert<W, S>::narrow(FINISH(total[k], inputs));                  \
        ((Pack<S>*)out)[at] = result;                                                          \
    }                                                                                          \
    for (u64 at = packs * wide + me; at < count; at += threads) {                              \
        W total = Convert<W, S>::widen(((const S*)input[0])[at]);                              \
        for (int i = 1; i < inputs; ++i)                                                       \
            total = FAMILY::OP(total, Convert<W, S>::widen(((const S*)input[i])[at]));         \
        ((S*)out)[at] = Convert<W, S>::narrow(FINISH(total, inputs));                          \
    }                                                                                          \
}
#define AS_IT_IS(x, n) (x)
#define DIVIDED(x, n) divide(x, (double)(n))

#define SCALE(NAME, S, W)                                                                      \
extern "C" __global__ void NAME(u64 out, u64 input, u64 count, double re, double im) {         \
    const u64 threads = (u64)gridDim.x * blockDim.x;                                           \
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += threads)       \
        ((S*)out)[at] =                                                                        \
            Convert<W, S>::narrow(times(Convert<W, S>::widen(((const S*)input)[at]), re, im)); \
}
"""
_FLAGS = r"""
typedef unsigned long long u64;

// One thread for each flag. A reader of the new value sees all earlier work of this stream.
// One peer raises a flag; the owner raises it only to release everything that waits for it.
extern "C" __global__ void signal_flags(PARAMETERS, int flags, u64 value) {
    const u64 flag[] = {ARGUMENTS};
    if (threadIdx.x >= flags) return;
    u64 seen;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(seen) : "l"(flag[threadIdx.x]) : "memory");
    if (seen >= value) return;
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;"
                 :: "l"(flag[threadIdx.x]), "l"(value) : "memory");
}

// One thread for each flag. Sleeps between polls: the peer may need this GPU to raise the flag.
extern "C" __global__ void wait_for_flags(PARAMETERS, int flags, u64 value) {
    const u64 flag[] = {ARGUMENTS};
    if (threadIdx.x >= flags) return;
    for (;;) {
        u64 seen;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                     : "=l"(seen) : "l"(flag[threadIdx.x]) : "memory");
        if (seen >= value) break;
        __nanosleep(500);
    }
}
"""
_PARAMETERS = ", ".join(f"u64 in{i}" for i in range(MAX_INPUTS))
_ARGUMENTS = ", ".join(f"in{i}" for i in range(MAX_INPUTS))


def _with_inputs(source: str) -> str:
    return source.replace("PARAMETERS", _PARAMETERS).replace("ARGUMENTS", _ARGUMENTS)


PRELUDE = _with_inputs(_PRELUDE)
FLAGS = _with_inputs(_FLAGS)


def knows(dtype: np.dtype[Any]) -> bool:
    """Return whether there are kernels for ``dtype``."""
    return dtype.name in TYPES


def reduce_kernel_name(name: str, op: RedOpType) -> str:
    """Return the name of the kernel that reduces the dtype ``name`` by ``op``."""
    return f"fold_{name}_{op.name}"


def scale_name(name: str) -> str:
    """Return the name of the kernel that scales the dtype ``name``."""
    return f"scale_{name}"


def source_of(name: str) -> str:
    """Return the source of the kernels for the dtype ``name``, to be appended to ``PRELUDE``."""
    stored, computed, family = TYPES[name]
    lines: list[str] = []
    for op in _FAMILIES[family]:
        finish = "DIVIDED" if op == "AVG" else "AS_IT_IS"
        kernel = reduce_kernel_name(name, RedOpType[op])
        arguments = f"{kernel}, {stored}, {computed}, {family}, {op}, {finish}"
        lines.append(f"FOLD({arguments})")
    if family in ("Real", "Complex_"):
        lines.append(f"SCALE({scale_name(name)}, {stored}, {computed})")
    return "\n".join(lines) + "\n"
