"""What cases of ops at random shapes and flags are made from, drawn by op.

Many sizes are at the edges of blocks of 16 to 256, where kernels err.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuseport.ops.causal_conv1d.cases import _Shape as ConvShape
from fuseport.ops.causal_conv1d_update.cases import _Shape as ConvStepShape
from fuseport.ops.correlation.cases import _Shape as CorrelationShape
from fuseport.ops.cross_scan.cases import ImageShape
from fuseport.ops.deform_conv2d.cases import _Shape as DeformConvShape
from fuseport.ops.dplr_delta_rule.cases import _Shape as LowRankShape
from fuseport.ops.gated_delta_rule.cases import _Shape as DeltaShape
from fuseport.ops.matmul_nbits.cases import _Shape as NBitsShape
from fuseport.ops.matmul_nbits.storage import BITS
from fuseport.ops.ms_deform_attn.cases import _Shape as DeformShape
from fuseport.ops.nf4_linear.cases import _Shape as LinearShape
from fuseport.ops.nf4_linear.storage import QUANT_TYPES
from fuseport.ops.rms_norm.cases import NormShape
from fuseport.ops.rotary_embedding.cases import _Shape as RotaryShape
from fuseport.ops.selective_scan.cases import _Shape as ScanShape
from fuseport.ops.selective_state_update.cases import _Shape as StateShape
from fuseport.ops.softmax_cross_entropy.cases import _Shape as LossShape
from fuseport.ops.spec import Inputs
from fuseport.ops.ssd_chunk_scan.cases import _Shape as ChunkShape
from fuseport.ops.swiglu.cases import _Shape as GatedShape

__all__ = ["DRAWS", "Draw", "Source", "divisor", "flag", "size"]


class Source(random.Random):
    """What is drawn from; no size is more than `most`."""

    most = 10_000


Draw = Callable[[Source], tuple[str, Any]]


def size(r: Source, most: int) -> int:
    """From 1 to `most`: as often small as large, and often beside a power of two."""
    most = min(most, r.most)
    if r.random() < 0.4:
        edges = [n + off for n in (16, 32, 64, 128, 256) for off in (-1, 0, 1) if n + off <= most]
        if edges:
            return r.choice(edges)
    return min(most, int(2 ** r.uniform(0, torch.tensor(most + 0.999).log2().item())))


def flag(r: Source) -> bool:
    return r.random() < 0.5


def divisor(r: Source, of: int) -> int:
    return r.choice([n for n in range(1, of + 1) if of % n == 0])


def _scan(r: Source) -> tuple[str, Any]:
    d = size(r, 130)
    groups: tuple[int | None, ...] = (None, 0, divisor(r, d), divisor(r, d))
    shape = ScanShape(
        b=size(r, 4),
        d=d,
        l=size(r, 300),
        N=size(r, 40),
        B_groups=r.choice(groups),
        C_groups=r.choice(groups),
        skip=flag(r),
        gated=flag(r),
        bias=flag(r),
        softplus=flag(r),
        complex=r.random() < 0.2,
    )
    return "selective_scan_gated" if shape.gated else "selective_scan", shape


def _conv(r: Source) -> tuple[str, Any]:
    packed = tuple(r.choice((-1, 0, 1, 2, 7)) for _ in range(r.randrange(1, 6)))
    shape = ConvShape(
        b=size(r, 4),
        d=size(r, 130),
        l=size(r, 600),
        W=size(r, 9),
        bias=flag(r),
        silu=flag(r),
        packed=packed if flag(r) else (),
        wide_weight=flag(r),
    )
    return "causal_conv1d_packed" if shape.packed else "causal_conv1d", shape


def _conv_step(r: Source) -> tuple[str, Any]:
    width = size(r, 9)
    slots = max(width - 1, 1) + size(r, 8) - 1
    circular = tuple(r.randrange(0, 3 * slots) for _ in range(4)) if flag(r) else ()
    shape = ConvStepShape(
        b=size(r, 8),
        d=size(r, 300),
        l=size(r, 12),
        W=width,
        slots=slots,
        silu=flag(r),
        seqlens=circular,
        wide_weight=flag(r),
    )
    return "causal_conv1d_update_circular" if circular else "causal_conv1d_update", shape


def _state(r: Source) -> tuple[str, Any]:
    h = size(r, 12)
    shape = StateShape(
        b=size(r, 6),
        h=h,
        d=size(r, 130),
        N=size(r, 130),
        g=divisor(r, h),
        gated=flag(r),
        softplus=flag(r),
        first=flag(r),
        wide_state=flag(r),
    )
    return "selective_state_update_gated" if shape.gated else "selective_state_update", shape


def _chunk(r: Source) -> tuple[str, Any]:
    H, length = size(r, 12), size(r, 700)
    starts = sorted(r.sample(range(1, length), min(length - 1, r.randrange(0, 4))))
    shape = ChunkShape(
        b=size(r, 3),
        l=length,
        H=H,
        P=size(r, 70),
        N=size(r, 130),
        G=divisor(r, H),
        gated=flag(r),
        softplus=flag(r),
        skip=flag(r),
        initial=flag(r),
        limit=r.choice(((0.0, float("inf")), (0.05, 0.6))),
        packed=((0, 0), *((n + 1, start) for n, start in enumerate(starts))),
    )
    # In the place of one kind in eight, so that draws keep their numbers.
    limited = shape.limit[0] > 0 and not shape.softplus
    shape = replace(shape, discrete=limited and not shape.gated)
    return shape.operator, shape


def _delta(r: Source) -> tuple[str, Any]:
    H = size(r, 8)
    shape = DeltaShape(
        b=size(r, 3),
        l=size(r, 150),
        G=divisor(r, H),
        H=H,
        K=size(r, 130),
        V=size(r, 130),
        channels=flag(r),
        initial=flag(r),
        forgets=r.choice((-6.0, -1.0, 3.0)),
        scale=r.choice((0.1, 1.0, -2.0)),
    )
    return "gated_delta_rule", shape


def _low_rank(r: Source) -> tuple[str, Any]:
    shape = LowRankShape(
        n=size(r, 3),
        l=size(r, 150),
        H=size(r, 8),
        K=size(r, 130),
        V=size(r, 130),
        initial=flag(r),
        forgets=r.choice((-6.0, -1.0, 3.0)),
        scale=r.choice((0.1, 1.0, -2.0)),
    )
    return "dplr_delta_rule", shape


def _norm(r: Source, gate: bool | None) -> NormShape:
    d = size(r, 700)
    shape = (*(size(r, 20) for _ in range(r.randrange(1, 3))), d)
    return NormShape(shape, r.choice((None, divisor(r, d))), r.choice((1e-5, 0.1)), flag(r), gate)


def _deform(r: Source) -> tuple[str, Any]:
    levels = tuple((size(r, 20), size(r, 20)) for _ in range(size(r, 4)))
    shape = DeformShape(
        b=size(r, 3),
        h=size(r, 4),
        c=size(r, 70),
        q=size(r, 130),
        P=size(r, 5),
        levels=levels,
        reach=r.choice((0.5, 1.4, 3.0)),
        wide_points=flag(r),
    )
    return "ms_deform_attn", shape


def _deform_conv(r: Source) -> tuple[str, Any]:
    depthwise = r.random() < 0.2
    groups = size(r, 60 if depthwise else 4)
    c, o = (groups * (1 if depthwise else size(r, 40)) for _ in range(2))
    kernel = size(r, 4), size(r, 4)
    dilation = size(r, 3), size(r, 3)
    padding = r.randrange(4), r.randrange(4)
    # So large that the filter is within the padded image.
    reached = zip(dilation, kernel, padding, strict=True)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in reached]
    shape = DeformConvShape(
        b=size(r, 3),
        c=c,
        o=o,
        image=(least[0] + size(r, 24) - 1, least[1] + size(r, 24) - 1),
        kernel=kernel,
        groups=groups,
        offset_groups=divisor(r, c),
        stride=(size(r, 3), size(r, 3)),
        padding=padding,
        dilation=dilation,
        reach=r.choice((0.5, 1.5, 10.0)),
        modulated=flag(r),
    )
    return "deform_conv2d_modulated" if shape.modulated else "deform_conv2d", shape


def _correlation(r: Source) -> tuple[str, Any]:
    kernel = (1, 1) if flag(r) else (size(r, 4), size(r, 4))
    dilation = size(r, 3), size(r, 3)
    padding = r.randrange(-3, 5), r.randrange(-3, 5)
    # So large that a window is within the padded image.
    reached = zip(dilation, kernel, padding, strict=True)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in reached]
    shape = CorrelationShape(
        b=size(r, 3),
        c=size(r, 150),
        image=(least[0] + size(r, 24) - 1, least[1] + size(r, 40) - 1),
        kernel=kernel,
        patch=(size(r, 9), size(r, 9)),
        stride=(size(r, 3), size(r, 3)),
        padding=padding,
        dilation=dilation,
        dilation_patch=(size(r, 4), size(r, 4)),
    )
    return "correlation", shape


def _linear(r: Source) -> tuple[str, Any]:
    block = 2 ** r.randrange(4, 9)
    code = r.choice(QUANT_TYPES)
    return "nf4_linear", LinearShape((size(r, 70),), size(r, 600), size(r, 200), block, code)


def _nbits(r: Source) -> tuple[str, Any]:
    group = r.choice((16, 32, 48, 64, 128, 256))
    sizes = size(r, 600), size(r, 200)
    return "matmul_nbits", NBitsShape((size(r, 70),), *sizes, r.choice(BITS), group, flag(r))


def _image(r: Source, walks: bool) -> ImageShape:
    return ImageShape(size(r, 4), size(r, 20), size(r, 70), size(r, 70), walks=walks)


def _gated(r: Source) -> tuple[str, Any]:
    shape = GatedShape((size(r, 5), size(r, 20), size(r, 300)), r.choice((1.0, 40.0)))
    return ("swiglu_packed", _Halves(shape)) if flag(r) else ("swiglu", shape)


def _rotary(r: Source) -> tuple[str, Any]:
    pairs = r.choice((0, *(size(r, 80) for _ in range(9))))
    rest = r.choice((0, 0, 0, 8, size(r, 20)))
    of_heads = size(r, 5), size(r, 40), size(r, 130)
    shape = RotaryShape(*of_heads, 2 * pairs + rest, pairs, flag(r), flag(r), flag(r))
    return "rotary_embedding", shape if shape.p else replace(shape, p=1)


def _loss(r: Source) -> tuple[str, Any]:
    n, classes = size(r, 40), size(r, 5000)
    ignored = tuple(i for i in range(n) if r.random() < 0.2)
    smoothing = r.choice((0.0, 0.0, 0.1, 1.0))
    offset = r.choice((0.0, 0.0, 50.0))
    return "softmax_cross_entropy", LossShape(
        n, classes, r.choice((-100, classes)), ignored, smoothing, r.choice((0.1, 2.0)), offset
    )


@dataclass(frozen=True)
class _Halves:
    """The two tensors of a shape as halves of one."""

    of: GatedShape

    def make(self, dtype: torch.dtype, seed: int) -> Inputs:
        return self.of.packed(dtype, seed)


DRAWS: dict[str, Draw] = {
    "selective_scan": _scan,
    "causal_conv1d": _conv,
    "causal_conv1d_update": _conv_step,
    "selective_state_update": _state,
    "ssd_chunk_scan": _chunk,
    "gated_delta_rule": _delta,
    "dplr_delta_rule": _low_rank,
    "rms_norm": lambda r: ("rms_norm", _norm(r, None)),
    "rms_norm_gated": lambda r: ("rms_norm_gated", _norm(r, flag(r))),
    "correlation": _correlation,
    "deform_conv2d": _deform_conv,
    "ms_deform_attn": _deform,
    "nf4_linear": _linear,
    "matmul_nbits": _nbits,
    "cross_scan": lambda r: ("cross_scan", _image(r, walks=False)),
    "cross_merge": lambda r: ("cross_merge", _image(r, walks=True)),
    "swiglu": _gated,
    "rotary_embedding": _rotary,
    "softmax_cross_entropy": _loss,
}
"""By op: the operator and what a case of it is made from, drawn."""
