"""Choices between booleans, in formats that have none of these."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import formats
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.runtimes import get

CHOICES = {
    "two numbers": lambda x: torch.where(x > 0, True, False),
    "two numbers, turned": lambda x: torch.where(x > 0, False, True),
    "numbers that are alike": lambda x: torch.where(x > 0, False, False),
    "true or a tensor": lambda x: torch.where(x > 0, True, x < -1),
    "a tensor or false": lambda x: torch.where(x > 0, x < 1, False),
    "a tensor or true": lambda x: torch.where(x > 0, x < 1, True),
    "tensors that broadcast": lambda x: torch.where(x[:, :1] > 0, x[:1] < 1, x > -1),
    "filled": lambda x: (x > 0).masked_fill(x > 1, False).masked_fill(x < -1, True),
    "filled by a tensor": lambda x: (x > 0).masked_fill(x.abs() > 1, torch.tensor(True)),
}


# Of a manifest, what runtimes ask for.
NAMES = {"outputs": [{"name": "output_0"}, {"name": "output_1"}]}


class Masked(nn.Module):
    def __init__(self, choice: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.choice = choice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.choice(x)
        return mask, x.masked_fill(mask, 0.5)  # which takes booleans alone


@pytest.mark.parametrize("name", CHOICES)
def test_they_are_booleans_in_every_format(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Masked(CHOICES[name])
    example = torch.randn(4, 5)
    spec = TensorSpec("x", "float32", ("batch", 5))
    program = capture_forward(module, {"x": example}, [spec])
    right = module(example)
    for kind, runtimes in (
        ("torchscript", ["torchscript"]),
        ("onnx", ["onnxruntime", "onnx_reference"]),
    ):
        file = tmp_path / f"program.{kind}"
        formats.get(kind).write(program, file, formats.Options(tmp_path / "w"))
        for runtime in runtimes:
            found = get(runtime).load(file, NAMES).run({"x": example})
            torch.testing.assert_close([found["output_0"], found["output_1"]], [*right])


def test_choices_between_numbers_stay_what_they_are() -> None:
    module = Masked(lambda x: torch.where(x > 0, 2, 1) > 1)
    spec = TensorSpec("x", "float32", ("batch", 5))
    program = capture_forward(module, {"x": torch.randn(4, 5)}, [spec])
    targets = [node.target for node in program.exported.graph.nodes]
    assert torch.ops.aten.where.ScalarSelf in targets or torch.ops.aten.where.Scalar in targets


class Asking(nn.Module):
    """Asks one or the other of a number that values say."""

    def forward(self, x: Tensor) -> Tensor:
        count = (x[:, 0] > 0).sum().item()
        torch._check((count == 0) | (count < x.shape[0]))
        return x * count


def test_one_of_two_conditions_on_a_number_is_in_every_format(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, -1.0], [-2.0, 3.0], [4.0, 5.0]])
    program = capture_forward(Asking(), {"x": x}, [TensorSpec("x", "float32", ("batch", 2))])
    names = {"outputs": [{"name": "output"}]}
    for kind, runtime in ("torchscript", "torchscript"), ("onnx", "onnxruntime"):
        file = tmp_path / f"program.{kind}"
        formats.get(kind).write(program, file, formats.Options(tmp_path / "w"))
        session = get(runtime).load(file, names)
        for each in x, -x, -x.abs():
            torch.testing.assert_close(session.run({"x": each})["output"], Asking()(each))
