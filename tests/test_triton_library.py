"""Triton kernels as code has them around: as operators of torch's library, by Triton itself where
it is installed, and what launchers ask of a device."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import api, shims
from fuseport.exporter.verify.report import OWN_BACKWARD

HEAD = """
import torch
import triton
import triton.language as tl
"""
KERNELS = """
@triton.jit
def square_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(x + at, mask=at < n)
    tl.store(out + at, here * here, mask=at < n)


@triton.jit
def slope_kernel(x, cotangent, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slope = 2 * tl.load(x + at, mask=at < n)
    tl.store(out + at, slope * tl.load(cotangent + at, mask=at < n), mask=at < n)
"""
OPERATOR = (
    HEAD
    + "from torch.library import triton_op, wrap_triton\n"
    + KERNELS
    + """
@triton_op("theirs::square", mutates_args={})
def square(x: torch.Tensor, block: int = 4) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(square_kernel)[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def backward(ctx, cotangent):
    (x,) = ctx.saved_tensors
    out = torch.empty_like(x)
    slope_kernel[(1,)](x, cotangent.contiguous(), out, x.numel(), BLOCK=1024)
    return FACTOR * out, None


square.register_autograd(backward, setup_context=keep)
square.register_fake(lambda x, block=4: torch.empty_like(x))
FACTOR = 1.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 5)

    def forward(self, x):
        return square(self.up(x).contiguous(), block=8)
"""
)


def module(code: str, name: str = "theirs") -> Any:
    """Code with kernels, as if it was imported from a file: a kernel's source is not needed."""
    found = ModuleType(name)
    with shims.installed("triton"):
        exec(compile(code, f"{name}.py", "exec"), vars(found))
    return found


def test_an_operator_of_triton_kernels_is_a_function_with_its_backward() -> None:
    theirs = module(OPERATOR)
    x = torch.linspace(-1, 2, 7, dtype=torch.float64, requires_grad=True)
    out = theirs.square(x)
    torch.testing.assert_close(out, x * x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(slope, 2 * x)
    theirs.FACTOR = 3.0  # it is their backward that is called
    (slope,) = torch.autograd.grad(theirs.square(x, block=16).sum(), x)
    torch.testing.assert_close(slope, 6 * x)


def test_a_launch_says_that_the_stand_in_is_used_where_code_stays_imported() -> None:
    theirs = module(OPERATOR)
    for named in ("triton", "auto"):
        with shims.installed(named) as used:
            assert used == []
            theirs.square(torch.ones(3))
            assert used == ["triton"]


def test_torch_s_library_is_as_it_was_outside() -> None:
    before = torch.library.triton_op, torch.library.wrap_triton
    with shims.installed("triton"):
        assert torch.library.wrap_triton(before) is before
        assert torch.library.triton_op is not before[0]
    assert (torch.library.triton_op, torch.library.wrap_triton) == before
    with shims.installed("mamba_ssm"):
        assert torch.library.triton_op is before[0]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_an_operator_is_exported_and_its_backward_held_against_it(
    factor: float, tmp_path: Path
) -> None:
    file = tmp_path / f"operator_{int(factor)}.py"
    file.write_text(OPERATOR.replace("FACTOR = 1.0", f"FACTOR = {factor}"))
    torch.manual_seed(0)
    state = {"up.weight": torch.randn(5, 3), "up.bias": torch.randn(5)}
    torch.save(state, tmp_path / "net.pth")
    model = f"{file}:Net"
    api.export(
        tmp_path / "net.pth", tmp_path / "b", model=model, shim="auto", inputs="x:[batch,length,3]"
    )
    report = api.verify(tmp_path / "b", model=model)
    failed = {row.way for row in report.results if row.verdict != "pass"}
    assert failed == (set() if factor == 1 else {OWN_BACKWARD})


# As Triton is: a kernel is an object that launches when it is indexed, and refuses without a GPU.
JIT = """
class KernelInterface:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)


class DriverConfig:
    @property
    def active(self):
        raise RuntimeError("0 active drivers")


driver = DriverConfig()


class JITFunction(KernelInterface):
    def __init__(self, fn):
        self.fn = fn
        self.arg_names = list(fn.__code__.co_varnames[: fn.__code__.co_argcount])

    def run(self, *args, grid, warmup, **kwargs):
        raise RuntimeError("0 active drivers")


class Autotuner(KernelInterface):
    def __init__(self, fn, configs):
        self.fn, self.configs, self.arg_names = fn, configs, fn.arg_names

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs, **self.configs[0].kwargs)


class Heuristics(KernelInterface):
    def __init__(self, fn, values):
        self.fn, self.values, self.arg_names = fn, values, fn.arg_names

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs)
"""
PACKAGE = """
from triton.runtime.jit import Autotuner, Heuristics, JITFunction


class Config:
    def __init__(self, kwargs, pre_hook=None):
        self.kwargs, self.pre_hook = kwargs, pre_hook


def jit(fn):
    return JITFunction(fn)


def autotune(configs):
    return lambda fn: Autotuner(fn, configs)


def heuristics(values):
    return lambda fn: Heuristics(fn, values)


def cdiv(x, y):
    return -(-x // y)
"""
LANGUAGE = """
class dtype:
    def __init__(self, name):
        self.name = name


class constexpr:
    def __init__(self, value):
        self.value = value


def program_id(axis):
    raise ValueError("outside of a kernel")


def arange(start, end):
    raise ValueError("outside of a kernel")


def load(pointer, mask=None, other=None):
    raise ValueError("outside of a kernel")


def store(pointer, value, mask=None):
    raise ValueError("outside of a kernel")


float32 = dtype("fp32")
"""
LAUNCHED = """
import torch, triton, triton.language as tl
from triton.language import load

TWO = tl.constexpr(2)


def zeroed(args):
    args["count"].zero_()


@triton.jit
def helper(x, by):
    return (x * by).to(tl.float32)


@triton.autotune(configs=[triton.Config({"BLOCK": 8}, pre_hook=zeroed)])
@triton.heuristics({"BY": lambda args: args["BLOCK"] // 4})
@triton.jit
def kernel(x, out, count, n, BLOCK: tl.constexpr, BY: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, helper(load(x + at, mask=at < n), BY) + TWO, mask=at < n)


x, out, count = torch.arange(10.0), torch.zeros(10), torch.ones(1)
properties = triton.runtime.jit.driver.active.utils.get_device_properties(0)
assert properties["multiprocessor_count"] == 1


def launch():
    kernel[(triton.cdiv(10, 8),)](x, out, count, 10)
"""
INSTALLED = """
import sys, torch
from fuseport.exporter import shims
{before}
with shims.installed("{which}") as used:
    import launched
    assert used == [], used
    launched.launch()
assert used == ["triton.runtime.jit"], used
assert launched.out.tolist() == [2.0 * i + 2 for i in range(10)], launched.out
assert launched.count.item() == 0
try:
    launched.launch()
except RuntimeError as error:
    assert "active drivers" in str(error)
else:
    raise AssertionError("Triton itself is asked outside")
try:
    launched.triton.runtime.jit.driver.active
except RuntimeError as error:
    assert "active drivers" in str(error)
else:
    raise AssertionError("Triton's driver is asked outside")
"""


@pytest.mark.parametrize("which", ["auto", "triton.runtime.jit"])
@pytest.mark.parametrize("before", ["", "import triton.runtime.jit"])
def test_kernels_of_triton_itself_are_computed(which: str, before: str, tmp_path: Path) -> None:
    runtime, language = tmp_path / "triton" / "runtime", tmp_path / "triton" / "language"
    runtime.mkdir(parents=True)
    language.mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(PACKAGE)
    (runtime / "__init__.py").touch()
    (runtime / "jit.py").write_text(JIT)
    (language / "__init__.py").write_text(LANGUAGE)
    (tmp_path / "launched.py").write_text(LAUNCHED)
    code = INSTALLED.format(which=which, before=before)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


PRODUCT = (
    HEAD
    + """
@triton.jit
def product_kernel(x, y, out):
    at = tl.arange(0, 16)
    here = at[:, None] * 16 + at
    tl.store(out + here, tl.dot(tl.load(x + here), tl.load(y + here)))
"""
)


def test_a_kernel_computes_in_what_it_says_under_autocast() -> None:
    x, y = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    out = torch.empty(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        module(PRODUCT).product_kernel[(1,)](x, y, out)
    torch.testing.assert_close(out, x @ y)


ASKED = (
    HEAD
    + KERNELS
    + """
def asserted(x):
    assert x.is_cuda, "no kernel"
    return True


def raised(x):
    if not x.is_cuda:
        raise ValueError("no kernel")
    return True


def chosen(x):
    return "kernel" if x.is_cuda else "torch"


def processors(x):
    return torch.cuda.get_device_properties(x.device).multi_processor_count
"""
)


def test_what_launchers_ask_of_a_device_is_answered(tmp_path: Path) -> None:
    """Where code has a way of its own on the CPU, it goes that."""
    file = tmp_path / "asked.py"
    file.write_text(ASKED)
    x: Tensor = torch.ones(2)
    scope: dict[str, Any] = {}
    with shims.installed(("auto", "triton")):
        exec(compile(ASKED, file, "exec"), scope)
        assert scope["asserted"](x)
        assert scope["raised"](x)
        assert scope["chosen"](x) == "torch"
        if not torch.cuda.is_available():
            assert scope["processors"](x) == 1
    with pytest.raises(AssertionError, match="no kernel"):
        scope["asserted"](x)


OVERWRITING = (
    HEAD
    + KERNELS
    + """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        square_kernel[(1,)](x, out, x.numel(), BLOCK=1024)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        slope_kernel[(1,)](x, cotangent.contiguous(), x, x.numel(), BLOCK=1024)
        return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 5)

    def forward(self, x):
        return Square.apply(self.up(x).contiguous())
"""
)


def test_a_backward_that_writes_over_what_is_saved_can_be_asked_once(tmp_path: Path) -> None:
    """As Liger's do, which spares memory."""
    file = tmp_path / "overwriting.py"
    file.write_text(OVERWRITING)
    torch.save({"up.weight": torch.randn(5, 3), "up.bias": torch.randn(5)}, tmp_path / "net.pth")
    model = f"{file}:Net"
    api.export(
        tmp_path / "net.pth",
        tmp_path / "b",
        model=model,
        shim="auto",
        inputs="x:[batch,3]",
        format="exported_program",
    )
    report = api.verify(tmp_path / "b", model=model, runtime="eager")
    assert report.exit_code() == 0, report.failures()
    others = [row for row in report.results if row.verdict != "pass"]
    assert {(row.way, row.verdict) for row in others} == {(OWN_BACKWARD, "unsupported")}
    assert all("can be asked for once" in str(row.reason) for row in others)
