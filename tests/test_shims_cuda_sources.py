"""Extensions that code compiles of CUDA sources: taken for what these compute, and no other."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import api, shims
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.shims import _cuda
from fuseport.exporter.shims._compiled import COMPILER
from fuseport.exporter.shims._cuda_sources import known
from fuseport.exporter.shims._cuda_sources.on_cpu import Sources
from fuseport.exporter.verify.report.model import Report
from fuseport.tests.test_shims_wkv import averaged, mixed

pytestmark = pytest.mark.skipif(_cuda.is_there(), reason="there is CUDA to compile for")

# RWKV-4's, by all pairs of steps. AVERAGED_BACK takes back to what w is made of, -exp.
AVERAGED = """
#include <assert.h>
#define STEPS Tmax
template <typename F>
__device__ F weight(F w, F u, F k, int t, int s) {  // of step s at t
    return s < t ? exp(k + w * (t - 1 - s)) : exp(u + k);
}
template <typename F>
__global__ void forward_kernel(const int T, const int C, const F *__restrict__ const w,
                               const F *__restrict__ const u, const F *k, const F *v, F *y) {
    const int c = threadIdx.x;
    k += blockIdx.x * T * C + c, v += blockIdx.x * T * C + c, y += blockIdx.x * T * C + c;
    for (int t = 0; t < T; t++) {
        F sum = 0, all = 0;
        for (int s = 0; s <= t; s++) {
            const F part = weight(w[c], u[c], k[s * C], t, s);
            sum += part * v[s * C];
            all += part;
        }
        y[t * C] = sum / all;
    }
}
template <typename F>
__global__ void backward_kernel(const int T, const int C, const F *w, const F *u, const F *k,
                                const F *v, const F *y, const F *gy, F *gw, F *gu, F *gk, F *gv) {
    const int c = threadIdx.x, at = blockIdx.x * T * C + c;
    k += at, v += at, y += at, gy += at, gk += at, gv += at;
    F slope_k[STEPS] = {0}, slope_v[STEPS] = {0};
    F slope_w = 0, slope_u = 0;
    for (int t = 0; t < T; t++) {
        F all = 0;
        for (int s = 0; s <= t; s++) all += weight(w[c], u[c], k[s * C], t, s);
        for (int s = 0; s <= t; s++) {
            const F share = weight(w[c], u[c], k[s * C], t, s) / all * gy[t * C];
            const F slope = share * (v[s * C] - y[t * C]);
            slope_v[s] += share;
            slope_k[s] += slope;
            if (s < t) { slope_w += slope * (t - 1 - s); } else { slope_u += slope; }
        }
    }
    for (int t = 0; t < T; t++) { gk[t * C] = slope_k[t]; gv[t * C] = slope_v[t]; }
    gw[blockIdx.x * C + c] = slope_w * w[c];
    gu[blockIdx.x * C + c] = slope_u;
}
void cuda_forward(int B, int T, int C, float *w, float *u, float *k, float *v, float *y) {
    assert(C % 2 == 0);
    forward_kernel<<<B, dim3(C)>>>(T, C, w, u, k, v, y);
}
void cuda_backward(int B, int T, int C, float *w, float *u, float *k, float *v, float *y,
                   float *gy, float *gw, float *gu, float *gk, float *gv) {
    dim3 blocks(B);
    dim3 threads(C);
    backward_kernel<<<blocks, threads>>>(T, C, w, u, k, v, y, gy, gw, gu, gk, gv);
}
"""

AVERAGED_BINDING = """
#include <torch/extension.h>
void cuda_forward(int B, int T, int C, float *w, float *u, float *k, float *v, float *y);
void cuda_backward(int B, int T, int C, float *w, float *u, float *k, float *v, float *y,
                   float *gy, float *gw, float *gu, float *gk, float *gv);
using torch::Tensor;
#define AT(x) x.data_ptr<float>()
void forward(int64_t B, int64_t T, int64_t C, Tensor &w, Tensor &u, Tensor &k, Tensor &v,
             Tensor &y) {
    cuda_forward(B, T, C, AT(w), AT(u), AT(k), AT(v), AT(y));
}
void backward(int64_t B, int64_t T, int64_t C, Tensor &w, Tensor &u, Tensor &k, Tensor &v,
              Tensor &y, Tensor &gy, Tensor &gw, Tensor &gu, Tensor &gk, Tensor &gv) {
    TORCH_CHECK(gy.is_contiguous(), "gy must be contiguous");
    cuda_backward(B, T, C, AT(w), AT(u), AT(k), AT(v), AT(y), AT(gy), AT(gw), AT(gu), AT(gk),
                  AT(gv));
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("forward", &forward, "averages");
    m.def("backward", &backward, "and their gradients");
}
"""

# RWKV-6's in bfloat16, whose threads share keys, for a DECAY of w; and the gradients where it is
# exp(-exp(w)), a thread for each head.
MIXED = """
#include <cuda_bf16.h>
using bf = __nv_bfloat16;
__global__ void mixed_kernel(int T, int H, bf *r_, bf *k_, bf *v_, bf *w_, bf *u_, bf *y_) {
    const int i = threadIdx.x, h = blockIdx.x % H, C = H * _N_;
    __shared__ float r[_N_], k[_N_], w[_N_], u[_N_];
    float state[_N_] = {0};
    u[i] = __bfloat162float(u_[h * _N_ + i]);
    for (int t = 0; t < T; t++) {
        const int at = (blockIdx.x / H * T + t) * C + h * _N_ + i;
        __syncthreads();
        r[i] = float(r_[at]); k[i] = float(k_[at]); w[i] = DECAY(float(w_[at]));
        __syncthreads();
        float y = 0;
        const float v = float(v_[at]);
        #pragma unroll
        for (int j = 0; j < _N_; j += 4) {
            float4& s = (float4&)(state[j]);
            const float4& keys = (float4&)(k[j]);
            y += r[j] * (s.x + u[j] * keys.x * v);
            y += r[j + 1] * (s.y + u[j + 1] * keys.y * v);
            y += r[j + 2] * (s.z + u[j + 2] * keys.z * v);
            y += r[j + 3] * (s.w + u[j + 3] * keys.w * v);
            s.x = s.x * w[j] + keys.x * v; s.y = s.y * w[j + 1] + keys.y * v;
            s.z = s.z * w[j + 2] + keys.z * v; s.w = s.w * w[j + 3] + keys.w * v;
        }
        y_[at] = __float2bfloat16_rn(y);
    }
}
void forward(int64_t B, int64_t T, int64_t C, int64_t H, torch::Tensor &r, torch::Tensor &k,
             torch::Tensor &v, torch::Tensor &w, torch::Tensor &u, torch::Tensor &y) {
    mixed_kernel<<<dim3(B * H), dim3(_N_)>>>(T, H, (bf*)r.data_ptr(), (bf*)k.data_ptr(),
        (bf*)v.data_ptr(), (bf*)w.data_ptr(), (bf*)u.data_ptr(), (bf*)y.data_ptr());
}
__global__ void mixed_backward_kernel(int T, int H, bf *r, bf *k, bf *v, bf *w, bf *u, bf *gy,
                                      bf *gr, bf *gk, bf *gv, bf *gw, bf *gu) {
    const int h = blockIdx.x % H, b = blockIdx.x / H, C = H * _N_;
    float states[_T_][_N_][_N_], later[_N_][_N_] = {0}, slope_u[_N_] = {0};
    for (int i = 0; i < _N_; i++)
        for (int j = 0; j < _N_; j++) states[0][i][j] = 0;
    for (int t = 0; t + 1 < T; t++) {
        const int at = (b * T + t) * C + h * _N_;
        for (int i = 0; i < _N_; i++)
            for (int j = 0; j < _N_; j++)
                states[t + 1][i][j] =
                    states[t][i][j] * expf(-expf(w[at + i])) + k[at + i] * v[at + j];
    }
    for (int t = T - 1; t >= 0; t--) {
        const int at = (b * T + t) * C + h * _N_;
        float own = 0, slope_v[_N_] = {0};
        for (int j = 0; j < _N_; j++) own += gy[at + j] * v[at + j];
        for (int i = 0; i < _N_; i++) {
            const float bonus = u[h * _N_ + i], ew = expf(w[at + i]), decay = expf(-ew);
            float slope_r = bonus * k[at + i] * own, slope_k = r[at + i] * bonus * own, slope = 0;
            slope_u[i] += r[at + i] * k[at + i] * own;
            for (int j = 0; j < _N_; j++) {
                slope_r += states[t][i][j] * gy[at + j];
                slope_k += later[i][j] * v[at + j];
                slope_v[j] += (r[at + i] * bonus * gy[at + j] + later[i][j]) * k[at + i];
                slope += later[i][j] * states[t][i][j];
                later[i][j] = later[i][j] * decay + r[at + i] * gy[at + j];
            }
            gr[at + i] = bf(slope_r);
            gk[at + i] = bf(slope_k);
            gw[at + i] = bf(-ew * decay * slope);
        }
        for (int j = 0; j < _N_; j++) gv[at + j] = bf(slope_v[j]);
    }
    for (int i = 0; i < _N_; i++) gu[b * C + h * _N_ + i] = bf(slope_u[i]);
}
#define AT(x) (bf*)x.data_ptr()
void backward(int64_t B, int64_t T, int64_t C, int64_t H, torch::Tensor &r, torch::Tensor &k,
              torch::Tensor &v, torch::Tensor &w, torch::Tensor &u, torch::Tensor &gy,
              torch::Tensor &gr, torch::Tensor &gk, torch::Tensor &gv, torch::Tensor &gw,
              torch::Tensor &gu) {
    mixed_backward_kernel<<<B * H, 1>>>(T, H, AT(r), AT(k), AT(v), AT(w), AT(u), AT(gy), AT(gr),
                                        AT(gk), AT(gv), AT(gw), AT(gu));
}
TORCH_LIBRARY(mixing_of_tests, m) {
    m.def("forward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_IMPL(mixing_of_tests, CUDA, m) {
    m.impl("forward", &forward);
    m.impl("backward", &backward);
}
"""

CODE = """
import torch
from torch.utils.cpp_extension import load

average = load(name="averages", sources=["cuda/averages.cpp", "cuda/averages.cu"], verbose=True,
               extra_cuda_cflags=["-O3 -DTmax=1024", "--use_fast_math"])
mixing = torch.ops.mixing_of_tests
assert load("mixing", ["cuda/mixing.cu"], is_python_module=False,
            extra_cuda_cflags=["-D_N_=4", "-D_T_=1024", "-DDECAY(w)=__expf(-__expf(w))"]) is None

class Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, u, k, v):
        B, T, C = k.shape
        assert k.is_cuda
        w = -torch.exp(w.contiguous())
        y = torch.empty((B, T, C), device=w.device)
        average.forward(B, T, C, w, u, k.contiguous(), v.contiguous(), y)
        ctx.save_for_backward(w, u, k, v, y)
        return y

    @staticmethod
    def backward(ctx, gy):
        w, u, k, v, y = ctx.saved_tensors
        B, T, C = k.shape
        gw, gu = torch.empty((2, B, C))
        gk, gv = torch.empty((2, B, T, C))
        average.backward(B, T, C, w, u, k, v, y, gy.contiguous(), gw, gu, gk, gv)
        return gw.sum(0), gu.sum(0), gk, gv

class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, k, v, w, u):
        with torch.no_grad():
            assert all(x.dtype == torch.bfloat16 for x in (r, k, v, w, u))
            B, T, C = r.shape
            y = torch.empty((B, T, C), dtype=torch.bfloat16)
            mixing.forward(B, T, C, C // 4, r, k, v, w, u, y)
            ctx.save_for_backward(r, k, v, w, u)
            return y

    @staticmethod
    def backward(ctx, gy):
        r, k, v, w, u = ctx.saved_tensors
        B, T, C = r.shape
        gr, gk, gv, gw, gu = (torch.empty_like(x) for x in (r, k, v, w, r[:, 0]))
        mixing.backward(B, T, C, C // 4, r, k, v, w, u, gy.contiguous(), gr, gk, gv, gw, gu)
        return gr, gk, gv, gw, gu.sum(0).view_as(u)

class Averaging(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(8))
        self.into = torch.nn.Linear(8, 16)

    def forward(self, x):
        k, v = self.into(x).chunk(2, 2)
        return Average.apply(self.w, self.u, k, v)

class Mixing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.u = torch.nn.Parameter(torch.zeros(2, 4))
        self.into = torch.nn.Linear(8, 32)

    def forward(self, x):
        r, k, v, w = (part.bfloat16().contiguous() for part in self.into(x).chunk(4, 2))
        return Mix.apply(r, k, v, w, self.u.bfloat16()).float()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Code, sources beside it, and two checkpoints."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "averages.cpp").write_text(AVERAGED_BINDING)
    (folder / "averages.cu").write_text(AVERAGED)
    (folder / "mixing.cu").write_text(MIXED)
    path = tmp_path / "compiling_of_mixers.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def code(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """It, imported with stand-ins."""
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    with shims.installed("auto") as used:
        module = importlib.import_module(file.stem)
    assert used == [COMPILER]
    monkeypatch.delitem(sys.modules, file.stem)
    return module


def exported(file: Path, name: str, weights: dict[str, Tensor], **options: Any) -> Report:
    """The report of a model that was exported with its gradients and verified."""
    checkpoint = file.with_name("net.pt")
    torch.save(weights, checkpoint)
    bundle = api.export(
        checkpoint,
        file.with_name("bundle"),
        model=f"{file}:{name}",
        inputs=parse_inputs(["x:[batch,length,8]"]),
        shim="auto",
        format=["exported_program", "onnx"],
        **options,
    )
    assert {"forward", "gradient"} <= {*bundle.manifest["programs"]}
    return api.verify(bundle.folder, model=f"{file}:{name}")


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def test_a_module_of_functions_is_exported_with_its_gradients(file: Path) -> None:
    w, u, weight, bias = drawn((8,), (8,), (16, 8), (16,))
    weights = {"w": w, "u": u, "into.weight": weight, "into.bias": bias}
    report = exported(file, "Averaging", weights)
    assert report.exit_code() == 0, report.failures()
    assert {row.tensor for row in report.results} >= {"grad/w", "grad/u"}
    assert "own backward" in {row.way for row in report.results}


def test_operators_in_bfloat16_are_exported_with_their_gradients(file: Path) -> None:
    """Under no_grad, as autograd functions have it; and code that insists on bfloat16."""
    u, weight, bias = drawn((2, 4), (32, 8), (32,))
    report = exported(file, "Mixing", {"u": u, "into.weight": weight, "into.bias": bias})
    assert report.exit_code() == 0, report.failures()
    assert {row.tensor for row in report.results} >= {"grad/u", "grad/into.weight"}


def test_they_compute_what_loops_do(code: ModuleType) -> None:
    w, u, k, v, y, gy = drawn((8,), (8,), *[(2, 9, 8)] * 4)
    code.average.forward(2, 9, 8, -w.exp(), u, k, v, y)
    torch.testing.assert_close(y, averaged(-w.exp(), u, k, v))
    leaves = [t.clone().requires_grad_() for t in (w, u, k, v)]
    wanted = torch.autograd.grad(averaged(-leaves[0].exp(), *leaves[1:]), leaves, gy)
    # Of parameters those of each sample: of w's raw value, as the kernel gives them.
    room = [torch.full(size, torch.nan) for size in [(2, 8)] * 2 + [(2, 9, 8)] * 2]
    code.average.backward(2, 9, 8, -w.exp(), u, k, v, y, gy, *room)
    for found, expected in zip([room[0].sum(0), room[1].sum(0), *room[2:]], wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    first = torch.autograd.grad(averaged(-leaves[0].exp(), *leaves[1:])[:1], leaves, gy[:1])
    torch.testing.assert_close(room[0][0], first[0], rtol=1e-4, atol=1e-5)


def test_operators_are_there_while_stand_ins_are(code: ModuleType) -> None:
    r, k, v, w, u, y = (t.bfloat16() for t in drawn(*[(2, 7, 8)] * 4, (2, 4), (2, 7, 8)))
    with shims.installed("auto"):
        code.mixing.forward(2, 7, 8, 2, r, k, v, w, u, y)
    wide = [t.double() for t in (r, k, v, w, u)]
    decay = (-wide[3].exp()).exp()
    expected = mixed(*wide[:3], decay, wide[4].flatten())
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2**-8)
    with pytest.raises((AttributeError, RuntimeError)):
        code.mixing.forward(2, 7, 8, 2, r, k, v, w, u, y)


def found(file: Path, names: list[str], flags: list[str]) -> Any:
    """The extension of these sources in the folder of the code."""
    extension = known([file.parent / "cuda" / name for name in names], flags)
    assert extension is not None
    return extension


@pytest.mark.parametrize(
    ("decay", "of", "within"),
    [
        ("expf(-expf(w))", lambda w: (-w.exp()).exp(), 2**-7),
        ("expf(w)", torch.exp, 2**-7),
        ("(w)", lambda w: w, 2**-7),
        ("expf(-0.6065306597f / (1 + expf(-w)))", None, 0.0),
    ],
    ids=["of the raw", "of the logarithm", "themselves", "another"],
)
def test_decays_are_told_apart_by_what_they_do(
    file: Path, decay: str, of: Any, within: float
) -> None:
    source = file.parent / "cuda" / "mixing.cu"
    source.write_text(MIXED.replace('m.impl("backward", &backward);', ""))  # of one of them alone
    flags = ["-D_N_=64", "-D_T_=1", f"-DDECAY(w)={decay}".replace(" ", "")]
    extension = found(file, [source.name], flags)
    r, k, v, w, u, y = (t.bfloat16() for t in drawn(*[(2, 7, 8)] * 4, (8,), (2, 7, 8)))
    w = -w.abs() if decay != "(w)" else w.sigmoid()
    args = (2, 7, 8, 2, r, k, v, w, u, y)
    if of is None:
        with pytest.raises(NotImplementedError, match="compute nothing that fuseport knows"):
            extension.functions["forward"](*args)
        return
    extension.functions["forward"](*args)
    wide = [t.double() for t in (r, k, v, w, u)]
    expected = mixed(*wide[:3], of(wide[3]), wide[4])
    torch.testing.assert_close(y.double(), expected, rtol=within, atol=within)


@pytest.mark.parametrize(
    ("there", "instead", "why"),
    [
        ("k + w * (t - 1 - s)", "k + w * (t - s)", "the results differ"),
        ("slope * (t - 1 - s)", "slope * (t - s)", "the gradient of w differ"),
        ("slope_v[s] += share", "slope_v[s] += 1.01f * share", "the gradients of v differ"),
        ("= slope_u;", "= slope_u * u[c];", "the gradients of u differ"),
        ("assert(C % 2 == 0);", "assert(C % 64 == 1);", "Assertion"),
        ("y[t * C] = sum", "y[t * 1000000] = sum", "ended"),
        ("for (int s = 0; s <= t; s++) {\n            const F part", "for (;;) { const F part", ""),
        ("dim3(C)", "there_is_none(C)", "does not compile on a CPU"),
    ],
    ids=["forward", "w", "v", "u", "assertion", "outside", "endless", "syntax"],
)
def test_what_computes_something_else_is_refused(
    file: Path, there: str, instead: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuseport.exporter.shims._cuda_sources.on_cpu._SECONDS", 2)
    assert there in AVERAGED
    (file.parent / "cuda" / "averages.cu").write_text(AVERAGED.replace(there, instead))
    extension = found(file, ["averages.cpp", "averages.cu"], ["-DTmax=1024"])
    args = drawn((8,), (8,), *[(2, 9, 8)] * 3)
    said = rf"forward of averages\.cpp, averages\.cu was called.*{why}.*an op of your own"
    with pytest.raises(NotImplementedError, match=said):
        extension.functions["forward"](2, 9, 8, *args)


def test_arguments_are_held_against_what_kernels_take(file: Path) -> None:
    forward = found(file, ["averages.cpp", "averages.cu"], ["-DTmax=1024"]).functions["forward"]
    w, u, k, v, y = drawn((8,), (8,), *[(2, 9, 8)] * 3)
    with pytest.raises(TypeError, match=r"forward takes B, T, C, w, u, k, v, y, and was given 7"):
        forward(2, 9, 8, w, u, k, v)
    with pytest.raises(TypeError, match=r"forward: k is torch\.bfloat16, not torch\.float32"):
        forward(2, 9, 8, w, u, k.bfloat16(), v, y)
    for count in (6, 9):
        with pytest.raises(RuntimeError, match="shape"):
            forward(2, 9, 8, drawn((count,))[0], u, k, v, y)
    with pytest.raises(RuntimeError, match="shape"):
        forward(2, 8, 8, w, u, k, v, y)


def test_other_extensions_are_known_for_none(file: Path) -> None:
    source = file.parent / "cuda" / "averages.cpp"
    source.write_text(AVERAGED_BINDING.replace("Tensor &u", "Tensor &bonus"))
    assert known([source, source.with_name("averages.cu")], ["-DTmax=1024"]) is None


def test_lanes_of_a_warp_are_asked_as_a_gpu_does(tmp_path: Path) -> None:
    """Loops of other lengths, whose lanes wait for the last: 40 threads are two warps."""
    source = tmp_path / "lanes.cu"
    source.write_text(
        """
        __global__ void lanes(const float* x, float* y) {
            const int i = threadIdx.x;
            float mine = x[i], sum = 0;
            for (int j = 0; j < i; j++) {
                sum += __shfl_sync(0xffffffff, mine, j);
            }
            mine = -1000;
            y[i] = sum;
        }
        torch::Tensor sums(torch::Tensor x) {
            torch::Tensor y = torch::zeros_like(x);
            AT_DISPATCH_FLOATING_TYPES(x.type(), "sums", ([&] {
                lanes<<<1, x.size(0)>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>());
            }));
            return y;
        }
        PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sums", &sums); }
        """
    )
    sources = Sources([source], {})
    assert sources.functions == {"sums": ("x",)}
    (x,) = drawn((40,))
    (given, _), (summed, dtype) = sources.call("sums", [x])
    torch.testing.assert_close(given, x.double())
    assert dtype == torch.float32
    before = x.double().cumsum(0) - x.double()
    torch.testing.assert_close(summed[:32], before[:32], rtol=1e-5, atol=1e-5)
    # In the second warp, of 8, lane j is thread 32 + j; of lanes that are not there, its own.
    for i in range(32, 40):
        lanes = [x[32 + j % 32] if j % 32 < 8 else x[i] for j in range(i)]
        torch.testing.assert_close(summed[i], sum(lanes).double(), rtol=1e-5, atol=1e-5)
