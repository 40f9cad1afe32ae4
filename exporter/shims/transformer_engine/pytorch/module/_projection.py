"""Weights of a linear layer, in one parameter or in several."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Init, TransformerEngineBaseModule

__all__ = ["Projection", "Split"]

Split = Sequence[str] | Mapping[str, int] | None


class Projection(TransformerEngineBaseModule):
    """A layer that ends with a product.

    Attributes:
        use_bias: whether it has a bias.
        return_bias: whether that is returned instead of added.
        bias_is_after: whether the product is rounded before the bias is added.
    """

    use_bias: bool
    return_bias: bool
    bias_is_after = False

    def add_weights(
        self,
        in_features: int,
        out_features: int,
        split: Split,
        init: Init,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        """Parameters `weight` and `bias`, or `…_weight` and `…_bias` of parts.

        Args:
            in_features: the columns.
            out_features: the rows, of all parts together.
            split: the names of parts that have as many rows each, or their rows by name.
            init: initial values of weights; biases are zeros.
            device: where they are.
            dtype: of all.

        Raises:
            ValueError: the parts are none, or have not all rows together.
        """
        if split is None:
            sizes = {"": out_features}
        elif isinstance(split, Mapping):
            sizes = {f"{name.rstrip('_')}_": rows for name, rows in split.items()}
        else:
            sizes = {f"{name.rstrip('_')}_": out_features // len(split) for name in split}
        if not sizes or sum(sizes.values()) != out_features:
            raise ValueError(
                f"transformer_engine's {type(self).__name__}: parts of {[*sizes.values()]} rows "
                f"are not {out_features} together"
            )
        self.weight_names = [f"{part}weight" for part in sizes]
        self.bias_names = [f"{part}bias" for part in sizes]
        for name, rows in zip(self.weight_names, sizes.values(), strict=True):
            self.add_parameter(name, (rows, in_features), init, device, dtype)
        for name, rows in zip(self.bias_names, sizes.values(), strict=True):
            if self.use_bias:
                self.add_parameter(name, (rows,), nn.init.zeros_, device, dtype)
            else:
                setattr(self, name, torch.empty(0, device=device, dtype=dtype))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(…, in_features) → (…, out_features), in x's dtype, and the bias if it is not in it."""
        weight = self._joined(self.weight_names).to(x.dtype)
        if not self.use_bias:
            return F.linear(x, weight), None
        bias = self._joined(self.bias_names).to(x.dtype)
        if self.return_bias:
            return F.linear(x, weight), bias
        if self.bias_is_after:
            return F.linear(x, weight) + bias, None
        return F.linear(x, weight, bias), None

    def _joined(self, names: Sequence[str]) -> Tensor:
        parts = [getattr(self, name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
