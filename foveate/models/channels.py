"""Scale channels: one backbone, shared by rescaled copies of the image, pooled over scale."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels, K classes.

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from foveate.errors import ConfigError
from foveate.models.pooling import Mixing, Pool, check_pool, pool_scales
from foveate.models.recompute import answer_in_groups, by_batch
from foveate.models.search import SearchResult, search
from foveate.resampling import Padding, check_window, foveate
from foveate.scales import MAX_SCALES, ScaleGrid, as_scales
from foveate.tracing import watched

PAPER_SCALES = ScaleGrid(0.5, 8, per_octave=4)
CACHED = 1 << 19  # values of the patches that a CPU evaluates at a time


class ScaleChannels(nn.Module):
    """Apply a backbone, with shared weights, to windows of many sizes, and pool its logits.

    Channel s shows the backbone a window of ``size * s`` pixels about the image centre, resampled
    to `size` pixels. The state dict holds the weights of the backbone (and of the mixture for
    "concat"); scales are not part of it. Pooling is over logits, so softmax belongs to the loss.
    A NaN in the window of a channel makes all logits of its image NaN.

    Args:
        backbone: Module from patches ``(N, C, P, P)`` to logits ``(N, K)``.
        scales: Scales of the channels, increasing.
        size: Width and height P of a patch in pixels.
        pool: "max", "avg", "logsumexp" and "probabilities" (the logarithm of their mean) are
            invariant to scale; "concat" learns a mixture of all channels and is not.
        padding: What windows see outside the image: "border", "reflect" or a constant.
        antialias: Whether to filter before downsampling. It is slower and suits photographs.
        classes: Number of classes K; needed for "concat" only.
        recompute: Number of channels to train at a time where the activations of all do not fit in
            memory, or 0. The gradients are the same; training takes longer.

    Shape:
        - Input: ``(B, C, H, W)``, any height and width.
        - Output: ``(B, K)``.

    Raises:
        ConfigError: If an argument cannot work; the message names it with its value.

    Example:
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
        check_pool(pool)
        check_window(size, padding)
        if classes is not None and (not isinstance(classes, int) or classes < 1):
            raise ConfigError(f"classes must be a whole number of at least 1, got {classes!r}")
        self.backbone = backbone
        self.size, self.pool, self.padding, self.antialias = size, pool, padding, antialias
        self.recompute = recompute
        self._scales = as_scales(scales)
        self.mixing: Mixing | None = None
        if pool == "concat":
            if classes is None:
                raise ConfigError("pool 'concat' learns weights per class: pass classes=")
            self.mixing = Mixing(len(self._scales), classes)

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales of the channels; may be set, also after training, for all pools but concat."""
        return self._scales

    @scales.setter
    def scales(self, scales: ScaleGrid | Sequence[float]) -> None:
        if self.mixing is not None:
            raise ConfigError("pool 'concat' has learned weights for its scales: build a new net")
        self._scales = as_scales(scales)

    @property
    def recompute(self) -> int:
        """Channels to train at a time, or 0 for all; may be set."""
        return self._recompute

    @recompute.setter
    def recompute(self, channels: int) -> None:
        if not isinstance(channels, int) or not 0 <= channels <= MAX_SCALES:
            raise ConfigError(
                f"recompute must be a number of channels, or 0, got {channels!r}; "
                f"the limit is {MAX_SCALES:,}"
            )
        self._recompute = channels

    def patches(self, images: Tensor, centres: Tensor | None = None) -> Tensor:
        """Cut images (B, C, H, W) into the patches of the channels, (B, S, C, P, P)."""
        return foveate(
            images,
            self._scales,
            self.size,
            padding=self.padding,
            antialias=self.antialias,
            centres=centres,
        )

    def channels(self, images: Tensor, centres: Tensor | None = None) -> Tensor:
        """Compute the logits (B, S, K) of every channel.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.
            centres: Centres (y, x) of the windows in pixels, shape ``(B, 2)``; by default the
                image centre.
        """
        return self.forward_patches(self.patches(images, centres))

    def forward_patches(self, patches: Tensor) -> Tensor:
        """Run the backbone on patches (B, S, C, P, P) that were cut before: logits (B, S, K)."""
        mask, flat = self.draw_mask(patches), patches.flatten(0, 1)
        ask = partial(self._ask, mask=mask)
        if mask is None and self._is_separable(patches):
            parts = flat.split(self._at_once(patches))
            outputs = torch.cat([ask(self.backbone, part) for part in parts])
        elif self.recompute and not torch.compiler.is_compiling():
            return answer_in_groups(self.backbone, ask, patches, self.recompute)
        else:
            outputs = ask(self.backbone, flat)
        return outputs.unflatten(0, patches.shape[:2])  # type: ignore[no-any-return]

    def draw_mask(self, images: Tensor) -> Tensor | None:
        """Draw a dropout mask that all channels of an image share.

        An average over channels would undo dropout that each channel draws anew. A backbone may
        offer `draw_mask(images)` and take its result as the second argument of `forward`, as
        `ConvNet` does. Returns None for other backbones and other pools: they apply their own
        dropout.
        """
        if self.pool != "avg" or not hasattr(self.backbone, "draw_mask"):
            return None
        return self.backbone.draw_mask(images)  # type: ignore[no-any-return, operator]

    def combine(self, outputs: Tensor) -> Tensor:
        """Pool the outputs (B, S, K) of the channels into logits (B, K)."""
        if self.mixing is None:
            return pool_scales(outputs, self.pool)
        if outputs.shape[1:].numel() != self.mixing.in_features:
            raise ConfigError(
                f"classes={self.mixing.out_features} does not fit a backbone with "
                f"{outputs.shape[2]} outputs"
            )
        return self.mixing(outputs)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (B, K) of images (B, C, H, W)."""
        return self.combine(self.channels(images))

    def select_scale(self, images: Tensor) -> Tensor:
        """Estimate the scale at which each image's predicted class responds most strongly.

        The strongest channel is refined by fitting a parabola over log scale through it and its
        two neighbours.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.

        Returns:
            Estimated scale per image, shape ``(B,)``, in units of the channel scales.
        """
        outputs = self.channels(images)
        label = self.combine(outputs).argmax(1)
        logits = outputs[torch.arange(outputs.shape[0], device=outputs.device), :, label]
        return refine_scale(logits, self._scales)

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
        """Find the most strongly responding object of each image, wherever it is.

        The network is evaluated about a grid of centres at all scales, without gradients. The grid
        has the middle of the image as one of its places, so ``net(images)`` is one candidate.
        Places about the best ones are then evaluated with half the step, `refine` times. The place
        and class with the largest logit win, pooled over scale as in `forward`; the window is that
        of the channel with the largest logit of this class. Any backbone can be searched with.
        With pool ``max`` and `refine` 0 this is the maximum over all centres, scales and classes.

        The network may have been trained on centred objects only. Its predictions between objects
        and on parts of them are then less reliable than on centred objects.

        Args:
            images: Batch of images of any size, shape ``(B, C, H, W)``.
            step: Pixels between the centres of the coarse grid; the smallest window if None.
            refine: Number of times that the step is halved. 0 evaluates the coarse grid only.
            beam: Number of places that are refined.
            maps: Whether to return the logits of the coarse grid as well. Place ``(i, j)`` of
                ``(h, w)`` is ``(i - h // 2, j - w // 2)`` steps from the middle of the image.
            batch_size: Centres evaluated at a time; about 64 MB of patches if None.

        Returns:
            Class, centre, window and confidence of each image, as a
            [`SearchResult`][foveate.models.search.SearchResult].

        Raises:
            ConfigError: If an argument is invalid, the network is in training mode, or the grid has
                more than 1,048,576 places.

        Example:
            >>> net = ScaleChannels(backbone, ScaleGrid(0.5, 8, per_octave=2), size=28).eval()
            >>> found = net.search(images, step=16)
            >>> found.classes.shape, found.centres.shape
            (torch.Size([2]), torch.Size([2, 2]))
        """
        return search(
            self, images, step, refine=refine, beam=beam, maps=maps, batch_size=batch_size
        )

    def extra_repr(self) -> str:
        """Say what print(net) cannot see."""
        low, high = self._scales[0], self._scales[-1]
        return f"{len(self._scales)} scales {low:g} to {high:g}, size={self.size}, pool={self.pool}"

    def _is_separable(self, patches: Tensor) -> bool:
        """Whether every patch is computed alone, with nothing kept for a gradient."""
        if torch.is_grad_enabled() or watched(patches):
            return False
        return not any(module.training or by_batch(module) for module in self.backbone.modules())

    def _at_once(self, patches: Tensor) -> int:
        """How many patches to evaluate at a time: on a CPU those that fit the cache."""
        if patches.device.type == "cpu":
            return max(1, CACHED // max(1, patches.shape[2:].numel()))
        return max(1, patches.shape[0] * (self.recompute or patches.shape[1]))

    def _ask(self, backbone: Callable[..., Tensor], patches: Tensor, mask: Tensor | None) -> Tensor:
        """Run the backbone on patches (N, C, P, P), and check that it gives (N, K)."""
        given = (patches,) if mask is None else (patches, mask)
        try:
            outputs = backbone(*given)
        except (RuntimeError, ValueError, AssertionError) as error:
            if torch.compiler.is_compiling() or not _shape_refused(self.backbone, given):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"the backbone refused patches of the shape {tuple(patches.shape)} ({reason}); "
                "does it take this size and number of channels?"
            ) from error
        count = patches.shape[0]  # not len(), which would fix the batch size of an export
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[0] != count:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(
                f"the backbone must map {tuple(patches.shape)} to ({count}, classes), got {got}"
            )
        return outputs


def _shape_refused(backbone: nn.Module, given: tuple[Tensor, ...]) -> bool:
    """Whether the backbone, all zeros and on the CPU, refuses two patches of zeros as well."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in backbone.modules()):
        return False
    tensors = [*backbone.named_parameters(), *backbone.named_buffers()]
    zeros = {name: _zeros(tensor, tensor.shape) for name, tensor in tensors}
    two = tuple(_zeros(tensor, (2, *tensor.shape[1:])) for tensor in given)
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            functional_call(backbone, zeros, two)
    except (RuntimeError, ValueError, AssertionError):
        return True
    return False


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    dtype = torch.float32 if like.is_floating_point() else like.dtype
    return torch.zeros(shape, dtype=dtype, device="cpu")


def refine_scale(logits: Tensor, scales: Sequence[float]) -> Tensor:
    """Find the scale (B,) of the largest of logits (B, S), refined between the channels."""
    position = torch.tensor(scales, dtype=torch.float64, device=logits.device).log2()
    best = logits.argmax(1)
    if len(scales) < 3:
        return position[best].exp2().to(logits.dtype)
    middle = best.clamp(1, len(scales) - 2)
    near = torch.stack([middle - 1, middle, middle + 1], 1)
    x, y = position[near], logits.gather(1, near).double()
    # The parabola through three points: slopes left and right, and the curvature between them.
    left = (y[:, 1] - y[:, 0]) / (x[:, 1] - x[:, 0])
    right = (y[:, 2] - y[:, 1]) / (x[:, 2] - x[:, 1])
    curvature = (right - left) / (x[:, 2] - x[:, 0])
    top = (x[:, 0] + x[:, 1]) / 2 - left / (2 * curvature)
    inside = (best == middle) & (curvature < 0)
    return torch.where(inside, top, position[best]).exp2().to(logits.dtype)
