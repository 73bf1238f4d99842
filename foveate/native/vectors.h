/* Vectors with the SIMD width of the processor. */
#pragma once

#include <stdint.h>

/* LOW and HIGH interleave the lower and the upper halves of two vectors. */
#if defined(__AVX512F__)
#define LANES 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define LANES 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LANES 4
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef vec loose __attribute__((aligned(4), may_alias)); /* an unaligned vector in memory */

/* Load once into a register: compilers otherwise fold the load into every product that uses it, and
   the products then wait for loads. */
#if defined(__AVX512F__)
#define HOLD(value) __asm__("" : "+v"(value)) /* any of 32 registers */
#elif defined(__x86_64__)
#define HOLD(value) __asm__("" : "+x"(value))
#elif defined(__aarch64__)
#define HOLD(value) __asm__("" : "+w"(value))
#else
#define HOLD(value)
#endif

INLINE vec load(const float *at) { return *(const loose *)at; }
INLINE void store(float *at, vec value) { *(loose *)at = value; }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* Transpose a square. Each pass moves the highest bit of the row index to the end of the column
   index and vice versa; after log2(LANES) passes, rows and columns are exchanged. */
INLINE void transpose(vec square[LANES]) {
    UNROLL for (int pass = 1; pass < LANES; pass *= 2) {
        vec next[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = SHUFFLE(square[i], square[i + LANES / 2], LOW);
            next[2 * i + 1] = SHUFFLE(square[i], square[i + LANES / 2], HIGH);
        }
        UNROLL for (int i = 0; i < LANES; i++) square[i] = next[i];
    }
}

INLINE void turn(float *at) {
    vec square[LANES];
    UNROLL for (int i = 0; i < LANES; i++) square[i] = load(at + i * LANES);
    transpose(square);
    UNROLL for (int i = 0; i < LANES; i++) store(at + i * LANES, square[i]);
}
