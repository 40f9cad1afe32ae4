"""Complex numbers in ONNX, which has no operators of them: as their real and imaginary parts.

Parts are values of their own from where they come up to where they end, and stand side by side,
as `torch.view_as_real` has them, only where a Fourier transform takes or gives them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseport.exporter.formats._onnx.lowering import rewritten
from fuseport.exporter.program.complex_numbers.complex_forms import (
    FORMS,
    Complex,
    constant_pad,
    parts_of,
    whole,
)
from fuseport.exporter.program.complex_numbers.in_parts import InParts, composites, has_complex
from fuseport.exporter.program.complex_numbers.real_regions import real_regions
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.rewriting import Rewriting
from fuseport.exporter.program.tracing import any_sizes

__all__ = ["in_parts"]

aten = torch.ops.aten


def in_parts(exported: ExportedProgram) -> ExportedProgram:
    """The program without operators of complex numbers, but transforms and views as real ones.

    Raises:
        ExportFailed: there is no form of an operator.
    """
    exported = real_regions(exported, _FORMS)
    if not any(has_complex(node) for node in exported.graph.nodes):
        return exported
    mode = mode_of(exported.graph)
    with any_sizes():
        if composite := composites(exported.graph, _FORMS):
            exported = rewritten(exported, Rewriting(mode, composite))
        return rewritten(exported, InParts(mode, _FORMS))


# Fourier transforms, which torch.onnx knows of tensors whose parts stand side by side: forwards and
# in float64. ONNX Runtime's of other sizes than powers of 2, 1.31 at least, are off by a part in
# 10,000 in float32, and backwards, in float64, by one in 10 million; and are no faster.


def _of_reals(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Complex:
    # One dimension at a time, so that all results say their sizes: ONNX Runtime, 1.31 at least,
    # takes half of the frequencies for all of them where it has to find out.
    found = aten._fft_r2c.default(x.double(), dims[-1:], normalization, onesided)
    z = Complex(*(part.to(x.dtype) for part in parts_of(found)))
    z = _transform(z, dims[:-1], normalization, True) if len(dims) > 1 else z
    # A frequency that is its own opposite, 0 or half of all, has no imaginary part, as torch's: an
    # angle there is π, and -π by what rounding leaves.
    own = torch.ones((), dtype=torch.bool, device=x.device)
    for dim in dims:
        count = x.shape[dim] // 2 + 1 if onesided and dim == dims[-1] else x.shape[dim]
        twice = 2 * torch.arange(count, device=x.device) % x.shape[dim]
        own = own & twice.eq(0).reshape([-1 if i == dim else 1 for i in range(x.dim())])
    return Complex(z.re, z.im.masked_fill(own, 0.0))


def _transform(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Complex:
    # Backwards is forwards of what has its parts exchanged, and they are again.
    pair = parts_of(x) if forward else parts_of(x)[::-1]
    given = torch.view_as_complex(torch.stack([part.double() for part in pair], -1))
    found = parts_of(aten._fft_c2c.default(given, dims, normalization, True))
    re, im = (part.to(pair[0].dtype) for part in (found if forward else found[::-1]))
    return Complex(re, im)


def _to_real(x: Any, dims: Sequence[int], normalization: int, length: Any) -> Tensor:
    # ONNX Runtime, 1.31 at least, takes a wrong size for the result of a transform of half the
    # frequencies, where the size is dynamic. The others are the conjugates of these.
    z = whole(x) if len(dims) == 1 else _transform(x, dims[:-1], normalization, False)
    last, kept = dims[-1], length // 2 + 1
    more = kept - z.re.shape[last]
    if not statically_known_true(more == 0):
        z = constant_pad(z, [0] * 2 * (z.re.dim() - 1 - last) + [0, more])
    mirrored = torch.arange(length - kept, 0, -1, device=z.re.device)
    full = (
        torch.cat([part, sign * part.index_select(last, mirrored)], last)
        for part, sign in ((z.re, 1), (z.im, -1))
    )
    return _transform(Complex(*full), [last], normalization, False).re


_FORMS = {
    **FORMS,
    aten._fft_r2c.default: _of_reals,
    aten._fft_c2c.default: _transform,
    aten._fft_c2r.default: _to_real,
}
