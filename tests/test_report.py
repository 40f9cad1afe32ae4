"""A report: its JSON, its table, its lines, and the code that a command ends with."""

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.verify.diagnosis import Diagnosis, Divergence
from fuseport.exporter.verify.report import FLOAT64, Report, Row

GRADIENT = "grad/backbone.layers.0.mixer.x_proj.weight"
PASSED = Row(
    "onnxruntime",
    "CPUExecutionProvider",
    "gradient.onnx",
    "gradient",
    "run",
    "export",
    GRADIENT,
    "pass",
    max_abs_error=1.2e-7,
    rms_error=2e-8,
    baseline_error=1e-7,
    bound=4.1e-7,
    rms_bound=1e-7,
    would_pass_at=1.2e-7,
)
FAILED = replace(
    PASSED,
    tensor="grad/w",
    verdict="fail",
    reason="off by 1 where 4.1e-07 is allowed",
    max_abs_error=1.0,
    would_pass_at=1.0,
)
DIED = Row(
    "torchscript",
    None,
    "forward.pt",
    "gradient",
    "autograd",
    "export",
    "*",
    "error",
    "killed by SIGSEGV",
    crash=True,
)
ABSENT = Row(
    "onnxruntime", None, "*", "*", "run", "*", "*", "unsupported", "onnxruntime is not installed"
)
FORM = Row("eager", None, "model", "gradient", "autograd forms", "export", "on one thread", "pass")
SAMPLE = replace(PASSED, runtime=FLOAT64, provider=None, artifact="samples")


OTHER = replace(PASSED, program="forward", verdict="unsupported", reason="unstable")
DIAGNOSED = Diagnosis(
    "onnxruntime",
    "gradient.onnx",
    "gradient",
    "run",
    "export",
    "runtime",
    "the same file in onnx_reference is right",
    Divergence("mm_7", "aten::mm", "backbone.layers.0", "backward", "wrong here", 1.0, 4.1e-7),
    "intermediates",
)


def report(*rows: Row, **changes: Any) -> Report:
    return replace(
        Report("b", "0" * 64, {"cpus": 2}, 12.34567, tuple(rows), ("a note",)), **changes
    )


def shown(found: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(found.table(width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("rows", "code", "strict"),
    [
        ((PASSED,), 0, 0),
        ((PASSED, FAILED), 1, 1),
        ((PASSED, DIED), 6, 6),
        ((PASSED, ABSENT), 0, 1),
        ((ABSENT,), 5, 1),
        ((DIED, FAILED, ABSENT), 1, 1),
        ((DIED, ABSENT), 6, 1),
        # Nothing compared is never a pass; nor is float64 compared with itself.
        ((), 6, 6),
        ((SAMPLE,), 6, 6),
        ((SAMPLE, ABSENT), 5, 1),
        ((SAMPLE, PASSED), 0, 0),
        # Nor a runtime with itself.
        ((SAMPLE, FORM), 6, 6),
        ((FORM, replace(PASSED, verdict="unsupported")), 5, 1),
        ((replace(SAMPLE, verdict="fail"), PASSED), 1, 1),
        # Nor one program of two, where no runtime has a row of the other.
        ((PASSED, OTHER), 5, 1),
        ((PASSED, OTHER, replace(OTHER, runtime="eager", verdict="pass")), 0, 1),
    ],
)
def test_exit_code(rows: tuple[Row, ...], code: int, strict: int) -> None:
    assert report(*rows).exit_code() == code
    assert report(*rows).exit_code(strict=True) == strict


def test_json_is_version_1() -> None:
    content = json.loads(report(PASSED, FAILED, DIED).to_json())
    assert content["schema"] == "fuseport.report/1"
    assert set(content) >= {"bundle", "manifest_sha256", "environment", "seconds", "results"}
    assert content["seconds"] == 12.346
    assert content["summary"] == {"pass": 1, "fail": 1, "unsupported": 0, "error": 1}
    row = content["results"][0]
    named = {
        "runtime": "onnxruntime",
        "provider": "CPUExecutionProvider",
        "program": "gradient",
        "case": "export",
        "tensor": GRADIENT,
        "verdict": "pass",
        "reason": None,
        "max_abs_error": 1.2e-7,
        "baseline_error": 1e-7,
        "bound": 4.1e-7,
        "would_pass_at": 1.2e-7,
    }
    assert {key: row[key] for key in named} == named


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_is_valid_with_what_json_lacks(value: float) -> None:
    row = replace(FAILED, max_abs_error=value, rms_bound=value, would_pass_at=value)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads(report(row).to_json(), parse_constant=refuse)
    assert content["results"][0]["max_abs_error"] is None
    assert "--atol" not in report(row).failures()[0]


def test_json_round_trip() -> None:
    original = report(PASSED, FAILED, DIED, ABSENT, seconds=1.5)
    original = replace(original, diagnoses=(DIAGNOSED, replace(DIAGNOSED, divergence=None)))
    assert Report.from_json(original.to_json()) == original


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "other/1"}', "{", "null"])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(CorruptInput):
        Report.from_json(text)


def test_failures_come_worst_first_one_line_each() -> None:
    worse = replace(FAILED, tensor="grad/v", max_abs_error=5.0, would_pass_at=5.0)
    shape = replace(FAILED, tensor="y", reason="shape 3 where the model has 3×3")
    shape = replace(shape, max_abs_error=None, rms_error=None, would_pass_at=None)
    lines = report(PASSED, ABSENT, DIED, FAILED, worse, shape).failures()
    assert lines == [
        "fail: onnxruntime · gradient.onnx · gradient · export · y: "
        "shape 3 where the model has 3×3",
        "fail: onnxruntime · gradient.onnx · gradient · export · grad/v: "
        "off by 1 where 4.1e-07 is allowed; would pass at --atol 5",
        "fail: onnxruntime · gradient.onnx · gradient · export · grad/w: "
        "off by 1 where 4.1e-07 is allowed; would pass at --atol 1",
        "error: torchscript · forward.pt · gradient · by autograd · export: killed by SIGSEGV",
        "unsupported: onnxruntime: onnxruntime is not installed",
    ]


def test_the_table_names_each_artifact_and_the_tensor_closest_to_its_bound() -> None:
    near = replace(PASSED, tensor="grad/b", max_abs_error=3.9e-7)
    lines = shown(report(PASSED, near, DIED, ABSENT)).splitlines()
    assert any(line.split() == ["onnxruntime"] for line in lines)
    row = next(line for line in lines if "gradient.onnx" in line)
    assert row.split() == ["gradient.onnx", "2", "gradients", "pass", "0.95", "grad/b"]
    row = next(line for line in lines if "forward.pt" in line)
    assert row.split() == ["forward.pt,", "autograd", "error"]


def test_the_table_shows_a_failure_before_any_pass() -> None:
    shape = replace(FAILED, tensor="y", max_abs_error=None, rms_error=None)
    row = next(
        line for line in shown(report(PASSED, shape)).splitlines() if "gradient.onnx" in line
    )
    assert row.split() == ["gradient.onnx", "1", "gradient", "fail", "y"]


def test_the_table_fits_80_columns() -> None:
    runtimes = ("exported_program", "onnx_reference", "torchscript")
    rows = [
        replace(PASSED, runtime=r, artifact=a, way=w, tensor=f"{GRADIENT}{i}")
        for r in runtimes
        for a, w in (("gradient.onnx", "run"), ("forward.pt2", "autograd"))
        for i in range(120)
    ]
    text = shown(report(*rows))
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("forward.pt2, autograd", "120 gradients", "0.29", ".x_proj.weight"):
        assert whole in text


def test_a_wide_table_has_the_whole_names() -> None:
    long = f"{GRADIENT}7"
    text = shown(report(replace(PASSED, tensor=long)), 61 + len(long))
    assert long in text
    assert max(map(len, text.splitlines())) <= 61 + len(long)
