"""`fuseport ci`: what a fuseport.toml may say, what it does, and the one verdict of it."""

import json
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from fuseport.cli import main
from fuseport.exporter.ci import expected, reuse, run, start
from fuseport.exporter.ci.config import Checkpoint, Expected, read
from fuseport.exporter.ci.report import CiReport, Outcome
from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify.compare import Tolerance, Verdict
from fuseport.exporter.verify.report import Report, Row

FIXTURES = Path(__file__).parent.parent / "fixtures"

WRONG = {
    "no TOML": ("checkpoint = [", "not TOML"),
    "no checkpoint": ("checkpoint = []", "checkpoint: there is none"),
    "the key is missing": ("strict = true", "the key checkpoint is missing"),
    "an unknown key": (
        "strikt = true\n@",
        ":1: strikt: there is no such key; did you mean strict?",
    ),
    "an unknown key of a checkpoint": ("@\npth = 3", ":3: checkpoint[0].pth: there is no such"),
    "no path": ("[[checkpoint]]\nname = 'x'", "checkpoint[0]: the key path is missing"),
    "a string for a boolean": ("strict = 'yes'\n@", ':1: strict: "yes" is not true or false'),
    "a boolean for a number": ("seeds = true\n@", ":1: seeds: true is not an integer"),
    "a table for a list": ("[checkpoint]\npath = 'x'", "checkpoint: write [[checkpoint]]"),
    "a number for a table": ("limits = 3\n@", "limits: 3 is not a table"),
    "an unknown format": ("formats = ['onyx']\n@", 'formats: there is no "onyx"; there are: aot'),
    "an unknown program": ("@\nprograms = ['back']", 'there is no "back"; there are: forward'),
    "an unknown runtime": ("@\nruntimes = ['ort']", 'there is no "ort"; there are: aot'),
    "an unknown device": ("@\ndevice = 'tpu'", 'device: there is no "tpu"; there are: cpu, cuda'),
    "no format": ("@\nformats = []", "formats: an empty list"),
    "an unknown dtype": ("@\ndtype = 'int8'", 'there is no "int8"; there are: float32'),
    "an opset of tomorrow": ("@\nopset = 99", "opset: 99 is not one of 18 to"),
    "a shim without code": ("@\nshim = 'auto'", "shim: shims are for model code"),
    "sizes that cannot be read": ("@\nsize = 'x'", "write DIM=N,DIM=N"),
    "inputs that cannot be read": ("@\ninput-shapes = ['x=3']", "write NAME:[DIM,…]"),
    "no seed": ("seeds = 0\n@", "seeds: 0 is not 1 or more"),
    "no jobs": ("[limits]\njobs = 0\n@", "jobs: 0 is not 1 or more"),
    "a negative tolerance": ("@\n[checkpoint.tolerances]\natol = -1", "-1 is not a number of 0"),
    "not a number": ("@\n[checkpoint.tolerances]\natol = nan", "nan is not a number of 0"),
    "a tolerance of a tensor": (
        "@\ntolerances.tensors = { 'grad/*' = { abs = 1 } }",
        "tolerances.tensors.grad/*.abs: there is no such key",
    ),
    "a failure without reason": ("@\n[[checkpoint.expected]]\ntensor = 'y'", "reason is missing"),
    "an empty reason": ("@\n[[checkpoint.expected]]\nreason = ' '", "say why"),
    "an expected pass": (
        "@\n[[checkpoint.expected]]\nreason = 'x'\nverdict = 'pass'",
        'there is no "pass"; there are: fail',
    ),
    "an expected failure of no runtime": (
        "@\n[[checkpoint.expected]]\nreason = 'x'\nruntime = 'ort'",
        'expected[0].runtime: there is no "ort"',
    ),
    "two of a name": ("@\n@", "checkpoint[1].name: two checkpoints have c"),
    "two in a folder": (
        "@\nbundle = 'b'\n@\nname = 'd'\nbundle = 'b'",
        "checkpoint[1].bundle: two checkpoints have",
    ),
    "a name that leaves the folder": ("@\nname = '../c'", "cannot be a file's name"),
}


def written(folder: Path, text: str) -> Path:
    """A file in which `@` stands for a checkpoint."""
    (folder / "c.pt").write_bytes(b"no checkpoint")
    file = folder / "fuseport.toml"
    file.write_text(text.replace("@", '[[checkpoint]]\npath = "c.pt"'), encoding="utf-8")
    return file


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_the_file_is_one_line_that_says_where(what: str, tmp_path: Path) -> None:
    text, said = WRONG[what]
    file = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert said in message
    assert "\n" not in message


def test_the_file_is_read_with_what_holds_for_all(tmp_path: Path) -> None:
    text = """
        formats = ["onnx"]
        device = "cuda"
        tolerances = { atol = 1, tensors = { "grad/*" = { rtol = 0.5 } } }
        @
        @
        name = "other"
        formats = "torchscript"
        device = "cpu"
        model = "net.py:Net"
        [checkpoint.limits]
        memory = 2
        jobs = 1
        """
    (tmp_path / "net.py").touch()
    first, other = read(written(tmp_path, text)).checkpoint
    assert (first.name, first.formats, other.formats) == ("c", ("onnx",), ("torchscript",))
    assert (first.device, other.device) == ("cuda", "cpu")
    assert Path(first.path).resolve() == tmp_path / "c.pt"
    assert other.model is not None
    assert Path(other.model.removesuffix(":Net")).resolve() == tmp_path / "net.py"
    assert other.limits is not None
    assert (other.limits.timeout, other.limits.memory, other.limits.jobs) == (900.0, 2.0, 1)
    assert first.tolerances is not None
    tolerances = first.tolerances.tolerances()
    assert tolerances.of("grad/x") == Tolerance(1.0, 0.5)
    assert tolerances.of("logits") == Tolerance(1.0, 0.0)


def test_the_file_to_begin_with_can_be_read(tmp_path: Path) -> None:
    result = invoked("--init", "--config", tmp_path / "fuseport.toml")
    assert result.exit_code == 0
    assert invoked("--init", "--config", tmp_path / "fuseport.toml").exit_code == 2
    (tmp_path / "model.ckpt").touch()
    assert read(tmp_path / "fuseport.toml").checkpoint[0].name == "model"
    # So can all that is commented out in it, but for the explanations.
    lines = [line.removeprefix("# ") for line in start.TEXT.splitlines()]
    settings = [line for line in lines if line.startswith("[") or " = " in line.partition("#")[0]]
    for name in ("net.py", "samples.safetensors", "my_ops.py"):
        (tmp_path / name).touch()
    kept = [line for line in settings if not line.startswith(("input-shapes", "Instead"))]
    (tmp_path / "all.toml").write_text("\n".join(kept), encoding="utf-8")
    [checkpoint] = read(tmp_path / "all.toml").checkpoint
    assert checkpoint.expected[0].tensor == "grad/*.conv1d.weight"


def report(**verdicts: Verdict) -> Report:
    """One row for each tensor."""
    rows = tuple(
        Row("onnxruntime", None, "forward.onnx", "forward", "run", "export", tensor, verdict)
        for tensor, verdict in verdicts.items()
    )
    return Report("b", "0", {}, 0.0, rows)


class TestExpected:
    def test_a_row_that_fails_as_expected_is_no_failure(self) -> None:
        rows = (Expected("known", tensor="x*"),)
        found = report(x="fail", x1="fail", y="pass")
        [held] = expected.hold(rows, found)
        assert (held.rows, held.mended) == (2, None)
        assert expected.excused(rows, found).exit_code() == 0
        assert expected.excused(rows, report(x="fail", y="fail")).exit_code() == 1

    def test_one_that_passes_is_a_failure(self) -> None:
        [held] = expected.hold((Expected("known", tensor="x*"),), report(x="fail", x1="pass"))
        assert held.mended is not None
        assert "1 of 2 rows" in held.mended
        assert "forward.onnx" in held.mended
        judged = expected.excused((held.expected,), report(x="fail", x1="pass"))
        assert judged.exit_code() == 1
        assert "expected to fail (known)" in judged.failures()[0]

    def test_one_that_matches_no_row_is_a_failure(self) -> None:
        [held] = expected.hold((Expected("known", tensor="z"),), report(x="pass"))
        assert held.mended is not None

    def test_nothing_is_known_where_the_runtime_is_unsupported(self) -> None:
        row = Row("onnxruntime", None, "*", "*", "run", "*", "*", "unsupported", "not installed")
        rows = Report("b", "0", {}, 0.0, (row,))
        [held] = expected.hold((Expected("known", "onnxruntime", "forward.onnx"),), rows)
        assert (held.rows, held.mended) == (0, None)

    def test_another_verdict_than_the_expected_one_is_not_excused(self) -> None:
        rows = (Expected("known", tensor="x"),)
        assert expected.excused(rows, report(x="error", y="pass")).exit_code() == 6
        [held] = expected.hold(rows, report(x="error"))
        assert (held.rows, held.mended) == (0, None)

    def test_an_expected_crash_alone_is_no_comparison(self) -> None:
        rows = (Expected("known", tensor="x", verdict="error"),)
        assert expected.excused(rows, report(x="error")).exit_code() == 6
        assert expected.excused(rows, report(x="error", y="pass")).exit_code() == 0


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0), 0), ((5, 6, 1, 0), 1), ((5, 6), 6), ((0, 5), 5), ((6, 8), 8), ((4, 5), 4), ((), 6)],
)
def test_a_mismatch_comes_before_a_crash_before_what_is_missing(
    codes: tuple[int, ...], code: int
) -> None:
    outcomes = tuple(Outcome(str(i), "p", code) for i, code in enumerate(codes))
    assert CiReport("c", outcomes, {}, 0.0).exit_code() == code


class TestReuse:
    CHECKPOINT = Checkpoint(str(FIXTURES / "state_spaces"), name="x")

    def test_the_key_is_of_what_an_export_reads(self, tmp_path: Path) -> None:
        known = reuse.key(self.CHECKPOINT)
        assert known == reuse.key(replace(self.CHECKPOINT, name="y", strict=True, seeds=4))
        for change in ({"dtype": "float64"}, {"seed": 1}, {"formats": ("onnx",)}):
            assert reuse.key(replace(self.CHECKPOINT, **change)) != known  # type: ignore[arg-type]
        copied = shutil.copytree(self.CHECKPOINT.path, tmp_path / "copy")
        there = replace(self.CHECKPOINT, path=str(copied))
        before = reuse.key(there)
        with (copied / "config.json").open("a") as file:
            file.write(" ")
        assert reuse.key(there) != before

    def test_what_code_of_the_users_reads_is_unknown(self) -> None:
        assert reuse.key(replace(self.CHECKPOINT, model="net.py:Net")) is None
        assert reuse.key(replace(self.CHECKPOINT, ops="ops.py")) is None


def invoked(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["ci", *map(str, arguments)])


def test_a_path_to_nothing_stops_no_other_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "cache_folder", lambda: tmp_path / "cache")
    (tmp_path / "net.py").write_text("import torch\nnet = lambda: torch.nn.Linear(2, 2)\n")
    text = """
        [[checkpoint]]
        path = "absent.ckpt"
        [[checkpoint]]
        name = "unknown inputs"
        path = "c.pt"
        model = "net.py:net"
        """
    file = written(tmp_path, text)
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "c.pt")
    result = invoked("--config", file)
    assert result.exit_code == 2
    first, second = [line for line in result.stdout.splitlines() if ": " in line][:2]
    assert first.startswith("absent: ")
    assert "there is no file or folder" in first
    # The key of the file, not the option of another command.
    assert "what are its inputs? Its forward takes input. Give input-shapes 'input:[b" in second
    result = invoked("--config", file, "--only", "unknown inputs")
    assert "absent" not in result.stdout
    result = invoked(file)
    assert result.exit_code == 2
    assert f"--config {file}" in result.stderr


def test_what_was_not_compared_is_told_also_where_all_else_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that draws random numbers was a pass, and no word was said."""
    for module in (reuse, run):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    code = """
        import torch
        class Net(torch.nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return torch.nn.functional.dropout(y), y
        make = lambda: Net(4, 4)
        """
    (tmp_path / "net.py").write_text(textwrap.dedent(code))
    file = written(
        tmp_path,
        """
        programs = "forward"
        formats = "torchscript"
        runtimes = "torchscript"
        [[checkpoint]]
        path = "c.pt"
        model = "net.py:make"
        input-shapes = "x:[batch,4]"
        """,
    )
    torch.save({"state_dict": torch.nn.Linear(4, 4).state_dict()}, tmp_path / "c.pt")
    result = invoked("--config", file)
    assert result.exit_code == 0, result.output
    assert (
        "c: note: two runs of the model on the same inputs give another output_0" in result.output
    )
    assert "c: unsupported: torchscript · forward.pt" in result.output
    [found] = json.loads((tmp_path / "fuseport-report/summary.json").read_text())["checkpoints"]
    assert any("two runs of the model" in note for note in found["notes"])


def test_all_of_a_file_is_exported_and_verified_with_one_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reuse, run):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    checkpoint = shutil.copytree(FIXTURES / "state_spaces", tmp_path / "mamba")
    good = """
        formats = "torchscript"
        programs = "forward"
        runtimes = "torchscript"
        [[checkpoint]]
        path = "mamba"
        """
    bad = """
        [[checkpoint]]
        name = "bad"
        path = "c.pt"
        """
    file = written(tmp_path, good + bad)
    result = invoked("--config", file)
    assert result.exit_code == 4, result.output
    assert "c.pt" in result.output
    folder = tmp_path / "fuseport-report"
    assert {path.name for path in folder.iterdir()} == {
        "bad.xml", "mamba.html", "mamba.json", "mamba.xml", "summary.json",
    }  # fmt: skip
    assert "c.pt" in (folder / "bad.xml").read_text()
    assert '<testcase name="bad" classname="fuseport"' in (folder / "bad.xml").read_text()
    saved = Report.from_json((folder / "mamba.json").read_text())
    assert saved.exit_code() == 0
    assert {row.runtime for row in saved.results} == {"torchscript", "float64"}
    summary = json.loads((folder / "summary.json").read_text())
    assert [c["exit_code"] for c in summary["checkpoints"]] == [0, 4]
    assert "| `mamba` | ✅ pass |" in (tmp_path / "summary.md").read_text()

    # Again: nothing changed, so the bundle is taken as it is, and a mended bug must go.
    stale = "[[checkpoint.expected]]\nreason = 'mended since'\n"
    result = invoked("--config", written(tmp_path, good + stale + bad), "--only", "mamba")
    assert result.exit_code == 1, result.output
    [outcome] = json.loads((folder / "summary.json").read_text())["checkpoints"]
    assert outcome["reused"] is True
    assert "mended since" in result.output

    # A bundle that changed is exported again, like that of a checkpoint that did.
    weights = next((tmp_path / "cache").rglob("weights.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    config = read(file)
    known = reuse.place(config.checkpoint[0], file)
    assert reuse.recorded(known, reuse.key(config.checkpoint[0])) is None
    assert (checkpoint / "config.json").is_file()
    assert invoked("--config", file, "--only", "none").exit_code == 2
