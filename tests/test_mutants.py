"""Planted bugs in ops: the catalogue, and that the checks see it and cry no wolf."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter.user_code.op_choice import own_ops
from fuseport.exporter.verify import compare
from fuseport.exporter.verify.mutants.catalogue import CATALOGUE
from fuseport.exporter.verify.mutants.kinds import Kind, Mutant
from fuseport.exporter.verify.mutants.ops import attempt, clean
from fuseport.exporter.verify.mutants.ops import mutants as mutants_of
from fuseport.exporter.verify.mutants.planting import planted
from fuseport.exporter.verify.mutants.report import Clean, Planted, Power
from fuseport.exporter.verify.op_check import first_failure, wanted_checks
from fuseport.exporter.verify.op_check.subject import Subject, sample
from fuseport.ops import OPS, registration
from fuseport.ops.spec import Inputs, OpSpec, Outputs, Run, as_tuple

MY_OPS = Path(__file__).parent.parent / "fixtures" / "own_ops" / "my_ops.py"
QUICK = wanted_checks((), quick=True)
CHEAP = ("third call", "value", "backward", "gradcheck", "fake", "inputs", "threads")
DRAWN = 2  # of each op; tests/benchmarks/power.py plants all


def test_the_catalogue_has_more_than_25_kinds_each_under_one_name() -> None:
    names = [kind.name for kind in CATALOGUE]
    assert len(names) == len(set(names)) > 25
    assert {kind.where for kind in CATALOGUE} == {
        "forward", "gradient", "fake", "lowering", "artifact"
    }  # fmt: skip
    assert all(kind.description for kind in CATALOGUE)


@pytest.mark.parametrize(
    "published",
    ["mamba#37", "mamba#885", "VMamba", "transformers, the slow path", "SiLU's derivative",
     "RMSNorm", "grad_input = grad_output", "swaps dz and out_z", "softplus off", "pytorch#108670"],
)  # fmt: skip
def test_published_mistakes_are_in_it(published: str) -> None:
    sources = [kind.source for kind in CATALOGUE]
    sources += [bug.source for spec in OPS.values() for bug in spec.bugs]
    assert any(published in source for source in sources)


@pytest.mark.parametrize("name", OPS)
def test_a_sample_of_the_bugs_of_every_op_is_caught(name: str) -> None:
    registration.ensure(OPS[name])
    found = mutants_of(OPS[name])
    assert len({m.label for m in found}) == len(found), "a mutant is known by its label"
    for mutant in random.Random(f"1 {name}").sample(found, DRAWN):
        result = attempt(OPS[name], mutant, QUICK)
        seen, no_bug = result.caught_by is not None, result.equivalent is not None
        assert seen != no_bug, f"{mutant.label}: {result.reason}"


@pytest.mark.parametrize("name", OPS)
def test_bugs_that_only_one_op_can_have_are_caught_by_its_own_checks(name: str) -> None:
    spec = OPS[name]
    registration.ensure(spec)
    declared = [(bug.name, bug.operator) for bug in spec.bugs]
    found = [m for m in mutants_of(spec) if (m.kind.name, m.operator) in declared]
    assert len(found) == len(declared)
    for mutant in random.Random(name).sample(found, min(2, len(found))):
        assert attempt(spec, mutant, QUICK).caught_by in ("value", "backward"), mutant.label


@pytest.mark.parametrize("where", ["forward", "gradient", "fake"])
def test_planting_nothing_is_no_alarm(where: Any) -> None:
    """What is caught is the bug, not that something was planted."""
    spec = OPS["rms_norm"]
    registration.ensure(spec)
    for operator in spec.operators:
        kind = Kind("nothing", "as it is", where)
        mutant = Mutant(spec.name, kind, operator.name, "", lambda right, given: right(given))
        with planted(spec, mutant) as same:
            subject = Subject(same, sample(spec.cases, 2, 0), 0)
            assert first_failure(subject, CHEAP) is None


def test_what_was_planted_is_gone_afterwards() -> None:
    spec = OPS["swiglu"]
    registration.ensure(spec)
    given = torch.randn(2, 3), torch.randn(2, 3)
    [before] = spec.operators[0](*given)
    for mutant in mutants_of(spec, everywhere=False):
        if mutant.kind.where != "lowering":
            with planted(spec, mutant):
                pass
            [after] = spec.operators[0](*given)
            assert torch.equal(before, after), mutant.label


def test_clean_runs_of_a_user_op_are_no_alarm() -> None:
    with own_ops(str(MY_OPS)) as own:
        assert own is not None
        runs = list(clean(own.specs[0], QUICK, [3], [torch.float32, torch.bfloat16], 1))
    assert len(runs) > 10
    assert not [run for run in runs if run.alarm]
    assert all(run.trials for run in runs)


def few() -> tuple[OpSpec, tuple[Mutant, ...]]:
    spec = OPS["swiglu"]
    registration.ensure(spec)
    wanted = ("gradient off by 1 %", "gradient's sign", "off by 1 %")
    small = replace(spec, cases=tuple(c for c in spec.cases if c.name in ("plain", "channels_17")))
    assert small.cases
    return small, tuple(m for m in mutants_of(small) if m.kind.name in wanted)


def power(results: list[Planted]) -> Power:
    return Power(tuple(results), (Clean("x", "value", "float32", 0, 1, None),), 0, {}, 0.0)


def test_a_verifier_without_its_gate_of_accuracy_is_seen_to_be_weak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, some = few()
    names = ["backward", "value"]
    assert power([attempt(spec, mutant, names) for mutant in some]).exit_code() == 0
    monkeypatch.setattr(compare, "_bounds", lambda *args: (float("inf"), float("inf")))
    weak = power([attempt(spec, mutant, names) for mutant in some])
    assert weak.exit_code() == 1
    assert weak.caught < 0.99 * len(weak.counted)
    assert all("of it" in str(missed.reason) for missed in weak.missed)


def test_false_alarms_and_claims_that_are_refuted_are_no_success() -> None:
    caught = Planted("op", "kind", "forward", "f", "out", "value", "off")
    alarm = Clean("op", "value", "float32", 0, 3, "off by 1")
    assert power([caught]).exit_code() == 0
    assert Power((caught,), (alarm,), 0, {}, 0.0).exit_code() == 1
    assert power([caught, replace(caught, equivalent="it is symmetric")]).exit_code() == 1
    assert Power((), (alarm,), 0, {}, 0.0).exit_code() == 6
    untried = replace(power([caught]), lost=("gradient.pt2",))
    assert untried.exit_code() == 6, "a file of which no wrong copies were made"
    assert replace(untried, clean=(alarm,)).exit_code() == 1
    missed = replace(caught, caught_by=None, reason="nearest to its bound, 0.1 of it")
    assert power([caught] * 99 + [missed]).exit_code() == 0
    assert power([caught] * 98 + [missed] * 2).exit_code() == 1
    assert "0.1 of it" in "\n".join(power([missed]).lines())


def test_what_is_none_by_mathematics_is_listed_and_not_counted() -> None:
    spec = OPS["swiglu"]
    registration.ensure(spec)

    def same(right: Run, given: Inputs) -> Outputs:
        return right(given)

    mutant = Mutant("swiglu", Kind("swap", "", "forward", ("value",)), "swiglu", "out", same)
    data = replace(spec, no_bugs={"swap: swiglu: out": "it is symmetric"})
    result = attempt(data, mutant, ["value"])
    assert result.caught_by is None
    assert result.equivalent == "it is symmetric"
    report = power([result, replace(result, caught_by="value", equivalent=None)])
    assert len(report.counted) == 1
    assert any("no bug" in line and "symmetric" in line for line in report.lines())


def test_threads_that_change_torch_s_own_bits_are_no_mistake_and_those_of_an_op_are() -> None:
    """On some processors a product's bits depend on their number: of an op in plain torch, too."""
    spec = OPS["deform_conv2d"]
    registration.ensure(spec)
    larger = tuple(case for case in spec.cases if case.name == "larger")
    operator = spec.operator(larger[0].operator)

    def plainly(right: Run, given: Inputs) -> Outputs:
        return dict(
            zip(operator.outputs, as_tuple(operator.reference(*given.values())), strict=True)
        )

    kind = Kind("in plain torch", "", "forward", ("threads",))
    with planted(spec, Mutant(spec.name, kind, operator.name, "out", plainly)):
        assert first_failure(Subject(spec, larger, 0), ["threads"]) is None
    races = (m for m in mutants_of(spec) if m.kind.name == "race of threads")
    race = next(m for m in races if m.operator == larger[0].operator)
    assert attempt(replace(spec, cases=larger), race, ["threads"]).caught_by == "threads"


def test_the_command_goes_on_where_a_child_dies_of_a_bug(tmp_path: Path) -> None:
    """Who dies of a bug has shown it; the others are planted by another child."""
    # Of another name, since torch has an operator once.
    code = MY_OPS.read_text(encoding="utf-8").replace("mylib", "fatallib")
    code = code.replace("import torch\n", "import os\nimport torch\n", 1).replace(
        "    cases=(Case(",
        "    bugs=(PlantedBug('fatal', 'it ends the process', 'squared_relu',"
        " lambda right, given: os._exit(3)),),\n    cases=(Case(",
    )
    code = code.replace("OpSpec\n", "OpSpec, PlantedBug\n", 1)
    (tmp_path / "fatal.py").write_text(code, encoding="utf-8")
    file = tmp_path / "power.json"
    place = str(tmp_path / "fatal.py")
    asked = ["ops", "check", "--ops", place, "--mutants", "--quick", "--json", str(file)]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "planted bugs (100.0%), 0 false alarms in" in " ".join(done.output.split())
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["schema"] == "fuseport.power/1"
    [fatal] = [p for p in content["planted"] if p["kind"] == "fatal"]
    assert fatal["caught_by"] == "its process"
    assert len([p for p in content["planted"] if p["where"] == "lowering"]) > 2
    assert len(content["clean"]) > 20


def test_the_command_refuses_a_part_of_the_checks() -> None:
    done = CliRunner().invoke(main, ["ops", "check", "--mutants", "--only", "value"])
    assert done.exit_code == 2
