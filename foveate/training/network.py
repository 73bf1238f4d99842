"""The network of a run: one of the zoo, or scale channels around a backbone of one's own."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels
from foveate.training.config import TrainConfig


def build_net(config: TrainConfig) -> nn.Module:
    """Make the network that `config` says, its weights drawn from torch's random state.

    `config.backbone` names a function that is called with channels= and classes=, and gives a
    module from (N, C, P, P) to (N, K); the rest of `config.model` says how it is shown the image.
    """
    model = config.model
    if not config.backbone:
        if model.form == "plain" and model.size != config.size:
            raise ConfigError(
                f"this network sees whole images of model.size={model.size} pixels, but they have "
                f"size={config.size}; set both to one number"
            )
        return model.build()
    if model.form != "foveated":
        raise ConfigError("a backbone goes into fovmax, fovavg or fovconc, not this model")
    net = ScaleChannels(
        _call(config.backbone, channels=model.channels, classes=model.classes),
        model.scales,
        model.size,
        model.pool,
        padding=model.padding,
        antialias=model.antialias,
        classes=model.classes,
    )
    _try_out(net, config)
    return net


def set_recompute(net: nn.Module, channels: int) -> None:
    """Let a network train that many of its scale channels at a time."""
    if not isinstance(net, ScaleChannels):
        raise ConfigError("only fovmax, fovavg and fovconc have channels to recompute")
    net.recompute = channels


def find_factory(spec: str, what: str = "backbone") -> Callable[..., Any]:
    """Import what package.module:factory names; `what` it should be is said where it is not."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"a {what} is written as package.module:factory, got {spec!r}")
    try:
        found = import_module(module)
    except Exception as error:  # a user's module may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"cannot import {module!r} for the {what} ({reason}); install it, or run where it is"
        ) from error
    factory = getattr(found, name, None)
    if not callable(factory):
        state = "is no function" if hasattr(found, name) else "is not there"
        raise ConfigError(f"{name!r} {state} in {module!r}; name a function that makes the {what}")
    return factory  # type: ignore[no-any-return]


def _call(spec: str, *, channels: int, classes: int) -> nn.Module:
    factory = find_factory(spec)
    try:
        net = factory(channels=channels, classes=classes)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{spec} failed with channels={channels}, classes={classes} ({reason}); it must take "
            "both and give a module"
        ) from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{spec} must give a torch module, got {type(net).__name__}")
    if not list(net.parameters()):
        raise ConfigError(f"{spec} gives a module without weights; there is nothing to train")
    return net


@torch.no_grad()
def _try_out(net: ScaleChannels, config: TrainConfig) -> None:
    """Show the backbone two empty patches, to hear of a wrong shape before the data is prepared."""
    model = config.model
    outputs = net.eval().answer(torch.zeros(2, 1, model.channels, model.size, model.size))
    net.train()
    if outputs.shape[-1] != model.classes:
        raise ConfigError(
            f"{config.backbone} gives {outputs.shape[-1]} logits, not classes={model.classes}"
        )
