"""Scale channels: one backbone, shared by rescaled copies of the image, pooled over scale."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from foveate.checks import check_choice
from foveate.errors import ConfigError
from foveate.models.chunks import evaluate_groups
from foveate.models.lazy import (
    all_patches,
    check_lazy,
    is_lazy,
    is_separable,
    lazy_inputs,
    lazy_logits,
)
from foveate.models.pooling import Mixing, Pool, class_logits, pool_scales
from foveate.models.recompute import forward_in_groups
from foveate.models.search import SearchResult, search
from foveate.resampling import Padding, check_window, foveate
from foveate.scales import MAX_SCALES, ScaleGrid, as_scales
from foveate.tracing import is_transformed

PAPER_SCALES = ScaleGrid(0.5, 8, per_octave=4)


class ScaleChannels(nn.Module):
    """Apply one backbone to windows of many sizes and pool the logits over scale.

    The channel of scale s resamples a window of ``size * s`` pixels about the image centre to a
    patch of ``size`` pixels. All channels share the weights of the backbone. Pooling acts on
    logits, so softmax belongs to the loss. A NaN in the window of a channel makes all logits of its
    image NaN.

    The state dict contains the weights of the backbone, and those of the mixing layer for
    ``pool="concat"``. It does not contain the scales, so weights can be loaded into a network with
    other scales.

    Args:
        backbone: Module from patches ``(N, C, P, P)`` to logits ``(N, K)``.
        scales: Scales of the channels, increasing.
        size: Width and height P of a patch in pixels.
        pool: ``"max"``, ``"avg"``, ``"logsumexp"`` or ``"probabilities"`` (the logarithm of the
            mean probability) make the network scale-invariant. ``"concat"`` applies a learned
            linear layer to the logits of all channels, which is not invariant.
        padding: Values outside the image: ``"border"``, ``"reflect"`` or a constant.
        antialias: Whether to low-pass filter before downsampling. This is slower and suits
            photographs.
        classes: Number of classes K, required for ``pool="concat"`` only.
        recompute: Number of channels whose activations are in memory at a time during training, or
            0 for all. A small number saves memory and costs time; the gradients are the same.
            Compilers, tracers and `torch.func` always use all channels.

    Shape:
        - Input: ``(B, C, H, W)``, any height and width.
        - Output: ``(B, K)``.

    Raises:
        ConfigError: If an argument is invalid; the message contains its name and value.

    Examples:
        >>> import torch
        >>> from foveate import ScaleChannels, ScaleGrid, create_model
        >>> backbone = create_model("cnn", size=28, features=(16, 16), num_classes=10)
        >>> net = ScaleChannels(backbone, ScaleGrid(0.5, 8, per_octave=4), size=28).eval()
        >>> net(torch.zeros(2, 1, 112, 112)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        backbone: nn.Module,
        scales: ScaleGrid | Sequence[float] = PAPER_SCALES,
        size: int = 28,
        pool: Pool = "max",
        *,
        padding: Padding = "border",
        antialias: bool = False,
        classes: int | None = None,
        recompute: int = 0,
    ) -> None:
        super().__init__()
        check_choice("pool", pool, get_args(Pool))
        check_window(size, padding)
        if classes is not None and (not isinstance(classes, int) or classes < 1):
            raise ConfigError(f"classes must be a whole number of at least 1, got {classes!r}")
        self.backbone = backbone
        self.size, self.pool, self.padding, self.antialias = size, pool, padding, antialias
        self.recompute = recompute
        self.lazy = None
        self._scales = as_scales(scales)
        self.mixing: Mixing | None = None
        if pool == "concat":
            if classes is None:
                raise ConfigError("pool='concat' requires the number of classes; pass classes=")
            self.mixing = Mixing(len(self._scales), classes)

    @property
    def scales(self) -> tuple[float, ...]:
        """Scales of the channels; can be set at any time, except with ``pool="concat"``."""
        return self._scales

    @scales.setter
    def scales(self, scales: ScaleGrid | Sequence[float]) -> None:
        if self.mixing is not None:
            raise ConfigError(
                "cannot set scales with pool='concat', which has weights per scale; build a new net"
            )
        self._scales = as_scales(scales)

    @property
    def recompute(self) -> int:
        """Number of channels in memory at a time in training, or 0 for all; can be set."""
        return self._recompute

    @recompute.setter
    def recompute(self, channels: int) -> None:
        if not isinstance(channels, int) or not 0 <= channels <= MAX_SCALES:
            raise ConfigError(
                f"recompute must be a number of channels from 0 to {MAX_SCALES:,}, got {channels!r}"
            )
        self._recompute = channels

    @property
    def lazy(self) -> float | None:
        """Tolerance of lazy evaluation in logits, or None (default) for all channels; can be set.

        With a tolerance, `forward` evaluates every fourth channel, and more channels only for
        images whose best class leads by no more than the tolerance. The predicted class rarely
        differs; the logits are pooled over the evaluated channels. Choose the tolerance with
        [`calibrate`][foveate.evaluation.calibration.calibrate]. Lazy evaluation requires
        ``pool="max"`` or ``pool="logsumexp"``, evaluation mode and ``torch.no_grad()``. Training,
        tracing, `channels`, `select_scale` and `search` use all channels, and so do subclasses that
        override ``channels``, ``forward_patches`` or ``combine``.
        """
        return self._lazy

    @lazy.setter
    def lazy(self, tolerance: float | None) -> None:
        check_lazy(tolerance, self.pool)
        self._lazy = tolerance

    def patches(self, images: Tensor, centres: Tensor | None = None) -> Tensor:
        """Cut images into the patches of the channels.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.
            centres: Centres (y, x) of the windows in pixels, shape ``(B, 2)``; by default the
                image centre.

        Returns:
            Patches, shape ``(B, S, C, P, P)``.
        """
        return foveate(
            images,
            self._scales,
            self.size,
            padding=self.padding,
            antialias=self.antialias,
            centres=centres,
        )

    def channels(self, images: Tensor, centres: Tensor | None = None) -> Tensor:
        """Compute the logits of every channel.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.
            centres: Centres (y, x) of the windows in pixels, shape ``(B, 2)``; by default the
                image centre.

        Returns:
            Logits of the channels, shape ``(B, S, K)``.

        Raises:
            ConfigError: If the images have the wrong shape or dtype, or the backbone rejects the
                patches or does not return logits ``(N, K)``.
        """
        return self.forward_patches(self.patches(images, centres))

    def forward_patches(self, patches: Tensor) -> Tensor:
        """Run the backbone on the patches that `patches` returns.

        Args:
            patches: Patches of all channels, shape ``(B, S, C, P, P)``. A backbone that changes its
                input in place can change them.

        Returns:
            Logits of the channels, shape ``(B, S, K)``.

        Raises:
            ConfigError: If the backbone rejects the patches or does not return logits ``(N, K)``.
        """
        mask, flat = self.draw_mask(patches), patches.flatten(0, 1)
        run_backbone = partial(self._run_backbone, mask=mask)
        if mask is None and is_separable(self.backbone, patches):
            run_part = partial(run_backbone, self.backbone)
            if flat.device.type == "cpu":
                outputs = evaluate_groups(self.backbone, run_part, flat)
            else:
                parts = flat.split(max(1, len(patches) * self.recompute or len(flat)))
                outputs = torch.cat([run_part(part).clone() for part in parts])
        elif self.recompute and not is_transformed(patches):
            return forward_in_groups(self.backbone, run_backbone, patches, self.recompute)
        else:
            outputs = run_backbone(self.backbone, flat)
        return outputs.unflatten(0, patches.shape[:2])  # type: ignore[no-any-return]

    def draw_mask(self, images: Tensor) -> Tensor | None:
        """Draw a dropout mask that all channels of an image share, for ``pool="avg"``.

        Averaging over channels would cancel dropout that is independent per channel. A backbone
        opts in as `ConvNet` does: with a method ``draw_mask(images)``, and a second argument of
        ``forward`` that receives the result. Other backbones apply their own dropout.

        Args:
            images: Batch of B images or their patches.

        Returns:
            The mask, or None for other pools, for backbones without ``draw_mask``, or if dropout
            is inactive.
        """
        if self.pool != "avg" or not hasattr(self.backbone, "draw_mask"):
            return None
        return self.backbone.draw_mask(images)  # type: ignore[no-any-return, operator]

    def combine(self, outputs: Tensor) -> Tensor:
        """Pool the logits of the channels.

        Args:
            outputs: Logits of the channels, shape ``(B, S, K)``.

        Returns:
            Logits, shape ``(B, K)``.

        Raises:
            ConfigError: If ``pool="concat"`` and the shape differs from the number of scales and
                classes given to the constructor.
        """
        if self.mixing is None:
            return pool_scales(outputs, self.pool)
        if outputs.shape[1:].numel() != self.mixing.in_features:
            raise ConfigError(
                f"classes={self.mixing.out_features} does not match a backbone with "
                f"{outputs.shape[2]} outputs"
            )
        return self.mixing(outputs)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of images.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.

        Returns:
            Logits, shape ``(B, K)``.
        """
        if not is_lazy(self):
            return self.combine(self.channels(images))
        inputs = lazy_inputs(self, images)
        if (logits := lazy_logits(self, inputs)) is not None:
            return logits
        return self.combine(self.forward_patches(all_patches(self, inputs)))

    def select_scale(self, images: Tensor) -> Tensor:
        """Estimate the scale at which each image's predicted class responds most strongly.

        The strongest channel is refined by fitting a parabola over log scale through it and its
        two neighbours.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.

        Returns:
            Estimated scale per image, shape ``(B,)``, in units of the channel scales.

        Examples:
            >>> import torch
            >>> from foveate import create_model
            >>> net = create_model("fovmax").eval()
            >>> net.select_scale(torch.zeros(2, 1, 112, 112)).shape
            torch.Size([2])
        """
        outputs = self.channels(images)
        return refine_scale(class_logits(outputs, self.combine(outputs).argmax(1)), self._scales)

    def search(
        self,
        images: Tensor,
        step: float | None = None,
        *,
        refine: int = 3,
        beam: int = 8,
        maps: bool = False,
        batch_size: int | None = None,
    ) -> SearchResult:
        """Find the position, scale and class with the strongest response in each image.

        The network is evaluated at a coarse grid of centres and at all scales, without gradients.
        The image centre is part of the grid, so ``net(images)`` is one of the candidates. The
        neighbourhoods of the best ``beam`` positions are then evaluated with half the step,
        ``refine`` times.

        The result is the position and class with the largest logit after pooling over scale as in
        `forward`. Its window is that of the channel with the largest logit of this class. With
        ``pool="max"`` and ``refine=0`` this is the maximum over all grid positions, scales and
        classes. Every backbone is supported.

        A network that was trained on centred objects only is less reliable between objects and on
        parts of objects than on centred objects.

        Args:
            images: Batch of images of any size, shape ``(B, C, H, W)``.
            step: Distance between centres of the coarse grid in pixels; by default the side of the
                smallest window.
            refine: Number of times the step is halved. 0 evaluates the coarse grid only.
            beam: Number of positions to refine.
            maps: Whether to also return the logits of the coarse grid. Position ``(i, j)`` of
                ``(h, w)`` is ``(i - h // 2, j - w // 2)`` steps from the image centre.
            batch_size: Number of centres evaluated at a time; by default about 64 MB of patches.

        Returns:
            Class, centre, window and confidence of each image, as a
            [`SearchResult`][foveate.models.search.SearchResult].

        Raises:
            ConfigError: If an argument is invalid, the network is in training mode, or the grid has
                more than 1,048,576 positions.

        Examples:
            >>> import torch
            >>> from foveate import create_model
            >>> net = create_model("fovmax").eval()
            >>> found = net.search(torch.zeros(2, 1, 64, 64), step=32, refine=1)
            >>> found.classes.shape, found.centres.shape
            (torch.Size([2]), torch.Size([2, 2]))
        """
        return search(
            self, images, step, refine=refine, beam=beam, maps=maps, batch_size=batch_size
        )

    def extra_repr(self) -> str:
        """Return the settings that ``print(net)`` shows.

        Returns:
            Number and range of the scales, patch size and pool.
        """
        low, high = self._scales[0], self._scales[-1]
        return f"{len(self._scales)} scales {low:g} to {high:g}, size={self.size}, pool={self.pool}"

    def _run_backbone(
        self, backbone: Callable[..., Tensor], patches: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Run the backbone on patches (N, C, P, P) and check that it returns (N, K)."""
        given = (patches,) if mask is None else (patches, mask)
        try:
            outputs = backbone(*given)
        except (RuntimeError, ValueError, AssertionError) as error:
            if torch.compiler.is_compiling() or not _shape_refused(self.backbone, given):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"the backbone rejected patches of shape {tuple(patches.shape)}: {reason}; "
                "check that it accepts this size and number of channels"
            ) from error
        count = patches.shape[0]  # len() would fix the batch size of an exported program
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[0] != count:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(
                f"the backbone must map {tuple(patches.shape)} to ({count}, classes), got {got}"
            )
        return outputs


def _shape_refused(backbone: nn.Module, given: tuple[Tensor, ...]) -> bool:
    """Whether a zero-weight copy of the backbone on the CPU also rejects two zero patches.

    The backbone itself can be in use by other threads.
    """
    script = torch.jit.ScriptModule
    if any(isinstance(m, script) or "forward" in vars(m) for m in backbone.modules()):
        return False  # a copy would run with the original weights
    tensors = (*backbone.parameters(), *backbone.buffers())
    try:
        copied = copy.deepcopy(backbone, {id(t): _zeros(t, t.shape) for t in tensors})
    except Exception:  # uninitialised parameters have no shape, and modules can forbid copies
        return False
    two = tuple(_zeros(tensor, (2, *tensor.shape[1:])) for tensor in given)
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            copied(*two)
    except (RuntimeError, ValueError, AssertionError):
        return True
    return False


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    dtype = torch.float32 if like.is_floating_point() else like.dtype
    return torch.zeros(shape, dtype=dtype, device="cpu")


def refine_scale(logits: Tensor, scales: Sequence[float]) -> Tensor:
    """Return the scale (B,) of the largest of logits (B, S), interpolated between channels."""
    position = torch.tensor(scales, dtype=torch.float64, device=logits.device).log2()
    best = logits.argmax(1)
    if len(scales) < 3:
        return position[best].exp2().to(logits.dtype)
    middle = best.clamp(1, len(scales) - 2)
    near = torch.stack([middle - 1, middle, middle + 1], 1)
    x, y = position[near], logits.gather(1, near).double()
    # The parabola through three points: left and right slopes, and their divided difference.
    left = (y[:, 1] - y[:, 0]) / (x[:, 1] - x[:, 0])
    right = (y[:, 2] - y[:, 1]) / (x[:, 2] - x[:, 1])
    curvature = (right - left) / (x[:, 2] - x[:, 0])
    top = (x[:, 0] + x[:, 1]) / 2 - left / (2 * curvature)
    inside = (best == middle) & (curvature < 0)
    return torch.where(inside, top, position[best]).exp2().to(logits.dtype)
