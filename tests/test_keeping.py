"""What a verification keeps: its rows for `--resume`, and outputs for another machine."""

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fuseport.exporter import api
from fuseport.exporter.bundle import hash_file
from fuseport.exporter.errors import CorruptInput, FuseportError, Missing, UsageError
from fuseport.exporter.runtimes import torchscript
from fuseport.exporter.verify import outputs, resume
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import Report, Row
from fuseport.ops.build import cache_folder

Small = tuple[Path, str]


def rows(report: Report) -> list[Row]:
    return list(report.results)


class TestResume:
    @pytest.fixture
    def state(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where records are: of this test alone, in a cache that has all else that is there."""
        shared, own = cache_folder(), tmp_path / "cache"
        folder = own / "verify"
        folder.mkdir(parents=True)
        for entry in shared.iterdir():
            if entry.name != folder.name:
                (own / entry.name).symlink_to(entry)
        monkeypatch.setenv("FUSEPORT_CACHE", str(own))
        return folder

    def test_what_was_killed_goes_on_and_gives_the_same_report(
        self, small_bundle: Small, tmp_path: Path, state: Path
    ) -> None:
        """Fault 22."""
        bundle, model = small_bundle
        options = ["--model", model, "--runtime", "torchscript", "--seeds", "3"]
        command = [sys.executable, "-m", "fuseport.cli", "verify", str(bundle), *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            new: set[Path] = set()
            while not any(file.read_text().count("\n") >= 3 for file in new):
                assert run.poll() is None, "it ended before it could be killed"
                new = set(state.iterdir())
                time.sleep(0.002)
            run.send_signal(signal.SIGKILL)
        [file] = new
        done = {json.loads(line)["job"] for line in file.read_text().splitlines(True)[:3]}
        told: list[str] = []
        resumed = api.verify(
            bundle,
            model=model,
            runtime=["torchscript"],
            seeds=range(3),
            resume=True,
            progress=told.append,
        )
        assert not file.exists()
        whole = api.verify(bundle, model=model, runtime=["torchscript"], seeds=range(3))
        assert rows(resumed) == rows(whole)
        assert resumed.exit_code() == 0
        # What was done is not run again.
        again = {line for line in told if line.startswith("torchscript: ")}
        assert again
        assert not {job for job in done if f"torchscript: {_told(job)}" in again}

    def test_other_options_and_another_bundle_begin_anew(self) -> None:
        facts: dict[str, Any] = {"manifest": "1", "options": {"runtime": ["eager"]}}
        assert resume.key(facts) == resume.key(json.loads(json.dumps(facts)))
        for other in ({"manifest": "2"}, {"options": {"runtime": ["libtorch"]}}):
            assert resume.key({**facts, **other}) != resume.key(facts)

    def test_code_that_changed_is_another_option(self, tmp_path: Path) -> None:
        code = tmp_path / "net.py"
        code.write_text("one")
        before = resume.sources(f"{code}:Net")
        (tmp_path / "beside.py").write_text("helper")
        beside = resume.sources(f"{code}:Net")
        code.write_text("two")
        assert len({before, beside, resume.sources(f"{code}:Net")}) == 3
        assert resume.sources(None) is None

    def test_a_half_line_is_no_row_and_a_record_has_one_owner(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(resume, "cache_folder", lambda: tmp_path)
        job = Job("eager", Path("w"), "forward", "run", "export")
        other = replace(job, case="other")
        row = Row("eager", None, "model", "forward", "run", "export", "y", "pass")
        with suppress(KeyboardInterrupt), resume.recorded("a", resume=False) as record:
            record.add(job, [row])
            record.add(other, [row])
            with pytest.raises(UsageError, match="at work"), resume.recorded("a", resume=True):
                pass
            raise KeyboardInterrupt
        [file] = (tmp_path / "verify").iterdir()
        file.write_text(file.read_text()[:-20])
        with suppress(KeyboardInterrupt), resume.recorded("a", resume=True) as record:
            assert record.rows(job) == (row,)
            assert record.rows(other) is None
            raise KeyboardInterrupt
        with resume.recorded("a", resume=True) as record:  # that knew it still
            assert record.rows(job) == (row,)
        assert not list((tmp_path / "verify").iterdir())
        with resume.recorded("a", resume=False) as record:
            assert record.rows(job) is None


def _told(job: str) -> str:
    """The line of progress that a job in a record had."""
    _, artifact, _, way, case = job.split(" · ")
    return f"{artifact}{', autograd' if way == 'autograd' else ''}: {case}"


@pytest.fixture(scope="module")
def saved(small_bundle: Small, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A folder of outputs, and the report of the run that saved it."""
    bundle, model = small_bundle
    folder = tmp_path_factory.mktemp("outputs") / "there"
    runtimes = ["torchscript", "onnxruntime"]
    report = api.verify(bundle, model=model, runtime=runtimes, seeds=range(2), save_outputs=folder)
    return folder, report


class TestOutputs:
    def test_what_was_saved_is_judged_as_what_ran(
        self, saved: tuple[Path, Report], small_bundle: Small
    ) -> None:
        bundle, model = small_bundle
        folder, report = saved
        loaded = api.verify(bundle, model=model, load_outputs=folder)
        assert rows(loaded) == rows(report)
        assert any("made elsewhere" in note and "torch 2" in note for note in loaded.notes)
        some = api.verify(bundle, model=model, runtime=["torchscript"], load_outputs=folder)
        assert {row.runtime for row in some.results} == {"torchscript", "float64"}

    def test_loading_runs_nothing(
        self, saved: tuple[Path, Report], small_bundle: Small, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bundle, model = small_bundle
        monkeypatch.setattr(torchscript, "missing", lambda: "torchscript is not here")
        loaded = api.verify(bundle, model=model, load_outputs=saved[0])
        assert loaded.exit_code() == 0, loaded.failures()
        assert "torchscript" in {row.runtime for row in loaded.results}

    def test_a_wrong_value_is_found_elsewhere_too(
        self, saved: tuple[Path, Report], small_bundle: Small, tmp_path: Path
    ) -> None:
        """As a machine that computes something else would save it, hashes and all."""
        bundle, model = small_bundle
        folder = shutil.copytree(saved[0], tmp_path / "copy")
        content = json.loads((folder / outputs.INDEX).read_text())
        entry = next(e for e in content["answers"] if e["program"] == "gradient")
        file = folder / entry["files"]["1"]["file"]
        tensors = load_file(file)
        tensors["grad/one.bias"] = tensors["grad/one.bias"] * 1.001
        save_file(tensors, file)
        entry["files"]["1"]["sha256"] = hash_file(file)
        _write(folder, content)
        report = api.verify(bundle, model=model, load_outputs=folder)
        failed = [row for row in report.results if row.verdict == "fail"]
        assert {row.tensor for row in failed} == {"grad/one.bias"}

    def test_what_a_gpu_gave_stays_of_a_gpu(
        self, saved: tuple[Path, Report], small_bundle: Small, tmp_path: Path
    ) -> None:
        """As a machine with a GPU would save it."""
        bundle, model = small_bundle
        folder = shutil.copytree(saved[0], tmp_path / "copy")
        content = json.loads((folder / outputs.INDEX).read_text())
        assert content["environment"]["device"] == "cpu"
        content["environment"]["device"] = "cuda"
        _write(folder, content)
        report = api.verify(bundle, model=model, load_outputs=folder)
        assert report.environment["device"] == "cuda"
        providers = {row.provider for row in report.results if row.runtime == "onnxruntime"}
        assert providers == {"CUDAExecutionProvider"}

    @pytest.mark.parametrize(
        ("what", "error"),
        [
            ("a file changed", CorruptInput),
            ("a file is missing", CorruptInput),
            ("the index was edited", CorruptInput),
            ("another bundle", CorruptInput),
            ("other inputs", CorruptInput),
            ("another version", Missing),
            ("another runtime", Missing),
            ("no folder", UsageError),
        ],
    )
    def test_what_is_not_of_the_bundle_is_refused(
        self,
        what: str,
        error: type[FuseportError],
        saved: tuple[Path, Report],
        small_bundle: Small,
        tmp_path: Path,
    ) -> None:
        bundle, model = small_bundle
        folder = tmp_path / "copy"
        if what != "no folder":
            shutil.copytree(saved[0], folder)
            content = json.loads((folder / outputs.INDEX).read_text())
            file = folder / content["answers"][0]["files"]["1"]["file"]
            if what == "a file changed":
                file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
            elif what == "a file is missing":
                file.unlink()
            elif what == "the index was edited":
                (folder / outputs.INDEX).write_text(json.dumps({**content, "seeds": [0]}))
            elif what == "another bundle":
                _write(folder, {**content, "manifest_sha256": "0" * 64})
            elif what == "other inputs":
                _write(folder, {**content, "inputs": dict.fromkeys(content["inputs"], "0")})
            elif what == "another version":
                _write(folder, {**content, "schema": "fuseport.outputs/2"})
            else:
                content["answers"][0]["runtime"] = "onnxruntime+later"
                _write(folder, content)
        with pytest.raises(error, match="copy"):
            api.verify(bundle, model=model, load_outputs=folder)

    def test_a_folder_with_something_in_it_stays(self, small_bundle: Small, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        with pytest.raises(UsageError, match="not empty"):
            api.verify(small_bundle[0], model=small_bundle[1], save_outputs=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    @pytest.mark.parametrize(
        "options",
        [
            {"resume": True, "save_outputs": "a"},
            {"resume": True, "load_outputs": "a"},
            {"save_outputs": "a", "load_outputs": "b"},
            {"artifact": "a.onnx", "load_outputs": "b"},
            {"device": "cuda", "load_outputs": "b"},
        ],
    )
    def test_options_that_exclude_each_other(
        self, options: dict[str, Any], small_bundle: Small
    ) -> None:
        with pytest.raises(UsageError):
            api.verify(small_bundle[0], **options)


def _write(folder: Path, content: dict[str, Any]) -> None:
    content = {**content, "self_sha256": outputs._digest(content)}
    (folder / outputs.INDEX).write_text(json.dumps(content))


class TestSeeds:
    def test_further_cases_have_other_values_at_the_same_sizes(self, small_bundle: Small) -> None:
        bundle, model = small_bundle
        report = api.verify(bundle, model=model, runtime=["torchscript"], seeds=range(2))
        assert report.exit_code() == 0, report.failures()
        names = {row.case for row in report.results if row.runtime == "torchscript"}
        assert {f"{name}, seed 1" for name in names if "seed" not in name} == {
            name for name in names if "seed" in name
        }
        errors = {
            row.case: row.max_abs_error
            for row in report.results
            if (row.runtime, row.tensor, row.way) == ("torchscript", "grad/one.weight", "run")
        }
        assert errors["export"] != errors["export, seed 1"]

    def test_without_the_model_there_are_no_others(self, small_bundle: Small) -> None:
        with pytest.raises(Missing, match="--model"):
            api.verify(small_bundle[0], seeds=range(2))
