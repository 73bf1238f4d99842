"""Triton kernels of a training step of a `ConvNet` in bf16: convolutions and norms.

The first block and the gradients of the first two are in `triton_trunk`, the linear layers in
`triton_head`.

Slopes are gradients with respect to activations. Maps are stored as the convolutions leave them, in
channels-last order. A kernel that reads a map applies the norm and the ReLU, and the kernel that
writes it also sums what the norm needs. Each program sums a fixed range of positions and stores its
part; the parts are added in a fixed order, and the ranges depend only on the shapes, so the results
are deterministic.
"""
# Shape letters: B images, S scale channels, N = B S patches, H W pixels, I O channels of a map.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from foveate.execution.triton_trunk import LOW

GUARDED = ["total", "steps", "count", "images", "values"]
GUARDED += ["weight_at", "bias_at", "gain_at", "offset_at"]
"""Numbers for which a kernel is not compiled again."""


@triton.jit
def rectified(value):
    """Apply ReLU."""
    return tl.where(value <= 0, 0.0, value)  # tl.maximum would replace NaN by 0


@triton.jit(do_not_specialize=GUARDED)
def pack(flat, table, packed, total, BLOCK: tl.constexpr):
    """Copy parameters, rounded to the type of the copy, in the order of `table`.

    The place -1 is a 0, and -2 is a 1.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(table + at, at < total, other=-1)
    value = tl.load(flat + source, source >= 0, other=0.0)
    value = tl.where(source == -2, 1.0, value)
    tl.store(packed + at, value.to(packed.dtype.element_ty), at < total)


@triton.jit
def cut_winners(
    values, positions, canvas, rows, TILES: tl.constexpr, TILES_P: tl.constexpr,
    CLASSES: tl.constexpr, CLASSES_P: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ACROSS: tl.constexpr, STRIDE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Cut the strongest window of each class from a canvas into rows of 4 x 4 pixels."""
    image, kind = tl.program_id(0), tl.program_id(1)
    tile = tl.arange(0, TILES_P)
    place = (image * TILES + tile) * CLASSES_P + kind
    best = tl.argmax(tl.load(values + place, tile < TILES, other=float("-inf")), 0)
    position = tl.load(positions + (image * TILES + best) * CLASSES_P + kind)
    corner = position // ACROSS * STRIDE * WIDTH + position % ACROSS * STRIDE
    source = canvas + image.to(tl.int64) * (HEIGHT * WIDTH) + corner
    target = rows + (image * CLASSES + kind) * (SIDE * SIDE * 16)
    for start in range(0, SIDE * SIDE * 16, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < SIDE * SIDE * 16
        window, pixel = at // 16, at % 16
        y, x = 2 * (window // SIDE) + pixel // 4, 2 * (window % SIDE) + pixel % 4
        value = tl.load(source + y * WIDTH + x, inside, other=0.0)
        tl.store(target + at, value.to(tl.float32), inside)


@triton.jit
def _track(running, value, momentum, place, inside):
    before = tl.load(running + place, inside, other=0.0)
    tl.store(running + place, before + momentum * (value - before), inside)


@triton.jit(do_not_specialize=GUARDED)
def fold(
    flat, means, squares, indices, running_mean, running_var, tracked, folded, kept, images, count,
    momentum, eps, weight_at, bias_at, gain_at, offset_at, OUT: tl.constexpr
):  # fmt: skip
    """Fold the first norm into the first convolution, from the moments of the windows.

    `folded` has the weight (4 O, 16) on windows of 4 x 4 pixels and the shift (4 O,); `kept` has
    the mean (16,) and covariance (16, 16) of the windows of 3 x 3 pixels.
    """
    out, tap, other = tl.arange(0, OUT), tl.arange(0, 16), tl.arange(0, 16)
    real = tap < 9
    # Sums over the images of 9 means and 81 mean squares, adjacent in memory.
    column, pair = tl.arange(0, 16), tl.arange(0, 128)
    sums = tl.zeros([32, 16], tl.float32)
    squared = tl.zeros([32, 128], tl.float32)
    for start in range(0, images, 32):
        image = start + tl.arange(0, 32)
        known = (image < images)[:, None]
        chosen = tl.load(indices + image, image < images, other=0)[:, None]
        sums += tl.load(means + chosen * 9 + column[None, :], known & (column < 9), other=0.0)
        squared += tl.load(squares + chosen * 81 + pair[None, :], known & (pair < 81), other=0.0)
    scratch = kept + 272
    tl.store(scratch + column, tl.sum(sums, 0) / images)
    tl.store(scratch + 16 + pair, tl.sum(squared, 0) / images)
    tl.debug_barrier()  # other threads read what this one stored
    mean = tl.load(scratch + tap)
    again = tl.load(scratch + other)
    both = real[:, None] & (other < 9)[None, :]
    square = tl.load(scratch + 16 + tap[:, None] * 9 + other[None, :], both, other=0.0)
    covariance = square - mean[:, None] * again[None, :]
    source = flat + weight_at + out[:, None] * 9
    weight = tl.load(source + tap[None, :], real[None, :], other=0.0)
    centre = tl.sum(weight * mean[None, :], 1)
    spread = tl.sum(weight[:, :, None] * covariance[None, :, :], 1)
    across = tl.load(source + other[None, :], (other < 9)[None, :], other=0.0)
    variance = tl.sum(spread * across, 1)
    gain = tl.load(flat + gain_at + out) / tl.sqrt(variance + eps)
    shift = tl.load(flat + offset_at + out) - gain * centre
    for quarter in tl.static_range(4):
        down, right = tap // 4 - quarter // 2, tap % 4 - quarter % 2
        inner = (down >= 0) & (down < 3) & (right >= 0) & (right < 3)
        value = tl.load(source + (down * 3 + right)[None, :], inner[None, :], other=0.0)
        row = quarter * OUT + out
        tl.store(folded + row[:, None] * 16 + tap[None, :], value * gain[:, None])
        tl.store(folded + 64 * OUT + row, shift)
    tl.store(kept + tap, mean)
    tl.store(kept + 16 + tap[:, None] * 16 + other[None, :], covariance)
    _track(running_mean, centre + tl.load(flat + bias_at + out), momentum, out, out < OUT)
    _track(running_var, variance * (count / (count - 1)), momentum, out, out < OUT)
    tl.store(tracked, tl.load(tracked) + 1)


@triton.jit(do_not_specialize=GUARDED)
def unfold(
    sums, flat, kept, slopes, losses, loss, images, eps, weight_at, gain_at, offset_at,
    OUT: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the gradients of the first block from those of its folded weight and shift.

    Without a norm, the offset is the bias. The program also averages the losses of the images.
    """
    given = tl.zeros([BLOCK], tl.float32)
    for start in range(0, images, BLOCK):
        image = start + tl.arange(0, BLOCK)
        given += tl.load(losses + image, image < images, other=0.0)
    tl.store(loss, tl.sum(given, 0) / images)
    out, tap, other = tl.arange(0, OUT), tl.arange(0, 16), tl.arange(0, 16)
    real = tap < 9
    slope = tl.zeros([OUT, 16], tl.float32)
    total = tl.zeros([OUT], tl.float32)
    for quarter in tl.static_range(4):
        pixel = (tap // 3 + quarter // 2) * 4 + tap % 3 + quarter % 2
        row = quarter * OUT + out
        slope += tl.load(sums + row[:, None] * 16 + pixel[None, :], real[None, :], other=0.0)
        total += tl.load(sums + 64 * OUT + row)
    if NORM:
        mean = tl.load(kept + tap)
        covariance = tl.load(kept + 16 + tap[:, None] * 16 + other[None, :])
        source = flat + weight_at + out[:, None] * 9
        weight = tl.load(source + tap[None, :], real[None, :], other=0.0)
        centre = tl.sum(weight * mean[None, :], 1)
        across = tl.load(source + other[None, :], (other < 9)[None, :], other=0.0)
        spread = tl.sum(across[:, None, :] * covariance[None, :, :], 2)
        variance = tl.sum(spread * weight, 1)
        inverse = 1 / tl.sqrt(variance + eps)
        scale = tl.load(flat + gain_at + out)
        gain = scale * inverse
        steep = tl.sum(slope * weight, 1) - total * centre  # with respect to the gain
        bent = -steep * scale * inverse * inverse * inverse  # twice that of the variance
        slope = (slope - total[:, None] * mean[None, :]) * gain[:, None] + bent[:, None] * spread
        tl.store(slopes + gain_at + out, steep * inverse)
    tl.store(slopes + weight_at + out[:, None] * 9 + tap[None, :], slope, real[None, :])
    tl.store(slopes + offset_at + out, total)


@triton.jit(do_not_specialize=GUARDED)
def convolve(
    given, coefficients, weight, maps, parts, total, steps, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr,
    STRIDE: tl.constexpr, NORM: tl.constexpr, IN_P: tl.constexpr, OUT_P: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Compute a convolution of a map, normalised and rectified if `NORM`, and sum its moments.

    The weight has the order (O, y, x, I).
    """
    TALL: tl.constexpr = (HEIGHT - SIDE) // STRIDE + 1
    BROAD: tl.constexpr = (WIDTH - SIDE) // STRIDE + 1
    program = tl.program_id(0)
    channel, out = tl.arange(0, IN_P), tl.arange(0, OUT_P)
    used, written = channel < IN, out < OUT
    if NORM:
        gain = tl.load(coefficients + channel, used, other=0.0)[None, :]
        offset = tl.load(coefficients + IN + channel, used, other=0.0)[None, :]
    first = tl.zeros([OUT_P], tl.float32)
    second = tl.zeros([OUT_P], tl.float32)
    filters = weight + out[None, :] * (SIDE * SIDE * IN) + channel[:, None]
    for step in range(steps):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (at < total)[:, None]
        image, y, x = at // (TALL * BROAD), at // BROAD % TALL, at % BROAD
        corner = (image * HEIGHT + y * STRIDE) * WIDTH + x * STRIDE
        source = given + corner[:, None] * IN + channel[None, :]
        value = tl.zeros([BLOCK, OUT_P], tl.float32)
        for tap in tl.static_range(SIDE * SIDE):
            shift = (tap // SIDE * WIDTH + tap % SIDE) * IN
            pixels = tl.load(source + shift, inside & used[None, :], other=0.0)
            if NORM:
                pixels = rectified(pixels.to(tl.float32) * gain + offset).to(LOW)
            kernel = tl.load(filters + tap * IN, used[:, None] & written[None, :], other=0.0)
            value = tl.dot(pixels, kernel, value)
        rounded = value.to(LOW)
        tl.store(maps + at[:, None] * OUT + out[None, :], rounded, inside & written[None, :])
        value = tl.where(inside, rounded.to(tl.float32), 0.0)
        first += tl.sum(value, 0)
        second += tl.sum(value * value, 0)
    tl.store(parts + program * 2 * OUT + out, first, written)
    tl.store(parts + (program * 2 + 1) * OUT + out, second, written)


@triton.jit
def _added(
    parts, count, channel, inside, OUT: tl.constexpr, POSITIONS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    # Both sums per channel of parts (count, 2, POSITIONS, OUT).
    first = tl.zeros([PARTS, channel.shape[0]], tl.float32)
    second = tl.zeros([PARTS, channel.shape[0]], tl.float32)
    for start in range(0, count * POSITIONS, PARTS):
        part = start + tl.arange(0, PARTS)
        row = part // POSITIONS * (2 * POSITIONS) + part % POSITIONS
        known = (part < count * POSITIONS)[:, None] & inside[None, :]
        place = parts + row[:, None] * OUT + channel[None, :]
        first += tl.load(place, known, other=0.0)
        second += tl.load(place + POSITIONS * OUT, known, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(do_not_specialize=GUARDED)
def statistics(
    parts, flat, running_mean, running_var, tracked, coefficients, count, values, momentum, eps,
    bias_at, gain_at, offset_at, OUT: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Compute gain, offset, mean and inverse deviation of a norm from the moments of its map."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < OUT
    first, second = _added(parts, count, channel, inside, OUT, 1, PARTS)
    mean = first / values
    variance = second / values - mean * mean
    variance = tl.where(variance <= 0, 0.0, variance)  # tl.maximum would replace NaN by 0
    inverse = 1 / tl.sqrt(variance + eps)
    gain = tl.load(flat + gain_at + channel, inside, other=0.0) * inverse
    offset = tl.load(flat + offset_at + channel, inside, other=0.0) - gain * mean
    tl.store(coefficients + channel, gain, inside)
    tl.store(coefficients + OUT + channel, offset, inside)
    tl.store(coefficients + 2 * OUT + channel, mean, inside)
    tl.store(coefficients + 3 * OUT + channel, inverse, inside)
    bias = tl.load(flat + bias_at + channel, inside, other=0.0)
    _track(running_mean, mean + bias, momentum, channel, inside)
    unbiased = variance * (values * 1.0 / tl.maximum(values - 1, 1))
    _track(running_var, unbiased, momentum, channel, inside)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit(do_not_specialize=GUARDED)
def slope_statistics(
    parts, coefficients, found, slopes, count, values, gain_at, offset_at, OUT: tl.constexpr,
    POSITIONS: tl.constexpr, NORM: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Compute the gradients of a norm, and how its output's slopes become those of its input.

    The slope of the input is found[0] * slope + found[1] * input + found[2] per channel. Without a
    norm, the offset is the bias of the convolution, and the slopes are those of the input.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < OUT
    plain, scaled = _added(parts, count, channel, inside, OUT, POSITIONS, PARTS)
    tl.store(slopes + offset_at + channel, plain, inside)
    if NORM:
        tl.store(slopes + gain_at + channel, scaled, inside)
        gain = tl.load(coefficients + channel, inside, other=0.0)
        mean = tl.load(coefficients + 2 * OUT + channel, inside, other=0.0)
        inverse = tl.load(coefficients + 3 * OUT + channel, inside, other=0.0)
        bent = -gain * scaled / values * inverse
        tl.store(found + channel, gain, inside)
        tl.store(found + OUT + channel, bent, inside)
        tl.store(found + 2 * OUT + channel, -gain * plain / values - bent * mean, inside)


@triton.jit(do_not_specialize=GUARDED)
def normalise_slopes(
    slopes, maps, found, total, OUT: tl.constexpr, OUT_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Turn the slopes of a norm's output into those of its input, in place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out = tl.arange(0, OUT_P)
    written = out < OUT
    inside = (at < total)[:, None] & written[None, :]
    place = at[:, None] * OUT + out[None, :]
    slope = tl.load(slopes + place, inside, other=0.0).to(tl.float32)
    value = tl.load(maps + place, inside, other=0.0).to(tl.float32)
    slope = slope * tl.load(found + out, written, other=0.0)[None, :]
    slope += value * tl.load(found + OUT + out, written, other=0.0)[None, :]
    slope += tl.load(found + 2 * OUT + out, written, other=0.0)[None, :]
    tl.store(slopes + place, slope.to(LOW), inside)


@triton.jit(do_not_specialize=GUARDED)
def input_gradient(
    slopes, weight, given, coefficients, found, parts, images, steps, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr,
    IN_P: tl.constexpr, OUT_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the slopes of a normalised map from those of the 3 x 3 convolution after it.

    With stride 2, each program has the pixels of one parity, which the same filter taps use.
    """
    TALL: tl.constexpr = (HEIGHT - 3) // STRIDE + 1
    BROAD: tl.constexpr = (WIDTH - 3) // STRIDE + 1
    TAPS: tl.constexpr = (2 + STRIDE) // STRIDE  # along an axis
    program, parity = tl.program_id(0), tl.program_id(1)
    top, left = parity // STRIDE, parity % STRIDE
    tall, broad = (HEIGHT - top + STRIDE - 1) // STRIDE, (WIDTH - left + STRIDE - 1) // STRIDE
    channel, out = tl.arange(0, IN_P), tl.arange(0, OUT_P)
    used, read = channel < IN, out < OUT
    gain = tl.load(coefficients + channel, used, other=0.0)[None, :]
    offset = tl.load(coefficients + IN + channel, used, other=0.0)[None, :]
    mean = tl.load(coefficients + 2 * IN + channel, used, other=0.0)[None, :]
    inverse = tl.load(coefficients + 3 * IN + channel, used, other=0.0)[None, :]
    plain = tl.zeros([IN_P], tl.float32)
    scaled = tl.zeros([IN_P], tl.float32)
    for step in range(steps):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < images * tall * broad
        image = at // (tall * broad)
        y, x = at // broad % tall, at % broad  # of the pixels of this parity
        value = tl.zeros([BLOCK, IN_P], tl.float32)
        for tap in tl.static_range(TAPS * TAPS):
            down, across = top + STRIDE * (tap // TAPS), left + STRIDE * (tap % TAPS)
            above, before = y - tap // TAPS, x - tap % TAPS
            there = inside & (above >= 0) & (above < TALL) & (before >= 0) & (before < BROAD)
            place = ((image * TALL + above) * BROAD + before)[:, None] * OUT + out[None, :]
            slope = tl.load(slopes + place, there[:, None] & read[None, :], other=0.0)
            place = (out[:, None] * 9 + down * 3 + across) * IN + channel[None, :]
            exists = (down < 3) & (across < 3)
            kernel = tl.load(weight + place, read[:, None] & used[None, :] & exists, other=0.0)
            value = tl.dot(slope, kernel, value)
        place = ((image * HEIGHT + top + STRIDE * y) * WIDTH + left + STRIDE * x)[:, None] * IN
        place += channel[None, :]
        both = inside[:, None] & used[None, :]
        pixels = tl.load(given + place, both, other=0.0).to(tl.float32)
        value = tl.where(pixels * gain + offset <= 0, 0.0, value).to(LOW)
        tl.store(found + place, value, both)
        value = tl.where(both, value.to(tl.float32), 0.0)
        plain += tl.sum(value, 0)
        scaled += tl.sum(value * ((pixels - mean) * inverse), 0)
    part = parity * tl.num_programs(0) + program
    tl.store(parts + part * 2 * IN + channel, plain, used)
    tl.store(parts + (part * 2 + 1) * IN + channel, scaled, used)


@triton.jit(do_not_specialize=GUARDED)
def weight_gradient(
    given, coefficients, slopes, parts, total, steps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    OUT_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the gradient of a 3 x 3 convolution of a normalised map, in the order (y, O, x, I).

    A program has one row of the filters. The three pixels of the row are adjacent in memory.
    """
    TALL: tl.constexpr = (HEIGHT - 3) // STRIDE + 1
    BROAD: tl.constexpr = (WIDTH - 3) // STRIDE + 1
    program, down = tl.program_id(0), tl.program_id(1)
    column, out = tl.arange(0, COLUMNS), tl.arange(0, OUT_P)
    used, read = column < 3 * IN, out < OUT
    gain = tl.load(coefficients + column % IN, used, other=0.0)[None, :]
    offset = tl.load(coefficients + IN + column % IN, used, other=0.0)[None, :]
    value = tl.zeros([OUT_P, COLUMNS], tl.float32)
    for step in range(steps):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (at < total)[:, None]
        image, y, x = at // (TALL * BROAD), at // BROAD % TALL, at % BROAD
        corner = (image * HEIGHT + y * STRIDE + down) * WIDTH + x * STRIDE
        source = given + corner[:, None] * IN + column[None, :]
        pixels = tl.load(source, inside & used[None, :], other=0.0).to(tl.float32)
        active = rectified(pixels * gain + offset).to(LOW)
        place = at[:, None] * OUT + out[None, :]
        slope = tl.load(slopes + place, inside & read[None, :], other=0.0)
        # Triton 3.6 compiles a computed and transposed first factor wrongly; this one is loaded.
        value = tl.dot(tl.trans(slope), active, value)
    part = parts + (program * 3 + down) * (OUT * 3 * IN)
    place = out[:, None] * (3 * IN) + column[None, :]
    tl.store(part + place, value, read[:, None] & used[None, :])
