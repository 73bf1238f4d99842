"""The network of a run: one of the zoo, or scale channels around a backbone of one's own."""

import torch
from torch import nn

from foveate.errors import ConfigError
from foveate.models.channels import ScaleChannels
from foveate.training.config import TrainConfig
from foveate.trust import find_factory, require_trust


def build_net(config: TrainConfig, *, trust: bool = False) -> nn.Module:
    """Build the network of a configuration, its weights drawn from torch's random state.

    `config.backbone` names a function that is called with channels= and classes=, and gives a
    module from (N, C, P, P) to (N, K); the rest of `config.model` says how it is shown the image.

    Args:
        config: Configuration of the run.
        trust: Whether `config.backbone` may be imported and called.
    """
    model = config.model
    if not config.backbone:
        if model.form == "plain" and model.size != config.size:
            raise ConfigError(
                f"this network sees whole images of model.size={model.size} pixels, but they have "
                f"size={config.size}; set both to one number"
            )
        return model.build()
    require_trust(trust, f"the backbone {config.backbone!r} would be imported and called")
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
    outputs = net.eval().forward_patches(torch.zeros(2, 1, model.channels, model.size, model.size))
    net.train()
    if outputs.shape[-1] != model.classes:
        raise ConfigError(
            f"{config.backbone} gives {outputs.shape[-1]} logits, not classes={model.classes}"
        )
