"""Tolerances from good runs: they pass what is good, and fail what is not."""

import json
import tomllib
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from fuseport.cli import main
from fuseport.exporter import api, calibrate
from fuseport.exporter.calibrate import Calibration, proposed
from fuseport.exporter.ci.config import Config, Tolerated
from fuseport.exporter.ci.schema import Source, filled
from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify.report import Row

Small = tuple[Path, str]


def row(tensor: str, error: float, baseline: float = 0.0, case: str = "a") -> Row:
    return Row(
        "eager", None, "model", "forward", "run", case, tensor, "pass",
        max_abs_error=error, baseline_error=baseline,
    )  # fmt: skip


def test_layers_share_a_pattern_and_the_largest_error_counts() -> None:
    rows = [
        row("grad/layers.0.norm.weight", 1.2e-6),
        row("grad/layers.11.norm.weight", 4e-7, baseline=2e-6),
        row("logits", 0.0),
        row("grad/odd[0].weight", 3e-5),
    ]
    found = {p.pattern: p for p in proposed(rows, 2.0)}
    layer = found["grad/layers.*.norm.weight"]
    assert (layer.atol, layer.tensor, layer.comparisons) == (4e-6, "grad/layers.11.norm.weight", 2)
    assert found["logits"].atol == 0.0
    assert found["grad/odd[[]0].weight"].atol == 6e-5
    assert calibrate._rounded_up(2.1e-6) == 3e-6
    assert calibrate._rounded_up(9.5e-6) == 1e-5


def test_each_seed_is_held_against_the_others() -> None:
    rows = [row("y", 1e-6, case=f"export, seed {n}") for n in (1, 2, 3)]
    assert calibrate._held_out(rows, (1, 2, 3), 2.0) == (3, 0)
    rows[0] = row("y", 1e-3, case="export, seed 1")
    assert calibrate._held_out(rows, (1, 2, 3), 2.0) == (3, 1)


@pytest.fixture(scope="module")
def calibrated(small_bundle: Small) -> Calibration:
    bundle, model = small_bundle
    return calibrate.calibrate([bundle], model=model, runtime=["onnxruntime"], seeds=2)


def test_what_is_proposed_passes_the_good_and_fails_the_wrong(
    calibrated: Calibration, small_bundle: Small, tmp_path: Path
) -> None:
    bundle, model = small_bundle
    assert calibrated.exit_code() == 0
    cases = {r.case for report in calibrated.reports for r in report.results if r.case != "*"}
    assert all(f"seed {calibrate.SEEDS}" in c or f"seed {calibrate.SEEDS + 1}" in c for c in cases)
    tolerance = calibrated.tolerances()
    report = api.verify(bundle, model=model, runtime=["onnxruntime"], tolerance=tolerance)
    assert report.exit_code() == 0, report.failures()
    file = tmp_path / "gradient.onnx"
    program = onnx.load(bundle / "gradient.onnx")
    [weight] = [t for t in program.graph.initializer if t.name == "other.weight"]
    values = numpy_helper.to_array(weight) * 1.001
    weight.CopyFrom(numpy_helper.from_array(values.astype("float32"), weight.name))
    onnx.save(program, file)
    wrong = api.verify(
        bundle,
        model=model,
        runtime=["onnxruntime"],
        artifact=file,
        tolerance=tolerance,
        localise=False,
    )
    assert wrong.exit_code() == 1


def test_the_section_can_be_pasted_into_the_file(calibrated: Calibration) -> None:
    text = f"checkpoint = []\n{calibrated.to_toml()}"
    config = filled(Config, tomllib.loads(text), Source(Path("f"), text), ())
    assert isinstance(config.tolerances, Tolerated)
    assert config.tolerances.tolerances() == calibrated.tolerances()
    content = json.loads(calibrated.to_json())
    assert {p["pattern"] for p in content["proposals"]} >= {"output", "grad/one.weight", "grad/x"}


def test_from_runs_that_are_not_good_nothing_is_proposed(
    small_bundle: Small, tmp_path: Path
) -> None:
    bundle, model = small_bundle
    other = tmp_path / "other_net.py"
    right = Path(model.removesuffix(":Net")).read_text()
    other.write_text(right.replace("tanh(self.one(x))", "tanh(self.one(x)) * 1.001"))
    found = calibrate.calibrate([bundle], model=f"{other}:Net", runtime=["onnxruntime"], seeds=2)
    assert (found.proposals, found.held_out, found.exit_code()) == ((), (0, 0), 1)


def test_what_cannot_be_calibrated(small_bundle: Small) -> None:
    bundle, model = small_bundle
    arguments = ["calibrate", str(bundle), "--model", model, "--seeds", "2"]
    result = CliRunner().invoke(main, [*arguments, "--runtime", "nothing"])
    assert result.exit_code == 2
    with pytest.raises(UsageError):
        calibrate.calibrate([bundle], seeds=1)
