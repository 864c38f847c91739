/* Vectors of a CPU in GCC's vector types: numbers of one, a * b + c, and a vector of one number. */

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#define SPLAT(x) _mm512_set1_ps(x)
#elif defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define MULTIPLY_ADD(a, b, c) _mm256_fmadd_ps(a, b, c)
#define SPLAT(x) _mm256_set1_ps(x)
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define LANES 4
#define MULTIPLY_ADD(a, b, c) vfmaq_f32(c, a, b)
#define SPLAT(x) vdupq_n_f32(x)
#else
#define LANES 4
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define SPLAT(x) ((floats){(x), (x), (x), (x)})
#endif

/* Vectors of a block of a product: with 4 to 6 rows its sums fit a CPU's vector registers. */
#define VECTORS (LANES == 16 ? 4 : 2)

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
