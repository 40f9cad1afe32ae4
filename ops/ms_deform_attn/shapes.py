"""What the inputs of deformable attention must be, and the shapes and dtypes of its outputs.

All outputs are contiguous. `checks.hpp` has the same checks in the same order with the same
messages, for hosts that have no Python.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING

__all__ = ["check", "check_cotangent", "check_levels", "fake_backward", "fake_forward", "wide"]

_LIMIT = 2**31 - 1  # kernels count positions in 32 bits


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(
    op: str, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(value.dim() == 4, op, "value", "(b, s, h, c)", tuple(value.shape))
    name = dtype_name(value.dtype)
    require(value.dtype in FLOATING, op, "value", "float16, bfloat16, float32 or float64", name)
    b, _, h, _ = value.shape
    own = wide(value.dtype) if locations.dtype == wide(value.dtype) else value.dtype
    require_like(op, "sampling_locations", locations, own, value, "value")
    form = "(b, q, h, L, P, 2)"
    require(locations.dim() == 6, op, "sampling_locations", form, tuple(locations.shape))
    _, q, _, levels, points, _ = locations.shape
    require_shape(op, "sampling_locations", locations, form, (b, q, h, levels, points, 2))
    require_like(op, "attention_weights", weights, own, value, "value")
    require_shape(op, "attention_weights", weights, "(b, q, h, L, P)", (b, q, h, levels, points))
    require_like(op, "value_spatial_shapes", shapes, torch.int64, value, "value")
    require_shape(op, "value_spatial_shapes", shapes, "(L, 2)", (levels, 2))
    require_like(op, "value_level_start_index", starts, torch.int64, value, "value")
    require_shape(op, "value_level_start_index", starts, "(L,)", (levels,))


def check_levels(op: str, value: Tensor, shapes: Tensor, starts: Tensor) -> None:
    """Raises ValueError unless each level is within value: these are data, which no fake has."""
    s = value.shape[1]
    require(s <= _LIMIT, op, "value", "of at most 2^31 - 1 positions", s)
    for level, ((height, width), start) in enumerate(
        zip(shapes.tolist(), starts.tolist(), strict=True)
    ):
        sizes = 0 <= height <= _LIMIT and 0 <= width <= _LIMIT
        name = f"value_spatial_shapes[{level}]"
        require(sizes, op, name, "of sizes from 0 to 2^31 - 1", (height, width))
        within = 0 <= start <= s - height * width
        expected = f"such that {height} x {width} positions from there are within value's {s}"
        require(within, op, f"value_level_start_index[{level}]", expected, start)


def check_cotangent(op: str, dout: Tensor, value: Tensor, locations: Tensor) -> None:
    """Raises ValueError unless the cotangent fits inputs that passed `check`."""
    b, _, h, c = value.shape
    require_like(op, "dout", dout, value.dtype, value, "value")
    require_shape(op, "dout", dout, "(b, q, h*c)", (b, locations.shape[1], h * c))


def fake_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """An empty output of `fuseport::ms_deform_attn`."""
    given = (value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)
    check("ms_deform_attn", value, *given)
    b, _, h, c = value.shape
    return value.new_empty((b, sampling_locations.shape[1], h * c))


def fake_backward(
    dout: Tensor,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `fuseport::ms_deform_attn_backward`."""
    op = "ms_deform_attn_backward"
    given = (value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)
    check(op, value, *given)
    check_cotangent(op, dout, value, sampling_locations)
    return (
        value.new_empty(value.shape),
        sampling_locations.new_empty(sampling_locations.shape),
        attention_weights.new_empty(attention_weights.shape),
    )
