"""Extensions of H3, Hyena and S4: long convolutions, and sums over states."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport import shims
from fuseport.exporter import api
from fuseport.exporter.verify.report import OWN_BACKWARD

BATCH, HEADS, STEPS = 2, 3, 10


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    seed = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, dtype=dtype, generator=seed)


def extension(name: str) -> Any:
    with shims.installed([name]):
        return __import__(name)


def causal(x: Tensor, k: Tensor) -> Tensor:
    """Step by step."""
    steps = [
        sum((k[..., j, None] * x[..., t - j, None] for j in range(t + 1)), torch.zeros(1))
        for t in range(x.shape[-1])
    ]
    return torch.cat(steps, -1)


def expected(
    u: Tensor, k: Tensor, D: Tensor, v: Tensor, q: Tensor, mask: Tensor, gelu: bool
) -> Tensor:
    """Of heads of 2 rows: for each j, the sum over i."""
    rows = []
    for head in range(u.shape[1] // 2):
        for j in range(2):
            total = torch.zeros(())
            for i in range(2):
                x = u[:, 2 * head + i] * v[:, 2 * head + j]
                y = causal(x, k[head]) + D[head] * x
                y = F.gelu(y) if gelu else y
                total = total + y * q[:, 2 * head + i]
            rows.append(total)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("gelu", [False, True])
def test_heads_of_several_rows_are_gated_as_by_their_formula(gelu: bool) -> None:
    fftconv = extension("fftconv")
    u, v, q = (drawn(BATCH, 2 * HEADS, STEPS + more)[..., :STEPS] for more in range(3))
    k, D = drawn(HEADS, STEPS), drawn(HEADS)
    leaves = [t.clone().requires_grad_() for t in (u, k, D, v, q)]
    wanted = expected(*leaves, mask=torch.ones(()), gelu=gelu)
    dout = drawn(*wanted.shape)
    gradients = torch.autograd.grad(wanted, leaves, dout)

    spectrum = torch.fft.rfft(k, n=32)
    more = (v, 2, q, None, gelu, False, False, 32)
    out = fftconv.fftconv_fwd(u, spectrum, D, *more, False, True, False)
    torch.testing.assert_close(out, wanted.detach())
    assert out.transpose(0, 1).is_contiguous()
    du, df, dD, dv, dq = fftconv.fftconv_bwd(dout, u, spectrum, D, *more, True, False)
    dk = torch.fft.irfft(df, n=32, norm="forward")[..., :STEPS]
    for found, gradient in zip((du, dk, dD, dv, dq), gradients, strict=True):
        torch.testing.assert_close(found, gradient)


def test_a_mask_and_a_reversed_filter_are_as_by_their_formula() -> None:
    fftconv = extension("fftconv")
    u, k, back = drawn(BATCH, HEADS, STEPS), drawn(HEADS, STEPS), drawn(HEADS, STEPS + 1)[:, 1:]
    D, mask = drawn(HEADS), drawn(BATCH, HEADS)
    spectrum = torch.fft.rfft(k, n=32) + torch.fft.rfft(back, n=32).conj()
    more = (None, 1, None, mask, False, False, False, 32)
    out = fftconv.fftconv_fwd(u, spectrum, D, *more, False, False, False)
    both = causal(u, k) + causal(u.flip(-1), back).flip(-1) + D[:, None] * u
    torch.testing.assert_close(out, both * mask[..., None])
    assert out.is_contiguous()
    du, *_, dv, dq = fftconv.fftconv_bwd(out, u, spectrum, D, *more, False, False)
    assert du.shape == u.shape
    assert dv is None
    assert dq is None
    half = fftconv.fftconv_fwd(
        u.float(), spectrum.to(torch.complex64), D, *more, True, False, False
    )
    assert half.dtype == torch.float16


def test_what_the_convolution_has_not_is_refused() -> None:
    fftconv = extension("fftconv")
    u, k, D = drawn(BATCH, HEADS, STEPS), torch.fft.rfft(drawn(HEADS, STEPS), n=32), drawn(HEADS)
    for gelus in ((True, False), (False, True)):
        with pytest.raises(NotImplementedError, match="no gelu of its inputs"):
            fftconv.fftconv_fwd(u, k, D, None, 1, None, None, False, *gelus, 32, *[False] * 3)
    mask = drawn(BATCH, HEADS)
    with pytest.raises(NotImplementedError, match="no dropout_mask of heads of 3 rows"):
        fftconv.fftconv_fwd(u, k, D, u, 3, u, mask, False, False, False, 32, *[False] * 3)


@pytest.mark.parametrize("name", ["cauchy_mult", "structured_kernels"])
def test_sums_over_states_and_their_conjugates_are_as_by_their_formulas(name: str) -> None:
    kernels = extension(name)
    states = 4
    v, w = (drawn(HEADS, states + more, dtype=torch.complex128)[:, :states] for more in (0, 1))
    z = torch.exp(1j * drawn(STEPS))
    x = w - 1
    v, w, x = (t.clone().requires_grad_() for t in (v, w, x))

    cauchy = torch.stack(
        [
            sum(v[:, n] / (at - w[:, n]) + v[:, n].conj() / (at - w[:, n].conj()) for n in range(4))
            for at in z
        ],
        1,
    )
    powers = torch.stack(
        [sum(2 * (v[:, n] * torch.exp(x[:, n] * t)).real for n in range(4)) for t in range(STEPS)],
        1,
    )
    for found, wanted in (
        (kernels.cauchy_mult_sym_fwd(v, z, w), cauchy),
        (kernels.vand_log_mult_sym_fwd(v, x, STEPS), powers),
    ):
        torch.testing.assert_close(found, wanted)

    dout = drawn(HEADS, STEPS, dtype=torch.complex128)
    gradients = torch.autograd.grad(cauchy, (v, w), dout)
    for found, wanted in zip(kernels.cauchy_mult_sym_bwd(v, z, w, dout), gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad(powers, (v, x), dout.real)
    found = kernels.vand_log_mult_sym_bwd(v, x, dout.real)
    for each, wanted in zip(found, gradients, strict=True):
        torch.testing.assert_close(each, wanted)


NET = """
import math
import torch
from fftconv import fftconv_bwd, fftconv_fwd
from cauchy_mult import vand_log_mult_sym_bwd, vand_log_mult_sym_fwd

class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, k, D):
        ctx.size = max(2 * 2 ** int(math.ceil(math.log2(u.shape[-1]))), 16)
        spectrum = torch.fft.rfft(k, n=ctx.size)
        ctx.save_for_backward(u, spectrum, D)
        none = (None, 1, None, None, True, False, False)
        return fftconv_fwd(u, spectrum, D, *none, ctx.size, False, False, False)

    @staticmethod
    def backward(ctx, dout):
        u, spectrum, D = ctx.saved_tensors
        none = (None, 1, None, None, True, False, False)
        du, df, dD, _, _ = fftconv_bwd(dout, u, spectrum, D, *none, ctx.size, False, False)
        return du, torch.fft.irfft(df, n=ctx.size, norm="forward")[..., : u.shape[-1]], dD

class Powers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, x, length):
        ctx.save_for_backward(v, x)
        return vand_log_mult_sym_fwd(v, x, length)

    @staticmethod
    def backward(ctx, dout):
        return *vand_log_mult_sym_bwd(*ctx.saved_tensors, dout), None

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(6, 6)

    def forward(self, x):
        w = self.a.weight
        v, at = torch.complex(w[:, :2], w[:, 2:4]), torch.complex(-w[:, :2].exp(), w[:, 4:])
        k = Powers.apply(v, at, x.shape[1])
        return Convolution.apply(x.mT.contiguous(), k, self.a.bias).mT
"""


def test_a_long_convolution_is_exported_for_any_length(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(NET, a=torch.nn.Linear(6, 6))
    by: dict[str, Any] = {"model": model, "inputs": "x:[batch,length,6]", "shim": "auto"}
    bundle = api.export(checkpoint, tmp_path / "b", **by)
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code(strict=True) == 0, report.failures()
    assert any(row.way == OWN_BACKWARD for row in report.results)
