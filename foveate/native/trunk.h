/* The convolutions of one patch, forward and backward; trunk.c describes the whole.

   Loops over accumulators have fixed lengths, so that compilers keep the sums in registers. Each
   sum is a vector of channels. A tile of 24 sums (12 on processors with 16 registers) shares its
   loads: processors compute two products per cycle but load little more than one vector. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

/* Accumulators must fit the registers: 24 of 32, or 12 of 16. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define FEW 1
#else
#define FEW 2
#endif
#define PIXELS (12 / FEW) /* forward: pixels x 2 vectors of channels */
#define SPREAD (8 / FEW)  /* input gradient: pixels x 3 vectors */
#define GROUP (8 / FEW)   /* weight gradient: outputs x 3 vectors */
#define CLOSE 4096        /* floats that fit the L1 cache next to other data */
#define SEGMENT 1024      /* values summed in float32 before they are added in float64 */
#define RUN 32            /* the same for the pixels of a map */

typedef int32_t bits __attribute__((vector_size(4 * LANES)));

typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef doubles loose_double __attribute__((aligned(8), may_alias));

enum kind { FOLD, MOMENTS, FIRST, NEXT, LAST, LAST_BACK, NEXT_BACK, FIRST_BACK, UNFOLD };

struct box {
    int64_t top, left, high, wide;
};

/* One stage of the network for all patches; each kind uses some of the fields. A slope is the
   gradient with respect to a map after its norm and ReLU. Norms are (4, channels): mean, gain,
   shift and spread, which is 1 / sqrt(variance + eps). */
struct job {
    int64_t kind, count, parts;
    int64_t colours, height, width, from, to, stride; /* height, width: of the input map */
    int64_t plane, pitch;              /* pixels of one image channel, and of one of its rows */
    const float *images, *shift;       /* (N, C, height + 2, width + 2), and a value near the mean */
    const float *weight, *bias;        /* of a convolution, in PyTorch's layout */
    float *first, *first_bias;         /* the first convolution, with its norm folded in */
    double *moments;                   /* of its windows: mean (9 C,) and covariance (9 C, 9 C) */
    float *map, *norm;                 /* output of the convolution, and the norm after it */
    const float *below, *below_norm;   /* the input map, and its norm */
    struct box *boxes, *below_boxes;   /* (N,), of `map` and of `below`; see boxes.h */
    float *result;                     /* (N, from, height, width): trunk output, or its gradient */
    float *slope, *below_slope;        /* of `map` and of `below` */
    float *unnorm, *below_unnorm;      /* factors from slope to gradient: see `unnormed` */
    double *sums, *squares;            /* (parts, ...) */
    float *weight_sums, *bias_sums, *first_sums, *first_bias_sums; /* (parts, ...) */
    float *weight_gradient, *bias_gradient;
    const float *norm_weight, *norm_bias; /* in PyTorch's layout, or NULL without a norm */
    float *norm_weight_gradient, *norm_bias_gradient;
    float *running_mean, *running_variance;
    double momentum, eps;
    int64_t training; /* whether the norm uses the statistics of the batch */
    _Atomic int64_t next, failed;
};

INLINE vec zero(void) { return (vec){0}; }
/* Propagates NaN, as PyTorch does. */
INLINE vec rectified(vec x) { return (vec)((bits)x & ~(x < zero())); }
INLINE vec within(const int32_t *inside, const float *at) {
    bits mask;
    memcpy(&mask, inside, sizeof mask);
    return (vec)((bits)load(at) & mask);
}
INLINE vec where_active(vec active, vec x) { return (vec)((bits)x & ~(active <= zero())); }

/* Add inputs (px, rows, k) x weights (rows, k, ov vectors); input rows are `gap` floats apart. */
INLINE void multiply(const int px, const int ov, int64_t rows, int64_t k, int64_t gap,
                     const float *const *input, const float *weight, int64_t width, vec *sum) {
    for (int64_t begin = 0; begin < rows * gap; begin += gap)
        for (int64_t i = begin; i < begin + k; i++, weight += width) {
            vec w[3];
            UNROLL for (int v = 0; v < ov; v++) {
                w[v] = load(weight + v * LANES);
                HOLD(w[v]);
            }
            UNROLL for (int p = 0; p < px; p++)
                UNROLL for (int v = 0; v < ov; v++) sum[p * ov + v] += w[v] * input[p][i];
        }
}

static int64_t out_height(const struct job *j) { return (j->height - 3) / j->stride + 1; }
static int64_t out_width(const struct job *j) { return (j->width - 3) / j->stride + 1; }

/* The first patch of a part. */
static int64_t begin_of(const struct job *j, int64_t part) { return j->count * part / j->parts; }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Output rows whose input fits the L1 cache. */
static int64_t rows_at_once(const struct job *j) {
    int64_t line = j->stride * j->width * j->from;
    return line < CLOSE ? CLOSE / line : 1;
}

/* Offset of the window of each output pixel in the input map. */
static void list_windows(const struct job *j, int64_t *windows) {
    for (int64_t y = 0; y < out_height(j); y++)
        for (int64_t x = 0; x < out_width(j); x++)
            *windows++ = (y * j->width + x) * j->stride * j->from;
}

INLINE void conv_outputs(const int px, const int ov, const struct job *j, int64_t at, int64_t valid,
                         int64_t to, const float *const *input, float *map) {
    vec sum[2 * PIXELS];
    UNROLL for (int p = 0; p < px; p++)
        UNROLL for (int v = 0; v < ov; v++) sum[p * ov + v] = load(j->bias + to + v * LANES);
    multiply(px, ov, 3, 3 * j->from, j->width * j->from, input, j->weight + to, j->to, sum);
    UNROLL for (int p = 0; p < px; p++)
        if (p < valid)
            UNROLL for (int v = 0; v < ov; v++)
                store(map + (at + p) * j->to + to + v * LANES, sum[p * ov + v]);
}

INLINE void conv_pixels(const int px, const struct job *j, int64_t at, int64_t valid,
                        const int64_t *windows, const float *active, float *map) {
    const float *input[PIXELS];
    UNROLL for (int p = 0; p < px; p++)
        input[p] = active + windows[at + (p < valid ? p : valid - 1)];
    int64_t to = 0;
    for (; to + 2 * LANES <= j->to; to += 2 * LANES)
        conv_outputs(px, 2, j, at, valid, to, input, map);
    if (to < j->to) conv_outputs(px, 1, j, at, valid, to, input, map);
}

/* Convolve one patch, after ReLU. */
static void convolve(const struct job *j, const int64_t *windows, const float *active, float *map) {
    int64_t at = 0, pixels = out_height(j) * out_width(j);
    for (; at + PIXELS <= pixels; at += PIXELS)
        conv_pixels(PIXELS, j, at, PIXELS, windows, active, map);
    for (; at < pixels; at += 4) conv_pixels(4, j, at, pixels - at, windows, active, map);
}

INLINE void spread_pixels(const int px, const struct job *j, int64_t at, int64_t valid,
                          const int64_t *windows, const float *slope, float *below) {
    int64_t line = 3 * j->from;
    const float *input[SPREAD];
    UNROLL for (int p = 0; p < px; p++)
        input[p] = slope + (at + (p < valid ? p : valid - 1)) * j->to;
    for (int64_t tap = 0; tap < 3 * line; tap += 3 * LANES) {
        vec sum[3 * SPREAD];
        UNROLL for (int i = 0; i < 3 * px; i++) sum[i] = zero();
        multiply(px, 3, 1, j->to, j->to, input, j->weight + tap, 3 * line, sum);
        float *start = below + (tap / line) * j->width * j->from + tap % line;
        UNROLL for (int p = 0; p < px; p++)
            if (p < valid)
                UNROLL for (int v = 0; v < 3; v++) {
                    float *target = start + windows[at + p] + v * LANES;
                    store(target, load(target) + sum[p * 3 + v]);
                }
    }
}

/* Compute the gradient of the convolution of one patch with respect to its input. */
static void input_gradient(const struct job *j, const int64_t *windows, const float *slope,
                           float *below) {
    int64_t at = 0, pixels = out_height(j) * out_width(j);
    memset(below, 0, (size_t)(j->height * j->width * j->from) * sizeof(float));
    for (; at + SPREAD <= pixels; at += SPREAD)
        spread_pixels(SPREAD, j, at, SPREAD, windows, slope, below);
    for (; at < pixels; at += 4) spread_pixels(4, j, at, pixels - at, windows, slope, below);
}

/* Add one patch to GROUP x 3 vectors of the weight gradient. */
INLINE void weight_tile(const struct job *j, const float *active, const float *gradient,
                        float *total) {
    vec sum[3 * GROUP];
    UNROLL for (int i = 0; i < 3 * GROUP; i++)
        sum[i] = load(total + i / 3 * 9 * j->from + i % 3 * LANES);
    int64_t wide = out_width(j), step = j->stride * j->from;
    for (int64_t y = 0; y < out_height(j); y++, active += step * j->width)
        for (int64_t x = 0; x < wide; x++, gradient += j->to) {
            vec a[3];
            UNROLL for (int v = 0; v < 3; v++) {
                a[v] = load(active + x * step + v * LANES);
                HOLD(a[v]);
            }
            UNROLL for (int i = 0; i < 3 * GROUP; i++) sum[i] += a[i % 3] * gradient[i / 3];
        }
    UNROLL for (int i = 0; i < 3 * GROUP; i++)
        store(total + i / 3 * 9 * j->from + i % 3 * LANES, sum[i]);
}

/* Add the gradient of the weights (to, tap, from) and the bias. */
static void weight_gradient(const struct job *j, const float *active, const float *gradient,
                            float *weight, float *bias) {
    int64_t line = 3 * j->from, pixels = out_height(j) * out_width(j);
    for (int64_t tap = 0; tap < 3 * line; tap += 3 * LANES)
        for (int64_t to = 0; to < j->to; to += GROUP)
            weight_tile(j, active + tap / line * j->width * j->from + tap % line, gradient + to,
                        weight + to * 3 * line + tap);
    for (int64_t to = 0; to < j->to; to += LANES) {
        vec sum = load(bias + to);
        for (int64_t p = 0; p < pixels; p++) sum += load(gradient + p * j->to + to);
        store(bias + to, sum);
    }
}

/* Compute some pixels of a row of the first convolution; each input pixel serves three taps. */
INLINE void first_tile(const int px, const struct job *j, const float *image, float *active) {
    for (int64_t to = 0; to < j->from; to += LANES) {
        vec sum[PIXELS + 1];
        UNROLL for (int p = 0; p < px; p++) sum[p] = load(j->first_bias + to);
        for (int64_t colour = 0; colour < j->colours; colour++)
            UNROLL for (int y = 0; y < 3; y++) {
                const float *at = image + colour * j->plane + y * j->pitch;
                const float *weight = j->first + (9 * colour + 3 * y) * j->from + to;
                UNROLL for (int i = 0; i < px + 2; i++)
                    UNROLL for (int x = 0; x < 3; x++)
                        if (i >= x && i < px + x) sum[i - x] += load(weight + x * j->from) * at[i];
            }
        UNROLL for (int p = 0; p < px; p++) store(active + p * j->from + to, rectified(sum[p]));
    }
}

/* Compute the first convolution of one image, with norm and ReLU. */
static void first_rows(const struct job *j, const float *image, float *active) {
    const int px = PIXELS + 1; /* 13 is half the row of a patch of 28 */
    for (int64_t y = 0; y < j->height; y++) {
        const float *line = image + y * j->pitch;
        float *out = active + y * j->width * j->from;
        int64_t x = 0;
        for (; x + px <= j->width; x += px) first_tile(px, j, line + x, out + x * j->from);
        for (; x + 4 <= j->width; x += 4) first_tile(4, j, line + x, out + x * j->from);
        for (; x < j->width; x++) first_tile(1, j, line + x, out + x * j->from);
    }
}

/* Add the gradient of the first convolution, given the slope of its output. */
static void first_gradient(const struct job *j, const float *image, const float *active,
                           const float *slope, float *weight, float *bias) {
    for (int64_t to = 0; to < j->from; to += LANES)
        for (int64_t colour = 0; colour < j->colours; colour++) {
            vec sum[9], total = load(bias + to);
            float *mine = weight + 9 * colour * j->from + to;
            UNROLL for (int t = 0; t < 9; t++) sum[t] = load(mine + t * j->from);
            for (int64_t y = 0; y < j->height; y++) {
                vec g[3] = {zero(), zero(), zero()}; /* of this pixel and the two previous ones */
                for (int64_t x = 0; x < j->width + 2; x++) {
                    int64_t at = (y * j->width + x) * j->from + to;
                    g[2] = g[1], g[1] = g[0], g[0] = zero();
                    if (x < j->width) g[0] = where_active(load(active + at), load(slope + at));
                    UNROLL for (int t = 0; t < 9; t++)
                        sum[t] += g[t % 3] * image[colour * j->plane + (y + t / 3) * j->pitch + x];
                    total += g[0];
                }
            }
            UNROLL for (int t = 0; t < 9; t++) store(mine + t * j->from, sum[t]);
            if (colour == 0) store(bias + to, total);
        }
}
