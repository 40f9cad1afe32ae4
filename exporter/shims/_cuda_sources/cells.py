"""Recurrent cells, step after step, as extensions that xLSTM and FlashRNN compile compute them.

M. Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024, and K. Pöppel et al., "FlashRNN:
I/O-Aware Optimization of Traditional RNNs on Modern Hardware", 2024. Heads are apart: what a step
adds to the gates of one is of its own hidden state alone. Kernels are in the dtypes of tensors and
compute in float32; between steps and before gates they round, and so does this. Their backward is
theirs: of sLSTM's, what keeps exponentials in range is a constant.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._stepwise import stepwise

__all__ = ["Cells", "cells_of"]

_States = Sequence[Tensor]


@dataclass(frozen=True)
class _Cell:
    """What one step of a cell does; b batch, N heads, D the width of one. All are (N, b, D).

    Attributes:
        recurrent: gates that the hidden state adds to, the first ones of all.
        given: gates that inputs add to, the last ones of all.
        gates: all.
        forward: (what each gate is given, states) → the states after it, and what is saved of each
            gate. The first of the states is the hidden one.
        backward: (saved, states before, after, cotangents of the latter) → cotangents of what gates
            were given, and of the states before, but for what goes through gates.
    """

    recurrent: int
    given: int
    gates: int
    forward: Callable[..., tuple[list[Tensor], list[Tensor]]]
    backward: Callable[..., tuple[list[Tensor], list[Tensor]]]


def _slstm(gates: _States, states: _States) -> tuple[list[Tensor], list[Tensor]]:
    """xLSTM, equations 8 to 18: `states` are y, c, n and m; m is i's where n is 0."""
    i, f, z, o = gates
    _, c, n, m = states
    kept = F.logsigmoid(f) + m
    largest = torch.where((n == 0) | (i >= kept), i, kept)
    z, o = torch.tanh(z), torch.sigmoid(o)
    enters, stays = (torch.exp(t - largest).clamp(max=1.0) for t in (i, kept))
    c, n = stays * c + enters * z, stays * n + enters
    return [o * (c / n), c, n, largest], [enters, f, z, o]


def _slstm_back(
    saved: _States, before: _States, after: _States, given: _States
) -> tuple[list[Tensor], list[Tensor]]:
    enters, f, z, o = saved
    _, c, n, m = before
    y, _, n_after, largest = after
    dy, dc, dn, dm = given
    stays = torch.exp(F.logsigmoid(f) + m - largest).clamp(max=1.0)
    inside = dy / n_after
    dc, dn = dc + inside * o, dn - inside * y
    gates = [
        enters * (z * dc + dn),
        stays * (dc * c + dn * n) * (1 - torch.sigmoid(f)),
        dc * enters * (1 - z * z),
        (1 - o) * (y * dy),
    ]
    return gates, [torch.zeros_like(dy), stays * dc, stays * dn, torch.zeros_like(dm)]


def _lstm(gates: _States, states: _States) -> tuple[list[Tensor], list[Tensor]]:
    """`states` are y and c."""
    i, f, z, o = gates
    i, f, z, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(z), torch.sigmoid(o)
    c = f * states[1] + i * z
    return [o * torch.tanh(c), c], [i, f, z, o]


def _lstm_back(
    saved: _States, before: _States, after: _States, given: _States
) -> tuple[list[Tensor], list[Tensor]]:
    i, f, z, o = saved
    dy, dc = given
    out = torch.tanh(after[1])
    dc = dc + (1 - out * out) * (o * dy)
    gates = [
        i * (1 - i) * (z * dc),
        f * (1 - f) * (before[1] * dc),
        (1 - z * z) * (i * dc),
        o * (1 - o) * (out * dy),
    ]
    return gates, [torch.zeros_like(dy), f * dc]


def _gru(gates: _States, states: _States) -> tuple[list[Tensor], list[Tensor]]:
    """Gates are what the hidden state adds to the new one's, r, z, and what inputs add to it."""
    g, r, z, n = gates
    r, z = torch.sigmoid(r), torch.sigmoid(z)
    return [z * states[0] + (1 - z) * torch.tanh(n + r * g)], [g, r, z, n]


def _gru_back(
    saved: _States, before: _States, after: _States, given: _States
) -> tuple[list[Tensor], list[Tensor]]:
    g, r, z, n = saved
    (dy,) = given
    new = torch.tanh(n + r * g)
    dz = z * (1 - z) * (dy * (before[0] - new))
    dn = dy * ((1 - z) * (1 - new * new))
    return [dn * r, dn * g * (r * (1 - r)), dz, dn], [z * dy]


def _elman(gates: _States, states: _States) -> tuple[list[Tensor], list[Tensor]]:
    y = torch.tanh(gates[0])
    return [y], [y]


def _elman_back(
    saved: _States, before: _States, after: _States, given: _States
) -> tuple[list[Tensor], list[Tensor]]:
    return [(1 - saved[0] * saved[0]) * given[0]], [torch.zeros_like(given[0])]


_CELLS = {
    "slstm": _Cell(4, 4, 4, _slstm, _slstm_back),
    "lstm": _Cell(4, 4, 4, _lstm, _lstm_back),
    "gru": _Cell(3, 3, 4, _gru, _gru_back),
    "elman": _Cell(1, 1, 1, _elman, _elman_back),
}
_POINTWISE = "_pointwise"
_PREFIXES = {"sLSTMFunc": "SLSTM", "FlashRNNFunc": "FLASHRNN"}  # of macros, by the class
_CLASS = re.compile(rf"\bclass_<\s*({'|'.join(_PREFIXES)})\s*>")


@dataclass(frozen=True)
class Cells:
    """An extension with a class of cells.

    Attributes:
        functions: that, by its name.
        libraries: none, in which its functions would be registered.
    """

    functions: Mapping[str, Callable[..., Any]]
    libraries: Sequence[str] = ()


def cells_of(paths: Sequence[str | Path], macros: Mapping[str, str]) -> Cells | None:
    """The extension that sources are of, if one binds such a class.

    Args:
        paths: of the sources; one of them is called after its cell.
        macros: that they are compiled with.
    """
    files = [Path(path) for path in paths]
    stems = [file.stem for file in files]
    cell = next((name for name in _CELLS if name + _POINTWISE in stems), None)
    bound = [found[1] for file in files if (found := _CLASS.search(file.read_text("utf-8")))]
    if cell is None or not bound or any("STABILIZATION" in macro for macro in macros):
        return None
    (name, *_) = bound
    prefix = _PREFIXES[name]

    def limit(of: str) -> float | None:
        valid = macros.get(f"{prefix}_{of}_CLIPVAL_VALID") == "true"
        return float(macros[f"{prefix}_{of}_CLIPVAL"]) if valid else None

    limits = limit("FORWARD"), limit("GRADIENT_RECURRENT")
    return Cells({name: partial(_Steps, _CELLS[cell], *limits, prefix == "SLSTM")})


class _Steps:
    """A cell over time; b batch, l length, N heads, D the width of one.

    Args:
        cell: that.
        y_limit: between it and its negative are hidden states; None for any.
        dy_limit: likewise the cotangents of hidden states that come from the step after.
        flat: whether N, gates and D are one dimension, or gates and D of the recurrent kernel.
        training: not used, as are those behind it.
    """

    def __init__(
        self,
        cell: _Cell,
        y_limit: float | None,
        dy_limit: float | None,
        flat: bool,
        training: bool,
        batch_size: int,
        hidden_size: int,
        num_heads: int,
    ) -> None:
        self._cell, self._flat = cell, flat
        self._y_limit, self._dy_limit = y_limit, dy_limit

    def forward(
        self, training: bool, x: Tensor, s0: Tensor, recurrent: Tensor, bias: Tensor
    ) -> list[Tensor]:
        """All states, (states, l + 1, b, N·D), and what backward needs of gates, two tensors.

        Args:
            training: not used.
            x: (l, b, N·gates·D).
            s0: (states, b, N·D).
            recurrent: (N, D, gates·D).
            bias: (N·gates·D,).
        """
        cell, heads, width = self._cell, *recurrent.shape[:2]
        real = wide(x)
        kernel = recurrent.to(real).reshape(heads, width, -1)
        biases = bias.to(real).reshape(heads, -1)
        given = x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
        first = s0.reshape(*s0.shape[:2], heads, width).transpose(1, 2)

        def one(states: list[Tensor], at: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            wides = [state.to(real) for state in states]
            of_y = torch.bmm(wides[0], kernel).to(recurrent.dtype).to(real)
            gates = _parts(biases.unsqueeze(1), width)
            for i, part in enumerate(_parts(of_y, width)):
                gates[i] = part + gates[i]
            for i, part in enumerate(_parts(at[0].to(real), width), -cell.given):
                gates[i] = part + gates[i]
            after, saved = cell.forward(gates, wides)
            if self._y_limit is not None:
                after[0] = after[0].clamp(-self._y_limit, self._y_limit)
            after = [state.to(s0.dtype) for state in after]
            return after, [torch.stack(after), torch.cat(saved, 2).to(recurrent.dtype)]

        _, (states, saved) = stepwise(one, first.unbind(0), [given])
        whole = torch.cat([first.unsqueeze(1), states.transpose(0, 1)], 1).transpose(2, 3)
        saved = saved.transpose(1, 2).unflatten(3, (cell.gates, width))
        if self._flat:
            whole, saved = whole.flatten(3), saved.flatten(2)
        if cell.recurrent == cell.gates:
            return [whole, saved, saved.new_ones(())]
        return [whole, saved.narrow(-2, 0, cell.recurrent).contiguous(), saved]

    def backward(self, *given: Tensor) -> list[Tensor]:
        """Of `forward` the gradients of x, of all gates, of s0, recurrent and bias.

        Args:
            given: recurrent, transposed, (N, gates·D, D), bias, what forward gave, and the
                cotangents of states, of which those of the first are not used.
        """
        return self._gradients(False, *given)

    def backward_cut(self, *given: Tensor) -> list[Tensor]:
        """Likewise, but none go from gates to the hidden state of the step before."""
        return self._gradients(True, *given)

    def _gradients(
        self,
        cut: bool,
        transposed: Tensor,
        bias: Tensor,
        states: Tensor,
        of_recurrent: Tensor,
        of_all: Tensor,
        cotangents: Tensor,
    ) -> list[Tensor]:
        cell, heads, width = self._cell, transposed.shape[0], transposed.shape[-1]
        real = wide(states)
        kernel = transposed.to(real).reshape(heads, -1, width)
        states, cotangents = (
            t.reshape(*t.shape[:3], heads, width).permute(1, 0, 3, 2, 4)
            for t in (states, cotangents)
        )
        saved = of_recurrent if cell.recurrent == cell.gates else of_all
        saved = saved.reshape(*saved.shape[:2], heads, -1).transpose(1, 2)

        def one(carried: list[Tensor], at: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            own, before, after, given = (t.to(real) for t in at)
            sums = [state.to(real) for state in carried]
            if self._dy_limit is not None:
                sums[0] = sums[0].clamp(-self._dy_limit, self._dy_limit)
            sums = [a + b for a, b in zip(given.unbind(0), sums, strict=True)]
            each = _parts(own, width)
            gates, left = cell.backward(each, before.unbind(0), after.unbind(0), sums)
            made = [gate.to(transposed.dtype) for gate in gates]
            left = [state.to(states.dtype) for state in left]
            if not cut:
                of_y = torch.bmm(torch.cat(made[: cell.recurrent], 2).to(real), kernel)
                left[0] = (left[0].to(real) + of_y).to(states.dtype)
            return left, [torch.cat(made, 2)]

        zeros = torch.zeros_like(states[0])
        over = [saved, states[:-1], states[1:], cotangents[1:]]
        first, (made,) = stepwise(one, zeros.unbind(0), over, reverse=True)
        made = made.transpose(1, 2).unflatten(3, (cell.gates, width))
        through = made[:, :, :, : cell.recurrent].to(real)
        of_kernel = torch.einsum("lnbd,lbnge->ndge", states[:-1, 0].to(real), through)
        of_bias = made.to(real).sum((0, 1)).to(bias.dtype).reshape(bias.shape)
        of_states = torch.stack(first).transpose(1, 2)
        of_kernel = of_kernel.to(transposed.dtype)
        if self._flat:
            return [made.flatten(2), of_states.flatten(2), of_kernel.flatten(2), of_bias]
        return [made, of_states, of_kernel, of_bias]


def _parts(t: Tensor, width: int) -> list[Tensor]:
    """(N, b, n·width), as n of that width: by a function whose derivative asks for no size."""
    return list(t.split(width, 2))
