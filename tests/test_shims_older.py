"""Stand-ins for packages that others have taken the place of, against float64."""

import pytest
import torch

from fuseport.exporter import shims
from fuseport.tests.test_shims_values import close, conv, rand, scan

with shims.installed(shims.SHIMS):
    import rotary_emb
    import selective_scan
    from causal_conv1d.causal_conv1d_interface import CausalConv1dFn


def test_vmambas_first_package() -> None:
    u, delta = rand(2, 6, 9), rand(2, 6, 9)
    A, B, C = -rand(6, 4).exp(), rand(2, 2, 4, 9), rand(2, 2, 4, 9)
    D, bias = rand(6), rand(6)
    out, _, _ = scan(u, delta, A, B, C, D, None, bias)
    for function in (
        selective_scan.selective_scan_fn,
        selective_scan.selective_scan_ref,
        selective_scan.SelectiveScanFn.apply,
    ):
        close(function(u, delta, A, B, C, D, bias, True, 1), out)
    half = [t.bfloat16() for t in (u, delta, B, C)]
    y = selective_scan.selective_scan_fn(half[0], half[1], A.float(), half[2], half[3], nrows=2)
    assert y.dtype == torch.bfloat16


def test_the_convolutions_autograd_function_as_each_version_calls_it() -> None:
    x, weight, bias = rand(2, 3, 5), rand(3, 4), rand(3)
    for between in ([], [None], [None, None, False, None]):
        close(CausalConv1dFn.apply(x, weight, bias, *between, "silu"), conv(x, weight, bias))
    close(CausalConv1dFn.apply(x, weight, bias), conv(x, weight, bias, silu=False))
    out, states = CausalConv1dFn.apply(x, weight, bias, None, None, True, None, None)
    close(out, conv(x, weight, bias, silu=False))
    close(states, x[..., -3:])


@pytest.mark.parametrize("conj", [False, True])
def test_the_rotary_extension_writes_where_it_is_told(conj: bool) -> None:
    x = rand(2, 5, 3, 8)
    angle = rand(5, 1, 4)
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1))
    turned = turned * torch.polar(torch.ones_like(angle), -angle if conj else angle)
    expected = torch.cat([turned.real, turned.imag], -1)
    out = torch.empty_like(x)
    rotary_emb.apply_rotary(*x.chunk(2, -1), angle.cos(), angle.sin(), *out.chunk(2, -1), conj)
    close(out, expected)
    rotary_emb.apply_rotary(*x.chunk(2, -1), angle.cos(), angle.sin(), *x.chunk(2, -1), conj)
    close(x, expected)
