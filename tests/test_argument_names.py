"""Inputs called like what code needs: words of Python's and torch's, and an artifact's own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec, argument_names
from fuseport.exporter.program.forward import capture_forward

# It refuses sizes, decides by a value, computes with sizes, and has all kinds of tensors.
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, {arguments}):
        return self.computed({sum})

    def computed(self, x):
        batch, length, _ = x.shape
        if length < 2:
            raise ValueError
        if x.sum() > 0:
            x = torch.tanh(self.linear(x))
        x = torch.flip(x, [1]) * self.weight + torch.tensor([1.0, 2.0, 3.0, 4.0])
        x = x / length**0.5 + self.table + torch.arange(length)[:, None] + max(length, 3) / 3.0
        return {result}
"""

ONE = "x.clone()"
SEVERAL = '{"output": x.clone(), "mean": x.mean(1)}'

NAMES = {
    "python": ("input", "max", "float", "int", "range", "round", "bool", "isinstance", "type"),
    "torch": ("torch", "device", "inf", "pytree", "operator", "Tensor", "List", "Input"),
    "parameters": ("p_weight", "b_table", "c_lifted_tensor_0", "p_linear_weight", "linear_weight"),
    "operators": ("add", "add_1", "flip", "v_add", "v_mul", "vv_tanh", "sym_size_int", "cond"),
    "source": ("result", "device__", "math", "annotate", "getattr", "Dict", "v_cond__state0"),
    "programs": ("output", "mean", "training", "input", "input_1", "input_2", "T", "x", "X"),
}

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]


@pytest.fixture
def exported(saved_net: SavedNet, tmp_path: Path) -> Callable[..., tuple[Bundle, str]]:
    def export(names: Sequence[str], result: str, *formats: str) -> tuple[Bundle, str]:
        total = " + ".join(f"{i + 1} * {name}" for i, name in enumerate(names))
        code = NET.format(arguments=", ".join(names), sum=total, result=result)
        _, checkpoint, model = saved_net(code)
        inputs = parse_inputs([f"{name}:[batch,length,4]" for name in names])
        target = tmp_path / "bundle"
        return api.export(checkpoint, target, model=model, inputs=inputs, format=formats), model

    return export


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_every_format_takes_inputs_of_these_names(
    names: Sequence[str], exported: Callable[..., tuple[Bundle, str]]
) -> None:
    bundle, model = exported(names, SEVERAL, "torchscript", "exported_program", "onnx")
    report = api.verify(
        bundle.folder, model=model, runtime=["torchscript", "exported_program", "onnxruntime"]
    )
    assert report.verdict == "pass", report.summary
    notes = "; ".join(bundle.manifest["notes"])
    assert "decides by a value: both ways" in notes
    assert "compared only where length >= 2" in notes


def test_aot_inductor_takes_them_too(exported: Callable[..., tuple[Bundle, str]]) -> None:
    names = "input", "torch", "float", "device", "p_weight", "output", "T"
    bundle, model = exported(names, ONE, "aot_inductor")
    report = api.verify(bundle.folder, model=model, runtime=["aot_inductor"])
    assert report.verdict == "pass", report.summary


def test_a_size_that_is_fixed_is_said_of_the_input() -> None:
    class Fixed(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input @ torch.ones(4, 4)

    specs = (TensorSpec("input", "float32", ("batch", "length")),)
    with pytest.raises(ExportFailed, match="dimension 1 of input input comes out fixed at 4"):
        capture_forward(Fixed().eval(), {"input": torch.ones(3, 4)}, specs)


def test_an_input_called_as_a_cotangent_is_refused(
    exported: Callable[..., tuple[Bundle, str]],
) -> None:
    with pytest.raises(ExportFailed, match=r"^cotangent_mean: the gradient program takes the cot"):
        exported(["x", "cotangent_mean"], SEVERAL, "onnx")


def test_arguments_keep_their_names_but_those_that_code_needs() -> None:
    names = ["input", "x", "Input", "None", "class", "input_2", "é"]
    assert argument_names(names) == [
        "input_2",
        "x",
        "Input_2",
        "None_2",
        "class_2",
        "input_2_2",
        "_",
    ]
    assert argument_names(names, {"x", "x_2"}.__contains__)[1] == "x_3"
