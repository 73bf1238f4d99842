"""Create backbones for scale channels from timm, torchvision or a factory function."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate.checks import suggest
from foveate.data.recipes import INSTALL
from foveate.errors import ConfigError
from foveate.models.pretrained import find_non_finite
from foveate.trust import find_factory, is_own, require_trust

LIBRARIES = ("timm", "torchvision")  # timm:NAME and torchvision:NAME import no other code


def needs_trust(spec: str) -> bool:
    """Whether building the backbone imports and calls code of others that `spec` names."""
    return spec.partition(":")[0] not in LIBRARIES and not is_own(spec)


def make_backbone(
    spec: str, *, channels: int, classes: int, size: int, pretrained: bool, trust: bool
) -> nn.Module:
    """Create a backbone that maps patches (N, C, P, P) to logits (N, K).

    `TrainConfig` describes `spec`, its backbone. `size` is P. With `pretrained`, the weights of the
    library are downloaded, and the classifier is reinitialised. Without `trust`, a factory of
    another package is neither imported nor called.
    """
    library, _, name = spec.partition(":")
    if library in LIBRARIES:
        make = _of_timm if library == "timm" else _of_torchvision
        return make(name, channels, classes, size, pretrained)
    if pretrained:
        raise ConfigError(f"pretrained needs timm:NAME or torchvision:NAME, got {spec!r}")
    if needs_trust(spec):
        require_trust(trust, f"the backbone {spec!r} would be imported and called")
    factory = find_factory(spec)
    options = {"channels": channels, "classes": classes}
    with suppress(TypeError, ValueError):  # some functions written in C have no signature
        if "size" in signature(factory).parameters:
            options["size"] = size
    return _checked(spec, factory, **options)


def load_backbone(
    backbone: nn.Module, weights: dict[str, Tensor], path: Path, new_head: bool = True
) -> None:
    """Load weights into a backbone; with `new_head`, except a classifier for other classes."""
    counts = ".num_batches_tracked"  # some files lack it
    own = {n: t for n, t in backbone.state_dict().items() if not n.endswith(counts)}
    weights = {n: t for n, t in weights.items() if not n.endswith(counts)}
    if names := sorted(own.keys() ^ weights.keys()):
        problem = "lacks the weight" if names[0] in own else "has the unknown weight"
        raise ConfigError(f"{path} {problem} {names[0]!r}; use weights saved from this backbone")
    if broken := find_non_finite(weights):
        raise ConfigError(f"{path} has non-finite values in {broken}; use another file")
    other = [name for name in own if own[name].shape != weights[name].shape]
    heads = {name.rpartition(".")[0] for name in other}
    head_only = len(heads) == 1 and all(own[n].shape[1:] == weights[n].shape[1:] for n in other)
    if other and not (new_head and head_only):
        got, wanted = tuple(weights[other[0]].shape), tuple(own[other[0]].shape)
        raise ConfigError(
            f"{path} has {other[0]!r} of shape {got}, but the backbone needs {wanted}; "
            "use weights saved from this backbone"
        )
    backbone.load_state_dict({n: t for n, t in weights.items() if n not in other}, strict=False)
    _start_at_zero(own[name] for name in other)


def _start_at_zero(head: Iterable[Tensor]) -> None:
    """Give a new classifier equal logits for all classes.

    timm initialises some with weights so large that the channels disagree strongly at first.
    """
    with torch.no_grad():
        for tensor in head:
            tensor.zero_()


def _of_timm(name: str, channels: int, classes: int, size: int, pretrained: bool) -> nn.Module:
    options: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    if fixed_size(name):
        options["img_size"] = size
    net: Any = timm_model(name, pretrained=pretrained, **options)
    if pretrained and net.pretrained_cfg["num_classes"] != classes:
        _start_at_zero(net.get_classifier().parameters())
    return net  # type: ignore[no-any-return]


def timm_model(name: str, **options: Any) -> nn.Module:
    """Create a timm model."""
    timm = _import("timm", name)
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    return _checked(f"timm:{name}", timm.create_model, name, **options)


def classes_of(name: str, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the ``num_classes`` of weights of a timm model; empty if they do not tell."""
    settings: Any = _import("timm", name).get_pretrained_cfg(name)
    head = weights.get(f"{settings and settings.classifier}.weight")
    return {} if head is None else {"num_classes": len(head)}


def fixed_size(name: str) -> bool:
    """Whether a timm model has a fixed input size, as vision transformers do."""
    settings: Any = _import("timm", name).get_pretrained_cfg(name)
    return settings is not None and bool(settings.fixed_input_size)


def normalisation(spec: str) -> dict[str, tuple[float, ...]]:
    """Return the mean and std with which a timm model was trained; empty for other models."""
    library, _, name = spec.partition(":")
    settings: Any = _import("timm", name).get_pretrained_cfg(name) if library == "timm" else None
    if settings is None or len(settings.mean) != 3:
        return {}
    return {"mean": tuple(settings.mean), "std": tuple(settings.std)}


def _import(library: str, name: str) -> Any:
    try:
        return import_module(library)
    except Exception as error:  # torchvision can also raise other errors than ImportError
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{library}:{name} needs {library} ({reason}); {INSTALL}") from None


def _of_torchvision(
    name: str, channels: int, classes: int, size: int, pretrained: bool
) -> nn.Module:
    models = _import("torchvision", name).models
    if name not in models.list_models(module=models):
        raise _unknown("torchvision", name, models.list_models(module=models))
    if channels != 3:
        raise ConfigError(
            f"torchvision:{name} takes images of 3 channels, got {channels}; use a timm model"
        )
    net = _checked(
        f"torchvision:{name}", models.get_model, name, weights="DEFAULT" if pretrained else None
    )
    linear = [module for module in net.named_modules() if type(module[1]) is nn.Linear]
    if not linear:
        raise ConfigError(f"torchvision:{name} does not end in a linear layer; use a factory")
    place, head = linear[-1]
    owner, _, last = place.rpartition(".")
    new = nn.Linear(head.in_features, classes, bias=head.bias is not None)
    if pretrained:
        _start_at_zero(new.parameters())
    setattr(net.get_submodule(owner), last, new)
    return net


def _unknown(library: str, name: str, names: list[str]) -> ConfigError:
    hint = suggest(name, names, f"see {library}'s list of models", most=2)
    return ConfigError(f"{library} has no model {name!r}; {hint}")


def _checked(spec: str, factory: Callable[..., Any], *arguments: Any, **options: Any) -> nn.Module:
    """Call a factory and check that it returns a module with weights."""
    try:
        net = factory(*arguments, **options)
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        remedy = "a backbone factory must accept these arguments and return a module"
        if options.get("pretrained") or options.get("weights"):
            remedy = "check the connection, or pass a file of weights with --weights"
        raise ConfigError(f"{spec} failed with {given} ({reason}); {remedy}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{spec} must return a torch.nn.Module, got {type(net).__name__}")
    if not list(net.parameters()):
        raise ConfigError(f"{spec} returns a module without weights; there is nothing to train")
    return net
