/* The convolutions of a `ConvNet` with batch norm and ReLU, forward and backward.

   Images are (N, C, H, W). All feature maps are (N, y, x, channel) with a multiple of 16 channels.
   A map is stored as the raw output of its convolution. Norm and ReLU are applied when the map is
   read, one patch at a time. Each value is therefore written once between two stages, and the
   largest map, that of the first convolution, never leaves the cache.

   Each thread arranges weights as (tap, from, to) forward and (to, tap, from) backward, with taps
   in the order y, x. Work is split into `parts`, and each part has its own sums. The results
   therefore depend neither on the number of threads nor on their order. */
#include "trunk.h"

#include "boxes.h"
#include "norms.h"

/* Apply norm and ReLU to the pixels of the input map that a piece reads. */
static void rectify(const struct piece *p, struct box stored, const float *map, float *active) {
    const struct job *j = &p->job;
    const float *norm = j->below_norm;
    for (int64_t y = p->seen.top; y < p->seen.top + p->seen.high; y++)
        for (int64_t x = p->seen.left; x < p->seen.left + p->seen.wide; x++, active += j->from) {
            const float *at = map + place_of(stored, y, x) * j->from;
            for (int64_t c = 0; c < j->from; c += LANES) {
                vec gain = load(norm + j->from + c), shift = load(norm + 2 * j->from + c);
                store(active + c, rectified((load(at + c) - load(norm + c)) * gain + shift));
            }
        }
}

/* Add the slopes of the pixels that a piece reads to those of the input map. */
static void add_slopes(const struct piece *p, struct box stored, const float *slope, float *below) {
    const struct job *j = &p->job;
    for (int64_t y = p->seen.top; y < p->seen.top + p->seen.high; y++)
        for (int64_t x = p->seen.left; x < p->seen.left + p->seen.wide; x++, slope += j->from) {
            float *at = below + place_of(stored, y, x) * j->from;
            for (int64_t c = 0; c < j->from; c += LANES)
                store(at + c, load(at + c) + load(slope + c));
        }
}

/* Compute the gradient of one patch of a map from its slope and the sums over the batch. */
static void unnormed(const struct job *j, struct box stored, const float *map, const float *slope,
                     float *gradient) {
    const float *factor = j->unnorm, *pull = factor + j->to, *mean = pull + j->to;
    const float *constant = mean + j->to;
    int64_t others = outside(out_height(j), out_width(j), stored);
    for (int64_t p = 0; p < pixels_of(stored) + (others > 0); p++)
        for (int64_t c = 0; c < j->to; c += LANES) {
            int64_t i = p * j->to + c;
            vec own = (load(map + i) - load(mean + c)) * load(pull + c) + load(constant + c);
            if (p == pixels_of(stored)) own *= (float)others;
            store(gradient + i, load(slope + i) * load(factor + c) + own);
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
    return (size_t)(weights + maps + windows);
}

static void part_of_moments(const struct job *j, int64_t part, float *scratch) {
    int64_t taps = 9 * j->colours, plane = j->plane + 2 * LANES; /* zero-padded at the end */
    double *sums = (double *)scratch, *products = sums + taps * LANES;
    int32_t *inside = (int32_t *)(products + taps * taps * LANES);
    float *planes = (float *)inside + plane;
    memset(scratch, 0, scratch_size(j) * sizeof(float));
    for (int64_t n = begin_of(j, part); n < begin_of(j, part + 1); n++) {
        const float *image = j->images + n * j->colours * j->plane;
        struct box box = first_box(j, image);
        struct job seen = *j;
        seen.height = box.high, seen.width = box.wide;
        copy_shifted(&seen, image + box.top * j->pitch + box.left, plane, inside, planes);
        add_moments(&seen, planes, plane, inside, sums, products);
        add_constant(j, image, (double)outside(j->height, j->width, box), sums, products);
    }
    add_up_lanes(taps + taps * taps, sums, j->sums + part * (taps + taps * taps));
}

/* Restrict the job to `rows` rows of output. */
static struct job band_of(const struct job *j, int64_t rows) {
    struct job band = *j;
    band.height = (rows - 1) * j->stride + 3;
    return band;
}

static void clear(float *sums, int64_t part, int64_t size) {
    if (sums != NULL) memset(sums + part * size, 0, (size_t)size * sizeof(float));
}

/* Compute a piece of the map of one patch. */
static void forward_piece(const struct piece *p, int64_t n, struct box below, float *map,
                          float *active, int64_t *windows) {
    const struct job *j = &p->job;
    int64_t high = out_height(j), wide = out_width(j), rows = rows_at_once(j);
    const float *image = image_of(p, n);
    list_windows(j, windows);
    if (j->kind == NEXT) {
        rectify(p, below, j->below + n * p->room, active);
        convolve(j, windows, active, map);
    }
    for (int64_t y = 0; y < high && j->kind == FIRST; y += rows) {
        struct job band = band_of(j, smaller(rows, high - y));
        first_rows(&band, image + y * j->stride * j->pitch, active);
        convolve(&band, windows, active, map + y * wide * j->to);
    }
}

static void part_forward(const struct job *j, int64_t part, float *active) {
    int64_t in = j->height * j->width * j->from, out = out_height(j) * out_width(j);
    int64_t begin = begin_of(j, part), end = begin_of(j, part + 1);
    int64_t *windows = (int64_t *)(active + in);
    for (int64_t n = begin; n < end; n++) {
        float *map = j->map + n * out * j->to;
        struct box below = j->kind == NEXT ? j->below_boxes[n]
                                           : first_box(j, j->images + n * j->colours * j->plane);
        struct box box = j->boxes[n] = box_above(j->stride, j->height, j->width, below);
        for (int which = 0; which < 1 + (pixels_of(box) < out); which++) {
            struct piece piece = piece_of(j, box, which);
            forward_piece(&piece, n, below, map + piece.at * j->to, active, windows);
        }
        if (j->training)
            statistics(j, box, n - begin, map, j->sums + part * j->to, j->squares + part * j->to);
    }
}

/* Add the gradients of a patch or a band of it; `below` receives the slope of the input. */
static void part_gradients(const struct job *j, int64_t part, const int64_t *windows,
                           const float *active, const float *gradient, float *below) {
    weight_gradient(j, active, gradient, j->weight_sums + part * 9 * j->from * j->to,
                    j->bias_sums + part * j->to);
    input_gradient(j, windows, gradient, below);
}

/* Add the gradients of a piece of one patch. */
static void backward_piece(const struct piece *p, int64_t part, int64_t n, const float *gradient,
                           float *active, float *inner, int64_t *windows) {
    const struct job *j = &p->job;
    int64_t high = out_height(j), wide = out_width(j), rows = rows_at_once(j);
    list_windows(j, windows);
    if (j->kind == NEXT_BACK) {
        rectify(p, j->below_boxes[n], j->below + n * p->room, active);
        part_gradients(j, part, windows, active, gradient, inner);
        add_slopes(p, j->below_boxes[n], inner, j->below_slope + n * p->room);
    }
    for (int64_t y = 0; y < high && j->kind == FIRST_BACK; y += rows) {
        struct job band = band_of(j, smaller(rows, high - y));
        const float *image = image_of(p, n) + y * j->stride * j->pitch;
        first_rows(&band, image, active);
        part_gradients(&band, part, windows, active, gradient + y * wide * j->to, inner);
        first_gradient(&band, image, active, inner, j->first_sums + part * 9 * j->colours * j->from,
                       j->first_bias_sums + part * j->from);
    }
}

static void part_backward(const struct job *j, int64_t part, float *active) {
    int64_t in = j->height * j->width * j->from, pixels = out_height(j) * out_width(j);
    float *inner = active + in, *gradient = inner + in;
    int64_t *windows = (int64_t *)(gradient + pixels * j->to);
    for (int64_t n = begin_of(j, part); n < begin_of(j, part + 1); n++) {
        int64_t start = n * pixels * j->to;
        struct box box = j->boxes[n];
        unnormed(j, box, j->map + start, j->slope + start, gradient);
        if (j->kind == NEXT_BACK) clear(j->below_slope, n, in);
        for (int which = 0; which < 1 + (pixels_of(box) < pixels); which++) {
            struct piece piece = piece_of(j, box, which);
            backward_piece(&piece, part, n, gradient + piece.at * j->to, active, inner, windows);
        }
        if (j->kind == NEXT_BACK) mask(j, part, n);
    }
}

/* The end of the trunk: convert between (pixel, channel) and (channel, pixel). */
static void part_last(const struct job *j, int64_t part) {
    int64_t pixels = j->height * j->width, size = pixels * j->from;
    const float *mean = j->below_norm, *gain = mean + j->from, *shift = gain + j->from;
    for (int64_t n = begin_of(j, part); n < begin_of(j, part + 1); n++) {
        const float *map = j->below + n * size;
        float *result = j->result + n * size;
        if (j->kind == LAST_BACK) clear(j->below_slope, n, size);
        for (int64_t p = 0; p < pixels; p++) {
            int64_t at = place_of(j->below_boxes[n], p / j->width, p % j->width) * j->from;
            for (int64_t c = 0; c < j->from; c++) {
                float value = (map[at + c] - mean[c]) * gain[c] + shift[c];
                if (j->kind == LAST)
                    result[c * pixels + p] = value < 0 ? 0 : value;
                else
                    j->below_slope[n * size + at + c] += result[c * pixels + p];
            }
        }
        if (j->kind == LAST_BACK) mask(j, part, n);
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
