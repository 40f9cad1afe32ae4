"""One case of the vocabulary as a model: its module, its truth, its programs, its artifacts."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fuseport.exporter import formats
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models import user
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import Program, TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.verify import plan, truth
from fuseport.exporter.verify.sample import Sample
from fuseport.ops.vocabulary import CASES, OPERATORS
from fuseport.ops.vocabulary.case import PlainCase

__all__ = ["Subject", "alone", "module", "name_of", "prepare"]

_CODE = f"{__name__}:module"
_DTYPE = torch.float32


@dataclass(frozen=True)
class Subject:
    """A case that is ready to be run.

    Attributes:
        name: of the case, unique in the vocabulary.
        sample: truth, and what else is known of the results.
        programs: by kind, what runtimes are told of it.
        weights: a file with no weights in it, which stands for the model itself.
        artifacts: files, by format and kind of program.
        refused: why there is none.
    """

    name: str
    sample: Sample
    programs: Mapping[str, Mapping[str, Any]]
    weights: Path
    artifacts: Mapping[tuple[str, str], Path]
    refused: Mapping[tuple[str, str], str]


class _Plain(nn.Module):
    """Calls an operator, its inputs by position."""

    def __init__(self, case: PlainCase) -> None:
        super().__init__()
        self._case = case

    def forward(self, *tensors: Tensor) -> Any:
        """Tensors by name where there are several outputs."""
        given = dict(zip(self._case.tensors, tensors, strict=True))
        return OPERATORS[self._case.operator].function(**self._case.arguments(given))


def name_of(case: PlainCase) -> str:
    """Of a case, unique in the vocabulary."""
    return f"{case.operator}: {case.name}"


def module(case: str) -> nn.Module:
    """The module of the case of that name: what the runtime `eager` builds again."""
    return _Plain(next(c for c in CASES if name_of(c) == case))


def prepare(case: PlainCase, folder: Path, wanted: Sequence[str], seed: int) -> Subject:
    """Compute truth, capture the programs, write the artifacts.

    Args:
        case: in float32.
        folder: empty, for this case alone.
        wanted: names of formats.
        seed: of the values.
    """
    name = name_of(case)
    inputs = case.make(_DTYPE, seed)
    specs = tuple(
        TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), _high(t))
        for n, t in inputs.items()
    )
    config = {
        "code": _CODE,
        "hyper_parameters": {"case": name},
        "inputs": [[spec.name, spec.dtype, list(spec.dims), spec.high] for spec in specs],
    }
    model = Model(_Plain(case).eval(), user.NAME, config, specs, {})
    with torch.no_grad():
        result = model.module(*inputs.values())
    named = result if isinstance(result, Mapping) else {"output": result}
    seeds = {n: case.cotangent(n, t.shape, _DTYPE, seed) for n, t in named.items()}
    given = folder / "given.safetensors"
    passed = {f"input/{n}": t for n, t in inputs.items()}
    save_file(passed | {f"cotangent/{n}": t for n, t in seeds.items()}, given)
    planned = plan.Case(name, {}, case.layout, seed)
    (sample,) = truth.compute(model, [planned], folder, given={name: given})
    weights = folder / "weights.safetensors"
    save_file({}, weights)
    shared = {"architecture": {"name": user.NAME, "config": config}, "code": _CODE, "ops": []}
    outputs = [{"name": n, "dtype": str(t.dtype).removeprefix("torch.")} for n, t in named.items()]
    described = {"inputs": [asdict(spec) for spec in specs], "outputs": outputs, **shared}
    programs: dict[str, dict[str, Any]] = {"forward": described, "gradient": described}
    artifacts: dict[tuple[str, str], Path] = {}
    refused: dict[tuple[str, str], str] = {}
    forward: Program | None = None
    for kind in ("forward", "gradient"):
        try:
            if kind == "forward":
                program = forward = capture_forward(model.module, inputs, specs)
            elif forward is not None:
                program = capture_gradient(forward)
            else:
                raise ExportFailed(refused[wanted[0], "forward"] if wanted else "")
        except ExportFailed as error:
            refused |= {(format_name, kind): str(error) for format_name in wanted}
            continue
        programs[kind] = {
            **shared,
            "inputs": [asdict(spec) for spec in program.inputs],
            "outputs": [asdict(spec) for spec in program.outputs],
        }
        for format_name in wanted:
            writer = formats.get(format_name)
            file = folder / f"{kind}{writer.SUFFIX}"
            try:
                writer.write(program, file, formats.Options(weights))
                artifacts[format_name, kind] = file
            except ExportFailed as error:
                refused[format_name, kind] = str(error)
    return Subject(name, sample, programs, weights, artifacts, refused)


def alone() -> None:
    """Make this process one for each core, that does nothing but export small programs."""
    torch.set_num_threads(1)
    gc.freeze()


def _high(tensor: Tensor) -> int | None:
    """An exclusive upper bound of integers; programs ask for one."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return None
    return int(tensor.max()) + 1 if tensor.numel() else 1
