"""Cases as files, for engines in any language: `fuseport cases dump`.

One safetensors file for each case of the vocabulary and of the fused ops, with its inputs, its
cotangents, and in float64 its outputs and gradients; and `index.json`, which says what they are.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fuseport.exporter.bundle.staging import replaced
from fuseport.exporter.errors import CorruptInput, StorageError, UsageError
from fuseport.exporter.program.float64 import Float64
from fuseport.exporter.runtimes._layouts import apart
from fuseport.exporter.verify.modes import References
from fuseport.ops import OPS
from fuseport.ops.spec import FLOATING, Case, OpSpec, as_tuple
from fuseport.ops.vocabulary import FAMILIES, OPERATORS
from fuseport.ops.vocabulary.case import PlainCase

__all__ = ["INDEX", "SCHEMA", "Entry", "dump", "entries"]

SCHEMA = "fuseport.cases/1"
INDEX = "index.json"

_ABOUT = (
    "Each file holds input/<name> and cotangent/<output>, and, in float64, output/<name> and "
    "gradient/<input>: the vector-Jacobian product of the cotangents. `arguments` says which input "
    "an argument is: one that two arguments name has the sum of their gradients. Inputs of "
    "`without_gradient` have none. Values are contiguous; `layout` says how runtimes get them. "
    "Complex values lie in the file as pairs of real ones, along a last dimension that `shape` "
    "leaves out."
)


@dataclass(frozen=True)
class Entry:
    """A case that can be dumped.

    Attributes:
        family: of the operator; `fused` for the operators of fused ops.
        operator, name: of the operator, and of the case within it.
        case: it.
        spec: of the fused op; None for a plain operator.
    """

    family: str
    operator: str
    name: str
    case: PlainCase | Case
    spec: OpSpec | None = None

    @property
    def file(self) -> str:
        """Within the folder."""
        name = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{self.operator}/{name}.safetensors"


def entries(only: Sequence[str] = ()) -> tuple[Entry, ...]:
    """The cases of plain operators, and those of fused ops.

    Args:
        only: names of operators, or of fused ops, which have several; all if empty.

    Raises:
        UsageError: there is nothing of a name.
    """
    plain = [
        Entry(family, case.operator, case.name, case)
        for family, module in FAMILIES.items()
        for case in module.CASES
    ]
    fused = [
        Entry("fused", case.operator, case.name, case, spec)
        for spec in OPS.values()
        for case in spec.cases
    ]
    known = {*(entry.operator for entry in (*plain, *fused)), *OPS}
    for name in only:
        if name not in known:
            raise UsageError(f"{name} is not an operator; there are: {', '.join(sorted(known))}")
    return tuple(
        entry
        for entry in (*plain, *fused)
        if not only or entry.operator in only or (entry.spec and entry.spec.name in only)
    )


def dump(
    target: Path,
    *,
    only: Sequence[str] = (),
    dtype: str = "float32",
    seed: int = 0,
    force: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> int:
    """Write cases to a folder, which appears whole or not at all.

    The same arguments give the same bytes, on one machine and version of torch.

    Args:
        target: the folder.
        only: as of `entries`.
        dtype: of floating inputs and cotangents; cases that do not have it are left out.
        seed: of all values.
        force: replace cases that are there.
        progress: told of each operator.

    Returns:
        How many cases were written.

    Raises:
        UsageError: a name is unknown, or something is there already.
        StorageError: writing failed.
    """
    kind = getattr(torch, dtype, None)
    if kind not in FLOATING:
        raise UsageError(f"dtype {dtype}: choose float32, float64, float16 or bfloat16")
    wanted = [entry for entry in entries(only) if kind in entry.case.dtypes]
    with replaced(target, lambda: _check(target, force=force)) as folder, _one_thread():
        cases = []
        for i, entry in enumerate(wanted):
            if not i or wanted[i - 1].operator != entry.operator:
                progress(f"writing {entry.operator}")
            cases.append(_write(entry, folder, kind, seed))
        index = {
            "schema": SCHEMA,
            "about": _ABOUT,
            "dtype": dtype,
            "seed": seed,
            "torch": torch.__version__.partition("+")[0],
            "operators": dict(_operators(wanted)),
            "cases": cases,
        }
        text = json.dumps(index, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
    return len(cases)


def _check(target: Path, *, force: bool) -> None:
    if target.is_symlink():
        raise UsageError(f"{target}: a symbolic link; name the folder itself")
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target}: a file is there; choose another folder")
    if any(target.iterdir()):
        if not _is_dump(target):
            raise UsageError(f"{target}: holds something other than cases; choose another folder")
        if not force:
            raise UsageError(f"{target}: cases are there; --force replaces them")


def _is_dump(folder: Path) -> bool:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return str(index["schema"]).startswith("fuseport.cases/")
    except (FileNotFoundError, IsADirectoryError, ValueError, TypeError, KeyError):
        return False
    except OSError as error:
        raise StorageError(f"{folder / INDEX}: cannot be read: {error.strerror}") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine is set to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _operators(wanted: Sequence[Entry]) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in {entry.operator: entry for entry in wanted}.values():
        said: dict[str, Any] = {"family": entry.family}
        if entry.spec is None:
            operator = OPERATORS[entry.operator]
            said |= {"outputs": list(operator.outputs), "about": operator.about}
        else:
            fused = entry.spec.operator(entry.operator)
            said |= {"op": entry.spec.name, "outputs": list(fused.outputs), "schema": fused.schema}
        yield entry.operator, said


@dataclass(frozen=True)
class _Call:
    """A case in a dtype: a function of tensors, which gives outputs by name."""

    inputs: Mapping[str, Tensor]
    attributes: Mapping[str, Any]
    arguments: Mapping[str, str]
    differentiable: Sequence[str]
    layout: str
    note: str
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    cotangent: Callable[[str, Tensor], Tensor | None]


def _plain(case: PlainCase, dtype: torch.dtype, seed: int) -> _Call:
    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        operator = OPERATORS[case.operator]
        result = operator.function(**case.arguments(tensors))
        return dict(result) if isinstance(result, Mapping) else {operator.outputs[0]: result}

    inputs = case.make(dtype, seed)
    return _Call(
        inputs,
        case.attributes,
        {**{name: name for name in inputs}, **case.shared},
        case.differentiable,
        case.layout,
        case.note,
        run,
        lambda name, output: case.cotangent(name, output.shape, dtype, seed),
    )


def _fused(case: Case, spec: OpSpec, dtype: torch.dtype, seed: int) -> _Call:
    operator = spec.operator(case.operator)
    made = case.make(dtype, seed)
    tensors = {k: v for k, v in made.items() if isinstance(v, Tensor)}
    attributes = {k: v for k, v in made.items() if k not in tensors}
    differentiable, outputs = spec.differentiable(operator)
    generator = torch.Generator().manual_seed(seed)

    def run(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = as_tuple(operator.reference(*{**made, **given}.values()))
        return dict(zip(operator.outputs, results, strict=True))

    def cotangent(name: str, output: Tensor) -> Tensor | None:
        if name not in outputs:
            return None
        wide = torch.complex128 if output.is_complex() else torch.float64
        narrow = {torch.complex128: torch.complex64}.get(wide, dtype)
        return torch.randn(output.shape, generator=generator, dtype=wide).to(narrow)

    same = {name: name for name in tensors}
    layout = "contiguous" if all(t.is_contiguous() for t in tensors.values()) else "its own"
    return _Call(tensors, attributes, same, differentiable, layout, "", run, cotangent)


def _write(entry: Entry, folder: Path, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Write the file of a case; returns what the index says of it."""
    if isinstance(entry.case, PlainCase):
        call = _plain(entry.case, dtype, seed)
    else:
        assert entry.spec is not None
        call = _fused(entry.case, entry.spec, dtype, seed)
    leaves = {
        n: _wide(t.detach()).requires_grad_(n in call.differentiable) if _floats(t) else t
        for n, t in call.inputs.items()
    }
    with References(), Float64(), torch.enable_grad():
        outputs = call.run(leaves)
    seeds = {n: call.cotangent(n, t) for n, t in outputs.items() if _floats(t)}
    cotangents = {n: t for n, t in seeds.items() if t is not None}
    roots = {n: outputs[n] for n in cotangents if outputs[n].requires_grad}
    wanted = {n: leaf for n, leaf in leaves.items() if leaf.requires_grad}
    gradients: dict[str, Tensor | None] = dict.fromkeys(wanted)
    if roots and wanted:
        values = [_wide(cotangents[n]) for n in roots]
        found = torch.autograd.grad(
            list(roots.values()), list(wanted.values()), values, allow_unused=True
        )
        gradients = dict(zip(wanted, found, strict=True))
    tensors = {
        **{f"input/{n}": t for n, t in call.inputs.items()},
        **{f"cotangent/{n}": t for n, t in cotangents.items()},
        **{f"output/{n}": t for n, t in outputs.items()},
        **{f"gradient/{n}": t for n, t in gradients.items() if t is not None},
    }
    file = folder / entry.file
    file.parent.mkdir(exist_ok=True)
    if file.exists():
        raise CorruptInput(f"{entry.operator}: two cases are called like {entry.name}")
    save_file(apart({n: _stored(t.detach()) for n, t in tensors.items()}), file)
    return {
        "operator": entry.operator,
        "name": entry.name,
        "file": entry.file,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "attributes": dict(call.attributes),
        "arguments": dict(call.arguments),
        "layout": call.layout,
        "note": call.note,
        "without_gradient": [n for n in call.inputs if gradients.get(n) is None],
        "tensors": {
            n: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for n, t in tensors.items()
        },
    }


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _stored(tensor: Tensor) -> Tensor:
    return (
        torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    ).contiguous()
