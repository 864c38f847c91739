/* Products of rows with a large matrix, both in bfloat16, such as a label head's, which read the
   matrix once; `functions.py` calls it.

   A result's bits depend on its row and column alone: products are fused with sums where a function
   says so, and nowhere else. */

#include "numbers.h"
#include "vectors.h"

/* Rows and columns of a block: their sums, a vector for each column and one for the row are nearly
   all vectors that an x86 CPU has, 32 with AVX-512 and 16 without. */
#define ROWS 4
#if defined(__AVX512F__)
#define COLUMNS 6
#else
#define COLUMNS 3
#endif

typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* A vector of numbers as it is multiplied, `STEP` of them, and a sum plus their products. */
#if defined(__AVX512BF16__)
#define STEP 32
typedef __m512bh operand;

static inline operand loaded(const uint16_t *x)
{
    return (operand)_mm512_loadu_si512(x);
}

static inline floats added(floats sum, operand a, operand b)
{
    return (floats)_mm512_dpbf16_ps((__m512)sum, a, b);
}
#else
#define STEP LANES
typedef floats operand;

static inline operand loaded(const uint16_t *x)
{
    return (floats)(__builtin_convertvector(*(const halves *)x, words) << 16);
}

static inline floats added(floats sum, operand a, operand b)
{
    return MULTIPLY_ADD(a, b, sum);
}
#endif

static inline float total(floats x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += x[lane];
    return sum;
#endif
}

static inline __attribute__((always_inline)) void
block(float *out, const uint16_t *x, const uint16_t *weight, int64_t width, int64_t out_row,
      const int rows, const int columns)
{
    floats sums[ROWS][COLUMNS] = {{{0}}};
    int64_t i = 0;
    for (; i + STEP <= width; i += STEP) {
        operand w[COLUMNS];
        for (int column = 0; column < columns; column++)
            w[column] = loaded(weight + column * width + i);
        for (int row = 0; row < rows; row++) {
            operand numbers = loaded(x + row * width + i);
            for (int column = 0; column < columns; column++)
                sums[row][column] = added(sums[row][column], numbers, w[column]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            float sum = total(sums[row][column]);
            for (int64_t j = i; j < width; j++)
                sum += from_bits((uint32_t)x[row * width + j] << 16)
                       * from_bits((uint32_t)weight[column * width + j] << 16);
            out[row * out_row + column] = sum;
        }
}

static inline __attribute__((always_inline)) void
all_rows(float *out, const uint16_t *x, const uint16_t *weight, int64_t rows, int64_t width,
         int64_t out_row, const int columns)
{
    for (; rows >= ROWS; rows -= ROWS, out += ROWS * out_row, x += ROWS * width)
        block(out, x, weight, width, out_row, ROWS, columns);
    if (rows == 3)
        block(out, x, weight, width, out_row, 3, columns);
    else if (rows == 2)
        block(out, x, weight, width, out_row, 2, columns);
    else if (rows == 1)
        block(out, x, weight, width, out_row, 1, columns);
}

/* out [rows, columns] = x [rows, width] times weight [columns, width], transposed. */
void products(float *out, const uint16_t *x, const uint16_t *weight, int64_t rows, int64_t columns,
              int64_t width, int64_t out_row, int32_t threads)
{
    int64_t blocks = columns / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t column = b * COLUMNS;
        all_rows(out + column, x, weight + column * width, rows, width, out_row, COLUMNS);
    }
    for (int64_t column = blocks * COLUMNS; column < columns; column++)
        all_rows(out + column, x, weight + column * width, rows, width, out_row, 1);
}
