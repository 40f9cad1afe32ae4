"""Calls from Python: what may be given in more than one form, and what is refused in one line."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fuseport
from fuseport import ops
from fuseport.exporter import arguments
from fuseport.exporter.errors import UsageError
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.verify.compare import Tolerance

NET = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    class Inner(nn.Identity):
        pass
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that can be imported."""
    (tmp_path / "net_of_arguments.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "net_of_arguments", raising=False)
    import net_of_arguments

    return net_of_arguments  # type: ignore[no-any-return]


def test_one_name_a_class_and_texts_of_inputs_do(
    net: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(net.Net().state_dict(), tmp_path / "w.pth")
    bundle = fuseport.export(
        tmp_path / "w.pth",
        tmp_path / "b",
        model=net.Net,
        inputs="input:[b,3]",
        format="onnx",
        programs="forward",
    )
    assert {file.name for file in bundle.folder.glob("*.*")} == {
        "forward.onnx",
        "manifest.json",
        "weights.safetensors",
    }
    report = fuseport.verify(bundle.folder, model=net.Net, runtime="onnxruntime")
    assert report.exit_code() == 0, report.failures()
    assert {row.runtime for row in report.results} == {"float64", "onnxruntime"}
    with pytest.raises(UsageError, match=r"^onyx is not a format; there are: aot_inductor"):
        fuseport.export(tmp_path / "w.pth", tmp_path / "c", model=net.Net, format="onyx")
    with pytest.raises(UsageError, match=r"^ort is not a runtime; there are: aot_inductor"):
        fuseport.verify(bundle.folder, runtime="ort")


def test_inputs_are_texts_and_specs(tmp_path: Path) -> None:
    y = TensorSpec("y", "float32", (1,))
    found = arguments.specs_of(["x:[b]", y, "z:int64[b]<5"])
    assert found is not None
    assert [spec.name for spec in found] == ["x", "y", "z"]
    assert found[1] is y
    assert found[2].high == 5
    with pytest.raises(UsageError, match="x is there twice"):
        arguments.specs_of(["x:[b]", TensorSpec("x", "float32", (1,))])


def test_examples_are_tensors_or_a_file(tmp_path: Path) -> None:
    values = {"x": torch.ones(2)}
    save_file(values, tmp_path / "x.safetensors")
    for given in (values, tmp_path / "x.safetensors", str(tmp_path / "x.safetensors")):
        found = arguments.given_of(given)  # type: ignore[arg-type]
        assert found is not None
        assert torch.equal(found.values["x"], values["x"])


def test_examples_may_be_of_any_layout_and_share_memory() -> None:
    x = torch.randn(4, 7)
    found = arguments.given_of({"a": x.t(), "b": x, "c": x[:1].expand(4, 7), "d": x.numpy()})
    assert found is not None
    assert all(t.is_contiguous() for t in found.values.values())
    assert len({t.untyped_storage().data_ptr() for t in found.values.values()}) == 4
    assert torch.equal(found.values["a"], x.t())
    assert torch.equal(found.values["d"], x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arguments.given_of({"x": 3.0}), "given: x is a float, which is no tensor"),
        (lambda: arguments.given_of([torch.ones(1)]), "given: tensors by name, or a safetensors"),
        (lambda: arguments.given_of({}), "there is no tensor in it"),
        (lambda: arguments.given_of({"x": torch.ones(0, 4)}), r"x is of shape \(0, 4\): empty"),
        (lambda: arguments.specs_of([torch.ones(1)]), "inputs: a Tensor, where a text such as"),
        (lambda: arguments.kinds_of(("fwd",)), "fwd is not a program; there are: forward"),
        (lambda: arguments.kinds_of(()), "programs: name one at least"),
        (lambda: arguments.dynamic_of({"x": ["b"]}), "dynamic: x wants names by position"),
        (lambda: arguments.dynamic_of("x:{},x:{0:b}"), "x is there twice; name all in one"),
        (lambda: fuseport.verify("b", program="fwd"), "fwd is not a program"),
    ],
)
def test_what_is_of_no_form_is_told_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_forms_of_the_command_do_too() -> None:
    assert arguments.dynamic_of("x:{0:batch}") == {"x": {0: "batch"}}
    both = {"q": {}, "k": {0: "batch", 1: "length"}}
    assert arguments.dynamic_of("q:{},k:{0:batch, 1:length}") == both
    assert arguments.dynamic_of(["q:{}", "k:{0:batch,1:length}"]) == both
    assert arguments.sizes_of("length=3,batch=1") == {"length": 3, "batch": 1}
    assert arguments.dtype_of(torch.bfloat16) == "bfloat16"
    of_all = arguments.tolerances_of(1e-3)
    assert of_all is not None
    assert of_all.of("x") == Tolerance(1e-3, 0.0)


def test_what_other_processes_cannot_import_is_refused(net: ModuleType) -> None:
    assert arguments.code_of(net.Net) == "net_of_arguments:Net"
    for model in (net.Net.Inner, lambda: None, net.Net(), 3):
        with pytest.raises(UsageError, match="other processes cannot import it"):
            arguments.code_of(model)  # type: ignore[arg-type]
    code = "import fuseport\ndef f(): pass\nfuseport.export('x', 'y', model=f)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "model: f: other processes cannot import it" in done.stderr


def test_an_unknown_op_is_told_with_those_that_there_are() -> None:
    for function in (ops.register, ops.onnxruntime_library):
        with pytest.raises(KeyError, match="selektive is not an op; there are: causal_conv1d"):
            function("selektive")


def test_the_package_lists_what_it_has() -> None:
    assert {"export", "ops", "shims", "verify"} <= set(dir(fuseport))
