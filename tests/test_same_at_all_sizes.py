"""What code reads of masks and counts that it makes by itself is the same for all inputs."""

from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from transformers import LongformerConfig, LongformerForSequenceClassification

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

# As Longformer's for classification: the first token of each text has global attention.
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.all = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(3))

    def marked(self, x):
        mask = torch.zeros_like(x[:, :, 0])
        mask[:, 0] = 1
        return mask

    def forward(self, x):
        mask = self.marked(x) > 0
        y = self.up(x).tanh()
        BODY
        return y
"""
GLOBAL = """
        if mask.flatten().any().item():
            most = mask.long().sum(1).max()
            chosen = x.new_zeros(x.shape[0], most, 4)
            places = torch.arange(most) < mask.long().sum(1, keepdim=True)
            chosen[places.nonzero(as_tuple=True)] = x[mask.nonzero(as_tuple=True)]
            assert list(chosen.shape) == [x.shape[0], most, 4]
            y = y + self.all(chosen)
"""
BODIES = {
    "a mask": GLOBAL,
    "in a loop": """
        some, most = mask.any().item(), mask.long().sum(1).max()
        h = y[:, 0]
        for t in range(x.shape[1]):
            if some:
                h = torch.tanh(self.all(h) * int(most) + y[:, t])
        y = h
""",
    "beside what is counted in a loop": """
        number = torch.zeros_like(x[0, 0, :1]).long()
        h = y[:, 0]
        for t in range(x.shape[1]):
            h = torch.tanh(self.all(h) + y[:, t])
            number = number + 1
        y = h * number.item()
""",
    "of a buffer, too": """
        held = torch.full_like(x[:, 0, 0], 2).long() + self.steps
        y = y.unsqueeze(-1).expand(*y.shape, held.min().item()).sum(-1)
""",
}
SPEC = TensorSpec("x", "float32", ("batch", "length", 4))


def verified(code: str, saved_net: SavedNet, folder: Path) -> api.Bundle:
    _, checkpoint, name = saved_net(code)
    inputs = parse_inputs(["x:[batch,length,4]"])
    bundle = api.export(checkpoint, folder / "b", model=name, inputs=inputs)
    report = api.verify(bundle.folder, model=name, runtime=["eager", "onnxruntime", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    return bundle


@pytest.mark.parametrize("name", BODIES)
def test_it_is_no_decision(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    bundle = verified(NET.replace("        BODY\n", BODIES[name]), saved_net, tmp_path)
    facts = bundle.manifest["programs"]["forward"]
    assert "conditions" not in facts
    assert not any("decides by a value" in note for note in bundle.manifest["notes"])


class Far(nn.Module):
    """Its mask is another one past 200,000 steps, which are not tried."""

    def forward(self, x: Tensor) -> Tensor:
        late = torch.arange(x.shape[1]) > 200_000
        return x * 2 if late.any().item() else x + 1


class Near(nn.Module):
    """Its mask is another one at 100 steps and more."""

    def forward(self, x: Tensor) -> Tensor:
        late = torch.arange(x.shape[1]) >= 100
        return x * (late.long().sum().item() + 1)


class Written(nn.Module):
    """What it counts in was written to, with values."""

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.zeros_like(x[:, 0, 0])
        part = seen[:1]
        part.copy_(x[:1, 0, 0])
        return x * ((seen * 100).long().sum().item() + 1)


class Kept(nn.Module):
    """Writes to a buffer, which no program does, and reads what is computed of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * (torch.zeros_like(x[0, 0, 0]).long() + self.calls).item()


class Counted(nn.Module):
    """Its number is written to, in place and by a view, after it was made."""

    def forward(self, x: Tensor) -> Tensor:
        number = torch.zeros_like(x[0, 0, :1], dtype=torch.long)
        number[0] += 2
        return x * (number.item() + 1)


def test_elsewhere_the_program_refuses() -> None:
    program = capture_forward(Far(), {"x": torch.randn(2, 6, 4)}, [SPEC]).exported.module()
    for length in (1, 4096):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(program(x), Far()(x))
    with pytest.raises(RuntimeError, match="what hangs on sizes alone is False"):
        program(torch.randn(1, 200_002, 4))


def test_both_ways_of_a_decision_are_in_programs(saved_net: SavedNet, tmp_path: Path) -> None:
    """Also of one that hangs on sizes alone: positions may be past a limit, at some size."""
    body = """
        y = y * 2 if torch.arange(x.shape[1]).max() + 1 > 5000 else y + 1
        y = y.tanh() if x.sum() > 0 else y - 1
        y = y * 3 if mask.any() else y
"""
    module, checkpoint, name = saved_net(NET.replace("        BODY\n", body))
    inputs = parse_inputs(["x:[batch,length,4]"])
    options = {"format": ["torchscript"], "programs": ["forward"]}
    bundle = api.export(checkpoint, tmp_path / "b", model=name, inputs=inputs, **options)
    program = torch.jit.load(bundle.folder / "forward.pt")
    for length in (3, 5001):
        x = torch.randn(1, length, 4)
        torch.testing.assert_close(program(x), module(x))


def test_buffers_stay_as_they_are() -> None:
    module = Kept()
    with pytest.raises(ExportFailed, match="writes to calls"):
        capture_forward(module, {"x": torch.randn(2, 6, 4)}, [SPEC])
    assert int(module.calls) == 3


@pytest.mark.parametrize("module", [Near(), Written(), Counted()], ids=lambda x: type(x).__name__)
def test_it_is_left_to_torch_otherwise(module: nn.Module) -> None:
    """What is not the same at sizes that are tried, what hangs on values, what is written to."""
    exported = capture_forward(module, {"x": torch.randn(2, 6, 4)}, [SPEC]).exported
    assert any("item" in str(node.target) for node in exported.graph.nodes)
    for length in (5, 150):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(exported.module()(x), module(x))


def test_heads_of_longformer_with_global_attention(tmp_path: Path) -> None:
    """Transformers' own code, of whose mask for these heads no input has a part."""
    torch.manual_seed(63)
    config = LongformerConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        attention_window=4,
        max_position_embeddings=40,
    )
    model = LongformerForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    options = {"format": ["onnx"], "programs": ["forward"]}
    bundle = api.export(tmp_path / "model", tmp_path / "b", **options)
    program = ort.InferenceSession(bundle.folder / "forward.onnx")
    for batch, length in (1, 4), (3, 12):
        ids = torch.randint(2, 30, (batch, length))
        (found,) = program.run(None, {"input_ids": ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(ids).logits)
