/* Linear attention by the gated delta rule for CPUs: `delta_net/reference.py` defines the
   results, `delta.py` calls the functions. All is float32 inside; a row's result depends on its own
   prompt and on the place of its chunk's rows alone. */

#include "numbers.h"
#include "vectors.h"

#include <omp.h>

#define ROWS 4     /* of a block of a product */
#define CHUNK_SIZE 64 /* rows of a chunk, as in layout.py */

static inline __attribute__((always_inline)) void
block(float *const *out, const float *const *x, const float *matrix, int64_t depth, int64_t stride,
      int64_t column, int add, const int rows, const int vectors)
{
    floats sums[ROWS][4];
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++)
            sums[row][v] = add ? *(const floats *)(out[row] + column + v * LANES) : (floats){0};
    for (int64_t d = 0; d < depth; d++) {
        floats m[4];
        for (int v = 0; v < vectors; v++)
            m[v] = *(const floats *)(matrix + d * stride + column + v * LANES);
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < vectors; v++)
                sums[row][v] = MULTIPLY_ADD(SPLAT(x[row][d]), m[v], sums[row][v]);
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++)
            *(floats *)(out[row] + column + v * LANES) = sums[row][v];
}

static inline __attribute__((always_inline)) void
all_columns(float *const *out, const float *const *x, const float *matrix, int64_t depth,
            int64_t stride, int64_t width, int add, const int rows)
{
    int64_t column = 0;
    for (; column + VECTORS * LANES <= width; column += VECTORS * LANES)
        block(out, x, matrix, depth, stride, column, add, rows, VECTORS);
    for (; column + LANES <= width; column += LANES)
        block(out, x, matrix, depth, stride, column, add, rows, 1);
    for (; column < width; column++)
        for (int row = 0; row < rows; row++) {
            float sum = add ? out[row][column] : 0.0f;
            for (int64_t d = 0; d < depth; d++)
                sum += x[row][d] * matrix[d * stride + column];
            out[row][column] = sum;
        }
}

/* out [rows, width] = (out, if `add`, plus) x [rows, depth] times matrix [depth, width]. */
static void multiply(float *const *out, const float *const *x, const float *matrix, int64_t rows,
                     int64_t depth, int64_t stride, int64_t width, int add)
{
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS)
        all_columns(out + row, x + row, matrix, depth, stride, width, add, ROWS);
    for (; row < rows; row++)
        all_columns(out + row, x + row, matrix, depth, stride, width, add, 1);
}

/* Rows of mixed, and of `tails` at places below -1, convolved and through SiLU; the heads of queries
   and keys, `keys` columns each, are normed, and queries scaled. `weight` is [kernel, columns]. */
void convolve(float *out, const number *mixed, const number *tails, const int32_t *places,
              const float *weight, int64_t rows, int64_t columns, int64_t kernel, int64_t keys,
              int64_t size, int64_t stride, int32_t threads)
{
    float root = sqrtf((float)size);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        float *to = out + row * columns;
        memset(to, 0, columns * sizeof(float));
        for (int64_t tap = 0; tap < kernel; tap++) {
            int64_t place = tap + 1 < kernel ? places[row * (kernel - 1) + tap] : row;
            if (place == -1)
                continue;
            const number *x = place >= 0 ? mixed + place * stride : tails + (-2 - place) * columns;
            const float *w = weight + tap * columns;
#pragma omp simd
            for (int64_t i = 0; i < columns; i++)
                to[i] += w[i] * wide(x[i]);
        }
#pragma omp simd
        for (int64_t i = 0; i < columns; i++)
            to[i] = to[i] / (1.0f + exponential(-to[i]));
        for (int64_t head = 0; head < 2 * keys; head += size) {
            float factor = inverse_root_mean_square(to + head, size, 1e-6f / (float)size) / root;
            factor = head < keys ? factor / root : factor;
#pragma omp simd
            for (int64_t i = 0; i < size; i++)
                to[head + i] *= factor;
        }
    }
}

/* The norm of each head of x [rows, heads, size], times SiLU of the gate, rounded once. */
void gated_norm(number *out, const float *x, const number *gate, const float *weight, float eps,
                int64_t rows, int64_t heads, int64_t size, int64_t stride, int32_t threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * heads * size > GRAIN)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = (row * heads + head) * size;
            const number *g = gate + row * stride + head * size;
            float inverse = inverse_root_mean_square(x + at, size, eps);
#pragma omp simd
            for (int64_t i = 0; i < size; i++) {
                float open = wide(g[i]);
                open = open / (1.0f + exponential(-open));
                out[at + i] = rounded(x[at + i] * inverse * weight[i] * open);
            }
        }
}

/* The chunk of one head: its rows, and where its numbers are. */
typedef struct {
    const float *q[CHUNK_SIZE], *k[CHUNK_SIZE], *v[CHUNK_SIZE];
    float *out[CHUNK_SIZE];
    float strength[CHUNK_SIZE], decay[CHUNK_SIZE]; /* logarithm since the chunk's beginning */
    int64_t length, padded, key_size, value_size;
    const float *state; /* before the chunk, or NULL; its rows are `state_stride` apart */
    int64_t state_stride;
    float *end; /* the state after it, or NULL; it may be the same memory */
} chunk;

/* Outputs and end state of one chunk; `work` has room for its keys, two squares and its values. */
static void run_chunk(const chunk *c, float *work)
{
    int64_t length = c->length, padded = c->padded, width = c->value_size;
    float *keys = work, *system = keys + c->key_size * padded, *scores = system + CHUNK_SIZE * padded;
    float *written = scores + CHUNK_SIZE * padded;
    float *of_system[CHUNK_SIZE], *of_scores[CHUNK_SIZE], *of_written[CHUNK_SIZE];
    for (int64_t d = 0; d < c->key_size; d++)
        for (int64_t i = 0; i < padded; i++)
            keys[d * padded + i] = i < length ? c->k[i][d] : 0.0f;
    for (int64_t i = 0; i < length; i++) {
        of_system[i] = system + i * padded;
        of_scores[i] = scores + i * padded;
        of_written[i] = written + i * width;
    }
    multiply(of_system, c->k, keys, length, c->key_size, padded, padded, 0);
    multiply(of_scores, c->q, keys, length, c->key_size, padded, padded, 0);
    for (int64_t i = 0; i < length; i++)
        for (int64_t j = 0; j < padded; j++) {
            float between = j <= i ? exponential(c->decay[i] - c->decay[j]) : 0.0f;
            system[i * padded + j] = j < i ? -c->strength[i] * between * of_system[i][j] : 0.0f;
            scores[i * padded + j] = j <= i ? between * of_scores[i][j] : 0.0f;
        }
    if (c->state) {
        multiply(of_written, c->k, c->state, length, c->key_size, c->state_stride, width, 0);
        multiply(c->out, c->q, c->state, length, c->key_size, c->state_stride, width, 0);
    }
    for (int64_t i = 0; i < length; i++) {
        float kept = exponential(c->decay[i]);
#pragma omp simd
        for (int64_t x = 0; x < width; x++) {
            float known = c->state ? kept * of_written[i][x] : 0.0f;
            of_written[i][x] = c->strength[i] * (c->v[i][x] - known);
            c->out[i][x] = c->state ? kept * c->out[i][x] : 0.0f;
        }
    }
    for (int64_t first = 0; first < length; first += ROWS) { /* of four rows each */
        int64_t rows = length - first < ROWS ? length - first : ROWS;
        multiply(of_written + first, (const float *const *)of_system + first, written, rows, first,
                 width, width, 1);
        for (int64_t i = first + 1; i < first + rows; i++)
            for (int64_t j = first; j < i; j++) {
                float factor = system[i * padded + j];
#pragma omp simd
                for (int64_t x = 0; x < width; x++)
                    of_written[i][x] += factor * of_written[j][x];
            }
    }
    multiply(c->out, (const float *const *)of_scores, written, length, length, width, width, 1);
    if (!c->end)
        return;
    float total = c->decay[length - 1], all = exponential(total);
    for (int64_t i = 0; i < length; i++) {
        float kept = exponential(total - c->decay[i]);
#pragma omp simd
        for (int64_t x = 0; x < width; x++)
            of_written[i][x] *= kept;
    }
    for (int64_t d = 0; d < c->key_size; d += CHUNK_SIZE) {
        const float *from[CHUNK_SIZE];
        float *to[CHUNK_SIZE];
        int64_t rows = c->key_size - d < CHUNK_SIZE ? c->key_size - d : CHUNK_SIZE;
        for (int64_t i = 0; i < rows; i++) {
            from[i] = keys + (d + i) * padded;
            to[i] = c->end + (d + i) * width;
#pragma omp simd
            for (int64_t x = 0; x < width; x++)
                to[i][x] = c->state ? all * c->state[(d + i) * c->state_stride + x] : 0.0f;
        }
        multiply(to, from, written, rows, length, width, width, 1);
    }
}

/* Walks [count, 3] of a level. `convolved` holds queries, keys and values side by side, `pool` and
   `held` states; `delta_net.Walks` documents the tables. `work` has `words` numbers for each thread:
   for a chunk, and for the state that a walk hands on. */
void delta_walks(float *out, float *pool, float *held, const float *convolved, const float *strength,
                 const float *decay, const int32_t *chunks, const int32_t *walks, float *work,
                 int64_t count, int64_t heads, int64_t repeat, int64_t key_size, int64_t value_size,
                 int64_t words, int32_t threads)
{
    int64_t values = heads * repeat, keys = heads * key_size, stride = values * value_size;
    int64_t columns = 2 * keys + stride, state_size = heads * key_size * repeat * value_size;
    int64_t state_stride = repeat * value_size;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < count * values; task++) {
        const int32_t *walk = walks + task / values * 3;
        int64_t head = task % values, key_head = head / repeat, source = walk[2];
        int64_t at = key_head * key_size * state_stride + head % repeat * value_size;
        float *of_chunk = work + omp_get_thread_num() * words;
        float *own = of_chunk + words - key_size * value_size;
        chunk c = {.key_size = key_size, .value_size = value_size, .state_stride = state_stride};
        if (source != -1)
            c.state = (source >= 0 ? pool + source * state_size : held + (-2 - source) * state_size) + at;
        for (int64_t number = walk[0]; number < walk[1]; number++) {
            const int32_t *entry = chunks + 4 * number, *target = entry + 1;
            float sum = 0.0f;
            c.length = entry[4] - entry[0];
            for (int64_t i = 0; i < c.length; i++) {
                int64_t row = entry[0] + i;
                const float *x = convolved + row * columns;
                c.q[i] = x + key_head * key_size;
                c.k[i] = x + keys + key_head * key_size;
                c.v[i] = x + 2 * keys + head * value_size;
                c.out[i] = out + row * stride + head * value_size;
                c.strength[i] = strength[row * values + head];
                c.decay[i] = sum += decay[row * values + head];
            }
            c.padded = (c.length + LANES - 1) / LANES * LANES;
            c.end = number + 1 < walk[1] || *target != -1 ? own : NULL;
            run_chunk(&c, of_chunk);
            for (; target < entry + 4 && *target != -1; target++) {
                int64_t slot = *target;
                float *to = slot >= 0 ? pool + slot * state_size : held + (-2 - slot) * state_size;
                for (int64_t d = 0; d < key_size; d++)
                    memcpy(to + at + d * state_stride, own + d * value_size, value_size * sizeof(float));
            }
            c.state = own;
            c.state_stride = value_size;
        }
    }
}
