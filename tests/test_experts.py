"""Experts that each take the tokens routed to them: sizes of tensors depend on values."""

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.capture import capture
from fuseport.exporter.models import user
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.as_files import session_of

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


MIXTRAL = """
import torch
from transformers import MixtralConfig, MixtralModel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        settings = MixtralConfig(
            vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, use_cache=False,
        )
        self.inner = MixtralModel(settings)

    def forward(self, input_ids):
        return self.inner(input_ids).last_hidden_state
"""


def test_experts_of_transformers_layers_in_a_model_of_the_users_own(tmp_path: Path) -> None:
    """Also where nothing else of these layers is computed by an op."""
    (tmp_path / "net.py").write_text(MIXTRAL)
    model = user.model(
        f"{tmp_path / 'net.py'}:Net", {}, parse_inputs(["input_ids:int64[batch,length]<30"])
    )
    (program,) = capture(model, ["forward"])
    session = session_of(program, tmp_path, "onnxruntime")
    ids = torch.randint(30, (3, 7), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model.module(ids)
    torch.testing.assert_close(session.run({"input_ids": ids})["output"], expected)
