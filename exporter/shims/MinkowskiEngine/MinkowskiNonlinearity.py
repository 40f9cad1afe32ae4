"""Modules of torch over features: the attribute `module` of each is one."""

from typing import Any

import torch
from torch import nn

from .MinkowskiCommon import MinkowskiModuleBase

__all__ = [
    "MinkowskiAdaptiveLogSoftmaxWithLoss",
    "MinkowskiAlphaDropout",
    "MinkowskiCELU",
    "MinkowskiDropout",
    "MinkowskiELU",
    "MinkowskiGELU",
    "MinkowskiHardshrink",
    "MinkowskiHardsigmoid",
    "MinkowskiHardswish",
    "MinkowskiHardtanh",
    "MinkowskiLeakyReLU",
    "MinkowskiLogSigmoid",
    "MinkowskiLogSoftmax",
    "MinkowskiNonlinearityBase",
    "MinkowskiPReLU",
    "MinkowskiRReLU",
    "MinkowskiReLU",
    "MinkowskiReLU6",
    "MinkowskiSELU",
    "MinkowskiSiLU",
    "MinkowskiSigmoid",
    "MinkowskiSinusoidal",
    "MinkowskiSoftmax",
    "MinkowskiSoftmin",
    "MinkowskiSoftplus",
    "MinkowskiSoftshrink",
    "MinkowskiSoftsign",
    "MinkowskiTanh",
    "MinkowskiTanhshrink",
    "MinkowskiThreshold",
]


class MinkowskiNonlinearityBase(MinkowskiModuleBase):
    """Of a sparse tensor, or a field."""

    MODULE: type[nn.Module]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.MODULE(*args, **kwargs)

    def forward(self, input: Any) -> Any:
        """Of its features."""
        return input.with_features(self.module(input.F))


def _of(module: type[nn.Module]) -> type[MinkowskiNonlinearityBase]:
    name = f"Minkowski{module.__name__}"
    members = {"MODULE": module, "__module__": __name__, "__doc__": f"`{module.__name__}`."}
    return type(name, (MinkowskiNonlinearityBase,), members)


MinkowskiELU = _of(nn.ELU)
MinkowskiHardshrink = _of(nn.Hardshrink)
MinkowskiHardsigmoid = _of(nn.Hardsigmoid)
MinkowskiHardtanh = _of(nn.Hardtanh)
MinkowskiHardswish = _of(nn.Hardswish)
MinkowskiLeakyReLU = _of(nn.LeakyReLU)
MinkowskiLogSigmoid = _of(nn.LogSigmoid)
MinkowskiPReLU = _of(nn.PReLU)
MinkowskiReLU = _of(nn.ReLU)
MinkowskiReLU6 = _of(nn.ReLU6)
MinkowskiRReLU = _of(nn.RReLU)
MinkowskiSELU = _of(nn.SELU)
MinkowskiCELU = _of(nn.CELU)
MinkowskiGELU = _of(nn.GELU)
MinkowskiSigmoid = _of(nn.Sigmoid)
MinkowskiSiLU = _of(nn.SiLU)
MinkowskiSoftplus = _of(nn.Softplus)
MinkowskiSoftshrink = _of(nn.Softshrink)
MinkowskiSoftsign = _of(nn.Softsign)
MinkowskiTanh = _of(nn.Tanh)
MinkowskiTanhshrink = _of(nn.Tanhshrink)
MinkowskiThreshold = _of(nn.Threshold)
MinkowskiSoftmin = _of(nn.Softmin)
MinkowskiSoftmax = _of(nn.Softmax)
MinkowskiLogSoftmax = _of(nn.LogSoftmax)
MinkowskiAdaptiveLogSoftmaxWithLoss = _of(nn.AdaptiveLogSoftmaxWithLoss)
MinkowskiDropout = _of(nn.Dropout)
MinkowskiAlphaDropout = _of(nn.AlphaDropout)


class MinkowskiSinusoidal(MinkowskiModuleBase):
    """sin(x · kernel + bias) · coef."""

    def __init__(self, in_channel: int, out_channel: int) -> None:
        super().__init__()
        self.in_channel = in_channel
        self.out_channel = out_channel
        self.kernel = nn.Parameter(torch.rand(in_channel, out_channel))
        self.bias = nn.Parameter(torch.rand(1, out_channel))
        self.coef = nn.Parameter(torch.rand(1, out_channel))

    def forward(self, input: Any) -> Any:
        """Of a sparse tensor, or a field."""
        return input.with_features(
            torch.sin(input.F @ self.kernel + self.bias.flatten()) * self.coef.flatten()
        )
