"""What must hold between processes; torchrun starts this file, and it fails where one does not."""

import copy
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_runs import MODEL, same_bits, tiny, weights
from torch import nn

from foveate.execution import definition, patches
from foveate.execution.captured import Batch, plain_step
from foveate.execution.plan import Prepared
from foveate.models.channels import ScaleChannels
from foveate.models.zoo import ModelConfig
from foveate.training.checkpoint import RunFolder
from foveate.training.distributed import Team, join_processes, team_step
from foveate.training.loop import train
from foveate.training.shared_norm import running_statistics, share_norms

# In float64 two ways to the same number differ by some 1e-15 of it; Adam takes 20 steps from there.
CLOSE = {"atol": 1e-10, "rtol": 1e-8}
BATCH = 7  # parts of 4 and 3


def data(count):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 1, 24, 24, generator=generator, dtype=torch.float64)
    return images, torch.arange(count) % 10


def steps_of(net, batches, make):
    """Take a step for each batch of (images, labels); give the losses."""
    step = make(net, torch.optim.Adam(net.parameters(), lr=3e-3))
    losses = []
    for images, labels in batches:
        plan = patches if isinstance(net, ScaleChannels) else definition
        ready = Prepared(plan, plan.prepare(net, images, images.dtype))
        losses.append(float(step(Batch(ready, labels))))
    return torch.tensor(losses, dtype=torch.float64)


def own_parts(team, batches):
    for images, labels in batches:
        for part, _ in team.split_batches(torch.arange(len(labels)), max(len(labels), team.count)):
            yield images[part], labels[part]


def steps_together(net, batches, team):
    sizes = iter([len(labels) for _, labels in batches])
    return steps_of(
        net,
        own_parts(team, batches),
        lambda net, adam: team_step(net, adam, "float32", team, lambda: next(sizes)),
    )


def twenty_batches():
    """Batches of 7 images, two that divide evenly, and one with an image for one process alone."""
    sizes = [BATCH] * 16 + [8, 4, 1, BATCH]
    images, labels = data(sum(sizes))
    cuts = torch.arange(len(labels)).split(sizes)
    return [(images[cut], labels[cut]) for cut in cuts]


def assert_same(net, other):
    for (name, one), two in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        if ".0.bias" not in name and ".3.bias" not in name and "running_mean" not in name:
            # A bias before a norm has no gradient but rounding, which Adam makes large.
            torch.testing.assert_close(one, two, msg=lambda text: f"{name}: {text}", **CLOSE)  # noqa: B023


def shared_steps_are_those_of_one_process(team, net, recompute=0):
    alone = copy.deepcopy(net)
    if recompute:
        net.recompute = recompute
    team.prepare(net, BATCH)
    batches = twenty_batches()
    expected = steps_of(alone, batches, lambda net, adam: plain_step(net, adam, "float32"))
    torch.testing.assert_close(steps_together(net, batches, team), expected, **CLOSE)
    assert_same(net, alone)


class Unused(nn.Module):
    """A network with weights that it never uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4), nn.Flatten())
        self.head = nn.Linear(100, 10)

    def forward(self, images):
        return self.head(F.relu(self.layers(images)))


def local_steps_norm_each_part_by_itself(team):
    """By hand: each part with its own statistics, the losses weighted by the number of images."""
    local = Team(rank=team.rank, count=team.count, norms="local", store=team.store)
    net = replace(MODEL, dropout=0.0).build().double()
    parts = [copy.deepcopy(net) for _ in range(team.count)]
    for part in parts[1:]:  # the same weights, statistics of their own
        for name, module in part.named_modules():
            for key in list(module._parameters):
                module._parameters[key] = parts[0].get_submodule(name)._parameters[key]
    local.prepare(net, BATCH)
    batches = twenty_batches()[:3]
    adam, expected = torch.optim.Adam(parts[0].parameters(), lr=3e-3), []
    for images, labels in batches:
        loss = torch.zeros((), dtype=torch.float64)
        for rank, part in enumerate(parts):
            own = torch.arange(len(labels)).tensor_split(team.count)[rank]
            loss = loss + F.cross_entropy(part(images[own]), labels[own], reduction="sum")
        adam.zero_grad()
        (loss / len(labels)).backward()
        adam.step()
        means = [torch.stack(t).mean(0) for t in zip(*map(running_statistics, parts), strict=True)]
        for part in parts:
            for tensor, mean in zip(running_statistics(part), means, strict=True):
                tensor.copy_(mean)
        expected.append(float(loss.detach()) / len(labels))
    losses = steps_together(net, batches, local)
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), **CLOSE)
    assert_same(net, parts[0])
    for tensor, mean in zip(running_statistics(net), running_statistics(parts[0]), strict=True):
        torch.testing.assert_close(tensor, mean, **CLOSE)


KINDS = [
    (nn.BatchNorm1d, ()),
    (nn.BatchNorm1d, (3,)),
    (nn.BatchNorm2d, (3, 2)),
    (nn.BatchNorm3d, (3, 2, 2)),
]


def norms_of_every_kind(team):
    for kind, space in KINDS:
        torch.manual_seed(4)
        shape = (5, 4, *space)
        alone, values = kind(4).double(), 100 + torch.randn(*shape, dtype=torch.float64)
        shared = nn.Sequential(copy.deepcopy(alone))
        share_norms(shared, team.all_reduce_sum)
        assert shared.state_dict().keys() == {f"0.{key}" for key in alone.state_dict()}
        weights = torch.randn_like(values)
        whole, part = values.clone().requires_grad_(), team.part(values).clone().requires_grad_()
        (alone(whole) ** 2 * weights).sum().backward()
        (shared(part) ** 2 * team.part(weights)).sum().backward()
        # The sums are about 0, so with a mean of 100 a square loses 4 of its 16 digits.
        torch.testing.assert_close(part.grad, team.part(whole.grad), atol=1e-9, rtol=1e-7)
        torch.testing.assert_close(shared[0].running_var, alone.running_var, atol=1e-9, rtol=0)
        assert shared[0].num_batches_tracked == 1
        shared.eval(), alone.eval()
        torch.testing.assert_close(shared(part), team.part(alone(values)))


def words_reach_everyone(team):
    assert team.broadcast_int(7 + team.rank) == 7
    assert team.broadcast_bytes(b"hello" if team.is_main else b"") == b"hello"
    assert team.broadcast_bytes(b"") == b""
    order = team.in_turn(lambda: team.store.add("turn", 1))
    assert (order == 1) == (os.environ["LOCAL_RANK"] == "0")
    assert int(team.all_reduce_sum(torch.tensor(int(team.may_print())))) == 1
    team.seed(1, 2, 3)
    drawn = torch.rand(())
    assert float(team.all_reduce_sum(drawn.clone())) != team.count * float(
        drawn
    )  # others draw others
    team.seed(1, 2, 3)
    assert torch.equal(torch.rand(()), drawn)


def dropout_goes_on_with_the_same_draws(team, folder):
    """Interrupted in mid-epoch by all processes at once, and gone on."""

    def callback(config, progress, steps):
        bits = torch.get_rng_state().long()
        state = int((bits * torch.arange(len(bits))).sum())
        assert (team.broadcast_int(state) == state) == team.is_main  # each draws for itself
        if (progress.epoch, progress.step) == (1, 2):
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        train(tiny(), folder / "a", callback=callback, team=team)
    assert not team.is_main or RunFolder(folder / "a").load()[0].step == 2
    for name in "ab":
        train(tiny(), folder / name, team=team)
    team.broadcast_int(0)  # the first process has written
    assert same_bits(weights(folder / "a"), weights(folder / "b"))


if __name__ == "__main__":
    with join_processes("cpu") as team:
        torch.manual_seed(0)
        still = replace(MODEL, dropout=0.0)
        words_reach_everyone(team)
        norms_of_every_kind(team)
        shared_steps_are_those_of_one_process(team, still.build().double())
        shared_steps_are_those_of_one_process(team, still.build().double(), recompute=1)
        shared_steps_are_those_of_one_process(team, Unused().double())
        plain = ModelConfig(form="plain", size=24, features=(4, 4), hidden=8, dropout=0.0)
        shared_steps_are_those_of_one_process(team, plain.build().double())
        local_steps_norm_each_part_by_itself(team)
        dropout_goes_on_with_the_same_draws(team, Path(sys.argv[1]))
