"""Signals of their Fourier transforms over short times, as long as values say."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fuseport.exporter.program.sizes import _known

__all__ = ["istft"]

aten = torch.ops.aten


def istft(*args: Any, **kwargs: Any) -> Any:
    """What `torch.istft` gives, in a capture, of a `length` that is a size or hangs on values.

    Torch takes it for a number; and of dynamic sizes an odd `n_fft` for the even one below.
    NotImplemented of other calls.
    """
    given = inspect.signature(_of_any_length).bind(*args, **kwargs)
    length = given.arguments.get("length")
    if isinstance(length, Tensor):
        known = _known.number(Tensor.item, (length,))
        length = length.item() if known is None else known
    spectra, n_fft = given.arguments["input"], given.arguments["n_fft"]
    odd = n_fft % 2 == 1 and any(isinstance(size, SymInt) for size in spectra.shape)
    if not odd and not isinstance(given.arguments.get("length"), Tensor | SymInt):
        return NotImplemented
    given.arguments["length"] = length
    form: Callable[..., Tensor] = _of_any_length if odd else torch.istft
    if isinstance(length, SymInt) and not odd:
        form = _of_any_length if free_unbacked_symbols(length) else torch._refs.istft
    return form(*given.args, **given.kwargs)


def _of_any_length(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> Tensor:
    # As torch has it of arguments that fit each other, which the model has shown.
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    if window is None:
        window = torch.ones(width, dtype=input.dtype.to_real(), device=input.device)
    before = (n_fft - width) // 2
    window = F.pad(window, (before, n_fft - width - before))
    spectra = input.transpose(-1, -2)
    spectra = spectra.unsqueeze(0) if spectra.dim() == 2 else spectra.flatten(0, -3)
    norm = "ortho" if normalized else None
    if return_complex:
        each = torch.fft.ifft(spectra, dim=-1, norm=norm)
    else:  # of all frequencies, the others are those of a real signal
        each = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], n=n_fft, dim=-1, norm=norm)
    count = spectra.shape[-2]
    most = n_fft + hop * (count - 1)
    if length is None:
        length = most - 2 * (n_fft // 2) if center else most
    torch._check(length >= 0)

    def added(frames: Tensor) -> Tensor:
        sizes = [frames.shape[0], most]
        out: Tensor = aten.unfold_backward(frames, sizes, 1, n_fft, hop)
        return out

    weights = window.square().expand(spectra.shape[0], count, n_fft)
    # What lies behind the last frame is 0; before the division, for the gradient there.
    places = torch.arange(length, device=input.device) + (n_fft // 2 if center else 0)
    places = places.clamp(max=most)
    signal = F.pad(added(each * window), (0, 1)).index_select(1, places)
    total = F.pad(added(weights), (0, 1), value=1.0).index_select(1, places)
    return (signal / total).reshape(*input.shape[:-2], length)
