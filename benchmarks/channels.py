"""The plain way to compute scale channels, one after another, which the benchmarks compare with.

The plain loop ("obvious loop" in the results) resizes the image and runs the backbone for each
channel in turn. `benchmarks/run.py` measures it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.models.channels import ScaleChannels
from foveate.models.zoo import create_model

Step = Callable[[], None]


def patch(images: Tensor, scale: float, size: int, antialias: bool = False) -> Tensor:
    """Resize images by 1 / scale, then crop or pad them to `size` pixels."""
    factor = {"scale_factor": 1 / scale, "mode": "bilinear", "antialias": antialias}
    seen = F.interpolate(images, align_corners=False, **factor)  # type: ignore[arg-type]
    over = seen.shape[-1] - size
    if over >= 0:
        start = over // 2
        return seen[..., start : start + size, start : start + size]
    before, after = -over // 2, -over - (-over // 2)
    return F.pad(seen, (before, after, before, after), mode="replicate")


def loop_over_channels(net: ScaleChannels, images: Tensor) -> Tensor:
    """Compute logits channel by channel."""
    seen = (patch(images, scale, net.size, net.antialias) for scale in net.scales)
    return net.combine(torch.stack([net.backbone(patches) for patches in seen], 1))


def training_step(forward: Callable[[], Tensor], net: nn.Module, labels: Tensor) -> Step:
    """Return a function that does one forward pass, backward pass and Adam step."""
    optimiser = torch.optim.Adam(net.parameters(), 3e-3, fused=True, capturable=labels.is_cuda)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(forward(), labels).backward()
        optimiser.step()

    return step


def fovavg(device: str | torch.device) -> ScaleChannels:
    torch.manual_seed(0)
    net = create_model("fovavg").to(device)
    assert isinstance(net, ScaleChannels)
    return net


def captured(step: Step) -> Step:
    """Capture a step as a CUDA graph and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
