/* Batch norm: sums patch by patch, and the statistics and gradients of the batch; see trunk.c.

   Values are summed in float32 only within a patch. Sums over the batch are float64, computed by
   one thread in a fixed order. */
#include <math.h>

INLINE void add_lanes(double *total, vec value) {
    *(loose_double *)total += __builtin_convertvector(value, doubles);
}

/* Set the slope of a patch to zero where ReLU is inactive; sum it and its product with the
   deviation. */
static void mask(const struct job *j, int64_t part, int64_t n) {
    int64_t room = j->height * j->width, stored = smaller(pixels_of(j->below_boxes[n]) + 1, room);
    const float *map = j->below + n * room * j->from;
    float *slope = j->below_slope + n * room * j->from;
    double *sums = j->sums + part * j->from, *products = j->squares + part * j->from;
    for (int64_t c = 0; c < j->from; c += LANES) {
        vec mean = load(j->below_norm + c), gain = load(j->below_norm + j->from + c);
        vec shift = load(j->below_norm + 2 * j->from + c);
        for (int64_t begin = 0; begin < stored; begin += RUN) {
            vec sum = zero(), product = zero();
            for (int64_t p = begin; p < smaller(begin + RUN, stored); p++) {
                int64_t at = p * j->from + c;
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

/* Update the mean and the sum of squared deviations of `seen` patches with one more patch. */
static void statistics(const struct job *j, struct box stored, int64_t seen, const float *map,
                       double *mean, double *square) {
    int64_t pixels = pixels_of(stored), others = outside(out_height(j), out_width(j), stored);
    double n = (double)(pixels + others), before = (double)seen * n;
    for (int64_t c = 0; c < j->to; c += LANES) {
        double total[LANES] = {0}, squares[LANES] = {0};
        vec centre, other = others ? load(map + pixels * j->to + c) : zero();
        for (int64_t begin = 0; begin < pixels; begin += RUN) {
            vec sum = zero();
            for (int64_t p = begin; p < smaller(begin + RUN, pixels); p++)
                sum += load(map + p * j->to + c);
            add_lanes(total, sum);
        }
        for (int i = 0; i < LANES; i++) {
            total[i] += (double)others * other[i];
            centre[i] = (float)(total[i] / n);
        }
        for (int64_t begin = 0; begin < pixels; begin += RUN) {
            vec sum = zero();
            for (int64_t p = begin; p < smaller(begin + RUN, pixels); p++) {
                vec deviation = load(map + p * j->to + c) - centre;
                sum += deviation * deviation;
            }
            add_lanes(squares, sum);
        }
        for (int i = 0; i < LANES; i++) {
            double delta = total[i] / n - mean[c + i], away = other[i] - centre[i];
            squares[i] += (double)others * away * away;
            mean[c + i] += delta * n / (before + n);
            square[c + i] += squares[i] + delta * delta * before * n / (before + n);
        }
    }
}

/* Copy planes of (height + 2, width + 2) pixels, minus a value near the mean; `inside` is set where
   a window starts. */
static void copy_shifted(const struct job *j, const float *image, int64_t plane, int32_t *inside,
                         float *planes) {
    int64_t wide = j->width + 2;
    float shift = *j->shift;
    memset(inside, 0, (size_t)((j->height + 2) * wide + 2 * LANES) * sizeof(int32_t));
    for (int64_t y = 0; y < j->height + 2; y++) {
        for (int64_t x = 0; x < j->width && y < j->height; x++) inside[y * wide + x] = -1;
        for (int64_t c = 0; c < j->colours; c++)
            for (int64_t x = 0; x < wide; x++)
                planes[c * plane + y * wide + x] = image[c * j->plane + y * j->pitch + x] - shift;
    }
}

/* Add the moments of `count` constant windows. */
static void add_constant(const struct job *j, const float *image, double count, double *sums,
                         double *products) {
    int64_t taps = 9 * j->colours;
    for (int64_t t = 0; t < taps && count > 0; t++) {
        double value = image[t / 9 * j->plane] - *j->shift;
        sums[t * LANES] += count * value;
        for (int64_t u = t; u < taps; u++)
            products[(t * taps + u) * LANES] += count * value * (image[u / 9 * j->plane] - *j->shift);
    }
}

/* Add sums (9 C,) and products (9 C, 9 C) of the 3 x 3 windows of one image, lane by lane. All
   pixels of a row start a window; `inside` masks the two incomplete windows at its end. */
static void add_moments(const struct job *j, const float *planes, int64_t plane, const int32_t *inside,
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

/* Write one channel of a norm with `width` channels. In training, use the mean and variance of the
   batch and update the running statistics; otherwise use the running statistics. */
static void settle(const struct job *j, int64_t c, int64_t width, double mean, double variance,
                   double values) {
    double weight = 1, shift = 0, spread = 1;
    if (j->norm_weight == NULL) {
        mean = 0;
    } else {
        float *own_mean = j->running_mean + c, *own_variance = j->running_variance + c;
        if (j->training) {
            double unbiased = variance * values / (values - 1);
            *own_mean = (float)(*own_mean + j->momentum * (mean - *own_mean));
            *own_variance = (float)(*own_variance + j->momentum * (unbiased - *own_variance));
        } else {
            mean = *own_mean, variance = *own_variance;
        }
        weight = j->norm_weight[c], shift = j->norm_bias[c], spread = 1 / sqrt(variance + j->eps);
    }
    j->norm[c] = (float)mean;
    j->norm[width + c] = (float)(weight * spread);
    j->norm[2 * width + c] = (float)shift;
    j->norm[3 * width + c] = (float)spread;
}

/* Compute the norm after a convolution from the statistics of the parts. */
static void make_norm(const struct job *j) {
    double values = (double)(j->count * out_height(j) * out_width(j)), share[j->parts];
    for (int64_t part = 0; part < j->parts; part++)
        share[part] = (double)(begin_of(j, part + 1) - begin_of(j, part)) / (double)j->count;
    for (int64_t c = 0; c < j->to; c++) {
        double mean = 0, variance = 0;
        for (int64_t part = 0; part < j->parts; part++)
            mean += share[part] * j->sums[part * j->to + c];
        for (int64_t part = 0; part < j->parts; part++) {
            double away = j->sums[part * j->to + c] - mean;
            variance += j->squares[part * j->to + c] / values + share[part] * away * away;
        }
        settle(j, c, j->to, mean, variance, values);
    }
}

/* Compute the factors that `unnormed` applies to the input map, and the gradients of its norm. */
static void make_unnorm(const struct job *j) {
    const float *mean = j->below_norm, *gain = mean + j->from, *spread = mean + 3 * j->from;
    double values = (double)(j->count * j->height * j->width);
    for (int64_t c = 0; c < j->from; c++) {
        double total = 0, product = 0, share = j->training ? gain[c] / values : 0;
        for (int64_t part = 0; part < j->parts; part++) {
            total += j->sums[part * j->from + c];
            product += j->squares[part * j->from + c];
        }
        j->below_unnorm[c] = gain[c];
        j->below_unnorm[j->from + c] = (float)(-share * spread[c] * spread[c] * product);
        j->below_unnorm[2 * j->from + c] = mean[c];
        j->below_unnorm[3 * j->from + c] = (float)(-share * total);
        if (j->norm_weight_gradient != NULL) {
            j->norm_weight_gradient[c] = (float)(product * spread[c]);
            j->norm_bias_gradient[c] = (float)total;
        }
    }
}

static void add_up_lanes(int64_t size, const double *lanes, double *sums) {
    for (int64_t i = 0; i < size; i++) {
        sums[i] = 0;
        for (int lane = 0; lane < LANES; lane++) sums[i] += lanes[i * LANES + lane];
    }
}

/* Compute mean and covariance of the windows from the parts; `shift` was subtracted before. */
static void make_moments(const struct job *j) {
    int64_t taps = 9 * j->colours;
    double windows = (double)(j->count * j->height * j->width), *mean = j->moments;
    double *covariance = mean + taps;
    for (int64_t i = 0; i < taps + taps * taps; i++) {
        mean[i] = 0;
        for (int64_t part = 0; part < j->parts; part++)
            mean[i] += j->sums[part * (taps + taps * taps) + i] / windows;
    }
    for (int64_t t = 0; t < taps; t++)
        for (int64_t u = t; u < taps; u++) {
            covariance[t * taps + u] -= mean[t] * mean[u];
            covariance[u * taps + t] = covariance[t * taps + u];
        }
    for (int64_t t = 0; t < taps; t++) mean[t] += *j->shift;
}

/* Return row `t` of the product of the windows' covariance and the weights. */
static double spread_of(const struct job *j, const float *weight, int64_t t) {
    int64_t taps = 9 * j->colours;
    double sum = 0;
    for (int64_t u = 0; u < taps; u++) sum += j->moments[(1 + t) * taps + u] * weight[u];
    return sum;
}

/* Fold the norm into the first convolution. The convolution is linear, so the mean and variance of
   its output follow from the moments of the windows. */
static void fold(const struct job *j) {
    int64_t taps = 9 * j->colours;
    for (int64_t o = 0; o < j->from; o++) {
        const float *weight = j->weight + o * taps;
        double mean = j->bias[o], variance = 0;
        for (int64_t t = 0; t < taps && j->training; t++) {
            mean += weight[t] * j->moments[t];
            variance += weight[t] * spread_of(j, weight, t);
        }
        settle(j, o, j->from, mean, variance, (double)(j->count * j->height * j->width));
        float gain = j->norm[j->from + o], shift = j->norm[2 * j->from + o];
        for (int64_t t = 0; t < taps; t++) j->first[t * j->from + o] = weight[t] * gain;
        j->first_bias[o] = (j->bias[o] - j->norm[o]) * gain + shift;
    }
}

/* Compute the gradients of the first convolution and its norm from those of the folded one. */
static void unfold(const struct job *j) {
    int64_t taps = 9 * j->colours;
    for (int64_t o = 0; o < j->from; o++) {
        const float *weight = j->weight + o * taps, *slope = j->first_sums + o;
        double mean = j->norm[o], gain = j->norm[j->from + o], spread = j->norm[3 * j->from + o];
        double lean = j->first_bias_sums[o], product = (j->bias[o] - mean) * lean;
        for (int64_t t = 0; t < taps; t++) product += weight[t] * slope[t * j->from];
        double pull = j->training ? -product * gain * spread * spread : 0;
        for (int64_t t = 0; t < taps; t++) {
            double own = slope[t * j->from] * gain;
            if (j->training) own += pull * spread_of(j, weight, t) - lean * gain * j->moments[t];
            j->weight_gradient[o * taps + t] = (float)own;
        }
        j->bias_gradient[o] = j->training ? 0 : (float)(lean * gain);
        if (j->norm_weight_gradient != NULL) {
            j->norm_weight_gradient[o] = (float)(product * spread);
            j->norm_bias_gradient[o] = (float)lean;
        }
    }
}
