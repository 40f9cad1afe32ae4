"""Stand-ins on the import path: which are served, when, and what stays afterwards."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseport
from fuseport.exporter import shims
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.models import user
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.shims._triton import JITFunction

# By name: triton itself comes with torch for CUDA, and `auto` replaces nothing that is there.
ALL = ("auto", "triton")


def present() -> list[str]:
    folder = str(Path(shims.__file__).parent)
    return [
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] in shims.SHIMS
        and str(getattr(module, "__file__", "")).startswith(folder)
    ]


def test_nothing_is_left_and_imported_code_goes_on() -> None:
    import torch

    before = list(sys.meta_path)
    with fuseport.shims.installed("auto"):
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    assert present() == []
    assert sys.meta_path == before
    x = torch.rand(1, 2, 3)
    assert selective_scan_fn(x, x, -torch.ones(2, 1), x[:, :1], x[:, :1]).shape == x.shape
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mamba_ssm")


def test_an_error_inside_leaves_nothing() -> None:
    before = list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), fuseport.shims.installed(ALL):
        1 / len(importlib.import_module("triton.language").__all__)
    assert present() == []
    assert sys.meta_path == before


def test_nested_and_repeated_uses_serve_the_same_modules() -> None:
    with fuseport.shims.installed() as outer:
        first = importlib.import_module("mamba_ssm.modules.mamba_simple").Mamba
        with fuseport.shims.installed() as inner:
            second = importlib.import_module("mamba_ssm.modules.mamba_simple").Mamba
        third = sys.modules["mamba_ssm.modules.mamba_simple"].Mamba
    with fuseport.shims.installed() as again:
        fourth = importlib.import_module("mamba_ssm").Mamba
    assert first is second is third is fourth
    assert outer == inner == again == ["mamba_ssm"]


def test_only_what_is_asked_for_is_served() -> None:
    with fuseport.shims.installed(["triton"]):
        importlib.import_module("triton")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("mamba_ssm")
    with pytest.raises(UsageError, match=r"no such stand-in.*mamba_ssm"), shims.installed("numpy"):
        pass


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that is installed and has the name of a stand-in."""
    folder = tmp_path / "site" / "causal_conv1d"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from causal_conv1d import part\nREAL = True\n")
    (folder / "part.py").write_text("")
    monkeypatch.syspath_prepend(folder.parent)
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "causal_conv1d"]:
        del sys.modules[name]


@pytest.mark.parametrize("imported_before", [False, True])
def test_an_installed_package_is_replaced_only_when_it_is_named(
    real: Path, imported_before: bool
) -> None:
    if imported_before:
        module = importlib.import_module("causal_conv1d")
    with shims.installed("auto") as used:
        assert importlib.import_module("causal_conv1d").REAL
        importlib.import_module("causal_conv1d.part")
    assert used == []
    with shims.installed("causal_conv1d") as used:
        assert not hasattr(importlib.import_module("causal_conv1d"), "REAL")
        with pytest.raises(ModuleNotFoundError, match=r"stand-in for causal_conv1d has no such"):
            importlib.import_module("causal_conv1d.part")
    assert used == ["causal_conv1d"]
    if imported_before:
        assert sys.modules["causal_conv1d"] is module
        assert "causal_conv1d.part" in sys.modules
    assert importlib.import_module("causal_conv1d").REAL


KERNELS = """
import torch
import triton


@triton.jit
def kernel(x):
    pass


def layer_norm_fn(x, weight, bias, residual=None, eps=1e-6):
    with torch.cuda.device(x.device.index):
        kernel[(1,)](x)


layer_norm_fn.theirs = True
"""
COPY = """
from theirs.mamba_ssm.ops.triton.layernorm import layer_norm_fn
from theirs.mamba_ssm.ops.triton import own_kernels
import selective_scan_cuda
"""


@pytest.fixture
def copy_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a copy of mamba_ssm, as ZigMa's."""
    folder = tmp_path / "theirs" / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    for file in ("layernorm.py", "own_kernels.py"):
        (folder / file).write_text(KERNELS)
    (tmp_path / "theirs" / "model.py").write_text(COPY)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


@pytest.mark.skipif(find_spec("triton") is not None, reason="auto leaves a triton that is there")
def test_the_kernels_of_a_copy_of_mamba_ssm_have_the_stand_ins(copy_inside: Path) -> None:
    for which in ("auto", "mamba_ssm,selective_scan_cuda,triton"):
        with shims.installed(which) as used:
            model = importlib.import_module("theirs.model")
            assert model.own_kernels.layer_norm_fn.theirs  # there is none for these
            x, weight = torch.randn(2, 3, 8), torch.randn(8)
            expected = torch.nn.functional.layer_norm(x, (8,), weight, eps=1e-6)
            assert torch.equal(model.layer_norm_fn(x, weight, None), expected)
        assert set(used) == {"mamba_ssm", "selective_scan_cuda", "triton"}
        assert "theirs.mamba_ssm.ops.triton.layernorm" not in present()
        for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
            del sys.modules[name]


@pytest.mark.skipif(find_spec("triton") is not None, reason="auto leaves a triton that is there")
def test_copied_kernels_are_known_in_a_folder_of_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BlackMamba and Bi-Mamba4TS have them in packages that are called otherwise."""
    folder = tmp_path / "renamed_copy" / "ops" / "triton"
    folder.mkdir(parents=True)
    kernel = "import triton\n\n@triton.jit\ndef _{}_kernel(\n    X,\n): pass\n\ntheirs = True\n"
    (folder / "layernorm.py").write_text(kernel.format("layer_norm_fwd_1pass"))
    (folder / "layer_norm.py").write_text(kernel.format("another"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with shims.installed("auto"):
        copied = importlib.import_module("renamed_copy.ops.triton.layernorm")
        other = importlib.import_module("renamed_copy.ops.triton.layer_norm")
        assert not hasattr(copied, "theirs")
        assert other.theirs
        x, weight = torch.randn(2, 3, 8), torch.randn(8)
        expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
        torch.testing.assert_close(copied.rms_norm_fn(x, weight, None, eps=1e-6), expected)
    for name in [name for name in sys.modules if name.startswith("renamed_copy")]:
        del sys.modules[name]


def test_the_kernels_of_a_copy_are_left_where_triton_is_installed(
    copy_inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy_inside / "triton.py").write_text("def jit(kernel): return kernel\n")
    with shims.installed("auto") as used:
        found = importlib.import_module("theirs.mamba_ssm.ops.triton.layernorm")
        assert found.layer_norm_fn.theirs
    assert used == []
    del sys.modules["triton"]
    del sys.modules["theirs.mamba_ssm.ops.triton.layernorm"]
    with shims.installed("mamba_ssm"):
        found = importlib.import_module("theirs.mamba_ssm.ops.triton.layernorm")
        assert not hasattr(found.layer_norm_fn, "theirs")


def test_a_folder_that_happens_to_have_the_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mamba_ssm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with shims.installed() as used:
        importlib.import_module("mamba_ssm.modules")
    assert used == ["mamba_ssm"]


def test_a_triton_kernel_says_what_it_is_when_it_has_no_form() -> None:
    with shims.installed("triton"):
        import triton
        import triton.language as tl

    @triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
    @triton.heuristics({"EVEN": lambda args: True})
    @triton.jit
    def scale_kernel(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x, tl.load(x))

    assert scale_kernel.arg_names == ["x", "n", "BLOCK"]
    assert [config.kwargs for config in scale_kernel.configs] == [{"BLOCK": 64}]
    assert triton.cdiv(7, 2) == 4
    assert [triton.next_power_of_2(n) for n in (1, 5, 8)] == [1, 8, 8]
    assert tl.constexpr(3) == 3
    with pytest.raises(RuntimeError, match=r"Triton kernel scale_kernel \(.*test_shims.py:\d+\)"):
        scale_kernel[(1,)](None, 3, BLOCK=4)
    with pytest.raises(RuntimeError, match=r"triton.language.load was called"):
        tl.load(3)


def test_classes_may_derive_from_triton_s() -> None:
    """As flash-linear-attention's autotuner does, which it makes one of per kernel."""
    with shims.installed("triton"):
        import triton
        from triton.compiler import CompiledKernel
        from triton.runtime.autotuner import Autotuner

    class Cached(Autotuner):  # type: ignore[misc]  # a stand-in has no types
        def __init__(self, fn: Any, arg_names: Any, configs: Any, **options: Any) -> None:
            super().__init__(fn, arg_names, configs, ["n"], None, ["x"], **options)
            assert not self.user_defined_pre_hook
            self.kernel_name = fn.fn.__name__

    class Own(CompiledKernel):  # type: ignore[misc]  # a stand-in has no types
        pass

    @triton.jit
    def scale_kernel(x, n):  # type: ignore[no-untyped-def]
        pass

    cached = Cached(scale_kernel, scale_kernel.arg_names, [triton.Config({})], warmup=25)
    assert (cached.kernel_name, cached.arg_names) == ("scale_kernel", ["x", "n"])
    assert (cached.keys, cached.restore_value, len(cached.configs)) == (["n"], ["x"], 1)
    cached[(1,)](None, 3)
    assert Own() is not None


def test_a_guard_of_the_cpu_guards_nothing_while_stand_ins_are_there() -> None:
    """Launchers of Triton kernels say it, on whatever device their tensor is."""
    real, x = torch.cuda.device, torch.ones(2)
    with shims.installed("triton"):
        for place in (x.device, "cpu", x.get_device()):
            with torch.cuda.device(place):
                assert (x + 1).sum() == 4
        with pytest.raises(ValueError, match="cuda"):
            torch.cuda.device("meta")
        with pytest.raises(ZeroDivisionError), torch.cuda.device("cpu"):
            _ = 1 / 0
    assert torch.cuda.device is real


ASKS_TORCH = (
    "import sys, fuseport, torch\n"
    "def here(): return 'shims' in sys.modules['triton'].__file__\n"
    "{first}\n"
    "with fuseport.shims.installed('triton') as used:\n"
    "    import torch._dynamo\n"
    "    assert not used, used\n"
    "    import triton, triton.language\n"
    "    assert here() and used == ['triton'], used\n"
    "    with fuseport.shims.installed(['auto', 'triton']):\n"
    "        import triton.language\n"
    "        assert here()\n"
    "assert 'config' in vars(torch._inductor)\n"
    "from torch._inductor.runtime import triton_compat\n"
    "from torch.utils._triton import has_triton_package\n"
)


def test_a_triton_kernel_of_a_package_with_a_stand_in_names_that() -> None:
    code = compile("def step(x): x.unheard_of()", "/somewhere/mamba_ssm/ops/step.py", "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    with pytest.raises(RuntimeError, match=r"computes the same, or .*: --shim mamba_ssm$"):
        JITFunction(scope["step"])[(1,)](3)


@pytest.mark.parametrize("first", ["", "import torch._inductor.runtime.triton_compat"])
def test_torch_does_not_believe_in_the_stand_in_of_triton(first: str, no_triton: Path) -> None:
    """Of what torch looks for triton in the middle of, half was left: exports failed later."""
    code = ASKS_TORCH + "assert not triton_compat.HAS_TRITON and not has_triton_package()\n"
    run_in(no_triton, code.format(first=first))


# As triton is, where there is none: its modules can be executed once.
ONCE_ONLY = """
import sys
from importlib.machinery import ModuleSpec

class Anything:
    def __init__(self, *given):
        pass
    def __call__(self):
        return self
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()
    def __contains__(self, item):
        return False

class Triton:
    done = set()
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            return ModuleSpec(name, self, origin="triton", is_package=True)
    def create_module(self, spec):
        assert spec.name not in self.done, spec.name
        self.done.add(spec.name)
    def exec_module(self, module):
        module.__file__, module.__version__ = "triton", "3.6.0"
        module.__getattr__ = lambda name: Anything()

sys.meta_path.insert(0, Triton())
"""


@pytest.mark.parametrize("first", ["", "import torch._inductor.runtime.triton_compat"])
def test_torch_keeps_a_triton_that_is_installed(first: str, tmp_path: Path) -> None:
    """Its libraries cannot be loaded twice; the stand-in has its place for that time."""
    if importlib.util.find_spec("triton") is None:
        (tmp_path / "sitecustomize.py").write_text(ONCE_ONLY)
    code = ASKS_TORCH + "assert has_triton_package()\nimport triton.language\nassert not here()\n"
    run_in(tmp_path, code.format(first=first))


def test_torch_gets_a_triton_that_is_installed_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    """What torch imports late asks for triton itself, and may not execute it again."""
    if importlib.util.find_spec("triton") is None:
        (tmp_path / "sitecustomize.py").write_text(ONCE_ONLY)
    (tmp_path / "asks.py").write_text("import triton.language\n")
    code = (
        "import fuseport, torch, triton.language\n"
        "real, spec = triton, triton.__spec__\n"
        f"torch.__path__.append({str(tmp_path)!r})\n"
        "with fuseport.shims.installed('triton') as used:\n"
        "    import torch.asks\n"
        "    assert torch.asks.triton is real and not used\n"
        "import triton\n"
        "assert triton is real and triton.__spec__ is spec\n"
    )
    run_in(tmp_path, code)


@pytest.fixture
def no_triton(tmp_path: Path) -> Path:
    """A folder from which Python takes no triton, even if it is installed."""
    code = (
        "from importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        "def seen(name, *others): return None if name == 'triton' else find(name, *others)\n"
        "PathFinder.find_spec = seen\n"
    )
    (tmp_path / "sitecustomize.py").write_text(code)
    return tmp_path


def run_in(folder: Path, code: str) -> None:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr


SPECS = (TensorSpec("x", "float32", ("batch", 3)),)


def test_without_the_option_a_missing_package_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "needs_scan.py"
    file.write_text("import selective_scan_cuda\n")
    with pytest.raises(Missing, match=r"fuseport has a stand-in for selective_scan_cuda: --shim"):
        user.model(f"{file}:Net", {}, SPECS)
    file.write_text("import einops_that_is_missing\n")
    with pytest.raises(Missing, match=r"pip install einops_that_is_missing"):
        user.model(f"{file}:Net", {}, SPECS)


def test_the_manifest_says_which_stand_ins_were_used(tmp_path: Path) -> None:
    file = tmp_path / "uses_one.py"
    file.write_text(
        "try:\n    import selective_scan_cuda\nexcept ImportError:\n    raise\n"
        "from torch import nn\n\ndef net():\n    from causal_conv1d import causal_conv1d_fn\n"
        "    return nn.Linear(3, 3)\n"
    )
    model = user.model(f"{file}:net", {}, SPECS, ["auto"])
    assert model.config["shims"] == ["causal_conv1d", "selective_scan_cuda"]
    assert "causal_conv1d, selective_scan_cuda" in model.notes[0]
    assert user.rebuild(f"{file}:net", model.config).config == model.config
    assert present() == []


def test_importing_fuseport_imports_no_stand_in_and_no_torch() -> None:
    code = "import sys, fuseport; assert 'torch' not in sys.modules; fuseport.shims.installed"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_several_stand_ins_may_be_one_text() -> None:
    assert shims.chosen("auto,mamba_ssm") == shims.chosen(["auto", "mamba_ssm"])
    with pytest.raises(UsageError, match="shim nothing: there is no such stand-in"):
        shims.chosen(["auto,nothing"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU no index is the current device")
def test_a_guard_of_a_device_without_an_index_does_nothing() -> None:
    with shims.installed("triton"), torch.cuda.device(torch.zeros(1).device.index):
        pass
