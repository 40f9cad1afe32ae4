"""Gradients that add to places that recur, in ONNX Runtime on several threads.

Its `ScatterND` with a reduction loses updates there, at sizes that are worth a second thread: no
file may have one.
"""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.formats import Options, get
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes.onnxruntime import load


class Picks(nn.Module):
    """Rows of a small table, by integers."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(5, 32, generator=generator))
        self.pick = pick

    def forward(self, ids: Tensor) -> Tensor:
        return self.pick(self.table, ids)


BAGS = torch.tensor([0, 0, 3, 6, 7])  # some have nothing in them
PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda table, ids: nn.functional.embedding(ids, table),
    "embedding with padding": lambda table, ids: nn.functional.embedding(ids, table, padding_idx=2),
    "index": lambda table, ids: table[ids],
    "index of columns": lambda table, ids: table[:, ids],
    "two indices": lambda table, ids: table[ids, ids],
    "index_select": lambda table, ids: table.index_select(0, ids),
    "gather": lambda table, ids: table.gather(0, ids[:, None].expand(-1, 32)),
    "a bag": lambda table, ids: nn.functional.embedding_bag(ids, table, BAGS[:4], mode="sum"),
    "index_add of numbers": lambda table, ids: torch.zeros(5).index_add(0, ids, table[ids, 0]),
    "take_along_dim": lambda table, ids: table.take_along_dim(ids[:, None], 0),
}


@pytest.mark.parametrize("name", PICKS)
def test_every_update_counts(name: str, tmp_path: Path) -> None:
    module = Picks(PICKS[name])
    spec = TensorSpec("ids", "int64", ("length",), high=5)
    ids = torch.randint(0, 5, (40_000,), generator=torch.Generator().manual_seed(1))
    program = capture_gradient(capture_forward(module, {"ids": ids[:7]}, [spec], ("y",)))
    file = tmp_path / "gradient.onnx"
    get("onnx").write(program, file, Options(tmp_path / "weights.safetensors"))
    reductions = [
        attribute.s
        for node in onnx.load(file).graph.node
        for attribute in node.attribute
        if node.op_type == "ScatterND" and attribute.name == "reduction"
    ]
    assert reductions == []
    # Ones add up to whole numbers, which float32 has exactly: every update lost is seen.
    cotangent = torch.ones_like(module(ids))
    (right,) = torch.autograd.grad(module(ids), [module.table], cotangent)
    session = load(file, {})
    for _ in range(3):
        found = session.run({"ids": ids, "cotangent_y": cotangent})["grad/table"]
        assert torch.equal(found, right)


def test_nothing_of_a_padding_row_is_taken(tmp_path: Path) -> None:
    """Its row is zero, and what divides by its length has no number for a gradient."""

    def pick(table: Tensor, ids: Tensor) -> Tensor:
        rows = nn.functional.embedding(ids, table, padding_idx=2)
        return rows / rows.square().sum(-1, keepdim=True).sqrt()

    module = Picks(pick)
    with torch.no_grad():
        module.table[2] = 0
    ids = torch.tensor([0, 2, 1, 2, 0])
    spec = TensorSpec("ids", "int64", ("length",), high=5)
    program = capture_gradient(capture_forward(module, {"ids": ids}, [spec], ("y",)))
    file = tmp_path / "gradient.onnx"
    get("onnx").write(program, file, Options(tmp_path / "weights.safetensors"))
    y = module(ids)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad(y, module.table, dy)
    assert expected.isfinite().all()
    found = load(file, {}).run({"ids": ids, "cotangent_y": dy})["grad/table"]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2], ids=["all", "padding"])
def test_bags_are_torchs(mode: str, padding: int | None, tmp_path: Path) -> None:
    """Torch's ONNX exporter makes loops of them that end ONNX Runtime's process."""

    def bag(table: Tensor, ids: Tensor) -> Tensor:
        last = {"include_last_offset": True, "padding_idx": padding}
        by = {"per_sample_weights": ids.cos()} if mode == "sum" else {}
        bags = nn.functional.embedding_bag(ids, table, BAGS, mode=mode, **last, **by)
        images = nn.functional.embedding_bag(ids.view(1, -1), table, mode=mode, padding_idx=padding)
        return torch.cat([bags, images.sin()])

    module = Picks(bag)
    ids = torch.tensor([0, 2, 1, 2, 2, 2, 0])
    spec = TensorSpec("ids", "int64", (7,), high=5)
    forward = capture_forward(module, {"ids": ids}, [spec], ("y",))
    options = Options(tmp_path / "weights.safetensors")
    y = module(ids)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad(y, module.table, dy)
    for program, given in (forward, {}), (capture_gradient(forward), {"cotangent_y": dy}):
        file = tmp_path / f"{program.kind}.onnx"
        get("onnx").write(program, file, options)
        found = load(file, {}).run({"ids": ids, **given})
        torch.testing.assert_close(found["y"], y.detach())
    torch.testing.assert_close(found["grad/table"], expected)


def test_a_bag_whose_gradients_are_scaled_has_outputs_alone(tmp_path: Path) -> None:
    def bag(table: Tensor, ids: Tensor) -> Tensor:
        bags = nn.functional.embedding_bag
        return bags(ids.view(2, -1), table, mode="mean", scale_grad_by_freq=True)

    module = Picks(bag)
    ids = torch.tensor([0, 2, 1, 2, 2, 0])
    spec = TensorSpec("ids", "int64", (6,), high=5)
    forward = capture_forward(module, {"ids": ids}, [spec], ("y",))
    get("onnx").write(forward, tmp_path / "forward.onnx", Options(tmp_path / "w"))
    found = load(tmp_path / "forward.onnx", {}).run({"ids": ids})["y"]
    torch.testing.assert_close(found, module(ids).detach())
    with pytest.raises(ExportFailed, match="_embedding_bag_backward"):
        get("onnx").write(capture_gradient(forward), tmp_path / "g.onnx", Options(tmp_path / "w"))
