/* Cut patches from images: every patch pixel gathers four image pixels.

   Interpolation between a and b is a + t (b - a), which is exact if both are equal: a constant
   background stays constant, and boxes.h can skip it. */
#include "patches.h"

/* Offsets and weights of the two image pixels of each patch pixel along an axis. */
struct axis {
    double *inside; /* sum of both weights; below one at constant padding */
    int64_t *first, *second;
    float *both, *far; /* the sum, and the weight of the second pixel */
};

static void place(const struct view *v, double scale, double middle, int64_t length, int64_t step,
                  const struct axis *a) {
    double last = (double)(length - 1);
    for (int64_t p = 0; p < v->size; p++) {
        double at = sample_at(v, p, scale, middle);
        double first = floor(at), second = first + 1;
        double near = 1 - (at - first), far = 1 - (second - at);
        if (v->padding == CONSTANT) {
            near *= first >= 0 && first <= last;
            far *= second >= 0 && second <= last;
        }
        a->first[p] = folded(v, first, last) * step;
        a->second[p] = folded(v, second, last) * step;
        a->inside[p] = near + far;
        a->both[p] = (float)a->inside[p];
        a->far[p] = (float)far;
    }
}

static void place_both(const struct view *v, int64_t n, int64_t s, const struct axis *y,
                       const struct axis *x) {
    place(v, v->scale[s], middle(v, n, 0), v->height, v->row_step, y);
    place(v, v->scale[s], middle(v, n, 1), v->width, v->column_step, x);
}

static void cut_patch(const struct view *v, const float *image, const struct axis *y,
                      const struct axis *x, float *patch) {
    for (int64_t p = 0; p < v->size; p++, patch += v->size) {
        const float *top = image + y->first[p], *bottom = image + y->second[p];
        float rows = y->both[p], down = y->far[p];
        for (int64_t q = 0; q < v->size; q++) {
            /* Prevents vectorisation: gather instructions take 3 times as long. */
            __asm__("");
            int64_t first = x->first[q], second = x->second[q];
            float left = rows * top[first] + down * (bottom[first] - top[first]);
            float right = rows * top[second] + down * (bottom[second] - top[second]);
            patch[q] = x->both[q] * left + x->far[q] * (right - left);
        }
        add_fill(v, y->inside[p], x->inside, patch);
    }
}

static void cut_some(const struct view *v, int64_t begin, int64_t end, const struct axis *y,
                     const struct axis *x) {
    for (int64_t i = begin, placed = -1; i < end; i++) {
        int64_t n = image_at(v, i), s = scale_at(v, i);
        if (n >= v->count) continue;
        if (s != placed || v->centres != NULL) place_both(v, n, placed = s, y, x);
        const float *image = v->images + n * v->image_step;
        for (int64_t c = 0; c < v->colours; c++)
            cut_patch(v, image + c * v->colour_step, y, x, patch_at(v, n, s, c));
    }
}

/* Process parts until none remain; any number of threads can call this concurrently. */
void cut(struct view *v) {
    int64_t size = v->size, total = steps(v);
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
