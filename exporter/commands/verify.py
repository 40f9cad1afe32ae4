"""`fuseport verify`: artifacts against their model."""

import sys
from pathlib import Path

import click

from fuseport.exporter.commands._faces import FACES, TOLERANCES, Faces
from fuseport.exporter.commands._shared import (
    OPS,
    device_option,
    loading,
    names_option,
    one_of,
    progress,
    write,
)
from fuseport.exporter.errors import UsageError

__all__ = ["verify"]

_VERIFY = """\b
Examples:
  fuseport verify bundle/
  fuseport verify bundle/ --runtime onnxruntime --json r.json --html r.html
  fuseport verify bundle/ --atol 1e-5 --atol logits:1e-4
  fuseport verify bundle/ --artifact simplified.onnx
  fuseport verify bundle/ --model net.py:Net --strict
  fuseport verify bundle/ --seeds 5 --json report.json --resume
  fuseport verify bundle/ --save-outputs there/     # and elsewhere: --load-outputs there/
  fuseport verify bundle/ --repro repro/
  fuseport verify bundle/ --device cuda --reference cpu
  fuseport verify bundle/ --self-test
\b
Exit codes: 0 pass, 1 mismatch, 2 usage, 3 refused as unsafe, 4 unreadable or corrupt input,
5 something needed is missing, 6 a runtime crashed, 7 reading or writing failed, 8 export failed.
"""


def _no_shim(_: click.Context, __: click.Parameter, given: str | None) -> None:
    if given is not None:
        raise UsageError("--shim is of export: a bundle says which stand-ins its model wants")


@click.command(epilog=_VERIFY)
@click.argument("bundle", type=click.Path(path_type=Path))
@names_option("--runtime", what="Default: all that are installed.")
@click.option(
    "--artifact",
    type=click.Path(path_type=Path),
    help="A file made or changed elsewhere, compared instead of the bundle's own.",
)
@click.option(
    "--program",
    metavar="NAME",
    help="Compare forward, gradient or step alone; of --artifact: what it holds, if its name does "
    "not say.",
)
@click.option("--model", metavar="MODULE:CALLABLE", help="Your own code that builds the model.")
@OPS
@FACES
@TOLERANCES
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many sets of values for each case; the first is the export's.",
)
@click.option(
    "--timeout", type=float, default=900.0, show_default=True, help="Seconds for one job."
)
@click.option("--memory", type=float, help="GiB that a runtime's process may take.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many runtimes run at once. Default: as many as memory has room for, four at most.",
)
@device_option("Where runtimes compute.")
@click.option(
    "--reference",
    type=click.Choice(["cpu"]),
    default="cpu",
    show_default=True,
    expose_value=False,
    help="Where the truth in float64 is computed.",
)
@click.option(
    "--trust-native",
    multiple=True,
    metavar="SHA256",
    help="Of a manifest or file whose machine code may be loaded, from now on.",
)
@click.option(
    "--resume", is_flag=True, help="Do what is left of the same verification, which was ended."
)
@click.option(
    "--save-outputs",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep what runtimes give, for another machine to compare.",
)
@click.option(
    "--load-outputs",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compare what --save-outputs kept, and run nothing.",
)
@click.option(
    "--no-localise",
    is_flag=True,
    help="Do not look into failures: where they begin, and who is at fault.",
)
@click.option(
    "--repro",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write scripts that show what failed with torch, onnx and onnxruntime alone.",
)
@click.option(
    "--self-test",
    is_flag=True,
    help="Verify the verification: plant bugs in copies of the files and in ops, one at a time.",
)
@click.option("--strict", is_flag=True, help="Count what is unsupported as a mismatch.")
@click.option("--shim", hidden=True, expose_value=False, callback=_no_shim)
def verify(
    bundle: Path,
    runtime: tuple[str, ...],
    artifact: Path | None,
    program: str | None,
    model: str | None,
    own: str | None,
    json_: Path | None,
    html: Path | None,
    junit: Path | None,
    markdown: Path | None,
    atol: tuple[str, ...],
    rtol: tuple[str, ...],
    seeds: int,
    timeout: float,
    memory: float | None,
    jobs: int | None,
    device: str,
    trust_native: tuple[str, ...],
    resume: bool,
    save_outputs: Path | None,
    load_outputs: Path | None,
    no_localise: bool,
    repro: Path | None,
    self_test: bool,
    strict: bool,
) -> None:
    """Compare the artifacts of BUNDLE with its model: outputs and gradients."""
    faces = Faces(json_, html, junit, markdown)
    faces.check()
    other = (artifact, program, atol, rtol, html, junit, markdown, trust_native, jobs)
    if self_test and (any(other) or resume or save_outputs or load_outputs or repro or seeds != 1):
        raise UsageError(
            "--self-test takes --runtime, --model, --ops, --device, --json and limits alone"
        )
    with progress() as tell:
        with loading(tell):
            from fuseport.exporter import api
            from fuseport.exporter.program import KINDS
            from fuseport.exporter.verify.run import Limits
            from fuseport.exporter.verify.tolerances import parsed

        if no_localise and repro is not None:
            raise UsageError("--repro is of what --no-localise leaves out: give one of them")
        limits = Limits(timeout, None if memory is None else int(memory * 2**30))
        if self_test:
            power = api.self_test(
                bundle,
                runtime=runtime or None,
                model=model,
                ops=own,
                limits=limits,
                device=device,
                progress=tell,
            )
        else:
            report = api.verify(
                bundle,
                runtime=runtime or None,
                artifact=artifact,
                program=None if program is None else one_of(program, KINDS, "program"),
                model=model,
                ops=own,
                tolerance=parsed(atol, rtol),
                seeds=range(seeds),
                limits=limits,
                jobs=jobs,
                device=device,
                trust_native=trust_native,
                resume=resume,
                save_outputs=save_outputs,
                load_outputs=load_outputs,
                localise=not no_localise,
                repro=repro,
                progress=tell,
            )
    if self_test:
        write(power, json_, power.lines())
        sys.exit(power.exit_code())
    sys.exit(faces.write(report, strict=strict))
