"""Blocks around attention and an MLP: dropout, add to the residual stream, norm, layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.shims.mamba_ssm.modules._initial import wide

from ..ops.triton.layer_norm import RMSNorm, layer_norm_fn
from .mha import MHA
from .mlp import Mlp

__all__ = ["Block", "ParallelBlock"]


class Block(nn.Module):
    """A layer and an MLP, each with dropout, addition and norm.

    With `prenorm` these come before it, and the residual stream is passed on beside; else after.

    Args:
        dim: width of the residual stream.
        mixer_cls: width → the layer; None for attention with heads of 64.
        mlp_cls: width → the MLP; None for one four times as wide, `nn.Identity` for none.
        norm_cls: width → a norm.
        dropout_cls: probability → what drops.
        prenorm: whether norms come first.
        resid_dropout1: probability before the first addition, in training.
        resid_dropout2: before the second.
        drop_path1: probability with which an item of the batch adds nothing, in training.
        drop_path2: the same of the second addition.
        fused_dropout_add_ln: addition and norm are one function, which computes in float32.
        return_residual: without `prenorm`, layers return their inputs, too.
        residual_in_fp32: the residual stream is float32; with `prenorm` only.
        sequence_parallel: has no effect.
        mark_shared_params: has no effect.

    Raises:
        ValueError: options do not go together.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module] | None = None,
        mlp_cls: Callable[[int], nn.Module] | None = None,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        if residual_in_fp32 and not prenorm:
            raise ValueError("Block: residual_in_fp32 needs prenorm")
        self.prenorm = prenorm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.return_residual = return_residual
        self.residual_in_fp32 = residual_in_fp32
        self.mixer: Any = _mixer(mixer_cls, dim)
        self.dropout1: Any = dropout_cls(resid_dropout1)
        self.drop_path1 = _DropPath(drop_path1)
        self.norm1: Any = norm_cls(dim)
        self.mlp: Any = _mlp(mlp_cls, dim)
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2: Any = dropout_cls(resid_dropout2)
            self.drop_path2 = _DropPath(drop_path2)
            self.norm2: Any = norm_cls(dim)
        if fused_dropout_add_ln:
            _check(self.norm1, self.dropout1)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The layer's."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Any = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """(b, l, dim), and with `prenorm` the residual stream or None → what came in.

        Args:
            hidden_states: what the layer before returned.
            residual: what it is added to; None in the first block, and without `prenorm`.
            mixer_subset: with `prenorm`, which steps the layer is asked of; None for all.
            mixer_kwargs: for the layer.

        Raises:
            ValueError: a residual is given without `prenorm`.
        """
        given = dict(mixer_kwargs or {})
        after = not isinstance(self.mlp, nn.Identity)
        if not self.prenorm:
            if residual is not None:
                raise ValueError("Block: without prenorm there is no residual stream")
            hidden_states = self._added(1, *self._mixed(self.mixer, hidden_states, given))
            if after:
                hidden_states = self._added(2, *self._mixed(self.mlp, hidden_states, {}))
            return hidden_states
        hidden_states, total = self._normed(1, hidden_states, residual)
        if mixer_subset is not None:
            given["mixer_subset"], total = mixer_subset, total[:, mixer_subset]
        hidden_states = self.mixer(hidden_states, **given)
        if after:
            hidden_states, total = self._normed(2, hidden_states, total)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, total

    def _mixed(self, layer: Any, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """What a layer returns, and what it is added to."""
        if not self.return_residual:
            return layer(x, **given), x
        y, x = layer(x, **given)
        return y, x

    def _normed(self, which: int, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum."""
        norm, dropout, path = self._parts(which)
        if self.fused_dropout_add_ln:
            normed, total = self._fused(which, x, residual)
            return normed, total
        total = path(dropout(x))
        total = total if residual is None else total + residual
        normed = norm(total.to(norm.weight.dtype))
        return normed, wide(total) if self.residual_in_fp32 else total

    def _added(self, which: int, y: Tensor, x: Tensor) -> Tensor:
        """The norm of a sum."""
        norm, dropout, path = self._parts(which)
        if self.fused_dropout_add_ln:
            out: Tensor = self._fused(which, y, x)
        else:
            out = norm((path(dropout(y)) + x).to(norm.weight.dtype))
        return out

    def _fused(self, which: int, x: Tensor, residual: Tensor | None) -> Any:
        norm, dropout, path = self._parts(which)
        rows = path(x.new_ones(x.shape[:-1])) if path.p > 0.0 and self.training else None
        return layer_norm_fn(
            x,
            norm.weight,
            norm.bias,
            residual=residual,
            eps=norm.eps,
            dropout_p=dropout.p if self.training else 0.0,
            rowscale=rows,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
            is_rms_norm=isinstance(norm, RMSNorm),
        )

    def _parts(self, which: int) -> tuple[Any, Any, "_DropPath"]:
        if which == 1:
            return self.norm1, self.dropout1, self.drop_path1
        return self.norm2, self.dropout2, self.drop_path2


class ParallelBlock(nn.Module):
    """A layer and an MLP side by side, as in GPT-J and PaLM; both are added in the next block.

    Args:
        dim: width of the residual stream.
        mixer_cls: width → the layer; None for attention with heads of 64.
        mlp_cls: width → the MLP; None for one four times as wide.
        norm_cls: width → a norm.
        dropout_cls: probability → what drops.
        resid_dropout1: probability of what the layer before adds, in training.
        resid_dropout2: of what the MLP before adds.
        tied_norm: whether both have one norm.
        fused_dropout_add_ln: addition and norms are one function, which computes in float32.
        residual_in_fp32: the residual stream is float32.
        sequence_parallel: has no effect.
        mark_shared_params: has no effect.

    Raises:
        ValueError: options do not go together.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module] | None = None,
        mlp_cls: Callable[[int], nn.Module] | None = None,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        self.mixer: Any = _mixer(mixer_cls, dim)
        self.dropout1: Any = dropout_cls(resid_dropout1)
        self.norm1: Any = norm_cls(dim)
        self.mlp: Any = _mlp(mlp_cls, dim)
        self.dropout2: Any = dropout_cls(resid_dropout2)
        if not tied_norm:
            self.norm2: Any = norm_cls(dim)
        if fused_dropout_add_ln:
            _check(self.norm1, self.dropout1)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The layer's."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(b, l, dim) of the layer and of the MLP before, and the residual stream → all three.

        Args:
            hidden_states1: of the layer before, or embeddings.
            hidden_states2: of the MLP before; None in the first block.
            residual: what they are added to; None in the first block.
            mixer_kwargs: for the layer.
        """
        if self.fused_dropout_add_ln:
            second = (None, None) if self.tied_norm else (self.norm2.weight, self.norm2.bias)
            first, *rest, total = layer_norm_fn(
                hidden_states1,
                self.norm1.weight,
                self.norm1.bias,
                residual=residual,
                x1=hidden_states2,
                weight1=second[0],
                bias1=second[1],
                eps=self.norm1.eps,
                dropout_p=self.dropout1.p if self.training else 0.0,
                prenorm=True,
                residual_in_fp32=self.residual_in_fp32,
                is_rms_norm=isinstance(self.norm1, RMSNorm),
            )
            other = rest[0] if rest else first
        else:
            total = self.dropout1(hidden_states1)
            if residual is not None:
                total = residual + total
            if hidden_states2 is not None:
                total = total + self.dropout2(hidden_states2)
            first = self.norm1(total.to(self.norm1.weight.dtype))
            other = first if self.tied_norm else self.norm2(total.to(self.norm2.weight.dtype))
            total = wide(total) if self.residual_in_fp32 else total
        return self.mixer(first, **(mixer_kwargs or {})), self.mlp(other), total


class _DropPath(nn.Module):
    """In training, items of a batch are zero with a probability, and others larger by it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """(b, …) → the same."""
        if not self.training or self.p == 0.0:
            return x
        stays = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.p
        return x * stays.to(x.dtype) / (1.0 - self.p)


def _mixer(made: Callable[[int], nn.Module] | None, dim: int) -> nn.Module:
    return (partial(MHA, num_heads=dim // 64) if made is None else made)(dim)


def _mlp(made: Callable[[int], nn.Module] | None, dim: int) -> nn.Module:
    return (partial(Mlp, hidden_features=4 * dim) if made is None else made)(dim)


def _check(norm: nn.Module, dropout: nn.Module) -> None:
    if not isinstance(norm, nn.LayerNorm | RMSNorm) or not isinstance(dropout, nn.Dropout):
        raise ValueError(
            "fused_dropout_add_ln takes LayerNorm or RMSNorm, and torch's Dropout only"
        )
