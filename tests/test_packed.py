"""Packed sequences, of any batch and lengths: captured by masks, with gradients, and refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.formats import Options, torchscript
from fuseport.exporter.formats import onnx as onnx_format
from fuseport.exporter.models.model import example
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import Program, TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

HEAD = """
import torch
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
)
"""
UNSORTED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.b = nn.GRU(8, 5)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, (h, c) = self.a(packed)
        y, n = pad_packed_sequence(packed, batch_first=True, padding_value=-1.5)
        z, last = self.b(packed)
        return y, n, h, c, pad_packed_sequence(z)[0], last
"""
SORTED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 3)
        self.a = nn.GRU(3, 4, bidirectional=True)
        self.out = nn.Linear(8, 2)

    def forward(self, ids, lengths, h):
        packed = pack_padded_sequence(self.embedding(ids), lengths)
        packed, last = self.a(packed, h.transpose(0, 1).contiguous())
        y, _ = pad_packed_sequence(packed, padding_value=float("-inf"))
        return self.out(torch.cat([last[0], last[1]], -1)), y.max(0).values
"""
VALUES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.a = nn.RNN(3, 4, nonlinearity="relu")
        self.out = nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.tolist(), True, enforce_sorted=False)
        y, last = self.a(packed._replace(data=self.inner(packed.data).tanh()))
        scores = self.out(y.data)
        y, _ = pad_packed_sequence(y._replace(data=scores), True, total_length=x.shape[1])
        return y, last, scores.sum(0), packed.batch_sizes
"""
SEVERAL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LSTM(3, 4, proj_size=2)

    def forward(self, a, b, c):
        return self.a(pack_sequence([a, b, c], enforce_sorted=False))
"""
PADDED = ["x:[batch,length,3]", "lengths:int64[batch]>=1<=length"]
NETS = {
    "lstm and gru": (UNSORTED, PADDED),
    "gru, sorted, first states": (
        SORTED,
        ["ids:int64[length,batch]<11", "lengths:int64[batch]>=1<=length", "h:[batch,2,4]"],
    ),
    "rnn, its values": (VALUES, PADDED),
    "lstm, projections, from a list": (SEVERAL, ["a:[n,3]", "b:[m,3]", "c:[k,3]"]),
}


@pytest.mark.parametrize("name", NETS)
def test_programs_are_verified_in_all_formats(
    name: str, tmp_path: Path, saved_net: SavedNet
) -> None:
    code, inputs = NETS[name]
    net, checkpoint, model = saved_net(HEAD + code)
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code(strict=True) == 0, report.failures()
    gradients = {f"grad/{name}" for name, _ in net.named_parameters()}
    for runtime in ("torchscript", "libtorch", "exported_program", "onnxruntime"):
        assert gradients <= {row.tensor for row in report.results if row.runtime == runtime}


SPECS = [
    TensorSpec("x", "float64", ("batch", "length", 3)),
    TensorSpec("lengths", "int64", ("batch",), "length+1", 1),
]


class Layer(nn.Module):
    """A layer over a packed sequence; what it returns of one, `call` says."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer.double(), call

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.call(self.layer, x, lengths)


def captured(module: nn.Module) -> Program:
    x, lengths = torch.randn(3, 7, 3, dtype=torch.float64), torch.tensor([3, 7, 1])
    return capture_forward(module.eval(), {"x": x, "lengths": lengths}, SPECS)


def padded(layer: nn.Module, x: Tensor, lengths: Tensor, **options: Any) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, last = layer(packed)
    return pad_packed_sequence(y, batch_first=True, **options)[0], last


def longer(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    return padded(layer, x, lengths, total_length=x.shape[1] + 2, padding_value=0.5)


def at_most_nine(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    return padded(layer, x, lengths, total_length=9)


def sorted_by_code(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    lengths, order = lengths.sort(descending=True)
    _, last = layer(pack_padded_sequence(x[order], lengths, batch_first=True))
    return last[:, order.argsort()]


def over_its_own_values(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    packed = PackedSequence(packed.data.sin(), *packed[1:])
    y = layer(packed)[0]
    assert isinstance(y, PackedSequence)
    return y._replace(data=torch.cat([y.data, packed.data], -1)), y.data.shape[0] * y.data


def twice(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    """Of one length, as both are packed by the same lengths."""
    return torch.cat([padded(layer, x, lengths)[0], padded(layer, x.tanh(), lengths)[0]], -1)


def written_between(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    lengths = lengths.clone()
    one = padded(layer, x, lengths)
    lengths.fill_(1)
    return one, padded(layer, x, lengths)


def written_into(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    packed.data.mul_(0.5)
    return layer(packed)[1], packed.data.data.shape[1] * packed.data


def by_the_length(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    return padded(layer, x, torch.full((x.shape[0],), x.shape[1]))


def in_another_dtype(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return layer(packed.float().double())[1]


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "lstm": (lambda: nn.LSTM(3, 2, bidirectional=True), padded),
    "gru": (lambda: nn.GRU(3, 2, 2), longer),
    "no bias": (lambda: nn.RNN(3, 2, bias=False), at_most_nine),
    **{
        call.__name__: (lambda: nn.GRU(3, 2, bidirectional=True), call)
        for call in (
            sorted_by_code,
            over_its_own_values,
            twice,
            written_between,
            written_into,
            by_the_length,
            in_another_dtype,
        )
    },
}
OF_BATCHES = [(3, 7, [3, 7, 1]), (1, 1, [1]), (4, 9, [2, 5, 5, 1]), (2, 6, [6, 6])]


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    """Of batches, too, whose longest sequence has fewer steps than the padded batch."""
    torch.manual_seed(0)
    make, call = CALLS[name]
    module = Layer(make(), call)
    forward = captured(module)
    gradient = capture_gradient(forward).exported.module()
    program = forward.exported.module()
    parameters = dict(module.named_parameters())
    for batch, steps, lengths in OF_BATCHES:
        x = torch.randn(batch, steps, 3, dtype=torch.float64, requires_grad=True)
        for row, length in zip(x.detach(), lengths, strict=True):
            row[length:] = float("nan") if call is padded else 3.0
        given = torch.tensor(lengths)
        expected = torch.utils._pytree.tree_leaves(module(x, given))
        found = program(x, given)
        values = list(found.values()) if isinstance(found, dict) else [found]
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
        ys = [y for y in expected if y.is_floating_point()]
        seeds = [torch.randn_like(y) for y in ys]
        wanted = torch.autograd.grad(ys, [x, *parameters.values()], seeds)
        results = gradient(x.detach(), given, *seeds)
        for of, exact in zip(["x", *parameters], wanted, strict=True):
            torch.testing.assert_close(results[f"grad/{of}"], exact, rtol=1e-11, atol=1e-11)


def sorted_before(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    y, _ = layer(pack_padded_sequence(x, lengths, batch_first=True))
    return pad_packed_sequence(y, batch_first=True, total_length=8)[0]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Callable[..., Any]]:
    torch.manual_seed(0)
    program = captured(Layer(nn.GRU(3, 2), sorted_before))
    folder = tmp_path_factory.mktemp("packed")
    torchscript.write(program, folder / "a.pt", Options(folder / "w"))
    onnx_format.write(program, folder / "a.onnx", Options(folder / "w"))
    session = onnxruntime.InferenceSession(folder / "a.onnx")

    def run(*given: Tensor) -> Any:
        return session.run(
            None, dict(zip(("x", "lengths"), (t.numpy() for t in given), strict=True))
        )

    return [torch.jit.load(folder / "a.pt"), run]


@pytest.mark.parametrize(
    ("lengths", "steps"), [([3, 7, 1], 7), ([3, 3, 0], 7), ([8, 7, 1], 7), ([9, 7, 1], 9)]
)
def test_artifacts_refuse_what_torch_does(
    lengths: list[int], steps: int, artifacts: list[Callable[..., Any]]
) -> None:
    """Lengths in no order, of nothing, of more than there is, and of more than `total_length`."""
    x = torch.randn(3, steps, 3, dtype=torch.float64)
    for artifact in artifacts:
        artifact(x, torch.tensor([7, 3, 1]))
        with pytest.raises(Exception, match="the program holds only where"):
            artifact(x, torch.tensor(lengths))


def by_hand(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    return layer(PackedSequence(x.flatten(0, 1), torch.ones_like(lengths)))[0].data


def packed_by_hand_of_values(layer: nn.Module, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y = PackedSequence(packed.data, packed.batch_sizes + 0)
    return pad_packed_sequence(y)[0]


@pytest.mark.parametrize("call", [by_hand, packed_by_hand_of_values])
def test_packed_sequences_by_hand_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ExportFailed, match="a packed sequence is made by hand"):
        captured(Layer(nn.GRU(3, 2), call))


def test_dropout_between_layers_is_refused() -> None:
    layer = nn.GRU(3, 2, 2, dropout=0.5)
    module = Layer(layer, padded).eval()
    layer.train()
    inputs = {"x": torch.randn(3, 7, 3, dtype=torch.float64), "lengths": torch.tensor([3, 7, 1])}
    with pytest.raises(ExportFailed, match="dropout between layers over a packed sequence"):
        capture_forward(module, inputs, SPECS)


LENGTHS = {
    "numpy": "lengths.cpu().numpy()",
    "data": "lengths.data.cpu().numpy()",
    "list": "lengths.tolist()",
    "mask": "(torch.arange(x.shape[1]) < lengths[:, None]).sum(1)",
}
STATES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, LENGTHS, batch_first=True)
        h = torch.ones(1, int(packed.batch_sizes[0]), 2)
        y, n = pad_packed_sequence(self.a(packed, (h, h))[0], batch_first=True)
        weights = y.mean(-1).masked_fill(torch.arange(int(n.max())) >= n[:, None], -1e9)
        return weights.softmax(1)
"""


@pytest.mark.parametrize("given", LENGTHS)
def test_lengths_are_what_code_makes_of_them(
    given: str, tmp_path: Path, saved_net: SavedNet
) -> None:
    """And a size that code makes a number of, in a first capture, is none in the next."""
    net, checkpoint, model = saved_net(HEAD + STATES.replace("LENGTHS", LENGTHS[given]))
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        inputs=PADDED,
        format="torchscript",
        programs="forward",
    )
    program = torch.jit.load(bundle.folder / "forward.pt")
    for batch, steps, lengths in ((3, 7, [7, 2, 2]), (4, 9, [5, 5, 2, 1])):
        x, n = torch.randn(batch, steps, 3), torch.tensor(lengths)
        torch.testing.assert_close(program(x, n), net(x, n))
    notes = bundle.manifest["notes"]
    assert "lengths: in decreasing order wherever drawn, as the model asks" in notes


def test_sizes_may_be_numbers(tmp_path: Path, saved_net: SavedNet) -> None:
    net, checkpoint, model = saved_net(HEAD + STATES.replace("LENGTHS", "lengths"))
    inputs = ["x:[3,9,3]", "lengths:int64[3]>=1<=9"]
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=inputs, format="torchscript"
    )
    report = api.verify(bundle.folder, model=model, runtime="torchscript")
    assert report.exit_code(strict=True) == 0, report.failures()
    x, lengths = torch.randn(3, 9, 3), torch.tensor([5, 2, 1])
    program = torch.jit.load(bundle.folder / "forward.pt")
    torch.testing.assert_close(program(x, lengths), net(x, lengths))


def test_lengths_are_drawn_in_the_order_that_is_asked_for() -> None:
    (spec,) = parse_inputs(["lengths:int64[batch]>=1<=batch"])
    sizes, generator = {"batch": 40}, torch.Generator().manual_seed(0)
    free = example(spec, sizes, generator)
    assert free.tolist() != sorted(free.tolist(), reverse=True)
    asked = TensorSpec(spec.name, spec.dtype, spec.dims, spec.high, spec.low, descending=True)
    drawn = example(asked, sizes, generator).tolist()
    assert drawn == sorted(drawn, reverse=True)
    assert drawn[0] == 40
    assert len(set(drawn)) > 2
