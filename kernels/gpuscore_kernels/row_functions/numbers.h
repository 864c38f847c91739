/* The number format of rows, which a macro names: FLOAT32, BFLOAT16 or FLOAT16. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Numbers below which a second thread costs more than it saves, as torch has it. */
#define GRAIN 32768

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

#if defined(FLOAT32)

typedef float number;

static inline float wide(number x)
{
    return x;
}

static inline number rounded(float x)
{
    return x;
}

#elif defined(BFLOAT16)

typedef uint16_t number;

static inline float wide(number x)
{
    return from_bits((uint32_t)x << 16);
}

/* To nearest, ties to even; NaN stays NaN. */
static inline number rounded(float x)
{
    uint32_t bits = bits_of(x);
    uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (number)nearest;
}

#elif defined(FLOAT16)

typedef uint16_t number;

/* Older compilers have no type for it; these vectorise. */
static inline float wide(number x)
{
    uint32_t bits = bits_of(from_bits((uint32_t)(x & 0x7fff) << 13) * 0x1p112f);
    bits |= (x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return from_bits(bits | (uint32_t)(x & 0x8000) << 16);
}

/* To nearest, ties to even; NaN stays NaN. */
static inline number rounded(float x)
{
    uint32_t size = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
    uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t small = bits_of(from_bits(size) + 0.5f) - 0x3f000000; /* no more than 2^-14 */
    uint32_t found = size < 0x38800000 ? small : size >= 0x47800000 ? 0x7c00 : normal;
    return (number)(sign | (size > 0x7f800000 ? 0x7e00 : found));
}

#endif

/* exp(x) to about 1e-7 of itself; infinity from 88 on, and no less than exp(-87). It is 2^n exp(r),
   |r| <= log(2) / 2, whose polynomial is fitted there. */
static inline float exponential(float x)
{
    int infinite = x > 88.0f;
    x = x < -87.0f ? -87.0f : x;
    x = infinite ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f; /* log(2) in two parts */
    float p = 0.00139337f;
    p = p * r + 0.00836318f;
    p = p * r + 0.04166646f;
    p = p * r + 0.16666577f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    float found = p * from_bits((uint32_t)((int32_t)n + 127) << 23);
    return infinite ? INFINITY : found;
}

/* Sums of squares are added up in as many parts as a vector may have, whatever the compiler and the
   address, so that their last bits never differ. */
#define PARTS 16

static inline float inverse_root_mean_square(const float *x, int64_t columns, float eps)
{
    float squares[PARTS] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + PARTS <= columns; i += PARTS)
        for (int part = 0; part < PARTS; part++)
            squares[part] += x[i + part] * x[i + part];
    for (; i < columns; i++)
        squares[i % PARTS] += x[i] * x[i];
    for (int part = 0; part < PARTS; part++)
        sum += squares[part];
    return 1.0f / sqrtf(sum / (float)columns + eps);
}
