"""The linear layer."""

from typing import Any

import torch
from torch import Tensor

from .._refused import plain, refuse_parallel
from ._projection import Projection, Split
from .base import Init, normal

__all__ = ["Linear"]


class Linear(Projection):
    """x·weightᵀ + bias.

    Args:
        in_features: of x.
        out_features: of the result.
        tp_group: the processes that it is divided among, one at most, or None.
        tp_size: how many without a group.
        init_method: initial values of the weight; None for a normal distribution.
        bias: whether there is one.
        return_bias: whether it is returned instead of added.
        params_dtype: of the parameters; None for torch's default.
        parallel_mode: "row" for a bias that is added to the rounded product.
        parameters_split: names of parts that are parameters of their own, or their rows by name.
        device: where parameters are; None for torch's default.
        name: has no effect.
        tuning: options that have no effect.

    Raises:
        NotImplementedError: there is more than one process.
        TypeError: an option is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Split = None,
        device: Any = None,
        name: str | None = None,
        **tuning: Any,
    ) -> None:
        super().__init__(name)
        plain("Linear", tuning)
        refuse_parallel("Linear", tp_group, tp_size)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.parallel_mode = parallel_mode
        self.bias_is_after = parallel_mode == "row"
        init = init_method or normal
        self.add_weights(in_features, out_features, parameters_split, init, device, params_dtype)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """(…, in_features) → (…, out_features); with `return_bias` also the bias, or None."""
        out, bias = self.project(inp.to(self.compute_dtype(inp)))
        return (out, bias) if self.return_bias else out
