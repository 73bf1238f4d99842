/* Normalise the pixels of an 8-bit colour image, and separate its colours. */
#include <stdatomic.h>
#include <stdint.h>

struct pixels {
    int64_t parts, height, width;
    const uint8_t *image;         /* (height, width, 3) */
    const float *factor, *offset; /* (3,) */
    float *found;                 /* (3, height, width) */
    _Atomic int64_t next, failed;
};

/* Products are stored before the offset is subtracted: both results are rounded, as in PyTorch. */
static void normalise_row(const struct pixels *v, int64_t y) {
    int64_t width = v->width, plane = v->height * width;
    const uint8_t *restrict from = v->image + 3 * y * width;
    float *restrict red = v->found + y * width, *restrict green = red + plane,
                   *restrict blue = green + plane;
    float factor[3] = {v->factor[0], v->factor[1], v->factor[2]};
    for (int64_t x = 0; x < width; x++) {
        red[x] = factor[0] * from[3 * x];
        green[x] = factor[1] * from[3 * x + 1];
        blue[x] = factor[2] * from[3 * x + 2];
    }
    for (int64_t c = 0; c < 3; c++) {
        float offset = v->offset[c];
        for (int64_t x = 0; x < width; x++) red[c * plane + x] -= offset;
    }
}

/* Process parts until none remain; any number of threads can call this concurrently. */
void normalise(struct pixels *v) {
    for (int64_t part; (part = atomic_fetch_add(&v->next, 1)) < v->parts;)
        for (int64_t y = v->height * part / v->parts; y < v->height * (part + 1) / v->parts; y++)
            normalise_row(v, y);
}
