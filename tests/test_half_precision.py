"""Half precision of the user's own models: what stays float32, and what a forward does not take."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.capture.prepare import prepared
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models import Model
from fuseport.exporter.models.user import parse_inputs

HEAD = """
import torch
from torch import nn

class MyRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return CAST

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = NORM
        self.last = nn.Linear(8, 4)
        MORE
    def forward(self, x):
        BEFORE
        return self.last(self.norm(torch.relu(self.first(x))))
"""
SCAN = "self.A_log = nn.Parameter(torch.zeros(8, 2)); self.D = nn.Parameter(torch.ones(8))"
INPUTS = parse_inputs(["x:[batch,length,8]"])


def net(
    folder: Path,
    norm: str = "nn.LayerNorm(8)",
    cast: str = "(y * self.scale).to(x.dtype)",
    more: str = "pass",
    before: str = "pass",
) -> tuple[Path, str]:
    """Weights, and `--model`."""
    code = HEAD.replace("self.norm = NORM", f"self.norm = {norm}").replace("CAST", cast)
    code = code.replace("MORE", more).replace("BEFORE", before)
    (folder / "net.py").write_text(code)
    scope: dict[str, type[nn.Module]] = {}
    exec(code, scope)  # the text above, to have weights of its shapes
    torch.manual_seed(0)
    torch.save(scope["Net"]().state_dict(), folder / "w.pth")
    return folder / "w.pth", f"{folder / 'net.py'}:Net"


def converted(folder: tuple[Path, str], dtype: str = "bfloat16") -> tuple[Model, Sequence[str]]:
    weights, code = folder
    model, _ = models.from_checkpoint(checkpoint.load(weights), code=code, inputs=INPUTS)
    return prepared(model, None, None, None, dtype, 0, lambda _: None)


def in_float32(model: Model) -> set[str]:
    tensors = model.module.state_dict()
    return {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("norm", "names"),
    [
        ("nn.LayerNorm(8)", {"norm.weight", "norm.bias"}),
        ("nn.LayerNorm(8, elementwise_affine=False)", set()),
        ("nn.RMSNorm(8)", None),
        ("MyRMSNorm(8)", {"norm.scale"}),
    ],
)
def test_norms_stay_by_their_class(
    norm: str, names: set[str] | None, dtype: str, tmp_path: Path
) -> None:
    model, notes = converted(net(tmp_path, norm), dtype)
    if names is None:  # torch's own decides whether it takes it, and that may change
        names = {"norm.weight"} if in_float32(model) else set()
    assert in_float32(model) == names
    said = f"{len(names)} parameters stay float32 in {dtype}: those called "
    assert any(note.startswith(said) for note in notes) == bool(names)
    with torch.no_grad():
        assert model.module(torch.randn(2, 3, 8).to(getattr(torch, dtype))).dtype is getattr(
            torch, dtype
        )


def test_what_scans_are_made_of_stays_whoever_computes_them(tmp_path: Path) -> None:
    before = "x = x * torch.exp(-torch.exp(self.A_log).sum(-1) * self.D).to(x.dtype)"
    model, notes = converted(net(tmp_path, more=SCAN, before=before))
    assert in_float32(model) == {"norm.weight", "norm.bias", "A_log", "D"}
    assert notes[0].startswith("4 parameters stay float32 in bfloat16: those called A_log, D, ")


def test_a_forward_that_does_not_take_a_norm_in_float32_gets_it_converted(tmp_path: Path) -> None:
    before = "x = x * torch.exp(-torch.exp(self.A_log).sum(-1) * self.D).to(x.dtype)"
    weights = net(tmp_path, "MyRMSNorm(8)", "y * self.scale", SCAN, before)
    # A norm that returns float32, and not its input's dtype, is taken in no half type at all.
    with pytest.raises(ExportFailed, match=r"--dtype bfloat16: .* does not run in it") as raised:
        converted(weights)
    assert "\n" not in str(raised.value)
    weights = net(tmp_path, "MyRMSNorm(8)", "y.to(x.dtype) * self.scale", SCAN, before)
    model, notes = converted(weights)
    assert in_float32(model) == {"A_log", "D"}
    assert "does not take norms in float32 beside torch.bfloat16: converted, too" in notes[-1]
    model, notes = converted(net(tmp_path, more=SCAN, before=before.replace(".to(x.dtype)", "")))
    assert in_float32(model) == set()
    assert "does not take norms, A_log, D and biases of delta in float32" in notes[-1]


def test_a_norm_in_float32_is_exported_to_onnx_and_verifies(tmp_path: Path) -> None:
    more = "self.groups = nn.GroupNorm(2, 8)"
    before = "x = self.groups(x.mT).mT"
    weights, code = net(tmp_path, more=more, before=before)
    bundle = api.export(
        weights, tmp_path / "b", model=code, inputs=INPUTS, dtype="float16", format=["onnx"]
    )
    assert bundle.manifest["parameters"]["dtypes"] == ["float16", "float32"]
    report = api.verify(bundle.folder, model=code, runtime=["onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {row.program for row in report.results} == {"forward", "gradient"}


@pytest.mark.parametrize(
    ("before", "dtype"),
    [
        ("x = (x.float() * self.table).to(x.dtype)", torch.float32),
        ("x = x + self.table", torch.float16),
    ],
)
def test_a_table_of_the_constructor_is_the_same_when_the_model_is_built_again(
    before: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    more = "self.register_buffer('table', torch.linspace(0, 1, 8), persistent=False)"
    weights, code = net(tmp_path, more=more, before=before)
    assert converted((weights, code), "float16")[0].module.get_buffer("table").dtype is dtype
    bundle = api.export(
        weights, tmp_path / "b", model=code, inputs=INPUTS, dtype="float16", format=["onnx"]
    )
    report = api.verify(bundle.folder, model=code, runtime=["eager", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()


OTHER_NAMES = """
import torch
from torch import nn
from fuseport.ops import selective_scan

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates, self.skip = nn.Parameter(-torch.rand(8, 4)), nn.Parameter(torch.ones(8))
        self.step, self.both = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        delta = (x @ self.step.weight.mT).mT
        B, C = self.both(x).mT.chunk(2, 1)
        bias = self.step.bias.float()
        return selective_scan(
            x.mT, delta, self.rates.float(), B, C, self.skip.float(), delta_bias=bias,
            delta_softplus=True,
        ).mT
"""


def test_what_an_op_gets_for_delta_s_bias_and_d_stays_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "other_names.py").write_text(OTHER_NAMES)
    namespace: dict[str, type[nn.Module]] = {}
    exec(OTHER_NAMES, namespace)
    torch.save(namespace["Net"]().state_dict(), tmp_path / "w.pth")
    model, _ = converted((tmp_path / "w.pth", f"{tmp_path / 'other_names.py'}:Net"))
    assert in_float32(model) == {"skip", "step.bias"}
