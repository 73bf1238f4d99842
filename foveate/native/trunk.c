/* The convolutions of a `ConvNet` with batch norm and ReLU, forward and backward.

   Images are (N, C, H, W). All feature maps are (N, y, x, channel) with a multiple of 16 channels.
   A map is stored as the raw output of its convolution. Norm and ReLU are applied when the map is
   read, one patch at a time. Each value is therefore written once between two stages, and the
   largest map, that of the first convolution, never leaves the cache.

   Each thread arranges weights as (tap, from, to) forward and (to, tap, from) backward, with taps
   in the order y, x. Work is split into `parts`, and each part has its own sums. The results
   therefore depend neither on the number of threads nor on their order. */
#include "trunk.h"

#include "norms.h"

/* Apply norm and ReLU to one patch of the input map. */
static void rectify(const struct job *j, const float *map, float *active) {
    const float *norm = j->below_norm;
    for (int64_t i = 0; i < j->height * j->width * j->from; i += j->from)
        for (int64_t c = 0; c < j->from; c += LANES) {
            vec deviation = load(map + i + c) - load(norm + c);
            vec gain = load(norm + j->from + c), shift = load(norm + 2 * j->from + c);
            store(active + i + c, rectified(deviation * gain + shift));
        }
}

/* Compute the gradient of one patch of a map from its slope and the sums over the batch. */
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

/* Scratch memory of one thread, in floats. */
static size_t scratch_size(const struct job *j) {
    int64_t taps = 9 * j->colours;
    if (j->kind == MOMENTS)
        return (size_t)(2 * (taps + taps * taps) * LANES +
                        (j->colours + 1) * ((j->height + 2) * (j->width + 2) + 2 * LANES));
    int64_t maps = 2 * j->height * j->width * j->from + out_height(j) * out_width(j) * j->to;
    int64_t windows = 2 * (out_height(j) * out_width(j) + LANES), weights = 9 * j->from * j->to;
    return (size_t)(weights + maps + PIXELS * 9 * j->from + SPREAD * j->to + windows);
}

static void part_of_moments(const struct job *j, int64_t part, float *scratch) {
    int64_t taps = 9 * j->colours, wide = j->width + 2, pixels = (j->height + 2) * wide;
    int64_t plane = pixels + 2 * LANES; /* zero-padded at the end */
    double *sums = (double *)scratch, *products = sums + taps * LANES;
    int32_t *inside = (int32_t *)(products + taps * taps * LANES);
    float *planes = (float *)inside + plane, shift = *j->shift;
    memset(scratch, 0, scratch_size(j) * sizeof(float));
    for (int64_t y = 0; y < j->height; y++)
        for (int64_t x = 0; x < j->width; x++) inside[y * wide + x] = -1;
    for (int64_t n = begin_of(j, part); n < begin_of(j, part + 1); n++) {
        for (int64_t c = 0; c < j->colours; c++) {
            const float *image = j->images + (n * j->colours + c) * pixels;
            for (int64_t i = 0; i < pixels; i++) planes[c * plane + i] = image[i] - shift;
        }
        add_moments(j, planes, plane, inside, sums, products);
    }
    add_up_lanes(taps + taps * taps, sums, j->sums + part * (taps + taps * taps));
}

/* Restrict the job to `rows` rows of output. */
static struct job band_of(const struct job *j, int64_t rows) {
    struct job band = *j;
    band.height = (rows - 1) * j->stride + 3;
    return band;
}

static void part_forward(const struct job *j, int64_t part, float *active) {
    int64_t in = j->height * j->width * j->from, high = out_height(j), wide = out_width(j);
    int64_t begin = begin_of(j, part), end = begin_of(j, part + 1), rows = rows_at_once(j);
    float *panel = active + in;
    int64_t *windows = (int64_t *)(panel + PIXELS * 9 * j->from);
    double *sums = j->sums + part * j->to, *squares = j->squares + part * j->to;
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
        if (j->training) statistics(j, n - begin, map, sums, squares);
    }
}

/* Add the gradients of a patch or a band of it; `below` receives the slope of the input. */
static void part_gradients(const struct job *j, int64_t part, const int64_t *windows,
                           const float *active, const float *gradient, float *below, float *panel) {
    weight_gradient(j, active, gradient, j->weight_sums + part * 9 * j->from * j->to,
                    j->bias_sums + part * j->to);
    input_gradient(j, windows, gradient, below, panel);
}

static void part_backward(const struct job *j, int64_t part, float *active) {
    int64_t in = j->height * j->width * j->from, high = out_height(j), wide = out_width(j);
    int64_t out = high * wide * j->to, rows = rows_at_once(j);
    float *inner = active + in, *gradient = inner + in, *panel = gradient + out;
    int64_t *windows = (int64_t *)(panel + SPREAD * j->to);
    list_windows(j, windows);
    for (int64_t n = begin_of(j, part); n < begin_of(j, part + 1); n++) {
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

/* The end of the trunk: convert between (pixel, channel) and (channel, pixel). */
static void part_last(const struct job *j, int64_t part) {
    int64_t pixels = j->height * j->width, size = pixels * j->from;
    const float *mean = j->below_norm, *gain = mean + j->from, *shift = gain + j->from;
    for (int64_t n = begin_of(j, part); n < begin_of(j, part + 1); n++) {
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

/* Rearrange the weights (to, from, tap) in the order in which a stage reads them. */
static void pack(const struct job *j, float *packed) {
    int forward = j->kind == FIRST || j->kind == NEXT;
    for (int64_t to = 0; to < j->to; to++)
        for (int64_t from = 0; from < j->from; from++)
            for (int64_t tap = 0; tap < 9; tap++) {
                int64_t ahead = (tap * j->from + from) * j->to + to;
                int64_t back = (to * 9 + tap) * j->from + from;
                packed[forward ? ahead : back] = j->weight[(to * j->from + from) * 9 + tap];
            }
}

static void clear(float *sums, int64_t part, int64_t size) {
    if (sums != NULL) memset(sums + part * size, 0, (size_t)size * sizeof(float));
}

static void run_part(const struct job *j, int64_t part, float *scratch) {
    int forward = j->kind == FIRST || j->kind == NEXT;
    int64_t channels = 2 * (forward ? j->to : j->from); /* each double counts as two floats */
    if (j->kind == MOMENTS) {
        part_of_moments(j, part, scratch);
        return;
    }
    clear((float *)j->sums, part, channels);
    clear((float *)j->squares, part, channels);
    clear(j->weight_sums, part, 9 * j->from * j->to);
    clear(j->bias_sums, part, j->to);
    clear(j->first_sums, part, 9 * j->colours * j->from);
    clear(j->first_bias_sums, part, j->from);
    if (forward)
        part_forward(j, part, scratch);
    else if (j->kind == LAST || j->kind == LAST_BACK)
        part_last(j, part);
    else
        part_backward(j, part, scratch);
}

/* Process parts until none remain; any number of threads can call this concurrently. */
void work(struct job *j) {
    float *scratch = aligned_alloc(64, (scratch_size(j) * sizeof(float) / 64 + 1) * 64);
    struct job mine = *j;
    if (scratch != NULL && j->weight != NULL) {
        pack(j, scratch);
        mine.weight = scratch;
    }
    for (int64_t part; (part = atomic_fetch_add(&j->next, 1)) < j->parts;) {
        if (scratch == NULL)
            j->failed = 1;
        else
            run_part(&mine, part, scratch + 9 * j->from * j->to);
    }
    free(scratch);
}

static void add_parts(const struct job *j, int64_t size, float *sums) {
    for (int64_t part = 1; part < j->parts && sums != NULL; part++)
        for (int64_t i = 0; i < size; i++) sums[i] += sums[part * size + i];
}

/* Sum the gradients of the parts in a fixed order, and convert them to PyTorch's layout. */
static void add_gradients(const struct job *j) {
    add_parts(j, 9 * j->from * j->to, j->weight_sums);
    add_parts(j, j->to, j->bias_sums);
    add_parts(j, 9 * j->colours * j->from, j->first_sums);
    add_parts(j, j->from, j->first_bias_sums);
    memcpy(j->bias_gradient, j->bias_sums, (size_t)j->to * sizeof(float));
    for (int64_t to = 0; to < j->to; to++)
        for (int64_t from = 0; from < j->from; from++)
            for (int64_t tap = 0; tap < 9; tap++)
                j->weight_gradient[(to * j->from + from) * 9 + tap] =
                    j->weight_sums[(to * 9 + tap) * j->from + from];
}

/* Finish a stage after all parts are done. */
void finish(struct job *j) {
    if (j->kind == MOMENTS) make_moments(j);
    if (j->kind == MOMENTS || j->kind == FOLD) fold(j);
    if (j->kind == FIRST || j->kind == NEXT) make_norm(j);
    if (j->kind == NEXT_BACK || j->kind == FIRST_BACK) add_gradients(j);
    if (j->kind == LAST_BACK || j->kind == NEXT_BACK) make_unnorm(j);
    if (j->kind == UNFOLD) unfold(j);
}

int64_t lanes(void) { return LANES; }
