"""Linear layers and two-layer MLPs under the package's names; on one device only."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations import gelu_fwd, sqrelu_fwd

__all__ = [
    "ColumnParallelLinear",
    "FusedDense",
    "FusedMLP",
    "ParallelFusedMLP",
    "RowParallelLinear",
    "fused_dense_func",
    "fused_mlp_func",
]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_approx": gelu_fwd,
    "relu": F.relu,
    "sqrelu": sqrelu_fwd,
}


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Any:
    """(…, n) times the weight, (m, n), plus the bias, (m,): (…, m); with x if `return_residual`.

    Raises:
        NotImplementedError: a process group is given.
    """
    _alone(process_group, "fused_dense_func")
    y = F.linear(x, weight, bias)
    return (y, x) if return_residual else y


class FusedDense(nn.Linear):
    """A linear layer that also returns its input, if wanted."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        """(…, in_features) → (…, out_features)."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Any:
    """Two linear maps with an activation between: gelu_approx, relu or sqrelu.

    `save_pre_act`, `checkpoint_lvl` and `heuristic` have no effect.

    Raises:
        NotImplementedError: a process group is given.
        ValueError: the activation is another one.
    """
    _alone(process_group, "fused_mlp_func")
    _check(activation)
    y = F.linear(_ACTIVATIONS[activation](F.linear(x, weight1, bias1)), weight2, bias2)
    return (y, x) if return_residual else y


class FusedMLP(nn.Module):
    """fc2(activation(fc1(x))), with its input if wanted.

    Args:
        in_features: of x.
        hidden_features: between; four times in_features if None.
        out_features: in_features if None.
        bias1: whether fc1 has a bias.
        bias2: whether fc2 has one.
        activation: gelu_approx, relu or sqrelu.
        return_residual: whether x is returned too.
        checkpoint_lvl: has no effect.
        heuristic: has no effect.

    Raises:
        ValueError: the activation is another one.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | Literal["auto"] = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(activation)
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        hidden = in_features * 4 if hidden_features is None else hidden_features
        last = in_features if out_features is None else out_features
        linear = partial(nn.Linear, device=device, dtype=dtype)
        self.fc1 = linear(in_features, hidden, bias=bias1)
        self.fc2 = linear(hidden, last, bias=bias2)

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        """(…, in_features) → (…, out_features)."""
        return fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            self.activation,
            return_residual=self.return_residual,
            process_group=process_group,
        )


class ColumnParallelLinear(nn.Linear):
    """Refuses: it is of several devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_parallel(type(self).__name__)


class RowParallelLinear(nn.Linear):
    """Refuses: it is of several devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_parallel(type(self).__name__)


class ParallelFusedMLP(nn.Module):
    """Refuses: it is of several devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_parallel(type(self).__name__)


def refuse_parallel(name: str) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        f"{name} of fuseport's stand-in for flash_attn is not there: no program is of several "
        "devices; make the model without tensor parallelism"
    )


def _alone(process_group: Any, name: str) -> None:
    if process_group is not None:
        refuse_parallel(f"{name} with a process group")


def _check(activation: str) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it is one of {', '.join(_ACTIVATIONS)}")
