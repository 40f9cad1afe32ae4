"""What Mamba-3 gives to the scan, and what it makes of its result; letters as in `mamba3`."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.checks import require, require_shape
from fuseport.ops.compositions._mamba3_packed import Rows, Sequences
from fuseport.ops.rotary_embedding import rotary_embedding
from fuseport.ops.ssd_chunk_scan import ssd_discrete

__all__ = ["Given", "States"]

States = tuple[Tensor, Tensor, Tensor, Tensor]
"""What goes from one step to the next, S rows each: the angles, h, and the last k and v."""


@dataclass(frozen=True)
class Given:
    """The arguments of a scan, of rank 1 where there is no MIMO_V; see `mamba3`."""

    op: str
    Q: Tensor  # (b, l, R, G, N)
    K: Tensor
    V: Tensor  # (b, l, H, P)
    ADT: Tensor  # (b, H, l)
    DT: Tensor
    Trap: Tensor
    Q_bias: Tensor  # (H, R, N)
    K_bias: Tensor
    Angles: Tensor  # (b, l, H or 1, A)
    D: Tensor | None
    MIMO_V: Tensor | None  # (H, R, P)
    interleaved: bool
    is_step: bool = False

    def scanned(
        self, states: States | None, cu_seqlens: Tensor | None, with_states: bool
    ) -> tuple[Tensor, States]:
        """y, (b, l, R, H, P) in V's dtype or wider, and the last states; anything if they are not
        asked for."""
        self._check(states, cu_seqlens)
        if cu_seqlens is None:
            return self._scanned(states, None)
        if states is None and not with_states:
            return self._scanned(None, Sequences.of(cu_seqlens, self.V.shape[1]))
        rows = Rows.of(cu_seqlens, self.V.shape[1])
        given = replace(
            self,
            Q=rows.taken(self.Q, 1),
            K=rows.taken(self.K, 1),
            V=rows.taken(self.V, 1),
            ADT=rows.masked(rows.taken(self.ADT, 2)),
            DT=rows.masked(rows.taken(self.DT, 2)),
            Trap=rows.taken(self.Trap, 2),
            Angles=rows.taken(self.Angles, 1),
        )
        y, (angle, h, k, v) = given._scanned(states, None, rows)
        return rows.packed(y), (angle, h, k, v)

    def _scanned(
        self, states: States | None, sequences: Sequences | None, rows: Rows | None = None
    ) -> tuple[Tensor, States]:
        """y, and the states at the end of each row."""
        V, wide = self.V, self._wide
        b, length, ranks, _, width = self.Q.shape
        heads = V.shape[2]
        mix = None if self.MIMO_V is None else self.MIMO_V.to(wide)
        delta = self.DT.to(wide).mT
        gamma = delta * torch.sigmoid(self.Trap.to(wide)).mT
        before = delta - gamma
        after = F.pad(before[:, 1:], (0, 0, 0, 1))
        if sequences is not None:
            after = after.masked_fill(sequences.is_last[:, None], 0.0)

        turns = self._turns(states)
        turned = (turns - turns.floor()).to(wide).permute(0, 3, 1, 2)
        angles = (2 * math.pi) * turned.contiguous()
        by_step = angles.flatten(0, 1)
        tables = (by_step.cos(), by_step.sin())
        q = self._turned(self.Q, self.Q_bias, tables)
        k = self._turned(self.K, self.K_bias, tables)

        x = V * (gamma + after)[..., None]
        decay = self.ADT.to(wide).mT
        initial = None
        if states is not None:
            initial = states[1].to(wide) + self._outer(states, before[:, 0], mix)
        if mix is not None:
            x = x.unsqueeze(2) * mix.transpose(0, 1)
            decay = F.pad(decay.unsqueeze(2), (0, 0, 0, ranks - 1)).flatten(1, 2)
        index = None if sequences is None else sequences.index(ranks)
        inner = (b, length * ranks, heads)
        x = x.to(V.dtype).reshape(*inner, -1)
        k, q = k.reshape(*inner, width), q.reshape(*inner, width)
        y, h = ssd_discrete(x, decay, k, q, None, initial, index)
        y = y.reshape(b, length, ranks, heads, -1)
        y = torch.addcmul(y, V.unsqueeze(2), self._weights(gamma, after, mix))

        k = k.reshape(b, length, ranks, heads, width)
        angle = self._unwound(turns[..., -1]) if self.is_step else angles[:, -1]
        last = (angle, h, k[:, -1], V[:, -1])
        if rows is not None:
            last = (
                *last[:2],
                rows.last(k, states and states[2]),
                rows.last(V, states and states[3]),
            )
        return y, last

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.V.dtype == torch.float64 else torch.float32

    def _turns(self, states: States | None) -> Tensor:
        """The angles in turns, (b, H, A, l), float64, since a sum over many steps in float32 would
        lose their digits. Where a sequence begins in a packed row they go on: results depend on
        differences alone."""
        rates = torch.tanh(self.Angles.to(self._wide)).permute(0, 2, 3, 1)
        total = (rates.double() * (0.5 * self.DT.double()).unsqueeze(2)).cumsum(-1)
        if states is not None:
            total = total + (states[0].double() / (2 * math.pi))[..., None]
        return total

    def _unwound(self, turns: Tensor) -> Tensor:
        """Angles of so many turns in [-64π, 64π): where roundings differ they hardly jump there, as
        they would at 0, where sequences begin."""
        return (2 * math.pi) * (turns - 64.0 * (turns / 64.0 + 0.5).floor()).to(self._wide)

    def _turned(self, x: Tensor, bias: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Queries or keys with their bias, turned: (b·l, R, H, N), V's dtype."""
        groups = x.shape[3]
        by_group = bias.to(self._wide).transpose(0, 1).unflatten(1, (groups, -1))
        biased = (x.unsqueeze(4) + by_group).flatten(3, 4).flatten(0, 1)
        return _pairs_turned(biased, *tables, self.interleaved).to(self.V.dtype)

    def _outer(self, states: States, before: Tensor, mix: Tensor | None) -> Tensor:
        """What the state before the first step lacks: β_0 v kᵀ of the step before it."""
        k, v = states[2].to(self._wide), states[3].to(self._wide) * before[..., None]
        if mix is None:
            return v[..., None] * k.squeeze(1)[:, :, None]
        return torch.einsum("bhp,hrp,brhn->bhpn", v, mix, k)

    def _weights(self, gamma: Tensor, after: Tensor, mix: Tensor | None) -> Tensor:
        """What of V the scan's result lacks at its own step, and the skip: (b, l, R, H, P or 1)."""
        dots = self._dots()
        wide = self._wide
        if mix is None:
            weights = -after * dots[:, :, 0, 0]
            if self.D is not None:
                weights = weights + self.D.to(wide)
            return weights[:, :, None, :, None]
        ranks = mix.shape[1]
        seen = torch.ones(ranks, ranks, dtype=torch.bool, device=dots.device).tril()[..., None]
        weights = dots * torch.where(seen, -after[:, :, None, None], gamma[:, :, None, None])
        if self.D is not None:
            one = torch.eye(ranks, dtype=wide, device=dots.device)[..., None]
            weights = weights + one * self.D.to(wide)
        return torch.einsum("blrsh,hsp->blrhp", weights, mix)

    def _dots(self) -> Tensor:
        """q_r·k_s of each step: (b, l, R, R, H)."""
        wide, groups = self._wide, self.Q.shape[3]
        Q, K = self.Q.to(wide), self.K.to(wide)
        q, k = (t.to(wide).unflatten(0, (groups, -1)) for t in (self.Q_bias, self.K_bias))
        of_group = torch.einsum("blrgn,blsgn->blrsg", Q, K)[..., None]
        dots = of_group + torch.einsum("blrgn,ghsn->blrsgh", Q, k)
        dots = dots + torch.einsum("ghrn,blsgn->blrsgh", q, K)
        return (dots + torch.einsum("ghrn,ghsn->rsgh", q, k)).flatten(-2)

    def _check(self, states: States | None, cu_seqlens: Tensor | None) -> None:
        op, Q, V = self.op, self.Q, self.V
        require(V.dim() == 4, op, "V", "of 4 dimensions", tuple(V.shape))
        require(Q.dtype == V.dtype, op, "Q", f"{V.dtype}, like V", Q.dtype)
        require(self.K.dtype == V.dtype, op, "K", f"{V.dtype}, like V", self.K.dtype)
        b, length, ranks, groups, width = Q.shape
        heads, channels = V.shape[2:]
        require(heads % groups == 0, op, "Q", f"of groups that divide {heads} heads", groups)
        require_shape(op, "K", self.K, "Q's shape", Q.shape)
        require_shape(op, "V", V, "(b, l, H, P)", (b, length, heads, channels))
        for name in ("ADT", "DT", "Trap"):
            require_shape(op, name, getattr(self, name), "(b, H, l)", (b, heads, length))
        for name in ("Q_bias", "K_bias"):
            require_shape(op, name, getattr(self, name), "(H, R, N)", (heads, ranks, width))
        angles, own = self.Angles.shape[-1], self.Angles.shape[-2]
        require(2 * angles <= width, op, "Angles", f"of at most {width // 2} angles", angles)
        require(own in (1, heads), op, "Angles", f"of 1 or {heads} heads", own)
        require_shape(op, "Angles", self.Angles, "(b, l, H, A)", (b, length, own, angles))
        if self.D is not None:
            require_shape(op, "D", self.D, "(H,)", (heads,))
        if self.MIMO_V is not None:
            require_shape(op, "MIMO_V", self.MIMO_V, "(H, R, P)", (heads, ranks, channels))
        count = b
        if cu_seqlens is not None:
            require(b == 1, op, "cu_seqlens", "given for one row", f"{b} rows")
            count = cu_seqlens.shape[0] - 1
        if states is not None:
            shapes = (
                (count, heads, angles),
                (count, heads, channels, width),
                (count, ranks, heads, width),
                (count, heads, channels),
            )
            for name, t, shape in zip(("angles", "h", "k", "v"), states, shapes, strict=True):
                require_shape(op, f"Input_States: {name}", t, "of all sequences", shape)


def _pairs_turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of channels turned by the angles of each row and head.

    Args:
        x: (m, R, H, N).
        cos: (m, H, A), A ≤ N/2.
        sin: like cos.
        interleaved: pairs are channels 2i and 2i + 1; else i and i + N/2.
    """
    rest = x.shape[-1] // 2 - cos.shape[-1]
    if not interleaved and rest:
        cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))
    return rotary_embedding(x, cos, sin, interleaved)
