/* Shared by `cut`, `blur` and `scatter`: the job, the order of work, and padding.

   The conventions are those of resampling/definition.py. Work is split into `parts`, which any
   number of threads can process; no two parts write to the same memory. */
#pragma once
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define GROUP 4 /* images that share positions and weights; together they fit the L2 cache */

enum padding { BORDER, REFLECT, CONSTANT };

struct view {
    int64_t parts, count, colours, height, width, scales, size, padding, antialias;
    int64_t image_step, colour_step, row_step, column_step; /* strides in floats */
    float *images;         /* output of `scatter`, input of the others */
    float *patches;        /* (count, scales, colours, size, size), input of `scatter` */
    const double *scale;   /* (scales,) */
    const double *centres; /* (count, 2), or NULL for the image centre */
    double fill;           /* value outside the image for CONSTANT */
    _Atomic int64_t next, failed;
};

/* Patches are processed by groups of images, then by scale, then by image in the group. */
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

/* The window centre of image n on an axis, in coordinates where pixel i is centred at i. */
static inline double middle(const struct view *v, int64_t n, int64_t axis) {
    if (v->centres != NULL) return v->centres[2 * n + axis] - 0.5;
    return (double)(axis == 0 ? v->height : v->width) / 2 - 0.5;
}

/* The coordinate at which patch pixel p samples the image. */
static inline double sample_at(const struct view *v, int64_t p, double scale, double middle) {
    return ((double)p + (0.5 - (double)v->size / 2)) * scale + middle;
}

/* Map any pixel index into the image, whose largest index is `last`. NaN gives 0. */
static inline int64_t folded(const struct view *v, double index, double last) {
    if (v->padding == REFLECT && last > 0 && !(index >= 0 && index <= last))
        index = last - fabs(last - fabs(fmod(index, 2 * last)));
    return index > 0 ? (int64_t)(index < last ? index : last) : 0;
}

/* Add the constant's share to a patch row; `y` and `x` are the kernel weights inside the image. */
static inline void add_fill(const struct view *v, double y, const double *x, float *row) {
    if (v->padding != CONSTANT || v->fill == 0) return;
    for (int64_t q = 0; q < v->size; q++) row[q] += (float)(v->fill * (1 - y * x[q]));
}
