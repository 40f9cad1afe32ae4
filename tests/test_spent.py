"""A report says where the time went: what comparing costs can be told from it."""

import json
from pathlib import Path

import pytest

from fuseport.exporter import api
from fuseport.exporter.child import spent
from fuseport.exporter.child.spent import PARTS, Spent
from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.verify import truth
from fuseport.exporter.verify.report import Report


def test_a_part_within_another_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    monkeypatch.setattr(spent, "monotonic", lambda: next(clock))
    found = Spent()  # at 0
    with found.on("running"), found.on("comparing"):  # from 1 and 3 to 7 and 15
        pass
    assert (found.seconds["running"], found.seconds["comparing"]) == (10.0, 4.0)


def test_what_raises_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr(spent, "monotonic", lambda: next(clock))
    found = Spent()
    with pytest.raises(KeyError), found.on("truth"):
        raise KeyError
    assert found.seconds["truth"] == 2.0


def test_truth_is_computed_once_for_all_runtimes(
    state_spaces_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[object] = []
    exact = truth.in_float64

    def counted(*args: object) -> object:
        computed.append(args)
        return exact(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(truth, "in_float64", counted)
    runtimes = ["onnxruntime", "torchscript"]
    report = api.verify(state_spaces_bundle, runtime=runtimes)
    cases = {row.case for row in report.results if row.runtime in runtimes}
    assert len(computed) == len(cases) == 6
    assert set(report.spent) == set(PARTS)
    for part in set(PARTS) - {"localising"}:
        assert report.spent[part] > 0.0, part
    again = Report.from_json(report.to_json())
    assert again.spent == {part: round(seconds, 3) for part, seconds in report.spent.items()}
    content = json.loads(report.to_json())
    del content["spent"]
    assert Report.from_json(json.dumps(content)).spent == {}, "of an earlier version"
    content["spent"] = {"truth": "long"}
    with pytest.raises(CorruptInput, match="spent"):
        Report.from_json(json.dumps(content))
