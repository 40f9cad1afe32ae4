"""Autograd functions that launch kernels of CuPy: by torch where they are what their names say."""

import itertools
import sys
from collections.abc import Iterator
from math import floor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import shims
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.conditions import violated
from fuseport.exporter.user_code import imported
from fuseport.tests.test_program import assert_same, captured, cotangents_of, eager, inputs_of
from fuseport.tests.test_shims_correlation import at, drawn

# As the files of optical flow and video interpolation are written: helpers that fill texts in,
# kernels as texts, autograd functions that launch them by the addresses of tensors.
HELPERS = """
import collections
import cupy
import re
import torch

LOOP = '''
#define EACH(i, n) \\
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += blockDim.x * gridDim.x)
'''

def kind(tensor):
    if isinstance(tensor, torch.cuda.FloatTensor):
        return 'float'

@cupy.memoize(for_each_device=True)
def made(name, text):
    options = ('-I ' + cupy.cuda.get_cuda_path(),)
    return cupy.cuda.compile_with_cache(text, options).get_function(name)

def run(name, text, count, tensors, **values):
    for word, value in values.items():
        text = text.replace('{{' + word + '}}', str(value))
    made(name, LOOP + text)(
        grid=tuple([int((count + 64 - 1) / 64), 1, 1]),
        block=tuple([64, 1, 1]),
        args=[cupy.int32(count)] + [tensor.data_ptr() for tensor in tensors],
        stream=collections.namedtuple('Stream', 'ptr')(torch.cuda.current_stream().cuda_stream),
    )
"""

CORRELATION = """
BEGIN = '''
    extern "C" __global__ void __launch_bounds__(64) NAME(
        const int n, const float* __restrict__ one, const float* two, float* out
    ) { EACH(index, n) {
        const int x = index % {{w}}, y = index / {{w}} % {{h}};
        int d = index / {{w}} / {{h}} % 9;
        const int b = index / {{w}} / {{h}} / 9;
        int row = y * {{s}} + (d / 3 - 1) * {{s}}; // of the other image
        int column = x * {{s}} + (d % 3 - 1) * {{s}};
        bool outside = row < 0 || row >= {{H}} || column < 0 || column >= {{W}};
        if (outside) { continue; }
        for (int c = 0; c < {{c}}; c++) {
            int here = ((b * {{c}} + c) * {{H}} + y * {{s}}) * {{W}} + x * {{s}};
            int there = ((b * {{c}} + c) * {{H}} + row) * {{W}} + column;
            DO
        }
    } }
'''
OUT = BEGIN.replace('NAME', 'kernel_Correlation_updateOutput').replace(
    'DO', 'out[index] += one[here] * two[there] / {{c}};')
BACK = BEGIN.replace('NAME', 'kernel_Correlation_updateGrad')
BACK = BACK.replace('* out', '* grad, float *g1, float *g2').replace('DO', '''
    atomicAdd(&g1[here], grad[index] * two[there] / (float)({{c}}));
    atomicAdd(&g2[there], grad[index] * one[here] / (float)({{c}}));''')

class _FunctionCorrelation(torch.autograd.Function):
    @staticmethod
    def forward(self, one, two, stride):
        assert(one.is_cuda == True)
        b, c, H, W = one.shape
        h, w = -(-H // stride), -(-W // stride)
        self.sizes = dict(c=c, H=H, W=W, h=h, w=w, s=stride)
        out = one.new_zeros([b, 9, h, w])
        run('kernel_Correlation_updateOutput', OUT, out.nelement(), [one, two, out], **self.sizes)
        self.save_for_backward(one, two)
        return out

    @staticmethod
    def backward(self, grad):
        one, two = self.saved_tensors
        pairs = zip((one, two), self.needs_input_grad)
        grads = [x.new_zeros(x.shape) if need else None for x, need in pairs]
        given = [one, two, grad, *grads]
        run('kernel_Correlation_updateGrad', BACK, grad.nelement(), given, **self.sizes)
        return (*grads, None)

def correlate(one, two, stride=1):
    return _FunctionCorrelation.apply(one, two, stride)
"""

SPLAT = """
TEXT = '''
    __device__ __forceinline__ float near(float at, int pixel) { return 1.0f - fabsf(at - pixel); }

    extern "C" __global__ void NAME(
        const int n, const {{type}}* in, const {{type}}* flow, {{type}}* out, {{type}}* more
    ) { EACH(i, n) {
        const int p = i % ({{h}} * {{w}}), c = i / ({{h}} * {{w}}) % {{c}};
        const int b = i / ({{h}} * {{w}}) / {{c}};
        float x = (float) (p % {{w}}) + flow[(b * 2 + 0) * {{h}} * {{w}} + p];
        float y = (float) (p / {{w}}) + flow[(b * 2 + 1) * {{h}} * {{w}} + p];
        if (isfinite(x) == false) { return; }
        if (isfinite(y) == false) { return; }
        int west = (int) (floor(x)), north = (int) (floor(y));
        for (int k = 0; k < 4; k += 1) {
            int u = west + k % 2;
            int v = north + k / 2;
            int inside = (u >= 0) & (u < {{w}}) & (v >= 0) & (v < {{h}});
            if (!inside) continue;
            int to = ((b * {{c}} + c) * {{h}} + v) * {{w}} + u;
            float du = k % 2 ? +1.0 : -1.0, dv = k / 2 ? +1.0 : -1.0;
            DO
        }
    } }
'''
OUT = TEXT.replace('NAME', 'softsplat_out').replace('more', 'unused')
OUT = OUT.replace('DO', 'atomicAdd(&out[to], in[i] * near(x, u) * near(y, v));')
BACK = TEXT.replace('NAME', 'softsplat_grad').replace('* more', '* gin, {{type}}* gflow')
BACK = BACK.replace('DO', '''
    gin[i] += out[to] * near(x, u) * near(y, v);
    atomicAdd(&gflow[(b * 2 + 0) * {{h}} * {{w}} + p], out[to] * in[i] * du * near(y, v));
    atomicAdd(&gflow[(b * 2 + 1) * {{h}} * {{w}} + p], out[to] * in[i] * dv * near(x, u));''')

class softsplat_func(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type='cuda', cast_inputs=torch.float32)
    def forward(self, x, flow):
        x, flow = x.float(), flow.float()
        assert x.is_cuda
        self.sizes = dict(c=x.shape[1], h=x.shape[2], w=x.shape[3], type=kind(x))
        out = x.new_zeros(x.shape)
        run('softsplat_out', OUT, out.nelement(), [x, flow, out, out], **self.sizes)
        self.save_for_backward(x, flow)
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type='cuda')
    def backward(self, grad):
        x, flow = self.saved_tensors
        gx, gflow = x.new_zeros(x.shape), flow.new_zeros(flow.shape)
        run('softsplat_grad', BACK, grad.nelement(), [x, flow, grad, gx, gflow], **self.sizes)
        return gx, gflow
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Any]:
    """Imports code from a file of its own, beside one with the helpers."""

    def load(code: str) -> ModuleType:
        (tmp_path / "helpers_of_kernels.py").write_text(HELPERS)
        file = tmp_path / f"their_code_{len([*tmp_path.iterdir()])}.py"
        file.write_text(f"import torch\nfrom helpers_of_kernels import kind, run\n{code}")
        with shims.installed():
            return imported("test", str(file))

    yield load
    sys.modules.pop("helpers_of_kernels", None)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_correlation_is_what_its_kernel_computes(theirs: Any, stride: int) -> None:
    code = theirs(CORRELATION)
    one, two = drawn(2, 3, 5, 4), drawn(2, 3, 5, 4, seed=1)
    expected = torch.zeros(2, 9, -(-5 // stride), 4 // stride, dtype=torch.float64)
    for b, d, y, x in np.ndindex(*expected.shape):
        place = [(v + d_v - 1) * stride for v, d_v in ((y, d // 3), (x, d % 3))]
        found = one[b, :, y * stride, x * stride].numpy() @ at(two[b].numpy(), *place)
        expected[b, d, y, x] = found / 3
    torch.testing.assert_close(code.correlate(one, two, stride), expected)
    leaves = [one.requires_grad_(), two.requires_grad_()]
    assert torch.autograd.gradcheck(lambda a, b: code.correlate(a, b, stride), leaves)


@pytest.mark.parametrize(
    ("was", "is_", "reason"),
    [
        ("d / 3 - 1", "d / 3 - 2", "its results differ by up to"),
        ("g2[there], grad", "g2[there], -grad", "another gradient of argument 1"),
        ("'DO', 'out[index]", "'DO', 'out[index + 99]", "asks for element"),
        ("bool outside = row < 0 ||", "bool outside =", "asks for element"),
        ("int d = ", "struct d = ", "`struct` near .* is not understood"),
        ("return out", "return out[:1]", r"it gives float32 \(1, 9, 4, 5\), and not float32 \(2,"),
        ("args", "self.sizes['s'] = 0 or args", "NameError"),
    ],
)
def test_a_kernel_that_is_not_what_its_name_says_is_refused(
    theirs: Any, was: str, is_: str, reason: str
) -> None:
    code = CORRELATION.replace(was, is_)
    code = (
        code.replace("b, c, H, W = one.shape", "b, c, H, W = args.shape") if was == "args" else code
    )
    assert code != CORRELATION
    x = torch.randn(1, 3, 4, 5)
    with pytest.raises(NotImplementedError, match=reason) as raised:
        theirs(code).correlate(x, x)
    assert "_FunctionCorrelation (their_code_" in str(raised.value)
    assert "kernel_Correlation_updateOutput" in str(raised.value)


def test_half_types_are_refused_where_a_kernel_takes_them_for_float32(theirs: Any) -> None:
    x = torch.randn(1, 3, 4, 5).half()
    with pytest.raises(NotImplementedError, match=r"is float \*, and was given half \*"):
        theirs(CORRELATION).correlate(x, x)


def test_a_function_for_inference_alone_is_tried_forward(theirs: Any) -> None:
    code = CORRELATION.replace("def backward(self, grad):", "def unused(self, grad):")
    x = torch.randn(1, 3, 4, 5)
    expected = theirs(CORRELATION).correlate(x, x)
    torch.testing.assert_close(theirs(code).correlate(x, x), expected)


DERIVED = """
class Other(_FunctionCorrelation):
    @staticmethod
    def forward(ctx, one, two, stride):
        return one + two
"""


def test_a_function_derived_from_one_with_kernels_is_its_own(theirs: Any) -> None:
    x = torch.randn(1, 3, 4, 5)
    assert torch.equal(theirs(CORRELATION + DERIVED).Other.apply(x, x, 1), 2 * x)


def splats(x: Tensor, flow: Tensor) -> Tensor:
    """Summation splatting by its definition."""
    expected = torch.zeros_like(x)
    for b, i, j in np.ndindex(len(x), *x.shape[2:]):
        u, v = j + float(flow[b, 0, i, j]), i + float(flow[b, 1, i, j])
        for p, q in itertools.product((0, 1), (0, 1)):
            row, column = floor(v) + p, floor(u) + q
            if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
                weight = (1 - abs(v - row)) * (1 - abs(u - column))
                expected[b, :, row, column] += weight * x[b, :, i, j]
    return expected


def test_splatting_is_what_its_kernel_computes(theirs: Any) -> None:
    splat = theirs(SPLAT).softsplat_func.apply
    x, flow = drawn(2, 3, 4, 5), 2 * drawn(2, 2, 4, 5, seed=1)
    flow[0, 0, 0, 0] = 1e30
    torch.testing.assert_close(splat(x, flow), splats(x, flow))
    leaves = [x.requires_grad_(), flow[1:].clone().requires_grad_()]
    assert torch.autograd.gradcheck(lambda a, b: splat(a[1:], b), leaves)
    # What goes nowhere is lost, and has no gradient.
    lost = flow.detach().clone()
    lost[1, 1, 2, 2] = torch.inf
    x.grad = None
    moved = lost.clone().requires_grad_()
    splat(x, moved).sum().backward()
    assert (x.grad[1, :, 2, 2] == 0).all()
    assert moved.grad.isfinite().all()
    halves = splat(x.detach().half(), flow.half())
    assert halves.dtype == torch.float32
    torch.testing.assert_close(halves.double(), splats(x.detach(), flow), rtol=1e-2, atol=1e-2)


class Splatted(nn.Module):
    """Its first channels, where its last two flow."""

    def __init__(self, splat: Any) -> None:
        super().__init__()
        self.splat = splat

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.splat(x[:, :-2], 3 * x[:, -2:])
        return out


def test_splatting_in_programs_of_any_size(theirs: Any) -> None:
    net = Splatted(theirs(SPLAT).softsplat_func.apply)
    specs = (TensorSpec("x", "float32", ("batch", 4, 3, "width")),)
    forward, gradient = captured(net, specs, {"batch": 2, "width": 6})
    for sizes in ({"batch": 1, "width": 1}, {"batch": 3, "width": 5}):
        assert not violated(forward, sizes)
        inputs = inputs_of(specs, sizes)
        cotangents = cotangents_of(net, inputs)
        expected = eager(net, inputs, cotangents)
        assert_same(gradient.exported.module()(*inputs.values(), *cotangents.values()), expected)


# As SAN has them: sums over windows in one file, which another one names, and asks `x.is_cuda`.
AGGREGATION = """
FORWARD = '''
extern "C" __global__ void aggregation_zeropad_forward_kernel(
const int n, const {{T}}* x, const {{T}}* const weight, {{T}}* out) {
  EACH(index, n) {
    const int b = index / {{c}} / {{h}} / {{w}}, c = index / {{h}} / {{w}} % {{c}};
    const int i = index / {{w}} % {{h}}, j = index % {{w}};
    {{T}} value = 0;
    #pragma unroll
    for (int k = 0; k < {{k}} * {{k}}; ++k) {
      const int row = i - {{pad}} + k / {{k}}, column = j - {{pad}} + k % {{k}};
      if ((row >= 0) && (row < {{h}}) && (column >= 0) && (column < {{w}})) {
        value += x[((b * {{c}} + c) * {{h}} + row) * {{w}} + column]
          * weight[((b * {{cw}} + c % {{cw}}) * {{k}} * {{k}} + k) * {{h}} * {{w}} + i * {{w}} + j];
      }
    }
    out[index] = value;
  }
}
'''

class AggregationZeropad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, kernel_size, stride, padding, dilation):
        assert input.is_cuda and weight.is_cuda
        b, c, h, w = input.shape
        with torch.cuda.device_of(input):
            out = input.new(b, c, h, w)
            run('aggregation_zeropad_forward_kernel', FORWARD, out.numel(), [input, weight, out],
                T=kind(input), c=c, h=h, w=w, cw=weight.shape[1], k=kernel_size[0], pad=padding)
        return out
"""
ASKING = """
import windows_of_kernels

def aggregated(x, weight):
    if x.is_cuda:
        return windows_of_kernels.AggregationZeropad.apply(x, weight, [3, 3], 1, 1, 1)
    raise NotImplementedError
"""


def test_windows_of_another_file(theirs: Any, tmp_path: Path) -> None:
    head = "import torch\nfrom helpers_of_kernels import kind, run\n"
    (tmp_path / "windows_of_kernels.py").write_text(head + AGGREGATION)
    x, weight = drawn(2, 4, 3, 3), drawn(2, 2, 9, 9, seed=1)
    with shims.installed():
        code = theirs(ASKING)
        found = code.aggregated(x, weight)
    sys.modules.pop("windows_of_kernels")
    spread = torch.nn.functional.unfold(x, 3, padding=1).view(2, 2, 2, 9, 9)
    expected = (spread * weight[:, None]).sum(3)
    torch.testing.assert_close(found, expected.reshape(2, 4, 3, 3))


UNKNOWN = """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert x.is_cuda
        out = x.new_empty(x.shape)
        run('doubled', '''extern "C" __global__ void doubled(int n, float* x, float* out) {
            EACH(i, n) { out[i] = 2 * x[i]; } }''', x.nelement(), [x, out])
        return out
"""


def test_an_unknown_kernel_says_what_it_is_when_it_is_launched(theirs: Any) -> None:
    with shims.installed():
        code = theirs(f"import cupy\n{UNKNOWN}")
        with pytest.raises(RuntimeError, match=r"doubled \(helpers_of_kernels.py:\d+\) was launch"):
            code.Doubled.apply(torch.randn(3))


def test_the_rest_of_cupy_can_be_named_and_not_called() -> None:
    with shims.installed(["cupy"]) as used:
        import cupy

        assert used == ["cupy"]
        assert cupy.float32(0.5) == 0.5
        assert cupy.util.memoize()(len) is len
        cupy.random.seed, cupy.ndarray  # noqa: B018
        with pytest.raises(RuntimeError, match=r"cupy\.asarray was called, but cupy here is"):
            cupy.asarray([1])
