"""What the command prints, where, and the code that it ends with."""

import json
import logging
import logging.handlers
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter.commands._shared import progress
from fuseport.exporter.commands.export import _next

REPOSITORY = Path(__file__).parent.parent
FIXTURES = REPOSITORY / "fixtures"
COMMANDS = sorted(main.commands)


def fuseport(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fuseport.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert re.search(rf"Examples?:\n\s+fuseport {command}", result.output)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"fuseport {command}" in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_help_is_quick_to_import() -> None:
    code = "import sys, fuseport.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def pickle_with_code(folder: Path) -> Path:
    import os
    import pickle

    class Code:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {folder / 'canary'}",)

    path = folder / "model.ckpt"
    path.write_bytes(pickle.dumps({"state_dict": Code()}))
    return path


def other_architecture(folder: Path) -> Path:
    import torch

    path = folder / "other.pt"
    torch.save(torch.nn.Linear(3, 4).state_dict(), path)
    return path


def garbage(folder: Path) -> Path:
    path = folder / "garbage.ckpt"
    path.write_bytes(bytes(range(256)) * 64)
    return path


def missing(folder: Path) -> Path:
    return folder / "missing.ckpt"


@pytest.mark.parametrize("words", [("export", "-o", "b"), ("inspect",)], ids=["export", "inspect"])
def test_what_is_not_there_is_told_before_torch_is_loaded(words: tuple[str, ...]) -> None:
    code = (
        "import sys; from fuseport.cli import main\n"
        f"try: main([*{words!r}, 'no/such.ckpt'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr == "fuseport: no/such.ckpt: there is no such file or folder; check the path\n"
    )


@pytest.mark.parametrize(
    ("make", "code"), [(missing, 2), (pickle_with_code, 3), (garbage, 4), (other_architecture, 5)]
)
def test_bad_checkpoints(make: "object", code: int, tmp_path: Path) -> None:
    assert callable(make)
    path = make(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    done = fuseport("export", path, "-o", tmp_path / "bundle")
    assert done.returncode == code
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fuseport: ")
    assert path.name in last
    assert "Traceback" not in done.stderr
    assert {p.name for p in tmp_path.iterdir()} == before  # no output, no canary
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--format", "tflite", "torchscript"),
        ("--program", "backward", "gradient"),
        ("--opset", "5", "18"),
        ("--dtype", "int8", "bfloat16"),
        ("--model", "nowhere.py:Net", "nowhere.py"),
        ("--model", "no_colon", "module:callable"),
        ("--input-shapes", "x=3", "[batch"),
    ],
)
def test_bad_options(option: str, value: str, word: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / "lightning" / "mamba-kjv.ckpt"
    words = ["export", str(checkpoint), "-o", str(tmp_path / "b"), option, value]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert word in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_verify_says_whence_it_knows_stand_ins() -> None:
    done = CliRunner().invoke(main, ["verify", "bundle", "--shim", "auto"])
    assert done.exit_code == 2
    assert "--shim is of export: a bundle says which stand-ins its model wants" in done.output
    assert "--shim" not in CliRunner().invoke(main, ["verify", "--help"]).output


def test_an_output_that_is_no_bundle_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint = FIXTURES / "lightning" / "mamba-kjv.ckpt"
    done = fuseport("export", checkpoint, "-o", tmp_path, "--force")
    assert done.returncode == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_verify_of_what_is_no_bundle(tmp_path: Path) -> None:
    assert fuseport("verify", tmp_path / "nothing").returncode == 2
    assert fuseport("verify", tmp_path).returncode == 4


def test_debug_may_stand_anywhere(tmp_path: Path) -> None:
    for arguments in (("--debug", "verify", tmp_path / "b"), ("verify", tmp_path / "b", "--debug")):
        done = fuseport(*arguments)
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("fuseport: ")


def test_an_unknown_runtime_lists_those_there_are(lightning_bundle: Path) -> None:
    done = fuseport("verify", lightning_bundle, "--runtime", "tensorrt")
    assert done.returncode == 2
    assert "onnxruntime" in done.stderr


def test_names_are_given_with_commas_or_several_times(lightning_bundle: Path) -> None:
    wanted = ["eager", "torchscript"]
    for words in (["--runtime", ",".join(wanted)], [f"--runtime={name}" for name in wanted]):
        done = fuseport("verify", lightning_bundle, "--json=-", *words)
        assert done.returncode == 0, done.stderr
        found = {row["runtime"] for row in json.loads(done.stdout)["results"]}
        assert found - {"float64"} == set(wanted)
    done = fuseport("verify", lightning_bundle, "--runtime", "onnxruntime,")
    assert done.returncode == 2
    assert "a name is empty" in done.stderr


def test_sizes_may_be_given_several_times(tmp_path: Path) -> None:
    checkpoint = FIXTURES / "lightning" / "mamba-kjv.ckpt"
    words = ["export", str(checkpoint), "-o", str(tmp_path / "b")]
    result = CliRunner().invoke(main, [*words, "--size", "length=none", "--size", "batch=3"])
    assert result.exit_code == 2
    assert "--size length=none,batch=3: write DIM=N" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_behind(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Fault 21. test_interrupted.py has more moments."""
    checkpoint = FIXTURES / "lightning" / "mamba-kjv.ckpt"
    command = [
        sys.executable, "-m", "fuseport.cli", "export", checkpoint, "-o", tmp_path / "bundle",
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # What a shell runs in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if b"writing" in line:  # in the middle of the staged folder
                break
        time.sleep(0.2)
        run.send_signal(number)
        run.stderr.read()
        run.wait(timeout=120)
    assert run.returncode == code
    assert not list(tmp_path.iterdir())


def test_threads_sleep_while_they_wait_but_where_time_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spinning, truth took ten times as long on a machine with other work."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with progress():
        assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"  # as the user says
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with progress(timed=True):
        assert "OMP_WAIT_POLICY" not in os.environ
    with progress():
        code = "import os; print(os.environ['OMP_WAIT_POLICY'])"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout.strip() == "PASSIVE"


def test_doctor_says_what_is_here() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    for word in ("torch", "ONNX Runtime", "compiler", "GPU", "selective_scan"):
        assert word in result.output


def test_what_takes_long_is_told_and_warnings_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """A library that is compiled, and an op that runs without one, are logged by `fuseport.ops`."""
    logger = logging.getLogger("fuseport")
    before = list(logger.handlers), logger.level
    with progress() as tell:
        tell("reading")
        logger.info("compiling")
        logger.warning("fuseport: slowly")
    reading, compiling, warning = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r" +\d+\.\d s  reading", reading)
    assert re.fullmatch(r" +\d+\.\d s  compiling", compiling)
    assert warning == "fuseport: slowly"
    assert (logger.handlers, logger.level) == before


def test_the_next_command_has_the_same_model_and_ops() -> None:
    example = FIXTURES / "own_ops"
    model, ops = f"{example / 'net.py'}:Net", str(example / "my_ops.py")
    assert _next(Path("a b"), model, ops) == f"fuseport verify 'a b' --model {model} --ops {ops}"
    assert _next(Path("b"), None, None) == "fuseport verify b"


def test_that_truth_takes_transformers_plain_path_is_not_told() -> None:
    """It says so of every model, as if something were wrong; other things that it says are told."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    heard = logging.handlers.BufferingHandler(10)
    logger.addHandler(heard)
    try:
        for _ in range(2):
            with progress():
                logger.warning("`scan` is falling back to its reference PyTorch implementation")
                logger.warning("another thing")
        logger.warning("`scan` is falling back to its reference PyTorch implementation")
    finally:
        logger.removeHandler(heard)
    said = [record.getMessage() for record in heard.buffer]
    assert said[:2] == ["another thing"] * 2
    assert len(said) == 3
