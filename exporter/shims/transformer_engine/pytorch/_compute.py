"""What layers compute between products of matrices: in float32 at least, and rounded once."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.swiglu import swiglu

__all__ = ["ACTIVATIONS", "GATED", "activate", "autocast_dtype", "bias_gelu", "normalise"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What `torch.autocast` has x's device compute in, or None outside of it."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return None


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centred: bool, kind: str
) -> Tensor:
    """The layer norm or the RMS norm of the last dimensions, in x's dtype.

    Args:
        x: (…, *weight's shape).
        weight: its last dimensions.
        bias: as weight; None for an RMS norm.
        eps: under the root.
        zero_centred: whether 1 is added to the weight.
        kind: "LayerNorm" or "RMSNorm".
    """
    real = wide(x, weight)
    scale = weight.to(real) + 1.0 if zero_centred else weight.to(real)
    if kind == "RMSNorm":
        dims = weight.dim()
        return rms_norm(x.flatten(-dims), scale.flatten(), eps).reshape(x.shape)
    shift = None if bias is None else bias.to(real)
    return F.layer_norm(x.to(real), weight.shape, scale, shift, eps).to(x.dtype)


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": _tanh_gelu,
    "qgelu": _quick_gelu,
    "relu": F.relu,
    "srelu": _squared_relu,
    "silu": F.silu,
}
"""By name, functions of one tensor."""

GATED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "geglu": _tanh_gelu,
    "glu": torch.sigmoid,
    "qgeglu": _quick_gelu,
    "reglu": F.relu,
    "sreglu": _squared_relu,
    "swiglu": F.silu,
    "clamped_swiglu": _quick_gelu,
}
"""By name, functions of the first half of each row, whose second half they are multiplied with."""


def activate(x: Tensor, name: str, options: Mapping[str, Any]) -> Tensor:
    """An activation, in x's dtype.

    Args:
        x: (…, n), or (…, 2n) where it is gated.
        name: of `ACTIVATIONS` or `GATED`.
        options: of "clamped_swiglu": limit, alpha and glu_linear_offset. The gate is at most
            limit, what it multiplies within ± limit, and the offset is added to that.

    Returns:
        (…, n).
    """
    if name == "swiglu":
        return swiglu(x)
    real = wide(x)
    if name in ACTIVATIONS:
        return ACTIVATIONS[name](x.to(real)).to(x.dtype)
    gate, value = x.to(real).chunk(2, -1)
    function = GATED[name]
    if name == "clamped_swiglu":
        limit = options.get("limit", 7.0)
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
        value = value + options.get("glu_linear_offset", 1.0)
        function = partial(_quick_gelu, alpha=options.get("alpha", 1.702))
    return (function(gate) * value).to(x.dtype)


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of x + bias, the sum not rounded between; in x's dtype."""
    real = wide(x)
    moved = x.to(real) if bias is None else x.to(real) + bias.to(real)
    return _tanh_gelu(moved).to(x.dtype)
