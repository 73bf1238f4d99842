/* What `cut`, `blur` and `spread` share: the job, its order, and the padding.

   The conventions are those of resampling/definition.py. Work is cut into `parts`, which any
   number of threads may take; no two write to the same place. */
#pragma once
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define GROUP 4 /* images that share positions and weights; together they fit the second cache */

enum padding { BORDER, REFLECT, CONSTANT };

struct view {
    int64_t parts, count, colours, height, width, scales, size, padding, antialias;
    int64_t image_step, colour_step, row_step, column_step; /* floats from one to the next */
    float *images;         /* `spread` adds to them, the others read them */
    float *patches;        /* (count, scales, colours, size, size), which `spread` reads */
    const double *scale;   /* (scales,) */
    const double *centres; /* (count, 2), or NULL for the middle of the image */
    double fill;           /* what lies outside with CONSTANT */
    _Atomic int64_t next, failed;
};

/* Patches are made in the order of groups of images, then scales, then images in the group. */
static inline int64_t steps(const struct view *v) {
    return (v->count + GROUP - 1) / GROUP * GROUP * v->scales;
}
static inline int64_t image_at(const struct view *v, int64_t step) {
    return step / (GROUP * v->scales) * GROUP + step % GROUP;
}
static inline int64_t scale_at(const struct view *v, int64_t step) {
    return step / GROUP % v->scales;
}

/* The patch of image n, scale s and colour c. */
static inline float *patch_at(const struct view *v, int64_t n, int64_t s, int64_t c) {
    return v->patches + ((n * v->scales + s) * v->colours + c) * v->size * v->size;
}

/* The y or x about which image n is cut, in units in which pixel i has its centre at i. */
static inline double middle(const struct view *v, int64_t n, int64_t axis) {
    if (v->centres != NULL) return v->centres[2 * n + axis] - 0.5;
    return (double)(axis == 0 ? v->height : v->width) / 2 - 0.5;
}

/* Where patch pixel p samples. */
static inline double sample_at(const struct view *v, int64_t p, double scale, double middle) {
    return ((double)p + (0.5 - (double)v->size / 2)) * scale + middle;
}

/* Bring a pixel index of any size into the image; `last` is the largest inside. NaN gives 0. */
static inline int64_t folded(const struct view *v, double index, double last) {
    if (v->padding == REFLECT && last > 0 && !(index >= 0 && index <= last))
        index = last - fabs(last - fabs(fmod(index, 2 * last)));
    return index > 0 ? (int64_t)(index < last ? index : last) : 0;
}

/* What a constant adds to row p of a patch, where kernels have the shares `y` and `x` inside. */
static inline void add_fill(const struct view *v, double y, const double *x, float *row) {
    if (v->padding != CONSTANT || v->fill == 0) return;
    for (int64_t q = 0; q < v->size; q++) row[q] += (float)(v->fill * (1 - y * x[q]));
}
