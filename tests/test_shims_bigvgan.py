"""The stand-in for BigVGAN's extension, against the definition, and how it is loaded."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

from fuseport.exporter import shims
from fuseport.exporter.shims import _cuda
from fuseport.tests.by_stand_ins import RUNTIMES, verified

with shims.installed(shims.SHIMS):
    import anti_alias_activation_cuda


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def sampled(x: Tensor, up: Tensor, down: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """One channel, (t,), sample by sample: x goes on as its ends are, on both sides."""
    last = x.shape[0] - 1

    def between(n: int) -> Tensor:
        """Sample n at twice the rate: tap f meets what is at an even place of n + f."""
        places = [(f, (n + f - 6) // 2) for f in range(12) if (n + f) % 2 == 0]
        return 2 * torch.stack([up[f] * x[min(max(j, 0), last)] for f, j in places]).sum()

    def active(n: int) -> Tensor:
        value = between(n)
        return value + torch.sin(a * value) ** 2 / (b + 1e-9)

    rows = [[active(2 * t + f - 5) for f in range(12)] for t in range(last + 1)]
    return torch.stack([torch.stack(row) for row in rows]) @ down


@pytest.mark.parametrize("steps", [1, 2, 5, 13])
def test_values_and_gradients(steps: int) -> None:
    x, up, down, alpha, beta = rand(2, 3, steps), rand(12), rand(12), rand(3), rand(3)
    leaves = [t.requires_grad_() for t in (x, up, down, alpha, beta)]
    out = anti_alias_activation_cuda.forward(x, up.view(1, 1, 12), down, alpha, beta)
    powers = [*zip(alpha.exp(), beta.exp(), strict=True)]
    rows = [[sampled(x[i, c], up, down, *powers[c]) for c in range(3)] for i in range(2)]
    expected = torch.stack([torch.stack(row) for row in rows])
    torch.testing.assert_close(out, expected)
    cotangent = rand(*out.shape)
    found = torch.autograd.grad(out, leaves, cotangent)
    right = torch.autograd.grad(expected, leaves, cotangent)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_half_types_and_other_filters() -> None:
    x, taps, power = rand(2, 3, 20), rand(12), rand(3)
    wide = anti_alias_activation_cuda.forward(x.half().double(), taps, taps, power, power)
    half = anti_alias_activation_cuda.forward(x.half(), taps, taps, power, power)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), wide, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="down_filter has 8 taps, not 12"):
        anti_alias_activation_cuda.forward(x, taps, taps[:8], power, power)


# As BigVGAN's, and Megatron-LM's, do: a look at the compiler's version, and then it is compiled.
CODE = """
import pathlib
import subprocess
import torch
from torch import nn
from torch.utils import cpp_extension

said = subprocess.check_output([cpp_extension.CUDA_HOME + "/bin/nvcc", "-V"], text=True).split()
major = said[said.index("release") + 1].split(".")[0]
sources = [pathlib.Path("their.cpp"), pathlib.Path("their.cu")]
flags = ["-gencode", "arch=compute_80,code=sm_80"] if int(major) >= 11 else []
extension = cpp_extension.load(
    name="anti_alias_activation_cuda", sources=sources, extra_cuda_cflags=flags, verbose=True
)


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        return extension.forward(*given)

    @staticmethod
    def backward(ctx, dout):
        raise NotImplementedError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, 4, 3, padding=1)
        self.last = nn.Linear(4, 2)
        self.register_buffer("taps", torch.hann_window(12) / 6)

    def forward(self, x):
        alpha, beta = self.last.weight.data
        x = Activation.apply(self.first(x), self.taps, self.taps, alpha, beta)
        return self.last(x.mT)
"""


@pytest.mark.skipif(_cuda.is_there(), reason="there is CUDA to compile for")
def test_code_that_compiles_it_is_exported(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    parts = {"first": torch.nn.Conv1d(3, 4, 3), "last": torch.nn.Linear(4, 2)}
    checkpoint, model = saved_with(CODE, **parts)
    state = torch.load(checkpoint)
    torch.save({**state, "taps": torch.hann_window(12) / 6}, checkpoint)
    _, report = verified(
        tmp_path / "b",
        (checkpoint, model),
        ["x:[batch,3,samples]"],
        ["anti_alias_activation_cuda", "torch.utils.cpp_extension"],
        differentiated=RUNTIMES[1:],
    )
    others = {row.reason for row in report.results if row.verdict != "pass"}
    assert others == {
        "an autograd function of the model's own has no backward: artifacts have the gradient of "
        "its forward"
    }


@pytest.fixture
def home() -> Iterator[str]:
    if cpp_extension.CUDA_HOME is not None:
        pytest.skip("there is a compiler of CUDA")
    with shims.installed("torch.utils.cpp_extension"):
        yield str(cpp_extension.CUDA_HOME)
    assert cpp_extension.CUDA_HOME is None


def test_the_compiler_says_its_version_and_compiles_nothing(home: str) -> None:
    nvcc = Path(home, "bin", "nvcc")
    for asked in ("-V", "--version"):
        said = subprocess.run([nvcc, asked], capture_output=True, text=True, check=True).stdout
        assert ", release 12." in said
    done = subprocess.run([nvcc, "their.cu"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "compiles nothing" in done.stderr
