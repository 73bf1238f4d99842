/* The convolutions of a `ConvNet` with their norms and rectifiers, forward and backward.

   Images are (N, C, H, W); all maps behind them are (N, y, x, channel) with a multiple of 16
   channels. A map is stored as the convolution left it. Its norm and rectifier are applied where
   it is read, one patch at a time, so that between two stages each value is written once and the
   largest map, the one behind the first convolution, never leaves the cache.

   Weights are (tap, from, to) forward and (to, tap, from) backward, with taps in the order y, x.
   Work is cut into `parts`. Each part adds up its own sums, whoever runs it, so that the results
   depend neither on the number of threads nor on which is first. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Accumulators must fit the registers: 24 of 32, or 12 of 16. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define FEW 1
#else
#define FEW 2
#endif
#define PIXELS (12 / FEW) /* forward: pixels x 2 vectors of channels */
#define SPREAD (8 / FEW)  /* input gradient: pixels x 3 vectors */
#define GROUP (8 / FEW)   /* weight gradient: outputs x 3 vectors */
#define CHUNK 16          /* channels copied together; every number of channels is a multiple */
#define CLOSE 4096        /* floats that stay in the first cache beside others */
#define SEGMENT 1024      /* values added in float32 before they go to float64 */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t bits __attribute__((vector_size(4 * LANES)));
typedef vec loose __attribute__((aligned(4), may_alias)); /* a vector anywhere in memory */

typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef doubles loose_double __attribute__((aligned(8), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

enum kind { MOMENTS, FIRST, NEXT, LAST, LAST_BACK, NEXT_BACK, FIRST_BACK };

/* One stage of the network for all patches; each kind sets the fields that it needs. A slope is
   the gradient with regard to a map after its norm and rectifier. */
struct job {
    int64_t kind, count, parts;
    int64_t colours, height, width, from, to, stride; /* height, width: of the map that is read */
    int64_t plane;                     /* pixels of one colour of an image */
    const float *images, *shift;       /* (N, C, height + 2, width + 2), and a value near the mean */
    const float *first, *first_bias;   /* the first convolution, with its norm folded in */
    const float *below, *below_norm;   /* the map that is read; its mean, gain and shift */
    const float *weight, *bias;        /* of the convolution that reads it */
    float *map;                        /* what the convolution gives */
    const float *unnorm;               /* from slope to gradient of the map: see `unnormed` */
    float *slope, *below_slope;        /* of `map` and of `below` */
    float *result;                     /* (N, from, height, width): the end, or its gradient */
    double *sums, *squares;            /* (parts, ...) */
    float *weight_sums, *bias_sums, *first_sums, *first_bias_sums; /* (parts, ...) */
    _Atomic int64_t next, failed;
};

INLINE vec load(const float *at) { return *(const loose *)at; }
INLINE void store(float *at, vec value) { *(loose *)at = value; }
INLINE vec zero(void) { return (vec){0}; }
/* Written so that NaN passes, as in PyTorch. */
INLINE vec rectified(vec x) { return (vec)((bits)x & ~(x < zero())); }
INLINE vec within(const int32_t *inside, const float *at) {
    bits mask;
    memcpy(&mask, inside, sizeof mask);
    return (vec)((bits)load(at) & mask);
}
INLINE vec where_active(vec active, vec x) { return (vec)((bits)x & ~(active <= zero())); }

/* Add panel (k, px) x weights (k, ov vectors); panels hold CHUNK of k for each pixel in turn. */
INLINE void multiply(const int px, const int ov, int64_t k, const float *panel, const float *weight,
                     int64_t row, vec *sum) {
    for (int64_t chunk = 0; chunk < k; chunk += CHUNK, panel += CHUNK * px)
        for (int c = 0; c < CHUNK; c++, weight += row) {
            vec w[3];
            UNROLL for (int v = 0; v < ov; v++) w[v] = load(weight + v * LANES);
            UNROLL for (int p = 0; p < px; p++)
                UNROLL for (int v = 0; v < ov; v++) sum[p * ov + v] += w[v] * panel[CHUNK * p + c];
        }
}

INLINE void copy_chunks(const int px, int64_t chunks, const float *source, float *panel) {
    for (int64_t i = 0; i < chunks; i++, panel += CHUNK * px, source += CHUNK)
        memcpy(panel, source, CHUNK * sizeof(float));
}

static int64_t out_height(const struct job *j) { return (j->height - 3) / j->stride + 1; }
static int64_t out_width(const struct job *j) { return (j->width - 3) / j->stride + 1; }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows of output for which the first cache holds what they read. */
static int64_t rows_at_once(const struct job *j) {
    int64_t line = j->stride * j->width * j->from;
    return line < CLOSE ? CLOSE / line : 1;
}

/* Where the window of each output pixel begins in the map that is read. */
static void list_windows(const struct job *j, int64_t *windows) {
    int64_t wide = out_width(j), pixels = out_height(j) * wide;
    for (int64_t i = 0; i < pixels; i++)
        windows[i] = (i / wide * j->width + i % wide) * j->stride * j->from;
}

INLINE void conv_outputs(const int px, const int ov, const struct job *j, int64_t at, int64_t valid,
                         int64_t to, const float *panel, float *map) {
    vec sum[2 * PIXELS];
    UNROLL for (int p = 0; p < px; p++)
        UNROLL for (int v = 0; v < ov; v++) sum[p * ov + v] = load(j->bias + to + v * LANES);
    multiply(px, ov, 9 * j->from, panel, j->weight + to, j->to, sum);
    UNROLL for (int p = 0; p < px; p++)
        if (p < valid)
            UNROLL for (int v = 0; v < ov; v++)
                store(map + (at + p) * j->to + to + v * LANES, sum[p * ov + v]);
}

INLINE void conv_pixels(const int px, const struct job *j, int64_t at, int64_t valid,
                        const int64_t *windows, const float *active, float *map, float *panel) {
    for (int p = 0; p < px; p++) {
        const float *from = active + windows[at + (p < valid ? p : valid - 1)];
        int64_t chunks = 3 * j->from / CHUNK;
        for (int y = 0; y < 3; y++, from += j->width * j->from)
            copy_chunks(px, chunks, from, panel + (y * chunks * px + p) * CHUNK);
    }
    int64_t to = 0;
    for (; to + 2 * LANES <= j->to; to += 2 * LANES)
        conv_outputs(px, 2, j, at, valid, to, panel, map);
    if (to < j->to) conv_outputs(px, 1, j, at, valid, to, panel, map);
}

#if LANES == 16
/* One vector of outputs has as many operands to load as products, and one load in a cycle is all
   that goes beside them. So 12 pixels of a row share what they read: 16 channels to 16. */
INLINE void conv_row(const int stride, const struct job *j, const float *active, float *map) {
    vec sum[12];
    UNROLL for (int p = 0; p < 12; p++) sum[p] = load(j->bias);
    for (int y = 0; y < 3; y++)
        for (int c = 0; c < 16; c++) {
            const float *at = active + y * j->width * 16 + c, *weight = j->weight + (48 * y + c) * 16;
            vec w[3] = {load(weight), load(weight + 256), load(weight + 512)};
            UNROLL for (int i = 0; i < 11 * stride + 3; i++)
                UNROLL for (int x = 0; x < 3; x++)
                    if (i >= x && (i - x) % stride == 0 && (i - x) / stride < 12)
                        sum[(i - x) / stride] += w[x] * at[16 * i];
        }
    UNROLL for (int p = 0; p < 12; p++) store(map + 16 * p, sum[p]);
}

/* `convolve` by such rows, if that applies; the last twelve pixels of a row may overlap others. */
static int convolve_rows(const struct job *j, const float *active, float *map) {
    int64_t high = out_height(j), wide = out_width(j);
    if (j->from != 16 || j->to != 16 || wide < 12) return 0;
    for (int64_t y = 0; y < high; y++)
        for (int64_t x = 0; x < wide; x += 12) {
            int64_t start = x + 12 <= wide ? x : wide - 12;
            const float *at = active + (y * j->width + start) * j->stride * 16;
            float *out = map + (y * wide + start) * 16;
            if (j->stride == 1)
                conv_row(1, j, at, out);
            else
                conv_row(2, j, at, out);
        }
    return 1;
}
#else
static int convolve_rows(const struct job *j, const float *active, float *map) {
    (void)j, (void)active, (void)map;
    return 0;
}
#endif

/* The convolution of one rectified patch. */
static void convolve(const struct job *j, const int64_t *windows, const float *active, float *map,
                     float *panel) {
    int64_t at = 0, pixels = out_height(j) * out_width(j);
    if (convolve_rows(j, active, map)) return;
    for (; at + PIXELS <= pixels; at += PIXELS)
        conv_pixels(PIXELS, j, at, PIXELS, windows, active, map, panel);
    for (; at < pixels; at += 4)
        conv_pixels(4, j, at, pixels - at, windows, active, map, panel);
}

INLINE void spread_pixels(const int px, const struct job *j, int64_t at, int64_t valid,
                          const int64_t *windows, const float *slope, float *below, float *panel) {
    int64_t line = 3 * j->from;
    for (int p = 0; p < px; p++) {
        int64_t pixel = at + (p < valid ? p : valid - 1);
        copy_chunks(px, j->to / CHUNK, slope + pixel * j->to, panel + p * CHUNK);
    }
    for (int64_t tap = 0; tap < 3 * line; tap += 3 * LANES) {
        vec sum[3 * SPREAD];
        UNROLL for (int i = 0; i < 3 * px; i++) sum[i] = zero();
        multiply(px, 3, j->to, panel, j->weight + tap, 3 * line, sum);
        float *start = below + (tap / line) * j->width * j->from + tap % line;
        UNROLL for (int p = 0; p < px; p++)
            if (p < valid)
                UNROLL for (int v = 0; v < 3; v++) {
                    float *target = start + windows[at + p] + v * LANES;
                    store(target, load(target) + sum[p * 3 + v]);
                }
    }
}

/* Gradient of the convolution of one patch with regard to what it read. */
static void input_gradient(const struct job *j, const int64_t *windows, const float *slope,
                           float *below, float *panel) {
    int64_t at = 0, pixels = out_height(j) * out_width(j);
    memset(below, 0, (size_t)(j->height * j->width * j->from) * sizeof(float));
    for (; at + SPREAD <= pixels; at += SPREAD)
        spread_pixels(SPREAD, j, at, SPREAD, windows, slope, below, panel);
    for (; at < pixels; at += 4)
        spread_pixels(4, j, at, pixels - at, windows, slope, below, panel);
}

/* Add what some rows of one patch have to GROUP x 3 vectors of the weights' gradient. */
INLINE void weight_tile(const struct job *j, int64_t rows, const float *active,
                        const float *gradient, float *total) {
    vec sum[3 * GROUP];
    UNROLL for (int i = 0; i < 3 * GROUP; i++)
        sum[i] = load(total + i / 3 * 9 * j->from + i % 3 * LANES);
    int64_t wide = out_width(j), step = j->stride * j->from;
    for (int64_t y = 0; y < rows; y++, active += step * j->width)
        for (int64_t x = 0; x < wide; x++, gradient += j->to) {
            vec a[3];
            UNROLL for (int v = 0; v < 3; v++) a[v] = load(active + x * step + v * LANES);
            UNROLL for (int i = 0; i < 3 * GROUP; i++) sum[i] += a[i % 3] * gradient[i / 3];
        }
    UNROLL for (int i = 0; i < 3 * GROUP; i++)
        store(total + i / 3 * 9 * j->from + i % 3 * LANES, sum[i]);
}

/* Add the gradient of the weights (to, tap, from) and the bias, a few rows at a time in cache. */
static void weight_gradient(const struct job *j, const float *active, const float *gradient,
                            float *weight, float *bias) {
    int64_t line = 3 * j->from, step = j->stride * j->width * j->from;
    int64_t high = out_height(j), wide = out_width(j), band = rows_at_once(j);
    for (int64_t y = 0; y < high; y += band)
        for (int64_t tap = 0; tap < 3 * line; tap += 3 * LANES)
            for (int64_t to = 0; to < j->to; to += GROUP)
                weight_tile(j, smaller(band, high - y),
                            active + y * step + tap / line * j->width * j->from + tap % line,
                            gradient + y * wide * j->to + to, weight + to * 3 * line + tap);
    for (int64_t to = 0; to < j->to; to += LANES) {
        vec sum = load(bias + to);
        for (int64_t p = 0; p < high * wide; p++) sum += load(gradient + p * j->to + to);
        store(bias + to, sum);
    }
}

/* Some pixels of a row of the first convolution; each pixel that is read serves three taps. */
INLINE void first_tile(const int px, const struct job *j, const float *image, float *active) {
    int64_t wide = j->width + 2;
    for (int64_t to = 0; to < j->from; to += LANES) {
        vec sum[PIXELS + 1];
        UNROLL for (int p = 0; p < px; p++) sum[p] = load(j->first_bias + to);
        for (int64_t colour = 0; colour < j->colours; colour++)
            UNROLL for (int y = 0; y < 3; y++) {
                const float *at = image + colour * j->plane + y * wide;
                const float *weight = j->first + (9 * colour + 3 * y) * j->from + to;
                UNROLL for (int i = 0; i < px + 2; i++)
                    UNROLL for (int x = 0; x < 3; x++)
                        if (i >= x && i < px + x) sum[i - x] += load(weight + x * j->from) * at[i];
            }
        UNROLL for (int p = 0; p < px; p++) store(active + p * j->from + to, rectified(sum[p]));
    }
}

/* The first convolution of one image, normed and rectified. */
static void first_rows(const struct job *j, const float *image, float *active) {
    const int px = PIXELS + 1; /* 13 is half the row of a patch of 28 */
    for (int64_t y = 0; y < j->height; y++) {
        const float *line = image + y * (j->width + 2);
        float *out = active + y * j->width * j->from;
        int64_t x = 0;
        for (; x + px <= j->width; x += px) first_tile(px, j, line + x, out + x * j->from);
        for (; x + 4 <= j->width; x += 4) first_tile(4, j, line + x, out + x * j->from);
        for (; x < j->width; x++) first_tile(1, j, line + x, out + x * j->from);
    }
}

/* Add the gradient of the first convolution, given the slope of what it gave. */
static void first_gradient(const struct job *j, const float *image, const float *active,
                           const float *slope, float *weight, float *bias) {
    int64_t wide = j->width + 2;
    for (int64_t to = 0; to < j->from; to += LANES)
        for (int64_t colour = 0; colour < j->colours; colour++) {
            vec sum[9], total = load(bias + to);
            float *mine = weight + 9 * colour * j->from + to;
            UNROLL for (int t = 0; t < 9; t++) sum[t] = load(mine + t * j->from);
            for (int64_t y = 0; y < j->height; y++) {
                vec g[3] = {zero(), zero(), zero()}; /* of this pixel and the two before */
                for (int64_t x = 0; x < wide; x++) {
                    int64_t at = (y * j->width + x) * j->from + to;
                    g[2] = g[1], g[1] = g[0], g[0] = zero();
                    if (x < j->width) g[0] = where_active(load(active + at), load(slope + at));
                    UNROLL for (int t = 0; t < 9; t++)
                        sum[t] += g[t % 3] * image[colour * j->plane + (y + t / 3) * wide + x];
                    total += g[0];
                }
            }
            UNROLL for (int t = 0; t < 9; t++) store(mine + t * j->from, sum[t]);
            if (colour == 0) store(bias + to, total);
        }
}

/* Apply norm and rectifier to one patch of the map that is read. */
static void rectify(const struct job *j, const float *map, float *active) {
    const float *norm = j->below_norm;
    for (int64_t i = 0; i < j->height * j->width * j->from; i += j->from)
        for (int64_t c = 0; c < j->from; c += LANES) {
            vec deviation = load(map + i + c) - load(norm + c);
            vec gain = load(norm + j->from + c), shift = load(norm + 2 * j->from + c);
            store(active + i + c, rectified(deviation * gain + shift));
        }
}

INLINE void add_lanes(double *total, vec value) {
    *(loose_double *)total += __builtin_convertvector(value, doubles);
}

/* Mask `slope` by what is active, and add up the slope and its product with the deviation. */
static void mask(const struct job *j, const float *map, float *slope, double *sums,
                 double *products) {
    for (int64_t c = 0; c < j->from; c += LANES) {
        vec mean = load(j->below_norm + c), gain = load(j->below_norm + j->from + c);
        vec shift = load(j->below_norm + 2 * j->from + c);
        for (int64_t y = 0; y < j->height; y++) {
            vec sum = zero(), product = zero();
            for (int64_t x = 0; x < j->width; x++) {
                int64_t at = (y * j->width + x) * j->from + c;
                vec deviation = load(map + at) - mean;
                vec g = where_active(deviation * gain + shift, load(slope + at));
                store(slope + at, g);
                sum += g;
                product += g * deviation;
            }
            add_lanes(sums + c, sum);
            add_lanes(products + c, product);
        }
    }
}

/* The gradient of one patch of a map, from its slope and the sums over the batch. */
static void unnormed(const struct job *j, const float *map, const float *slope, float *gradient) {
    const float *factor = j->unnorm, *pull = factor + j->to, *mean = pull + j->to;
    const float *constant = mean + j->to;
    for (int64_t i = 0; i < out_height(j) * out_width(j) * j->to; i += j->to)
        for (int64_t c = 0; c < j->to; c += LANES) {
            vec deviation = load(map + i + c) - load(mean + c);
            vec value = load(slope + i + c) * load(factor + c) + deviation * load(pull + c);
            store(gradient + i + c, value + load(constant + c));
        }
}

/* Take one more patch into the mean and the sum of squared deviations of `seen` patches. */
static void statistics(const struct job *j, int64_t seen, const float *map, double *mean,
                       double *square) {
    int64_t high = out_height(j), wide = out_width(j);
    double n = (double)(high * wide), before = (double)seen * n;
    for (int64_t c = 0; c < j->to; c += LANES) {
        double total[LANES] = {0}, squares[LANES] = {0};
        vec centre;
        for (int64_t y = 0; y < high; y++) {
            vec sum = zero();
            for (int64_t x = 0; x < wide; x++) sum += load(map + (y * wide + x) * j->to + c);
            add_lanes(total, sum);
        }
        for (int i = 0; i < LANES; i++) centre[i] = (float)(total[i] / n);
        for (int64_t y = 0; y < high; y++) {
            vec sum = zero();
            for (int64_t x = 0; x < wide; x++) {
                vec deviation = load(map + (y * wide + x) * j->to + c) - centre;
                sum += deviation * deviation;
            }
            add_lanes(squares, sum);
        }
        for (int i = 0; i < LANES; i++) {
            double delta = total[i] / n - mean[c + i];
            mean[c + i] += delta * n / (before + n);
            square[c + i] += squares[i] + delta * delta * before * n / (before + n);
        }
    }
}

/* Add sums (9 C,) and products (9 C, 9 C) of the 3 x 3 windows of one image, lane by lane. The
   windows are taken row after row, with two that `inside` masks at the end of each. */
static void moments(const struct job *j, const float *planes, int64_t plane, const int32_t *inside,
                    double *sums, double *products) {
    int64_t taps = 9 * j->colours, wide = j->width + 2, length = j->height * wide;
    for (int64_t t = 0; t < taps; t += 3) {
        const float *one = planes + t / 9 * plane + t % 9 / 3 * wide;
        for (int64_t begin = 0; begin < length; begin += SEGMENT) {
            int64_t end = smaller(begin + SEGMENT, length);
            vec total[3] = {zero(), zero(), zero()};
            for (int64_t i = begin; i < end; i += LANES)
                UNROLL for (int k = 0; k < 3; k++) total[k] += within(inside + i, one + k + i);
            for (int k = 0; k < 3; k++) add_lanes(sums + (t + k) * LANES, total[k]);
            for (int64_t u = t; u < taps; u += 3) {
                const float *other = planes + u / 9 * plane + u % 9 / 3 * wide;
                vec sum[9] = {zero()};
                for (int64_t i = begin; i < end; i += LANES)
                    UNROLL for (int k = 0; k < 9; k++)
                        sum[k] += within(inside + i, one + k / 3 + i) * load(other + k % 3 + i);
                UNROLL for (int k = 0; k < 9; k++)
                    add_lanes(products + ((t + k / 3) * taps + u + k % 3) * LANES, sum[k]);
            }
        }
    }
}

static void part_of_moments(const struct job *j, int64_t part, int64_t begin, int64_t end,
                            float *scratch) {
    int64_t taps = 9 * j->colours, wide = j->width + 2, pixels = (j->height + 2) * wide;
    int64_t plane = pixels + 2 * LANES; /* with zeros behind */
    float *planes = scratch + plane, shift = *j->shift;
    int32_t *inside = (int32_t *)scratch;
    memset(scratch, 0, (size_t)((j->colours + 1) * plane) * sizeof(float));
    for (int64_t y = 0; y < j->height; y++)
        for (int64_t x = 0; x < j->width; x++) inside[y * wide + x] = -1;
    for (int64_t n = begin; n < end; n++) {
        for (int64_t c = 0; c < j->colours; c++) {
            const float *image = j->images + (n * j->colours + c) * pixels;
            for (int64_t i = 0; i < pixels; i++) planes[c * plane + i] = image[i] - shift;
        }
        moments(j, planes, plane, inside, j->sums + part * taps * LANES,
                j->squares + part * taps * taps * LANES);
    }
}

/* The job on `rows` rows of output alone. */
static struct job band_of(const struct job *j, int64_t rows) {
    struct job band = *j;
    band.height = (rows - 1) * j->stride + 3;
    return band;
}

static void part_forward(const struct job *j, int64_t part, int64_t begin, int64_t end,
                         float *active) {
    int64_t in = j->height * j->width * j->from, high = out_height(j), wide = out_width(j);
    float *panel = active + in;
    int64_t *windows = (int64_t *)(panel + PIXELS * 9 * j->from), rows = rows_at_once(j);
    list_windows(j, windows);
    for (int64_t n = begin; n < end; n++) {
        const float *image = j->images + n * j->colours * j->plane;
        float *map = j->map + n * high * wide * j->to;
        if (j->kind == NEXT) {
            rectify(j, j->below + n * in, active);
            convolve(j, windows, active, map, panel);
        }
        for (int64_t y = 0; y < high && j->kind == FIRST; y += rows) {
            struct job band = band_of(j, smaller(rows, high - y));
            first_rows(&band, image + y * j->stride * (j->width + 2), active);
            convolve(&band, windows, active, map + y * wide * j->to, panel);
        }
        statistics(j, n - begin, map, j->sums + part * j->to, j->squares + part * j->to);
    }
}

/* All gradients that a patch, or a band of it, adds to; `below` gets the slope of what is read. */
static void part_gradients(const struct job *j, int64_t part, const int64_t *windows,
                           const float *active, const float *gradient, float *below, float *panel) {
    weight_gradient(j, active, gradient, j->weight_sums + part * 9 * j->from * j->to,
                    j->bias_sums + part * j->to);
    input_gradient(j, windows, gradient, below, panel);
}

static void part_backward(const struct job *j, int64_t part, int64_t begin, int64_t end,
                          float *active) {
    int64_t in = j->height * j->width * j->from, high = out_height(j), wide = out_width(j);
    int64_t out = high * wide * j->to, rows = rows_at_once(j);
    float *inner = active + in, *gradient = inner + in, *panel = gradient + out;
    int64_t *windows = (int64_t *)(panel + SPREAD * j->to);
    list_windows(j, windows);
    for (int64_t n = begin; n < end; n++) {
        const float *image = j->images + n * j->colours * j->plane;
        unnormed(j, j->map + n * out, j->slope + n * out, gradient);
        if (j->kind == NEXT_BACK) {
            float *below = j->below_slope + n * in;
            rectify(j, j->below + n * in, active);
            part_gradients(j, part, windows, active, gradient, below, panel);
            mask(j, j->below + n * in, below, j->sums + part * j->from,
                 j->squares + part * j->from);
        }
        for (int64_t y = 0; y < high && j->kind == FIRST_BACK; y += rows) {
            struct job band = band_of(j, smaller(rows, high - y));
            const float *at = image + y * j->stride * (j->width + 2);
            first_rows(&band, at, active);
            part_gradients(&band, part, windows, active, gradient + y * wide * j->to, inner, panel);
            first_gradient(&band, at, active, inner,
                           j->first_sums + part * 9 * j->colours * j->from,
                           j->first_bias_sums + part * j->from);
        }
    }
}

/* The end of the trunk, between (pixel, channel) and (channel, pixel). */
static void part_last(const struct job *j, int64_t part, int64_t begin, int64_t end) {
    int64_t pixels = j->height * j->width, size = pixels * j->from;
    const float *mean = j->below_norm, *gain = mean + j->from, *shift = gain + j->from;
    for (int64_t n = begin; n < end; n++) {
        const float *map = j->below + n * size;
        float *result = j->result + n * size;
        for (int64_t c = 0; c < j->from; c++)
            for (int64_t p = 0; p < pixels; p++) {
                float value = (map[p * j->from + c] - mean[c]) * gain[c] + shift[c];
                if (j->kind == LAST)
                    result[c * pixels + p] = value < 0 ? 0 : value;
                else
                    j->below_slope[n * size + p * j->from + c] = result[c * pixels + p];
            }
        if (j->kind == LAST_BACK)
            mask(j, map, j->below_slope + n * size, j->sums + part * j->from,
                 j->squares + part * j->from);
    }
}

/* Floats that a part needs beside its results. */
static size_t scratch_size(const struct job *j) {
    if (j->kind == MOMENTS)
        return (size_t)((j->colours + 1) * ((j->height + 2) * (j->width + 2) + 2 * LANES));
    int64_t maps = 2 * j->height * j->width * j->from + out_height(j) * out_width(j) * j->to;
    int64_t windows = 2 * (out_height(j) * out_width(j) + LANES);
    return (size_t)(maps + PIXELS * 9 * j->from + SPREAD * j->to + windows);
}

/* Do parts until none is left; any number of threads may call this at once. */
void work(struct job *j) {
    size_t bytes = (scratch_size(j) * sizeof(float) / 64 + 1) * 64;
    float *scratch = aligned_alloc(64, bytes);
    for (int64_t part; (part = atomic_fetch_add(&j->next, 1)) < j->parts;) {
        int64_t begin = j->count * part / j->parts, end = j->count * (part + 1) / j->parts;
        if (scratch == NULL)
            j->failed = 1;
        else if (j->kind == MOMENTS)
            part_of_moments(j, part, begin, end, scratch);
        else if (j->kind == FIRST || j->kind == NEXT)
            part_forward(j, part, begin, end, scratch);
        else if (j->kind == LAST || j->kind == LAST_BACK)
            part_last(j, part, begin, end);
        else
            part_backward(j, part, begin, end, scratch);
    }
    free(scratch);
}

/* Add up what (parts, size) sums hold, always in the same order, into the first. */
void add_parts(int64_t parts, int64_t size, float *sums) {
    for (int64_t part = 1; part < parts; part++)
        for (int64_t i = 0; i < size; i++) sums[i] += sums[part * size + i];
}

int64_t lanes(void) { return LANES; }
