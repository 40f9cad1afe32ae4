"""Angles of points, for which ONNX has no operator.

torch.onnx takes what lies on the negative axis to be below it, and every NaN for 0. Real spectra
have their first and last frequencies there.
"""

import math

import torch
from torch import Tensor

from fuseport.exporter.formats._onnx.functions.special import signbit
from fuseport.exporter.program.rewriting import Table

__all__ = ["ANGLES"]

aten = torch.ops.aten


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    kind = torch.result_type(y, x)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    y, x = y.to(kind), x.to(kind)
    endless = torch.isinf(x) & torch.isinf(y)
    ratio = y / torch.where((x == 0) & (y == 0), torch.ones_like(x), x)
    angle = torch.atan(torch.where(endless, torch.sign(x) * torch.sign(y), ratio))
    around = torch.where(signbit(y), -math.pi, math.pi).to(kind)
    return torch.where(signbit(x), angle + around, angle)


ANGLES: Table = {aten.atan2.default: _atan2}
