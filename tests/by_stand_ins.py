"""Models whose code wants packages that are not here: exported by stand-ins, and verified."""

from collections.abc import Sequence
from pathlib import Path

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.report import Report

__all__ = ["RUNTIMES", "verified"]

RUNTIMES = ("eager", "torchscript", "onnxruntime")


def verified(
    folder: Path,
    saved: tuple[Path, str],
    inputs: Sequence[str],
    used: Sequence[str],
    differentiated: Sequence[str] = RUNTIMES,
) -> tuple[Bundle, Report]:
    """The bundle of a model, and its report, in which nothing fails.

    Args:
        folder: for the bundle.
        saved: a checkpoint, and its code as `--model` names it.
        inputs: as `--input-shapes` has them.
        used: the stand-ins that `--shim auto` must have used.
        differentiated: the runtimes that have gradients.
    """
    checkpoint, model = saved
    bundle = api.export(
        checkpoint,
        folder,
        model=model,
        shim="auto",
        inputs=parse_inputs(list(inputs)),
        format=["torchscript", "onnx"],
    )
    assert bundle.manifest["architecture"]["config"]["shims"] == list(used)
    report = api.verify(bundle.folder, model=model, runtime=RUNTIMES)
    assert report.exit_code() == 0, report.failures()
    passed = {(row.runtime, row.program) for row in report.results if row.verdict == "pass"}
    assert {(runtime, "forward") for runtime in RUNTIMES} <= passed
    assert {(runtime, "gradient") for runtime in differentiated} <= passed
    return bundle, report
