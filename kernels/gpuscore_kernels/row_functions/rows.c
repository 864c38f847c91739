/* Row-wise functions of the decoder for CPUs, in one pass each; `functions.py` calls them.

   Compiled for one number format, which a macro names: FLOAT32 or BFLOAT16. Every function
   computes in float32 and rounds where `reference.py` of the kernel of the same name does. A row's
   result depends on that row alone. Strides count numbers; the numbers of a row, or of a head in it,
   are contiguous. */

#include "numbers.h"

/* What a normed number is multiplied by; `one_plus` is Gemma's form. */
static inline float factor(number weight, int32_t one_plus)
{
    return one_plus ? 1.0f + wide(weight) : wide(weight);
}

/* normed = the norm of total = x + delta; without delta, of x. x and total are the residual stream,
   which is float32 whatever the format of numbers is. */
void add_rms_norm(float *total, number *normed, const float *x, const number *delta,
                  const number *weight, float eps, int32_t one_plus, int64_t rows, int64_t columns,
                  int64_t x_stride, int64_t delta_stride, int32_t threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * x_stride;
        if (delta) {
            const number *more = delta + row * delta_stride;
            float *sum = total + row * columns;
#pragma omp simd
            for (int64_t i = 0; i < columns; i++)
                sum[i] = in[i] + wide(more[i]);
            in = sum;
        }
        float inverse = inverse_root_mean_square(in, columns, eps);
        number *out = normed + row * columns;
#pragma omp simd
        for (int64_t i = 0; i < columns; i++)
            out[i] = rounded(in[i] * inverse * factor(weight[i], one_plus));
    }
}

static inline void rotate_head(number *out, const float *x, const float *cosine,
                               const float *sine, int64_t pairs)
{
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
        out[i] = rounded(x[i] * cosine[i] - x[i + pairs] * sine[i]);
        out[i + pairs] = rounded(x[i + pairs] * cosine[i] + x[i] * sine[i]);
    }
}

/* Whether a number of a key or its value is not finite. */
static inline uint32_t is_flawed(const number *k, const number *v, int64_t size)
{
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < size; i++) {
        uint32_t key = bits_of(wide(k[i])) & 0x7fffffff, value = bits_of(wide(v[i])) & 0x7fffffff;
        uint32_t larger = key > value ? key : value;
        most = larger > most ? larger : most;
    }
    return most >= 0x7f800000;
}

#define LARGEST_HEAD 1024

/* Heads of a QKV product's queries and keys: normed if there are weights, and rotated. They are
   written head by head, [heads, rows, size]. Where a key or value is not finite, the key becomes NaN
   and the value 0, in its place. */
void norm_and_rotate(number *q, number *k, number *qkv, const float *cosine,
                     const float *sine, const number *q_norm, const number *k_norm, float eps,
                     int32_t one_plus, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size,
                     int64_t stride, int32_t threads)
{
    int64_t both = heads + kv_heads;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * both * size > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cosine + row * (size / 2), *s = sine + row * (size / 2);
        for (int64_t head = 0; head < both; head++) {
            float values[LARGEST_HEAD];
            const number *x = qkv + row * stride + head * size;
            const number *weight = head < heads ? q_norm : k_norm;
            number *out = head < heads ? q + (head * rows + row) * size
                                       : k + ((head - heads) * rows + row) * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++)
                values[i] = wide(x[i]);
            if (weight) {
                float inverse = inverse_root_mean_square(values, size, eps);
#pragma omp simd
                for (int64_t i = 0; i < size; i++)
                    values[i] = values[i] * inverse * factor(weight[i], one_plus);
            }
            rotate_head(out, values, c, s, size / 2);
            number *v = qkv + row * stride + (head + kv_heads) * size;
            if (head >= heads && is_flawed(out, v, size))
                for (int64_t i = 0; i < size; i++) {
                    out[i] = rounded(NAN);
                    v[i] = rounded(0.0f);
                }
        }
    }
}

/* act(gate) * up, of rows that hold the gate's columns and then up's; act is SiLU or GELU's
   approximation by tanh, which is x times a sigmoid as well. */
void gated(number *out, const number *gate_up, int32_t gelu, int64_t rows, int64_t columns,
           int64_t stride, int32_t threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const number *gate = gate_up + row * stride, *up = gate + columns;
        number *to = out + row * columns;
        if (gelu) {
#pragma omp simd
            for (int64_t i = 0; i < columns; i++) {
                float x = wide(gate[i]);
                float sum = 1.59576912f * (x + 0.044715f * x * x * x);
                to[i] = rounded(x / (1.0f + exponential(-sum)) * wide(up[i]));
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < columns; i++) {
                float x = wide(gate[i]);
                to[i] = rounded(x / (1.0f + exponential(-x)) * wide(up[i]));
            }
        }
    }
}

/* Rows in eight bits around 128, and their scales. Magnitudes are compared as integers, so that NaN
   is the largest. */
void quantize_rows(uint8_t *q, float *scales, const number *x, float least, int64_t rows,
                   int64_t columns, int64_t stride, int32_t threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const number *in = x + row * stride;
        uint8_t *out = q + row * columns;
        uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < columns; i++) {
            uint32_t magnitude = bits_of(wide(in[i])) & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        float scale = from_bits(largest) / 127.0f;
        scale = scale == 0 ? least : scale;
        scales[row] = scale;
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) {
            float steps = rintf(wide(in[i]) / scale);
            steps = steps > 127.0f ? 127.0f : steps;
            steps = steps > -127.0f ? steps : -127.0f; /* NaN, too */
            out[i] = (uint8_t)((int32_t)steps + 128);
        }
    }
}

/* y times the scale of its row, plus the bias if there is one, rounded once. */
void scale_rows(number *out, const float *y, const float *scales, const number *bias, int64_t rows,
                int64_t columns, int32_t threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = y + row * columns;
        number *to = out + row * columns;
        float scale = scales[row];
        if (bias) {
#pragma omp simd
            for (int64_t i = 0; i < columns; i++)
                to[i] = rounded(in[i] * scale + wide(bias[i]));
        } else {
#pragma omp simd
            for (int64_t i = 0; i < columns; i++)
                to[i] = rounded(in[i] * scale);
        }
    }
}
