"""Functions of torch over features; losses give a tensor of torch's."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def _of(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def over_features(input: Any, *args: Any, **kwargs: Any) -> Any:
        return input.with_features(function(input.F, *args, **kwargs))

    return over_features


def _loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_features(input: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return function(input.F, target, *args, **kwargs)

    return of_features


threshold = _of(F.threshold)
relu = _of(F.relu)
hardtanh = _of(F.hardtanh)
hardswish = _of(F.hardswish)
relu6 = _of(F.relu6)
elu = _of(F.elu)
selu = _of(F.selu)
celu = _of(F.celu)
leaky_relu = _of(F.leaky_relu)
prelu = _of(F.prelu)
rrelu = _of(F.rrelu)
glu = _of(F.glu)
gelu = _of(F.gelu)
logsigmoid = _of(F.logsigmoid)
hardshrink = _of(F.hardshrink)
tanhshrink = _of(F.tanhshrink)
softsign = _of(F.softsign)
softplus = _of(F.softplus)
softmin = _of(F.softmin)
softmax = _of(F.softmax)
softshrink = _of(F.softshrink)
gumbel_softmax = _of(F.gumbel_softmax)
log_softmax = _of(F.log_softmax)
tanh = _of(F.tanh)
sigmoid = _of(F.sigmoid)
hardsigmoid = _of(F.hardsigmoid)
silu = _of(F.silu)
batch_norm = _of(F.batch_norm)
normalize = _of(F.normalize)
linear = _of(F.linear)
dropout = _of(F.dropout)
alpha_dropout = _of(F.alpha_dropout)

binary_cross_entropy = _loss(F.binary_cross_entropy)
binary_cross_entropy_with_logits = _loss(F.binary_cross_entropy_with_logits)
poisson_nll_loss = _loss(F.poisson_nll_loss)
cross_entropy = _loss(F.cross_entropy)
hinge_embedding_loss = _loss(F.hinge_embedding_loss)
kl_div = _loss(F.kl_div)
l1_loss = _loss(F.l1_loss)
mse_loss = _loss(F.mse_loss)
multilabel_margin_loss = _loss(F.multilabel_margin_loss)
multilabel_soft_margin_loss = _loss(F.multilabel_soft_margin_loss)
multi_margin_loss = _loss(F.multi_margin_loss)
nll_loss = _loss(F.nll_loss)
smooth_l1_loss = _loss(F.smooth_l1_loss)
soft_margin_loss = _loss(F.soft_margin_loss)
