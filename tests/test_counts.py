"""What model code decides by how many values are selected, and goes over one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.capture import counts
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.nothing = nn.Parameter(torch.ones(6))
"""

# What a model's forward is: of tokens `x`, each is sent to the two experts of the largest weights.
LOOP = """
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            {guard}
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out
"""

HIT = """
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for index in {hit}:
            place, rows = torch.where(mask[index].squeeze(0))
            sent = self.experts[index](x[None, rows].reshape(-1, 6))
            out.index_add_(0, rows, sent * weights[rows, place, None])
        return out
"""

SORTED = """
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        order = chosen.view(-1).argsort(stable=True)
        {counts}
        out, start = [], 0
        for i, count in enumerate(counts):
            if count == 0:
                continue
            out.append(self.experts[i](x[order[start : start + count] // 2]))
            start = start + count
        out = torch.zeros_like(torch.cat(out)).index_copy(0, order, torch.cat(out))
        return (out.view(-1, 2, 6) * weights[..., None]).sum(1)
"""

SPLIT = """
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=4)
        parts = x[order // 2].split(counts.tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        out = torch.zeros_like(out).index_copy(0, order, out)
        return (out.view(-1, 2, 6) * weights[..., None]).sum(1)
"""

DIFFERENT = """
    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index in {different}:
            sent = chosen == index
            out[sent] = self.experts[int(index)](x[sent])
        return out
"""

FORMS = {
    "numel": LOOP.replace("{guard}", "if rows.numel() == 0:\n                continue"),
    "len": LOOP.replace("{guard}", "if not len(rows):\n                continue"),
    "shape": LOOP.replace("{guard}", "if rows.shape[0] < 1:\n                continue"),
    "number": LOOP.replace("{guard}", "if not rows.numel():\n                continue"),
    "capacity": LOOP.replace(
        "{guard}",
        "if len(rows) > len(x) // 2 + 1:\n"
        "                rows, place = rows[: len(x) // 2 + 1], place[: len(x) // 2 + 1]",
    ),
    "hit": HIT.replace("{hit}", "hit"),
    "hit, listed": HIT.replace("{hit}", "hit[:, 0].flatten().tolist()"),
    "sorted": SORTED.replace(
        "{counts}",
        "counts = F.one_hot(chosen, num_classes=4).sum(dim=(0, 1)).tolist()",
    ),
    "sorted, numpy": SORTED.replace(
        "{counts}",
        "counts = F.one_hot(chosen, num_classes=4).sum(dim=(0, 1)).cpu().numpy()",
    ),
    "sorted, cumulated": SORTED.replace(
        "{counts}",
        "ends = chosen.view(-1).bincount().cpu().numpy().cumsum(0)\n"
        "        counts = [end - (ends[i - 1] if i else 0) for i, end in enumerate(ends)]",
    ),
    "different": DIFFERENT.replace("{different}", "torch.unique(chosen)"),
    "different, listed": DIFFERENT.replace("{different}", "chosen.unique().tolist()"),
    "split": SPLIT,
    "split, of any": SPLIT.replace("bincount(chosen.view(-1)", "bincount(chosen.view(-1) + 0"),
}

Saved = Callable[[str], tuple[nn.Module, Path, str]]


def exported(saved_net: Saved, forward: str, folder: Path, **options: Any) -> Any:
    """A model of such a forward, its bundle, and what --model is."""
    module, checkpoint, code = saved_net(SETUP + forward)
    inputs = parse_inputs(["x:[batch,6]"])
    return module, api.export(checkpoint, folder, model=code, inputs=inputs, **options), code


def notes(bundle: Any) -> list[str]:
    return [note for note in bundle.manifest["notes"] if "how many values are selected" in note]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_right_for_none_is_in_the_program(
    name: str, saved_net: Saved, tmp_path: Path
) -> None:
    module, bundle, _ = exported(
        saved_net, FORMS[name], tmp_path / "b", programs="forward", format=["onnx", "torchscript"]
    )
    said = notes(bundle)
    assert bool(said) == (name != "split")  # there are always four counts, of what argmax chooses
    sure = "artifacts fail" if name == "split, of any" else "which is right for both"
    assert all(sure in note for note in said)
    session = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
    scripted = torch.jit.load(bundle.folder / "forward.pt")
    with torch.no_grad():
        for count in (1, 2, 50):  # of one row, two experts get nothing
            x = torch.randn(count, 6)
            (found,) = session.run(None, {"x": x.numpy()})
            torch.testing.assert_close(torch.from_numpy(found), module(x))
            torch.testing.assert_close(scripted(x), module(x))


@pytest.mark.parametrize("name", ["hit", "sorted, numpy"])
def test_gradients_are_those_of_the_model(name: str, saved_net: Saved, tmp_path: Path) -> None:
    _, bundle, code = exported(saved_net, FORMS[name], tmp_path / "b")
    (output,) = bundle.manifest["programs"]["forward"]["outputs"]
    assert output["dims"] == ["batch", 6]
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


TAKEN = """
    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        first = weights.mean(0).topk(2)[1].detach().cpu().numpy()
        return x * weights[:, first].sum(-1, True) + self.nothing * (6 // (first + 1))[0]
"""


def test_numbers_of_numpy_are_indices(saved_net: Saved, tmp_path: Path) -> None:
    _, bundle, code = exported(saved_net, TAKEN, tmp_path / "b")
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


# As TimesNet's periods, but that a row of zeros more changes nothing.
PERIODS = """
    def forward(self, x):
        period = (6 // (self.gate(x).mean(0).topk(1)[1].cpu().numpy() + 1))[0]
        y = x
        if 6 % period != 0:
            y = F.pad(x, (0, (6 // period + 1) * period - 6))
        return y.reshape(x.shape[0], -1, period).cumsum(1).reshape(x.shape[0], -1)[:, :6]
"""


def test_a_decision_may_divide_by_a_value(saved_net: Saved, tmp_path: Path) -> None:
    _, bundle, code = exported(saved_net, PERIODS, tmp_path / "b", programs="forward")
    (said,) = notes(bundle)
    assert said.startswith("net.py:16 decides by how many values are selected: the way of True")
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


def test_of_two_sizes_that_hang_on_values_there_is_no_program(
    saved_net: Saved, tmp_path: Path
) -> None:
    """As TimesNet: by the first of these ways something else is computed than by the others."""
    forward = """
    def forward(self, x):
        first, out = self.gate(x).mean(0).topk(2)[1].cpu().numpy(), 0
        for period in 6 // (first + 1):
            y = x
            if 6 % period != 0:
                y = F.pad(x, (0, (6 // period + 1) * period - 6))
            out = out + y.reshape(x.shape[0], -1, period).flip(1).reshape(x.shape[0], -1)[:, :6]
        return out
"""
    said = r"a size that hangs on values, is decided by at net\.py:17, .* something else"
    with pytest.raises(ExportFailed, match=said):
        exported(saved_net, forward, tmp_path / "b", programs="forward")


def test_of_rows_of_several_selections_there_are_gradients(
    saved_net: Saved, tmp_path: Path
) -> None:
    """An output of as many rows as two masks select together, in a program that can be loaded."""
    forward = """
    def forward(self, x):
        return self.experts[0](torch.cat([x[x[:, 0] > 0], x[x[:, 1] > 0]]))
"""
    _, bundle, code = exported(saved_net, forward, tmp_path / "b", format="exported_program")
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


SELECTED = """
    def forward(self, x):
        selected = x[x[:, 0] > 0.5]
        {decision}
        return y.tanh() + x.mean(0)
"""


def test_both_ways_are_there_where_they_differ(saved_net: Saved, tmp_path: Path) -> None:
    decision = "y = self.nothing if len(selected) == 0 else self.experts[0](selected).mean(0)"
    forward = SELECTED.replace("{decision}", decision)
    _, bundle, code = exported(saved_net, forward, tmp_path / "b")
    assert notes(bundle) == [
        "net.py:15 decides by how many values are selected: both ways are in the programs"
    ]
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


def test_where_one_is_right_both_ways_the_other_is_found(saved_net: Saved, tmp_path: Path) -> None:
    """Experts that are skipped, right for none, beside what is another thing for none."""
    decision = "y = self.nothing if len(selected) == 0 else selected.mean(0)"
    experts = FORMS["numel"].replace("def forward", "def sent")
    selected = SELECTED.replace("{decision}", decision).replace("x.mean(0)", "self.sent(x).mean(0)")
    forward = experts + selected
    _, bundle, _ = exported(saved_net, forward, tmp_path / "b", programs="forward", format="onnx")
    said = sorted(note.partition(": ")[2] for note in notes(bundle))
    assert said == [
        "both ways are in the programs",
        "the way of False is in the programs, which is right for both",
    ]


def test_a_number_of_a_tensor_is_decided_by_as_a_value(saved_net: Saved, tmp_path: Path) -> None:
    decision = "y = self.nothing if (x > 9).sum().item() > 40 else self.experts[0](x).mean(0)"
    forward = SELECTED.replace("{decision}", decision)
    _, bundle, _ = exported(saved_net, forward, tmp_path / "b", programs="forward", format="onnx")
    assert notes(bundle) == []
    assert "net.py:15 decides by a value: both ways are in the programs" in bundle.manifest["notes"]


def test_of_more_such_decisions_there_is_no_program(saved_net: Saved, tmp_path: Path) -> None:
    forward = """
    def forward(self, x):
        y = []
        for column in range(2):
            selected = x[x[:, column] > 0.5]
            y.append(selected.mean(0) if len(selected) else self.nothing)
        return torch.stack(y)
"""
    with pytest.raises(ExportFailed, match=r"decided by at net\.py:17, .* something else"):
        exported(saved_net, forward, tmp_path / "b")


def test_artifacts_fail_where_nothing_was_tried(saved_net: Saved, tmp_path: Path) -> None:
    decision = "y = selected.mean(0) if selected.shape[0] >= 1.5 * 41 else selected.sum(0)"
    forward = SELECTED.replace("{decision}", decision)
    module, bundle, _ = exported(
        saved_net, forward, tmp_path / "b", programs="forward", format=["onnx", "torchscript"]
    )
    (note,) = notes(bundle)
    assert "the way of False is in the programs, artifacts fail" in note
    session = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
    scripted = torch.jit.load(bundle.folder / "forward.pt")
    few, many = torch.ones(61, 6), torch.ones(62, 6)
    with torch.no_grad():
        (found,) = session.run(None, {"x": few.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), module(few))
        torch.testing.assert_close(scripted(few), module(few))
        with pytest.raises(Exception, match=r"holds only where net\.py:15 comes to False"):
            session.run(None, {"x": many.numpy()})
        with pytest.raises(torch.jit.Error, match=r"holds only where net\.py:15 comes to False"):
            scripted(many)


PADDED = """
    def forward(self, x):
        padding = -x.shape[0] % 4
        if padding > 0:
            x = F.pad(x, (0, 0, 0, padding))
        x = x.view(-1, 4, 6).sum(1)
        some = x[x > 0]
        if some.numel() > 0:
            x = x / some.mean()
        return x
"""


def test_sizes_that_a_program_is_not_for_say_nothing_of_decisions(
    saved_net: Saved, tmp_path: Path
) -> None:
    made = {"sizes": {"batch": 8}, "format": ["onnx"]}
    _, bundle, _ = exported(saved_net, PADDED, tmp_path / "b", **made)
    assert "the way of True is in the programs" in notes(bundle)[0]
    assert bundle.manifest["programs"]["forward"]["conditions"] == ["batch is a multiple of 4"]


def test_the_way_without_an_error_is_gone(saved_net: Saved, tmp_path: Path) -> None:
    """`assert` on counts, and decisions by values beside those by counts."""
    forward = """
    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out, seen = torch.zeros_like(x), 0
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            seen += rows.numel()
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]))
        assert seen == x.shape[0], "a row went nowhere"
        if out.max() > 0.5:
            out = out.tanh()
        return out
"""
    _, bundle, code = exported(saved_net, forward, tmp_path / "b", format=["onnx", "torchscript"])
    first, second = notes(bundle)
    assert "net.py:19 " in first
    assert "which is right for both" in first
    assert "net.py:21 " in second
    assert "the way of True is in the programs, artifacts fail" in second
    assert any("net.py:22 decides by a value: both ways" in n for n in bundle.manifest["notes"])
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


def test_all_of_a_mask_is_tried_too(saved_net: Saved, tmp_path: Path) -> None:
    """Code for a mask that leaves nothing out, which small inputs have."""
    forward = """
    def forward(self, x):
        kept = x[:, 0] > 0
        rows = x[kept]
        if rows.shape[0] == kept.numel():
            return self.experts[0](x).tanh()
        out = torch.zeros_like(x)
        out[kept] = self.experts[0](rows).tanh()
        return out
"""
    _, bundle, _ = exported(saved_net, forward, tmp_path / "b", programs="forward", format="onnx")
    (note,) = notes(bundle)
    assert "the way of False is in the programs, which is right for both" in note


def test_what_is_written_over_is_not_what_was_chosen(saved_net: Saved, tmp_path: Path) -> None:
    """Indices below four, and three more: nothing is known of how many there could be."""
    forward = """
    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        chosen += 3
        return torch.stack([x.sum() * index for index in chosen.unique()]).sum()
"""
    with pytest.raises(ExportFailed, match="a size or a decision hangs on the values"):
        exported(saved_net, forward, tmp_path / "b", programs="forward")
    # Of those that were chosen alone there is no sum over all that could be.
    known = forward.replace("chosen += 3", "chosen = chosen.view(-1)")
    with pytest.raises(ExportFailed, match=r"net\.py:16, .* computes something else"):
        exported(saved_net, known, tmp_path / "b", programs="forward")


DOUBLING = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("length", torch.tensor(1))

    def forward(self, x):
        while x.shape[1] > self.length.item():
            self.length.mul_(2)
        return self.linear(x) / self.length
"""

_DECIDED = "x.shape[1] > self.length.item()"
IN_TURNS = (
    DOUBLING.replace(
        f"{_DECIDED}:", f"{_DECIDED}:\n            if self.is_one(x[x > 0]):\n                break"
    )
    + """
    def is_one(self, x):
        return bool(x.numel() == 1)
"""
)
IN_A_CALL = (
    DOUBLING.replace(_DECIDED, "self.is_short(x)")
    + """
    def is_short(self, x):
        return bool(x.shape[1] > self.length.item())
"""
)


@pytest.mark.parametrize(
    ("code", "line"),
    [(DOUBLING, 11), (IN_TURNS, 11), (IN_A_CALL, 16)],
    ids=["", "in turns", "in a call"],
)
def test_a_loop_without_an_end_in_a_capture_is_refused(
    code: str,
    line: int,
    saved_net: Callable[[str], tuple[nn.Module, Path, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As S4's kernels, which double their length until it suffices."""
    said: list[str] = []

    def refused(message: str) -> ExportFailed:
        said.append(message)
        return ExportFailed(message)

    monkeypatch.setattr(counts, "_MOST_TURNS", 20)
    monkeypatch.setattr(counts, "ExportFailed", refused)
    _, checkpoint, model = saved_net(code)
    specs = parse_inputs(["x:[batch,length,3]"])
    with pytest.raises(ExportFailed, match="forward writes to length"):
        api.export(checkpoint, tmp_path / "bundle", model=model, inputs=specs)
    assert any(f"net.py:{line} decides by" in each and "again and again" in each for each in said)
