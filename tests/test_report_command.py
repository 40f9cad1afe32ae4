"""Where reports go: `verify` and `report` with every face, and files that cannot be written."""

import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from fuseport.cli import main
from fuseport.exporter.bundle.staging import write_whole
from fuseport.exporter.errors import StorageError
from fuseport.exporter.verify.report import Report, Row

ROW = Row(
    "onnxruntime", None, "f.onnx", "forward", "run", "export", "y", "pass", None, False, 1e-7,
    2e-8, 1e-7, 4e-7, 1e-7, 1e-7, 1.0,
)  # fmt: skip
WRONG = replace(
    ROW, tensor="grad/w", verdict="fail", reason="off by 0.5", max_abs_error=0.5,
    would_pass_at=0.5, scale=100.0, atol_at_rtol={"1e-03": 0.4, "1e-02": 0.0},
)  # fmt: skip
LACKING = Row("aot", None, "*", "*", "run", "*", "*", "unsupported", "not installed")
FACES = {"html": "<!doctype html>", "junit": "<?xml", "markdown": "### ", "json": "{"}


@pytest.fixture(autouse=True)
def _no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CI system's own summary is not ours to write to."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def saved(folder: Path, *rows: Row) -> Path:
    file = folder / "r.json"
    file.write_text(Report("b", "0" * 64, {}, 1.0, rows).to_json(), encoding="utf-8")
    return file


def asked(folder: Path) -> dict[str, Path]:
    return {face: folder / "deep" / f"out.{face}" for face in FACES}


def options(files: dict[str, Path]) -> list[str | Path]:
    return [part for face, file in files.items() for part in (f"--{face}", file)]


def test_verify_writes_every_face_of_a_mismatch(state_spaces_bundle: Path, tmp_path: Path) -> None:
    name = "backbone.layers.0.mixer.D"
    model = onnx.load(state_spaces_bundle / "gradient.onnx")
    tensor = next(t for t in model.graph.initializer if t.name == name)
    values = numpy_helper.to_array(tensor).copy() * np.float32(1.05)
    tensor.CopyFrom(numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "edited.onnx")
    files = asked(tmp_path)
    common = ["verify", state_spaces_bundle, "--artifact", tmp_path / "edited.onnx"]
    done = run(*common, "--runtime", "onnxruntime", *options(files))
    assert done.exit_code == 1, done.output
    for face, begin in FACES.items():
        assert files[face].read_text(encoding="utf-8").startswith(begin)
    report = Report.from_json(files["json"].read_text(encoding="utf-8"))
    failed = [row for row in report.results if row.verdict == "fail"]
    assert failed
    assert all(row.atol_at_rtol and row.scale for row in failed)
    root = ElementTree.parse(files["junit"]).getroot()
    assert len(list(root.iter("failure"))) == len(failed)
    # In the model's order, which is not that of the names.
    names = [r.tensor for r in report.results if r.runtime == "onnxruntime" and r.case == "export"]
    assert names.index("grad/backbone.norm_f.weight") == len(names) - 1

    # A tolerance for the failing tensors alone, with a run and without one.
    largest = max(row.would_pass_at or 0.0 for row in failed)
    tensors = {row.tensor for row in failed}
    enough, less = (
        [part for tensor in tensors for part in ("--atol", f"{tensor}:{largest * factor}")]
        for factor in (1.01, 0.99)
    )
    with_run = run(*common, "--runtime", "onnxruntime", *enough)
    assert with_run.exit_code == 0, with_run.output
    assert run("report", files["json"], *enough).exit_code == 0
    assert run("report", files["json"], *less).exit_code == 1


def test_a_misspelt_tolerance_ends_before_the_run(state_spaces_bundle: Path) -> None:
    done = run("verify", state_spaces_bundle, "--atol", "logitz:1")
    assert done.exit_code == 2
    assert "logits" in done.output


class TestReport:
    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            ([], 1),
            (["--atol", "0.5"], 0),
            (["--atol", "0.49"], 1),
            (["--atol", "grad/*:0.5"], 0),
            (["--atol", "grad/*:0.5", "--atol", "y:1e-8"], 1),
            (["--atol", "0.5", "--strict"], 1),
            (["--rtol", "0.01", "--atol", "1e-6"], 0),
            (["--rtol", "0.001", "--atol", "0.4"], 0),
            (["--rtol", "0.001", "--atol", "0.39"], 1),
            # Between the two that are stored: not decided, so no pass.
            (["--rtol", "0.005", "--atol", "0.1"], 6),
            (["--atol", "nothing:1"], 2),
            (["--atol", "much"], 2),
        ],
    )
    def test_judges_again_with_the_code_of_verify(
        self, arguments: list[str], code: int, tmp_path: Path
    ) -> None:
        done = run("report", saved(tmp_path, ROW, WRONG, LACKING), *arguments)
        assert done.exit_code == code, done.output
        of_strict = "--strict" in arguments
        assert ("not equal under --strict: 1 unsupported" in done.stderr) == of_strict

    def test_writes_faces_and_leaves_what_it_reads(self, tmp_path: Path) -> None:
        file = saved(tmp_path, ROW, WRONG)
        before = file.read_bytes()
        files = asked(tmp_path)
        done = run("report", file, "--atol", "1", *options(files))
        assert done.exit_code == 0, done.output
        assert file.read_bytes() == before
        assert json.loads(files["json"].read_text())["summary"]["pass"] == 2
        assert run("report", file, "--atol", "1", "--json", file).exit_code == 2
        assert "judged again" in files["html"].read_text()

    def test_prints_json_and_nothing_else(self, tmp_path: Path) -> None:
        file = saved(tmp_path, ROW, WRONG)
        done = run("report", file, "--json", "-", "--html", tmp_path / "r.html")
        assert json.loads(done.stdout)["summary"]["fail"] == 1
        assert (tmp_path / "r.html").exists()

    @pytest.mark.parametrize(
        ("content", "code"), [(None, 2), (b"", 4), (b"{}", 4), (b"\xff\xfe", 4), (b"[" * 10**6, 4)]
    )
    def test_what_is_no_report_is_refused(
        self, content: bytes | None, code: int, tmp_path: Path
    ) -> None:
        if content is not None:
            (tmp_path / "r.json").write_bytes(content)
        done = run("report", tmp_path / "r.json", "--html", tmp_path / "r.html")
        assert done.exit_code == code, done.output
        assert "r.json" in done.output
        assert not (tmp_path / "r.html").exists()


class TestStepSummary:
    def test_is_appended_to_where_it_is_set(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summary = tmp_path / "summary.md"
        summary.write_text("before\n")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        assert run("report", saved(tmp_path, ROW)).exit_code == 0
        assert run("report", saved(tmp_path, WRONG), "--markdown", summary).exit_code == 1
        text = summary.read_text()
        assert text.startswith("before\n### ✅ fuseport verify: pass\n")
        assert text.count("### ❌ fuseport verify: fail") == 1

    def test_stays_below_what_github_shows_whatever_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summary = tmp_path / "summary.md"
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        rows = [replace(WRONG, tensor=f"grad/{i}", reason="x" * 500) for i in range(200)]
        file = saved(tmp_path, *rows)
        for filled in (1024 * 1024 - 10_000, 1024 * 1024 - 100, 1024 * 1024 + 10):
            summary.write_bytes(b"x" * filled)
            assert run("report", file).exit_code == 1
            assert summary.stat().st_size <= max(1024 * 1024, filled)

    def test_that_cannot_be_written_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
        done = run("report", saved(tmp_path, ROW), "--json", tmp_path / "again.json")
        assert done.exit_code == 7
        assert (tmp_path / "again.json").exists()


def a_folder(folder: Path) -> Path:
    (folder / "there").mkdir()
    return folder / "there"


def under_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "out"


def a_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.parametrize("make", [a_folder, under_a_file, a_loop])
@pytest.mark.parametrize("face", FACES)
def test_what_cannot_be_written_ends_with_7_before_a_run(
    make: Callable[[Path], Path], face: str, tmp_path: Path
) -> None:
    place = make(tmp_path)
    done = run("verify", tmp_path / "no-bundle", f"--{face}", place)
    assert done.exit_code == 7, done.output
    assert place.name in done.output


def test_two_faces_in_one_file_and_a_printed_page_are_usage(tmp_path: Path) -> None:
    file = saved(tmp_path, ROW)
    assert run("report", file, "--html", tmp_path / "x", "--junit", tmp_path / "x").exit_code == 2
    assert run("report", file, "--html", "-").exit_code == 2
    assert not (tmp_path / "x").exists()


class TestWriteWhole:
    def test_a_failure_leaves_what_was_there_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "r.json"
        file.write_text("before")

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space"):
            write_whole(file, b"after")
        assert file.read_text() == "before"
        assert list(tmp_path.iterdir()) == [file]

    def test_a_link_stays_and_what_it_points_to_keeps_its_mode(self, tmp_path: Path) -> None:
        file, link = tmp_path / "r.json", tmp_path / "link"
        file.write_text("before")
        file.chmod(0o640)
        link.symlink_to(file)
        write_whole(link, b"after")
        assert link.is_symlink()
        assert file.read_text() == "after"
        assert stat.S_IMODE(file.stat().st_mode) == 0o640

    def test_a_device_is_written_to_and_stays(self) -> None:
        write_whole(Path(os.devnull), b"after")
        assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
