/* The convolutions of a `ConvNet` with their norms and rectifiers, forward and backward.

   Images are (N, C, H, W); all maps behind them are (N, y, x, channel) with a multiple of 16
   channels. A map is stored as the convolution left it. Its norm and rectifier are applied where
   it is read, one patch at a time, so that between two stages each value is written once and the
   largest map, the one behind the first convolution, never leaves the cache.

   Weights are (tap, from, to) forward and (to, tap, from) backward, with taps in the order y, x.
   Work is cut into `parts`. Each part adds up its own sums, whoever runs it, so that the results
   depend neither on the number of threads nor on which is first. */
#include "native.h"

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

static void add_parts(const struct job *j, int64_t size, float *sums) {
    for (int64_t part = 1; part < j->parts && sums != NULL; part++)
        for (int64_t i = 0; i < size; i++) sums[i] += sums[part * size + i];
}

/* When all parts are done: add up the gradients, always in the same order, into the first. */
void finish(struct job *j) {
    add_parts(j, 9 * j->from * j->to, j->weight_sums);
    add_parts(j, j->to, j->bias_sums);
    add_parts(j, 9 * j->colours * j->from, j->first_sums);
    add_parts(j, j->from, j->first_bias_sums);
}

int64_t lanes(void) { return LANES; }
