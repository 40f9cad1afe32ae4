"""The faces of a report that programs and CI systems read: JUnit XML, Markdown, and JSON back."""

import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from fuseport.exporter.commands._shared import show
from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.program.backward_forms import AT_ONCE, FORMS
from fuseport.exporter.verify.diagnosis import Diagnosis, Divergence
from fuseport.exporter.verify.report import FLOAT64, Report, Row
from fuseport.exporter.verify.report.markdown import LIMIT, to_markdown
from fuseport.exporter.verify.report.parts import diagnosis_text, figure, hint, rounded_up
from fuseport.exporter.verify.report.terminal import lines, table

PASSED = Row(
    "onnxruntime", "CPUExecutionProvider", "gradient.onnx", "gradient", "run", "export",
    "grad/layers.0.D", "pass", None, False, 1e-7, 2e-8, 1e-7, 4e-7, 1e-7, 1e-7, 1.0,
)  # fmt: skip
FAILED = replace(
    PASSED, tensor="grad/layers.1.D", verdict="fail", reason="off by 1", max_abs_error=1.0,
    would_pass_at=1.0, scale=1e4, atol_at_rtol={"1e-06": 0.5},
)  # fmt: skip
DIED = replace(
    PASSED, runtime="torchscript", artifact="forward.pt", way="autograd", tensor="*",
    verdict="error", reason="killed by SIGSEGV", crash=True, max_abs_error=None, bound=None,
)  # fmt: skip
ABSENT = Row("aot", None, "*", "*", "run", "*", "*", "unsupported", "not installed")
DIAGNOSED = Diagnosis(
    "onnxruntime", "gradient.onnx", "gradient", "run", "export", "runtime", "another is right",
    Divergence("mm_7", "aten::mm", "layers.1", "backward", "wrong here", 1.0, 4e-7),
)  # fmt: skip
HOSTILE = "a\x00\x1b[31m\ufffe|`*_[x](http://e)<script>alert(1)</script>&amp;\n\"']]>\r--><b>"


def report(*rows: Row, **changes: Any) -> Report:
    made = Report("b", "0" * 64, {"cpus": 2, "versions": {"torch": "2"}}, 12.3, tuple(rows), ("n",))
    return replace(made, **changes)


EVERYTHING = report(PASSED, FAILED, DIED, ABSENT, diagnoses=(DIAGNOSED,))


class TestJUnit:
    # Of Jenkins' junit-10.xsd, and of Surefire's, what they have in common: element → attributes
    # that it may have (those that it must have first), and the elements in it, in their order.
    RULES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
        "testsuites": ((), ("name", "time", "tests", "failures", "errors"), ("testsuite",)),
        "testsuite": (
            ("name", "tests", "failures", "errors", "skipped", "time"),
            ("id",),
            ("properties", "testcase", "system-out", "system-err"),
        ),
        "properties": ((), (), ("property",)),
        "property": (("name", "value"), (), ()),
        "testcase": (("name", "classname", "time"), (), ("skipped", "error", "failure")),
        "skipped": ((), ("message", "type"), ()),
        "error": ((), ("message", "type"), ()),
        "failure": ((), ("message", "type"), ()),
        "system-out": ((), (), ()),
    }

    def check(self, found: Element) -> None:
        must, may, inner = self.RULES[found.tag]
        assert set(must) <= set(found.attrib) <= {*must, *may}
        places = [inner.index(child.tag) for child in found]
        assert places == sorted(places), "in the order that the schema has"
        for name in {"tests", "failures", "errors", "skipped"} & set(found.attrib):
            assert found.attrib[name].isdecimal()
        assert re.fullmatch(r"[0-9.]+", found.attrib.get("time", "0"))
        for child in found:
            self.check(child)

    def parsed(self, shown: Report) -> Element:
        root = ElementTree.fromstring(shown.to_junit())
        self.check(root)
        return root

    def test_a_suite_for_each_artifact_and_a_case_for_each_row(self) -> None:
        forward = replace(PASSED, program="forward", artifact="forward.onnx", tensor="y")
        shown = report(PASSED, FAILED, forward, DIED, ABSENT)
        root = self.parsed(shown)
        assert root.attrib["tests"] == "5"
        suites = {suite.attrib["name"]: suite for suite in root}
        assert list(suites) == [
            "onnxruntime: gradient.onnx",
            "onnxruntime: forward.onnx",
            "torchscript: forward.pt, autograd",
            "aot",
        ]
        suite = suites["onnxruntime: gradient.onnx"]
        assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "1")
        names = [case.attrib["name"] for case in suite.iter("testcase")]
        assert names == [
            "gradient · export · grad/layers.0.D",
            "gradient · export · grad/layers.1.D",
        ]
        assert "2" in [p.attrib["value"] for p in suite.iter("property")]

    def test_each_verdict_has_its_element_with_reason_and_figures(self) -> None:
        root = self.parsed(EVERYTHING)
        (failure,) = root.iter("failure")
        assert failure.attrib["message"] == "off by 1"
        for word in ("largest error: 1", "bound: 4e-07", "--atol 1", "aten::mm", "wrong here"):
            assert word in str(failure.text)
        (error,) = root.iter("error")
        assert error.attrib["message"] == "killed by SIGSEGV"
        (skipped,) = root.iter("skipped")
        assert skipped.attrib["message"] == "not installed"
        (said,) = root.iter("system-out")
        assert "the runtime is at fault" in str(said.text)

    def test_names_of_any_characters_leave_it_well_formed(self) -> None:
        row = replace(FAILED, tensor=HOSTILE, case=HOSTILE, reason=HOSTILE, artifact=HOSTILE)
        root = self.parsed(report(row, bundle=HOSTILE, environment={HOSTILE: HOSTILE}))
        (case,) = root.iter("testcase")
        assert "<script>alert(1)</script>&amp;" in case.attrib["name"]
        assert "\x00" not in case.attrib["name"]

    def test_nothing_compared_is_an_error_there_too(self) -> None:
        root = self.parsed(report())
        assert root.attrib["errors"] == "1"
        assert [e.attrib["message"] for e in root.iter("error")] == ["nothing was compared"]
        truth = replace(PASSED, runtime=FLOAT64)
        assert [e.tag for e in self.parsed(report(truth)).iter("error")] == ["error"]


class TestMarkdown:
    def test_the_verdict_comes_first_then_tables_then_failures(self) -> None:
        text = EVERYTHING.to_markdown()
        assert text.startswith("### ❌ fuseport verify: fail\n")
        order = ["1 pass, 1 fail, 1 unsupported, 1 error", "the runtime is at fault"]
        order += ["| ❌ | onnxruntime | <code>gradient.onnx</code> |", "off by 1; would pass at"]
        order += ["killed by SIGSEGV", "not installed"]
        places = [text.index(html.unescape(part)) for part in order]
        assert places == sorted(places)

    def test_every_line_of_a_table_has_its_columns_whatever_the_names(self) -> None:
        row = replace(FAILED, tensor=HOSTILE, case=HOSTILE, reason=HOSTILE, artifact=HOSTILE)
        text = report(row, runtime_free(), bundle=HOSTILE, notes=(HOSTILE,)).to_markdown()
        columns = 0
        for line in text.splitlines():
            if line.startswith("|"):
                columns = columns or line.count("|")
                assert line.count("|") == columns, line
            else:
                columns = 0
        assert "<script" not in text
        assert "](" not in text
        assert "http://" not in text

    @pytest.mark.parametrize("limit", [0, 50, 300, 5000, 20_000, LIMIT])
    def test_it_is_never_longer_than_github_shows(self, limit: int) -> None:
        rows = [
            replace(FAILED, tensor=f"{i}.{'é|' * 300}", artifact=f"{i}" * 200, reason="ü" * 900)
            for i in range(2000)
        ]
        text = to_markdown(report(*rows, notes=("n" * 9000,) * 300), limit)
        assert len(text.encode()) <= limit
        if limit >= 300:
            assert "fail" in text.splitlines()[0]
            assert "--json" in text

    def test_a_large_report_fits_with_all_its_runtimes(self) -> None:
        rows = [replace(FAILED, tensor=f"t{i}", runtime=f"r{i % 8}") for i in range(20_000)]
        text = report(*rows).to_markdown()
        assert len(text.encode()) < 100_000
        assert all(f"| r{i} |" in text for i in range(8))
        assert "19900 more" in text


def runtime_free() -> Row:
    return replace(ABSENT, reason=HOSTILE)


def test_the_terminal_has_diagnoses_and_ends_after_a_screen_or_two() -> None:
    rows = [
        replace(FAILED, artifact=f"{i // 60}.onnx", tensor=f"grad/{i}", would_pass_at=float(i))
        for i in range(3000)
    ]
    diagnoses = [
        replace(DIAGNOSED, artifact=f"{i}.onnx", case=case, runtime=runtime)
        for i in range(40)
        for case, runtime in (("export", "onnxruntime"), ("odd", "onnxruntime"), ("odd", "other"))
    ]
    said = lines(report(*rows, diagnoses=tuple(diagnoses)))
    # One place of one artifact is told once.
    told = [line for line in said if "(the same in 2 more, 2 runtimes, 2 cases)" in line]
    assert len(told) == 5
    assert len(said) < 40
    assert any("begins at aten::mm in layers.1, backward: mm_7" in line for line in said)
    assert any("… and 35 more diagnoses" in line for line in said)
    assert any("… and 30 more of what is no pass" in line for line in said)
    of_one = [line for line in said if "fail: onnxruntime · 7.onnx · " in line]
    assert len(of_one) == 1
    assert of_one[0].endswith("(the worst of 60 rows, 60 tensors, all would pass at --atol 479)")
    assert said[-1] == "not equal: 3000 fail in 12 s"


def test_what_fails_together_is_one_line_and_a_few_are_a_line_each() -> None:
    died = replace(FAILED, verdict="error", runtime="libtorch", reason="killed by SIGSEGV")
    few = [replace(FAILED, tensor=f"grad/{i}") for i in range(3)]
    many = [replace(died, case=str(i), would_pass_at=None) for i in range(4)]
    other = replace(died, case="9", reason="killed by SIGABRT", would_pass_at=None)
    said = lines(report(*few, *many, other))
    assert [line.split(": ")[0] for line in said[1:-1]] == ["fail"] * 3 + ["error"] * 2
    assert said[-3].endswith("killed by SIGSEGV (the worst of 4 rows, 4 cases)")
    assert said[-2].endswith("killed by SIGABRT")
    far = [replace(row, tensor="x", would_pass_at=float("inf")) for row in few]
    assert "all would" not in lines(report(*few, *far))[1]


def test_a_diagnosis_is_of_what_was_beyond_its_bound() -> None:
    found = DIAGNOSED.divergence
    assert found is not None
    within = replace(found, max_abs_error=3e-7, bound=9e-7)
    for divergence, said in (
        (replace(within, max_abs_error=1e-6), "off by 1e-06 where 9e-07 is allowed"),
        (within, "beyond what is allowed in root mean square"),
    ):
        text = diagnosis_text(replace(DIAGNOSED, divergence=divergence))
        assert said in text
    assert "3e-07" not in text


def test_the_terminal_says_what_was_not_compared() -> None:
    lacking = [
        replace(ABSENT, runtime="ort", artifact="g.onnx", tensor=f"t{i}", reason="no kernel")
        for i in range(30)
    ]
    said = lines(report(PASSED, ABSENT, *lacking))
    assert said[-4:-2] == ["unsupported: aot: not installed",
                           "unsupported: ort · g.onnx: no kernel (30 rows)"]  # fmt: skip
    assert said[-2] == "nothing was compared in aot, ort: --strict makes that a mismatch"
    assert said[-1] == "equal within bounds: 1 pass, 31 unsupported in 12 s"
    assert lines(report(ABSENT))[-1] == (
        "no artifact could be compared, float64 alone with itself: 1 unsupported in 12 s"
    )
    refused = replace(ABSENT, runtime="eager", case="odd")
    assert (
        "nothing was compared in aot: --strict makes" in lines(report(PASSED, ABSENT, refused))[-2]
    )
    names = list(table(report(PASSED, ABSENT, refused)).columns[0].cells)
    assert [str(name).strip() for name in names][-4:] == ["aot", "all", "eager", "1 case"]
    died = replace(FAILED, verdict="error", runtime="libtorch", reason="killed by SIGSEGV")
    for others in ((), (died,)):  # which is no mismatch under --strict, but an error
        said = lines(report(PASSED, *others))
        assert not [line for line in said if "nothing was compared" in line]


def test_forms_of_backward_that_are_not_possible_are_a_line_each_on_a_screen() -> None:
    form = replace(PASSED, way="forms", tensor="of the opposite cotangents")
    of_file = [
        replace(form, runtime=runtime, artifact=f"gradient{suffix}")
        for runtime, suffix in [("ort", ".onnx"), ("ort+fused", ".onnx"), ("torchscript", ".pt")]
    ]
    of_autograd = replace(form, runtime="libtorch", artifact="forward.pt", way="autograd forms")
    all_but_one = [
        replace(of_autograd, runtime="eager", artifact="model", tensor=name)
        for name in FORMS if name != AT_ONCE
    ]  # fmt: skip
    shown = report(PASSED, *of_file, of_autograd, *all_but_one)
    assert lines(shown) == [
        "note: n",
        "note: 10 of 11 forms of backward not possible in gradient programs: no autograd",
        "note: 10 of 11 forms of backward not possible in libtorch: autograd is one call",
        "note: 1 of 11 forms of backward not possible in eager: too much memory",
        "equal within bounds: 15 pass in 12 s",
    ]
    told = json.loads(shown.to_json())["untried"]
    assert len(told) == 3
    assert "backward of a scalar loss, accumulated over two calls, of inputs used twice" in told[0]
    assert "to ask: gradient.onnx in ort, gradient.onnx in ort+fused, gradient.pt in t" in told[0]
    assert told[2].endswith("two sets of its gradients would take too much memory: model in eager")
    assert Report.from_json(shown.to_json()) == shown
    for whole in (shown.to_html(), shown.to_junit()):
        assert all(html.escape(sentence) in whole for sentence in told)


def test_what_is_printed_as_enough_is_enough() -> None:
    for value in (2.1849e-5, 1.0, 9.9951, 1234.6, 3e-39, 0.1 + 0.2):
        assert value <= float(rounded_up(value)) <= value * 1.011


def test_figures_are_short() -> None:
    shown = [figure(v) for v in (None, 0.0, 0.123, 9.999, 12.34, 5678.9, 1e6, float("inf"))]
    assert shown == ["", "0.00", "0.12", "10.00", "12", "5,679", "1.0e+06", "∞"]


@pytest.mark.parametrize(
    "change",
    [
        {"results": [{**vars(PASSED), "verdict": "fine"}]},
        {"results": [{**vars(PASSED), "tensor": 3}]},
        {"results": [{**vars(PASSED), "max_abs_error": "1"}]},
        {"results": [{**vars(PASSED), "bound": -1.0}]},
        {"results": [{**vars(PASSED), "atol_at_rtol": {"x": 1.0}}]},
        {"results": [{**vars(PASSED), "surprise": 1}]},
        {"summary": {"pass": 7, "fail": 0, "unsupported": 0, "error": 0}},
        {"seconds": "soon"},
        {"bundle": None},
        {"environment": []},
        {"bundle": "\ud800"},
        {"results": [{**vars(PASSED), "case": "\udfff"}]},
    ],
)
def test_a_report_that_was_tampered_with_is_refused(change: dict[str, Any]) -> None:
    content = json.loads(report(PASSED).to_json())
    assert Report.from_json(json.dumps(content)) == report(PASSED)
    with pytest.raises(CorruptInput):
        Report.from_json(json.dumps({**content, **change}))


def test_a_folder_whose_name_is_no_text_leaves_a_report_that_can_be_read() -> None:
    odd = report(PASSED, bundle="b\udce9")
    assert Report.from_json(odd.to_json()) == replace(odd, bundle="b?")


def test_a_file_that_nothing_was_compared_of_is_named() -> None:
    unseen = replace(
        ABSENT, runtime="onnxruntime", artifact="other.onnx", reason="it draws numbers"
    )
    said = lines(report(PASSED, unseen))
    assert f"nothing was compared of {unseen.artifact}: --strict makes that a mismatch" in said
    assert not any("nothing was compared" in line for line in lines(report(PASSED)))


def test_names_that_are_codes_of_emoji_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(None, ["the model comes from net.py:Two: give it again"])
    assert "net.py:Two: give" in capsys.readouterr().out


def test_no_tolerance_is_proposed_that_pardons_the_values_themselves() -> None:
    assert hint(FAILED) == "would pass at --atol 1"
    assert hint(replace(FAILED, scale=9.0)) == ""
