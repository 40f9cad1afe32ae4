"""Tables that a model's first call makes: a copy in another dtype makes its own."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.models.fresh import (
    as_before,
    as_now,
    fresh,
    keeps,
    remember,
    repeatable,
)
from fuseport.exporter.models.user import parse_inputs

CODE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.table = None
        self.tables = {}
        self.register_buffer("angles", None, persistent=False)

    def made(self, x):
        return torch.sin(torch.arange(8, dtype=x.dtype) + 0.1)

    def forward(self, x):
        if not hasattr(self, "buffer"):
            self.register_buffer("buffer", self.made(x), persistent=False)
        if self.table is None:
            self.table = self.made(x)
        if self.angles is None:
            self.angles = self.made(x)
        if 8 not in self.tables:
            self.tables[8] = self.made(x)
        return self.linear(x) * self.buffer * self.table * self.angles * self.tables[8]
"""


def test_truth_is_the_same_at_export_and_at_verification(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(CODE, linear=nn.Linear(8, 8))
    inputs, wanted = parse_inputs(["x:[batch,8]"]), ["torchscript"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert {row.runtime for row in report.results} >= {"float64", "torchscript"}


KEEPING = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        if not hasattr(self, "weight"):
            self.weight = torch.tanh(self.a.weight)
        self.attention = self.a(x).softmax(-1)  # to be looked at
        self.seen.append(self.attention)
        return self.attention * (x @ self.weight)
"""


def test_what_calls_compute_of_parameters_and_keep_has_a_gradient_in_every_call(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(KEEPING, a=nn.Linear(8, 8))
    inputs, wanted = parse_inputs(["x:[batch,8]"]), ["torchscript"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    compared = {row.tensor for row in report.results if row.runtime == "torchscript"}
    assert {"grad/a.weight", "grad/a.bias"} <= compared


def test_a_call_that_keeps_nothing_is_made_once() -> None:
    calls = []
    net = nn.Linear(2, 2)
    remember(net)
    net.register_forward_hook(lambda *_: calls.append(1))
    again = repeatable(net, net)
    for _ in range(3):
        again(torch.ones(2))
    assert len(calls) == 3


def test_a_copy_forgets_what_calls_have_kept() -> None:
    scope: dict[str, type[nn.Module]] = {}
    exec(CODE, scope)
    net = scope["Net"]()
    remember(net)
    x = torch.ones(2, 8)
    known = net(x)
    for copied in (fresh(net), fresh(net).double()):
        assert not hasattr(copied, "buffer")
        assert copied.table is copied.angles is None
        assert copied.tables == {}
    wide = fresh(net).double()
    assert wide(x.double()).dtype == torch.float64
    exact = torch.sin(torch.arange(8, dtype=torch.float64) + 0.1)
    for kept in (wide.buffer, wide.table, wide.angles, wide.tables[8]):
        assert torch.equal(kept, exact)
    assert torch.equal(net(x), known)  # the original has its own
    assert net.tables[8].dtype == torch.float32


def test_what_was_there_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(2, 2)]
            self.first = self.layers[0]
            self.steps = 3
            self.register_buffer("mean", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) * self.steps + self.get_buffer("mean")

    net = Net()
    remember(net)
    x = torch.randn(3, 2)
    copied = fresh(net)
    assert torch.equal(copied(x), net(x))
    assert copied.layers[0] is copied.first  # type: ignore[index]
    assert copied.first is not net.first
    net.to(torch.bfloat16)
    assert fresh(net).get_buffer("mean").dtype == torch.bfloat16
    assert fresh(nn.Linear(2, 2)).weight.shape == (2, 2)  # never remembered


def test_what_a_call_takes_away_is_back_in_a_copy() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.tables = 3, {1: 2}

        def forward(self, x: Tensor) -> Tensor:
            if hasattr(self, "first"):
                del self.first
            self.tables.clear()
            return x

    net = Net()
    remember(net)
    net(torch.ones(2))
    copied = fresh(net)
    assert copied.first == 3
    assert copied.tables == {1: 2}
    assert not hasattr(net, "first")
    assert net.tables == {}


ROTARY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.known, self.cos = 0, None

    def forward(self, x):
        length = x.shape[1]
        if self.cos is None or length > self.known:  # as flash_attn keeps its rotary angles
            angles = torch.outer(torch.arange(length).to(x.dtype), torch.arange(1.0, 5.0))
            self.known, self.cos, self.sin = length, angles.cos(), angles.sin()
        a, b = self.linear(x).chunk(2, -1)
        cos, sin = self.cos[:length], self.sin[:length]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
"""
# As StripedHyena keeps the times of its filters; each call cuts the table.
TIMES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        length = x.shape[1]
        if not hasattr(self, "t") or self.t.shape[-1] < length:
            self.t = torch.arange(length)[None]
        else:
            self.t = self.t[..., :length]
        h = (-self.linear.weight[:, :1].exp() * self.t).exp()
        z = torch.fft.rfft(h, n=2 * length) * torch.fft.rfft(x.mT, n=2 * length)
        return torch.fft.irfft(z, n=2 * length)[..., :length]
"""
# What is made at the first call is read there, which no trace can; then it is a constant.
READ = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.tensor((self.linear.weight.sum(0) > 0).tolist())
        return self.linear(x) * self.table
"""


@pytest.mark.parametrize("code", [ROTARY, TIMES, READ], ids=["rotary", "times", "read"])
def test_tables_of_the_first_call_are_made_for_any_size(
    code: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(code, linear=nn.Linear(8, 8))
    inputs, wanted = parse_inputs(["x:[batch,length,8]"]), ["torchscript", "onnx"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert any("past a chunk" in row.case for row in report.results)


def test_a_trace_leaves_nothing_in_a_module() -> None:
    scope: dict[str, type[nn.Module]] = {}
    exec(ROTARY, scope)
    net = scope["Net"]()
    remember(net)
    assert not keeps(net)
    net(torch.ones(1, 3, 8))
    assert keeps(net)
    kept = net.cos
    with as_before(net):
        assert net.cos is None
        assert not keeps(net)
        net(torch.ones(1, 5, 8))
    assert net.cos is kept
    with as_now(net):
        assert net.cos is kept
        net(torch.ones(1, 9, 8))
        assert net.known == 9
    assert net.cos is kept
    assert net.known == 3


def test_what_has_no_copy_is_shared_by_copies() -> None:
    class Settings(dict[str, int]):
        __getattr__ = dict.__getitem__  # asked for `__deepcopy__` it raises KeyError

    net = nn.Linear(2, 2)
    net.settings, net.lock = Settings(width=2), threading.Lock()  # type: ignore[assignment]
    net.others = [nn.Linear(2, 2)]  # type: ignore[assignment]
    remember(net)
    copied = fresh(net)
    assert copied.settings is net.settings
    assert copied.lock is net.lock
    assert copied.others[0] is not net.others[0]  # type: ignore[index]
    assert torch.equal(copied.weight, net.weight)  # type: ignore[arg-type]
    assert copied.weight is not net.weight
