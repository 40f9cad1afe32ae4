"""A report as JSON, version 1, and back."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.verify.compare import Verdict
from fuseport.exporter.verify.diagnosis import Diagnosis
from fuseport.exporter.verify.report.model import Report, Row
from fuseport.exporter.verify.report.untried import untried

__all__ = ["SCHEMA", "from_json", "to_json"]

SCHEMA = "fuseport.report/1"

_TEXTS = ("runtime", "artifact", "program", "way", "case", "tensor", "verdict")
_TEXTS_OR_NULL = ("provider", "reason")
_FIGURES = tuple(f.name for f in fields(Row) if f.type in (float | None, "float | None"))


def to_json(report: Report) -> str:
    """The report as JSON. Infinity and NaN, which JSON lacks, are null."""
    content = {
        "schema": SCHEMA,
        "bundle": report.bundle,
        "manifest_sha256": report.manifest_sha256,
        "environment": dict(report.environment),
        "seconds": round(report.seconds, 3),
        "spent": {part: round(seconds, 3) for part, seconds in report.spent.items()},
        "notes": list(report.notes),
        "untried": [absent.sentence for absent in untried(report.results)],
        "results": [_finite(asdict(row)) for row in report.results],
        "diagnoses": [_finite(asdict(diagnosis)) for diagnosis in report.diagnoses],
        "summary": report.summary,
    }
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    # A folder's name may have bytes that are no text, which are halves of surrogate pairs here.
    return text.encode(errors="replace").decode()


def from_json(text: str) -> Report:
    """A report that `to_json` wrote.

    Raises:
        CorruptInput: it is not one, or its summary is not that of its rows.
    """
    try:
        content = json.loads(text)
        if "\\ud" in text.lower():
            # Half of a surrogate pair can be escaped in JSON, but be written nowhere.
            json.dumps(content, ensure_ascii=False).encode()
        if content.pop("schema") != SCHEMA:
            raise ValueError(f"not of the schema {SCHEMA}")
        summary = content.pop("summary")
        content.pop("untried", None)  # the rows tell it again
        content["results"] = tuple(map(_row, content["results"]))
        content["notes"] = tuple(map(str, content["notes"]))
        content["diagnoses"] = tuple(map(Diagnosis.from_json, content.get("diagnoses", ())))
        report = Report(**content)
        if not isinstance(report.bundle, str) or not isinstance(report.environment, dict):
            raise ValueError("bundle or environment is of another type")
        if not _is_figure(report.seconds):
            raise ValueError("seconds is not a number")
        if not all(map(_is_figure, report.spent.values())):
            raise ValueError("what seconds were spent on is no number")
        if summary != report.summary:
            raise ValueError("its summary does not count its rows")
        return report
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptInput(f"no report of fuseport: {error}") from error


def _row(content: Mapping[str, Any]) -> Row:
    row = Row(**content)
    if row.verdict not in get_args(Verdict):
        raise ValueError(f"{row.verdict!r} is no verdict")
    for name in (*_TEXTS, *_TEXTS_OR_NULL):
        value = getattr(row, name)
        if not isinstance(value, str) and (value is not None or name in _TEXTS):
            raise TypeError(f"{name} is {value!r}")
    figures = [getattr(row, name) for name in _FIGURES] + [*(row.atol_at_rtol or {}).values()]
    if wrong := [value for value in figures if value is not None and not _is_figure(value)]:
        raise TypeError(f"{wrong[0]!r} is not a figure of an error")
    for rtol in row.atol_at_rtol or {}:
        float(rtol)
    return row


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
