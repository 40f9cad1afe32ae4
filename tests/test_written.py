"""What calls of a model write to its parameters and buffers is undone."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.fresh import as_now, fresh, remember, repeatable, undoing
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.test_program import captured


class Doubling(nn.Module):
    """As S4's kernels: for what is longer than ever before, they change what they have."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(4))
        self.register_buffer("longest", torch.tensor(8))
        self.doubled, self.seen = 1, [1]

    def forward(self, x: Tensor) -> Tensor:
        while x.shape[1] > self.longest.item():
            with torch.no_grad():
                self.c.copy_(1.5 * self.c)
            self.longest = 2 * self.longest
            self.doubled *= 2
            self.seen.append(self.doubled)
        return (x * self.c).cumsum(1) * self.doubled


def expected(net: nn.Module, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What a copy of a module gives, and the gradient of its first parameter."""
    copied = copy.deepcopy(net)
    out = copied(*inputs)
    (gradient,) = torch.autograd.grad(out.square().sum(), [next(copied.parameters())])
    return out.detach(), gradient


def test_each_call_begins_as_the_first() -> None:
    torch.manual_seed(0)
    net = Doubling()
    remember(net)
    wide = fresh(net).double()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    c, call, wide_call = net.c, undoing(net, net), undoing(wide, wide)
    for length in (4, 20, 4, 9, 20, 40):
        x = torch.randn(2, length, 4)
        wanted, gradient = expected(net, x)
        for _ in range(3):
            out = call(x)
            assert torch.equal(out, wanted), length
            (found,) = torch.autograd.grad(out.square().sum(), [net.c])
            assert torch.equal(found, gradient), length
            torch.testing.assert_close(wide_call(x.double()).float(), wanted)
            assert net.c is c
            assert all(torch.equal(net.state_dict()[name], t) for name, t in before.items())
            assert (net.doubled, net.seen) == (1, [1])


def test_what_is_known_of_calls_is_known_of_copies() -> None:
    made = []
    net = Doubling()
    remember(net)
    net.register_forward_hook(lambda *_: made.append(1))
    x = torch.randn(1, 20, 4)
    undoing(net, net)(x)
    assert len(made) == 2  # of which one found out
    copied = fresh(net)
    undoing(copied, copied)(x)
    undoing(net, net)(x)
    assert len(made) == 4


class Writing(nn.Module):
    """Writes to each thing that a module can hold."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(4))
        self.tied = self.weight
        self.register_buffer("steps", torch.zeros(4))
        self.table, self.tables = torch.zeros(4), {"one": [torch.zeros(4)]}
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "data":
                self.weight.data.mul_(2)
            case "a part":
                with torch.no_grad():
                    self.weight[1:] += 1
            case "other memory":
                self.weight.data = self.weight.data * 3
            case "a buffer":
                self.steps += 1
            case "another buffer":
                self.steps = self.steps + 1
            case "another parameter":
                self.weight = nn.Parameter(self.weight.detach() + 1)
            case "an attribute":
                self.table.add_(1)
            case "in containers":
                self.tables["one"][0].add_(1)
            case "a norm":
                self.norm.train()
                x = self.norm(x)
        return x * self.weight + self.tied + self.steps + self.table + self.tables["one"][0]


WAYS = (
    *("data", "a part", "other memory", "a buffer", "another buffer", "another parameter"),
    *("an attribute", "in containers", "a norm"),
)


@pytest.mark.parametrize("how", WAYS)
def test_whatever_is_written_to_is_undone(how: str) -> None:
    net = Writing(how).eval()
    remember(net)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for rows in (2, 3, 2):
        x = torch.randn(rows, 4, generator=generator)
        wanted = copy.deepcopy(net)(x).detach()
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(repeatable(net, net)(x), wanted)
            assert torch.equal(repeatable(net, net)(x).detach(), wanted)
    assert all(torch.equal(net.state_dict()[name], t) for name, t in state.items())
    assert isinstance(net.weight, nn.Parameter)
    assert net.weight is net.tied
    assert not net.table.any()
    assert not net.tables["one"][0].any()


def test_tables_of_another_size_stay_and_nothing_is_copied() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("cos", torch.ones(2, 4), persistent=False)
            self.made = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > self.cos.shape[0]:
                self.register_buffer("cos", torch.ones(x.shape[0], 4), persistent=False)
                self.made += 1
            self.cache = self.cos.cumsum(0)
            self.cache.mul_(2)  # what calls have made may be written to
            return x * self.weight * self.cache[: x.shape[0]]

    net = Rotary()
    remember(net)
    call, memory = undoing(net, net), net.weight.data_ptr()
    for rows in (2, 5, 3, 5, 5):
        call(torch.ones(rows, 4))
        assert net.weight.data_ptr() == memory
    assert net.made == 1
    assert net.cos.shape[0] == 5


def test_what_values_decide_on_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("most", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if x.max() > 1:
                self.most += x.max()
            return x + self.most

    net = Net()
    remember(net)
    call = undoing(net, net)
    call(torch.zeros(2))
    with pytest.raises(ExportFailed, match="writes to most by the values"):
        call(torch.full((2,), 2.0))


def test_an_error_of_the_model_leaves_it_as_it_was() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            if len(x) == 3:
                raise ValueError("three")
            return x + self.steps

    net = Net()
    remember(net)
    call = undoing(net, net)
    for size in (2, 3, 2):
        if size == 3:
            with pytest.raises(ValueError, match="three"):
                call(torch.zeros(3))
        else:
            assert torch.equal(call(torch.zeros(2)), torch.ones(2))


class Moody(nn.Module):
    """As BigBird: a call of few steps sets, for good, how those of many are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.mode, self.head, self.calls = "blocks", nn.Linear(4, 4), 0
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.shape[1] < 8:
            self.mode, self.head = "all", self.other
        return self.head(x.cumsum(1) if self.mode == "all" else x)


def test_what_a_call_sets_for_the_next_ones_is_undone() -> None:
    torch.manual_seed(0)
    net = Moody()
    remember(net)
    head, call = net.head, undoing(net, net)
    for length in (4, 12, 4, 12):
        x = torch.randn(2, length, 4)
        assert torch.equal(call(x), net.other(x.cumsum(1)) if length < 8 else head(x)), length
        assert (net.mode, net.head) == ("blocks", head)


def test_what_is_counted_stays() -> None:
    """Models whose third call is another are to be told."""
    net = Moody()
    remember(net)
    call = undoing(net, net)
    for count in (1, 2, 3):
        call(torch.randn(1, 12, 4))
        assert net.calls == count


@pytest.mark.parametrize("kept", ["an attribute", "an item", "a buffer"])
def test_flags_that_say_that_a_table_is_there_stay_with_it(kept: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.tables: dict[str, Tensor] = {}
            self.is_ready, self.made, self.spare = False, 0, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                table = torch.arange(4.0)
                if kept == "an attribute":
                    self.table = table
                elif kept == "an item":
                    self.tables["table"] = table
                else:
                    self.register_buffer("table", table, persistent=False)
                self.is_ready, self.spare = True, nn.Tanh()
                self.made += 1
            return x * self.weight * (self.tables["table"] if kept == "an item" else self.table)

    net = Net()
    remember(net)
    call, spare = undoing(net, net), net.spare
    with as_now(net):
        net(torch.ones(2, 4))
        assert net.spare is not spare
    assert net.spare is spare
    assert not net.is_ready
    net.tables.clear()
    for rows in (2, 3, 2):
        assert torch.equal(call(torch.ones(rows, 4)), torch.arange(4.0).expand(rows, 4))
        assert (net.is_ready, net.made) == (True, 1)


MOODY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mode, self.linear, self.wide = "blocks", torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[1] < 8:
            self.mode, self.linear = "all", self.wide
        return self.linear(x.cumsum(1) if self.mode == "all" else x)
"""


@pytest.mark.parametrize(("length", "condition"), [(5, "length <= 7"), (12, "length >= 8")])
def test_a_program_says_at_which_sizes_it_has_the_mode_of_a_model_that_was_not_called(
    length: int,
    condition: str,
    tmp_path: Path,
    saved_net: Callable[[str], tuple[nn.Module, Path, str]],
) -> None:
    _, checkpoint, model = saved_net(MOODY)
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        inputs=parse_inputs(["x:[batch,length,4]"]),
        sizes={"length": length},
        format=["onnx"],
    )
    assert condition in str(bundle.manifest["programs"]["forward"]["conditions"])
    report = api.verify(bundle.folder, model=model, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()


CODE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[1] > 16:
            with torch.no_grad():
                self.linear.weight.mul_(2)
        return self.linear(x)
"""


def test_a_model_is_exported_and_verified_as_its_checkpoint_has_it(
    tmp_path: Path, saved_net: Callable[[str], tuple[nn.Module, Path, str]]
) -> None:
    net, checkpoint, model = saved_net(CODE)
    inputs, wanted = parse_inputs(["x:[batch,length,4]"]), ["torchscript", "onnx"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    assert torch.equal(load_file(bundle.weights)["linear.weight"], net.linear.weight)
    assert bundle.manifest["programs"]["forward"]["conditions"]
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert {row.verdict for row in report.results} == {"pass"}


class Filling(nn.Module):
    """Fills a table at its first call, in place."""

    def __init__(self, *, persistent: bool, filled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        table = torch.arange(4.0) / 3 if filled else torch.zeros(4)
        self.register_buffer("table", table, persistent=persistent)
        self.full = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.full:
            self.table.copy_(torch.arange(4, dtype=x.dtype) / 3)
            self.full = True
        return x * self.weight + self.table


@pytest.mark.parametrize("persistent", [False, True])
def test_a_table_that_the_first_call_fills_stays(persistent: bool) -> None:
    net = Filling(persistent=persistent, filled=persistent)
    remember(net)
    call, x = undoing(net, net), torch.ones(2, 4)
    for _ in range(3):
        torch.testing.assert_close(call(x), 1 + torch.arange(4.0).expand(2, 4) / 3)
    assert net.full
    wide = fresh(net).double()
    assert not wide.full
    exact = torch.arange(4, dtype=torch.float64).expand(2, 4) / 3
    for _ in range(2):
        torch.testing.assert_close(undoing(wide, wide)(x.double()), 1 + exact, rtol=0, atol=1e-15)


def test_what_a_checkpoint_has_otherwise_is_not_filled() -> None:
    net = Filling(persistent=True, filled=False)
    remember(net)
    torch.testing.assert_close(undoing(net, net)(torch.zeros(1, 4))[0], torch.arange(4.0) / 3)
    assert not net.full
    assert not net.table.any()


class Renewing(nn.Module):
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.angles = torch.arange(x.shape[1]) / x.shape[2]
        return x * self.angles[:, None]


def test_what_code_keeps_in_a_buffer_before_it_reads_it_is_no_state() -> None:
    """As frequencies of positions, of another size each time."""
    forward, gradient = captured(Renewing())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(forward.exported.module()(x), Renewing()(x))
    found = gradient.exported.module()(x, x)["grad/x"]
    torch.testing.assert_close(found, x * (torch.arange(5) / 8)[:, None])


class Replacing(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.shape[1]
        return x * self.seen


def test_what_code_replaces_after_it_has_read_it_is_refused() -> None:
    with pytest.raises(ExportFailed, match="forward writes to seen"):
        captured(Replacing())
