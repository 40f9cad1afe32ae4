"""`bincount` in ONNX, by sizes and with weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.tests.as_files import session_of

SPECS = (
    TensorSpec("x", "float32", ("nodes", 4)),
    TensorSpec("ends", "int64", ("edges",)),
    TensorSpec("weights", "float32", ("edges",)),
)
COUNTED = {
    "degrees": lambda x, i, w: x / torch.bincount(i, minlength=x.shape[0]).clamp(min=1)[:, None],
    "as many as there are": lambda x, i, w: torch.bincount(i.int(), minlength=x.shape[0] - 2),
    "weights": lambda x, i, w: torch.bincount(i, w, minlength=x.shape[0]) @ x,
    "weights alone": lambda x, i, w: torch.bincount(i, w),
    "whole weights": lambda x, i, w: torch.bincount(i, i, 9),
}


class Counted(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        return COUNTED[self.name](x, ends, weights)


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_torchs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Counted(name)

    def given(nodes: int, edges: int) -> dict[str, Tensor]:
        ends = torch.randint(nodes, (edges,))
        return {"x": torch.randn(nodes, 4), "ends": ends, "weights": torch.randn(edges)}

    program = capture_forward(module, given(5, 8), SPECS)
    session = session_of(program, tmp_path, "onnxruntime")
    for nodes, edges in ((5, 8), (2, 9), (7, 1), (3, 30)):
        inputs = given(nodes, edges)
        found = session.run({spec.name: inputs[spec.name] for spec in program.inputs})
        torch.testing.assert_close(found["output"], module(**inputs))
