"""The vocabulary: its cases mean something, its suite sees faults, its files can be read by others.

`make test-all` runs the whole of it.
"""

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file

from fuseport.exporter.commands.cases import cases as command
from fuseport.exporter.errors import StorageError, UsageError
from fuseport.exporter.verify import vocabulary
from fuseport.exporter.verify.vocabulary import PlainRow
from fuseport.exporter.verify.vocabulary.exceptions import EXCEPTIONS, applied
from fuseport.exporter.verify.vocabulary.files import INDEX, SCHEMA, dump
from fuseport.exporter.verify.vocabulary.subject import name_of
from fuseport.ops.vocabulary import CASES, OPERATORS

Array = np.ndarray[Any, Any]
SEED = 3


def drawn(seed: int) -> list[Any]:
    """One case of each operator."""
    draw = random.Random(seed)
    return [draw.choice([c for c in CASES if c.operator == name]) for name in OPERATORS]


def test_every_operator_passes_in_every_quick_runtime_or_states_why_not() -> None:
    report = vocabulary.check(drawn(SEED), seed=SEED)
    assert report.exit_code() == 0, report.lines()
    assert set(report.by_runtime) == set(vocabulary.QUICK)
    assert all(counts["pass"] > len(OPERATORS) for counts in report.by_runtime.values())
    assert json.loads(report.to_json())["summary"] == report.summary


def test_names_are_unique_and_every_operator_has_cases() -> None:
    names = [name_of(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.operator for case in CASES} == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_cases_repeat_themselves_and_have_the_gradients_they_claim(name: str) -> None:
    for case in (case for case in CASES if case.operator == name):
        once, again = (case.make(torch.float64, 0) for _ in range(2))
        assert all(torch.equal(once[k], again[k]) for k in once)
        leaves = {k: t.requires_grad_(k in case.differentiable) for k, t in once.items()}
        result = OPERATORS[name].function(**case.arguments(leaves))
        outputs = result if isinstance(result, dict) else {"output": result}
        assert tuple(outputs) == OPERATORS[name].outputs
        assert all(t.requires_grad for t in outputs.values()), case.name


ROW = PlainRow("add", "plain", "onnxruntime", "gradient", "run", "pass")
HARD = vocabulary.exceptions.Stated("add", "it is hard", runtime="onnx*")


def test_what_is_unsupported_must_be_stated_and_what_is_stated_must_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = replace(ROW, verdict="unsupported", reason="no kernel")
    [row] = applied(iter([lacking]))
    assert row.verdict == "fail"
    assert "not stated" in str(row.reason)
    monkeypatch.setattr(vocabulary.exceptions, "EXCEPTIONS", (HARD,))
    for verdict in ("unsupported", "fail", "error"):
        [row] = applied(iter([replace(lacking, verdict=verdict)]))
        assert (row.verdict, row.reason) == ("unsupported", "it is hard")
        assert row.found == f"{verdict}: no kernel"
    [row] = applied(iter([ROW]))
    assert row.verdict == "fail"
    assert "take it out: it is hard" in str(row.reason)
    [row] = applied(iter([replace(ROW, runtime="eager")]))
    assert row.verdict == "pass"


def test_every_exception_is_about_a_case_and_a_runtime_that_is() -> None:
    rows = [
        PlainRow(case.operator, case.name, runtime, kind, "run", "fail")
        for case in CASES
        for runtime in vocabulary.QUICK
        for kind in ("forward", "gradient")
    ]

    def is_about_some(entry: Any) -> bool:
        return any(replace(entry, torch="").about(row) for row in rows)

    assert all(map(is_about_some, (*EXCEPTIONS, HARD)))
    assert not is_about_some(replace(HARD, operator="addd"))


def test_an_exception_of_other_versions_of_torch_is_none() -> None:
    here = torch.__version__.partition("+")[0]
    assert replace(HARD, torch=f"<={here}").about(ROW)
    assert not replace(HARD, torch=f"!={here}").about(ROW)


def test_a_wrong_operator_fails_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where truth is computed; the runtime `eager` has the good one."""
    wrong = replace(OPERATORS["tanh"], function=lambda input: torch.tanh(input) * 1.001)
    monkeypatch.setitem(OPERATORS, "tanh", wrong)
    cases = [case for case in CASES if name_of(case) == "tanh: plain"]
    report = vocabulary.check(cases, runtime=["eager"])
    assert report.exit_code() == 1
    assert {row.verdict for row in report.results} == {"fail"}


def test_an_unknown_operator_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="addd is not an operator; there are: add, sub"):
        vocabulary.chosen(["addd"])


# A foreign engine: three operators by hand in numpy.


def summed(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Over the dimensions along which an input was broadcast."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    ones = tuple(i for i, n in enumerate(shape) if n == 1)
    return gradient.sum(ones, keepdims=True).reshape(shape)


def mul(dy: Array, input: Array, other: Any) -> tuple[Array, dict[str, Array]]:
    gradients = {"input": summed(dy * other, input.shape)}
    if isinstance(other, np.ndarray):
        gradients["other"] = summed(dy * input, other.shape)
    return input * other, gradients


def softmax(dy: Array, input: Array, dim: int) -> tuple[Array, dict[str, Array]]:
    if not input.size:
        return input, {"input": dy}
    powers = np.exp(input - input.max(dim, keepdims=True))
    y = powers / powers.sum(dim, keepdims=True)
    return y, {"input": y * (dy - (y * dy).sum(dim, keepdims=True))}


def embedding(
    dy: Array, input: Array, weight: Array, padding_idx: int = -1
) -> tuple[Array, dict[str, Array]]:
    gradient = np.zeros_like(weight)
    np.add.at(gradient, input, dy)
    if padding_idx >= 0:
        gradient[padding_idx] = 0
    return weight[input], {"weight": gradient}


ENGINE: dict[str, Callable[..., tuple[Array, dict[str, Array]]]] = {
    "mul": mul,
    "softmax": softmax,
    "embedding": embedding,
}


def mistakes(folder: Path, engine: dict[str, Callable[..., Any]]) -> set[str]:
    """The cases in which an engine is wrong, by the files alone."""
    index = json.loads((folder / INDEX).read_text())
    assert index["schema"] == SCHEMA
    wrong = set()
    for case in index["cases"]:
        tensors = load_file(folder / case["file"])
        for name, said in case["tensors"].items():
            assert list(tensors[name].shape) == said["shape"]
            assert str(tensors[name].dtype) == said["dtype"]
        given = {a: tensors[f"input/{n}"].copy() for a, n in case["arguments"].items()}
        dy = tensors["cotangent/output"].astype("float64")
        wide = {a: t.astype("float64") if t.dtype.kind == "f" else t for a, t in given.items()}
        y, gradients = engine[case["operator"]](dy, **wide, **case["attributes"])
        found = {"output/output": y}
        for argument, gradient in gradients.items():
            name = f"gradient/{case['arguments'][argument]}"
            found[name] = found.get(name, 0) + gradient
        exact = {n: t for n, t in tensors.items() if n.startswith(("output/", "gradient/"))}
        if set(found) != set(exact) or not all(
            np.allclose(found[n], exact[n], rtol=1e-12, atol=1e-12) for n in exact
        ):
            wrong.add(f"{case['operator']}: {case['name']}")
    return wrong


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the engine's operators."""
    folder = tmp_path_factory.mktemp("dump") / "cases"
    assert dump(folder, only=list(ENGINE)) == sum(case.operator in ENGINE for case in CASES)
    return folder


def test_another_engine_can_be_held_against_the_files(dumped: Path) -> None:
    assert mistakes(dumped, ENGINE) == set()


def test_a_bug_in_another_engine_is_seen_in_the_files(dumped: Path) -> None:
    def unsummed(dy: Array, input: Array, other: Any) -> tuple[Array, dict[str, Array]]:
        """Keeps one of the gradients that broadcasting makes, instead of their sum."""
        y, gradients = mul(dy, input, other)
        if isinstance(other, np.ndarray) and other.shape == (4,) and input.ndim == 3:
            gradients["other"] = (dy * input)[0, 0]
        return y, gradients

    assert mistakes(dumped, {**ENGINE, "mul": unsummed}) == {"mul: broadcast from the right"}


def test_files_have_the_same_bytes_each_time_and_say_their_hashes(
    dumped: Path, tmp_path: Path
) -> None:
    dump(tmp_path / "again", only=list(ENGINE))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dump(tmp_path / "third", only=list(ENGINE))
    torch.set_num_threads(threads)
    files = sorted(p.relative_to(dumped) for p in dumped.rglob("*") if p.is_file())
    for other in (tmp_path / "again", tmp_path / "third"):
        assert sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file()) == files
        assert all((other / f).read_bytes() == (dumped / f).read_bytes() for f in files)
    index = json.loads((dumped / INDEX).read_text())
    for case in index["cases"]:
        assert hashlib.sha256((dumped / case["file"]).read_bytes()).hexdigest() == case["sha256"]
    dump(tmp_path / "other", only=["mul"], seed=1)
    name = "mul/plain.safetensors"
    assert (tmp_path / "other" / name).read_bytes() != (dumped / name).read_bytes()


def test_fused_ops_are_dumped_too(tmp_path: Path) -> None:
    dump(tmp_path / "cases", only=["rms_norm"], dtype="bfloat16")
    index = json.loads((tmp_path / "cases" / INDEX).read_text())
    assert index["operators"]["rms_norm"]["op"] == "rms_norm"
    case = next(case for case in index["cases"] if case["tensors"]["input/x"]["shape"][-1:] != [0])
    assert case["tensors"]["input/x"]["dtype"] == "bfloat16"
    assert case["tensors"]["gradient/x"]["dtype"] == "float64"


def test_a_folder_of_other_things_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds something other than cases"):
        dump(tmp_path / "mine", only=["neg"], force=True)
    dump(tmp_path / "cases", only=["neg"])
    with pytest.raises(UsageError, match="--force replaces them"):
        dump(tmp_path / "cases", only=["neg"])
    dump(tmp_path / "cases", only=["abs"], force=True)
    assert not (tmp_path / "cases" / "neg").exists()


def test_an_index_that_cannot_be_read_is_no_other_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(tmp_path / "cases", only=["neg"])

    def failing(*_: object, **__: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(StorageError, match=r"index\.json: cannot be read: Input/output error"):
        dump(tmp_path / "cases", only=["neg"], force=True)


def test_the_command_lists_checks_and_dumps(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(command, list(arguments), catch_exceptions=False)

    assert "conv2d" in run("list").stdout
    assert "neg: plain" in run("list", "--only", "neg").stdout
    done = run("dump", str(tmp_path / "cases"), "--only", "neg", "--dtype", "float64")
    assert f"{tmp_path / 'cases'}: 6 cases" in done.stdout
    done = run("check", "--only", "neg", "--runtime", "torchscript", "--json", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["summary"]["pass"] == 18
