"""Triton kernels of a training step: linear layers, pool and loss, and the sum of gradients."""
# Shape letters: B images, S scale channels, N = B S patches, F features of a patch, U hidden units,
# K classes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from foveate.execution.triton_step import GUARDED, rectified
from foveate.execution.triton_trunk import LOW


@triton.jit(do_not_specialize=GUARDED)
def classify(
    maps, coefficients, hidden, flat, mask, head, labels, indices, active, units, unit_slopes,
    logits, logit_slopes, pooled_slopes, slopes, parts, losses, images, smoothing,
    HIDDEN_BIAS: tl.constexpr, HEAD_BIAS: tl.constexpr, MIXING: tl.constexpr,
    MIXING_BIAS: tl.constexpr, POOL: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    OUT: tl.constexpr, FEATURES: tl.constexpr, UNITS: tl.constexpr, UNITS_P: tl.constexpr,
    CLASSES: tl.constexpr, CLASSES_P: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the linear layers, the pooled logits, the loss, and all slopes down to the features.

    A program has all patches of an image, or `ROWS` images that have one patch each. The hidden
    weight has the order (U, F), with the features of a position together; the head's is (K, U).
    """
    program = tl.program_id(0)
    row, unit, kind = tl.arange(0, ROWS), tl.arange(0, UNITS_P), tl.arange(0, CLASSES_P)
    if CHANNELS == 1:
        patch = program * ROWS + row
        real = patch < images
        image = patch
    else:
        patch = program * CHANNELS + row
        real = row < CHANNELS
        image = tl.zeros([ROWS], tl.int32) + program
    there, member, named = real[:, None], unit < UNITS, kind < CLASSES
    value = tl.zeros([ROWS, UNITS_P], tl.float32)
    for start in range(0, FEATURES, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        known = feature < FEATURES
        place = patch[:, None] * FEATURES + feature[None, :]
        pixels = tl.load(maps + place, there & known[None, :], other=0.0).to(tl.float32)
        gain = tl.load(coefficients + feature % OUT, known, other=0.0)[None, :]
        offset = tl.load(coefficients + OUT + feature % OUT, known, other=0.0)[None, :]
        given = rectified(pixels * gain + offset).to(LOW)
        tl.store(active + place, given, there & known[None, :])
        source = hidden + unit[None, :] * FEATURES + feature[:, None]
        weight = tl.load(source, known[:, None] & member[None, :], other=0.0)
        value = tl.dot(given, weight, value)
    value += tl.load(flat + HIDDEN_BIAS + unit, member, other=0.0)[None, :]
    owner = image if SHARED else patch
    place = owner[:, None] * UNITS + unit[None, :]
    keep = tl.load(mask + place, there & member[None, :], other=0.0)
    keep = tl.where(value <= 0, 0.0, keep.to(tl.float32))
    value = (value * keep).to(LOW)
    both = there & (unit >= 0)[None, :]
    tl.store(units + patch[:, None] * UNITS_P + unit[None, :], value, both)
    source = head + kind[None, :] * UNITS + unit[:, None]
    weight = tl.load(source, member[:, None] & named[None, :], other=0.0)
    output = tl.dot(value, weight)
    output += tl.load(flat + HEAD_BIAS + kind, named, other=0.0)[None, :]
    asked = there & named[None, :]
    tl.store(logits + patch[:, None] * CLASSES + kind[None, :], output.to(LOW), asked)
    if CHANNELS == 1:
        label = tl.load(labels + tl.load(indices + image, real, other=0), real, other=0)
        shown = tl.where(asked, output, float("-inf"))
        top = tl.max(tl.where(there, shown, 0.0), 1)
        exponent = tl.where(named[None, :], tl.exp(shown - top[:, None]), 0.0)
        whole = tl.where(real, tl.sum(exponent, 1), 1.0)
        wanted = tl.where(kind[None, :] == label[:, None], 1 - smoothing, 0.0) + smoothing / CLASSES
        wanted = tl.where(named[None, :], wanted, 0.0)
        logarithm = output - top[:, None] - tl.log(whole)[:, None]
        loss = -tl.sum(tl.where(named[None, :], wanted * logarithm, 0.0), 1)
        tl.store(losses + image, loss, real)
        slope = tl.where(asked, (exponent / whole[:, None] - wanted) / images, 0.0)
    else:
        if POOL == "avg":
            pooled = tl.sum(tl.where(asked, output, 0.0), 0) / CHANNELS
        elif POOL == "winners":  # each class has a patch of its own
            pooled = tl.sum(tl.where(row[:, None] == kind[None, :], output, 0.0), 0)
        elif POOL == "concat":
            # Weight (K, S K) as (K, S, K).
            place = kind[:, None, None] * CHANNELS + row[None, :, None]
            place = MIXING + place * CLASSES + kind[None, None, :]
            inside = named[:, None, None] & asked[None, :, :]
            mixing = tl.load(flat + place, inside, other=0.0)
            pooled = tl.sum(tl.sum(mixing * output[None, :, :], 2), 1)
            pooled += tl.load(flat + MIXING_BIAS + kind, named, other=0.0)
        else:
            shown = tl.where(asked, output, float("-inf"))
            pooled, winner = tl.max(shown, 0, return_indices=True)
            if POOL == "logsumexp":
                top = tl.where(named, pooled, 0.0)
                power = tl.where(asked, tl.exp(output - top[None, :]), 0.0)
                amount = tl.sum(power, 0)
                pooled = top + tl.log(tl.where(named, amount, 1.0))
        label = tl.load(labels + tl.load(indices + program))
        pooled = tl.where(named, pooled, float("-inf"))
        largest = tl.max(pooled, 0)
        exponent = tl.exp(pooled - largest)
        whole = tl.sum(exponent, 0)
        wanted = tl.where(kind == label, 1 - smoothing, 0.0) + smoothing / CLASSES
        wanted = tl.where(named, wanted, 0.0)
        logarithm = tl.where(named, pooled, 0.0) - largest - tl.log(whole)
        tl.store(losses + program, -tl.sum(wanted * logarithm, 0))
        steep = tl.where(named, (exponent / whole - wanted) / images, 0.0)
        if POOL == "avg":
            slope = tl.where(asked, steep[None, :] / CHANNELS, 0.0)
        elif POOL == "winners":
            slope = tl.where(asked & (row[:, None] == kind[None, :]), steep[None, :], 0.0)
        elif POOL == "max":
            slope = tl.where(asked & (row[:, None] == winner[None, :]), steep[None, :], 0.0)
        elif POOL == "logsumexp":
            slope = power / tl.where(named, amount, 1.0)[None, :] * steep[None, :]
        else:
            tl.store(pooled_slopes + program * CLASSES_P + kind, steep.to(LOW))
            # The sum over the first index of (K, S, K).
            slope = tl.sum(mixing * steep[:, None, None], 0)
    slope = slope.to(LOW)
    place = logit_slopes + patch[:, None] * CLASSES_P + kind[None, :]
    tl.store(place, slope, there & (kind >= 0)[None, :])
    source = head + kind[:, None] * UNITS + unit[None, :]
    weight = tl.load(source, named[:, None] & member[None, :], other=0.0)
    back = (tl.dot(slope, weight) * keep).to(LOW)
    tl.store(unit_slopes + patch[:, None] * UNITS_P + unit[None, :], back, both)
    for start in range(0, FEATURES, BLOCK):
        last = start + tl.arange(0, BLOCK)
        exists = last < FEATURES
        inner = there & exists[None, :]
        columns = hidden + unit[:, None] * FEATURES + last[None, :]
        fall = tl.dot(back, tl.load(columns, member[:, None] & exists[None, :], other=0.0))
        spot = patch[:, None] * FEATURES + last[None, :]
        pixel = tl.load(maps + spot, inner, other=0.0).to(tl.float32)
        scale = tl.load(coefficients + last % OUT, exists, other=0.0)[None, :]
        shift = tl.load(coefficients + OUT + last % OUT, exists, other=0.0)[None, :]
        mean = tl.load(coefficients + 2 * OUT + last % OUT, exists, other=0.0)[None, :]
        inverse = tl.load(coefficients + 3 * OUT + last % OUT, exists, other=0.0)[None, :]
        rounded = tl.where(pixel * scale + shift <= 0, 0.0, fall).to(LOW)
        tl.store(slopes + spot, rounded, inner)
        fall = tl.where(inner, rounded.to(tl.float32), 0.0)
        part = parts + program * 2 * FEATURES + last
        tl.store(part, tl.sum(fall, 0), exists)
        tl.store(part + FEATURES, tl.sum(fall * ((pixel - mean) * inverse), 0), exists)


@triton.jit(do_not_specialize=GUARDED)
def product(
    left, right, parts, total, steps, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    LEFT_P: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum left (N, L).mT @ right (N, R), and the rows of left: (L, R), then (L,)."""
    program, start = tl.program_id(0), tl.program_id(1) * COLUMNS
    row, column = tl.arange(0, LEFT_P), start + tl.arange(0, COLUMNS)
    used, read = row < LEFT, column < RIGHT
    value = tl.zeros([LEFT_P, COLUMNS], tl.float32)
    sums = tl.zeros([LEFT_P], tl.float32)
    for step in range(steps):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (at < total)[:, None]
        first = tl.load(left + at[:, None] * LEFT + row[None, :], inside & used[None, :], other=0.0)
        place = at[:, None] * RIGHT + column[None, :]
        second = tl.load(right + place, inside & read[None, :], other=0.0)
        value = tl.dot(tl.trans(first), second, value)
        sums += tl.sum(first.to(tl.float32), 0)
    part = parts + program * (LEFT * (RIGHT + 1))
    place = row[:, None] * RIGHT + column[None, :]
    tl.store(part + place, value, used[:, None] & read[None, :])
    if start == 0:
        tl.store(part + LEFT * RIGHT + row, sums, used)


@triton.jit(do_not_specialize=GUARDED)
def collect(parts, table, slopes, total, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Add the parts of every gradient: `table` has first place, step and number for each, or 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    first = tl.load(table + at, inside, other=0)
    step = tl.load(table + total + at, inside, other=0)
    count = tl.load(table + 2 * total + at, inside, other=0)
    most = tl.max(count, 0)
    # Most elements have few parts; they need no large block.
    if most <= 8:
        part = tl.arange(0, 8)[:, None]
        source = parts + first[None, :] + part * step[None, :]
        found = tl.sum(tl.load(source, part < count[None, :], other=0.0), 0)
    else:
        value = tl.zeros([PARTS, BLOCK], tl.float32)
        for start in range(0, most, PARTS):
            many = (start + tl.arange(0, PARTS))[:, None]
            place = parts + first[None, :] + many * step[None, :]
            value += tl.load(place, many < count[None, :], other=0.0)
        found = tl.sum(value, 0)
    tl.store(slopes + at, found, inside & (count > 0))
