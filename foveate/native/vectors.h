/* Vectors of as many floats as the processor handles at once. */
#pragma once

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef vec loose __attribute__((aligned(4), may_alias)); /* a vector anywhere in memory */

INLINE vec load(const float *at) { return *(const loose *)at; }
INLINE void store(float *at, vec value) { *(loose *)at = value; }
