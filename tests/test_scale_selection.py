"""Scale selection: the top of the answers over the logarithm of scale."""

import pytest
import torch

from foveate.models.channels import refine_scale


@pytest.mark.parametrize("top", [-0.4, 0.0, 0.3, 1.1])
@pytest.mark.parametrize("octaves", [[-1, 0, 1, 2], [-1, -0.3, 0.5, 2], [-2, 0, 0.1, 1.2, 2]])
def test_the_top_of_a_parabola_over_log_scale_is_found(top, octaves):
    x = torch.tensor(octaves, dtype=torch.float64)
    answers = 3 - 0.7 * (x - top) ** 2
    if answers.argmax() in (0, len(x) - 1):
        pytest.skip("the top is beyond the last but one channel")
    found = refine_scale(answers[None], x.exp2().tolist())
    torch.testing.assert_close(found, torch.tensor([2.0**top], dtype=torch.float64))


def test_edges_flats_and_few_scales_name_a_channel():
    scales = [0.5, 1.0, 2.0, 4.0]
    rising = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    assert refine_scale(rising, scales).tolist() == [4.0, 0.5]
    flat = refine_scale(torch.zeros(3, 4), scales)
    assert all(scale in scales for scale in flat.tolist())
    assert refine_scale(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), [1.0, 3.0]).tolist() == [3.0, 1.0]
    assert refine_scale(torch.ones(2, 1), [1.5]).tolist() == [1.5, 1.5]


def test_the_refined_scale_lies_between_the_neighbours_of_the_best_channel():
    generator = torch.Generator().manual_seed(0)
    octaves = torch.rand(9, generator=generator, dtype=torch.float64).cumsum(0)
    answers = torch.rand(500, 9, generator=generator, dtype=torch.float64)
    found, best = refine_scale(answers, octaves.exp2().tolist()).log2(), answers.argmax(1)
    slack = 1e-9
    assert (found >= octaves[(best - 1).clamp_min(0)] - slack).all()
    assert (found <= octaves[(best + 1).clamp_max(8)] + slack).all()
