"""Models from checkpoints and from the user's own code, and their conversion to other dtypes."""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from safetensors.torch import save_file
from torch import Tensor, nn

from fuseport import ops
from fuseport.exporter import api, arguments, models
from fuseport.exporter.checkpoint import Checkpoint, load
from fuseport.exporter.errors import CorruptInput, ExportFailed, FuseportError, Missing, UsageError
from fuseport.exporter.models import user
from fuseport.exporter.models.model import Model, example
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec, named_outputs
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

FIXTURES = Path(__file__).parent.parent / "fixtures"
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 2)
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).relu())

def build(width):
    return Net(width)

class Wrapped(nn.Module):  # as a LightningModule keeps its network
    def __init__(self, width, lr, **others):
        super().__init__()
        self.net = Net(width)
        self.others = others
        self.example_input_array = torch.zeros(5, 3)

    def forward(self, x, ids=None):
        return self.net(x)

number = 3
"""
SPECS = (TensorSpec("x", "float32", ("batch", 3)),)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """User code under the name of a module of the standard library."""
    file = tmp_path / "types.py"
    file.write_text(NET)
    return file


def checkpoint_of(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path("w.ckpt"), "lightning", dict(tensors), config, "")


def weights(width: int, prefix: str = "") -> dict[str, Tensor]:
    shapes = {"first.weight": (width, 3), "first.bias": (width,), "second.weight": (2, width)}
    shapes["second.bias"] = (2,)
    return {prefix + name: torch.randn(shape) for name, shape in shapes.items()}


# --- inputs as users write them ---


def test_inputs_are_parsed() -> None:
    texts = [
        "x:[batch,3,length]",
        "ids: int64[batch, length]<50257",
        "scale:float64[]",
        "m:bool[2]",
        "lengths:int64[batch]>=1<=length",
        "positions:int32[batch] < length",
        "kinds:int64[batch]>=2<=5",
    ]
    assert user.parse_inputs(texts) == (
        TensorSpec("x", "float32", ("batch", 3, "length")),
        TensorSpec("ids", "int64", ("batch", "length"), 50257),
        TensorSpec("scale", "float64", ()),
        TensorSpec("m", "bool", (2,)),
        TensorSpec("lengths", "int64", ("batch",), "length+1", 1),
        TensorSpec("positions", "int32", ("batch",), "length"),
        TensorSpec("kinds", "int64", ("batch",), 6, 2),
    )


def test_integers_are_drawn_between_their_bounds() -> None:
    specs = user.parse_inputs(
        [
            "a:[n,length],b:int64[n]>=1<=length,c:int64[n]<length,d:int64[n]>=2<4,e:int64[n]>=-1<length"
        ]
    )
    for length in (1, 2, 5):
        sizes, generator = {"n": 400, "length": length}, torch.Generator().manual_seed(0)
        _, b, c, d, e = (example(spec, sizes, generator) for spec in specs)
        assert set(b.tolist()) == set(range(1, length + 1))
        assert set(c.tolist()) == set(range(length))
        assert set(d.tolist()) == {2, 3}
        assert set(e.tolist()) == set(range(-1, length))


def test_inputs_may_be_in_one_text() -> None:
    apart = user.parse_inputs(["x:[batch,3]", "ids:int64[batch, length]<7", "y:float16[]"])
    assert user.parse_inputs(["x:[batch,3], ids:int64[batch, length]<7, y:float16[]"]) == apart
    assert arguments.specs_of(["x:[batch,3],ids:int64[batch,length]<7", apart[2]]) == apart


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["x"], "write NAME:"),
        (["x:[a;b]"], "write NAME:"),
        (["x:[batch,3,8*h,w]"], r"8\*h is a size of another name, as m, and --size m=NUMBER"),
        (["ids:int64[b]<11>"], "without the last >"),
        (["x:[a],x:[b]"], "is twice"),
        (["x:complex64[a]"], "dtype complex64 is none of"),
        (["x:int64[a]"], "integers need a bound"),
        (["x:float32[a]<3"], "a bound is for integers"),
        (["x:int64[a]<0"], "no integer is from 0 on and below 0"),
        (["x:int64[a]>=3<3"], "no integer is from 3 on and below 3"),
        (["x:int64[a]>=1"], "integers need a bound"),
        (["x:[a]>=1<3"], "a bound is for integers"),
        (["x:int64[a]<=b"], "its bound b is neither .* dimension; there are: a"),
        (["x:[2a]"], "2a is neither a size nor a name"),
        (["lambda:[a]"], "lambda cannot be an input's name"),
        (["self:[a]"], "self cannot be an input's name"),
        (["x:[a]", "x:[b]"], "x cannot be an input's name, or is twice"),
    ],
)
def test_other_inputs_are_usage_errors(texts: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        user.parse_inputs(texts)


# --- the user's own code ---


def test_a_file_is_run_whatever_its_name(net: Path) -> None:
    import types

    model = user.model(f"{net}:build", {"width": 6, "lr": 0.1}, SPECS)
    assert model.module.first.out_features == 6
    assert sys.modules["types"] is types
    assert model.config["source_sha256"] == hashlib.sha256(net.read_bytes()).hexdigest()
    assert model.config["frozen"] == ["second.bias"]
    assert model.sizes == {"batch": 2}


def test_a_file_that_changed_is_run_again(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second in which it was run, at the same length: its bytecode would be taken."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    os.utime(net, (10**9, 10**9))
    assert user.model(f"{net}:Net", {}, SPECS).module.first.out_features == 4
    net.write_text(NET.replace("width: int = 4", "width: int = 5"))
    os.utime(net, (10**9, 10**9))
    assert user.model(f"{net}:Net", {}, SPECS).module.first.out_features == 5


def test_code_imports_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_user_code.py").write_text(NET)
    (tmp_path / "my-model.py").write_text("from neighbour_of_user_code import Net as model")
    model = user.model(f"{tmp_path}/my-model.py:model", {}, SPECS)
    assert isinstance(model.module, nn.Module)


def test_a_module_is_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_of_user_code.py").write_text(NET)
    assert user.model("module_of_user_code:Net", {"width": 7}, SPECS).module.first.out_features == 7


def test_weights_that_do_not_fit_own_code_ask_for_other_code(net: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.pth"
    torch.save({"first.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(Missing, match=r"or a callable that makes the model that they are of: --mo"):
        models.from_checkpoint(load(file), code=f"{net}:Net", inputs=SPECS)


def test_a_misfit_of_own_code_says_what_it_got_of_the_checkpoint(net: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.pth"
    weights = {"first.weight": torch.zeros(3, 3)}
    for settings, said in (
        ({}, r"\(no hyperparameters are in the checkpoint\)"),
        ({"config": {"lr": 1}}, r"\(Net takes none of the checkpoint's hyperparameters: lr\)"),
        ({"config": {"width": 6}}, r"\(Net got of the checkpoint's hyperparameters: width=6\)"),
    ):
        torch.save({"model": weights, **settings}, file)
        with pytest.raises(Missing, match=said):
            models.from_checkpoint(load(file), code=f"{net}:Net", inputs=SPECS)


@pytest.mark.parametrize("key", ["hyper_parameters", "model_args", "config"])
@pytest.mark.parametrize("kind", [dict, argparse.Namespace, AttributeDict])
def test_settings_beside_a_state_dict_are_its_hyperparameters(
    key: str, kind: Any, net: Path, tmp_path: Path
) -> None:
    made = user.model(f"{net}:Net", {"width": 6}, SPECS).module
    file = tmp_path / "w.pth"
    others = {"args": {"width": 7}, "epoch": 3, "cfg": 4}
    torch.save({"state_dict": made.state_dict(), key: kind(width=6, lr=0.1), **others}, file)
    loaded = load(file)
    assert loaded.config == {"width": 6, "lr": 0.1}
    model, notes = models.from_checkpoint(loaded, code=f"{net}:Net", inputs=SPECS)
    assert model.module.first.out_features == 6
    assert notes[0] == "Net got of the checkpoint's hyperparameters: width=6"


@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
def test_of_a_scripts_settings_it_is_said_that_they_are_not_passed(
    kind: Any, net: Path, tmp_path: Path
) -> None:
    file = tmp_path / "w.pth"
    torch.save({"model": nn.Linear(3, 3).state_dict(), "args": kind(width=6, lr=0.1)}, file)
    said = "hyperparameters in the checkpoint: none; .* settings are not passed: width, lr: give a "
    with pytest.raises(Missing, match=said):
        models.from_checkpoint(load(file), code=f"{net}:build", inputs=SPECS)


def test_all_hyperparameters_go_to_what_takes_all(net: Path) -> None:
    hyper = {"width": 6, "lr": 0.1, "depth": 2}
    model = user.model(f"{net}:Wrapped", hyper, None)
    assert model.module.others == {"depth": 2}
    assert model.inputs == (TensorSpec("x", "float32", ("batch", 3)),)


@pytest.mark.parametrize(
    ("example_input", "specs"),
    [
        ("torch.zeros(5, 3)", (("x", "float32", ("batch", 3), None),)),
        ("(torch.zeros(5), torch.tensor([4, 2]))",
         (("x", "float32", ("batch",), None), ("ids", "int64", ("batch",), 5))),
        ("{'y': torch.zeros((), dtype=torch.float64)}", (("y", "float64", (), None),)),
        ("{'ids': torch.ones(2), 'x': torch.ones(2)}",
         (("x", "float32", ("batch",), None), ("ids", "float32", ("batch",), None))),
    ],
)  # fmt: skip
def test_the_example_tells_the_inputs(
    net: Path, example_input: str, specs: tuple[Any, ...]
) -> None:
    net.write_text(NET.replace("torch.zeros(5, 3)", example_input))
    model = user.model(f"{net}:Wrapped", {"width": 6, "lr": 0.1}, None)
    assert model.inputs == tuple(TensorSpec(*spec) for spec in specs)


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        ("types.py", UsageError, "write module:callable or file.py:callable"),
        (":build", UsageError, "write module:callable"),
        ("absent.py:build", UsageError, "there is no file absent.py"),
        ("absent_module:build", UsageError, "there is no module absent_module"),
        ("absent_package.module:build", UsageError, "there is no module absent_package"),
        ("types.py:absent", UsageError, "types.py has no callable absent"),
        ("types.py:number", UsageError, "no callable number; there are: Net, build, Wrapped"),
        ("types.py:Nte", UsageError, "no callable Nte; did you mean Net"),
        ("sys:exit", UsageError, "sys has no callable exit"),
        ("types.py:dict", UsageError, "types.py has no callable dict"),
        ("types.py:torch.nn", UsageError, "has no callable torch.nn"),
        ("types.py:build", Missing, r"calling it failed: TypeError: .*width.*; .*checkpoint: lr"),
        ("types.py:Net", UsageError, "what are its inputs"),
    ],
)
def test_code_that_gives_no_model(
    net: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: type[FuseportError], reason: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(net.parent)
    with pytest.raises(error, match=reason) as raised:
        user.model(code, {"lr": 0.1}, None)
    assert "\n" not in str(raised.value)


def test_a_copy_of_mamba_ssm_that_cannot_be_imported_has_a_stand_in(tmp_path: Path) -> None:
    copy = tmp_path / "their_parts" / "mamba_ssm"
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text("from transformers.generation import NoLongerThere\n")
    file = tmp_path / "their_model.py"
    file.write_text("from their_parts.mamba_ssm import Mamba\n")
    place = r"mamba_ssm/__init__\.py:1: ImportError: .* --shim auto,mamba_ssm has fuseport's"
    with pytest.raises(Missing, match=place):
        user.model(f"{file}:model", {}, SPECS)


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_of_a_package_is_named_as_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    folder = tmp_path / "nets" / "parts"
    folder.mkdir(parents=True)
    (tmp_path / "nets" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "net.py").write_text("from .blocks import Block\n")
    monkeypatch.chdir(tmp_path if inside else "/")
    where = "" if inside else f", in the folder {tmp_path}"
    said = f"it is part of a package: --model nets\\.parts\\.net:Net{where}$"
    with pytest.raises(Missing, match=said):
        user.model(f"{folder / 'net.py'}:Net", {}, SPECS)


def test_what_compiles_an_extension_is_told(tmp_path: Path) -> None:
    file = tmp_path / "compiling.py"
    file.write_text("from torch.utils.cpp_extension import load\n\nload('a', ['a.cpp', 'b.cu'])\n")
    said = r"compiling\.py:3 compiles an extension .*: --shim auto leaves out one of CUDA, where"
    with pytest.raises(Missing, match=said):
        user.model(f"{file}:model", {}, SPECS)


def test_a_name_that_an_import_left_out_is_told_with_the_import(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = """
import torch
try:
    from not_there.fast import scan_fn as scan
except ImportError:
    pass

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(2, 2)

    def forward(self, x):
        return scan(self.a(x))
"""
    checkpoint, model = saved_with(code, a=nn.Linear(2, 2))
    said = r"name 'scan' is not defined; net\.py:4: not_there\.fast is not installed; pip install"
    with pytest.raises(ExportFailed, match=said) as raised:
        api.export(checkpoint, tmp_path / "b", model=model, inputs=parse_inputs(["x:[batch,2]"]))
    assert "--input-shapes" not in str(raised.value)


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        ("import absent_package", Missing, "ModuleNotFoundError: No module named 'absent_package'"),
        ("raise ValueError('first\\nsecond')", Missing, r"failed at \S+\.py:2: ValueError: first$"),
        ("import sys; sys.exit('usage')", Missing, r"failed at \S+\.py:2: SystemExit: usage"),
        ("def model(", Missing, "importing it failed: SyntaxError"),
        ("def model(): return 3", UsageError, "it returned int, not an nn.Module"),
        ("def model(): raise SystemExit", Missing, "calling it failed: SystemExit"),
    ],
)
def test_code_that_fails_leaves_no_trace(
    tmp_path: Path, body: str, error: type[FuseportError], reason: str
) -> None:
    (tmp_path / "neighbour_of_failing_code.py").write_text("")
    file = tmp_path / "failing.py"
    file.write_text(f"import neighbour_of_failing_code\n{body}\n")
    paths, modules = list(sys.path), set(sys.modules)
    with pytest.raises(error, match=reason) as raised:
        user.model(f"{file}:model", {}, SPECS)
    assert "\n" not in str(raised.value)
    if "importing" in str(raised.value):
        assert sys.path == paths
        assert set(sys.modules) == modules


def test_an_example_of_other_things_is_refused(net: Path) -> None:
    net.write_text(NET.replace("torch.zeros(5, 3)", "{'x': torch.zeros(5, 3), 'n': 3}"))
    with pytest.raises(UsageError, match="example_input_array has n, which is no tensor"):
        user.model(f"{net}:Wrapped", {"width": 6, "lr": 0.1}, None)


# --- from a checkpoint, and again from a bundle ---


@pytest.mark.parametrize(("name", "prefix"), [("Wrapped", "net."), ("build", "net."), ("Net", "")])
def test_weights_meet_the_users_code(net: Path, name: str, prefix: str) -> None:
    given = weights(6, prefix)
    checkpoint = checkpoint_of(given, {"width": 6, "lr": 0.1})
    model, _ = models.from_checkpoint(checkpoint, code=f"{net}:{name}", inputs=SPECS)
    assert not model.module.training
    state = model.module.state_dict()
    assert all(torch.equal(state[n], t) for n, t in zip(state, given.values(), strict=True))


def test_a_bundle_gives_the_users_model_again(net: Path, tmp_path: Path) -> None:
    given = weights(6)
    code = f"{net}:build"
    model, _ = models.from_checkpoint(checkpoint_of(given, {"width": 6}), code=code, inputs=SPECS)
    file = tmp_path / "weights.safetensors"
    save_file(given, file)
    architecture = {"name": model.architecture, "config": dict(model.config)}
    with pytest.raises(Missing, match="give it again with --model"):
        models.rebuild(architecture, file)
    again = models.rebuild(architecture, file, code=code)
    assert again.inputs == model.inputs
    assert models.frozen(again.module) == models.frozen(model.module) == ["second.bias"]
    x = torch.randn(4, 3)
    assert torch.equal(again.module(x), model.module(x))


def test_an_unknown_architecture_asks_for_code() -> None:
    with pytest.raises(Missing, match=r"w\.ckpt: the architecture is not one of .*mamba.*--model"):
        models.from_checkpoint(checkpoint_of(weights(6), {}))


def test_a_manifest_of_another_architecture_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptInput, match="unknown architecture 'gpt'"):
        models.rebuild({"name": "gpt", "config": {}}, tmp_path / "weights.safetensors")


# --- dtypes ---


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.randn(3))
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mean", torch.randn(3))


def test_conversion_leaves_what_must_stay() -> None:
    module = Parts()
    model = Model(module, "parts", {}, (), {}, keeps_float32=("A_log",))
    assert models.convert(model, torch.bfloat16) == ("A_log",)
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert dtypes.pop("A_log") == torch.float32
    assert dtypes.pop("count") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    assert module.head.weight is module.embedding.weight
    assert models.convert(model, torch.float64) == ()
    assert module.A_log.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("folder", ["lightning/mamba-kjv.ckpt", "huggingface"])
def test_mamba_in_half_precision(folder: str, dtype: torch.dtype) -> None:
    """Captured, and close to float32: gradients come in their parameters' dtypes."""
    ops.register()
    model, _ = models.from_checkpoint(load(FIXTURES / folder))
    inputs = {
        s.name: example(s, {"batch": 2, "length": 7}, torch.Generator()) for s in model.inputs
    }
    with torch.no_grad():
        exact = next(iter(named_outputs(model.module(*inputs.values()), model.outputs).values()))
    stayed = models.convert(model, dtype)
    assert {name.rpartition(".")[2] for name in stayed} == {"A_log", "D", "bias"}
    with model.fused():
        forward = capture_forward(model.module, inputs, model.inputs, model.outputs)
    gradient = capture_gradient(forward)
    cotangent = torch.randn(exact.shape, generator=torch.Generator())
    cotangent = cotangent.to(forward.outputs[0].torch_dtype)
    results = gradient.exported.module()(*inputs.values(), cotangent)
    assert {o.name: o.torch_dtype for o in gradient.outputs} == {
        name: value.dtype for name, value in results.items()
    }
    logits = next(iter(results.values()))
    error = (logits.float() - exact).abs().max() / exact.abs().max()
    assert error < 16 * torch.finfo(dtype).eps
    for name, parameter in model.module.named_parameters():
        assert results[f"grad/{name}"].dtype == parameter.dtype
        assert results[f"grad/{name}"].isfinite().all()
