"""`verify --self-test`: bugs planted in copies of a bundle's files, and in the ops of its model."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import api
from fuseport.exporter.bundle import hash_file
from fuseport.exporter.child import Limits
from fuseport.exporter.child.confined import Bounds
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.runtimes import RUNTIMES
from fuseport.exporter.verify.compare import Expected
from fuseport.exporter.verify.measure import Norms
from fuseport.exporter.verify.mutants import Power
from fuseport.exporter.verify.mutants.files import FILES, Asked, formats, maker
from fuseport.exporter.verify.mutants.self_test import _MAKER, preferred
from fuseport.exporter.verify.mutants.unseen import unseen
from fuseport.exporter.verify.op_check.isolated import told
from fuseport.exporter.verify.plan import Case
from fuseport.exporter.verify.sample import Sample

MODEL = "net.py"
CODE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.gelu = torch.nn.GELU()

    def forward(self, x):
        return self.norm(self.gelu(self.inner(x)) + x.softmax(-1)) * torch.sigmoid(x)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a model without fused ops, which is exported in seconds."""
    folder = tmp_path_factory.mktemp("self_test")
    (folder / MODEL).write_text(CODE, encoding="utf-8")
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(CODE, namespace)
    torch.manual_seed(0)
    torch.save(namespace["Net"]().state_dict(), folder / "weights.pth")
    api.export(
        folder / "weights.pth",
        folder / "bundle",
        model=f"{folder / MODEL}:Net",
        inputs=parse_inputs(["x:[batch,length,6]"]),
    )
    return folder / "bundle"


def of_model(bundle: Path) -> str:
    return f"{bundle.parent / MODEL}:Net"


@pytest.fixture(scope="module")
def tested(small: Path) -> Power:
    return api.self_test(small, runtime=["onnxruntime"], model=of_model(small))


def test_wrong_files_are_caught_and_right_ones_pass(tested: Power) -> None:
    assert tested.exit_code() == 0, tested.lines()
    assert not tested.missed
    assert {p.op for p in tested.planted} == {"onnxruntime"}
    assert len(tested.counted) > 30
    assert len({p.kind for p in tested.counted}) > 15
    assert all(p.where == "artifact" for p in tested.planted)
    assert tested.clean
    assert not tested.alarms


def test_a_miss_and_what_cannot_be_seen_have_their_reasons(tested: Power) -> None:
    assert all(p.reason for p in tested.counted)
    assert all("bits in every case" in str(p.equivalent) for p in tested.planted if p.equivalent)


def test_the_bundle_stays_as_it_was(small: Path, tested: Power) -> None:
    manifest = json.loads((small / "manifest.json").read_text(encoding="utf-8"))
    for name, entry in manifest["files"].items():
        digest = entry["sha256"] if isinstance(entry, dict) else entry
        assert hash_file(small / name) == digest, name


@pytest.mark.parametrize("format_name", [name for name in formats() if name != "onnx_native"])
def test_wrong_files_of_every_format_can_be_read_and_are_other_files(
    format_name: str, small: Path, tmp_path: Path
) -> None:
    """`onnx_native` has the maker of `onnx`."""
    manifest = json.loads((small / "manifest.json").read_text(encoding="utf-8"))
    [entry] = [
        e for e in manifest["artifacts"] if (e["format"], e["program"]) == (format_name, "gradient")
    ]
    program = {"kind": "gradient", **manifest["programs"]["gradient"], "ops": manifest["ops"]}
    right = small / entry["file"]
    sizes = {"batch": 2, "length": 3}
    made = list(maker(format_name)(Asked(right, small / "gradient.pt2", program, sizes, 0, 1)))
    assert {m.kind for m in made} <= {kind.name for kind in FILES}
    assert len({m.kind for m in made}) > 12
    for number, one in enumerate(made if format_name == "onnx" else made[::4]):
        file = tmp_path / f"{number}{right.suffix}"
        one.write(file)
        assert file.read_bytes() != right.read_bytes(), one
        reads = {".onnx": onnx.load, ".pt2": torch.export.load, ".pt": torch.jit.load}
        assert reads[right.suffix](file) is not None


def test_wrong_files_are_made_by_a_child_that_writes_to_its_folder_alone(
    small: Path, tmp_path: Path
) -> None:
    """torch.export unpacks what it reads into a temporary folder."""
    manifest = json.loads((small / "manifest.json").read_text(encoding="utf-8"))
    (tmp_path / "made").mkdir()
    job = {
        "artifact": str(small / "gradient.pt2"),
        "source": str(small / "gradient.pt2"),
        "program": {"kind": "gradient", **manifest["programs"]["gradient"], "ops": []},
        "sizes": {"batch": 2, "length": 3},
        "seed": 0,
        "count": 1,
        "format": "exported_program",
        "folder": str(tmp_path / "made"),
        "ops": None,
    }
    events = list(told(_MAKER, job, tmp_path, Limits(120.0), Bounds((tmp_path,))))
    assert not [event for event in events if "lost" in event]
    assert len([event for event in events if "made" in event]) > 12


NORMED = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(3, 4, 3, padding=1)
        self.norm = torch.nn.InstanceNorm1d(4, affine=True)

    def forward(self, x):
        return torch.tanh(self.norm(self.conv(x)))
"""


def test_a_bias_before_a_norm_can_be_anything(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_text(NORMED, encoding="utf-8")
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(NORMED, namespace)
    torch.manual_seed(0)
    torch.save(namespace["Net"]().state_dict(), tmp_path / "weights.pth")
    model = f"{tmp_path / MODEL}:Net"
    inputs = parse_inputs(["x:[batch,3,length]"])
    api.export(tmp_path / "weights.pth", tmp_path / "b", model=model, inputs=inputs)
    found: dict[str, str | None] = {}
    for seed in range(4):  # which weight, and which output, are drawn
        power = api.self_test(tmp_path / "b", runtime=["onnxruntime"], model=model, seed=seed)
        assert power.exit_code() == 0, power.lines()
        found |= {p.place: p.equivalent for p in power.planted if p.equivalent}
    assert "nothing depends on conv.bias" in str(found.get("conv.bias"))
    assert set(found) <= {"conv.bias", "grad/conv.bias"}


def sample(**scales_and_baselines: tuple[float, float]) -> Sample:
    expected = {
        f"grad/{name}": Expected("float32", Norms(scale, scale), Norms(error, error))
        for name, (scale, error) in scales_and_baselines.items()
    }
    return Sample(Case("a", {}, "contiguous", 0), Path("a"), expected)


def test_what_is_small_and_not_zero_is_a_miss() -> None:
    of_one = [sample(w=(1e-9, 1e-7), v=(1e-15, 1e-7)), sample(w=(1e-15, 1e-7), v=(1e-15, 1e-7))]
    other = "output's sign"
    assert unseen(other, "grad/v", {"grad/v"}, of_one)
    assert unseen("weight in half", "v", {"output"}, of_one)
    assert unseen(other, "grad/w", {"grad/w"}, of_one) is None
    assert unseen(other, "grad/v", {"grad/v", "grad/w"}, of_one) is None
    assert unseen(other, "v", {"output"}, of_one) is None
    assert unseen("weight in half", "w", {"output"}, of_one) is None
    assert unseen("weight in half", "u", {"output"}, of_one) is None
    assert unseen("weight in half", "u", (), of_one)


def test_one_runtime_for_each_format_is_enough() -> None:
    manifest = {"artifacts": [{"format": "torchscript"}]}
    assert preferred(RUNTIMES, manifest) == ["eager", "torchscript"]


def test_the_command_refuses_what_it_cannot_combine(small: Path) -> None:
    done = CliRunner().invoke(main, ["verify", str(small), "--self-test", "--atol", "1"])
    assert done.exit_code == 2
    assert "--self-test" in done.output
