"""Example inputs: given as tensors, their dynamic dimensions named or found, and half precision."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fuseport.cli import main
from fuseport.exporter import api, checkpoint, models, runtimes, user_code
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.capture.dynamic import found_dynamic
from fuseport.exporter.capture.prepare import prepared
from fuseport.exporter.errors import UsageError
from fuseport.exporter.models.given import Dynamic, Given, fitted, parse_dynamic, specs_of
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.sample import read_all

FIXTURES = Path(__file__).parent.parent / "fixtures"

NET = """
import torch
from torch import nn
from fuseport.ops.selective_scan import selective_scan

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.A_log = nn.Parameter(torch.zeros(8, 4))
        self.inner.D = nn.Parameter(torch.ones(8))
        self.inner.x_proj = nn.Linear(8, 16)

    def forward(self, x, scale=None):
        delta, B, C = self.inner.x_proj(x).split([8, 4, 4], -1)
        u, delta, B, C = (t.mT for t in (x, delta, B, C))
        A = -torch.exp(self.inner.A_log.float())
        y = selective_scan(u, delta, A, B, C, self.inner.D.float(), delta_softplus=True).mT
        return y if scale is None else y * scale
"""


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file, its checkpoint, and inputs of each kind."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "scan_net.py").write_text(NET)
    generator = torch.Generator().manual_seed(0)
    state = {
        "inner.A_log": torch.rand(8, 4, generator=generator),
        "inner.D": torch.ones(8),
        "inner.x_proj.weight": torch.randn(16, 8, generator=generator) / 4,
        "inner.x_proj.bias": torch.zeros(16),
    }
    torch.save(state, folder / "w.pth")
    x = torch.randn(2, 10, 8, generator=generator)
    save_file({"x": x}, folder / "x.safetensors")
    save_file({"scale": x}, folder / "second.safetensors")
    save_file({"x": x.to(torch.int8)}, folder / "int8.safetensors")
    (folder / "text.safetensors").write_text("no tensors here")
    return folder


def export(project: Path, output: Path, *words: str) -> tuple[int, list[str]]:
    given = ["export", str(project / "w.pth"), "-o", str(output), "--program", "forward"]
    given += ["--model", f"{project / 'scan_net.py'}:Net", "--format", "exported_program"]
    done = CliRunner().invoke(main, [*given, *words])
    return done.exit_code, done.stdout.splitlines() + [
        line for line in done.stderr.splitlines() if not re.match(r" *\d+\.\d s ", line)
    ]


def test_given_inputs_are_compared_on_and_their_dynamic_dimensions_found(
    project: Path, tmp_path: Path
) -> None:
    code, lines = export(project, tmp_path / "b", "--inputs", str(project / "x.safetensors"))
    assert code == 0, lines
    bundle = open_bundle(tmp_path / "b")
    [spec] = bundle.manifest["programs"]["forward"]["inputs"]
    assert spec["dims"] == ["batch", "x_1", 8]
    assert any("0 (batch), 1 (x_1)" in line and "2 (at 8)" in line for line in lines), lines
    samples = {sample.case.name: sample for sample in read_all(bundle.folder / "samples")}
    assert dict(samples["export"].case.sizes) == {"batch": 2, "x_1": 10}
    stored = load_file(samples["as given"].file)["input/x"]
    assert torch.equal(stored, load_file(project / "x.safetensors")["x"])
    report = api.verify(
        bundle.folder, runtime=["exported_program"], model=f"{project / 'scan_net.py'}:Net"
    )
    assert report.exit_code() == 0, report.failures()
    assert "as given" in {row.case for row in report.results}


def test_half_precision_keeps_what_the_scan_wants_in_float32(project: Path, tmp_path: Path) -> None:
    words = ["--inputs", str(project / "x.safetensors"), "--dtype", "bfloat16"]
    code, lines = export(project, tmp_path / "b", *words, "--dynamic", "x:{0:batch}")
    assert code == 0, lines
    assert any("2 parameters stay float32 in bfloat16" in line for line in lines), lines
    dtypes = {n: t.dtype for n, t in load_file(tmp_path / "b" / "weights.safetensors").items()}
    assert {n for n, dtype in dtypes.items() if dtype == torch.float32} == {
        "inner.A_log",
        "inner.D",
    }
    [spec] = open_bundle(tmp_path / "b").manifest["programs"]["forward"]["inputs"]
    assert (spec["dtype"], spec["dims"]) == ("bfloat16", ["batch", 10, 8])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--inputs", "no.safetensors"], 2, "there is no such file"),
        (["--inputs", "x:[b,4,8]"], 2, "shapes are --input-shapes 'x:[b,4,8]'"),
        (["--inputs", "text.safetensors"], 4, "text.safetensors"),
        (
            ["--inputs", "second.safetensors"],
            2,
            "scale given, and the model's forward takes x, scale",
        ),
        (["--input-shapes", "scale:[b,8]"], 2, "x, scale (optional): x is missing"),
        (["--input-shapes", "x:[b,4,8]", "--input-shapes", "scal:[b,4,8]"], 2, "scal is none of"),
        (["--inputs", "int8.safetensors"], 2, "x is int8"),
        (["--inputs", "x.safetensors", "--dynamic", "x:[0]"], 2, "x:{0:batch,1:length}"),
        (["--inputs", "x.safetensors", "--dynamic", "z:{0:b}"], 2, "it is not an input"),
        (["--inputs", "x.safetensors", "--dynamic", "x:{3:b}"], 2, "it has 3 dimensions"),
        (["--inputs", "x.safetensors", "--dynamic", "x:{0:b,1:b}"], 2, "is 10, not 2"),
        (["--inputs", "x.safetensors", "--dynamic", "x:{2:w}"], 8, "dimension 2 of input x"),
        (["--inputs", "x.safetensors", "--input-shapes", "x:[b,4,8]"], 2, "leave --inputs"),
        ([], 2, "--inputs"),
    ],
)
def test_inputs_that_do_not_fit_are_one_line(
    words: list[str], code: int, message: str, project: Path, tmp_path: Path
) -> None:
    given = [str(project / word) if word.endswith(".safetensors") else word for word in words]
    found, lines = export(project, tmp_path / "b", *given)
    assert found == code, lines
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "b").exists()


def test_a_built_in_architecture_takes_given_inputs() -> None:
    loaded = checkpoint.load(FIXTURES / "lightning" / "mamba-kjv.ckpt")
    model, _ = models.from_checkpoint(loaded)

    def ready(ids: Tensor, dynamic: Dynamic | None = None) -> models.Model:
        given = Given("ids", {"input_ids": ids})
        return prepared(model, given, dynamic, None, None, 0, lambda message: None)[0]

    with pytest.raises(UsageError, match="input_ids has values outside of 0 to"):
        ready(torch.full((1, 3), 10**6))
    with pytest.raises(UsageError, match="has its own"):
        ready(torch.zeros(1, 3, dtype=torch.int64), {"input_ids": {0: "b"}})
    found = ready(torch.tensor([[1, 2, 3, 4, 5]]))
    assert found.given is not None
    assert found.given["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert sorted(found.sizes.values()) == [1, 5]
    assert found.inputs == model.inputs


class Loss(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x, labels)


@pytest.mark.parametrize("label", [-100, -1, 0, 1, 2])
def test_integers_have_the_bounds_of_those_that_are_given(label: int) -> None:
    """Below 0, too: labels that a loss leaves out are -100."""
    given = Given("here", {"x": torch.randn(3, 5), "labels": torch.tensor([3, label, 4])})
    specs = specs_of(given, Loss())
    assert (specs[1].low, specs[1].high) == (min(label, 1), 5)
    model = fitted(models.Model(Loss(), "own", {}, specs, {}), given)
    assert model.given is not None
    assert model.given["labels"].tolist() == [3, label, 4]
    below = Given("here", {**given.values, "labels": torch.tensor([3, -101, 4])})
    with pytest.raises(UsageError, match=f"labels has values outside of {min(label, 1)} to 4"):
        fitted(model, below)


class Tied(nn.Module):
    """Two inputs whose first dimensions must be equal; the mask's second is that of x."""

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return (x * mask.unsqueeze(-1)).flatten(1, 2) + bias


def test_dimensions_that_torch_takes_for_equal_have_one_name() -> None:
    values = {"x": torch.randn(3, 5, 4), "mask": torch.rand(3, 5), "bias": torch.rand(1, 1)}
    specs = specs_of(Given("here", values), Tied())
    found, notes = found_dynamic(Tied(), values, specs)
    assert [spec.dims for spec in found] == [("x_0", "x_1", "x_2"), ("x_0", "x_1"), (1, 1)]
    assert "fixed since they are 1 in the example: 0, 1" in notes[2]


def test_dimensions_are_parsed_or_refused() -> None:
    assert parse_dynamic(["x:{0:batch, 1:length}", "y:{}"]) == {
        "x": {0: "batch", 1: "length"},
        "y": {},
    }


SUMS = """
from torch import nn

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x, by=None, *, plus=None, **other):
        y = self.first(x)
        y = y if by is None else y * by
        y = y if plus is None else y + plus
        return y - other["minus"] if other else y
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose forward takes arguments of each kind, and its checkpoint."""
    folder = tmp_path_factory.mktemp("sums")
    (folder / "sums_net.py").write_text(SUMS)
    torch.save(nn.Linear(3, 3).state_dict(prefix="first."), folder / "w.pth")
    return folder


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["z"], ["z"]),
        (["by", "x"], ["x", "by"]),
        (["plus", "x"], ["x", "plus"]),
        (["minus", "plus", "by", "x"], ["x", "by", "plus", "minus"]),
    ],
    ids=" ".join,
)
def test_inputs_go_by_name(names: list[str], order: list[str], sums: Path, tmp_path: Path) -> None:
    module = user_code.imported("--model", str(sums / "sums_net.py")).Sums()
    module.load_state_dict(torch.load(sums / "w.pth"))
    values = {name: torch.full((2, 3), 2.0 + i) for i, name in enumerate(order)}
    expected = module(**{"x" if name == "z" else name: t for name, t in values.items()})
    code = f"{sums / 'sums_net.py'}:Sums"
    given = parse_inputs([f"{name}:[b,3]" for name in names])
    words = {"model": code, "inputs": given, "format": ["exported_program", "onnx"]}
    bundle = api.export(sums / "w.pth", tmp_path / "b", **words)
    inputs = bundle.manifest["programs"]["forward"]["inputs"]
    assert [spec["name"] for spec in inputs] == order
    for name in ("exported_program", "onnxruntime"):
        [file] = bundle.folder.glob("forward.pt2" if name == "exported_program" else "forward.onnx")
        found = runtimes.get(name).load(file, bundle.manifest["programs"]["forward"]).run(values)
        torch.testing.assert_close(found["output"], expected)
    report = api.verify(bundle.folder, runtime=["eager", "onnxruntime"], model=code)
    assert report.exit_code() == 0, report.failures()


def test_of_nan_in_given_inputs_there_is_a_note(sums: Path, tmp_path: Path) -> None:
    x = torch.tensor([[1.0, math.nan, 2.0], [3.0, 4.0, math.inf]])
    code, wanted = f"{sums / 'sums_net.py'}:Sums", "torchscript"
    bundle = api.export(sums / "w.pth", tmp_path / "b", model=code, given={"x": x}, format=wanted)
    [note] = [note for note in bundle.manifest["notes"] if "NaN" in note]
    assert note.startswith("x of given has 1 NaN")
    report = api.verify(bundle.folder, runtime="torchscript", model=code)
    found = {r.tensor: r.verdict for r in report.results if r.case == "as given"}
    assert found["output"] == "unsupported"
    assert found["grad/first.weight"] == "pass"  # a column of it is numbers


def test_integers_have_the_bounds_of_the_example_but_0_is_left_out_at_most() -> None:
    class Net(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids

    for values, bounds in (([3, 1, 4], (5, 1)), ([3, 0, 4], (5, 0)), ([7, 7, 7], (8, 1))):
        (spec,) = specs_of(Given("given", {"ids": torch.tensor(values)}), Net())
        assert (spec.high, spec.low) == bounds


TABLE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Embedding(5, 2)

    def forward(self, x, i):
        return x * self.a(i)[:, :1]
"""


def test_a_bound_that_is_too_high_is_blamed_where_the_model_refuses_a_case(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(TABLE, a=nn.Embedding(5, 2))
    inputs = parse_inputs(["x:[batch,length],i:int64[batch]<6"])
    options: dict[str, Any] = {"model": model, "inputs": inputs, "format": ["torchscript"]}
    bundle = api.export(checkpoint, tmp_path / "b", seed=3, **options)
    found = [note for note in bundle.manifest["notes"] if note.startswith("not compared")]
    assert found
    for note in found:
        assert "the model itself refuses batch " in note
        assert "IndexError" in note
        assert "; with i 0 it runs: bounds may be too high" in note


MERGED = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Embedding(8, 3)

    def forward(self, ids, picture):
        place = ids == 7
        torch._check(place.sum().item() == picture.shape[0])
        h = self.a(ids)
        return h.masked_scatter(place[..., None].expand_as(h), picture) * 2
"""


def test_where_random_integers_are_refused_those_that_are_given_go_on(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(MERGED, a=nn.Embedding(8, 3))
    ids = torch.tensor([[5, 7, 7, 1, 2, 3]])
    generator = torch.Generator().manual_seed(0)
    given = {"ids": ids, "picture": torch.randn(2, 3, generator=generator)}
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        given=given,
        dynamic="ids:{1:length}",
        format="onnx",
    )
    samples = {s.case.name: s for s in read_all(bundle.folder / "samples")}
    longer = samples["past a chunk, sliced"]
    assert longer.refused is None
    length = longer.case.sizes["length"]
    stored = load_file(longer.file)
    taken, picture = stored["input/ids"], stored["input/picture"]
    assert torch.equal(taken[:, :6], ids)
    assert torch.equal(taken[:, 6:], torch.full((1, length - 6), 3))
    assert not torch.equal(picture, given["picture"])
    shorter = samples["every dimension 1"]
    assert shorter.refused is not None
    report = api.verify(bundle.folder, model=model, runtime="onnxruntime", seeds=2)
    assert report.exit_code() == 0, report.failures()
    of_seed = {row.case for row in report.results if row.verdict == "pass"}
    assert "past a chunk, sliced, seed 1" in of_seed
