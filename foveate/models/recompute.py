"""Run scale channels group by group, and recompute their activations in the backward pass.

Only the activations of one group are in memory at a time. The results equal those of one pass over
all channels. Without batch norm this is plain activation checkpointing.

Batch norm in training mode couples the groups, because its mean, its variance and their gradients
are over all of them. A forward pass therefore stops at the first norm with unknown statistics, and
the next pass gets one norm further. In the backward direction, the gradients of a norm's statistics
are complete after the passes that stop above it. A last pass then adds them at each norm: for a
bias before a norm, both parts cancel, and separate sums of nearly constant patches had up to 45
times the rounding error. A backbone with n batch norms takes n + 1 passes in each direction, each
as deep as the norm at which it stops.

The modules run unchanged: only calls of `torch.nn.functional.batch_norm` are intercepted, so
subclasses of batch norm, hooks and parametrisations still work. Every pass starts from the same
buffers, and the buffers are updated once. Other operations with batch statistics raise an error.
Activation checkpointing around a batch norm raises an error in PyTorch itself. A forward hook runs
once per pass and group.
"""
# Shape letters: B batch, S scale channel, N values of a batch, C channels of a map, K classes.

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from foveate.errors import ConfigError
from foveate.tracing import differentiable_once

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""
RunBackbone = Callable[[Callable[..., Tensor], Tensor], Tensor]
"""Runs the first argument, a backbone, on patches (N, ...) and returns (N, K)."""
EXACT = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
WITHOUT = "train without recompute"


class Statistics(NamedTuple):
    """Mean and variance (C,) of the input of a norm, and the number of values per channel."""

    mean: Tensor
    variance: Tensor
    number: Tensor


def batch_sums(values: Tensor) -> Tensor:
    """Return sums (2 C + 1,) over a part of a batch (N, C, ...): values, squares and their count.

    Sums of several parts can be added up. They are float64 to limit cancellation in `statistics`.
    """
    over = [0, *range(2, values.ndim)]
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    variance, mean = (t.double() for t in torch.var_mean(wide, over, correction=0))
    count = mean.new_full((1,), values.numel() / values.shape[1])
    return torch.cat([mean * count, (variance + mean * mean) * count, count])


def statistics(sums: Tensor) -> Statistics:
    """Compute mean and variance from the sums over a whole batch."""
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


def batch_norm(*arguments: Any, all_reduce_sum: Sum, **options: Any) -> Tensor:
    """Compute `F.batch_norm` in training mode, with statistics over all processes.

    `all_reduce_sum` must be differentiable, except inside `forward_in_groups`, which intercepts
    this call.
    """
    norm = Norm(*arguments, **options)
    if has_torch_function_unary(norm.values):
        return handle_torch_function(batch_norm, norm[:1], *norm, all_reduce_sum=all_reduce_sum)
    return _normed(norm, statistics(all_reduce_sum(batch_sums(norm.values))))


def _normed(norm: Norm, found: Statistics) -> Tensor:
    """Update the running statistics as `F.batch_norm` does, and normalise with `found`."""
    if norm.running_mean is not None and norm.running_var is not None:
        with torch.no_grad():
            unbiased = found.variance * (found.number / (found.number - 1).clamp_min(1))
            norm.running_mean.lerp_(found.mean.to(norm.running_mean.dtype), norm.momentum)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    gain = torch.rsqrt(found.variance + norm.eps)
    gain = gain if norm.weight is None else gain * norm.weight
    return _affine(norm.values, found.mean, gain, norm.bias)


def _affine(values: Tensor, mean: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """Return (values (N, C, ...) - mean) * gain + bias, with float64 factors (C,).

    The mean is subtracted first, because products with nearly constant values would cancel. What
    rounding it to the dtype of the values omits is part of the shift, and so is its gradient.
    """
    shape, wide = (-1, *[1] * (values.ndim - 2)), torch.promote_types(values.dtype, torch.float32)
    centre = mean.detach().to(wide)
    shift = (centre - mean) * gain
    shift = shift if bias is None else shift + bias
    centre, gain, shift = (t.to(wide).view(shape) for t in (centre, gain, shift))
    return torch.addcmul(shift, values - centre, gain).to(values.dtype)


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch norm that uses the statistics of the batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def forward_in_groups(
    backbone: nn.Module, run_backbone: RunBackbone, patches: Tensor, size: int
) -> Tensor:
    """Map patches (B, S, ...) to logits (B, S, K), in groups of `size` channels to save memory.

    Dropout is independent for each group, with seeds drawn from PyTorch's random state. The random
    state advances only if the backbone uses random numbers.
    """
    script = [type(m).__name__ for m in backbone.modules() if isinstance(m, torch.jit.ScriptModule)]
    if script:
        raise ConfigError(f"recompute does not support TorchScript ({script[0]}); {WITHOUT}")
    if any(is_lazy(parameter) for parameter in backbone.parameters()):
        raise ConfigError(
            "recompute needs initialised parameters, and the backbone has lazy modules; call the "
            "network once without recompute"
        )
    groups = -(-patches.shape[1] // size)
    with torch.random.fork_rng([]):
        seeds = torch.randint(2**62, (groups,)).tolist()
    passes = _Passes(backbone, run_backbone, size, seeds)
    parameters = passes.parameters.values()
    outputs: Tensor = _Grouped.apply(patches, passes, *parameters)  # type: ignore[no-untyped-call]
    if passes.used_random:
        torch.randint(2**62, (groups,))
    return outputs


class _Grouped(torch.autograd.Function):
    """All groups as one autograd function of the patches and the weights."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, passes: "_Passes", *parameters: Tensor) -> Tensor:
        """Return the logits; only the patches and the batch statistics are saved."""
        ctx.passes, ctx.cast = passes, _cast_as_now(patches.device.type)
        ctx.save_for_backward(patches, *parameters)
        with ctx.cast():
            return passes.forward(patches)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute the activations group by group and return the gradients."""
        patches, *parameters = ctx.saved_tensors
        leaf = patches.detach().requires_grad_(ctx.needs_input_grad[0])
        with ctx.cast():
            of_patches, *others = ctx.passes.backward(leaf, parameters, slope)
        return of_patches, None, *others


def _cast_as_now(kind: str) -> Callable[[], AbstractContextManager[object]]:
    """Return the current autocast settings without the cache, whose weights have no graph."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)


def _alone(sums: Tensor) -> Tensor:
    """Return the sums over all processes of a norm that shares its statistics with none."""
    return sums


class _StopAtNorm(BaseException):
    """Stops a pass at a norm and carries the input of the norm."""

    def __init__(self, values: Tensor, all_reduce_sum: Sum) -> None:
        self.values, self.all_reduce_sum = values, all_reduce_sum


class _Coupled(torch.autograd.Function):
    """The input of a norm; the gradient through the statistics is added to its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, above: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the values unchanged."""
        ctx.save_for_backward(values)
        ctx.above = above
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        """Add the gradient through the statistics."""
        return slope + ctx.above(*ctx.saved_tensors), None


class _Passes(TorchFunctionMode):
    """Runs groups of channels through the backbone, with the batch statistics known so far.

    Norm calls are identified by their order: `known[k]` and `sums[k]` belong to call k.
    """

    def __init__(
        self, backbone: nn.Module, run_backbone: RunBackbone, size: int, seeds: list[int]
    ) -> None:
        super().__init__()
        self.backbone, self.run_backbone = backbone, run_backbone
        self.size, self.seeds = size, seeds
        self.modes = [module.training for module in backbone.modules()]
        self.buffers_before = _cloned(_named("buffers", backbone))
        named = _named("parameters", backbone)
        self.parameters = {id(p): p for p in named.values()}
        self.ids = {name: id(p) for name, p in named.items()}
        self.weights: dict[str, Tensor] = {}  # by name, in the backward pass
        self.known: list[Statistics] = []
        self.sums: list[Sum] = []
        self.slopes: dict[int, Callable[[Tensor], Tensor]] = {}  # in the backward pass
        self.calls = self.end = 0
        self.used_random = False

    def forward(self, patches: Tensor) -> Tensor:
        """Compute the statistics of one norm after the other, then the logits (B, S, K)."""
        with _all_intercepted(self.backbone, lambda: self.calls):
            while True:
                found = [self._sums_or_logits(patches, group) for group in range(len(self.seeds))]
                if len(self.sums) == len(self.known):
                    break
                known = statistics(self.sums[-1](torch.stack(found).sum(0)))
                mean, variance = (t.requires_grad_() for t in known[:2])
                self.known.append(Statistics(mean, variance, known.number))
        for name, buffer in _named("buffers", self.backbone).items():
            clone = self.buffers_after[name]
            if clone is not self.buffers_given[name]:  # the module has assigned another tensor
                path, _, own = name.rpartition(".")
                setattr(self.backbone.get_submodule(path), own, clone)
            elif clone.is_inference() or clone._version > 0:  # inference tensors have no version
                buffer.copy_(clone)
        return torch.cat(found, 1)

    def backward(
        self, patches: Tensor, parameters: list[Tensor], slope: Tensor
    ) -> list[Tensor | None]:
        """Return the gradients of the patches and parameters, given those of the logits.

        The parameters are those of the forward pass: `functional_call` can have replaced them.
        """
        if self.modes != [module.training for module in self.backbone.modules()]:
            raise ConfigError(
                "recompute needs the mode of the forward pass; call backward before net.eval() or "
                "net.train()"
            )
        saved = dict(zip(self.parameters, parameters, strict=True))
        self.weights = {name: saved[which] for name, which in self.ids.items()}
        leaves = [t for known in self.known for t in known[:2]]
        gradients: list[Tensor | None] = [None] * len(leaves)
        for end in reversed(range(len(self.known))):
            self._add_gradients(patches, slope, end + 1, leaves[: 2 * end + 2], gradients)
            self.slopes[end] = self._statistics_slope(end, gradients[2 * end : 2 * end + 2])
        leaves, gradients = [patches, *parameters], [None] * (1 + len(parameters))
        self._add_gradients(patches, slope, len(self.known), leaves, gradients)
        self.slopes.clear()
        return gradients

    def _add_gradients(
        self,
        patches: Tensor,
        slope: Tensor,
        end: int,
        leaves: list[Tensor],
        gradients: list[Tensor | None],
    ) -> None:
        """Add the gradients of `leaves` over the passes that stop at norm call `end`."""
        wanted = [at for at, leaf in enumerate(leaves) if leaf.requires_grad]
        for group, part in enumerate(slope.split(self.size, 1)):
            with torch.enable_grad():
                values = self._run(patches, group, end)
            if not values.requires_grad:
                continue
            above = self.slopes.get(end)
            slope_here = part.flatten(0, 1) if above is None else above(values.detach())
            inputs = [leaves[at] for at in wanted]
            found = torch.autograd.grad(values, inputs, slope_here, allow_unused=True)
            for at, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    before = gradients[at]
                    gradients[at] = gradient if before is None else before + gradient

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Intercept batch norm in training mode; raise for other operations over the batch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is batch_norm or (func is F.batch_norm and kwargs["training"]):
            return self.at_norm(*args, **kwargs)
        running = name == "instance_norm" and kwargs.get("running_mean") is not None
        if ("batch_norm" in name and func is not F.batch_norm) or running:
            raise ConfigError(f"recompute cannot split {name} over groups; {WITHOUT}")
        return func(*args, **kwargs)

    def at_norm(self, *arguments: Any, all_reduce_sum: Sum = _alone, **options: Any) -> Tensor:
        """Replace a norm call: stop the pass, or normalise with known statistics."""
        norm = Norm(*arguments, **options)
        at, self.calls = self.calls, self.calls + 1
        if at == self.end:
            raise _StopAtNorm(norm.values, all_reduce_sum)
        found = self.known[at]
        if at in self.slopes:
            coupled: Tensor = _Coupled.apply(norm.values, self.slopes[at])  # type: ignore[no-untyped-call]
            norm, found = norm._replace(values=coupled), Statistics(*(t.detach() for t in found))
        return _normed(norm, found)

    def _sums_or_logits(self, patches: Tensor, group: int) -> Tensor:
        """Return the sums at the first norm without known statistics, or else logits (B, S, K)."""
        end = len(self.known)
        values = self._run(patches, group, end)
        if len(self.sums) > end:
            return batch_sums(values)
        return values.unflatten(0, (patches.shape[0], -1))  # type: ignore[no-any-return]

    def _run(self, patches: Tensor, group: int, end: int) -> Tensor:
        """Run a group up to norm call `end`; return the input of that norm, or the logits."""
        # A copy: a backbone can change its input in place, and the patches are used several times.
        part = patches.split(self.size, 1)[group].clone().flatten(0, 1)
        self.calls, self.end = 0, end
        tensors = self.weights | _cloned(self.buffers_before)
        if group == 0:
            self.buffers_given, self.buffers_after = dict(tensors), tensors
        with (
            _seeded(self.seeds[group], part.device) as drew,
            torch.compiler.set_stance("force_eager"),
        ):
            try:
                with self:
                    return self.run_backbone(
                        lambda *a: functional_call(self.backbone, tensors, a, tie_weights=False),
                        part,
                    )
            except _StopAtNorm as stop:
                self.sums += [stop.all_reduce_sum] if len(self.sums) == end else []
                return stop.values
            finally:
                self.used_random = self.used_random or drew()

    def _statistics_slope(
        self, end: int, gradients: Sequence[Tensor | None]
    ) -> Callable[[Tensor], Tensor]:
        """Return the gradient through the statistics of norm call `end`, as a function of input.

        With mean = sum x / n and variance = sum (x - mean)^2 / n, d mean / d x is 1 / n and
        d variance / d x is 2 (x - mean) / n, because the deviations from the mean sum to zero.
        """
        mean, _, number = self.known[end]
        both = torch.stack([torch.zeros_like(mean) if g is None else g for g in gradients])
        of_mean, of_variance = self.sums[end](both) / number
        return lambda values: _affine(values, mean.detach(), 2 * of_variance, of_mean)


def _named(kind: str, backbone: nn.Module) -> dict[str, Tensor]:
    """Return the parameters or buffers by name, once for each module that has them.

    With two names for one module, `functional_call` would not restore its tensors.
    """
    modules = backbone.named_modules()
    return dict(n for path, m in modules for n in getattr(m, f"named_{kind}")(path, False, False))


def _cloned(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy in which buffers that are one tensor still are."""
    clones = {id(buffer): buffer.clone() for buffer in buffers.values()}
    return {name: clones[id(buffer)] for name, buffer in buffers.items()}


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Use a seed inside the block; yield a function that tells whether random numbers were drawn.

    The random state is restored afterwards.
    """
    cuda = device.type == "cuda"

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    with torch.random.fork_rng([device] if cuda else []):
        torch.manual_seed(seed)
        begun = states()
        yield lambda: not all(map(torch.equal, begun, states()))


@contextmanager
def _all_intercepted(backbone: nn.Module, calls: Callable[[], int]) -> Iterator[None]:
    """Raise if a custom batch norm runs without calling `F.batch_norm`."""
    names = {
        m: n
        for n, m in backbone.named_modules()
        if uses_batch_statistics(m) and type(m) not in EXACT
    }
    before: dict[nn.Module, int] = {}

    def begin(norm: nn.Module, _: Any) -> None:
        before[norm] = calls()

    def end(norm: nn.Module, *_: Any) -> None:
        if calls() == before[norm]:
            kind = f"{names[norm]} ({type(norm).__name__})"
            raise ConfigError(
                f"recompute cannot split {kind}, which does not call F.batch_norm; {WITHOUT}"
            )

    with ExitStack() as hooks:
        for norm in names:
            hooks.enter_context(norm.register_forward_pre_hook(begin))
            hooks.enter_context(norm.register_forward_hook(end))
        yield
