"""Recurrent layers at a dynamic length: captured as scans, exported, verified."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.capture.dynamic import found_dynamic
from fuseport.exporter.formats import Options, torchscript
from fuseport.exporter.formats import onnx as onnx_format
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

SavedWith = Callable[..., tuple[Path, str]]

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.b = torch.nn.GRU(8, 3, batch_first=True)

    def forward(self, x):
        y, (h, c) = self.a(x)
        return self.b(y)[0], c
"""


def test_recurrent_layers_are_verified_at_any_length(tmp_path: Path, saved_with: SavedWith) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
    checkpoint, model = saved_with(NET, a=lstm, b=nn.GRU(8, 3, batch_first=True))
    inputs = parse_inputs(["x:[batch,length,3]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    runtimes = ["exported_program", "torchscript", "onnxruntime", "libtorch"]
    report = api.verify(bundle.folder, model=model, runtime=runtimes)
    assert report.exit_code() == 0, report.failures()
    passed = [row for row in report.results if row.verdict == "pass"]
    names = ("a.weight_ih_l0", "a.bias_hh_l0_reverse", "b.weight_hh_l0")
    for tensor in (f"grad/{name}" for name in names):
        assert {row.runtime for row in passed if row.tensor == tensor} >= set(runtimes), tensor


LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "tanh": lambda: nn.RNN(3, 4, 2),
    "relu, both directions": lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True),
    "gru, no bias": lambda: nn.GRU(3, 4, bias=False),
    "gru, two layers": lambda: nn.GRU(3, 4, 2),
    "lstm, projections, both directions": lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True),
    "lstm, dropout": lambda: nn.LSTM(3, 4, 2, dropout=0.5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_torch_has(name: str, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYERS[name]()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y, last = self.layer(x)
            return (y, *last) if isinstance(last, tuple) else (y, last)

    torch.manual_seed(0)
    module = Net().eval()
    spec = TensorSpec("x", "float32", ("length", "batch", 3))
    forward = capture_forward(module, {"x": torch.randn(5, 2, 3)}, [spec])
    for program in (forward, capture_gradient(forward)):
        torchscript.write(program, tmp_path / f"{program.kind}.pt", Options(tmp_path / "w"))
        onnx_format.write(program, tmp_path / f"{program.kind}.onnx", Options(tmp_path / "w"))
    exported, gradient = (torch.jit.load(tmp_path / f"{k}.pt") for k in ("forward", "gradient"))
    sessions = [InferenceSession(tmp_path / f"{k}.onnx") for k in ("forward", "gradient")]
    parameters = dict(module.named_parameters())
    for sizes in ((5, 2, 3), (1, 1, 3), (9, 3, 3)):
        x = torch.randn(sizes, requires_grad=True)
        ys = module(x)
        torch.testing.assert_close(tuple(exported(x).values()), ys)
        seeds = [torch.randn_like(y) for y in ys]
        wanted = torch.autograd.grad(ys, [x, *parameters.values()], seeds)
        results = gradient(x.detach(), *seeds)
        for of, expected in zip(["x", *parameters], wanted, strict=True):
            torch.testing.assert_close(results[f"grad/{of}"], expected)
        given = [tensor.detach().numpy() for tensor in (x, *seeds)]
        for session in sessions:
            names = [value.name for value in session.get_inputs()]
            found = session.run(None, dict(zip(names, given, strict=False)))
            values = (*ys, *wanted) if session is sessions[1] else ys
            for value, expected in zip(found, values, strict=True):
                torch.testing.assert_close(torch.from_numpy(value), expected.detach())


def test_in_bfloat16_too(tmp_path: Path) -> None:
    """Of bfloat16, ONNX has no sequences, into which torch.onnx would split the gates."""
    module = nn.LSTM(3, 4, batch_first=True).eval().bfloat16()
    spec = TensorSpec("x", "bfloat16", ("batch", "length", 3))
    inputs = {"x": torch.randn(2, 5, 3, dtype=torch.bfloat16)}
    forward = capture_forward(Outputs(module), inputs, [spec])
    for program in (forward, capture_gradient(forward)):
        path = tmp_path / f"{program.kind}.onnx"
        types = onnx_format.write_as(program, path, Options(tmp_path / "w"), {})
        assert {"Scan", "Split"} <= types
        assert not {"SplitToSequence", "SequenceAt"} & types


class Outputs(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


def test_their_length_is_found_to_be_dynamic() -> None:
    module = Outputs(nn.GRU(3, 4, batch_first=True)).eval()
    (spec,), _ = found_dynamic(
        module, {"x": torch.randn(2, 5, 3)}, [TensorSpec("x", "float32", (2, 5, 3))]
    )
    assert spec.dims == ("batch", "x_1", 3)


def test_a_loop_of_a_cell_over_the_length_is_one(tmp_path: Path, saved_with: SavedWith) -> None:
    checkpoint, model = saved_with(LOOP, a=nn.GRUCell(3, 3))
    inputs = parse_inputs(["x:[batch,length,3]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    (said,) = [note for note in bundle.manifest["notes"] if "loop" in note]
    assert said == "the loop at net.py:11 is one in the programs, of as many turns as a size says"
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()


LOOP = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.GRUCell(3, 3)

    def forward(self, x):
        h = x[:, 0]
        for t in range(x.shape[1]):
            h = self.a(x[:, t], h)
        return h
"""

NORMED = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.GRU(3, 4, batch_first=True)
        self.a = torch.nn.utils.weight_norm(layer, "weight_hh_l0")

    def forward(self, x):
        return self.a(x)[0]
"""


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_layer_whose_weights_are_computed(tmp_path: Path, saved_with: SavedWith) -> None:
    torch.manual_seed(0)
    layer = nn.utils.weight_norm(nn.GRU(3, 4, batch_first=True), "weight_hh_l0")
    checkpoint, model = saved_with(NORMED, a=layer)
    inputs, wanted = parse_inputs(["x:[batch,length,3]"]), ["torchscript"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    report = api.verify(bundle.folder, model=model, runtime=["torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert "grad/a.weight_hh_l0_g" in {row.tensor for row in report.results}
    x = torch.randn(2, 9, 3)
    torch.testing.assert_close(torch.jit.load(bundle.folder / "forward.pt")(x), layer(x)[0])
