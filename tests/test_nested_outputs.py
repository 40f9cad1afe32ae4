"""What a model returns in Python's containers: every tensor of it is exported and compared."""

import json
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import register_pytree_node

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import argument_names, left_out, named_outputs

NET = """
from dataclasses import dataclass
import torch

@dataclass
class Found:
    hidden: torch.Tensor
    parts: tuple
    kind: str

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        pooled = {"mean": h.mean(-1), "of two": [h[:, :2], h[:, 2:].argmax(-1)], "none": None}
        return Found(h, (h.sum(-1), pooled), "tanh")
"""
NAMES = ["hidden", "parts.0", "parts.1.mean", "parts.1.of two.0", "parts.1.of two.1"]


def test_every_tensor_in_it_is_exported_and_compared_in_every_runtime(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(NET, a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    manifest = json.loads((bundle.folder / "manifest.json").read_text())
    outputs = [spec["name"] for spec in manifest["programs"]["forward"]["outputs"]]
    assert outputs == NAMES
    (note,) = (note for note in manifest["notes"] if "no tensors" in note)
    assert note == "forward: not among the outputs, since no tensors: kind (str)"
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    compared = {(row.runtime, row.tensor) for row in report.results if row.verdict == "pass"}
    for runtime in {runtime for runtime, _ in compared} - {"float64"}:
        assert {(runtime, name) for name in [*NAMES, "grad/a.weight"]} <= compared


@dataclass
class Pair:
    first: object
    second: object


Named = namedtuple("Named", "one other")


def test_names_are_the_way_to_a_tensor() -> None:
    x = torch.ones(2)
    assert list(named_outputs({"a": x, "b": {"c": x, "d": (x, [x])}})) == [
        "a",
        "b.c",
        "b.d.0",
        "b.d.1.0",
    ]
    assert list(named_outputs(Pair(x, Named(x, 3)))) == ["first", "second.one"]
    assert list(named_outputs(Named({1: x}, None))) == ["one.1"]
    # Without a name at the top, they are counted.
    assert list(named_outputs((x, {"a": x}))) == ["output_0", "output_1"]
    with pytest.raises(ExportFailed, match=r"a\.b, a\.b two are one"):
        named_outputs({"a.b": x, "a": {"b": x}})


def test_what_is_no_tensor_is_told() -> None:
    x = torch.ones(2)
    assert left_out({"a": x, "b": None, "c": [x, None]}) == []
    assert left_out((x, 1.5, {"n": "y"})) == ["1 (float)", "2.n (str)"]
    assert left_out(Pair(x, object())) == ["second (object)"]


class Held:
    """What torch takes apart, since it is told how to."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values


register_pytree_node(Held, lambda held: (held.values, None), lambda values, _: Held([*values]))


def test_what_torch_takes_apart_is_not_left_out() -> None:
    result = torch.ones(1), Held([torch.zeros(2)])
    assert list(named_outputs(result)) == ["output_0", "output_1"]
    assert left_out(result) == []
    assert left_out({"a": result[0], "b": result[1]}) == ["b (Held)"]


def test_arguments_have_names_that_a_language_has() -> None:
    names = ["x", "a.b", "a b", "a_b", "1st", "é"]
    assert argument_names(names) == ["x", "a_b", "a_b_2", "a_b_3", "_1st", "_"]
