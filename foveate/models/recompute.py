"""Scale channels run group by group, their activations computed again for the backward pass.

Only one group's activations are in memory at a time, and the results are those of one pass over
all. Batch norm in training mode binds the groups together: its mean and variance are over all of
them, and so are the gradients of both. So a pass ends at the first norm whose statistics are not
known yet, and the next goes one norm farther; on the way back the gradients of a norm's statistics
are complete after the passes that end above it. With n batch norms there are n + 1 passes each
way, each as deep as its norm. Without batch norm it is plain checkpointing.
"""
# Shape letters: B batch, S scale channel, N values of a batch, C channels of a map, K classes.

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class Statistics(NamedTuple):
    """Mean and variance (C,) of what a norm sees, and the number of values behind each."""

    mean: Tensor
    variance: Tensor
    number: Tensor


def batch_sums(values: Tensor) -> Tensor:
    """Sums (2 C + 1,) that add up over parts of a batch (N, C, ...): values, squares, their number.

    They are float64, so that the subtraction in `statistics` cancels little.
    """
    over = [0, *range(2, values.ndim)]
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    variance, mean = (t.double() for t in torch.var_mean(wide, over, correction=0))
    count = mean.new_full((1,), values.numel() / values.shape[1])
    return torch.cat([mean * count, (variance + mean * mean) * count, count])


def statistics(sums: Tensor) -> Statistics:
    """Mean and variance from the sums over a whole batch."""
    total, square = sums[:-1].chunk(2)
    mean = total / sums[-1]
    return Statistics(mean, square / sums[-1] - mean * mean, sums[-1])


def normalise(norm: Norm, values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Norm (N, C, ...) with a given mean and variance, differentiable in all of them."""
    gain = torch.rsqrt(variance + norm.eps)
    gain = gain if norm.weight is None else gain * norm.weight
    return _affine(values, gain, -mean * gain if norm.bias is None else norm.bias - mean * gain)


def _affine(values: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Values (N, C, ...) times a gain (C,) plus a shift (C,), both computed in float64."""
    shape, wide = (-1, *[1] * (values.ndim - 2)), torch.promote_types(values.dtype, torch.float32)
    return (values * gain.to(wide).view(shape) + shift.to(wide).view(shape)).to(values.dtype)


@torch.no_grad()
def remember(norm: Norm, found: Statistics) -> None:
    """Update the running statistics, once for each batch."""
    if norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    share = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
    unbiased = found.variance * (found.number / (found.number - 1).clamp_min(1))
    norm.running_mean.lerp_(found.mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)


def by_batch(norm: nn.Module) -> bool:
    """Whether a module is a batch norm that takes its statistics from the batch."""
    return isinstance(norm, Norm) and (norm.training or norm.running_mean is None)


def answer_in_groups(
    backbone: nn.Module, ask: Callable[[Tensor], Tensor], patches: Tensor, size: int
) -> Tensor:
    """Answer patches (B, S, ...) with (B, S, K), the activations of `size` channels at a time.

    `ask` runs the backbone on patches (N, ...) and gives (N, K). Dropout draws for each group by
    itself, from seeds that torch's random state gives.
    """
    seeds = torch.randint(2**62, (-(-patches.shape[1] // size),)).tolist()
    parameters = [p for p in backbone.parameters() if p.requires_grad]
    passes = _Passes(ask, list(filter(by_batch, backbone.modules())), size, seeds)
    return _Grouped.apply(patches, passes, *parameters)  # type: ignore[no-any-return,no-untyped-call]


class _Grouped(torch.autograd.Function):
    """All groups as one function of the patches and the weights."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, passes: "_Passes", *parameters: Tensor) -> Tensor:
        """Give the answers; nothing is kept but the patches and the statistics."""
        ctx.passes, ctx.cast = passes, _cast_as_now(patches.device.type)
        ctx.save_for_backward(patches, *parameters)
        with ctx.cast():
            return passes.forward(patches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the activations again, group by group, and give the gradients."""
        patches, *parameters = ctx.saved_tensors
        leaf = patches.detach().requires_grad_(ctx.needs_input_grad[0])
        with ctx.cast():
            of_patches, *others = ctx.passes.backward(leaf, parameters, slope)
        return of_patches, None, *others


def _cast_as_now(kind: str) -> Callable[[], AbstractContextManager[object]]:
    """Autocast as it is now; weights cast without a gradient must not be found again with one."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)


class _Reached(BaseException):
    """Ends a pass at a norm, with what the norm was given."""

    def __init__(self, norm: Norm, values: Tensor) -> None:
        self.norm, self.values = norm, values


class _Acting(nn.Module):
    """The class of a batch norm while a pass runs; its parameters and hooks stay its own."""

    passes: "_Passes"

    def forward(self, values: Tensor) -> Tensor:
        """Do what the pass says."""
        return self.passes.at_norm(self, values)  # type: ignore[arg-type]


class _Passes:
    """Runs groups of channels through the backbone, norms with the statistics known so far.

    Calls of norms are told apart by their order: `known[k]` is for call k, `norms[k]` its norm.
    """

    def __init__(
        self,
        ask: Callable[[Tensor], Tensor],
        actors: list[nn.Module],
        size: int,
        seeds: list[int],
    ) -> None:
        self.ask, self.actors, self.size, self.seeds = ask, actors, size, seeds
        self.known: list[Statistics] = []
        self.norms: list[Norm] = []
        self.calls = self.end = 0

    def forward(self, patches: Tensor) -> Tensor:
        """Find the statistics of one norm after the other, then the answers (B, S, K)."""
        while True:
            found = [self._look(patches, group) for group in range(len(self.seeds))]
            if len(self.norms) == len(self.known):
                return torch.cat(found, 1)
            norm = self.norms[-1]
            known = statistics(_over_processes(norm, torch.stack(found).sum(0)))
            remember(norm, known)
            mean, variance = (t.requires_grad_() for t in known[:2])
            self.known.append(Statistics(mean, variance, known.number))

    def backward(
        self, patches: Tensor, parameters: list[Tensor], slope: Tensor
    ) -> list[Tensor | None]:
        """Gradients of the patches and of the parameters, given that of the answers."""
        leaves = [patches, *parameters, *(t for known in self.known for t in known[:2])]
        gradients: list[Tensor | None] = [None] * len(leaves)
        for end in reversed(range(len(self.known) + 1)):
            at = 1 + len(parameters) + 2 * end
            above = self._statistics_slope(end, gradients[at : at + 2])
            for group, answers in enumerate(slope.split(self.size, 1)):
                with torch.enable_grad():
                    values = self._run(patches, group, end)
                if values.requires_grad:
                    slope_here = answers.flatten(0, 1) if above is None else above(values.detach())
                    _add_gradients(values, slope_here, leaves, gradients)
        return gradients[: 1 + len(parameters)]

    def at_norm(self, norm: Norm, values: Tensor) -> Tensor:
        """What a norm does in a pass: end it, or use the statistics that are known."""
        at, self.calls = self.calls, self.calls + 1
        if at == self.end:
            raise _Reached(norm, values)
        return normalise(norm, values, self.known[at].mean, self.known[at].variance)

    def _look(self, patches: Tensor, group: int) -> Tensor:
        """The sums at the first norm that is not known, or if all are the answers (B, S, K)."""
        end = len(self.known)
        values = self._run(patches, group, end)
        if len(self.norms) > end:
            return batch_sums(values)
        return values.unflatten(0, (patches.shape[0], -1))  # type: ignore[no-any-return]

    def _run(self, patches: Tensor, group: int, end: int) -> Tensor:
        """Run a group up to call `end` of a norm: what that norm is given, or else the answers."""
        part = patches.split(self.size, 1)[group].flatten(0, 1)
        self.calls, self.end = 0, end
        with self._acting(), torch.random.fork_rng([part.device] if part.is_cuda else []):
            torch.manual_seed(self.seeds[group])
            try:
                return self.ask(part)
            except _Reached as reached:
                self.norms += [reached.norm] if len(self.norms) == end else []
                return reached.values

    @contextmanager
    def _acting(self) -> Iterator[None]:
        kinds = [type(actor) for actor in self.actors]
        for actor in self.actors:
            actor.__class__, actor.__dict__["passes"] = _Acting, self
        try:
            yield
        finally:
            for actor, kind in zip(self.actors, kinds, strict=True):
                actor.__class__ = kind
                del actor.__dict__["passes"]

    def _statistics_slope(
        self, end: int, gradients: Sequence[Tensor | None]
    ) -> Callable[[Tensor], Tensor] | None:
        """How what norm call `end` is given acts through its statistics on all that comes after.

        With mean = sum x / n and variance = sum (x - mean)^2 / n, d mean / d x is 1 / n and
        d variance / d x is 2 (x - mean) / n, as the deviations from the mean add up to nothing.
        """
        if end == len(self.known):
            return None
        mean, _, number = self.known[end]
        both = torch.stack([torch.zeros_like(mean) if g is None else g for g in gradients])
        of_mean, of_variance = _over_processes(self.norms[end], both) / number
        shift = of_mean - 2 * of_variance * mean.detach()
        return lambda values: _affine(values, 2 * of_variance, shift)


def _over_processes(norm: Norm, sums: Tensor) -> Tensor:
    """Add up over the processes that share this norm's statistics, if it says how."""
    add_up: Callable[[Tensor], Tensor] | None = getattr(norm, "add_up", None)
    return sums if add_up is None else add_up(sums)


def _add_gradients(
    values: Tensor, slope: Tensor, leaves: list[Tensor], gradients: list[Tensor | None]
) -> None:
    wanted = [at for at, leaf in enumerate(leaves) if leaf.requires_grad]
    found = torch.autograd.grad(values, [leaves[at] for at in wanted], slope, allow_unused=True)
    for at, gradient in zip(wanted, found, strict=True):
        if gradient is not None:
            before = gradients[at]
            gradients[at] = gradient if before is None else before + gradient
