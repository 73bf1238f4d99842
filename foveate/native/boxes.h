/* Skip the constant background of patches, exactly.

   Outside the bounding box of the pixels that differ from the first one, an image is constant, and
   so is each map outside the box of the pixels whose window meets the box below. The map of a patch
   is therefore stored as the pixels of its box, row by row, followed by one pixel for all others,
   which are equal. In a gradient this last pixel is the sum over all of them. */

#define FEWEST 16 /* skipping fewer pixels than this costs more than it saves */

INLINE int64_t pixels_of(struct box b) { return b.high * b.wide; }

/* Where pixel (y, x) of a map is stored. */
INLINE int64_t place_of(struct box b, int64_t y, int64_t x) {
    int64_t row = y - b.top, column = x - b.left;
    int inside = (uint64_t)row < (uint64_t)b.high && (uint64_t)column < (uint64_t)b.wide;
    return inside ? row * b.wide + column : pixels_of(b);
}

/* The range of outputs on an axis of `length` pixels whose windows meet `begin` to `end`. */
static void meet(int64_t stride, int64_t length, int64_t *begin, int64_t *size) {
    int64_t last = (length - 3) / stride, end = smaller((*begin + *size - 1) / stride, last);
    *begin = *begin < 3 ? 0 : smaller((*begin - 3) / stride + 1, last);
    *size = end < *begin ? 1 : end + 1 - *begin;
}

/* The box of the output of a convolution of a (height, width) map, given the box of its input. */
static struct box box_above(int64_t stride, int64_t height, int64_t width, struct box b) {
    int64_t high = (height - 3) / stride + 1, wide = (width - 3) / stride + 1;
    meet(stride, height, &b.top, &b.high);
    meet(stride, width, &b.left, &b.wide);
    return high * wide < pixels_of(b) + FEWEST ? (struct box){0, 0, high, wide} : b;
}

/* The pixels that the outputs in a box read. */
static struct box windows_of(const struct job *j, struct box b) {
    return (struct box){b.top * j->stride, b.left * j->stride, (b.high - 1) * j->stride + 3,
                        (b.wide - 1) * j->stride + 3};
}

/* The box of the pixels of an image that differ from its first pixel; at least one pixel. */
static struct box box_of_image(const struct job *j, const float *image) {
    int64_t wide = j->pitch, high = j->plane / wide, top = high, bottom = 1, left = wide, right = 1;
    for (int64_t c = 0; c < j->colours; c++, image += j->plane)
        for (int64_t y = 0; y < high; y++) {
            const float *line = image + y * wide;
            int64_t begin = 0, end = wide;
            while (begin < wide && line[begin] == *image) begin++;
            if (begin == wide) continue;
            while (line[end - 1] == *image) end--;
            if (y < top) top = y;
            if (y >= bottom) bottom = y + 1;
            if (begin < left) left = begin;
            if (end > right) right = end;
        }
    if (top == high) top = left = 0;
    return (struct box){top, left, bottom - top, right - left};
}

/* The same after the first convolution, whose output is (height, width). */
static struct box first_box(const struct job *j, const float *image) {
    return box_above(1, j->height + 2, j->width + 2, box_of_image(j, image));
}

/* The number of equal pixels outside the box of a (height, width) map. */
INLINE int64_t outside(int64_t height, int64_t width, struct box b) {
    return height * width - pixels_of(b);
}

/* The part of a convolution that computes the outputs in a box, or one of those outside. */
struct piece {
    struct job job;  /* its height and width are those of `seen` */
    struct box seen; /* the input pixels that it reads */
    int64_t at;      /* where its outputs are stored */
    int64_t room;    /* floats of the input map of one patch */
};

/* The piece of the outputs in a box; if `which` is 1, that of a corner of the map outside it. */
static struct piece piece_of(const struct job *j, struct box b, int which) {
    int64_t at = which ? pixels_of(b) : 0;
    if (which && b.top + b.left > 0)
        b = (struct box){0, 0, 1, 1};
    else if (which)
        b = (struct box){out_height(j) - 1, out_width(j) - 1, 1, 1};
    struct piece piece = {*j, windows_of(j, b), at, j->height * j->width * j->from};
    piece.job.height = piece.seen.high, piece.job.width = piece.seen.wide;
    return piece;
}

/* The image pixels of a piece of the first two convolutions. */
static const float *image_of(const struct piece *p, int64_t n) {
    const struct job *j = &p->job;
    return j->images + n * j->colours * j->plane + p->seen.top * j->pitch + p->seen.left;
}
