"""Wrong files of torch's formats, of the catalogue of planted bugs: it is found where they are."""

import json
from pathlib import Path

import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.mutants.files import Asked, maker
from fuseport.exporter.verify.plan import Job
from fuseport.tests.test_localise import looked_into

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4) + 2)
        self.decay = nn.Parameter(torch.rand(4))

    def forward(self, x):
        state, every = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(state * self.decay + x[:, t])
            every.append(state)
        y = self.a(x).sigmoid() * self.scale
        return {"state": state.sin(), "y": y.cumsum(1), "z": torch.stack(every, 1)}
"""
SUFFIXES = {"exported_program": ".pt2", "torchscript": ".pt"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "net.py").write_text(CODE)
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(CODE, namespace)
    torch.manual_seed(0)
    torch.save(namespace["Net"]().state_dict(), folder / "net.pth")
    return api.export(
        folder / "net.pth",
        folder / "bundle",
        model=f"{folder / 'net.py'}:Net",
        inputs=parse_inputs(["x:[batch,length,4]"]),
        format=tuple(SUFFIXES),
    ).folder


@pytest.mark.parametrize(
    ("kind", "place", "tensor", "op"),
    [
        ("output's sign", "state", "state", "aten::sin"),
        ("output off by 0.1 %", "y", "y", "aten::cumsum"),
        ("file: missing factor", "mul.Tensor to mul", "y", ""),
        ("weight off by 1 %", "decay", "z", "scan"),
        ("output dropped", "y", "y", None),
    ],
)
@pytest.mark.parametrize("format_name", list(SUFFIXES))
def test_what_a_file_gives_is_held_against_what_its_values_are(
    format_name: str,
    kind: str,
    place: str,
    tensor: str,
    op: str | None,
    bundle: Path,
    tmp_path: Path,
) -> None:
    file = bundle / f"forward{SUFFIXES[format_name]}"
    manifest = open_bundle(bundle).manifest
    program = {**manifest["programs"]["forward"], "kind": "forward"}
    sizes = json.loads((bundle / "samples" / "samples.json").read_text())[0]["case"]["sizes"]
    asked = Asked(file, bundle / "forward.pt2", program, sizes, seed=0, count=100)
    made = [m for m in maker(format_name)(asked) if m.kind == kind]
    [wrong] = [m for m in made if m.place.startswith(place)][:1]
    edited = tmp_path / f"edited{SUFFIXES[format_name]}"
    wrong.write(edited)
    job = Job(format_name, edited, "forward", "run", "export")
    given = {"model": f"{bundle.parent / 'net.py'}:Net"}
    diagnosis = looked_into(bundle, given, job, [tensor], tmp_path)
    assert diagnosis.cause == "export", diagnosis.reason
    if op is None:
        assert diagnosis.divergence is None
        assert f"it gives no {tensor}" in diagnosis.reason
        return
    assert diagnosis.divergence is not None, diagnosis.reason
    assert diagnosis.method == "intermediates"  # of the file itself
    assert diagnosis.divergence.alone == "wrong here"
    assert not op or diagnosis.divergence.op == op


def test_what_a_file_takes_from_elsewhere_is_given_to_its_part(
    bundle: Path, tmp_path: Path
) -> None:
    exported = torch.export.load(bundle / "forward.pt2")
    [given] = exported.graph_signature.user_inputs
    nodes = {node.name: node for node in exported.graph.nodes}
    [sums] = [node for node in nodes.values() if node.target is torch.ops.aten.cumsum.default]
    sums.replace_input_with(sums.all_input_nodes[0], nodes[str(given)])
    torch.export.save(exported, tmp_path / "edited.pt2")
    job = Job("exported_program", tmp_path / "edited.pt2", "forward", "run", "export")
    found = looked_into(bundle, {"model": f"{bundle.parent / 'net.py'}:Net"}, job, ["y"], tmp_path)
    assert found.divergence is not None, found.reason
    assert (found.divergence.op, found.divergence.alone) == ("aten::cumsum", "wrong here")
