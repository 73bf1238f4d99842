"""Time a training step of FovAvg with 17 channels against a plain loop over the channels.

python benchmarks/channels.py           batch 32 on 2 CPU threads
python benchmarks/channels.py --cuda    batch 128 on a GPU; also the resampling op against a copy

The plain loop ("obvious loop" in the output) resizes the image and runs the backbone for each
channel in turn.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.models.channels import ScaleChannels
from foveate.models.zoo import create_model
from foveate.resampling import foveate

Step = Callable[[], None]


def loop_over_channels(net: ScaleChannels, images: Tensor) -> Tensor:
    """Compute logits channel by channel: resize the image, crop or pad it, run the backbone."""
    outputs = []
    for scale in net.scales:
        seen = F.interpolate(images, scale_factor=1 / scale, mode="bilinear", align_corners=False)
        over = seen.shape[-1] - net.size
        if over >= 0:
            start = over // 2
            seen = seen[..., start : start + net.size, start : start + net.size]
        else:
            before, after = -over // 2, -over - (-over // 2)
            seen = F.pad(seen, (before, after, before, after), mode="replicate")
        outputs.append(net.backbone(seen))
    return net.combine(torch.stack(outputs, 1))


def training_step(forward: Callable[[], Tensor], net: ScaleChannels, labels: Tensor) -> Step:
    """Return a function that does one forward pass, backward pass and Adam step."""
    optimiser = torch.optim.Adam(net.parameters(), 3e-3, fused=True, capturable=labels.is_cuda)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(forward(), labels).backward()
        optimiser.step()

    return step


def fovavg(device: str) -> ScaleChannels:
    torch.manual_seed(0)
    net = create_model("fovavg").to(device)
    assert isinstance(net, ScaleChannels)
    return net


def without_fast_path(net: ScaleChannels) -> ScaleChannels:
    """Bypass the optimised forward pass of the backbone: run its layers one after another."""
    vars(net.backbone)["features"] = net.backbone.trunk  # setattr would register a submodule
    return net


def on_cpu(rounds: int = 15) -> dict[str, float]:
    torch.set_num_threads(2)
    images, labels = torch.randn(32, 1, 112, 112), torch.randint(0, 10, (32,))
    loop, plain = (without_fast_path(fovavg("cpu")) for _ in range(2))
    ours = fovavg("cpu")
    steps = {
        "obvious loop": training_step(lambda: loop_over_channels(loop, images), loop, labels),
        "batched": training_step(lambda: plain(images), plain, labels),
        "ours": training_step(lambda: ours(images), ours, labels),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():  # interleaved, so that noise affects all alike
            start = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    found = {f"{name}, ms": median(taken) for name, taken in times.items()}
    return {**found, "ratio": found["obvious loop, ms"] / found["ours, ms"]}


def milliseconds(work: Callable[[], object], repeats: int = 100) -> float:
    """Return the mean time of `work` on the GPU, in milliseconds."""
    for _ in range(10):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


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


def on_gpu() -> dict[str, float]:
    images, labels = torch.randn(128, 1, 112, 112).cuda(), torch.randint(0, 10, (128,)).cuda()
    net, loop = fovavg("cuda"), without_fast_path(fovavg("cuda"))

    @torch.compile
    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return net(images).float()  # type: ignore[no-any-return]

    step = captured(training_step(forward, net, labels))
    slow = training_step(lambda: loop_over_channels(loop, images), loop, labels)
    many = torch.randn(4096, 1, 112, 112, device="cuda")
    patches = foveate(many, net.scales, net.size)
    one = torch.empty((many.numel() + patches.numel()) // 2, device="cuda")
    other = torch.empty_like(one)
    op = milliseconds(lambda: foveate(many, net.scales, net.size))
    copy = milliseconds(lambda: other.copy_(one))
    return {
        "step, ms": milliseconds(step),
        "obvious loop, ms": milliseconds(slow, 20),
        "op on 4096 images, ms": op,
        "copy of as many bytes, ms": copy,
        "op against copy": copy / op,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="measure on a GPU")
    found = on_gpu() if parser.parse_args().cuda else on_cpu()
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))
