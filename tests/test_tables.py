"""Small tensors of sizes are these sizes, also in a capture, however code reads them out again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward

SPEC = TensorSpec("x", "float32", ("batch", "height", "width"))


def shapes(x: Tensor) -> Tensor:
    height, width = x.shape[1:]
    return torch.as_tensor([(height, width), (height // 2, width // 2)])


def proposed(x: Tensor) -> int:
    at = 0
    for height, width in shapes(x):
        at = at + height * width
    return at


# Each is height · width of the input's, but for what is added to the second scale's.
KNOWN: dict[str, Callable[[Tensor], Any]] = {
    "prod": lambda x: shapes(x).prod(1)[0].item(),
    "prod of all": lambda x: shapes(x)[0].prod().item(),
    "product": lambda x: (shapes(x)[:, 0] * shapes(x)[:, 1])[0].item(),
    "torch.mul": lambda x: torch.mul(*shapes(x)[0].unbind()).item(),
    "tolist": lambda x: shapes(x).prod(1).tolist()[0],
    "cumsum": lambda x: shapes(x).prod(1).cumsum(0)[:1].max().item(),
    "cat": lambda x: torch.cat((shapes(x).new_zeros((1,)), shapes(x).prod(-1)))[1].item(),
    "stack": lambda x: torch.stack([shapes(x)[..., 1], shapes(x)[..., 0]], -1).prod(1)[0].item(),
    "difference": lambda x: (proposed(x) - shapes(x)[1].prod()).item(),
    "sum": lambda x: (shapes(x).prod(1).sum() - (x.shape[1] // 2) * (x.shape[2] // 2)).item(),
    "largest": lambda x: shapes(x).prod(1, keepdim=True).max().item(),
    "moved": lambda x: shapes(x).to(x.device, torch.int32).long().clone().prod(1)[0].item(),
    "from": lambda x: (2 * x.shape[1] - (x.shape[1] - 0 * shapes(x)[0, 0]) * 1).item() * x.shape[2],
    "new_tensor": lambda x: shapes(x).new_tensor(x.shape[1:]).prod().item(),
    "of zeros": lambda x: (torch.zeros(2, dtype=torch.long) + shapes(x).prod(1))[0].item(),
    "of ones": lambda x: (torch.ones(2, dtype=torch.int64) * shapes(x).prod(1))[0].item(),
    "full": lambda x: torch.full((2,), x.shape[1])[1:].mul(x.shape[2]).reshape(()).item(),
    "quotient": lambda x: (shapes(x).flatten()[:2].unsqueeze(0) // 1).view(2).prod().item(),
    "taken by a view": lambda x: x.reshape(-1, shapes(x)[0, 0] * shapes(x)[0, 1]).shape[1],
    "taken by a part": lambda x: x.flatten(1)[:, : shapes(x)[0].prod()].shape[1],
    "taken by split": lambda x: x.flatten(1).split([shapes(x).prod(1)[0]], dim=1)[0].shape[1],
    "taken by a range": lambda x: torch.arange(shapes(x)[0].prod()).shape[0],
    "decided": lambda x: shapes(x)[0].prod().item() if shapes(x)[0, 0] == x.shape[1] else 0,
}


class Places(nn.Module):
    """Needs to know that there are as many as in the input: it adds the two."""

    def __init__(self, count: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + torch.ones(self.count(x))


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_read_out_of_it_is_a_size(name: str) -> None:
    module = Places(KNOWN[name])
    program = capture_forward(module, {"x": torch.randn(2, 6, 8)}, [SPEC]).exported
    assert not any("item" in str(node.target) for node in program.graph.nodes)
    for sizes in (3, 5, 4), (1, 2, 2):
        x = torch.randn(sizes)
        torch.testing.assert_close(program.module()(x), module(x))


def by_index(x: Tensor) -> Tensor:
    each = shapes(x)
    each[0, 0] = 7
    return each


def by_a_part(x: Tensor) -> Tensor:
    each = shapes(x)
    row = each[0]
    row += 2
    return each


def of_a_part(x: Tensor) -> Tensor:
    each = shapes(x)
    row, _ = each.unbind()
    each.mul_(3)
    return row


def as_a_result(x: Tensor) -> Tensor:
    each = shapes(x)
    torch.add(each, 1, out=each)
    return each


def in_a_list(x: Tensor) -> Tensor:
    each = shapes(x)
    torch._foreach_add_([each], 2)
    return each


class Scaled(nn.Module):
    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        return x * self.made(x).max().item()


@pytest.mark.parametrize("made", [by_index, by_a_part, of_a_part, as_a_result, in_a_list])
def test_what_was_written_to_is_none(made: Callable[[Tensor], Tensor]) -> None:
    module = Scaled(made)
    program = capture_forward(module, {"x": torch.randn(2, 6, 8)}, [SPEC]).exported
    for sizes in (3, 5, 4), (1, 2, 3):
        x = torch.randn(sizes)
        torch.testing.assert_close(program.module()(x), module(x))


class Beside(nn.Module):
    """What is of no size: values among sizes, real numbers, a mask, and a longer tensor."""

    def forward(self, x: Tensor) -> Tensor:
        each = shapes(x)
        largest = x.detach().abs().max().ceil().long()
        values = torch.stack([each[0, 0], largest]).max().item()
        mean = each.float().mean().item()
        chosen = each[each > 2].sum().item()
        _ = torch.cat([each, each], axis=1), torch.unbind(input=each), each.new(2, 3)
        longer = torch.cat([torch.arange(100), each.flatten()]).max().item()
        return x * values + mean + chosen + longer


def test_what_has_something_else_in_it_is_none() -> None:
    program = capture_forward(Beside(), {"x": torch.randn(2, 6, 8)}, [SPEC]).exported
    x = 9 * torch.ones(3, 5, 4)
    torch.testing.assert_close(program.module()(x), Beside()(x))


COUNTED = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        turns, h = torch.zeros(1, dtype=torch.long), x[:, 0]
        for t in range(x.shape[1]):
            h = torch.tanh(self.linear(h) + x[:, t])
            turns = turns + 1
        return h * turns[0].item()
"""


def test_what_is_counted_in_turns_is_none(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    module, checkpoint, model = saved_net(COUNTED)
    inputs = parse_inputs(["x:[batch,length,4]"])
    target = tmp_path / "bundle"
    api.export(checkpoint, target, model=model, inputs=inputs, format=["exported_program"])
    program = torch.export.load(target / "forward.pt2").module()
    for x in torch.ones(3, 5, 4), torch.ones(2, 9, 4):
        torch.testing.assert_close(program(x), module(x))


SCALES = """
import torch
import torch.nn.functional as F

class Net(torch.nn.Module):
    # As decoders of deformable attention have it: scales as one sequence, and their shapes.
    def __init__(self):
        super().__init__()
        self.scales = torch.nn.ModuleList(torch.nn.Conv2d(2, 3, n, n) for n in (1, 2))

    def forward(self, x):
        DECISION
        maps = [scale(x) for scale in self.scales]
        shapes = torch.as_tensor([tuple(each.shape[2:]) for each in maps], device=x.device)
        starts = torch.cat((shapes.new_zeros((1,)), shapes.prod(1).cumsum(0)[:-1]))
        flat = torch.cat([each.flatten(2).mT for each in maps], 1)
        assert (shapes[:, 0] * shapes[:, 1]).sum() == flat.shape[1]
        parts = flat.split([height * width for height, width in shapes], dim=1)
        found, at = [], 0
        for level, (height, width) in enumerate(shapes):
            y = parts[level].mT.view(x.shape[0], -1, height, width)
            z = flat[:, at : at + height * width].view(x.shape[0], height, width, -1)
            places = torch.linspace(0.5, height - 0.5, height, dtype=torch.float32)
            found.append(y * places[:, None] / height + z.permute(0, 3, 1, 2) + starts[level])
            at = at + height * width
        return F.interpolate(found[1], size=SIZE) + found[0]
"""


@pytest.mark.parametrize(
    ("decision", "size"),
    [
        ("pass", "(int(shapes[0, 0]), int(shapes[0, 1]))"),
        ("x = torch.tanh(x) if x.sum() > 0 else x", "shapes[0].tolist()"),
    ],
)
def test_scales_of_any_height_and_width(
    decision: str,
    size: str,
    saved_net: Callable[[str], tuple[nn.Module, Path, str]],
    tmp_path: Path,
) -> None:
    code = SCALES.replace("DECISION", decision).replace("SIZE", size)
    _, checkpoint, model = saved_net(code)
    bundle = tmp_path / "bundle"
    inputs = parse_inputs(["x:[batch,2,height,width]"])
    formats = ["exported_program", "onnx"]
    api.export(checkpoint, bundle, model=model, inputs=inputs, format=formats)
    report = api.verify(bundle, model=model, runtime=["exported_program", "onnxruntime"])
    assert {each.verdict for each in report.results} == {"pass"}
    assert report.exit_code() == 0
