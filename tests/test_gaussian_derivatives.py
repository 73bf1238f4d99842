"""Derivatives of the Gaussian: against automatic differentiation, numpy and each other."""

import math

import numpy as np
import pytest
import torch
from gaussian_derivatives import directional_derivative, gaussian_derivative, hermite
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import hermite_e

from foveate.errors import ConfigError

EPS = torch.finfo(torch.float64).eps
sigmas = st.floats(0.3, 8.0)
orders = st.integers(0, 5)


def grid(axes, count=7, reach=3.0):
    line = torch.linspace(-reach, reach, count, dtype=torch.float64)
    return torch.stack(torch.meshgrid(*[line] * axes, indexing="ij"), -1)


def differentiate(points, sigma, steps):
    """The Gaussian at (..., N) points, differentiated by autograd along each axis in `steps`."""
    points = points.clone().requires_grad_()
    norm = (math.sqrt(2 * math.pi) * sigma) ** points.shape[-1]
    value = torch.exp(-(points**2).sum(-1) / (2 * sigma**2)) / norm
    for axis in steps:
        value = torch.autograd.grad(value.sum(), points, create_graph=True)[0][..., axis]
    return value.detach()


def tolerance(sigma, axes, order):
    """The rounding of 20 + 10 n operations on what the terms of He_n sum to without their signs.

    Points reach 3 sigma along each axis, so 3 sqrt(2) along a turned one.
    """
    terms = abs(hermite_e.herme2poly([0] * order + [1])) @ (3 * 2**0.5) ** np.arange(order + 1)
    return (20 + 10 * order) * EPS * terms / sigma ** (order + axes)


@given(orders, st.lists(st.floats(-4, 4), min_size=1, max_size=5))
def test_hermite_polynomials_are_numpys(order, points):
    x = torch.tensor(points, dtype=torch.float64)
    expected = torch.from_numpy(hermite_e.hermeval(x.numpy(), [0] * order + [1]))
    size = torch.from_numpy(abs(hermite_e.herme2poly([0] * order + [1]))).sum() * 4**order
    torch.testing.assert_close(hermite(order, x), expected, atol=10 * EPS * float(size), rtol=0)


@given(sigmas, orders)
def test_one_dimension_is_automatic_differentiation(sigma, order):
    points = sigma * grid(1)
    expected = differentiate(points, sigma, [0] * order)
    value = gaussian_derivative(points, sigma, [order])
    torch.testing.assert_close(value, expected, atol=tolerance(sigma, 1, order), rtol=0)


@given(sigmas, st.integers(0, 3), st.integers(0, 2))
def test_partial_derivatives_are_automatic_differentiation(sigma, first, second):
    points = sigma * grid(2)
    expected = differentiate(points, sigma, [0] * first + [1] * second)
    value = gaussian_derivative(points, sigma, [first, second])
    torch.testing.assert_close(value, expected, atol=tolerance(sigma, 2, first + second), rtol=0)


@given(sigmas, orders, st.floats(0, 2 * math.pi), st.floats(0.1, 9))
def test_along_a_direction_it_is_a_derivative_of_the_turned_axis(sigma, order, angle, length):
    points = sigma * grid(2)
    e = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    turned = torch.stack([points @ e, points @ torch.stack([-e[1], e[0]])], -1)
    value = directional_derivative(points, sigma, (length * e).tolist(), order)
    expected = gaussian_derivative(turned, sigma, [order, 0])
    bound = 2**order * tolerance(sigma, 2, order)  # the expansion has 2^n terms
    torch.testing.assert_close(value, expected, atol=bound, rtol=0)


def test_three_dimensions_along_an_axis():
    points = 1.3 * grid(3, count=4)
    value = directional_derivative(points, 1.3, (0, 0, -2), 3)
    expected = -gaussian_derivative(points, 1.3, (0, 0, 3))
    torch.testing.assert_close(value, expected, atol=tolerance(1.3, 3, 3), rtol=0)


def test_normalised_derivatives_are_in_units_of_sigma():
    points = 2.5 * grid(2)
    plain, normalised = (
        gaussian_derivative(points, 2.5, (1, 2), normalised=choice) for choice in (False, True)
    )
    torch.testing.assert_close(
        normalised, 2.5**3 * plain, atol=2.5**3 * tolerance(2.5, 2, 3), rtol=0
    )


def test_it_integrates_to_one_and_its_derivatives_to_zero():
    # Poisson: a step of sigma / 4 misses the integral by exp(-(8 pi)² / 2); 97 terms are rounded.
    points = torch.arange(-48, 49, dtype=torch.float64)[:, None] / 4
    sums = [float(gaussian_derivative(points, 1.0, [n]).sum()) / 4 for n in range(4)]
    assert sums == pytest.approx([1, 0, 0, 0], abs=97 * EPS)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gaussian_derivative(grid(2), 0.0, (1, 0)), "sigma must be finite and above 0"),
        (lambda: gaussian_derivative(grid(2), 1.0, (1,)), r"shape \(..., 1\), got \(7, 7, 2\)"),
        (lambda: gaussian_derivative(grid(2), 1.0, (1, -1)), "order of 0 or more, got -1"),
        (lambda: directional_derivative(grid(2), 1.0, (0, 0), 1), "not zero, got"),
        (lambda: directional_derivative(grid(2), 1.0, (1, 0), -2), "order of 0 or more, got -2"),
    ],
)
def test_what_cannot_work_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
