"""Activations under the package's names; autograd has their gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.swiglu import swiglu

__all__ = [
    "bias_gelu",
    "bias_gelu_impl",
    "fast_gelu_impl",
    "gelu_bwd",
    "gelu_fwd",
    "relu_bwd",
    "sqrelu_bwd",
    "sqrelu_fwd",
    "swiglu",
]


def gelu_fwd(x: Tensor) -> Tensor:
    """GELU by the hyperbolic tangent."""
    return F.gelu(x, approximate="tanh")


fast_gelu_impl = gelu_fwd


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of `gelu_fwd` at x, times g."""
    out: Tensor = torch.ops.aten.gelu_backward(g, x, approximate="tanh")
    return out


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """`gelu_fwd` of y + bias."""
    return gelu_fwd(y + bias)


bias_gelu_impl = bias_gelu


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g where x is not negative, zeros elsewhere."""
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """max(x, 0)², computed in float32 at least, in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.relu(wide).square().to(x.dtype)


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of `sqrelu_fwd` at x, times g."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (2.0 * g * F.relu(wide)).to(x.dtype)
