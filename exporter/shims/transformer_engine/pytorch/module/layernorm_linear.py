"""A norm and a linear layer."""

from typing import Any

import torch
from torch import Tensor, nn

from .._compute import normalise
from .._refused import plain, refuse_parallel
from ._projection import Projection, Split
from .base import Init, normal

__all__ = ["LayerNormLinear"]


class LayerNormLinear(Projection):
    """`Linear` of a norm of x.

    Args:
        in_features: of x.
        out_features: of the result.
        eps: under the norm's root.
        tp_group: the processes that it is divided among, one at most, or None.
        tp_size: how many without a group.
        init_method: initial values of the weight; None for a normal distribution.
        bias: whether the linear layer has one.
        normalization: "LayerNorm" or "RMSNorm", which has no bias.
        return_bias: whether the bias is returned instead of added.
        params_dtype: of the parameters; None for torch's default.
        parallel_mode: "column" or None, which has no effect.
        return_layernorm_output: whether the norm is returned, too.
        parameters_split: names of parts that are parameters of their own, or their rows by name.
        zero_centered_gamma: whether 1 is added to the norm's weight.
        device: where parameters are; None for torch's default.
        name: has no effect.
        tuning: options that have no effect.

    Raises:
        NotImplementedError: there is more than one process; parallel_mode is "row".
        TypeError: an option is unknown.
        ValueError: the norm is another one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        parameters_split: Split = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        name: str | None = None,
        **tuning: Any,
    ) -> None:
        super().__init__(name)
        plain("LayerNormLinear", tuning)
        refuse_parallel("LayerNormLinear", tp_group, tp_size)
        if parallel_mode == "row":
            raise NotImplementedError("transformer_engine's LayerNormLinear is not divided by rows")
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.parallel_mode = parallel_mode
        self.return_layernorm_output = return_layernorm_output
        add_norm(self, in_features, eps, normalization, zero_centered_gamma, device, params_dtype)
        init = init_method or normal
        self.add_weights(in_features, out_features, parameters_split, init, device, params_dtype)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """(…, in_features) → (…, out_features); then the bias, or None, and the norm, as asked."""
        normed = norm_of(self, inp.to(self.compute_dtype(inp)))
        out, bias = self.project(normed)
        return returned(self, out, bias, normed)


def add_norm(
    layer: Any,
    width: int,
    eps: float,
    kind: str,
    zero_centred: bool,
    device: Any,
    dtype: torch.dtype | None,
) -> None:
    """The parameters of a layer's norm, `layer_norm_weight` and `layer_norm_bias`.

    Raises:
        ValueError: kind is neither "LayerNorm" nor "RMSNorm".
    """
    if kind not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"normalization is {kind!r}; it is LayerNorm or RMSNorm")
    layer.eps = eps
    layer.normalization = kind
    layer.zero_centered_gamma = zero_centred
    first = nn.init.zeros_ if zero_centred else nn.init.ones_
    layer.add_parameter("layer_norm_weight", (width,), first, device, dtype)
    if kind == "LayerNorm":
        layer.add_parameter("layer_norm_bias", (width,), nn.init.zeros_, device, dtype)
    else:
        layer.layer_norm_bias = None


def norm_of(layer: Any, x: Tensor) -> Tensor:
    """A layer's norm of x, whose dtype its parameters are rounded to."""
    weight, bias = layer.layer_norm_weight.to(x.dtype), layer.layer_norm_bias
    bias = None if bias is None else bias.to(x.dtype)
    return normalise(x, weight, bias, layer.eps, layer.zero_centered_gamma, layer.normalization)


def returned(layer: Any, out: Tensor, bias: Tensor | None, normed: Tensor) -> Any:
    """What of these a layer with a norm returns: the first, or a tuple."""
    rest = ((bias,) if layer.return_bias else ()) + (
        (normed,) if layer.return_layernorm_output else ()
    )
    return (out, *rest) if rest else out
