"""Scale channels run group by group, their activations computed again for the backward pass.

Only one group's activations are in memory at a time, and the results are those of one pass over
all. Batch norm in training mode binds the groups together: its mean and variance are over all of
them, and so are the gradients of both. So a pass ends at the first norm whose statistics are not
known yet, and the next goes one norm farther; on the way back the gradients of a norm's statistics
are complete after the passes that end above it. With n batch norms there are n + 1 passes each
way, each as deep as its norm. Without batch norm it is plain checkpointing.

The modules themselves run unchanged: calls of `torch.nn.functional.batch_norm` are intercepted, so
subclasses of batch norm, hooks and parametrisations keep what they add. Every pass starts from the
buffers of the first, and the buffers are updated once. Other operations that take statistics over
a batch are refused, by PyTorch itself activation checkpointing around a batch norm. A forward hook
fires once for each pass and group.
"""
# Shape letters: B batch, S scale channel, N values of a batch, C channels of a map, K classes.

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from foveate.errors import ConfigError

Sum = Callable[[Tensor], Tensor]
"""Adds up a tensor over all processes."""
Ask = Callable[[Callable[..., Tensor], Tensor], Tensor]
"""Runs the first argument, a backbone, on patches (N, ...) and gives (N, K)."""
EXACT = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
WITHOUT = "train without recompute"


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


class Norm(NamedTuple):
    """The arguments of `F.batch_norm`."""

    values: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = True
    momentum: float = 0.1
    eps: float = 1e-5


def batch_norm(*arguments: Any, add_up: Sum, **options: Any) -> Tensor:
    """`F.batch_norm` in training mode with statistics over all processes that `add_up` joins.

    `add_up` must be differentiable, except under `answer_in_groups`, which takes the call over.
    """
    norm = Norm(*arguments, **options)
    if has_torch_function_unary(norm.values):
        return handle_torch_function(batch_norm, norm[:1], *norm, add_up=add_up)
    return _normed(norm, statistics(add_up(batch_sums(norm.values))))


def _normed(norm: Norm, found: Statistics) -> Tensor:
    """Update the running statistics as `F.batch_norm` does, and normalise with those `found`."""
    if norm.running_mean is not None and norm.running_var is not None:
        with torch.no_grad():
            unbiased = found.variance * (found.number / (found.number - 1).clamp_min(1))
            norm.running_mean.lerp_(found.mean.to(norm.running_mean.dtype), norm.momentum)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    gain = torch.rsqrt(found.variance + norm.eps)
    gain = gain if norm.weight is None else gain * norm.weight
    shift = -found.mean * gain
    return _affine(norm.values, gain, shift if norm.bias is None else shift + norm.bias)


def _affine(values: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Values (N, C, ...) times a gain (C,) plus a shift (C,), both computed in float64."""
    shape, wide = (-1, *[1] * (values.ndim - 2)), torch.promote_types(values.dtype, torch.float32)
    return (values * gain.to(wide).view(shape) + shift.to(wide).view(shape)).to(values.dtype)


def by_batch(module: nn.Module) -> bool:
    """Whether a module is a batch norm that takes its statistics from the batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def answer_in_groups(backbone: nn.Module, ask: Ask, patches: Tensor, size: int) -> Tensor:
    """Answer patches (B, S, ...) with (B, S, K), the activations of `size` channels at a time.

    Dropout draws for each group by itself, from seeds that torch's random state gives. The random
    state changes only if the backbone draws.
    """
    script = [type(m).__name__ for m in backbone.modules() if isinstance(m, torch.jit.ScriptModule)]
    if script:
        raise ConfigError(f"recompute cannot run TorchScript ({script[0]}): {WITHOUT}")
    groups = -(-patches.shape[1] // size)
    with torch.random.fork_rng([]):
        seeds = torch.randint(2**62, (groups,)).tolist()
    parameters = [p for p in backbone.parameters() if p.requires_grad]
    passes = _Passes(backbone, ask, size, seeds)
    outputs: Tensor = _Grouped.apply(patches, passes, *parameters)  # type: ignore[no-untyped-call]
    if passes.drew:
        torch.randint(2**62, (groups,))
    return outputs


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

    def __init__(self, values: Tensor, add_up: Sum | None) -> None:
        self.values, self.add_up = values, add_up


class _Passes(TorchFunctionMode):
    """Runs groups of channels through the backbone, norms with the statistics known so far.

    Calls of norms are told apart by their order: `known[k]` and `sums[k]` are for call k.
    """

    def __init__(self, backbone: nn.Module, ask: Ask, size: int, seeds: list[int]) -> None:
        super().__init__()
        self.backbone, self.ask, self.size, self.seeds = backbone, ask, size, seeds
        self.begun = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
        self.known: list[Statistics] = []
        self.sums: list[Sum | None] = []
        self.calls = self.end = 0
        self.drew = False

    def forward(self, patches: Tensor) -> Tensor:
        """Find the statistics of one norm after the other, then the answers (B, S, K)."""
        with _all_intercepted(self.backbone, lambda: self.calls):
            while True:
                found = [self._look(patches, group) for group in range(len(self.seeds))]
                if len(self.sums) == len(self.known):
                    break
                known = statistics(_over_processes(self.sums[-1], torch.stack(found).sum(0)))
                mean, variance = (t.requires_grad_() for t in known[:2])
                self.known.append(Statistics(mean, variance, known.number))
        for name, buffer in self.backbone.named_buffers():
            if _changed(self.ended[name]):
                buffer.copy_(self.ended[name])
        return torch.cat(found, 1)

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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take over batch norm in training mode, and refuse what else joins a batch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is batch_norm or (func is F.batch_norm and kwargs["training"]):
            return self.at_norm(*args, **kwargs)
        running = name == "instance_norm" and kwargs.get("running_mean") is not None
        if ("batch_norm" in name and func is not F.batch_norm) or running:
            raise ConfigError(f"recompute cannot split {name} over groups: {WITHOUT}")
        return func(*args, **kwargs)

    def at_norm(self, *arguments: Any, add_up: Sum | None = None, **options: Any) -> Tensor:
        """What a norm does in a pass: end it, or use the statistics that are known."""
        norm = Norm(*arguments, **options)
        at, self.calls = self.calls, self.calls + 1
        if at == self.end:
            raise _Reached(norm.values, add_up)
        return _normed(norm, self.known[at])

    def _look(self, patches: Tensor, group: int) -> Tensor:
        """The sums at the first norm that is not known, or if all are the answers (B, S, K)."""
        end = len(self.known)
        values = self._run(patches, group, end)
        if len(self.sums) > end:
            return batch_sums(values)
        return values.unflatten(0, (patches.shape[0], -1))  # type: ignore[no-any-return]

    def _run(self, patches: Tensor, group: int, end: int) -> Tensor:
        """Run a group up to call `end` of a norm: what that norm is given, or else the answers."""
        part = patches.split(self.size, 1)[group].flatten(0, 1)
        self.calls, self.end = 0, end
        buffers = {name: value.clone() for name, value in self.begun.items()}
        if group == 0:
            self.ended = buffers
        with (
            _seeded(self.seeds[group], part.device) as drew,
            torch.compiler.set_stance("force_eager"),
        ):
            try:
                with self:
                    return self.ask(lambda *a: functional_call(self.backbone, buffers, a), part)
            except _Reached as reached:
                self.sums += [reached.add_up] if len(self.sums) == end else []
                return reached.values
            finally:
                self.drew = self.drew or drew()

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
        of_mean, of_variance = _over_processes(self.sums[end], both) / number
        shift = of_mean - 2 * of_variance * mean.detach()
        return lambda values: _affine(values, 2 * of_variance, shift)


def _over_processes(add_up: Sum | None, sums: Tensor) -> Tensor:
    """Add up over the processes that share a norm's statistics, if there are others."""
    return sums if add_up is None else add_up(sums)


def _changed(clone: Tensor) -> bool:
    """Whether a fresh clone was written to; an inference tensor does not say."""
    return clone.is_inference() or clone._version > 0


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Draw from a seed, and tell whether anything was drawn; the random state stays as it was."""
    cuda = device.type == "cuda"

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    with torch.random.fork_rng([device] if cuda else []):
        torch.manual_seed(seed)
        begun = states()
        yield lambda: not all(map(torch.equal, begun, states()))


@contextmanager
def _all_intercepted(backbone: nn.Module, calls: Callable[[], int]) -> Iterator[None]:
    """Refuse a batch norm of another kind that was called without a call of `F.batch_norm`."""
    names = {m: n for n, m in backbone.named_modules() if by_batch(m) and type(m) not in EXACT}
    before: dict[nn.Module, int] = {}

    def begin(norm: nn.Module, _: Any) -> None:
        before[norm] = calls()

    def end(norm: nn.Module, *_: Any) -> None:
        if calls() == before[norm]:
            kind = f"{names[norm]} ({type(norm).__name__})"
            raise ConfigError(
                f"recompute cannot split {kind}, which does not call F.batch_norm: {WITHOUT}"
            )

    with ExitStack() as hooks:
        for norm in names:
            hooks.enter_context(norm.register_forward_pre_hook(begin))
            hooks.enter_context(norm.register_forward_hook(end))
        yield


def _add_gradients(
    values: Tensor, slope: Tensor, leaves: list[Tensor], gradients: list[Tensor | None]
) -> None:
    wanted = [at for at, leaf in enumerate(leaves) if leaf.requires_grad]
    found = torch.autograd.grad(values, [leaves[at] for at in wanted], slope, allow_unused=True)
    for at, gradient in zip(wanted, found, strict=True):
        if gradient is not None:
            before = gradients[at]
            gradients[at] = gradient if before is None else before + gradient
