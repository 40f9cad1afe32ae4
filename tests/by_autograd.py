"""Gradient programs held against autograd of their modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["assert_same"]


def assert_same(
    program: Callable[..., Any], module: nn.Module, x: Tensor, *, atol: float
) -> tuple[Tensor, Tensor]:
    """Hold outputs and gradients of a net of one input, with one layer `a`; its output and the
    cotangent, which is drawn."""
    x = x.detach().requires_grad_()
    expected = module(x)
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, module.a.weight), cotangent)
    found = program(x.detach(), cotangent)
    names = ("output", "grad/x", "grad/a.weight")
    for given, wanted in zip(names, (expected, *gradients), strict=True):
        torch.testing.assert_close(found[given], wanted, rtol=1e-4, atol=atol)
    return expected.detach(), cotangent
