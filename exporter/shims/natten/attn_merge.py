"""Attentions of the same queries to several sets of keys, as one to all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["merge_attentions"]


def merge_attentions(
    outputs: Sequence[Tensor],
    lse_tensors: Sequence[Tensor],
    torch_compile: bool = True,
    use_autograd_fix: bool = True,
) -> tuple[Tensor, Tensor]:
    """What attention to all keys gives.

    Args:
        outputs: of two sets of keys at least, (b, l, h, d) each.
        lse_tensors: the logarithm of each query's sum, (b, l, h), of each set.
        torch_compile: has no effect.
        use_autograd_fix: has none; gradients are those of what is computed.

    Returns:
        (b, l, h, d), in the dtype of `outputs`, and (b, l, h).

    Raises:
        ValueError: there are not as many of both, or fewer than two, or shapes differ.
    """
    if len(outputs) < 2 or len(outputs) != len(lse_tensors):
        raise ValueError(
            f"natten: two attentions are merged at least, and {len(outputs)} outputs and "
            f"{len(lse_tensors)} logarithms of sums were given"
        )
    shape = outputs[0].shape
    if any(o.shape != shape for o in outputs) or any(t.shape != shape[:-1] for t in lse_tensors):
        raise ValueError("natten: attentions that are merged are of one shape")
    sums = torch.stack([*lse_tensors])
    out = (torch.stack([*outputs]).to(sums.dtype) * sums.softmax(0)[..., None]).sum(0)
    return out.to(outputs[0].dtype), sums.logsumexp(0)
