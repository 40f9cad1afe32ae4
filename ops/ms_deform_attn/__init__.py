"""Multi-scale deformable attention: each query reads a few points of feature maps of several sizes.

Signature and semantics follow the extension that models in the wild call,
`MultiScaleDeformableAttention.ms_deform_attn_forward` (Zhu et al., "Deformable DETR: Deformable
transformers for end-to-end object detection", 2021, equation 3), so that those models work
unchanged.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.evidence import Evidence
from fuseport.ops.ms_deform_attn import reference, shapes
from fuseport.ops.ms_deform_attn.cases import BENCH, BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "ms_deform_attn"]


def ms_deform_attn(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int = 64,
) -> Tensor:
    """Attend to bilinear samples; b batch, s positions, h heads, c channels, q queries.

    out[b, q, h] = Σ over L levels and P points of attention_weights · sample, where the sample is
    of the level's map (H, W, c) of that batch entry and head, at x·W - 0.5 across and y·H - 0.5
    down: 0 and 1 are the outer edges of the map. Outside there is zero: `grid_sample` with
    `align_corners=False` and `padding_mode="zeros"`. The gradient of a location jumps where a
    sample is at the centre of a row or column of pixels; there it is that of the pixels beyond.

    Args:
        value: (b, s, h, c), float16, bfloat16, float32 or float64: the maps of all levels, each
            row by row, one after another.
        value_spatial_shapes: (L, 2), int64: H and W of each level.
        value_level_start_index: (L,), int64: the position of each level's first pixel.
        sampling_locations: (b, q, h, L, P, 2), as (x, y) in units of the map; any number. Of
            value's dtype, or float32 where that is a half type.
        attention_weights: (b, q, h, L, P), the dtype of sampling_locations.
        im2col_step: how many batch entries the extension takes at a time; nothing depends on it.

    Returns:
        (b, q, h·c), contiguous, in value's dtype; differentiable, once, in value,
        sampling_locations and attention_weights.

    Raises:
        ValueError: a shape, dtype or device does not fit, or a level is not within value; the
            message names the argument. The kernels for CUDA, which wait for nobody to read sizes
            of levels, make NaN of the outputs and gradients that such a level has a part in.
    """
    del im2col_step
    registration.ensure(SPEC)
    out: Tensor = torch.ops.fuseport.ms_deform_attn(
        value,
        value_spatial_shapes,
        value_level_start_index,
        sampling_locations,
        attention_weights,
    )
    return out


SPEC = OpSpec(
    name="ms_deform_attn",
    package=__name__,
    function=ms_deform_attn,
    operators=(
        Operator(
            name="ms_deform_attn",
            schema="(Tensor value, Tensor value_spatial_shapes, Tensor value_level_start_index, "
            "Tensor sampling_locations, Tensor attention_weights) -> Tensor out",
            reference=reference.ms_deform_attn,
            fake=shapes.fake_forward,
            backward="ms_deform_attn_backward",
        ),
        Operator(
            name="ms_deform_attn_backward",
            schema="(Tensor dout, Tensor value, Tensor value_spatial_shapes, "
            "Tensor value_level_start_index, Tensor sampling_locations, Tensor attention_weights) "
            "-> (Tensor dvalue, Tensor dsampling_locations, Tensor dattention_weights)",
            reference=reference.ms_deform_attn_backward,
            fake=shapes.fake_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=(
        "MultiScaleDeformableAttention",
        "MultiScaleDeformAttn",
        "ms_deform_attn",
        "MSDeformAttn",
    ),
    lacks={"ONNX native": "no such operator"},
    bench=BENCH,
    evidence=(
        Evidence(
            "multi-scale deformable attention",
            {"sampling_offsets.weight": (None, None), "attention_weights.weight": (None, None)},
        ),
    ),
)
