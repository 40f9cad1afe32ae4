"""`fuseport export`: a checkpoint into a bundle."""

import shlex
from pathlib import Path

import click

from fuseport.exporter.commands._shared import (
    OPS,
    device_option,
    loading,
    names_option,
    one_of,
    progress,
    there,
)
from fuseport.exporter.errors import UsageError

__all__ = ["export"]

_EXPORT = """\b
Examples:
  fuseport export model.ckpt -o bundle/
  fuseport export hf_folder/ -o bundle/ --force
  fuseport export vim.pth -o bundle/ --weights model_ema
  fuseport export model.ckpt -o b/ --format onnx --program gradient --opset 18 --dtype bfloat16
  fuseport export model.ckpt -o b/ --program forward,step
  fuseport export model.ckpt -o b/ --format aot_inductor --device cuda
  fuseport export model.ckpt -o b/ --model net.py:Net --input-shapes 'x:[batch,length,64]'
  fuseport export unet.pth -o b/ --model net.py:Net --input-shapes 'x:[1,3,h,w]' --size h=64,w=96
  fuseport export vim.pth -o b/ --model vim/models_mamba.py:VisionMamba --shim auto …
  fuseport export model.ckpt -o b/ --model net.py:Net --inputs samples.safetensors
"""


@click.command(epilog=_EXPORT)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the bundle."
)
@click.option(
    "--weights",
    metavar="NAME",
    help="Which of several in CHECKPOINT: model or model_ema for example, or a prefix of names.",
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    help="A LoRA adapter that PEFT saved, for CHECKPOINT's model.",
)
@click.option("--model", metavar="MODULE:CALLABLE", help="Your own code that builds the model.")
@OPS
@click.option(
    "--shim",
    multiple=True,
    metavar="auto|NAME,…",
    help="Stand-ins for CUDA-only packages that --model imports, and for CUDA; auto: for those not "
    "installed.",
)
@click.option(
    "--input-shapes",
    multiple=True,
    metavar="NAME:[DIM,…]",
    help="Inputs of your own model, once for each; names are dynamic dimensions.",
)
@click.option(
    "--inputs",
    "samples",
    type=click.Path(path_type=Path),
    help="A safetensors file with example inputs by name; they are compared on, too.",
)
@click.option(
    "--dynamic",
    multiple=True,
    metavar="NAME:{I:DIM,…},…",
    help="Dynamic dimensions of such inputs; if absent, they are found.",
)
@click.option(
    "--size",
    multiple=True,
    metavar="DIM=N,…",
    help="Of dynamic dimensions in the export's example; by default they are small.",
)
@names_option(
    "--format",
    "format_",
    what="If absent, exported_program, onnx and torchscript; `all` for really all.",
)
@names_option(
    "--program",
    what="forward, gradient, or step: a token of a language model; the first two if absent.",
)
@click.option(
    "--lowering",
    type=click.Choice(["portable", "native"]),
    default="portable",
    show_default=True,
    help="native: also ONNX files with operators that opset 23 or ONNX Runtime has for fused ops.",
)
@device_option("That AOTInductor compiles for; all other files serve any.")
@click.option("--opset", type=int, metavar="N", help="Of ONNX's standard operators, 18 to 23.")
@click.option("--dtype", metavar="DTYPE", help="Convert the weights to it, bfloat16 for example.")
@click.option("--seed", default=0, show_default=True, help="Of example inputs and samples.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
def export(
    checkpoint: Path,
    output: Path,
    weights: str | None,
    adapter: Path | None,
    model: str | None,
    shim: tuple[str, ...],
    own: str | None,
    input_shapes: tuple[str, ...],
    samples: Path | None,
    dynamic: tuple[str, ...],
    size: tuple[str, ...],
    format_: tuple[str, ...],
    program: tuple[str, ...],
    lowering: str,
    device: str,
    opset: int | None,
    dtype: str | None,
    seed: int,
    force: bool,
) -> None:
    """Export CHECKPOINT, a file or folder, into a bundle."""
    there(checkpoint)
    if adapter is not None:
        there(adapter)
    with progress() as tell:
        with loading(tell):
            from fuseport.exporter import api, formats
            from fuseport.exporter.models.given import parse_dynamic, parse_sizes, read_given
            from fuseport.exporter.models.user import parse_inputs
            from fuseport.exporter.program import KINDS

        if input_shapes and (samples or dynamic):
            raise UsageError("--input-shapes says it all: leave --inputs and --dynamic out")
        wanted = _formats(format_, formats.FORMATS) or formats.default()
        if lowering == "native":
            wanted = tuple(dict.fromkeys((*wanted, "onnx_native")))
        bundle = api.export(
            checkpoint,
            output,
            weights=weights,
            adapter=adapter,
            model=model,
            shim=shim,
            ops=own,
            inputs=parse_inputs(input_shapes) or None,
            given=None if samples is None else read_given(samples),
            dynamic=parse_dynamic(dynamic) if dynamic else None,
            sizes=parse_sizes(",".join(size)) if size else None,
            format=wanted,
            programs=[one_of(name, KINDS, "program") for name in program] or api.PROGRAMS,
            opset=formats.DEFAULT_OPSET if opset is None else opset,
            device=device,
            dtype=dtype,
            seed=seed,
            force=force,
            progress=tell,
        )
    manifest = bundle.manifest
    for note in manifest["notes"]:
        click.echo(f"note: {note}")
    counted = manifest["parameters"]
    count, trained = counted["count"], counted["trainable"]
    said = f"{count:,} parameters" + (f", {trained:,} of them trainable" if trained < count else "")
    click.echo(f"{manifest['architecture']['name']}, {said} → {output}/")
    for artifact in manifest["artifacts"]:
        if artifact.get("native") == []:
            click.echo(f"note: {artifact['file']}: ONNX has no operator of its own for what it has")
    for name, entry in manifest["files"].items():
        if not name.startswith("samples/"):
            click.echo(f"  {name:<22} {_size(entry['bytes']):>10}")
    click.echo(f"Next: {_next(output, model, own)}")


def _next(bundle: Path, model: str | None, own: str | None) -> str:
    """The command that verifies the bundle, with the user's own code, to be copied."""
    words = ["fuseport", "verify", str(bundle)]
    words += ["--model", model] if model else []
    words += ["--ops", own] if own else []
    return shlex.join(words)


def _formats(names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    return known if "all" in names else tuple(one_of(n, (*known, "all"), "format") for n in names)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
