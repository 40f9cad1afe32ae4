"""A report as JUnit XML, as Jenkins, GitLab and Maven's Surefire read it.

One suite for each runtime, artifact and way, one test case for each case and tensor. Elements,
attributes and their order are those of the XSDs that Jenkins' xUnit plugin (junit-10.xsd) and
Surefire (surefire-test-report.xsd) publish.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from fuseport.exporter.verify.diagnosis import Diagnosis
from fuseport.exporter.verify.report.model import Report, Row
from fuseport.exporter.verify.report.parts import (
    diagnosis_text,
    figure,
    groups,
    hint,
    located,
    notes,
)

__all__ = ["to_junit"]

_TAGS = {"fail": "failure", "error": "error", "unsupported": "skipped"}
_NOTHING = Row("fuseport", None, "*", "*", "run", "*", "*", "error", "nothing was compared")
# What XML 1.0 has no way to write, not even as a reference.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """The report as an XML document."""
    if report.verdict == "nothing compared":  # which to a CI system would be a success
        report = replace(report, results=(*report.results, _NOTHING))
    counts = report.summary
    root = Element(
        "testsuites",
        name="fuseport verify",
        time=f"{report.seconds:.3f}",
        tests=str(len(report.results)),
        failures=str(counts["fail"]),
        errors=str(counts["error"]),
    )
    for number, (name, rows) in enumerate(_suites(report).items()):
        root.append(_suite(name, rows, number, report))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suites(report: Report) -> dict[str, list[Row]]:
    """The rows of each suite, by its name."""
    suites: dict[str, list[Row]] = {}
    for group in groups(report):
        name = group.runtime + (f": {group.name}" if group.name else "")
        suites.setdefault(name, []).extend(group.rows)
    return suites


def _suite(name: str, rows: Sequence[Row], number: int, report: Report) -> Element:
    verdicts = [row.verdict for row in rows]
    # Of the time that a single artifact or tensor took nothing is known.
    suite = Element(
        "testsuite",
        name=_text(name),
        tests=str(len(verdicts)),
        failures=str(verdicts.count("fail")),
        errors=str(verdicts.count("error")),
        skipped=str(verdicts.count("unsupported")),
        time="0",
        id=str(number),
    )
    properties = SubElement(suite, "properties")
    for key, value in _properties(report):
        SubElement(properties, "property", name=_text(key), value=_text(value))
    places = {_place(row) for row in rows}
    diagnoses = [d for d in report.diagnoses if _place(d) in places]
    for row in rows:
        suite.append(_case(row, name, [d for d in diagnoses if _place(d) == _place(row)]))
    if diagnoses:
        SubElement(suite, "system-out").text = _text("\n".join(map(diagnosis_text, diagnoses)))
    return suite


def _case(row: Row, suite: str, diagnoses: list[Diagnosis]) -> Element:
    said = " · ".join(part for part in (row.program, row.case, row.tensor) if part != "*")
    # Dots make folders of names in Jenkins and Maven: those of files' and tensors' names must not.
    classname = suite.replace(".", "_")
    case = Element("testcase", name=_text(said or "*"), classname=_text(classname), time="0")
    if row.verdict != "pass":
        reason = row.reason or row.verdict
        found = SubElement(case, _TAGS[row.verdict], message=_text(reason), type=row.verdict)
        text = [located(row), reason, *_figures(row), *map(diagnosis_text, diagnoses)]
        found.text = _text("\n".join(text))
    return case


def _figures(row: Row) -> Iterator[str]:
    named = {
        "largest error": row.max_abs_error,
        "bound": row.bound,
        "root mean square error": row.rms_error,
        "its bound": row.rms_bound,
        "the model's own largest error in this dtype": row.baseline_error,
        "the truth's largest value": row.scale,
    }
    for name, value in named.items():
        if value is not None:
            yield f"{name}: {value:.6g}"
    if row.share is not None:
        yield f"error / bound: {figure(row.share)}"
    if pardoned := hint(row):
        yield pardoned


def _properties(report: Report) -> Iterator[tuple[str, str]]:
    yield "bundle", report.bundle
    yield "manifest_sha256", report.manifest_sha256
    for key, value in report.environment.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", str(of)) for inner, of in value.items())
        elif value is not None:
            yield key, str(value)
    yield from ((f"note.{number}", note) for number, note in enumerate(notes(report), 1))


def _place(of: Row | Diagnosis) -> tuple[str, str, str, str, str]:
    return of.runtime, of.artifact, of.program, of.way, of.case


def _text(value: Any) -> str:
    return _UNWRITABLE.sub("\ufffd", str(value))
