"""What a model takes in Python's containers: inputs are named after the way to them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.arguments import given_of
from fuseport.exporter.errors import ExportFailed, UsageError
from fuseport.exporter.models._forward import Fields, ordered
from fuseport.exporter.models.given import flat, parse_dynamic
from fuseport.exporter.models.user import parse_inputs

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 3)
        self.example_input_array = (
            {"x": torch.ones(2, 5, 4), "mask": torch.ones(2, 5, dtype=torch.bool)},
            (torch.ones(2, 3), {"up": torch.ones(2, 3)}),
        )

    def forward(self, batch, pair, scale=2.0):
        first, more = pair
        h = torch.tanh(self.a(batch["x"])) * batch.mask[..., None]
        return {"sums": h.sum(1) * scale + first - more["up"], "kinds": sorted(batch)}
"""
TEXT = "batch.x:[batch,length,4],batch.mask:bool[batch,length],pair.0:[batch,3],pair.1.up:[batch,3]"
NAMES = ["batch.x", "batch.mask", "pair.0", "pair.1.up"]


def test_every_tensor_in_it_is_an_input_in_every_runtime(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(NET, a=nn.Linear(4, 3))
    folder = api.export(checkpoint, tmp_path / "b", model=model, inputs=[TEXT]).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [spec["name"] for spec in manifest["programs"]["forward"]["inputs"]] == NAMES
    report = api.verify(folder, model=model)
    assert report.exit_code() == 0, report.failures()
    compared = {(row.runtime, row.tensor) for row in report.results if row.verdict == "pass"}
    wanted = ["sums", "grad/batch.x", "grad/pair.0", "grad/pair.1.up", "grad/a.weight"]
    for runtime in {runtime for runtime, _ in compared} - {"float64"}:
        assert {(runtime, name) for name in wanted} <= compared
    session = onnxruntime.InferenceSession(folder / "forward.onnx")
    assert [value.name for value in session.get_inputs()] == NAMES
    # As TorchScript's and torch.export's arguments, by position or by names that Python has.
    given = (
        torch.randn(1, 2, 4),
        torch.ones(1, 2).bool(),
        torch.randn(1, 3),
        torch.randn(1, 3),
    )
    [expected] = session.run(None, dict(zip(NAMES, (t.numpy() for t in given), strict=True)))
    scripted = torch.jit.load(folder / "forward.pt")
    for found in (
        scripted(*given),
        scripted(batch_x=given[0], batch_mask=given[1], pair_0=given[2], pair_1_up=given[3]),
    ):
        torch.testing.assert_close(found, torch.from_numpy(expected))


@pytest.mark.parametrize("how", ["of Python", "of a file", "the module's own"])
def test_examples_may_be_nested(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]], how: str
) -> None:
    checkpoint, model = saved_with(NET, a=nn.Linear(4, 3))
    mask = torch.ones(2, 5, dtype=torch.bool)
    batch = {"x": torch.randn(2, 5, 4), "mask": mask}
    given: Any = {"batch": batch, "pair": [torch.randn(2, 3), {"up": torch.randn(2, 3)}]}
    if how == "of a file":
        given = tmp_path / "given.safetensors"
        api.save_file(given_of({"batch": batch}).values, given)  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="pair is missing"):
            api.export(checkpoint, tmp_path / "b", model=model, given=given, format="onnx")
        names = {"pair.0": torch.randn(2, 3), "pair.1.up": torch.randn(2, 3)}
        api.save_file({**given_of({"batch": batch}).values, **names}, given)  # type: ignore[union-attr]
    if how == "the module's own":
        given = None
    bundle = api.export(
        checkpoint,
        tmp_path / "b",
        model=model,
        given=given,
        dynamic="batch.x:{0:b,1:l},batch.mask:{0:b,1:l},pair.0:{0:b},pair.1.up:{0:b}"
        if given is not None
        else None,
        format="onnx",
        programs=["forward"],
    )
    inputs = bundle.manifest["programs"]["forward"]["inputs"]
    assert [spec["name"] for spec in inputs] == (NAMES if given is None else sorted(NAMES))
    free = "batch" if given is None else "b"
    assert [spec["dims"][0] for spec in inputs] == [free] * 4


def test_a_tensor_in_the_place_of_a_mapping_is_told(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 3)
    def forward(self, batch):
        return self.a(batch["x"])
"""
    checkpoint, model = saved_with(code, a=nn.Linear(4, 3))
    with pytest.raises(UsageError, match=r"Its forward takes batch\. Give .*'batch\.KEY:\["):
        api.export(checkpoint, tmp_path / "b", model=model)
    inputs = parse_inputs(["x:[batch,4]"])
    with pytest.raises(ExportFailed, match=r"if that is a mapping, .* batch\.x:\["):
        api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)


class Takes(nn.Module):
    """Gives what its forward was called with."""

    def forward(self, data: Any, *, extra: Any = None) -> Any:
        return data, extra


class TakesAny(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def called(module: nn.Module, *names: str) -> Any:
    specs = ordered(module, parse_inputs([f"{name}:[1]" for name in names]), "")
    return module(*(spec.name for spec in specs))


def test_containers_are_what_names_say() -> None:
    data, extra = called(Takes(), "extra.b.c", "data.x", "extra.a")
    assert data == {"x": "data.x"}
    assert data.x == data["x"]
    assert extra == {"b": {"c": "extra.b.c"}, "a": "extra.a"}
    assert extra.b.c == "extra.b.c"
    with pytest.raises(AttributeError, match="other"):
        _ = extra.other
    # More than nine, in any order.
    places = [f"data.{place}" for place in (10, *range(10))]
    assert called(Takes(), *places)[0] == tuple(f"data.{place}" for place in range(11))
    # One that is alone may be called as one likes; what takes all takes it in this order.
    assert called(Takes(), "batch.x", "batch.y")[0] == {"x": "batch.x", "y": "batch.y"}
    assert called(TakesAny(), "a.x", "b") == (({"x": "a.x"}, "b"), {})
    assert isinstance(called(TakesAny(), "a.x", "b")[0][0], Fields)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["data", "data.x"], "data is a tensor, and data.x leads into it"),
        (["data.x", "data"], "data is a tensor, and others lead into it"),
        (["data.x.y", "data.x"], "data.x is a tensor, and others lead into it"),
        (["data.0", "data.2"], "data has 0, 2: give all, from data.0 on"),
        (["x", "mask"], "if data is a mapping that has these, name them data.x, data.mask"),
        (["other.x", "more.x"], "name them data.other.x, data.more.x"),
    ],
)
def test_names_that_lead_nowhere_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        called(Takes(), *names)
    assert said in str(caught.value)


def test_names_are_of_mappings_and_sequences_alone() -> None:
    x = torch.ones(1)
    assert flat({"a": x}) == {"a": x}
    assert flat({"a": {"b": [x, (x,)], 3: x}}) == {"a.b.0": x, "a.b.1.0": x, "a.3": x}
    assert parse_dynamic(["a.b.0:{0:n}"]) == {"a.b.0": {0: "n"}}
    for text in ("a.:[1]", ".a:[1]", "a..b:[1]", "class.a:[1]", "self.a:[1]"):
        with pytest.raises(UsageError, match="--input-shapes"):
            parse_inputs([text])
    value: dict[str, Tensor] = {"b": x}
    with pytest.raises(UsageError, match=r"given: a\.c is a str, which is no tensor"):
        given_of({"a": {**value, "c": "text"}})  # type: ignore[dict-item]
