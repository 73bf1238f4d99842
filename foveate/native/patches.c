/* Cut patches out of images: every patch pixel gathers its four image pixels.

   The conventions are those of resampling.py. Work is cut into `parts`, which any number of
   threads may take; no two write to the same patch. */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define GROUP 4 /* images that share positions and weights; together they fit the second cache */

enum padding { BORDER, REFLECT, CONSTANT };

struct view {
    int64_t parts, count, colours, height, width, scales, size, padding;
    int64_t image_step, colour_step, row_step, column_step; /* floats from one to the next */
    const float *images;
    float *patches;        /* (count, scales, colours, size, size) */
    const double *scale;   /* (scales,) */
    const double *centres; /* (count, 2), or NULL for the middle of the image */
    double fill;           /* what lies outside with CONSTANT */
    _Atomic int64_t next, failed;
};

/* For each patch pixel along an axis: where its two image pixels are, and what they weigh. */
struct axis {
    double *inside; /* both weights together: less than one where a constant has its share */
    int64_t *first, *second;
    float *near, *far;
};

/* Bring a pixel index of any size into the image; `last` is the largest inside. NaN gives 0. */
static int64_t folded(const struct view *v, double index, double last) {
    if (v->padding == REFLECT && last > 0)
        index = last - fabs(last - fabs(fmod(index, 2 * last)));
    return index > 0 ? (int64_t)(index < last ? index : last) : 0;
}

static void place(const struct view *v, double scale, double centre, int64_t length, int64_t step,
                  const struct axis *a) {
    double last = (double)(length - 1);
    for (int64_t p = 0; p < v->size; p++) {
        double at = ((double)p + (0.5 - (double)v->size / 2)) * scale + (centre - 0.5);
        double first = floor(at), second = first + 1;
        double near = 1 - (at - first), far = 1 - (second - at);
        if (v->padding == CONSTANT) {
            near *= first >= 0 && first <= last;
            far *= second >= 0 && second <= last;
        }
        a->first[p] = folded(v, first, last) * step;
        a->second[p] = folded(v, second, last) * step;
        a->near[p] = (float)near;
        a->far[p] = (float)far;
        a->inside[p] = near + far;
    }
}

static void place_both(const struct view *v, int64_t n, int64_t s, const struct axis *y,
                       const struct axis *x) {
    const double middle[2] = {(double)v->height / 2, (double)v->width / 2};
    const double *centre = v->centres == NULL ? middle : v->centres + 2 * n;
    place(v, v->scale[s], centre[0], v->height, v->row_step, y);
    place(v, v->scale[s], centre[1], v->width, v->column_step, x);
}

static void cut_patch(const struct view *v, const float *image, const struct axis *y,
                      const struct axis *x, float *patch) {
    for (int64_t p = 0; p < v->size; p++, patch += v->size) {
        const float *top = image + y->first[p], *bottom = image + y->second[p];
        float up = y->near[p], down = y->far[p];
        for (int64_t q = 0; q < v->size; q++) {
            /* Keeps compilers from vectors: their gather instructions take 3 times as long. */
            __asm__("");
            float left = up * top[x->first[q]] + down * bottom[x->first[q]];
            float right = up * top[x->second[q]] + down * bottom[x->second[q]];
            patch[q] = left * x->near[q] + right * x->far[q];
        }
        if (v->padding == CONSTANT && v->fill != 0)
            for (int64_t q = 0; q < v->size; q++)
                patch[q] += (float)(v->fill * (1 - y->inside[p] * x->inside[q]));
    }
}

/* Some of the work, which is ordered by group of images, then scale, then image in the group. */
static void cut_some(const struct view *v, int64_t begin, int64_t end, const struct axis *y,
                     const struct axis *x) {
    for (int64_t i = begin, placed = -1; i < end; i++) {
        int64_t n = i / (GROUP * v->scales) * GROUP + i % GROUP, s = i / GROUP % v->scales;
        if (n >= v->count) continue;
        if (s != placed || v->centres != NULL) place_both(v, n, placed = s, y, x);
        const float *image = v->images + n * v->image_step;
        float *patch = v->patches + (n * v->scales + s) * v->colours * v->size * v->size;
        for (int64_t c = 0; c < v->colours; c++, patch += v->size * v->size)
            cut_patch(v, image + c * v->colour_step, y, x, patch);
    }
}

/* Do parts until none is left; any number of threads may call this at once. */
void cut(struct view *v) {
    int64_t size = v->size, total = (v->count + GROUP - 1) / GROUP * GROUP * v->scales;
    double *inside = malloc((size_t)size * 2 * (sizeof(double) + 2 * sizeof(int64_t) + 8));
    int64_t *index = (int64_t *)(inside + 2 * size);
    float *weight = (float *)(index + 4 * size);
    struct axis y = {inside, index, index + size, weight, weight + size};
    struct axis x = {inside + size, index + 2 * size, index + 3 * size, weight + 2 * size,
                     weight + 3 * size};
    for (int64_t part; (part = atomic_fetch_add(&v->next, 1)) < v->parts;) {
        if (inside == NULL)
            v->failed = 1;
        else
            cut_some(v, total * part / v->parts, total * (part + 1) / v->parts, &y, &x);
    }
    free(inside);
}
