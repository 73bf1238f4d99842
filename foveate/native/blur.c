/* Cut patches from images with antialiasing (`blur`), and compute image gradients from patch
   gradients, with or without antialiasing (`scatter`).

   Kernels are separable. `blur` sums weighted image rows, then columns, for LANES patch rows at a
   time. In between the rows are transposed to (columns, LANES), so that both sums work on vectors
   without gather instructions. Squares of LANES x LANES are transposed in registers. `scatter`
   applies the transpose of each step in reverse order. */
#include <string.h>

#include "patches.h"
#include "vectors.h"

/* The image pixels under the kernel of each patch pixel along an axis. After folding they are
   contiguous for every padding, so a start, a count and weights describe them. */
struct axis {
    int64_t length, most; /* pixels of the image, and the maximum under one kernel */
    int64_t begin, end;   /* pixels under any kernel */
    int64_t *first, *count;
    float *weight;  /* (size, most) */
    double *inside; /* sum of the weights inside the image; below one at constant padding */
    double *sums;   /* (length,), zero between calls */
};

/* Scratch memory of one thread. */
struct scratch {
    struct axis y, x;
    float *row;    /* part of an image row, in the layout of the image */
    float *turned; /* (width, LANES) */
    void *memory;
};

/* Add the weights of the triangle about `at` to image pixels, set the range of these pixels, and
   return the sum of all weights, including those outside the image. */
static double add_triangle(const struct view *v, double at, double half, const struct axis *a,
                           int64_t *begin, int64_t *end) {
    double total = 0, last = (double)(a->length - 1), low = floor(at) + 1 - ceil(half);
    for (double k = 0; k < 2 * ceil(half); k++) {
        double weight = 1 - fabs(low + k - at) / half;
        if (weight <= 0) continue;
        total += weight;
        if (v->padding == CONSTANT && (low + k < 0 || low + k > last)) continue;
        int64_t i = folded(v, low + k, last);
        a->sums[i] += weight;
        if (i < *begin) *begin = i;
        if (i >= *end) *end = i + 1;
    }
    return total;
}

static void weigh(const struct view *v, double at, double half, const struct axis *a, int64_t p) {
    int64_t begin = a->length, end = 0;
    /* An infinite centre becomes NaN, which passes all comparisons, so the result is NaN. */
    double total = add_triangle(v, isfinite(at) ? at : NAN, half, a, &begin, &end), inside = 0;
    a->first[p] = begin;
    a->count[p] = end > begin ? end - begin : 0;
    for (int64_t i = begin; i < end; i++) {
        inside += a->sums[i];
        a->weight[p * a->most + i - begin] = (float)(a->sums[i] / total);
        a->sums[i] = 0;
    }
    a->inside[p] = inside / total;
}

static void place(const struct view *v, double scale, double middle, struct axis *a) {
    double half = v->antialias && scale > 1 ? scale : 1;
    a->begin = a->length;
    a->end = 0;
    for (int64_t p = 0; p < v->size; p++) {
        weigh(v, sample_at(v, p, scale, middle), half, a, p);
        int64_t end = a->first[p] + a->count[p];
        if (a->first[p] < a->begin) a->begin = a->first[p];
        if (a->count[p] > 0 && end > a->end) a->end = end;
    }
    if (a->end < a->begin) a->end = a->begin; /* all kernels are outside the image */
}

static void place_both(const struct view *v, int64_t n, int64_t s, struct scratch *m) {
    place(v, v->scale[s], middle(v, n, 0), &m->y);
    place(v, v->scale[s], middle(v, n, 1), &m->x);
}

static void add_weighted(float weight, const float *restrict from, int64_t length,
                         float *restrict to) {
    for (int64_t i = 0; i < length; i++) to[i] += weight * from[i];
}

/* The number of floats in an image row from the first to the last pixel that an axis reads. In
   channels-last images they include other colours: blending these too is faster than selecting. */
static int64_t span(const struct view *v, const struct axis *x) {
    return x->end > x->begin ? (x->end - x->begin - 1) * v->column_step + 1 : 0;
}

/* Resample one row of a patch for `count` vectors of columns, stored LANES vectors apart. */
INLINE void blend(const float *from, int64_t step, const float *weight, int64_t taps, int64_t count,
                  float *to) {
    for (int64_t i = 0; i < count; i++, from += LANES, to += LANES * LANES) {
        vec sum = {0};
        UNROLL for (int64_t k = 0; k < taps; k++) sum += weight[k] * load(from + k * step);
        store(to, sum);
    }
}

static void blend_line(const struct view *v, const struct axis *y, int64_t p, const float *image,
                       int64_t count, float *to) {
    const float *from = image + y->first[p] * v->row_step, *weight = y->weight + p * y->most;
    switch (y->count[p]) { /* a compile-time count keeps the weights in registers */
    case 2: blend(from, v->row_step, weight, 2, count, to); break;
    case 3: blend(from, v->row_step, weight, 3, count, to); break;
    case 4: blend(from, v->row_step, weight, 4, count, to); break;
    case 5: blend(from, v->row_step, weight, 5, count, to); break;
    case 6: blend(from, v->row_step, weight, 6, count, to); break;
    default: blend(from, v->row_step, weight, y->count[p], count, to);
    }
}

/* Resample `lines` rows of a patch from row p on, and transpose their columns LANES at a time. */
static void blur_squares(const struct view *v, const struct axis *y, const float *image, int64_t p,
                         int64_t lines, int64_t count, float *to) {
    for (int64_t line = 0; line < lines; line++)
        blend_line(v, y, p + line, image, count, to + line * LANES);
    for (int64_t i = 0; i < count; i++) turn(to + i * LANES * LANES);
}

/* Resample `lines` rows of a patch from row p on; columns are not resampled yet. */
static void blur_rows(const struct view *v, const float *image, int64_t p, int64_t lines,
                      struct scratch *m) {
    const struct axis *y = &m->y, *x = &m->x;
    int64_t columns = x->end - x->begin, count = columns / LANES;
    image += x->begin * v->column_step;
    if (v->column_step == 1 && count > 0) {
        float last[LANES * LANES];
        blur_squares(v, y, image, p, lines, count, m->turned);
        if (columns % LANES == 0) return;
        blur_squares(v, y, image + columns - LANES, p, lines, 1, last);
        memcpy(m->turned + (columns - LANES) * LANES, last, sizeof last);
        return;
    }
    for (int64_t line = 0; line < lines; line++, p++) {
        const float *from = image + y->first[p] * v->row_step;
        memset(m->row, 0, (size_t)span(v, x) * sizeof(float));
        for (int64_t k = 0; k < y->count[p]; k++, from += v->row_step)
            add_weighted(y->weight[p * y->most + k], from, span(v, x), m->row);
        for (int64_t i = 0; i < columns; i++)
            m->turned[i * LANES + line] = m->row[i * v->column_step];
    }
}

/* Return column q of LANES rows of a patch. */
INLINE vec blur_column(const struct axis *x, const float *turned, int64_t q) {
    const float *from = turned + (x->first[q] - x->begin) * LANES, *weight = x->weight + q * x->most;
    vec sum = {0};
    for (int64_t k = 0; k < x->count[q]; k++) sum += weight[k] * load(from + k * LANES);
    return sum;
}

static void blur_columns(const struct view *v, int64_t lines, const struct scratch *m,
                         float *patch) {
    int64_t q = 0;
    for (; lines == LANES && q + LANES <= v->size; q += LANES) {
        vec square[LANES];
        for (int64_t i = 0; i < LANES; i++) square[i] = blur_column(&m->x, m->turned, q + i);
        transpose(square);
        UNROLL for (int64_t line = 0; line < LANES; line++)
            store(patch + line * v->size + q, square[line]);
    }
    for (; q < v->size; q++) {
        vec column = blur_column(&m->x, m->turned, q);
        for (int64_t line = 0; line < lines; line++) patch[line * v->size + q] = column[line];
    }
}

static void blur_patch(const struct view *v, const float *image, struct scratch *m, float *patch) {
    for (int64_t p = 0; p < v->size; p += LANES) {
        int64_t lines = v->size - p < LANES ? v->size - p : LANES;
        blur_rows(v, image, p, lines, m);
        blur_columns(v, lines, m, patch + p * v->size);
    }
    for (int64_t p = 0; p < v->size; p++)
        add_fill(v, m->y.inside[p], m->x.inside, patch + p * v->size);
}

static void blur_some(const struct view *v, int64_t begin, int64_t end, struct scratch *m) {
    for (int64_t i = begin, placed = -1; i < end; i++) {
        int64_t n = image_at(v, i), s = scale_at(v, i);
        if (n >= v->count) continue;
        if (s != placed || v->centres != NULL) place_both(v, n, placed = s, m);
        for (int64_t c = 0; c < v->colours; c++)
            blur_patch(v, v->images + n * v->image_step + c * v->colour_step, m,
                       patch_at(v, n, s, c));
    }
}

/* The transpose of `blur_columns`. */
static void scatter_columns(const struct view *v, int64_t lines, const float *patch,
                            struct scratch *m) {
    const struct axis *x = &m->x;
    memset(m->turned, 0, (size_t)(x->end - x->begin) * LANES * sizeof(float));
    for (int64_t q = 0; q < v->size; q++) {
        float slope[LANES] = {0};
        for (int64_t line = 0; line < lines; line++) slope[line] = patch[line * v->size + q];
        float *to = m->turned + (x->first[q] - x->begin) * LANES;
        for (int64_t k = 0; k < x->count[q]; k++, to += LANES)
            store(to, load(to) + x->weight[q * x->most + k] * load(slope));
    }
}

/* The transpose of `blur_rows`; the columns of a gradient are contiguous. */
static void scatter_rows(const struct view *v, int64_t p, int64_t lines, struct scratch *m,
                         float *image) {
    const struct axis *y = &m->y, *x = &m->x;
    for (int64_t line = 0; line < lines; line++, p++) {
        for (int64_t i = 0; i < x->end - x->begin; i++) m->row[i] = m->turned[i * LANES + line];
        float *to = image + y->first[p] * v->row_step + x->begin;
        for (int64_t k = 0; k < y->count[p]; k++, to += v->row_step)
            add_weighted(y->weight[p * y->most + k], m->row, x->end - x->begin, to);
    }
}

/* Accumulate the gradients of some image planes scale by scale, so that sums have the same order
   in any thread. */
static void scatter_some(const struct view *v, int64_t begin, int64_t end, struct scratch *m) {
    for (int64_t i = begin; i < end; i++) {
        int64_t n = i / v->colours, c = i % v->colours;
        float *image = v->images + n * v->image_step + c * v->colour_step;
        for (int64_t s = 0; s < v->scales; s++) {
            const float *patch = patch_at(v, n, s, c);
            place_both(v, n, s, m);
            for (int64_t p = 0; p < v->size; p += LANES) {
                int64_t lines = v->size - p < LANES ? v->size - p : LANES;
                scatter_columns(v, lines, patch + p * v->size, m);
                scatter_rows(v, p, lines, m, image);
            }
        }
    }
}

/* The maximum number of pixels under a kernel; scales are in increasing order. */
static int64_t most(const struct view *v, int64_t length) {
    double half = v->antialias ? fmax(v->scale[v->scales - 1], 1) : 1;
    return 2 * ceil(half) < (double)length ? 2 * (int64_t)ceil(half) : length;
}

static struct scratch prepare(const struct view *v) {
    int64_t size = v->size, rows = most(v, v->height), columns = most(v, v->width);
    int64_t longer = v->height > v->width ? v->height : v->width;
    int64_t doubles = 2 * size + longer, wholes = 4 * size;
    int64_t row = (v->width - 1) * v->column_step + 1;
    int64_t floats = size * (rows + columns) + row + v->width * LANES;
    double *inside = calloc((size_t)(2 * (doubles + wholes) + floats), sizeof(float));
    if (inside == NULL) return (struct scratch){.memory = NULL};
    double *sums = inside + 2 * size;
    int64_t *first = (int64_t *)(inside + doubles), *count = first + 2 * size;
    float *weight = (float *)(first + wholes), *line = weight + size * (rows + columns);
    return (struct scratch){
        {v->height, rows, 0, 0, first, count, weight, inside, sums},
        {v->width, columns, 0, 0, first + size, count + size, weight + size * rows, inside + size,
         sums},
        line, line + row, inside};
}

/* Process parts until none remain; any number of threads can call this concurrently. */
static void share(struct view *v, int64_t total,
                  void (*work)(const struct view *, int64_t, int64_t, struct scratch *)) {
    struct scratch m = prepare(v);
    for (int64_t part; (part = atomic_fetch_add(&v->next, 1)) < v->parts;) {
        if (m.memory == NULL)
            v->failed = 1;
        else
            work(v, total * part / v->parts, total * (part + 1) / v->parts, &m);
    }
    free(m.memory);
}

void blur(struct view *v) { share(v, steps(v), blur_some); }

void scatter(struct view *v) { share(v, v->count * v->colours, scatter_some); }
