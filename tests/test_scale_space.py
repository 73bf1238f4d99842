"""The discrete Gaussian: its definition and the properties that make it the right kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ive

from foveate.errors import ConfigError
from foveate.scale_space import discrete_gaussian, gaussian_radius

variances = st.floats(1e-3, 3000.0)


@given(variances)
def test_it_is_the_scaled_bessel_function(t):
    kernel = discrete_gaussian(t)
    radius = len(kernel) // 2
    expected = torch.from_numpy(ive(np.abs(np.arange(-radius, radius + 1)), t))
    torch.testing.assert_close(kernel, expected, atol=1e-14, rtol=0)


@given(variances)
def test_it_sums_to_one_with_variance_t_and_mean_zero(t):
    kernel = discrete_gaussian(t)
    n = torch.arange(len(kernel), dtype=torch.float64) - len(kernel) // 2
    assert float(kernel.sum()) == pytest.approx(1, abs=1e-12)
    assert float((kernel * n).sum()) == pytest.approx(0, abs=1e-10)
    # the tail left out holds less than 1e-12 of the mass, no farther out than about the radius
    assert float((kernel * n**2).sum()) == pytest.approx(t, abs=1e-11 * (1 + len(n) ** 2), rel=1e-9)


@given(st.floats(0.05, 40.0), st.floats(0.05, 40.0))
def test_smoothing_twice_adds_the_variances(s, t):
    radius = gaussian_radius(s + t)
    first, second = discrete_gaussian(s, radius).numpy(), discrete_gaussian(t, radius).numpy()
    both = torch.from_numpy(np.convolve(first, second)[radius : 3 * radius + 1])
    torch.testing.assert_close(both, discrete_gaussian(s + t, radius), atol=1e-12, rtol=0)


def test_many_variances_at_once_are_the_same_as_one_by_one():
    t = torch.tensor([[0.2, 1.0], [7.0, 49.0]])
    kernels = discrete_gaussian(t, radius=40)
    assert kernels.shape == (2, 2, 81)
    for index in np.ndindex(2, 2):
        single = discrete_gaussian(float(t[index]), radius=40)
        torch.testing.assert_close(kernels[index], single, atol=1e-14, rtol=0)


def test_variance_zero_is_the_identity():
    kernel = discrete_gaussian(0.0, radius=3)
    torch.testing.assert_close(kernel, torch.tensor([0, 0, 0, 1, 0, 0, 0.0]).double())


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_variance(bad):
    with pytest.raises(ConfigError, match="variance must be finite"):
        discrete_gaussian(bad)
