"""Parts of one step, and parts counted from the end, of dimensions that may have no step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.conditions import violated
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

SPEC = TensorSpec("x", "float32", ("batch", "length", 4))

SIZED = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 has no size of a part that may be empty"
)

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the last": lambda y: y[:, -1:],
    "the first": lambda y: y[:, :1],
    "the second": lambda y: y[:, 1:2],
    "the last but one": lambda y: y[:, -2:-1],
    "of the last dimensions": lambda y: y[..., -1:, :],
    "before a new one": lambda y: y[:, -1:, None].squeeze(2),
    "beside an index": lambda y: y[torch.tensor([0]), -1:],
    "beside a number": lambda y: y[0, -1:],
    "written to": lambda y: y.clone()[:, -1:].add_(1),
}


class Halved(nn.Module):
    """Divides what may be empty, half of a length, by a part of it."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, : x.shape[1] // 2].exp().cumsum(1)
        return y / self.part(y)


@SIZED
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_one_step_is_broadcast(name: str) -> None:
    module = Halved(PARTS[name])
    forward = capture_forward(module, {"x": torch.randn(2, 8, 4)}, [SPEC])
    gradient = capture_gradient(forward).exported.module()
    needed = 4 if name in ("the second", "the last but one") else 2
    for length in 4, 7, needed:
        x = torch.randn(3, length, 4, requires_grad=True)
        expected = module(x)
        torch.testing.assert_close(forward.exported.module()(x), expected)
        seed = torch.randn(expected.shape)
        [right] = torch.autograd.grad(expected, x, seed)
        torch.testing.assert_close(gradient(x.detach(), seed)["grad/x"], right)
    assert violated(forward, {"batch": 3, "length": needed - 1})


class Ends(nn.Module):
    """Whose part may be empty: then it has fewer steps."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x[:, 1:][:, -1:]), 1)


def test_a_part_that_nothing_is_broadcast_along_may_be_empty() -> None:
    forward = capture_forward(Ends(), {"x": torch.randn(2, 8, 4)}, [SPEC])
    for length in 1, 2, 5:
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(forward.exported.module()(x), Ends()(x))


@SIZED
def test_what_does_not_fit_is_refused() -> None:
    module = Halved(lambda y: torch.cat((y[:, -1:], y[:, :2]), 1))
    with pytest.raises(ExportFailed, match="must match"):
        capture_forward(module, {"x": torch.randn(2, 8, 4)}, [SPEC])


class Windows(nn.Module):
    """Marks windows of half a length, and of a quarter, as code that shifts windows does."""

    def forward(self, x: Tensor) -> Tensor:
        half, mask = x.shape[1] // 2, torch.zeros(1, x.shape[1], 1)
        cuts = slice(0, -half), slice(-half, -(half // 2)), slice(-(half // 2), None)
        for number, cut in enumerate(cuts):
            mask[:, cut] = number + 1
        return x * mask


def test_parts_that_are_counted_from_the_end_by_a_size() -> None:
    forward = capture_forward(Windows(), {"x": torch.randn(2, 8, 4)}, [SPEC])
    for length in 4, 7, 12:
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(forward.exported.module()(x), Windows()(x))
    for length in range(1, 4):  # the last cut is `slice(0, None)`, which nothing is from the end
        assert violated(forward, {"batch": 3, "length": length})


POSITIONS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Conv2d(2, 3, 3, 2, 1)

    def forward(self, x):
        y = self.a(x)
        y = y[:, :, : y.shape[2] // 2, : y.shape[3] // 2]
        rows, columns = (torch.ones_like(y[:, 0]).cumsum(dim) for dim in (1, 2))
        rows, columns = rows / rows[:, -1:], columns / columns[:, :, -1:]
        return y * rows[:, None] + columns[:, None]
"""


@SIZED
def test_positions_as_shares_of_the_last_one(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    _, checkpoint, model = saved_net(POSITIONS)
    bundle = tmp_path / "bundle"
    api.export(
        checkpoint,
        bundle,
        model=model,
        inputs=parse_inputs(["x:[batch,2,height,width]"]),
        format=["exported_program", "onnx"],
    )
    report = api.verify(bundle, model=model, runtime=["exported_program", "onnxruntime"])
    assert {each.verdict for each in report.results} == {"pass"}
    assert report.exit_code() == 0
