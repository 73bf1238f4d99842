"""Evaluation of patches on a CPU, in groups that fit its cache."""
# Shape letters: N patches, C image channel, P patch pixels.

import copy
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

VALUES = 5 << 17  # of patches: 8 colour patches of 160 pixels
BYTES = 25 << 19  # of the largest activation of all patches
KEPT = 31 << 20  # bytes of the largest block that the C library can keep for reuse
LARGE = 21 << 20  # bytes of the largest activation of a large group; a few of them are kept
TRIED = 13  # patches of the trial; a prime number, which the sizes of weights rarely contain


class _Trial(NamedTuple):
    """What is known about a backbone.

    `largest` is the number of bytes of the largest activation of one patch, or 0. `channels_last`
    is whether this memory format suits the backbone, and `checked` whether it has been tried.
    """

    largest: int = 0
    channels_last: bool = False
    checked: bool = False


_trials: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], _Trial]] = WeakKeyDictionary()


def evaluate_groups(
    backbone: nn.Module, evaluate: Callable[[Tensor], Tensor], patches: Tensor
) -> Tensor:
    """Evaluate patches (N, C, P, P) in groups that fit the cache, and return (N, K).

    More than a few patches for a backbone with convolutions are in the memory format
    ``channels_last``: on 2 cores, EfficientNet-Lite0 takes 0.76 of the time, DenseNet-121 0.78 and
    ResNet-18 0.86. The first time, and after a module was replaced, one group is evaluated in both
    formats. If the results differ, or the backbone fails, it gets the default format from then on.
    """
    groups = patches.split(patches_at_once(backbone, patches))
    trial = _try_once(backbone, patches) if len(patches) > _usual(patches) else _Trial()
    run = partial(_run, evaluate)
    if not trial.channels_last or (not trial.checked and _are_blank(groups[0])):
        return torch.cat([run(group) for group in groups])
    formatted = (group.contiguous(memory_format=torch.channels_last) for group in groups)
    if trial.checked:
        return torch.cat([run(group) for group in formatted])
    expected = run(groups[0])
    first = _try_channels_last(run, next(formatted), expected)
    trial = trial._replace(channels_last=first is not None, checked=True)
    _trials[backbone][_key(backbone, patches)] = trial
    if first is None:
        return torch.cat([expected, *(run(group) for group in groups[1:])])
    return torch.cat([first, *(run(group) for group in formatted)])


def _run(evaluate: Callable[[Tensor], Tensor], patches: Tensor) -> Tensor:
    """Return a copy of the results: a backbone can write them all into one tensor."""
    return evaluate(patches).clone()


def _are_blank(patches: Tensor) -> bool:
    """Whether each patch has one colour, so that the order of its pixels has no effect."""
    return torch.equal(patches[..., :1, :1].expand_as(patches), patches)


def _try_channels_last(
    evaluate: Callable[[Tensor], Tensor], patches: Tensor, expected: Tensor
) -> Tensor | None:
    """Return the results (N, K) of patches in this format, or None unless they are as expected.

    The trial does not change the random state.
    """
    try:
        with torch.random.fork_rng([]):
            found = evaluate(patches)
    except Exception:  # Tensor.view, for instance, can require the default format
        return None
    bound = torch.finfo(expected.dtype).eps ** 0.5 * expected.abs().max()
    return found if (found - expected).abs().max() <= bound else None


def patches_at_once(backbone: nn.Module, patches: Tensor) -> int:
    """Return how many of the patches (N, C, P, P) fit the cache and are evaluated at a time.

    All groups have about the same size: a patch alone takes 1.2 to 1.5 times as long. In the format
    ``channels_last``, up to twice as many patches are fastest, and up to four times as many if
    their activations are small: of 160 pixels, 8 for EfficientNet-Lite0, 13 for ResNet-18 and 32
    for ViT-Tiny.
    """
    count, usual = len(patches), _usual(patches)
    most = usual
    if count > usual:
        trial = _try_once(backbone, patches)
        if trial.channels_last:
            most = max(usual, min(2 * usual, LARGE // trial.largest))
        if trial.largest:
            most = min(4 * usual, max(most, BYTES // trial.largest))
    return max(1, math.ceil(count / max(1, math.ceil(count / most))))


def _usual(patches: Tensor) -> int:
    """Return how many patches (N, C, P, P) are evaluated at a time if nothing else is known."""
    return max(1, VALUES // max(1, patches.shape[1:].numel()))


def _try_once(backbone: nn.Module, patches: Tensor) -> _Trial:
    known, key = _trials.setdefault(backbone, {}), _key(backbone, patches)
    if key not in known:
        _keep_freed_blocks()
        known[key] = _try_out(backbone, patches)
    return known[key]


@cache
def _keep_freed_blocks() -> None:
    """Let the C library keep freed blocks of up to `KEPT` bytes.

    glibc returns larger blocks than any it has freed to the system, and the pages of new ones cost
    up to 40 % of the time of EfficientNet-Lite0. Freeing one block, which is never written, raises
    this limit. It is 32 MB at most.
    """
    torch.empty(KEPT, dtype=torch.uint8)


def _key(backbone: nn.Module, patches: Tensor) -> tuple[object, ...]:
    """Return what a trial depends on; a replaced module or a hook can need another format."""
    modules = tuple(
        (id(m), type(m), id(vars(m).get("forward")), _is_hooked(m)) for m in backbone.modules()
    )
    return modules, patches.shape[1:], patches.dtype


def _try_out(backbone: nn.Module, patches: Tensor) -> _Trial:
    """Run a copy of the backbone on the device meta, which computes shapes only."""
    modules = list(backbone.modules())
    if _has_any_global_hook() or any(map(_is_hooked, modules)):
        return _Trial()  # hooks would see the trial
    tensors = [*backbone.parameters(), *backbone.buffers()]
    try:
        other = copy.deepcopy(backbone, {id(t): t.detach().to("meta") for t in tensors})
        shape = (TRIED, *patches.shape[1:])
        with torch.no_grad(), torch.random.fork_rng([]), _LargestOutput() as found:
            other(torch.empty(shape, dtype=patches.dtype, device="meta"))
    except Exception:  # modules can require real patches
        return _Trial()
    convolutions = sum(isinstance(module, nn.Conv2d) for module in modules)
    largest = found.size // TRIED
    return _Trial(largest, largest > 0 and convolutions > 1 and patches.shape[1] > 1)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _LargestOutput(TorchDispatchMode):
    """Record the bytes of the largest output of an operation that depends on the patches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor) and output.numel() % TRIED == 0:
                self.size = max(self.size, output.numel() * output.element_size())
        return outputs
