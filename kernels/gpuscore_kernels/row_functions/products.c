/* Products of few float32 rows with a large matrix in bfloat16, such as a label head's, which read
   the matrix once and convert it in registers; `functions.py` calls it.

   A result's bits depend on its row and column alone: products are fused with sums where a function
   says so, and nowhere else. */

#include "vectors.h"

#include <string.h>

/* Rows and columns of a block: their sums, a vector for each column and one for the row are the 16
   vectors that an x86 CPU without AVX-512 has. */
#define ROWS 4
#define COLUMNS 3

typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline floats wide(const uint16_t *x)
{
    return (floats)(__builtin_convertvector(*(const halves *)x, words) << 16);
}

static inline float wide_number(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline __attribute__((always_inline)) void
block(float *out, const float *x, const uint16_t *weight, int64_t width, int64_t out_row,
      const int rows, const int columns)
{
    floats sums[ROWS][COLUMNS] = {{{0}}};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        floats w[COLUMNS];
        for (int column = 0; column < columns; column++)
            w[column] = wide(weight + column * width + i);
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < columns; column++)
                sums[row][column] = MULTIPLY_ADD(*(const floats *)(x + row * width + i), w[column],
                                                 sums[row][column]);
    }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            float sum = 0;
            for (int lane = 0; lane < LANES; lane++)
                sum += sums[row][column][lane];
            for (int64_t j = i; j < width; j++)
                sum += x[row * width + j] * wide_number(weight[column * width + j]);
            out[row * out_row + column] = sum;
        }
}

static inline __attribute__((always_inline)) void
all_rows(float *out, const float *x, const uint16_t *weight, int64_t rows, int64_t width,
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
void products(float *out, const float *x, const uint16_t *weight, int64_t rows, int64_t columns,
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
