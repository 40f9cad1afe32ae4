"""What torch.onnx casts is cast without computing the program again."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch.onnx._internal.exporter._fx_passes import insert_type_promotion_nodes

from fuseport.exporter.formats._onnx.promotion import promoted_by_known_values
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.tests.as_files import session_of

computed: list[torch.Size] = []


@pytest.fixture
def operator() -> Iterator[object]:
    """An operator that notes in `computed` when its result is."""
    with torch.library._scoped_library("promotion", "DEF") as library:
        library.define("noted(Tensor x) -> Tensor")

        @torch.library.register_fake("promotion::noted", lib=library)
        def _(x: Tensor) -> Tensor:
            computed.append(x.shape)
            return torch.empty_like(x)

        yield torch.ops.promotion.noted


class Mixed(torch.nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        y = torch.ops.promotion.noted(x) * n + 2
        return torch.ops.promotion.noted(torch.where(y > 0, y, n)) / (n + n)


def test_casts_are_as_before_and_nothing_else_is_computed(operator: object) -> None:
    shapes = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(
        Mixed(), (torch.randn(4, 3), torch.arange(3)), dynamic_shapes=(shapes, None)
    )

    def promoted(within: object) -> tuple[list[str], list[str], int]:
        module = copy.deepcopy(exported.graph_module)
        computed.clear()
        with within:  # type: ignore[attr-defined]
            insert_type_promotion_nodes(module)
        return (*_told(module.graph), len(computed))

    nodes, values, count = promoted(nullcontext())
    assert promoted(promoted_by_known_values()) == (nodes, values, 0)
    assert count == 2
    assert sum("convert_element_type" in node for node in nodes) > 1


def _told(graph: fx.Graph) -> tuple[list[str], list[str]]:
    """The nodes of a graph, and the dtypes and sizes of their values."""
    values = [node.meta.get("val") for node in graph.nodes]
    told = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else str(x) for x in values]
    return [node.format_node() or "output" for node in graph.nodes], told


class FromNumbers(torch.nn.Module):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        hidden = 1.0 - kept  # as XLNet and ProphetNet make floats of a mask
        return x - 1e4 * hidden + (2.5 - kept[:, None].repeat(1, 2, 1)).sum(1)


def test_integers_are_taken_from_a_float(tmp_path: Path) -> None:
    given = {"x": torch.arange(6.0).reshape(2, 3), "kept": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    dims = ("batch", "length")
    specs = [TensorSpec("x", "float32", dims), TensorSpec("kept", "int64", dims, high=2)]
    net = FromNumbers()
    forward = capture_forward(net, given, specs)
    found = session_of(forward, tmp_path, "onnxruntime").run(given)
    torch.testing.assert_close(found["output"], net(**given))
