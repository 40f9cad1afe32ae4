"""Models that return what they were given, nothing, or what they cannot."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed, Missing, UsageError

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.n = nn.Embedding(7, 4), nn.BatchNorm1d(4)

    def forward(self, ids, x, mask):
        return {
            "h": self.n(self.e(ids) + x), "ids": ids, "mask": mask, "x": x,
            "same": x.contiguous(), "again": x.to(x.dtype), "cut": x.detach(),
        }

class Nothing(Net):
    def forward(self, ids, x, mask):
        return None
"""
INPUTS = ["ids:int64[b]<7", "x:[b,4]", "mask:bool[b]"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("through")
    (folder / "through_net.py").write_text(CODE)
    torch.manual_seed(0)
    state = {
        **nn.Embedding(7, 4).state_dict(prefix="e."),
        **nn.BatchNorm1d(4).state_dict(prefix="n."),
    }
    torch.save(state, folder / "w.pth")
    del state["n.num_batches_tracked"]  # as others' conversions have it
    torch.save(state, folder / "uncounted.pth")
    return folder


def test_inputs_that_are_outputs_too_are_both(project: Path, tmp_path: Path) -> None:
    code = f"{project / 'through_net.py'}:Net"
    bundle = api.export(project / "uncounted.pth", tmp_path / "b", model=code, inputs=INPUTS)
    outputs = [spec["name"] for spec in bundle.manifest["programs"]["forward"]["outputs"]]
    # Of a name that an input has, too, there can be no other value in ONNX.
    assert outputs == ["h", "output_ids", "output_mask", "output_x", "same", "again", "cut"]
    graph = onnx.load(bundle.folder / "forward.onnx").graph
    assert [value.name for value in graph.input] == ["ids", "x", "mask"]
    assert [value.name for value in graph.output] == outputs
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {row.program for row in report.results} == {"forward", "gradient"}
    alone = api.verify(bundle.folder, model=code, program="gradient", runtime="onnxruntime")
    assert {r.artifact for r in alone.results if r.runtime != "float64"} == {"gradient.onnx"}
    with pytest.raises(UsageError, match="nothing in it is to compare of program step"):
        api.verify(bundle.folder, model=code, program="step")


def test_a_model_that_returns_nothing_is_refused(project: Path, tmp_path: Path) -> None:
    code = f"{project / 'through_net.py'}:Nothing"
    with pytest.raises(ExportFailed, match="the model returns no tensor, but a NoneType"):
        api.export(project / "w.pth", tmp_path / "b", model=code, inputs=INPUTS)


def test_weights_of_another_dtype_than_the_inputs_are_told(project: Path, tmp_path: Path) -> None:
    (project / "linear_net.py").write_text("from torch import nn\nnet = lambda: nn.Linear(4, 2)\n")
    torch.save(nn.Linear(4, 2).half().state_dict(), project / "half.pth")
    code = f"{project / 'linear_net.py'}:net"
    with pytest.raises(
        ExportFailed, match=r"its weights are float16, its inputs float32: give inp"
    ):
        api.export(project / "half.pth", tmp_path / "b", model=code, inputs="input:[b,4]")
    api.export(
        project / "half.pth", tmp_path / "b", model=code, inputs="input:[b,4]", dtype="float32",
        format="onnx", programs="forward",
    )  # fmt: skip


def test_which_of_several_weights_are_taken_is_told(project: Path, tmp_path: Path) -> None:
    (project / "linear_net.py").write_text("from torch import nn\nnet = lambda: nn.Linear(4, 2)\n")
    code, file = f"{project / 'linear_net.py'}:net", project / "two.pth"
    one, other = nn.Linear(4, 2).state_dict(), nn.Conv1d(3, 3, 1).state_dict()
    torch.save({"generator": one, "critic": other}, file)
    bundle = api.export(file, tmp_path / "b", model=code, inputs="input:[b,4]", format="onnx")
    said = "critic is in the file too, with other shapes; the weights of generator are taken"
    assert any(said in note for note in bundle.manifest["notes"])
    torch.save({"critic": other, "generator": one}, file)
    with pytest.raises(Missing, match=r"the weights of critic are taken \(--weights\)"):
        api.export(file, tmp_path / "c", model=code, inputs="input:[b,4]", format="onnx")
