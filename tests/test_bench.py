"""`fuseport bench`: everything is timed, in turns with eager, and what cannot be says why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from safetensors import safe_open

from fuseport.cli import main
from fuseport.exporter import api, bench
from fuseport.exporter.bench import Bench, Point, Timing
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.child import Limits
from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.subject import programs_of


def printed(result: Bench) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(result.table())
    return capture.get()


def test_everything_is_timed_in_turns_with_eager(lightning_bundle: Path) -> None:
    sizes = [{"length": 5}]
    result = api.bench(
        lightning_bundle, runtime=["eager", "torchscript", "onnxruntime"], sizes=sizes, rounds=2
    )
    found = {(t.runtime, t.artifact, t.program, t.way) for t in result.results}
    assert found == {
        ("eager", "model", "forward", "run"),
        ("eager", "model", "gradient", "autograd"),
        ("onnxruntime", "forward.onnx", "forward", "run"),
        ("onnxruntime", "gradient.onnx", "gradient", "run"),
        ("torchscript", "forward.pt", "forward", "run"),
        ("torchscript", "forward.pt", "gradient", "autograd"),
        ("torchscript", "gradient.pt", "gradient", "run"),
    }
    for timing in result.results:
        assert timing.reason is None
        assert timing.seconds is not None
        assert timing.fastest is not None
        assert timing.ratio is not None
        assert 0 < timing.fastest <= timing.seconds < 60
        assert timing.ratio > 0
        assert (timing.ratio == 1) == (timing.runtime == "eager")
        assert timing.calls >= 2
        assert timing.sizes == {"batch": 2, "length": 5}
        # A process with torch in it, in bytes and not in kilobytes.
        assert 50 * 2**20 < (timing.peak_bytes or 0) < 2**36
    assert result.exit_code() == 0
    content = json.loads(result.to_json())
    assert content["schema"] == "fuseport.bench/1"
    assert len(content["results"]) == 7
    lines = printed(result).splitlines()
    headings = [line.strip() for line in lines if "batch" in line]
    assert headings == ["forward, batch 2, length 5", "gradient, batch 2, length 5"]
    assert sum("×" in line for line in lines) == 7


def test_points_are_the_bundles_cases_from_the_smallest(
    lightning_bundle: Path, tmp_path: Path
) -> None:
    points = bench.points(open_bundle(lightning_bundle), [], 0, tmp_path)
    assert [dict(p.sizes) for p in points] == [
        {"batch": 1, "length": 1},
        {"batch": 2, "length": 1},
        {"batch": 3, "length": 7},
        {"batch": 2, "length": 16},
        {"batch": 1, "length": 65},
    ]
    with safe_open(points[2].file, "pt") as file:
        assert sorted(file.keys()) == ["cotangent/logits", "input/input_ids"]
        assert file.get_tensor("input/input_ids").shape == (3, 7)
        assert file.get_tensor("cotangent/logits").shape == (3, 7, 256)


def test_an_unknown_dimension_is_named(lightning_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"time is no dynamic dimension .* there are: batch, length"
    ):
        bench.points(open_bundle(lightning_bundle), [{"time": 3}], 0, tmp_path)


def test_a_size_that_only_the_model_knows_is_refused(
    lightning_bundle: Path, tmp_path: Path
) -> None:
    bundle = open_bundle(lightning_bundle)
    manifest = json.loads(json.dumps(bundle.manifest))
    manifest["programs"]["forward"]["outputs"][0]["dims"][1] = "length//2"
    with pytest.raises(UsageError, match=r"the size length//2 of logits depends on the model"):
        bench.points(replace(bundle, manifest=manifest), [], 0, tmp_path)


@pytest.mark.parametrize(
    ("limits", "reason"), [(Limits(), "cannot load"), (Limits(0.0), "stopped")]
)
def test_a_runtime_that_fails_costs_its_own_rows(
    lightning_bundle: Path, tmp_path: Path, limits: Limits, reason: str
) -> None:
    bundle = open_bundle(lightning_bundle)
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"no archive")
    jobs = [Job("torchscript", broken, "forward", "run", "")]
    points = bench.points(bundle, [{"length": 3}, {"length": 4}], 0, tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    rows = list(
        bench.measure(
            jobs,
            points,
            programs_of(bundle.manifest, None, None),
            None,
            work,
            rounds=1,
            limits=limits,
            progress=lambda _: None,
        )
    )
    assert [row.sizes["length"] for row in rows] == [3, 4]
    assert all(row.error and row.seconds is None and reason in (row.reason or "") for row in rows)
    result = Bench("b", "0", 1, tuple(rows), {})
    assert result.exit_code() == 6
    assert "error" in printed(result)
    assert len(result.reasons()) == 1


def test_what_is_missing_is_said_and_nothing_timed_is_no_success(tmp_path: Path) -> None:
    job = Job("onnxruntime", Path("forward.onnx"), "forward", "run", "")
    row = bench.without(job, Point({"batch": 1}, tmp_path), "is not installed")
    result = Bench("b", "0", 1, (row,), {})
    assert result.exit_code() == 6
    assert "unsupported" in printed(result)
    assert result.reasons() == ["onnxruntime: forward.onnx: is not installed"]


def test_that_there_is_nothing_beside_eager_is_told_with_the_option() -> None:
    row = Timing("torchscript", "forward.pt", "forward", "run", {}, seconds=0.25)
    alone = Bench("b", "0", 1, (row,), {})
    assert [line.endswith("--model") for line in alone.reasons()] == [True]
    assert Bench("b", "0", 1, (row, replace(row, ratio=0.5)), {}).reasons() == []


def test_without_the_model_there_are_times_and_no_ratios() -> None:
    row = Timing("torchscript", "forward.pt", "forward", "run", {}, seconds=0.25, peak_bytes=2**30)
    text = printed(Bench("b", "0", 1, (row,), {}))
    assert "250 ms" in text
    assert "1,024 MiB" in text
    assert "×" not in text


def test_a_runtime_that_nothing_is_for_is_refused_before_the_others_run(
    lightning_bundle: Path,
) -> None:
    told: list[str] = []
    with pytest.raises(UsageError, match="aot_inductor"):
        api.bench(lightning_bundle, runtime=["eager", "aot_inductor"], progress=told.append)
    assert told == []


@pytest.mark.parametrize("size", ["length", "length=0", "length=x", "=3", "length=3,"])
def test_sizes_are_numbers(lightning_bundle: Path, size: str) -> None:
    result = CliRunner().invoke(main, ["bench", str(lightning_bundle), "--size", size])
    assert result.exit_code == 2
    assert "DIM=N" in result.output


def test_the_command_prints_a_table_or_json(lightning_bundle: Path) -> None:
    arguments = ["bench", str(lightning_bundle), "--runtime", "torchscript", "--rounds", "1"]
    arguments += ["--program", "forward", "--size", "length=3,batch=1", "--json", "-"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    (timing,) = json.loads(result.stdout)["results"]
    assert timing["sizes"] == {"batch": 1, "length": 3}
