"""Small models made at random, exported with two dynamic dimensions, and held against themselves.

    python tests/benchmarks/random_models.py --count 50
    python tests/benchmarks/random_models.py --first 1234 --count 1 --keep folder/ --verify

A model is a few statements of `random_statements.py` over (batch, length, 6), each of which runs at
several sizes by plain torch. It is code in a file, with a checkpoint, as a user has it. Artifacts
are run in this process at a few sizes, and their outputs and gradients compared with the model's,
to a thousandth of their scale. What differs is compared as `fuseport verify` does, with float64,
which takes minutes; with `--verify` all is. What comes of it is printed: `equal`, `refused`, with
what was said, or `wrong`, which ends in exit code 1.
"""

import argparse
import copy
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuseport.exporter import api, checkpoint, formats, models, runtimes
from fuseport.exporter.capture import capture
from fuseport.exporter.capture.prepare import prepared
from fuseport.exporter.errors import ExportFailed, UsageError
from fuseport.exporter.formats import Options
from fuseport.exporter.models.model import Model as Built
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import Program, named_outputs
from fuseport.tests.benchmarks.random_drawing import SIZES, WIDTH, Model, drawn

__all__ = ["main", "tried"]

RUNTIMES = ("torchscript", "exported_program", "onnxruntime")
FORMATS = ("torchscript", "exported_program", "onnx")
INPUTS = f"x:[batch,length,{WIDTH}]"
NEAR = 1e-3

Results = Mapping[str, Tensor | None]


def tried(model: Model, folder: Path, *, verify: bool = False) -> tuple[str, str]:
    """What comes of a model, in a word and in words."""
    code, weights = folder / "net.py", folder / "net.pth"
    code.write_text(model.text, encoding="utf-8")
    torch.manual_seed(model.number)
    torch.save(model.module().state_dict(), weights)
    name, specs = f"{code}:Net", parse_inputs([INPUTS])
    try:
        if verify:
            bundle = api.export(
                weights, folder / "bundle", model=name, inputs=specs, format=FORMATS
            )
            report = api.verify(bundle.folder, model=name, runtime=("eager", *RUNTIMES))
            failures = report.failures()
            if report.exit_code() == 0:
                return "equal", f"{len(report.results)} comparisons"
            return "wrong", f"{len(failures)} of {len(report.results)}: {failures[0]}"
        loaded = checkpoint.load(weights)
        built, _ = models.from_checkpoint(loaded, code=name, inputs=specs)
        built, _ = prepared(built, None, None, None, None, 0, lambda _: None)
        programs = list(capture(built, ("forward", "gradient"), 0, lambda _: None))
        wrong, compared = [], 0
        for program in programs:
            for found in _compared(built, program, folder):
                compared += 1
                wrong += [] if found is None else [found]
    except (ExportFailed, UsageError) as error:
        return "refused", str(error).splitlines()[0]
    if wrong or not compared:
        return "wrong", f"{len(wrong)} of {compared}: {(wrong or ['nothing was compared'])[0]}"
    return "equal", f"{compared} comparisons"


def _compared(built: Built, program: Program, folder: Path) -> Iterator[str | None]:
    """What is wrong with each result of each artifact of a program, None for nothing."""
    entry = {
        "kind": program.kind,
        **{k: [{"name": s.name} for s in getattr(program, k)] for k in ("inputs", "outputs")},
    }
    for format_name, runtime in zip(FORMATS, RUNTIMES, strict=True):
        writer = formats.get(format_name)
        file = folder / f"{program.kind}{writer.SUFFIX}"
        writer.write(program, file, Options(folder / f"{program.kind}.safetensors"))
        session = runtimes.get(runtime).load(file, entry)
        for size in SIZES:
            x = torch.randn(*size, WIDTH, generator=torch.Generator().manual_seed(sum(size)))
            truth, seeds = _truth(built, x)
            ways = [session.run({"x": x, **(seeds if program.kind == "gradient" else {})})]
            if program.kind == "forward" and runtimes.get(runtime).AUTOGRAD:
                bare = {n.removeprefix("cotangent_"): s for n, s in seeds.items()}
                for _ in range(2):  # from its second call on, TorchScript is another
                    ways.append(session.differentiate({"x": x}, bare))  # type: ignore[attr-defined]
            for results in ways:
                yield from (
                    None if _near(value, truth[name]) else f"{file.name} {name} at {size}"
                    for name, value in results.items()
                )


def _truth(built: Built, x: Tensor) -> tuple[Results, dict[str, Tensor]]:
    """Outputs and gradients of the model itself, and the cotangents."""
    module = copy.deepcopy(built.module)
    leaf = x.clone().requires_grad_()
    outputs = named_outputs(module(leaf))
    seeds = {
        f"cotangent_{n}": torch.randn(o.shape, generator=torch.Generator().manual_seed(7))
        for n, o in outputs.items()
    }
    roots = {n: o for n, o in outputs.items() if o.requires_grad}
    wanted = {"x": leaf, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(
        list(roots.values()),
        list(wanted.values()),
        [seeds[f"cotangent_{n}"] for n in roots],
        allow_unused=True,
    )
    named = {f"grad/{n}": g for n, g in zip(wanted, gradients, strict=True)}
    return {**{n: o.detach() for n, o in outputs.items()}, **named}, seeds


def _near(value: Tensor | None, truth: Tensor | None) -> bool:
    if value is None or truth is None:
        given = value if truth is None else truth
        return given is None or not given.count_nonzero()
    if value.shape != truth.shape:
        return False
    scale = truth.abs().max().item()
    return torch.allclose(value.double(), truth.double(), rtol=NEAR, atol=NEAR * max(scale, 0.1))


def _judged(model: Model, folder: Path, *, verify: bool) -> tuple[str, str]:
    """The same, where of what is wrong `verify` has the last word: of ties more than one is right,
    and not all sizes are those of a program.
    """
    word, words = "", ""
    for thorough in (True,) if verify else (False, True):
        try:
            word, words = tried(model, folder, verify=thorough)
        except Exception as error:  # whatever is raised is a finding
            word, words = "wrong", f"raises {error!r}"
        if word != "wrong":
            break
    return word, words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the code of what is not equal")
    parser.add_argument("--verify", action="store_true", help="compare as `fuseport verify` does")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for number in range(chosen.first, chosen.first + chosen.count):
        model, begin = drawn(number), time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            word, words = _judged(model, Path(temporary), verify=chosen.verify)
        counts[word] += 1
        print(f"{number} {word} {time.monotonic() - begin:.0f} s: {words}", flush=True)
        if chosen.keep and word != "equal":
            chosen.keep.mkdir(parents=True, exist_ok=True)
            (chosen.keep / f"{number}.py").write_text(model.text, encoding="utf-8")
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    if not counts:
        print("nothing was tried", file=sys.stderr)
        return 6
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
