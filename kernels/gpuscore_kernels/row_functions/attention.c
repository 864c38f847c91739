/* Attention of a packed batch for CPUs: `attention.py` calls it, `extend_attention/table.py` has
   the columns of its tables, and `extend_attention/triton.py` is the same walk on a GPU, with the
   same names for the running sums: m_i, l_i and acc.

   A thread computes one query tile of the table for one KV head; a row is a token and a query head
   of that KV head. Keys come in the table's tiles of KEYS, of which up to MOST make a block: keys
   and values of a block are packed once for all rows of the query tile, then six rows at a time see
   those tiles of the block that any of the six sees. Scores, weights and sums are float32; with
   products of bfloat16 pairs, weights are rounded before they are multiplied with values.

   A row's result depends on its own keys, and on the division of its keys into blocks alone: a
   hidden key's weight is 0, which changes no sum. */

#include "numbers.h"
#include "vectors.h"

#include <omp.h>

#define KEYS 16 /* of a tile */
#define MOST 4  /* tiles of a block */
#define ROWS 6  /* that are computed together */
#define NEVER -1.0e30f /* score of a hidden key; finite, so that a difference of two is never NaN */

/* Words of 32 bits that products are made of: two neighbours in bfloat16, or a float. */
#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define PER_WORD 2
#define PRODUCT(word, words, sums) \
    (floats)_mm512_dpbf16_ps((__m512)(sums), (__m512bh)_mm512_set1_epi32((int)(word)), (__m512bh)(words))
#else
#define PER_WORD 1
#define PRODUCT(word, words, sums) MULTIPLY_ADD(SPLAT(from_bits(word)), words, sums)
#endif

typedef uint32_t word __attribute__((may_alias));

/* Columns of the tables, as layout.py has them. */
enum { ROW_START, NUM_ROWS, MASKED_START, MASKED_AFTER, MASKED_END, POOL_START, POOL_END,
       NUM_PACKED, NUM_ROOT, ROOT_BASE, SEGMENT_BASE, TILE_FIELDS };
enum { KEY_START, NUM_KEYS, KEY_POSITION, SEGMENT, IS_PACKED, MASKED_FIELDS };
enum { QUERY_ROW, BATCH_ROW, FIRST_ROW, POSITION };
enum { SAME = -2, SHARED = -1 };

/* Heads of tokens: where the first one is, and numbers from token to token and head to head. */
typedef struct {
    number *start;
    int64_t token, head;
} side;

typedef struct {
    side q, k, v, pool_k, pool_v, out;
    const int32_t *rows, *tiles, *pool_tiles, *masked;
    word *work;
    int64_t num_rows, num_tiles, kv_heads, group, size, most_tiles, window;
    float scale, cap; /* base-2 logarithms of weights are scores times `scale`, or cap times tanh of
                         half of it */
} problem;

/* Keys of a tile that a token sees: from `low` to before `high`. */
typedef struct {
    uint8_t low, high;
} range;

/* One query tile and KV head. Its memory is one thread's. */
typedef struct {
    const problem *p;
    int64_t head, tokens, count; /* rows, rounded up to whole sixes */
    int64_t depth, width;        /* words of a head of q, and columns of out, rounded up */
    const int32_t *row;          /* of the first token in the table's rows */
    int tiles;                   /* of the block so far */
    float *acc, *m_i, *l_i; /* weighted values, maximum and sum of weights; l_i has KEYS parts a row */
    word *q, *k, *v;
    range *seen; /* [tokens][MOST] */
} walk;

static inline int64_t rounded_up(int64_t count, int64_t unit)
{
    return (count + unit - 1) / unit * unit;
}

/* The first `count` words of x, which has `size` numbers; the last may lack its second number. */
static inline void words_of(word *to, const number *x, int64_t size, int64_t count)
{
#if PER_WORD == 2
    memcpy(to, x, (size / 2 < count ? size / 2 : count) * sizeof *to);
    if (size % 2 && size / 2 < count)
        to[size / 2] = x[size - 1];
#else
    for (int64_t i = 0; i < (size < count ? size : count); i++)
        to[i] = bits_of(wide(x[i]));
#endif
}

/* to [16][16] = from, transposed. */
static inline void transpose(word *to, word (*from)[KEYS])
{
#if LANES == 16
    __m512i rows[2][KEYS];
    for (int i = 0; i < KEYS; i++)
        rows[0][i] = _mm512_loadu_si512(from[i]);
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) { /* exchange bit `step` of row and column */
        __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i bit = _mm512_set1_epi32(1 << step);
        __m512i low = _mm512_mask_add_epi32(lane, _mm512_test_epi32_mask(lane, bit), lane,
                                            _mm512_set1_epi32(16 - (1 << step)));
        __m512i high = _mm512_add_epi32(low, bit);
        __m512i *x = rows[step & 1], *y = rows[~step & 1];
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++) {
            int other = i ^ 1 << step;
            y[i] = i & 1 << step ? _mm512_permutex2var_epi32(x[other], high, x[i])
                                 : _mm512_permutex2var_epi32(x[i], low, x[other]);
        }
    }
    for (int i = 0; i < KEYS; i++)
        _mm512_storeu_si512(to + i * KEYS, rows[0][i]);
#else
    for (int i = 0; i < KEYS; i++)
        for (int j = 0; j < KEYS; j++)
            to[i * KEYS + j] = from[j][i];
#endif
}

/* Packs `count` keys and values as tile `w->tiles` of the block. */
static void pack(walk *w, const number *k, int64_t k_step, const number *v, int64_t v_step,
                 int64_t count)
{
    int64_t size = w->p->size, depth = rounded_up(w->depth, KEYS);
    word *keys = w->k + w->tiles * KEYS * depth;
    word *values = w->v + w->tiles * (KEYS / PER_WORD) * w->width;
    for (int64_t first = 0; first < depth; first += KEYS) {
        word piece[KEYS][KEYS] = {{0}};
        int64_t left = size - first * PER_WORD;
        for (int64_t key = 0; key < count; key++)
            if (left >= KEYS * PER_WORD)
                words_of(piece[key], k + key * k_step + first * PER_WORD, KEYS * PER_WORD, KEYS);
            else
                words_of(piece[key], k + key * k_step + first * PER_WORD, left, KEYS);
        transpose(keys + first * KEYS, piece);
    }
    if (count < KEYS || size < w->width)
        memset(values, 0, KEYS / PER_WORD * w->width * sizeof *values);
    for (int64_t key = 0; key < count; key++) {
        word *to = values + key / PER_WORD * w->width;
        const number *x = v + key * v_step;
#if PER_WORD == 2
        if (key % 2 == 0 && key + 1 < count) {
            const number *next = x + v_step;
#pragma omp simd
            for (int64_t i = 0; i < size; i++)
                to[i] = x[i] | (uint32_t)next[i] << 16;
        } else if (key % 2 == 0)
            for (int64_t i = 0; i < size; i++)
                to[i] = x[i];
#else
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            to[i] = bits_of(wide(x[i]));
#endif
    }
}

/* out [ROWS, vectors] = out times `alpha`, or 0, plus x [ROWS, depth] times a matrix whose vectors
   begin at `columns` and whose rows are `stride` words apart. */
static inline __attribute__((always_inline)) void
block(float *out, int64_t out_row, const float *alpha, const word *x, int64_t x_row,
      const word *const *columns, int64_t stride, int64_t depth, const int vectors)
{
    floats sums[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[row][v] = (floats){0};
    if (alpha)
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[row][v] = alpha[row] * *(floats *)(out + row * out_row + v * LANES);
    for (int64_t d = 0; d < depth; d++) {
        floats matrix[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            matrix[v] = *(const floats *)(columns[v] + d * stride);
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[row][v] = PRODUCT(x[row * x_row + d], matrix[v], sums[row][v]);
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            *(floats *)(out + row * out_row + v * LANES) = sums[row][v];
}

/* The same for `width` columns, of which every KEYS begin `tile` words behind those before them. */
static void multiply(float *out, int64_t out_row, const float *alpha, const word *x,
                     int64_t x_row, const word *matrix, int64_t tile, int64_t stride,
                     int64_t depth, int64_t width)
{
    for (int64_t at = 0, step; at < width; at += step * LANES) {
        const word *columns[VECTORS];
        int64_t left = (width - at) / LANES;
        step = left >= VECTORS ? VECTORS : left >= 2 ? 2 : 1;
        for (int64_t v = 0; v < step; v++) {
            int64_t column = at + v * LANES;
            columns[v] = matrix + column / KEYS * tile + column % KEYS;
        }
        if (step == VECTORS)
            block(out + at, out_row, alpha, x, x_row, columns, stride, depth, VECTORS);
        else if (step == 2)
            block(out + at, out_row, alpha, x, x_row, columns, stride, depth, 2);
        else
            block(out + at, out_row, alpha, x, x_row, columns, stride, depth, 1);
    }
}

#if defined(__FMA__) || defined(__ARM_NEON)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif

/* 2^x to about 1e-7 of itself, for x <= 0, and no less than 2^-126. NaN stays NaN. */
static inline float power_of_two(float x)
{
    x = x < -126.0f ? -126.0f : x;
    float n = rintf(x), r = x - n, p = 1.5403530e-4f;
    p = FUSED(p, r, 1.3333558e-3f);
    p = FUSED(p, r, 9.6181291e-3f);
    p = FUSED(p, r, 5.5504109e-2f);
    p = FUSED(p, r, 2.4022651e-1f);
    p = FUSED(p, r, 6.9314718e-1f);
    p = FUSED(p, r, 1.0f);
    return p * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

/* Turns scores of one row into words of weights, in place, and returns the factor of the row's sums so far. */
static float weigh(const walk *w, float *s, int64_t row, int first, int last)
{
    const problem *p = w->p;
    const range *seen = w->seen + row / p->group * MOST;
    float largest = NEVER, scale = p->cap > 0 ? 1.0f : p->scale, *l_i = w->l_i + row * KEYS;
    for (int tile = first; tile < last; tile++) {
        float *x = s + (tile - first) * KEYS;
        int low = seen[tile].low, high = seen[tile].high;
        if (p->cap > 0) /* cap * tanh(scale * x / cap) */
#pragma omp simd
            for (int i = 0; i < KEYS; i++)
                x[i] = p->cap * (1.0f - 2.0f / (1.0f + exponential(x[i] * p->scale)));
        if (low > 0 || high < KEYS)
#pragma omp simd
            for (int i = 0; i < KEYS; i++)
                x[i] = i >= low && i < high ? x[i] : NEVER;
    }
    int count = (last - first) * KEYS;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < count; i++)
        largest = s[i] > largest ? s[i] : largest;
    float before = w->m_i[row], m_ij = before > largest * scale ? before : largest * scale;
    float alpha = power_of_two(before - m_ij);
    w->m_i[row] = m_ij;
    for (int i = 0; i < KEYS; i++)
        l_i[i] *= alpha;
    for (float *x = s; x < s + count; x += KEYS) {
#pragma omp simd
        for (int i = 0; i < KEYS; i++) {
            x[i] = x[i] <= NEVER ? 0.0f : power_of_two(FUSED(x[i], scale, -m_ij));
            l_i[i] += x[i];
        }
#if PER_WORD == 2
        __m256i words = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x));
        _mm256_storeu_si256((__m256i *)(s + (x - s) / 2), words);
#endif
    }
    return alpha;
}

/* Adds the block's keys to the sums of all rows that see any. */
static void add_block(walk *w)
{
    int64_t group = w->p->group, depth = rounded_up(w->depth, KEYS);
    for (int64_t row = 0; row < w->count; row += ROWS) {
        int first = MOST, last = 0;
        for (int64_t token = row / group; token <= (row + ROWS - 1) / group; token++)
            for (int tile = 0; tile < w->tiles; tile++)
                if (w->seen[token * MOST + tile].high > w->seen[token * MOST + tile].low) {
                    first = tile < first ? tile : first;
                    last = tile + 1 > last ? tile + 1 : last;
                }
        if (last == 0)
            continue;
        float scores[ROWS][MOST * KEYS], alpha[ROWS];
        multiply(scores[0], MOST * KEYS, NULL, w->q + row * w->depth, w->depth,
                 w->k + first * KEYS * depth, KEYS * depth, KEYS, w->depth, (last - first) * KEYS);
        for (int i = 0; i < ROWS; i++)
            alpha[i] = weigh(w, scores[i], row + i, first, last);
        multiply(w->acc + row * w->width, w->width, alpha, (word *)scores, MOST * KEYS,
                 w->v + first * (KEYS / PER_WORD) * w->width, KEYS, w->width,
                 (last - first) * (KEYS / PER_WORD), w->width);
    }
    w->tiles = 0;
}

/* Adds a tile of `count` keys from row or slot `start` on. `key` and `segment` are those of a masked
   tile; without `entry` all rows see all keys. */
static void add_tile(walk *w, int packed, int64_t start, const int32_t *entry)
{
    const problem *p = w->p;
    const side *k = packed ? &p->k : &p->pool_k, *v = packed ? &p->v : &p->pool_v;
    int64_t count = entry ? entry[NUM_KEYS] : KEYS;
    for (int64_t token = 0; token < w->tokens; token++) {
        range *seen = w->seen + token * MOST + w->tiles;
        int64_t low = 0, high = count;
        if (entry) {
            const int32_t *row = w->row + token;
            int64_t first = row[FIRST_ROW * p->num_rows], segment = entry[SEGMENT];
            int64_t newest = INT32_MAX, oldest = 0;
            if (segment == SAME) {
                newest = row[BATCH_ROW * p->num_rows];
                oldest = first;
            } else if (p->window)
                newest = row[POSITION * p->num_rows];
            if (p->window && oldest < newest - p->window + 1)
                oldest = newest - p->window + 1;
            low = oldest - entry[KEY_POSITION];
            high = newest + 1 - entry[KEY_POSITION];
            low = low < 0 ? 0 : low > count ? count : low;
            high = high < low ? low : high > count ? count : high;
            if (segment >= 0 && segment != first)
                high = low;
        }
        *seen = (range){low, high};
    }
    pack(w, k->start + w->head * k->head + start * k->token, k->token,
         v->start + w->head * v->head + start * v->token, v->token, count);
    if (++w->tiles == p->most_tiles)
        add_block(w);
}

static void add_masked(walk *w, int64_t begin, int64_t end)
{
    for (int64_t index = begin; index < end; index++) {
        const int32_t *entry = w->p->masked + index * MASKED_FIELDS;
        add_tile(w, entry[IS_PACKED], entry[KEY_START], entry);
    }
}

static void read_queries(walk *w)
{
    const problem *p = w->p;
    memset(w->q, 0, w->count * w->depth * sizeof *w->q);
    memset(w->acc, 0, w->count * w->width * sizeof *w->acc);
    memset(w->seen, 0, (w->tokens + ROWS) * MOST * sizeof *w->seen);
    memset(w->l_i, 0, w->count * KEYS * sizeof *w->l_i);
    for (int64_t row = 0; row < w->count; row++)
        w->m_i[row] = NEVER;
    for (int64_t row = 0; row < w->tokens * p->group; row++) {
        int64_t token = w->row[row / p->group], head = w->head * p->group + row % p->group;
        const number *x = p->q.start + token * p->q.token + head * p->q.head;
        words_of(w->q + row * w->depth, x, p->size, w->depth);
        for (int64_t first = 0; first < p->size; first += KEYS)
#pragma omp simd
            for (int64_t i = first; i < (first + KEYS < p->size ? first + KEYS : p->size); i++)
                w->l_i[row * KEYS + i - first] += 0.0f * wide(x[i]); /* NaN, if x is not finite */
    }
}

static void write_results(const walk *w)
{
    const problem *p = w->p;
    for (int64_t row = 0; row < w->tokens * p->group; row++) {
        int64_t token = w->row[row / p->group], head = w->head * p->group + row % p->group;
        number *to = p->out.start + token * p->out.token + head * p->out.head;
        const float *acc = w->acc + row * w->width;
        float l_i = 0;
        for (int i = 0; i < KEYS; i++)
            l_i += w->l_i[row * KEYS + i];
        float factor = l_i == 0 ? 0.0f : 1.0f / l_i;
#pragma omp simd
        for (int64_t i = 0; i < p->size; i++)
            to[i] = rounded(acc[i] * factor);
    }
}

/* Computes all query tiles, for all KV heads. `work` has `words` words for each thread. */
void extend_attention(const problem *p, int64_t words, int32_t threads)
{
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < p->num_tiles * p->kv_heads; task++) {
        const int32_t *tile = p->tiles + task % p->num_tiles * TILE_FIELDS;
        walk w = {.p = p, .head = task / p->num_tiles, .tokens = tile[NUM_ROWS]};
        word *work = p->work + omp_get_thread_num() * words;
        w.count = rounded_up(w.tokens * p->group, ROWS);
        w.depth = rounded_up(p->size, PER_WORD) / PER_WORD;
        w.width = rounded_up(p->size, KEYS);
        w.row = p->rows + tile[ROW_START];
        w.k = work;
        w.v = w.k + MOST * KEYS * rounded_up(w.depth, KEYS);
        w.q = w.v + MOST * KEYS * w.width;
        w.acc = (float *)(w.q + w.count * w.depth);
        w.m_i = w.acc + w.count * w.width;
        w.l_i = w.m_i + w.count;
        w.seen = (range *)(w.l_i + w.count * KEYS);
        read_queries(&w);
        add_masked(&w, tile[MASKED_START], tile[MASKED_AFTER]);
        for (int64_t index = tile[POOL_START]; index < tile[POOL_END]; index++)
            add_tile(&w, 0, p->pool_tiles[index], NULL);
        for (int64_t i = 0; i < tile[NUM_PACKED]; i++)
            add_tile(&w, 1, (i < tile[NUM_ROOT] ? tile[ROOT_BASE] : tile[SEGMENT_BASE]) + i * KEYS, NULL);
        add_masked(&w, tile[MASKED_AFTER], tile[MASKED_END]);
        if (w.tiles)
            add_block(&w);
        write_results(&w);
    }
}
