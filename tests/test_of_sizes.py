"""Integers of tensors that are all one size are that size, also in a capture."""

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
from fuseport.exporter.program.gradient import capture_gradient

SPEC = TensorSpec("x", "float32", ("batch", "length", 4))


def lengths(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], dtype=torch.long) * x.shape[1]


KNOWN: dict[str, Callable[[Tensor], Any]] = {
    "ones": lambda x: lengths(x).max().item(),
    "full": lambda x: torch.full((x.shape[0],), x.shape[1]).min().item(),
    "by name": lambda x: torch.full(size=(3,), fill_value=x.shape[1]).amax().item(),
    "of another": lambda x: torch.full_like(lengths(x), x.shape[1]).max().item(),
    "new": lambda x: lengths(x).new_full((2,), x.shape[1]).clone().max().item(),
    "computed": lambda x: (2 * (lengths(x) + 3) - lengths(x) - 6).max().item(),
    "from": lambda x: (3 - (3 - lengths(x))).max().item(),
    "a range": lambda x: torch.arange(lengths(x).max()).shape[0],
    "as a number": lambda x: torch.zeros(lengths(x).max(), 2).shape[0],
    "a quotient": lambda x: torch.div(x.shape[1], 2, rounding_mode="trunc") * 2 + x.shape[1] % 2,
    "of a tensor": lambda x: torch.zeros(12).expand(lengths(x).max() // 1, 12).shape[0],
    "in a view": lambda x: x.view(-1, torch.div(8 * x.shape[1], 8, rounding_mode="floor")).shape[1],
    "twice": lambda x: [(each := lengths(x)).max().item(), each.max().item()][1],
}


class Cut(nn.Module):
    """Needs to know that the size is the input's: it adds the two."""

    def __init__(self, size: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(self.size(x), 4)


def held(module: nn.Module) -> None:
    program = capture_forward(module, {"x": torch.randn(2, 6, 4)}, [SPEC]).exported
    assert not any("item" in str(node.target) for node in program.graph.nodes)
    for sizes in (5, 7, 4), (1, 1, 4):
        x = torch.randn(sizes)
        torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_read_out_of_it_is_the_size(name: str) -> None:
    held(Cut(KNOWN[name]))


def written(x: Tensor) -> Tensor:
    each = lengths(x)
    each[-1:] = 2
    return each


def by_a_view(x: Tensor) -> Tensor:
    each = lengths(x)
    each.view(-1)[0] = 2
    return each


def in_place(x: Tensor) -> Tensor:
    each = lengths(x)
    each -= x.shape[1] - 2
    return each


def as_a_result(x: Tensor) -> Tensor:
    each = lengths(x)
    torch.mul(each, 0, out=each)
    return each + 2


def in_a_list(x: Tensor) -> Tensor:
    each = lengths(x)
    torch._foreach_sub_([each], x.shape[1] - 2)
    return each


WRITTEN = (written, by_a_view, in_place, as_a_result, in_a_list)


class First(nn.Module):
    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        return x * self.made(x).min().item()


@pytest.mark.parametrize("made", WRITTEN)
def test_what_was_written_to_is_none(made: Callable[[Tensor], Tensor]) -> None:
    module = First(made)
    program = capture_forward(module, {"x": torch.randn(2, 6, 4)}, [SPEC]).exported
    for sizes in (5, 7, 4), (1, 3, 4):
        x = torch.randn(sizes)
        torch.testing.assert_close(program.module()(x), module(x))


class Other(nn.Module):
    """Of what is no single size, or no integer."""

    def forward(self, x: Tensor) -> Tensor:
        values = (lengths(x) + x.sum().long()).max().item()
        floats = torch.full((2,), 0.5).max().item()
        return x * values + floats + torch.max(lengths(x), torch.tensor(100)).max().item()


def test_what_is_more_than_a_size_is_none() -> None:
    program = capture_forward(Other(), {"x": torch.ones(2, 6, 4)}, [SPEC]).exported
    x = torch.ones(3, 5, 4)
    torch.testing.assert_close(program.module()(x), Other()(x))


class Restored(nn.Module):
    """As ESPnet's decoder of spectra, whose lengths are a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 9)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        signal, window = x.flatten(1), torch.hann_window(16)
        spectrum = torch.stft(signal, 16, 8, window=window, return_complex=True) * self.gain
        each = torch.ones(signal.shape[0], dtype=torch.long) * signal.shape[1]
        return torch.istft(spectrum, 16, 8, window=window, length=each.max())


def test_a_signal_is_restored_in_the_length_that_a_tensor_has() -> None:
    module = Restored()
    forward = capture_forward(module, {"x": torch.randn(2, 8, 4)}, [SPEC])
    gradient = capture_gradient(forward).exported.module()
    for sizes in (3, 7, 4), (1, 9, 4):
        x = torch.randn(sizes, requires_grad=True)
        expected = module(x)
        assert expected.shape == (sizes[0], 4 * sizes[1])
        torch.testing.assert_close(forward.exported.module()(x), expected)
        seed = torch.randn(expected.shape)
        found = gradient(x.detach(), seed)
        for wanted, name in (x, "x"), (module.gain, "gain"):
            [right] = torch.autograd.grad(expected, wanted, seed, retain_graph=True)
            torch.testing.assert_close(found[f"grad/{name}"], right)


BRANCHING = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        longest = (torch.ones(x.shape[0], dtype=torch.long) * x.shape[1]).max().item()
        if x.sum() > 0:
            x = torch.tanh(x)
        chunks = torch.div(2 * x.shape[1], 2, rounding_mode="trunc")  # as Longformer counts
        x = x.view(-1, chunks, 4)
        if longest > 3:
            x = x * 2
        return self.linear(x) + torch.arange(longest)[:, None]
"""


def test_what_is_decided_by_it_is_decided_by_a_size(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    module, checkpoint, model = saved_net(BRANCHING)
    inputs = parse_inputs(["x:[batch,length,4]"])
    target = tmp_path / "bundle"
    bundle = api.export(checkpoint, target, model=model, inputs=inputs, format=["exported_program"])
    assert "length >= 4" in "; ".join(bundle.manifest["notes"])
    program = torch.export.load(target / "forward.pt2").module()
    assert torch.ops.aten.item.default not in {node.target for node in program.graph.nodes}
    for x in torch.ones(3, 5, 4), -torch.ones(2, 7, 4):
        torch.testing.assert_close(program(x), module(x))


COUNTING = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("first", torch.tensor(3))

    def forward(self, x):
        turns, h = START, x[:, 0]
        for t in range(x.shape[1]):
            h = torch.tanh(self.linear(h) + x[:, t])
            turns = turns + 1
        return h * turns.item()
"""


@pytest.mark.parametrize("start", ["torch.zeros((), dtype=torch.long)", "self.first * 2"])
def test_what_is_counted_in_a_loop_is_of_all_its_turns(
    start: str, saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    module, checkpoint, model = saved_net(COUNTING.replace("START", start))
    inputs = parse_inputs(["x:[batch,length,4]"])
    target = tmp_path / "bundle"
    api.export(
        checkpoint,
        target,
        model=model,
        inputs=inputs,
        format=["torchscript"],
        programs="forward",
    )
    program = torch.jit.load(target / "forward.pt")
    for x in torch.randn(3, 7, 4), torch.randn(2, 1, 4):
        torch.testing.assert_close(program(x), module(x))
