"""Experts that each take the tokens routed to them: sizes of tensors depend on values."""

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.models.user import parse_inputs

NET = """
import torch

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.route = torch.nn.Linear(4, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        tokens = x.reshape(-1, 4)
        shares, chosen = self.route(tokens).softmax(-1).topk(2, -1)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            which, place = torch.where(chosen == number)
            y.index_add_(0, which, expert(tokens[which]) * shares[which, place, None])
        return y.reshape(x.shape)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Bundle]:
    """The model, and its bundle."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "net.py").write_text(NET)
    torch.manual_seed(0)
    layers = {"route": torch.nn.Linear(4, 3)}
    layers |= {f"experts.{i}": torch.nn.Linear(4, 4) for i in range(3)}
    state = {f"{n}.{k}": t for n, layer in layers.items() for k, t in layer.state_dict().items()}
    torch.save(state, folder / "net.pt")
    model, inputs = f"{folder / 'net.py'}:Experts", parse_inputs(["x:[batch,length,4]"])
    return model, api.export(folder / "net.pt", folder / "b", model=model, inputs=inputs)


def test_gradients_pass_in_every_runtime(exported: tuple[str, Bundle]) -> None:
    model, bundle = exported
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    passed = [row for row in report.results if row.verdict == "pass"]
    gradients = {(row.runtime, row.artifact) for row in passed if row.tensor == "grad/route.weight"}
    assert {
        ("exported_program", "gradient.pt2"),
        ("libtorch", "gradient.pt"),
        ("onnxruntime", "gradient.onnx"),
        ("torchscript", "forward.pt"),
    } <= gradients
    assert len({row.case for row in passed}) >= 5


def test_what_is_wrong_is_located(exported: tuple[str, Bundle], tmp_path: Path) -> None:
    model, bundle = exported
    wrong = onnx.load(bundle.folder / "gradient.onnx")
    (weight,) = (w for w in wrong.graph.initializer if w.name == "experts.1.weight")
    value = onnx.numpy_helper.to_array(weight) + np.eye(4, dtype="float32") / 64
    weight.CopyFrom(onnx.numpy_helper.from_array(value, weight.name))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    report = api.verify(
        bundle.folder, model=model, artifact=tmp_path / "wrong.onnx", runtime=["onnxruntime"]
    )
    assert report.exit_code() == 1
    (diagnosis,) = report.diagnoses
    assert diagnosis.divergence is not None
    assert diagnosis.divergence.op in ("aten::index_add", "aten::index_put")  # by torch's version
    assert "weight experts.1.weight is not the model's" in diagnosis.reason
